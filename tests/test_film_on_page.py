"""The film of attention in a real browser: what is painted, time, two runs, and frames that come.

Run: pytest tests/test_film_on_page.py (20 s). Real server, real Chromium; films of noise in a folder.
"""

import os
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect
from serving import serving
from test_film_payload import made_film
from viewer_page import PICTURE, SIZES, drawn, eventually, focused, listen, pixels

from train.film import Film, cut, save
from train.page.film import NOTHING_YET, load_film
from train.runs import Run
from vit.overlay import draw
from vit.words import percent

# Names of runs come from people: these look like markup. The fragment redraws as it does while a run goes on.
PAGE = """
from pathlib import Path
import streamlit as st
from train.page.film import load_film, show_film
from train.runs import Run

st.set_page_config(page_title="Films", layout="wide")
st.title("Films", anchor=False)

@st.fragment(run_every=0.3)
def watch():
    runs = [Run(Path(FOLDER) / name) for name in st.query_params["runs"].split(",")]
    show_film([(f"<b>{run.name}</b>", load_film(run)) for run in runs], key="film")

watch()
"""
STEPS = (0, 40, 700, 1240)
ONE = made_film(STEPS, classes=12)
OTHER = made_film((5, 90, 4000), layers=2, heads=5, patch=8, seed=3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """The folder of runs: one; other, of another size, with one picture changed."""
    folder = tmp_path_factory.mktemp("films")
    pictures = OTHER.pictures.copy()
    pictures[3] ^= 255
    for name, film in {"one": ONE, "other": replace(OTHER, pictures=pictures)}.items():
        save(film, Run(folder / name).film_file)
    return folder


@pytest.fixture(scope="module")
def server(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    script = folder / "page.py"
    script.write_text(PAGE.replace("FOLDER", repr(str(runs))), encoding="utf-8")
    with serving(folder, script) as server:
        yield server


@pytest.fixture(scope="module")
def context(browser):
    with browser.new_context() as context:
        yield context


@contextmanager
def opened(context, server, query, size="wide", scheme="light"):
    """A new page, with a session of its own, whose films are on screen."""
    page = context.new_page()
    try:
        page.set_viewport_size(dict(zip(("width", "height"), SIZES[size], strict=True)))
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # playing is asked for, and goes on
        listen(page)
        page.received = []  # sizes of messages from the server, in bytes
        page.on(
            "websocket",
            lambda socket: socket.on("framereceived", lambda frame: page.received.append(len(frame))),
        )
        page.goto(f"{server.url}/?{query}")
        page.locator(f"{PICTURE}[aria-label]").first.wait_for(timeout=60_000)
        drawn(page)
        yield page
    finally:
        page.close()


@pytest.fixture(scope="module")
def one(context, server):
    with opened(context, server, "runs=one") as page:
        yield page


@pytest.fixture
def page(one):
    """The page of one run as at first: the newest step, the first picture, rollout to the last layer."""
    if choices(one).first.get_attribute("aria-pressed") == "false":
        choices(one).first.click()
        expect(choices(one).first).to_have_attribute("aria-pressed", "true")
    pick(one, "layer 3, rollout")
    slider(one).press("End")
    drawn(one)
    return one


def slider(page):
    return page.get_by_role("slider", name="Step of training")


def label(page) -> str:
    drawn(page)
    return page.locator(".film .scrubber .value").inner_text()


def watch_timers(page) -> None:
    """`delays` will hold how long each timer was to wait; waits of a frame of the film are cut short."""
    page.evaluate(
        """() => {
          window.delays = []
          const wait = window.setTimeout
          window.setTimeout = (act, ms, ...args) => {
            delays.push(ms)
            return wait(act, ms >= 250 && ms <= 700 ? 150 : ms, ...args)
          }
        }"""
    )


def at(page, place: int) -> None:
    """Go to a place in the film, from 0, by the keyboard."""
    slider(page).press("Home")
    for _ in range(place):
        slider(page).press("ArrowRight")
    drawn(page)


def cell(page, name: str, reel: int = 0):
    return page.locator(".reel").nth(reel).locator(f'.board .cell[aria-label="{name}"]')


def pick(page, name: str, reel: int = 0) -> None:
    cell(page, name, reel).click()
    page.mouse.move(2, 2)  # what is pointed at is shown while it is
    drawn(page)


def choices(page):
    return page.locator(".film .choices button")


def lit(film: Film, frame: int, k: int, layer: int, head: int | None, grid=(4, 4), **how) -> np.ndarray:
    """What vit.overlay draws of it; layer and head from 0."""
    weights = film.rolled(frame)[k, layer] if head is None else film.attention(frame)[k, layer, head]
    return draw(film.pictures[k], weights[1:].reshape(grid), **how).astype(int)


def assert_shows(page, film: Film, *what, reel: int = 0, **how) -> None:
    seen = pixels(page, f".reel:nth-child({reel + 1}) {PICTURE}").astype(int)
    assert np.abs(seen - lit(film, *what, **how)).max() <= 2


# --- what is painted


def test_the_picture_is_lit_by_the_chosen_map_at_the_chosen_step(page):
    assert page.locator(PICTURE).bounding_box()["width"] >= 256
    assert_shows(page, ONE, 3, 0, 2, None)  # at first the newest step, and rollout to the last layer
    for place, name, layer, head in (
        (3, "layer 1, head 2", 0, 1), (1, "layer 3, head 1", 2, 0), (0, "layer 2, rollout", 1, None),
    ):  # fmt: skip
        at(page, place)
        pick(page, name)
        assert_shows(page, ONE, place, 0, layer, head)
        assert cell(page, name).get_attribute("aria-selected") == "true"
        assert page.locator('.board [aria-selected="true"]').count() == 1
    said = page.locator(PICTURE).get_attribute("aria-label")
    assert said == "picture 1, class 0, lit by rollout of layers 1 to 2, weakest 90\u00a0% left out at step 0"
    weights = ONE.rolled(0)[0, 1]
    held = f"Brightest patch {percent(weights[1:].max())}, CLS itself {percent(weights[0])}."
    assert held in page.locator(".looks").inner_text()


def test_every_thumbnail_is_its_own_layer_and_head_at_that_step(page):
    at(page, 2)
    seen = pixels(page, ".board canvas").astype(int)
    for layer in range(3):
        for head in (0, 1, None):
            pick(page, f"layer {layer + 1}, {'rollout' if head is None else f'head {head + 1}'}")
            style = page.locator(".thumb.chosen").get_attribute("style")
            left, top, width, height = map(int, re.findall(r"(-?\d+)px", style))
            thumb = seen[top + 2 : top + height - 2, left + 2 : left + width - 2]
            side = len(thumb)
            expected = lit(ONE, 2, 0, layer, head, size_px=thumb.shape[:2])
            clear = (2 * np.arange(side) + 1) * 16 % (2 * side) > 0  # lines not right between two pixels
            assert np.abs(thumb - expected)[clear][:, clear].max() <= 2, (layer, head)


def test_pointing_shows_a_map_and_leaving_brings_the_chosen_back(page):
    cell(page, "layer 1, head 1").hover()
    assert_shows(page, ONE, 3, 0, 0, 0)
    page.mouse.move(2, 2)
    assert_shows(page, ONE, 3, 0, 2, None)


def test_the_prediction_is_that_of_the_step(page):
    for place in (0, 3):  # class 0 leads, then is none of the five likeliest
        at(page, place)
        shares = ONE.probabilities[place, 0]
        order = np.argsort(-shares)[:5].tolist()
        shown = order if 0 in order else [*order, 0]  # the true class has a bar of its own
        texts = page.locator(".bars li:not(.absent)").all_inner_texts()
        assert [text.split("\n") for text in texts] == [[f"class {c}", percent(shares[c])] for c in shown]
        told = page.locator(".answer").inner_text()
        assert f"At step {STEPS[place]:,} it says" in told
        assert f"{'✓' if order[0] == 0 else '✗'} true class: class 0" in told
        width = page.locator(".bars .bar").first.bounding_box()["width"]
        track = page.locator(".bars .track").first.bounding_box()["width"]
        assert abs(width / track - shares[order[0]]) < 0.01


# --- time


def test_arrow_keys_step_and_space_plays_to_the_end(page):
    assert label(page) == "step 1,240"
    slider(page).press("ArrowLeft")
    assert label(page) == "step 700"
    assert slider(page).get_attribute("aria-valuetext").startswith("step 700, says class ")
    slider(page).press("End")
    assert label(page) == "step 1,240"
    watch_timers(page)
    page.evaluate(
        """() => {
          const roots = [...document.querySelectorAll("*")].map((each) => each.shadowRoot).filter(Boolean)
          const said = roots.map((root) => root.querySelector(".film .value")).find(Boolean)
          window.seen = []
          new MutationObserver(() => seen.push(said.textContent)).observe(said, {childList: true})
        }"""
    )
    slider(page).press(" ")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.get_by_role("button", name="Play from")).to_be_visible(timeout=5000)
    told = list(dict.fromkeys(page.evaluate("seen")))
    assert told == ["step 0", "step 40", "step 700", "step 1,240"]
    assert page.evaluate("delays").count(700) == 3
    slider(page).press(" ")
    slider(page).press(" ")
    assert label(page) == "step 0"
    page.wait_for_timeout(400)
    assert label(page) == "step 0"  # paused


def test_new_frames_are_followed_from_the_newest_and_only_from_there(context, server, runs):
    whole = made_film((0, 20, 50, 90, 300))
    path = Run(runs / "live").film_file
    save(cut(whole, 0), path)
    with opened(context, server, "runs=live") as page:
        assert label(page) == "step 0"
        assert slider(page).is_disabled()
        save(cut(whole, 20), path)
        eventually(page, label, "step 20")
        pick(page, "layer 2, head 1")
        save(cut(whole, 50), path)
        eventually(page, label, "step 50")
        assert_shows(page, whole, 2, 0, 1, 0)
        slider(page).press("ArrowLeft")
        save(cut(whole, 90), path)
        eventually(page, lambda page: slider(page).get_attribute("max"), "3")
        assert label(page) == "step 20"
        assert_shows(page, whole, 1, 0, 1, 0)
        assert focused(page)["name"] == "Step of training"
        slider(page).press(" ")  # what plays goes on, into the frames that come
        save(whole, path)
        eventually(page, label, "step 300")
        expect(page.get_by_role("button", name="Play from")).to_be_visible()
        save(made_film(range(25)), path)
        eventually(page, label, "step 24")
        watch_timers(page)
        slider(page).press(" ")
        eventually(page, lambda page: page.evaluate("delays").count(250) > 2, True)  # 6 s in all
        assert not page.complaints


def test_nothing_is_sent_again_while_no_frame_comes(context, server):
    with opened(context, server, "runs=one") as page:
        page.wait_for_timeout(300)
        whole_bytes = max(page.received)
        page.received.clear()
        eventually(page, lambda page: len(page.received) > 5, True)  # the fragment does run
        assert max(page.received) < whole_bytes / 3


# --- which picture


def test_a_click_chooses_a_picture_and_so_does_the_keyboard(page):
    assert choices(page).count() == 4
    at(page, 1)
    pick(page, "layer 1, head 2")
    choices(page).nth(2).click()
    expect(choices(page).nth(2)).to_have_attribute("aria-pressed", "true")
    assert page.locator('.choices [aria-pressed="true"]').count() == 1
    assert label(page) == "step 40"  # time, layer and head stay
    assert_shows(page, ONE, 1, 2, 0, 1)
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    assert focused(page)["shows"]
    page.keyboard.press("Enter")
    expect(choices(page).nth(3)).to_have_attribute("aria-pressed", "true")
    assert_shows(page, ONE, 1, 3, 0, 1)
    assert page.locator(PICTURE).get_attribute("aria-label").startswith("picture 4, class 3, ")
    focus = "(document.activeElement.shadowRoot?.activeElement ?? document.activeElement).title"
    assert page.evaluate(focus) == "picture 4: class 3"
    assert not page.complaints


# --- two runs


def test_two_runs_show_one_picture_each_at_its_own_nearest_frame(context, server, runs):
    with opened(context, server, "runs=one,other") as page:
        assert page.locator(".reel .run").all_inner_texts() == ["<b>one</b>", "<b>other</b>"]
        assert label(page) == "steps 1,240 and 4,000"
        assert_shows(page, OTHER, 2, 0, 1, None, reel=1, grid=(2, 2))
        at(page, 2)  # two thirds of one's four frames, of other's three the second
        assert label(page) == "steps 700 and 90"
        pick(page, "layer 2, head 1")
        assert_shows(page, ONE, 2, 0, 1, 0)
        assert_shows(page, OTHER, 1, 0, 1, 0, reel=1, grid=(2, 2))
        pick(page, "layer 1, head 5", reel=1)  # which one does not have
        assert_shows(page, ONE, 2, 0, 1, 0)
        assert_shows(page, OTHER, 1, 0, 0, 4, reel=1, grid=(2, 2))
        choices(page).nth(3).click()
        expect(page.locator(".film .note")).to_have_text(
            "<b>other</b> did not film this picture, so only <b>one</b> is shown."
        )
        assert page.locator(".reel").count() == 1
        choices(page).nth(1).click()
        expect(page.locator(".reel")).to_have_count(2)
        expect(page.locator(".film .note")).to_be_hidden()
        assert not page.complaints


# --- people


@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), ("narrow", "dark")])
def test_it_is_whole_and_open_to_all(context, server, size, scheme):
    from axe_playwright_python.sync_playwright import Axe

    with opened(context, server, "runs=one,other", size=size, scheme=scheme) as page:
        for element in ("document.documentElement", "document.querySelector('[data-testid=stMain]')"):
            assert page.evaluate(f"{element}.scrollWidth <= {element}.clientWidth")
        for canvas in page.locator("canvas:visible").all():
            assert canvas.get_attribute("role") == "img"
            assert canvas.get_attribute("aria-label")
        targets = page.locator(".film").locator("button, input, .cell")
        for box in targets.evaluate_all("all => all.map(e => e.getBoundingClientRect().toJSON())"):
            assert min(box["width"], box["height"]) >= 24
        for picture in page.locator(PICTURE).all():
            assert picture.bounding_box()["width"] >= 256
        assert "not why it decides" in page.locator(".honest").inner_text()
        found = Axe().run(page).response["violations"]
        grave = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found
                 if each["impact"] in ("serious", "critical")]  # fmt: skip
        assert not grave
        assert not page.complaints


# --- loading, without a browser


def test_a_film_is_read_once_until_its_file_changes(tmp_path):
    run = Run(tmp_path / "run")
    assert load_film(run) == NOTHING_YET
    save(cut(made_film(), -1), run.film_file)
    assert load_film(run) == NOTHING_YET
    save(cut(made_film(), 10), run.film_file)
    film = load_film(run)
    assert film.steps.tolist() == [0, 10]
    assert load_film(run) is film
    save(made_film(), run.film_file)
    assert load_film(run).steps.tolist() == [0, 10, 30]


def test_a_damaged_film_is_told_and_read_again_when_it_is_whole(tmp_path):
    run = Run(tmp_path / "run")
    save(made_film(), run.film_file)
    whole, times = run.film_file.read_bytes(), run.film_file.stat()
    run.film_file.write_bytes(b"\0" * len(whole))
    assert re.fullmatch(r"The recording of attention in .* is damaged .*\.", load_film(run))
    run.film_file.write_bytes(whole)
    os.utime(run.film_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len(load_film(run)) == 3
