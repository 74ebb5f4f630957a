"""The Train tab without a browser: every state, every button, the form, what is damaged, a public host.

Run: pytest tests/test_train_page.py (half a minute). AppTest, as in test_app.py; runs are staged without a
trainer (train_states.py), which a held lock stands for, and the launcher is not the real one.
"""

import json
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import streamlit as st
from serving import ROOT
from small_run import until, write_pictures
from streamlit.components.v2.component_manager import BidiComponentManager
from streamlit.testing.v1 import AppTest, local_script_runner
from test_app import data_of, said, shown, view_of, words_of
from train_states import EXAMPLE, LAST_STEP, stage, worked_on

from train import launch
from train.config import PRESETS, TrainConfig, preset
from train.rights import Visitor
from train.runs import Run, RunError, read_metrics
from vit.datasets import DataError
from vit.page.view import PATTERNS_MODEL

form = import_module("train.page.new_run")  # the package's attribute of that name is the function
watched = import_module("train.page.one_run")
download = import_module("train.page.download")
results = import_module("train.page.results")
WHO = "A-visitor-of-24-letters-"


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """The runs folder. What is cached stays: models are always the same, runs never at the same place."""
    for name in ("SPACE_ID", "PATCHLIGHT_PUBLIC", "PATCHLIGHT_TRAIN_TOKEN", "PATCHLIGHT_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATCHLIGHT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    download._jobs().clear()
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Costs and results are not measured: other tests do. No package is searched for components."""
    monkeypatch.setattr(form, "draw_estimate", lambda *_: None)
    monkeypatch.setattr(BidiComponentManager, "discover_and_register_components", lambda *_, **__: None)
    monkeypatch.setattr(watched, "show_results", lambda run, is_over: st.caption(f"Results, {is_over=}"))


@pytest.fixture
def asked(monkeypatch):
    """What the launcher is asked for: (what, the run's name, who asks) …"""
    calls = []
    for name in ("pause", "resume", "stop", "kill", "delete"):

        def act(run, *, visitor, name=name):
            calls.append((name, run.root.name, visitor))

        monkeypatch.setattr(launch, name, act)
    return calls


@pytest.fixture
def started(monkeypatch, runs):
    """What was started, as (config, preset's name, name, who asks) …; each is a run that waits."""
    calls = []

    def start(config, preset_name, *, name="", visitor=None):
        calls.append((config, preset_name, name, visitor))
        return stage(runs, name or f"new-{len(calls)}", "waiting", step=0)

    monkeypatch.setattr(launch, "start", start)
    return calls


@pytest.fixture
def polls(monkeypatch):
    """After how many seconds the parts of the page are drawn again by themselves, of its last run."""
    parse, seconds = local_script_runner.parse_tree_from_messages, []

    def parsed(messages):
        found = [each.auto_rerun.interval for each in messages if each.WhichOneof("type") == "auto_rerun"]
        seconds[:] = sorted(found)
        return parse(messages)

    monkeypatch.setattr(local_script_runner, "parse_tree_from_messages", parsed)
    return seconds


def alone(app: AppTest, name: str, what: object = None) -> AppTest:
    """One fragment, the function of that name, runs alone, as in a browser; all may follow, if it says so.

    `what`: a widget that was clicked in it. What is shown then is that fragment alone, or the whole page.
    """
    functions = app._fragment_storage._fragments.items()
    (of_fragment,) = [
        key
        for key, wrapped in functions
        if any(getattr(cell.cell_contents, "__qualname__", "").endswith(name) for cell in wrapped.__closure__)
    ]
    rerun_data = partial(local_script_runner.RerunData, fragment_id_queue=[of_fragment])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_script_runner, "RerunData", rerun_data)
        return shown((what or app).run())


def button(app: AppTest, text: str):
    return next(each for each in app.button if label(each) == text)


def opened(**params) -> AppTest:
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
    app.session_state["visitor"] = WHO  # AppTest has no cookies
    for name, value in {"tab": "Train", **params}.items():
        app.query_params[name] = value
    return shown(app.run())


def label(element) -> str:
    """What a button says, without the colour of the one that matters most."""
    return said(element.label).removeprefix(":primary[**").removesuffix("**]")


def buttons(app: AppTest, place: str = "watched") -> dict[str, bool]:
    """Those of a place by their labels, and whether they can be pressed."""
    return {label(each): not each.disabled for each in app.button if (each.key or "").startswith(place)}


def press(app: AppTest, text: str, place: str = "") -> AppTest:
    (found,) = [each for each in app.button if label(each) == text and (each.key or "").startswith(place)]
    return shown(found.click().run())


def title(app: AppTest) -> str:
    return said(app.subheader[0].value)


def link(app: AppTest) -> str:
    """The run that the address names."""
    named = app.query_params["run"]
    return named if isinstance(named, str) else named[-1]


def badge(app: AppTest) -> str:
    """The word of the state."""
    (found,) = [each.value for each in app.markdown if "-badge[" in each.value]
    return found.removesuffix("]").split()[-1]


def numbers(app: AppTest) -> str:
    return said(app.get("progress")[0].proto.text)


def charts(app: AppTest) -> int:
    return len(app.get("vega_lite_chart"))


def films(app: AppTest) -> list[list[str]]:
    """The runs of each film that is shown."""
    return [
        [film["name"] for film in json.loads(each.proto.json)["films"]]
        for each in app.get("bidi_component")
        if each.proto.component_name == "patchlight_film"
    ]


def field(app: AppTest, key: str):
    """The widget of that key."""
    kinds = (app.number_input, app.selectbox, app.checkbox, app.text_input)
    return next(each for kind in kinds for each in kind if each.key == key)


def with_settings(app: AppTest) -> AppTest:
    app.session_state["new_all"] = True
    return shown(app.run())


def choose_data(app: AppTest, kind: str, of: str = "demo") -> AppTest:
    return shown(app.segmented_control(key=f"new_data_{of}").set_value(kind).run())


def can_start(app: AppTest) -> bool:
    return not button(app, "Start").disabled


# ---- the first visit


def test_the_first_visit_shows_a_run_and_the_form():
    app = opened()
    assert title(app) == "Example: the demo, as it once ran"
    assert badge(app) == "finished"
    assert charts(app) == 3
    assert films(app) == [["example"]]
    assert numbers(app).startswith("step 176 of 176 · epoch 0.50 · ")
    assert can_start(app)
    assert buttons(app) == {}  # nothing can be done to the example
    assert [each.value for each in app.subheader][1:] == ["New run"]  # no table of none
    assert not [*app.error, *app.warning, *app.toast]
    assert "run" not in app.query_params


def test_the_model_of_the_example_can_be_looked_into():
    app = press(opened(), "Look into that model")
    assert app.session_state["tab"] == "Explore"
    assert view_of(app).model == PATTERNS_MODEL
    assert data_of(app)["title"]


# ---- seven states

OVER = {"Start again": True, "Delete": True}
AGAIN = {"Resume": True, **OVER}
SPEED = {"images_per_second": 888.0, "val_accuracy": 0.8134, "best_accuracy": 0.8134, "device": "*cpu*",
         "memory_bytes": 1_202_200_576}  # fmt: skip
FRESH = 1e6  # a heartbeat that is never silent while a test lasts


def staged(runs: Path, stack, kind: str) -> Run:
    """demo-1 in one of the states, or with a wish that is not done yet."""
    ahead = {"heartbeat": time.time() + FRESH}
    state, extra = {
        "waiting": ("waiting", {"step": 0, **ahead}),
        "running": ("running", {"step": 88, "seconds_left": 70.0, **SPEED, **ahead}),
        "pausing": ("running", {"step": 88, **ahead}),
        "stopping": ("running", {"step": 88, **ahead}),
        "silent": ("running", {"step": 88, "heartbeat": time.time() - 75}),
        "paused": ("paused", {"step": 66, **ahead}),
        "resuming": ("paused", {"step": 66, **ahead}),
        "stopped": ("stopped", {"step": 110, "reason": "stopped as asked"}),
        "finished": ("finished", {}),
        "failed": ("failed", {"step": 66, "reason": "the loss is not a number at step 66"}),
        "vanished": ("running", {"step": 132}),
        "never began": ("failed", {"step": 0, "reason": "there is no such folder"}),
    }[kind]
    run = stage(runs, "demo-1", state, **extra)
    if kind in ("pausing", "paused"):
        run.pause_file.touch()
    if kind == "stopping":
        run.stop_file.touch()
    if kind == "never began":
        run.config_file.unlink()
    if kind in ("waiting", "running", "pausing", "stopping", "silent", "paused", "resuming"):
        stack.enter_context(worked_on(run))
    return run


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


STATES = [
    ("waiting", "waiting", "Opening its pictures and its model. Next: it starts by itself.", {"Stop": True}),
    ("running", "running", "Next: watch it, pause or stop it.", {"Pause": True, "Stop": True}),
    ("pausing", "running", "Pausing after this step. Next: ", {"Pause": False, "Stop": True}),
    ("stopping", "running", "Stopping: it ends its step and keeps", {"Pause": False, "Stop": False}),
    ("silent", "running", "Its process is there, but has given no sign for 7",
     {"Stop": True, "End its process": True}),
    ("paused", "paused", "Next: resume or stop it.", {"Resume": True, "Stop": True}),
    ("resuming", "paused", "Going on in a moment. Next: ", {"Resume": False, "Stop": True}),
    ("stopped", "stopped", "Stopped as asked. Next: resume it, or look into its checkpoint.", AGAIN),
    ("finished", "finished", "Next: look into its checkpoint.", OVER),
    ("failed", "failed", "The loss is not a number at step 66. Next: resume it, or look into", AGAIN),
    ("vanished", "vanished", "Its process ended at step 132 without a word: killed, or ", AGAIN),
    ("never began", "failed", "There is no such folder. Next: start it again.", OVER),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "word", "sentence", "can"), STATES, ids=[each[0] for each in STATES])
def test_a_state_has_a_word_a_reason_a_next_step_and_its_buttons(runs, stack, kind, word, sentence, can):
    staged(runs, stack, kind)
    app = opened()
    assert title(app) == "demo-1"
    assert link(app) == "demo-1"
    assert badge(app) == word
    assert sentence in words_of(app)
    assert buttons(app) == can
    assert [sentence in said(each.value) for each in app.error] == ([True] if word == "failed" else [])
    assert len(app.warning) == (kind in ("vanished", "silent"))
    assert f"Results, is_over={word not in ('waiting', 'running', 'paused')}" in words_of(app)
    if kind == "running":
        assert numbers(app) == (
            "step 88 of 176 · epoch 0.25 · 888 images/s · 1 min 10 s left · "
            "81.3\u00a0% of held-out pictures right · 1.2 GB of memory on *CPU*"
        )


def test_results_are_part_of_the_page(runs, stack, monkeypatch):
    monkeypatch.setattr(watched, "show_results", results.show_results)
    staged(runs, stack, "running")
    assert "Best so far: **81.34" in words_of(opened())


def test_each_state_has_a_colour_and_an_icon_of_its_own():
    words = {each[1] for each in STATES}
    for table in (watched.COLOURS, watched.ICONS):
        assert set(table) == words
        assert len(set(table.values())) == len(words) == 7


# ---- what can be done


@pytest.mark.parametrize(
    ("kind", "first", "sure", "call"),
    [
        ("running", "Stop", "Stop demo-1", "stop"),
        ("waiting", "Stop", "Stop demo-1", "stop"),
        ("silent", "End its process", "End demo-1", "kill"),
        ("finished", "Delete", "Delete demo-1", "delete"),
    ],
)
def test_what_loses_something_asks_once(runs, stack, asked, kind, first, sure, call):
    staged(runs, stack, kind)
    app = opened()
    before = buttons(app)
    app = press(app, first)
    assert buttons(app) == {sure: True, "Leave it as it is": True}
    app = press(app, "Leave it as it is")
    assert buttons(app) == before
    assert asked == []
    app = press(press(app, first), sure, "watched")
    assert asked == [(call, "demo-1", Visitor(WHO))]
    assert buttons(app) == before


def test_a_question_falls_away_with_what_it_is_about(runs, stack, asked):
    run = staged(runs, stack, "running")
    stage(runs, "other", "finished")
    app = press(opened(), "Stop", "watched")
    run.stop_file.touch()  # somebody else was quicker
    assert buttons(shown(app.run())) == {"Pause": False, "Stop": False}
    run.stop_file.unlink()
    assert buttons(shown(app.run())) == {"Pause": True, "Stop": True}

    app = press(press(app, "Stop", "watched"), "Leave it as it is")
    app = press(app, "Stop", "watched")
    app.session_state["chosen_run"] = "other"
    assert buttons(shown(app.run())) == OVER
    app = press(app, "Delete")
    stage(runs, "third", "finished")
    app.session_state["chosen_run"] = "third"
    assert buttons(shown(app.run())) == OVER
    assert asked == []


def test_a_click_redraws_what_it_concerns(runs, stack, started):
    """In a browser a click runs its fragment alone."""
    staged(runs, stack, "finished")
    stage(runs, "other", "finished")
    app = opened(run="demo-1")
    app = alone(app, "watch", button(app, "Delete").click())
    assert buttons(app) == {"Delete demo-1": True, "Leave it as it is": True}
    app = alone(app, "watch", button(app, "Delete demo-1").click())  # the real launcher
    assert title(app) == "other"
    assert [row["run"] for row in app.dataframe[0].value.to_dict("records")] == ["other"]

    app = alone(app, "watch", button(app, "Start again").click())
    assert title(app) == "new-1"
    app = alone(app, "new_run", button(app, "Start").click())
    assert title(app) == "new-2"
    app = tick(app, app.dataframe[0].value["run"].tolist().index("other"))
    app = alone(app, "table", button(app, "Show other").click())
    assert title(app) == "other"


@pytest.mark.parametrize(
    ("kind", "text", "call"),
    [("running", "Pause", "pause"), ("paused", "Resume", "resume"), ("failed", "Resume", "resume")],
)
def test_a_button_asks_the_launcher(runs, stack, asked, kind, text, call):
    staged(runs, stack, kind)
    press(opened(), text)
    assert asked == [(call, "demo-1", Visitor(WHO))]


def test_start_again_shows_the_new_run(runs, stack, started):
    staged(runs, stack, "finished")
    app = press(opened(), "Start again")
    assert started == [(PRESETS["demo"], "demo", "", Visitor(WHO))]
    assert title(app) == "new-1"
    assert link(app) == "new-1"


@pytest.mark.parametrize(
    ("kind", "texts", "call"),
    [
        ("running", ["Pause"], "pause"),
        ("running", ["Stop", "Stop demo-1"], "stop"),
        ("finished", ["Delete", "Delete demo-1"], "delete"),
        ("finished", ["Start again"], "start"),
        ("vanished", ["Resume"], "resume"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_that_stays(runs, stack, monkeypatch, kind, texts, call):
    def refuse(*_, **__):
        raise RunError("the disk of *this* machine\nis full")

    monkeypatch.setattr(launch, call, refuse)
    staged(runs, stack, kind)
    app = opened()
    before, errors = (title(app), buttons(app), charts(app), films(app)), [each.value for each in app.error]
    for text in texts:
        app = press(app, text, "watched")
    for _ in range(2):  # it is read after the page was drawn again, too
        new = [said(each.value) for each in app.error if each.value not in errors]
        assert new == ["The disk of *this* machine is full. Nothing else is affected."]
        assert (title(app), buttons(app), charts(app), films(app)) == before
        app = shown(app.run())
    monkeypatch.setattr(launch, call, lambda *_, **__: Run(runs / "demo-1"))
    app = shown(app.run())
    for text in texts:
        app = press(app, text, "watched")
    assert [each.value for each in app.error] == errors


# ---- what is damaged


@pytest.mark.parametrize(
    "content",
    ["{", "[1]", '{"state": "running", "step": "x"}', "\0\0", '{"state": "unheard of"}', "[" * 100_000],
)
def test_a_damaged_status_is_a_sentence(runs, content):
    run = stage(runs, "demo-1", "finished")
    run.status_file.write_text(content)
    app = opened()
    unknown, damaged = "a state that this version does not know", "Its status.json is missing or damaged"
    assert (unknown if "unheard" in content else damaged) in words_of(app)
    assert badge(app) == ("failed" if "unheard" in content else "vanished")
    assert charts(app) == 3
    assert films(app) == [["demo-1"]]
    assert buttons(app) == AGAIN


def test_numbers_beyond_reason_do_not_stop_the_page(runs):
    run = stage(runs, "demo-1", "finished")
    found = json.loads(run.status_file.read_text())
    wild = {"step": 1e299, "progress": 1e-299, "seconds": -1e200, "started": 1e290, "best_accuracy": -7e99}
    run.status_file.write_text(json.dumps(found | wild))
    app = opened()
    assert title(app) == "demo-1"
    assert len(app.dataframe[0].value) == 1


def test_torn_metrics_are_passed_over(runs):
    run = stage(runs, "demo-1", "finished")
    lines = run.metrics_file.read_text().splitlines()
    lines[3:3] = ['{"step": 4, "loss"', "\0\0", '{"step": null, "loss": 1}', '{"step": 5, "loss": NaN}']
    run.metrics_file.write_text("\n".join(lines) + '\n{"step": 999, "lo')
    app = opened()
    assert charts(app) == 3
    losses = [row["loss"] for row in read_metrics(EXAMPLE)]
    assert f"training from {losses[0]:.3g} to {losses[-1]:.3g}" in words_of(app)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no film", b"\0" * 5000])
def test_a_damaged_film_is_a_sentence(runs, content):
    run = stage(runs, "demo-1", "finished")
    run.film_file.write_bytes(content)
    app = opened()
    assert "is damaged" in words_of(app)
    assert films(app) == []
    assert charts(app) == 3
    assert buttons(app) == OVER


def test_a_run_without_its_files_is_still_a_run(runs):
    run = stage(runs, "demo-1", "stopped", step=110)
    for file in (run.config_file, run.film_file, run.metrics_file, run.log_file):
        file.unlink()
    app = opened()
    assert badge(app) == "stopped"
    assert numbers(app).startswith("step 110 · epoch 0.31")  # of how many is not known
    assert charts(app) == 0
    assert films(app) == []
    assert buttons(app) == OVER  # to resume, its settings would be needed


STRANGE = [{"lr": {"a": [1]}, "data": 7}, {"seed": "many", "epochs": []}, {"lr": "1e-2", "whiten": "*x*"}]


@pytest.mark.parametrize("settings", STRANGE)
def test_settings_of_any_kind_stand_in_the_table(runs, settings):
    stage(runs, "demo-1", "finished")
    stage(runs, "demo-2", "finished", settings=settings)
    app = opened()
    table = app.dataframe[0].value
    assert len(table) == 2
    assert set(settings) <= set(table.columns)


def test_a_run_that_is_deleted_while_it_is_watched(runs):
    stage(runs, "other", "finished")
    run = stage(runs, "demo-1", "finished")
    app = opened(run="demo-1")
    run.root.rename(run.root.with_name(".deleted"))
    app = alone(app, "watch")
    assert "There is no run demo-1 (any more): it was deleted while you watched." in words_of(app)
    assert list(map(label, app.button)) == ["Show another run"]
    app = alone(app, "watch", app.button[0].click())
    assert title(app) == "other"
    assert link(app) == "other"


def test_a_deleted_run_has_no_results(runs):
    run = stage(runs, "demo-1", "finished")
    app = opened()
    run.root.rename(run.root.with_name(".deleted"))
    assert "Results" not in words_of(alone(app, "show_outcome.<locals>.results"))


def test_the_next_look_after_a_deletion_shows_another_run_and_says_so(runs):
    stage(runs, "other", "finished")
    run = stage(runs, "demo-1", "finished")
    app = opened(run="demo-1")
    run.root.rename(run.root.with_name(".deleted"))
    app = shown(app.run())
    assert title(app) == "other"
    assert [said(each.value) for each in app.toast] == ["There is no run demo-1 here. Another one is shown."]


@pytest.mark.parametrize(
    "name", ["nope", "../outside/secret", "{outside}", "demo-1/../../outside/secret", "..", ".", "x" * 5000,
             "[here](https://example.com)", "\0", "demo-1/checkpoints"],
)  # fmt: skip
def test_a_link_to_no_run_shows_another_one(runs, tmp_path, name):
    outside = stage(tmp_path / "outside", "secret", "finished")
    stage(runs, "demo-1", "finished")
    app = opened(run=name.format(outside=outside.root))
    assert title(app) == "demo-1"
    assert link(app) == "demo-1"
    (toast,) = app.toast
    assert said(toast.value).endswith("here. Another one is shown.")
    assert len(toast.value) < 300
    assert "](https" not in toast.value
    assert not shown(app.run()).toast  # said once


def test_a_link_shows_its_run(runs):
    for name in ("demo-1", "demo-2", "my run *1*"):
        stage(runs, name, "finished")
    for name in ("demo-1", "my run *1*"):
        app = opened(run=name)
        assert title(app) == name
        assert not app.toast
        assert f"Delete {name}" in buttons(press(app, "Delete"))


# ---- a new run


@pytest.mark.parametrize("name", PRESETS)
def test_every_setting_can_be_reached_and_starts_as_the_preset_has_it(name):
    app = with_settings(opened())
    if name != "demo":
        app = shown(app.selectbox(key="new_preset").set_value(name).run())
    config, data = preset(name, "cpu"), preset(name, "cpu").data
    prefix = f"new_{name}_{data}_"
    for each in fields(TrainConfig):
        if each.name not in ("data", "epochs", "minutes", "fit_epochs"):
            assert field(app, prefix + each.name).value == getattr(config, each.name), each.name
    assert app.segmented_control(key=f"new_data_{name}").value == data
    unit = "epochs" if config.epochs else "minutes"
    assert field(app, f"new_unit_{name}").value == unit
    assert field(app, f"new_length_{name}_{unit}").value == getattr(config, unit)
    has_fit = f"{prefix}fit_epochs" in [each.key for each in app.checkbox]
    assert has_fit == (unit == "minutes")  # what turns minutes into epochs needs minutes


CHANGES = {
    "seed": 7, "holdout": 4000, "lr": 1.25e-3, "muon_lr": 4.5e-3, "schedule": "cosine", "whiten": False,
    "batch": 96, "mlp_dim": 100, "keep_patches": 0.5, "ema": 0.0, "threads": 1, "stop_mb": 250,
    "precision": "float32", "augment": "none", "decay_all": True,
}  # fmt: skip


def test_what_is_changed_reaches_the_launcher(started):
    app = with_settings(opened())
    for name, value in CHANGES.items():
        field(app, f"new_demo_patterns_{name}").set_value(value)
    field(app, "new_length_demo_epochs").set_value(2.25)
    field(app, "new_name").set_value("  stripes-and-dots ")
    shown(app.run())
    app.session_state["new_all"] = False  # the drawer is closed
    app = shown(app.run())
    assert "new_demo_patterns_lr" not in [each.key for each in app.number_input]
    for other in ("tutorial", "demo"):  # another preset, and back
        app = shown(app.selectbox(key="new_preset").set_value(other).run())
    app = press(app, "Start")
    ((config, name, title_, who),) = started
    assert config == replace(PRESETS["demo"], epochs=2.25, **CHANGES)
    assert (name, title_, who) == ("demo", "stripes-and-dots", Visitor(WHO))
    assert title(app) == "stripes-and-dots"


def test_as_it_is_a_preset_is_started_as_it_is(started):
    for drawer in (False, True):
        app = opened()
        press(with_settings(app) if drawer else app, "Start")
    assert [call[:3] for call in started] == [(PRESETS["demo"], "demo", "")] * 2


def test_minutes_or_epochs(started, tmp_path):
    app = shown(field(opened(), "new_preset").set_value("record").run())
    app = choose_data(app, "patterns", "record")
    app = with_settings(app)
    field(app, "new_record_patterns_fit_epochs").set_value(True)
    app = shown(field(app, "new_unit_record").set_value("epochs").run())
    assert can_start(app)  # that it fits epochs to minutes is no obstacle where there are none
    field(app, "new_length_record_epochs").set_value(3.0)
    press(shown(app.run()), "Start")
    config = started[0][0]
    assert (config.epochs, config.minutes, config.fit_epochs) == (3.0, 0.0, False)


def test_patterns_are_not_mirrored(started, tmp_path):
    app = shown(field(opened(), "new_preset").set_value("fast").run())
    press(choose_data(app, "patterns", "fast"), "Start")
    app = shown(field(opened(), "new_preset").set_value("fast").run())
    app = choose_data(app, "folder", "fast")
    field(app, "new_folder").set_value(str(write_pictures(tmp_path / "pictures")))
    press(shown(app.run()), "Start")
    assert [(call[0].data, call[0].mirror) for call in started] == [
        ("patterns", False),
        (str(tmp_path / "pictures"), True),
    ]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("num_heads", 7, "Embed dim 96 cannot be divided by num heads 7"),
        ("patch_size", 5, "Patch size 5 does not divide 32; 1, 2, 4, 8, 16 and 32 do"),
        ("keep_every", 0.5, "Keep every is 0 or at least 1, not 0.5"),
        ("device", "abacus", "abacus"),
    ],
)
def test_what_is_impossible_is_said_and_cannot_be_started(started, name, value, sentence):
    app = with_settings(opened())
    field(app, f"new_demo_patterns_{name}").set_value(value)
    app = shown(app.run())
    for is_open in (True, False):  # beside its field, and in its drawer's place when that is closed
        app.session_state["new_all"] = is_open
        app = shown(app.run())
        (found,) = app.error
        assert sentence in said(found.value)
        assert not can_start(app)
    app = with_settings(app)
    field(app, f"new_demo_patterns_{name}").set_value(getattr(PRESETS["demo"], name))
    app = shown(app.run())
    assert not app.error
    assert can_start(app)


def test_an_impossible_setting_stands_beside_its_field():
    app = with_settings(opened())
    field(app, "new_demo_patterns_num_heads").set_value(7)
    app = shown(app.run())
    order = [each.key if each.type == "number_input" else each.type for each in app.main
             if each.type in ("number_input", "error")]  # fmt: skip
    assert order[order.index("error") - 1] in ("new_demo_patterns_num_heads", "new_demo_patterns_embed_dim")


def test_a_folder_is_resolved_and_must_be_there(started, tmp_path, monkeypatch):
    write_pictures(tmp_path / "home" / "pictures")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    app = choose_data(opened(), "folder")
    assert not app.error  # nothing was typed yet
    assert not can_start(app)
    for typed in ("nowhere", "\0", "y" * 5000, "~nobody-of-this-name/x"):
        field(app, "new_folder").set_value(typed)
        app = shown(app.run())
        assert len(app.error) == 1, typed
        assert not can_start(app)
    field(app, "new_folder").set_value("  ~/x/../pictures ")
    app = shown(app.run())
    assert not app.error
    press(app, "Start")
    assert started[0][0].data == str((tmp_path / "home" / "pictures").resolve())


def test_why_it_was_not_started_stays_until_something_else_is_asked_for(runs, monkeypatch):
    def refuse(*_, **__):
        raise RunError("there is a run *x* already: choose another name")

    monkeypatch.setattr(launch, "start", refuse)
    app = press(opened(), "Start")
    for _ in range(2):
        (error,) = app.error
        assert said(error.value) == "Nothing was started: there is a run *x* already: choose another name."
        app = shown(app.run())
    field(app, "new_name").set_value("y")
    assert not shown(app.run()).error
    assert title(app).startswith("Example")
    assert list(runs.iterdir()) == []


def test_who_is_at_work_can_be_stopped_from_the_form(runs, stack, asked):
    staged(runs, stack, "running")
    stage(runs, "other", "finished")
    app = opened(run="other")
    assert "demo-1 is at work, and one run at a time has the machine. Stop it, or" in words_of(app)
    assert buttons(opened(run="demo-1"), "at_work") == {}  # its own button is in sight
    app = press(app, "Stop demo-1", "at_work")
    assert buttons(app, "at_work") == {"Stop demo-1": True, "Leave it as it is": True}
    assert buttons(app) == OVER  # of the other run nothing is asked
    app = press(app, "Leave it as it is")
    assert asked == []
    press(press(app, "Stop demo-1"), "Stop demo-1")
    assert asked == [("stop", "demo-1", Visitor(WHO))]
    Run(runs / "demo-1").stop_file.touch()
    app = shown(app.run())
    assert "demo-1 is stopping." in words_of(app)
    assert buttons(app, "at_work") == {}


def test_a_second_start_says_who_is_at_work(runs, stack):
    staged(runs, stack, "running")
    app = press(opened(), "Start")  # the real launcher
    (error,) = app.error
    assert "emo-1 is at work" in said(error.value)
    assert said(error.value).startswith("Nothing was started: ")
    assert [each.name for each in runs.iterdir() if not each.name.startswith(".")] == ["demo-1"]


# ---- CIFAR-10


@pytest.fixture
def no_cifar10(tmp_path, monkeypatch):
    (tmp_path / "no-data").mkdir()
    monkeypatch.setenv("PATCHLIGHT_DATA", str(tmp_path / "no-data"))


def fetched_by(monkeypatch, fetch) -> None:
    monkeypatch.setattr(download, "load_pictures", fetch)


def test_without_cifar10_its_download_comes_first(no_cifar10, monkeypatch):
    go_on, calls = threading.Event(), []

    def fetch(data, split, *, download, progress):
        calls.append((data, split, download))
        progress(30_000_000, 143_000_000, "train.parquet")
        assert go_on.wait(10)

    fetched_by(monkeypatch, fetch)
    app = choose_data(opened(), "cifar10")
    assert "CIFAR-10 is not on this machine yet: 143 MB" in words_of(app)
    assert not app.error
    assert not can_start(app)
    app = press(app, "Download CIFAR-10")
    assert until(lambda: calls == [("cifar10", "train", True)])
    app = shown(app.run())
    assert "train.parquet: 30 MB of 143 MB" in said(app.get("progress")[1].proto.text)
    assert not can_start(app)
    other = choose_data(opened(), "cifar10")  # another session sees the same download
    assert "Download CIFAR-10" not in map(label, other.button)
    go_on.set()
    assert until(lambda: len(calls) == 2)
    assert until(lambda: download._jobs()["job"].finished)
    monkeypatch.setattr(form, "has_cifar10", lambda: True)
    app = shown(app.run())
    assert "Download CIFAR-10" not in map(label, app.button)


@pytest.mark.parametrize("how", ["stop", "error"])
def test_a_download_that_ends_early_can_be_tried_again(no_cifar10, monkeypatch, how):
    calls = []

    def fetch(data, split, *, download, progress):
        calls.append(split)
        end = time.monotonic() + 10
        while how == "stop" and time.monotonic() < end:
            progress(1, 2, "train.parquet")
            time.sleep(0.01)
        raise DataError("The address could not be reached.")

    fetched_by(monkeypatch, fetch)
    app = press(choose_data(opened(), "cifar10"), "Download CIFAR-10")
    if how == "stop":
        app = press(app, "Stop", "stop_download")
    assert until(lambda: download._jobs()["job"].finished)
    app = shown(app.run())
    why = {"stop": "Stopped. What has come is kept", "error": "could not be reached. Nothing else"}
    assert why[how] in words_of(app)
    press(app, "Try again")
    assert until(lambda: calls == ["train", "train"])
    download._jobs()["job"].cancelled.set()


def test_only_one_download_goes_on(no_cifar10, monkeypatch):
    go_on, calls = threading.Event(), []

    def fetch(data, split, *, download, progress):
        calls.append(split)
        assert go_on.wait(10)

    fetched_by(monkeypatch, fetch)
    one, other = (choose_data(opened(), "cifar10") for _ in range(2))
    press(one, "Download CIFAR-10")
    alone(other, "new_run", button(other, "Download CIFAR-10").click())
    download._begin()  # as by a "Try again" that was drawn before
    assert until(lambda: bool(calls))
    go_on.set()
    assert until(lambda: download._jobs()["job"].finished)
    assert calls == ["train", "test"]


# ---- all runs


def tick(app: AppTest, *rows: int) -> AppTest:
    app.session_state[app.dataframe[0].key] = {"selection": {"rows": list(rows), "columns": [], "cells": []}}
    return shown(app.run())


@pytest.fixture
def three(runs):
    stage(runs, "first", "finished", settings={"lr": 0.001}, best_accuracy=0.98)
    stage(runs, "second", "stopped", step=66, settings={"lr": 0.001, "num_heads": 8}, best_accuracy=0.5)
    stage(runs, "third", "finished", best_accuracy=0.97)
    for age, name in enumerate(("third", "second", "first")):
        at = time.time() - 100 * age
        os.utime(runs / name / "launch.json", (at, at))


def test_the_table_says_how_runs_differ(three):
    table = opened().dataframe[0].value
    assert table["run"].tolist() == ["third", "second", "first"]
    assert table["state"].tolist() == ["finished", "stopped", "finished"]
    assert table["accuracy"].tolist() == pytest.approx([0.97, 0.5, 0.98])
    assert table["progress"].tolist() == pytest.approx([1, 66 / LAST_STEP, 1])
    assert list(table.columns[4:7]) == ["seconds", "images/s", "started"]
    differing = {name: table[name].tolist() for name in table.columns[7:]}
    assert differing == {"num_heads": [4, 8, 4], "lr": [0.003, 0.001, 0.001]}


def test_runs_that_are_ticked_lie_over_each_other(three):
    app = opened()
    assert (charts(app), films(app)) == (3, [["third"]])
    app = tick(app, 1, 2)
    assert "##### second beside first" in words_of(app)
    assert charts(app) == 6
    assert films(app) == [["third"], ["second", "first"]]
    assert "second: training" in words_of(app)
    assert "Time in training steps: second" in words_of(app)


def test_a_run_that_is_ticked_can_be_shown(three):
    app = press(tick(opened(), 1), "Show second")
    assert title(app) == "second"
    assert link(app) == "second"


def test_one_of_those_compared_may_have_no_film(three, runs):
    (runs / "first" / "attention.npz").write_bytes(b"no film")
    app = tick(opened(), 1, 2)
    assert charts(app) == 6
    assert films(app) == [["third"]]
    assert "is damaged" in words_of(app)


# ---- looking again


@pytest.mark.parametrize("kind", ["running", "waiting", "paused", "silent"])
def test_the_page_looks_again_while_a_run_is_active(runs, stack, polls, kind):
    staged(runs, stack, kind)
    opened()
    assert polls == [1.0, 1.0, 5.0, 5.0]  # the run, who is at work; results, table


@pytest.mark.parametrize("kind", ["finished", "stopped", "failed", "vanished"])
def test_the_page_rests_when_no_run_is_active(runs, stack, polls, kind):
    staged(runs, stack, kind)
    opened()
    assert polls == []


def test_the_first_visit_rests(polls):
    opened()
    assert polls == []


def test_a_run_that_ends_while_it_is_watched_is_looked_at_no_more(runs, polls):
    run = stage(runs, "demo-1", "running", step=66, heartbeat=time.time() + FRESH)
    with worked_on(run):
        app = opened()
        assert polls
        assert badge(alone(app, "watch")) == "running"
    app = alone(app, "watch")  # which the browser asks for
    assert badge(app) == "vanished"
    assert "Results, is_over=True" in words_of(app)  # all was drawn anew
    assert polls == []
    assert "at work" not in words_of(app)


@pytest.mark.parametrize("name", ["notice", "table"])
def test_another_run_that_ends_is_noticed(runs, polls, name):
    stage(runs, "other", "finished")
    run = stage(runs, "demo-1", "running", step=66, heartbeat=time.time() + FRESH)
    with worked_on(run):
        app = opened(run="other")
        assert polls == [1.0, 5.0]
    app = alone(app, name)
    assert title(app) == "other"
    assert "at work" not in words_of(app)
    assert sorted(app.dataframe[0].value["state"]) == ["finished", "vanished"]
    assert polls == []


def long_run(runs: Path, lines: int) -> Run:
    run = stage(runs, "long", "running", step=LAST_STEP, heartbeat=time.time() + FRESH)
    row = (
        '{{"step": {0}, "epoch": {1}, "seconds": {0}.5, "loss": {2}, "lr": 0.001, "images_per_second": 9}}\n'
    )
    with run.metrics_file.open("w") as file:
        file.writelines(row.format(step, step / 1000, 2 + step / lines) for step in range(1, lines + 1))
    return run


def test_a_long_run_is_caught_up_with_at_once_and_then_watched_cheaply(runs):
    def script(root):
        import time
        from pathlib import Path

        import streamlit as st

        from train.page.chosen import choose
        from train.page.one_run import show_run
        from train.runs import Run

        run = Run(Path(root))
        choose(run)
        began = time.perf_counter()
        show_run(run)
        st.session_state["took"] = time.perf_counter() - began

    run = long_run(runs, 100_000)
    with worked_on(run):
        app = AppTest.from_function(script, kwargs={"root": str(run.root)}, default_timeout=60)
        app.session_state["visitor"] = WHO
        shown(app.run())
        assert charts(app) == 2  # nothing was judged
        columns = import_module("train.page.reading").columns_of(run)
        assert (columns["loss"].steps[-1], columns.behind) == (100_000, False)
        took = []
        for step in range(5):
            with run.metrics_file.open("a") as file:
                file.write(f'{{"step": {100_001 + step}, "loss": 2.0}}\n')
            shown(app.run())
            took.append(app.session_state["took"])
        assert "training from 2 to 2" in words_of(app)
        assert min(took) <= 0.15, took


def test_a_run_that_is_over_is_read_to_its_end(runs, monkeypatch):
    """Nothing looks again by itself at such a run."""
    reading = import_module("train.page.reading")
    monkeypatch.setattr(reading, "_CATCH_UP_SECONDS", 0.0)
    monkeypatch.setattr(reading.Watch.read, "__defaults__", (0.0,))
    long_run(runs, 20_000)  # a little is read at once, now
    assert "from 2 to 3" in words_of(opened())


# ---- a public host


@pytest.fixture
def public(monkeypatch):
    monkeypatch.setenv("PATCHLIGHT_PUBLIC", "1")
    monkeypatch.setenv("PATCHLIGHT_TRAIN_TOKEN", "the host's token")


def started_by(run: Run, who: str) -> Run:
    kept = json.loads(run.launch_file.read_text())
    run.launch_file.write_text(json.dumps(kept | {"visitor": Visitor(who).mark}))
    return run


@pytest.mark.usefixtures("public")
def test_a_visitor_may_start_the_demo_and_nothing_else(started):
    app = opened()
    words = words_of(app)
    assert "This page is public: visitors may start the demo" in words
    assert "All runs vanish when the host restarts." in words
    assert app.selectbox(key="new_preset").options == ["demo"]
    assert not app.segmented_control
    assert not app.number_input
    assert [each.key for each in app.text_input] == ["train_token"]
    assert "new_all" not in [each.key for each in app.get("expander") if hasattr(each, "key")]
    press(app, "Start")
    assert started == [(preset("demo", "cpu"), "demo", "", Visitor(WHO))]


@pytest.mark.usefixtures("public")
@pytest.mark.parametrize("kind", ["running", "paused", "stopped", "failed", "finished", "vanished"])
@pytest.mark.parametrize("owner", [WHO, "somebody-else-of-24-letters"])
def test_a_visitor_may_stop_their_own_run_and_do_nothing_else(runs, stack, kind, owner):
    started_by(staged(runs, stack, kind), owner)
    app = opened()
    can_stop = owner == WHO and kind in ("running", "paused")
    assert buttons(app) == ({"Stop": True} if can_stop else {})
    stage(runs, "other", "finished")
    app = opened(run="other")
    assert buttons(app, "at_work") == ({"Stop demo-1": True} if can_stop else {})


@pytest.mark.usefixtures("public")
def test_the_token_opens_everything(runs, stack, asked):
    staged(runs, stack, "finished")
    app = opened()
    assert buttons(app) == {}
    field(app, "train_token").set_value("a guess")
    app = shown(app.run())
    assert "This is not the host's token." in words_of(app)
    assert buttons(app) == {}
    app = alone(app, "new_run", field(app, "train_token").set_value("the host's token"))
    assert "Everything is open." in words_of(app)
    assert buttons(app) == OVER
    assert app.selectbox(key="new_preset").options == list(PRESETS)
    press(press(app, "Delete"), "Delete demo-1")
    assert asked == [("delete", "demo-1", Visitor(WHO, "the host's token"))]
