"""Films of one picture as the component in the browser takes them: small JSON, with arrays as base64 text.

    data = film_payload([("demo", film)], picture=0)                     # assets/film/film.js draws it
    data = film_payload([("demo", film), ("fast", other)], picture=3)    # the same picture in two runs
    data["films"][0]["rows"]     # (S, L, H + 1, N) uint8: CLS's row of each head, and last its row of rollout

Weight = row * scale, as in the film itself. Of the probabilities the largest of each frame travel, so that
the bars are right at every step however many classes there are.
Shapes: S frames, L layers, H heads, N tokens with CLS first.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vit.overlay import png_bytes

if TYPE_CHECKING:  # a film itself needs torch, which this file does not
    from train.film import Film

MOST_PICTURES = 40  # to choose among
MOST_FRAMES = 200
TOP_CLASSES = 5
_SMALL_PX = 64  # the longer side of a picture to choose


def probe_count(film: "Film") -> int:
    """How many of its pictures can be chosen."""
    return min(len(film.pictures), MOST_PICTURES)


def film_payload(films: Sequence[tuple[str, "Film"]], picture: int) -> dict:
    """What one or two runs, by their names, made of a picture of the first; made of JSON's types alone.

    A `picture` that cannot be chosen is taken for the first. A second film without that very picture is left
    out, and "why_not" says so. The same films give the same payload, which "id" names. ValueError, with a
    sentence, for a film without a frame, and for more or fewer than one or two films.
    """
    if len(films) not in (1, 2):
        raise ValueError(f"One film or two can be shown, not {len(films)}.")
    for name, film in films:
        if not len(film):
            raise ValueError(f"No attention was filmed yet in {name}.")
    first = films[0][1]
    picture = picture if 0 <= picture < probe_count(first) else 0
    pixels = first.pictures[picture]
    sent, why_not = [_film(*films[0], picture)], ""
    for name, film in films[1:]:
        same = _place_of(pixels, film)
        if same is None:
            why_not = f"{name} did not film this picture, so only {films[0][0]} is shown."
        else:
            sent.append(_film(name, film, same))
    data = {
        "label": f"picture {picture + 1}",
        "picture": _data_url(pixels),
        "chosen": picture,
        "pictures": [_choice(first, k) for k in range(probe_count(first))],
        "films": sent,
        "why_not": why_not,
    }
    return {"id": hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16], **data}


def _film(name: str, film: "Film", k: int) -> dict:
    """One run's frames of its picture k."""
    _, _, L, H, N = film.cls_row.shape
    frames = _thinned(len(film))
    rows = np.concatenate((film.cls_row[frames, k], film.rollout[frames, k][:, :, None]), axis=2)
    scales = np.concatenate((film.cls_row_scale[frames, k], film.rollout_scale[frames, k][..., None]), axis=2)
    probabilities = film.probabilities[frames, k]  # (S, C)
    top = np.argsort(-probabilities, axis=1, kind="stable")[:, :TOP_CLASSES]
    truth = int(film.labels[k])
    used = np.union1d(top, truth)  # a data set may have thousands of classes
    return {
        "name": name,
        "steps": film.steps[frames].tolist(),
        "layers": L,
        "heads": H,
        "grid": list(_grid(N - 1, *film.pictures.shape[1:3])),
        "rows": _text(rows),  # (S, L, H + 1, N) uint8
        "scales": _text(scales),  # (S, L, H + 1) float32
        "classes": film.class_names[used].tolist(),
        "truth": int(np.searchsorted(used, truth)),  # among "classes", as those of "top"
        "top": np.searchsorted(used, top).tolist(),  # (S, 5), likeliest first
        "top_shares": _text(np.take_along_axis(probabilities, top, axis=1)),  # (S, 5) float32
        "truth_shares": _text(probabilities[:, truth]),  # (S,) float32
    }


def _thinned(frames: int) -> np.ndarray:
    """Which frames travel: all, or evenly spaced ones from the first to the last."""
    return np.rint(np.linspace(0, frames - 1, min(frames, MOST_FRAMES))).astype(int)


def _place_of(pixels: np.ndarray, film: "Film") -> int | None:
    return next((k for k, each in enumerate(film.pictures) if np.array_equal(each, pixels)), None)


def _grid(patches: int, height_px: int, width_px: int) -> tuple[int, int]:
    """Rows and columns of square patches that tile such a picture."""

    def stretch(rows: int) -> float:
        return abs(math.log(rows * rows * width_px / (patches * height_px)))

    rows = min((rows for rows in range(1, patches + 1) if patches % rows == 0), key=stretch)
    return rows, patches // rows


def _choice(film: "Film", k: int) -> dict:
    small = Image.fromarray(film.pictures[k])
    small.thumbnail((_SMALL_PX, _SMALL_PX), Image.Resampling.BOX)
    return {"label": f"picture {k + 1}: {film.class_names[film.labels[k]]}", "src": _data_url(small)}


def _data_url(picture: np.ndarray | Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(png_bytes(picture)).decode()}"


def _text(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
