"""nanoGPT: `train.bin` and `val.bin`, raw uint16 tokens, every document followed by the end of text.

A dataset that was prepared with `--split nanogpt` is exported in the order of nanoGPT's own script, byte for byte. A
character-level dataset gets `meta.pkl` beside it, as nanoGPT reads it, and the same content as `meta.json`.

Documents in another order are gathered from the maps, chunk by chunk. Their ends are held in memory, eight bytes a
document; the tokens are not.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.bin_idx import numpy_dtype
from tokenmill.dataset.dataset import Dataset, Starts, TokenSplit
from tokenmill.errors import DatasetError
from tokenmill.formats.base import (
    GPT2_EOT,
    DetectedFiles,
    Export,
    FormatTraits,
    Hints,
    Options,
    Outline,
    TokenFile,
    TokenStream,
    file_part,
    filled_splits,
)
from tokenmill.formats.files import DTYPE_HINT, map_token_file, names_in, size_of
from tokenmill.permutation import make_key, permute
from tokenmill.storage.local import Folder

TRAITS = FormatTraits(options={"order", "seed"}, needs={"eot", "uint16"})

CHUNK_DOCUMENTS = 1 << 14
# From nanoGPT's script: the share of validation documents, and the seed with which they are selected.
TEST_SIZE = 0.0005
SEED = 2357


def detect(path: str, hints: Hints) -> DetectedFiles | None:
    """A raw .bin, or a folder with train.bin or val.bin, and perhaps others."""
    if os.path.isfile(path):
        paths = {"train": path} if path.endswith(".bin") else {}
    else:
        paths = {name[:-4]: f"{path}/{name}" for name in names_in(path) if name.endswith(".bin")}
        if not {"train", "val"} & paths.keys():
            return None
    dtype = hints.stored_dtype(default="uint16", where=path)
    files = {}
    for split, one in paths.items():
        size = size_of(one)
        count, rest = divmod(size, numpy_dtype(dtype).itemsize)
        if rest or not count:
            raise DatasetError(f"{one}: {size} bytes are not tokens of {dtype}", hint=DTYPE_HINT)
        files[split] = [TokenFile(path=one, offset=0, num_tokens=count)]
    if not files:
        return None
    eot_id = hints.eot_id
    if eot_id is None and dtype == "uint16":
        last = {int(map_token_file(parts[0], dtype)[-1]) for parts in files.values()}
        eot_id = GPT2_EOT if last == {GPT2_EOT} else None
    eot = "none" if eot_id is None else "append"
    return DetectedFiles(layout="nanogpt", dtype=dtype, eot=eot, eot_id=eot_id, files=files)


def check(_options: Options, _: Outline) -> None:
    """Any dataset with an end of text can be exported."""


def write(source: Dataset, options: Options) -> Export:
    return Export(
        parts=tuple(
            file_part(f"{name}.bin", 2 * split.num_tokens, _reading(source, name, options))
            for name, split in filled_splits(source).items()
        ),
        finish=lambda _: _meta(source),
    )


def _reading(source: Dataset, name: str, options: Options) -> Callable[[], Iterator[memoryview]]:
    """How the tokens of a split are read: in order, shuffled by a seed, or in the order of nanoGPT's script."""
    split = source[name]
    if options.order == "shuffled":
        key = make_key("nanogpt", source.manifest.fingerprint, name, options.seed or 0)
        return lambda: shuffled(split, keyed_order(split, key))
    if options.order is None and source.manifest.identity.get("split") == "nanogpt":
        order = original_orders(source)[name]
        return lambda: shuffled(split, iter([order]))
    return lambda: TokenStream(split, "append").data(0, split.num_tokens)


def _meta(source: Dataset) -> Mapping[str, bytes]:
    """The vocabulary, for nanoGPT's character-level scripts."""
    about = source.manifest.tokenizer
    if about["kind"] != "char":
        return {}
    characters = [chr(point) for point in json.loads(Folder(source.path).read(about["file"]))]
    meta = {
        "vocab_size": about["vocab_size"],
        "itos": dict(enumerate(characters)),
        "stoi": {character: number for number, character in enumerate(characters)},
    }
    return {
        "meta.pkl": pickle.dumps(meta, protocol=4),
        "meta.json": json.dumps(meta, ensure_ascii=False, sort_keys=True).encode(),
    }


def shuffled(split: TokenSplit, order: Iterator[Starts]) -> Iterator[memoryview]:
    """The tokens of a split's documents in some order, as bytes. Each document ends with the end of text."""
    ends = split.document_ends(0, split.num_tokens)
    starts = np.concatenate(([0], ends[:-1]))
    for chunk in order:
        for at in range(0, len(chunk), CHUNK_DOCUMENTS):
            numbers = chunk[at : at + CHUNK_DOCUMENTS]
            yield memoryview(_gather(split, starts[numbers], ends[numbers]))


def keyed_order(split: TokenSplit, key: bytes) -> Iterator[Starts]:
    """Every document once, in an order that depends on a key."""
    count = len(split.document_ends(0, split.num_tokens))
    for at in range(0, count, CHUNK_DOCUMENTS):
        yield permute(np.arange(at, min(at + CHUNK_DOCUMENTS, count)), count, key)


def num_validation(num_documents: int) -> int:
    """How many documents nanoGPT's script holds out."""
    return int(np.ceil(TEST_SIZE * num_documents))


def original_permutation(num_documents: int) -> Starts:
    """The order of nanoGPT's script. The first `num_validation` documents are for validation."""
    return np.random.default_rng(SEED).permutation(num_documents)


def original_orders(source: Dataset) -> dict[str, Starts]:
    """The documents of each split of a dataset prepared with `--split nanogpt`, in the order of nanoGPT's script.

    Splits have their documents in the order of the sources, so the total number of documents determines the order.
    """
    kept = _kept(source)
    order = original_permutation(len(kept))
    num_val = num_validation(len(order))
    return {"val": _ranks(order[:num_val], kept), "train": _ranks(order[num_val:], kept)}


def _kept(source: Dataset) -> npt.NDArray[np.bool_]:
    """Which of the documents read are in the dataset. The provenance lists all of them, in order."""
    manifest = source.manifest
    if not manifest.dropped:
        return np.ones(manifest.documents_read, np.bool_)
    import pyarrow.parquet as pq

    names = sorted(name for name in manifest.files if name.startswith("provenance/"))
    reasons = [pq.read_table(f"{source.path}/{name}", columns=["dropped"])["dropped"] for name in names]
    return np.concatenate([reason.is_null().to_numpy() for reason in reasons])


def _ranks(chosen: Starts, kept: npt.NDArray[np.bool_]) -> Starts:
    """The rank of each kept document among all kept ones of `chosen`, sorted by number."""
    chosen = chosen[kept[chosen]]
    ranks = np.empty(len(chosen), np.int64)
    ranks[np.argsort(chosen)] = np.arange(len(chosen))
    return ranks


def _gather(split: TokenSplit, starts: Starts, ends: Starts) -> bytes:
    """Documents, joined. Joining slices of maps copies each byte once."""
    eot_first = split.eot == "prepend"
    slices = slices_of(split, starts, ends, skip=int(eot_first))
    if eot_first:
        eot = np.array([split.eot_id], numpy_dtype(split.dtype)).tobytes()
        return eot.join(slices) + eot
    return b"".join(slices)


def slices_of(split: TokenSplit, starts: Starts, ends: Starts, *, skip: int = 0) -> list[memoryview]:
    """The tokens of documents as bytes, without the first `skip` of each. Slices of maps, which are not copied."""
    itemsize = numpy_dtype(split.dtype).itemsize
    edges = np.array(split.token_ends)
    numbers = np.searchsorted(edges, starts, side="right")
    firsts = np.concatenate(([0], edges[:-1]))[numbers]
    begins, stops = (starts - firsts + skip) * itemsize, (ends - firsts) * itemsize
    maps = {number: split.shard_bytes(number) for number in set(numbers.tolist())}
    slices = list(map(lambda number, a, b: maps[number][a:b], numbers.tolist(), begins.tolist(), stops.tolist()))
    for at in np.flatnonzero(ends > edges[numbers]).tolist():  # it continues in the next file
        slices[at] = split.tokens(int(starts[at]) + skip, int(ends[at])).data.cast("B")
    return slices
