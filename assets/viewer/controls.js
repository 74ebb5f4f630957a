// The few controls there are, made of the browser's own: radios as a row of buttons, sliders, check boxes.
// Each returns its element, with `show(value)` to follow the state without telling anyone.

let controlNames = 0

function segmented(label, options, choose) {
  const name = `patchlight-${++controlNames}`
  const group = element("fieldset", { class: "segmented" }, element("legend", { class: "unseen", text: label }))
  const radios = options.map(({ value, text, title }) => {
    const radio = element("input", { type: "radio", name, value: String(value), onchange: () => choose(value) })
    group.append(element("label", title ? { title } : {}, radio, element("span", { text })))
    return radio
  })
  group.show = (value) => radios.forEach((radio, i) => (radio.checked = options[i].value === value))
  return group
}

function slider(label, { min, max, step, text }, slide) {
  const said = element("output", { class: "value" })
  const input = element("input", { type: "range", min: String(min), max: String(max), step: String(step) })
  const tell = () => {
    said.textContent = text(input.valueAsNumber)
    input.setAttribute("aria-valuetext", said.textContent)
  }
  input.oninput = () => {
    tell()
    slide(input.valueAsNumber)
  }
  const control = element("label", { class: "slider" }, element("span", { text: label }), input, said)
  control.input = input
  control.show = (value) => {
    if (input.valueAsNumber === value && said.textContent) return
    input.value = String(value)
    tell()
  }
  return control
}

function checkbox(label, choose, title) {
  const input = element("input", { type: "checkbox", onchange: () => choose(input.checked) })
  const control = element("label", title ? { class: "checkbox", title } : { class: "checkbox" }, input, element("span", { text: label }))
  control.input = input
  control.show = (value) => (input.checked = value)
  return control
}

function button(text, press, attributes = {}) {
  return element("button", { type: "button", class: "button", text, onclick: press, ...attributes })
}
