"""The viewer in the browser: it gets one payload for each picture, and says what was chosen in it.

    show_viewer(explained)      # draws it; a pinned token, layer, head or mode comes back into the view

Pointing never reaches Python. Requests that need the model have a line of their own (vit/page/requests.py).
"""

from collections.abc import Mapping

import streamlit as st

from vit import viewer
from vit.page.explained import Explained
from vit.page.session import START_KEY, current_view, keep_view

_KEY = "viewer"

_viewer = st.components.v2.component(
    "patchlight_viewer", html=viewer.html(), css=viewer.css(), js=viewer.js()
)


def show_viewer(explained: Explained) -> None:
    """Draw the picture, the answer, all heads, and their controls."""
    data, architecture = explained.payload, explained.architecture
    # The view of the moment when the picture came up: were it always the current one, each pin would change
    # the payload, and all maps would be sent again. Back from another tab, the viewer is a new one.
    start = st.session_state.get(START_KEY)
    if start is None or start[0] != data["id"] or _KEY not in st.session_state:
        start = st.session_state[START_KEY] = data["id"], explained.view.all_params()

    def chosen() -> None:
        """What a person chose, into the session's view; judged there as strictly as a link."""
        said = st.session_state[_KEY].get("view")
        if isinstance(said, Mapping):
            keep_view(current_view().with_params(said, architecture))

    _viewer(key=_KEY, data=data | {"view": start[1]}, default={"view": None}, on_view_change=chosen)
