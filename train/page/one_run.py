"""One run on the page: its state and what to do with it, its curves, what it attends to, its results.

Everything is read from the run's folder, only what is new, each second while a trainer is at work on it.
"""

from collections.abc import Callable

import streamlit as st

from train import launch
from train.page.chosen import EXAMPLE, choose
from train.page.curves import draw_curves
from train.page.film import load_film, show_film
from train.page.reading import watch_of
from train.page.results import show_results
from train.page.visitor import visitor
from train.rights import may_all, require_stop
from train.runs import Run, RunError
from train.state import Seen, config_of, look
from train.watch import log_tail
from vit.page.session import change_view, tell
from vit.page.view import PATTERNS_MODEL, plain
from vit.words import duration, megabytes

REFRESH_SECONDS = 1.0
RESULTS_SECONDS = 5.0  # what is new of them comes with a checkpoint
COLOURS = {  # one word, one colour
    "waiting": "gray", "running": "blue", "paused": "yellow", "stopped": "violet", "finished": "green",
    "failed": "red", "vanished": "orange",
}  # fmt: skip
ICONS = {
    "waiting": ":material/hourglass_top:", "running": ":material/play_arrow:", "paused": ":material/pause:",
    "stopped": ":material/stop:", "finished": ":material/check:", "failed": ":material/error:",
    "vanished": ":material/question_mark:",
}  # fmt: skip
_SURE_KEY, _PROBLEM_KEY = "sure_of", "train_problem"


def show_run(run: Run) -> None:
    """The whole run; it is looked at again each second as long as it is at work."""
    try:
        was_active = look(run).is_active
    except RunError as error:
        _gone(error)
        return

    @st.fragment(run_every=REFRESH_SECONDS if was_active else None)
    def watch() -> None:
        try:
            seen = look(run)
        except RunError as error:
            _gone(error)
            return
        if seen.is_active != was_active:
            st.rerun()  # to look at it more often, or no more
        _header(seen)
        if run != EXAMPLE:
            _actions(seen)
        draw_curves({seen.name: watch_of(str(run.root)).read()}, key="curves")
        _attention(run)
        _log(run)

    watch()
    if run == EXAMPLE:
        _about_example()
    else:
        every = RESULTS_SECONDS if was_active else None
        st.fragment(show_results, run_every=every)(run, is_over=not was_active)


def _header(seen: Seen) -> None:
    name = "Example: the demo, as it once ran" if seen.run == EXAMPLE else plain(seen.name)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(name, anchor=False, width="content")
        st.badge(seen.word, color=COLOURS[seen.word], icon=ICONS[seen.word])
    status = seen.status
    reason = f"{seen.reason[:1].upper()}{seen.reason[1:]}. " if seen.reason else ""
    st.progress(min(1.0, max(0.0, status.progress)), text=_numbers(seen))
    if seen.run != EXAMPLE:
        st.caption(plain(f"{reason}Next: {seen.next}."))


def _numbers(seen: Seen) -> str:
    """How far it is, how fast, how long still, in one line."""
    status, config = seen.status, config_of(seen.run).get("config", {})
    steps = f"step {status.step:,}"
    if status.progress and config.get("epochs"):
        steps += f" of {round(status.step / status.progress):,}"
    parts = [steps, f"epoch {status.epoch:.2f}"]
    if status.images_per_second:
        parts.append(f"{status.images_per_second:,.0f} images/s")
    if seen.word == "running" and status.seconds_left is not None:
        parts.append(f"{duration(status.seconds_left)} left")
    elif status.seconds:
        parts.append(f"{duration(status.seconds)} in steps")
    if status.val_accuracy is not None:
        parts.append(f"{100 * status.val_accuracy:.1f} % of held-out pictures right")
    if seen.is_active and status.memory_bytes:
        parts.append(f"{megabytes(status.memory_bytes)} of memory on {status.device}")
    return " · ".join(parts)


# ---- what can be done ----


def _actions(seen: Seen) -> None:
    run, who = seen.run, visitor()
    free = may_all(who)
    if problem := st.session_state.pop(_PROBLEM_KEY, ""):
        tell(st.error, f"{problem[:1].upper()}{problem[1:]}. Nothing else is affected.")
    if sure := st.session_state.get(_SURE_KEY):
        if sure[0] == run.name:
            _ask_once(run, sure[1])
            return
        del st.session_state[_SURE_KEY]
    with st.container(horizontal=True):
        if seen.word == "running" and free:
            _button("Pause", "pause", launch.pause, run, disabled=bool(seen.wish))
        if seen.word == "paused" and free:
            _button("Resume", "play_arrow", launch.resume, run, disabled=bool(seen.wish))
        if seen.is_active and _may_stop(run):
            st.button(
                "Stop",
                icon=":material/stop:",
                on_click=_sure,
                args=(run, "stop"),
                disabled=seen.wish == "stop",
            )
            if seen.is_silent:
                _button("End its process", "dangerous", launch.kill, run)
        if seen.is_active or not free:
            return
        if seen.word != "finished" and run.is_begun:
            _button("Resume", "play_arrow", launch.resume, run, type="primary")
        if _button("Start again", "replay", _again, run, help="A new run with the same settings."):
            st.rerun()
        st.button("Delete", icon=":material/delete:", on_click=_sure, args=(run, "delete"))


def _ask_once(run: Run, what: str) -> None:
    text, yes, act = {
        "stop": ("It keeps a checkpoint, and can be resumed.", f"Stop {run.name}", launch.stop),
        "delete": ("Its checkpoints, curves and film go with it, for good.", f"Delete {run.name}", _delete),
    }[what]
    with st.container(horizontal=True, vertical_alignment="center"):
        st.markdown(text, width="content")
        if _button(yes, what, act, run, type="primary"):
            st.rerun()
        st.button("Keep it", on_click=_sure, args=(run, ""))


def _button(label: str, icon: str, act: Callable[..., object], run: Run, **options) -> bool:
    return st.button(
        label, icon=f":material/{icon}:", on_click=_do, args=(act, run), key=f"do_{icon}", **options
    )


def _do(act: Callable[..., object], run: Run) -> None:
    st.session_state.pop(_SURE_KEY, None)
    try:
        act(run, visitor=visitor())
    except (RunError, OSError) as error:
        st.session_state[_PROBLEM_KEY] = str(error)


def _sure(run: Run, what: str) -> None:
    st.session_state[_SURE_KEY] = (run.name, what) if what else None


def _again(run: Run, visitor) -> None:
    choose(launch.again(run, visitor=visitor))


def _delete(run: Run, visitor) -> None:
    launch.delete(run, visitor=visitor)
    choose(None)


def _may_stop(run: Run) -> bool:
    try:
        require_stop(visitor(), run)
    except RunError:
        return False
    return True


# ---- what is read from its folder ----


def _attention(run: Run) -> None:
    st.markdown("##### Attention while it learns")
    film = load_film(run)
    if isinstance(film, str):
        st.caption(plain(film))
    else:
        show_film([(run.name, film)], key="film")


def _log(run: Run) -> None:
    drawer = st.expander("Log", icon=":material/notes:", key="drawer_log", on_change="rerun")
    if drawer.open:
        drawer.code("\n".join(log_tail(run.root)) or "Nothing was said yet.", language=None, wrap_lines=True)


def _gone(error: RunError) -> None:
    text = str(error)
    tell(
        st.info, f"{text[:1].upper()}{text[1:]}: it was deleted while you watched. Nothing else is affected."
    )
    if st.button("Show another run"):
        choose(None)
        st.rerun()


def _about_example() -> None:
    st.caption(
        "This run made the bundled model for patterns, in under a minute on two CPU cores. Start one of your "
        "own: it appears here at once, and can be looked into while it learns."
    )
    if st.button("Look into its model", icon=":material/visibility:", on_click=_explore_example):
        st.rerun()


def _explore_example() -> None:
    change_view(model=PATTERNS_MODEL)
    st.session_state["tab"] = "Explore"
