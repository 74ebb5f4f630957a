"""What the Explore tab shows, as one value: it lives in the session, in the URL and in the Python snippet.

    view, problems = View.from_params({"picture": "sample:cat_00", "layer": "3"})
    view.to_params()            # only what differs from the default

Inside, layers, heads and tokens count from 0; in the URL, as everywhere people read, from 1.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from vit.attention import FUSIONS, token_index
from vit.explanation import METHODS
from vit.overlay import Style
from vit.state_dict import Architecture

FIRST_PICTURE = "sample:frog_07"
BUNDLED_MODEL = "bundled"
PICTURE_PX = 672  # the large picture's longer side: 21 x 32, so that a small picture's pixels stay equal


@dataclass(frozen=True)
class View:
    """One state of the page. Pictures: sample:NAME, test:ID, own:ID; models: bundled, run:PATH, own:ID."""

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

    def to_params(self) -> dict[str, str]:
        """The parameters of a link to this view: what differs from the default."""
        default = View()
        return {
            name: param.write(getattr(self, name))
            for name, param in _PARAMS.items()
            if getattr(self, name) != getattr(default, name)
        }

    def within(self, architecture: Architecture) -> "View":
        """The nearest view that this model has: another model may have fewer layers, heads or patches."""
        layer, head, token = self.layer, self.head, self.token
        if layer is not None and layer >= architecture.num_layers - 1:
            layer = None
        if head is not None and head >= architecture.num_heads:
            head = None
        try:
            token_index(token, architecture.grid)
        except ValueError:
            token = "cls"
        return replace(self, layer=layer, head=head, token=token)

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
        """How the relevance is drawn. Heat hides the picture if it is as strong as light."""
        strength = {"light": 0.85, "heat": 0.6}[self.draw] if self.strength is None else self.strength
        return Style(self.draw, strength=strength, smooth=self.smooth)

    def sentence(self, architecture: Architecture) -> str:
        """What is drawn, in words: the picture's `alt` text and the export's title."""
        token = token_label(self.token)
        direction = f"Who looks at {token}" if self.looked_at else f"Where {token} looks"
        layer = self.shown_layer(architecture) + 1
        where = (
            f"rollout of layers 1 to {layer}" if self.method == "rollout" else f"attention of layer {layer}"
        )
        heads = f"{self.fusion} of all heads" if self.head is None else f"head {self.head + 1}"
        cut = (
            f", weakest {percent(self.discard)} left out" if self.method == "rollout" and self.discard else ""
        )
        return f"{direction}: {where}, {heads}{cut}"


def token_label(token: str) -> str:
    """`CLS` or `row 3, column 5`, from a token's name."""
    return "CLS" if token == "cls" else "row {}, column {}".format(*token.split(","))


def plain(text: str) -> str:
    """A stranger's text, such as a class name, for Markdown: shown as it is, never as formatting."""
    return re.sub(r"([!-+\--/:-@\[-`{-~])", r"\\\1", " ".join(text.split()))


def percent(share: float) -> str:
    """`91 %`, and one digit more where that says more: `4.2 %`."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


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
    "picture": _matching(r"sample:[a-z]+_[0-9]{2}|(test|own):[0-9a-f]{12}"),
    # a path below the runs folder, never out of it, and of letters that mean nothing in markdown links
    "model": _matching(
        r"bundled|own:[0-9a-f]{12}|run:(?!.*\.\.)[\w][\w .,+=@()\-]{0,99}(/[\w][\w .,+=@()\-]{0,99})?"
    ),
    "method": _one_of(*METHODS),
    "looked_at": _flag("yes"),
    "layer": _Param(_count_from_one, lambda layer: str(layer + 1)),
    "head": _Param(_count_from_one, lambda head: str(head + 1)),
    "token": _matching(r"cls|[1-9][0-9]{0,3},[1-9][0-9]{0,3}"),
    "fusion": _one_of(*FUSIONS),
    "discard": _Param(_share, lambda value: f"{value:g}"),
    "draw": _one_of("light", "heat"),
    "strength": _Param(_share, lambda value: f"{value:g}"),
    "smooth": _flag("yes"),
    "fit": _one_of("crop", "pad"),
}


def snippet(view: View, architecture: Architecture, checkpoint: str) -> str:
    """Python that draws what the page shows, run from the repository's folder; `checkpoint` is a file."""
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
    style = f"Style({view.draw!r}, strength={view.style.strength:g}, smooth={view.smooth})"
    kind, _, key = view.picture.partition(":")
    file = f"assets/samples/{key}.png" if kind == "sample" else "your-picture.png"
    imports, opened = "import vit", f"picture = vit.open_picture({file!r})"
    if kind == "test":
        imports = "from PIL import Image\n\nimport vit\nfrom vit.datasets import load_pictures"
        opened = (
            f"pictures = load_pictures()\n"
            f"picture = Image.fromarray(pictures.images[pictures.index_of({key!r})])"
        )
    overlay, framing = "Style, draw, png_bytes", ""
    if view.token != "cls":
        row, column = (int(number) - 1 for number in view.token.split(","))
        overlay = "Style, draw, outline, png_bytes"
        framing = f"lit = outline(lit, ({row}, {column}), checkpoint.architecture.grid)\n"
    return f"""from pathlib import Path

{imports}
from vit.images import framed, to_array
from vit.overlay import {overlay}

model, checkpoint = vit.load({checkpoint!r})
{opened}
x = vit.prepare(picture, checkpoint{how}).to(next(model.parameters()).device)
explanation = vit.explain(model, x{arguments})
canvas = to_array(framed(picture, checkpoint.architecture.img_size{how}))
scale = {PICTURE_PX} / max(canvas.shape[:2])
size_px = (round(canvas.shape[0] * scale), round(canvas.shape[1] * scale))
lit = draw(canvas, explanation.relevance[0].cpu(), {style}, size_px=size_px)
{framing}Path("lit.png").write_bytes(png_bytes(lit))
"""
