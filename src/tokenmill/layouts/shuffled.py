"""Documents in another order: gathered from the maps, run by run, never one token at a time.

The ends of a split's documents are held in memory, eight bytes each; its tokens are not.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tokenmill.data.dataset import Dataset, Starts, TokenSplit
from tokenmill.data.order import permute
from tokenmill.shards.layout import numpy_dtype

CHUNK_DOCUMENTS = 1 << 14
# nanoGPT's own script: this share for validation, drawn with this seed.
TEST_SIZE = 0.0005
SEED = 2357


def shuffled(split: TokenSplit, order: Iterator[Starts]) -> Iterator[memoryview]:
    """The tokens of a split's documents in some order, as bytes; each document ends with the end of text."""
    ends = split.document_ends(0, split.num_tokens)
    starts = np.concatenate(([0], ends[:-1]))
    for chunk in order:
        for at in range(0, len(chunk), CHUNK_DOCUMENTS):
            numbers = chunk[at : at + CHUNK_DOCUMENTS]
            yield memoryview(_gather(split, starts[numbers], ends[numbers]))


def keyed_order(split: TokenSplit, key: bytes) -> Iterator[Starts]:
    """Every document once, in an order that a key decides."""
    count = len(split.document_ends(0, split.num_tokens))
    for at in range(0, count, CHUNK_DOCUMENTS):
        yield permute(np.arange(at, min(at + CHUNK_DOCUMENTS, count)), count, key)


def num_validation(num_documents: int) -> int:
    """How many documents the original holds out."""
    return int(np.ceil(TEST_SIZE * num_documents))


def original_permutation(num_documents: int) -> Starts:
    """The original's order of all documents: the first `num_validation` are for validation, the others for training."""
    return np.random.default_rng(SEED).permutation(num_documents)


def original_orders(source: Dataset) -> dict[str, Starts]:
    """For each split of a dataset that was prepared with `--split nanogpt`: its documents in the original's order.

    The splits hold their documents in the order of the sources; the number of all of them tells the rest.
    """
    kept = _kept(source)
    order = original_permutation(len(kept))
    held = num_validation(len(order))
    return {"val": _ranks(order[:held], kept), "train": _ranks(order[held:], kept)}


def _kept(source: Dataset) -> npt.NDArray[np.bool_]:
    """Which of the documents that were read are in the dataset; the provenance has all of them, in order."""
    manifest = source.manifest
    if not manifest.dropped:
        return np.ones(manifest.documents_read, np.bool_)
    import pyarrow.parquet as pq

    names = sorted(name for name in manifest.files if name.startswith("provenance/"))
    reasons = [pq.read_table(f"{source.path}/{name}", columns=["dropped"])["dropped"] for name in names]
    return np.concatenate([reason.is_null().to_numpy() for reason in reasons])


def _ranks(chosen: Starts, kept: npt.NDArray[np.bool_]) -> Starts:
    """The place of each document that is kept among the chosen ones, were they in order."""
    chosen = chosen[kept[chosen]]
    ranks = np.empty(len(chosen), np.int64)
    ranks[np.argsort(chosen)] = np.arange(len(chosen))
    return ranks


def _gather(split: TokenSplit, starts: Starts, ends: Starts) -> bytes:
    """Documents end to end. Joining slices of maps copies each byte once."""
    itemsize = numpy_dtype(split.dtype).itemsize
    edges = np.array(split.token_ends)
    numbers = np.searchsorted(edges, starts, side="right")
    firsts = np.concatenate(([0], edges[:-1]))[numbers]
    turn = split.eot == "prepend"
    begins, stops = (starts - firsts + turn) * itemsize, (ends - firsts) * itemsize
    maps = {number: split.shard_bytes(number) for number in set(numbers.tolist())}
    slices = list(map(lambda number, a, b: maps[number][a:b], numbers.tolist(), begins.tolist(), stops.tolist()))
    for at in np.flatnonzero(ends > edges[numbers]).tolist():  # it goes on in the next file
        slices[at] = split.tokens(int(starts[at]) + turn, int(ends[at])).data.cast("B")
    if turn:
        end = np.array([split.eot_id], numpy_dtype(split.dtype)).tobytes()
        return end.join(slices) + end
    return b"".join(slices)
