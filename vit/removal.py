"""Four ways to hide patches. None is neutral, so only what holds under several of them says something.

    filled(x, hidden, model.grid, "neighbours")                     # pictures (n, C, height, width)
    runs_without(model, x, target, pictures, hidden, "removed")     # (n,) probabilities

What hidden patches become:

    removed     no tokens at all, from before the first block on: nothing stands in for them; only
                transformers can do that (Jain et al. 2022, arXiv 2204.08945)
    mean        0: what normalisation makes of the mean colour of the pictures that the model learned from,
                so the patch says the least there is to say in pixels; black or white would be a strong signal
    blur        the picture itself, blurred by a Gaussian of one patch's deviation: colours stay, shapes go
    neighbours  each patch one colour, the mean of its neighbours' (Laplace's equation on the grid, bounded by
                the mean colours of the patches that stay); as "mean" where none stays. The idea is ROAD's
                (Rong et al. 2022, arXiv 2202.00449), here patch by patch and without noise
"""

import math
from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.model import VisualTransformer

Removal = Literal["removed", "mean", "blur", "neighbours"]
REMOVALS = get_args(Removal)

_CPU_BATCH = 64  # as in vit/evaluate.py: larger ones leave the cache
_GPU_BATCH = 512


def runs_without(
    model: VisualTransformer,
    x: Tensor,
    target: Tensor,
    pictures: Tensor,
    hidden: Tensor,
    removal: Removal = "removed",
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> Tensor:
    """(n,) probabilities: run i sees picture pictures[i] without the patches of hidden[i], for its class.

    x (B, C, height, width), `target` (B,) int64 a class of each picture, `pictures` (n,) int64 from 0 to
    B - 1, `hidden` (n, P) bool. Where tokens are dropped, runs with as many left go together, which is why
    they are faster. `progress(done, total, what)` counts runs. ValueError for another removal.
    """
    require_removal(removal)
    n = len(hidden)
    found = torch.empty(n, dtype=x.dtype, device=x.device)
    background = blurred(x, x.shape[-2] // model.grid[0]) if removal == "blur" else None
    done = 0
    with torch.inference_mode():
        for rows in _batches(hidden, removal):
            shown, keep = x[pictures[rows]], None
            if removal == "removed":
                keep = (~hidden[rows]).nonzero()[:, 1].view(len(rows), -1)  # (n, patches that stay)
            else:
                behind = None if background is None else background[pictures[rows]]
                shown = filled(shown, hidden[rows], model.grid, removal, behind)
            tokens = model.embed(shown, keep=keep, dropout=False)
            for layer in model.steps(tokens, keep=keep, cls_only=True, explicit=False, dropout=False):
                tokens = layer.tokens
            answers = model.classify(tokens).softmax(dim=-1)
            found[rows] = answers.gather(1, target[pictures[rows], None])[:, 0]
            done += len(rows)
            if progress:
                progress(done, n, "runs")
    return found


def filled(
    x: Tensor, hidden: Tensor, grid: tuple[int, int], removal: Removal, behind: Tensor | None = None
) -> Tensor:
    """Pictures (n, C, height, width): x (n or 1, ...) filled where `hidden` (n, P) is True.

    `behind` are the blurred pictures, where they are at hand. ValueError for "removed", which is not made of
    pixels, and for any other word.
    """
    patch_px = x.shape[-2] // grid[0]
    if removal == "mean":
        behind = torch.zeros_like(x)
    elif removal == "blur":
        behind = blurred(x, patch_px) if behind is None else behind
    elif removal == "neighbours":
        behind = _enlarged(_from_neighbours(x, hidden, grid), patch_px)
    else:
        raise ValueError(f'patches are filled with "mean", "blur" or "neighbours", not {removal!r}')
    return torch.where(_enlarged(hidden.view(-1, 1, *grid), patch_px), behind, x)


def blurred(x: Tensor, deviation_px: int) -> Tensor:
    """torchvision's gaussian_blur of two deviations to either side, without the two seconds of its import."""
    for _ in range(2):  # across, then the turned picture
        radius_px = min(2 * deviation_px, x.shape[-1] - 1)  # what is mirrored must lie inside the picture
        offsets = torch.arange(-radius_px, radius_px + 1, dtype=x.dtype, device=x.device)
        bell = (-((offsets / deviation_px) ** 2) / 2).softmax(dim=0)
        padded = F.pad(x, (radius_px, radius_px, 0, 0), mode="reflect")
        channels = F.conv2d(padded.flatten(0, 1)[:, None], bell.expand(1, 1, 1, -1))  # each channel alone
        x = channels.reshape(x.shape).mT
    return x


def require_removal(removal: str) -> None:
    if removal not in REMOVALS:
        raise ValueError(f"patches are hidden by {', '.join(REMOVALS)}, not by {removal!r}")


def _batches(hidden: Tensor, removal: Removal) -> Iterator[Tensor]:
    """Row numbers of `hidden` (n, P), a batch at a time."""
    size = _CPU_BATCH if hidden.device.type == "cpu" else _GPU_BATCH
    if removal != "removed":
        yield from torch.arange(len(hidden), device=hidden.device).split(size)
        return
    counts = hidden.sum(dim=1)
    for count in counts.unique():
        yield from (counts == count).nonzero()[:, 0].split(size)


def _from_neighbours(x: Tensor, hidden: Tensor, grid: tuple[int, int]) -> Tensor:
    """(n, C, GY, GX): where a patch is hidden, the mean of the colours of those beside it; else its own."""
    patch_px = x.shape[-2] // grid[0]
    colours = F.avg_pool2d(x, patch_px).flatten(2).mT  # (n or 1, P, C)
    known = colours.masked_fill(hidden[:, :, None], 0)  # (n, P, C)
    beside = _beside(grid).to(x)  # (P, P)
    # If nothing is known, the equations determine nothing; then all are taken for known, to be 0.
    free = (hidden & ~hidden.all(dim=1, keepdim=True)).to(x.dtype)[:, :, None]  # (n, P, 1)
    # Symmetric and positive definite: the rows and columns of known patches are those of the identity.
    laplacian = torch.diag(beside.sum(dim=0)) - beside
    system = free * laplacian * free.mT + torch.diag_embed(1 - free[:, :, 0])
    solved = torch.cholesky_solve(free * (beside @ known) + known, torch.linalg.cholesky(system))
    return solved.mT.unflatten(2, grid)


def _beside(grid: tuple[int, int]) -> Tensor:
    """(P, P), 1 where two patches share an edge."""
    number = torch.arange(math.prod(grid)).view(grid)
    pairs = torch.cat(
        [
            torch.stack([number[1:].flatten(), number[:-1].flatten()]),
            torch.stack([number[:, 1:].flatten(), number[:, :-1].flatten()]),
        ],
        dim=1,
    )
    beside = torch.zeros(number.numel(), number.numel())
    beside[pairs[0], pairs[1]] = beside[pairs[1], pairs[0]] = 1
    return beside


def _enlarged(cells: Tensor, patch_px: int) -> Tensor:
    """(n, C, GY, GX) -> (n, C, height, width)"""
    return cells.repeat_interleave(patch_px, dim=-2).repeat_interleave(patch_px, dim=-1)
