"""Files and folders that live as long as a with block."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def temporary_file(content: bytes, *, suffix: str) -> Iterator[str]:
    """The path of a file with this content, for libraries that take paths and nothing else."""
    with tempfile.NamedTemporaryFile(prefix="tokenmill-", suffix=suffix) as file:
        file.write(content)
        file.flush()
        yield file.name


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """The path of an empty folder in the system's temp folder."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as path:
        yield path
