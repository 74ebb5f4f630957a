// Five steps that move the real controls. Offered once; skippable at any time.

// title, words, the part that must be in sight, and what is done there
const TOUR = [
  ["Point at a patch", "The light shows where that patch looks. A click keeps it, Escape lets it go.", "stage", (app) => app.pin(1 + Math.floor(app.data.grid[0] / 2) * app.data.grid[1] + Math.floor(app.data.grid[1] / 2))],
  ["Go through the layers", "Early layers look around, later ones gather what the answer needs. The bars follow.", "scrubber", (app) => { app.pin(0); app.goTo(0); app.play() }],
  ["Open one head", "Every thumbnail is one head of one layer. A click opens it.", "thumbnails", (app) => { app.stop(); app.open(app.data.layers - 1, 0) }],
  ["One layer, or all", "Raw attention is one layer alone; rollout multiplies the layers up to it.", "switches", (app) => app.change({ method: "raw" })],
  ["Test it", "Attention is not a reason. Cover what the model looks at most, and see if the answer moves.", "answer", (app) => { app.change({ method: "rollout", head: null }); app.cause.open(); app.cause.coverMost() }],
]

function createTour(root, app) {
  let step = -1
  const title = element("strong")
  const text = element("p")
  const next = button("Next", () => go(step + 1), { class: "button strong" })
  const skip = button("Skip", end)
  const card = element("aside", { class: "tour", "aria-label": "Tour", hidden: true }, title, text, element("div", { class: "row" }, next, skip))
  const offer = element("p", { class: "offer", hidden: true }, "New here? ", button("Take the tour: five steps", () => go(0)), button("No, thanks", end))
  root.prepend(offer)
  root.append(card)
  offer.hidden = !app.live || remembered("tour")
  card.onkeydown = (event) => {
    if (event.key !== "Escape") return // a handler that gives false back takes Enter and Tab away
    event.stopPropagation()
    end()
  }

  function go(to) {
    offer.hidden = true
    step = to
    if (step >= TOUR.length) return end()
    const [name, said, place, act] = TOUR[step]
    title.textContent = `${step + 1} of ${TOUR.length}: ${name}`
    text.textContent = said
    next.textContent = step === TOUR.length - 1 ? "Done" : "Next"
    card.hidden = false
    act(app)
    root.querySelector(`.${place}`).scrollIntoView({ block: "center", behavior: reducedMotion() ? "auto" : "smooth" })
    next.focus({ preventScroll: true })
    app.say(`${title.textContent}. ${said}`)
  }

  function end() {
    offer.hidden = card.hidden = true
    remember("tour")
    if (step >= 0) app.stop()
    step = -1
  }
  return { update() {} }
}

// Once used or refused, a hint stays away. A browser that keeps nothing is offered it again.
function remembered(name) {
  try {
    return localStorage.getItem(`patchlight-${name}`) !== null
  } catch {
    return false
  }
}

function remember(name) {
  try {
    localStorage.setItem(`patchlight-${name}`, "1")
  } catch (error) {
    console.info(`Not remembered: ${error.message}`)
  }
}
