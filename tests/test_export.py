"""The viewer as one HTML file: whole, small, harmless, and alive without Python or a network.

Run: pytest tests/test_export.py (some seconds). Without Chromium the tests in a browser are skipped; with
PATCHLIGHT_BROWSER=required (as in CI) they fail instead.
"""

import base64
import hashlib
import json
import re
import tomllib
from contextlib import contextmanager
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from vit.__main__ import main
from vit.architecture import Architecture
from vit.checkpoint import BUNDLED, Checkpoint, load
from vit.explanation import explain, head_rows
from vit.export import export_html, opens_unlit, payload_of, with_maps
from vit.images import open_picture, prepare
from vit.overlay import Style, dim_own, draw, outline

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "assets" / "samples"
CAT, SHIP = SAMPLES / "cat_00.png", SAMPLES / "ship_01.png"
NASTY = [
    "</script><script>document.title = 'run'</script>",
    "<!-- <script>",
    "\"'><img src=x onerror=\"document.title = 'run'\">",
    "line\u2028and\u2029paragraph\r\n",
    "]]> &lt; &amp; </style><style>*{display:none}</style>",
    "$title ${data} $$ %(js)s {css}",
    "caf\udce9.png",  # a name of a file that is no valid UTF-8
]


class Parsed(HTMLParser):
    """The tags of a page in order, with attributes and text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self._open = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(SimpleNamespace(name=tag, text="", **{"attributes": dict(attributes)}))
        self._open.append(self.tags[-1])

    def handle_endtag(self, tag):
        while self._open and self._open.pop().name != tag:
            pass

    def handle_data(self, data):
        if self._open:
            self._open[-1].text += data

    def all(self, name: str) -> list[SimpleNamespace]:
        return [tag for tag in self.tags if tag.name == name]


@pytest.fixture(scope="module")
def bundled():
    return load(BUNDLED)


@pytest.fixture(scope="module")
def cat(bundled) -> dict:
    return payload_of(open_picture(CAT), *bundled, name="cat_00", title="cat 00")


@pytest.fixture(scope="module")
def ship(bundled) -> dict:
    return payload_of(open_picture(SHIP), *bundled, name="ship_01", title="ship 01")


def data_of(page: Parsed) -> list[dict]:
    (script,) = [tag for tag in page.all("script") if tag.attributes["type"] == "application/json"]
    return json.loads(script.text)


# --- the file


@pytest.mark.parametrize("words", NASTY)
def test_no_words_get_out_of_their_place(cat, words):
    strange = cat | {"title": words, "name": words, "model": words, "true_class": words}
    strange["classes"] = [words, *cat["classes"][1:]]
    html = export_html([strange], title=words)
    page, plain = Parsed(html), Parsed(export_html([cat]))
    assert [tag.name for tag in page.tags] == [tag.name for tag in plain.tags]
    assert data_of(page) == [strange | {"live": False}]
    valid = words.encode(errors="replace").decode()
    assert page.all("h1")[0].text == page.all("title")[0].text == valid
    assert [tag.text for tag in page.all("style")] == [tag.text for tag in plain.all("style")]
    # "<!--" with "<script" inside would hide the end of the script, "</" would be its end
    (data,) = [tag.text for tag in page.all("script") if tag.attributes["type"] == "application/json"]
    assert "<" not in data
    html.encode()


def test_nothing_is_loaded_and_nothing_else_can_run(cat, ship):
    html = export_html([cat, ship])
    page = Parsed(html)
    (policy,) = [
        tag.attributes["content"]
        for tag in page.all("meta")
        if tag.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data: blob:"
    (script,) = [tag.text for tag in page.all("script") if tag.attributes["type"] == "module"]
    for kind, text in (("script-src", script), ("style-src", page.all("style")[0].text)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert set(rules) == {"default-src", "img-src", "script-src", "style-src", "base-uri", "form-action"}
    for tag in page.tags:
        for name in ("src", "href", "srcset", "action", "data"):
            assert tag.attributes.get(name, "data:").startswith("data:")
    assert not re.search(r"url\(|@import", page.all("style")[0].text)
    assert not re.search(r"https?://", html.replace("http://www.w3.org/", ""))


def test_one_picture_of_the_default_model_is_small(cat):
    assert len(export_html([cat]).encode()) < 1_000_000


def test_what_is_given_stays_as_it_is_and_is_inside(cat, ship):
    before = json.dumps([cat, ship])
    inside = data_of(Parsed(export_html([cat, ship])))
    assert json.dumps([cat, ship]) == before
    assert inside == [each | {"live": False} for each in (cat, ship)]


def test_without_a_picture_there_is_nothing_to_export():
    with pytest.raises(ValueError, match="no picture"):
        export_html([])


def test_an_explanation_at_hand_gives_the_same(bundled, cat):
    model, checkpoint = bundled
    picture = open_picture(CAT)
    explanation = explain(model, prepare(picture, checkpoint), "raw", layer=2, discard_ratio=0.9)
    options = {"name": "cat_00", "title": "cat 00", "view": {"layer": "3"}}
    given = payload_of(picture, model, checkpoint, explanation=explanation, **options)
    assert given == cat | {"view": {"layer": "3"}}


def test_both_themes_are_those_of_the_page():
    themes = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())["theme"]
    css = (ROOT / "assets" / "viewer" / "export.css").read_text()
    light, dark = css.split("prefers-color-scheme: dark")
    for text, theme in ((light, themes["light"]), (dark, themes["dark"])):
        for name, value in theme.items():
            variable = re.sub("([A-Z])", lambda letter: f"-{letter[1].lower()}", name)
            assert re.search(rf"--st-{variable}: {value};", text), name
    assert f"--st-base-radius: {themes['baseRadius']};" in light


# --- large grids


@pytest.fixture(scope="module")
def large():
    """A model of 12 layers by 12 heads on 14 x 14 patches that has learned nothing, and a photo."""
    sizes = {"img_size": (224, 224), "patch_size": 16, "embed_dim": 24, "mlp_dim": 24}
    architecture = Architecture(num_classes=3, num_layers=12, num_heads=12, **sizes)
    torch.manual_seed(0)
    checkpoint = Checkpoint(architecture, ("a", "b", "c"), (0.5,) * 3, (0.5,) * 3)
    y, x = np.mgrid[:240, :320]
    soft = np.stack([128 + 90 * np.sin(x / 60), 60 + y // 2, 150 + 80 * np.cos((x - y) / 90)], axis=-1)
    return architecture.build(init="tutorial").eval(), checkpoint, Image.fromarray(soft.astype(np.uint8))


@pytest.fixture(scope="module")
def large_explanation(large):
    model, checkpoint, photo = large
    return explain(model, prepare(photo, checkpoint), discard_ratio=0.9)


def test_a_large_grid_has_its_fused_maps_and_stays_under_2_mb(large, large_explanation):
    model, checkpoint, photo = large
    data = payload_of(photo, model, checkpoint, name="a", title="a", explanation=large_explanation)
    assert set(data["maps"]) == {f"rollout/{layer}" for layer in range(12)} | {
        f"raw/{layer}/all" for layer in range(12)
    }
    assert len(export_html([data]).encode()) < 2_000_000
    values = np.frombuffer(base64.b64decode(data["maps"]["rollout/5"]["values"]), np.uint8).reshape(197, 197)
    scales = np.frombuffer(base64.b64decode(data["maps"]["rollout/5"]["scales"]), np.float32)[:, None]
    rollout = large_explanation.rollout[0, 5].numpy()
    found = values * scales
    np.fill_diagonal(found, np.frombuffer(base64.b64decode(data["maps"]["rollout/5"]["own"]), np.float32))
    assert (np.abs(found - rollout) <= rollout.max(axis=-1, keepdims=True) / 500).all()


@pytest.mark.parametrize(
    ("view", "first"),
    [
        ({}, ["rollout/11", "raw/11/all"]),
        ({"token": "cls", "layer": "3"}, ["rollout/11", "raw/11/all"]),  # that row is inside
        ({"token": "4,4", "layer": "3"}, ["rollout/2", "rollout/11"]),
        ({"looked_at": "yes", "method": "raw"}, ["raw/11/all", "rollout/11"]),
        ({"token": "4,4", "method": "raw", "layer": "2", "head": "7"}, ["raw/1/6", "rollout/11"]),
        ({"token": "4,4", "layer": "2", "head": "7"}, ["raw/1/6", "rollout/0"]),
        ({"token": "4,4", "layer": "1", "head": "7"}, ["raw/0/6", "rollout/11"]),
    ],
)
def test_what_is_shown_first_is_inside_before_the_rest(large, large_explanation, view, first):
    model, checkpoint, photo = large
    data = payload_of(photo, model, checkpoint, name="a", title="a", explanation=large_explanation)
    del data["maps"]
    room_bytes = len(json.dumps(data)) + 125_000  # two of its maps
    held = with_maps(data | {"view": view}, large_explanation, room_bytes)
    assert list(held["maps"]) == first
    assert len(json.dumps(held)) <= room_bytes
    assert with_maps(data, large_explanation, 0) == data


def test_a_view_that_is_not_inside_is_known(large, large_explanation):
    model, checkpoint, photo = large
    view = {"token": "4,4", "method": "raw", "layer": "2"}
    data = payload_of(photo, model, checkpoint, name="a", title="a", view=view, explanation=large_explanation)
    assert not opens_unlit(data)
    without = {name: data[name] for name in data if name != "maps"}
    assert opens_unlit(without)
    assert not opens_unlit(without | {"view": {"layer": "2"}})  # CLS is always there
    assert opens_unlit(without | {"view": {"looked_at": "yes"}})


def test_a_small_grid_needs_no_more_maps(bundled, cat):
    model, checkpoint = bundled
    assert with_maps(cat, explain(model, prepare(open_picture(CAT), checkpoint)), 10**9) is cat


# --- the command


def test_pictures_go_into_one_file_that_shows_what_was_asked(tmp_path, capsys):
    command = ["export", CAT, SHIP, "--html", tmp_path / "two.html", "--title", "Cat & ship", "--smooth"]
    command += ["--method", "raw", "--layer", 3, "--head", 2, "--token", "4, 5", "--style", "heat"]
    command += ["--looked-at", "--mass", 0.4, "--scale", "shared"]
    assert main([str(word) for word in command]) == 0
    said = capsys.readouterr()
    assert [line.split(":")[0] for line in said.out.splitlines()] == [str(CAT), str(SHIP)]
    assert re.search(r"two\.html written, 0\.\d MB", said.err)
    page = Parsed((tmp_path / "two.html").read_bytes().decode())
    assert page.all("h1")[0].text == "Cat & ship"
    for data, path in zip(data_of(page), (CAT, SHIP), strict=True):
        assert (data["name"], data["title"], data["true_class"]) == (path.stem, path.name, None)
        assert (data["discard"], data["fusion"]) == (0.9, "mean")
        assert data["view"] == {
            "method": "raw", "looked_at": "yes", "layer": "3", "head": "2", "token": "4,5", "draw": "heat",
            "strength": "0.6", "smooth": "yes", "mass": "0.4", "scale": "shared",
        }  # fmt: skip


@pytest.mark.parametrize("scale", ["own", "shared"])
@pytest.mark.parametrize("method", ["rollout", "raw"])
def test_a_film_plays_what_was_asked(tmp_path, bundled, method, scale):
    model, checkpoint = bundled
    command = ["export", CAT, "--webp", tmp_path / "cat.webp", "--method", method, "--head", 2]
    command += ["--scale", scale]
    assert main([str(word) for word in command]) == 0
    film = Image.open(tmp_path / "cat.webp")
    picture = open_picture(CAT)
    explanation = explain(model, prepare(picture, checkpoint), discard_ratio=0.9)
    sheet = head_rows(explanation, method, discard_ratio=0.9)[0, :, :, 1:]
    rows, top = sheet[:, 1], sheet.max().item() if scale == "shared" else None
    assert film.n_frames == 6
    for layer in range(6):
        film.seek(layer)
        drawn = draw(np.asarray(picture), rows[layer].reshape(8, 8), Style(), size_px=(448, 448), top=top)
        assert np.abs(np.asarray(film.convert("RGB"))[:448].astype(int) - drawn).max() <= 2


def test_a_film_of_a_patch_s_view_is_not_outshone_by_the_patch(tmp_path, bundled):
    model, checkpoint = bundled
    assert main(["export", str(CAT), "--webp", str(tmp_path / "cat.webp"), "--token", "4,5"]) == 0
    film, picture = Image.open(tmp_path / "cat.webp"), np.asarray(open_picture(CAT))
    explanation = explain(model, prepare(open_picture(CAT), checkpoint), discard_ratio=0.9)
    rows = head_rows(explanation, token=1 + 3 * 8 + 4, discard_ratio=0.9)[0, :, -1, 1:].numpy()
    for layer in range(6):
        film.seek(layer)
        weights = rows[layer].reshape(8, 8).copy()
        own, weights[3, 4] = weights[3, 4], 0
        assert own > weights.max()
        weights[3, 4] = weights.max()
        drawn = outline(draw(picture, weights, size_px=(448, 448)), (3, 4), (8, 8))
        assert np.abs(np.asarray(film.convert("RGB"))[:448].astype(int) - drawn).max() <= 2


def test_films_of_several_pictures_need_a_folder(tmp_path, capsys):
    assert main(["export", str(CAT), str(SHIP), "--gif", str(tmp_path / "films")]) == 0
    assert sorted(path.name for path in (tmp_path / "films").iterdir()) == ["cat_00.gif", "ship_01.gif"]
    assert main(["export", str(CAT), str(SHIP), "--gif", str(tmp_path / "one.gif")]) == 2
    assert "several pictures need a folder" in capsys.readouterr().err
    assert not (tmp_path / "one.gif").exists()


def test_a_picture_that_cannot_be_opened_is_named_and_the_others_exported(tmp_path, capsys):
    (tmp_path / "diary.png").write_text("dear diary")
    out = tmp_path / "out.html"
    assert main(["export", str(tmp_path / "diary.png"), str(CAT), "--html", str(out), "--json"]) == 2
    said = capsys.readouterr()
    assert "diary.png: This file is not a picture" in said.err
    assert json.loads(said.out)["class"] == "cat"
    assert [data["name"] for data in data_of(Parsed(out.read_text()))] == ["cat_00"]
    out.unlink()
    assert main(["export", str(tmp_path / "diary.png"), "--html", str(out)]) == 2
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--html FILE.html"),
        (["--html", "out.png"], "ends in .html"),
        (["--html", "."], "ends in .html"),
        (["--gif", "out.png"], "ends in .gif"),
        (["--html", "out.html", "--layer", "7"], "layers 1 to 6"),
        (["--html", "out.html", "--token", "9,1"], "rows 1 to 8"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_written(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(CAT), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["html", "gif", "webp"])
def test_a_picture_is_never_written_over(tmp_path, capsys, kind):
    path = tmp_path / f"cat.{kind}"
    path.write_bytes(CAT.read_bytes())
    assert main(["export", str(path), f"--{kind}", str(path)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert path.read_bytes() == CAT.read_bytes()


# --- in a browser


@contextmanager
def opened(browser, path: Path, scheme: str = "light", width: int = 1280):
    """The file from disk without a network, once its picture is drawn; `page.complaints` must stay empty."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_offline(True)
    page = context.new_page()
    page.complaints = []
    page.on("console", lambda said: page.complaints.append(said.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("dialog", lambda dialog: page.complaints.append(dialog.message))
    page.on("request", lambda asked: page.complaints.append(asked.url) if is_load(asked.url, path) else None)
    page.goto(path.as_uri())
    # not by wait_for_function, which asks again by eval: the page's policy forbids that
    page.locator(".looks", has_text=re.compile("Where|Who")).wait_for(timeout=10_000)
    yield page
    assert page.complaints == []
    context.close()


def is_load(url: str, path: Path) -> bool:
    return not url.startswith(("data:", "blob:")) and url != path.as_uri()


def painted(page) -> np.ndarray:
    """(h, w, 3): the pixels of the large picture."""
    url = page.locator(".stage canvas").evaluate("canvas => canvas.toDataURL()")
    image = Image.open(BytesIO(base64.b64decode(url.partition(",")[2])))
    return np.asarray(image.convert("RGB")).astype(int)


def point_at(page, row: int, column: int) -> None:
    """Rows and columns from 1, on a grid of 8 x 8."""
    box = page.locator(".stage").bounding_box()
    page.mouse.move(box["x"] + (column - 0.5) * box["width"] / 8, box["y"] + (row - 0.5) * box["height"] / 8)


def caption_says(page, words: str) -> None:
    page.wait_for_function(
        "words => document.querySelector('.looks').textContent.includes(words)", arg=words, timeout=5_000
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory, cat) -> Path:
    path = tmp_path_factory.mktemp("one") / "a cat.html"
    path.write_bytes(export_html([cat | {"view": {"layer": "3", "token": "4,5"}}]).encode())
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory, cat, ship) -> Path:
    path = tmp_path_factory.mktemp("two") / "two.html"
    path.write_bytes(export_html([cat, ship]).encode())
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_from_disk_whole_and_open_to_all(browser, two, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    with opened(browser, two, scheme, width) as page:
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 384) == (scheme == "light")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.get_by_text("not why it decides").is_visible()
        assert page.get_by_text("Model: vit-cifar10.safetensors, id ").is_visible()
        assert page.locator("h2").inner_text() == "cat 00"
        assert page.locator(".held").is_hidden()
        for name in ("cause", "anatomy", "arithmetic"):  # these need Python
            assert page.locator(f"details.{name}").is_hidden()
        if (width, scheme) in ((1280, "light"), (390, "dark")):  # it takes seconds
            found = Axe().run(page).response["violations"]
            grave = [each for each in found if each["impact"] in ("serious", "critical")]
            assert [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in grave] == []


def test_the_picture_is_the_librarys_to_2_of_255(browser, one, bundled):
    model, checkpoint = bundled
    picture = open_picture(CAT)
    x = prepare(picture, checkpoint)
    options = {"layer": 2, "discard_ratio": 0.9}
    with opened(browser, one) as page:
        caption_says(page, "Where row 4, column 5 looks: rollout of layers 1 to 3")
        seen = dim_own(explain(model, x, token=1 + 3 * 8 + 4, **options).relevance[0], (3, 4))
        assert np.abs(painted(page) - draw(picture, seen)).max() <= 2
        point_at(page, 2, 3)
        caption_says(page, "Where row 2, column 3 looks")
        seen = dim_own(explain(model, x, token=1 + 1 * 8 + 2, **options).relevance[0], (1, 2))
        page.wait_for_timeout(100)
        assert np.abs(painted(page) - draw(picture, seen)).max() <= 2
        page.mouse.move(0, 0)
        caption_says(page, "Where row 4, column 5 looks")


def test_a_picture_can_be_saved(browser, one):
    with opened(browser, one) as page:
        with page.expect_download(timeout=10_000) as download:
            page.get_by_role("button", name="Save picture").click()
        assert Image.open(download.value.path()).size == (1024, 1024)
        assert download.value.suggested_filename == "cat-00.png"


def test_the_gallery_switches_pictures_and_keeps_the_view(browser, two):
    with opened(browser, two) as page:
        cat, ship = (page.get_by_role("button", name=name, exact=True) for name in ("cat 00", "ship 01"))
        assert (cat.get_attribute("aria-pressed"), ship.get_attribute("aria-pressed")) == ("true", "false")
        alts = page.locator(".gallery img").evaluate_all("all => all.map(img => img.alt)")
        assert alts == ["cat 00", "ship 01"]
        before = painted(page)
        page.get_by_role("slider").first.press("ArrowLeft")
        caption_says(page, "layers 1 to 5")
        ship.click()
        page.wait_for_function("document.querySelector('h2').textContent === 'ship 01'")
        page.locator(".verdict", has_text="ship").wait_for()
        caption_says(page, "layers 1 to 5")
        page.wait_for_timeout(500)
        assert np.abs(painted(page) - before).max() > 50
        assert (cat.get_attribute("aria-pressed"), ship.get_attribute("aria-pressed")) == ("false", "true")
        page.keyboard.press("ArrowLeft")
        assert page.evaluate("document.activeElement.title") == "cat 00"
        page.keyboard.press("Enter")
        page.wait_for_function("document.querySelector('h2').textContent === 'cat 00'")
        page.locator(".verdict", has_text="cat").wait_for()
        point_at(page, 8, 8)
        caption_says(page, "Where row 8, column 8 looks: rollout of layers 1 to 5")


def test_a_single_picture_has_no_gallery(browser, one):
    with opened(browser, one) as page:
        assert page.locator(".gallery").is_hidden()


def test_strange_words_are_shown_and_never_run(browser, tmp_path, cat):
    path = tmp_path / "strange.html"
    pictures = [cat | {"title": words, "model": words, "id": str(i)} for i, words in enumerate(NASTY)]
    path.write_bytes(export_html(pictures, title=NASTY[0]).encode())
    with opened(browser, path) as page:
        assert page.title() == page.locator("h1").inner_text() == NASTY[0]
        for i, words in enumerate(NASTY):
            page.locator(".gallery button").nth(i).click()
            shown = page.locator("h2").evaluate("heading => heading.textContent")
            assert shown.encode(errors="replace").decode() in (words, words.encode(errors="replace").decode())
        assert page.title() == NASTY[0]
        assert page.locator("script").count() == 2


def test_a_large_grid_says_what_it_lacks(browser, tmp_path, large, large_explanation):
    model, checkpoint, photo = large
    path = tmp_path / "large.html"
    view = {"layer": "3", "token": "4,5", "method": "raw"}
    data = payload_of(photo, model, checkpoint, name="a", title="a", view=view, explanation=large_explanation)
    path.write_bytes(export_html([data]).encode())
    with opened(browser, path) as page:
        held = page.locator(".held").inner_text()
        assert "Of single heads, this copy holds only where CLS looks" in held
        assert "rollout of every layer; raw attention of every layer" in held
        caption_says(page, "Where row 4, column 5 looks: attention of layer 3")
        row = large_explanation.attention[0, 2].mean(dim=0)[1 + 3 * 14 + 4, 1:].reshape(14, 14)
        seen = np.asarray(photo.crop((40, 0, 280, 240)))
        assert np.abs(painted(page) - draw(seen, dim_own(row, (3, 4)))).max() <= 2
