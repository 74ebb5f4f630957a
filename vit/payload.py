"""One picture's explanation as the viewer in the browser takes it: small JSON, with arrays as base64 text.

    data = payload(explanation, checkpoint, canvas, name="cat", title="cat", fusion="mean", discard=0.9)
    data["raw"]["values"], data["raw"]["scales"]           # (L, H, N, N) uint8 and (L, H, N) float32
    map_payload(explanation, "raw/3/all", "mean", 0.9)     # one map more, for grids too large to send whole

The viewer knows one token before the patches, from which the answer is read. A model of others may have none
or several: what they get stands together under that one, whose row is that of what the answer is read from.
A row of weights travels as uint8 with one float32 scale: weight = value * scale, which is off by at most
1/510 of the row's largest weight (see `quantised`). Maps of the default model take 0.3 MB that way; as JSON,
twenty times that.
Layers and heads count from 0, as in the arrays.
"""

import base64
import hashlib
import math
import re
from io import BytesIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit.attention import FUSIONS, Fusion, fuse_heads, rollout_of_heads_row, token_row
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
    L, H = explanation.attention.shape[1:3]
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
    attention, rollout = explanation.attention[0], explanation.rollout[0]  # (L, H, N, N), (L, N, N)
    if attention.numel() <= WHOLE_VALUES if whole is None else whole:
        fused = fuse_heads(attention, fusion)
        whole_maps = {"raw": (attention, discard), "fused": (fused, 0.0), "rollout": (rollout, 0.0)}
        return data | {
            name: quantised(_with_one_prefix(maps, explanation), cut)
            for name, (maps, cut) in whole_maps.items()
        }
    readout = _reader(explanation)
    fused = token_row(fuse_heads(attention, fusion), readout)[:, None]  # (L, 1, N)
    heads = rollout_of_heads_row(explanation.attention, explanation.rollout, readout, discard)[0]  # (L, H, N)
    rows = {
        "cls_raw": (token_row(attention, readout), fused),
        "cls_rollout": (heads, token_row(rollout, readout)[:, None]),
    }
    return data | {
        name: quantised(_joined_columns(torch.cat(parts, dim=1), explanation), own=0)
        for name, parts in rows.items()
    }


def map_payload(explanation: Explanation, key: str, fusion: Fusion, discard: float = 0.0) -> dict:
    """One map (N, N) of the first picture, quantised. ValueError for a name that is not one of its maps.

    Names are `raw/LAYER/HEAD`, `raw/LAYER/all` for all heads fused, and `rollout/LAYER`, counted from 0.
    """
    attention, rollout = explanation.attention[0], explanation.rollout[0]
    found = re.fullmatch(r"rollout/([0-9]{1,4})|raw/([0-9]{1,4})/([0-9]{1,4}|all)", key)
    L, H = attention.shape[:2]
    if found and found[1] and int(found[1]) < L:
        return quantised(_with_one_prefix(rollout[int(found[1])], explanation))
    if found and found[2] and int(found[2]) < L:
        maps = attention[int(found[2])]
        if found[3] == "all":
            return quantised(_with_one_prefix(fuse_heads(maps, fusion), explanation))
        if int(found[3]) < H:
            return quantised(_with_one_prefix(maps[int(found[3])], explanation), discard)
    raise ValueError(f"there is no map {key!r} here")


def quantised(rows, discard: float = 0.0, own: int | None = None) -> dict:
    """Weights (..., N), none below 0, as base64 text: values uint8 (..., N), scales and own float32 (...).

    A weight is value * scale, off by at most 1/510 of the row's largest, but for what each token gives
    itself: that is often far larger than all else, would leave few steps to the others, and travels alone in
    `own`. It is the diagonal of whole maps (..., N, N), or that column `own` of rows of one token.

    With `discard`, the share of the weakest that rollout leaves out, also "ties", int32: for each row where
    weights of one value are parted by that cut otherwise than by their place, the row's number, how many of
    that value stay, and which columns they are.
    """
    rows = _array(rows)
    N = rows.shape[-1]
    column = np.broadcast_to(np.arange(N) if own is None else own, rows.shape[:-1])[..., None]
    given = np.take_along_axis(rows, column, axis=-1)
    others = rows.copy()
    np.put_along_axis(others, column, 0, axis=-1)
    scales = (others.max(axis=-1, keepdims=True) / 255).astype(np.float32)
    shares = np.divide(rows, scales, out=np.zeros_like(rows), where=scales > 0)
    values = np.rint(np.minimum(shares, 255)).astype(np.uint8)
    found = {"values": _text(values), "scales": _text(scales), "own": _text(given)}
    return found | ({"ties": _text(_ties(rows, values, discard))} if discard else {})


def _reader(explanation: Explanation) -> int | Tensor:
    """The token that the answer is read from, or weights of several (N,)."""
    (read,) = explanation.readout.nonzero(as_tuple=True)
    return int(read) if len(read) == 1 else explanation.readout


def _with_one_prefix(maps: Tensor, explanation: Explanation) -> Tensor:
    """(..., N, N) -> (..., 1 + P, 1 + P): whatever stands before the patches as one token."""
    prefix = maps.shape[-1] - explanation.relevance[0].numel()
    reader = _reader(explanation)
    if prefix == 1 and reader == 0:
        return maps
    return _joined_columns(
        torch.cat((token_row(maps, reader)[..., None, :], maps[..., prefix:, :]), dim=-2), explanation
    )


def _joined_columns(rows: Tensor, explanation: Explanation) -> Tensor:
    """(..., N) -> (..., 1 + P)"""
    prefix = rows.shape[-1] - explanation.relevance[0].numel()
    if prefix == 1:
        return rows
    return torch.cat((rows[..., :prefix].sum(dim=-1, keepdim=True), rows[..., prefix:]), dim=-1)


def _ties(rows: np.ndarray, values: np.ndarray, discard: float) -> np.ndarray:
    """The ties of `quantised`. What stays is what `vit.attention` keeps: of equals the later column."""
    N = rows.shape[-1]
    dropped = min(math.floor(discard * N + 1e-9), N - 1)
    order = np.argsort(rows.reshape(-1, N), axis=-1, kind="stable")
    values = values.reshape(-1, N)
    by_place = np.argsort(values, axis=-1, kind="stable")
    ties = []
    for row in np.flatnonzero(
        (np.sort(order[:, dropped:], axis=-1) != np.sort(by_place[:, dropped:], axis=-1)).any(axis=-1)
    ):
        stay = order[row, dropped:]
        at_cut = np.sort(stay[values[row, stay] == values[row, stay].min()])
        ties += [row, len(at_cut), *at_cut]
    return np.array(ties, dtype=np.int32)


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
