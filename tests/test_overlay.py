"""What is drawn is what was measured: every pixel against float64 arithmetic, written here pixel by pixel.

Run: pytest tests/test_overlay.py (some seconds).
"""

import io
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vit.figure import _number, figure
from vit.overlay import ACCENT, Style, colormap, dim_own, draw, outline, png_bytes, sheet

SAMPLES = Path(__file__).parent.parent / "assets" / "samples"
CAT = np.array(Image.open(SAMPLES / "cat_00.png").convert("RGB"))
RNG = np.random.default_rng(0)
EVERY_GREY = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=-1)
WHITE = np.full((32, 32, 3), 255, np.uint8)
ACCENT_RGB = tuple(bytes.fromhex(ACCENT[1:]))


def linear(level):
    c = level / 255
    return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4


def srgb(light):
    return 255 * (12.92 * light if light <= 0.0031308 else 1.055 * light ** (1 / 2.4) - 0.055)


def expected(picture, weights, style, size_px):
    """Blocky, no smaller than the picture. Nothing is shared with the module but the colour map."""
    (H, W, _), (GY, GX), (h, w) = picture.shape, weights.shape, size_px
    out = np.zeros((h, w, 3))
    for y in range(h):
        for x in range(w):
            pixel = picture[int((y + 0.5) * H / h), int((x + 0.5) * W / w)]
            share = weights[int((y + 0.5) * GY / h), int((x + 0.5) * GX / w)] / weights.max()
            color = colormap(style.colors)[round(share * 255)]
            for c in range(3):
                if style.kind == "light":
                    light = (1 - style.strength) + style.strength * share
                    out[y, x, c] = srgb(linear(pixel[c]) * light)
                else:
                    out[y, x, c] = (1 - style.strength) * pixel[c] + style.strength * color[c]
    return out


def worst(drawn, wanted):
    return np.abs(drawn.astype(float) - wanted).max()


@pytest.mark.parametrize("kind", ["light", "heat"])
@pytest.mark.parametrize("strength", [0.0, 0.3, 0.85, 1.0])
def test_every_pixel_is_right_within_one_level(kind, strength):
    style, weights = Style(kind, strength), RNG.random((4, 8)) ** 3
    for picture, size_px in [(EVERY_GREY, (16, 16)), (EVERY_GREY // 8, (32, 64)), (CAT, (45, 70))]:
        drawn = draw(picture, weights, style, size_px=size_px)
        # A blend is rounded once; light goes through tables, which may cost one level.
        assert worst(drawn, expected(picture, weights, style, size_px)) <= (1 if kind == "light" else 0.51)


@pytest.mark.parametrize("colors", ["cividis", "inferno"])
def test_heat_has_the_colours_that_were_asked_for(colors):
    style, weights = Style("heat", 0.7, colors=colors), RNG.random((8, 8))
    assert worst(draw(CAT, weights, style), expected(CAT, weights, style, (32, 32))) <= 1
    assert (draw(CAT, np.eye(2), Style("heat", 1.0, colors=colors))[0, 0] == colormap(colors)[255]).all()


def test_light_in_the_darks_is_right_for_every_grey_and_every_light():
    for share in np.linspace(0, 1, 41):
        drawn = draw(EVERY_GREY, [[share, 1.0]], Style(strength=1.0), size_px=(16, 32))
        wanted = [srgb(linear(grey) * share) for grey in range(256)]
        # The left half of the drawing is the left half of the picture, under this share of the light.
        assert worst(drawn[:, :16:2, 0], np.reshape(wanted, (16, 16))[:, :8]) <= 1
        drawn = draw(EVERY_GREY, [[1.0, share]], Style(strength=1.0), size_px=(16, 32))
        assert worst(drawn[:, 16::2, 0], np.reshape(wanted, (16, 16))[:, 8:]) <= 1


def test_the_patch_with_the_largest_weight_is_the_picture_itself():
    weights = RNG.random((8, 8)) * 0.9
    weights[5, 2] = 1
    for strength in (0.1, 1 / 3, 0.85, 1.0):
        lit = draw(EVERY_GREY, weights, Style(strength=strength))
        assert (lit[10:12, 4:6] == EVERY_GREY[10:12, 4:6]).all()
    assert (draw(CAT, np.ones((8, 8))) == CAT).all()
    assert (lit[:10] < EVERY_GREY[:10]).any()


@given(st.tuples(*[st.integers(1, 9)] * 2), st.tuples(*[st.integers(9, 60)] * 2))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("kind", ["light", "heat"])
def test_blocky_values_lie_on_their_own_patch_and_nowhere_else(kind, grid, size_px):
    (GY, GX), (h, w) = grid, size_px
    patch = np.random.default_rng(h * w).integers((GY, GX))
    weights = np.zeros((GY, GX))
    weights[tuple(patch)] = 1
    drawn = draw(WHITE, weights, Style(kind, 1.0), size_px=(h, w))
    lit = (drawn == drawn.max(axis=(0, 1))).all(axis=-1)
    ys, xs = (np.arange(n) + 0.5 for n in (h, w))  # a pixel is on the patch if its centre is
    on_y = (patch[0] * h / GY <= ys) & (ys < (patch[0] + 1) * h / GY)
    on_x = (patch[1] * w / GX <= xs) & (xs < (patch[1] + 1) * w / GX)
    assert (lit == (on_y[:, None] & on_x)).all()


@pytest.mark.parametrize("kind", ["light", "heat"])
def test_smooth_stays_within_the_range_and_keeps_the_values_at_the_centres(kind):
    weights = RNG.random((3, 5)) * 0.8 + 0.1
    style = Style(kind, 1.0, smooth=True)
    drawn = draw(WHITE, weights, style, size_px=(3 * 21, 5 * 21), top=1.0)
    blocky = draw(WHITE, weights, Style(kind, 1.0), size_px=(3 * 21, 5 * 21), top=1.0)
    brightness, wanted = drawn.sum(axis=-1, dtype=int), blocky.sum(axis=-1, dtype=int)
    assert wanted.min() - 3 <= brightness.min() <= wanted.min() + 3
    assert wanted.max() - 3 <= brightness.max() <= wanted.max() + 3
    assert (np.abs(drawn[10::21, 10::21].astype(int) - blocky[10::21, 10::21]) <= 1).all()
    steps = np.abs(np.diff(drawn.astype(int), axis=1)).max()
    assert steps < np.abs(np.diff(blocky.astype(int), axis=1)).max() / 4
    # Between two centres: halfway in weight, not in brightness.
    halfway = draw(WHITE, [[0.2, 0.6]], style, size_px=(1, 65), top=1.0)[0, 32]
    assert (
        np.abs(halfway.astype(int) - draw(WHITE, [[0.4]], style, size_px=(1, 1), top=1.0)[0, 0]) <= 1
    ).all()


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("kind", ["light", "heat"])
def test_many_maps_at_once_are_the_maps_one_by_one(kind, smooth):
    weights, style = RNG.random((2, 3, 4, 8)).astype(np.float32), Style(kind, smooth=smooth)
    for size_px in [None, (64, 64), (50, 33), (20, 20)]:
        h, w = size_px or (32, 32)
        together = draw(CAT, weights, style, size_px=size_px)
        assert together.shape == (2, 3, h, w, 3)
        assert together.dtype == np.uint8
        for i in range(2):
            for j in range(3):
                assert (together[i, j] == draw(CAT, weights[i, j], style, size_px=size_px)).all()
    assert draw(CAT, weights[0, 0], style).shape == (32, 32, 3)
    assert draw(CAT, weights[:0], style).shape == (0, 3, 32, 32, 3)


def test_each_map_has_its_own_scale_unless_a_top_is_given():
    faint, strong = np.full((2, 2), 0.1), np.full((2, 2), 0.4)
    own = draw(CAT, [faint, strong])
    assert (own == CAT).all()
    shared = draw(CAT, [faint, strong], top=0.4)
    assert (shared[1] == CAT).all()
    quarter = [[[srgb(linear(level) * (0.15 + 0.85 / 4)) for level in pixel] for pixel in row] for row in CAT]
    assert worst(shared[0], quarter) <= 1
    assert (draw(CAT, strong, top=0.2) == CAT).all()  # more than the top is no brighter than the top


@pytest.mark.parametrize(("smooth", "limit_ms"), [(False, 8), (True, 12)])
@pytest.mark.parametrize("kind", ["light", "heat"])
def test_all_heads_of_a_model_are_drawn_within_a_frame(kind, smooth, limit_ms):
    weights, style = RNG.random((6, 8, 8, 8)), Style(kind, smooth=smooth)

    def ms():
        start = time.perf_counter()
        draw(CAT, weights, style, size_px=(64, 64))
        return 1000 * (time.perf_counter() - start)

    assert min(ms() for _ in range(20)) < limit_ms


def test_a_map_without_weight_is_evenly_dark():
    dark = draw(CAT, np.zeros((8, 8)))
    wanted = np.array([[[srgb(0.15 * linear(level)) for level in pixel] for pixel in row] for row in CAT])
    assert worst(dark, wanted) <= 1
    heat = draw(CAT, np.zeros((8, 8)), Style("heat", 0.85))
    assert worst(heat, 0.15 * CAT + 0.85 * colormap("inferno")[0]) <= 1
    assert (draw(CAT, np.full((8, 8), -3.0)) == dark).all()
    assert (draw(CAT, np.zeros((8, 8)), top=0.0) == dark).all()


def test_negative_weights_count_as_none():
    weights = RNG.normal(size=(8, 8))
    assert (draw(CAT, weights) == draw(CAT, np.maximum(weights, 0))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(bad):
    weights = np.ones((2, 8, 8))
    weights[1, 3, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        draw(CAT, weights)
    with pytest.raises(ValueError, match="not finite"):
        sheet(CAT, weights[None], shared_scale=True)
    with pytest.raises(ValueError, match="not finite"):
        figure(CAT, weights[1])


@pytest.mark.parametrize(
    ("picture", "weights", "options"),
    [
        (CAT.astype(float), np.ones((8, 8)), {}),
        (CAT[..., 0], np.ones((8, 8)), {}),
        (CAT[:0], np.ones((8, 8)), {}),
        (CAT, np.ones(64), {}),
        (CAT, np.ones((8, 0)), {}),
        (CAT, np.ones((8, 8)), {"size_px": (0, 9)}),
        (CAT, np.ones((8, 8)), {"top": -1.0}),
        (CAT, np.ones((8, 8)), {"top": np.nan}),
    ],
)
def test_what_cannot_be_drawn_is_refused(picture, weights, options):
    with pytest.raises(ValueError, match=r"must be|is a finite|at least 1 pixel"):
        draw(picture, weights, **options)


@pytest.mark.parametrize(
    "wrong",
    [{"kind": "glow"}, {"strength": 1.01}, {"strength": np.nan}, {"strength": -0.1}, {"colors": "jet"}],
)
def test_a_style_that_does_not_exist_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Style(**wrong)


def test_inputs_are_left_as_they_were():
    picture, weights = CAT.copy(), RNG.normal(size=(2, 3, 8, 8))
    before = picture.tobytes() + weights.tobytes()
    picture.flags.writeable = weights.flags.writeable = False
    for style in (Style(), Style("heat"), Style(smooth=True), Style("heat", smooth=True)):
        draw(picture, weights, style)
        draw(picture, weights, style, size_px=(9, 70), top=0.1)
        sheet(picture, weights, style, thumb_px=20)
        figure(picture, weights[0, 0], style=style, size_px=300)
    assert picture.tobytes() + weights.tobytes() == before


def test_enlarged_pixels_stay_crisp_and_small_ones_are_averages():
    unlit = Style(strength=0.0)
    large = draw(CAT, np.eye(8), unlit, size_px=(96, 64))
    assert (large == CAT.repeat(3, axis=0).repeat(2, axis=1)).all()
    small = draw(CAT, np.eye(8), unlit, size_px=(8, 16))
    assert worst(small, CAT.reshape(8, 4, 16, 2, 3).mean(axis=(1, 3))) <= 1
    mixed = draw(CAT, np.eye(8), unlit, size_px=(64, 16))
    assert worst(mixed, CAT.reshape(32, 16, 2, 3).mean(axis=2).repeat(2, axis=0)) <= 1


def luminance(colors):
    return np.vectorize(linear)(colors.astype(float)) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize("name", ["cividis", "inferno"])
def test_colour_maps_are_the_known_ones_and_rise_in_brightness(name):
    plotly = pytest.importorskip("plotly.colors")
    known = [plotly.hex_to_rgb(color) for color in getattr(plotly.sequential, name.capitalize())]
    table = colormap(name)
    assert table.shape == (256, 3)
    assert table.dtype == np.uint8
    at = np.linspace(0, 255, len(known))
    for channel in range(3):
        wanted = np.interp(np.arange(256), at, [color[channel] for color in known])
        assert np.abs(table[:, channel] - wanted).max() <= 2
    # A level is a whole number, so that a step may be lost to rounding, never more than one in any channel.
    assert (np.diff(luminance(table)) > -1e-3).all()
    assert (np.diff(luminance(table[::5])) > 0).all()
    with pytest.raises(ValueError, match="cividis and inferno"):
        colormap("jet")


# ---- sheets and figures ---------------------------------------------------------------------------------


def runs(flags):
    """(start, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.r_[0, flags.astype(int), 0]))
    return list(zip(edges[::2], edges[1::2], strict=True))


def cells(image):
    """The rows and columns of a sheet of white pictures, as runs of pixels, found by their colour."""
    white = (np.asarray(image)[..., :3] == 255).all(axis=-1)
    return runs(white.sum(axis=1) > 40), runs(white.sum(axis=0) > 40)


@pytest.mark.parametrize(("L", "H", "thumb_px"), [(6, 8, 72), (1, 1, 72), (3, 4, 100), (12, 12, 48)])
def test_a_sheet_has_a_row_for_each_layer_and_a_column_apart_for_all_heads(L, H, thumb_px):
    image = sheet(WHITE, np.ones((L, H + 1, 4, 4)), thumb_px=thumb_px)
    rows, columns = cells(image)
    assert len(rows) == L
    assert len(columns) == H + 1
    assert {end - start for start, end in rows + columns} == {thumb_px}
    gaps = [after[0] - before[1] for before, after in pairwise(columns)]
    assert len(set(gaps[:-1])) <= 1
    assert gaps[-1] >= 2 * max(gaps[:-1], default=0) > -1
    assert columns[0][0] > thumb_px / 2  # room for the names of the layers
    assert image.mode == "RGBA"
    assert image.getpixel((0, 0))[3] == 0  # round corners
    assert image.getpixel((image.width // 2, 2))[3] == 255


def test_the_thumbnails_of_a_sheet_are_drawn_from_their_own_maps():
    rows, columns = cells(sheet(WHITE, np.ones((2, 4, 8, 8))))
    weights = RNG.random((2, 4, 8, 8))
    for shared_scale in (False, True):
        image = np.asarray(sheet(CAT, weights, Style("heat"), shared_scale=shared_scale))[..., :3]
        top = weights.max() if shared_scale else None
        for layer, (y, y_end) in enumerate(rows):
            for column, (x, x_end) in enumerate(columns):
                wanted = draw(CAT, weights[layer, column], Style("heat"), size_px=(72, 72), top=top)
                assert (image[y:y_end, x:x_end] == wanted).all()


def test_only_the_chosen_thumbnail_is_outlined_in_accent_between_dark_lines():
    weights, (rows, columns) = np.ones((3, 5, 4, 4)), cells(sheet(WHITE, np.ones((3, 5, 4, 4))))

    def accents(image):
        found = (np.asarray(image)[..., :3] == ACCENT_RGB).all(axis=-1)
        found[:, : columns[0][0] - 9] = False  # names of layers and columns may take the accent too
        found[: rows[0][0] - 9] = False
        return found

    assert not accents(sheet(WHITE, weights)).any()
    for chosen in [(0, 0), (1, 3), (2, 4)]:
        image = sheet(WHITE, weights, chosen=chosen)
        ys, xs = np.nonzero(accents(image))
        (y, y_end), (x, x_end) = rows[chosen[0]], columns[chosen[1]]
        assert y - 9 < ys.min() < y < y_end <= ys.max() < y_end + 9
        assert x - 9 < xs.min() < x < x_end <= xs.max() < x_end + 9
        assert not (
            (ys >= y) & (ys < y_end) & (xs >= x) & (xs < x_end)
        ).any()  # nothing of the picture is hidden
        line = np.asarray(image)[(y + y_end) // 2, x_end : xs.max() + 3, :3]
        assert sum(line[0]) < 90  # dark within, where a white picture ends
        assert sum(line[-1]) < 90  # and dark without
        assert cells(image) == (rows, columns)
    with pytest.raises(ValueError, match="3 layers and 5 columns"):
        sheet(WHITE, weights, chosen=(3, 0))


def test_labels_of_a_sheet_can_be_read_at_the_width_of_a_phone_in_both_themes():
    def contrast(a, b):
        light, dark = sorted((luminance(np.array(a)), luminance(np.array(b))), reverse=True)
        return (light + 0.05) / (dark + 0.05)

    def hexed(color):
        return tuple(bytes.fromhex(color[1:]))

    best = max(min(contrast((g,) * 3, hexed(page)) for page in ("#ffffff", "#0e1117")) for g in range(256))
    assert best < 4.5  # why a sheet has its own panel
    for L, H in [(6, 8), (12, 12), (1, 1)]:
        image = sheet(WHITE, np.ones((L, H + 1, 4, 4)), chosen=(0, 0))
        rows, columns = cells(image)
        pixels = np.asarray(image)[..., :3]
        panel = pixels[4, image.width // 2]
        name_of_column_2 = pixels[: rows[0][0] - 8, columns[1][0] : columns[1][1]].reshape(-1, 3)
        assert contrast(name_of_column_2[luminance(name_of_column_2).argmax()], panel) > 7
        assert contrast(ACCENT_RGB, panel) > 4.5
        # The name of the layer: its ink is as high as an l and a y together, 0.9 of the type size.
        y, y_end = rows[0]
        ink = (np.abs(pixels[y:y_end, : columns[0][0] - 9].astype(int) - panel) > 60).any(axis=(1, 2))
        assert ink.sum() / 0.95 * min(1, 350 / image.width) >= 10


def ink_touches_the_border(image):
    pixels = np.asarray(image)
    return any((edge != 255).any() for edge in (pixels[:6], pixels[-6:], pixels[:, :6], pixels[:, -6:]))


LONG = (
    "How a title that nobody would choose looks when it goes on for far more than two lines of the page " * 4
)


@pytest.mark.parametrize("title", ["", "Short", LONG, "W" * 300, "Hélène's 猫 × 2", "two\nlines"])
@pytest.mark.parametrize("size_px", [300, 1200])
def test_no_text_of_a_figure_is_cut(title, size_px):
    image = figure(CAT, RNG.random((8, 8)), title=title, caption_lines=[LONG, "and", "more"], size_px=size_px)
    assert image.width == size_px
    assert image.mode == "RGB"
    assert not ink_touches_the_border(image)


@pytest.mark.parametrize("text", [LONG, "W" * 300, "i" * 500, "ends in a word that is " + "long" * 60])
def test_a_wrapped_text_has_all_its_letters(text):
    def darkness(**texts):
        return (255 - np.asarray(figure(CAT, np.eye(8), size_px=400, **texts))).sum(dtype=float)

    letter_by_letter = "\n".join(text)  # a line each: these are never wrapped
    none = darkness()
    for wrapped, alone in [
        (darkness(title=text), darkness(title=letter_by_letter)),
        (darkness(caption_lines=[text]), darkness(caption_lines=text)),
        (darkness(weights_label=text), darkness(weights_label=letter_by_letter)),
    ]:
        assert wrapped - none == pytest.approx(alone - none, rel=0.02)


@pytest.mark.parametrize(
    ("top", "numbers"),
    [
        (1.0, "0.50 1.00"), (0.31, "0.155 0.310"), (0.0213, "0.0106 0.0213"), (37.4, "18.7 37.4"),
        (1200.0, "600 1200"), (3e-6, "1.5e-06 3.0e-06"), (4e9, "2.0e+09 4.0e+09"),
    ],
)  # fmt: skip
def test_numbers_at_the_bar_have_three_digits(top, numbers):
    assert f"{_number(top / 2, top)} {_number(top, top)}" == numbers


def test_a_longer_title_makes_a_taller_figure_and_covers_nothing():
    weights = RNG.random((8, 8))
    plain, short, long = (np.asarray(figure(CAT, weights, title=t)) for t in ("", "Short", LONG))
    assert len(plain) < len(short) < len(long)
    below = len(plain) - 48  # all but the upper margin stays as it was
    assert (short[-below:] == plain[-below:]).all()
    assert (long[-below:] == plain[-below:]).all()
    assert "?" not in LONG
    assert (
        np.asarray(figure(CAT, weights, title="Hélène")) == np.asarray(figure(CAT, weights, title="Helene"))
    ).all()


@pytest.mark.parametrize("kind", ["light", "heat"])
@pytest.mark.parametrize("shape", [(32, 32), (96, 24), (20, 200), (700, 700)])
def test_a_figure_shows_the_plain_picture_and_the_drawn_one(kind, shape):
    picture = RNG.integers(0, 255, (*shape, 3), dtype=np.uint8)
    weights, style = RNG.random((4, 6)), Style(kind)
    image = np.asarray(figure(picture, weights, style=style))
    assert not ink_touches_the_border(image)
    ink = (image[48] != 255).any(axis=-1)  # the first line of both pictures
    (x, x_end), (x2, x2_end) = runs(ink)
    height = round((x_end - x) * shape[0] / shape[1])
    for start, end, wanted in [(x, x_end, Style(strength=0.0)), (x2, x2_end, style)]:
        shown = image[48 : 48 + height, start:end]
        assert (shown == draw(picture, weights, wanted, size_px=shown.shape[:2])).all()


def test_the_bar_of_a_figure_runs_from_the_floor_of_the_style_to_its_top():
    def bar(style):
        image = np.asarray(figure(WHITE, np.eye(4), style=style))
        x_end = 1200 - 48
        y = 48 + (x_end - 640) + 30  # half a bar below the picture on the right
        return image[y, 641 : x_end - 1].astype(int)

    lit = bar(Style(strength=0.85))
    assert np.abs(lit[0] - srgb(0.15)).max() <= 2
    assert (lit[-1] >= 254).all()
    assert (np.diff(lit[:, 0]) >= 0).all()
    for colors in ("cividis", "inferno"):
        colored = bar(Style("heat", strength=0.3, colors=colors))
        steps = np.linspace(0, 255, len(colored)).round().astype(int)
        assert np.abs(colored - colormap(colors)[steps]).max() <= 4


def test_the_original_takes_the_place_of_the_plain_picture_only():
    weights, photo = RNG.random((8, 8)), np.full((300, 600, 3), (200, 30, 60), np.uint8)
    with_photo, without = (
        np.asarray(figure(CAT, weights, original=photo)),
        np.asarray(figure(CAT, weights)),
    )
    shown = (with_photo == (200, 30, 60)).all(axis=-1)
    (x, x_end), *_ = runs(shown.any(axis=0))
    assert shown.sum() == pytest.approx((x_end - x) ** 2 / 2, rel=0.01)  # twice as wide as high, as it was
    assert x < 60
    assert (with_photo[:600, 640:] == without[:600, 640:]).all()


@pytest.mark.parametrize(
    "weights", [np.zeros((8, 8)), np.ones((1, 1)) * 1e-30, np.eye(3) * 1e9, -np.ones((2, 2))]
)
def test_figures_of_odd_weights_are_drawn(weights):
    assert not ink_touches_the_border(figure(CAT, weights, title="Odd", size_px=400))


def test_a_png_carries_its_facts_and_its_pixels():
    facts = {"model": "sha256 5f3a", "settings": "layer=4 heads=mean\nstrength=0.85", "title": "Hélène's 猫"}
    pixels = draw(CAT, np.eye(8))
    for image in (pixels, Image.fromarray(pixels)):
        read = Image.open(io.BytesIO(png_bytes(image, facts)))
        assert read.format == "PNG"
        assert read.text == facts
        assert (np.asarray(read) == pixels).all()
        assert read.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    assert Image.open(io.BytesIO(png_bytes(pixels))).text == {}
    for name in ("", "x" * 80, "猫", "two\nlines"):
        with pytest.raises(ValueError, match="Latin-1"):
            png_bytes(pixels, {name: "value"})


@pytest.mark.parametrize(("size_px", "grid"), [((64, 64), (8, 8)), ((50, 70), (3, 4)), ((672, 448), (5, 9))])
def test_an_outline_frames_the_patch_that_draw_lights_and_nothing_else(size_px, grid):
    """The frame lies on the lit patch's own border, also where patches are no whole number of pixels."""
    white = np.full((*grid, 3), 255, np.uint8)
    for cell in ((0, 0), (1, 2), (grid[0] - 1, grid[1] - 1)):
        weights = np.zeros(grid)
        weights[cell] = 1
        drawn = draw(white, weights, size_px=size_px)
        lit = (drawn == 255).all(axis=-1)
        framed = outline(drawn, cell, grid)
        changed = (framed != drawn).any(axis=-1)
        assert not (changed & ~lit).any()
        rows, columns = np.nonzero(lit)
        assert changed[rows.min(), columns.min() : columns.max() + 1].all()
        assert changed[rows.max(), columns.min() : columns.max() + 1].all()
        assert changed[rows.min() : rows.max() + 1, columns.min()].all()
        assert changed[rows.min() : rows.max() + 1, columns.max()].all()


def test_a_patch_does_not_outshine_what_it_looks_at():
    rng = np.random.default_rng(0)
    weights = rng.random((3, 4, 5))
    weights[:, 2, 1] = 9
    seen = dim_own(weights, (2, 1))
    others = np.ones((4, 5), bool)
    others[2, 1] = False
    assert np.array_equal(seen[:, others], weights[:, others])
    assert np.array_equal(seen[:, 2, 1], weights[:, others].max(axis=-1))
    assert (weights[:, 2, 1] == 9).all()  # what came in is as it was
    weights[:, 2, 1] = 0.01  # weaker than the others: nothing to dim
    assert np.array_equal(dim_own(weights, (2, 1)), weights)
    alone = np.zeros((4, 5))
    alone[2, 1] = 0.3  # it looks at nothing else
    assert np.array_equal(dim_own(alone, (2, 1)), alone)
    assert np.array_equal(dim_own(weights, None), weights)
