"""What `python -m vit probe` does: changes the model or the picture, and says what that does to the answer.

    found = probe("cat.png", model, checkpoint, Probe(heads_off=((3, 1),), leave_one_out=True))
    print("\\n".join(probe_lines(found)))          # or json.dumps(found)

A Probe counts layers, heads, rows and columns from 1, as people do, and so does what is found. Probabilities
are shares from 0 to 1, drops and effects their differences; text gives them in percent and points.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from vit.attention import token_index, token_name
from vit.cause import Change, answer, cover_most, head_effects, leave_one_out, rank_correlation
from vit.checkpoint import Checkpoint
from vit.explanation import explain, require_finite
from vit.images import open_picture, prepare
from vit.model import VisualTransformer

DISCARD = 0.9  # of the rollout that says which patches the model looks at most


@dataclass(frozen=True)
class Probe:
    """What is asked of `probe`, in people's counting."""

    heads_off: Sequence[tuple[int, int]] = ()  # (layer, head)
    layer_off: Sequence[int] = ()  # all heads of these layers
    only_head: tuple[int, int] | None = None  # every other head of the model is off
    cover: Sequence[str] = ()  # ROW,COLUMN
    fill: str = "removed"
    cover_most: int | None = None
    leave_one_out: bool = False
    head_effects: bool = False
    layers: bool = False
    fit: str = "crop"

    def change(self, model: VisualTransformer) -> Change:
        """The change asked for, counted from 0. ValueError for what the model lacks, counted from 1."""
        L, H = model.num_layers, model.num_heads
        heads = [*self.heads_off, *([self.only_head] if self.only_head else [])]
        heads += [(layer, 1) for layer in self.layer_off]
        for layer, head in heads:
            if not (1 <= layer <= L and 1 <= head <= H):
                raise ValueError(
                    f"head {head} of layer {layer} does not exist: this model has layers 1 to {L} "
                    f"with heads 1 to {H}"
                )
        every = {(layer, head) for layer in range(1, L + 1) for head in range(1, H + 1)}
        off = set(self.heads_off) | {(layer, head) for layer, head in every if layer in self.layer_off}
        if self.only_head:
            off |= every - {self.only_head}
        patches = [token_index(name, model.grid) - 1 for name in self.cover]
        if -1 in patches:
            raise ValueError("CLS is no patch of the picture, so it cannot be covered; name a ROW,COLUMN")
        change = Change(
            frozenset((layer - 1, head - 1) for layer, head in off), frozenset(patches), self.fill
        )
        change.check(model)
        return change


def probe(name: str, model: VisualTransformer, checkpoint: Checkpoint, asked: Probe) -> dict:
    """Everything asked, made of JSON's types. PictureError for the picture, ValueError for the rest.

    picture, class, probability, probabilities    the untouched answer, by class name
    changed      the same under the change, with `heads_off` and `heads_on` as L.H, `covered` as ROW,COLUMN,
                 and the `fill`
    layers       probabilities by class after each layer, untouched
    cover_most   see `vit.cause.Covered`; the patches as ROW,COLUMN
    leave_one_out, head_effects    what the class loses without each patch (GY, GX), each head (L, H)

    What was not asked is missing.
    """
    change = asked.change(model)
    P = model.grid[0] * model.grid[1]
    if asked.cover_most is not None and asked.cover_most > P:
        raise ValueError(f"{asked.cover_most} patches cannot be covered: this model has {P}")
    x = prepare(open_picture(name), checkpoint, asked.fit).to(model.device)
    untouched = answer(model, x, Change())
    require_finite(untouched)
    target = int(untouched[-1].argmax())
    found = {"picture": name} | _said(untouched[-1], checkpoint)
    if change != Change(fill=asked.fill):
        changed = answer(model, x, change)
        heads = {
            f"{layer + 1}.{head + 1}": (layer, head) in change.heads_off
            for layer in range(model.num_layers)
            for head in range(model.num_heads)
        }
        found["changed"] = _said(changed[-1], checkpoint) | {
            "heads_off": [name for name, is_off in heads.items() if is_off],
            "heads_on": [name for name, is_off in heads.items() if not is_off],
            "covered": [token_name(1 + patch, model.grid) for patch in sorted(change.covered)],
            "fill": change.fill,
        }
    if asked.layers:
        found["layers"] = [_by_class(row, checkpoint) for row in untouched]
        if "changed" in found:
            found["changed"]["layers"] = [_by_class(row, checkpoint) for row in changed]
    if asked.cover_most is not None or asked.leave_one_out:
        weights = explain(model, x, discard_ratio=DISCARD).relevance[0].flatten().cpu()
    if asked.cover_most is not None:
        covered = cover_most(model, x, weights, asked.cover_most, asked.fill)
        patches = [token_name(1 + patch, model.grid) for patch in covered.patches]
        found["cover_most"] = asdict(covered) | {
            "target": checkpoint.class_names[covered.target], "patches": patches, "fill": asked.fill
        }  # fmt: skip
    if asked.leave_one_out:
        drops = leave_one_out(model, x, target).cpu()
        found["leave_one_out"] = drops.view(model.grid).tolist()
        found["rank_correlation_with_rollout"] = rank_correlation(drops, weights)
    if asked.head_effects:
        found["head_effects"] = head_effects(model, x, target).tolist()
    return found


def probe_lines(found: dict) -> list[str]:
    """What was found, for people."""
    name = found["class"]
    lines = [f"{found['picture']}: {name}, {found['probability']:.1%}"]
    if changed := found.get("changed"):
        lines += _changed_lines(found, changed)
    if "layers" in found:
        lines += _layer_lines(found, changed)
    if covered := found.get("cover_most"):
        draws = covered["random"]
        lines += [
            "",
            f"{name} with {len(covered['patches'])} patches {_how(covered['fill'])}",
            f"{'none of them':<30}{covered['untouched']:>6.1%}",
            f"{'those that CLS looks at most':<30}{covered['most']:>6.1%}",
            f"{f'at random, mean of {len(draws)} draws':<30}{sum(draws) / len(draws):>6.1%}"
            f"   ({min(draws):.1%} to {max(draws):.1%})",
        ]
    if "leave_one_out" in found:
        lines += ["", f"What {name} loses without each patch, in points (rows down, columns across)"]
        lines += _table(found["leave_one_out"], "")
        agreement = found["rank_correlation_with_rollout"]
        lines.append(f"rank correlation with rollout, where CLS looks: {agreement:.2f}")
    if "head_effects" in found:
        lines += ["", f"What {name} loses without each head, in points (layers down, heads across)"]
        lines += _table(found["head_effects"], "layer ")
    return lines


def _changed_lines(found: dict, changed: dict) -> list[str]:
    what = []
    off, on = changed["heads_off"], changed["heads_on"]
    if off:
        all_but = f"all but {', '.join(on)}" if on else "all"
        what.append(f"heads off: {all_but if len(on) < len(off) else ', '.join(off)}")
    if changed["covered"]:
        what.append(f"patches {_how(changed['fill'])}: {'; '.join(changed['covered'])}")
    lines = [f"changed: {changed['class']}, {changed['probability']:.1%}", *(f"  {line}" for line in what)]
    before, after = found["probabilities"], changed["probabilities"]
    width = max(len(name) for name in ("class", *before))
    lines += ["", f"{'class':<{width}}  untouched  changed"]
    for name in sorted(before, key=before.__getitem__, reverse=True):
        lines.append(f"{name:<{width}}  {before[name]:>9.1%}  {after[name]:>7.1%}")
    return lines


def _layer_lines(found: dict, changed: dict | None) -> list[str]:
    columns = {"untouched": found["layers"]} | ({"changed": changed["layers"]} if changed else {})
    width = max(len(name) for name in (*found["probabilities"], "untouched")) + 9
    lines = ["", "Most probable after each layer"]
    lines.append(("layer  " + "  ".join(f"{title:<{width}}" for title in columns)).rstrip())
    for depth in range(len(found["layers"])):
        cells = []
        for layers in columns.values():
            best = max(layers[depth], key=layers[depth].__getitem__)
            cells.append(f"{f'{best}, {layers[depth][best]:.1%}':<{width}}")
        lines.append(f"{depth + 1:>5}  {'  '.join(cells)}".rstrip())
    return lines


def _table(rows: list[list[float]], label: str) -> list[str]:
    """Shares as points with one digit, under columns and beside rows that count from 1."""
    # + 0 makes 0.0 of -0.0
    cells = [[f"{round(100 * value, 1) + 0:+.1f}" for value in row] for row in rows]
    column = max(len(cell) for row in cells for cell in row) + 2
    first = len(f"{label}{len(rows)}")
    lines = [" " * first + "".join(f"{k + 1:>{column}}" for k in range(len(rows[0])))]
    return lines + [
        f"{f'{label}{i + 1}':>{first}}" + "".join(f"{cell:>{column}}" for cell in row)
        for i, row in enumerate(cells)
    ]


def _how(fill: str) -> str:
    return {"removed": "removed", "mean": "filled with the mean colour", "blur": "blurred"}[fill]


def _said(probabilities: torch.Tensor, checkpoint: Checkpoint) -> dict:
    by_class = _by_class(probabilities, checkpoint)
    best = max(by_class, key=by_class.__getitem__)
    return {"class": best, "probability": by_class[best], "probabilities": by_class}


def _by_class(probabilities: torch.Tensor, checkpoint: Checkpoint) -> dict[str, float]:
    return dict(zip(checkpoint.class_names, probabilities.tolist(), strict=True))
