"""The page answers within twice the limits that `python tests/viewer_bench.py` prints.

Twice, since other work may run beside CI. Run: pytest tests/test_viewer_figures.py (about 20 s).
"""

import pytest
from serving import serving
from viewer_bench import EMPTY_PAGE, LIMITS, Counts, line, measure, write_large


@pytest.mark.parametrize(
    "counts",
    [Counts(moves=20, runs=2, visits=2, rounds=1), pytest.param(Counts(), marks=pytest.mark.slow)],
    ids=["few", "as the command"],
)
def test_the_page_answers_in_time(browser, tmp_path, counts):
    for name in ("app", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty" / "page.py").write_text(EMPTY_PAGE)
    write_large(tmp_path / "app" / "runs")
    with (
        serving(tmp_path / "app") as app,
        serving(tmp_path / "empty", tmp_path / "empty" / "page.py") as empty,
    ):
        found = measure(browser, app.url, empty.url, counts)
    assert found.keys() == LIMITS.keys()
    missed = [line(what, value) for what, value in found.items() if value > 2 * LIMITS[what][0]]
    assert not missed
