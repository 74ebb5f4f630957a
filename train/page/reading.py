"""One reader of each run's metrics for all who watch it: what one has read, the others need not."""

from pathlib import Path

import streamlit as st

from train.runs import Run
from train.watch import Columns, Watch

_CATCH_UP_SECONDS = 2.0  # for some 400,000 lines


@st.cache_resource(max_entries=16, show_spinner=False)
def _watch_of(root: str) -> Watch:
    return Watch(Path(root))


def columns_of(run: Run) -> Columns:
    """What its metrics say; a long history, when somebody first asks for it, takes a moment."""
    watch = _watch_of(str(run.root))
    columns = watch.read()
    if columns.gone:  # those of a deleted run, whose name another one may have by now
        return Columns()
    return watch.read(_CATCH_UP_SECONDS) if columns.behind else columns
