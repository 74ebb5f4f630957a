"""The ways to the viewer: by keyboard and touch, by a link, in both themes, several people at once.

Run: pytest tests/test_viewer_ways.py (half a minute). Real server, real Chromium, as in test_viewer.py.
"""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect
from viewer_page import (
    bar_texts,
    bars,
    bounds,
    by_cause,
    by_python,
    choose,
    drawn,
    drawn_between,
    eventually,
    focused,
    leave,
    link_of,
    linked,
    looks,
    open_drawer,
    opened,
    patch,
    picture_name,
    pixels,
    press,
    said,
    settled,
    share_outside,
    thumb,
    visit,
)

from vit.overlay import Style
from vit.words import percent


@pytest.fixture(scope="module")
def context(browser):
    with browser.new_context() as context:
        yield context


@pytest.fixture(scope="module")
def page(context, page_server):
    """One page for most tests here; each begins with a visit, which is a session of its own."""
    with opened(context, page_server) as page:
        yield page


# --- keyboard, touch


def tab_to(page, grid: str, most: int = 40) -> list[dict]:
    """Press Tab until the focus is in this grid; returns the stops on the way."""
    stops = []
    for _ in range(most):
        page.keyboard.press("Tab")
        stops.append(focused(page))
        if stops[-1]["grid"] == grid:
            return stops
    raise AssertionError(f"Tab never came to the {grid}: {[stop['name'] for stop in stops]}")


def test_the_keyboard_alone_goes_everywhere_and_is_told_what_is_there(page, page_server):
    found = by_python("dog_12")
    visit(page, page_server, "method=raw&layer=4&head=2")
    tab_to(page, "picture")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert focused(page)["name"] == "row 3, column 5"
    assert focused(page)["shows"]
    weights = found.attention[3, 1, 1 + 2 * 8 + 4, 1:]
    best = int(weights.argmax())
    sentence = (
        f"row 3, column 5 looks most at row {best // 8 + 1}, column {best % 8 + 1}, {percent(weights[best])}"
    )
    assert said(page) == sentence
    assert looks(page).startswith("Where row 3, column 5 looks")
    page.keyboard.press("Enter")
    assert said(page) == f"Pinned. {sentence}"
    linked(page, method="raw", layer="4", head="2", token="3,5")

    stops = tab_to(page, "thumbnails")
    assert all(stop["shows"] for stop in stops), stops
    names = [stop["name"] for stop in stops]
    for name in ("Play through the layers", "Layer", "All heads", "Save picture"):
        assert name in names
    assert any(name.startswith("CLS") for name in names)
    assert [stop["kind"] for stop in stops].count("radio") == 2  # one stop for each row of choices
    assert looks(page).startswith("Where row 3, column 5 looks")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    name = focused(page)["name"]
    page.keyboard.press("Enter")
    assert said(page) == looks(page).rstrip(".")
    assert looks(page) == f"Where row 3, column 5 looks: attention of {name}."

    page.get_by_role("slider", name="Layer").focus()
    page.keyboard.press("End")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowLeft")
    assert looks(page).startswith(
        "Where row 3, column 5 looks: rollout of layers 1 to 6, of layer 6 head 2 alone"
    )
    page.keyboard.press("Escape")
    assert said(page).startswith("Freed. CLS looks most at row ")
    linked(page, head="2")
    page.locator("details.drawing summary").focus()
    assert focused(page)["shows"]
    page.keyboard.press("Enter")
    expect(page.get_by_role("radio", name="Heat", exact=True)).to_be_visible()


def tap(page, cell) -> None:
    cell.scroll_into_view_if_needed()
    box = cell.bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    drawn(page)


def test_a_tap_pins_a_patch_and_opens_a_thumbnail(browser, page_server):
    touch = browser.new_context(has_touch=True, is_mobile=True)
    with touch as context, opened(context, page_server, size="narrow") as page:
        tap(page, patch(page, 3, 5))
        assert looks(page).startswith("Where row 3, column 5 looks")
        linked(page, token="3,5")
        tap(page, thumb(page, 2, 7))
        assert looks(page).startswith(
            "Where row 3, column 5 looks: rollout of layers 1 to 2, of layer 2 head 7 alone"
        )
        linked(page, token="3,5", layer="2", head="7")
        tap(page, patch(page, 6, 2))
        linked(page, token="6,2", layer="2", head="7")
        tap(page, patch(page, 6, 2))
        linked(page, layer="2", head="7")
        assert looks(page).startswith("Where CLS looks")
        assert not page.complaints


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_drawers_open_both_themes_can_be_read(context, page_server, scheme):
    from axe_playwright_python.sync_playwright import Axe

    with opened(context, page_server, scheme=scheme) as page:
        for name in ("cause", "drawing", "arithmetic", "anatomy"):
            open_drawer(page, name)
        page.get_by_label("Only the patches that hold").check()
        press(page, "Cover what it attends to most, and as many at random")
        expect(page.locator(".cause .result")).to_contain_text("at random", timeout=20_000)
        expect(page.locator(".arithmetic .steps")).to_be_visible(timeout=20_000)
        expect(page.locator(".anatomy .summary")).to_contain_text("parameters", timeout=20_000)
        patch(page, 3, 5).hover()
        drawn(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        targets = page.locator(".viewer").locator("button:visible, input:visible, summary:visible")
        small = targets.evaluate_all(  # a label around a box is part of the target
            """all => all.map((e) => [e.textContent || e.ariaLabel || e.type, e.closest("label") ?? e])
              .map(([name, e]) => [name, e.getBoundingClientRect()])
              .filter(([, box]) => Math.min(box.width, box.height) < 24).map(([name]) => name)"""
        )
        assert small == []
        found = Axe().run(page).response["violations"]
        grave = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found
                 if each["impact"] in ("serious", "critical")]  # fmt: skip
        assert not grave
        assert not page.complaints


# --- links, people


def test_a_link_restores_everything_and_a_reload_keeps_it(browser, page, page_server):
    view = {"picture": "sample:ship_01", "method": "raw", "looked_at": "yes", "layer": "3", "head": "2"}
    view |= {"token": "3,5", "draw": "heat", "strength": "0.4", "smooth": "yes", "mass": "0.7"}
    view |= {"scale": "shared", "fusion": "max", "discard": "0.5"}
    visit(page, page_server, "picture=sample:ship_01")
    open_drawer(page, "drawing")
    thumb(page, 3, 2).click()
    patch(page, 3, 5).click()
    for choice in ("Raw attention", "Looked at by", "Heat", "Smooth", "One scale for all", "max"):
        choose(page, choice)
    page.get_by_label("Only the patches that hold").check()
    page.get_by_role("slider", name="Share of the weight").fill("0.7")
    page.get_by_role("slider", name="Strength").fill("0.4")
    page.get_by_role("slider", name="Weakest weights left out").fill("0.5")
    linked(page, **view)
    leave(page)
    shown, name = pixels(page), picture_name(page)
    assert (
        name == "ship 01, coloured by attention. Who looks at row 3, column 5: attention of layer 3, head 2"
    )
    page.reload()
    settled(page)
    assert picture_name(page) == name
    assert link_of(page) == view
    query = page.url.partition("?")[2]
    with browser.new_context() as other, opened(other, page_server, query) as fresh:
        for each in (fresh, page):
            visit(each, page_server, query)
            assert picture_name(each) == name
            assert np.array_equal(pixels(each), shown)
            assert link_of(each) == view
            open_drawer(each, "drawing")
            for choice in ("Raw attention", "Looked at by", "Heat", "Smooth", "One scale for all", "max"):
                assert each.get_by_role("radio", name=choice, exact=True).is_checked()
            assert each.get_by_label("Only the patches that hold").is_checked()
            for slider, value in (("Share of the weight", "0.7"), ("Strength", "0.4"), ("Weakest", "0.5")):
                assert each.get_by_role("slider", name=slider).input_value() == value
            assert thumb(each, 3, 2).get_attribute("tabindex") is not None
            choose(each, "Rollout")
            press(each, "All heads")
            assert looks(each).startswith(
                "Who looks at row 3, column 5: rollout of layers 1 to 3, max of all heads"
            )


def test_two_people_see_their_own_pictures_and_numbers(browser, page, page_server):
    with (
        browser.new_context() as other,
        opened(other, page_server, "picture=sample:cat_00&method=raw") as second,
    ):
        visit(page, page_server, "picture=sample:ship_01&method=raw")
        visitors = [(page, "ship_01"), (second, "cat_00")]
        for each, _ in visitors:
            open_drawer(each, "cause")
        for layer, head in ((1, 2), (5, 4), (3, 8)):
            for each, _ in visitors:
                thumb(each, layer, head).click()
            for each, name in visitors:
                patch(each, layer, head).hover()
                found = by_python(name)
                token = (layer - 1) * 8 + head
                seen = pixels(each)
                low, high = (part[token] for part in bounds(found.attention[layer - 1, head - 1]))
                between = drawn_between(found.picture, low, high, Style(), (32, 32), token=token)
                assert share_outside(seen, between) == 0
                assert picture_name(each).startswith(name.replace("_", " "))
                assert bars(each) == bar_texts(found, layer - 1)
            for each, _ in visitors:
                each.locator(".cause").get_by_role("button", name="This head off").click()
            for each, name in visitors:
                changed = by_cause(name, heads_off=frozenset({(layer - 1, head - 1)}))
                eventually(each, bars, bar_texts(by_python(name), layer - 1, changed))
                press(each, "As it was")
        for each, name in visitors:
            assert link_of(each)["picture"] == f"sample:{name}"
            assert not each.complaints


# --- the tour, the hint, a picture to keep


def test_the_tour_is_offered_once_and_can_be_left_at_any_step(page, page_server):
    offer, card = page.locator(".offer"), page.locator(".tour")
    for leaves in ("Escape", "Skip", "No, thanks", "Done"):
        page.evaluate("localStorage.clear()")
        visit(page, page_server)
        expect(offer).to_be_visible()
        if leaves == "No, thanks":
            press(page, leaves)
        else:
            press(page, "Take the tour: five steps")
            expect(card).to_contain_text("1 of 5")
            expect(offer).to_be_hidden()
        if leaves == "Escape":
            assert looks(page).startswith("Where row ")  # the step points at a patch itself
            page.keyboard.press("Escape")
        elif leaves == "Skip":
            press(page, "Next")
            expect(card).to_contain_text("2 of 5")
            press(page, "Skip")
        elif leaves == "Done":
            for step in (2, 3, 4, 5):
                page.keyboard.press("Enter")  # the button to go on has the focus
                expect(card).to_contain_text(f"{step} of 5")
                assert said(page).startswith(f"{step} of 5")
            expect(page.locator(".cause .result")).to_contain_text("at random", timeout=20_000)
            press(page, "Done")
        expect(card).to_be_hidden()
        if leaves in ("No, thanks", "Done"):
            visit(page, page_server)
            expect(offer).to_be_hidden()
    assert not page.complaints


def test_the_hint_goes_when_it_was_followed(page, page_server):
    page.evaluate("localStorage.clear()")
    visit(page, page_server)
    hint = page.get_by_text("Point at any patch")
    expect(hint).to_be_visible()
    patch(page, 3, 5).hover()
    expect(hint).to_be_hidden()
    visit(page, page_server)
    expect(hint).to_be_hidden()


def test_the_picture_is_saved_as_it_is_seen(page, page_server):
    visit(page, page_server, "picture=sample:ship_01&method=raw&layer=3&head=2&token=3,5&draw=heat")
    with page.expect_download() as waiting:
        press(page, "Save picture")
    download = waiting.value
    assert download.suggested_filename == "sample-ship-01.png"
    image = Image.open(io.BytesIO(Path(download.path()).read_bytes()))
    assert image.format == "PNG"
    assert image.size == (1024, 1024)
    leave(page)
    saved = np.asarray(image.convert("RGB"))
    seen = pixels(page).repeat(32, axis=0).repeat(32, axis=1)  # 128 of the saved pixels are a patch
    framed = (saved != seen).any(axis=-1)
    down, across = np.nonzero(framed)
    assert framed[256, 512 + 64]  # the upper edge of row 3, column 5
    assert saved[256, 512 + 64].tolist() == [0xF2, 0xA6, 0x3B]
    assert 256 - 8 <= down.min() <= down.max() < 256 + 128 + 8
    assert 512 - 8 <= across.min() <= across.max() < 512 + 128 + 8
    assert not framed[256 + 8 : 256 + 120, 512 + 8 : 512 + 120].any()
