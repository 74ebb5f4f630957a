// Weights drawn over a picture, with the formulas of vit/overlay.py: light in linear RGB, heat blended in sRGB.
//
//   const surface = createSurface(image, width, height, grid, smooth)     // its pixels, and which patch each is in
//   paintInto(target, at, stride, surface, shares, style, inferno)        // target: RGBA bytes of a canvas

const LIGHT_STEPS = 16384
const TO_LINEAR = Float32Array.from({ length: 256 }, (_, i) => {
  const srgb = i / 255
  return LIGHT_STEPS * (srgb <= 0.04045 ? srgb / 12.92 : ((srgb + 0.055) / 1.055) ** 2.4)
})
const TO_SRGB = Uint8Array.from({ length: LIGHT_STEPS + 1 }, (_, i) => {
  const linear = Math.min(1, (i + 0.5) / LIGHT_STEPS)
  return Math.round(255 * (linear <= 0.0031308 ? linear * 12.92 : 1.055 * linear ** (1 / 2.4) - 0.055))
})
const STRENGTHS = { light: 0.85, heat: 0.6 }

const strengthOf = (state) => state.strength ?? STRENGTHS[state.draw]

// Larger than the image, its pixels stay crisp, and smooth light is smoother than they are.
function createSurface(image, width, height, grid, smooth) {
  const canvas = document.createElement("canvas")
  canvas.width = width
  canvas.height = height
  const context = canvas.getContext("2d", { willReadFrequently: true })
  context.imageSmoothingEnabled = width < image.width
  context.imageSmoothingQuality = "high"
  context.drawImage(image, 0, 0, width, height)
  const pixels = context.getImageData(0, 0, width, height).data
  return { pixels, width, height, grid, smooth, down: axisOf(height, grid[0], smooth), across: axisOf(width, grid[1], smooth) }
}

// Which patch each line of pixels shows; with `smooth`, between which two, and how near to the second.
function axisOf(length, patches, smooth) {
  const first = new Uint16Array(length), second = new Uint16Array(length), near = new Float32Array(length)
  for (let i = 0; i < length; i++) {
    const centre = ((2 * i + 1) * patches) / (2 * length)
    const at = smooth ? Math.min(patches - 1, Math.max(0, centre - 0.5)) : Math.floor(centre)
    first[i] = Math.floor(at)
    second[i] = Math.min(patches - 1, first[i] + 1)
    near[i] = at - first[i]
  }
  return { first, second, near }
}

// Weights of patches as shares of the top, 0 to 1; a map without weight stays dark.
function sharesOf(weights, top, out) {
  for (let p = 0; p < out.length; p++) out[p] = top > 0 ? Math.min(1, Math.max(0, weights[p + 1] / top)) : 0
  return out
}

// The largest weight of a patch but `own`, which would outshine the rest: see dim_own in vit/overlay.py.
function topOf(weights, own = 0) {
  let top = 0
  for (let p = 1; p < weights.length; p++) if (weights[p] > top && p !== own) top = weights[p]
  return top > 0 || own === 0 ? top : weights[own]
}

function paintInto(target, at, stride, surface, shares, style, inferno) {
  const { pixels, width, height, grid, down, across, smooth } = surface
  const line = new Float32Array(grid[1])
  const isLight = style.draw === "light"
  const strength = strengthOf(style)
  for (let y = 0; y < height; y++) {
    const up = down.first[y] * grid[1], low = down.second[y] * grid[1], near = down.near[y]
    for (let c = 0; c < grid[1]; c++) line[c] = smooth ? shares[up + c] * (1 - near) + shares[low + c] * near : shares[up + c]
    let to = at + y * stride, from = 4 * y * width
    for (let x = 0; x < width; x++, to += 4, from += 4) {
      const c = across.first[x]
      const share = smooth ? line[c] * (1 - across.near[x]) + line[across.second[x]] * across.near[x] : line[c]
      if (isLight) {
        const light = 1 - strength + strength * share
        target[to] = TO_SRGB[(TO_LINEAR[pixels[from]] * light) | 0]
        target[to + 1] = TO_SRGB[(TO_LINEAR[pixels[from + 1]] * light) | 0]
        target[to + 2] = TO_SRGB[(TO_LINEAR[pixels[from + 2]] * light) | 0]
      } else {
        const color = 3 * ((share * 255 + 0.5) | 0)
        target[to] = strength * inferno[color] + (1 - strength) * pixels[from]
        target[to + 1] = strength * inferno[color + 1] + (1 - strength) * pixels[from + 1]
        target[to + 2] = strength * inferno[color + 2] + (1 - strength) * pixels[from + 2]
      }
      target[to + 3] = 255
    }
  }
}
