// Layers by heads, and rollout up to each layer. Pointing previews; a click, a tap or Enter chooses.

const LIGHT = { draw: "light" }
const LEAST_THUMB_PX = 28
const MOST_THUMB_PX = 56
const THUMB_GAP_PX = 4
const BAND_PX = 3 // a band holds the heads of a layer together
const ROLLOUT_GAP_PX = 16 // rollout stands apart
const ROW_NAME_PX = 52
const PANEL_PX = 16 // both paddings of the dark panel, as in viewer.css

function createThumbnails(app, L, H, grid) {
  const columns = H + 1
  const choiceOf = (index) => ({ layer: Math.floor(index / columns), head: index % columns === H ? null : index % columns })
  function nameOf(index) {
    const { layer, head } = choiceOf(index)
    return `layer ${layer + 1}, ${head === null ? "rollout" : `head ${head + 1}`}`
  }
  const canvas = element("canvas", { role: "img" })
  const names = element("div", { class: "column-names", "aria-hidden": "true" })
  const rows = element("div", { class: "row-names", "aria-hidden": "true" })
  const mark = element("div", { class: "thumb outline chosen", "aria-hidden": "true" })
  const cells = createCells({
    label: "Layers down, heads across, rollout last. Arrow keys preview, Enter chooses.",
    rows: L,
    columns,
    gap: ROLLOUT_GAP_PX,
    name: nameOf,
    point: (index) => app.preview(index === null ? null : choiceOf(index)),
    choose: (index) => app.choose(choiceOf(index)),
  })
  names.append(...Array.from({ length: columns }, (_, c) => element("span", { text: c === H ? "rollout" : String(c + 1) })))
  rows.append(...Array.from({ length: L }, (_, l) => element("span", { text: `layer ${l + 1}` })))
  const board = element("div", { class: "board" }, canvas, mark, cells.grid)
  const strip = element("div", { class: "strip" }, element("span", { text: "head", "aria-hidden": "true" }), names, rows, board)
  const root = element("div", {}, element("div", { class: "thumbnails" }, strip))
  const context = canvas.getContext("2d")
  const shares = new Float32Array(grid[0] * grid[1])
  let layout = null, image = null, surface = null

  const left = (column) => column * layout.cell + (column === H ? ROLLOUT_GAP_PX : 0) + (layout.cell - layout.width) / 2
  const top = (layer) => layer * layout.row + BAND_PX + (layout.row - BAND_PX - layout.height) / 2

  // In CSS pixels. The cells of the grid lie over the thumbnails exactly, gaps included.
  function resize() {
    const room = root.clientWidth - PANEL_PX - ROW_NAME_PX - ROLLOUT_GAP_PX
    const cell = Math.max(LEAST_THUMB_PX, Math.floor(Math.min(room / columns, MOST_THUMB_PX)))
    const scale = Math.min(2, Math.max(1, Math.round(devicePixelRatio)))
    if (surface && layout.cell === cell && layout.scale === scale) return
    const ratio = app.image.naturalWidth / app.image.naturalHeight
    const width = Math.max(8, Math.round((cell - THUMB_GAP_PX) * Math.min(1, ratio)))
    const height = Math.max(8, Math.round((cell - THUMB_GAP_PX) / Math.max(1, ratio)))
    layout = { cell, width, height, scale, row: Math.max(LEAST_THUMB_PX, height + THUMB_GAP_PX + BAND_PX) }
    canvas.width = (columns * cell + ROLLOUT_GAP_PX) * scale
    canvas.height = L * layout.row * scale
    board.style.width = `${columns * cell + ROLLOUT_GAP_PX}px`
    board.style.height = `${L * layout.row}px`
    const sizes = { label: ROW_NAME_PX, cell, row: layout.row, "fused-gap": ROLLOUT_GAP_PX }
    for (const [name, px] of Object.entries(sizes)) strip.style.setProperty(`--${name}`, `${px}px`)
    image = context.createImageData(canvas.width, canvas.height)
    surface = createSurface(app.image, width * scale, height * scale, grid, false)
  }

  function update(weights, shownLayer, shownHead, choice, step) {
    resize()
    const { scale, width, height } = layout
    for (let index = 0; index < L * columns; index++) {
      const { layer, head } = choiceOf(index)
      const row = weights(layer, head)
      const at = 4 * (Math.round(top(layer) * scale) * canvas.width + Math.round(left(head ?? H) * scale))
      paintInto(image.data, at, 4 * canvas.width, surface, sharesOf(row, topOf(row), shares), LIGHT, null)
      cells.cells[index].setAttribute("aria-selected", String(layer === choice.layer && head === choice.head))
    }
    context.putImageData(image, 0, 0)
    canvas.setAttribute("aria-label", `${L} layers by ${H} heads as thumbnails, and rollout up to each layer, at ${step}`)
    const column = shownHead ?? H
    mark.style.cssText = `left:${left(column) - 2}px;top:${top(shownLayer) - 2}px;width:${width + 4}px;height:${height + 4}px`
    names.childNodes.forEach((each, c) => each.classList.toggle("current", c === column))
    rows.childNodes.forEach((each, l) => each.classList.toggle("current", l === shownLayer))
  }

  cells.rove(L * columns - 1)
  const observer = new ResizeObserver(() => app.draw())
  observer.observe(root)
  app.signal.addEventListener("abort", () => observer.disconnect()) // it would keep this player alive
  return { root, update, reset: () => (surface = null) }
}
