"""The Train tab: one run watched, a new one started, all of them compared.

Script order is screen order; on a phone the watched run comes first.
"""

import streamlit as st

from train.page.all_runs import all_runs
from train.page.chosen import chosen_run
from train.page.new_run import new_run
from train.page.one_run import show_outcome, show_run
from vit.page.drawers import about_model
from vit.page.models import Loaded
from vit.page.session import tell


def training(loaded: Loaded) -> None:
    """The whole tab."""
    if loaded.problem:
        tell(st.error, loaded.problem)
    watched, made = st.columns([19, 8], gap="medium")
    run = chosen_run()
    with watched:
        show_run(run)
        results = st.container()
    with made:
        new_run()
    all_runs()
    with results:  # last: the first time its pictures take seconds to open
        show_outcome(run)
    about = st.expander(
        "How the model chosen above was trained",
        icon=":material/info:",
        key="drawer_training",
        on_change="rerun",
    )
    if about.open:
        with about:
            if not loaded.checkpoint.provenance:
                st.caption("This file says nothing of its training.")
            about_model(loaded.checkpoint)
