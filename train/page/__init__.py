"""The Train tab: how the chosen model was trained."""

import streamlit as st

from vit.page.drawers import about_model
from vit.page.models import Loaded


def training(loaded: Loaded) -> None:
    """What the checkpoint tells of its training, and what this page cannot do yet."""
    st.subheader("How this model was trained", anchor=False)
    about_model(loaded.checkpoint)
    st.info(
        "This version of Patchlight looks into trained models and does not train them. Any checkpoint that "
        "you put under the runs folder appears in the model choice above.",
        icon=":material/info:",
    )
