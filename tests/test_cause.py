"""Causes are measured by running the model again: the plain arithmetic of plain_vit, one change at a time.

Run: pytest tests/test_cause.py (some seconds).
"""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_vit import pictures, plain_vit, small_model
from torch.testing import assert_close

from vit.__main__ import main
from vit.cause import (
    FILLS,
    Change,
    answer,
    cover,
    cover_most,
    head_effects,
    leave_one_out,
    rank_correlation,
)
from vit.checkpoint import BUNDLED, load
from vit.explanation import explain
from vit.images import open_picture, prepare

EXACT = {"atol": 1e-10, "rtol": 1e-10}
OBLONG = {"img_size": (8, 12), "num_layers": 3, "num_heads": 2}  # 2 x 3 patches of 4 px
CAT = str(BUNDLED.parents[1] / "samples" / "cat_00.png")


def oblong(**changes):
    return small_model(**OBLONG | changes).double(), pictures(1, 8, 12).double()


def plain(model, x, off=(), without=()) -> torch.Tensor:
    """(K,) probabilities of one picture, with heads set to zero and patches never cut."""
    stay = [0, *(1 + p for p in range(math.prod(model.grid)) if p not in without)]

    def at(place, depth, tensor):
        if place == "embedded":
            return tensor[:, stay]
        if place == "read":
            tensor = tensor.clone()
            for layer, head in off:
                if layer == depth:
                    tensor[:, head] = 0
        return tensor

    with torch.no_grad():
        return plain_vit(model.state_dict(), x, model.num_heads, at)[0][0].softmax(-1)


# --- one change


def test_without_a_change_it_is_the_plain_pass_bit_for_bit():
    model, x = small_model(**OBLONG), pictures(1, 8, 12)
    with torch.no_grad():
        expected = model(x).softmax(-1)[0]
    for fill in FILLS:
        assert torch.equal(answer(model, x, Change(fill=fill))[-1], expected)


def test_heads_off_and_patches_removed_are_those_of_the_plain_arithmetic():
    model, x = oblong()
    heads, patches = {(0, 1), (2, 0), (2, 1)}, {0, 4, 5}
    for off, without in ((heads, ()), ((), patches), (heads, patches), ((), range(6))):
        found = answer(model, x, Change(frozenset(off), frozenset(without)))
        assert found.shape == (3, 5)
        assert_close(found[-1], plain(model, x, off, without), **EXACT)


def test_the_answer_after_each_layer_is_that_of_a_model_cut_there():
    model, x = oblong()
    change = Change(frozenset({(1, 0)}), frozenset({2}))
    found = answer(model, x, change)
    while len(model.encoder_blocks):
        depth = len(model.encoder_blocks)
        assert_close(found[depth - 1], plain(model, x, change.heads_off, change.covered), **EXACT)
        del model.encoder_blocks[-1]


def test_a_model_without_any_patch_left_still_answers():
    model, x = oblong(img_size=4)
    x = x[..., :4, :4]
    everything = Change(frozenset((layer, head) for layer in range(3) for head in range(2)), frozenset({0}))
    found = answer(model, x, everything)
    assert_close(found[-1], plain(model, x, everything.heads_off, {0}), **EXACT)
    assert torch.equal(found, answer(model, 2 * x + 1, everything))  # it sees nothing of the picture
    assert_close(leave_one_out(model, x, 1), (plain(model, x) - plain(model, x, without=[0]))[1:2], **EXACT)


@pytest.mark.parametrize("fill", ["mean", "blur"])
def test_filled_patches_are_answered_as_pixels(fill):
    model, x = oblong()
    found = answer(model, x, Change(covered=frozenset({1, 3}), fill=fill))
    assert_close(found[-1], plain(model, cover(x, [1, 3], (2, 3), fill)), **EXACT)
    assert not torch.allclose(found[-1], plain(model, x), atol=1e-3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Change(heads_off=frozenset({(3, 0)})), "layer lies from 0 to 2"),
        (Change(heads_off=frozenset({(0, 2)})), "head lies from 0 to 1"),
        (Change(heads_off=frozenset({(0, -1)})), "head lies from 0 to 1"),
        (Change(heads_off=frozenset({(0, 0.5)})), "head is a whole number"),
        (Change(covered=frozenset({6})), "patch lies from 0 to 5"),
        (Change(covered=frozenset({-1})), "patch lies from 0 to 5"),
        (Change(covered=frozenset({"1,1"})), "patch is a whole number"),
        (Change(fill="black"), "removed, mean, blur"),
    ],
)
def test_changes_that_the_model_lacks_are_value_errors(change, says):
    with pytest.raises(ValueError, match=says):
        answer(*oblong(), change)


# --- patches filled


def test_covered_patches_are_the_mean_colour_and_the_others_untouched():
    x = pictures(1, 8, 12)
    before = x.clone()
    found = cover(x, [2, 3], (2, 3), "mean")
    expected = x.clone()
    expected[:, :, :4, 8:] = 0  # row 1, column 3
    expected[:, :, 4:, :4] = 0  # row 2, column 1
    assert torch.equal(found, expected)
    assert torch.equal(x, before)
    assert torch.equal(cover(x, [], (2, 3), "mean"), x)


def test_a_blurred_patch_is_a_weighted_mean_of_what_surrounds_it():
    x = pictures(1, 32, 24).double()
    found = cover(x, [12], (8, 6), "blur")  # row 3, column 1: rows 8 to 11, columns 0 to 3
    changed = (found != x).nonzero()[:, 2:].tolist()
    assert sorted(map(tuple, changed)) == sorted(
        (y, x) for y in range(8, 12) for x in range(4) for _ in "rgb"
    )
    weights = np.exp(-(np.arange(-8, 9) ** 2) / (2 * 4**2))
    weights /= weights.sum()
    mirrored = np.pad(x[0].numpy(), ((0, 0), (8, 8), (8, 8)), mode="reflect")
    for y, across in ((8, 0), (10, 3)):
        around = mirrored[:, y : y + 17, across : across + 17]  # 8 to either side
        expected = np.einsum("cyx,y,x->c", around, weights, weights)
        np.testing.assert_allclose(found[0, :, y, across], expected, atol=1e-6)


@pytest.mark.parametrize(("grid", "patch_px"), [((8, 6), 4), ((2, 3), 4), ((1, 2), 8), ((14, 14), 2)])
def test_blur_is_torchvisions(grid, patch_px):
    from torchvision.transforms.functional import gaussian_blur

    height, width = grid[0] * patch_px, grid[1] * patch_px
    x = pictures(2, height, width)
    kernel = [1 + 2 * min(2 * patch_px, side - 1) for side in (width, height)]
    expected = gaussian_blur(x, kernel, [float(patch_px)] * 2)
    found = cover(x, range(grid[0] * grid[1]), grid, "blur")
    assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [(4, 4), (4, 8), (1, 1)])
def test_pictures_of_few_pixels_can_be_blurred(size):
    patch = min(size)
    found = cover(pictures(1, *size), [0], (size[0] // patch, size[1] // patch), "blur")
    assert found.shape == (1, 3, *size)
    assert found.isfinite().all()


def test_removed_is_no_fill():
    with pytest.raises(ValueError, match="mean"):
        cover(pictures(1, 8, 12), [0], (2, 3), "removed")
    with pytest.raises(ValueError, match="patch lies"):
        cover(pictures(1, 8, 12), [6], (2, 3), "mean")


# --- each patch, each head alone


def test_leave_one_out_is_the_loop_over_patches():
    model, x = small_model().double(), pictures(1).double()
    expected = torch.stack([plain(model, x) - plain(model, x, without=[patch]) for patch in range(16)])
    for target in (0, 3):
        found = leave_one_out(model, x, target)
        assert_close(found, expected[:, target], **EXACT)
        pieces = [leave_one_out(model, x, target, piece) for piece in (range(5), [], [15, 5])]
        assert [piece.shape for piece in pieces] == [(5,), (0,), (2,)]
        assert_close(torch.cat(pieces), expected[[0, 1, 2, 3, 4, 15, 5], target], **EXACT)
    assert expected.abs().min() > 1e-6


def test_effects_of_heads_are_the_loop_over_heads():
    model, x = oblong()
    heads = [(layer, head) for layer in range(3) for head in range(2)]
    expected = torch.stack([plain(model, x) - plain(model, x, off=[head]) for head in heads])
    found = head_effects(model, x, 4)
    assert found.shape == (3, 2)
    assert_close(found.flatten(), expected[:, 4], **EXACT)
    assert_close(head_effects(model, x, 4, [(2, 1), (0, 0)]), expected[[5, 0], 4], **EXACT)
    assert head_effects(model, x, 4, []).shape == (0,)
    assert expected.abs().min() > 1e-6


def test_more_heads_and_patches_than_one_part_holds():
    model, x = small_model(img_size=24, num_layers=9).double(), pictures(1, 24, 24).double()
    found = head_effects(model, x, 1).flatten(), leave_one_out(model, x, 1)
    assert [len(values) for values in found] == [36, 36]
    for i in (0, 31, 32, 35):
        assert_close(found[0][i], (plain(model, x) - plain(model, x, off=[divmod(i, 4)]))[1], **EXACT)
        assert_close(found[1][i], (plain(model, x) - plain(model, x, without=[i]))[1], **EXACT)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"target": 5}, "target lies from 0 to 4"),
        ({"target": True}, "target is a whole number"),
        ({"x": pictures(2, 8, 12).double()}, "one picture"),
        ({"x": pictures(1, 12, 8).double()}, "batch of pictures"),
    ],
)
def test_classes_and_pictures_that_do_not_fit_are_value_errors(arguments, says):
    model, x = oblong()
    for measure in (leave_one_out, head_effects):
        with pytest.raises(ValueError, match=says):
            measure(model, **{"x": x, "target": 0} | arguments)
    with pytest.raises(ValueError, match="patch lies"):
        leave_one_out(model, x, 0, [6])
    with pytest.raises(ValueError, match="head lies"):
        head_effects(model, x, 0, [(0, 2)])


# --- the most looked at against chance


@pytest.mark.parametrize("fill", FILLS)
def test_covering_the_most_weighted_is_as_covering_them_by_hand(fill):
    model, x = oblong()
    weights = torch.tensor([0.1, 0.3, 0.3, 0.0, 0.2, 0.3])
    found = cover_most(model, x, weights, 2, fill, seed=4, draws=30)
    assert found.patches == (1, 2)  # of equal weights the earlier
    assert found.target == plain(model, x).argmax()
    assert found.untouched == pytest.approx(plain(model, x).max().item(), abs=1e-10)

    def covered(*patches):
        return answer(model, x, Change(covered=frozenset(patches), fill=fill))[-1, found.target].item()

    assert found.most == pytest.approx(covered(1, 2), abs=1e-10)
    pairs = [covered(p, q) for p in range(6) for q in range(p)]
    drawn = [min(range(15), key=lambda i, one=one: abs(pairs[i] - one)) for one in found.random]
    assert [pairs[i] for i in drawn] == pytest.approx(found.random, abs=1e-10)
    assert len(found.random) == 30
    assert len(set(drawn)) > 6  # of 15 pairs
    assert found == cover_most(model, x, weights.numpy(), 2, fill, seed=4, draws=30)
    assert found.random != cover_most(model, x, weights, 2, fill, seed=5, draws=30).random


def test_covering_none_or_all_leaves_nothing_to_chance():
    model, x = oblong()
    none = cover_most(model, x, torch.rand(6), 0, draws=3)
    assert (none.most, *none.random) == pytest.approx((none.untouched,) * 4, abs=1e-10)
    every = cover_most(model, x, torch.rand(6), 6, draws=3)
    blind = plain(model, x, without=range(6))[every.target].item()
    assert (every.most, *every.random) == pytest.approx((blind,) * 4, abs=1e-10)
    assert cover_most(model, x, torch.rand(6), 1, draws=0).random == ()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"count": 7}, "count lies from 0 to 6"),
        ({"count": -1}, "count lies"),
        ({"weights": torch.rand(7)}, "each of 6 patches"),
        ({"fill": "white"}, "removed, mean, blur"),
        ({"draws": -1}, "draws"),
    ],
)
def test_what_cannot_be_covered_is_a_value_error(arguments, says):
    model, x = oblong()
    with pytest.raises(ValueError, match=says):
        cover_most(model, x, **{"weights": torch.rand(6), "count": 1} | arguments)


# --- nothing is left behind


@pytest.mark.parametrize("training", [False, True])
def test_the_model_and_the_picture_are_as_before_in_either_mode(training):
    model, x = small_model(**OBLONG, dropout=0.4), pictures(1, 8, 12)

    def everything():
        change = Change(frozenset({(0, 0)}), frozenset({1}))
        covered = cover_most(model, x, torch.arange(6.0), 3, "mean")
        values = [*answer(model, x, change).flatten(), *leave_one_out(model, x, 0)]
        return [*map(float, [*values, *head_effects(model, x, 0).flatten()]), covered.most, *covered.random]

    expected = everything()
    model.train(training)
    held, before = str([vars(module) for module in model.modules()]), x.clone()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert everything() == expected
    assert str([vars(module) for module in model.modules()]) == held
    assert torch.equal(x, before)
    assert_close(model.state_dict(), weights, atol=0, rtol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not answer(model, x, Change()).requires_grad


# --- rank correlation


def by_counting(a, b) -> float:
    """Spearman's: Pearson's of ranks, each rank one more than the smaller and half of the other equals."""
    ranks = [
        [1 + sum(o < v for o in values) + (sum(o == v for o in values) - 1) / 2 for v in values]
        for values in (a, b)
    ]
    return float(np.corrcoef(ranks)[0, 1])


NUMBERS = st.integers(-3, 3) | st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=12))
def test_rank_correlation_is_that_of_ranks_by_counting(pairs):
    a, b = (list(column) for column in zip(*pairs, strict=True))
    found = rank_correlation(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert found == 0.0
    else:
        assert found == pytest.approx(by_counting(a, b), abs=1e-9)
        assert -1 <= found <= 1
        assert rank_correlation(a, [-value for value in b]) == pytest.approx(-found, abs=1e-9)
        assert rank_correlation([8 * value for value in a], b) == found  # order is all that counts


def test_rank_correlation_in_known_cases():
    assert rank_correlation([1, 2, 3], [10, 100, 1000]) == 1
    assert rank_correlation([[1, 2], [3, 4]], [[4, 3], [2, 1]]) == -1
    assert rank_correlation([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(1 - 6 * 4 / (5 * 24))
    assert rank_correlation([], []) == rank_correlation([1], [2]) == 0.0
    with pytest.raises(ValueError, match="compared"):
        rank_correlation([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="finite"):
        rank_correlation([1, math.nan], [1, 2])


# --- python -m vit probe


def run(capsys, *argv) -> tuple[int, str, str]:
    code = main(["probe", *map(str, argv)])
    return code, *capsys.readouterr()


def test_json_holds_the_numbers_of_the_library(capsys):
    model, checkpoint = load(BUNDLED)
    x = prepare(open_picture(CAT), checkpoint)
    names = checkpoint.class_names
    changes = ["--heads-off", "3.1", "6.4", "--layer-off", "2", "--cover", "3,4", "8,8", "--fill", "mean"]
    measures = ["--layers", "--cover-most", "16", "--leave-one-out", "--head-effects"]
    code, out, err = run(capsys, CAT, *changes, *measures, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    off = {(2, 0), (5, 3), *((1, head) for head in range(8))}
    untouched = answer(model, x, Change())
    changed = answer(model, x, Change(frozenset(off), frozenset({19, 63}), "mean"))
    target = int(untouched[-1].argmax())
    assert found["class"] == names[target] == "cat"
    assert list(found["probabilities"].values()) == pytest.approx(untouched[-1].tolist())
    assert list(found["changed"]["probabilities"].values()) == pytest.approx(changed[-1].tolist())
    assert found["changed"]["heads_off"] == [f"{layer + 1}.{head + 1}" for layer, head in sorted(off)]
    assert len(found["changed"]["heads_on"]) == 48 - len(off)
    assert found["changed"]["covered"] == ["3,4", "8,8"]
    for rows, expected in ((found["layers"], untouched), (found["changed"]["layers"], changed)):
        assert [list(row) for row in rows] == [list(names)] * 6
        np.testing.assert_allclose([list(row.values()) for row in rows], expected, atol=1e-6)
    drops = leave_one_out(model, x, target)
    np.testing.assert_allclose(found["leave_one_out"], drops.view(8, 8), atol=1e-6)
    np.testing.assert_allclose(found["head_effects"], head_effects(model, x, target), atol=1e-6)
    rollout = explain(model, x, discard_ratio=0.9).relevance.flatten()
    assert found["rank_correlation_with_rollout"] == pytest.approx(rank_correlation(drops, rollout), abs=0.01)
    covered = cover_most(model, x, rollout, 16, "mean")
    assert found["cover_most"]["most"] == pytest.approx(covered.most, abs=1e-5)
    assert found["cover_most"]["random"] == pytest.approx(covered.random, abs=1e-5)
    assert found["cover_most"]["patches"][0] == "{},{}".format(*(np.array(divmod(covered.patches[0], 8)) + 1))


def test_text_says_the_same_and_nothing_that_was_not_asked(capsys):
    found = json.loads(run(capsys, CAT, "--only-head", "6.1", "--layers", "--json")[1])
    code, text, _ = run(capsys, CAT, "--only-head", "6.1", "--layers")
    lines = text.splitlines()
    assert code == 0
    assert lines[0] == f"{CAT}: cat, {found['probability']:.1%}"
    assert lines[1] == f"changed: {found['changed']['class']}, {found['changed']['probability']:.1%}"
    assert lines[2] == "  heads off: all but 6.1"
    assert len(found["changed"]["heads_off"]) == 47
    for name, before in found["probabilities"].items():
        row = [name, f"{before:.1%}", f"{found['changed']['probabilities'][name]:.1%}"]
        assert row in [line.split() for line in lines]
    last = next(line.split() for line in lines if line.split()[0:1] == ["6"])
    assert last[1:3] == ["cat,", f"{found['probability']:.1%}"]
    assert run(capsys, CAT)[1].splitlines() == lines[:1]
    everything = run(capsys, CAT, "--leave-one-out", "--head-effects", "--cover-most", "3")[1]
    rows = [line.split() for line in everything.splitlines()]
    effects = json.loads(run(capsys, CAT, "--head-effects", "--json")[1])["head_effects"]
    for layer, values in enumerate(effects):
        shown = next(row for row in rows if row[:2] == ["layer", str(layer + 1)])
        assert [float(cell) for cell in shown[2:]] == pytest.approx([100 * v for v in values], abs=0.051)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["none.png"], "There is no file"),
        ([CAT, "--heads-off", "7.1"], "layers 1 to 6 with heads 1 to 8"),
        ([CAT, "--heads-off", "1.9"], "layers 1 to 6 with heads 1 to 8"),
        ([CAT, "--layer-off", "7"], "layers 1 to 6"),
        ([CAT, "--only-head", "1.9"], "heads 1 to 8"),
        ([CAT, "--cover", "9,1"], "rows 1 to 8"),
        ([CAT, "--cover", "cls"], "CLS is no patch"),
        ([CAT, "--cover-most", "65"], "this model has 64"),
        ([CAT, "--heads-off", "3"], "LAYER.HEAD is needed"),
        ([CAT, "--heads-off", "0.1"], "from 1"),
        ([CAT, "--fill", "black"], "black"),
        ([CAT, "--checkpoint", CAT], "not a checkpoint"),
        ([], "PICTURE"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, argv, says):
    try:
        code = main(["probe", *argv])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
