"""The bench prints every row and does its sums right. How fast anything is, is not for tests to say."""

import json

import pytest

from vit.__main__ import main
from vit.bench import BY_HEAD, CHEFER, FUSED, HEAT, LIGHT, MAPS, PLAIN, Bench, Rate, Row, bench, bench_lines


@pytest.fixture(scope="module")
def found() -> Bench:
    return bench(batches=(1, 2), repeats=1, pictures=8)


def test_has_every_row(found):
    rows = [(row.batch, row.what) for row in found.rows]
    assert rows == [
        *((1, what) for what in (PLAIN, MAPS, FUSED, BY_HEAD, CHEFER, LIGHT, HEAT)),
        *((2, what) for what in (PLAIN, MAPS, FUSED, BY_HEAD)),
    ]
    assert found.rate.pictures == 8


def test_ratios_are_those_of_the_times(found):
    for row in found.rows:
        plain = next(other for other in found.rows if other.batch == row.batch and other.what == PLAIN)
        assert row.ratio == pytest.approx(row.ms / plain.ms)  # of one round
        assert 0 < row.ms < 60_000
    assert found.rate.ratio == pytest.approx(found.rate.explained_per_s / found.rate.classified_per_s)


def test_says_which_goals_held():
    rows = (Row(1, PLAIN, 5, 1, None), Row(1, BY_HEAD, 6, 1.2, 1.25), Row(1, LIGHT, 20, 4, 3))
    lines = bench_lines(Bench("cpu", 2, "2.6", rows, Rate(8, "random pixels", 90, 100, 0.9, 0.85)))
    verdicts = {line.split("  ")[0]: line.split()[-1] for line in lines if "goal" in line}
    assert list(verdicts.values()) == ["held", "MISSED", "held"]
    assert "2 threads" in lines[0]


def test_the_command_passes_its_options_on_and_prints_all(found, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("vit.bench.bench", lambda *args, **options: asked.append((args, options)) or found)
    argv = ["bench", "--batches", "1,2", "--repeats", "1", "--device", "cpu"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert all(row.what in printed for row in found.rows)
    assert main([*argv, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [(row["batch"], row["what"]) for row in values["rows"]] == [
        (row.batch, row.what) for row in found.rows
    ]
    assert values["rate"]["held"] == found.rate.held
    for args, options in asked:
        assert args == ((1, 2), 1, None)
        assert options["device"] == "cpu"
