"""Results of a run on the page: the figures are those counted here, and nothing broken stops the rest.

Run: pytest tests/test_results_on_page.py (half a minute). AppTest, as in test_app.py; runs are trained once.
"""

import json
import re
import shutil
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import streamlit as st
from serving import serving
from small_run import small, write_pictures
from streamlit.runtime.media_file_storage import MediaFileKind
from streamlit.runtime.memory_media_file_storage import MemoryMediaFileStorage
from streamlit.testing.v1 import AppTest
from synthetic import made, write_classes
from test_app import component, said, shown, view_of, words_of

from train import report
from train.loop import start
from train.page import result_pictures, results
from train.runs import Run
from vit.checkpoint import load
from vit.datasets import DataError, holdout_indices, load_pictures
from vit.evaluate import cached_path, measure, predict
from vit.overlay import png_bytes
from vit.page import background

ROOT = Path(__file__).parents[1]
STORAGE = MemoryMediaFileStorage("/mock/media")  # as AppTest's


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two finished runs in seconds: `run` with a test split in `pictures`, `tree-run` of the plain `tree`."""
    base = tmp_path_factory.mktemp("trained")
    pictures = write_pictures(base / "pictures")
    shutil.copytree(pictures / "train", base / "tree")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATCHLIGHT_CACHE", str(base / "cache"))
        assert start(Run(base / "run"), small(pictures, keep_every=1.0)).state == "finished"
        assert start(Run(base / "tree-run"), small(base / "tree", epochs=1.0)).state == "finished"
    return base


@pytest.fixture
def run(trained, page_folders):
    """The first of them, in a runs folder of the test's own."""
    shutil.copytree(trained / "run", page_folders / "tiny")
    return Run(page_folders / "tiny")


@pytest.fixture
def tree_run(trained, page_folders, tmp_path):
    """The second, with pictures of its own, which may be changed."""
    shutil.copytree(trained / "tree-run", page_folders / "tiny")
    shutil.copytree(trained / "tree", tmp_path / "tree")
    return in_config(Run(page_folders / "tiny"), data=str(tmp_path / "tree"))


def in_config(run: Run, **settings) -> Run:
    facts = json.loads(run.config_file.read_text())
    run.config_file.write_text(json.dumps(facts | {"config": facts["config"] | settings}))
    return run


def opened(run: Run, is_over: bool = True) -> AppTest:
    def script(root, is_over):
        from pathlib import Path

        from train.page.results import show_results
        from train.runs import Run

        show_results(Run(Path(root)), is_over=is_over)

    app = AppTest.from_function(
        script, kwargs={"root": str(run.root), "is_over": is_over}, default_timeout=60
    )
    return shown(app.run())


def button(app: AppTest, label: str):
    return next(each for each in app.button if each.label == label)


def report_button(app: AppTest):
    return next(each.proto for each in app.get("download_button") if each.proto.label == "Report (HTML)")


def measured(app: AppTest) -> AppTest:
    """The page once the thread that classifies is through."""
    shown(next(each for each in app.button if each.label.startswith("Measure on")).click().run())
    return until_it_says(app, "are named rightly")


def until_it_says(app: AppTest, words: str, seconds: float = 30.0) -> AppTest:
    end = time.monotonic() + seconds
    while words not in words_of(app):
        assert time.monotonic() < end, words_of(app)
        time.sleep(0.05)
        shown(app.run())
    return app


def found(run: Run, split: str = "test"):
    """What the best weights say to the run's pictures, without what the page does; and the pictures."""
    pictures = load_pictures(json.loads(run.config_file.read_text())["config"]["data"], split)
    model, checkpoint = load(run.checkpoint("best"))
    return predict(model, checkpoint, pictures), pictures


def images(app: AppTest) -> list[tuple[str, str, str]]:
    """(address, alt, caption) of each picture shown."""
    return [
        (each.url, each.alt, said(each.caption)) for shown in app.get("image") for each in shown.proto.imgs
    ]


def address(pixels: np.ndarray) -> str:
    """Where Streamlit puts these pixels, four times as large and crisp: its names follow from the bytes."""
    data = png_bytes(np.kron(pixels, np.ones((4, 4, 1), np.uint8)))
    return STORAGE.get_url(STORAGE.load_and_get_id(data, "image/png", MediaFileKind.MEDIA))


def exact(share: float) -> str:
    return f"{100 * share:.2f}\u00a0%"


# --- figures


def test_measuring_starts_by_a_click_and_shows_the_figures_that_are_counted_here(run):
    app = opened(run)
    words = words_of(app)
    assert "best.safetensors will name each of 20 pictures of pictures test once" in words
    assert "named rightly" not in words
    assert report_button(app).disabled
    assert "Measure first" in report_button(app).help

    app = measured(app)
    predictions, pictures = found(run)
    metrics = measure(predictions, pictures.class_names)
    right = int((predictions.classes == pictures.labels).sum())
    low, high = metrics.interval
    words = words_of(app)
    assert f"**{exact(right / 20)}** of 20 pictures of pictures test are named rightly" in words.replace(
        "\\", ""
    )
    assert f"95 % interval {exact(low)} to {exact(high)} (Wilson)" in words
    assert f"Measured: best.safetensors (id {load(run.checkpoint('best'))[1].id}), which was chosen" in words
    assert "chose nothing by them" in words
    assert not report_button(app).disabled

    matrix, classes = (each.value for each in app.dataframe)
    pairs = Counter(zip(pictures.labels.tolist(), predictions.classes.tolist(), strict=True))
    assert matrix.to_numpy().tolist() == [[pairs[truth, said] for said in range(10)] for truth in range(10)]
    assert tuple(matrix.index) == tuple(matrix.columns) == pictures.class_names
    for row, expected in zip(classes.to_dict("records"), metrics.classes, strict=True):
        assert (row["class"], row["pictures"]) == (expected.name, expected.pictures)
        shares = [row[name] for name in ("precision", "recall", "F1")]
        assert shares == pytest.approx([100 * expected.precision, 100 * expected.recall, 100 * expected.f1])


def test_what_is_known_is_shown_without_a_click(run):
    predictions, _ = found(run)
    predictions.save(cached_path(predictions.checkpoint_id, predictions.data_digest))
    app = opened(run)
    assert "are named rightly" in words_of(app)
    assert not [each for each in app.button if each.label.startswith("Measure")]


def test_the_report_that_is_downloaded_measures_nothing_again_and_leaves_no_file(run, monkeypatch):
    measured(opened(run))
    before = sorted(run.root.rglob("*"))
    monkeypatch.setattr(report, "predict", lambda *_, **__: pytest.fail("it predicted again"))
    html = results._report(run).decode()
    predictions, pictures = found(run)
    accuracy = measure(predictions, pictures.class_names).accuracy
    assert f'<span class="number">{exact(accuracy)}</span>' in html
    assert sorted(run.root.rglob("*")) == before


def test_what_the_report_measured_is_known_to_the_page(run, tmp_path):
    report.write_report(run.root, tmp_path / "report.html")
    assert "are named rightly" in words_of(opened(run))


def test_a_report_without_a_cache_is_written_all_the_same(run, tmp_path, monkeypatch):
    found(run)  # the pictures are decoded
    (tmp_path / "cache" / "predictions").write_text("a file where the folder should be")
    report.write_report(run.root, tmp_path / "report.html")
    assert "named rightly" in (tmp_path / "report.html").read_text()


def test_kept_predictions_in_another_order_are_put_in_this_one(run, tmp_path):
    predictions, pictures = found(run)
    rows = np.random.default_rng(2).permutation(20)
    names = ("ids", "labels", "classes", "probabilities", "top_logits")
    other = replace(predictions, **{name: getattr(predictions, name)[rows] for name in names})
    assert not np.array_equal(other.classes, predictions.classes)
    again = report.in_order(other, pictures)
    assert all(np.array_equal(getattr(again, name), getattr(predictions, name)) for name in names)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("classes", lambda classes: classes + 10),  # there are ten
        ("classes", lambda classes: classes.astype(float)),
        ("classes", lambda classes: classes[:-1]),
        ("probabilities", lambda probabilities: probabilities * np.nan),
        ("labels", lambda labels: labels * 0),
        ("ids", np.char.upper),  # other ids, sorted as before
    ],
)
def test_kept_predictions_that_do_not_fit_are_one_sentence(run, name, change):
    predictions, _ = found(run)
    other = replace(predictions, **{name: change(getattr(predictions, name))})
    other.save(run.checkpoint("best").with_suffix(".predictions.npz"))
    app = opened(run)
    assert "are not of these pictures: delete the .predictions.npz" in said(app.warning[0].value)
    assert app.selectbox[0].value == "best"


# --- pictures


def test_a_chosen_cell_shows_exactly_its_pictures(run):
    predictions, pictures = found(run)
    predictions.save(cached_path(predictions.checkpoint_id, predictions.data_digest))
    app = opened(run)
    assert "Choose a cell" in words_of(app)
    mistakes = len(images(app))
    wrong = predictions.classes != pictures.labels
    assert wrong.any()
    assert (~wrong).any()
    for row in (np.flatnonzero(wrong)[0], np.flatnonzero(~wrong)[0]):
        truth, answer = int(pictures.labels[row]), int(predictions.classes[row])
        names = pictures.class_names
        app.session_state[app.dataframe[0].key] = chosen(truth, names[answer])
        shown(app.run())
        inside = np.flatnonzero((pictures.labels == truth) & (predictions.classes == answer))
        cell = images(app)[: len(images(app)) - mistakes]
        assert sorted(url for url, *_ in cell) == sorted(address(pictures.images[each]) for each in inside)
        phrase = f"{names[truth]}, {'named rightly' if truth == answer else f'taken for {names[answer]}'}"
        assert f"{len(inside)} picture{'s' * (len(inside) > 1)} of {phrase}." in words_of(app)
        for url, alt, caption in cell:
            number = int(re.fullmatch(rf"{phrase}, [\d.]+\u00a0%, picture (\d+)", alt)[1])
            assert url == address(pictures.images[number - 1])
            assert caption in alt
            share = float(caption.removesuffix("\u00a0%"))
            assert share == pytest.approx(100 * predictions.probabilities[number - 1], abs=0.51)
        assert "Choose a cell" not in words_of(app)


def chosen(row: int, column: str) -> dict:
    return {"selection": {"rows": [], "columns": [], "cells": [(row, column)]}}


def test_an_empty_cell_says_so_and_one_that_is_not_there_is_none(run):
    predictions, pictures = found(run)
    predictions.save(cached_path(predictions.checkpoint_id, predictions.data_digest))
    app = opened(run)
    confusion = np.array(measure(predictions, pictures.class_names).confusion)
    truth, answer = (int(each) for each in np.argwhere(confusion == 0)[0])
    app.session_state[app.dataframe[0].key] = chosen(truth, pictures.class_names[answer])
    assert "There is no picture of" in words_of(shown(app.run()))
    for row, column in ((0, "zebra"), (99, pictures.class_names[0])):
        app.session_state[app.dataframe[0].key] = chosen(row, column)
        assert "Choose a cell" in words_of(shown(app.run()))


def test_at_most_24_pictures_of_a_cell_are_shown_the_surest_first(run, monkeypatch):
    predictions, pictures = found(run)
    sure = np.linspace(0.2, 0.9, 30).astype(np.float32)
    many = [0] * 30
    crowd = replace(
        predictions, ids=predictions.ids[many], labels=predictions.labels[many], top_logits=sure,
        classes=predictions.classes[many], probabilities=sure,
    )  # fmt: skip
    seen = []
    monkeypatch.setattr(st, "image", lambda _, **texts: seen.append(said(texts["caption"])))
    result_pictures.show_cell(
        crowd,
        replace(pictures, images=pictures.images[many]),
        truth=int(predictions.labels[0]),
        answer=int(predictions.classes[0]),
    )
    assert seen == [f"{100 * share:.0f}\u00a0%" for share in sure[::-1][:24]]


def test_the_most_confident_mistakes_are_shown(run):
    predictions, pictures = found(run)
    predictions.save(cached_path(predictions.checkpoint_id, predictions.data_digest))
    kept = predictions.probabilities.astype(np.float16)  # as files keep them
    wrong = sorted(np.flatnonzero(predictions.classes != pictures.labels), key=lambda row: (-kept[row], row))
    mistakes = images(opened(run))
    assert 0 < len(mistakes) == min(12, len(wrong))
    for row, (url, alt, caption) in zip(wrong, mistakes, strict=False):
        assert url == address(pictures.images[row])
        names = pictures.class_names
        assert caption.startswith(
            f"{names[pictures.labels[row]]}, taken for {names[predictions.classes[row]]}, "
        )
        assert alt == f"{caption}, picture {row + 1}"


# --- other data


def of_classes(folder: Path, runs: Path, write_checkpoint, names: tuple[str, ...]) -> Run:
    """A finished run that knows these classes, each with one picture in the test split."""
    pixels, _ = made(len(names), 1)
    write_classes(folder / "test", pixels, np.arange(len(names)), names)
    run = Run(runs / "strange")
    write_checkpoint(run.checkpoint("best"), class_names=tuple(sorted(names)), patch_size=8, num_layers=1)
    facts = {"config": {"data": str(folder)}, "data": {}, "resolved": {}}
    run.config_file.write_text(json.dumps(facts))
    return run


def test_with_more_than_40_classes_a_sentence_stands_for_the_matrix(tmp_path, page_folders, write_checkpoint):
    for count in (40, 41):
        names = tuple(f"class {k:02d}" for k in range(count))
        run = of_classes(tmp_path / str(count), page_folders / str(count), write_checkpoint, names)
        app = measured(opened_anywhere(run, page_folders))
        assert [len(each.value) for each in app.dataframe] == ([40, 40] if count == 40 else [41])
        assert ("With 41 classes the table would be too large" in words_of(app)) == (count == 41)


def opened_anywhere(run: Run, runs: Path) -> AppTest:
    """The page of a run that is moved to where the page looks for runs."""
    home = runs / f"moved-{run.root.parent.name}"
    shutil.move(run.root, home)
    return opened(Run(home))


def test_strangers_names_are_only_words(tmp_path, page_folders, write_checkpoint):
    names = ("**b**", "[a](x)", "`c` :red[d]", "$e$")
    run = of_classes(tmp_path / "*odd* :red[data]", page_folders, write_checkpoint, names)
    app = measured(opened(run))
    for element in (*app.markdown, *app.caption):
        assert not re.search(r"(?<!\\):red|(?<!\\)\[a", element.value), element.value
    captions = [each.caption for shown in app.get("image") for each in shown.proto.imgs]
    assert captions
    assert any("taken for" in each for each in captions)
    for caption in captions:
        assert not re.search(r"(?<!\\)(\*\*|\[|`|\$)", caption), caption
        assert any(name in said(caption) for name in names)


def test_a_tree_without_a_test_split_is_measured_on_what_was_held_out(tree_run):
    predictions, pictures = found(tree_run, "train")
    predictions.save(cached_path(predictions.checkpoint_id, predictions.data_digest))  # of all of them
    app = opened(tree_run)
    assert "name each of 16 pictures held out from tree train once" in words_of(app)
    words = words_of(measured(app))
    _, held = holdout_indices(pictures.labels, 5000, 0)
    share = float((predictions.classes[held] == pictures.labels[held]).mean())
    assert f"{exact(share)}** of 16 pictures held out from tree train are named rightly" in words
    assert "somewhat too good" in words
    (row,) = {tuple(each.value["pictures"]) for each in app.dataframe if "pictures" in each.value}
    assert sum(row) == 16


def test_pictures_that_changed_since_are_not_measured(tree_run, tmp_path):
    write_classes(tmp_path / "tree", *made(1, 9))
    app = opened(tree_run)
    assert "have changed since the run" in said(app.warning[0].value)
    assert not [each for each in app.button if each.label.startswith("Measure")]
    assert not report_button(app).disabled  # it holds curves and settings all the same


def test_without_the_pictures_the_page_says_how_to_get_them(run):
    app = opened(in_config(run, data="cifar10"))
    assert "python -m vit data" in said(app.info[0].value)
    assert button(app, "Look into them")
    assert not report_button(app).disabled


# --- what is not there, or broken


def test_a_damaged_checkpoint_is_one_sentence_and_the_rest_works(run):
    run.checkpoint("best").write_bytes(run.checkpoint("best").read_bytes()[:1000])
    app = opened(run)
    assert len(app.warning) == 1
    assert "best.safetensors" in said(app.warning[0].value)
    assert "The rest of the page still works." in said(app.warning[0].value)
    assert app.selectbox[0].options == ["Best on held-out pictures", "Last", "Epoch 2", "Epoch 1"]


def test_a_damaged_config_is_one_sentence(run):
    run.config_file.write_text("{torn")
    app = opened(run)
    assert "cannot be read" in said(app.warning[0].value)
    assert button(app, "Look into them")


@pytest.mark.parametrize("is_over", [True, False])
def test_a_run_without_a_checkpoint_says_so(run, is_over):
    shutil.rmtree(run.root / "checkpoints")
    app = opened(run, is_over)
    assert ("ended before its first checkpoint" in words_of(app)) == is_over
    assert ("Nothing to judge yet" in words_of(app)) != is_over
    assert not app.button
    assert not app.selectbox


def test_last_stands_in_where_no_best_was_kept(run):
    run.checkpoint("best").unlink()
    app = measured(opened(run))
    assert "Measured: last.safetensors" in words_of(app)
    assert "the run kept no best" in words_of(app)
    assert app.selectbox[0].value == "last"


def test_while_it_goes_on_only_held_out_pictures_judge_and_the_test_set_stays_shut(run, monkeypatch):
    def shut(*_, **__):
        raise DataError("The test set was opened.")

    monkeypatch.setattr(report, "load_pictures", shut)
    status = json.loads(run.status_file.read_text())
    run.status_file.write_text(json.dumps(status | {"best_accuracy": 0.4375, "best_step": 12}))
    app = opened(run, is_over=False)
    assert "**43.75\u00a0%** of the held-out pictures named rightly, at step 12." in words_of(app)
    assert "opened once, when the run is over" in words_of(app)
    assert not app.info
    assert not app.dataframe
    assert [each.proto.label for each in app.get("download_button")] == ["Weights (safetensors)"]
    assert "The test set was opened." in said(opened(run).info[0].value)  # that is how it would show


def test_while_it_goes_on_neither_a_torn_status_nor_a_lacking_best_is_in_the_way(run):
    run.status_file.write_text('{"state": "runn')
    app = opened(run, is_over=False)
    assert "opened once, when the run is over" in words_of(app)
    assert "named rightly" not in words_of(app)
    run.checkpoint("best").unlink()
    assert "The best weights come with the first evaluation" in words_of(opened(run, is_over=False))


def test_it_can_be_stopped_and_tried_again(run, monkeypatch):
    going = threading.Event()

    def slow(*_, progress, **__):
        going.set()
        while True:
            progress(1, 20, "")
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(background, "predict", slow)
        app = opened(run)
        shown(button(app, "Measure on the test pictures").click().run())
        assert going.wait(10)
        shown(button(app, "Stop measuring").click().run())
        until_it_says(app, "Stopped. Nothing else is affected.")
    shown(button(app, "Try again").click().run())
    until_it_says(app, "are named rightly")


# --- looking into it


@pytest.mark.parametrize("name", ["best", "last", "epoch-0001"])
def test_looking_into_weights_leads_to_explore_with_the_picture_kept(run, monkeypatch, name):
    monkeypatch.setattr(
        "train.page.training", lambda _: st.fragment(results.show_results)(run, is_over=False)
    )
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
    app.query_params["tab"], app.query_params["picture"] = "Train", "sample:cat_00"
    shown(app.run())
    weights = next(each for each in app.selectbox if each.label == "Weights")
    shown(weights.set_value(name).run())
    shown(button(app, "Look into them").click().run())
    assert app.session_state["tab"] == "Explore"
    assert app.selectbox(key="view_model").value == view_of(app).model == f"run:tiny/{name}"
    assert view_of(app).picture == "sample:cat_00"
    assert component(app, "viewer")
    assert "2 layers × 2 heads" in words_of(app)
    shown(app.run())  # nothing falls back at the next run
    assert view_of(app).model == f"run:tiny/{name}"


_IN_A_FRAGMENT = """
import runpy
from pathlib import Path
import streamlit as st
import train.page
from train.page.results import show_results
from train.runs import Run

show = st.fragment(lambda: show_results(Run(Path({root!r})), is_over=False))
train.page.training = lambda loaded: show()
runpy.run_path({app!r})
"""


@pytest.mark.slow  # the real server and a browser
def test_in_a_browser_a_click_inside_a_fragment_leads_there_too(run, tmp_path, browser):
    (tmp_path / "page.py").write_text(_IN_A_FRAGMENT.format(root=str(run.root), app=str(ROOT / "app.py")))
    with serving(tmp_path, tmp_path / "page.py") as server:
        page = browser.new_page()
        page.goto(f"{server.url}/?tab=Train&picture=sample:cat_00")
        page.get_by_role("button", name="Look into them").click(timeout=60_000)
        page.locator("canvas.picture[aria-label]").wait_for(timeout=60_000)
        assert "model=run%3Atiny%2Fbest" in page.url
        assert "tab=Train" not in page.url
        assert page.get_by_role("tab", name="Explore").get_attribute("aria-selected") == "true"
        page.close()
