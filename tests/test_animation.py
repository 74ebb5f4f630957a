"""Layers as a film: every layer has its frame, and a frame is what `draw` draws.

Run: pytest tests/test_animation.py (seconds).
"""

from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image, ImageSequence

from vit.animation import play_through
from vit.overlay import Style, draw, outline

LAYERS, GRID = 6, (8, 8)
STYLES = [Style(), Style("heat"), Style(strength=0.4, smooth=True)]


@pytest.fixture(scope="module")
def canvas() -> np.ndarray:
    """32 x 32 pixels of soft colours, as a small photo has them."""
    y, x = np.mgrid[:32, :32]
    channels = 128 + 90 * np.sin(x / 6), 60 + 5 * y, 150 + 80 * np.cos((x - y) / 9)
    return np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def relevance() -> np.ndarray:
    return np.random.default_rng(0).random((LAYERS, *GRID)) ** 3


def frames(data: bytes) -> np.ndarray:
    """(frames, h, w, 3), as a viewer shows them one after another."""
    film = Image.open(BytesIO(data))
    return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(film)])


def pictures(shown: np.ndarray, size_px: int = 448) -> np.ndarray:
    """The frames without their strip, as signed numbers."""
    return shown[:, :size_px].astype(int)


@pytest.mark.parametrize("style", STYLES)
def test_webp_is_what_draw_draws(canvas, relevance, style):
    shown = frames(play_through(canvas, relevance, style, kind="webp"))
    assert np.abs(pictures(shown) - draw(canvas, relevance, style, size_px=(448, 448))).max() <= 2


def test_one_scale_for_all_layers(canvas, relevance):
    shown = pictures(frames(play_through(canvas, relevance, kind="webp", top=2.0)))
    expected = draw(canvas, relevance, size_px=(448, 448), top=2.0)
    assert np.abs(shown - expected).max() <= 2
    assert np.abs(shown - draw(canvas, relevance, size_px=(448, 448))).max() > 20


@pytest.mark.parametrize("style", STYLES)
def test_gif_is_near_what_draw_draws_and_not_dithered(canvas, relevance, style):
    shown = frames(play_through(canvas, relevance, style, kind="gif"))
    drawn = draw(canvas, relevance, style, size_px=(448, 448))
    error = np.abs(pictures(shown) - drawn)
    assert error.mean() < 4
    assert error.max() <= 24
    # what is one colour in the drawing is one colour in the film
    is_even = (drawn[:, :, 1:] == drawn[:, :, :-1]).all(axis=-1)
    assert is_even.any()
    assert (pictures(shown)[:, :, 1:] == pictures(shown)[:, :, :-1]).all(axis=-1)[is_even].all()


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_every_layer_has_a_frame_of_its_time_for_ever(canvas, relevance, kind):
    film = Image.open(BytesIO(play_through(canvas, relevance, kind=kind, step_ms=450)))
    assert film.format == kind.upper()
    assert film.n_frames == LAYERS
    assert film.info["loop"] == 0
    for at in range(LAYERS):
        film.seek(at)
        film.load()
        assert film.info["duration"] == 450


@pytest.mark.parametrize("kind", ["gif", "webp"])
@pytest.mark.parametrize("layers", [1, 2, 12])
def test_layers_that_look_alike_keep_their_frames(canvas, kind, layers):
    for same in (np.zeros((layers, *GRID)), np.ones((layers, *GRID))):
        film = Image.open(BytesIO(play_through(canvas, same, kind=kind, size_px=64)))
        assert film.n_frames == layers


def test_the_strip_names_the_layer_on_one_ground(canvas, relevance):
    strips = frames(play_through(canvas, relevance, kind="webp"))[:, 448:]
    assert strips.shape[1] > 0
    assert (strips == strips[0, 0, 0]).all(axis=-1).mean() > 0.8
    for strip, other in pairwise(strips):
        assert (strip != other).any()


@pytest.mark.parametrize("shape", [(20, 60), (60, 20), (500, 700)])
def test_the_longer_side_has_the_size_asked_for(shape):
    picture = np.full((*shape, 3), 200, np.uint8)
    height, width = frames(play_through(picture, np.ones((2, 4, 4)), kind="webp", size_px=140)).shape[1:3]
    scale = 140 / max(shape)
    assert width == round(shape[1] * scale)
    assert height > round(shape[0] * scale)


def test_the_patch_whose_view_it_is_has_an_outline(canvas, relevance):
    shown = frames(play_through(canvas, relevance, kind="webp", cell=(2, 5)))
    for picture, drawn in zip(pictures(shown), draw(canvas, relevance, size_px=(448, 448)), strict=True):
        assert np.abs(picture - outline(drawn, (2, 5), GRID)).max() <= 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "mp4"}, "gif or webp"),
        ({"size_px": 10}, "64 pixels"),
        ({"step_ms": 0}, "20 ms"),
        ({"relevance": np.ones(GRID)}, r"\(L, GY, GX\)"),
        ({"relevance": np.full((2, *GRID), np.nan)}, "not finite"),
        ({"canvas": np.ones((4, 4))}, "uint8"),
    ],
)
def test_what_cannot_be_played_is_refused(canvas, relevance, change, words):
    with pytest.raises(ValueError, match=words):
        play_through(**{"canvas": canvas, "relevance": relevance} | change)
