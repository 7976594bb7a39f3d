"""Sizes and counts as people write them: `64MB`, `1GiB`, `150G`, `2.5M`.

K, M, G, T are powers of 1000; Ki, Mi, Gi, Ti are powers of 1024; a trailing B is allowed.
"""

from __future__ import annotations

import re
from decimal import Decimal

from tokenmill.errors import RecipeError

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*([KMGTP]?)(I?)B?\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """The whole number that `text` means; `parse_size("64MB") == 64_000_000`."""
    if isinstance(text, int):
        number = text
    else:
        match = _SIZE.fullmatch(text)
        if not match or (match[3] and not match[2]):
            raise RecipeError(f"{text!r} is not a size", hint="write it like 64MB, 1GiB or 150G")
        base = 1024 if match[3] else 1000
        number = round(Decimal(match[1].replace("_", "")) * base ** _POWERS[match[2].upper()])
    if number <= 0:
        raise RecipeError(f"{text!r} is not a positive size", hint="write it like 64MB, 1GiB or 150G")
    return number


def parse_fraction(text: str | float) -> float:
    """A share above 0 and at most 1, written as `0.01` or `1%`."""
    try:
        share = float(text[:-1]) / 100 if isinstance(text, str) and text.endswith("%") else float(text)
    except (ValueError, OverflowError):
        share = -1.0
    if not 0 < share <= 1:
        raise RecipeError(f"{text!r} is not a share of the whole", hint="write it like 0.01 or 1%")
    return share


def format_count(number: float) -> str:
    """`format_count(1_234_567) == "1.23M"`: three digits, or all of a number below a thousand."""
    for power, letter in enumerate(("", "K", "M", "G", "T", "P")):
        value = number / 1000**power
        for digits in (2, 1, 0) if power else (0,):
            if abs(round(value, digits)) < 10 ** (3 - digits):
                return f"{value:.{digits}f}{letter}"
    return f"{number:.2e}"


def format_bytes(number: float) -> str:
    """`format_bytes(1_234_567) == "1.23 MB"`."""
    text = format_count(number)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def format_seconds(seconds: float) -> str:
    """`format_seconds(3725) == "1h02m"`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
