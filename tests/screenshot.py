"""Takes README's picture of the real app: python tests/screenshot.py assets/readme/explore.png

Starts the app without any data of this machine, waits until a picture is explained, and ends it. Needs
Chromium, as the browser tests do.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]


def main(out: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "streamlit", "run", "app.py", "--server.headless", "true"]
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {"PATCHLIGHT_CACHE": cache}
        env.pop("PATCHLIGHT_DATA", None)
        server = subprocess.Popen([*command, "--server.port", str(port)], cwd=ROOT, env=env)
        try:
            _wait_for(f"{address}/_stcore/health")
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
                )
                page = browser.new_page(viewport={"width": 1440, "height": 900}, color_scheme="light")
                page.goto(address)
                page.get_by_text("Attention shows where").wait_for(timeout=60_000)
                page.wait_for_timeout(2000)  # the last fades of the page
                page.screenshot(path=out)
        finally:
            server.terminate()
            server.wait(10)


def _wait_for(address: str) -> None:
    for _ in range(120):
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"{address} did not answer within a minute")


if __name__ == "__main__":
    main(*sys.argv[1:])
