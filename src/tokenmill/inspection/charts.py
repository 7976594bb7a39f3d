"""Charts as SVG text: a histogram of lengths, bars of names, and lines. For the report and other pages.

    value 12.5K |    ##
                |  ######        every chart has axes, units, and a text that says what it shows;
                | #########      colours come from the page, so that one chart fits a light and a dark one
                 --------------
                  16   256  4K tokens

A chart is drawn in units of CSS pixels and scales with its place. Texts are escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tokenmill.sizes import format_count

WIDTH, HEIGHT = 520, 270
LEFT, RIGHT, TOP, BOTTOM = 66, 26, 26, 44
_ROW = 26
_LABEL, _VALUE = 168, 92
_MAX_LABEL_CHARS = 24
_MAX_X_TICKS = 7
_THOUSAND = 1000
# Steps between ticks that are easy to read.
_STEPS = (1, 2, 2.5, 5, 10)
_WANTED_TICKS = 4


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with a name, a length, and the text behind it."""

    name: str
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """The scale of an axis: its ends, its ticks with their texts, and what it measures."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value is between the ends, from 0 to 1."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = (math.log10(max(one, 1e-12)) for one in (low, high, value))
        return min(1.0, max(0.0, (value - low) / (high - low or 1)))


def short(number: float) -> str:
    """`short(2_500_000) == "2.5M"`: the text of a tick, which is a round number."""
    if number < _THOUSAND:
        return f"{number:g}"
    text = format_count(number)
    digits, letter = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "")
    return (digits.rstrip("0").rstrip(".") if "." in digits else digits) + letter


def linear_axis(label: str, high: float, say: Callable[[float], str] = short) -> Axis:
    """An axis from 0 to a round number that is not below `high`."""
    step = 10.0 ** math.floor(math.log10(max(high, 1e-9) / _WANTED_TICKS))
    step *= next(times for times in _STEPS if step * times * _WANTED_TICKS >= high or times == _STEPS[-1])
    count = max(1, math.ceil(high / step - 1e-9))
    return Axis(label, 0, step * count, [(step * number, say(step * number)) for number in range(count + 1)])


def log_axis(label: str, low: float, high: float, say: Callable[[float], str] = short) -> Axis:
    """A logarithmic axis over powers of ten that hold both ends."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(max(high, low * 1.0001)))
    return Axis(label, 10.0**first, 10.0**last, [(10.0**one, say(10.0**one)) for one in range(first, last + 1)], True)


def histogram(edges: Sequence[int], counts: Sequence[int], *, x_label: str, y_label: str, about: str) -> str:
    """Bars of equal width for bins, of which only the first and the last have to have something in them."""
    y = linear_axis(y_label, max(counts))
    width = (WIDTH - LEFT - RIGHT) / len(counts)
    marked = _marked(edges)
    parts = [*_y_axis(y), *_x_label(x_label)]
    for number, count in enumerate(counts):
        left = LEFT + number * width
        if count:
            top = _y(y, count)
            upto = f"to {edges[number + 1] - 1:,} " if edges[number + 1] - 1 > edges[number] else ""
            said = escape(f"{edges[number]:,} {upto}{x_label}: {count:,} {y_label}")
            shape = f'x="{left + 0.5:.1f}" y="{top:.1f}" width="{max(width - 1, 0.5):.1f}"'
            parts.append(f'<rect class="bar" {shape} height="{HEIGHT - BOTTOM - top:.1f}"><title>{said}</title></rect>')
        if edges[number] in marked:
            parts += _x_tick(left, f"{edges[number]:,}")
    return _svg(parts, HEIGHT, about)


def _marked(edges: Sequence[int]) -> set[int]:
    """Powers of two among edges, every second or fourth one if there are many."""
    powers = [edge for edge in edges[:-1] if edge > 0 and edge & (edge - 1) == 0]
    every = 1
    while len(powers[::every]) > _MAX_X_TICKS:
        every += 1
    return set(powers[::every] or edges[:1])


def bars(rows: Sequence[Bar], *, about: str) -> str:
    """Horizontal bars, each with its name on the left and its text on the right."""
    most = max((row.value for row in rows), default=0) or 1
    room = WIDTH - _LABEL - _VALUE
    parts = []
    for number, row in enumerate(rows):
        middle, width = number * _ROW + _ROW / 2 + 4, room * row.value / most
        said, text = escape(f"{row.name}: {row.text}"), f'y="{middle + 4:.1f}"'
        shape = f'x="{_LABEL}" y="{middle - 7:.1f}" width="{max(1.0, width):.1f}" height="14"'
        parts += [
            f'<text class="name" x="{_LABEL - 10}" {text} text-anchor="end">{escape(_shortened(row.name))}</text>',
            f'<rect class="bar" {shape}><title>{said}</title></rect>',
            f'<text x="{_LABEL + width + 8:.1f}" {text}>{escape(row.text)}</text>',
        ]
    return _svg(parts, len(rows) * _ROW + 8, about)


def line(
    points: Sequence[tuple[float, float]],
    x: Axis,
    y: Axis,
    *,
    about: str,
    marks: Iterable[float] = (),
    fill: bool = False,
) -> str:
    """A line through points, over its area if `fill`; vertical lines at the `marks`."""
    base = HEIGHT - BOTTOM
    path = " ".join(f"{_x(x, one):.1f},{_y(y, two):.1f}" for one, two in points)
    parts = [*_y_axis(y), *_x_label(x.label)]
    for value, text in x.ticks:
        parts += _x_tick(_x(x, value), text)
    parts += [
        f'<line class="mark" x1="{_x(x, one):.1f}" x2="{_x(x, one):.1f}" y1="{TOP}" y2="{base}"/>' for one in marks
    ]
    if fill and points:
        first, last = _x(x, points[0][0]), _x(x, points[-1][0])
        parts.append(f'<polygon class="area" points="{first:.1f},{base} {path} {last:.1f},{base}"/>')
    parts.append(f'<polyline class="line" points="{path}"/>')
    return _svg(parts, HEIGHT, about)


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - BOTTOM - TOP)


def _y_axis(axis: Axis) -> Iterator[str]:
    for value, text in axis.ticks:
        at = _y(axis, value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    yield f'<text class="unit" x="0" y="12">{escape(axis.label)}</text>'


def _x_label(label: str) -> Iterator[str]:
    at = HEIGHT - BOTTOM
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
    yield f'<text class="unit" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(label)}</text>'


def _x_tick(at: float, text: str) -> Iterator[str]:
    base = HEIGHT - BOTTOM
    yield f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base}" y2="{base + 4}"/>'
    yield f'<text x="{at:.1f}" y="{base + 17}" text-anchor="middle">{escape(text)}</text>'


def _svg(parts: Iterable[str], height: float, about: str) -> str:
    said = escape(about)
    return f'<svg role="img" viewBox="0 0 {WIDTH} {height:g}" aria-label="{said}">{"".join(parts)}</svg>'


def _shortened(name: str) -> str:
    """A name that fits beside its bar: its end tells more than its middle."""
    if len(name) <= _MAX_LABEL_CHARS:
        return name
    return f"{name[:7]}…{name[-(_MAX_LABEL_CHARS - 8) :]}"
