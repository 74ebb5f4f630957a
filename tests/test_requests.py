"""What the viewer asks of the model is answered by the library's numbers; whatever else comes, by a sentence.

Run: pytest tests/test_requests.py (some seconds).
"""

import base64
import itertools
import json
import math
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

import vit
from vit import anatomy, cause
from vit.cause import FILLS, Change
from vit.checkpoint import BUNDLED
from vit.page.explained import explain_picture
from vit.page.models import Loaded
from vit.page.pictures import find_picture
from vit.page.requests import respond
from vit.page.view import View
from vit.payload import map_payload

KINDS = ["change", "cover_most", "leave_one_out", "head_effects", "maps", "anatomy", "arithmetic"]


@pytest.fixture(scope="module")
def explained():
    """The bundled model's view of a cat, with settings other than the default."""
    model, checkpoint = vit.load(BUNDLED)
    view = View(picture="sample:cat_00", fusion="max", discard=0.5, token="3,5", layer=1)
    shown = find_picture(view.picture, "cifar10", checkpoint.architecture.img_size, view.fit)
    return explain_picture(view, Loaded(model.requires_grad_(False), checkpoint, BUNDLED), shown)


def asked(explained, kind: str, number: float = 7, **args) -> dict:
    """The answer as the browser gets it."""
    answer = respond(
        {"number": number, "kind": kind, "args": args, "picture": explained.payload["id"]}, explained
    )
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    assert answer.keys() == {"number", "value"}, answer
    assert answer["number"] == number
    return answer["value"]


def floats(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def target_of(explained) -> int:
    return int(explained.probabilities.argmax())


# --- the model's answers


@pytest.mark.parametrize("fill", FILLS)
def test_a_change_is_answered_layer_by_layer(explained, fill):
    x, model = explained.x, explained.loaded.model
    value = asked(explained, "change", heads_off=[[2, 0], [5, 7], [2, 0]], covered=[9, 10.0, 63], fill=fill)
    expected = cause.answer(model, x, Change(frozenset({(2, 0), (5, 7)}), frozenset({9, 10, 63}), fill))
    found = floats(value["probabilities"]).reshape(6, 10)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    untouched = floats(asked(explained, "change", heads_off=[], covered=[], fill=fill)["probabilities"])
    np.testing.assert_allclose(untouched[-10:], model(x).softmax(-1)[0], atol=1e-6)
    assert np.abs(found.ravel() - untouched).max() > 1e-3


@pytest.mark.parametrize("everything", [{"heads_off": []}, {"covered": []}], ids=["patches", "heads"])
def test_everything_may_be_taken_away(explained, everything):
    args = {
        "heads_off": [[layer, head] for layer in range(6) for head in range(8)],
        "covered": list(range(64)),
    }
    value = asked(explained, "change", **args | everything, fill="removed")
    np.testing.assert_allclose(floats(value["probabilities"]).reshape(6, 10).sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("fill", FILLS)
def test_the_most_looked_at_are_covered(explained, fill):
    weights = np.random.default_rng(1).random(64)
    value = asked(explained, "cover_most", weights=weights.tolist(), count=12, fill=fill)
    expected = cause.cover_most(explained.loaded.model, explained.x, weights, 12, fill)
    assert value["class"] == explained.class_name
    assert value["patches"] == list(expected.patches) == np.argsort(-weights)[:12].tolist()
    assert value["untouched"] == pytest.approx(explained.probabilities.max(), abs=1e-5)
    assert value["most"] == pytest.approx(expected.most, abs=1e-6)
    assert value["random"] == pytest.approx(expected.random, abs=1e-6)
    last = floats(value["probabilities"]).reshape(6, 10)[-1]
    assert last[target_of(explained)] == pytest.approx(value["most"], abs=1e-5)


def test_parts_join_to_the_whole(explained):
    model, x, target = explained.loaded.model, explained.x, target_of(explained)
    for kind, count, whole in (
        ("leave_one_out", 64, cause.leave_one_out(model, x, target)),
        ("head_effects", 48, cause.head_effects(model, x, target).flatten()),
    ):
        cuts = [0, 1, 20, 33, count]
        parts = [
            floats(asked(explained, kind, **{"from": start, "to": end})["values"])
            for start, end in itertools.pairwise(cuts)
        ]
        assert [len(part) for part in parts] == np.diff(cuts).tolist()
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)
        assert np.ptp(whole.numpy()) > 1e-3


def test_maps_are_those_of_the_picture_as_it_is_fused(explained):
    keys = ["raw/3/5", "raw/0/all", "rollout/4"]
    value = asked(explained, "maps", keys=keys)
    assert list(value["maps"]) == keys
    for key in keys:
        assert value["maps"][key] == map_payload(explained.explanation, key, "max", explained.view.discard)
    assert value["maps"]["raw/0/all"] != map_payload(explained.explanation, "raw/0/all", "mean")
    other = replace(explained, view=replace(explained.view, fusion="mean"))
    assert asked(other, "maps", keys=["raw/0/all"])["maps"]["raw/0/all"] == map_payload(
        explained.explanation, "raw/0/all", "mean"
    )
    assert asked(explained, "maps", keys=[]) == {"maps": {}}


def test_the_anatomy_and_the_arithmetic_are_the_model_s(explained):
    model = explained.loaded.model
    with torch.no_grad():
        trace = model.trace(explained.x)
    expected = json.loads(json.dumps(anatomy.anatomy_payload(model, trace)))
    assert json.loads(json.dumps(asked_loosely(explained, "anatomy"))) == expected
    value = asked(explained, "arithmetic", layer=2, head=7)
    assert value == anatomy.arithmetic_payload(trace, 2, 7)
    q, k = (floats(value[name]).reshape(65, 32) for name in "qk")
    weights = np.exp(q @ k.T / math.sqrt(32))
    row = explained.explanation.attention[0, 2, 7]
    np.testing.assert_allclose(weights / weights.sum(-1, keepdims=True), row, atol=1e-5)


def asked_loosely(explained, kind: str, **args) -> dict:
    """Tuples among its parts become lists only on the way to the browser."""
    request = {"number": 7, "kind": kind, "args": args, "picture": explained.payload["id"]}
    return respond(request, explained)["value"]


def test_nothing_is_changed_by_asking(explained):
    model, payload = explained.loaded.model, json.dumps(explained.payload)
    model.train()
    try:
        for kind, args in GOOD.items():
            assert asked_loosely(explained, kind, **args) == asked_loosely(explained, kind, **args)
        assert model.training
    finally:
        model.eval()
    assert json.dumps(explained.payload) == payload


# --- everything else

GOOD = {
    "change": {"heads_off": [[0, 1]], "covered": [3], "fill": "mean"},
    "cover_most": {"weights": [1 / 64] * 64, "count": 3, "fill": "removed"},
    "leave_one_out": {"from": 0, "to": 4},
    "head_effects": {"from": 0, "to": 4},
    "maps": {"keys": ["raw/0/0"]},
    "anatomy": {},
    "arithmetic": {"layer": 0, "head": 0},
}
NO_NUMBERS = [True, None, "1", [], {}, -1, 0.5, math.nan, math.inf, -math.inf, 10**400, -(10**5000), 2**53]
BAD = [
    *[("change", {"heads_off": [[layer, 0]]}) for layer in [*NO_NUMBERS, 6]],
    *[("change", {"heads_off": [[0, head]]}) for head in [*NO_NUMBERS, 8]],
    *[("change", {"heads_off": each}) for each in (None, 7, "ab", {"a": 1}, [[]], [[1]], [[1, 2, 3]], [1])],
    *[("change", {"covered": [patch]}) for patch in [*NO_NUMBERS, 64]],
    *[("change", {"covered": each}) for each in (None, 7, "ab", {"a": 1}, [[1]])],
    *[("change", {"fill": fill}) for fill in (None, 0, "", "black", ["mean"], {"mean": 1}, "x" * 10**6)],
    *[("cover_most", {"count": count}) for count in [*NO_NUMBERS, 65]],
    *[("cover_most", {"weights": [0.5] * 63 + [w]}) for w in (None, "1", True, math.nan, [1], 2**53)],
    *[("cover_most", {"weights": each}) for each in (None, "a" * 64, {}, [1] * 63, [1] * 10**6, [[1]] * 64)],
    *[("cover_most", {"fill": fill}) for fill in (None, "black", ["mean"])],
    *[("leave_one_out", {end: value}) for end in ("from", "to") for value in [*NO_NUMBERS, 65]],
    *[("head_effects", {end: value}) for end in ("from", "to") for value in [*NO_NUMBERS, 49]],
    ("leave_one_out", {"from": 4, "to": 4}),
    ("leave_one_out", {"from": 5, "to": 4}),
    *[("maps", {"keys": [key]}) for key in (None, 7, [], "raw/6/0", "raw/0/8", "x" * 10**6, "../../etc")],
    *[("maps", {"keys": each}) for each in (None, 7, True, "raw/0/0", {"a": 1})],
    *[("arithmetic", {"layer": layer}) for layer in [*NO_NUMBERS, 6]],
    *[("arithmetic", {"head": head}) for head in [*NO_NUMBERS, 8]],
]  # fmt: skip


def refused(request, explained) -> str:
    """What people read; a request that cannot be used costs nothing, and never raises."""
    start = time.perf_counter()
    answer = respond(request, explained)
    assert time.perf_counter() - start < 2
    assert answer.keys() == {"number", "error"}, answer
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
    sentence = answer["error"]
    assert sentence[0].isupper()
    assert sentence.endswith("Nothing has changed.")
    assert len(sentence) < 300
    python = r"unpack|convert|iter|object|type|array|shape|int\b|float|string|limit|Error|None|subscript"
    assert not re.search(python, sentence), sentence
    return sentence


@pytest.mark.parametrize(
    ("kind", "wrong"), BAD, ids=lambda value: str(value)[:50] if isinstance(value, str) else ""
)
def test_what_cannot_be_used_is_told_in_words(explained, kind, wrong):
    request = {"number": 7, "kind": kind, "args": GOOD[kind] | wrong, "picture": explained.payload["id"]}
    refused(request, explained)
    assert respond(request, explained)["number"] == 7


@pytest.mark.parametrize("kind", [kind for kind in KINDS if GOOD.get(kind)])
def test_what_is_missing_is_told_in_words(explained, kind):
    for name in GOOD[kind]:
        args = {other: value for other, value in GOOD[kind].items() if other != name}
        refused({"number": 7, "kind": kind, "args": args, "picture": explained.payload["id"]}, explained)


def test_every_kind_is_answered_here():
    assert sorted(GOOD) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_for_another_picture_is_refused_whatever_it_asks(explained, kind):
    for picture in (
        "0" * 16,
        None,
        7,
        explained.payload["id"][:-1],
        [explained.payload["id"]],
        "sample:cat_00",
    ):
        request = {"number": 7, "kind": kind, "args": GOOD[kind], "picture": picture}
        assert "another picture has taken its place" in refused(request, explained)


@pytest.mark.parametrize(
    "kind", [None, 7, "", "Change", "changes", "__class__", [], {}, ["change"], "x" * 10**6]
)
def test_unknown_kinds_are_refused(explained, kind):
    for args in ({}, GOOD["change"]):
        refused({"number": 7, "kind": kind, "args": args, "picture": explained.payload["id"]}, explained)


@pytest.mark.parametrize("args", [None, 7, "args", [], [["layer", 0], ["head", 0]], True])
def test_arguments_that_are_none_are_refused(explained, args):
    refused({"number": 7, "kind": "arithmetic", "args": args, "picture": explained.payload["id"]}, explained)


@pytest.mark.parametrize("request_", [None, 7, "ask", [], [{"number": 7}], True, {}, {"number": 7}, math.nan])
def test_what_is_no_request_is_refused(explained, request_):
    refused(request_, explained)


@pytest.mark.parametrize("number", [None, True, "7", [7], {}, math.nan, math.inf, 10**400])
def test_a_number_that_is_none_is_answered_as_0(explained, number):
    request = {"number": number, "kind": "arithmetic", "args": GOOD["arithmetic"]}
    assert respond(request | {"picture": explained.payload["id"]}, explained)["number"] == 0
    assert respond(request, explained)["number"] == 0


def test_a_failure_of_the_machine_is_told_in_words(explained, monkeypatch):
    from vit.page import requests

    for error in (RuntimeError("CUDA out of memory at 0x7f"), MemoryError(), torch.OutOfMemoryError("x")):

        def fail(*args, error=error):
            raise error

        monkeypatch.setattr(requests, "answer", fail)
        request = {"number": 7, "kind": "change", "args": GOOD["change"], "picture": explained.payload["id"]}
        assert "lack of memory" in refused(request, explained)


JUNK = some.recursive(
    some.none()
    | some.booleans()
    | some.integers()
    | some.floats()
    | some.text(max_size=5)
    | some.sampled_from(["removed", "mean", "raw/0/0", 0, 1, 2, 3.0, 63, 64]),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
NAMES = some.sampled_from(sorted({name for args in GOOD.values() for name in args}))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some.sampled_from(KINDS), some.dictionaries(NAMES, JUNK, max_size=6), JUNK)
def test_junk_is_answered_and_never_raises(explained, kind, junk, number):
    request = {"number": number, "kind": kind, "args": GOOD[kind] | junk, "picture": explained.payload["id"]}
    answer = respond(request, explained)
    json.dumps(answer, allow_nan=False)
    if "value" not in answer:
        refused(request, explained)


@settings(max_examples=200, deadline=None)
@given(JUNK)
def test_junk_in_place_of_a_request_is_refused(explained, junk):
    refused(junk, explained)


def test_depth_is_no_danger(explained):
    deep: list = []
    for _ in range(50_000):
        deep = [deep]
    for kind in KINDS:
        for name in GOOD[kind]:
            args = GOOD[kind] | {name: deep}
            answer = respond(
                {"number": 7, "kind": kind, "args": args, "picture": explained.payload["id"]}, explained
            )
            assert answer["error"].endswith("Nothing has changed.")
    for name in ("number", "kind", "args", "picture"):
        request = {"number": 7, "kind": "anatomy", "args": {}, "picture": explained.payload["id"]} | {
            name: deep
        }
        answer = respond(request, explained)
        assert answer["number"] in (0, 7)


@pytest.mark.parametrize(("most_weights", "maps"), [(3 * 65 * 65, 3), (3 * 65 * 65 - 1, 2), (1, 2)])
def test_an_answer_holds_as_many_maps_as_are_small_enough(explained, monkeypatch, most_weights, maps):
    monkeypatch.setattr("vit.page.requests._MOST_WEIGHTS", most_weights)
    keys = [f"rollout/{layer}" for layer in range(6)]
    assert list(asked(explained, "maps", keys=keys)["maps"]) == keys[:maps]  # the rest is asked for again


def test_long_lists_are_cut_or_refused_before_they_cost_anything(explained):
    heads, covered = [[0, 0]] * 100_000, [0] * 100_000
    start = time.perf_counter()
    value = asked(explained, "change", heads_off=heads, covered=covered, fill="removed")
    short = asked(explained, "change", heads_off=heads[:1], covered=covered[:1], fill="removed")
    assert value == short
    every = [f"raw/{layer}/{head}" for layer in range(6) for head in range(8)]
    maps = asked(explained, "maps", keys=every * 5000)["maps"]
    assert set(maps) == set(every)
    assert time.perf_counter() - start < 10
