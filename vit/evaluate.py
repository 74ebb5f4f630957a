"""How good a checkpoint is on labelled pictures, and what it says to each of them.

    predictions = predict(model, checkpoint, load_pictures())
    metrics = measure(predictions, checkpoint.class_names)
    metrics.accuracy, metrics.interval                     # 0.85, (0.84, 0.86)
    confident_mistakes(predictions, 5)                     # rows of the pictures it is most wrongly sure of

Predictions are kept in a small file, so that the page can offer a model's mistakes at once.
"""

import json
import math
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vit.checkpoint import Checkpoint
from vit.datasets import Pictures, cache_folder
from vit.explanation import require_finite
from vit.files import write_whole
from vit.images import normalise
from vit.model import VisualTransformer

BATCH = 64  # on a CPU larger batches leave the cache and are slower
_INTERVAL_Z = 1.959964  # 95 % of a normal distribution lie within
_BINS = 15  # as in Guo et al. 2017, so that figures can be compared
_FLIP = "flip"  # a third fact in files of flipped predictions
# What numpy and zipfile raise for a damaged file: which one depends on the byte that is wrong.
_DAMAGE = (
    OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


class Cancelled(Exception):
    """Raised by a progress callback to end the work; nothing is kept."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """What one checkpoint says to each picture of one data set."""

    checkpoint_id: str
    data_digest: str
    ids: np.ndarray  # (n,) str, as in Pictures
    labels: np.ndarray  # (n,) uint16
    classes: np.ndarray  # (n,) uint16, the most probable
    probabilities: np.ndarray  # (n,) float32, of that class
    top_logits: np.ndarray  # (n,) float32, its logit
    flip: bool = False  # logits averaged over picture and mirror image

    def save(self, path: Path) -> None:
        """Write one npz file, whole or not at all."""
        facts = [self.checkpoint_id, self.data_digest, *([_FLIP] if self.flip else [])]
        write_whole(
            path,
            lambda file: np.savez_compressed(
                file,
                facts=np.array(json.dumps(facts)),
                ids=self.ids.astype("S12"),
                labels=self.labels,
                classes=self.classes,
                probabilities=self.probabilities.astype(np.float16),
                top_logits=self.top_logits.astype(np.float16),
            ),
        )


@dataclass(frozen=True)
class ClassMetrics:
    """One class. Precision is the share of right ones among those called it, recall among those that are."""

    name: str
    pictures: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class ReliabilityBin:
    """The pictures whose most probable class has a probability above `low` and up to `high`."""

    low: float
    high: float
    pictures: int  # at least 1
    confidence: float  # mean of those probabilities
    accuracy: float


@dataclass(frozen=True)
class Metrics:
    """Accuracy with its 95 % interval (Wilson 1927), per class figures, who is taken for whom, calibration.

    The expected calibration error (Guo et al. 2017, arXiv 1706.04599) is the distance between confidence and
    accuracy, from 0 to 1, averaged over the pictures of 15 equal bins of confidence.
    """

    pictures: int
    accuracy: float  # 0 to 1
    interval: tuple[float, float]
    classes: tuple[ClassMetrics, ...]
    confusion: tuple[tuple[int, ...], ...]  # K rows of true classes, K columns of predicted ones
    calibration_error: float
    reliability: tuple[ReliabilityBin, ...]  # from low to high confidence; bins without pictures left out
    flip: bool  # as in Predictions


def predict(
    model: VisualTransformer,
    checkpoint: Checkpoint,
    pictures: Pictures,
    *,
    flip: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Predictions:
    """Classify every picture. `progress(done, total, what)` may raise Cancelled.

    With `flip` each picture is seen twice, as it is and mirrored left to right, and the logits of both passes
    are averaged. Logits rather than probabilities: their mean is the geometric mean of the two answers, in
    which a class that one pass all but rules out does not win, and there still is a largest logit.

    ValueError if model and data do not belong together (other classes, another size of picture), and for a
    model in train mode, whose dropout would be measured too, or that answers with NaN or infinity.
    """
    if model.training:
        raise ValueError("the model is in train mode; call model.eval() first")
    check_match(checkpoint, pictures)
    device = model.device
    n = len(pictures)
    logits = np.empty((n, len(checkpoint.class_names)), np.float32)
    with torch.inference_mode():
        for start in range(0, n, BATCH):
            batch = normalise(pictures.images[start : start + BATCH], checkpoint).to(device)
            answers = model(batch).float()
            if flip:
                answers = (answers + model(batch.flip(-1)).float()) / 2
            require_finite(answers)
            logits[start : start + len(batch)] = answers.cpu().numpy()
            if progress:
                progress(start + len(batch), n, "pictures classified")
    classes = logits.argmax(axis=1)
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return Predictions(
        checkpoint_id=checkpoint.id,
        data_digest=pictures.digest,
        ids=pictures.ids,
        labels=pictures.labels.astype(np.uint16),
        classes=classes.astype(np.uint16),
        probabilities=1 / shifted.sum(axis=1),
        top_logits=logits.max(axis=1),
        flip=flip,
    )


def measure(predictions: Predictions, class_names: tuple[str, ...]) -> Metrics:
    """The figures that follow from some predictions. A class never seen or never predicted scores 0."""
    K = len(class_names)
    confusion = np.zeros((K, K), np.int64)
    np.add.at(confusion, (predictions.labels, predictions.classes), 1)
    hits, truly, called = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    classes = []
    for k, name in enumerate(class_names):
        precision = hits[k] / called[k] if called[k] else 0.0
        recall = hits[k] / truly[k] if truly[k] else 0.0
        f1 = 2 * hits[k] / (called[k] + truly[k]) if called[k] + truly[k] else 0.0
        classes.append(ClassMetrics(name, int(truly[k]), float(precision), float(recall), float(f1)))
    n = len(predictions.labels)
    right = int(hits.sum())
    calibration_error, reliability = _calibration(predictions)
    return Metrics(
        pictures=n,
        accuracy=right / n if n else 0.0,
        interval=wilson_interval(right, n),
        classes=tuple(classes),
        confusion=tuple(tuple(map(int, row)) for row in confusion),
        calibration_error=calibration_error,
        reliability=reliability,
        flip=predictions.flip,
    )


def _calibration(predictions: Predictions) -> tuple[float, tuple[ReliabilityBin, ...]]:
    # Rounded as files round them: a probability beside a bin's edge must not change bins when it is kept.
    confidence = predictions.probabilities.astype(np.float16).astype(np.float64)
    right = predictions.classes == predictions.labels
    which = np.clip(np.ceil(confidence * _BINS) - 1, 0, _BINS - 1).astype(int)
    bins, distance = [], 0.0
    for k in np.unique(which).tolist():
        inside = which == k
        n, mean, share = int(inside.sum()), float(confidence[inside].mean()), float(right[inside].mean())
        bins.append(ReliabilityBin(k / _BINS, (k + 1) / _BINS, n, mean, share))
        distance += n * abs(mean - share)
    return distance / max(1, len(which)), tuple(bins)


def confident_mistakes(predictions: Predictions, n: int) -> np.ndarray:
    """Rows of the n wrong predictions that are most probable, the most probable first; (at most n,) int64.

    Among equals the earlier row comes first. ValueError for a negative n.
    """
    if n < 0:
        raise ValueError(f"the number of mistakes must be 0 or more, not {n}")
    wrong = np.flatnonzero(predictions.classes != predictions.labels)
    return wrong[np.argsort(-predictions.probabilities[wrong], kind="stable")[:n]]


def wilson_interval(right: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share, 0 to 1 (Wilson 1927); it holds near 0 and 1 and for few pictures too."""
    if n == 0:
        return 0.0, 1.0
    share, z = right / n, _INTERVAL_Z
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # at both ends the formula gives exactly 0 and 1, floats almost
    return 0.0 if right == 0 else centre - half, 1.0 if right == n else centre + half


def top_logit_percentiles(predictions: Predictions) -> tuple[float, ...]:
    """The 0th to 100th percentile of the largest logit: what a checkpoint keeps to recognise strangers."""
    if not len(predictions.top_logits):
        return ()
    return tuple(np.percentile(predictions.top_logits, range(101)).round(4).tolist())


def kept_predictions(checkpoint_path: Path, checkpoint: Checkpoint, data_digest: str) -> Predictions | None:
    """The predictions shipped beside a checkpoint, or kept in the cache; None if there are none that fit.

    Those made with `flip` do not fit: what is kept is what one pass says.
    """
    for path in (shipped_path(checkpoint_path), cached_path(checkpoint.id, data_digest)):
        found = _read(path)
        if found and (found.checkpoint_id, found.data_digest, found.flip) == (
            checkpoint.id,
            data_digest,
            False,
        ):
            return found
    return None


def shipped_path(checkpoint_path: Path) -> Path:
    return checkpoint_path.with_suffix(".predictions.npz")


def cached_path(checkpoint_id: str, data_digest: str) -> Path:
    return cache_folder() / "predictions" / f"{checkpoint_id}-{data_digest[:12]}.npz"


def _read(path: Path) -> Predictions | None:
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            checkpoint_id, data_digest, *how = json.loads(str(file["facts"]))
            arrays = [file[name] for name in ("ids", "labels", "classes", "probabilities", "top_logits")]
    except _DAMAGE:
        return None  # a damaged file is as good as none: predictions are computed anew
    ids, labels, classes, probabilities, top_logits = arrays
    return Predictions(
        checkpoint_id, data_digest, ids.astype("U12"), labels, classes,
        probabilities.astype(np.float32), top_logits.astype(np.float32), flip=bool(how),
    )  # fmt: skip


def check_match(checkpoint: Checkpoint, pictures: Pictures) -> None:
    """ValueError unless the data set has the checkpoint's classes and its size of picture."""
    if pictures.class_names != checkpoint.class_names:
        raise ValueError(
            f"{checkpoint.name or 'the checkpoint'} knows the classes {', '.join(checkpoint.class_names)}; "
            f"{pictures.name} has {', '.join(pictures.class_names)}"
        )
    if pictures.images.shape[1:3] != checkpoint.architecture.img_size:
        height, width = checkpoint.architecture.img_size
        raise ValueError(
            f"{checkpoint.name or 'the checkpoint'} takes pictures of {width} x {height} px; those of "
            f"{pictures.name} have {pictures.images.shape[2]} x {pictures.images.shape[1]} px"
        )
