// Cause, not only attention: heads switched off, patches covered, and what that does to the answer.
// The model runs in Python (vit/cause.py); what is asked here is asked by app.ask.

const PARTS = 4 // leave-one-out and head effects come in so many parts, so that they fill in before one's eyes

function createCause(root, app) {
  const { layers: L, heads: H, grid } = app.data
  const P = grid[0] * grid[1]
  const off = new Set() // "layer/head"
  const covered = new Set() // patches
  let fill = "removed"
  let switching = false, brush = false, adding = true, stroke = null
  let changed = null // (L * K) probabilities under the change
  let effects = null // (L * H), NaN where not measured yet
  let leftOut = null // (P), likewise
  let showsLeftOut = false
  let asked = 0, clearings = 0
  let count = Math.max(1, Math.round(P / 8))

  const key = (layer, head) => `${layer}/${head}`
  const result = element("p", { class: "result", role: "status" })
  let speaker = 0 // of several measurements under way only the newest speaks
  const say = (text) => (result.textContent = text)
  const speak = (text) => {
    const mine = ++speaker
    say(text)
    return (later) => mine === speaker && say(later)
  }

  // --- the change: heads off, patches covered

  async function apply() {
    app.version++
    app.parts.picture?.cover(covered)
    const mine = ++asked
    const tell = speak(result.textContent)
    if (!off.size && !covered.size) {
      changed = null
      tell("")
      return app.draw()
    }
    app.draw()
    try {
      const answer = await app.ask("change", { heads_off: [...off].map((each) => each.split("/").map(Number)), covered: [...covered], fill })
      if (!answer || mine !== asked) return
      changed = floatsOf(answer.probabilities)
      tell(summary())
    } catch (error) {
      tell(error.message)
    }
    app.draw()
  }

  function summary() {
    const K = app.data.classes.length
    const [before, after] = [app.probabilities, changed].map((all) => all.subarray((L - 1) * K))
    const [best, now] = [before, after].map((all) => largest(all, 1)[0])
    const one = [...off][0]?.split("/").map((index) => Number(index) + 1)
    const heads = off.size === 1 ? `layer ${one[0]}, head ${one[1]} off` : off.size && `${off.size} of ${L * H} heads off`
    const what = [heads, covered.size && `${covered.size} of ${P} patches covered`].filter(Boolean).join(", ")
    const instead = best === now ? "" : `, and it says ${app.data.classes[now]}, ${percent(after[now])}`
    return `With ${what}: ${app.data.classes[best]} goes from ${percent(before[best])} to ${percent(after[best])}${instead}.`
  }

  function setOff(pairs) {
    off.clear()
    for (const [layer, head] of pairs) off.add(key(layer, head))
    apply()
  }

  const all = () => Array.from({ length: L * H }, (_, i) => [Math.floor(i / H), i % H])

  // A thumbnail was clicked while heads are switched by clicks; the fused column switches its whole layer.
  function toggle(layer, head) {
    if (!switching) return false
    const heads = head === null ? Array.from({ length: H }, (_, h) => h) : [head]
    const isOn = heads.some((h) => !off.has(key(layer, h)))
    for (const h of heads) isOn ? off.add(key(layer, h)) : off.delete(key(layer, h))
    apply()
    return true
  }

  // --- the brush: a click or a stroke over the picture; called for each patch that is passed

  function brushOver(index, starts, clicked) {
    if (!brush) return false
    if (clicked) return true // the stroke has done it
    if (starts) adding = !covered.has(index)
    if (index === null || (!starts && stroke === null)) return true
    if (stroke !== index) {
      stroke = index
      adding ? covered.add(index) : covered.delete(index)
      apply()
    }
    return true
  }
  addEventListener("pointerup", () => (stroke = null), { signal: app.signal })

  function toggleCover(index) {
    covered.has(index) ? covered.delete(index) : covered.add(index)
    apply()
  }

  // --- measurements

  function weightsNow() {
    const { state } = app
    return app.weights(state.layer, state.head, state.token, state.method)?.subarray(1)
  }

  async function coverMost() {
    const weights = weightsNow()
    if (!weights) return
    const mine = ++asked
    const tell = speak("Asking the model …")
    try {
      const answer = await app.ask("cover_most", { weights: Array.from(weights), count, fill })
      if (!answer || mine !== asked) return
      const [low, high] = [Math.min(...answer.random), Math.max(...answer.random)]
      const mean = answer.random.reduce((a, b) => a + b) / answer.random.length
      tell(
        `${answer.class}: ${percent(answer.untouched)} untouched; ${percent(answer.most)} with the ${count} patches covered that it attends to most; ` +
          `${percent(mean)} with ${count} at random (${answer.random.length} draws, ${percent(low)} to ${percent(high)}).`,
      )
      off.clear() // it was asked of the whole model
      covered.clear()
      for (const patch of answer.patches) covered.add(patch)
      app.parts.picture.cover(covered)
      changed = floatsOf(answer.probabilities)
      app.version++
    } catch (error) {
      tell(error.message)
    }
    app.draw()
  }

  // Asks for `total` numbers in parts and gives each part to `fillIn`; false if something newer took its place.
  async function inParts(kind, total, fillIn) {
    const size = Math.ceil(total / PARTS)
    const started = clearings
    for (let from = 0; from < total; from += size) {
      const answer = await app.ask(kind, { from, to: Math.min(total, from + size) })
      if (!answer || started !== clearings) return false
      fillIn(floatsOf(answer.values), from)
      app.version++
      app.draw()
    }
    return true
  }

  // Measurements are made on the model and the picture as they are, so nothing else is shown with them.
  function untouch() {
    off.clear()
    covered.clear()
    apply()
  }

  async function leaveOneOut() {
    untouch()
    leftOut = new Float32Array(P).fill(NaN)
    showsLeftOut = true
    loo.show(true)
    const tell = speak("Leaving out one patch after another …")
    try {
      if (await inParts("leave_one_out", P, (values, from) => leftOut?.set(values, from))) tell("")
    } catch (error) {
      tell(error.message)
      leftOut = null
      showsLeftOut = false
    }
    app.draw()
  }

  // What is lit while the leave-one-out map is shown, and how far it agrees with attention.
  function measured() {
    if (!shownMap()) return null
    const what = `What ${bestClass()} loses without each patch, measured on the untouched model.`
    const weights = weightsNow()
    if (leftOut.some(Number.isNaN) || !weights) return [what, "Being measured."]
    const rho = rankCorrelation(leftOut, weights)
    const gained = leftOut.filter((value) => value < 0).length
    return [what, `At most ${percent(Math.max(0, ...leftOut))}; ${gained} of ${P} patches are dark because it gains without them. Rank correlation with attention: ${rho.toFixed(2)}.`]
  }

  const bestClass = () => app.data.classes[largest(app.probabilities.subarray((L - 1) * app.data.classes.length), 1)[0]]

  // as weights with CLS first, so that it is drawn like any other map; what is not measured yet is dark
  function shownMap() {
    if (!showsLeftOut || !leftOut || app.pointed !== null) return null
    return Float32Array.from([0, ...leftOut], (value) => (value > 0 ? value : 0))
  }

  async function headEffects() {
    untouch()
    effects = new Float32Array(L * H).fill(NaN)
    const tell = speak("Switching off one head after another …")
    try {
      if (!(await inParts("head_effects", L * H, (values, from) => effects?.set(values, from)))) return
      const most = largest(effects, 1)[0]
      tell(`Most is lost without layer ${Math.floor(most / H) + 1}, head ${(most % H) + 1}: ${percent(Math.max(0, effects[most]))} of the probability. Red loses, blue gains.`)
    } catch (error) {
      tell(error.message)
      effects = null
    }
    app.version++
    app.draw()
  }

  function effectOf(layer, head) {
    const value = effects && head !== null ? effects[layer * H + head] : NaN
    if (Number.isNaN(value)) return null
    let top = 1e-6
    for (const each of effects) if (Math.abs(each) > top) top = Math.abs(each)
    const share = Math.round(70 * Math.abs(value) / top)
    return { color: `color-mix(in srgb, ${value > 0 ? "#d1352b" : "#2b6fd1"} ${share}%, transparent)`, text: (100 * value).toFixed(1).replace(/^-0\.0$/, "0.0") }
  }

  // --- the panel

  const clicks = checkbox("Switch heads off by clicking thumbnails", (on) => (switching = on) !== null && app.draw())
  const brushes = checkbox("Cover patches with a brush", (on) => {
    brush = on
    app.draw()
  }, "Drag over the picture; with the keyboard, Enter covers a patch")
  const fills = segmented("Covered patches are", [
    { value: "removed", text: "Removed", title: "The model never gets these tokens" },
    { value: "mean", text: "Mean colour" },
    { value: "blur", text: "Blurred" },
  ], (value) => {
    fill = value
    if (covered.size) apply()
  })
  fills.show(fill)
  const many = slider("Patches", { min: 1, max: Math.max(1, Math.floor(P / 2)), step: 1, text: String }, (value) => {
    count = value
    say("")
  })
  many.show(count)
  const loo = checkbox("Show it", (on) => {
    showsLeftOut = on
    app.draw()
  })
  const ofHead = [
    button("This head off", () => setOff([[app.state.layer, app.state.head]]), { title: "Open a head first" }),
    button("All but this head", () => setOff(all().filter(([layer, head]) => layer !== app.state.layer || head !== app.state.head)), { title: "Every other head of every layer. Open a head first" }),
  ]
  function clear() {
    effects = null
    leftOut = null
    showsLeftOut = false
    clearings++
    untouch()
  }
  root.replaceChildren(
    element("div", { class: "row" }, button("Cover what it attends to most, and as many at random", coverMost, { class: "button strong" }), many),
    result,
    element("div", { class: "row" }, brushes, fills),
    element("div", { class: "row" }, clicks,
      ofHead[0],
      button("This layer off", () => setOff(all().filter(([layer]) => layer === app.state.layer))),
      ofHead[1],
    ),
    element("div", { class: "row" }, button("Leave out each patch in turn", leaveOneOut), loo, button("Effect of each head", headEffects), button("As it was", clear)),
    element("p", { class: "note", text: "Where a model looks and what its answer depends on can differ: these tests show the second." }),
  )

  function update() {
    loo.style.visibility = leftOut ? "visible" : "hidden" // nothing may move under the pointer
    loo.show(showsLeftOut)
    for (const each of ofHead) each.disabled = app.state.head === null
  }

  return {
    update,
    toggle,
    toggleCover,
    brush: brushOver,
    isBrush: () => brush,
    isSwitching: () => switching,
    covered: () => covered,
    isOff: (layer, head) => (head === null ? false : off.has(key(layer, head))),
    markOf: (layer, head) => (head !== null && off.has(key(layer, head)) ? ", switched off" : ""),
    effectOf,
    probabilities: () => changed,
    shownMap,
    measured,
    open: () => (root.parentElement.open = true),
    coverMost,
  }
}
