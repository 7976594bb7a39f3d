"""Loader states: plain JSON that says which stream it is of and how many samples of it were seen.

    {"version": 1, "stream": {"fingerprint": ..., "seed": 1, ...}, "content": "6e51...", "samples_seen": 4096}

A state that is of another stream, of other text, or damaged is refused with what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill import arguments
from tokenmill.arguments import MAX_INT
from tokenmill.errors import StateError

STATE_VERSION = 1


def check_content(state: dict[str, Any], name: str, mine: Any) -> None:
    """Refuse a state that was written for other text. Older states do not record it, and are accepted."""
    theirs = state.get(name)
    if theirs in (None, mine):
        return
    of = ""
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        components = zip(state["stream"]["parts"], theirs, mine, strict=True)
        of = f" of component {', '.join(repr(one.get('part')) for one, was, now in components if was != now)}"
    raise StateError(
        f"the state was written before the {name}{of} changed: it has {_short(theirs)}, this loader {_short(mine)}",
        hint="prepare the previous text again, or start without the state",
    )


def _short(digests: Any) -> str:
    return ", ".join(str(one)[:12] for one in (digests if isinstance(digests, list) else [digests]))


def check_state(state: dict[str, Any], mine: dict[str, Any], *, hint: str) -> int:
    """The samples seen, if the state belongs to the stream with this identity. Otherwise `StateError`."""
    if not isinstance(state, Mapping):
        raise StateError(
            f"a state is a mapping, not of type {type(state).__name__}", hint="pass the result of state_dict"
        )
    if arguments.as_int(state.get("version")) != STATE_VERSION:
        raise StateError(
            f"the state has version {state.get('version')!r}, this loader {STATE_VERSION}",
            hint="use the version of tokenmill that wrote it",
        )
    found = state.get("stream")
    if found != mine:
        theirs = found if isinstance(found, dict) else {}
        pairs = [(name, theirs.get(name), mine.get(name)) for name in sorted({*mine, *theirs})]
        raise StateError(
            "the state belongs to another stream:\n  "
            + "\n  ".join(f"{name}: the state has {a!r}, this loader {b!r}" for name, a, b in pairs if a != b),
            hint=hint,
        )
    seen = arguments.as_int(state.get("samples_seen"))
    if seen is None or not 0 <= seen < MAX_INT:
        raise StateError(f"samples_seen is {state.get('samples_seen')!r}", hint="the state is damaged")
    return seen
