"""Who looks at the page, where that matters: on a public host a visitor stops only what they started."""

import re
import secrets
from pathlib import Path

import streamlit as st

from train.rights import Visitor, is_public, may_all

_COOKIE, _KEY = "patchlight_visitor", "visitor"
_TOKEN_KEY, _GIVEN_KEY = "train_token", "train_token_given"
_ID = r"[A-Za-z0-9_-]{20,60}"

_remember = st.components.v2.component(
    "patchlight_visitor",
    html="<span></span>",
    js=(Path(__file__).parents[2] / "assets" / "visitor" / "visitor.js").read_text(encoding="utf-8"),
)


def visitor() -> Visitor:
    """Who this is: known again after a reload by a cookie, for a week."""
    known = st.session_state.get(_KEY)
    if known is None:
        kept = st.context.cookies.get(_COOKIE, "")
        known = st.session_state[_KEY] = (
            kept if isinstance(kept, str) and re.fullmatch(_ID, kept) else secrets.token_urlsafe(24)
        )
    return Visitor(known, st.session_state.get(_TOKEN_KEY) or "")


def about_public() -> None:
    """What is closed on a public host, and the place for the token that opens it."""
    if not is_public():
        return
    if may_all(visitor()):
        st.caption("This page is public; to you everything is open. All runs vanish when the host restarts.")
    else:
        st.caption(
            "This page is public: visitors may start the demo, one run at a time and five minutes at most, "
            "and stop their own. All runs vanish when the host restarts."
        )
    row = st.container(horizontal=True)
    with row.popover("I have the host's token", icon=":material/key:"):
        given = st.text_input("Token", type="password", key=_TOKEN_KEY, persist_state="session")
        if given != st.session_state.get(_GIVEN_KEY, ""):
            st.session_state[_GIVEN_KEY] = given
            st.rerun()  # it opens buttons all over the tab
        if st.session_state.get(_TOKEN_KEY):
            st.caption("Everything is open." if may_all(visitor()) else "This is not the host's token.")
    with row:  # it is seen by nobody, and takes no line of its own
        _remember(key="remember_visitor", data={"id": visitor().id})
