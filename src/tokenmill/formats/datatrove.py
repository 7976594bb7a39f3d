"""datatrove: `{split}/00000_tokens.ds` of raw tokens, `.ds.index` with the document ends, `.ds.metadata`."""

from __future__ import annotations

from typing import Any

import numpy as np

from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.errors import DatasetError
from tokenmill.formats.base import (
    DetectedFiles,
    Export,
    Facts,
    Files,
    FormatTraits,
    Hints,
    Options,
    OutputPart,
    TokenFile,
    TokenStream,
    check_nothing,
    cut_at_documents,
    filled_splits,
    lengths_by_block,
)
from tokenmill.formats.files import eot_policy, files_by_folder, mapped, size_of

TRAITS = FormatTraits(options={"name", "shard_size"}, document_bytes=8)

SHARD_TOKENS = 1 << 28


def detect(path: str, hints: Hints) -> DetectedFiles | None:
    """.ds files with their index: a file, or a folder. Folders in it are splits."""
    groups = files_by_folder(path, ".ds", ".ds.index")
    if not groups:
        return None
    files: dict[str, list[TokenFile]] = {}
    inner_ends: dict[str, list[Any]] = {}
    dtype = None
    for split, paths in groups.items():
        for one in paths:
            ends = mapped(f"{one}.index", "<u8")
            count = int(ends[-1]) if len(ends) else 0
            size = size_of(one)
            if not count or size not in (2 * count, 4 * count):
                raise DatasetError(
                    f"{one}: {size} bytes, but its index has {count} tokens", hint="is the file complete?"
                )
            mine = "uint16" if size == 2 * count else "int32"
            if dtype not in (None, mine):
                raise DatasetError(f"{path}: files of different dtypes", hint="open one of them")
            dtype = mine
            files.setdefault(split, []).append(TokenFile(path=one, offset=0, num_tokens=count))
            inner_ends.setdefault(split, []).append(ends[:-1])
    assert dtype is not None, "there is a file"
    eot = eot_policy(files, dtype, hints.eot_id, inner_ends, 1)
    return DetectedFiles(
        layout="datatrove", dtype=dtype, eot=eot, eot_id=hints.eot_id, files=files, inner_ends=inner_ends
    )


check = check_nothing


def write(source: Dataset, options: Options) -> Export:
    name = options.name or "tokens"
    tokenizer = source.manifest.tokenizer["name"]
    return Export(
        parts=tuple(
            _part(f"{split_name}/{number:05d}_{name}.ds", split, bounds, tokenizer)
            for split_name, split in filled_splits(source).items()
            for number, bounds in enumerate(cut_at_documents(split, options.shard_size or SHARD_TOKENS))
        )
    )


def _part(name: str, split: TokenSplit, bounds: tuple[int, int], tokenizer: str) -> OutputPart:
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
        about.write(f"{tokenizer}|{stream.itemsize}\n{stop - start}\n{_short_count(stop - start)}".encode())
        return {}

    return OutputPart(name=name, num_bytes=(stop - start) * stream.itemsize, write=write)


def _short_count(num_tokens: int) -> str:
    """Three digits and a unit, as datatrove writes them: `1.23 MT`."""
    power = len(str(num_tokens)) - 1
    return f"{num_tokens / 10 ** (power // 3 * 3):.{2 - power % 3}f} {('', 'k', 'M', 'G', 'T')[power // 3]}T"
