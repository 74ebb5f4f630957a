"""What `python -m vit export` does: pictures as one HTML file that needs no Python, their layers as films.

    failed = export_pictures(["cat.png", "dog.png"], model, checkpoint, Settings(), html=Path("pets.html"))

The settings say what the HTML file shows first, and what the GIF and WebP play.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vit.animation import play_through
from vit.attention import token_index, token_name
from vit.checkpoint import Checkpoint
from vit.explain_command import Settings, prediction_line, targets
from vit.explanation import Explanation, explain
from vit.export import TITLE, export_html, opens_unlit, payload_of
from vit.files import write_whole
from vit.images import PictureError, canvas, open_picture, prepare
from vit.model import VisualTransformer
from vit.overlay import DEFAULT_STYLE, Style


def export_pictures(
    pictures: Sequence[str],
    model: VisualTransformer,
    checkpoint: Checkpoint,
    settings: Settings,
    *,
    style: Style = DEFAULT_STYLE,
    title: str = TITLE,
    html: Path | None = None,
    gif: Path | None = None,
    webp: Path | None = None,
    as_json: bool = False,
) -> int:
    """Export pictures and print a line for each; returns how many could not be opened.

    `html` is one file for all, `gif` and `webp` are files for one picture and folders for several. ValueError
    for settings that the model cannot meet and for paths that would overwrite a picture, before anything is
    written.
    """
    options = settings.options(model)
    view = view_of(settings, style, model)
    if html is not None:
        _require_html(html, pictures)
    films = {"gif": targets(pictures, gif, ".gif"), "webp": targets(pictures, webp, ".webp")}
    payloads = []
    for i, name in enumerate(pictures):
        try:
            picture = open_picture(name)
        except PictureError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        x = prepare(picture, checkpoint, settings.fit).to(model.device)
        explanation = explain(model, x, **options)
        for kind, paths in films.items():
            if paths[i]:
                data = _film(picture, explanation, model, checkpoint, settings, style, kind)
                _write(paths[i], data)
        # only text from here on: a large grid's maps fill hundreds of megabytes
        payloads.append(
            payload_of(
                picture, model, checkpoint, name=Path(name).stem, title=Path(name).name, fit=settings.fit,
                fusion=settings.fusion, discard=settings.discard, view=view, explanation=explanation,
            )
        )  # fmt: skip
        if html is not None and opens_unlit(payloads[-1]):
            print(
                f"{name}: the map asked for is too large for the HTML file, which opens unlit",
                file=sys.stderr,
            )
        print(prediction_line(name, explanation.probabilities[0].tolist(), checkpoint, as_json), flush=True)
    if html is not None and payloads:
        _write(html, export_html(payloads, title).encode())
    return len(pictures) - len(payloads)


def view_of(settings: Settings, style: Style, model: VisualTransformer) -> dict[str, str]:
    """The settings as a link of the page has them. ValueError for a token that the model lacks."""
    return {
        "method": settings.method,
        "looked_at": "yes" if settings.looked_at else "no",
        "layer": "" if settings.layer is None else str(settings.layer),
        "head": "" if settings.head is None else str(settings.head),
        "token": token_name(token_index(settings.token, model.grid), model.grid),
        "draw": style.kind,
        "strength": f"{style.strength:g}",
        "smooth": "yes" if style.smooth else "no",
        "mass": "" if settings.mass is None else f"{settings.mass:g}",
        "scale": settings.scale,
    }


def _require_html(html: Path, pictures: Sequence[str]) -> None:
    if html.is_dir() or html.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{html} is no name of a file that ends in .html")
    if html.resolve() in {Path(name).resolve() for name in pictures}:
        raise ValueError(f"{html} would be overwritten, and it is one of the pictures; choose another name")


def _film(
    picture,
    explanation: Explanation,
    model: VisualTransformer,
    checkpoint: Checkpoint,
    settings: Settings,
    style: Style,
    kind: str,
) -> bytes:
    """The picture under the attention of each layer, or rollout up to it."""
    weights = settings.rows(explanation, model)[:, -1 if settings.head is None else settings.head - 1]
    return play_through(
        canvas(picture, checkpoint, settings.fit),
        settings.drawn(weights, model),
        style if settings.mass is None else replace(style, smooth=False),
        kind=kind,
        cell=settings.cell(model),
        top=settings.top(explanation, model),
    )


def _write(path: Path, data: bytes) -> None:
    write_whole(path, lambda file: file.write(data))
    print(f"{path} written, {len(data) / 1e6:.1f} MB", file=sys.stderr)
