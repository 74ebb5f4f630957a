"""The report of a run: its figures against counts made here, whatever is broken in the run named and no more.

Run: pytest tests/test_report.py (some seconds). Without Chromium the tests in a browser are skipped; with
PATCHLIGHT_BROWSER=required they fail instead.
"""

import base64
import io
import json
import math
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from synthetic import made, write_classes, write_layout

from train import film, report
from train.figures import Series, curve
from train.report import write_report
from vit.checkpoint import load
from vit.datasets import DataError, holdout_indices, load_pictures
from vit.evaluate import Cancelled, wilson_interval
from vit.overlay import draw
from vit.sources import CLASSES

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or "/usr/bin/chromium"
EVIL = "<script>alert(1)</script>\"'><img src=http://evil.example/x onerror=alert(2)>&amp;"
TORN = b'{"step": 1, "lr": 0.1}\n{"step": 2, "lo'
VOID = {"meta", "img", "br", "path", "circle"}


class Parsed(HTMLParser):
    """What is in a page: tags with attributes, and the text of each section by its heading."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.open, self.sections, self.rows = [], [], {"": ""}, []
        self.heading = ""
        self.feed(html)
        self.close()
        assert not self.open, "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "h2":
            self.heading = None
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        if self.heading is None:
            self.heading = data
            self.sections[data] = ""
        self.sections[self.heading] += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data.strip()

    def said(self, heading: str) -> str:
        return " ".join(self.sections[heading].replace("\u00a0", " ").split())

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]


def picture_of(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A cache of the test's own, no data set of the machine."""
    monkeypatch.setenv("PATCHLIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PATCHLIGHT_DATA", raising=False)
    return tmp_path


@pytest.fixture
def make_run(folders, write_checkpoint):
    """make_run(data="…", class_names=…): a finished run of a tiny model, as the trainer would leave it."""

    def make(
        data: Path | str, *, class_names=CLASSES, best=True, digest=None, command=None, **settings
    ) -> Path:
        run = folders / "runs" / "a run"
        path = run / "checkpoints" / ("best" if best else "last")
        write_checkpoint(
            path.with_suffix(".safetensors"), class_names=class_names, num_layers=2, patch_size=8
        )
        config = {"data": str(data), "holdout": 5000, "split_seed": 3, "lr": 0.002, "compile": False}
        facts = {
            "preset": "demo",
            "config": config | settings,
            "not_stated": {"schedule": "constant"},
            "resolved": {"device": "cpu", "precision": "float32"},
            "command": command or "python -m train run --preset demo",
            "data": {
                "name": "made train",
                "digest": digest,
                "class_names": list(class_names),
                "left_out": [],
            },
            "parameters": 12345,
        }
        (run / "config.json").write_text(json.dumps(facts))
        (run / "status.json").write_text(json.dumps({"state": "finished", "progress": 1.0}))
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(10, 101, 10):
                row = {"step": step, "epoch": step / 40, "seconds": step * 1.3, "loss": 2 / step, "lr": 0.001}
                if step % 50 == 0:
                    row |= {"val_accuracy": step / 200, "val_loss": 1.5}
                file.write(json.dumps(row) + "\n")
        images, labels = made(12, 4)
        recording = film.empty(images, labels % len(class_names), class_names)
        for step, seed in ((0, 1), (50, 2), (100, 3)):
            recording = film.record(recording, tiny(len(class_names), seed), step, (0.5,) * 3, (0.5,) * 3)
        film.save(recording, run / "attention.npz")
        return run

    return make


def tiny(num_classes: int, seed: int):
    from vit.model import VisualTransformer

    torch.manual_seed(seed)
    sizes = {"patch_size": 8, "embed_dim": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 32}
    return VisualTransformer(num_classes, init="tutorial", **sizes).eval()


def read(path: Path) -> Parsed:
    return Parsed(path.read_text(encoding="utf-8"))


def answers(run: Path, images: np.ndarray, name="best") -> tuple[np.ndarray, np.ndarray]:
    """Classes and their probabilities, by arithmetic of this test's own."""
    model, _ = load(run / "checkpoints" / f"{name}.safetensors", device="cpu")
    x = torch.tensor((images / 255.0 - 0.5) / 0.5, dtype=torch.float32).permute(0, 3, 1, 2)
    with torch.no_grad():
        probabilities = model(x).softmax(-1).numpy()
    return probabilities.argmax(1), probabilities.max(1)


# --- figures


def test_the_figures_are_those_counted_here(make_run, folders):
    data = write_layout("folders", folders / "data")
    run = make_run(data)
    page = read(write_report(run))
    pictures = load_pictures(data, "test")
    said, sure = answers(run, pictures.images)
    right = int((said == pictures.labels).sum())
    low, high = wilson_interval(right, 40)
    result = page.said("How good it is")
    assert f"{100 * right / 40:.2f} % of 40 pictures of {pictures.name} are named rightly" in result
    assert f"95 % interval {100 * low:.2f} % to {100 * high:.2f} %" in result
    assert "chosen as best by its accuracy on held-out training pictures" in result
    assert "one run with one seed" in result
    assert "chose nothing by them" in result
    for k, name in enumerate(CLASSES):
        truly, called = pictures.labels == k, said == k
        both = int((truly & called).sum())
        shares = (both / max(called.sum(), 1), both / truly.sum(), 2 * both / (truly.sum() + called.sum()))
        row = [name, str(truly.sum()), *(f"{100 * share:.1f}\u00a0%" for share in shares)]
        assert row in page.rows
        assert [name, *(str(int((truly & (said == j)).sum())) for j in range(10))] in page.rows
    wrong = np.flatnonzero(said != pictures.labels)
    wrong = wrong[np.argsort(-sure[wrong], kind="stable")][: report.MISTAKES]
    sources = [each["src"] for each in page.all("img")]
    for source, index in zip(sources, wrong, strict=False):
        assert np.array_equal(picture_of(source), pictures.images[index])
    first = f"{CLASSES[pictures.labels[wrong[0]]]}, taken for {CLASSES[said[wrong[0]]]}, "
    assert first + f"{100 * sure[wrong[0]]:.1f} %" in page.said("Pictures")


def test_right_answers_are_the_first_of_each_class(make_run, folders):
    data = write_layout("folders", folders / "data")
    run = make_run(data)
    page = read(write_report(run))
    pictures = load_pictures(data, "test")
    said, _ = answers(run, pictures.images)
    expected = {}
    for i in range(40):
        if said[i] == pictures.labels[i]:
            expected.setdefault(int(said[i]), pictures.images[i])
    assert expected
    shown = [each["src"] for each in page.all("img") if "picture" in each["alt"]][report.MISTAKES :]
    assert len(shown) == len(expected)
    for source, picture in zip(shown, [expected[k] for k in sorted(expected)], strict=True):
        assert np.array_equal(picture_of(source), picture)


def test_the_test_set_is_opened_once_and_the_training_pictures_never(make_run, folders, monkeypatch):
    run = make_run(write_layout("folders", folders / "data"))
    opened = []

    def counted(named, split, **options):
        opened.append(split)
        return load_pictures(named, split, **options)

    monkeypatch.setattr(report, "load_pictures", counted)
    write_report(run)
    assert opened == ["test"]


def test_last_stands_in_where_there_is_no_best(make_run, folders):
    run = make_run(write_layout("folders", folders / "data"), best=False)
    assert "Measured: last.safetensors" in (said := read(write_report(run)).said("How good it is"))
    assert "kept no best" in said
    assert "chosen as best" not in said


def test_a_plain_tree_is_measured_on_what_was_held_out(make_run, folders):
    write_classes(folders / "tree", *made(60, 5))
    run = make_run(folders / "tree", split_seed=3, holdout=5000)
    pictures = load_pictures(folders / "tree", "train")
    _, held = holdout_indices(pictures.labels, 5000, 3)
    said, _ = answers(run, pictures.images[held])
    share = (said == pictures.labels[held]).mean()
    result = read(write_report(run)).said("How good it is")
    assert f"{100 * share:.2f} % of {len(held)} pictures held out from {pictures.name}" in result
    assert "no test split of its own" in result
    assert "somewhat too good" in result


def test_a_folder_with_training_pictures_alone_is_measured_so_too(make_run, folders):
    write_classes(folders / "data" / "train", *made(60, 5))
    assert "held out from" in read(write_report(make_run(folders / "data"))).said("How good it is")


def test_nothing_is_measured_on_pictures_it_was_trained_on(make_run, folders):
    write_classes(folders / "tree", *made(60, 5))
    run = make_run(folders / "tree", holdout=0)
    assert "no accuracy would be honest" in read(write_report(run)).said("How good it is")


def test_changed_pictures_are_not_taken_for_those_held_out(make_run, folders):
    write_classes(folders / "tree", *made(60, 5))
    run = make_run(folders / "tree", digest="0" * 64)
    said = read(write_report(run)).said("How good it is")
    assert "have changed since the run" in said
    assert "named rightly" not in said


def test_data_can_be_named(make_run, folders):
    run = make_run("cifar10")
    data = write_layout("parquet", folders / "elsewhere")
    said = read(write_report(run, data=data)).said("How good it is")
    assert "of 40 pictures of CIFAR-10 test" in said


def test_without_a_test_set_the_page_says_how_to_get_it(make_run):
    page = read(write_report(make_run("cifar10")))
    assert "python -m vit data" in page.said("How good it is")
    assert "step 100" in page.said("Attention before and after")
    assert page.all("svg")
    assert "Class by class" not in page.sections


def test_progress_is_told_and_can_cancel(make_run, folders):
    run = make_run(write_layout("folders", folders / "data"))
    told = []
    write_report(run, progress=lambda *progress: told.append(progress))
    assert told[-1] == (40, 40, "pictures classified")
    (run / "report.html").unlink()

    def cancel(*_):
        raise Cancelled

    with pytest.raises(Cancelled):
        write_report(run, progress=cancel)
    assert not (run / "report.html").exists()


# --- curves


def test_curves_say_their_ends_and_leave_room_for_gaps(make_run):
    labels = [each["aria-label"] for each in read(write_report(make_run("cifar10"))).all("svg")]
    assert labels == [
        "Loss over steps. training: 0.2 at step 10, 0.02 at step 100. "
        "held-out pictures: 1.5 at step 50, 1.5 at step 100.",
        "Accuracy on held-out pictures over steps. held-out pictures: 25.0 % at step 50, 50.0 % at step 100.",
        "Learning rate over steps. learning rate: 0.001 at step 10, 0.001 at step 100.",
    ]


@example([(0, 0.0)])
@example([(5, 0.0), (9, 0.0)])
@example([(5, 0.3), (9, 0.1 + 0.2)])  # differ by a rounding
@given(
    st.lists(
        st.tuples(st.integers(0, 10**7), st.floats(0, 1e6) | st.just(0.1)),
        min_size=1,
        max_size=900,
        unique_by=lambda each: each[0],
    )
)
def test_whatever_is_drawn_stays_inside_the_frame(points):
    steps, values = np.array(sorted(points), float).T
    svg = curve("Loss", [Series("training", steps, values)])
    line = re.search(r'class="line" d="M([^"]+)"', svg)[1].split("L")
    assert 1 <= len(line) <= 400
    for x, y in (map(float, dot.split()) for dot in line):
        assert 0 <= x <= 420
        assert 0 <= y <= 240
    assert 2 <= svg.count('class="rule"') <= 7


def test_higher_is_higher_and_later_is_further_right():
    svg = curve("Accuracy", [Series("a", np.array([0, 10, 20]), np.array([0.0, 0.5, 1.0]))], percent=True)
    dots = [tuple(map(float, dot.split())) for dot in re.search(r'"line" d="M([^"]+)"', svg)[1].split("L")]
    (x0, y0), (x1, y1), (x2, y2) = dots
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert math.isclose(y1, (y0 + y2) / 2, abs_tol=0.1)


# --- attention


def test_attention_is_that_of_the_first_and_the_last_frame(make_run):
    run = make_run("cifar10")
    page = read(write_report(run))
    images, _ = made(12, 4)
    shown = [picture_of(each["src"]) for each in page.all("img")]
    assert len(shown) == 3 * report.PROBES
    x = torch.tensor((images[:1] / 255.0 - 0.5) / 0.5, dtype=torch.float32).permute(0, 3, 1, 2)
    assert np.array_equal(shown[0], images[0])
    for pixels, seed in ((shown[1], 1), (shown[2], 3)):
        with torch.no_grad():
            _, maps = tiny(10, seed)(x, return_attn=True)
        weights = maps[-1][0, :, 0, 1:].mean(0).reshape(4, 4).numpy()
        assert np.abs(pixels.astype(int) - draw(images[0], weights)).max() <= 3  # of 255: half a level
    said = page.said("Attention before and after")
    assert "not a full explanation" in said
    assert said.count("step 0:") == said.count("step 100:") == report.PROBES
    assert "step 50:" not in said


def test_one_frame_is_shown_as_one(make_run):
    run = make_run("cifar10")
    film.save(film.cut(film.load(run / "attention.npz"), 0), run / "attention.npz")
    page = read(write_report(run))
    assert len(page.all("img")) == 2 * report.PROBES


# --- what is broken


def broken_attention(run: Path, change) -> None:
    recording = film.load(run / "attention.npz")
    film.save(replace(recording, **change(recording)), run / "attention.npz")


@pytest.mark.parametrize(
    ("name", "damage", "section", "sentence"),
    [
        ("attention.npz", None, "Attention before and after", "no recording of attention"),
        ("attention.npz", b"PK\x03\x04", "Attention before and after", "damaged"),
        ("metrics.jsonl", None, "How it learned", "there are no curves"),
        ("metrics.jsonl", b"\xff\x00{", "How it learned", "there are no curves"),
        ("metrics.jsonl", TORN, "How it learned", "Loss: nothing was recorded"),
        ("metrics.jsonl", TORN, "How it learned", "could not be read and are left out: 1."),
        ("config.json", None, "Settings", "The run has no config.json"),
        ("config.json", b'{"preset": "de', "Settings", "config.json cannot be read"),
        ("config.json", b"[1, 2]", "Settings", "does not hold a JSON object"),
        ("config.json", b"[" * 100_000, "Settings", "config.json cannot be read"),
        ("config.json", b"\xff\xfe", "Settings", "config.json cannot be read"),
        ("config.json", b'{"config": 3, "data": [], "command": null}', "How good it is", "with --data"),
        ("status.json", None, "", "The run has no status.json"),
        ("status.json", b"", "", "status.json cannot be read"),
        ("status.json", b'{"state": "failed", "reason": "the disk is full", "progress": 0.4}', "",
         "This run has not finished: its state is failed. It got through 40 % of its length. "
         "Reason: the disk is full"),
        ("checkpoints/best.safetensors", None, "How good it is", "no checkpoint yet"),
        ("checkpoints/best.safetensors", b"\x08\0\0\0\0\0\0\0{}", "How good it is", "best.safetensors"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named_and_the_rest_is_there(make_run, folders, name, damage, section, sentence):
    run = make_run(write_layout("folders", folders / "data"))
    (run / name).unlink() if damage is None else (run / name).write_bytes(damage)
    page = read(write_report(run))
    assert sentence in page.said(section)
    assert {"How good it is", "How it learned", "Settings", "How to reproduce it"} < set(page.sections)
    if name != "attention.npz":
        assert "step 100:" in page.said("Attention before and after")
    if not name.startswith(("checkpoints", "config")):
        assert "named rightly" in page.said("How good it is")


@pytest.mark.parametrize(
    "change",
    [
        lambda recording: {"rollout": recording.rollout[..., :-2], "cls_row": recording.cls_row[..., :-2]},
        lambda recording: {"rollout_scale": recording.rollout_scale + np.float32(3e38)},
    ],
)
def test_a_recording_that_cannot_be_drawn_is_named(make_run, change):
    run = make_run("cifar10")
    broken_attention(run, change)
    page = read(write_report(run))
    assert not page.all("img")
    assert "recording of attention" in page.said("Attention before and after")
    assert "damaged" in page.said("Attention before and after")


def test_senseless_metrics_are_left_out(make_run):
    run = make_run("cifar10")
    rows = ['{"step": 1, "loss": NaN}', '{"step": 2, "loss": Infinity}', '{"step": 3, "loss": "low"}',
            '{"step": true, "loss": 1}', '{"step": 4, "loss": 1e300}', f'{{"step": 5, "loss": {"9" * 400}}}',
            '{"step": 6, "loss": 0.5}', '{"step": 6, "loss": 0.25}', "[]", "7", ""]  # fmt: skip
    (run / "metrics.jsonl").write_text("\n".join(rows))
    page = read(write_report(run))
    assert "training: 0.25 at step 6, 0.25 at step 6." in page.all("svg")[0]["aria-label"]


def test_a_run_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="There is no run in"):
        write_report(tmp_path / "gone")


def test_a_folder_that_is_no_run_gets_no_page(folders):
    (folders / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no run"):
        write_report(folders / "empty")
    assert not list((folders / "empty").iterdir())


def test_a_device_that_is_not_here_is_refused(make_run):
    with pytest.raises(ValueError, match="nonsense"):
        write_report(make_run("cifar10"), device="nonsense")


def test_a_run_of_which_little_is_left_still_gives_a_page(folders):
    (folders / "empty").mkdir()
    (folders / "empty" / "status.json").write_text("torn")
    out = write_report(folders / "empty", folders / "out" / "page.html")
    assert out == folders / "out" / "page.html"
    assert len([each for each in read(out).all("p") if each.get("class") == "missing"]) >= 5


def test_other_damage_is_not_hidden(make_run, folders, monkeypatch):
    run = make_run(write_layout("folders", folders / "data"))
    monkeypatch.setattr(report, "predict", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(run)
    assert issubclass(DataError, RuntimeError)  # which is why the report names it beside ValueError


# --- strangers' words, and what the page may do


@pytest.fixture
def evil_run(make_run, folders, monkeypatch):
    """A run in whose files every word is hostile, and its test pictures."""
    names = (EVIL, "b", "c{{ 7 * 7 }}")
    run = make_run("cifar10", class_names=names, command=EVIL, **{EVIL: EVIL, "more": ["{{ 7 * 7 }}", EVIL]})
    (run / "status.json").write_text(json.dumps({"state": EVIL, "reason": EVIL}))
    (run / "log.txt").write_text(EVIL)
    pixels, labels = made(30, 6)
    parts = load_pictures(write_layout("folders", folders / "data"), "test")
    pictures = replace(
        parts, images=pixels, labels=labels % 3, ids=labels.astype(str), class_names=names, name=EVIL
    )
    monkeypatch.setattr(report, "load_pictures", lambda *_, **__: pictures)
    return run


def test_strangers_words_are_only_words(evil_run):
    html = write_report(evil_run).read_text(encoding="utf-8")
    page = Parsed(html)
    assert not page.all("script")
    assert all(each["src"].startswith("data:image/png;base64,") for each in page.all("img"))
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    for section in ("", "How good it is", "Who is taken for whom", "Pictures", "Attention before and after",
                    "Settings", "How to reproduce it"):  # fmt: skip
        assert EVIL in page.sections[section], section
    assert any(row[0] == EVIL and row[1] == "12" for row in page.rows)
    assert "c{{ 7 * 7 }}" in html
    assert "c49" not in re.sub(r"base64,[^\"]*", "", html)  # letters of a picture may be any


def test_the_page_needs_nothing_from_anywhere(make_run, folders):
    html = write_report(make_run(write_layout("folders", folders / "data"))).read_text(encoding="utf-8")
    page = Parsed(html)
    without_pictures = re.sub(r'"data:image/png;base64,[^"]+"', "", html)
    assert not re.search(r"https?:|@import|url\(|//[a-z]", without_pictures)
    assert not {"script", "link", "iframe", "object", "form"} & {tag for tag, _ in page.tags}
    policy = next(each["content"] for each in page.all("meta") if "http-equiv" in each)
    assert "default-src 'none'" in policy


def test_the_page_is_open_to_all(make_run, folders):
    page = read(write_report(make_run(write_layout("folders", folders / "data"))))
    assert page.all("html") == [{"lang": "en"}]
    assert all(each["alt"] for each in page.all("img"))
    assert all(each["role"] == "img" and each["aria-label"] for each in page.all("svg"))
    assert all(each.get("scope") in ("col", "row") for each in page.all("th"))
    assert len(page.all("th")) > 30
    assert len(page.all("h1")) == 1
    described = {each["aria-describedby"] for each in page.all("table")}
    assert described <= {attrs.get("id") for _, attrs in page.tags}


def test_writing_is_whole(make_run, monkeypatch):
    run = make_run("cifar10")
    out = write_report(run)
    before = out.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    (run / "status.json").write_text("{}")  # the next page would be another one
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_report(run)
    assert out.read_bytes() == before
    assert not [each for each in run.iterdir() if each.suffix == ".part"]


# --- in a browser


@pytest.fixture(scope="module")
def browser():
    if not Path(CHROMIUM).exists():
        why = f"there is no Chromium at {CHROMIUM}"
        (pytest.fail if os.environ.get("PATCHLIGHT_BROWSER") == "required" else pytest.skip)(why)
    pytest.importorskip("playwright", reason="playwright is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield chromium
        chromium.close()


def visit(browser, path: Path, width: int, scheme: str):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    page.complaints = []
    page.on("console", lambda said: page.complaints.append(said.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on(
        "request",
        lambda request: page.complaints.append(request.url) if request.url.startswith("http") else None,
    )
    page.on("dialog", lambda dialog: page.complaints.append("a dialog"))
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_a_browser_shows_it_whole(browser, make_run, folders, width, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(browser, write_report(make_run(write_layout("folders", folders / "data"))), width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 384) == (scheme == "light")
    loaded = "all => all.map(img => img.complete && img.naturalWidth > 0)"
    assert all(page.locator("img").evaluate_all(loaded))
    assert page.complaints == []
    smallest = page.locator("svg").evaluate_all(
        "all => Math.min(...all.map(svg => 13 * svg.getBoundingClientRect().width / 420))"
    )
    assert smallest >= 10
    if (width, scheme) in ((1440, "light"), (390, "dark")):  # it takes seconds
        found = Axe().run(page).response["violations"]
        assert [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found] == []
    page.context.close()


def test_a_browser_runs_none_of_a_strangers_words(browser, evil_run):
    page = visit(browser, write_report(evil_run), 390, "light")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.complaints == []
    assert page.locator("script").count() == 0
    page.context.close()
