"""The page with the viewer in it, as the tests in a real browser open it and read it.

    with opened(context, page_server, "picture=sample:cat_00") as page:
        patch(page, 3, 5).hover()
        pixels(page)          # what the large picture shows now

Locators look into the viewer's open shadow root by themselves.
"""

import base64
import io
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image

import vit
from vit.cause import Change, answer
from vit.checkpoint import BUNDLED
from vit.overlay import Style, draw
from vit.words import percent

SIZES = {"wide": (1440, 900), "narrow": (390, 844)}
PICTURE = ".stage canvas.picture"


@contextmanager
def opened(context, server, query="", size="wide", scheme="light", motion="reduce"):
    """A new page, with a session of its own, whose picture is on screen.

    In a new context each page would fetch all of Streamlit's scripts again, which takes seconds. `motion` is
    what the person prefers; reduced, pictures do not fade and tests need not wait for that.
    """
    width, height = SIZES[size]
    page = context.new_page()
    try:
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme, reduced_motion=motion)
        listen(page)
        visit(page, server, query)
        yield page
    finally:
        page.close()


def listen(page) -> None:
    """`page.complaints` will hold what the browser complains of, `page.sent` the messages to the server."""
    page.complaints, page.sent = [], []
    page.on(
        "console",
        lambda said: page.complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("requestfailed", lambda request: page.complaints.append(f"{request.url} {request.failure}"))
    page.on("websocket", lambda socket: socket.on("framesent", lambda frame: page.sent.append(frame)))


def visit(page, server, query="") -> None:
    """Go to the page anew, as by a link: a new session."""
    page.goto(f"{server.url}/?{query}")
    settled(page)


def settled(page) -> None:
    """Wait until the script has ended and the picture is drawn."""
    page.locator(f"{PICTURE}[aria-label]").wait_for(timeout=60_000)
    page.locator('[data-testid="stApp"][data-test-script-state="notRunning"]').wait_for(timeout=30_000)
    drawn(page)


def drawn(page) -> None:
    """Wait for what the viewer draws in its next frame."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def picture_name(page) -> str:
    """What a screen reader says of the large picture: its title, how it is drawn, and what is shown."""
    return page.locator(PICTURE).get_attribute("aria-label")


def another_picture(page, title: str) -> None:
    """Wait until the picture of this title is on screen."""
    page.locator(f'{PICTURE}[aria-label^="{title}, "]').wait_for(timeout=30_000)
    settled(page)


def pixels(page, selector: str = PICTURE) -> np.ndarray:
    """(h, w, 3) uint8: what a canvas holds."""
    drawn(page)
    url = page.locator(selector).first.evaluate("canvas => canvas.toDataURL('image/png')")
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    return np.asarray(image.convert("RGB"))


def link_of(page) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(urlsplit(page.url).query).items()}


def linked(page, **params) -> None:
    """Wait until the address holds these and nothing else."""
    page.wait_for_function(
        """wanted => {
          const found = Object.fromEntries(new URLSearchParams(location.search))
          const names = Object.keys(wanted)
          const same = names.every((name) => found[name] === wanted[name])
          return same && Object.keys(found).length === names.length
        }""",
        arg=params,
        timeout=10_000,
    )


def patch(page, row: int, column: int):
    """The patch of the large picture, counted from 1, as in what the page says."""
    return page.locator(f'.stage .cell[aria-label="row {row}, column {column}"]')


def thumb(page, layer: int, head: int | None):
    """The thumbnail of this layer and head, counted from 1; None is all heads. Its name may say more."""
    heads = "all heads" if head is None else f"head {head}"
    return page.locator(f'.board .cell[aria-label="layer {layer}, {heads}"]')


def choose(page, name: str) -> None:
    """One of a row of choices of the viewer, such as Raw attention."""
    page.locator(".viewer").get_by_role("radio", name=name, exact=True).check()


def press(page, name: str) -> None:
    page.locator(".viewer").get_by_role("button", name=name, exact=True).click()


def open_drawer(page, name: str) -> None:
    """cause, drawing, arithmetic or anatomy."""
    drawer = page.locator(f"details.{name}")
    if drawer.get_attribute("open") is None:
        drawer.locator("summary").click()


def bars(page) -> dict[str, str]:
    """What stands beside each class's bar."""
    drawn(page)
    rows = page.locator(".answer .bars li:not(.absent)")
    texts = "all => all.map((row) => ['.name', '.value'].map((part) => row.querySelector(part).textContent))"
    return dict(rows.evaluate_all(texts))


def looks(page) -> str:
    """The sentence under the picture."""
    drawn(page)
    return page.locator(".looks span").inner_text()


def said(page) -> str:
    """What a screen reader was told last."""
    drawn(page)
    return page.locator(".said").inner_text()


def leave(page) -> None:
    page.mouse.move(2, 2)
    drawn(page)


def focused(page) -> dict:
    """What has the focus: its name, kind and grid, and whether it shows; a radio's shows beside it."""
    return page.evaluate(
        """() => {
          const at = document.activeElement.shadowRoot?.activeElement ?? document.activeElement
          const ring = ({ boxShadow, outlineStyle }) => boxShadow !== "none" || outlineStyle !== "none"
          const beside = at.type === "radio" ? [at.nextElementSibling] : []
          const shows = [at, ...beside].some((each) => ring(getComputedStyle(each)))
          return {
            name: (at.getAttribute("aria-label") ?? at.textContent).slice(0, 60),
            kind: at.type ?? at.getAttribute("role") ?? at.localName,
            grid: at.closest(".stage") ? "picture" : at.closest(".board") ? "thumbnails" : "",
            shows,
          }
        }"""
    )


def eventually(page, read, wanted, seconds: float = 20) -> None:
    """Wait until `read(page)` is what is wanted; fails with what it was instead."""
    for _ in range(round(seconds * 20)):
        if read(page) == wanted:
            return
        page.wait_for_timeout(50)
    assert read(page) == wanted


def asked(page, kind: str) -> int:
    """How often Python was asked for this."""
    return sum(f'"{kind}"'.encode() in frame for frame in page.sent if isinstance(frame, bytes))


@cache
def by_python(name: str, discard: float = 0.9) -> SimpleNamespace:
    """A sample explained without the page: picture, x, model, and the numbers as arrays."""
    model, checkpoint = vit.load(BUNDLED)
    picture = vit.open_picture(BUNDLED.parents[1] / "samples" / f"{name}.png")
    x = vit.prepare(picture, checkpoint)
    found = vit.explain(model, x, discard_ratio=discard)
    return SimpleNamespace(
        model=model,
        x=x,
        picture=picture,
        classes=checkpoint.class_names,
        explanation=found,
        layers=found.layer_logits[0].softmax(dim=-1).numpy(),  # (L, K)
        attention=found.attention[0].numpy(),
        rollout=found.rollout[0].numpy(),
    )


def by_cause(name: str, **change) -> np.ndarray:
    """(L, K) probabilities after each layer of a sample under a `vit.cause.Change`."""
    found = by_python(name)
    return answer(found.model, found.x, Change(**change)).numpy()


def bar_texts(found: SimpleNamespace, layer: int, changed: np.ndarray | None = None) -> dict[str, str]:
    """What `bars` should read at a layer, from 0; `changed` (L, K) are the probabilities under a change."""
    shown = np.argsort(-found.layers[-1], kind="stable")[:5]
    leading = (found.layers if changed is None else changed)[layer].argmax()
    shown = [*shown, *({leading} - set(shown.tolist()))]  # the class that leads is always there
    texts = {}
    for k in shown:
        before = percent(found.layers[layer, k])
        texts[found.classes[k]] = before if changed is None else f"{before} → {percent(changed[layer, k])}"
    return texts


def bounds(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Between which weights the browser's lie: it knows each to 1/510 of its row's largest."""
    off = rows.max(axis=-1, keepdims=True) / 510
    return np.maximum(rows - off, 0), rows + off


def drawn_between(picture, low, high, style: Style, size_px, grid=(8, 8), token=0):
    """Between which pixels the browser's lie, 2 of 255 beside what is drawn of the weights (N,) between.

    In the view of a patch, `token`, its own weight is drawn no brighter than the largest of the others.
    """
    if token:
        low, high = low.copy(), high.copy()
        for weights in (low, high):
            weights[token] = min(weights[token], np.delete(weights, [0, token]).max())
    low, high = (weights[1:].reshape(grid) for weights in (low, high))
    least, most = low / high.max(), np.minimum(high / low.max(), 1)
    steps = [draw(picture, least + at * (most - least), style, size_px=size_px, top=1.0).astype(int)
             for at in np.linspace(0, 1, 9)]  # fmt: skip
    return np.min(steps, axis=0) - 2, np.max(steps, axis=0) + 2


def share_outside(seen: np.ndarray, between) -> float:
    low, high = between
    return ((seen < low) | (seen > high)).mean()
