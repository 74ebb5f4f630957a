"""What a run writes while it goes on, read by little and little: its growing metrics, the end of its log.

    watch = Watch(Path("runs/demo"))       # one for all who look at this run
    columns = watch.read()                 # in at most about 80 ms; columns.behind says whether there is more
    steps, losses = columns["loss"]        # (n,) float64 each, steps ascending; empty where there is none
    thinned(steps, losses)                 # at most 800 points, for drawing
    log_tail(Path("runs/demo"))            # the last 40 lines of log.txt

`Watch.read` reads what is new since the last time, so that looking each second costs little however long the
run is; a long history takes a few reads to catch up. `train.runs.read_metrics` reads the same file whole. The
folder may be a stranger's: what cannot be read is passed over and counted. Nothing here imports torch.
"""

import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

import numpy as np

from train.runs import is_metrics_row

READ_SECONDS = 0.08  # of one read
MOST_NAMES = 16
LONGEST_LINE_BYTES = 64 * 1024
_BLOCK_BYTES = 2 * LONGEST_LINE_BYTES  # some 900 lines, a few ms
_SEAL_BYTES = 256  # of the end of what was read: if they still stand there, it is the same file
_LONGEST_SHOWN = 400  # characters of a line of the log
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")


class Series(NamedTuple):
    """One measured quantity. Both arrays are read-only."""

    steps: np.ndarray  # (n,) float64, ascending, each once
    values: np.ndarray  # (n,) float64, finite


_NOTHING = Series(np.empty(0), np.empty(0))


@dataclass(frozen=True, eq=False)
class Columns:
    """What was read of metrics.jsonl up to some moment; it never changes."""

    series: Mapping[str, Series] = field(default_factory=dict)  # by name: step, loss, val_accuracy …
    torn: int = 0  # lines that were passed over
    behind: bool = False  # whether there is more, for the next read
    gone: bool = False  # whether the file was there once and is no longer; the series are those it had

    def __getitem__(self, name: str) -> Series:
        """The series of that name, an empty one where there is none."""
        return self.series.get(name, _NOTHING)


class Watch:
    """Reads RUN/metrics.jsonl and remembers how far it has come. Any number of threads may share it."""

    def __init__(self, run: Path):
        self._file = Path(run) / "metrics.jsonl"
        self._lock = threading.Lock()
        self._start_anew()
        self._columns = Columns()

    def read(self, seconds: float = READ_SECONDS) -> Columns:
        """All that is known now, after reading on for at most about so long. Raises nothing."""
        with self._lock:
            try:
                if not self._file.is_file():  # to open a pipe would wait for its writer
                    raise FileNotFoundError(self._file)
                with self._file.open("rb", buffering=0) as file:
                    behind = self._read_on(file, time.perf_counter() + seconds)
                self._columns = self._snapshot(behind)
            except OSError:
                self._columns = self._snapshot(behind=False, gone=self._identity is not None)
            return self._columns

    def _start_anew(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._offset, self._seal, self._in_long_line = 0, b"", False
        self._torn = 0
        self._growing: dict[str, _Growing] = {}

    def _read_on(self, file: BinaryIO, until: float) -> bool:
        """Take in what is new until that time; whether whole lines are left."""
        status = os.fstat(file.fileno())
        if not self._is_same(file, status):
            self._start_anew()
        self._identity = (status.st_dev, status.st_ino)
        while True:
            file.seek(self._offset)
            block = file.read(_BLOCK_BYTES)
            whole = block[: block.rfind(b"\n") + 1]
            if not whole and len(block) <= LONGEST_LINE_BYTES:
                return False  # at the end, or at a line that is not whole yet
            self._take(whole or block)
            if time.perf_counter() >= until:
                return self._offset < os.fstat(file.fileno()).st_size

    def _is_same(self, file: BinaryIO, status: os.stat_result) -> bool:
        """Whether this is the file that was read before. One who resumes replaces it: see train.runs."""
        if self._identity != (status.st_dev, status.st_ino):
            return False
        file.seek(self._offset - len(self._seal))
        return file.read(len(self._seal)) == self._seal

    def _take(self, block: bytes) -> None:
        """Take in whole lines, or a part of a line that is too long."""
        self._offset += len(block)
        self._seal = (self._seal + block)[-_SEAL_BYTES:]
        if self._in_long_line:  # what is left of it; the line was counted when it began
            block = block[block.find(b"\n") + 1 :] if b"\n" in block else b""
            self._in_long_line = not self._seal.endswith(b"\n")
        elif not block.endswith(b"\n"):
            self._in_long_line = True
            self._torn += 1
            return
        lines = [line for line in block.splitlines() if line.strip()]
        rows = _parsed([line for line in lines if len(line) <= LONGEST_LINE_BYTES])
        self._torn += len(lines) - len(rows)
        found: dict[str, tuple[list[float], list[float]]] = {}
        for row in rows:
            step = row["step"]
            for name, value in row.items():
                if name not in self._growing:
                    if len(self._growing) == MOST_NAMES:
                        continue
                    self._growing[name] = _Growing()
                steps, values = found.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
        for name, (steps, values) in found.items():
            self._growing[name].extend(np.array(steps, float), np.array(values, float))

    def _snapshot(self, behind: bool, gone: bool = False) -> Columns:
        series = {name: each.series() for name, each in self._growing.items()}
        return Columns(MappingProxyType(series), self._torn, behind, gone)


class _Growing:
    """Two arrays that grow by doubling. What was given out is never written again."""

    def __init__(self):
        self._arrays = np.empty((2, 64))  # steps, values
        self._count = 0

    def extend(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Add points in any order; of those with the same step the last one stays."""
        new = np.stack((steps, values))
        since = self._arrays[0, max(0, self._count - 1) : self._count]  # the last step so far, if any
        if (np.diff(np.concatenate((since, steps))) <= 0).any():
            new = np.concatenate((self._arrays[:, : self._count], new), axis=1)
            order = np.argsort(new[0], kind="stable")
            last = np.append(np.diff(new[0, order]) > 0, True)
            new = new[:, order[last]]
            self._arrays, self._count = np.empty((2, 64)), 0
        count = self._count + new.shape[1]
        if count > self._arrays.shape[1]:
            larger = np.empty((2, 2 ** math.ceil(math.log2(count))))
            larger[:, : self._count] = self._arrays[:, : self._count]
            self._arrays = larger
        self._arrays[:, self._count : count] = new
        self._count = count

    def series(self) -> Series:
        shown = self._arrays[:, : self._count]
        shown.flags.writeable = False
        return Series(*shown)


def _parsed(lines: list[bytes]) -> list[dict]:
    """The rows of those lines that hold one, in order."""
    joined = b",".join(lines)
    rows = None
    # One call for many lines is several times as fast. It reads the same rows only if each line begins with
    # the one brace it has: else two torn lines could make up a row.
    if joined.count(b"{") == len(lines) and all(line.startswith(b"{") for line in lines):
        try:
            rows = json.loads(b"[" + joined + b"]")
        except (ValueError, RecursionError):
            rows = None
    if rows is None or len(rows) != len(lines):
        rows = [_row(line) for line in lines]
    return [row for row in rows if is_metrics_row(row)]


def _row(line: bytes):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def thinned(steps: np.ndarray, values: np.ndarray, most: int = 800) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points: neighbours become their mean. The first and the last point stay as they are."""
    if len(steps) <= most:
        return steps, values
    return tuple(np.concatenate((a[:1], _means(a[1:-1], most - 2), a[-1:])) for a in (steps, values))


def _means(array: np.ndarray, most: int) -> np.ndarray:
    cuts = np.arange(0, len(array), math.ceil(len(array) / most))
    return np.add.reduceat(array, cuts) / np.diff(np.append(cuts, len(array)))


def log_tail(run: Path, lines: int = 40, most_bytes: int = 64 * 1024) -> list[str]:
    """The last lines of RUN/log.txt as plain text, long ones cut; none where it cannot be read."""
    path = Path(run) / "log.txt"
    try:
        if not path.is_file():
            return []
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most_bytes))
            data = file.read(most_bytes)
    except OSError:
        return []
    if size > most_bytes and b"\n" in data[:-1]:  # the first line of these is not whole
        data = data.partition(b"\n")[2]
    text = _ANSI.sub("", data.decode("utf-8", "replace"))
    shown = [_printable(line) for line in re.split(r"\r\n|\n|\r", text)]
    return [line for line in shown if line][-lines:]


def _printable(line: str) -> str:
    kept = "".join(c if c.isprintable() else " " if c.isspace() else "" for c in line[: 2 * _LONGEST_SHOWN])
    return kept if len(kept) <= _LONGEST_SHOWN else kept[: _LONGEST_SHOWN - 1] + "…"
