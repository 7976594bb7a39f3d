"""Checks of the arguments of public functions: an invalid one is a `RecipeError` that names it.

    seed=np.int64(1)  ->  1          seed=True, 1.0, "1"  ->  RecipeError
    path=Path("a")    ->  "a"        path=None, b"a", "", " "  ->  RecipeError

The order of samples hashes the arguments of a stream, so the same number must be the same value however it is written.
Otherwise ranks with equal arguments would have different orders.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from tokenmill.errors import RecipeError

# Where documents come from: files, folders, globs or URLs.
Sources = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
# A function that gives texts, or rows with a text; or a dataset of the package `datasets`.
Texts = Callable[[], Iterable[str | Mapping[str, Any]]]


class TableOfTexts(Protocol):
    """A `datasets.Dataset` or `IterableDataset`."""

    @property
    def column_names(self) -> Any: ...

    def select_columns(self, column_names: Any) -> Any: ...


# What `watch=` is called with, and the function itself.
Event = dict[str, Any]
Watcher = Callable[[Event], None]


def progress_event(num_bytes: int, total_bytes: int, *, moved_bytes: int, seconds: float, **about: Any) -> Event:
    """How far a job is. Rate and remaining time count only the bytes that were moved in these seconds."""
    speed = moved_bytes / max(seconds, 1e-6)
    left = max(0, total_bytes - num_bytes)
    return {
        "kind": "progress",
        "bytes": min(num_bytes, total_bytes),
        "total_bytes": total_bytes,
        "bytes_per_second": round(speed),
        "seconds_left": round(left / speed, 1) if speed > 0 else None if left else 0.0,
        **about,
    }


class TextOptions(TypedDict, total=False):
    """The fields of a recipe that `stream` takes too: where the text is, and how documents are processed."""

    val_sources: Sources
    text_column: str | None
    template: str | None
    documents: str
    eot: Literal["append", "prepend", "none"]
    eot_token: str | None
    unit_bytes: int | str | None
    max_tokens: int | float | str | None
    sample: float | str | None
    seed: int
    min_chars: int
    max_document_bytes: int | str
    filter: str | Callable[[str], object] | None
    on_bad: Literal["quarantine", "fail"]


class RecipeOptions(TextOptions, total=False):
    """The fields of a recipe as `prepare` and `plan` take them, besides the sources."""

    tokenizer: str
    split: str | Sequence[str] | Mapping[str, float | str] | None


class StreamOptions(TextOptions, total=False):
    """What `tokenmill.torch.TextDataset` passes to `stream`."""

    split: str
    held_out: str | Mapping[str, float] | None
    shuffle: int | None
    epochs: int | None
    drop_last: bool
    labels: Literal["shifted", "aligned"]
    fields: tuple[str, ...]
    mask_boundaries: bool
    prefetch: int | None
    workers: int | None


# Numbers in records are below this.
MAX_INT = 1 << 62
# Samples of a step, over all ranks: positions of many steps are computed at once, in 64 bits.
MAX_STEP = 1 << 48
_MAX_WORKERS = 1 << 31
_SHOWN_CHARS = 60
_MAX_SEED = 1 << 128
_BLANK = "give a path or a name; is a variable of the shell not set? the current folder is ."


def whole(name: str, value: Any, *, least: int = 0, most: int = MAX_INT - 1, hint: str = "") -> int:
    """A whole number: an int, or a value that equals one by its type, such as an integer of numpy."""
    number = as_int(value)
    if number is None or not least <= number <= most:
        above = f" up to {most}" if most < MAX_INT - 1 else " on"
        raise RecipeError(f"{name} is {show(value)}", hint=hint or f"give a whole number from {least}{above}")
    return number


def whole_or_none(name: str, value: Any, *, least: int = 0, hint: str = "") -> int | None:
    return None if value is None else whole(name, value, least=least, hint=hint)


def workers_or_none(value: Any) -> int | None:
    """How many workers; 0 and less leave some cores free."""
    hint = "give a whole number, or None for all cores"
    return None if value is None else whole("workers", value, least=-_MAX_WORKERS, most=_MAX_WORKERS, hint=hint)


def seed_number(value: Any) -> int:
    """The seed of a loader: any whole number, below 0 too."""
    return whole("seed", value, least=1 - _MAX_SEED, most=_MAX_SEED - 1, hint="give a whole number, like 0")


def as_int(value: Any) -> int | None:
    """A value as an int; None if it is not an integer, or is true or false."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return int(operator.index(value))
    except Exception:  # whatever an array or a tensor that is not a number raises
        return None


def number(name: str, value: Any, *, hint: str) -> float:
    """A finite number, 0 or more. A whole number stays an int."""
    found: Any = value if isinstance(value, float) else as_int(value)
    if found is None or not (0 <= found < MAX_INT if isinstance(found, int) else 0 <= found < math.inf):
        raise RecipeError(f"{name} is {show(value)}", hint=hint)
    return found if isinstance(found, int) else float(found)


def flag(name: str, value: Any) -> bool:
    """True or false, or 0, 1 or a bool of numpy. A text is refused: "no" would count as true."""
    if as_int(value) in (0, 1) or isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool":
        return bool(value)
    raise RecipeError(f"{name} is {show(value)}", hint="give True or False")


def text(name: str, value: Any, *, hint: str = "give a text") -> str:
    if not isinstance(value, str):
        raise RecipeError(f"{name} is {show(value)}", hint=hint)
    return str(value)


def text_or_none(name: str, value: Any, *, hint: str = "give a text, or leave it out") -> str | None:
    return None if value is None else text(name, value, hint=hint)


def name_or_none(name: str, value: Any) -> str | None:
    return None if value is None else not_blank(name, text(name, value))


def texts(name: str, value: Any, *, hint: str) -> tuple[str, ...]:
    """Several texts. A single text is refused: it would be read as its letters."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RecipeError(f"{name} is {show(value)}", hint=hint)
    return tuple(text(name, one, hint=hint) for one in value)


def place(name: str, value: Any) -> str:
    """A path or a URL, as text."""
    found = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(found, str) or "\0" in found:
        raise RecipeError(f"{name} is {show(value)}", hint="give a path as a text or a Path")
    return not_blank(name, found)


def not_blank(name: str, value: str) -> str:
    """A text that is not blank. Many functions treat an empty path as the current folder."""
    if not value.strip():
        raise RecipeError(f"{name} is {show(value)}: it names nothing", hint=_BLANK)
    return value


def place_or_none(name: str, value: Any) -> str | None:
    return None if value is None else place(name, value)


def function_or_none(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise RecipeError(f"{name} is {show(value)}", hint="give a function that takes a dict, or leave it out")


def show(value: Any) -> str:
    """A value for a message: short, and with its type unless that is obvious."""
    try:
        shown = repr(value)
    except Exception:  # Python does not write integers of thousands of digits, and a repr may raise anything
        return f"a {type(value).__name__} that cannot be shown"
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[: _SHOWN_CHARS - 3]}..."
    return shown if type(value) in (int, float, str, bytes, bool, type(None)) else f"{shown} ({type(value).__name__})"
