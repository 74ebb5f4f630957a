"""Large batches in parts that fit the processor's cache.

Attention maps are large: 256 pictures fill 207 MB, and on a CPU a second pass over them waits for memory. In
parts, what one step writes is still in the cache when the next reads it (`python -m vit bench`).
"""

from collections.abc import Callable

import torch
from torch import Tensor


def in_parts(compute: Callable[..., tuple[Tensor, ...]], size: int, *batches: Tensor) -> tuple[Tensor, ...]:
    """`compute(*batches)`, where every tensor in and out has the batch as its first axis.

    On a CPU without gradients `compute` is called with `size` rows at a time. Elsewhere once, with all: a GPU
    wants large batches, and joining parts would cut results off from the gradients that run through them.
    """
    B = len(batches[0])
    if any(len(batch) != B for batch in batches):
        raise ValueError(f"batches must be of one length, not {[len(batch) for batch in batches]}")
    if B <= size or batches[0].device.type != "cpu" or torch.is_grad_enabled():
        return compute(*batches)
    whole: tuple[Tensor, ...] = ()
    for start in range(0, B, size):
        stop = start + size
        part = compute(*(batch[start:stop] for batch in batches))
        whole = whole or tuple(result.new_empty(B, *result.shape[1:]) for result in part)
        for target, result in zip(whole, part, strict=True):
            target[start:stop] = result
    return whole
