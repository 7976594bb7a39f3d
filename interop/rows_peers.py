"""The layouts that store rows, the peers' side: each reads what we wrote, and writes the same itself.

python interop/rows_peers.py mds|litdata|huggingface|catid WORK

Runs in the environment of the peer, and knows nothing of tokenmill: what documents are is in tokens.npy and ends.npy.
Where a peer's writer always gives the same bytes, our files must have them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from results import READS, WRITES, found, stop

SEQ_LEN = 1024
SHARD_TOKENS = 1 << 22
EOTS = {"u16": 50256, "u32": 150256}
Documents = list[Any]


def documents_of(folder: Path) -> Documents:
    return np.split(np.load(folder / "tokens.npy"), np.load(folder / "ends.npy")[:-1])


def rows_of(folder: Path) -> Documents:
    tokens = np.load(folder / "tokens.npy")
    return list(tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN))


def compare(what: str, given: Iterator[Any], expected: Documents) -> None:
    """Every row, in order."""
    count = 0
    for number, row in enumerate(given):
        if number >= len(expected) or not np.array_equal(np.asarray(row), expected[number]):
            stop(f"{what}: row {number}")
        count += 1
    if count != len(expected):
        stop(f"{what}: {count} rows, not {len(expected)}")


def compare_files(what: str, ours: Path, theirs: Path, names: list[str]) -> None:
    """Byte for byte."""
    for name in names:
        if (ours / name).read_bytes() != (theirs / name).read_bytes():
            stop(f"{what}: {name} is not what the peer writes")


def tell(peer: str, direction: str, kind: str, rows: Documents, result: str) -> None:
    """A line of the table."""
    version = importlib.metadata.version(peer)
    found(peer, version, direction, int(kind.removeprefix("u")), len(rows), sum(map(len, rows)), result)


def mds(folder: Path, kind: str) -> None:
    from streaming import MDSWriter, StreamingDataset

    for suffix, rows, encoding in (
        ("", documents_of(folder), "ndarray:int32"),
        ("-packed", rows_of(folder), f"ndarray:int32:{SEQ_LEN}"),
    ):
        ours, theirs = folder / "ours" / f"mds{suffix}" / "train", folder / "theirs" / f"mds{suffix}" / "train"
        read = StreamingDataset(local=str(ours), shuffle=False, batch_size=1)
        compare(f"mds{suffix}", (read[number]["tokens"] for number in range(len(read))), rows)
        with MDSWriter(
            columns={"tokens": encoding}, out=str(theirs), hashes=["sha256"], size_limit=4 * SHARD_TOKENS
        ) as writer:
            for row in rows:
                writer.write({"tokens": row})
        names = sorted(path.name for path in theirs.iterdir())
        compare_files("mds", ours, theirs, names)
        rows_are = "packed rows" if suffix else "a sample a document"
        tell("mosaicml-streaming", READS, kind, rows, rows_are)
        tell("mosaicml-streaming", WRITES, kind, rows, f"{rows_are}: {len(names)} files, byte for byte")
        if not suffix:
            with MDSWriter(
                columns={"id": "str", "tokens": encoding, "n": "int"}, out=f"{theirs.parent}-more"
            ) as writer:
                for number, row in enumerate(rows):
                    writer.write({"id": f"no. {number}", "tokens": row, "n": number})


def give(row: Any) -> Iterator[Any]:
    """An item of litData's."""
    import torch

    yield torch.from_numpy(row)


def litdata(folder: Path, kind: str) -> None:
    from litdata import StreamingDataset, TokensLoader, optimize

    documents = documents_of(folder)
    ours, theirs = folder / "ours" / "litdata" / "train", folder / "theirs" / "litdata" / "train"
    index = json.loads((ours / "index.json").read_bytes())
    block = 64
    expected, at = [], 0
    tokens = np.concatenate(documents)
    for chunk in index["chunks"]:
        whole = chunk["dim"] // block * block  # it never gives what does not fill a block at the end of a chunk
        expected += list(tokens[at : at + whole].reshape(-1, block))
        at += chunk["dim"]
    read = StreamingDataset(str(ours), item_loader=TokensLoader(block_size=block), shuffle=False)
    compare("litdata", (row.numpy() for row in read), expected)
    stored = [row.astype(np.uint16 if kind == "u16" else np.int32) for row in documents]
    for name, rows in (("litdata", stored), ("litdata-int64", [row.astype(np.int64) for row in documents])):
        optimize(
            fn=give,
            inputs=rows,
            output_dir=str(folder / "theirs" / name / "train"),
            chunk_size=SHARD_TOKENS,
            num_workers=1,
            item_loader=TokensLoader(),
            reorder_files=False,
            keep_data_ordered=True,
            verbose=False,
        )
    names = [chunk["filename"] for chunk in index["chunks"]]
    compare_files("litdata", ours, theirs, names)
    their_index = json.loads((theirs / "index.json").read_bytes())
    for one in (index, their_index):
        one.pop("updated_at")
    if index != their_index:
        stop(f"litdata: index.json is {index['config']}, not {their_index['config']}")
    tell("litdata", READS, kind, documents, "in whole blocks")
    tell("litdata", WRITES, kind, documents, f"{len(names)} chunks, byte for byte")


def huggingface(folder: Path, kind: str) -> None:
    from datasets import Dataset, DatasetDict, load_dataset

    for suffix, rows in (("", documents_of(folder)), ("-packed", rows_of(folder))):
        ours, theirs = folder / "ours" / f"huggingface{suffix}", folder / "theirs"
        read = load_dataset(str(ours))["train"].with_format("numpy")
        compare(f"huggingface{suffix}", (row["input_ids"] for row in read), rows)
        tell("datasets", READS, kind, rows, "packed rows" if suffix else "a row a document")
        made = Dataset.from_dict({"text_number": list(range(len(rows))), "input_ids": rows})
        made.to_parquet(str(theirs / f"huggingface-parquet{suffix}" / "train-00000-of-00001.parquet"))
        DatasetDict(train=made).save_to_disk(str(theirs / f"huggingface-disk{suffix}"), num_shards={"train": 2})


def catid(folder: Path, kind: str) -> None:
    """Its loader shuffles, so documents are counted. On one core its writer keeps their order."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from catid_dataloader.catid_dataloader_wrapper import DataLoader, DataPreparation, DataVerifier, EpochConfig

    documents = [row[:-1] for row in documents_of(folder)]
    ours, theirs = folder / "ours" / "catid" / "train", folder / "theirs" / "catid" / "train"
    if not DataVerifier.verify(str(ours)):
        stop("catid: its verifier does not take our files")
    expected = Counter(row.tobytes() for row in documents)
    config = EpochConfig(seed0=1, seed1=2, micro_batch_size=1, context_size=1 << 15, min_data_length=1)
    given = Counter(row.tobytes() for row in _given(DataLoader(str(ours)), config))
    if given != expected:
        stop(f"catid: {(given - expected).total()} documents that are none, {(expected - given).total()} lost")
    theirs.mkdir(parents=True)
    writer = DataPreparation(str(theirs), byte_tokens=False)
    for row in documents:
        writer.write_tokens(row)
    writer.destroy()
    if not DataVerifier.verify(str(theirs)):
        stop("catid: its verifier does not take its own files")
    tell("catid_dataloader", READS, kind, documents, "by its verifier and its loader")


def _given(loader: Any, config: Any) -> Iterator[Any]:
    """Documents from the rows of its loader, put together again where they go on in the next one."""
    loader.begin_epoch(config)
    held: list[Any] = []
    while True:
        batch, goes_on, _, _ = loader.get_micro_batch()
        if batch is None:
            break
        row = batch[0]
        parts = np.split(row, np.flatnonzero(row == config.padding_token))
        parts = [part[part != config.padding_token] for part in parts]
        parts = [part for part in parts if len(part)]
        if not goes_on[0] and held:
            yield np.concatenate(held)
            held = []
        for number, part in enumerate(parts):
            if number and held:
                yield np.concatenate(held)
                held = []
            held.append(part)
    if held:
        yield np.concatenate(held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peer", choices=("mds", "litdata", "huggingface", "catid"))
    parser.add_argument("work", type=Path)
    arguments = parser.parse_args()
    check = {"mds": mds, "litdata": litdata, "huggingface": huggingface, "catid": catid}[arguments.peer]
    for kind in EOTS:
        check(arguments.work / kind, kind)


if __name__ == "__main__":
    main()
