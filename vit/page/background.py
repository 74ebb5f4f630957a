"""Classifying a whole test set while the page stays usable: one thread at a time, shared by all sessions.

The page asks `mistakes_job` at each run; a fragment shows its progress. What is found is kept in the cache
folder, so that it is computed once for a checkpoint and a data set.
"""

import threading
import time
from dataclasses import dataclass, field

import streamlit as st

from vit.datasets import Pictures
from vit.evaluate import Cancelled, Predictions, cached_path, kept_predictions, predict
from vit.page.models import Loaded
from vit.page.session import tell

_ONE_AT_A_TIME = threading.Lock()


@dataclass
class Job:
    """The state of one thread; only that thread writes to it, but for `cancelled`."""

    total: int
    done: int = 0
    started_s: float = 0.0
    error: str = ""
    finished: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def left(self) -> str:
        """Time left for people, or what it waits for."""
        if not self.done:
            return "starting"
        left_s = (time.monotonic() - self.started_s) / self.done * (self.total - self.done)
        return f"{left_s:.0f} s left" if left_s < 90 else f"{left_s / 60:.0f} min left"


def predictions_of(loaded: Loaded, pictures: Pictures) -> Predictions | None:
    """What is known already, shipped or kept; None if it has to be computed first."""
    return _kept(str(loaded.path), loaded.checkpoint.id, pictures.digest, loaded)


def start(loaded: Loaded, pictures: Pictures) -> Job:
    """Begin, unless it runs already."""
    jobs = _jobs()
    key = (loaded.checkpoint.id, pictures.digest)
    job = jobs.get(key)
    if job is None or job.finished:
        job = jobs[key] = Job(len(pictures))
        threading.Thread(target=_work, args=(job, loaded, pictures), daemon=True).start()
    return job


def running(loaded: Loaded, pictures: Pictures) -> Job | None:
    """The job for this model and data, or one that failed; None if there is none.

    One that ended well is none: what it found is kept, and if it was deleted since, it has to be found anew.
    """
    job = _jobs().get((loaded.checkpoint.id, pictures.digest))
    return None if job and job.finished and not job.error else job


def show(job: Job, loaded: Loaded, pictures: Pictures, doing: str, stop: str) -> None:
    """How far it is, with time left and a button named `stop`; once it ended early, why, and a second try."""

    @st.fragment(run_every=1 if not job.finished else None)
    def watch() -> None:
        if job.finished:
            if not job.error:
                st.rerun()
            tell(st.warning, job.error)
            if st.button("Try again"):
                start(loaded, pictures)
                st.rerun()
            return
        text = f"{doing}: {job.done:,} of {job.total:,} pictures, {job.left}"
        st.progress(job.done / job.total, text=text)
        if st.button(stop):
            job.cancelled.set()

    watch()


def _work(job: Job, loaded: Loaded, pictures: Pictures) -> None:
    def progress(done: int, total: int, what: str) -> None:
        job.done = done
        if job.cancelled.is_set():
            raise Cancelled

    job.error = "The test set could not be classified. Nothing else is affected."  # until it has been
    try:
        with _ONE_AT_A_TIME:
            progress(0, job.total, "")  # it may have been stopped while it waited
            job.started_s = time.monotonic()
            found = predict(loaded.model, loaded.checkpoint, pictures, progress=progress)
        found.save(cached_path(loaded.checkpoint.id, pictures.digest))
        _kept.clear()
        job.error = ""
    except Cancelled:
        job.error = "Stopped. Nothing else is affected."
    except (OSError, ValueError, RuntimeError) as error:
        job.error = f"The test set could not be classified: {error}. Nothing else is affected."
    finally:
        job.finished = True


@st.cache_resource(max_entries=1)
def _jobs() -> dict[tuple[str, str], Job]:
    return {}


@st.cache_resource(max_entries=8, show_spinner=False)
def _kept(path: str, checkpoint_id: str, data_digest: str, _loaded: Loaded) -> Predictions | None:
    return kept_predictions(_loaded.path, _loaded.checkpoint, data_digest)
