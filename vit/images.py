"""From any picture a person may bring to what the model sees.

    picture = open_picture("cat.jpg")        # RGB, upright, full size; PictureError says what is wrong
    x = prepare(picture, checkpoint)         # (1, 3, 32, 32) float32, framed, scaled and normalised
    canvas = framed(picture, (32, 32))       # the same framing, sharp, to draw an overlay on

Sizes are (height, width) in pixels, as in arrays; only Pillow's own `picture.size` is (width, height).
A picture is refused before it is decoded if its file is over 8 MB or its header says over 40 megapixels.
Nothing here imports torch until a tensor is asked for.
"""

import hashlib
import math
import struct
import threading
import warnings
import zlib
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

if TYPE_CHECKING:
    import torch

    from vit.checkpoint import Checkpoint

MAX_BYTES = 8 * 2**20
MAX_PIXELS = 40_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

# Mid grey has no hue and lies near the mean of natural pictures, so after normalisation it is close to zero:
# the border says as little to the model as a border can. Black or white would be a strong signal.
PAD_RGB = (128, 128, 128)

LUMA = np.array([0.299, 0.587, 0.114])  # Rec. 601, the grey of Pillow and torchvision

# Pillow's decoders raise all of these on damaged files, most of them by accident.
_DECODER_ERRORS = (
    OSError, ValueError, SyntaxError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError,
    EOFError, MemoryError, RuntimeError, struct.error, zlib.error,
)  # fmt: skip
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)

_UPRIGHT = {  # EXIF orientation -> what undoes it; 1 is upright already
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# `warnings.catch_warnings` is process-wide, so two threads must not be inside it at once. Decoding one
# picture at a time also bounds memory: 40 megapixels take some 160 MB a copy.
_ONE_AT_A_TIME = threading.Lock()

_NOT_A_PICTURE = "This file is not a picture that can be read: use a PNG, JPEG, WebP, GIF, BMP or TIFF."
_DAMAGED = "This picture is damaged or cut short: save or download it again, or choose another one."
_EMPTY = "This file is empty (0 bytes): save or download it again, or choose another one."
_TOO_MANY_BYTES = f"This file is larger than {MAX_BYTES // 2**20} MB: make the picture smaller and try again."
_TOO_MANY_PIXELS = (
    f"This picture has more than {MAX_PIXELS // 10**6} megapixels: make it smaller and try again."
)


@dataclass(frozen=True)
class ResizeThenCrop:
    """What most public models were measured with: resized until the crop is this share, then cropped."""

    share: float  # of the shorter side, above 0 to 1
    interpolation: str  # of Pillow's filters, in lower case


class PictureError(ValueError):
    """A picture that cannot be used; its text is one sentence for the person who brought it."""


def open_picture(source: str | Path | bytes | BinaryIO) -> Image.Image:
    """Open a PNG, JPEG, WebP, GIF, BMP or TIFF as RGB, upright and full size.

    `source` is a path, the file's bytes or a binary stream (read from its start if it can seek). Of several
    frames or pages the first is taken; transparency lies over white. The result holds no file open and no
    metadata. PictureError if there is no such file, or it is no picture, damaged or too large.
    """
    data = _read(source)
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata are of no use to anyone here
        return _decode(data)


def frame_box(
    picture_px: tuple[int, int], size_px: tuple[int, int], how: str = "crop"
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of what a model of `size_px` sees, in pixels of the original picture.

    Both sizes are (height, width). "crop" gives whole pixels inside the picture; "pad" surrounds the whole
    picture, so that its edges may be negative or lie beyond the picture. ValueError for another `how`.
    """
    height, width = picture_px
    rows, columns = size_px
    if how not in ("crop", "pad"):
        raise ValueError(f'how must be "crop" or "pad", not {how!r}')
    picture_is_taller = height * columns > width * rows
    if picture_is_taller == (how == "crop"):
        box_height, box_width = width * rows / columns, width
    else:
        box_height, box_width = height, height * columns / rows
    if how == "crop":
        box_height, box_width = max(1, round(box_height)), max(1, round(box_width))
        left, top = (width - box_width) // 2, (height - box_height) // 2
    else:
        left, top = (width - box_width) / 2, (height - box_height) / 2
    return left, top, left + box_width, top + box_height


def fit(picture: Image.Image, size_px: tuple[int, int], how: str = "crop") -> Image.Image:
    """The picture as RGB at exactly `size_px` (height, width), never stretched.

    "crop" keeps the largest centred part of the right shape, "pad" the whole picture between grey borders.
    A picture of that size already is returned pixel for pixel. ValueError for another `how`.
    """
    picture = _to_rgb(picture)
    if how == "pad":
        # A square around 5,000,000 x 3 pixels would fill the memory; 8 times the target loses nothing to see.
        picture = picture.copy()
        picture.thumbnail((8 * max(size_px), 8 * max(size_px)), Image.Resampling.BICUBIC)
    left, top, right, bottom = box = frame_box(picture.size[::-1], size_px, how)
    if how == "pad":
        # Borders of whole pixels, then the exact box within them: centred to a fraction of a pixel.
        border_x, border_y = math.ceil(-left), math.ceil(-top)
        picture = ImageOps.expand(picture, (border_x, border_y), PAD_RGB)
        box = (left + border_x, top + border_y, right + border_x, bottom + border_y)
    else:
        # `resize(box=...)` alone would reach over the edge of the box, to what the frame leaves out.
        picture, box = picture.crop(box), None
    return picture.resize(size_px[::-1], Image.Resampling.BICUBIC, box)


def framed(
    picture: Image.Image,
    size_px: tuple[int, int],
    how: str = "crop",
    longest_px: int = 672,
    share: float = 1.0,
) -> Image.Image:
    """What `fit` shows, or the middle `share` of it, at up to `longest_px` on its longer side, to draw on.

    Never enlarged: a smaller picture keeps its own pixels. ValueError for another `how`.
    """
    left, top, right, bottom = frame_box(picture.size[::-1], size_px, how)
    cut_x, cut_y = (round(side * (1 - share) / 2) for side in (right - left, bottom - top))
    left, top, right, bottom = left + cut_x, top + cut_y, right - cut_x, bottom - cut_y
    scale = min(1, longest_px / max(right - left, bottom - top))
    width, height = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
    picture = _to_rgb(picture)
    if how == "crop":
        picture = picture.crop((left, top, right, bottom))
        return picture.resize((width, height), Image.Resampling.BICUBIC)
    picture = picture.resize(
        (max(1, round(picture.width * scale)), max(1, round(picture.height * scale))),
        Image.Resampling.BICUBIC,
    )
    canvas = Image.new("RGB", (width, height), PAD_RGB)
    canvas.paste(picture, ((width - picture.width) // 2, (height - picture.height) // 2))
    return canvas


def to_array(picture: Image.Image) -> np.ndarray:
    """(H, W, 3) uint8, the picture's RGB values."""
    return np.array(_to_rgb(picture))


def picture_id(pixels: np.ndarray) -> str:
    """12 hex digits naming an (H, W, 3) uint8 picture: the start of the SHA-256 of its bytes, row by row."""
    return hashlib.sha256(pixels.tobytes()).hexdigest()[:12]


def prepare(picture: Image.Image | np.ndarray, checkpoint: "Checkpoint", how: str = "crop") -> "torch.Tensor":
    """(1, C, H, W) float32: the picture as this checkpoint's model wants it.

    `picture` is a Pillow picture or (H, W, 3) uint8, of any size. ValueError for any other array or `how`.
    """
    if isinstance(picture, np.ndarray):
        _require_rgb_uint8(picture, ndim=3)
        picture = Image.fromarray(picture)
    return normalise(to_array(seen(picture, checkpoint, how))[None], checkpoint)


def seen(picture: Image.Image, checkpoint: "Checkpoint", how: str = "crop") -> Image.Image:
    """What this checkpoint's model sees of the picture, at its size."""
    size, way = checkpoint.architecture.img_size, checkpoint.eval_resize
    size_px = (size, size) if isinstance(size, int) else tuple(size)
    if way is None or how != "crop":
        return fit(picture, size_px, how)
    return _resized_then_cropped(_to_rgb(picture), size_px, way)


def canvas(picture: Image.Image, checkpoint: "Checkpoint", how: str = "crop") -> np.ndarray:
    """(h, w, 3) uint8: the same at the picture's own resolution, to draw on (see `framed`)."""
    way = checkpoint.eval_resize
    share = 1.0 if way is None or how != "crop" else way.share
    return to_array(framed(picture, checkpoint.architecture.img_size, how, share=share))


def _resized_then_cropped(picture: Image.Image, size_px: tuple[int, int], way: ResizeThenCrop) -> Image.Image:
    """To the pixel what timm's transform for evaluation makes: its rounding is its own."""
    rows, columns = size_px
    least_rows, least_columns = math.floor(rows / way.share), math.floor(columns / way.share)
    if least_rows == least_columns:
        short = min(picture.size)
        width, height = (
            least_rows if side == short else int(least_rows * side / short) for side in picture.size
        )
    else:
        ratio = min(picture.height / least_rows, picture.width / least_columns)
        width, height = round(picture.width / ratio), round(picture.height / ratio)
    picture = picture.resize((width, height), Image.Resampling[way.interpolation.upper()])
    left, top = round((width - columns) / 2), round((height - rows) / 2)
    return picture.crop((left, top, left + columns, top + rows))


def normalise(batch: np.ndarray, checkpoint: "Checkpoint") -> "torch.Tensor":
    """(B, H, W, 3) uint8 to (B, C, H, W) float32, (value / 255 - mean) / std with the checkpoint's figures.

    A model of one channel gets the grey of the picture. ValueError for another shape or type of `batch`, and
    for a model of neither one channel nor three.
    """
    import torch

    _require_rgb_uint8(batch, ndim=4)
    mean, std = np.array(checkpoint.mean), np.array(checkpoint.std)
    channels = checkpoint.architecture.in_channels
    if channels == 1:
        pixels = (batch @ LUMA.astype(np.float32))[:, None]
    elif channels == 3:
        pixels = batch.transpose(0, 3, 1, 2)
    else:
        raise ValueError(f"A picture has 3 colour channels or 1 of grey; this model wants {channels}.")
    scale, shift = (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
    # numpy writes straight into NCHW order: five times faster than torch's permute and convert on two cores.
    x = np.multiply(pixels, scale[:, None, None], out=np.empty(pixels.shape, np.float32))
    x += shift[:, None, None]
    return torch.from_numpy(x)


def _require_rgb_uint8(pixels: np.ndarray, ndim: int) -> None:
    if pixels.ndim != ndim or pixels.shape[-1] != 3 or pixels.dtype != np.uint8:
        wanted = "(H, W, 3)" if ndim == 3 else "(B, H, W, 3)"
        raise ValueError(f"pixels must be {wanted} uint8, not {pixels.shape} {pixels.dtype}")


def _read(source: str | Path | bytes | BinaryIO) -> bytes:
    """All bytes of the source, at most MAX_BYTES; a larger file is refused unread."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        name = path.name or str(path)
        try:
            if path.is_dir():
                raise PictureError(f'"{name}" is a folder: choose a picture file inside it.')
            if not path.is_file():
                raise PictureError(f'There is no file named "{name}": check the name and the folder.')
            with path.open("rb") as stream:
                return _read(stream)
        except OSError as error:
            raise PictureError(f'"{name}" cannot be opened: check that you may read it.') from error
    data = source if isinstance(source, bytes) else _read_stream(source)
    if len(data) > MAX_BYTES:
        raise PictureError(_TOO_MANY_BYTES)
    if not data:
        raise PictureError(_EMPTY)
    return data


def _read_stream(stream: BinaryIO) -> bytes:
    data = bytearray()
    try:
        if stream.seekable():
            stream.seek(0, SEEK_END)
            if stream.tell() > MAX_BYTES:
                raise PictureError(_TOO_MANY_BYTES)
            stream.seek(0)
        # A pipe has no size to ask for, and may hand over less than it was asked for.
        while len(data) <= MAX_BYTES and (chunk := stream.read(MAX_BYTES + 1 - len(data))):
            data += chunk
    except OSError as error:
        raise PictureError("This file could not be read to its end: try again.") from error
    return bytes(data)


def _decode(data: bytes) -> Image.Image:
    try:
        picture = Image.open(BytesIO(data), formats=FORMATS)
        if picture.width * picture.height > MAX_PIXELS:
            raise PictureError(_TOO_MANY_PIXELS)
        picture.load()
        turn = _UPRIGHT.get(_orientation(picture))
        rgb = _to_rgb(picture)
        # Both make a plain picture that has let go of the file.
        upright = rgb.copy() if turn is None else rgb.transpose(turn)
    except PictureError:
        raise
    except _BOMBS as error:
        raise PictureError(_TOO_MANY_PIXELS) from error
    except UnidentifiedImageError as error:
        raise PictureError(_NOT_A_PICTURE) from error
    except _DECODER_ERRORS as error:
        raise PictureError(_DAMAGED) from error
    upright.info.clear()  # a later save must not publish where the photo was taken
    return upright


def _orientation(picture: Image.Image) -> int:
    """The EXIF orientation. Not `ImageOps.exif_transpose`: it fails on good pixels with damaged EXIF."""
    try:
        return picture.getexif().get(ExifTags.Base.Orientation, 1)
    except _DECODER_ERRORS:
        return 1  # a picture whose EXIF cannot be read is shown as stored


def _to_rgb(picture: Image.Image) -> Image.Image:
    """Any mode as RGB, transparency over white; a plain RGB picture is returned itself."""
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        picture = _to_8_bit(picture)
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        white = Image.new("RGB", rgba.size, "white")
        white.paste(rgba, mask=rgba)
        return white
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _to_8_bit(picture: Image.Image) -> Image.Image:
    """A deep grey picture (16-bit, 32-bit or float) as 8-bit grey.

    The file does not say what white is, so it is the usual figure that holds every value: 65,535 for 16 bits,
    255 or 65,535 for integers, 1.0 for floats. If none does, the values are stretched from their least to
    their greatest. NaN becomes black; an infinity becomes black or white by its sign.
    """
    values = np.array(picture, dtype=np.float64)
    finite = values[np.isfinite(values)] if picture.mode == "F" else values
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    usual_whites = {"I": (255, 65_535), "F": (1,)}.get(picture.mode, (65_535,))
    white = next((white for white in usual_whites if low >= 0 and high <= white), None)
    black, white = (low, high) if white is None else (0, white)
    clear = picture.info.get("transparency")  # a 16-bit PNG may name one value that is see-through
    is_clear = None if clear is None else values == clear
    np.nan_to_num(values, copy=False, nan=black, posinf=white, neginf=black)
    # In place: a 40-megapixel picture is 320 MB of float64.
    values -= black
    values *= 255 / (white - black or 1)
    np.rint(values, out=values)
    if is_clear is not None:
        values[is_clear] = 255
    return Image.fromarray(values.astype(np.uint8))
