"""The way nanoGPT prepares OpenWebText, in our own words, on local parquet files.

python benchmarks/nanogpt_recipe.py RANKS OUTPUT FILES...

Load with `datasets`, split off 0.05 % for validation, encode document by document with tiktoken in
two processes, save that as a checkpoint, then copy 1024 contiguous shards one by one into a memory
map of uint16.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from datasets import Dataset, load_dataset
from tiktoken_ext.openai_public import r50k_pat_str

EOT = 50256
NUM_PROC = 2
NUM_SHARDS = 1024


def gpt2(ranks: str) -> tiktoken.Encoding:
    pairs = (line.split() for line in Path(ranks).read_bytes().splitlines())
    return tiktoken.Encoding(
        name="gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in pairs},
        special_tokens={"<|endoftext|>": EOT},
    )


def tokenize(dataset: Dataset, ranks: str) -> Dataset:
    """Columns `ids` and `len` in place of the text."""
    encoding: list[tiktoken.Encoding] = []

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        if not encoding:  # once in each process, for an Encoding of other ranks does not travel
            encoding.append(gpt2(ranks))
        ids = encoding[0].encode_ordinary(row["text"])
        ids.append(EOT)
        return {"ids": ids, "len": len(ids)}

    return dataset.map(encode, remove_columns=dataset.column_names, num_proc=NUM_PROC)


def write_tokens(split: Dataset, path: Path) -> int:
    """The ids end to end in one file."""
    total = int(np.sum(split["len"], dtype=np.uint64))
    tokens = np.memmap(path, np.uint16, mode="w+", shape=(total,))
    num_shards = min(NUM_SHARDS, len(split))
    at = 0
    for index in range(num_shards):
        shard = split.shard(num_shards=num_shards, index=index, contiguous=True).with_format("numpy")
        ids = np.concatenate(shard["ids"])
        tokens[at : at + len(ids)] = ids
        at += len(ids)
    tokens.flush()
    return total


def main(ranks: str, output: Path, files: list[str]) -> None:
    output.mkdir(parents=True)
    whole = load_dataset("parquet", data_files=files, split="train")
    documents = len(whole)
    splits = whole.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    tokens = 0
    for source, name in (("train", "train"), ("test", "val")):
        encoded = tokenize(splits[source], ranks)
        encoded.save_to_disk(str(output / "checkpoint" / name))
        tokens += write_tokens(encoded, output / f"{name}.bin")
    print(json.dumps({"documents": documents, "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
