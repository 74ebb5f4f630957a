"""A run from its first step to its last, on a hundred small pictures: what it leaves, how it ends early.

Run: pytest tests/test_loop.py (about 40 s); tests/test_kill.py and tests/test_guards.py are about what goes
wrong.
"""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_run import STEPS_PER_EPOCH, as_flags, differing, small, state_of, until, write_pictures

import vit
from train import film, loop
from train.__main__ import main
from train.learner import Learner
from train.loop import resume, start
from train.resuming import load_resume
from train.runs import Run, RunError, read_config, read_metrics, read_status

ROOT = Path(__file__).parents[1]
STEPS = 2 * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATCHLIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield write_pictures(tmp_path_factory.mktemp("data") / "pictures")


# As they are before any run: a test run started in the background has Ctrl-C ignored.
HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


@pytest.fixture(scope="module")
def finished(pictures, tmp_path_factory):
    """A run of two epochs, started by the command line and left alone."""
    root = tmp_path_factory.mktemp("runs") / "finished"
    words = ["run", *as_flags(small(pictures, keep_every=1.0, seed=5)), "--out", str(root)]
    assert main(words) == 0
    return Run(root)


def quiet(_: str) -> None:
    pass


def at_step(monkeypatch, when: int, act) -> None:
    """Call `act` in the middle of that step, counted from 0."""
    step = Learner.step

    def acting(self, number, *rest):
        if number == when:
            act()
        return step(self, number, *rest)

    monkeypatch.setattr(Learner, "step", acting)


# --- from start to finish ---------------------------------------------------------------------------------


def test_a_run_leaves_what_it_promises_and_nothing_else(finished):
    names = {str(path.relative_to(finished.root)) for path in finished.root.rglob("*") if path.is_file()}
    events = {name for name in names if name.startswith("tensorboard")}
    assert names - events - {".lock"} == {
        "config.json", "metrics.jsonl", "status.json", "log.txt", "attention.npz",
        "checkpoints/last.safetensors", "checkpoints/best.safetensors",
        "checkpoints/epoch-0001.safetensors", "checkpoints/epoch-0002.safetensors",
        "checkpoints/resume.safetensors", "checkpoints/resume.prev.safetensors",
    }  # fmt: skip


def test_its_config_says_what_it_was(finished, pictures):
    told = read_config(finished)
    assert told["config"]["seed"] == 5
    assert told["config"]["data"] == str(pictures)
    assert told["command"].startswith("python -m train run ")
    assert told["command"].endswith(f"--out {finished.root}")
    assert told["resolved"]["device"] == "cpu"
    assert told["resolved"]["threads"] == 1
    assert (told["data"]["pictures"], told["data"]["held_out"]) == (144, 16)
    assert len(told["data"]["class_names"]) == 10
    assert told["data"]["left_out"] == []
    model, _ = vit.load(finished.checkpoint("last"))
    assert told["parameters"] == told["trained_parameters"] == sum(p.numel() for p in model.parameters())


def test_its_metrics_have_the_promised_keys_at_every_step(finished):
    rows = read_metrics(finished)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    always = {"step", "epoch", "seconds", "loss", "lr", "images_per_second"}
    judged = {"val_accuracy", "val_loss"}
    for row in rows:
        assert row.keys() == (always | judged if row["step"] in (6, 12, 18) else always)
        assert row["epoch"] == pytest.approx(row["step"] / STEPS_PER_EPOCH, abs=1e-4)
        assert row["loss"] > 0
        assert row["images_per_second"] > 0
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)


def test_its_status_agrees_with_its_metrics(finished):
    status, rows = read_status(finished), read_metrics(finished)
    judged = [(row["val_accuracy"], -row["step"]) for row in rows if "val_accuracy" in row]
    assert (status.state, status.reason, status.progress) == ("finished", "", 1.0)
    assert (status.step, status.epoch) == (STEPS, 2.0)
    assert status.val_accuracy == rows[-1]["val_accuracy"]
    assert (status.best_accuracy, -status.best_step) == max(judged)  # the first of equals


@pytest.mark.parametrize("name", ["last", "best", "epoch-0001", "epoch-0002"])
def test_its_checkpoints_open_and_say_where_they_come_from(finished, pictures, name):
    model, checkpoint = vit.load(finished.checkpoint(name))
    told, rows = checkpoint.provenance, {row["step"]: row for row in read_metrics(finished)}
    assert told["step"] == {
        "last": STEPS, "best": read_status(finished).best_step, "epoch-0001": 9, "epoch-0002": 18,
    }[name]  # fmt: skip
    assert told["epochs"] == pytest.approx(told["step"] / STEPS_PER_EPOCH, abs=0.01)
    assert told["command"] == read_config(finished)["command"]
    assert told["seed"] == 5
    assert told["data_set"] == "folder"
    assert "144" in told["data"]
    assert told["data_digest"] == read_config(finished)["data"]["digest"][:12]
    assert told["held_out"].startswith("16 training pictures")
    assert "one seed" in told["runs"]
    if name in ("last", "best"):
        assert told["val_accuracy"] == rows[told["step"]]["val_accuracy"]
    assert not model.training


def test_last_is_the_average_that_was_judged(finished, pictures):
    """Accuracy of `last`, computed here from the file alone, is what the last row says."""
    from vit.datasets import holdout_indices, load_pictures

    model, checkpoint = vit.load(finished.checkpoint("last"))
    train = load_pictures(pictures, "train")
    held = holdout_indices(train.labels, 5000, 0)[1]
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (checkpoint.mean, checkpoint.std))
    x = torch.from_numpy(train.images[held].astype(np.float32)).permute(0, 3, 1, 2) / 255
    right = (model((x - mean) / std).argmax(1).numpy() == train.labels[held]).mean()
    assert right == read_metrics(finished)[-1]["val_accuracy"]
    raw, _, _ = load_resume(finished)
    assert not torch.equal(raw["cls_token.weights"], model.cls_token)  # those it goes on from are others


def test_its_film_runs_from_the_first_step_to_the_last(finished):
    frames = film.load(finished.film_file)
    assert frames.steps.tolist() == [0, 5, 18]  # at 0, a quarter and all of it
    model, checkpoint = vit.load(finished.checkpoint("last"))
    again = film.record(frames, model, STEPS, checkpoint.mean, checkpoint.std)
    np.testing.assert_allclose(again.probabilities[-1], frames.probabilities[-1], atol=1e-5)


def test_its_log_tells_the_story(finished):
    lines = [line[21:] for line in finished.log_file.read_text().splitlines()]
    assert lines[0].startswith("Total parameters: ")
    assert lines[1].startswith("Trained parameters: ")
    assert lines[-1] == f"Finished at step {STEPS}"
    assert sum("of the held-out pictures right" in line for line in lines) == 3


def test_its_event_file_is_read_by_tensorboard(finished):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.root / "tensorboard"))
    events.Reload()
    for name in ("loss", "lr", "val_accuracy"):
        expected = [(row["step"], row[name]) for row in read_metrics(finished) if name in row]
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        np.testing.assert_allclose([v for _, v in found], [v for _, v in expected], rtol=1e-6)


def test_a_second_start_in_its_folder_is_refused(finished, pictures, capsys):
    before = state_of(finished)
    assert main(["run", *as_flags(small(pictures)), "--out", str(finished.root)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "--resume" in told.err
    assert "--out" in told.err
    assert differing(before, state_of(finished)) == []


def test_a_finished_run_resumed_is_finished(finished, tmp_path):
    copy = Run(Path(shutil.copytree(finished.root, tmp_path / "copy")))
    said = []
    assert resume(copy, say=said.append).state == "finished"
    assert f"Resuming from step {STEPS}" in said
    assert read_status(copy).progress == 1.0
    assert read_status(copy).step == STEPS
    assert differing(state_of(finished), state_of(copy)) == []


def test_a_seed_decides_everything(finished, pictures, tmp_path):
    again, other = Run(tmp_path / "again"), Run(tmp_path / "other")
    start(again, small(pictures, keep_every=1.0, seed=5), say=quiet)
    start(other, small(pictures, keep_every=1.0, seed=6), say=quiet)
    assert differing(state_of(finished), state_of(again)) == []
    differs = differing(state_of(finished), state_of(other))
    assert {"last cls_token", "metrics loss", "film cls_row"} <= set(differs)


@pytest.mark.parametrize("evaluations", [1, 5, 7, 18, 50])
def test_a_run_is_judged_as_often_as_asked(pictures, tmp_path, monkeypatch, evaluations):
    run, judged = Run(tmp_path / "run"), []
    evaluate = Learner.evaluate
    monkeypatch.setattr(Learner, "evaluate", lambda *args: judged.append(1) or evaluate(*args))
    start(run, small(pictures, evaluations=evaluations, log_steps=100), say=quiet)
    steps = [row["step"] for row in read_metrics(run) if "val_accuracy" in row]
    assert len(judged) == len(steps) == min(evaluations, STEPS)
    assert steps[-1] == STEPS
    expected = {-(-STEPS * (i + 1) // evaluations) for i in range(evaluations)}  # ceil: where each is passed
    assert set(steps) == expected


# --- honest splits ----------------------------------------------------------------------------------------

_opened: list[str] | None = None  # every path that this process opens or lists, while it is a list


def _watch(event: str, arguments: tuple) -> None:
    if _opened is not None and event in ("open", "os.listdir", "os.scandir"):
        _opened.append(str(arguments[0]))


@pytest.fixture
def opened(monkeypatch):
    if not getattr(sys, "patchlight_watches", False):
        sys.addaudithook(_watch)  # cannot be taken back
        sys.patchlight_watches = True
    monkeypatch.setattr(sys.modules[__name__], "_opened", [])
    return _opened


def test_the_trainer_never_opens_the_test_set(tmp_path, monkeypatch, opened):
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    folder = write_pictures(tmp_path / "pictures", 40)
    config = small(folder, epochs=1, batch=8)
    opened.clear()
    outcome = start(Run(tmp_path / "run"), config, say=quiet)
    assert outcome.state == "finished"
    assert len({path for path in opened if str(folder / "train") in path and path.endswith(".png")}) == 40
    # the names of its class folders count, so that both splits have the same classes: nothing in those does
    assert not [path for path in opened if str(folder / "test" / "x")[:-1] in path]
    shutil.rmtree(folder / "test")  # and without it, nothing changes
    start(Run(tmp_path / "without"), config, say=quiet)
    assert differing(state_of(Run(tmp_path / "run")), state_of(Run(tmp_path / "without"))) == []


def test_of_a_data_set_only_the_training_split_is_asked_for(pictures, tmp_path, monkeypatch):
    asked, load = [], loop.load_pictures

    def asking(folder, split, **options):
        asked.append((folder, split))
        return load(pictures, split, **options)

    monkeypatch.setattr(loop, "load_pictures", asking)
    for data in ("cifar10", "patterns"):
        start(Run(tmp_path / data), small(Path(data), epochs=1), say=quiet)
    assert set(asked) == {("cifar10", "train"), ("patterns", "train")}


def test_learning_and_judging_share_no_picture(pictures, tmp_path, monkeypatch):
    seen, judged = [], []
    build, evaluate = Learner.__init__, Learner.evaluate

    def building(self, config, machine, images, *rest):
        seen.append(images)
        build(self, config, machine, images, *rest)

    def judging(self, images, labels):
        judged.append(images)
        return evaluate(self, images, labels)

    monkeypatch.setattr(Learner, "__init__", building)
    monkeypatch.setattr(Learner, "evaluate", judging)
    start(Run(tmp_path / "run"), small(pictures, epochs=1), say=quiet)
    learnt, held = ({p.numpy().tobytes() for p in some} for some in (seen[0], judged[0]))
    assert (len(learnt), len(held)) == (144, 16)
    assert not learnt & held


def test_a_run_without_a_holdout_has_no_best_and_says_so(pictures, tmp_path):
    run = Run(tmp_path / "run")
    outcome = start(run, small(pictures, holdout=0, epochs=1), say=quiet)
    assert (outcome.state, outcome.step, outcome.val_accuracy) == ("finished", 10, None)
    assert not run.checkpoint("best").exists()
    assert not any("val_accuracy" in row for row in read_metrics(run))
    told = vit.load(run.checkpoint("last"))[1].provenance
    assert "none" in told["held_out"]
    assert "val_accuracy" not in told
    assert read_status(run).best_accuracy is None


def test_files_that_are_no_pictures_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    folder = write_pictures(tmp_path / "pictures", 40)
    bad = next((folder / "train").glob("*/*.png"))
    bad.write_bytes(b"no picture")
    run = Run(tmp_path / "run")
    assert start(run, small(folder, epochs=1, batch=8), say=quiet).state == "finished"
    told = [line for line in run.log_file.read_text().splitlines() if "Left out:" in line]
    assert len(told) == 1
    assert bad.name in told[0]
    assert len(read_config(run)["data"]["left_out"]) == 1


@pytest.mark.parametrize(("n", "changes"), [(1, {"holdout": 0}), (5, {})])
def test_too_few_pictures_are_one_sentence(tmp_path, monkeypatch, n, changes):
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    run = Run(tmp_path / "run")
    outcome = start(run, small(write_pictures(tmp_path / "pictures", n), **changes), say=quiet)
    assert outcome.state == read_status(run).state == "failed"
    assert "pictures" in outcome.reason
    assert "too" in outcome.reason  # too small, too few


# --- minutes ----------------------------------------------------------------------------------------------


def test_minutes_are_minutes_of_steps(pictures, tmp_path, monkeypatch):
    evaluate = Learner.evaluate
    monkeypatch.setattr(Learner, "evaluate", lambda *args: time.sleep(0.5) or evaluate(*args))
    monkeypatch.setattr(Learner, "step", slow_step(Learner.step, 0.02))
    run, began = Run(tmp_path / "run"), time.monotonic()
    outcome = start(run, small(pictures, epochs=0.0, minutes=0.02), say=quiet)
    assert time.monotonic() - began > 1.2 + 3 * 0.5  # judging took time of its own
    assert outcome.state == "finished"
    assert 1.2 <= outcome.seconds < 1.7
    rows = read_metrics(run)
    assert [("val_accuracy" in row) for row in rows].count(True) == 3
    assert load_resume(run)[1]["seconds"] == pytest.approx(outcome.seconds, abs=0.01)
    assert read_status(run).progress == 1.0
    assert film.load(run.film_file).steps[[0, -1]].tolist() == [0, outcome.step]


def test_minutes_that_were_spent_are_not_spent_again(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(Learner, "step", slow_step(Learner.step, 0.02))
    run = Run(tmp_path / "run")
    with monkeypatch.context() as patched:
        at_step(patched, 20, run.stop_file.touch)
        first = start(run, small(pictures, epochs=0.0, minutes=0.04), say=quiet)
    assert first.state == "stopped"
    assert 0 < first.seconds < 2.2
    spent = load_resume(run)[1]["seconds"]
    assert spent == pytest.approx(first.seconds, abs=0.05)
    began = time.monotonic()
    second = resume(run, say=quiet)
    assert second.state == "finished"
    assert 2.4 <= second.seconds < 2.9
    assert time.monotonic() - began < 2.4 - spent + 1.5
    assert second.step > first.step


def test_a_run_by_the_clock_ends_with_an_evaluation_whatever_a_gpu_still_has_to_do(
    pictures, tmp_path, monkeypatch
):
    """What was queued shows up only where the clock is stopped: here it takes the run past its end."""
    pause = loop.Clock.pause

    def pause_late(self):
        self.spent += 0.2
        pause(self)

    monkeypatch.setattr(loop.Clock, "pause", pause_late)
    run = Run(tmp_path / "run")
    config = small(pictures, epochs=0.0, minutes=0.02, evaluations=1, log_steps=3, checkpoint_steps=1000)
    outcome = start(run, config, say=quiet)
    last = read_metrics(run)[-1]
    assert last["step"] == outcome.step
    assert "val_accuracy" in last


def slow_step(step, seconds: float):
    def slower(self, *rest):
        time.sleep(seconds)
        return step(self, *rest)

    return slower


# --- stop and pause ---------------------------------------------------------------------------------------


def test_a_run_stopped_by_file_goes_on_as_if_it_had_not(finished, pictures, tmp_path, monkeypatch):
    run = Run(tmp_path / "run")
    step = Learner.step

    def ask_and_wait(self, number, *rest):  # a step that takes long, while somebody asks
        if number == 7:
            run.stop_file.touch()
            assert until(lambda: read_status(run).state == "stopping", 2)
        return step(self, number, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "step", ask_and_wait)
        outcome = start(run, small(pictures, keep_every=1.0, seed=5), say=quiet)
    assert (outcome.state, outcome.step) == ("stopped", 8)  # the step was ended first
    status = read_status(run)
    assert (status.state, status.step) == ("stopped", 8)
    assert not run.stop_file.exists()
    assert load_resume(run)[1]["step"] == 8
    assert vit.load(run.checkpoint("last"))[1].provenance["step"] == 8
    assert resume(run, say=quiet).state == "finished"
    assert differing(state_of(finished), state_of(run)) == []


def test_a_run_paused_by_file_waits_with_a_checkpoint_and_goes_on(finished, pictures, tmp_path, monkeypatch):
    run, seen = Run(tmp_path / "run"), {}
    at_step(monkeypatch, 7, lambda: run.pause_file.touch() or time.sleep(1.2))

    def watch():
        if until(lambda: (status := read_status(run)) and status.state == "paused", 20):
            seen["since"] = time.perf_counter()
            time.sleep(1.2)
            seen.update(status=read_status(run), facts=load_resume(run)[1], at=time.time())
        seen["until"] = time.perf_counter()
        run.pause_file.unlink(missing_ok=True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    outcome = start(run, small(pictures, keep_every=1.0, seed=5), say=quiet)
    all_seconds = time.perf_counter() - began
    watcher.join()
    assert seen["status"].state == "paused"
    assert seen["status"].step == seen["facts"]["step"] == 8
    assert seen["at"] - seen["status"].heartbeat < 2
    assert outcome.state == "finished"
    assert outcome.seconds < all_seconds - (seen["until"] - seen["since"])  # none of them spent waiting
    assert differing(state_of(finished), state_of(run)) == []


def test_a_paused_run_can_be_stopped(pictures, tmp_path, monkeypatch):
    run = Run(tmp_path / "run")
    at_step(monkeypatch, 3, lambda: run.pause_file.touch() or time.sleep(1.2))

    def watch():
        until(lambda: (status := read_status(run)) and status.state == "paused", 20)
        run.stop_file.touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcome = start(run, small(pictures, log_steps=100, checkpoint_steps=100), say=quiet)
    watcher.join()
    assert (outcome.state, outcome.step) == ("stopped", 4)
    assert (read_status(run).step, read_status(run).epoch) == (4, 4 / STEPS_PER_EPOCH)
    assert not run.pause_file.exists()


def test_a_new_run_wants_a_folder_of_its_own(pictures, tmp_path):
    for name in ("metrics.jsonl", "holiday.jpg", "checkpoints"):
        run = Run(tmp_path / name.partition(".")[0])
        run.root.mkdir()
        (run.root / name).write_bytes(b"mine")
        with pytest.raises(RunError, match="holds other files"):
            start(run, small(pictures, epochs=1), say=quiet)
        assert [path.name for path in run.root.iterdir()] == [name]
        assert (run.root / name).read_bytes() == b"mine"
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(RunError, match="is a file"):
        start(Run(tmp_path / "file"), small(pictures, epochs=1), say=quiet)
    with pytest.raises(RunError, match="inside the pictures"):
        start(Run(pictures / "train" / "run"), small(pictures, epochs=1), say=quiet)
    assert not (pictures / "train" / "run").exists()


# TensorBoard's own writer misses its file too, in a thread that nobody can catch.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_is_deleted_while_it_is_used_ends_the_run(pictures, tmp_path, again):
    """And what somebody else puts there in the meantime is left alone."""
    run = Run(tmp_path / "run")

    def delete(line):
        if "step 9," in line:
            # at once, by its name: TensorBoard's thread may write into it while rmtree empties it
            shutil.rmtree(run.root.rename(tmp_path / "deleted"), ignore_errors=True)
            if again:
                run.root.mkdir()
                (run.root / ".lock").touch()

    config = small(pictures, epochs=30.0, evaluations=30, checkpoint_steps=5)
    outcome = start(run, config, say=delete)
    assert outcome.state == "failed"
    assert "deleted or replaced" in outcome.reason
    left = [path.name for path in run.root.iterdir()] if run.root.exists() else []
    assert left == [".lock"] * again


def test_what_has_nothing_to_go_on_from_is_not_trained_again(pictures, tmp_path):
    run = Run(tmp_path / "run")
    start(run, small(pictures, epochs=1), say=quiet)
    for name in ("resume", "resume.prev"):
        run.checkpoint(name).unlink(missing_ok=True)
    before = run.checkpoint("last").read_bytes()
    outcome = resume(run, say=quiet)
    assert outcome.state == "failed"
    assert "resume files are gone" in outcome.reason
    assert run.checkpoint("last").read_bytes() == before


def test_another_split_is_not_gone_on_with(pictures, tmp_path):
    run = Run(tmp_path / "run")
    start(run, small(pictures, epochs=1), say=quiet)
    kept = json.loads(run.config_file.read_text())
    kept["config"]["holdout"] = 0
    run.config_file.write_text(json.dumps(kept))
    outcome = resume(run, say=quiet)
    assert outcome.state == "failed"
    assert "held out" in outcome.reason


def test_attention_of_another_run_is_not_gone_on_with(pictures, tmp_path):
    run, lines = Run(tmp_path / "run"), []
    start(run, small(pictures, epochs=1), say=quiet)
    found = film.load(run.film_file)
    film.save(replace(found, pictures=255 - found.pictures), run.film_file)
    assert resume(run, say=lines.append).state == "finished"
    assert any("that of another run" in line for line in lines)


def test_files_from_before_do_not_stop_a_run(pictures, tmp_path):
    run = Run(tmp_path / "run")
    run.root.mkdir()
    run.stop_file.touch()
    run.pause_file.touch()
    assert start(run, small(pictures, epochs=1), say=quiet).state == "finished"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to send")
def test_sigterm_stops_a_process_with_a_checkpoint_of_its_very_step(pictures, tmp_path):
    run = Run(tmp_path / "run")
    words = as_flags(small(pictures, epochs=500.0, log_steps=7, checkpoint_steps=1000, evaluations=1))
    trainer = subprocess.Popen(
        [sys.executable, "-m", "train", "run", *words, "--out", str(run.root)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert until(lambda: len(read_metrics(run)) > 2, 60)
        trainer.send_signal(signal.SIGTERM)
        said, _ = trainer.communicate(timeout=30)
    finally:
        trainer.kill()
        trainer.wait()
    assert trainer.returncode == 0
    status = read_status(run)
    assert status.state == "stopped"
    assert f"Stopped at step {status.step:,}" in said
    assert "Traceback" not in said
    assert status.step >= read_metrics(run)[-1]["step"] > 2
    assert load_resume(run)[1]["step"] == status.step
    assert vit.load(run.checkpoint("last"))[1].provenance["step"] == status.step


def test_signals_are_put_back(finished):
    assert {number: signal.getsignal(number) for number in HANDLERS} == HANDLERS


def test_resume_has_no_settings_of_its_own(finished, capsys):
    before = json.loads(finished.status_file.read_text())
    root = str(finished.root)
    for words, named in (
        (["--resume", "--out", root, "--epochs", "3", "--lr", "0.1"], ["--epochs", "--lr"]),
        (["--resume", "--out", root, "--preset", "demo"], ["--preset"]),
        (["--resume", "--out", root, "--no-mirror"], ["--mirror"]),
        (["--resume"], ["--out"]),
    ):
        assert main(["run", *words]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert all(name in told for name in named)
    assert json.loads(finished.status_file.read_text()) == before
