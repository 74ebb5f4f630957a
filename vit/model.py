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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from vit.block import Layer, MultiHeadAttention, TransformerEncoderBlock, require_divisible, require_positive
from vit.dropout import drop
from vit.parts import in_parts

__all__ = ["MultiHeadAttention", "PatchEmbedding", "Trace", "TransformerEncoderBlock", "VisualTransformer"]

MAPS_PART = 32  # pictures that give their maps together on a CPU


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
            require_positive(name, value)
        require_divisible("img_size", height_px, "patch_size", patch_size)
        require_divisible("img_size", width_px, "patch_size", patch_size)
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
        require_positive("num_classes", num_classes)
        require_positive("num_layers", num_layers)
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

    def forward(
        self,
        x: Tensor,
        return_attn: bool = False,
        *,
        keep: Tensor | None = None,
        branch_gate: Tensor | None = None,
    ):
        """(B, C, height, width) -> logits (B, K); with `return_attn` -> (logits, maps).

        `maps` is a list of L tensors (B, H, N, N): attention probabilities before dropout, so that rows sum
        to 1 in train mode too. `keep` as in `trace`: patch dropout for training (arXiv 2208.07220).
        `branch_gate` (L, 2, B): what each block's attention branch [l, 0] and MLP branch [l, 1] of each
        picture is multiplied by before it is added: stochastic depth (arXiv 1603.09382), drawn by whoever
        trains. ValueError for arguments of another shape or type.
        """
        if branch_gate is not None and tuple(branch_gate.shape) != (self.num_layers, 2, len(x)):
            raise ValueError(
                f"branch_gate has one number per block, branch and picture, shape "
                f"{(self.num_layers, 2, len(x))}, not {tuple(branch_gate.shape)}"
            )

        def encode(tokens: Tensor, *gate_by_picture: Tensor) -> tuple[Tensor, ...]:
            branch_gate = gate_by_picture[0].permute(1, 2, 0) if gate_by_picture else None
            maps = []
            # what the last block makes of patches goes nowhere: not to work it out spares a tenth of a step
            for layer in self.steps(
                tokens,
                branch_gate=branch_gate,
                cls_only=self.training and not return_attn,
                explicit=return_attn,
                dropout=self.training,
            ):
                tokens = layer.tokens
                if return_attn:
                    maps.append(layer.map)
            return self.classify(tokens), *maps

        batches = [self.embed(x, keep=keep, dropout=self.training)]  # B comes first in each
        if branch_gate is not None:
            batches.append(branch_gate.permute(2, 0, 1))
        if not return_attn:
            return encode(*batches)[0]
        logits, *maps = in_parts(encode, MAPS_PART, *batches)
        return logits, maps

    def trace(self, x: Tensor, *, keep: Tensor | None = None, head_gate: Tensor | None = None) -> Trace:
        """One pass that keeps everything, without dropout whatever the mode; it changes nothing.

        `keep` (B, k) holds the indices, 0 to P-1, of the patches that stay; the others are removed as
        tokens after positions were added, so N becomes 1 + k. `head_gate`, (L, H) for all pictures or
        (B, L, H) for each its own, scales what each head hands on: 1 leaves it, 0 switches it off.
        Differentiable where gradients are on. ValueError for arguments of another shape or type.
        """
        embedded = self.embed(x, keep=keep, dropout=False)
        layers = tuple(self.steps(embedded, keep=keep, head_gate=head_gate, explicit=True, dropout=False))
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
            # on a GPU the check would wait for the device at every step of training; a graph cannot branch
            P, checked = patches.shape[1], keep.device.type == "cpu" and not torch.compiler.is_compiling()
            if checked and keep.numel() and not 0 <= keep.min() <= keep.max() < P:
                raise ValueError(f"keep holds patches 0 to {P - 1}, not {keep.min()} to {keep.max()}")
            patches = patches.gather(1, keep[:, :, None].expand(-1, -1, patches.shape[2]))  # (B, k, D)
        cls = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1)  # (B, 1, D)
        tokens = torch.cat((cls, patches), dim=1)
        return drop(tokens, self.dropout.p) if dropout else tokens

    def classify(self, tokens: Tensor) -> Tensor:
        """Tokens (..., N, D) after any block to logits (..., K), read from CLS by final norm and head."""
        return self.mlp_head(self.norm(tokens[..., 0, :]))

    def readout(self, num_tokens: int) -> Tensor:
        """(N,) with what weight `classify` reads each of N tokens: CLS alone. They sum to 1."""
        weights = torch.zeros(num_tokens, device=self.device)
        weights[0] = 1
        return weights

    def out_weight(self, depth: int) -> Tensor:
        """(D, H, D/H): how a block's output projection takes in what each of its heads has read."""
        return self.encoder_blocks[depth].attn.out.weight.unflatten(1, (self.num_heads, -1))

    @property
    def device(self) -> torch.device:
        return self.cls_token.device

    @property
    def num_classes(self) -> int:
        return self.mlp_head[-1].out_features

    @property
    def prefix_tokens(self) -> int:
        """How many tokens stand before those of the patches: CLS alone."""
        return 1

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
        self,
        tokens: Tensor,
        *,
        keep: Tensor | None = None,
        head_gate: Tensor | None = None,
        branch_gate: Tensor | None = None,
        cls_only: bool = False,
        explicit: bool,
        dropout: bool,
    ) -> Iterator[Layer]:
        """The one pass through the blocks, from what `embed` gives; arguments as in `forward` and `trace`.

        `keep` is what `embed` was given: models whose blocks know places need it here (vit/foreign.py), this
        one, whose places were added to the tokens, does not.
        A generator: maps are large, and whoever needs little of a layer can take it and let the rest go.
        """
        if head_gate is not None:
            shapes = (self.num_layers, self.num_heads), (len(tokens), self.num_layers, self.num_heads)
            if tuple(head_gate.shape) not in shapes:
                raise ValueError(
                    f"head_gate has one number per head, shape {shapes[0]}, or also per picture, shape "
                    f"{shapes[1]}, not {tuple(head_gate.shape)}"
                )
        for depth, block in enumerate(self.encoder_blocks):
            layer = block.step(
                tokens,
                gate=None if head_gate is None else head_gate[..., depth, :],
                branch_gate=None if branch_gate is None else branch_gate[depth],
                cls_only=cls_only and depth == self.num_layers - 1,
                explicit=explicit,
                dropout=dropout,
            )
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
