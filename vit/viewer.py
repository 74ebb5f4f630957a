"""The viewer that runs in the browser: assets/viewer/, joined into one html, one css and one js text.

    viewer.html(), viewer.css(), viewer.js()   # js() is one ES module: export default function ({data, ...})
    viewer.script("paint"), viewer.style("viewer")     # one part, for another component to join

There is no build step: files are joined in the order below. An inline module cannot import another.
"""

from pathlib import Path

_ASSETS = Path(__file__).parents[1] / "assets" / "viewer"
_SCRIPTS = (
    "numbers", "maps", "paint", "controls", "cells", "picture", "thumbnails", "scrubber", "answer", "drawing",
    "cause", "anatomy", "arithmetic", "save", "tour", "requests", "main",
)  # fmt: skip
_STYLES = ("viewer", "anatomy")


def html() -> str:
    """The places that the parts fill."""
    return _read("viewer.html")


def css() -> str:
    """Light and dark follow Streamlit's variables, --st-text-color and the like."""
    return "\n".join(style(name) for name in _STYLES)


def js() -> str:
    """One module, whose default export draws `data` (as of `vit.payload`) into `parentElement`."""
    return "\n".join(script(name) for name in _SCRIPTS)


def script(name: str) -> str:
    """One of the scripts, which uses those before it: paint, cells ..."""
    return _read(f"{name}.js")


def style(name: str) -> str:
    """One of the styles: viewer or anatomy."""
    return _read(f"{name}.css")


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
