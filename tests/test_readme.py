"""README's commands run, and its figures are those of the files they speak of."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from viewer_bench import LIMITS

from train.__main__ import build_parser
from train.__main__ import main as train_main
from train.bench import GOALS as TRAIN_GOALS
from train.config import preset
from vit.__main__ import main
from vit.atlas import answer, find_atlas
from vit.bench import GOALS
from vit.checkpoint import BUNDLED, BUNDLED_PATTERNS, load
from vit.evaluate import kept_predictions, shipped_path, wilson_interval
from vit.patterns import SEED, make_patterns
from vit.scoreboard import Scores, table_lines
from vit.truth import mass_lines, object_mass

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()]
# Those have tests of their own, need a data set, or take too long.
NEED_DATA_OR_TIME = tuple(f"python -m vit {name}" for name in ("evaluate", "bench", "score", "atlas"))


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
        if not command.startswith("python -m vit") or command.startswith(NEED_DATA_OR_TIME):
            continue
        words = shlex.split(command)[3:]
        words = [p for w in words for p in (sorted(map(str, Path().glob(w))) if "*" in w else [w])]
        assert main(words) == 0, (command, capsys.readouterr().err)
        ran += 1
    assert ran >= 5
    for written in ("frog.png", "frog.npz", "cat.png", "animals.html", "dog.gif", "runs/mine.safetensors"):
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
    table = re.search(r"```\n(cpu, [^`]*plain forward.*?)```", README, re.S)[1]
    for (_, row), goal in GOALS.items():
        assert re.search(rf"{re.escape(row)} +[\d.]+ +[\d.]+ +goal <= {goal:g} ", table), row


@pytest.mark.parametrize("name", ["vit-cifar10", "patterns"])
def test_the_tables_of_methods_are_what_score_printed_for_the_bundled_models(name):
    scores = Scores.load(ROOT / "assets" / "scores" / f"{name}.json")
    assert all(line in README for line in table_lines(scores))
    assert (
        scores.checkpoint_id == load(ROOT / "assets" / "weights" / f"{name}.safetensors", device="cpu")[1].id
    )
    assert scores.pictures == 1000


def test_what_the_atlas_says_is_what_it_printed():
    assert all(line in README for line in answer(find_atlas(load(BUNDLED, device="cpu")[1].id)))


def test_the_page_s_figures_are_whole_and_of_this_version():
    table = re.search(r"```\n(first payload[^`]*)```", README)[1]
    for what, (limit, unit) in LIMITS.items():
        assert re.search(rf"{re.escape(what)} +[\d.]+ {unit} +limit {limit:g}, (held|MISSED)", table), what


def test_every_training_command_can_be_said(capsys):
    said = [shlex.split(c)[3:] for c in COMMANDS if c.startswith("python -m train")]
    said += [shlex.split(c.partition(" -m train ")[2]) for c in COMMANDS if c.startswith("torchrun")]
    assert {words[0] for words in said} >= {"run", "report"}
    for words in said:
        if "--help" in words:
            assert train_main(words[:0]) == 0
            continue
        args = build_parser().parse_args(words)
        changes = {n[4:]: v for n, v in vars(args).items() if n.startswith("set_") and v is not None}
        if words[0] == "run" and not args.resume:
            assert preset(args.preset, **changes)


def test_the_training_benchmark_is_whole_and_of_this_version():
    table = re.search(r"```\n(cpu, [^`]*plain script.*?)```", README, re.S)[1]
    for row, (ratio, _) in TRAIN_GOALS.items():
        assert re.search(rf"{re.escape(row)} +float32 .*ratio >= {ratio:g} (held|MISSED)", table), row


def test_the_weight_on_the_object_and_the_demo_s_accuracy_are_those_of_the_bundled_model():
    made = make_patterns(1000, SEED, split="test")
    model, checkpoint = load(BUNDLED_PATTERNS, device="cpu")
    printed = mass_lines(object_mass(model, checkpoint, made.images, made.masks))
    assert "\n".join(printed) in README
    assert f"right for {checkpoint.accuracy:.2%}".replace("%", " %") in README
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert f"{parameters:,} parameters on made patterns" in README


def test_every_file_of_the_list_is_there():
    listed = re.search(r"## The code\n\n```\n(.*?)```", README, re.S)[1]
    for line in listed.splitlines():
        assert (ROOT / line.split()[0]).exists(), line
