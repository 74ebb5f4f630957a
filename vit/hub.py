"""Anyone's model by its name: `timm:NAME`, or `hf-hub:USER/NAME` on the Hugging Face Hub.

    model, checkpoint = open_model("timm:vit_tiny_patch16_224")
    model, checkpoint = open_model("timm:deit_tiny_patch16_224", img_size=(192, 256), random_weights=True)

Needs timm, an optional requirement. Weights are read from safetensors files alone, out of the Hub's cache or
fetched into it. They are never left out in silence: what cannot be had is said in one sentence, and random
weights, which a caller must ask for, make every output say that the model is untrained.
"""

import difflib
import hashlib
from collections import Counter
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vit.architecture import Architecture
from vit.checkpoint import Checkpoint, CheckpointError, file_id
from vit.device import pick_device
from vit.foreign import ForeignError, ForeignTransformer, require_known
from vit.images import ResizeThenCrop

if TYPE_CHECKING:
    from torch import nn

PREFIXES = ("timm:", "hf-hub:")
_WEIGHTS = "model.safetensors"
_PATIENCE_S = 10


@dataclass(frozen=True)
class ForeignArchitecture(Architecture):
    """Sizes of a model of others, which cannot be built from them."""

    prefixes: int = 1

    @property
    def prefix_tokens(self) -> int:
        return self.prefixes

    def build(self, **options):
        raise ValueError("a model of others is opened by its name, not built from its sizes")


def open_model(
    name: str,
    *,
    device: str | torch.device | None = None,
    img_size: tuple[int, int] | None = None,
    random_weights: bool = False,
) -> tuple[ForeignTransformer, Checkpoint]:
    """The model, in eval mode and float32, and what is known of it: as `vit.load`.

    `img_size` (height, width) is another than the model's own; positions are then interpolated by timm.
    CheckpointError, one sentence, where timm or the weights are missing or the model cannot be opened.
    """
    machine = pick_device(None if device is None else str(device))
    try:
        import timm
    except ImportError as error:
        raise CheckpointError(
            f"{name} needs the package timm, which is not installed here: pip install timm."
        ) from error
    kind, _, key = name.partition(":")
    if f"{kind}:" not in PREFIXES or not key:
        raise CheckpointError(f"A model is named timm:NAME or hf-hub:USER/NAME, not {name!r}.")
    architecture, cfg, options = _described(timm, kind, key, name)
    if img_size is not None:
        options["img_size"] = tuple(img_size)
    try:
        with torch.device("meta"):  # what cannot be opened is said before anything is fetched
            require_known(timm.create_model(architecture, **_without_size(options)))
        if random_weights:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                body = timm.create_model(architecture, pretrained_cfg_overlay=cfg, **options)
            made_id = hashlib.sha256(f"{name} {options} with random weights".encode()).hexdigest()[:12]
            provenance = {"untrained": "random weights: what it says and where it looks means nothing"}
        else:
            path = _fetched(key if kind == "hf-hub" else cfg["hf_hub_id"], name, cfg)
            overlay = cfg | {"file": str(path), "source": "file"}
            body = timm.create_model(architecture, pretrained=True, pretrained_cfg_overlay=overlay, **options)
            made_id, provenance = file_id(path), {}
        model = ForeignTransformer.of(body.float().to(machine))
    except ForeignError as error:
        raise CheckpointError(f"{name} {error}.") from error
    except (
        RuntimeError,
        TypeError,
        AssertionError,
        KeyError,
    ) as error:  # timm's, for sizes and files
        raise CheckpointError(f"timm cannot build {name} so: {_one_line(error)}.") from error
    return model, _checkpoint(timm, model, name, made_id, provenance)


def _without_size(options: dict) -> dict:
    return {key: value for key, value in options.items() if key != "img_size"}


def _described(timm, kind: str, key: str, name: str) -> tuple[str, dict, dict]:
    """The architecture's name in timm, what changes its configuration, and arguments to build it with."""
    if kind == "timm":
        if not timm.is_model(key.partition(".")[0]):
            near = difflib.get_close_matches(key, timm.list_models(), n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise CheckpointError(f"timm knows no model {key!r}{hint}")
        cfg = timm.get_pretrained_cfg(key)
        return key, {"hf_hub_id": cfg.hf_hub_id if cfg else None}, {}
    try:
        _reach(key.partition("@")[0], "config.json", key.partition("@")[2])
        cfg, architecture, options = timm.models.load_model_config_from_hf(key)
    except KeyError as error:
        raise CheckpointError(f"{name} is no model of timm: its config.json names none.") from error
    except _hub_errors() as error:
        raise _missing(name, key, "config.json", error) from error
    if not timm.is_model(architecture):
        raise CheckpointError(f"{name} is of an architecture that this timm does not know: {architecture!r}.")
    return architecture, cfg, dict(options or {})


def _fetched(hub_id: str | None, name: str, cfg: dict) -> Path:
    """The safetensors file, from the Hub's cache or the Hub. CheckpointError if there is none."""
    from huggingface_hub import hf_hub_download

    if not hub_id:
        raise CheckpointError(
            f"timm has no trained weights for {name}: name a variant that has, or ask for random weights."
        )
    file = cfg.get("hf_hub_filename") or _WEIGHTS
    file = file if file.endswith(".safetensors") else _WEIGHTS
    repo, _, revision = hub_id.partition("@")
    try:
        _reach(repo, file, revision)
        return Path(hf_hub_download(repo, file, revision=revision or None))
    except _hub_errors() as error:
        raise _missing(name, hub_id, file, error) from error


def _reach(repo: str, file: str, revision: str) -> None:
    """Raise at once what a download would raise after half a minute of trying again."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(repo, file, revision=revision or None), str):
        HfApi().model_info(repo, revision=revision or None, timeout=_PATIENCE_S)


def _hub_errors() -> tuple[type[Exception], ...]:
    """What the Hub's client raises. Its HTTP library, whose errors it lets through, has changed before."""
    from huggingface_hub import errors

    libraries = [name for name in ("httpx2", "httpx") if find_spec(name)]
    transport = [import_module(name).HTTPError for name in libraries]
    return errors.HfHubHTTPError, errors.HFValidationError, errors.EntryNotFoundError, OSError, *transport


def _missing(name: str, hub_id: str, file: str, error: Exception) -> CheckpointError:
    """Why nothing came from the Hub, in a sentence."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(f"{hub_id} is closed: ask there for access, then log in with `hf auth login`.")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return CheckpointError(f"There is no model {hub_id} on the Hugging Face Hub, or none for strangers.")
    # a file that is in no cache is a kind of EntryNotFoundError, though it may well be on the Hub
    is_offline = isinstance(error, errors.LocalEntryNotFoundError | ConnectionError | TimeoutError)
    if isinstance(error, errors.EntryNotFoundError) and not is_offline:
        return CheckpointError(f"{hub_id} has no {file}, and Patchlight reads no weights but safetensors.")
    if is_offline or not isinstance(error, errors.HfHubHTTPError | OSError):
        return CheckpointError(
            f"The weights of {name} are not on this machine, and the Hugging Face Hub cannot be reached to"
            f" fetch {hub_id}: connect once, or ask for random weights."
        )
    return CheckpointError(f"{hub_id} could not be fetched: {_one_line(error)}.")


def _checkpoint(timm, model: ForeignTransformer, name: str, made_id: str, provenance: dict) -> Checkpoint:
    body = model.body
    data = timm.data.resolve_model_data_config(body)
    assumed = []
    if data["crop_mode"] != "center":
        assumed.append(f"framed by the middle, though it was measured on {data['crop_mode']!r} pictures")
    block = body.blocks[0]
    names, are_features = _class_names(timm, body, model.num_classes)
    if are_features:
        provenance = provenance | {"answers with": "features, not classes: it has no classifier"}
    architecture = ForeignArchitecture(
        num_classes=model.num_classes,
        img_size=tuple(body.patch_embed.img_size),
        patch_size=body.patch_embed.patch_size[0],
        in_channels=body.patch_embed.proj.in_channels,
        embed_dim=body.embed_dim,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        mlp_dim=max((m.out_features for m in block.mlp.modules() if hasattr(m, "out_features")), default=0)
        if hasattr(block, "mlp") else 0,
        dropout=0.0,
        prefixes=model.prefix_tokens,
    )  # fmt: skip
    return Checkpoint(
        architecture,
        names,
        tuple(data["mean"]),
        tuple(data["std"]),
        provenance={"source": f"timm {timm.__version__}"} | provenance,
        assumed=tuple(assumed),
        name=name,
        id=made_id,
        eval_resize=ResizeThenCrop(float(data["crop_pct"]), data["interpolation"]),
    )


def _class_names(timm, body: "nn.Module", outputs: int) -> tuple[tuple[str, ...], bool]:
    """Names for people, each once, and whether they are features rather than classes."""
    if not body.num_classes:
        return tuple(f"feature {number}" for number in range(1, outputs + 1)), True
    cfg = body.pretrained_cfg
    told = cfg.get("label_names")
    if told and len(told) == outputs:
        described = cfg.get("label_descriptions") or {}
        names = [str(described.get(name, name)) for name in told]
    elif subset := timm.data.infer_imagenet_subset(body):
        names = timm.data.ImageNetInfo(subset).label_descriptions()
    else:
        names = [f"class {number}" for number in range(1, outputs + 1)]
    count = Counter(names)  # ImageNet has two cranes
    return tuple(f"{name} ({i + 1})" if count[name] > 1 else name for i, name in enumerate(names)), False


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
