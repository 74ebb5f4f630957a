"""Stages runs without a trainer, and takes pictures of the Train tab in each state:

    python tests/train_states.py FOLDER            # every state, wide and narrow, light and dark
    python tests/train_states.py FOLDER failed     # those named alone

Writes FOLDER/running-1440-light.png and so on, and prints what is wider than the page and what axe finds.
Runs are the bundled example, cut where they are said to be; who looks at them sees a lock held by this
process. Needs Chromium, as the browser tests do.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from conftest import CHROMIUM, FLAGS, ROOT
from filelock import FileLock
from serving import serving

from train.film import cut, load, save
from train.runs import Run, Status, read_metrics, write_json

EXAMPLE = Run(ROOT / "assets" / "example")
WEIGHTS = ROOT / "assets" / "weights" / "patterns.safetensors"
LAST_STEP = 176
SIZES = (1440, 390)


# ---- staging ----


def stage(
    runs: Path, name: str, state: str, *, step: int = LAST_STEP, settings: dict | None = None, **status
) -> Run:
    """A run that has come as far as `step`, with what its trainer would have written until then."""
    run = Run(runs / name)
    (run.root / "checkpoints").mkdir(parents=True)
    facts = json.loads(EXAMPLE.config_file.read_text())
    facts["config"] |= settings or {}
    rows = [row for row in read_metrics(EXAMPLE) if row["step"] <= step]
    if state != "waiting":
        write_json(run.config_file, facts)
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        shutil.copy(EXAMPLE.log_file, run.log_file)
        save(cut(load(EXAMPLE.film_file), step), run.film_file)
    judged = [row for row in rows if "val_accuracy" in row]
    if judged:
        for kept in ("last", "best"):
            shutil.copy(WEIGHTS, run.checkpoint(kept))
    now = time.time()
    last = rows[-1] if rows else {}
    told = Status(
        state=state, progress=step / LAST_STEP, step=step, epoch=last.get("epoch", 0.0),
        seconds=last.get("seconds", 0.0), heartbeat=now, pid=2**22 + 1, host=socket.gethostname(),
        device="cpu", started=now - 60, images_per_second=last.get("images_per_second", 0.0),
        val_accuracy=judged[-1]["val_accuracy"] if judged else None,
        best_accuracy=max(row["val_accuracy"] for row in judged) if judged else None,
        best_step=judged[-1]["step"] if judged else None,
    )  # fmt: skip
    write_json(run.status_file, asdict(told) | status)
    write_json(run.launch_file, {"preset": facts["preset"], "config": facts["config"], "visitor": ""})
    return run


@contextmanager
def worked_on(run: Run) -> Iterator[Run]:
    """As if a trainer were at work on it: its lock is held, and that of the runs folder."""
    seat, name = run.root.parent / ".lock", run.root.parent / ".at-work"
    with FileLock(run.lock_file), FileLock(seat):
        name.write_text(run.name)
        try:
            yield run
        finally:
            name.unlink()


AHEAD = {"heartbeat": time.time() + 3600}  # nothing is silent while pictures are taken


def _waiting(runs: Path, stack: ExitStack) -> None:
    stack.enter_context(worked_on(stage(runs, "demo-1", "waiting", step=0, **AHEAD)))


def _running(runs: Path, stack: ExitStack) -> None:
    stage(runs, "demo-1", "finished", started=time.time() - 4000)
    stack.enter_context(
        worked_on(
            stage(
                runs, "demo-2", "running", step=88, settings={"lr": 0.001}, seconds_left=53.0,
                images_per_second=888.0, memory_bytes=1_202_200_576, **AHEAD,
            )
        )
    )  # fmt: skip


def _pausing(runs: Path, stack: ExitStack) -> None:
    run = stack.enter_context(
        worked_on(stage(runs, "demo-1", "running", step=22, seconds_left=61.0, **AHEAD))
    )
    run.pause_file.touch()


def _silent(runs: Path, stack: ExitStack) -> None:
    stack.enter_context(worked_on(stage(runs, "demo-1", "running", step=44, heartbeat=time.time() - 75)))


def _paused(runs: Path, stack: ExitStack) -> None:
    run = stack.enter_context(worked_on(stage(runs, "demo-1", "paused", step=66, **AHEAD)))
    run.pause_file.touch()


def _stopped(runs: Path, stack: ExitStack) -> None:
    stage(runs, "demo-1", "stopped", step=110, reason="a stop was asked for")


def _finished(runs: Path, stack: ExitStack) -> None:
    stage(runs, "stripes-and-discs", "finished")


def _failed(runs: Path, stack: ExitStack) -> None:
    reason = "the loss is not a number at step 66: a smaller learning rate helps; it can go on from step 50"
    stage(runs, "demo-1", "failed", step=66, reason=reason)


def _vanished(runs: Path, stack: ExitStack) -> None:
    stage(runs, "demo-1", "running", step=132)


def _first(runs: Path, stack: ExitStack) -> None:
    runs.mkdir(exist_ok=True)


def _many(runs: Path, stack: ExitStack) -> None:
    changes = ({}, {"lr": 0.001}, {"num_heads": 8, "lr": 0.01}, {"seed": 1})
    for number, settings in enumerate(changes, start=1):
        state = ("finished", "stopped", "failed", "finished")[number - 1]
        step = (LAST_STEP, 110, 66, LAST_STEP)[number - 1]
        began = time.time() - 3600 * (5 - number)
        stage(runs, f"demo-{number}", state, step=step, settings=settings, started=began)


# What is staged, and what is done on the page before the picture is taken.
STATES = {
    "first": _first, "waiting": _waiting, "running": _running, "pausing": _pausing, "silent": _silent,
    "paused": _paused, "stopped": _stopped, "finished": _finished, "failed": _failed, "vanished": _vanished,
    "compare": _many, "settings": _first, "cifar10": _first, "delete": _stopped, "public": _running,
}  # fmt: skip


# ---- taking pictures ----


def main(folder: str, *names: str) -> None:
    from playwright.sync_api import sync_playwright

    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    chosen = names or tuple(STATES)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for is_public in (False, True):
            those = [name for name in chosen if (name == "public") == is_public]
            if not those:
                continue
            os.environ.pop("SPACE_ID", None)
            if is_public:
                os.environ["SPACE_ID"] = "somebody/patchlight"
            with tempfile.TemporaryDirectory() as base, serving(Path(base)) as server:
                for name in those:
                    shutil.rmtree(server.runs, ignore_errors=True)
                    with ExitStack() as stack:
                        STATES[name](server.runs, stack)
                        _take(browser, server.url, name, out)


def _take(browser, url: str, name: str, out: Path) -> None:
    context = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    for width in SIZES:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(f"{url}/?tab=Train")
            page.get_by_role("button", name="Start", exact=True).wait_for(timeout=90_000)
            _settled(page)
            _prepare(page, name)
            _settled(page)
            _whole(page, width)
            page.screenshot(path=out / f"{name}-{width}-{scheme}.png")
            _complain(page, f"{name} {width} {scheme}")
    context.close()


def _settled(page) -> None:
    page.locator('[data-testid="stApp"][data-test-script-state="notRunning"]').wait_for(timeout=60_000)
    page.wait_for_timeout(1500)  # charts and fades


def _prepare(page, name: str) -> None:
    """What is done on the page before it is looked at."""
    if name == "compare":
        table = page.get_by_test_id("stDataFrame")
        table.scroll_into_view_if_needed()
        box = table.bounding_box()
        for row in (0, 1):
            page.mouse.click(box["x"] + 18, box["y"] + 35 * (row + 1.5))
            page.wait_for_timeout(300)
    elif name == "settings":
        page.get_by_text("All settings").click()
        page.get_by_role("spinbutton", name="Num heads").fill("7")
        page.get_by_role("spinbutton", name="Num heads").press("Enter")
    elif name == "cifar10":
        page.get_by_text("CIFAR-10", exact=True).click()
        page.mouse.move(5, 5)  # what is pointed at has other colours
    elif name == "delete":
        page.get_by_role("button", name="Delete").click()


def _whole(page, width: int) -> None:
    """The window as tall as what is in it: the page scrolls inside itself."""
    for _ in range(2):
        height = page.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
        page.set_viewport_size({"width": width, "height": min(height, 9000)})
        page.wait_for_timeout(700)


_TOO_WIDE = """() => [...document.querySelectorAll('[data-testid=stMain] *')]
    .filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(e => e.tagName + ' ' + (e.dataset.testid || e.className)).slice(0, 5)"""


def _complain(page, where: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    main = "document.querySelector('[data-testid=stMain]')"
    if page.evaluate(f"{main}.scrollWidth > {main}.clientWidth"):
        print(f"{where}: wider than the page: {page.evaluate(_TOO_WIDE)}")
    for each in Axe().run(page).response["violations"]:
        if each["impact"] in ("serious", "critical"):
            nodes = [node["html"][:160] for node in each["nodes"]][:3]
            print(f"{where}: axe, {each['impact']}, {each['id']}: {nodes}")


if __name__ == "__main__":
    main(*sys.argv[1:])
