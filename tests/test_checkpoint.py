"""Checkpoints come back as they were saved, strangers' weights load, and no file does harm.

Run: pytest tests/test_checkpoint.py (some ten seconds).
"""

import hashlib
import json
import os
import pickle
import struct
import tempfile
import time
import zipfile
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import inf, nan
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_vit import pictures, plain_vit, small_model
from safetensors.torch import save_file
from synthetic import made, write_classes
from torch.testing import assert_close

import vit.checkpoint
from vit.architecture import Architecture
from vit.checkpoint import Checkpoint, CheckpointError, data_set, find_checkpoints, load, save
from vit.patterns import CLASSES as PATTERN_CLASSES
from vit.sources import CLASSES as CIFAR_CLASSES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on sparse tensors and odd pickles

SIZES = {"num_classes": 3, "img_size": (8, 8), "embed_dim": 16, "num_layers": 2, "num_heads": 2, "mlp_dim": 8}
CHECKPOINT = Checkpoint(
    architecture=Architecture(**SIZES),
    class_names=("ant", "<b>bee</b>", "čmelák"),
    mean=(0.1, 0.2, 0.3),
    std=(0.4, 0.5, 0.6),
    provenance={"command": "python -m train", "epochs": 3, "accuracy": 0.75},
    top_logit_percentiles=tuple(k / 8 for k in range(101)),
)
ALL_SAID = {
    "num_heads": 2,
    "img_size": (8, 8),
    "class_names": ("a", "b", "c"),
    "mean": (0.1, 0.2, 0.3),
    "std": (1, 2, 3),
}


@pytest.fixture(scope="module")
def model():
    return small_model(**SIZES)


@pytest.fixture
def tensors(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def refused(path: Path, **arguments) -> str:
    """What the CheckpointError says: one sentence that names the file."""
    with pytest.raises(CheckpointError) as caught:
        load(path, **{"device": "cpu", "num_heads": 2} | arguments)
    text = str(caught.value)
    assert text.endswith(".")
    assert ". " not in text
    assert text.isprintable()
    assert path.name in text
    return text


def written(folder: Path, tensors: dict, facts) -> Path:
    """A safetensors file like ours, with any metadata at all."""
    path = folder / "weights.safetensors"
    metadata = {"patchlight": facts if isinstance(facts, str) else json.dumps(facts)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    return path


# --- our own files


def test_a_saved_model_comes_back_exactly(model, tmp_path):
    path = tmp_path / "new folder" / "mine.safetensors"
    saved = save(model, CHECKPOINT, path)
    loaded, checkpoint = load(path, device="cpu")
    assert checkpoint == saved
    assert checkpoint.id == hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    assert checkpoint == replace(CHECKPOINT, name="mine.safetensors", id=checkpoint.id)
    assert checkpoint.accuracy == 0.75
    assert not loaded.training
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert_close(loaded(pictures(2, 8, 8)), model(pictures(2, 8, 8)), rtol=0, atol=0)
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208, hidden files too


def test_half_precision_rounds_to_float16_and_halves_the_file(model, tmp_path):
    whole, half = tmp_path / "whole.safetensors", tmp_path / "half.safetensors"
    save(model, CHECKPOINT, whole)
    save(model, CHECKPOINT, half, half=True)
    loaded, checkpoint = load(half, device="cpu")
    assert checkpoint.class_names == CHECKPOINT.class_names
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.float32
        assert_close(tensor, model.state_dict()[name].half().float(), rtol=0, atol=0)
    weights_bytes = 2 * sum(p.numel() for p in model.parameters())
    assert whole.stat().st_size - half.stat().st_size == pytest.approx(weights_bytes, abs=200)


@pytest.mark.parametrize("dropout", [0, 0.0, 0.3])
def test_dropout_is_remembered_for_those_who_train_on(dropout, model, tmp_path):
    save(model, replace(CHECKPOINT, architecture=Architecture(**SIZES, dropout=dropout)), tmp_path / "x")
    loaded, checkpoint = load(tmp_path / "x", device="cpu")
    assert checkpoint.architecture.dropout == loaded.dropout.p == dropout


def test_a_loaded_model_can_be_trained_and_loading_draws_no_random_numbers(model, tmp_path):
    save(model, CHECKPOINT, tmp_path / "x.safetensors")
    before = torch.get_rng_state()
    loaded, _ = load(tmp_path / "x.safetensors", device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    loaded(pictures(2, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


@pytest.mark.parametrize("fails_at", ["metadata", "write", "rename"])
def test_a_save_that_fails_leaves_the_old_file(fails_at, model, tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    save(model, CHECKPOINT, path)
    before = path.read_bytes()

    def unwritable(tensors, metadata):
        return "text, at which writing bytes to the opened file fails"

    def unrenamed(self, target):
        raise OSError("in use")

    checkpoint = CHECKPOINT
    if fails_at == "metadata":
        checkpoint = replace(CHECKPOINT, provenance={"not JSON": object()})
    elif fails_at == "write":
        monkeypatch.setattr(vit.checkpoint, "serialise", unwritable)
    else:
        monkeypatch.setattr(Path, "replace", unrenamed)
    with pytest.raises((OSError, TypeError)):
        save(small_model(seed=9, **SIZES), checkpoint, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]  # noqa: PTH208, hidden files too


def test_the_newest_checkpoints_come_first(tmp_path, monkeypatch):
    names = ["a.safetensors", "run/b.safetensors", "run2/c.safetensors", "d.safetensors"]
    for age, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (10**9 - age, 10**9 - age))
    for other in (".x.safetensors.1.part", ".hidden.safetensors", "run/model.pt"):
        (tmp_path / other).touch()
    (tmp_path / "folder.safetensors").mkdir()
    newest_first = [tmp_path / name for name in names]
    assert find_checkpoints(tmp_path) == newest_first
    monkeypatch.setenv("PATCHLIGHT_RUNS", str(tmp_path))
    assert find_checkpoints() == newest_first
    assert find_checkpoints(tmp_path / "run") == newest_first[1:2]
    monkeypatch.delenv("PATCHLIGHT_RUNS")
    monkeypatch.chdir(tmp_path)
    assert find_checkpoints() == []
    (tmp_path / "run").rename("runs")
    assert find_checkpoints() == [Path("runs/b.safetensors")]


def test_a_run_s_checkpoints_stay_together_and_what_it_resumes_from_is_none(tmp_path):
    ages_s = {
        "a/checkpoints/best": 50,
        "a/checkpoints/last": 10,
        "a/checkpoints/epoch-0002": 20,
        "a/checkpoints/epoch-0001": 30,
        "b": 15,
        "c/checkpoints/best": 40,
        "c/checkpoints/last": 40,
        "c/mine": 60,
    }
    left_out = ["a/checkpoints/resume", "a/checkpoints/resume.prev", "a/checkpoints/.resume-ready", "resume"]
    for name in [*ages_s, *left_out, "a/deeper/checkpoints/last", "c/checkpoints/.last"]:
        path = tmp_path / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (10**9 - ages_s.get(name, 99),) * 2)
    found = [path.relative_to(tmp_path).with_suffix("").as_posix() for path in find_checkpoints(tmp_path)]
    assert found == list(ages_s)
    (tmp_path / "a").rename(tmp_path / "runs")  # a run itself may be named as the runs folder
    assert [path.stem for path in find_checkpoints(tmp_path / "runs")][:2] == ["best", "last"]


FLOWERS = ("daisy", "rose")


@pytest.fixture
def flower_run(tmp_path, monkeypatch):
    """A run on a folder of two classes; returns its checkpoint's place and the folder."""
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PATCHLIGHT_DATA", raising=False)
    write_classes(tmp_path / "flowers" / "train", *made(4, 0), names=[*FLOWERS, *FLOWERS])
    config = tmp_path / "run" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({"config": {"data": str(tmp_path / "flowers")}}))
    return tmp_path / "run" / "checkpoints" / "last.safetensors", tmp_path / "flowers"


def test_the_data_set_of_a_checkpoint(flower_run):
    path, folder = flower_run
    assert data_set(replace(CHECKPOINT, class_names=CIFAR_CLASSES), path) == "cifar10"
    assert data_set(replace(CHECKPOINT, class_names=PATTERN_CLASSES), path) == "patterns"
    of_flowers = replace(CHECKPOINT, class_names=FLOWERS)
    assert data_set(of_flowers, path) == str(folder)
    assert data_set(of_flowers, str(path.parents[1] / "copy.safetensors")) == str(folder)
    assert data_set(of_flowers, path.parents[2] / "elsewhere.safetensors") is None
    assert data_set(replace(CHECKPOINT, class_names=("rose", "daisy")), path) is None
    folder.rename(folder.with_name("gone"))
    assert data_set(of_flowers, path) is None


@pytest.mark.parametrize(
    "config",
    [
        None,
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"null",
        b'{"config": []}',
        b'{"config": {}}',
        *(json.dumps({"config": {"data": data}}).encode() for data in (
            None, 3, ["flowers"], "", "patterns", "cifar10", "no/such/folder", "~nosuchuser/x", "x" * 5000,
            "a\0b", "\ud800",
        )),
    ],
    ids=lambda config: repr(config)[:24],
)  # fmt: skip
def test_a_damaged_config_tells_no_data_set(flower_run, config):
    path, _ = flower_run
    (path.parents[1] / "config.json").unlink()
    if config is not None:
        (path.parents[1] / "config.json").write_bytes(config)
    assert data_set(replace(CHECKPOINT, class_names=FLOWERS), path) is None


# --- plain state dicts with the tutorial's names


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "under", [(), ("state_dict",), ("model_state_dict",), ("model",), ("state_dict", "model")]
)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_a_state_dict_loads_with_the_same_logits(prefix, under, zipped, tensors, tmp_path):
    content = {prefix + name: tensor for name, tensor in tensors.items()}
    for key in reversed(under):
        content = {key: content, "epoch": 3}
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    loaded, _ = load(tmp_path / "x.pth", device="cpu", num_heads=2)
    x = pictures(2, 8, 8)
    assert_close(loaded(x), plain_vit(tensors, x, num_heads=2)[0], rtol=1e-5, atol=1e-5)


def test_a_state_dict_in_safetensors_loads_too(tensors, tmp_path):
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "x.safetensors")
    loaded, _ = load(tmp_path / "x.safetensors", device="cpu", num_heads=2)
    assert_close(dict(loaded.state_dict()), tensors, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(dtype, tensors, tmp_path):
    torch.save({name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / "x.pt")
    loaded, _ = load(tmp_path / "x.pt", device="cpu", num_heads=2)
    for name, tensor in loaded.state_dict().items():
        assert_close(tensor, tensors[name].to(dtype).float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_classes": 1, "img_size": (6, 6), "patch_size": 2, "in_channels": 1, "embed_dim": 8},
        {"num_classes": 12, "img_size": (4, 4), "num_layers": 3, "mlp_dim": 40},
        {"num_classes": 10, "img_size": (12, 12), "patch_size": 3, "in_channels": 4, "embed_dim": 24},
    ],
)
def test_sizes_are_read_off_the_tensors(sizes, tmp_path):
    architecture = Architecture(**{"embed_dim": 16, "num_layers": 1, "num_heads": 8, "mlp_dim": 5} | sizes)
    torch.save(architecture.build().state_dict(), tmp_path / "x.pt")
    assert load(tmp_path / "x.pt", device="cpu")[1].architecture == architecture


def test_what_a_state_dict_does_not_say_is_assumed_and_listed(tensors, tmp_path):
    path = tmp_path / "x.pt"
    torch.save(tensors, path)
    _, checkpoint = load(path, device="cpu")
    assert checkpoint.architecture.num_heads == 8
    assert (checkpoint.mean, checkpoint.std) == ((0.5,) * 3, (0.5,) * 3)
    assert checkpoint.class_names == ("class 1", "class 2", "class 3")
    assert checkpoint.assumed == (
        "pictures of 8 x 8 px",
        "8 heads",
        "no class names",
        "mean 0.5",
        "standard deviation 0.5",
    )
    for name, value in ALL_SAID.items():
        _, told = load(path, device="cpu", **{name: value})
        assert len(told.assumed) == 4
        assert set(told.assumed) < set(checkpoint.assumed)
        assert getattr(told, name, None) == value or getattr(told.architecture, name) == value
    assert load(path, device="cpu", **ALL_SAID)[1].assumed == ()


def test_ten_classes_are_taken_for_cifar10s(tmp_path):
    torch.save(small_model(**SIZES | {"num_classes": 10}).state_dict(), tmp_path / "x.pt")
    _, checkpoint = load(tmp_path / "x.pt", device="cpu")
    assert checkpoint.class_names[::9] == ("airplane", "truck")
    assert "the class names of CIFAR-10" in checkpoint.assumed


def test_what_the_caller_says_beats_the_file(model, tmp_path):
    save(model, CHECKPOINT, tmp_path / "x")
    _, checkpoint = load(tmp_path / "x", device="cpu", **ALL_SAID | {"num_heads": 4})
    assert checkpoint.architecture == replace(CHECKPOINT.architecture, num_heads=4)
    assert (checkpoint.class_names, checkpoint.mean, checkpoint.std) == (
        ("a", "b", "c"),
        (0.1, 0.2, 0.3),
        (1, 2, 3),
    )


def test_an_oblong_grid_is_asked_for_and_taken(tmp_path):
    for size in ((8, 12), (8, 32)):  # 2 x 3 patches are no square, 2 x 8 could be 4 x 4
        oblong, x = small_model(**SIZES | {"img_size": size}), pictures(2, *size)
        torch.save(oblong.state_dict(), tmp_path / "x.pt")
        loaded, checkpoint = load(tmp_path / "x.pt", device="cpu", num_heads=2, img_size=size)
        assert checkpoint.architecture.grid == loaded.grid == (size[0] // 4, size[1] // 4)
        assert_close(loaded(x), oblong(x))
    assert load(tmp_path / "x.pt", device="cpu")[1].architecture.img_size == (16, 16)
    torch.save(small_model(**SIZES | {"img_size": (8, 12)}).state_dict(), tmp_path / "x.pt")
    assert "img_size" in refused(tmp_path / "x.pt")


def test_loaded_weights_share_no_memory(tensors, tmp_path):
    tensors["norm.bias"] = tensors["norm.weight"]
    torch.save(tensors, tmp_path / "x.pt")
    loaded, _ = load(tmp_path / "x.pt", device="cpu")
    with torch.no_grad():
        loaded.norm.bias.zero_()
    assert_close(loaded.norm.weight.detach(), tensors["norm.weight"])


@pytest.mark.parametrize(
    "device", ["nonsense", "", "cuda:99", "meta", "cpu:1", torch.device("cuda:99"), torch.device("meta")]
)
def test_a_device_that_is_not_there_is_a_value_error(device, model, tmp_path):
    save(model, CHECKPOINT, tmp_path / "x")
    with pytest.raises(ValueError, match="device") as caught:
        load(tmp_path / "x", device=device)
    assert not isinstance(caught.value, CheckpointError)


# --- files that do not fit: metadata


def test_class_names_are_only_text(tensors, tmp_path):
    names = ["<script>alert(1)</script>", "{{7*7}}", "$\\frac12$"]
    _, checkpoint = load(written(tmp_path, tensors, {"class_names": names}), device="cpu")
    assert checkpoint.class_names == tuple(names)


@pytest.mark.parametrize(
    "facts",
    ["", "{", "nonsense", "[" * 100_000, '{"a":' * 100_000, "[]", "3", "null", '"text"', "9" * 5000,
     '{"class_names": ["a", "b", "\\ud800"]}',
     '{"architecture": {"num_heads": ' + "[" * 900 + "]" * 900 + "}}"],
)  # fmt: skip
def test_unreadable_metadata_is_refused(facts, tensors, tmp_path):
    refused(written(tmp_path, tensors, facts), num_heads=None)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("class_names", [["a", "b"], ["a"] * 4, [], "abc", {"a": 1}, ["a", "b", 3], ["a", "b", ""], 3,
                         ["a", "b", None], ["a", "b", "c" * 101], [["a"], ["b"], ["c"]]]),
        ("mean", [[0.5] * 2, [0.5] * 4, [nan] * 3, [inf] * 3, ["0.5"] * 3, "abc", 0.5, [None] * 3, [True] * 3,
                  [1e30] * 3, [10**400] * 3, {}, []]),
        ("std", [[0, 0, 0], [1, 1, 0], [1, 1, -1], [1, 1, 1e-300], [nan] * 3, ["1"] * 3, [1, 1]]),
        ("num_heads", [-1, 0, True, "8", 7, 10**9, 2.0, 1e9, [2], {"a": 2}, nan, "\n<b>"]),
        ("img_size", [8, "88", [8], [8, 8, 8], [8.0, 8.0], [16, 16], [9, 8], [0, 0], [-8, -8], [10**8, 10**8],
                      [199_999_999, 4], [4, 199_999_999], [None, None]]),
        ("top_logit_percentiles", [[1.0] * 100, [nan] * 101, "x" * 101, 3, ["1"] * 101]),
        ("architecture", ["text", 3, [1], {"num_layers": 3}, {"num_heads": 0}, {"embed_dim": 8},
                          {"mlp_dim": 9}, {"num_classes": 2}, {"patch_size": 2}, {"in_channels": 1},
                          {"img_size": [16, 16]}]),
    ],
)  # fmt: skip
def test_wrong_metadata_is_refused(name, values, tensors, tmp_path):
    started = time.monotonic()
    for value in values:
        facts = {"architecture": {"num_heads": 2}, name: value}
        text = refused(written(tmp_path, tensors, facts), num_heads=None)
        assert len(text) < 300, f"{name} {value!r:.40}"
    assert time.monotonic() - started < 10  # no number in a file may keep the machine busy


def test_odd_notes_in_the_metadata_are_left_out(tensors, tmp_path):
    notes = {
        "accuracy": nan,
        "list": [1],
        "deep": {"a": 1},
        "long": "x" * 5000,
        "seed": 4,
        "k" * 99: "v",
        "n": inf,
    }
    _, checkpoint = load(written(tmp_path, tensors, {"provenance": notes}), device="cpu")
    assert checkpoint.provenance == {"long": "x" * 2000, "seed": 4, "k" * 40: "v"}
    assert checkpoint.accuracy is None
    for odd in ("text", 3, [1], None):
        assert load(written(tmp_path, tensors, {"provenance": odd}), device="cpu")[1].provenance == {}


# --- files that do not fit: tensors


def one_number(*shape: int) -> torch.Tensor:
    return torch.zeros(1).expand(shape)


WRONG_TENSORS = {
    "missing": ({"norm.bias": None}, "'norm.bias' is missing"),
    "no patches": ({"patch_embed.conv.weight": None}, "patch_embed.conv.weight"),
    "no head": ({"mlp_head.1.weight": None}, "mlp_head.1.weight"),
    "extra": ({"more": torch.zeros(2)}, "'more' belongs to no model"),
    "odd name": ({"\ud800\n<b>": torch.zeros(2)}, "belongs to no model"),
    "shape": ({"norm.bias": torch.zeros(15)}, "is 15, where 16 is needed"),
    "one number": ({"norm.bias": torch.zeros(())}, "a single number"),
    "transposed": ({"encoder_blocks.1.attn.qkv.weight": torch.zeros(16, 48)}, "16 x 48"),
    "flat": ({"pos_embed": torch.zeros(5, 16)}, "impossible shape"),
    "no room for patches": ({"pos_embed": torch.zeros(1, 1, 16)}, "img_size"),
    "no classes": ({"mlp_head.1.weight": torch.zeros(0, 16)}, "impossible shape"),
    "no width": ({"patch_embed.conv.weight": torch.zeros(0, 3, 4, 4)}, "impossible shape"),
    "whole numbers": ({"norm.bias": torch.zeros(16, dtype=torch.int64)}, "no floating point"),
    "complex": ({"norm.bias": torch.zeros(16, dtype=torch.complex64)}, "no floating point"),
    "four bits": ({"norm.bias": torch.zeros(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, "floating"),
    "NaN": ({"norm.bias": torch.full((16,), nan)}, "not finite"),
    "infinity": ({"norm.bias": torch.full((16,), -inf)}, "not finite"),
    "beyond float32": ({"norm.bias": torch.full((16,), 1e300, dtype=torch.float64)}, "not finite"),
    "sparse": ({"norm.bias": torch.zeros(16).to_sparse()}, "not an ordinary tensor"),
    "without numbers": ({"norm.bias": torch.zeros(16, device="meta")}, "not an ordinary tensor"),
    "spread": ({"mlp_head.1.weight": one_number(10**6, 16), "mlp_head.1.bias": one_number(10**6)}, "room"),
    "spread wide": ({"patch_embed.conv.weight": one_number(10**6, 3, 4, 4)}, "room"),
    "gap": ({"encoder_blocks.3.norm1.bias": torch.zeros(16)}, "encoder_blocks.2"),
    "absurd block": ({"encoder_blocks.99999999999999999999.norm1.bias": torch.zeros(16)}, "belongs to no"),
    "not a tensor": ({"norm.bias": [0.0] * 16}, "not an ordinary tensor"),
    "number as name": ({3: torch.zeros(2)}, "'3'"),
    "bytes as name": ({b"x": torch.zeros(2)}, "b'x'"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), WRONG_TENSORS.values(), ids=WRONG_TENSORS.keys())
def test_wrong_tensors_are_refused(changes, says, tensors, tmp_path):
    kept = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    torch.save(kept, tmp_path / "x.pt")
    assert says in refused(tmp_path / "x.pt")


def test_a_nested_tensor_is_refused(tensors, tmp_path):
    tensors["norm.bias"] = torch.nested.nested_tensor([torch.zeros(8), torch.zeros(7)])
    torch.save(tensors, tmp_path / "x.pt")
    assert "not an ordinary tensor" in refused(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["NaN", "missing", "extra", "shape", "whole numbers", "gap", "absurd block"])
def test_wrong_tensors_are_refused_in_safetensors_too(name, tensors, tmp_path):
    changes, says = WRONG_TENSORS[name]
    kept = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    assert says in refused(written(tmp_path, kept, {}))


def test_very_many_empty_layers_are_refused_within_seconds(tensors, tmp_path):
    empty = {f"encoder_blocks.{depth}.x": torch.zeros(0) for depth in range(10_000)}
    started = time.monotonic()
    refused(written(tmp_path, tensors | empty, {}))
    assert time.monotonic() - started < 15


# --- files that are no checkpoints at all


class Evil:
    """Runs a command when unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("saved_as", ["pickle 0", "pickle 2", "pickle 4", "zip", "legacy"])
def test_no_code_of_a_file_is_run(saved_as, tensors, tmp_path):
    path, marker = tmp_path / "x.pt", tmp_path / "was here"
    content = tensors | {"evil": Evil(f'mkdir "{marker}"')}
    if saved_as.startswith("pickle"):
        path.write_bytes(pickle.dumps(content["evil"], protocol=int(saved_as[-1])))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=saved_as == "zip")
    refused(path)
    assert not marker.exists()
    if saved_as.startswith("pickle"):
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert marker.exists()  # else nothing was tested


@pytest.mark.parametrize("zipped", [True, False])
def test_a_whole_pickled_model_is_refused_with_what_to_do(zipped, model, tmp_path):
    torch.save(model, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert "torch.save(model.state_dict(), …)" in refused(tmp_path / "x.pt")


@pytest.mark.parametrize("content", [[], [1, 2], torch.zeros(3), 3, "text", None, {}, {"state_dict": {}}])
def test_a_torch_file_without_a_state_dict_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "x.pt")
    refused(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes"),
        (b"{", "not a checkpoint"),
        ("Žluťoučký kůň, and so on".encode(), "not a checkpoint"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a checkpoint"),
        (b"\x80", "damaged"),
        (b"PK", "damaged"),
        (b"PK\x03\x04" + bytes(100), "damaged"),
        (bytes(1000), "not a checkpoint"),
        (struct.pack("<Q", 2**60) + b'{"a": 1}', "damaged"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "damaged"),
        (struct.pack("<Q", 2) + b"{}", "not a Vision Transformer"),
    ],
)
def test_other_files_are_refused(content, says, tmp_path):
    (tmp_path / "x.bin").write_bytes(content)
    assert says in refused(tmp_path / "x.bin")


@pytest.mark.parametrize("name", ["safetensors", "zip", "legacy"])
def test_a_file_cut_short_anywhere_is_refused(name, model, tmp_path):
    path = tmp_path / "x"
    whole = small_files()[name]
    for length in {*range(1, 40), *range(40, 400, 19), *range(60, len(whole), 311), len(whole) - 1}:
        path.write_bytes(whole[:length])
        refused(path)


def test_an_archive_that_would_grow_is_refused_before_it_does(tensors, tmp_path):
    torch.save(tensors | {"more": torch.zeros(10**6)}, tmp_path / "x.pt")
    with (
        zipfile.ZipFile(tmp_path / "x.pt") as archive,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in archive.namelist():
            bomb.writestr(name, archive.read(name))
    assert (tmp_path / "bomb.pt").stat().st_size < 10**5
    assert "room" in refused(tmp_path / "bomb.pt")


@pytest.mark.parametrize("name", ["missing.safetensors", "a\0b", ".", "x" * 300])
def test_a_path_to_no_file_is_refused(name, tmp_path):
    with pytest.raises(CheckpointError, match=r"^There is no checkpoint file at|cannot be read"):
        load(tmp_path / name, device="cpu")


def test_a_file_that_may_not_be_read_is_refused(model, tmp_path, monkeypatch):
    save(model, CHECKPOINT, tmp_path / "x.safetensors")

    def forbidden(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    assert "Permission denied" in refused(tmp_path / "x.safetensors")


# --- any bytes at all


@cache
def small_files() -> dict[str, bytes]:
    """The same tiny weights as safetensors, as torch's zip, and as what torch wrote before 1.6."""
    architecture = Architecture(3, (8, 8), embed_dim=4, num_layers=1, num_heads=2, mlp_dim=4)
    tiny = architecture.build()
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        save(tiny, replace(CHECKPOINT, architecture=architecture), path)
        files["safetensors"] = path.read_bytes()
        for name in ("zip", "legacy"):
            torch.save(tiny.state_dict(), path, _use_new_zipfile_serialization=name == "zip")
            files[name] = path.read_bytes()
    return files


def loads_or_is_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.bin"
        path.write_bytes(content)
        with suppress(CheckpointError):
            load(path, device="cpu", num_heads=2)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([b"", b"\x80", b"\x80\x02", b"PK\x03\x04", struct.pack("<Q", 40) + b"{"]),
    st.binary(max_size=200),
)
def test_random_bytes_load_or_are_refused(start, rest):
    loads_or_is_refused(start + rest)


@pytest.mark.parametrize("name", ["safetensors", "zip", "legacy"])
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_load_or_are_refused(name, data):
    content = bytearray(small_files()[name])
    structure = st.integers(0, 1500) if name != "zip" else st.integers(0, len(content) - 1)
    flips = st.lists(st.tuples(structure, st.integers(1, 255)), min_size=1, max_size=4)
    for place, change in data.draw(flips):
        content[place] ^= change
    loads_or_is_refused(bytes(content))


def test_equal_class_names_and_equal_tensor_names_are_refused(tensors, tmp_path):
    assert "different texts" in refused(
        written(tmp_path, tensors, ALL_SAID | {"class_names": ["a", "a", "b"]})
    )
    twice = tensors | {"module.cls_token": tensors["cls_token"].clone()}
    assert "twice" in refused(written(tmp_path, twice, ALL_SAID))


def test_codes_that_steer_a_terminal_never_come_back(tensors, tmp_path):
    facts = {"provenance": {"data": "red\x1b[2J\x07", "no\x1bte": "a\nb"}, **ALL_SAID}
    _, checkpoint = load(written(tmp_path, tensors, facts), device="cpu")
    assert checkpoint.provenance == {"data": "red[2J", "note": "a b"}
    refused(written(tmp_path, tensors, ALL_SAID | {"class_names": ["a", "b", "\x1b[2J"]}))


def test_a_file_replaced_while_it_is_read_keeps_weights_and_id_together(tmp_path, monkeypatch):
    """As a trainer does with its last checkpoint: the id must be that of the weights that were read."""
    path, newer = tmp_path / "last.safetensors", tmp_path / "newer.safetensors"
    for seed, file in ((0, path), (1, newer)):
        torch.manual_seed(seed)
        architecture = Architecture(10, embed_dim=16, num_layers=1, num_heads=2, mlp_dim=16)
        save(architecture.build(), Checkpoint(architecture, CIFAR_CLASSES, (0.5,) * 3, (0.5,) * 3), file)
    read, times = vit.checkpoint._read, []

    def read_and_be_late(which):
        found = read(which)
        if not times:
            newer.replace(path)
        times.append(which)
        return found

    monkeypatch.setattr(vit.checkpoint, "_read", read_and_be_late)
    model, checkpoint = load(path, device="cpu")
    monkeypatch.undo()
    again, same = load(path, device="cpu")
    assert checkpoint.id == same.id
    assert torch.equal(model.cls_token, again.cls_token)
