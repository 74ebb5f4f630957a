"""Reading what a run writes, by little and little, is reading it whole; whatever is wrong is passed over.

Run: pytest tests/test_watch.py (some seconds).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.figures import Series as ReportSeries
from train.figures import _thinned
from train.runs import Run, append_metrics, cut_metrics, read_metrics
from train.watch import LONGEST_LINE_BYTES, MOST_NAMES, Watch, log_tail, thinned

ROOT = Path(__file__).parents[1]
NAMES = ("loss", "lr", "val_accuracy")


def line(step, **values) -> bytes:
    return json.dumps({"step": step, **values}).encode() + b"\n"


def read_all(watch: Watch, seconds: float = 1.0):
    """What it says when it has caught up."""
    columns = watch.read(seconds)
    while columns.behind:
        columns = watch.read(seconds)
    return columns


def expected(run: Path) -> dict[str, dict[float, float]]:
    """The last value of each name at each step, by the reader of whole files."""
    found: dict[str, dict[float, float]] = {}
    for row in read_metrics(Run(run)):
        for name, value in row.items():
            found.setdefault(name, {})[float(row["step"])] = float(value)
    return found


def points(columns) -> dict[str, dict[float, float]]:
    for steps, values in columns.series.values():
        assert steps.dtype == values.dtype == np.float64
        assert (np.diff(steps) > 0).all()
        assert np.isfinite(values).all()
    return {name: dict(zip(*each, strict=True)) for name, each in columns.series.items()}


numbers = st.one_of(st.floats(), st.integers(-(2**70), 2**70), st.just(10**310), st.just(True), st.none())
rows = st.builds(
    lambda step, values: line(step, **values),
    st.one_of(st.integers(0, 40), st.sampled_from([2.0, True, None, "3", 10**400, -1])),
    st.dictionaries(st.sampled_from(NAMES), numbers, max_size=3),
)
good_rows = st.builds(lambda step, loss: line(step, loss=loss), st.integers(0, 60), st.floats(-9, 9))
damaged = st.sampled_from([
    b"\n", b"  \n", b"[]\n", b"3\n", b"null\n", b'"{"\n', b"\xff\xfe{}\n", b"\x00\n", b"-Infinity\n", b'{"st',
    b'\xef\xbb\xbf{"step": 7}\n', b'{"step": 4, "loss": 2\n', b'"lr": 3}\n', b'{"step": 5}, {"step": 6}\n',
    b'{"step": 8}\r{"step": 9}\r\n', b'  {"step": 10, "loss": 1}\n', b'{"step": 11, "step": 12, "loss": 5}\n',
    b'{"step": 13, "lr": {"a": 1}}\n', b'{"step": 14, "loss": [1]}\n', b'{"step": 17}}\n', b'{"a": "}\n',
    b'{"step": 15, "loss": ' + b"[" * 20_000 + b"\n", b'{"step": 16, "loss": ' + b"9" * 5000 + b"}\n",
    b'{", "step": 3}\n', b'{"step": 18},\n', b'{"a": 1},{"step": 19\n',
])  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(
    lines=st.lists(st.one_of(rows, good_rows, damaged), max_size=30),
    cuts=st.lists(st.floats(0, 1), max_size=8),
    seconds=st.sampled_from([0.0, 1.0]),
)
def test_in_pieces_it_reads_what_is_there_as_a_whole(lines, cuts, seconds):
    data = b"".join(lines) + b"\n"
    at = [0, *sorted(round(cut * len(data)) for cut in cuts), len(data)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        watch = Watch(run)
        for start, end in pairwise(at):
            with Run(run).metrics_file.open("ab") as file:
                file.write(data[start:end])
            columns = read_all(watch, seconds)
        assert points(columns) == expected(run)
        written = sum(bool(each.strip()) for each in data.splitlines())
        assert columns.torn == written - len(read_metrics(Run(run)))
        assert not columns.gone


@pytest.mark.parametrize(
    "lines",
    [
        [b'{"step": 4, "loss": 2', b'"lr": 3}', b'{"step": 5}, {"step": 6}'],
        [b'{"', b'{": 1, "step": 3}'],
        [b'{"', b'{": 1, "step": 3}', b'{"step": 5}, {"step": 6}'],
    ],
)
def test_torn_lines_do_not_make_up_a_row(tmp_path, lines):
    """However many lines are parsed at once: joined by commas, these hold as many rows as lines, or fewer."""
    assert json.loads(b"[" + b",".join(lines) + b"]")
    Run(tmp_path).metrics_file.write_bytes(b"\n".join(lines) + b"\n")
    columns = Watch(tmp_path).read()
    assert read_metrics(Run(tmp_path)) == []
    assert (points(columns), columns.torn) == ({}, len(lines))


def test_many_lines_in_pieces_of_any_size(tmp_path):
    """Over many blocks, with steps that come again and again."""
    rng = np.random.default_rng(3)
    steps = np.abs(np.cumsum(rng.integers(-3, 6, 12_000)))
    data = b"".join(line(int(step), loss=float(rng.normal()), lr=1e-3) for step in steps)
    assert len(data) > 4 * LONGEST_LINE_BYTES
    watch, at = Watch(tmp_path), 0
    while at < len(data):
        size = int(rng.integers(1, 90_000))
        with Run(tmp_path).metrics_file.open("ab") as file:
            file.write(data[at : at + size])
        at += size
        columns = watch.read(0.0)
    columns = read_all(watch)
    assert points(columns) == expected(tmp_path)
    assert columns.torn == 0


def test_nothing_is_there_yet(tmp_path):
    for run in (tmp_path, tmp_path / "none"):
        columns = Watch(run).read()
        assert (dict(columns.series), columns.torn, columns.behind, columns.gone) == ({}, 0, False, False)
        steps, values = columns["loss"]
        assert len(steps) == len(values) == 0


def test_a_line_waits_until_it_is_whole(tmp_path):
    file, whole = Run(tmp_path).metrics_file, line(2, loss=0.5)
    file.write_bytes(line(1, loss=1.0) + whole[:-1])
    watch = Watch(tmp_path)
    columns = watch.read()
    assert points(columns)["loss"] == {1: 1.0}
    assert (columns.torn, columns.behind) == (0, False)
    with file.open("ab") as more:
        more.write(b"\n")
    assert points(watch.read())["loss"] == {1: 1.0, 2: 0.5}


def test_a_column_has_its_own_steps_and_the_last_of_equal_ones(tmp_path):
    watch, run = Watch(tmp_path), Run(tmp_path)
    for step in range(1, 8):
        append_metrics(run, {"step": step, "loss": 1 / step} | ({"val_accuracy": 0.5} if step == 4 else {}))
        watch.read()
    append_metrics(run, {"step": 3, "loss": 9.0})
    columns = watch.read()
    assert columns["loss"].steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert columns["loss"].values[2] == 9.0
    assert columns["val_accuracy"].steps.tolist() == [4]


@pytest.mark.parametrize("size", [LONGEST_LINE_BYTES + 1, 3 * LONGEST_LINE_BYTES, 20 * LONGEST_LINE_BYTES])
@pytest.mark.parametrize("piece", [50_000, 140_000, 10**9])
def test_a_line_that_is_too_long_is_one_torn_line(tmp_path, size, piece):
    long = b'{"step": 2, "loss": ' + b" " * (size - 22) + b"5}\n"
    assert json.loads(long) == {"step": 2, "loss": 5}
    data = line(1, loss=1.0) + long + line(3, loss=3.0) + long + long + line(4, loss=4.0)
    watch = Watch(tmp_path)
    for at in range(0, len(data), piece):
        with Run(tmp_path).metrics_file.open("ab") as file:
            file.write(data[at : at + piece])
        columns = read_all(watch)
    assert points(columns)["loss"] == {1: 1.0, 3: 3.0, 4: 4.0}
    assert columns.torn == 3


def test_the_longest_line_is_read(tmp_path):
    row = b'{"step": 2, "loss": ' + b" " * (LONGEST_LINE_BYTES - 22) + b"5}"
    assert len(row) == LONGEST_LINE_BYTES
    Run(tmp_path).metrics_file.write_bytes(row + b"\n")
    assert points(read_all(Watch(tmp_path)))["loss"] == {2: 5}


def test_a_strange_file_has_few_columns(tmp_path):
    names = [f"name {i}" for i in range(1000)]
    data = b"".join(line(step, **dict.fromkeys(names[step : step + 5], 1.0)) for step in range(900))
    Run(tmp_path).metrics_file.write_bytes(data)
    columns = read_all(Watch(tmp_path))
    assert len(columns.series) == MOST_NAMES
    assert len(columns["step"].steps) == 900


# --- files that are replaced, or vanish


def started(tmp_path: Path, steps: int = 50) -> tuple[Watch, Path]:
    file = Run(tmp_path).metrics_file
    file.write_bytes(b"".join(line(step, loss=step / 7) for step in range(1, steps + 1)))
    watch = Watch(tmp_path)
    assert len(watch.read()["loss"].steps) == steps
    return watch, file


@pytest.mark.parametrize("more", [0, 30, 31, 80])
def test_a_run_that_resumes_is_read_anew(tmp_path, more):
    """Shorter, as long, or longer than what was read, by the time somebody looks."""
    watch, _ = started(tmp_path)
    cut_metrics(Run(tmp_path), 20)
    for step in range(21, 21 + more):
        append_metrics(Run(tmp_path), {"step": step, "loss": -1.0})
    columns = read_all(watch)
    assert points(columns) == expected(tmp_path)
    assert (columns["loss"].values < 0).sum() == more


@pytest.mark.parametrize("steps", [10, 50, 90])
def test_the_same_file_with_other_content_is_read_anew(tmp_path, steps):
    watch, file = started(tmp_path)
    before = file.stat()
    file.write_bytes(b"".join(line(step, loss=step / 3) for step in range(1, steps + 1)))
    assert file.stat().st_ino == before.st_ino
    assert points(read_all(watch)) == expected(tmp_path)


def test_another_file_with_the_same_end_is_read_anew(tmp_path):
    watch, file = started(tmp_path)
    data = file.read_bytes()
    other = tmp_path / "other"
    other.write_bytes(data.replace(b'"step": 1,', b'"step": 0,', 1))
    other.replace(file)
    assert len(file.read_bytes()) == len(data)
    assert watch.read()["loss"].steps[0] == 0


def test_torn_lines_are_counted_anew_with_the_file(tmp_path):
    watch, file = started(tmp_path)
    with file.open("ab") as more:
        more.write(b"torn\n{}\n")
    assert watch.read().torn == 2
    cut_metrics(Run(tmp_path), 20)
    assert watch.read().torn == 0


def test_a_deleted_run_keeps_its_columns(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    watch, _ = started(run)
    shutil.rmtree(run)
    columns = watch.read()
    assert (columns.gone, columns.behind, len(columns["loss"].steps)) == (True, False, 50)
    run.mkdir()
    Run(run).metrics_file.write_bytes(line(1, loss=2.0))  # another run in its place
    columns = watch.read()
    assert (columns.gone, points(columns)["loss"]) == (False, {1: 2.0})
    Run(run).metrics_file.unlink()
    Run(run).metrics_file.mkdir()
    assert watch.read().gone


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path):
    for name in ("metrics.jsonl", "log.txt"):
        os.mkfifo(tmp_path / name)
    reading = threading.Thread(target=lambda: (Watch(tmp_path).read(), log_tail(tmp_path)), daemon=True)
    reading.start()
    reading.join(5)
    assert not reading.is_alive()


# --- shared by many, for long


def test_what_was_given_out_does_not_change(tmp_path):
    watch, _ = started(tmp_path, 60)
    before = watch.read()
    kept = {name: (each.steps.copy(), each.values.copy()) for name, each in before.series.items()}
    for step in (*range(61, 200), 5, 7, 60, *range(200, 300)):
        append_metrics(Run(tmp_path), {"step": step, "loss": -3.0})
        watch.read()
    assert len(watch.read()["loss"].steps) == 299
    for name, (steps, values) in kept.items():
        assert np.array_equal(before[name].steps, steps)
        assert np.array_equal(before[name].values, values)
    for array in before["loss"]:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(TypeError):
        before.series["loss"] = None


def test_threads_share_a_watch(tmp_path):
    watch, wrong, ended = Watch(tmp_path), [], threading.Event()

    def look() -> None:
        seen = 0
        while not ended.is_set() or watch.read(0.0).behind:
            steps, values = watch.read(0.001)["loss"]
            if len(steps) < seen or not np.array_equal(values, steps * 2):
                wrong.append((seen, len(steps)))
            seen = len(steps)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    with Run(tmp_path).metrics_file.open("ab", buffering=0) as file:
        for start in range(0, 30_000, 100):
            data = b"".join(line(step, loss=2.0 * step) for step in range(start, start + 100))
            file.write(data[:1234])
            file.write(data[1234:])
    ended.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert np.array_equal(read_all(watch)["loss"].steps, np.arange(30_000))


def test_a_read_ends_in_time_and_the_next_one_goes_on(tmp_path):
    Run(tmp_path).metrics_file.write_bytes(b"".join(line(step, loss=0.5) for step in range(60_000)))
    watch, reads, spent = Watch(tmp_path), 0, []
    columns, seen = None, -1
    while columns is None or columns.behind:
        began = time.perf_counter()
        columns = watch.read(0.02)
        spent.append(time.perf_counter() - began)
        assert seen < len(columns["loss"].steps)
        seen, reads = len(columns["loss"].steps), reads + 1
    assert seen == 60_000
    assert reads > 2
    assert sorted(spent)[len(spent) // 2] < 0.1  # the middle one: the machine may be busy


def test_it_needs_no_torch():
    code = "import sys, train.watch; print([m for m in ('torch', 'streamlit') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- fewer points


@settings(deadline=None)
@given(count=st.integers(0, 3000), most=st.integers(3, 900), seed=st.integers(0, 9))
def test_thinned(count, most, seed):
    values = np.random.default_rng(seed).normal(size=count)
    steps = np.cumsum(np.random.default_rng(seed).integers(1, 5, count)).astype(float)
    few, means = thinned(steps, values, most)
    assert len(few) == len(means) <= most
    assert (np.diff(few) > 0).all()
    if count <= most:
        assert np.array_equal(few, steps)
        assert np.array_equal(means, values)
        return
    assert (few[0], means[0], few[-1], means[-1]) == (steps[0], values[0], steps[-1], values[-1])
    parts = -(-(count - 2) // (most - 2))
    middle = [values[at : min(at + parts, count - 1)] for at in range(1, count - 1, parts)]
    assert means[1:-1] == pytest.approx([part.mean() for part in middle])
    assert len(few) > most / 2 or count < 2 * most


def test_thinned_does_the_arithmetic_of_the_report():
    steps, values = np.arange(1.0, 5003.0), np.random.default_rng(0).normal(size=5002)
    of_report = _thinned(ReportSeries("", steps[1:-1], values[1:-1]))
    few, means = thinned(steps, values, most=402)
    assert np.array_equal(few[1:-1], of_report.steps)
    assert np.array_equal(means[1:-1], of_report.values)


# --- the log


def test_the_end_of_a_log(tmp_path):
    assert log_tail(tmp_path) == []
    (tmp_path / "log.txt").write_bytes(b"".join(b"line %d\n" % i for i in range(100)) + b"the last")
    assert log_tail(tmp_path, 3) == ["line 98", "line 99", "the last"]
    assert len(log_tail(tmp_path)) == 40


def test_a_log_is_not_read_whole(tmp_path):
    with (tmp_path / "log.txt").open("wb") as file:
        file.truncate(40 * 2**30)  # no disk is that fast
        file.seek(0, os.SEEK_END)
        file.write(b"torn\n" + b"".join(b"%06d\n" % i for i in range(5000)))
    tail = log_tail(tmp_path, 10**6, most_bytes=7_003)
    assert tail == [f"{i:06d}" for i in range(4000, 5000)]


def test_a_log_is_plain_text(tmp_path):
    (tmp_path / "log.txt").write_bytes(
        b"\x1b[31mred\x1b[0m and \x1b]8;;http://x\x07link\x1b]8;;\x07\r\n"
        b"10 %\r20 %\x07\x00\n\n\tcaf\xc3\xa9 \xff\xe2\x80\xae.\n" + b"long " * 1000 + b"\n"
    )
    red, ten, twenty, strange, long = log_tail(tmp_path)
    assert (red, ten, twenty) == ("red and link", "10 %", "20 %")
    assert strange == " café \ufffd."
    assert len(long) == 400
    assert long.endswith("…")


def test_a_log_of_one_long_line(tmp_path):
    (tmp_path / "log.txt").write_bytes(b"x" * 200_000)
    assert [len(each) for each in log_tail(tmp_path)] == [400]
