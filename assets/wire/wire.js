// The viewer's line to Python: it sends numbered requests and passes answers on. It lives in a fragment of its
// own, so that an answer does not carry the picture's maps along, and a request reruns nothing else.

export default function ({ data, setTriggerValue }) {
  const wire = (globalThis[Symbol.for("patchlight.wire")] ??= new EventTarget())
  wire.send = (request) => setTriggerValue("ask", request)
  if (data.answer) wire.dispatchEvent(new CustomEvent("answer", { detail: data.answer }))
  wire.dispatchEvent(new Event("open"))
}
