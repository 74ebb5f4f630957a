"""Rollout is what its formula says, row by row and picture by picture, for any number of tokens.

Run: pytest tests/test_attention.py (some seconds). Entropy, distance and token names: test_tokens.py.
"""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from vit.attention import (
    FUSIONS,
    attention_rollout,
    fuse_heads,
    mass_mask,
    rollout_by_head,
    rollout_by_layer,
    rollout_row_by_layer,
    stack_maps,
)

ROLLOUTS = (attention_rollout, rollout_by_layer, rollout_by_head)
EXACT = {"atol": 1e-12, "rtol": 1e-12}
DISCARDS = (0.0, 0.3, 0.9, 0.99, 1.0)
RESIDUALS = (0.0, 0.3, 0.5, 1.0)


def some_maps(B=2, L=3, H=2, N=7, seed=0, dtype=torch.float64) -> torch.Tensor:
    """(B, L, H, N, N), rows summing to 1; 7 tokens are CLS and a grid of 2 x 3."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(B, L, H, N, N, generator=generator, dtype=dtype)).softmax(-1)


def by_loop(layers, fusion="mean", discard=0.0, residual=0.5, start=0) -> np.ndarray:
    """One picture's rollout, L maps (H, N, N) -> (N, N), one number at a time in float64."""
    N = layers[0].shape[-1]
    rollout = np.eye(N)
    for heads in layers[start:]:
        step = np.zeros((N, N))
        for i in range(N):
            row = [{"mean": np.mean, "max": np.max, "min": np.min}[fusion](heads[:, i, j]) for j in range(N)]
            falling = sorted(range(N), key=lambda j, row=row: (row[j], j), reverse=True)
            stay = falling[: max(1, N - math.floor(discard * N))]
            mixed = [residual * (i == j) + (1 - residual) * row[j] * (j in stay) for j in range(N)]
            step[i] = np.array(mixed) / sum(mixed)
        after = np.zeros((N, N))
        for i in range(N):
            for j in range(N):
                after[i, j] = sum(step[i, m] * rollout[m, j] for m in range(N))
        rollout = after
    return rollout


def loop_of(maps, *chosen, upto=None, head=None) -> torch.Tensor:
    """`by_loop` of each picture up to layer `upto`, where `head`, if given, stands alone."""
    pictures = []
    for picture in maps.double().numpy():
        layers = list(picture if upto is None else picture[: upto + 1])
        if head is not None:
            layers[-1] = layers[-1][head : head + 1]
        pictures.append(by_loop(layers, *chosen))
    return torch.from_numpy(np.stack(pictures))


# --- against the loop


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("discard", DISCARDS)
@pytest.mark.parametrize("fusion", FUSIONS)
def test_rollout_is_the_loops(fusion, discard, residual):
    maps = some_maps()
    got = attention_rollout(maps, fusion, discard, residual)
    assert_close(got, loop_of(maps, fusion, discard, residual), **EXACT)


@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize("discard", [0.0, 0.5])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_rollout_by_layer_and_head_are_the_loops_from_any_start(fusion, discard, start):
    maps = some_maps(L=4, H=3)
    chosen = (fusion, discard, 0.3, start)
    by_layer, by_head = rollout_by_layer(maps, *chosen), rollout_by_head(maps, *chosen)
    assert by_layer.shape == (2, 4, 7, 7)
    assert by_head.shape == (2, 4, 3, 7, 7)
    assert torch.equal(by_layer[:, -1], attention_rollout(maps, *chosen))
    for depth in range(4):
        assert_close(by_layer[:, depth], loop_of(maps, *chosen, upto=depth), **EXACT)
        for head in range(3):
            expected = loop_of(maps, *chosen, upto=depth, head=head)
            assert_close(by_head[:, depth, head], expected, **EXACT)
    identity = torch.eye(7, dtype=maps.dtype)
    assert bool((by_layer[:, :start] == identity).all())
    assert bool((by_head[:, :start] == identity).all())


@pytest.mark.parametrize("N", [1, 2, 5, 7, 1 + 2 * 3, 2 + 2 * 3, 64, 65])
def test_any_number_of_tokens_works(N):
    maps = some_maps(L=2, N=N)
    chosen = ("max", 0.3, 0.5, 0)
    assert_close(attention_rollout(maps, *chosen), loop_of(maps, *chosen), **EXACT)
    assert rollout_by_head(maps, *chosen).shape == (2, 2, 2, N, N)


def test_float32_is_close_to_the_float64_loop_at_the_models_size():
    maps = some_maps(B=1, L=6, H=8, N=65, dtype=torch.float32)
    assert_close(attention_rollout(maps).double(), loop_of(maps), atol=1e-6, rtol=1e-5)
    assert attention_rollout(maps).dtype == torch.float32


def test_defaults_are_the_mean_of_heads_nothing_discarded_and_half_residual():
    maps = some_maps()
    for rollout in ROLLOUTS:
        assert torch.equal(rollout(maps), rollout(maps, "mean", 0.0, 0.5, 0))
        assert torch.equal(
            rollout(maps, head_fusion="min", discard_ratio=0.4, residual=0.2, start_layer=1),
            rollout(maps, "min", 0.4, 0.2, 1),
        )


# --- what is known beforehand


@pytest.mark.parametrize("fusion", FUSIONS)
def test_identity_attention_leaves_the_patches_nothing(fusion):
    identity = torch.eye(65).expand(2, 6, 8, 65, 65)
    rollout = attention_rollout(identity, fusion)
    assert bool((rollout[:, 0, 1:] == 0).all())
    assert_close(rollout, torch.eye(65).expand(2, 65, 65))
    assert_close(rollout_by_head(identity, fusion), identity)


@pytest.mark.parametrize(("L", "N"), [(6, 65), (1, 5), (12, 197)])
def test_uniform_attention_gives_cls_the_known_self_mass(L, N):
    rollout = attention_rollout(torch.full((1, L, 2, N, N), 1 / N, dtype=torch.float64))
    assert rollout[0, 0, 0].item() == pytest.approx(2**-L + (1 - 2**-L) / N, abs=1e-12)
    if (L, N) == (6, 65):
        assert round(rollout[0, 0, 0].item(), 4) == 0.0308


def test_later_layers_come_from_the_left():
    all_at_1 = torch.tensor([[0.0, 1, 0]] * 3)
    shifted = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
    first_all_at_1 = torch.stack([all_at_1, shifted])[None, :, None]
    assert torch.equal(attention_rollout(first_all_at_1, residual=0.0)[0], all_at_1)
    assert torch.equal(
        attention_rollout(first_all_at_1.flip(1), residual=0.0)[0], torch.tensor([[0.0, 0, 1]] * 3)
    )


def test_each_row_is_divided_by_its_own_sum():
    """Sums without keepdim divide columns instead; with max, whose rows do not sum to 1, that shows."""
    heads = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.3, 0.7], [0.6, 0.4]]])
    expected = torch.tensor([[9 / 16, 7 / 16], [6 / 14, 8 / 14]])
    assert_close(attention_rollout(heads[None, None], "max", residual=0.0)[0], expected)


def test_each_row_discards_its_own_lowest():
    """Over the whole matrix, the flat row of CLS would be emptied before any entry of the others."""
    N = 10
    peaked = torch.arange(1, N + 1).double().softmax(-1)
    flat = torch.full((N,), 1 / N, dtype=torch.float64) + torch.linspace(0, 1e-3, N, dtype=torch.float64)
    maps = torch.stack([flat, *[peaked.roll(i) for i in range(1, N)]])[None, None, None]
    for ratio, left in ((0.0, 10), (0.05, 10), (0.1, 9), (0.5, 5), (0.9, 1), (0.99, 1), (1.0, 1)):
        rollout = attention_rollout(maps, discard_ratio=ratio, residual=0.0)[0]
        assert (rollout > 0).sum(-1).tolist() == [left] * N
        assert torch.equal(rollout.argmax(-1), maps[0, 0, 0].argmax(-1))
        assert torch.equal(rollout > 0, maps[0, 0, 0] >= maps[0, 0, 0].sort(-1).values[:, N - left, None])


@pytest.mark.parametrize(
    ("row", "ratio", "stay"),
    [
        ([0.25, 0.25, 0.25, 0.25], 0.25, [1, 2, 3]),
        ([0.25, 0.25, 0.25, 0.25], 0.75, [3]),
        ([0.25, 0.25, 0.25, 0.25], 1.0, [3]),
        ([0.4, 0.1, 0.4, 0.1], 0.25, [0, 2, 3]),
        ([0.4, 0.1, 0.4, 0.1], 0.75, [2]),
        ([0.7, 0.1, 0.1, 0.1], 0.5, [0, 3]),
        ([0.7, 0.1, 0.1, 0.1], 1.0, [0]),
        ([1.0, 0.0, 0.0, 0.0], 0.99, [0]),
        ([0.0, 0.0, 0.0, 0.0], 0.5, []),
    ],
)
def test_of_equal_entries_the_later_column_stays_and_never_goes_the_largest(row, ratio, stay):
    maps = torch.tensor([row] * 4)[None, None, None]
    for rollout in (attention_rollout, rollout_by_head):
        kept = rollout(maps, discard_ratio=ratio, residual=0.0).reshape(4, 4)
        assert all(line.nonzero().flatten().tolist() == stay for line in kept)


def test_many_equal_entries_are_discarded_in_a_fixed_order():
    flat = torch.full((1, 1, 1, 65, 65), 1 / 65)  # wide enough for an unstable sort to mix them
    kept = attention_rollout(flat, discard_ratio=0.6, residual=0.0)[0]
    assert bool((kept[:, : math.floor(0.6 * 65)] == 0).all())
    assert_close(kept[:, 39:], torch.full((65, 26), 1 / 26))


def test_a_discarded_own_entry_leaves_the_residual():
    """The residual is added after the discard, so that a token always keeps its share of itself."""
    maps = torch.tensor([[0.1, 0.9], [0.9, 0.1]])[None, None, None]
    expected = torch.tensor([[0.5, 0.45], [0.45, 0.5]]) / 0.95
    assert_close(attention_rollout(maps, discard_ratio=0.5)[0], expected)


def test_a_fully_blocked_row_without_residual_stays_zero():
    maps = some_maps()
    maps[0, 1, :, 3] = 0
    for discard in (0.0, 0.5):
        for rollout in ROLLOUTS:
            assert bool(rollout(maps, "mean", discard, 0.0).isfinite().all())
        assert bool((rollout_by_layer(maps, "mean", discard, 0.0)[0, 1, 3] == 0).all())
        sums = attention_rollout(maps, "mean", discard, 0.5).sum(-1)
        assert_close(sums, torch.ones_like(sums))


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9)),
    sharpness=st.sampled_from([0.0, 1.0, 5.0, 50.0]),
    fusion=st.sampled_from(FUSIONS),
    discard=st.floats(0, 1),
    residual=st.floats(0, 1),
    start=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_rows_of_every_rollout_are_shares(seed, shape, sharpness, fusion, discard, residual, start):
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64)
    maps = scores.softmax(-1)
    if fusion == "min" and sharpness == 50:
        residual = max(residual, 0.1)  # else the least of two sharp heads may leave a row nearly nothing
    for rollout in ROLLOUTS:
        shares = rollout(maps, fusion, discard, residual, min(start, shape[1] - 1))
        assert bool((shares >= 0).all())
        assert_close(shares.sum(-1), torch.ones_like(shares.sum(-1)), atol=1e-9, rtol=0)


# --- batches, inputs, gradients


@pytest.mark.parametrize("rollout", ROLLOUTS)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("discard", [0.0, 0.5])
def test_twenty_pictures_give_what_each_gives_alone(rollout, gradients, discard):
    maps = some_maps(B=20).requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        together = rollout(maps, "max", discard, 0.3, 1)
        alone = torch.cat([rollout(maps[i : i + 1], "max", discard, 0.3, 1) for i in range(20)])
    assert together.requires_grad == gradients
    assert_close(together, alone, **EXACT)
    assert not torch.allclose(together[0], together[1])
    if gradients:
        weights = some_maps(B=1, L=1, H=1, seed=5)[0, 0, 0]
        (of_together,) = torch.autograd.grad((together * weights).sum(), maps)
        (of_alone,) = torch.autograd.grad((alone * weights).sum(), maps)
        assert_close(of_together, of_alone, **EXACT)
        assert bool((of_together.abs().amax(dim=(1, 2, 3, 4)) > 0).all())


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_lists_tuples_and_one_stacked_tensor_agree(rollout):
    maps = some_maps(B=9)
    layers = [maps[:, depth] for depth in range(3)]
    for given_as in (layers, tuple(layers), iter(layers)):
        assert torch.equal(rollout(given_as), rollout(maps))
    assert stack_maps(maps) is maps
    assert torch.equal(stack_maps(layers), maps)


@pytest.mark.parametrize("B", [2, 20])
@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_inputs_are_never_changed(rollout, B):
    maps = some_maps(B=B)
    layers = [maps[:, depth].clone() for depth in range(3)]
    before = maps.clone()
    for discard in (0.0, 0.5):
        for start in (0, 1):
            with torch.no_grad():
                rollout(maps, "mean", discard, 0.5, start).mul_(2)  # nor may the result share their memory
                rollout(layers, "mean", discard, 0.0, start).mul_(2)
                rollout(maps[:, :, :1], "max", discard, 0.0, start).mul_(2)
    assert torch.equal(maps, before)
    assert torch.equal(torch.stack(layers, dim=1), before)


@pytest.mark.parametrize("rollout", ROLLOUTS)
@pytest.mark.parametrize("discard", [0.0, 0.5])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_gradients_are_right(rollout, fusion, discard):
    maps = some_maps(B=1, L=3, H=2, N=3).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda m: rollout(m, fusion, discard, 0.3, 1), maps)
    assert torch.autograd.gradcheck(lambda m: rollout(list(m.unbind(1)), fusion, discard, 0.3), maps)


def test_fused_heads_by_hand():
    heads = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.3, 0.7], [0.6, 0.4]]])
    assert_close(fuse_heads(heads), torch.tensor([[0.6, 0.4], [0.4, 0.6]]))
    assert_close(fuse_heads(heads, "max"), torch.tensor([[0.9, 0.7], [0.6, 0.8]]))
    assert_close(fuse_heads(heads, "min"), torch.tensor([[0.3, 0.1], [0.2, 0.4]]))
    assert fuse_heads(torch.zeros(5, 4, 3, 7, 7), "max").shape == (5, 4, 7, 7)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_one_head_by_head_is_by_layer(fusion):
    maps = some_maps(H=1)
    by_head, by_layer = (
        rollout(maps, fusion, 0.4, 0.3, 1) for rollout in (rollout_by_head, rollout_by_layer)
    )
    assert_close(by_head[:, :, 0], by_layer, **EXACT)


@pytest.mark.parametrize("B", [2, 20])
@pytest.mark.parametrize("gradients", [False, True])
def test_by_head_takes_a_rollout_by_layer_from_callers_who_have_it(gradients, B):
    maps = some_maps(B=B)
    for chosen in (("mean", 0.0, 0.5, 0), ("max", 0.5, 0.3, 1)):
        with torch.set_grad_enabled(gradients):
            by_layer = rollout_by_layer(maps, *chosen)
            before = by_layer.clone()
            by_head = rollout_by_head(maps, *chosen, by_layer=by_layer)
            assert torch.equal(by_head, rollout_by_head(maps, *chosen))
        assert torch.equal(by_layer, before)


# --- refusals


@pytest.mark.parametrize("rollout", ROLLOUTS)
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("discard_ratio", value) for value in (-0.01, 1.01, math.nan)],
        *[("residual", value) for value in (-0.01, 1.01, math.nan)],
        *[("start_layer", value) for value in (-1, 3, 99)],
    ],
)
def test_settings_out_of_range_are_refused_by_name(rollout, setting, value):
    with pytest.raises(ValueError, match=rf"{setting} lies from 0 to .*{value}"):
        rollout(some_maps(L=3), **{setting: value})


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_unknown_fusions_are_refused(rollout):
    with pytest.raises(ValueError, match="mean, max, min, not 'median'"):
        rollout(some_maps(), "median")


@pytest.mark.parametrize("rollout", [*ROLLOUTS, stack_maps])
@pytest.mark.parametrize(
    "maps",
    [
        [],
        torch.zeros(2, 3, 7, 7),
        torch.zeros(7, 7),
        torch.zeros(2, 3, 2, 7, 6),
        [torch.zeros(2, 7, 7)] * 3,
        [torch.zeros(2, 2, 7, 6)] * 3,
        [torch.zeros(2, 2, 7, 7), torch.zeros(2, 2, 6, 6)],
        [torch.zeros(2, 2, 7, 7), torch.zeros(1, 2, 7, 7)],
    ],
)
def test_maps_of_another_shape_are_refused(rollout, maps):
    with pytest.raises(ValueError, match="maps"):
        rollout(maps)


@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
@pytest.mark.parametrize(("discard", "residual", "start"), [(0.0, 0.5, 0), (0.6, 0.3, 1), (0.9, 0.0, 2)])
def test_one_token_s_rows_are_those_of_the_whole_rollout(fusion, discard, residual, start):
    maps = [torch.rand(3, 2, 7, 7, dtype=torch.float64).softmax(-1) for _ in range(4)]
    whole = rollout_by_layer(maps, fusion, discard, residual, start)
    for token in (0, 4):
        rows = rollout_row_by_layer(maps, token, fusion, discard, residual, start)
        torch.testing.assert_close(rows, whole[:, :, token])
        stacked = rollout_row_by_layer(torch.stack(maps, 1), token, fusion, discard, residual, start)
        torch.testing.assert_close(stacked, rows)


# --- the patches that hold a share of the weight


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=7), st.integers(0, 100), st.sampled_from([1, 0.1, 1e-6])
)
def test_mass_is_held_by_the_fewest_patches_and_of_equals_by_the_earlier(weights, percent, unit):
    wanted = Fraction(percent, 100) * sum(weights)
    sets = (set(c) for size in range(len(weights) + 1) for c in combinations(range(len(weights)), size))
    fewest = next(len(s) for s in sets if sum(weights[i] for i in s) >= wanted)
    falling = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    for dtype in (torch.float32, torch.float64):
        found = mass_mask(torch.tensor(weights, dtype=dtype) * unit, percent / 100)
        assert found.dtype == torch.bool
        assert found.nonzero().flatten().tolist() == sorted(falling[:fewest])


def test_mass_of_many_maps_at_once_and_at_the_ends():
    weights = some_maps()[..., 0, 1:]  # (B, L, H, P)
    found = mass_mask(weights, 0.6)
    for i in np.ndindex(weights.shape[:-1]):
        assert torch.equal(found[i], mass_mask(weights[i], 0.6))
    assert not mass_mask(weights, 0).any()
    assert mass_mask(weights, 1).all()
    assert mass_mask(torch.tensor([0.0, 1.0, 1e-30, 0.0]), 1).tolist() == [False, True, True, False]
    assert not mass_mask(torch.zeros(2, 6), 1).any()
    assert mass_mask(torch.full((100,), 0.1), 0.07).nonzero().flatten().tolist() == [
        *range(7)
    ]  # 0.07 > 7 / 100
    assert mass_mask(torch.full((100,), 0.3), 0.5).sum() == 50  # sums in float32 take 51
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="share lies from 0 to 1"):
            mass_mask(weights, share)
