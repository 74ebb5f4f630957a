"""AttnLRP: the answer's logit handed back through the model, operation by operation, until tokens hold it.

    per_token = attnlrp(model, x, lambda logits: logits[:, 3])      # (B, N); a row sums to that logit

Achtibat et al. 2024, "AttnLRP" (arXiv 2402.05602), as a gradient times input of a forward pass whose
operations are replaced by ones of the same value: normalisation by a constant deviation, GELU as its input
times a constant, both factors of a product with half their gradient, softmax as it is. What those rules
leave over is not lost here: a bias is an input of its own, given to the token at which it is added, and what
the linearised softmax does not explain goes to the token that asks. So the whole logit is handed out.

The operations are replaced for this thread and this call alone; the model is not touched.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vit.model import VisualTransformer

_LOST = 0.01  # of the logit; more than this and the model has an operation that no rule here fits


def attnlrp(model: VisualTransformer, x: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, N): each token's share of `score(logits)` (B,); gradients must be on.

    ValueError for a model of others with operations that hand on more or less than they were given.
    """
    tokens = model.embed(x, dropout=False).detach().requires_grad_()
    with _Conserving() as rules:
        last = tokens
        for layer in model.steps(tokens, explicit=False, dropout=False):
            last = layer.tokens
        scores = score(model.classify(last))  # (B,)
    B, N, _ = tokens.shape
    softmaxes = [tensor for pair in rules.softmaxes for tensor in pair]
    asked = [tokens, *rules.biases, *softmaxes]
    gradients = torch.autograd.grad(scores.sum(), asked, materialize_grads=True)
    held = [tensor.detach() * gradient for tensor, gradient in zip(asked, gradients, strict=True)]
    found = held[0].sum(dim=-1)  # (B, N)
    readout = model.readout(N).to(found.dtype)
    for bias in held[1 : 1 + len(rules.biases)]:
        if bias.ndim == 3 and bias.shape[1] == N:
            found = found + bias.sum(dim=-1)
        else:  # behind the readout there are no tokens any more: those that it read
            found = found + bias.reshape(B, -1).sum(dim=-1, keepdim=True) * readout
    pairs = iter(held[1 + len(rules.biases) :])
    for weights, logits in zip(pairs, pairs, strict=True):  # (B, H, N, N) each
        found = found + (weights - logits).sum(dim=(1, 3))
    lost = (found.sum(dim=-1) - scores.detach()).abs()
    if (lost > _LOST * scores.detach().abs().clamp_min(1)).any():
        raise ValueError(
            "attnlrp has no rule for an operation of this model: the shares of the tokens do not add up to"
            " the logit; choose another method"
        )
    return found


class _Conserving(TorchFunctionMode):
    """Replaces the operations of a forward pass, and keeps what later needs a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.biases: list[Tensor] = []
        self.softmaxes: list[tuple[Tensor, Tensor]] = []  # weights and what they were made of, (B, H, N, N)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        rule = self._RULES.get(func)
        return rule(self, *args, **(kwargs or {})) if rule else func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._plus(F.linear(x, weight.detach()), bias)

    def _layer_norm(self, x: Tensor, shape, weight=None, bias=None, eps: float = 1e-5) -> Tensor:
        dims = tuple(range(-len(shape), 0))
        centred = x - x.mean(dim=dims, keepdim=True)
        deviation = (centred.detach().square().mean(dim=dims, keepdim=True) + eps).sqrt()
        normed = centred / deviation
        return self._plus(normed if weight is None else normed * weight.detach(), bias)

    def _gelu(self, x: Tensor, approximate: str = "none") -> Tensor:
        fixed = x.detach()
        passed = F.gelu(fixed, approximate=approximate) / torch.where(fixed == 0, 1, fixed)
        return x * torch.where(fixed == 0, 0.5, passed)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_
    ) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        logits = _half(q) @ _half(k).mT * scale
        weights = logits.softmax(dim=-1)
        self.softmaxes.append((weights, logits))
        return _half(weights) @ _half(v)

    def _plus(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return x
        # no graph leads to it, but with `expand` it would be one number for all tokens: each needs its own
        added = bias.detach().expand_as(x).clone().requires_grad_()
        self.biases.append(added)
        return x + added

    _RULES = {  # noqa: RUF012
        F.linear: _linear,
        F.layer_norm: _layer_norm,
        F.gelu: _gelu,
        F.scaled_dot_product_attention: _attention,
    }


def _half(x: Tensor) -> Tensor:
    """x, but with half of its gradient."""
    return x.detach() / 2 + x / 2
