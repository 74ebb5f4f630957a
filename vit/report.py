"""What `evaluate` and `info` find, as plain text for people and as values for JSON.

print(evaluation_text(metrics, checkpoint, pictures.name, mistake_values(predictions, 5, checkpoint)))
print(info_text(describe_model(model, checkpoint)))
"""

from dataclasses import asdict

import torch

from vit.anatomy import stages
from vit.checkpoint import Checkpoint
from vit.evaluate import Metrics, Predictions, confident_mistakes
from vit.model import VisualTransformer


def mistake_values(predictions: Predictions, n: int, checkpoint: Checkpoint) -> list[dict]:
    """The n most confident mistakes, the most confident first. Pictures count from 1, as on the page."""
    names = checkpoint.class_names
    return [
        {
            "number": row + 1,
            "id": str(predictions.ids[row]),
            "class": names[predictions.labels[row]],
            "predicted": names[predictions.classes[row]],
            "probability": float(predictions.probabilities[row]),
        }
        for row in confident_mistakes(predictions, n).tolist()
    ]


def evaluation_values(
    metrics: Metrics, checkpoint: Checkpoint, data: str, mistakes: list[dict] | None = None
) -> dict:
    """Everything measured; shares from 0 to 1. `mistakes` as from `mistake_values`."""
    names = {"checkpoint": checkpoint.name, "checkpoint_id": checkpoint.id, "data": data}
    return names | asdict(metrics) | {"mistakes": mistakes or []}


def evaluation_text(
    metrics: Metrics, checkpoint: Checkpoint, data: str, mistakes: list[dict] | None = None
) -> str:
    """The same for people; without a list of mistakes if there are none to list."""
    low, high = metrics.interval
    width = max(len(name) for name in ("class", *checkpoint.class_names))
    lines = [
        f"{checkpoint.name} ({checkpoint.id}) on {metrics.pictures:,} pictures of {data}",
        *(["each picture seen twice, as it is and mirrored, the logits averaged"] if metrics.flip else []),
        f"accuracy {metrics.accuracy:.2%}, 95 % interval {low:.2%} to {high:.2%}",
        f"calibration error {metrics.calibration_error:.2%}, the mean distance of confidence from accuracy",
        "",
        f"{'class':<{width}}  pictures  precision  recall     F1",
    ]
    for row in metrics.classes:
        figures = f"{row.precision:>9.2%}  {row.recall:>6.2%}  {row.f1:>6.2%}"
        lines.append(f"{row.name:<{width}}  {row.pictures:>8,}  {figures}")
    columns = [
        len(str(max(k + 1, *(row[k] for row in metrics.confusion)))) for k in range(len(metrics.classes))
    ]
    header = "  ".join(f"{k + 1:>{column}}" for k, column in enumerate(columns))
    lines += ["", "Who is taken for whom: a row for each true class, a column for each predicted one"]
    lines.append(f"{'':<{width + 4}}  {header}")
    for k, row in enumerate(metrics.confusion):
        cells = "  ".join(f"{count:>{column}}" for count, column in zip(row, columns, strict=True))
        lines.append(f"{k + 1:>3} {checkpoint.class_names[k]:<{width}}  {cells}")
    return "\n".join([*lines, *_reliability_lines(metrics), *_mistake_lines(mistakes or [])])


def _reliability_lines(metrics: Metrics) -> list[str]:
    lines = ["", "How sure it is of what it says, and how often it is right then"]
    lines.append("probability        pictures  confidence  accuracy")
    for row in metrics.reliability:
        ends = f"{row.low:>6.2%} to {row.high:>7.2%}"
        lines.append(f"{ends}  {row.pictures:>8,}  {row.confidence:>10.2%}  {row.accuracy:>8.2%}")
    return lines


def _mistake_lines(mistakes: list[dict]) -> list[str]:
    if not mistakes:
        return []
    rows = [("number", "id", "class", "predicted", "probability")]
    for row in mistakes:
        shown = (f"{row['number']:,}", row["id"], row["class"], row["predicted"])
        rows.append((*shown, f"{row['probability']:.2%}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["", "Most confident mistakes; pictures are numbered from 1, as on the page"]
    for number, *names, probability in rows:
        cells = [f"{name:<{width}}" for name, width in zip(names, widths[1:4], strict=True)]
        lines.append("  ".join([f"{number:>{widths[0]}}", *cells, f"{probability:>{widths[4]}}"]))
    return lines


def describe_model(model: VisualTransformer, checkpoint: Checkpoint) -> dict:
    """Architecture, the stages and shapes of a real pass, parameters by part, provenance.

    Of a model of others, whose parts have other names, the stages and parts are left empty.
    """
    parameters = list(model.parameters())
    device, sizes = model.device, checkpoint.architecture
    x = torch.zeros(1, sizes.in_channels, *sizes.img_size, device=device)
    with torch.no_grad():
        trace = model.trace(x)
    first = trace.layers[0]
    shapes = {
        "picture (B, C, height, width)": x,
        "patches, projected (B, P, D)": trace.embedded[:, model.prefix_tokens :],
        "tokens, CLS in front (B, N, D)": trace.embedded,
        "queries of a layer, keys and values alike (B, H, N, D/H)": first.q,
        "attention map of a layer (B, H, N, N)": first.map,
        "attention maps of all layers (B, L, H, N, N)": trace.maps,
        "tokens after a layer (B, N, D)": first.tokens,
        "logits (B, K)": trace.logits,
    }
    is_ours = isinstance(model, VisualTransformer)
    parts = _parts(model) if is_ours else {}
    return {
        "checkpoint": checkpoint.name,
        "checkpoint_id": checkpoint.id,
        "architecture": asdict(checkpoint.architecture),
        "class_names": list(checkpoint.class_names),
        "mean": list(checkpoint.mean),
        "std": list(checkpoint.std),
        "shapes": {name: list(tensor.shape) for name, tensor in shapes.items()},
        "stages": [asdict(stage) for stage in stages(model)] if is_ours else [],
        "parameters": sum(p.numel() for p in parameters),
        "trained_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "parts": {name.strip(): _count(part) for name, part in parts.items()},
        "device": str(device),
        "provenance": dict(checkpoint.provenance),
        "assumed": list(checkpoint.assumed),
    }


def _parts(model: VisualTransformer) -> dict[str, torch.nn.Module | torch.Tensor]:
    block = model.encoder_blocks[0]
    return {
        "patch embedding": model.patch_embed,
        "CLS token": model.cls_token,
        "position embedding": model.pos_embed,
        f"encoder blocks, {model.num_layers} in all": model.encoder_blocks,
        "  attention of each": block.attn,
        "  MLP of each": block.mlp,
        "  two norms of each": torch.nn.ModuleList([block.norm1, block.norm2]),
        "final norm": model.norm,
        "head": model.mlp_head,
    }


def info_text(values: dict) -> str:
    lines = [f"{values['checkpoint']} ({values['checkpoint_id']}) on {values['device']}", ""]
    lines += _table("Architecture", {name: _plain(value) for name, value in values["architecture"].items()})
    lines += _table("Classes", dict(enumerate(values["class_names"], start=1)))
    normalisation = {name: _plain(values[name]) for name in ("mean", "std")}
    lines += _table("Normalisation, per channel", normalisation)
    shapes = {name: " x ".join(map(str, shape)) for name, shape in values["shapes"].items()}
    lines += _table("One pass, one picture", shapes)
    if values["stages"]:
        lines += _table("Stages, and the parameters of each", _stage_rows(values["stages"]))
        lines += _table("Parameters by part", {name: f"{count:,}" for name, count in values["parts"].items()})
    lines += [f"Total parameters: {values['parameters']:,}"]
    lines += [f"Trained parameters: {values['trained_parameters']:,}", ""]
    # two sentences of a fact are parted by a semicolon (vit/convert.py)
    told = {name: str(value).replace(".;", ". ") for name, value in values["provenance"].items()}
    provenance = told or {"unknown": "the file says nothing of how it came about"}
    lines += _table("Provenance", provenance)
    if values["assumed"]:
        lines += [f"Assumed, because the file does not say: {', '.join(values['assumed'])}"]
    return "\n".join(lines).rstrip()


def _stage_rows(stages: list[dict]) -> dict[str, str]:
    """One row a stage, and one for each part of it."""
    steps = {}
    for stage in stages:
        steps[stage["name"]] = stage
        steps |= {f"  {stage['name']}, {part['name']}": part for part in stage["parts"]}
    shapes = {name: f"{step['shape_in']} -> {step['shape_out']}" for name, step in steps.items()}
    width = max(map(len, shapes.values()))
    return {name: f"{shapes[name]:<{width}}  {step['parameters']:>11,}" for name, step in steps.items()}


def _table(title: str, rows: dict) -> list[str]:
    width = max(len(str(name)) for name in rows)
    return [title, *(f"  {name!s:<{width}}  {value}" for name, value in rows.items()), ""]


def _plain(value) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _count(part: torch.nn.Module | torch.Tensor) -> int:
    return part.numel() if isinstance(part, torch.Tensor) else sum(p.numel() for p in part.parameters())
