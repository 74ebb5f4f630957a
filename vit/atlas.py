"""Every head over many pictures: what it looks at, how far, and what it is worth. Do heads specialise?

    found = atlas(model, checkpoint, load_pictures(), images=1000)
    print("\\n".join(atlas_lines(found)))
    found.save(kept_path(found.checkpoint_id))         # where the page looks for it

A head is described by its maps (means over pictures and over all tokens that look) and by its cause: how many
pictures less are right when it alone is switched off. Layers and heads count from 1 here, as people do.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit.attention import attention_entropy_bits, mean_attention_distance_px, token_row
from vit.checkpoint import Checkpoint
from vit.datasets import Pictures, cache_folder
from vit.evaluate import check_match
from vit.explanation import answer_token
from vit.files import write_whole
from vit.images import normalise
from vit.model import VisualTransformer
from vit.score import chosen_rows
from vit.scoreboard import Estimate

STRONGEST = 10
_BATCH = 64
_NEARLY_EVEN = 0.95  # of the largest possible entropy
_BUNDLED = Path(__file__).parents[1] / "assets" / "atlas"


@dataclass(frozen=True)
class Head:
    """One head, on average."""

    layer: int
    head: int
    distance_px: float  # between the patch that looks and those looked at
    entropy_bits: float  # of all rows: 0 looks at one token, log2 N at all alike
    cls_share: float  # of its attention, what tokens before the patches get
    accuracy_lost: Estimate  # shares of pictures that are right, with it less without it
    strongest: tuple[str, ...]  # ids of the pictures in which the answer's token looks hardest at one patch
    offsets: tuple[tuple[float, ...], ...]  # (2 GY - 1, 2 GX - 1) mean attention, by how far away

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.head}"


@dataclass(frozen=True)
class Atlas:
    """All heads of one model."""

    model: str
    checkpoint_id: str
    data: str
    pictures: int
    accuracy: float  # of these pictures, with all heads
    even_distance_px: float  # of a map that looks at all patches alike
    most_entropy_bits: float
    heads: tuple[Head, ...]  # layer by layer

    def save(self, path: Path) -> None:
        text = json.dumps(asdict(self))
        write_whole(path, lambda file: file.write(text.encode()))

    @classmethod
    def load(cls, path: Path) -> "Atlas":
        """ValueError for a file of another form."""
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            return cls(**facts | {"heads": tuple(_head(row) for row in facts["heads"])})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no atlas; make it anew with `python -m vit atlas`") from error


def _head(row: dict) -> Head:
    offsets = tuple(tuple(values) for values in row["offsets"])
    lost = Estimate(**row["accuracy_lost"])
    return Head(**row | {"accuracy_lost": lost, "strongest": tuple(row["strongest"]), "offsets": offsets})


def atlas(
    model: VisualTransformer,
    checkpoint: Checkpoint,
    pictures: Pictures,
    images: int = 1000,
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> Atlas:
    """Describe every head over `images` pictures, classes in turn: 1 + L * H runs for each.

    ValueError where model and pictures do not go together, and for fewer than two pictures.
    """
    check_match(checkpoint, pictures)
    rows = chosen_rows(pictures.labels, images)
    n, L, H = len(rows), model.num_layers, model.num_heads
    P, prefix = math.prod(model.grid), model.prefix_tokens
    patch_px = checkpoint.architecture.patch_size
    viewer = answer_token(model)
    sums = {name: torch.zeros(L, H, dtype=torch.float64) for name in ("distance", "entropy", "cls")}
    among = torch.zeros(L, H, P, P, dtype=torch.float64)
    peak = torch.empty(n, L, H)
    right, right_without = np.empty(n), np.empty((n, L, H))
    gates = 1 - torch.eye(L * H, device=model.device).view(L * H, L, H)
    done = 0
    for start in range(0, n, _BATCH):
        part = slice(start, min(start + _BATCH, n))
        x = normalise(pictures.images[rows[part]], checkpoint).to(model.device)
        labels = pictures.labels[rows[part]]
        with torch.inference_mode():
            trace = model.trace(x)
            maps = trace.maps  # (B, L, H, N, N)
            distance_px = mean_attention_distance_px(maps, model.grid, patch_px, prefix)
            sums["distance"] += distance_px.sum(dim=0).double().cpu()
            sums["entropy"] += attention_entropy_bits(maps).sum(dim=0).double().cpu()
            sums["cls"] += maps[..., :prefix].sum(dim=-1).mean(dim=-1).sum(dim=0).double().cpu()
            among += maps[..., prefix:, prefix:].sum(dim=0).double().cpu()
            peak[part] = token_row(maps, viewer)[..., prefix:].amax(dim=-1).cpu()
            right[part] = trace.logits.argmax(dim=-1).cpu().numpy() == labels
            for index, gate in enumerate(gates):
                without = _logits(model, x, gate).argmax(dim=-1).cpu().numpy() == labels
                right_without[part, index // H, index % H] = without
                done += len(x)
                if progress:
                    progress(done, n * L * H, "runs without one head")
    offsets = _by_offset(among / n, model.grid)
    even = torch.full((P, P), 1 / P, dtype=torch.float64)
    heads = tuple(
        Head(
            layer=layer + 1,
            head=head + 1,
            distance_px=float(sums["distance"][layer, head] / n),
            entropy_bits=float(sums["entropy"][layer, head] / n),
            cls_share=float(sums["cls"][layer, head] / n),
            accuracy_lost=Estimate.of(right - right_without[:, layer, head]),
            strongest=tuple(
                str(pictures.ids[rows[i]])
                for i in peak[:, layer, head].argsort(descending=True, stable=True)[:STRONGEST]
            ),
            offsets=tuple(tuple(round(value, 5) for value in line) for line in offsets[layer, head].tolist()),
        )
        for layer in range(L)
        for head in range(H)
    )
    return Atlas(
        model=checkpoint.name,
        checkpoint_id=checkpoint.id,
        data=pictures.name,
        pictures=n,
        accuracy=float(right.mean()),
        even_distance_px=float(mean_attention_distance_px(even, model.grid, patch_px, 0)),
        most_entropy_bits=math.log2(prefix + P),
        heads=heads,
    )


def _logits(model: VisualTransformer, x: Tensor, gate: Tensor) -> Tensor:
    tokens = model.embed(x, dropout=False)
    for layer in model.steps(tokens, head_gate=gate, cls_only=True, explicit=False, dropout=False):
        tokens = layer.tokens
    return model.classify(tokens)


def _by_offset(among: Tensor, grid: tuple[int, int]) -> np.ndarray:
    """(L, H, P, P) -> (L, H, 2 GY - 1, 2 GX - 1): means over all pairs of patches that are so far apart."""
    GY, GX = grid
    row, column = np.divmod(np.arange(GY * GX), GX)
    down, across = (
        row - row[:, None] + GY - 1,
        column - column[:, None] + GX - 1,
    )  # (P, P): looked at less looking
    place = torch.from_numpy((down * (2 * GX - 1) + across).ravel())
    size = (2 * GY - 1) * (2 * GX - 1)
    sums = torch.zeros(*among.shape[:2], size, dtype=among.dtype).index_add_(2, place, among.flatten(2))
    pairs = torch.bincount(place, minlength=size)
    return (sums / pairs).view(*among.shape[:2], 2 * GY - 1, 2 * GX - 1).numpy()


def kept_path(checkpoint_id: str) -> Path:
    """Where the command leaves an atlas for the page."""
    return cache_folder() / "atlas" / f"{checkpoint_id}.json"


def find_atlas(checkpoint_id: str) -> Atlas | None:
    """The atlas of a checkpoint: the bundled one, or one that was made on this machine."""
    for path in (*sorted(_BUNDLED.glob("*.json")), kept_path(checkpoint_id)):
        if path.is_file():
            found = Atlas.load(path)
            if found.checkpoint_id == checkpoint_id:
                return found
    return None


def atlas_lines(found: Atlas) -> list[str]:
    """For people: a row for each head, and the answer."""
    lines = ["head  distance  entropy  on CLS  accuracy lost, in points"]
    for head in found.heads:
        lost = head.accuracy_lost
        lines.append(
            f"{head.name:<4}  {head.distance_px:>5.1f} px  {head.entropy_bits:>7.2f}  {head.cls_share:>6.1%}"
            f"  {100 * lost.mean:>+6.1f} ± {100 * lost.half:.1f}"
        )
    return [*lines, "", *answer(found)]


def answer(found: Atlas) -> list[str]:
    """Do heads specialise? In sentences, with figures."""
    near, far = (pick(found.heads, key=lambda head: head.distance_px) for pick in (min, max))
    sharp = min(found.heads, key=lambda head: head.entropy_bits)
    even = sum(head.entropy_bits > _NEARLY_EVEN * found.most_entropy_bits for head in found.heads)
    dear = max(found.heads, key=lambda head: head.accuracy_lost.mean)
    signs = [head.accuracy_lost.sign for head in found.heads]
    count = len(found.heads)
    lost = dear.accuracy_lost
    return [
        f"Over {found.pictures:,} pictures of {found.data}, {found.accuracy:.1%} of them right:",
        f"How far: head {near.name} looks {near.distance_px:.1f} px far on average, head {far.name} "
        f"{far.distance_px:.1f} px; a map that looks everywhere alike, {found.even_distance_px:.1f} px.",
        f"How widely: {even} of {count} heads have over {_NEARLY_EVEN:.0%} of the "
        f"{found.most_entropy_bits:.2f} bits that looking everywhere alike has; head {sharp.name} has "
        f"{sharp.entropy_bits:.2f}.",
        f"Within layers: {_within_layers(found):.0%} of the variance of distance lies between the heads of "
        "one layer, the rest between layers.",
        f"What they are worth: switched off alone, head {dear.name} costs {100 * lost.mean:.1f} ± "
        f"{100 * lost.half:.1f} points of accuracy; {signs.count(1)} of {count} heads clearly cost some, "
        f"{count - signs.count(1)} do not.",
    ]


def _within_layers(found: Atlas) -> float:
    """The share of the variance of distances that lies between the heads of a layer."""
    layers: dict[int, list[float]] = {}
    for head in found.heads:
        layers.setdefault(head.layer, []).append(head.distance_px)
    whole = np.var([head.distance_px for head in found.heads])
    return float(np.mean([np.var(values) for values in layers.values()]) / whole) if whole > 0 else 0.0
