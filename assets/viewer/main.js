// The viewer: one state, parts that draw it, and the line to Streamlit. Hovering never leaves the browser.

const FADE_MS = 350
const PLAY_MS = 700
const TELL_AFTER_MS = 250
const FETCHED_BYTES = 5e5 // at once, so that what is looked at meanwhile comes soon
const PREFETCHED_BYTES = 32e6 // maps larger than this in all come only when they are looked at

const viewers = new WeakMap() // the element that Streamlit keeps -> the app that lives in it

export default function viewer({ data, parentElement, setStateValue }) {
  const root = parentElement.querySelector(".viewer")
  const before = viewers.get(root)
  if (before?.data.id === data.id) before.take(data, setStateValue)
  else {
    before?.close()
    // What Python has not been told yet, or cannot be, is newer than what it says; if this picture has it at all.
    const isNewer = before && (before.owesView() || data.view === undefined)
    const isAlike = before && ["layers", "heads", "grid"].every((name) => String(before.data[name]) === String(data[name]))
    const state = isNewer && isAlike ? before.state : stateOf(data.view ?? {}, data)
    const app = createApp(root, data, state, setStateValue)
    viewers.set(root, app)
    if (isNewer && isAlike) app.change({})
  }
  return () => {
    viewers.get(root)?.close()
    viewers.delete(root)
  }
}

// --- the state, as text: the same words as in a link (vit/page/view.py)

function stateOf(view, data) {
  const number = (text) => (text === undefined || text === "" ? null : Number(text))
  const layer = number(view.layer), head = number(view.head)
  return {
    method: view.method || "rollout",
    looked_at: view.looked_at === "yes",
    layer: layer === null ? data.layers - 1 : layer - 1,
    head: head === null ? null : head - 1,
    token: tokenOf(view.token || "cls", data.grid),
    draw: view.draw || "light",
    strength: number(view.strength),
    smooth: view.smooth === "yes",
    mass: number(view.mass),
    scale: view.scale || "own",
    fusion: data.fusion,
    discard: data.discard,
    alone: false, // one head shown without the others; not in a link
  }
}

function paramsOf(state, data) {
  const yes = (flag) => (flag ? "yes" : "no")
  const text = (number, add = 0) => (number === null ? "" : String(number + add))
  return {
    method: state.method,
    looked_at: yes(state.looked_at),
    layer: state.layer === data.layers - 1 ? "" : text(state.layer, 1),
    head: text(state.head, 1),
    token: tokenName(state.token, data.grid),
    draw: state.draw,
    strength: text(state.strength),
    smooth: yes(state.smooth),
    mass: text(state.mass),
    scale: state.scale,
    fusion: state.fusion,
    discard: String(state.discard),
  }
}

function createApp(root, data, state, setStateValue) {
  const { layers: L, heads: H, grid } = data
  const ending = new AbortController()
  const requests = createRequests(() => data.id)
  const slot = (name) => root.querySelector(`.${name}`)
  const drawer = (name) => root.querySelector(`details.${name} > div`)
  const app = {
    data, state,
    live: data.live !== false,
    signal: ending.signal,
    image: new Image(),
    inferno: bytesOf(data.inferno),
    probabilities: floatsOf(data.probabilities),
    hints: { point: !remembered("point") },
    pointed: null, // the token under the pointer or the focus
    previewed: null, // {layer, head} of the thumbnail under it
    version: 0, // grows when what is drawn changes without the state
    parts: {},
  }
  let maps = createMaps(data)
  let frame = 0, tellTimer = 0, playTimer = 0, fadeStart = -Infinity, fetching = new Set(), sheetKey = "", sheetRows = [], sheetLacks = [], ready = false, isPainted = false

  // --- what is shown

  app.shown = () => ({
    method: state.method,
    layer: app.previewed ? app.previewed.layer : state.layer,
    head: app.previewed ? app.previewed.head : state.head,
    token: app.pointed ?? state.token,
  })
  app.weights = (layer, head, token, method, lookedAt = state.looked_at) => maps.row(method, layer, head, token, lookedAt)
  app.sheet = (token) => {
    const key = `${state.method} ${state.looked_at} ${token} ${app.version}`
    if (key !== sheetKey) {
      sheetKey = key
      const looked = [...maps.wanted] // what is looked at comes before what only a thumbnail lacks
      maps.wanted.clear()
      sheetRows = Array.from({ length: L * (H + 1) }, (_, i) => {
        const column = i % (H + 1)
        return app.weights(Math.floor(i / (H + 1)), column === H ? null : column, token, state.method)
      })
      sheetLacks = [...maps.wanted]
      maps.wanted.clear()
      for (const each of looked) maps.wanted.add(each)
    }
    return sheetRows
  }
  app.topFor = (weights) => {
    const token = app.pointed ?? state.token
    if (state.scale === "own") return topOf(weights, token)
    return Math.max(...app.sheet(token).map((row) => (row ? topOf(row, token) : 0)))
  }
  app.isWaitedFor = (layer, head) => {
    const attention = fetching.has(`raw/${layer}/${head ?? "all"}`)
    if (state.method === "raw") return attention
    return head === null ? fetching.has(`rollout/${layer}`) : attention || fetching.has(`rollout/${layer - 1}`)
  }

  app.sentence = () => {
    const { layer, head, token, method } = app.shown()
    const who = tokenLabel(token, grid)
    const heads = head === null ? `${data.fusion} of all heads` : `head ${head + 1}`
    const direction = state.looked_at ? `Who looks at ${who}` : `Where ${who} looks`
    if (method === "raw") return `${direction}: attention of layer ${layer + 1}, ${heads}`
    const left = data.discard ? `, weakest ${percent(data.discard)} left out` : ""
    const span = layer === 0 ? "layer 1" : `layers 1 to ${layer + 1}`
    const by = head === null ? heads : `of layer ${layer + 1} ${heads} alone`
    return `${direction}: rollout of ${span}, ${by}${left}`
  }
  app.most = (count) => {
    const shown = app.shown()
    const weights = app.weights(shown.layer, shown.head, shown.token, shown.method)
    if (!weights) return app.live ? "Its map is on its way." : "This map is not in this copy, which holds every head as CLS sees it; look from CLS, or open the app."
    const patches = weights.subarray(1)
    const others = largest(patches, Math.min(count + 1, patches.length)).filter((p) => p + 1 !== shown.token)
    const places = others.slice(0, count).map((p) => `${tokenLabel(p + 1, grid)} (${percent(patches[p])})`)
    const itself = shown.token ? ` Itself ${percent(weights[shown.token])}.` : ""
    const held = state.mass === null ? "" : ` ${massMask(patches, state.mass).reduce((a, b) => a + b)} of ${patches.length} patches hold ${percent(state.mass)} of it.`
    return `${state.looked_at ? "Most by" : "Most weight on"} ${places.join("; ")}.${itself} CLS has ${percent(weights[0])}.${held}`
  }
  // What a screen reader says of a token.
  app.spoken = (token) => {
    const weights = app.weights(app.shown().layer, app.shown().head, token, state.method)
    if (!weights) return `${tokenLabel(token, grid)}: its map is ${app.live ? "on the way" : "not in this copy"}`
    const others = weights.subarray(1).map((weight, p) => (p + 1 === token ? 0 : weight))
    const best = largest(others, 1)[0]
    const most = `${tokenLabel(best + 1, grid)}, ${percent(weights[best + 1])}`
    return state.looked_at ? `${tokenLabel(token, grid)} is looked at most by ${most}` : `${tokenLabel(token, grid)} looks most at ${most}`
  }

  // --- what people do

  app.change = (changes) => {
    if ("layer" in changes && changes.layer !== state.layer) startFade()
    Object.assign(state, changes)
    tell()
    app.draw()
  }
  app.point = (token, event) => {
    if (token === app.pointed) return
    app.pointed = token
    if (token !== null && app.hints.point) {
      app.hints.point = false
      remember("point")
    }
    if (token !== null && !event) app.say(app.spoken(token))
    app.draw()
  }
  app.preview = (thumb) => {
    app.previewed = thumb
    app.draw()
  }
  app.pin = (token) => {
    if (app.cause.isBrush() && token > 0) return app.cause.toggleCover(token - 1)
    const freed = token === state.token && token > 0
    app.change({ token: freed ? 0 : token })
    if (token > 0) app.parts.picture.rove(token)
    app.say(freed ? `Freed. ${app.spoken(0)}` : `Pinned. ${app.spoken(token)}`)
  }
  app.open = (layer, head) => {
    app.stop()
    app.change({ layer, head, alone: state.alone && head !== null })
    app.say(app.sentence())
  }
  app.alone = (layer, head) => app.change({ layer, head, method: "raw", alone: true })
  app.goTo = (layer) => {
    app.stop()
    app.change({ layer })
  }
  app.isPlaying = () => playTimer !== 0
  app.play = () => {
    if (app.isPlaying()) return app.stop()
    app.previewed = null
    if (state.layer === L - 1) app.change({ layer: 0 })
    playTimer = setInterval(() => {
      if (state.layer < L - 1) app.change({ layer: state.layer + 1 })
      if (state.layer === L - 1) app.stop()
    }, PLAY_MS)
    app.draw()
  }
  app.stop = () => {
    clearInterval(playTimer)
    playTimer = 0
    app.draw()
  }
  app.ask = (kind, args) => requests.ask(kind, args)
  app.say = (text) => (slot("said").textContent = text)

  root.onkeydown = (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return // the browser's own
    const inControl = event.composedPath()[0].closest?.("input, button, summary, textarea, select")
    if (event.key === "Escape") {
      app.pointed = app.previewed = null
      app.change({ token: 0, alone: false })
      app.say(`Freed. ${app.spoken(0)}`)
    } else if (event.key === " " && !inControl) {
      event.preventDefault()
      app.play()
    } else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && !inControl) {
      event.preventDefault()
      app.goTo(Math.min(L - 1, Math.max(0, state.layer + (event.key === "ArrowRight" ? 1 : -1))))
    }
  }

  // --- a frame

  app.draw = () => {
    if (!frame && ready) frame = requestAnimationFrame(update)
  }
  function update(now) {
    frame = 0
    maps.wanted.clear()
    if (!isPainted) { // the picture first; thumbnails and words are a frame later
      isPainted = true
      app.parts.picture.update(now)
      return app.draw()
    }
    for (const part of Object.values(app.parts)) part.update(now)
    const measured = app.cause.measured() // where the light is a measurement, not attention
    const [what, most] = measured ?? [`${app.sentence()}.`, app.most(5)]
    slot("looks").replaceChildren(element("span", { text: what }), element("br"), most)
    if (app.fade(now) < 1) app.draw()
    if (!data.raw && app.live) fetchMaps()
  }
  function startFade() {
    if (reducedMotion()) return
    app.parts.picture?.keepForFade()
    fadeStart = performance.now()
  }
  app.fade = (now) => Math.min(1, Math.max(0, (now - fadeStart) / FADE_MS))

  // --- maps that were too many to send: what is looked at first, then the rest of the sheet

  async function fetchMaps() {
    if (fetching.size) return
    const size = maps.N * maps.N
    const atOnce = Math.max(1, Math.floor(FETCHED_BYTES / size))
    const rest = size * L * (H + 1) <= PREFETCHED_BYTES ? sheetLacks.filter((key) => !maps.isHere(key)) : []
    const keys = (maps.wanted.size ? [...maps.wanted] : rest).slice(0, atOnce)
    if (!keys.length) return
    fetching = new Set(keys)
    const asked = maps // heads may be fused otherwise before the answer comes
    app.version++
    app.draw()
    try {
      const answer = await app.ask("maps", { keys })
      for (const [key, map] of Object.entries(answer?.maps ?? {})) asked.take(key, map)
      fetching = new Set()
    } catch (error) {
      app.say(error.message)
      setTimeout(() => {
        fetching = new Set()
        app.draw()
      }, 5000) // not again at once
    }
    app.version++
    app.draw()
  }

  // --- Streamlit

  function tell() {
    clearTimeout(tellTimer)
    if (app.live) tellTimer = setTimeout(() => (app.isPlaying() ? tell() : sendAlone(sayView)), TELL_AFTER_MS)
  }
  // With the time: what equals the last one never reaches Python, though another model may have come between.
  function sayView() {
    tellTimer = 0
    setStateValue("view", { ...paramsOf(state, data), said: Date.now() })
  }
  app.owesView = () => tellTimer !== 0
  // The same picture again: new rollouts if heads are fused otherwise, and a setter that is up to date.
  app.take = (newer, newSetter) => {
    setStateValue = newSetter
    if (newer.fusion === data.fusion && newer.discard === data.discard) return
    data = app.data = newer
    maps = createMaps(data)
    app.version++
    app.draw()
  }
  app.close = () => {
    ready = false // before all else: a frame that still comes must not ask for anything
    ending.abort()
    requests.close()
    cancelAnimationFrame(frame)
    clearTimeout(tellTimer)
    clearInterval(playTimer)
  }

  app.cause = createCause(drawer("cause"), app)
  app.parts = {
    picture: createPicture(slot("stage"), app),
    thumbnails: createThumbnails(slot("thumbnails"), app),
    scrubber: createScrubber(slot("scrubber"), app),
    switches: createSwitches(slot("switches"), app),
    answer: createAnswer(slot("answer"), app),
    drawing: createDrawing(drawer("drawing"), app),
    legend: createLegend(slot("legend"), app),
    cause: app.cause,
  }
  // Made when they are opened: at first sight every millisecond counts.
  for (const [name, create] of Object.entries({ anatomy: createAnatomy, arithmetic: createArithmetic })) {
    const details = root.querySelector(`details.${name}`)
    drawer(name).replaceChildren()
    details.ontoggle = () => {
      if (!details.open) return
      app.parts[name] ??= create(drawer(name), app)
      app.parts[name].open()
      app.draw()
    }
    details.ontoggle()
  }
  for (const name of ["cause", "anatomy", "arithmetic"]) root.querySelector(`details.${name}`).hidden = !app.live
  root.querySelectorAll(".tour, .offer").forEach((old) => old.remove())
  createTour(root, app)
  app.image.src = data.picture
  app.image.decode().then(() => {
    ready = !ending.signal.aborted
    app.draw()
  })
  return app
}
