"""The real app on a port of its own, without any data, cache or runs of this machine.

with serving(folder) as server: page.goto(server.url)
"""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]


@contextmanager
def serving(folder: Path, script: str | Path = "app.py") -> Iterator[SimpleNamespace]:
    """The server as .url, .pid and .runs, its runs folder; cache, runs and log lie in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PATCHLIGHT_")}
    environment |= {"PATCHLIGHT_CACHE": str(folder / "cache"), "PATCHLIGHT_RUNS": str(folder / "runs")}
    command = [sys.executable, "-m", "streamlit", "run", str(script), "--server.headless=true"]
    command += ["--server.address=127.0.0.1", f"--server.port={url.rpartition(':')[2]}"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        _wait_until_healthy(server, url, folder / "log")
        yield SimpleNamespace(url=url, pid=server.pid, runs=folder / "runs")
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_healthy(server: subprocess.Popen, url: str, log: Path) -> None:
    for _ in range(240):
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None:
                break
            time.sleep(0.25)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')}")
