// Layers by heads as thumbnails on one canvas, and a column of all heads fused. Pointing previews, a click opens,
// a double click shows one head alone.

const LEAST_THUMB_PX = 28
const MOST_THUMB_PX = 56
const THUMB_GAP_PX = 4
const BAND_PX = 3 // a band holds the heads of a layer together
const PADDING_PX = 8 // of the dark panel, as in viewer.css
const FUSED_GAP_PX = 8 // the fused column stands apart

function createThumbnails(root, app) {
  const { layers: L, heads: H, grid, size } = app.data
  const columns = H + 1
  const headOf = (index) => (index % columns === H ? null : index % columns)
  const layerOf = (index) => Math.floor(index / columns)
  const canvas = element("canvas", { role: "img", "aria-label": `${L} layers by ${H} heads as thumbnails, and all heads together, each lit where it looks` })
  const names = element("div", { class: "column-names", "aria-hidden": "true" })
  const rows = element("div", { class: "row-names", "aria-hidden": "true" })
  const frame = element("div", { class: "thumb outline chosen", "aria-hidden": "true" })
  const marks = element("div", { class: "marks", "aria-hidden": "true" })
  const cells = createCells({
    label: "Layers down, heads across. Arrow keys preview, Enter opens, Shift and Enter shows one head alone.",
    rows: L,
    columns,
    gap: FUSED_GAP_PX,
    name: (index) => thumbName(layerOf(index), headOf(index)),
    point: (index) => app.preview(index === null ? null : { layer: layerOf(index), head: headOf(index) }),
    choose: (index) => app.cause.toggle(layerOf(index), headOf(index)) || app.open(layerOf(index), headOf(index)),
    twice: (index) => headOf(index) !== null && app.alone(layerOf(index), headOf(index)),
  })
  const board = element("div", { class: "board" }, canvas, marks, frame, cells.grid)
  const strip = element("div", { class: "strip" }, names, rows, board)
  root.replaceChildren(strip)
  const context = canvas.getContext("2d")
  let layout = null, image = null, surface = null, drawn = ""

  function thumbName(layer, head) {
    const said = head === null ? `layer ${layer + 1}, all heads` : `layer ${layer + 1}, head ${head + 1}`
    return said + app.cause.markOf(layer, head)
  }

  // In CSS pixels. The cells of the grid lie over the thumbnails exactly, gaps included.
  function measure() {
    const label = 52
    const room = root.clientWidth - 2 * PADDING_PX - label - FUSED_GAP_PX
    const cell = Math.max(LEAST_THUMB_PX, Math.floor(Math.min(room / columns, MOST_THUMB_PX)))
    const ratio = size[1] / size[0]
    const width = Math.max(8, Math.round((cell - THUMB_GAP_PX) * Math.min(1, ratio)))
    const height = Math.max(8, Math.round((cell - THUMB_GAP_PX) / Math.max(1, ratio)))
    const scale = Math.min(2, Math.max(1, Math.round(devicePixelRatio)))
    return { label, cell, width, height, row: height + THUMB_GAP_PX + BAND_PX, scale }
  }

  function resize() {
    const next = measure()
    if (layout && Object.keys(next).every((key) => next[key] === layout[key]) && surface) return
    layout = next
    const { label, cell, width, height, row, scale } = layout
    canvas.width = (columns * cell + FUSED_GAP_PX) * scale
    canvas.height = L * row * scale
    board.style.width = `${columns * cell + FUSED_GAP_PX}px`
    board.style.height = `${L * row}px`
    strip.style.setProperty("--label", `${label}px`)
    strip.style.setProperty("--cell", `${cell}px`)
    strip.style.setProperty("--row", `${row}px`)
    strip.style.setProperty("--fused-gap", `${FUSED_GAP_PX}px`)
    image = context.createImageData(canvas.width, canvas.height)
    surface = createSurface(app.image, width * scale, height * scale, grid, false)
    names.replaceChildren(...Array.from({ length: columns }, (_, c) => element("span", { text: c === H ? "all" : String(c + 1) })))
    rows.replaceChildren(...Array.from({ length: L }, (_, l) => element("span", { text: `layer ${l + 1}` })))
    drawn = ""
  }

  const left = (column) => column * layout.cell + (column === H ? FUSED_GAP_PX : 0) + THUMB_GAP_PX / 2
  const top = (layer) => layer * layout.row + BAND_PX

  function update() {
    resize()
    const { state } = app
    const token = app.pointed ?? state.token
    const key = `${app.data.id} ${state.method} ${state.looked_at} ${token} ${state.draw} ${strengthOf(state)} ${state.mass} ${state.scale} ${state.alone ? `${state.layer}/${state.head}` : ""} ${app.version}`
    if (key !== drawn) {
      drawn = key
      paintAll(token)
    }
    const shown = app.shown()
    const column = shown.head ?? H
    frame.style.cssText = `left:${left(column) - 2}px;top:${top(shown.layer) - 2}px;width:${layout.width + 4}px;height:${layout.height + 4}px`
    names.childNodes.forEach((name, c) => name.classList.toggle("current", c === column))
    rows.childNodes.forEach((name, l) => name.classList.toggle("current", l === shown.layer))
    strip.classList.toggle("switching", app.cause.isSwitching())
  }

  function paintAll(token) {
    const { state } = app
    const shares = new Float32Array(grid[0] * grid[1])
    const found = app.sheet(token) // L * (H + 1) rows, null where a map is not here yet
    const stride = 4 * canvas.width
    image.data.fill(0)
    const missing = []
    found.forEach((weights, index) => {
      const [layer, column] = [layerOf(index), index % columns]
      const at = Math.round(top(layer) * layout.scale) * stride + 4 * Math.round(left(column) * layout.scale)
      const dimmed = state.alone && (layer !== state.layer || column !== state.head)
      if (!weights) missing.push(index)
      const best = weights ? app.topFor(weights) : 0
      if (weights) sharesOf(weights, best, shares)
      else shares.fill(0.12)
      if (weights && state.mass !== null) shares.set(massMask(weights.subarray(1), state.mass))
      if (dimmed) for (let p = 0; p < shares.length; p++) shares[p] *= 0.15
      paintInto(image.data, at, stride, surface, shares, state, app.inferno)
    })
    context.putImageData(image, 0, 0)
    mark(missing)
  }

  // What is waited for, what is off, and the effect of each head where it was measured.
  function mark(missing) {
    const waiting = new Set(missing.filter((index) => app.isWaitedFor(layerOf(index), headOf(index))))
    const made = []
    for (let index = 0; index < L * columns; index++) {
      const effect = app.cause.effectOf(layerOf(index), headOf(index))
      const lacks = !app.live && missing.includes(index)
      const kinds = [waiting.has(index) && "waits", lacks && "lacks", app.cause.isOff(layerOf(index), headOf(index)) && "off", effect && "effect"].filter(Boolean)
      cells.cells[index].setAttribute("aria-label", thumbName(layerOf(index), headOf(index)))
      if (!kinds.length) continue
      const sign = element("div", { class: `mark ${kinds.join(" ")}` })
      sign.style.cssText = `left:${left(index % columns)}px;top:${top(layerOf(index))}px;width:${layout.width}px;height:${layout.height}px`
      if (effect) {
        sign.style.setProperty("--effect", effect.color)
        sign.append(element("span", { text: effect.text }))
      }
      made.push(sign)
    }
    marks.replaceChildren(...made)
  }

  const observer = new ResizeObserver(() => app.draw())
  observer.observe(root)
  app.signal.addEventListener("abort", () => observer.disconnect()) // it would keep this viewer alive
  return { update, rove: (layer, head) => cells.rove(layer * columns + (head ?? H)) }
}
