"""The view in the session and in the URL.

A widget that is bound to the URL loses its value when it is not drawn (another tab). So no widget owns a
value here: each is set from the view before it is drawn, and writes to the view when a person moves it.
"""

from dataclasses import replace

import streamlit as st

from vit.page.view import View, plain

_KEY = "view"
_DATA_KEY = "data_set"
START_KEY = "viewer_start"  # the view that the viewer was last told


def tell(show, text: str) -> None:
    """`st.error`, `st.warning` or `st.info`, with text that may hold a stranger's words: none of it acts."""
    icons = {st.error: ":material/error:", st.warning: ":material/warning:", st.info: ":material/info:"}
    show(plain(text), icon=icons[show])


def is_new_session() -> bool:
    """Whether nothing was shown yet: what the view holds now comes from a link."""
    return _KEY not in st.session_state


def current_view() -> View:
    """The session's view; at its first run, what the link asks for."""
    if is_new_session():
        st.session_state[_KEY], problems = View.from_params(st.query_params.to_dict())
        if problems:
            parts = "This part" if len(problems) == 1 else "These parts"
            st.toast(
                f"{parts} of the link could not be used: {', '.join(problems)}. The rest is as it says.",
                icon=":material/link_off:",
                duration="long",
            )
    return st.session_state[_KEY]


def change_view(**changes) -> None:
    """Change some fields from a callback, that is before anything is drawn."""
    st.session_state[_KEY] = replace(current_view(), **changes)


def keep_view(view: View) -> None:
    """Change the whole view from a callback."""
    st.session_state[_KEY] = view


def forget_start() -> None:
    """Let the viewer take the view that Python has chosen, though its picture stays (vit/page/viewer.py)."""
    st.session_state.pop(START_KEY, None)


def set_view(view: View) -> None:
    """Keep the view and write it to the URL; other parameters, as the tab's, are left alone."""
    st.session_state[_KEY] = view
    wanted, shown = view.to_params(), st.query_params.to_dict()
    for name in View.__dataclass_fields__:
        if name in wanted and shown.get(name) != wanted[name]:
            st.query_params[name] = wanted[name]
        elif name in shown and name not in wanted:
            del st.query_params[name]


def data_before(data: str) -> str | None:
    """The data set whose pictures were offered at the run before, None at the first; keeps this one."""
    before = st.session_state.get(_DATA_KEY)
    st.session_state[_DATA_KEY] = data
    return before


def control(widget, field: str, *args, to_widget=None, from_widget=None, **options):
    """Draw `widget` for one field of the view. The two functions translate between field and widget."""
    key = f"view_{field}"
    value = getattr(current_view(), field)
    st.session_state[key] = to_widget(value) if to_widget else value

    def moved() -> None:
        chosen = st.session_state[key]
        change_view(**{field: from_widget(chosen) if from_widget else chosen})

    return widget(*args, key=key, on_change=moved, **options)
