// Numbered requests to Python. One is under way at a time, at most one of each kind waits, the newest wins.
//
//   ask(kind, args) -> Promise: the answer; null if a newer one of its kind took its place; an Error for people
//
// The line to Python is the component "wire" (assets/wire/wire.js), which lives in a fragment of its own.

const NO_ANSWER_SECONDS = 60

// Streamlit joins what is set within a moment, and then reruns one fragment alone: of a request and of what was
// chosen, one would be lost. So each is sent in a moment of its own.
let sent = Promise.resolve()

function sendAlone(send) {
  const alone = () => {
    send()
    return new Promise((done) => setTimeout(done, 10))
  }
  sent = sent.then(alone, alone) // one that failed must not hold up the others
}

function createRequests(picture) {
  const wire = (globalThis[Symbol.for("patchlight.wire")] ??= new EventTarget())
  const waiting = new Map() // kind -> {kind, args, resolve, reject}
  let number = Date.now() // answers to a page that was reloaded meanwhile are older
  let underWay = null
  let timer = 0
  let isOpen = true

  function ask(kind, args) {
    if (!isOpen) return Promise.resolve(null)
    return new Promise((resolve, reject) => {
      waiting.get(kind)?.resolve(null)
      waiting.set(kind, { kind, args, resolve, reject })
      next()
    })
  }

  function next() {
    if (underWay || !wire.send || !waiting.size) return
    const [kind, request] = waiting.entries().next().value
    waiting.delete(kind)
    underWay = { ...request, number: ++number }
    timer = setTimeout(() => end({ error: "There was no answer. The picture and your settings are unharmed; try again." }), 1000 * NO_ANSWER_SECONDS)
    const message = { number, kind, args: request.args, picture: picture() }
    sendAlone(() => wire.send(message))
  }

  function end(answer) {
    clearTimeout(timer)
    const done = underWay
    underWay = null
    if (answer.error) done.reject(new Error(answer.error))
    else done.resolve(waiting.has(done.kind) ? null : answer.value)
    next()
  }

  const answered = ({ detail }) => underWay && detail.number === underWay.number && end(detail)
  wire.addEventListener("answer", answered)
  wire.addEventListener("open", next)

  function close() {
    isOpen = false
    clearTimeout(timer)
    wire.removeEventListener("answer", answered)
    wire.removeEventListener("open", next)
    for (const request of waiting.values()) request.resolve(null)
    underWay?.resolve(null)
    waiting.clear()
    underWay = null
  }
  return { ask, close }
}
