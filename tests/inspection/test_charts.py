"""Charts are well-formed SVG, their marks are where the values say, and their texts are escaped."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tokenmill.inspection import charts
from tokenmill.inspection.charts import Bar, bars, histogram, line, linear_axis, log_axis, short


def rects(svg: str) -> list[dict[str, str]]:
    return [dict(one.attrib) for one in ElementTree.fromstring(svg).iter("rect")]


def test_the_bars_of_a_histogram_are_as_high_as_their_counts() -> None:
    svg = histogram([1, 2, 4, 8], [2, 0, 4], x_label="tokens", y_label="documents", about="lengths")
    low, high = rects(svg)
    assert float(high["height"]) == pytest.approx(2 * float(low["height"]), abs=0.2)
    assert float(high["x"]) > float(low["x"])
    assert "4 to 7 tokens: 4 documents" in svg
    assert ElementTree.fromstring(svg).attrib["aria-label"] == "lengths"


def test_a_bar_is_as_long_as_its_share_and_its_name_is_escaped() -> None:
    one, other = rects(bars([Bar("<b>&", 10, "10"), Bar("x" * 99, 5, "5")], about='"quoted" <script>'))
    assert float(one["width"]) == pytest.approx(2 * float(other["width"]), abs=0.2)


@pytest.mark.parametrize("rows", [[], [Bar("none", 0, "0")]])
def test_nothing_to_show_is_still_a_chart(rows: list[Bar]) -> None:
    assert len(rects(bars(rows, about="nothing"))) == len(rows)


def test_a_line_goes_through_its_points() -> None:
    svg = line([(0, 0), (10, 5)], linear_axis("s", 10), linear_axis("t/s", 5), about="speed", marks=[5], fill=True)
    (path,) = [one.attrib["points"] for one in ElementTree.fromstring(svg).iter("polyline")]
    begin, end = (tuple(map(float, point.split(","))) for point in path.split())
    assert begin == (charts.LEFT, charts.HEIGHT - charts.BOTTOM)
    assert end[0] == charts.WIDTH - charts.RIGHT


@pytest.mark.parametrize(("high", "last"), [(0, 0), (1, 1), (7, 8), (10, 10), (2_400_000, 3_000_000), (1e12, 1e12)])
def test_an_axis_ends_at_a_round_number_that_is_large_enough(high: float, last: float) -> None:
    axis = linear_axis("x", high)
    assert axis.high >= high
    assert axis.ticks[-1][0] == axis.high
    if last:
        assert axis.high == pytest.approx(last)


def test_a_logarithmic_axis_gives_every_power_the_same_room() -> None:
    axis = log_axis("x", 2, 900)
    assert [value for value, _ in axis.ticks] == [1, 10, 100, 1000]
    assert [round(axis.share(value), 3) for value, _ in axis.ticks] == [0, 0.333, 0.667, 1]


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (500, "500"), (2_500_000, "2.5M"), (1000, "1K"), (0.25, "0.25")]
)
def test_ticks_are_short(number: float, text: str) -> None:
    assert short(number) == text
