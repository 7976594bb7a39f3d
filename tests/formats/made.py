"""Small datasets of known documents, made without a tokenizer: raw tokens, imported."""

from __future__ import annotations

import contextlib
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
