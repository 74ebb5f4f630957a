"""CIFAR-10 as memory-mapped pictures, read from whichever layout is at hand, decoded once.

    from vit.datasets import load_pictures
    test = load_pictures()                    # from PATCHLIGHT_DATA, else what `python -m vit data` fetched
    test.images[test.index_of("3f1c…")]       # (32, 32, 3) uint8

Three layouts hold the same pictures, and give the same `digest`:
    parquet   test-*.parquet, train-*.parquet    as on the Hugging Face Hub, also one folder deeper
    batches   cifar-10-batches-py/test_batch …   torchvision's, as the folder itself or inside it
    folders   test/cat/*.png …                   or cat/*.png alone, which serves as any split; other class
                                                 names are welcome, other sizes are cropped to 32 x 32,
                                                 unreadable files are left out and named in `left_out`

`load_pictures("patterns")` gives the pictures that `vit.patterns` makes, and `pattern_masks` where their
objects are; "cifar10" is another word for no folder. Folders of these names are ./patterns and ./cifar10.

Decoding takes seconds; opening what was decoded takes some milliseconds. The decoded arrays lie in
`cache_folder()`, which the variable PATCHLIGHT_CACHE moves; they can be deleted at any time.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from vit.download import DataError, Progress, fetch
from vit.files import named_folder
from vit.images import picture_id
from vit.patterns import CLASSES as PATTERN_CLASSES
from vit.patterns import SEED, make_patterns
from vit.sources import MADE, SIDE_PX, SPLITS, Source, find_source, read

# Made by this file: `load_pictures(folder, split).digest`, on a copy of uoft-cs/cifar10 whose
# training pixels have the published mean and standard deviation.
PUBLISHED_DIGESTS = {
    "test": "4dafab4f65e6ec9454788c505a6013a8336c78fc0f6f8ae27b05df21a2581490",
    "train": "ec49272fc48e7aa01de3911b931b01d282a6331247185b238910e310f971ada3",
}


@dataclass(frozen=True, eq=False)
class Pictures:
    """One split, ready to use; all arrays are read-only."""

    images: np.ndarray  # (n, 32, 32, 3) uint8, mapped from disk
    labels: np.ndarray  # (n,) int64, indices into class_names
    ids: np.ndarray  # (n,) str, first 12 hex digits of the SHA-256 of a picture's 3,072 bytes
    class_names: tuple[str, ...]
    name: str  # "CIFAR-10 test"
    split: str  # "test" or "train"
    digest: str  # SHA-256 of the sorted (id, label) pairs: the same in whatever order the pictures come
    left_out: tuple[str, ...] = ()  # "path: reason" of each file of a class folder that could not be read

    def __len__(self) -> int:
        return len(self.labels)

    def index_of(self, picture_id: str) -> int | None:
        """Where the picture with this id is (the first, if it is there twice), or None."""
        return self._index.get(picture_id)

    @cached_property
    def _index(self) -> dict[str, int]:
        last = len(self) - 1  # backwards, so that the first of two equal pictures wins
        return {picture: last - i for i, picture in enumerate(self.ids[::-1].tolist())}


def cache_folder() -> Path:
    """PATCHLIGHT_CACHE, else a folder of ours in the user's cache folder; it need not exist yet."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return named_folder(os.environ.get("PATCHLIGHT_CACHE"), base / "patchlight")


def find_data(folder: str | Path | None = None) -> Path | None:
    """The folder that pictures would be read from: `folder`, else PATCHLIGHT_DATA, else our download's.

    None if that folder holds no split in any layout. Nothing is downloaded or decoded. For "patterns" it is
    the file that makes them, which `load_pictures` and `find_source` take as they take a folder.
    """
    base = _base(folder)
    return base if any(find_source(base, split) for split in SPLITS) else None


def load_pictures(
    folder: str | Path | None = None,
    split: str = "test",
    *,
    download: bool = False,
    progress: Progress | None = None,
) -> Pictures:
    """The pictures of one split ("test" or "train"), from where `find_data` looks.

    `folder` is a folder, "patterns" for the made pictures, or "cifar10", which is the same as None. With
    `download`, a missing split is fetched there first. `progress(done, total, what)` counts bytes while
    downloading, and pictures while decoding or making them. Raises DataError, which says what is wrong and
    what to do.
    """
    if split not in SPLITS:
        raise ValueError(f'A split is "test" or "train", not {split!r}.')
    base = _base(folder)
    source = find_source(base, split)
    if source is None and download:
        source = find_source(_download((split,), base, progress), split)
    if source is None and folder not in (None, "cifar10") and not base.is_dir():
        raise DataError(f"There is no folder {base}.")
    if source is None and folder not in (None, "cifar10"):
        raise DataError(
            f"The folder {base} holds no {split} pictures: neither CIFAR-10 nor folders named after classes."
        )
    if source is None:
        command = "python -m vit data" + (" --split all" if split == "train" else "")
        raise DataError(
            f"No CIFAR-10 was found: {base} holds no {split} pictures. Run `{command}`, or set"
            " PATCHLIGHT_DATA to a folder that holds it."
        )
    target = _target(source)
    return _open_cached(target, source) or _decode_into(target, source, progress)


def pattern_masks(split: str = "test", *, progress: Progress | None = None) -> np.ndarray:
    """Where the objects in `load_pictures("patterns", split)` are: (n, 32, 32) bool, read-only."""
    n = len(load_pictures("patterns", split, progress=progress))
    try:
        masks = np.load(_target(find_source(MADE, split)) / "masks.npy", mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # the cache cannot be written, or is damaged
        masks = np.empty(0)
    if masks.shape != (n, SIDE_PX, SIDE_PX):
        masks = make_patterns(n, SEED, split=split, progress=progress).masks
        masks.flags.writeable = False
    return masks


def holdout_indices(labels: np.ndarray, holdout: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which pictures to train on and which to hold out, as two sorted int64 arrays; the same for one seed.

    `labels` (n,) are integers. min(holdout, n // 10) pictures are held out, of each class its share within
    one. No class loses its only picture; where too few have more than one, fewer are held out. ValueError for
    a negative number.
    """
    if holdout < 0 or seed < 0:
        raise ValueError(f"The holdout and its seed must not be negative, but are {holdout} and {seed}.")
    labels = np.asarray(labels)
    n, held_n = len(labels), min(holdout, len(labels) // 10)
    rng = np.random.default_rng(seed)
    order = rng.permutation(n)
    classes, counts = np.unique(labels, return_counts=True)
    # Whole pictures first; those that are missing come from the classes that were rounded down the most.
    shares, rests = np.divmod(counts * held_n, max(n, 1))
    in_turn = rng.permutation(np.flatnonzero(counts > 1))
    in_turn = in_turn[np.argsort(-rests[in_turn], kind="stable")]
    shares[in_turn[: held_n - shares.sum()]] += 1
    is_held = np.zeros(n, bool)
    for name, share in zip(classes, shares, strict=True):
        is_held[order[labels[order] == name][:share]] = True
    return np.flatnonzero(~is_held).astype(np.int64), np.flatnonzero(is_held).astype(np.int64)


def download(
    splits: str | tuple[str, ...] = "test", folder: str | Path | None = None, progress: Progress | None = None
) -> Path:
    """Fetch the splits that `folder` (else PATCHLIGHT_DATA, else our own) lacks; returns the folder."""
    return _download((splits,) if isinstance(splits, str) else tuple(splits), _base(folder), progress)


def verify(pictures: Pictures) -> str:
    """One line that says whether these are exactly the pictures and labels that were published."""
    what, short = f"{len(pictures):,} pictures", pictures.digest[:12]
    if pictures.class_names == PATTERN_CLASSES:
        return f"Made by code, so there is nothing to verify: these {what} have digest {short}."
    if pictures.digest == PUBLISHED_DIGESTS[pictures.split]:
        return f"Verified: these {what} are the published CIFAR-10 {pictures.split} split (digest {short})."
    expected = PUBLISHED_DIGESTS[pictures.split][:12]
    return (
        f"Not the published CIFAR-10 {pictures.split} split: these {what} have digest {short},"
        f" the published ones {expected}."
    )


def main_data(folder: str | None, splits: tuple[str, ...], progress: Progress | None = None) -> list[str]:
    """`python -m vit data`: fetch what is missing, decode it, verify it; returns the lines to print."""
    lines = []
    for split in splits:
        pictures = load_pictures(folder, split, download=True, progress=progress)
        classes = len(pictures.class_names)
        lines.append(f"{pictures.name}: {len(pictures):,} pictures in {classes} classes.")
        lines.append(f"  Source: {find_source(_base(folder), split).root}")
        mapped = getattr(pictures.images, "filename", None)
        lines.append(f"  Decoded: {Path(mapped).parent if mapped else 'in memory only'}")
        lines += [f"  Left out: {file}" for file in pictures.left_out]
        lines.append(f"  {verify(pictures)}")
    return lines


def _target(source: Source) -> Path:
    return cache_folder() / "decoded" / f"{source.split}-{source.fingerprint}"


def _base(folder: str | Path | None) -> Path:
    if folder == "patterns":  # a Path of that name is a folder
        return MADE
    if folder == "cifar10":
        folder = None
    if folder is not None and not os.fspath(folder):
        raise DataError("The name of the data folder is empty.")
    named = os.environ.get("PATCHLIGHT_DATA") if folder is None else folder
    try:
        return named_folder(named, cache_folder() / "cifar10")
    except ValueError as error:
        raise DataError(f"{error}. Name another folder, or unset PATCHLIGHT_DATA.") from error


def _download(splits: tuple[str, ...], base: Path, progress: Progress | None) -> Path:
    missing = tuple(split for split in splits if not find_source(base, split))
    if not missing:
        return base
    sources = [find_source(base, split) for split in SPLITS]
    is_someone_elses = not any(sources) and base != cache_folder() / "cifar10" and _holds_files(base)
    if is_someone_elses or any(source and source.layout == "folders" for source in sources):
        # CIFAR-10 must not be mixed into what somebody else keeps there.
        raise DataError(
            f"The folder {base} holds other files, but no {' and '.join(missing)} split of CIFAR-10; name an"
            " empty folder for it, or unset PATCHLIGHT_DATA."
        )
    fetch(base, missing, progress)
    return base


def _holds_files(folder: Path) -> bool:
    """Whether anything lies there, apart from hidden files such as a download that was cut."""
    return folder.is_dir() and any(not entry.name.startswith(".") for entry in folder.iterdir())


def _open_cached(target: Path, source: Source) -> Pictures | None:
    if not target.exists():
        return None
    try:
        images = np.load(target / "images.npy", mmap_mode="r", allow_pickle=False)
        labels, ids = (np.load(target / f"{name}.npy", allow_pickle=False) for name in ("labels", "ids"))
        facts = json.loads((target / "facts.json").read_text(encoding="utf-8"))
        if images.shape != (len(labels), SIDE_PX, SIDE_PX, 3) or len(ids) != len(labels):
            raise ValueError("the arrays differ in length")
        return _pictures(images, labels, ids, source, facts["digest"], tuple(facts.get("left_out", ())))
    except (OSError, ValueError, KeyError, EOFError, TypeError):
        # Renaming is atomic, so only a failing disk or a curious hand can have done this: decode again.
        shutil.rmtree(target, ignore_errors=True)
        return None


def _decode_into(target: Path, source: Source, progress: Progress | None) -> Pictures:
    arrays, left_out = _made(source, progress) if source.layout == "made" else _decoded(source, progress)
    images, labels = arrays["images"], arrays["labels"]
    ids = arrays["ids"] = np.array([picture_id(image) for image in images])
    pairs = sorted(f"{picture} {label}" for picture, label in zip(ids.tolist(), labels.tolist(), strict=True))
    digest = hashlib.sha256("\n".join(pairs).encode()).hexdigest()
    try:
        _save(target, arrays, {"digest": digest, "left_out": left_out})
    except OSError as error:
        warnings.warn(
            f"The decoded pictures cannot be kept in {target.parent} ({error.strerror or error}), so they"
            " stay in memory and are decoded anew each time; set PATCHLIGHT_CACHE to a folder that can be"
            " written.",
            stacklevel=3,
        )
        return _pictures(images, labels, ids, source, digest, left_out)
    return _open_cached(target, source) or _pictures(images, labels, ids, source, digest, left_out)


def _made(source: Source, progress: Progress | None) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    ((_, n, _),) = source.files
    made = make_patterns(n, SEED, split=source.split, progress=progress)
    return {"images": made.images, "labels": made.labels, "masks": made.masks}, ()


def _decoded(source: Source, progress: Progress | None) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    total, rows = read(source)
    images, labels = np.empty((total, SIDE_PX, SIDE_PX, 3), np.uint8), np.empty(total, np.int64)
    left_out = []
    for done, row in enumerate(rows):
        if isinstance(row, str):
            left_out.append(row)
        else:
            at = done - len(left_out)
            images[at], labels[at] = row
        if progress and (done % 500 == 499 or done == total - 1):
            progress(done + 1, total, f"{source.split} pictures")
    n = total - len(left_out)
    if not n:
        raise DataError(
            f"None of the {total:,} {source.split} pictures in {source.root} can be read (the first,"
            f" {left_out[0]}); replace them, or name another folder."
        )
    return {"images": images[:n], "labels": labels[:n]}, tuple(left_out)


def _save(target: Path, arrays: dict[str, np.ndarray], facts: dict) -> None:
    """All files or none: written beside `target` under another name, then renamed in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in target.parent.glob(".half-*"):  # left by processes that were killed
        if time.time() - old.stat().st_mtime > 24 * 3600:
            shutil.rmtree(old, ignore_errors=True)
    half = Path(tempfile.mkdtemp(prefix=".half-", dir=target.parent))
    try:
        for name, array in arrays.items():
            np.save(half / f"{name}.npy", array, allow_pickle=False)
        (half / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        half.replace(target)
    except OSError:
        if not target.exists():  # else another process was first, with the same pictures
            raise
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _pictures(images, labels, ids, source: Source, digest: str, left_out: tuple[str, ...]) -> Pictures:
    for array in (images, labels, ids):
        array.flags.writeable = False
    root = source.root.resolve()
    folder = root.parent if root.name == source.split else root
    # Someone's own photos of cats and dogs are not CIFAR-10, though their folders bear the same names.
    is_cifar = source.layout in ("parquet", "batches") or digest == PUBLISHED_DIGESTS[source.split]
    whose = "CIFAR-10" if is_cifar else "patterns" if source.layout == "made" else folder.name
    name = f"{whose} {source.split}"
    return Pictures(images, labels, ids, source.class_names, name, source.split, digest, left_out)
