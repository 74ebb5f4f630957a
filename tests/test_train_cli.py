"""python -m train run: its flags are the settings, and what is wrong is one line before anything is written.

Run: pytest tests/test_train_cli.py (about 15 s).
"""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from small_run import as_flags, small, write_pictures

from train.__main__ import build_parser, main
from train.config import PRESETS, TrainConfig, preset
from train.runs import Run, read_config, read_metrics

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    """An empty folder to be in, an empty cache, and no data set unless it is named."""
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PATCHLIGHT_DATA", raising=False)
    monkeypatch.delenv("PATCHLIGHT_RUNS", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = build_parser()
    chosen = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return chosen.choices[command]


def refused(capsys, *words: str) -> str:
    """The one line that these words are refused with; fails where anything is written."""
    try:
        code = main(["run", *words])
    except SystemExit as ended:  # argparse's own way
        code = ended.code
    told = capsys.readouterr()
    assert (code, told.out) == (2, "")
    line = re.fullmatch(r"python -m train(?: run)?: (.+)\n", told.err)  # of what: told by who found it
    assert line, told.err
    assert list(Path.cwd().iterdir()) == []
    return line[1]


# --- the flags --------------------------------------------------------------------------------------------


def test_the_flags_are_the_fields_and_four_more():
    flags = {flag for action in parser_of("run")._actions for flag in action.option_strings}
    names = {field.name.replace("_", "-"): field.type for field in fields(TrainConfig)}
    expected = {f"--{name}" for name in names} | {f"--no-{name}" for name in names if names[name] is bool}
    assert flags == expected | {"-h", "--help", "--preset", "--out", "--resume", "--detach"}


def test_each_flag_reaches_its_field():
    """Every field gets a value that is not its preset's; what the words come to is that config."""
    base = preset("demo")
    changed = small(
        Path("some folder"), holdout=7, split_seed=2, seed=3, mirror=True, augment="randaugment", cutmix=0.1,
        random_erasing=0.2, label_smoothing=0.3, mean_and_std="half", dropout=0.15, stochastic_depth=0.25,
        keep_patches=0.75, full_from=0.5, optimiser="adamw", lr=1e-4, muon_lr=2e-4, weight_decay=0.2,
        decay_all=True, beta2=0.9, schedule="cosine", warmup=0.125, clip=2.0, keep_every=1.5,
        stop_minutes=9.5, stop_mb=77, whiten=False,
        init="tutorial", precision="bfloat16", compile="on", threads=2, evaluations=4, snapshots=5,
        num_layers=3, num_heads=1, mlp_dim=40, log_steps=6, checkpoint_steps=9, patch_size=8, epochs=1.0,
        batch=24, minutes=0.0, embed_dim=24, ema=0.5,
    )  # fmt: skip
    same = {name for name, value in asdict(changed).items() if asdict(base)[name] == value}
    assert same <= {"minutes", "fit_epochs"}  # 0 and False, where a run is as long as its epochs
    args = parser_of("run").parse_args(as_flags(changed))
    given = {name.removeprefix("set_"): v for name, v in vars(args).items() if name.startswith("set_")}
    assert given == asdict(changed)
    assert preset("demo", **given) == changed


def test_what_is_not_said_is_not_changed():
    args = parser_of("run").parse_args([])
    assert {value for name, value in vars(args).items() if name.startswith("set_")} == {None}


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["report", "--help"], ["bench", "--help"]])
def test_help_helps(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    told = capsys.readouterr()
    assert (ended.value.code, told.err) == (0, "")
    assert told.out.startswith("usage: python -m train")
    if words[0] == "run":
        flat = " ".join(told.out.split())
        for field in fields(TrainConfig):
            # argparse breaks lines at the hyphens of a word too
            assert field.metadata["help"].replace(" ", "") in flat.replace(" ", ""), field.name
        for name in PRESETS:
            assert name in told.out


def test_no_command_is_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m train")


# --- what cannot be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lr", "-1"], "lr is from 1e-09 to 10, not -1.0"),
        (["--lr", "nan"], "lr is from 1e-09 to 10, not nan"),
        (["--epochs", "inf"], "epochs is from 0 to 1000000.0, not inf"),
        (["--batch", "0"], "batch is from 1 to 65536, not 0"),
        (["--seed", "-1"], "seed is from 0 to 9223372036854775807, not -1"),
        (["--holdout", "9" * 400], "holdout is from 0 to 1000000000, not " + "9" * 400),
        (["--epochs", "1", "--minutes", "1"], "a run is as long as epochs or minutes say: set one of them, "),
        (["--preset", "demo", "--fit-epochs"], "fit_epochs turns minutes into epochs: set minutes"),
        (["--patch-size", "5"], "patch_size 5 does not divide 32"),
        (["--num-heads", "7"], "embed_dim 256 cannot be divided by num_heads 7"),
        (["--data", ""], "data is a word, not ''"),
        (["--device", "quantum"], "'quantum' is not a device: use cuda, cuda:1, mps or cpu"),
        (["--device", "cuda:99"], "device 'cuda:99' is not on this machine; it has "),
        (["--resume"], "--resume goes on with the run that --out names: name one"),
        (["--resume", "--out", "nowhere"], "nowhere holds no run: it has no config.json"),
        (["--resume", "--out", "x", "--lr", "1"], "--resume keeps the run's own settings: leave out --lr"),
        (
            ["--resume", "--out", "x", "--preset", "demo", "--keep-patches", "1"],
            "--resume keeps the run's own settings: leave out --preset, --keep-patches",
        ),
        (
            ["--resume", "--out", "x", "--no-mirror"],
            "--resume keeps the run's own settings: leave out --mirror",
        ),
        # argparse finds these
        (["--batch", "many"], "argument --batch: invalid int value: 'many'"),
        (["--batch", "1.5"], "argument --batch: invalid int value: '1.5'"),
        (["--lr", ""], "argument --lr: invalid float value: ''"),
        (["--lr"], "argument --lr: expected one argument"),
        (["--preset", "slow"], "argument --preset: invalid choice: 'slow'"),
        (["--schedule", "steps"], "argument --schedule: invalid choice: 'steps'"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
        (["--see", "1"], "unrecognized arguments: --see 1"),  # no guessing of flags cut short
        (["extra"], "unrecognized arguments: extra"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_is_impossible_is_one_line_and_writes_nothing(words, told, capsys):
    assert refused(capsys, *words).startswith(told)


def test_a_number_just_outside_any_range_is_refused(capsys):
    for field in fields(TrainConfig):
        if field.type not in (int, float):
            continue
        for value in (field.metadata["low"] - 1, field.metadata["high"] + 1):
            told = refused(capsys, f"--{field.name.replace('_', '-')}={field.type(value)}")
            assert told.startswith(f"{field.name} is from "), told


def test_another_command_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- a run ------------------------------------------------------------------------------------------------


def test_a_run_and_its_continuation(folders, capsys):
    """0 where it is done, the counts of parameters first, the settings as they were asked for."""
    pictures = write_pictures(folders / "pictures")
    config = small(pictures, epochs=1.0)
    words = ["run", "--preset", "demo", *as_flags(config), "--out", "mine"]
    assert main(words) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    # conv 8·8·3·16 + 16, CLS 16, 17 positions, two blocks, norm, norm and head
    block = 2 * 32 + 4 * 16 * 16 + 16 * 32 + 32 + 32 * 16 + 16
    total = 3072 + 16 + 16 + 17 * 16 + 2 * block + 32 + 32 + 170
    assert lines[:2] == [f"Total parameters: {total:,}", f"Trained parameters: {total:,}"]
    assert lines[-1] == "Finished at step 9"
    kept = read_config(Run(Path("mine")))
    assert (kept["config"], kept["preset"], kept["parameters"]) == (asdict(config), "demo", total)
    assert kept["command"].startswith("python -m train run --preset demo --data ")
    assert json.loads(Path("mine/status.json").read_text())["state"] == "finished"

    # It is not trained over, and goes on only by its own settings.
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["run", "--resume", "--out", "mine"]) == 0
    assert "Resuming from step 9" in capsys.readouterr().out.splitlines()
    assert [row["step"] for row in read_metrics(Run(Path("mine")))] == list(range(1, 10))


def test_a_run_without_a_name_gets_one_and_says_it(folders, capsys):
    pictures = write_pictures(folders / "pictures", 40)
    assert main(["run", "--preset", "demo", *as_flags(small(pictures, epochs=0.1))]) == 0
    (made,) = (path for path in Path("runs").iterdir() if not path.name.startswith("."))
    assert made.name.startswith("demo-2")
    assert capsys.readouterr().out.splitlines()[-1] == f"The run is in {made}"


def test_pictures_that_are_not_there_are_bad_input(folders, capsys):
    words = ["run", "--data", str(folders / "nothing"), "--device", "cpu", "--out", "mine"]
    assert main(words) == 2
    assert not Path("mine").exists()
    assert "There is no folder" in capsys.readouterr().err


def test_the_module_runs_as_a_command(folders):
    """As people start it, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, "-m", "train", "run", "--lr", "0"], env=environment, capture_output=True, text=True
    )
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == "python -m train run: lr is from 1e-09 to 10, not 0.0\n"
