"""A file that lives as long as a with block, for libraries that take paths and nothing else."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def temporary_file(content: bytes, *, suffix: str) -> Iterator[str]:
    """The path of a file in the system's temp folder with this content."""
    with tempfile.NamedTemporaryFile(prefix="tokenmill-", suffix=suffix) as file:
        file.write(content)
        file.flush()
        yield file.name
