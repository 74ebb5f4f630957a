"""The Train tab: how the chosen model was trained."""

import streamlit as st

from vit.page.drawers import about_model
from vit.page.models import Loaded
from vit.page.session import tell


def training(loaded: Loaded) -> None:
    """What the checkpoint tells of its training, and what this page cannot do yet."""
    if loaded.problem:
        tell(st.error, loaded.problem)
    st.info(
        "This version of Patchlight looks into trained models and does not train them. Any safetensors file "
        "that you put under the runs folder appears in the model choice above.",
        icon=":material/info:",
    )
    st.subheader("How this model was trained", anchor=False)
    if not loaded.checkpoint.provenance:
        st.caption("This file says nothing of its training.")
    about_model(loaded.checkpoint)
