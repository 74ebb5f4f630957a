"""One run on the page: its state and what to do with it, its curves, what it attends to, its results.

Everything is read from the run's folder, only what is new, each second while a trainer is at work on it.
"""

import streamlit as st

from train import launch
from train.page.asking import ask_button, do_button, may_stop, show_refusal, still_asking
from train.page.chosen import EXAMPLE, choose, is_chosen
from train.page.curves import draw_curves
from train.page.film import load_film, show_film
from train.page.reading import columns_of
from train.page.results import show_results
from train.page.visitor import visitor
from train.rights import Visitor, may_all
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
_PLACE = "watched"


def show_run(run: Run) -> None:
    """The whole run; it is looked at again each second as long as it is at work."""
    try:
        was_active = look(run).is_active
    except RunError as error:
        _gone(error)
        return

    @st.fragment(run_every=REFRESH_SECONDS if was_active else None)
    def watch() -> None:
        if not is_chosen(run):
            st.rerun()
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
        columns = columns_of(run)
        draw_curves({seen.name: columns}, key="curves")
        _attention(run)
        _log(run)
        if columns.behind and not was_active:
            st.rerun()  # nothing else would read on

    watch()


def show_outcome(run: Run) -> None:
    """How good it is, below the rest."""
    if run == EXAMPLE:
        _about_example()
        return
    was_active = _is_active(run)
    if was_active is None:
        return

    @st.fragment(run_every=RESULTS_SECONDS if was_active else None)
    def results() -> None:
        if _is_active(run) is not None:
            show_results(run, is_over=not was_active)

    results()


def _header(seen: Seen) -> None:
    name = "Example: the demo, as it once ran" if seen.run == EXAMPLE else plain(seen.name)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(name, anchor=False, width="content")
        st.badge(seen.word, color=COLOURS[seen.word], icon=ICONS[seen.word])
    st.progress(min(1.0, max(0.0, seen.status.progress)), text=_numbers(seen))
    if seen.run == EXAMPLE:
        return
    reason = f"{seen.reason[:1].upper()}{seen.reason[1:]}. " if seen.reason else ""
    text = f"{reason}Next: {seen.next}."
    if seen.word == "failed":
        tell(st.error, text)
    elif seen.word == "vanished" or seen.is_silent:
        tell(st.warning, text)
    else:
        st.caption(plain(text))


def _numbers(seen: Seen) -> str:
    """How far it is, how fast, how long still, in one line."""
    status, config = seen.status, config_of(seen.run).get("config", {})
    if not status.step:
        return "no step yet"
    steps = f"step {status.step:,}"
    if config.get("epochs") and 1e-6 < status.progress <= 1:
        steps += f" of {round(status.step / status.progress):,}"
    parts = [steps, f"epoch {status.epoch:.2f}"]
    if status.images_per_second:
        parts.append(f"{status.images_per_second:,.0f} images/s")
    if seen.word == "running" and status.seconds_left is not None:
        parts.append(f"{duration(status.seconds_left)} left")
    elif status.seconds:
        parts.append(f"{duration(status.seconds)} of training")
    if status.val_accuracy is not None:
        parts.append(f"{100 * status.val_accuracy:.1f}\u00a0% of held-out pictures right")
    if seen.is_active and status.memory_bytes:
        parts.append(f"{megabytes(status.memory_bytes)} of memory on {plain(status.device.upper())}")
    return " · ".join(parts)


# ---- what can be done ----


def _actions(seen: Seen) -> None:
    run, free = seen.run, may_all(visitor())
    can = _what_it_asks(seen, free)
    if not still_asking(run, _PLACE, can):
        with st.container(horizontal=True):
            if seen.word == "running" and free and not seen.is_silent:
                do_button("Pause", "pause", launch.pause, run, _PLACE, disabled=bool(seen.wish))
            if seen.word == "paused" and free and not seen.is_silent:
                do_button("Resume", "play_arrow", launch.resume, run, _PLACE, disabled=bool(seen.wish))
            if seen.is_active and may_stop(run):
                ask_button("Stop", "stop", run, _PLACE, disabled="stop" not in can)
            if "end" in can:
                ask_button("End its process", "end", run, _PLACE)
            if not seen.is_active and free:
                _when_over(seen)
    show_refusal(run, _PLACE)


def _what_it_asks(seen: Seen, free: bool) -> set[str]:
    """What may be asked for that asks once whether it is meant."""
    if not seen.is_active:
        return {"delete"} if free else set()
    if not may_stop(seen.run):
        return set()
    return ({"stop"} if seen.wish != "stop" else set()) | ({"end"} if seen.is_silent else set())


def _when_over(seen: Seen) -> None:
    run = seen.run
    if seen.word != "finished" and run.is_begun:
        do_button("Resume", "play_arrow", launch.resume, run, _PLACE, is_main=True)
    do_button("Start again", "replay", _again, run, _PLACE, help="A new run with the same settings.")
    ask_button("Delete", "delete", run, _PLACE)


def _again(run: Run, visitor: Visitor) -> None:
    choose(launch.again(run, visitor=visitor))


# ---- what is read from its folder ----


def _attention(run: Run) -> None:
    st.markdown("##### Attention while it learns")
    film = load_film(run)
    if isinstance(film, str):
        st.caption(plain(film))
    else:
        show_film([(run.root.name, film)], key="film")


def _log(run: Run) -> None:
    drawer = st.expander("Log", icon=":material/notes:", key="drawer_log", on_change="rerun")
    if drawer.open:
        drawer.code("\n".join(log_tail(run.root)) or "Nothing was said yet.", language=None, wrap_lines=True)


def _is_active(run: Run) -> bool | None:
    """Whether a trainer is at work on it; None once it is deleted."""
    try:
        return look(run).is_active
    except RunError:
        return None


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
        "The bundled model for patterns comes from a run like this one. Start one of your own: it appears "
        "here at once, and can be looked into while it learns."
    )
    if st.button("Look into that model", icon=":material/visibility:", on_click=_explore_example):
        st.rerun()


def _explore_example() -> None:
    change_view(model=PATTERNS_MODEL)
    st.session_state["tab"] = "Explore"
