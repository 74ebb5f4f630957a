// Where CLS looked at each filmed step of a training run, of one run or of two beside each other. `data` is that of
// train/film_payload.py. A click on a small picture sends the trigger `picture` with its index; time, layer and
// head stay in the browser. Joined behind the viewer's numbers.js, paint.js and cells.js, and thumbnails.js here.

const MOST_FRAME_MS = 700
const DISCARD = 0.9 // of the weakest weights in rollout: as in train/film.py
const PLAY_MS = 6000 // from the first step to the newest

const players = new WeakMap() // the element that Streamlit keeps -> the player that lives in it

export default function film({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".film")
  if (!players.has(root)) players.set(root, createPlayer(root))
  players.get(root).take(data, (index) => setTriggerValue("picture", index))
  return () => {
    players.get(root)?.close()
    players.delete(root)
  }
}

const numberText = (number) => number.toLocaleString("en-US")
const stepName = (step) => `step ${numberText(step)}`

function sentence(layer, head) {
  if (head !== null) return `attention of layer ${layer + 1}, head ${head + 1}`
  return `${layer === 0 ? "rollout of layer 1" : `rollout of layers 1 to ${layer + 1}`}, weakest ${percent(DISCARD)} left out`
}

function createPlayer(root) {
  const ending = new AbortController()
  const app = { signal: ending.signal, image: null, previewed: null }
  let data = null, send = null, newest = "", reels = [], length = 1, at = 0, timer = 0, frame = 0

  const choices = createChoices((index) => index !== data.chosen && send(index))
  const time = createTime(app)
  const stage = element("div", { class: "reels" })
  const note = element("p", { class: "note", role: "status" })
  const honest = "Attention shows where the model looks, not why it decides. Each map is lit on its own scale."
  root.replaceChildren(element("div", { class: "head" }, choices.root, time.root), note, stage, element("p", { class: "honest", text: honest }))

  // --- what comes from Python

  async function take(newer, newSend) {
    send = newSend
    if (newer.id === newest) return
    newest = newer.id
    let image = app.image
    if (newer.picture !== image?.src) {
      image = new Image()
      image.src = newer.picture
      await image.decode()
    }
    if (newest !== newer.id || ending.signal.aborted) return // a newer one has come meanwhile
    place(newer, image)
  }

  // The step that was shown stays on screen, unless it was the newest: then the newest there is now takes its place.
  function place(newer, image) {
    const names = (each) => each.films.map(({ name }) => name).join("\n")
    const isFollowing = !data || at === length - 1 || names(data) !== names(newer)
    const step = isFollowing ? null : reels[0].stepAt(app.share())
    data = newer
    app.image = image
    app.label = newer.label
    const before = reels
    reels = newer.films.map((film, i) => (before[i]?.fits(film) ? before[i] : createReel(app, film)))
    reels.forEach((reel, i) => reel.take(newer.films[i], newer.films.length > 1))
    if (reels.length !== before.length || reels.some((reel, i) => reel !== before[i])) {
      stage.replaceChildren(...reels.map((reel) => reel.root))
      app.previewed = null // no pointer will leave what is gone
    }
    stage.classList.toggle("two", reels.length > 1)
    length = Math.max(...reels.map((reel) => reel.length()))
    at = isFollowing ? length - 1 : Math.round(reels[0].shareOf(step) * (length - 1))
    note.textContent = newer.why_not
    note.hidden = !newer.why_not
    choices.take(newer)
    app.draw()
  }

  // --- what people do

  app.share = () => (length > 1 ? at / (length - 1) : 1)
  app.goTo = (place) => {
    app.stop()
    at = Math.min(length - 1, Math.max(0, place))
    app.draw()
  }
  app.isPlaying = () => timer !== 0
  app.play = () => {
    if (app.isPlaying() || length === 1) return app.stop()
    if (at === length - 1) at = 0
    const next = () => {
      timer = setTimeout(() => {
        at = Math.min(length - 1, at + 1)
        timer = 0
        if (at < length - 1) next()
        app.draw()
      }, Math.min(MOST_FRAME_MS, PLAY_MS / (length - 1)))
    }
    next()
    app.draw()
  }
  app.stop = () => {
    clearTimeout(timer)
    timer = 0
    app.draw()
  }
  app.preview = (choice) => {
    app.previewed = choice
    app.draw()
  }
  // The other run shows the same layer and head, where it has them.
  app.choose = (choice) => {
    for (const reel of reels) reel.choose(choice)
    app.draw()
  }

  // --- a frame

  app.draw = () => {
    if (!frame && data) frame = requestAnimationFrame(update)
  }
  function update() {
    frame = 0
    for (const reel of reels) reel.update()
    const label = (share) => {
      const steps = [...new Set(reels.map((reel) => numberText(reel.stepAt(share))))]
      return `${steps.length > 1 ? "steps" : "step"} ${steps.join(" and ")}`
    }
    time.update({ at, length, label: label(app.share()), longest: label(1), said: reels.map((reel) => reel.said()).join("; ") })
  }
  function close() {
    ending.abort()
    clearTimeout(timer)
    cancelAnimationFrame(frame)
  }
  return { take, close }
}

// The filmed pictures as buttons: one stop for the Tab key, arrow keys within.
function createChoices(choose) {
  const root = element("div", { class: "choices", role: "group", "aria-label": "Filmed pictures" })
  let drawn = ""

  function take(data) {
    const signature = data.pictures.map(({ label, src }) => label + src).join()
    if (drawn !== signature) {
      drawn = signature
      root.replaceChildren(
        ...data.pictures.map(({ label, src }, i) =>
          element("button", { type: "button", title: label, onclick: () => choose(i) }, element("img", { src, alt: label })),
        ),
      )
    }
    ;[...root.children].forEach((each, i) => {
      each.setAttribute("aria-pressed", String(i === data.chosen))
      each.tabIndex = i === data.chosen ? 0 : -1
    })
  }

  root.onkeydown = (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return // the browser's own
    const buttons = [...root.children]
    const from = buttons.indexOf(event.target.closest("button"))
    const columns = buttons.filter((each) => each.offsetTop === buttons[0].offsetTop).length
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key]
    const to = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1 : from + step
    if (from < 0 || !(to in buttons)) return
    event.preventDefault()
    event.stopPropagation()
    buttons[from].tabIndex = -1
    buttons[to].tabIndex = 0
    buttons[to].focus()
  }
  return { root, take }
}

// From the first step to the newest: a slider, and a button that plays. Space plays, arrow keys step.
function createTime(app) {
  const play = element("button", { type: "button", class: "play", onclick: () => app.play() })
  const range = element("input", { type: "range", min: "0", step: "1", "aria-label": "Step of training" })
  const label = element("output", { class: "value", "aria-live": "off" }) // the slider says it already
  range.oninput = () => app.goTo(range.valueAsNumber)
  range.onkeydown = (event) => {
    if (event.key !== " ") return
    event.preventDefault()
    event.stopPropagation()
    app.play()
  }
  const root = element("div", { class: "scrubber" }, play, range, label)

  function update(shown) {
    range.max = String(shown.length - 1)
    range.value = String(shown.at)
    range.disabled = play.disabled = shown.length === 1
    play.textContent = app.isPlaying() ? "❚❚" : "▶"
    play.title = app.isPlaying() ? "Pause" : "Play from the first step to the newest"
    play.setAttribute("aria-label", play.title)
    label.textContent = shown.label
    label.style.minWidth = `${shown.longest.length}ch` // or the slider would shrink as steps grow
    range.setAttribute("aria-valuetext", shown.said)
  }
  return { root, update }
}

// One run: the large picture, what the model says of it, and all layers and heads.
function createReel(app, { layers: L, heads: H, grid }) {
  const N = 1 + grid[0] * grid[1]
  const name = element("p", { class: "run" })
  const canvas = element("canvas", { class: "picture", role: "img" })
  const frame = element("div", { class: "stage" }, canvas)
  const caption = element("p", { class: "looks" })
  const answer = createAnswer()
  const thumbnails = createThumbnails(app, L, H, grid)
  const root = element(
    "div", { class: "reel", role: "group" }, name,
    element("div", { class: "shown" }, frame, caption),
    element("div", { class: "told" }, answer.root, thumbnails.root),
  )
  const context = canvas.getContext("2d")
  const shares = new Float32Array(grid[0] * grid[1])
  let film = null, image = null, surface = null, choice = { layer: L - 1, head: null }

  const has = ({ layer, head }) => layer < L && (head === null || head < H)
  const frameAt = (share) => Math.round(share * (film.steps.length - 1))
  const at = () => frameAt(app.share())
  const row = (layer, head) => ((at() * L + layer) * (H + 1) + (head ?? H))
  const weights = (layer, head) => film.rows.subarray(row(layer, head) * N, (row(layer, head) + 1) * N)
  const step = () => stepName(film.steps[at()])

  function take(newer, isOneOfTwo) {
    film = {
      ...newer,
      rows: bytesOf(newer.rows),
      scales: floatsOf(newer.scales),
      top_shares: floatsOf(newer.top_shares),
      truth_shares: floatsOf(newer.truth_shares),
    }
    name.textContent = newer.name
    name.hidden = !isOneOfTwo
    root.setAttribute("aria-label", newer.name)
    answer.take(film)
    if (image === app.image) return
    image = app.image
    const { naturalWidth: width, naturalHeight: height } = image
    canvas.width = width
    canvas.height = height
    frame.style.aspectRatio = `${width} / ${height}`
    frame.style.maxWidth = `calc(var(--tallest) * ${Math.min(1, width / height)})`
    surface = createSurface(image, width, height, grid, false)
    thumbnails.reset()
  }

  function update() {
    const { layer, head } = app.previewed && has(app.previewed) ? app.previewed : choice
    const shown = weights(layer, head), top = topOf(shown), scale = film.scales[row(layer, head)]
    const lit = context.createImageData(canvas.width, canvas.height)
    paintInto(lit.data, 0, 4 * canvas.width, surface, sharesOf(shown, top, shares), LIGHT, null)
    context.putImageData(lit, 0, 0)
    const truth = film.classes[film.truth]
    canvas.setAttribute("aria-label", `${app.label}, ${truth}, lit by ${sentence(layer, head)} at ${step()}`)
    const held = `Brightest patch ${percent(top * scale)}, CLS itself ${percent(shown[0] * scale)}.`
    caption.replaceChildren(element("span", { text: `Where CLS looks: ${sentence(layer, head)}.` }), element("br"), held)
    answer.update(at())
    thumbnails.update(weights, layer, head, choice, step())
  }

  return {
    root, take, update,
    fits: (other) => other.layers === L && other.heads === H && String(other.grid) === String(grid),
    choose: (wanted) => has(wanted) && (choice = wanted),
    length: () => film.steps.length,
    stepAt: (share) => film.steps[frameAt(share)],
    // Where the frame nearest to this step is, as a share of all frames.
    shareOf: (wanted) => {
      const away = film.steps.map((each) => -Math.abs(each - wanted))
      return film.steps.length > 1 ? largest(away, 1)[0] / (film.steps.length - 1) : 1
    },
    said: () => `${name.hidden ? "" : `${film.name}: `}${step()}, says ${answer.said(at())}`,
  }
}

// The likeliest classes at a step, and the true one where it is none of them.
function createAnswer() {
  const step = element("p", { class: "step" })
  const verdict = element("p", { class: "verdict" })
  const list = element("ul", { class: "bars", "aria-label": "Probabilities" })
  const root = element("div", { class: "answer" }, step, verdict, list)
  let film = null, rows = [], T = 0

  function take(newer) {
    film = newer
    T = film.top[0].length
    // A place for the true class is always there, so that nothing below it moves.
    if (rows.length !== T + 1) {
      rows = Array.from({ length: T + 1 }, () => {
        const [label, bar, value] = ["name", "bar", "value"].map((part) => element("span", { class: part }))
        return { label, bar, value, row: element("li", {}, label, element("span", { class: "track" }, bar), value) }
      })
      list.replaceChildren(...rows.map(({ row }) => row))
    }
  }

  function update(at) {
    const best = film.top[at][0], truth = film.classes[film.truth]
    step.textContent = `At ${stepName(film.steps[at])} it says`
    verdict.replaceChildren(
      element("strong", { text: film.classes[best] }),
      ` ${percent(film.top_shares[at * T])}`,
      element("span", { class: "truth", text: `${best === film.truth ? "✓" : "✗"} true class: ${truth}` }),
    )
    rows.forEach(({ label, bar, value, row }, i) => {
      const k = i < T ? film.top[at][i] : film.truth
      const share = i < T ? film.top_shares[at * T + i] : film.truth_shares[at]
      row.classList.toggle("absent", i === T && film.top[at].includes(film.truth))
      row.classList.toggle("true", k === film.truth)
      label.textContent = label.title = film.classes[k]
      bar.style.transform = `scaleX(${share})`
      value.textContent = percent(share)
    })
  }
  return { root, take, update, said: (at) => `${film.classes[film.top[at][0]]}, ${percent(film.top_shares[at * T])}` }
}
