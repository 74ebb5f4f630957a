"""What a model is made of, and the arithmetic of one head: for the viewer's two drawers and for `info`.

    stages(model)                                   # picture, patch embedding, …: shapes and parameters
    patch_filters(model), position_similarity(model), head_similarity(trace.maps[0])
    arithmetic(trace, layer=2, head=0, token=17)    # q, k, v, scores and row of that token
    anatomy_payload(model, trace), arithmetic_payload(trace, 2, 0)    # the same for a browser

All is read from the loaded model and from the first picture of a trace, and nothing is changed. Letters for
shapes as in `vit/model.py`. Layers, heads and tokens count from 0.
"""

import base64
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.attention import require_index
from vit.model import Trace, VisualTransformer

_MOST_FILTERS = 64
_LARGEST_SIDE = 256  # a square of similarities goes to a browser up to this many rows: 64 KB
_LARGEST_FILTERS = 2**16  # pixels


@dataclass(frozen=True)
class Stage:
    """One step of the pass. Its parameters are those of its parts, where it has some."""

    name: str
    what: str  # one sentence
    shape_in: str  # of one picture, as "3 x 32 x 32"
    shape_out: str
    parameters: int
    parts: tuple["Stage", ...] = ()


def stages(model: VisualTransformer) -> list[Stage]:
    """From picture to logits, in order; the parameters of the list add up to those of the model."""
    embed = model.patch_embed
    picture = _shape(embed.conv.in_channels, *embed.img_size)
    patches = _shape(embed.num_patches, embed.conv.out_channels)
    tokens = _shape(*model.pos_embed.shape[1:])
    first = [
        Stage("picture", "Colour values, normalised channel by channel.", picture, picture, 0),
        Stage(
            "patch embedding",
            f"Each patch of {embed.patch_size} x {embed.patch_size} px becomes a token of"
            f" {embed.conv.out_channels} numbers.",
            picture,
            patches,
            _count(embed),
        ),
        Stage(
            "CLS + positions",
            "A token for the whole picture goes in front; each is told where it stands.",
            patches,
            tokens,
            model.cls_token.numel() + model.pos_embed.numel(),
        ),
    ]
    last = Stage(
        "norm + head",
        "The CLS token alone is normalised and gives each class its logit.",
        tokens,
        str(model.mlp_head[-1].out_features),
        _count(model.norm, model.mlp_head),
    )
    return [*first, *(_layer(depth, block, tokens) for depth, block in enumerate(model.encoder_blocks)), last]


def _layer(depth: int, block: nn.Module, tokens: str) -> Stage:
    attn, widen = block.attn, block.mlp[0]
    parts = (
        Stage(
            "attention",
            f"{attn.num_heads} heads of {attn.head_dim} numbers let each token read from all others.",
            tokens,
            tokens,
            _count(block.norm1, attn),
        ),
        Stage(
            "MLP",
            f"Each token is worked on alone, by way of {widen.out_features} numbers.",
            tokens,
            tokens,
            _count(block.norm2, block.mlp),
        ),
    )
    what = "Tokens read from one another, then each is worked on alone; both are added to what it was."
    return Stage(f"layer {depth + 1}", what, tokens, tokens, sum(part.parameters for part in parts), parts)


@torch.no_grad()
def patch_filters(model: VisualTransformer) -> np.ndarray:
    """(F, patch, patch, 3) uint8: the filters that make tokens of patches, as pictures, the strongest first.

    At most 64, by their norm. Each is scaled by its own largest weight: that is 0 or 255, and no weight 128.
    Filters of one channel are grey, and so is the mean over channels where there are neither one nor three.
    """
    weight = model.patch_embed.conv.weight.float().cpu()  # (D, C, patch, patch)
    strongest = weight.flatten(1).norm(dim=1).argsort(descending=True, stable=True)[:_MOST_FILTERS]
    weight = weight[strongest]
    if weight.shape[1] != 3:
        weight = weight.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    largest = weight.abs().amax(dim=(1, 2, 3), keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    return (127.5 + 127.5 * weight / largest).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


@torch.no_grad()
def position_similarity(model: VisualTransformer) -> np.ndarray:
    """(P, P) float32 from -1 to 1: the cosine of the angle between the position embeddings of two patches."""
    unit = F.normalize(model.pos_embed[0, 1:].float(), dim=-1)  # (P, D)
    return (unit @ unit.T).clamp(-1, 1).cpu().numpy()


@torch.no_grad()
def head_similarity(attention: Tensor) -> np.ndarray:
    """(L, H, N, N) -> (L*H, L*H) float32 from 0 to 1: how alike two heads look at one picture.

    The cosine of the angle between their rows, as a mean over tokens: 1 where two heads give the same patches
    the same weights, 0 where they share none. Symmetric, 1 on the diagonal. A divergence of distributions
    would say much the same, but this is one product of matrices: for 144 heads of 197 tokens 0.02 s, not 3 s.
    """
    if attention.ndim != 4 or attention.shape[-1] != attention.shape[-2]:
        raise ValueError(f"attention has the shape (L, H, N, N), not {tuple(attention.shape)}")
    heads = attention.flatten(0, 1).float()  # (L*H, N, N)
    total = heads.new_zeros(len(heads), len(heads))
    for rows in heads.split(64, dim=1):  # the unit rows of all would be a second copy of all maps
        unit = F.normalize(rows, dim=-1).flatten(1)
        total += unit @ unit.T
    alike = (total / heads.shape[1]).clamp(0, 1).fill_diagonal_(1)
    return ((alike + alike.T) / 2).cpu().numpy()


@dataclass(frozen=True, eq=False)
class Arithmetic:
    """How one token comes by its row of attention in one head; float32, d = D/H."""

    q: np.ndarray  # (d) of the token
    k: np.ndarray  # (N, d) of all tokens, and so v
    v: np.ndarray
    scores: np.ndarray  # (N) q · k / sqrt(d)
    row: np.ndarray  # (N) softmax of the scores: the weights of v in what the head hands on
    read: np.ndarray  # (d) what it hands on


def arithmetic(trace: Trace, layer: int, head: int, token: int) -> Arithmetic:
    """For the trace's first picture. ValueError for a layer, head or token that is not there."""
    q, k, v = _qkv(trace, layer, head)
    require_index("token", token, len(q))
    scores = k @ q[token] * q.shape[-1] ** -0.5
    row = scores.softmax(dim=-1)
    return Arithmetic(*(part.numpy() for part in (q[token], k, v, scores, row, row @ v)))


def anatomy_payload(model: VisualTransformer, trace: Trace) -> dict:
    """The anatomy as JSON's types: `stages` and, as base64 of uint8, pictures of weights.

    ValueError for a model of others, whose parts have other names.

    filters          (filter_count, patch_px, patch_px, 3); `filters_in_all` is how many the model has
    positions        (P, P), similarity = value / 255 * 2 - 1; None for more than 256 patches
    head_similarity  (L*H, L*H), similarity = value / 255; None for more than 256 heads
    """
    if not isinstance(model, VisualTransformer):
        raise ValueError("the anatomy is known of Patchlight's own models alone")
    steps = stages(model)
    patch_px = model.patch_embed.patch_size
    filters = patch_filters(model)[: max(1, _LARGEST_FILTERS // patch_px**2)]
    positions = heads = None
    if model.patch_embed.num_patches <= _LARGEST_SIDE:
        positions = _text(np.rint((position_similarity(model) + 1) / 2 * 255).astype(np.uint8))
    if model.num_layers * model.num_heads <= _LARGEST_SIDE:
        maps = torch.stack([layer.map[0] for layer in trace.layers])  # (L, H, N, N)
        heads = _text(np.rint(head_similarity(maps) * 255).astype(np.uint8))
    return {
        "stages": [asdict(stage) for stage in steps],
        "parameters": sum(stage.parameters for stage in steps),
        "grid": list(model.grid),
        "layers": model.num_layers,
        "heads": model.num_heads,
        "patch_px": patch_px,
        "filters": _text(filters),
        "filter_count": len(filters),
        "filters_in_all": model.patch_embed.conv.out_channels,
        "positions": positions,
        "head_similarity": heads,
    }


def arithmetic_payload(trace: Trace, layer: int, head: int) -> dict:
    """`q`, `k` and `v` of one head, each (tokens, d) float32 as base64: the browser does the rest itself.

    33 KB for the default model. ValueError for a layer or head that is not there.
    """
    q, k, v = _qkv(trace, layer, head)
    sizes = {"layer": layer, "head": head, "tokens": q.shape[0], "d": q.shape[1]}
    return sizes | {name: _text(part.numpy()) for name, part in zip("qkv", (q, k, v), strict=True)}


def _qkv(trace: Trace, layer: int, head: int) -> list[Tensor]:
    """Three of (N, d), float32 on the CPU."""
    require_index("layer", layer, len(trace.layers))
    step = trace.layers[layer]
    require_index("head", head, step.q.shape[1])
    return [part[0, head].detach().float().cpu() for part in (step.q, step.k, step.v)]


def _count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _shape(*sizes: int) -> str:
    return " x ".join(map(str, sizes))


def _text(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
