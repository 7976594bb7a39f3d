"""Do the trainers' own readers find the same documents and tokens in what `tokenmill export` wrote?

python interop/layouts.py DATASET EXPORTS

DATASET is the dataset that was exported; EXPORTS has a folder for each layout, and `PEER-made` folders are made beside
them by the peers' own writers, for `tokenmill import`. Imports nothing of tokenmill.
"""

# ruff: noqa: T201 - a script prints

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from reference import shard_prefixes, stop

Documents = list[npt.NDArray[np.int64]]


def native_documents(dataset: Path, split: str) -> Documents:
    """The documents of a dataset's own shards, by their index, with numpy alone."""
    found: Documents = []
    for prefix in shard_prefixes(dataset, split):
        index = prefix.with_suffix(".idx").read_bytes()
        code, count = index[17], int.from_bytes(index[18:26], "little")
        tokens = np.fromfile(prefix.with_suffix(".bin"), {8: "<u2", 4: "<i4"}[code])
        lengths = np.frombuffer(index, "<i4", count, 34)
        found += [part.astype(np.int64) for part in np.split(tokens, np.cumsum(lengths)[:-1])]
    return found


def equal(ours: Documents, theirs: Iterator[npt.NDArray[np.int64]] | Documents, who: str) -> None:
    count = 0
    for count, (mine, found) in enumerate(zip(ours, theirs, strict=True), start=1):
        if not np.array_equal(mine, found):
            stop(f"{who}: document {count - 1} differs")
    print(f"{who}: {count:,} documents, {sum(map(len, ours)):,} tokens, all equal")


def megatron(folder: Path, split: str) -> Documents:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    found: Documents = []
    for path in sorted(folder.glob(f"{split}*_document.idx")):
        shard = IndexedDataset(str(path.with_suffix("")))
        found += [np.asarray(shard[i], np.int64) for i in range(len(shard))]
    return found


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


def same_files(theirs: Path, ours: Path, who: str) -> None:
    """What a peer's own writer made must be what the export made, byte for byte."""
    names = [str(path.relative_to(theirs)) for path in sorted(theirs.rglob("*")) if path.is_file()]
    for name in names:
        if (theirs / name).read_bytes() != (ours / name).read_bytes():
            stop(f"{who}'s own writer gives another {name}")
    print(f"{who}'s own writer: {len(names)} files, the same bytes")


def olmo(folder: Path, split: str, kind: type[np.unsignedinteger], eot: int) -> Documents:
    """Documents as OLMo-core finds them by the end of text, and tokens as it slices them."""
    from olmo_core.data.utils import iter_document_indices, load_array_slice

    found: Documents = []
    for path in sorted((folder / split).glob("*.npy")):
        by_table = list(iter_document_indices(str(path), eos_token_id=eot, dtype=kind, use_array_if_local=False))
        by_eot = list(iter_document_indices(str(path), eos_token_id=eot, dtype=kind, use_array_if_local=True))
        if [tuple(map(int, pair)) for pair in by_table] != [tuple(map(int, pair)) for pair in by_eot]:
            stop(f"{path}: OLMo-core finds other documents by the table than by the end of text")
        found += [load_array_slice(str(path), int(a), int(b), kind).astype(np.int64) for a, b in by_eot]
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("exports", type=Path)
    arguments = parser.parse_args()
    manifest = json.loads((arguments.dataset / "dataset.json").read_bytes())
    eot, wide = manifest["tokenizer"]["eot_id"], manifest["dtype"] != "uint16"
    size, kind = (4, np.uint32) if wide else (2, np.uint16)
    splits = [name for name, split in manifest["splits"].items() if split["tokens"]]
    version = importlib.metadata.version
    for split in splits:
        ours = native_documents(arguments.dataset, split)
        first = [np.concatenate(([eot], document[:-1])) for document in ours]
        about = f"{split}, {np.dtype(kind).name}"
        equal(
            ours, megatron(arguments.exports / "megatron", split), f"megatron-core {version('megatron-core')}, {about}"
        )
        equal(
            ours,
            olmo(arguments.exports / "olmo", split, kind, eot),
            f"ai2-olmo-core {version('ai2-olmo-core')}, {about}",
        )
        equal(first, llmc(arguments.exports / "llmc", split), f"llm.c's rules, {about}")
        found = datatrove(arguments.exports / "datatrove", split, size)
        if not np.array_equal(found, datatrove_expected(arguments.exports / "datatrove", split, np.dtype(kind).str)):
            stop(f"datatrove: tokens of {split} differ")
        print(f"datatrove {version('datatrove')}, {about}: {len(found):,} tokens in whole windows, all equal")
    for split in splits:
        ours = native_documents(arguments.dataset, split)
        name = manifest["tokenizer"]["name"]
        datatrove_writes(ours, arguments.exports / "datatrove-made" / split, name, size)
        megatron_writes(ours, arguments.exports / "megatron-made", f"{split}_text_document", wide)
    for who in ("datatrove", "megatron"):
        same_files(arguments.exports / f"{who}-made", arguments.exports / who, who)


if __name__ == "__main__":
    main()
