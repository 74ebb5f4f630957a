"""The run directory: the only tie between a trainer and whoever watches it.

    RUN/config.json      settings, machine, data, command: written once
    RUN/metrics.jsonl    a line every few steps, and at evaluations
    RUN/status.json      what the trainer is doing, at least every second: see Status
    RUN/log.txt          what it said
    RUN/attention.npz    attention of some pictures at chosen steps: train/film.py
    RUN/checkpoints/     last, best, epoch-0010 … as vit/checkpoint.py writes them; resume and resume.prev
    RUN/stop, RUN/pause  empty files by which anybody asks for that

Whole files are replaced in one step. Appended files end in a whole line; who reads them skips a torn one.
Nothing is ever pickled.
"""

import errno
import hashlib
import json
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import safetensors
from filelock import FileLock, Timeout  # torch brings it
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from torch import Tensor, uint8

from vit.files import write_whole

HEARTBEAT_SECONDS = 0.5
VANISHED_SECONDS = 10.0  # without a heartbeat
ACTIVE = ("starting", "running", "pausing", "paused", "stopping")
_RESERVE_BYTES = 64 * 1024
_LOCK = ".lock"
# What a run leaves that failed at once, or that was asked for before anything began.
_BEFORE_IT_BEGAN = {_LOCK, ".reserve", "status.json", "log.txt", "stop", "pause"}
_READY = ".resume-ready"
_RESUME = ("resume", _READY, "resume.prev")  # ready is there where a save was cut off between two renames


class RunError(ValueError):
    """Why a run cannot start or go on; its text is one sentence."""


@dataclass(frozen=True)
class Status:
    """What status.json holds."""

    state: str = "starting"  # then running, pausing, paused, stopping; at last stopped, finished or failed
    reason: str = ""  # why it is in this state, and what to do
    progress: float = 0.0  # 0 to 1
    step: int = 0
    epoch: float = 0.0
    images_per_second: float = 0.0
    seconds_left: float | None = None
    val_accuracy: float | None = None  # of the latest evaluation
    best_accuracy: float | None = None
    best_step: int | None = None
    heartbeat: float = 0.0  # seconds since 1970
    pid: int = 0
    host: str = ""
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
    try:
        found = json.loads(run.status_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    status = Status(**{name: found[name] for name in Status.__dataclass_fields__ if name in found})
    if not all(_fits(value, getattr(Status, name)) for name, value in vars(status).items()):
        return None
    silent_seconds = time.time() - status.heartbeat
    if status.state in ACTIVE and silent_seconds > VANISHED_SECONDS:
        return replace(
            status,
            state="vanished",
            reason=f"no sign of the trainer for {silent_seconds:,.0f} s; --resume goes on with it",
        )
    return status


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
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        return None
    return found if all(_is_number(value) for value in found.values()) else None


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


def is_full_disk(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


# ---- one trainer at a time ------------------------------------------------------------------------------


def require_new(run: Run) -> None:
    """RunError unless a run may begin there: in no folder, an empty one, or one where none got under way."""
    if run.is_begun:
        raise RunError(f"{run.root} holds a run: add --resume to go on with it, or choose another --out")
    if run.root.exists() and not run.root.is_dir():
        raise RunError(f"{run.root} is a file: choose another --out")
    if run.root.is_dir() and {path.name for path in run.root.iterdir()} - _BEFORE_IT_BEGAN:
        raise RunError(f"{run.root} holds other files: choose a new or an empty folder as --out")


def hold(run: Run) -> FileLock:
    """The lock of a run, which dies with the process that holds it. RunError if another one does."""
    run.root.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run.root / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        status = read_status(run)
        who = f"another trainer (process {status.pid} on {status.host})" if status else "another trainer"
        raise RunError(f"{who} works in {run.root}: stop it first, or choose another --out") from error
    for folder in (run.root, run.root / "checkpoints"):
        for half in folder.glob(".*.part"):  # of one who was killed while it wrote
            half.unlink(missing_ok=True)
    return lock


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Desk(threading.Thread):
    """Keeps status.json fresh, and takes in what people ask for, beside the training.

    The trainer calls `tell(step=…)` and looks at `stop_asked` and `pause_asked`; the thread acknowledges both
    in status.json within a second, even while a step takes long.
    """

    def __init__(self, run: Run):
        super().__init__(name="status of the run", daemon=True)
        self.run_ = run
        now = time.time()
        self.status = replace(
            read_status(run) or Status(),  # one who goes on has come as far as the one before
            state="starting", reason="", images_per_second=0.0, seconds_left=None,
            heartbeat=now, pid=os.getpid(), host=socket.gethostname(), started=now,
        )  # fmt: skip
        self.stop_asked = self.pause_asked = False
        self.problem = ""  # why status.json could not be written, if it could not
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._identity = _identity(run.root / _LOCK)
        for asked in (run.stop_file, run.pause_file):  # meant for whoever worked here before
            asked.unlink(missing_ok=True)
        (run.root / ".reserve").write_bytes(b"\0" * _RESERVE_BYTES)
        self._write()
        self.start()

    def tell(self, **changes) -> None:
        """Change fields of the status; it is written soon."""
        with self._lock:
            self.status = replace(self.status, **changes)

    @property
    def is_ours(self) -> bool:
        """Whether the folder is still the one that this trainer holds; a deleted one may be another's now."""
        return _identity(self.run_.root / _LOCK) == self._identity

    def require_ours(self) -> None:
        """RunError if the folder was deleted or replaced, so that nothing is written there any more."""
        if not self.is_ours:
            raise RunError(f"the folder {self.run_.root} was deleted or replaced while the run went on")

    def ask_stop(self) -> None:
        """As if the file `stop` were there: for signals."""
        self.stop_asked = True

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                self._look()
                self._write()
                self.problem = ""
            except OSError as error:  # full or gone for now: the training itself may still go on
                self.problem = str(error)
            self._ended.wait(HEARTBEAT_SECONDS)

    def close(self, state: str, reason: str = "") -> None:
        """The last word. Room for it is kept, so that a full disk can still be told of."""
        self._ended.set()
        self.join()
        self.tell(state=state, reason=reason, seconds_left=None)
        try:
            self._write()
        except OSError as error:
            if not is_full_disk(error):
                raise
            (self.run_.root / ".reserve").unlink(missing_ok=True)
            self._write()
        if not self.is_ours:
            return
        (self.run_.root / ".reserve").unlink(missing_ok=True)
        for asked in (self.run_.stop_file, self.run_.pause_file):
            asked.unlink(missing_ok=True)

    def _look(self) -> None:
        stop, pause = self.run_.stop_file.exists(), self.run_.pause_file.exists()
        with self._lock:  # what the trainer tells after it saw one of these comes after this
            self.pause_asked = pause
            if stop:  # never set to False: a signal may have asked in the meantime
                self.stop_asked = True
            state = self.status.state
            if self.stop_asked and state in ACTIVE:
                state = "stopping"
            elif pause and state in ("starting", "running"):
                state = "pausing"
            elif not pause and state == "pausing":
                state = "running"
            self.status = replace(self.status, state=state)

    def _write(self) -> None:
        with self._lock:
            self.status = replace(self.status, heartbeat=time.time())
            values = asdict(self.status)
        if self.is_ours:
            write_json(self.run_.status_file, values)
