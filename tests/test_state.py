"""What is said of a run from its files and its lock alone: seven states, wishes, damage, odd names.

No trainer runs here: a lock that the test holds stands for one. Run: pytest tests/test_state.py (2 s).
"""

import json
import os
import shutil
import socket
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from train import state
from train.runs import ACTIVE, Run, RunError, Status, append_metrics, read_metrics, write_json
from train.state import find_run, find_runs, look, look_at_all, require_plain

WORDS = {"waiting", "running", "paused", "stopped", "finished", "failed", "vanished"}
ODD_NAMES = [
    "../x", "..", ".", "", "/etc", "a/b", "a\\b", "C:x", "CON", "con", "nul.txt", "COM1", "a\nb", "a\n",
    "\na", "a b", "-x", ".x", "x.", "a" * 300, "a" * 65, "läuf", "跑", "a\0b", "~", "$HOME", "a;b", "*",
    "a\u202eb", "１",
]  # fmt: skip
HERE = Status(state="running", step=40, heartbeat=0.0, pid=4711, host=socket.gethostname(), started=1.0)


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PATCHLIGHT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def run(runs) -> Run:
    """One that began: with a config.json."""
    return made(runs, "demo-1")


def made(runs: Path, name: str) -> Run:
    run = Run(runs / name)
    run.root.mkdir()
    write_json(run.config_file, {"config": {}, "data": {}, "resolved": {}})
    return run


def tells(run: Run, name: str, silent_seconds: float = 0.0, **changes) -> None:
    """Its status.json, written so long ago."""
    status = replace(HERE, state=name, heartbeat=time.time() - silent_seconds)
    write_json(run.status_file, asdict(replace(status, **changes)))


@contextmanager
def held(run: Run):
    with FileLock(run.lock_file):
        yield


def told(run: Run) -> tuple[str, str, str, str]:
    seen = look(run)
    assert seen.word in WORDS
    assert "\n" not in seen.reason + seen.next
    assert not seen.reason.endswith(".")
    assert seen.next
    return seen.word, seen.reason, seen.next, seen.wish


# --- seven words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "word", "reason", "after"),
    [
        ("waiting", "waiting", "opening its pictures and its model", "it starts by itself"),
        ("starting", "waiting", "opening its pictures and its model", "it starts by itself"),
        ("running", "running", "", "watch it, pause or stop it"),
        ("pausing", "running", "pausing after this step", "it takes a moment"),
        ("stopping", "running", "stopping: it ends its step and keeps a checkpoint",
         "it takes a moment"),
    ],
)  # fmt: skip
def test_a_run_that_somebody_works_on(run, name, word, reason, after):
    tells(run, name)
    with held(run):
        wish = {"pausing": "pause", "stopping": "stop"}.get(name, "")
        assert told(run) == (word, reason, after, wish)
        assert look(run).is_active
        assert not look(run).is_silent


def test_paused_is_told_while_its_file_is_there(run):
    tells(run, "paused")
    run.pause_file.touch()
    with held(run):
        assert told(run) == ("paused", "", "resume or stop it", "")


def test_a_reason_of_several_lines_becomes_one(run):
    tells(run, "failed", reason="a weight was lost:\n  size mismatch\n")
    assert told(run)[1] == "a weight was lost: size mismatch"


@pytest.mark.parametrize("name", ["stopped", "finished", "failed"])
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_run_that_is_over(run, name, has_checkpoint):
    if has_checkpoint:
        run.checkpoint("last").parent.mkdir()
        run.checkpoint("last").touch()
    looking = "look into its checkpoint" if has_checkpoint else "read its log"
    tells(run, name, 1e6, reason="the disk was full.")  # however long ago: nobody need beat then
    after = looking if name == "finished" else f"resume it, or {looking}"
    assert told(run) == (name, "the disk was full", after, "")
    assert not look(run).is_active


def test_one_that_ended_before_it_began_is_started_again(run):
    run.config_file.unlink()
    for name in ("stopped", "failed", "running"):
        tells(run, name)
        assert told(run)[2] == "start it again"


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_without_its_lock_an_active_run_has_vanished_at_once(run, name):
    """Its heartbeat is fresh: the process was killed a moment ago."""
    tells(run, name)
    killed = "its process ended at step 40 without a word: killed, or the machine went down"
    assert told(run) == ("vanished", killed, "resume it, to go on from its last checkpoint", "")
    run.lock_file.touch()  # stale: nobody holds it
    assert look(run).word == "vanished"
    assert look(run).status.seconds_left is None


def test_vanished_before_its_first_step(run):
    tells(run, "starting", step=0)
    assert "ended before its first step without a word" in told(run)[1]


def test_one_just_asked_for_waits_though_nobody_holds_it_yet(run, monkeypatch):
    tells(run, "waiting", pid=0)
    assert told(run) == ("waiting", "opening its pictures and its model", "it starts by itself", "")
    tells(run, "waiting", state.VANISHED_SECONDS + 1, pid=0)  # it never came
    assert look(run).word == "vanished"


# --- wishes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "files", "wish"),
    [
        ("waiting", ["pause"], "pause"),
        ("starting", ["pause"], "pause"),
        ("running", ["pause"], "pause"),
        ("paused", ["pause"], ""),
        ("paused", [], "resume"),
        ("waiting", ["stop"], "stop"),
        ("running", ["stop"], "stop"),
        ("running", ["stop", "pause"], "stop"),
        ("paused", ["stop", "pause"], "stop"),
        ("paused", ["stop"], "stop"),
    ],
)
def test_what_is_asked_for_and_not_done(run, name, files, wish):
    tells(run, name)
    for file in files:
        (run.root / file).touch()
    with held(run):
        word, reason, _, seen_wish = told(run)
        assert (word, seen_wish) == (state._WORDS[name], wish)
        assert bool(reason) == bool(wish)


def test_a_run_that_is_over_has_no_wish(run):
    tells(run, "stopped")
    run.stop_file.touch()
    run.pause_file.touch()
    assert told(run)[3] == ""


# --- silence ----------------------------------------------------------------------------------------------


def test_a_process_that_gives_no_sign_is_silent_not_vanished(run):
    tells(run, "running", 77)
    with held(run):
        said = "its process is there, but has given no sign for 77 s"
        assert told(run) == ("running", said, "wait, or end its process", "")
        assert look(run).is_silent
    assert look(run).word == "vanished"


def test_who_opens_its_pictures_may_be_silent_for_longer(run):
    """To make the patterns takes a minute on a loaded machine, and no thread beats meanwhile."""
    tells(run, "waiting", 100)
    with held(run):
        assert told(run)[1] == "opening its pictures and its model"
        tells(run, "waiting", 1000)
        assert look(run).is_silent


def test_of_another_machine_only_silence_tells(run):
    tells(run, "running", host="elsewhere")
    assert look(run).word == "running"
    for wrong_clock_seconds in (60, -60):
        tells(run, "running", wrong_clock_seconds, host="elsewhere")
        assert look(run).word == "running"
    for silent_seconds in (1000, -1000):
        tells(run, "running", silent_seconds, host="elsewhere")
        assert look(run).word == "vanished"
        with held(run):  # this lock says nothing about over there
            assert look(run).word == "vanished"


def test_a_clock_put_back_makes_nobody_vanish(run):
    tells(run, "running", -3600)
    with held(run):
        assert told(run)[:2] == ("running", "")


# --- damage -----------------------------------------------------------------------------------------------


DAMAGED = [
    "", "{", "nonsense", "[]", "null", "3", '"running"', "\x00\x00", "[" * 5000,
    '{"state": 3}', '{"state": null}', '{"state": ["running"]}', '{"state": "running", "step": "many"}',
    '{"state": "running", "heartbeat": null}', '{"state": "running", "heartbeat": 1e999}',
    '{"state": "running", "pid": {}}', '{"state": "running", "progress": true}',
    '{"state": "running", "step": ' + "9" * 400 + "}", '{"state": "running", "host": 5}',
    '{"state": "finished", "reason": []}', '{"state": "finished", "val_accuracy": "good"}',
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:40])
def test_a_damaged_status_is_told_and_breaks_nothing(run, text):
    run.status_file.write_text(text)
    damaged = "its status.json is missing or damaged, and no trainer is at work on it"
    assert told(run) == ("vanished", damaged, "resume it, to go on from its last checkpoint", "")
    with held(run):
        assert look(run).word == "running"
        assert "its status cannot be read" in told(run)[1]
    assert [seen.name for seen in look_at_all()] == ["demo-1"]


def test_bytes_that_are_no_text(run):
    run.status_file.write_bytes(b"\xff\xfe{")
    assert look(run).word == "vanished"
    run.status_file.unlink()
    run.status_file.mkdir()
    assert look(run).word == "vanished"


def test_without_a_status(run):
    assert look(run).word == "vanished"
    with held(run):
        assert look(run).word == "running"


def test_a_state_of_another_version(run):
    tells(run, "evaporating\n" * 30)
    word, reason, *_ = told(run)
    assert (word, reason[:60]) == ("failed", "its status names a state that this version does not know: 'e")
    assert len(reason) < 120
    with held(run):
        assert look(run).word == "running"  # the lock is right


def test_fields_of_another_version_are_left_out(run):
    write_json(run.status_file, asdict(replace(HERE, state="finished")) | {"mood": "good"})
    assert look(run).word == "finished"


def test_torn_metrics_are_read_as_far_as_they_are_whole(run):
    append_metrics(run, {"step": 1, "loss": 2.0})
    with run.metrics_file.open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert [row["step"] for row in read_metrics(run)] == [1]
    assert look(run).word == "vanished"
    append_metrics(run, {"step": 3, "loss": 1.0})
    assert [row["step"] for row in read_metrics(run)] == [1, 3]


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(list(Status.__dataclass_fields__)),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=9)
        | st.sampled_from(ACTIVE)
        | st.lists(st.integers(), max_size=2),
    )
)
def test_whatever_a_status_says_there_is_one_word(tmp_path_factory, found):
    run = Run(tmp_path_factory.mktemp("any") / "demo-1")
    run.root.mkdir()
    run.status_file.write_text(json.dumps(found))
    told(run)
    with held(run):
        word = told(run)[0]
        if found.get("state") in (None, *ACTIVE) and found.get("host", "") == "":
            assert word in ("waiting", "running", "paused")


# --- which runs there are ---------------------------------------------------------------------------------


def test_a_folder_that_is_no_run(runs):
    (runs / "pictures").mkdir()
    (runs / "note.txt").touch()
    (runs / ".deleted-000000000000").mkdir()
    (runs / ".deleted-000000000000" / "config.json").touch()
    assert find_runs() == []
    for name in ("pictures", "note.txt", "gone"):
        with pytest.raises(RunError, match=rf"^there is no run {name} \(any more\)$"):
            look(Run(runs / name))


def test_one_that_was_asked_for_is_there_before_anything_else(runs):
    """Its launcher was killed between two files: it can be seen, and so deleted."""
    run = Run(runs / "demo-1")
    run.root.mkdir()
    write_json(run.launch_file, {})
    assert [seen.word for seen in look_at_all()] == ["vanished"]
    assert told(run)[2] == "start it again"


def test_newest_first(runs):
    for age, name in ((30, "b"), (10, "c"), (20, "a")):
        run = made(runs, name)
        os.utime(run.config_file, (time.time() - age,) * 2)
        tells(run, "finished")  # written last, and of no account
    assert [run.name for run in find_runs()] == ["c", "a", "b"]
    assert [seen.name for seen in look_at_all()] == ["c", "a", "b"]


def test_no_runs_folder_is_no_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHLIGHT_RUNS", str(tmp_path / "nowhere"))
    assert find_runs() == look_at_all() == []
    assert find_runs(tmp_path / "other") == []
    assert list(tmp_path.iterdir()) == []  # who looks makes nothing


def test_a_run_deleted_while_it_is_listed_is_left_out(runs, monkeypatch):
    for age, name in enumerate("cba"):
        os.utime(made(runs, name).config_file, (time.time() - age,) * 2)
    looked = state.look

    def look_late(run):
        if run.name == "b":
            shutil.rmtree(run.root)
        return looked(run)

    monkeypatch.setattr(state, "look", look_late)
    assert [seen.name for seen in look_at_all()] == ["c", "a"]


def test_looking_never_brings_a_deleted_run_back(run):
    tells(run, "running")
    run.lock_file.touch()
    shutil.rmtree(run.root)
    with pytest.raises(RunError):
        look(run)
    assert state.is_held(run.lock_file) is False
    assert not run.root.exists()


def test_a_link_is_known_by_its_own_name(runs, tmp_path):
    run = made(tmp_path, "far")
    tells(run, "finished")
    (runs / "near").symlink_to(run.root, target_is_directory=True)
    (runs / "broken").symlink_to(tmp_path / "nothing")
    (runs / "loop").symlink_to(runs / "loop")
    assert [seen.name for seen in look_at_all()] == ["near"]
    assert look(find_run("near")).word == "finished"


# --- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_an_odd_name_is_no_name_and_finds_nothing(runs, name):
    (runs.parent / "x").mkdir()
    write_json(Run(runs.parent / "x").config_file, {})  # what ../x would find
    made(runs, "a")
    for refuse in (require_plain, find_run):
        with pytest.raises(RunError) as refused:
            refuse(name)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 800


@pytest.mark.parametrize("name", ["a", "demo-1", "2026.12", "A_b-c.d", "a" * 64, "console", "x.con"])
def test_a_plain_name_is_kept(name):
    assert require_plain(name) == name


@given(st.text(max_size=70))
def test_what_is_plain_is_one_part_of_a_path(name):
    try:
        require_plain(name)
    except RunError:
        return
    assert name.isascii()
    assert name.isprintable()
    assert (Path("runs") / name).parent == Path("runs")
    assert not name.startswith((".", "-"))
    assert not name.endswith(".")


def test_a_run_is_found_by_its_whole_name_only(run, runs):
    assert find_run("demo-1") == run
    for name in ("demo", "demo-1/", "./demo-1", "DEMO-1", "demo-1\n", str(run.root)):
        with pytest.raises(RunError, match=r"^there is no run "):
            find_run(name)
