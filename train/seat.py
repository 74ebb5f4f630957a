"""One trainer in a run directory, one run at a time under the runs folder: locks that die with their holder.

    with at_work(run):                 # RunError, with who is there, where another one works
        …
    who_works(runs_folder())           # the name of the run at work, or None
    is_held(run.lock_file)             # whether a living process holds it

The runs folder is PATCHLIGHT_RUNS, else `runs`. A run that lies elsewhere is alone in its own directory only.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout  # torch brings it

from train.runs import Run, RunError, last_status
from vit.files import runs_folder, write_whole

_LOCK, _NAME = ".lock", ".at-work"
_PATIENCE_SECONDS = 1.0  # longer than anybody needs who only asks whether a lock is held
_NAME_SECONDS = 1.0  # from a lock to the name of its holder


@contextmanager
def at_work(run: Run) -> Iterator[None]:
    """Be the only trainer of a run, and under the runs folder the only one at all. RunError where one is."""
    folder = runs_folder().resolve()
    is_under = folder in run.root.resolve().parents
    seat = _take(folder, lambda: RunError(someone_works(folder))) if is_under else None
    try:
        if is_under:
            write_whole(folder / _NAME, lambda file: file.write(run.name.encode()))
        lock = hold(run)
        try:
            yield
        finally:
            lock.release()
    finally:
        if seat:
            (folder / _NAME).unlink(missing_ok=True)
            seat.release()


def hold(run: Run) -> FileLock:
    """The lock of a run, which dies with the process that holds it. RunError if another one does."""

    def taken() -> RunError:
        status = last_status(run)
        who = f"another trainer (process {status.pid} on {status.host})" if status else "another trainer"
        return RunError(f"{who} works in {run.root}: stop it first, or choose another --out")

    lock = _take(run.root, taken)
    for folder in (run.root, run.root / "checkpoints"):
        for half in folder.glob(".*.part"):  # of one who was killed while it wrote
            half.unlink(missing_ok=True)
    return lock


def who_works(folder: Path) -> str | None:
    """The name of the run at work under this runs folder, or None."""
    if not is_held(folder / _LOCK):
        return None
    end = time.monotonic() + _NAME_SECONDS
    while time.monotonic() < end:  # its holder is about to write it, or about to leave
        try:
            return (folder / _NAME).read_text(encoding="utf-8", errors="replace")
        except OSError:
            time.sleep(0.02)
            if not is_held(folder / _LOCK):
                return None
    return "another run"


def someone_works(folder: Path) -> str:
    """A sentence for who may not start because of it."""
    name = who_works(folder) or "another run"
    return f"{name} is at work, and one run at a time has the machine: stop it first, or wait until it ends"


def is_held(lock_file: Path) -> bool | None:
    """Whether a living process holds this lock; None where that cannot be known."""
    try:
        import fcntl
    except ImportError:  # on Windows
        return _is_held_alone(lock_file)
    try:
        with lock_file.open("rb") as file:  # shared: those who only ask are never taken for a holder
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # another user's
        return None
    return False


def _is_held_alone(lock_file: Path) -> bool | None:
    """is_held where a lock cannot be shared: somebody else who asks holds it for a moment."""
    try:
        if not lock_file.exists():
            return False
    except OSError:  # in a folder that we may not look into
        return None
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0.1, poll_interval=0.01)
    except Timeout:
        return True
    except OSError:
        return None
    lock.release()
    return False


def _take(folder: Path, taken) -> FileLock:
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=_PATIENCE_SECONDS, poll_interval=0.02)
    except Timeout as error:
        raise taken() from error
    return lock
