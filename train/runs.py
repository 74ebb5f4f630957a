"""The run directory: the only tie between a trainer and whoever watches it.

    RUN/config.json      settings, machine, data, command: written once
    RUN/metrics.jsonl    a line every few steps, and at evaluations
    RUN/status.json      what the trainer is doing, at least every second: see Status
    RUN/log.txt          what it said
    RUN/attention.npz    attention of some pictures at chosen steps: train/film.py
    RUN/checkpoints/     last, best, epoch-0010 … as vit/checkpoint.py writes them; resume and resume.prev
    RUN/stop, RUN/pause  empty files by which anybody asks for that
    RUN/launch.json      what the page asked for, where it was the page: train/launch.py
    RUN/.lock            held by the trainer as long as it lives

Whole files are replaced in one step. Appended files end in a whole line; who reads them skips a torn one.
Nothing is ever pickled.
"""

import errno
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from vit.files import write_whole

VANISHED_SECONDS = 10.0  # without a heartbeat
ACTIVE = ("waiting", "starting", "running", "pausing", "paused", "stopping")


class RunError(ValueError):
    """Why a run cannot start or go on; its text is one sentence."""


@dataclass(frozen=True)
class Status:
    """What status.json holds."""

    # waiting: asked for by the page; starting, running, pausing, paused, stopping; stopped, finished, failed
    state: str = "starting"
    reason: str = ""  # why it is in this state, and what to do
    progress: float = 0.0  # 0 to 1
    step: int = 0
    epoch: float = 0.0
    seconds: float = 0.0  # spent in steps
    images_per_second: float = 0.0
    seconds_left: float | None = None
    val_accuracy: float | None = None  # of the latest evaluation
    best_accuracy: float | None = None
    best_step: int | None = None
    heartbeat: float = 0.0  # seconds since 1970
    pid: int = 0
    host: str = ""
    device: str = ""
    memory_bytes: int | None = None  # of the device; on a CPU, of the process
    started: float = 0.0  # seconds since 1970


@dataclass(frozen=True)
class Run:
    """The places of one run directory."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.resolve().name

    def checkpoint(self, name: str) -> Path:
        """last, best, resume, resume.prev, or epoch-0010."""
        return self.root / "checkpoints" / f"{name}.safetensors"

    @property
    def config_file(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics_file(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def status_file(self) -> Path:
        return self.root / "status.json"

    @property
    def log_file(self) -> Path:
        return self.root / "log.txt"

    @property
    def film_file(self) -> Path:
        return self.root / "attention.npz"

    @property
    def stop_file(self) -> Path:
        return self.root / "stop"

    @property
    def pause_file(self) -> Path:
        return self.root / "pause"

    @property
    def launch_file(self) -> Path:
        return self.root / "launch.json"

    @property
    def lock_file(self) -> Path:
        return self.root / ".lock"

    @property
    def is_begun(self) -> bool:
        return self.config_file.is_file()


# ---- reading --------------------------------------------------------------------------------------------


def read_config(run: Run) -> dict:
    """What config.json says. RunError if there is none, or if it is damaged."""
    try:
        found = json.loads(run.config_file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{run.root} holds no run: it has no config.json") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{run.config_file} cannot be read ({error}); the run cannot go on from it") from error
    parts = ("config", "data", "resolved")
    if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in parts):
        raise RunError(f"{run.config_file} is not a run's config.json")
    return found


def read_status(run: Run) -> Status | None:
    """What status.json says, or None where it says nothing that can be read.

    An active run whose heart has not beaten for ten seconds has the state "vanished".
    """
    status = last_status(run)
    silent_seconds = time.time() - status.heartbeat if status else 0.0
    if status and status.state in ACTIVE and silent_seconds > VANISHED_SECONDS:
        return replace(
            status,
            state="vanished",
            reason=f"no sign of the trainer for {silent_seconds:,.0f} s; --resume goes on with it",
        )
    return status


def last_status(run: Run) -> Status | None:
    """What status.json says, however long ago it was written."""
    try:
        found = json.loads(run.status_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    status = Status(**{name: found[name] for name in Status.__dataclass_fields__ if name in found})
    return (
        status if all(_fits(value, getattr(Status, name)) for name, value in vars(status).items()) else None
    )


def _fits(value, default) -> bool:
    """Whether a value may stand where a field of Status has this default."""
    if isinstance(default, str):
        return isinstance(value, str)
    return _is_number(value) or (value is None and default is None)


def _is_number(value) -> bool:
    """Whether it can be computed with: NaN, infinity and whole numbers beyond floats cannot."""
    return type(value) in (int, float) and abs(value) < 1e300


def read_metrics(run: Run) -> list[dict]:
    """The whole lines of metrics.jsonl; those that are torn, or are not numbers with a step, are skipped."""
    try:
        lines = run.metrics_file.read_bytes().splitlines()
    except OSError:
        return []
    return [found for line in lines if (found := _metric(line))]


def _metric(line: bytes) -> dict | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if is_metrics_row(found) else None


def is_metrics_row(found) -> bool:
    """Whether it is an object of numbers that can be computed with, with a whole step."""
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        return False
    return all(_is_number(value) for value in found.values())


# ---- writing --------------------------------------------------------------------------------------------


def write_json(path: Path, values: dict) -> None:
    write_whole(path, lambda file: file.write(json.dumps(values, indent=1).encode()))


def append_line(path: Path, text: str) -> None:
    """One whole line in one write; after a torn line it starts on a new one."""
    with path.open("ab+") as file:
        torn = file.tell() > 0 and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
        line = "\n" * torn + " ".join(text.splitlines()) + "\n"
        file.write(line.encode(errors="backslashreplace"))  # names of files need not be text


def append_metrics(run: Run, values: dict) -> None:
    append_line(run.metrics_file, json.dumps(values))


def cut_metrics(run: Run, step: int) -> None:
    """Drop what came after a step, and torn lines: a run that resumes will write it again."""
    kept = [json.dumps(found) + "\n" for found in read_metrics(run) if found["step"] <= step]
    write_whole(run.metrics_file, lambda file: file.write("".join(kept).encode()))


def is_full_disk(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
