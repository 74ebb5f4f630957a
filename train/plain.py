"""The tutorial's model and step in the plainest PyTorch: what `train bench` measures everything against.

    model = PlainTransformer()                       # its parameters have our model's names
    loss = plain_step(model, optimiser, x, y)
    x = plain_transforms()(picture)                  # its nine transforms, on a Pillow picture

Nothing here is tuned, and nothing else uses it: attention is written out, torch draws the dropout.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.attn_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (D // self.heads) ** -0.5  # (B, H, N, N)
        read = self.attn_dropout(scores.softmax(dim=-1)) @ v  # (B, H, N, D/H)
        return self.out(read.transpose(1, 2).reshape(B, N, D))


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, mlp_dim: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = _Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_dim),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(mlp_dim, dim),
            nn.Dropout(dropout),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class PlainTransformer(nn.Module):
    """(B, 3, 32, 32) -> logits (B, 10), with the tutorial's sizes."""

    def __init__(self):
        super().__init__()
        dim, depth, heads, mlp_dim, dropout = 256, 6, 8, 512, 0.1
        self.patch_embed = nn.Module()
        self.patch_embed.conv = nn.Conv2d(3, dim, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 65, dim))
        self.dropout = nn.Dropout(dropout)
        self.encoder_blocks = nn.ModuleList([_Block(dim, heads, mlp_dim, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 10))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed.conv(x).flatten(2).transpose(1, 2)  # (B, P, D)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        x = self.dropout(x)
        for block in self.encoder_blocks:
            x = block(x)
        return self.mlp_head(self.norm(x)[:, 0])


def plain_step(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    """One step, as a first script of anybody's would take it; the loss."""
    optimiser.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimiser.step()
    return loss.item()


def plain_transforms():
    """The tutorial's nine transforms, as torchvision applies them to one Pillow picture after another."""
    from torchvision import transforms as t

    return t.Compose(
        [
            t.Resize((70, 70)),
            t.RandomResizedCrop(32, scale=(0.8, 1.0)),
            t.RandomHorizontalFlip(p=0.5),
            t.RandomRotation(15),
            t.ColorJitter(0.2, 0.2, 0.2, 0.1),
            t.RandomAffine(degrees=0, translate=(0.1, 0.1), scale=(0.9, 1.1)),
            t.ToTensor(),
            t.Normalize((0.5,) * 3, (0.5,) * 3),
            t.RandomErasing(p=0.25, scale=(0.02, 0.2), ratio=(0.3, 3.3), value="random"),
        ]
    )
