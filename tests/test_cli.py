"""The command line, mostly called in this process; a few real ones, since importing torch takes seconds."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from synthetic import png

from vit.__main__ import main
from vit.architecture import Architecture
from vit.arguments import build_parser
from vit.attention import FUSIONS
from vit.checkpoint import BUNDLED, Checkpoint, load, save
from vit.datasets import load_pictures
from vit.evaluate import (
    _read,
    cached_path,
    kept_predictions,
    measure,
    predict,
    shipped_path,
    top_logit_percentiles,
)
from vit.explain_command import Settings, targets
from vit.explanation import cls_rows, explain
from vit.images import open_picture, prepare
from vit.methods import METHODS
from vit.overlay import Kind, Style
from vit.patterns import CLASSES as PATTERNS
from vit.progress import Bar

SAMPLES = BUNDLED.parents[1] / "samples"
CAT, SHIP = str(SAMPLES / "cat_00.png"), str(SAMPLES / "ship_01.png")
COLOURS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    given = os.environ.get("PATCHLIGHT_DATA")
    monkeypatch.delenv("PATCHLIGHT_DATA", raising=False)
    return given


@pytest.fixture
def tiny(tmp_path) -> Path:
    """A checkpoint of two layers and two heads that knows three colours, but has learned nothing."""
    torch.manual_seed(0)
    architecture = Architecture(num_classes=3, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=24)
    checkpoint = Checkpoint(architecture, tuple(sorted(COLOURS)), (0.5,) * 3, (0.25,) * 3)
    path = tmp_path / "tiny.safetensors"
    save(architecture.build(init="tutorial"), checkpoint, path)
    return path


@pytest.fixture
def colours(tmp_path) -> Path:
    """Test pictures in class folders: 3 red, 4 green, 5 blue ones, all different."""
    for (name, colour), n in zip(COLOURS.items(), (3, 4, 5), strict=True):
        folder = tmp_path / "colours" / "test" / name
        folder.mkdir(parents=True)
        for i in range(n):
            pixels = np.full((32, 32, 3), colour, np.uint8)
            pixels[i, i] = 255
            (folder / f"{i}.png").write_bytes(png(pixels))
    return tmp_path / "colours"


def run(capsys, *argv) -> tuple[int, str, list[str]]:
    """Exit code, stdout, and the lines of stderr."""
    try:
        code = main([str(arg) for arg in argv])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err.splitlines()


# ---- explain --------------------------------------------------------------------------------------------


def test_says_what_is_on_a_picture_and_how_sure_it_is(capsys):
    code, out, err = run(capsys, "explain", CAT)
    model, checkpoint = load(BUNDLED)
    said = model(prepare(open_picture(CAT), checkpoint)).softmax(dim=1)[0]
    assert (code, err) == (0, [])
    assert out == f"{CAT}: {checkpoint.class_names[said.argmax()]}, {said.max():.1%}\n"


def test_json_is_one_object_a_line(capsys):
    code, out, _ = run(capsys, "explain", CAT, SHIP, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["picture"] for row in rows] == [CAT, SHIP]
    for row in rows:
        assert row["probability"] == row["probabilities"][row["class"]] == max(row["probabilities"].values())
        assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        assert len(row["probabilities"]) == 10


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (
            ["--method", "raw", "--layer", "2", "--head", "3", "--token", "2,7", "--looked-at"],
            {"method": "raw", "layer": 1, "head": 2, "token": 1 + 8 + 6, "looked_at": True},
        ),
        (
            [
                "--fusion",
                "max",
                "--discard",
                "0.4",
                "--residual",
                "0.3",
                "--start-layer",
                "2",
                "--layer",
                "5",
            ],
            {"head_fusion": "max", "discard_ratio": 0.4, "residual": 0.3, "start_layer": 1, "layer": 4},
        ),
        (["--head", "8"], {"head": 7}),
    ],
)
def test_npz_holds_what_explain_gives_with_layers_and_heads_from_0(capsys, tmp_path, flags, options):
    target = tmp_path / "new folder" / "cat.npz"
    assert run(capsys, "explain", CAT, "--npz", target, *flags)[0] == 0
    model, checkpoint = load(BUNDLED)
    expected = explain(model, prepare(open_picture(CAT), checkpoint), **options)
    with np.load(target) as arrays:
        shapes = {name: array.shape for name, array in arrays.items()}
        assert shapes == {
            "attention": (6, 8, 65, 65), "rollout": (6, 65, 65), "logits": (10,), "relevance": (8, 8)
        }  # fmt: skip
        for name, array in arrays.items():
            assert array.dtype == np.float32
            np.testing.assert_allclose(array, getattr(expected, name)[0].numpy(), atol=1e-6)


def test_png_opens_and_says_how_it_was_made(capsys, tmp_path):
    target = tmp_path / "cat.png"
    flags = ["--layer", "4", "--style", "heat", "--strength", "0.5", "--smooth"]
    assert run(capsys, "explain", CAT, "--out", target, *flags)[0] == 0
    with Image.open(target) as picture:
        picture.load()
        facts = picture.text
    assert min(picture.size) > 300
    assert load(BUNDLED)[1].id in facts["checkpoint id"]
    assert facts["picture"] == "cat_00.png"
    assert Settings(**json.loads(facts["settings"])) == Settings(layer=4)
    assert Style(**json.loads(facts["style"])) == Style("heat", 0.5, smooth=True)


def test_mass_lights_the_patches_that_hold_it_and_says_how_many(capsys, tmp_path):
    target, plain = tmp_path / "cat.png", tmp_path / "plain.png"
    flags = ["--discard", "0.9", "--strength", "1", "--npz", tmp_path / "cat.npz"]
    assert run(capsys, "explain", CAT, "--out", target, "--mass", "0.5", *flags)[0] == 0
    assert run(capsys, "explain", CAT, "--out", plain, *flags)[0] == 0
    relevance = np.load(tmp_path / "cat.npz")["relevance"]
    falling = np.sort(relevance.ravel().astype(np.float64))[::-1]
    count = 1 + np.flatnonzero(falling.cumsum() >= falling.sum() / 2)[0]
    with Image.open(target) as picture, Image.open(plain) as other:
        pixels, unmasked = np.asarray(picture), np.asarray(other)
        facts = picture.text
    assert f"the {count} of 64 patches that hold 50\u00a0% of the weight" in facts["Description"]
    assert json.loads(facts["settings"])["mass"] == 0.5
    left, right = pixels[130:642, 48:560], pixels[130:642, 640:1152]  # 512 px, 64 a patch
    assert not np.array_equal(right, unmasked[130:642, 640:1152])
    for (row, column), weight in np.ndenumerate(relevance):
        patch = np.s_[64 * row : 64 * (row + 1), 64 * column : 64 * (column + 1)]
        if weight >= falling[count - 1]:
            np.testing.assert_allclose(right[patch].astype(int), left[patch], atol=1)
        else:
            assert right[patch].max() == 0


def test_a_shared_scale_is_that_of_the_largest_weight_of_all_layers_and_heads(capsys, tmp_path):
    flags = ["--method", "raw", "--layer", "2", "--head", "3", "--strength", "1"]
    npz = tmp_path / "cat.npz"
    assert run(capsys, "explain", CAT, "--out", tmp_path / "own.png", "--npz", npz, *flags)[0] == 0
    assert run(capsys, "explain", CAT, "--out", tmp_path / "all.png", "--scale", "shared", *flags)[0] == 0
    found = np.load(npz)
    rows = found["attention"][:, :, 0, 1:]
    share = found["relevance"].max() / rows.max()  # the mean over heads is never above the largest head
    assert share < 0.9
    # where this map is lightest, its light is that share: in linear light, all channels times `share`
    lines = np.s_[130:642, 640:1152]
    with Image.open(tmp_path / "own.png") as own, Image.open(tmp_path / "all.png") as shared:
        lit, dimmed = (np.asarray(each)[lines] / 255 for each in (own, shared))
    row, column = np.unravel_index(found["relevance"].argmax(), (8, 8))
    patch = np.s_[64 * row + 8 : 64 * row + 56, 64 * column + 8 : 64 * column + 56]
    linear = [
        np.where(s <= 0.04045, s / 12.92, ((s + 0.055) / 1.055) ** 2.4) for s in (lit[patch], dimmed[patch])
    ]
    np.testing.assert_allclose(linear[1], share * linear[0], atol=0.01)


def test_several_pictures_go_to_folders_and_the_bad_one_stops_none(capsys, tmp_path):
    other = tmp_path / "other" / "cat_00.jpg"
    other.parent.mkdir()
    Image.open(SHIP).convert("RGB").save(other)
    text = tmp_path / "text.png"
    text.write_text("not a picture")
    pngs, npzs = tmp_path / "pngs", tmp_path / "npzs"
    argv = ["explain", CAT, text, tmp_path / "none.png", other, "--out", pngs, "--npz", npzs]
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert [line.split(":")[0] for line in out.splitlines()] == [CAT, str(other)]
    written = [line for line in err if line.endswith(" written")]
    assert len(written) == 4
    err = [line for line in err if line not in written]
    assert len(err) == 2
    assert err[0].startswith(f"{text}: This file is not a picture")
    assert err[1].startswith(f"{tmp_path / 'none.png'}: There is no file")
    assert sorted(path.name for path in pngs.iterdir()) == ["cat_00-2.png", "cat_00.png"]
    assert sorted(path.name for path in npzs.iterdir()) == ["cat_00-2.npz", "cat_00.npz"]


def test_no_two_pictures_share_a_file_and_none_is_overwritten(tmp_path, monkeypatch):
    names = ["a/cat.png", "b/Cat.jpg", "c/cat-2.png", "d/cat.gif"]
    paths = targets(names, tmp_path / "out", ".png")
    assert [path.name for path in paths] == ["cat.png", "Cat-2.png", "cat-2-2.png", "cat-3.png"]
    monkeypatch.chdir(tmp_path)
    for out in (Path("cat.png"), Path()):
        with pytest.raises(ValueError, match="would be overwritten"):
            targets(["cat.png"], out, ".png")
    with pytest.raises(ValueError, match="neither a folder nor"):
        targets(["cat.png"], Path("cat.jpg"), ".png")
    Path("file").touch()
    with pytest.raises(ValueError, match="need a folder"):
        targets(["a.png", "b.png"], Path("file"), ".png")


def test_padding_shows_all_of_a_wide_picture(capsys, tmp_path):
    wide = tmp_path / "wide.png"
    Image.effect_noise((96, 32), 80).convert("RGB").save(wide)
    for how in ("crop", "pad"):
        assert run(capsys, "explain", wide, "--fit", how, "--npz", tmp_path / f"{how}.npz")[0] == 0
        model, checkpoint = load(BUNDLED)
        expected = model(prepare(open_picture(wide), checkpoint, how))[0].detach().numpy()
        np.testing.assert_allclose(np.load(tmp_path / f"{how}.npz")["logits"], expected, atol=1e-4)


# ---- a whole test set -----------------------------------------------------------------------------------


def test_rows_of_a_data_set_are_those_of_explain(capsys, tmp_path, tiny, colours):
    target = tmp_path / "rows.npz"
    argv = ["explain", "--checkpoint", tiny, "--data", colours, "--npz", target, "--fusion", "max"]
    code, out, err = run(capsys, *argv, "--discard", "0.3", "--limit", "10")
    assert (code, err) == (0, [])
    assert "10 pictures" in out
    model, checkpoint = load(tiny)
    pictures = load_pictures(colours)
    with np.load(target, allow_pickle=False) as rows:
        assert rows["ids"].tolist() == pictures.ids[:10].tolist()
        assert rows["labels"].tolist() == pictures.labels[:10].tolist()
        assert rows["attention"].shape == (10, 2, 2, 65)
        assert rows["rollout"].shape == (10, 2, 65)
        assert rows["attention"].dtype == rows["rollout"].dtype == np.float16
        for i in range(10):
            found = explain(
                model, prepare(pictures.images[i], checkpoint), head_fusion="max", discard_ratio=0.3
            )
            np.testing.assert_allclose(rows["logits"][i], found.logits[0], atol=1e-5)
            np.testing.assert_allclose(rows["attention"][i], found.attention[0, :, :, 0], atol=5e-4)
            np.testing.assert_allclose(rows["rollout"][i], found.rollout[0, :, 0], atol=5e-4)
    code, out, _ = run(capsys, *argv[:5], "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["picture"] for line in lines] == pictures.ids.tolist()


def test_cls_rows_are_explains_in_either_mode(tiny):
    model, _ = load(tiny)
    x = torch.randn(35, 3, 32, 32)  # more than one part
    found = explain(model, x, residual=0.2, start_layer=1)
    for train in (False, True):
        logits, attention, rollout = cls_rows(model.train(train), x, residual=0.2, start_layer=1)
        torch.testing.assert_close(logits, found.logits)
        torch.testing.assert_close(attention, found.attention[:, :, :, 0])
        torch.testing.assert_close(rollout, found.rollout[:, :, 0])


@pytest.mark.parametrize("where", ["vit.explain_command.cls_rows", "numpy.savez"])
def test_ctrl_c_ends_with_130_one_line_and_no_half_file(capsys, tmp_path, tiny, colours, monkeypatch, where):
    def interrupted(target, *_, **options):
        if hasattr(target, "write"):
            target.write(b"half of a file")
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    folder = tmp_path / "out"
    folder.mkdir()
    argv = ["explain", "--checkpoint", tiny, "--data", colours, "--npz", folder / "rows.npz"]
    code, out, err = run(capsys, *argv)
    assert (code, out, len(err)) == (130, "", 1)
    assert list(folder.iterdir()) == []


# ---- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["explain"], "name one or more pictures"),
        (["explain", "none.png"], "There is no file"),
        (["explain", CAT, "--layer", "7"], "layers 1 to 6"),
        (["explain", CAT, "--head", "9"], "heads 1 to 8"),
        (["explain", CAT, "--head", "0"], "--head"),
        (["explain", CAT, "--start-layer", "7"], "layers 1 to 6"),
        (["explain", CAT, "--start-layer", "4", "--layer", "3"], "above layer 3"),
        (["explain", CAT, "--token", "9,9"], "rows 1 to 8"),
        (["explain", CAT, "--method", "grad"], "grad"),
        (["explain", CAT, "--discard", "1.5"], "from 0 to 1"),
        (["explain", CAT, "--residual", "nan"], "from 0 to 1"),
        (["explain", CAT, "--mass", "50"], "from 0 to 1"),
        (["explain", "--data", ".", "--npz", "a.npz", "--mass", "1"], "--mass is for single pictures"),
        (["explain", CAT, "--strength", "much"], "a number"),
        (["explain", CAT, "--out", "cat.jpg"], ".png"),
        (["explain", CAT, "--device", "toaster"], "not a device"),
        (["explain", CAT, "--checkpoint", CAT], "not a checkpoint"),
        (["explain", CAT, "--checkpoint", "none.pt"], "no checkpoint file"),
        (["explain", CAT, "--data", "."], "name one or more pictures"),
        (["explain", "--data", "."], "--npz"),
        (["explain", "--data", ".", "--npz", "a.npz", "--layer", "2"], "--layer is for single pictures"),
        (["explain", "--data", ".", "--npz", "a.npz"], "holds no test pictures"),
        (["explain", CAT, "--npz", f"{CAT}/a.npz"], "cat_00.png"),
        (["evaluate", "--data", "."], "holds no test pictures"),
        (["evaluate", "--split", "half"], "half"),
        (["evaluate", "--mistakes", "-1"], "from 0"),
        (["evaluate", "--mistakes", "all"], "a whole number"),
        (["info", "--checkpoint", CAT], "not a checkpoint"),
        (["convert", CAT, "a.safetensors"], "not a checkpoint"),
        (["convert", str(BUNDLED), "a.pt"], ".safetensors"),
        (["convert", str(BUNDLED), "a.safetensors", "--fact", "seed"], "NAME=VALUE"),
        (["convert", str(BUNDLED), "a.safetensors", "--classes", "a,b"], "10 classes"),
        (["bench", "--batches", "1,none"], "whole number"),
        (["bench", "--data", "."], "holds no test pictures"),
        (["dream"], "dream"),
        (["explain", CAT, "--nonsense"], "--nonsense"),
    ],
)
def test_bad_input_is_answered_by_one_line_and_code_2(capsys, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *argv)
    assert (code, out, len(err)) == (2, "", 1), (out, err)
    assert says in err[0]
    assert [path.name for path in tmp_path.iterdir()] in ([], ["cache"])


@pytest.mark.parametrize("argv", [["--help"], ["explain", "--help"], ["explain", "a.png", "--head", "0"]])
def test_help_and_wrong_arguments_do_not_wait_for_torch(argv):
    code = (
        "import sys; from vit.__main__ import main\n"
        f"try: main({argv!r})\n"
        "finally: assert not {'torch', 'numpy', 'PIL'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=BUNDLED.parents[2]
    )
    assert "Assertion" not in done.stderr
    assert done.returncode == (2 if "0" in argv else 0)


def test_a_real_process_ends_with_2_and_one_line(tmp_path):
    argv = [sys.executable, "-m", "vit", "explain", str(tmp_path / "none.png")]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=BUNDLED.parents[2])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_the_options_are_those_of_the_library():
    parser = build_parser()
    args = parser.parse_args(["explain", "a.png"])
    assert {field.name: getattr(args, field.name) for field in fields(Settings)} == vars(Settings())
    assert Style(args.style, args.strength, args.smooth) == Style()
    for flag, choices in (("--method", METHODS), ("--fusion", FUSIONS), ("--style", get_args(Kind))):
        for choice in choices:
            parser.parse_args(["explain", "a.png", flag, choice])


# ---- evaluate, info, data -------------------------------------------------------------------------------


def test_evaluate_counts_right(capsys, tiny, colours):
    model, checkpoint = load(tiny)
    pictures = load_pictures(colours)
    said = torch.cat([model(prepare(image, checkpoint)) for image in pictures.images]).argmax(dim=1).tolist()
    truly = pictures.labels.tolist()
    code, out, err = run(capsys, "evaluate", "--checkpoint", tiny, "--data", colours, "--json")
    found = json.loads(out)
    assert (code, err) == (0, [])
    assert found["accuracy"] == np.mean([a == b for a, b in zip(said, truly, strict=True)])
    assert found["interval"][0] < found["accuracy"] < found["interval"][1]
    assert found["pictures"] == 12
    pairs = list(zip(truly, said, strict=True))
    assert found["confusion"] == [[pairs.count((t, p)) for p in range(3)] for t in range(3)]
    assert [row["name"] for row in found["classes"]] == ["blue", "green", "red"]
    assert [row["pictures"] for row in found["classes"]] == [5, 4, 3]
    kept = kept_predictions(tiny, checkpoint, pictures.digest)
    assert kept.classes.tolist() == said
    out = run(capsys, "evaluate", "--checkpoint", tiny, "--data", colours)[1]
    assert f"accuracy {found['accuracy']:.2%}" in out


def test_evaluate_names_the_most_confident_mistakes_and_the_calibration(capsys, tiny, colours):
    model, checkpoint = load(tiny)
    pictures = load_pictures(colours)
    said = torch.cat([model(prepare(image, checkpoint)) for image in pictures.images]).softmax(dim=1)
    probabilities, classes = (column.tolist() for column in said.max(dim=1))
    truly = pictures.labels.tolist()
    wrong = sorted((i for i in range(12) if classes[i] != truly[i]), key=lambda i: -probabilities[i])
    assert len(wrong) > 5
    argv = ["evaluate", "--checkpoint", tiny, "--data", colours]
    found = json.loads(run(capsys, *argv, "--json")[1])
    assert len(found["mistakes"]) == 5
    for row, i in zip(found["mistakes"], wrong, strict=False):
        names = checkpoint.class_names[truly[i]], checkpoint.class_names[classes[i]]
        assert (row["class"], row["predicted"]) == names
        assert row["probability"] == pytest.approx(probabilities[i], abs=1e-5)
        # equally sure of several pictures, their order is a matter of rounding
        assert probabilities[row["number"] - 1] == pytest.approx(probabilities[i], abs=1e-5)
        assert pictures.ids[row["number"] - 1] == row["id"]
    right = [a == b for a, b in zip(truly, classes, strict=True)]
    cells = {int(p * 15) for p in probabilities}
    inside = [[i for i in range(12) if int(probabilities[i] * 15) == cell] for cell in sorted(cells)]
    assert [row["pictures"] for row in found["reliability"]] == [len(rows) for rows in inside]
    error = sum(abs(sum(probabilities[i] - right[i] for i in rows)) for rows in inside) / 12
    assert found["calibration_error"] == pytest.approx(error, abs=1e-3)
    out = run(capsys, *argv)[1]
    assert f"calibration error {found['calibration_error']:.2%}" in out
    for row in found["mistakes"]:
        shown = [str(row["number"]), row["id"], row["class"], row["predicted"], f"{row['probability']:.2%}"]
        assert shown in [line.split() for line in out.splitlines()]
    for row in found["reliability"]:
        shown = f"{row['pictures']} {row['confidence']:.2%} {row['accuracy']:.2%}"
        assert any(" ".join(line.split()).endswith(shown) for line in out.splitlines())
    every = json.loads(run(capsys, *argv, "--mistakes", "99", "--json")[1])["mistakes"]
    assert {row["number"] for row in every} == {i + 1 for i in wrong}
    assert json.loads(run(capsys, *argv, "--mistakes", "0", "--json")[1])["mistakes"] == []
    assert out.startswith(run(capsys, *argv, "--mistakes", "0")[1].rstrip())
    assert "mistakes" not in run(capsys, *argv, "--mistakes", "0")[1]


def test_flip_is_said_and_leaves_what_is_kept_as_it_was(capsys, tiny, colours):
    model, checkpoint = load(tiny)
    pictures = load_pictures(colours)
    argv = ["evaluate", "--checkpoint", tiny, "--data", colours]
    flipped = json.loads(run(capsys, *argv, "--flip", "--json", "--mistakes", "12")[1])
    assert kept_predictions(tiny, checkpoint, pictures.digest) is None
    plain = json.loads(run(capsys, *argv, "--json", "--mistakes", "12")[1])
    assert (flipped["flip"], plain["flip"]) == (True, False)
    assert flipped["mistakes"] != plain["mistakes"]
    path = cached_path(checkpoint.id, pictures.digest)
    before = path.read_bytes()
    out = run(capsys, *argv, "--flip")[1]
    assert "mirrored" in out
    assert path.read_bytes() == before
    both = [np.asarray(pictures.images), np.asarray(pictures.images)[:, :, ::-1]]
    logits = sum(torch.cat([model(prepare(image, checkpoint)) for image in images]) for images in both) / 2
    by_number = {row["number"]: row["probability"] for row in flipped["mistakes"]}
    said = logits.softmax(dim=1).max(dim=1)
    assert set(by_number) == {i + 1 for i in range(12) if said.indices[i].item() != pictures.labels[i]}
    for number, probability in by_number.items():
        assert probability == pytest.approx(said.values[number - 1].item(), abs=1e-5)
    assert "mirrored" not in run(capsys, *argv)[1]


@pytest.fixture
def knows_patterns(tmp_path) -> Path:
    """A checkpoint of the made patterns' classes that has learned nothing."""
    torch.manual_seed(0)
    architecture = Architecture(num_classes=10, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=24)
    path = tmp_path / "stripes.safetensors"
    save(architecture.build(), Checkpoint(architecture, PATTERNS, (0.5,) * 3, (0.25,) * 3), path)
    return path


def test_made_patterns_are_a_data_set_for_evaluate_and_explain(capsys, tmp_path, knows_patterns):
    pictures = load_pictures("patterns")
    code, out, err = run(capsys, "evaluate", "--checkpoint", knows_patterns, "--data", "patterns", "--json")
    found = json.loads(out)
    assert (code, err, found["data"]) == (0, [], "patterns test")
    assert found["pictures"] == len(pictures)
    assert [row["pictures"] for row in found["classes"]] == np.bincount(pictures.labels).tolist()
    rows = tmp_path / "rows.npz"
    argv = ["explain", "--checkpoint", knows_patterns, "--data", "patterns", "--npz", rows, "--limit", "7"]
    assert run(capsys, *argv)[0] == 0
    assert np.load(rows)["ids"].tolist() == pictures.ids[:7].tolist()


@pytest.mark.parametrize("command", [("evaluate",), ("explain", "--json", "--data")])
@pytest.mark.parametrize("at_hand", [False, True])
def test_a_checkpoint_of_patterns_is_told_which_data_to_name(
    capsys, knows_patterns, colours, monkeypatch, command, at_hand
):
    if at_hand:
        monkeypatch.setenv("PATCHLIGHT_DATA", str(colours))
    code, out, err = run(capsys, *command, "--checkpoint", knows_patterns)
    assert (code, out, len(err)) == (2, "", 1)
    assert "--data patterns" in err[0]
    assert "vit data" not in err[0]


def test_info_tells_shapes_and_parameters(capsys):
    out = run(capsys, "info")[1]
    assert "Total parameters: 3,189,514\nTrained parameters: 3,189,514\n" in out
    found = json.loads(run(capsys, "info", "--json")[1])
    assert found["shapes"]["attention maps of all layers (B, L, H, N, N)"] == [1, 6, 8, 65, 65]
    assert found["checkpoint_id"] == load(BUNDLED)[1].id
    whole = (
        "patch embedding",
        "CLS token",
        "position embedding",
        "encoder blocks, 6 in all",
        "final norm",
        "head",
    )
    assert sum(found["parts"][part] for part in whole) == found["parameters"] == 3_189_514
    assert sum(stage["parameters"] for stage in found["stages"]) == found["parameters"]
    table = out[out.index("Stages") : out.index("Parameters by part")]
    for stage in found["stages"]:
        for name in (stage["name"], *(f"{stage['name']}, {part['name']}" for part in stage["parts"])):
            assert sum(line.strip().startswith(f"{name} ") for line in table.splitlines()) == 1


def test_data_says_where_and_what(capsys, colours):
    code, out, _ = run(capsys, "data", "--data", colours)
    assert code == 0
    assert "12 pictures in 3 classes" in out
    assert "Not the published CIFAR-10" in out


# ---- convert --------------------------------------------------------------------------------------------


def test_a_state_dict_becomes_a_file_that_says_all(capsys, tmp_path, tiny, colours):
    model, _ = load(tiny)
    torch.save(model.state_dict(), tmp_path / "plain.pth")
    out, card = tmp_path / "out" / "mine.safetensors", tmp_path / "card.md"
    flags = ["--heads", "2", "--size", "32,32", "--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25", "--half"]
    flags += ["--classes", "blue,green,red", "--data", colours, "--card", card]
    flags += ["--fact", "epochs=13.5", "--fact", "seed=0", "--fact", "command=a = b", "--fact", "hash=12e456"]
    code, printed, err = run(capsys, "convert", tmp_path / "plain.pth", out, *flags)
    assert (code, err) == (0, [])
    assert "Assumed" not in printed
    mine, checkpoint = load(out)
    assert out.stat().st_size < 0.75 * tiny.stat().st_size
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].half().float())
    assert checkpoint.assumed == ()
    facts = checkpoint.provenance
    assert (facts["epochs"], facts["seed"], facts["command"], facts["hash"]) == (13.5, 0, "a = b", "12e456")
    assert facts["accuracy_on"].endswith(" test, 12 pictures")
    assert checkpoint.class_names == ("blue", "green", "red")
    again = predict(mine, checkpoint, load_pictures(colours))  # what was measured are the rounded weights
    assert checkpoint.top_logit_percentiles == top_logit_percentiles(again)
    found = json.loads(run(capsys, "evaluate", "--checkpoint", out, "--data", colours, "--json")[1])
    assert found["accuracy"] == facts["accuracy"]
    shipped = _read(shipped_path(out))
    assert shipped.checkpoint_id == checkpoint.id == found["checkpoint_id"]
    assert measure(shipped, checkpoint.class_names).accuracy == found["accuracy"]
    assert f"**{found['accuracy']:.2%}**" in card.read_text()


def test_what_was_assumed_and_not_measured_is_said(capsys, tmp_path, tiny):
    torch.save(load(tiny)[0].state_dict(), tmp_path / "plain.pth")
    out = tmp_path / "mine.safetensors"
    code, printed, _ = run(capsys, "convert", tmp_path / "plain.pth", out)
    assert code == 0
    assert "8 heads" in printed
    assert "Not measured" in printed
    checkpoint = load(out)[1]
    assert "8 heads" in checkpoint.provenance["assumed"]
    assert checkpoint.accuracy is None
    assert not shipped_path(out).exists()
    err = run(capsys, "explain", CAT, "--checkpoint", tmp_path / "plain.pth")[2]
    assert len(err) == 1
    assert "8 heads" in err[0]


def test_an_accuracy_does_not_outlive_the_weights_it_was_measured_on(capsys, tmp_path, tiny, colours):
    first, exact, rounded = (tmp_path / f"{name}.safetensors" for name in ("first", "exact", "rounded"))
    run(capsys, "convert", tiny, first, "--data", colours)
    run(capsys, "convert", first, exact)
    run(capsys, "convert", first, rounded, "--half")
    assert load(exact)[1].accuracy == load(first)[1].accuracy is not None
    assert load(rounded)[1].accuracy is None


# ---- the bundle -----------------------------------------------------------------------------------------


def test_the_bundled_checkpoint_its_predictions_and_its_card_agree():
    _, checkpoint = load(BUNDLED)
    card = (BUNDLED.parent / "README.md").read_text()
    shipped = _read(shipped_path(BUNDLED))
    metrics = measure(shipped, checkpoint.class_names)
    assert shipped.checkpoint_id == checkpoint.id
    assert checkpoint.assumed == ()
    assert metrics.pictures == 10_000
    assert metrics.accuracy == checkpoint.accuracy
    assert 0.84 < metrics.accuracy < 0.87
    assert f"**{metrics.accuracy:.2%}**" in card
    assert checkpoint.id in card
    for row in metrics.classes:
        assert f"| {row.name} | 1,000 | {row.precision:.2%} | {row.recall:.2%} | {row.f1:.2%} |" in card
    for name in ("command", "data", "epochs", "seed"):
        assert str(checkpoint.provenance[name]) in card
    assert BUNDLED.stat().st_size < 7_000_000
    assert shipped_path(BUNDLED).stat().st_size < 150_000


@pytest.mark.slow
def test_evaluate_gives_the_cards_accuracy_on_all_10_000(capsys, own_cache):
    if not own_cache:
        pytest.skip("PATCHLIGHT_DATA names no folder with CIFAR-10")
    found = json.loads(run(capsys, "evaluate", "--data", own_cache, "--json")[1])
    assert found["pictures"] == 10_000
    assert found["accuracy"] == load(BUNDLED)[1].accuracy


# ---- progress -------------------------------------------------------------------------------------------


def test_the_bar_is_one_line_on_a_terminal_and_nearly_silent_elsewhere(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    shown, log = StringIO(), StringIO()
    for stream, terminal in ((shown, True), (log, False)):
        with Bar(stream, terminal) as progress:
            for done in range(25):
                progress(done, 100, "pictures")
    assert shown.getvalue().count("\n") == 1
    assert "pictures: 24 of 100 (24%), 1.0/s, 76 s left" in shown.getvalue()
    assert log.getvalue().count("\n") == 2
    assert "\r" not in log.getvalue()


def test_a_checkpoint_of_one_channel_serves_every_command(capsys, tmp_path, colours):
    architecture = Architecture(
        num_classes=3, in_channels=1, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=8
    )
    path = tmp_path / "grey.safetensors"
    save(architecture.build(), Checkpoint(architecture, tuple(sorted(COLOURS)), (0.5,), (0.25,)), path)
    assert run(capsys, "explain", CAT, "--checkpoint", path)[0] == 0
    assert run(capsys, "evaluate", "--checkpoint", path, "--data", colours)[0] == 0
    assert run(capsys, "info", "--checkpoint", path)[0] == 0


@pytest.mark.parametrize(
    "argv",
    [
        ("explain", CAT, "--checkpoint", ""),
        ("explain", CAT, "--limit", "3"),
        ("explain", CAT, SHIP, "--out", "both.png"),
        ("evaluate", "--data", ""),
        ("evaluate", "--data", "~nosuchuser/x"),
        ("evaluate", "--data", "a" * 300),
        ("evaluate", "--data", "nowhere"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_exit_code_2(capsys, argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *argv)
    assert (code, out, len(err)) == (2, "", 1), err
    assert list(tmp_path.iterdir()) == []


def test_a_download_is_never_mixed_into_what_somebody_else_keeps(capsys, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "letter.txt").write_text("dear")
    code, _, err = run(capsys, "data", "--data", folder)
    assert code == 2
    assert "holds other files" in err[0]
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]
