"""Estimates the memory that large documents need, so that no worker is killed for lack of it.

    a document of many words       a few times its size
    one run without a space        24 times its size: the engine merges all of it as one word

Documents of more than `LARGE_BYTES` are encoded by one worker at a time, and only if enough memory is free. The workers
of a build take turns with a lock of its folder, and those of text streams with one of the machine's temporary folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.errors import MORE_MEMORY, SourceError
from tokenmill.resources import free_memory
from tokenmill.sizes import format_bytes
from tokenmill.sources.base import text_buffers
from tokenmill.storage.base import Storage
from tokenmill.tokenizers.base import LARGE_BYTES, Engine

_BLOCK_BYTES = 1 << 20
_SPACES = np.zeros(256, np.bool_)
_SPACES[list(b" \t\n\v\f\r")] = True


@contextlib.contextmanager
def reserve_memory(text: pa.Array, engine: Engine, folder: Storage, *, where: str) -> Iterator[None]:
    """A context in which to encode a batch. Raises `SourceError` if it has a document that would not fit in memory."""
    need = bytes_needed(text, engine)
    if not need:
        yield
        return
    with folder.alone():  # no other worker has a large document now
        free = free_memory()
        if need > free:
            size = format_bytes(len(text_buffers(text)[1]))
            raise SourceError(
                f"{where}: a document of {size} takes about {format_bytes(need)} of memory to encode, and "
                f"{format_bytes(max(0, int(free)))} are free",
                hint=MORE_MEMORY,
            )
        yield


def bytes_needed(text: pa.Array, engine: Engine) -> int:
    """The memory that encoding a batch takes besides its text, from measurements; 0 without a large document."""
    offsets, data = text_buffers(text)
    if len(data) < LARGE_BYTES or int(np.diff(offsets).max()) < LARGE_BYTES:
        return 0
    memory = engine.memory(text)
    run = longest_run(data) if memory.times_run else 0
    return memory.times_text * len(data) + memory.times_run * run


def longest_run(data: npt.NDArray[np.uint8]) -> int:
    """The longest run of bytes that are all white space, or all not. No word of any tokenizer is longer."""
    longest = begin = 0
    before: bool | None = None
    for start in range(0, len(data), _BLOCK_BYTES):
        spaces = _SPACES[data[start : start + _BLOCK_BYTES]]
        changes = np.flatnonzero(spaces[1:] != spaces[:-1]) + start + 1
        if before is not None and before != spaces[0]:
            changes = np.concatenate(([start], changes))
        if len(changes):
            longest = max(longest, int(changes[0]) - begin, int(np.diff(changes).max(initial=0)))
            begin = int(changes[-1])
        before = bool(spaces[-1])
    return max(longest, len(data) - begin)
