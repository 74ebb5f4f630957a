"""A trainer at work in a run directory: alone there, heard of every half second, and open to wishes.

with seat(run), hold(run):             # RunError, which says who, where another one works
    desk = Desk(run)                   # keeps status.json fresh from a thread of its own
    desk.tell(step=…); desk.stop_asked; desk.pause_asked
    desk.close("finished")
"""

import os
import socket
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

from train.runs import ACTIVE, Run, RunError, Status, is_full_disk, last_status, write_json

HEARTBEAT_SECONDS = 0.5
_RESERVE_BYTES = 64 * 1024
# What a run leaves that failed at once, or that was asked for before anything began.
_BEFORE_IT_BEGAN = {".lock", ".reserve", "status.json", "log.txt", "launch.json", "stop", "pause"}


def require_new(run: Run) -> None:
    """RunError unless a run may begin there: in no folder, an empty one, or one where none got under way."""
    if run.is_begun:
        raise RunError(f"{run.root} holds a run: add --resume to go on with it, or choose another --out")
    if run.root.exists() and not run.root.is_dir():
        raise RunError(f"{run.root} is a file: choose another --out")
    if run.root.is_dir() and {path.name for path in run.root.iterdir()} - _BEFORE_IT_BEGAN:
        raise RunError(f"{run.root} holds other files: choose a new or an empty folder as --out")


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
        now, before = time.time(), last_status(run) or Status()
        self.status = replace(
            before,  # one who goes on has come as far as the one before
            state="starting", reason="", images_per_second=0.0, seconds_left=None,
            heartbeat=now, pid=os.getpid(), host=socket.gethostname(), started=now,
        )  # fmt: skip
        self.stop_asked = self.pause_asked = False
        self.problem = ""  # why status.json could not be written, if it could not
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._identity = _identity(run.lock_file)
        if before.state != "waiting":  # then they are meant for whoever worked here before
            for asked in (run.stop_file, run.pause_file):
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
        return _identity(self.run_.lock_file) == self._identity

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
