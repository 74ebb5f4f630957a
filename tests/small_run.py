"""A training run of seconds: some hundred pictures in class folders, and a model of two narrow layers.

pictures = write_pictures(tmp_path / "pictures")
outcome = start(Run(tmp_path / "run"), small(pictures, epochs=2))      # 18 steps
differing(state_of(run), state_of(other))                              # weights, metrics and film, to the bit
"""

import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from synthetic import made, write_classes

from train.config import TrainConfig
from train.runs import Run, read_metrics

STEPS_PER_EPOCH = 9  # of 160 pictures 16 are held out, and 144 are nine batches of 16
_SMALL = TrainConfig(
    epochs=2.0, minutes=0.0, batch=16, patch_size=8, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=32,
    ema=0.9, threads=1, device="cpu", precision="float32", compile="off", evaluations=3, snapshots=3,
    log_steps=1, checkpoint_steps=5,
)  # fmt: skip


def write_pictures(root: Path, n: int = 160) -> Path:
    """Noise in ten tints under root/train, and other pictures under root/test; the folder to name."""
    for split, count, seed in (("train", n, 3), ("test", 20, 4)):
        pixels, labels = made(count, seed)
        tints = np.random.default_rng(0).integers(0, 256, (10, 1, 1, 3))
        write_classes(root / split, ((pixels + 3 * tints[labels]) // 4).astype(np.uint8), labels)
    return root


def small(pictures: Path, **changes) -> TrainConfig:
    return replace(_SMALL, data=str(pictures), **changes)


def as_flags(config: TrainConfig) -> list[str]:
    """What `python -m train run` must be told for this configuration."""
    words = []
    for field in fields(TrainConfig):
        name, value = field.name.replace("_", "-"), getattr(config, field.name)
        words += [f"--{'' if value else 'no-'}{name}"] if field.type is bool else [f"--{name}", str(value)]
    return words


def state_of(run: Run) -> dict[str, np.ndarray]:
    """All that must not depend on how often a run was interrupted, as arrays by name."""
    state = {}
    for name in ("last", "best", "resume"):
        if run.checkpoint(name).exists():
            state |= {f"{name} {key}": array for key, array in load_file(run.checkpoint(name)).items()}
    with np.load(run.film_file) as film:
        state |= {f"film {key}": film[key] for key in film.files}
    for key in ("step", "epoch", "loss", "lr", "val_accuracy", "val_loss"):
        state[f"metrics {key}"] = np.array([row.get(key, -1.0) for row in read_metrics(run)])
    return state


def differing(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """The names under which two states are not equal, to the bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not np.array_equal(one[name], other[name])
    ]


def until(true, seconds: float = 2.0) -> bool:
    """Whether it came true in that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.02)
    return False
