"""How weights are updated, and how the learning rate goes over a run: settings alone, without torch.

Schedule("linear", warmup_share=0.02).lr_scale(0.5)      # 0 to 1
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimConfig:
    """How weights are updated. ValueError, in one sentence, for values that make no sense."""

    kind: Literal["adamw", "muon"] = "adamw"  # muon: for the blocks' matrices, with AdamW for all the rest
    lr: float = 1e-3  # AdamW's learning rate, above 0
    muon_lr: float = 3e-3  # Muon's learning rate, above 0; its update is as large as AdamW's at the same rate
    weight_decay: float = 0.05  # from 0; each step takes rate * weight_decay off every matrix
    decay_all: bool = False  # off everything that AdamW updates, as torch's own default does
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's decay of the mean gradient and of its square, [0, 1)
    momentum: float = 0.95  # Muon's decay of the mean gradient, [0, 1)

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "muon"):
            raise ValueError(f"kind is 'adamw' or 'muon', not {self.kind!r}")
        for name in ("lr", "muon_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is a number above 0, not {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay is a number from 0 up, not {self.weight_decay}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are two numbers from 0 to below 1, not {self.betas}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum lies from 0 to below 1, not {self.momentum}")


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a share of its full value: a straight warm-up, then the chosen shape.

    linear and cosine end at zero. ValueError, in one sentence, for values that make no sense.
    """

    shape: Literal["constant", "linear", "cosine"] = "linear"  # after the warm-up
    warmup_share: float = 0.0  # share of the run that climbs from zero to the full rate, [0, 1)

    def __post_init__(self) -> None:
        if self.shape not in ("constant", "linear", "cosine"):
            raise ValueError(f"shape is 'constant', 'linear' or 'cosine', not {self.shape!r}")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup_share lies from 0 to below 1, not {self.warmup_share}")

    def lr_scale(self, progress: float) -> float:
        """0 to 1, for `progress`: the share of the steps, or of the time, that is used up.

        A last step may overrun its time, so more than 1 counts as 1. ValueError below 0 and for NaN.
        """
        if not progress >= 0:
            raise ValueError(f"progress is a share from 0 to 1, not {progress}")
        if progress < self.warmup_share:
            return progress / self.warmup_share
        left = (1 - min(progress, 1.0)) / (1 - self.warmup_share)
        if self.shape == "linear":
            return left
        if self.shape == "cosine":
            return (1 - math.cos(math.pi * left)) / 2
        return 1.0
