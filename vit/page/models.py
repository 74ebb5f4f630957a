"""Which model the page looks into: the bundled ones, checkpoints under the runs folder, or an uploaded file.

Models are shared by all sessions, in eval mode and never changed.
"""

import gc
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import streamlit as st

from vit.checkpoint import (
    BUNDLED,
    BUNDLED_PATTERNS,
    Checkpoint,
    CheckpointError,
    data_set,
    find_checkpoints,
    load,
    runs_folder,
)
from vit.datasets import cache_folder
from vit.files import write_whole
from vit.model import VisualTransformer
from vit.page.session import change_view, control, current_view, tell
from vit.page.view import BUNDLED_MODEL, PATTERNS_MODEL

# Streamlit collects garbage after every run. What torch's import brought never is any, and to walk it takes
# 0.1 s. Now, before there is anything of a visitor's: frozen garbage stays for good.
gc.collect()
gc.freeze()

_MAX_UPLOAD_MB = 200
_UPLOADS_KEPT = 5  # on disk, for all sessions; the oldest are deleted


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model ready to be asked, and the file that it came from."""

    model: VisualTransformer
    checkpoint: Checkpoint
    path: Path
    data_set: str | None = None  # what it learned to tell apart, as `load_pictures` takes it
    problem: str = ""  # why this model is shown instead of the one asked for

    @property
    def facts(self) -> str:
        """One line for people: sizes, accuracy."""
        architecture, accuracy = self.checkpoint.architecture, self.checkpoint.accuracy
        line = f"{architecture.num_layers} layers × {architecture.num_heads} heads"
        held, step = (self.checkpoint.provenance.get(name) for name in ("val_accuracy", "step"))
        if accuracy is not None:
            line += f", test accuracy {accuracy:.1%}"
        elif isinstance(held, float) and isinstance(step, int):  # of a run, which may still go on
            line += f", {held:.1%} of held-out pictures right at step {step:,}"
        return line.replace("%", " %")

    @property
    def data(self) -> str:
        """Whose pictures are offered with it: its own data set's, else CIFAR-10's."""
        return self.data_set or "cifar10"

    @property
    def device(self) -> str:
        """Where it runs, for people."""
        device = self.model.device
        if device.type != "cpu":
            return str(device).upper()
        import torch

        threads = torch.get_num_threads()
        return f"CPU, {threads} {'thread' if threads == 1 else 'threads'}"


def choose_model() -> Loaded:
    """Load the view's model and draw the choice; falls back to the bundled one with a word of why."""
    problem = ""
    try:
        loaded = load_model(current_view().model)
    except CheckpointError as error:
        problem = f"{error} The bundled model is shown instead."
        change_view(model=BUNDLED_MODEL)
        loaded = load_model(BUNDLED_MODEL)
    options = [BUNDLED_MODEL, *([PATTERNS_MODEL] if BUNDLED_PATTERNS.is_file() else []), *_run_names()]
    if (chosen := current_view().model) not in options:
        options.append(chosen)
    upload_names = st.session_state.setdefault("upload_names", {})
    with st.container(gap="xxsmall"):
        chooser, upload = st.columns([5, 2], vertical_alignment="bottom", wrap=False)
        control(
            chooser.selectbox,
            "model",
            "Model",
            options,
            format_func=lambda model: _label(model, upload_names),
            label_visibility="collapsed",
        )
        with upload.popover("Upload", icon=":material/upload:", width="stretch"):
            st.caption(
                "Safetensors files under the runs folder are in the list already. What you upload is kept on "
                f"the server until {_UPLOADS_KEPT} newer files have come."
            )
            if (uploaded := _upload()) is not None:
                change_view(model=uploaded)
                st.rerun()  # what is above was drawn for the model before
        st.caption(f"{loaded.facts} · {loaded.device}")
    return replace(loaded, problem=problem)


def find_file(model: str) -> Path:
    """The file behind a model's name in the view. CheckpointError if there is none."""
    kind, _, key = model.partition(":")
    if kind == "run":
        for path in find_checkpoints():
            if model_name(path) == model:
                return path
        raise CheckpointError(f"There is no checkpoint {key} under the runs folder on this machine.")
    if kind == "own":
        path = _upload_path(key)
        if path.is_file():
            return path
        raise CheckpointError("This link shows an uploaded checkpoint that is not here: upload it again.")
    if kind == PATTERNS_MODEL:
        if BUNDLED_PATTERNS.is_file():
            return BUNDLED_PATTERNS
        raise CheckpointError("The model for made patterns is not on this machine.")
    return BUNDLED


def load_model(model: str) -> Loaded:
    """The model of that name in a view. CheckpointError if it is not here or cannot be used."""
    path = find_file(model)
    try:
        stat = path.stat()
    except OSError as error:  # deleted since it was listed
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}.") from error
    return _load_file(str(path), stat.st_mtime_ns, stat.st_size)


@st.cache_resource(max_entries=4, show_spinner="Loading the model")
def _load_file(path: str, changed_ns: int, size_bytes: int) -> Loaded:
    model, checkpoint = load(path)
    channels = checkpoint.architecture.in_channels
    if channels not in (1, 3):
        raise CheckpointError(
            f"{checkpoint.name} takes pictures of {channels} channels; a picture has 3, or 1 of grey."
        )
    return Loaded(model.requires_grad_(False), checkpoint, Path(path), data_set(checkpoint, path))


def _upload() -> str | None:
    """The name of a checkpoint that has just been uploaded, or None."""
    file = st.file_uploader(
        "Your checkpoint",
        type=["safetensors"],
        key="upload_model",
        max_upload_size=_MAX_UPLOAD_MB,
        help="A safetensors file with the tutorial's tensor names. No code in it can run.",
    )
    if file is None or st.session_state.get("last_model_upload") == file.file_id:
        return None
    st.session_state["last_model_upload"] = file.file_id
    data = file.getvalue()
    key = hashlib.sha256(data).hexdigest()[:12]
    path = _upload_path(key)
    try:
        write_whole(path, lambda file: file.write(data))
        load(path)
        for old in find_checkpoints(path.parent)[_UPLOADS_KEPT:]:
            old.unlink(missing_ok=True)
    except CheckpointError as error:
        path.unlink(missing_ok=True)
        reason = (
            str(error)
            .replace(path.name, "This file", 1)
            .replace(
                "or a state dict saved by torch.save", "which python -m vit convert makes of any state dict"
            )
        )
        tell(st.error, f"{reason} The model that was shown is unchanged.")
        return None
    except OSError as error:
        tell(st.error, f"The file could not be kept ({error.strerror}). The model shown is unchanged.")
        return None
    st.session_state["upload_names"][f"own:{key}"] = file.name
    return f"own:{key}"


def _upload_path(key: str) -> Path:
    return cache_folder() / "uploads" / f"{key}.safetensors"


def _run_names() -> list[str]:
    return [model_name(path) for path in find_checkpoints()]


def model_name(path: Path) -> str:
    """`run:NAME` or `run:FOLDER/NAME`, without the ending; also for FOLDER/checkpoints/NAME."""
    folder, name = path.relative_to(runs_folder()).parent, path.stem
    if len(folder.parts) == 2:
        folder = folder.parent
    elif (path.parent / "checkpoints" / path.name).is_file():
        name = path.name  # the short name is the trainer's file
    return f"run:{(folder / name).as_posix()}"


def _label(model: str, upload_names: dict[str, str]) -> str:
    if model == BUNDLED_MODEL:
        return "Bundled ViT for CIFAR-10"
    if model == PATTERNS_MODEL:
        return "Bundled ViT for patterns"
    kind, _, key = model.partition(":")
    return key if kind == "run" else upload_names.get(model, f"Upload {key[:6]}")
