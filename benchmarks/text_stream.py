"""Streams from text: tokens a second with no, one and two processes that tokenize ahead, and of torch with tiktoken.

python benchmarks/text_stream.py [--corpus FILE ...] [--size 450MB] [--repeats 3] [--rows 64]

Batches of 64 x 1024 inputs and labels as int64, from parquet files and with GPT-2's tokenizer. Contenders take turns
within each repeat, and the table shows medians. The time begins with the first batch, since processes load their
libraries before it. Beside it are the seconds that cores were had for, by this process and by the pool: others that
use this machine disturb those less. From them follows how much faster two workers could be at most: one worker takes
the seconds of its pool, and two share the cores with the process that makes the batches. The bars are for two cores
that are otherwise idle. What most people write to tokenize as they train, tiktoken in an `IterableDataset` of torch, is
slower and stopped after some seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import tiktoken
import torch
from measure import (
    OTHER_LOAD,
    RANKS,
    Row,
    core_seconds,
    corpus_parser,
    descendants,
    format_table,
    machine_line,
    make_corpus,
    num_cores,
)
from tiktoken.load import load_tiktoken_bpe
from torch.utils import data as torch_data

import tokenmill
from tokenmill.tokenizers.parity import PATTERNS
from tokenmill.torch import TextDataset

SEQ_LEN = 1024
# Batches as numpy arrays or as tensors, and the number of processes that tokenize.
CONTENDERS = (("numpy", 0), ("numpy", 1), ("numpy", 2), ("torch", 1), ("torch", 2))
PEER_WORKERS = (0, 2)
PEER_SECONDS = 10.0
END_OF_TEXT = 50256


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens a second from the first batch to the last, and the core seconds of this process and of the pool."""

    tokens_per_second: float
    own: float
    pool: float


def stream_once(files: list[str], kind: str, workers: int, rows: int) -> Turn:
    make = tokenmill.stream if kind == "numpy" else TextDataset
    stream = make(files, "gpt2", SEQ_LEN, rows, workers=workers, epochs=1)
    before = OTHER_LOAD.now()
    batches = iter(stream)
    next(batches)
    processes = [process for process in descendants(os.getpid()) if process != os.getpid()]
    before_pool, pool, number = sum(map(core_seconds, processes)), 0.0, 0
    begin, own = time.perf_counter(), time.process_time()
    for number, _ in enumerate(batches, start=1):
        if number % 64 == 0:  # the pool is gone when the loop ends
            pool = sum(map(core_seconds, processes)) - before_pool
    seconds = time.perf_counter() - begin
    OTHER_LOAD.add(before, OTHER_LOAD.now())
    return Turn(number * rows * SEQ_LEN / seconds, time.process_time() - own, pool)


class Text(torch_data.IterableDataset[Any]):
    """Rows of tokens from files, which the workers divide."""

    def __init__(self, files: list[str]) -> None:
        self._files = files

    def __iter__(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        ranks = load_tiktoken_bpe(RANKS)
        special = {"<|endoftext|>": END_OF_TEXT}
        encoding = tiktoken.Encoding("gpt2", pat_str=PATTERNS["gpt2"], mergeable_ranks=ranks, special_tokens=special)
        buffer: list[int] = []
        for file in self._files[info.id :: info.num_workers] if info else self._files:
            for group in pq.ParquetFile(file).iter_batches(columns=["text"]):
                for text in group["text"].to_pylist():
                    buffer += [*encoding.encode_ordinary(text), END_OF_TEXT]
                    count = (len(buffer) - 1) // SEQ_LEN
                    for begin in range(0, count * SEQ_LEN, SEQ_LEN):
                        row = torch.tensor(buffer[begin : begin + SEQ_LEN + 1])
                        yield row[:-1], row[1:]
                    del buffer[: count * SEQ_LEN]


def peer_once(files: list[str], workers: int, rows: int) -> float:
    """Tokens a second of torch's DataLoader with tiktoken, from the first batch on."""
    batches = iter(torch_data.DataLoader(Text(files), batch_size=rows, num_workers=workers, drop_last=True))
    next(batches)
    begin = time.perf_counter()
    count = 0
    for _ in batches:
        count += 1
        if time.perf_counter() > begin + PEER_SECONDS:
            break
    return count * rows * SEQ_LEN / (time.perf_counter() - begin)


def main() -> None:
    parser = corpus_parser(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--no-peer", action="store_true", help="leave tiktoken out")
    given = parser.parse_args()
    sys.stdout.write(f"{machine_line()}\n")
    turns: dict[tuple[str, int], list[Turn]] = defaultdict(list)
    peers: dict[int, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        corpus = make_corpus(Path(place), given.size, given.corpus)
        for _ in range(given.repeats):
            for kind, workers in CONTENDERS:
                turns[kind, workers].append(stream_once(corpus.parquet, kind, workers, given.rows))
            for workers in () if given.no_peer else PEER_WORKERS:
                peers[workers].append(peer_once(corpus.parquet, workers, given.rows))
    rates = {contender: median(turn.tokens_per_second for turn in found) for contender, found in turns.items()}
    for (kind, workers), found in turns.items():
        own, pool = median(turn.own for turn in found), median(turn.pool for turn in found)
        sys.stdout.write(
            f"  {kind}, workers={workers}  {rates[kind, workers] / 1e6:6.1f} M tokens/s"
            f"  cores {own:5.2f} s here, {pool:5.2f} s pool\n"
        )
    sys.stdout.write(f"  others used {OTHER_LOAD.cores:.2f} cores meanwhile\n")
    for kind in ("numpy", "torch"):
        limit = median(num_cores() * turn.pool / (turn.own + turn.pool) for turn in turns[kind, 2])
        sys.stdout.write(f"  {kind}: with these core seconds, two workers give at most {limit:.2f} times one\n")
    rows = [
        Row(
            name=f"two workers, {kind}",
            what="tokens a second beside one worker",
            ours=f"{rates[kind, 2] / 1e6:.1f} M/s",
            peer=f"{rates[kind, 1] / 1e6:.1f} M/s",
            figure=rates[kind, 2] / rates[kind, 1],
            bar=1.7,
            at_least=True,
            raw={str(workers): [asdict(turn) for turn in turns[kind, workers]] for workers in (1, 2)},
        )
        for kind in ("numpy", "torch")
    ]
    rows += [
        Row(
            name=f"{workers} workers",
            what=f"tokens a second beside tiktoken in torch, {workers} workers",
            ours=f"{rates['numpy', workers] / 1e6:.1f} M/s",
            peer=f"{median(found) / 1e6:.1f} M/s",
            figure=rates["numpy", workers] / median(found),
            bar=5,
            at_least=True,
            raw={"peer": found},
        )
        for workers, found in peers.items()
    ]
    sys.stdout.write(f"{format_table(rows)}\n")


if __name__ == "__main__":
    main()
