"""Looking around in the viewer: pointing, pinning, thumbnails, layers. Real server, real Chromium.

Run: pytest tests/test_viewer.py (half a minute). Beside it: test_viewer_painting.py compares what is painted
with Python's numbers, test_viewer_asks.py what asks the model again, test_viewer_ways.py comes by keyboard,
touch and link.
"""

from urllib.parse import urlencode

import numpy as np
import pytest
from playwright.sync_api import expect
from viewer_page import (
    bar_texts,
    bars,
    by_python,
    choose,
    drawn,
    focused,
    leave,
    link_of,
    linked,
    looks,
    opened,
    patch,
    picture_name,
    pixels,
    thumb,
    visit,
)

from vit.words import percent


@pytest.fixture(scope="module")
def page(browser, page_server):
    """One page for all tests here; each begins with a visit, which is a session of its own."""
    with browser.new_context() as context, opened(context, page_server) as page:
        yield page


# --- pointing and pinning


def test_pointing_shows_a_patch_at_once_and_never_reaches_python(page, page_server):
    visit(page, page_server)
    at_rest, sentence, before = pixels(page), looks(page), len(page.sent)
    seen = [at_rest]
    for row, column in ((3, 5), (6, 2), (1, 8)):
        patch(page, row, column).hover()
        assert looks(page).startswith(f"Where row {row}, column {column} looks")
        assert f"Where row {row}, column {column} looks" in picture_name(page)
        seen.append(pixels(page))
        assert not any(np.array_equal(seen[-1], other) for other in seen[:-1])
    thumb(page, 2, 3).hover()
    assert looks(page).startswith("Where CLS looks: rollout of layers 1 to 2, of layer 2 head 3 alone")
    leave(page)
    assert looks(page) == sentence
    assert np.array_equal(pixels(page), at_rest)
    page.wait_for_timeout(600)  # the viewer tells what was chosen after a quarter of a second
    assert page.sent[before:] == []
    patch(page, 3, 5).click()
    linked(page, token="3,5")
    assert len(page.sent) > before


def test_a_click_pins_and_a_second_one_or_escape_frees(page, page_server):
    visit(page, page_server)
    at_rest = pixels(page)
    pinned = page.locator(".outline.pinned")
    for free in (lambda: patch(page, 3, 5).click(), lambda: page.keyboard.press("Escape")):
        patch(page, 3, 5).click()
        leave(page)
        assert looks(page).startswith("Where row 3, column 5 looks")
        of_pinned = pixels(page)
        assert pinned.bounding_box()["x"] == pytest.approx(patch(page, 3, 5).bounding_box()["x"], abs=1)
        patch(page, 7, 1).hover()
        assert looks(page).startswith("Where row 7, column 1 looks")
        leave(page)
        assert np.array_equal(pixels(page), of_pinned)
        linked(page, token="3,5")
        free()
        leave(page)
        assert looks(page).startswith("Where CLS looks")
        assert np.array_equal(pixels(page), at_rest)
        assert pinned.is_hidden()
        linked(page)


def test_cls_has_a_button_of_its_own_with_its_weight(page, page_server):
    attention = by_python("dog_12").attention
    # where a row has its largest weight, the browser knows it exactly
    layer, head, token = np.argwhere(attention[:, :, 1:].argmax(axis=-1) == 0)[0] + [0, 0, 1]
    view = {"method": "raw", "layer": f"{layer + 1}", "head": f"{head + 1}"}
    row, column = divmod(int(token) - 1, 8)
    visit(page, page_server, urlencode(view | {"token": f"{row + 1},{column + 1}"}))
    chip = page.locator(".switches button").first
    expect(chip).to_have_text(f"CLS {percent(attention[layer, head, token, 0])}")
    expect(chip).to_have_attribute("aria-pressed", "false")
    chip.click()
    expect(chip).to_have_attribute("aria-pressed", "true")
    assert looks(page) == f"Where CLS looks: attention of layer {layer + 1}, head {head + 1}."
    linked(page, **view)


def test_looked_at_by_turns_the_question_round(page, page_server):
    found = by_python("dog_12")
    visit(page, page_server, "token=3,5&method=raw&layer=2&head=1")
    choose(page, "Looked at by")
    assert looks(page) == "Who looks at row 3, column 5: attention of layer 2, head 1."
    column = found.attention[1, 0, 1:, 1 + 2 * 8 + 4]
    most = int(column.argmax())
    told = page.locator(".looks").inner_text().split("\n")[1]
    assert told.startswith(f"Most by row {most // 8 + 1}, column {most % 8 + 1} ({percent(column[most])});")
    linked(page, method="raw", layer="2", head="1", token="3,5", looked_at="yes")


# --- thumbnails


def thumb_pixels(page) -> dict[str, np.ndarray]:
    """What is drawn within each thumbnail's cell, by the cell's name."""
    sheet = pixels(page, ".board canvas")
    boxes = page.locator(".board").evaluate(
        """board => {
          const all = board.querySelector("canvas").getBoundingClientRect()
          return [...board.querySelectorAll(".cell")].map((cell) => {
            const box = cell.getBoundingClientRect()
            return [cell.ariaLabel, ...[box.top - all.top, box.bottom - all.top].map((y) => y / all.height),
              ...[box.left - all.left, box.right - all.left].map((x) => x / all.width)]
          })
        }"""
    )
    height, width = sheet.shape[:2]
    return {
        name: sheet[round(top * height) : round(bottom * height), round(left * width) : round(right * width)]
        for name, top, bottom, left, right in boxes
    }


def test_a_thumbnail_previews_opens_and_stands_alone(page, page_server):
    found = by_python("dog_12")
    visit(page, page_server)
    thumb(page, 2, 3).hover()
    assert looks(page).startswith("Where CLS looks: rollout of layers 1 to 2, of layer 2 head 3 alone")
    assert bars(page) == bar_texts(found, 1)
    leave(page)
    assert looks(page).startswith("Where CLS looks: rollout of layers 1 to 6, mean of all heads")
    thumb(page, 2, 3).click()
    leave(page)
    assert looks(page).startswith("Where CLS looks: rollout of layers 1 to 2, of layer 2 head 3 alone")
    linked(page, layer="2", head="3")

    choose(page, "Raw attention")
    together = thumb_pixels(page)
    for head in (3, 5):
        thumb(page, 2, head).dblclick()
        leave(page)
        assert looks(page) == f"Where CLS looks: attention of layer 2, head {head}."
        alone = thumb_pixels(page)
        for name, drawing in alone.items():
            if name == f"layer 2, head {head}":
                assert np.array_equal(drawing, together[name])
            else:
                assert drawing.mean() < together[name].mean(), name
    page.keyboard.press("Escape")
    for name, drawing in thumb_pixels(page).items():
        assert np.array_equal(drawing, together[name]), name


def test_each_thumbnail_is_where_it_is_pointed_at(page, page_server):
    visit(page, page_server, "method=raw")
    frame = page.locator(".thumb.chosen")
    for layer, head in ((1, 1), (3, 8), (6, None), (2, 5)):
        thumb(page, layer, head).hover()
        drawn(page)
        box = frame.bounding_box()  # 2 px of it lie outside the thumbnail
        for x in (box["x"] + 4, box["x"] + box["width"] - 4):
            for y in (box["y"] + 4, box["y"] + box["height"] - 4):
                page.mouse.move(x, y)
                heads = "mean of all heads" if head is None else f"head {head}"
                assert looks(page) == f"Where CLS looks: attention of layer {layer}, {heads}."


def test_thumbnails_work_from_the_keyboard_with_one_stop(page, page_server):
    visit(page, page_server, "method=raw")
    for grid in (".stage", ".board"):
        assert page.locator(f'{grid} .cell[tabindex="0"]').count() == 1
    thumb(page, 1, 1).focus()
    for key, layer, heads in (
        ("ArrowDown", 2, "head 1"),
        ("ArrowRight", 2, "head 2"),
        ("End", 2, "mean of all heads"),
        ("ArrowRight", 2, "mean of all heads"),  # a line's end is an end
        ("ArrowDown", 3, "mean of all heads"),
        ("ArrowLeft", 3, "head 8"),
    ):
        page.keyboard.press(key)
        assert looks(page) == f"Where CLS looks: attention of layer {layer}, {heads}.", key
        assert page.locator('.board .cell[tabindex="0"]').count() == 1
        assert focused(page)["shows"]
    assert link_of(page) == {"method": "raw"}  # so far only looked at
    page.keyboard.press("Enter")
    linked(page, layer="3", head="8", method="raw")
    together = thumb_pixels(page)
    page.keyboard.press("Shift+Enter")
    for name, drawing in thumb_pixels(page).items():
        assert (drawing.mean() < together[name].mean()) == (name != "layer 3, head 8"), name


# --- layers


def test_the_scrubber_goes_through_the_layers_and_the_bars_follow(page, page_server):
    found = by_python("dog_12")
    visit(page, page_server, "method=raw")
    scrubber = page.get_by_role("slider", name="Layer")
    for key, layer in (("ArrowLeft", 5), ("ArrowLeft", 4), ("Home", 1), ("ArrowRight", 2), ("End", 6)):
        scrubber.press(key)
        assert looks(page) == f"Where CLS looks: attention of layer {layer}, mean of all heads."
        assert bars(page) == bar_texts(found, layer - 1)
        assert scrubber.get_attribute("aria-valuetext") == f"layer {layer} of 6"
    play = page.locator("button.play")
    scrubber.press(" ")  # from the last layer it starts again
    drawn(page)
    assert scrubber.input_value() == "1"
    assert play.get_attribute("aria-label") == "Pause"
    scrubber.press(" ")
    drawn(page)
    assert play.get_attribute("aria-label") == "Play through the layers"
    scrubber.fill("4")
    scrubber.press(" ")
    drawn(page)
    assert play.get_attribute("aria-label") == "Pause"
    expect(play).to_have_attribute("aria-label", "Play through the layers", timeout=5000)
    assert scrubber.input_value() == "6"
    page.wait_for_timeout(800)  # a step of playing takes 0.7 s
    assert scrubber.input_value() == "6"
    assert bars(page) == bar_texts(found, 5)


def test_pictures_fade_into_one_another_unless_less_motion_is_wanted(page, page_server):
    for motion, fades in (("reduce", False), ("no-preference", True)):
        page.emulate_media(reduced_motion=motion)
        visit(page, page_server, "method=raw")
        page.wait_for_timeout(400)
        at_rest = pixels(page)
        page.get_by_role("slider", name="Layer").press("ArrowLeft")
        after_the_step = pixels(page)
        page.wait_for_timeout(600)  # a fade takes 350 ms
        final = pixels(page)
        assert not np.array_equal(final, at_rest)
        assert np.array_equal(after_the_step, final) == (not fades)
    page.emulate_media(reduced_motion="reduce")
