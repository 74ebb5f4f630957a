"""What the viewer paints, against Python's own numbers, also where maps are fetched one by one.

Run: pytest tests/test_viewer_painting.py (half a minute). Real server, real Chromium. Weights travel to the
browser as 8 bits of their row's largest, so each pixel must lie within 2 of 255 of what vit.overlay draws of
the weights that this leaves possible.
"""

import math

import numpy as np
import pytest
import torch
from viewer_page import (
    asked,
    bounds,
    by_python,
    choose,
    drawn_between,
    eventually,
    leave,
    linked,
    looks,
    open_drawer,
    opened,
    patch,
    pixels,
    press,
    share_outside,
    thumb,
    visit,
)

import vit
from vit.attention import mass_mask
from vit.checkpoint import BUNDLED
from vit.explanation import head_rows
from vit.images import framed, to_array
from vit.overlay import Style, draw
from vit.words import percent


@pytest.fixture(scope="module")
def page(browser, page_server):
    """One page for all tests here; each begins with a visit, which is a session of its own."""
    with browser.new_context() as context, opened(context, page_server) as page:
        yield page


def clear_cuts(attention: np.ndarray, discard: float) -> np.ndarray:
    """(..., N) bool: rows whose weights left out and kept are further apart than the browser may mistake."""
    N = attention.shape[-1]
    dropped = min(math.floor(discard * N + 1e-9), N - 1)
    rows = np.sort(attention, axis=-1)
    return rows[..., dropped] - rows[..., dropped - 1] > rows[..., -1] / 255 if dropped else rows[..., 0] >= 0


def weights_between(found, method: str, layer: int, head: int | None, discard: float):
    """(N, N) twice: between these maps the browser's lies. Heads are fused by their mean, residual is 0.5."""
    heads, N = found.attention[layer], found.attention.shape[-1]
    if method == "raw":
        return bounds(heads.mean(axis=0) if head is None else heads[head])
    if head is None:
        return bounds(found.rollout[layer])
    own, dropped = heads[head], min(math.floor(discard * N + 1e-9), N - 1)
    kept = own >= np.sort(own, axis=-1)[:, [dropped]]
    low, high = (part * kept for part in bounds(own))
    identity = np.eye(N)
    below_low, below_high = bounds(found.rollout[layer - 1]) if layer else (identity, identity)
    least = (identity + low) @ below_low / (1 + high.sum(axis=-1, keepdims=True))
    return least, (identity + high) @ below_high / (1 + low.sum(axis=-1, keepdims=True))


STYLES = [Style(kind, smooth=smooth) for kind in ("light", "heat") for smooth in (False, True)]


def test_painted_cells_are_the_librarys_to_2_of_255(page, page_server):
    found, discard = by_python("ship_01"), 0.9
    visit(page, page_server, "picture=sample:ship_01")
    open_drawer(page, "drawing")
    clear = np.argwhere(clear_cuts(found.attention, discard))
    for at in (1 / 6, 1 / 2, 5 / 6):
        layer, head, token = clear[int(at * len(clear))].tolist()
        thumb(page, layer + 1, head + 1).click()
        patch(page, (token - 1) // 8 + 1, (token - 1) % 8 + 1).click()
        for method, shown_head in (("raw", head), ("rollout", head), ("rollout", None)):
            choose(page, {"raw": "Raw attention", "rollout": "Rollout"}[method])
            if shown_head is None:
                press(page, "All heads")
            low, high = weights_between(found, method, layer, shown_head, discard)
            of_python = vit.explain(
                found.model, found.x, method, token, layer=layer, head=shown_head, discard_ratio=discard
            ).relevance[0].numpy()  # fmt: skip
            assert (low[token, 1:] <= of_python.ravel()).all()
            assert (high[token, 1:] >= of_python.ravel()).all()
            for style in STYLES:
                choose(page, style.kind.capitalize())
                choose(page, "Smooth" if style.smooth else "Blocky")
                leave(page)
                seen = pixels(page)
                assert seen.shape == ((448, 448, 3) if style.smooth else (32, 32, 3))
                between = drawn_between(
                    found.picture, low[token], high[token], style, seen.shape[:2], token=token
                )
                case = (layer, head, token, method, shown_head, style)
                assert share_outside(seen, between) == 0, case
                if not style.smooth:  # another token's map would not pass
                    other = token % 64 + 1
                    wrong = drawn_between(
                        found.picture, low[other], high[other], style, seen.shape[:2], token=token
                    )
                    assert share_outside(seen, wrong) > 0.05, case


def test_without_weights_left_out_every_map_is_the_librarys_both_ways(page, page_server):
    found = by_python("cat_00", discard=0)
    visit(page, page_server, "picture=sample:cat_00&discard=0")
    for layer, head, token in ((0, 2, 0), (2, 5, 30), (5, 7, 64)):
        thumb(page, layer + 1, head + 1).click()
        page.keyboard.press("Escape")
        if token:
            patch(page, (token - 1) // 8 + 1, (token - 1) % 8 + 1).click()
        low, high = weights_between(found, "rollout", layer, head, 0)
        for looked_at in (False, True):
            choose(page, "Looked at by" if looked_at else "Looks at")
            leave(page)
            seen = pixels(page)
            least, most = (part[:, token] if looked_at else part[token] for part in (low, high))
            between = drawn_between(found.picture, least, most, Style(), (32, 32), token=token)
            assert share_outside(seen, between) == 0
            of_python = vit.explain(
                found.model, found.x, "rollout", token, layer=layer, head=head, looked_at=looked_at
            ).relevance[0].numpy().ravel()  # fmt: skip
            assert (least[1:] <= of_python).all()
            assert (most[1:] >= of_python).all()


def test_a_mask_lights_the_fewest_patches_that_hold_the_share(page, page_server):
    found = by_python("ship_01")
    visit(page, page_server, "picture=sample:ship_01&method=raw&layer=4&head=2&token=5,5")
    open_drawer(page, "drawing")
    page.get_by_label("Only the patches that hold").check()
    weights = found.attention[3, 1, 37, 1:]
    mask = mass_mask(torch.from_numpy(weights), 0.5).numpy()
    leave(page)
    lit = draw(found.picture, mask.reshape(8, 8).astype(float))
    assert np.abs(pixels(page).astype(int) - lit).max() <= 2
    assert f"{mask.sum()} of 64 patches hold {percent(0.5)}" in page.locator(".looks").inner_text()
    linked(page, picture="sample:ship_01", method="raw", layer="4", head="2", token="5,5", mass="0.5")


def test_one_scale_for_all_maps_is_that_of_the_largest_weight(page, page_server):
    found = by_python("ship_01")
    visit(page, page_server, "picture=sample:ship_01&method=raw&layer=6&scale=shared")
    least, most = (part[0] for part in weights_between(found, "raw", 5, None, 0.9))
    top = found.attention[:, :, 0, 1:].max()
    low, high = (draw(found.picture, part[1:].reshape(8, 8), top=top).astype(int) for part in (least, most))
    seen = pixels(page)
    assert ((seen >= low - 2) & (seen <= high + 2)).all()
    assert seen.mean() < np.mean(found.picture) / 2  # fused maps are dark beside the sharpest head


# --- a grid too large to send whole


@pytest.fixture(scope="module")
def large(page_server, write_checkpoint):
    """14 x 14 patches, 12 layers of 12 heads, random weights, the ship explained: (canvas, explanation)."""
    path = page_server.runs / "large.safetensors"
    write_checkpoint(path, num_layers=12, num_heads=12, embed_dim=96, img_size=(56, 56))
    model, checkpoint = vit.load(path)
    picture = vit.open_picture(BUNDLED.parents[1] / "samples" / "ship_01.png")
    return to_array(framed(picture, (56, 56))), vit.explain(
        model, vit.prepare(picture, checkpoint), discard_ratio=0.9
    )


# For each time the signs over the thumbnails change: the names of those that are waited for.
WATCH_SIGNS = """(marks) => {
  window.signs = []
  const cells = [...marks.parentElement.querySelectorAll(".cell")]
  const names = () => [...marks.querySelectorAll(".waits")].map((sign) => {
    const box = sign.getBoundingClientRect()
    const [x, y] = [box.left + box.width / 2, box.top + box.height / 2]
    return cells.find((cell) => {
      const around = cell.getBoundingClientRect()
      return x > around.left && x < around.right && y > around.top && y < around.bottom
    }).ariaLabel
  })
  new MutationObserver(() => window.signs.push(names())).observe(marks, {childList: true})
}"""


def test_maps_of_a_large_grid_come_when_they_are_looked_at(page, page_server, large):
    canvas, found = large
    attention, rollout = found.attention[0].numpy(), found.rollout[0].numpy()
    by_head = head_rows(found, "rollout", 0, discard_ratio=0.9)[0].numpy()  # of CLS
    token = 1 + 8 * 14 + 2
    visit(page, page_server, "picture=sample:ship_01&model=run:large&method=raw&layer=4&head=7")
    page.sent.clear()

    def shows(low, high, token=0) -> bool:
        low, high = drawn_between(canvas, low, high, Style(), canvas.shape[:2], (14, 14), token)
        seen = pixels(page)
        return seen.shape == low.shape and ((seen >= low) & (seen <= high)).all()

    # CLS at once
    assert shows(*bounds(attention[3, 6, 0]))
    assert not shows(*bounds(attention[3, 7, 0]))
    choose(page, "Rollout")
    assert shows(*bounds(by_head[3, 6]))
    press(page, "All heads")
    assert shows(*bounds(rollout[3, 0]))
    page.wait_for_timeout(300)
    assert asked(page, "maps") == 0

    # a patch when it is pointed at, with a sign on what is waited for
    for query, name, maps in (
        ("layer=4", "layer 4, all heads", rollout[3]),
        ("layer=4&method=raw&head=7", "layer 4, head 7", attention[3, 6]),
    ):
        visit(page, page_server, f"picture=sample:ship_01&model=run:large&{query}")
        page.locator(".marks").evaluate(WATCH_SIGNS)
        patch(page, 9, 3).hover()
        eventually(page, lambda _, maps=maps: shows(*(part[token] for part in bounds(maps)), token), True)
        assert looks(page).startswith("Where row 9, column 3 looks")
        waited = [names for names in page.evaluate("window.signs") if names]
        assert name in waited[0]
        assert len(waited[0]) <= 13  # at first only what this map is for: itself, and heads that build on it
        leave(page)
        assert not page.locator(".stage.waiting").count()
    assert asked(page, "maps") >= 2

    # then all the others, and no sign stays
    patch(page, 9, 3).click()
    thumb(page, 12, 12).hover()
    eventually(page, lambda _: shows(*(part[token] for part in bounds(attention[11, 11])), token), True)
    eventually(page, lambda _: page.locator(".mark.waits").count(), 0, seconds=30)
