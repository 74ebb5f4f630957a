"""Each method against an independent computation, and what must hold of all of them.

Run: pytest tests/test_methods.py (a few seconds). captum, grad-cam and torchcam are development requirements.
"""

import copy
import math

import pytest
import torch
from plain_vit import pictures, plain_vit, small_model
from torch.testing import assert_close

from vit.arguments import METHODS as NAMED
from vit.attnlrp import attnlrp
from vit.explanation import explain
from vit.methods import METHODS, as_shares, relevance, score_of

OBLONG = {"img_size": (8, 12), "num_layers": 3, "num_heads": 2}  # a grid of 2 x 3, 7 tokens
CLOSE = {"atol": 1e-9, "rtol": 1e-7}
FOR_ALL_CLASSES = {"raw", "rollout", "norm_weighted", "random", "centre"}
WITH_GRADIENTS = [
    "gradient_rollout", "chefer", "gradcam", "legrad", "integrated_gradients", "input_gradient", "attnlrp",
]  # fmt: skip


@pytest.fixture
def model():
    return small_model(**OBLONG).double()


@pytest.fixture
def x():
    return pictures(3, 8, 12).double()


def score_and_maps(model, x, target):
    """The plain arithmetic's score and maps, with gradients."""
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    leaf = x.clone().requires_grad_()
    logits, maps = plain_vit(weights, leaf, num_heads=model.num_heads)
    return logits[torch.arange(len(x)), target].sum(), maps, leaf


def test_the_command_line_names_every_method():
    assert sorted(NAMED) == sorted(METHODS)


# ---- against independent computations ----------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1])
def test_chefer_is_the_recursion_of_whole_matrices(model, x, start):
    target = torch.tensor([1, 4, 0])
    score, maps, _ = score_and_maps(model, x, target)
    R = torch.eye(7).double().repeat(3, 1, 1)
    for A, G in list(zip(maps, torch.autograd.grad(score, maps), strict=True))[start:]:
        R = R + torch.stack([(G[:, h] * A[:, h]).clamp(min=0) for h in range(2)]).mean(0) @ R
    assert_close(relevance(model, x, "chefer", target, start_layer=start), R[:, 0, 1:].detach(), **CLOSE)


def test_gradient_rollout_is_the_product_of_whole_matrices(model, x):
    target = torch.tensor([1, 4, 0])
    score, maps, _ = score_and_maps(model, x, target)
    R = torch.eye(7).double().repeat(3, 1, 1)
    for A, G in zip(maps, torch.autograd.grad(score, maps), strict=True):
        step = 0.5 * torch.eye(7).double() + 0.5 * (A * G).mean(1).clamp(min=0)
        R = (step / step.sum(-1, keepdim=True)) @ R
    assert_close(relevance(model, x, "gradient_rollout", target), R[:, 0, 1:].detach(), **CLOSE)


def test_norm_weighted_writes_every_vector_out(model, x):
    layer = model.trace(x).layers[1]
    W = model.encoder_blocks[1].attn.out.weight
    found = torch.zeros(3, 6).double()
    for b in range(3):
        for j in range(6):
            for h in range(2):
                written = W[:, h * 8 : (h + 1) * 8] @ layer.v[b, h, 1 + j]
                found[b, j] += layer.map[b, h, 0, 1 + j] * written.norm() / 2
    assert_close(relevance(model, x, "norm_weighted", layer=1), found.detach(), **CLOSE)


def test_leave_one_out_is_a_model_run_without_that_patch(model, x):
    target = torch.tensor([1, 4, 0])
    weights, picture = model.state_dict(), torch.arange(3)
    whole = plain_vit(weights, x, num_heads=2)[0][picture, target]
    for patch in range(6):
        stay = [token for token in range(7) if token != 1 + patch]

        def without(place, depth, tensor, stay=stay):
            return tensor[:, stay] if place == "embedded" else tensor

        lost = whole - plain_vit(weights, x, num_heads=2, at=without)[0][picture, target]
        assert_close(relevance(model, x, "leave_one_out", target)[:, patch], lost, **CLOSE)


def test_integrated_gradients_and_input_gradient_are_those_of_captum(model, x):
    attr = pytest.importorskip("captum.attr", reason="captum is a development requirement")
    target = torch.tensor([1, 4, 0])

    def by_patch(values):
        return torch.stack(
            [values[..., r : r + 4, c : c + 4].sum(dim=(1, 2, 3)) for r in (0, 4) for c in (0, 4, 8)], dim=1
        )

    theirs = attr.IntegratedGradients(model).attribute(
        x, torch.zeros_like(x), target, n_steps=20, method="gausslegendre"
    )
    ours = relevance(model, x, "integrated_gradients", target, steps=20)
    assert_close(ours, by_patch(theirs).detach(), **CLOSE)
    saliency = attr.Saliency(model).attribute(x.clone().requires_grad_(), target)
    assert_close(relevance(model, x, "input_gradient", target), by_patch(saliency).detach(), **CLOSE)


def test_gradcam_is_that_of_pytorch_grad_cam(model, x):
    grad_cam = pytest.importorskip("pytorch_grad_cam", reason="grad-cam is a development requirement")
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    theirs = copy.deepcopy(model).float()
    cam = grad_cam.GradCAM(
        model=theirs,
        target_layers=[theirs.encoder_blocks[-1].norm1],
        reshape_transform=lambda tokens: tokens[:, 1:].reshape(-1, 2, 3, 16).permute(0, 3, 1, 2),
    )
    targets = [ClassifierOutputTarget(c) for c in (1, 4, 0)]
    expected = torch.from_numpy(cam(x.float(), targets)).double()  # (B, 8, 12), stretched from 0 to 1
    ours = relevance(model.float(), x.float(), "gradcam", torch.tensor([1, 4, 0])).double().view(3, 2, 3)
    cells = expected[:, 2::4, 2::4]
    for b in range(3):
        own = ours[b] - ours[b].min()
        # their picture is enlarged between the centres of patches: the ranks of the patches are what is left
        assert torch.equal((own / (own.max() + 1e-7)).flatten().argsort(stable=True)[-2:],
                           cells[b].flatten().argsort(stable=True)[-2:])  # fmt: skip
    activations = cam.activations_and_grads
    A, G = activations.activations[0].double(), activations.gradients[0].double()
    raw = (A * G.mean(dim=(2, 3), keepdim=True)).sum(1).clamp(min=0)
    assert_close(ours, raw, atol=1e-5, rtol=1e-4)


def test_attnlrp_is_every_rule_of_the_paper_written_out(model, x):
    target = torch.tensor([1, 4, 0])
    found = attnlrp_by_hand(model, x, target)
    with torch.enable_grad():
        ours = attnlrp(model, x, score_of(target))
    assert_close(ours, found, **CLOSE)


def attnlrp_by_hand(model, x, target):
    """(B, N): relevance handed back rule by rule, without a gradient anywhere; float64."""
    tokens_by_layer = [model.embed(x, dropout=False), *(layer.tokens for layer in model.trace(x).layers)]
    B, N, D = tokens_by_layer[0].shape
    picture, given = torch.arange(B), torch.zeros(B, N).double()

    def linear(inputs, W, bias, R_out):
        """R_out (..., m) -> R_in (..., n) by shares z_ij / z_j, and what the bias keeps (...)."""
        out = inputs @ W.T + (0 if bias is None else bias)
        share = R_out / out
        kept = torch.zeros(()) if bias is None else (bias * share).sum(-1)
        return inputs * (share @ W), kept

    def norm(inputs, module, R_out):
        """As a linear map: subtract the mean, divide by a fixed deviation, scale, add the bias."""
        n = inputs.shape[-1]
        deviation = torch.sqrt(inputs.var(-1, unbiased=False, keepdim=True) + module.eps)
        centre = torch.eye(n).double() - 1 / n
        share = R_out / module(inputs)
        W = centre * module.weight[:, None]  # (out, in), still to be divided by the deviation
        return inputs / deviation * (share @ W), (module.bias * share).sum(-1)

    cls = tokens_by_layer[-1][:, 0]
    once = model.norm(cls)
    head_norm, head = model.mlp_head
    logits = head(head_norm(once))
    R = torch.zeros_like(logits)
    R[picture, target] = logits[picture, target]
    R, kept = linear(head_norm(once), head.weight, head.bias, R)
    given[:, 0] += kept
    R, kept = norm(once, head_norm, R)
    given[:, 0] += kept
    R_cls, kept = norm(cls, model.norm, R)
    given[:, 0] += kept
    R = torch.zeros(B, N, D).double()
    R[:, 0] = R_cls

    for depth in reversed(range(model.num_layers)):
        block, before = model.encoder_blocks[depth], tokens_by_layer[depth]
        layer = model.trace(x).layers[depth]
        read = (layer.map @ layer.v).transpose(1, 2).flatten(2)
        middle = before + read @ block.attn.out.weight.T
        widen, gelu, _, narrow, _ = block.mlp
        normed = block.norm2(middle)
        hidden = gelu(widen(normed))
        branch = narrow(hidden)
        R_branch, R_skip = R * branch / (middle + branch), R * middle / (middle + branch)
        R_hidden, kept = linear(hidden, narrow.weight, narrow.bias, R_branch)
        given += kept
        R_normed, kept = linear(normed, widen.weight, widen.bias, R_hidden)  # GELU hands all to its input
        given += kept
        R_in, kept = norm(middle, block.norm2, R_normed)
        given += kept
        R = R_skip + R_in
        branch = read @ block.attn.out.weight.T
        R_branch, R_skip = R * branch / (before + branch), R * before / (before + branch)
        R_read, _ = linear(read, block.attn.out.weight, None, R_branch)
        normed = block.norm1(before)
        R_read = R_read.unflatten(-1, (2, -1)).transpose(1, 2)  # (B, H, N, d)
        share = R_read / (layer.map @ layer.v)
        R_map = layer.map * (share @ layer.v.mT) / 2  # a product: half to either factor
        R_v = layer.v * (layer.map.mT @ share) / 2
        scores = layer.q @ layer.k.mT * layer.q.shape[-1] ** -0.5
        R_scores = scores * (R_map - layer.map * R_map.sum(-1, keepdim=True))  # proposition 3.1
        given += (R_map.sum(-1) - R_scores.sum(-1)).sum(1)  # what that rule leaves over, to who asks
        share = R_scores / scores * layer.q.shape[-1] ** -0.5
        R_q, R_k = layer.q * (share @ layer.k) / 2, layer.k * (share.mT @ layer.q) / 2
        R_qkv = torch.cat([R.transpose(1, 2).flatten(2) for R in (R_q, R_k, R_v)], dim=-1)
        R_normed, _ = linear(normed, block.attn.qkv.weight, None, R_qkv)
        R_in, kept = norm(before, block.norm1, R_normed)
        given += kept
        R = R_skip + R_in
    return (given + R.sum(-1)).detach()


def test_legrad_is_each_layers_own_gradient(model, x):
    """A model cut after each layer, in the plain arithmetic."""
    target, found = torch.tensor([1, 4, 0]), []
    for layers in (1, 2, 3):
        cut = copy.deepcopy(model)
        cut.encoder_blocks = cut.encoder_blocks[:layers]
        score, maps, _ = score_and_maps(cut, x, target)
        G = torch.autograd.grad(score, maps[-1])[0]
        found.append(G.clamp(min=0).mean(dim=(1, 2)))
    assert_close(relevance(model, x, "legrad", target), torch.stack(found).mean(0)[:, 1:], **CLOSE)


# ---- properties --------------------------------------------------------------------------------------------


def test_integrated_gradients_are_complete(model, x):
    ours = relevance(model, x, "integrated_gradients", 2, versus=3, steps=200).sum(1)
    difference = model(x) - model(torch.zeros_like(x))
    assert_close(ours, (difference[:, 2] - difference[:, 3]).detach(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("of", ["class", "difference"])
def test_attnlrp_hands_out_the_whole_logit(model, x, of):
    classes = [torch.tensor([1, 4, 0])] + ([torch.tensor([2, 2, 2])] if of == "difference" else [])
    score = score_of(*classes)
    with torch.enable_grad():
        found = attnlrp(model, x, score)
    assert_close(found.sum(1), score(model(x)).detach(), atol=1e-9, rtol=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_is_its_pictures_one_by_one(model, method):
    x, target = pictures(18, 8, 12).double(), torch.arange(18) % 5  # more than one part
    together = relevance(model, x, method, target)
    alone = [relevance(model, x[i : i + 1], method, target[i : i + 1]) for i in range(18)]
    assert_close(together, torch.cat(alone), **CLOSE)
    assert together.shape == (18, 6)


@pytest.mark.parametrize("method", METHODS)
def test_only_methods_that_know_classes_depend_on_the_class(model, x, method):
    one, other = relevance(model, x, method, 1), relevance(model, x, method, 2)
    assert torch.equal(one, other) == (method in FOR_ALL_CLASSES)
    assert METHODS[method].class_specific == (method not in FOR_ALL_CLASSES)
    predicted = relevance(model, x, method)
    assert torch.equal(predicted, relevance(model, x, method, model(x).argmax(dim=-1)))


@pytest.mark.parametrize("method", ["input_gradient", "integrated_gradients", "attnlrp", "leave_one_out"])
def test_the_difference_of_two_classes_is_the_other_way_round_its_opposite(model, x, method):
    one, other = relevance(model, x, method, 1, versus=2), relevance(model, x, method, 2, versus=1)
    assert_close(one, other if method == "input_gradient" else -other, **CLOSE)


@pytest.mark.parametrize("method", WITH_GRADIENTS)
def test_a_zero_gradient_gives_zeros(model, x, method):
    with torch.no_grad():
        model.mlp_head[-1].weight.zero_()
    found = relevance(model, x, method, 0)
    assert torch.equal(found, torch.zeros(3, 6).double())


@pytest.mark.parametrize("method", METHODS)
def test_a_training_step_after_explaining_is_that_of_one_without(method):
    def trained(explaining: bool):
        model, x = small_model(**OBLONG, dropout=0.5).train(), pictures(3, 8, 12)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(7)
        torch.nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2])).backward()
        if explaining:
            relevance(model, x, method)
            assert model.training
        optimizer.step()
        return list(model.parameters()), torch.rand(3)

    (touched, drawn), (plain, expected) = trained(True), trained(False)
    assert all(torch.equal(one, other) for one, other in zip(touched, plain, strict=True))
    assert torch.equal(drawn, expected)


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_mode_does_not_matter(model, x, method):
    expected = relevance(model, x, method, 1)
    with torch.no_grad():
        assert torch.equal(relevance(model, x, method, 1), expected)
    with torch.inference_mode():
        assert torch.equal(relevance(model, x * 1, method, 1), expected)
    model.train().requires_grad_(False)
    assert torch.equal(relevance(model, x.requires_grad_(), method, 1), expected)
    assert x.grad is None
    assert not expected.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_wrong_questions_are_answered_in_a_sentence(model, x):
    for error, ask in {
        "method is raw, rollout": lambda: relevance(model, x, "saliency"),
        "target lies from 0 to 4": lambda: relevance(model, x, "chefer", 5),
        "versus holds classes 0 to 4": lambda: relevance(model, x, "chefer", 0, torch.tensor([1, 9, 1])),
        "no difference": lambda: relevance(model, x, "chefer", 1, versus=1),
        "one class or int64": lambda: relevance(model, x, "chefer", torch.tensor([1.0, 2.0, 0.0])),
        "layer lies from 0 to 2": lambda: relevance(model, x, "norm_weighted", layer=3),
        "token, head and looked_at": lambda: explain(model, x, "chefer", token=2),
    }.items():
        with pytest.raises(ValueError, match=error):
            ask()


def test_shares_keep_order_and_sign():
    shares = as_shares([[[1.0, -2.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    assert shares.tolist() == [[[0.25, -0.5], [0.0, 0.25]], [[0.0, 0.0], [0.0, 0.0]]]


# ---- an Explanation draws itself ---------------------------------------------------------------------------


def test_an_explanation_draws_itself(tmp_path, model, x):
    import numpy as np
    from PIL import Image

    explanation = explain(model, x, "attnlrp", target=1, versus=2)
    assert explanation.relevance.shape == (3, 2, 3)
    assert torch.equal(explanation.relevance.flatten(1), relevance(model, x, "attnlrp", 1, versus=2))
    html = explanation._repr_html_()
    assert html.count("<img") == html.count('alt="class') == 3
    assert "rather than class 2" in html
    assert explanation.overlay(1).size == (448, round(448 * 8 / 12))
    figure = explanation.figure(2)
    assert np.array_equal(figure.data[1].z, explanation.relevance[2].numpy())
    explanation.save(tmp_path / "one.png", 1)
    with Image.open(tmp_path / "one.png") as image:
        assert image.text["Description"] == "AttnLRP for class 1 rather than class 2"
    explanation.save(tmp_path / "all.npz")
    with np.load(tmp_path / "all.npz") as arrays:
        assert np.array_equal(arrays["relevance"], explanation.relevance.numpy())
    with pytest.raises(ValueError, match=r"neither in \.png nor in \.npz"):
        explanation.save(tmp_path / "one.jpg")


def test_pictures_in_a_notebook_have_their_own_colours(tmp_path):
    import numpy as np

    import vit
    from vit.checkpoint import BUNDLED

    model, checkpoint = vit.load(BUNDLED, device="cpu")
    picture = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    explanation = vit.explain(model, vit.prepare(picture, checkpoint), "chefer", checkpoint=checkpoint)
    from vit.notebook import pixels

    assert np.array_equal(pixels(explanation, 0), picture)
    said = checkpoint.class_names[int(explanation.target)]
    assert f"Chefer relevance for {said}" in explanation._repr_html_()
    assert math.isclose(float(explanation.probabilities.sum()), 1, rel_tol=1e-5)
