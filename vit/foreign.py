"""Vision Transformers that others wrote: timm's, behind the interface of our own model.

    model = ForeignTransformer.of(timm.create_model("vit_tiny_patch16_224").eval())
    logits, maps = model(x, return_attn=True)       # as from a VisualTransformer; so explain() takes it too

Nothing is hooked or patched. timm hands queries, keys and values to torch's fused attention, and a
TorchFunctionMode, which acts for this thread and one block alone, does there the same with a map. That it is
the same is checked when a model is opened. `vit/hub.py` finds models and weights; letters for shapes:
vit/model.py, but here N = prefix tokens + P.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit.block import Layer
from vit.model import Trace

_TOLERANCE = 1e-4  # of outputs, as a share of the largest where that is above 1
_WINDOWED = ("Window", "Swin", "MaskUnit", "Grid", "Shifted")


class ForeignError(ValueError):
    """A model that cannot be opened; its text is the end of a sentence that begins with the model's name."""


class ForeignTransformer(nn.Module):
    """A timm model that answers as a VisualTransformer does. Always in eval mode: it is only looked at."""

    def __init__(self, body: nn.Module, grid: tuple[int, int]):
        super().__init__()
        self.body = body.eval()
        self.grid = grid  # (GY, GX)
        for module in body.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = True  # else there is no call to take the place of

    @classmethod
    @torch.no_grad()
    def of(cls, body: nn.Module) -> "ForeignTransformer":
        """ForeignError for what cannot be opened, and for a model that would not answer as it does itself."""
        require_known(body)
        model = cls(body, _grid(body))
        patch = body.patch_embed
        height, width = patch.img_size
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, patch.proj.in_channels, height, width, generator=generator).to(model.device)
        itself, (ours, maps) = body(x), model(x, return_attn=True)
        if len({found.shape[1] for found in maps}) != 1:
            raise ForeignError("has layers of different numbers of heads, which cannot be shown")
        off = (ours - itself).abs().max().item()
        if not off <= _TOLERANCE * max(1.0, itself.abs().max().item()):
            raise ForeignError(f"gives other outputs while its attention is looked at: off by {off:.1e}")
        model.num_classes = itself.shape[-1]
        model.num_heads = maps[0].shape[1]
        return model

    def forward(self, x: Tensor, return_attn: bool = False, *, keep: Tensor | None = None):
        """As `VisualTransformer.forward`: logits (B, K), or (logits, L maps (B, H, N, N))."""
        if keep is None and not return_attn:
            return self.body(x)
        tokens, maps = self.embed(x, keep=keep), []
        for layer in self.steps(tokens, keep=keep, explicit=return_attn):
            tokens = layer.tokens
            maps.append(layer.map)
        logits = self.classify(tokens)
        return (logits, maps) if return_attn else logits

    def trace(self, x: Tensor, *, keep: Tensor | None = None, head_gate: Tensor | None = None) -> Trace:
        """As `VisualTransformer.trace`."""
        embedded = self.embed(x, keep=keep)
        layers = tuple(self.steps(embedded, keep=keep, head_gate=head_gate, explicit=True))
        return Trace(embedded, layers, self.classify(layers[-1].tokens))

    def embed(self, x: Tensor, *, keep: Tensor | None = None, dropout: bool = False) -> Tensor:
        """Pictures to the tokens (B, N, D) that enter the first block; `keep` as in `VisualTransformer`."""
        expected = (self.body.patch_embed.proj.in_channels, *self.body.patch_embed.img_size)
        if x.ndim != 4 or tuple(x.shape[1:]) != expected:
            raise ValueError(
                f"the model takes a batch of pictures of {' x '.join(map(str, expected))} "
                f"(channels, height, width), not a tensor of shape {tuple(x.shape)}"
            )
        tokens = self.body._pos_embed(self.body.patch_embed(x))
        tokens = self.body.norm_pre(tokens[0] if isinstance(tokens, tuple) else tokens)
        if keep is None:
            return tokens
        prefix, patches = tokens[:, : self.prefix_tokens], tokens[:, self.prefix_tokens :]
        patches = patches.gather(1, keep[:, :, None].expand(-1, -1, patches.shape[2]))
        return torch.cat((prefix, patches), dim=1)

    def steps(
        self,
        tokens: Tensor,
        *,
        keep: Tensor | None = None,
        head_gate: Tensor | None = None,
        cls_only: bool = False,
        explicit: bool,
        dropout: bool = False,
    ) -> Iterator[Layer]:
        """The one pass through the blocks, as `VisualTransformer.steps`; there is no dropout in eval mode.

        `cls_only` spares nothing here: a model may read its answer from any token.
        """
        places = self._places(keep)
        for depth, block in enumerate(self.body.blocks):
            gate = None if head_gate is None else head_gate[..., depth, :]
            looking = _Looking(tokens.shape, gate, explicit)
            with looking:
                entered, options = tokens, {} if places is None else {"rope": places[depth]}
                tokens = block(tokens, **options)
            if looking.calls != 1:
                raise ForeignError(
                    f"attends {looking.calls} times in a block, where one map each can be shown"
                    if looking.calls
                    else "does not attend by torch's scaled_dot_product_attention, so no map can be had"
                )
            normed = entered if looking.normed is None else looking.normed
            yield Layer(tokens, *looking.seen, normed)

    def classify(self, tokens: Tensor) -> Tensor:
        """Tokens (..., N, D) after any block to the outputs (..., K), by the model's own norm and head."""
        flat = tokens.reshape(-1, *tokens.shape[-2:])
        outputs = self.body.forward_head(self.body.norm(flat))
        return outputs.view(*tokens.shape[:-2], -1)

    def readout(self, num_tokens: int) -> Tensor:
        """(N,) with what weight the head reads each token: they sum to 1."""
        weights, prefix = torch.zeros(num_tokens, device=self.device), self.prefix_tokens
        if hasattr(self.body, "head_dist"):
            weights[:2] = 0.5
        elif self.body.global_pool == "token":
            weights[0] = 1
        else:
            first = 0 if getattr(self.body, "pool_include_prefix", False) else prefix
            weights[first:] = 1 / (num_tokens - first)
        return weights

    def out_weight(self, depth: int) -> Tensor:
        """(D, H, D/H): what a block adds for each number that a head has read. ValueError if that varies."""
        block = self.body.blocks[depth]
        attn = getattr(block, "attn", None)
        reads_plainly = isinstance(getattr(attn, "norm", nn.Identity()), nn.Identity)
        if attn is None or not reads_plainly or getattr(attn, "gate", None) is not None:
            raise ValueError(
                "norm_weighted does not fit this model, which changes what heads have read before it is added"
            )
        scale = getattr(block, "gamma_1", None)
        scale = getattr(getattr(block, "ls1", None), "gamma", scale)
        weight = attn.proj.weight if scale is None else scale[:, None] * attn.proj.weight
        return weight.unflatten(1, (self.num_heads, -1))

    def train(self, mode: bool = True) -> "ForeignTransformer":
        """Nothing changes: see the class."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        return next(self.body.parameters()).device

    @property
    def prefix_tokens(self) -> int:
        """How many tokens stand before those of the patches: class, distillation, registers."""
        return self.body.num_prefix_tokens

    @property
    def num_layers(self) -> int:
        return len(self.body.blocks)

    def _places(self, keep: Tensor | None) -> list[Tensor] | None:
        """For each block the rotary positions of the patches that are there; None for models without."""
        rope = getattr(self.body, "rope", None)
        if rope is None:
            return None
        is_fixed = hasattr(rope, "feat_shape") and not self.body.dynamic_img_size  # as in Eva._pos_embed
        whole = rope.get_embed() if is_fixed else rope.get_embed(shape=self.grid)
        is_mixed = getattr(self.body, "rope_mixed", False)  # then (L, H, P, d), else (P, d)
        if keep is not None:
            whole = whole[..., keep, :]  # (..., B, k, d)
            whole = whole.movedim(-3, 1) if is_mixed else whole[:, None]  # (L, B, H, k, d) or (B, 1, k, d)
        return list(whole) if is_mixed else [whole] * self.num_layers


class _Looking(TorchFunctionMode):
    """Takes the place of fused attention in one block, and keeps what it saw."""

    def __init__(self, shape: torch.Size, gate: Tensor | None, explicit: bool):
        super().__init__()
        self.shape, self.gate, self.explicit = shape, gate, explicit
        self.calls = 0
        self.normed: Tensor | None = None  # (B, N, D)
        self.seen: tuple[Tensor | None, ...] = (None,) * 4  # q, k, v (B, H, N, D/H), map (B, H, N, N)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self._attend(func, *args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        # what the heads read: the first norm of all tokens, if it comes before they read
        if func in (F.layer_norm, F.rms_norm) and self.normed is None and not self.calls:
            self.normed = out if out.shape == self.shape else None
        return out

    def _attend(self, func, q: Tensor, k: Tensor, v: Tensor, attn_mask=None, scale=None, **options) -> Tensor:
        self.calls += 1
        if self.explicit:
            logits = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
            weights = (logits if attn_mask is None else logits + attn_mask).softmax(dim=-1)
            self.seen = q, k, v, weights
            read = weights @ v
        else:
            read = func(q, k, v, attn_mask=attn_mask, scale=scale, **options)
        return read if self.gate is None else read * self.gate[..., None, None].to(read.dtype)


def require_known(body: nn.Module) -> None:
    """ForeignError, in words that go on after a model's name, for what has no maps over patches to show."""
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    kinds = {type(module).__name__ for module in body.modules()}
    if not isinstance(body, VisionTransformer | Eva):
        if not any("Att" in kind for kind in kinds):
            raise ForeignError("has no attention to look at")
        if any(word in kind for kind in kinds for word in _WINDOWED):
            raise ForeignError("attends within windows, so no map spans the picture")
        raise ForeignError(
            f"is a {type(body).__name__}, whose attention is of its own kind; plain Vision Transformers open:"
            " ViT, DeiT, DINO, DINOv2, DINOv3, EVA, CLIP's image tower"
        )
    if getattr(body, "attn_pool", None) is not None:
        raise ForeignError("pools its answer by another attention, whose reading these maps do not show")
    if not hasattr(body, "head_dist") and body.global_pool not in ("token", "avg"):
        raise ForeignError(
            f"pools its tokens by {body.global_pool or 'nothing'!r}; class token and mean are known"
        )
    if not hasattr(body.patch_embed, "proj") or not isinstance(body.patch_embed.proj, nn.Conv2d):
        raise ForeignError("cuts pictures into patches in a way of its own")


def _grid(body: nn.Module) -> tuple[int, int]:
    patch = body.patch_embed
    (rows_px, columns_px), (height, width) = patch.patch_size, patch.img_size
    if rows_px != columns_px:
        raise ForeignError(f"has patches of {rows_px} x {columns_px} pixels; only square ones are known")
    if height % rows_px or width % columns_px:
        raise ForeignError(f"has patches of {rows_px} pixels, which do not tile {height} x {width}")
    if math.prod(patch.grid_size) != math.prod((height // rows_px, width // columns_px)):
        raise ForeignError("has patches that overlap or leave gaps")
    return height // rows_px, width // columns_px
