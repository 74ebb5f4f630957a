"""A progress bar of one line on stderr: how far, how fast, how long still.

    with Bar() as progress:
        predict(model, checkpoint, pictures, progress=progress)     # progress(done, total, what)

Where stderr is no terminal (a log, CI) it prints a plain line every ten seconds instead.
"""

import sys
import time
from typing import TextIO


class Bar:
    """Callable as progress(done, total, what); a total of 0 means unknown, a new `what` starts anew."""

    def __init__(self, stream: TextIO | None = None, terminal: bool | None = None):
        self.stream = stream or sys.stderr
        self.terminal = self.stream.isatty() if terminal is None else terminal
        self.what, self.line_open = None, False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.line_open:
            print(file=self.stream)  # what comes next starts on a line of its own
            self.line_open = False

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if what != self.what:
            self.__exit__()
            self.what, self.started, self.first, self.shown = what, now, done, now
        is_last = self.terminal and done == total
        if now - self.shown < (0.1 if self.terminal else 10) and not is_last:
            return
        self.shown = now
        rate = (done - self.first) / max(now - self.started, 1e-3)
        line = f"{what}: {_count(done)}"
        if total:
            line += (
                f" of {_count(total)} ({done / total:.0%}), {_count(rate) if rate >= 10 else f'{rate:.1f}'}/s"
            )
            line += f", {(total - done) / rate:,.0f} s left" if rate else ""
        print(
            f"\r{line}\033[K" if self.terminal else line, end="" if self.terminal else "\n", file=self.stream
        )
        self.stream.flush()
        self.line_open = self.terminal


def _count(number: float) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,.0f}"  # millions are bytes here
