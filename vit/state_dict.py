"""What a stranger's tensors and metadata say about the model they belong to.

The tensors' shapes settle every size they can; metadata may add to them, and may not contradict them. All
problems are ValueErrors, phrased to stand after "the file cannot be used:" and without a full stop.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from vit.architecture import Architecture
from vit.model import VisualTransformer
from vit.sources import CLASSES

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def describe(tensors: dict[str, Tensor], told: dict) -> dict:
    """The fields of a Checkpoint that these tensors and this metadata make. ValueError where they cannot."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    conv = _shape(shapes, "patch_embed.conv.weight", 4)  # (D, C, patch, patch)
    positions = _shape(shapes, "pos_embed", 3)[1]
    classes = _shape(shapes, "mlp_head.1.weight", 2)[0]
    hidden = _shape(shapes, "encoder_blocks.0.mlp.0.weight", 2)[0]
    depths = {int(match[1]) for name in shapes if (match := re.match(r"encoder_blocks\.(\d{1,3})\.", name))}
    told_architecture = told.get("architecture") or {}
    if not isinstance(told_architecture, dict):
        raise ValueError("its metadata describes no architecture")
    assumed: list[str] = []

    def known(name: str, otherwise, says: str):
        """What the caller or the file says, else the tutorial's value, noted as assumed."""
        for source in (told, told_architecture):
            if source.get(name) is not None:
                return source[name]
        assumed.append(says)
        return otherwise

    patches, patch_px = positions - 1, conv[2]
    side = math.isqrt(patches)
    square_px = side * patch_px
    if side * side != patches and not (told.get("img_size") or told_architecture.get("img_size")):
        raise ValueError(f"its {patches} patches are not a square; say img_size (height, width)")
    img_size = _numbers(
        "img_size",
        known("img_size", (square_px, square_px), f"pictures of {square_px} x {square_px} px"),
        2,
        int,
    )
    down, across = (side_px // patch_px for side_px in img_size)
    if down * across != patches or img_size != (down * patch_px, across * patch_px):
        raise ValueError(
            f"pictures of {img_size[0]} x {img_size[1]} px are not {patches} patches"
            f" of {patch_px} x {patch_px} px"
        )
    num_heads = known("num_heads", 8, "8 heads")
    names = known(
        "class_names",
        CLASSES if classes == len(CLASSES) else tuple(f"class {k + 1}" for k in range(classes)),
        "the class names of CIFAR-10" if classes == len(CLASSES) else "no class names",
    )
    if not isinstance(num_heads, int) or isinstance(num_heads, bool) or not 1 <= num_heads <= conv[0]:
        raise ValueError(f"num_heads is a whole number from 1 to the width {conv[0]}, not {num_heads!r:.40}")
    if (
        not isinstance(names, list | tuple)
        or len(names) != classes
        or not all(isinstance(name, str) and 0 < len(name) <= 100 and name.isprintable() for name in names)
        or len(set(names)) < classes
    ):
        raise ValueError(f"it has {classes} classes, and its class names are not {classes} different texts")
    channels = conv[1]
    mean = _numbers("mean", known("mean", (0.5,) * channels, "mean 0.5"), channels, float)
    std = _numbers("std", known("std", (0.5,) * channels, "standard deviation 0.5"), channels, float)
    if min(std) < 1e-6:  # less would overflow when pictures are divided by it
        raise ValueError("its std is not at least 0.000001")
    percentiles = told.get("top_logit_percentiles") or ()
    if percentiles:
        percentiles = _numbers("top_logit_percentiles", percentiles, 101, float)
    provenance = told.get("provenance") or {}
    dropout = told_architecture.get("dropout")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        dropout = Architecture.dropout
    architecture = Architecture(
        num_classes=classes,
        img_size=img_size,
        patch_size=patch_px,
        in_channels=channels,
        embed_dim=conv[0],
        num_layers=len(depths),
        num_heads=num_heads,
        mlp_dim=hidden,
        dropout=float(dropout),
    )
    _check_told(told_architecture, architecture)
    return {
        "architecture": architecture,
        "class_names": tuple(names),
        "mean": mean,
        "std": std,
        "provenance": _plain_facts(provenance),
        "top_logit_percentiles": tuple(percentiles),
        "assumed": tuple(assumed),
    }


def _check_told(told: dict, architecture: Architecture) -> None:
    """The metadata may not contradict the tensors: one of the two would be wrong."""
    for size in fields(Architecture):
        value, found = told.get(size.name), getattr(architecture, size.name)
        if isinstance(value, int) and isinstance(found, int) and size.name != "num_heads" and value != found:
            raise ValueError(f"its metadata says {size.name} {value}, its tensors say {found}")


def fill(architecture: Architecture, tensors: dict[str, Tensor]) -> VisualTransformer:
    """The model with these tensors as its parameters. ValueError where they do not fit."""
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        model = architecture.build()
    expected = model.state_dict()
    for name, problem in _misfits(expected, tensors):
        raise ValueError(f"the tensor {name[:80]!r} {problem}")
    filled = {}
    for name, tensor in tensors.items():
        # a copy of its own: a stranger's tensors may overlap in memory
        filled[name] = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        if not filled[name].isfinite().all():
            raise ValueError(f"the tensor {name!r} holds numbers that are not finite (NaN or infinity)")
    model.load_state_dict(filled, assign=True)
    return model


def _misfits(expected: dict[str, Tensor], found: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    for name, tensor in expected.items():
        if name not in found:
            yield name, "is missing"
        elif found[name].shape != tensor.shape:
            shape = " x ".join(map(str, found[name].shape)) or "a single number"
            yield name, f"is {shape}, where {' x '.join(map(str, tensor.shape))} is needed"
        elif found[name].dtype not in _FLOATS:
            yield name, "holds no floating point numbers of 16, 32 or 64 bits"
    for name in found:
        if name not in expected:
            yield name, "belongs to no model of this kind"


def _shape(shapes: dict[str, tuple[int, ...]], name: str, dimensions: int) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None:
        raise ValueError(
            f"it is not a Vision Transformer with the tutorial's names, the tensor {name!r} is missing"
        )
    if len(shape) != dimensions or 0 in shape:
        raise ValueError(f"the tensor {name!r} has the impossible shape {shape}")
    return shape


def _numbers(name: str, value, count: int, kind: type) -> tuple:
    """`count` finite numbers of one kind, from what may be anything."""
    if isinstance(value, list | tuple) and len(value) == count:
        allowed = int if kind is int else int | float
        if all(isinstance(v, allowed) and not isinstance(v, bool) and abs(v) < 1e9 for v in value):
            return tuple(kind(v) for v in value)
    raise ValueError(f"{name} must be {count} {'whole numbers' if kind is int else 'finite numbers'}")


def _printable(text: str) -> str:
    """On one line, and without the codes that steer a terminal."""
    return "".join(c for c in " ".join(text.split()) if c.isprintable())


def _plain_facts(provenance) -> dict[str, str | int | float]:
    """Texts and finite numbers under short names; the rest of a stranger's metadata is left out."""
    if not isinstance(provenance, dict):
        return {}
    return {
        _printable(str(name)[:40]): _printable(value[:2000]) if isinstance(value, str) else value
        for name, value in list(provenance.items())[:40]
        if isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 1e15)
    }
