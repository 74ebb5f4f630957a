"""Pictures with what a model said to them, for the results of a run: its mistakes, and those of one cell.

show_mistakes(predictions, pictures)
show_cell(predictions, pictures, truth=3, answer=5)     # classes as in Pictures.class_names, from 0
"""

import numpy as np
import streamlit as st

from vit.datasets import Pictures
from vit.evaluate import Predictions, confident_mistakes
from vit.overlay import png_bytes
from vit.page.view import plain
from vit.words import percent

_MISTAKES, _OF_A_CELL = 12, 24
_SIDE_PX = 128  # at most: the largest multiple of the picture's own side


def show_mistakes(predictions: Predictions, pictures: Pictures) -> None:
    """Those it was most wrongly sure of; both row for row of the same pictures."""
    rows = confident_mistakes(predictions, _MISTAKES)
    if not len(rows):
        st.caption("It made none.")
        return
    st.caption("The wrong answers that it was most sure of.")
    told = [_in_words(row, predictions, pictures) for row in rows]
    # a name is a stranger's; the rest is not, and its space must not break
    captions = [f"{plain(what)}, {probability}" for what, probability in told]
    _show(rows, predictions, pictures, captions)


def show_cell(predictions: Predictions, pictures: Pictures, *, truth: int, answer: int) -> None:
    """The pictures of class `truth` that were called `answer`, the most probable first."""
    rows = np.flatnonzero((predictions.labels == truth) & (predictions.classes == answer))
    rows = rows[np.argsort(-predictions.probabilities[rows], kind="stable")]
    what = plain(_answered(truth, answer, pictures))
    if not len(rows):
        st.caption(f"There is no picture of {what}.")
        return
    few = f": the {_OF_A_CELL} it was most sure of" if len(rows) > _OF_A_CELL else ""
    st.caption(f"{len(rows):,} {'picture' if len(rows) == 1 else 'pictures'} of {what}{few}.")
    rows = rows[:_OF_A_CELL]
    _show(rows, predictions, pictures, [_in_words(row, predictions, pictures)[1] for row in rows])


def _answered(truth: int, answer: int, pictures: Pictures) -> str:
    names = pictures.class_names
    return f"{names[truth]}, " + ("named rightly" if truth == answer else f"taken for {names[answer]}")


def _in_words(row: int, predictions: Predictions, pictures: Pictures) -> tuple[str, str]:
    """What it is and what it was called; the probability."""
    what = _answered(int(predictions.labels[row]), int(predictions.classes[row]), pictures)
    return what, percent(float(predictions.probabilities[row]))


def _show(rows: np.ndarray, predictions: Predictions, pictures: Pictures, captions: list[str]) -> None:
    with st.container(horizontal=True, gap="small"):
        for row, caption in zip(rows, captions, strict=True):
            st.image(
                crisp_png(pictures.images[row]),
                caption=caption,
                alt=f"{', '.join(_in_words(row, predictions, pictures))}, picture {row + 1:,}",
                width=_SIDE_PX,
                output_format="PNG",  # a JPEG blurs the edges of so few pixels
            )


def crisp_png(pixels: np.ndarray) -> bytes:
    """(H, W, 3) uint8 as a PNG in which each pixel is a square, which a browser that enlarges would blur."""
    times = max(1, _SIDE_PX // max(pixels.shape[:2]))
    return png_bytes(np.asarray(pixels).repeat(times, 0).repeat(times, 1))
