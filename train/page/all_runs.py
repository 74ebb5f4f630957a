"""All runs in one table; those chosen in it laid over each other: settings, curves, attention."""

from dataclasses import fields

import streamlit as st

from train.config import TrainConfig
from train.page.chosen import choose
from train.page.curves import draw_curves
from train.page.film import load_film, show_film
from train.page.reading import columns_of
from train.state import Seen, config_of, look_at_all
from vit.page.session import tell
from vit.page.view import plain
from vit.words import duration

_REFRESH_SECONDS = 5.0
_MOST = 200  # rows of the table
_MOST_COMPARED = 6


def all_runs() -> None:
    """The table, and below it what is compared; looked at again while a run is at work."""
    was_active = any(each.is_active for each in look_at_all())

    @st.fragment(run_every=_REFRESH_SECONDS if was_active else None)
    def table() -> None:
        seen = look_at_all()
        if any(each.is_active for each in seen) != was_active:
            st.rerun()
        if seen:
            active = [each for each in seen if each.is_active]  # a resumed one may be an old one
            rest = [each for each in seen if not each.is_active]
            _table((active + rest)[:_MOST])

    table()


def _table(seen: list[Seen]) -> None:
    st.subheader("All runs", anchor=False)
    names = [each.name for each in seen]
    settings = {each.name: config_of(each.run).get("config", {}) for each in seen}
    differing = _differing(list(settings.values()))
    rows = [_row(each) | {name: settings[each.name].get(name) for name in differing} for each in seen]
    event = st.dataframe(
        rows,
        hide_index=True,
        width="stretch",
        height="content" if len(rows) < 12 else 440,
        selection_mode="multi-row",
        on_select="rerun",
        key=f"runs_{hash(tuple(names))}",  # rows are chosen by number: other rows are another table
        column_config={
            "accuracy": st.column_config.NumberColumn(
                "accuracy", format="percent", help="Of held-out pictures."
            ),
            "progress": st.column_config.ProgressColumn(
                "progress", format="percent", min_value=0, max_value=1
            ),
            "seconds": st.column_config.NumberColumn(
                "seconds", format="%.0f", help="Spent in training steps."
            ),
            "images/s": st.column_config.NumberColumn("images/s", format="%.0f"),
            "started": st.column_config.DatetimeColumn("started", format="distance"),
        },
    )
    chosen = [seen[row] for row in event.selection.rows if row < len(seen)]
    with st.container(horizontal=True, vertical_alignment="center"):
        if len(chosen) == 1 and st.button(plain(f"Show {chosen[0].name}"), icon=":material/visibility:"):
            choose(chosen[0].run)
            st.rerun()
        st.caption(_hint(seen, chosen, bool(differing)))
    if len(chosen) > 1:
        _compare(chosen[:_MOST_COMPARED])


def _hint(seen: list[Seen], chosen: list[Seen], do_differ: bool) -> str:
    if len(seen) == 1:
        return "As soon as there are two runs, they can be compared here."
    if len(chosen) > _MOST_COMPARED:
        return f"The first {_MOST_COMPARED} of those ticked are compared."
    last = " The last columns are the settings in which these runs differ." if do_differ else ""
    return f"Tick one run to have it shown above, two or more to compare them.{last}"


def _row(seen: Seen) -> dict:
    import pandas

    status = seen.status
    return {
        "run": seen.name,
        "state": seen.word,
        "progress": status.progress,
        "accuracy": status.best_accuracy if status.best_accuracy is not None else status.val_accuracy,
        "seconds": status.seconds or None,
        "images/s": status.images_per_second or None,
        "started": pandas.to_datetime(status.started or None, unit="s", utc=True, errors="coerce"),
    }


def _differing(settings: list[dict]) -> list[str]:
    """The fields of TrainConfig that are not the same in all of these."""
    known = [each for each in settings if each]
    return [
        field.name
        for field in fields(TrainConfig)
        if len({str(each.get(field.name, field.default)) for each in known}) > 1
    ]


def _compare(chosen: list[Seen]) -> None:
    names = [each.name for each in chosen]
    st.markdown(f"##### {plain(' beside '.join(names))}")
    over = st.segmented_control(
        "Over", ["step", "seconds", "epoch"], default="step", required=True, key="compare_over",
        persist_state="session",
    )  # fmt: skip
    draw_curves({each.name: columns_of(each.run) for each in chosen}, over, key="compare")
    times = [f"{each.name} {duration(each.status.seconds)}" for each in chosen if each.status.seconds]
    if times:
        st.caption(plain(f"Time in training steps: {', '.join(times)}."))
    films = []
    for each in chosen:
        film = load_film(each.run)
        if isinstance(film, str):
            tell(st.info, f"{each.name}: {film}")
        else:
            films.append((each.name, film))
    if len(films) > 1:
        st.markdown("##### Attention of the first two, on one picture")
        show_film(films[:2], key="compare_film")
