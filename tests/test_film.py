"""The film of attention: what is kept is what the model says, within half a level, and files are whole.

Run: pytest tests/test_film.py (some seconds).
"""

import zipfile
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from train import film as films
from train.film import DISCARD, cut, empty, load, probes, quantise, record, save, snapshot_progress
from vit.datasets import Pictures
from vit.explanation import explain
from vit.model import VisualTransformer
from vit.sources import CLASSES

HALVES = (0.5, 0.5, 0.5)
MEAN, STD = (0.49, 0.48, 0.45), (0.2, 0.21, 0.22)


def made(n=30, class_names=CLASSES, seed=0) -> Pictures:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (n, 32, 32, 3), np.uint8)
    labels = np.arange(n) % len(class_names)
    return Pictures(images, labels, np.array([str(i) for i in range(n)]), class_names, "made", "train", "d")


def small_model(dropout=0.5, seed=1, **sizes) -> VisualTransformer:
    torch.manual_seed(seed)
    sizes = {"embed_dim": 32, "num_layers": 3, "num_heads": 4, "mlp_dim": 32, "patch_size": 8} | sizes
    return VisualTransformer(10, dropout=dropout, init="tutorial", **sizes)


def same(one: films.Film, other: films.Film) -> bool:
    return all(np.array_equal(array, vars(other)[name]) for name, array in vars(one).items())


@pytest.fixture
def blank():
    pictures = made()
    return empty(pictures.images[:5], pictures.labels[:5], CLASSES)


@pytest.fixture
def film(blank):
    for step in (0, 40, 100):
        blank = record(blank, small_model(seed=step), step, MEAN, STD)
    return blank


# --- what is recorded


@given(arrays(np.float32, (4, 7), elements=st.floats(0, 1e6, width=32)))
def test_a_value_is_off_by_at_most_half_a_level(rows):
    levels, scale = quantise(rows)
    assert levels.dtype == np.uint8
    assert scale.dtype == np.float32
    restored = levels.astype(np.float64) * scale.astype(np.float64)[:, None]
    # a level may itself be rounded by one part in 2^24, and not be smaller than float32's smallest number
    allowed = (0.5 + 255 * 2**-23) * rows.max(axis=1, keepdims=True).astype(np.float64) / 255 + 2e-43
    assert (np.abs(restored - rows) <= allowed).all()
    assert (restored[rows == 0] == 0).all()


def test_a_row_of_zeros_stays_zero():
    levels, scale = quantise(np.zeros((2, 9), np.float32))
    assert not levels.any()
    assert not scale.any()


def test_the_largest_weight_of_a_row_has_the_top_level(film):
    assert (film.cls_row.max(axis=-1) == 255).all()
    assert (film.rollout.max(axis=-1) == 255).all()


def test_a_frame_is_what_explain_says(blank):
    model = small_model().eval()
    x = (blank.pictures.astype(np.float64) / 255 - MEAN) / STD
    expected = explain(model, torch.tensor(x, dtype=torch.float32).permute(0, 3, 1, 2), discard_ratio=DISCARD)
    film = record(blank, model, 7, MEAN, STD)
    rows, rolled = expected.attention[:, :, :, 0].numpy(), expected.rollout[:, :, 0].numpy()
    assert film.attention(0).shape == rows.shape == (5, 3, 4, 17)
    half_levels = (rows.max(-1, keepdims=True) / 510, rolled.max(-1, keepdims=True) / 510)
    assert (np.abs(film.attention(0) - rows) <= half_levels[0] + 1e-5).all()
    assert (np.abs(film.rolled(0) - rolled) <= half_levels[1] + 1e-5).all()
    np.testing.assert_allclose(film.probabilities[0], expected.probabilities.numpy(), atol=1e-5)


@pytest.mark.parametrize("mode", [True, False])
def test_the_model_is_left_as_it_was_and_its_mode_does_not_count(blank, mode):
    model = small_model().train(mode)
    model.mlp_head.train(not mode)  # a part in another mode than the whole
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    film = record(blank, model, 0, MEAN, STD)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    still = record(blank, small_model().eval(), 0, MEAN, STD)
    assert same(film, still)


def test_lower_precision_around_it_does_not_count(blank):
    plain = record(blank, small_model(), 0, MEAN, STD)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = record(blank, small_model(), 0, MEAN, STD)
    assert np.array_equal(plain.probabilities, inside.probabilities)
    assert np.array_equal(plain.cls_row_scale, inside.cls_row_scale)


def test_a_broken_model_is_not_filmed(blank):
    model = small_model()
    torch.nn.init.constant_(model.mlp_head[1].bias, torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        record(blank, model, 0, MEAN, STD)


# --- steps


def test_a_step_recorded_twice_is_replaced(film):
    again = record(film, small_model(seed=9), 40, MEAN, STD)
    alone = record(cut(film, -1), small_model(seed=9), 40, MEAN, STD)
    assert again.steps.tolist() == [0, 40, 100]
    assert np.array_equal(again.cls_row[1], alone.cls_row[0])
    assert not np.array_equal(again.cls_row[1], film.cls_row[1])
    assert np.array_equal(again.cls_row[[0, 2]], film.cls_row[[0, 2]])


def test_the_only_step_can_be_replaced(blank):
    film = record(record(blank, small_model(seed=1), 3, MEAN, STD), small_model(seed=2), 3, MEAN, STD)
    assert film.steps.tolist() == [3]
    assert np.array_equal(film.rollout, record(blank, small_model(seed=2), 3, MEAN, STD).rollout)


def test_cutting_drops_what_came_later(film):
    assert cut(film, 99).steps.tolist() == [0, 40]
    assert cut(film, 40).steps.tolist() == [0, 40]
    assert cut(film, 100).steps.tolist() == [0, 40, 100]
    assert len(cut(film, -1)) == 0
    assert np.array_equal(cut(film, 40).rollout_scale, film.rollout_scale[:2])
    assert len(film) == 3  # a film itself never changes


def test_a_cut_film_goes_on(film):
    gone_on = record(cut(film, 40), small_model(seed=100), 100, MEAN, STD)
    assert all(
        np.array_equal(*pair) for pair in zip(vars(gone_on).values(), vars(film).values(), strict=True)
    )


@pytest.mark.parametrize("count", [2, 3, 24])
def test_frames_are_dense_early(count):
    places = snapshot_progress(count)
    assert (len(places), places[0], places[-1]) == (count, 0.0, 1.0)
    gaps = np.diff(places)
    assert (gaps > 0).all()
    assert (np.diff(gaps) > 0).all()


def test_a_film_of_one_frame_is_refused():
    with pytest.raises(ValueError, match="at least 2 frames"):
        snapshot_progress(1)


# --- which pictures


def test_probes_are_the_samples_and_one_held_out_picture_of_each_class():
    pictures = made(60)
    images, labels = probes(pictures, np.arange(25, 60))
    assert images.shape == (30, 32, 32, 3)
    assert images.dtype == np.uint8
    assert labels[20:].tolist() == list(range(10))
    for image, label in zip(images[20:], labels[20:], strict=True):
        first = next(i for i in range(25, 60) if pictures.labels[i] == label)
        assert np.array_equal(image, pictures.images[first])
    names = [CLASSES[label] for label in labels[:20]]
    assert names == sorted(names)
    assert "bird" not in names  # as the samples' own README says


def test_other_classes_have_no_samples_and_may_lack_some():
    pictures = made(9, ("ant", "bee", "wasp"))
    images, labels = probes(pictures, None)
    assert labels.tolist() == [0, 1, 2]
    assert np.array_equal(images, pictures.images[:3])
    assert probes(pictures, np.array([4, 7]))[1].tolist() == [1]


# --- files


def test_a_file_holds_the_arrays_by_their_agreed_names(film, tmp_path):
    path = tmp_path / "run" / "attention.npz"
    save(film, path)
    with np.load(path, allow_pickle=False) as file:
        shapes = {name: (file[name].dtype.name, file[name].shape) for name in file.files}
    assert shapes.pop("class_names")[1] == (10,)
    assert shapes == {
        "steps": ("int64", (3,)),
        "cls_row": ("uint8", (3, 5, 3, 4, 17)),
        "cls_row_scale": ("float32", (3, 5, 3, 4)),
        "rollout": ("uint8", (3, 5, 3, 17)),
        "rollout_scale": ("float32", (3, 5, 3)),
        "probabilities": ("float32", (3, 5, 10)),
        "pictures": ("uint8", (5, 32, 32, 3)),
        "labels": ("int64", (5,)),
    }
    again = load(path)
    assert same(again, film)
    assert again.class_names.tolist() == list(CLASSES)


def test_a_film_without_a_frame_can_be_kept(blank, tmp_path):
    save(blank, tmp_path / "a.npz")
    assert len(load(tmp_path / "a.npz")) == 0


def test_saving_fails_whole(film, tmp_path, monkeypatch):
    path = tmp_path / "attention.npz"
    save(cut(film, 0), path)

    def half(file, **_):
        file.write(b"PK\x03\x04 half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(films.np, "savez_compressed", half)
    with pytest.raises(OSError, match="No space"):
        save(film, path)
    assert load(path).steps.tolist() == [0]
    assert [each.name for each in tmp_path.iterdir()] == ["attention.npz"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no recording of attention at .*gone\.npz"):
        load(tmp_path / "gone.npz")


def test_a_torn_file_is_named(film, tmp_path):
    path = tmp_path / "attention.npz"
    save(film, path)
    whole = path.read_bytes()
    for kept in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"attention\.npz is damaged"):
            load(path)


def test_flipped_bytes_never_raise_anything_else(film, tmp_path):
    path = tmp_path / "attention.npz"
    save(film, path)
    whole = path.read_bytes()
    said = []
    for at in np.random.default_rng(3).integers(0, len(whole), 150):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            load(path)
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 100
    assert all("damaged" in each for each in said)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("steps", lambda film: film.steps[::-1]),
        ("steps", lambda film: np.int64(3)),
        ("cls_row", lambda film: film.cls_row[:, :4]),
        ("cls_row", lambda film: film.cls_row[:, :, :0]),
        ("cls_row", lambda film: film.cls_row.astype(np.float32)),
        ("cls_row_scale", lambda film: film.cls_row_scale * np.float32("nan")),
        ("rollout_scale", lambda film: film.rollout_scale * np.float32("inf")),
        ("rollout", lambda film: film.rollout[..., 1:]),
        ("probabilities", lambda film: film.probabilities[..., 1:]),
        ("pictures", lambda film: film.pictures[..., 0]),
        ("labels", lambda film: film.labels + 9),
        ("class_names", lambda film: np.arange(10)),
        ("class_names", lambda film: np.array([print] * 10, object)),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(film, tmp_path, name, make):
    np.savez(tmp_path / "a.npz", **(vars(film) | {name: make(film)}))
    with pytest.raises(ValueError, match="damaged"):
        load(tmp_path / "a.npz")


@pytest.mark.parametrize("field", [field.name for field in fields(films.Film)])
def test_no_array_may_be_missing(film, tmp_path, field):
    np.savez(tmp_path / "a.npz", **{name: array for name, array in vars(film).items() if name != field})
    with pytest.raises(ValueError, match="damaged"):
        load(tmp_path / "a.npz")


def test_the_file_is_compressed(film, tmp_path):
    save(film, tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz") as file:
        assert all(each.compress_type == zipfile.ZIP_DEFLATED for each in file.infolist())
