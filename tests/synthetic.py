"""Small pictures like CIFAR-10's, random but the same each time, and the layouts they can lie in.

folder = write_layout("parquet", tmp_path)     # 40 test and 50 training pictures
"""

import struct
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from vit.sources import CLASSES


def made(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    return pixels, np.arange(n) % 10


def shuffled(pixels, labels, seed: int):
    order = np.random.default_rng(seed).permutation(len(labels))
    return pixels[order], labels[order]


def png(pixels: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_parquet(path: Path, pixels, labels, **columns) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    img = [{"bytes": png(p), "path": f"{i}.png"} for i, p in enumerate(pixels)]
    table = {"img": img, "label": labels.tolist()} | columns
    pq.write_table(pa.table({name: column for name, column in table.items() if column is not None}), path)


def write_batch(path: Path, pixels, labels) -> None:
    """The bytes that Python 2 and its numpy wrote, as in the published archive: not what Python 3 writes."""
    flat = pixels.transpose(0, 3, 1, 2).tobytes()
    rows = b"M" + struct.pack("<H", len(labels))
    array = b"".join(
        [
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R",
            b"(K\x01" + rows + b"M\x00\x0c\x86",  # version 1, shape (rows, 3072)
            b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + struct.pack("<i", len(flat)) + flat + b"tb",
        ]
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels.tolist()) + b"e"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u.")


def write_classes(root: Path, pixels, labels, names=CLASSES) -> None:
    for i, (picture, label) in enumerate(zip(pixels, labels, strict=True)):
        (root / names[label]).mkdir(parents=True, exist_ok=True)
        (root / names[label] / f"{i:03d}.png").write_bytes(png(picture))


def write_layout(layout: str, base: Path) -> Path:
    """40 test and 50 training pictures, in another order for each layout; the folder to name."""
    seed = len(layout)
    test, train = shuffled(*made(40, 1), seed), shuffled(*made(50, 2), seed)
    if layout in ("parquet", "plain_text"):
        root = base / "plain_text" if layout == "plain_text" else base
        write_parquet(root / "test-00000-of-00001.parquet", *test)
        for i, rows in enumerate(np.array_split(np.arange(50), 3)):
            write_parquet(root / f"train-{i:05d}-of-00003.parquet", train[0][rows], train[1][rows])
    elif layout in ("batches", "the batches' own folder"):
        root = base / "cifar-10-batches-py"
        write_batch(root / "test_batch", *test)
        for i, rows in enumerate(np.array_split(np.arange(50), 5)):
            write_batch(root / f"data_batch_{i + 1}", train[0][rows], train[1][rows])
        return base if layout == "batches" else root
    else:
        write_classes(base / "test", *test)
        write_classes(base / "train", *train)
    return base
