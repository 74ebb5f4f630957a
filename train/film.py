"""What some pictures look like to the model while it learns: one frame at each of some steps.

    images, labels = probes(pictures, held)
    film = empty(images, labels, pictures.class_names)
    film = record(film, ema_model, step, mean, std)         # a new film with one frame more
    film = cut(film, resumed_step)                          # without the frames after that step
    save(film, run / "attention.npz"); film = load(run / "attention.npz")
    film.attention(-1)[k, layer, head], film.rolled(-1)[k, layer]      # rows of the last frame, (N,) float32

Rows of attention are kept as uint8 with one float32 scale a row (its largest value / 255), so that a value is
off by at most half a level: a quarter of the room of float32, and small enough to send to a browser.

Shapes: S frames, K probe pictures, L layers, H heads, N tokens with CLS first, C classes.
"""

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

from vit.datasets import Pictures
from vit.explanation import cls_rows
from vit.files import write_whole
from vit.images import fit, open_picture, to_array
from vit.model import VisualTransformer
from vit.sources import CLASSES

_SAMPLES = Path(__file__).parents[1] / "assets" / "samples"
_LEVELS = 255
DISCARD = 0.9  # of the weakest weights: plain rollout is nearly even, and the page starts here too
# What numpy and zipfile raise for a damaged file: which one depends on the byte that is wrong.
_DAMAGE = (
    OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError, MemoryError,
    OverflowError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Film:
    """The frames so far, in the order of their steps: exactly the arrays of `attention.npz`."""

    steps: np.ndarray  # (S,) int64, ascending
    cls_row: np.ndarray  # (S, K, L, H, N) uint8, where CLS looks in each head
    cls_row_scale: np.ndarray  # (S, K, L, H) float32; value = uint8 * scale
    rollout: np.ndarray  # (S, K, L, N) uint8, CLS's row of rollout up to each layer, DISCARD of it left out
    rollout_scale: np.ndarray  # (S, K, L) float32
    probabilities: np.ndarray  # (S, K, C) float32
    pictures: np.ndarray  # (K, H, W, 3) uint8
    labels: np.ndarray  # (K,) int64
    class_names: np.ndarray  # (C,) str

    def __len__(self) -> int:
        return len(self.steps)

    def attention(self, frame: int) -> np.ndarray:
        """(K, L, H, N) float32: CLS's attention row of every head at one frame; rows sum to about 1."""
        return self.cls_row[frame] * self.cls_row_scale[frame][..., None]

    def rolled(self, frame: int) -> np.ndarray:
        """(K, L, N) float32: CLS's rollout row up to every layer at one frame; rows sum to about 1."""
        return self.rollout[frame] * self.rollout_scale[frame][..., None]


_OF_FRAMES = ("steps", "cls_row", "cls_row_scale", "rollout", "rollout_scale", "probabilities")


def probes(pictures: Pictures, held: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(K, H, W, 3) uint8 and (K,) int64: the pictures to film and their classes.

    The bundled samples where the classes are CIFAR-10's, then the first picture of each class among the
    indices `held`, or among all for None; a class without one there is left out.
    """
    images, labels = [], []
    if tuple(pictures.class_names) == CLASSES:
        for path in sorted(_SAMPLES.glob("*.png")):
            images.append(to_array(fit(open_picture(path), pictures.images.shape[1:3])))
            labels.append(CLASSES.index(path.stem.partition("_")[0]))
    among = np.arange(len(pictures)) if held is None else np.asarray(held, np.int64)
    _, first = np.unique(pictures.labels[among], return_index=True)
    images += [np.asarray(pictures.images[index]) for index in among[first]]
    labels += pictures.labels[among[first]].tolist()
    if not images:
        raise ValueError("there are no pictures to film: the data set is empty")
    return np.stack(images), np.array(labels, np.int64)


def snapshot_progress(count: int) -> tuple[float, ...]:
    """The shares of a run, 0 to 1, at which to take `count` frames: dense early, when most changes.

    ValueError for fewer than 2, since a film shows a before and an after.
    """
    if count < 2:
        raise ValueError(f"a film has at least 2 frames, not {count}")
    return tuple((i / (count - 1)) ** 2 for i in range(count))


def empty(images: np.ndarray, labels: np.ndarray, class_names: Sequence[str]) -> Film:
    """A film of these pictures without a frame. Sizes of the model are those of the first frame recorded."""
    K, C = len(images), len(class_names)
    return Film(
        steps=np.empty(0, np.int64),
        cls_row=np.empty((0, K, 0, 0, 0), np.uint8),
        cls_row_scale=np.empty((0, K, 0, 0), np.float32),
        rollout=np.empty((0, K, 0, 0), np.uint8),
        rollout_scale=np.empty((0, K, 0), np.float32),
        probabilities=np.empty((0, K, C), np.float32),
        pictures=np.array(images, np.uint8),
        labels=np.array(labels, np.int64),
        class_names=np.array(class_names, np.str_),
    )


def record(
    film: Film, model: VisualTransformer, step: int, mean: Sequence[float], std: Sequence[float]
) -> Film:
    """A film with the frame of `step` added, in the place of one of the same step.

    One pass without dropout in float32, whatever the model's mode, which it keeps; give the model itself, not
    a compiled one. `mean` and `std` are those of the training, per channel, of pixels from 0 to 1. ValueError
    for a model whose answers are not finite.
    """
    device = model.device
    x = torch.from_numpy(film.pictures).to(device).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(tuple(values), device=device).view(1, -1, 1, 1) for values in (mean, std))
    with torch.autocast(device.type, enabled=False):  # training's lower precision must not show in the maps
        logits, attention, rollout = cls_rows(model, (x - mean) / std, discard_ratio=DISCARD)
    cls_row, cls_row_scale = quantise(attention.cpu().numpy())
    rolled, rollout_scale = quantise(rollout.cpu().numpy())
    frame = {
        "steps": np.int64(step),
        "cls_row": cls_row,
        "cls_row_scale": cls_row_scale,
        "rollout": rolled,
        "rollout_scale": rollout_scale,
        "probabilities": logits.softmax(dim=-1).cpu().numpy(),
    }
    stays = film.steps != step
    if not stays.any():
        return replace(film, **{name: np.asarray(array)[None] for name, array in frame.items()})
    order = np.argsort(np.append(film.steps[stays], step))
    return replace(
        film,
        **{
            name: np.concatenate((getattr(film, name)[stays], np.asarray(array)[None]))[order]
            for name, array in frame.items()
        },
    )


def same_pictures(one: Film, other: Film) -> bool:
    """Whether two films are of the same pictures and classes: those of one run are."""
    return (
        np.array_equal(one.pictures, other.pictures)
        and np.array_equal(one.labels, other.labels)
        and np.array_equal(one.class_names, other.class_names)
    )


def cut(film: Film, step: int) -> Film:
    """The film up to and with `step`: what a run resumed there has filmed."""
    stays = film.steps <= step
    return replace(film, **{name: getattr(film, name)[stays] for name in _OF_FRAMES})


def save(film: Film, path: Path) -> None:
    """Write one npz file, whole or not at all. OSError if it cannot be written."""
    write_whole(path, lambda file: np.savez_compressed(file, **vars(film)))


def load(path: Path) -> Film:
    """The film that `save` wrote. ValueError, with one sentence, if there is none or it is damaged."""
    if not path.is_file():
        raise ValueError(f"There is no recording of attention at {path}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            film = Film(**{field.name: file[field.name] for field in fields(Film)})
        _check(film)
    except _DAMAGE as error:
        raise ValueError(f"The recording of attention in {path} is damaged ({error}).") from error
    return film


def quantise(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(..., N) of values from 0 up -> (..., N) uint8 and (...) float32 scales; value = uint8 * scale."""
    scale = (rows.max(axis=-1) / _LEVELS).astype(np.float32)
    wide = scale.astype(np.float64)[..., None]  # float32 alone would add its own rounding to half a level
    levels = np.divide(rows, wide, out=np.zeros(rows.shape), where=wide > 0)
    return np.clip(np.rint(levels), 0, _LEVELS).astype(np.uint8), scale


def _check(film: Film) -> None:
    """ValueError unless all arrays have the types and shapes that belong together."""
    S, (K, C) = len(film.steps), (len(film.pictures), len(film.class_names))
    L, H, N = film.cls_row.shape[2:]
    expected = {
        "steps": ((S,), "int64"),
        "cls_row": ((S, K, L, H, N), "uint8"),
        "cls_row_scale": ((S, K, L, H), "float32"),
        "rollout": ((S, K, L, N), "uint8"),
        "rollout_scale": ((S, K, L), "float32"),
        "probabilities": ((S, K, C), "float32"),
        "pictures": ((K, *film.pictures.shape[1:3], 3), "uint8"),
        "labels": ((K,), "int64"),
    }
    for name, (shape, dtype) in expected.items():
        array = getattr(film, name)
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, not {dtype} {shape}")
    if film.class_names.ndim != 1 or film.class_names.dtype.kind != "U":
        raise ValueError("class_names is not a list of names")
    if S and not (K and L and H and N > 1):
        raise ValueError("its frames are empty")
    if (np.diff(film.steps) <= 0).any():
        raise ValueError("its steps do not ascend")
    if K and not 0 <= film.labels.min() <= film.labels.max() < C:
        raise ValueError("its labels are not those of its classes")
    for name in ("cls_row_scale", "rollout_scale", "probabilities"):
        array = getattr(film, name)
        if not ((array >= 0) & (array <= 1.001)).all():  # shares, a little rounded; NaN is none either
            raise ValueError(f"{name} holds values that are not from 0 to 1")
