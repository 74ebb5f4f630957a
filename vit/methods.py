"""Thirteen ways to say which patches an answer came from, behind one call.

    relevance(model, x, "chefer")                          # (B, P), for the class first predicted
    relevance(model, x, "gradcam", target=3, versus=5)     # why class 3 and not class 5
    METHODS["gradcam"].means, .fails, .class_specific      # what to tell people

Each gives its own values, signed where it has signs, neither scaled nor cut: what they are worth is measured
in vit/faithfulness.py. All explain logits, not probabilities, which saturate. A model is only read: no hook,
no `.grad`, no random number of others is touched, whatever mode the caller is in. Layers, heads and classes
count from 0. Letters for shapes: vit/model.py; A is a layer's map, G the score's gradient with respect to it.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vit.attention import Fusion, fuse_heads, require_index, rollout_row_by_layer
from vit.attnlrp import attnlrp
from vit.block import Layer
from vit.model import VisualTransformer
from vit.parts import in_parts

_PART = 16  # pictures whose gradients a CPU works out together (vit/parts.py)
_RUNS_PART = 64  # runs without gradients
CENTRE_SPREAD = 0.25  # of `centre`, its standard deviation as a share of the side


Score = Callable[[Tensor], Tensor]  # logits (B, K) to what is explained (B,)


@dataclass(frozen=True)
class Method:
    """One method, for people and for `relevance`."""

    title: str
    class_specific: bool  # else its map is the same whichever class is asked about
    means: str
    fails: str
    source: str
    compute: Callable[..., Tensor]  # (model, x, score, **options) -> (B, P)
    is_baseline: bool = False  # looks at neither the picture nor the model


def relevance(
    model: VisualTransformer,
    x: Tensor,
    method: str,
    target: int | Tensor | None = None,
    versus: int | Tensor | None = None,
    **options,
) -> Tensor:
    """(B, P): what each patch is worth to the class `target` of each picture x (B, C, height, width).

    `target`, one class or one for each picture (B,), is the class first predicted if None; with `versus` the
    difference of both logits is explained. `options` as the functions below name them. ValueError for a
    method, class or layer that does not exist.
    """
    if method not in METHODS:
        raise ValueError(f"method is {', '.join(METHODS)}, not {method!r}")
    with torch.inference_mode(False), torch.no_grad():
        x = x.detach().clone()  # what was made in inference mode can have no gradient
        classes = as_classes(model, x, target, versus)
        return in_parts(
            lambda x, *classes: (METHODS[method].compute(model, x, score_of(*classes), **options).detach(),),
            _PART,
            x,
            *classes,
        )[0]


def as_classes(
    model: VisualTransformer, x: Tensor, target: int | Tensor | None, versus: int | Tensor | None = None
) -> tuple[Tensor, ...]:
    """(target,) or (target, versus), each (B,) int64, the target predicted where it is None. ValueError."""
    if target is None:
        target = in_parts(lambda x: (_logits(model, x),), _RUNS_PART, x)[0]
        target = target.argmax(dim=-1)
    named = [("target", target), *([("versus", versus)] if versus is not None else [])]
    classes = tuple(_per_picture(name, value, len(x), model.num_classes, x.device) for name, value in named)
    if versus is not None and (classes[0] == classes[1]).any():
        raise ValueError("target and versus are the same class: there is no difference to explain")
    return classes


def score_of(target: Tensor, versus: Tensor | None = None) -> Score:
    """What is explained: the target's logit, or by how much it exceeds the other's."""

    def score(logits: Tensor) -> Tensor:
        chosen = logits.gather(-1, target[:, None])[:, 0]
        return chosen if versus is None else chosen - logits.gather(-1, versus[:, None])[:, 0]

    return score


def as_shares(relevance: np.ndarray) -> np.ndarray:
    """(..., GY, GX) float64: values as shares of the map's whole weight, so that maps of methods compare.

    The sizes of a map's shares sum to 1, or all are 0. Signs and order stay.
    """
    values = np.asarray(relevance, dtype=np.float64)
    total = np.abs(values).sum(axis=(-2, -1), keepdims=True)
    return np.divide(values, total, out=np.zeros_like(values), where=total > 0)


# ---- attention alone: the same for every class -------------------------------------------------------------


def _raw(
    model, x, score, *, layer: int | None = None, head: int | None = None, head_fusion: Fusion = "mean"
) -> Tensor:
    """How the answer's token looks at the patches in one layer, the last if None: one head, or all fused."""
    maps = _map_of(model, x, layer).map
    if head is not None:
        require_index("head", head, model.num_heads)
    fused = fuse_heads(maps, head_fusion) if head is None else maps[:, head]  # (B, N, N)
    return _read_row(model, fused)


def _rollout(
    model,
    x,
    score,
    *,
    head_fusion: Fusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 0,
) -> Tensor:
    """As `vit.attention_rollout`, of all layers."""
    tokens = model.embed(x, dropout=False)
    fused = [
        fuse_heads(layer.map, head_fusion)[:, None]
        for layer in model.steps(tokens, explicit=True, dropout=False)
    ]
    return _rolled(model, fused, discard_ratio, residual, start_layer)


def _norm_weighted(model, x, score, *, layer: int | None = None) -> Tensor:
    """Attention times the length of what is read there, mean of heads (Kobayashi et al. 2020).

    A head may look where it copies nothing: A[CLS, j] * ||W_O v_j|| says what arrives.
    """
    found = _map_of(model, x, layer)
    depth = model.num_layers - 1 if layer is None else layer
    weight = model.out_weight(depth).to(found.v.dtype)  # (D, H, D/H)
    # ||W v|| by way of W'W (H, D/H, D/H): the written vectors themselves would be D numbers a token and head
    gram = torch.einsum("dhi,dhj->hij", weight, weight)
    lengths = torch.einsum("bhni,hij,bhnj->bhn", found.v, gram, found.v).clamp_min(0).sqrt()
    rows = torch.einsum("q,bhqn->bhn", model.readout(found.map.shape[-1]).to(found.map.dtype), found.map)
    return (rows * lengths).mean(dim=1)[:, model.prefix_tokens :]


# ---- attention and its gradients ---------------------------------------------------------------------------


def _gradient_rollout(
    model, x, score, *, discard_ratio: float = 0.0, residual: float = 0.5, start_layer: int = 0
) -> Tensor:
    """Rollout of relu(mean_h(A * G)), each layer with its own gradient."""
    pairs = _maps_and_gradients(model, x, score)
    fused = [(A * G).mean(dim=1, keepdim=True).relu() for A, G in pairs]
    return _rolled(model, fused, discard_ratio, residual, start_layer)


def _chefer(model, x, score, *, start_layer: int = 0) -> Tensor:
    """R <- R + mean_h(relu(G * A)) R from the first layer to the last: here one row, from the last down."""
    require_index("start_layer", start_layer, model.num_layers)
    pairs = _maps_and_gradients(model, x, score)
    row = _readout_row(model, pairs[0][0])  # (B, 1, N)
    for A, G in reversed(pairs[start_layer:]):
        row = row + row @ (A * G).relu_().mean(dim=1)
    return row[:, 0, model.prefix_tokens :]


def _legrad(model, x, score, *, start_layer: int = 0) -> Tensor:
    """Mean over layers, heads and queries of relu(G), G of each layer's own answer by the final head."""
    require_index("start_layer", start_layer, model.num_layers)
    with torch.enable_grad():
        tokens = model.embed(x, dropout=False).detach().requires_grad_()
        found = []
        for layer in model.steps(tokens, explicit=True, dropout=False):
            said = score(model.classify(layer.tokens)).sum()
            (gradient,) = torch.autograd.grad(said, layer.map, retain_graph=True)
            found.append(gradient.relu_().mean(dim=(1, 2)))  # (B, N)
    return torch.stack(found[start_layer:]).mean(dim=0)[:, model.prefix_tokens :]


# ---- gradients of tokens and pixels ------------------------------------------------------------------------


def _gradcam(model, x, score) -> Tensor:
    """relu of the patches' tokens at the last block's first norm, weighted by their mean gradients.

    Not the block's output, whose patches have no gradient: the answer is read from CLS.
    """
    with torch.enable_grad():
        tokens = model.embed(x, dropout=False).detach().requires_grad_()
        *_, last = model.steps(tokens, explicit=False, dropout=False)
        (gradient,) = torch.autograd.grad(score(model.classify(last.tokens)).sum(), last.normed)
    weights = gradient[:, model.prefix_tokens :].mean(dim=1, keepdim=True)  # (B, 1, D)
    return (last.normed[:, model.prefix_tokens :] * weights).sum(dim=-1).relu()


def _integrated_gradients(model, x, score, *, steps: int = 32) -> Tensor:
    """The gradients on the straight way from the mean colour (0) to the picture, times the picture.

    With `steps` points of Gauss and Legendre the patches sum to the score's change on that way.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is a whole number of at least 1, not {steps!r}")
    places, weights = np.polynomial.legendre.leggauss(steps)
    total = torch.zeros_like(x)
    for place, weight in zip((places + 1) / 2, weights / 2, strict=True):
        total += float(weight) * _pixel_gradient(model, x * float(place), score)
    return _by_patch(model, total * x)


def _input_gradient(model, x, score) -> Tensor:
    """The size of the score's gradient with respect to each pixel value, summed over the patch."""
    return _by_patch(model, _pixel_gradient(model, x, score).abs())


def _attnlrp(model, x, score) -> Tensor:
    with torch.enable_grad():
        return attnlrp(model, x, score)[:, model.prefix_tokens :]


# ---- running the model again, and what knows nothing -------------------------------------------------------


def _leave_one_out(model, x, score) -> Tensor:
    """What the score loses without each patch, removed alone as a token: exact, by P more runs."""
    P = math.prod(model.grid)
    others = torch.arange(P - 1, device=x.device)
    without = torch.arange(P, device=x.device)[:, None]
    keep = others + (others >= without)  # (P, P - 1): all but one

    def logits(keep: Tensor, picture: Tensor) -> tuple[Tensor]:
        return (_logits(model, picture.expand(len(keep), -1, -1, -1), keep),)

    whole = score(_logits(model, x))  # (B,)
    # every picture's own classes: `score` takes all pictures at once, so the runs are turned to (P, B, K)
    runs = torch.stack(
        [in_parts(lambda keep, one=one: logits(keep, one), _RUNS_PART, keep)[0] for one in x.split(1)], dim=1
    )
    return whole[:, None] - torch.stack([score(run) for run in runs], dim=1)


def _random(model, x, score, *, seed: int = 0) -> Tensor:
    """Drawn at random, for each picture by its own pixels: the same alone and in a batch."""
    rows = [np.random.default_rng([seed, zlib.crc32(one.cpu().contiguous().numpy().tobytes())]) for one in x]
    drawn = np.stack([row.random(math.prod(model.grid)) for row in rows])
    return torch.from_numpy(drawn).to(x)


def _centre(model, x, score) -> Tensor:
    """A round bump in the middle, which sums to 1: most pictures show their object there."""
    return centre_bump(model.grid).to(x).flatten().expand(len(x), -1).clone()


def centre_bump(grid: tuple[int, int]) -> Tensor:
    """(GY, GX) float64: the map of `centre`."""
    down, across = ((torch.arange(side, dtype=torch.float64) + 0.5) / side - 0.5 for side in grid)
    bump = torch.exp(-(down[:, None] ** 2 + across**2) / (2 * CENTRE_SPREAD**2))
    return bump / bump.sum()


# ---- steps of several methods ------------------------------------------------------------------------------


def _logits(model, x: Tensor, keep: Tensor | None = None) -> Tensor:
    """(B, K), without dropout whatever the model's mode, and without maps."""
    tokens = model.embed(x, keep=keep, dropout=False)
    for layer in model.steps(tokens, keep=keep, cls_only=True, explicit=False, dropout=False):
        tokens = layer.tokens
    return model.classify(tokens)


def _map_of(model, x: Tensor, layer: int | None) -> Layer:
    """What one layer saw, the last if None; the passes above it are not made."""
    depth = model.num_layers - 1 if layer is None else layer
    require_index("layer", depth, model.num_layers)
    steps = model.steps(model.embed(x, dropout=False), explicit=True, dropout=False)
    for _ in range(depth):
        next(steps)
    return next(steps)


def _maps_and_gradients(model, x: Tensor, score: Score) -> list[tuple[Tensor, Tensor]]:
    """L pairs of A and G, (B, H, N, N) each, from one pass there and one back."""
    with torch.enable_grad():
        tokens = model.embed(x, dropout=False).detach().requires_grad_()
        layers = list(model.steps(tokens, explicit=True, dropout=False))
        maps = [layer.map for layer in layers]
        gradients = torch.autograd.grad(score(model.classify(layers[-1].tokens)).sum(), maps)
    return [(A.detach(), G) for A, G in zip(maps, gradients, strict=True)]


def _pixel_gradient(model, x: Tensor, score: Score) -> Tensor:
    with torch.enable_grad():
        pixels = x.detach().requires_grad_()
        return torch.autograd.grad(score(_logits(model, pixels)).sum(), pixels)[0]


def _by_patch(model, values: Tensor) -> Tensor:
    """(B, C, height, width) -> (B, P): sums over channels and the patch's pixels."""
    GY, GX = model.grid
    return values.sum(dim=1).unflatten(-1, (GX, -1)).unflatten(-3, (GY, -1)).sum(dim=(-3, -1)).flatten(1)


def _readout_row(model, maps: Tensor) -> Tensor:
    """(B, 1, N): with what weight the answer reads each token."""
    return model.readout(maps.shape[-1]).to(maps.dtype).expand(len(maps), 1, -1)


def _read_row(model, fused: Tensor) -> Tensor:
    """(B, N, N) -> (B, P): the row of the tokens that the answer is read from."""
    return (_readout_row(model, fused) @ fused)[:, 0, model.prefix_tokens :]


def _rolled(model, fused: list[Tensor], discard_ratio: float, residual: float, start_layer: int) -> Tensor:
    """L maps (B, 1, N, N) -> (B, P): rollout, which leaves a single head as it is."""
    readout = model.readout(fused[0].shape[-1]).to(fused[0].dtype)
    rows = rollout_row_by_layer(fused, readout, "mean", discard_ratio, residual, start_layer)
    return rows[:, -1, model.prefix_tokens :]


def _per_picture(name: str, value: int | Tensor, B: int, num_classes: int, device) -> Tensor:
    if not isinstance(value, Tensor):
        require_index(name, value, num_classes)
        return torch.full((B,), value, dtype=torch.int64, device=device)
    if value.shape != (B,) or value.dtype != torch.int64:
        raise ValueError(
            f"{name} is one class or int64 of the shape {(B,)}, not {value.dtype} {tuple(value.shape)}"
        )
    if B and not 0 <= value.min() <= value.max() < num_classes:
        raise ValueError(f"{name} holds classes 0 to {num_classes - 1}, not {value.min()} to {value.max()}")
    return value.to(device)


METHODS = {
    "raw": Method(
        "Attention of the last layer",
        False,
        "Where the answer's token looks in the last layer, on average over its heads.",
        "It is one layer of many, is the same for every class, and looking is not using.",
        "Vaswani et al. 2017, arXiv 1706.03762",
        _raw,
    ),
    "rollout": Method(
        "Attention rollout",
        False,
        "How much of each patch reached the answer's token if all layers only passed on what they look at.",
        "It is the same for every class, and knows neither what heads copy nor what MLPs do.",
        "Abnar and Zuidema 2020, arXiv 2005.00928",
        _rollout,
    ),
    "norm_weighted": Method(
        "Norm-weighted attention",
        False,
        "Attention of the last layer times the length of what is read: a head that copies nothing fades.",
        "It is one layer, the same for every class, and a long vector may speak for another class.",
        "Kobayashi et al. 2020, arXiv 2004.10102",
        _norm_weighted,
    ),
    "gradient_rollout": Method(
        "Gradient rollout",
        True,
        "Rollout of that attention alone which raises the class: attention times its gradient.",
        "Evidence against the class is cut off in every layer, and small gradients leave little.",
        "Abnar and Zuidema 2020 with gradients, as in Chefer et al. 2021, arXiv 2012.09838",
        _gradient_rollout,
    ),
    "chefer": Method(
        "Chefer relevance",
        True,
        "Attention times its gradient, head by head, added up through the layers.",
        "Only evidence for the class is kept, and what MLPs do is seen through gradients alone.",
        "Chefer et al. 2021, arXiv 2103.15679",
        _chefer,
    ),
    "legrad": Method(
        "LeGrad",
        True,
        "How much more attention to a patch would raise the class, on average over heads and layers.",
        "It says what attention could add, not what it adds: a patch that nobody looks at may light up.",
        "Bousselham et al. 2024, arXiv 2404.03214",
        _legrad,
    ),
    "gradcam": Method(
        "Grad-CAM on tokens",
        True,
        "Which patches carry, at the last block, the features that raise the class.",
        "Tokens have moved information by then, and one weight for a feature at all places is coarse.",
        "Selvaraju et al. 2017, arXiv 1610.02391",
        _gradcam,
    ),
    "input_gradient": Method(
        "Input gradient",
        True,
        "How strongly a small change of each pixel would change the class, whichever way.",
        "It says what the answer is sensitive to, not what it rests on, and is noisy.",
        "Simonyan et al. 2014, arXiv 1312.6034",
        _input_gradient,
    ),
    "integrated_gradients": Method(
        "Integrated gradients",
        True,
        "What each patch adds on the way from the mean colour to the picture; the patches sum to the change.",
        "A patch of the mean colour gets nothing, even where it matters that it is so.",
        "Sundararajan et al. 2017, arXiv 1703.01365",
        _integrated_gradients,
    ),
    "attnlrp": Method(
        "AttnLRP",
        True,
        "The class's logit handed back through every operation; all tokens together hold the whole of it.",
        "Part of the logit stays on CLS and with constants, and its rules are one choice of many.",
        "Achtibat et al. 2024, arXiv 2402.05602",
        _attnlrp,
    ),
    "leave_one_out": Method(
        "Leave one patch out",
        True,
        "What the class really loses when this patch alone is removed: measured by running the model again.",
        "Where several patches show the same, each alone seems to be worth nothing.",
        "Zeiler and Fergus 2014, arXiv 1311.2901; tokens removed as in arXiv 2204.08945",
        _leave_one_out,
    ),
    "random": Method(
        "Random",
        False,
        "Drawn at random: what any method must beat.",
        "It knows neither the picture nor the model.",
        "baseline",
        _random,
        is_baseline=True,
    ),
    "centre": Method(
        "Centre",
        False,
        "A bump in the middle, where most pictures show their object.",
        "It knows neither the picture nor the model.",
        "baseline",
        _centre,
        is_baseline=True,
    ),
}
