"""The demo: a model of made patterns that is right, and looks at the object. Small: the bundled one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vit.__main__ import main
from vit.checkpoint import load
from vit.images import normalise
from vit.patterns import SEED, make_patterns
from vit.truth import object_mass

ROOT = Path(__file__).parents[1]
BUNDLED_PATTERNS = ROOT / "assets" / "weights" / "patterns.safetensors"
ENOUGH = 0.95


def test_the_bundled_model_is_right_and_looks_at_the_object():
    made = make_patterns(500, SEED, split="test")
    model, checkpoint = load(BUNDLED_PATTERNS, device="cpu")
    logits = model(normalise(made.images, checkpoint)).detach().numpy()
    assert (logits.argmax(axis=1) == made.labels).mean() > ENOUGH
    found = object_mass(model, checkpoint, made.images[:200], made.masks[:200])
    best = found.mass["rollout, 0.9 discarded"]  # as the page shows it
    assert best > 1.5 * found.area
    assert best > 1.5 * found.centre
    assert found.mass["rollout"] > found.area


def test_its_file_says_how_it_came_about():
    _, checkpoint = load(BUNDLED_PATTERNS, device="cpu")
    facts = checkpoint.provenance
    assert facts["preset"] == "demo"
    assert "train run --preset demo" in facts["command"]
    assert checkpoint.accuracy > ENOUGH
    predictions = np.load(BUNDLED_PATTERNS.with_suffix(".predictions.npz"))
    assert (predictions["classes"] == predictions["labels"]).mean() == pytest.approx(checkpoint.accuracy)


@pytest.mark.slow
def test_the_demo_trains_to_95_percent_and_everything_opens_it(tmp_path, capsys, monkeypatch):
    """As in the issue: trained, evaluated, explained, told of in a page; without data and without network."""
    run = tmp_path / "run"
    environment = {name: value for name, value in os.environ.items() if name != "PATCHLIGHT_DATA"}
    environment |= {"PATCHLIGHT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "2"}
    train = [sys.executable, "-m", "train"]
    subprocess.run([*train, "run", "--preset", "demo", "--out", run], cwd=ROOT, env=environment, check=True)
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "finished"
    assert status["val_accuracy"] > ENOUGH

    last = run / "checkpoints" / "last.safetensors"
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    assert main(["evaluate", "--data", "patterns", "--checkpoint", str(last), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert abs(found["accuracy"] - status["val_accuracy"]) < 0.02
    mass = found["object_mass"]
    assert mass["mass"]["rollout, 0.9 discarded"] > max(mass["area"], mass["centre"])
    assert main(["explain", str(ROOT / "assets/samples/cat_00.png"), "--checkpoint", str(last)]) == 0

    subprocess.run([*train, "report", run], cwd=ROOT, env=environment, check=True)
    page = (run / "report.html").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    assert f"{found['accuracy']:.2%}".replace("%", " %") in page
