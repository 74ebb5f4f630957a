"""The Vision Transformer, from scratch: pictures in, logits and every attention map out.

    model = VisualTransformer(num_classes=10)
    logits = model(x)                             # fused attention, the fast path
    logits, maps = model(x, return_attn=True)     # maps: L tensors (B, H, N, N), rows sum to 1
    trace = model.trace(x)                        # tokens, queries, keys, values, maps, logits

Architecture: Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words" (arXiv 2010.11929), pre-norm, in the
form of the tutorial that README credits; parameter names are the tutorial's, so its checkpoints load.

Shapes, here and in every other file: B batch, K classes, L layers, H heads, N = 1 + P tokens, P patches,
D width, (GY, GX) the grid of patches. Token 0 is CLS; patches follow row by row.

Nothing is ever stored on a module by a call, so that one model serves many threads.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.parts import in_parts

MAPS_PART = 32  # pictures that give their maps together on a CPU


class Layer(NamedTuple):
    """What one encoder block saw and did. Without maps asked for, only `tokens` is set."""

    tokens: Tensor  # (B, N, D) as the block leaves them
    q: Tensor | None = None  # (B, H, N, D/H)
    k: Tensor | None = None  # (B, H, N, D/H)
    v: Tensor | None = None  # (B, H, N, D/H)
    map: Tensor | None = None  # (B, H, N, N) probabilities before dropout


@dataclass(frozen=True, eq=False)
class Trace:
    """Everything inside one pass without dropout. Stacked tensors are made when first asked for.

    To differentiate the logits with respect to attention, take `layers[l].map`: the logits were computed
    from those tensors, while the stacked `maps` is a copy made of them.
    """

    embedded: Tensor  # (B, N, D) what enters the first block
    layers: tuple[Layer, ...]  # L
    logits: Tensor  # (B, K)

    @cached_property
    def tokens(self) -> Tensor:
        """(B, L+1, N, D): before the first block, then after each."""
        return torch.stack([self.embedded, *(layer.tokens for layer in self.layers)], dim=1)

    @cached_property
    def q(self) -> Tensor:
        """(B, L, H, N, D/H)"""
        return torch.stack([layer.q for layer in self.layers], dim=1)

    @cached_property
    def k(self) -> Tensor:
        """(B, L, H, N, D/H)"""
        return torch.stack([layer.k for layer in self.layers], dim=1)

    @cached_property
    def v(self) -> Tensor:
        """(B, L, H, N, D/H)"""
        return torch.stack([layer.v for layer in self.layers], dim=1)

    @cached_property
    def maps(self) -> Tensor:
        """(B, L, H, N, N), rows sum to 1."""
        return torch.stack([layer.map for layer in self.layers], dim=1)


class PatchEmbedding(nn.Module):
    """Cuts pictures into patches and projects each to D numbers, with one strided convolution.

    `img_size` is one side in pixels or (height, width). ValueError if patches do not tile the picture.
    """

    def __init__(
        self,
        img_size: int | Sequence[int] = 32,
        patch_size: int = 4,
        in_channels: int = 3,
        embed_dim: int = 256,
    ):
        super().__init__()
        sides = tuple(img_size) if isinstance(img_size, Sequence) else (img_size, img_size)
        if len(sides) != 2:
            raise ValueError(f"img_size is one side or (height, width), not {img_size!r}")
        height_px, width_px = sides
        for name, value in (
            ("img_size", height_px),
            ("img_size", width_px),
            ("patch_size", patch_size),
            ("in_channels", in_channels),
            ("embed_dim", embed_dim),
        ):
            _require_positive(name, value)
        _require_divisible("img_size", height_px, "patch_size", patch_size)
        _require_divisible("img_size", width_px, "patch_size", patch_size)
        self.img_size = (height_px, width_px)
        self.patch_size = patch_size
        self.grid = (height_px // patch_size, width_px // patch_size)
        self.num_patches = self.grid[0] * self.grid[1]
        self.conv = nn.Conv2d(in_channels, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, height, width) -> (B, P, D). ValueError for pictures of another size."""
        expected = (self.conv.in_channels, *self.img_size)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ValueError(
                f"the model takes a batch of pictures of {' x '.join(map(str, expected))} "
                f"(channels, height, width), not a tensor of shape {tuple(x.shape)}"
            )
        return self.conv(x).flatten(2).transpose(1, 2)  # (B, D, GY, GX) -> (B, P, D)


class MultiHeadAttention(nn.Module):
    """H heads of scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762), without biases."""

    def __init__(self, dim: int, num_heads: int, dropout: float):
        super().__init__()
        _require_positive("dim", dim)
        _require_positive("num_heads", num_heads)
        _require_divisible("dim", dim, "num_heads", num_heads)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)  # rows: q, k, v
        self.out = nn.Linear(dim, dim, bias=False)
        self.attn_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, return_attn: bool = False):
        """(B, N, D) -> (B, N, D), or with `return_attn` also the map (B, H, N, N).

        `mask` is broadcastable to (B, H, N, N); 0 blocks. A row with everything blocked gives zeros, in the
        map and in what its heads read, never NaN.
        """
        out, layer = self.attend(x, mask=mask, explicit=return_attn, dropout=self.training)
        return (out, layer.map) if return_attn else out

    def attend(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        gate: Tensor | None = None,
        explicit: bool,
        dropout: bool,
    ) -> tuple[Tensor, Layer]:
        """The attention of one layer, for `forward` and for `VisualTransformer.trace`.

        `gate` (H,) scales what each head hands to the output projection. `explicit` computes the map; else
        the fused kernel does the same without ever holding one. `dropout` is an argument, not the module's
        mode, because a trace must not depend on the mode nor change it.
        """
        B, N, D = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        open_rows = None  # (B, H, N, 1) False where a query has nothing to look at
        if mask is not None:
            try:
                mask = (mask != 0).expand(B, self.num_heads, N, N)
            except RuntimeError as error:
                shape = (B, self.num_heads, N, N)
                raise ValueError(f"a mask of {tuple(mask.shape)} cannot be spread to {shape}") from error
            open_rows = mask.any(dim=-1, keepdim=True)
            mask = mask | ~open_rows  # softmax over nothing is NaN: let such rows see all, zero them below
        attn_dropout = self.attn_dropout.p if dropout else 0.0
        attn_map = None
        if explicit:
            scores = (q @ k.transpose(-2, -1)).mul_(self.scale)  # (B, H, N, N); q times scale would be copied
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf)
            attn_map = scores.softmax(dim=-1)
            if open_rows is not None:
                attn_map = attn_map * open_rows
            read = F.dropout(attn_map, attn_dropout, training=dropout) @ v  # (B, H, N, D/H)
        else:
            read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=attn_dropout)
            if open_rows is not None:
                read = read * open_rows
        if gate is not None:
            read = read * gate[:, None, None].to(read.dtype)
        out = self.out(read.transpose(1, 2).reshape(B, N, D))
        return out, Layer(out, q, k, v, attn_map)


class TransformerEncoderBlock(nn.Module):
    """Attention, then a GELU MLP, each on normalised tokens and added back to them (pre-norm)."""

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, dropout: float):
        super().__init__()
        _require_positive("mlp_dim", mlp_dim)
        self.norm1 = nn.LayerNorm(dim)
        self.attn = MultiHeadAttention(dim, num_heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_dim, dim),
            nn.Dropout(dropout),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, return_attn: bool = False):
        """(B, N, D) -> (B, N, D), or with `return_attn` also the map (B, H, N, N)."""
        layer = self.step(x, explicit=return_attn, dropout=self.training)
        return (layer.tokens, layer.map) if return_attn else layer.tokens

    def step(self, x: Tensor, *, gate: Tensor | None = None, explicit: bool, dropout: bool) -> Layer:
        """The block, for `forward` and for `VisualTransformer.trace`; arguments as in `attend`."""

        def drop(branch: Tensor, module: nn.Dropout) -> Tensor:
            return F.dropout(branch, module.p, training=dropout)

        read, layer = self.attn.attend(self.norm1(x), gate=gate, explicit=explicit, dropout=dropout)
        x = x + drop(read, self.dropout)
        widen, gelu, drop_hidden, narrow, drop_out = self.mlp
        hidden = drop(gelu(widen(self.norm2(x))), drop_hidden)  # (B, N, mlp_dim)
        x = x + drop(drop(narrow(hidden), drop_out), self.dropout)
        return layer._replace(tokens=x)


class VisualTransformer(nn.Module):
    """The classifier. 3,189,514 parameters at the defaults with 10 classes.

    `img_size` is one side in pixels or (height, width). `init="tutorial"` draws CLS and positions from the
    standard normal and leaves torch's defaults elsewhere; `"small"` draws all weights from a normal of
    deviation 0.02 cut at two deviations and scales each branch's last matrix by 1/sqrt(2L), so that the sum
    over 2L branches starts no larger than one. Sizes that do not fit raise ValueError.
    """

    def __init__(
        self,
        num_classes: int,
        img_size: int | Sequence[int] = 32,
        patch_size: int = 4,
        in_channels: int = 3,
        embed_dim: int = 256,
        num_layers: int = 6,
        num_heads: int = 8,
        mlp_dim: int = 512,
        dropout: float = 0.1,
        *,
        init: Literal["small", "tutorial"] = "small",
    ):
        super().__init__()
        _require_positive("num_classes", num_classes)
        _require_positive("num_layers", num_layers)
        if init not in ("small", "tutorial"):
            raise ValueError(f"init is 'small' or 'tutorial', not {init!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout lies from 0 to below 1, not {dropout}")
        self.patch_embed = PatchEmbedding(img_size, patch_size, in_channels, embed_dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + self.patch_embed.num_patches, embed_dim))
        self.dropout = nn.Dropout(dropout)
        self.encoder_blocks = nn.ModuleList(
            TransformerEncoderBlock(embed_dim, num_heads, mlp_dim, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.mlp_head = nn.Sequential(nn.LayerNorm(embed_dim), nn.Linear(embed_dim, num_classes))
        if init == "small":
            self._init_small()

    def forward(self, x: Tensor, return_attn: bool = False, *, keep: Tensor | None = None):
        """(B, C, height, width) -> logits (B, K); with `return_attn` -> (logits, maps).

        `maps` is a list of L tensors (B, H, N, N): attention probabilities before dropout, so that rows sum
        to 1 in train mode too. `keep` as in `trace`: patch dropout for training (arXiv 2208.07220).
        """

        def encode(tokens: Tensor) -> tuple[Tensor, ...]:
            maps = []
            for layer in self.steps(tokens, explicit=return_attn, dropout=self.training):
                tokens = layer.tokens
                if return_attn:
                    maps.append(layer.map)
            return self.classify(tokens), *maps

        tokens = self.embed(x, keep=keep, dropout=self.training)
        if not return_attn:
            return encode(tokens)[0]
        logits, *maps = in_parts(encode, MAPS_PART, tokens)
        return logits, maps

    def trace(self, x: Tensor, *, keep: Tensor | None = None, head_gate: Tensor | None = None) -> Trace:
        """One pass that keeps everything, without dropout whatever the mode; it changes nothing.

        `keep` (B, k) holds the indices, 0 to P-1, of the patches that stay; the others are removed as
        tokens after positions were added, so N becomes 1 + k. `head_gate` (L, H) scales what each head
        hands on: 1 leaves it, 0 switches it off. Differentiable where gradients are on. ValueError for
        arguments of another shape or type.
        """
        if head_gate is not None and tuple(head_gate.shape) != (self.num_layers, self.num_heads):
            raise ValueError(
                f"head_gate has one number per head, shape {(self.num_layers, self.num_heads)}, "
                f"not {tuple(head_gate.shape)}"
            )
        embedded = self.embed(x, keep=keep, dropout=False)
        layers = tuple(self.steps(embedded, head_gate=head_gate, explicit=True, dropout=False))
        return Trace(embedded, layers, self.classify(layers[-1].tokens))

    def embed(self, x: Tensor, *, keep: Tensor | None = None, dropout: bool) -> Tensor:
        """Pictures (B, C, height, width) to the tokens (B, N, D) that enter the first block."""
        patches = self.patch_embed(x) + self.pos_embed[:, 1:]  # (B, P, D)
        if keep is not None:
            if keep.ndim != 2 or len(keep) != len(x) or keep.dtype != torch.int64:
                raise ValueError(
                    f"keep is int64 of the shape (pictures, patches that stay), with {len(x)} pictures, "
                    f"not {keep.dtype} {tuple(keep.shape)}"
                )
            # on a GPU the check would wait for the device at every step of training
            P = patches.shape[1]
            if keep.device.type == "cpu" and keep.numel() and not 0 <= keep.min() <= keep.max() < P:
                raise ValueError(f"keep holds patches 0 to {P - 1}, not {keep.min()} to {keep.max()}")
            patches = patches.gather(1, keep[:, :, None].expand(-1, -1, patches.shape[2]))  # (B, k, D)
        cls = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1)  # (B, 1, D)
        return F.dropout(torch.cat((cls, patches), dim=1), self.dropout.p, training=dropout)

    def classify(self, tokens: Tensor) -> Tensor:
        """Tokens (..., N, D) after any block to logits (..., K), read from CLS by final norm and head."""
        return self.mlp_head(self.norm(tokens[..., 0, :]))

    @property
    def num_layers(self) -> int:
        return len(self.encoder_blocks)

    @property
    def num_heads(self) -> int:
        return self.encoder_blocks[0].attn.num_heads

    @property
    def grid(self) -> tuple[int, int]:
        """(GY, GX), patches down and across."""
        return self.patch_embed.grid

    def steps(
        self, tokens: Tensor, *, head_gate: Tensor | None = None, explicit: bool, dropout: bool
    ) -> Iterator[Layer]:
        """The one pass through the blocks, from what `embed` gives; arguments as in `attend` and `trace`.

        A generator: maps are large, and whoever needs little of a layer can take it and let the rest go.
        """
        for depth, block in enumerate(self.encoder_blocks):
            gate = None if head_gate is None else head_gate[depth]
            layer = block.step(tokens, gate=gate, explicit=explicit, dropout=dropout)
            tokens = layer.tokens
            yield layer

    def _init_small(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.cls_token, std=0.02, a=-0.04, b=0.04)
        nn.init.trunc_normal_(self.pos_embed, std=0.02, a=-0.04, b=0.04)
        with torch.no_grad():
            for block in self.encoder_blocks:
                block.attn.out.weight.mul_((2 * self.num_layers) ** -0.5)
                block.mlp[3].weight.mul_((2 * self.num_layers) ** -0.5)


def _require_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is a whole number of at least 1, not {value!r}")


def _require_divisible(whole_name: str, whole: int, part_name: str, part: int) -> None:
    if whole % part == 0:
        return
    small = [number for number in range(1, math.isqrt(whole) + 1) if whole % number == 0]
    divisors = [*small, *(whole // number for number in small)]
    below = max(number for number in divisors if number < part)
    above = min((number for number in divisors if number > part), default=whole)
    parts = " or ".join(map(str, sorted({below, above})))
    wholes = " or ".join(str(number * part) for number in (whole // part, whole // part + 1) if number)
    raise ValueError(
        f"{whole_name} {whole} cannot be divided by {part_name} {part}; "
        f"the nearest that work are {part_name} {parts} for {whole_name} {whole}, "
        f"or {whole_name} {wholes} for {part_name} {part}"
    )
