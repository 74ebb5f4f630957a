"""Takes README's pictures of the real app: python tests/screenshot.py assets/readme

Writes explore.png, test.png, train.png and use.gif there: the page at rest in the light theme, a test of
cause in the dark one, the Train tab on its example, and a few seconds of use. Starts the app without any data
of this machine. Needs Chromium, as the browser tests do.
"""

import io
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conftest import CHROMIUM, FLAGS
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from serving import serving

_FILM_WIDTH_PX, _FILM_STEP_MS = 900, 220


def main(folder: str) -> None:
    out = Path(folder)
    with (
        tempfile.TemporaryDirectory() as cache,
        serving(Path(cache)) as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        _opened(browser, server.url, "light").screenshot(path=out / "explore.png")
        page = _opened(browser, f"{server.url}/?picture=sample:dog_12&draw=heat", "dark")
        page.locator("details.cause summary").click()
        page.get_by_text("Effect of each head").click()
        page.get_by_text("Most is lost without").wait_for()
        page.get_by_text("Cover what it attends to most, and").click()
        page.get_by_text("at random (8 draws").wait_for()
        page.set_viewport_size({"width": 1440, "height": 1180})  # answer, heads and test in one picture
        page.locator('[data-testid="stMain"]').evaluate("main => main.scrollTo(0, 0)")
        page.wait_for_timeout(1000)
        page.screenshot(path=out / "test.png")
        page = _opened(browser, f"{server.url}/?tab=Train", "light")
        page.set_viewport_size({"width": 1440, "height": 1290})
        page.wait_for_timeout(12_000)  # until the estimate is there
        page.screenshot(path=out / "train.png")
        frames = list(_use(_opened(browser, f"{server.url}/?picture=sample:dog_12", "light")))
    first, *others = frames
    first.save(
        out / "use.gif", append_images=others, save_all=True, duration=_FILM_STEP_MS, loop=0, optimize=True
    )


def _opened(browser: Browser, url: str, scheme: str) -> Page:
    context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    context.add_init_script('localStorage.setItem("patchlight-tour", "1")')
    page = context.new_page()
    page.goto(url)
    page.locator("canvas.picture[aria-label]").wait_for(timeout=60_000)
    page.wait_for_timeout(2000)  # the last fades of the page
    return page


def _use(page: Page) -> Iterator[Image.Image]:
    """Pointing along a path, the heads, and the layers played."""
    box = page.locator(".stage .cells").bounding_box()

    def frame() -> Image.Image:
        shot = Image.open(io.BytesIO(page.screenshot(clip={"x": 60, "y": 150, "width": 1320, "height": 690})))
        height_px = round(shot.height * _FILM_WIDTH_PX / shot.width)
        small = shot.convert("RGB").resize((_FILM_WIDTH_PX, height_px), Image.Resampling.LANCZOS)
        return small.quantize(128, dither=Image.Dither.NONE)

    yield frame()
    for step in range(14):
        page.mouse.move(
            box["x"] + box["width"] * (0.15 + 0.05 * step), box["y"] + box["height"] * (0.3 + 0.03 * step)
        )
        page.wait_for_timeout(50)
        yield frame()
    for column in range(6):
        page.locator(".board .cells .cell").nth(9 * 3 + column).hover()
        page.wait_for_timeout(50)
        yield frame()
    page.mouse.move(5, 5)
    page.locator(".scrubber .play").click()
    for _ in range(28):
        page.wait_for_timeout(60)
        yield frame()


if __name__ == "__main__":
    main(*sys.argv[1:])
