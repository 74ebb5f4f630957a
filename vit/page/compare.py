"""The drawer "Compare methods": six ways, or all, to say where an answer came from, each with its score."""

import numpy as np
import streamlit as st

from vit.faithfulness import PictureScore, score_picture
from vit.methods import METHODS, as_shares, relevance
from vit.overlay import Style, draw, png_bytes
from vit.page.explained import Explained
from vit.page.session import tell
from vit.page.view import plain
from vit.removal import REMOVALS
from vit.scoreboard import CEILING, Scores, chosen_scores

USEFUL = 6
_ACROSS = 3
_PANEL_PX = 224
_ORDERS = 20
_HIDDEN = {
    "removed": "removed as tokens",
    "mean": "filled with the mean colour",
    "blur": "blurred",
    "neighbours": "filled from their neighbours",
}


def compare_drawer(explained: Explained) -> None:
    """Panels on one shared scale, best method first, with curve and score for this picture."""
    names = explained.loaded.checkpoint.class_names
    predicted = int(explained.probabilities.argmax())
    scores = chosen_scores(explained.loaded.checkpoint.id)
    ranked = [
        row.method for row in scores.methods if row.method != CEILING and not METHODS[row.method].is_baseline
    ]
    st.markdown(_which_to_believe(scores, explained))
    left, middle, right = st.columns(3)
    target = left.selectbox(
        "Explain the class", range(len(names)), index=predicted, format_func=lambda k: plain(names[k]),
        key=f"compare_target_{explained.shown.name}_{explained.loaded.checkpoint.id}",
    )  # fmt: skip
    others = [None, *(k for k in range(len(names)) if k != target)]
    versus = middle.selectbox(
        "rather than", others, format_func=lambda k: "any other" if k is None else plain(names[k]),
        key=f"compare_versus_{explained.shown.name}_{explained.loaded.checkpoint.id}_{target}",
    )  # fmt: skip
    removal = right.selectbox(
        "For the score, patches are", REMOVALS, format_func=_HIDDEN.get, key="compare_removal",
        help="No way to hide patches is neutral: believe what holds under several.",
    )  # fmt: skip
    show_all = st.toggle(f"All {len(METHODS)} methods, baselines too", key="compare_all")
    methods = tuple(ranked + [m for m in METHODS if m not in ranked]) if show_all else tuple(ranked[:USEFUL])
    key = (explained.loaded.checkpoint.id, explained.shown.name, explained.view.fit, target, versus, methods)
    maps, problems = _maps(key, explained)
    for problem in problems:
        tell(st.info, problem)
    # the curves are of the class first predicted: for another class they would measure something else
    scored = _scores(key, removal, maps, explained) if target == predicted and versus is None else None
    if scored is None:
        st.caption("Scores are for the class that the model predicts, against no other.")
    shares = {method: as_shares(values) for method, values in maps.items()}
    top = max(float(values.max()) for values in shares.values())
    for start in range(0, len(shares), _ACROSS):
        for column, method in zip(st.columns(_ACROSS), list(shares)[start : start + _ACROSS], strict=False):
            with column:
                _panel(method, shares[method], top, scored, explained, plain(names[target]))


def _which_to_believe(scores: Scores, explained: Explained) -> str:
    best = scores.default
    is_own = scores.checkpoint_id == explained.loaded.checkpoint.id
    whose = "this model" if is_own else f"another model, {scores.model}"
    text = "Which map should one believe? None is a full explanation, and they differ. "
    if best is None:
        return text
    row = next(row for row in scores.methods if row.method == best)
    others = sum(other.against_random != "ceiling" for other in scores.methods) - 1
    return text + (
        f"On {scores.pictures:,} training pictures of {plain(whose)}, **{METHODS[best].title}** ranked the "
        f"patches best: clearly better than {len(row.better_than)} of {others} others, so it stands first."
    )


def _panel(
    method: str, shares: np.ndarray, top: float, scored: PictureScore | None, explained: Explained, name: str
) -> None:
    what, canvas = METHODS[method], explained.shown.canvas
    scale = _PANEL_PX / max(canvas.shape[:2])
    size_px = tuple(max(1, round(scale * side)) for side in canvas.shape[:2])
    st.image(
        png_bytes(draw(canvas, shares, Style(), size_px=size_px, top=top or None)),
        output_format="PNG",
        width="stretch",
        alt=f"{explained.shown.title}, lit by {what.title}",
    )
    st.markdown(f"**{what.title}**, {'for ' + name if what.class_specific else 'the same for every class'}")
    if scored is not None:
        mine = float(scored.methods[method].difference[0])
        drawn = scored.random.difference[:, 0].tolist()
        st.caption(
            f"score {mine:+.2f}; random orders {min(drawn):+.2f} to {max(drawn):+.2f}".replace("-", "−")
        )
        st.plotly_chart(
            _curves(method, scored), key=f"compare_curve_{method}", config={"displayModeBar": False}
        )
    with st.popover("What it means", width="stretch"):
        st.markdown(f"{what.means}\n\n**Where it fails:** {what.fails}\n\n{plain(what.source)}")


def _curves(method: str, scored: PictureScore):
    import plotly.graph_objects as go

    curve = scored.methods[method]
    share = [100 * count / curve.counts[-1] for count in curve.counts]
    figure = go.Figure()
    for name, values, dash in (
        ("as they come", curve.insertion, "solid"),
        ("as they go", curve.deletion, "dot"),
    ):
        figure.add_trace(
            go.Scatter(
                x=share, y=[100 * float(value) for value in values[0]], name=name,
                line={"dash": dash, "color": "#2b7fc4" if dash == "solid" else "#be6a00"},
                hovertemplate="%{x:.0f} % of patches: %{y:.0f} %<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(
        height=170, margin={"l": 4, "r": 4, "t": 24, "b": 4},
        xaxis={"title": {"text": "most relevant patches, %", "font": {"size": 11}}},
        yaxis={"range": [-3, 103], "ticksuffix": " %"},
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "font": {"size": 10}},
    )  # fmt: skip
    return figure


@st.cache_resource(max_entries=32, show_spinner="Explaining by each method")
def _maps(key: tuple, _explained: Explained) -> tuple[dict[str, np.ndarray], list[str]]:
    """(GY, GX) of each method that fits the model, and a sentence for each that does not."""
    *_, target, versus, methods = key
    model, maps, problems = _explained.loaded.model, {}, []
    for method in methods:
        try:
            found = relevance(model, _explained.x, method, target, versus)[0]
        except ValueError as error:
            problems.append(f"{METHODS[method].title} is left out: {error}.")
            continue
        maps[method] = found.unflatten(-1, model.grid).cpu().numpy()
    return maps, problems


@st.cache_resource(max_entries=32, show_spinner="Hiding patches, to score the maps")
def _scores(key: tuple, removal: str, _maps: dict[str, np.ndarray], _explained: Explained) -> PictureScore:
    import torch

    maps = {method: torch.from_numpy(values)[None] for method, values in _maps.items()}
    return score_picture(_explained.loaded.model, _explained.x, maps, removal, orders=_ORDERS)
