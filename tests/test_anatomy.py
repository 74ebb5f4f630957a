"""The anatomy is the loaded model's own: sizes of a real pass, and numbers worked out again by numpy.

Run: pytest tests/test_anatomy.py (a few seconds).
"""

import base64
import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from plain_vit import pictures, small_model
from torch import nn

from vit import anatomy
from vit.checkpoint import BUNDLED, load

MODELS = {
    "small": {},
    "oblong": {"img_size": (8, 24), "num_layers": 2, "num_heads": 2},
    "grey": {"in_channels": 1, "patch_size": 8, "num_layers": 1, "num_classes": 2},
}


@pytest.fixture(params=MODELS)
def model(request):
    return small_model(**MODELS[request.param])


@pytest.fixture
def trace(model):
    """Of two pictures: only the first may count."""
    shape = (2, model.patch_embed.conv.in_channels, *model.patch_embed.img_size)
    return model.trace(torch.randn(shape, generator=torch.Generator().manual_seed(4)))


def array(text, shape, dtype):
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)


def softmax(scores):
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


# --- stages


def parameters(*modules):
    return sum(p.numel() for module in modules for p in module.parameters())


def test_stages_hold_every_parameter_once(model):
    found = anatomy.stages(model)
    assert sum(stage.parameters for stage in found) == parameters(model)
    layers = [stage for stage in found if stage.parts]
    assert [stage.name for stage in layers] == [f"layer {n + 1}" for n in range(model.num_layers)]
    for stage, block in zip(layers, model.encoder_blocks, strict=True):
        attention, mlp = stage.parts
        assert attention.parameters == parameters(block.norm1, block.attn)
        assert mlp.parameters == parameters(block.norm2, block.mlp)
        assert stage.parameters == parameters(block)


def test_stages_have_the_shapes_of_a_real_pass(model, trace):
    x = torch.zeros(1, model.patch_embed.conv.in_channels, *model.patch_embed.img_size)
    real = [x, model.patch_embed(x), trace.embedded, *(layer.tokens for layer in trace.layers), trace.logits]
    found = anatomy.stages(model)
    assert [stage.shape_out for stage in found] == [" x ".join(map(str, t.shape[1:])) for t in real]
    for before, after in pairwise(found):
        assert after.shape_in == before.shape_out
    for stage in found:
        for part in stage.parts:
            assert (part.shape_in, part.shape_out) == (stage.shape_in, stage.shape_out)


def test_stages_say_how_the_layers_work_in_a_sentence():
    attention, mlp = anatomy.stages(small_model(num_heads=2, mlp_dim=40))[3].parts
    assert "2 heads of 8 numbers" in attention.what
    assert "40 numbers" in mlp.what
    for stage in anatomy.stages(small_model()):
        assert stage.what.endswith(".")


# --- pictures of weights


def test_filters_are_scaled_about_grey_and_the_strongest_come_first():
    model = small_model(embed_dim=80, num_heads=2)
    weight = model.patch_embed.conv.weight.detach().numpy()
    found = anatomy.patch_filters(model)
    assert found.dtype == np.uint8
    assert found.shape == (64, 4, 4, 3)
    order = sorted(range(80), key=lambda f: -math.sqrt((weight[f].astype(float) ** 2).sum()))
    for picture, f in zip(found.astype(float), order, strict=False):
        pixels = weight[f].transpose(1, 2, 0) / np.abs(weight[f]).max()  # (4, 4, 3) from -1 to 1
        assert np.abs((picture - 127.5) / 127.5 - pixels).max() < 1.001 / 255
        assert {picture.min(), picture.max()} & {0, 255}


@pytest.mark.parametrize("channels", [1, 2])
def test_filters_of_other_channels_are_grey_and_nothing_is_grey_itself(channels):
    model = small_model(in_channels=channels)
    with torch.no_grad():
        model.patch_embed.conv.weight[3] = 0
    found = anatomy.patch_filters(model)
    assert (found == found[..., :1]).all()
    assert len(np.unique(found[:-1])) > 20
    assert (found[-1] == 128).all()


def test_position_similarity_is_the_cosine(model):
    positions = model.pos_embed[0, 1:].detach().numpy().astype(float)
    found = anatomy.position_similarity(model)
    assert found.dtype == np.float32
    assert found.shape == (len(positions), len(positions))
    for i, one in enumerate(positions):
        for j, other in enumerate(positions):
            expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            assert found[i, j] == pytest.approx(expected, abs=1e-5)


# --- do heads differ?


def test_head_similarity_is_the_mean_cosine_of_rows(model, trace):
    maps = trace.maps[0]
    heads = maps.detach().numpy().reshape(-1, *maps.shape[-2:]).astype(float)
    found = anatomy.head_similarity(maps)
    for i, one in enumerate(heads):
        for j, other in enumerate(heads):
            cosines = [a @ b / math.sqrt((a @ a) * (b @ b)) for a, b in zip(one, other, strict=True)]
            assert found[i, j] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert found.dtype == np.float32
    assert np.array_equal(found, found.T)
    assert (np.diag(found) == 1).all()
    assert found.min() >= 0
    assert found.max() <= 1


def test_head_similarity_knows_the_same_from_the_other():
    """Over 64 tokens too, where rows are taken in parts."""
    same = torch.eye(100)
    other = torch.eye(100).roll(1, dims=1)
    found = anatomy.head_similarity(torch.stack([same, same, other, (same + other) / 2])[None])
    half = math.sqrt(0.5)
    assert found == pytest.approx(
        np.array([[1, 1, 0, half], [1, 1, 0, half], [0, 0, 1, half], [half, half, half, 1]]), abs=1e-5
    )
    with pytest.raises(ValueError, match="shape"):
        anatomy.head_similarity(same)


# --- arithmetic


def test_arithmetic_makes_the_rows_of_the_trace(model, trace):
    for layer in range(model.num_layers):
        for head in range(model.num_heads):
            for token in (0, 1, trace.maps.shape[-1] - 1):
                found = anatomy.arithmetic(trace, layer, head, token)
                own = trace.layers[layer].map[0, head, token].detach().numpy()
                assert found.row == pytest.approx(own, abs=1e-6)
                by_hand = (found.k.astype(float) * found.q).sum(axis=1) / math.sqrt(len(found.q))
                assert found.scores == pytest.approx(by_hand, abs=1e-4)
                assert found.row == pytest.approx(softmax(by_hand), abs=1e-5)
                mixed = sum(w * v for w, v in zip(found.row, found.v.astype(float), strict=True))
                assert found.read == pytest.approx(mixed, abs=1e-4)


def test_what_the_heads_read_is_what_the_layer_adds(model, trace):
    block, before = model.encoder_blocks[0], trace.embedded[0]
    token = 2
    read = [anatomy.arithmetic(trace, 0, head, token).read for head in range(model.num_heads)]
    with torch.no_grad():
        after = before[token] + block.attn.out(torch.from_numpy(np.concatenate(read)))
        after = after + block.mlp(block.norm2(after))
    assert after.numpy() == pytest.approx(trace.layers[0].tokens[0, token].detach().numpy(), abs=1e-4)


@pytest.mark.parametrize("place", [(3, 0, 0), (0, 4, 0), (0, 0, 17), (-1, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_what_is_not_there_is_refused(place):
    trace = small_model().trace(pictures(1))
    with pytest.raises(ValueError, match=r"(layer|head|token) lies from 0"):
        anatomy.arithmetic(trace, *place)


# --- payloads


def test_anatomy_travels_small_and_comes_back():
    model, checkpoint = load(BUNDLED)
    trace = model.trace(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
    text = json.dumps(anatomy.anatomy_payload(model, trace))
    assert len(text) < 60_000
    found = json.loads(text)
    L, H, P = found["layers"], found["heads"], math.prod(found["grid"])
    assert (L, H, found["grid"]) == (6, 8, list(checkpoint.architecture.grid))
    assert found["parameters"] == parameters(model)
    assert found["stages"][3]["parts"][0]["name"] == "attention"
    patch_px = found["patch_px"]
    filters = array(found["filters"], (found["filter_count"], patch_px, patch_px, 3), np.uint8)
    assert np.array_equal(filters, anatomy.patch_filters(model))
    positions = array(found["positions"], (P, P), np.uint8) / 255 * 2 - 1
    assert np.abs(positions - anatomy.position_similarity(model)).max() < 1.001 / 255
    heads = array(found["head_similarity"], (L * H, L * H), np.uint8) / 255
    assert np.abs(heads - anatomy.head_similarity(trace.maps[0])).max() < 1.001 / 510


def test_arithmetic_travels_small_and_comes_back(model, trace):
    layer, head = model.num_layers - 1, model.num_heads - 1
    found = json.loads(json.dumps(anatomy.arithmetic_payload(trace, layer, head)))
    assert (found["layer"], found["head"]) == (layer, head)
    shape = (found["tokens"], found["d"])
    q, k, v = (array(found[name], shape, np.float32) for name in "qkv")
    own = anatomy.arithmetic(trace, layer, head, 1)
    assert np.array_equal(q[1], own.q)
    assert np.array_equal(k, own.k)
    assert np.array_equal(v, own.v)
    assert softmax(k @ q[1] / math.sqrt(found["d"])) == pytest.approx(own.row, abs=1e-5)


def test_arithmetic_of_the_bundled_model_is_small():
    model, _ = load(BUNDLED)
    with torch.no_grad():
        found = anatomy.arithmetic_payload(model.trace(torch.zeros(1, 3, 32, 32)), 0, 0)
    assert len(json.dumps(found)) < 40_000


def test_large_grids_and_many_heads_never_travel_as_megabytes():
    model = small_model(img_size=34, patch_size=2, num_layers=65)  # 289 patches, 260 heads
    with torch.no_grad():
        found = anatomy.anatomy_payload(model, model.trace(torch.zeros(1, 3, 34, 34)))
    assert found["positions"] is None
    assert found["head_similarity"] is None
    assert len(json.dumps(found)) < 100_000
    one_patch = small_model(img_size=128, patch_size=128, embed_dim=64)
    with torch.no_grad():
        found = anatomy.anatomy_payload(one_patch, one_patch.trace(torch.zeros(1, 3, 128, 128)))
    assert (found["filter_count"], found["filters_in_all"]) == (4, 64)
    assert len(json.dumps(found)) < 300_000


def test_looking_changes_nothing(model, trace):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    anatomy.anatomy_payload(model, trace)
    anatomy.arithmetic(trace, 0, 0, 0)
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None and isinstance(p, nn.Parameter) for p in model.parameters())
