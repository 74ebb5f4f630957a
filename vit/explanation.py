"""One Explanation per batch of pictures: what the model says, and where it looks.

    explanation = explain(model, x)                                  # rollout to CLS through all layers
    explanation = explain(model, x, "raw", layer=5, head=2)          # one head of one layer
    explanation = explain(model, x, "chefer", target=3, versus=5)    # why class 3 and not 5: vit/methods.py
    explanation.relevance                                            # (B, GY, GX), the method's own values
    explanation.overlay(), explanation.figure()                      # as a picture; in a notebook, by itself
    logits, attention, rollout = cls_rows(model, x)                  # no whole maps: for thousands

Layers, heads, tokens and classes count from 0 here; pages and commands, which count from 1, translate.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit.attention import (
    Fusion,
    fuse_heads,
    mass_mask,
    require_index,
    rollout_by_head,
    rollout_by_layer,
    rollout_row_by_layer,
    token_column,
    token_grid,
    token_row,
)
from vit.methods import METHODS, as_classes, relevance
from vit.model import MAPS_PART, VisualTransformer
from vit.overlay import DEFAULT_STYLE, Style, dim_own
from vit.parts import in_parts

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from vit.checkpoint import Checkpoint

VIEWS = ("rollout", "raw")  # the methods that have the view of every token, layer and head


@dataclass(frozen=True, eq=False)
class Explanation:
    """What `explain` found, on the device of the model, without gradients."""

    logits: Tensor  # (B, K)
    probabilities: Tensor  # (B, K)
    layer_logits: Tensor  # (B, L, K), final norm and head on CLS after each layer; the last are `logits`
    attention: Tensor  # (B, L, H, N, N), rows sum to 1
    rollout: Tensor  # (B, L, N, N), from the input up to each layer
    relevance: Tensor  # (B, GY, GX), the method's own values over the patches
    method: str
    token: int | None  # whose view rollout and raw attention take; None where the answer is read from several
    readout: Tensor  # (N,) with what weight the answer reads each token
    target: Tensor  # (B,) int64, the class explained, where the method knows classes
    versus: Tensor | None  # (B,) int64, the class that it is compared with
    x: Tensor  # (B, C, height, width), as given
    checkpoint: "Checkpoint | None" = None  # names classes and undoes the normalisation when it is drawn

    @property
    def title(self) -> str:
        """The method in words."""
        return METHODS[self.method].title

    def overlay(self, picture: int = 0, style: Style = DEFAULT_STYLE, size_px: int = 448) -> Image.Image:
        """One picture of the batch with its relevance, the longer side `size_px` long."""
        from vit.notebook import overlay

        return overlay(self, picture, style, size_px)

    def figure(self, picture: int = 0) -> "go.Figure":
        """The same as a Plotly figure: pointing at a patch says its value."""
        from vit.notebook import figure

        return figure(self, picture)

    def save(self, path: str | Path, picture: int = 0, style: Style = DEFAULT_STYLE) -> None:
        """Write one picture as .png for print, or all numbers as .npz. ValueError for another ending."""
        from vit.notebook import save

        save(self, Path(path), picture, style)

    def _repr_html_(self) -> str:
        from vit.notebook import html

        return html(self)

    def __repr__(self) -> str:  # a thousand lines of numbers help nobody
        tensors = (
            f"{name} {tuple(value.shape)}" for name, value in vars(self).items() if isinstance(value, Tensor)
        )
        return f"Explanation(method={self.method!r}, token={self.token}, {', '.join(tensors)})"


def explain(
    model: VisualTransformer,
    x: Tensor,
    method: str = "rollout",
    token: int | None = None,
    *,
    target: int | Tensor | None = None,
    versus: int | Tensor | None = None,
    layer: int | None = None,
    head: int | None = None,
    looked_at: bool = False,
    checkpoint: "Checkpoint | None" = None,
    **options,
) -> Explanation:
    """Explain pictures (B, C, height, width), normalised as by `vit.prepare`.

    method       "rollout" up to `layer` (the last if None), the "raw" attention of that layer, or any other
                 of `vit.METHODS`
    target       the class explained, one or for each picture its own (B,); None is the first predicted.
                 With `versus`, what speaks for it rather than for that other class
    checkpoint   lets the Explanation draw itself with true colours and names of classes
    options      head_fusion, discard_ratio, residual, start_layer as in `attention_rollout`; for other
                 methods, their own in vit/methods.py

    For rollout and raw attention alone:

    token        whose view is taken: CLS if None, or what the answer is read from; 0 is CLS in our models,
                 patches follow row by row
    head         one head alone; None fuses all by `head_fusion`. Under rollout the layers below stay fused
    looked_at    who looks at the token (its column) instead of where it looks (its row)

    The model's mode, parameters and gradients are as before. ValueError for arguments out of range and for a
    model that answers with numbers that are not finite.
    """
    if method not in METHODS:
        raise ValueError(f"method is {', '.join(METHODS)}, not {method!r}")
    is_view = method in VIEWS
    if not is_view and (token is not None or head is not None or looked_at):
        raise ValueError(f"token, head and looked_at are for {' and '.join(VIEWS)}, not for {method}")
    for name, value, count in (("layer", layer, model.num_layers), ("head", head, model.num_heads)):
        if value is not None:
            require_index(name, value, count)
    rollout_options = options if is_view else {}
    viewer = answer_token(model) if token is None else token
    names = {"layer": layer} if layer is not None else {}

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        tokens = model.embed(x, dropout=False)
        # layer by layer, not by `trace`: what nobody asks for is let go while it is still in the cache
        layer_logits, attention = [], None
        for depth, step in enumerate(model.steps(tokens, explicit=True, dropout=False)):
            if attention is None:
                attention = step.map.new_empty(len(x), model.num_layers, *step.map.shape[1:])
            attention[:, depth] = step.map
            layer_logits.append(model.classify(step.tokens))
        logits = layer_logits[-1]
        rollout = rollout_by_layer(attention, **rollout_options)
        found = logits, logits.softmax(dim=-1), torch.stack(layer_logits, dim=1), attention, rollout
        if not is_view:
            return found
        depth = model.num_layers - 1 if layer is None else layer
        weights = _view(attention, rollout, method, viewer, depth, head, looked_at, **rollout_options)
        return *found, token_grid(weights, model.grid, model.prefix_tokens)

    with torch.no_grad():
        found = in_parts(compute, MAPS_PART, x)
    require_finite(found[0])
    classes = as_classes(model, x, found[0].argmax(dim=-1) if target is None else target, versus)
    if not is_view:
        values = relevance(model, x, method, *classes, **names, **options)
        found = *found, values.unflatten(-1, model.grid)
    return Explanation(
        *found, method, viewer if isinstance(viewer, int) else None, model.readout(found[3].shape[-1]),
        classes[0], classes[1] if versus is not None else None, x.detach(), checkpoint,
    )  # fmt: skip


def answer_token(model: VisualTransformer) -> int | Tensor:
    """The token that the answer is read from, or, where there are several, with what weight each is (N,)."""
    readout = model.readout(model.prefix_tokens + model.grid[0] * model.grid[1])
    (read,) = readout.nonzero(as_tuple=True)
    return int(read) if len(read) == 1 else readout


def _view(
    attention: Tensor,
    rollout: Tensor,
    method: str,
    token: int | Tensor,
    layer: int,
    head: int | None,
    looked_at: bool,
    head_fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
) -> Tensor:
    """(B, N): one token's view in one layer."""
    if method == "raw":
        chosen = attention[:, layer]  # (B, H, N, N)
        chosen = fuse_heads(chosen, head_fusion) if head is None else chosen[:, head]
    elif head is None:
        chosen = rollout[:, layer]
    else:
        options = head_fusion, discard_ratio, residual, start_layer
        chosen = rollout_by_head(attention, *options, by_layer=rollout)[:, layer, head]
    return (token_column if looked_at else token_row)(chosen, token)


def require_finite(logits: Tensor) -> None:
    """ValueError if a model answers with NaN or infinity: nothing that follows would mean anything."""
    if not logits.isfinite().all():
        raise ValueError("the model answers with numbers that are not finite (NaN or infinity)")


def head_rows(
    explanation: Explanation,
    method: str = "rollout",
    token: int | Tensor = 0,
    *,
    looked_at: bool = False,
    head_fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
) -> Tensor:
    """(B, L, H + 1, N): one token's weights in every layer and head, and last with all heads fused.

    Arguments as in `explain`; the four of rollout must be those that `explanation` was made with.
    """
    options = (head_fusion, discard_ratio, residual, start_layer)
    attention, fused = explanation.attention, explanation.rollout
    if method == "raw":
        heads, fused = attention, fuse_heads(attention, head_fusion)
    else:
        heads = rollout_by_head(attention, *options, by_layer=fused)
    view = token_column if looked_at else token_row
    return torch.cat((view(heads, token), view(fused, token)[:, :, None]), dim=2)


def drawn_weights(weights: Tensor, cell: tuple[int, int] | None, mass: float | None = None) -> np.ndarray:
    """(..., GY, GX) -> the same as float64 array, as page, exports and command line draw them.

    With `mass`, 1 in the fewest patches that hold this share of the weight and 0 elsewhere; without, the own
    weight of the patch at `cell` (row, column from 0) lowered as by `vit.overlay.dim_own`.
    """
    if mass is None:
        return dim_own(weights.cpu().numpy(), cell)
    return mass_mask(weights.flatten(-2), mass).view_as(weights).double().cpu().numpy()


def cls_rows(
    model: VisualTransformer,
    x: Tensor,
    *,
    head_fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, K), and the rows of CLS alone: attention (B, L, H, N) and rollout by layer (B, L, N).

    The same numbers as in `explain`, which keeps all rows: 65 times as many at the default size.
    """
    viewer = answer_token(model)

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        tokens = model.embed(x, dropout=False)
        rows, fused = [], []
        for layer in model.steps(tokens, explicit=True, dropout=False):
            rows.append(token_row(layer.map, viewer).clone())  # a view would keep the whole map
            fused.append(fuse_heads(layer.map, head_fusion)[:, None])
            tokens = layer.tokens
        # one head is left, which any fusion leaves as it is
        rollout = rollout_row_by_layer(fused, viewer, "mean", discard_ratio, residual, start_layer)
        return model.classify(tokens), torch.stack(rows, dim=1), rollout

    with torch.no_grad():
        found = in_parts(compute, MAPS_PART, x)
    require_finite(found[0])
    return found
