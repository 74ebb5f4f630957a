"""The same framing for the model and for the eye, and exact numbers for the model.

Run: pytest tests/test_framing.py (a few seconds).
"""

import hashlib
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vit.images import fit, frame_box, framed, normalise, open_picture, picture_id, prepare, to_array

SAMPLES = sorted((Path(__file__).parent.parent / "assets" / "samples").glob("*.png"))
RED, GREEN, BLUE, GREY, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128), (255, 255, 255)


def checkpoint(img_size=32, in_channels=3, mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616)):
    architecture = SimpleNamespace(img_size=img_size, in_channels=in_channels)
    return SimpleNamespace(architecture=architecture, mean=mean, std=std, eval_resize=None)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("how", ["crop", "pad"])
@pytest.mark.parametrize("size_px", [(32, 32), (20, 31), (49, 3), (1, 1)])
def test_a_picture_of_the_right_size_is_returned_pixel_for_pixel(how, size_px):
    picture = noise(*size_px)
    np.testing.assert_array_equal(to_array(fit(picture, size_px, how)), to_array(picture))
    np.testing.assert_array_equal(to_array(framed(picture, size_px, how)), to_array(picture))


def test_crop_takes_the_middle_and_pad_takes_all():
    wide = Image.new("RGB", (96, 32), RED)
    wide.paste(GREEN, (32, 0, 64, 32))
    for picture in (wide, wide.transpose(Image.Transpose.ROTATE_90)):
        assert (to_array(fit(picture, (16, 16), "crop")) == GREEN).all()

    padded = to_array(fit(wide, (48, 48), "pad"))  # rows 16 to 31 hold it; the filter reaches 2 pixels over
    assert (padded[:14] == GREY).all()
    assert (padded[34:] == GREY).all()
    assert (padded[18:30, 20:28] == GREEN).all()
    assert (padded[18:30, :12] == RED).all()
    assert (padded[18:30, 36:] == RED).all()
    np.testing.assert_array_equal(padded, padded[::-1, ::-1])


def test_crop_of_whole_pixels_is_exact():
    picture = noise(32, 50)
    np.testing.assert_array_equal(to_array(fit(picture, (32, 32))), to_array(picture)[:, 9:41])


def test_downscaling_does_not_alias():
    """Stripes one pixel wide must become even grey; without a wide filter they stay stripes."""
    stripes = np.zeros((320, 320, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    small = to_array(fit(Image.fromarray(stripes), (32, 32)))
    assert np.abs(small.astype(int) - 128)[:, 2:-2].max() <= 2


@pytest.mark.parametrize("how", ["crop", "pad"])
@pytest.mark.parametrize("picture_px", [(1, 1), (3, 5000), (5000, 3), (1, 2), (7, 700_000)])
@pytest.mark.parametrize("size_px", [(32, 32), (224, 100)])
def test_extreme_shapes(how, picture_px, size_px):
    picture = Image.new("RGB", picture_px[::-1], RED)
    small = to_array(fit(picture, size_px, how))
    assert small.shape == (*size_px, 3)
    assert (small[..., 0].astype(int) - small[..., 1]).max() > 5, "the picture vanished"
    if how == "crop":
        assert (small == RED).all()
    assert max(framed(picture, size_px, how).size) <= 672


@settings(max_examples=200, deadline=None)
@given(
    picture_px=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    size_px=st.tuples(st.integers(1, 50), st.integers(1, 50)),
)
def test_frame_box_is_centred_and_of_the_right_shape(picture_px, size_px):
    (height, width), (rows, columns) = picture_px, size_px
    left, top, right, bottom = frame_box(picture_px, size_px, "crop")
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert abs((left + right) - width) <= 1
    assert abs((top + bottom) - height) <= 1
    assert (right - left == width) or (bottom - top == height)

    left, top, right, bottom = frame_box(picture_px, size_px, "pad")
    assert (left + right, top + bottom) == pytest.approx((width, height))
    assert left <= 0 < width <= right + 1e-9
    assert top <= 0 < height <= bottom + 1e-9
    assert (right - left) * rows == pytest.approx((bottom - top) * columns)


def test_framed_is_the_same_framing_at_higher_resolution():
    picture = fit(noise(12, 18), (1000, 1500))  # smooth, so that both resolutions can be compared
    for how in ("crop", "pad"):
        canvas = framed(picture, (32, 32), how, longest_px=640)
        assert canvas.size == (640, 640)
        seen, shown = to_array(fit(picture, (32, 32), how)), to_array(fit(canvas, (32, 32)))
        assert np.abs(seen.astype(int) - shown).max() <= 6  # half a pixel apart, it would be over 40


def test_framed_never_enlarges():
    picture = noise(40, 60)
    np.testing.assert_array_equal(to_array(framed(picture, (32, 32))), to_array(picture)[:, 10:50])
    padded = to_array(framed(picture, (32, 32), "pad"))
    assert padded.shape == (60, 60, 3)
    np.testing.assert_array_equal(padded[10:50], to_array(picture))
    tall = picture.transpose(Image.Transpose.TRANSPOSE)
    padded = to_array(framed(tall, (32, 32), "pad"))
    np.testing.assert_array_equal(padded[:, 10:50], to_array(tall))
    assert framed(noise(300, 2000), (32, 64), longest_px=100).size == (100, 50)


def test_any_other_how_is_refused():
    for call in (fit, framed):
        with pytest.raises(ValueError, match="stretch"):
            call(noise(4, 4), (2, 2), "stretch")


# Numbers


def test_picture_id_is_the_sha256_of_the_cifar_bytes():
    assert len(SAMPLES) == 20
    for path in SAMPLES:
        pixels = to_array(open_picture(path))
        assert pixels.shape == (32, 32, 3)
        sample = Image.open(path)
        rows = b"".join(bytes(sample.getpixel((x, y))) for y in range(32) for x in range(32))
        assert len(rows) == 3072
        assert picture_id(pixels) == hashlib.sha256(rows).hexdigest()[:12]
        planes_first = np.ascontiguousarray(pixels.transpose(2, 0, 1))  # a view that is not contiguous:
        assert picture_id(planes_first.transpose(1, 2, 0)) == picture_id(pixels)
    assert len({picture_id(to_array(open_picture(path))) for path in SAMPLES}) == 20


def test_prepare_equals_an_independent_float64_computation():
    torch = pytest.importorskip("torch")
    config = checkpoint()
    for source in (noise(32, 32), to_array(noise(32, 32))):
        x = prepare(source, config)
        assert x.shape == (1, 3, 32, 32)
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        pixels = np.asarray(noise(32, 32), dtype=np.float64)
        for channel in range(3):
            expected = (pixels[:, :, channel] / 255 - config.mean[channel]) / config.std[channel]
            np.testing.assert_allclose(x[0, channel].numpy(), expected, atol=2e-6, rtol=0)


def test_prepare_frames_to_the_model_s_size():
    pytest.importorskip("torch")
    picture = noise(90, 61)
    for img_size, size_px in ((48, (48, 48)), ((24, 40), (24, 40)), ([24, 40], (24, 40))):
        for how in ("crop", "pad"):
            x = prepare(picture, checkpoint(img_size, mean=(0, 0, 0), std=(1, 1, 1)), how)
            expected = to_array(fit(picture, size_px, how)) / 255
            np.testing.assert_allclose(x[0].numpy().transpose(1, 2, 0), expected, atol=1e-6)


def test_prepare_for_a_model_of_one_channel():
    pytest.importorskip("torch")
    config = checkpoint(in_channels=1, mean=(0.5,), std=(0.25,))
    x = prepare(noise(32, 32), config)
    assert x.shape == (1, 1, 32, 32)
    expected = (np.asarray(noise(32, 32).convert("L"), dtype=np.float64) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(x[0, 0].numpy(), expected, atol=0.51 / 255 / 0.25)  # Pillow rounds its grey


def test_normalise_a_batch_even_a_read_only_one():
    torch = pytest.importorskip("torch")
    batch = np.stack([to_array(noise(8, 8, seed)) for seed in range(5)])
    batch.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = normalise(batch, checkpoint(8))
    for row, pixels in zip(x, batch, strict=True):
        assert torch.equal(row, prepare(pixels, checkpoint(8))[0])


def test_other_arrays_and_channels_are_refused():
    pytest.importorskip("torch")
    for wrong in (np.zeros((32, 32), np.uint8), np.zeros((32, 32, 3)), np.zeros((3, 32, 32), np.uint8)):
        with pytest.raises(ValueError, match="uint8"):
            prepare(wrong, checkpoint())
    with pytest.raises(ValueError, match="channels"):
        prepare(noise(32, 32), checkpoint(in_channels=4))
