"""Fetching CIFAR-10 while the page stays usable: one thread for all sessions, which outlives the page."""

import threading
from dataclasses import dataclass, field

import streamlit as st

from train.page.asking import accent
from train.page.visitor import visitor
from train.rights import may_all
from vit.datasets import DataError, find_data, load_pictures
from vit.evaluate import Cancelled
from vit.page.session import tell
from vit.page.view import plain
from vit.sources import find_source
from vit.words import megabytes


@dataclass
class _Job:
    """One download; only its thread writes to it, but for `cancelled`."""

    what: str = "Starting"
    done: int = 0
    total: int = 0
    problem: str = ""
    finished: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)


def has_cifar10() -> bool:
    """Whether the training pictures are on this machine; opens no file."""
    folder = find_data("cifar10")
    return bool(folder and find_source(folder, "train"))


def offer_download() -> None:
    """The step before a run where CIFAR-10 is not here yet: what it takes, progress, stop."""
    if not may_all(visitor()):
        st.caption("CIFAR-10 is not on this machine.")
        return
    job = _jobs().get("job")
    if job is None or (job.finished and not job.problem):
        st.caption("CIFAR-10 is not on this machine yet: 143 MB, fetched once and checked.")
        if st.button(accent("Download CIFAR-10"), icon=":material/download:", width="stretch"):
            _begin()
            st.rerun()
        return

    was_finished = job.finished

    @st.fragment(run_every=None if was_finished else 1.0)
    def watch() -> None:
        if job.finished:
            if not was_finished:
                st.rerun()  # to look no more, and because the form may go on
            tell(st.warning, job.problem)
            if st.button("Try again"):
                _begin()
                st.rerun()
            return
        share = job.done / job.total if job.total else 0.0
        is_bytes = job.total > 10_000_000
        count = f": {megabytes(job.done)} of {megabytes(job.total)}" if is_bytes else ""
        st.progress(min(1.0, share), text=plain(f"{job.what}{count}"))
        if st.button("Stop", key="stop_download"):
            job.cancelled.set()

    watch()


def _begin() -> None:
    """Unless another session was quicker."""
    job = _jobs().get("job")
    if job and not job.finished:
        return
    job = _jobs()["job"] = _Job()
    threading.Thread(target=_fetch, args=(job,), name="download of CIFAR-10", daemon=True).start()


def _fetch(job: _Job) -> None:
    def progress(done: int, total: int, what: str) -> None:
        job.done, job.total, job.what = done, total, what
        if job.cancelled.is_set():
            raise Cancelled

    job.problem = "The download ended early. What has come is kept."  # until it has ended well
    try:
        for split in ("train", "test"):
            load_pictures("cifar10", split, download=True, progress=progress)
        job.problem = ""
    except Cancelled:
        job.problem = "Stopped. What has come is kept, and the next try goes on from there."
    except (DataError, OSError) as error:
        job.problem = f"{error} Nothing else is affected."
    finally:
        job.finished = True


@st.cache_resource(max_entries=1)
def _jobs() -> dict[str, _Job]:
    return {}
