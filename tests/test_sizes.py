from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import RecipeError
from tokenmill.sizes import few, format_bytes, format_count, format_seconds, format_time, parse_fraction, parse_size


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("64MB", 64_000_000),
        ("64mb", 64_000_000),
        ("64 MB", 64_000_000),
        (" 64M ", 64_000_000),
        ("1GiB", 1 << 30),
        ("1gi", 1 << 30),
        ("2.5K", 2500),
        ("1.5KiB", 1536),
        ("150G", 150_000_000_000),
        ("3T", 3_000_000_000_000),
        ("1P", 10**15),
        ("1_000_000", 1_000_000),
        ("1,000,000", 1_000_000),
        ("1,500G", 1_500_000_000_000),
        ("1e6", 1_000_000),
        ("1E6", 1_000_000),
        ("1e+6", 1_000_000),
        ("2.5e9", 2_500_000_000),
        ("1.1GiB", 1_181_116_006),
        ("100B", 100),
        (7, 7),
        (1e6, 1_000_000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | float, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "1X",
        "1.2.3",
        "1.2.3M",
        "-1",
        "-1K",
        "+1",
        "0",
        "0K",
        "0.0001",
        "1e-3",
        "1e40",
        "1e",
        "1,5",
        "1,5M",
        "1,0000",
        "1,000_000",
        "1000000.5",
        "1.0005K",
        "0.0001KiB",
        "1\N{KELVIN SIGN}",
        "9000000P",
        "5e18",
        1 << 62,
        1 << 63,
        1.5,
        float("inf"),
        float("nan"),
        True,
        None,
        [7],
        "1iB",
        "K",
        "1 0",
        "inf",
        "nan",
        0,
        -5,
    ],
)
def test_what_is_no_positive_size_is_an_error_with_a_hint(text: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_size(text)
    assert repr(text) in caught.value.message
    assert "64MB" in caught.value.hint


@pytest.mark.parametrize("text", ["many", "1000000.5", "0"])
def test_a_number_of_tokens_gets_a_hint_about_tokens(text: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_size(text, of="tokens")
    assert "150G" in caught.value.hint
    assert "MB" not in caught.value.hint


@pytest.mark.parametrize("text", ["150B", "64MB", "1 gib"])
def test_a_b_after_a_number_of_tokens_is_neither_bytes_nor_billions(text: str) -> None:
    with pytest.raises(RecipeError, match="not a number of tokens") as caught:
        parse_size(text, of="tokens")
    assert "1G" in caught.value.hint


@given(st.integers(1, 1 << 53))
@settings(database=None, deadline=None)
def test_a_whole_number_of_any_size_is_read_exactly(number: int) -> None:
    assert parse_size(str(number)) == number


@given(st.integers(1, 8000), st.sampled_from("KMGT"))
@settings(database=None, deadline=None)
def test_a_whole_number_with_a_letter_is_read_exactly(number: int, letter: str) -> None:
    power = "KMGT".index(letter) + 1
    assert parse_size(f"{number}{letter}") == number * 1000**power
    assert parse_size(f"{number}{letter}iB") == number * 1024**power


@pytest.mark.parametrize(
    ("text", "share"), [("0.01", 0.01), ("1%", 0.01), ("100%", 1.0), ("1", 1.0), (0.5, 0.5), (1, 1.0)]
)
def test_shares_are_read_as_people_write_them(text: str | float, share: float) -> None:
    assert parse_fraction(text) == share


@pytest.mark.parametrize(
    "text", ["0", "-0.1", "1.1", "101%", "0%", "x", "%", "", "nan", "inf", "0,1", 0, -1, 2, float("nan"), True, None]
)
def test_what_is_no_share_of_the_whole_is_an_error_with_a_hint(text: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_fraction(text)
    assert "1%" in caught.value.hint


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00K"),
        (12_345, "12.3K"),
        (123_456, "123K"),
        (1_234_567, "1.23M"),
        (150_000_000_000, "150G"),
        (2_500_000_000_000, "2.50T"),
        (999_999, "1.00M"),
        (9_999, "10.0K"),
        (999_999_999, "1.00G"),
    ],
)
def test_counts_are_written_with_three_digits(number: int, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1_234_567, "1.23 MB"), (20 * 10**9, "20.0 GB")]
)
def test_bytes_are_written_with_their_unit(number: int, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0s"),
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (61, "1m01s"),
        (3599.7, "1h00m"),
        (3725, "1h02m"),
        (90_000, "25h00m"),
    ],
)
def test_times_are_written_with_two_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_number_too_large_for_a_share_is_an_error_of_ours() -> None:
    with pytest.raises(RecipeError, match="not a share"):
        parse_fraction(10**400)


def test_times_are_told_in_utc_as_exactly_as_they_are_known() -> None:
    assert format_time(1_700_000_000 * 10**9) == "2023-11-14 22:13:20 UTC"
    assert format_time(1_700_000_000 * 10**9 + 1) == "2023-11-14 22:13:20.000000001 UTC"
    assert format_time(-(10**9)) == "1969-12-31 23:59:59 UTC"
    assert format_time(10**30) == f"{10**30} ns"


def test_of_many_texts_the_first_ten_are_told() -> None:
    assert few(["a", "b"]) == "a, b"
    assert few([str(number) for number in range(1011)], " ") == "0 1 2 3 4 5 6 7 8 9 and 1,001 more"
