"""What changes the answer: heads switched off, patches covered, and what each of them alone is worth.

    change = Change(heads_off=frozenset({(2, 0)}), covered=frozenset({9, 10}))
    answer(model, x, change)[-1]                  # (K,) probabilities, beside answer(model, x, Change())[-1]
    leave_one_out(model, x, target)               # (P,) what the class loses without each patch
    head_effects(model, x, target)                # (L, H) what it loses without each head
    cover_most(model, x, weights, 12, "removed")  # the 12 most looked at, against 12 at random

Attention says where a model looks, not why it decides; this is measured by running the model again. All take
one picture x (1, C, height, width) as `vit.prepare` gives it, need no gradients, ignore the model's mode and
leave it as it was. Layers, heads, classes and patches count from 0; patch p lies in row p // GX, column
p % GX. Letters for shapes: vit/model.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from vit.attention import require_index
from vit.model import VisualTransformer
from vit.parts import in_parts
from vit.removal import Removal, filled

Fill = Literal["removed", "mean", "blur"]
FILLS = get_args(Fill)

_PART = 32  # copies of the picture that a CPU works on together


@dataclass(frozen=True)
class Change:
    """What is taken from the model or from the picture. By default nothing."""

    heads_off: frozenset[tuple[int, int]] = frozenset()  # (layer, head)
    covered: frozenset[int] = frozenset()  # patches
    fill: Fill = "removed"  # as tokens; or filled with "mean" or "blur" as in `cover`

    def check(self, model: VisualTransformer) -> None:
        """ValueError for what the model lacks. All heads off and all patches covered are allowed."""
        _check_fill(self.fill)
        for layer, head in self.heads_off:
            require_index("layer", layer, model.num_layers)
            require_index("head", head, model.num_heads)
        _check_patches(self.covered, model.grid)


@dataclass(frozen=True)
class Covered:
    """What `cover_most` found: probabilities of the class that the untouched picture is taken for."""

    target: int  # that class
    patches: tuple[int, ...]  # the most weighted, the largest weight first
    untouched: float
    most: float  # with those patches covered
    random: tuple[float, ...]  # with as many covered at random, for each draw


@torch.no_grad()
def answer(model: VisualTransformer, x: Tensor, change: Change) -> Tensor:
    """(L, K) probabilities after each layer, as final norm and head read CLS there; the last is the answer.

    Without any change the last is that of `model(x)`, bit for bit.
    """
    change.check(model)
    _check_picture(x)
    keep, gate = None, None
    if change.covered and change.fill == "removed":
        stay = sorted(set(range(math.prod(model.grid))) - change.covered)
        keep = torch.tensor(stay, dtype=torch.int64, device=x.device)[None]  # (1, k), k may be 0
    elif change.covered:
        x = cover(x, sorted(change.covered), model.grid, change.fill)
    if change.heads_off:
        gate = torch.ones(model.num_layers, model.num_heads)
        for layer, head in change.heads_off:
            gate[layer, head] = 0
        gate = gate.to(x.device)  # once, not head by head
    tokens = model.embed(x, keep=keep, dropout=False)
    steps = model.steps(tokens, keep=keep, head_gate=gate, explicit=False, dropout=False)
    return torch.cat([model.classify(layer.tokens) for layer in steps]).softmax(dim=-1)


def cover(x: Tensor, patches: Sequence[int], grid: tuple[int, int], fill: Removal) -> Tensor:
    """A copy of the picture with these patches filled as vit/removal.py says: "mean", "blur", "neighbours".

    ValueError for patches outside the grid and for another fill: "removed" is not made of pixels.
    """
    _check_patches(patches, grid)
    mask = torch.zeros(1, math.prod(grid), dtype=torch.bool, device=x.device)
    mask[:, list(patches)] = True
    return filled(x, mask, grid, fill)


@torch.no_grad()
def leave_one_out(
    model: VisualTransformer, x: Tensor, target: int, patches: Sequence[int] | None = None
) -> Tensor:
    """What each of `patches` (all if None), removed alone as a token, takes from the class `target`: (n,).

    Probability before minus probability without, exact, in one batch of n; below 0 where the patch spoke
    against the class. Probabilities, not logits: what a person asks is how sure the answer still is. Long
    lists may be asked for in pieces. ValueError for classes and patches that do not exist.
    """
    _check_target(model, target)
    P = math.prod(model.grid)
    chosen = list(range(P) if patches is None else patches)
    _check_patches(chosen, model.grid)
    without = torch.tensor(chosen, dtype=torch.int64, device=x.device)[:, None]  # (n, 1)
    others = torch.arange(P - 1, device=x.device)
    keep = others + (others >= without)  # (n, P - 1): all but one
    return _untouched(model, x)[target] - _probabilities(model, x, keep=keep)[:, target]


@torch.no_grad()
def head_effects(
    model: VisualTransformer, x: Tensor, target: int, heads: Sequence[tuple[int, int]] | None = None
) -> Tensor:
    """What each head, off alone, takes from the class `target`: (L, H), or (n,) for n `heads` (layer, head).

    Probability before minus probability without, as in `leave_one_out`.
    """
    _check_target(model, target)
    L, H = model.num_layers, model.num_heads
    chosen = [(layer, head) for layer in range(L) for head in range(H)] if heads is None else list(heads)
    Change(heads_off=frozenset(chosen)).check(model)
    gates = torch.ones(len(chosen), L, H)
    for gate, (layer, head) in zip(gates, chosen, strict=True):
        gate[layer, head] = 0
    found = _probabilities(model, x, gates=gates.to(x.device))
    effects = _untouched(model, x)[target] - found[:, target]
    return effects.view(L, H) if heads is None else effects


@torch.no_grad()
def cover_most(
    model: VisualTransformer,
    x: Tensor,
    weights: ArrayLike | Tensor,
    count: int,
    fill: Fill = "removed",
    seed: int = 0,
    draws: int = 8,
) -> Covered:
    """Cover the `count` patches of most weight (P,), and in `draws` more runs as many drawn from all of them.

    Of equal weights the earlier patch counts as larger. The same `seed` draws the same patches. ValueError
    for a count that is not 0 to P, weights of another number, and another fill.
    """
    _check_fill(fill)
    P = math.prod(model.grid)
    weights = weights.cpu().numpy() if isinstance(weights, Tensor) else np.asarray(weights)
    if weights.shape != (P,):
        raise ValueError(f"weights are one for each of {P} patches, not {weights.shape}")
    require_index("count", count, P + 1)
    if draws < 0:
        raise ValueError(f"draws is at least 0, not {draws}")
    most = np.argsort(-weights, kind="stable")[:count]
    random = np.random.default_rng(seed)
    masks = np.zeros((1 + draws, P), bool)
    masks[0, most] = True
    for mask in masks[1:]:
        mask[random.permutation(P)[:count]] = True
    before = _untouched(model, x)
    target = int(before.argmax())
    if fill == "removed":
        keep = torch.from_numpy(np.nonzero(~masks)[1].reshape(1 + draws, P - count)).to(x.device)
        found = _probabilities(model, x, keep=keep)
    else:
        covered = filled(x, torch.from_numpy(masks).to(x.device), model.grid, fill)
        found = _probabilities(model, x, filled=covered)
    first, *others = found[:, target].tolist()
    return Covered(target, tuple(most.tolist()), before[target].item(), first, tuple(others))


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation of two arrays of one shape, from -1 to 1; equal values share a mean rank.

    0.0 where all values of one are equal: it orders nothing, so there is nothing to agree with. ValueError
    for other shapes and for values that are not finite.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"ranks of {a.shape} and {b.shape} values cannot be compared")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("values that are not finite have no rank")
    first, second = _centred_ranks(a), _centred_ranks(b)
    scale = math.sqrt((first @ first) * (second @ second))
    return float(np.clip(first @ second / scale, -1, 1)) if scale else 0.0


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    _, place, count = np.unique(values.ravel(), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place.ravel()]  # halves at most: their sums are exact
    return ranks - (len(ranks) + 1) / 2


# ---- many runs of one picture ---------------------------------------------------------------------------


def _untouched(model: VisualTransformer, x: Tensor) -> Tensor:
    """(K,) probabilities."""
    return _probabilities(model, x, filled=x)[0]


def _probabilities(model: VisualTransformer, x: Tensor, **batch: Tensor) -> Tensor:
    """(n, K) for n changes of one picture: `keep` (n, k), `gates` (n, L, H) or pictures `filled` (n, ...)."""
    _check_picture(x)
    ((what, changes),) = batch.items()

    def compute(part: Tensor) -> tuple[Tensor]:
        pictures = part if what == "filled" else x.expand(len(part), -1, -1, -1)
        keep, gate = part if what == "keep" else None, part if what == "gates" else None
        tokens = model.embed(pictures, keep=keep, dropout=False)
        for layer in model.steps(
            tokens, keep=keep, head_gate=gate, cls_only=True, explicit=False, dropout=False
        ):
            tokens = layer.tokens
        return (model.classify(tokens).softmax(dim=-1),)

    return in_parts(compute, _PART, changes)[0]


def _check_picture(x: Tensor) -> None:
    if x.ndim != 4 or len(x) != 1:
        raise ValueError(f"one picture is needed, of shape (1, C, height, width), not {tuple(x.shape)}")


def _check_target(model: VisualTransformer, target: int) -> None:
    require_index("target", target, model.num_classes)


def _check_patches(patches: Sequence[int] | frozenset[int], grid: tuple[int, int]) -> None:
    for patch in patches:
        require_index("patch", patch, math.prod(grid))


def _check_fill(fill: str) -> None:
    if fill not in FILLS:
        raise ValueError(f"covered patches are {', '.join(FILLS)}, not {fill!r}")
