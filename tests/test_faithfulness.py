"""Faithfulness against models whose answer is known, plain loops, and properties of the curves.

Run: pytest tests/test_faithfulness.py (some seconds).
"""

import numpy as np
import pytest
import torch
from plain_vit import pictures, small_model
from torch.testing import assert_close

from vit.cause import Change, answer, cover
from vit.faithfulness import (
    curves,
    map_correlations,
    random_maps,
    saco,
    score_picture,
    shuffled_copy,
    step_counts,
)
from vit.removal import REMOVALS, filled

P = 16  # patches of the small model


@pytest.fixture(scope="module")
def case():
    """A model, two pictures, three maps of each, and the classes first predicted."""
    model, x = small_model().double(), pictures(2).double()
    with torch.no_grad():
        target = model(x).argmax(-1)
    return model, x, random_maps([3, 4], P, 3), target


def probability(model, x, target, hidden, removal) -> float:
    """One run, by the page's own ways of covering patches."""
    if removal == "removed":
        return answer(model, x, Change(covered=frozenset(hidden)))[-1, target].item()
    with torch.no_grad():
        return model(cover(x, hidden, model.grid, removal)).softmax(-1)[0, target].item()


@pytest.mark.parametrize("removal", REMOVALS)
def test_each_step_hides_exactly_the_k_most_relevant(case, removal):
    model, x, maps, target = case
    found = curves(model, x, maps, target, removal, steps=5)
    assert found.counts == (0, 3, 6, 10, 13, 16)
    for m in range(3):
        for b in range(2):
            order = np.argsort(-maps[m, b].numpy(), kind="stable").tolist()
            for s, k in enumerate(found.counts):
                deleted = probability(model, x[b : b + 1], target[b].item(), order[:k], removal)
                shown = probability(model, x[b : b + 1], target[b].item(), order[k:], removal)
                assert found.deletion[m, b, s].item() == pytest.approx(deleted, abs=1e-10)
                assert found.insertion[m, b, s].item() == pytest.approx(shown, abs=1e-10)


def test_the_reverse_order_is_the_same_curves_read_backwards(case):
    model, x, maps, target = case
    found, turned = (curves(model, x, sign * maps, target, "mean", 4) for sign in (1, -1))
    assert_close(turned.deletion, found.insertion.flip(-1), atol=1e-12, rtol=0)
    assert_close(turned.difference, -found.difference, atol=1e-12, rtol=0)


def test_the_difference_is_the_mean_height_between_the_curves(case):
    model, x, maps, target = case
    found = curves(model, x, maps, target, steps=5)
    gap = (found.insertion - found.deletion).numpy()
    widths = np.diff(found.counts) / P
    expected = ((gap[..., 1:] + gap[..., :-1]) / 2 * widths).sum(-1)
    np.testing.assert_allclose(found.difference.numpy(), expected, atol=1e-12)


def test_scaling_and_shifting_a_map_changes_nothing(case):
    model, x, maps, target = case
    plain, moved = (curves(model, x, some, target, steps=4) for some in (maps, 7 * maps - 100))
    assert torch.equal(plain.difference, moved.difference)
    for groups in (4, 5):  # of one size, and of several
        first, second = (saco(model, x, some, target, groups=groups) for some in (maps, 7 * maps - 100))
        assert_close(first, second, atol=1e-9, rtol=0)


def test_a_constant_map_is_the_order_of_the_patches_and_says_nothing_to_saco(case):
    model, x, _, target = case
    constant, falling = torch.full((1, 2, P), 0.3).double(), -torch.arange(P).double().expand(1, 2, P)
    flat, ordered = (curves(model, x, some, target, steps=4) for some in (constant, falling))
    assert torch.equal(flat.deletion, ordered.deletion)
    assert saco(model, x, constant, target, groups=5).tolist() == [[0, 0]]


class ReadsOnePatch(torch.nn.Module):
    """A model of 2 x 2 patches of one pixel whose class 1 is exactly as likely as patch 2 is bright."""

    grid, num_classes, device = (2, 2), 2, torch.device("cpu")

    def embed(self, x, keep=None, dropout=False):
        tokens = x.mean(1).flatten(1)[:, :, None]  # (B, 4, 1)
        if keep is not None:
            tokens = torch.zeros_like(tokens).scatter(1, keep[:, :, None], tokens.gather(1, keep[:, :, None]))
        return tokens

    def steps(self, tokens, **_):
        return iter(())

    def classify(self, tokens):
        bright = tokens[:, 2, 0]
        return torch.stack([torch.zeros_like(bright), 4 * bright - 2], dim=-1)


@pytest.mark.parametrize("removal", ["removed", "mean"])
def test_the_true_map_is_the_best_and_its_negative_the_worst(removal):
    x = torch.ones(1, 3, 2, 2)
    every = torch.stack([torch.tensor(order) for order in np.random.default_rng(0).permuted(
        np.tile(np.arange(4.0), (30, 1)), axis=1)])[:, None]  # fmt: skip
    true = torch.tensor([[[0.0, 0, 1, 0]]])
    maps = torch.cat([true, -true, every.float()])
    found = curves(ReadsOnePatch(), x, maps, torch.tensor([1]), removal, 4).difference[:, 0]
    assert found[0] == found.max() == -found.min() == -found[1]
    high, low = torch.tensor([2.0, -2.0]).sigmoid().tolist()
    assert found[0].item() == pytest.approx((high - low) * 3 / 4)  # all but half a step at either end
    assert saco(ReadsOnePatch(), x, true, torch.tensor([1]), removal, groups=4).item() == 1
    assert saco(ReadsOnePatch(), x, -true, torch.tensor([1]), removal, groups=4).item() < 0


def test_saco_is_that_of_a_double_loop(case):
    model, x, maps, target = case
    found = saco(model, x, maps, target, "mean", groups=4)
    for m in range(3):
        for b in range(2):
            order = np.argsort(-maps[m, b].numpy(), kind="stable").reshape(4, 4)
            whole = probability(model, x[b : b + 1], target[b].item(), [], "mean")
            drop = [
                whole - probability(model, x[b : b + 1], target[b].item(), g.tolist(), "mean") for g in order
            ]
            total = [maps[m, b].numpy()[group].sum() for group in order]
            signed = weights = 0.0
            for i in range(4):
                for j in range(i + 1, 4):
                    weight = total[i] - total[j]
                    signed += weight if drop[i] >= drop[j] else -weight
                    weights += abs(weight)
            assert found[m, b].item() == pytest.approx(signed / weights, abs=1e-9)


def test_neighbours_colours_are_where_averaging_settles():
    x, grid = pictures(3, 12, 16).double(), (3, 4)
    hidden = torch.from_numpy(np.random.default_rng(1).random((3, 12)) < 0.6)
    hidden[2] = True
    found = filled(x, hidden, grid, "neighbours")
    for b in range(2):
        colours = x[b].numpy().reshape(3, 3, 4, 4, 4).mean((2, 4))  # (C, GY, GX)
        away = hidden[b].view(3, 4).numpy()
        now = np.where(away, 0, colours)
        for _ in range(2000):
            padded = np.pad(now, ((0, 0), (1, 1), (1, 1)))
            around = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1] + padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:]
            ones = np.pad(np.ones((3, 4)), 1)
            beside = ones[:-2, 1:-1] + ones[2:, 1:-1] + ones[1:-1, :-2] + ones[1:-1, 2:]
            now = np.where(away, around / beside, colours)
        pixels = np.kron(away, np.ones((4, 4), bool))
        expected = np.where(pixels, np.kron(now, np.ones((4, 4))), x[b].numpy())
        np.testing.assert_allclose(found[b].numpy(), expected, atol=1e-9)
    assert not found[2].any()  # nothing to go by: the mean colour


def test_one_picture_and_a_batch_give_the_same(case):
    model, x, maps, target = case
    named = {"one": maps[0], "two": maps[1].view(2, 4, 4)}
    both = score_picture(model, x, named, orders=3, steps=4, seed=8)
    second = score_picture(
        model, x[1:], {name: m[1:] for name, m in named.items()}, orders=3, steps=4, seed=9
    )
    assert torch.equal(both.target, target)
    for name in named:
        assert_close(both.methods[name].deletion[1:], second.methods[name].deletion)
    assert_close(both.random.insertion[:, 1:], second.random.insertion)
    assert both.random.difference.shape == (3, 2)


def test_shuffling_permutes_a_copy_and_leaves_the_model_alone(case):
    model = case[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = shuffled_copy(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for name, value in other.state_dict().items():
        assert torch.equal(value.flatten().sort()[0], before[name].flatten().sort()[0])
        is_input = name.startswith(("patch_embed", "cls_token", "pos_embed"))
        assert torch.equal(value, before[name]) == is_input, name
    maps = random_maps([1, 2], P, 1)[0]
    assert_close(map_correlations(maps, -maps), -torch.ones(2).double())


def test_what_cannot_be_measured_is_refused(case):
    model, x, maps, target = case
    with pytest.raises(ValueError, match="1 to 16"):
        step_counts(P, 17)
    with pytest.raises(ValueError, match="not finite"):
        curves(model, x, maps * float("nan"), target)
    with pytest.raises(ValueError, match="shape"):
        curves(model, x, maps[0], target)
    with pytest.raises(ValueError, match="hidden by"):
        curves(model, x, maps, target, "black")
