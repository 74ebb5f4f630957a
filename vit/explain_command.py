"""What `python -m vit explain` does: explains some pictures, or thousands at a time.

    failed = explain_pictures(["cat.png"], model, checkpoint, Settings(), out=Path("cat-explained.png"))
    arrays = explain_data(model, checkpoint, load_pictures())      # CLS rows of all layers, as float16

Settings count layers, heads, rows and columns from 1, as people do; arrays count from 0.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit.attention import mass_mask, token_grid, token_index
from vit.checkpoint import Checkpoint
from vit.datasets import Pictures
from vit.evaluate import BATCH, check_match
from vit.explanation import VIEWS, Explanation, answer_token, cls_rows, drawn_weights, explain, head_rows
from vit.figure import figure, panels
from vit.files import write_whole
from vit.images import PictureError, canvas, normalise, open_picture, prepare, to_array
from vit.methods import METHODS, as_shares, relevance
from vit.model import VisualTransformer
from vit.notebook import method_caption
from vit.overlay import Style, png_bytes
from vit.words import percent, prediction, sentence


@dataclass(frozen=True)
class Settings:
    """What is asked of `explain`, in people's counting."""

    method: str = "rollout"
    layer: int | None = None  # 1 to L; None is the last
    head: int | None = None  # 1 to H; None fuses all
    token: str = "cls"  # or ROW,COLUMN
    looked_at: bool = False
    fusion: str = "mean"
    discard: float = 0.0
    residual: float = 0.5
    start_layer: int = 1
    fit: str = "crop"
    mass: float | None = None  # 0 to 1: only the fewest patches that hold this share of the weight are lit
    scale: str = "own"  # or "shared": drawn on one scale with all layers and heads, or with all methods
    target: str | None = None  # the class explained, by name or by number from 1; None is the first predicted
    versus: str | None = None  # what speaks for it rather than for this one

    def rollout_options(self, model: VisualTransformer) -> dict:
        """The keyword arguments of `cls_rows`. ValueError for a layer that the model lacks."""
        _check_count("start layer", self.start_layer, "layers", model.num_layers)
        return {
            "head_fusion": self.fusion,
            "discard_ratio": self.discard,
            "residual": self.residual,
            "start_layer": self.start_layer - 1,
        }

    @property
    def is_view(self) -> bool:
        """Whether the method has the view of every token, layer and head; others have one map."""
        return self.method in VIEWS

    def classes(self, checkpoint: Checkpoint) -> dict:
        """`target` and `versus` of `explain`. ValueError for a class that the model lacks."""
        asked = {"target": self.target, "versus": self.versus}
        return {name: class_index(value, checkpoint) for name, value in asked.items() if value is not None}

    def options(self, model: VisualTransformer) -> dict:
        """The keyword arguments of `explain`. ValueError for what the model lacks, counted from 1."""
        if not self.is_view:
            for field in fields(self):
                if field.name in _OF_VIEWS and getattr(self, field.name) != field.default:
                    flag = field.name.replace("_", "-")
                    raise ValueError(f"--{flag} is for {' and '.join(VIEWS)}, not for {self.method}")
            return {"method": self.method}
        layer = model.num_layers if self.layer is None else self.layer
        _check_count("layer", layer, "layers", model.num_layers)
        if self.head is not None:
            _check_count("head", self.head, "heads", model.num_heads)
        rollout_options = self.rollout_options(model)
        if self.method == "rollout" and self.start_layer > layer:
            raise ValueError(f"start layer {self.start_layer} lies above layer {layer}, where rollout ends")
        return rollout_options | {
            "method": self.method,
            "layer": layer - 1,
            "head": None if self.head is None else self.head - 1,
            "token": self.viewer(model),
            "looked_at": self.looked_at,
        }

    def viewer(self, model: VisualTransformer) -> int | None:
        """The token whose view it is; None for what the answer is read from, which people call CLS."""
        if self.token.strip().lower() == "cls":
            return None
        return token_index(self.token, model.grid, model.prefix_tokens)

    def rows(self, explanation: Explanation, model: VisualTransformer) -> Tensor:
        """(L, H + 1, GY, GX) of the first picture: the token's weights in every layer and head, and fused."""
        options = self.options(model)
        del options["layer"], options["head"]
        if options["token"] is None:
            options["token"] = answer_token(model)
        return token_grid(head_rows(explanation, **options)[0], model.grid, model.prefix_tokens)

    def top(self, explanation: Explanation, model: VisualTransformer) -> float | None:
        """The weight drawn at full light; None for the map's own largest."""
        if self.scale == "own" or self.mass is not None or not self.is_view:
            return None
        return self.drawn(self.rows(explanation, model), model).max().item()

    def cell(self, model: VisualTransformer) -> tuple[int, int] | None:
        """(row, column), from 0, of the patch whose view it is; None for CLS."""
        token = self.viewer(model)
        return None if token is None else divmod(token - model.prefix_tokens, model.grid[1])

    def drawn(self, weights: Tensor, model: VisualTransformer) -> np.ndarray:
        """(..., GY, GX) as they are drawn: the patch's own dimmed, or the mask that holds the mass."""
        return drawn_weights(weights, self.cell(model), self.mass)

    def sentence(self, model: VisualTransformer) -> str:
        """The settings in words, for a caption."""
        return sentence(**self.options(model) | {"token": self.token})


_OF_VIEWS = ("layer", "head", "token", "looked_at", "fusion", "discard", "residual", "start_layer")


def class_index(name: str, checkpoint: Checkpoint) -> int:
    """The class of this name, or of this number from 1. ValueError if the model knows none."""
    names = checkpoint.class_names
    if name in names:
        return names.index(name)
    if name.isascii() and name.isdigit() and 1 <= int(name[:9]) <= len(names):
        return int(name) - 1
    alike = [known for known in names if known.casefold() == name.strip().casefold()]
    if len(alike) == 1:
        return names.index(alike[0])
    near = get_close_matches(name, names, n=1)
    known = ", ".join(names) if len(names) <= 20 else f"numbers 1 to {len(names)}, or names"
    raise ValueError(
        f"the model knows no class {name!r}" + (f"; did you mean {near[0]}?" if near else f": {known}")
    )


def explain_pictures(
    pictures: Sequence[str],
    model: VisualTransformer,
    checkpoint: Checkpoint,
    settings: Settings,
    *,
    style: Style | None = None,
    out: Path | None = None,
    npz: Path | None = None,
    as_json: bool = False,
) -> int:
    """Explain pictures one by one and print one line for each; returns how many could not be opened.

    `out` and `npz` are files for one picture and folders for several. ValueError for settings that the model
    cannot meet and for paths that would overwrite a picture, before anything is written.
    """
    options = settings.options(model) | settings.classes(checkpoint)
    if settings.method == "all" and not (out or npz):
        raise ValueError(
            "--method all compares maps: name what to write with --out FILE.png or --npz FILE.npz"
        )
    png_paths, npz_paths = targets(pictures, out, ".png"), targets(pictures, npz, ".npz")
    failed = 0
    for name, png_path, npz_path in zip(pictures, png_paths, npz_paths, strict=True):
        try:
            picture = open_picture(name)
        except PictureError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed += 1
            continue
        x = prepare(picture, checkpoint, settings.fit).to(model.device)
        if settings.method == "all":
            explanation, maps = _all_methods(model, x, options)
        else:
            explanation, maps = explain(model, x, checkpoint=checkpoint, **options), {}
        if npz_path:
            names = ("attention", "rollout", "logits", "relevance")
            arrays = {array: getattr(explanation, array)[0].cpu().numpy() for array in names}
            if maps:
                arrays = maps | {"logits": arrays["logits"]}
            write_whole(npz_path, partial(np.savez, **arrays))
        if png_path:
            drawn = (picture, name, explanation, model, checkpoint, settings, style or Style())
            data = _panels_png(maps, *drawn) if maps else _png(*drawn)
            write_whole(png_path, lambda file, data=data: file.write(data))
        for written in filter(None, (npz_path, png_path)):
            print(f"{written} written", file=sys.stderr)
        print(prediction_line(name, explanation.probabilities[0].tolist(), checkpoint, as_json), flush=True)
    return failed


def explain_data(
    model: VisualTransformer,
    checkpoint: Checkpoint,
    pictures: Pictures,
    settings: Settings | None = None,
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, np.ndarray]:
    """The arrays that `--data --npz` keeps, for n pictures; CLS rows and logits of all of them:

    ids (n,) str, labels (n,), logits (n, K) float32, attention (n, L, H, N) and rollout (n, L, N) float16.
    """
    check_match(checkpoint, pictures)
    options = (settings or Settings()).rollout_options(model)
    n, L, H = len(pictures), model.num_layers, model.num_heads
    N = model.prefix_tokens + model.grid[0] * model.grid[1]
    logits = np.empty((n, len(checkpoint.class_names)), np.float32)
    attention, rollout = np.empty((n, L, H, N), np.float16), np.empty((n, L, N), np.float16)
    for start in range(0, n, BATCH):
        part = slice(start, min(start + BATCH, n))
        x = normalise(pictures.images[part], checkpoint).to(model.device)
        found = cls_rows(model, x, **options)
        for target, rows in zip((logits, attention, rollout), found, strict=True):
            target[part] = rows.to(torch.float32 if target is logits else torch.float16).cpu().numpy()
        if progress:
            progress(part.stop, n, "pictures explained")
    labels, ids = np.asarray(pictures.labels), np.asarray(pictures.ids)
    return {"ids": ids, "labels": labels, "logits": logits, "attention": attention, "rollout": rollout}


def first(pictures: Pictures, limit: int | None) -> Pictures:
    """The first `limit` pictures, or all."""
    if limit is None:
        return pictures
    arrays = {name: getattr(pictures, name)[:limit] for name in ("images", "labels", "ids")}
    return replace(pictures, **arrays)


def prediction_line(picture: str, probabilities: list[float], checkpoint: Checkpoint, as_json: bool) -> str:
    """The most probable class, for people or as one JSON object."""
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    name = checkpoint.class_names[best]
    if not as_json:
        return f"{picture}: {name}, {probabilities[best]:.1%}"
    by_class = dict(zip(checkpoint.class_names, probabilities, strict=True))
    return json.dumps(
        {"picture": picture, "class": name, "probability": probabilities[best], "probabilities": by_class}
    )


def targets(pictures: Sequence[str], out: Path | None, suffix: str) -> list[Path | None]:
    """Where each picture's file goes: `out` itself for one picture, else `<stem><suffix>` in that folder.

    ValueError if `out` cannot be that, or if a picture would be overwritten.
    """
    if out is None:
        return [None] * len(pictures)
    if len(pictures) == 1 and not out.is_dir():
        if out.suffix.lower() != suffix:
            raise ValueError(f"{out} is neither a folder nor a name that ends in {suffix}")
        paths = [out]
    else:
        if (out.exists() and not out.is_dir()) or out.suffix.lower() == suffix:
            raise ValueError(f"{out} is a file's name; several pictures need a folder's")
        paths = [out / f"{stem}{suffix}" for stem in _distinct(Path(name).stem for name in pictures)]
    sources = {Path(name).resolve() for name in pictures}
    if over := next((path for path in paths if path.resolve() in sources), None):
        raise ValueError(f"{over} would be overwritten, and it is one of the pictures; choose another name")
    return paths


def _distinct(stems: Iterator[str]) -> Iterator[str]:
    taken = set()
    for stem in stems:
        name, number = stem, 1
        while name.casefold() in taken:  # some file systems ignore case
            number += 1
            name = f"{stem}-{number}"
        taken.add(name.casefold())
        yield name


def _png(
    picture,
    name: str,
    explanation: Explanation,
    model,
    checkpoint: Checkpoint,
    settings: Settings,
    style: Style,
) -> bytes:
    probability, best = (value.item() for value in explanation.probabilities[0].max(dim=0))
    said = prediction(checkpoint.class_names[best], probability)
    source = _source(checkpoint)
    if settings.is_view:
        what, label, limits = settings.sentence(model), "share of attention", []
        what += "; the same for every class" if settings.target or settings.versus else ""
    else:
        what, label = method_caption(explanation, 0), f"{explanation.title}, own values"
        limits = [METHODS[settings.method].means, METHODS[settings.method].fails]
    weights = explanation.relevance[0]
    if settings.mass is not None:
        mask = mass_mask(weights.flatten(), settings.mass)
        held = "holds" if mask.sum() == 1 else "hold"
        what += (
            f"; the {mask.sum()} of {mask.numel()} patches that {held} {percent(settings.mass)} of the weight"
        )
        label = "1 inside, 0 outside"
    image = figure(
        canvas(picture, checkpoint, settings.fit),
        settings.drawn(weights, model),
        title=said,
        caption_lines=[f"{what}.", *limits, f"Model: {source}."],
        style=style if settings.mass is None else replace(style, smooth=False),
        top=settings.top(explanation, model),
        weights_label=label,
        original=to_array(picture),
        cell=settings.cell(model),
    )
    return _with_facts(image, said, what, name, checkpoint, settings, style)


def _all_methods(
    model: VisualTransformer, x: Tensor, options: dict
) -> tuple[Explanation, dict[str, np.ndarray]]:
    """An explanation for the answer, and the map (GY, GX) of every method that fits the model."""
    classes = {name: options[name] for name in ("target", "versus") if name in options}
    explanation, maps = explain(model, x, **classes), {}
    for method in METHODS:
        try:
            found = relevance(model, x, method, explanation.target, explanation.versus)[0]
        except ValueError as error:  # some models of others do operations that some methods have no rule for
            print(f"{METHODS[method].title} is left out: {error}", file=sys.stderr)
            continue
        maps[method] = found.unflatten(-1, model.grid).cpu().numpy()
    return explanation, maps


def _panels_png(
    maps: dict[str, np.ndarray],
    picture,
    name: str,
    explanation: Explanation,
    model,
    checkpoint: Checkpoint,
    settings: Settings,
    style: Style,
) -> bytes:
    probability, best = (value.item() for value in explanation.probabilities[0].max(dim=0))
    said = prediction(checkpoint.class_names[best], probability)
    target = checkpoint.class_names[int(explanation.target[0])]
    asked = f"for {target}"
    if explanation.versus is not None:
        asked += f" rather than {checkpoint.class_names[int(explanation.versus[0])]}"
    weights = {method: as_shares(values) for method, values in maps.items()}
    if settings.mass is not None:
        weights = {
            method: drawn_weights(torch.from_numpy(w), None, settings.mass) for method, w in weights.items()
        }
    what = f"All methods {asked}, each patch's share of the map's whole weight"
    what += ", all on one scale" if settings.scale == "shared" else ", each map on its own scale"
    shown = []
    for method, values in weights.items():
        note = asked if METHODS[method].class_specific else "the same for every class"
        shown.append((METHODS[method].title, note, values))
    image = panels(
        canvas(picture, checkpoint, settings.fit),
        shown,
        title=said,
        caption_lines=[
            f"{what}. What speaks against the class is drawn like nothing.",
            "Attention is not a full explanation, and methods differ: python -m vit score measures them.",
            f"Model: {_source(checkpoint)}.",
        ],
        style=style,
        shared_scale=settings.scale == "shared",
    )
    return _with_facts(image, said, what, name, checkpoint, settings, style)


def _source(checkpoint: Checkpoint) -> str:
    untrained = ", untrained: random weights" if checkpoint.provenance.get("untrained") else ""
    return f"{checkpoint.name}, id {checkpoint.id}{untrained}"


def _with_facts(image, said: str, what: str, name: str, checkpoint: Checkpoint, settings, style) -> bytes:
    """As PNG, with all that is needed to make it again."""
    facts = {"Software": "Patchlight", "Title": said, "Description": what, "checkpoint": _source(checkpoint)}
    facts |= {"checkpoint id": checkpoint.id, "picture": Path(name).name, "style": json.dumps(asdict(style))}
    facts |= {"settings": json.dumps(asdict(settings))}
    # a file's name need not be valid Unicode, a PNG's text must be
    return png_bytes(image, {key: value.encode(errors="replace").decode() for key, value in facts.items()})


def _check_count(what: str, value: int, plural: str, count: int) -> None:
    if not 1 <= value <= count:
        raise ValueError(f"{what} {value} does not exist: this model has {plural} 1 to {count}")
