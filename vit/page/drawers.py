"""What is not needed at first sight: methods compared, all heads, downloads, code, the model's facts."""

import io
import json

import numpy as np
import streamlit as st

from vit.page.compare import compare_drawer
from vit.page.explained import Explained
from vit.page.heads import heads_drawer
from vit.page.view import plain, snippet


@st.fragment
def drawers(explained: Explained) -> None:
    """The drawers, closed. What is in them is made when they open: it would delay the first picture."""
    take_away = st.expander(
        "Download, link, code", icon=":material/download:", key="drawer_take_away", on_change="rerun"
    )
    if take_away.open:
        with take_away:
            _take_away(explained)
    compare = st.expander(
        "Compare methods", icon=":material/compare:", key="drawer_compare", on_change="rerun"
    )
    if compare.open:
        with compare:
            compare_drawer(explained)
    heads = st.expander(
        "All heads over many pictures", icon=":material/scatter_plot:", key="drawer_heads", on_change="rerun"
    )
    if heads.open:
        with heads:
            heads_drawer(explained)
    about = st.expander("About this model", icon=":material/info:", key="drawer_about", on_change="rerun")
    if about.open:
        with about:
            about_model(explained.loaded.checkpoint)


def _take_away(explained: Explained) -> None:
    name = explained.view.picture.replace(":", "-")
    with st.container(horizontal=True):
        st.download_button(
            "Picture (PNG)",
            explained.print_png,
            f"{name}.png",
            "image/png",
            on_click="ignore",
            icon=":material/image:",
            help="Print size, with a colour bar, and the settings inside the file.",
        )
        if explained.architecture.num_layers > 1:
            st.download_button(
                "Layers as a film (GIF)",
                lambda: explained.film("gif"),
                f"{name}.gif",
                "image/gif",
                on_click="ignore",
                icon=":material/animation:",
                help="One frame for each layer. As WebP: python -m vit export PICTURE --webp FILE.",
            )
        st.download_button(
            "This viewer (HTML)",
            explained.page,
            f"{name}.html",
            "text/html",
            on_click="ignore",
            icon=":material/html:",
            help="One file with the picture, all its maps and the viewer: for a blog, a class, a friend.",
        )
        st.download_button(
            "Numbers (NPZ)",
            lambda: _npz(explained),
            f"{name}.npz",
            "application/octet-stream",
            on_click="ignore",
            icon=":material/table:",
            help="attention (L, H, N, N), rollout (L, N, N), logits (K), relevance (GY, GX).",
        )
    st.markdown("The address of this page is a link to this view." + _link_limits(explained))
    st.markdown("The same picture in Python:")
    loaded = explained.loaded
    checkpoint = f"assets/weights/{loaded.path.name}"
    if explained.view.model.startswith("run:"):
        checkpoint = loaded.path.as_posix()
    elif explained.view.model.startswith("own:"):
        checkpoint = "yours.safetensors"
    st.code(snippet(explained.view, explained.architecture, checkpoint, loaded.data), language="python")


def _link_limits(explained: Explained) -> str:
    own = [
        what
        for what, name in (("picture", explained.view.picture), ("checkpoint", explained.view.model))
        if name.startswith("own:")
    ]
    return f" Your own {' and '.join(own)} cannot be in it." if own else ""


def _npz(explained: Explained) -> bytes:
    file = io.BytesIO()
    found = explained.explanation
    np.savez_compressed(
        file,
        attention=found.attention[0].cpu().numpy(),
        rollout=found.rollout[0].cpu().numpy(),
        logits=found.logits[0].cpu().numpy(),
        relevance=explained.relevance_map,
        facts=np.array(json.dumps(explained.facts)),
    )
    return file.getvalue()


def about_model(checkpoint) -> None:
    """Architecture, what the file tells of its training, and what it does not tell."""
    architecture = checkpoint.architecture
    height, width = architecture.img_size
    rows = {
        "pictures": f"{width} × {height} pixels, {architecture.grid[0] * architecture.grid[1]} patches of "
        f"{architecture.patch_size} × {architecture.patch_size}",
        "layers and heads": f"{architecture.num_layers} × {architecture.num_heads}",
        "width, MLP": f"{architecture.embed_dim}, {architecture.mlp_dim}",
        "classes": ", ".join(checkpoint.class_names),
        **{name.replace("_", " "): str(value) for name, value in checkpoint.provenance.items()},
        "file": f"{checkpoint.name}, id {checkpoint.id}",
    }
    # two sentences of a fact are parted by a semicolon (vit/convert.py)
    lines = [f"- **{plain(name)}**: {plain(value.replace('.;', '. '))}" for name, value in rows.items()]
    st.markdown("\n".join(lines))
    if checkpoint.assumed:
        st.caption(f"Not in the file, so assumed as in the tutorial: {plain(', '.join(checkpoint.assumed))}.")
