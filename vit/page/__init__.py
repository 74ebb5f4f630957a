"""The Explore tab: a picture, what the model says of it, and where it looks.

Script order is screen order; on a phone the columns follow one another, the picture first.
"""

from dataclasses import replace

import streamlit as st

from vit.checkpoint import CheckpointError
from vit.datasets import DataError, cache_folder
from vit.files import runs_folder
from vit.page.drawers import drawers
from vit.page.explained import Explained, explain_picture
from vit.page.gallery import choose_picture
from vit.page.models import Loaded, choose_model
from vit.page.pictures import find_picture, first_picture, is_of_another_set
from vit.page.prediction import about_own_pictures
from vit.page.requests import answer_requests
from vit.page.session import control, current_view, data_before, is_new_session, set_view, tell
from vit.page.view import View
from vit.page.viewer import show_viewer

__all__ = ["explore", "model_choice"]


def model_choice() -> Loaded:
    """The page's head: which model is looked into."""
    try:
        runs_folder(), cache_folder()
    except ValueError as error:
        tell(st.error, f"PATCHLIGHT_RUNS or PATCHLIGHT_CACHE: {error}. Set it to a folder and start again.")
        st.stop()
    is_first_run = is_new_session()
    loaded = choose_model()
    architecture = loaded.checkpoint.architecture
    if is_first_run and (lacking := current_view().lacking(architecture)):
        named = " and ".join(lacking) if len(lacking) < 3 else "layer, head and token"
        st.toast(f"This model has no {named} as the link names.", icon=":material/link_off:")
    view = current_view().within(architecture)
    if is_of_another_set(view.picture, loaded.data, data_before(loaded.data)):
        view = replace(view, picture=first_picture(loaded.data))
    set_view(view)
    return loaded


@st.fragment
def explore(loaded: Loaded) -> None:
    """The whole tab. A fragment: what is chosen in it does not look for models again."""
    if loaded.problem:
        tell(st.error, loaded.problem)
    viewer_column, gallery_column = st.columns([20, 7], gap="medium")
    asked = current_view()
    try:
        explained = _explain(asked, loaded)
    except CheckpointError as error:
        with gallery_column:
            choose_picture(asked, loaded)
        with viewer_column:
            tell(st.error, f"{error} Your settings are kept: choose another model above.")
        return
    set_view(explained.view)
    with viewer_column:  # before the gallery: it is what people came for
        show_viewer(explained)
        if explained.shown.is_own:
            about_own_pictures(explained)
    with gallery_column:
        choose_picture(asked, loaded)  # which opens where the picture was asked for, even if it is not here
        _what_the_model_sees(explained)
    drawers(explained)
    answer_requests(explained)


def _explain(view: View, loaded: Loaded) -> Explained:
    """The view's picture explained, or the first sample with a word on why."""
    size_px = loaded.checkpoint.architecture.img_size
    try:
        shown = find_picture(view.picture, loaded.data, size_px, view.fit)
        reason = f"The picture {view.picture} is not on this machine."
    except DataError as error:
        shown, reason = None, str(error)
    if shown is None:
        if view.picture.startswith("own:"):
            st.info(
                "This link shows an uploaded picture, which a link cannot hold. The settings are kept: "
                "upload the picture again under “Yours”.",
                icon=":material/link_off:",
            )
        else:
            tell(st.info, f"{reason} A sample is shown instead.")
        view = replace(view, picture=first_picture(loaded.data))
        shown = find_picture(view.picture, loaded.data, size_px, view.fit)
    return explain_picture(view, loaded, shown)


def _png(data: bytes, width: str | int, alt: str) -> None:
    # Streamlit's default is a JPEG, which blurs the edges of patches and is off by more than 2 of 255.
    st.image(data, width=width, alt=alt, output_format="PNG")


def _what_the_model_sees(explained: Explained) -> None:
    shown = explained.shown
    height, width = shown.seen.shape[:2]
    st.caption(f"What the model sees: {width} × {height} pixels")
    _png(explained.seen_png(), 160, f"{shown.title} at {width} by {height} pixels")
    if shown.canvas.shape != shown.seen.shape:
        control(
            st.segmented_control,
            "fit",
            "Framing",
            ["crop", "pad"],
            required=True,
            format_func={"crop": "Centre", "pad": "Whole picture"}.get,
        )
