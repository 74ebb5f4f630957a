"""How far to trust the answer to a picture of one's own."""

import streamlit as st

from vit.page.explained import Explained
from vit.page.view import plain
from vit.words import percent

_UNLIKE_BELOW = 0.01  # a largest logit below that of 99 % of held-out pictures


def about_own_pictures(explained: Explained) -> None:
    """Which classes there are, and how strong this answer is beside those to the test pictures."""
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
