"""The film as it goes to the browser: the chosen picture's numbers are those of the film, and no others.

Run: pytest tests/test_film_payload.py (some seconds).
"""

import base64
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from train.film import Film, cut, quantise
from train.film_payload import film_payload, probe_count


def made_film(
    steps=(0, 10, 30), *, pictures=4, layers=3, heads=2, size=(16, 16), patch=4, classes=7, seed=0, look=0
) -> Film:
    """Noise: films of equal `look`, `pictures` and `size` are of the same pictures; `seed` is of the rest."""
    rng, colors = np.random.default_rng(seed), np.random.default_rng(look)
    S, K, N = len(steps), pictures, 1 + size[0] * size[1] // patch**2

    def rows(*shape):
        weights = rng.random((*shape, N)) ** 3
        weights[..., 0] += 0.5  # CLS often has the most, which no map may be scaled by
        return quantise((weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32))

    cls_row, cls_row_scale = rows(S, K, layers, heads)
    rollout, rollout_scale = rows(S, K, layers)
    likely = rng.random((S, K, classes)) ** 4
    return Film(
        steps=np.array(steps, np.int64),
        cls_row=cls_row,
        cls_row_scale=cls_row_scale,
        rollout=rollout,
        rollout_scale=rollout_scale,
        probabilities=(likely / likely.sum(axis=-1, keepdims=True)).astype(np.float32),
        pictures=colors.integers(0, 256, (K, *size, 3), np.uint8),
        labels=np.arange(K) % classes,
        class_names=np.array([f"class {c}" for c in range(classes)]),
    )


def array(text: str, dtype, *shape) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)


def weights(sent: dict) -> np.ndarray:
    """(S, L, H + 1, N) float32, as the browser multiplies them."""
    shape = len(sent["steps"]), sent["layers"], sent["heads"] + 1, 1 + sent["grid"][0] * sent["grid"][1]
    return array(sent["rows"], np.uint8, *shape) * array(sent["scales"], np.float32, *shape[:3], 1)


def picture_of(src: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(src.partition(",")[2]))).convert("RGB"))


@pytest.mark.parametrize("k", [0, 2])
def test_rows_are_those_of_the_film(k):
    film = made_film()
    sent = film_payload([("a", film)], k)["films"][0]
    assert sent["steps"] == [0, 10, 30]
    assert (sent["layers"], sent["heads"], sent["grid"]) == (3, 2, [4, 4])
    for frame, seen in enumerate(weights(sent)):
        assert np.array_equal(seen[:, :-1], film.attention(frame)[k])
        assert np.array_equal(seen[:, -1], film.rolled(frame)[k])


@pytest.mark.parametrize("classes", [1, 3, 5, 6, 300])
def test_the_likeliest_classes_of_each_frame_and_the_true_one_are_sent(classes):
    film = made_film(classes=classes, pictures=min(4, classes))
    k = len(film.pictures) - 1
    sent = film_payload([("a", film)], k)["films"][0]
    shares = array(sent["top_shares"], np.float32, 3, min(5, classes))
    true_class = film.class_names[film.labels[k]]
    for frame in range(3):
        by_name = dict(zip(film.class_names.tolist(), film.probabilities[frame, k].tolist(), strict=True))
        expected = sorted(by_name, key=lambda name: -by_name[name])[:5]
        assert [sent["classes"][c] for c in sent["top"][frame]] == expected
        assert shares[frame].tolist() == [by_name[name] for name in expected]
        assert array(sent["truth_shares"], np.float32, 3)[frame] == by_name[true_class]
    assert sent["classes"][sent["truth"]] == true_class
    assert len(sent["classes"]) <= 16  # 5 of each of 3 frames, and the true one


def test_of_equally_likely_classes_the_earlier_comes_first():
    film = made_film(classes=8)
    film.probabilities[:] = 1 / 8
    sent = film_payload([("a", film)], 0)["films"][0]
    assert [sent["classes"][c] for c in sent["top"][0]] == [f"class {c}" for c in range(5)]


@pytest.mark.parametrize("frames", [1, 2, 199, 200, 201, 399, 1000])
def test_long_films_are_thinned_evenly_from_the_first_step_to_the_last(frames):
    steps = 7 * np.arange(frames)
    film = made_film(steps, pictures=1, layers=1, heads=1, size=(8, 8))
    sent = film_payload([("a", film)], 0)["films"][0]
    assert len(sent["steps"]) == min(frames, 200)
    assert (sent["steps"][0], sent["steps"][-1]) == (0, steps[-1])
    gaps = np.diff(sent["steps"]) // 7
    assert gaps.size == 0 or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)
    for step, seen in zip(sent["steps"], weights(sent), strict=True):
        assert np.array_equal(seen[0, 0], film.attention(step // 7)[0, 0, 0])


@pytest.mark.parametrize(("size", "patch", "grid"), [((16, 32), 4, [4, 8]), ((40, 8), 8, [5, 1]),
                                                     ((56, 56), 8, [7, 7])])  # fmt: skip
def test_the_grid_is_that_of_square_patches(size, patch, grid):
    assert film_payload([("a", made_film(size=size, patch=patch))], 0)["films"][0]["grid"] == grid


def test_pictures_are_there_to_the_pixel_and_small_to_choose_among():
    film = made_film(pictures=50, size=(80, 160), patch=16)
    data = film_payload([("a", film)], 3)
    assert np.array_equal(picture_of(data["picture"]), film.pictures[3])
    assert len(data["pictures"]) == probe_count(film) == 40
    assert data["pictures"][8]["label"] == "picture 9: class 1"
    assert picture_of(data["pictures"][8]["src"]).shape == (32, 64, 3)
    tiny = film_payload([("a", made_film())], 0)
    assert np.array_equal(picture_of(tiny["pictures"][2]["src"]), made_film().pictures[2])


@pytest.mark.parametrize("picture", [-1, 4, 10**9])
def test_a_picture_that_is_not_there_is_taken_for_the_first(picture):
    assert film_payload([("a", made_film())], picture) == film_payload([("a", made_film())], 0)


def test_a_picture_that_cannot_be_chosen_is_taken_for_the_first():
    film = made_film(pictures=50)
    assert film_payload([("a", film)], 39)["chosen"] == 39
    assert film_payload([("a", film)], 40)["chosen"] == 0


# --- two runs


def test_the_second_film_is_of_the_very_same_picture_wherever_it_lies():
    one, other = made_film(), made_film((0, 99), layers=2, heads=5, patch=8, seed=4, classes=9)
    other.pictures[:] = other.pictures[::-1].copy()
    data = film_payload([("one", one), ("other", other)], 1)
    assert [sent["name"] for sent in data["films"]] == ["one", "other"]
    assert data["why_not"] == ""
    sent = data["films"][1]
    assert (sent["steps"], sent["layers"], sent["heads"], sent["grid"]) == ([0, 99], 2, 5, [2, 2])
    assert np.array_equal(weights(sent)[1, :, :-1], other.attention(1)[2])
    assert np.array_equal(weights(sent)[1, :, -1], other.rolled(1)[2])
    assert sent["classes"][sent["truth"]] == other.class_names[other.labels[2]]


@pytest.mark.parametrize("change", [{"look": 1}, {"size": (16, 32)}])
def test_a_run_that_did_not_film_the_picture_is_left_out_and_says_so(change):
    one = made_film()
    data = film_payload([("one", one), ("other", made_film(**change))], 1)
    alone = film_payload([("one", one)], 1)
    assert data["films"] == alone["films"]
    assert data["why_not"] == "other did not film this picture, so only one is shown."
    assert alone["why_not"] == ""


def test_one_pixel_makes_another_picture():
    one, other = made_film(), made_film()
    other.pictures[1, 0, 0, 0] ^= 1
    assert film_payload([("one", one), ("other", other)], 1)["why_not"]
    assert not film_payload([("one", one), ("other", other)], 2)["why_not"]


# --- what is sent


def test_equal_films_give_equal_data_and_another_frame_other_data():
    film, again = made_film(), made_film()
    films = [("a", film), ("b", film)]
    assert film_payload(films, 1) == film_payload([("a", again), ("b", again)], 1)
    ids = {film_payload([("a", each)], k)["id"] for each in (film, cut(film, 10)) for k in (0, 1)}
    assert len(ids) == 4
    altered = replace(film, cls_row=film.cls_row ^ np.uint8(1))
    assert film_payload([("a", altered)], 0)["id"] not in ids


def test_it_is_json():
    data = film_payload([("a", made_film()), ("b", made_film(seed=1))], 2)
    assert json.loads(json.dumps(data, allow_nan=False)) == data


@pytest.mark.parametrize("films", [[], [("a", made_film())] * 3])
def test_one_film_or_two(films):
    with pytest.raises(ValueError, match="One film or two can be shown"):
        film_payload(films, 0)


def test_a_film_without_a_frame_is_refused():
    blank = cut(made_film(), -1)
    for films in ([("fast", blank)], [("a", made_film()), ("fast", blank)]):
        with pytest.raises(ValueError, match="No attention was filmed yet in fast"):
            film_payload(films, 0)


def test_it_does_without_torch():
    code = "import sys, train.film_payload; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True,
                          text=True)  # fmt: skip
    assert done.stdout.strip() == "False", done.stderr
