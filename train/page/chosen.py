"""Which run is shown: in the session and in the address, so that a reload and a link show it again."""

from pathlib import Path

import streamlit as st

from train.runs import Run, RunError
from train.seat import who_works
from train.state import find_run, find_runs
from vit.files import runs_folder
from vit.page.view import plain

EXAMPLE = Run(Path(__file__).parents[2] / "assets" / "example")  # what the demo once did, for the first visit
_KEY, _PARAM = "chosen_run", "run"
_LONGEST_NAME = 64


def chosen_run() -> Run:
    """The one chosen, else the one at work, else the newest, else the bundled example."""
    name = st.session_state.get(_KEY) or st.query_params.get(_PARAM, "")
    run = None
    if name:
        try:
            run = find_run(name)
        except RunError:
            _say_once(name)
    run = run or _otherwise()
    choose(run)
    return run


def choose(run: Run | None) -> None:
    """Show this run from now on; None: whichever is at hand."""
    name = _name(run)
    st.session_state[_KEY] = name
    if name and st.query_params.get(_PARAM) != name:
        st.query_params[_PARAM] = name
    elif not name and _PARAM in st.query_params:
        del st.query_params[_PARAM]


def is_chosen(run: Run) -> bool:
    """Whether it is still the one to show: a button of a fragment may have chosen another."""
    return st.session_state.get(_KEY) == _name(run)


def _name(run: Run | None) -> str:
    return "" if run in (None, EXAMPLE) else run.root.name


def _otherwise() -> Run:
    runs = find_runs()
    at_work = who_works(runs_folder())
    return next((run for run in runs if run.root.name == at_work), runs[0] if runs else EXAMPLE)


def _say_once(name: str) -> None:
    if st.session_state.get("missed_run") != name:
        st.session_state["missed_run"] = name
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
        st.toast(plain(f"There is no run {shown} here. Another one is shown."), icon=":material/link_off:")
