"""How much of an explanation lies on the object, for the made patterns, where it is known where that is.

    found = object_mass(model, checkpoint, images, masks)
    found.mass["rollout, 0.9 discarded"], found.area, found.centre       # means of shares from 0 to 1

Weight on the object alone says little: an even map has as much as the object has area, and most objects lie
near the middle. So both stand beside it. The share of each picture counts alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vit.checkpoint import Checkpoint
from vit.evaluate import BATCH
from vit.explanation import explain
from vit.images import normalise
from vit.model import VisualTransformer

MAPS = {  # what is measured, as the arguments of `vit.explain`
    "rollout": {},
    "rollout, 0.9 discarded": {"discard_ratio": 0.9},
    "raw attention, last layer": {"method": "raw"},
}
CENTRE_SPREAD = 0.25  # of the centre prior, its standard deviation as a share of the side


@dataclass(frozen=True)
class ObjectMass:
    """Means over pictures; shares from 0 to 1."""

    pictures: int
    area: float  # the object's share of the picture: what an even map would put there
    centre: float  # what a bump in the middle would put there
    mass: dict[str, float]  # by the name of the map, what it puts there


def object_mass(
    model: VisualTransformer,
    checkpoint: Checkpoint,
    images: np.ndarray,
    masks: np.ndarray,
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> ObjectMass:
    """`images` (n, height, width, 3) uint8 and `masks` (n, height, width), True on the object.

    A patch's weight is spread evenly over its pixels; the weight on CLS is left out.
    """
    grid, device = model.grid, model.device
    prior = _centre_prior(grid)
    area, centre, mass = 0.0, 0.0, dict.fromkeys(MAPS, 0.0)
    n = len(images)
    for start in range(0, n, BATCH):
        rows = slice(start, start + BATCH)
        x = normalise(images[rows], checkpoint).to(device)
        covered = _covered(np.asarray(masks[rows]), grid)  # (B, GY, GX)
        area += float(covered.mean(dim=(1, 2)).sum())
        centre += float((covered * prior).sum())
        for name, options in MAPS.items():
            relevance = explain(model, x, **options).relevance.cpu().double()
            share = relevance / relevance.sum(dim=(1, 2), keepdim=True)
            mass[name] += float((share * covered).sum())
        if progress:
            progress(min(start + BATCH, n), n, "pictures explained")
    return ObjectMass(n, area / n, centre / n, {name: total / n for name, total in mass.items()})


def mass_lines(found: ObjectMass) -> list[str]:
    """The figures for people."""
    lines = [f"Weight on the object, mean of {found.pictures:,} pictures"]
    rows = {
        "an even map (the object's area)": found.area,
        "a bump in the middle": found.centre,
    } | found.mass
    width = max(map(len, rows))
    return lines + [f"  {name:<{width}}  {share:6.1%}" for name, share in rows.items()]


def _covered(masks: np.ndarray, grid: tuple[int, int]) -> Tensor:
    """(B, GY, GX): which share of each patch the object covers."""
    B, height, width = masks.shape
    patches = masks.reshape(B, grid[0], height // grid[0], grid[1], width // grid[1])
    return torch.from_numpy(patches.mean(axis=(2, 4), dtype=np.float64))


def _centre_prior(grid: tuple[int, int]) -> Tensor:
    """(GY, GX): a round bump in the middle, which sums to 1."""
    down, across = ((torch.arange(side, dtype=torch.float64) + 0.5) / side - 0.5 for side in grid)
    bump = torch.exp(-(down[:, None] ** 2 + across**2) / (2 * CENTRE_SPREAD**2))
    return bump / bump.sum()
