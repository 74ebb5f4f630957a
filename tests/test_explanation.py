"""An explanation holds what it says, shows the right patch, and leaves the model as it was.

Run: pytest tests/test_explanation.py (a few seconds).
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
import torch
from plain_vit import pictures, plain_vit, small_model
from torch.testing import assert_close

from vit.attention import token_index
from vit.explanation import Explanation, cls_rows, explain, head_rows
from vit.model import VisualTransformer

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
RESULTS = [
    field.name
    for field in fields(Explanation)
    if field.name not in ("method", "token", "readout", "target", "versus", "x", "checkpoint")
]
OBLONG = {"img_size": (8, 12), "num_layers": 3, "num_heads": 2}  # a grid of 2 x 3, 7 tokens


def plain_maps(model, x):
    """(logits, maps (B, L, H, N, N)) by the plain arithmetic of plain_vit."""
    logits, maps = plain_vit(model.state_dict(), x, num_heads=model.num_heads)
    return logits, torch.stack(maps, dim=1)


def plain_rollout(maps, fuse=lambda heads: heads.mean(0), discard=0.0, residual=0.5, start=0, head=None):
    """(L, N, N) from (L, H, N, N), entry by entry; `head` stands alone in the layer that is asked for."""
    N = maps.shape[-1]
    eye, below, by_layer = torch.eye(N), torch.eye(N), []
    for depth, heads in enumerate(maps):
        if depth < start:
            by_layer.append(eye)
            continue
        steps = []
        for A in (fuse(heads), heads[head or 0]):
            A = A.clone()
            for row in A:
                for column in sorted(range(N), key=lambda c, row=row: row[c].item())[: int(discard * N)]:
                    row[column] = 0
            step = residual * eye + (1 - residual) * A
            steps.append(step / step.sum(1, keepdim=True))
        by_layer.append((steps[0] if head is None else steps[1]) @ below)
        below = steps[0] @ below
    return torch.stack(by_layer)


# --- what it holds


@pytest.mark.parametrize("method", ["rollout", "raw"])
def test_shapes_and_fields(method):
    model, x = small_model(**OBLONG), pictures(3, 8, 12)
    explanation = explain(model, x, method, 2)
    logits, maps = plain_maps(model, x)
    assert explanation.logits.shape == explanation.probabilities.shape == (3, 5)
    assert explanation.attention.shape == (3, 3, 2, 7, 7)
    assert explanation.rollout.shape == (3, 3, 7, 7)
    assert explanation.relevance.shape == (3, 2, 3)
    assert (explanation.method, explanation.token) == (method, 2)
    assert_close(explanation.logits, logits, **CLOSE)
    exponentials = logits.exp()
    assert_close(explanation.probabilities, exponentials / exponentials.sum(1, keepdim=True), **CLOSE)
    assert_close(explanation.attention, maps, **CLOSE)
    assert_close(explanation.rollout, torch.stack([plain_rollout(picture) for picture in maps]), **CLOSE)
    assert not any(getattr(explanation, name).requires_grad for name in RESULTS)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_logits_of_each_layer_are_those_of_a_model_cut_there(layers):
    model, x = small_model(**OBLONG | {"num_layers": layers}), pictures(3, 8, 12)
    explanation = explain(model, x)
    assert explanation.layer_logits.shape == (3, layers, 5)
    assert torch.equal(explanation.layer_logits[:, -1], explanation.logits)
    for depth in reversed(range(layers)):
        assert_close(explanation.layer_logits[:, depth], plain_maps(model, x)[0], **CLOSE)
        del model.encoder_blocks[-1]


def test_by_default_it_is_the_rollout_from_cls_through_all_layers():
    model, x = small_model(**OBLONG), pictures(2, 8, 12)
    explanation = explain(model, x)
    assert (explanation.method, explanation.token) == ("rollout", 0)
    assert_close(explanation.relevance.flatten(1), explanation.rollout[:, -1, 0, 1:])


def test_raw_is_by_default_the_last_layer_with_its_heads_averaged():
    model, x = small_model(**OBLONG), pictures(2, 8, 12)
    _, maps = plain_maps(model, x)
    expected = (maps[:, 2, 0] + maps[:, 2, 1])[:, 0, 1:] / 2
    assert_close(explain(model, x, "raw").relevance.flatten(1), expected, **CLOSE)


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("token", [0, 5])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("head", [None, 0, 1])
def test_relevance_is_the_tokens_row_or_column(head, layer, token, looked_at):
    model, x = small_model(**OBLONG), pictures(2, 8, 12)
    maps = plain_maps(model, x)[1]
    for method in ("raw", "rollout"):
        explanation = explain(model, x, method, token, layer=layer, head=head, looked_at=looked_at)
        for found, picture in zip(explanation.relevance, maps, strict=True):
            if method == "raw":
                chosen = picture[layer].mean(0) if head is None else picture[layer, head]
            else:
                chosen = plain_rollout(picture, head=head)[layer]
            values = chosen[:, token] if looked_at else chosen[token]
            assert_close(found, torch.stack([values[1:4], values[4:7]]), **CLOSE)


def test_rollout_to_a_layer_is_that_of_the_layers_up_to_it():
    model, x = small_model(**OBLONG), pictures(2, 8, 12)
    for layer in range(3):
        explanation = explain(model, x, layer=layer)
        assert_close(explanation.relevance.flatten(1), explanation.rollout[:, layer, 0, 1:])


@pytest.mark.parametrize(
    ("fusion", "fuse"),
    [("max", lambda heads: heads.max(0).values), ("min", lambda heads: heads.min(0).values)],
)
@pytest.mark.parametrize(("discard", "residual", "start"), [(0.0, 0.5, 0), (0.4, 0.3, 1), (0.9, 0.0, 2)])
@pytest.mark.parametrize("head", [None, 1])
def test_options_reach_the_rollout(fusion, fuse, discard, residual, start, head):
    model, x = small_model(**OBLONG), pictures(2, 8, 12)
    options = {"head_fusion": fusion, "discard_ratio": discard, "residual": residual, "start_layer": start}
    explanation = explain(model, x, head=head, **options)
    for i, picture in enumerate(plain_maps(model, x)[1]):
        fused = plain_rollout(picture, fuse, discard, residual, start)
        assert_close(explanation.rollout[i], fused, **CLOSE)
        chosen = plain_rollout(picture, fuse, discard, residual, start, head)[-1]
        assert_close(explanation.relevance[i].flatten(), chosen[0, 1:], **CLOSE)
    raw = explain(model, x, "raw", **options).relevance.flatten(1)
    assert_close(raw, torch.stack([fuse(picture[-1])[0, 1:] for picture in plain_maps(model, x)[1]]), **CLOSE)


def test_the_token_can_be_named_by_its_place_in_the_grid():
    model, x = small_model(**OBLONG), pictures(1, 8, 12)
    token = token_index("2,1", model.grid)
    raw = explain(model, x, "raw", token)
    assert_close(raw.relevance.flatten(), raw.attention[0, -1].mean(0)[1 + 3, 1:])


@pytest.mark.parametrize("method", ["rollout", "raw"])
def test_many_pictures_at_once_equal_one_by_one(method):
    model, x = small_model(**OBLONG), pictures(70, 8, 12)  # more than two parts of 32
    together = explain(model, x, method, 1, head=1)
    for i in (0, 31, 32, 63, 64, 69):
        alone = explain(model, x[i : i + 1], method, 1, head=1)
        for name in RESULTS:
            assert_close(getattr(together, name)[i], getattr(alone, name)[0], **CLOSE)


@pytest.mark.parametrize("looked_at", [False, True])
@pytest.mark.parametrize("method", ["rollout", "raw"])
def test_head_rows_are_the_relevance_of_every_layer_and_head(method, looked_at):
    model, x = small_model(**OBLONG), pictures(2, 8, 12)
    options = {"head_fusion": "max", "discard_ratio": 0.3, "residual": 0.4, "start_layer": 1}
    rows = head_rows(explain(model, x, **options), method, 4, looked_at=looked_at, **options)
    assert rows.shape == (2, 3, 2 + 1, 7)
    for layer in range(3):
        for place, head in enumerate((0, 1, None)):
            one = explain(model, x, method, 4, layer=layer, head=head, looked_at=looked_at, **options)
            assert_close(rows[:, layer, place, 1:], one.relevance.flatten(1), **CLOSE)


# --- it looks at the right patch


def seeker(img_size: tuple[int, int]) -> VisualTransformer:
    """A model made by hand whose CLS attends to whichever patch is bright.

    Direction 0 of the tokens is brightness, direction 1 is "I am CLS". Each head asks for direction 0 where
    direction 1 is set; nothing else is computed, so that every layer sees the same tokens.
    """
    model = VisualTransformer(2, img_size, embed_dim=16, num_layers=3, num_heads=2, mlp_dim=4).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        model.patch_embed.conv.weight[0] = 1.0
        model.cls_token[0, 0, 1] = 1.0
        for block in model.encoder_blocks:
            for head in range(2):
                block.attn.qkv.weight[8 * head, 1] = 1.0  # its query
                block.attn.qkv.weight[16 + 8 * head, 0] = 1.0  # its key
    return model


@pytest.mark.parametrize("head", [None, 1])
@pytest.mark.parametrize("method", ["rollout", "raw"])
@pytest.mark.parametrize("size", [(12, 12), (8, 20), (20, 8)])
def test_a_marked_patch_lights_up_where_it_is(size, method, head):
    GY, GX = size[0] // 4, size[1] // 4
    x = torch.zeros(GY * GX, 3, *size)
    cells = [(row, column) for row in range(GY) for column in range(GX)]
    for picture, (row, column) in zip(x, cells, strict=True):
        picture[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 1.0
    relevance = explain(seeker(size), x, method, head=head).relevance
    for map_, cell in zip(relevance, cells, strict=True):
        assert divmod(map_.argmax().item(), GX) == cell
        assert map_[cell] > 2 * map_.sum() / (GY * GX)


def test_who_looks_at_cls_is_not_where_cls_looks():
    x = torch.zeros(1, 3, 12, 12)
    x[:, :, :4, :4] = 1.0
    model = seeker((12, 12))
    assert explain(model, x, "raw").relevance[0, 0, 0] > 0.5
    # dark patches ask for nothing in particular, so each of their ten tokens gets a tenth
    assert_close(explain(model, x, "raw", looked_at=True).relevance[0, 2, 2].item(), 0.1)


# --- it leaves everything as it was


@pytest.mark.parametrize("training", [False, True])
def test_the_model_and_the_random_numbers_are_as_before(training):
    model, x = small_model(**OBLONG, dropout=0.4).train(training), pictures(3, 8, 12)
    model.encoder_blocks[1].eval()  # a mixed mode is a mode too
    model(x).sum().backward()
    model.norm.weight.requires_grad_(False)

    def state():
        return {
            "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
            "gradients": {name: p.grad.clone() for name, p in model.named_parameters()},
            "random numbers": torch.get_rng_state(),
            "wants gradients": [p.requires_grad for p in model.parameters()],
            "mode": [module.training for module in model.modules()],
            "attributes": [len(vars(module)) for module in model.modules()],
            "gradients are on": torch.is_grad_enabled(),
        }

    before, kept_x = state(), x.clone()
    explain(model, x)
    explain(model, x, "raw", 3, layer=0, head=1, looked_at=True)
    with pytest.raises(ValueError, match="token"):
        explain(model, x, token=99)
    assert_close(state(), before, rtol=0, atol=0)
    assert torch.equal(x, kept_x)


def test_train_mode_explains_the_same():
    model, x = small_model(**OBLONG, dropout=0.4), pictures(3, 8, 12)
    expected = explain(model, x, head=0)
    found = explain(model.train(), x, head=0)
    for name in RESULTS:
        assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0)


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_gradient_mode_does_not_matter(mode, count):
    model, x = small_model(**OBLONG), pictures(count, 8, 12)
    expected = explain(model, x)
    with mode():
        enabled = torch.is_grad_enabled()
        found = explain(model, x + 0)
        assert torch.is_grad_enabled() == enabled
    for name in RESULTS:
        assert_close(getattr(found, name), getattr(expected, name), **CLOSE)


def test_results_can_be_differentiated_through_later():
    explanation = explain(small_model(**OBLONG), pictures(40, 8, 12))
    for name in RESULTS:
        result = getattr(explanation, name)
        weight = torch.ones_like(result, requires_grad=True)
        (result * weight).sum().backward()
        assert_close(weight.grad, result)


def test_eight_threads_share_one_model():
    model = small_model(**OBLONG, dropout=0.4)
    jobs = [
        (
            pictures(1 + k % 3, 8, 12, seed=k),
            ("raw", "rollout")[k % 2],
            k % 7,
            {"layer": k % 3, "head": k % 2},
        )
        for k in range(48)
    ]

    def work(job):
        x, method, token, choice = job
        return explain(model, x, method, token, **choice)

    expected = [work(job) for job in jobs]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(work, jobs))
    for one, other in zip(found, expected, strict=True):
        for name in RESULTS:
            assert_close(getattr(one, name), getattr(other, name), **CLOSE)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"method": "saliency"}, "method is raw, rollout"),
        ({"method": None}, "method"),
        ({"token": -1}, "token lies from 0 to 6"),
        ({"token": 7}, "token lies from 0 to 6"),
        ({"layer": -1}, "layer lies from 0 to 2"),
        ({"layer": 3}, "layer lies from 0 to 2"),
        ({"head": -1}, "head lies from 0 to 1"),
        ({"head": 2}, "head lies from 0 to 1"),
        ({"head_fusion": "sum"}, "mean, max, min"),
        ({"discard_ratio": 1.1}, "discard_ratio"),
        ({"discard_ratio": float("nan")}, "discard_ratio"),
        ({"residual": -0.1}, "residual"),
        ({"start_layer": 3}, "start_layer"),
        ({"start_layer": -1}, "start_layer"),
        ({"x": torch.zeros(1, 3, 12, 8)}, "batch of pictures"),
        ({"x": torch.zeros(3, 8, 12)}, "batch of pictures"),
        ({"x": torch.zeros(1, 1, 8, 12)}, "batch of pictures"),
    ],
)
@pytest.mark.parametrize("method", ["rollout", "raw"])
def test_arguments_out_of_range_are_value_errors(method, arguments, says):
    with pytest.raises(ValueError, match=says):
        explain(small_model(**OBLONG), **{"x": pictures(1, 8, 12), "method": method} | arguments)


def test_a_model_that_answers_nan_is_refused():
    model, x = small_model(**OBLONG), pictures(2, 8, 12)
    with torch.no_grad():
        model.mlp_head[1].bias.fill_(float("nan"))
    for explained in (explain, cls_rows):
        with pytest.raises(ValueError, match="not finite"):
            explained(model, x)


@pytest.mark.parametrize(
    "arguments", [{"layer": 1.0}, {"head": True}, {"token": "cls"}, {"start_layer": 1.0}]
)
def test_arguments_of_another_type_are_value_errors(arguments):
    with pytest.raises(ValueError, match="whole number"):
        explain(small_model(**OBLONG), pictures(1, 8, 12), **arguments)


def test_printed_it_is_one_line_of_shapes():
    text = repr(explain(small_model(**OBLONG), pictures(2, 8, 12)))
    assert "\n" not in text
    assert "rollout (2, 3, 7, 7)" in text
