"""The curves of runs: what is drawn is what was measured; zoom and charts outlive updates; updates are cheap.

Run: pytest tests/test_curves.py (half a minute; -s shows what an update costs). The last test needs Chromium.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from serving import serving

from train.page.curves import COLORS, curves
from train.runs import Run, append_metrics
from train.watch import Columns, Watch, thinned

ROOT = Path(__file__).parents[1]


def metrics(steps: int, evaluate_every: int = 10, first: int = 1) -> list[dict]:
    rows = []
    for step in range(first, steps + 1):
        row = {
            "step": step,
            "epoch": step / 50,
            "seconds": 0.5 * step,
            "loss": 2.3 / math.sqrt(step),
            "lr": 1e-3,
        }
        if step % evaluate_every == 0:
            row |= {"val_accuracy": 1 - 0.9 / math.sqrt(step), "val_loss": 2.5 / math.sqrt(step)}
        rows.append(row)
    return rows


def read(folder: Path, rows: list[dict]) -> Columns:
    folder.mkdir(exist_ok=True)
    Run(folder).metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Watch(folder).read(60)


def line(chart, run: str, of: str) -> tuple[list[float], list[float]]:
    rows = [row for row in chart.points.to_pylist() if (row["run"], row["line"]) == (run, of)]
    return [row["x"] for row in rows], [row["value"] for row in rows]


# --- what is drawn


@pytest.mark.parametrize(("x", "column", "unit"), [("step", "step", 1), ("epoch", "epoch", 1),
                                                   ("seconds", "seconds", 1000)])  # fmt: skip
def test_lines_are_what_was_measured(tmp_path, x, column, unit):
    rows = metrics(60)
    charts = curves({"one": read(tmp_path, rows)}, x)
    drawn = {"loss": [("training", "loss"), ("held-out pictures", "val_loss")],
             "accuracy": [("held-out pictures", "val_accuracy")], "lr": [("training", "lr")]}  # fmt: skip
    assert list(charts) == list(drawn)
    for name, lines in drawn.items():
        assert charts[name].points.num_rows == sum(each in row for row in rows for _, each in lines)
        for of, measured in lines:
            xs, values = line(charts[name], "one", of)
            assert xs == pytest.approx([unit * row[column] for row in rows if measured in row])
            assert values == [row[measured] for row in rows if measured in row]


def test_a_point_says_what_it_is(tmp_path):
    columns = read(tmp_path, metrics(400))
    said = curves({"one": columns}, "seconds")["accuracy"].points.to_pylist()[-1]
    assert (said["at"], said["told"]) == ("3 min 20 s", "96\u00a0%")
    said = curves({"one": columns})["loss"].points.to_pylist()[0]
    assert (said["at"], said["told"]) == ("1", "2.3")


def test_long_runs_are_thinned_and_few_points_are_marked(tmp_path):
    columns = read(tmp_path, metrics(5000, evaluate_every=200))
    chart = curves({"one": columns})["loss"]
    xs, values = line(chart, "one", "training")
    assert (xs, values) == tuple(each.tolist() for each in thinned(*columns["loss"], 400))
    marked = {row["line"]: row["few"] for row in chart.points.to_pylist()}
    assert marked == {"training": False, "held-out pictures": True}


def test_many_runs_stay_few_points(tmp_path):
    columns = read(tmp_path, metrics(3000))
    for chart in curves({f"run {i}": columns for i in range(12)}).values():
        assert 500 < chart.points.num_rows <= 2000


def test_words_hold_the_figures(tmp_path):
    one, other = read(tmp_path / "one", metrics(100)), read(tmp_path / "other", metrics(25))
    charts = curves({"one": one})
    assert charts["loss"].words == "training from 2.3 to 0.23, held-out pictures from 0.791 to 0.25"
    assert charts["accuracy"].words == "from 72\u00a0% to 91\u00a0%"
    assert charts["lr"].words == "from 0.001 to 0.001"
    charts = curves({"one": one, "other": other})
    assert charts["loss"].words == (
        "one: training 0.23, held-out pictures 0.25; other: training 0.46, held-out pictures 0.559"
    )
    assert charts["accuracy"].words == "one: 91\u00a0%; other: 80\u00a0%"


def test_without_points_it_says_why(tmp_path):
    nothing = curves({"one": Columns()})
    assert all(chart.is_empty for chart in nothing.values())
    assert [chart.words.partition(":")[0] for chart in nothing.values()] == [
        "No line yet",
        "The first evaluation has not come yet.",
        "No line yet",
    ]
    early = curves({"one": read(tmp_path, metrics(3))})
    assert {name: chart.is_empty for name, chart in early.items()} == {
        "loss": False,
        "accuracy": True,
        "lr": False,
    }
    assert early["loss"].words == "training from 2.3 to 1.33"
    without_time = read(tmp_path, [{"step": 1, "loss": 2.0}])
    assert curves({"one": without_time}, "seconds")["loss"].is_empty


def test_nothing_but_points_changes_while_a_run_goes_on(tmp_path):
    """Else the browser would make the charts anew."""
    for x in ("step", "seconds", "epoch"):
        specs = [
            [chart.spec for chart in curves({"a": read(tmp_path, metrics(n)), "b": Columns()}, x).values()]
            for n in (1, 9, 40, 3000)
        ]
        assert all(each == specs[0] for each in specs)


def test_legends_stand_where_lines_could_be_confused():
    def legends(*runs: str) -> dict:
        found = {}
        for name, chart in curves(dict.fromkeys(runs, Columns())).items():
            color = chart.spec["encoding"]["color"]
            dash = chart.spec["layer"][0]["encoding"]["strokeDash"]
            found[name] = (color.get("legend") is not None, dash["legend"] is not None)
        return found

    assert legends("one") == {"loss": (False, True), "accuracy": (False, False), "lr": (False, False)}
    assert legends("one", "two") == {"loss": (True, False), "accuracy": (True, False), "lr": (False, False)}
    scale = curves(dict.fromkeys("abcdefgh", Columns()))["loss"].spec["encoding"]["color"]["scale"]
    assert scale["domain"] == list("abcdefgh")
    assert scale["range"] == [*COLORS, *COLORS[:2]]


# --- colours


def linear(colors) -> np.ndarray:
    """(n, 3) of 0 to 1, in proportion to light."""
    shown = np.array([[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in colors])
    return np.where(shown <= 0.04045, shown / 12.92, ((shown + 0.055) / 1.055) ** 2.4)


def luminance(colors) -> np.ndarray:
    return linear(colors) @ [0.2126, 0.7152, 0.0722]


def test_colours_can_be_seen_on_both_themes():
    import tomllib

    theme = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text(encoding="utf-8"))["theme"]
    for kind in ("light", "dark"):
        back = luminance([theme[kind]["backgroundColor"]])
        lighter, darker = np.maximum(luminance(COLORS), back), np.minimum(luminance(COLORS), back)
        assert ((lighter + 0.05) / (darker + 0.05) >= 3).all()


# What people without red, green or blue cones see of linear RGB: Machado, Oliveira and Fernandes (2009).
VISION = {
    "all cones": np.eye(3),
    "no red": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no green": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "no blue": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}


@pytest.mark.parametrize("vision", VISION)
def test_colours_can_be_told_apart(vision):
    seen = np.clip(linear(COLORS) @ np.array(VISION[vision]).T, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    f = np.cbrt(seen @ to_xyz.T / [0.9505, 1, 1.089])
    lab = np.stack((116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])), axis=1)
    apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1)
    assert apart[~np.eye(len(COLORS), dtype=bool)].min() > 20  # 2.3 is what an eye just tells apart


# --- what an update costs

UPDATE = """
import json, logging, re, sys, time
from pathlib import Path

logging.disable()
from streamlit.runtime.scriptrunner_utils import script_run_context
import streamlit, pandas, pyarrow
from train.page.curves import draw_curves
from train.watch import Watch

file, steps = Path(sys.argv[1]) / "metrics.jsonl", int(sys.argv[2])


def write(start, end):
    with file.open("a") as out:
        for step in range(start, end):
            row = {"step": step, "epoch": step / 350, "seconds": step * 0.17, "loss": 2.3 / step**0.5,
                   "lr": 1e-3 / step, "images_per_second": 812.25}
            if step % 100 == 0:
                row |= {"val_accuracy": 0.9, "val_loss": 0.123456}
            out.write(json.dumps(row) + "\\n")


def taken(work):
    began = time.perf_counter()
    found = work()
    return found, 1000 * (time.perf_counter() - began)


write(1, steps + 1)
behind = Watch(file.parent).read(seconds=0).behind  # out of time at once: a part, on any machine
watch, reads = Watch(file.parent), []
while not reads or columns.behind:
    columns, spent = taken(watch.read)
    reads.append(spent)
updates = []
for i in range(7):
    write(steps + 10 * i + 1, steps + 10 * i + 11)
    _, spent = taken(lambda: draw_curves({"run": watch.read()}, key="curves"))
    updates.append(spent)
assert len(columns["loss"].steps) == steps
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000
print(json.dumps({"behind": behind, "reads": reads, "updates": updates, "peak_mb": peak}))
"""


def cost(folder: Path, steps: int) -> dict:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", UPDATE, str(folder), str(steps)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("steps", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_an_update_of_a_long_run_is_cheap(tmp_path, steps):
    """New lines read, all charts built and packed for the browser: 150 ms; 50 MB more than a short run."""
    if not Path("/proc/self/status").exists():  # getrusage would tell of the parent's peak, if that is higher
        pytest.skip("the peak of a process's memory is read as Linux tells it")
    short, long = cost(tmp_path / "short", 1000), cost(tmp_path / "long", steps)
    more_mb = long["peak_mb"] - short["peak_mb"]
    print(
        f"\n{steps:,} steps: caught up in {len(long['reads'])} reads, "
        f"the longest {max(long['reads']):.0f} ms; "
        f"an update {min(long['updates']):.0f} to {max(long['updates']):.0f} ms (1,000 steps: "
        f"{min(short['updates']):.0f} ms); {more_mb:.0f} MB more"
    )
    assert min(long["updates"]) <= 150
    assert sorted(long["reads"])[len(long["reads"]) // 2] <= 150  # the machine may be busy now and then
    assert long["behind"]
    assert len(long["reads"]) <= 60
    assert more_mb <= 50


# --- on the page


def test_a_strangers_name_is_shown_as_it_is():
    from streamlit.testing.v1 import AppTest

    def script():
        import numpy as np

        from train.page.curves import draw_curves
        from train.watch import Columns, Series

        columns = Columns({"loss": Series(np.array([1.0]), np.array([2.5]))})
        draw_curves({"[a](b) *c*": columns, "$d$": Columns()}, key="curves")

    app = AppTest.from_function(script, default_timeout=30).run()
    assert not app.exception
    loss, accuracy, rate = (each.value for each in app.caption)
    assert loss == r"\[a\]\(b\) \*c\*\: training 2\.5"
    assert (accuracy, rate.partition(":")[0]) == ("The first evaluation has not come yet.", "No line yet")


# --- in the browser

PAGE = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
import streamlit as st
from train.page.curves import draw_curves
from train.watch import Watch

st.set_page_config(layout="wide")


@st.cache_resource
def watch():
    return Watch(Path({run!r}))


@st.fragment(run_every=1)
def watching():
    draw_curves({{"a *run*": watch().read()}}, key="curves")


watching()
"""

MARKS = """all => all.map((svg) => [...svg.querySelectorAll(".role-axis-label text")]
  .map((text) => text.textContent))"""


@pytest.fixture
def page(browser, tmp_path):
    """A page that watches `page.run_`, with the browser's complaints in `page.complaints`."""
    run = Run(tmp_path / "run")
    run.root.mkdir()
    (tmp_path / "page.py").write_text(PAGE.format(root=str(ROOT), run=str(run.root)), encoding="utf-8")
    with serving(tmp_path, tmp_path / "page.py") as server, browser.new_context() as context:
        page = context.new_page()
        page.run_, page.complaints = run, []
        page.on("console", lambda said: said.type == "log" or page.complaints.append(said.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.set_viewport_size({"width": 1200, "height": 500})
        page.goto(server.url)
        yield page


def test_zoom_and_charts_outlive_updates(page):
    waiting = page.get_by_text("No line yet: the first steps are to come.")
    waiting.first.wait_for(timeout=30_000)
    assert waiting.count() == 2
    page.get_by_text("The first evaluation has not come yet.").wait_for()

    for row in metrics(40):
        append_metrics(page.run_, row)
    charts = page.locator(".stVegaLiteChart svg.marks")
    page.get_by_text("training from 2.3 to 0.364,").wait_for()
    page.wait_for_function("document.querySelectorAll('.stVegaLiteChart svg.marks').length === 3")
    page.evaluate("window.before = [...document.querySelectorAll('.stVegaLiteChart svg.marks')]")
    same = (
        "window.before.every((svg, i) => svg === document.querySelectorAll('.stVegaLiteChart svg.marks')[i])"
    )
    label = charts.first.get_attribute("aria-label") or charts.first.locator("..").get_attribute("aria-label")
    assert "Loss over step, of a *run*" in label

    def marks(chart: int) -> list[str]:
        return sorted(charts.evaluate_all(MARKS)[chart])

    def update(steps: int, since: int) -> None:
        for row in metrics(steps, first=since):
            append_metrics(page.run_, row)
        page.get_by_text(f"training from 2.3 to {2.3 / math.sqrt(steps):.3g},").wait_for(timeout=10_000)
        page.wait_for_timeout(300)

    whole = marks(0)
    assert {"10", "20", "30", "40"} <= set(whole)
    box = charts.first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.keyboard.down("Control")
    for _ in range(3):
        page.mouse.wheel(0, -250)
    page.keyboard.up("Control")
    page.wait_for_timeout(500)
    zoomed = marks(0)
    assert set(zoomed) != set(whole)
    steps = [float(mark) for mark in zoomed if mark.isdigit() and float(mark) > 3]
    assert 5 < min(steps) <= max(steps) < 40

    update(60, since=41)
    assert set(marks(0)) == set(zoomed)
    assert "60" in marks(1)  # the others go on with the run

    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 80, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    page.wait_for_timeout(500)
    moved = marks(0)
    assert set(moved) != set(zoomed)
    update(80, since=61)
    assert set(marks(0)) == set(moved)

    page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    update(100, since=81)
    assert "80" in marks(0)
    assert page.evaluate(same)
    assert not page.complaints
