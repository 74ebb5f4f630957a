"""One picture explained for the page: the numbers, and the pictures drawn from them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import streamlit as st
import torch

from vit.animation import play_through
from vit.attention import token_index
from vit.checkpoint import CheckpointError
from vit.explanation import Explanation, drawn_weights, explain, head_rows
from vit.export import TITLE, export_html, with_maps
from vit.figure import figure
from vit.images import prepare
from vit.overlay import Style, draw, png_bytes
from vit.page.models import Loaded
from vit.page.pictures import Shown
from vit.page.view import View
from vit.payload import payload
from vit.words import prediction

_OWN_KEY = "own_picture_payload"


@dataclass(frozen=True)
class Explained:
    """What is shown, and what the model said to it."""

    view: View
    loaded: Loaded
    shown: Shown
    explanation: Explanation

    @property
    def architecture(self):
        return self.loaded.checkpoint.architecture

    @property
    def token(self) -> int:
        return token_index(self.view.token, self.architecture.grid)

    @property
    def cell(self) -> tuple[int, int] | None:
        """(row, column) of the token's patch, from 0; None for CLS."""
        return None if self.token == 0 else divmod(self.token - 1, self.architecture.grid[1])

    @property
    def chosen(self) -> tuple[int, int]:
        """(layer, column) in `relevance`, from 0; the last column is all heads fused."""
        head = self.architecture.num_heads if self.view.head is None else self.view.head
        return self.view.shown_layer(self.architecture), head

    @cached_property
    def rows(self) -> np.ndarray:
        """(L, H + 1, N): the token's weights over all tokens, CLS first."""
        options = self.view.explain_options(self.architecture)
        del options["layer"], options["head"]
        return head_rows(self.explanation, **options)[0].cpu().numpy()

    @property
    def relevance(self) -> np.ndarray:
        """(L, H + 1, GY, GX)"""
        return self.rows[..., 1:].reshape(*self.rows.shape[:2], *self.architecture.grid)

    @property
    def relevance_map(self) -> np.ndarray:
        """(GY, GX): the weights that the large picture shows."""
        return self.relevance[self.chosen]

    def drawn(self, weights: np.ndarray) -> np.ndarray:
        """(..., GY, GX) as they are drawn: the patch's own dimmed, or the mask that holds the mass."""
        return drawn_weights(torch.from_numpy(weights), self.cell, self.view.mass)

    @cached_property
    def x(self) -> torch.Tensor:
        """(1, C, height, width): what the model is given."""
        device = self.loaded.model.device
        return prepare(self.shown.seen, self.loaded.checkpoint).to(device)

    @property
    def payload(self) -> dict:
        """What the viewer in the browser needs."""
        view = self.view
        key = (self.loaded.checkpoint.id, self.shown.name, view.fit, view.fusion, view.discard)
        if not self.shown.is_own:
            return _payload(key, self)
        kept = st.session_state.get(_OWN_KEY)  # the picture is in it: closing the page forgets it
        if kept is None or kept[0] != key:
            kept = st.session_state[_OWN_KEY] = (key, _make_payload(self))
        return kept[1]

    @property
    def probabilities(self) -> np.ndarray:
        return self.explanation.probabilities[0].cpu().numpy()

    @property
    def class_name(self) -> str:
        return self.loaded.checkpoint.class_names[int(self.probabilities.argmax())]

    @property
    def title(self) -> str:
        return self.view.sentence(self.architecture)

    def seen_png(self) -> bytes:
        """What the model sees, enlarged with crisp pixels."""
        height, width = self.shown.seen.shape[:2]
        times = max(1, 256 // max(height, width))
        size_px = (height * times, width * times)
        return png_bytes(draw(self.shown.seen, np.ones((1, 1)), Style(strength=0), size_px=size_px))

    def print_png(self) -> bytes:
        """The export: print size, with a colour bar and the settings inside."""
        checkpoint = self.loaded.checkpoint
        image = figure(
            self.shown.canvas,
            self.drawn(self.relevance_map),
            title=prediction(self.class_name, self.probabilities.max()),
            caption_lines=(f"{self.title}.", f"Model: {checkpoint.name}, id {checkpoint.id}."),
            style=self.view.style,
            cell=self.cell,
            top=self.top,
        )
        return png_bytes(image, {f"patchlight {name}": value for name, value in self.facts.items()})

    @property
    def top(self) -> float | None:
        """The weight drawn at full light; None for each map's own largest."""
        shared = self.view.scale == "shared" and self.view.mass is None
        return float(self.drawn(self.relevance).max()) if shared else None

    def film(self, kind: str) -> bytes:
        """The picture under one layer after another, as GIF or WebP."""
        weights = self.drawn(self.relevance[:, self.chosen[1]])
        return play_through(
            self.shown.canvas, weights, self.view.style, kind=kind, cell=self.cell, top=self.top
        )

    def page(self) -> bytes:
        """The viewer with this picture, as one HTML file that needs no network."""
        data = with_maps(self.payload | {"view": self.view.all_params()}, self.explanation)
        return export_html([data], f"{self.shown.title}: {TITLE[0].lower()}{TITLE[1:]}").encode()

    @property
    def facts(self) -> dict[str, str]:
        """What it takes to make the same again: every setting, as in a link, and the checkpoint's id."""
        return self.view.all_params() | {"checkpoint": self.loaded.checkpoint.id}


def explain_picture(view: View, loaded: Loaded, shown: Shown) -> Explained:
    """The explanation of one picture, from the cache where the same was asked before.

    CheckpointError if the model answers with numbers that nothing can be drawn from.
    """
    explanation = _explain(
        loaded.checkpoint.id, shown.name, view.fit, view.fusion, view.discard, loaded, shown.seen
    )
    return Explained(view, loaded, shown, explanation)


# An explanation of the bundled model takes about 1 MB.
@st.cache_resource(max_entries=32, show_spinner=False)
def _explain(
    checkpoint_id: str,
    picture: str,
    fit: str,
    fusion: str,
    discard: float,
    _loaded: Loaded,
    _seen: np.ndarray,
) -> Explanation:
    device = _loaded.model.device
    x = prepare(_seen, _loaded.checkpoint).to(device)
    try:
        return explain(_loaded.model, x, head_fusion=fusion, discard_ratio=discard)
    except ValueError as error:
        raise CheckpointError(f"{_loaded.checkpoint.name}: {error}.") from error


@st.cache_resource(max_entries=32, show_spinner=False)
def _payload(key: tuple[str | float, ...], _explained: Explained) -> dict:
    return _make_payload(_explained)


def _make_payload(explained: Explained) -> dict:
    view, shown = explained.view, explained.shown
    return payload(
        explained.explanation, explained.loaded.checkpoint, shown.canvas, name=shown.name, title=shown.title,
        fusion=view.fusion, discard=view.discard, true_class=shown.true_class,
    )  # fmt: skip
