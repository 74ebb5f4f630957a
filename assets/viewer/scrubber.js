// Through the layers: a slider, and a button that plays them. Space plays, arrow keys step.

function createScrubber(root, app) {
  const L = app.data.layers
  const play = element("button", { type: "button", class: "play", onclick: () => app.play() })
  const range = element("input", { type: "range", min: "1", max: String(L), step: "1", "aria-label": "Layer" })
  const said = element("output", { class: "value" })
  range.oninput = () => app.goTo(range.valueAsNumber - 1)
  range.onkeydown = (event) => {
    if (event.key !== " ") return
    event.preventDefault()
    event.stopPropagation()
    app.play()
  }
  root.replaceChildren(play, range, said)
  root.hidden = L === 1

  function update() {
    const { layer } = app.shown()
    play.textContent = app.isPlaying() ? "❚❚" : "▶"
    play.setAttribute("aria-label", app.isPlaying() ? "Pause" : "Play through the layers")
    play.title = play.getAttribute("aria-label")
    range.value = String(layer + 1)
    said.textContent = `layer ${layer + 1} of ${L}`
    range.setAttribute("aria-valuetext", said.textContent)
  }
  return { update }
}

function createSwitches(root, app) {
  const cls = element("button", { type: "button", class: "chip", onclick: () => app.pin(0) })
  const method = segmented(
    "What is shown",
    [
      { value: "rollout", text: "Rollout", title: "The layers up to this one multiplied" },
      { value: "raw", text: "Raw attention", title: "This layer alone" },
    ],
    (value) => app.change({ method: value, alone: false }),
  )
  const direction = segmented(
    "Direction",
    [
      { value: false, text: "Looks at" },
      { value: true, text: "Looked at by" },
    ],
    (value) => app.change({ looked_at: value }),
  )
  const heads = element("button", { type: "button", class: "chip", text: "All heads", onclick: () => app.change({ head: null, alone: false }) })
  root.replaceChildren(cls, method, direction, heads)

  function update() {
    const { state } = app
    const shown = app.shown()
    const weights = app.weights(shown.layer, shown.head, shown.token, shown.method)
    cls.textContent = weights ? `CLS ${percent(weights[0])}` : "CLS"
    cls.title = "The token that the answer is read from, and its own weight here. Press to look from it."
    cls.setAttribute("aria-pressed", String(state.token === 0))
    method.show(shown.method)
    direction.show(state.looked_at)
    heads.hidden = state.head === null
  }
  return { update }
}
