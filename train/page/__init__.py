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
        "Training is started on the command line for now. A run appears in the model choice above with its "
        "first checkpoint, and can be looked into while it learns.",
        icon=":material/info:",
    )
    st.code("python -m train run --preset demo\npython -m train report runs/NAME", language="bash")
    st.subheader("How this model was trained", anchor=False)
    if not loaded.checkpoint.provenance:
        st.caption("This file says nothing of its training.")
    about_model(loaded.checkpoint)
