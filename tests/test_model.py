"""The model is the tutorial's, starts from the weights it promises, and one serves many threads.

Run: pytest tests/test_model.py (some seconds; one test needs a GPU and says so).
"""

import inspect
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from plain_vit import pictures, plain_vit, small_model
from torch import nn
from torch.testing import assert_close

from vit.model import (
    MultiHeadAttention,
    PatchEmbedding,
    TransformerEncoderBlock,
    VisualTransformer,
)

CLOSE = {"atol": 1e-5, "rtol": 1e-5}

BLOCK_SHAPES = {
    "norm1.weight": (256,),
    "norm1.bias": (256,),
    "attn.qkv.weight": (768, 256),
    "attn.out.weight": (256, 256),
    "norm2.weight": (256,),
    "norm2.bias": (256,),
    "mlp.0.weight": (512, 256),
    "mlp.0.bias": (512,),
    "mlp.3.weight": (256, 512),
    "mlp.3.bias": (256,),
}
SHAPES = {
    "cls_token": (1, 1, 256),
    "pos_embed": (1, 65, 256),
    "patch_embed.conv.weight": (256, 3, 4, 4),
    "patch_embed.conv.bias": (256,),
    **{f"encoder_blocks.{depth}.{name}": shape for depth in range(6) for name, shape in BLOCK_SHAPES.items()},
    "norm.weight": (256,),
    "norm.bias": (256,),
    "mlp_head.0.weight": (256,),
    "mlp_head.0.bias": (256,),
    "mlp_head.1.weight": (10, 256),
    "mlp_head.1.bias": (10,),
}


# --- the tutorial's architecture


def test_default_model_has_the_tutorials_parameters():
    model = VisualTransformer(10)
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert state == SHAPES
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 3_189_514


def test_default_model_computes_what_the_architecture_says():
    torch.manual_seed(0)
    state = {name: 0.05 * torch.randn(shape) for name, shape in SHAPES.items()}
    model = VisualTransformer(10).eval()
    model.load_state_dict(state)
    x = pictures(2, 32, 32)
    with torch.no_grad():
        logits, maps = model(x, return_attn=True)
    expected_logits, expected_maps = plain_vit(state, x, num_heads=8)
    assert [tuple(layer.shape) for layer in maps] == [(2, 8, 65, 65)] * 6
    assert_close(logits, expected_logits, **CLOSE)
    assert_close(maps, expected_maps, **CLOSE)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("size", [(16, 16), (16, 32), (4, 4)])
def test_both_paths_compute_the_same_whatever_the_mode(size, training):
    model = small_model(img_size=size).train(training)
    x = pictures(3, *size)
    expected_logits, expected_maps = plain_vit(model.state_dict(), x, num_heads=4)
    logits, maps = model(x, return_attn=True)
    assert_close(logits, expected_logits, **CLOSE)
    assert_close(maps, expected_maps, **CLOSE)
    assert_close(model(x), expected_logits, **CLOSE)


def test_both_paths_give_the_same_gradients():
    model, x = small_model(), pictures(3)
    fused = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    explicit = torch.autograd.grad(model(x, True)[0].square().sum(), list(model.parameters()))
    assert_close(fused, explicit, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_plain_arithmetic(training):
    """In training too, where the last block works out CLS alone, because its patches go nowhere."""
    model, x = small_model().double().train(training), pictures(3).double()
    weights = dict(model.named_parameters())
    expected = torch.autograd.grad(plain_vit(weights, x, 4)[0].square().sum(), weights.values())
    gradients = torch.autograd.grad(model(x).square().sum(), weights.values())
    assert_close(dict(zip(weights, gradients, strict=True)), dict(zip(weights, expected, strict=True)))


@pytest.mark.parametrize("keep", [None, torch.tensor([[0, 3, 7], [5, 1, 2], [9, 8, 15]])])
def test_bfloat16_on_a_cpu_gives_the_numbers_without_the_fused_kernel_nor_the_map(keep, monkeypatch):
    model, x = small_model(), pictures(3)
    expected = model(x, keep=keep)
    monkeypatch.delattr(torch.nn.functional, "scaled_dot_product_attention")
    for training in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.train(training)(x, keep=keep)
        assert logits.dtype == torch.bfloat16
        assert_close(logits.float(), expected, atol=0.1 * expected.abs().max().item(), rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        layers = list(model.steps(model.embed(x, dropout=False), explicit=False, dropout=False))
    assert all(layer.map is None for layer in layers)
    assert all(layer.q.dtype == torch.bfloat16 for layer in layers)


# --- stochastic depth


def branches_times(gate):
    """What `branch_gate` means, for the plain model."""

    def at(place, depth, tensor):
        which = {"attention branch": 0, "mlp branch": 1}.get(place)
        return tensor if which is None else tensor * gate[depth, which][:, None, None]

    return at


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("count", [3, 70])
def test_a_branch_gate_multiplies_each_pictures_branches(count, training):
    model, x = small_model().train(training), pictures(count)
    gate = torch.rand(3, 2, count, generator=torch.Generator().manual_seed(5)) * 2
    gate[torch.rand(gate.shape, generator=torch.Generator().manual_seed(6)) < 0.3] = 0
    with torch.no_grad():
        expected_logits, expected_maps = plain_vit(model.state_dict(), x, 4, at=branches_times(gate))
        logits, maps = model(x, return_attn=True, branch_gate=gate)
        assert_close(logits, expected_logits, **CLOSE)
        assert_close(maps, expected_maps, **CLOSE)
        assert_close(model(x, branch_gate=gate), expected_logits, **CLOSE)
        assert_close(model(x, branch_gate=torch.ones_like(gate)), model(x), **CLOSE)


def test_a_branch_gate_goes_with_patches_kept_autocast_and_compile():
    model, x = small_model().train(), pictures(3)
    keep, gate = torch.tensor([[0, 3], [5, 1], [9, 8]]), 2 * torch.rand(3, 2, 3).double()
    expected = model(x, keep=keep, branch_gate=gate.float())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(x, keep=keep, branch_gate=gate.float()), expected, **CLOSE)
    assert_close(model(x, keep=keep, branch_gate=gate), expected, **CLOSE)  # the tokens keep their type
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x, keep=keep, branch_gate=gate.float())
        tokens = model.embed(x, dropout=False)
        layer = model.encoder_blocks[0].step(
            tokens, branch_gate=gate[0].float(), explicit=False, dropout=False
        )
    assert_close(logits.float(), expected, atol=0.1 * expected.abs().max().item(), rtol=0)
    assert layer.tokens.dtype == torch.float32


@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 1), (3, 2, 5), (2, 3, 4), (1, 2, 4), (4, 3, 2), ()])
def test_a_branch_gate_of_another_shape_is_refused(shape):
    for return_attn in (False, True):
        with pytest.raises(ValueError, match=r"branch_gate .*\(3, 2, 4\)"):
            small_model()(pictures(4), return_attn, branch_gate=torch.ones(shape))


def test_block_returns_tokens_and_the_map_when_asked():
    block, tokens = small_model().encoder_blocks[1], torch.randn(2, 9, 16)
    out, attn_map = block(tokens, return_attn=True)
    assert attn_map.shape == (2, 4, 9, 9)
    assert_close(block(tokens), out, **CLOSE)


@pytest.mark.parametrize(
    ("made", "arguments"),
    [
        (PatchEmbedding, {"img_size": 32, "patch_size": 4, "in_channels": 3, "embed_dim": 256}),
        (MultiHeadAttention, {"dim": ..., "num_heads": ..., "dropout": ...}),
        (TransformerEncoderBlock, {"dim": ..., "num_heads": ..., "mlp_dim": ..., "dropout": ...}),
        (
            VisualTransformer,
            {
                "num_classes": ...,
                "img_size": 32,
                "patch_size": 4,
                "in_channels": 3,
                "embed_dim": 256,
                "num_layers": 6,
                "num_heads": 8,
                "mlp_dim": 512,
                "dropout": 0.1,
            },
        ),
        (PatchEmbedding.forward, {"self": ..., "x": ...}),
        (MultiHeadAttention.forward, {"self": ..., "x": ..., "mask": None, "return_attn": False}),
        (TransformerEncoderBlock.forward, {"self": ..., "x": ..., "return_attn": False}),
        (VisualTransformer.forward, {"self": ..., "x": ..., "return_attn": False}),
    ],
)
def test_arguments_come_in_the_tutorials_order(made, arguments):
    positional = {
        name: ... if parameter.default is parameter.empty else parameter.default
        for name, parameter in inspect.signature(made).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    assert list(positional.items()) == list(arguments.items())


def test_patches_follow_row_by_row():
    model = small_model(img_size=(8, 16))  # 2 x 4 patches
    x = pictures(1, 8, 16)
    before = model.embed(x, dropout=False)
    for row in range(2):
        for column in range(4):
            changed = x.clone()
            changed[0, 1, 4 * row + 3, 4 * column] += 1
            moved = (model.embed(changed, dropout=False) != before).any(dim=-1)[0]
            assert moved.nonzero().flatten().tolist() == [1 + 4 * row + column]
    assert model.grid == (2, 4)


# --- starting weights


def test_tutorial_init_is_standard_normal_for_cls_and_positions_and_torchs_own_elsewhere():
    torch.manual_seed(0)
    model = VisualTransformer(10, init="tutorial")
    for drawn in (model.cls_token, model.pos_embed):
        assert abs(drawn.mean()) < 4 / math.sqrt(drawn.numel())
        assert abs(drawn.std() - 1) < 4 / math.sqrt(2 * drawn.numel())
        assert drawn.abs().max() > 2.2  # not cut off
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            bound = module.weight[0].numel() ** -0.5  # torch's own: uniform up to 1 / sqrt(inputs)
            assert 0.98 * bound < module.weight.abs().max() <= bound, name
            assert abs(module.weight.std() - bound / math.sqrt(3)) < 0.03 * bound, name
            if module.bias is not None:
                assert 0.5 * bound < module.bias.abs().max() <= bound, name
        if isinstance(module, nn.LayerNorm):
            assert bool((module.weight == 1).all())
            assert bool((module.bias == 0).all())


@pytest.mark.parametrize("num_layers", [2, 6])
def test_small_init_is_a_cut_normal_with_the_branches_scaled_down(num_layers):
    torch.manual_seed(0)
    model = VisualTransformer(10, num_layers=num_layers, init="small")
    for name, parameter in model.named_parameters():
        branch = name.endswith(("attn.out.weight", "mlp.3.weight"))
        scale = (2 * num_layers) ** -0.5 if branch else 1.0
        if name.endswith("bias"):
            assert bool((parameter == 0).all()), name
        elif "norm" in name or name == "mlp_head.0.weight":
            assert bool((parameter == 1).all()), name
        else:
            deviation = 0.87962 * 0.02 * scale  # of a normal of deviation 0.02 cut at twice that
            assert parameter.abs().max() <= 0.04 * scale * 1.000001, name
            assert abs(parameter.std() / deviation - 1) < 4 / math.sqrt(2 * parameter.numel()), name


# --- many pictures, many threads


@pytest.mark.parametrize("training", [False, True])
def test_seventy_pictures_give_what_each_gives_alone(training):
    model, x = small_model().train(training), pictures(70)
    with torch.no_grad():
        logits, maps = model(x, return_attn=True)
        alone = [model(x[i : i + 1], return_attn=True) for i in range(70)]
        assert_close(model(x), logits, **CLOSE)
    assert_close(logits, torch.cat([one for one, _ in alone]), **CLOSE)
    assert len(maps) == 3
    for depth in range(3):
        assert_close(maps[depth], torch.cat([one[depth] for _, one in alone]), **CLOSE)


def test_maps_of_seventy_pictures_lead_to_the_logits():
    model, x = small_model(), pictures(70)
    logits, maps = model(x, return_attn=True)
    gradients = torch.autograd.grad(logits[:, 2].sum(), maps)
    for gradient in gradients:
        assert gradient.shape == (70, 4, 17, 17)
        assert bool((gradient.abs().amax(dim=(1, 2, 3)) > 0).all())


def test_a_picture_does_not_see_the_others():
    model, x = small_model(), pictures(4)
    among_others = torch.cat([x[:1], 5 * pictures(3, seed=9)])
    with torch.no_grad():
        for return_attn in (False, True):
            results = flat(model(x, return_attn)), flat(model(among_others, return_attn))
            for one, other in zip(*results, strict=True):
                assert_close(one[0], other[0], **CLOSE)
                assert not torch.allclose(one[1], other[1], atol=1e-3)


# --- a gate for each picture


@torch.no_grad()
def test_pictures_with_gates_of_their_own_are_as_one_by_one():
    model, x = small_model(), pictures(5)
    gates = torch.rand(5, 3, 4, generator=torch.Generator().manual_seed(2)) > 0.4
    together = model.trace(x, head_gate=gates.float())
    for i in range(5):
        alone = model.trace(x[i : i + 1], head_gate=gates[i].float())
        assert_close(together.logits[i], alone.logits[0], **CLOSE)
        assert_close(together.maps[i], alone.maps[0], **CLOSE)
    assert not torch.allclose(together.logits, model.trace(x, head_gate=gates[0].float()).logits, atol=1e-3)
    tokens = model.embed(x, dropout=False)
    *_, last = model.steps(tokens, head_gate=gates.float(), cls_only=True, explicit=False, dropout=False)
    assert_close(model.classify(last.tokens), together.logits, **CLOSE)


@pytest.mark.parametrize("shape", [(4, 3, 4), (1, 3, 4), (5, 4, 3), (5, 12), (5, 1, 3, 4), (3, 5, 4)])
def test_gates_for_other_pictures_or_heads_are_refused(shape):
    model, x = small_model(), pictures(5)
    with pytest.raises(ValueError, match=r"head_gate .*\(3, 4\).*\(5, 3, 4\)") as caught:
        model.trace(x, head_gate=torch.ones(shape))
    assert str(shape) in str(caught.value)
    attention = model.encoder_blocks[0].attn
    for gate in (torch.ones(3), torch.ones(1, 4), torch.ones(4, 5), torch.ones(5, 4, 1), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"gate .*\(4,\).*\(5, 4\)"):
            attention.attend(model.embed(x, dropout=False), gate=gate, explicit=False, dropout=False)


def flat(result):
    return [result] if isinstance(result, torch.Tensor) else [result[0], *result[1]]


def contents(model):
    """Whatever the modules hold, as text, and their weights."""
    held = {name: str(vars(module)) for name, module in model.named_modules()}
    return held, {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("training", [False, True])
def test_calls_leave_nothing_on_the_model(training):
    model, x = small_model().train(training), pictures(2)
    held, weights = contents(model)
    model(x)
    model(x, return_attn=True)
    model(x, keep=torch.tensor([[0, 3], [5, 1]]))
    model.trace(x, head_gate=torch.zeros(3, 4)).maps.sum()
    with torch.no_grad():
        model(pictures(70), return_attn=True)
    held_after, weights_after = contents(model)
    assert held_after == held
    assert_close(weights_after, weights, atol=0, rtol=0)


def test_eight_threads_on_one_model_get_their_own_results():
    model = small_model()
    batches = [pictures(1 + i % 3, seed=i) for i in range(8)]
    keeps = [torch.arange(1 + i).repeat(len(x), 1) for i, x in enumerate(batches)]
    gates = [torch.full((3, 4), i / 8) for i in range(8)]

    def work(i):
        results = []
        for _ in range(5):
            with torch.no_grad():
                trace = model.trace(batches[i], keep=keeps[i], head_gate=gates[i])
                logits, maps = model(batches[i], return_attn=True)
                results.append([trace.logits, trace.maps, logits, *maps, model(batches[i])])
        return results

    expected = [work(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for mine, alone in zip(pool.map(work, range(8)), expected, strict=True):
            assert_close(mine, alone, **CLOSE)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and torch sees none here")
def test_cuda_gives_the_cpus_logits_and_maps():
    torch.manual_seed(0)
    model, x = VisualTransformer(10).eval(), pictures(40, 32, 32)
    with torch.no_grad():
        logits, maps = model(x, return_attn=True)
        model.to("cuda")
        cuda_logits, cuda_maps = model(x.to("cuda"), return_attn=True)
        fused = model(x.to("cuda"))
    assert_close(cuda_logits.cpu(), logits, atol=1e-4, rtol=1e-4)
    assert_close([layer.cpu() for layer in cuda_maps], maps, atol=1e-4, rtol=1e-4)
    assert_close(fused.cpu(), logits, atol=1e-4, rtol=1e-4)
