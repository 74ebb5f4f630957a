"""How far to trust a map of relevance: hide patches by its ranking, run the model again, see what is lost.

    found = score_picture(model, x, {"chefer": relevance(model, x, "chefer")})
    found.methods["chefer"].deletion, .insertion      # (B, S + 1) probabilities of the class first predicted
    found.methods["chefer"].difference                # (B,) one number: insertion's area less deletion's
    found.random.difference.mean(dim=0)               # (B,) that of random orders, to be compared with

Maps are (B, P), ranked as they are: nothing is cut or made positive, and a map that is scaled or shifted
scores the same. Of equal patches the earlier is ranked higher. S steps, M maps; other letters: vit/model.py.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vit.cause import rank_correlation
from vit.methods import as_classes
from vit.model import VisualTransformer
from vit.removal import Removal, runs_without

STEPS = 8
SACO_GROUPS = 8
SACO_REMOVAL: Removal = "mean"  # near the paper's: the mean of the picture

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, eq=False)
class Curves:
    """What is left of a class's probability as patches go, the most relevant first, and as they come.

    The reverse order costs no run: with k patches shown, the P - k least relevant are deleted, so that its
    deletion is this `insertion` read backwards, and its difference is this `difference` with the other sign.
    """

    counts: tuple[int, ...]  # S + 1 numbers of patches, from 0 to P, deleted or shown
    deletion: Tensor  # (..., B, S + 1)
    insertion: Tensor  # (..., B, S + 1)

    @property
    def difference(self) -> Tensor:
        """(..., B), from -1 to 1: the mean height of the insertion curve less that of the deletion curve.

        0 is what random orders have on average: an order and its reverse cancel out.
        """
        shares = torch.tensor(self.counts, dtype=self.insertion.dtype, device=self.insertion.device)
        return torch.trapezoid(self.insertion - self.deletion, shares / self.counts[-1])


@dataclass(frozen=True, eq=False)
class PictureScore:
    """What `score_picture` found."""

    target: Tensor  # (B,) the class first predicted
    methods: dict[str, Curves]  # (B, S + 1) each
    random: Curves  # (orders, B, S + 1)


def score_picture(
    model: VisualTransformer,
    x: Tensor,
    maps: Mapping[str, Tensor],
    removal: Removal = "removed",
    steps: int = STEPS,
    orders: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> PictureScore:
    """Curves of some maps, (B, P) or (B, GY, GX) by name, of pictures x (B, ...), beside random orders.

    (maps + orders) * 2 * (steps - 1) + 2 runs a picture. ValueError as in `curves`.
    """
    (target,) = as_classes(model, x, None)
    P = model.grid[0] * model.grid[1]
    drawn = random_maps(range(seed, seed + len(x)), P, orders).to(x)
    rows = torch.stack([*(row.reshape(len(x), -1).to(x) for row in maps.values()), *drawn])
    found = curves(model, x, rows, target, removal, steps, progress=progress)
    methods = {
        name: Curves(found.counts, found.deletion[m], found.insertion[m]) for m, name in enumerate(maps)
    }
    M = len(maps)
    return PictureScore(target, methods, Curves(found.counts, found.deletion[M:], found.insertion[M:]))


def curves(
    model: VisualTransformer,
    x: Tensor,
    maps: Tensor,
    target: Tensor,
    removal: Removal = "removed",
    steps: int = STEPS,
    *,
    progress: Progress | None = None,
) -> Curves:
    """Deletion and insertion: maps (M, B, P) of pictures x (B, ...), classes (B,) -> curves (M, B, S + 1).

    M * B * 2 * (steps - 1) + 2 * B runs: both ends, the whole picture and the bare fill, are the same for
    every order and are run once. ValueError for maps of another shape or that are not finite, for another
    removal, and for steps that are not 1 to P.
    """
    counts = step_counts(maps.shape[-1], steps)
    rank = _ranks(model, x, maps)[:, :, None]  # (M, B, 1, P)
    inner = torch.tensor(counts[1:-1], dtype=torch.int64, device=x.device)[:, None]
    deleted = rank < inner  # (M, B, S - 1, P)
    ends = torch.arange(2, device=x.device).bool().repeat_interleave(len(x))  # whole pictures, then fills
    hidden = torch.cat(
        [deleted.flatten(0, 2), (~deleted).flatten(0, 2), ends[:, None].expand(-1, rank.shape[-1])]
    )
    picture = torch.arange(len(x), device=x.device)
    each = picture[None, :, None].expand(deleted.shape[:3]).flatten()
    pictures = torch.cat([each, each, picture, picture])
    found = runs_without(model, x, target, pictures, hidden, removal, progress=progress)
    inside = found[: 2 * len(each)].view(2, *deleted.shape[:3])
    whole, bare = found[2 * len(each) :].view(2, 1, -1, 1).expand(2, len(maps), -1, 1)
    deletion, insertion = torch.cat([whole, inside[0], bare], -1), torch.cat([bare, inside[1], whole], -1)
    return Curves(counts, deletion, insertion)


def step_counts(patches: int, steps: int) -> tuple[int, ...]:
    """How many patches are deleted after each of `steps` equal parts: 0, ..., P. ValueError unless 1 to P."""
    if not 1 <= steps <= patches:
        raise ValueError(f"steps is 1 to {patches}, the number of patches, not {steps}")
    return tuple(round(patches * step / steps) for step in range(steps + 1))


def random_maps(seeds: Sequence[int], patches: int, orders: int) -> Tensor:
    """(orders, B, P) float64, drawn for each picture by its own seed; more orders begin with the same."""
    drawn = [np.random.default_rng(seed).random((orders, patches)) for seed in seeds]
    return torch.from_numpy(np.stack(drawn, axis=1))


def saco(
    model: VisualTransformer,
    x: Tensor,
    maps: Tensor,
    target: Tensor,
    removal: Removal = SACO_REMOVAL,
    groups: int = SACO_GROUPS,
    *,
    progress: Progress | None = None,
) -> Tensor:
    """Whether more relevant patches matter more: maps (M, B, P) -> (M, B) float64, from -1 to 1.

    The patches are cut by rank into groups, as many as asked or one for each patch, each is hidden alone, and
    every pair of groups is asked whether the one of more relevance costs more probability: yes counts for and
    no against, with the difference of their relevance as weight. 0 for a constant map. Wu et al. 2024, arXiv
    2404.01415, who take sums; means are as good where groups are of one size, and where they are not,
    shifting a map still changes nothing. Other arguments as in `curves`. M * B * groups + B runs.
    """
    P = maps.shape[-1]
    groups = min(groups, P)
    starts = torch.tensor(step_counts(P, groups), device=x.device)
    group = torch.bucketize(_ranks(model, x, maps), starts[1:], right=True)  # (M, B, P), 0 the most relevant
    member = group[:, :, None] == torch.arange(groups, device=x.device)[:, None]  # (M, B, groups, P)
    picture = torch.arange(len(x), device=x.device)
    pictures = torch.cat([picture[None, :, None].expand(member.shape[:3]).flatten(), picture])
    hidden = torch.cat([member.flatten(0, 2), torch.zeros(len(x), P, dtype=torch.bool, device=x.device)])
    found = runs_without(model, x, target, pictures, hidden, removal, progress=progress)
    runs, whole = found[: -len(x)].view(member.shape[:3]), found[-len(x) :]
    drop, member = (whole[:, None] - runs).cpu().double(), member.cpu()  # (M, B, groups), (..., groups, P)
    # The largest taken off first: a constant map is then exactly 0, whatever sums of it are rounded to.
    above = (maps - maps.amax(dim=-1, keepdim=True)).cpu().double()
    mean = (above[:, :, None] * member).sum(dim=-1) / member.sum(dim=-1)
    # (M, B, groups, groups), none below 0
    weight = (mean[..., :, None] - mean[..., None, :]).triu(diagonal=1)
    says_yes = drop[..., :, None] >= drop[..., None, :]
    total = weight.sum(dim=(-2, -1))
    signed = torch.where(says_yes, weight, -weight).sum(dim=(-2, -1))
    return torch.where(total > 0, signed / total, 0)


def shuffled_copy(model: VisualTransformer, seed: int = 0) -> VisualTransformer:
    """A copy whose parameters are permuted, each within itself, but for those that make tokens of pictures.

    It has learned nothing any more, though its numbers are of the same size: a map that stays as it was does
    not come from what was learned (Adebayo et al. 2018, arXiv 1810.03292).
    """
    shuffled, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in shuffled.named_parameters():
            if not _makes_tokens(name):
                order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
                parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return shuffled


def map_correlations(maps: Tensor, others: Tensor) -> Tensor:
    """(B,) float64 rank correlations of maps (B, P) with others (B, P); 0 where one is constant."""
    pairs = zip(maps.cpu().numpy(), others.cpu().numpy(), strict=True)
    return torch.tensor([rank_correlation(one, other) for one, other in pairs], dtype=torch.float64)


def _makes_tokens(parameter: str) -> bool:
    return any(
        part in ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed")
        for part in parameter.split(".")
    )


def _ranks(model: nn.Module, x: Tensor, maps: Tensor) -> Tensor:
    """(M, B, P) int64, 0 for the most relevant patch. ValueError for maps that cannot be ranked."""
    P = model.grid[0] * model.grid[1]
    if maps.ndim != 3 or maps.shape[1:] != (len(x), P):
        raise ValueError(
            f"maps have the shape (maps, {len(x)} pictures, {P} patches), not {tuple(maps.shape)}"
        )
    if not maps.isfinite().all():
        raise ValueError("a map holds values that are not finite, which have no rank")
    return maps.to(x.device).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
