"""Weight on the object: against sums over pixels, and at the two ends where the answer is known."""

import numpy as np
import pytest
import torch

from vit.architecture import Architecture
from vit.checkpoint import Checkpoint
from vit.explanation import explain
from vit.images import normalise
from vit.methods import CENTRE_SPREAD
from vit.patterns import CLASSES, make_patterns
from vit.truth import MAPS, mass_lines, object_mass


@pytest.fixture(scope="module")
def model_and_checkpoint():
    torch.manual_seed(0)
    architecture = Architecture(len(CLASSES), embed_dim=32, num_layers=2, num_heads=2, mlp_dim=32)
    model = architecture.build(init="tutorial").eval()
    return model, Checkpoint(architecture, CLASSES, (0.5,) * 3, (0.25,) * 3)


def test_shares_are_sums_over_pixels(model_and_checkpoint):
    model, checkpoint = model_and_checkpoint
    made = make_patterns(70, seed=3)  # more than one batch
    found = object_mass(model, checkpoint, made.images, made.masks)
    assert found.pictures == 70
    assert found.area == pytest.approx(made.masks.mean(), abs=1e-12)
    for name, options in MAPS.items():
        relevance = explain(model, normalise(made.images, checkpoint), **options).relevance.numpy()
        pixels = np.kron(relevance, np.ones((1, 4, 4)))  # each patch's weight on each of its pixels
        expected = [(row * mask).sum() / row.sum() for row, mask in zip(pixels, made.masks, strict=True)]
        assert found.mass[name] == pytest.approx(np.mean(expected), abs=1e-6), name


def test_the_bump_in_the_middle_is_a_normal_curve_of_a_quarter_of_the_side(model_and_checkpoint):
    made = make_patterns(5, seed=1)
    found = object_mass(*model_and_checkpoint, made.images, made.masks)
    places = (np.arange(8) + 0.5) / 8 - 0.5
    line = np.exp(-(places**2) / (2 * CENTRE_SPREAD**2))
    bump = np.kron(np.outer(line, line) / line.sum() ** 2, np.ones((4, 4))) / 16  # sums to 1 over pixels
    assert found.centre == pytest.approx(np.mean([(bump * mask).sum() for mask in made.masks]), abs=1e-9)


@pytest.mark.parametrize("everywhere", [True, False])
def test_an_object_that_is_all_or_nothing(model_and_checkpoint, everywhere):
    made = make_patterns(3, seed=2)
    found = object_mass(*model_and_checkpoint, made.images, np.full_like(made.masks, everywhere))
    for share in (found.area, found.centre, *found.mass.values()):
        assert share == pytest.approx(float(everywhere), abs=1e-6)


def test_the_words_hold_every_figure(model_and_checkpoint):
    made = make_patterns(4, seed=2)
    found = object_mass(*model_and_checkpoint, made.images, made.masks)
    text = "\n".join(mass_lines(found))
    for share in (found.area, found.centre, *found.mass.values()):
        assert f"{share:.1%}" in text
