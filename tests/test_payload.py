"""What the browser is sent is what the library works out: every map, to 1/510 of its row's largest weight.

Run: pytest tests/test_payload.py (some seconds).
"""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

import vit
from vit.architecture import Architecture
from vit.attention import FUSIONS, fuse_heads, rollout_by_head, rollout_by_layer, rollout_of_heads_row
from vit.checkpoint import BUNDLED, Checkpoint
from vit.explanation import explain, head_rows
from vit.images import prepare
from vit.overlay import colormap
from vit.payload import WHOLE_VALUES, map_payload, payload, quantised

ROOT = Path(__file__).parents[1]
FLOATS = some.floats(0, 2.0**127, width=32)
LARGE = {
    "embed_dim": 12,
    "num_layers": 12,
    "num_heads": 12,
    "mlp_dim": 8,
    "img_size": (28, 28),
    "patch_size": 2,
}


def decoded(sent: dict, *shape: int, own: int | None = None) -> np.ndarray:
    """(*shape, N) float64; `own` as in `quantised`."""
    values, scales, given = (base64.b64decode(sent[name]) for name in ("values", "scales", "own"))
    scales = np.frombuffer(scales, "<f4").reshape(shape)
    rows = np.frombuffer(values, np.uint8).reshape(*shape, -1) * scales[..., None].astype(np.float64)
    given = np.frombuffer(given, "<f4").reshape(shape)
    for place in np.ndindex(shape):
        rows[(*place, place[-1] if own is None else own)] = given[place]
    return rows


def assert_close_to(sent: dict, rows, own: int | None = None) -> None:
    """Off by at most 1/510 of what each row gives others at most, beside the rounding of float32."""
    rows = np.asarray(rows, dtype=np.float64)
    found = decoded(sent, *rows.shape[:-1], own=own)
    others = rows.copy()
    for place in np.ndindex(rows.shape[:-1]):
        at = (*place, place[-1] if own is None else own)
        others[at] = 0
        assert found[at] == np.float32(rows[at])
    assert (np.abs(found - rows) <= others.max(axis=-1, keepdims=True) * (1 / 510 + 1e-6)).all()


def random_pixels(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def frog():
    """The bundled model, a sample, and its explanation with every setting other than the default."""
    model, checkpoint = vit.load(BUNDLED)
    canvas = np.asarray(vit.open_picture(ROOT / "assets/samples/frog_07.png").convert("RGB"))
    explanation = explain(model, prepare(canvas, checkpoint), head_fusion="max", discard_ratio=0.9)
    return model, checkpoint, canvas, explanation


@pytest.fixture(scope="module")
def frog_payload(frog):
    _, checkpoint, canvas, explanation = frog
    return payload(
        explanation, checkpoint, canvas, name="sample:frog_07", title="frog 07", fusion="max", discard=0.9
    )


@pytest.fixture(scope="module")
def large():
    """12 layers of 12 heads over 14 x 14 patches, narrow and random; what they say of one picture."""
    architecture = Architecture(3, **LARGE)
    torch.manual_seed(1)
    model = architecture.build(init="tutorial").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    checkpoint = Checkpoint(architecture, ("a", "b", "c"), (0.5,) * 3, (0.5,) * 3)
    canvas = random_pixels(28, 28)
    return (
        checkpoint,
        canvas,
        explain(model, prepare(canvas, checkpoint), head_fusion="min", discard_ratio=0.6),
    )


def large_payload(large, **options) -> dict:
    checkpoint, canvas, explanation = large
    settings = {"name": "own:0", "title": "your picture", "fusion": "min", "discard": 0.6} | options
    return payload(explanation, checkpoint, canvas, **settings)


# --- a row as bytes


@given(some.lists(some.lists(FLOATS, min_size=4, max_size=4), min_size=1, max_size=5))
def test_a_row_is_off_by_at_most_a_510th_of_its_largest(rows):
    rows = np.array(rows, np.float32)
    sent = quantised(rows, own=0)
    # below the normal float32 the scale itself is rounded: to half of the smallest step, 255 times
    slack = 255 * 2.0**-150
    off = np.abs(decoded(sent, len(rows), own=0) - rows)
    assert (off <= rows.max(axis=-1, keepdims=True).astype(np.float64) * (1 / 510 + 1e-6) + slack).all()


def test_zeros_stay_zero_and_the_largest_is_kept():
    rows = np.array([[9, 0, 0, 0], [0, 0, 1, 0.51], [0, 1e-30, 0, 1e-33], [1, 3e38, 1e38, 0]], np.float32)
    sent = quantised(rows, own=0)
    values = np.frombuffer(base64.b64decode(sent["values"]), np.uint8).reshape(4, 4)[:, 1:]
    assert values.tolist() == [[0, 0, 0], [0, 255, 130], [255, 0, 0], [255, 85, 0]]
    np.testing.assert_allclose(decoded(sent, 4, own=0).max(axis=-1), rows.max(axis=-1), rtol=1e-6)
    assert quantised(torch.from_numpy(rows), own=0) == sent


@given(some.integers(0, 2**32 - 1), some.sampled_from([0.25, 0.5, 0.9, 1.0]))
def test_the_bytes_and_the_ties_say_what_rollout_keeps(seed, discard):
    """Weights near one another, which bytes cannot tell apart: what stays is still what the library keeps."""
    rng = np.random.default_rng(seed)
    N = 12
    rows = rng.choice([0, 0.5, 1.0, 1.0004, 1.0008, 2], (3, N, N)).astype(np.float32)
    sent = quantised(rows, discard)
    values = np.frombuffer(base64.b64decode(sent["values"]), np.uint8).reshape(3 * N, N)
    numbers = np.frombuffer(base64.b64decode(sent["ties"]), "<i4").tolist()
    ties = {}
    while numbers:
        row, count, *numbers = numbers
        ties[row], numbers = numbers[:count], numbers[count:]
    dropped = min(int(discard * N), N - 1)
    # of one map's heads each alone: what `rollout_by_head` keeps is where its first layer is not zero
    kept = rollout_by_head(torch.from_numpy(rows)[None, None], "mean", discard, 0.0)[0, 0].numpy() > 0
    for row in range(3 * N):
        stay = np.argsort(values[row], kind="stable")[dropped:]
        if row in ties:
            cut = values[row, stay].min()
            stay = [*(column for column in stay if values[row, column] > cut), *ties[row]]
        of_library = np.flatnonzero(kept[row // N, row % N])
        assert set(of_library) <= set(stay)
        assert len(set(stay)) == N - dropped


# --- the default model: everything


def test_it_is_small_and_of_json_s_types(frog_payload):
    text = json.dumps(frog_payload, allow_nan=False)
    assert json.loads(text) == frog_payload
    assert len(text) <= 400_000


def test_maps_and_answers_are_those_of_the_library(frog, frog_payload):
    model, checkpoint, canvas, explanation = frog
    data = frog_payload
    with torch.no_grad():
        logits, maps = model(prepare(canvas, checkpoint), return_attn=True)
    maps = torch.stack(maps, dim=1)
    assert (data["layers"], data["heads"], data["grid"]) == (6, 8, [8, 8])
    assert_close_to(data["raw"], maps[0])
    assert_close_to(data["fused"], fuse_heads(maps[0], "max"))
    assert_close_to(data["rollout"], rollout_by_layer(maps, "max", 0.9)[0])
    probabilities = np.frombuffer(base64.b64decode(data["probabilities"]), "<f4").reshape(6, 10)
    np.testing.assert_allclose(probabilities[-1], logits.softmax(-1)[0], atol=1e-6)
    np.testing.assert_allclose(probabilities, explanation.layer_logits[0].softmax(-1), atol=1e-6)
    assert np.ptp(probabilities, axis=0).max() > 0.1  # the layers differ
    assert data["classes"] == list(checkpoint.class_names)
    assert (data["model"], data["model_id"]) == (checkpoint.name, checkpoint.id)
    assert (data["fusion"], data["fusions"], data["discard"]) == ("max", list(FUSIONS), 0.9)
    colors = np.frombuffer(base64.b64decode(data["inferno"]), np.uint8).reshape(256, 3)
    assert np.array_equal(colors, colormap("inferno"))


def test_the_id_follows_picture_model_and_name_but_no_setting(frog, frog_payload):
    model, checkpoint, canvas, explanation = frog
    settings = {"name": "sample:frog_07", "title": "frog 07", "fusion": "max", "discard": 0.9}
    other = explain(model, prepare(canvas, checkpoint))
    again = payload(other, checkpoint, canvas, **settings | {"fusion": "mean", "discard": 0.0})
    assert again["id"] == frog_payload["id"]
    assert again["rollout"] != frog_payload["rollout"]
    darker = payload(explanation, checkpoint, canvas // 2, **settings)
    turned = payload(explanation, checkpoint, canvas.reshape(16, 64, 3), **settings)
    named = payload(explanation, checkpoint, canvas, **settings | {"name": "sample:frog_08"})
    changed = payload(explanation, replace(checkpoint, id="0123"), canvas, **settings)
    assert len({each["id"] for each in (frog_payload, darker, turned, named, changed)}) == 5


# --- the picture


def opened(data: dict) -> tuple[str, np.ndarray, int]:
    """Its format, its pixels, its bytes."""
    head, text = data["picture"].split(",")
    file = base64.b64decode(text, validate=True)
    with Image.open(io.BytesIO(file)) as image:
        assert head == f"data:image/{image.format.lower()};base64"
        return image.format, np.asarray(image), len(file)


def test_a_small_picture_is_sent_to_the_pixel(frog, frog_payload):
    kind, pixels, _ = opened(frog_payload)
    assert kind == "PNG"
    assert np.array_equal(pixels, frog[2])
    assert frog_payload["size"] == [32, 32]


def test_a_photograph_is_sent_as_webp_and_stays_small(large):
    checkpoint, _, explanation = large
    shapes = random_pixels(28, 42)
    photo = np.asarray(Image.fromarray(shapes).resize((672, 448), Image.Resampling.BICUBIC)).astype(int)
    grain = np.random.default_rng(0).normal(0, 4, photo.shape)
    photo = np.clip(photo + grain, 0, 255).astype(np.uint8)
    data = payload(explanation, checkpoint, photo, name="own:0", title="", fusion="min", discard=0.6)
    kind, pixels, size_bytes = opened(data)
    assert kind == "WEBP"
    assert size_bytes < 150_000 < len(png_of(photo))
    assert pixels.shape == photo.shape
    assert data["size"] == [448, 672]
    assert np.abs(pixels.astype(int) - photo).mean() < 4


def png_of(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


# --- large grids: the rows of CLS, and the rest on demand


def test_a_large_grid_sends_the_rows_of_cls_alone(large):
    data = large_payload(large)
    assert len(json.dumps(data)) < 400_000
    assert not data.keys() & {"raw", "rollout"}
    for method in ("raw", "rollout"):
        rows = head_rows(large[2], method, head_fusion="min", discard_ratio=0.6)[0]
        assert rows.shape == (12, 13, 197)
        assert_close_to(data[f"cls_{method}"], rows, own=0)


def test_what_is_large_can_be_decided(large, frog):
    whole = large_payload(large, whole=True)
    assert_close_to(whole["raw"], large[2].attention[0])
    assert_close_to(whole["rollout"], large[2].rollout[0])
    assert not whole.keys() & {"cls_raw", "cls_rollout"}
    assert 6 * 8 * 65 * 65 <= WHOLE_VALUES < 12 * 12 * 197 * 197
    _, checkpoint, canvas, explanation = frog
    part = payload(
        explanation, checkpoint, canvas, name="f", title="", fusion="max", discard=0.9, whole=False
    )
    assert "raw" not in part
    rows = head_rows(explanation, head_fusion="max", discard_ratio=0.9)[0]
    assert_close_to(part["cls_rollout"], rows, own=0)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_map_can_be_fetched(frog, fusion):
    explanation = frog[3]
    attention = explanation.attention[0]
    for layer in range(6):
        assert_close_to(map_payload(explanation, f"rollout/{layer}", fusion), explanation.rollout[0, layer])
        fused = fuse_heads(attention[layer], fusion)
        assert_close_to(map_payload(explanation, f"raw/{layer}/all", fusion), fused)
        for head in range(8):
            assert_close_to(map_payload(explanation, f"raw/{layer}/{head}", fusion), attention[layer, head])


NO_MAPS = [
    *["", "raw", "raw/0", "raw/6/0", "raw/0/8", "raw/-1/0", "raw/0/-1", "raw/0/ALL", "raw/6/all", "rollout"],
    *[
        "rollout/6",
        "rollout/-1",
        "rollout/0/0",
        "rollout/all",
        "raw/0/0\n",
        " raw/0/0",
        "raw/٣/0",
        "raw/1e0/0",
    ],
    *["raw/99999999999999999999/0", "rollout/0 ", "RAW/0/0", "raw//0", "../raw/0/0"],
]


@pytest.mark.parametrize("key", NO_MAPS, ids=repr)
def test_maps_that_do_not_exist_are_refused_by_name(frog, key):
    with pytest.raises(ValueError, match="there is no map") as caught:
        map_payload(frog[3], key, "mean")
    assert repr(key) in str(caught.value)


@given(some.text(alphabet="rawolut/0123456789-", max_size=12))
def test_any_other_name_is_a_map_or_refused(frog, key):
    try:
        sent = map_payload(frog[3], key, "mean")
    except ValueError:
        return
    kind, *numbers = key.split("/")
    assert (kind, len(numbers)) in (("rollout", 1), ("raw", 2))
    assert decoded(sent, 65).shape == (65, 65)


# --- one token's rollout of each head without the other tokens' rows


@pytest.mark.parametrize("discard", [0, 0.5, 0.9, 1])
@pytest.mark.parametrize("residual", [0, 0.5, 1])
def test_a_head_s_row_is_that_of_the_whole_rollout(discard, residual):
    generator = torch.Generator().manual_seed(4)
    maps = torch.rand(2, 3, 4, 7, 7, generator=generator, dtype=torch.float64).pow(4)
    maps = maps / maps.sum(-1, keepdim=True)
    maps[0, 1, 2, 3] = maps[0, 1, 2, 3].round(decimals=1)  # equal weights
    by_layer = rollout_by_layer(maps, "mean", discard, residual)
    whole = rollout_by_head(maps, "mean", discard, residual)
    for token in range(7):
        rows = rollout_of_heads_row(maps, by_layer, token, discard, residual)
        torch.testing.assert_close(rows, whole[..., token, :])
        torch.testing.assert_close(rows.sum(-1), torch.ones(2, 3, 4, dtype=torch.float64))


@pytest.mark.parametrize("token", [-1, 7])
def test_a_row_of_a_token_that_is_not_there_is_refused(token):
    maps = torch.full((1, 2, 2, 7, 7), 1 / 7)
    with pytest.raises(ValueError, match="0 to 6"):
        rollout_of_heads_row(maps, rollout_by_layer(maps), token)
