"""The curves of one run, or of several laid over each other: loss, accuracy, learning rate.

    draw_curves({"demo": watch.read()}, key="curves")   # in the script, or in a fragment run each second
    curves({"demo": columns}, x="seconds")["loss"]      # a Chart: Vega-Lite specification, points, words

On a page that is updated each second a chart stays the same element and keeps its zoom. That decides what
draws it. Streamlit 1.67 makes a new element of a Plotly chart whenever its figure changes, whatever its key,
and takes ECharts' zoom back; a Vega-Lite chart stays while its specification and `alt` do, and keeps a zoom
that Python is told of. So what changes while a run goes on is never in the specification: points are data,
and the figures in words stand under the chart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import streamlit as st

from train.watch import Columns, Series, thinned
from vit.page.view import plain
from vit.words import duration, percent

HEIGHT_PX = 200  # of a chart below its title
# One for each run, in turn. On either theme's background the contrast is 3:1 or more, and any two differ
# for every kind of colour vision (tests/test_curves.py computes both).
COLORS = ("#be6a00", "#2b7fc4", "#486c3f", "#8812fb", "#fb466e", "#904c7b")
_MOST_POINTS = 400  # of one line: a chart some 400 px wide shows no more
_MOST_ROWS = 1900  # of one chart: with over 2,000 points Streamlit draws it in another way
_FEW = 30  # points that are marked one by one
_ZOOM_HELP = "Ctrl and wheel, or a pinch on a touchpad: closer. Drag: move. Double click: all of it."


@dataclass(frozen=True, eq=False)
class Chart:
    """One chart: what to draw, and the same in words."""

    title: str
    spec: dict  # Vega-Lite, of the data "points"; the same as long as the runs' names and the axis are
    points: pa.Table  # a row each: x, value, run, line, few, and x and value as text
    words: str  # the figures, or why there is no line
    is_empty: bool


# ---- what is drawn over what ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    title: str
    lines: Mapping[str, str]  # what a line is of, and its column; the second is dashed
    mark: str  # on the axis, as Vega writes `datum.value`
    told: Callable[[float], str]  # a value in words
    waiting: str  # said while there is no point
    is_share: bool = False  # of 0 to 100 %
    legend: str | None = None  # the corner where such lines leave room


_NO_STEP = "No line yet: the first steps are to come."
_KINDS = {
    "loss": _Kind("Loss", {"training": "loss", "held-out pictures": "val_loss"},
                  "format(datum.value, '.4~g')", "{:.3g}".format, _NO_STEP, legend="top-right"),
    "accuracy": _Kind("Accuracy on held-out pictures", {"held-out pictures": "val_accuracy"},
                      "format(100 * datum.value, '.3~g') + ' %'", percent,
                      "The first evaluation has not come yet.", is_share=True, legend="bottom-right"),
    "lr": _Kind("Learning rate", {"training": "lr"}, "format(datum.value, '.2~g')",
                "{:.2g}".format, _NO_STEP),
}  # fmt: skip


@dataclass(frozen=True)
class _Over:
    title: str
    type: str
    mark: str
    told: Callable[[float], str]
    least_step: int | None = None  # between marks


Axis = Literal["step", "seconds", "epoch"]
# Time goes as milliseconds, so that Vega puts its marks at whole minutes and hours.
_AXES = {
    "step": _Over("step", "quantitative", "format(datum.value, ',d')", "{:,.0f}".format, least_step=1),
    "seconds": _Over("time in training", "temporal", """datum.value < 60000 ? datum.value / 1000 + ' s'
        : datum.value >= 7200000 ? format(datum.value / 3600000, '.3~g') + ' h'
        : floor(datum.value / 60000) + (datum.value % 60000 ? utcFormat(datum.value, ':%S') : '') + ' min'""",
        lambda milliseconds: duration(milliseconds / 1000)),
    "epoch": _Over("epoch", "quantitative", "format(datum.value, ',.3~r')", "{:,.2f}".format),
}  # fmt: skip


# ---- drawing --------------------------------------------------------------------------------------------


def draw_curves(runs: Mapping[str, Columns], x: Axis = "step", *, key: str) -> None:
    """Draw the three charts side by side, one below the other on a narrow page.

    The same `key`, runs and axis keep them, and where a person has zoomed to. Zooming runs the fragment, or
    the script, again.
    """
    of = f"{len(runs)} runs" if len(runs) > 1 else "".join(runs)
    places = st.columns(len(_KINDS), gap="medium")
    for place, (name, chart) in zip(places, curves(runs, x).items(), strict=True):
        with place:
            st.markdown(f"**{chart.title}**")
            if chart.is_empty:
                st.container(height=HEIGHT_PX, border=False).caption(chart.words)
                continue
            st.vega_lite_chart(
                spec=chart.spec | {"datasets": {"points": chart.points}},
                height=HEIGHT_PX,
                key="-".join((key, name, x, *runs)),
                alt=f"{chart.title} over {_AXES[x].title}, of {of}. The figures follow as text.",
                on_select="rerun",  # else Streamlit forgets the zoom with each new point
                selection_mode=["zoom"],
            )
            st.caption(plain(chart.words), help=_ZOOM_HELP)


def curves(runs: Mapping[str, Columns], x: Axis = "step") -> dict[str, Chart]:
    """The charts `loss`, `accuracy` and `lr` of these runs, by their names, over step, time or epoch."""
    return {name: _chart(kind, runs, x) for name, kind in _KINDS.items()}


def _chart(kind: _Kind, runs: Mapping[str, Columns], x: Axis) -> Chart:
    lines = {
        (run, line): over
        for run, columns in runs.items()
        for line, column in kind.lines.items()
        if len((over := _over(columns, column, x)).values)
    }
    most = max(3, min(_MOST_POINTS, _MOST_ROWS // max(1, len(lines))))
    parts = []
    for (run, line), (xs, values) in lines.items():
        few = len(values) <= _FEW
        xs, values = thinned(xs, values, most)
        texts = {"at": [_AXES[x].told(at) for at in xs], "told": [kind.told(value) for value in values]}
        same = {name: [each] * len(xs) for name, each in (("run", run), ("line", line), ("few", few))}
        parts.append(pa.table({"x": xs, "value": values} | texts | same))
    return Chart(
        title=kind.title,
        spec=_spec(kind, list(runs), x),
        points=pa.concat_tables(parts) if parts else pa.table({}),
        words=_in_words(kind, lines, several=len(runs) > 1) or kind.waiting,
        is_empty=not lines,
    )


def _over(columns: Columns, name: str, x: Axis) -> Series:
    """A column over another axis: its values stand where that one's were at the same steps."""
    steps, values = columns[name]
    if x == "step" or not len(steps):
        return Series(steps, values)
    at = columns[x]
    if not len(at.steps):
        return Series(steps[:0], values[:0])
    return Series(np.interp(steps, at.steps, at.values) * (1000 if x == "seconds" else 1), values)


def _in_words(kind: _Kind, lines: Mapping[tuple[str, str], Series], several: bool) -> str:
    """Of one run the first and the last value of each line, of several the last ones."""
    words: dict[str, list[str]] = {}
    for (run, line), (_, values) in lines.items():
        name = f"{line} " if len(kind.lines) > 1 else ""
        since = f"from {kind.told(values[0])} to " if len(values) > 1 and not several else ""
        words.setdefault(run, []).append(f"{name}{since}{kind.told(values[-1])}")
    return "; ".join(several * f"{run}: " + ", ".join(each) for run, each in words.items())


def _spec(kind: _Kind, runs: Sequence[str], x: Axis) -> dict:
    """The Vega-Lite specification. Nothing in it may change while the runs go on."""
    several, two_lines, over = len(runs) > 1, len(kind.lines) > 1, _AXES[x]
    value = {"field": "value", "type": "quantitative"}
    line = {"field": "line", "type": "nominal"}
    legend = {"orient": kind.legend, "title": None, "labelLimit": 130, "symbolType": "stroke",
              "symbolStrokeWidth": 2, "padding": 0, "offset": 2}  # fmt: skip
    color = {"value": COLORS[0]}
    if several:
        colors = [COLORS[i % len(COLORS)] for i in range(len(runs))]
        color = {"field": "run", "type": "nominal", "scale": {"domain": list(runs), "range": colors},
                 "legend": legend if kind.legend else None}  # fmt: skip
    dash = line | {
        "scale": {"domain": list(kind.lines), "range": [[1, 0], [5, 3]][: len(kind.lines)]},
        "legend": legend if two_lines and not several else None,  # there is no room for both
    }
    shown = [{"param": "near", "empty": False, "value": 1}, {"test": "datum.few", "value": 1}]
    told = {"at": over.title, "told": "value"}
    told |= ({"line": "of"} if two_lines else {}) | ({"run": "run"} if several else {})
    return {
        "data": {"name": "points"},
        "padding": {"left": 4, "right": 8, "top": 6, "bottom": 2},
        "encoding": {
            "x": {
                "field": "x", "type": over.type,
                "scale": {"nice": False, "padding": 4} | ({"type": "utc"} if over.type == "temporal" else {}),
                "axis": {"title": over.title, "labelExpr": over.mark, "tickCount": 4, "grid": False,
                         "labelPadding": 4, "titlePadding": 2, "labelFlush": True}
                | ({"tickMinStep": over.least_step} if over.least_step else {}),
            },
            "y": value | {
                "scale": {"padding": 8}
                | ({"domain": [0, 1]} if kind.is_share else {"zero": False, "nice": True}),
                "axis": {"title": None, "labelExpr": kind.mark, "tickCount": 4, "labelPadding": 6},
            },
            "color": color,
        },
        "layer": [
            {
                "mark": {"type": "line", "strokeWidth": 2, "clip": True},
                "encoding": {"strokeDash": dash},
                "params": [{"name": "zoom", "bind": "scales", "select": _ZOOM}],
            },
            {
                "mark": {"type": "point", "filled": True, "size": 36, "clip": True},
                "encoding": {
                    "opacity": {"condition": shown, "value": 0},
                    "tooltip": [{"field": field, "title": title} for field, title in told.items()],
                    "detail": line,
                },
                "params": [{"name": "near", "select": _NEAR}],
            },
        ],
    }  # fmt: skip


# A wheel alone scrolls the page, and so does a finger.
_ZOOM = {
    "type": "interval",
    "zoom": "wheel![event.ctrlKey || event.metaKey]",
    "translate": "[pointerdown[event.pointerType === 'mouse'], window:pointerup] > window:pointermove!",
}
_NEAR = {"type": "point", "on": "pointermove", "nearest": True, "clear": "pointerout"}
