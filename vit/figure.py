"""One map for print: the plain picture, the picture with its relevance, and a colour bar with true weights.

image = figure(picture, relevance_map, title="Where CLS looks", caption_lines=["frog, 97 %"])
Path("frog.png").write_bytes(png_bytes(image, {"checkpoint": checkpoint.id}))
"""

from collections.abc import Sequence
from dataclasses import replace
from math import floor, log10
from textwrap import wrap
from unicodedata import normalize

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image, ImageDraw, ImageFont, ImageOps

from vit.overlay import DEFAULT_STYLE, Style, draw, outline, pixels_of

_INK, _QUIET_INK, _PAPER = "#14171c", "#4a505a", "#ffffff"


def figure(
    picture: ArrayLike,
    relevance_map: ArrayLike,
    *,
    title: str = "",
    caption_lines: Sequence[str] = (),
    style: Style = DEFAULT_STYLE,
    weights_label: str = "share of attention",
    size_px: int = 1200,
    original: ArrayLike | None = None,
    cell: tuple[int, int] | None = None,
    top: float | None = None,
) -> Image.Image:
    """One map (GY, GX) for print, RGB on white, `size_px` wide: plain picture, drawn picture and colour bar.

    `original` (H, W, 3) is shown as the plain picture instead: the photo before it was framed for the model.
    `cell` (row, column from 0) is the patch whose view is drawn, and gets a frame.
    `top` is the weight drawn at full light, as in `draw`.
    Long texts wrap and make the figure taller; letters beyond Pillow's own font are replaced. ValueError as
    in `draw`, and for less than 200 px.
    """
    picture = pixels_of(picture)
    plain = picture if original is None else pixels_of(original)
    weights = np.asarray(relevance_map, dtype=np.float64)
    if weights.ndim != 2:
        raise ValueError(f"relevance_map must be (GY, GX), not {weights.shape}")
    if size_px < 200:
        raise ValueError(f"a figure is at least 200 pixels wide, not {size_px}")

    def px(of_1200: float) -> int:
        return max(1, round(of_1200 * size_px / 1200))

    margin, text_px = px(48), px(24)
    width = size_px - 2 * margin
    half = (width - px(40)) // 2
    box = _fitted(plain, half, round(1.5 * half))
    drawn_box = _fitted(picture, half, round(1.5 * half))
    bar_px = max(drawn_box[1], round(0.6 * half))  # a narrow picture still has room for three numbers
    unlit = draw(plain, [[1.0]], Style("light", strength=0.0), size_px=box)  # resized as the drawn one is
    drawn = draw(picture, weights, style, size_px=drawn_box, top=top)
    if cell is not None:
        drawn = outline(drawn, cell, weights.shape)
    size = f"picture, {plain.shape[1]} x {plain.shape[0]} pixels"
    label = _text(size, half, text_px, _QUIET_INK)
    left = _column(half, [(0, Image.fromarray(unlit)), (px(16), label)])
    bar = _bar(max(0.0, weights.max()) if top is None else top, style, bar_px, px(20), text_px)
    label = _text(weights_label, bar_px, text_px, _QUIET_INK)
    right = _column(bar_px, [(0, Image.fromarray(drawn)), (px(20), bar), (0, label)])
    # Flush with both margins: what whole pixels leave over widens the gap between the two.
    panels = Image.new("RGB", (width, max(left.height, right.height)), _PAPER)
    panels.paste(left, (0, 0))
    panels.paste(right, (width - bar_px, 0))

    title_px = px(40) if ImageFont.load_default(px(40)).getlength(title) <= 2 * width else px(28)
    parts = [_text(title, width, title_px, _INK)] if title else []
    parts += [panels]
    if caption_lines:
        parts += [_text("\n".join(caption_lines), width, text_px, _QUIET_INK)]
    text_and_panels = _column(width, [(px(28) if i else 0, part) for i, part in enumerate(parts)])
    return ImageOps.expand(text_and_panels, margin, _PAPER)


def panels(
    picture: ArrayLike,
    maps: Sequence[tuple[str, str, ArrayLike]],
    *,
    title: str = "",
    caption_lines: Sequence[str] = (),
    style: Style = DEFAULT_STYLE,
    shared_scale: bool = False,
    size_px: int = 1600,
) -> Image.Image:
    """Several maps of one picture for print: the plain picture, then each (name, note, (GY, GX)).

    With `shared_scale` the largest weight of all maps is drawn at full light, else each map's own. ValueError
    as in `draw`.
    """
    picture = pixels_of(picture)
    margin, gap_px, text_px, across = round(size_px / 33), round(size_px / 50), round(size_px / 70), 5
    width = size_px - 2 * margin
    panel_px = (width - (across - 1) * gap_px) // across
    weights = [np.asarray(values, dtype=np.float64) for _, _, values in maps]
    top = max(0.0, *(values.max() for values in weights)) if shared_scale else None
    box = _fitted(picture, panel_px, round(1.5 * panel_px))
    plain = draw(picture, [[1.0]], Style("light", strength=0.0), size_px=box)
    shown = [("Picture", f"{picture.shape[1]} x {picture.shape[0]} pixels", plain)]
    shown += [
        (name, note, draw(picture, values, style, size_px=box, top=top))
        for (name, note, _), values in zip(maps, weights, strict=True)
    ]
    cells = [
        _column(
            panel_px,
            [
                (0, Image.fromarray(drawn)),
                (text_px // 2, _text(name, panel_px, text_px, _INK)),
                (0, _text(note, panel_px, text_px, _QUIET_INK)),
            ],
        )
        for name, note, drawn in shown
    ]
    rows = []
    for start in range(0, len(cells), across):
        row = cells[start : start + across]
        strip = Image.new("RGB", (width, max(cell.height for cell in row)), _PAPER)
        for column, cell in enumerate(row):
            strip.paste(cell, (column * (panel_px + gap_px), 0))
        rows.append(strip)
    parts = [_text(title, width, 2 * text_px, _INK)] if title else []
    parts += rows
    if caption_lines:
        parts.append(_text("\n".join(caption_lines), width, text_px, _QUIET_INK))
    return ImageOps.expand(
        _column(width, [(gap_px if i else 0, part) for i, part in enumerate(parts)]), margin, _PAPER
    )


def _column(width_px: int, parts: Sequence[tuple[int, Image.Image]]) -> Image.Image:
    """The (space above, picture) of `parts` from top to bottom on white."""
    column = Image.new("RGB", (width_px, sum(space + part.height for space, part in parts)), _PAPER)
    y = 0
    for space, part in parts:
        column.paste(part, (0, y + space))
        y += space + part.height
    return column


def _fitted(picture: np.ndarray, width_px: int, height_px: int) -> tuple[int, int]:
    """(height, width) of the picture in that box; whole multiples if enlarged, so that pixels stay equal."""
    scale = min(width_px / picture.shape[1], height_px / picture.shape[0])
    scale = floor(scale) if scale > 1 else scale
    return max(1, round(picture.shape[0] * scale)), max(1, round(picture.shape[1] * scale))


def _bar(top: float, style: Style, width_px: int, bar_px: int, text_px: int) -> Image.Image:
    """The scale from no weight to the top, as it looks on white (light) or alone (heat), with 3 numbers."""
    bar_style = replace(style, smooth=False, strength=style.strength if style.kind == "light" else 1.0)
    white = np.full((1, 1, 3), 255, np.uint8)
    ramp = draw(white, np.linspace(0, 1, width_px)[None], bar_style, size_px=(bar_px, width_px))
    image = Image.new("RGB", (width_px, bar_px + round(1.6 * text_px)), _PAPER)
    image.paste(Image.fromarray(ramp), (0, 0))
    pen, font, y = ImageDraw.Draw(image), ImageFont.load_default(text_px), bar_px + round(0.25 * text_px)
    # The bright end of a bar would be lost on white paper.
    pen.rectangle((0, 0, width_px - 1, bar_px - 1), outline=_QUIET_INK)
    pen.text((0, y), "0", _INK, font)
    if top > 0:  # else there is nothing but 0 in the picture
        pen.text((width_px / 2, y), _number(top / 2, top), _INK, font, anchor="ma")
        pen.text((width_px - 1, y), _number(top, top), _INK, font, anchor="ra")
    return image


def _number(value: float, top: float) -> str:
    """As many decimals as give the top three digits; powers of ten where decimals would be too many."""
    decimals = 2 - floor(log10(top))
    return f"{value:.1e}" if decimals > 5 or decimals < -3 else f"{value:.{max(0, decimals)}f}"


def _text(text: str, width_px: int, font_px: int, color: str) -> Image.Image:
    """The text on white, wrapped to that width."""
    # Pillow's own font knows hardly more than ASCII and draws an empty box for the rest.
    text = normalize("NFKD", text.translate({0xD7: "x", 0x2013: "-", 0x2014: "-", 0x2019: "'"}))
    text = "".join(c if c.isascii() or c in "±·" else "?" for c in text if not "\u0300" <= c <= "\u036f")
    font, line_px = ImageFont.load_default(font_px), round(1.35 * font_px)
    lines = []
    for paragraph in text.split("\n"):
        letters = max(1, round(1.3 * width_px / font.getlength("n")))
        while any(font.getlength(line) > width_px for line in wrap(paragraph, letters)) and letters > 1:
            letters -= 1
        lines += wrap(paragraph, letters) or [""]
    image = Image.new("RGB", (width_px, line_px * len(lines)), _PAPER)
    pen = ImageDraw.Draw(image)
    for i, line in enumerate(lines):
        pen.text((0, i * line_px), line, color, font)
    return image
