"""The results of `export` and `import_`. Light, because the result of `prepare` may contain that of an export."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.dataset.manifest import Manifest
from tokenmill.sizes import counted, format_bytes, format_seconds
from tokenmill.storage.output import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """A file whose checksum users know in advance. `has_passed` is None if nothing is expected of it."""

    file: str
    elements: int
    sha256: str
    expected_elements: int | None = None
    expected_sha256: str = ""

    @property
    def has_passed(self) -> bool | None:
        if not self.expected_sha256:
            return None
        is_right = self.expected_elements in (None, self.elements)
        return is_right and self.expected_sha256.lower() == self.sha256

    def lines(self) -> list[str]:
        """`tokens.bin  PASS  161,061,273,600 elements`, and the digest below; of a mismatch both values."""
        verdict = {True: "PASS", False: "FAIL", None: "not compared"}[self.has_passed]
        found = [f"{self.file:<14}  {verdict}  {self.elements:,} elements", f"  sha256   {self.sha256}"]
        if self.has_passed is False:
            wanted = "any number of" if self.expected_elements is None else f"{self.expected_elements:,}"
            found.append(f"  expected {self.expected_sha256}, {wanted} elements")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """A finished export. `already_complete`: every file existed, with the right digest.

    `checks` are the files that can be compared with known checksums (templar), compared or not.
    """

    output: str
    layout: str
    files: dict[str, Digest]
    notes: tuple[str, ...]
    already_complete: bool
    seconds: float
    checks: tuple[FileCheck, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(digest.bytes for digest in self.files.values())

    def __repr__(self) -> str:
        size = f"{counted(len(self.files), 'file')}, {format_bytes(self.num_bytes)}"
        return f"ExportResult({self.output!r}: {size} of layout {self.layout}; {_done(self)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """A finished import. `notes` say what was detected, and what could not be preserved."""

    output: str
    layout: str
    manifest: Manifest
    notes: tuple[str, ...]
    already_complete: bool
    seconds: float

    def __repr__(self) -> str:
        totals = f"{counted(self.manifest.tokens, 'token')}, {counted(self.manifest.documents, 'document')}"
        return f"ImportResult({self.output!r}: {totals} from layout {self.layout}; {_done(self)})"


def _done(result: ExportResult | ImportResult) -> str:
    return "complete already" if result.already_complete else f"done in {format_seconds(result.seconds)}"
