"""Every setting is told, bounded and checked, and the presets are what they say.

Run: pytest tests/test_config.py (some seconds; nothing is trained).
"""

import dataclasses
import json
import math
import re
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.config import EXPECTED, PRESETS, TrainConfig, not_stated, preset

FIELDS = fields(TrainConfig)
BY_NAME = {field.name: field for field in FIELDS}
NUMBERS = [field for field in FIELDS if field.type in (int, float)]
names = pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)


def refusal(**changes) -> str:
    """What the config says to these changes of the default; fails where it takes them, or says more."""
    with pytest.raises(ValueError, match=r".") as refused:
        replace(TrainConfig(), **changes)
    told = str(refused.value)
    assert "\n" not in told
    assert not re.search(r"[.!?] ", told), f"more than one sentence: {told}"
    return told


def just_outside(field) -> list[int | float]:
    low, high = field.metadata["low"], field.metadata["high"]
    if field.type is int:
        return [low - 1, high + 1]
    return [math.nextafter(low, -math.inf), math.nextafter(high, math.inf)]


def wrong_types(field) -> list:
    return {
        bool: [0, 1, "true", None, 1.0],
        int: [1.0, "1", None, True, math.nan, math.inf, [1]],
        float: ["1", None, True, [1.0], 1j],
        str: [1, None, True, "", b"cpu"],
    }[field.type]


def is_possible(field, value) -> bool:
    """By itself: not beside the others."""
    if field.metadata["choices"]:
        return value in field.metadata["choices"]
    return field.metadata["low"] <= value <= field.metadata["high"]


# --- the fields -------------------------------------------------------------------------------------------


@names
def test_a_field_says_what_it_is_and_what_it_may_be(field):
    assert field.type in (bool, int, float, str)
    assert len(field.metadata["help"]) > 8
    assert not field.metadata["help"].endswith(".")
    assert type(field.default) is field.type
    low, high = field.metadata["low"], field.metadata["high"]
    if field.type in (int, float):
        assert -math.inf < low < high < math.inf
        assert is_possible(field, field.default)
    else:
        assert (low, high) == (None, None)
    if field.metadata["choices"]:
        assert is_possible(field, field.default)


@names
def test_a_value_of_another_type_is_refused(field):
    for value in wrong_types(field):
        told = refusal(**{field.name: value})
        assert told.startswith(f"{field.name} is ")
        assert told.endswith(f"not {value!r}")


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
def test_a_number_just_outside_its_range_is_refused(field):
    ends = field.metadata["low"], field.metadata["high"]
    impossible = [math.nan, math.inf, -math.inf] if field.type is float else [10**400, -(10**400)]
    for value in just_outside(field) + impossible:
        assert refusal(**{field.name: value}) == f"{field.name} is from {ends[0]} to {ends[1]}, not {value}"


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
def test_both_ends_of_a_range_are_allowed(field):
    for value in (field.metadata["low"], field.metadata["high"]):
        beside = {
            "epochs": {"minutes": float(value == 0)},
            "minutes": {"epochs": float(value == 0)},
            "embed_dim": {"num_heads": 1},
            "patch_size": {"keep_patches": 1.0},
        }.get(field.name, {})
        assert getattr(replace(TrainConfig(), **{field.name: value}, **beside), field.name) == value


@pytest.mark.parametrize(
    "field", [field for field in FIELDS if field.metadata["choices"]], ids=lambda field: field.name
)
def test_only_the_choices_can_be_chosen(field):
    for choice in field.metadata["choices"]:
        assert getattr(replace(TrainConfig(), **{field.name: choice}), field.name) == choice
    for other in ("none of them", field.metadata["choices"][0].upper()):
        told = refusal(**{field.name: other})
        assert told == f"{field.name} is {' or '.join(field.metadata['choices'])}, not {other!r}"


def anything(field):
    if field.metadata["choices"]:
        return st.sampled_from([*field.metadata["choices"], "other"])
    if field.type is bool:
        return st.booleans()
    if field.type is str:
        return st.sampled_from(["cifar10", "a folder"])
    low, high = field.metadata["low"], field.metadata["high"]
    if field.type is int:
        small = st.integers(low, min(high, low + 40))  # where sizes fit one another
        return small | st.integers(low - 1, high + 1)
    return st.sampled_from([0.0, low]) | st.floats(low, high) | st.floats()


@given(st.data())
def test_a_config_is_whole_or_one_sentence(data):
    changed = data.draw(st.lists(st.sampled_from(FIELDS), max_size=4, unique_by=lambda field: field.name))
    changes = {field.name: data.draw(anything(field), label=field.name) for field in changed}
    try:
        config = replace(TrainConfig(), **changes)
    except ValueError as error:
        told = str(error)
    else:
        told = ""
    if told:
        assert "\n" not in told
        assert not re.search(r"[.!?] ", told)
        assert any(name in told for name in changes)
        return
    for name, value in changes.items():
        assert BY_NAME[name].type in (bool, str) or is_possible(BY_NAME[name], value)
    # What is whole can be used, written and read again.
    assert config.architecture(num_classes=3).grid[0] >= 1
    assert 0 <= config.schedule_shape().lr_scale(0.5) <= 1
    assert config.optim().lr == config.lr
    assert TrainConfig(**json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"epochs": 2.0}, "a run is as long as epochs or minutes say: set one of them, the other to 0"),
        ({"minutes": 0.0}, "a run is as long as epochs or minutes say: set one of them, the other to 0"),
        (
            {"epochs": 2.0, "minutes": 0.0, "fit_epochs": True},
            "fit_epochs turns minutes into epochs: set minutes",
        ),
        ({"patch_size": 5}, "patch_size 5 does not divide 32; 1, 2, 4, 8, 16 and 32 do"),
        ({"num_heads": 7}, "embed_dim 256 cannot be divided by num_heads 7"),
        (
            {"patch_size": 16, "keep_patches": 0.1},
            "keep_patches 0.1 of 4 patches leaves none; the least is 0.25",
        ),
    ],
)
def test_values_that_do_not_fit_one_another_are_refused(changes, told):
    assert refusal(**changes) == told


def test_it_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().seed = 1


def test_sizes_and_rates_go_where_they_belong():
    config = replace(
        TrainConfig(), patch_size=8, embed_dim=24, num_layers=3, num_heads=2, mlp_dim=40, dropout=0.25,
        optimiser="adamw", lr=0.01, muon_lr=0.02, weight_decay=0.3, decay_all=True, beta2=0.9,
        schedule="cosine", warmup=0.2,
    )  # fmt: skip
    model = config.architecture(num_classes=7).build()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["patch_embed.conv.weight"] == (24, 3, 8, 8)
    assert shapes["pos_embed"] == (1, 17, 24)
    assert shapes["encoder_blocks.2.mlp.0.weight"] == (40, 24)
    assert "encoder_blocks.3.mlp.0.weight" not in shapes
    assert shapes["mlp_head.1.weight"] == (7, 24)
    assert (model.num_heads, config.architecture(7).dropout) == (2, 0.25)
    optim = config.optim()
    assert (optim.kind, optim.lr, optim.muon_lr) == ("adamw", 0.01, 0.02)
    assert (optim.weight_decay, optim.decay_all, optim.betas) == (0.3, True, (0.9, 0.9))
    shape = config.schedule_shape()
    assert (shape.lr_scale(0.1), shape.lr_scale(0.2)) == (0.5, 1.0)
    assert shape.lr_scale(0.6) == pytest.approx(0.5)  # half way down a cosine


# --- the presets ------------------------------------------------------------------------------------------


def test_each_preset_is_told_and_valid():
    assert list(PRESETS) == list(EXPECTED) == ["tutorial", "fast", "record", "demo"]
    for name, config in PRESETS.items():
        assert preset(name) == config == replace(config)


def test_the_tutorial_is_the_tutorial():
    """BATCH_SIZE 128, EPOCHS 80, LEARNING_RATE 3e-4, PATCH_SIZE 4, EMBED_DIM 256, NUM_HEADS 8, DEPTH 6,
    MLP_DIM 512, DROP_RATE 0.1; 3,189,514 parameters, all of them trained; inputs from -1 to 1."""
    config = preset("tutorial")
    assert (config.batch, config.epochs, config.minutes, config.lr) == (128, 80, 0, 3e-4)
    assert (config.patch_size, config.embed_dim, config.num_heads) == (4, 256, 8)
    assert (config.num_layers, config.mlp_dim, config.dropout) == (6, 512, 0.1)
    assert (config.init, config.augment, config.mean_and_std) == ("tutorial", "tutorial", "half")
    model = config.architecture(num_classes=10).build(init=config.init)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 3_189_514
    # Of what it does not mention, nothing is done.
    for unsaid in (
        "cutmix",
        "random_erasing",
        "label_smoothing",
        "stochastic_depth",
        "clip",
        "warmup",
        "ema",
    ):
        assert getattr(config, unsaid) == 0, unsaid
    assert (config.keep_patches, config.schedule, config.whiten) == (1, "constant", False)
    assert (config.optimiser, config.weight_decay, config.beta2) == ("adamw", 0.01, 0.999)
    assert config.decay_all
    assert config.precision == "float32"


def test_what_the_tutorial_leaves_open_is_listed():
    listed = not_stated("tutorial")
    assert {"optimiser", "weight_decay", "schedule", "loss", "test transform"} <= set(listed)
    assert all(isinstance(choice, str) and choice for choice in listed.values())
    assert not any(not_stated(name) for name in PRESETS if name != "tutorial")
    stated = {"batch", "epochs", "lr", "patch_size", "embed_dim", "num_heads", "num_layers", "mlp_dim"}
    assert not stated & set(listed)


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_ends_by_what_was_asked_for(name):
    by_epochs, by_minutes = preset(name, epochs=3.0), preset(name, minutes=4.0)
    assert (by_epochs.epochs, by_epochs.minutes, by_epochs.fit_epochs) == (3, 0, False)
    assert (by_minutes.epochs, by_minutes.minutes) == (0, 4)
    with pytest.raises(ValueError, match="set one of them"):
        preset(name, epochs=3.0, minutes=4.0)
    with pytest.raises(ValueError, match="set one of them"):
        preset(name, epochs=0.0, minutes=0.0)
    for broken in (math.nan, -1.0, math.inf):
        with pytest.raises(ValueError, match=r"^epochs is from 0 to"):
            preset(name, epochs=broken)


def test_fitting_epochs_lasts_as_long_as_minutes_are_meant():
    assert preset("record").fit_epochs
    assert preset("record", minutes=3.0).fit_epochs
    with pytest.raises(ValueError, match="fit_epochs turns minutes into epochs"):
        preset("record", epochs=3.0, fit_epochs=True)


def test_only_the_named_fields_change():
    base, changed = asdict(preset("record")), asdict(preset("record", seed=5, lr=0.01))
    assert {name for name in base if base[name] != changed[name]} == {"seed", "lr"}
    with pytest.raises(TypeError, match="colour"):
        preset("record", colour="red")
    with pytest.raises(ValueError, match=r"^a preset is tutorial, fast, record, demo, not 'slow'$"):
        preset("slow")


def test_every_field_can_be_changed():
    """The parameters of `preset` itself have no name that a field could bear."""
    assert preset("fast", device="cpu").device == "cpu"
    assert preset("fast", "cuda", device="cuda:1", data="elsewhere").device == "cuda:1"


def test_patterns_are_never_mirrored_unless_asked():
    """A rising stripe in a mirror is a falling one: the label would be wrong."""
    assert preset("fast").mirror
    assert not preset("fast", data="patterns").mirror
    assert preset("fast", data="patterns", mirror=True).mirror
    assert (PRESETS["demo"].data, PRESETS["demo"].mirror) == ("patterns", False)


def test_minutes_on_a_gpu_are_spent_on_the_strong_recipe():
    gpu, cpu = preset("fast", "cuda"), preset("fast", "cpu")
    assert (gpu.minutes, gpu.epochs, gpu.fit_epochs) == (cpu.minutes, 0, False)
    assert (gpu.augment, gpu.cutmix) == (PRESETS["record"].augment, PRESETS["record"].cutmix)
    assert cpu == preset("fast", "mps") == PRESETS["fast"]
    assert preset("tutorial", "cuda") == PRESETS["tutorial"]
