"""Each dropout acts where the tutorial has it, by its own share, in train mode only, and never in the maps.

Run: pytest tests/test_dropout.py (a few seconds).

The exact tests put a dropout in torch's place whose pattern depends on the share and the shape alone. With a
share of its own for each module, the plain model then says which one acted where.
"""

import pytest
import torch
from plain_vit import PLACES, pictures, plain_vit, small_model
from torch.testing import assert_close

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


def patterned_dropout(tensor, p=0.5, training=True, inplace=False):
    assert not inplace
    if not training or p == 0:
        return tensor
    generator = torch.Generator().manual_seed(round(1000 * p))
    return tensor * (torch.rand(tensor.shape, generator=generator) >= p) / (1 - p)


def holder(model, place, depth):
    root = model if place == "embedded" else model.encoder_blocks[depth]
    return root.get_submodule(MODULES[place])


def share_at(model, place, depth):
    return holder(model, place, depth).p if place in MODULES else 0.0


def test_every_dropout_is_accounted_for():
    model = VisualTransformer(10, dropout=0.3)
    shares = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert shares == [0.3] * (1 + 4 * 6)  # a block's own acts twice
    assert set(MODULES) < set(PLACES)


@torch.no_grad()
@pytest.mark.parametrize("alone", [*MODULES, "all at once"])
def test_each_dropout_acts_at_its_place_with_its_share(alone, monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "dropout", patterned_dropout)
    model, x = small_model().train(), pictures(2)
    without = model(x)
    for order, place in enumerate(MODULES):
        if alone in (place, "all at once"):
            for depth in range(1 if place == "embedded" else model.num_layers):
                holder(model, place, depth).p = 0.1 + 0.05 * order + 0.01 * depth

    def drop(place, depth, tensor):
        return patterned_dropout(tensor, share_at(model, place, depth))

    expected_logits, expected_maps = plain_vit(model.state_dict(), x, 4, at=drop)
    logits, maps = model(x, return_attn=True)
    assert not torch.allclose(logits, without, atol=1e-2)
    assert_close(logits, expected_logits, **CLOSE)
    assert_close(maps, expected_maps, **CLOSE)  # as they were before dropout
    if alone not in ("map", "all at once"):  # there the fused kernel draws on its own
        assert_close(model(x), expected_logits, **CLOSE)
    assert_close(model.trace(x).logits, without, **CLOSE)
    assert_close(model.eval()(x), without, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("return_attn", [False, True])
@pytest.mark.parametrize("place", MODULES)
def test_torchs_dropout_draws_anew_in_each_place_and_path(place, return_attn):
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
