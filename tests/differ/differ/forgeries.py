"""Records that a stranger wrote: rightly sealed, and with names that lead elsewhere or numbers that cannot be.

    dataset.json, plan, job, receipts, requests, indexes of layouts  ->  one name or number is another
    what follows from a plan or a request has its fingerprint        ->  so the others are written to fit

The other fuzzers of records change any byte; here every record is one that could have been written.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from differ.homes import Home
from differ.oddities import Oddity
from tokenmill import records
from tokenmill.build.plan import Plan
from tokenmill.errors import TokenmillError
from tokenmill.formats.resumable import REQUEST, ConversionRequest
from tokenmill.units.receipts import PLAN

Place = tuple[str | int, ...]
NUMBERS = (-1, 0, 1, 2**31, 2**62, 2**63, 10**30)
ODD_TEXTS = (
    "..", ".", "", "/", "train/../../theirs/letter", "a\nb", "\x1b[31mred", "x" * 300, "dataset.json", "train",
    ".build/plan.json", "tr\u0430in/00000", "\ud800", "/dev/zero", "..\\theirs\\letter",
)  # fmt: skip
# What is written down of a plan and of a request by its fingerprint.
_KINDS: dict[str, Callable[[bytes], str]] = {
    PLAN: lambda data: records.unseal(Plan, data, where=PLAN).fingerprint,
    REQUEST: lambda data: records.unseal(ConversionRequest, data, where=REQUEST).fingerprint,
}


def forgeries(home: Home, subject: str) -> Iterator[tuple[str, Oddity]]:
    """Every name and number of every record of a subject, as something else."""
    root = home.good(subject)
    texts = (*ODD_TEXTS, str(home.theirs / "letter"), "../theirs/letter", "../../theirs/full/letter")
    for path in sorted(root.rglob("*.json")):
        where = str(path.relative_to(root))
        try:
            value = json.loads(path.read_bytes())
        except ValueError:
            continue
        value.pop("seal", None) if isinstance(value, dict) else None
        for place, what in _leaves(value):
            others = texts if isinstance(what, str) else NUMBERS
            for other in others:
                name = f"{'.'.join(map(str, place))} is {str(other)[:40]!r}"
                yield where, Oddity(name=name, plant=_forge(place, other), of="record", is_forged=True)


def _leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Texts and numbers, and the names of fields, which end with a star."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield (*place, key, "*"), key
            yield from _leaves(one, (*place, key))
    elif isinstance(value, list):
        for number, one in enumerate(value[:2]):
            yield from _leaves(one, (*place, number))
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield place, value


def _forge(place: Place, other: Any) -> Callable[[Home, Path], None]:
    def plant(home: Home, path: Path) -> None:
        before = path.read_bytes()
        value = json.loads(before)
        is_sealed = isinstance(value, dict) and value.pop("seal", None) is not None
        value = _changed(value, place, other)
        data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        path.write_bytes(_sealed(data) if is_sealed else data)
        where = str(path.relative_to(home.dataset))
        if where in _KINDS:
            with contextlib.suppress(TokenmillError, ValueError, RecursionError):
                _follow(home.dataset, _KINDS[where](before), _KINDS[where](path.read_bytes()))

    return plant


def _changed(value: Any, place: Place, other: Any) -> Any:
    value = copy.deepcopy(value)
    at = value
    *way, last = place[:-1] if place[-1] == "*" else place
    for key in way:
        at = at[key]
    if place[-1] == "*":
        at[other] = at.pop(last)
    else:
        at[last] = other
    return value


def _sealed(data: bytes) -> bytes:
    """As `records.seal` gives it; what is not canonical, such as half a character, has a seal all the same."""
    with contextlib.suppress(Exception):
        return records.seal(json.loads(data))
    return data


def _follow(dataset: Path, before: str, after: str) -> None:
    """All other records are of the fingerprint that the plan or the request has now."""
    for path in dataset.rglob("*.json"):
        data = path.read_bytes()
        if before.encode() in data and path.is_file():
            value = json.loads(data.replace(before.encode(), after.encode()))
            if isinstance(value, dict) and value.pop("seal", None) is not None:
                path.write_bytes(records.seal(value))
