"""Choosing a picture: samples or the test set of the model's data set, or one of the visitor's own."""

import base64
import io
from pathlib import Path

import numpy as np
import streamlit as st

from vit.datasets import DataError, Pictures
from vit.images import MAX_BYTES, PictureError
from vit.page import background
from vit.page.models import Loaded
from vit.page.pictures import Labelled, find_labelled, keep_own, labelled, sample_names, test_pictures
from vit.page.session import change_view, tell
from vit.page.view import View, plain

_ASSETS = Path(__file__).parents[2] / "assets" / "gallery"
_PAGE = 20  # pictures shown at once
# by the kind of picture, as in a link
_PLACES = {"sample": "Samples", "pattern": "Samples", "test": "Test set", "own": "Yours"}

_grid = st.components.v2.component(
    "patchlight_gallery",
    html='<div class="gallery" role="group"></div>',
    css=(_ASSETS / "gallery.css").read_text(encoding="utf-8"),
    js=(_ASSETS / "gallery.js").read_text(encoding="utf-8"),
)


def choose_picture(view: View, loaded: Loaded) -> None:
    """Draw the gallery; what is chosen in it goes into the view."""
    place = st.segmented_control(
        "Pictures",
        list(dict.fromkeys(_PLACES.values())),
        default=_PLACES[view.picture.partition(":")[0]],
        required=True,
        key="gallery_place",
        persist_state="session",
        width="stretch",
    )
    if place == _PLACES["test"]:
        _from_test_set(view, loaded)
    elif place == _PLACES["own"]:
        _from_visitor()
    else:
        names = sample_names(loaded.data)
        _pick("samples", "Sample pictures", view.picture, _sample_items(loaded.data, names))
        if loaded.data == "patterns":
            st.caption("Made by code: only the pattern on the object tells its class.")
        elif loaded.data_set != "cifar10" and names[0].startswith("sample:"):
            st.caption("This model's own test pictures are not on this machine: these are CIFAR-10's.")


def _pick(key: str, label: str, chosen: str, items: list[dict]) -> None:
    key, offered = f"gallery_{key}", {item["id"] for item in items}

    def picked() -> None:
        picture = st.session_state[key].get("picked")
        if isinstance(picture, str) and picture in offered:
            change_view(picture=picture)

    _grid(key=key, data={"label": label, "chosen": chosen, "items": items}, on_picked_change=picked)


@st.cache_data(max_entries=8, show_spinner=False)
def _sample_items(data: str, names: list[str]) -> list[dict]:
    found = ((name, find_labelled(name, data)) for name in names)
    return [_item(name, each, each.class_name) for name, each in found if each]


def _item(name: str, found: Labelled, label: str) -> dict:
    file = io.BytesIO()
    found.picture.save(file, "PNG")
    src = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"id": name, "label": label, "src": src}


def _from_test_set(view: View, loaded: Loaded) -> None:
    try:
        pictures = test_pictures(loaded.data)
    except DataError as error:
        tell(st.error, f"{error} The samples and your own pictures still work.")
        return
    if pictures is None:
        _how_to_get_the_data(loaded.data)
        return
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
            return
        # by id: the same pictures may lie in another order than when they were classified
        wrong = set(predictions.ids[predictions.classes != predictions.labels].tolist())
        rows = rows[[picture in wrong for picture in pictures.ids[rows].tolist()]]
    if not len(rows):
        only_mistakes = st.session_state["gallery_mistakes"]
        reason = "This model makes no mistakes here" if only_mistakes else "The test set has none of these"
        st.caption(f"{reason}. Choose another class.")
        return
    filters = f"{pictures.digest[:12]}_{kind}_{st.session_state['gallery_mistakes']}_{len(rows)}"
    _page_of(rows, filters, view, pictures)


def _page_of(rows: np.ndarray, filters: str, view: View, pictures: Pictures) -> None:
    """Twenty of these rows from a chosen number on; at first, those that the shown picture is among."""
    key = f"gallery_from_{filters}"

    def show(position: int) -> None:
        st.session_state[key] = position // _PAGE * _PAGE + 1

    def surprise() -> None:
        position = int(np.random.default_rng().integers(len(rows)))
        change_view(picture=f"test:{pictures.ids[rows[position]]}")
        show(position)

    if key not in st.session_state:
        at = np.flatnonzero(pictures.ids[rows] == view.picture.removeprefix("test:"))
        show(int(at[0]) if len(at) else 0)
    first, button = st.columns([3, 2], vertical_alignment="bottom")
    start = first.number_input(
        f"From number (of {len(rows):,})", 1, len(rows), step=_PAGE, key=key, persist_state="session"
    )
    button.button("Surprise me", width="stretch", on_click=surprise)
    shown = rows[start - 1 : start - 1 + _PAGE]
    _pick("test", f"{pictures.name} pictures", view.picture, _test_items(pictures, shown))


def _test_items(pictures: Pictures, rows: np.ndarray) -> list[dict]:
    items = []
    for row in rows.tolist():
        found = labelled(pictures, row)
        items.append(_item(f"test:{pictures.ids[row]}", found, f"{found.class_name}{found.which}"))
    return items


def _how_to_get_the_data(data: str) -> None:
    if data != "cifar10":
        st.caption(
            f"The folder {plain(data)}, which this model learned from, holds no test pictures: put some into "
            "its folder test, in one folder for each class."
        )
        return
    st.caption("The 10,000 test pictures of CIFAR-10 are not on this machine. The samples work without them.")
    with st.popover("How to get the test set", icon=":material/download:", width="stretch"):
        st.markdown("Run this once on the machine that hosts the page (23 MB), then reload:")
        st.code("python -m vit data", language="bash")
        st.markdown("Or set `PATCHLIGHT_DATA` to a folder that holds CIFAR-10.")


def _compute_predictions(loaded: Loaded, pictures: Pictures) -> None:
    """Progress of the job that finds this model's mistakes; it starts when they are first asked for."""
    job = background.running(loaded, pictures) or background.start(loaded, pictures)
    background.show(job, loaded, pictures, doing="Looking for mistakes", stop="Stop")


def _from_visitor() -> None:
    file = st.file_uploader(
        "A picture of your own",
        type=["png", "jpg", "jpeg", "webp", "gif", "bmp", "tif", "tiff"],
        max_upload_size=MAX_BYTES // 2**20,
        key="upload_picture",
        on_change=_brought,
        args=("upload_picture",),
        help="It stays in this session's memory and is gone when you close the page.",
    )
    if st.toggle("Use the camera", key="gallery_camera"):
        taken = st.camera_input(
            "Take a picture", key="camera_picture", on_change=_brought, args=("camera_picture",)
        )
        file = taken or file
    problem = st.session_state.get("upload_problem")
    if file and problem:  # as long as the file is listed
        tell(st.error, problem)


def _brought(key: str) -> None:
    """A callback, since the picture is drawn before the gallery is."""
    file = st.session_state[key]
    st.session_state["upload_problem"] = ""
    if file is None:
        return
    try:
        change_view(picture=keep_own(file.getvalue()))
    except PictureError as error:
        st.session_state["upload_problem"] = f"{error} The picture that was shown is unchanged."
