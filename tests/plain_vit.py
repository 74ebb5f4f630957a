"""The architecture a second time, as plain arithmetic on a state dict, for the tests to compare with.

logits, maps = plain_vit(model.state_dict(), x, num_heads=4)      # no dropout, no fused kernel, no modules
model = small_model(num_layers=2)                                  # 16 px pictures, 17 tokens, random weights

`at(place, depth, tensor)` may change the pass at one of PLACES: to drop, to gate, to remove tokens.
"""

import math

import torch

from vit.model import VisualTransformer

# depth is None at the first; the shapes are (B, N, D), (B, H, N, N), (B, H, N, D/H), then (B, N, ...)
PLACES = ("embedded", "map", "read", "attention branch", "hidden", "narrow", "mlp branch")

SMALL = {"num_classes": 5, "img_size": 16, "embed_dim": 16, "num_layers": 3, "num_heads": 4, "mlp_dim": 24}


def small_model(seed: int = 0, **changes) -> VisualTransformer:
    """In eval mode, without dropout; biases and norms are random too, so that none can be forgotten."""
    torch.manual_seed(seed)
    model = VisualTransformer(**({"dropout": 0.0, "init": "tutorial"} | SMALL | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def pictures(count: int, height_px: int = 16, width_px: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 3, height_px, width_px, generator=torch.Generator().manual_seed(seed))


def plain_vit(weights, x, num_heads, at=lambda place, depth, tensor: tensor):
    """(B, C, height, width) -> logits (B, K) and L maps (B, H, N, N)."""
    kernel = weights["patch_embed.conv.weight"]  # (D, C, patch, patch)
    patch_px = kernel.shape[-1]
    cut = torch.nn.functional.unfold(x, patch_px, stride=patch_px).mT  # (B, P, C * patch * patch)
    patches = cut @ kernel.flatten(1).T + weights["patch_embed.conv.bias"]
    cls = weights["cls_token"].repeat(len(x), 1, 1)
    tokens = at("embedded", None, torch.cat([cls, patches], dim=1) + weights["pos_embed"])

    maps = []
    depth = 0
    while f"encoder_blocks.{depth}.norm1.weight" in weights:
        prefix = f"encoder_blocks.{depth}."
        block = {name[len(prefix) :]: w for name, w in weights.items() if name.startswith(prefix)}
        q, k, v = (_normalised(tokens, block, "norm1") @ block["attn.qkv.weight"].T).chunk(3, dim=-1)
        width = q.shape[-1] // num_heads
        heads = [slice(h * width, (h + 1) * width) for h in range(num_heads)]
        scores = [q[..., h] @ k[..., h].mT / math.sqrt(width) for h in heads]
        maps.append(torch.stack([torch.exp(s) / torch.exp(s).sum(-1, keepdim=True) for s in scores], dim=1))
        weighted = at("map", depth, maps[-1])
        read = torch.stack([weighted[:, h] @ v[..., columns] for h, columns in enumerate(heads)], dim=1)
        read = torch.cat(list(at("read", depth, read).unbind(1)), dim=-1)  # (B, N, D)
        tokens = tokens + at("attention branch", depth, read @ block["attn.out.weight"].T)

        wide = _normalised(tokens, block, "norm2") @ block["mlp.0.weight"].T + block["mlp.0.bias"]
        hidden = at("hidden", depth, wide * (1 + torch.erf(wide / math.sqrt(2))) / 2)
        narrow = at("narrow", depth, hidden @ block["mlp.3.weight"].T + block["mlp.3.bias"])
        tokens = tokens + at("mlp branch", depth, narrow)
        depth += 1

    cls = _normalised(_normalised(tokens[:, 0], weights, "norm"), weights, "mlp_head.0")
    return cls @ weights["mlp_head.1.weight"].T + weights["mlp_head.1.bias"], maps


def _normalised(tokens, weights, name):
    centred = tokens - tokens.mean(-1, keepdim=True)
    deviation = torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)
    return centred / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]
