"""The plain script is the tutorial's model, operations are counted right, the bench prints what it found."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from train import bench as bench_module
from train.__main__ import main
from train.bench import GOALS, PLAIN, bench_lines, step_gflop
from train.config import preset
from train.plain import PlainTransformer, plain_step, plain_transforms
from vit.model import VisualTransformer


def test_the_plain_script_is_the_tutorials_model():
    """Independent of our model but for the names of its parameters."""
    torch.manual_seed(0)
    plain, ours = PlainTransformer(), VisualTransformer(10, init="tutorial")
    assert sum(p.numel() for p in plain.parameters()) == 3_189_514
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(x), ours.eval()(x), atol=1e-4, rtol=1e-4)
    dropouts = [module.p for module in plain.modules() if isinstance(module, torch.nn.Dropout)]
    assert dropouts == [0.1] * (1 + 6 * 4)


def test_a_plain_step_learns():
    torch.manual_seed(0)
    model = PlainTransformer()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8)
    losses = [plain_step(model, optimiser, x, y) for _ in range(6)]
    assert losses[-1] < losses[0]


def test_the_plain_transforms_are_nine():
    assert len(plain_transforms().transforms) == 9


@pytest.mark.parametrize("tokens", [65, 33])
def test_operations_are_those_that_torch_counts(tokens):
    """Of the plain model, whose every product torch sees; forward alone, which is a third of the step."""
    model = PlainTransformer()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if tokens == 65:
            model(torch.randn(2, 3, 32, 32))
        else:  # what the blocks cost for fewer tokens
            model.patch_embed.conv(torch.randn(2, 3, 32, 32))
            x = torch.randn(2, tokens, 256)
            for block in model.encoder_blocks:
                x = block(x)
    counted = 3 * counter.get_total_flops() / 2 / 1e9
    assert step_gflop(preset("fast"), tokens, cls_only=False) == pytest.approx(counted, rel=1e-3)


def test_our_own_operations_are_those_that_torch_counts():
    model = VisualTransformer(10, dropout=0.1).train()  # with dropout attention is written out, on a CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(2, 3, 32, 32))
    counted = 3 * counter.get_total_flops() / 2 / 1e9
    assert step_gflop(preset("tutorial"), 65) == pytest.approx(counted, rel=1e-3)


def test_one_round_prints_every_row(monkeypatch, capsys):
    monkeypatch.setattr(bench_module, "BATCH", 4)
    assert main(["bench", "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(row["what"], row["precision"]): row for row in found["rows"]}
    assert rows[PLAIN, "float32"]["ratio"] == 1
    assert {what for what, _ in rows} >= {PLAIN, *GOALS}
    for row in rows.values():
        assert row["images_per_second"] > 0
        assert row["share_of_limit"] is None or 0 < row["share_of_limit"] < 3
    assert found["limit_gflops"] > 0


def test_lines_say_what_held():
    row = bench_module.Row("tutorial", "float32", 100.0, 1.3, 0.5, 0.02, None, None, 1.2, None)
    slow = bench_module.Row("fast, all patches", "float32", 90.0, 1.6, 0.61, 0.2, 0.1, 0.01, 1.7, 0.6)
    lines = bench_lines(bench_module.Bench("cpu", 2, "2.14", 240.0, 5, (row, slow)))
    assert "ratio >= 1.2 held" in lines[4]
    assert "ratio >= 1.7 MISSED" in lines[5]
    assert "limit >= 60% held" in lines[5]
    assert "augm. < 5% MISSED" in lines[5]
    assert "240 GFLOP/s" in lines[1]


@pytest.mark.parametrize("rounds", ["0", "-1"])
def test_less_than_one_round_is_refused(rounds, capsys):
    assert main(["bench", "--rounds", rounds]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
