"""The page as a whole, without a browser: AppTest runs app.py, and these tests say what a browser would.

Run: pytest tests/test_app.py (a minute). What the browser itself does is tested in test_browser.py.
"""

import base64
import gc
import io
import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from streamlit.components.v2.bidi_component.main import _make_trigger_id
from streamlit.proto.WidgetStates_pb2 import WidgetState
from streamlit.testing.v1 import AppTest
from synthetic import made, write_parquet

from vit.images import picture_id
from vit.page.view import View

ROOT = Path(__file__).parents[1]
VIEWER_FIELDS = [field.name for field in fields(View) if field.name not in ("picture", "model", "fit")]
pytestmark = pytest.mark.usefixtures("page_folders")


def opened(**params) -> AppTest:
    app = AppTest.from_file(str(ROOT / "app.py"), default_timeout=60)
    for name, value in params.items():
        app.query_params[name] = value
    return shown(app.run())


def shown(app: AppTest) -> AppTest:
    assert not app.exception, [e.value for e in app.exception]
    return app


def with_drawer(app: AppTest) -> AppTest:
    """The same page with the drawer of downloads and code open."""
    app.session_state["drawer_take_away"] = True
    return shown(app.run())


def code_of(app: AppTest) -> str:
    """The last code shown: the drawer's, which lies below the gallery's."""
    return with_drawer(app).code[-1].value


def view_of(app: AppTest) -> View:
    return app.session_state["view"]


def link_of(app: AppTest) -> dict[str, str]:
    params = {
        name: value[-1] if isinstance(value, list) else value for name, value in app.query_params.items()
    }
    return {name: params[name] for name in params if name in {field.name for field in fields(View)}}


def component(app: AppTest, name: str):
    """The viewer, the wire or the gallery, as it was sent to the browser."""
    return next(
        each.proto for each in app.get("bidi_component") if each.proto.component_name == f"patchlight_{name}"
    )


def data_of(app: AppTest, name: str = "viewer") -> dict:
    """What such a component was given."""
    return json.loads(component(app, name).json)


def sends(app: AppTest, name: str, **states) -> AppTest:
    """As if the component set these states in the browser; AppTest speaks for Streamlit's own widgets."""
    return _run_with(app, WidgetState(id=component(app, name).id, json_value=json.dumps(states)))


def triggers(app: AppTest, name: str, event: str, value: object) -> AppTest:
    """As if the component set off this trigger."""
    payload = json.dumps([{"event": event, "value": value}])
    return _run_with(
        app, WidgetState(id=_make_trigger_id(component(app, name).id, "events"), json_trigger_value=payload)
    )


def _run_with(app: AppTest, state: WidgetState) -> AppTest:
    all_states = app._tree.get_widget_states()
    all_states.widgets.append(state)
    return shown(app._run(all_states))


def says(app: AppTest, **choices) -> AppTest:
    """As if these were chosen in the viewer, beside what it holds: it says all of its state at once."""
    view = view_of(app).all_params()
    told = {name: view[name] for name in VIEWER_FIELDS} | choices
    return sends(app, "viewer", view=told)


def said(text: str) -> str:
    """What a message shows once Markdown has taken its escapes away."""
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", str(text)).replace("\u200b", "")


def words_of(app: AppTest) -> str:
    elements = [*app.markdown, *app.caption, *app.error, *app.info, *app.warning, *app.toast]
    return "\n".join(said(element.value) for element in elements)


def place(app: AppTest, name: str) -> AppTest:
    return shown(app.segmented_control(key="gallery_place").set_value(name).run())


def png(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def upload(app: AppTest, name: str, data: bytes) -> AppTest:
    return shown(app.file_uploader(key="upload_picture").set_value((name, data, "image/png")).run())


@pytest.fixture
def test_set(tmp_path, monkeypatch):
    """120 random pictures of the ten classes as a test set; returns the pixels and the labels."""
    pixels, labels = made(120, 3)
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", pixels, labels)
    monkeypatch.setenv("PATCHLIGHT_DATA", str(tmp_path / "data"))
    return pixels, labels


# The first visit


def test_the_first_visit_shows_an_explained_picture():
    app = opened()
    assert app.title[0].value == "Patchlight"
    data = data_of(app)
    assert data["title"] == "dog 12"
    assert data["true_class"] == "dog"
    assert data["classes"][answer_of(data).argmax()] == "dog"
    assert data["view"] == View().all_params()
    words = words_of(app)
    assert "not yet why it decides" in words
    (seen,) = app.get("image")  # what the model sees; the large picture is the viewer's
    # A JPEG, which is Streamlit's choice for bytes, would be off by more than 2 of 255.
    assert seen.proto.imgs[0].url.endswith(".png")
    assert seen.proto.imgs[0].alt == "dog 12 at 32 by 32 pixels"
    assert not app.error
    assert link_of(app) == {}


def answer_of(data: dict) -> np.ndarray:
    """(K,) probabilities, of a payload."""
    return np.frombuffer(base64.b64decode(data["probabilities"]), np.float32).reshape(data["layers"], -1)[-1]


def test_what_is_drawn_in_the_viewer_has_no_widget_of_streamlit_s():
    app = opened()
    assert not [*app.slider, *app.toggle, *app.get("plotly_chart")]
    assert [each.key for each in app.selectbox] == ["view_model"]
    assert [each.key for each in app.segmented_control] == ["gallery_place"]
    names = [each.proto.component_name for each in app.get("bidi_component")]
    assert sorted(names) == [f"patchlight_{name}" for name in ("first", "gallery", "viewer", "wire")]
    viewer = component(app, "viewer")
    assert viewer.isolate_styles
    assert "export default" in viewer.js_content
    sources = viewer.html_content + viewer.css_content + viewer.js_content
    assert not re.search(r"(src|href)=.?https?:|^import |@import|innerHTML", sources, re.MULTILINE)


def test_the_title_is_painted_before_torch_is_imported(tmp_path):
    code = """
import sys
import streamlit as st
from streamlit.testing.v1 import AppTest
title = st.title
def recorded(*args, **options):
    print("torch" if "torch" in sys.modules else "no torch", "at the title")
    return title(*args, **options)
st.title = recorded
app = AppTest.from_file("app.py", default_timeout=90).run()
print("torch" if "torch" in sys.modules else "no torch", "at the end", len(app.exception))
"""
    env = {**os.environ, "PATCHLIGHT_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["no torch at the title", "torch at the end 0"], done.stderr


def test_a_rerun_is_quick():
    app = opened()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        app.run()
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1


def test_a_further_session_costs_at_most_15_mb(page_server):
    from streamlit.proto.BackMsg_pb2 import BackMsg
    from streamlit.proto.ClientState_pb2 import ClientState
    from streamlit.proto.ForwardMsg_pb2 import ForwardMsg
    from websockets.sync.client import connect

    if not Path("/proc/self/status").exists():
        pytest.skip("resident memory is read from /proc, which is not here")

    sessions = ExitStack()  # all stay open to the end

    def session() -> None:
        address = f"{page_server.url.replace('http', 'ws')}/_stcore/stream"
        socket = sessions.enter_context(connect(address, max_size=None))
        socket.send(BackMsg(rerun_script=ClientState()).SerializeToString())
        title_seen = False
        while True:
            message = ForwardMsg.FromString(socket.recv(timeout=90))
            title_seen |= message.delta.new_element.heading.body == "Patchlight"
            if message.WhichOneof("type") == "script_finished":
                assert title_seen
                return

    def resident_mb() -> float:
        status = Path(f"/proc/{page_server.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    with sessions:
        for _ in range(3):  # torch, the model and every cache are there after these
            session()
        before = resident_mb()
        for _ in range(8):
            session()
        growth = (resident_mb() - before) / 8
    assert before > 100
    assert growth <= 15


# Links

WHOLE_LINK = {
    "picture": "sample:cat_00", "method": "raw", "looked_at": "yes", "layer": "2", "head": "5",
    "token": "3,4", "fusion": "min", "discard": "0.35", "draw": "heat", "strength": "0.7",
    "smooth": "yes", "mass": "0.6", "scale": "shared", "fit": "pad",
}  # fmt: skip


def test_a_link_reproduces_the_view():
    first, second = opened(**WHOLE_LINK), opened(**WHOLE_LINK)
    assert link_of(first) == WHOLE_LINK
    assert set(WHOLE_LINK) == set(View().all_params()) - {"model"}
    assert view_of(first) == View.from_params(WHOLE_LINK)[0]
    assert data_of(first) == data_of(second)
    assert data_of(first)["view"] == WHOLE_LINK | {"model": "bundled"}
    assert data_of(first)["title"] == "cat 00"
    assert data_of(first)["rollout"] != data_of(opened(picture="sample:cat_00"))["rollout"]


@pytest.mark.parametrize("discard", ["0", "0.97", "1"])
def test_every_share_that_a_link_may_hold_can_be_shown(discard):
    assert view_of(opened(discard=discard, strength=discard)).discard == float(discard)


def test_a_bad_link_says_which_part_could_not_be_used():
    app = opened(layer="0", fusion="median", head="2")
    assert "layer, fusion" in said(app.toast[0].value)
    assert link_of(app) == {"head": "2"}


def test_a_link_to_a_picture_that_is_not_here_says_so():
    app = opened(picture="test:0123456789ab", layer="2")
    assert "is not on this machine. A sample is shown instead." in said(app.info[0].value)
    assert link_of(app) == {"layer": "2"}


def test_a_link_to_an_own_picture_says_so_and_keeps_the_settings():
    app = opened(picture="own:0123456789ab", layer="2")
    assert "a link cannot hold" in said(app.info[0].value)
    assert view_of(app).layer == 1
    assert app.segmented_control(key="gallery_place").value == "Yours"


def test_a_link_to_an_own_model_says_so():
    app = opened(model="own:0123456789ab", layer="2")
    assert "upload it again. The bundled model is shown instead." in said(app.error[0].value)
    assert link_of(app) == {"layer": "2"}


def test_changing_tabs_loses_nothing():
    app = opened(**WHOLE_LINK)
    place(says(app, token="5,6", layer="3"), "Yours")
    before, link = data_of(app), WHOLE_LINK | {"token": "5,6", "layer": "3"}
    app.session_state["tab"] = "Train"
    shown(app.run())
    assert "New run" in [each.value for each in app.subheader]
    assert not app.get("image")
    assert link_of(app) == link
    app.session_state["tab"] = "Explore"
    shown(app.run())
    assert link_of(app) == link
    # the viewer is a new one in the browser: it begins with what was chosen last, not at first
    assert data_of(app) == before | {"view": link | {"model": "bundled"}}
    assert app.segmented_control(key="gallery_place").value == "Yours"


# The test set


def test_without_data_a_button_says_how_to_get_it():
    app = place(opened(), "Test set")
    assert "not on this machine" in words_of(app)
    assert app.code[0].value == "python -m vit data"
    assert data_of(app)["name"] == "sample:dog_12"


def test_broken_data_is_told_in_words(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test-00000-of-00001.parquet").write_bytes(b"not a parquet file")
    monkeypatch.setenv("PATCHLIGHT_DATA", str(tmp_path / "data"))
    app = place(opened(), "Test set")
    assert "The samples and your own pictures still work." in said(app.error[0].value)
    app = opened(picture="test:0123456789ab")
    assert "A sample is shown instead." in said(app.info[0].value)


def items_of(app: AppTest) -> list[dict]:
    return data_of(app, "gallery")["items"]


def ids_of(pixels) -> list[str]:
    return [f"test:{picture_id(picture)}" for picture in pixels]


def test_the_class_filter_and_the_number(test_set):
    pixels, labels = test_set
    app = place(opened(), "Test set")
    assert [item["id"] for item in items_of(app)] == ids_of(pixels[:20])
    shown(app.number_input[0].set_value(101).run())
    assert [item["id"] for item in items_of(app)] == ids_of(pixels[100:])
    shown(app.selectbox(key="gallery_class").set_value("frog").run())
    assert [item["id"] for item in items_of(app)] == ids_of(pixels[labels == 6])
    assert all(item["label"].startswith("frog") for item in items_of(app))


def test_surprise_me_shows_a_picture_and_where_it_is(test_set):
    pixels, labels = test_set
    app = place(opened(), "Test set")
    shown(app.selectbox(key="gallery_class").set_value("ship").run())
    shown(next(button for button in app.button if button.label == "Surprise me").click().run())
    assert view_of(app).picture in ids_of(pixels[labels == 8])
    assert view_of(app).picture in [item["id"] for item in items_of(app)]
    assert data_of(app)["true_class"] == "ship"
    assert link_of(app) == {"picture": view_of(app).picture}


def test_a_link_to_a_test_picture_opens_the_gallery_where_it_is(test_set):
    pixels, _ = test_set
    name = ids_of(pixels)[57]
    app = opened(picture=name)
    assert data_of(app)["title"].endswith(", number 58")
    assert app.segmented_control(key="gallery_place").value == "Test set"
    assert name in [item["id"] for item in items_of(app)]


def until(app: AppTest, condition, limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while not condition(app):
        assert time.monotonic() < end, words_of(app)
        time.sleep(0.1)
        shown(app.run())


def only_mistakes(app: AppTest) -> AppTest:
    return shown(place(app, "Test set").toggle(key="gallery_mistakes").set_value(True).run())


def test_only_mistakes_are_computed_and_kept(test_set, tmp_path):
    from vit import load
    from vit.checkpoint import BUNDLED
    from vit.datasets import load_pictures
    from vit.evaluate import predict

    pixels, labels = test_set
    app = only_mistakes(opened())
    until(app, lambda app: len(app.number_input))
    wrong = predict(*load(BUNDLED), load_pictures()).classes != labels
    assert 20 < wrong.sum() < 120
    assert [item["id"] for item in items_of(app)] == ids_of(pixels[wrong][:20])
    assert f"(of {wrong.sum()})" in app.number_input[0].label
    assert len(list((tmp_path / "cache" / "predictions").glob("*.npz"))) == 1
    assert len(only_mistakes(opened()).number_input)  # at once, with nothing to wait for


def test_shipped_predictions_are_taken_as_they_are(test_set, page_folders, write_checkpoint):
    from vit.datasets import load_pictures
    from vit.evaluate import Predictions

    pixels, labels = test_set
    checkpoint = write_checkpoint(page_folders / "mine.safetensors")
    data = load_pictures()
    claimed = labels.copy()
    claimed[[5, 50]] = (labels[[5, 50]] + 1) % 10
    nothing = np.zeros(120, np.float32)
    order = np.random.default_rng(0).permutation(
        120
    )  # the order in which they were classified is another one
    Predictions(
        checkpoint.id, data.digest, data.ids[order], labels[order], claimed[order], nothing, nothing
    ).save(page_folders / "mine.predictions.npz")
    app = only_mistakes(opened(model="run:mine"))
    assert [item["id"] for item in items_of(app)] == ids_of(pixels[[5, 50]])
    shown(app.selectbox(key="gallery_class").set_value("frog").run())
    assert "makes no mistakes here" in words_of(app)


def test_the_search_for_mistakes_can_be_stopped_and_begun_again(test_set, monkeypatch):
    from threading import Event

    from vit.page import background

    go, predict = Event(), background.predict

    def slow(*args, progress):
        while not go.wait(0.02):
            progress(30, 120, "pictures classified")
        return predict(*args, progress=progress)

    monkeypatch.setattr(background, "predict", slow)
    app = only_mistakes(opened())
    until(app, lambda app: "30 of 120" in str(app.get("progress")[0].proto.text))
    shown(next(button for button in app.button if button.label == "Stop").click().run())
    until(app, lambda app: "Stopped." in words_of(app))
    assert view_of(says(app, token="3,5")).token == "3,5"  # the page was usable all along
    go.set()
    shown(next(button for button in app.button if button.label == "Try again").click().run())
    until(app, lambda app: len(app.number_input))


def test_a_model_of_other_classes_cannot_be_tested_on_this_set(test_set, page_folders, write_checkpoint):
    write_checkpoint(page_folders / "two.safetensors", class_names=("day", "night"))
    app = only_mistakes(opened(model="run:two"))
    until(app, lambda app: "could not be classified" in words_of(app))
    assert "day, night" in words_of(app)


# Pictures of one's own


def test_an_own_picture_is_explained():
    app = upload(place(opened(), "Yours"), "photo.png", png(90, 60))
    assert view_of(app).picture.startswith("own:")
    assert "This model knows 10 classes" in words_of(app)
    crop = data_of(app)
    assert crop["title"] == "your picture"
    assert crop["true_class"] is None
    shown(app.segmented_control(key="view_fit").set_value("pad").run())
    pad = data_of(app)
    assert all(pad[name] != crop[name] for name in ("picture", "id", "raw"))
    place(app, "Samples")
    assert view_of(app).picture.startswith("own:")


def test_closing_the_page_forgets_an_own_picture():
    app = upload(place(opened(), "Yours"), "photo.png", png(90, 60))
    name = view_of(app).picture
    says(app, token="3,5")
    assert pictures_kept(name)
    del app
    gc.collect()
    assert not pictures_kept(name)


def pictures_kept(name: str) -> list:
    """What holds the pixels of this picture anywhere in this process."""
    dicts = [each for each in gc.get_objects() if type(each) is dict and each.get("name") == name]
    return [each for each in dicts if each.keys() & {"picture", "canvas"}]  # a payload; the fields of a Shown


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"dear diary", "not a picture that can be read"),
        (b"", "empty (0 bytes)"),
        (png(90, 60)[:2000], "damaged or cut short"),
        (b"\x89PNG" + bytes(8 * 2**20), "larger than 8 MB"),
    ],
    ids=["renamed text", "0 bytes", "cut", "too large"],
)
def test_a_file_that_is_no_picture_changes_nothing(data, says):
    app = opened(picture="sample:cat_00")
    before = data_of(app)
    upload(place(app, "Yours"), "photo.png", data)
    assert says in said(app.error[0].value)
    assert "The picture that was shown is unchanged." in said(app.error[0].value)
    assert data_of(app) == before
    assert link_of(app) == {"picture": "sample:cat_00"}
    upload(app, "photo.png", png(40, 40))
    assert not app.error
    assert view_of(app).picture.startswith("own:")


@pytest.mark.parametrize(("least", "is_unlike"), [(1e6, True), (-1e6, False)])
def test_a_picture_unlike_the_tested_ones_is_named_so(least, is_unlike, page_folders, write_checkpoint):
    write_checkpoint(page_folders / "m.safetensors", top_logit_percentiles=[least + k for k in range(101)])
    app = upload(place(opened(model="run:m"), "Yours"), "noise.png", png(64, 64))
    assert any("Unlike the pictures" in warning.value for warning in app.warning) == is_unlike
    shown(app.selectbox(key="view_model").set_value("bundled").run())
    assert view_of(app).picture.startswith("own:")


# Models


def test_the_models_under_the_runs_folder_can_be_chosen(page_folders, write_checkpoint):
    write_checkpoint(page_folders / "mine.safetensors", num_layers=2, num_heads=2, patch_size=8)
    write_checkpoint(page_folders / "run 1" / "best=0.9 (a).safetensors", num_layers=1, num_heads=4)
    app = opened(layer="5", head="8", token="8,8")
    labels = app.selectbox(key="view_model").options
    assert set(labels) - {"Bundled ViT for patterns"} == {
        "Bundled ViT for CIFAR-10", "mine", "run 1/best=0.9 (a)",
    }  # fmt: skip
    before = data_of(app)
    shown(app.selectbox(key="view_model").set_value("run:mine").run())
    assert "2 layers × 2 heads" in words_of(app)
    assert link_of(app) == {"model": "run:mine"}  # layer, head and patch of before are not in this model
    data = data_of(app)
    assert data["id"] != before["id"]
    assert (data["model"], data["layers"], data["heads"]) == ("mine.safetensors", 2, 2)
    assert data["grid"] == [4, 4]
    shown(app.selectbox(key="view_model").set_value("run:run 1/best=0.9 (a)").run())
    assert data_of(app)["layers"] == 1
    again = opened(**link_of(app))
    assert view_of(again) == view_of(app)
    assert data_of(again) == data_of(app)


def test_a_broken_checkpoint_falls_back_with_a_sentence(page_folders, write_checkpoint):
    write_checkpoint(page_folders / "good.safetensors")
    good = (page_folders / "good.safetensors").read_bytes()
    (page_folders / "cut.safetensors").write_bytes(good[: len(good) // 2])
    app = opened(head="2")
    before = data_of(app)
    shown(app.selectbox(key="view_model").set_value("run:cut").run())
    assert "cut.safetensors is damaged or cut short" in said(app.error[0].value)
    assert "The bundled model is shown instead." in said(app.error[0].value)
    assert data_of(app) == before
    assert link_of(app) == {"head": "2"}
    assert app.selectbox(key="view_model").value == "bundled"
    shown(app.run())
    assert not app.error


def test_a_link_reaches_no_checkpoint_outside_the_runs_folder(page_folders, write_checkpoint):
    write_checkpoint(page_folders.parent / "secret.safetensors")
    app = opened(model="run:../secret")
    assert "There is no checkpoint ../secret" in said(app.error[0].value)
    assert view_of(app).model == "bundled"


def test_a_stranger_s_tensor_name_is_shown_and_never_fetched(page_folders, write_checkpoint):
    path = page_folders / "m.safetensors"
    write_checkpoint(path)
    save_file(load_file(path) | {"![t](https://evil.example/t.png)": torch.zeros(1)}, path)
    app = opened(model="run:m")
    assert "evil.example" in said(app.error[0].value)
    assert not re.search(r"(?<!\\)!\[", app.error[0].value)
    assert "https://" not in app.error[0].value.replace("\\", "")


@pytest.mark.parametrize(
    "names",
    [
        tuple("0123456789"),
        tuple(f"<a href='x'>{k}</a>" for k in range(10)),
        tuple(f"{k}" + 90 * "x" for k in range(10)),
    ],
)
def test_odd_class_names_are_labels_and_nothing_else(page_folders, write_checkpoint, names):
    write_checkpoint(page_folders / "m.safetensors", class_names=names)
    app = opened(model="run:m")
    assert data_of(app)["classes"] == list(names)  # as they are: the viewer never makes markup of text
    upload(place(app, "Yours"), "photo.png", png(40, 40))
    for element in [*app.markdown, *app.caption]:
        assert not re.search(r"(?<!\\)[<>]", element.value)


def test_a_model_of_one_channel_explains_a_picture(page_folders, write_checkpoint):
    write_checkpoint(page_folders / "grey.safetensors", in_channels=1)
    app = opened(model="run:grey")
    assert not app.error
    assert view_of(app).model == "run:grey"


@pytest.mark.parametrize("name", ["PATCHLIGHT_RUNS", "PATCHLIGHT_CACHE", "PATCHLIGHT_DATA"])
@pytest.mark.parametrize("value", ["~nosuchuser/x", "a" * 300])
def test_a_variable_that_names_no_folder_is_told_in_words(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    app = shown(AppTest.from_file(str(ROOT / "app.py"), default_timeout=60).run())
    if value.startswith("a") and name != "PATCHLIGHT_DATA":
        assert "Set it to a folder" in said(app.error[0].value)


def test_a_run_that_is_gone_falls_back_with_a_sentence(page_folders):
    app = opened(model="run:gone")
    assert "no checkpoint gone under the runs folder" in said(app.error[0].value)
    assert link_of(app) == {}


def test_a_model_that_cannot_answer_is_told_in_words(page_folders, write_checkpoint):
    from safetensors.torch import load_file, save_file

    path = page_folders / "odd.safetensors"
    write_checkpoint(path, in_channels=5)
    app = opened(model="run:odd", head="2")
    assert "5 channels" in said(app.error[0].value)
    assert link_of(app) == {"head": "2"}

    write_checkpoint(path)
    tensors = load_file(path)
    tensors["mlp_head.0.weight"].fill_(1e30)
    tensors["mlp_head.1.weight"].fill_(1e30)
    save_file(tensors, path)
    app = opened(model="run:odd", head="2")
    assert "odd.safetensors: the model answers with numbers that are not finite" in said(app.error[0].value)
    assert link_of(app) == {"model": "run:odd", "head": "2"}
    shown(app.selectbox(key="view_model").set_value("bundled").run())
    assert link_of(app) == {"head": "2"}
    assert not app.error


def send_model(app: AppTest, data: bytes) -> AppTest:
    file = ("mine.safetensors", data, "application/octet-stream")
    return shown(app.file_uploader(key="upload_model").set_value(file).run())


def test_a_checkpoint_of_ones_own_can_be_uploaded(tmp_path, write_checkpoint):
    write_checkpoint(tmp_path / "mine.safetensors", num_layers=3, num_heads=2)
    app = send_model(opened(), (tmp_path / "mine.safetensors").read_bytes())
    assert "3 layers × 2 heads" in words_of(app)
    assert view_of(app).model.startswith("own:")
    assert app.selectbox(key="view_model").value == view_of(app).model
    assert "Your own checkpoint cannot be in it." in words_of(with_drawer(app))
    shown(app.selectbox(key="view_model").set_value("bundled").run())
    assert "6 layers × 8 heads" in words_of(app)


def test_a_file_that_is_no_checkpoint_changes_nothing(tmp_path):
    app = send_model(opened(head="2"), b"dear diary, this is no checkpoint")
    assert "This file is not a checkpoint" in said(app.error[0].value)
    assert "The model that was shown is unchanged." in said(app.error[0].value)
    assert link_of(app) == {"head": "2"}
    assert not list((tmp_path / "cache" / "uploads").glob("*"))


def test_uploaded_checkpoints_do_not_fill_the_disk(tmp_path, write_checkpoint):
    app = opened()
    for layers in range(1, 8):
        write_checkpoint(tmp_path / "mine.safetensors", num_layers=layers)
        send_model(app, (tmp_path / "mine.safetensors").read_bytes())
        assert f"{layers} layers" in words_of(app)
    assert len(list((tmp_path / "cache" / "uploads").iterdir())) == 5
