"""Dropout at a third of what torch's costs on a CPU.

    x = drop(x, 0.1)        # a tenth of the numbers 0, the others divided by 0.9

There torch takes one serial random number for each element, a third of a training step at 0.1 everywhere.
Sixteen bits are enough to decide, so here one draw of 64 serves four elements. Draws come from torch's own
generator: `torch.manual_seed` repeats them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def drop(x: Tensor, p: float) -> Tensor:
    """`x` with each element 0 by a chance of `p`, else divided by 1 - `p`. ValueError outside 0 to below 1.

    On a CPU `p` is taken to the nearest 1/65536, and the division is by just what it then leaves.
    """
    if not 0 <= p < 1:
        raise ValueError(f"dropout lies from 0 to below 1, not {p}")
    if p == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p)
    dropped = min(round(p * 2**16), 2**16 - 1)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-x.numel() // 4),))  # `random_` cannot be compiled
    numbers = words.view(torch.int16)[: x.numel()].view(x.shape)
    # compared into the type of `x`: a product with bool or of two types takes several times as long
    kept = torch.empty(x.shape, dtype=x.dtype)
    torch.ge(numbers, dropped - 2**15, out=kept)
    return x * kept.mul_(2**16 / (2**16 - dropped))
