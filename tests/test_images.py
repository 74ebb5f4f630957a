"""Any picture a person may bring opens right or is refused in one sentence; the model gets exact numbers.

Run: pytest tests/test_images.py (some seconds, no network). Every odd file is made here, in memory.
"""

import io
import struct
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from vit import images
from vit.images import PictureError, fit, open_picture, to_array

SAMPLES = sorted((Path(__file__).parent.parent / "assets" / "samples").glob("*.png"))
RED, GREEN, BLUE, GREY, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128), (255, 255, 255)


def encode(picture: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def png(width: int, height: int, *more: tuple[bytes, bytes]) -> bytes:
    """A PNG that claims this size and has no pixels; `more` are chunks (name, data) after the header."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), *more, (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def refusal(source) -> str:
    """The sentence a person reads; no warning may come with it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PictureError) as caught:
            open_picture(source)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "Error" not in sentence
    return sentence


# Kinds of file


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF", "WEBP"])
def test_lossless_files_give_back_their_pixels(kind):
    picture = noise(5, 7).quantize(20).convert("RGB")
    options = {"lossless": True} if kind == "WEBP" else {}
    opened = open_picture(encode(picture, kind, **options))
    assert opened.mode == "RGB"
    np.testing.assert_array_equal(to_array(opened), to_array(picture))


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "WEBP"])
def test_lossy_files_give_back_their_colour(kind):
    opened = open_picture(encode(Image.new("RGB", (40, 24), (200, 40, 90)), kind))
    assert opened.size == (40, 24)
    assert np.abs(to_array(opened).astype(int) - (200, 40, 90)).max() <= 8


@pytest.mark.parametrize("kind", ["PPM", "ICO", "TGA", "PCX", "JPEG2000", "PDF"])
def test_other_formats_are_refused(kind):
    assert "use a PNG, JPEG" in refusal(encode(noise(16, 16), kind))


@pytest.mark.parametrize(
    "content",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        b"8BPS" + struct.pack(">H6xHIIHHIII", 1, 3, 4, 4, 8, 3, 0, 0, 0) + bytes(50),
        b"Dear diary, today I renamed a letter to .png.",
    ],
    ids=["svg", "psd", "text"],
)
def test_files_that_are_no_picture_are_refused(content, tmp_path):
    renamed = tmp_path / "holiday.png"
    renamed.write_bytes(content)
    assert "not a picture" in refusal(renamed)
    assert "not a picture" in refusal(content)


def test_first_frame_of_a_gif_and_first_page_of_a_tiff():
    first, others = Image.new("RGB", (6, 4), RED), [Image.new("RGB", (6, 4), c) for c in (GREEN, BLUE)]
    for kind in ("GIF", "TIFF", "WEBP", "PNG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        several = encode(first, kind, save_all=True, append_images=others, **options)
        assert Image.open(io.BytesIO(several)).n_frames == 3
        assert (to_array(open_picture(several)) == RED).all()


# Modes


def test_cmyk_jpeg():
    cmyk = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # no cyan, full magenta and yellow: red
    assert np.abs(to_array(open_picture(encode(cmyk, "JPEG"))).astype(int) - RED).max() <= 3


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_is_scaled_and_not_cut_off(kind):
    values = np.array([[0, 128, 257, 32768, 65278, 65535]], dtype=np.uint16)
    opened = to_array(open_picture(encode(Image.fromarray(values), kind)))
    assert opened[0, :, 0].tolist() == [0, 0, 1, 128, 254, 255]
    assert (opened == opened[..., :1]).all()


def test_16_bit_grey_with_a_see_through_value_lies_over_white():
    values = np.array([[0, 300, 65535 // 3]], dtype=np.uint16)
    opened = open_picture(encode(Image.fromarray(values), "PNG", transparency=300))
    assert to_array(opened)[0, :, 0].tolist() == [0, 255, 85]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 7, 255], [0, 7, 255]),
        ([0, 257, 65535], [0, 1, 255]),
        ([-1000, 0, 1000], [0, 128, 255]),
        ([0, 0, 2**31 - 1], [0, 0, 255]),
        ([-5, -5, -5], [0, 0, 0]),
    ],
)
def test_32_bit_integers(values, expected):
    tiff = encode(Image.fromarray(np.array([values], dtype=np.int32)), "TIFF")
    assert to_array(open_picture(tiff))[0, :, 0].tolist() == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 0.5, 1], [0, 128, 255]),
        ([0, 0.2, np.nan], [0, 51, 0]),
        ([-np.inf, 0.2, np.inf], [0, 51, 255]),
        ([-2, 0, 2], [0, 128, 255]),
        ([10, np.nan, 30], [0, 0, 255]),
        ([-np.inf, 30, 10], [0, 255, 0]),
        ([-3.4e38, 0, 3.4e38], [0, 128, 255]),
        ([7, 7, 7], [0, 0, 0]),
        ([np.nan, np.nan, np.inf], [0, 0, 255]),
    ],
)
def test_float_tiff(values, expected):
    tiff = encode(Image.fromarray(np.array([values], dtype=np.float32)), "TIFF")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_array(open_picture(tiff))[0, :, 0].tolist() == expected


def test_transparency_lies_over_white():
    half_red = Image.new("RGBA", (2, 1), (*RED, 128))
    half_red.putpixel((1, 0), (0, 0, 0, 0))
    expected = [[255, 127, 127], [255, 255, 255]]
    assert to_array(open_picture(encode(half_red, "PNG")))[0].tolist() == expected
    assert to_array(open_picture(encode(half_red, "WEBP", lossless=True)))[0].tolist()[1] == [255] * 3

    half_black = Image.new("LA", (1, 1), (0, 128))
    assert to_array(open_picture(encode(half_black, "PNG"))).tolist() == [[[127, 127, 127]]]

    red_and_nothing = Image.new("P", (2, 1))
    red_and_nothing.putpalette([*RED, *BLUE])
    red_and_nothing.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        opened = open_picture(encode(red_and_nothing, kind, transparency=1))
        assert to_array(opened)[0].tolist() == [[255, 0, 0], [255, 255, 255]]
    opened = open_picture(encode(red_and_nothing, "PNG", transparency=bytes([255, 128])))
    assert to_array(opened)[0].tolist() == [[255, 0, 0], [127, 127, 255]]


def test_one_bit_and_grey_and_palette():
    bits = Image.fromarray(np.array([[True, False]]))
    grey = Image.fromarray(np.array([[9, 200]], dtype=np.uint8))
    for kind in ("PNG", "TIFF", "BMP", "GIF"):
        assert to_array(open_picture(encode(bits, kind)))[0].tolist() == [[255] * 3, [0] * 3]
        assert to_array(open_picture(encode(grey, kind)))[0].tolist() == [[9] * 3, [200] * 3]


@pytest.mark.parametrize("mode", ["YCbCr", "CMYK"])
def test_tiff_in_other_colour_spaces(mode):
    opened = open_picture(encode(Image.new("RGB", (4, 4), RED).convert(mode), "TIFF"))
    assert np.abs(to_array(opened).astype(int) - RED).max() <= 3


def test_lab_tiff():
    lab = Image.new("LAB", (4, 4), (138, 128 + 81, 128 + 70))  # L* 54, a* 81, b* 70 under D50: sRGB's red
    assert np.abs(to_array(open_picture(encode(lab, "TIFF"))).astype(int) - RED).max() <= 6


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK", "YCbCr", "HSV", "LA", "PA", "I", "RGBX"])
def test_fit_and_to_array_take_any_mode(mode):
    white = Image.new("RGB", (4, 4), WHITE).convert(mode)
    assert (to_array(white) == 255).all()
    assert fit(white, (2, 3)).mode == "RGB"


# Which way is up


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(kind, orientation):
    """EXIF 2.32: the tag names the visual sides that the stored row 0 and the stored column 0 lie on."""
    row_0, column_0 = {
        1: ("top", "left"),
        2: ("top", "right"),
        3: ("bottom", "right"),
        4: ("bottom", "left"),
        5: ("left", "top"),
        6: ("right", "top"),
        7: ("right", "bottom"),
        8: ("left", "bottom"),
    }[orientation]
    stored = Image.new("RGB", (48, 32), WHITE)
    stored.paste(RED, (0, 0, 16, 16))  # where stored row 0 meets stored column 0
    exif = Image.Exif()
    exif[274] = orientation
    opened = open_picture(encode(stored, kind, exif=exif))

    assert opened.size == ((48, 32) if orientation < 5 else (32, 48))
    right, bottom = "right" in (row_0, column_0), "bottom" in (row_0, column_0)
    red = to_array(opened)[-8 if bottom else 8, -8 if right else 8].astype(int)
    assert np.abs(red - RED).max() < 40
    opposite = to_array(opened)[8 if bottom else -8, 8 if right else -8]
    assert opposite.min() > 215


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("exif", [b"MM\0*\0\0\0\x08\0\x01\x01\x12", b"not EXIF at all"], ids=["cut", "text"])
def test_damaged_exif_does_not_cost_the_picture(kind, exif):
    content = encode(Image.new("RGB", (16, 8), RED), kind, exif=b"Exif\0\0" + exif)
    assert open_picture(content).size == (16, 8)


def test_result_carries_no_metadata_and_no_file(tmp_path):
    exif = Image.Exif()
    exif[0x010E] = "at my house"
    path = tmp_path / "a.jpg"
    path.write_bytes(encode(noise(16, 16), "JPEG", exif=exif, comment=b"at my house"))
    opened = open_picture(path)
    assert type(opened) is Image.Image
    assert opened.info == {}
    assert b"at my house" not in encode(opened, "PNG")
    path.unlink()  # fails on Windows if the file is still open
    opened.load()


# Files that are damaged, missing or too large


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_file_cut_short(kind, share):
    whole = encode(noise(64, 64), kind)
    assert "cut short" in refusal(whole[: int(len(whole) * share)])


def test_0_bytes(tmp_path):
    (tmp_path / "nothing.png").touch()
    for source in (b"", io.BytesIO(), tmp_path / "nothing.png"):
        assert "empty" in refusal(source)


def test_missing_path_and_folder_are_named_without_their_parents(tmp_path):
    assert 'no file named "cat.png"' in refusal(tmp_path / "cat.png")
    assert 'no file named "cat.png"' in refusal(str(tmp_path / "dog.png" / "cat.png"))
    assert "is a folder" in refusal(tmp_path)
    assert "is a folder" in refusal("/")
    assert str(tmp_path.parent) not in refusal(tmp_path) + refusal(tmp_path / "cat.png")
    refusal("a\0b")
    refusal("a" * 5000)


def test_a_text_that_unpacks_without_end_is_refused():
    bomb = b"note\0\0" + zlib.compress(bytes(50 * 2**20))
    assert "damaged" in refusal(png(4, 4, (b"zTXt", bomb)))


@pytest.mark.parametrize("side_px", [6325, 9500, 14_000, 60_000])
def test_too_many_pixels_are_refused_from_the_header(side_px):
    """Pillow is silent at the first, warns at the second, raises at the others: one sentence for all."""
    assert "40 megapixels" in refusal(png(side_px, side_px))


def test_40_megapixels_are_allowed():
    grey = Image.new("1", (8000, 5000))
    assert open_picture(encode(grey, "PNG")).size == (8000, 5000)


def test_8_mb_are_allowed_and_one_byte_more_is_not(tmp_path):
    small = encode(noise(8, 8), "PNG")
    largest = small + bytes(images.MAX_BYTES - len(small))
    path = tmp_path / "large.png"
    path.write_bytes(largest)
    for source in (largest, io.BytesIO(largest), path):
        assert open_picture(source).size == (8, 8)
    path.write_bytes(largest + b"\0")
    for source in (largest + b"\0", io.BytesIO(largest + b"\0"), path):
        assert "8 MB" in refusal(source)


class Endless(io.RawIOBase):
    """A stream of 2 ** 50 bytes that counts what it hands over and will not be read whole."""

    def __init__(self, can_seek: bool):
        self.can_seek, self.handed_over, self.position = can_seek, 0, 0

    def seekable(self):
        return self.can_seek

    def seek(self, offset, whence=0):
        self.position = offset + (2**50 if whence == 2 else 0)
        return self.position

    def tell(self):
        return self.position

    def read(self, size=-1):
        assert 0 <= size <= images.MAX_BYTES + 1, "asked for all of an endless stream"
        self.handed_over += min(size, 2**20)
        return bytes(min(size, 2**20))  # short answers, as a pipe gives


def test_a_giant_stream_is_never_read():
    seekable, pipe = Endless(can_seek=True), Endless(can_seek=False)
    assert "8 MB" in refusal(seekable)
    assert seekable.handed_over == 0
    assert "8 MB" in refusal(pipe)
    assert pipe.handed_over == images.MAX_BYTES + 1


def test_a_stream_is_read_from_its_start_and_a_broken_one_refused():
    stream = io.BytesIO(encode(noise(8, 8), "PNG"))
    stream.seek(0, 2)
    assert open_picture(stream).size == (8, 8)

    class Broken(io.RawIOBase):
        def read(self, size=-1):
            raise ConnectionResetError

    assert "could not be read" in refusal(Broken())


def test_pillow_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 12_345)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)
    filters = list(warnings.filters)
    open_picture(encode(noise(8, 8), "PNG"))
    refusal(png(60_000, 60_000))
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES) == (12_345, False)
    assert warnings.filters == filters


def test_many_threads_at_once_leave_the_warning_filters_alone():
    filters, sizes = list(warnings.filters), []
    content = encode(noise(60, 60), "PNG")
    threads = [threading.Thread(target=lambda: sizes.append(open_picture(content).size)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [(60, 60)] * 16
    assert warnings.filters == filters


def assert_opens_or_is_refused(content: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            opened = open_picture(content)
        except PictureError:
            return
        assert opened.mode == "RGB"
        assert to_array(opened).shape == (opened.height, opened.width, 3)


STARTS = [
    b"",
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff\xe0",
    b"GIF89a",
    b"BM",
    b"II*\0\x08\0\0\0",
    b"RIFF\x40\0\0\0WEBPVP8 ",
]


@settings(max_examples=300, deadline=None)
@given(start=st.sampled_from(STARTS), rest=st.binary(max_size=300))
def test_random_bytes_open_or_are_refused(start, rest):
    assert_opens_or_is_refused(start + rest)


VALID = {
    kind: encode(noise(12, 9).quantize(16), kind)
    if kind in ("PNG", "GIF")
    else encode(
        noise(12, 9), kind, exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    )
    for kind in ("PNG", "GIF", "JPEG", "WEBP")
}


def with_right_sums(content: bytes) -> bytes:
    """The PNG with its checksums made right, so that damage gets past the first check."""
    fixed, at = content[:8], 8
    while at + 12 <= len(content):
        end = at + 8 + struct.unpack(">I", content[at : at + 4])[0]
        if end + 4 > len(content):
            break
        fixed += content[at:end] + struct.pack(">I", zlib.crc32(content[at + 4 : end]))
        at = end + 4
    return fixed + content[at:]


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(sorted(VALID)),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 2**16)),
    mend=st.booleans(),
)
def test_mutated_pictures_open_or_are_refused(kind, changes, cut, mend):
    content = bytearray(VALID[kind])
    for position, value in changes:
        content[position % len(content)] = value
    content = bytes(content if cut is None else content[: cut % len(content)])
    assert_opens_or_is_refused(with_right_sums(content) if mend and kind == "PNG" else content)
