"""What the viewer asks of the model: heads off, patches covered, single maps, the arithmetic of a head.

    answer_requests(explained)     # a fragment: a request reruns this alone

A request is {number, kind, args, picture}; its answer {number, value} or {number, error}. The browser has
one under way at a time and drops every answer but the newest. What it sends is a stranger's: all of it is
checked.
"""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import streamlit as st
import torch

from vit.anatomy import anatomy_payload, arithmetic_payload
from vit.cause import FILLS, Change, Fill, answer, cover_most, head_effects, leave_one_out
from vit.page.explained import Explained
from vit.payload import map_payload

_KEY, _ASKED_KEY, _ANSWER_KEY = "wire", "wire_asked", "wire_answer"
_SCRIPT = Path(__file__).parents[2] / "assets" / "wire" / "wire.js"
_MOST_WEIGHTS = 2**22  # of maps in one answer, a byte each
_LARGEST_NUMBER = 2**53  # up to which JavaScript knows every whole number

_wire = st.components.v2.component("patchlight_wire", js=_SCRIPT.read_text(encoding="utf-8"))


@st.fragment
def answer_requests(explained: Explained) -> None:
    """Answer what was asked, if anything was, and send the last answer."""
    asked = st.session_state.pop(_ASKED_KEY, None)
    if asked is not None:
        st.session_state[_ANSWER_KEY] = respond(asked, explained)
    _wire(key=_KEY, data={"answer": st.session_state.get(_ANSWER_KEY)}, on_ask_change=_ask)


def _ask() -> None:
    st.session_state[_ASKED_KEY] = st.session_state[_KEY].get("ask")


def respond(request: object, explained: Explained) -> dict:
    """The answer to one request, or a sentence on why there is none."""
    if not isinstance(request, Mapping):
        return {"number": 0, "error": "That was not understood. Nothing has changed."}
    number, kind, args = request.get("number"), request.get("kind"), request.get("args")
    number = number if _is_number(number) else 0
    try:
        work = _KINDS.get(kind)
        if work is None or not isinstance(args, Mapping):
            raise ValueError("that was not understood")
        if request.get("picture") != explained.payload["id"]:
            raise ValueError("another picture has taken its place")
        return {"number": number, "value": work(explained, args)}
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        reason = f"{error}"[:200] if isinstance(error, ValueError) else "that was not understood"
        return {"number": number, "error": f"The model was not asked: {reason}. Nothing has changed."}
    except (RuntimeError, MemoryError):  # out of memory, mostly, on a GPU or off it
        return {
            "number": number,
            "error": "The model could not do that, perhaps for lack of memory. Nothing has changed.",
        }


# --- the kinds of requests


def _change(explained: Explained, args: Mapping) -> dict:
    change = Change(
        frozenset(_pair(each) for each in args["heads_off"]),
        frozenset(_whole(patch) for patch in args["covered"]),
        _fill(args),
    )
    return {"probabilities": _floats(answer(explained.loaded.model, explained.x, change))}


def _cover_most(explained: Explained, args: Mapping) -> dict:
    weights, count, fill = args["weights"], _whole(args["count"]), _fill(args)
    P = math.prod(explained.architecture.grid)
    if not isinstance(weights, Sequence) or len(weights) != P or not all(map(_is_number, weights)):
        raise ValueError(f"the weights of {P} patches are needed")
    found = cover_most(explained.loaded.model, explained.x, np.array(weights, np.float64), count, fill)
    change = Change(covered=frozenset(found.patches), fill=fill)
    return {
        "class": explained.loaded.checkpoint.class_names[found.target],
        "untouched": found.untouched,
        "most": found.most,
        "random": list(found.random),
        "patches": list(found.patches),
        "probabilities": _floats(answer(explained.loaded.model, explained.x, change)),
    }


def _leave_one_out(explained: Explained, args: Mapping) -> dict:
    patches = _part(args, math.prod(explained.architecture.grid))
    target = int(explained.probabilities.argmax())
    return {"values": _floats(leave_one_out(explained.loaded.model, explained.x, target, patches))}


def _head_effects(explained: Explained, args: Mapping) -> dict:
    H = explained.architecture.num_heads
    heads = [divmod(index, H) for index in _part(args, explained.architecture.num_layers * H)]
    target = int(explained.probabilities.argmax())
    return {"values": _floats(head_effects(explained.loaded.model, explained.x, target, heads))}


def _maps(explained: Explained, args: Mapping) -> dict:
    most = max(2, _MOST_WEIGHTS // explained.explanation.rollout[0, 0].numel())
    keys = list(args["keys"])[:most]
    if not all(isinstance(key, str) for key in keys):
        raise ValueError("maps are asked for by name")
    view = explained.view
    return {"maps": {key: map_payload(explained.explanation, key, view.fusion, view.discard) for key in keys}}


def _anatomy(explained: Explained, args: Mapping) -> dict:
    with torch.no_grad():
        return anatomy_payload(explained.loaded.model, explained.loaded.model.trace(explained.x))


def _arithmetic(explained: Explained, args: Mapping) -> dict:
    with torch.no_grad():
        trace = explained.loaded.model.trace(explained.x)
    return arithmetic_payload(trace, _whole(args["layer"]), _whole(args["head"]))


_KINDS: dict[str, Callable[[Explained, Mapping], dict]] = {
    "change": _change,
    "cover_most": _cover_most,
    "leave_one_out": _leave_one_out,
    "head_effects": _head_effects,
    "maps": _maps,
    "anatomy": _anatomy,
    "arithmetic": _arithmetic,
}


def _is_number(value: object) -> bool:
    """Whether it is a number as JavaScript sends it, neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST_NUMBER


def _whole(value: object) -> int:
    if not _is_number(value) or value != int(value):
        raise ValueError("one of its numbers is not a whole number")
    return int(value)


def _pair(value: object) -> tuple[int, int]:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ValueError("a head is named by two numbers, its layer and its own")
    return _whole(value[0]), _whole(value[1])


def _fill(args: Mapping) -> Fill:
    if args["fill"] not in FILLS:
        raise ValueError(f"patches are covered by one of {', '.join(FILLS)}")
    return args["fill"]


def _part(args: Mapping, total: int) -> range:
    start, end = _whole(args["from"]), _whole(args["to"])
    if not 0 <= start < end <= total:
        raise ValueError(f"parts lie within 0 and {total}")
    return range(start, end)


def _floats(values: torch.Tensor) -> str:
    return base64.b64encode(values.float().cpu().numpy().tobytes()).decode()
