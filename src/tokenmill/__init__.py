"""tokenmill: raw text to training-ready token datasets.

tokenmill.prepare("corpus/*.parquet", "data/owt", tokenizer="gpt2")
tokenmill.verify("data/owt")
dataset = tokenmill.open("data/owt")

The adapters for frameworks are `tokenmill.torch`, `tokenmill.lightning`, `tokenmill.transformers`,
`tokenmill.torchtitan` and `tokenmill.jax`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill import jax as jax
    from tokenmill import lightning as lightning
    from tokenmill import torch as torch
    from tokenmill import torchtitan as torchtitan
    from tokenmill import transformers as transformers
    from tokenmill.build.api import PartStatus, PrepareResult, prepare
    from tokenmill.build.join import join
    from tokenmill.build.preflight import Estimate
    from tokenmill.build.preview import PlanResult, plan
    from tokenmill.dataset.dataset import Dataset, SourceRow
    from tokenmill.dataset.manifest import Manifest
    from tokenmill.errors import (
        AccessError,
        BadDocumentError,
        BuildError,
        DamagedPieceError,
        DatasetError,
        DeterminismError,
        DiskFullError,
        FileLimitError,
        Interrupted,
        LockedError,
        MissingFileError,
        NotADatasetError,
        NotTextError,
        ObjectChangedError,
        OutputError,
        ParityError,
        RecipeError,
        SilentStoreError,
        SourceChangedError,
        SourceError,
        StateError,
        StorageError,
        TokenizerError,
        TokenmillError,
        UnknownSplitError,
    )
    from tokenmill.executors.hosts import cluster
    from tokenmill.formats.base import Expected
    from tokenmill.formats.convert import export, import_
    from tokenmill.formats.open import open
    from tokenmill.formats.results import ExportResult, ImportResult
    from tokenmill.inspection.compare import ComparedDocument, ComparedValue, Comparison, DocumentSide, compare
    from tokenmill.inspection.compare_tokenizers import SourceRatio, TokenizerResult, compare_tokenizers
    from tokenmill.inspection.doctor import Check, DoctorReport, doctor
    from tokenmill.inspection.peek import Excerpt, Piece, peek
    from tokenmill.inspection.report import ReportResult, report
    from tokenmill.inspection.trace import trace
    from tokenmill.inspection.viewer import Viewer, view
    from tokenmill.loader.loader import DataLoader
    from tokenmill.loader.mixture import Mixture
    from tokenmill.loader.trace import Trace, TracedDocument, TracedPart, TracedSample
    from tokenmill.maintenance.push_pull import TransferResult, pull, push
    from tokenmill.maintenance.repair import repair
    from tokenmill.maintenance.verify import Problem, VerifyReport, verify
    from tokenmill.text_stream import TextStream, stream


__version__ = "0.1.0"

# Nothing heavy loads before it is used; `import tokenmill` stays cheap on a trainer node.
_HOMES = {
    "tokenmill.build.api": ("PartStatus", "PrepareResult", "prepare"),
    "tokenmill.build.join": ("join",),
    "tokenmill.build.preflight": ("Estimate",),
    "tokenmill.build.preview": ("PlanResult", "plan"),
    "tokenmill.dataset.dataset": ("Dataset", "SourceRow"),
    "tokenmill.dataset.manifest": ("Manifest",),
    "tokenmill.errors": (
        "AccessError", "BadDocumentError", "BuildError", "DamagedPieceError", "DatasetError",
        "DeterminismError", "DiskFullError", "FileLimitError", "Interrupted", "LockedError", "MissingFileError",
        "NotADatasetError", "NotTextError", "ObjectChangedError", "OutputError", "ParityError", "RecipeError",
        "SilentStoreError",
        "SourceChangedError", "SourceError", "StateError", "StorageError", "TokenizerError", "TokenmillError",
        "UnknownSplitError",
    ),
    "tokenmill.executors.hosts": ("cluster",),
    "tokenmill.formats.convert": ("export", "import_"),
    "tokenmill.formats.open": ("open",),
    "tokenmill.formats.results": ("ExportResult", "ImportResult"),
    "tokenmill.formats.base": ("Expected",),
    "tokenmill.inspection.compare": (
        "ComparedDocument", "ComparedValue", "Comparison", "DocumentSide", "compare",
    ),
    "tokenmill.inspection.compare_tokenizers": ("SourceRatio", "TokenizerResult", "compare_tokenizers"),
    "tokenmill.inspection.doctor": ("Check", "DoctorReport", "doctor"),
    "tokenmill.inspection.peek": ("Excerpt", "Piece", "peek"),
    "tokenmill.inspection.report": ("ReportResult", "report"),
    "tokenmill.inspection.trace": ("trace",),
    "tokenmill.inspection.viewer": ("Viewer", "view"),
    "tokenmill.loader.loader": ("DataLoader",),
    "tokenmill.loader.mixture": ("Mixture",),
    "tokenmill.loader.trace": ("Trace", "TracedDocument", "TracedPart", "TracedSample"),
    "tokenmill.maintenance.push_pull": ("TransferResult", "pull", "push"),
    "tokenmill.maintenance.repair": ("repair",),
    "tokenmill.maintenance.verify": ("Problem", "VerifyReport", "verify"),
    "tokenmill.text_stream": ("TextStream", "stream"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_ADAPTERS = ("jax", "lightning", "torch", "torchtitan", "transformers")

__all__ = [
    "AccessError",
    "BadDocumentError",
    "BuildError",
    "Check",
    "ComparedDocument",
    "ComparedValue",
    "Comparison",
    "DamagedPieceError",
    "DataLoader",
    "Dataset",
    "DatasetError",
    "DeterminismError",
    "DiskFullError",
    "DoctorReport",
    "DocumentSide",
    "Estimate",
    "Excerpt",
    "Expected",
    "ExportResult",
    "FileLimitError",
    "ImportResult",
    "Interrupted",
    "LockedError",
    "Manifest",
    "MissingFileError",
    "Mixture",
    "NotADatasetError",
    "NotTextError",
    "ObjectChangedError",
    "OutputError",
    "ParityError",
    "PartStatus",
    "Piece",
    "PlanResult",
    "PrepareResult",
    "Problem",
    "RecipeError",
    "ReportResult",
    "SilentStoreError",
    "SourceChangedError",
    "SourceError",
    "SourceRatio",
    "SourceRow",
    "StateError",
    "StorageError",
    "TextStream",
    "TokenizerError",
    "TokenizerResult",
    "TokenmillError",
    "Trace",
    "TracedDocument",
    "TracedPart",
    "TracedSample",
    "TransferResult",
    "UnknownSplitError",
    "VerifyReport",
    "Viewer",
    "cluster",
    "compare",
    "compare_tokenizers",
    "doctor",
    "export",
    "import_",
    "join",
    "open",
    "peek",
    "plan",
    "prepare",
    "pull",
    "push",
    "repair",
    "report",
    "stream",
    "trace",
    "verify",
    "view",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    if name in _ADAPTERS:
        return importlib.import_module(f"tokenmill.{name}")
    raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
