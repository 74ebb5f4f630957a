"""Who may do what to runs: at home everybody everything, on a public host visitors watch, and little more.

    require_start(visitor, "demo", config)      # RunError, one sentence, unless this visitor may
    require_stop(visitor, run)

A host is public where SPACE_ID is set (Hugging Face Spaces sets it) or PATCHLIGHT_PUBLIC is 1. Who knows
PATCHLIGHT_TRAIN_TOKEN may do everything there too. `visitor` is None for whoever has the machine itself: the
command line and Python. The launcher asks here, whatever a page has shown.
"""

import hashlib
import hmac
import json
import os
from dataclasses import dataclass, replace

from train.config import PRESETS, TrainConfig
from train.runs import Run, RunError

PUBLIC_MINUTES, PUBLIC_MB = 5.0, 200


@dataclass(frozen=True)
class Visitor:
    """Somebody at the page: what their browser is known by, and the token that they gave."""

    id: str = ""
    token: str = ""

    @property
    def mark(self) -> str:
        """What is kept of them beside a run: enough to know them again, not enough to be them."""
        return hashlib.sha256(self.id.encode()).hexdigest()[:24] if self.id else ""


def is_public() -> bool:
    return bool(os.environ.get("SPACE_ID")) or os.environ.get("PATCHLIGHT_PUBLIC", "") not in ("", "0")


def may_all(visitor: Visitor | None) -> bool:
    """Whether nothing is closed to them."""
    token = os.environ.get("PATCHLIGHT_TRAIN_TOKEN", "")
    knows_it = bool(visitor and token) and hmac.compare_digest(visitor.token.encode(), token.encode())
    return visitor is None or not is_public() or knows_it


def limited(config: TrainConfig) -> TrainConfig:
    """The same run, ended where a public host ends it."""
    return replace(config, stop_minutes=PUBLIC_MINUTES, stop_mb=PUBLIC_MB)


def require_start(visitor: Visitor | None, preset_name: str, config: TrainConfig) -> None:
    """RunError unless this visitor may start a run with these settings."""
    if may_all(visitor):
        return
    _require_somebody(visitor)
    allowed = limited(replace(PRESETS["demo"], seed=config.seed))
    if preset_name != "demo" or limited(config) != allowed:
        raise RunError("on this public page only the preset demo can be started, as it is")


def require_stop(visitor: Visitor | None, run: Run) -> None:
    """RunError unless this visitor may stop the run: on a public host, the one who started it."""
    if may_all(visitor):
        return
    _require_somebody(visitor)
    if not visitor.mark or visitor_of(run) != visitor.mark:
        raise RunError("on this public page a run can be stopped only by who started it")


def require_all(visitor: Visitor | None, what: str) -> None:
    """RunError unless everything is open to this visitor; `what`: as in "delete a run"."""
    if not may_all(visitor):
        raise RunError(f"on this public page nobody can {what} without the host's token")


def visitor_of(run: Run) -> str:
    """The mark of the visitor who started a run on a public host; "" for every other run."""
    try:
        found = json.loads(run.launch_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    mark = found.get("visitor") if isinstance(found, dict) else None
    return mark if isinstance(mark, str) else ""


def _require_somebody(visitor: Visitor) -> None:
    if not visitor.id:
        raise RunError("this page does not know you yet: reload it")
