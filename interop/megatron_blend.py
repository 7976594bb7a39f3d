"""Does Megatron-core blend our shards as they are? Its own BlendedDataset against numpy.

python interop/megatron_blend.py DATASET DATASET

The first shards of two datasets, 0.7 and 0.3, as `--data-path 0.7 PREFIX 0.3 PREFIX` gives them to Megatron-LM.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from reference import shard_prefixes
from results import READS, found, stop

SEQ_LEN, NUM_SAMPLES, WEIGHTS = 128, 400, (0.7, 0.3)


class Tokenizer:
    """What GPTDataset asks of one."""

    vocab_size, eod, pad, unique_identifiers = 50257, 50256, 50256, {"name": "gpt2"}


def blend(prefixes: list[Path], cache: str) -> Any:
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ_LEN,
        blend_per_split=[([str(prefix) for prefix in prefixes], list(WEIGHTS)), None, None],
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [NUM_SAMPLES, 0, 0], lambda: True, config).build()[0]


def windows(prefix: Path, part: Any) -> npt.NDArray[Any]:
    """The samples of a part in its order: its documents, as shuffled by Megatron, cut by numpy."""
    tokens = np.memmap(prefix.with_suffix(".bin"), np.uint16, mode="r")
    lengths = np.frombuffer(prefix.with_suffix(".idx").read_bytes(), np.int32, len(part.dataset), 34)
    ends = np.cumsum(lengths, dtype=np.int64)
    text = np.concatenate([tokens[ends[one] - lengths[one] : ends[one]] for one in part.document_index])
    rows = np.lib.stride_tricks.sliding_window_view(text, SEQ_LEN + 1)[::SEQ_LEN]
    return rows[part.shuffle_index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("datasets", type=Path, nargs=2, help="datasets that tokenmill prepared")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    prefixes = [shard_prefixes(dataset)[0] for dataset in parser.parse_args().datasets]
    with tempfile.TemporaryDirectory() as cache:
        blended = blend(prefixes, cache)
        expected = [windows(prefix, part) for prefix, part in zip(prefixes, blended.datasets, strict=True)]
        taken = np.zeros(2, np.int64)
        for number in range(NUM_SAMPLES):
            sample = blended[number]
            part = sample["dataset_id"]
            row = expected[part][taken[part]].astype(np.int64)
            if not np.array_equal(sample["tokens"], row[:-1]) or not np.array_equal(sample["labels"], row[1:]):
                stop(f"sample {number} is not sample {taken[part]} of {prefixes[part]}")
            taken[part] += 1
            if np.abs(taken - np.multiply(WEIGHTS, number + 1)).max() > 1:
                stop(f"after {number + 1} samples the counts are {taken.tolist()}, the weights {WEIGHTS}")
    version = importlib.metadata.version("megatron-core")
    found("megatron-core", version, READS, 16, NUM_SAMPLES, NUM_SAMPLES * SEQ_LEN, "a blend of two shards, all equal")


if __name__ == "__main__":
    main()
