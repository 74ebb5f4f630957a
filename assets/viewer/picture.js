// The large picture: lit where the token looks that is pointed at, or pinned, or CLS. It is the main control.

const LEAST_DRAWN_PX = 448

function createPicture(root, app) {
  const { grid } = app.data
  const [GY, GX] = grid
  const [height, width] = app.data.size
  const canvas = element("canvas", { class: "picture", role: "img" })
  const overlay = element("div", { class: "outlines", "aria-hidden": "true" })
  const pinned = element("div", { class: "outline pinned" })
  const pointed = element("div", { class: "outline pointed" })
  const covers = element("div", { class: "covers" })
  const hint = element("p", { class: "hint", text: "Point at any patch", hidden: !app.hints.point })
  const cells = createCells({
    label: "Patches of the picture. Arrow keys move, Enter pins, Escape frees.",
    rows: GY,
    columns: GX,
    name: (index) => tokenLabel(1 + index, grid),
    point: (index, event) => app.point(index === null ? null : 1 + index, event),
    choose: (index) => app.pin(1 + index),
    drag: (index, starts, clicked) => app.cause.brush(index, starts, clicked),
  })
  overlay.append(covers, pinned, pointed)
  root.replaceChildren(canvas, overlay, cells.grid, hint)
  root.style.setProperty("--columns", GX)
  root.style.setProperty("--rows", GY)
  root.style.aspectRatio = `${width} / ${height}`
  root.style.maxWidth = `calc(var(--tallest) * ${width / height})`

  const context = canvas.getContext("2d")
  const shares = new Float32Array(GY * GX)
  let surface = null, image = null, drawn = "", from = null

  function place(outline, token) {
    outline.hidden = token === null || token === 0
    if (outline.hidden) return
    outline.style.left = `${(((token - 1) % GX) / GX) * 100}%`
    outline.style.top = `${(Math.floor((token - 1) / GX) / GY) * 100}%`
  }

  function update(now) {
    const { state } = app
    const shown = app.shown()
    root.classList.toggle("pointing", app.pointed !== null)
    root.classList.toggle("brushing", app.cause.isBrush())
    hint.hidden = !app.hints.point
    place(pinned, state.token)
    place(pointed, app.pointed === state.token ? null : app.pointed)
    const effect = app.cause.shownMap() // a leave-one-out map takes the light's place while it is asked for
    const weights = effect ?? app.weights(shown.layer, shown.head, shown.token, shown.method)
    root.classList.toggle("waiting", !weights)
    const smooth = state.smooth && state.mass === null // a patch is in the mask or not
    const side = Math.max(width, height)
    const times = smooth ? Math.ceil(LEAST_DRAWN_PX / side) : 1
    if (!surface || surface.smooth !== smooth) {
      surface = createSurface(app.image, width * times, height * times, grid, smooth)
      canvas.width = surface.width
      canvas.height = surface.height
      image = context.createImageData(surface.width, surface.height)
      drawn = ""
    }
    if (!weights) return
    const top = effect ? topOf(effect) : app.topFor(weights)
    sharesOf(weights, top, shares)
    if (state.mass !== null && !effect) shares.set(massMask(weights.subarray(1), state.mass))
    const fading = app.fade(now)
    if (fading < 1 && from) for (let p = 0; p < shares.length; p++) shares[p] = from[p] * (1 - fading) + shares[p] * fading
    else from = null
    const key = `${state.draw} ${strengthOf(state)} ${smooth} ${shares.join()}`
    if (key !== drawn) {
      drawn = key
      paintInto(image.data, 0, 4 * surface.width, surface, shares, state, app.inferno)
      context.putImageData(image, 0, 0)
    }
    const what = effect ? `a measurement. ${app.cause.measured()[0]}` : `attention. ${app.sentence()}`
    canvas.setAttribute("aria-label", `${app.data.title}, ${state.draw === "light" ? "lit" : "coloured"} by ${what}`)
  }

  function cover(patches) {
    covers.replaceChildren(
      ...[...patches].map((patch) => {
        const mark = element("div", { class: "outline covered" })
        place(mark, 1 + patch)
        return mark
      }),
    )
  }

  // Where the next cross-fade starts: what is drawn now.
  const keepForFade = () => (from = Float32Array.from(shares))

  return { update, cover, keepForFade, canvas, rove: (token) => token > 0 && cells.rove(token - 1) }
}
