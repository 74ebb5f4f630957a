"""Fetches CIFAR-10 from the Hugging Face Hub, or, where the Hub cannot be reached, through torchvision.

    from vit.download import fetch
    fetch(Path("data"), ("test",))          # data/test-00000-of-00001.parquet, 23 MB; train is 120 MB

A download that was cut goes on where it stopped, within one run and in the next one. A file takes its final
name only after its SHA-256 was found equal to the one the Hub states, so a file with that name is whole.
`HF_ENDPOINT` names another Hub. torchvision's archive (170 MB) always brings both splits.

Why not `hf_hub_download`: it throws a cut file away when the process ends, and within a process it goes back
to the last multiple of 10 MB; it compares no checksum. So only its address, its metadata, its HTTP client and
its file lock are used here. Plain HTTP on purpose, not Xet: Xet neither resumes by byte nor tells exact
progress, and saves nothing on a file that is fetched once.
"""

import hashlib
import http.client
import os
import re
import shutil
import socket
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HUB_REPO = "uoft-cs/cifar10"
HUB_FILES = {
    "test": "plain_text/test-00000-of-00001.parquet",
    "train": "plain_text/train-00000-of-00001.parquet",
}
BACKOFF_SECONDS = (1, 2, 4)  # waits between tries that brought no new byte
TIMEOUT_SECONDS = 30
WHAT_TO_DO = "run `python -m vit data` again, or set PATCHLIGHT_DATA to a folder that holds CIFAR-10"
_TORCHVISION_ERRORS = (
    *(OSError, RuntimeError, ValueError, EOFError, ImportError),
    *(tarfile.TarError, http.client.HTTPException),
)

Progress = Callable[[int, int, str], None]  # (done, total, what); a total of 0 means unknown


class DataError(RuntimeError):
    """The pictures cannot be had; the message says in one sentence what happened and what to do."""


def fetch(folder: Path, splits: tuple[str, ...], progress: Progress | None = None) -> None:
    """Put the missing files of `splits` ("test", "train") into `folder`.

    `progress(bytes_done, bytes_total, what)` is called as bytes arrive. Raises DataError when neither source
    answers, when what came is not what the Hub promised, or when `folder` cannot be written.
    """
    from huggingface_hub.errors import HfHubHTTPError

    # httpx's base error, found this way because huggingface_hub has changed the module that it comes from.
    network_errors = (OSError, HfHubHTTPError.__bases__[0])
    progress = progress or (lambda done, total, what: None)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink(missing_ok=True)
    try:
        for split in splits:
            _from_hub(folder, HUB_FILES[split], network_errors, progress)
    except network_errors as hub_error:
        try:
            _from_torchvision(folder, progress)
        except _TORCHVISION_ERRORS as other_error:
            raise _both_failed(hub_error, other_error) from hub_error


def _both_failed(hub_error: Exception, other_error: Exception) -> DataError:
    def brief(error: Exception) -> str:
        return (str(error).strip().splitlines() or [""])[0].rstrip(".") or type(error).__name__

    return DataError(
        f"CIFAR-10 could not be downloaded, neither from the Hugging Face Hub ({brief(hub_error)}) nor"
        f" through torchvision ({brief(other_error)}). Nothing that was here before has changed, and what"
        f" has arrived is kept for the next try. Check the connection and {WHAT_TO_DO}."
    )


def _from_hub(folder: Path, hub_file: str, network_errors: tuple, progress: Progress) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import WeakFileLock

    target = folder / Path(hub_file).name
    # huggingface_hub reads HF_ENDPOINT once, when imported; a page that runs for days may be told later.
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    url = hf_hub_url(HUB_REPO, hub_file, repo_type="dataset", endpoint=endpoint)
    with WeakFileLock(folder / f".{target.name}.lock"):  # a second process waits, then finds the file
        if target.exists():
            return
        # token=False: the data set is public, so no one's token needs to travel.
        metadata = _with_retries(lambda: get_hf_file_metadata(url, token=False), lambda: 0, network_errors)
        sha256, size_bytes = metadata.etag or "", metadata.size
        if not re.fullmatch("[0-9a-f]{64}", sha256) or not size_bytes:
            raise ConnectionError(f"{url} states no SHA-256 and size")
        # The checksum is part of the name: a part of another version is never gone on with.
        part = folder / f".{target.name}.{sha256[:12]}.part"
        _with_retries(
            lambda: _stream(url, part, size_bytes, target.name, progress),
            lambda: _size_bytes(part),
            network_errors,
        )
        with _writing(folder):
            with part.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256:
                part.unlink()
                raise DataError(
                    f"What came from {url} is not what the Hub promised (its SHA-256 differs), so it was"
                    f" deleted and nothing else was touched. Please {WHAT_TO_DO}."
                )
            part.replace(target)


def _with_retries(attempt: Callable, size_bytes: Callable[[], int], network_errors: tuple):
    """What `attempt()` returns. It is tried again after growing waits, which start anew once bytes arrive."""
    waits = iter(BACKOFF_SECONDS)
    while True:
        before = size_bytes()
        try:
            return attempt()
        except network_errors as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            refused = status is not None and status < 500 and status not in (408, 429)
            if refused or type(error).__name__ == "OfflineModeIsEnabled":
                raise
            if size_bytes() > before:
                waits = iter(BACKOFF_SECONDS)
            wait_seconds = next(waits, None)
            if wait_seconds is None:
                raise
            time.sleep(wait_seconds)


def _stream(url: str, part: Path, size_bytes: int, what: str, progress: Progress) -> None:
    """Append to `part` what is missing of the file at `url`; ConnectionError if bytes are missing still."""
    from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

    done = _size_bytes(part)
    if done >= size_bytes:
        return
    headers = {"Accept-Encoding": "identity"}  # a compressed answer has other byte positions
    if done:
        headers["Range"] = f"bytes={done}-"
    # All retries are ours: the client's own would repeat this request with its old Range.
    once = {"max_retries": 0, "retry_on_exceptions": (), "retry_on_status_codes": ()}
    with http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT_SECONDS, **once) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:  # Range was ignored: the answer begins at byte 0
            done = 0
        with _writing(part.parent), part.open("ab" if done else "wb") as file:
            for chunk in response.iter_bytes():  # without a chunk size: nothing waits in memory to be lost
                file.write(chunk)
                done += len(chunk)
                progress(done, size_bytes, what)
                if done > size_bytes:
                    break  # more than promised: the checksum will refuse it, the disk need not hold it all
    if done < size_bytes:
        raise ConnectionError(f"the connection to {url} was cut after {done:,} of {size_bytes:,} bytes")


def _from_torchvision(folder: Path, progress: Progress) -> None:
    """torchvision checks each file's MD5; its folder is moved into place only when it is whole."""
    from huggingface_hub.utils import WeakFileLock
    from torchvision.datasets import CIFAR10

    target, temporary = folder / CIFAR10.base_folder, folder / ".torchvision"
    with WeakFileLock(folder / ".torchvision.lock"):
        if target.exists():
            return
        progress(0, 0, "CIFAR-10 through torchvision")
        waiting = socket.getdefaulttimeout()
        socket.setdefaulttimeout(TIMEOUT_SECONDS)  # torchvision sets none: a silent server would hang us
        try:
            CIFAR10(temporary, download=True)
        finally:
            socket.setdefaulttimeout(waiting)
        (temporary / CIFAR10.base_folder).replace(target)
        shutil.rmtree(temporary, ignore_errors=True)


def _size_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns a full or read-only disk into a DataError, so that it is not taken for a network fault."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"The download folder {folder} cannot be written ({error.strerror or error}); nothing that was"
            " there has changed. Free some space, or set PATCHLIGHT_CACHE to a folder that can be written."
        ) from error
