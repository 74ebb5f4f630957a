"""Starting a run: data, preset, every setting of TrainConfig, what it will cost, and the button.

The form is made from the fields of TrainConfig, as the command line is. A field starts as the preset has it;
what is impossible is said below the field.
"""

import dataclasses
from pathlib import Path

import streamlit as st

from train import launch
from train.config import EXPECTED, PRESETS, TrainConfig, preset
from train.estimate import problems
from train.page.chosen import choose
from train.page.download import has_cifar10, offer_download
from train.page.estimates import draw_estimate
from train.page.visitor import about_public, visitor
from train.rights import may_all
from train.runs import RunError
from train.seat import who_works
from vit.device import pick_device
from vit.files import runs_folder
from vit.page.session import tell
from vit.page.view import plain

_DATA = {"cifar10": "CIFAR-10", "patterns": "Patterns", "folder": "A folder"}
_LARGEST_WHOLE = 2**53 - 1  # that a browser can count to
_GROUPS = {  # where a field of the settings stands; all others stand under the last
    "Length": ("fit_epochs", "stop_minutes", "stop_mb"),
    "Model": ("patch_size", "embed_dim", "num_layers", "num_heads", "mlp_dim", "init", "whiten"),
    "Pictures": ("holdout", "split_seed", "augment", "mirror", "cutmix", "random_erasing", "label_smoothing",
                 "mean_and_std"),
    "Regularising": ("dropout", "stochastic_depth", "keep_patches", "full_from"),
    "Optimiser": ("batch", "optimiser", "lr", "muon_lr", "weight_decay", "decay_all", "beta2", "schedule",
                  "warmup", "clip", "ema"),
    "Machine and files": (),
}  # fmt: skip


@st.fragment
def new_run() -> None:
    """The whole form. A fragment: what is typed here draws nothing else anew."""
    st.subheader("New run", anchor=False)
    about_public()
    free, title = may_all(visitor()), ""
    names = list(PRESETS) if free else ["demo"]
    name = st.selectbox("Preset", names, index=names.index("demo"), key="new_preset", persist_state="session")
    st.caption(f"{EXPECTED[name][:1].upper()}{EXPECTED[name][1:]}.")
    values = dataclasses.asdict(preset(name, pick_device().type))
    if free:
        data = _data(name, values["data"])
        if data == "patterns":
            values["mirror"] = False  # rising stripes mirrored are falling ones
        values["data"] = data
        values |= _length(name, values)
        values |= _set_before(name, values)
        wrong = problems(values)
        _wrong(wrong, "data", "epochs", "minutes", "")
        drawer = st.expander("All settings", icon=":material/tune:", key="new_all", on_change="rerun")
        if drawer.open:
            with drawer:
                values |= _all_settings(name, values, wrong)
    wrong = problems(values)
    is_missing = values["data"] == "cifar10" and not has_cifar10()
    if is_missing:
        offer_download()
    if free:
        title = st.text_input(
            "Name", key="new_name", placeholder=f"{name} and a number", persist_state="session"
        )
    if wrong:
        st.caption("Some settings are impossible: see what stands beside them.")
    else:
        draw_estimate(TrainConfig(**values), name)
    if at_work := who_works(runs_folder()):
        st.caption(plain(f"{at_work} is at work. One run at a time: stop it, or wait until it ends."))
    is_impossible = bool(wrong or is_missing)
    if st.button(
        "Start", icon=":material/play_arrow:", type="primary", width="stretch", disabled=is_impossible
    ):
        _start(values, name, title)


def _start(values: dict, preset_name: str, title: str) -> None:
    try:
        with st.spinner("Starting"):
            run = launch.start(TrainConfig(**values), preset_name, name=title.strip(), visitor=visitor())
    except (RunError, ValueError, OSError) as error:
        text = " ".join(str(error).split())
        tell(st.error, f"{text[:1].upper()}{text[1:]}. Nothing was started.")
        return
    choose(run)
    st.rerun()


# ---- fields ----


def _data(name: str, usual: str) -> str:
    """The pictures to learn from, as TrainConfig names them."""
    kind = st.segmented_control(
        "Data",
        list(_DATA),
        default=usual,
        required=True,
        format_func=_DATA.get,
        key=f"new_data_{name}",
        persist_state="session",
        width="stretch",
    )
    if kind != "folder":
        return kind
    folder = st.text_input(
        "Folder on the server",
        key="new_folder",
        persist_state="session",
        placeholder="a folder with one folder for each class",
    )
    return str(Path(folder.strip()).expanduser().resolve()) if folder.strip() else ""


def _length(name: str, values: dict) -> dict:
    """How long, by minutes or by epochs; at first as the preset has it."""
    usual = "minutes" if values["minutes"] else "epochs"
    number, unit = st.columns([3, 2], vertical_alignment="bottom", wrap=False)
    by = unit.selectbox(
        "Unit", ["minutes", "epochs"], index=["minutes", "epochs"].index(usual), key=f"new_unit_{name}",
        persist_state="session", label_visibility="collapsed",
    )  # fmt: skip
    length = number.number_input(
        "Length", min_value=0.01, value=float(values[by] or 1), format="%g", key=f"new_length_{name}_{by}",
        persist_state="session",
    )  # fmt: skip
    fit = values["fit_epochs"] and by == "minutes"
    return {"minutes": 0.0, "epochs": 0.0, "fit_epochs": fit} | {by: length}


def _set_before(name: str, values: dict) -> dict:
    """What the drawer holds, known before it is drawn and while it is closed."""
    state = st.session_state
    return {field: state[key] for field in values if (key := _key(name, values["data"], field)) in state}


def _all_settings(name: str, values: dict, wrong: dict[str, str]) -> dict:
    """Every field but data and length, by group, each with what is impossible about it."""
    drawn = {"data", "epochs", "minutes"}
    fields = {each.name: each for each in dataclasses.fields(TrainConfig) if each.name not in drawn}
    grouped = {each for names in _GROUPS.values() for each in names}
    usual, chosen = dataclasses.asdict(preset(name, pick_device().type)), {}
    for group, names in _GROUPS.items():
        st.markdown(f"**{group}**")
        for each in names or [other for other in fields if other not in grouped]:
            key = _key(name, values["data"], each)
            chosen[each] = _field(fields[each], key, values[each], usual[each])
            _wrong(wrong, each)
    return chosen


def _key(name: str, data: str, field_name: str) -> str:
    return f"new_{name}_{data if data in _DATA else 'folder'}_{field_name}"


def _field(field: dataclasses.Field, key: str, value, usual):
    """One widget for one field."""
    facts, label = field.metadata, field.name.replace("_", " ")
    label = f"{label[:1].upper()}{label[1:]}"
    options = {"help": f"{facts['help']}. The preset: {usual}", "key": key, "persist_state": "session"}
    if key in st.session_state:
        value = st.session_state[key]
    if field.type is bool:
        return st.checkbox(label, value=value, **options)
    if facts["choices"]:
        return st.selectbox(label, facts["choices"], index=facts["choices"].index(value), **options)
    if field.type is str:
        return st.text_input(label, value=value, **options)
    if field.type is int:
        high = min(facts["high"], _LARGEST_WHOLE)
        return st.number_input(label, facts["low"], high, value=value, step=1, **options)
    low, high = float(facts["low"]), float(facts["high"])
    return st.number_input(label, low, high, value=float(value), format="%g", **options)


def _wrong(wrong: dict[str, str], *field_names: str) -> None:
    for name in field_names:
        if name in wrong:
            tell(st.error, f"{wrong[name][:1].upper()}{wrong[name][1:]}")
