"""The results of a run, under its curves: how good it is, whom it takes for whom, and what to take away.

    show_results(Run(runs_folder() / "demo"), is_over=True)

While a run goes on it is judged by held-out training pictures alone. The test pictures are classified when it
is over and somebody asks, in the thread of vit/page/background.py; the figures are those of `python -m train
report` and `python -m vit evaluate`. Whatever is wrong with the files is one sentence where it would stand.
"""

import json
import tempfile
from pathlib import Path

import streamlit as st

from train.page.result_pictures import show_cell, show_mistakes
from train.page.visitor import visitor
from train.report import (
    LARGEST_TABLE,
    in_order,
    pictures_to_measure,
    shading,
    weights_to_measure,
    why_these_weights,
    write_report,
)
from train.rights import may_all, visitor_of
from train.runs import Run, read_config, read_status
from vit.datasets import DataError, Pictures, find_data
from vit.evaluate import Metrics, check_match, measure
from vit.page import background
from vit.page.models import Loaded, load_model, model_name
from vit.page.session import change_view, tell
from vit.page.view import plain
from vit.sources import SPLITS, find_source

_RIGHT, _WRONG = (154, 91, 0), (31, 99, 145)  # as in the report; over either theme's ground text stays clear


def show_results(run: Run, *, is_over: bool) -> None:
    """Draw them all. A run that is not over shows what is known without its test pictures."""
    st.subheader("Results", anchor=False)
    names = checkpoint_names(run)
    can_report = is_over
    if not names:
        st.caption(
            "The run ended before its first checkpoint: there is nothing to measure, nor to look into."
            if is_over
            else "Nothing to judge yet: the first weights are kept at the first evaluation."
        )
    elif is_over:
        can_report = _measured(run)
    else:
        _so_far(run, names)
    _take_away(run, names, is_over, can_report)


def checkpoint_names(run: Run) -> list[str]:
    """What a run has kept, as `Run.checkpoint` takes it: best, last, then the newest epochs first."""
    epochs = sorted(run.checkpoint("last").parent.glob("epoch-*.safetensors"), reverse=True)
    return [
        name for name in ("best", "last", *(path.stem for path in epochs)) if run.checkpoint(name).is_file()
    ]


def look_into(run: Run, name: str) -> None:
    """For a callback: this checkpoint on the Explore tab, the picture as it is. The whole page must rerun."""
    change_view(model=model_name(run.checkpoint(name)))
    st.session_state["tab"] = "Explore"


def _so_far(run: Run, names: list[str]) -> None:
    status = read_status(run)
    if "best" not in names:
        st.markdown("The best weights come with the first evaluation.")
    elif status and status.best_accuracy is not None:
        step = "" if status.best_step is None else f", at step {status.best_step:,}"
        st.markdown(
            f"Best so far: **{_exact(status.best_accuracy)}** of the held-out pictures named rightly{step}."
        )
    st.caption(
        "The best weights are chosen by training pictures that were held out. The test pictures wait: they "
        "are opened once, when the run is over, so that nothing is chosen by them."
    )


# ---- when it is over


def _measured(run: Run) -> bool:
    """Draw the figures, or the way to them; returns whether there is nothing more to wait for."""
    try:
        loaded = load_model(model_name(weights_to_measure(run.root)))
        pictures, where, honesty = _pictures(run)
        check_match(loaded.checkpoint, pictures)
        kept = background.predictions_of(loaded, pictures)
        predictions = in_order(kept, pictures) if kept else None
    except (ValueError, DataError, OSError) as error:
        show = st.info if isinstance(error, DataError) else st.warning
        tell(show, f"{str(error).rstrip('.')}. The rest of the page still works.")
        return True
    if predictions is None:
        _ask_to_measure(run, loaded, pictures, where)
        return False
    metrics = measure(predictions, loaded.checkpoint.class_names)
    low, high = metrics.interval
    st.markdown(
        f"**{_exact(metrics.accuracy)}** of {metrics.pictures:,} pictures {plain(where)} are named rightly; "
        f"95 % interval {_exact(low)} to {_exact(high)} (Wilson)."
    )
    st.caption(f"{plain(honesty)} {plain(why_these_weights(loaded.path, loaded.checkpoint))}")
    mixups, classes, mistakes = st.tabs(["Who is taken for whom", "Class by class", "Confident mistakes"])
    with mixups:
        if cell := _choose_cell(metrics, f"results_cells_{run.name}_{loaded.checkpoint.id}"):
            show_cell(predictions, pictures, truth=cell[0], answer=cell[1])
    with classes:
        _class_table(metrics)
    with mistakes:
        show_mistakes(predictions, pictures)
    return True


def _pictures(run: Run) -> tuple[Pictures, str, str]:
    """As `pictures_to_measure`, opened once for all sessions."""
    config = read_config(run)
    named = config["config"].get("data")
    base = find_data(named) if isinstance(named, str) else None
    sources = [find_source(base, split) for split in SPLITS] if base else []
    return _open_pictures(json.dumps(config), tuple(source.fingerprint for source in sources if source))


@st.cache_resource(max_entries=3, show_spinner="Getting the pictures ready, some seconds the first time")
def _open_pictures(config: str, fingerprints: tuple[str, ...]) -> tuple[Pictures, str, str]:
    return pictures_to_measure(json.loads(config))


def _ask_to_measure(run: Run, loaded: Loaded, pictures: Pictures, where: str) -> None:
    """The button, or the progress of what it started; as for the gallery's mistakes."""
    job = background.running(loaded, pictures)
    who = visitor()
    if job is None and not may_all(who) and visitor_of(run) != who.mark:
        st.caption("Not measured yet. On this public page only who started a run can have it measured.")
        return
    if job is None:
        st.caption(
            f"Not measured yet. {plain(loaded.path.name)} will name each of {len(pictures):,} pictures "
            f"{plain(where)} once; what it says is kept."
        )
        which = "test" if pictures.split == "test" else "held-out"
        st.button(
            f"Measure on the {which} pictures",
            icon=":material/straighten:",
            on_click=background.start,
            args=(loaded, pictures),
        )
        return

    background.show(job, loaded, pictures, doing="Measuring", stop="Stop measuring")


# ---- the tables


def _choose_cell(metrics: Metrics, key: str) -> tuple[int, int] | None:
    """The confusion matrix; returns the chosen cell's (true class, answer), from 0."""
    import pandas as pd  # takes half a second

    names = [each.name for each in metrics.classes]
    if len(names) > LARGEST_TABLE:
        st.caption(f"With {len(names):,} classes the table would be too large to read; it is left out.")
        return None
    table = pd.DataFrame(metrics.confusion, index=names, columns=names)
    colours = pd.DataFrame(_colours(metrics), index=names, columns=names)
    hint = st.empty()
    event = st.dataframe(
        table.style.apply(lambda _: colours, axis=None),
        column_config={name: st.column_config.Column(width="small") for name in names},  # all in sight
        key=key,
        on_select="rerun",
        selection_mode="single-cell",
        alt="A row for each true class, a column for each answer, and how many pictures.",
    )
    for row, column in event.selection.cells:
        if row < len(names) and column in names:
            return row, names.index(column)
    hint.caption("A row for each true class, a column for each answer. Choose a cell to see its pictures.")
    return None


def _colours(metrics: Metrics) -> list[list[str]]:
    """CSS of each cell: right answers by their share of the row, mistakes beside the most frequent one."""
    shades = shading(metrics.confusion)
    return [
        [
            f"background-color: rgba{(*(_RIGHT if row == column else _WRONG), round(shade / 100, 3))}"
            for column, shade in enumerate(line)
        ]
        for row, line in enumerate(shades)
    ]


def _class_table(metrics: Metrics) -> None:
    import pandas as pd

    rows = [
        {
            "class": each.name,
            "pictures": each.pictures,
            "precision": 100 * each.precision,
            "recall": 100 * each.recall,
            "F1": 100 * each.f1,
        }
        for each in metrics.classes
    ]
    share = st.column_config.NumberColumn(format="%.1f %%")
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        column_config={
            "pictures": st.column_config.NumberColumn(format="localized"),
            "precision": share,
            "recall": share,
            "F1": share,
        },
    )
    st.caption(
        "Precision: of the pictures called so, the share that are. Recall: of those that are, the share "
        "called so. F1: their harmonic mean."
    )


# ---- what to do with it


def _take_away(run: Run, names: list[str], is_over: bool, can_report: bool) -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        if names:
            _weights(run, names)
        if is_over:
            st.download_button(
                "Report (HTML)",
                lambda: _report(run),
                f"{run.name}.html",
                "text/html",
                key=f"results_report_{run.name}",
                on_click="ignore",
                icon=":material/html:",
                disabled=not can_report,
                help="Curves, figures, mistakes, attention and settings in one file."
                if can_report
                else "Measure first: the report holds the same figures.",
            )


def _weights(run: Run, names: list[str]) -> None:
    name = st.selectbox("Weights", names, format_func=_label, key=f"results_weights_{run.name}", width=240)
    if st.button(
        "Look into them",
        key=f"results_look_{run.name}",
        icon=":material/visibility:",
        on_click=look_into,
        args=(run, name),
        help="Where these weights look, on the Explore tab.",
    ):
        st.rerun(scope="app")  # in a fragment the callback alone would rerun no more than that
    st.download_button(
        "Weights (safetensors)",
        run.checkpoint(name).read_bytes,
        f"{run.name}-{name}.safetensors",
        "application/octet-stream",
        key=f"results_download_{run.name}",
        on_click="ignore",
        icon=":material/download:",
    )


def _label(name: str) -> str:
    kind, _, number = name.partition("-")
    if kind == "epoch":
        return f"Epoch {int(number):,}" if number.isdecimal() else name
    return {"best": "Best on held-out pictures", "last": "Last"}[name]


def _report(run: Run) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_report(run.root, Path(folder) / "report.html").read_bytes()


def _exact(share: float) -> str:
    return f"{100 * share:.2f}\u00a0%"
