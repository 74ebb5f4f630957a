"""What a new run will cost, on the page: measured beside it once the settings have rested for a second.

    draw_estimate(config, "demo")                       # a fragment: polls while it is being measured
    estimate_for(config, "demo")                        # an Estimate, or why there is none; None: not yet
    is_pending(config, "demo")                          # whether it will come without anybody's doing

One process measures at a time, for all sessions of a server, and none while a run is at work. A session has
one wish, its newest; nobody waits: whoever asks again finds what has been measured meanwhile.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import streamlit as st

from train.config import PRESETS, TrainConfig
from train.estimate import Estimate, ask, estimate_lines
from train.seat import who_works
from vit.files import runs_folder
from vit.page.session import tell
from vit.page.view import plain

REST_SECONDS = 1.0  # that settings stay as they are before they are measured
AT_WORK = "measured when no other run is at work"
_POLL_SECONDS = 0.5
_GONE_SECONDS = 10.0  # without a question: the session is closed, or shows something else
_MOST_KEPT = 64
_KEPT_SECONDS, _KEPT_FAILURE_SECONDS = 1800.0, 60.0  # the disk fills, a busy machine calms down
_FAILED = "nothing could be measured, by an error in this page"
_KEY = "estimates_owner"
# Settings that neither time nor room depend on.
_INDIFFERENT = (
    "seed", "split_seed", "lr", "muon_lr", "weight_decay", "decay_all", "beta2", "schedule", "warmup",
    "label_smoothing",
)  # fmt: skip

Found = Estimate | str


@dataclass(frozen=True)
class _Wish:
    config: TrainConfig
    preset_name: str
    since: float  # when these settings were first asked about
    asked: float  # when last


class Estimates:
    """What is known, what is wished, and the one thread that measures."""

    def __init__(
        self,
        measure: Callable[[TrainConfig, str], Found] = ask,
        is_busy: Callable[[], bool] = lambda: who_works(runs_folder()) is not None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._measure, self._is_busy, self._clock = measure, is_busy, clock
        self._lock = threading.Lock()
        self._known: OrderedDict[TrainConfig, tuple[Found, float]] = OrderedDict()  # until when it holds
        self._wishes: dict[str, _Wish] = {}
        self._is_measuring = False

    def look(self, owner: str, config: TrainConfig, preset_name: str) -> Found | None:
        """What is known of a configuration; None where it is measured or will be, if `owner` asks again."""
        essence = _essence(config)
        with self._lock:
            if (found := self._recall(essence)) is not None:
                self._wishes.pop(owner, None)
                return found
        if self._is_busy():
            with self._lock:
                self._wishes.pop(owner, None)
            return AT_WORK
        with self._lock:
            now, before = self._clock(), self._wishes.get(owner)
            if before is None or _essence(before.config) != essence:
                before = _Wish(config, preset_name, since=now, asked=now)
            self._wishes[owner] = replace(before, asked=now)
            self._begin(now)
        return None

    def _recall(self, essence: TrainConfig) -> Found | None:
        found, until = self._known.get(essence, (None, 0.0))
        if found is not None and self._clock() > until:
            del self._known[essence]
            return None
        if found is not None:
            self._known.move_to_end(essence)
        return found

    def _begin(self, now: float) -> None:
        """Start to measure the wish that has rested longest, if any has and nothing is measured."""
        gone = [owner for owner, wish in self._wishes.items() if now - wish.asked > _GONE_SECONDS]
        for owner in gone:
            del self._wishes[owner]
        rested = [wish for wish in self._wishes.values() if now - wish.since >= REST_SECONDS]
        if rested and not self._is_measuring:
            self._is_measuring = True
            wish = min(rested, key=lambda wish: wish.since)
            threading.Thread(target=self._work, args=(wish,), name="estimate", daemon=True).start()

    def _work(self, wish: _Wish) -> None:
        found: Found = _FAILED
        disturbed = False
        try:
            found = self._measure(wish.config, wish.preset_name)
            disturbed = self._is_busy()  # a run that began meanwhile has slowed it down
        finally:
            with self._lock:
                self._is_measuring = False
                if not disturbed:
                    kept = _KEPT_FAILURE_SECONDS if isinstance(found, str) else _KEPT_SECONDS
                    self._known[_essence(wish.config)] = (found, self._clock() + kept)
                while len(self._known) > _MOST_KEPT:
                    self._known.popitem(last=False)


def _essence(config: TrainConfig) -> TrainConfig:
    """The same for all settings that cost the same."""
    return replace(config, **{name: getattr(PRESETS["fast"], name) for name in _INDIFFERENT})


@st.cache_resource(max_entries=1, show_spinner=False)
def _estimates() -> Estimates:
    return Estimates()


def estimate_for(config: TrainConfig, preset_name: str, key: str = "") -> Found | None:
    """At once: an Estimate, a sentence why there is none, or None while it rests or is measured.

    `key`: by which a session tells its forms apart, if it has several.
    """
    owner = st.session_state.setdefault(_KEY, secrets.token_hex(8))
    return _estimates().look(f"{owner} {key}", config, preset_name)


def is_pending(config: TrainConfig, preset_name: str, key: str = "") -> bool:
    """Whether to ask again soon."""
    return estimate_for(config, preset_name, key) is None


def draw_estimate(config: TrainConfig, preset_name: str) -> None:
    """Parameters, device, speed, time and disk, as soon as they are known."""
    was_pending = is_pending(config, preset_name)

    @st.fragment(run_every=_POLL_SECONDS if was_pending else None)
    def draw() -> None:
        found = estimate_for(config, preset_name)
        if was_pending and found is not None:
            st.rerun()  # to ask no more
        if found is None:
            st.caption(":material/timer: Measuring what this will cost")
        elif found == AT_WORK:
            st.caption(f":material/timer: What this will cost is {AT_WORK}.")
        elif isinstance(found, str):
            tell(st.warning, f"{found[:1].upper()}{found[1:]}")
        else:
            lines = [*estimate_lines(found), "measured now: other work on this machine slows it"]
            st.caption("  \n".join(plain(line) for line in lines))
            if found.problem:
                tell(st.error, f"{found.problem[:1].upper()}{found.problem[1:]}")

    draw()
