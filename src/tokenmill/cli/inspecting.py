"""What `tokenmill inspect` tells of a dataset."""

from __future__ import annotations

from typing import Any

from tokenmill import manifest as manifests
from tokenmill import placement
from tokenmill.cli.show import nodes_record
from tokenmill.data.dataset import open as open_dataset
from tokenmill.errors import RecipeError
from tokenmill.storage import open_folder

SHOWN_IDS = 20


def describe(path: str) -> dict[str, Any]:
    """A dataset in numbers, and which node has what of it. Where no part of it is, that alone."""
    folder = open_folder(path)
    nodes = nodes_record(placement.load(folder)) if folder.is_local else {}
    if nodes and not folder.exists(manifests.NAME):
        return {"path": folder.path, **nodes}
    manifest = open_dataset(path).manifest
    return {
        **nodes,
        "path": folder.path,
        "fingerprint": manifest.fingerprint,
        "tokenizer": manifest.tokenizer,
        "parity": manifest.parity,
        "dtype": manifest.dtype,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "documents_read": manifest.documents_read,
        "dropped": manifest.dropped,
        "sources": len(manifest.sources),
        "bytes": sum(digest.bytes for digest in manifest.all_files().values()),
        "splits": {
            name: {"tokens": split.tokens, "documents": split.documents, "shards": len(split.shards)}
            for name, split in manifest.splits.items()
        },
    }


def first_texts(path: str, split: str | None, count: int) -> tuple[str, list[str]]:
    """The first documents of a split, decoded; as ids where no tokenizer is known. Tells which split it is."""
    from tokenmill.tokenizer.engine import open_engine
    from tokenmill.tokenizer.spec import from_dataset

    dataset = open_dataset(path)
    split = split or next((name for name in ("train", *dataset.splits) if name in dataset.splits), "train")
    if split not in dataset.splits:
        raise RecipeError(f"there is no split {split!r}", hint=f"there are {', '.join(dataset.splits)}")
    description = dataset.manifest.tokenizer
    documents = (dataset[split].document(i) for i in range(min(count, dataset[split].num_documents)))
    if description["kind"] == "unknown":
        return split, [" ".join(map(str, tokens[:SHOWN_IDS].tolist())) for tokens in documents]
    content = open_folder(dataset.path).read(description["file"]) if description["file"] else None
    engine = open_engine(from_dataset(description, content))
    return split, [engine.decode(tokens[tokens != description["eot_id"]]) for tokens in documents]
