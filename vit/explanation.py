"""One Explanation per batch of pictures: what the model says, and where it looks.

    explanation = explain(model, x)                                  # rollout to CLS through all layers
    explanation = explain(model, x, "raw", layer=5, head=2)          # one head of one layer
    explanation.relevance                                            # (B, GY, GX), the method's own values
    logits, attention, rollout = cls_rows(model, x)                  # no whole maps: for thousands

Layers, heads and tokens count from 0 here; pages and commands, which count from 1, translate.
"""

from dataclasses import dataclass

import numpy as np
import torch
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
from vit.model import MAPS_PART, VisualTransformer
from vit.overlay import dim_own
from vit.parts import in_parts

METHODS = ("rollout", "raw")


@dataclass(frozen=True, eq=False)
class Explanation:
    """What `explain` found, on the device of the model, without gradients."""

    logits: Tensor  # (B, K)
    probabilities: Tensor  # (B, K)
    layer_logits: Tensor  # (B, L, K), final norm and head on CLS after each layer; the last are `logits`
    attention: Tensor  # (B, L, H, N, N), rows sum to 1
    rollout: Tensor  # (B, L, N, N), from the input up to each layer
    relevance: Tensor  # (B, GY, GX), the chosen token's values over the patches
    method: str
    token: int

    def __repr__(self) -> str:  # a thousand lines of numbers help nobody
        tensors = (
            f"{name} {tuple(value.shape)}" for name, value in vars(self).items() if isinstance(value, Tensor)
        )
        return f"Explanation(method={self.method!r}, token={self.token}, {', '.join(tensors)})"


def explain(
    model: VisualTransformer,
    x: Tensor,
    method: str = "rollout",
    token: int = 0,
    *,
    layer: int | None = None,
    head: int | None = None,
    looked_at: bool = False,
    head_fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
) -> Explanation:
    """Explain pictures (B, C, height, width), normalised as by `vit.prepare`.

    method       "rollout" up to `layer` (the last if None), or the "raw" attention of that layer
    token        whose view is taken: 0 is CLS, patches follow row by row
    head         one head alone; None fuses all by `head_fusion`. Under rollout the layers below stay fused
    looked_at    who looks at the token (its column) instead of where it looks (its row)
    the rest     as in `attention_rollout`

    The model's mode, parameters and gradients are as before. ValueError for arguments out of range and for a
    model that answers with numbers that are not finite.
    """
    if method not in METHODS:
        raise ValueError(f"method is {' or '.join(METHODS)}, not {method!r}")
    for name, value, count in (("layer", layer, model.num_layers), ("head", head, model.num_heads)):
        if value is not None:
            require_index(name, value, count)
    layer = model.num_layers - 1 if layer is None else layer
    rollout_options = (head_fusion, discard_ratio, residual, start_layer)
    view = token_column if looked_at else token_row

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        trace = model.trace(x)
        attention = trace.maps
        rollout = rollout_by_layer(attention, *rollout_options)
        if method == "raw":
            chosen = attention[:, layer]  # (B, H, N, N)
            chosen = fuse_heads(chosen, head_fusion) if head is None else chosen[:, head]
        elif head is None:
            chosen = rollout[:, layer]
        else:
            chosen = rollout_by_head(attention, *rollout_options, by_layer=rollout)[:, layer, head]
        relevance = token_grid(view(chosen, token), model.grid)
        layer_logits = model.classify(torch.stack([layer.tokens[:, :1] for layer in trace.layers], dim=1))
        layer_logits[:, -1] = trace.logits  # bit for bit: products of other shapes may round differently
        return trace.logits, trace.logits.softmax(dim=-1), layer_logits, attention, rollout, relevance

    with torch.no_grad():
        found = in_parts(compute, MAPS_PART, x)
    require_finite(found[0])
    return Explanation(*found, method, token)


def require_finite(logits: Tensor) -> None:
    """ValueError if a model answers with NaN or infinity: nothing that follows would mean anything."""
    if not logits.isfinite().all():
        raise ValueError("the model answers with numbers that are not finite (NaN or infinity)")


def head_rows(
    explanation: Explanation,
    method: str = "rollout",
    token: int = 0,
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

    def compute(x: Tensor) -> tuple[Tensor, ...]:
        tokens = model.embed(x, dropout=False)
        rows, fused = [], []
        for layer in model.steps(tokens, explicit=True, dropout=False):
            rows.append(layer.map[:, :, 0].clone())  # a view would keep the whole map
            fused.append(fuse_heads(layer.map, head_fusion)[:, None])
            tokens = layer.tokens
        # one head is left, which any fusion leaves as it is
        rollout = rollout_row_by_layer(fused, 0, "mean", discard_ratio, residual, start_layer)
        return model.classify(tokens), torch.stack(rows, dim=1), rollout

    with torch.no_grad():
        found = in_parts(compute, MAPS_PART, x)
    require_finite(found[0])
    return found
