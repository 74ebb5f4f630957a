"""Files written whole or not at all, and folders that people name.

write_whole(path, lambda file: np.savez(file, logits=logits))   # never half a file
folder = named_folder(os.environ.get("PATCHLIGHT_RUNS"), Path("runs"))
"""

import os
import threading
import time
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
        _replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _replace(partial: Path, path: Path) -> None:
    for wait_seconds in (0.01, 0.05, 0.2, 0.5):
        try:
            partial.replace(path)
            return
        except PermissionError:  # on Windows, while somebody reads the file: it takes them a moment
            time.sleep(wait_seconds)
    partial.replace(path)


def named_folder(name: str | os.PathLike | None, otherwise: Path) -> Path:
    """The folder of that name, `~` spelled out, or `otherwise` where nothing was named. It need not exist.

    ValueError for a name that no folder can have.
    """
    if name is None or os.fspath(name) == "":
        return otherwise
    folder = Path(os.path.expanduser(name))  # noqa: PTH111, Path's own raises for an unknown user
    try:
        folder.is_dir()
    except (OSError, ValueError) as error:  # too long, or with a zero byte
        raise ValueError(f"{str(folder)[:60]!r} cannot be a folder: {error}") from error
    return folder


def runs_folder() -> Path:
    """PATCHLIGHT_RUNS, else `runs`; it need not exist. ValueError for a name that no folder can have."""
    return named_folder(os.environ.get("PATCHLIGHT_RUNS"), Path("runs"))


def folder_bytes(folder: Path) -> int:
    """What the files in a folder and below hold together; those that vanish meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total
