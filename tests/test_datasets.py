"""Every layout gives the same pictures; the cache and the download are whole or absent.

pytest tests/test_datasets.py            # some 15 seconds, loopback only; PATCHLIGHT_DATA adds the real split
"""

import errno
import hashlib
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from synthetic import made, png, write_batch, write_classes, write_layout, write_parquet

from vit.datasets import PUBLISHED_DIGESTS, DataError, download, find_data, load_pictures, main_data, verify
from vit.images import PictureError, open_picture
from vit.sources import CLASSES

ROOT = Path(__file__).parents[1]
REAL_DATA = os.environ.get("PATCHLIGHT_DATA")


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path):
    monkeypatch.delenv("PATCHLIGHT_DATA", raising=False)
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))


LAYOUTS = ["parquet", "plain_text", "batches", "the batches' own folder", "class folders"]


@pytest.mark.parametrize("split", ["test", "train"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_pictures(layout, split, tmp_path):
    pixels, labels = made(40, 1) if split == "test" else made(50, 2)
    ids = [hashlib.sha256(p.tobytes()).hexdigest()[:12] for p in pixels]
    expected = {i: (p.tobytes(), label) for i, p, label in zip(ids, pixels, labels, strict=True)}
    digest = hashlib.sha256(
        "\n".join(sorted(f"{i} {k}" for i, (_, k) in expected.items())).encode()
    ).hexdigest()
    folder = write_layout(layout, tmp_path / "data")
    assert find_data(folder) == folder
    for _ in range(2):  # decoded, then opened
        found = load_pictures(folder, split)
        rows = zip(found.ids.tolist(), found.images, found.labels, strict=True)
        assert {i: (p.tobytes(), label) for i, p, label in rows} == expected
        assert found.digest == digest
        assert found.class_names == CLASSES
        assert isinstance(found.images, np.memmap)
        assert all(found.ids[found.index_of(i)] == i for i in ids)
        assert found.index_of("0" * 12) is None
        with pytest.raises(ValueError, match="read-only"):
            found.images[0] = 0


def test_a_tree_without_splits_serves_as_any(tmp_path):
    write_classes(tmp_path / "mine", *made(6, 3), names=["tram", "bus", *"cdefghij"])
    test, train = (load_pictures(tmp_path / "mine", split) for split in ("test", "train"))
    assert test.class_names == train.class_names == ("bus", "c", "d", "e", "f", "tram")
    assert test.digest == train.digest
    pixels, _ = made(6, 3)
    assert test.labels[test.index_of(hashlib.sha256(pixels[0].tobytes()).hexdigest()[:12])] == 5  # tram
    assert test.name == "mine test"
    assert (
        download("train", tmp_path / "mine") == tmp_path / "mine"
    )  # it is there: nothing is asked of anyone
    (tmp_path / "mine").rename(tmp_path / "test")
    with pytest.raises(DataError, match="no train split"):
        load_pictures(tmp_path, "train", download=True)


def test_both_splits_count_the_same_classes_and_other_sizes_are_cropped(tmp_path):
    write_classes(tmp_path / "train", *made(3, 3), names=["a", "b", "c"])
    (tmp_path / "test" / "c").mkdir(parents=True)
    big = np.zeros((64, 128, 3), np.uint8)
    big[:, 32:96] = 255  # the middle
    Image.fromarray(big).save(tmp_path / "test" / "c" / "wide.png")
    test = load_pictures(tmp_path, "test")
    assert (test.class_names, test.labels.tolist()) == (("a", "b", "c"), [2])
    assert (test.images[0] == 255).all()


def test_nothing_found_says_what_to_do(tmp_path, monkeypatch):
    assert find_data() is None
    with pytest.raises(DataError, match=r"No CIFAR-10 was found.*python -m vit data.*PATCHLIGHT_DATA"):
        load_pictures()
    folder = write_layout("parquet", tmp_path / "data")
    monkeypatch.setenv("PATCHLIGHT_DATA", str(folder))
    assert find_data() == folder
    assert len(load_pictures()) == 40


def _damage_cases():
    pixels, labels = made(10, 4)
    name = "test-00000-of-00001.parquet"

    def parquet(*args, **columns):
        return lambda base: write_parquet(base / name, *args, **columns)

    def cells(data):
        return [{"bytes": data, "path": "x"}] * 10

    def cut(base):
        write_parquet(base / name, pixels, labels)
        (base / name).write_bytes((base / name).read_bytes()[:-2000])

    def hole(base):
        write_parquet(base / name, pixels, labels)
        data = bytearray((base / name).read_bytes())
        data[200:3000] = bytes(2800)
        (base / name).write_bytes(data)

    def batch(content):
        return lambda base: (base / "test_batch").write_bytes(content)

    yield "cut parquet", cut, name, "not a whole parquet"
    yield "overwritten parquet", hole, name, "cannot be"
    yield "no label", parquet(pixels, labels, label=None), name, "no column 'label'"
    yield "no img", parquet(pixels, labels, img=None), name, "no column 'img'"
    yield "img of another kind", parquet(pixels, labels, img=["x"] * 10), name, "row 0 .* holds no picture"
    yield "wrong size", parquet(np.zeros((1, 28, 30, 3), np.uint8), labels[:1]), name, "30 x 28, not 32 x 32"
    yield "no picture", parquet(pixels, labels, img=cells(b"text")), name, "row 0 cannot be decoded"
    yield (
        "cut picture",
        parquet(pixels, labels, img=cells(png(pixels[0])[:900])),
        name,
        "row 0 cannot be decod",
    )
    yield "label 10", parquet(pixels, labels + 1), name, "row 9 is 10, not one of 0 to 9"
    yield "no label in a row", parquet(pixels, labels, label=[*range(9), None]), name, "row 9 is None"
    yield "no rows", parquet(pixels[:0], labels[:0], img=cells(b"")[:0]), "test", "hold no pictures"
    yield (
        "cut batch",
        batch(pickle.dumps({"data": pixels.reshape(10, -1)})[:-100]),
        "test_batch",
        "not a CIFAR",
    )
    yield "batch of text", batch(b"hello"), "test_batch", "not a CIFAR-10 batch"
    yield "batch of a list", batch(pickle.dumps([1])), "test_batch", "not a CIFAR-10 batch"
    grey = {"data": pixels[..., 0].reshape(10, -1), "labels": labels.tolist()}
    yield "grey batch", batch(pickle.dumps(grey)), "test_batch", "3,072 bytes"
    few = {"data": pixels.reshape(10, -1), "labels": [1]}
    yield "batch of few labels", batch(pickle.dumps(few)), "test_batch", "one label a picture"
    bad = {"data": pixels.reshape(10, -1), "labels": [11] * 10}
    yield "batch of bad labels", batch(pickle.dumps(bad)), "test_batch", "row 0 is 11"


@pytest.mark.parametrize("case", list(_damage_cases()), ids=lambda case: case[0])
def test_damage_is_told_by_file_and_leaves_no_cache(case, tmp_path):
    _, damage, file, what = case
    (tmp_path / "data").mkdir()
    damage(tmp_path / "data")
    with pytest.raises(DataError, match=f"(?s){file}.*{what}"):
        load_pictures(tmp_path / "data")
    assert not list((tmp_path / "cache").rglob("*.npy"))


@pytest.mark.parametrize(
    ("layout", "file"),
    [("parquet", "train-00001-of-00003.parquet"), ("batches", "cifar-10-batches-py/data_batch_4")],
)
def test_a_missing_part_is_named(layout, file, tmp_path):
    (write_layout(layout, tmp_path) / file).unlink()
    with pytest.raises(DataError, match=f"only part of the train pictures: {Path(file).name} missing"):
        load_pictures(tmp_path, "train")
    assert len(load_pictures(tmp_path, "test")) == 40


def test_unreadable_files_of_class_folders_are_left_out_and_named(tmp_path):
    write_layout("class folders", tmp_path / "data")
    whole = load_pictures(tmp_path / "data")
    assert (whole.name, whole.left_out) == ("data test", ())
    cats = tmp_path / "data" / "test" / "cat"
    (cats / "0.png").write_bytes(b"no picture")
    (cats / "zzz.jpg").touch()
    cut = sorted(cats.iterdir())[2]
    with Image.open(cut) as picture:
        lost = whole.index_of(hashlib.sha256(picture.tobytes()).hexdigest()[:12])
    cut.write_bytes(cut.read_bytes()[:100])
    counted = []
    for progress in (lambda *at: counted.append(at), pytest.fail):  # decoded, then opened
        found = load_pictures(tmp_path / "data", progress=progress)
        assert found.ids.tolist() == np.delete(whole.ids, lost).tolist()
        assert found.labels.tolist() == np.delete(whole.labels, lost).tolist()
        assert (found.images == np.delete(whole.images, lost, axis=0)).all()
        named = [file.split(": ") for file in found.left_out]
        assert [path for path, _ in named] == [str(cats / name) for name in ("0.png", cut.name, "zzz.jpg")]
        for (_, reason), what in zip(named, ["not a picture", "damaged", "empty"], strict=True):
            assert what in reason
        assert found.digest != whole.digest
    assert counted[-1] == (42, 42, "test pictures")
    lines = main_data(str(tmp_path / "data"), ("test",))
    assert [line for line in lines if "Left out" in line] == [f"  Left out: {x}" for x in found.left_out]


def test_class_folders_of_which_nothing_can_be_read_are_an_error(tmp_path):
    write_layout("class folders", tmp_path / "data")
    for file in (tmp_path / "data" / "test").rglob("*.png"):
        file.write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"None of the 40 test pictures .*airplane.\d+\.png.* another folder"):
        load_pictures(tmp_path / "data")
    assert not list((tmp_path / "cache").rglob("*.npy"))
    assert load_pictures(tmp_path / "data", "train").left_out == ()


def test_a_file_that_may_be_read_again_is_missed_no_longer(tmp_path, monkeypatch):
    write_layout("class folders", tmp_path / "data")
    closed = next((tmp_path / "data" / "test" / "cat").iterdir())
    can = os.access  # a superuser may read whatever its mode says: so its mode is acted

    def may(path, mode):
        return os.fspath(path) != str(closed) and can(path, mode)

    def refused(path):
        if path == closed:
            raise PictureError("This file cannot be opened: Permission denied.")
        return open_picture(path)

    with monkeypatch.context() as patch:
        patch.setattr("vit.sources.os.access", may)
        patch.setattr("vit.sources.open_picture", refused)
        assert len(load_pictures(tmp_path / "data").left_out) == 1
    assert len(load_pictures(tmp_path / "data")) == 40


class Hostile:
    def __reduce__(self):
        return os.system, (f"\"{sys.executable}\" -c \"open('owned', 'w')\"",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_batch_is_refused_and_not_run(protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels, labels = made(10, 5)
    content = {"data": pixels.reshape(10, -1), "labels": labels.tolist(), "more": Hostile()}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content, protocol))
    with pytest.raises(DataError, match=r"test_batch.*(posix|nt)\.system"):
        load_pictures(tmp_path)
    assert not Path("owned").exists()
    pickle.loads(pickle.dumps(content, protocol))  # the very same bytes do run elsewhere: the test can fail
    assert Path("owned").exists()


# --- the cache --------------------------------------------------------------------------------------------


def child(code: str, *args: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE)


HALF_WAY = {
    "while decoding": "vit.datasets.load_pictures(sys.argv[1], progress=lambda *a: stop())",
    "while saving": """
save = np.save
def slow(path, *args, **more):
    save(path, *args, **more)
    "labels" in str(path) and stop()
np.save = slow
vit.datasets.load_pictures(sys.argv[1])""",
}


@pytest.mark.parametrize("moment", HALF_WAY)
def test_killed_half_way_leaves_nothing_that_is_taken_for_whole(moment, tmp_path):
    folder = write_layout("parquet", tmp_path / "data")
    code = (
        "import sys, time, vit.datasets, numpy as np\ndef stop(): print('half', flush=True); time.sleep(60)\n"
    )
    with child(code + HALF_WAY[moment], folder) as process:
        assert process.stdout.readline().strip() == b"half"
        process.kill()
    assert (moment == "while saving") == bool(list((tmp_path / "cache").rglob("images.npy")))
    counted = []
    assert len(load_pictures(folder, progress=lambda *at: counted.append(at))) == 40
    assert counted[-1][:2] == (40, 40)  # decoded anew


def test_the_cache_appears_whole_in_one_rename(tmp_path, monkeypatch):
    """Nobody can see a part of it: until the rename there is no folder of that name at all."""
    renamed, rename = [], Path.replace

    def watched(half: Path, target: Path):
        assert not target.exists()
        assert {file.name for file in half.iterdir()} == {"images.npy", "labels.npy", "ids.npy", "facts.json"}
        renamed.append(target)
        return rename(half, target)

    monkeypatch.setattr(Path, "replace", watched)
    load_pictures(write_layout("parquet", tmp_path / "data"))
    assert renamed == list((tmp_path / "cache" / "decoded").iterdir())


def test_only_what_a_killed_process_left_long_ago_is_cleared_away(tmp_path):
    decoded = tmp_path / "cache" / "decoded"
    for name, age_s in ((".half-now", 60), (".half-old", 3 * 24 * 3600)):
        (decoded / name).mkdir(parents=True)
        os.utime(decoded / name, (time.time() - age_s,) * 2)
    load_pictures(write_layout("parquet", tmp_path / "data"))
    assert (decoded / ".half-now").exists()  # another process may be writing it
    assert not (decoded / ".half-old").exists()


def test_two_processes_at_once_both_end_well(tmp_path):
    folder = write_layout("parquet", tmp_path / "data")
    code = """
import os, pathlib, sys, time, vit.datasets
def meet(*_):
    (pathlib.Path(sys.argv[2]) / str(os.getpid())).touch()
    while len(os.listdir(sys.argv[2])) < 2: time.sleep(0.001)
found = vit.datasets.load_pictures(sys.argv[1], progress=meet)
print(type(found.images).__name__, found.digest)"""
    (tmp_path / "meeting").mkdir()
    both = [child(code, folder, tmp_path / "meeting") for _ in range(2)]
    printed = {process.communicate(timeout=60)[0].strip().decode() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert printed == {f"memmap {load_pictures(folder).digest}"}
    assert len(list((tmp_path / "cache" / "decoded").iterdir())) == 1


def test_ten_thousand_pictures_open_in_a_moment_and_a_changed_source_is_read_anew(tmp_path):
    pixels, labels = made(10_000, 6)
    write_batch(tmp_path / "test_batch", pixels, labels)
    load_pictures(tmp_path)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert len(load_pictures(tmp_path, progress=pytest.fail)) == 10_000
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.2
    write_batch(tmp_path / "test_batch", pixels[:10], labels[:10])
    assert len(load_pictures(tmp_path)) == 10


@pytest.mark.parametrize("fault", ["no folder can be made", "disk full"])
def test_without_a_cache_the_pictures_stay_in_memory(fault, tmp_path, monkeypatch):
    folder = write_layout("parquet", tmp_path / "data")
    if fault == "disk full":
        monkeypatch.setattr(np, "save", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="PATCHLIGHT_CACHE"):
        found = load_pictures(folder)
    assert len(found) == 40
    assert not found.images.flags.writeable
    assert not list(tmp_path.rglob(".half-*"))


def test_a_damaged_cache_is_made_anew(tmp_path):
    folder = write_layout("parquet", tmp_path / "data")
    digest = load_pictures(folder).digest
    (cached,) = (tmp_path / "cache").rglob("images.npy")
    cached.write_bytes(cached.read_bytes()[:-100])
    assert load_pictures(folder).digest == digest
    assert cached.stat().st_size > 40 * 3072


# --- the real split ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not REAL_DATA, reason="PATCHLIGHT_DATA names no folder with CIFAR-10")
def test_the_real_test_split():
    test = load_pictures(REAL_DATA)
    assert len(test) == 10_000
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert test.digest == PUBLISHED_DIGESTS["test"]
    assert verify(test).startswith("Verified")
    samples = sorted((ROOT / "assets" / "samples").glob("*_*.png"))
    assert len(samples) == 20
    for sample in samples:
        pixels = np.asarray(Image.open(sample).convert("RGB"))
        found = test.index_of(hashlib.sha256(pixels.tobytes()).hexdigest()[:12])
        assert (test.images[found] == pixels).all()
        assert test.class_names[test.labels[found]] == sample.name.split("_")[0]
