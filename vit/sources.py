"""Finds the files of a CIFAR-10 split in any of three layouts, and reads them picture by picture.

    source = find_source(Path("data"), "test")     # a Source, or None; opens no file
    total, rows = read(source)                     # rows yields ((32, 32, 3) uint8, label)

`vit.datasets` says which layouts these are and keeps what was read. Every damage is told as a DataError that
names the file; in class folders, which are people's own, such a file is left out and named. Nothing here
trusts a file: pickles are rebuilt without running anything they name.
"""

import hashlib
import json
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vit import patterns
from vit.download import WHAT_TO_DO, DataError
from vit.images import PictureError, fit, open_picture

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SPLITS = ("test", "train")
SIDE_PX = 32
DECODED_FORMAT = 1  # to be raised when the same files would be decoded to other arrays
PICTURE_FILES = r"(?i)[^.].*\.(png|jpe?g|webp|bmp)"
MADE = Path(patterns.__file__).resolve()  # stands for the made pictures, where others have their folder


@dataclass(frozen=True)
class Source:
    """The files of one split, as found in one layout; nothing of them has been read yet."""

    layout: str  # "parquet", "batches", "folders", or "made" by `vit.patterns`
    root: Path
    split: str
    files: tuple[tuple[str, int, int], ...]  # (path below root, size in bytes, time of change in ns), sorted
    class_names: tuple[str, ...] = CLASSES

    @property
    def fingerprint(self) -> str:
        """Changes whenever a file was added, removed or written; no file is opened for it."""
        facts = [DECODED_FORMAT, self.layout, str(self.root.resolve()), self.files, self.class_names]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def find_source(base: Path, split: str) -> Source | None:
    """The files of one split in `base`, in the first layout that has some; None if no layout has.

    For MADE the source has no files: their place says what its pictures are made from.
    """
    if base == MADE:
        facts = (f"{split} pictures", patterns.PICTURES[split], patterns.FORMAT)
        return Source("made", MADE, split, (facts,), patterns.CLASSES)
    for root in (base, *(base / name for name in _folders(base))):
        if files := _files(root, rf"{split}-.*\.parquet"):
            return Source("parquet", root, split, files)
    batches = "test_batch" if split == "test" else "data_batch_[1-5]"
    for root in (base, base / "cifar-10-batches-py"):
        if files := _files(root, batches):
            return Source("batches", root, split, files)
    split_folders = [base / name for name in _folders(base) if name in SPLITS]
    root = base / split if split_folders else base
    # Both splits count the same classes, even where one split has no picture of some.
    names = {name for tree in (root, *split_folders) for name in _folders(tree)}
    files = tuple(
        (f"{name}/{file}", *facts)
        for name in sorted(names)
        for file, *facts in _files(root / name, PICTURE_FILES)
    )
    if not files:
        return None
    if not split_folders:  # a plain tree may lie beside folders of other things
        names = {file.split("/")[0] for file, *_ in files}
    return Source("folders", root, split, files, CLASSES if names <= set(CLASSES) else tuple(sorted(names)))


def _folders(folder: Path) -> list[str]:
    if not folder.is_dir() or not os.access(folder, os.R_OK):
        return []
    with os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _files(folder: Path, pattern: str) -> tuple[tuple[str, int, int], ...]:
    if not folder.is_dir() or not os.access(folder, os.R_OK):
        return ()
    with os.scandir(folder) as entries:  # names first: a stat of each of 50,000 files would be felt
        found = [e for e in entries if re.fullmatch(pattern, e.name) and e.is_file()]
        # Permission changes no time, yet a file that was left out for want of it must be missed no longer.
        times = (e.stat().st_mtime_ns if os.access(e.path, os.R_OK) else 0 for e in found)
        return tuple(sorted((e.name, e.stat().st_size, ns) for e, ns in zip(found, times, strict=True)))


def _check_whole(source: Source) -> None:
    """DataError if some of the files that belong together are not there."""
    names = {name for name, *_ in source.files}
    expected = set()
    if source.layout == "batches" and source.split == "train":
        expected = {f"data_batch_{i}" for i in range(1, 6)}
    if source.layout == "parquet":
        for count in {match[1] for name in names if (match := re.search(r"-of-(\d+)\.parquet$", name))}:
            expected |= {f"{source.split}-{i:05d}-of-{count}.parquet" for i in range(int(count))}
    if missing := sorted(expected - names):
        raise DataError(
            f"The folder {source.root} holds only part of the {source.split} pictures: {', '.join(missing)}"
            " missing; put the missing files there, or name another folder."
        )


_Rows = Iterator[tuple[np.ndarray, int] | str]


def read(source: Source) -> tuple[int, _Rows]:
    """How many pictures there are, and ((32, 32, 3) uint8, label) of each; DataError if a file is damaged.

    A file of a class folder that cannot be read gives "path: reason" in place of its picture.
    """
    _check_whole(source)
    readers = {"parquet": _parquet, "batches": _batches, "folders": _class_folders}
    total, rows = readers[source.layout](source)
    if not total:
        raise DataError(f"The {source.split} files in {source.root} hold no pictures; {WHAT_TO_DO}.")
    return total, rows


def _broken(path: Path, what: str) -> DataError:
    return DataError(f"The file {path} cannot be used: {what}. Replace or delete it, then {WHAT_TO_DO}.")


def _parquet(source: Source) -> tuple[int, _Rows]:
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    damage = (ArrowException, OSError)

    def opened(path: Path) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(path)
        except damage as error:
            raise _broken(path, f"it is not a whole parquet file ({error})") from error

    def rows() -> _Rows:
        for path in paths:
            with opened(path) as file:
                for name in ("img", "label"):
                    if name not in file.schema_arrow.names:
                        raise _broken(path, f"it has no column {name!r}")
                try:
                    for row, (cell, label) in enumerate(_cells(file)):
                        yield _decoded(path, row, cell), _label(path, row, label)
                except damage as error:
                    raise _broken(path, f"its pictures cannot be read ({error})") from error

    paths = [source.root / name for name, *_ in source.files]
    total = 0
    for path in paths:
        with opened(path) as file:
            total += file.metadata.num_rows
    return total, rows()


def _cells(file) -> Iterator[tuple]:
    for batch in file.iter_batches(batch_size=1000, columns=["img", "label"]):
        yield from zip(batch["img"].to_pylist(), batch["label"].to_pylist(), strict=True)


def _decoded(path: Path, row: int, cell) -> np.ndarray:
    data = cell.get("bytes") if isinstance(cell, dict) else None
    if not isinstance(data, bytes):
        raise _broken(path, f"row {row} of its column 'img' holds no picture")
    try:
        picture = open_picture(data)
    except PictureError as error:
        raise _broken(path, f"the picture in row {row} cannot be decoded ({_reason(error)})") from error
    if picture.size != (SIDE_PX, SIDE_PX):
        raise _broken(path, f"the picture in row {row} is {picture.width} x {picture.height}, not 32 x 32")
    return np.asarray(picture)


def _reason(error: PictureError) -> str:
    """What went wrong, without the advice that follows the colon: that is for a person's own pictures."""
    reason = str(error).split(":")[0].rstrip(".")
    return reason[:1].lower() + reason[1:]


def _label(path: Path, row: int, label) -> int:
    if not isinstance(label, int) or not 0 <= label < len(CLASSES):
        raise _broken(path, f"the label in row {row} is {label!r}, not one of 0 to 9")
    return label


class _BatchUnpickler(pickle.Unpickler):
    """Rebuilds numpy arrays and plain values; whatever else a pickle asks for is refused, not run."""

    def find_class(self, module: str, name: str):
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]  # the same function, wherever this numpy keeps it
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in old pickle protocols
            return lambda text, encoding: text.encode("latin1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which picture data never needs")


def _batches(source: Source) -> tuple[int, _Rows]:
    batches = []
    for name, *_ in source.files:
        path = source.root / name
        try:
            with path.open("rb") as file:
                batch = _BatchUnpickler(file, encoding="bytes").load()
        except (
            *(pickle.UnpicklingError, OSError, EOFError, MemoryError),  # what a damaged pickle may raise:
            *(AttributeError, ImportError, LookupError, TypeError, ValueError, OverflowError),
        ) as error:
            raise _broken(path, f"it is not a CIFAR-10 batch ({error})") from error
        if not isinstance(batch, dict):
            raise _broken(path, "it is not a CIFAR-10 batch")
        # Python 2 wrote byte strings as keys, Python 3 writes text.
        pixels, labels = (batch.get(key, batch.get(key.encode())) for key in ("data", "labels"))
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
            raise _broken(path, "its 'data' is not a table of 3,072 bytes a picture")
        if not isinstance(labels, list) or len(labels) != len(pixels):
            raise _broken(path, "its 'labels' are not a list with one label a picture")
        batches.append((path, pixels, labels))
    rows = (
        (flat.reshape(3, SIDE_PX, SIDE_PX).transpose(1, 2, 0), _label(path, row, label))
        for path, pixels, labels in batches
        for row, (flat, label) in enumerate(zip(pixels, labels, strict=True))
    )
    return sum(len(pixels) for _, pixels, _ in batches), rows


def _class_folders(source: Source) -> tuple[int, _Rows]:
    def rows() -> _Rows:
        for name, *_ in source.files:
            path = source.root / name
            try:
                picture = fit(open_picture(path), (SIDE_PX, SIDE_PX))
            except PictureError as error:
                yield f"{path}: {_reason(error)}"
                continue
            yield np.asarray(picture), source.class_names.index(name.split("/")[0])

    return len(source.files), rows()
