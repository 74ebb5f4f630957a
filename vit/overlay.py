"""Relevance drawn over pictures: as light that falls on them, or as a colour map laid over them.

    lit = draw(picture, relevance)                            # (..., H, W, 3) uint8, lit where the weight is
    heat = draw(picture, relevance, Style("heat"), size_px=(448, 448))
    sheet(picture, by_head, chosen=(3, 8)).save("heads.png")  # every layer and head as one picture
    data = png_bytes(heat, {"model": checkpoint_hash})

Pictures are (H, W, 3) uint8 in sRGB; relevance is any array (..., GY, GX), the weights of the patches that
tile the picture. All maps of a picture are drawn in one call: 48 thumbnails of 64 px take 1 to 3 ms on one
thread of a CPU. numpy and Pillow only; inputs never change.
"""

from dataclasses import dataclass
from io import BytesIO
from math import ceil, isfinite
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

Kind = Literal["light", "heat"]
Colors = Literal["cividis", "inferno"]
Mix = tuple[np.ndarray, np.ndarray]  # (n, GY) and (m, GX): how lines and columns mix the patches

# Ten evenly spaced colours of each map, those of plotly's maps of the same name: page and export agree.
_ANCHORS = {
    "cividis": "00224e 123570 3b496c 575d6d 707173 8a8678 a59c74 c3b369 e1cc55 fee838",
    "inferno": "000004 1b0c41 4a0c6b 781c6d a52c60 cf4446 ed6925 fb9b06 f7d13d fcffa4",
}

ACCENT = "#f2a63b"
# No grey is readable on white and on the dark page alike: 4.5:1 on both #ffffff and #0e1117 would need
# 4.5 * 4.5 = 20.25:1 between these two, and there is 18.9:1 (the best grey, #797979, has 4.3:1). So a sheet
# brings its own dark panel, where its text has 11:1.
_PANEL, _BAND, _PANEL_TEXT = "#14171c", "#20252d", "#c9ced6"


@dataclass(frozen=True)
class Style:
    """How relevance is drawn. ValueError for anything else than what is listed."""

    kind: Kind = "light"
    """light: the picture, lit where the weight is; heat: a colour map over the picture."""
    strength: float | None = None
    """0 to 1: how dark it is where no light falls (0.85), or how opaque the colours are (0.6)."""
    smooth: bool = False
    """Blend between the centres of patches, instead of one value for each patch."""
    colors: Colors = "inferno"
    """The colour map of heat."""

    def __post_init__(self):
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind is light or heat, not {self.kind!r}")
        if self.strength is None:  # as strong as light, heat would hide the picture
            object.__setattr__(self, "strength", {"light": 0.85, "heat": 0.6}[self.kind])
        if not 0 <= self.strength <= 1:
            raise ValueError(f"strength lies from 0 to 1, not {self.strength}")
        if self.colors not in get_args(Colors):
            raise ValueError(f"colors is cividis or inferno, not {self.colors!r}")


DEFAULT_STYLE = Style()


def draw(
    picture: ArrayLike,
    relevance: ArrayLike,
    style: Style = DEFAULT_STYLE,
    *,
    size_px: tuple[int, int] | None = None,
    top: float | None = None,
) -> np.ndarray:
    """Relevance (..., GY, GX) over one picture (H, W, 3) uint8: (..., h, w, 3) uint8.

    `size_px` is (h, w), by default the picture's own: its pixels stay crisp when enlarged and are averaged
    when made smaller. `top` is the weight drawn at full light, one for all maps; by default each map's own
    largest. Weights above it are drawn like it, those below 0 like 0, a map without weight evenly dark.
    ValueError for weights that are not finite, and for arrays of another shape or type.
    """
    picture = pixels_of(picture)
    share = _share(relevance, top)  # (..., GY, GX)
    height, width = picture.shape[:2] if size_px is None else size_px
    if height < 1 or width < 1:
        raise ValueError(f"size_px is (height, width) of at least 1 pixel, not {size_px}")
    source = _shrunk(picture, height, width)
    rows, down, row_of = _axis(height, source.shape[0], share.shape[-2], style.smooth)
    columns, across, column_of = _axis(width, source.shape[1], share.shape[-1], style.smooth)
    source = source[rows[:, None], columns]
    cells = _light if style.kind == "light" else _heat
    drawn = cells(source, share, (down, across), style)
    if len(columns) < width:
        drawn = drawn.take(column_of, axis=-2)
    return drawn.take(row_of, axis=-3) if len(rows) < height else drawn


def dim_own(relevance: ArrayLike, cell: tuple[int, int] | None) -> np.ndarray:
    """Relevance (..., GY, GX) to be drawn as the view of the patch at `cell` (row, column from 0).

    Its own weight is lowered to the largest of the others, where they have any: rollout keeps half of each
    token at every layer, so a patch would outshine all that it looks at. None, as for CLS, changes nothing.
    """
    weights = np.asarray(relevance, dtype=np.float64).copy()
    if cell is None:
        return weights
    own = (..., *cell)
    others = weights.copy()
    others[own] = 0
    most = others.max(axis=(-2, -1))
    weights[own] = np.where(most > 0, np.minimum(weights[own], most), weights[own])
    return weights


def colormap(name: Colors) -> np.ndarray:
    """(256, 3) uint8 from the least weight to the largest, ever brighter. ValueError for an unknown name."""
    if name not in _ANCHORS:
        raise ValueError(f"colour maps are {' and '.join(_ANCHORS)}, not {name!r}")
    anchors = np.array([list(bytes.fromhex(color)) for color in _ANCHORS[name].split()])
    at = np.linspace(0, 1, len(anchors))
    channels = [np.interp(np.linspace(0, 1, 256), at, channel) for channel in anchors.T]
    return np.rint(channels).astype(np.uint8).T


def _srgb_to_linear(srgb: np.ndarray) -> np.ndarray:
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def _linear_to_srgb(linear: np.ndarray) -> np.ndarray:
    return np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)


# sRGB is steepest in the dark (12.92), where one of 16,384 steps is 0.2 of a level: too little to be off by
# more than one level, and 16 KB still lie in the fastest cache.
_STEPS = 16_384
_LINEAR = (_srgb_to_linear(np.arange(256) / 255) * _STEPS).astype(np.float32)
_SRGB = np.rint(255 * _linear_to_srgb((np.arange(_STEPS) + 0.5) / _STEPS)).astype(np.uint8)


def pixels_of(picture: ArrayLike) -> np.ndarray:
    picture = np.asarray(picture)
    if picture.ndim != 3 or picture.shape[-1] != 3 or picture.dtype != np.uint8 or 0 in picture.shape:
        raise ValueError(f"the picture must be (H, W, 3) uint8, not {picture.shape} {picture.dtype}")
    return picture


def _share(relevance: ArrayLike, top: float | None) -> np.ndarray:
    """(..., GY, GX) float64 from 0 to 1: the weights as shares of the top."""
    weights = np.asarray(relevance, dtype=np.float64)
    if weights.ndim < 2 or 0 in weights.shape[-2:]:
        raise ValueError(f"relevance must be (..., GY, GX), not {weights.shape}")
    if not np.isfinite(weights).all():
        raise ValueError("relevance holds values that are not finite, so it cannot be drawn")
    if top is not None and not (top >= 0 and isfinite(top)):
        raise ValueError(f"top is a finite weight of at least 0, not {top}")
    weights = np.maximum(weights, 0)
    tops = weights.max(axis=(-2, -1), keepdims=True) if top is None else np.float64(top)
    share = np.divide(weights, tops, out=np.zeros_like(weights), where=tops > 0)
    return np.minimum(share, 1, out=share)


def _shrunk(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """The picture with its pixels averaged down to this size, in each direction only where it is larger."""
    size = (min(width, picture.shape[1]), min(height, picture.shape[0]))
    if size == picture.shape[1::-1]:
        return picture
    return np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BOX))


def _axis(length_px: int, source_px: int, patches: int, smooth: bool) -> tuple[np.ndarray, ...]:
    """One direction of the drawing: which source pixel and which mixture of patches each line shows.

    Neighbouring lines that show the same are worked out once. For n different lines: `source` (n,) index,
    `mixture` (n, patches) of weights that sum to 1, and `line_of` (length_px,) naming the one to copy.
    """
    centres = 2 * np.arange(length_px) + 1  # in half pixels, so that all is exact
    source = centres * source_px // (2 * length_px)
    if smooth:
        at = np.clip(centres * patches / (2 * length_px) - 0.5, 0, patches - 1)
        mixture = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(patches)))
    else:
        mixture = np.eye(patches)[centres * patches // (2 * length_px)]
    is_new = np.ones(length_px, bool)
    is_new[1:] = (source[1:] != source[:-1]) | (mixture[1:] != mixture[:-1]).any(axis=-1)
    return source[is_new], mixture[is_new].astype(np.float32), np.cumsum(is_new) - 1


def _light(source: np.ndarray, share: np.ndarray, mix: Mix, style: Style) -> np.ndarray:
    """(..., n, m, 3): linear RGB times a light from 1 at the top weight down to 1 - strength at none."""
    down, across = mix
    n, m, _ = source.shape
    light = ((1 - style.strength) + style.strength * share).astype(np.float32)
    # The channels count as columns: numpy is slow at innermost loops of length 3.
    linear = down @ (light @ np.repeat(across, 3, axis=0).T)  # (..., n, 3m)
    linear *= _LINEAR[source].reshape(n, 3 * m)
    return _SRGB.take(linear.astype(np.intp), mode="clip").reshape(*share.shape[:-2], n, m, 3)


def _heat(source: np.ndarray, share: np.ndarray, mix: Mix, style: Style) -> np.ndarray:
    """(..., n, m, 3): colours over the picture, blended as browsers and image programs do, in sRGB.

    The same opacity everywhere, although one that grew with the weight would show more of the picture: then a
    small weight would have the colours of the picture and could not be found on the colour bar, and a red
    ball would look like a weight. So no patch is further from its colour on the bar than 1 - strength allows.
    """
    down, across = mix
    level = down @ ((share * 255).astype(np.float32) @ across.T)
    level += 0.5
    colors = (style.strength * colormap(style.colors)).astype(np.float32)
    blend = colors.take(level.astype(np.intp), axis=0, mode="clip")
    blend += (0.5 + (1 - style.strength) * source).astype(np.float32)  # 0.5: the cast below rounds down
    return blend.astype(np.uint8)


def outline(drawn: np.ndarray, cell: tuple[int, int], grid: tuple[int, int]) -> np.ndarray:
    """A copy of (h, w, 3) uint8 with the patch at `cell` (row, column from 0) framed in the accent colour."""
    h, w = drawn.shape[:2]
    line_px = max(1, round(max(h, w) / 224))
    # the edges that `draw` has: a line of pixels belongs to the patch that holds its centre
    top, bottom = (ceil((cell[0] + i) * h / grid[0] - 0.5) for i in (0, 1))
    left, right = (ceil((cell[1] + i) * w / grid[1] - 0.5) for i in (0, 1))
    image = Image.fromarray(drawn)
    pen = ImageDraw.Draw(image)
    for color, inset, thick in (("black", 0, 3 * line_px), (ACCENT, line_px, line_px)):
        box = (left + inset, top + inset, right - 1 - inset, bottom - 1 - inset)
        pen.rectangle(box, outline=color, width=thick)
    return np.array(image)


def sheet(
    picture: ArrayLike,
    relevance: ArrayLike,
    style: Style = DEFAULT_STYLE,
    *,
    chosen: tuple[int, int] | None = None,
    thumb_px: int = 72,
    shared_scale: bool = False,
) -> Image.Image:
    """Relevance (L, C, GY, GX) as one RGBA picture: a row for each layer, a column for each of C - 1 heads
    and a last one, apart, for all heads together.

    `chosen` is the (layer, column) to outline, from 0. Thumbnails are `thumb_px` on their longer side. Each
    has its own scale, since the sheet is there to compare where heads look: on a shared one a single sharp
    head would leave the others black. `shared_scale` compares how much they look there instead. ValueError as
    in `draw`, and for a choice outside the sheet.
    """
    picture, weights = pixels_of(picture), np.asarray(relevance, dtype=np.float64)
    if weights.ndim != 4 or weights.shape[0] < 1 or weights.shape[1] < 2:
        raise ValueError(f"relevance must be (L, H + 1, GY, GX), not {weights.shape}")
    L, C = weights.shape[:2]
    if chosen is not None and not (0 <= chosen[0] < L and 0 <= chosen[1] < C):
        raise ValueError(f"chosen is (layer, column) within {L} layers and {C} columns, not {chosen}")
    th, tw = (max(1, round(side * thumb_px / max(picture.shape[:2]))) for side in picture.shape[:2])
    top = max(0.0, weights.max()) if shared_scale else None
    thumbs = draw(picture, weights, style, size_px=(th, tw), top=top)

    def px(of_72: float) -> int:
        return max(1, round(of_72 * thumb_px / 72))

    rim, gap, pad = px(8), px(10), px(16)
    grid_px = C * tw + (C - 2) * gap + px(34)
    # At least 11 px when the whole sheet is shown 350 px wide on a phone; the labels take some of that width
    # themselves, hence 0.036, not 11 / 350. Over two thirds of a thumbnail, "all" would not fit its column.
    font_px = round(min(max(0.36 * thumb_px, 0.036 * grid_px), 0.66 * max(tw, thumb_px / 2)))
    font = ImageFont.load_default(font_px)
    label_px = round(max(font.getlength(f"layer {layer + 1}") for layer in range(L)))
    line_px = round(1.35 * font_px)
    xs = [pad + label_px + px(12) + rim + c * (tw + gap) for c in range(C)]
    xs[-1] = xs[0] + grid_px - tw  # "all" stands apart from the heads
    row_px = max(th + 2 * rim + px(6), line_px)
    ys = [pad + 2 * line_px + rim + layer * row_px for layer in range(L)]
    size = (xs[-1] + tw + rim + pad, ys[-1] + th + rim + pad)

    panel = Image.new("RGBA", size)
    pen = ImageDraw.Draw(panel)
    pen.rounded_rectangle((0, 0, size[0] - 1, size[1] - 1), px(14), _PANEL)
    pen.text((xs[0], pad), "heads", _PANEL_TEXT, font)
    heads_end = xs[-2] + tw
    line_start = xs[0] + round(font.getlength("heads")) + px(10)
    if line_start < heads_end:
        pen.line((line_start, pad + line_px // 2, heads_end, pad + line_px // 2), _PANEL_TEXT, px(2))
    row, column = chosen or (None, None)
    for c, x in enumerate(xs):
        name = "all" if c == C - 1 else str(c + 1)
        color = ACCENT if c == column else _PANEL_TEXT
        pen.text((x + tw / 2, pad + 1.5 * line_px), name, color, font, anchor="mm")
    for layer, y in enumerate(ys):
        color = ACCENT if layer == row else _PANEL_TEXT
        pen.text((pad + label_px, y + th / 2), f"layer {layer + 1}", color, font, anchor="rm")
        # A band holds a layer together: heads work side by side within it, layers follow one another.
        for start, end in ((xs[0], heads_end), (xs[-1], xs[-1] + tw)):
            pen.rounded_rectangle((start - rim, y - rim, end + rim - 1, y + th + rim - 1), px(6), _BAND)
        for c, x in enumerate(xs):
            if (layer, c) == (row, column):
                # Dark, accent, dark: the ring stands out from bright pictures inside and beside it.
                for color, away in (("black", rim), (ACCENT, px(6)), ("black", px(2))):
                    pen.rectangle((x - away, y - away, x + tw + away - 1, y + th + away - 1), color)
            panel.paste(Image.fromarray(thumbs[layer, c]), (x, y))
    return panel


def png_bytes(image: Image.Image | np.ndarray, facts: dict[str, str] | None = None, dpi: int = 300) -> bytes:
    """A Pillow picture or uint8 array as PNG, `facts` as its text chunks: how to make the same picture again.

    ValueError for a fact whose name a PNG cannot hold (1 to 79 characters of Latin-1).
    """
    chunks = PngInfo()
    for name, value in (facts or {}).items():
        if not (1 <= len(name) <= 79 and name.isprintable() and max(name) <= "\xff"):
            raise ValueError(f"a fact's name has 1 to 79 characters of Latin-1, unlike {name!r}")
        chunks.add_text(name, value)
    file = BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(file, "PNG", pnginfo=chunks, dpi=(dpi, dpi))
    return file.getvalue()
