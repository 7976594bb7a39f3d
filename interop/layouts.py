"""Do the trainers' own readers find the same documents and tokens in what `tokenmill export` wrote?

python interop/layouts.py DATASET EXPORTS

DATASET is the dataset that was exported; EXPORTS has a folder for each layout, and `PEER-made` folders are made beside
them by the peers' own writers, for `tokenmill import`. Imports nothing of tokenmill.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from reference import shard_prefixes
from results import READS, WRITES, found, stop

SEQ_LEN = 1024
Documents = list[npt.NDArray[np.int64]]


def native_documents(dataset: Path, split: str) -> Documents:
    """The documents of a dataset's own shards, by their index, with numpy alone."""
    documents: Documents = []
    for prefix in shard_prefixes(dataset, split):
        index = prefix.with_suffix(".idx").read_bytes()
        code, count = index[17], int.from_bytes(index[18:26], "little")
        tokens = np.fromfile(prefix.with_suffix(".bin"), {8: "<u2", 4: "<i4"}[code])
        lengths = np.frombuffer(index, "<i4", count, 34)
        documents += [part.astype(np.int64) for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    return documents


def equal(ours: Documents, theirs: Documents, who: str, bits: int, result: str) -> None:
    if len(ours) != len(theirs):
        stop(f"{who}: {len(theirs)} documents, not {len(ours)}")
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if not np.array_equal(mine, other):
            stop(f"{who}: document {number} differs")
    found(who, version(who), READS, bits, len(ours), sum(map(len, ours)), result)


def version(who: str) -> str:
    """Of a peer that is installed; others are rules, in numpy."""
    try:
        return importlib.metadata.version(who)
    except importlib.metadata.PackageNotFoundError:
        return "rules"


def megatron(folder: Path, split: str) -> Documents:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents: Documents = []
    for path in sorted(folder.glob(f"{split}*_document.idx")):
        shard = IndexedDataset(str(path.with_suffix("")))
        documents += [np.asarray(shard[i], np.int64) for i in range(len(shard))]
    return documents


def datatrove(folder: Path, split: str, token_size: int) -> npt.NDArray[np.int64]:
    """Tokens as datatrove's own dataset gives them, window after window; what fills no window is not read."""
    from datatrove.utils.dataset import DatatroveFileDataset

    windows = []
    for path in sorted((folder / split).glob("*.ds")):
        data = DatatroveFileDataset(str(path), seq_len=31, token_size=token_size)
        windows += [data[i]["input_ids"].numpy().astype(np.int64) for i in range(len(data))]
    return np.concatenate(windows)


def datatrove_expected(folder: Path, split: str, kind: str) -> npt.NDArray[np.int64]:
    parts = [np.fromfile(path, kind) for path in sorted((folder / split).glob("*.ds"))]
    return np.concatenate([part[: len(part) // 32 * 32] for part in parts]).astype(np.int64)


def datatrove_writes(documents: Documents, folder: Path, tokenizer: str, token_size: int) -> None:
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    folder.mkdir(parents=True)
    file = TokenizedFile(
        str(folder),
        "00000_tokens.ds",
        token_size=token_size,
        tokenizer_name_or_path=tokenizer,
        save_final_metadata=True,
    )
    for document in documents:
        file.write(document.tolist(), None)
    file.close()


def megatron_writes(documents: Documents, folder: Path, name: str, wide: bool) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.int32 if wide else np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(folder / f"{name}.idx"))


def same_files(theirs: Path, ours: Path, who: str, bits: int, documents: Documents) -> None:
    """What a peer's own writer made must be what the export made, byte for byte."""
    names = [str(path.relative_to(theirs)) for path in sorted(theirs.rglob("*")) if path.is_file()]
    for name in names:
        if (theirs / name).read_bytes() != (ours / name).read_bytes():
            stop(f"{who}'s own writer gives another {name}")
    result = f"{len(names)} files, byte for byte"
    found(who, version(who), WRITES, bits, len(documents), sum(map(len, documents)), result)


def olmo(folder: Path, split: str, kind: type[np.unsignedinteger], eot: int) -> Documents:
    """Documents as OLMo-core finds them by the end of text, and tokens as it slices them."""
    from olmo_core.data.utils import iter_document_indices, load_array_slice

    documents: Documents = []
    for path in sorted((folder / split).glob("*.npy")):
        by_table = list(iter_document_indices(str(path), eos_token_id=eot, dtype=kind, use_array_if_local=False))
        by_eot = list(iter_document_indices(str(path), eos_token_id=eot, dtype=kind, use_array_if_local=True))
        if [tuple(map(int, pair)) for pair in by_table] != [tuple(map(int, pair)) for pair in by_eot]:
            stop(f"{path}: OLMo-core finds other documents by the table than by the end of text")
        documents += [load_array_slice(str(path), int(a), int(b), kind).astype(np.int64) for a, b in by_eot]
    return documents


def llmc(folder: Path, split: str) -> Documents:
    """llm.c's rules: 256 numbers of header, the length to the byte, a document at every end of text."""
    kinds = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
    parts = []
    for path in sorted(folder.glob(f"*{split}_*.bin")):
        head = np.fromfile(path, "<i4", 256)
        kind = kinds.get((int(head[0]), int(head[1])))
        if kind is None or path.stat().st_size != 1024 + int(head[2]) * np.dtype(kind).itemsize or head[3:].any():
            stop(f"{path}: not a shard of llm.c's: {head[:4]}")
        parts.append(np.fromfile(path, kind, offset=1024).astype(np.int64))
    tokens = np.concatenate(parts)
    return np.split(tokens, np.flatnonzero(tokens == tokens[0])[1:])


def templar(folder: Path) -> Documents:
    """Templar's rules: real .npy shards, end to end in tokens.bin; an id of eight bytes of BLAKE2b for every sample."""
    shards = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("train_*.npy"))]
    if len({len(shard) for shard in shards[:-1]}) > 1:
        stop(f"{folder}: shards of several sizes")
    tokens = np.fromfile(folder / "tokens.bin", shards[0].dtype)
    if not np.array_equal(tokens, np.concatenate(shards)):
        stop(f"{folder}: tokens.bin is not its shards")
    samples = tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].reshape(-1, SEQ_LEN)
    ids = [hashlib.blake2b(sample.tobytes(), digest_size=8).digest() for sample in samples]
    if b"".join(ids) != (folder / "sample_ids.bin").read_bytes():
        stop(f"{folder}: other sample ids")
    return np.split(tokens.astype(np.int64), np.flatnonzero(tokens == tokens[-1])[:-1] + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("exports", type=Path)
    arguments = parser.parse_args()
    manifest = json.loads((arguments.dataset / "dataset.json").read_bytes())
    eot, wide = manifest["tokenizer"]["eot_id"], manifest["dtype"] != "uint16"
    size, kind = (4, np.uint32) if wide else (2, np.uint16)
    bits, exports = 8 * size, arguments.exports
    splits = {
        name: native_documents(arguments.dataset, name) for name, split in manifest["splits"].items() if split["tokens"]
    }
    for split, ours in splits.items():
        first = [np.concatenate(([eot], document[:-1])) for document in ours]
        equal(ours, megatron(exports / "megatron", split), "megatron-core", bits, split)
        equal(ours, olmo(exports / "olmo", split, kind, eot), "ai2-olmo-core", bits, f"{split}, by table and by EOT")
        equal(first, llmc(exports / "llmc", split), "llm.c", bits, split)
        if split == "train":
            equal(ours, templar(exports / "templar"), "Templar", bits, "train, with sample ids")
        windows = datatrove(exports / "datatrove", split, size)
        if not np.array_equal(windows, datatrove_expected(exports / "datatrove", split, np.dtype(kind).str)):
            stop(f"datatrove: tokens of {split} differ")
        found("datatrove", version("datatrove"), READS, bits, len(ours), len(windows), f"{split}, in whole windows")
    for split, ours in splits.items():
        datatrove_writes(ours, exports / "datatrove-made" / split, manifest["tokenizer"]["name"], size)
        megatron_writes(ours, exports / "megatron-made", f"{split}_text_document", wide)
    everything = [document for ours in splits.values() for document in ours]
    for layout, who in (("datatrove", "datatrove"), ("megatron", "megatron-core")):
        same_files(exports / f"{layout}-made", exports / layout, who, bits, everything)


if __name__ == "__main__":
    main()
