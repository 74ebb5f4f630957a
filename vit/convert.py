"""What `python -m vit convert` does: any checkpoint to one safetensors file that says all that is known.

    lines = convert("tutorial.pth", Path("mine.safetensors"), half=True, facts={"epochs": 80})

The weights are measured as they are stored: rounded first, then tested. Beside the file go its predictions,
so that the page can offer mistakes at once, and a model card (Markdown) if asked for.
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

from vit.checkpoint import Checkpoint, load, save
from vit.datasets import Pictures, find_data, load_pictures
from vit.evaluate import Metrics, Predictions, measure, predict, shipped_path, top_logit_percentiles
from vit.files import write_whole
from vit.model import VisualTransformer
from vit.patterns import CLASSES as PATTERN_CLASSES

_MEASURED = ("accuracy", "accuracy_on")


def convert(
    source: str | Path,
    out: Path,
    *,
    half: bool = False,
    data: str | Path | None = None,
    facts: dict[str, str | int | float] | None = None,
    card: Path | None = None,
    device: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    **overrides,
) -> list[str]:
    """Write `out`, its predictions and the card; returns the lines to print.

    Without `data` the test split is taken from where `find_data` looks, and left unmeasured if there is none
    or if its classes are others. `facts` go to the provenance, `overrides` to `load`. CheckpointError,
    DataError and OSError as they come; ValueError for an `out` or `card` that cannot be meant.
    """
    source, out = Path(source), Path(out)
    if out.suffix != ".safetensors":
        raise ValueError(f"{out} does not end in .safetensors")
    model, checkpoint = load(source, device=device, **overrides)
    if half:
        model.half().float()
    predictions, pictures, why_not = _predict(model, checkpoint, data, progress)
    facts = dict(facts or {})
    if checkpoint.assumed:
        facts["assumed"] = ", ".join(checkpoint.assumed)
    metrics = None
    if predictions is None:
        # another file's accuracy is not this one's, once the weights are rounded
        kept = {} if half else {name: checkpoint.provenance.get(name) for name in _MEASURED}
        measured = {name: value for name, value in kept.items() if value is not None}
        percentiles = () if half else checkpoint.top_logit_percentiles
    else:
        metrics = measure(predictions, checkpoint.class_names)
        measured = {
            "accuracy": metrics.accuracy,
            "accuracy_on": f"{pictures.name}, {len(pictures):,} pictures",
        }
        percentiles = top_logit_percentiles(predictions)
    before = {name: value for name, value in checkpoint.provenance.items() if name not in _MEASURED}
    provenance = {"date": date.today().isoformat()} | before | facts | measured
    checkpoint = replace(checkpoint, provenance=provenance, top_logit_percentiles=percentiles)
    lines = [f"Assumed, because {source.name} does not say: {facts['assumed']}"] if checkpoint.assumed else []
    checkpoint = save(model, checkpoint, out, half=half)
    lines.append(f"{out}: {out.stat().st_size:,} bytes, id {checkpoint.id}")
    shipped = shipped_path(out)
    if metrics is None:
        shipped.unlink(missing_ok=True)  # those of the file that was here before
        lines.append(f"Not measured: {why_not}")
    else:
        replace(predictions, checkpoint_id=checkpoint.id).save(shipped)
        lines.append(f"{shipped}: {shipped.stat().st_size:,} bytes")
        low, high = metrics.interval
        interval = f"95 % interval {low:.2%} to {high:.2%}"
        lines.append(f"Accuracy on {measured['accuracy_on']}: {metrics.accuracy:.2%}, {interval}")
    if card:
        text = model_card(model, checkpoint, metrics, path=out, half=half)
        write_whole(card, lambda file: file.write(text.encode()))
        lines.append(f"{card}: the model card")
    return lines


def model_card(
    model: VisualTransformer,
    checkpoint: Checkpoint,
    metrics: Metrics | None,
    *,
    path: Path,
    half: bool = False,
) -> str:
    """The card in Markdown, for the file at `path`.

    The facts `summary`, `licence` and `limits` (sentences parted by semicolons) have places of their own.
    """
    facts, a = dict(checkpoint.provenance), checkpoint.architecture
    summary, licence, limits = (facts.pop(name, None) for name in ("summary", "licence", "limits"))
    height, width = a.img_size
    lines = [f"# {checkpoint.name}", ""]
    lines += [str(summary), ""] if summary else []
    lines += ["This card was written by `python -m vit convert`, which measured the accuracy itself.", ""]
    stored = "float16 (computed in float32)" if half else "float32"
    total = sum(p.numel() for p in model.parameters())
    lines += ["## Architecture", ""]
    lines += _rows(
        {
            "kind": "Vision Transformer, pre-norm, CLS token, learned positions",
            "pictures": f"{height} x {width} px, {a.in_channels} channels",
            "patches": f"{a.patch_size} x {a.patch_size} px, {a.grid[0]} x {a.grid[1]} of them",
            "width, layers, heads": f"{a.embed_dim}, {a.num_layers}, {a.num_heads}",
            "MLP width": a.mlp_dim,
            "parameters": f"{total:,}, stored as {stored}",
            "mean, of pixels from 0 to 1": ", ".join(map(str, checkpoint.mean)),
            "standard deviation": ", ".join(map(str, checkpoint.std)),
            "classes": ", ".join(checkpoint.class_names),
            "file": f"`{checkpoint.name}`, SHA-256 begins with `{checkpoint.id}`",
        }
    )
    shown = {name.replace("_", " "): value for name, value in facts.items() if name not in _MEASURED}
    lines += ["", "## How it came about", "", *_rows(shown)]
    lines += ["", "## How good it is", "", *_accuracy(checkpoint, metrics, path)]
    lines += [
        *("", "## Limits", ""),
        f"- It knows {a.num_classes} classes and answers every picture with one of them, whatever is on it.",
        f"- It sees {width} x {height} px; finer detail is lost before it starts.",
        "- Attention says where the model reads from, not why it decides as it does.",
    ]
    lines += [f"- {limit.strip()}" for limit in str(limits).split(";")] if limits else []
    if licence:
        lines += ["", "## Licence", "", str(licence)]
    return "\n".join(lines) + "\n"


def _accuracy(checkpoint: Checkpoint, metrics: Metrics | None, path: Path) -> list[str]:
    if metrics is None:
        return ["Not measured when this card was written. `python -m vit evaluate` measures it."]
    low, high = metrics.interval
    table = ["| class | pictures | precision | recall | F1 |", "| --- | ---: | ---: | ---: | ---: |"]
    for row in metrics.classes:
        shares = " | ".join(f"{share:.2%}" for share in (row.precision, row.recall, row.f1))
        table.append(f"| {row.name} | {row.pictures:,} | {shares} |")
    made = checkpoint.class_names == PATTERN_CLASSES
    where, data = ("", "patterns") if made else (", with the test pictures in the folder `DIR`", "DIR")
    return [
        f"Accuracy on {checkpoint.provenance['accuracy_on']}: **{metrics.accuracy:.2%}**"
        f" (95 % interval {low:.2%} to {high:.2%}, Wilson; of the test pictures drawn, not of the training).",
        "",
        *table,
        *("", f"Measure it again{where}:", ""),
        *("```", f"python -m vit evaluate --checkpoint {path.as_posix()} --data {data}", "```"),
    ]


def _rows(facts: dict) -> list[str]:
    cells = ((name, str(value).replace("|", "\\|").replace("\n", " ")) for name, value in facts.items())
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in cells)]


def _predict(
    model, checkpoint: Checkpoint, data: str | Path | None, progress
) -> tuple[Predictions | None, Pictures | None, str]:
    """The predictions and the pictures; or why there are none, which is an error only if data was named."""
    if data is None and find_data() is None:
        return None, None, "no test pictures are at hand; `python -m vit data` fetches CIFAR-10"
    pictures = load_pictures(data, progress=progress)
    if data is None and pictures.class_names != checkpoint.class_names:
        return None, None, f"its classes are not those of {pictures.name}; name its data with --data"
    return predict(model, checkpoint, pictures, progress=progress), pictures, ""
