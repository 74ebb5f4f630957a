"""Explanations of the made patterns against the truth, known there: where the object is, and what matters.

    found = object_mass(model, checkpoint, images, masks)
    found.mass["rollout, 0.9 discarded"], found.area, found.centre       # means of shares from 0 to 1
    blobs = Blobs.of(model, checkpoint, Redrawn.of(rows, "test"), slice(0, 64), target)
    on_object(maps, blobs), points_at_object(maps, blobs), blob_order(maps, blobs)   # (B,) each

Weight on the object alone says little: an even map has as much as the object has area, and most objects lie
near the middle. So both stand beside it. The share of each picture counts alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vit.cause import rank_correlation
from vit.checkpoint import Checkpoint
from vit.evaluate import BATCH
from vit.explanation import explain
from vit.images import normalise
from vit.methods import centre_bump
from vit.model import VisualTransformer
from vit.patterns import SEED, make_patterns

MAPS = {  # what is measured, as the arguments of `vit.explain`
    "rollout": {},
    "rollout, 0.9 discarded": {"discard_ratio": 0.9},
    "raw attention, last layer": {"method": "raw"},
}


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
    prior = centre_bump(grid)
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


@dataclass(frozen=True, eq=False)
class Redrawn:
    """Made patterns as they are, and drawn again without each of their blobs: two distractors, the object."""

    images: np.ndarray  # (4, n, 32, 32, 3) uint8: without the first, the second, the object; and whole
    masks: np.ndarray  # (3, n, 32, 32) bool, where each blob can be seen

    @classmethod
    def of(
        cls, rows: np.ndarray, split: str, progress: Callable[[int, int, str], None] | None = None
    ) -> "Redrawn":
        """`rows` (n,) of `load_pictures("patterns", split)`.

        What can be seen of a distractor, which the object may hide, is where the picture changes without it.
        """
        made = [
            make_patterns(int(rows.max()) + 1, SEED, split=split, without=blob, progress=progress)
            for blob in (0, 1, 2, None)
        ]
        images = np.stack([one.images[rows] for one in made])
        masks = (images[:3] != images[3]).any(axis=-1)
        masks[2] = made[3].masks[rows]
        return cls(images, masks)


@dataclass(frozen=True, eq=False)
class Blobs:
    """What blobs are worth, to hold maps against. Distractors are 0 and 1, the object is 2."""

    shares: Tensor  # (3, B, P) float64: which part of each patch the blob covers
    effects: Tensor  # (3, B): by how much the target's logit falls if the picture is drawn without it

    @classmethod
    def of(
        cls, model: VisualTransformer, checkpoint: Checkpoint, redrawn: Redrawn, rows: slice, target: Tensor
    ) -> "Blobs":
        """Of some rows of `redrawn`, with the class of each that is asked about: target (B,) int64.

        The picture without a blob is a picture like any other (Hesse et al. 2023, arXiv 2308.06248), so
        nothing is measured here that comes from a fill which the model never saw.
        """
        shares = torch.stack([_covered(mask, model.grid).flatten(1) for mask in redrawn.masks[:, rows]])
        with torch.inference_mode():
            logits = torch.stack(
                [
                    model(normalise(images, checkpoint).to(model.device)).gather(1, target[:, None])[:, 0]
                    for images in redrawn.images[:, rows]
                ]
            ).cpu()
        return cls(shares, logits[3] - logits[:3])


def on_object(maps: Tensor, blobs: Blobs) -> Tensor:
    """(B,) share of a map's positive relevance (B, P) on the object; 0 where nothing is positive.

    A patch's relevance is spread evenly over its pixels.
    """
    positive = maps.cpu().double().clamp_min(0)
    total = positive.sum(dim=1)
    return torch.where(total > 0, (positive * blobs.shares[2]).sum(dim=1) / total, 0)


def points_at_object(maps: Tensor, blobs: Blobs) -> Tensor:
    """(B,) 1 where the object covers at least half of the most relevant patch (of equals the first), else 0.

    The pointing game (Zhang et al. 2016, arXiv 1608.00507), with patches for points.
    """
    most = maps.cpu().argsort(dim=1, descending=True, stable=True)[:, :1]
    return (blobs.shares[2].gather(1, most)[:, 0] >= 0.5).double()


def blob_order(maps: Tensor, blobs: Blobs) -> Tensor:
    """(B,) rank correlation of what a map gives the three blobs, in sum, with what they are really worth."""
    given = (maps.cpu().double() * blobs.shares).sum(dim=2)  # (3, B)
    pairs = zip(given.T.numpy(), blobs.effects.T.numpy(), strict=True)
    return torch.tensor([rank_correlation(one, other) for one, other in pairs], dtype=torch.float64)


def _covered(masks: np.ndarray, grid: tuple[int, int]) -> Tensor:
    """(B, GY, GX): which share of each patch the object covers."""
    B, height, width = masks.shape
    patches = masks.reshape(B, grid[0], height // grid[0], grid[1], width // grid[1])
    return torch.from_numpy(patches.mean(axis=(2, 4), dtype=np.float64))
