"""The figures are what their definitions say, and kept predictions come back only where they belong.

Run: pytest tests/test_evaluate.py (a few seconds).
"""

import json
import math
import os
from dataclasses import asdict, replace
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_vit import plain_vit, small_model

from vit.architecture import Architecture
from vit.checkpoint import Checkpoint
from vit.datasets import Pictures
from vit.evaluate import (
    Cancelled,
    Predictions,
    cached_path,
    confident_mistakes,
    kept_predictions,
    measure,
    predict,
    shipped_path,
    top_logit_percentiles,
    wilson_interval,
)

SIZES = {
    "num_classes": 3,
    "img_size": (8, 12),
    "embed_dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_dim": 8,
}
NAMES = ("ant", "bee", "cat")
CHECKPOINT = Checkpoint(
    Architecture(**SIZES), NAMES, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), name="x.safetensors", id="0123456789ab"
)
DIGEST = "fedc" * 16


def some_pictures(n: int, **changes) -> Pictures:
    random = np.random.default_rng(n)
    given = {
        "images": random.integers(0, 256, (n, 8, 12, 3), np.uint8),
        "labels": random.integers(0, 3, n),
        "ids": np.array([f"{i:012x}" for i in range(n)], "U12"),
        "class_names": NAMES,
        "name": "made up",
        "split": "test",
        "digest": DIGEST,
    }
    return Pictures(**given | changes)


def saying(labels, classes, probabilities=None) -> Predictions:
    n = len(labels)
    if probabilities is None:
        probabilities = np.linspace(0.4, 1, n)
    return Predictions(
        CHECKPOINT.id,
        DIGEST,
        np.array([f"{i:012x}" for i in range(n)], "U12"),
        np.array(labels, np.uint8),
        np.array(classes, np.uint8),
        np.array(probabilities, np.float32),
        np.linspace(-3, 12, n, dtype=np.float32),
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- figures


def test_figures_of_a_confusion_made_by_hand():
    confusion = ((5, 1, 2), (0, 3, 3), (1, 0, 7))
    pairs = [(t, p) for t in range(3) for p in range(3) for _ in range(confusion[t][p])]
    metrics = measure(saying(*zip(*pairs, strict=True)), NAMES)
    assert metrics.confusion == confusion
    assert metrics.pictures == 22
    assert metrics.accuracy == pytest.approx(15 / 22)
    bee = metrics.classes[1]
    assert (bee.name, bee.pictures) == ("bee", 6)
    assert (bee.precision, bee.recall, bee.f1) == pytest.approx((3 / 4, 3 / 6, 2 * 3 / (4 + 6)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=40))
def test_figures_follow_their_definitions(pairs):
    labels, classes = [t for t, _ in pairs], [p for _, p in pairs]
    metrics = measure(saying(labels, classes), ("a", "b", "c", "d"))
    assert metrics.pictures == len(pairs)
    assert metrics.accuracy == pytest.approx(sum(t == p for t, p in pairs) / max(1, len(pairs)))
    assert metrics.interval[0] - 1e-9 <= metrics.accuracy <= metrics.interval[1] + 1e-9
    for k, found in enumerate(metrics.classes):
        both = pairs.count((k, k))
        precision = both / classes.count(k) if k in classes else 0
        recall = both / labels.count(k) if k in labels else 0
        f1 = 2 * precision * recall / (precision + recall) if both else 0
        assert (found.name, found.pictures) == ("abcd"[k], labels.count(k))
        assert (found.precision, found.recall, found.f1) == pytest.approx((precision, recall, f1))
        assert metrics.confusion[k] == tuple(pairs.count((k, other)) for other in range(4))
    plain = [type(value) for row in metrics.confusion for value in row]
    assert set(plain) == {int}  # not numpy's, which JSON does not know
    json.dumps([metrics.accuracy, metrics.interval, [vars(found) for found in metrics.classes]])


@pytest.mark.parametrize(
    ("right", "n"), [(1, 2), (1, 10), (850, 1000), (9_999, 10_000), (0, 5), (5, 5), (1, 1)]
)
def test_the_interval_ends_where_the_score_test_turns(right, n):
    z = NormalDist().inv_cdf(0.975)
    interval = wilson_interval(right, n)
    assert interval[0] < interval[1]
    for p in interval:
        assert abs(right / n - p) == pytest.approx(z * math.sqrt(max(0, p * (1 - p)) / n), abs=1e-6)


def test_the_interval_at_its_edges():
    z2 = NormalDist().inv_cdf(0.975) ** 2
    assert wilson_interval(0, 0) == (0, 1)
    for n in (1, 7, 10_000):
        assert wilson_interval(n, n) == pytest.approx((n / (n + z2), 1))
        assert wilson_interval(0, n) == pytest.approx((0, z2 / (n + z2)), abs=1e-7)
        assert 0 <= wilson_interval(0, n)[0]
        assert wilson_interval(n, n)[1] <= 1


def test_a_model_is_not_measured_on_no_pictures():
    metrics = measure(saying([], []), NAMES)
    assert (metrics.pictures, metrics.accuracy, metrics.interval) == (0, 0, (0, 1))
    assert all(found.precision == found.recall == found.f1 == 0 for found in metrics.classes)


# --- calibration

ANSWERS = st.lists(
    st.tuples(
        st.booleans(),
        st.one_of(
            st.floats(0, 1, width=16),
            st.integers(0, 15).map(lambda m: m / 15),
            # beside a bin's edge, where rounding could move it to the other bin
            st.builds(lambda m, off: min(1.0, m / 15 + off), st.integers(1, 15), st.floats(-1e-4, 1e-4)),
        ),
    ),
    max_size=60,
)


def answering(right, probabilities) -> Predictions:
    return saying([0] * len(right), [0 if hit else 1 for hit in right], probabilities)


def by_the_definition(right, probabilities) -> tuple[float, list[tuple[int, int, float, float]]]:
    """Guo et al. 2017, equation 3, picture by picture: the error, and m, pictures, confidence, accuracy."""
    bins, n = [], len(right)
    for m in range(1, 16):
        low, high = Fraction(m - 1, 15), Fraction(m, 15)
        inside = [
            (hit, p)
            for hit, p in zip(right, probabilities, strict=True)
            if low < Fraction(p) <= high or (m == 1 and p == 0)
        ]
        if inside:
            confidence, accuracy = (math.fsum(row[i] for row in inside) / len(inside) for i in (1, 0))
            bins.append((m, len(inside), confidence, accuracy))
    return math.fsum(size / n * abs(mean - share) for _, size, mean, share in bins), bins


@settings(max_examples=200, deadline=None)
@given(ANSWERS)
def test_the_calibration_error_follows_its_definition(answers):
    right = [hit for hit, _ in answers]
    as_kept = [float(np.float16(p)) for _, p in answers]
    expected, bins = by_the_definition(right, as_kept)
    metrics = measure(answering(right, [p for _, p in answers]), NAMES)
    assert metrics.calibration_error == pytest.approx(expected, abs=1e-9)
    assert len(metrics.reliability) == len(bins)
    for row, (m, size, confidence, accuracy) in zip(metrics.reliability, bins, strict=True):
        assert (row.low, row.high) == ((m - 1) / 15, m / 15)
        assert row.pictures == size
        assert (row.confidence, row.accuracy) == pytest.approx((confidence, accuracy), abs=1e-9)
    assert sum(row.pictures for row in metrics.reliability) == metrics.pictures == len(answers)
    if answers:  # the bins' distances can only cancel out when they are joined
        overall = abs(sum(as_kept) / len(answers) - metrics.accuracy)
        assert overall - 1e-9 <= metrics.calibration_error <= 1
    plain = [type(value) for row in metrics.reliability for value in vars(row).values()]
    assert set(plain) <= {int, float}  # not numpy's, which JSON does not know
    assert json.loads(json.dumps(asdict(metrics)))["calibration_error"] == metrics.calibration_error


def test_rounding_moves_the_calibration_error_by_less_than_a_thousandth():
    random = np.random.default_rng(0)
    probabilities = random.uniform(0.1, 1, 5000).astype(np.float32)
    right = random.random(5000) < probabilities**2
    expected, _ = by_the_definition(right.tolist(), probabilities.tolist())
    assert 0.1 < expected < 0.3
    assert measure(answering(right, probabilities), NAMES).calibration_error == pytest.approx(
        expected, abs=1e-3
    )


def test_a_model_as_often_right_as_it_says_is_calibrated_and_a_boaster_is_not():
    random = np.random.default_rng(1)
    probabilities = random.uniform(0.2, 1, 40_000)
    honest = measure(answering(random.random(40_000) < probabilities, probabilities), NAMES)
    assert honest.calibration_error < 0.015  # what is left is chance: 15 bins of some 3,000
    boaster = measure(answering(random.random(40_000) < 0.25, np.ones(40_000)), NAMES)
    assert boaster.calibration_error == pytest.approx(0.75, abs=0.01)
    assert [(row.low, row.high, row.pictures) for row in boaster.reliability] == [(14 / 15, 1, 40_000)]
    assert measure(answering([True] * 9, [1] * 9), NAMES).calibration_error == 0
    nothing = measure(answering([], []), NAMES)
    assert (nothing.calibration_error, nothing.reliability) == (0, ())


def test_kept_predictions_have_the_same_calibration_even_at_the_edges_of_bins(tmp_path):
    # float16 has no number between these and 14/15: rounding moves all of them over the edge
    beside = np.float32(14 / 15)
    beside = np.nextafter(beside, np.float32(np.float16(beside) < beside))
    edges = [beside] * 50 + [np.nextafter(np.float32(14 / 15), np.float32(end)) for end in (0, 1)] * 25
    predictions = answering([True, False] * 50, edges)
    predictions.save(shipped_path(tmp_path / "x.safetensors"))
    found = kept_predictions(tmp_path / "x.safetensors", CHECKPOINT, DIGEST)
    fresh, kept = measure(predictions, NAMES), measure(found, NAMES)
    assert fresh.calibration_error == pytest.approx(kept.calibration_error, abs=1e-3)
    assert fresh.reliability == kept.reliability


# --- mistakes


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([0.4, 0.5, 0.7, 1])), max_size=30
    ),
    st.integers(0, 40),
)
def test_the_most_confident_mistakes_come_first(answers, n):
    labels, classes, probabilities = (list(column) for column in zip(*answers, strict=True)) if answers else (
        [], [], []
    )  # fmt: skip
    found = confident_mistakes(saying(labels, classes, probabilities), n).tolist()
    wrong = [i for i in range(len(answers)) if labels[i] != classes[i]]
    assert found == sorted(wrong, key=lambda i: (-probabilities[i], i))[:n]


def test_no_number_of_mistakes_is_below_0():
    with pytest.raises(ValueError, match="0 or more"):
        confident_mistakes(saying([0, 1, 2], [1, 1, 1]), -1)


# --- predictions


def test_predictions_are_what_the_model_says():
    model, pictures = small_model(**SIZES), some_pictures(70)  # one batch and a part of the next
    with torch.no_grad():  # lean to no class, so that it calls some pictures this and some that
        model.mlp_head[1].bias -= model(torch.randn(200, 3, 8, 12)).mean(0)
    found = predict(model, CHECKPOINT, pictures)
    assert (found.checkpoint_id, found.data_digest) == (CHECKPOINT.id, DIGEST)
    assert found.ids.tolist() == pictures.ids.tolist()
    assert found.labels.tolist() == pictures.labels.tolist()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CHECKPOINT.mean, CHECKPOINT.std))
    for i, picture in enumerate(pictures.images):
        x = (torch.from_numpy(picture).permute(2, 0, 1) / 255 - mean) / std
        logits = plain_vit(model.state_dict(), x[None], num_heads=2)[0][0].tolist()
        best = logits.index(max(logits))
        assert found.classes[i] == best
        assert found.top_logits[i] == pytest.approx(logits[best], abs=1e-4)
        total = sum(math.exp(value) for value in logits)
        assert found.probabilities[i] == pytest.approx(math.exp(logits[best]) / total, abs=1e-4)
    assert len(set(found.classes.tolist())) > 1  # else nothing was tested


def test_flipped_predictions_average_the_logits_of_picture_and_mirror_image():
    model, pictures = small_model(**SIZES), some_pictures(70)
    with torch.no_grad():  # lean to no class
        model.mlp_head[1].bias -= model(torch.randn(200, 3, 8, 12)).mean(0)
    found, plain = predict(model, CHECKPOINT, pictures, flip=True), predict(model, CHECKPOINT, pictures)
    assert (found.flip, plain.flip) == (True, False)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CHECKPOINT.mean, CHECKPOINT.std))
    for i, picture in enumerate(pictures.images):
        both = [
            (torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255 - mean) / std
            for pixels in (picture, np.fliplr(picture))
        ]
        one, other = plain_vit(model.state_dict(), torch.stack(both), num_heads=2)[0].tolist()
        logits = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
        assert found.classes[i] == logits.index(max(logits))
        assert found.top_logits[i] == pytest.approx(max(logits), abs=1e-4)
        probability = math.exp(max(logits)) / sum(math.exp(value) for value in logits)
        assert found.probabilities[i] == pytest.approx(probability, abs=1e-4)
    assert (found.classes != plain.classes).any()  # else flipping was not tested
    mirrored = replace(pictures, images=np.ascontiguousarray(pictures.images[:, :, ::-1]))
    again = predict(model, CHECKPOINT, mirrored, flip=True)
    np.testing.assert_array_equal(again.classes, found.classes)
    np.testing.assert_allclose(again.top_logits, found.top_logits, atol=1e-5)


def test_metrics_tell_whether_pictures_were_flipped():
    predictions = saying([0, 1], [0, 0])
    assert not measure(predictions, NAMES).flip
    assert measure(replace(predictions, flip=True), NAMES).flip


def test_progress_counts_pictures():
    seen = []
    predict(small_model(**SIZES), CHECKPOINT, some_pictures(130), progress=lambda *now: seen.append(now))
    assert [done for done, _, _ in seen] == [64, 128, 130]
    assert {(total, what) for _, total, what in seen} == {(130, "pictures classified")}


def test_no_pictures_give_no_predictions():
    found = predict(small_model(**SIZES), CHECKPOINT, some_pictures(0))
    assert len(found.classes) == len(found.top_logits) == 0


def test_a_cancelled_prediction_leaves_nothing(cache, tmp_path):
    def cancel(done, total, what):
        raise Cancelled

    model = small_model(**SIZES)
    with pytest.raises(Cancelled):
        predict(model, CHECKPOINT, some_pictures(130), progress=cancel)
    assert list(tmp_path.rglob("*")) == []
    assert kept_predictions(tmp_path / "x.safetensors", CHECKPOINT, DIGEST) is None
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"class_names": ("ant", "bee", "dog")}, "ant, bee, cat.*made up has ant, bee, dog"),
        ({"class_names": ("bee", "ant", "cat")}, "knows the classes"),
        ({"class_names": ("ant", "bee")}, "knows the classes"),
        ({"images": np.zeros((4, 12, 8, 3), np.uint8)}, "takes pictures of 12 x 8 px.*have 8 x 12 px"),
        ({"images": np.zeros((4, 8, 8, 3), np.uint8)}, "takes pictures of 12 x 8 px.*have 8 x 8 px"),
    ],
)
def test_data_of_another_kind_is_a_value_error(changes, says):
    with pytest.raises(ValueError, match=says):
        predict(small_model(**SIZES), CHECKPOINT, some_pictures(4, **changes))


# --- kept predictions


@pytest.mark.parametrize("where", ["shipped", "cached"])
def test_kept_predictions_come_back(where, tmp_path):
    weights = tmp_path / "weights" / "x.safetensors"
    path = shipped_path(weights) if where == "shipped" else cached_path(CHECKPOINT.id, DIGEST)
    kept = predict(small_model(**SIZES), CHECKPOINT, some_pictures(70))
    kept.save(path)
    assert os.listdir(path.parent) == [path.name]  # noqa: PTH208, hidden files too
    found = kept_predictions(weights, CHECKPOINT, DIGEST)
    for name in ("ids", "labels", "classes"):
        assert getattr(found, name).tolist() == getattr(kept, name).tolist()
    for name in ("probabilities", "top_logits"):
        assert getattr(found, name).dtype == np.float32
        np.testing.assert_allclose(getattr(found, name), getattr(kept, name), rtol=2**-10)
    assert measure(found, NAMES) == measure(kept, NAMES)


def test_predictions_of_another_checkpoint_or_of_other_data_do_not_count(tmp_path):
    weights = tmp_path / "x.safetensors"
    saying([0, 1], [1, 1]).save(shipped_path(weights))
    saying([0, 1], [1, 1]).save(cached_path(CHECKPOINT.id, DIGEST))
    assert kept_predictions(weights, CHECKPOINT, DIGEST)
    assert kept_predictions(weights, replace(CHECKPOINT, id="ba9876543210"), DIGEST) is None
    assert kept_predictions(weights, CHECKPOINT, "0" * 64) is None
    # the first twelve digits name the file, all of them decide
    assert kept_predictions(weights, CHECKPOINT, DIGEST[:12] + "0" * 52) is None


def test_unfit_shipped_predictions_do_not_hide_the_cached_ones(tmp_path):
    weights = tmp_path / "x.safetensors"
    replace(saying([0, 1], [0, 1]), checkpoint_id="another").save(shipped_path(weights))
    saying([0, 1], [1, 1]).save(cached_path(CHECKPOINT.id, DIGEST))
    assert kept_predictions(weights, CHECKPOINT, DIGEST).classes.tolist() == [1, 1]


@pytest.mark.parametrize("where", ["shipped", "cached"])
def test_flipped_predictions_are_never_taken_for_plain_ones(where, tmp_path):
    weights = tmp_path / "x.safetensors"
    path = shipped_path(weights) if where == "shipped" else cached_path(CHECKPOINT.id, DIGEST)
    flipped = replace(saying([0, 1], [0, 0]), flip=True)
    flipped.save(path)
    assert kept_predictions(weights, CHECKPOINT, DIGEST) is None
    plain = shipped_path(weights) if where == "cached" else cached_path(CHECKPOINT.id, DIGEST)
    saying([0, 1], [1, 1]).save(plain)
    assert kept_predictions(weights, CHECKPOINT, DIGEST).classes.tolist() == [1, 1]


def npz(path, **arrays) -> bytes:
    np.savez(path, **arrays)
    return path.read_bytes()


@pytest.mark.parametrize(
    "damage", ["empty", "text", "npy", "short", "flipped", "lacking", "odd facts", "pickled"]
)
def test_a_damaged_file_is_as_good_as_none(damage, tmp_path):
    path = shipped_path(tmp_path / "x.safetensors")
    saying([0, 1] * 20, [1, 1] * 20).save(path)
    whole = path.read_bytes()
    assert kept_predictions(tmp_path / "x.safetensors", CHECKPOINT, DIGEST)
    ours = np.array(json.dumps([CHECKPOINT.id, DIGEST]))
    arrays = {name: np.zeros(2) for name in ("ids", "labels", "classes", "probabilities", "top_logits")}
    other = tmp_path / "other.npz"
    if damage == "npy":
        np.save(tmp_path / "x.npy", np.zeros(3))
    contents = {
        "empty": lambda: [b""],
        "text": lambda: [b"not an npz", b"PK", b"PK\x03\x04" + bytes(90)],
        "npy": lambda: [(tmp_path / "x.npy").read_bytes()],
        "short": lambda: [whole[:length] for length in range(1, len(whole), 37)],
        "flipped": lambda: [
            whole[:i] + bytes([whole[i] ^ 0xFF]) + whole[i + 1 :] for i in _bytes_that_matter(whole)
        ],
        "lacking": lambda: [npz(other, facts=ours), npz(other, **arrays)],
        "odd facts": lambda: [
            npz(other, facts=np.array(text), **arrays)
            for text in ("", "{", "3", "[1]", "null", "[[]]", "[1, 2, 3]")
        ],
        "pickled": lambda: [npz(other, facts=ours, **arrays | {"ids": np.array([{}], object)})],
    }
    for content in contents[damage]():
        path.write_bytes(content)
        assert kept_predictions(tmp_path / "x.safetensors", CHECKPOINT, DIGEST) is None


def _bytes_that_matter(archive: bytes) -> range:
    """Inside the compressed first array, where a changed byte is found by its checksum."""
    start = archive.index(b"facts.npy") + len(b"facts.npy") + 20
    return range(start, start + 60, 3)


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.predictions.npz"
    saying([0, 1], [1, 1]).save(path)
    before = path.read_bytes()

    def half_written(file, **arrays):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", half_written)
    with pytest.raises(OSError, match="no space"):
        saying([1, 1], [0, 0]).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]  # noqa: PTH208, hidden files too


# --- the largest logit, by which strangers are recognised


def test_percentiles_of_the_largest_logit():
    predictions = saying([0] * 201, [0] * 201)
    shuffled = np.random.default_rng(0).permutation(predictions.top_logits)
    found = top_logit_percentiles(replace(predictions, top_logits=shuffled))
    assert len(found) == 101
    assert found == pytest.approx(sorted(predictions.top_logits.tolist())[::2], abs=1e-4)
    assert all(type(value) is float for value in found)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(-50, 50), min_size=101, max_size=101).map(sorted),
    st.floats(-60, 60),
    st.floats(-60, 60),
)
def test_a_larger_logit_never_has_a_lower_percentile(percentiles, one, other):
    checkpoint = replace(CHECKPOINT, top_logit_percentiles=tuple(percentiles))
    low, high = (checkpoint.top_logit_percentile(value) for value in sorted((one, other)))
    assert 0 <= low <= high <= 1
    assert checkpoint.top_logit_percentile(-60.1) == 0
    assert checkpoint.top_logit_percentile(60.1) == 1


def test_a_percentile_is_the_share_of_pictures_below():
    predictions = saying([0] * 500, [0] * 500)
    checkpoint = replace(CHECKPOINT, top_logit_percentiles=top_logit_percentiles(predictions))
    for logit in (-2.9, 0.0, 3.3, 11.0):
        share = np.mean(predictions.top_logits < logit)
        assert checkpoint.top_logit_percentile(logit) == pytest.approx(share, abs=0.011)
    assert CHECKPOINT.top_logit_percentile(3.0) is None


def test_a_model_in_train_mode_or_with_nan_answers_is_refused():
    model = small_model(**SIZES)
    with pytest.raises(ValueError, match="train mode"):
        predict(model.train(), CHECKPOINT, some_pictures(3))
    with torch.no_grad():
        model.eval().mlp_head[1].weight.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        predict(model, CHECKPOINT, some_pictures(3))
