// What is seen, as a PNG at print size, made in the browser: pointing, masks and covered patches included.

const SAVED_PX = 1024

function savePicture(app) {
  const [height, width] = app.data.size
  const scale = Math.max(1, Math.floor(SAVED_PX / Math.max(height, width)))
  const canvas = element("canvas", { width: width * scale, height: height * scale })
  const context = canvas.getContext("2d")
  context.imageSmoothingEnabled = false
  context.drawImage(app.parts.picture.canvas, 0, 0, canvas.width, canvas.height)
  const [GY, GX] = app.data.grid
  const boxOf = (token) => {
    const [row, column] = [Math.floor((token - 1) / GX), (token - 1) % GX]
    return [(column / GX) * canvas.width, (row / GY) * canvas.height, canvas.width / GX, canvas.height / GY]
  }
  const frame = (token, color) => {
    if (!token) return
    context.strokeStyle = color
    context.lineWidth = Math.max(2, canvas.width / 224)
    context.strokeRect(...boxOf(token))
  }
  context.fillStyle = hatched(context)
  for (const patch of app.cause.covered()) context.fillRect(...boxOf(1 + patch))
  frame(app.shown().token, "#f2a63b")
  canvas.toBlob((blob) => {
    const link = element("a", { href: URL.createObjectURL(blob), download: `${app.data.name.replace(/[^a-z0-9]+/gi, "-")}.png` })
    link.click()
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000)
  }, "image/png")
}

// Covered patches as on the page: dark, with slanted lines.
function hatched(context) {
  const tile = element("canvas", { width: 12, height: 12 })
  const pen = tile.getContext("2d")
  pen.fillStyle = "#14161a"
  pen.fillRect(0, 0, 12, 12)
  pen.strokeStyle = "#8a8d93"
  pen.lineWidth = 2
  for (const shift of [-12, 0, 12]) {
    pen.beginPath()
    pen.moveTo(shift, 0)
    pen.lineTo(shift + 12, 12)
    pen.stroke()
  }
  return context.createPattern(tile, "repeat")
}
