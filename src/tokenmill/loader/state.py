"""Loader states: plain JSON with the identity of the stream and the number of samples seen.

    {"version": 1, "stream": {"fingerprint": ..., "seed": 1, ...}, "content": "6e51...", "samples_seen": 4096}

A state fits a loader if both have the same samples up to there. So the weights of a mixture may differ from there on,
and components may be added whose weight was 0. Anything else is refused with what differs. Some of it may be ignored:
then the count of samples continues, in another order or text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from tokenmill import arguments
from tokenmill.arguments import MAX_INT
from tokenmill.errors import RecipeError, StateError

_SHOWN_CHARS = 500
STATE_VERSION = 1
# What `ignore` may name: with another value, positions are still positions.
IGNORABLE = ("content", "fingerprint", "order", "packing", "plan", "seed")
_DAMAGED = "the state is damaged"


class Difference(NamedTuple):
    """A field in which a state and a loader differ. `where` names the component of a mixture."""

    field: str
    theirs: Any
    mine: Any
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}{self.field}: the state has {_show(self.theirs)}, this loader {_show(self.mine)}"


def check_state(state: Any, mine: dict[str, Any], *, hint: str, ignore: Collection[str] | None = None) -> int:
    """The samples seen, if the state belongs to the stream with this identity. Otherwise `StateError`.

    None for `ignore` means that the caller cannot ignore anything.
    """
    if not isinstance(state, Mapping):
        raise StateError(
            f"a state is a mapping, not of type {type(state).__name__}", hint="pass the result of state_dict"
        )
    if arguments.as_int(state.get("version")) != STATE_VERSION:
        raise StateError(
            f"the state has version {state.get('version')!r}, this loader {STATE_VERSION}",
            hint="use the version of tokenmill that wrote it",
        )
    seen = arguments.as_int(state.get("samples_seen"))
    if seen is None or not 0 <= seen < MAX_INT:
        raise StateError(f"samples_seen is {arguments.show(state.get('samples_seen'))}", hint=_DAMAGED)
    found = [one for one in _find_differences(state.get("stream"), mine, seen) if one.field not in (ignore or ())]
    if found:
        lines = "\n  ".join(map(str, found))
        raise StateError(
            f"the state belongs to another stream:\n  {lines}", hint=_make_hint(found, hint, state, ignore)
        )
    return _rescale(seen, *seq_lens(state, mine))


def seq_lens(state: Mapping[str, Any], mine: Mapping[str, Any]) -> tuple[int, int]:
    """The `seq_len` of a state that fits, and of the stream with this identity."""
    theirs, ours = (_row_fields(found)[0] for found in (state["stream"], mine))
    return theirs or ours or 1, ours or 1


def _rescale(seen: int, theirs: int, mine: int) -> int:
    """The samples of `mine` tokens that have as many tokens as those seen."""
    rows, rest = divmod(seen * theirs, mine)
    if rows >= MAX_INT:
        raise StateError(f"samples_seen is {seen}", hint=_DAMAGED)
    if rest:
        times = mine // math.gcd(mine, theirs)
        raise StateError(
            f"the state is inside a row: {seen} samples of seq_len {theirs} are {rows} of seq_len {mine}, and {rest} "
            f"tokens of the next one",
            hint=f"change the `seq_len` at a multiple of {times} samples",
        )
    return rows


def _row_fields(stream: Any) -> tuple[int, int]:
    """The `seq_len` of a stream, and of the rows whose order it has: 0 for what is damaged."""
    first = next(iter(_parts(stream)), stream)
    fields = first if isinstance(first, Mapping) else {}
    seq_len = arguments.as_int(fields.get("seq_len")) or 0
    longer = arguments.as_int(fields.get("max_seq_len")) or seq_len
    fits = fields.get("packing") == "concat" and 0 < seq_len <= longer < MAX_INT and longer % seq_len == 0
    return (seq_len, longer) if fits else (0, 0)


def check_ignore(ignore: Any) -> frozenset[str]:
    """The fields that a caller wants to ignore. A `RecipeError` names those that cannot be ignored."""
    hint = f"choose from {', '.join(IGNORABLE)}"
    found = frozenset(arguments.texts("ignore", ignore, hint=hint))
    if others := sorted(found - set(IGNORABLE)):
        raise RecipeError(f"ignore: {', '.join(map(repr, others))} of a state cannot be ignored", hint=hint)
    return found


def check_content(state: Mapping[str, Any], name: str, mine: Any, *, ignore: Collection[str] | None = None) -> None:
    """Refuse a state that was written for other text. Older states do not record it, and are accepted.

    A mixture may have more components than its state.
    """
    theirs = state.get(name)
    pairs = [(theirs, mine)]
    if isinstance(mine, list) and isinstance(theirs, list) and len(theirs) <= len(mine):
        pairs = list(zip(theirs, mine, strict=False))
    if theirs is None or name in (ignore or ()) or all(was == now for was, now in pairs):
        return
    of = ""
    if isinstance(mine, list):
        parts = _parts(state.get("stream"))
        changed = [repr(part.get("part")) for part, (was, now) in zip(parts, pairs, strict=False) if was != now]
        of = f" of component {', '.join(changed)}"
    hint = "prepare the previous text again, or start without the state"
    raise StateError(
        f"the state was written before the {name}{of} changed: it has {_short(theirs)}, this loader {_short(mine)}",
        hint=hint if ignore is None else f"{hint}; {_to_ignore({name})}",
    )


def _find_differences(theirs: Any, mine: dict[str, Any], seen: int) -> Iterator[Difference]:
    """The fields in which two streams differ, as far as samples before `seen` depend on them."""
    theirs = theirs if isinstance(theirs, Mapping) else {}
    if "parts" not in mine or "parts" not in theirs:
        yield from _of_fields(theirs, mine)
        return
    parts = _parts(theirs)
    before, now = ([part.get("part") for part in found] for found in (parts, mine["parts"]))
    if before != now[: len(before)] or not before:
        yield Difference("components", before, now)
        return
    for part, name, ours in zip(parts, before, mine["parts"], strict=False):
        yield from _of_fields(part, ours, where=f"component {name!r}, ")
    seen = _rows_seen(theirs, seen)
    later = (0,) * (len(now) - len(before))  # components that were added had no weight
    phases = (
        _phases_before(theirs.get("shares"), seen, len(before), later),
        _phases_before(mine["shares"], seen, len(now)),
    )
    for one, other in zip_longest(*phases, fillvalue=None):
        if one != other:
            begin = (one or other or (0,))[0]
            was, ours = (None if phase is None else dict(zip(now, phase[1], strict=True)) for phase in (one, other))
            yield Difference(f"weights from sample {begin} on", was, ours)


def _of_fields(theirs: Mapping[str, Any], mine: Mapping[str, Any], where: str = "") -> Iterator[Difference]:
    same_rows = _row_fields(theirs)[1] == _row_fields(mine)[1] > 0
    for name in sorted({*map(str, theirs), *mine}):
        if same_rows and name in ("seq_len", "max_seq_len"):
            continue
        if theirs.get(name) != mine.get(name):
            yield Difference(name, theirs.get(name), mine.get(name), where)


def _parts(stream: Any) -> list[Mapping[str, Any]]:
    """The components of a mixture's stream; none if it is damaged."""
    found = stream.get("parts") if isinstance(stream, Mapping) else None
    return found if isinstance(found, list) and all(isinstance(part, Mapping) for part in found) else []


def _phases_before(
    shares: Any, seen: int, num_components: int, later: tuple[int, ...] = ()
) -> list[tuple[int, tuple[int, ...]]]:
    """When the shares changed before a sample, and to what. `later` is added to each of them."""
    found = []
    try:
        for begin, numbers in shares:
            if len(numbers) != num_components:
                raise ValueError(numbers)
            if begin < seen:
                found.append((begin, (*numbers, *later)))
    except (TypeError, ValueError):
        raise StateError(f"shares is {arguments.show(shares)}", hint=_DAMAGED) from None
    return found


def _rows_seen(stream: Any, seen: int) -> int:
    """The rows of a mixture that were begun: those of the longest `seq_len`, which a schedule counts."""
    seq_len, longer = _row_fields(stream)
    return -(-seen * seq_len // longer) if seq_len else seen


def _make_hint(found: Sequence[Difference], hint: str, state: Mapping[str, Any], ignore: Collection[str] | None) -> str:
    fields = {one.field for one in found}
    if "components" in fields:
        return "keep the components of the state, in their order, and add others behind them with weight 0"
    if any(field.startswith("weights") for field in fields):
        seen = _rows_seen(state["stream"], int(state["samples_seen"]))
        return (
            f"keep the weights before sample {seen}, which are used; other weights from there on are an entry of the "
            f"schedule: {seen} or more"
        )
    if ignore is not None and fields <= {"seq_len", "max_seq_len"}:
        return (
            "rows of another `seq_len` continue a run if both are cut from the same longer rows: give all loaders of a "
            "run one max_seq_len, which each `seq_len` divides; a state without it is of rows of its `seq_len`"
        )
    return hint if ignore is None or not fields <= set(IGNORABLE) else f"{hint}; {_to_ignore(fields)}"


def _to_ignore(fields: Collection[str]) -> str:
    names = ", ".join(map(repr, sorted(fields)))
    return (
        f"or call load_state_dict(state, ignore={{{names}}}) of a DataLoader: the count of samples continues, but "
        f"samples may come twice or not at all until the next epoch"
    )


def _show(value: Any) -> str:
    try:
        shown = repr(value)
    except RecursionError:
        return arguments.show(value)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."


def _short(digests: Any) -> str:
    return ", ".join(str(one)[:12] for one in (digests if isinstance(digests, list) else [digests]))
