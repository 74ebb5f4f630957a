"""The drawer "All heads over many pictures": one point for each head; a click opens it in the viewer."""

import numpy as np
import streamlit as st

from vit.atlas import Atlas, Head, answer, find_atlas
from vit.overlay import Style, draw, png_bytes
from vit.page.explained import Explained
from vit.page.session import change_view, forget_start, tell
from vit.page.view import plain

_KEY, _TABLE_KEY, _PICTURE_KEY = "atlas_points", "atlas_table", "atlas_picture"
_CHOSEN_KEY = "atlas_chosen"  # something outside the drawer has been changed


def heads_drawer(explained: Explained) -> None:
    """The scatter, what it says in words, the same as a table, and the head that was chosen."""
    if st.session_state.pop(_CHOSEN_KEY, False):
        st.rerun()  # the viewer lies outside this fragment
    loaded = explained.loaded
    try:
        found = find_atlas(loaded.checkpoint.id)
    except ValueError as error:
        tell(st.error, f"{error}.")
        return
    if found is None:
        st.markdown("The heads of this model have not been measured here yet. This command does it:")
        st.code(f"python -m vit atlas --checkpoint {loaded.path.as_posix()}", language="bash")
        return
    first, *sentences = answer(found)
    st.markdown(f"**Do heads specialise?** {plain(first)}")
    st.markdown("\n".join(f"- {plain(sentence)}" for sentence in sentences))
    st.plotly_chart(
        _scatter(found), key=_KEY, on_select=lambda: _open(found, _chosen_point(found)),
        selection_mode="points", config={"displayModeBar": False},
    )  # fmt: skip
    st.caption(
        "Each point is a head: the larger, the more accuracy is lost without it. Click one to open it above; "
        "in the table, tick its row."
    )
    st.dataframe(
        {
            "head": [head.name for head in found.heads],
            "distance, px": [round(head.distance_px, 1) for head in found.heads],
            "entropy, bits": [round(head.entropy_bits, 2) for head in found.heads],
            "on CLS": [round(head.cls_share, 3) for head in found.heads],
            "accuracy lost, points": [round(100 * head.accuracy_lost.mean, 1) for head in found.heads],
            "±": [round(100 * head.accuracy_lost.half, 1) for head in found.heads],
        },
        key=_TABLE_KEY,
        on_select=lambda: _open(found, _chosen_row(found)),
        selection_mode="single-row",
        height=220,
        hide_index=True,
    )
    view = explained.view
    layer, number = view.shown_layer(explained.architecture), view.head
    if number is not None and view.method == "raw":
        _one_head(found.heads[layer * explained.architecture.num_heads + number], explained)


def _one_head(head: Head, explained: Explained) -> None:
    offsets = np.array(head.offsets)
    picture, words = st.columns([1, 4])
    white = np.full((*offsets.shape, 3), 255, np.uint8)
    size_px = tuple(12 * side for side in offsets.shape)
    picture.image(
        png_bytes(draw(white, offsets, Style("heat", strength=1.0), size_px=size_px)),
        caption="by offset",
        output_format="PNG",
        alt=f"Mean attention of head {head.name} by offset; the patch that looks is in the middle",
    )
    with words:
        st.markdown(
            f"**Head {head.name}** gives most, on average, to the patch {_direction(offsets)}. In the map "
            "the patch that looks is in the middle."
        )
        st.pills(
            "Pictures in which its look is hardest at one patch",
            head.strongest,
            key=_PICTURE_KEY,
            on_change=_open_picture,
        )


def _direction(offsets: np.ndarray) -> str:
    row, column = np.unravel_index(offsets.argmax(), offsets.shape)
    down, across = int(row) - offsets.shape[0] // 2, int(column) - offsets.shape[1] // 2
    if not (down or across):
        return "itself"
    parts = [f"{abs(down)} {'below' if down > 0 else 'above'}"] if down else []
    parts += [f"{abs(across)} to the {'right' if across > 0 else 'left'}"] if across else []
    return " and ".join(parts)


def _scatter(found: Atlas):
    import plotly.graph_objects as go

    most = max(max(head.accuracy_lost.mean for head in found.heads), 1e-9)
    figure = go.Figure(
        go.Scatter(
            x=[head.distance_px for head in found.heads],
            y=[head.entropy_bits for head in found.heads],
            mode="markers+text",
            text=[head.name for head in found.heads],
            textposition="top center",
            textfont={"size": 10},
            marker={
                "size": [8 + 22 * max(0.0, head.accuracy_lost.mean) / most for head in found.heads],
                "color": [head.layer for head in found.heads],
                "colorscale": "Cividis",
                "colorbar": {"title": "layer"},
                "line": {"width": 1, "color": "#888"},
            },
            customdata=[[100 * head.accuracy_lost.mean, 100 * head.cls_share] for head in found.heads],
            hovertemplate="head %{text}: %{x:.1f} px, %{y:.2f} bits, %{customdata[1]:.0f} % on CLS, "
            "%{customdata[0]:+.1f} points lost without it<extra></extra>",
        )
    )
    figure.update_layout(
        xaxis_title="mean distance, in pixels", yaxis_title="entropy, in bits", height=380,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
    )  # fmt: skip
    return figure


def _chosen_point(found: Atlas) -> Head | None:
    points = st.session_state[_KEY]["selection"]["point_indices"]
    return found.heads[points[0]] if points else None


def _chosen_row(found: Atlas) -> Head | None:
    rows = st.session_state[_TABLE_KEY]["selection"]["rows"]
    return found.heads[rows[0]] if rows else None


def _open(found: Atlas, head: Head | None) -> None:
    """Show this head in the viewer: where CLS looks by it alone."""
    if head is not None:
        change_view(method="raw", layer=head.layer - 1, head=head.head - 1, token="cls", looked_at=False)
        forget_start()
        st.session_state[_CHOSEN_KEY] = True


def _open_picture() -> None:
    if chosen := st.session_state[_PICTURE_KEY]:
        change_view(picture=f"test:{chosen}")
        st.session_state[_CHOSEN_KEY] = True
