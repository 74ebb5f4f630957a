"""The Train tab as people meet it: a run is started, watched, left alone, found again, stopped, looked into.

Run: pytest tests/test_train_browser.py (half a minute); pytest -m slow tests/test_train_browser.py (the demo
itself, two minutes). Real server, real Chromium, real trainer, no network.
"""

import os
import re
import signal

import pytest
from serving import serving
from small_run import until, write_pictures
from viewer_page import link_of, listen, picture_name, settled

from train import launch
from train.runs import Run, last_status
from train.state import look

BADGE = ".stMarkdownBadge"


def train_tab(page, server) -> None:
    page.goto(f"{server.url}/?tab=Train")
    page.get_by_role("button", name="Start", exact=True).wait_for(timeout=90_000)


def in_state(page, word: str, seconds: float = 60) -> None:
    page.locator(BADGE, has_text=re.compile(f"^{word}$|{word}$")).first.wait_for(timeout=seconds * 1000)


def press(page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def shown_step(page) -> int:
    text = page.locator('[data-testid="stProgress"]').first.inner_text()
    found = re.search(r"step ([\d,]+)", text)
    return int(found[1].replace(",", "")) if found else 0


def choose_folder(page, tmp_path) -> None:
    """A few hundred small steps on a folder of noise, in place of the demo's own pictures."""
    page.get_by_text("A folder", exact=True).click()
    page.get_by_label("Folder on the server").fill(str(write_pictures(tmp_path / "pictures")))
    page.get_by_label("Folder on the server").press("Enter")
    page.get_by_label("Length", exact=True).fill("3000")
    page.get_by_label("Length", exact=True).press("Enter")
    page.wait_for_timeout(1500)


@pytest.mark.parametrize("kind", ["small", pytest.param("demo", marks=pytest.mark.slow)])
def test_a_run_outlives_the_page_and_the_server(browser, tmp_path, kind):
    context = browser.new_context(viewport={"width": 1440, "height": 1200})
    page = context.new_page()
    listen(page)
    with serving(tmp_path) as server:
        train_tab(page, server)
        page.get_by_text("Example: the demo, as it once ran").wait_for()
        if kind == "small":
            choose_folder(page, tmp_path)
        press(page, "Start")
        in_state(page, "(waiting|running)", 20)
        in_state(page, "running")
        run = Run(server.runs / "demo-1")
        assert until(lambda: shown_step(page) >= 5, 60)
        assert not page.complaints
        context.close()  # the browser is closed …
        os.kill(server.pid, signal.SIGKILL)  # … and the server is killed
    pid, left_at = last_status(run).pid, last_status(run).step
    try:
        os.kill(pid, 0)  # the trainer goes on
        context = browser.new_context(viewport={"width": 1440, "height": 1200})
        page = context.new_page()
        listen(page)
        with serving(tmp_path) as server:
            train_tab(page, server)
            in_state(page, "running")
            page.get_by_role("heading", name="demo-1").wait_for()
            assert until(lambda: shown_step(page) > left_at, 30)
            seen = shown_step(page)
            assert until(lambda: shown_step(page) > seen, 30)  # it moves by itself

            slider = page.locator('.film input[type="range"]')
            slider.focus()
            slider.press("Home")
            start = slider.get_attribute("aria-valuetext")
            page.locator(".film button.play").click()
            assert until(lambda: slider.get_attribute("aria-valuetext") != start, 10)

            press(page, "Stop")
            press(page, "Stop demo-1")
            in_state(page, "stopped", 30)
            assert until(lambda: not alive(pid), 20)
            page.locator('[data-testid="stApp"][data-test-script-state="notRunning"]').wait_for()
            page.wait_for_timeout(1500)  # what was drawn while it ran is drawn anew once it has stopped
            page.get_by_role("button", name=re.compile("^Look into")).first.click()
            page.locator(".gallery button").first.wait_for(timeout=30_000)  # of the Explore tab alone
            settled(page)
            assert until(lambda: re.fullmatch("run:demo-1/(last|best)", link_of(page).get("model", "")), 10)
            assert picture_name(page).startswith("dog 12, " if kind == "small" else "")  # it was kept
            assert not page.complaints
    finally:
        if look(run).is_active:
            launch.kill(run)
        context.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
