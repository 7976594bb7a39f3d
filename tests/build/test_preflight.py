"""From some places to the whole, with an error bar."""

from __future__ import annotations

import random
from dataclasses import replace

from tokenmill.build.preflight import SampledPosition, Survey, deviation, estimate
from tokenmill.units.probe import DocumentCount

NOTHING = Survey(seen=(), counts=(), planned_bytes=1000, token_bytes=2, encoded_bytes=0, seconds=0.0)


def survey(*tokens: float, weights: tuple[float, ...] = (), counts: tuple[DocumentCount, ...] = ()) -> Survey:
    seen = tuple(
        SampledPosition(at=at, tokens=value, documents=0.01, text_bytes=0.5, weight=weights[at] if weights else 1.0)
        for at, value in enumerate(tokens)
    )
    return replace(NOTHING, seen=seen, counts=counts, encoded_bytes=100, seconds=1.0)


def test_the_whole_is_the_mean_of_the_places() -> None:
    found = estimate(survey(0.2, 0.3, 0.4))
    assert (found.tokens, found.documents, found.encode_seconds) == (300, 10, 5.0)
    assert 0 < found.error < 300


def test_a_place_that_stands_for_more_weighs_more() -> None:
    assert estimate(survey(0.2, 0.4, weights=(3.0, 1.0))).tokens == 250


def test_places_that_agree_leave_no_doubt_and_a_single_one_leaves_every_doubt() -> None:
    assert estimate(survey(0.3, 0.3, 0.3)).error == 0
    alone = estimate(survey(0.3))
    assert alone.error == alone.tokens == 300


def test_documents_are_exact_if_all_were_counted_and_no_slice_counts_twice() -> None:
    half = DocumentCount(source=0, start=0, planned_bytes=500, documents=7)
    other = replace(half, source=1, documents=8)
    assert estimate(survey(0.3, 0.3, counts=(half, other, half))).documents == 15
    assert estimate(survey(0.3, 0.3, counts=(half,))).documents == 10


def test_no_text_is_nothing() -> None:
    assert estimate(NOTHING).tokens == 0


def test_the_interval_holds_the_mean_95_times_in_100() -> None:
    draw = random.Random(1)
    for count in (8, 64):
        inside = 0
        for _ in range(1000):
            values = [draw.gauss(0, 1) for _ in range(count)]
            inside += abs(sum(values) / count) <= deviation(values)
        assert 930 <= inside <= 970


def test_order_makes_a_mean_more_certain() -> None:
    rising = [float(value) for value in range(50)]
    assert deviation(rising) < deviation(random.Random(1).sample(rising, 50)) / 5
