"""What goes wrong in a run says so in its status, and leaves a whole checkpoint to go on from.

Run: pytest tests/test_guards.py (about 30 s)
"""

import contextlib
import errno
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_run import as_flags, differing, small, state_of, write_pictures

import vit
from train import film
from train.__main__ import main
from train.learner import Learner
from train.loop import resume, start
from train.resuming import load_resume
from train.runs import Run, RunError, read_metrics, read_status
from vit.download import DataError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return write_pictures(tmp_path / "pictures")


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def quiet(_: str) -> None:
    pass


def assert_whole(run: Run, step: int) -> None:
    """The newest checkpoints are of this step, and everything in them is finite."""
    tensors, facts, remark = load_resume(run)
    assert (facts["step"], remark) == (step, "")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    model, checkpoint = vit.load(run.checkpoint("last"))
    assert checkpoint.provenance["step"] == step
    assert all(p.isfinite().all() for p in model.parameters())


def told(run: Run) -> str:
    """Why the run failed: one sentence."""
    status = read_status(run)
    assert status.state == "failed"
    assert status.reason
    assert "\n" not in status.reason
    assert "Traceback" not in run.log_file.read_text()
    return status.reason


# --- a broken loss ----------------------------------------------------------------------------------------


def break_at(monkeypatch, broken_step: int, times: float, spoil) -> list[tuple[int, float]]:
    """Let `spoil(learner, loss)` give that step's loss, so many times; returns the (step, rate) asked for."""
    asked, step = [], Learner.step

    def breaking(self, number, progress, rate=1.0):
        nonlocal times
        asked.append((number, rate))
        loss = step(self, number, progress, rate)
        if number == broken_step and times > 0:
            times -= 1
            return spoil(self, loss)
        return loss

    monkeypatch.setattr(Learner, "step", breaking)
    return asked


def not_a_number(learner, loss):
    return loss * math.nan


def infinite(learner, loss):
    return loss + math.inf


def exploded(learner, loss):
    return loss + 1000


def poison(learner, loss):
    """What one infinite gradient does: the loss before it was fine, and no later one will be."""
    with torch.no_grad():
        learner.model.cls_token.fill_(math.nan)
    return loss


@pytest.mark.parametrize("spoil", [not_a_number, infinite, exploded, poison])
@pytest.mark.parametrize("log_steps", [1, 100])
@pytest.mark.parametrize("step", [6, 9])  # in the midst, and where the tenth step's checkpoint is due
def test_a_broken_step_goes_back_at_a_lower_rate(pictures, run, monkeypatch, spoil, log_steps, step):
    asked = break_at(monkeypatch, step, 1, spoil)
    outcome = start(run, small(pictures, log_steps=log_steps, evaluations=1), say=quiet)
    assert outcome.state == "finished"
    back = next(i for i in range(1, len(asked)) if asked[i][0] <= asked[i - 1][0])
    assert asked[back][0] == 5  # to the checkpoint of step 5
    assert [rate for _, rate in asked] == [1.0] * back + [0.5] * (len(asked) - back)
    log = run.log_file.read_text()
    assert log.count("back to step 5, at 0.5 of the learning rate") == 1
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    frames = film.load(run.film_file)
    assert frames.steps[-1] == 18
    assert load_resume(run)[1]["rollbacks"] == 1
    assert_whole(run, 18)


def test_a_run_goes_back_three_times_and_no_more(pictures, run, monkeypatch):
    asked = break_at(monkeypatch, 7, math.inf, not_a_number)
    outcome = start(run, small(pictures), say=quiet)
    assert outcome.state == "failed"
    assert [rate for step, rate in asked if step == 7] == [1.0, 0.5, 0.25, 0.125]
    reason = told(run)
    assert reason == outcome.reason
    for word in ("not a number", "step 8", "of the learning rate", "3 times", "--lr"):
        assert word in reason
    scale = small(pictures).schedule_shape().lr_scale(7.5 / 18) * 0.125
    assert f"{scale:.3g}" in reason
    assert_whole(run, 6)


def test_a_lower_rate_outlives_the_process(pictures, run, monkeypatch):
    with monkeypatch.context() as patched:
        break_at(patched, 7, math.inf, not_a_number)
        start(run, small(pictures), say=quiet)
    asked = break_at(monkeypatch, 7, 0, not_a_number)
    assert resume(run, say=quiet).state == "finished"
    assert {rate for _, rate in asked} == {0.125}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_rate_that_no_model_survives_ends_in_words(pictures, run):
    outcome = start(run, small(pictures, lr=10.0, muon_lr=10.0, warmup=0.0, epochs=8.0), say=quiet)
    assert outcome.state == "failed"
    assert "3 times" in told(run)
    step = load_resume(run)[1]["step"]
    assert_whole(run, step)


def test_a_run_stopped_while_broken_keeps_what_was_whole(pictures, run, monkeypatch):
    def poison_and_stop(learner, loss):
        run.stop_file.touch()
        deadline = time.monotonic() + 5
        while read_status(run).state != "stopping" and time.monotonic() < deadline:
            time.sleep(0.02)
        return poison(learner, loss)

    break_at(monkeypatch, 6, 1, poison_and_stop)
    outcome = start(run, small(pictures, log_steps=100, evaluations=1), say=quiet)
    assert outcome.state == "stopped"
    assert_whole(run, 5)
    assert read_status(run).state == "stopped"


# --- a full disk ------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MiB, or a skip where nothing may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if not mount or sys.platform != "linux" or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here: the simulated one is tested below")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file:
        for size in (65536, 512):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    assert shutil.disk_usage(disk).free < 4096


@pytest.mark.parametrize("full_from", [1, 7, 13])
def test_a_disk_that_fills_up(pictures, tmp_path, small_disk, monkeypatch, full_from):
    untouched, run = Run(tmp_path / "untouched"), Run(small_disk / "run")
    start(untouched, small(pictures), say=quiet)
    step = Learner.step

    def filling(self, number, *rest):
        if number == full_from:
            fill(small_disk)
        return step(self, number, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "step", filling)
        outcome = start(run, small(pictures), say=quiet)
    assert outcome.state == "failed"
    assert "disk is full" in outcome.reason
    assert told(run) == outcome.reason
    saved = load_resume(run)[1]["step"]
    assert full_from - 5 <= saved <= full_from + 5
    assert_whole(run, saved)
    assert resume_refused_or_failed(run)  # while it is full
    assert load_resume(run)[1]["step"] == saved
    (small_disk / "ballast").unlink()
    assert resume(run, say=quiet).state == "finished"
    assert differing(state_of(untouched), state_of(run)) == []


def resume_refused_or_failed(run: Run) -> bool:
    try:
        return resume(run, say=quiet).state == "failed"
    except OSError as error:
        return error.errno == errno.ENOSPC


@pytest.mark.parametrize("victim", ["metrics", "film", "last", "best", "resume", "log"])
def test_each_file_that_finds_no_room(pictures, tmp_path, run, monkeypatch, victim):
    """The same without a disk: from the ninth step on, writing one kind of file fails half way."""
    untouched = Run(tmp_path / "untouched")
    config = small(pictures, snapshots=8, evaluations=6)
    start(untouched, config, say=quiet)
    path = {
        "metrics": run.metrics_file, "film": run.film_file, "log": run.log_file,
    }.get(victim, run.checkpoint(victim))  # fmt: skip
    if victim == "resume":
        path = run.checkpoint(".resume-ready")
    is_full, step, opened = False, Learner.step, Path.open

    def filling(self, number, *rest):
        nonlocal is_full
        is_full = is_full or number == 8
        return step(self, number, *rest)

    def open_on_a_full_disk(self, mode="r", *rest, **options):
        file = opened(self, mode, *rest, **options)
        if is_full and mode != "r" and path.name in self.name:
            file.write(b"{")
            file.close()
            raise OSError(errno.ENOSPC, "No space left on device")
        return file

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "step", filling)
        patched.setattr(Path, "open", open_on_a_full_disk)
        outcome = start(run, config, say=quiet)
    assert outcome.state == "failed"
    assert "disk is full" in told(run)
    load_resume(run)
    vit.load(run.checkpoint("last"))
    vit.load(run.checkpoint("best"))
    film.load(run.film_file)
    assert resume(run, say=quiet).state == "finished"
    assert differing(state_of(untouched), state_of(run)) == []


def test_an_event_file_that_finds_no_room_does_not_hide_the_end(pictures, run, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    def fail(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "close", fail)
    assert start(run, small(pictures, epochs=1), say=quiet).state == "finished"
    assert read_status(run).state == "finished"
    assert_whole(run, 9)


# --- data that is gone or another's -----------------------------------------------------------------------


@pytest.fixture
def stopped(pictures, run, monkeypatch):
    """A run stopped at step 8."""
    step = Learner.step

    def stopping(self, number, *rest):
        if number == 7:
            run.stop_file.touch()
            deadline = time.monotonic() + 5
            while read_status(run).state != "stopping" and time.monotonic() < deadline:
                time.sleep(0.02)
        return step(self, number, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "step", stopping)
        assert start(run, small(pictures, snapshots=7), say=quiet).step == 8
    return run


def test_pictures_that_are_gone(stopped, pictures, tmp_path, capsys):
    before = state_of(stopped)
    pictures.rename(tmp_path / "elsewhere")
    assert main(["run", "--resume", "--out", str(stopped.root)]) == 1
    assert str(pictures) in told(stopped)
    assert "Traceback" not in "".join(capsys.readouterr())
    assert differing(before, state_of(stopped)) == []
    assert read_status(stopped).step == 8
    assert_whole(stopped, 8)
    (tmp_path / "elsewhere").rename(pictures)
    assert resume(stopped, say=quiet).state == "finished"


@pytest.mark.parametrize("change", ["another picture", "one less", "another class"])
def test_pictures_that_have_changed(stopped, pictures, change):
    before = state_of(stopped)
    some = sorted((pictures / "train").glob("*/*.png"))
    if change == "another picture":
        some[0].write_bytes((pictures / "test" / "cat" / "003.png").read_bytes())
    elif change == "one less":
        some[0].unlink()
    else:
        some[0].rename(some[-1].parent / "new.png")
    outcome = resume(stopped, say=quiet)
    assert outcome.state == "failed"
    assert "not those that this run began with" in told(stopped)
    assert differing(before, state_of(stopped)) == []
    assert_whole(stopped, 8)


def test_pictures_that_were_never_there(run, tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        start(run, small(tmp_path / "nowhere"), say=quiet)
    assert not run.root.exists()


# --- too little memory, and faults of ours ----------------------------------------------------------------


def test_a_gpu_without_room_for_a_step(pictures, run, monkeypatch):
    def fail(learner, loss):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines")

    break_at(monkeypatch, 7, math.inf, fail)
    outcome = start(run, small(pictures), say=quiet)
    assert outcome.state == "failed"
    reason = told(run)
    assert "out of memory" in reason
    assert "step 7" in reason
    assert "--batch" in reason
    assert_whole(run, 6)


def test_a_fault_of_ours_is_told_and_raised(pictures, run, monkeypatch):
    def fail(learner, loss):
        raise ZeroDivisionError("ours")

    break_at(monkeypatch, 7, math.inf, fail)
    with pytest.raises(ZeroDivisionError):
        start(run, small(pictures), say=quiet)
    assert "ZeroDivisionError" in told(run)
    assert_whole(run, 6)


# --- checkpoints that are damaged -------------------------------------------------------------------------


def test_a_damaged_newest_checkpoint_falls_back_and_says_so(stopped, monkeypatch):
    path = stopped.checkpoint("resume")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    assert film.load(stopped.film_file).steps[-1] == 8
    said, shown, step = [], [], Learner.step

    def showing(self, *rest):
        if not shown:  # what lies in the files before the first step
            shown.append((film.load(stopped.film_file).steps[-1], read_metrics(stopped)[-1]["step"]))
        return step(self, *rest)

    monkeypatch.setattr(Learner, "step", showing)
    assert resume(stopped, say=said.append).state == "finished"
    assert shown == [(5, 6)]
    (line,) = [line for line in said if "Fell back to the checkpoint before" in line]
    assert "resume.safetensors" in line
    assert line in stopped.log_file.read_text()
    assert "Resuming from step 6" in said
    assert [row["step"] for row in read_metrics(stopped)] == list(range(1, 19))
    assert_whole(stopped, 18)


def test_without_a_whole_checkpoint_a_run_cannot_go_on(stopped):
    for name in ("resume", "resume.prev"):
        path = stopped.checkpoint(name)
        path.write_bytes(path.read_bytes()[:-1])
    rows = stopped.metrics_file.read_bytes()
    assert resume(stopped, say=quiet).state == "failed"
    assert "cannot be resumed" in told(stopped)
    assert stopped.metrics_file.read_bytes() == rows
    assert vit.load(stopped.checkpoint("last"))[1].provenance["step"] == 8  # still of use


def test_a_checkpoint_of_another_model_is_refused(stopped):
    config = json.loads(stopped.config_file.read_text())
    config["config"]["mlp_dim"] = 48
    stopped.config_file.write_text(json.dumps(config))
    assert resume(stopped, say=quiet).state == "failed"
    assert "another model" in told(stopped)


@pytest.mark.parametrize("change", [{"batch": 0}, {"colour": 1}, {"lr": "fast"}])
def test_settings_that_make_no_sense_are_refused(stopped, change):
    config = json.loads(stopped.config_file.read_text())
    config["config"] |= change
    stopped.config_file.write_text(json.dumps(config))
    with pytest.raises(RunError, match=next(iter(change))):
        resume(stopped, say=quiet)


def test_a_damaged_film_costs_the_film_alone(stopped):
    stopped.film_file.write_bytes(b"PK\3\4no film")
    said = []
    assert resume(stopped, say=said.append).state == "finished"
    assert sum("damaged" in line for line in said) == 1
    assert film.load(stopped.film_file).steps[-1] == 18


# --- two trainers -----------------------------------------------------------------------------------------


@pytest.mark.slow  # test_seat.py and test_launch.py hold the small cases
def test_a_second_trainer_is_refused_and_the_first_unharmed(pictures, run, tmp_path, capsys):
    untouched = Run(tmp_path / "untouched")
    flags = as_flags(small(pictures, epochs=12.0))
    command = [sys.executable, "-m", "train", "run", *flags, "--out", str(run.root)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as first:
        try:
            deadline = time.monotonic() + 60
            while len(read_metrics(run)) < 3 and time.monotonic() < deadline:
                time.sleep(0.02)
            run.pause_file.touch()  # so that it is surely there when the second one comes
            while read_status(run).state != "paused" and time.monotonic() < deadline:
                time.sleep(0.02)
            before = state_of(run)
            for words, named in (
                (["--resume", "--out", str(run.root)], f"process {first.pid}"),
                ([*flags, "--out", str(run.root)], "--resume"),
            ):
                assert main(["run", *words]) == 2
                said = capsys.readouterr()
                assert said.out == ""
                assert said.err.count("\n") == 1
                assert named in said.err
            assert differing(before, state_of(run)) == []
            assert read_status(run).pid == first.pid
            assert run.pause_file.exists()
            run.pause_file.unlink()
            assert first.wait(60) == 0
        finally:
            first.kill()
    assert read_status(run).state == "finished"
    assert main(["run", *flags, "--out", str(untouched.root)]) == 0
    assert differing(state_of(untouched), state_of(run)) == []
