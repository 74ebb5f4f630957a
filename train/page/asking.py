"""What can be done with a run, as buttons. What loses something asks once, a refusal stays.

    if not still_asking(run, "watched"):             # else only the question is drawn
        do_button("Pause", "pause", launch.pause, run, "watched")
        ask_button("Delete", "delete", run, "watched")
    show_refusal(run, "watched")

`place` tells apart the places of the page where the same run can be met.
"""

from collections.abc import Callable

import streamlit as st

from train import launch
from train.page.chosen import choose
from train.page.visitor import visitor
from train.rights import Visitor, require_stop
from train.runs import Run, RunError
from vit.page.session import change_view, current_view, tell
from vit.page.view import BUNDLED_MODEL, plain

_SURE_KEY, _REFUSED_KEY = "sure_of", "refused"  # (place, run's name, what), (place, run's name, why)
_QUESTIONS = {  # what is said, the verb of the button, its icon
    "stop": ("It keeps a checkpoint, and can be resumed.", "Stop", "stop"),
    "end": ("What came after its last checkpoint is lost.", "End", "dangerous"),
    "delete": ("Its checkpoints, curves and film go with it, for good.", "Delete", "delete"),
}


def accent(label: str) -> str:
    """The label of a button that matters most: white on the accent colour is hard to read in the dark."""
    return f":primary[**{plain(label)}**]"


def do_button(
    label: str, icon: str, act: Callable[..., object], run: Run, place: str, is_main: bool = False, **options
) -> None:
    """Do it at once: `act(run, visitor=...)`."""
    st.button(
        accent(label) if is_main else plain(label),
        icon=f":material/{icon}:",
        key=f"{place}_do_{icon}",
        on_click=_do,
        args=(act, run, place),
        **options,
    )


def ask_button(label: str, what: str, run: Run, place: str, **options) -> None:
    """Ask whether to `stop`, `end` or `delete`, in the place of the buttons."""
    st.button(
        plain(label),
        icon=f":material/{_QUESTIONS[what][2]}:",
        key=f"{place}_ask_{what}",
        on_click=_ask,
        args=(run, what, place),
        **options,
    )


def still_asking(run: Run, place: str, can: set[str]) -> bool:
    """Draw the question asked of this run, if any; it falls away once it is not among what can be done."""
    asked = st.session_state.get(_SURE_KEY)
    if asked is None or asked[0] != place:
        return False
    if asked[1] != run.root.name or asked[2] not in can:
        del st.session_state[_SURE_KEY]
        return False
    text, verb, icon = _QUESTIONS[asked[2]]
    act = {"stop": launch.stop, "end": launch.kill, "delete": _delete}[asked[2]]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(text, width="content")
        do_button(f"{verb} {run.root.name}", icon, act, run, place, is_main=True)
        st.button("Leave it as it is", key=f"{place}_keep", on_click=_ask, args=(run, None, place))
    return True


def show_refusal(run: Run, place: str) -> None:
    """Why the last thing asked for was not done."""
    refused = st.session_state.get(_REFUSED_KEY)
    if refused and refused[:2] == (place, run.root.name):
        tell(st.error, f"{refused[2][:1].upper()}{refused[2][1:].rstrip('.')}. Nothing else is affected.")


def may_stop(run: Run) -> bool:
    """Whether this visitor may stop it."""
    try:
        require_stop(visitor(), run)
    except RunError:
        return False
    return True


def _ask(run: Run, what: str | None, place: str) -> None:
    st.session_state.pop(_REFUSED_KEY, None)
    st.session_state[_SURE_KEY] = (place, run.root.name, what) if what else None


def _do(act: Callable[..., object], run: Run, place: str) -> None:
    st.session_state.pop(_SURE_KEY, None)
    st.session_state.pop(_REFUSED_KEY, None)
    try:
        act(run, visitor=visitor())
    except (RunError, OSError) as error:
        st.session_state[_REFUSED_KEY] = (place, run.root.name, " ".join(str(error).split()))


def _delete(run: Run, visitor: Visitor) -> None:
    launch.delete(run, visitor=visitor)
    choose(None)
    if current_view().model.startswith(f"run:{run.root.name}/"):  # it went with the run
        change_view(model=BUNDLED_MODEL)
    st.toast(plain(f"{run.root.name} is deleted."), icon=":material/delete:")
