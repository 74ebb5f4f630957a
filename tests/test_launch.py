"""Trainers as processes of their own: started, paused, resumed, stopped, killed, deleted, one at a time.

Run: pytest tests/test_launch.py (about a minute: each trainer takes 3 s to import torch);
pytest -m slow tests/test_launch.py (about 3 minutes: twenty starts and stops).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock
from small_run import as_flags, small, until, write_pictures

from train import launch, loop, state
from train.__main__ import main
from train.child import NICENESS
from train.config import TrainConfig
from train.launch import again, delete, kill, pause, resume, settings, start, stop
from train.runs import Run, RunError, Status, last_status, read_config, read_metrics, write_json
from train.seat import at_work, is_held, who_works
from train.state import find_runs, look

ROOT = Path(__file__).parents[1]
PATIENCE = 90  # seconds for what takes five on a free machine
FILES = {"config.json", "status.json", "metrics.jsonl", "log.txt", "attention.npz", "checkpoints",
         "launch.json", ".lock"}  # fmt: skip
CHECKPOINTS = {f"{name}.safetensors" for name in ("last", "best", "resume", "resume.prev")}

KILLED_LAUNCHER = """
import json, os, signal, sys
from train import launch
from train.config import TrainConfig
launch.device_kind = lambda device: "cpu"  # to ask torch would only take time
run = launch.start(TrainConfig(**json.loads(sys.argv[1])), "demo")
print(run.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

posix = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has neither SIGKILL nor sessions")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def environment(patch, folder: Path) -> Path:
    """An empty runs folder, at home; it does not exist yet."""
    for name in ("SPACE_ID", "PATCHLIGHT_PUBLIC", "PATCHLIGHT_DATA", "RANK"):
        patch.delenv(name, raising=False)
    patch.setenv("PATCHLIGHT_RUNS", str(folder / "runs"))
    patch.setenv("PATCHLIGHT_CACHE", str(folder))
    patch.setenv("OMP_NUM_THREADS", "1")
    return folder / "runs"


@contextmanager
def nobody_left(runs: Path):
    """Ends what a test that failed may leave at work."""
    try:
        yield runs
    finally:
        for run in find_runs(runs):
            if look(run).is_active and is_held(run.lock_file):
                kill(run)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    with nobody_left(environment(monkeypatch, tmp_path)) as folder:
        yield folder


@pytest.fixture
def stubbed(monkeypatch):
    """Instead of a process: what it would be. It "ends" at once, with code 3."""
    asked = []

    def popen(command, **options):
        asked.append(SimpleNamespace(command=command, **options))
        return SimpleNamespace(pid=os.getpid(), returncode=3, poll=lambda: 3, wait=lambda: 3)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(launch, "be_nice", lambda pid: None)
    return asked


def long(pictures: Path, **changes) -> TrainConfig:
    """A run that goes on until it is ended."""
    return small(pictures, **{"epochs": 1e5, "log_steps": 20, "checkpoint_steps": 50} | changes)


def refusal(act, *words, **options) -> str:
    with pytest.raises(RunError) as refused:
        act(*words, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def wait_for(run: Run, word: str) -> state.Seen:
    assert until(lambda: look(run).word == word, PATIENCE), (look(run), run.log_file.read_text())
    return look(run)


def wait_for_step(run: Run, step: int) -> None:
    assert until(lambda: look(run).word == "running" and look(run).status.step >= step, PATIENCE), look(run)


def wait_until_free(run: Run) -> None:
    assert until(lambda: is_held(run.lock_file) is False and who_works(run.root.parent) is None, PATIENCE)


def made(folder: Path, name: str, told: str = "stopped", **changes) -> Run:
    """An ended run, as far as its files tell."""
    run = Run(folder / name)
    run.root.mkdir(parents=True)
    config = asdict(TrainConfig(**changes))
    write_json(run.config_file, {"config": config, "preset": "fast", "data": {}, "resolved": {}})
    write_json(run.status_file, asdict(Status(told, heartbeat=time.time())))
    run.lock_file.touch()
    return run


def names_in(folder: Path) -> set[str]:
    """All but the empty file by which those who start and delete take turns."""
    return {path.name for path in folder.iterdir()} - {".starting"}


# --- one run, from its start to its end -------------------------------------------------------------------


@pytest.fixture(scope="module")
def story(pictures, tmp_path_factory):
    """What was seen of a run that was paused, killed, resumed, hung and deleted: told once, asked below."""
    with (
        pytest.MonkeyPatch.context() as patch,
        nobody_left(environment(patch, tmp_path_factory.mktemp("story"))) as runs,
    ):
        yield told_story(patch, pictures, runs)


def told_story(patch, pictures: Path, runs: Path) -> SimpleNamespace:
    told = SimpleNamespace(runs=runs)

    # Started; a pause is asked for before it has imported torch.
    began = time.monotonic()
    told.run = run = start(long(pictures), "demo", name="life")
    told.start_seconds = time.monotonic() - began
    told.at_first, told.pid = look(run), look(run).status.pid
    told.priority, told.session = os.getpriority(os.PRIO_PROCESS, told.pid), os.getsid(told.pid)
    told.refused_waiting = {act.__name__: refusal(act, run) for act in (resume, delete)}
    told.refused_second = refusal(start, long(pictures), "demo")
    pause(run)
    told.pausing = look(run)
    told.paused = wait_for(run, "paused")
    told.refused_paused = {act.__name__: refusal(act, run) for act in (pause, delete)}
    told.refused_start_paused = refusal(start, long(pictures), "demo")
    time.sleep(0.3)
    told.steps_while_paused = look(run).status.step - told.paused.status.step
    resume(run)
    told.resuming = look(run)
    wait_for_step(run, told.paused.status.step + 10)
    pause(run)
    told.paused_again = wait_for(run, "paused")
    resume(run)
    wait_for_step(run, told.paused_again.status.step + 1)

    # Killed from one moment to the next.
    told.log_while_running = run.log_file.read_text()
    os.kill(told.pid, signal.SIGKILL)
    killed = time.monotonic()
    told.vanished = wait_for(run, "vanished")
    told.vanished_seconds, told.silence = (
        time.monotonic() - killed,
        time.time() - told.vanished.status.heartbeat,
    )
    told.no_zombie = until(lambda: is_reaped(told.pid), PATIENCE)
    told.metrics = [row["step"] for row in read_metrics(run)]
    told.refused_vanished = {act.__name__: refusal(act, run) for act in (pause, stop, kill)}
    run.stop_file.touch()  # a wish that nobody is left to follow
    run.pause_file.touch()

    # Resumed; it hangs, and is ended.
    resume(run)
    told.resumed = look(run)
    wait_for_step(run, told.vanished.status.step + 1)
    pid = look(run).status.pid
    told.resumed_log = run.log_file.read_text().removeprefix(told.log_while_running)
    os.kill(pid, signal.SIGSTOP)
    with patch.context() as patched:
        patched.setattr(state, "VANISHED_SECONDS", 0.7)
        until(lambda: look(run).is_silent, 5)
        told.hung = look(run)
        told.refused_hung = {act.__name__: refusal(act, run) for act in (resume, delete)}
        kill(run)
        told.ended = wait_for(run, "vanished")
    told.no_zombie &= until(lambda: is_reaped(pid), PATIENCE)

    told.files, told.checkpoints = names_in(run.root), names_in(run.root / "checkpoints")
    told.steps = [row["step"] for row in read_metrics(run)]
    delete(run)
    told.left = names_in(runs)
    return told


def is_reaped(pid: int) -> bool:
    """Whether a child of ours is gone from the system's list; it would be found as a zombie."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


@posix
def test_a_start_returns_soon_and_says_who_works(story):
    assert story.run.root == story.runs.resolve() / "life"
    assert (story.at_first.word, story.at_first.reason) == ("waiting", "opening its pictures and its model")
    assert story.at_first.status.pid > 1
    assert story.start_seconds < 20


@posix
def test_the_trainer_is_nice_and_in_a_session_of_its_own(story):
    assert story.priority == NICENESS == 10
    assert story.session == story.pid != os.getsid(0)


@posix
def test_what_is_asked_before_torch_is_there_is_not_lost(story):
    assert (story.pausing.status.state, story.pausing.wish) == ("waiting", "pause")
    assert story.paused.wish == ""
    assert story.paused.status.step <= 1


@posix
def test_a_paused_run_stands_still_and_goes_on(story):
    assert story.steps_while_paused == 0
    assert story.refused_paused["pause"] == "life is paused already"
    assert (story.resuming.word, story.resuming.wish) in (("paused", "resume"), ("running", ""))
    assert story.paused_again.status.step > story.paused.status.step
    assert story.paused_again.status.pid == story.pid  # the same process all the while


@posix
def test_a_killed_trainer_is_known_at_once(story):
    assert story.vanished_seconds < 2
    assert story.silence < state.VANISHED_SECONDS  # its heart had only just beaten
    assert "killed, or the machine went down" in story.vanished.reason
    assert story.vanished.next == "resume it, to go on from its last checkpoint"


@posix
def test_a_resumed_run_forgets_old_wishes_and_goes_on_from_a_checkpoint(story):
    assert (story.resumed.word, story.resumed.wish) == ("waiting", "")
    assert story.resumed.status.step == story.vanished.status.step  # as far as it had come
    assert "Resuming from step " in story.resumed_log
    assert story.steps == sorted(set(story.steps))
    assert story.steps[: len(story.metrics)] == story.metrics  # cut back, and written again
    assert story.ended.status.step > story.vanished.status.step


@posix
def test_a_hanging_trainer_is_silent_and_can_be_ended(story):
    assert (story.hung.word, story.hung.is_silent) == ("running", True)
    assert story.hung.reason.startswith("its process is there, but has given no sign for ")
    assert story.hung.next == "wait, or end its process"
    assert story.ended.word == "vanished"


@posix
def test_what_cannot_be_done_now_is_said_in_a_sentence(story):
    assert story.refused_waiting == {
        "resume": "life is waiting: there is nothing to resume",
        "delete": "life is waiting: stop it first",
    }
    assert story.refused_paused["delete"] == "life is paused: stop it first"
    assert story.refused_hung == {
        "resume": "life is running: there is nothing to resume",
        "delete": "life is running: stop it first",
    }
    for act, what in (("pause", "pause"), ("stop", "stop"), ("kill", "end")):
        assert story.refused_vanished[act] == f"life is vanished: there is nothing to {what}"
    assert story.refused_second == story.refused_start_paused
    assert story.refused_second.startswith("life is at work, and one run at a time has the machine")


@posix
def test_nothing_but_the_known_files_is_left(story):
    assert story.no_zombie
    killed = {".reserve"}  # it kept room for a last word
    assert story.files - {"tensorboard"} == FILES | killed
    assert story.checkpoints <= CHECKPOINTS
    assert story.left == {".lock", ".at-work"}  # the last is of one that was killed, and stale
    assert who_works(story.runs) is None


# --- runs that end by themselves --------------------------------------------------------------------------


@posix
def test_a_run_whose_launcher_is_killed_finishes_and_is_started_again(pictures, runs):
    config = small(pictures, epochs=1.0, seed=5, cutmix=0.25, lr=1.234567890123e-3)
    command = [sys.executable, "-c", KILLED_LAUNCHER, json.dumps(asdict(config))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "demo-1\n")
    run = Run(runs / "demo-1")
    assert look(run).word == "waiting"
    assert settings(run) == (config, "demo")  # known before it begins
    finished = wait_for(run, "finished")
    assert finished.status.step == 9
    assert read_config(run)["config"] == asdict(config)
    assert refusal(resume, run) == "demo-1 is finished: start it again for a new run with its settings"
    assert refusal(stop, run) == "demo-1 is finished: there is nothing to stop"
    other = again(run)
    assert (other.name, settings(other)) == ("demo-2", (config, "demo"))
    assert look(other).is_active
    kill(other)
    wait_for(other, "vanished")
    assert refusal(resume, other) == "demo-2 ended before it began: start it again"
    assert look(other).next == "start it again"
    named = again(other, name="third")  # its settings are known from launch.json alone
    assert settings(named) == (config, "demo")
    kill(named)


def test_a_start_without_pictures_fails_with_the_trainers_sentence(runs, tmp_path):
    run = start(small(tmp_path / "nothing"), "demo")
    failed = wait_for(run, "failed")
    assert failed.reason.startswith("There is no folder ")
    assert str(tmp_path / "nothing") in failed.reason
    assert (failed.next, failed.is_active) == ("start it again", False)
    assert until(lambda: failed.reason in run.log_file.read_text(), PATIENCE)
    wait_until_free(run)
    delete(run)
    assert names_in(runs) == {".lock"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"stop_minutes": 0.01}, "stopped after 0.01 min, as its settings say"),
     ({"stop_mb": 1}, "stopped at 1 MB, as its settings say")],
)  # fmt: skip
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_run_ends_by_the_clock_and_by_its_size(pictures, tmp_path, monkeypatch, changes, reason, is_paused):
    environment(monkeypatch, tmp_path)
    run = Run(tmp_path / "elsewhere")
    run.root.mkdir()
    if "stop_mb" in changes:
        run.film_file.with_name("ballast").write_bytes(b"\0" * 1_000_000)
        monkeypatch.setattr(loop, "require_new", lambda run: None)
    if is_paused:
        write_json(run.status_file, asdict(Status("waiting")))
        run.pause_file.touch()
    ended = []
    thread = threading.Thread(
        target=lambda: ended.append(loop.start(run, long(pictures, **changes), say=lambda line: None))
    )
    thread.start()
    thread.join(30)
    run.stop_file.touch()
    thread.join(30)
    assert (ended[0].state, ended[0].reason) == ("stopped", reason)
    assert look(run).reason == reason
    assert run.checkpoint("last").exists()


# --- alone ------------------------------------------------------------------------------------------------


@posix
def test_of_twenty_starts_in_one_moment_one_wins(pictures, runs):
    gate = threading.Barrier(20)

    def come(_: int) -> Run | str:
        gate.wait()
        try:
            return start(long(pictures), "demo")
        except RunError as error:
            return str(error)

    with ThreadPoolExecutor(20) as pool:
        came = list(pool.map(come, range(20)))
    started = [found for found in came if isinstance(found, Run)]
    assert len(started) == 1
    refused, name = set(came) - set(started), started[0].name
    end = "stop it first, or wait until it ends"
    assert refused == {f"{name} is at work, and one run at a time has the machine: {end}"}
    assert find_runs() == started
    kill(started[0])


@posix
def test_a_run_of_the_command_line_has_the_seat_too(pictures, runs, tmp_path):
    config = long(pictures)
    command = [sys.executable, "-m", "train", "run", *as_flags(config), "--out", str(runs / "mine")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as one:
        try:
            assert until(lambda: who_works(runs) == "mine", PATIENCE)
            ended = made(runs, "ended")
            for act in (lambda: start(config, "demo"), lambda: resume(ended)):
                assert refusal(act).startswith("mine is at work, and one run at a time has the machine")
            assert names_in(runs) - {".at-work"} == {".lock", "mine", "ended"}
            # A run that lies elsewhere is nobody's business.
            elsewhere = ["run", *as_flags(replace(config, epochs=0.2)), "--out", str(tmp_path / "elsewhere")]
            assert main(elsewhere) == 0
            mine = Run(runs / "mine")
            assert until(mine.config_file.exists, PATIENCE)
            assert until(lambda: look(mine).word == "running", PATIENCE)
            stop(mine)  # what the page does, done to a run that it has not begun
            assert one.wait(PATIENCE) == 0
            assert look(mine).word == "stopped"
        finally:
            one.kill()
    assert who_works(runs) is None


def test_one_that_finds_the_seat_taken_after_all_says_by_whom(pictures, runs, monkeypatch):
    """Somebody at the command line was quicker by a moment than the process that the launcher started."""
    monkeypatch.setattr(launch, "_is_taken", lambda folder: False)
    with at_work(Run(runs / "mine")):
        said = refusal(start, long(pictures), "demo")
        assert said.startswith("mine is at work, and one run at a time has the machine")
    seen = look(Run(runs / "demo-1"))
    assert (seen.word, seen.reason, seen.next) == ("failed", said, "start it again")


def test_who_comes_while_another_starts_waits_for_its_turn(pictures, runs, stubbed, monkeypatch):
    runs.mkdir()
    monkeypatch.setattr(launch, "_TURN_SECONDS", 0.2)
    with FileLock(runs / ".starting"):
        said = refusal(start, long(pictures), "demo")
    assert said == "another run is just being started: look again in a moment"
    assert names_in(runs) == set()
    assert stubbed == []


def test_a_run_that_said_its_last_word_is_given_a_moment_to_go(pictures, runs, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "_launch", lambda run, words, before: started.append(run.name))
    leaving = made(runs, "leaving", "finished")
    sits = threading.Event()

    def leave() -> None:
        with at_work(leaving):
            sits.set()
            time.sleep(0.5)

    thread = threading.Thread(target=leave)
    thread.start()
    sits.wait()
    start(long(pictures), "demo")
    thread.join()
    assert started == ["demo-1"]
    monkeypatch.setattr(launch, "_LEAVING_SECONDS", 0.3)
    with at_work(leaving):
        assert refusal(start, long(pictures), "demo").startswith("leaving is at work")


# --- its folder is gone -----------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a folder in which files are open")
def test_a_trainer_ends_by_itself_when_its_folder_goes(pictures, runs, capsys):
    run, codes = Run(runs / "a"), []
    run.root.mkdir(parents=True)
    write_json(run.status_file, asdict(Status("waiting")))  # as who starts it for a page leaves it
    words = ["run", *as_flags(long(pictures)), "--out", str(run.root)]
    thread = threading.Thread(target=lambda: codes.append(main(words)))
    thread.start()
    try:
        wait_for_step(run, 20)
    finally:
        run.root.rename(runs.parent / "taken")  # as whoever deletes it by hand: nothing written may come back
        thread.join(PATIENCE)
    assert codes == [1]
    assert "was deleted or replaced while the run went on" in capsys.readouterr().out
    assert names_in(runs) == {".lock"}
    assert refusal(look, run) == "there is no run a (any more)"
    assert who_works(runs) is None


# --- again and again --------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_starts_and_stops_leave_nothing(pictures, runs, times):
    pids, threads = [], threading.active_count()
    for number in range(times):
        run = start(long(pictures), "demo", name=f"r{number}")
        pids.append(look(run).status.pid)
        time.sleep(number // 3 / 3)  # so that each is asked at another moment of its beginning
        stop(run)
        if number < 3:  # it is importing torch
            assert (look(run).status.state, look(run).wish) == ("waiting", "stop")
        assert wait_for(run, "stopped").reason == "stopped as asked"
    wait_until_free(run)
    assert len(set(pids)) == times
    assert until(lambda: all(is_reaped(pid) for pid in pids), PATIENCE)
    assert until(lambda: threading.active_count() <= threads)
    assert names_in(runs) == {".lock", *(f"r{number}" for number in range(times))}
    for run in find_runs():
        assert is_held(run.lock_file) is False
        assert names_in(run.root) - {"tensorboard", "metrics.jsonl"} == FILES - {"metrics.jsonl"}
        assert names_in(run.root / "checkpoints") <= CHECKPOINTS


# --- what a process is told, without one ------------------------------------------------------------------


def test_the_process_is_told_all_by_words_and_environment(pictures, runs, stubbed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHLIGHT_RUNS", "runs")
    monkeypatch.setenv("PATCHLIGHT_DATA", "some data")
    monkeypatch.setenv("PATCHLIGHT_CACHE", "~/some cache")
    refusal(start, small(Path("pictures here")), "demo")
    (asked,) = stubbed
    assert asked.command[:5] == [sys.executable, "-m", "train", "run", f"--out={runs.resolve()}/demo-1"]
    assert f"--data={tmp_path.resolve()}/pictures here" in asked.command
    assert asked.cwd == ROOT
    assert asked.env["PATCHLIGHT_RUNS"] == str(runs.resolve())
    assert asked.env["PATCHLIGHT_DATA"] == str(tmp_path.resolve() / "some data")
    assert asked.env["PATCHLIGHT_CACHE"] == str(Path.home() / "some cache")
    assert asked.stdin == asked.stdout == subprocess.DEVNULL
    assert settings(Run(runs / "demo-1"))[0].data == f"{tmp_path.resolve()}/pictures here"


@pytest.mark.parametrize("word", ["stopped", "failed", "running"])
@pytest.mark.parametrize("where", ["runs", "runs/deeper", "elsewhere"])
def test_a_run_named_from_here_is_resumed_from_anywhere(runs, stubbed, monkeypatch, tmp_path, word, where):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHLIGHT_RUNS", "runs")
    run = made(Path(where), "a", word)
    run.stop_file.touch()
    run.pause_file.touch()
    refusal(resume, run)
    (asked,) = stubbed
    assert asked.command[3:] == ["run", f"--out={tmp_path.resolve()}/{where}/a", "--resume"]
    # Below the runs folder it takes that one's seat; elsewhere it takes none of ours.
    assert asked.env["PATCHLIGHT_RUNS"] == str(tmp_path.resolve() / where.removesuffix("/deeper"))
    assert not run.stop_file.exists()
    assert not run.pause_file.exists()


def test_a_process_that_ends_at_once_has_failed_with_what_it_said(runs, stubbed, monkeypatch):
    run = made(runs, "a")
    run.log_file.write_text("2026-12-01 10:00:00  Stopped at step 3\n")
    assert refusal(resume, run) == "its process ended at once, with code 3"
    assert (look(run).word, look(run).reason) == ("failed", "its process ended at once, with code 3")
    popen = subprocess.Popen

    def speaks(command, **options):
        options["stderr"].write(b"Traceback\n  \xff\npython -m train run: its config.json is damaged\n\n")
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", speaks)
    assert refusal(resume, run) == "its config.json is damaged"
    assert look(run).reason == "its config.json is damaged"
    assert run.log_file.read_text(errors="replace").startswith("2026-12-01 10:00:00  Stopped at step 3\n")


def test_a_damaged_config_is_said_at_once(runs):
    run = made(runs, "a")
    run.config_file.write_text("{")
    said = refusal(resume, run)
    assert "config.json cannot be read" in said
    assert (look(run).word, look(run).reason) == ("failed", said)
    wait_until_free(run)


@pytest.mark.parametrize("python", ["/nowhere/python", ROOT])
def test_no_python_is_a_failed_run_with_a_reason(pictures, runs, monkeypatch, python):
    monkeypatch.setattr(sys, "executable", str(python))
    assert refusal(start, long(pictures), "demo").startswith("the trainer cannot be started: ")
    seen = look(Run(runs / "demo-1"))
    assert (seen.word, seen.reason[:12]) == ("failed", "no process: ")


# --- refused before anything is written -------------------------------------------------------------------


ODD_NAMES = [
    "../x",
    "..",
    ".",
    "/etc",
    "a/b",
    "CON",
    "nul.txt",
    "a\nb",
    "a" * 300,
    "läuf",
    "x.",
    ".x",
    " ",
    "a\0",
]


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_an_odd_name_is_refused(pictures, runs, stubbed, name, tmp_path):
    before = set(tmp_path.rglob("*"))
    assert "is not a name for a run: take up to 64 letters" in refusal(
        start, long(pictures), "demo", name=name
    )
    assert set(tmp_path.rglob("*")) == before
    assert stubbed == []


@pytest.mark.parametrize(
    ("preset_name", "changes", "said"),
    [
        ("../x", {}, "a preset is tutorial, fast, record, demo, not '../x'"),
        ("", {}, "a preset is "),
        ("demo", {"device": "quantum"}, "'quantum' is not a device"),
        ("demo", {"device": "cuda:99"}, "device 'cuda:99' is not on this machine"),
        ("demo", {"data": "a\0b"}, "embedded null byte"),
        ("demo", {"data": "x" * 300}, f"'{'x' * 60}' cannot be a folder"),
    ],
)
def test_impossible_settings_are_refused(pictures, runs, stubbed, preset_name, changes, said):
    assert refusal(start, replace(long(pictures), **changes), preset_name).startswith(said)
    assert not runs.exists()
    assert stubbed == []


def test_a_name_that_is_there_is_refused(pictures, runs, stubbed):
    made(runs, "a")
    (runs / "file").touch()
    (runs / "broken").symlink_to("nothing")
    for name in ("a", "file", "broken"):
        said = refusal(start, long(pictures), "demo", name=name)
        assert said == f"there is a run {name} already: choose another name"
    assert look(Run(runs / "a")).word == "stopped"
    made(runs, "demo-1")
    refusal(start, long(pictures), "demo")
    assert stubbed[0].command[4].endswith("/demo-2")


def test_a_runs_folder_that_cannot_be_is_said(pictures, runs, stubbed, monkeypatch):
    runs.touch()
    assert refusal(start, long(pictures), "demo") == f"no run can be started in {runs}: File exists"
    runs.unlink()

    def full(path, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launch, "write_json", full)
    assert (
        refusal(start, long(pictures), "demo") == f"no run can be started in {runs}: No space left on device"
    )
    monkeypatch.undo()


def test_a_wish_that_cannot_be_written_is_said(runs, monkeypatch):
    run = made(runs, "a", "running")

    def fails(path, **_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", fails)
    with FileLock(run.lock_file):
        for act in (pause, stop):
            assert refusal(act, run).endswith("cannot be written: Read-only file system")


@pytest.mark.parametrize("pid", [-1, 0, 1, 2.5, -4711])
def test_only_a_process_is_ever_killed(runs, monkeypatch, pid):
    """kill(-1) would end everything that is ours."""
    run, killed = made(runs, "a"), []
    monkeypatch.setattr(os, "kill", lambda *words: killed.append(words))
    write_json(run.status_file, asdict(Status("running", heartbeat=time.time(), pid=pid)))
    with FileLock(run.lock_file):
        assert "not known which process" in refusal(kill, run)
        write_json(
            run.status_file, asdict(Status("running", heartbeat=time.time(), pid=99, host="elsewhere"))
        )
        assert refusal(kill, run) == "a is trained on elsewhere: end it there"
    write_json(run.status_file, asdict(Status("waiting", heartbeat=time.time())))
    assert "not known which process" in refusal(kill, run)  # its process is only just being started
    run.lock_file.unlink()
    run.lock_file.mkdir()  # it cannot be told whether anybody holds it: that number may be another's by now
    write_json(run.status_file, asdict(Status("running", heartbeat=time.time(), pid=99)))
    assert "not known which process" in refusal(kill, run)
    assert killed == []


# --- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "the settings of a are not known: "),
        ("{", "the settings of a are not known: "),
        ("[" * 9999, "the settings of a are not known: "),
        ("[]", "the settings of a are not those of this version"),
        ("{}", "the settings of a are not those of this version"),
        ('{"config": []}', "the settings of a are not those of this version"),
        ('{"config": {"mood": 1}}', "the settings of a are not those of this version"),
        ('{"config": {"lr": -1}}', "the settings of a cannot be used: lr is from 1e-09 to 10, not -1"),
        ('{"config": {"lr": "high"}}', "the settings of a cannot be used: lr is a number, not 'high'"),
        ('{"config": {"init": ["small"]}}', "the settings of a cannot be used: init is a word"),
    ],
    ids=lambda text: str(text)[:30],
)
def test_settings_that_are_not_known_start_nothing(runs, stubbed, text, said):
    run = made(runs, "a")
    run.config_file.unlink()
    if text is not None:
        run.launch_file.write_text(text)
    for act in (settings, again):
        assert refusal(act, run).startswith(said)
    assert names_in(runs) == {"a"}
    assert stubbed == []


@pytest.mark.parametrize("preset_name", ["../x", "nonsense", "", None, ["demo"], {}, 3])
def test_a_preset_that_is_none_is_only_a_label(runs, stubbed, preset_name):
    run = made(runs, "a", data="patterns", lr=0.25)
    kept = read_config(run) | {"preset": preset_name}
    write_json(run.config_file, kept)
    assert settings(run) == (TrainConfig(data="patterns", lr=0.25), "fast")
    refusal(again, run)
    assert stubbed[0].command[4] == f"--out={runs.resolve()}/fast-1"


# --- deleting ---------------------------------------------------------------------------------------------


def test_delete_leaves_nothing_and_takes_leftovers_along(runs):
    run = made(runs, "a")
    run.checkpoint("last").parent.mkdir()
    run.checkpoint("last").touch()
    left, hers = runs / ".deleted-0123456789ab", runs / ".deleted-holidays"
    for folder in (left, hers):
        folder.mkdir()
        (folder / "file").touch()
    delete(run)
    assert names_in(runs) == {".deleted-holidays"}  # that name was never ours
    assert refusal(delete, run) == "there is no run a (any more)"


@pytest.mark.parametrize("name", ["starting", "running", "pausing", "paused", "stopping"])
def test_a_run_at_work_is_not_deleted(runs, name):
    run = made(runs, "a", name)
    with FileLock(run.lock_file):
        assert refusal(delete, run).endswith(": stop it first")
        for word in ("finished", "failed", "evaporated"):
            write_json(run.status_file, asdict(Status(word)))
            assert "a" in refusal(delete, run)
        run.status_file.write_text("{")
        assert refusal(delete, run) == "a is running: stop it first"
    delete(run)
    assert not run.root.exists()


def test_a_link_is_deleted_and_never_what_it_points_to(runs, tmp_path):
    far, near = made(tmp_path / "far", "a"), made(runs, "b")
    (runs / "link").symlink_to(far.root)
    delete(Run(runs / "link"))
    assert names_in(runs) == {"b"}
    (near.root / "inside").symlink_to(far.root)
    delete(near)
    assert names_in(runs) == set()
    assert names_in(far.root) == {"config.json", "status.json", ".lock"}
    (runs / "link").symlink_to(far.root)
    with FileLock(far.lock_file):
        write_json(far.status_file, asdict(Status("running", heartbeat=time.time())))
        assert refusal(delete, Run(runs / "link")).endswith("is running: stop it first")


def test_a_run_is_deleted_by_any_of_its_paths(runs, tmp_path, monkeypatch):
    run = made(runs, "a")
    made(runs, "b")
    monkeypatch.chdir(run.root)
    delete(Run(Path()))
    delete(Run(runs / ".." / "runs" / "b"))
    assert names_in(runs) == set()


def test_a_folder_that_only_looks_like_a_run_is_left_alone(runs, tmp_path):
    model = tmp_path / "model"  # as people fetch them
    model.mkdir()
    (model / "config.json").write_text('{"hidden_size": 768}')
    assert refusal(delete, Run(model)) == f"{model} holds no run that this program made: it is left alone"
    (model / "config.json").write_text("{")
    refusal(delete, Run(model))
    made(runs, "a")
    write_json(Run(runs).config_file, {})
    (runs / ".lock").touch()
    assert refusal(delete, Run(runs)) == f"{runs} holds other runs: delete them first"
    assert names_in(model) == {"config.json"}
    assert look(Run(runs / "a")).word == "stopped"


def test_the_most_damaged_run_can_be_deleted(runs):
    run = made(runs, "a")
    for file in (run.config_file, run.status_file):
        file.write_text("{")
    delete(run)
    asked = Run(runs / "b")  # its launcher was killed at once
    asked.root.mkdir()
    write_json(asked.launch_file, {})
    delete(asked)
    assert names_in(runs) == set()


def test_two_who_delete_do_not_hinder_each_other(runs):
    found = [made(runs, f"r{number}") for number in range(30)]
    for run in found:
        for number in range(10):
            (run.root / str(number)).touch()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(delete, found))
    assert names_in(runs) == set()


def test_one_that_cannot_be_deleted_is_still_there(runs, monkeypatch):
    run = made(runs, "a")

    def fails(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", fails)
    assert refusal(delete, run) == "a cannot be deleted: Permission denied"
    assert look(run).word == "stopped"


def test_one_deleted_meanwhile_cannot_be_asked(runs):
    for act in (pause, stop, kill, delete, resume):
        assert refusal(act, Run(runs / "gone")) == "there is no run gone (any more)"
    assert not runs.exists()
    assert last_status(Run(runs / "gone")) is None
