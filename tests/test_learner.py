"""One step of training: the same to the bit wherever it is taken up, and the tutorial's where that is asked.

Run: pytest tests/test_learner.py (about 20 s).
"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load as read_safetensors
from safetensors.torch import save as write_safetensors
from torch.testing import assert_close

from train import augment
from train.config import TrainConfig, preset
from train.learner import Learner, Machine, as_tensors, channel_figures, whiten_filters
from train.workers import Workers

CPU = Machine("cpu", "float32", compiled=False, threads=1, torch=torch.__version__)
TINY = TrainConfig(
    epochs=4.0, minutes=0.0, batch=8, patch_size=8, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=24,
    device="cpu",
)  # fmt: skip
# Everything that draws or remembers something, so that nothing of it can be forgotten.
ALL = {
    "dropout": 0.2, "cutmix": 0.7, "random_erasing": 0.5, "augment": "randaugment", "stochastic_depth": 0.3,
    "keep_patches": 0.5, "full_from": 0.8, "clip": 1.0, "label_smoothing": 0.1,
}  # fmt: skip
REMEMBERED = [
    pytest.param({"optimiser": optimiser, "ema": ema, **ALL}, id=f"{optimiser}, ema {ema}")
    for optimiser in ("adamw", "muon")
    for ema in (0.9, 0.0)
]


def pictures(n: int = 42, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise in tints that tell the class."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(n) % classes
    tints = torch.randint(0, 256, (classes, 3, 1, 1), generator=generator)
    noise = torch.randint(0, 256, (n, 3, 32, 32), generator=generator)
    return ((noise + 2 * tints[labels]) // 3).to(torch.uint8), labels


def learner(config: TrainConfig = TINY, machine: Machine = CPU, n: int = 42, **changes) -> Learner:
    return Learner(replace(config, **changes), machine, *pictures(n), num_classes=3)


def train(learner: Learner, steps: range, of: int = 20) -> list[float]:
    return [learner.step(step, (step + 0.5) / of).item() for step in steps]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """To the bit."""
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# --- the same again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", REMEMBERED)
def test_what_is_saved_goes_on_to_the_bit(changes):
    """A learner never touched, one of the same settings, and one that takes up what was saved half-way."""
    untouched, again = learner(**changes), learner(**changes)
    losses = train(untouched, range(20))
    assert train(again, range(12)) == losses[:12]
    saved = read_safetensors(write_safetensors(again.tensors()))

    resumed = learner(**changes)
    train(resumed, range(3))  # what it did before is forgotten
    torch.manual_seed(99)  # and what the generator of its process was at does not count
    resumed.load(saved)
    assert_same(resumed.tensors(), saved)
    assert train(resumed, range(12, 20)) == losses[12:]
    assert_same(resumed.tensors(), untouched.tensors())
    assert_same(dict(resumed.best_model.state_dict()), dict(untouched.best_model.state_dict()))
    assert (resumed.ema is None) == (changes["ema"] == 0)


def test_what_is_saved_is_a_copy():
    one = learner()
    saved = one.tensors()
    before = {name: tensor.clone() for name, tensor in saved.items()}
    train(one, range(2))
    assert_same(saved, before)
    other = learner()
    other.load(saved)
    train(other, range(2))
    assert_same(saved, before)


def test_another_seed_is_another_run():
    first, second = learner(seed=1), learner(seed=2)
    assert not torch.equal(first.model.pos_embed, second.model.pos_embed)
    assert not torch.equal(first._order_of(0), second._order_of(0))


def test_what_another_learner_saved_is_refused_and_changes_no_weight():
    one = learner(ema=0.9)
    before = one.tensors()
    for other in (learner(mlp_dim=32), learner(num_layers=3), learner(ema=0.0), learner(optimiser="adamw")):
        train(other, range(1))
        with pytest.raises(ValueError, match=r"another model|saved with other settings"):
            one.load(other.tensors())
        assert_same({n: t for n, t in one.tensors().items() if n.endswith(".weights")},
                    {n: t for n, t in before.items() if n.endswith(".weights")})  # fmt: skip


# --- the order of the pictures ----------------------------------------------------------------------------


def numbered(n: int, **changes) -> Learner:
    """A learner on pictures whose every pixel is their number: a batch, not varied, tells which they were."""
    config = replace(TINY, augment="none", whiten=False, mean_and_std="half", **changes)
    images = torch.arange(n, dtype=torch.uint8)[:, None, None, None].expand(n, 3, 32, 32).contiguous()
    return Learner(config, CPU, images, torch.arange(n) % 3, num_classes=3)


def seen(learner: Learner, step: int) -> list[int]:
    x, y, _ = learner.prepare(step, 0.5)
    numbers = ((x[:, 0, 0, 0] / 2 + 0.5) * 255).round().long()
    assert torch.equal(y, numbers % 3)  # each with its own label
    return numbers.tolist()


def test_an_epoch_shows_each_picture_at_most_once_in_an_order_of_its_own():
    one, same, other = numbered(42), numbered(42), numbered(42, seed=1)
    assert one.steps_per_epoch == 5  # 42 pictures are five batches of 8; two wait for another epoch
    epochs = [[number for step in range(5 * e, 5 * e + 5) for number in seen(one, step)] for e in range(4)]
    for order in epochs:
        assert len(set(order)) == 40
        assert set(order) <= set(range(42))
    assert len({tuple(order) for order in epochs}) == 4
    assert len({tuple(sorted(order)) for order in epochs}) > 1  # those left out are not always the same
    assert [number for step in range(5) for number in seen(other, step)] not in epochs
    # No order depends on which were asked for before.
    for step in (17, 3, 11, 0):
        assert seen(same, step) == epochs[step // 5][8 * (step % 5) :][:8]


def test_steps_of_a_length():
    one = numbered(42)
    assert [one.steps_for(epochs) for epochs in (0.0, 0.01, 1, 2.5, 80)] == [1, 1, 5, 12, 400]


def test_a_set_smaller_than_a_batch_is_one_batch():
    one = numbered(7, batch=256)
    assert (one.batch, one.steps_per_epoch) == (6, 1)
    assert len(set(seen(one, 0))) == 6


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_pictures_are_one_sentence(n):
    with pytest.raises(ValueError, match=f"^{n} training pictures are too few: there must be at least 2$"):
        Learner(replace(TINY, whiten=False, mean_and_std="half"), CPU, *pictures(n), num_classes=3)


def test_one_process_takes_a_batch_of_any_size():
    one = learner(batch=7, cutmix=1.0)
    assert len(one.prepare(0, 0.5)[0]) == 7
    train(one, range(2))


# --- a batch split over processes -------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_the_parts_of_a_batch_are_the_batch(count):
    """Pictures, labels, patches and gates, to the bit: augmentation is drawn by the place in the batch."""
    changes = ALL | {"dropout": 0.0, "batch": 16, "patch_size": 4}
    whole = learner(**changes)
    x, y, options = whole.prepare(3, 0.1)
    assert options.keys() == {"keep", "branch_gate"}
    parts = []
    for rank in range(count):
        part = learner(**changes)
        part.workers = Workers(rank, count)
        parts.append(part.prepare(3, 0.1))
    assert torch.equal(torch.cat([part[0] for part in parts]), x)
    assert torch.equal(torch.cat([part[1] for part in parts]), y)
    assert torch.equal(torch.cat([part[2]["keep"] for part in parts]), options["keep"])
    assert torch.equal(torch.cat([part[2]["branch_gate"] for part in parts], 2), options["branch_gate"])


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(
        ValueError, match=r"batch of 18 cannot be split over 2 processes: take a multiple of 4$"
    ):
        Learner(replace(TINY, batch=18), CPU, *pictures(), num_classes=3, workers=Workers(0, 2))


# --- what a step does -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_of_the_tutorial_is_a_plain_one(dropout):
    """torch's AdamW at 3e-4 and nothing else said, cross entropy, no average: as in a first script.

    Weight decay alone moves the norms' weights by 3e-6 a step, so five of them tell 0.01 from none.
    """
    sizes = {"batch": 16, "embed_dim": 16, "num_layers": 2, "num_heads": 2, "mlp_dim": 24, "dropout": dropout}
    ours = learner(preset("tutorial", **sizes))
    plain = copy.deepcopy(ours.model)
    optimiser = torch.optim.AdamW(plain.parameters(), lr=3e-4)
    states = []
    ours.model.register_forward_pre_hook(lambda *_: states.append(torch.get_rng_state()))
    images, labels = pictures()
    for step in range(5):
        loss = ours.step(step, (step + 0.5) / 5)
        x, y, options = ours.prepare(step, (step + 0.5) / 5)
        assert options == {}
        torch.set_rng_state(states[step])  # of torch, only dropout draws
        optimiser.zero_grad()
        expected = F.cross_entropy(plain(x), y)
        expected.backward()
        optimiser.step()
        assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    for (name, found), wanted in zip(ours.model.named_parameters(), plain.parameters(), strict=True):
        assert_close(
            found.detach(), wanted.detach(), rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert (ours.ema, ours.best_model) == (None, ours.model)
    assert len({state.numpy().tobytes() for state in states}) == (5 if dropout else 1)
    # Its pictures are the tutorial's: nine transforms, drawn by seed, step and place.
    places = torch.arange(16)
    index = ours._order_of(0)[16:32]
    keys = augment.sample_keys(0, 1, places)
    x, y, _ = ours.prepare(1, 0.5)
    assert torch.equal(x, augment.tutorial(images[index], keys))
    assert torch.equal(y, labels[index])


def test_a_model_is_built_by_the_seed_alone():
    torch.manual_seed(77)
    one = learner(preset("tutorial", embed_dim=16, num_heads=2, num_layers=1, mlp_dim=8, seed=4))
    torch.manual_seed(4)
    expected = one.config.architecture(3).build(init="tutorial")
    assert_same(dict(one.model.state_dict()), dict(expected.state_dict()))


def test_the_rate_follows_the_schedule_and_what_scales_it():
    one = learner(optimiser="muon", lr=0.01, muon_lr=0.02, schedule="linear", warmup=0.2)
    for progress, rate, scale in ((0.1, 1.0, 0.5), (0.2, 1.0, 1.0), (0.6, 0.5, 0.25), (1.0, 1.0, 0.0)):
        before = one.tensors()
        one.step(0, progress, rate)
        rates = {group["lr"] for optimiser in one.optimisers for group in optimiser.param_groups}
        assert sorted(rates) == pytest.approx(sorted({0.01 * scale, 0.02 * scale}))
        moved = [not torch.equal(t, before[n]) for n, t in one.tensors().items() if n.endswith(".weights")]
        assert all(moved) if scale else not any(moved)


def test_a_gradient_is_clipped_to_its_norm():
    """Plain AdamW hides the size of a gradient, but not from what it remembers."""
    norms = {}
    for clip in (0.0, 0.05):
        one = learner(optimiser="adamw", clip=clip)
        train(one, range(1))
        mean_gradient = [t for name, t in one.tensors().items() if name.endswith(".exp_avg")]
        norms[clip] = torch.cat([t.flatten() for t in mean_gradient]).norm().item() / 0.1
    assert norms[0.05] == pytest.approx(0.05, rel=1e-3)
    assert norms[0.0] > 0.2


@pytest.mark.parametrize(("progress", "tokens"), [(0.0, 33), (0.719, 33), (0.72, 65), (1.0, 65)])
def test_all_patches_are_kept_from_the_named_share_on(progress, tokens):
    one = learner(patch_size=4, keep_patches=0.5, full_from=0.72)
    found = []
    one.model.encoder_blocks[0].mlp[0].register_forward_pre_hook(lambda _, x: found.append(x[0].shape[1]))
    one.step(0, progress)
    assert found == [tokens]


def test_evaluation_sees_every_patch_and_picture_as_it_is():
    one = learner(**ALL)
    found = []
    one.best_model.encoder_blocks[0].mlp[0].register_forward_pre_hook(
        lambda _, x: found.append(x[0].shape[1])
    )
    images, _ = pictures(300)
    with torch.no_grad():
        mean, std = (torch.tensor(of)[:, None, None] for of in (one.mean, one.std))
        logits = copy.deepcopy(one.best_model).eval()((images / 255 - mean) / std)
    labels = logits.argmax(1)
    labels[210:] = (labels[210:] + 1) % 3  # so 210 of 300 are right
    found.clear()
    accuracy, loss = one.evaluate(images, labels)
    assert (set(found), accuracy) == ({17}, 0.7)
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)  # without smoothing


@pytest.mark.parametrize("ema", [0.9, 0.0])
def test_an_evaluation_leaves_no_trace(ema):
    changes = ALL | {"ema": ema}
    judged, left_alone = learner(**changes), learner(**changes)
    train(judged, range(3))
    before, state = judged.tensors(), torch.get_rng_state()
    modes = {name: module.training for name, module in judged.model.named_modules()}
    accuracy, loss = judged.evaluate(*pictures(20))
    assert 0 <= accuracy <= 1
    assert loss > 0
    assert_same(judged.tensors(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: module.training for name, module in judged.model.named_modules()} == modes
    assert all(modes.values())
    assert judged.best_model.training == (not ema)  # an average is never in training
    assert judged.evaluate(*pictures(20)) == (accuracy, loss)
    assert all(p.grad is None for p in judged.best_model.parameters())
    train(left_alone, range(3))
    assert train(judged, range(3, 6)) == train(left_alone, range(3, 6))


def test_the_average_is_what_is_judged():
    one = learner(ema=0.999)
    images, labels = pictures(20)
    train(one, range(5))
    assert one.best_model is one.ema.model
    before = one.evaluate(images, labels)
    with torch.no_grad():
        for p in one.model.parameters():
            p.zero_()
    assert one.evaluate(images, labels) == before


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_what_can_be_learned_is_learned(optimiser):
    one = learner(optimiser=optimiser, augment="light", lr=1e-2, muon_lr=1e-2, ema=0.8, label_smoothing=0.0)
    images, labels = pictures()
    before = one.evaluate(images, labels)
    losses = train(one, range(100), of=100)
    assert np.mean(losses[-5:]) < 0.3 * np.mean(losses[:3])
    accuracy, loss = one.evaluate(images, labels)
    assert accuracy > 0.95 > before[0]
    assert loss < 0.3 * before[1]


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_bfloat16_computes_in_it_and_keeps_float32(optimiser):
    machine = replace(CPU, precision="bfloat16")
    one, full = (learner(machine=kind, optimiser=optimiser, **ALL) for kind in (machine, CPU))
    found = []
    one.model.encoder_blocks[0].mlp[0].register_forward_hook(lambda *at: found.append(at[2].dtype))
    losses = train(one, range(6))
    assert set(found) == {torch.bfloat16}
    assert all(np.isfinite(losses))
    assert {t.dtype for n, t in one.tensors().items() if n != "ema.updates"} == {torch.float32}
    assert losses[0] == pytest.approx(train(full, range(1))[0], rel=0.05)
    assert one.evaluate(*pictures(20))[1] == pytest.approx(np.log(3), rel=0.3)


# --- before the first step --------------------------------------------------------------------------------


@pytest.mark.parametrize("works", [True, False])
def test_without_a_compiler_there_is_a_plain_path(monkeypatch, works):
    def compile_nothing(net):
        if not works:
            raise RuntimeError("no compiler, in many lines")
        return net

    monkeypatch.setattr(torch, "compile", compile_nothing)
    assert not Machine.here(preset("demo", compile="auto")).compiled  # on a CPU it is not asked for
    if works:
        assert Machine.here(preset("demo", compile="on")).compiled
    else:
        with pytest.raises(ValueError, match="leave --compile out"):
            Machine.here(preset("demo", compile="on"))


def test_the_machine_says_what_auto_came_to():
    found = Machine.here(replace(TINY, device="cpu", precision="float32", threads=1))
    assert (found.device, found.precision, found.compiled, found.threads) == ("cpu", "float32", False, 1)
    assert (found.dtype, found.kind, found.torch) == (torch.float32, "cpu", torch.__version__)
    assert Machine.here(TINY).precision in ("float32", "bfloat16")
    assert Machine.here(replace(TINY, precision="bfloat16")).dtype == torch.bfloat16
    for device, told in (("quantum", "is not a device"), ("meta", "is not on this machine")):
        with pytest.raises(ValueError, match=told):
            Machine.here(replace(TINY, device=device))


@pytest.mark.slow
def test_the_machine_compiles_where_it_can():
    assert Machine.here(replace(TINY, compile="on")).compiled


def test_channel_figures_are_those_of_numpy():
    images = np.random.default_rng(4).integers(0, 200, (30, 3, 32, 32), dtype=np.uint8)
    images[:, 2] //= 9
    mean, std = channel_figures(torch.from_numpy(images))
    shares = images / 255
    np.testing.assert_allclose(mean, shares.mean((0, 2, 3)), atol=5.1e-5)
    np.testing.assert_allclose(std, shares.std((0, 2, 3)), atol=5.1e-5)
    # A channel of one value is no division by zero.
    flat = torch.full((4, 3, 32, 32), 51, dtype=torch.uint8)
    assert channel_figures(flat) == ((0.2,) * 3, (0.001,) * 3)
    one = Learner(replace(TINY, whiten=False), CPU, flat, torch.zeros(4, dtype=torch.int64), num_classes=2)
    assert np.isfinite(train(one, range(2))).all()


def test_the_scale_of_the_pixels_is_the_training_pictures_own_or_a_half():
    images, _ = pictures()
    assert (learner().mean, learner().std) == channel_figures(images)
    assert learner(mean_and_std="half").mean == learner(mean_and_std="half").std == (0.5,) * 3


@pytest.mark.parametrize("filters", [30, 96, 120])
def test_whitening_filters_answer_to_every_direction_alike(filters):
    """Patches of 4 x 4 x 3 have 48 directions: filters 48 on are the first ones negated, the rest stay."""
    rng = np.random.default_rng(2)
    smooth = rng.normal(size=(400, 3, 12, 12)).cumsum(2).cumsum(3)  # neighbours alike, as in photographs
    x = torch.from_numpy(smooth / smooth.std()).float()
    conv = torch.nn.Conv2d(3, filters, 4, stride=4)
    before = conv.weight.detach().clone()
    whiten_filters(conv, x)
    with torch.no_grad():
        answers = F.conv2d(x - x.mean((0, 2, 3), keepdim=True), conv.weight, stride=4)
    answers = answers.transpose(0, 1).flatten(1)[:48].double()
    # Each direction's variance v becomes 0.3² v / (v + 0.01), and no two answers move together.
    patches = F.unfold(x, 4, stride=4).transpose(1, 2).reshape(-1, 48).double().numpy()
    variances = np.sort(np.linalg.eigvalsh(np.cov(patches.T, bias=True)))[::-1][: min(filters, 48)]
    covariance = np.cov(answers.numpy(), bias=True)
    np.testing.assert_allclose(np.diag(covariance), 0.09 * variances / (variances + 0.01), rtol=0.01)
    assert abs(covariance - np.diag(np.diag(covariance))).max() < 1e-3
    twins = conv.weight[48:96].detach()
    assert_close(twins, -conv.weight[: len(twins)].detach(), rtol=0, atol=0)
    assert torch.equal(conv.weight[96:].detach(), before[96:])


def test_only_a_run_that_asks_for_it_is_whitened():
    plain, whitened = learner(whiten=False), learner(whiten=True)
    assert not torch.equal(plain.model.patch_embed.conv.weight, whitened.model.patch_embed.conv.weight)
    assert torch.equal(plain.model.pos_embed, whitened.model.pos_embed)


def test_pictures_become_tensors_in_memory_of_their_own():
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    images.flags.writeable = False
    x, y = as_tensors(images, np.arange(6, dtype=np.int32), np.array([4, 1]))
    assert (x.shape, x.dtype, y.dtype, y.tolist()) == ((2, 3, 32, 32), torch.uint8, torch.int64, [4, 1])
    np.testing.assert_array_equal(x[0, 2], images[4, :, :, 2])
    assert x.is_contiguous()
    x.zero_()
    assert images[4].any()
