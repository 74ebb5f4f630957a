"""The made pictures load as any others do, and a holdout is fair, exact and the same each time.

Run: pytest tests/test_splits.py (about 10 s).
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic import made, write_classes, write_layout

from vit import patterns
from vit.datasets import (
    DataError,
    download,
    find_data,
    holdout_indices,
    load_pictures,
    main_data,
    pattern_masks,
    verify,
)
from vit.patterns import make_patterns
from vit.sources import find_source

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    monkeypatch.delenv("PATCHLIGHT_DATA", raising=False)
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(patterns, "PICTURES", {"train": 600, "test": 300})


# --- made pictures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("split", "n"), [("train", 600), ("test", 300)])
def test_made_pictures_load_as_others_do(split, n):
    expected = make_patterns(n, seed=0, split=split)
    ids = [hashlib.sha256(p.tobytes()).hexdigest()[:12] for p in expected.images]
    pairs = sorted(f"{i} {label}" for i, label in zip(ids, expected.labels.tolist(), strict=True))
    counted = []
    for progress in (lambda *at: counted.append(at), pytest.fail):  # made, then opened
        found = load_pictures("patterns", split, progress=progress)
        np.testing.assert_array_equal(found.images, expected.images)
        np.testing.assert_array_equal(found.labels, expected.labels)
        assert found.ids.tolist() == ids
        assert (found.name, found.split, found.class_names) == (f"patterns {split}", split, patterns.CLASSES)
        assert found.digest == hashlib.sha256("\n".join(pairs).encode()).hexdigest()
        assert found.left_out == ()
        assert isinstance(found.images, np.memmap)
        masks = pattern_masks(split, progress=pytest.fail)
        np.testing.assert_array_equal(masks, expected.masks)
        assert masks.dtype == bool
        assert not masks.flags.writeable
    assert counted[-1] == (n, n, f"{split} pictures")


def test_the_masks_fit_the_pictures_of_a_damaged_or_missing_cache(tmp_path, monkeypatch):
    expected = make_patterns(300, seed=0, split="test").masks
    pattern_masks()
    (kept,) = (tmp_path / "cache").rglob("masks.npy")
    kept.write_bytes(kept.read_bytes()[:-1000])
    np.testing.assert_array_equal(pattern_masks(), expected)
    kept.unlink()
    np.testing.assert_array_equal(pattern_masks(), expected)
    (tmp_path / "file").touch()
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="PATCHLIGHT_CACHE"):
        masks = pattern_masks()
    np.testing.assert_array_equal(masks, expected)
    assert not masks.flags.writeable
    with pytest.warns(UserWarning, match="PATCHLIGHT_CACHE"):
        assert len(load_pictures("patterns")) == 300


def test_another_format_or_number_is_made_anew(monkeypatch):
    load_pictures("patterns")
    monkeypatch.setattr(patterns, "FORMAT", patterns.FORMAT + 1)
    counted = []
    load_pictures("patterns", progress=lambda *at: counted.append(at))
    assert counted
    monkeypatch.setitem(patterns.PICTURES, "test", 310)
    assert len(load_pictures("patterns")) == len(pattern_masks()) == 310


def test_what_is_made_has_not_changed_without_its_format():
    """If this fails, the made pictures have changed: raise FORMAT, so that no cache keeps the old ones."""
    first = make_patterns(20, patterns.SEED)
    assert patterns.FORMAT == 1
    assert first.labels.tolist() == [1, 4, 9, 7, 3, 1, 4, 6, 1, 0, 0, 9, 2, 3, 9, 0, 0, 6, 2, 7]
    areas_px = [
        305,
        240,
        112,
        217,
        135,
        102,
        247,
        203,
        284,
        114,
        299,
        232,
        233,
        209,
        309,
        93,
        111,
        96,
        241,
        147,
    ]
    assert first.masks.sum(axis=(1, 2)).tolist() == areas_px
    means = [118.9, 135.5, 127.9, 168.8, 175.9, 111.8, 135.2, 143.2, 120.7, 128.9, 131.2, 141.6, 105.3, 147.2,
             121.6, 95.7, 113.9, 169.3, 144.0, 105.4]  # fmt: skip
    # Where mathematics libraries differ in the last bit, a pixel may differ by one.
    np.testing.assert_allclose(first.images.mean(axis=(1, 2, 3)), means, atol=0.06)


def test_two_processes_at_once_end_with_one_copy(tmp_path):
    code = """
import os, pathlib, sys, time, vit.datasets, vit.patterns
vit.patterns.PICTURES["test"] = 300
def meet(*_):
    (pathlib.Path(sys.argv[1]) / str(os.getpid())).touch()
    while len(os.listdir(sys.argv[1])) < 2: time.sleep(0.001)
found = vit.datasets.load_pictures("patterns", progress=meet)
print(type(found.images).__name__, found.digest, vit.datasets.pattern_masks().sum())"""
    (tmp_path / "meeting").mkdir()
    both = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path / "meeting"], cwd=ROOT, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    printed = {process.communicate(timeout=60)[0].strip().decode() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    known = make_patterns(300, 0, split="test")
    assert printed == {f"memmap {load_pictures('patterns').digest} {known.masks.sum()}"}
    assert len(list((tmp_path / "cache" / "decoded").iterdir())) == 1


def test_made_pictures_are_found_anywhere_and_never_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr("vit.datasets.fetch", lambda *a: pytest.fail("nothing is to be fetched"))
    place = find_data("patterns")
    assert place.is_file()
    assert find_source(place, "test").fingerprint != find_source(place, "train").fingerprint
    assert load_pictures(str(place)).digest == load_pictures("patterns", download=True).digest
    assert download(("test", "train"), "patterns") == place
    lines = main_data("patterns", ("test", "train"))
    text = "\n".join(lines)
    assert "patterns test: 300 pictures in 10 classes." in lines
    assert f"  Source: {place}" in lines
    assert text.count("Made by code") == 2
    assert "CIFAR" not in text
    assert "ublished" not in verify(load_pictures("patterns"))


def test_a_folder_called_patterns_is_reached_by_its_path(tmp_path):
    with pytest.raises(DataError, match="There is no folder"):
        load_pictures("./patterns")
    write_classes(tmp_path / "patterns", *made(6, 3), names=["tram", "bus", *"cdefghij"])
    for name in ("./patterns", Path("patterns"), str(tmp_path / "patterns")):
        found = load_pictures(name)
        assert (len(found), found.class_names[-1]) == (6, "tram")
        assert verify(found).startswith("Not the published")
        assert find_data(name) == Path(name)
    assert len(load_pictures("patterns")) == 300


def test_cifar10_is_another_word_for_no_folder(tmp_path, monkeypatch):
    said = []
    for name in (None, "cifar10"):
        assert find_data(name) is None
        with pytest.raises(DataError) as error:
            load_pictures(name)
        said.append(str(error.value))
    assert said[0] == said[1]
    monkeypatch.setenv("PATCHLIGHT_DATA", str(write_layout("parquet", tmp_path / "data")))
    assert find_data("cifar10") == find_data() == tmp_path / "data"
    for split in ("test", "train"):
        assert load_pictures("cifar10", split).ids.tolist() == load_pictures(None, split).ids.tolist()
    write_classes(tmp_path / "cifar10", *made(6, 3))
    assert len(load_pictures("./cifar10")) == 6
    assert len(load_pictures("cifar10")) == 40


# --- holdout ----------------------------------------------------------------------------------------------

LABELS = {
    "even": np.arange(1000) % 10,
    "uneven": np.random.default_rng(0).choice(7, 2345, p=[0.4, 0.3, 0.2, 0.05, 0.03, 0.015, 0.005]),
    "with gaps": np.array([3, 90, 90, 7] * 30),
    "small classes": np.repeat(np.arange(40), 3),
    "lonely classes": np.array([*[0, 1] * 30, *range(2, 10)]),
    "one class": np.zeros(57, np.int64),
    "none": np.zeros(0, np.int64),
}


@pytest.mark.parametrize("holdout", [1, 7, 100, 5000])
@pytest.mark.parametrize("kind", LABELS)
def test_a_holdout_is_exact_and_takes_each_classs_share(kind, holdout):
    labels = np.random.default_rng(1).permutation(LABELS[kind])
    for seed in (0, 1, 2):
        train, held = holdout_indices(labels, holdout, seed)
        assert train.dtype == held.dtype == np.int64
        assert (np.diff(train) > 0).all()
        assert (np.diff(held) > 0).all()
        assert sorted([*train.tolist(), *held.tolist()]) == list(range(len(labels)))
        assert len(held) == min(holdout, len(labels) // 10)
        assert set(labels[train].tolist()) == set(labels.tolist())
        for name in set(labels.tolist()):
            share = (labels == name).sum() * len(held) / len(labels)
            assert abs((labels[held] == name).sum() - share) <= 1


def test_a_class_keeps_its_only_picture_even_if_fewer_are_held_out():
    train, held = holdout_indices(np.arange(50), 5, 0)
    assert (train.tolist(), held.tolist()) == (list(range(50)), [])
    labels = np.array([*[0] * 60, *range(1, 20)])  # 7 are asked for; the share of class 0 is 5.3
    train, held = holdout_indices(labels, 5000, 0)
    assert labels[held].tolist() == [0] * 6
    assert set(labels[train].tolist()) == set(range(20))


def test_the_class_whose_share_was_rounded_down_the_most_gives_the_missing_picture():
    labels = np.array([0] * 93 + [1] * 7)  # shares of 9.3 and 0.7
    for seed in range(5):
        assert np.bincount(labels[holdout_indices(labels, 10, seed)[1]]).tolist() == [9, 1]


def test_the_seed_alone_chooses_the_holdout():
    labels = LABELS["uneven"]
    first, again, other = (holdout_indices(labels, 200, seed)[1] for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert len(np.intersect1d(first, other)) < 60  # 17 by chance
    assert holdout_indices(labels.tolist(), 200, 3)[1].tolist() == first.tolist()
    times = np.zeros(len(labels))
    for seed in range(200):
        times[holdout_indices(labels, 200, seed)[1]] += 1
    assert times.min() > 0  # anyone may be chosen
    assert times.max() < 45  # and no one much more often than 17 times


def test_without_a_holdout_all_are_trained_on_and_negative_numbers_are_refused():
    train, held = holdout_indices(np.arange(20) % 2, 0, 0)
    assert (train.tolist(), held.tolist(), held.dtype) == (list(range(20)), [], np.int64)
    for holdout, seed in ((-1, 0), (5, -1)):
        with pytest.raises(ValueError, match=r"^[^.]*must not be negative[^.]*\.$"):
            holdout_indices(np.arange(20), holdout, seed)


def test_no_torch_is_needed():
    code = (
        "import sys, vit.datasets as d; d.holdout_indices([0, 1] * 9, 1, 0); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ)).returncode == 0
