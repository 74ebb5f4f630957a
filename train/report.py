"""One HTML page about a run: curves, measured accuracy, mistakes, attention before and after, settings.

    write_report(Path("runs/demo"))                # runs/demo/report.html: no network, no scripts, one file

Here the test set is opened, once, when the run is over: whatever the trainer chose, it chose
by held-out training pictures. What the model says to it is kept, for the next report and for the page
(train/page/results.py), which asks here what is measured and on which pictures. A run directory may be torn,
damaged or written by a stranger: what cannot be read is named in one line where it would have been, and the
rest of the page is still written.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from train import film
from train.figures import Series, curve, page
from vit.checkpoint import Checkpoint, load
from vit.datasets import DataError, Pictures, find_data, holdout_indices, load_pictures
from vit.device import pick_device
from vit.evaluate import (
    Predictions,
    cached_path,
    check_match,
    confident_mistakes,
    kept_predictions,
    measure,
    predict,
)
from vit.files import write_whole
from vit.model import VisualTransformer
from vit.overlay import draw
from vit.sources import find_source
from vit.words import duration

MISTAKES, RIGHT, PROBES = 16, 10, 6  # pictures of each kind
LARGEST_TABLE = 40  # classes of a table of mix-ups that can still be read
_DEEPEST_SHADE = 50  # percent: text on it keeps a contrast of 4.5:1 in both themes
_BEYOND_SENSE = 1e15  # no step, loss or rate is as large: a file that says so is damaged
Progress = Callable[[int, int, str], None]


def write_report(
    run: Path,
    out: Path | None = None,
    *,
    data: str | Path | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write `out`, by default `report.html` in the run's folder, and return it.

    `data` names where the test pictures are, if not where the run found its own. `progress(done, total,
    what)` may raise `vit.evaluate.Cancelled`. ValueError if there is no such run, OSError if the page cannot
    be written; whatever is wrong inside the run stands in the page.
    """
    run = Path(run)
    if not run.is_dir():
        raise ValueError(f"There is no run in {run}: name a folder that `python -m train run` has written.")
    if not any((run / name).is_file() for name in ("config.json", "status.json", "metrics.jsonl")):
        raise ValueError(f"{run} holds no run: name a folder that `python -m train run` has written.")
    pick_device(device)  # one that is not here is the caller's mistake, not the run's
    out = run / "report.html" if out is None else Path(out)
    config, config_problem = _read_object(run / "config.json")
    status, status_problem = _read_object(run / "status.json")
    metrics, torn = _read_metrics(run / "metrics.jsonl")
    facts = {
        "name": run.resolve().name,
        "facts_line": _facts_line(config, status, metrics),
        "notices": [each for each in (status_problem, _unfinished(status)) if each],
        "result": _or_why_not(lambda: _result(run, config, data, device, progress)),
        "curves": _or_why_not(lambda: _curves(metrics, torn)),
        "attention": _or_why_not(lambda: _attention(run / "attention.npz")),
        "settings": {"why_not": config_problem} if config_problem else _settings(config),
        "command": config.get("command") or "",
        "report_command": f"python -m train report {shlex.quote(run.as_posix())}",
    }
    text = page(facts)
    write_whole(out, lambda file: file.write(text.encode("utf-8", "replace")))
    return out


def _or_why_not(section: Callable[[], dict]) -> dict:
    try:
        return section()
    except (ValueError, DataError, OSError) as error:  # of checkpoints, pictures, films: one sentence each
        return {"why_not": str(error)}


# --- reading what may be torn


def _read_object(path: Path) -> tuple[dict, str]:
    """The object in a JSON file, or an empty one and the reason."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"The run has no {path.name}."
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be read ({error})."
    return (value, "") if isinstance(value, dict) else ({}, f"{path.name} does not hold a JSON object.")


def _read_metrics(path: Path) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], int]:
    """For each name its steps and finite values, in order; and how many lines could not be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}, 0
    found, torn = {}, 0
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            torn += 1
            continue
        if not isinstance(row, dict) or _number(row.get("step")) is None:
            torn += 1
            continue
        for name, value in row.items():
            if (number := _number(value)) is not None:
                found.setdefault(name, {})[_number(row["step"])] = number  # a repeated step replaces the old
    columns = {name: sorted(points.items()) for name, points in found.items()}
    return {name: tuple(np.array(points, float).T) for name, points in columns.items()}, torn


def _number(value) -> float | None:
    """A finite number, or None; True is none, and neither is a number that no run can have."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _BEYOND_SENSE:
        return None
    return float(value) if math.isfinite(value) else None


def _of(container: dict, name: str) -> dict:
    """The object of that name, or an empty one."""
    value = container.get(name)
    return value if isinstance(value, dict) else {}


# --- the sections


def _facts_line(config: dict, status: dict, metrics: dict) -> str:
    data, resolved = _of(config, "data"), _of(config, "resolved")
    facts = []
    if isinstance(config.get("preset"), str):
        facts.append(f"preset {config['preset']}")
    if isinstance(data.get("name"), str):
        facts.append(data["name"])
    if (count := _number(config.get("parameters"))) is not None:
        facts.append(f"{count:,.0f} parameters")
    for name, unit in (("epoch", "epochs"), ("step", "steps")):
        if (value := _last(metrics, name)) is not None:
            facts.append(f"{value:,.1f}".removesuffix(".0") + f" {unit}")
    if (seconds := _last(metrics, "seconds")) is not None:
        facts.append(duration(seconds))
    if isinstance(resolved.get("device"), str):
        facts.append(f"on {resolved['device']}")
    if isinstance(status.get("state"), str):
        facts.append(status["state"])
    return " · ".join(facts) or "The run says nothing about itself."


def _last(metrics: dict, name: str) -> float | None:
    return float(metrics[name][1][-1]) if name in metrics else None


def _unfinished(status: dict) -> str:
    """What to know of a run that is not finished; empty for one that is, or that does not say."""
    state = status.get("state")
    if not isinstance(state, str) or state == "finished":
        return ""
    progress, reason = _number(status.get("progress")), status.get("reason")
    share = "" if progress is None else f" It got through {100 * progress:.0f} % of its length."
    because = f" Reason: {reason}" if isinstance(reason, str) and reason else ""
    return f"This run has not finished: its state is {state}.{share}{because}"


def _curves(metrics: dict, torn: int) -> dict:
    if not metrics:
        raise ValueError("metrics.jsonl is missing, or holds no line that can be read: there are no curves.")
    charts = (
        ("Loss", {"loss": "training", "val_loss": "held-out pictures"}, False),
        ("Accuracy on held-out pictures", {"val_accuracy": "held-out pictures"}, True),
        ("Learning rate", {"lr": "learning rate"}, False),
    )
    figures = []
    for title, names, percent in charts:
        series = [
            Series(words, *metrics[name], second=name == "val_loss")
            for name, words in names.items()
            if name in metrics
        ]
        drawn = _or_why_not(lambda: {"svg": curve(title, series, percent=percent)})  # noqa: B023, called now
        figures.append(drawn | {"title": title, "names": [line.name for line in series]})
    note = f"Lines of metrics.jsonl that could not be read and are left out: {torn:,}." if torn else ""
    return {"figures": figures, "note": note}


def _result(
    run: Path, config: dict, data: str | Path | None, device: str | None, progress: Progress | None
) -> dict:
    """Everything that follows from what the weights say to the test pictures."""
    path = weights_to_measure(run)
    model, checkpoint = load(path, device=device)
    pictures, where, honesty = pictures_to_measure(config, data, progress)
    predictions = _predictions(path, model, checkpoint, pictures, progress)
    metrics = measure(predictions, checkpoint.class_names)
    return {
        "metrics": metrics,
        "class_names": checkpoint.class_names,
        "where": where,
        "which": why_these_weights(path, checkpoint),
        "honesty": honesty,
        "shading": shading(metrics.confusion),
        **_shown(predictions, pictures),
    }


def weights_to_measure(run: Path) -> Path:
    """The file of a run's best weights, else of its last. ValueError if it has neither."""
    for name in ("best", "last"):
        path = run / "checkpoints" / f"{name}.safetensors"
        if path.is_file():
            return path
    raise ValueError("The run has no checkpoint yet, neither best nor last: nothing can be measured.")


def why_these_weights(path: Path, checkpoint: Checkpoint) -> str:
    """Which file is measured, as a sentence."""
    why = "its last weights: the run kept no best"
    if path.stem == "best":
        why = "which was chosen as best by its accuracy on held-out training pictures"
    return f"Measured: {path.name} (id {checkpoint.id}), {why}."


def _predictions(
    path: Path,
    model: VisualTransformer,
    checkpoint: Checkpoint,
    pictures: Pictures,
    progress: Progress | None,
) -> Predictions:
    """Those that are kept, else new ones, which then are."""
    check_match(checkpoint, pictures)
    if kept := kept_predictions(path, checkpoint, pictures.digest):
        if progress:
            progress(len(pictures), len(pictures), "pictures classified")
        return in_order(kept, pictures)
    found = predict(model, checkpoint, pictures, progress=progress)
    with suppress(OSError):  # a cache that cannot be written costs time alone
        found.save(cached_path(checkpoint.id, pictures.digest))
    return found


def in_order(kept: Predictions, pictures: Pictures) -> Predictions:
    """Kept predictions, row for row those of `pictures`, which may have lain in another order then.

    ValueError if they are not of these pictures, or name classes that there are none of.
    """
    n, names = len(pictures), ("ids", "labels", "classes", "probabilities", "top_logits")
    arrays = {name: getattr(kept, name) for name in names}
    fits = all(array.shape == (n,) for array in arrays.values()) and kept.classes.dtype.kind in "iu"
    if fits:
        theirs, ours = (np.lexsort((each.labels, each.ids)) for each in (kept, pictures))
        fits = (
            np.array_equal(kept.ids[theirs], pictures.ids[ours])
            and np.array_equal(kept.labels[theirs], pictures.labels[ours])
            and bool(((kept.classes >= 0) & (kept.classes < len(pictures.class_names))).all())
            and bool(np.isfinite(kept.probabilities).all())
        )
    if not fits:
        raise ValueError(
            f"The predictions kept for checkpoint {kept.checkpoint_id} are not of these pictures: delete the"
            " .predictions.npz file beside it, and measure again."
        )
    rows = np.empty(n, np.int64)
    rows[ours] = theirs
    return replace(kept, **{name: array[rows] for name, array in arrays.items()})


def pictures_to_measure(
    config: dict, data: str | Path | None = None, progress: Progress | None = None
) -> tuple[Pictures, str, str]:
    """The pictures to measure on, where they come from, and what that means for the figure.

    `config` is a run's config.json. ValueError or DataError, with a sentence, if there are none to be had.
    """
    settings = _of(config, "config")
    named = settings.get("data") if data is None else data
    if not isinstance(named, str | Path):
        raise ValueError("config.json does not say on which data the run was trained: name it with --data.")
    if _has_test_split(named):
        pictures = load_pictures(named, "test", progress=progress)
        return pictures, f"of {pictures.name}", "The trainer chose nothing by them."
    pictures = load_pictures(named, "train", progress=progress)
    digest = _of(config, "data").get("digest")
    if digest is not None and digest != pictures.digest:
        raise ValueError(
            "The pictures have changed since the run, so those that were held out are not known any more; and"
            " there is no test split to measure on."
        )
    held = _held_out(pictures, settings)
    if not len(held):
        raise ValueError(
            "Every picture was trained on and there is no test split: no accuracy would be honest."
        )
    honesty = (
        "The data has no test split of its own, so these are the pictures held out from training. They were"
        " not trained on, but decided which weights are best, so the figure is somewhat too good."
    )
    return _subset(pictures, held), f"held out from {pictures.name}", honesty


def _subset(pictures: Pictures, rows: np.ndarray) -> Pictures:
    """These rows alone, with a digest of their own: what is kept for all must not be taken for theirs."""
    images, labels, ids = pictures.images[rows], pictures.labels[rows], pictures.ids[rows]
    pairs = sorted(f"{picture} {label}" for picture, label in zip(ids.tolist(), labels.tolist(), strict=True))
    digest = hashlib.sha256("\n".join(pairs).encode()).hexdigest()
    return replace(pictures, images=images, labels=labels, ids=ids, digest=digest)


def _has_test_split(named: str | Path) -> bool:
    """False where only training pictures are, and for a plain tree of class folders, which is any split."""
    base = find_data(named)
    if base is None:
        return True  # so that loading says what is missing
    source = find_source(base, "test")
    return source is not None and not (source.layout == "folders" and source.root == base)


def _held_out(pictures: Pictures, settings: dict) -> np.ndarray:
    holdout, seed = (settings.get(name) for name in ("holdout", "split_seed"))
    if not all(isinstance(value, int) and value >= 0 for value in (holdout, seed)):
        raise ValueError("config.json does not say which pictures were held out, and there is no test split.")
    return holdout_indices(pictures.labels, holdout, seed)[1]


def shading(confusion: tuple[tuple[int, ...], ...]) -> list[list[float]] | None:
    """How deep each cell is shaded, in percent; None where the table would be too large."""
    table = np.array(confusion, float)
    if len(table) > LARGEST_TABLE:
        return None
    mistakes = table * (1 - np.eye(len(table)))
    right = table.diagonal() / np.maximum(table.sum(axis=1), 1)
    shares = mistakes / max(mistakes.max(), 1) + np.diag(right)
    return (_DEEPEST_SHADE * shares).round(1).tolist()


def _shown(predictions: Predictions, pictures: Pictures) -> dict:
    """The most confident mistakes, and the first right one of each class."""
    wrong = confident_mistakes(predictions, MISTAKES)
    right = np.flatnonzero(predictions.classes == predictions.labels)
    right = right[np.unique(predictions.labels[right], return_index=True)[1]][:RIGHT]

    def described(index: int) -> dict:
        return {
            "number": int(index) + 1,
            "pixels": np.asarray(pictures.images[index]),
            "truth": pictures.class_names[predictions.labels[index]],
            "answer": pictures.class_names[predictions.classes[index]],
            "probability": float(predictions.probabilities[index]),
        }

    return {"wrong": [described(index) for index in wrong], "right": [described(index) for index in right]}


def _attention(path: Path) -> dict:
    """The last layer's attention at the first frame and the last, for the first picture of some classes.

    Not rollout, which is nearly even unless the weakest weights are left out before they are multiplied.
    """
    recording = film.load(path)
    if not len(recording):
        raise ValueError("The recording of attention holds no frame yet.")
    frames = (0, len(recording) - 1) if len(recording) > 1 else (0,)
    height, width = recording.pictures.shape[1:3]
    # (K, P) each: the mean of all heads, CLS itself left out
    weights = [recording.attention(frame)[:, -1].mean(axis=1)[:, 1:] for frame in frames]
    patch_px = math.isqrt(height * width // max(weights[0].shape[-1], 1))
    grid = (height // max(patch_px, 1), width // max(patch_px, 1))
    if math.prod(grid) != weights[0].shape[-1]:
        raise ValueError("The recording of attention is damaged (its patches do not tile the pictures).")
    names = recording.class_names.tolist()
    steps = recording.steps[list(frames)].tolist()
    chosen = np.sort(np.unique(recording.labels, return_index=True)[1])[:PROBES]

    def drawn(k: int, frame: int, step: int, rows: np.ndarray) -> dict:
        probabilities = recording.probabilities[frame, k]
        answer = names[int(probabilities.argmax())]
        truth = names[recording.labels[k]]
        return {
            "pixels": draw(recording.pictures[k], rows[k].reshape(grid)),
            "step": step,
            "alt": f"{truth}, lit where the model looks at step {step:,}",
            "answer": answer,
            "probability": float(probabilities.max()),
        }

    rows = [
        {
            "pixels": recording.pictures[k],
            "truth": names[recording.labels[k]],
            "frames": [drawn(k, *each) for each in zip(frames, steps, weights, strict=True)],
        }
        for k in chosen
    ]
    return {"rows": rows}


def _settings(config: dict) -> dict:
    tables = {
        "What was set": "config",
        "What the preset's source does not state, and what stands for it": "not_stated",
        "What it came to on this machine": "resolved",
        "Data": "data",
    }
    return {
        "tables": [
            (title, [(key, _plain(value)) for key, value in _of(config, name).items()])
            for title, name in tables.items()
        ]
    }


def _plain(value) -> str:
    if isinstance(value, list):
        shown = ", ".join(map(_plain, value[:20])) or "none"
        return shown + (f" and {len(value) - 20:,} more" if len(value) > 20 else "")
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return str(value)
