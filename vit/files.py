"""Writes a file whole or not at all, so that a full disk or Ctrl-C never leaves half of one.

write_whole(path, lambda file: np.savez(file, logits=logits))
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` with a file beside `path`, then rename that; makes the folder. OSError if it cannot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with partial.open("wb") as file:
            write(file)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
