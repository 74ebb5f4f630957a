"""The page as people meet it: real server, real Chromium, no network. The viewer's own ways: test_viewer.py.

Run: pytest tests/test_browser.py (half a minute). Without Chromium these tests are skipped; with
PATCHLIGHT_BROWSER=required (as in CI) they fail instead.
"""

import re

import numpy as np
import pytest
from PIL import Image
from viewer_page import (
    PICTURE,
    SIZES,
    another_picture,
    choose,
    drawn,
    link_of,
    linked,
    opened,
    picture_name,
    pixels,
    settled,
)


@pytest.fixture(scope="module")
def context(browser):
    with browser.new_context() as context:
        yield context


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_whole_and_open_to_all(context, page_server, size, scheme):
    from axe_playwright_python.sync_playwright import Axe

    with opened(context, page_server, size=size, scheme=scheme) as page:
        background = page.locator('[data-testid="stApp"]').evaluate(
            "e => getComputedStyle(e).backgroundColor"
        )
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 384) == (scheme == "light")
        for element in ("document.documentElement", "document.querySelector('[data-testid=stMain]')"):
            assert page.evaluate(f"{element}.scrollWidth <= {element}.clientWidth")
        assert all(page.locator("img").evaluate_all("all => all.map(img => img.alt.length > 0)"))
        for canvas in page.locator("canvas:visible").all():
            assert canvas.get_attribute("role") == "img"
            assert canvas.get_attribute("aria-label")
        assert page.locator(".gallery button").count() == 20
        targets = page.locator(
            ".gallery button, .viewer button:visible, .viewer input:visible, .stage .cell, .board .cell"
        )
        for box in targets.evaluate_all(
            "all => all.map(e => [e.getBoundingClientRect().width, e.getBoundingClientRect().height])"
        ):
            assert min(box) >= 24
        found = Axe().run(page).response["violations"]
        grave = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found
                 if each["impact"] in ("serious", "critical")]  # fmt: skip
        assert not grave
        assert not page.complaints


def parts(page) -> dict[str, dict[str, float]]:
    found = {
        "picture": page.locator(PICTURE),
        "scrubber": page.locator(".scrubber input"),
        "method": page.get_by_text("Raw attention", exact=True),
        "direction": page.get_by_text("Looked at by", exact=True),
        "prediction": page.locator(".answer"),
        "thumbnails": page.locator(".thumbnails"),
        "gallery": page.locator(".gallery"),
    }
    return {name: locator.bounding_box() for name, locator in found.items()}


def test_everything_that_matters_is_seen_without_scrolling(context, page_server):
    with opened(context, page_server) as page:
        boxes = parts(page)
        for name, box in boxes.items():
            assert box["y"] >= 0, name
            assert box["y"] + box["height"] <= 900, name
            assert box["x"] + box["width"] <= 1440, name
        assert min(boxes["picture"]["width"], boxes["picture"]["height"]) >= 448
        left, middle, right = (boxes[name]["x"] for name in ("picture", "prediction", "gallery"))
        assert left < middle < right


def test_on_a_phone_the_picture_comes_first_and_the_gallery_last(context, page_server):
    with opened(context, page_server, size="narrow") as page:
        boxes = parts(page)
        order = sorted(boxes, key=lambda name: boxes[name]["y"])
        assert order[0] == "picture"
        assert order[-3:] == ["prediction", "thumbnails", "gallery"]


def test_the_title_is_on_screen_before_the_picture(context, page_server):
    page = context.new_page()
    page.add_init_script(
        """new MutationObserver(() => {
          if (document.querySelector("h1")) window.titleAt ??= performance.now()
        }).observe(document, {childList: true, subtree: true})
        const put = CanvasRenderingContext2D.prototype.putImageData
        CanvasRenderingContext2D.prototype.putImageData = function (...args) {
          window.pictureAt ??= performance.now()
          return put.apply(this, args)
        }"""
    )
    page.goto(page_server.url)
    settled(page)
    assert page.locator("h1").inner_text() == "Patchlight"
    assert page.evaluate("window.titleAt <= window.pictureAt")
    page.close()


def test_a_click_in_the_gallery_explains_that_picture(context, page_server):
    with opened(context, page_server, "layer=2") as page:
        cat = page.locator('.gallery button[title="cat"]').first
        cat.click()
        another_picture(page, "cat 00")
        assert cat.get_attribute("aria-pressed") == "true"
        assert page.locator('.gallery button[aria-pressed="true"]').count() == 1
        assert link_of(page) == {"layer": "2", "picture": "sample:cat_00"}
        assert page.get_by_text("true label: cat").is_visible()
        assert "layers 1 to 2" in picture_name(page)


def test_the_gallery_works_from_the_keyboard(context, page_server):
    with opened(context, page_server, "picture=sample:frog_07") as page:
        before = picture_name(page).split(",")[0]
        focused = "document.activeElement.shadowRoot?.activeElement ?? document.activeElement"
        page.locator('.gallery button[aria-pressed="true"]').focus()
        page.keyboard.press("Home")
        assert page.evaluate(f"({focused}).title") == "airplane"
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown", "ArrowLeft", "ArrowRight"):
            page.keyboard.press(key)
        at = page.evaluate(f"[...({focused}).parentElement.children].indexOf({focused})")
        columns = page.locator(".gallery").evaluate(
            "e => getComputedStyle(e).gridTemplateColumns.split(' ').length"
        )
        assert at == 1 + columns
        page.keyboard.press("Enter")
        page.locator(f'{PICTURE}[aria-label]:not([aria-label^="{before},"])').wait_for(timeout=20_000)
        settled(page)
        chosen = page.locator(".gallery button").nth(at)
        assert chosen.get_attribute("aria-pressed") == "true"
        assert page.evaluate(f"[...({focused}).parentElement.children].indexOf({focused})") == at
        assert page.locator('.gallery button[tabindex="0"]').count() == 1
        assert link_of(page) == {}  # the first picture of all


def test_a_link_reproduces_the_view_in_another_browser(context, page_server):
    view = {"picture": "sample:cat_00", "method": "raw", "layer": "5"}
    with opened(context, page_server) as page:
        page.locator('.gallery button[title="cat"]').first.click()
        another_picture(page, "cat 00")
        choose(page, "Raw attention")
        page.get_by_role("slider", name="Layer").press("ArrowLeft")
        linked(page, **view)
        shown, named, query = pixels(page), picture_name(page), page.url.partition("?")[2]
    with opened(context, page_server, query) as page:
        assert np.array_equal(pixels(page), shown)
        assert picture_name(page) == named
        assert link_of(page) == view


def test_a_photo_can_be_uploaded(context, page_server, tmp_path):
    y, x = np.mgrid[:600, :900]
    waves = np.stack([128 + 90 * np.sin(x / 90), 60 + y / 5, 150 + 80 * np.cos((x - y) / 110)], axis=-1)
    Image.fromarray(waves.astype(np.uint8)).save(tmp_path / "holiday.jpg", quality=88)
    (tmp_path / "diary.png").write_text("dear diary")
    with opened(context, page_server) as page:
        page.get_by_text("Yours", exact=True).click()
        uploader = page.locator('[data-testid="stFileUploader"] input[type="file"]').last
        uploader.set_input_files(tmp_path / "holiday.jpg")
        page.get_by_text("This model knows 10 classes").wait_for(timeout=30_000)
        settled(page)
        assert re.fullmatch("own:[0-9a-f]{12}", link_of(page)["picture"])
        square = pixels(page)
        assert square.shape[0] == square.shape[1] >= 448  # drawn on the photo, not on what the model sees
        page.get_by_text("Whole picture").click()
        page.wait_for_function("location.search.includes('fit=pad')", timeout=20_000)
        settled(page)
        assert not np.array_equal(pixels(page), square)
        before = picture_name(page)
        uploader.set_input_files(tmp_path / "diary.png")
        page.get_by_text("This file is not a picture").wait_for(timeout=20_000)
        assert picture_name(page) == before
        assert not page.complaints


def test_the_gallery_follows_the_data_set_of_the_model(context, page_server, tmp_path, write_checkpoint):
    from vit.patterns import CLASSES

    write_checkpoint(tmp_path / "mine.safetensors", class_names=CLASSES, num_layers=2)
    with opened(context, page_server, "picture=sample:cat_00") as page:
        page.get_by_role("button", name="Upload").click()
        page.locator('[data-testid="stFileUploader"] input[type="file"]').first.set_input_files(
            tmp_path / "mine.safetensors"
        )
        page.wait_for_function("location.search.includes('pattern%3A00')", timeout=30_000)
        settled(page)
        page.keyboard.press("Escape")
        buttons = page.locator(".gallery button")
        buttons.first.locator("img").wait_for()
        assert buttons.count() == 20
        assert set(buttons.evaluate_all("all => all.map(e => e.title)")) <= set(CLASSES)
        assert buttons.first.get_attribute("aria-pressed") == "true"
        assert page.locator(".answer .bars li:not(.absent)").count() == min(5, len(CLASSES))
        buttons.nth(5).click()
        page.wait_for_function("location.search.includes('pattern%3A05')", timeout=30_000)
        settled(page)
        drawn(page)
        assert re.match(r"\w.* 05, lit", picture_name(page))
        page.get_by_role("combobox", name="Model").click()
        page.get_by_role("option", name="Bundled ViT for CIFAR-10").click()
        another_picture(page, "dog 12")
        assert link_of(page) == {}
        assert page.locator('.gallery button[title="dog"][aria-pressed="true"]').count() == 1
        assert not page.complaints


def test_without_the_test_set_a_button_says_how_to_get_it(context, page_server):
    with opened(context, page_server) as page:
        page.get_by_text("Test set", exact=True).click()
        page.get_by_text("How to get the test set").click()
        page.get_by_text("python -m vit data").wait_for(timeout=20_000)
