"""Optimisers, learning-rate schedule and average of the weights, all of which can be saved to the bit.

    optimisers = build_optimisers(model, OptimConfig(kind="muon"))
    schedule = Schedule("linear", warmup_share=0.02)
    ema = Ema(model)
    for step in range(steps):
        scale_rates(optimisers, schedule.lr_scale((step + 0.5) / steps))   # neither end is at rate zero
        loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)     # torch's own is all that clipping needs
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        ema.update(model)
    saved = state_tensors(optimisers), ema.tensors()                # flat, by parameter, for safetensors
    load_state_tensors(optimisers, saved[0])
    ema.load(saved[1])

Muon: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the size of its update as
in Liu et al. 2025, "Muon is scalable for LLM training" (arXiv 2502.16982). Nothing here reads a clock or
draws a random number, and learning rates are never part of the saved state: they follow from the
configuration and the progress alone, so a resumed run cannot start with a wrong one.

Give the plain model, not what torch.compile or DistributedDataParallel wrap around it: they share its
parameters but rename them.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from train.schedule import OptimConfig

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steep at zero, not exact at one
ADAMW_RMS = 0.2  # the usual root mean square of AdamW's update at learning rate 1


def build_optimisers(
    model: nn.Module, config: OptimConfig, *, bf16: bool = False
) -> list[torch.optim.Optimizer]:
    """[AdamW] or [Muon, AdamW], which between them hold every parameter of the model once.

    `bf16` lets Muon orthogonalise in bfloat16: several times quicker on a GPU, or a CPU with AMX, slower on
    other CPUs. It changes the numbers, so a run keeps what it began with.
    """
    parameters = dict(model.named_parameters())
    matrices = {  # weights that multiply; CLS and positions have axes too, but are only added
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }
    hidden = {name for name in matrices if config.kind == "muon" and name.startswith("encoder_blocks.")}

    def group(belongs: Callable[[str], bool], **options) -> dict:
        return {"params": [(name, p) for name, p in parameters.items() if belongs(name)]} | options

    adamw = torch.optim.AdamW(
        [
            group(lambda name: name in matrices - hidden, weight_decay=config.weight_decay),
            group(lambda name: name not in matrices, weight_decay=config.weight_decay * config.decay_all),
        ],
        lr=config.lr,
        betas=config.betas,
        fused=True,
    )
    if config.kind == "adamw":
        return [adamw]
    muon = Muon(
        [
            group(lambda name: name in hidden and name.endswith("attn.qkv.weight"), parts=3),
            group(lambda name: name in hidden and not name.endswith("attn.qkv.weight")),
        ],
        lr=config.muon_lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    return [muon, adamw]


def scale_rates(optimisers: Iterable[torch.optim.Optimizer], scale: float) -> None:
    """Set every learning rate to `scale` times the one that its optimiser was built with."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * scale


def orthogonalise(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(M, rows, columns) -> the same shape: each matrix with its singular values drawn close to one.

    Values down to 1/500 of the matrix's norm end between 0.68 and 1.21; smaller ones are left smaller, zero
    stays zero. `dtype` is what the products are computed in; the result has the dtype of `matrices`.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]  # the smaller of the two square products costs less
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-12)  # brings every singular value below one
    x = x.to(dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT  # (M, rows, rows)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose every update is made orthogonal: all directions of a matrix learn at one pace.

    For matrices only (ValueError for others), named as `model.named_parameters()` does. A group with
    `parts=3` holds matrices that are three below each other, such as q, k and v, and updates each by itself.
    """

    def __init__(self, params, lr: float, *, weight_decay=0.0, momentum=0.95, dtype=torch.float32):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "parts": 1})
        self.dtype = dtype
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2 or len(p) % group["parts"]:
                    raise ValueError(
                        f"Muon takes matrices of {group['parts']} equal parts, not the shape {tuple(p.shape)}"
                    )

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient; gradients are left as they are."""
        by_shape = defaultdict(list)  # a GPU waits on small products: one batch of each shape
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                ahead = p.grad.lerp(state["momentum"], group["momentum"])  # Nesterov's look ahead
                for matrix, update in zip(p.chunk(group["parts"]), ahead.chunk(group["parts"]), strict=True):
                    by_shape[matrix.shape].append((matrix, update, group))
        for shape, members in by_shape.items():
            updates = orthogonalise(torch.stack([update for _, update, _ in members]), self.dtype)
            size = ADAMW_RMS * math.sqrt(max(shape))
            for (matrix, _, group), update in zip(members, updates, strict=True):
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * size)


_STATE = {torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"), Muon: ("momentum",)}


def state_tensors(optimisers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Copies, on the CPU, of all that AdamW and Muon remember, as `mlp_head.1.weight.exp_avg`.

    A parameter that was never updated is written as it would start, so the names do not depend on the step.
    """
    tensors = {}
    for optimiser in optimisers:
        for name, p in _named(optimiser):
            for key in _STATE[type(optimiser)]:
                start = torch.zeros(()) if key == "step" else torch.zeros_like(p)
                tensor = optimiser.state.get(p, {}).get(key, start)
                tensors[f"{name}.{key}"] = tensor.detach().to("cpu", copy=True).contiguous()
    return tensors


def load_state_tensors(optimisers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Take up what `state_tensors` gave; learning rates and other settings stay as they were built.

    ValueError, and nothing changed, unless names, shapes and types are exactly those of these optimisers.
    """
    _require_same(state_tensors(optimisers), tensors, "the saved state of the optimiser")
    for optimiser in optimisers:
        state = {
            index: {key: tensors[f"{name}.{key}"].clone() for key in _STATE[type(optimiser)]}
            for index, (name, _) in enumerate(_named(optimiser))
        }
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": state, "param_groups": groups})


class Ema:
    """The exponential moving average of a model's parameters.

    `model` is a separate copy that holds the average, in eval mode and without gradients; the trained model
    is only read. ValueError for a decay outside [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float = 0.998):
        if not 0 <= decay < 1:
            raise ValueError(f"the decay of the average lies from 0 to below 1, not {decay}")
        self.decay = decay
        self.updates = 0
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move towards the model's parameters; the first weights, hardly trained, are forgotten fast."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - decay)
        self.updates += 1

    def tensors(self) -> dict[str, Tensor]:
        """Copies on the CPU, as `mlp_head.1.weight.ema`, and the count of updates as `ema.updates`."""
        averages = {
            f"{name}.ema": p.detach().to("cpu", copy=True).contiguous()
            for name, p in self.model.named_parameters()
        }
        return averages | {"ema.updates": torch.tensor(self.updates)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `tensors` gave. ValueError, and nothing changed, for any other model's."""
        _require_same(self.tensors(), tensors, "the saved average of the weights")
        for name, p in self.model.named_parameters():
            p.copy_(tensors[f"{name}.ema"])
        self.updates = int(tensors["ema.updates"])


def _named(optimiser: torch.optim.Optimizer) -> list[tuple[str, nn.Parameter]]:
    """In the order in which `load_state_dict` counts them."""
    groups = optimiser.param_groups
    return [pair for g in groups for pair in zip(g["param_names"], g["params"], strict=True)]


def _require_same(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    lacking = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    for problem, names in (("lacks", lacking), ("holds the unknown", unknown)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"{what} {problem} {names[0]}{more}: it was saved with other settings")
    for name, tensor in expected.items():
        if (found[name].shape, found[name].dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{what} has {name} as {found[name].dtype} of shape {tuple(found[name].shape)}, "
                f"where {tensor.dtype} of shape {tuple(tensor.shape)} is needed"
            )
