"""The sizes of a model, without the model: whoever only reads or checks settings need not wait for torch.

Architecture(num_classes=10).grid       # (8, 8)
Architecture(num_classes=10).build()    # a VisualTransformer
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vit.model import VisualTransformer


@dataclass(frozen=True)
class Architecture:
    """The arguments of VisualTransformer."""

    num_classes: int
    img_size: tuple[int, int] = (32, 32)  # height, width in pixels
    patch_size: int = 4
    in_channels: int = 3
    embed_dim: int = 256
    num_layers: int = 6
    num_heads: int = 8
    mlp_dim: int = 512
    dropout: float = 0.1

    @property
    def prefix_tokens(self) -> int:
        """How many tokens stand before those of the patches: CLS alone."""
        return 1

    @property
    def grid(self) -> tuple[int, int]:
        """(GY, GX), patches down and across."""
        return self.img_size[0] // self.patch_size, self.img_size[1] // self.patch_size

    def build(self, **options) -> "VisualTransformer":
        """A fresh model; `options` as the keyword-only ones of VisualTransformer."""
        from vit.model import VisualTransformer

        return VisualTransformer(**asdict(self), **options)
