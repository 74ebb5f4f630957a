"""Augmentation: torchvision's results and distribution, decided for each sample by its key alone.

Run: pytest tests/test_augment.py (some 15 s); with -m slow for 10,000 draws (a minute).

Two samples of n draws of one figure are equal within four standard errors when |z| < 4. Of 3,072 pixels about
0.2 would pass 4 by chance alone, and neighbours do so together, so one pixel in 200 may; none may pass 5.5,
which one pixel in 26 million does by chance, one picture in 8,000.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional as TF

from train import augment
from train.augment import (
    OPS,
    apply_ops,
    branch_gates,
    cutmix,
    keep_patches,
    light,
    normalise,
    rand_augment,
    random_box,
    random_erasing,
    resize,
    sample_keys,
    tutorial,
    uniform,
)

SAMPLES = sorted((Path(__file__).parents[1] / "assets/samples").glob("*.png"))


@pytest.fixture(scope="module")
def pictures():
    """(60, 3, 32, 32) uint8: the bundled samples, in half and quarter contrast too."""
    bundled = torch.stack([to_tensor(Image.open(path).convert("RGB").resize((32, 32))) for path in SAMPLES])
    return torch.cat([bundled, bundled // 2 + 64, bundled // 4])


def to_tensor(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def to_pil(x: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(one.permute(1, 2, 0).numpy()) for one in x]


def one_by_one(function, x: torch.Tensor, *figures: torch.Tensor) -> torch.Tensor:
    """`function(picture, figure, ...)`, Pillow's to Pillow's, for each sample with figures of its own."""
    figures = zip(*(each.tolist() for each in figures), strict=True) if figures else [()] * len(x)
    return torch.stack([to_tensor(function(p, *f)) for p, f in zip(to_pil(x), figures, strict=True)])


def assert_levels(ours, theirs, *, share: float = 0, levels: int = 0):
    """Equal but for a `share` of the values, which differ by up to `levels`, and on average by nothing."""
    away = ours.int() - theirs.int()
    assert away.abs().max() <= levels
    assert (away != 0).float().mean() <= share
    assert away.float().mean().abs() < 0.02


def keys_of(count: int, step: int = 3) -> torch.Tensor:
    return sample_keys(7, step, torch.arange(count))


def chi_square_z(counts: torch.Tensor) -> float:
    """Counts of equally likely things: how many deviations too uneven they are (Wilson and Hilferty)."""
    expected, freedom = counts.sum() / len(counts), len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


def z_of_means(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """For (n, ...) and (m, ...): the difference of the means in standard errors."""
    a, b = a.double(), b.double()
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    difference = a.mean(0) - b.mean(0)
    return torch.where(difference == 0, 0.0, difference / error)


def z_of_variances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # The variance is the mean of the squared distances, of which the standard error is as above.
    return z_of_means((a.double() - a.double().mean(0)) ** 2, (b.double() - b.double().mean(0)) ** 2)


# --- random numbers


def test_numbers_are_uniform_and_normal():
    u = uniform(keys_of(1000), augment.NOISE, 1000)
    assert u.dtype == torch.float32
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(chi_square_z((u.flatten() * 1024).long().bincount(minlength=1024))) < 4
    low_bits = (u.flatten() * 2**24).long() % 1024
    assert abs(chi_square_z(low_bits.bincount(minlength=1024))) < 4
    n = augment.normal(keys_of(1000), augment.NOISE, 1000).double()
    moments = [(n**k).mean().item() for k in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.04)  # four standard errors of the last
    assert 4.4 < n.abs().max() < 5.6


@pytest.mark.parametrize("what", ["number", "stream", "position", "step", "seed", "high seed"])
def test_neighbouring_numbers_have_nothing_to_do_with_one_another(what):
    positions = torch.arange(2000)
    first = {"seed": 1, "step": 1, "positions": positions}
    second = first | {
        "position": {"positions": positions + 1},
        "step": {"step": 2},
        "seed": {"seed": 2},
        "high seed": {"seed": 1 + 2**32},
    }.get(what, {})
    a = uniform(sample_keys(**first), 1, 101)
    b = uniform(sample_keys(**second), 1 + (what == "stream"), 101)
    a, b = (a[:, :-1], b[:, 1:]) if what == "number" else (a, b)
    a, b = a.flatten(), b.flatten()
    assert (a == b).float().mean() < 1e-5
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4 / math.sqrt(len(a))
    pairs = (a * 32).long() * 32 + (b * 32).long()
    assert abs(chi_square_z(pairs.bincount(minlength=1024))) < 4


def test_keys_differ_through_a_long_run():
    keys = torch.cat([sample_keys(0, epoch, torch.arange(50_000)) for epoch in range(20)])
    assert len(torch.unique(keys[:, 0] << 32 | keys[:, 1])) == len(keys)


def test_numbers_are_the_hash_of_what_they_are_for():
    def mixed(word):
        word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
        word = (word ^ word >> 15) * 0x735A2D97 % 2**32
        return word ^ word >> 15

    seed, step, position, number = 2**40 + 5, 12, 99, 4
    a, b = 0x243F6A88, 0x85A308D3
    for value in (seed % 2**32, seed // 2**32, step, position):
        a, b = mixed(a ^ value), mixed(b ^ value)
    wanted = mixed(mixed(augment.CUTMIX * 2**20 + number ^ a) ^ b) // 256 / 2**24
    assert uniform(sample_keys(seed, step, torch.tensor([position])), augment.CUTMIX, 5)[0, 4] == wanted


def test_the_same_numbers_for_ever():
    # A run that is resumed by a later version must meet the numbers it would have met.
    keys = sample_keys(2**63 + 5, 12, torch.tensor([0, 127]))
    assert (uniform(keys, augment.FLIP, 2) * 2**24).long().tolist() == [
        [12365367, 2621908],
        [1488747, 8218081],
    ]


ON_A_BATCH = {
    "light": light,
    "tutorial": tutorial,
    "rand_augment": rand_augment,
    "cutmix": lambda x, keys: cutmix(x, x[:, 0, 0].float(), keys, p=0.8)[0],
    "cutmix labels": lambda x, keys: cutmix(x, x[:, 0, 0].float(), keys, p=0.8)[1],
    "random_erasing": lambda x, keys: random_erasing(normalise(x), keys, 0.5, (0.02, 0.2), (0.3, 3.3)),
    "keep_patches": lambda x, keys: keep_patches(keys, 64, 32),
    "branch_gates": lambda x, keys: branch_gates(keys, 6, 0.4).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", ON_A_BATCH)
def test_a_batch_may_be_split_in_any_way(name, pictures):
    function, keys = ON_A_BATCH[name], keys_of(60)
    whole = function(pictures, keys)
    for sizes in ([30, 30], [2, 58], [10] * 6):
        positions = torch.arange(60).split(sizes)
        parts = [function(pictures[at], sample_keys(7, 3, at)) for at in positions]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(function(pictures, keys), whole)
    assert not torch.equal(function(pictures, keys_of(60, step=4)), whole)


@pytest.mark.parametrize("name", ON_A_BATCH)
def test_nothing_is_changed_in_place(name, pictures):
    x, keys = pictures.clone(), keys_of(60)
    ON_A_BATCH[name](x, keys)
    assert torch.equal(x, pictures)
    assert torch.equal(keys, keys_of(60))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", ON_A_BATCH)
def test_a_gpu_gives_what_the_cpu_gives(name, pictures):
    x, keys = pictures.cuda(), sample_keys(7, 3, torch.arange(60, device="cuda"))
    away = (ON_A_BATCH[name](x, keys).cpu().float() - ON_A_BATCH[name](pictures, keys_of(60)).float()).abs()
    assert (away > 1e-3).float().mean() < 1e-3  # a point between two pixels, a fraction next to a whole level


# --- light


def test_light_mirrors_and_moves_over_mirrored_edges():
    picture = np.arange(3 * 32 * 32).reshape(3, 32, 32) * 7 % 251
    wanted = {}
    for flipped, source in enumerate((picture, picture[:, :, ::-1])):
        padded = np.pad(source, ((0, 0), (4, 4), (4, 4)), mode="reflect")
        for down in range(9):
            for right in range(9):
                moved = padded[:, down : down + 32, right : right + 32].astype(np.uint8)
                wanted[moved.tobytes()] = (flipped * 9 + down) * 9 + right
    x = torch.from_numpy(picture.astype(np.uint8)).expand(8000, -1, -1, -1)
    drawn = torch.tensor([wanted[one.numpy().tobytes()] for one in light(x, keys_of(8000))])
    assert len(wanted) == 162
    assert abs(chi_square_z(drawn.bincount(minlength=162))) < 4


def test_normalise_is_torchvisions(pictures):
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    wanted = TF.normalize(pictures.float() / 255, mean, std)
    torch.testing.assert_close(normalise(pictures, mean, std), wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(normalise(pictures), pictures / 127.5 - 1, atol=1e-6, rtol=1e-6)


# --- each of the tutorial's transforms, on the draws it made, against torchvision on Pillow's pictures


def test_resize(pictures):
    # 32 to 70 px weighs by 35ths, so that many values lie half-way between two levels.
    assert_levels(
        resize(pictures, 70), one_by_one(lambda p: TF.resize(p, [70, 70]), pictures), share=0.04, levels=2
    )


def test_random_resized_crop(pictures):
    x, keys = resize(pictures, 70), keys_of(60)
    box = torch.stack(
        random_box(uniform(keys, augment.CROP, 22), (70, 70), (70, 70), (0.8, 1.0), (3 / 4, 4 / 3))
    )
    box = torch.where(box[2] > 0, box, torch.tensor([0, 0, 70, 70])[:, None]).int()
    wanted = one_by_one(lambda p, *box: TF.resized_crop(p, *box, [32, 32]), x, *box)
    ours = augment.random_resized_crop(x, keys, 32, (0.8, 1.0), (3 / 4, 4 / 3))
    assert_levels(ours, wanted, share=0.01, levels=1)


def test_a_crop_that_fits_nowhere_is_the_whole_picture(pictures):
    crop = augment.random_resized_crop(pictures, keys_of(60), 32, (1.0, 1.0), (2.0, 3.0))
    assert torch.equal(crop, pictures)


def test_random_rotation(pictures):
    keys = keys_of(60)
    degrees = uniform(keys, augment.ROTATION, 1)[:, 0] * 30 - 15
    wanted = one_by_one(TF.rotate, pictures, degrees)
    assert_levels(augment.random_rotation(pictures, keys, 15), wanted, share=1e-3, levels=255)


def test_random_affine(pictures):
    keys = keys_of(60)
    u = uniform(keys, augment.AFFINE, 3)
    down, right = ((u[:, :2] * 2 - 1) * 3.2).round().int().T
    wanted = one_by_one(
        lambda p, right, down, scale: TF.affine(p, 0, [right, down], scale, [0.0, 0.0]),
        pictures, right, down, 0.9 + 0.2 * u[:, 2],
    )  # fmt: skip
    assert_levels(augment.random_affine(pictures, keys, 0.1, (0.9, 1.1)), wanted, share=1e-3, levels=255)


def test_color_jitter(pictures):
    keys = keys_of(60)
    u = uniform(keys, augment.JITTER, 8)
    orders = [order.tolist() for order in u[:, 4:7].argsort(1)]
    for order, place in zip(orders, (u[:, 7] * 4).long().tolist(), strict=True):
        order.insert(place, 3)
    figures = torch.cat([0.8 + 0.4 * u[:, :3], 0.2 * u[:, 3:4] - 0.1, torch.tensor(orders)], 1)

    def jittered(picture, *figures):
        adjust = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation, TF.adjust_hue)
        for which in map(int, figures[4:]):
            picture = adjust[which](picture, figures[which])
        return picture

    ours = augment.color_jitter(pictures, keys, (0.2, 0.2, 0.2), 0.1)
    assert_levels(ours, one_by_one(jittered, pictures, *figures.T), share=0.01, levels=8)


def test_the_orders_of_color_jitter_are_equally_likely():
    u = uniform(keys_of(20_000), augment.JITTER, 8)
    order = (u[:, 4:7].argsort(1) * torch.tensor([9, 3, 1])).sum(1) * 4 + (u[:, 7] * 4).long()
    _, counts = order.unique(return_counts=True)
    assert len(counts) == 24
    assert abs(chi_square_z(counts)) < 4


@pytest.mark.parametrize("what", ["crop", "erasing"])
def test_boxes_are_spread_as_torchvisions(what):
    torch.manual_seed(0)
    if what == "crop":
        size, most, scale, ratio = (70, 70), (70, 70), (0.8, 1.0), (3 / 4, 4 / 3)
        blank = Image.new("RGB", (70, 70))
        theirs = [transforms.RandomResizedCrop.get_params(blank, scale, ratio) for _ in range(6000)]
    else:
        size, most, scale, ratio = (32, 32), (31, 31), (0.02, 0.2), (0.3, 3.3)
        blank = torch.zeros(3, 32, 32)
        theirs = [transforms.RandomErasing.get_params(blank, scale, ratio, [0.0])[:4] for _ in range(6000)]
    ours = torch.stack(random_box(uniform(keys_of(60_000), 1, 22), size, most, scale, ratio), 1)
    if what == "crop":
        ours = torch.where(ours[:, 2:3] > 0, ours, torch.tensor([0, 0, 70, 70]))

    def facts(boxes):
        top, left, height, width = boxes = torch.as_tensor(boxes, dtype=torch.float64).T
        more = (height * width, height / width, (top == 0).double(), (height == size[0]).double())
        return torch.stack([*boxes, *more, top + height, left + width], 1)

    ours, theirs = facts(ours), facts(theirs)
    assert z_of_means(ours, theirs).abs().max() < 4
    assert z_of_variances(ours, theirs).abs().max() < 4


# --- the tutorial's transforms together


@pytest.fixture(scope="session")
def tutorial_picture():
    """(3, 32, 32) uint8: a sample, redder on its left and bluer on its right, to tell which way it is."""
    picture = to_tensor(Image.open(SAMPLES[-1]).convert("RGB").resize((32, 32))).float()
    tint = torch.linspace(60, -60, 32)
    return (picture * 0.6 + 50 + torch.stack([tint, 0 * tint, -tint])[:, None]).clamp(0, 255).to(torch.uint8)


@pytest.fixture(scope="session")
def torchvision_draws(tutorial_picture):
    """draw(n): (n, 3, 32, 32) from the tutorial's own Compose, on a Pillow picture."""
    compose = transforms.Compose([
        transforms.Resize((70, 70)),
        transforms.RandomResizedCrop(32, scale=(0.8, 1.0)),
        transforms.RandomHorizontalFlip(p=0.5),
        transforms.RandomRotation(15),
        transforms.ColorJitter(0.2, 0.2, 0.2, 0.1),
        transforms.RandomAffine(degrees=0, translate=(0.1, 0.1), scale=(0.9, 1.1)),
        transforms.ToTensor(),
        transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        transforms.RandomErasing(p=0.25, scale=(0.02, 0.2), ratio=(0.3, 3.3), value="random"),
    ])  # fmt: skip
    (picture,) = to_pil(tutorial_picture[None])
    torch.manual_seed(0)
    drawn = []

    def draw(count):
        drawn.extend(compose(picture) for _ in range(count - len(drawn)))
        return torch.stack(drawn[:count])

    return draw


def flipped(x):
    red_not_blue = x[:, 0] - x[:, 2]
    return (red_not_blue[..., :16].mean((1, 2)) < red_not_blue[..., 16:].mean((1, 2))).float()


def erased(x):
    """(n, 32, 32): the pixels that are noise, and so not a whole level in one channel at least."""
    levels = (x + 1) * 127.5
    return ((levels - levels.round()).abs() > 1e-3).any(1).float()


@pytest.mark.parametrize("count", [1500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_tutorials_transforms_in_distribution(count, tutorial_picture, torchvision_draws):
    theirs = torchvision_draws(count)
    x = tutorial_picture.expand(500, -1, -1, -1)
    ours = torch.cat([tutorial(x, sample_keys(0, 0, at)) for at in torch.arange(count).split(500)])
    for z in (z_of_means(ours, theirs), z_of_variances(ours, theirs)):
        assert z.abs().max() < 5.5
        assert (z.abs() > 4).float().mean() <= 1 / 200
    figures = [
        torch.stack([
            flipped(draws),
            erased(draws).mean((1, 2)),  # the share of the area
            erased(draws).amax((1, 2)),  # whether anything is erased
            (draws == -1).all(1).float().mean((1, 2)),  # the share left black
            draws.mean((1, 2, 3)),
            draws.std((1, 2, 3)),
        ], 1)
        for draws in (ours, theirs)
    ]  # fmt: skip
    assert z_of_means(*figures).abs().max() < 4
    assert 0.4 < figures[0][:, 0].mean() < 0.6
    assert 0.2 < figures[0][:, 2].mean() < 0.3


def test_the_picture_of_the_test_tells_mirrored_from_not(tutorial_picture):
    x = tutorial_picture.expand(200, -1, -1, -1)
    assert (
        flipped(tutorial(x, keys_of(200))) == (uniform(keys_of(200), augment.FLIP, 1)[:, 0] < 0.5)
    ).float().mean() > 0.99


# --- erasing and mixing


def test_erasing_puts_noise_into_one_box():
    x = torch.full((4000, 3, 32, 32), 9.0)
    changed = random_erasing(x, keys_of(4000), 0.25, (0.02, 0.2), (0.3, 3.3))
    mask = (changed != 9).any(1)
    rows, columns = mask.any(2), mask.any(1)
    assert torch.equal(mask, rows[:, :, None] & columns[:, None])
    for line in (rows, columns):
        assert (line.int().diff(dim=1) == 1).sum(1).max() <= 1  # in one piece
        assert ((line.int().diff(dim=1) == 1).sum(1) + line[:, 0] <= 1).all()
    share = mask.any(2).any(1).float().mean()
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4000)
    noise = changed[mask[:, None].expand_as(changed)]
    assert noise.mean().abs() < 4 / math.sqrt(len(noise))
    assert noise.std() == pytest.approx(1, abs=0.01)


def test_cutmix_mixes_labels_by_the_pixels_it_mixes():
    count = 2001
    x = torch.arange(count).float()[:, None, None, None].expand(-1, 3, 32, 32)
    y = torch.eye(3)[torch.arange(count) % 3]
    mixed, labels = cutmix(x, y, keys_of(count), p=0.6)
    for i in range(0, count, 7):
        values, counts = mixed[i, 0].unique(return_counts=True)
        assert set(values.tolist()) <= {i, i ^ 1}
        wanted = sum(y[int(v)] * n / 1024 for v, n in zip(values, counts, strict=True))
        torch.testing.assert_close(labels[i], wanted, atol=1e-6, rtol=0)
    assert torch.equal(mixed[:, 0], mixed[:, 2])
    foreign = mixed[:, 0] != x[:, 0]
    assert torch.equal(foreign, foreign.any(2)[:, :, None] & foreign.any(1)[:, None])  # a box
    assert 0.55 < foreign.any(2).any(1).float().mean() < 0.62
    assert not foreign[-1].any()  # nobody stands beside the last of an odd batch
    assert torch.equal(cutmix(x, y, keys_of(count), p=0)[0], x)


# --- RandAugment

BY_TORCHVISION = {
    "identity": lambda p, s: p,
    "shear x": lambda p, s: TF.affine(p, 0, [0, 0], 1, [math.degrees(math.atan(0.3 * s)), 0],
                                      fill=[9, 9, 9], center=[0, 0]),
    "shear y": lambda p, s: TF.affine(p, 0, [0, 0], 1, [0, math.degrees(math.atan(0.3 * s))],
                                      fill=[9, 9, 9], center=[0, 0]),
    "translate x": lambda p, s: TF.affine(p, 0, [int(150 / 331 * 32 * s), 0], 1, [0, 0], fill=[9, 9, 9]),
    "translate y": lambda p, s: TF.affine(p, 0, [0, int(150 / 331 * 32 * s)], 1, [0, 0], fill=[9, 9, 9]),
    "rotate": lambda p, s: TF.rotate(p, 30 * s, fill=[9, 9, 9]),
    "brightness": lambda p, s: TF.adjust_brightness(p, 1 + 0.9 * s),
    "contrast": lambda p, s: TF.adjust_contrast(p, 1 + 0.9 * s),
    "colour": lambda p, s: TF.adjust_saturation(p, 1 + 0.9 * s),
    "sharpness": lambda p, s: TF.adjust_sharpness(p, 1 + 0.9 * s),
    "posterize": lambda p, s: TF.posterize(p, 8 - round(4 * abs(s))),
    "solarize": lambda p, s: TF.solarize(p, 255 * (1 - abs(s))),
    "autocontrast": lambda p, s: TF.autocontrast(p),
    "equalize": lambda p, s: TF.equalize(p),
}  # fmt: skip
# Where torchvision's float is a hair below a whole number its fraction is cut off, and one level is lost.
TOLERATED = {"autocontrast": {"share": 0.01, "levels": 1}, "rotate": {"share": 1e-3, "levels": 255}}


@pytest.mark.parametrize("strength", [0.3, -0.3, 0.9])
@pytest.mark.parametrize("op", OPS)
def test_an_op_is_torchvisions(op, strength, pictures):
    blank = torch.full((1, 3, 32, 32), 77, dtype=torch.uint8)
    x = torch.cat([pictures, blank])  # nothing to stretch, equalise or sharpen
    ours = apply_ops(x, torch.full((61,), OPS.index(op)), torch.full((61,), strength), fill=9)
    theirs = one_by_one(lambda picture: BY_TORCHVISION[op](picture, strength), x)
    assert_levels(ours, theirs, **TOLERATED.get(op, {}))
    assert torch.equal(ours, x) == (op == "identity")


def test_rand_augment_draws_op_and_direction_for_each_sample(pictures):
    count = 2800
    x, keys = pictures[3].expand(count, -1, -1, -1), keys_of(count)
    one_op = rand_augment(x, keys, n_ops=1, fill=9)
    possible = {}
    for i in range(len(OPS)):
        for sign in (1, -1):
            result = apply_ops(x[:1], torch.tensor([i]), torch.tensor([sign * 0.3]), fill=9)
            possible.setdefault(result.numpy().tobytes(), []).append((i, sign))
    drawn = [possible[one.numpy().tobytes()] for one in one_op[:, None]]
    ops = torch.tensor([fitting[0][0] for fitting in drawn])
    assert abs(chi_square_z(ops.bincount(minlength=len(OPS)))) < 4
    turned = [
        fitting[0][1] for fitting in drawn if len(fitting) == 1
    ]  # what looks the same either way has two
    assert len(turned) > 1500
    assert abs(sum(turned)) < 4 * math.sqrt(len(turned))


def test_rand_augment_takes_one_op_after_another(pictures):
    keys = keys_of(60)
    u = uniform(keys, augment.RAND_AUGMENT, 4)
    wanted = pictures
    for op, sign in zip(u[:, :2].T, u[:, 2:].T, strict=True):
        strength = torch.where(sign < 0.5, -0.5, 0.5)
        singly = zip(wanted.split(1), (op * 14).long().split(1), strength.split(1), strict=True)
        wanted = torch.cat([apply_ops(*sample) for sample in singly])
    assert torch.equal(rand_augment(pictures, keys, n_ops=2, magnitude=15), wanted)
    assert torch.equal(rand_augment(pictures, keys, n_ops=0), pictures)


# --- what the model drops


@pytest.mark.parametrize("kept", [0, 1, 2, 5])
def test_each_set_of_patches_is_kept_equally_often(kept):
    chosen = keep_patches(keys_of(20_000), 5, kept)
    assert chosen.shape == (20_000, kept)
    assert chosen.dtype == torch.int64
    sets = (1 << chosen).sum(1)  # a bit for each patch: no two alike, or there are fewer bits than `kept`
    counts = torch.stack([(sets == which).sum() for which in range(32) if which.bit_count() == kept])
    assert counts.sum() == 20_000
    if len(counts) > 1:
        assert abs(chi_square_z(counts)) < 4


@pytest.mark.parametrize("kept", [-1, 6])
def test_more_patches_than_there_are_cannot_be_kept(kept):
    with pytest.raises(ValueError, match="0 to 5 can be kept"):
        keep_patches(keys_of(2), 5, kept)


def test_branches_rest_more_often_with_depth_and_leave_the_mean():
    gates = branch_gates(keys_of(20_000), 4, 0.6)
    assert gates.shape == (4, 2, 20_000)
    assert gates.dtype == torch.float32
    for depth, chance in enumerate((0.15, 0.3, 0.45, 0.6)):
        rests = (gates[depth] == 0).float().mean(1)
        assert bool(((rests - chance).abs() < 4 * (chance * (1 - chance) / 20_000) ** 0.5).all())
        assert torch.unique(gates[depth]).tolist() == pytest.approx([0, 1 / (1 - chance)])
    each = (gates == 0).float().flatten(0, 1)
    correlations = torch.corrcoef(each) - torch.eye(8)
    assert correlations.abs().max() < 4.5 / 20_000**0.5  # blocks, branches decide for themselves


def test_without_stochastic_depth_no_branch_rests_and_all_cannot():
    assert bool((branch_gates(keys_of(100), 3, 0.0) == 1).all())
    for rate in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="from 0 to below 1"):
            branch_gates(keys_of(2), 3, rate)


def test_patches_branches_and_pictures_have_draws_of_their_own():
    names = ("FLIP", "SHIFT", "CROP", "ROTATION", "JITTER", "AFFINE", "ERASING", "NOISE", "CUTMIX",
             "RAND_AUGMENT", "PATCHES", "DEPTH")  # fmt: skip
    assert len({getattr(augment, name) for name in names}) == len(names)
