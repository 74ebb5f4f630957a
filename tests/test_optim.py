"""Optimisers, schedule and average do the written-out arithmetic, and go on to the bit from what was saved.

Run: pytest tests/test_optim.py (some seconds; one case needs a GPU and says so).
"""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from plain_vit import pictures, small_model
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as write_safetensors
from torch import nn
from torch.testing import assert_close

from train.optim import (
    Ema,
    Muon,
    build_optimisers,
    load_state_tensors,
    orthogonalise,
    scale_rates,
    state_tensors,
)
from train.schedule import OptimConfig, Schedule

KINDS = ("adamw", "muon")
IN_BLOCKS = re.compile(r"encoder_blocks\.\d+\.(attn\.qkv|attn\.out|mlp\.0|mlp\.3)\.weight")
OUTSIDE = {"patch_embed.conv.weight", "mlp_head.1.weight"}
SIZES = [(64, 64), (32, 96), (96, 32), (16, 48), (1, 7)]


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quintic(x: torch.Tensor) -> torch.Tensor:
    """What five Newton-Schulz steps make of single numbers."""
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return x


def direction(matrix: torch.Tensor) -> torch.Tensor:
    """What they make of a matrix, in float64 and by its singular values: no product of the matrix itself."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ torch.diag(quintic(s / s.square().sum().sqrt())) @ vt


def by_name(optimisers) -> dict[str, tuple[type, dict]]:
    """The kind of optimiser and the group that hold each parameter; fails where one is held twice."""
    found = {}
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            for name in group["param_names"]:
                assert name not in found
                found[name] = (type(optimiser), group)
    return found


def train(model, optimisers, steps: int, *, first: int = 0, ema: Ema | None = None) -> list[float]:
    """Losses of steps on one fixed set of pictures, with a schedule, as a run would take them."""
    device = next(model.parameters()).device
    x, y = pictures(24).to(device), (torch.arange(24) % 5).to(device)
    losses = []
    for step in range(first, first + steps):
        scale_rates(optimisers, Schedule("linear", 0.05).lr_scale((step + 0.5) / 40))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        if ema is not None:
            ema.update(model)
        losses.append(loss.item())
    return losses


def assert_same_bits(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


# --- who updates what


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_held_once_and_only_matrices_decay(kind):
    model = small_model()
    held = by_name(build_optimisers(model, OptimConfig(kind=kind, weight_decay=0.3)))
    assert held.keys() == dict(model.named_parameters()).keys()
    for name, (optimiser, group) in held.items():
        block_matrix = IN_BLOCKS.fullmatch(name) is not None
        assert (optimiser is Muon) == (block_matrix and kind == "muon"), name
        assert group["weight_decay"] == (0.3 if block_matrix or name in OUTSIDE else 0.0), name
        if optimiser is Muon:
            assert group["parts"] == (3 if "qkv" in name else 1)


def test_each_optimiser_gets_its_own_settings():
    config = OptimConfig("muon", lr=0.1, muon_lr=0.2, betas=(0.3, 0.4), momentum=0.5)
    muon, adamw = build_optimisers(small_model(), config)
    assert [(g["lr"], g["momentum"]) for g in muon.param_groups] == [(0.2, 0.5)] * 2
    assert [(g["lr"], g["betas"]) for g in adamw.param_groups] == [(0.1, (0.3, 0.4))] * 2
    assert muon.dtype == torch.float32
    assert build_optimisers(small_model(), config, bf16=True)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "sgd"}, "kind is 'adamw' or 'muon', not 'sgd'"),
        ({"lr": 0.0}, "lr is a number above 0"),
        ({"muon_lr": math.nan}, "muon_lr is a number above 0"),
        ({"lr": math.inf}, "lr is a number above 0"),
        ({"weight_decay": -0.1}, "weight_decay is a number from 0 up"),
        ({"betas": (0.9, 1.0)}, "betas are two numbers"),
        ({"betas": (0.9,)}, "betas are two numbers"),
        ({"momentum": 1.0}, "momentum lies from 0 to below 1"),
    ],
)
def test_impossible_settings_are_refused_in_words(changes, said):
    with pytest.raises(ValueError, match=said):
        OptimConfig(**changes)


def test_muon_takes_matrices_only():
    for parameter, parts in ((torch.zeros(3), 1), (torch.zeros(4, 2), 3)):
        with pytest.raises(ValueError, match="Muon takes matrices"):
            Muon([{"params": [("w", nn.Parameter(parameter))], "parts": parts}], lr=0.1)


# --- Newton-Schulz


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize("size", [1.0, 1e-8, 1e8])
def test_orthogonalise_equals_the_singular_values_sent_through_the_quintic(rows, columns, size):
    matrices = size * torch.stack([random(rows, columns, seed=seed) for seed in range(3)])
    expected = torch.stack([direction(matrix) for matrix in matrices])
    assert_close(orthogonalise(matrices).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_orthogonalise_draws_singular_values_close_to_one_and_keeps_the_direction(rows, columns):
    matrix = random(rows, columns)
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    result = orthogonalise(matrix[None])[0].double()
    in_old_directions = (u.T @ result @ vt.T).diagonal()
    reached = s / s.norm() > 1 / 500
    assert reached.sum() >= 0.9 * len(s)  # a random square matrix has a few that are smaller
    assert in_old_directions[reached].min() > 0.68
    assert in_old_directions.max() < 1.21
    assert in_old_directions.min() > 0
    cosine = F.cosine_similarity(result.flatten(), (u @ vt).flatten(), dim=0)
    assert cosine > 0.97


def test_stacked_matrices_equal_one_by_one():
    matrices = random(5, 24, 40)
    alone = torch.cat([orthogonalise(matrix[None]) for matrix in matrices])
    assert_close(orthogonalise(matrices), alone, atol=1e-5, rtol=0)


def test_a_zero_matrix_stays_zero():
    assert torch.equal(orthogonalise(torch.zeros(2, 4, 8)), torch.zeros(2, 4, 8))


def test_bfloat16_products_give_the_direction_roughly_and_float32_back():
    matrix = random(1, 32, 64)
    rough = orthogonalise(matrix, torch.bfloat16)
    assert rough.dtype == torch.float32
    exact = orthogonalise(matrix)
    assert not torch.equal(rough, exact)
    assert F.cosine_similarity(rough.flatten(), exact.flatten(), dim=0) > 0.99


# --- the steps, against the formulas in float64


def three_steps(model, optimisers, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Take three steps with random gradients; returns the gradients."""
    taken = []
    for step in range(3):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = random(*parameter.shape, seed=1000 * step + number + seed)
        taken.append({name: p.grad.double() for name, p in model.named_parameters()})
        for optimiser in optimisers:
            optimiser.step()
    return taken


def test_muon_equals_its_formula():
    model = small_model()
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    gradients = three_steps(
        model, build_optimisers(model, OptimConfig("muon", muon_lr=0.02, weight_decay=0.5, momentum=0.8))
    )
    for name, p in model.named_parameters():
        if not IN_BLOCKS.fullmatch(name):
            continue
        w, m = before[name], torch.zeros_like(before[name])
        for g in (taken[name] for taken in gradients):
            m = 0.8 * m + 0.2 * g
            ahead = 0.8 * m + 0.2 * g
            parts = torch.tensor_split(ahead, 3 if "qkv" in name else 1)
            update = torch.cat([0.2 * math.sqrt(max(part.shape)) * direction(part) for part in parts])
            w = w * (1 - 0.02 * 0.5) - 0.02 * update
        assert_close(p.detach().double(), w, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_equals_its_formula(kind):
    model = small_model()
    before = {name: p.detach().double() for name, p in model.named_parameters()}
    config = OptimConfig(kind, lr=0.02, weight_decay=0.5, betas=(0.7, 0.9))
    gradients = three_steps(model, build_optimisers(model, config))
    for name, p in model.named_parameters():
        if kind == "muon" and IN_BLOCKS.fullmatch(name):
            continue
        decay = 0.5 if IN_BLOCKS.fullmatch(name) or name in OUTSIDE else 0.0
        w, m, v = before[name], 0.0, 0.0
        for step, g in enumerate((taken[name] for taken in gradients), start=1):
            m, v = 0.7 * m + 0.3 * g, 0.9 * v + 0.1 * g**2
            w = w * (1 - 0.02 * decay) - 0.02 * (m / (1 - 0.7**step)) / ((v / (1 - 0.9**step)).sqrt() + 1e-8)
        assert_close(p.detach().double(), w, atol=1e-5, rtol=0)


def muon_of(*pairs, parts=1) -> Muon:
    return Muon([{"params": list(pairs), "parts": parts}], lr=0.05, weight_decay=0.1)


def test_qkv_as_three_equals_three_separate_matrices():
    joined = nn.Parameter(random(48, 16))
    q, k, v = separate = [nn.Parameter(part.clone()) for part in joined.detach().chunk(3)]
    three, one = muon_of(("qkv", joined), parts=3), muon_of(("q", q), ("k", k), ("v", v))
    for step in range(3):
        joined.grad = random(48, 16, seed=step) * torch.arange(1, 49)[:, None]  # parts of unequal size
        for part, gradient in zip(separate, joined.grad.chunk(3), strict=True):
            part.grad = gradient.clone()
        three.step()
        one.step()
    assert_close(joined.detach(), torch.cat([part.detach() for part in separate]), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (32, 96), (96, 32)])
def test_an_update_is_as_large_as_adamws_usual_one(rows, columns):
    for parts in (1, 3):
        weight = nn.Parameter(torch.zeros(parts * rows, columns))
        weight.grad = random(parts * rows, columns)
        muon_of(("weight", weight), parts=parts).step()
        rms = (weight.detach() / 0.05).square().mean().sqrt()
        assert 0.8 * 0.2 < rms < 1.2 * 0.2


def test_a_step_leaves_gradients_alone_and_skips_what_has_none():
    model = small_model()
    optimisers = build_optimisers(model, OptimConfig("muon"))
    before = copied(model.state_dict())
    idle = ("encoder_blocks.1.mlp.0.weight", "cls_token")
    for name, p in model.named_parameters():
        p.grad = None if name in idle else torch.ones_like(p)
    for optimiser in optimisers:
        optimiser.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (name in idle), name
        assert p.grad is None or torch.equal(p.grad, torch.ones_like(p))
    saved = state_tensors(optimisers)
    assert not saved["cls_token.exp_avg_sq"].any()
    assert saved["cls_token.step"] == 0
    assert saved["pos_embed.step"] == 1


# --- they learn


def test_muon_solves_a_small_regression():
    x, true = random(64, 12), random(8, 12, seed=4)
    weight = nn.Parameter(torch.zeros(8, 12))
    muon = Muon([("weight", weight)], lr=1.0)
    losses = []
    for step in range(60):
        scale_rates([muon], Schedule("linear").lr_scale(step / 60))
        muon.zero_grad()
        loss = (x @ weight.T - x @ true.T).square().mean()
        loss.backward()
        muon.step()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_tiny_vit_learns(kind, bf16):
    model = small_model().train()
    losses = train(model, build_optimisers(model, OptimConfig(kind, lr=3e-3), bf16=bf16), 30)
    assert losses[-1] < 0.4 * losses[0]


# --- the saved state


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_run_twice_gives_the_same_bits(kind):
    ends = []
    for _ in range(2):
        model = small_model().train()
        train(model, build_optimisers(model, OptimConfig(kind)), 6)
        ends.append(model.state_dict())
    assert_same_bits(*ends)


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_run_goes_on_to_the_bit_from_saved_bytes(kind, device):
    config = OptimConfig(kind)
    model = small_model().train().to(device)
    optimisers, ema = build_optimisers(model, config, bf16=device == "cuda"), Ema(model)
    train(model, optimisers, 5, ema=ema)
    optimiser_file = write_safetensors(state_tensors(optimisers))
    ema_file = write_safetensors(ema.tensors())
    weights = copied(model.state_dict())
    train(model, optimisers, 5, first=5, ema=ema)

    again = small_model(seed=9).train().to(device)
    optimisers_again, ema_again = build_optimisers(again, config, bf16=device == "cuda"), Ema(again)
    again.load_state_dict(weights)
    loaded = read_safetensors(optimiser_file)
    load_state_tensors(optimisers_again, loaded)
    ema_again.load(read_safetensors(ema_file))
    assert_same_bits(state_tensors(optimisers_again), loaded)
    train(again, optimisers_again, 5, first=5, ema=ema_again)

    assert_same_bits(
        loaded, read_safetensors(optimiser_file)
    )  # training on did not write into what was given
    assert_same_bits(again.state_dict(), model.state_dict())
    assert_same_bits(state_tensors(optimisers_again), state_tensors(optimisers))
    assert_same_bits(ema_again.tensors(), ema.tensors())


def test_torchs_own_state_dict_of_muon_round_trips():
    model, again = small_model().train(), small_model().train()
    optimisers, others = (build_optimisers(m, OptimConfig("muon")) for m in (model, again))
    train(model, optimisers, 4)
    again.load_state_dict(copied(model.state_dict()))
    for optimiser, other in zip(optimisers, others, strict=True):
        other.load_state_dict(copy.deepcopy(optimiser.state_dict()))  # torch itself copies nothing
    state = optimisers[0].state_dict()["state"]
    assert all(isinstance(value, torch.Tensor) for entry in state.values() for value in entry.values())
    train(model, optimisers, 3, first=4)
    train(again, others, 3, first=4)
    assert_same_bits(again.state_dict(), model.state_dict())


def test_names_are_the_parameters_names_and_do_not_depend_on_the_step():
    model = small_model().train()
    optimisers = build_optimisers(model, OptimConfig("muon"))
    fresh = state_tensors(optimisers)
    train(model, optimisers, 1)
    trained = state_tensors(optimisers)
    assert fresh.keys() == trained.keys()
    assert not any(tensor.any() for tensor in fresh.values())
    assert trained["encoder_blocks.0.attn.qkv.weight.momentum"].shape == (48, 16)
    assert trained["mlp_head.1.weight.exp_avg_sq"].any()
    assert trained["mlp_head.1.weight.step"] == 1
    kept = copied(trained)
    train(model, optimisers, 1)
    assert_same_bits(trained, kept)  # a copy, not a view of what goes on changing


def cut(tensors):
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("cls_token")}


WRONG = {
    "lacks cls_token": cut,
    "holds the unknown extra.momentum": lambda tensors: tensors | {"extra.momentum": torch.zeros(2)},
    "has pos_embed.* of shape": lambda tensors: (
        tensors | {name: t.mT for name, t in tensors.items() if name.startswith("pos_embed") and t.ndim}
    ),
    "has pos_embed.*float64": lambda tensors: (
        tensors | {name: t.double() for name, t in tensors.items() if name.startswith("pos_embed")}
    ),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(said):
    model = small_model().train()
    optimisers, ema = build_optimisers(model, OptimConfig("muon")), Ema(model)
    train(model, optimisers, 2, ema=ema)
    before, average = state_tensors(optimisers), ema.tensors()
    others = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    with pytest.raises(ValueError, match=said):
        load_state_tensors(optimisers, WRONG[said](others))
    with pytest.raises(ValueError, match=said):
        ema.load(WRONG[said]({name: torch.ones_like(tensor) for name, tensor in average.items()}))
    assert_same_bits(state_tensors(optimisers), before)
    assert_same_bits(ema.tensors(), average)


def test_the_state_of_another_optimiser_is_refused():
    model = small_model()
    adamw, muon = (build_optimisers(model, OptimConfig(kind)) for kind in KINDS)
    with pytest.raises(ValueError, match=r"lacks encoder_blocks.*step and 35 more"):
        load_state_tensors(adamw, state_tensors(muon))


# --- rates


def test_rates_are_scaled_from_their_start_and_never_saved():
    model = small_model()
    config = OptimConfig("muon", lr=0.1, muon_lr=0.4)
    optimisers = build_optimisers(model, config)
    for scale in (0.5, 0.25):
        scale_rates(optimisers, scale)
        rates = [group["lr"] for optimiser in optimisers for group in optimiser.param_groups]
        assert rates == [0.4 * scale] * 2 + [0.1 * scale] * 2
    lower = build_optimisers(model, OptimConfig("muon", lr=0.01, muon_lr=0.04))
    load_state_tensors(lower, state_tensors(optimisers))
    scale_rates(lower, 1.0)
    assert [group["lr"] for optimiser in lower for group in optimiser.param_groups] == [0.04] * 2 + [0.01] * 2


shapes = st.sampled_from(["constant", "linear", "cosine"])
shares = st.floats(0, 1)


@given(shapes, st.floats(0, 1, exclude_max=True), shares, shares)
def test_rates_stay_in_range_rise_in_the_warmup_and_never_after(shape, warmup_share, a, b):
    schedule = Schedule(shape, warmup_share)
    early, late = sorted((a, b))
    first, second = schedule.lr_scale(early), schedule.lr_scale(late)
    assert 0 <= first <= 1
    assert 0 <= second <= 1
    if late < warmup_share:
        assert first <= second + 1e-12
    if early >= warmup_share:
        assert first >= second - 1e-12


@pytest.mark.parametrize("warmup_share", [0.0, 0.2, 0.5])
@pytest.mark.parametrize(
    ("shape", "halfway", "quarter_left", "end"),
    [("constant", 1, 1, 1), ("linear", 0.5, 0.25, 0), ("cosine", 0.5, 0.5 - math.sqrt(0.125), 0)],
)
def test_rates_at_known_places(shape, halfway, quarter_left, end, warmup_share):
    schedule = Schedule(shape, warmup_share)
    rest = 1 - warmup_share
    assert schedule.lr_scale(0) == (0 if warmup_share else 1)
    assert schedule.lr_scale(warmup_share / 4) == pytest.approx(0.25 if warmup_share else 1)
    assert schedule.lr_scale(warmup_share) == 1
    assert schedule.lr_scale(warmup_share + 0.5 * rest) == pytest.approx(halfway)
    assert schedule.lr_scale(warmup_share + 0.75 * rest) == pytest.approx(quarter_left)
    assert schedule.lr_scale(1) == end
    assert schedule.lr_scale(1.01) == end


@pytest.mark.parametrize("progress", [-0.1, math.nan])
def test_progress_that_is_no_share_is_refused(progress):
    with pytest.raises(ValueError, match="progress is a share from 0 to 1"):
        Schedule().lr_scale(progress)


@pytest.mark.parametrize("changes", [{"shape": "step"}, {"warmup_share": 1.0}, {"warmup_share": -0.1}])
def test_impossible_schedules_are_refused_in_words(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} "):
        Schedule(**changes)


# --- the average


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.998])
def test_ema_equals_the_recursion_and_changes_no_trained_weight(decay):
    model, untouched = small_model().train(), small_model().train()
    optimisers, others = (build_optimisers(m, OptimConfig("adamw")) for m in (model, untouched))
    ema = Ema(model, decay)
    average = {name: p.detach().double() for name, p in model.named_parameters()}
    for step in range(12):
        train(model, optimisers, 1, first=step, ema=ema)
        train(untouched, others, 1, first=step)
        d = min(decay, (1 + step) / (10 + step))
        for name, p in model.named_parameters():
            average[name] = d * average[name] + (1 - d) * p.detach().double()
    assert_same_bits(model.state_dict(), untouched.state_dict())
    assert model.training
    for name, p in ema.model.named_parameters():
        assert_close(p.double(), average[name], atol=1e-6, rtol=0)


def test_the_averaged_model_is_separate_and_only_for_looking():
    model = small_model().train()
    ema = Ema(model, 0.9)
    for p, averaged in zip(model.parameters(), ema.model.parameters(), strict=True):
        assert p.requires_grad
        assert not averaged.requires_grad
        assert p.data_ptr() != averaged.data_ptr()
    assert model.training
    assert not any(module.training for module in ema.model.modules())
    train(model, build_optimisers(model, OptimConfig()), 3, ema=ema)
    assert not torch.equal(ema.model(pictures(2)), model.eval()(pictures(2)))
    saved = ema.tensors()
    kept = copied(saved)
    train(model, build_optimisers(model, OptimConfig()), 1, ema=ema)
    assert_same_bits(saved, kept)


@pytest.mark.parametrize("decay", [1.0, -0.1, math.nan])
def test_a_decay_that_averages_nothing_is_refused(decay):
    with pytest.raises(ValueError, match="the decay of the average lies from 0 to below 1"):
        Ema(small_model(), decay)
