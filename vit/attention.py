"""From attention maps to relevance: pure functions over tensors, whole batches at once.

    maps                 L tensors (B, H, N, N), or one tensor (B, L, H, N, N); rows are queries, columns keys
    attention_rollout    (B, N, N): how much of each input token reached each output token
    token_row, _column   where one token looks, who looks at it
    token_grid           weights of tokens laid out as the picture's patches (..., GY, GX)
    mass_mask            the fewest patches that hold a share of the weight

Nothing here changes its input, knows of a model, or takes the square root of N: grids may be oblong, and
`prefix_tokens` (CLS and registers) may be 0, 1 or more. Layers, heads and tokens count from 0; only
`token_index` and `token_name`, which speak with people, count rows and columns from 1.

Source of rollout: Abnar and Zuidema 2020, "Quantifying Attention Flow in Transformers" (arXiv 2005.00928).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from vit.parts import in_parts

Maps = Sequence[Tensor] | Tensor
Fusion = Literal["mean", "max", "min"]

_FUSE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda attention: attention.mean(dim=-3),
    "max": lambda attention: attention.amax(dim=-3),
    "min": lambda attention: attention.amin(dim=-3),
}
FUSIONS = tuple(_FUSE)


_PART = 8  # pictures whose maps are worked on together on a CPU (vit/parts.py)


def stack_maps(maps: Maps) -> Tensor:
    """L tensors (B, H, N, N) as one (B, L, H, N, N), which is returned as it is. ValueError otherwise."""
    if not isinstance(maps, Tensor):
        maps = list(maps)
        if not maps or any(layer.ndim != 4 or layer.shape != maps[0].shape for layer in maps):
            raise ValueError("maps are L tensors of one shape (B, H, N, N), or one tensor (B, L, H, N, N)")
        maps = torch.stack(maps, dim=1)
    if maps.ndim != 5 or maps.shape[-1] != maps.shape[-2]:
        raise ValueError(f"maps have the shape (B, L, H, N, N), not {tuple(maps.shape)}")
    return maps


def fuse_heads(attention: Tensor, how: Fusion = "mean") -> Tensor:
    """(..., H, N, N) -> (..., N, N). The rows of a mean sum to 1, those of max and min do not."""
    if not isinstance(how, str) or how not in _FUSE:
        raise ValueError(f"heads are fused by {', '.join(FUSIONS)}, not {how!r}")
    return _FUSE[how](attention)


def attention_rollout(
    maps: Maps,
    head_fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
) -> Tensor:
    """(B, N, N), rows summing to 1: row i says how much of each input token reached token i at the end.

    For each layer from `start_layer` (counted from 0) on: heads are fused to A; in each row of A the lowest
    floor(discard_ratio * N) entries become 0 (of equal ones the later column stays, and the row's largest
    always does); A' = residual * I + (1 - residual) * A, each row divided by its own sum; R <- A' R.

    Not class specific, and never negative. ValueError for values out of range.
    """
    return rollout_by_layer(maps, head_fusion, discard_ratio, residual, start_layer)[:, -1]


def rollout_by_layer(
    maps: Maps,
    head_fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
) -> Tensor:
    """(B, L, N, N): the rollout from the input up to each layer; the identity below `start_layer`."""
    stacked = stack_maps(maps)
    _check_rollout(stacked.shape[1], discard_ratio, residual, start_layer)

    def compute(part: Tensor) -> tuple[Tensor]:
        fused = _discard_lowest(fuse_heads(part, head_fusion), discard_ratio)  # (B, L, N, N)
        identity = torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device)
        steps = torch.lerp(fused, identity, residual)
        steps = steps / _above_zero(steps.sum(dim=-1, keepdim=True), residual)
        running = [identity.expand_as(steps[:, 0])] * start_layer + [steps[:, start_layer]]
        for depth in range(start_layer + 1, steps.shape[1]):
            running.append(steps[:, depth] @ running[-1])  # later layers on the left
        return (torch.stack(running, dim=1),)

    return in_parts(compute, _PART, stacked)[0]


def rollout_row_by_layer(
    maps: Maps,
    token: int | Tensor = 0,
    head_fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
) -> Tensor:
    """(B, L, N): one token's row of `rollout_by_layer`, by products of rows with matrices: far less work.

    In place of a token, weights (N,) of all tokens give the weighted sum of their rows.
    """
    layers = list(maps.unbind(dim=1)) if isinstance(maps, Tensor) else list(maps)
    _check_rollout(len(layers), discard_ratio, residual, start_layer)
    B, _, N, _ = layers[0].shape
    rows = layers[0].new_zeros(B, len(layers), N)
    if isinstance(token, Tensor):
        rows[:] = token
    else:
        rows[:, :, _checked_token(token, N)] = 1
    for depth in reversed(range(start_layer, len(layers))):  # from above: a row meets its own layer first
        fused = _discard_lowest(fuse_heads(layers[depth], head_fusion), discard_ratio)  # (B, N, N)
        scaled = rows[:, depth:] / _row_totals(fused, residual).mT  # rows that reach this layer or higher
        moved = torch.lerp(scaled @ fused, scaled, residual)
        rows = torch.cat((rows[:, :depth], moved), dim=1)
    return rows


def rollout_by_head(
    maps: Maps,
    head_fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
    *,
    by_layer: Tensor | None = None,
) -> Tensor:
    """(B, L, H, N, N): at each layer every head alone, on top of the fused rollout of the layers below.

    `by_layer` is `rollout_by_layer` with the same arguments, from callers who have it already.
    """
    stacked = stack_maps(maps)
    if by_layer is None:
        by_layer = rollout_by_layer(stacked, head_fusion, discard_ratio, residual, start_layer)
    _check_rollout(stacked.shape[1], discard_ratio, residual, start_layer)

    def compute(part: Tensor, by_layer: Tensor) -> tuple[Tensor]:
        B, L, H, N, _ = part.shape
        identity = torch.eye(N, dtype=part.dtype, device=part.device).expand(B, 1, N, N)
        below = torch.cat((identity, by_layer[:, :-1]), dim=1)  # (B, L, N, N)
        heads = _discard_lowest(part, discard_ratio)
        # (residual * I + (1 - residual) * A) R, without writing the bracket: one product for all heads
        product = (heads.reshape(B, L, H * N, N) @ below).view(B, L, H, N, N)
        # in place: a fresh tensor of this size costs more than the arithmetic
        rollouts = product.lerp_(below[:, :, None], residual).div_(_row_totals(heads, residual))
        if start_layer:
            untouched = identity[:, :, None].expand(B, start_layer, H, N, N)
            rollouts = torch.cat((untouched, rollouts[:, start_layer:]), dim=1)
        return (rollouts,)

    return in_parts(compute, _PART, stacked, by_layer)[0]


def rollout_of_heads_row(
    attention: Tensor,
    by_layer: Tensor,
    token: int | Tensor = 0,
    discard_ratio: float = 0.0,
    residual: float = 0.5,
) -> Tensor:
    """(B, L, H, N): one token's row of `rollout_by_head`, made from `rollout_by_layer` without the rest.

    In place of a token, weights (N,) of several give the weighted sum of their rows.
    """
    if isinstance(token, Tensor):
        asked = [int(one) for one in token.nonzero()[:, 0]]
        options = discard_ratio, residual
        return sum(
            float(token[one]) * rollout_of_heads_row(attention, by_layer, one, *options) for one in asked
        )
    rows = _discard_lowest(token_row(attention, token), discard_ratio)  # (B, L, H, N)
    identity = torch.eye(rows.shape[-1], dtype=rows.dtype, device=rows.device)
    below = torch.cat((identity.expand_as(by_layer[:, :1]), by_layer[:, :-1]), dim=1)  # (B, L, N, N)
    rollouts = torch.lerp(rows @ below, below[:, :, token, None], residual)
    return rollouts / _row_totals(rows, residual)


def token_row(attention: Tensor, token: int | Tensor) -> Tensor:
    """(..., N, N) -> (..., N): where `token` looks. Sums to 1 when the map's rows do.

    In place of a token, weights (N,) of all tokens give the weighted sum of their rows.
    """
    if isinstance(token, Tensor):
        return token.to(attention.dtype) @ attention
    return attention[..., _checked_token(token, attention.shape[-2]), :]


def token_column(attention: Tensor, token: int | Tensor) -> Tensor:
    """(..., N, N) -> (..., N): how much each token looks at `token`, or weighted ones. Sums to no 1."""
    if isinstance(token, Tensor):
        return attention @ token.to(attention.dtype)
    return attention[..., _checked_token(token, attention.shape[-1])]


def token_grid(weights: Tensor, grid: tuple[int, int], prefix_tokens: int = 1) -> Tensor:
    """(..., N) -> (..., GY, GX): the patches' weights, laid out as in the picture."""
    if weights.shape[-1] != prefix_tokens + math.prod(grid):
        raise ValueError(
            f"{weights.shape[-1]} tokens are not {prefix_tokens} and a grid of {grid[0]} x {grid[1]} patches"
        )
    return weights[..., prefix_tokens:].unflatten(-1, tuple(grid))


def mass_mask(weights: Tensor, share: float) -> Tensor:
    """(..., P) -> (..., P) bool: the fewest patches that hold at least `share` of the weight, to a billionth.

    Of equal weights the earlier patch comes first. A share of 0 takes none, 1 all that have weight; without
    any weight none is taken. Weights below 0 count as 0. ValueError for a share outside 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share lies from 0 to 1, not {share}")
    # in float64, which not every device has; sums in float32 would take or leave patches by rounding
    falling, order = weights.cpu().double().clamp_min(0).sort(dim=-1, descending=True, stable=True)
    held = falling.cumsum(dim=-1)
    taken = falling > 0
    if share < 1:  # at 1 even those are taken that a sum rounds away
        taken &= held - falling < share * held[..., -1:] * (1 - 1e-9)  # too little is held without them
    return torch.zeros_like(taken).scatter(-1, order, taken).to(weights.device)


def attention_entropy_bits(attention: Tensor, token: int | None = None) -> Tensor:
    """(..., N, N) -> (...): entropy of the row of `token`, or the mean over all rows; 0 to log2 N bits."""
    rows = attention if token is None else token_row(attention, token).unsqueeze(-2)
    return torch.special.entr(rows).sum(dim=-1).mean(dim=-1) / math.log(2)


def cls_share(attention: Tensor, token: int | None = None) -> Tensor:
    """(..., N, N) -> (...): the share of attention that CLS (token 0) draws from `token`, or on average."""
    rows = attention if token is None else token_row(attention, token).unsqueeze(-2)
    return rows[..., 0].mean(dim=-1)


def mean_attention_distance_px(
    attention: Tensor, grid: tuple[int, int], patch_px: int, prefix_tokens: int = 1
) -> Tensor:
    """(..., N, N) -> (...): how far patches look, in pixels (Dosovitskiy et al. 2020, appendix D.7).

    The mean over patch tokens of the Euclidean distance between patch centres, weighted by attention, rows
    renormalised over patches. Uniform attention on 8 x 8 patches of 4 px: 16.546 px.
    """
    if attention.shape[-1] != prefix_tokens + math.prod(grid):
        raise ValueError(
            f"{attention.shape[-1]} tokens are not {prefix_tokens} and {grid[0]} x {grid[1]} patches"
        )
    rows, columns = torch.meshgrid(
        torch.arange(grid[0], device=attention.device, dtype=attention.dtype),
        torch.arange(grid[1], device=attention.device, dtype=attention.dtype),
        indexing="ij",
    )
    centres_px = torch.stack([rows.flatten(), columns.flatten()], dim=-1) * patch_px  # (P, 2)
    distances_px = torch.cdist(centres_px, centres_px)  # (P, P)
    among_patches = attention[..., prefix_tokens:, prefix_tokens:]
    totals = among_patches.sum(dim=-1)
    weighted_px = (among_patches * distances_px).sum(dim=-1)
    return (weighted_px / totals.clamp_min(torch.finfo(totals.dtype).tiny)).mean(dim=-1)


def token_index(name: str, grid: tuple[int, int], prefix_tokens: int = 1) -> int:
    """The index of the token that people call `cls` or `ROW,COLUMN`, rows and columns from 1."""
    text = name.strip().lower()
    prefixes = [token_name(index, grid, prefix_tokens) for index in range(prefix_tokens)]
    if text in prefixes:
        return prefixes.index(text)
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 2 and all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        row, column = map(int, parts)
        if 1 <= row <= grid[0] and 1 <= column <= grid[1]:
            return prefix_tokens + (row - 1) * grid[1] + column - 1
    raise ValueError(
        f"a token is cls or ROW,COLUMN with rows 1 to {grid[0]} and columns 1 to {grid[1]}, not {name!r}"
    )


def token_name(index: int, grid: tuple[int, int], prefix_tokens: int = 1) -> str:
    """`cls` or `ROW,COLUMN`, rows and columns from 1: the inverse of `token_index`."""
    patch = _checked_token(index, prefix_tokens + math.prod(grid)) - prefix_tokens
    if patch >= 0:
        return f"{patch // grid[1] + 1},{patch % grid[1] + 1}"
    return "cls" if index == 0 else f"register {index}"


def _check_rollout(num_layers: int, discard_ratio: float, residual: float, start_layer: int) -> None:
    for name, share in (("discard_ratio", discard_ratio), ("residual", residual)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} lies from 0 to 1, not {share}")
    require_index("start_layer", start_layer, num_layers)


def _row_totals(attention: Tensor, residual: float) -> Tensor:
    """(..., N, N) -> (..., N, 1): row sums of residual * I + (1 - residual) * A, never 0.

    A fully blocked row without a residual has the sum 0: it stays zero instead of turning to NaN.
    """
    totals = attention.sum(dim=-1, keepdim=True).mul_(1 - residual).add_(residual)
    return _above_zero(totals, residual)


def _above_zero(totals: Tensor, residual: float) -> Tensor:
    return totals if residual else totals.clamp_min(torch.finfo(totals.dtype).tiny)


def _discard_lowest(attention: Tensor, ratio: float) -> Tensor:
    """(..., N, N) with the lowest floor(ratio * N) entries of each row set to 0, never the largest."""
    N = attention.shape[-1]
    count = min(math.floor(ratio * N + 1e-9), N - 1)  # 0.57 * 100 is 56.99… in floats
    if count == 0:
        return attention
    ascending = attention.sort(dim=-1, stable=True).indices  # stable: of equals the earlier column goes first
    return attention.scatter(-1, ascending[..., :count], 0.0)


def _checked_token(token: int, count: int) -> int:
    require_index("token", token, count)
    return token


def require_index(name: str, value: int, count: int) -> None:
    """ValueError unless `value` is a whole number from 0 to count - 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is a whole number, not {value!r}")
    if not 0 <= value < count:
        raise ValueError(f"{name} lies from 0 to {count - 1}, not {value}")
