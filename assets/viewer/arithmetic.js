// The arithmetic of one head, for the token looked at: q, k, scores, softmax, and what the head reads by it;
// then the factor that this layer is in the rollout product. The formulas are those of vit/anatomy.py.
//
// q, k and v come from Python, once a layer and head, while the drawer is open; the rest is worked out here.

const SHARP = 2 // pixels of a canvas for each of the page's
const BARS_WIDTH_PX = 192
const BARS_HEIGHT_PX = 56
const SHEET_PX = 192 // 24 for each of 8 patches: enough for a finger
const LEAST_SHEET_CELL_PX = 6

function createArithmetic(root, app) {
  const { grid, layers: L } = app.data
  const summary = element("p", { class: "summary" })
  const q = figureOf("q", barsCanvas())
  const k = figureOf("k", barsCanvas())
  const product = figureOf("q times k", barsCanvas())
  const scores = sheetFigure("Scores", grid)
  const row = sheetFigure("Softmax: the row", grid)
  const read = figureOf("What the head reads", barsCanvas())
  const factor = sheetFigure("The factor of rollout", grid)
  const rowCells = createCells({
    label: "The row of attention. Arrow keys move through it, Enter looks from there.",
    rows: grid[0],
    columns: grid[1],
    name: (index) => tokenLabel(1 + index, grid),
    point: (index, event) => pointAt(index === null ? null : 1 + index, event),
    choose: (index) => app.change({ token: 1 + index }),
  })
  row.board.append(rowCells.grid)
  const cls = element("button", { type: "button", class: "cls", onclick: () => app.change({ token: 0 }) })
  cls.onpointerenter = (event) => pointAt(0, event)
  cls.onfocus = () => pointAt(0)
  cls.onpointerleave = cls.onblur = () => pointAt(null)
  row.cls.replaceWith(cls)
  row.cls = cls
  const squares = Array.from({ length: L }, (_, layer) =>
    element("button", {
      type: "button", class: "square", text: String(layer + 1), "aria-label": `Layer ${layer + 1} of the product`,
      onclick: () => app.change({ layer }),
    }),
  )
  factor.figure.insertBefore(element("div", { class: "squares", role: "group", "aria-label": "Factors of the product" }, ...squares), factor.caption)
  const steps = element("div", { class: "steps" }, ...[q, k, product, scores, row, read, factor].map((part) => part.figure))
  root.replaceChildren(summary, steps)
  steps.hidden = true

  let failed = false
  let wanted = "" // what was asked for last
  let answer = null
  let drawn = ""
  let key = null // the token of the row that is pointed at

  // Without an event it was the keyboard, and the app says what is there.
  function pointAt(token, event) {
    key = token
    app.point(token, event)
    app.draw()
  }

  async function fetchFor(place, layer, head) {
    wanted = place
    failed = false
    root.classList.add("waiting")
    if (!answer) summary.textContent = "Fetching the numbers of this head …"
    try {
      const found = await app.ask("arithmetic", { layer, head })
      if (!found || wanted !== place) return
      answer = { ...found, place, q: floatsOf(found.q), k: floatsOf(found.k), v: floatsOf(found.v) }
    } catch (error) {
      if (wanted !== place) return
      failed = true
      answer = null
      steps.hidden = true
      summary.textContent = error.message
    }
    root.classList.remove("waiting")
    app.draw()
  }

  function update() {
    if (!isOpenDrawer(root)) return
    const { state, data } = app
    const head = state.head ?? 0
    const place = `${data.id} ${state.layer} ${head}`
    if (place !== wanted) fetchFor(place, state.layer, head)
    if (!answer || answer.place !== place) return
    const token = key === null ? app.shown().token : state.token // who points at the row would move it away
    // while the picture shows who looks at the token, weights are a column, and the product is of rows
    const fused = state.head === null ? app.weights(state.layer, null, token, "raw", false) : null
    const ink = inkOf(root)
    const now = [place, token, key, state.head, fused !== null, data.discard, data.fusion, ink.primary, ink.text].join()
    if (now === drawn) return
    drawn = now
    draw(token, fused, ink)
  }

  function draw(token, fused, ink) {
    const { d, tokens: N } = answer
    const sum = sumOf(answer, token)
    const strongest = largest(sum.row, 1)[0]
    const at = key ?? strongest
    const [from, to] = [tokenLabel(token, grid), tokenLabel(at, grid)]
    steps.hidden = false
    summary.textContent =
      `Layer ${answer.layer + 1}, head ${answer.head + 1}${app.state.head === null ? " (the picture shows all heads; these are the numbers of the first)" : ""}: ` +
      `how ${from} comes to look at ${to}${key === null ? ", where it looks most" : ""}. Point at the row for another patch.`

    const keys = answer.k.subarray(at * d, (at + 1) * d)
    const products = sum.q.map((value, i) => value * keys[i])
    paintBars(q, sum.q, ink, `q of ${from}, what it asks for: ${d} numbers, ${rangeOf(sum.q)}.`)
    paintBars(k, keys, ink, `k of ${to}, what it offers: ${rangeOf(keys)}.`)
    const total = products.reduce((a, b) => a + b, 0)
    paintBars(product, products, ink, `Number by number. The sum ${signed(total)}, divided by √${d}, is the score ${signed(sum.scores[at])}.`)
    const most = Math.max(...sum.scores.map(Math.abs)) || 1
    paintSheet(scores, sum.scores.map((score) => score / most), grid, at, ink)
    tellSheet(scores, signed(sum.scores[0]), `q · k / √${d} with each of ${N} tokens: ${rangeOf(sum.scores)}. Grey is below 0.`)
    paintSheet(row, sum.row.map((weight) => weight / sum.row[strongest]), grid, at, ink)
    tellSheet(row, percent(sum.row[0]), `e to the power of each score, divided by the sum of all: ${to} gets ${percent(sum.row[at])}.`)
    cls.setAttribute("aria-label", `CLS gets ${percent(sum.row[0])}; look from CLS`)
    rowCells.cells.forEach((cell, index) => cell.setAttribute("aria-label", `${tokenLabel(1 + index, grid)}: ${percent(sum.row[1 + index])}`))
    paintBars(read, sum.read, ink, `The v of every token times its weight in the row, added up: ${rangeOf(sum.read)}. The heads' numbers side by side go on to the layer's output.`)
    drawFactor(token, app.state.head === null ? fused : sum.row, ink)
  }

  // The token's own part would leave the others in the dark: they have a scale of their own, which is said.
  function drawFactor(token, attention, ink) {
    const { layer, head } = answer
    squares.forEach((square, l) => {
      square.setAttribute("aria-pressed", String(l === layer))
      square.classList.toggle("above", l > layer)
    })
    factor.figure.classList.toggle("waiting", !attention)
    if (!attention) {
      const missing = "The heads of this layer are being fetched."
      return tellSheet(factor, "", missing)
    }
    const step = factorOf(attention, token, app.data.discard)
    const most = Math.max(...step.filter((_, i) => i !== token))
    paintSheet(factor, step.map((weight, i) => (i === token ? 1 : weight / (most || 1))), grid, token, ink)
    const heads = app.state.head === null ? `the ${app.data.fusion} of all heads` : `head ${head + 1}`
    const leaves = app.data.discard > 0 ? `, its weakest ${percent(app.data.discard)} left out` : ""
    const text =
      `Layer ${layer + 1} multiplies by half the token itself plus half its attention (${heads}${leaves}), divided by the sum. ` +
      `${capital(tokenLabel(token, grid))} keeps ${percent(step[token])}; the others are drawn on the scale of their largest, ${percent(most)}.`
    tellSheet(factor, percent(step[0]), text)
  }

  // Opening again is trying again.
  function open() {
    if (failed) wanted = ""
    app.draw()
  }
  return { open, update }
}

// One token's q, its scores with all tokens, their softmax, and the sum of v by those weights.
function sumOf({ q, k, v, d, tokens: N }, token) {
  const own = q.subarray(token * d, (token + 1) * d)
  const scores = new Float32Array(N)
  for (let j = 0, at = 0; j < N; j++) {
    let sum = 0
    for (let i = 0; i < d; i++, at++) sum += own[i] * k[at]
    scores[j] = sum / Math.sqrt(d)
  }
  const top = scores.reduce((a, b) => Math.max(a, b))
  const row = scores.map((score) => Math.exp(score - top))
  const total = row.reduce((a, b) => a + b)
  const read = new Float32Array(d)
  for (let j = 0, at = 0; j < N; j++) {
    row[j] /= total
    for (let i = 0; i < d; i++, at++) read[i] += row[j] * v[at]
  }
  return { q: own, scores, row, read }
}

// A row of attention as rollout multiplies by it; as vit.attention: of equals the earlier column goes first.
function factorOf(attention, token, discard) {
  const N = attention.length
  const dropped = Math.min(Math.floor(discard * N + 1e-9), N - 1)
  const step = Float32Array.from(attention, (weight) => (1 - RESIDUAL) * weight)
  const order = Array.from(attention, (_, i) => i).sort((a, b) => attention[a] - attention[b] || a - b)
  for (const i of order.slice(0, dropped)) step[i] = 0
  step[token] += RESIDUAL
  const total = step.reduce((a, b) => a + b)
  return step.map((weight) => weight / total)
}

const signed = (value) => value.toFixed(2).replace("-", "−")
const capital = (text) => text[0].toUpperCase() + text.slice(1)
const rangeOf = (values) => `from ${signed(Math.min(...values))} to ${signed(Math.max(...values))}`

function figureOf(title, canvas) {
  const caption = element("figcaption", {})
  return { title, canvas, caption, figure: element("figure", {}, element("p", { class: "title", text: title }), canvas, caption) }
}

function barsCanvas() {
  const canvas = element("canvas", { role: "img", width: BARS_WIDTH_PX * SHARP, height: BARS_HEIGHT_PX * SHARP })
  canvas.style.width = `${BARS_WIDTH_PX}px`
  return canvas
}

// A canvas with a cell for each patch, and beside it the number of CLS, which is in no place of the picture.
function sheetFigure(title, [GY, GX]) {
  const cell = Math.max(LEAST_SHEET_CELL_PX, Math.floor(SHEET_PX / Math.max(GY, GX)))
  const canvas = element("canvas", { role: "img", width: GX * cell * SHARP, height: GY * cell * SHARP })
  canvas.style.width = `${GX * cell}px`
  const board = element("div", { class: "patches" }, canvas)
  board.style.setProperty("--columns", GX)
  board.style.setProperty("--rows", GY)
  const cls = element("span", { class: "cls" })
  const caption = element("figcaption", {})
  const figure = element("figure", {}, element("p", { class: "title", text: title }), element("div", { class: "sheet" }, cls, board), caption)
  return { title, canvas, board, cls, caption, figure }
}

function tellSheet(part, cls, text) {
  part.cls.replaceChildren(element("span", { text: "CLS" }), element("span", { text: cls }))
  part.caption.textContent = text
  part.canvas.setAttribute("aria-label", `${part.title}. ${text}`)
}

function paintBars(part, values, ink, text) {
  const { canvas } = part
  const context = canvas.getContext("2d")
  const most = Math.max(...values.map(Math.abs)) || 1
  const [step, middle] = [canvas.width / values.length, canvas.height / 2]
  context.clearRect(0, 0, canvas.width, canvas.height)
  values.forEach((value, i) => {
    const height = (value / most) * (middle - 2)
    context.fillStyle = value > 0 ? ink.primary : ink.below
    context.fillRect(i * step, middle - Math.max(0, height), Math.max(1, step - SHARP), Math.abs(height))
  })
  context.fillStyle = ink.text
  context.fillRect(0, middle - SHARP / 2, canvas.width, SHARP / 2)
  part.caption.textContent = text
  canvas.setAttribute("aria-label", `${part.title}, as bars. ${text}`)
}

// Shares of all tokens, -1 to 1; those below 0 in grey. The marked token has a frame, unless it is CLS.
function paintSheet({ canvas, cls }, shares, [GY, GX], marked, ink) {
  const context = canvas.getContext("2d")
  const [width, height] = [canvas.width / GX, canvas.height / GY]
  context.clearRect(0, 0, canvas.width, canvas.height)
  for (let p = 0; p < GY * GX; p++) {
    const share = shares[p + 1]
    context.globalAlpha = Math.min(1, Math.abs(share))
    context.fillStyle = share > 0 ? ink.primary : ink.below
    context.fillRect((p % GX) * width, Math.floor(p / GX) * height, width - 1, height - 1)
  }
  context.globalAlpha = 1
  cls?.classList.toggle("marked", marked === 0)
  if (!marked) return
  context.strokeStyle = ink.text
  context.lineWidth = 2 * SHARP
  context.strokeRect(((marked - 1) % GX) * width + SHARP, Math.floor((marked - 1) / GX) * height + SHARP, width - 2 * SHARP, height - 2 * SHARP)
}

// The theme's colours, for canvases: what is drawn with them is drawn again when they change.
function inkOf(root) {
  const style = getComputedStyle(root)
  const text = style.getPropertyValue("--st-text-color").trim() || style.color
  return { text, below: text, primary: style.getPropertyValue("--st-primary-color").trim() || style.color }
}

const isOpenDrawer = (root) => root.closest("details")?.open ?? true
