"""One picture's explanation as the viewer in the browser takes it: small JSON, with arrays as base64 text.

    data = payload(explanation, checkpoint, canvas, name="cat", title="cat", fusion="mean", discard=0.9)
    data["raw"]["values"], data["raw"]["scales"]           # (L, H, N, N) uint8 and (L, H, N) float32
    map_payload(explanation, "raw/3/all", fusion="mean")   # one map more, for grids too large to send whole

A row of weights travels as uint8 with one float32 scale: weight = value * scale, which is off by at most
1/510 of the row's largest weight. Maps of the default model take 0.3 MB that way; as JSON, twenty times that.
Layers and heads count from 0, as in the arrays.
"""

import base64
import hashlib
import re
from io import BytesIO

import numpy as np
from PIL import Image

from vit.attention import FUSIONS, Fusion, fuse_heads, rollout_of_heads_row
from vit.checkpoint import Checkpoint
from vit.explanation import Explanation
from vit.overlay import colormap, png_bytes

WHOLE_VALUES = 2**18  # more weights than these are fetched map by map, when somebody looks at them
_LARGEST_PNG_BYTES = 150_000


def payload(
    explanation: Explanation,
    checkpoint: Checkpoint,
    canvas: np.ndarray,
    *,
    name: str,
    title: str,
    fusion: Fusion,
    discard: float,
    true_class: str | None = None,
    whole: bool | None = None,
) -> dict:
    """All that the viewer needs for one picture, the first of the explanation; made of JSON's types alone.

    `canvas` (h, w, 3) uint8 is drawn on; `name` is the picture's in a link, `title` for people. `fusion` and
    `discard` are those that the explanation was made with. `whole` says whether every map is inside; by
    default only where they have at most 2**18 weights. Without them the rows of CLS are.
    """
    attention, rollout = explanation.attention[0], explanation.rollout[0]  # (L, H, N, N), (L, N, N)
    L, H = attention.shape[:2]
    identity = f"{checkpoint.id} {name} {canvas.shape} ".encode() + canvas.tobytes()
    data = {
        "id": hashlib.sha256(identity).hexdigest()[:16],
        "name": name,
        "title": title,
        "true_class": true_class,
        "model": checkpoint.name,
        "model_id": checkpoint.id,
        "picture": _data_url(canvas),
        "size": list(canvas.shape[:2]),
        "grid": list(checkpoint.architecture.grid),
        "layers": L,
        "heads": H,
        "classes": list(checkpoint.class_names),
        "probabilities": _text(explanation.layer_logits[0].softmax(dim=-1)),  # (L, K) float32
        "fusion": fusion,
        "fusions": list(FUSIONS),
        "discard": discard,
        "inferno": base64.b64encode(colormap("inferno").tobytes()).decode(),  # (256, 3)
    }
    if attention.numel() <= WHOLE_VALUES if whole is None else whole:
        return data | {"raw": quantised(attention), "rollout": quantised(rollout)}
    fused = fuse_heads(attention[:, :, :1], fusion)  # (L, 1, N)
    heads = rollout_of_heads_row(explanation.attention, explanation.rollout, 0, discard)[0]  # (L, H, N)
    return data | {
        "cls_raw": quantised(np.concatenate([_array(attention[:, :, 0]), _array(fused)], axis=1)),
        "cls_rollout": quantised(np.concatenate([_array(heads), _array(rollout[:, :1])], axis=1)),
    }


def map_payload(explanation: Explanation, key: str, fusion: Fusion) -> dict:
    """One map (N, N) of the first picture, quantised. ValueError for a name that is not one of its maps.

    Names are `raw/LAYER/HEAD`, `raw/LAYER/all` for all heads fused, and `rollout/LAYER`, counted from 0.
    """
    attention, rollout = explanation.attention[0], explanation.rollout[0]
    found = re.fullmatch(r"rollout/([0-9]{1,4})|raw/([0-9]{1,4})/([0-9]{1,4}|all)", key)
    L, H = attention.shape[:2]
    if found and found[1] and int(found[1]) < L:
        return quantised(rollout[int(found[1])])
    if found and found[2] and int(found[2]) < L:
        maps = attention[int(found[2])]
        if found[3] == "all":
            return quantised(fuse_heads(maps, fusion))
        if int(found[3]) < H:
            return quantised(maps[int(found[3])])
    raise ValueError(f"there is no map {key!r} here")


def quantised(rows) -> dict:
    """Weights (..., N), none below 0, as {"values": base64 of uint8 (..., N), "scales": of float32 (...)}."""
    rows = _array(rows)
    scales = (rows.max(axis=-1) / 255).astype(np.float32)
    shares = np.divide(rows, scales[..., None], out=np.zeros_like(rows), where=scales[..., None] > 0)
    return {"values": _text(np.rint(np.minimum(shares, 255)).astype(np.uint8)), "scales": _text(scales)}


def _array(values) -> np.ndarray:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values, dtype=np.float32)


def _text(values) -> str:
    array = values if isinstance(values, np.ndarray) else _array(values)
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _data_url(canvas: np.ndarray) -> str:
    """A PNG, to the pixel; a photograph, which would be many times as large as its maps, as WebP."""
    kind, data = "png", png_bytes(canvas)
    if len(data) > _LARGEST_PNG_BYTES:
        file = BytesIO()
        Image.fromarray(canvas).save(file, "WEBP", quality=92)
        kind, data = "webp", file.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
