"""What `python -m vit bench` measures: what maps, rollouts and overlays cost, as multiples of a plain pass.

    for line in bench_lines(bench(batches=(1,))): print(line)

Times on shared machines drift, so everything is a ratio within one run: each round times every row once, a
row's ratio is the median over rounds of its time by the plain pass's in the same round. The weights are
random: speed does not depend on them. About a minute and a half on two CPU cores.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from vit.architecture import Architecture
from vit.attention import rollout_by_head, token_grid, token_row
from vit.checkpoint import Checkpoint
from vit.datasets import Pictures, load_pictures
from vit.device import pick_device
from vit.evaluate import predict
from vit.explain_command import explain_data, first
from vit.explanation import Explanation, explain
from vit.files import write_whole
from vit.images import normalise
from vit.methods import relevance
from vit.model import VisualTransformer
from vit.overlay import Style, draw
from vit.sources import CLASSES

PLAIN = "plain forward"
MAPS = "with maps"
FUSED = "with maps and fused rollouts"
BY_HEAD = "with maps and all rollouts, per head too"
CHEFER = "Chefer relevance"
LIGHT, HEAT = "48 overlays as light", "48 overlays as heat"
GOALS = {  # (batch, row): the largest ratio to the plain forward
    (1, BY_HEAD): 1.25,
    (1, CHEFER): 4,
    (1, LIGHT): 3,
    (1, HEAT): 3,
    (32, FUSED): 1.15,
    (256, FUSED): 1.15,
    (256, BY_HEAD): 1.35,
}
RATE_GOAL = 0.85  # of plain classification
_DATA_PICTURES, _DATA_ROUNDS = 512, 5
_THUMB_PX = 64


@dataclass(frozen=True)
class Row:
    batch: int
    what: str
    ms: float  # median over rounds
    ratio: float  # to the plain forward
    goal: float | None

    @property
    def held(self) -> bool | None:
        return None if self.goal is None else self.ratio <= self.goal


@dataclass(frozen=True)
class Rate:
    """`explain --data --npz`, its writing included, against plain classification."""

    pictures: int
    data: str
    explained_per_s: float
    classified_per_s: float
    ratio: float  # of the rates
    goal: float

    @property
    def held(self) -> bool:
        return self.ratio >= self.goal


@dataclass(frozen=True)
class Bench:
    device: str
    threads: int
    torch: str
    rows: tuple[Row, ...]
    rate: Rate


def bench(
    batches: tuple[int, ...] = (1, 32, 256),
    repeats: int | None = None,
    data: str | Path | None = None,
    *,
    device: str | None = None,
    pictures: int = _DATA_PICTURES,
    progress: Callable[[int, int, str], None] | None = None,
) -> Bench:
    """Measure. Without `repeats` 60 rounds for one picture, fewer for more. DataError for missing `data`."""
    torch_device = pick_device(device)
    architecture = Architecture(num_classes=len(CLASSES))
    torch.manual_seed(0)
    model = architecture.build().to(torch_device).eval()
    checkpoint = Checkpoint(architecture, CLASSES, (0.5,) * 3, (0.25,) * 3, name="random weights")
    shown = first(load_pictures(data), pictures) if data else _noise(max(pictures, *batches))
    rows = []
    for batch in batches:
        x = normalise(np.resize(shown.images, (batch, *shown.images.shape[1:])), checkpoint).to(torch_device)
        rounds = repeats or max(7, min(60, 600 // batch))
        rows += _rows(model, x, shown.images[0], rounds, progress)
    rate = _rate(model, checkpoint, first(shown, pictures), min(rounds, _DATA_ROUNDS), progress)
    return Bench(str(torch_device), torch.get_num_threads(), torch.__version__, tuple(rows), rate)


def bench_lines(found: Bench) -> list[str]:
    """The report for people."""
    lines = [f"{found.device}, {found.threads} threads, torch {found.torch}"]
    width = max(len(row.what) for row in found.rows)
    for i, row in enumerate(found.rows):
        if i == 0 or row.batch != found.rows[i - 1].batch:
            lines += ["", f"batch {row.batch}".ljust(width) + "         ms   ratio"]
        goal = "" if row.goal is None else f"   goal <= {row.goal:<4g}  {_verdict(row.held)}"
        lines.append(f"{row.what:<{width}} {row.ms:>10.2f}  {row.ratio:>6.2f}{goal}")
    rate = found.rate
    lines += [
        "",
        f"explain --data --npz, {rate.pictures:,} pictures ({rate.data}): {rate.explained_per_s:,.0f}/s, "
        f"plain classification {rate.classified_per_s:,.0f}/s",
        f"rate {rate.ratio:.2f} of plain   goal >= {rate.goal:g}  {_verdict(rate.held)}",
    ]
    return lines


def bench_values(found: Bench) -> dict:
    """The report for JSON."""
    rows = [asdict(row) | {"held": row.held} for row in found.rows]
    return asdict(found) | {"rows": rows, "rate": asdict(found.rate) | {"held": found.rate.held}}


def _verdict(held: bool) -> str:
    return "held" if held else "MISSED"


def _rows(model: VisualTransformer, x: torch.Tensor, picture: np.ndarray, rounds: int, progress) -> list[Row]:
    B = len(x)

    def plain() -> None:
        with torch.inference_mode():
            model(x)

    def maps() -> None:
        with torch.inference_mode():
            model(x, return_attn=True)

    def by_head() -> tuple[Explanation, torch.Tensor]:
        explanation = explain(model, x)
        with torch.no_grad():
            return explanation, rollout_by_head(explanation.attention, by_layer=explanation.rollout)

    work: dict[str, Callable] = {PLAIN: plain, MAPS: maps, FUSED: lambda: explain(model, x), BY_HEAD: by_head}
    if B == 1:
        work[CHEFER] = lambda: relevance(model, x, "chefer")
        by_layer_and_head = by_head()[1][0]  # (L, H, N, N)
        weights = token_grid(token_row(by_layer_and_head, 0), model.grid).cpu().numpy()
        size_px = (_THUMB_PX, _THUMB_PX)
        for what, kind in ((LIGHT, "light"), (HEAT, "heat")):
            work[what] = partial(draw, picture, weights, Style(kind), size_px=size_px)
    seconds = _interleaved(list(work.values()), rounds, x.device, progress, f"rounds at batch {B}")
    rows = []
    for what, times in zip(work, seconds, strict=True):
        ratio = median(time / plain for time, plain in zip(times, seconds[0], strict=True))
        rows.append(Row(B, what, 1000 * median(times), ratio, GOALS.get((B, what))))
    return rows


def _rate(model, checkpoint: Checkpoint, pictures: Pictures, rounds: int, progress) -> Rate:
    with tempfile.TemporaryDirectory() as folder:

        def explained() -> None:
            arrays = explain_data(model, checkpoint, pictures)
            write_whole(Path(folder) / "rows.npz", partial(np.savez, **arrays))

        work = [lambda: predict(model, checkpoint, pictures), explained]
        device = model.device
        plain, full = _interleaved(work, rounds, device, progress, "rounds over many pictures")
    n = len(pictures)
    ratio = median(a / b for a, b in zip(plain, full, strict=True))
    return Rate(n, pictures.name, n / median(full), n / median(plain), ratio, RATE_GOAL)


def _interleaved(work: list[Callable], rounds: int, device, progress, what: str) -> list[list[float]]:
    """Seconds of each piece of work in each round; one more round comes first and is not counted."""
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    seconds: list[list[float]] = [[] for _ in work]
    for done in range(rounds + 1):
        for one, times in zip(work, seconds, strict=True):
            wait()
            start = time.perf_counter()
            one()
            wait()
            times.append(time.perf_counter() - start)
        if progress:
            progress(done + 1, rounds + 1, what)
    return [times[1:] for times in seconds]


def _noise(n: int) -> Pictures:
    images = np.random.default_rng(0).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    ids = np.array([f"{i:012x}" for i in range(n)])
    return Pictures(images, np.zeros(n, np.int64), ids, CLASSES, "random pixels", "test", "")
