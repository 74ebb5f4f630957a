"""Which run is shown: in the session and in the address, so that a reload and a link show it again."""

from pathlib import Path

import streamlit as st

from train.runs import Run, RunError
from train.seat import who_works
from train.state import find_run, find_runs
from vit.files import runs_folder

EXAMPLE = Run(Path(__file__).parents[2] / "assets" / "example")  # what the demo once did, for the first visit
_KEY, _PARAM = "chosen_run", "run"


def chosen_run() -> Run:
    """The one chosen, else the one at work, else the newest, else the bundled example."""
    name = st.session_state.get(_KEY) or st.query_params.get(_PARAM, "")
    run = None
    if name:
        try:
            run = find_run(name)
        except RunError as error:
            _say_once(name, str(error))
    run = run or _otherwise()
    choose(run)
    return run


def choose(run: Run | None) -> None:
    """Show this run from now on; None: whichever is at hand."""
    name = "" if run in (None, EXAMPLE) else run.root.name
    st.session_state[_KEY] = name
    if name and st.query_params.get(_PARAM) != name:
        st.query_params[_PARAM] = name
    elif not name and _PARAM in st.query_params:
        del st.query_params[_PARAM]


def _otherwise() -> Run:
    runs = find_runs()
    at_work = who_works(runs_folder())
    return next((run for run in runs if run.root.name == at_work), runs[0] if runs else EXAMPLE)


def _say_once(name: str, why: str) -> None:
    if st.session_state.get("missed_run") != name:
        st.session_state["missed_run"] = name
        st.toast(f"{why[:1].upper()}{why[1:]}. Another one is shown.", icon=":material/link_off:")
