"""How an Explanation draws itself: in a notebook, as a Plotly figure, as a picture, as a file.

    explanation = vit.explain(model, x, "chefer", checkpoint=checkpoint)
    explanation                          # the last line of a notebook's cell shows all its pictures
    explanation.figure().show()          # values under the pointer
    explanation.save("cat.png")

Without a checkpoint classes are numbers, and colours are stretched between the darkest and the brightest.
"""

import base64
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vit.figure import figure as print_figure
from vit.files import write_whole
from vit.methods import METHODS
from vit.overlay import Style, draw, png_bytes
from vit.words import prediction

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from vit.explanation import Explanation

_SHOWN = 16  # pictures at most in one cell of a notebook
_THUMB_PX = 224


def pixels(explanation: "Explanation", picture: int) -> np.ndarray:
    """(height, width, 3) uint8: the picture as the model saw it, with its normalisation undone."""
    values = explanation.x[picture].double().cpu().permute(1, 2, 0).numpy()
    if explanation.checkpoint is not None:
        values = values * np.array(explanation.checkpoint.std) + np.array(explanation.checkpoint.mean)
    else:
        low, high = values.min(), values.max()
        values = (values - low) / (high - low or 1)
    rgb = values if values.shape[-1] == 3 else values.mean(axis=-1, keepdims=True).repeat(3, axis=-1)
    return np.rint(255 * rgb.clip(0, 1)).astype(np.uint8)


def class_name(explanation: "Explanation", index: int) -> str:
    checkpoint = explanation.checkpoint
    return checkpoint.class_names[index] if checkpoint else f"class {index}"


def method_caption(explanation: "Explanation", picture: int) -> str:
    """`Chefer relevance for frog rather than toad`"""
    what = explanation.title
    if METHODS[explanation.method].class_specific:
        what += f" for {class_name(explanation, int(explanation.target[picture]))}"
        if explanation.versus is not None:
            what += f" rather than {class_name(explanation, int(explanation.versus[picture]))}"
    else:
        what += ", the same for every class"
    if explanation.checkpoint is not None and explanation.checkpoint.provenance.get("untrained"):
        what += " (an untrained model)"
    return what


def caption(explanation: "Explanation", picture: int) -> str:
    """`frog, 97 %. Chefer relevance for frog rather than toad`"""
    return f"{_said(explanation, picture)}. {method_caption(explanation, picture)}"


def overlay(explanation: "Explanation", picture: int, style: Style, size_px: int) -> Image.Image:
    """One picture with its relevance, never below its own size in pixels."""
    image = pixels(explanation, picture)
    scale = max(1.0, size_px / max(image.shape[:2]))
    size = tuple(round(scale * side) for side in image.shape[:2])
    relevance = explanation.relevance[picture].cpu().numpy()
    return Image.fromarray(draw(image, relevance, style, size_px=size))


def figure(explanation: "Explanation", picture: int) -> "go.Figure":
    """The picture beside its relevance; blue is evidence against, where the method knows it."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    values = explanation.relevance[picture].double().cpu().numpy()  # (GY, GX)
    most = float(np.abs(values).max()) or 1.0
    is_signed = values.min() < 0
    drawn = make_subplots(rows=1, cols=2, horizontal_spacing=0.04)
    drawn.add_trace(go.Image(z=pixels(explanation, picture), hoverinfo="skip"), row=1, col=1)
    drawn.add_trace(
        go.Heatmap(
            z=values,
            x=np.arange(1, values.shape[1] + 1),
            y=np.arange(1, values.shape[0] + 1),
            colorscale="RdBu_r" if is_signed else "Cividis",
            zmin=-most if is_signed else 0,
            zmax=most,
            hovertemplate="row %{y}, column %{x}: %{z:.4g}<extra></extra>",
        ),
        row=1,
        col=2,
    )
    drawn.update_xaxes(visible=False, constrain="domain")
    drawn.update_yaxes(visible=False, constrain="domain")
    drawn.update_yaxes(autorange="reversed", scaleanchor="x2", row=1, col=2)
    drawn.update_layout(title=caption(explanation, picture), margin={"l": 8, "r": 8, "t": 48, "b": 8})
    return drawn


def save(explanation: "Explanation", path: Path, picture: int, style: Style) -> None:
    """As `Explanation.save`."""
    if path.suffix.lower() == ".npz":
        names = ("logits", "probabilities", "attention", "rollout", "relevance", "target")
        arrays = {name: getattr(explanation, name).cpu().numpy() for name in names}
        write_whole(path, partial(np.savez, **arrays))
        return
    if path.suffix.lower() != ".png":
        raise ValueError(f"{path} ends neither in .png nor in .npz")
    said, what = _said(explanation, picture), method_caption(explanation, picture)
    image = print_figure(
        pixels(explanation, picture),
        explanation.relevance[picture].double().cpu().numpy(),
        title=said,
        caption_lines=[f"{what}.", METHODS[explanation.method].means, METHODS[explanation.method].fails],
        style=style,
        weights_label=f"{explanation.title}, own values",
    )
    data = png_bytes(image, {"Software": "Patchlight", "Title": said, "Description": what})
    write_whole(path, lambda file: file.write(data))


def _said(explanation: "Explanation", picture: int) -> str:
    probability, best = explanation.probabilities[picture].max(dim=-1)
    return prediction(class_name(explanation, int(best)), float(probability))


def html(explanation: "Explanation") -> str:
    """All pictures of the batch, with captions."""
    B = len(explanation.relevance)
    shown = []
    for picture in range(min(B, _SHOWN)):
        said = escape(caption(explanation, picture))
        data = base64.b64encode(png_bytes(overlay(explanation, picture, Style(), _THUMB_PX))).decode()
        shown.append(
            f'<figure style="display:inline-block;margin:4px;width:{_THUMB_PX}px">'
            f'<img style="width:100%" alt="{said}" src="data:image/png;base64,{data}">'
            f"<figcaption>{said}</figcaption></figure>"
        )
    rest = f"<p>and {B - _SHOWN:,} more</p>" if B > _SHOWN else ""
    method = METHODS[explanation.method]
    return f"<div>{''.join(shown)}{rest}<p>{escape(method.means)} {escape(method.fails)}</p></div>"
