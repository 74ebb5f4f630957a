"""The drawers that compare methods and show all heads, through AppTest: figures are those of the library.

Run: pytest tests/test_compare_on_page.py (half a minute).
"""

import pytest
import torch
from test_app import ROOT, opened, shown, view_of, words_of

from vit.atlas import find_atlas
from vit.checkpoint import BUNDLED, load
from vit.faithfulness import score_picture
from vit.images import open_picture, prepare
from vit.methods import METHODS, relevance
from vit.page import compare, heads
from vit.scoreboard import chosen_scores

pytestmark = pytest.mark.usefixtures("page_folders")
PICTURE = "sample:cat_00"


def with_open(drawer: str, **params):
    app = opened(picture=PICTURE, **params)
    app.session_state[f"drawer_{drawer}"] = True
    return shown(app.run())


def panels_of(app) -> list[str]:
    return [each.value for each in app.markdown if each.value.startswith("**") and "**, " in each.value]


@pytest.fixture(scope="module")
def case():
    model, checkpoint = load(BUNDLED, device="cpu")
    return model, checkpoint, prepare(open_picture(ROOT / "assets" / "samples" / "cat_00.png"), checkpoint)


def test_six_methods_stand_side_by_side_with_their_scores(case):
    model, checkpoint, x = case
    app = with_open("compare")
    words = words_of(app)
    ranked = chosen_scores(checkpoint.id)
    assert f"**{METHODS[ranked.default].title}** ranked the patches best" in words
    panels = panels_of(app)
    assert len(panels) == compare.USEFUL
    assert panels[0].startswith(f"**{METHODS[ranked.default].title}**")
    maps = {ranked.default: relevance(model, x, ranked.default)}
    score = score_picture(model, x, maps, orders=20).methods[ranked.default].difference.item()
    assert f"score {score:+.2f}; random orders".replace("-", "−") in words
    for panel in panels:
        method = next(method for method in METHODS.values() if method.title == panel.split("**")[1])
        assert ("the same for every class" in panel) != method.class_specific
        assert method.source in words
        assert method.fails in words


def test_the_rest_comes_on_request_and_another_class_has_no_score():
    app = with_open("compare")
    app.toggle(key="compare_all").set_value(True)
    shown(app.run())
    titles = [panel.split("**")[1] for panel in panels_of(app)]
    assert sorted(titles) == sorted(method.title for method in METHODS.values())
    target = next(each for each in app.selectbox if each.label == "Explain the class")
    target.set_value(5)
    shown(app.run())
    words = words_of(app)
    assert "for dog" in words
    assert "random orders" not in words


def test_all_heads_are_there_and_one_opens_in_the_viewer():
    _, checkpoint = load(BUNDLED, device="cpu")
    found = find_atlas(checkpoint.id)
    app = with_open("heads")
    words = words_of(app)
    assert "Do heads specialise?" in words
    far = max(found.heads, key=lambda head: head.distance_px)
    assert f"head {far.name}" in words
    assert len(app.dataframe[-1].value) == len(found.heads) == 48
    app = with_open("heads", method="raw", layer="3", head="2")
    assert "**Head 3.2** gives most" in words_of(app)
    assert view_of(app).head == 1


def test_a_chosen_point_changes_the_view(monkeypatch):
    import streamlit as st

    changed = {}
    monkeypatch.setattr(heads, "change_view", lambda **changes: changed.update(changes))
    state = {"atlas_points": {"selection": {"point_indices": [17]}}, "viewer_start": ("id", {})}
    monkeypatch.setattr(st, "session_state", state)
    found = find_atlas(load(BUNDLED, device="cpu")[1].id)
    heads._open(found, heads._chosen_point(found))
    assert (changed["method"], changed["layer"], changed["head"]) == ("raw", 2, 1)
    assert "viewer_start" not in state
    assert state["atlas_chosen"]  # so that the whole page runs again


def test_a_model_without_an_atlas_says_how_to_make_one(monkeypatch):
    monkeypatch.setattr(heads, "find_atlas", lambda checkpoint_id: None)
    app = with_open("heads")
    assert any("python -m vit atlas" in each.value for each in app.code)


def test_maps_are_those_asked_for(case):
    model, _, x = case
    key = ("id", "picture", "crop", 5, 3, ("chefer", "raw"))

    class Asked:
        def __init__(self):
            self.loaded, self.x, self.model = self, x, model

    maps, problems = compare._maps.__wrapped__(key, Asked())
    assert problems == []
    expected = relevance(model, x, "chefer", 5, 3)[0].view(8, 8)
    torch.testing.assert_close(torch.from_numpy(maps["chefer"]), expected)
