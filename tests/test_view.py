"""The view of the page as one value: links, other models, sentences, and the Python snippet."""

import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

from vit.architecture import Architecture
from vit.attention import FUSIONS, token_index
from vit.page.view import View, plain, snippet
from vit.words import percent, token_label

ROOT = Path(__file__).parents[1]
IDS = some.text("0123456789abcdef", min_size=12, max_size=12)
SHARES = some.integers(0, 1000).map(lambda thousandths: thousandths / 1000)
VIEWS = some.builds(
    View,
    picture=some.one_of(
        some.sampled_from(["sample:cat_00", "pattern:00", "pattern:19"]),
        IDS.map(lambda i: f"test:{i}"),
        IDS.map(lambda i: f"own:{i}"),
    ),
    model=some.one_of(
        some.sampled_from(["bundled", "patterns"]),
        some.sampled_from(["run:best", "run:my run/epoch=3 (1)"]),
        IDS.map("own:{}".format),
    ),
    method=some.sampled_from(["rollout", "raw"]),
    looked_at=some.booleans(),
    layer=some.none() | some.integers(0, 99),
    head=some.none() | some.integers(0, 99),
    token=some.one_of(
        some.just("cls"), some.tuples(some.integers(1, 99), some.integers(1, 99)).map("{0[0]},{0[1]}".format)
    ),
    fusion=some.sampled_from(FUSIONS),
    discard=SHARES,
    draw=some.sampled_from(["light", "heat"]),
    strength=some.none() | SHARES,
    smooth=some.booleans(),
    mass=some.none() | SHARES,
    scale=some.sampled_from(["own", "shared"]),
    fit=some.sampled_from(["crop", "pad"]),
)
OTHER_THAN_DEFAULT = {
    "picture": "test:0123456789ab", "model": "run:mine/best", "method": "raw", "looked_at": True, "layer": 2,
    "head": 4, "token": "3,4", "fusion": "max", "discard": 0.35, "draw": "heat", "strength": 0.5,
    "smooth": True, "mass": 0.6, "scale": "shared", "fit": "pad",
}  # fmt: skip


@given(VIEWS)
def test_a_link_reproduces_every_view(view):
    assert View.from_params(view.to_params()) == (view, [])


def test_each_field_is_in_the_link_where_it_differs_and_only_there():
    assert set(OTHER_THAN_DEFAULT) == {field.name for field in fields(View)}
    assert View().to_params() == {}
    for name, value in OTHER_THAN_DEFAULT.items():
        view = replace(View(), **{name: value})
        assert list(view.to_params()) == [name]
        assert View.from_params(view.to_params()) == (view, [])


def test_links_count_from_one():
    assert replace(View(), layer=0, head=7).to_params() == {"layer": "1", "head": "8"}


@given(
    some.dictionaries(some.sampled_from([field.name for field in fields(View)]) | some.text(), some.text())
)
def test_no_link_raises_and_what_it_yields_can_be_shown(params):
    view, problems = View.from_params(params)
    assert set(problems) <= set(params)
    architecture = Architecture(10)
    shown = view.within(architecture)
    shown.explain_options(architecture), shown.style, shown.sentence(architecture)
    assert View.from_params(view.to_params()) == (view, [])


# What the viewer says

JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(), inner, max_size=3),
    max_leaves=8,
)
USABLE = some.sampled_from(
    ["", "no", "yes", "1", "2", "12", "3,5", "cls", "raw", "max", "heat", "0.25", "shared"]
)


@given(VIEWS, VIEWS)
def test_what_the_viewer_says_is_taken_but_for_picture_and_model(before, said):
    architecture = Architecture(10)
    before, said = before.within(architecture), said.within(architecture)
    after = before.with_params(said.all_params(), architecture)
    assert after == replace(said, picture=before.picture, model=before.model, fit=before.fit)


@given(
    VIEWS,
    some.dictionaries(
        some.sampled_from([field.name for field in fields(View)]) | some.text(), USABLE | JSON, max_size=6
    ),
    some.integers(1, 12),
)
def test_nothing_that_the_viewer_says_raises_or_leaves_the_model(before, said, layers):
    architecture = Architecture(10, num_layers=layers)
    before = before.within(architecture)
    after = before.with_params(said, architecture)
    assert after.lacking(architecture) == []
    assert after == after.within(architecture)
    assert View.from_params(after.to_params()) == (after, [])
    changed = {
        field.name for field in fields(View) if getattr(after, field.name) != getattr(before, field.name)
    }
    assert changed <= set(said) - {"picture", "model", "fit"}


def test_what_the_model_lacks_is_not_taken_from_the_viewer():
    two, before = Architecture(10, num_layers=2, num_heads=2), View(layer=0, head=1, token="8,8")
    assert before.with_params({"layer": "3", "head": "3", "token": "9,1"}, two) == before
    assert before.with_params({"layer": "3", "head": "1", "token": "9,1"}, two) == replace(before, head=0)
    assert before.with_params({"layer": "2", "head": "", "token": "cls"}, two) == View()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("picture", "sample:../../etc/passwd"),
        ("picture", "pattern:20"),
        ("picture", "pattern:5"),
        ("picture", "test:ABCDEF012345"),
        ("picture", "own:<script>"),
        ("model", "run:"),
        ("model", "run:" + 301 * "a"),
        ("model", "secret"),
        ("model", "own:../secret"),
        ("method", "grad"),
        ("looked_at", "no"),
        ("layer", "0"),
        ("layer", "-1"),
        ("layer", "2.5"),
        ("layer", "٣"),
        ("layer", "1٣"),
        ("layer", "99999"),
        ("head", "all"),
        ("token", "0,1"),
        ("token", "1"),
        ("token", "1,٢"),
        ("fusion", "median"),
        ("discard", "1.01"),
        ("discard", "-0.1"),
        ("discard", "nan"),
        ("strength", "inf"),
        ("strength", "1e-1"),
        ("draw", "dark"),
        ("smooth", "true"),
        ("mass", "0.6 "),
        ("mass", "60"),
        ("scale", "log"),
        ("fit", "stretch"),
    ],
)
def test_what_cannot_be_used_is_dropped_and_named(name, text):
    known = {"discard" if name != "discard" else "strength": "0.5"}
    view, problems = View.from_params({name: text} | known)
    assert problems == [name]
    assert view == View.from_params(known)[0]


def test_parameters_of_others_are_left_alone():
    assert View.from_params({"tab": "Train", "embed": "true"}) == (View(), [])


@given(VIEWS, some.integers(1, 12), some.integers(1, 12), some.sampled_from([1, 2, 4, 8, 16]))
def test_within_gives_the_nearest_view_that_a_model_has(view, layers, heads, patch_px):
    architecture = Architecture(10, patch_size=patch_px, num_layers=layers, num_heads=heads)
    shown = view.within(architecture)
    assert shown.within(architecture) == shown
    assert 0 <= shown.shown_layer(architecture) < layers
    assert shown.head is None or 0 <= shown.head < heads
    assert 0 <= token_index(shown.token, architecture.grid) <= 1024
    if view.layer is not None and view.layer < layers:
        assert shown.shown_layer(architecture) == view.layer
    if view.head is not None and view.head < heads:
        assert shown.head == view.head
    kept = replace(shown, layer=view.layer, head=view.head, token=view.token)
    assert kept == view


def test_sentences():
    six = Architecture(10)
    assert View().sentence(six) == (
        "Where CLS looks: rollout of layers 1 to 6, mean of all heads, weakest 90\u00a0% left out"
    )
    assert View(method="raw", layer=1, head=2, token="3,4", looked_at=True).sentence(six) == (
        "Who looks at row 3, column 4: attention of layer 2, head 3"
    )
    assert "left out" not in View(discard=0).sentence(six)
    assert token_label("cls") == "CLS"
    shares = [0, 0.001, 0.042, 0.0949, 0.0996, 0.5, 1]
    assert [percent(share) for share in shares] == [
        "0\u00a0%",
        "0.1\u00a0%",
        "4.2\u00a0%",
        "9.5\u00a0%",
        "10\u00a0%",
        "50\u00a0%",
        "100\u00a0%",
    ]


def test_heat_is_weaker_than_light_unless_asked():
    assert View(draw="heat").style.strength < View().style.strength
    assert View(draw="heat", strength=0.85).style.strength == 0.85


@pytest.mark.parametrize(
    "view",
    [
        View(),
        View(
            picture="sample:cat_00", method="raw", layer=1, head=2, token="3,4", looked_at=True, draw="heat"
        ),
        View(
            picture="own:0123456789ab",
            fusion="max",
            discard=0.35,
            smooth=True,
            strength=0.5,
            fit="pad",
            layer=3,
        ),
        View(picture="test:{id}", head=7, mass=0.6),
        View(picture="pattern:05", layer=3, head=1, mass=0.3, draw="heat"),
        View(picture="test:{id}", model="run:elsewhere", method="raw", scale="shared", layer=2, head=1),
        View(picture="sample:cat_00", scale="shared", fusion="max", token="3,4", looked_at=True, layer=4),
    ],
    ids=["first", "sample", "own", "test", "pattern", "test picture of a folder", "shared scale"],
)
def test_the_snippet_draws_what_the_page_shows(view, tmp_path, page_folders, monkeypatch):
    from synthetic import made, write_classes

    from vit import load, open_picture
    from vit.images import picture_id
    from vit.overlay import draw, outline
    from vit.page.explained import explain_picture
    from vit.page.models import BUNDLED, Loaded
    from vit.page.pictures import find_picture, keep_own

    (tmp_path / "vit").symlink_to(ROOT / "vit")
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    pixels, labels = made(20, 1)
    write_classes(tmp_path / "data" / "test", pixels, labels)
    data = "cifar10"
    if view.model == "run:elsewhere":
        data = str(tmp_path / "data")
    else:
        monkeypatch.setenv("PATCHLIGHT_DATA", str(tmp_path / "data"))
    Image.effect_noise((90, 60), 80).convert("RGB").save(tmp_path / "your-picture.png")
    if view.picture.startswith("own:"):
        view = replace(view, picture=keep_own((tmp_path / "your-picture.png").read_bytes()))
    view = replace(view, picture=view.picture.format(id=picture_id(pixels[7])))
    model, checkpoint = load(BUNDLED)
    shown = find_picture(view.picture, data, checkpoint.architecture.img_size, view.fit)
    explained = explain_picture(view, Loaded(model, checkpoint, BUNDLED), shown)
    height, width = shown.canvas.shape[:2]
    size_px = (round(height * 672 / max(height, width)), round(width * 672 / max(height, width)))
    weights, top = explained.drawn(explained.relevance_map), None
    if view.scale == "shared" and view.mass is None:
        maps = explained.relevance.copy()
        if explained.cell:  # the patch's own weight is no part of the scale, unless it is alone
            maps[(..., *explained.cell)] = 0
            alone = maps.max(axis=(-2, -1)) == 0
            maps[alone] = explained.relevance[alone]
        top = maps.max()
    assert explained.top == top
    page = draw(shown.canvas, weights, view.style, size_px=size_px, top=top)
    if explained.cell:
        page = outline(page, explained.cell, checkpoint.architecture.grid)

    code = snippet(view, checkpoint.architecture, "assets/weights/vit-cifar10.safetensors", data)
    monkeypatch.chdir(tmp_path)
    if view == View():  # once as people run it; the rest in this process, where torch is imported already
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        exec(compile(code, "snippet", "exec"), {})
    drawn = np.asarray(open_picture(tmp_path / "lit.png"))
    assert drawn.shape == page.shape
    assert np.abs(drawn.astype(int) - page).max() <= 2
    assert page.std() > 5  # there is something to compare


@pytest.mark.parametrize(
    "text", ["<b>bee</b>", "[a](http://b)", "**x** _y_ `z`", ":material/home:", "$x$", "plain, čmelák"]
)
def test_a_stranger_s_text_is_escaped_for_markdown(text):
    escaped = plain(text).replace("\u200b", "")  # which parts bare addresses
    assert re.sub(r"\\(.)", r"\1", escaped) == text
    bare = re.sub(r"\\.", "", escaped)
    assert not set(bare) & set("<>[]()*_`:$#|!~")


def test_the_last_layer_is_followed_from_model_to_model():
    six, two = Architecture(num_classes=10), Architecture(num_classes=10, num_layers=2)
    assert View(layer=5).within(six).layer is None
    assert View(layer=5).within(six).within(two).shown_layer(two) == 1
    assert View(layer=4).within(six).layer == 4
    assert View(layer=1).within(two).layer is None


def test_what_a_model_lacks_is_named():
    two = Architecture(num_classes=10, num_layers=2, num_heads=2)
    assert View(layer=1, head=1, token="8,8").lacking(two) == []
    assert View(layer=2, head=2, token="9,1").lacking(two) == ["layer", "head", "token"]
    assert View(layer=2, head=2, token="9,1").within(two) == View()
