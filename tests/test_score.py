"""`python -m vit score`: what is kept, resumed, shared among processes, and said about it.

Run: pytest tests/test_score.py (some seconds).
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import vit.score
from vit.architecture import Architecture
from vit.checkpoint import Checkpoint
from vit.datasets import Pictures
from vit.faithfulness import random_maps
from vit.images import normalise
from vit.patterns import CLASSES, SEED, make_patterns
from vit.score import Plan, chosen_rows, score
from vit.scoreboard import Estimate, Scores, table_lines, verdict
from vit.truth import Blobs, Redrawn, blob_order, on_object, points_at_object

PLAN = Plan(methods=("rollout", "leave_one_out", "random"), images=10, steps=2, orders=2)


@pytest.fixture(scope="module")
def case():
    """A small model and the first made pictures, under another name than the data set's."""
    torch.manual_seed(0)
    architecture = Architecture(
        len(CLASSES), patch_size=16, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=16
    )
    checkpoint = Checkpoint(architecture, CLASSES, (0.5,) * 3, (0.25,) * 3, name="small", id="0" * 12)
    made = make_patterns(40, SEED, split="test")
    ids = np.array([f"{i:012x}" for i in range(40)])
    pictures = Pictures(made.images, made.labels, ids, CLASSES, "Made", "test", "d" * 64)
    return architecture.build(init="tutorial").eval(), checkpoint, pictures


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(vit.score, "CHUNK", 4)


def numbers(found: Scores) -> Scores:
    """Without what the clock says, and without the runs: the ends of curves are run again on resuming."""
    methods = tuple(replace(row, explained_ms=0) for row in found.methods)
    return replace(found, methods=methods, seconds={}, runs=0, runs_ratio=0)


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.npz")}


def test_a_run_that_was_stopped_goes_on_where_it_was(case, tmp_path, monkeypatch):
    whole = score(*case, PLAN, folder=tmp_path / "whole")
    written, write_whole = [], vit.score.write_whole

    def stops_in_the_second_chunk(path, write):
        if len(written) == 5:
            raise KeyboardInterrupt
        written.append(path)
        write_whole(path, write)

    monkeypatch.setattr(vit.score, "write_whole", stops_in_the_second_chunk)
    with pytest.raises(KeyboardInterrupt):
        score(*case, PLAN, folder=tmp_path / "stopped")
    monkeypatch.setattr(vit.score, "write_whole", write_whole)
    kept = files(tmp_path / "stopped")
    assert len(kept) == 5
    again = score(*case, PLAN, folder=tmp_path / "stopped")
    assert kept.items() <= files(tmp_path / "stopped").items()  # none was written anew
    assert numbers(again) == numbers(whole)


def test_other_methods_and_more_pictures_take_what_is_there(case, tmp_path):
    score(*case, replace(PLAN, images=8), folder=tmp_path)
    kept = files(tmp_path)
    more = replace(PLAN, methods=("chefer", *PLAN.methods))
    found = score(*case, more, folder=tmp_path)
    assert kept.items() <= files(tmp_path).items()
    assert numbers(found) == numbers(score(*case, more, folder=tmp_path / "new"))


def test_two_processes_find_what_one_does(case, tmp_path):
    one = score(*case, PLAN, folder=tmp_path / "one")
    assert score(*case, PLAN, folder=tmp_path / "two", rank=1, world=2) is None
    assert len(files(tmp_path / "two")) == 4  # its one chunk of three
    assert numbers(score(*case, PLAN, folder=tmp_path / "two", rank=0, world=2)) == numbers(one)


def test_what_a_dead_process_owes_is_done_by_the_first(case, tmp_path, monkeypatch):
    monkeypatch.setattr(vit.score, "_LEAST_WAIT_S", 0)
    found = score(*case, PLAN, folder=tmp_path / "two", rank=0, world=2)
    assert numbers(found) == numbers(score(*case, PLAN, folder=tmp_path / "one"))


def test_the_table_ranks_all_but_the_ceiling(case, tmp_path):
    found = score(*case, PLAN, folder=tmp_path)
    *ranked, last = found.methods
    assert last.method == "leave_one_out"
    assert "removed" not in last.difference
    means = [np.mean([estimate.mean for estimate in row.difference.values()]) for row in ranked]
    assert means == sorted(means, reverse=True)
    assert next(row for row in ranked if row.method == "random").shuffled == 1  # it looks at no model
    lines = table_lines(found)
    assert lines[-5].startswith("| Leave one patch out | – |")
    found.save(tmp_path / "scores.json")
    assert Scores.load(tmp_path / "scores.json") == found
    (tmp_path / "scores.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="does not hold scores"):
        Scores.load(tmp_path / "scores.json")


def test_an_interval_is_that_of_the_normal_distribution():
    values = np.array([0.1, 0.4, 0.7, -0.2])
    found = Estimate.of(values)
    assert found.mean == pytest.approx(0.25)
    assert found.half == pytest.approx(1.959964 * np.sqrt(((values - 0.25) ** 2).sum() / 3 / 4))
    with pytest.raises(ValueError, match="two pictures"):
        Estimate.of(values[:1])


@pytest.mark.parametrize(
    ("signs", "expected"),
    [("+++0", "better"), ("+++-", "better"), ("++00", "no clear difference"), ("---+", "worse"),
     ("+++", "better"), ("++", "no clear difference")],
)  # fmt: skip
def test_three_removals_must_agree(signs, expected):
    estimates = {str(i): Estimate({"+": 1, "-": -1, "0": 0.4}[sign], 0.5) for i, sign in enumerate(signs)}
    assert verdict(estimates) == expected


def test_classes_take_turns():
    labels = np.array([0, 0, 0, 1, 2, 1, 2, 2])
    assert chosen_rows(labels, 5).tolist() == [0, 3, 4, 1, 5]
    assert chosen_rows(labels, 99).tolist() == [0, 3, 4, 1, 5, 6, 2, 7]


def test_truth_is_what_redrawing_says(case):
    model, checkpoint, _ = case
    rows = np.array([7, 2, 30])
    redrawn = Redrawn.of(rows, "test")
    target = torch.tensor([0, 1, 2])
    blobs = Blobs.of(model, checkpoint, redrawn, slice(0, 3), target)
    whole, without = (make_patterns(31, SEED, split="test", without=b).images[rows] for b in (None, 1))
    with torch.no_grad():
        logits = [model(normalise(images, checkpoint)) for images in (whole, without)]
    expected = (logits[0] - logits[1])[range(3), target]
    torch.testing.assert_close(blobs.effects[1], expected)
    changed = (whole != without).any(-1)  # (3, 32, 32), patches of 16 px
    np.testing.assert_allclose(blobs.shares[1], changed.reshape(3, 2, 16, 2, 16).mean((2, 4)).reshape(3, 4))
    shares = blobs.shares[2]
    perfect = torch.einsum(
        "nbp,nb->bp", torch.linalg.pinv(blobs.shares.transpose(0, 1)).permute(2, 0, 1), blobs.effects.double()
    )
    assert blob_order(perfect, blobs).tolist() == [1, 1, 1]
    maps = random_maps([1, 2, 3], 4, 1)[0] - 0.5
    positive = maps.clamp_min(0)
    torch.testing.assert_close(on_object(maps, blobs), (positive * shares).sum(1) / positive.sum(1))
    assert on_object(-torch.ones(3, 4), blobs).tolist() == [0, 0, 0]
    assert points_at_object(maps, blobs).tolist() == [
        float(shares[b, maps[b].argmax()] >= 0.5) for b in range(3)
    ]
