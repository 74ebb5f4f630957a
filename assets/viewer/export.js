// A file of its own (vit/export.py): one picture in the viewer, the others in a gallery above it.

const exported = JSON.parse(document.getElementById("data").textContent)
const exportGallery = document.querySelector(".gallery")
let opened = null // the picture in the viewer

function openExported(index) {
  const data = exported[index]
  // From picture to picture, what is looked at stays, as long as it is the same model.
  const stays = opened && opened.model_id === data.model_id
  const shown = { ...data, view: opened ? (stays ? undefined : {}) : data.view }
  opened = data
  document.querySelector(".picture-title").textContent = data.title
  document.querySelector(".model").textContent = data.model ? `Model: ${data.model}, id ${data.model_id}.` : "" // one that no file holds has no name
  const held = document.querySelector(".held")
  held.hidden = Boolean(data.raw)
  held.textContent = data.raw ? "" : heldText(data)
  ;[...exportGallery.children].forEach((each, i) => {
    each.setAttribute("aria-pressed", String(i === index))
    each.tabIndex = i === index ? 0 : -1
  })
  viewer({ data: shown, parentElement: document.querySelector(".place"), setStateValue() {}, setTriggerValue() {} })
}

// Maps of a large grid would fill many megabytes: which of them this copy has, in words.
function heldText(data) {
  const every = Array.from({ length: data.layers }, (_, layer) => layer)
  const named = []
  for (const [name, keyOf] of [["rollout", (layer) => `rollout/${layer}`], ["raw attention", (layer) => `raw/${layer}/all`]]) {
    const held = every.filter((layer) => data.maps?.[keyOf(layer)]).map((layer) => layer + 1)
    if (held.length === data.layers) named.push(`${name} of every layer`)
    else if (held.length) named.push(`${name} of ${held.length > 1 ? "layers" : "layer"} ${held.join(", ")}`)
  }
  const patches = named.length ? `with all heads fused it also holds where patches look: ${named.join("; ")}` : "where patches look is not inside"
  return `The maps of this model are too large for one file. Of single heads, this copy holds only where CLS looks; ${patches}. What is not inside stays unlit.`
}

if (exported.length > 1) {
  exportGallery.append(
    ...exported.map((data, index) => {
      const picture = element("img", { alt: data.title, src: data.picture })
      return element("button", { type: "button", title: data.title, onclick: () => openExported(index) }, picture)
    }),
  )
  exportGallery.hidden = false
  // One stop for the Tab key; the arrow keys move within.
  exportGallery.onkeydown = (event) => {
    const buttons = [...exportGallery.children]
    const columns = getComputedStyle(exportGallery).gridTemplateColumns.split(" ").length
    const from = buttons.indexOf(event.target)
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key]
    const to = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1 : from + step
    if (from < 0 || !(to in buttons)) return
    event.preventDefault()
    buttons[from].tabIndex = -1
    buttons[to].tabIndex = 0
    buttons[to].focus()
  }
}
openExported(0)
