"""One picture explained for the page: the numbers, and the pictures drawn from them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import streamlit as st

from vit.attention import token_index, token_name
from vit.checkpoint import CheckpointError
from vit.explanation import Explanation, explain, head_rows
from vit.figure import figure
from vit.images import prepare
from vit.overlay import Style, draw, outline, png_bytes, sheet
from vit.page.models import Loaded
from vit.page.pictures import Shown
from vit.page.view import PICTURE_PX, View
from vit.words import percent, prediction, token_label


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
        """(GY, GX): what the large picture shows."""
        return self.relevance[self.chosen]

    @property
    def probabilities(self) -> np.ndarray:
        return self.explanation.probabilities[0].cpu().numpy()

    @property
    def class_name(self) -> str:
        return self.loaded.checkpoint.class_names[int(self.probabilities.argmax())]

    @property
    def title(self) -> str:
        return self.view.sentence(self.architecture)

    @property
    def alt(self) -> str:
        drawn = "lit" if self.view.draw == "light" else "coloured"
        return f"{self.shown.title}, {drawn} by attention. {self.title}. {self.looks_most_at}"

    @property
    def sheet_alt(self) -> str:
        layers, heads = self.architecture.num_layers, self.architecture.num_heads
        return (
            f"{layers} layers by {heads} heads as thumbnails, and all heads together, each lit where it looks"
        )

    @cached_property
    def looks_most_at(self) -> str:
        """The largest weights and that of CLS, in words."""
        patches = self.relevance_map.flatten()
        most = " and ".join(
            f"{token_label(token_name(patch + 1, self.architecture.grid))} ({percent(patches[patch])})"
            for patch in patches.argsort()[::-1][:2].tolist()
        )
        cls = percent(self.rows[self.chosen][0])
        if self.view.looked_at:
            return f"Most by {most}; by CLS {cls}."
        return f"Most weight on {most}; CLS has {cls}."

    def lit_png(self) -> bytes:
        """The large picture."""
        return png_bytes(self.lit())

    def lit(self) -> np.ndarray:
        """(h, w, 3) uint8: the picture with its relevance, and the token's patch outlined."""
        height, width = self.shown.canvas.shape[:2]
        scale = PICTURE_PX / max(height, width)
        size_px = (round(height * scale), round(width * scale))
        drawn = draw(self.shown.canvas, self.relevance_map, self.view.style, size_px=size_px)
        return drawn if self.cell is None else outline(drawn, self.cell, self.architecture.grid)

    def seen_png(self) -> bytes:
        """What the model sees, enlarged with crisp pixels."""
        height, width = self.shown.seen.shape[:2]
        times = max(1, 256 // max(height, width))
        size_px = (height * times, width * times)
        return png_bytes(draw(self.shown.seen, np.ones((1, 1)), Style(strength=0), size_px=size_px))

    def sheet_png(self) -> bytes:
        """All layers by all heads."""
        return png_bytes(
            sheet(self.shown.seen, self.relevance, self.view.style, chosen=self.chosen, thumb_px=96)
        )

    def print_png(self) -> bytes:
        """The export: print size, with a colour bar and the settings inside."""
        checkpoint = self.loaded.checkpoint
        image = figure(
            self.shown.canvas,
            self.relevance_map,
            title=prediction(self.class_name, self.probabilities.max()),
            caption_lines=(f"{self.title}.", f"Model: {checkpoint.name}, id {checkpoint.id}."),
            style=self.view.style,
            cell=self.cell,
        )
        return png_bytes(image, {f"patchlight {name}": value for name, value in self.facts.items()})

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
    device = next(_loaded.model.parameters()).device
    x = prepare(_seen, _loaded.checkpoint).to(device)
    try:
        return explain(_loaded.model, x, head_fusion=fusion, discard_ratio=discard)
    except ValueError as error:
        raise CheckpointError(f"{_loaded.checkpoint.name}: {error}.") from error
