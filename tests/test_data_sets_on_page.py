"""The gallery follows the data set of the model that is looked into: CIFAR-10, made patterns, or a folder.

Run: pytest tests/test_data_sets_on_page.py (half a minute). AppTest, as in test_app.py.
"""

import base64
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from synthetic import made, write_classes
from test_app import (
    code_of,
    data_of,
    ids_of,
    items_of,
    link_of,
    only_mistakes,
    opened,
    place,
    png,
    said,
    shown,
    test_set,  # noqa: F401, a fixture
    until,
    upload,
    view_of,
    words_of,
)

from vit import patterns
from vit.architecture import Architecture
from vit.checkpoint import Checkpoint
from vit.datasets import load_pictures
from vit.page import models, pictures
from vit.page.pictures import find_picture, is_of_another_set
from vit.page.view import View

pytestmark = pytest.mark.usefixtures("page_folders")
PATTERNS = [f"pattern:{number:02d}" for number in range(20)]
FLOWERS = ("daisy", "rose", "tulip")


@pytest.fixture
def patterns_model(tmp_path, monkeypatch, write_checkpoint):
    """A small bundled model for made patterns, and 120 test pictures instead of 10,000."""
    path = tmp_path / "weights" / "patterns.safetensors"
    write_checkpoint(path, class_names=patterns.CLASSES, num_layers=2, num_heads=2, patch_size=8)
    monkeypatch.setattr(models, "BUNDLED_PATTERNS", path)
    monkeypatch.setitem(patterns.PICTURES, "test", 120)  # as many as `test_set`
    return path


@pytest.fixture
def flowers(tmp_path, page_folders, write_checkpoint):
    """A run on a folder of 30 test pictures in three classes; returns the folder, the pixels, the labels."""
    pixels, _ = made(30, 8)
    labels = np.arange(30) // 10
    for split in ("train", "test"):
        write_classes(tmp_path / "flowers" / split, pixels, labels, FLOWERS)
    run = page_folders / "flowers"
    write_checkpoint(run / "checkpoints" / "last.safetensors", class_names=FLOWERS, num_layers=1)
    (run / "config.json").write_text(json.dumps({"config": {"data": str(tmp_path / "flowers")}}))
    return tmp_path / "flowers", pixels, labels


def choose(app, model: str):
    return shown(app.selectbox(key="view_model").set_value(model).run())


def pixels_of(data: dict) -> np.ndarray:
    """The picture that the viewer draws on."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data["picture"].partition(",")[2]))))


def is_quiet(app) -> bool:
    return not [*app.error, *app.info, *app.warning, *app.toast]


# Made patterns


def test_a_link_to_the_patterns_model_alone_explains_a_pattern(patterns_model):
    first = patterns.CLASSES[load_pictures("patterns").labels[0]]
    app = opened(model="patterns")
    assert is_quiet(app)
    assert link_of(app) == {"model": "patterns", "picture": "pattern:00"}
    assert app.selectbox(key="view_model").value == "patterns"
    assert "Bundled ViT for patterns" in app.selectbox(key="view_model").options
    assert data_of(app)["title"] == f"{first} 00"
    assert data_of(app)["true_class"] == first
    assert data_of(app)["classes"] == list(patterns.CLASSES)
    assert app.segmented_control(key="gallery_place").value == "Samples"
    assert "Made by code" in words_of(app)
    assert "CIFAR" not in words_of(app)


def test_the_samples_are_the_first_test_pictures(patterns_model):
    app = opened(model="patterns", picture="pattern:05")
    assert is_quiet(app)
    assert link_of(app) == {"model": "patterns", "picture": "pattern:05"}
    test = load_pictures("patterns", "test")
    classes = [patterns.CLASSES[label] for label in test.labels[:20]]
    assert [(item["id"], item["label"]) for item in items_of(app)] == list(
        zip(PATTERNS, classes, strict=True)
    )
    for number, name in enumerate(PATTERNS):
        seen = find_picture(name, "patterns", (32, 32), "crop")
        assert np.array_equal(seen.seen, test.images[number])
        assert seen.true_class == classes[number]
    assert data_of(app)["title"] == f"{classes[5]} 05"
    assert np.array_equal(pixels_of(data_of(app)), test.images[5])
    assert "assets/weights/patterns.safetensors" in code_of(app)
    assert "made.images[5]" in code_of(app)


@pytest.mark.parametrize("picture", ["sample:cat_00", "sample:dog_12"])
def test_the_shown_picture_follows_the_model_there_and_back(patterns_model, picture):
    app = opened(picture=picture)
    cifar = data_of(app)
    choose(app, "patterns")
    assert is_quiet(app)
    assert view_of(app).picture == "pattern:00"
    assert [item["id"] for item in items_of(app)] == PATTERNS
    shown(app.run())
    assert view_of(app).picture == "pattern:00"
    choose(app, "bundled")
    assert is_quiet(app)
    assert view_of(app) == View()
    assert (data_of(app)["id"] == cifar["id"]) == (picture == "sample:dog_12")
    assert {item["id"].partition(":")[0] for item in items_of(app)} == {"sample"}


@pytest.mark.parametrize(
    ("link", "becomes"),
    [
        ({"model": "patterns", "picture": "sample:cat_00"}, {"model": "patterns", "picture": "pattern:00"}),
        ({"picture": "pattern:05", "layer": "2"}, {"layer": "2"}),
    ],
)
def test_a_link_to_a_picture_of_another_set_shows_the_first_of_its_own(patterns_model, link, becomes):
    app = opened(**link)
    assert is_quiet(app)
    assert link_of(app) == becomes


def test_an_own_picture_stays_when_the_data_set_changes(patterns_model):
    app = upload(place(opened(), "Yours"), "photo.png", png(90, 60))
    own = view_of(app).picture
    for model in ("patterns", "bundled"):
        choose(app, model)
        assert is_quiet(app)
        assert view_of(app).picture == own
        assert data_of(app)["title"] == "your picture"


def test_the_open_test_set_follows_the_model(patterns_model, test_set):  # noqa: F811
    cifar = ids_of(test_set[0])
    app = opened(picture=cifar[57])
    shown(app.selectbox(key="gallery_class").set_value("ship").run())
    choose(app, "patterns")
    assert is_quiet(app)
    assert view_of(app).picture == "pattern:00"
    assert app.segmented_control(key="gallery_place").value == "Test set"
    assert app.selectbox(key="gallery_class").value == "all classes"
    assert app.selectbox(key="gallery_class").options[1:] == list(patterns.CLASSES)
    assert "(of 120)" in app.number_input[0].label
    assert [item["id"] for item in items_of(app)] == ids_of(load_pictures("patterns").images[:20])
    shown(app.number_input[0].set_value(101).run())
    shown(next(button for button in app.button if button.label == "Surprise me").click().run())
    of_patterns = view_of(app).picture
    assert of_patterns in ids_of(load_pictures("patterns").images)
    choose(app, "bundled")
    assert is_quiet(app)
    assert view_of(app).picture == "sample:dog_12"
    assert set(app.selectbox(key="gallery_class").options) > {"frog", "ship"}
    assert {item["id"] for item in items_of(app)} <= set(cifar)


def test_a_link_names_a_test_picture_of_its_models_data_set(patterns_model, test_set):  # noqa: F811
    data = load_pictures("patterns", "test")
    app = opened(model="patterns", picture=f"test:{data.ids[50]}")
    assert is_quiet(app)
    assert data_of(app)["title"] == f"{data.class_names[data.labels[50]]}, number 51"
    assert f"test:{data.ids[50]}" in [item["id"] for item in items_of(app)]
    assert "load_pictures('patterns')" in code_of(app)
    app = opened(model="patterns", picture=ids_of(test_set[0])[57])
    assert "is not on this machine. A sample is shown instead." in said(app.info[0].value)
    assert view_of(app).picture == "pattern:00"


def test_mistakes_are_found_on_the_models_own_data_set(patterns_model):
    from vit import load
    from vit.evaluate import predict

    data = load_pictures("patterns", "test")
    wrong = predict(*load(patterns_model), data).classes != data.labels
    app = only_mistakes(opened(model="patterns"))
    until(app, lambda app: len(app.number_input))
    assert f"(of {wrong.sum()})" in app.number_input[0].label
    assert [item["id"] for item in items_of(app)] == ids_of(data.images[wrong][:20])


def test_without_its_file_the_patterns_model_is_not_offered(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "BUNDLED_PATTERNS", tmp_path / "none.safetensors")
    app = opened(model="patterns", picture="pattern:05")
    assert "made patterns is not on this machine. The bundled model is shown" in said(app.error[0].value)
    assert app.selectbox(key="view_model").options == ["Bundled ViT for CIFAR-10"]
    assert link_of(app) == {}


def test_nothing_is_made_for_a_model_of_cifar_10(monkeypatch):
    def never(*args, **options):
        raise AssertionError("patterns were made")

    monkeypatch.setattr(pictures, "make_patterns", never)
    assert is_quiet(opened())


# Folders


def test_a_model_of_a_folder_shows_that_folders_pictures(flowers):
    folder, pixels, labels = flowers
    app = opened(model="run:flowers/last")
    assert is_quiet(app)
    assert view_of(app).picture == ids_of(pixels)[0]
    assert data_of(app)["true_class"] == "daisy"
    assert np.array_equal(pixels_of(data_of(app)), pixels[0])
    assert f"load_pictures({str(folder)!r})" in code_of(app)
    place(app, "Test set")
    assert [item["id"] for item in items_of(app)] == ids_of(pixels[:20])
    shown(app.selectbox(key="gallery_class").set_value("tulip").run())
    assert [item["id"] for item in items_of(app)] == ids_of(pixels[labels == 2])
    place(app, "Samples")
    assert len(items_of(app)) == 20
    assert [item["label"] for item in items_of(app)] == sorted(item["label"] for item in items_of(app))
    assert {item["label"] for item in items_of(app)} == set(FLOWERS)
    assert "CIFAR" not in words_of(app)
    choose(app, "bundled")
    assert link_of(app) == {}
    assert is_quiet(app)


def test_a_folder_without_test_pictures_leaves_cifars_samples(flowers):
    folder = flowers[0]
    (folder / "test").rename(folder.with_name("elsewhere"))
    app = opened(model="run:flowers/last", picture="sample:cat_00")
    assert is_quiet(app)
    assert view_of(app).picture == "sample:cat_00"
    assert "these are CIFAR-10's" in words_of(app)
    assert data_of(app)["true_class"] == "cat"
    assert "cat" not in data_of(app)["classes"]  # nobody told it of cats
    place(app, "Test set")
    assert f"The folder {folder}, which this model learned from, holds no test pictures" in words_of(app)
    assert not app.code  # how to fetch CIFAR-10 would not help here


def test_a_model_of_unknown_data_keeps_cifars_pictures(flowers, page_folders, test_set):  # noqa: F811
    (page_folders / "flowers" / "config.json").write_text("{ torn")
    app = opened(model="run:flowers/last", picture=ids_of(test_set[0])[57])
    assert is_quiet(app)
    assert view_of(app).picture == ids_of(test_set[0])[57]
    assert "these are CIFAR-10's" in words_of(place(app, "Samples"))
    assert "these are CIFAR-10's" not in words_of(choose(app, "bundled"))


# What the trainer writes


def test_a_runs_checkpoints_can_be_chosen_as_they_are_written(page_folders, write_checkpoint):
    names = ["best", "last", "epoch-0010", "epoch-0001", "resume", "resume.prev"]
    for age, run in enumerate(("new", "old")):
        for name in names:
            path = page_folders / run / "checkpoints" / f"{name}.safetensors"
            write_checkpoint(path, num_layers=2)
            when = 10**9 - 100 * age - {"best": 9, "epoch-0010": 5, "epoch-0001": 7}.get(name, 0)
            os.utime(path, (when, when))
    write_checkpoint(page_folders / "old" / "last.safetensors", num_layers=1)
    app = opened(model="run:old/best")
    assert [name for name in app.selectbox(key="view_model").options if "Bundled" not in name] == [
        "old/best", "old/last.safetensors", "old/last", "old/epoch-0010", "old/epoch-0001",
        "new/best", "new/last", "new/epoch-0010", "new/epoch-0001",
    ]  # fmt: skip
    for link, layers in (("run:old/last", 2), ("run:old/last.safetensors", 1), ("run:new/epoch-0001", 2)):
        app = opened(model=link)
        assert is_quiet(app)
        assert f"{layers} layers" in words_of(app)
        assert link_of(app) == {"model": link}
    assert "no checkpoint new/resume under the runs folder" in said(
        opened(model="run:new/resume").error[0].value
    )


def test_a_link_to_a_runs_last_checkpoint_follows_the_training(page_folders, write_checkpoint):
    path = page_folders / "mine" / "checkpoints" / "last.safetensors"
    for layers in (1, 2):
        write_checkpoint(path, num_layers=layers)
        os.utime(path, (10**9 + layers, 10**9 + layers))
        assert f"{layers} layers" in words_of(opened(model="run:mine/last"))


@pytest.mark.parametrize(
    ("provenance", "end"),
    [
        ({"accuracy": 0.875, "val_accuracy": 0.5, "step": 40}, "heads, test accuracy 87.5 %"),
        ({"val_accuracy": 0.5, "step": 1240}, "heads, 50.0 % of held-out pictures right at step 1,240"),
        ({"val_accuracy": "half", "step": 40}, "2 heads"),
        ({}, "2 heads"),
    ],
)
def test_the_model_s_line_tells_what_is_known_of_its_accuracy(provenance, end):
    architecture = Architecture(num_classes=3, embed_dim=8, num_layers=1, num_heads=2, mlp_dim=8)
    known = Checkpoint(architecture, ("a", "b", "c"), (0.5,) * 3, (0.5,) * 3, provenance)
    assert models.Loaded(architecture.build(), known, Path("x")).facts.endswith(end)


# Which pictures belong to which data set


@pytest.mark.parametrize(
    ("name", "data", "before", "is_another"),
    [
        ("sample:cat_00", "cifar10", None, False),
        ("sample:cat_00", "patterns", None, True),
        ("sample:cat_00", "patterns", "patterns", False),
        ("pattern:05", "patterns", None, False),
        ("pattern:05", "cifar10", "patterns", True),
        ("test:0123456789ab", "patterns", None, False),  # to be looked for
        ("test:0123456789ab", "patterns", "cifar10", True),
        ("test:0123456789ab", "cifar10", "cifar10", False),
        ("own:0123456789ab", "patterns", "cifar10", False),
        ("own:0123456789ab", "patterns", None, False),
    ],
)
def test_what_is_of_another_set(name, data, before, is_another):
    assert is_of_another_set(name, data, before) == is_another
