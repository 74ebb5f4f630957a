"""One reader of each run's metrics for all who watch it: what one has read, the others need not."""

from pathlib import Path

import streamlit as st

from train.watch import Watch


@st.cache_resource(max_entries=16, show_spinner=False)
def watch_of(root: str) -> Watch:
    return Watch(Path(root))
