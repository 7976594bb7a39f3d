"""The results of `export` and `import_`. Light, because the result of `prepare` may contain that of an export."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.dataset.manifest import Manifest
from tokenmill.sizes import counted, format_bytes, format_seconds
from tokenmill.storage.output import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """A finished export. `already_complete`: every file existed, with the right digest."""

    output: str
    layout: str
    files: dict[str, Digest]
    notes: tuple[str, ...]
    already_complete: bool
    seconds: float

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
