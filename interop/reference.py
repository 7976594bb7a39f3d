"""What tiktoken says a corpus is: the ids of its documents, in the order that a dataset keeps them.

It takes GPT-2's ranks from the file inside the package and imports nothing of tokenmill, so it
also runs where only a trainer is installed.
"""

from __future__ import annotations

import base64
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

RANKS = Path(__file__).parents[1] / "src" / "tokenmill" / "embedded" / "gpt2.tiktoken"
EOT = 50256
BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Count:
    """How much was compared, and found equal."""

    documents: int = 0
    tokens: int = 0


def gpt2() -> tiktoken.Encoding:
    """tiktoken's GPT-2, without its download."""
    pairs = (line.split() for line in RANKS.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    return tiktoken.Encoding(
        name="gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": EOT}
    )


def documents_of(corpus: Path) -> Iterator[str]:
    """The documents of a parquet file, or of a folder of text files."""
    return file_documents(corpus) if corpus.is_dir() else parquet_documents(corpus)


def parquet_documents(path: Path) -> Iterator[str]:
    """The texts of a parquet file; null and empty ones are no documents."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(1000, columns=["text"]):
            yield from (text for text in batch.column("text").to_pylist() if text)


def library_files() -> list[Path]:
    """The source files of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    return [path for path in sorted(root.rglob("*.py")) if not installed & set(path.relative_to(root).parts)]


def file_documents(root: Path) -> Iterator[str]:
    """The files below a folder, a document each, by name; empty ones and those in no UTF-8 are left out."""
    files = (path for path in root.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: str(path.relative_to(root)).encode()):
        try:
            text = path.read_bytes().removeprefix(BOM).decode()
        except UnicodeDecodeError:
            continue
        if text:
            yield text


def shard_prefixes(dataset: Path, split: str = "train") -> list[Path]:
    """The shards of a split, in order, without their endings."""
    manifest = json.loads((dataset / "dataset.json").read_bytes())
    return [dataset / shard["name"] for shard in manifest["splits"][split]["shards"]]


def expected_ids(encoding: tiktoken.Encoding, text: str) -> npt.NDArray[np.uint32]:
    """A document as nanoGPT has it: its ordinary tokens, then the end of text."""
    return np.array([*encoding.encode_ordinary(text), EOT], np.uint32)
