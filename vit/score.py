"""What `python -m vit score` does: measures methods over many pictures, a chunk at a time, and resumes.

    scores = score(model, checkpoint, pictures, Plan(methods=("chefer", "rollout"), images=100))
    print("\\n".join(table_lines(scores)))

Each method of each chunk is one file, so that a run that was stopped loses one chunk at most, and later runs
with other methods or more pictures take what is there. Processes started together by torchrun (or with RANK
and WORLD_SIZE set) share the chunks and meet in these files alone; the first waits for the others', and does
what none of them brings within three times its own slowest chunk, so that a dead one holds up nothing.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit.checkpoint import Checkpoint
from vit.datasets import Pictures, cache_folder
from vit.evaluate import check_match
from vit.faithfulness import STEPS, Curves, curves, map_correlations, random_maps, saco, shuffled_copy
from vit.files import write_whole
from vit.images import normalise
from vit.methods import METHODS, relevance
from vit.model import VisualTransformer
from vit.patterns import CLASSES as PATTERN_CLASSES
from vit.removal import REMOVALS, require_removal
from vit.scoreboard import CEILING, Estimate, MethodScore, Scores, compared, verdict
from vit.truth import Blobs, Redrawn, blob_order, on_object, points_at_object

FORMAT = 1  # to be raised when the same arguments would give other numbers
CHUNK = 64  # pictures: a batch, as plain classification takes it
SHUFFLED_PICTURES = 100
_LEAST_WAIT_S = 60
_TRUTHS = {"on_object": on_object, "points_at_object": points_at_object, "blob_order": blob_order}

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Plan:
    """What is asked."""

    methods: tuple[str, ...] = tuple(METHODS)
    images: int = 1000
    steps: int = STEPS
    orders: int = 4
    removals: tuple[str, ...] = REMOVALS

    def check(self) -> None:
        """ValueError for what does not exist."""
        for method in self.methods:
            if method not in METHODS:
                raise ValueError(f"methods are {', '.join(METHODS)}, not {method!r}")
        for removal in self.removals:
            require_removal(removal)
        if self.images < 2 or self.orders < 1:
            raise ValueError("an interval needs at least two pictures and one random order")

    def removals_of(self, method: str) -> tuple[str, ...]:
        """The ceiling is not scored under the removal that it was made with."""
        return tuple(removal for removal in self.removals if method != CEILING or removal != "removed")


def chosen_rows(labels: np.ndarray, count: int) -> np.ndarray:
    """The first `count` rows when classes take turns: the earliest picture of each class, then the second.

    As balanced as can be for any order of the pictures, and more pictures begin with the same ones.
    """
    turn = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        of_class = labels == label
        turn[of_class] = np.arange(of_class.sum())
    return np.lexsort((labels, turn))[:count]


def score(
    model: VisualTransformer,
    checkpoint: Checkpoint,
    pictures: Pictures,
    plan: Plan,
    *,
    folder: Path | None = None,
    rank: int = 0,
    world: int = 1,
    progress: Progress | None = None,
) -> Scores | None:
    """Measure what no file in `folder` holds yet; the table of all, or None in processes but the first.

    `folder`, by default one in the cache, gets a folder for each model, data set and plan. ValueError where
    model, data and plan do not go together.
    """
    plan.check()
    check_match(checkpoint, pictures)
    if not 0 <= rank < world:
        raise ValueError(f"RANK is 0 to {world - 1}, for WORLD_SIZE {world}, not {rank}")
    rows = chosen_rows(pictures.labels, plan.images)
    work = _Work(model, checkpoint, pictures, plan, rows, _home(folder, checkpoint, pictures, plan))
    chunks = range(0, len(rows), CHUNK)
    slowest_s = work.compute_all([start for i, start in enumerate(chunks) if i % world == rank], progress)
    if rank:
        return None
    _finish(work, chunks, slowest_s, progress)
    return _table(work, [work.read(start) for start in chunks])


def ranks() -> tuple[int, int]:
    """(rank, world) as torchrun sets them, (0, 1) without it. ValueError for what are no numbers."""
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise ValueError("RANK and WORLD_SIZE are whole numbers, or not set at all") from error


def _home(folder: Path | None, checkpoint: Checkpoint, pictures: Pictures, plan: Plan) -> Path:
    facts = [FORMAT, CHUNK, plan.steps, *plan.removals]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]
    base = cache_folder() / "scores" if folder is None else folder
    return base / f"{checkpoint.id}-{pictures.digest[:12]}-{key}"


def _finish(work: "_Work", chunks: Sequence[int], slowest_s: float, progress: Progress | None) -> None:
    """Wait for the other processes' chunks; compute those that do not come."""
    patience_s = max(_LEAST_WAIT_S, 3 * slowest_s)
    missing, since = [start for start in chunks if work.missing(start)], time.monotonic()
    while missing:
        if progress:
            progress(len(chunks) - len(missing), len(chunks), "chunks of all processes")
        if time.monotonic() - since > patience_s:
            work.compute_all(missing[-1:], progress)  # the last first: others may still come to it from below
        else:
            time.sleep(0.5)
        left = [start for start in missing if work.missing(start)]
        if left != missing:
            missing, since = left, time.monotonic()


@dataclass(frozen=True, eq=False)
class _Work:
    """Chunks of `rows`, each named by the row that it starts at, and their files."""

    model: VisualTransformer
    checkpoint: Checkpoint
    pictures: Pictures
    plan: Plan
    rows: np.ndarray
    home: Path

    @property
    def parts(self) -> tuple[str, ...]:
        """What is measured: methods, and the random orders."""
        return (*self.plan.methods, f"orders-{self.plan.orders}")

    def path(self, start: int, part: str) -> Path:
        ids = self.pictures.ids[self.rows[start : start + CHUNK]]
        digest = hashlib.sha256(" ".join(ids.tolist()).encode()).hexdigest()[:12]
        return self.home / f"{start:06d}-{digest}" / f"{part}.npz"

    def missing(self, start: int) -> list[str]:
        return [part for part in self.parts if not self.path(start, part).exists()]

    def read(self, start: int) -> dict[str, dict[str, np.ndarray]]:
        found = {}
        for part in self.parts:
            with np.load(self.path(start, part), allow_pickle=False) as file:
                found[part] = dict(file)
        return found

    def compute_all(self, starts: list[int], progress: Progress | None) -> float:
        """Seconds that the slowest chunk took."""
        starts = [start for start in starts if self.missing(start)]
        if not starts:
            return 0.0
        total = sum(self.runs(start) for start in starts)
        shuffled = shuffled_copy(self.model) if starts[0] < SHUFFLED_PICTURES else None
        is_made = self.pictures.class_names == PATTERN_CLASSES and self.pictures.name.startswith("patterns")
        redrawn = Redrawn.of(self.rows, self.pictures.split) if is_made else None
        slowest_s, done = 0.0, 0
        for start in starts:
            began, runs = time.monotonic(), self.runs(start)
            tell = partial(_told, progress, done, total)
            for part, arrays in self.compute(start, shuffled, redrawn, tell).items():
                write_whole(self.path(start, part), partial(np.savez_compressed, **arrays))
            done += runs
            slowest_s = max(slowest_s, time.monotonic() - began)
        return slowest_s

    def runs(self, start: int) -> int:
        """How many runs of the model curves and groups of this chunk still take, ends left out."""
        B, each, total = len(self.rows[start : start + CHUNK]), 2 * (self.plan.steps - 1), 0
        for part in self.missing(start):
            is_method = part in METHODS
            times = len(self.plan.removals_of(part)) * (1 if is_method else self.plan.orders)
            total += B * each * times
        return total

    def compute(self, start: int, shuffled, redrawn, tell) -> dict[str, dict[str, np.ndarray]]:
        """The arrays of each missing part, by name."""
        model, plan = self.model, self.plan
        rows = self.rows[start : start + CHUNK]
        x = normalise(self.pictures.images[rows], self.checkpoint).to(model.device)
        with torch.inference_mode():
            target = model(x).argmax(dim=-1)
        target = target.clone()
        missing = self.missing(start)
        methods = [part for part in missing if part in METHODS]
        found: dict[str, dict] = {part: {"plain_s": 0.0, "forward_s": 0.0, "runs": 0} for part in missing}
        maps = {}
        blobs = None
        if redrawn is not None:
            blobs = Blobs.of(model, self.checkpoint, redrawn, slice(start, start + len(rows)), target)
        for method in methods:
            began = time.perf_counter()
            maps[method] = relevance(model, x, method, target=target)
            found[method]["explain_s"] = _since(began, model)
            some = max(0, min(len(x), SHUFFLED_PICTURES - start))
            correlations = torch.zeros(0)
            if some:
                other = relevance(shuffled, x[:some], method, target=target[:some])
                correlations = map_correlations(maps[method][:some], other)
            found[method]["shuffled"] = correlations.numpy()
            for name, judge in _TRUTHS.items() if blobs else ():
                found[method][name] = judge(maps[method], blobs).numpy()
        if methods:
            values = saco(model, x, torch.stack([maps[method] for method in methods]), target).numpy()
            for method, value in zip(methods, values, strict=True):
                found[method]["saco"] = value
        orders = next((part for part in missing if part not in METHODS), None)
        done = 0
        for removal in plan.removals:
            asked = [method for method in methods if removal in plan.removals_of(method)]
            groups = [(asked, [maps[method] for method in asked])]
            if orders:
                seeds = [int(name, 16) for name in self.pictures.ids[rows]]
                drawn = random_maps(seeds, maps_width(model), plan.orders).to(x)
                groups.append(([orders], list(drawn)))
            for names, stacked in groups:
                if not names:
                    continue
                plain_s = _plain_seconds(model, x)
                began = time.perf_counter()
                curve = curves(
                    model, x, torch.stack(stacked), target, removal, plan.steps,
                    progress=lambda now, _, what, done=done: tell(done + now, what),
                )  # fmt: skip
                forward_s = _since(began, model)
                plain_s = (plain_s + _plain_seconds(model, x)) / 2 / len(x)
                runs = len(stacked) * len(x) * 2 * (plan.steps - 1) + 2 * len(x)
                done += len(stacked) * len(x) * 2 * (plan.steps - 1)
                deletion, insertion = curve.deletion.cpu().numpy(), curve.insertion.cpu().numpy()
                for i, name in enumerate(names):
                    mine = slice(i, i + 1) if name in METHODS else slice(None)
                    facts = found[name]
                    facts[f"deletion-{removal}"] = deletion[mine]
                    facts[f"insertion-{removal}"] = insertion[mine]
                    facts["counts"] = np.array(curve.counts)
                    facts["forward_s"] += forward_s / len(names)
                    facts["plain_s"] += plain_s * runs / len(names)  # what as many plain ones would take
                    facts["runs"] += runs / len(names)
        return {
            part: {name: np.asarray(value) for name, value in facts.items()} for part, facts in found.items()
        }


def maps_width(model: VisualTransformer) -> int:
    return model.grid[0] * model.grid[1]


def _told(progress: Progress | None, before: int, total: int, now: int, what: str) -> None:
    if progress:
        progress(min(before + now, total), total, what)


def _plain_seconds(model: VisualTransformer, x: Tensor) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
        model(x)
    return _since(began, model)


def _since(began: float, model: VisualTransformer) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - began


def _table(work: _Work, chunks: list[dict[str, dict[str, np.ndarray]]]) -> Scores:
    plan, orders = work.plan, work.parts[-1]

    def joined(part: str, name: str) -> np.ndarray:
        return np.concatenate([chunk[part][name] for chunk in chunks], axis=-2 if "tion-" in name else 0)

    def differences(part: str, removals: Sequence[str]) -> dict[str, np.ndarray]:
        counts, found = tuple(chunks[0][part]["counts"].tolist()), {}
        for removal in removals:
            deletion, insertion = (joined(part, f"{way}-{removal}") for way in ("deletion", "insertion"))
            curve = Curves(counts, torch.from_numpy(deletion), torch.from_numpy(insertion))
            found[removal] = curve.difference.mean(dim=0).numpy()  # (n,): of the orders, or of the one map
        return found

    def total(part: str, name: str) -> float:
        return float(sum(chunk[part][name] for chunk in chunks))

    drawn = differences(orders, plan.removals)
    found = {method: differences(method, plan.removals_of(method)) for method in plan.methods}
    against = {method: compared(values, drawn) for method, values in found.items()}
    ranked = [method for method in plan.methods if method != CEILING]
    ranked.sort(key=lambda method: -np.mean([estimate.mean for estimate in against[method].values()]))
    rows = []
    for method in [*ranked, *(method for method in plan.methods if method == CEILING)]:
        is_ranked = method != CEILING
        others = [other for other in ranked if other != method] if is_ranked else []
        beaten = [name for name in others if verdict(compared(found[method], found[name])) == "better"]
        truths = {
            name: Estimate.of(joined(method, name)) if name in chunks[0][method] else None for name in _TRUTHS
        }
        rows.append(
            MethodScore(
                method=method,
                difference=against[method],
                against_random=verdict(against[method]) if is_ranked else "ceiling",
                better_than=tuple(beaten),
                saco=Estimate.of(joined(method, "saco")),
                shuffled=float(joined(method, "shuffled").mean()),
                explained_ms=1000 * total(method, "explain_s") / len(work.rows),
                **truths,
            )
        )
    forward_s = sum(total(part, "forward_s") for part in work.parts)
    return Scores(
        model=work.checkpoint.name,
        checkpoint_id=work.checkpoint.id,
        data=work.pictures.name,
        pictures=len(work.rows),
        shuffled_pictures=min(SHUFFLED_PICTURES, len(work.rows)),
        steps=plan.steps,
        orders=plan.orders,
        removals=plan.removals,
        methods=tuple(rows),
        runs=round(sum(total(part, "runs") for part in work.parts)),
        runs_ratio=sum(total(part, "plain_s") for part in work.parts) / forward_s,
        seconds={
            "explanations": sum(total(method, "explain_s") for method in plan.methods),
            "methods": sum(total(method, "forward_s") for method in plan.methods),
            "random orders": total(orders, "forward_s"),
        },
    )
