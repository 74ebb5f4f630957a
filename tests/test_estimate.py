"""What a run will cost: counts against real models and folders, speed against a real run, who measures when.

Run: pytest tests/test_estimate.py (about 25 s).
"""

import json
import os
import stat
import sys
import threading
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median

import pytest
import torch
from small_run import as_flags, small, until, write_pictures

import train.estimate as estimate
import train.needs as needs
from train.__main__ import main
from train.config import PRESETS, TrainConfig, preset
from train.estimate import TOO_LONG, Estimate, ask, estimate_lines, field_of, measure, problems
from train.learner import Learner, Machine
from train.loop import start
from train.page.estimates import AT_WORK, REST_SECONDS, Estimates
from train.runs import Run, read_metrics
from vit.download import DataError
from vit.files import folder_bytes
from vit.sources import CLASSES

GB = 10**9
PYTHON = sys.executable
DEMO = preset("demo")


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    """An empty folder to be in, an empty cache, no CIFAR-10, and memory enough whatever the machine has."""
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATCHLIGHT_RUNS", str(tmp_path / "here" / "runs"))
    monkeypatch.delenv("PATCHLIGHT_DATA", raising=False)
    monkeypatch.setattr(estimate, "available_bytes", lambda: 16 * GB)
    monkeypatch.setattr(estimate, "free_bytes", lambda: 30 * GB)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def learner_of(config: TrainConfig, classes: int) -> Learner:
    machine = Machine("cpu", "float32", False, 1, torch.__version__)
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    return Learner(replace(config, batch=4), machine, images, torch.zeros(8, dtype=torch.int64), classes)


def told(**changes) -> Estimate:
    kept = {
        "parameters": 309_994, "device": "cpu", "precision": "bfloat16", "images_per_second": 1123.0,
        "seconds": 119.0, "epochs": 0.5014, "disk_bytes": 12_340_000, "free_bytes": 30 * GB,
        "memory_bytes": GB,
    }  # fmt: skip
    return Estimate(**kept | changes)


# --- what it needs ----------------------------------------------------------------------------------------


CONFIGS = {
    "tutorial": PRESETS["tutorial"],
    "demo": DEMO,
    "record": PRESETS["record"],
    "wide MLP": replace(DEMO, mlp_dim=500, num_layers=1, optimiser="adamw"),
    "few patches": replace(DEMO, patch_size=16, ema=0.0, num_heads=1, embed_dim=40),
}


@pytest.mark.parametrize("classes", [10, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_state_are_the_real_ones(name, classes):
    config = CONFIGS[name]
    learner = learner_of(config, classes)
    architecture = config.architecture(classes)
    count = sum(p.numel() for p in learner.model.parameters())
    assert needs.parameters(architecture) == count
    if name == "tutorial" and classes == 10:
        assert count == 3_189_514
    tensors = learner.tensors()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    header = 110 * len(tensors)
    assert abs(needs.resume_bytes(config, classes) - size - header) < 300
    weights = {key: tensor for key, tensor in tensors.items() if key.endswith(".weights")}
    assert needs.weights_bytes(config, classes) == 4 * count + 110 * len(weights)


def test_pictures_are_counted_by_their_files(folders):
    pictures = write_pictures(folders / "pictures")
    found = needs.count_pictures(small(pictures))
    assert (found.total, found.held, found.learnt, found.classes, found.is_here) == (160, 16, 144, 10, True)
    assert found.filmed == 30  # the samples too, since these are CIFAR-10's classes
    found = needs.count_pictures(small(pictures, holdout=7))
    assert (found.held, found.learnt) == (7, 153)

    for name in CLASSES[3:]:
        for file in (pictures / "train" / name).iterdir():
            file.unlink()
        (pictures / "train" / name).rmdir()
    (pictures / "train" / CLASSES[0]).rename(pictures / "train" / "mine")
    (pictures / "test").rename(folders / "other")
    found = needs.count_pictures(small(pictures))
    assert (found.classes, found.filmed) == (3, 3)
    assert found.total == len(list((pictures / "train").rglob("*.png")))

    found = needs.count_pictures(DEMO)
    assert (found.total, found.held, found.classes, found.filmed) == (50_000, 5_000, 10, 10)
    found = needs.count_pictures(PRESETS["fast"])
    assert (found.total, found.held, found.classes, found.is_here) == (50_000, 5_000, 10, False)


def test_a_bit_of_disk_for_each_thing_that_is_kept():
    count = needs.count_pictures(DEMO)

    def disk(epochs=1.0, count=count, **changes) -> int:
        return needs.disk_bytes(replace(DEMO, **changes), count, epochs)

    model = needs.weights_bytes(DEMO, 10)
    assert disk(10.0, keep_every=2.0) - disk(10.0) == 5 * model
    assert disk() - disk(count=replace(count, held=0)) == pytest.approx(model, abs=10_000)
    assert disk(snapshots=48) > disk() + 24 * 10 * 4 * 4 * 65
    assert disk(log_steps=1) > disk() + 250 * 100


def test_memory_is_what_processes_took():
    """Measured by hand: the most that a process took for two steps on so many pictures, in MB."""
    count = needs.count_pictures(PRESETS["fast"])
    fast, tutorial = PRESETS["fast"], PRESETS["tutorial"]
    large = {"embed_dim": 1024, "mlp_dim": 4096}
    for config, batch, precision, seen in (
        (DEMO, 16, "bfloat16", 745), (DEMO, 256, "bfloat16", 1022), (fast, 128, "bfloat16", 1311),
        (fast, 128, "float32", 1389), (tutorial, 128, "float32", 2003),
        (replace(fast, **large), 16, "bfloat16", 2981), (replace(tutorial, **large), 16, "float32", 2332),
        (replace(fast, patch_size=1, num_layers=2), 16, "bfloat16", 1900),
    ):  # fmt: skip
        assert 0.8 < needs.memory_bytes(config, count, precision, batch) / 2**20 / seen < 1.3, (batch, seen)


def test_free_room_is_found_before_there_is_a_runs_folder(folders, monkeypatch):
    monkeypatch.setenv("PATCHLIGHT_RUNS", str(folders / "no" / "such" / "runs"))
    assert needs.free_bytes() > 0
    assert not (folders / "no").exists()
    assert needs.available_bytes() is None or needs.available_bytes() > 2**26


# --- measuring --------------------------------------------------------------------------------------------


def test_against_a_real_run(folders):
    """Rate, time and disk of a short run, loosely: other work may have the machine."""
    config = small(write_pictures(folders / "pictures"), epochs=4.0, batch=32)
    found = measure(config)
    assert not (folders / "here" / "runs").exists()
    since = time.perf_counter()
    run = Run(folders / "here" / "runs" / "mine")
    outcome = start(run, config, say=lambda line: None)
    took = time.perf_counter() - since
    assert outcome.step == 16
    assert found.epochs == 4
    assert found.parameters == json.loads(run.config_file.read_text())["parameters"]
    assert (found.device, found.precision) == ("cpu", "float32")
    rate = median(row["images_per_second"] for row in read_metrics(run)[1:])
    assert 1 / 3 < found.images_per_second / rate < 3
    assert 16 * 32 / found.images_per_second < found.seconds < 3 * took + 10
    board = folder_bytes(run.root / "tensorboard")
    assert 1 / 1.3 < found.disk_bytes / (folder_bytes(run.root) - board) < 1.3


def test_disk_of_the_demo():
    """A run of it left 10,392,000 bytes behind, without TensorBoard's."""
    count = needs.count_pictures(DEMO)
    assert 1 < needs.disk_bytes(DEMO, count, 0.5) / 10_392_000 < 1.1


def timed(monkeypatch, config: TrainConfig, *, all_patches=(0.3, 0.2), some=(0.2, 0.1), judging=0.016):
    """What comes out where steps of 16 pictures take so many seconds, and what is done with them so many."""
    times = [[judging], all_patches] + ([some] if config.keep_patches < 1 else [])
    monkeypatch.setattr(estimate, "_seconds", lambda *works: times.pop())
    found = measure(replace(config, device="cpu"))
    assert times == []
    return found


def test_the_rate_follows_from_the_parts_of_a_step(monkeypatch):
    # 0.1 s for the update, and 0.2 s for 16 pictures: 1.7 s for 128
    found = timed(monkeypatch, DEMO)
    assert found.images_per_second == pytest.approx(128 / 1.7)
    assert found.epochs == pytest.approx(176 * 128 / 45_000, rel=2e-3)
    # 8 evaluations of 5,000 pictures, 24 frames of 10, a millisecond each; opening and saving besides
    beside = found.seconds - 176 * 1.7 - 40 - 0.24
    assert 5 < beside < 7


def test_patches_that_are_left_out_count_for_their_share(monkeypatch):
    config = replace(DEMO, keep_patches=0.5, full_from=0.75, epochs=10.0)
    found = timed(monkeypatch, config)
    assert found.images_per_second == pytest.approx(128 / (0.25 * 1.7 + 0.75 * 0.9))
    # by the clock, a quarter of the time goes to all patches
    config = replace(config, epochs=0.0, minutes=10.0)
    found = timed(monkeypatch, config)
    assert found.images_per_second == pytest.approx(0.25 * 128 / 1.7 + 0.75 * 128 / 0.9)
    assert found.epochs * 351 * 128 == pytest.approx(600 * found.images_per_second, rel=1e-2)
    assert 600 + 40 < found.seconds < 600 + 60


def test_minutes_that_hold_everything(monkeypatch):
    config = replace(DEMO, epochs=0.0, minutes=10.0, fit_epochs=True)
    found = timed(monkeypatch, config)
    assert found.seconds == 600
    assert 600 - 70 < found.epochs * 351 * 128 / found.images_per_second < 600 - 55  # 11 evaluations of 5 s
    short = timed(monkeypatch, replace(config, minutes=0.1))
    assert short.epochs == pytest.approx(1 / 351)
    assert short.seconds > 6


def test_a_limit_of_time_ends_it_early(monkeypatch):
    whole = timed(monkeypatch, replace(DEMO, epochs=10.0))
    found = timed(monkeypatch, replace(DEMO, epochs=10.0, stop_minutes=5.0))
    assert found.seconds == 300
    assert found.epochs == pytest.approx(10 * 300 / whole.seconds, rel=1e-2)
    assert timed(monkeypatch, replace(DEMO, stop_minutes=1000.0)).seconds < 1000


def test_times_are_the_quickest_of_warm_work(monkeypatch):
    now, slow = [0.0], iter([0.1, 0.2, 0.3, 0.25, 0.15])
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: now[0])

    def work() -> None:
        now[0] += next(slow)

    assert estimate._seconds(work) == [pytest.approx(0.2)]  # the first warms up, and three take 0.6 s
    assert next(slow) == 0.15


# --- what is impossible -----------------------------------------------------------------------------------


def of(config=DEMO, **changes) -> dict[str, str]:
    return problems(asdict(config) | changes)


def test_what_is_possible_has_no_problems(folders):
    assert of() == {}
    assert of(small(write_pictures(folders / "pictures"))) == {}


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"patch_size": 5}, "patch_size"), ({"num_heads": 7}, "embed_dim"), ({"minutes": 1.0}, "epochs"),
     ({"fit_epochs": True}, "fit_epochs"), ({"keep_every": 0.5}, "keep_every"),
     ({"keep_patches": 0.01, "patch_size": 16}, "keep_patches"),
     ({"lr": -1.0}, "lr"), ({"muon_lr": 20.0}, "muon_lr"), ({"init": "lr"}, "init"), ({"data": ""}, "data"),
     ({"mean_and_std": "x"}, "mean_and_std"), ({"device": "quantum"}, "device"),
     ({"device": "cuda:99"}, "device"),
     ({"stop_mb": 1.5}, "stop_mb")],
)  # fmt: skip
def test_each_sentence_finds_its_field(changes, field):
    found = of(**changes)
    assert list(found) == [field]
    assert "\n" not in found[field]


def test_every_range_is_told_beside_its_field():
    for field in fields(TrainConfig):
        if field.type in (int, float):
            assert list(of(**{field.name: field.type(field.metadata["high"] + 1)})) == [field.name]


def test_a_sentence_of_no_field():
    assert field_of("the learner, lrs and embed_dims are no fields") == ""
    assert field_of("a smaller batch than num_layers") == "batch"


def test_data_that_are_not_there(folders):
    (folders / "empty").mkdir()
    assert of(data=str(folders / "nothing")) == {"data": f"There is no folder {folders / 'nothing'}"}
    (found,) = of(data=str(folders / "empty")).values()
    assert found.startswith(f"The folder {folders / 'empty'} holds no pictures to train on")
    (found,) = of(data="cifar10").values()
    assert found.startswith("CIFAR-10 is not on this machine")
    with pytest.raises(DataError, match="There is no folder"):
        measure(replace(DEMO, data=str(folders / "nothing")))


def test_too_few_pictures(folders):
    few = small(write_pictures(folders / "pictures", 9))
    assert list(of(few)) == ["holdout"]
    with pytest.raises(ValueError, match="9 pictures, which are too few"):
        measure(few)
    assert of(few, holdout=0, batch=64) == {}  # a batch is never more than there is


def test_a_model_that_memory_cannot_hold_is_refused_at_once(monkeypatch):
    # told which precision: by itself it takes the one that this machine's processor is fast in
    huge = replace(PRESETS["fast"], embed_dim=4096, num_layers=64, data="patterns", precision="bfloat16")
    found = of(huge)
    assert set(found) == {"embed_dim", "keep_every"}  # nor can the disk
    sentence = found["embed_dim"]
    assert sentence.startswith("a model of 4,5")
    assert "of 16 GB" in sentence
    monkeypatch.setattr(torch, "randint", None)  # nothing is built
    since = time.perf_counter()
    with pytest.raises(
        ValueError, match="needs more memory than there is: about 130 GB of 16 GB; a smaller emb"
    ):
        measure(huge)
    assert time.perf_counter() - since < 5


def test_a_batch_that_memory_cannot_hold(monkeypatch):
    found = of(replace(PRESETS["tutorial"], data="patterns", batch=8192))
    assert list(found) == ["batch"]
    assert found["batch"].startswith("a batch of 8,192 needs more memory than there is: about ")
    monkeypatch.setattr(estimate, "available_bytes", lambda: None)
    assert of(replace(PRESETS["tutorial"], data="patterns", batch=8192)) == {}


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB."),
     RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 4 bytes")],
)  # fmt: skip
def test_memory_that_runs_out_while_measuring_is_a_sentence(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(Learner, "backward", fail)
    with pytest.raises(ValueError, match=r"^there is less memory than this run needs; [^\n]+$") as caught:
        measure(replace(DEMO, device="cpu"))
    assert field_of(str(caught.value)) == "embed_dim"


def test_another_fault_is_not_taken_for_memory(monkeypatch):
    def fail(*_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Learner, "backward", fail)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        measure(replace(DEMO, device="cpu"))


def test_a_disk_that_cannot_hold_it(monkeypatch):
    monkeypatch.setattr(
        estimate, "free_bytes", lambda: 12_000_000
    )  # 10 MB are needed, and half as much in between
    found = of()
    assert list(found) == ["keep_every"]
    assert "it needs 16 MB, and 12 MB are free" in found["keep_every"]
    assert told(disk_bytes=10_000_000, free_bytes=12_000_000).problem.startswith("the disk has no room")
    assert told().problem == ""
    monkeypatch.setattr(estimate, "free_bytes", lambda: 30_000_000)
    assert of() == {}
    assert list(of(epochs=100.0, keep_every=1.0)) == ["keep_every"]


# --- in words ---------------------------------------------------------------------------------------------


def test_it_is_told_with_two_digits():
    assert estimate_lines(told()) == [
        "309,994 parameters", "CPU, bfloat16", "about 1,100 images/s", "about 2 min, 0.5 epochs",
        "12 MB of disk (30 GB free)",
    ]  # fmt: skip
    lines = estimate_lines(told(images_per_second=0.0437, seconds=47_000, epochs=1.0, free_bytes=1.26e8))
    assert lines[2:] == ["about 0.044 images/s", "about 13 h, 1 epoch", "12 MB of disk (130 MB free)"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (7.4, "7 s"), (43, "40 s"), (88, "1 min 30 s"), (400, "7 min"), (3500, "58 min"),
     (5300, "1 h 30 min"), (90_000, "25 h")],
)  # fmt: skip
def test_times_in_words(seconds, words):
    assert estimate_lines(told(seconds=seconds))[3].startswith(f"about {words}, ")


# --- the command, and the process of its own --------------------------------------------------------------


def test_the_command(folders, capsys):
    config = small(write_pictures(folders / "pictures"))
    assert main(["estimate", "--preset", "demo", *as_flags(config), "--json"]) == 0
    out = capsys.readouterr().out
    assert Estimate(**json.loads(out)).epochs == 2
    words = ["estimate", "--preset", "demo", "--device", "cpu", "--threads", "1"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "309,994 parameters"
    assert lines[2].endswith(" images/s")
    assert len(lines) == 5
    assert main([*words, "--data", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("python -m train estimate: There is no folder ")
    assert list(Path.cwd().iterdir()) == []


def test_asked_in_a_process_of_its_own(folders):
    """From another folder than the repository, where somebody has a train.py of their own."""
    Path("train.py").write_text("raise SystemExit('not this one')\n")
    config = small(write_pictures(folders / "pictures"), epochs=3.0, seed=4)
    found = ask(replace(config, data=os.path.relpath(config.data)), "demo")
    assert isinstance(found, Estimate), found
    count = needs.count_pictures(config)
    assert found.parameters == needs.parameters(config.architecture(10))
    assert (found.epochs, found.disk_bytes) == (3, needs.disk_bytes(config, count, 3.0))
    assert ask(replace(config, device="quantum"), "demo").startswith(
        "nothing could be measured: 'quantum' is"
    )


@pytest.fixture
def pretend(folders, monkeypatch):
    """pretend(code): what is asked is answered by this code, which stands in for `python -m train`."""

    def put(code: str) -> Path:
        script = folders / "python"
        script.write_text(f"#!{PYTHON}\nimport os, sys, time\n{code}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(estimate.sys, "executable", str(script))
        return script

    return put


@pytest.mark.skipif(os.name == "nt", reason="a script cannot stand in for Python on Windows")
def test_what_ends_badly_is_a_sentence(pretend, folders):
    pretend(
        "print('warning: x', file=sys.stderr); sys.exit('python -m train estimate: there is no folder x')"
    )
    assert ask(DEMO, "demo") == "there is no folder x"
    pretend("os.kill(os.getpid(), 9)")
    assert ask(DEMO, "demo").startswith("measuring was ended by the system, most likely for lack of memory")
    pretend("print('nonsense')")
    assert ask(DEMO, "demo").startswith("what was measured cannot be read")
    pretend("print('{\"parameters\": 3}')")
    assert ask(DEMO, "demo").startswith("what was measured cannot be read")
    pretend("").unlink()
    assert ask(DEMO, "demo").startswith("nothing could be measured: ")


@pytest.mark.skipif(os.name == "nt", reason="a script cannot stand in for Python on Windows")
def test_it_is_ended_when_it_takes_too_long(pretend, folders):
    pretend(f"open({str(folders / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    since = time.perf_counter()
    assert ask(DEMO, "demo", longest_seconds=1.5) == TOO_LONG
    assert time.perf_counter() - since < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int((folders / "pid").read_text()), 0)


@pytest.mark.skipif(os.name == "nt", reason="a script cannot stand in for Python on Windows")
def test_it_has_low_priority_and_the_right_words(pretend):
    pretend("time.sleep(0.5); sys.exit(f'{os.getpriority(os.PRIO_PROCESS, 0)} ' + ' '.join(sys.argv[1:]))")
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    expected = f"{max(10, mine)} -P -m train estimate --json --preset demo --seed=9 --batch=64"
    assert ask(replace(DEMO, seed=9, batch=64), "demo") == expected


# --- who measures when, on the page -----------------------------------------------------------------------


class Measuring:
    """Stands in for `ask`: it takes until it is let go, and tells what it was asked."""

    def __init__(self):
        self.asked, self.go, self.now, self.busy = [], threading.Semaphore(0), 100.0, False
        self.answer = told()
        self.estimates = Estimates(self, lambda: self.busy, lambda: self.now)

    def __call__(self, config, preset_name):
        self.asked.append((config.batch, preset_name))
        assert self.go.acquire(timeout=5)
        return self.answer

    def look(self, owner: str, batch: int, **changes):
        return self.estimates.look(owner, replace(DEMO, batch=batch, **changes), "demo")

    def rest(self, seconds: float = REST_SECONDS) -> None:
        self.now += seconds

    def batches(self, count: int) -> list[int]:
        """What has been asked, once it is so much."""
        until(lambda: len(self.asked) >= count, 5)
        return [batch for batch, _ in self.asked]

    def known(self, owner: str, batch: int, **changes):
        """What is known in the end, after one measurement is let go."""
        self.go.release()
        assert until(lambda: self.look(owner, batch, **changes) is not None, 5)
        return self.look(owner, batch, **changes)


@pytest.fixture
def page():
    made = Measuring()
    yield made
    for _ in range(20):
        made.go.release()


def test_settings_are_measured_when_they_have_rested(page):
    assert page.look("a", 8) is None
    page.rest(0.9)
    assert page.look("a", 8) is None
    page.look("a", 16)  # moved on
    page.rest(0.9)
    page.look("a", 16)
    time.sleep(0.05)
    assert page.asked == []
    page.rest(0.2)
    page.look("a", 16)
    assert page.batches(1) == [16]
    assert page.known("a", 16) is page.answer
    assert page.asked == [(16, "demo")]
    assert page.look("b", 16) is page.answer  # known to all
    assert page.look("a", 16, seed=5, lr=0.1) is page.answer  # what costs the same is not measured again
    assert page.look("a", 16, num_layers=5) is None


def test_one_at_a_time_and_superseded_wishes_are_dropped(page):
    page.look("a", 8)
    page.rest()
    page.look("a", 8)
    assert page.batches(1) == [8]
    for batch in (16, 24, 32):  # while 8 is measured
        page.look("a", batch)
        page.rest()
        page.look("a", batch)
    assert page.batches(1) == [8]
    page.go.release()  # 8 may finish, and is kept
    assert until(lambda: page.look("a", 32) is None and len(page.asked) == 2)
    assert page.batches(2) == [8, 32]
    assert page.known("a", 32) is page.answer
    assert page.look("a", 8) is page.answer
    assert page.batches(2) == [8, 32]


def test_two_sessions_in_turn(page):
    page.look("a", 8)
    page.rest(0.5)
    page.look("b", 16)
    page.rest(2)
    page.look("b", 16)  # asks first, but has waited for less long
    assert page.batches(1) == [8]
    page.look("a", 8)
    page.known("a", 8)
    assert page.look("b", 16) is None
    assert page.batches(2) == [8, 16]
    assert page.known("b", 16) is page.answer


def test_who_goes_on_asking_keeps_their_place(page):
    page.look("a", 8)
    page.rest()
    page.look("a", 8)
    assert page.batches(1) == [8]
    page.look("b", 16)
    page.rest(5)
    page.look("c", 24)
    for _ in range(4):  # while 8 takes its time
        page.rest(5)
        page.look("c", 24)
        page.look("b", 16)
    page.go.release()
    assert until(lambda: not page.estimates._is_measuring)
    page.look("c", 24)
    assert page.batches(2) == [8, 16]


def test_a_session_that_is_gone_is_not_measured_for(page):
    page.look("a", 8)
    page.rest(60)
    page.look("b", 16)
    page.rest()
    page.look("b", 16)
    assert page.batches(1) == [16]
    page.known("b", 16)
    assert page.batches(1) == [16]


def test_nothing_is_measured_beside_a_run(page):
    page.busy = True
    page.look("a", 8)
    page.rest(5)
    assert page.look("a", 8) == AT_WORK
    page.busy = False
    assert page.look("a", 8) is None  # it has to rest first
    page.rest()
    page.look("a", 8)
    assert page.batches(1) == [8]
    page.busy = True  # a run begins meanwhile: what comes out is not believed
    page.go.release()
    assert until(lambda: not page.estimates._is_measuring)
    assert page.look("a", 8) == AT_WORK
    page.busy = False
    page.look("a", 8)
    page.rest()
    page.look("a", 8)
    assert page.batches(2) == [8, 8]
    assert page.known("a", 8) is page.answer
    page.busy = True
    assert page.look("a", 8) is page.answer  # known from before


def test_a_failure_is_told_and_tried_again_later(page):
    page.answer = TOO_LONG
    page.look("a", 8)
    page.rest()
    page.look("a", 8)
    assert page.known("a", 8) == TOO_LONG
    page.rest(30)
    assert page.look("a", 8) == TOO_LONG
    page.rest(31)
    assert page.look("a", 8) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_does_not_stop_all_measuring(page):
    def fail(config, preset_name):
        raise KeyError("a fault of ours")

    estimates = Estimates(fail, lambda: False, lambda: page.now)
    estimates.look("a", DEMO, "demo")
    page.rest()
    estimates.look("a", DEMO, "demo")
    assert until(lambda: estimates.look("a", DEMO, "demo") is not None)
    assert "error" in estimates.look("a", DEMO, "demo")
    assert not estimates._is_measuring


def test_what_is_kept_is_bounded_and_the_latest_used_stays():
    now = [0.0]
    estimates = Estimates(lambda config, name: told(parameters=config.batch), lambda: False, lambda: now[0])

    def know(batch: int):
        config = replace(DEMO, batch=batch)
        estimates.look("a", config, "demo")
        now[0] += 1
        assert until(lambda: estimates.look("a", config, "demo") is not None)
        return estimates.look("a", config, "demo")

    for batch in range(1, 65):
        assert know(batch).parameters == batch
    assert estimates.look("a", replace(DEMO, batch=1), "demo") is not None
    know(65)
    assert len(estimates._known) == 64
    assert estimates.look("a", replace(DEMO, batch=1), "demo") is not None
    assert estimates.look("a", replace(DEMO, batch=2), "demo") is None
    now[0] += 3600
    assert estimates.look("a", replace(DEMO, batch=1), "demo") is None  # the disk has filled meanwhile
