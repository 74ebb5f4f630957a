"""Patchlight: see where a Vision Transformer looks.

streamlit run app.py
"""

from pathlib import Path

import streamlit as st

ICON = Path(__file__).parent / "assets" / "icon.png"

st.set_page_config(page_title="Patchlight", page_icon=str(ICON), layout="wide")
title, model = st.columns([16, 11], vertical_alignment="bottom", gap="medium")
with title.container(gap="xxsmall"):
    st.title("Patchlight", anchor=False)
    st.caption("See where a Vision Transformer looks, which is not yet why it decides.")
    # Streamlit's browser code for components comes when the first is met: this empty one saves 0.1 s.
    st.components.v2.component("patchlight_first", html="<span></span>")(key="first")

# Not at the top: importing torch takes seconds, and the title is on screen before that.
with st.spinner("Opening the model"):
    from train.page import training
    from vit.page import explore, model_choice

with model:
    loaded = model_choice()
explore_tab, train_tab = st.tabs(["Explore", "Train"], key="tab", on_change="rerun", bind="query-params")
if explore_tab.open:
    with explore_tab:
        explore(loaded)
else:
    with train_tab:
        training(loaded)
