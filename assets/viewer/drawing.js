// How maps are drawn and computed: nothing here is needed at first sight.

function createDrawing(root, app) {
  const draw = segmented("Drawn as", [{ value: "light", text: "Light" }, { value: "heat", text: "Heat" }], (value) => app.change({ draw: value }))
  const strength = slider("Strength", { min: 0, max: 1, step: 0.05, text: percent }, (value) => app.change({ strength: value }))
  const smooth = segmented("Patches", [{ value: false, text: "Blocky", title: "One value for each patch, as the model has it" }, { value: true, text: "Smooth" }], (value) => app.change({ smooth: value }))
  const scale = segmented("Scale", [{ value: "own", text: "Each map its own scale" }, { value: "shared", text: "One scale for all" }], (value) => app.change({ scale: value }))
  const masked = checkbox("Only the patches that hold", (on) => app.change({ mass: on ? 0.5 : null }), "The smallest set of patches that holds this share of the weight")
  const mass = slider("", { min: 0.05, max: 1, step: 0.05, text: (share) => `${percent(share)} of the weight` }, (value) => app.change({ mass: value }))
  mass.input.setAttribute("aria-label", "Share of the weight")
  const fusion = segmented("Heads are fused by", app.data.fusions.map((value) => ({ value, text: value })), (value) => app.change({ fusion: value }))
  const discard = slider("Weakest weights left out of rollout", { min: 0, max: 1, step: 0.05, text: percent }, () => {})
  discard.input.onchange = () => app.change({ discard: discard.input.valueAsNumber }) // rollout is made in Python
  discard.title = "This share of each row is zero before layers are multiplied; its strongest weight stays."
  const legend = element("canvas", { class: "legend", width: 256, height: 1, role: "img" })
  const ends = element("p", { class: "ends" })
  root.replaceChildren(
    element("div", { class: "row" }, draw, strength, smooth),
    element("div", { class: "row" }, masked, mass, scale),
    ...(app.live ? [element("div", { class: "row" }, named("Heads are fused by", fusion), discard)] : []),
    element("div", { class: "row colour" }, legend, ends),
  )
  let drawn = ""

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
    if (document.activeElement !== discard.input) discard.show(state.discard)
    const shown = app.shown()
    const weights = app.weights(shown.layer, shown.head, shown.token, shown.method)
    const top = weights ? app.topFor(weights) : 0
    const key = `${state.draw} ${strengthOf(state)} ${top}`
    if (key === drawn) return
    drawn = key
    const context = legend.getContext("2d")
    const image = context.createImageData(256, 1)
    const white = { pixels: new Uint8Array(1024).fill(255), width: 256, height: 1, grid: [1, 256], smooth: false, down: axisOf(1, 1, false), across: axisOf(256, 256, false) }
    paintInto(image.data, 0, 1024, white, Float32Array.from({ length: 256 }, (_, i) => i / 255), state, app.inferno)
    context.putImageData(image, 0, 0)
    ends.textContent = `from 0 to ${percent(top)} of the weight on one patch`
    legend.setAttribute("aria-label", `Scale: ${ends.textContent}`)
  }
  return { update }
}

const named = (text, control) => element("span", { class: "named" }, element("span", { text }), control)
