"""One step of training, and everything that must be remembered between two of them. No files, no clock.

    learner = Learner(config, machine, images, labels, num_classes=10)
    for step in range(learner.steps_for(epochs=2)):
        loss = learner.step(step, progress=(step + 0.5) / steps)
    saved = learner.tensors()                        # weights, optimisers, average
    learner.load(saved)                              # another learner goes on exactly from there

Every random choice follows from (seed, step, place in the global batch), so nothing but `tensors` and the
number of the step must be kept to go on to the bit, and a batch may be split over processes: dropout alone
is drawn by process.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train import augment
from train.config import TrainConfig
from train.optim import Ema, build_optimisers, load_state_tensors, scale_rates, state_tensors
from train.workers import Workers
from vit.device import pick_device

HALF = (0.5, 0.5, 0.5)
EVALUATION_BATCH = {"cpu": 128, "cuda": 2048}


@dataclass(frozen=True)
class Machine:
    """What `auto` came to mean here: a run keeps it, because it changes the numbers."""

    device: str
    precision: str  # "float32" or "bfloat16"
    compiled: bool
    threads: int
    torch: str

    @classmethod
    def here(cls, config: TrainConfig, workers: Workers | None = None) -> "Machine":
        """ValueError for a device that is not here, or a precision that it lacks."""
        workers = workers or Workers()
        device = pick_device(None if config.device == "auto" else config.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", workers.local_rank)
        if config.threads:
            torch.set_num_threads(config.threads)
        precision = config.precision
        if precision == "auto":
            precision = "bfloat16" if _bfloat16_pays(device) else "float32"
        compiled = config.compile == "on" or (config.compile == "auto" and device.type == "cuda")
        if compiled and not _compiles(device):
            if config.compile == "on":
                raise ValueError("torch.compile finds no compiler that works here: leave --compile out")
            compiled = False
        return cls(str(device), precision, compiled, torch.get_num_threads(), torch.__version__)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.precision)

    @property
    def kind(self) -> str:
        """ "cuda", "mps" or "cpu"."""
        return torch.device(self.device).type


def _bfloat16_pays(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Only with a matrix unit: measured without one, bfloat16 is slower than float32.
    capabilities = getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
    return bool(capabilities.get("amx_bf16"))


def _compiles(device: torch.device) -> bool:
    """Whether torch.compile works here: it needs a C++ compiler, or Triton on a GPU."""
    never_cached = time.time()  # a constant in the code, so that the answer is not an older one's

    def work(x: Tensor) -> Tensor:
        return x * never_cached + 1

    try:
        torch.compile(work)(torch.ones(8, device=device))
    except RuntimeError:
        return False
    return True


class Learner:
    """The model that learns, with its optimisers, its average and its pictures.

    `images` (n, 3, 32, 32) uint8 and `labels` (n,) int64 are the training pictures; they go to the device
    as they are. With `workers`, each process takes its part of every batch and all end with one model.
    """

    def __init__(
        self,
        config: TrainConfig,
        machine: Machine,
        images: Tensor,
        labels: Tensor,
        num_classes: int,
        workers: Workers | None = None,
    ):
        self.config, self.machine, self.workers = config, machine, workers or Workers()
        count = self.workers.count
        pairs = 2 * count  # cutmix mixes neighbours, so none may be parted
        self.batch = min(config.batch, len(images) // pairs * pairs)
        if not self.batch:
            raise ValueError(f"{len(images)} training pictures are too few: there must be at least {pairs}")
        if count > 1 and self.batch % pairs:
            raise ValueError(
                f"a batch of {self.batch} cannot be split over {count} processes: take a multiple of {pairs}"
            )
        self.images, self.labels = images.to(machine.device), labels.to(machine.device)
        self.num_classes = num_classes
        self.mean, self.std = (HALF, HALF) if config.mean_and_std == "half" else channel_figures(images)
        torch.manual_seed(config.seed)
        model = config.architecture(num_classes).build(init=config.init)
        if config.whiten:
            whiten_filters(model.patch_embed.conv, augment.normalise(images[:5000], self.mean, self.std))
        self.model = model.to(machine.device).train()
        self.optimisers = build_optimisers(self.model, config.optim(), bf16=machine.precision == "bfloat16")
        self.schedule = config.schedule_shape()
        self.ema = Ema(self.model, config.ema) if config.ema else None
        net = torch.compile(self.model) if machine.compiled else self.model
        self.net = self.workers.wrap(net)
        self.patches = self.model.patch_embed.num_patches
        self._order = (-1, torch.empty(0))

    @property
    def steps_per_epoch(self) -> int:
        return len(self.images) // self.batch

    def steps_for(self, epochs: float) -> int:
        """At least one."""
        return max(1, round(epochs * self.steps_per_epoch))

    def kept_patches(self, progress: float) -> int | None:
        """How many patches each picture keeps at this share of the run; None: all of them."""
        kept = round(self.config.keep_patches * self.patches)
        return kept if kept < self.patches and progress < self.config.full_from else None

    def step(self, step: int, progress: float, rate: float = 1.0) -> Tensor:
        """Learn from one batch; `rate` scales the schedule's. Returns the loss, still on the device."""
        x, y, options = self.prepare(step, progress)
        if self.config.dropout:
            torch.manual_seed(_seed("dropout", self.config.seed, step, self.workers.rank))
        loss = self.backward(x, y, **options)
        if self.config.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        scale_rates(self.optimisers, self.schedule.lr_scale(progress) * rate)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        if self.ema:
            self.ema.update(self.model)
        return self.workers.mean(loss)

    def prepare(self, step: int, progress: float) -> tuple[Tensor, Tensor, dict]:
        """This process's part of the batch of a step: x, y, and what the model is told beside them."""
        config = self.config
        share = self.batch // self.workers.count
        places = torch.arange(self.workers.rank * share, (self.workers.rank + 1) * share)
        index = self._order_of(step // self.steps_per_epoch)[
            (step % self.steps_per_epoch) * self.batch + places
        ].to(self.images.device, non_blocking=True)
        keys = augment.sample_keys(config.seed, step, places.to(self.images.device, non_blocking=True))
        x, y = self.images[index], self.labels[index]
        if config.augment == "tutorial":
            x = augment.tutorial(x, keys)
        else:
            if config.augment != "none":
                x = augment.light(x, keys, mirror=config.mirror)
            if config.augment == "randaugment":
                x = augment.rand_augment(x, keys)
            x = augment.normalise(x, self.mean, self.std)
        if config.random_erasing:
            x = augment.random_erasing(x, keys, config.random_erasing, scale=(0.02, 0.33), ratio=(0.3, 3.3))
        if config.cutmix:
            x, y = augment.cutmix(x, F.one_hot(y, self.num_classes).float(), keys, config.cutmix)
        options = {}
        kept = self.kept_patches(progress)
        if kept:
            options["keep"] = augment.keep_patches(keys, self.patches, kept)
        if config.stochastic_depth:
            layers = self.model.num_layers
            options["branch_gate"] = augment.branch_gates(keys, layers, config.stochastic_depth)
        return x, y, options

    def backward(self, x: Tensor, y: Tensor, **options) -> Tensor:
        """The loss of one batch, with its gradients left on the parameters."""
        with self._autocast():
            logits = self.net(x, **options)
        loss = F.cross_entropy(logits.float(), y, label_smoothing=self.config.label_smoothing)
        loss.backward()
        return loss.detach()

    @property
    def best_model(self) -> nn.Module:
        """What a run keeps: the averaged model, or the model itself where there is no average."""
        return self.ema.model if self.ema else self.model

    @torch.no_grad()
    def evaluate(self, images: Tensor, labels: Tensor) -> tuple[float, float]:
        """(accuracy from 0 to 1, cross entropy) of `best_model` on these pictures, none of them varied."""
        model, was_training = self.best_model, self.best_model.training
        model.eval()
        size = EVALUATION_BATCH.get(self.machine.kind, 128)
        totals = []
        for some, answers in zip(images.split(size), labels.split(size), strict=True):
            answers = answers.to(self.machine.device)
            with self._autocast():
                logits = model(augment.normalise(some.to(self.machine.device), self.mean, self.std)).float()
            loss = F.cross_entropy(logits, answers, reduction="sum")
            totals.append(torch.stack([(logits.argmax(1) == answers).sum().float(), loss]))
        model.train(was_training)
        right, loss = torch.stack(totals).double().sum(0).tolist()
        return right / len(labels), loss / len(labels)

    def tensors(self) -> dict[str, Tensor]:
        """Copies on the CPU of all that the next step depends on, by name."""
        weights = {
            f"{name}.weights": p.detach().to("cpu", copy=True).contiguous()
            for name, p in self.model.named_parameters()
        }
        return weights | state_tensors(self.optimisers) | (self.ema.tensors() if self.ema else {})

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up what `tensors` gave. ValueError for those of another model or other optimisers."""
        weights = {name: tensor for name, tensor in tensors.items() if name.endswith(".weights")}
        average = {n: t for n, t in tensors.items() if n.endswith(".ema") or n == "ema.updates"}
        parameters = dict(self.model.named_parameters())
        if {f"{name}.weights": p.shape for name, p in parameters.items()} != {
            name: tensor.shape for name, tensor in weights.items()
        }:
            raise ValueError("the saved weights are those of another model")
        load_state_tensors(
            self.optimisers, {n: t for n, t in tensors.items() if n not in weights and n not in average}
        )
        if self.ema:
            self.ema.load(average)
        for name, p in parameters.items():
            p.copy_(weights[f"{name}.weights"])

    def _order_of(self, epoch: int) -> Tensor:
        """(n,) the pictures of an epoch in their order."""
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(_seed("order", self.config.seed, epoch))
            self._order = (epoch, torch.randperm(len(self.images), generator=generator))
        return self._order[1]

    def _autocast(self):
        if self.machine.precision == "float32":
            return nullcontext()
        return torch.autocast(self.machine.kind, self.machine.dtype)


def _seed(what: str, *numbers: int) -> int:
    """A seed of 63 bits of its own for each purpose and row of numbers."""
    sequence = np.random.SeedSequence([*what.encode(), *numbers])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def channel_figures(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of (n, 3, H, W) uint8, as shares of 255."""
    counts = torch.stack([torch.bincount(images[:, c].flatten(), minlength=256) for c in range(3)]).double()
    levels = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ levels
    std = (share @ levels**2 - mean**2).clamp_min(1e-6).sqrt()
    return tuple(round(m, 4) for m in mean.tolist()), tuple(max(round(s, 4), 1e-3) for s in std.tolist())


@torch.no_grad()
def whiten_filters(conv: nn.Conv2d, x: Tensor) -> None:
    """Set a patch embedding's first filters to the whitening of the patches of `x`, and their negatives.

    Filters that answer to every direction alike learn faster at first; as many as there are filters for.
    Idea: Coates and Ng 2012, "Learning feature representations with k-means".
    """
    side = conv.kernel_size[0]
    patches = F.unfold(x, side, stride=side).transpose(1, 2).reshape(-1, x.shape[1] * side * side)
    patches = patches - patches.mean(0)
    variances, directions = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (directions / (variances + 1e-2).sqrt()).T.flip(0)  # the directions that matter come first
    filters = 0.3 * torch.cat([filters, -filters])[: len(conv.weight)]
    conv.weight[: len(filters)] = filters.view(-1, *conv.weight.shape[1:])


def as_tensors(images: np.ndarray, labels: np.ndarray, index: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(n, 3, H, W) uint8 and (n,) int64 of the pictures at `index`, in memory of their own."""
    chosen = torch.from_numpy(np.ascontiguousarray(images[index]))
    return chosen.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels[index].astype(np.int64))


def settings(config: TrainConfig) -> dict:
    return dataclasses.asdict(config)
