"""Checkpoints: one safetensors file with the weights and, as metadata, all that is needed to use them.

    model, checkpoint = load("assets/weights/vit-cifar10.safetensors")
    model, checkpoint = load("tutorial.pth", num_heads=8)     # a plain state dict; see checkpoint.assumed
    save(model, checkpoint, "mine.safetensors", half=True)
    find_checkpoints(), data_set(checkpoint, path)            # what trainings left, and what they were of

Files are read as strangers' files: nothing is ever unpickled, sizes are taken from the tensors that are
really there, and whatever does not fit raises CheckpointError with one sentence.
"""

import hashlib
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialise
from torch import Tensor

from vit.datasets import DataError, find_data
from vit.device import pick_device
from vit.files import runs_folder, write_whole
from vit.images import ResizeThenCrop
from vit.model import VisualTransformer
from vit.patterns import CLASSES as PATTERN_CLASSES
from vit.sources import CLASSES, SPLITS, find_source
from vit.state_dict import Architecture, describe, fill

BUNDLED = Path(__file__).parents[1] / "assets" / "weights" / "vit-cifar10.safetensors"
BUNDLED_PATTERNS = BUNDLED.with_name("patterns.safetensors")
_METADATA_KEY = "patchlight"
# What the readers raise for a damaged file: which one depends on the byte that is wrong.
_DAMAGE = (
    safetensors.SafetensorError,
    zipfile.BadZipFile,
    struct.error,
    RuntimeError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)


class CheckpointError(ValueError):
    """A file that cannot be used as a checkpoint; its text is one sentence for the person who chose it."""


@dataclass(frozen=True)
class Checkpoint:
    """What is known of some weights."""

    architecture: Architecture
    class_names: tuple[str, ...]
    mean: tuple[float, ...]  # one per channel, of pixels scaled to 0..1
    std: tuple[float, ...]
    provenance: Mapping[str, str | int | float] = field(
        default_factory=dict
    )  # command, data, epochs, seed, …
    top_logit_percentiles: tuple[float, ...] = ()  # 0th to 100th, of the largest logit on held-out pictures
    assumed: tuple[str, ...] = ()  # what the file did not say, in words
    name: str = ""  # the file's name
    id: str = ""  # first 12 hex digits of the file's SHA-256
    eval_resize: ResizeThenCrop | None = None  # how models of others want their pictures made; None is ours

    @property
    def accuracy(self) -> float | None:
        """Test accuracy from 0 to 1 as measured when the file was made, or None."""
        value = self.provenance.get("accuracy")
        return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else None

    def top_logit_percentile(self, largest_logit: float) -> float | None:
        """Share of held-out pictures, 0 to 1, whose largest logit was below this one; None if unknown."""
        if not self.top_logit_percentiles:
            return None
        below = sum(value < largest_logit for value in self.top_logit_percentiles)
        return below / len(self.top_logit_percentiles)


def load(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    num_heads: int | None = None,
    img_size: tuple[int, int] | None = None,
    class_names: tuple[str, ...] | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> tuple[VisualTransformer, Checkpoint]:
    """The model, in eval mode and float32, and what is known of it.

    Takes our safetensors files, and plain state dicts with the tutorial's names (.safetensors, .pt, .pth;
    `module.` and `_orig_mod.` are stripped). What a state dict cannot tell is assumed as in the tutorial (8
    heads, mean and std 0.5, CIFAR-10's class names where there are ten), overridden by the arguments, and
    listed in `checkpoint.assumed`. CheckpointError says what is wrong with a file; ValueError with `device`.
    """
    path = Path(path)
    device = pick_device(None if device is None else str(device))
    for _ in range(3):
        before = _stamp(path)
        tensors, told = _read(path)
        found_id = file_id(path)
        if _stamp(path) == before:
            break  # else a trainer has replaced the file meanwhile: the id would be another's
    overrides = {
        "num_heads": num_heads,
        "img_size": img_size,
        "class_names": class_names,
        "mean": mean,
        "std": std,
    }
    told |= {name: value for name, value in overrides.items() if value is not None}
    try:
        checkpoint = Checkpoint(**describe(tensors, told))
        model = fill(checkpoint.architecture, tensors)
    except ValueError as error:
        raise CheckpointError(f"{path.name} cannot be used: {error}.") from error
    checkpoint = replace(checkpoint, name=path.name, id=found_id)
    return model.to(device).eval(), checkpoint


def save(
    model: VisualTransformer, checkpoint: Checkpoint, path: str | Path, *, half: bool = False
) -> Checkpoint:
    """Write one safetensors file, whole or not at all; `half` stores float16. Returns it with name and id.

    ValueError for weights that are not finite, or not once they are float16.
    """
    path = Path(path)
    facts = {
        "format": 1,
        "architecture": asdict(checkpoint.architecture),
        "class_names": checkpoint.class_names,
        "mean": checkpoint.mean,
        "std": checkpoint.std,
        "provenance": dict(checkpoint.provenance),
        "top_logit_percentiles": checkpoint.top_logit_percentiles,
    }
    dtype = torch.float16 if half else torch.float32
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in model.state_dict().items()
    }
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"the tensor {name} holds numbers that {dtype} cannot: nothing was written")
    data = serialise(tensors, metadata={_METADATA_KEY: json.dumps(facts)})
    write_whole(path, lambda file: file.write(data))
    return replace(checkpoint, assumed=(), name=path.name, id=file_id(path))


def file_id(path: str | Path) -> str:
    """First 12 hex digits of the file's SHA-256."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):  # what is wrong with it is said where it is read
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def find_checkpoints(runs: str | Path | None = None) -> list[Path]:
    """The safetensors files in the runs folder (PATCHLIGHT_RUNS, else `runs`), newest run first.

    Those in it, in its folders, and in their `checkpoints`, where the trainer writes; a run's files stay
    together: best, last, then the newest. What a training resumes from is no checkpoint, and left out.
    """
    folder = runs_folder() if runs is None else Path(runs)
    found = (p for under in ("", "*/", "*/checkpoints/") for p in folder.glob(f"{under}*.safetensors"))
    ages = {p: _age(p) for p in found if not p.name.startswith((".", "resume")) and p.is_file()}
    run_of = {path: path if path.parent == folder else _run_folder(path) for path in ages}
    youngest: dict[Path, float] = {}
    for path, age in ages.items():
        youngest[run_of[path]] = min(age, youngest.get(run_of[path], age))

    def place(path: Path) -> tuple:
        run = run_of[path]
        return youngest[run], run, {"best": 0, "last": 1}.get(path.stem, 2), ages[path], path

    return sorted(ages, key=place)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # deleted between listing and asking
        return 0.0


def _run_folder(path: Path) -> Path:
    return path.parent.parent if path.parent.name == "checkpoints" else path.parent


def data_set(checkpoint: Checkpoint, path: str | Path) -> str | None:
    """What the checkpoint at `path` learned to tell apart, as `load_pictures` takes it; None if unknown.

    "cifar10" or "patterns" by the names of its classes; else the folder that its run directory's config.json
    names, if that is on this machine and has these classes.
    """
    if checkpoint.class_names in (CLASSES, PATTERN_CLASSES):
        return "cifar10" if checkpoint.class_names == CLASSES else "patterns"
    try:
        told = json.loads((_run_folder(Path(path)) / "config.json").read_text(encoding="utf-8"))
        named = told["config"]["data"]
        base = find_data(named) if isinstance(named, str) else None
        sources = [find_source(base, split) for split in SPLITS] if base else []
    except (OSError, ValueError, TypeError, LookupError, RecursionError, DataError):
        return None  # a file of others may be missing, or hold anything
    known = {source.class_names for source in sources if source}
    return named if checkpoint.class_names in known else None


def _read(path: Path) -> tuple[dict[str, Tensor], dict]:
    """The tensors by name, and the metadata of ours if there is any."""
    try:
        if not path.is_file():
            raise CheckpointError(f"There is no checkpoint file at {path}.")
        with path.open("rb") as file:
            start = file.read(9)
        if not start:
            raise CheckpointError(f"{path.name} is empty (0 bytes): copy or download it again.")
        if start[:2] == b"PK":
            with zipfile.ZipFile(path) as archive:  # torch.save never compresses: nothing may grow when read
                _require_room(sum(entry.file_size for entry in archive.infolist()), path)
            return _read_torch(path), {}
        if start[:1] == b"\x80":
            return _read_torch(path), {}
        if start[8:9] == b"{":
            return _read_safetensors(path)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror or error}.") from error
    except _DAMAGE as error:
        raise CheckpointError(f"{path.name} is damaged or cut short: copy or download it again.") from error
    raise CheckpointError(
        f"{path.name} is not a checkpoint: choose a safetensors file, or a state dict saved by torch.save."
    )


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict]:
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    told = {}
    if _METADATA_KEY in metadata:
        try:
            told = json.loads(metadata[_METADATA_KEY])
            json.dumps(told, ensure_ascii=False).encode()  # half a surrogate pair could be shown nowhere
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path.name} has metadata that cannot be read.") from error
        if not isinstance(told, dict):
            raise CheckpointError(f"{path.name} has metadata that cannot be read.")
    return _checked(load_file(path), path), told


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise CheckpointError(
            f"{path.name} holds more than tensors, or is damaged; Patchlight runs no code from a file, so"
            " save only the weights with torch.save(model.state_dict(), …) and choose that file."
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"{path.name} holds no state dict: save model.state_dict() and choose that file."
        )
    return _checked(loaded, path)


def _checked(tensors: dict, path: Path) -> dict[str, Tensor]:
    """Ordinary tensors, by names without what torch.compile and DataParallel put before them."""
    stripped = {}
    for name, tensor in tensors.items():
        ordinary = (
            isinstance(tensor, Tensor)
            and tensor.layout == torch.strided
            and tensor.device.type == "cpu"
            and not tensor.is_nested
        )
        if not isinstance(name, str) or not ordinary:
            raise CheckpointError(
                f"{path.name} holds something that is not an ordinary tensor under {str(name)[:80]!r}."
            )
        bare = re.sub(r"^(?:module\.|_orig_mod\.)+", "", name)
        if bare in stripped:
            raise CheckpointError(f"{path.name} holds the tensor {bare[:80]!r} twice.")
        stripped[bare] = tensor
    # one number can be spread over a huge shape, and many tensors can share their memory
    _require_room(sum(tensor.nbytes for tensor in stripped.values()), path)
    return stripped


def _require_room(size_bytes: int, path: Path) -> None:
    if size_bytes > path.stat().st_size:
        raise CheckpointError(f"{path.name} claims to hold more numbers than it has room for.")
