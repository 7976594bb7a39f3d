"""Files and folders that live as long as a with block."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import IO

_OPEN_FILES = "/proc/self/fd"


@contextlib.contextmanager
def temporary_file(content: bytes, *, suffix: str) -> Iterator[str]:
    """The path of a file with this content, for libraries that take paths and nothing else."""
    with _unnamed_file(suffix) or tempfile.NamedTemporaryFile(prefix="tokenmill-", suffix=suffix) as file:
        file.write(content)
        file.flush()
        yield f"{_OPEN_FILES}/{file.fileno()}" if isinstance(file.name, int) else file.name


def _unnamed_file(suffix: str) -> IO[bytes] | None:
    """A file in memory, where the system has such: nothing is left of it by whoever is killed."""
    if not hasattr(os, "memfd_create") or not os.path.isdir(_OPEN_FILES):
        return None
    return os.fdopen(os.memfd_create(f"tokenmill{suffix}"), "wb")


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """The path of an empty folder in the system's temp folder."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as path:
        yield path
