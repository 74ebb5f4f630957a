"""What the viewer asks of the model: causes, and drawers that ask when opened. Real server, real Chromium.

Run: pytest tests/test_viewer_asks.py (half a minute). Numbers are compared with vit.cause, pixels with
vit.overlay, both computed here.
"""

import re

import numpy as np
import pytest
from playwright.sync_api import expect
from viewer_page import (
    asked,
    bar_texts,
    bars,
    bounds,
    by_cause,
    by_python,
    choose,
    drawn,
    drawn_between,
    eventually,
    leave,
    linked,
    looks,
    open_drawer,
    opened,
    patch,
    pixels,
    press,
    share_outside,
    thumb,
    visit,
)

from vit.cause import FILLS, cover_most, head_effects, leave_one_out, rank_correlation
from vit.overlay import Style, draw
from vit.words import percent

SHIP = "picture=sample:ship_01"


@pytest.fixture(scope="module")
def page(browser, page_server):
    """One page for all tests here; each begins with a visit, which is a session of its own."""
    with browser.new_context() as context, opened(context, page_server) as page:
        yield page


@pytest.fixture
def causes(page, page_server):
    """The page with a ship and the drawer of causes open."""
    visit(page, page_server, SHIP)
    open_drawer(page, "cause")
    return page


def result(page) -> str:
    return page.locator(".cause .result").inner_text()


def sentence(what: str, change: np.ndarray) -> str:
    found = by_python("ship_01")
    best, now = found.layers[-1].argmax(), change[-1].argmax()
    before, after = percent(found.layers[-1, best]), percent(change[-1, best])
    instead = "" if now == best else f", and it says {found.classes[now]}, {percent(change[-1, now])}"
    return f"With {what}: {found.classes[best]} goes from {before} to {after}{instead}."


def test_heads_off_answer_as_vit_cause_and_come_back(causes):
    page, found = causes, by_python("ship_01")
    page.get_by_label("Switch heads off by clicking thumbnails").check()
    thumb(page, 3, 2).click()
    thumb(page, 5, 1).click()
    off = {(2, 1), (4, 0)}
    change = by_cause("ship_01", heads_off=frozenset(off))
    eventually(page, result, sentence("2 of 48 heads off", change))
    assert bars(page) == bar_texts(found, 5, change)
    assert page.locator(".mark.off").count() == 2
    assert page.locator('.board .cell[aria-label$=", switched off"]').count() == 2
    for layer in (5, 3):
        page.get_by_role("slider", name="Layer").fill(str(layer))
        drawn(page)
        assert bars(page) == bar_texts(found, layer - 1, change)
    page.get_by_role("slider", name="Layer").fill("6")
    thumb(page, 6, None).click()  # the fused column switches a layer
    change = by_cause("ship_01", heads_off=frozenset(off | {(5, head) for head in range(8)}))
    eventually(page, result, sentence("10 of 48 heads off", change))
    assert bars(page) == bar_texts(found, 5, change)
    press(page, "As it was")
    drawn(page)
    assert bars(page) == bar_texts(found, 5)
    assert result(page) == ""
    assert page.locator(".mark.off").count() == 0


def test_of_many_quick_requests_the_newest_wins(causes):
    page = causes
    page.get_by_label("Switch heads off by clicking thumbnails").check()
    chosen = [(1, 1), (2, 4), (4, 8), (5, 2), (6, 6), (3, 3), (1, 1)]  # the last puts the first on again
    page.locator(".board .cells").evaluate(
        """(grid, cells) => cells.forEach(([layer, head]) => {
          const cell = grid.querySelector(`[aria-label^="layer ${layer}, head ${head}"]`)
          const {left, top} = cell.getBoundingClientRect()
          grid.dispatchEvent(new MouseEvent("click", {clientX: left + 9, clientY: top + 9}))
        })""",
        chosen,
    )
    thumb(page, 1, 1).hover()
    leave(page)
    change = by_cause("ship_01", heads_off=frozenset((layer - 1, head - 1) for layer, head in chosen[1:-1]))
    eventually(page, result, sentence("5 of 48 heads off", change))
    for _ in range(10):  # nothing older comes later
        assert bars(page) == bar_texts(by_python("ship_01"), 5, change)
        page.wait_for_timeout(50)
    assert asked(page, "change") < len(chosen)


def test_covered_patches_answer_as_vit_cause_with_each_fill(causes):
    page, found = causes, by_python("ship_01")
    page.get_by_label("Cover patches with a brush").check()
    stroke = [(3, column) for column in range(2, 7)]
    boxes = [patch(page, *each).bounding_box() for each in stroke]
    for at, box in enumerate(boxes):
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        if at == 0:
            page.mouse.down()
    page.mouse.up()
    leave(page)
    assert page.locator(".outline.covered").count() == 5
    covered = frozenset((row - 1) * 8 + column - 1 for row, column in stroke)
    for name, fill in zip(("Removed", "Mean colour", "Blurred"), FILLS, strict=True):
        choose(page, name)
        change = by_cause("ship_01", covered=covered, fill=fill)
        eventually(page, bars, bar_texts(found, 5, change))
        eventually(page, result, sentence("5 of 64 patches covered", change))
    patch(page, 3, 2).click()  # what a stroke begins on is uncovered by it
    change = by_cause("ship_01", covered=covered - {17}, fill="blur")
    eventually(page, bars, bar_texts(found, 5, change))
    press(page, "As it was")
    drawn(page)
    assert bars(page) == bar_texts(found, 5)
    assert page.locator(".outline.covered").count() == 0


def test_the_most_attended_patches_are_covered_beside_as_many_at_random(causes):
    page, found = causes, by_python("ship_01")
    press(page, "Cover what it attends to most, and as many at random")
    weights = found.rollout[-1, 0, 1:]
    eighth, ninth = np.sort(weights)[[-8, -9]]
    assert eighth - ninth > found.rollout[-1, 0].max() / 255  # or the browser might take another patch
    wanted = cover_most(found.model, found.x, weights, 8)
    mean, low, high = (percent(float(of(wanted.random))) for of in (np.mean, np.min, np.max))
    eventually(
        page,
        result,
        f"ship: {percent(wanted.untouched)} untouched; {percent(wanted.most)} with the 8 patches covered "
        f"that it attends to most; {mean} with 8 at random (8 draws, {low} to {high}).",
    )
    assert page.locator(".outline.covered").count() == 8
    assert bars(page) == bar_texts(found, 5, by_cause("ship_01", covered=frozenset(wanted.patches)))


def test_leaving_out_each_patch_paints_what_vit_cause_measures(causes):
    page, found = causes, by_python("ship_01")
    target = int(found.layers[-1].argmax())
    press(page, "Leave out each patch in turn")
    expect(page.locator(".looks")).to_contain_text("Rank correlation", timeout=30_000)
    effects = leave_one_out(found.model, found.x, target).numpy()
    leave(page)
    lit = draw(found.picture, np.maximum(effects, 0).reshape(8, 8))
    assert np.abs(pixels(page).astype(int) - lit).max() <= 2
    row = found.rollout[-1, 0]
    known = np.rint(row * 255 / row.max())[1:]  # as coarse as the browser knows them
    rho = rank_correlation(effects, known)
    said = page.locator(".looks").inner_text()
    assert said.startswith("What ship loses without each patch, measured on the untouched model.")
    assert said.endswith(f"Rank correlation with attention: {rho:.2f}.")
    assert f"At most {percent(float(effects.max()))}; {(effects < 0).sum()} of 64 patches are dark" in said
    page.get_by_label("Show it").uncheck()
    leave(page)
    low, high = (part[0] for part in bounds(found.rollout[-1]))
    assert share_outside(pixels(page), drawn_between(found.picture, low, high, Style(), (32, 32))) == 0


def test_the_effect_of_every_head_stands_on_its_thumbnail(causes):
    page, found = causes, by_python("ship_01")
    press(page, "Effect of each head")
    effects = head_effects(found.model, found.x, int(found.layers[-1].argmax())).numpy()
    layer, head = np.unravel_index(effects.argmax(), effects.shape)
    lost = percent(float(effects.max()))
    eventually(
        page,
        result,
        f"Most is lost without layer {layer + 1}, head {head + 1}: {lost} of the probability. "
        "Red loses, blue gains.",
    )
    drawn(page)
    shown = page.locator(".mark.effect").all_inner_texts()
    assert shown == [re.sub("^-0.0$", "0.0", f"{100 * effect:.1f}") for effect in effects.ravel()]


@pytest.mark.parametrize("first", ["ask", "view"])
def test_a_choice_and_a_request_in_the_same_moment_both_arrive(causes, first):
    page = causes
    off = by_cause("ship_01", heads_off=frozenset({(5, 0)}))
    assert page.get_by_role("button", name="This head off").is_disabled()  # while all are shown
    thumb(page, 6, 1).click()
    leave(page)
    page.wait_for_timeout(600)  # what was chosen has been told
    page.complaints.clear()
    page.locator(".viewer").evaluate(
        """(viewer, first) => {
          const buttons = [...viewer.querySelectorAll("button")]
          const button = buttons.find((each) => each.textContent === "This head off")
          const ask = () => setTimeout(() => button.click(), 250) // the viewer tells as long after a choice
          const cells = viewer.querySelector(".stage .cells")
          const {left, top} = cells.querySelector('[aria-label="row 3, column 5"]').getBoundingClientRect()
          const click = new MouseEvent("click", {clientX: left + 9, clientY: top + 9})
          const pin = () => cells.dispatchEvent(click)
          for (const act of first === "ask" ? [ask, pin] : [pin, ask]) act()
          for (const end = performance.now() + 300; performance.now() < end;) {} // both are due when it ends
        }""",
        first,
    )
    eventually(page, result, sentence("layer 6, head 1 off", off))
    linked(page, picture="sample:ship_01", head="1", token="3,5")
    assert not page.complaints


# --- drawers that ask when they are opened


def test_the_arithmetic_of_a_head_is_asked_for_when_it_is_opened(page, page_server):
    found = by_python("ship_01")
    visit(page, page_server, f"{SHIP}&method=raw&layer=3&head=2")
    page.sent.clear()
    patch(page, 6, 5).hover()
    leave(page)
    assert asked(page, "arithmetic") == 0
    open_drawer(page, "arithmetic")
    cell = page.locator(".arithmetic .cell")
    expect(cell.first).to_be_visible(timeout=20_000)
    assert asked(page, "arithmetic") == 1
    row = found.attention[2, 1, 0]
    for index in (0, 20, 63, int(row[1:].argmax())):
        name = f"row {index // 8 + 1}, column {index % 8 + 1}: {percent(row[1 + index])}"
        assert cell.nth(index).get_attribute("aria-label") == name
    at_rest = pixels(page)
    cell.nth(20).hover()
    assert looks(page).startswith("Where row 3, column 5 looks: attention of layer 3, head 2")
    low, high = (part[21] for part in bounds(found.attention[2, 1]))
    assert share_outside(pixels(page), drawn_between(found.picture, low, high, Style(), (32, 32))) == 0
    leave(page)
    assert np.array_equal(pixels(page), at_rest)
    cell.nth(20).click()
    leave(page)
    assert looks(page).startswith("Where row 3, column 5 looks")
    name = f"row 6, column 5: {percent(found.attention[2, 1, 21, 45])}"
    eventually(page, lambda _: cell.nth(44).get_attribute("aria-label"), name)
    assert asked(page, "arithmetic") == 1  # another token of the same head needs no more
    thumb(page, 5, 4).click()
    leave(page)
    name = f"row 6, column 5: {percent(found.attention[4, 3, 21, 45])}"
    eventually(page, lambda _: cell.nth(44).get_attribute("aria-label"), name)
    assert asked(page, "arithmetic") == 2


def test_the_anatomy_is_asked_for_once_when_it_is_opened(page, page_server):
    visit(page, page_server, f"{SHIP}&method=raw")
    page.sent.clear()
    thumb(page, 2, 3).click()
    leave(page)
    assert asked(page, "anatomy") == 0
    for _ in range(2):
        open_drawer(page, "anatomy")
        parameters = sum(each.numel() for each in by_python("ship_01").model.parameters())
        expect(page.locator(".anatomy .summary")).to_contain_text(
            f"{parameters:,} parameters", timeout=20_000
        )
        page.locator("details.anatomy summary").click()
    assert asked(page, "anatomy") == 1
    open_drawer(page, "anatomy")
    page.locator(".anatomy button.heads").hover(position={"x": 5, "y": 5})
    eventually(
        page,
        lambda _: page.locator(".anatomy .live").inner_text()[:35],
        "Layer 1, head 1 and layer 1, head 1",
    )
    page.locator(".anatomy button.heads").click(position={"x": 5, "y": 5})
    linked(page, picture="sample:ship_01", method="raw", layer="1", head="1")
