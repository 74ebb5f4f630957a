"""Which methods can be trusted, as one table: numbers with intervals, verdicts, the best first.

    scores = Scores.load(Path("assets/scores/cifar10.json"))
    scores.default                                    # the best method that is no baseline
    scores.methods[0].difference["removed"]           # Estimate(mean, half): mean - half to mean + half
    print("\\n".join(table_lines(scores)))             # a Markdown table

All estimates are over pictures, with 95 % intervals of the normal distribution, each method paired picture by
picture with random orders, or with another method. A method is called better only where at least three
removals agree, because each single fill favours some methods (vit/removal.py).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vit.files import write_whole
from vit.methods import METHODS

INTERVAL_Z = 1.959964  # 95 % of a normal distribution lie within
AGREEING = 3  # removals that must agree
_CHOSEN = Path(__file__).parents[1] / "assets" / "scores"  # of training pictures: test pictures only report
CEILING = "leave_one_out"  # measured with the removal itself: shows how far one can get, and is not ranked
_HIDDEN_BY = {
    "removed": "tokens dropped",
    "mean": "mean colour",
    "blur": "blurred",
    "neighbours": "neighbours' colours",
}


@dataclass(frozen=True)
class Estimate:
    """A mean over pictures; the 95 % interval is `mean` plus and minus `half`."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Estimate":
        """ValueError for fewer than two values, which have no interval."""
        if len(values) < 2:
            raise ValueError("an interval needs at least two pictures")
        values = np.asarray(values, np.float64)
        return cls(float(values.mean()), float(INTERVAL_Z * values.std(ddof=1) / math.sqrt(len(values))))

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies above or below 0, else 0."""
        return 0 if abs(self.mean) <= self.half else int(math.copysign(1, self.mean))


@dataclass(frozen=True)
class MethodScore:
    """One row."""

    method: str
    difference: dict[str, Estimate]  # by removal: insertion less deletion, less the same of random orders
    against_random: str  # "better", "worse" or "no clear difference"; "ceiling" for what is not ranked
    better_than: tuple[str, ...]  # the ranked methods that it clearly beats
    saco: Estimate
    shuffled: float  # rank correlation of its maps with those of a model that has learned nothing
    on_object: Estimate | None  # of made patterns alone, as in vit/truth.py
    points_at_object: Estimate | None
    blob_order: Estimate | None
    explained_ms: float  # a picture


@dataclass(frozen=True)
class Scores:
    """A whole table."""

    model: str
    checkpoint_id: str
    data: str
    pictures: int
    shuffled_pictures: int  # how many of them were explained for the shuffled model too
    steps: int
    orders: int
    removals: tuple[str, ...]
    methods: tuple[MethodScore, ...]  # best first by the mean over removals; then what is not ranked
    runs: int  # of the model for methods and random orders
    runs_ratio: float  # their rate, as a multiple of plain batched classification in between
    seconds: dict[str, float]  # "explanations", "methods", "random orders"

    @property
    def default(self) -> str | None:
        """The first method that is no baseline and better than random, if there is one."""
        found = (
            row.method
            for row in self.methods
            if row.against_random == "better" and not METHODS[row.method].is_baseline
        )
        return next(found, None)

    def save(self, path: Path) -> None:
        text = json.dumps(asdict(self), indent=1)
        write_whole(path, lambda file: file.write(text.encode()))

    @classmethod
    def load(cls, path: Path) -> "Scores":
        """ValueError for a file of another form."""
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            methods = tuple(_method_score(row) for row in facts.pop("methods"))
            return cls(**facts | {"methods": methods, "removals": tuple(facts["removals"])})
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} does not hold scores; make it anew with `python -m vit score`"
            ) from error


def chosen_scores(checkpoint_id: str) -> Scores:
    """The table over training pictures that the page chooses by: this checkpoint's, or a bundled one's."""
    found = [Scores.load(path) for path in sorted(_CHOSEN.glob("*-train.json"), reverse=True)]
    return next((scores for scores in found if scores.checkpoint_id == checkpoint_id), found[0])


def verdict(estimates: Mapping[str, Estimate]) -> str:
    """`better` or `worse` where at least three removals' intervals say so, else `no clear difference`."""
    signs = [estimate.sign for estimate in estimates.values()]
    if signs.count(1) >= AGREEING:
        return "better"
    return "worse" if signs.count(-1) >= AGREEING else "no clear difference"


def compared(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
    """By removal that both have: one's numbers (n,) less the other's, picture by picture."""
    return {removal: Estimate.of(one[removal] - other[removal]) for removal in one if removal in other}


def table_lines(scores: Scores) -> list[str]:
    """For people: a Markdown table, then what its numbers are and how they came about."""
    has_truth = any(row.on_object for row in scores.methods)
    ranked = [row.method for row in scores.methods if row.against_random != "ceiling"]
    heads = ["method", *(_HIDDEN_BY[removal] for removal in scores.removals)]
    heads += ["against random", "clearly better than", "SaCo", "after shuffling"]
    heads += ["on the object", "points at it", "order of blobs"] if has_truth else []
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for row in scores.methods:
        cells = [METHODS[row.method].title]
        cells += [_signed(row.difference.get(removal)) for removal in scores.removals]
        is_ceiling = row.against_random == "ceiling"
        cells += [
            row.against_random,
            "not ranked" if is_ceiling else f"{len(row.better_than)} of {len(ranked) - 1}",
        ]
        cells += [_signed(row.saco), f"{row.shuffled:+.2f}"]
        if has_truth:
            cells += [_plain(row.on_object), _plain(row.points_at_object), _signed(row.blob_order)]
        lines.append("| " + " | ".join(cells) + " |")
    total = sum(scores.seconds.values()) or 1
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in scores.seconds.items())
    return [
        *lines,
        "",
        f"{scores.pictures:,} pictures of {scores.data}, classes in turn; {scores.steps} steps, "
        f"{scores.orders} random orders. Model: {scores.model}, id {scores.checkpoint_id}.",
        "Area under insertion less area under deletion, less the same of random orders, ± 95 %. Better only "
        f"where {AGREEING} removals agree. After shuffling: rank correlation with the maps of a model whose "
        f"weights were permuted, {scores.shuffled_pictures:,} pictures; near 1 explains nothing.",
        f"Time: {shares}. {scores.runs:,} runs of the model, at {scores.runs_ratio:.2f} times the rate of "
        "plain batched classification in between.",
    ]  # fmt: skip


def _signed(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"{estimate.mean:+.3f} ± {estimate.half:.3f}"


def _plain(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"{estimate.mean:.2f} ± {estimate.half:.2f}"


def _method_score(facts: dict) -> MethodScore:
    facts["difference"] = {removal: Estimate(**value) for removal, value in facts["difference"].items()}
    for name in ("saco", "on_object", "points_at_object", "blob_order"):
        facts[name] = None if facts[name] is None else Estimate(**facts[name])
    return MethodScore(**facts | {"better_than": tuple(facts["better_than"])})
