"""Tokens have names and places in the picture; entropy, distance and shares match numbers made by hand.

Run: pytest tests/test_tokens.py (a few seconds).
"""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from vit.attention import (
    attention_entropy_bits,
    cls_share,
    mean_attention_distance_px,
    token_column,
    token_grid,
    token_index,
    token_name,
    token_row,
)

COUNTED = torch.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4)  # any number tells where it came from
HAND = torch.tensor(
    [[0.5, 0.25, 0.25, 0.0], [0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0]]
)


# --- rows, columns, grids


def test_rows_are_queries_and_columns_keys():
    row, column = token_row(COUNTED, 2), token_column(COUNTED, 2)
    assert row.shape == column.shape == (2, 3, 4)
    assert row[1, 2].tolist() == [88, 89, 90, 91]
    assert column[1, 2].tolist() == [82, 86, 90, 94]


@pytest.mark.parametrize("token", [-1, 4, 99])
@pytest.mark.parametrize("read", [token_row, token_column, attention_entropy_bits, cls_share])
def test_tokens_that_do_not_exist_are_refused(read, token):
    with pytest.raises(ValueError, match=rf"0 to 3, not {token}"):
        read(HAND, token)


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_grid_is_laid_out_row_by_row(prefix):
    weights = torch.arange(2 * (prefix + 6)).reshape(2, prefix + 6)
    grid = token_grid(weights, (2, 3), prefix)
    assert grid.shape == (2, 2, 3)
    assert grid[0].tolist() == [[prefix, prefix + 1, prefix + 2], [prefix + 3, prefix + 4, prefix + 5]]


def test_a_grid_of_another_size_is_refused():
    for weights, prefix in ((torch.zeros(7), 0), (torch.zeros(6), 1), (torch.zeros(64), 1)):
        with pytest.raises(ValueError, match=f"{len(weights)} tokens are not {prefix} and a grid of 2 x 3"):
            token_grid(weights, (2, 3), prefix)


# --- names


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
@pytest.mark.parametrize("grid", [(8, 8), (2, 5), (5, 2), (1, 1), (12, 11)])
def test_names_and_indices_are_each_others_inverse_for_every_token(grid, prefix):
    count = prefix + math.prod(grid)
    names = [token_name(index, grid, prefix) for index in range(count)]
    assert [token_index(name, grid, prefix) for name in names] == list(range(count))
    expected = [f"{row},{column}" for row in range(1, grid[0] + 1) for column in range(1, grid[1] + 1)]
    assert names[prefix:] == expected
    assert names[:prefix][:1] == ["cls"][:prefix]


@pytest.mark.parametrize(
    ("name", "index"),
    [("cls", 0), (" CLS ", 0), ("1,1", 1), ("8,8", 64), (" 2 , 3 ", 11), ("3,2", 18), ("03,2", 18)],
)
def test_names_as_people_type_them(name, index):
    assert token_index(name, (8, 8)) == index


@pytest.mark.parametrize(
    "name",
    [
        *["", " ", "patch", "clss", "1", "1,", ",1", "1,2,3", "1;2", "1 1", "1.0,2", "1e0,1", "register 1"],
        *["0,1", "1,0", "9,1", "1,9", "-1,1", "²,1", "１,1", "٣,1", "1" * 5000 + ",1"],
    ],
    ids=lambda name: repr(name[:9]),
)
def test_names_that_mean_nothing_are_refused_with_the_range(name):
    with pytest.raises(ValueError, match="rows 1 to 8 and columns 1 to 8"):
        token_index(name, (8, 8))


def test_without_cls_there_is_no_cls():
    with pytest.raises(ValueError, match="rows 1 to 2"):
        token_index("cls", (2, 5), prefix_tokens=0)
    assert token_name(0, (2, 5), prefix_tokens=0) == "1,1"


def test_indices_beyond_the_tokens_are_refused():
    for index in (-1, 65):
        with pytest.raises(ValueError, match=f"0 to 64, not {index}"):
            token_name(index, (8, 8))


# --- entropy and the share of CLS


def test_entropy_is_in_bits():
    assert attention_entropy_bits(torch.eye(65)).item() == 0
    for N in (2, 7, 65):
        uniform = torch.full((2, 3, N, N), 1 / N, dtype=torch.float64)
        expected = torch.full((2, 3), math.log2(N), dtype=torch.float64)
        assert_close(attention_entropy_bits(uniform), expected)
        assert_close(attention_entropy_bits(uniform, token=1), expected)
    assert_close([attention_entropy_bits(HAND, i).item() for i in range(4)], [1.5, 0.0, 2.0, 1.0])
    assert_close(attention_entropy_bits(HAND).item(), (1.5 + 0 + 2 + 1) / 4)


def test_share_of_cls_is_what_it_draws_not_what_it_gives():
    assert_close([cls_share(HAND, i).item() for i in range(4)], [0.5, 0.0, 0.25, 0.5])
    assert_close(cls_share(HAND).item(), 1.25 / 4)
    assert_close(cls_share(HAND.expand(2, 3, 4, 4)), torch.full((2, 3), 1.25 / 4))


# --- distance


def test_distance_of_uniform_attention_is_the_mean_over_pairs_of_patches():
    places = [(4 * y, 4 * x) for y in range(8) for x in range(8)]
    expected_px = sum(math.dist(a, b) for a, b in itertools.product(places, places)) / 64**2
    assert round(expected_px, 3) == 16.546
    for prefix in (0, 1, 2):
        uniform = torch.full((2, 3, prefix + 64, prefix + 64), 1 / (prefix + 64), dtype=torch.float64)
        got = mean_attention_distance_px(uniform, (8, 8), 4, prefix)
        assert_close(got, torch.full((2, 3), expected_px, dtype=torch.float64))
    in_float32 = mean_attention_distance_px(uniform.float(), (8, 8), 4, 2)
    assert_close(in_float32, torch.full((2, 3), expected_px), atol=1e-4, rtol=0)


@pytest.mark.parametrize("prefix", [0, 2])
def test_distance_on_an_oblong_grid_by_hand(prefix):
    among_patches = torch.tensor(
        [
            [0, 0, 1.0, 0, 0, 0],  # two to the right: 8 px
            [0, 0, 0, 0, 1.0, 0],  # one down: 4 px
            [0, 0, 0, 1.0, 0, 0],  # one down, two to the left: 4 sqrt(5) px
            [0, 0, 0, 1.0, 0, 0],  # itself
            [0, 0, 0, 0.5, 0, 0.5],  # one to each side: 4 px
            [0, 0, 0, 0, 0.25, 0.75],  # a quarter at one to the left: 1 px
        ]
    )
    attention = torch.rand(prefix + 6, prefix + 6)  # what prefix tokens look at must not matter
    attention[prefix:, :prefix] = 0.3 / max(prefix, 1)
    attention[prefix:, prefix:] = among_patches * (0.7 if prefix else 1.0)
    got = mean_attention_distance_px(attention, (2, 3), 4, prefix)
    assert got.item() == pytest.approx((8 + 4 + 4 * math.sqrt(5) + 0 + 4 + 1) / 6)


def test_distance_of_patches_that_look_at_cls_only_is_finite():
    attention = torch.zeros(7, 7)
    attention[:, 0] = 1
    assert mean_attention_distance_px(attention, (2, 3), 4).item() == 0


def test_distance_refuses_a_grid_of_another_size():
    with pytest.raises(ValueError, match="7 tokens are not 0 and 2 x 3"):
        mean_attention_distance_px(torch.zeros(7, 7), (2, 3), 4, 0)


def test_inputs_are_never_changed():
    maps = torch.rand(2, 3, 7, 7)
    before = maps.clone()
    attention_entropy_bits(maps)
    attention_entropy_bits(maps, 1)
    cls_share(maps)
    mean_attention_distance_px(maps, (2, 3), 4)
    assert torch.equal(maps, before)
