"""What a file holds, by the end of its name."""

from __future__ import annotations

import os
from collections import Counter

from tokenmill.errors import RecipeError

KINDS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
}
COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst"}
# What the kinds are called in messages: .json is a stranger's name for JSON lines.
KNOWN = ", ".join(ending for ending in KINDS if ending != ".json")
_ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz")
_TABLES_AS_TEXT = (".csv", ".tsv")
# Files that others leave beside their data.
_COMPANIONS = ("dataset_info.json", "dataset_dict.json", "state.json", "_SUCCESS")


def kind_of(name: str) -> tuple[str | None, str]:
    """Kind and compression that a file's name tells; the kind is None if it tells none."""
    stem, ending = os.path.splitext(name.lower())
    compression = COMPRESSIONS.get(ending, "")
    return KINDS.get(os.path.splitext(stem)[1] if compression else ending), compression


def read_as(path: str, *, documents: str) -> tuple[str, str]:
    """Kind and compression of a source. Where files or parts of them are documents, .json is text like any other."""
    kind, compression = kind_of(path)
    return kind if kind is not None and (documents == "lines" or not _is_json(path)) else "text", compression


def _is_json(name: str) -> bool:
    return ending_of(name.lower()).startswith(".json") and not ending_of(name.lower()).startswith(".jsonl")


def check_json(path: str) -> None:
    """Refuse a file that has no line with an object in it, though its name says JSON."""
    if _is_json(path):
        raise RecipeError(
            f"{path} is not JSON lines: it has no line that is an object",
            hint="put one object on each line: jq -c '.[]' FILE > FILE.jsonl",
        )


def is_known(name: str) -> bool:
    """Whether a file that lies in a folder is taken for a source. A plain .json is more often something else."""
    return kind_of(name)[0] is not None and not name.lower().endswith(".json")


def is_companion(name: str) -> bool:
    """Whether it is no loss to anybody if a file of this name is passed over."""
    return name in _COMPANIONS


def ending_of(name: str) -> str:
    """The end of a name, with that of its compression."""
    stem, ending = os.path.splitext(name)
    return os.path.splitext(stem)[1] + ending if ending.lower() in COMPRESSIONS else ending


def check_kind(path: str, *, documents: str) -> None:
    """Refuse what is not read, or would be read as something that it is not."""
    kind, compression = kind_of(path)
    if path.lower().removesuffix(".gz").removesuffix(".zst").endswith(_ARCHIVES):
        raise RecipeError(f"{path}: archives are not read", hint="unpack it first")
    if compression and kind in ("parquet", "arrow"):
        raise RecipeError(
            f"{path}: a compressed {kind} file is not read", hint="decompress it: it is compressed inside"
        )
    if ending_of(path).lower().startswith(_TABLES_AS_TEXT) and documents == "lines":
        raise RecipeError(
            f"{path}: tables as text are not read", hint="make it parquet or JSON lines, or say --documents files"
        )


def count_endings(endings: Counter[str]) -> str:
    """`3 .png, 1 .json, 2 without any`."""
    return ", ".join(f"{count:,} {ending or 'without any'}" for ending, count in endings.most_common())
