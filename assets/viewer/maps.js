// All weights of one picture: attention of each head, fused heads, rollout. Decoded when they are looked at.
//
//   maps.row(method, layer, head, token, lookedAt) -> Float32Array (N), or null: then it is on the wanted list
//   maps.take(key, quantised)     a map that was fetched: "raw/3/5", "raw/3/all", "rollout/3"
//
// Layers and heads count from 0; head null is all heads fused. The formulas are those of vit/attention.py.

const RESIDUAL = 0.5

// Row number -> the columns of the cut's value that stay.
function tiesOf(text) {
  const found = new Map()
  const numbers = text ? new Int32Array(bytesOf(text).buffer) : []
  for (let at = 0; at < numbers.length; at += 2 + numbers[at + 1]) found.set(numbers[at], numbers.subarray(at + 2, at + 2 + numbers[at + 1]))
  return found
}

function createMaps(data) {
  const { layers: L, heads: H, grid } = data
  const N = 1 + grid[0] * grid[1]
  const dropped = Math.min(Math.floor(data.discard * N + 1e-9), N - 1)
  const maps = new Map() // key -> {values (N * N) uint8, scales (N)}
  const steps = new Map() // "layer/head" -> sparse rows of one factor of rollout
  const floats = new Map() // layer -> Float32Array (N * N): rollout up to there
  const cls = {}
  const wanted = new Set() // what was asked for and is not here

  const decode = ({ values, scales, own, ties }) => ({ values: bytesOf(values), scales: floatsOf(scales), own: floatsOf(own), ties: tiesOf(ties) })
  const part = ({ values, scales, own, ties }, i) => ({
    values: values.subarray(i * N * N, (i + 1) * N * N),
    scales: scales.subarray(i * N, (i + 1) * N),
    own: own.subarray(i * N, (i + 1) * N),
    ties,
    firstRow: i * N,
  })
  if (data.raw) {
    const [raw, fused, rollout] = [decode(data.raw), decode(data.fused), decode(data.rollout)]
    for (let layer = 0; layer < L; layer++) {
      maps.set(`rollout/${layer}`, part(rollout, layer))
      maps.set(`raw/${layer}/all`, part(fused, layer))
      for (let head = 0; head < H; head++) maps.set(`raw/${layer}/${head}`, part(raw, layer * H + head))
    }
  } else {
    cls.raw = decode(data.cls_raw)
    cls.rollout = decode(data.cls_rollout)
  }

  function take(key, quantised) {
    maps.set(key, decode(quantised))
    wanted.delete(key)
  }

  function find(key) {
    const found = maps.get(key)
    if (!found) wanted.add(key)
    return found
  }

  function row(method, layer, head, token, lookedAt) {
    if (!data.raw && token === 0 && !lookedAt) return clsRow(method, layer, head ?? H)
    if (method === "raw") return line(find(`raw/${layer}/${head ?? "all"}`), token, lookedAt)
    return head === null ? line(find(`rollout/${layer}`), token, lookedAt) : rolledHead(layer, head, token, lookedAt)
  }

  function clsRow(method, layer, column) {
    const { values, scales, own } = cls[method]
    const at = layer * (H + 1) + column
    const out = Float32Array.from(values.subarray(at * N, (at + 1) * N), (value) => value * scales[at])
    out[0] = own[at]
    return out
  }

  function line(map, token, lookedAt) {
    if (!map) return null
    const { values, scales, own } = map
    const out = new Float32Array(N)
    if (lookedAt) for (let i = 0; i < N; i++) out[i] = values[i * N + token] * scales[i]
    else for (let j = 0, at = token * N; j < N; j++) out[j] = values[at + j] * scales[token]
    out[token] = own[token]
    return out
  }

  // One head on top of the fused rollout of the layers below: (residual I + (1 - residual) A) R, rows to sum 1.
  function rolledHead(layer, head, token, lookedAt) {
    const step = stepOf(layer, head)
    if (layer > 0 && !find(`rollout/${layer - 1}`)) return null
    if (!step) return null
    const below = layer > 0 ? floatsBelow(layer - 1) : null // null is the identity
    const out = new Float32Array(N)
    const { keep, index, weight, self } = step
    if (lookedAt) {
      for (let i = 0; i < N; i++) {
        let sum = self[i] * (below ? below[i * N + token] : i === token)
        for (let k = i * keep; k < (i + 1) * keep; k++) sum += weight[k] * (below ? below[index[k] * N + token] : index[k] === token)
        out[i] = sum
      }
      return out
    }
    if (below) for (let j = 0, at = token * N; j < N; j++) out[j] = self[token] * below[at + j]
    else out[token] = self[token]
    for (let k = token * keep; k < (token + 1) * keep; k++) {
      const share = weight[k]
      if (!below) out[index[k]] += share
      else for (let j = 0, at = index[k] * N; j < N; j++) out[j] += share * below[at + j]
    }
    return out
  }

  // Each row without its weakest weights, divided by its sum. Of equal bytes the earlier column leaves first, but
  // where the weights behind them say otherwise: those rows are listed.
  function stepOf(layer, head) {
    const key = `${layer}/${head}`
    const map = find(`raw/${key}`)
    if (!map || steps.has(key)) return steps.get(key)
    const keep = N - dropped
    const step = { keep, index: new Uint16Array(N * keep), weight: new Float32Array(N * keep), self: new Float32Array(N) }
    const counts = new Uint32Array(256)
    for (let i = 0, k = 0; i < N; i++) {
      const values = map.values.subarray(i * N, (i + 1) * N)
      counts.fill(0)
      for (const value of values) counts[value]++
      let cut = 0, left = dropped // below `cut` all leave, at `cut` the first `left`
      while (left > counts[cut]) left -= counts[cut++]
      const tie = map.ties.get((map.firstRow ?? 0) + i)
      let sum = 0
      const first = k
      for (let j = 0; j < N; j++) {
        if (values[j] < cut || (values[j] === cut && (tie ? !tie.includes(j) : left-- > 0))) continue
        step.index[k] = j
        step.weight[k] = i === j ? map.own[i] : values[j] * map.scales[i]
        sum += step.weight[k++]
      }
      const total = RESIDUAL + (1 - RESIDUAL) * sum
      for (let at = first; at < k; at++) step.weight[at] *= (1 - RESIDUAL) / total
      step.self[i] = RESIDUAL / total
    }
    steps.set(key, step)
    return step
  }

  function floatsBelow(layer) {
    if (!floats.has(layer)) {
      const { values, scales, own } = maps.get(`rollout/${layer}`)
      const found = Float32Array.from(values, (value, at) => value * scales[Math.floor(at / N)])
      for (let i = 0; i < N; i++) found[i * N + i] = own[i]
      floats.set(layer, found)
    }
    return floats.get(layer)
  }

  for (const [key, map] of Object.entries(data.maps ?? {})) take(key, map)
  return { N, row, take, wanted, isHere: (key) => maps.has(key) }
}
