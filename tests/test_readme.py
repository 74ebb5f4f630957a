"""README's commands run, and its figures are those of the files they speak of."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from vit.__main__ import main
from vit.bench import GOALS
from vit.checkpoint import BUNDLED, load
from vit.evaluate import kept_predictions, shipped_path, wilson_interval

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()]
NEED_DATA_OR_TIME = ("python -m vit evaluate", "python -m vit bench")  # tests of their own, or too long


@pytest.fixture
def fresh_folder(tmp_path, monkeypatch):
    """A folder with the repository's assets, so that what a command writes lands nowhere else."""
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    torch.save(load(BUNDLED, device="cpu")[0].state_dict(), tmp_path / "my_state_dict.pth")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PATCHLIGHT_DATA", raising=False)
    return tmp_path


def test_the_first_thing_is_a_picture_of_the_app_and_then_two_commands():
    picture = re.match(r"!\[.{20,}\]\((.+?)\)", README)
    assert (ROOT / picture[1]).is_file()
    assert COMMANDS[0] == "pip install -r requirements.txt && streamlit run app.py"
    assert COMMANDS[1] == "pip install -r requirements.txt -r requirements-dev.txt && pytest"


def test_every_command_line_runs(fresh_folder, capsys):
    ran = 0
    for command in dict.fromkeys(COMMANDS):
        if not command.startswith("python -m vit") or command in NEED_DATA_OR_TIME:
            continue
        words = shlex.split(command)[3:]
        words = [p for w in words for p in (sorted(map(str, Path().glob(w))) if "*" in w else [w])]
        assert main(words) == 0, (command, capsys.readouterr().err)
        ran += 1
    assert ran >= 5
    for written in ("frog.png", "frog.npz", "cat.png", "runs/mine.safetensors"):
        assert (fresh_folder / written).stat().st_size > 1000


def test_the_python_runs(fresh_folder):
    block = re.search(r"```python\n(.*?)```", README, re.S)[1]
    names: dict = {}
    exec(block, names)
    assert names["explanation"].relevance.shape == (1, 8, 8)
    assert [tuple(m.shape) for m in names["maps"]] == [(1, 8, 65, 65)] * 6
    torch.testing.assert_close(names["explanation"].rollout[:, -1], names["rollout"])


def test_the_figures_of_the_bundled_model_are_those_of_its_file():
    model, checkpoint = load(BUNDLED, device="cpu")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert README.count(f"{parameters:,}") == 2
    card = (BUNDLED.parent / "README.md").read_text(encoding="utf-8")
    share = f"{checkpoint.accuracy:.2%}"
    assert f"**{share}**" in card
    assert f"right for {share.replace('%', ' %')}" in README
    low, high = wilson_interval(round(checkpoint.accuracy * 10_000), 10_000)
    assert f"{low:.2%} to {high:.2%}" in card
    assert f"{low:.2%} to {high:.2%}".replace("%", " %") in README
    digest = json.loads(str(np.load(shipped_path(BUNDLED))["facts"]))[1]
    predictions = kept_predictions(BUNDLED, checkpoint, digest)
    assert (predictions.classes == predictions.labels).mean() == checkpoint.accuracy


def test_the_benchmark_s_table_is_whole_and_of_this_version():
    table = re.search(r"```\n(cpu, .*?)```", README, re.S)[1]
    for (_, row), goal in GOALS.items():
        assert re.search(rf"{re.escape(row)} +[\d.]+ +[\d.]+ +goal <= {goal:g} ", table), row


def test_every_file_of_the_list_is_there():
    listed = re.search(r"## The code\n\n```\n(.*?)```", README, re.S)[1]
    for line in listed.splitlines():
        assert (ROOT / line.split()[0]).exists(), line
