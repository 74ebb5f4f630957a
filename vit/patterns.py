"""Pictures made by code, with ten classes that are told apart only by a local pattern, and with the truth.

    made = make_patterns(1000, seed=0)
    made.images, made.labels, made.masks       # (n, 32, 32, 3) uint8, (n,), (n, 32, 32) True on the object

An object is a blob of random outline, place, size and two colours, filled with the pattern of its class. It
lies on textured, noisy ground beside two plain blobs of random colours. Nothing but the pattern says which
class it is, so a model can be right only by looking at the object, and `masks` says where that is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SIDE_PX = 32
PICTURES = {"train": 50_000, "test": 10_000}  # how many `load_pictures("patterns", split)` gives
SEED = 0  # of those
FORMAT = 1  # to be raised when the same arguments would make other pictures
OBJECT_SHARE = (0.07, 0.33)  # of the picture's area
_DISTRACTOR_SHARE = (0.04, 0.12)
_CHUNK = 250  # pictures made at once: stays near the cache, and fixes how the random numbers are drawn


def _fine(position: np.ndarray) -> np.ndarray:
    return position % 2 < 1


def _coarse(position: np.ndarray) -> np.ndarray:
    return position % 4 < 2


# Row y and column x, shifted by a random phase, to which of two colours a pixel has.
_PATTERNS = {
    "horizontal stripes": lambda y, x: _coarse(y),
    "vertical stripes": lambda y, x: _coarse(x),
    "rising stripes": lambda y, x: _coarse(y + x),
    "falling stripes": lambda y, x: _coarse(y - x),
    "fine horizontal stripes": lambda y, x: _fine(y),
    "fine vertical stripes": lambda y, x: _fine(x),
    "checks": lambda y, x: _coarse(y) ^ _coarse(x),
    "fine checks": lambda y, x: _fine(y) ^ _fine(x),
    "dots": lambda y, x: _coarse(y) & _coarse(x),
    "lattice": lambda y, x: (y % 3 < 1) | (x % 3 < 1),
}
CLASSES = tuple(_PATTERNS)


@dataclass(frozen=True, eq=False)
class Patterns:
    """Made pictures and the truth about them."""

    images: np.ndarray  # (n, 32, 32, 3) uint8
    labels: np.ndarray  # (n,) int64
    masks: np.ndarray  # (n, 32, 32) bool, True on the object


def make_patterns(
    n: int,
    seed: int,
    *,
    split: str = "train",
    without: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Patterns:
    """n pictures, the same for the same arguments; no picture of one split is drawn as one of the other is.

    `without` leaves one blob out of otherwise equal pictures: 0 and 1 are the plain ones, 2 is the object.
    `progress(done, total, what)` counts pictures. ValueError for another split or blob.
    """
    if split not in ("train", "test"):
        raise ValueError(f'A split is "train" or "test", not {split!r}.')
    if without not in (None, 0, 1, 2):
        raise ValueError(f"The blobs are 0, 1 and 2, not {without}.")
    images = np.empty((n, SIDE_PX, SIDE_PX, 3), np.uint8)
    labels = np.empty(n, np.int64)
    masks = np.empty((n, SIDE_PX, SIDE_PX), bool)
    for start in range(0, n, _CHUNK):
        rows = slice(start, min(start + _CHUNK, n))
        rng = np.random.default_rng([seed, ("train", "test").index(split), start])
        # Always a whole chunk, so that a picture does not depend on how many are asked for.
        made = _make_chunk(rng, without)
        for whole, part in zip((images, labels, masks), made, strict=True):
            whole[rows] = part[: rows.stop - start]
        if progress:
            progress(rows.stop, n, f"{split} pictures")
    return Patterns(images, labels, masks)


def _make_chunk(rng: np.random.Generator, without: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = _CHUNK
    labels = rng.permutation(np.arange(n) % len(CLASSES))
    canvas = _ground(rng)
    for blob in (0, 1):
        mask = _blob(rng, _DISTRACTOR_SHARE)
        color = rng.random((n, 1, 1, 3), np.float32)
        if blob != without:
            np.copyto(canvas, color, where=mask[..., None])
    mask = _blob(rng, OBJECT_SHARE)
    filled = _pattern(rng, labels)
    if without != 2:
        np.copyto(canvas, filled, where=mask[..., None])
    canvas += np.float32(0.04) * rng.standard_normal(canvas.shape, np.float32)
    canvas *= 255
    return np.rint(np.clip(canvas, 0, 255, out=canvas), out=canvas).astype(np.uint8), labels, mask


def _ground(rng: np.random.Generator) -> np.ndarray:
    """(n, 32, 32, 3) float32 from 0 to 1: a colour, clouds of two sizes, grain."""
    color = rng.uniform(0.15, 0.85, (_CHUNK, 1, 1, 3)).astype(np.float32)
    ground = color + np.float32(0.06) * rng.standard_normal((_CHUNK, SIDE_PX, SIDE_PX, 3), np.float32)
    for cells, strength in ((4, 0.07), (8, 0.06)):
        clouds = np.float32(strength) * rng.standard_normal((_CHUNK, cells, cells, 3), np.float32)
        ground += clouds.repeat(SIDE_PX // cells, axis=1).repeat(SIDE_PX // cells, axis=2)
    return ground


def _blob(rng: np.random.Generator, share: tuple[float, float]) -> np.ndarray:
    """(n, 32, 32) bool: random outlines, each of a random area within `share` to the pixel."""
    n = _CHUNK
    centre = rng.uniform(7, SIDE_PX - 7, (n, 2, 1, 1))
    y, x = np.mgrid[:SIDE_PX, :SIDE_PX] + 0.5
    dy, dx = y - centre[:, 0], x - centre[:, 1]  # (n, 32, 32)
    far = np.sqrt(dy**2 + dx**2)
    # A pixel's direction as a number on the unit circle: its k-th power goes round k times.
    turn = ((dx + 1j * dy) / np.maximum(far, 1e-9)).astype(np.complex64)
    radius, power = np.ones(far.shape, np.float32), np.ones_like(turn)
    for waves in (1, 2, 3, 4):
        strength, phase = rng.uniform(0, 0.3, (n, 1, 1)), rng.uniform(0, 2 * np.pi, (n, 1, 1))
        power *= turn
        radius += (power * (strength / waves**0.5 * np.exp(1j * phase)).astype(np.complex64)).real
    # The pixels nearest to the centre, measured in outlines: as many as the area asks for.
    distance = (far / np.maximum(radius, 0.2)).reshape(n, -1)
    area_px = rng.integers(
        np.ceil(share[0] * SIDE_PX**2), np.floor(share[1] * SIDE_PX**2), (n, 1), endpoint=True
    )
    farthest = np.take_along_axis(np.sort(distance, axis=1), area_px - 1, axis=1)
    return (distance <= farthest).reshape(n, SIDE_PX, SIDE_PX)


def _pattern(rng: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """(n, 32, 32, 3) float32: each class's pattern in two distinct colours, at a random phase."""
    n = len(labels)
    first, direction = rng.uniform(0, 1, (n, 3)), rng.normal(size=(n, 3))
    # Towards the far side of the colour cube, so that there is room for the second colour.
    direction = np.abs(direction) * np.where(first < 0.5, 1, -1)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    second = np.clip(first + rng.uniform(0.5, 0.8, (n, 1)) * direction, 0, 1)
    swap = rng.random((n, 1)) < 0.5
    colors = np.stack([np.where(swap, second, first), np.where(swap, first, second)], axis=1)
    colors = colors.astype(np.float32)  # (n, 2, 3)
    phase = rng.integers(0, 12, (n, 2, 1, 1))  # a multiple of every period
    y, x = np.mgrid[:SIDE_PX, :SIDE_PX]
    which = np.empty((n, SIDE_PX, SIDE_PX), np.int64)
    for label, pattern in enumerate(_PATTERNS.values()):
        rows = labels == label
        which[rows] = pattern(y + phase[rows, 0], x + phase[rows, 1])
    return colors[np.arange(n)[:, None, None], which]
