"""A public host: whatever a page could send is refused by the launcher, but for the demo as it is.

Run: pytest tests/test_rights.py (about 15 s: one run is really started);
pytest -m slow tests/test_rights.py starts the real demo (about a minute: it makes its pictures first).
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from small_run import small, until, write_pictures

from train import launch, rights
from train.config import PRESETS, TrainConfig, preset
from train.launch import again, delete, kill, pause, resume, start, stop
from train.rights import Visitor, is_public, may_all, require_all, require_start, require_stop, visitor_of
from train.runs import Run, RunError, Status, read_config, write_json
from train.seat import is_held
from train.state import find_runs, look

ANNA, BERT, NOBODY = Visitor("anna"), Visitor("bert"), Visitor()
DEMO = preset("demo", "cpu")


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    for name in ("SPACE_ID", "PATCHLIGHT_PUBLIC", "PATCHLIGHT_TRAIN_TOKEN", "PATCHLIGHT_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATCHLIGHT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "runs"


@pytest.fixture
def public(runs, monkeypatch) -> Path:
    """A public host; its runs folder, which does not exist yet."""
    monkeypatch.setenv("PATCHLIGHT_PUBLIC", "1")
    return runs


@pytest.fixture
def unstarted(monkeypatch):
    """What would have been started: (name of the run, words); nothing is."""
    asked = []
    monkeypatch.setattr(launch, "_launch", lambda run, words, before: asked.append((run.name, words)))
    return asked


def refusal(act, *words, **options) -> str:
    with pytest.raises(RunError) as refused:
        act(*words, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def made(runs: Path, name: str, mark: str | None = "", config: TrainConfig = DEMO, size: int = 0) -> Run:
    """An ended run; `mark` of the visitor who began it, None where it came from the command line."""
    run = Run(runs / name)
    run.root.mkdir(parents=True)
    if mark is not None:
        write_json(run.launch_file, {"preset": "demo", "config": asdict(config), "visitor": mark})
    kept = {"config": asdict(config), "preset": "demo", "data": {}, "resolved": {}}
    write_json(run.config_file, kept)
    host = socket.gethostname()
    write_json(run.status_file, asdict(Status("stopped", heartbeat=time.time(), pid=os.getpid(), host=host)))
    if size:
        run.film_file.write_bytes(b"\0" * size)
    return run


def works(run: Run):
    """As if a trainer worked on it: its lock, to be held while it is tested."""
    status = Status("running", heartbeat=time.time(), pid=2**22 + 7, host=socket.gethostname())
    write_json(run.status_file, asdict(status))
    return FileLock(run.lock_file)


# --- whose host it is -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("SPACE_ID", "me/patchlight", True), ("SPACE_ID", "", False), ("PATCHLIGHT_PUBLIC", "1", True),
     ("PATCHLIGHT_PUBLIC", "yes", True), ("PATCHLIGHT_PUBLIC", "0", False), ("PATCHLIGHT_PUBLIC", "", False)],
)  # fmt: skip
def test_a_host_is_public_by_its_environment(runs, monkeypatch, name, value, expected):
    assert not is_public()
    monkeypatch.setenv(name, value)
    assert is_public() is expected
    assert may_all(ANNA) is not expected
    assert may_all(None)


def test_at_home_nothing_is_closed(runs, unstarted):
    config = replace(DEMO, lr=1e-3, data=str(runs))
    assert start(config, "record", name="mine", visitor=NOBODY).name == "mine"
    assert visitor_of(Run(runs / "mine")) == ""  # at home nobody is written down
    run = made(runs, "b", ANNA.mark)
    for what in ("stop", "pause"):
        with works(run):
            getattr(launch, what)(run, visitor=BERT)
    write_json(run.status_file, asdict(Status("stopped")))
    delete(run, visitor=NOBODY)


def test_only_the_right_token_opens(public, monkeypatch):
    assert not may_all(Visitor("anna", ""))  # unset, it matches nothing
    assert not may_all(Visitor("", ""))
    monkeypatch.setenv("PATCHLIGHT_TRAIN_TOKEN", "")
    assert not may_all(Visitor("anna", ""))
    monkeypatch.setenv("PATCHLIGHT_TRAIN_TOKEN", "open sesame ü")
    for wrong in ("", " ", "open sesame", "open sesame ü ", "OPEN SESAME Ü", "open sesame \u0075\u0308"):
        assert not may_all(Visitor("anna", wrong)), wrong
    assert may_all(Visitor("anna", "open sesame ü"))
    assert may_all(Visitor("", "open sesame ü"))


@given(st.text(), st.text(min_size=1))
@example("", "a")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_other_word_is_the_token(public, monkeypatch, word, token):
    assume(word != token and "\0" not in token)
    monkeypatch.setenv("PATCHLIGHT_TRAIN_TOKEN", token)
    assert not may_all(Visitor("anna", word))
    assert may_all(Visitor("anna", token))


def test_the_token_opens_everything(public, monkeypatch, unstarted):
    monkeypatch.setenv("PATCHLIGHT_TRAIN_TOKEN", "sesame")
    host = Visitor("host", "sesame")
    run = start(replace(DEMO, lr=1e-3), "fast", name="mine", visitor=host)
    assert "--lr=0.001" in unstarted[0][1]
    assert not [word for word in unstarted[0][1] if word.startswith("--stop")]  # nor is it limited
    assert visitor_of(run) == ""  # so no visitor may stop it, and no room is made of it
    other = made(public, "other", ANNA.mark)
    with works(other):
        pause(other, visitor=host)
        stop(other, visitor=host)
    assert other.stop_file.exists()
    resume(made(public, "b"), visitor=host)
    again(made(public, "c"), visitor=host)
    delete(made(public, "d"), visitor=host)
    assert len(unstarted) == 3


# --- what a visitor may start -----------------------------------------------------------------------------


def values_for(field) -> st.SearchStrategy:
    """Values of a field that are allowed by themselves."""
    facts = field.metadata
    if field.type is bool:
        return st.booleans()
    if facts["choices"]:
        return st.sampled_from(facts["choices"])
    if field.type is str:
        folders = ["/", "/etc", "../..", "~", "cpu", "cuda", "cifar10", "patterns", "auto"]
        return st.sampled_from(folders) | st.text(min_size=1, max_size=9)
    numbers = st.integers if field.type is int else st.floats
    return numbers(facts["low"], facts["high"])


FIELDS = {field.name: field for field in fields(TrainConfig)}
QUICKLY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def check_start(runs: Path, unstarted: list, changes: dict) -> None:
    """The demo with these changes is refused, or they are the seed, or limits that are overwritten."""
    try:
        config = replace(DEMO, **changes)
    except ValueError:
        return
    free = ("seed", "stop_minutes", "stop_mb")
    if any(value != getattr(DEMO, name) for name, value in changes.items() if name not in free):
        said = refusal(start, config, "demo", visitor=ANNA)
        assert said == "on this public page only the preset demo can be started, as it is"
        assert not runs.exists()
        assert unstarted == []
        return
    start(config, "demo", visitor=ANNA)
    words = set(unstarted.pop()[1])
    limits = {"--stop-minutes=5.0", "--stop-mb=200"}
    assert limits <= words <= {"--preset", "demo", f"--seed={config.seed}"} | limits
    shutil.rmtree(runs)


@pytest.mark.parametrize("name", FIELDS)
@settings(max_examples=12, **QUICKLY)
@given(data=st.data())
def test_a_changed_setting_is_refused_but_the_seed(public, unstarted, name, data):
    check_start(public, unstarted, {name: data.draw(values_for(FIELDS[name]))})


@settings(max_examples=100, **QUICKLY)
@given(data=st.data())
def test_changed_settings_are_refused(public, unstarted, data):
    chosen = data.draw(st.lists(st.sampled_from(list(FIELDS)), min_size=2, max_size=4, unique=True))
    check_start(public, unstarted, {name: data.draw(values_for(FIELDS[name])) for name in chosen})


@pytest.mark.parametrize("name", [*PRESETS, "nonsense", "../demo", ""])
def test_other_presets_are_refused(public, unstarted, name):
    for config in (DEMO, PRESETS.get(name, PRESETS["fast"])):
        if (name, config) != ("demo", DEMO):
            said = refusal(start, config, name, visitor=ANNA)
            assert said == "on this public page only the preset demo can be started, as it is"
    assert not public.exists()


def test_names_and_strangers_are_refused(public, unstarted):
    for name in ("mine", "../x", "demo-1", " "):
        assert "cannot be named" in refusal(start, DEMO, "demo", name=name, visitor=ANNA)
    for stranger in (NOBODY, Visitor("", "guess")):
        said = refusal(start, DEMO, "demo", visitor=stranger)
        assert said == "this page does not know you yet: reload it"
    assert not public.exists()


# --- what a visitor may do to runs ------------------------------------------------------------------------


@pytest.mark.parametrize("what", [resume, pause, delete])
def test_resume_pause_and_delete_are_closed_even_for_own_runs(public, unstarted, what):
    run = made(public, "demo-1", ANNA.mark)
    before = {path: path.stat().st_mtime_ns for path in public.rglob("*")}
    said = refusal(what, run, visitor=ANNA)
    assert said == f"on this public page nobody can {what.__name__} a run without the host's token"
    with works(run):
        assert refusal(what, run, visitor=ANNA) == said
    (run.root / ".lock").unlink()
    assert set(before) == set(public.rglob("*"))
    assert unstarted == []


@pytest.mark.parametrize("what", [stop, kill])
@pytest.mark.parametrize("mark", [ANNA.mark, "", None, "anna"], ids=["hers", "no one's", "command", "id"])
def test_only_who_started_a_run_may_end_it(public, monkeypatch, what, mark):
    run = made(public, "demo-1", mark)
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    with works(run):
        for other in (
            BERT,
            NOBODY,
            Visitor("", "guess"),
            Visitor(ANNA.mark),
            *([ANNA] * (mark != ANNA.mark)),
        ):
            said = refusal(what, run, visitor=other)
            assert said in (
                "on this public page a run can be stopped only by who started it",
                "this page does not know you yet: reload it",
            )
        assert (run.stop_file.exists(), killed) == (False, [])
        if mark == ANNA.mark:
            what(run, visitor=ANNA)
            assert (run.stop_file.exists(), killed) == ((True, []) if what is stop else (False, [2**22 + 7]))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"visitor": null}', '{"visitor": [""]}', '{"visitor": 3}', "[" * 9999]
)
def test_a_damaged_launch_file_is_nobodys(public, text):
    run = made(public, "demo-1", ANNA.mark)
    run.launch_file.write_text(text)
    assert visitor_of(run) == ""
    for visitor in (ANNA, NOBODY):
        refusal(require_stop, visitor, run)


def test_again_is_a_start_like_any_other(public, unstarted):
    theirs = made(public, "demo-1", BERT.mark, replace(DEMO, seed=7, stop_minutes=5.0, stop_mb=200))
    run = again(theirs, visitor=ANNA)
    assert visitor_of(run) == ANNA.mark
    assert "--seed=7" in unstarted[0][1]
    changed = made(public, "changed", None, replace(DEMO, lr=1e-3))
    for words in ({}, {"name": "x"}):
        assert "only the preset demo" in refusal(again, changed, visitor=ANNA, **words)
    assert "cannot be named" in refusal(again, theirs, name="x", visitor=ANNA)
    assert len(unstarted) == 1


def test_who_has_the_machine_is_not_asked(public, unstarted):
    start(replace(DEMO, lr=1e-3), "demo", name="mine")
    run = made(public, "b", ANNA.mark)
    with works(run):
        stop(run)
        pause(run)
    require_start(None, "record", PRESETS["record"])
    require_stop(None, run)
    require_all(None, "fly")


# --- what is kept of them ---------------------------------------------------------------------------------


def test_what_is_kept_of_a_visitor_is_not_who_they_are(public, unstarted):
    run = start(DEMO, "demo", visitor=Visitor("cookie-of-anna", "my guess"))
    text = run.launch_file.read_text()
    assert "cookie" not in text
    assert "guess" not in text
    found = json.loads(text)
    assert set(found) == {"preset", "config", "visitor"}
    assert found["visitor"] == hashlib.sha256(b"cookie-of-anna").hexdigest()[:24]
    assert not [word for word in unstarted[0][1] if "anna" in word or found["visitor"] in word]


@given(st.text(), st.text())
def test_two_visitors_have_two_marks(one, other):
    assert (Visitor(one).mark == Visitor(other).mark) == (one == other)
    assert bool(Visitor(one).mark) == bool(one)
    assert not one or Visitor(one).mark != one


# --- room -------------------------------------------------------------------------------------------------


def test_room_is_made_of_ended_runs_of_visitors_oldest_first(public, unstarted, monkeypatch):
    monkeypatch.setattr(launch, "PUBLIC_FOLDER_MB", 0.1)  # half of it may be held before one more starts
    sizes = {
        "old": 30_000,
        "command": 90_000,
        "host": 90_000,
        "middle": 20_000,
        "at-work": 30_000,
        "new": 9_000,
    }
    marks = {"command": None, "host": ""}
    for age, (name, size) in enumerate(sizes.items()):
        run = made(public, name, marks.get(name, BERT.mark), size=size)
        began = time.time() - 1000 + 10 * age
        for file in (run.launch_file, run.config_file):
            if file.exists():
                os.utime(file, (began, began))
    with works(Run(public / "at-work")):  # an ended one that nobody had told: not the seat's
        start(DEMO, "demo", visitor=ANNA)
        left = {run.name for run in find_runs()}
        assert left == {"command", "host", "middle", "at-work", "new", "demo-1"}
        monkeypatch.setattr(launch, "PUBLIC_FOLDER_MB", 0.0)
        start(DEMO, "demo", visitor=ANNA)
    # The first demo-1 never began, as nothing was started, and was deleted for the second.
    assert {run.name for run in find_runs()} == {"command", "host", "at-work", "demo-1"}
    assert not list(public.glob(".deleted-*"))


def test_at_home_nothing_is_deleted_to_make_room(runs, unstarted, monkeypatch):
    monkeypatch.setattr(launch, "PUBLIC_FOLDER_MB", 0.0)
    made(runs, "old", BERT.mark, size=1000)
    start(DEMO, "demo")
    start(DEMO, "demo", visitor=ANNA)
    assert (runs / "old").exists()


# --- for real ---------------------------------------------------------------------------------------------


def tiny_demo(tmp_path, monkeypatch) -> TrainConfig:
    """What `demo` is taken for, where the real one would first make 50,000 pictures."""
    config = small(write_pictures(tmp_path / "pictures"), epochs=1e5, log_steps=20, checkpoint_steps=50)
    monkeypatch.setattr(rights, "PRESETS", PRESETS | {"demo": config})
    return config


def real_demo(tmp_path, monkeypatch) -> TrainConfig:
    return DEMO


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
@pytest.mark.parametrize("demo", [tiny_demo, pytest.param(real_demo, marks=pytest.mark.slow)])
def test_a_run_started_by_a_visitor_is_limited_and_theirs(runs, tmp_path, monkeypatch, demo):
    monkeypatch.setenv("SPACE_ID", "me/patchlight")
    config = demo(tmp_path, monkeypatch)
    run = start(replace(config, seed=3), "demo", visitor=ANNA)
    try:
        assert run.name == "demo-1"
        assert look(run).word == "waiting"
        assert refusal(stop, run, visitor=BERT).endswith("only by who started it")
        assert refusal(start, config, "demo", visitor=BERT).startswith("demo-1 is at work, and one run")
        assert until(run.config_file.exists, 300), run.log_file.read_text()
        kept = read_config(run)["config"]
        assert (kept["stop_minutes"], kept["stop_mb"], kept["seed"]) == (5.0, 200, 3)
        assert TrainConfig(**kept) == rights.limited(replace(config, seed=3))
        stop(run, visitor=ANNA)
        assert until(lambda: look(run).word == "stopped", 60)
        assert look(run).reason == "stopped as asked"
        assert until(lambda: not is_held(run.lock_file), 10)
        for act in (resume, delete):
            assert refusal(act, run, visitor=ANNA).endswith("without the host's token")
    finally:
        if look(run).is_active:
            kill(run)
