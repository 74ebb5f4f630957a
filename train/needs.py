"""What a run needs, worked out from its settings alone: pictures, parameters, disk, memory, without torch.

    count = count_pictures(config)               # opens no picture
    parameters(config.architecture(count.classes))
    disk_bytes(config, count, epochs=2.0), free_bytes()
    memory_bytes(config, count, "float32"), available_bytes()

Parameters are exact. Disk is a little more than a run leaves behind, without TensorBoard's files; memory is
within a factor of two of what a process on a CPU was seen to take.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from train.config import TrainConfig
from vit.architecture import Architecture
from vit.datasets import find_data
from vit.download import DataError
from vit.files import runs_folder
from vit.sources import CLASSES, find_source

_CIFAR10 = 50_000
_SAMPLES = len(list((Path(__file__).parents[1] / "assets" / "samples").glob("*.png")))
_FLOAT, _TENSOR_HEADER, _LINE = 4, 110, 180  # bytes: a number, a tensor's entry in a file, a line of metrics
_FILES = 6000  # bytes: config.json, status.json, log.txt and what the checkpoints say of the run
_PROCESS = 700_000_000  # bytes: Python with torch and its libraries
_EVALUATED = 128  # pictures that are classified together on a CPU


@dataclass(frozen=True)
class PictureCount:
    """How many pictures a run has."""

    total: int
    held: int  # held out of them
    classes: int
    filmed: int
    is_here: bool  # False for CIFAR-10 where it has not been fetched

    @property
    def learnt(self) -> int:
        return self.total - self.held


def count_pictures(config: TrainConfig) -> PictureCount:
    """Counted by their files. DataError for a folder that holds no pictures to train on."""
    base = find_data(config.data)
    source = find_source(base, "train") if base else None
    if source is None and config.data != "cifar10":
        if not Path(config.data).is_dir():
            raise DataError(f"There is no folder {config.data}.")
        raise DataError(
            f"The folder {config.data} holds no pictures to train on: name one with a folder for each class."
        )
    total, class_names = _CIFAR10, CLASSES
    if source and source.layout == "made":
        ((_, total, _),), class_names = source.files, source.class_names
    elif source and source.layout == "folders":
        total, class_names = len(source.files), source.class_names
    held = min(config.holdout, total // 10)
    samples = _SAMPLES if tuple(class_names) == CLASSES else 0
    return PictureCount(total, held, len(class_names), samples + len(class_names), source is not None)


def batch_of(config: TrainConfig, count: PictureCount) -> int:
    """Pictures in one step: never more than there are, and an even number, as the learner takes them."""
    return max(2, min(config.batch, count.learnt // 2 * 2))


def parameters(architecture: Architecture) -> int:
    """As many as the built model has."""
    return sum(_parameters(architecture))


def _parameters(a: Architecture) -> tuple[int, int]:
    """(the matrices of the blocks, all others): Muon updates the first."""
    D, M, (rows, columns) = a.embed_dim, a.mlp_dim, a.grid
    matrices = a.num_layers * (3 * D * D + D * D + 2 * D * M)  # q, k, v; out; MLP
    beside = a.num_layers * (2 * 2 * D + M + D)  # two norms; biases of the MLP
    patches = a.in_channels * a.patch_size**2 * D + D
    head = 2 * D + 2 * D + D * a.num_classes + a.num_classes  # two norms, then the classes
    return matrices, beside + patches + D + (1 + rows * columns) * D + head


def _tensors(a: Architecture) -> tuple[int, int]:
    """As `_parameters`, of tensors."""
    return 4 * a.num_layers, 6 * a.num_layers + 10


def weights_bytes(config: TrainConfig, classes: int) -> int:
    """One checkpoint of the model."""
    a = config.architecture(classes)
    return sum(_parameters(a)) * _FLOAT + sum(_tensors(a)) * _TENSOR_HEADER


def resume_bytes(config: TrainConfig, classes: int) -> int:
    """What a run goes on from: weights, what the optimisers remember, the average."""
    a = config.architecture(classes)
    (matrices, others), (of_matrices, of_others) = _parameters(a), _tensors(a)
    muon = config.optimiser == "muon"
    by_adamw, of_adamw = (others, of_others) if muon else (matrices + others, of_matrices + of_others)
    copies = 1 + bool(config.ema)
    numbers = copies * (matrices + others) + 2 * by_adamw + muon * matrices + of_adamw  # it counts its steps
    tensors = copies * (of_matrices + of_others) + 3 * of_adamw + muon * of_matrices
    return numbers * _FLOAT + tensors * _TENSOR_HEADER


def disk_bytes(config: TrainConfig, count: PictureCount, epochs: float) -> int:
    """What the run's folder will hold at its end, with the film as if it could not be compressed."""
    kept = int(epochs // config.keep_every) if config.keep_every else 0
    checkpoints = 1 + bool(count.held) + kept
    a, steps = config.architecture(count.classes), epochs * count.learnt / batch_of(config, count)
    L, N = a.num_layers, 1 + a.grid[0] * a.grid[1]
    frame = (a.num_heads + 1) * L * (N + _FLOAT) + count.classes * _FLOAT
    film = min(config.snapshots, steps + 1) * count.filmed * frame + count.filmed * 32 * 32 * 3
    lines = steps / config.log_steps + min(config.evaluations, steps)
    classes = count.classes
    return round(
        checkpoints * weights_bytes(config, classes) + 2 * resume_bytes(config, classes)
        + film + lines * _LINE + _FILES
    )  # fmt: skip


def free_bytes() -> int:
    """On the disk of the runs folder, which need not exist yet."""
    folder = runs_folder().resolve()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def memory_bytes(config: TrainConfig, count: PictureCount, precision: str, batch: int | None = None) -> int:
    """The most of a process that trains on a CPU. `batch`: with so many pictures, which are all it has."""
    a = config.architecture(count.classes)
    wide, muon = precision == "float32", config.optimiser == "muon"
    matrices, others = _parameters(a)
    # weights, gradients, average; one memory for Muon, and its work on all matrices; two for AdamW
    numbers = (2 + bool(config.ema)) * (matrices + others) + (4 if muon else 2) * matrices + 2 * others
    D, M, L, N = a.embed_dim, a.mlp_dim, a.num_layers, 1 + a.grid[0] * a.grid[1]
    maps = a.num_heads * N * N * (16 if wide else 8)
    explicit = bool(config.dropout) or not wide  # without the fused kernel; the last block reads CLS alone
    tokens = N * ((10 * D + 3 * M) if config.dropout else (8 * D + 2 * M)) * (4 if wide else 2.5)
    picture = L * tokens + (L - 1) * maps * explicit
    judged = 0.0 if batch else min(count.held, _EVALUATED) * (tokens + maps * explicit)
    pictures = (batch or count.total) * 32 * 32 * 3
    steps = (batch or batch_of(config, count)) * picture
    return round(_PROCESS + numbers * _FLOAT + pictures + max(steps, judged))


def available_bytes() -> int | None:
    """Memory that may still be taken, or all that the machine has; None where the system says neither."""
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
