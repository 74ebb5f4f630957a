"""The film of attention on the page: pictures, layers, heads and time, drawn in the browser.

    film = load_film(Run(path))              # the Film, or a sentence that says why there is none
    show_film([("demo", film)], key="film")  # two of them stand side by side

Time, layer and head never reach Python; the picture does, for only one picture's rows are sent. The same
films give the very same data, so that a fragment that runs each second sends nothing until a frame comes.
"""

from collections.abc import Sequence
from pathlib import Path

import streamlit as st

from train.film import Film, load
from train.film_payload import film_payload, probe_count
from train.runs import Run
from vit import viewer

NOTHING_YET = "Attention is filmed from the first step on: nothing is here yet."

_ASSETS = Path(__file__).parents[2] / "assets" / "film"


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


_player = st.components.v2.component(
    "patchlight_film",
    html='<div class="viewer film"></div>',
    css="\n".join([viewer.style("viewer"), _read("film.css")]),
    js="\n".join(
        [*map(viewer.script, ("numbers", "paint", "cells")), _read("thumbnails.js"), _read("film.js")]
    ),
)


def load_film(run: Run) -> Film | str:
    """What a run has filmed, read anew only when its file changed; or one sentence, why there is nothing."""
    try:
        found = run.film_file.stat()
        film = _loaded(str(run.film_file), found.st_mtime_ns, found.st_size)
    except FileNotFoundError:
        return NOTHING_YET
    except OSError as error:
        return f"The recording of attention cannot be read ({error})."
    except ValueError as error:  # not cached: the next look may find it whole
        return str(error)
    return film if len(film) else NOTHING_YET


@st.cache_resource(max_entries=4, show_spinner=False)
def _loaded(path: str, mtime_ns: int, size_bytes: int) -> Film:
    return load(Path(path))


def show_film(films: Sequence[tuple[str, Film]], key: str) -> None:
    """Draw one film, or two beside each other, each with its run's name. `key` is the place's on the page.

    ValueError for a film without a frame, which `load_film` never gives, and for other numbers of films.
    """
    chosen_key, sent_key = f"{key}_picture", f"{key}_sent"
    count = probe_count(films[0][1]) if films else 0

    def chosen() -> None:
        """What a person chose, before anything is drawn."""
        picture = st.session_state[key].get("picture")
        if type(picture) is int and 0 <= picture < count:
            st.session_state[chosen_key] = picture

    shown = tuple(films), st.session_state.get(chosen_key, 0)  # films are compared by identity
    if st.session_state.get(sent_key, (None,))[0] != shown:
        st.session_state[sent_key] = shown, film_payload(*shown)
    _player(key=key, data=st.session_state[sent_key][1], on_picture_change=chosen)
