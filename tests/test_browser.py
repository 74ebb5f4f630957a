"""The page as people meet it: real server, real Chromium, no network.

Without Chromium these tests are skipped; with PATCHLIGHT_BROWSER=required (as in CI) they fail instead.
"""

import io
import os
import re
import shutil
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from PIL import Image

SIZES = {"wide": (1440, 900), "narrow": (390, 844)}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
PICTURE = '[data-testid="stImage"] img'  # the first one is the large picture


@pytest.fixture(scope="module")
def browser():
    if not Path(CHROMIUM).exists():
        why = f"there is no Chromium at {CHROMIUM}"
        (pytest.fail if os.environ.get("PATCHLIGHT_BROWSER") == "required" else pytest.skip)(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@contextmanager
def opened(browser, server, query="", size="wide", scheme="light"):
    """A page whose picture is on screen; what the browser complained of is in `page.complaints`."""
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    page.complaints = []
    page.on(
        "console",
        lambda said: page.complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("requestfailed", lambda request: page.complaints.append(f"{request.url} {request.failure}"))
    page.goto(f"{server.url}/?{query}")
    settled(page)
    yield page
    context.close()


def settled(page) -> None:
    """Wait until the script has ended and everything is drawn."""
    page.get_by_text("Attention shows where").wait_for(timeout=60_000)
    page.locator('[data-testid="stApp"][data-test-script-state="notRunning"]').wait_for(timeout=30_000)
    page.locator(".js-plotly-plot .trace").first.wait_for(timeout=30_000)


def source_of(page) -> str:
    return page.locator(PICTURE).first.get_attribute("src")


def changed(page, before: str) -> None:
    page.wait_for_function(
        "([selector, before]) => document.querySelector(selector)?.getAttribute('src') !== before",
        arg=[PICTURE, before],
        timeout=30_000,
    )
    settled(page)


def bytes_of(page, server) -> bytes:
    with urllib.request.urlopen(server.url + urlsplit(source_of(page)).path) as answer:
        return answer.read()


def link_of(page) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(urlsplit(page.url).query).items()}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_the_page_is_whole_and_open_to_all(browser, page_server, size, scheme):
    from axe_playwright_python.sync_playwright import Axe

    with opened(browser, page_server, size=size, scheme=scheme) as page:
        background = page.locator('[data-testid="stApp"]').evaluate(
            "e => getComputedStyle(e).backgroundColor"
        )
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 384) == (scheme == "light")
        for element in ("document.documentElement", "document.querySelector('[data-testid=stMain]')"):
            assert page.evaluate(f"{element}.scrollWidth <= {element}.clientWidth")
        assert all(page.locator("img").evaluate_all("all => all.map(img => img.alt.length > 0)"))
        assert page.locator(".gallery button").count() == 20
        for box in page.locator(".gallery button").evaluate_all(
            "all => all.map(e => [e.getBoundingClientRect().width, e.getBoundingClientRect().height])"
        ):
            assert min(box) >= 24
        found = Axe().run(page).response["violations"]
        grave = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found
                 if each["impact"] in ("serious", "critical")]  # fmt: skip
        assert not grave
        assert not page.complaints


def box_of(locator) -> dict[str, float]:
    return locator.first.bounding_box()


def parts(page) -> dict[str, dict[str, float]]:
    images = page.locator(PICTURE)
    return {
        "picture": box_of(images),
        "scrubber": box_of(page.locator('[data-testid="stSlider"]')),
        "method": box_of(page.get_by_text("Raw attention")),
        "direction": box_of(page.get_by_text("Looked at by")),
        "prediction": box_of(page.get_by_text("true label")),
        "thumbnails": images.nth(1).bounding_box(),
        "gallery": box_of(page.locator(".gallery")),
    }


def test_everything_that_matters_is_seen_without_scrolling(browser, page_server):
    with opened(browser, page_server) as page:
        boxes = parts(page)
        for name, box in boxes.items():
            assert box["y"] >= 0, name
            assert box["y"] + box["height"] <= 900, name
            assert box["x"] + box["width"] <= 1440, name
        assert boxes["picture"]["width"] >= 448
        left, middle, right = (boxes[name]["x"] for name in ("picture", "prediction", "gallery"))
        assert left < middle < right


def test_on_a_phone_the_picture_comes_first_and_the_gallery_last(browser, page_server):
    with opened(browser, page_server, size="narrow") as page:
        boxes = parts(page)
        order = sorted(boxes, key=lambda name: boxes[name]["y"])
        assert order[0] == "picture"
        assert order[-3:] == ["prediction", "thumbnails", "gallery"]


def test_the_title_is_on_screen_before_the_picture(browser, page_server):
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(
        """new MutationObserver(() => {
          const seen = (selector) => document.querySelector(selector) !== null
          if (seen("h1")) window.titleAt ??= performance.now()
          if (seen('[data-testid="stImage"] img')) window.pictureAt ??= performance.now()
        }).observe(document, {childList: true, subtree: true})"""
    )
    page.goto(page_server.url)
    settled(page)
    assert page.locator("h1").inner_text() == "Patchlight"
    assert page.evaluate("window.titleAt <= window.pictureAt")
    context.close()


def test_a_click_in_the_gallery_explains_that_picture(browser, page_server):
    with opened(browser, page_server, "layer=2") as page:
        before, cat = source_of(page), page.locator('.gallery button[title="cat"]').first
        cat.click()
        changed(page, before)
        assert cat.get_attribute("aria-pressed") == "true"
        assert page.locator('.gallery button[aria-pressed="true"]').count() == 1
        assert link_of(page) == {"layer": "2", "picture": "sample:cat_00"}
        assert page.get_by_text("true label: cat").is_visible()
        assert "cat 00" in page.locator(PICTURE).first.get_attribute("alt")


def test_the_gallery_works_from_the_keyboard(browser, page_server):
    with opened(browser, page_server) as page:
        before = source_of(page)
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
        changed(page, before)
        chosen = page.locator(".gallery button").nth(at)
        assert chosen.get_attribute("aria-pressed") == "true"
        assert page.evaluate(f"[...({focused}).parentElement.children].indexOf({focused})") == at
        assert page.locator('.gallery button[tabindex="0"]').count() == 1
        assert link_of(page)["picture"].startswith("sample:")


def test_a_link_reproduces_the_view_in_another_browser(browser, page_server):
    with opened(browser, page_server) as page:
        before = source_of(page)
        page.locator('.gallery button[title="dog"]').first.click()
        changed(page, before)
        before = source_of(page)
        page.get_by_text("Raw attention").first.click()
        changed(page, before)
        before = source_of(page)
        page.get_by_role("slider").first.press("ArrowLeft")
        changed(page, before)
        assert link_of(page) == {"picture": "sample:dog_12", "method": "raw", "layer": "5"}
        drawn, query = bytes_of(page, page_server), urlsplit(page.url).query
    with opened(browser, page_server, query) as page:
        assert bytes_of(page, page_server) == drawn
        assert link_of(page) == {"picture": "sample:dog_12", "method": "raw", "layer": "5"}


def test_the_picture_on_screen_is_the_librarys_to_2_of_255(browser, page_server):
    import vit
    from vit.checkpoint import BUNDLED
    from vit.overlay import Style, draw

    with opened(browser, page_server, "picture=sample:ship_01&method=raw&layer=3&head=2&draw=heat") as page:
        seen = np.asarray(Image.open(io.BytesIO(bytes_of(page, page_server))).convert("RGB"))
    model, checkpoint = vit.load(BUNDLED)
    picture = vit.open_picture(BUNDLED.parents[1] / "samples" / "ship_01.png")
    explanation = vit.explain(model, vit.prepare(picture, checkpoint), "raw", layer=2, head=1)
    drawn = draw(picture, explanation.relevance[0], Style("heat", strength=0.6), size_px=seen.shape[:2])
    assert min(seen.shape[:2]) >= 448
    assert np.abs(seen.astype(int) - drawn).max() <= 2


def test_a_photo_can_be_uploaded(browser, page_server, tmp_path):
    y, x = np.mgrid[:600, :900]
    waves = np.stack([128 + 90 * np.sin(x / 90), 60 + y / 5, 150 + 80 * np.cos((x - y) / 110)], axis=-1)
    Image.fromarray(waves.astype(np.uint8)).save(tmp_path / "holiday.jpg", quality=88)
    (tmp_path / "diary.png").write_text("dear diary")
    with opened(browser, page_server) as page:
        before = source_of(page)
        page.get_by_text("Yours", exact=True).click()
        uploader = page.locator('[data-testid="stFileUploader"] input[type="file"]').last
        uploader.set_input_files(tmp_path / "holiday.jpg")
        changed(page, before)
        assert page.get_by_text("This model knows 10 classes").is_visible()
        assert re.fullmatch("own:[0-9a-f]{12}", link_of(page)["picture"])
        before = source_of(page)
        page.get_by_text("Whole picture").click()
        changed(page, before)
        before = source_of(page)
        uploader.set_input_files(tmp_path / "diary.png")
        page.get_by_text("This file is not a picture").wait_for(timeout=20_000)
        assert source_of(page) == before
        assert not page.complaints


def test_the_gallery_follows_the_data_set_of_the_model(browser, page_server, tmp_path, write_checkpoint):
    from vit.patterns import CLASSES

    write_checkpoint(tmp_path / "mine.safetensors", class_names=CLASSES, num_layers=2)
    with opened(browser, page_server, "picture=sample:cat_00") as page:
        before = source_of(page)
        page.get_by_role("button", name="Upload").click()
        page.locator('[data-testid="stFileUploader"] input[type="file"]').first.set_input_files(
            tmp_path / "mine.safetensors"
        )
        changed(page, before)
        assert link_of(page)["picture"] == "pattern:00"
        page.keyboard.press("Escape")
        buttons = page.locator(".gallery button")
        buttons.first.locator("img").wait_for()
        assert buttons.count() == 20
        assert set(buttons.evaluate_all("all => all.map(e => e.title)")) <= set(CLASSES)
        assert buttons.first.get_attribute("aria-pressed") == "true"
        before = source_of(page)
        buttons.nth(5).click()
        changed(page, before)
        assert link_of(page)["picture"] == "pattern:05"
        assert " 05, lit" in page.locator(PICTURE).first.get_attribute("alt")
        before = source_of(page)
        page.get_by_role("combobox", name="Model").click()
        page.get_by_role("option", name="Bundled ViT for CIFAR-10").click()
        changed(page, before)
        assert link_of(page) == {}
        assert page.locator('.gallery button[title="frog"][aria-pressed="true"]').count() == 1
        assert not page.complaints


def test_without_the_test_set_a_button_says_how_to_get_it(browser, page_server):
    with opened(browser, page_server) as page:
        page.get_by_text("Test set", exact=True).click()
        page.get_by_text("How to get the test set").click()
        page.get_by_text("python -m vit data").wait_for(timeout=20_000)
