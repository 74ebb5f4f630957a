"""Between the wish for a run and its first step, and how long it still takes: what people are told meanwhile.

Run: pytest tests/test_waiting.py (some seconds). No trainer of its own.
"""

import os
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from train import launch, loop
from train.__main__ import main
from train.config import PRESETS, TrainConfig
from train.page.reading import columns_of
from train.runs import Run, RunError, Status, append_metrics, last_status, write_json
from train.state import look


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHLIGHT_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def told(runs, state: str, **status) -> Run:
    run = Run(runs / "demo-1")
    run.root.mkdir(parents=True)
    write_json(run.status_file, asdict(Status(state, heartbeat=time.time(), **status)))
    return run


def opening(run, monkeypatch):
    """As the trainer tells of its pictures, without a pause in between."""
    monkeypatch.setattr(loop, "TELLING_SECONDS", 0.0)
    return loop._opening(run, lambda *_: None)


def test_who_waits_is_told_how_far_the_pictures_are(runs, monkeypatch):
    run = told(runs, "waiting", pid=7)
    opening(run, monkeypatch)(16_000, 50_000, "Making patterns")
    assert (last_status(run).reason, last_status(run).pid) == ("Making patterns: 32%", 7)


def test_a_stop_is_heard_while_pictures_open(runs, monkeypatch):
    run = told(runs, "waiting")
    run.stop_file.touch()
    with pytest.raises(RunError, match="stopped as asked, before it began"):
        opening(run, monkeypatch)(1, 2, "Making patterns")


def test_a_status_that_nobody_waits_for_is_left_alone(runs, monkeypatch):
    run = told(runs, "stopped", reason="why")
    run.stop_file.touch()
    before = run.status_file.read_bytes()
    opening(run, monkeypatch)(1, 2, "Making patterns")
    assert run.status_file.read_bytes() == before


def session(**config):
    """A run that went on at 20 s of steps, and made 30 s more in 100 s by the clock, 40 s of them paused."""
    now = time.perf_counter()
    return SimpleNamespace(
        seconds=50.0, seconds_before=20.0, trains_since=now - 100, paused_seconds=40.0, began=now - 110,
        config=TrainConfig(**config),
    )  # fmt: skip


def test_the_time_left_goes_by_the_clock():
    left = loop._Session._seconds_left(session(), 0.5)
    assert left == pytest.approx(50 * 60 / 30, abs=1)  # as much again, each second of steps taking two


@pytest.mark.parametrize(("minutes", "left"), [(2.0, 10.0), (1.0, 0.0), (60.0, 100.0)])
def test_the_time_left_ends_where_the_settings_end_the_run(minutes, left):
    assert loop._Session._seconds_left(session(stop_minutes=minutes), 0.5) == pytest.approx(left, abs=1)


@pytest.mark.parametrize("fails", [False, True])
def test_who_goes_on_says_at_once_which_process_it_is(runs, monkeypatch, fails):
    """Else the run would be held by one process and speak of another, which may be anybody's by now."""
    run = told(runs, "running", pid=1, step=40)
    write_json(run.config_file, {"config": {}, "data": {}, "resolved": {}})
    run.stop_file.touch()  # meant for the one before
    seen = []

    def resume(run, **_):
        seen.append((last_status(run), look(run).word, run.stop_file.exists()))
        if fails:
            raise RunError("it cannot go on")
        return SimpleNamespace(state="finished")

    monkeypatch.setattr(loop, "resume", resume)
    assert main(["run", "--resume", "--out", str(run.root)]) == (2 if fails else 0)
    ((status, word, was_asked),) = seen
    assert (status.pid, status.state, status.step, word) == (os.getpid(), "waiting", 40, "waiting")
    assert not was_asked
    assert (last_status(run).state, last_status(run).pid) == (
        ("running", 1) if fails else ("waiting", os.getpid())
    )


def test_a_run_on_pictures_that_are_not_here_is_refused_before_anything_is_written(
    runs, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATCHLIGHT_DATA", str(tmp_path))
    with pytest.raises(RunError, match="CIFAR-10 is not on this machine"):
        launch.start(PRESETS["fast"], "fast")
    assert not runs.exists()


def test_a_deleted_run_leaves_no_curves_to_one_of_its_name(runs):
    run = told(runs, "running")
    append_metrics(run, {"step": 1, "loss": 2.5})
    assert columns_of(run)["loss"].values.tolist() == [2.5]
    run.metrics_file.unlink()
    assert columns_of(run)["loss"].values.tolist() == []
