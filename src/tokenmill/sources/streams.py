"""Bytes of a source from a position on: plain, .gz or .zst, never more in memory than was asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa

from tokenmill.errors import SourceError
from tokenmill.sources.batch import BATCH_BYTES
from tokenmill.sources.places import Pin, open_file

CODECS = {"gz": "gzip", "zst": "zstd"}
_STEP_BYTES = 1 << 14
# Text expands to less; what does not is made to harm.
_MOST_TIMES = 64


class Stream(Protocol):
    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end."""

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer as far as possible; 0 at the end."""


@contextlib.contextmanager
def open_stream(
    path: str, compression: str, *, start: int = 0, pin: Pin | None = None, step: int = BATCH_BYTES
) -> Iterator[Stream]:
    """A source as a stream of its text's bytes, read about `step` at once. A plain one may start anywhere."""
    with explained(path):
        file = open_file(path, pin, step=step)
    with file:
        if compression:
            if not file.size():
                raise SourceError(f"cannot read {path}: it is empty, not even compressed", hint="remove the file")
            with explained(path), pa.CompressedInputStream(file, CODECS[compression]) as stream:
                yield _Checked(stream, path)
        else:
            file.seek(start)
            yield _Checked(file, path)


def expansion(path: str, compression: str, pin: Pin, *, max_bytes: int) -> float:
    """How many bytes of text each of the first `max_bytes` compressed ones holds."""
    with explained(path), open_file(path, pin, step=max_bytes) as file:
        head = file.read(max_bytes)
    num_bytes = 0
    # It is cut off, unless that was all.
    with contextlib.suppress(OSError), pa.CompressedInputStream(pa.BufferReader(head), CODECS[compression]) as stream:
        while (count := len(stream.read(_STEP_BYTES))) and num_bytes < _MOST_TIMES * len(head):
            num_bytes += count
    return max(1, num_bytes) / max(1, len(head))


@contextlib.contextmanager
def explained(path: str, *, where: str = "") -> Iterator[None]:
    """Turn the reading libraries' errors into ours, with the file and the place."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # the last one: names of columns
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SourceError(
            f"cannot read {path}{where}: {reason}",
            hint="the same command tries it again; mend or remove a file that is broken, and go on with --update",
        ) from None


class _Checked:
    """Says at which byte of the text a stream broke."""

    def __init__(self, stream: Stream, path: str) -> None:
        self._stream = stream
        self._path = path
        self._at = 0

    def read(self, size: int) -> bytes:
        with explained(self._path, where=f" after {self._at} bytes of text"):
            data = self._stream.read(size)
        self._at += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        with explained(self._path, where=f" after {self._at} bytes of text"):
            count = self._stream.readinto(buffer)
        self._at += count
        return count
