"""What the tests of the page share: they see no data, cache or runs of the machine unless they ask for it."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from serving import serving

# The tests' models are tiny: two threads would wait for one another for longer than they work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture
def page_folders(tmp_path, monkeypatch):
    """An empty cache and an empty runs folder for the page, and no test set; returns the runs folder."""
    import streamlit as st

    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATCHLIGHT_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("PATCHLIGHT_DATA", raising=False)
    (tmp_path / "runs").mkdir()
    for cache in (st.cache_resource, st.cache_data):
        cache.clear()
    return tmp_path / "runs"


@pytest.fixture(scope="session")
def write_checkpoint():
    """write_checkpoint(path, num_layers=2, top_logit_percentiles=(...)): random weights, always the same."""
    import torch

    from vit.checkpoint import Checkpoint, save
    from vit.sources import CLASSES
    from vit.state_dict import Architecture

    def write(path: Path, *, top_logit_percentiles=(), class_names=CLASSES, **sizes):
        smaller = {"embed_dim": 32, "mlp_dim": 32, "num_classes": len(class_names)} | sizes
        architecture = Architecture(**smaller)
        torch.manual_seed(5)
        halves = (0.5,) * architecture.in_channels
        checkpoint = Checkpoint(architecture, tuple(class_names), halves, halves)
        checkpoint = replace(checkpoint, top_logit_percentiles=tuple(top_logit_percentiles))
        return save(architecture.build(init="tutorial"), checkpoint, path)

    return write


# Not for the whole session: while Playwright runs, no other test can have an event loop.
@pytest.fixture(scope="module")
def browser():
    """Chromium. Without it the test is skipped; with PATCHLIGHT_BROWSER=required (as in CI) it fails."""
    if not Path(CHROMIUM).exists():
        why = f"there is no Chromium at {CHROMIUM}"
        (pytest.fail if os.environ.get("PATCHLIGHT_BROWSER") == "required" else pytest.skip)(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def page_server(tmp_path_factory):
    """One real server for all, offline and without a test set: .url, .pid, its folder .runs."""
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server
