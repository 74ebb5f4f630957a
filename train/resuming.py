"""What a run goes on from after a crash: written so that one whole checkpoint is always there.

save_resume(run, learner.tensors(), {"step": 1240, …})
tensors, facts, remark = load_resume(run)        # the newest that is whole
"""

import hashlib
import json
import os

import safetensors
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from torch import Tensor, uint8

from train.runs import Run, RunError
from vit.files import write_whole

_READY = ".resume-ready"
_RESUME = ("resume", _READY, "resume.prev")  # ready is there where a save was cut off between two renames


def save_resume(run: Run, tensors: dict[str, Tensor], facts: dict) -> None:
    """Keep what a run goes on from, and the one before it."""
    told = json.dumps(facts)
    data = serialise(tensors, metadata={"facts": told, "sha256": _digest(tensors, told)})
    newest, before = run.checkpoint("resume"), run.checkpoint("resume.prev")
    ready = run.checkpoint(_READY)
    write_whole(ready, lambda file: _write_through(file, data))
    if newest.exists():
        newest.replace(before)
    ready.replace(newest)


def load_resume(run: Run) -> tuple[dict[str, Tensor], dict, str]:
    """(tensors, facts, remark): the newest checkpoint that is whole; the remark says what was passed over.

    RunError where none is.
    """
    problems = []
    for name in _RESUME:
        path = run.checkpoint(name)
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                told = file.metadata() or {}
            tensors = load_file(path)
            if _digest(tensors, told["facts"]) != told["sha256"]:
                raise ValueError("its contents have changed")
            return tensors, json.loads(told["facts"]), "; ".join(problems)
        except FileNotFoundError:
            if name != _READY:
                problems.append(f"{path.name} is not there")
        except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
            problems.append(f"{path.name} cannot be used ({error})")
    raise RunError(f"{run.root} cannot be resumed: {'; '.join(problems)}")


def has_resume(run: Run) -> bool:
    """Whether a run ever came to its first checkpoint."""
    return any(run.checkpoint(name).exists() for name in _RESUME)


def _digest(tensors: dict[str, Tensor], facts: str) -> str:
    """safetensors checks lengths only: a flipped bit would train on unseen."""
    total = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().reshape(-1).view(uint8).numpy())  # numpy lacks bfloat16
    return total.hexdigest()


def _write_through(file, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())  # a name must not outlive a power cut that its bytes did not
