// How maps are drawn and computed: nothing here is needed at first sight.

function createDrawing(root, app) {
  const draw = segmented("Drawn as", [{ value: "light", text: "Light" }, { value: "heat", text: "Heat" }], (value) => app.change({ draw: value }))
  const strength = slider("Strength", { min: 0, max: 1, step: 0.05, text: percent }, (value) => app.change({ strength: value }))
  const smooth = segmented("Patches", [{ value: false, text: "Blocky", title: "One value for each patch, as the model has it" }, { value: true, text: "Smooth" }], (value) => app.change({ smooth: value }))
  const scale = segmented("Scale", [{ value: "own", text: "Each map its own scale" }, { value: "shared", text: "One scale for all" }], (value) => app.change({ scale: value }))
  const masked = checkbox("Only the patches that hold", (on) => app.change({ mass: on ? 0.5 : null }), "The smallest set of patches that holds this share of the weight")
  const mass = slider("", { min: 0, max: 1, step: 0.05, text: (share) => `${percent(share)} of the weight` }, (value) => app.change({ mass: value }))
  mass.input.setAttribute("aria-label", "Share of the weight")
  const fusion = segmented("Heads are fused by", app.data.fusions.map((value) => ({ value, text: value })), (value) => app.change({ fusion: value }))
  const discard = slider("Weakest weights left out of rollout", { min: 0, max: 1, step: 0.05, text: percent }, () => {})
  discard.input.onchange = () => app.change({ discard: discard.input.valueAsNumber }) // rollout is made in Python
  discard.title = "This share of each row is zero before layers are multiplied; its strongest weight stays."
  root.replaceChildren(
    element("div", { class: "row" }, draw, strength, smooth),
    element("div", { class: "row" }, masked, mass, scale),
    ...(app.live ? [element("div", { class: "row" }, named("Heads are fused by", fusion), discard)] : []),
  )

  function update() {
    const { state } = app
    draw.show(state.draw)
    strength.show(strengthOf(state))
    smooth.show(state.smooth)
    scale.show(state.scale)
    masked.show(state.mass !== null)
    mass.hidden = state.mass === null
    mass.show(state.mass ?? 0.5)
    fusion.show(state.fusion)
    if (root.getRootNode().activeElement !== discard.input) discard.show(state.discard)
  }
  return { update }
}

const named = (text, control) => element("span", { class: "named" }, element("span", { text }), control)

// The scale of what is drawn, with its true weights: under the picture where colours stand for numbers.
function createLegend(root, app) {
  const scale = element("canvas", { class: "scale", width: 256, height: 1, role: "img" })
  const most = element("span")
  root.replaceChildren(element("span", { text: percent(0) }), scale, most)
  const white = new Uint8Array(4 * 256).fill(255)
  const surface = { pixels: white, width: 256, height: 1, grid: [1, 256], smooth: false, down: axisOf(1, 1, false), across: axisOf(256, 256, false) }
  const ramp = Float32Array.from({ length: 256 }, (_, i) => i / 255)
  let drawn = ""

  function update() {
    const { state } = app
    const shown = app.shown()
    const effect = app.cause.shownMap()
    const weights = effect ?? app.weights(shown.layer, shown.head, shown.token, shown.method)
    root.hidden = state.draw !== "heat" || (state.mass !== null && !effect) || !weights
    if (root.hidden) return
    const top = effect ? topOf(effect) : app.topFor(weights)
    if (drawn === `${top}`) return
    drawn = `${top}`
    const context = scale.getContext("2d")
    const image = context.createImageData(256, 1)
    paintInto(image.data, 0, 4 * 256, surface, ramp, { draw: "heat", strength: 1 }, app.inferno)
    context.putImageData(image, 0, 0)
    most.textContent = percent(top)
    scale.setAttribute("aria-label", `Colours from 0 to ${percent(top)} for one patch`)
  }
  return { update }
}
