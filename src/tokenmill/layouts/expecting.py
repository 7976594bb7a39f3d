"""What Templar's users expect of their files: SHA-256 and number of elements, given by hand or in a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill import records
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.shards.layout import numpy_dtype
from tokenmill.storage import Digest

NAMES = {"tokens": "tokens.bin", "sample_ids": "sample_ids.bin"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a file must be. `elements` are tokens or ids; -1 if it does not matter."""

    sha256: str
    elements: int = -1


def read_expected(given: Sequence[str], checksums: str | os.PathLike[str] | None) -> dict[str, Expected]:
    """What was expected on the command line and in a file, by name: tokens, sample_ids."""
    expected: dict[str, Expected] = {}
    if checksums is not None:
        try:
            found = records.parse(Path(checksums).read_bytes(), where=str(checksums))
            expected = {
                str(name): Expected(sha256=str(one["sha256"]), elements=int(one.get("elements", -1)))
                for name, one in found.items()
            }
        except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecipeError(f"{checksums} holds no checksums: {error}", hint=_FILE_HINT) from None
    for text in given:
        name, _, rest = text.partition("=")
        sha, _, count = rest.partition(":")
        if count and not count.isdecimal():
            raise RecipeError(f"{text!r} is nothing to expect", hint="write it like tokens=SHA256:COUNT")
        expected[name] = Expected(sha256=sha, elements=int(count) if count else -1)
    if unknown := sorted(expected.keys() - NAMES.keys()):
        raise RecipeError(f"there is no {unknown[0]!r} to expect", hint=f"there are {', '.join(NAMES)}")
    for name, one in expected.items():
        if not re.fullmatch(r"[0-9a-fA-F]{64}", one.sha256):
            raise RecipeError(f"{one.sha256!r} is no SHA-256 of {name}", hint="it has 64 hexadecimal digits")
    return expected


def compare(files: Mapping[str, Digest], expected: Mapping[str, Expected], dtype: str) -> None:
    """Refuse files that are not what was expected of them. `dtype` is that of the tokens."""
    sizes = {"tokens": numpy_dtype(dtype).itemsize, "sample_ids": 8}
    for name, wanted in expected.items():
        found = files[NAMES[name]]
        elements = found.bytes // sizes[name]
        if wanted.elements not in (-1, elements) or wanted.sha256.lower() != found.sha256:
            raise DatasetError(
                f"{NAMES[name]} has {elements} elements and SHA-256 {found.sha256}, expected "
                f"{wanted.elements if wanted.elements >= 0 else 'any number of'} elements and {wanted.sha256}",
                hint="are the shards whole, and is the length of samples right? --skip-validation does not compare",
            )


_FILE_HINT = 'write it like {"tokens": {"sha256": "4c53...", "elements": 161061273600}}'
