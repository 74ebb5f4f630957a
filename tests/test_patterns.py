"""The made pictures say their class by the pattern alone, and the masks say where it is.

Run: pytest tests/test_patterns.py (about 20 s).
"""

import numpy as np
import pytest
import torch

from vit.patterns import CLASSES, OBJECT_SHARE, PICTURES, make_patterns


def test_the_same_arguments_make_the_same_pictures_and_others_do_not():
    first, again = make_patterns(40, seed=3), make_patterns(40, seed=3)
    np.testing.assert_array_equal(first.images, again.images)
    longer = make_patterns(700, seed=3)  # more than one chunk
    np.testing.assert_array_equal(longer.images[:40], first.images)
    for other in (make_patterns(40, seed=4), make_patterns(40, seed=3, split="test")):
        assert not (other.images == first.images).all(axis=(1, 2, 3)).any()


def test_no_picture_of_the_test_split_is_in_the_training_split():
    train, test = make_patterns(3000, seed=0), make_patterns(3000, seed=0, split="test")
    seen = {picture.tobytes() for picture in train.images}
    assert len(seen) == 3000
    assert not any(picture.tobytes() in seen for picture in test.images)


def test_classes_are_even_and_objects_have_the_area_that_was_promised():
    made = make_patterns(2000, seed=1)
    assert np.bincount(made.labels).tolist() == [200] * len(CLASSES)
    cut = np.bincount(make_patterns(333, seed=1).labels, minlength=len(CLASSES))
    assert cut.max() - cut.min() <= 20  # what was made at once is even; the last of it is cut
    assert all(n % 250 == 0 for n in PICTURES.values())  # so `load_pictures` gives even classes
    share = made.masks.mean(axis=(1, 2))
    assert share.min() >= OBJECT_SHARE[0]
    assert share.max() <= OBJECT_SHARE[1]
    assert np.histogram(share, bins=5, range=OBJECT_SHARE)[0].min() > 300


def test_leaving_a_blob_out_changes_its_pixels_alone():
    whole = make_patterns(200, seed=5)
    bare = make_patterns(200, seed=5, without=2)
    changed = (whole.images != bare.images).any(axis=-1)
    assert not (changed & ~whole.masks).any()
    assert (changed & whole.masks).sum() > 0.95 * whole.masks.sum()
    for blob in (0, 1):
        other = make_patterns(200, seed=5, without=blob)
        changed = (whole.images != other.images).any(axis=-1)
        assert not (changed & whole.masks).any()  # the object lies on top and is the same
        assert changed.any(axis=(1, 2)).mean() > 0.9
    with pytest.raises(ValueError, match="blobs are 0, 1 and 2"):
        make_patterns(1, seed=0, without=3)
    with pytest.raises(ValueError, match="split"):
        make_patterns(1, seed=0, split="dev")


def test_inside_the_mask_every_class_repeats_as_its_pattern_does():
    """Shifted by a period the object equals itself; shifted by less than that, it does not."""
    made = make_patterns(400, seed=2)
    periods = {"horizontal stripes": (4, 0), "vertical stripes": (0, 4), "fine horizontal stripes": (2, 0),
               "fine vertical stripes": (0, 2), "rising stripes": (2, -2), "falling stripes": (2, 2),
               "checks": (4, 0), "fine checks": (1, 1), "dots": (4, 4), "lattice": (3, 3)}  # fmt: skip
    images = made.images.astype(float)

    def difference(rows: np.ndarray, dy: int, dx: int) -> float:
        both = made.masks[rows] & np.roll(made.masks[rows], (dy, dx), (1, 2))
        return np.abs(images[rows] - np.roll(images[rows], (dy, dx), (1, 2))).mean(axis=-1)[both].mean()

    for label, name in enumerate(CLASSES):
        rows = np.nonzero(made.labels == label)[0]
        shifts = [(1, 0), (0, 1)]
        assert difference(rows, *periods[name]) < 0.6 * max(difference(rows, *shift) for shift in shifts), (
            name
        )


def _accuracy_of_a_linear_classifier(features: np.ndarray, labels: np.ndarray, train: int) -> float:
    """Softmax regression on standardised features by full-batch L-BFGS, early enough not to overfit."""
    x = torch.from_numpy(features.astype(np.float32))
    x = (x - x[:train].mean(0)) / (x[:train].std(0) + 1e-6)
    y = torch.from_numpy(labels)
    layer = torch.nn.Linear(x.shape[1], len(CLASSES))
    optimiser = torch.optim.LBFGS(layer.parameters(), max_iter=30)

    def closure():
        optimiser.zero_grad()
        loss = (
            torch.nn.functional.cross_entropy(layer(x[:train]), y[:train])
            + 0.01 * layer.weight.square().sum()
        )
        loss.backward()
        return loss

    optimiser.step(closure)
    with torch.no_grad():
        return (layer(x[train:]).argmax(1) == y[train:]).float().mean().item()


def test_colours_do_not_give_the_class_away():
    made = make_patterns(5000, seed=0)
    bins = made.images // 64  # 4 levels a channel
    code = (bins[..., 0] * 16 + bins[..., 1] * 4 + bins[..., 2]).reshape(len(bins), -1)
    histograms = np.stack([np.bincount(row, minlength=64) for row in code])
    assert _accuracy_of_a_linear_classifier(np.sqrt(histograms), made.labels, 4000) < 0.15


def test_single_pixels_do_not_give_the_class_away():
    made = make_patterns(5000, seed=0)
    pixels = made.images.reshape(len(made.images), -1)
    assert _accuracy_of_a_linear_classifier(pixels, made.labels, 4000) < 0.30
