// What the model says: the class, and bars that follow the layer: final norm and head on that layer's CLS token.

const BARS = 5

function createAnswer(root, app) {
  const { classes, layers: L, true_class: truth } = app.data
  const K = classes.length
  const final = app.probabilities.subarray((L - 1) * K)
  const shownClasses = largest(final, Math.min(BARS, K))
  const best = shownClasses[0]
  const verdict = element("p", { class: "verdict" }, element("strong", { text: classes[best] }), ` ${percent(final[best])}`)
  if (truth !== null) {
    const known = classes.includes(truth) // a model cannot be wrong about classes that it was never told of
    const mark = known ? (truth === classes[best] ? "✓ " : "✗ ") : ""
    verdict.append(element("span", { class: "truth", text: `${mark}true label: ${truth}` }))
  }
  const rowOf = (k) => {
    const bar = element("span", { class: "bar" })
    const before = element("span", { class: "before", hidden: true })
    const value = element("span", { class: "value" })
    const row = element("li", {}, element("span", { class: "name", text: classes[k], title: classes[k] }), element("span", { class: "track" }, bar, before), value)
    return { k, bar, before, value, row }
  }
  const rows = shownClasses.map(rowOf)
  const list = element("ul", { class: "bars", "aria-label": "Probabilities" }, ...rows.map(({ row }) => row))
  // A place for the class that leads at a layer or under a change, where it is none of those; always there, so
  // that nothing below it moves.
  const other = rowOf(best)
  if (K > rows.length) list.append(other.row)
  const note = element("p", { class: "note" })
  const save = button("Save picture", () => savePicture(app), { class: "save", title: "What you see now, as a PNG" })
  root.replaceChildren(verdict, list, element("div", { class: "row" }, note, save))
  let drawn = ""

  function update() {
    const { layer } = app.shown()
    const changed = app.cause.probabilities()
    const now = (changed ?? app.probabilities).subarray(layer * K, (layer + 1) * K)
    const untouched = app.probabilities.subarray(layer * K, (layer + 1) * K)
    const key = `${layer} ${now.join()}`
    if (key === drawn) return
    drawn = key
    const leading = largest(now, 1)[0]
    other.k = leading
    other.row.firstChild.textContent = other.row.firstChild.title = classes[leading]
    other.row.classList.toggle("absent", shownClasses.includes(leading))
    for (const { k, bar, before, value } of [...rows, other]) {
      bar.style.transform = `scaleX(${now[k]})`
      before.hidden = !changed
      before.style.left = `${100 * untouched[k]}%`
      value.textContent = changed ? `${percent(untouched[k])} → ${percent(now[k])}` : percent(now[k])
    }
    root.classList.toggle("changed", Boolean(changed))
    note.textContent =
      layer < L - 1
        ? `Read after layer ${layer + 1} of ${L}, where it would say ${classes[leading]}, ${percent(now[leading])}.`
        : changed
          ? `With the change it says ${classes[leading]}, ${percent(now[leading])}. The line marks it untouched.`
          : "Read after the last layer."
  }
  return { update }
}
