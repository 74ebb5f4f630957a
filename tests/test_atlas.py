"""The atlas of heads: maps against plain loops, causes against a model without the head, and what is kept.

Run: pytest tests/test_atlas.py (some seconds).
"""

import json

import numpy as np
import pytest
import torch

from vit.__main__ import main
from vit.architecture import Architecture
from vit.atlas import Atlas, answer, atlas, atlas_lines, find_atlas, kept_path
from vit.checkpoint import Checkpoint, save
from vit.datasets import Pictures
from vit.images import normalise
from vit.patterns import CLASSES, SEED, make_patterns
from vit.scoreboard import Estimate


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(1)
    sizes = Architecture(len(CLASSES), patch_size=8, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=16)
    model = sizes.build(init="tutorial").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    checkpoint = Checkpoint(sizes, CLASSES, (0.5,) * 3, (0.25,) * 3, name="small", id="0" * 12)
    made = make_patterns(70, SEED, split="test")
    ids = np.array([f"{i:012x}" for i in range(70)])
    return model, checkpoint, Pictures(made.images, made.labels, ids, CLASSES, "Made", "test", "d" * 64)


@pytest.fixture(scope="module")
def found(case):
    return atlas(*case, images=70)


def test_a_head_is_what_its_maps_and_its_absence_say(case, found):
    model, checkpoint, pictures = case
    x = normalise(pictures.images, checkpoint)
    with torch.no_grad():
        logits, maps = model(x, return_attn=True)
    right = logits.argmax(-1).numpy() == pictures.labels
    assert found.accuracy == pytest.approx(right.mean())
    for row in found.heads:
        head = maps[row.layer - 1][:, row.head - 1].double()  # (B, N, N)
        entropy = -(head * head.log2()).sum(-1).mean()
        assert row.entropy_bits == pytest.approx(entropy.item(), rel=1e-4)
        assert row.cls_share == pytest.approx(head[:, :, 0].mean().item(), rel=1e-4)
        sums, counts, distance = np.zeros((7, 7)), np.zeros((7, 7)), 0.0
        patches = head[:, 1:, 1:].numpy()
        shares = (patches / patches.sum(-1, keepdims=True)).mean(0)
        for i in range(16):
            for j in range(16):
                down, across = j // 4 - i // 4, j % 4 - i % 4
                sums[down + 3, across + 3] += patches[:, i, j].mean()
                counts[down + 3, across + 3] += 1
                distance += shares[i, j] * 8 * np.hypot(down, across) / 16
        np.testing.assert_allclose(row.offsets, sums / counts, atol=2e-5)
        assert row.distance_px == pytest.approx(distance, rel=1e-4)
        peaks = head[:, 0, 1:].amax(-1)
        expected = [str(pictures.ids[i]) for i in peaks.argsort(descending=True)[:10]]
        assert set(row.strongest) == set(expected)
        weight = model.encoder_blocks[row.layer - 1].attn.out.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[:, 8 * (row.head - 1) : 8 * row.head] = 0
            without = model(x).argmax(-1).numpy() == pictures.labels
            weight.copy_(kept)
        assert row.accuracy_lost == Estimate.of(right.astype(float) - without)


def test_it_answers_in_words_and_keeps_its_figures(found, tmp_path):
    found.save(tmp_path / "atlas.json")
    assert Atlas.load(tmp_path / "atlas.json") == found
    far = max(found.heads, key=lambda head: head.distance_px)
    assert f"head {far.name}" in " ".join(answer(found))
    assert len(atlas_lines(found)) == 1 + 4 + 1 + 5
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no atlas"):
        Atlas.load(tmp_path / "other.json")


def test_the_command_leaves_it_for_the_page(tmp_path, monkeypatch, capsys, case):
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path))
    model, checkpoint, _ = case
    path, out = tmp_path / "small.safetensors", tmp_path / "all.json"
    kept = save(model, checkpoint, path)
    asked = ["atlas", "--checkpoint", str(path), "--data", "patterns", "--images", "20", "--out", str(out)]
    assert main([*asked, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert find_atlas(kept.id) == Atlas.load(out) == Atlas.load(kept_path(kept.id))
    assert printed["pictures"] == 20
    assert find_atlas("f" * 12) is None
