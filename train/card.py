"""What a run says of itself: in config.json once, and inside every checkpoint that it keeps.

write_json(run.config_file, record(learner, pictures, held, preset="fast", command="python -m train …"))
save(model, checkpoint(learner, pictures, held, preset="fast", command="python -m train …"), path)
"""

from dataclasses import asdict
from datetime import UTC, datetime

import numpy as np

from train.config import not_stated
from train.learner import Learner
from vit.checkpoint import Checkpoint
from vit.datasets import Pictures


def record(learner: Learner, pictures: Pictures, held: np.ndarray, *, preset: str, command: str) -> dict:
    """The values of config.json; train/runs.py says where it lies."""
    parameters = list(learner.model.parameters())
    return {
        "preset": preset,
        "config": asdict(learner.config),
        "not_stated": not_stated(preset),
        "resolved": asdict(learner.machine) | {"processes": learner.workers.count},
        "command": command,
        "data": {
            "name": pictures.name,
            "digest": pictures.digest,
            "pictures": len(learner.images),
            "held_out": len(held),
            "class_names": pictures.class_names,
            "mean": learner.mean,
            "std": learner.std,
            "left_out": pictures.left_out,
        },
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def checkpoint(
    learner: Learner, pictures: Pictures, held: np.ndarray, *, preset: str, command: str
) -> Checkpoint:
    """What every checkpoint of a run has in common."""
    config = learner.config
    held_out = "none: these are the last weights, chosen by nothing"
    if len(held):
        held_out = f"{len(held):,} training pictures (split seed {config.split_seed})"
    provenance = {
        "command": command or "train.loop.start",
        "data": f"{pictures.name}, {len(learner.images):,} pictures",
        "data_digest": pictures.digest[:12],
        "data_set": config.data if config.data in ("cifar10", "patterns") else "folder",
        "held_out": held_out,
        "preset": preset or "none",
        "weights": f"exponential moving average, decay {config.ema:g}" if config.ema else "the last ones",
        "precision": learner.machine.precision,
        "seed": config.seed,
        "runs": "one run, one seed",
    }
    architecture = config.architecture(len(pictures.class_names))
    return Checkpoint(architecture, pictures.class_names, learner.mean, learner.std, provenance)
