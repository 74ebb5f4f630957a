"""The pictures that the page can explain: bundled samples, the test set, and the visitor's own.

Each is named as in a link: sample:cat_00, test:<id>, own:<id>. An own picture lives in its session alone.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import streamlit as st
from PIL import Image

from vit.datasets import Pictures, find_data, load_pictures
from vit.images import fit, framed, open_picture, to_array
from vit.page.view import PICTURE_PX
from vit.sources import find_source

SAMPLES = Path(__file__).parents[2] / "assets" / "samples"
_OWN_KEY, _FRAMED_KEY = "own_picture", "own_picture_framed"


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


def sample_names() -> list[str]:
    """`cat_00` and so on: class and test index."""
    return [path.stem for path in sorted(SAMPLES.glob("*.png"))]


def test_pictures() -> Pictures | None:
    """The test split if it is on this machine. DataError if it is there and cannot be read."""
    folder = find_data()
    source = find_source(folder, "test") if folder else None
    return _load_test(str(folder), source.fingerprint) if source else None


def keep_own(data: bytes) -> str:
    """Keep a visitor's picture for this session; returns its name. PictureError if it cannot be used."""
    open_picture(data)  # complains now, before anything that is shown has changed
    own = _Own(hashlib.sha256(data).hexdigest()[:12], data)
    st.session_state[_OWN_KEY] = own
    return f"own:{own.id}"


def find_picture(name: str, size_px: tuple[int, int], how: str) -> Shown | None:
    """The picture of that name, framed for a model that takes `size_px` (height, width); None if not here."""
    kind, _, key = name.partition(":")
    if kind == "sample" and key in sample_names():
        original = open_picture(SAMPLES / f"{key}.png")
        class_name, _, number = key.partition("_")
        return _shown(name, f"{class_name} {number}", original, size_px, how, class_name)
    if kind == "test" and (pictures := test_pictures()) is not None:
        at = pictures.index_of(key)
        if at is None:
            return None
        class_name = pictures.class_names[int(pictures.labels[at])]
        original = Image.fromarray(np.asarray(pictures.images[at]))
        return _shown(name, f"{class_name}, number {at + 1:,}", original, size_px, how, class_name)
    own = st.session_state.get(_OWN_KEY)
    if kind == "own" and own is not None and own.id == key:
        seen, canvas = _frame_own(own, size_px, how)
        return Shown(name, "your picture", seen, canvas)
    return None


def _shown(name, title, original, size_px, how, true_class) -> Shown:
    seen = to_array(fit(original, size_px, how))
    return Shown(name, title, seen, to_array(framed(original, size_px, how, PICTURE_PX)), true_class)


@st.cache_resource(max_entries=2, show_spinner="Opening the test pictures")
def _load_test(folder: str, fingerprint: str) -> Pictures:
    return load_pictures(folder, "test")


def _frame_own(own: _Own, size_px: tuple[int, int], how: str) -> tuple[np.ndarray, np.ndarray]:
    """What the model sees, and the canvas; kept in the session alone, so that closing the page forgets it."""
    key, kept = (own.id, size_px, how), st.session_state.get(_FRAMED_KEY)
    if kept is None or kept[0] != key:
        original = open_picture(own.data)
        framing = to_array(fit(original, size_px, how)), to_array(framed(original, size_px, how, PICTURE_PX))
        kept = st.session_state[_FRAMED_KEY] = (key, framing)
    return kept[1]
