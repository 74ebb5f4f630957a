"""What `python -m train bench` measures: each preset's step beside a plain script's and the machine's limit.

    for line in bench_lines(bench(rounds=7)): print(line)

A step is forward, backward and AdamW on one batch of 128 that lies ready. What a preset does beside it, to
vary the pictures, for Muon instead of AdamW, for the average of the weights, stands in columns of its own, as
shares of that step. Machines drift, so every round times every row once, and a ratio is the median over
rounds of the plain step's time by the row's in the same round. The limit is the best rate of float32 products
over five shapes of this model, timed in the same rounds. About two minutes on two CPU cores.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F
from PIL import Image

from train.config import TrainConfig, preset
from train.learner import Learner, Machine
from train.plain import PlainTransformer, plain_step, plain_transforms

BATCH = 128
SHAPES = ((8320, 256, 768), (8320, 256, 256), (8320, 256, 512), (8320, 512, 256), (768, 8320, 256))
PLAIN, PILLOW = "plain script", "plain script, its transforms included"
GOALS = {  # row: (least ratio to the plain step, least share of the limit)
    "tutorial": (1.2, None),
    "fast, all patches": (1.7, 0.6),
    "fast, half of the patches": (3.0, None),
}
AUGMENTATION_GOAL = 0.05  # of the step of fast and tutorial


@dataclass(frozen=True)
class Row:
    what: str
    precision: str
    images_per_second: float
    ratio: float  # to the plain step, of rates
    share_of_limit: float | None  # of the best float32 rate; None where nobody counts its operations
    augmentation: float | None = None  # seconds beside the step, as shares of it
    muon: float | None = None  # more than AdamW would take
    average: float | None = None
    ratio_goal: float | None = None
    limit_goal: float | None = None


@dataclass(frozen=True)
class Bench:
    device: str
    threads: int
    torch: str
    limit_gflops: float  # median over rounds
    rounds: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, eq=False)
class _Work:
    """What is timed for one row."""

    what: str
    precision: str
    step: Callable[[], object]
    gflop: float | None = None  # of one step
    augment: Callable[[], object] | None = None
    adamw: Callable[[], object] | None = None
    own_optimisers: Callable[[], object] | None = None
    average: Callable[[], object] | None = None


def bench(rounds: int = 7, *, device: str | None = None, progress=None) -> Bench:
    """Measure. ValueError for fewer than one round, or a device that is not here."""
    if rounds < 1:
        raise ValueError(f"a whole number of rounds from 1 is needed, not {rounds}")
    machine = Machine.here(preset("fast", device=device or "auto"))
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (4 * BATCH, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (4 * BATCH,), generator=generator)
    rows = [_plain(images, labels, machine, False), _plain(images, labels, machine, True)]
    float32 = replace(machine, precision="float32", compiled=machine.kind == "cuda")
    for name in ("tutorial", "fast", "record"):
        config = preset(name, machine.kind, batch=BATCH)
        if config.keep_patches < 1:
            rows.append(_ours(f"{name}, all patches", config, float32, images, labels, 1.0))
            rows.append(_ours(f"{name}, half of the patches", config, float32, images, labels, 0.0))
        else:
            rows.append(_ours(name, config, float32, images, labels, 1.0))
    if machine.precision == "bfloat16":
        config = preset("fast", machine.kind, batch=BATCH)
        rows.append(_ours("fast, all patches", config, machine, images, labels, 1.0))
        rows.append(_ours("fast, half of the patches", config, machine, images, labels, 0.0))
    demo = preset("demo", machine.kind, batch=BATCH)
    rows.append(_ours("demo (its own small model)", demo, float32, images, labels, 1.0))
    products = [_product(shape, machine) for shape in SHAPES]

    seconds: dict[tuple[str, str, str], list[float]] = {}
    limits = []
    for done in range(rounds + 1):
        limits.append(max(rate for product in products for rate in product(3)))
        for row in rows:
            for part in ("step", "augment", "adamw", "own_optimisers", "average"):
                if work := getattr(row, part):
                    taken = _timed(work, machine, 1 if part == "step" else 3)
                    seconds.setdefault((row.what, row.precision, part), []).append(taken)
        if progress:
            progress(done + 1, rounds + 1, "rounds")
    # the first round warms up: memory is taken, kernels are chosen
    times = {key: values[1:] for key, values in seconds.items()}
    plain = times[PLAIN, "float32", "step"]
    return Bench(
        machine.device,
        machine.threads,
        machine.torch,
        median(limits[1:]),
        rounds,
        tuple(_row(row, times, plain, limits[1:]) for row in rows),
    )


def bench_lines(found: Bench) -> list[str]:
    """The report for people."""
    lines = [
        f"{found.device}, {found.threads} threads, torch {found.torch}, batch {BATCH}, {found.rounds} rounds",
        f"limit: {found.limit_gflops:,.0f} GFLOP/s in float32",
        "",
    ]
    width = max(len(row.what) for row in found.rows)
    names = " ".join(f"{name:>6}" for name in ("ratio", "limit", "augm.", "Muon", "EMA"))
    lines.append(f"{'step':<{width}} {'':8} {'images/s':>8} {names}")
    for row in found.rows:
        shares = " ".join(
            f"{'' if share is None else format(share, '.0%'):>6}"
            for share in (row.share_of_limit, row.augmentation, row.muon, row.average)
        )
        goals = []
        if row.ratio_goal:
            goals.append(f"ratio >= {row.ratio_goal:g} {_verdict(row.ratio >= row.ratio_goal)}")
        if row.limit_goal:
            goals.append(f"limit >= {row.limit_goal:.0%} {_verdict(row.share_of_limit >= row.limit_goal)}")
        if row.ratio_goal and row.augmentation is not None:
            held = row.augmentation < AUGMENTATION_GOAL
            goals.append(f"augm. < {AUGMENTATION_GOAL:.0%} {_verdict(held)}")
        line = (
            f"{row.what:<{width}} {row.precision:8} {row.images_per_second:>8.1f} {row.ratio:>6.2f} {shares}"
            f"   {', '.join(goals)}"
        )
        lines.append(line.rstrip())
    return lines


def bench_values(found: Bench) -> dict:
    """The report for JSON."""
    return asdict(found)


def step_gflop(config: TrainConfig, tokens: int, *, cls_only: bool = True) -> float:
    """Multiplications and additions of one picture's training step, in thousands of millions.

    With `cls_only` the last block reads every token but works on CLS alone, as our model does in training. A
    product's backward pass costs twice its forward one; norms, softmax and the like are not counted.
    """
    D, P = config.embed_dim, (32 // config.patch_size) ** 2

    def block(worked_on: int) -> int:
        queries_keys_values = 6 * tokens * D * D
        output_and_mlp = 2 * worked_on * (D * D + 2 * D * config.mlp_dim)
        return queries_keys_values + output_and_mlp + 4 * worked_on * tokens * D

    blocks = (config.num_layers - 1) * block(tokens) + block(1 if cls_only else tokens)
    patches = 2 * P * D * 3 * config.patch_size**2
    return 3 * (blocks + patches) / 1e9


def _plain(images, labels, machine: Machine, with_transforms: bool) -> _Work:
    torch.manual_seed(0)
    model = PlainTransformer().to(machine.device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
    x = ((images[:BATCH].float() / 255 - 0.5) / 0.5).to(machine.device)
    y = labels[:BATCH].to(machine.device)
    if not with_transforms:
        gflop = BATCH * step_gflop(preset("tutorial"), 65, cls_only=False)
        return _Work(PLAIN, "float32", lambda: plain_step(model, optimiser, x, y), gflop)
    transforms = plain_transforms()
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images[:BATCH]]

    def step() -> None:
        batch = torch.stack([transforms(picture) for picture in pictures]).to(machine.device)
        plain_step(model, optimiser, batch, y)

    return _Work(PILLOW, "float32", step)


def _ours(what, config, machine, images, labels, progress: float) -> _Work:
    """`progress` says which phase of the run: some patches, or all of them."""
    learner = Learner(config, machine, images, labels, num_classes=10)
    x, y, options = learner.prepare(0, progress)
    adamw = torch.optim.AdamW(learner.model.parameters(), lr=1e-6, fused=True)
    tokens = 1 + (learner.kept_patches(progress) or learner.patches)

    def step() -> None:
        learner.backward(x, y, **options)
        adamw.step()
        adamw.zero_grad(set_to_none=False)

    def own_optimisers() -> None:
        for optimiser in learner.optimisers:
            optimiser.step()

    for parameter in learner.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return _Work(
        what,
        machine.precision,
        step,
        BATCH * step_gflop(config, tokens),
        augment=lambda: learner.prepare(0, progress),
        adamw=adamw.step,
        own_optimisers=own_optimisers if config.optimiser == "muon" else None,
        average=(lambda: learner.ema.update(learner.model)) if learner.ema else None,
    )


def _row(row: _Work, times: dict, plain: list[float], limits: list[float]) -> Row:
    step = times[row.what, row.precision, "step"]

    def share(part: str) -> float | None:
        found = times.get((row.what, row.precision, part))
        return None if found is None else median(a / b for a, b in zip(found, step, strict=True))

    muon, adamw = share("own_optimisers"), share("adamw")
    goals = GOALS if row.precision == "float32" else {}
    ratio_goal, limit_goal = goals.get(row.what, (None, None))
    return Row(
        row.what,
        row.precision,
        BATCH / median(step),
        median(a / b for a, b in zip(plain, step, strict=True)),
        row.gflop and median(row.gflop / a / limit for a, limit in zip(step, limits, strict=True)),
        share("augment"),
        None if muon is None else muon - adamw,
        share("average"),
        ratio_goal,
        limit_goal,
    )


def _product(shape: tuple[int, int, int], machine: Machine) -> Callable[[int], list[float]]:
    rows, inner, columns = shape
    a = torch.randn(rows, inner, device=machine.device)
    w = torch.randn(columns, inner, device=machine.device)

    def rates(times: int) -> list[float]:
        """GFLOP/s of each of some products."""
        operations = 2 * rows * inner * columns
        return [operations / _timed(lambda: F.linear(a, w), machine, 1) / 1e9 for _ in range(times)]

    return rates


def _timed(work: Callable[[], object], machine: Machine, times: int) -> float:
    """The least seconds of some goes."""
    least = float("inf")
    for _ in range(times):
        _wait(machine)
        began = time.perf_counter()
        work()
        _wait(machine)
        least = min(least, time.perf_counter() - began)
    return least


def _wait(machine: Machine) -> None:
    if machine.kind == "cuda":
        torch.cuda.synchronize()


def _verdict(held: bool) -> str:
    return "held" if held else "MISSED"
