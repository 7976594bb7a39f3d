"""Does a dataset hold exactly what tiktoken gives? Read by plain numpy, with no code of ours.

python interop/tiktoken_ids.py [CORPUS] [--work DIR]

Without a corpus it takes the source files of Python's standard library, a document each.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from reference import Count, documents_of, expected_ids, gpt2, library_files, shard_prefixes
from results import READS, found, stop

import tokenmill

WORKERS = 2


def copy_library(folder: Path) -> Path:
    """The standard library as a folder of text files, whose names say where each was."""
    folder.mkdir()
    for number, path in enumerate(library_files()):
        shutil.copyfile(path, folder / f"{number:05d}-{path.stem}.txt")
    return folder


def compare(dataset: Path, documents: Iterator[str]) -> Count:
    """Hold every document of the corpus against the tokens where it must be."""
    encoding, count = gpt2(), Count()
    for prefix in shard_prefixes(dataset):
        tokens = np.memmap(prefix.with_suffix(".bin"), np.uint16, mode="r")
        at = 0
        while at < len(tokens):
            text = next(documents, None)
            if text is None:
                stop(f"{prefix.name}.bin goes on after document {count.documents}, the corpus's last")
            expected = expected_ids(encoding, text)
            ids = tokens[at : at + len(expected)]
            if not np.array_equal(ids, expected):
                first = int(np.argmin(ids == expected[: len(ids)]))
                near = slice(first, first + 8)
                where = f"document {count.documents}, token {first} of it, {at + first} of {prefix.name}.bin"
                stop(f"{where}: {ids[near]}, not {expected[near]}")
            at += len(expected)
            count.documents += 1
            count.tokens += len(expected)
    if next(documents, None) is not None:
        stop(f"the dataset ends after {count.documents} documents, the corpus has more")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", nargs="?", type=Path, help="parquet with a column text, or a folder of text files")
    parser.add_argument("--work", type=Path, help="keep `dataset` and `library` in this folder, for megatron_shards.py")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        corpus = arguments.corpus or copy_library(work / "library")
        kind = "files" if corpus.is_dir() else "lines"
        tokenmill.prepare(str(corpus), work / "dataset", workers=WORKERS, documents=kind)
        count = compare(work / "dataset", documents_of(corpus))
    version = importlib.metadata.version("tiktoken")
    found("tiktoken", version, READS, 16, count.documents, count.tokens, "its ids, document by document")


if __name__ == "__main__":
    main()
