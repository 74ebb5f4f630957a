"""SIGTERM and Ctrl-C, as a wish to stop that a run can follow at the end of its step.

with asked_to_stop(desk, alone=True):
    train()
"""

import signal
import threading

from train.desk import Desk


class asked_to_stop:
    """SIGTERM and Ctrl-C ask the run to stop; a second Ctrl-C breaks it off. Put back at the end.

    Of several processes only the first is asked, and it tells the others. All get Ctrl-C at least twice, from
    the terminal and from torchrun, which itself ends those that do not stop.
    """

    def __init__(self, desk: Desk | None, alone: bool):
        self.desk, self.alone = desk, alone

    def __enter__(self):
        self.before = {}
        if threading.current_thread() is not threading.main_thread():
            return  # Python gives signals to the main thread only
        for name in ("SIGTERM", "SIGINT"):
            if hasattr(signal, name):
                number = getattr(signal, name)
                self.before[number] = signal.signal(number, self._asked)

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _asked(self, number, frame) -> None:
        if number == signal.SIGINT and self.alone and self.desk.stop_asked:
            raise KeyboardInterrupt
        if self.desk:
            self.desk.ask_stop()
