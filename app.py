"""Patchlight: see where a Vision Transformer looks.

streamlit run app.py
"""

import streamlit as st

st.set_page_config(page_title="Patchlight", page_icon=":material/flare:", layout="wide")
title, model = st.columns([16, 11], vertical_alignment="bottom", gap="medium")
title.title("Patchlight", anchor=False)
title.caption("See where a Vision Transformer looks: where, which is not yet why.")

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
