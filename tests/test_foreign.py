"""Models that others wrote: each against its own outputs, its attention against timm's unfused arithmetic.

Run: pytest tests/test_foreign.py. All models are random and small: a few layers of timm's architectures.
"""

import json
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from vit.__main__ import main
from vit.cause import Change, answer, head_effects
from vit.checkpoint import CheckpointError
from vit.explanation import explain
from vit.faithfulness import score_picture
from vit.foreign import ForeignTransformer
from vit.hub import open_model
from vit.images import canvas, prepare
from vit.methods import METHODS, relevance
from vit.payload import map_payload, payload

timm = pytest.importorskip("timm")
ROOT = Path(__file__).parents[1]
CAT = ROOT / "assets" / "samples" / "cat_00.png"
SMALL = {"embed_dim": 48, "depth": 3, "num_heads": 3, "img_size": 64, "num_classes": 7}
FAMILIES = {  # name in timm, changes to the small sizes, prefix tokens
    "ViT": ("vit_tiny_patch16_224", {}, 1),
    "oblong": ("vit_tiny_patch16_224", {"img_size": (48, 80)}, 1),
    "DeiT": ("deit_tiny_patch16_224", {}, 1),
    "DeiT, distilled": ("deit_tiny_distilled_patch16_224", {}, 2),
    "DeiT III": ("deit3_small_patch16_224", {}, 1),
    "DINO, features": ("vit_small_patch16_224.dino", {"num_classes": 0}, 1),
    "DINOv2": ("vit_small_patch14_dinov2", {"img_size": 56}, 1),
    "DINOv2, registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 56}, 5),
    "DINOv3": ("vit_small_patch16_dinov3", {}, 5),
    "EVA-02": ("eva02_tiny_patch14_224", {"img_size": 56}, 1),
    "rotary, mixed": ("vit_small_patch16_rope_mixed_224", {}, 1),
    "CLIP": ("vit_base_patch32_clip_quickgelu_224", {}, 1),
    "average pooling": ("vit_base_patch16_gap_224", {}, 0),
    "registers, average": ("vit_little_patch16_reg4_gap_256", {}, 4),
}


def made(family: str) -> torch.nn.Module:
    """A body with every number random, so that none can be forgotten."""
    name, changes, _ = FAMILIES[family]
    torch.manual_seed(0)
    body = timm.create_model(name, **(SMALL | changes)).eval()
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return body


OPENED = [family for family, (name, _, _) in FAMILIES.items() if name in timm.list_models() or "." in name]


@pytest.fixture(scope="module")
def case():
    """(body, model, x) of a family, made once."""
    kept = {}

    def of(family: str):
        if family not in kept:
            body = made(family)
            height, width = body.patch_embed.img_size
            x = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))
            kept[family] = body, ForeignTransformer.of(body), x
        return kept[family]

    return of


def test_most_families_are_in_this_timm():
    assert len(OPENED) >= 13


@pytest.mark.parametrize("family", OPENED)
def test_outputs_are_its_own(case, family):
    body, model, x = case(family)
    prefix = FAMILIES[family][2]
    with torch.no_grad():
        logits, maps = model(x, return_attn=True)
        assert_close(logits, body(x), atol=1e-4, rtol=1e-4)
        assert_close(model(x), body(x))
    P = model.grid[0] * model.grid[1]
    assert model.prefix_tokens == prefix
    assert [tuple(found.shape) for found in maps] == [
        (2, 3, model.prefix_tokens + P, model.prefix_tokens + P)
    ] * 3
    assert all((found.sum(-1) - 1).abs().max() < 1e-5 for found in maps)


@pytest.mark.parametrize("family", OPENED)
def test_maps_are_those_of_timms_own_unfused_attention(case, family):
    body, model, x = case(family)
    with torch.no_grad():
        maps = model(x, return_attn=True)[1]
        seen = []
        for block in body.blocks:
            block.attn.fused_attn = False
            block.attn.attn_drop.register_forward_hook(lambda module, args, out: seen.append(args[0]))
        try:
            body(x)
        finally:
            for block in body.blocks:
                block.attn.fused_attn = True
                block.attn.attn_drop._forward_hooks.clear()
    for ours, theirs in zip(maps, seen, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", OPENED)
def test_the_answer_is_read_where_readout_says(case, family):
    """Tokens that it does not read can be anything; with all tokens alike its weights sum to 1."""
    _, model, x = case(family)
    with torch.no_grad():
        tokens = model.trace(x).layers[-1].tokens
        readout = model.readout(tokens.shape[1])
        assert float(readout.sum()) == pytest.approx(1, abs=1e-6)
        other = torch.where(readout[:, None] > 0, tokens, torch.randn_like(tokens))
        assert_close(model.classify(other), model.classify(tokens))
        noisy = tokens + torch.where(readout[:, None] > 0, torch.randn_like(tokens), 0)
        assert not torch.allclose(model.classify(noisy), model.classify(tokens))


@pytest.mark.parametrize("family", OPENED)
def test_patches_that_stay_keep_their_places(case, family):
    """All of them in another order are the same model: each must have taken its position along."""
    _, model, x = case(family)
    P = model.grid[0] * model.grid[1]
    keep = torch.stack([torch.randperm(P, generator=torch.Generator().manual_seed(b)) for b in range(2)])
    with torch.no_grad():
        assert_close(model(x, keep=keep), model(x), atol=1e-4, rtol=1e-4)
        assert model(x, keep=keep[:, :3]).shape == model(x).shape


@pytest.mark.parametrize("family", ["ViT", "DeiT, distilled", "DINOv3", "average pooling"])
def test_a_head_that_is_off_writes_nothing(case, family):
    body, model, x = case(family)
    gate = torch.ones(3, 3)
    gate[1, 2] = 0
    with torch.no_grad():
        found = model.trace(x, head_gate=gate).logits
        weight = body.blocks[1].attn.proj.weight
        kept = weight.clone()
        weight[:, 32:48] = 0
        assert_close(found, body(x), atol=1e-4, rtol=1e-4)
        weight.copy_(kept)


@pytest.mark.parametrize("family", ["DeiT III", "DINOv3", "CLIP"])
def test_what_a_head_writes(case, family):
    """The attention branch is the sum of out_weight @ what each head read, and a bias."""
    _, model, x = case(family)
    with torch.no_grad():
        layers = model.trace(x).layers
        read = layers[1].map @ layers[1].v  # (B, H, N, d)
        written = torch.einsum("dhi,bhni->bnd", model.out_weight(1), read)
    got, block = {}, model.body.blocks[1]
    hook = block.norm2.register_forward_pre_hook(lambda module, args: got.setdefault("x", args[0]))
    try:
        with torch.no_grad():
            block(layers[0].tokens, **({"rope": model._places(None)[1]} if model._places(None) else {}))
    finally:
        hook.remove()
    branch = got["x"] - layers[0].tokens
    bias = branch - written
    assert_close(bias, bias[:1, :1].expand_as(bias), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", OPENED)
def test_every_method_explains_it_or_says_why_not(case, family):
    _, model, x = case(family)
    refused = set()
    for method in METHODS:
        try:
            found = relevance(model, x, method, target=1, versus=2)
        except ValueError:
            refused.add(method)
            continue
        assert found.shape == (2, model.grid[0] * model.grid[1])
        assert found.isfinite().all()
        assert_close(found[1:], relevance(model, x[1:], method, target=1, versus=2), atol=1e-4, rtol=1e-3)
    assert refused <= {"attnlrp", "norm_weighted"}
    if family in ("ViT", "oblong", "DeiT, distilled", "average pooling", "DINOv2, registers"):
        assert not refused


@pytest.mark.parametrize("family", ["DeiT, distilled", "DINOv3", "registers, average"])
def test_what_is_built_on_models_takes_it(case, family):
    _, model, x = case(family)
    P = model.grid[0] * model.grid[1]
    said = answer(model, x[:1], Change(frozenset({(0, 1)}), frozenset({2, 3})))
    assert said.shape == (3, 7)
    assert head_effects(model, x[:1], 0).shape == (3, 3)
    curves = score_picture(model, x, {"chefer": relevance(model, x, "chefer")}, orders=2, steps=4)
    assert curves.methods["chefer"].deletion.shape == (2, 5)
    explanation = explain(model, x, discard_ratio=0.5)
    readout = model.readout(model.prefix_tokens + P)
    expected = (readout @ explanation.rollout[:, -1])[:, model.prefix_tokens :]
    assert_close(explanation.relevance.flatten(1), expected)


def test_the_viewer_gets_one_token_before_the_patches(case):
    import base64

    from vit.architecture import Architecture
    from vit.checkpoint import Checkpoint

    _, model, x = case("DINOv3")
    explanation = explain(model, x, discard_ratio=0.5)
    sizes = Architecture(7, (64, 64), 16, 3, 48, 3, 3, 0)
    checkpoint = Checkpoint(sizes, tuple("abcdefg"), (0.5,) * 3, (0.5,) * 3)
    drawn = np.zeros((64, 64, 3), np.uint8)
    for whole in (True, False):
        data = payload(
            explanation, checkpoint, drawn, name="x", title="x", fusion="mean", discard=0.5, whole=whole
        )
        packed = data["raw"] if whole else data["cls_raw"]
        values = np.frombuffer(base64.b64decode(packed["values"]), np.uint8).reshape(
            3, -1, *([17] * (1 + whole))
        )
        scales = np.frombuffer(base64.b64decode(packed["scales"]), np.float32).reshape(values.shape[:-1])
        row = (values * scales[..., None])[2, 1][0] if whole else (values * scales[..., None])[2, 1]
        expected = model.readout(21) @ explanation.attention[0, 2, 1]  # the mean of the patches' rows
        np.testing.assert_allclose(row[1:], expected[5:], atol=scales.max())
    assert map_payload(explanation, "raw/1/all", "mean")


def test_sizes_and_preprocessing_are_its_own():
    model, checkpoint = open_model("timm:vit_tiny_patch16_224", img_size=(96, 160), random_weights=True)
    assert model.grid == checkpoint.architecture.grid == (6, 10)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (231, 317, 3), dtype=np.uint8))
    for name, size in (("vit_tiny_patch16_224", (96, 160)), ("vit_base_patch32_clip_224.openai", None)):
        model, checkpoint = open_model(f"timm:{name}", img_size=size, random_weights=True)
        data = timm.data.resolve_model_data_config(model.body)
        if size:
            data["input_size"] = (3, *size)
        theirs = timm.data.create_transform(**data, is_training=False)(picture)
        assert_close(prepare(picture, checkpoint)[0], theirs, atol=1e-5, rtol=0)
        height, width = canvas(picture, checkpoint).shape[:2]
        assert height / width == pytest.approx(theirs.shape[1] / theirs.shape[2], abs=0.02)
    assert len(set(checkpoint.class_names)) == checkpoint.architecture.num_classes == model.num_classes


def test_class_names_are_words_and_features_are_numbered():
    _, checkpoint = open_model("timm:vit_tiny_patch16_224", random_weights=True)
    assert checkpoint.class_names[0] == "tench, Tinca tinca"
    assert len(set(checkpoint.class_names)) == 1000
    assert "untrained" in checkpoint.provenance
    _, checkpoint = open_model("timm:vit_small_patch16_224.dino", random_weights=True)
    assert checkpoint.class_names[:2] == ("feature 1", "feature 2")
    assert "features" in checkpoint.provenance["answers with"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("timm:swin_tiny_patch4_window7_224", "attends within windows"),
        ("timm:resnet18", "has no attention"),
        ("timm:vit_tiny_patch16_225", r"did you mean vit_tiny_patch16_224\?"),
        ("timm:vit_base_patch16_siglip_224", "pools its answer by another attention"),
        ("timm:beit_base_patch16_224", "attention is of its own kind"),
        ("timm:vit_small_patch16_18x2_224", "attends 2 times in a block|attends"),
        ("timm:", "is named"),
    ],
)
def test_what_cannot_be_opened_is_said_in_a_sentence(name, sentence):
    with pytest.raises(CheckpointError, match=sentence) as told:
        open_model(name, random_weights=True)
    assert str(told.value).count("\n") == 0
    assert str(told.value).endswith((".", "?"))


def test_without_timm_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(CheckpointError, match="pip install timm"):
        open_model("timm:vit_tiny_patch16_224")


# ---- the Hub, as a server on loopback --------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """Answers for one repository, someone/tiny, as the Hub does."""

    files: dict[str, bytes]

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/someone/tiny"):
            self.send(
                200, json.dumps({"id": "someone/tiny", "modelId": "someone/tiny", "siblings": []}).encode()
            )
        elif path.startswith("/someone/tiny/resolve/main/"):
            data = self.files.get(path.rpartition("/")[2])
            if data is None:
                self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                self.send(200, data, {"ETag": f'"{hash(data):x}"', "X-Repo-Commit": "0" * 40}, with_body)
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def send(self, code, data, headers=None, with_body=True) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *_):
        """Nothing: the test's output is not the server's."""


@pytest.fixture
def hub(tmp_path):
    """`ask(files, *arguments)` runs explain on a machine whose Hub holds these files."""

    def ask(files: dict[str, bytes], *arguments: str) -> subprocess.CompletedProcess:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub))
        Hub.files = files
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            environment = {
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf"),
                "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1",
                "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
            }  # fmt: skip
            asked = [sys.executable, "-m", "vit", "explain", str(CAT), *arguments]
            return subprocess.run(
                asked, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
            )
        finally:
            server.shutdown()
            server.server_close()

    return ask


def test_weights_come_from_the_hub_and_stay(hub, tmp_path):
    from safetensors.torch import save

    options = {"embed_dim": 48, "depth": 2, "num_heads": 3, "img_size": 64, "num_classes": 3}
    torch.manual_seed(5)
    body = timm.create_model("vit_tiny_patch16_224", **options).eval()
    config = {
        "architecture": "vit_tiny_patch16_224", "num_classes": 3, "model_args": options,
        "label_names": ["ant", "bee", "cat"],
        "pretrained_cfg": {"input_size": [3, 64, 64], "num_classes": 3, "mean": [0.4] * 3, "std": [0.2] * 3,
                           "crop_pct": 1.0, "interpolation": "bilinear", "first_conv": "patch_embed.proj",
                           "classifier": "head"},
    }  # fmt: skip
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": save(body.state_dict())}
    done = hub(files, "--model", "hf-hub:someone/tiny", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    picture = Image.open(CAT).convert("RGB").resize((64, 64), Image.Resampling.BILINEAR)
    x = (torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None] / 255 - 0.4) / 0.2
    with torch.no_grad():
        expected = body(x).softmax(-1)[0].tolist()
    assert list(said["probabilities"]) == ["ant", "bee", "cat"]
    assert list(said["probabilities"].values()) == pytest.approx(expected, abs=1e-4)
    assert "untrained" not in done.stderr


def test_other_formats_and_strangers_are_refused_in_a_sentence(hub):
    config = json.dumps({"architecture": "vit_tiny_patch16_224", "num_classes": 10}).encode()
    done = hub(
        {"config.json": config, "pytorch_model.bin": b"cos\nsystem\n"}, "--model", "hf-hub:someone/tiny"
    )
    assert done.returncode == 2
    assert "no model.safetensors, and Patchlight reads no weights but safetensors" in done.stderr
    done = hub({}, "--model", "hf-hub:someone/other")
    assert done.returncode == 2
    assert "There is no model someone/other" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_machine_without_the_weights_says_what_is_missing(tmp_path):
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    out = tmp_path / "page.png"
    asked = [sys.executable, "-m", "vit", "explain", str(CAT), "--model", "timm:vit_tiny_patch16_224",
             "--method", "all", "--out", str(out)]  # fmt: skip
    done = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "The weights of timm:vit_tiny_patch16_224 are not on this machine" in done.stderr
    assert not out.exists()


def test_random_weights_say_so_wherever_it_speaks(tmp_path, capsys):
    out = tmp_path / "cat.png"
    asked = [
        "explain",
        str(CAT),
        "--model",
        "timm:vit_tiny_patch16_224",
        "--size",
        "64,96",
        "--random-weights",
    ]
    assert main([*asked, "--method", "chefer", "--out", str(out)]) == 0
    assert "untrained: random weights" in capsys.readouterr().err
    with Image.open(out) as image:
        assert "untrained" in image.text["checkpoint"]
    assert main(["info", "--model", "timm:deit_tiny_distilled_patch16_224", "--random-weights"]) == 0
    assert "random weights" in capsys.readouterr().out
    assert main(["explain", str(CAT), "--random-weights"]) == 2
    assert "--random-weights is for --model" in capsys.readouterr().err
