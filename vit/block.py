"""One encoder block: tokens read from one another by attention, then each is worked on by an MLP.

    layer = block.step(tokens, explicit=False, dropout=True)        # layer.tokens (B, N, D)
    tokens, attn_map = block(tokens, return_attn=True)              # the tutorial's way to call it

`vit/model.py` stacks L of them, and says which letters stand for which shapes.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.dropout import drop


class Layer(NamedTuple):
    """What one encoder block saw and did. `map` is None where it was not asked for."""

    tokens: Tensor  # (B, N, D) as the block leaves them
    q: Tensor | None = None  # (B, H, N, D/H)
    k: Tensor | None = None  # (B, H, N, D/H)
    v: Tensor | None = None  # (B, H, N, D/H)
    map: Tensor | None = None  # (B, H, N, N) probabilities before dropout
    normed: Tensor | None = None  # (B, N, D) what the heads read: the tokens before the block, normalised


class MultiHeadAttention(nn.Module):
    """H heads of scaled dot-product attention (Vaswani et al. 2017, arXiv 1706.03762), without biases."""

    def __init__(self, dim: int, num_heads: int, dropout: float):
        super().__init__()
        require_positive("dim", dim)
        require_positive("num_heads", num_heads)
        require_divisible("dim", dim, "num_heads", num_heads)
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
        cls_only: bool = False,
        explicit: bool,
        dropout: bool,
    ) -> tuple[Tensor, Layer]:
        """The attention of one layer, for `forward` and for `VisualTransformer.trace`.

        `gate`, (H,) or for each picture its own (B, H), scales what each head hands to the output
        projection. `explicit` asks for the map; else the fused kernel does the same without ever holding
        one, where it is the faster. With `cls_only` the CLS token alone reads, and is all that comes back.
        `dropout` is an argument, not the module's mode, because a trace must not depend on the mode nor
        change it. ValueError for a mask or a gate of another shape.
        """
        B, N, _ = x.shape
        if gate is not None and tuple(gate.shape) not in ((self.num_heads,), (B, self.num_heads)):
            raise ValueError(
                f"gate has one number per head, shape {(self.num_heads,)}, or also per picture, shape "
                f"{(B, self.num_heads)}, not {tuple(gate.shape)}"
            )
        # taken apart before they are turned: the gradients then come together in one copy, not two
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        if cls_only:
            q = q[:, :, :1]
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
        # on a CPU the fused kernel has no dropout, and its backward in bfloat16 takes ten times as long
        slow_fused = q.device.type == "cpu" and (attn_dropout > 0 or q.dtype == torch.bfloat16)
        if explicit or slow_fused:
            scores = (q @ k.transpose(-2, -1)).mul_(self.scale)  # (B, H, N, N); q times scale would be copied
            if mask is not None:
                scores = scores.masked_fill(~mask, -math.inf)
            attn_map = scores.softmax(dim=-1)
            if open_rows is not None:
                attn_map = attn_map * open_rows
            read = drop(attn_map, attn_dropout) @ v  # (B, H, N, D/H)
        else:
            read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=attn_dropout)
            if open_rows is not None:
                read = read * open_rows
        if gate is not None:
            read = read * gate[..., None, None].to(read.dtype)
        out = self.out(read.transpose(1, 2).flatten(2))
        return out, Layer(out, q, k, v, attn_map if explicit else None, x)


class TransformerEncoderBlock(nn.Module):
    """Attention, then a GELU MLP, each on normalised tokens and added back to them (pre-norm)."""

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, dropout: float):
        super().__init__()
        require_positive("mlp_dim", mlp_dim)
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

    def step(
        self,
        x: Tensor,
        *,
        gate: Tensor | None = None,
        branch_gate: Tensor | None = None,
        cls_only: bool = False,
        explicit: bool,
        dropout: bool,
    ) -> Layer:
        """The block, for `forward` and for `VisualTransformer.trace`; arguments as in `attend`.

        `branch_gate` (2, B): what the attention and the MLP branch of each picture are multiplied by.
        """

        def gated(branch: Tensor, which: int, share: float) -> Tensor:
            branch = drop(branch, share) if dropout else branch
            if branch_gate is None:
                return branch
            return branch * branch_gate[which, :, None, None].to(branch.dtype)

        read, layer = self.attn.attend(
            self.norm1(x), gate=gate, cls_only=cls_only, explicit=explicit, dropout=dropout
        )
        x = x[:, : read.shape[1]] + gated(read, 0, self.dropout.p)
        widen, gelu, drop_hidden, narrow, drop_out = self.mlp
        hidden = gelu(widen(self.norm2(x)))  # (B, N, mlp_dim)
        if dropout:
            hidden = drop(hidden, drop_hidden.p)
        # two dropouts in a row are one: an element stays if it stays in both
        x = x + gated(narrow(hidden), 1, 1 - (1 - drop_out.p) * (1 - self.dropout.p))
        return layer._replace(tokens=x)


def require_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is a whole number of at least 1, not {value!r}")


def require_divisible(whole_name: str, whole: int, part_name: str, part: int) -> None:
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
