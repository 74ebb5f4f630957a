"""python -m train list, pause, resume, stop, delete, and run --detach: what the page does, by words.

Run: pytest tests/test_runs_cli.py (about 10 s: three processes start a run at once).
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from small_run import small, write_pictures

from train import launch
from train.__main__ import build_parser, main
from train.config import PRESETS, TrainConfig, as_flags, preset
from train.runs import Run, RunError, Status, append_metrics, write_json
from train.seat import is_held, who_works
from train.state import find_runs, look

ROOT = Path(__file__).parents[1]
PATHS = [
    "",
    "../x",
    "/etc",
    "a/b",
    "..",
    ".",
    "a\nb",
    "a" * 300,
    "läuf",
    "x.",
    "CON",
    "~/x",
    "demo-1/../nothing",
]
COMMANDS = ["pause", "resume", "stop", "delete"]


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """An empty runs folder, relative, in an empty folder to be in."""
    for name in ("SPACE_ID", "PATCHLIGHT_PUBLIC", "PATCHLIGHT_DATA", "PATCHLIGHT_RUNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here" / "runs"


@pytest.fixture
def locks():
    """locks.enter_context(FileLock(...)): as if a trainer lived, until the test ends."""
    with ExitStack() as held:
        yield held


def made(runs: Path, name: str, told: str = "stopped", **status) -> Run:
    run = Run(runs / name)
    run.root.mkdir(parents=True)
    kept = {"config": asdict(TrainConfig()), "preset": "fast", "data": {}, "resolved": {}}
    write_json(run.config_file, kept)
    write_json(run.status_file, asdict(Status(told, heartbeat=time.time(), **status)))
    run.lock_file.touch()
    return run


def says(capsys, *words: str) -> list[str]:
    """What these words say where they succeed, by line."""
    code = main(list(words))
    told = capsys.readouterr()
    assert (code, told.err) == (0, "")
    return told.out.splitlines()


def refused(capsys, *words: str) -> str:
    """The one line that these words are refused with."""
    try:
        code = main(list(words))
    except SystemExit as ended:  # argparse's own way
        code = ended.code
    told = capsys.readouterr()
    assert (code, told.out) == (2, "")
    line = re.fullmatch(r"python -m train(?: [a-z]+)?: (.+)\n", told.err)
    assert line, told.err
    return line[1]


def everything(folder: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


# --- list -------------------------------------------------------------------------------------------------


def test_list_says_where_to_begin(runs, capsys):
    assert says(capsys, "list") == [
        "There is no run under runs yet. Start one: python -m train run --preset demo"
    ]
    assert says(capsys, "list", "--json") == []
    assert not runs.exists()


def test_list_says_a_line_for_each_run(runs, capsys, locks):
    made(runs, "old", "finished", progress=1.0, step=1234567, val_accuracy=0.9876)
    made(runs, "in-between", "failed", reason="the disk is full", progress=0.25, step=40)
    new = made(runs, "new", "running", progress=0.004, pid=2**22 + 7)
    locks.enter_context(FileLock(new.lock_file))
    for age, name in enumerate(("new", "in-between", "old")):
        os.utime(runs / name / "config.json", (time.time() - age,) * 2)
    assert says(capsys, "list") == [
        "new         running     0%  step       0          watch it, pause or stop it",
        "in-between  failed     25%  step      40          the disk is full",
        "old         finished  100%  step 1,234,567   98.8%  read its log",
    ]
    lines = [json.loads(line) for line in says(capsys, "list", "--json")]
    assert [(each["name"], each["state"], each["reason"], each["wish"]) for each in lines] == [
        ("new", "running", "", ""),
        ("in-between", "failed", "the disk is full", ""),
        ("old", "finished", "", ""),
    ]
    assert lines[2]["status"]["val_accuracy"] == 0.9876
    assert set(lines[0]["status"]) == set(Status.__dataclass_fields__)


def test_list_bears_any_damage(runs, capsys):
    (runs / "no-run").mkdir(parents=True)
    for number, text in enumerate(['{"state": 3}', "{", "", '{"state": "evaporating\\n\\n", "step": 1e300}']):
        made(runs, f"r{number}").status_file.write_text(text)
        made(runs, f"c{number}").config_file.write_text(text)
    made(runs, "läuf\n 1")
    append_metrics(Run(runs / "r0"), {"step": 1})
    with (runs / "r0" / "metrics.jsonl").open("a") as file:
        file.write('{"st')
    (runs / "asked").mkdir()
    write_json(runs / "asked" / "launch.json", {})
    for line in says(capsys, "list", "--json"):
        json.loads(line)
    words = " ".join(says(capsys, "list"))
    assert all(name in words for name in ("r0", "r1", "r2", "r3", "c0", "asked"))


def test_list_takes_no_torch_and_no_time(runs):
    """A person waits for it: it must not import what only training needs."""
    made(runs, "a")
    code = """
import sys, time
from train.__main__ import main
code = main(["list"])
print(code, "torch" in sys.modules, "streamlit" in sys.modules)
"""
    quickest = 1e9
    for _ in range(3):  # the quickest: others use this machine too
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
            text=True, timeout=60, check=True,
        )  # fmt: skip
        quickest = min(quickest, time.monotonic() - began)
        assert done.stdout.splitlines()[-1] == "0 False False"
    assert quickest < 1


# --- asking -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["a", "runs/a", "./runs/a/"])
def test_a_run_is_asked_by_its_name_or_its_folder(runs, capsys, locks, way):
    run = made(runs, "a", "running", pid=2**22 + 7)
    locks.enter_context(FileLock(run.lock_file))
    assert says(capsys, "pause", way) == ["a: running, pausing after this step"]
    assert run.pause_file.exists()
    assert says(capsys, "resume", way) == ["a: running"]
    assert not run.pause_file.exists()
    assert says(capsys, "stop", way) == ["a: running, stopping: it ends its step and keeps a checkpoint"]
    assert run.stop_file.exists()


def test_stop_kill_ends_the_process(runs, capsys, locks, monkeypatch):
    run, killed = made(runs, "a", "running", pid=2**22 + 7), []
    locks.enter_context(FileLock(run.lock_file))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    assert says(capsys, "stop", "a", "--kill") == ["The process of a was ended."]
    assert killed == [2**22 + 7]
    assert not run.stop_file.exists()


def test_delete_deletes(runs, capsys):
    made(runs, "a"), made(runs, "b")
    assert says(capsys, "delete", "a") == ["a is deleted."]
    assert [run.name for run in find_runs()] == ["b"]
    assert says(capsys, "delete", "runs/b") == ["b is deleted."]
    assert [path.name for path in runs.iterdir()] == [".starting"]  # by which starts take turns


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", PATHS, ids=ascii)
def test_a_run_that_is_not_there_is_one_line(runs, capsys, command, name):
    made(runs, "demo-1")
    (runs.parent.parent / "x").mkdir()
    before = everything(runs.parent.parent)
    assert refused(capsys, command, name)
    assert everything(runs.parent.parent) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_what_makes_no_sense_is_one_line(runs, capsys, command):
    made(runs, "a", "finished")
    before = everything(runs)
    if command != "delete":
        assert refused(capsys, command, "a").startswith("a is finished: ")
    assert "the following arguments are required: RUN" in refused(capsys, command)
    assert "unrecognized arguments: b" in refused(capsys, command, "a", "b")
    assert "unrecognized arguments: --json" in refused(capsys, command, "a", "--json")
    assert everything(runs) == before


def test_a_run_at_work_is_neither_deleted_nor_resumed(runs, capsys, locks):
    run = made(runs, "a", "running", pid=2**22 + 7)
    locks.enter_context(FileLock(run.lock_file))
    assert refused(capsys, "delete", "a") == "a is running: stop it first"
    assert refused(capsys, "resume", "a") == "a is running: there is nothing to resume"
    assert look(run).is_active


# --- settings as words ------------------------------------------------------------------------------------


PARSER = build_parser()


def parsed(words: list[str], kind: str) -> TrainConfig:
    """What `python -m train run` makes of these words, on a device of this kind."""
    args = PARSER.parse_args(["run", *words])
    changes = {
        name.removeprefix("set_"): value
        for name, value in vars(args).items()
        if name.startswith("set_") and value is not None
    }
    return preset(args.preset or "fast", kind, **changes)


def values_for(field) -> st.SearchStrategy:
    facts = field.metadata
    if field.type is bool:
        return st.booleans()
    if facts["choices"]:
        return st.sampled_from(facts["choices"])
    if field.name == "data":
        return st.sampled_from(["cifar10", "patterns", "/a b", "-x", "--lr=3", "'", "läuf"]) | st.text(
            st.characters(codec="utf-8", exclude_characters="\0"), min_size=1
        )
    if field.type is str:
        return st.sampled_from(["auto", "cpu", "cuda", "cuda:1", "mps"])
    low, high = facts["low"], facts["high"]
    if field.type is int:
        return st.integers(low, high) | st.sampled_from([1, 2, 4, 8, 64]).filter(lambda n: low <= n <= high)
    return st.floats(low, high) | st.sampled_from([0.0, 0.5, 1.0, 3.0]).filter(lambda n: low <= n <= high)


FIELDS = {field.name: field for field in fields(TrainConfig)}
CHANGES = st.lists(st.sampled_from(list(FIELDS)), unique=True, max_size=6).flatmap(
    lambda names: st.fixed_dictionaries({name: values_for(FIELDS[name]) for name in names})
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(list(PRESETS)), st.sampled_from(list(PRESETS)), st.sampled_from(["cpu", "cuda"]), CHANGES
)
@example("fast", "fast", "cuda", {})
@example("record", "record", "cpu", {"epochs": 3.0, "minutes": 0.0, "fit_epochs": False})
@example("record", "record", "cpu", {"fit_epochs": False})
@example("fast", "fast", "cpu", {"data": "patterns"})  # mirrored, though `preset` would not
@example("demo", "demo", "cpu", {"data": "cifar10"})
@example("demo", "demo", "cpu", {"mirror": True})
@example("demo", "demo", "cpu", {"data": "--lr=3"})
@example("demo", "demo", "cpu", {"data": "a\n 'b' $HOME"})
@example("demo", "tutorial", "cuda", {"epochs": 0.0, "minutes": 1e-9})
def test_settings_survive_the_command_line(base, told_as, kind, changes):
    """Whatever is started arrives at the trainer as it was, also where its preset is another one's name."""
    try:
        config = replace(preset(base, kind), **changes)
    except ValueError:
        assume(False)
    words = as_flags(config, told_as, kind)
    assert parsed(words, kind) == config
    assert parsed(shlex.split(shlex.join(words)), kind) == config
    again = as_flags(parsed(words, kind), told_as, kind)
    assert again == words


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_preset_as_it_is_needs_no_other_word(name, kind):
    assert as_flags(preset(name, kind), name, kind) == ["--preset", name]


# --- run --detach -----------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch):
    """What would be started; nothing is."""
    asked = []

    def start(config, preset_name, *, name="", visitor=None):
        asked.append((config, preset_name, name))
        return made(Path("runs"), name or f"{preset_name}-1", "waiting", pid=4711)

    monkeypatch.setattr(launch, "start", start)
    return asked


def test_a_detached_run_is_said_with_how_to_end_it(runs, capsys, started):
    said = says(capsys, "run", "--preset", "demo", "--seed", "5", "--device", "cpu", "--detach")
    assert said == [
        "demo-1 is at work, as process 4711, in runs/demo-1",
        "Watch it: python -m train list, or the page. End it: python -m train stop demo-1",
    ]
    assert started == [(preset("demo", "cpu", seed=5, device="cpu"), "demo", "")]


@pytest.mark.parametrize("out", ["runs/mine", "./runs/mine/", "runs/../runs/mine"])
def test_a_detached_run_gets_the_name_of_its_folder(runs, capsys, started, out):
    says(capsys, "run", "--device", "cpu", "--detach", "--out", out)
    assert [name for *_, name in started] == ["mine"]


@pytest.mark.parametrize("out", ["elsewhere", "runs/a/b", "..", "runs/..", "runs", "/etc", ".", "runs/a/.."])
def test_a_detached_run_lies_under_the_runs_folder(runs, capsys, out):
    said = refused(capsys, "run", "--device", "cpu", "--detach", "--out", out)
    assert said.startswith("a detached run lies directly under the runs folder: --out runs")
    assert list(runs.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["CON", "läuf", "x.", ".x", "a\nb", "a" * 300, " ", "-x"], ids=ascii)
def test_a_detached_run_has_a_plain_name(runs, capsys, name):
    said = refused(capsys, "run", "--device", "cpu", "--detach", f"--out=runs/{name}")
    assert "is not a name for a run" in said
    assert list(runs.parent.iterdir()) == []


def test_what_cannot_be_detached_is_one_line(runs, capsys):
    made(runs, "a")
    assert refused(capsys, "run", "--resume", "--detach", "--out", "runs/a").startswith(
        "--resume --detach is `python -m train resume RUN`"
    )
    said = refused(capsys, "run", "--data", "patterns", "--detach", "--out", "runs/a")
    assert said == "there is a run a already: choose another name"
    assert refused(capsys, "run", "--detach", "--lr", "-1").startswith("lr is from ")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows has no SIGKILL")
def test_of_three_who_start_at_once_one_wins(runs, tmp_path):
    pictures = write_pictures(tmp_path / "pictures")
    words = as_flags(small(pictures, epochs=1e5, log_steps=20, checkpoint_steps=50), "demo")
    command = [sys.executable, "-m", "train", "run", *words, "--detach"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    several = [subprocess.Popen(command, env=environment, **pipes) for _ in range(3)]
    came = [(*one.communicate(timeout=120), one.returncode) for one in several]
    (run,) = find_runs()
    try:
        assert sorted(code for *_, code in came) == [0, 2, 2]
        for out, err, code in came:
            if code == 0:
                pid = look(run).status.pid
                assert out.splitlines()[0] == f"demo-1 is at work, as process {pid}, in {runs}/demo-1"
                assert err == ""
            else:
                said = "demo-1 is at work, and one run at a time has the machine: "
                assert err.startswith(f"python -m train run: {said}")
                assert (out, err.count("\n")) == ("", 1)
        assert who_works(runs) == "demo-1"
        assert is_held(run.lock_file)
    finally:
        try:
            launch.kill(run)
        except RunError as error:
            print(error)
