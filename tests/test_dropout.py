"""Each dropout acts where the tutorial has it, by its own share, in train mode only, and never in the maps.

Run: pytest tests/test_dropout.py (a few seconds; one test needs a GPU and says so).

The exact tests put a dropout in ours' place whose pattern depends on the share and the shape alone. With a
share of its own for each module, the plain model then says which one acted where. Then `drop` itself: its
decisions are independent, each of the right chance, and torch's seed repeats them.
"""

import math

import pytest
import torch
from plain_vit import PLACES, pictures, plain_vit, small_model
from torch.testing import assert_close

import vit.block
import vit.model
from vit.dropout import drop
from vit.model import MultiHeadAttention, VisualTransformer

CLOSE = {"atol": 1e-5, "rtol": 1e-5}

# places where dropout acts -> the module (of the model, or of each block) that has its share
MODULES = {
    "embedded": "dropout",
    "map": "attn.attn_dropout",
    "attention branch": "dropout",
    "hidden": "mlp.2",
    "narrow": "mlp.4",
    "mlp branch": "dropout",
}


def patterned_drop(tensor, p):
    """Each of 17 tokens meets its own, however many there are: in training the last block has CLS alone."""
    if p == 0:
        return tensor
    generator = torch.Generator().manual_seed(round(1000 * p))
    *before, tokens, width = tensor.shape
    return tensor * (torch.rand(*before, 17, width, generator=generator) >= p)[..., :tokens, :] / (1 - p)


def holder(model, place, depth):
    root = model if place == "embedded" else model.encoder_blocks[depth]
    return root.get_submodule(MODULES[place])


def share_at(model, place, depth):
    if place == "narrow":
        return 0.0  # acts with the next, which has nothing in between: an element stays if it stays in both
    if place == "mlp branch":
        stays = [1 - holder(model, each, depth).p for each in ("narrow", "mlp branch")]
        return 1 - math.prod(stays)
    return holder(model, place, depth).p if place in MODULES else 0.0


def test_every_dropout_is_accounted_for():
    model = VisualTransformer(10, dropout=0.3)
    shares = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert shares == [0.3] * (1 + 4 * 6)  # a block's own acts twice
    assert set(MODULES) < set(PLACES)


@torch.no_grad()
@pytest.mark.parametrize("alone", [*MODULES, "all at once"])
def test_each_dropout_acts_at_its_place_with_its_share(alone, monkeypatch):
    for module in (vit.block, vit.model):
        monkeypatch.setattr(module, "drop", patterned_drop)
    model, x = small_model().train(), pictures(2)
    without = model(x)
    for order, place in enumerate(MODULES):
        if alone in (place, "all at once"):
            for depth in range(1 if place == "embedded" else model.num_layers):
                holder(model, place, depth).p = 0.1 + 0.05 * order + 0.01 * depth

    def drop(place, depth, tensor):
        return patterned_drop(tensor, share_at(model, place, depth))

    expected_logits, expected_maps = plain_vit(model.state_dict(), x, 4, at=drop)
    logits, maps = model(x, return_attn=True)
    assert not torch.allclose(logits, without, atol=1e-2)
    assert_close(logits, expected_logits, **CLOSE)
    assert_close(maps, expected_maps, **CLOSE)  # as they were before dropout
    assert_close(model(x), expected_logits, **CLOSE)
    assert_close(model.trace(x).logits, without, **CLOSE)
    assert_close(model.eval()(x), without, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("return_attn", [False, True])
@pytest.mark.parametrize("place", MODULES)
def test_dropout_draws_anew_in_each_place_and_path(place, return_attn):
    model, x = small_model().train(), pictures(2)
    holder(model, place, 0).p = 0.5
    first, second = (model(x, True)[0] if return_attn else model(x) for _ in range(2))
    assert bool(((first - second).abs().amax(dim=1) > 1e-3).all())
    model.eval()
    assert torch.equal(model(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("return_attn", [False, True])
def test_attention_dropout_has_the_right_mean_and_spread(return_attn):
    """Kept keys give a v / (1-p): the mean of their sum is sum(a v), its variance p/(1-p) sum(a² v²)."""
    torch.manual_seed(0)
    draws, share = 20_000, 0.3
    attention = MultiHeadAttention(2, 1, dropout=share)
    attention.out.weight.copy_(torch.eye(2))
    tokens = torch.randn(1, 4, 2)
    mean, attn_map = attention.eval()(tokens, return_attn=True)
    v = (tokens @ attention.qkv.weight.T)[..., 4:]
    variance = share / (1 - share) * (attn_map[:, 0].square() @ v.square())

    drawn = attention.train()(tokens.expand(draws, 4, 2), return_attn=return_attn)
    if return_attn:
        drawn, maps = drawn
        assert_close(maps, attn_map.expand_as(maps))
    assert bool(((drawn.mean(0) - mean[0]).abs() < 5 * (variance[0] / draws).sqrt()).all())
    assert_close(drawn.var(0), variance[0], rtol=0.06, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("batch", [2, 70])
def test_rows_sum_to_one_in_train_mode(batch):
    model = small_model(dropout=0.5).train()
    for layer in model(pictures(batch), return_attn=True)[1]:
        assert bool((layer > 0).all())
        assert_close(layer.sum(-1), torch.ones(batch, 4, 17), **CLOSE)


@torch.no_grad()
def test_eval_mode_drops_nothing():
    x = pictures(2)
    dropping, plain = small_model(dropout=0.9), small_model()
    for logits in (dropping(x), dropping(x, True)[0], dropping.trace(x).logits):
        assert_close(logits, plain(x), **CLOSE)


# --- the function itself


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_each_element_is_dropped_by_the_share_and_scaled_by_the_rest(share):
    torch.manual_seed(0)
    dropped = drop(torch.full((400_000,), 2.0), share)
    assert_close(dropped.unique(), torch.tensor([0, 2 / (1 - share)]), rtol=1e-3, atol=0)
    # four elements come of one random word: each must have the right chance
    for shares in ((dropped == 0).view(-1, 4).float().mean(0), (dropped == 0).view(4, -1).float().mean(1)):
        error = (share * (1 - share) / 100_000) ** 0.5
        assert bool(((shares - share).abs() < 4.5 * error + 2**-17).all())
    mean_error = 2 * (share / (1 - share) / len(dropped)) ** 0.5
    assert abs(dropped.double().mean() - 2) < 4.5 * mean_error  # the true rest, not the asked one, divides


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("apart", [1, 2, 3, 4, 5, 64, 65])
def test_no_element_tells_of_another(share, apart):
    torch.manual_seed(1)
    dropped = (drop(torch.ones(400_000), share) == 0).float() - share
    together = (dropped[apart:] * dropped[:-apart]).mean() / (share * (1 - share))
    assert abs(together) < 4.5 / len(dropped) ** 0.5


def test_a_share_between_two_steps_of_sixteen_bits_takes_the_scale_of_its_step():
    torch.manual_seed(2)
    scale = drop(torch.ones(1000), 1.6 / 65536).max().item()
    assert scale == pytest.approx(65536 / 65534, abs=1e-7)
    dropped = drop(torch.ones(100), 1 - 2**-40)
    assert bool(dropped.isfinite().all())


def test_the_seed_repeats_the_decisions():
    def drawn(seed):
        torch.manual_seed(seed)
        return drop(torch.ones(1000), 0.5), drop(torch.ones(1000), 0.5)

    first, second = drawn(5)
    assert torch.equal(torch.stack(drawn(5)), torch.stack((first, second)))
    assert not torch.equal(first, second)
    assert not torch.equal(drawn(6)[0], first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (2, 0)])
def test_the_gradient_is_the_pattern(dtype, shape):
    torch.manual_seed(3)
    x = torch.randn(shape).to(dtype)
    x = (x.mT if x.ndim > 1 else x).requires_grad_()  # not contiguous where it can be
    dropped = drop(x, 0.25)
    (gradient,) = torch.autograd.grad(dropped.sum(), x)
    assert dropped.shape == x.shape
    assert dropped.dtype == gradient.dtype == dtype
    assert_close(gradient * x, dropped)
    kept = torch.tensor(4 / 3, dtype=dtype)
    assert set(gradient.flatten().tolist()) <= {0.0, kept.item()}


def test_a_share_of_nothing_is_nothing_and_impossible_ones_are_refused():
    x = torch.randn(3)
    assert drop(x, 0.0) is x
    for share in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="from 0 to below 1"):
            drop(x, share)


def test_training_with_dropout_compiles_to_one_graph():
    model, x = small_model(dropout=0.3).train(), pictures(3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.manual_seed(4)
    expected = model(x)
    torch.manual_seed(4)
    assert_close(compiled(x), expected, **CLOSE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none here")
def test_a_gpu_drops_too():
    dropped = drop(torch.ones(100_000, device="cuda"), 0.1)
    assert abs((dropped == 0).float().mean().item() - 0.1) < 4.5 * (0.09 / 100_000) ** 0.5
