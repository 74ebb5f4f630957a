"""The layers of a model one after another, as a GIF or WebP that plays for ever.

    data = play_through(canvas, relevance, Style("light"), kind="webp")   # relevance (L, GY, GX)
    Path("cat.webp").write_bytes(data)

A frame is what `vit.overlay.draw` draws for that layer, above a strip that names it. WebP is lossless; a GIF
has 256 colours a frame. numpy and Pillow only.
"""

from io import BytesIO
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw, ImageFont

from vit.overlay import DEFAULT_STYLE, Style, draw, outline, pixels_of

AnimationKind = Literal["gif", "webp"]
LEAST_PX = 64
LEAST_STEP_MS = 20  # browsers play anything quicker at ten frames a second

_STRIP, _STRIP_TEXT = "#14171c", "#c9ced6"


def play_through(
    canvas: ArrayLike,
    relevance: ArrayLike,
    style: Style = DEFAULT_STYLE,
    *,
    kind: AnimationKind = "gif",
    size_px: int = 448,
    step_ms: int = 700,
    cell: tuple[int, int] | None = None,
    top: float | None = None,
) -> bytes:
    """The file's bytes, with a frame of `step_ms` for each layer of `relevance` (L, GY, GX).

    The picture (H, W, 3) uint8 is `size_px` on its longer side, the strip comes below it. `cell` (row, column
    from 0) is the patch whose view is drawn, and gets an outline; `top` is the weight
    drawn at full light, by default each layer's largest. A GIF counts time in steps of 10 ms.
    ValueError as in `draw`, and for another kind, size or time.
    """
    picture, weights = pixels_of(canvas), np.asarray(relevance, dtype=np.float64)
    if weights.ndim != 3 or len(weights) < 1:
        raise ValueError(f"relevance must be (L, GY, GX), not {weights.shape}")
    if kind not in get_args(AnimationKind):
        raise ValueError(f"kind is gif or webp, not {kind!r}")
    if size_px < LEAST_PX or step_ms < LEAST_STEP_MS:
        raise ValueError(f"an animation has {LEAST_PX} pixels and {LEAST_STEP_MS} ms a frame at least")
    scale = size_px / max(picture.shape[:2])
    height, width = (max(1, round(side * scale)) for side in picture.shape[:2])
    frames = []
    for number, drawn in enumerate(draw(picture, weights, style, size_px=(height, width), top=top), 1):
        drawn = drawn if cell is None else outline(drawn, cell, weights.shape[1:])
        frames.append(_labelled(drawn, f"layer {number} of {len(weights)}", size_px))
    options = {"save_all": True, "duration": step_ms, "loop": 0}
    if kind == "gif":
        # Each layer has its own colours, and dots of two colours would look like weights.
        frames = [_with_palette(frame) for frame in frames]
        options |= {"optimize": False}
    else:
        options |= {"lossless": True}
    file = BytesIO()
    frames[0].save(file, kind, append_images=frames[1:], **options)
    return file.getvalue()


def _labelled(drawn: np.ndarray, label: str, size_px: int) -> Image.Image:
    """The drawing above its label. Labels differ, or a frame equal to the one before would be dropped."""
    height, width = drawn.shape[:2]
    font_px = max(8, min(size_px // 22, width // 8))
    strip_px = 2 * font_px
    frame = Image.new("RGB", (width, height + strip_px), _STRIP)
    frame.paste(Image.fromarray(drawn), (0, 0))
    middle = (width / 2, height + strip_px / 2)
    ImageDraw.Draw(frame).text(middle, label, _STRIP_TEXT, ImageFont.load_default(font_px), anchor="mm")
    return frame


def _with_palette(frame: Image.Image) -> Image.Image:
    # of Pillow's ways the one whose worst pixel is nearest: a few bright patches must not lose their colours
    return frame.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
