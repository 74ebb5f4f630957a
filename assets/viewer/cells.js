// A grid of cells over a canvas: one stop for the Tab key, arrow keys within, a name for each cell.
//
//   const cells = createCells({label, rows, columns, name, point, choose, twice})     gap: before the last column
//   cells.grid      the element, to lie over the canvas; cells.rove(index) moves the stop
//
// `point(index | null)` as the pointer or the focus moves, `choose(index)` for a click, a tap or Enter,
// `twice(index)` for a double click. Where the pointer is comes from its position, not from the element under
// it: that is as quick for 1,369 cells as for four.

function createCells({ label, rows, columns, gap = 0, name, point, choose, twice, drag }) {
  const grid = element("div", { class: "cells", role: "grid", "aria-label": label })
  const cells = []
  for (let row = 0; row < rows; row++) {
    const line = element("div", { class: "line", role: "row" })
    for (let column = 0; column < columns; column++) {
      const cell = element("div", { class: "cell", role: "gridcell", "aria-label": name(cells.length) })
      cell.tabIndex = -1
      cells.push(cell)
      line.append(cell)
    }
    grid.append(line)
  }
  let stop = 0
  cells[0].tabIndex = 0

  function rove(index) {
    cells[stop].tabIndex = -1
    stop = index
    cells[stop].tabIndex = 0
  }

  function at(event) {
    const box = grid.getBoundingClientRect()
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows)
    const width = (box.width - gap) / columns
    const last = (columns - 1) * width
    const x = event.clientX - box.left
    const column = Math.floor((x < last ? x : Math.max(last, x - gap)) / width)
    return row >= 0 && row < rows && column >= 0 && column < columns ? row * columns + column : null
  }

  grid.onpointermove = (event) => {
    const index = at(event)
    if (event.buttons & 1 && drag?.(index)) return
    point(index, event)
  }
  grid.onpointerleave = grid.onpointercancel = () => point(null)
  grid.onpointerdown = (event) => {
    if (drag?.(at(event), true)) grid.setPointerCapture(event.pointerId)
  }
  grid.onclick = (event) => {
    const index = at(event)
    if (index === null) return
    rove(index)
    cells[index].focus({ preventScroll: true })
    if (!drag?.(index, false, true)) choose(index)
  }
  if (twice) grid.ondblclick = (event) => at(event) !== null && twice(at(event))
  // The focus that a click or a tap brings shows nothing: the pointer has shown it, and a finger has gone already.
  grid.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && point(stop))
  grid.addEventListener("focusout", () => point(null))
  grid.onkeydown = (event) => {
    if (event.altKey || event.metaKey) return // the browser's own
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }
    const column = stop % columns
    let to = stop + (moves[event.key] ?? 0)
    if (event.key === "Home") to = event.ctrlKey ? 0 : stop - column
    else if (event.key === "End") to = event.ctrlKey ? cells.length - 1 : stop - column + columns - 1
    else if (event.key === "Enter") {
      if (event.shiftKey && twice) twice(stop)
      else choose(stop)
      event.preventDefault()
      event.stopPropagation()
      return
    } else if (!(event.key in moves)) return
    event.preventDefault()
    event.stopPropagation()
    const leavesTheLine = Math.abs(moves[event.key] ?? 0) === 1 && Math.floor(to / columns) !== Math.floor(stop / columns)
    if (to < 0 || to >= cells.length || leavesTheLine) return
    rove(to)
    cells[to].focus()
    point(to)
  }
  return { grid, cells, rove }
}
