"""What nobody has at hand: a listing of a million sources, and a manifest of a million shards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tokenmill.dataset import manifest
from tokenmill.dataset.manifest import Manifest, Shard, Split
from tokenmill.records import make_table
from tokenmill.sources.base import Source
from tokenmill.storage.output import Digest
from tokenmill.tokenizers.spec import resolve

DOCUMENTS_A_SHARD = 100_000
TOKENS_A_SHARD = 100_000_000


def made_up_sources(count: int) -> Sequence[Source]:
    return make_table(
        Source,
        (
            Source(
                name=f"crawl-{number // 1000:04d}/part-{number:07d}.jsonl.zst",
                kind="jsonl",
                compression="zst",
                bytes=16_000_000 + number,
                modified=1_700_000_000_000_000_000 + number,
                split="",
                text={"column": "text"},
            )
            for number in range(count)
        ),
    )


def made_up_manifest(num_shards: int) -> Manifest:
    """All shards in one split, each with digests of its own: they are most of what a manifest holds."""
    shards = make_table(Shard, map(_shard, range(num_shards)))
    documents = num_shards * DOCUMENTS_A_SHARD
    train = Split(tokens=num_shards * TOKENS_A_SHARD, documents=documents, shards=shards)
    return Manifest(
        format=manifest.FORMAT,
        fingerprint="0" * 64,
        identity={},
        tokenizer=resolve("byte").describe(),
        parity={},
        dtype="uint16",
        splits={"train": train},
        documents_read=documents,
        dropped={},
        text_sum="0" * 32,
        sources=(),
        files={},
    )


def _shard(number: int) -> Shard:
    name = f"train/{number:05d}"
    return Shard(
        name=name,
        tokens=TOKENS_A_SHARD,
        documents=DOCUMENTS_A_SHARD,
        bin=_digest(f"{name}.bin", 2 * TOKENS_A_SHARD),
        idx=_digest(f"{name}.idx", 42 + 20 * DOCUMENTS_A_SHARD),
    )


def _digest(name: str, size: int) -> Digest:
    return Digest(bytes=size, sha256=hashlib.sha256(name.encode()).hexdigest())
