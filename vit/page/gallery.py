"""Choosing a picture: bundled samples, the whole test set, or one of the visitor's own."""

import base64
import io
from pathlib import Path

import numpy as np
import streamlit as st
from PIL import Image

from vit.datasets import DataError, Pictures
from vit.images import MAX_BYTES, PictureError
from vit.page import background
from vit.page.models import Loaded
from vit.page.pictures import SAMPLES, keep_own, sample_names, test_pictures
from vit.page.view import View

_ASSETS = Path(__file__).parents[2] / "assets" / "gallery"
_PAGE = 20  # pictures shown at once

_grid = st.components.v2.component(
    "patchlight_gallery",
    html='<div class="gallery" role="group"></div>',
    css=(_ASSETS / "gallery.css").read_text(encoding="utf-8"),
    js=(_ASSETS / "gallery.js").read_text(encoding="utf-8"),
)


def choose_picture(view: View, loaded: Loaded) -> str | None:
    """Draw the gallery; returns the name of a picture that was chosen just now, or None."""
    place = st.segmented_control(
        "Pictures",
        ["Samples", "Test set", "Yours"],
        default="Samples",
        required=True,
        key="gallery_place",
        persist_state="session",
        width="stretch",
    )
    if place == "Test set":
        return _from_test_set(view, loaded)
    if place == "Yours":
        return _from_visitor()
    return _pick("samples", "Sample pictures", view.picture, _sample_items())


def _pick(key: str, label: str, chosen: str, items: list[dict]) -> str | None:
    result = _grid(
        key=f"gallery_{key}",
        data={"label": label, "chosen": chosen, "items": items},
        on_picked_change=lambda: None,
    )
    offered = {item["id"] for item in items}
    return result.picked if result.picked in offered else None


@st.cache_data(show_spinner=False)
def _sample_items() -> list[dict]:
    return [
        {
            "id": f"sample:{name}",
            "label": name.partition("_")[0],
            "src": _data_uri((SAMPLES / f"{name}.png").read_bytes()),
        }
        for name in sample_names()
    ]


def _from_test_set(view: View, loaded: Loaded) -> str | None:
    try:
        pictures = test_pictures()
    except DataError as error:
        st.error(f"{error} The samples and your own pictures still work.", icon=":material/error:")
        return None
    if pictures is None:
        _how_to_get_the_data()
        return None
    kind = st.selectbox(
        "Class", ["all classes", *pictures.class_names], key="gallery_class", persist_state="session"
    )
    rows = np.arange(len(pictures))
    if kind != "all classes":
        rows = rows[pictures.labels == pictures.class_names.index(kind)]
    if st.toggle("Only mistakes", key="gallery_mistakes", persist_state="session"):
        predictions = background.predictions_of(loaded, pictures)
        if predictions is None:
            _compute_predictions(loaded, pictures)
            return None
        rows = rows[predictions.classes[rows] != predictions.labels[rows]]
    if not len(rows):
        st.caption("This model makes no mistakes here. Choose another class.")
        return None
    first, surprise = st.columns([3, 2], vertical_alignment="bottom")
    start = first.number_input(
        f"From number (of {len(rows):,})",
        1,
        len(rows),
        step=_PAGE,
        key=f"gallery_from_{len(rows)}",
        persist_state="session",
    )
    surprised = surprise.button("Surprise me", width="stretch")
    shown = rows[start - 1 : start - 1 + _PAGE]
    picked = _pick("test", f"{pictures.name} pictures", view.picture, _test_items(pictures, shown))
    if surprised:
        return f"test:{pictures.ids[np.random.default_rng().choice(rows)]}"
    return picked


def _test_items(pictures: Pictures, rows: np.ndarray) -> list[dict]:
    items = []
    for row in rows.tolist():
        file = io.BytesIO()
        Image.fromarray(np.asarray(pictures.images[row])).save(file, "PNG")
        label = f"{pictures.class_names[int(pictures.labels[row])]}, number {row + 1:,}"
        items.append({"id": f"test:{pictures.ids[row]}", "label": label, "src": _data_uri(file.getvalue())})
    return items


def _how_to_get_the_data() -> None:
    st.caption("The 10,000 test pictures of CIFAR-10 are not on this machine. The samples work without them.")
    with st.popover("How to get the test set", icon=":material/download:", width="stretch"):
        st.markdown("Run this once on the machine that hosts the page (23 MB), then reload:")
        st.code("python -m vit data", language="bash")
        st.markdown("Or set `PATCHLIGHT_DATA` to a folder that holds CIFAR-10.")


def _compute_predictions(loaded: Loaded, pictures: Pictures) -> None:
    """Progress of the job that finds this model's mistakes; it starts when they are first asked for."""
    job = background.running(loaded, pictures) or background.start(loaded, pictures)

    @st.fragment(run_every=1 if not job.finished else None)
    def watch() -> None:
        if job.finished:
            if not job.error:
                st.rerun()
            st.warning(job.error)
            if st.button("Try again"):
                background.start(loaded, pictures)
                st.rerun()
            return
        text = f"Looking for mistakes: {job.done:,} of {job.total:,} pictures, {job.left}"
        st.progress(job.done / job.total, text=text)
        if st.button("Stop"):
            job.cancelled.set()

    watch()


def _from_visitor() -> str | None:
    file = st.file_uploader(
        "A picture of your own",
        type=["png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff"],
        max_upload_size=MAX_BYTES // 2**20,
        key="upload_picture",
        help="It stays in this session's memory and is gone when you close the page.",
    )
    if st.toggle("Use the camera", key="gallery_camera"):
        file = st.camera_input("Take a picture", key="camera_picture") or file
    if file is None or st.session_state.get("last_upload") == file.file_id:
        return None
    st.session_state["last_upload"] = file.file_id
    try:
        return keep_own(file.getvalue())
    except PictureError as error:
        st.error(f"{error} The picture that was shown is unchanged.", icon=":material/error:")
        return None


def _data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
