"""Training pictures varied as a batch, on their device, each by draws of its own that its key alone decides.

    keys = sample_keys(seed, step, positions)    # positions: where the samples stand in the global batch
    x = normalise(light(pictures, keys))         # mirrored, and moved by up to 4 px
    x = tutorial(pictures, keys)                 # the tutorial's nine transforms, normalised at the end

Pictures are (B, 3, H, W) uint8 and stay so until `normalise`; nothing here waits for a GPU. 128 of them take
about 1 ms (`light`), 50 ms (`tutorial`) or 35 ms (`rand_augment`) on one CPU core. Call it outside autocast.

No random number comes from a generator with a state: number i of stream s of a sample is a hash of (seed,
step, position, s, i). So a batch split over processes, or met again after a crash, gets the very same ones.
`_mix`, a well-tried permutation of 32-bit words, runs once for each word that the hash takes in; a key is two
words, so that among the millions of samples of a run no two share one.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# One stream for each decision. Two transforms on one stream would decide alike.
FLIP, SHIFT, CROP, ROTATION, JITTER, AFFINE, ERASING, NOISE, CUTMIX, RAND_AUGMENT, PATCHES, DEPTH = range(12)

OPS = ("identity", "shear x", "shear y", "translate x", "translate y", "rotate", "brightness", "contrast",
       "colour", "sharpness", "posterize", "solarize", "autocontrast", "equalize")  # fmt: skip
LARGEST_MAGNITUDE = 30

Range = tuple[float, float]


def sample_keys(seed: int, step: int, positions: Tensor) -> Tensor:
    """(B, 2) int64, the keys of the samples at `positions` (B,) int64 of the global batch of this step.

    Positions must differ within a step and lie below 2**32; where each picture comes once an epoch, epoch and
    index may stand for step and position. Seeds may be any integer, of which the low 64 bits count.
    """
    words = []
    for start in (0x243F6A88, 0x85A308D3):  # digits of pi: any two different words would do
        word = start
        for value in (seed, seed >> 32, step):
            word = _mix(word ^ value & 0xFFFFFFFF)
        words.append(_mix(positions ^ word))
    return torch.stack(words, 1)


def uniform(keys: Tensor, stream: int, count: int) -> Tensor:
    """(B, count) float32 in [0, 1): the first `count` numbers of a stream, at most 2**20 of them."""
    return (_bits(keys, stream, count) >> 8).float() * 2**-24


def normal(keys: Tensor, stream: int, count: int) -> Tensor:
    """(B, count) float32 of mean 0 and deviation 1: the first `count` numbers of a stream."""
    # Odd multiples of 2**-24: never -1 or 1, whose inverses are infinite.
    odd = (_bits(keys, stream, count) >> 8).mul_(2).sub_(2**24 - 1)
    return (odd.float() * 2**-24).erfinv_().mul_(math.sqrt(2))


def _bits(keys: Tensor, stream: int, count: int) -> Tensor:
    counter = torch.arange(count, device=keys.device) + (stream << 20)
    return _mix(_mix(keys[:, :1] ^ counter) ^ keys[:, 1:])


def _mix(word):
    """A permutation of the words of 32 bits (hash-prospector's), of an int or, in place, an int64 tensor."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        word ^= word >> shift
        word *= factor  # below 2**31, so that no product leaves 63 bits: the same on every device
        word &= 0xFFFFFFFF
    word ^= word >> 15
    return word


def light(x: Tensor, keys: Tensor, shift_px: int = 4, mirror: bool = True) -> Tensor:
    """Mirrored or not, then moved by up to `shift_px` either way, with edges as in a mirror; uint8."""
    height, width = x.shape[2:]
    shift = (uniform(keys, SHIFT, 2) * (2 * shift_px + 1)).long() - shift_px
    rows, columns = (torch.arange(x.shape[2 + i], device=x.device) + shift[:, i : i + 1] for i in (0, 1))
    rows = height - 1 - (height - 1 - rows.abs()).abs()
    columns = width - 1 - (width - 1 - columns.abs()).abs()
    if mirror:
        columns = torch.where(uniform(keys, FLIP, 1) < 0.5, width - 1 - columns, columns)
    return _pick(x, rows[:, :, None] * width + columns[:, None])


def tutorial(x: Tensor, keys: Tensor) -> Tensor:
    """(B, 3, 32, 32) float32: the tutorial's transforms, as torchvision applies them to Pillow's pictures."""
    x = resize(x, 70)
    x = random_resized_crop(x, keys, 32, scale=(0.8, 1.0), ratio=(3 / 4, 4 / 3))
    x = random_flip(x, keys)
    x = random_rotation(x, keys, 15)
    x = color_jitter(x, keys, (0.2, 0.2, 0.2), hue=0.1)
    x = random_affine(x, keys, translate=0.1, scale=(0.9, 1.1))
    x = normalise(x)
    return random_erasing(x, keys, p=0.25, scale=(0.02, 0.2), ratio=(0.3, 3.3))


def normalise(x: Tensor, mean: Sequence[float] = (0.5,) * 3, std: Sequence[float] = (0.5,) * 3) -> Tensor:
    """(B, 3, H, W) uint8 to float32: (x / 255 - mean) / std."""
    mean, std = (torch.tensor(of, device=x.device)[:, None, None] for of in (mean, std))
    return x * (1 / (255 * std)) - mean / std


def resize(x: Tensor, size_px: int) -> Tensor:
    """uint8 at `size_px` squared, as Pillow's bilinear filter gives it, to within two grey levels."""
    zeros = torch.zeros(1, device=x.device)
    return _resample(x, zeros, zeros, zeros + x.shape[2], zeros + x.shape[3], size_px)


def random_resized_crop(x: Tensor, keys: Tensor, size_px: int, scale: Range, ratio: Range) -> Tensor:
    """A box of a share `scale` of the area, height to width in `ratio`, at `size_px` squared; uint8.

    The whole picture where ten tries find no such box inside it.
    """
    box = torch.stack(random_box(uniform(keys, CROP, 22), x.shape[2:], x.shape[2:], scale, ratio))
    whole = torch.tensor([0, 0, *x.shape[2:]], device=x.device)[:, None]
    return _resample(x, *torch.where(box[2] > 0, box, whole), size_px)


def random_flip(x: Tensor, keys: Tensor) -> Tensor:
    """Mirrored left to right, or not, with equal chances."""
    return torch.where((uniform(keys, FLIP, 1) < 0.5)[:, :, None, None], x.flip(3), x)


def random_rotation(x: Tensor, keys: Tensor, degrees: float) -> Tensor:
    """Turned by up to `degrees` either way, to the nearest pixel, black outside."""
    return _nearest(x, rotation((2 * uniform(keys, ROTATION, 1)[:, 0] - 1) * degrees, x.shape[2:]))


def random_affine(x: Tensor, keys: Tensor, translate: float, scale: Range) -> Tensor:
    """Scaled about its centre, then moved by up to a share `translate` of each side; black outside; uint8."""
    u = uniform(keys, AFFINE, 3)
    height, width = x.shape[2:]
    down, right = (((2 * u[:, i] - 1) * translate * x.shape[2 + i]).round() for i in (0, 1))
    shrink, zero = 1 / (scale[0] + u[:, 2] * (scale[1] - scale[0])), torch.zeros_like(down)
    from_x, from_y = width / 2 - (width / 2 + right) * shrink, height / 2 - (height / 2 + down) * shrink
    return _nearest(x, _matrix(shrink, zero, from_x, zero, shrink, from_y))


def rotation(degrees: Tensor, picture_px: Sequence[int]) -> Tensor:
    """(B, 2, 3): where each point comes from when a picture is turned about its centre, counter-clockwise."""
    cos, sin = degrees.deg2rad().cos(), degrees.deg2rad().sin()
    y, x = (side / 2 for side in picture_px)
    return _matrix(cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)


def _matrix(*six: Tensor) -> Tensor:
    return torch.stack(six, 1).view(-1, 2, 3)


def _nearest(x: Tensor, source: Tensor, fill: int = 0) -> Tensor:
    """The pixel that `source` (B, 2, 3) points to from each pixel's centre, `fill` outside the picture."""
    height, width = x.shape[2:]
    # Pillow's fixed-point steps, so that the two agree where a point falls between two pixels.
    source = torch.cat([source[..., :2], source[..., 2:] + source[..., :2].sum(2, keepdim=True) / 2], 2)
    fixed = (source * 65536 + 0.5).floor().long()[..., None, None]
    per_column, per_row, start = fixed.unbind(2)  # (B, 2, 1, 1)
    rows, columns = torch.arange(height, device=x.device)[:, None], torch.arange(width, device=x.device)
    from_column, from_row = ((start + per_column * columns + per_row * rows) >> 16).unbind(1)  # (B, H, W)
    inside = (from_row >= 0) & (from_row < height) & (from_column >= 0) & (from_column < width)
    picked = _pick(x, (from_row * width + from_column) * inside)
    return picked.masked_fill_(~inside[:, None], fill)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """(B, C, H, W): for each place in `index` (B, H, W), the pixel with that number."""
    flat = index.flatten(1)[:, None].expand(-1, x.shape[1], -1)
    return x.flatten(2).gather(2, flat).view_as(x)


def random_box(
    u: Tensor, picture_px: Sequence[int], most_px: Sequence[int], scale: Range, ratio: Range
) -> tuple:
    """(top, left, height, width), each (B,): a share `scale` of the area, height to width in `ratio`.

    `u` (B, 22) holds the place, then ten tries at a size of `most_px` or less; to clamp the first one would
    change the shares. Height and width are 0 if none fits.
    """
    area, ratios = u[:, 2:].chunk(2, 1)
    area = (scale[0] + area * (scale[1] - scale[0])) * math.prod(picture_px)
    ratios = ratio[0] * (ratio[1] / ratio[0]) ** ratios
    height, width = (area * ratios).sqrt().round(), (area / ratios).sqrt().round()
    fits = (height > 0) & (height <= most_px[0]) & (width > 0) & (width <= most_px[1])
    first = fits.int().argmax(1, keepdim=True)
    height, width = ((side * fits).gather(1, first)[:, 0] for side in (height, width))
    top, left = ((u[:, i] * (picture_px[i] - side + 1)).floor() for i, side in ((0, height), (1, width)))
    return top, left, height, width


def _resample(x: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, size_px: int) -> Tensor:
    """The boxes (each figure (B,) or (1,)) at `size_px` squared: columns first, each pass to whole levels."""
    rows = _triangles(top, height, x.shape[2], size_px)
    columns = _triangles(left, width, x.shape[3], size_px)
    across = (x.float().flatten(1, 2) @ columns.mT).view(*x.shape[:3], size_px)
    down = rows[:, None] @ across.mul_(2**-16).add_(0.5).floor_()
    return down.mul_(2**-16).add_(0.5).floor_().to(torch.uint8)


def _triangles(start: Tensor, length: Tensor, side_px: int, size_px: int) -> Tensor:
    """(B, size_px, side_px) weights of 65536 in all: the bilinear filter, as wide as the shrinking asks."""
    step = (length / size_px)[:, None, None]
    centre = (torch.arange(size_px, device=start.device)[:, None] + 0.5) * step
    place = torch.arange(side_px, device=start.device) - start[:, None, None]
    weight = (1 - (place + 0.5 - centre).abs() / step.clamp(min=1)).clamp_(min=0)
    weight *= (place >= 0) & (place < length[:, None, None])
    # Whole numbers whose sums with 255 stay below 2**24: float32 adds them exactly in any order, so that no
    # split of the batch, number of threads or device changes a pixel.
    return (weight / weight.sum(2, keepdim=True) * 65536).round_()


def color_jitter(x: Tensor, keys: Tensor, amounts: Sequence[float], hue: float) -> Tensor:
    """In any order: brightness, contrast, saturation by 1 +- `amounts`, hue turned by +- `hue`; uint8."""
    u, x = uniform(keys, JITTER, 8), x.float()
    order, hue_place = u[:, 4:7].argsort(1), (u[:, 7] * 4).long()
    factors = (1 + (2 * u[:, :3] - 1) * torch.tensor(amounts, device=x.device)).gather(1, order)
    # Hue, the dearest, runs once: each of the others stands on both sides of it, idle on one.
    for after in (False, True):
        for place in range(3):
            acts = (place >= hue_place) == after
            x = _enhance(x, order[:, place], factors[:, place].where(acts, 1))
        if not after:
            x = _turn_hue(x, (2 * u[:, 3] - 1) * hue)
    return x.to(torch.uint8)


def _enhance(x: Tensor, kind: Tensor, factor: Tensor) -> Tensor:
    """Brightness (kind 0), contrast (1), saturation (2): away from black, the mean, each one's grey."""
    kind = kind[:, None, None, None]
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    grey = ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor_()  # (B, 1, H, W)
    mean = (grey.mean((2, 3), keepdim=True) + 0.5).floor_()
    return _away(x, torch.where(kind == 2, grey, mean * (kind == 1)), factor)


def _away(x: Tensor, start: Tensor, factor: Tensor) -> Tensor:
    """Each sample of `x` at `factor` (B,) times its distance from `start`."""
    # Pillow cuts the fraction off; rounding would make every picture half a level brighter.
    return (x - start).mul_(factor[:, None, None, None]).add_(start).clamp_(0, 255).floor_()


def _turn_hue(x: Tensor, turn: Tensor) -> Tensor:
    """The hue moved by `turn` (B,) of a circle, through HSV of 8 bits as in Pillow."""
    red, green, blue = x.unbind(1)
    value, least = x.amax(1), x.amin(1)
    chroma = value - least
    some = chroma.clamp(min=1)
    sixths = torch.where(green == value, 2 + (blue - red) / some, 4 + (red - green) / some)
    sixths = torch.where(red == value, (green - blue) / some, sixths)
    hue = ((sixths / 6 + 1).remainder_(1) * 255).floor_()
    saturation = (chroma / value.clamp(min=1) * 255).floor_() / 255
    # 255 steps make the circle but bytes wrap at 256: torchvision does both, and so must this.
    sixths = (hue + (turn * 255).trunc()[:, None, None]).remainder_(256) * (6 / 255)
    strength = value * saturation
    distances = ((sixths + corner).remainder_(6) for corner in (5, 3, 1))
    channels = [value - strength * torch.minimum(d, 4 - d).clamp_(0, 1) for d in distances]
    return torch.stack(channels, 1).add_(0.5).floor_()


def random_erasing(x: Tensor, keys: Tensor, p: float, scale: Range, ratio: Range) -> Tensor:
    """With chance `p`, a box of normalised `x`, height to width in `ratio`, becomes standard normal noise."""
    u, (height, width) = uniform(keys, ERASING, 23), x.shape[2:]
    noise = normal(keys, NOISE, math.prod(x.shape[1:])).view_as(x)
    # torchvision leaves a pixel of the picture on each side.
    top, left, tall, wide = random_box(u[:, 1:], (height, width), (height - 1, width - 1), scale, ratio)
    mask = _inside(x, top, left, top + tall * (u[:, 0] < p), left + wide)
    return torch.where(mask, noise.to(x.dtype), x)


def cutmix(x: Tensor, y: Tensor, keys: Tensor, p: float = 0.5) -> tuple[Tensor, Tensor]:
    """With chance `p`, a box of each picture shows its neighbour, and `y` (B, C) is mixed by the box's area.

    The box has a uniform share of the area, its centre anywhere, cut at the edges. Samples 2k and 2k + 1 are
    neighbours, so a batch must be split between pairs; the last of an odd batch stays as it is.
    """
    u = uniform(keys, CUTMIX, 4)
    half = (u[:, 1] * (u[:, 0] < p)).sqrt() / 2
    sides = torch.tensor(x.shape[2:], device=x.device)
    starts, ends = (((u[:, 2:] + move[:, None]) * sides).round() for move in (-half, half))
    mask = _inside(x, *starts.unbind(1), *ends.unbind(1))
    neighbour = (torch.arange(len(x), device=x.device) ^ 1).clamp(max=len(x) - 1)
    share = mask.float().mean((1, 2, 3))[:, None]
    return torch.where(mask, x[neighbour], x), y * (1 - share) + y[neighbour] * share


def _inside(x: Tensor, *edges: Tensor) -> Tensor:
    """(B, 1, H, W) bool: the pixels between top, left, bottom and right (B,), which may lie outside."""
    rows, columns = (
        torch.arange(x.shape[2], device=x.device)[:, None],
        torch.arange(x.shape[3], device=x.device),
    )
    top, left, bottom, right = (edge[:, None, None, None] for edge in edges)
    return (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)


def rand_augment(x: Tensor, keys: Tensor, n_ops: int = 2, magnitude: float = 9, fill: int = 128) -> Tensor:
    """`n_ops` of OPS one after another, drawn for each sample, at `magnitude` of 30; uint8 to uint8.

    Ranges are torchvision's; what has a direction goes either way. `fill`, mid grey, is 0 once normalised.
    """
    u = uniform(keys, RAND_AUGMENT, 2 * n_ops)
    for op, sign in zip(u[:, :n_ops].unbind(1), u[:, n_ops:].unbind(1), strict=True):
        strength = torch.where(sign < 0.5, -1.0, 1.0) * (magnitude / LARGEST_MAGNITUDE)
        x = apply_ops(x, (op * len(OPS)).long(), strength, fill)
    return x


def apply_ops(x: Tensor, op: Tensor, strength: Tensor, fill: int = 128) -> Tensor:
    """One of OPS for each sample: its index in `op` (B,), at `strength` (B,) of -1 to 1; uint8 to uint8."""
    is_op, picture_px = {name: op == i for i, name in enumerate(OPS)}, x.shape[2:]
    x = _nearest(x, _ops_matrix(is_op, strength, picture_px), fill).float()
    level, factor = strength.abs(), 1 + 0.9 * strength

    enhances = is_op["brightness"] | is_op["contrast"] | is_op["colour"]
    x = _enhance(x, op - OPS.index("brightness"), factor.where(enhances, 1))
    smooth, centre = x.clone(), x[..., 1:-1, 1:-1]
    smooth[..., 1:-1, 1:-1] = ((F.avg_pool2d(x, 3, 1, divisor_override=1) + 4 * centre) / 13 + 0.5).floor_()
    x = _away(x, smooth, factor.where(is_op["sharpness"], 1)).flatten(2)

    step = (2 ** (4 * level).round()).where(is_op["posterize"], 1)[:, None, None]
    x = (x / step).floor_() * step
    x = torch.where(x < (255 * (1 - level)).where(is_op["solarize"], 256)[:, None, None], x, 255 - x)

    least, greatest = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    stretched = ((x - least) * 255 / (greatest - least).clamp(min=1)).floor_()
    x = torch.where(is_op["autocontrast"][:, None, None] & (greatest > least), stretched, x)
    x = torch.where(is_op["equalize"][:, None, None], _equalized(x), x)
    return x.unflatten(2, picture_px).to(torch.uint8)


def _ops_matrix(is_op: dict[str, Tensor], strength: Tensor, picture_px: Sequence[int]) -> Tensor:
    """(B, 2, 3): where each point comes from; the identity for what is no geometry."""
    turned = rotation((30 * strength).where(is_op["rotate"], 0), picture_px)
    shear_x, shear_y = ((0.3 * strength).where(is_op[name], 0) for name in ("shear x", "shear y"))
    down, right = ((150 / 331 * side * strength).trunc() for side in picture_px)
    down, right = down.where(is_op["translate y"], 0), right.where(is_op["translate x"], 0)
    zero = torch.zeros_like(strength)
    return turned + _matrix(zero, shear_x, -right, shear_y, zero, -down)


def _equalized(pixels: Tensor) -> Tensor:
    """(B, 3, P): each channel's levels spread by their histogram, as in Pillow's `equalize`."""
    levels = pixels.long()
    counts = torch.zeros(*pixels.shape[:2], 256, dtype=torch.long, device=pixels.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    step = (pixels.shape[2] - counts.gather(2, levels.amax(2, keepdim=True))) // 255
    table = ((counts.cumsum(2) - counts + step // 2) // step.clamp(min=1)).clamp_(max=255)
    return table.gather(2, levels).to(pixels.dtype).where(step > 0, pixels)


def keep_patches(keys: Tensor, patches: int, kept: int) -> Tensor:
    """(B, kept) int64: which of 0 to `patches` - 1 each sample keeps, each set of `kept` equally likely."""
    if not 0 <= kept <= patches:
        raise ValueError(f"of {patches} patches, 0 to {patches} can be kept, not {kept}")
    return _bits(keys, PATCHES, patches).argsort(dim=1, stable=True)[:, :kept]


def branch_gates(keys: Tensor, layers: int, rate: float) -> Tensor:
    """(layers, 2, B) float32: 0 where a block's attention or MLP branch rests, else 1 / (1 - its chance).

    Stochastic depth (arXiv 1603.09382): the chance of a branch to rest grows with depth, block by block in
    equal steps, up to `rate` in the last. ValueError for a rate outside 0 to below 1.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"the rate of stochastic depth lies from 0 to below 1, not {rate}")
    chance = (torch.arange(1, layers + 1, device=keys.device) * (rate / layers))[:, None, None]
    u = uniform(keys, DEPTH, 2 * layers).T.reshape(layers, 2, len(keys))
    return (u >= chance) / (1 - chance)
