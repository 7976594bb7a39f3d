"""Small datasets of known documents, made without a tokenizer: raw tokens, imported."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tokenmill
from tokenmill.dataset.dataset import Dataset
from tokenmill.storage.base import local_folder

EOT = 9
Documents = dict[str, list[list[int]]]
LAYOUTS = ("datatrove", "llmc", "megatron", "nanogpt", "olmo", "templar")
# With small shards, so that documents cross them.
OPTIONS: dict[str, dict[str, Any]] = {
    "datatrove": {"shard_size": 7},
    "llmc": {"shard_size": 5},
    "megatron": {"shard_size": 6},
    "nanogpt": {},
    "olmo": {"shard_size": 7},
    "templar": {"shard_size": 5, "seq_len": 2},
}
SOME: Documents = {"train": [[1, 2, 3], [], [4], [5, 6, 7, 8], list(range(10, 300))], "val": [[2, 2], [3]]}
# Tokens as other programs write them, with GPT-2's end of text.
TOKENS = [1, 2, 50256, 3, 50256, 4, 5, 6, 50256]
DOCUMENTS = [[1, 2, 50256], [3, 50256], [4, 5, 6, 50256]]
FEW: Documents = {"train": [[1, 2, 3], [], [4], [5, 6, 7, 8], [1]], "val": [[2, 2], [3]]}


def make_dataset(folder: Path, documents: Documents, *, dtype: str = "uint16") -> Dataset:
    """A dataset of these documents, each followed by the end of text."""
    raw = local_folder(folder / "raw")
    raw.make()
    for split, found in documents.items():
        tokens = np.array([token for document in found for token in (*document, EOT)], dtype)
        raw.write(f"{split}.bin", tokens.tobytes())
    tokenmill.import_(raw.path, folder / "dataset", layout="nanogpt", dtype=dtype, eot_id=EOT, workers=1)
    return tokenmill.open(folder / "dataset")


@contextlib.contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder in memory where there is such a thing: hundreds of examples need not wait for a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as path:
        yield Path(path)


def documents_of(dataset: Dataset) -> Documents:
    """All documents, without their end of text."""
    return {
        name: [[token for token in document.tolist() if token != EOT] for document in dataset[name]]
        for name in sorted(dataset.splits)
    }


def documents(split: Any) -> list[list[int]]:
    """All documents of a split, as they are."""
    return [document.tolist() for document in split]


def write_tokens(path: Path, tokens: list[int], dtype: str = "<u2", head: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + np.array(tokens, dtype).tobytes())
    return path


def file_names(path: Path) -> list[str]:
    return sorted(
        str(file.relative_to(path)) for file in path.rglob("*") if file.is_file() and ".build" not in file.parts
    )


def digests(folder: Path, names: dict[str, str]) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def put(folder: Path, files: dict[str, bytes]) -> Path:
    target = local_folder(folder)
    target.make()
    for name, data in files.items():
        target.write(name, data)
    return folder


def imported(path: Path, layout: str, **options: Any) -> Dataset:
    out = path.parent / f"{path.name}-imported"
    tokenmill.import_(path, out, layout=layout, workers=1, **options)
    return tokenmill.open(out)
