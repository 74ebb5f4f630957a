"""What a run will cost, before it starts: images a second, time, disk; and what is impossible, by its field.

    problems(values)                      # {"batch": "…"}: what can be known at once, without measuring
    found = ask(config, "demo")           # some seconds in a process of its own: an Estimate, or why not
    estimate_lines(found)                 # as `python -m train estimate --preset demo` prints them

Measured are some warm steps, on noise: on a CPU 16 pictures at a time, from which the rate at the run's own
batch follows, on a GPU that batch itself. torch.compile is left out: a run that uses it is faster than said.
Nothing is read or written. The time is that of a machine with nothing else to do, off by a few tenths.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import floor, log10
from pathlib import Path

import train
from train.child import be_nice, device_kind
from train.config import TrainConfig, as_flags
from train.needs import (
    PictureCount,
    available_bytes,
    batch_of,
    count_pictures,
    disk_bytes,
    free_bytes,
    memory_bytes,
    parameters,
    resume_bytes,
    weights_bytes,
)
from vit.download import DataError
from vit.words import duration

LONGEST_SECONDS = 60.0  # that measuring may take
BATCH = 16
TOO_LONG = "measuring takes too long on this machine as busy as it is; a run can be started all the same"
_SMALLER = "a smaller embed_dim, mlp_dim or num_layers needs less"
_TIMED_SECONDS, _FEWEST, _MOST = 0.6, 3, 20  # of each kind of step
_OPENING_SECONDS = 5.0  # to load torch and open decoded pictures
_SAVED_PER_SECOND = 200e6  # bytes copied, digested and written through to the disk
_WHOLE = 1.5  # times the room that a run needs: a file is written whole before it takes the old one's place


@dataclass(frozen=True)
class Estimate:
    """Of one run on this machine."""

    parameters: int
    device: str
    precision: str
    images_per_second: float  # over the whole run, in steps
    seconds: float  # from the start to the end, evaluations included
    epochs: float
    disk_bytes: int  # that the run's folder will hold
    free_bytes: int
    memory_bytes: int  # of the process, on a CPU

    @property
    def problem(self) -> str:
        """Why the run cannot end well after all, or ""."""
        return _disk_problem(self.disk_bytes, self.free_bytes)


# ---- what is impossible ----------------------------------------------------------------------------------


def problems(values: dict) -> dict[str, str]:
    """A sentence for each field of TrainConfig that is impossible; under "" what belongs to no field.

    `values` are those of all fields. What only measuring can tell, `ask` tells.
    """
    try:
        config = TrainConfig(**values)
    except ValueError as error:
        return {field_of(str(error)): str(error)}
    found, kind = {}, None
    try:
        kind = device_kind(config.device)
    except ValueError as error:
        found["device"] = str(error)
    try:
        count = count_pictures(config)
    except DataError as error:
        return found | {"data": str(error).rstrip(".")}
    if not count.is_here:
        found["data"] = "CIFAR-10 is not on this machine: download it, or choose patterns or a folder"
    elif few := _too_few(config, count):
        found[field_of(few)] = few
    least = "float32" if config.precision == "float32" else "bfloat16"
    memory = _memory_problem(config, count, kind, least) if kind else ""
    for sentence in (memory, _disk_problem(disk_bytes(config, count, config.epochs), free_bytes())):
        if sentence:
            found.setdefault(field_of(sentence), sentence)
    return found


def field_of(sentence: str) -> str:
    """The field of TrainConfig that a sentence mentions first, or ""."""
    names = "|".join(field.name for field in fields(TrainConfig))
    found = re.search(rf"\b({names})\b", sentence)
    return found[1] if found else ""


def _too_few(config: TrainConfig, count: PictureCount) -> str:
    if config.holdout and not count.held:
        return (
            f"holdout takes none of {count.total:,} pictures, which are too few: bring more, or set it to 0"
        )
    if count.learnt < 2:
        return "the data are too few: there must be at least 2 training pictures"
    return ""


def _memory_problem(config: TrainConfig, count: PictureCount, kind: str, precision: str) -> str:
    """Why this machine's memory is too small, or "". What a GPU lacks, it says itself."""
    there, of_model = available_bytes(), parameters(config.architecture(count.classes))
    small, whole = (memory_bytes(config, count, precision, batch) for batch in (BATCH, None))
    if kind != "cpu":
        small, whole = 2 * 4 * of_model, 0  # models are made here, and then moved
    if there is not None and small > there:
        what, advice, needed = f"a model of {of_model:,} parameters", _SMALLER, small
    elif there is not None and whole > there:
        what, advice, needed = f"a batch of {batch_of(config, count):,}", "a smaller batch needs less", whole
    else:
        return ""
    return f"{what} needs more memory than there is: about {_size(needed)} of {_size(there)}; {advice}"


def _disk_problem(needed: int, free: int) -> str:
    if _WHOLE * needed <= free:
        return ""
    return (
        f"the disk has no room for this run: it needs {_size(_WHOLE * needed)}, and {_size(free)} are free; "
        "delete runs, or let keep_every, snapshots or the model ask for less"
    )


# ---- measuring -------------------------------------------------------------------------------------------


def measure(config: TrainConfig) -> Estimate:
    """Build the model and time it. ValueError or DataError, of one sentence, for what is impossible."""
    import torch

    from train.learner import Learner, Machine

    count = count_pictures(config)
    if few := _too_few(config, count):
        raise ValueError(few)
    machine = Machine.here(replace(config, compile="off"))
    if problem := _memory_problem(config, count, machine.kind, machine.precision):
        raise ValueError(problem)  # before anything is built
    batch = BATCH if machine.kind == "cpu" else batch_of(config, count)
    seconds, full = {}, 1.0
    try:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (batch, 3, 32, 32), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, count.classes, (batch,), generator=generator)
        learner = Learner(replace(config, batch=batch), machine, images, labels, count.classes)
        if learner.kept_patches(0):
            full = 1 - config.full_from
        for progress in (0.0, 1.0):  # with some of the patches, and with all
            if progress or full < 1:
                seconds[progress] = _step_seconds(learner, progress, batch_of(config, count))
        (judging,) = _seconds(lambda: learner.evaluate(images, labels))
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(_out_of_memory(config, machine.kind, error)) from error
    except RuntimeError as error:
        if "memory" not in str(error) and "alloc" not in str(error):
            raise
        raise ValueError(_out_of_memory(config, machine.kind, error)) from error
    some, all_ = seconds.get(0.0, 0.0), seconds[1.0]
    return _estimate(config, count, machine, full, some, all_, judging / batch)


def _out_of_memory(config: TrainConfig, kind: str, error: Exception) -> str:
    advice = _SMALLER if kind == "cpu" else f"a smaller batch than {config.batch:,} needs less"
    said = re.split(r"[.\n]\s", f"{error}")[0][:120] or type(error).__name__
    return f"there is less memory than this run needs; {advice} ({said})"


def _step_seconds(learner, progress: float, batch: int) -> float:
    """Of a step of `batch` pictures: what is done with each picture grows with them, the update does not."""

    def step() -> None:
        learner.step(0, progress).item()  # item waits for a GPU

    def pictures() -> None:
        x, y, options = learner.prepare(0, progress)
        learner.backward(x, y, **options).item()

    whole, of_pictures = _seconds(step, pictures)
    of_pictures = min(whole, of_pictures)
    return whole - of_pictures + of_pictures * batch / learner.batch


def _seconds(*works: Callable[[], object]) -> list[float]:
    """The quickest of some times of each, after one that warms up: what else goes on can only slow them."""
    times, end = [[] for _ in works], 0.0
    for round_ in range(1 + _MOST):
        for work, its in zip(works, times, strict=True):
            since = time.perf_counter()
            work()
            if round_:
                its.append(time.perf_counter() - since)
        end = end or time.perf_counter() + _TIMED_SECONDS
        if round_ >= _FEWEST and time.perf_counter() > end:
            break
    return [min(its) for its in times]


def _estimate(config, count: PictureCount, machine, full, some, all_, judging) -> Estimate:
    """From the seconds of a step with some patches, of one with all, and of judging a picture."""
    batch = batch_of(config, count)
    per_epoch = count.learnt // batch
    step_seconds = full * all_ + (1 - full) * some
    evaluating, limit = judging * count.held, 60 * config.minutes
    if config.minutes and not config.fit_epochs:  # shares of the time, not of the steps
        step_seconds = 1 / (full / all_ + ((1 - full) / some if full < 1 else 0))
        steps = max(1, round(limit / step_seconds))
    elif config.minutes:
        evaluations = config.evaluations + 3  # as train/fit.py leaves room for
        steps = max(1, int((limit - _OPENING_SECONDS - evaluations * evaluating) / step_seconds))
    else:
        steps = max(1, round(config.epochs * per_epoch))
    evaluations = min(config.evaluations, steps)
    saves = evaluations + steps // config.checkpoint_steps + 1
    saved = resume_bytes(config, count.classes) + 2 * weights_bytes(config, count.classes)
    beside = evaluations * evaluating + judging * count.filmed * min(config.snapshots, steps + 1)
    beside += _OPENING_SECONDS + saves * saved / _SAVED_PER_SECOND
    seconds, epochs = steps * step_seconds + beside, steps / per_epoch
    if config.fit_epochs:
        seconds = max(limit, step_seconds + beside) if steps == 1 else limit
    stop = 60 * config.stop_minutes
    if stop and stop < seconds:
        seconds, epochs = stop, epochs * stop / seconds
    return Estimate(
        parameters=parameters(config.architecture(count.classes)),
        device=machine.device,
        precision=machine.precision,
        images_per_second=batch / step_seconds,
        seconds=seconds,
        epochs=epochs,
        disk_bytes=disk_bytes(config, count, epochs),
        free_bytes=free_bytes(),
        memory_bytes=memory_bytes(config, count, machine.precision),
    )


def ask(config: TrainConfig, preset_name: str, *, longest_seconds: float = LONGEST_SECONDS) -> Estimate | str:
    """Measure in a process of its own, at low priority; a sentence where that fails or takes too long."""
    root = str(Path(train.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    options = {}
    if os.name == "nt":
        options["creationflags"] = subprocess.BELOW_NORMAL_PRIORITY_CLASS
    try:
        words = as_flags(config, preset_name, device_kind(config.device))
        # -P: a folder that somebody works in may hold a train.py of their own
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "train", "estimate", "--json", *words],
            env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace", **options,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return f"nothing could be measured: {' '.join(str(error).split())}"
    with process:
        be_nice(process.pid)
        try:
            told, complaint = process.communicate(timeout=longest_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return TOO_LONG
    if process.returncode == 0:
        try:
            return Estimate(**json.loads(told))
        except (ValueError, TypeError) as error:
            return f"what was measured cannot be read: {error}"
    if process.returncode == -9:  # not by us: the kernel's answer to a process that takes too much
        return f"measuring was ended by the system, most likely for lack of memory; {_SMALLER}"
    last = (complaint.strip().splitlines() or ["it gave no reason"])[-1]
    return re.sub(r"^python -m train(?: estimate)?: ", "", last)


# ---- in words --------------------------------------------------------------------------------------------


def estimate_lines(estimate: Estimate) -> list[str]:
    """One line for each thing that people ask, with as many digits as make sense."""
    epochs = _digits(estimate.epochs)
    return [
        f"{estimate.parameters:,} parameters",
        f"{estimate.device.upper()}, {estimate.precision}",
        f"about {_digits(estimate.images_per_second)} images/s",
        f"about {_time(estimate.seconds)}, {epochs} {'epoch' if epochs == '1' else 'epochs'}",
        f"{_size(estimate.disk_bytes)} of disk ({_size(estimate.free_bytes)} free)",
    ]


def _digits(number: float) -> str:
    """Two that say something: `1,100`, `0.52`."""
    if not number:
        return "0"
    places = 1 - floor(log10(abs(number)))
    rounded = round(number, places)
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _size(size_bytes: float) -> str:
    if size_bytes >= 1e9:
        return f"{_digits(size_bytes / 1e9)} GB"
    return f"{_digits(size_bytes / 1e6)} MB"


def _time(seconds: float) -> str:
    steps = ((20, 1), (120, 10), (3600, 60), (36_000, 600))  # below so many seconds, to the next so many
    to = next((to for below, to in steps if seconds < below), 3600)
    return duration(max(1, round(seconds / to)) * to)
