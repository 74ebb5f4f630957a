"""A run that is killed, again and again, ends as one that nobody touched, to the bit.

Run: pytest tests/test_kill.py (about 20 s: two kills); pytest -m slow tests/test_kill.py (ten, about 90 s)
"""

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_run import as_flags, differing, small, state_of, write_pictures

import vit
from train import resuming
from train.__main__ import main
from train.loop import resume, start
from train.resuming import load_resume
from train.runs import Run, read_metrics, read_status

ROOT = Path(__file__).parents[1]
INTERVAL = 5  # steps from one checkpoint to the next

# `python -m train` that sends itself SIGKILL where a checkpoint is written: with half of its bytes on the
# disk, or before or after one of the renames that follow.
KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
from train import resuming
from train.__main__ import main

place, left = sys.argv[1], int(sys.argv[2])
replace, write_through = Path.replace, resuming._write_through

def reach(name):
    global left
    left -= name == place
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def halves(file, data):
    file.write(data[:len(data) // 2])
    file.flush()
    reach("half")
    file.seek(0)
    write_through(file, data)

def renames(self, target):
    name = Path(target).name
    reach("before " + name)
    replace(self, target)
    reach("after " + name)

resuming._write_through, Path.replace = halves, renames
sys.exit(main(sys.argv[3:]))
"""
PLACES = [
    "half",
    "before .resume-ready.safetensors",
    "before resume.prev.safetensors",
    "after resume.prev.safetensors",  # there is no newest one now
    "after resume.safetensors",
    "before last.safetensors",
    "after last.safetensors",
]

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return write_pictures(tmp_path / "pictures")


def quiet(_: str) -> None:
    pass


def last_step_shown(run: Run) -> int:
    rows, status = read_metrics(run), read_status(run)
    return max(rows[-1]["step"] if rows else 0, status.step if status else 0)


def steps_resumed_from(run: Run) -> list[int]:
    return [int(step) for step in re.findall(r"Resuming from step (\d+)", run.log_file.read_text())]


def kill_while_saving(run: Run, words: list[str], place: str, count: int) -> None:
    """Until it comes to that place of its checkpoints for the count-th time."""
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, place, str(count), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr


def kill_at(run: Run, words: list[str], step: int, wait_seconds: float) -> None:
    """Some moment after it has shown that step."""
    with subprocess.Popen(
        [sys.executable, "-m", "train", *words], cwd=ROOT, stdout=subprocess.DEVNULL
    ) as one:
        try:
            end = time.monotonic() + 120
            while last_step_shown(run) < step and time.monotonic() < end and one.poll() is None:
                time.sleep(0.003)
            time.sleep(wait_seconds)
        finally:
            one.kill()
    assert one.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("kills", "epochs"), [(2, 6.0), pytest.param(10, 24.0, marks=pytest.mark.slow)], ids=["two", "ten"]
)
def test_a_run_killed_at_random_moments_ends_as_one_never_touched(pictures, tmp_path, kills, epochs):
    untouched, killed = Run(tmp_path / "untouched"), Run(tmp_path / "killed")
    flags = as_flags(small(pictures, epochs=epochs, evaluations=4, snapshots=6, dropout=0.1, cutmix=0.5))
    assert main(["run", *flags, "--out", str(untouched.root)]) == 0

    draw = random.Random(3)
    places = draw.sample(PLACES, k=min(len(PLACES), kills // 2))
    shown = []
    for kill in range(kills):
        words = ["run", *(flags if kill == 0 else ["--resume"]), "--out", str(killed.root)]
        if kill % 2:
            kill_while_saving(killed, words, places[kill // 2], draw.randint(1, 3))
        else:
            step = (shown[-1] if shown else INTERVAL) + draw.randint(1, 12)
            kill_at(killed, words, step, draw.uniform(0, 0.03))
        shown.append(last_step_shown(killed))
    assert main(["run", "--resume", "--out", str(killed.root)]) == 0

    resumed = steps_resumed_from(killed)
    assert len(resumed) == kills
    for seen, step in zip(shown, resumed, strict=True):
        assert 0 < step <= seen <= step + INTERVAL, (places, shown, resumed)
    assert differing(state_of(untouched), state_of(killed)) == []
    assert load_resume(killed)[1]["step"] == load_resume(untouched)[1]["step"] == epochs * 9
    assert vit.load(killed.checkpoint("last"))[1].provenance["step"] == epochs * 9
    assert read_status(killed).state == "finished"
    assert not list(killed.root.rglob("*.part"))  # of those whom it caught writing


class Killed(BaseException):
    """Stands for SIGKILL where a process of its own would only take time: nothing in the code catches it."""


@pytest.mark.parametrize("name", ["config.json", "attention.npz", "last.safetensors", "resume.safetensors"])
def test_a_run_killed_before_its_first_checkpoint_begins_anew(pictures, tmp_path, monkeypatch, name):
    untouched, run = Run(tmp_path / "untouched"), Run(tmp_path / "run")
    start(untouched, small(pictures), say=quiet)
    replace = Path.replace

    def replace_or_die(self, target):
        if Path(target).name == name and name != "config.json":
            raise Killed
        replace(self, target)
        if Path(target).name == name:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace_or_die)
        with pytest.raises(Killed):
            start(run, small(pictures), say=quiet)
    assert resume(run, say=quiet).state == "finished"
    assert steps_resumed_from(run) == [0]
    assert differing(state_of(untouched), state_of(run)) == []


OFTEN = pytest.mark.slow  # each is two runs: of the eight cases four stand for all


@pytest.mark.parametrize(
    ("name", "time_of_death"),
    [
        ("best.safetensors", "before"),
        pytest.param("best.safetensors", "after", marks=OFTEN),
        pytest.param("epoch-0002.safetensors", "before", marks=OFTEN),
        ("epoch-0002.safetensors", "after"),
        ("last.safetensors", "before"),
        pytest.param("last.safetensors", "after", marks=OFTEN),
        pytest.param("resume.safetensors", "before", marks=OFTEN),
        ("resume.safetensors", "after"),
    ],
)
def test_a_run_killed_in_its_last_checkpoint_still_ends_with_its_last_weights(
    pictures, tmp_path, monkeypatch, name, time_of_death
):
    untouched, run = Run(tmp_path / "untouched"), Run(tmp_path / "run")
    config = small(pictures, evaluations=1, keep_every=1.0)  # one evaluation: best is of the last step
    start(untouched, config, say=quiet)
    replace = Path.replace

    def replace_or_die(self, target):
        last = Path(target).name == name and last_step_shown(run) >= 17
        if last and time_of_death == "before":
            raise Killed
        replace(self, target)
        if last:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace_or_die)
        with pytest.raises(Killed):
            start(run, config, say=quiet)
    assert resume(run, say=quiet).state == "finished"
    assert differing(state_of(untouched), state_of(run)) == []
    for kept in ("last", "best", "epoch-0002"):
        assert vit.load(run.checkpoint(kept))[1].provenance["step"] == 18


def test_a_damaged_last_checkpoint_costs_one_interval(pictures, tmp_path, monkeypatch):
    untouched, run = Run(tmp_path / "untouched"), Run(tmp_path / "run")
    start(untouched, small(pictures), say=quiet)

    def die_at_the_third(file, data):
        if last_step_shown(run) >= 12:
            raise Killed
        write_through(file, data)

    write_through = resuming._write_through
    with monkeypatch.context() as patched:
        patched.setattr(resuming, "_write_through", die_at_the_third)
        with pytest.raises(Killed):
            start(run, small(pictures), say=quiet)
    path = run.checkpoint("resume")
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    said = []
    assert resume(run, say=said.append).state == "finished"
    told = [line for line in said if "Fell back to the checkpoint before" in line]
    assert len(told) == 1
    assert "resume.safetensors" in told[0]
    assert steps_resumed_from(run) == [6]  # checkpoints were at 5, 6 and 10
    assert differing(state_of(untouched), state_of(run)) == []
