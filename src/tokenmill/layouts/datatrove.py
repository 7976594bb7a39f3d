"""datatrove: `{split}/00000_tokens.ds` of raw tokens, its `.ds.index` of document ends, its `.ds.metadata`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tokenmill.data.bare import Hints, open_bare
from tokenmill.data.dataset import Dataset, TokenSplit
from tokenmill.layouts.shape import Export, Facts, Files, Options, Part, filled_splits
from tokenmill.layouts.stream import TokenStream, cut_at_documents, lengths_by_block

SUMMARY = ".ds files of raw tokens with an index of documents"
OPTIONS = frozenset({"name", "shard_size"})
NEEDS: frozenset[str] = frozenset()
WIDTHS = (2, 4)

SHARD_TOKENS = 1 << 28


def plan(source: Dataset, options: Options) -> Export:
    name = options.name or "tokens"
    tokenizer = source.manifest.tokenizer["name"]
    return Export(
        parts=tuple(
            _part(f"{split_name}/{number:05d}_{name}.ds", split, bounds, tokenizer)
            for split_name, split in filled_splits(source).items()
            for number, bounds in enumerate(cut_at_documents(split, options.shard_size or SHARD_TOKENS))
        )
    )


def open(path: str, hints: Hints) -> Dataset:
    return open_bare(path, replace(hints, layout="datatrove"))


def _part(name: str, split: TokenSplit, bounds: tuple[int, int], tokenizer: str) -> Part:
    start, stop = bounds
    stream = TokenStream(split)

    def write(files: Files) -> Facts:
        output = files.create(name)
        for data in stream.data(start, stop):
            output.write(data)
        index = files.create(f"{name}.index")
        end = 0
        for lengths in lengths_by_block(split, start, stop):
            ends = np.cumsum(lengths) + end
            index.write(ends.astype("<u8").tobytes())
            end = int(ends[-1])
        about = files.create(f"{name}.metadata")
        about.write(f"{tokenizer}|{stream.itemsize}\n{stop - start}\n{_for_people(stop - start)}".encode())
        return {}

    return Part(name=name, num_bytes=(stop - start) * stream.itemsize, write=write)


def _for_people(num_tokens: int) -> str:
    """Three digits and a prefix, as datatrove writes them: `1.23 MT`."""
    power = len(str(num_tokens)) - 1
    return f"{num_tokens / 10 ** (power // 3 * 3):.{2 - power % 3}f} {('', 'k', 'M', 'G', 'T')[power // 3]}T"
