"""The viewer of one picture, or of several, as one HTML file that needs no Python and no network.

    data = payload_of(vit.open_picture("cat.png"), model, checkpoint, name="cat", title="cat.png")
    Path("cat.html").write_text(export_html([data]), encoding="utf-8")     # opens by a double click

Everything is inside, and the file forbids itself to load anything else. A picture of the default model takes
0.3 MB; of a large grid, maps go in as long as the picture's part of the file stays under PICTURE_BYTES.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template

from PIL import Image

from vit import viewer
from vit.attention import Fusion, token_index
from vit.checkpoint import Checkpoint
from vit.explanation import Explanation, explain
from vit.images import canvas, prepare
from vit.model import VisualTransformer
from vit.payload import map_payload, payload

TITLE = "Where a Vision Transformer looks"
PICTURE_BYTES = 1_800_000  # with the viewer's own code, a file of one picture stays under 2 MB

_ASSETS = Path(__file__).parents[1] / "assets"


def export_html(payloads: Sequence[Mapping], title: str = TITLE) -> str:
    """One HTML page, to be written as UTF-8: the pictures of `payloads` (as of `payload_of`), one at a time.

    `view` in a payload, a dict of texts as in a link of the page such as {"layer": "3", "token": "4,4"}, says
    what of it is shown first. ValueError without any picture.
    """
    if not payloads:
        raise ValueError("there is no picture to export")
    css = "\n".join([_read("viewer/export.css"), _read("gallery/gallery.css"), viewer.css()])
    js = "\n".join([viewer.js(), _read("viewer/export.js")])
    # Only these two texts can run or style anything, whatever the titles say; and nothing can be fetched.
    policy = (
        f"default-src 'none'; script-src {_hash_source(js)}; style-src {_hash_source(css)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    data = json.dumps([{**each, "live": False} for each in payloads], separators=(",", ":"))
    return Template(_read("viewer/export.html")).substitute(
        policy=policy,
        title=html.escape(title.encode(errors="replace").decode()),  # a file's name need not be valid Unicode
        css=css,
        viewer=viewer.html(),
        data=data.replace("<", "\\u003c"),  # "</script>" would end the script, "<!--" hide its end
        js=js,
    )


def payload_of(
    picture: Image.Image,
    model: VisualTransformer,
    checkpoint: Checkpoint,
    *,
    name: str,
    title: str,
    fit: str = "crop",
    fusion: Fusion = "mean",
    discard: float = 0.9,
    true_class: str | None = None,
    view: Mapping[str, str] | None = None,
    explanation: Explanation | None = None,
) -> dict:
    """All that `export_html` needs of one picture; `name` is for the names of files, `title` for people.

    `explanation` saves making one, if it was made of this picture with this `fit`, `fusion` and `discard`.
    ValueError for what `prepare`, `explain` and `token_index` refuse.
    """
    if explanation is None:
        x = prepare(picture, checkpoint, fit).to(model.device)
        explanation = explain(model, x, head_fusion=fusion, discard_ratio=discard)
    pixels = canvas(picture, checkpoint, fit)
    texts = {"name": name, "title": title, "true_class": true_class}
    data = payload(explanation, checkpoint, pixels, fusion=fusion, discard=discard, **texts)
    return with_maps(data | ({} if view is None else {"view": dict(view)}), explanation)


def with_maps(data: dict, explanation: Explanation, most_bytes: int = PICTURE_BYTES) -> dict:
    """`data` (as of `vit.payload`), and whole maps of it where only the rows of CLS are inside: under "maps".

    As many as fit into `most_bytes` of JSON: first those that data["view"] shows, then rollout and fused
    attention, from the last layer down. `data` that has every map, or no room, is returned as it is.
    """
    if "raw" in data:
        return data
    maps = {}
    room_bytes = most_bytes - len(json.dumps(data))
    for key in dict.fromkeys(_wanted(data)):
        found = map_payload(explanation, key, data["fusion"], data["discard"])
        room_bytes -= len(json.dumps({key: found}))
        if room_bytes < 0:
            break
        maps[key] = found
    return data | ({"maps": maps} if maps else {})


def opens_unlit(data: Mapping) -> bool:
    """Whether what data["view"] shows first is a map too large to be inside."""
    view = data.get("view", {})
    from_cls = (view.get("token") or "cls") == "cls" and view.get("looked_at") != "yes"
    return not ("raw" in data or from_cls or next(_wanted(data)) in data.get("maps", {}))


def _wanted(data: Mapping) -> Iterator[str]:
    """The names of maps, as `map_payload` takes them, most wanted first."""
    view, L = data.get("view", {}), data["layers"]
    layer = int(view.get("layer") or L) - 1
    head = int(view["head"]) - 1 if view.get("head") else None
    is_patch = token_index(view.get("token") or "cls", tuple(data["grid"])) > 0
    if is_patch or view.get("looked_at") == "yes":
        is_raw = view.get("method") == "raw"
        if is_raw or head is not None:
            yield f"raw/{layer}/{'all' if head is None else head}"
        if not is_raw and (head is None or layer > 0):
            yield f"rollout/{layer if head is None else layer - 1}"
    for layer in reversed(range(L)):
        yield f"rollout/{layer}"
        yield f"raw/{layer}/all"


def _hash_source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
