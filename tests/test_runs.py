"""The run directory: readers survive whatever lies in it, writers are whole, and one trainer holds it.

Run: pytest tests/test_runs.py (about 15 s).
"""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_run import until

from train import desk as desks
from train import resuming, runs
from train.desk import Desk
from train.resuming import has_resume, load_resume, save_resume
from train.runs import (
    Run,
    RunError,
    Status,
    append_line,
    append_metrics,
    cut_metrics,
    read_config,
    read_metrics,
    read_status,
    write_json,
)
from train.seat import hold
from vit.files import write_whole

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return Run(tmp_path / "run")


@pytest.fixture
def desk(run):
    desk = Desk(run)
    yield desk
    desk.close("stopped")


# --- what readers skip ------------------------------------------------------------------------------------

HOSTILE_LINES = [
    b"",
    b'{"step": 3, "loss": 1.',  # torn
    b"\xff\xfe\x00",
    b"null",
    b"[1, 2]",
    b'"step"',
    b'{"loss": 1.0}',
    b'{"step": "3"}',
    b'{"step": true}',
    b'{"step": 3.5}',
    b'{"step": 3, "loss": NaN}',
    b'{"step": 3, "loss": Infinity}',
    b'{"step": 3, "loss": "<script>"}',
    b'{"step": 3, "loss": null}',
    b'{"step": 3, "loss": [1]}',
    b'{"step": 1' + b"0" * 400 + b"}",
    b'{"step": 1' + b"0" * 5000 + b"}",
    b"[" * 100_000,
]


@pytest.mark.parametrize("line", HOSTILE_LINES, ids=lambda line: repr(line[:24]))
def test_a_line_of_metrics_that_is_none_is_skipped(run, line):
    run.metrics_file.write_bytes(b'{"step": 1, "loss": 2.5}\n' + line + b'\n{"step": 4, "loss": 1.5}\n')
    assert read_metrics(run) == [{"step": 1, "loss": 2.5}, {"step": 4, "loss": 1.5}]


def test_no_metrics_are_no_rows(run):
    assert read_metrics(run) == []
    run.metrics_file.mkdir()
    assert read_metrics(run) == []


HOSTILE_STATUSES = [
    *HOSTILE_LINES[:6],
    HOSTILE_LINES[-1],
    b'{"state": 5}',
    b'{"state": ["running"]}',
    b'{"state": null}',
    b'{"state": "running", "progress": "half"}',
    b'{"state": "running", "heartbeat": null}',
    b'{"state": "running", "heartbeat": NaN}',
    b'{"state": "running", "heartbeat": 1' + b"0" * 400 + b"}",
    b'{"state": "running", "step": {}}',
    b'{"state": "running", "best_accuracy": "1"}',
    b'{"state": "running", "pid": true}',
]


@pytest.mark.parametrize("text", HOSTILE_STATUSES, ids=lambda text: repr(text[:24]))
def test_a_status_that_is_none_is_none(run, text):
    run.status_file.write_bytes(text)
    assert read_status(run) is None


def test_a_status_from_a_later_version_is_read_as_far_as_it_is_known(run):
    write_json(run.status_file, {"state": "finished", "step": 7, "mood": "good"})
    assert read_status(run) == Status(state="finished", step=7)


@pytest.mark.parametrize("state", runs.ACTIVE)
@pytest.mark.parametrize(("silent_seconds", "gone"), [(1, False), (9, False), (11, True), (1e6, True)])
def test_an_active_run_without_a_heartbeat_has_vanished(run, state, silent_seconds, gone):
    write_json(run.status_file, {"state": state, "step": 7, "heartbeat": time.time() - silent_seconds})
    status = read_status(run)
    assert status.step == 7
    assert status.state == ("vanished" if gone else state)
    assert ("--resume" in status.reason) == gone


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_run_that_ended_does_not_vanish(run, state):
    write_json(run.status_file, {"state": state, "reason": "why", "heartbeat": 1.0})
    assert read_status(run) == Status(state=state, reason="why", heartbeat=1.0)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[]", b'{"config": 3}', b"[" * 100_000])
def test_a_damaged_config_is_one_sentence(run, text):
    run.config_file.write_bytes(text)
    with pytest.raises(RunError, match=r"config\.json") as told:
        read_config(run)
    assert "\n" not in str(told.value)


def test_a_folder_without_a_run_is_called_that(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        read_config(Run(tmp_path / "nowhere"))


# --- what writers leave -----------------------------------------------------------------------------------


def test_a_line_after_a_torn_one_starts_anew(run):
    append_metrics(run, {"step": 1, "loss": 2.0})
    with run.metrics_file.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    append_metrics(run, {"step": 3, "loss": 1.0})
    assert run.metrics_file.read_bytes().count(b"\n") == 3
    assert [row["step"] for row in read_metrics(run)] == [1, 3]


def test_a_line_stays_one_line_whatever_it_says(run):
    append_line(run.log_file, "one\ntwo\rthree\u2028four")
    append_line(run.log_file, "the file \udcff.png")  # a name of bytes that are no text
    assert run.log_file.read_bytes() == b"one two three four\nthe file \\udcff.png\n"


def test_metrics_are_cut_back_to_a_step_and_lose_what_is_torn(run):
    for step in (5, 10, 15, 20):
        append_metrics(run, {"step": step, "loss": 1 / step})
    with run.metrics_file.open("ab") as file:
        file.write(b'{"step": 3, "lo')
    cut_metrics(run, 15)
    lines = run.metrics_file.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": s, "loss": 1 / s} for s in (5, 10, 15)]
    cut_metrics(run, 0)
    assert run.metrics_file.read_bytes() == b""


def test_metrics_are_cut_where_there_are_none(run):
    cut_metrics(run, 3)
    assert read_metrics(run) == []


# --- checkpoints to go on from ----------------------------------------------------------------------------


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weights": torch.randn(3, 4, generator=generator),
        "a.step": torch.tensor(float(seed)),
        "b.momentum": torch.randn(2, 3, generator=generator).bfloat16(),
        "nothing": torch.zeros(0),
    }


def save_two(run: Run) -> None:
    for step in (10, 20):
        save_resume(run, tensors(step), {"step": step, "best": [0.5, 7]})


def loaded(run: Run) -> tuple[int, str]:
    """(step, remark) of the checkpoint taken, whose tensors must be those of that step."""
    found, facts, remark = load_resume(run)
    expected = tensors(facts["step"])
    assert facts == {"step": facts["step"], "best": [0.5, 7]}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    return facts["step"], remark


def test_the_newest_checkpoint_is_taken(run):
    assert not has_resume(run)
    save_two(run)
    assert has_resume(run)
    assert loaded(run) == (20, "")
    names = sorted(path.name for path in run.checkpoint("resume").parent.iterdir())
    assert names == ["resume.prev.safetensors", "resume.safetensors"]


def test_a_flip_of_any_bit_is_seen(run):
    save_two(run)
    path = run.checkpoint("resume")
    whole = path.read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    assert header_bytes < len(whole) < 2000
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        step, remark = loaded(run)
        assert step == 10 or place < header_bytes  # bytes that fill up the header say nothing
        assert (step == 10) == ("resume.safetensors" in remark)
        assert "\n" not in remark


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
def test_a_truncated_checkpoint_is_passed_over(run, size):
    save_two(run)
    path = run.checkpoint("resume")
    path.write_bytes(path.read_bytes()[:size])
    step, remark = loaded(run)
    assert step == 10
    assert "resume.safetensors cannot be used" in remark


def test_a_missing_checkpoint_is_passed_over(run):
    save_two(run)
    run.checkpoint("resume").unlink()
    assert loaded(run) == (10, "resume.safetensors is not there")


def test_two_bad_checkpoints_are_one_error(run):
    save_two(run)
    run.checkpoint("resume").write_bytes(b"no")
    run.checkpoint("resume.prev").unlink()
    with pytest.raises(RunError, match=r"resume\.safetensors cannot be used.*prev\.safetensors is not there"):
        load_resume(run)


def test_a_checkpoint_of_something_else_is_passed_over(run):
    from safetensors.torch import save_file

    save_two(run)
    save_file(tensors(20), run.checkpoint("resume"))  # whole, but nothing says of what step
    assert loaded(run)[0] == 10


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the code catches it."""


@pytest.mark.parametrize("renames", [0, 1, 2])
@pytest.mark.parametrize("newest_damaged", [False, True])
def test_a_save_cut_off_between_its_renames_leaves_a_whole_checkpoint(
    run, monkeypatch, renames, newest_damaged
):
    save_two(run)
    if newest_damaged:  # a run that fell back to step 10 and comes to its next checkpoint
        run.checkpoint("resume").write_bytes(b"damaged")
    done, replace = [], Path.replace

    def replace_until_killed(self, target):
        if not self.name.endswith(".part"):
            if len(done) == renames:
                raise Killed
            done.append(target)
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace_until_killed)
        with contextlib.suppress(Killed):
            save_resume(run, tensors(30), {"step": 30, "best": [0.5, 7]})
    assert len(done) == renames
    assert loaded(run)[0] == {0: 30 if newest_damaged else 20, 1: 30, 2: 30}[renames]
    save_resume(run, tensors(40), {"step": 40, "best": [0.5, 7]})
    assert loaded(run) == (40, "")


def test_a_save_that_fails_half_way_leaves_the_last(run, monkeypatch):
    save_two(run)

    def write_half(file, data):
        file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resuming, "_write_through", write_half)
    with pytest.raises(OSError, match="No space left"):
        save_resume(run, tensors(30), {"step": 30, "best": [0.5, 7]})
    assert loaded(run) == (20, "")
    assert not list(run.root.rglob("*.part"))


# --- one trainer at a time --------------------------------------------------------------------------------


def test_a_second_holder_is_refused_and_a_killed_one_holds_nothing(run):
    code = "import sys, time; from pathlib import Path\n"
    code += "from train.runs import *; from train.desk import *; from train.seat import *\n"
    code += "run = Run(Path(sys.argv[1])); lock = hold(run); desk = Desk(run); time.sleep(60)"
    first = subprocess.Popen([sys.executable, "-c", code, str(run.root)], cwd=ROOT)
    try:
        assert until(lambda: read_status(run) is not None, 60)
        with pytest.raises(RunError, match=rf"process {first.pid} on .* works in .*--out"):
            hold(run)
        half = run.root / ".status.json.1-1.part"
        half.write_bytes(b"{")
    finally:
        first.kill()
        first.wait()
    hold(run).release()
    assert not half.exists()  # what the killed one had half written
    hold(run).release()


# --- the desk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "asked", "after"),
    [
        ("running", "stop", "stopping"),
        ("running", "pause", "pausing"),
        ("starting", "stop", "stopping"),
        ("starting", "pause", "pausing"),
        ("paused", "stop", "stopping"),
    ],
)
def test_what_is_asked_is_acknowledged_within_two_seconds(run, desk, before, asked, after):
    desk.tell(state=before)
    (run.root / asked).touch()
    assert until(lambda: read_status(run).state == after)
    assert desk.stop_asked == (asked == "stop")
    assert desk.pause_asked == (asked == "pause")


def test_a_pause_that_is_taken_back_is_forgotten(run, desk):
    desk.tell(state="running")
    run.pause_file.touch()
    assert until(lambda: read_status(run).state == "pausing")
    run.pause_file.unlink()
    assert until(lambda: read_status(run).state == "running")
    assert not desk.pause_asked


def test_what_the_trainer_says_of_a_pause_stays(run, desk):
    run.pause_file.touch()
    assert until(lambda: desk.pause_asked)
    desk.tell(state="paused", step=5)
    assert until(lambda: read_status(run).state == "paused")
    assert not until(lambda: read_status(run).state != "paused", 1.2)
    assert read_status(run).step == 5


def test_the_heart_beats_while_the_trainer_is_silent(run, desk):
    beats = {read_status(run).heartbeat}
    assert until(lambda: beats.add(read_status(run).heartbeat) or len(beats) > 3, 4)
    assert abs(time.time() - max(beats)) < 2


def test_what_was_asked_of_the_trainer_before_is_not_obeyed(run):
    run.stop_file.touch()
    run.pause_file.touch()
    desk = Desk(run)
    desk.tell(state="running")
    assert not until(lambda: desk.stop_asked or desk.pause_asked, 1.2)
    assert read_status(run).state == "running"
    run.stop_file.touch()
    desk.close("stopped", "as asked")
    assert not run.stop_file.exists()
    assert read_status(run).state == "stopped"
    assert read_status(run).reason == "as asked"


def test_a_signal_is_not_lost_while_the_files_are_looked_for(run, desk, monkeypatch):
    exists = Path.exists

    def signal_meanwhile(self):
        desk.ask_stop()
        return exists(self)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", signal_meanwhile)
        assert until(lambda: desk.stop_asked)
    assert not until(lambda: not desk.stop_asked, 0.6)


def test_the_desk_goes_on_where_files_cannot_be_looked_for_or_written(run, desk, monkeypatch):
    def fail(*_, **__):
        raise PermissionError("no")

    for owner, name in ((Path, "exists"), (desks, "write_json")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fail)
            assert until(lambda: desk.problem == "no")
        assert until(lambda: desk.problem == "")
    assert desk.is_alive()
    assert time.time() - read_status(run).heartbeat < 2


def test_who_goes_on_has_come_as_far_as_the_one_before(run):
    write_json(
        run.status_file,
        {"state": "failed", "reason": "why", "step": 70, "progress": 0.5, "best_accuracy": 0.9, "pid": 1},
    )
    desk = Desk(run)
    status = read_status(run)
    desk.close("failed", "again")
    assert (status.state, status.reason, status.step, status.progress) == ("starting", "", 70, 0.5)
    assert status.best_accuracy == 0.9
    assert status.pid != 1
    assert read_status(run).step == 70


def test_the_last_word_has_room_on_a_full_disk(run, monkeypatch):
    desk, write = Desk(run), desks.write_json
    reserve = run.root / ".reserve"
    assert reserve.stat().st_size >= 16 * 1024

    def write_where_room_is(path, values):
        if reserve.exists():
            raise OSError(28, "No space left on device")
        write(path, values)

    monkeypatch.setattr(desks, "write_json", write_where_room_is)
    desk.close("failed", "the disk is full")
    assert read_status(run).state == "failed"
    assert read_status(run).reason == "the disk is full"


def test_a_file_that_is_being_read_is_replaced_once_it_is_free(tmp_path, monkeypatch):
    """As on Windows, where a reader bars the way for a moment; and a bar that stays is told."""
    path = tmp_path / "status.json"
    path.write_bytes(b"old")
    replace, tries = Path.replace, []

    def barred(self, target):
        tries.append(target)
        if len(tries) < 3:
            raise PermissionError(13, "being read")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", barred)
    write_whole(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
    tries.clear()
    monkeypatch.setattr(Path, "replace", lambda self, target: barred(self, tries.clear()))
    with pytest.raises(PermissionError):
        write_whole(path, lambda file: file.write(b"newer"))
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]
