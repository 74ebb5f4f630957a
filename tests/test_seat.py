"""Locks: one trainer in a run, one run under the runs folder, and none is left by whoever died.

Run: pytest tests/test_seat.py (about 10 s).
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_run import until

from train import seat
from train.runs import Run, RunError
from train.seat import at_work, hold, is_held, someone_works, who_works
from train.state import look

ROOT = Path(__file__).parents[1]
HOLDS = """
import sys, time
from pathlib import Path
from train.runs import Run
from train.seat import at_work
with at_work(Run(Path(sys.argv[1]))):
    print("at work", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PATCHLIGHT_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def others():
    """others(run): a process that is at work on it."""
    started = []

    def begin(run: Run) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLDS, str(run.root)]
        one = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(one)
        assert one.stdout.readline() == "at work\n"
        return one

    yield begin
    for one in started:
        one.kill()
        one.communicate()


def refusal(act, *words) -> str:
    with pytest.raises(RunError) as refused:
        act(*words)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def sit(run: Run) -> None:
    with at_work(run):
        pass


def test_who_is_at_work_holds_run_and_seat_and_leaves_nothing_held(runs):
    run = Run(runs / "a")
    assert who_works(runs) is None
    with at_work(run):
        assert is_held(run.lock_file)
        assert who_works(runs) == "a"
        assert (runs / ".at-work").read_text() == "a"
    assert is_held(run.lock_file) is False
    assert who_works(runs) is None
    assert {path.name for path in runs.rglob("*")} == {"a", ".lock"}


def test_a_second_one_is_told_who(runs):
    with at_work(Run(runs / "a")):
        said = "a is at work, and one run at a time has the machine: stop it first, or wait until it ends"
        assert refusal(sit, Run(runs / "b")) == said
        assert refusal(sit, Run(runs / "deeper" / "b")) == said
        assert someone_works(runs) == said
        assert not (runs / "b").exists()
    sit(Run(runs / "b"))


def test_a_run_elsewhere_is_not_hindered(runs, tmp_path):
    with at_work(Run(runs / "a")), at_work(Run(tmp_path / "elsewhere")):
        assert who_works(runs) == "a"
        said = refusal(sit, Run(tmp_path / "elsewhere"))
        assert re.match(r"another trainer works in .*elsewhere: stop it first", said)
    assert not (tmp_path / ".lock").exists()


def test_a_link_into_the_runs_folder_is_under_it(runs, tmp_path):
    (runs / "a").mkdir(parents=True)
    (tmp_path / "link").symlink_to(runs / "a")
    with at_work(Run(tmp_path / "link")):
        assert who_works(runs) == "a"


def test_the_seat_is_given_back_where_the_run_itself_is_taken(runs):
    run = Run(runs / "a")
    lock = hold(run)
    assert "another trainer works in" in refusal(sit, run)
    assert who_works(runs) is None
    lock.release()
    sit(run)


def test_an_error_at_work_gives_both_back(runs):
    with pytest.raises(ZeroDivisionError), at_work(Run(runs / "a")):
        _ = 1 / 0
    assert who_works(runs) is None
    sit(Run(runs / "a"))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_a_killed_process_holds_nothing_from_that_moment(runs, others):
    run = Run(runs / "a")
    one = others(run)
    assert (is_held(run.lock_file), who_works(runs)) == (True, "a")
    assert refusal(sit, Run(runs / "b")).startswith("a is at work")
    one.kill()
    one.wait()
    assert is_held(run.lock_file) is False
    assert run.lock_file.exists()  # stale
    assert (runs / ".at-work").read_text() == "a"  # stale too
    assert who_works(runs) is None
    sit(Run(runs / "b"))
    assert not (runs / ".at-work").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="Windows has no SIGSTOP")
def test_a_stopped_process_goes_on_holding(runs, others):
    one = others(Run(runs / "a"))
    one.send_signal(signal.SIGSTOP)
    assert who_works(runs) == "a"
    assert refusal(sit, Run(runs / "b")).startswith("a is at work")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_the_lock_dies_with_the_process_though_a_child_of_it_lives(runs):
    """As where a trainer started another program: it must not inherit the lock."""
    code = HOLDS.replace(
        "    time.sleep(60)",
        "    import os, signal, subprocess\n"
        "    sleeps = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "    print(subprocess.Popen(sleeps, stdout=subprocess.DEVNULL).pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)",
    )
    command = [sys.executable, "-c", code, str(runs / "a")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=50, check=False)
    assert done.stdout.startswith("at work")
    assert who_works(runs) is None
    os.kill(int(done.stdout.split()[-1]), signal.SIGTERM)  # it was alive all the while


def test_of_twenty_who_come_at_once_one_is_let_in(runs):
    gate, inside, most, refused = threading.Barrier(20), [], [], []

    def come(number: int) -> None:
        gate.wait()
        try:
            with at_work(Run(runs / f"r{number}")):
                inside.append(number)
                most.append(len(inside))
                time.sleep(seat._PATIENCE_SECONDS + 0.5)
                inside.remove(number)
        except RunError as error:
            refused.append(str(error))

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(come, range(20)))
    assert most == [1]
    assert len(refused) == 19
    assert all(re.match(r"r\d+ is at work, and ", said) for said in refused), refused
    assert who_works(runs) is None


def test_asking_is_never_taken_for_working(runs):
    """A page asks every second, for every session: none may see another one's question as a trainer."""
    run = Run(runs / "a")
    sit(run)
    answers, end = [], time.monotonic() + 0.5

    def ask(_: int) -> None:
        while time.monotonic() < end:
            answers.append((is_held(run.lock_file), who_works(runs)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert len(answers) > 100
    assert set(answers) == {(False, None)}


def test_asking_never_keeps_a_trainer_out(runs):
    run, end = Run(runs / "a"), time.monotonic() + 1.5

    def ask(_: int) -> None:
        while time.monotonic() < end:
            is_held(run.lock_file)
            is_held(runs / ".lock")

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        sat = 0
        while time.monotonic() < end:
            sit(run)
            sat += 1
        for each in asking:
            each.result()
    assert sat > 5


def test_asking_where_nothing_is_makes_nothing(runs):
    assert is_held(runs / "a" / ".lock") is False
    assert who_works(runs) is None
    assert not runs.exists()


def test_the_way_of_windows_gives_the_same_answers(runs):
    run = Run(runs / "a")
    assert seat._is_held_alone(run.lock_file) is False
    assert not runs.exists()
    with at_work(run):
        assert seat._is_held_alone(run.lock_file) is True
    assert seat._is_held_alone(run.lock_file) is False
    sit(run)  # and it let go again


def test_a_lock_that_cannot_be_opened_is_not_known(runs):
    (runs / ".lock").mkdir(parents=True)
    assert is_held(runs / ".lock") is None


def test_between_the_last_word_and_the_door_nobody_is_invented(runs, monkeypatch):
    """The name is taken away a moment before the lock is: whoever asks then waits, and hears None."""
    monkeypatch.setattr(seat, "_NAME_SECONDS", 5.0)
    run, answers = Run(runs / "a"), []
    with at_work(run):
        (runs / ".at-work").unlink()
        asking = threading.Thread(target=lambda: answers.append(who_works(runs)))
        asking.start()
        time.sleep(0.1)
    asking.join()
    assert answers == [None]


def test_without_a_name_somebody_is_at_work_all_the_same(runs, monkeypatch):
    monkeypatch.setattr(seat, "_NAME_SECONDS", 0.1)
    with at_work(Run(runs / "a")):
        (runs / ".at-work").unlink()
        assert who_works(runs) == "another run"
        assert someone_works(runs).startswith("another run is at work")
        (runs / ".at-work").write_bytes(b"\xff\xfe")
        assert who_works(runs)


def test_halves_of_files_that_a_killed_trainer_left_are_taken_away(runs):
    run = Run(runs / "a")
    for folder in (run.root, run.root / "checkpoints"):
        folder.mkdir(parents=True)
        (folder / ".status.json.1-2.part").touch()
        (folder / "mine.part").touch()
    hold(run).release()
    assert {path.name for path in run.root.rglob("*")} == {".lock", "checkpoints", "mine.part"}


def test_a_runs_folder_that_cannot_be_is_an_error_of_the_system(runs):
    runs.touch()
    with pytest.raises(OSError, match="File exists"):
        sit(Run(runs / "a"))


def test_looking_tells_what_the_seat_tells(runs, others):
    run = Run(runs / "a")
    one = others(run)
    run.config_file.write_text("{}")
    assert look(run).word == "running"
    one.kill()
    one.wait()
    assert until(lambda: look(run).word == "vanished", 0.5)
