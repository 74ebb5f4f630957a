"""Every setting of a training run, in one place: names, defaults, ranges, help, and the presets.

    config = preset("fast", minutes=10, seed=3)
    config.lr, config.optim(), config.schedule_shape()
    for field in fields(TrainConfig): field.metadata["help"]    # the command line is made of these

A value that makes no sense, alone or beside the others, is a ValueError of one sentence, before all else.
"""

import dataclasses
from dataclasses import dataclass, fields

from train.schedule import OptimConfig, Schedule
from vit.architecture import Architecture


def _setting(default, help: str, *, low: float | None = None, high: float | None = None, choices=()):
    """A field. `low` and `high`, of numbers, are the ends of what is allowed, both included."""
    return dataclasses.field(
        default=default, metadata={"help": help, "low": low, "high": high, "choices": choices}
    )


@dataclass(frozen=True)
class TrainConfig:
    """One run. Shares go from 0 to 1; what is spread over a run is placed by the share of it that is done."""

    data: str = _setting("cifar10", "cifar10, patterns, or a folder with one folder for each class")
    holdout: int = _setting(
        5000, "training pictures held out to judge by, a tenth of a smaller set; 0: none", low=0, high=10**9
    )
    split_seed: int = _setting(0, "decides which pictures are held out", low=0, high=2**63 - 1)
    seed: int = _setting(0, "decides weights, order, augmentation and dropout", low=0, high=2**63 - 1)

    epochs: float = _setting(
        0.0, "length in passes over the training pictures; 0: by minutes", low=0, high=1e6
    )
    minutes: float = _setting(
        60.0, "length in minutes spent in training steps; 0: by epochs", low=0, high=1e6
    )
    fit_epochs: bool = _setting(
        False, "measure the speed first, and turn the minutes, all work included, into epochs"
    )
    batch: int = _setting(256, "pictures in one step, over all processes", low=1, high=65536)

    patch_size: int = _setting(4, "side of a patch in pixels", low=1, high=32)
    embed_dim: int = _setting(256, "width of the tokens", low=1, high=4096)
    num_layers: int = _setting(6, "encoder blocks", low=1, high=64)
    num_heads: int = _setting(8, "attention heads of each block", low=1, high=64)
    mlp_dim: int = _setting(512, "width inside the MLP", low=1, high=16384)
    init: str = _setting("small", "how the weights start", choices=("small", "tutorial"))
    whiten: bool = _setting(True, "start the patch filters from the directions in which real patches differ")

    augment: str = _setting(
        "light", "how pictures are varied", choices=("none", "light", "tutorial", "randaugment")
    )
    mirror: bool = _setting(True, "light and randaugment mirror pictures: not where left and right matter")
    cutmix: float = _setting(0.0, "share of pictures that get a box of another one", low=0, high=1)
    random_erasing: float = _setting(0.0, "share of pictures that get a box of noise", low=0, high=1)
    label_smoothing: float = _setting(0.05, "share of each label spread over all classes", low=0, high=0.99)
    mean_and_std: str = _setting(
        "data", "pixels are scaled by the training pictures' figures, or to -1 .. 1", choices=("data", "half")
    )

    dropout: float = _setting(0.0, "share of activations and attention weights zeroed", low=0, high=0.99)
    stochastic_depth: float = _setting(0.0, "chance that a picture skips the last block", low=0, high=0.99)
    keep_patches: float = _setting(1.0, "share of patches each picture keeps", low=0.01, high=1)
    full_from: float = _setting(0.72, "share of the run after which all patches are kept", low=0, high=1)

    optimiser: str = _setting(
        "muon", "muon (for the blocks' matrices) or adamw (for all)", choices=("muon", "adamw")
    )
    lr: float = _setting(2.25e-3, "AdamW's learning rate", low=1e-9, high=10)
    muon_lr: float = _setting(3e-3, "Muon's learning rate", low=1e-9, high=10)
    weight_decay: float = _setting(0.05, "pull of the weights to zero", low=0, high=10)
    decay_all: bool = _setting(False, "pull biases, norms and positions too, not only matrices")
    beta2: float = _setting(0.98, "AdamW's memory of squared gradients", low=0, high=0.99999)
    schedule: str = _setting(
        "linear", "learning rate after the warm-up", choices=("linear", "cosine", "constant")
    )
    warmup: float = _setting(0.03, "share of the run in which the rate climbs", low=0, high=0.99)
    clip: float = _setting(0.0, "largest norm of the gradient; 0: any", low=0, high=1e6)
    ema: float = _setting(
        0.998, "memory of the averaged weights that are kept; 0: the last weights", low=0, high=0.99999
    )

    device: str = _setting("auto", "auto, cuda, mps or cpu")
    precision: str = _setting(
        "auto", "auto: bfloat16 where it is quicker", choices=("auto", "float32", "bfloat16")
    )
    compile: str = _setting("auto", "torch.compile; auto: on a GPU", choices=("auto", "on", "off"))
    threads: int = _setting(0, "threads on a CPU; 0: as torch chooses", low=0, high=1024)

    evaluations: int = _setting(20, "how often the held-out pictures are classified", low=1, high=100_000)
    snapshots: int = _setting(24, "how often attention is kept, dense early", low=2, high=1000)
    log_steps: int = _setting(20, "steps from one line of metrics.jsonl to the next", low=1, high=100_000)
    checkpoint_steps: int = _setting(200, "steps that a crash can cost at most", low=1, high=1_000_000)
    keep_every: float = _setting(
        0.0, "keep a checkpoint every so many epochs; 0: only last and best", low=0, high=1e6
    )
    stop_minutes: float = _setting(
        0.0, "stop after so many minutes by the clock, pauses and all; 0: never", low=0, high=1e6
    )
    stop_mb: int = _setting(0, "stop when the run's folder holds so many MB; 0: never", low=0, high=10**9)

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field, getattr(self, field.name))
        if bool(self.epochs) == bool(self.minutes):
            raise ValueError("a run is as long as epochs or minutes say: set one of them, the other to 0")
        if self.fit_epochs and not self.minutes:
            raise ValueError("fit_epochs turns minutes into epochs: set minutes")
        if 0 < self.keep_every < 1:
            raise ValueError(f"keep_every is 0 or at least 1, not {self.keep_every:g}")
        self.architecture(num_classes=2)
        self.optim(), self.schedule_shape()
        patches = (32 // self.patch_size) ** 2
        if round(self.keep_patches * patches) < 1:
            raise ValueError(
                f"keep_patches {self.keep_patches} of {patches} patches leaves none; "
                f"the least is {1 / patches:.3g}"
            )

    def architecture(self, num_classes: int) -> Architecture:
        """ValueError, with the numbers, for sizes that do not fit."""
        if 32 % self.patch_size:
            raise ValueError(f"patch_size {self.patch_size} does not divide 32; 1, 2, 4, 8, 16 and 32 do")
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} cannot be divided by num_heads {self.num_heads}")
        return Architecture(
            num_classes=num_classes,
            patch_size=self.patch_size,
            embed_dim=self.embed_dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            mlp_dim=self.mlp_dim,
            dropout=self.dropout,
        )

    def optim(self) -> OptimConfig:
        return OptimConfig(
            kind=self.optimiser,
            lr=self.lr,
            muon_lr=self.muon_lr,
            weight_decay=self.weight_decay,
            decay_all=self.decay_all,
            betas=(0.9, self.beta2),
        )

    def schedule_shape(self) -> Schedule:
        return Schedule(self.schedule, self.warmup)


def _check(field: dataclasses.Field, value) -> None:
    low, high, choices = (field.metadata[name] for name in ("low", "high", "choices"))
    if field.type is bool and not isinstance(value, bool):
        raise ValueError(f"{field.name} is true or false, not {value!r}")
    if field.type is int and (not isinstance(value, int) or isinstance(value, bool)):
        raise ValueError(f"{field.name} is a whole number, not {value!r}")
    if field.type is float and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise ValueError(f"{field.name} is a number, not {value!r}")
    if field.type is str and (not isinstance(value, str) or not value):
        raise ValueError(f"{field.name} is a word, not {value!r}")
    if choices and value not in choices:
        raise ValueError(f"{field.name} is {' or '.join(choices)}, not {value!r}")
    if low is not None and not low <= value <= high:  # nor is NaN
        raise ValueError(f"{field.name} is from {low} to {high}, not {value}")


# What an article leaves out and we had to choose, so that nobody takes our choice for the author's.
TUTORIAL_NOT_STATED = {
    "optimiser": "AdamW",
    "weight_decay": "0.01, torch's default, on every parameter",
    "beta2": "0.999, torch's default",
    "schedule": "constant rate",
    "loss": "cross entropy without smoothing",
    "test transform": "resize and normalise only",
    "seed": "ours",
    "split": "5,000 training pictures held out, as in every run here",
    "averaging": "none: the last weights are kept",
}

_TUTORIAL = TrainConfig(
    epochs=80.0, minutes=0.0, batch=128, init="tutorial", whiten=False, augment="tutorial",
    label_smoothing=0.0, mean_and_std="half", dropout=0.1, optimiser="adamw", lr=3e-4,
    weight_decay=0.01, decay_all=True, beta2=0.999, schedule="constant", warmup=0.0, ema=0.0,
    evaluations=80, precision="float32",
)  # fmt: skip
# A CPU sees each picture a few dozen times at most: what regularises would only slow it down.
_FAST = TrainConfig(keep_patches=0.5)
# Many epochs: the recipe that the best supervised results for this size share, with Muon and an average.
_RECORD = TrainConfig(
    minutes=8.0, fit_epochs=True, batch=512, augment="randaugment", cutmix=0.5, random_erasing=0.25,
    label_smoothing=0.1, stochastic_depth=0.1, muon_lr=4e-3, lr=2e-3, keep_patches=0.5, full_from=0.6,
    ema=0.999, evaluations=12, clip=1.0,
)  # fmt: skip
_DEMO = TrainConfig(
    data="patterns", mirror=False, epochs=0.5, minutes=0.0, batch=128, embed_dim=96, num_layers=4,
    num_heads=4, mlp_dim=192, label_smoothing=0.0, evaluations=8, log_steps=5, checkpoint_steps=50, lr=3e-3,
    muon_lr=6e-3, ema=0.99,
)  # fmt: skip

PRESETS = {"tutorial": _TUTORIAL, "fast": _FAST, "record": _RECORD, "demo": _DEMO}
EXPECTED = {  # for people who choose
    "tutorial": "the article's own settings: 80 epochs, many hours on a CPU",
    "fast": "the best accuracy within --minutes on this machine",
    "record": "the best accuracy for this architecture on one GPU",
    "demo": "a small model on made patterns, under two minutes on two CPU cores",
}


def preset(name: str, kind: str = "cpu", /, **changes) -> TrainConfig:
    """The preset, for a device of this kind ("cuda" …), with some fields changed.

    To change epochs or minutes is to choose by which of them the run ends. ValueError for another name, and
    as TrainConfig raises it.
    """
    if name not in PRESETS:
        raise ValueError(f"a preset is {', '.join(PRESETS)}, not {name!r}")
    base = PRESETS[name]
    if name == "fast" and kind == "cuda":
        # On a GPU the same minutes are hundreds of epochs, where only the strong recipe goes on gaining.
        base = dataclasses.replace(_RECORD, minutes=_FAST.minutes, fit_epochs=False)
    for one, other in (("epochs", "minutes"), ("minutes", "epochs")):
        if changes.get(one) and other not in changes:
            changes[other] = 0.0
    if changes.get("data") == "patterns":
        changes.setdefault("mirror", False)  # rising stripes mirrored are falling ones
    if not changes.get("minutes", base.minutes):
        changes.setdefault("fit_epochs", False)
    return dataclasses.replace(base, **changes)


def as_flags(config: TrainConfig, name: str, kind: str = "cpu", /) -> list[str]:
    """What `python -m train run` must be told to get this configuration, on a device of this kind."""
    base, words = preset(name, kind), ["--preset", name]
    for field in fields(TrainConfig):
        flag, value = "--" + field.name.replace("_", "-"), getattr(config, field.name)
        if value == getattr(base, field.name) and not _hangs_together(field.name, config, base):
            continue
        words += [flag if value else f"--no-{flag[2:]}"] if field.type is bool else [f"{flag}={value}"]
    return words


def _hangs_together(name: str, config: TrainConfig, base: TrainConfig) -> bool:
    """Whether `preset` may change this field by itself because of another one that differs."""
    others = {"epochs": "minutes", "minutes": "epochs", "fit_epochs": "minutes", "mirror": "data"}
    other = others.get(name)
    return other is not None and getattr(config, other) != getattr(base, other)


def not_stated(name: str) -> dict[str, str]:
    """What the preset's source leaves open, and what stands for it here."""
    return TUTORIAL_NOT_STATED if name == "tutorial" else {}
