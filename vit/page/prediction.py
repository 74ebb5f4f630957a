"""What the model says: the class, the probabilities, and how far to trust it on a picture of one's own."""

import html

import streamlit as st

from vit.overlay import ACCENT
from vit.page.explained import Explained
from vit.page.view import plain
from vit.words import percent

_BARS = 5
_LABEL_LETTERS = 24
_UNLIKE_BELOW = 0.01  # a largest logit below that of 99 % of held-out pictures


def show_prediction(explained: Explained) -> None:
    """The class in words, bars of the most probable classes, the true label where it is known."""
    probability = float(explained.probabilities.max())
    verdict = f"**{plain(explained.class_name)}** {percent(probability)}"
    if (truth := explained.shown.true_class) is not None:
        mark = ":material/check:" if truth == explained.class_name else ":material/close:"
        if truth not in explained.loaded.checkpoint.class_names:
            mark = ""  # a model cannot be wrong about classes that it was never told of
        verdict += f" &nbsp; {mark} true label: {plain(truth)}"
    st.markdown(verdict)
    st.plotly_chart(
        _bars(explained),
        key="probabilities",
        config={"displayModeBar": False, "staticPlot": True},
        alt=_in_words(explained),
    )
    if explained.shown.is_own:
        _about_own_pictures(explained)


def _bars(explained: Explained):
    import plotly.graph_objects as go

    order = explained.probabilities.argsort()[::-1][:_BARS][::-1]  # plotly draws from the bottom up
    shares = explained.probabilities[order]
    # positions as numbers and names as labels: names may be digits, equal once shortened, or HTML
    places = list(range(len(order)))
    names = [html.escape(_shortened(explained.loaded.checkpoint.class_names[k])) for k in order]
    figure = go.Figure(
        go.Bar(
            x=shares, y=places, orientation="h", text=[percent(share) for share in shares],
            textposition="outside", cliponaxis=False, marker_color=ACCENT,
        )
    )  # fmt: skip
    # as in config.toml: Streamlit's own grey for charts is too faint on white for small text
    ink = "#eceae6" if st.context.theme.type == "dark" else "#14161a"
    figure.update_layout(
        height=24 * _BARS + 8, margin={"l": 0, "r": 48, "t": 4, "b": 4}, bargap=0.35, uirevision="constant",
        font={"color": ink},
        xaxis={"range": [0, 1], "visible": False},
        yaxis={"automargin": True, "ticksuffix": " ", "tickfont": {"color": ink}, "type": "linear",
               "tickvals": places, "ticktext": names},
    )  # fmt: skip
    return figure


def _shortened(name: str) -> str:
    return name if len(name) <= _LABEL_LETTERS else f"{name[: _LABEL_LETTERS - 1]}…"


def _in_words(explained: Explained) -> str:
    order = explained.probabilities.argsort()[::-1][:_BARS]
    names = explained.loaded.checkpoint.class_names
    return "Probabilities: " + ", ".join(
        f"{names[k]} {percent(explained.probabilities[k])}" for k in order.tolist()
    )


def _about_own_pictures(explained: Explained) -> None:
    names = explained.loaded.checkpoint.class_names
    st.caption(
        f"This model knows {len(names)} classes ({plain(', '.join(names))}); your picture may be none of "
        "them, and it will still name one."
    )
    largest = float(explained.explanation.logits[0].max())
    percentile = explained.loaded.checkpoint.top_logit_percentile(largest)
    if percentile is None:
        return
    st.caption(f"Its strongest answer is stronger than that to {percent(percentile)} of the test pictures.")
    if percentile <= _UNLIKE_BELOW:
        st.warning(
            "Unlike the pictures it was tested on: its strongest answer is weaker than on 99 % of them.",
            icon=":material/help:",
        )
