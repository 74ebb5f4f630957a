"""The time that a run has spent in steps, and times in words.

clock = Clock(seconds_before, "cpu")
clock.pause(); evaluate(); clock.resume()
clock.seconds()
"""

import time

import torch


class Clock:
    """Seconds spent in steps: what a GPU still has to do counts, what is paused does not."""

    def __init__(self, spent: float, kind: str):
        self.spent, self.kind, self.since = spent, kind, time.perf_counter()

    def seconds(self) -> float:
        return self.spent + (time.perf_counter() - self.since if self.since is not None else 0.0)

    def pause(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize()
        self.spent, self.since = self.seconds(), None

    def resume(self) -> None:
        self.since = time.perf_counter()


def in_words(seconds: float) -> str:
    """Seconds, minutes or hours, whichever is easiest to grasp."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
