"""Parsing and formatting of sizes, counts and durations: `64MB`, `1GiB`, `150G`, `2.5M`, `1e6`, `1_000_000`.

K, M, G, T are powers of 1000; Ki, Mi, Gi, Ti are powers of 1024; bytes may have a trailing B.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Literal, TypeGuard

from tokenmill import arguments
from tokenmill.arguments import MAX_INT
from tokenmill.errors import RecipeError

_MINUTE, _HOUR = 60, 3600
_FEW = 10
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_SIZE = re.compile(
    r"\s*((?:\d{1,3}(?:,\d{3})+|\d+(?:_\d+)*)(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([KMGTP]?)(I?)(B?)\s*",
    re.IGNORECASE | re.ASCII,
)
_HINTS = {
    "bytes": "write it like 64MB, 1GiB, 2.5G or 1000000",
    "tokens": "write it like 1000000, 1e6, 2.5M or 150G",
}


def parse_size(text: str | float, *, of: Literal["bytes", "tokens"] = "bytes", name: str = "") -> int:
    """The whole number that `text` means; `parse_size("64MB") == 64_000_000`. Errors begin with the `name`.

    A fraction of a byte or token is an error, but for powers of 1024, which hardly go without: they are rounded.
    """
    about = f"{name}: " if name else ""
    number, is_binary = _read(text, of, about)
    if number != number.to_integral_value() and not is_binary:
        raise RecipeError(f"{about}{arguments.show(text)} is not a whole number of {of}", hint=_HINTS[of])
    if not 0 < round(number) < MAX_INT:
        raise RecipeError(f"{about}{arguments.show(text)} is not a positive size below 2^62", hint=_HINTS[of])
    return round(number)


def _read(text: str | float, of: Literal["bytes", "tokens"], about: str) -> tuple[Decimal, bool]:
    """The number, and whether it was written with a power of 1024."""
    found = text if isinstance(text, float) else arguments.as_int(text)
    if found is not None and abs(found) < float("inf"):
        return Decimal(found), False
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if not match or (match[3] and not match[2]):
        raise RecipeError(f"{about}{arguments.show(text)} is not a size", hint=_HINTS[of])
    if match[4] and of == "tokens":
        raise RecipeError(f"{about}{text!r} is a size in bytes, not a number of tokens", hint="a billion tokens are 1G")
    base = 1024 if match[3] else 1000
    return Decimal(re.sub("[_,]", "", match[1])) * base ** _POWERS[match[2].upper()], bool(match[3])


def parse_fraction(text: str | float) -> float:
    """A share above 0 and at most 1, written as `0.01` or `1%`."""
    share = -1.0
    if isinstance(text, str) or _is_number(text):
        with contextlib.suppress(ValueError, OverflowError):
            share = float(text[:-1]) / 100 if isinstance(text, str) and text.endswith("%") else float(text)
    if not 0 < share <= 1:
        raise RecipeError(f"{text!r} is not a share of the whole", hint="write it like 0.01 or 1%")
    return share


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is one that a person wrote: true and false are numbers to Python alone."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_count(number: float) -> str:
    """`format_count(1_234_567) == "1.23M"`: three digits, or all of a number below a thousand."""
    for power, letter in enumerate(("", "K", "M", "G", "T", "P")):
        value = number / 1000**power
        for digits in (2, 1, 0) if power else (0,):
            if abs(round(value, digits)) < 10 ** (3 - digits):
                return f"{value:.{digits}f}{letter}"
    return f"{number:.2e}"


def counted(number: int, what: str) -> str:
    """`counted(1, "unit") == "1 unit"`, and `counted(1000, "unit") == "1,000 units"`."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def format_bytes(number: float) -> str:
    """`format_bytes(1_234_567) == "1.23 MB"`."""
    text = format_count(number)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def format_seconds(seconds: float) -> str:
    """`format_seconds(3725) == "1h02m"`."""
    whole = max(0, round(seconds))
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_time(nanoseconds: int) -> str:
    """`format_time(1_500_000_000) == "1970-01-01 00:00:01.5 UTC"`: as exact as the clock that it comes from."""
    seconds, rest = divmod(nanoseconds, 10**9)
    fraction = f".{rest:09d}".rstrip("0").rstrip(".")
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}{fraction} UTC"
    except (ValueError, OverflowError, OSError):  # a record may hold any number
        return f"{nanoseconds} ns"


def few(texts: Sequence[str], between: str = ", ") -> str:
    """The first ten of some texts, and how many there are besides."""
    more = [f"and {len(texts) - _FEW:,} more"] if len(texts) > _FEW else []
    return between.join([*texts[:_FEW], *more])
