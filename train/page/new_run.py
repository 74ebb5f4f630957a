"""Starting a run: data, preset, every setting of TrainConfig, what it will cost, and the button.

The form is made from the fields of TrainConfig, as the command line is. A field starts as the preset has it;
what is impossible is said below the field.
"""

import dataclasses
import re
from math import floor, log10
from pathlib import Path

import streamlit as st

from train import launch
from train.config import EXPECTED, PRESETS, TrainConfig, preset
from train.estimate import problems
from train.page.asking import accent, ask_button, may_stop, show_refusal, still_asking
from train.page.chosen import choose, is_chosen
from train.page.download import has_cifar10, offer_download
from train.page.estimates import draw_estimate
from train.page.visitor import about_public, visitor
from train.rights import may_all
from train.runs import RunError
from train.seat import who_works
from train.state import find_run, look
from vit.device import pick_device
from vit.files import named_folder, runs_folder
from vit.page.session import tell
from vit.page.view import plain

_DATA = {"cifar10": "CIFAR-10", "patterns": "Patterns", "folder": "A folder"}
_NAMES = r"\b(" + "|".join(each.name for each in dataclasses.fields(TrainConfig) if "_" in each.name) + r")\b"
_BEFORE_DRAWER = ("data", "epochs", "minutes", "")
_REFRESH_SECONDS = 1.0
_PLACE, _REFUSED_KEY, _STARTED_KEY = "at_work", "start_refused", "just_started"
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
    st.container(horizontal=True).subheader("New run", anchor=False)  # as high as that of the run watched
    about_public()
    if st.session_state.pop(_STARTED_KEY, False):  # the next one has another name; this one is to be seen
        st.session_state["new_name"], st.session_state["new_all"] = "", False
    free, title, is_open = may_all(visitor()), "", False
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
        wrong = _problems(values)
        _wrong(wrong, *_BEFORE_DRAWER)
        drawer = st.expander("All settings", icon=":material/tune:", key="new_all", on_change="rerun")
        is_open = drawer.open
        if is_open:
            with drawer:
                values |= _all_settings(name, values, wrong)
        else:
            _wrong(wrong, *(set(wrong) - set(_BEFORE_DRAWER)))
    wrong = _problems(values)
    is_missing = values["data"] == "cifar10" and not has_cifar10()
    if is_missing:
        offer_download()
    if free:
        title = st.text_input(
            "Name", key="new_name", placeholder=f"{name} and a number", persist_state="session"
        )
    if wrong and is_open:
        st.caption("Some settings are impossible: see what stands beside them.")
    elif not wrong and not is_missing and values["data"]:
        draw_estimate(TrainConfig(**values), name)
    _at_work()
    is_impossible = bool(wrong or is_missing or not values["data"])
    if st.button(
        "Start" if is_impossible else accent("Start"),
        icon=":material/play_arrow:",
        key="new_start",
        width="stretch",
        disabled=is_impossible,
    ):
        _start(values, name, title)
    asked, why = st.session_state.get(_REFUSED_KEY, (None, ""))
    if why and asked == (values, name, title):  # until another run is asked for
        tell(st.error, why)


def _start(values: dict, preset_name: str, title: str) -> None:
    st.session_state.pop(_REFUSED_KEY, None)
    try:
        with st.spinner("Starting"):
            run = launch.start(TrainConfig(**values), preset_name, name=title.strip(), visitor=visitor())
    except (RunError, ValueError, OSError) as error:
        why = f"Nothing was started: {' '.join(str(error).split()).rstrip('.')}."
        st.session_state[_REFUSED_KEY] = (values, preset_name, title), why
        return
    choose(run)
    st.session_state[_STARTED_KEY] = True
    st.rerun()


def _at_work() -> None:
    """Who is at work, since one run at a time is, and the way to stop it; watched while anybody is."""
    name = who_works(runs_folder())

    @st.fragment(run_every=_REFRESH_SECONDS if name else None)
    def notice() -> None:
        if who_works(runs_folder()) != name:
            st.rerun()
        if name:
            _about_the_one_at_work(name)

    notice()


def _about_the_one_at_work(name: str) -> None:
    try:
        seen = look(find_run(name))
    except RunError:  # it lies deeper, or is being deleted
        st.caption(plain(f"{name} is at work, and one run at a time has the machine."))
        return
    if seen.wish == "stop":
        st.caption(plain(f"{name} is stopping."))
        return
    can_stop = may_stop(seen.run)
    way = "Stop it, or wait until it ends." if can_stop else "Wait until it ends."
    doing = "paused" if seen.word == "paused" else "at work"
    way = "Resume or stop it." if can_stop and seen.word == "paused" else way
    st.caption(plain(f"{name} is {doing}, and one run at a time has the machine. {way}"))
    is_in_sight = is_chosen(seen.run)  # with a button of its own
    if can_stop and not is_in_sight and not still_asking(seen.run, _PLACE, {"stop"}):
        ask_button(f"Stop {name}", "stop", seen.run, _PLACE)
    show_refusal(seen.run, _PLACE)


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
    ).strip()
    if not folder:
        return ""
    try:
        return str(named_folder(folder, Path()).resolve())
    except (ValueError, OSError, RuntimeError):  # a name that no folder can have, a link to itself
        return folder  # it is said below that there is no such folder


def _length(name: str, values: dict) -> dict:
    """How long, by minutes or by epochs; at first as the preset has it."""
    usual = "minutes" if values["minutes"] else "epochs"
    number, unit = st.columns([3, 2], vertical_alignment="bottom", wrap=False)
    by = unit.selectbox(
        "Unit", ["minutes", "epochs"], index=["minutes", "epochs"].index(usual), key=f"new_unit_{name}",
        persist_state="session", label_visibility="collapsed",
    )  # fmt: skip
    length = number.number_input(
        "Length", min_value=0.01, value=float(values[by] or 1), step=1.0 if by == "minutes" else 0.1,
        format="%g", key=f"new_length_{name}_{by}", persist_state="session",
    )  # fmt: skip
    fit = values["fit_epochs"] and by == "minutes"
    return {"minutes": 0.0, "epochs": 0.0, "fit_epochs": fit} | {by: length}


def _set_before(name: str, values: dict) -> dict:
    """What the drawer holds, known before it is drawn and while it is closed."""
    state = st.session_state
    keys = {field: _key(name, values["data"], field) for field in _in_drawer(values)}
    return {field: state[key] for field, key in keys.items() if key in state}


def _in_drawer(values: dict) -> dict[str, dataclasses.Field]:
    """Every field but data and length; what turns minutes into epochs only where there are minutes."""
    elsewhere = {"data", "epochs", "minutes"} | ({"fit_epochs"} if values["epochs"] else set())
    return {each.name: each for each in dataclasses.fields(TrainConfig) if each.name not in elsewhere}


def _problems(values: dict) -> dict[str, str]:
    """What is impossible, but for pictures that are still to be named or fetched: the form says so itself."""
    if not values["data"]:
        return problems(values | {"data": "patterns"})
    wrong = problems(values)
    if values["data"] == "cifar10" and not has_cifar10():
        wrong.pop("data", None)
    return wrong


def _all_settings(name: str, values: dict, wrong: dict[str, str]) -> dict:
    """The drawer, by group, each field with what is impossible about it."""
    fields = _in_drawer(values)
    grouped = {each for names in _GROUPS.values() for each in names}
    rest = [each for each in fields if each not in grouped]
    usual, chosen = dataclasses.asdict(preset(name, pick_device().type)), {}
    for group, names in _GROUPS.items():
        st.markdown(f"**{group}**")
        drawn = [each for each in names or rest if each in fields]
        for pair in zip(drawn[::2], [*drawn[1::2], None][: len(drawn[::2])], strict=True):
            for place, each in zip(st.columns(2, vertical_alignment="bottom", wrap=False), pair, strict=True):
                if each:
                    key = _key(name, values["data"], each)
                    chosen[each] = _field(place, fields[each], key, values[each], usual[each])
            _wrong(wrong, *pair)
    return chosen


def _key(name: str, data: str, field_name: str) -> str:
    return f"new_{name}_{data if data in _DATA else 'folder'}_{field_name}"


def _field(place, field: dataclasses.Field, key: str, value, usual):
    """One widget for one field."""
    facts, label = field.metadata, _in_words(field.name)
    label = f"{label[:1].upper()}{label[1:]}"
    options = {"help": f"{facts['help']}. The preset: {usual}", "key": key, "persist_state": "session"}
    if key in st.session_state:
        value = st.session_state[key]
    if field.type is bool:
        return place.checkbox(label, value=value, **options)
    if facts["choices"]:
        return place.selectbox(label, facts["choices"], index=facts["choices"].index(value), **options)
    if field.type is str:
        return place.text_input(label, value=value, **options)
    if field.type is int:
        high = min(facts["high"], _LARGEST_WHOLE)
        return place.number_input(label, facts["low"], high, value=value, step=1, **options)
    low, high = float(facts["low"]), float(facts["high"])
    step = 1.0 if high > 10 else min(0.01, 10.0 ** floor(log10(usual))) if usual else 0.01
    return place.number_input(label, low, high, value=float(value), step=step, format="%g", **options)


def _in_words(text: str) -> str:
    """A field's name, or a sentence with such names in it, as people write it."""
    text = re.sub(_NAMES, lambda found: found[0].replace("_", " "), text)
    return re.sub(r"\b(lr|mlp|ema|mb)\b", lambda found: found[0].upper(), text)


def _wrong(wrong: dict[str, str], *field_names: str | None) -> None:
    for name in field_names:
        if name in wrong:
            text = wrong[name] if name == "data" else _in_words(wrong[name])  # that one names a folder
            tell(st.error, f"{text[:1].upper()}{text[1:]}")
