"""The look of a training report: its page as a template, curves as inline SVG, pictures as data URIs.

    html = page(facts)                                     # the names of `facts` are those in the template
    curve("Loss", [Series("training", steps, losses)])     # Markup, to be put into the page
    png_uri(pixels)                                        # "data:image/png;base64,…"

The template escapes all text by itself (Jinja2's autoescape); only what is Markup goes in as it is. A policy
in the page's head forbids it to run or fetch anything, whatever else it may hold.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from vit.overlay import png_bytes

_LEAST_SPAN = 1e-30  # of values: smaller ones are the noise of an even line
_MOST_POINTS = 400  # of one line: a chart some 350 px wide shows no more
# Shown some 350 px wide, on a phone or three in a row: 13 units of text are then about 11 px.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 420, 240, 56, 12, 12, 40


@dataclass(frozen=True, eq=False)
class Series:
    """One line of a chart."""

    name: str
    steps: np.ndarray  # (n,)
    values: np.ndarray  # (n,)
    second: bool = False  # dashed and in the other colour


def curve(title: str, series: Sequence[Series], *, percent: bool = False) -> Markup:
    """An SVG chart of values over steps, with its figures in words for those who cannot see it.

    Percent: values are shares, and the axis goes from 0 to 100 %. ValueError if there is nothing to draw.
    """
    series = [_thinned(line) for line in series if len(line.steps)]
    if not series:
        raise ValueError(f"{title}: nothing was recorded.")
    steps = np.concatenate([line.steps for line in series])
    values = np.concatenate([line.values for line in series])
    low, high = (0.0, 1.0) if percent else (float(values.min()), float(values.max()))
    if low < 0.3 * high or high - low <= 1e-9 * abs(high):  # a zero that is near belongs on the axis
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < _LEAST_SPAN:
        low, high = 0.0, 1.0
    rows = _ticks(low, high)
    low, high = min(low, rows[0]), max(high, rows[-1])
    first, last = 0.0, max(float(steps.max()), 1.0)

    def x(step) -> np.ndarray:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value) -> np.ndarray:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for row in rows:
        label = f"{100 * row:.0f} %" if percent else f"{row:.6g}"
        parts.append(f'<path class="rule" d="M{_LEFT} {y(row):.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(row) + 4:.1f}" text-anchor="end">{label}</text>')
    for column in (tick for tick in _ticks(first, last) if tick <= last):
        anchor = "end" if x(column) > _WIDTH - 22 else "middle"
        parts.append(
            f'<text x="{x(column):.1f}" y="{_HEIGHT - 22}" text-anchor="{anchor}">{column:,.0f}</text>'
        )
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">step</text>')
    for line in series:
        kind = "line second" if line.second else "line"
        dots = list(zip(x(line.steps), y(line.values), strict=True))
        parts.append(f'<path class="{kind}" d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in dots)}"/>')
        if len(dots) <= 30:
            parts += [f'<circle class="{kind}" cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in dots]
    words = escape(f"{title} over steps. " + " ".join(_in_words(line, percent) for line in series))
    return Markup(
        f'<svg role="img" aria-label="{words}" viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(parts)}</svg>'
    )


def png_uri(pixels: np.ndarray) -> str:
    """(H, W, 3) uint8 as an address that holds the picture itself."""
    return "data:image/png;base64," + base64.b64encode(png_bytes(pixels)).decode()


def _thinned(line: Series) -> Series:
    """At most so many points: neighbours become their mean, which also calms a noisy loss."""
    parts = math.ceil(len(line.steps) / _MOST_POINTS)
    if parts == 1:
        return line
    cuts = np.arange(0, len(line.steps), parts)
    counts = np.diff(np.append(cuts, len(line.steps)))
    steps, values = (np.add.reduceat(array, cuts) / counts for array in (line.steps, line.values))
    return Series(line.name, steps, values, line.second)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers from at or below `low` to at or above `high`."""
    width = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(width))
    width = next(unit * round_one for round_one in (1, 2, 2.5, 5, 10) if unit * round_one >= width * 0.999)
    return [i * width for i in range(math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9) + 1)]


def _in_words(line: Series, percent: bool) -> str:
    first, last = (f"{100 * v:.1f} %" if percent else f"{v:.3g}" for v in line.values[[0, -1]])
    return f"{line.name}: {first} at step {line.steps[0]:,.0f}, {last} at step {line.steps[-1]:,.0f}."


def page(facts: dict) -> str:
    """The whole report. UndefinedError if `facts` lacks a name that the template uses."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.filters |= {
        "share": lambda value: f"{100 * value:.1f}\u00a0%",
        "exact": lambda value: f"{100 * value:.2f}\u00a0%",
        "count": lambda value: f"{value:,}",
        "png": png_uri,
    }
    return environment.from_string(_PAGE).render(facts, style=Markup(_STYLE))


_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --soft: #f4f2ee; --ink: #14161a; --quiet: #555b64;
  --accent: #9a5b00; --other: #1f6391; --rule: #dcd8d0; }
@media (prefers-color-scheme: dark) { :root { --paper: #121417; --soft: #1d2025; --ink: #eceae6;
  --quiet: #a7adb6; --accent: #f2a63b; --other: #7db8e8; --rule: #363a41; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p { margin: .5rem 0; max-width: 46rem; }
.facts { max-width: none; }
figcaption, .quiet, th, .small { color: var(--quiet); }
figcaption, .small, td, th, svg { font-size: .875rem; }
.number { font-size: 1.75rem; font-weight: 600; margin-right: .75rem; }
.missing { border-left: 3px solid var(--accent); background: var(--soft); padding: .6rem .9rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 2rem; }
figure { margin: 0; }
.curves figcaption { color: var(--ink); font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--quiet); font-size: 13px; }
svg .rule { stroke: var(--rule); }
svg .line { stroke: var(--accent); fill: none; stroke-width: 2; stroke-linejoin: round; }
svg circle.line { fill: var(--accent); stroke: none; }
svg .second { stroke: var(--other); stroke-dasharray: 6 3; }
svg circle.second { fill: var(--other); }
.key { display: inline-block; width: 1.4rem; border-top: 2px solid var(--accent); margin: 0 .4rem .25rem 0; }
.key.second { border-top: 2px dashed var(--other); margin-left: 1rem; }
.wide { overflow-x: auto; }
.wide:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; }
th { font-weight: 500; text-align: left; }
td, th { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
.numbers td, .numbers thead th + th { text-align: right; }
.confusion td { text-align: center; padding: .25rem .3rem; border: 1px solid var(--paper);
  min-width: 2.6rem; }
.confusion th { white-space: nowrap; border: 0; padding: .25rem .5rem .25rem 0; vertical-align: middle; }
.confusion th:first-child { position: sticky; left: 0; background: var(--paper); vertical-align: bottom; }
@media (max-width: 30rem) { .confusion td { padding: .25rem .1rem; min-width: 1.55rem; } }
.confusion thead th + th { writing-mode: vertical-rl; transform: rotate(180deg); padding: .25rem 0;
  margin: auto; }
.confusion .right { font-weight: 600;
  background: color-mix(in srgb, var(--accent) var(--share), var(--soft)); }
.confusion .wrong { background: color-mix(in srgb, var(--other) var(--share), var(--soft)); }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); gap: 1rem;
  padding: 0; margin: .75rem 0; list-style: none; }
img { width: 6rem; height: auto; image-rendering: pixelated; display: block; border-radius: 4px;
  margin-bottom: .25rem; }
.probes { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1.5rem;
  padding: 0; margin: 1rem 0; list-style: none; }
.probes li { display: grid; grid-template-columns: repeat(3, 1fr); gap: .5rem; }
.probes img { width: 100%; }
pre { background: var(--soft); padding: .75rem 1rem; border-radius: 6px; font-size: .875rem;
  white-space: pre-wrap; }
code { font-family: ui-monospace, monospace; }
.settings { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr));
  gap: 0 2rem; margin: .5rem 0; font-size: .875rem; }
.settings div { display: grid; grid-template-columns: 11rem 1fr; gap: .5rem; padding: .25rem 0;
  border-bottom: 1px solid var(--rule); }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
dt { color: var(--quiet); }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Training report: {{ name }}</title>
<style>{{ style }}</style>
</head>
<body>
{% macro missing(why) %}<p class="missing">{{ why }}</p>{% endmacro %}
{% macro shown(each) %}
<li><figure><img src="{{ each.pixels | png }}" alt="{{ each.truth }}, picture {{ each.number | count }}">
<figcaption>{{ each.truth }}
{%- if each.answer != each.truth %}, taken for <b>{{ each.answer }}</b>{% endif %},
{{ each.probability | share }}</figcaption></figure></li>
{% endmacro %}
<main>
<h1>Training report: {{ name }}</h1>
<p class="quiet facts">{{ facts_line }}</p>
{% for notice in notices %}{{ missing(notice) }}{% endfor %}

<h2>How good it is</h2>
{% if result.why_not is defined %}{{ missing(result.why_not) }}{% else %}
{% set low, high = result.metrics.interval %}
<p><span class="number">{{ result.metrics.accuracy | exact }}</span>
of {{ result.metrics.pictures | count }}
pictures {{ result.where }} are named rightly.</p>
<p>95 % interval {{ low | exact }} to {{ high | exact }} (Wilson). It speaks of the pictures drawn, not of the
training: this is one run with one seed, and another seed may end elsewhere.
Guessing would be right for {{ (1 / result.class_names | length) | share }}.</p>
<p>{{ result.which }} {{ result.honesty }}</p>
<p>Its probabilities are off by {{ result.metrics.calibration_error | share }} on average (expected
calibration error, 15 bins): how far its confidence is from how often it is right.</p>
{% endif %}

<h2>How it learned</h2>
{% if curves.why_not is defined %}{{ missing(curves.why_not) }}{% else %}
<div class="curves">
{% for each in curves.figures %}
<figure><figcaption>{{ each.title }}</figcaption>
{% if each.why_not is defined %}{{ missing(each.why_not) }}{% else %}{{ each.svg }}
{% if each.names | length > 1 %}<p class="small">{% for line in each.names %}<span class="key{{ " second" if
loop.index > 1 }}"></span>{{ line }}{% endfor %}</p>{% endif %}{% endif %}</figure>
{% endfor %}
</div>
{% if curves.note %}<p class="small">{{ curves.note }}</p>{% endif %}
{% endif %}

{% if result.why_not is not defined %}
<h2>Class by class</h2>
<p class="small" id="about-classes">Precision: of the pictures called so, the share that are. Recall: of those
that are, the share called so. F1: their harmonic mean.</p>
<div class="wide" tabindex="0" role="region" aria-label="Figures of each class">
<table class="numbers" aria-describedby="about-classes">
<thead><tr><th scope="col">class</th><th scope="col">pictures</th><th scope="col">precision</th>
<th scope="col">recall</th><th scope="col">F1</th></tr></thead>
<tbody>{% for row in result.metrics.classes %}
<tr><th scope="row">{{ row.name }}</th><td>{{ row.pictures | count }}</td><td>{{ row.precision | share }}</td>
<td>{{ row.recall | share }}</td><td>{{ row.f1 | share }}</td></tr>{% endfor %}
</tbody></table></div>

<h2>Who is taken for whom</h2>
{% if result.shading is none %}{{ missing("With " ~ result.class_names | length ~
" classes the table would be too large to read; it is left out.") }}{% else %}
<p class="small" id="about-confusion">A row for each true class, a column for each answer. Right answers are
shaded by their share of the row, mistakes by their number beside the most frequent one.</p>
<div class="wide" tabindex="0" role="region" aria-label="Who is taken for whom">
<table class="confusion" aria-describedby="about-confusion">
<thead><tr><th scope="col">true class</th>
{% for class in result.class_names %}<th scope="col">{{ class }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in result.metrics.confusion %}{% set i = loop.index0 %}
<tr><th scope="row">{{ result.class_names[i] }}</th>{% for cell in row %}{% set j = loop.index0 %}
<td class="{{ "right" if i == j else "wrong" }}" style="--share: {{ result.shading[i][j] }}%">
{{- cell | count }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>{% endif %}

<h2>Pictures</h2>
<h3>Most confident mistakes</h3>
{% if result.wrong %}<ul class="pictures">{% for each in result.wrong %}{{ shown(each) }}{% endfor %}</ul>
{% else %}<p>It made none.</p>{% endif %}
<h3>Right answers</h3>
<p class="small">The first right one of each class, as the pictures come: not chosen for their looks.</p>
{% if result.right %}<ul class="pictures">{% for each in result.right %}{{ shown(each) }}{% endfor %}</ul>
{% else %}<p>It gave none.</p>{% endif %}
{% endif %}

<h2>Attention before and after</h2>
{% if attention.why_not is defined %}{{ missing(attention.why_not) }}{% else %}
<p>Where CLS, the token that answers, reads from: attention of the last layer, mean of all heads, drawn as
light on the picture, each on its own scale. Attention is not a full explanation: it shows where the model
looks, not why it decides.</p>
<ul class="probes">{% for row in attention.rows %}
<li><figure><img src="{{ row.pixels | png }}" alt="{{ row.truth }}, as the model sees it">
<figcaption><b>{{ row.truth }}</b></figcaption></figure>
{% for frame in row.frames %}<figure><img src="{{ frame.pixels | png }}" alt="{{ frame.alt }}">
<figcaption>step {{ frame.step | count }}:<br>{{ frame.answer }}, {{ frame.probability | share }}</figcaption>
</figure>{% endfor %}</li>{% endfor %}
</ul>
{% endif %}

<h2>Settings</h2>
{% if settings.why_not is defined %}{{ missing(settings.why_not) }}{% else %}
{% for title, rows in settings.tables if rows %}
<h3>{{ title }}</h3>
<dl class="settings">{% for key, value in rows %}
<div><dt>{{ key }}</dt><dd>{{ value }}</dd></div>{% endfor %}</dl>
{% endfor %}
{% endif %}

<h2>How to reproduce it</h2>
{% if command %}<pre><code>{{ command }}</code></pre>{% else %}{{ missing(
"The run does not say by which command it was started.") }}{% endif %}
<p>This page is written anew by:</p>
<pre><code>{{ report_command }}</code></pre>
<p class="small">Attention, curves and weights are in the run's folder. On another machine or another number
of threads the last digits differ.</p>
</main>
</body>
</html>
"""
