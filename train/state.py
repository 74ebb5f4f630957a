"""In which of seven states a run is, why, and what to do next: one answer for page, command line and tests.

    for run in find_runs():                # newest first
        seen = look(run)
        seen.word, seen.reason, seen.next  # "paused", "", "resume or stop it"

A trainer that lives holds the lock of its run; status.json says what it does. Where the two contradict each
other the lock is right: a killed trainer is known at once, not after a silence.
"""

import re
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from train.runs import ACTIVE, VANISHED_SECONDS, Run, RunError, Status, last_status, read_config
from train.seat import is_held
from vit.files import runs_folder

Word = Literal["waiting", "running", "paused", "stopped", "finished", "failed", "vanished"]
Wish = Literal["", "pause", "resume", "stop"]
_WORDS: dict[str, Word] = {
    "waiting": "waiting", "starting": "waiting", "running": "running", "pausing": "running",
    "stopping": "running", "paused": "paused", "stopped": "stopped", "finished": "finished",
    "failed": "failed",
}  # fmt: skip
_ELSEWHERE_SECONDS = 600.0  # another machine's clock may be wrong, and its locks cannot be seen
_OPENING_SECONDS = 300.0  # a trainer gives no sign while it imports torch and makes or opens its pictures
PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # of a new run; no file system gives it another meaning
_RESERVED = r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?|.*\."


@dataclass(frozen=True)
class Seen:
    """A run as it is now."""

    run: Run
    word: Word
    reason: str  # one sentence without a full stop; "" where the word says it all
    next: str  # what a person may do, in words
    wish: Wish  # what was asked for and is not done yet
    status: Status  # as last written; all zeros where nothing can be read
    is_silent: bool = False  # its process is there, but gives no sign

    @property
    def name(self) -> str:
        """As `find_run` knows it: of a link its own name, not that of what it points to."""
        return self.run.root.name or self.run.name

    @property
    def is_active(self) -> bool:
        """Whether a trainer is at work on it."""
        return self.word in ("waiting", "running", "paused")


def look(run: Run) -> Seen:
    """What can be said of a run, also of a damaged one. RunError if the folder holds no run (any more)."""
    if not any(map(_is_there, (run.status_file, run.config_file, run.launch_file))):
        raise RunError(f"there is no run {run.name} (any more)")
    status = last_status(run)
    if status is None:
        return _without_status(run)
    silent_seconds = time.time() - status.heartbeat
    if status.state in ACTIVE:
        is_here = status.host in ("", socket.gethostname())
        held = is_held(run.lock_file) if is_here else None
        patience_seconds = VANISHED_SECONDS if is_here else _ELSEWHERE_SECONDS
        if status.state == "waiting" and not held and not status.pid and silent_seconds < VANISHED_SECONDS:
            held = True  # its process takes the lock in a moment, and then says which it is
        is_opening = status.state == "waiting" and held
        is_silent = silent_seconds > (_OPENING_SECONDS if is_opening else VANISHED_SECONDS)
        if held is False or (held is None and abs(silent_seconds) > patience_seconds):
            return _seen(run, replace(status, seconds_left=None), "vanished", _why_vanished(run, status))
        return _active(run, status, is_silent, silent_seconds)
    word = _WORDS.get(status.state)
    if word is None:
        reason = f"its status names a state that this version does not know: {status.state[:40]!r}"
        return _seen(run, status, "running" if is_held(run.lock_file) else "failed", reason)
    return _seen(run, status, word, status.reason)


def find_runs(folder: Path | None = None) -> list[Run]:
    """The runs directly under the runs folder, newest first: those that began, and those asked for."""
    folder = runs_folder() if folder is None else folder
    found = {}
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".") and _is_folder(path)]
    except OSError:  # not there yet, or another user's
        return []
    for path in paths:
        run = Run(path)
        if began := _began(run):
            found[run] = began
    return sorted(found, key=lambda run: (-found[run], run.name))


def look_at_all(folder: Path | None = None) -> list[Seen]:
    """All runs as they are now, newest first, without those that are deleted while they are listed."""
    found = []
    for run in find_runs(folder):
        try:
            found.append(look(run))
        except RunError:
            continue
    return found


def find_run(name: str, folder: Path | None = None) -> Run:
    """The run of this name, compared with those there are, never joined. RunError if there is none."""
    for run in find_runs(folder):
        if run.root.name == name:
            return run
    raise RunError(f"there is no run {name!r} under {runs_folder() if folder is None else folder}")


def require_plain(name: str) -> str:
    """The name, if a new run may have it. RunError with what names are made of."""
    if not re.fullmatch(PLAIN_NAME, name) or re.fullmatch(_RESERVED, name):
        raise RunError(
            f"{name[:80]!r} is not a name for a run: take up to 64 letters, digits, dots, dashes and "
            "underscores, a letter or digit first"
        )
    return name


def config_of(run: Run) -> dict:
    """What config.json says; empty where it says nothing that can be used."""
    try:
        return read_config(run)
    except RunError:
        return {}


# ---- how it is told ----


def _active(run: Run, status: Status, is_silent: bool, silent_seconds: float) -> Seen:
    word = _WORDS[status.state]
    wish: Wish = ""
    if status.state == "stopping" or run.stop_file.exists():
        wish = "stop"
    elif word == "paused" and not run.pause_file.exists():
        wish = "resume"
    elif word != "paused" and (status.state == "pausing" or run.pause_file.exists()):
        wish = "pause"
    reason = status.reason  # what takes long: opening, judging
    if is_silent:
        reason = f"its process is there, but has given no sign for {silent_seconds:,.0f} s"
    elif wish == "stop":
        reason = "stopping: " + (f"{reason} first" if reason else "it ends its step and keeps a checkpoint")
    elif wish == "pause":
        reason = "pausing after this step"
    elif wish == "resume":
        reason = "going on in a moment"
    elif word == "waiting":
        reason = reason or "opening its pictures and its model"
    return _seen(run, status, word, reason, wish, is_silent)


def _without_status(run: Run) -> Seen:
    """Where status.json is missing or damaged: the lock still tells whether anybody works there."""
    status = Status(heartbeat=0.0)
    if is_held(run.lock_file):
        return _seen(
            run, status, "running", "its status cannot be read; the trainer writes it anew every second"
        )
    return _seen(
        run, status, "vanished", "its status.json is missing or damaged, and no trainer is at work on it"
    )


def _why_vanished(run: Run, status: Status) -> str:
    where = f"at step {status.step:,}" if status.step else "before its first step"
    return f"its process ended {where} without a word: killed, or the machine went down"


def _seen(
    run: Run, status: Status, word: Word, reason: str, wish: Wish = "", is_silent: bool = False
) -> Seen:
    can_resume = _is_there(run.config_file)
    looking = "look into its checkpoint" if _is_there(run.checkpoint("last")) else "read its log"
    after = {
        "waiting": "it starts by itself",
        "running": "watch it, pause or stop it",
        "paused": "resume or stop it",
        "stopped": f"resume it, or {looking}" if can_resume else "start it again",
        "finished": looking,
        "failed": f"resume it, or {looking}" if can_resume else "start it again",
        "vanished": "resume it, to go on from its last checkpoint" if can_resume else "start it again",
    }[word]
    if is_silent:
        after = "wait, or end its process"
    elif wish:
        after = "it takes a moment"
    said = " ".join(reason.split()).rstrip(".")  # a trainer may fail in several lines
    return Seen(run, word, said, after, wish, status, is_silent)


def _is_there(path: Path) -> bool:
    """Whether it is there for us: what we may not see is not."""
    try:
        return path.exists()
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _began(run: Run) -> float:
    """When it was asked for or began, in seconds since 1970; 0 where there is no run."""
    for file in (run.launch_file, run.config_file, run.status_file):
        try:
            return file.stat().st_mtime
        except OSError:
            continue
    return 0.0
