"""A trace is the eval pass laid open: the same logits, every inner tensor, and gradients through the maps.

Run: pytest tests/test_trace.py (a few seconds).
"""

import copy

import pytest
import torch
from plain_vit import pictures, plain_vit, small_model
from torch import nn
from torch.testing import assert_close

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def some_patches(count: int, stay: int, patches: int = 16) -> torch.Tensor:
    """(count, stay): for each picture other patches, in another order."""
    generator = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(patches, generator=generator)[:stay] for _ in range(count)])


def keeping(keep):
    """What `keep` means, for the plain model: CLS and these patches enter the first block."""

    def at(place, depth, tensor):
        if place != "embedded":
            return tensor
        return torch.stack([t[[0, *(1 + k).tolist()]] for t, k in zip(tensor, keep, strict=True)])

    return at


# --- the same pass


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_trace_is_the_eval_pass_whatever_the_mode(training, monkeypatch):
    model, x = small_model(dropout=0.4), pictures(3)
    logits, maps = model(x, return_attn=True)
    model.train(training)
    monkeypatch.setattr(nn.Module, "train", None)  # not even for a moment may it change the mode
    trace = model.trace(x)
    assert all(module.training == training for module in model.modules())
    assert_close(trace.logits, logits, **CLOSE)
    assert_close(trace.maps, torch.stack(maps, dim=1), **CLOSE)


@torch.no_grad()
def test_shapes_and_meaning_of_what_a_trace_holds():
    model, x = small_model(), pictures(2)
    trace = model.trace(x)
    assert trace.tokens.shape == (2, 3 + 1, 17, 16)
    assert trace.q.shape == trace.k.shape == trace.v.shape == (2, 3, 4, 17, 4)
    assert trace.maps.shape == (2, 3, 4, 17, 17)
    assert_close(trace.maps, (trace.q @ trace.k.mT / 2).softmax(-1), **CLOSE)  # 2 = sqrt(D/H)
    assert_close(trace.tokens[:, 0], model.embed(x, dropout=False), **CLOSE)
    for depth, block in enumerate(model.encoder_blocks):
        assert_close(block(trace.tokens[:, depth]), trace.tokens[:, depth + 1], **CLOSE)
        normalised = block.norm1(trace.tokens[:, depth])
        expected = normalised @ block.attn.qkv.weight.T  # q, k, v, each of H heads of D/H numbers
        got = torch.stack([trace.q[:, depth], trace.k[:, depth], trace.v[:, depth]], dim=1)
        assert_close(got.permute(0, 3, 1, 2, 4).flatten(2), expected, **CLOSE)


@torch.no_grad()
def test_logit_lens_ends_at_the_logits():
    model = small_model()
    trace = model.trace(pictures(2))
    assert_close(model.classify(trace.tokens[:, -1]), trace.logits, **CLOSE)
    lens = model.classify(trace.tokens)
    assert lens.shape == (2, 4, 5)
    for depth in range(4):
        assert_close(model.classify(trace.tokens[:, depth]), lens[:, depth], **CLOSE)
        if depth < 3:
            assert not torch.allclose(lens[:, depth], trace.logits, atol=1e-2)


# --- heads switched off


@torch.no_grad()
def test_a_gate_of_ones_changes_nothing():
    model, x = small_model(), pictures(2)
    assert_close(model.trace(x, head_gate=torch.ones(3, 4)).tokens, model.trace(x).tokens, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("strength", [0.0, 0.5, -1.0])
@pytest.mark.parametrize(("depth", "head"), [(0, 0), (1, 2), (2, 3)])
def test_gating_a_head_scales_its_columns_of_the_output_projection(depth, head, strength):
    model, x = small_model(), pictures(2)
    gate = torch.ones(3, 4)
    gate[depth, head] = strength
    gated = model.trace(x, head_gate=gate)
    scaled = copy.deepcopy(model)
    scaled.encoder_blocks[depth].attn.out.weight[:, 4 * head : 4 * (head + 1)] *= strength
    expected = scaled.trace(x)
    assert_close(gated.tokens, expected.tokens, **CLOSE)
    assert_close(gated.logits, expected.logits, **CLOSE)
    assert_close(gated.maps, expected.maps, **CLOSE)
    assert not torch.allclose(gated.logits, model.trace(x).logits, atol=1e-3)


@torch.no_grad()
def test_a_gate_of_zeros_leaves_the_mlps_alone():
    model, x = small_model(), pictures(2)

    def closed(place, depth, tensor):
        return tensor * 0 if place == "attention branch" else tensor

    expected, _ = plain_vit(model.state_dict(), x, 4, at=closed)
    assert_close(model.trace(x, head_gate=torch.zeros(3, 4)).logits, expected, **CLOSE)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (3, 1), (1, 4), (3, 4, 1), ()])
def test_a_gate_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"head_gate .*\(3, 4\)"):
        small_model().trace(pictures(1), head_gate=torch.ones(shape))


# --- patches removed


@torch.no_grad()
def test_the_order_of_patches_is_in_their_positions_only():
    model, x = small_model(), pictures(3)
    keep = some_patches(3, 16)
    whole, permuted = model.trace(x), model.trace(x, keep=keep)
    assert_close(permuted.logits, whole.logits, **CLOSE)
    for i in range(3):
        order = torch.tensor([0, *(1 + keep[i]).tolist()])
        assert_close(permuted.tokens[i], whole.tokens[i][:, order], **CLOSE)
        assert_close(permuted.maps[i], whole.maps[i][..., order, :][..., order], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("count", "stay"), [(3, 5), (3, 1), (3, 0), (70, 7)])
def test_removed_patches_are_as_if_never_cut(count, stay, training):
    model, x, keep = small_model().train(training), pictures(count), some_patches(count, stay)
    expected_logits, expected_maps = plain_vit(model.state_dict(), x, 4, at=keeping(keep))
    trace = model.trace(x, keep=keep)
    assert trace.tokens.shape == (count, 4, 1 + stay, 16)
    assert_close(trace.logits, expected_logits, **CLOSE)
    assert_close(trace.maps, torch.stack(expected_maps, dim=1), **CLOSE)
    logits, maps = model(x, return_attn=True, keep=keep)
    assert_close(logits, expected_logits, **CLOSE)
    assert_close(maps, expected_maps, **CLOSE)
    assert_close(model(x, keep=keep), expected_logits, **CLOSE)
    changed = x.clone()
    changed[0, :, :4, :4] += 1  # patch 0 of picture 0
    assert torch.allclose(model(changed, keep=keep)[0], expected_logits[0], **CLOSE) == (0 not in keep[0])


@torch.no_grad()
@pytest.mark.parametrize(
    ("count", "shape"), [(2, (5,)), (2, (3, 5)), (2, (1, 5)), (2, (2, 5, 1)), (64, (96, 5))]
)
def test_patches_to_keep_for_another_number_of_pictures_are_refused(count, shape):
    model, x, keep = small_model(), pictures(count), torch.zeros(shape, dtype=torch.int64)
    for call in (model.trace, model, lambda x, keep: model(x, return_attn=True, keep=keep)):
        with pytest.raises(ValueError, match=r"keep .*pictures") as caught:
            call(x, keep=keep)
        assert str(shape) in str(caught.value)
        assert f"{count} pictures" in str(caught.value)


# --- gradients


def tiny():
    """5 tokens, in float64: small enough to nudge each number of each map."""
    model = small_model(img_size=8, embed_dim=4, num_layers=2, num_heads=2, mlp_dim=5).double()
    return model, pictures(2, 8, 8).double()


def test_gradients_of_a_logit_with_respect_to_the_maps_are_those_of_nudged_maps():
    model, x = tiny()
    trace = model.trace(x)
    gradients = torch.autograd.grad(trace.logits[0, 3], [layer.map for layer in trace.layers])
    step = 1e-5
    for depth, gradient in enumerate(gradients):
        assert bool((gradient[1] == 0).all())  # the other picture
        expected = torch.zeros(2, 5, 5, dtype=torch.float64)
        for spot in torch.cartesian_prod(torch.arange(2), torch.arange(5), torch.arange(5)).tolist():
            logits = [nudged(model, x, depth, spot, by)[0, 3] for by in (step, -step)]
            expected[tuple(spot)] = (logits[0] - logits[1]) / (2 * step)
        assert_close(gradient[0], expected, atol=1e-8, rtol=1e-6)
        read_by_cls = gradient[0][:, :1] if depth == 1 else gradient[0]  # the last block's patches go nowhere
        assert bool((read_by_cls != 0).all())


@torch.no_grad()
def nudged(model, x, depth, spot, by):
    def nudge(place, at_depth, tensor):
        if (place, at_depth) != ("map", depth):
            return tensor
        tensor = tensor.clone()
        tensor[(0, *spot)] += by
        return tensor

    return plain_vit(model.state_dict(), x, 2, at=nudge)[0]


@pytest.mark.parametrize("count", [1, 70])
def test_every_layers_map_leads_to_the_logits(count):
    trace = small_model().trace(pictures(count))
    gradients = torch.autograd.grad(trace.logits[:, 1].sum(), [layer.map for layer in trace.layers])
    assert len(gradients) == 3
    for gradient in gradients:
        assert bool((gradient[:, :, 0].abs().amax(dim=-1) > 0).all())


def test_gradients_leave_the_parameters_and_reach_the_picture():
    model, x = tiny()
    x.requires_grad_(True)
    (through_trace,) = torch.autograd.grad(model.trace(x).logits[1, 2], x)
    (through_forward,) = torch.autograd.grad(model(x)[1, 2], x)
    assert_close(through_trace, through_forward)
    assert bool((through_trace[1] != 0).all())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_reach_a_gate_and_tell_what_each_head_adds():
    model, x = tiny()
    gate = torch.full((2, 2), 0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda g: model.trace(x, head_gate=g).logits, gate)
