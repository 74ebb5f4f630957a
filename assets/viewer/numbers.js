// Small things that every part uses: base64, words for numbers and tokens, elements.

function bytesOf(text) {
  const raw = atob(text)
  const bytes = new Uint8Array(raw.length)
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i)
  return bytes
}

function floatsOf(text) {
  return new Float32Array(bytesOf(text).buffer)
}

// As vit/words.py: `91 %`, and one digit more where that says more. The space never breaks a line.
function percent(share) {
  const digits = share >= 0.0995 || share === 0 ? 0 : 1
  return `${(100 * share).toFixed(digits)}\u00a0%`
}

function tokenLabel(token, grid) {
  return token === 0 ? "CLS" : `row ${Math.floor((token - 1) / grid[1]) + 1}, column ${((token - 1) % grid[1]) + 1}`
}

function tokenName(token, grid) {
  return token === 0 ? "cls" : `${Math.floor((token - 1) / grid[1]) + 1},${((token - 1) % grid[1]) + 1}`
}

function tokenOf(name, grid) {
  const [row, column] = name.split(",").map(Number)
  const inside = row >= 1 && row <= grid[0] && column >= 1 && column <= grid[1]
  return inside ? 1 + (row - 1) * grid[1] + column - 1 : 0
}

// The indices of the `count` largest, largest first; of equals the earlier one.
function largest(values, count) {
  const order = Array.from(values, (_, i) => i)
  return order.sort((a, b) => values[b] - values[a] || a - b).slice(0, count)
}

// The smallest set of places that holds this share of the weight, as flags; as vit.attention.mass_mask.
function massMask(weights, share) {
  const inside = new Uint8Array(weights.length)
  let total = 0
  for (const weight of weights) total += weight
  if (share <= 0 || total <= 0) return inside
  let held = 0
  for (const i of largest(weights, weights.length)) {
    if (held >= share * total * (1 - 1e-6) || weights[i] <= 0) break
    inside[i] = 1
    held += weights[i]
  }
  return inside
}

// Spearman's: Pearson's correlation of ranks, ties sharing their mean rank; 0 where one is constant.
function rankCorrelation(a, b) {
  const [x, y] = [ranks(a), ranks(b)]
  const mean = (x.length + 1) / 2
  let both = 0, ofX = 0, ofY = 0
  for (let i = 0; i < x.length; i++) {
    both += (x[i] - mean) * (y[i] - mean)
    ofX += (x[i] - mean) ** 2
    ofY += (y[i] - mean) ** 2
  }
  return ofX && ofY ? both / Math.sqrt(ofX * ofY) : 0
}

function ranks(values) {
  const order = Array.from(values, (_, i) => i).sort((i, j) => values[i] - values[j])
  const found = new Float64Array(values.length)
  for (let start = 0; start < order.length;) {
    let end = start
    while (end < order.length && values[order[end]] === values[order[start]]) end++
    for (let i = start; i < end; i++) found[order[i]] = (start + end + 1) / 2
    start = end
  }
  return found
}

// element("button", {class: "chip", text: "CLS", onclick: f, "aria-pressed": "true"}, ...children)
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.textContent = value
    else if (name.startsWith("on")) made[name] = value
    else if (name in made && typeof value !== "string") made[name] = value
    else made.setAttribute(name, value)
  }
  made.append(...children)
  return made
}

const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches
