"""What the Explore tab shows, as one value: it lives in the session, in the URL and in the Python snippet.

    view, problems = View.from_params({"picture": "sample:cat_00", "layer": "3"})
    view.to_params()            # only what differs from the default

Inside, layers, heads and tokens count from 0; in the URL, as everywhere people read, from 1.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from vit.architecture import Architecture
from vit.attention import FUSIONS, token_index
from vit.explanation import VIEWS
from vit.overlay import Style
from vit.words import sentence

FIRST_PICTURE = "sample:dog_12"
BUNDLED_MODEL = "bundled"
PATTERNS_MODEL = "patterns"
PATTERN_SAMPLES = 20  # pattern:00 to pattern:19 are the first made test pictures
PICTURE_PX = 672  # the large picture's longer side: 21 x 32, so that a small picture's pixels stay equal


@dataclass(frozen=True)
class View:
    """One state of the page.

    Pictures: sample:NAME, pattern:NN, test:ID, own:ID; models: bundled, patterns, run:PATH, own:ID.
    """

    picture: str = FIRST_PICTURE
    model: str = BUNDLED_MODEL
    method: str = "rollout"
    looked_at: bool = False
    layer: int | None = None  # None is the last
    head: int | None = None  # None is all, fused
    token: str = "cls"  # as people name it, since its index depends on the model's grid
    fusion: str = "mean"
    discard: float = 0.9  # plain rollout is nearly even; most public tools leave out as much
    draw: str = "light"
    strength: float | None = None  # None is what suits `draw`
    smooth: bool = False
    mass: float | None = None  # the smallest set of patches that holds this share; None shows all weights
    scale: str = "own"  # or "shared": one scale for all maps
    fit: str = "crop"

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> tuple["View", list[str]]:
        """The view that a link's parameters ask for, and the names of those that cannot be used."""
        known, problems = {}, []
        for name, text in params.items():
            if name not in _PARAMS:
                continue
            try:
                known[name] = _PARAMS[name].read(text)
            except ValueError:
                problems.append(name)
        return cls(**known), problems

    def with_params(self, params: Mapping[str, object], architecture: Architecture) -> "View":
        """This view with what the viewer in the browser says; the rest, and what cannot be, is as it was.

        As in `all_params`, "" and "no" are the default. Picture and model are not the viewer's to choose.
        """
        default, known = View(), {}
        for name in _VIEWER_PARAMS & params.keys():
            try:
                text = str(params[name])
                known[name] = getattr(default, name) if text in ("", "no") else _PARAMS[name].read(text)
            except ValueError:
                continue
        lacking = replace(self, **known).lacking(architecture)
        return replace(self, **{name: known[name] for name in known.keys() - lacking}).within(architecture)

    def to_params(self) -> dict[str, str]:
        """The parameters of a link to this view: what differs from the default."""
        default = View()
        return {
            name: param.write(getattr(self, name))
            for name, param in _PARAMS.items()
            if getattr(self, name) != getattr(default, name)
        }

    def all_params(self) -> dict[str, str]:
        """Every setting as text, also those that a link leaves out; empty for what is left to the model."""
        texts = {}
        for name, param in _PARAMS.items():
            value = getattr(self, name)
            texts[name] = "" if value is None else "no" if value is False else param.write(value)
        return texts

    def lacking(self, architecture: Architecture) -> list[str]:
        """The names of what this view asks for and this model does not have."""
        names = []
        if self.layer is not None and self.layer >= architecture.num_layers:
            names.append("layer")
        if self.head is not None and self.head >= architecture.num_heads:
            names.append("head")
        try:
            token_index(self.token, architecture.grid)
        except ValueError:
            names.append("token")
        return names

    def within(self, architecture: Architecture) -> "View":
        """The nearest view that this model has: another model may have fewer layers, heads or patches."""
        default = View()
        view = replace(self, **{name: getattr(default, name) for name in self.lacking(architecture)})
        # the last layer is followed from model to model
        return replace(view, layer=None) if view.layer == architecture.num_layers - 1 else view

    def explain_options(self, architecture: Architecture) -> dict:
        """The arguments of `vit.explain` for this view, by name."""
        return {
            "method": self.method,
            "token": token_index(self.token, architecture.grid),
            "layer": self.shown_layer(architecture),
            "head": self.head,
            "looked_at": self.looked_at,
            "head_fusion": self.fusion,
            "discard_ratio": self.discard,
        }

    def shown_layer(self, architecture: Architecture) -> int:
        return architecture.num_layers - 1 if self.layer is None else self.layer

    @property
    def style(self) -> Style:
        """How the relevance is drawn."""
        # a patch is in the mask or not: nothing lies between
        return Style(self.draw, strength=self.strength, smooth=self.smooth and self.mass is None)

    def sentence(self, architecture: Architecture) -> str:
        """What is drawn, in words: the picture's `alt` text and caption, here and in the export."""
        return sentence(**self.explain_options(architecture) | {"token": self.token})


def plain(text: str) -> str:
    """A stranger's text, such as a class name, for Markdown: shown as it is, never as formatting."""
    # bare addresses become links even when escaped: a space of no width parts them
    text = re.sub(r"(?i)(?<=www)(?=\.)|(?=://)|(?=@)", "\u200b", " ".join(text.split()))
    return re.sub(r"([!-+\--/:-@\[-`{-~])", r"\\\1", text)


class _Param(NamedTuple):
    read: Callable[[str], object]
    write: Callable[[object], str]


def _one_of(*allowed: str) -> _Param:
    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(text)
        return text

    return _Param(read, str)


def _matching(pattern: str) -> _Param:
    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(text)
        return text

    return _Param(read, str)


def _flag(on: str) -> _Param:
    return _Param(lambda text: _one_of(on).read(text) == on, lambda value: on)


def _share(text: str) -> float:
    if not re.fullmatch(r"0(\.[0-9]{1,20})?|1(\.0{1,20})?", text):
        raise ValueError(text)
    return round(float(text), 3)  # no more digits than `write` keeps, so that a link is stable


def _count_from_one(text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise ValueError(text)
    return int(text) - 1


_PARAMS: dict[str, _Param] = {
    "picture": _matching(r"sample:[a-z]+_[0-9]{2}|pattern:[01][0-9]|(test|own):[0-9a-f]{12}"),
    # a run's name is only ever compared with the names of the files that are there
    "model": _matching(r"bundled|patterns|own:[0-9a-f]{12}|run:.{1,300}"),
    "method": _one_of(*VIEWS),
    "looked_at": _flag("yes"),
    "layer": _Param(_count_from_one, lambda layer: str(layer + 1)),
    "head": _Param(_count_from_one, lambda head: str(head + 1)),
    "token": _matching(r"cls|[1-9][0-9]{0,3},[1-9][0-9]{0,3}"),
    "fusion": _one_of(*FUSIONS),
    "discard": _Param(_share, lambda value: f"{value:g}"),
    "draw": _one_of("light", "heat"),
    "strength": _Param(_share, lambda value: f"{value:g}"),
    "smooth": _flag("yes"),
    "mass": _Param(_share, lambda value: f"{value:g}"),
    "scale": _one_of("own", "shared"),
    "fit": _one_of("crop", "pad"),
}


_VIEWER_PARAMS = _PARAMS.keys() - {"picture", "model", "fit"}


def snippet(view: View, architecture: Architecture, checkpoint: str, data: str = "cifar10") -> str:
    """Python that draws what the page shows, run from the repository's folder.

    `checkpoint` is a file, `data` is where a picture test:ID is from, as `load_pictures` takes it.
    """
    usual = {
        "method": "rollout",
        "token": 0,
        "layer": architecture.num_layers - 1,
        "head": None,
        "looked_at": False,
        "head_fusion": "mean",
        "discard_ratio": 0,
    }
    options = view.explain_options(architecture)
    arguments = "".join(f", {name}={options[name]!r}" for name in usual if options[name] != usual[name])
    how = "" if view.fit == "crop" else f", how={view.fit!r}"
    style = f"Style({view.draw!r}, strength={view.style.strength:g}, smooth={view.style.smooth})"
    kind, _, key = view.picture.partition(":")
    file = f"assets/samples/{key}.png" if kind == "sample" else "your-picture.png"
    imports, opened = "import vit", f"picture = vit.open_picture({file!r})"
    if kind == "test":
        imports = "from PIL import Image\n\nimport vit\nfrom vit.datasets import load_pictures"
        opened = (
            f"pictures = load_pictures({'' if data == 'cifar10' else repr(data)})\n"
            f"picture = Image.fromarray(pictures.images[pictures.index_of({key!r})])"
        )
    if kind == "pattern":
        imports = "from PIL import Image\n\nimport vit"
        opened = (
            f'made = make_patterns({PATTERN_SAMPLES}, SEED, split="test")\n'
            f"picture = Image.fromarray(made.images[{int(key)}])"
        )
    masked = ""
    if view.mass is not None:
        imports = imports.replace("import vit", "import vit\nfrom vit.attention import mass_mask", 1)
        masked = f"relevance = mass_mask(relevance.flatten(), {view.mass:g}).view_as(relevance).float()\n"
    top = ""
    if view.scale == "shared" and view.mass is None:
        imports += "\nfrom vit.attention import token_grid\nfrom vit.explanation import head_rows"
        rows = "".join(
            f", {name}={options[name]!r}" for name in usual
            if name not in ("layer", "head") and (name == "method" or options[name] != usual[name])
        )  # fmt: skip
        masked = f"rows = token_grid(head_rows(explanation{rows})[0].cpu(), relevance.shape)\n"
        masked += "top = rows.max().item()\n"
        top = ", top=top"
    overlay, framing = "Style, draw, png_bytes", ""
    patterns = "\nfrom vit.patterns import SEED, make_patterns" if kind == "pattern" else ""
    if view.token != "cls":
        row, column = (int(number) - 1 for number in view.token.split(","))
        overlay = "Style, draw, outline, png_bytes"
        framing = f"lit = outline(lit, ({row}, {column}), checkpoint.architecture.grid)\n"
        if view.mass is None:  # its own weight would outshine the others
            overlay = "Style, dim_own, draw, outline, png_bytes"
            masked = masked.replace("rows.max().item()", f"dim_own(rows, ({row}, {column})).max()")
            masked += f"relevance = dim_own(relevance, ({row}, {column}))\n"
    return f"""from pathlib import Path

{imports}
from vit.images import framed, to_array
from vit.overlay import {overlay}{patterns}

model, checkpoint = vit.load({checkpoint!r})
{opened}
x = vit.prepare(picture, checkpoint{how}).to(model.device)
explanation = vit.explain(model, x{arguments})
canvas = to_array(framed(picture, checkpoint.architecture.img_size{how}))
scale = {PICTURE_PX} / max(canvas.shape[:2])
size_px = (round(canvas.shape[0] * scale), round(canvas.shape[1] * scale))
relevance = explanation.relevance[0].cpu()
{masked}lit = draw(canvas, relevance, {style}, size_px=size_px{top})
{framing}Path("lit.png").write_bytes(png_bytes(lit))
"""
