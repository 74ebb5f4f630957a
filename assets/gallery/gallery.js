// A grid of small pictures to choose from. data: {label, chosen, items: [{id, label, src}]}; a click or Enter
// sends the trigger `picked` with the id. One stop for the Tab key; the arrow keys move within (roving focus).

const drawn = new WeakMap() // the items that an instance shows now, so that focus survives a rerun

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".gallery")
  const signature = JSON.stringify(data.items.map((item) => item.id))
  root.setAttribute("aria-label", data.label)
  if (drawn.get(root) !== signature) {
    root.replaceChildren(...data.items.map(button))
    drawn.set(root, signature)
  }
  const buttons = [...root.children]
  const chosen = Math.max(0, data.items.findIndex((item) => item.id === data.chosen))
  buttons.forEach((each, i) => {
    each.setAttribute("aria-pressed", String(data.items[i].id === data.chosen))
    each.tabIndex = i === chosen ? 0 : -1
    each.onclick = () => setTriggerValue("picked", data.items[i].id)
  })
  root.onkeydown = (event) => {
    const from = buttons.indexOf(event.target)
    const columns = getComputedStyle(root).gridTemplateColumns.split(" ").length
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key]
    const to = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1 : from + step
    if (from < 0 || !(to in buttons)) return
    event.preventDefault()
    buttons[from].tabIndex = -1
    buttons[to].tabIndex = 0
    buttons[to].focus()
  }
}

function button(item) {
  const element = document.createElement("button")
  const picture = document.createElement("img")
  element.type = "button"
  element.title = item.label
  picture.src = item.src
  picture.alt = item.label
  element.append(picture)
  return element
}
