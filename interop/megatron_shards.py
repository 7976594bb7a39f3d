"""Does Megatron-core read our shards as they are? Its own IndexedDataset against numpy and tiktoken.

python interop/megatron_shards.py DATASET CORPUS
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiktoken
from megatron.core.datasets.indexed_dataset import IndexedDataset
from reference import Count, documents_of, expected_ids, gpt2, shard_prefixes
from results import READS, found, stop


def check_shard(prefix: Path, encoding: tiktoken.Encoding, documents: Iterator[str], count: Count) -> None:
    """Every document of a shard, as Megatron reads it."""
    shard = IndexedDataset(str(prefix))
    tokens = np.memmap(prefix.with_suffix(".bin"), np.uint16, mode="r")
    if shard.index.dtype is not np.uint16:
        stop(f"{prefix}: Megatron reads {shard.index.dtype}, not uint16")
    if not np.array_equal(shard.document_indices, np.arange(len(shard) + 1)):
        stop(f"{prefix}: document_indices are not one document a sequence")
    if int(shard.sequence_lengths.sum(dtype=np.int64)) != len(tokens):
        stop(f"{prefix}: sequence_lengths sum to {shard.sequence_lengths.sum()}, the .bin has {len(tokens)} tokens")
    at = 0
    for index, length in enumerate(shard.sequence_lengths.tolist()):
        tokens_read = shard[index]
        text = next(documents, None)
        if text is None:
            stop(f"{prefix}: sequence {index} comes after the last document of the corpus")
        if tokens_read.dtype != np.uint16 or not np.array_equal(tokens_read, tokens[at : at + length]):
            stop(f"{prefix}: sequence {index} is not what numpy reads at token {at}")
        if not np.array_equal(tokens_read, expected_ids(encoding, text)):
            stop(f"{prefix}: sequence {index} is not what tiktoken gives for document {count.documents}")
        at += length
        count.documents += 1
        count.tokens += length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dataset", type=Path, help="a dataset that tokenmill prepared from the corpus, without a split")
    parser.add_argument("corpus", type=Path, help="parquet with a column text, or a folder of text files")
    arguments = parser.parse_args()
    encoding, documents, count = gpt2(), documents_of(arguments.corpus), Count()
    prefixes = shard_prefixes(arguments.dataset)
    for prefix in prefixes:
        check_shard(prefix, encoding, documents, count)
    if next(documents, None) is not None:
        stop(f"the dataset ends after {count.documents} documents, the corpus has more")
    version = importlib.metadata.version("megatron-core")
    found("megatron-core", version, READS, 16, count.documents, count.tokens, "native shards, all equal")


if __name__ == "__main__":
    main()
