"""The pictures that the page can explain: samples and test set of the model's data set, the visitor's own.

Each is named as in a link: sample:cat_00, pattern:05, test:<id>, own:<id>. A data set is named as
`load_pictures` takes it: "cifar10", "patterns", or a folder. An own picture lives in its session alone.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import streamlit as st
from PIL import Image

from vit.datasets import DataError, Pictures, find_data, load_pictures
from vit.images import fit, framed, open_picture, to_array
from vit.page.view import FIRST_PICTURE, PATTERN_SAMPLES, PICTURE_PX
from vit.patterns import CLASSES, SEED, Patterns, make_patterns
from vit.sources import find_source

SAMPLES = Path(__file__).parents[2] / "assets" / "samples"
_FOLDER_SAMPLES = 20
_OWN_KEY, _FRAMED_KEY = "own_picture", "own_picture_framed"


@dataclass(frozen=True, eq=False)
class Labelled:
    """A picture of a data set, as it lies there."""

    picture: Image.Image
    class_name: str
    which: str  # what tells it from others of its class, for people


@dataclass(frozen=True, eq=False)
class Shown:
    """One picture, ready to be explained and drawn on."""

    name: str  # as in a link
    title: str  # for people
    seen: np.ndarray  # (height, width, 3) uint8, what the model sees
    canvas: np.ndarray  # (h, w, 3) uint8, the same framing as sharp as the original
    true_class: str | None = None

    @property
    def is_own(self) -> bool:
        return self.name.startswith("own:")


@dataclass(frozen=True)
class _Own:
    id: str
    data: bytes


def sample_names(data: str) -> list[str]:
    """The pictures that are offered first. A folder's are spread over its test pictures.

    Where a folder has none that can be read, they are CIFAR-10's.
    """
    if data == "patterns":
        return [f"pattern:{number:02d}" for number in range(PATTERN_SAMPLES)]
    if data != "cifar10":
        try:
            pictures = test_pictures(data)
        except DataError:
            pictures = None  # the place for test pictures says why
        if pictures is not None:
            spread = np.linspace(0, len(pictures) - 1, min(len(pictures), _FOLDER_SAMPLES)).astype(int)
            return list(dict.fromkeys(f"test:{each}" for each in pictures.ids[spread].tolist()))
    return [f"sample:{path.stem}" for path in sorted(SAMPLES.glob("*.png"))]


def first_picture(data: str) -> str:
    """What is shown where nothing was chosen."""
    names = sample_names(data)
    return FIRST_PICTURE if FIRST_PICTURE in names else names[0]


def is_of_another_set(name: str, data: str, before: str | None) -> bool:
    """Whether a picture that was chosen from the data set `before` is none of `data`.

    `before` is None for a picture named in a link: a test:<id> is then looked for in `data`.
    """
    home = {"sample": "cifar10", "pattern": "patterns", "test": before or data}.get(name.partition(":")[0])
    return before != data and home not in (None, data) and name not in sample_names(data)


def test_pictures(data: str) -> Pictures | None:
    """The test split if it is on this machine. DataError if it is there and cannot be read."""
    folder = find_data(data)
    source = find_source(folder, "test") if folder else None
    return _load_test(data, source.fingerprint) if source else None


def keep_own(data: bytes) -> str:
    """Keep a visitor's picture for this session; returns its name. PictureError if it cannot be used."""
    open_picture(data)  # complains now, before anything that is shown has changed
    own = _Own(hashlib.sha256(data).hexdigest()[:12], data)
    st.session_state[_OWN_KEY] = own
    return f"own:{own.id}"


def find_picture(name: str, data: str, size_px: tuple[int, int], how: str) -> Shown | None:
    """The picture of that name, framed for a model that takes `size_px` (height, width); None if not here."""
    own = st.session_state.get(_OWN_KEY)
    if own is not None and name == f"own:{own.id}":
        seen, canvas = _frame_own(own, size_px, how)
        return Shown(name, "your picture", seen, canvas)
    found = find_labelled(name, data)
    if found is None:
        return None
    seen = to_array(fit(found.picture, size_px, how))
    canvas = to_array(framed(found.picture, size_px, how, PICTURE_PX))
    return Shown(name, f"{found.class_name}{found.which}", seen, canvas, found.class_name)


def find_labelled(name: str, data: str) -> Labelled | None:
    """The sample or test picture of that name; None if not here."""
    kind, _, key = name.partition(":")
    if kind == "sample" and name in sample_names("cifar10"):
        class_name, _, number = key.partition("_")
        return Labelled(open_picture(SAMPLES / f"{key}.png"), class_name, f" {number}")
    if kind == "pattern":
        made, row = _made_samples(), int(key)
        return Labelled(Image.fromarray(made.images[row]), CLASSES[made.labels[row]], f" {key}")
    if kind == "test" and (pictures := test_pictures(data)) is not None:
        row = pictures.index_of(key)
        return None if row is None else labelled(pictures, row)
    return None


def labelled(pictures: Pictures, row: int) -> Labelled:
    """One picture of a split; its number counts from 1."""
    picture = Image.fromarray(np.asarray(pictures.images[row]))
    return Labelled(picture, pictures.class_names[int(pictures.labels[row])], f", number {row + 1:,}")


@st.cache_resource(max_entries=3, show_spinner="Getting the test pictures ready, some seconds the first time")
def _load_test(data: str, fingerprint: str) -> Pictures:
    return load_pictures(data, "test")


@st.cache_resource(max_entries=1, show_spinner=False)
def _made_samples() -> Patterns:
    return make_patterns(PATTERN_SAMPLES, SEED, split="test")


def _frame_own(own: _Own, size_px: tuple[int, int], how: str) -> tuple[np.ndarray, np.ndarray]:
    """What the model sees, and the canvas; kept in the session alone, so that closing the page forgets it."""
    key, kept = (own.id, size_px, how), st.session_state.get(_FRAMED_KEY)
    if kept is None or kept[0] != key:
        original = open_picture(own.data)
        framing = to_array(fit(original, size_px, how)), to_array(framed(original, size_px, how, PICTURE_PX))
        kept = st.session_state[_FRAMED_KEY] = (key, framing)
    return kept[1]
