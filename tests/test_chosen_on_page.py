"""What is chosen in the viewer is in the session's view and in the link; nonsense from the browser is not.

Run: pytest tests/test_chosen_on_page.py (half a minute). AppTest, as in test_app.py.
"""

import pytest
from test_app import (
    VIEWER_FIELDS,
    WHOLE_LINK,
    component,
    data_of,
    link_of,
    opened,
    says,
    sends,
    shown,
    triggers,
    view_of,
)

from vit.page.view import View

pytestmark = pytest.mark.usefixtures("page_folders")

CHOICES = {  # what the viewer says, and the view's value then
    "layer": ("3", 2),
    "head": ("5", 4),
    "method": ("raw", "raw"),
    "looked_at": ("yes", True),
    "token": ("3,5", "3,5"),
    "fusion": ("max", "max"),
    "discard": ("0.4", 0.4),
    "draw": ("heat", "heat"),
    "strength": ("0.5", 0.5),
    "smooth": ("yes", True),
    "mass": ("0.6", 0.6),
    "scale": ("shared", "shared"),
}


def test_every_field_that_is_the_viewer_s_is_tested():
    assert set(CHOICES) == set(VIEWER_FIELDS)


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_chosen_in_the_viewer_is_in_the_view_and_the_link(name):
    text, value = CHOICES[name]
    app = says(opened(), **{name: text})
    assert getattr(view_of(app), name) == value
    assert link_of(app) == {name: text}
    shown(app.run())  # nothing falls back at the next run
    assert link_of(app) == {name: text}
    again = opened(**link_of(app))
    assert view_of(again) == view_of(app)
    assert data_of(again)["view"] == view_of(app).all_params()
    says(app, **{name: View().all_params()[name]})
    assert view_of(app) == View()
    assert link_of(app) == {}


def test_the_last_layer_is_the_default_however_it_is_said():
    app = opened(layer="2", head="3", strength="0.5")
    says(app, layer="6", head="", strength="")
    assert view_of(app) == View()
    assert link_of(app) == {}


@pytest.mark.parametrize("name", set(CHOICES) - {"fusion", "discard"})
def test_what_needs_no_new_numbers_sends_nothing_to_the_browser_again(name):
    app = opened()
    before = component(app, "viewer").SerializeToString()
    says(app, **{name: CHOICES[name][0]})
    assert component(app, "viewer").SerializeToString() == before  # so Streamlit sends a reference alone


@pytest.mark.parametrize("name", ["fusion", "discard"])
def test_another_fusion_or_discard_sends_new_rollouts_of_the_same_picture(name):
    app = says(opened(), token="3,5")
    before = data_of(app)
    says(app, **{name: CHOICES[name][0]})
    after = data_of(app)
    changed = {field for field in before if before[field] != after[field]}
    also = {"fusion": "fused", "discard": "raw"}[name]  # with the weights that are kept
    assert changed == {name, "rollout", also}  # not its id, and not the view that it began with
    assert after[name] == CHOICES[name][1]
    assert link_of(app) == {"token": "3,5", name: CHOICES[name][0]}


def test_another_picture_or_model_begins_with_the_view_as_it_is(page_folders, write_checkpoint):
    write_checkpoint(page_folders / "m.safetensors", num_layers=2, num_heads=2)
    app = says(opened(), token="3,5", layer="4", head="2", method="raw")
    before = data_of(app)
    triggers(app, "gallery", "picked", "sample:cat_00")
    assert data_of(app)["id"] != before["id"]
    assert data_of(app)["picture"] != before["picture"]
    wanted = {"picture": "sample:cat_00", "token": "3,5", "layer": "4", "head": "2", "method": "raw"}
    assert data_of(app)["view"] == View().all_params() | wanted
    assert link_of(app) == wanted
    shown(app.selectbox(key="view_model").set_value("run:m").run())
    del wanted["layer"]  # of which it has two
    assert data_of(app)["view"] == View().all_params() | wanted | {"model": "run:m"}
    assert data_of(app)["picture"] != before["picture"]
    assert data_of(app)["layers"] == data_of(app)["heads"] == 2


NONSENSE = [
    *[None, "raw", 7, True, [], ["token"], [["token", "3,5"]], float("nan"), {}],
    {"tokens": "3,5", "__class__": "x", "": "1", "view": {"layer": "3"}},
    {"picture": "sample:dog_12", "model": "patterns", "fit": "crop"},
    {"method": "grad", "layer": "0", "head": "-1", "token": "0,0", "fusion": "median", "discard": "1.5"},
    {"draw": "dark", "strength": "2", "smooth": "maybe", "mass": "nan", "scale": "log", "looked_at": "1"},
    {"layer": "9999", "head": "9999", "token": "9999,9999"},
    {"layer": 10**400, "head": -(10**400), "discard": 1e308, "strength": -1e308, "mass": float("inf")},
    {"layer": "1" * 100_000, "mass": "0." + "1" * 100_000, "token": "1," * 100_000},
    {"layer": [3], "head": {"head": 3}, "token": ["3", "5"], "method": ["raw"], "draw": {"heat": 1}},
    {"layer": True, "head": False, "mass": None, "strength": None, "smooth": True, "token": 3.5},
    {"token": "<img src=x onerror=alert(1)>", "fusion": "max; DROP", "method": "raw\n", "scale": "shared "},
]


@pytest.mark.parametrize("said", NONSENSE, ids=lambda said: str(said)[:40])
def test_nonsense_from_the_browser_changes_nothing(said):
    app = opened(**WHOLE_LINK)
    before, data = view_of(app), data_of(app)
    sends(app, "viewer", view=said)
    assert view_of(app) == before
    assert link_of(app) == WHOLE_LINK
    assert data_of(app) == data
    assert not [*app.error, *app.toast, *app.warning]


def test_what_can_be_used_is_used_beside_nonsense():
    app = sends(opened(head="2"), "viewer", view={"layer": "3", "token": "9,9", "fusion": "median", "x": {}})
    assert link_of(app) == {"head": "2", "layer": "3"}


def test_pictures_that_are_not_offered_cannot_be_picked():
    app = opened()
    for picked in ("sample:none_00", "test:0123456789ab", "../x", None, 7, ["sample:cat_00"], {}):
        triggers(app, "gallery", "picked", picked)
        assert link_of(app) == {}


def test_a_request_is_answered_beside_the_picture():
    app = opened()
    assert data_of(app, "wire") == {"answer": None}
    before = component(app, "viewer").SerializeToString()
    args, picture = {"layer": 5, "head": 0}, data_of(app)["id"]
    request = {"number": 7, "kind": "arithmetic", "args": args, "picture": picture}
    triggers(app, "wire", "ask", request)
    answer = data_of(app, "wire")["answer"]
    assert answer["number"] == 7
    assert answer["value"]["tokens"] == 65
    shown(app.run())
    assert data_of(app, "wire")["answer"] == answer  # an answer is worked out once, and stays
    triggers(app, "wire", "ask", request | {"number": 8, "picture": "another"})
    assert data_of(app, "wire")["answer"]["number"] == 8
    assert "another picture has taken its place" in data_of(app, "wire")["answer"]["error"]
    triggers(app, "wire", "ask", "nonsense")
    assert "Nothing has changed." in data_of(app, "wire")["answer"]["error"]
    assert component(app, "viewer").SerializeToString() == before
