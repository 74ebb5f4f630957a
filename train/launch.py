"""Starts, pauses, resumes, stops and deletes runs from outside the trainer, which is a process of its own.

    run = start(preset("demo"), "demo")          # runs/demo-1, at work by now
    pause(run); resume(run); stop(run)           # wishes: its status says when they are done
    resume(run)                                  # a stopped, failed or vanished one: a new process goes on
    delete(run); again(run)

The trainer is detached, in a session of its own and at low priority: it outlives whoever started it. One run
at a time is at work under a runs folder (train/seat.py). Everything that cannot be done is a RunError of one
sentence. `visitor` is who asks, through a page (train/rights.py); None is whoever has the machine.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import asdict, fields, replace
from pathlib import Path

from filelock import FileLock, Timeout  # torch brings it

import train
from train.child import be_nice, device_kind
from train.config import PRESETS, TrainConfig, as_flags
from train.needs import count_pictures
from train.rights import Visitor, limited, may_all, require_all, require_start, require_stop, visitor_of
from train.runs import ACTIVE, Run, RunError, Status, last_status, read_config, write_json
from train.seat import is_held, someone_works, who_works
from train.state import Seen, config_of, find_runs, look, look_at_all, require_plain
from vit.files import folder_bytes, named_folder, runs_folder

PUBLIC_FOLDER_MB = 200  # what the ended runs of visitors may hold together on a public host
_STARTED_SECONDS = 60.0  # until a new process holds its run's lock: one, but for a loaded machine
_LEAVING_SECONDS = 5.0
_TURN_SECONDS = 5.0  # that one who starts a run waits while another one does: then it is known which
_STARTING, _DELETED = ".starting", ".deleted-"


def start(config: TrainConfig, preset_name: str, *, name: str = "", visitor: Visitor | None = None) -> Run:
    """Start a new run under the runs folder; `name` is by default the preset's with a number."""
    require_start(visitor, preset_name, config)
    if not may_all(visitor):
        if name:
            raise RunError("on this public page a run cannot be named")
        config = limited(config)
    if name:
        require_plain(name)
    try:  # before anything is written
        if config.data not in ("cifar10", "patterns"):
            config = replace(config, data=str(named_folder(config.data, Path()).resolve()))
        words = as_flags(config, preset_name, device_kind(config.device))
    except ValueError as error:
        raise RunError(str(error)) from error
    if config.data == "cifar10" and not count_pictures(config).is_here:
        raise RunError("CIFAR-10 is not on this machine: `python -m vit data --split all` fetches it")
    folder = runs_folder().resolve()
    with _alone(folder):
        if not may_all(visitor):
            _make_room(folder)
        run = _new_run(folder, preset_name, name)
        mark = visitor.mark if visitor and not may_all(visitor) else ""
        told = {"preset": preset_name, "config": asdict(config), "visitor": mark}
        try:
            write_json(run.launch_file, told)
        except OSError:
            shutil.rmtree(run.root, ignore_errors=True)  # else a folder is left that nobody sees
            raise
        _launch(run, words, Status())
    return run


def resume(run: Run, *, visitor: Visitor | None = None) -> None:
    """Let a paused run go on; start one that is over again from its last checkpoint."""
    require_all(visitor, "resume a run")
    seen = look(run)
    if seen.word == "paused" or seen.wish == "pause":
        run.pause_file.unlink(missing_ok=True)
        return
    if seen.word == "finished":
        raise RunError(f"{run.name} is finished: start it again for a new run with its settings")
    if seen.is_active:
        raise RunError(f"{run.name} is {seen.word}: there is nothing to resume")
    if not run.is_begun:
        raise RunError(f"{run.name} ended before it began: start it again")
    run = Run(run.root.resolve())  # the trainer is started in another folder
    with _alone(_folder_of(run)):
        look(run)  # it may have been deleted while others had their turn
        for asked in (run.stop_file, run.pause_file):
            asked.unlink(missing_ok=True)
        _launch(run, ["--resume"], seen.status)


def again(run: Run, *, name: str = "", visitor: Visitor | None = None) -> Run:
    """Start a new run with the settings of this one."""
    config, preset_name = settings(run)
    return start(config, preset_name, name=name, visitor=visitor)


def pause(run: Run, *, visitor: Visitor | None = None) -> None:
    """Ask a run to wait after its step, with a checkpoint kept; it keeps its memory."""
    require_all(visitor, "pause a run")
    seen = _active(run, "pause")
    if seen.word == "paused" and seen.wish != "resume":
        raise RunError(f"{run.name} is paused already")
    _ask(run.pause_file)


def stop(run: Run, *, visitor: Visitor | None = None) -> None:
    """Ask a run to end after its step, with a checkpoint kept."""
    require_stop(visitor, run)
    _active(run, "stop")
    _ask(run.stop_file)


def kill(run: Run, *, visitor: Visitor | None = None) -> None:
    """End the process of a run that gives no sign: what came after its last checkpoint is lost."""
    require_stop(visitor, run)
    seen = _active(run, "end")
    pid = seen.status.pid
    if seen.status.host not in ("", socket.gethostname()):
        raise RunError(f"{run.name} is trained on {seen.status.host}: end it there")
    if not is_held(run.lock_file) or type(pid) is not int or pid < 2:  # 0 and below are whole groups
        raise RunError(f"it is not known which process trains {run.name}: look again in a moment")
    try:
        os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
    except OSError as error:
        raise RunError(f"process {pid} cannot be ended: {error.strerror}") from error


def delete(run: Run, *, visitor: Visitor | None = None) -> None:
    """Delete a run that is not at work, with all that its folder holds."""
    require_all(visitor, "delete a run")
    look(run)  # before anything is written
    with _alone(_folder_of(Run(run.root.resolve())), or_beside=True):
        _delete(run)


def _delete(run: Run) -> None:
    seen = look(run)
    if seen.is_active:
        raise RunError(f"{run.name} is {seen.word}: stop it first")
    if is_held(run.lock_file):
        raise RunError(f"a trainer still holds {run.name}: try again in a moment")
    if not (run.launch_file.exists() or run.lock_file.exists() or last_status(run) or config_of(run)):
        raise RunError(f"{run.root} holds no run that this program made: it is left alone")
    if any(not other.root.is_symlink() for other in find_runs(run.root)):
        raise RunError(f"{run.root} holds other runs: delete them first")
    _remove(run)


def settings(run: Run) -> tuple[TrainConfig, str]:
    """(settings, preset) of a run. RunError where nothing is known of them, or they are another version's."""
    try:
        found = read_config(run)
    except RunError:
        try:
            found = json.loads(run.launch_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"the settings of {run.name} are not known: {error}") from error
    found = found if isinstance(found, dict) else {}
    told, known = found.get("config"), {field.name for field in fields(TrainConfig)}
    if not isinstance(told, dict) or set(told) - known:
        raise RunError(f"the settings of {run.name} are not those of this version")
    try:
        preset_name = found.get("preset")  # a label only: the settings are all told
        return TrainConfig(**told), preset_name if preset_name in tuple(PRESETS) else "fast"
    except ValueError as error:
        raise RunError(f"the settings of {run.name} cannot be used: {error}") from error


# ---- the process ----


def _launch(run: Run, words: list[str], before: Status) -> None:
    """Start the trainer, and wait until it holds the run or has said why it cannot."""
    now = time.time()
    told = replace(
        before, state="waiting", reason="", heartbeat=now, started=now, host=socket.gethostname(), pid=0,
        images_per_second=0.0, seconds_left=None,
    )  # fmt: skip
    write_json(run.status_file, asdict(told))
    command = [sys.executable, "-m", "train", "run", f"--out={run.root}", *words]
    detached = {"start_new_session": True}
    if os.name == "nt":
        flags = ("CREATE_NEW_PROCESS_GROUP", "DETACHED_PROCESS", "BELOW_NORMAL_PRIORITY_CLASS")
        detached = {"creationflags": sum(getattr(subprocess, flag) for flag in flags)}
    try:
        with run.log_file.open("ab") as log:
            said_before = log.tell()
            process = subprocess.Popen(
                command, cwd=Path(train.__file__).parents[1], env=_environment(run),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, **detached,
            )  # fmt: skip
    except (OSError, ValueError) as error:  # as of words that no command line can hold
        write_json(run.status_file, asdict(replace(told, state="failed", reason=f"no process: {error}")))
        raise RunError(f"the trainer cannot be started: {error}") from error
    be_nice(process.pid)
    # A process that ended stays in the system's list until somebody has waited for it.
    threading.Thread(target=process.wait, name=f"waits for {run.name}", daemon=True).start()
    end = time.monotonic() + _STARTED_SECONDS
    while process.poll() is None and time.monotonic() < end:
        now = last_status(run)
        if now and now.pid and now.state in ACTIVE:  # it says which process it is once it holds the run
            return
        if now and now.state == "waiting" and time.time() - now.heartbeat > 2:  # slow, but there
            write_json(run.status_file, asdict(replace(now, heartbeat=time.time())))
        time.sleep(0.05)
    if process.poll() is None:
        raise RunError(f"{run.name} is slow to start: look at it again in a minute")
    seen = look(run)
    if process.poll() is not None and seen.status.state == "waiting" and not is_held(run.lock_file):
        reason = _last_said(run, said_before) or f"its process ended at once, with code {process.returncode}"
        write_json(run.status_file, asdict(replace(told, state="failed", reason=reason)))
        raise RunError(reason)
    if seen.word == "failed":
        raise RunError(seen.reason)
    if not seen.is_active and seen.word not in ("stopped", "finished"):
        raise RunError(f"the trainer of {run.name} ended at once: its log says why")


def _last_said(run: Run, offset: int) -> str:
    """The last line of its log from there on, without the command that says it."""
    with run.log_file.open("rb") as log:
        log.seek(offset)
        lines = log.read().decode(errors="replace").split("\n")
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return line.removeprefix("python -m train run: ")


def _environment(run: Run) -> dict[str, str]:
    """Ours, with folders that mean the same from another place."""
    changed = {"PATCHLIGHT_RUNS": str(_folder_of(run))}
    for name in ("PATCHLIGHT_DATA", "PATCHLIGHT_CACHE"):
        if named := os.environ.get(name):
            changed[name] = str(named_folder(named, Path()).resolve())
    return os.environ | changed


# ---- folders ----


class _alone:
    """Nobody else starts or deletes a run in this folder meanwhile, and none is at work. RunError otherwise.

    `or_beside`: one may be at work. What the file system refuses inside is a RunError too.
    """

    def __init__(self, folder: Path, or_beside: bool = False):
        self.folder, self.lock, self.or_beside = folder, FileLock(folder / _STARTING), or_beside

    def __enter__(self):
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock.acquire(timeout=_TURN_SECONDS)
        except Timeout as error:
            raise RunError("another run is just being started: look again in a moment") from error
        except OSError as error:
            raise self._refused(error) from error
        if not self.or_beside and _is_taken(self.folder):
            self.lock.release()
            raise RunError(someone_works(self.folder))

    def __exit__(self, kind, error, _):
        self.lock.release()
        if isinstance(error, OSError):
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> RunError:
        return RunError(f"no run can be started in {self.folder}: {error.strerror or error}")


def _is_taken(folder: Path) -> bool:
    """Whether a run is at work; one that has said its last word is given a moment to go."""
    end = time.monotonic() + _LEAVING_SECONDS
    while name := who_works(folder):
        try:
            is_leaving = not look(Run(folder / name)).is_active
        except RunError:
            is_leaving = False
        if not is_leaving or time.monotonic() > end:
            return True
        time.sleep(0.1)
    return False


def _folder_of(run: Run) -> Path:
    """The runs folder, for a run that lies under it; else the folder that the run lies in."""
    folder = runs_folder().resolve()
    return folder if folder in run.root.parents else run.root.parent


def _ask(file: Path) -> None:
    try:
        file.touch()
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror or error}") from error


def _new_run(folder: Path, preset_name: str, name: str) -> Run:
    number = 1
    while True:
        run = Run(folder / (name or f"{preset_name}-{number}"))
        try:
            run.root.mkdir()
            return run
        except FileExistsError as error:
            if name:
                raise RunError(f"there is a run {name} already: choose another name") from error
            number += 1


def _active(run: Run, what: str) -> Seen:
    seen = look(run)
    if not seen.is_active:
        raise RunError(f"{run.name} is {seen.word}: there is nothing to {what}")
    return seen


def _make_room(folder: Path) -> None:
    """Delete the oldest ended runs of visitors until the rest leave room for one more."""
    ended = [seen.run for seen in look_at_all(folder) if not seen.is_active and visitor_of(seen.run)]
    sizes = {run: folder_bytes(run.root) for run in ended}
    for run in reversed(ended):
        if sum(sizes.values()) <= PUBLIC_FOLDER_MB * 1e6 / 2:
            return
        _remove(run)
        del sizes[run]


def _remove(run: Run) -> None:
    """First out of sight, in one step: nobody meets half a run."""
    try:
        if run.root.is_symlink():
            run.root.unlink()
            return
        root = run.root.resolve()
        mine = root.rename(root.with_name(f"{_DELETED}{uuid.uuid4().hex[:12]}"))
    except OSError as error:
        raise RunError(f"{run.name} cannot be deleted: {error.strerror or error}") from error
    for aside in root.parent.glob(f"{_DELETED}{'[0-9a-f]' * 12}"):  # and what another one was killed over
        shutil.rmtree(aside, ignore_errors=True)  # two who delete meet here
    if mine.exists():
        raise RunError(f"{run.name} is deleted, but files of it are left in {mine}")
