"""Sizes and devices that do not exist are refused in words that say what would work.

Run: pytest tests/test_sizes.py (some seconds).
"""

import math
import re

import pytest
import torch
from plain_vit import small_model

from vit.device import pick_device
from vit.model import VisualTransformer


def nearest(whole: int, part: int) -> tuple[set[int], set[int]]:
    """The divisors of `whole` next to `part`, and the multiples of `part` next to `whole`."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    parts = {max(n for n in divisors if n < part), min((n for n in divisors if n > part), default=whole)}
    return parts, {whole // part * part, (whole // part + 1) * part} - {0}


@pytest.mark.parametrize(
    ("sizes", "whole_name", "whole", "part_name", "part"),
    [
        ({"img_size": 30}, "img_size", 30, "patch_size", 4),
        ({"img_size": 32, "patch_size": 5}, "img_size", 32, "patch_size", 5),
        ({"img_size": 32, "patch_size": 64}, "img_size", 32, "patch_size", 64),
        ({"img_size": (32, 30)}, "img_size", 30, "patch_size", 4),
        ({"img_size": (31, 32)}, "img_size", 31, "patch_size", 4),
        ({"embed_dim": 256, "num_heads": 7}, "dim", 256, "num_heads", 7),
        ({"embed_dim": 100, "num_heads": 8}, "dim", 100, "num_heads", 8),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(
    sizes, whole_name, whole, part_name, part
):
    with pytest.raises(ValueError, match=rf"\b{whole_name} {whole}\b.*\b{part_name} {part}\b") as caught:
        VisualTransformer(10, **sizes)
    said = {
        name: re.findall(rf"{name} (\d+)(?: or (\d+))? for", str(caught.value))[0]
        for name in (whole_name, part_name)
    }
    parts, wholes = nearest(whole, part)
    assert sorted(filter(None, said[part_name])) == sorted(map(str, parts))
    assert sorted(filter(None, said[whole_name])) == sorted(map(str, wholes))


def test_seven_heads_of_256_are_answered_with_4_or_8():
    with pytest.raises(ValueError, match="num_heads 4 or 8 for dim 256"):
        VisualTransformer(10, num_heads=7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_classes": 0},
        {"img_size": 0},
        {"img_size": (32, -4)},
        {"patch_size": 0},
        {"patch_size": 4.0},
        {"in_channels": 0},
        {"embed_dim": 0},
        {"num_layers": 0},
        {"num_heads": 0},
        {"mlp_dim": -1},
        {"dropout": 1.0},
        {"dropout": -0.1},
        {"dropout": math.nan},
        {"init": "large"},
    ],
)
def test_impossible_sizes_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        VisualTransformer(**({"num_classes": 10} | wrong))


@pytest.mark.parametrize(
    "shape", [(2, 3, 16, 15), (2, 3, 8, 32), (2, 1, 16, 16), (3, 16, 16), (70, 3, 32, 32)]
)
@pytest.mark.parametrize("return_attn", [False, True])
def test_pictures_of_another_shape_are_refused_with_both_shapes(shape, return_attn):
    model = small_model()
    with torch.no_grad(), pytest.raises(ValueError, match="3 x 16 x 16") as caught:
        model(torch.zeros(shape), return_attn)
    assert str(shape) in str(caught.value)


def test_pick_device_takes_what_is_here_and_says_what_is_not(monkeypatch):
    assert pick_device("cpu") == torch.device("cpu")
    for nonsense in ("nonsense", "", "cpu:x"):
        with pytest.raises(ValueError, match=f"{nonsense!r} is not a device"):
            pick_device(nonsense)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device() == torch.device("cpu")
    for absent in ("cuda", "cuda:0", "mps", "meta", "cpu:3"):
        with pytest.raises(ValueError, match=f"'{absent}' is not on this machine; it has cpu"):
            pick_device(absent)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device() == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device() == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="cuda, mps, cpu"):
        pick_device("cuda:2")
