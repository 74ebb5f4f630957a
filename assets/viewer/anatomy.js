// What the model is made of: its stages, the filters that make tokens of patches, which positions it takes for
// alike, and whether its heads differ. Made by vit/anatomy.py, asked for once a picture, when the drawer opens.

const FILTERS_WIDTH_PX = 320
const FILTER_COLUMNS = 16
const HEADS_WIDTH_PX = 384

function createAnatomy(root, app) {
  const summary = element("p", { class: "summary" })
  const body = element("div", {})
  root.replaceChildren(summary, body)
  let failed = false
  let wanted = "" // the picture it was asked for
  let parts = []

  async function fetchFor(id) {
    wanted = id
    failed = false
    parts = []
    body.replaceChildren()
    summary.textContent = "Looking into the model …"
    try {
      const found = await app.ask("anatomy", {})
      if (!found || wanted !== id) return
      const total = found.parameters.toLocaleString("en")
      summary.textContent = `${total} parameters, the numbers that training sets. A picture passes through these stages:`
      const [stages, filters, positions, heads] = [stageBoxes, filterSheet, positionMap, headMap].map((make) => make(found, app))
      parts = [stages, positions, heads]
      body.replaceChildren(stages.element, element("div", { class: "steps" }, filters.element, positions.element, heads.element))
    } catch (error) {
      if (wanted !== id) return
      failed = true
      summary.textContent = error.message
    }
    app.draw()
  }

  function update() {
    if (!isOpenDrawer(root)) return
    if (wanted !== app.data.id) fetchFor(app.data.id)
    if (!parts.length) return
    const ink = inkOf(root)
    for (const part of parts) part.update(ink)
  }

  // Opening again is trying again.
  function open() {
    if (failed) wanted = ""
    app.draw()
  }
  return { open, update }
}

// A box for each stage. A layer's is a button, and stands out while that layer is looked at.
function stageBoxes({ stages, parameters }, app) {
  const layers = []
  const boxes = stages.map((stage) => {
    const content = [
      element("strong", { text: capital(stage.name) }),
      element("span", { class: "shape", text: stage.shape_in === stage.shape_out ? stage.shape_out : `${stage.shape_in} → ${stage.shape_out}` }),
      element("span", { text: stage.parameters ? `${stage.parameters.toLocaleString("en")} parameters, ${percent(stage.parameters / parameters)}` : "no parameters" }),
      ...(stage.parts.length ? stage.parts : [stage]).map((part) => partOf(part, part !== stage)),
    ]
    if (!stage.parts.length) return element("li", {}, element("div", { class: "stage-box" }, ...content))
    const layer = layers.length
    layers.push(element("button", { type: "button", class: "stage-box", onclick: () => app.change({ layer }) }, ...content))
    return element("li", {}, layers[layer])
  })
  const update = () => layers.forEach((box, layer) => setPressed(box, layer === app.state.layer))
  return { element: element("ol", { class: "stages" }, ...boxes), update }
}

function partOf(part, named) {
  const what = element("span", { class: "what", text: named ? `${capital(part.name)}: ${part.what}` : part.what })
  if (named) what.append(element("span", { text: ` ${part.parameters.toLocaleString("en")} parameters.` }))
  return what
}

function setPressed(control, pressed) {
  if (control.getAttribute("aria-pressed") !== String(pressed)) control.setAttribute("aria-pressed", String(pressed))
}

function filterSheet({ filters, filter_count: count, filters_in_all: all, patch_px: side }) {
  const values = bytesOf(filters)
  const columns = Math.min(FILTER_COLUMNS, count)
  const canvas = element("canvas", { role: "img", class: "crisp", width: columns * (side + 1) - 1, height: Math.ceil(count / columns) * (side + 1) - 1 })
  canvas.style.width = `${canvas.width * Math.max(1, Math.floor(FILTERS_WIDTH_PX / canvas.width))}px`
  const context = canvas.getContext("2d")
  const image = context.createImageData(canvas.width, canvas.height)
  for (let i = 0; i < count * side * side; i++) {
    const filter = Math.floor(i / side ** 2)
    const x = (filter % columns) * (side + 1) + (i % side)
    const y = Math.floor(filter / columns) * (side + 1) + (Math.floor(i / side) % side)
    image.data.set([values[3 * i], values[3 * i + 1], values[3 * i + 2], 255], 4 * (y * canvas.width + x))
  }
  context.putImageData(image, 0, 0)
  const many = count < all ? `The ${count} strongest of ${all} filters` : `All ${count} filters, the strongest first`
  const text = `${many}: what each number of a token measures in its patch of ${side} x ${side} px. Grey counts nothing; bright and dark, or a colour and its opposite, count against each other.`
  canvas.setAttribute("aria-label", `Patch filters. ${text}`)
  const part = figureOf("Patch filters", canvas)
  part.caption.textContent = text
  return { element: part.figure }
}

// How alike the position of the token looked at is to those of all patches, laid out as the picture.
function positionMap({ grid, positions }, app) {
  const values = positions && bytesOf(positions)
  const P = grid[0] * grid[1]
  const part = sheetFigure("Positions", grid)
  part.cls.remove()
  let drawn = ""
  function update(ink) {
    const { token } = app.shown()
    const now = [token, ink.primary, ink.text].join()
    if (now === drawn) return
    drawn = now
    const isHere = values && token > 0
    const shares = isHere ? Array.from(values.subarray((token - 1) * P, token * P), (value) => (value / 255) * 2 - 1) : new Array(P).fill(0)
    paintSheet({ canvas: part.canvas }, [0, ...shares], grid, isHere ? token : 0, ink)
    part.board.hidden = !isHere
    part.caption.textContent = captionOf(isHere, token, shares)
    part.canvas.setAttribute("aria-label", `Positions. ${part.caption.textContent}`)
  }
  function captionOf(isHere, token, shares) {
    if (!values) return `This grid has ${P} patches: how alike their positions are would be too much to send here.`
    if (!isHere) return "CLS stands in no place of the picture. Point at a patch to see which positions the model takes for alike."
    const others = largest(shares.map((share, i) => (i === token - 1 ? -2 : share)), P)
    const [most, least] = [others[0], others[P - 2]]
    const nearest = P > 1 ? ` Most like it: ${tokenLabel(1 + most, grid)} (${signed(shares[most])}); least: ${tokenLabel(1 + least, grid)} (${signed(shares[least])}).` : ""
    return `How alike the model takes the position of ${tokenLabel(token, grid)} and each other: 1 the same, 0 unrelated, below 0 (grey) opposite.${nearest}`
  }
  return { element: part.figure, update }
}

// Every head against every other. One stop for the Tab key: arrows move, Enter or a click opens the row's head.
function headMap({ layers: L, heads: H, head_similarity: text }, app) {
  const n = L * H
  const title = "Do heads differ?"
  if (!text) {
    const note = element("figcaption", { text: `This model has ${n} heads: too many to compare them all here.` })
    return { element: element("figure", {}, element("p", { class: "title", text: title }), note), update() {} }
  }
  const values = bytesOf(text)
  const alike = (i, j) => values[i * n + j] / 255
  const nameOf = (i) => `layer ${Math.floor(i / H) + 1}, head ${(i % H) + 1}`
  const cell = Math.max(2, Math.floor(HEADS_WIDTH_PX / n)) * SHARP
  const place = (i) => i * cell + Math.floor(i / H) * SHARP // a line's room between layers
  const side = place(n - 1) + cell
  const canvas = element("canvas", { role: "img", width: side, height: side, "aria-label": `How alike ${n} heads look at this picture, each against each` })
  const control = element("button", { type: "button", class: "heads" }, canvas)
  control.style.width = `${side / SHARP}px`
  const live = element("p", { class: "live" })
  const caption = element("figcaption", { text: summaryOf() })
  const figure = element("figure", { class: "wide" }, element("p", { class: "title", text: title }), control, live, caption)
  const sheet = document.createElement("canvas") // without the frame, which moves
  sheet.width = sheet.height = side
  let at = null, stop = [0, 0], drawn = ""

  function summaryOf() {
    let sum = 0, most = null, least = null
    for (let i = 0; i < n; i++) {
      for (let j = i + 1; j < n; j++) {
        sum += alike(i, j)
        if (!most || alike(i, j) > alike(...most)) most = [i, j]
        if (!least || alike(i, j) < alike(...least)) least = [i, j]
      }
    }
    if (!most) return "There is one head only."
    const said = (pair) => `${pair.map(nameOf).join(" and ")} (${alike(...pair).toFixed(2)})`
    return `1: two heads look at the same patches of this picture, 0: at no patch in common. On average ${((2 * sum) / n / (n - 1)).toFixed(2)}; most alike ${said(most)}, least ${said(least)}.`
  }

  const sentence = ([i, j]) => `${capital(nameOf(i))} and ${nameOf(j)}: ${alike(i, j).toFixed(2)}`
  const open = ([i]) => app.change({ layer: Math.floor(i / H), head: i % H })

  function pairAt(event) {
    const box = canvas.getBoundingClientRect()
    const index = (share) => {
      const position = share * side
      const layer = Math.min(L - 1, Math.max(0, Math.floor(position / (H * cell + SHARP))))
      const head = Math.floor((position - place(layer * H)) / cell)
      return layer * H + Math.min(H - 1, Math.max(0, head))
    }
    return [index((event.clientY - box.top) / box.height), index((event.clientX - box.left) / box.width)]
  }

  function move(pair) {
    at = pair
    if (pair) stop = pair
    app.draw()
  }
  control.onpointermove = (event) => move(pairAt(event))
  control.onpointerleave = () => move(null)
  control.onfocus = () => control.matches(":focus-visible") && move(stop)
  control.onblur = () => move(null)
  control.onclick = (event) => open(event.detail ? pairAt(event) : stop) // detail 0: by Enter
  control.onkeydown = (event) => {
    const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }
    if (!(event.key in moves)) return
    event.preventDefault()
    event.stopPropagation()
    move(stop.map((index, axis) => Math.min(n - 1, Math.max(0, index + moves[event.key][axis]))))
    app.say(sentence(stop))
  }

  function update(ink) {
    const chosen = app.state.head === null ? null : app.state.layer * H + app.state.head
    const colors = [ink.primary, ink.text].join()
    const now = [at, chosen, colors].join()
    if (now === drawn) return
    if (!drawn.endsWith(colors)) paintAll(ink)
    drawn = now
    const context = canvas.getContext("2d")
    context.clearRect(0, 0, side, side)
    context.drawImage(sheet, 0, 0)
    context.strokeStyle = context.fillStyle = ink.text
    context.lineWidth = SHARP
    if (chosen !== null) context.strokeRect(SHARP / 2, place(chosen) - SHARP / 2, side - SHARP, cell + SHARP)
    if (at) {
      const [y, x] = at.map(place)
      context.lineWidth = 2 * SHARP
      context.strokeRect(x - SHARP, y - SHARP, cell + 2 * SHARP, cell + 2 * SHARP)
    }
    live.textContent = at ? `${sentence(at)}. A click opens the first.` : "Point at a place, or move by the arrow keys: a row and a column for each head."
    control.setAttribute("aria-label", `How alike heads are. ${sentence(stop)}. Arrow keys move, Enter opens the first.`)
  }

  function paintAll(ink) {
    const context = sheet.getContext("2d")
    context.clearRect(0, 0, side, side)
    context.fillStyle = ink.primary
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < n; j++) {
        context.globalAlpha = alike(i, j)
        context.fillRect(place(j), place(i), cell, cell)
      }
    }
  }
  return { element: figure, update }
}
