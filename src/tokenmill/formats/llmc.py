"""llm.c and modded-nanogpt: `{name}_val_000000.bin`, `{name}_train_000001.bin`, ...

A shard is a header of 1024 bytes (256 numbers: magic, version, tokens, zeros) and the tokens. The end of text is the
first token of every document, and a document continues in the next shard. Numbers continue from validation to training.
"""

from __future__ import annotations

import itertools
import os
import struct

import numpy as np

from tokenmill.dataset.bin_idx import numpy_dtype
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.formats.base import (
    GPT2_EOT,
    DetectedFiles,
    Export,
    FormatTraits,
    Hints,
    Options,
    Outline,
    OutputPart,
    TokenFile,
    TokenStream,
    cut_anywhere,
    file_part,
    filled_splits,
    require_shard_size,
    require_train_and_val,
)
from tokenmill.formats.files import check_numbers, groups_by_name, head_of, map_token_file, names_in, size_of

_HEAD_BYTES = 12
HEADER_BYTES = 1024
# magic -> version, dtype, end of text
KINDS = {20240520: (1, "uint16", GPT2_EOT), 20240801: (7, "int32", 128000)}

TRAITS = FormatTraits(options={"name", "shard_size"}, needs={"eot"}, equal_shards=True)

SHARD_TOKENS = 10**8
MAX_FILE_BYTES = (1 << 31) - 1


def detect(path: str, hints: Hints) -> DetectedFiles | None:
    """Shards with llm.c's header: a file, or a folder of `NAME_train_000001.bin` and `NAME_val_000000.bin`."""
    if os.path.isfile(path):
        groups = {"train": [path]}
    else:
        groups = groups_by_name([f"{path}/{name}" for name in names_in(path) if name.endswith(".bin")])
    heads = {one: head_of(one, 12) for paths in groups.values() for one in paths}
    if not heads or not all(_has_magic(head) for head in heads.values()):
        return None
    kinds = {struct.unpack("<i", head[:4])[0] for head in heads.values()}
    if len(kinds) > 1:
        raise DatasetError(f"{path}: shards of different kinds: {sorted(kinds)}", hint="open one of them")
    for paths in groups.values():
        check_numbers(paths)
    version, dtype, usual = KINDS[kinds.pop()]
    files = {
        split: [_read_shard(one, heads[one], version, dtype) for one in sorted(paths)]
        for split, paths in groups.items()
    }
    eot_id = hints.eot_id
    if eot_id is None:
        first = {int(map_token_file(parts[0], dtype)[0]) for parts in files.values()}
        eot_id = usual if first == {usual} else None
    return DetectedFiles(
        layout="llmc", dtype=dtype, eot="none" if eot_id is None else "prepend", eot_id=eot_id, files=files
    )


def _has_magic(head: bytes) -> bool:
    return len(head) == _HEAD_BYTES and struct.unpack("<i", head[:4])[0] in KINDS


def _read_shard(path: str, head: bytes, version: int, dtype: str) -> TokenFile:
    _, found, count = struct.unpack("<iii", head)
    size = size_of(path)
    if found != version or size != HEADER_BYTES + count * numpy_dtype(dtype).itemsize or not count:
        raise DatasetError(
            f"{path}: version {found}, {count} tokens of {dtype} in {size} bytes",
            hint="is it complete, and in llm.c's format?",
        )
    return TokenFile(path=path, offset=HEADER_BYTES, num_tokens=count)


def check(options: Options, outline: Outline) -> None:
    require_train_and_val(outline, layout="llmc")
    most = (MAX_FILE_BYTES - HEADER_BYTES) // np.dtype(outline.dtype).itemsize
    require_shard_size(options, most=most, layout="llmc", why="its readers seek in files below 2 GiB")
    size = options.shard_size or SHARD_TOKENS
    if "val" not in outline.splits and outline.most_tokens is not None and outline.most_tokens <= size:
        raise RecipeError(
            f"llmc uses the first shard for validation, and there is no other: {size:,} tokens hold everything",
            hint="use a smaller `shard_size`, or prepare the dataset with `split='val=0.0005'`",
        )


def write(source: Dataset, options: Options) -> Export:
    splits = filled_splits(source)
    size = options.shard_size or SHARD_TOKENS
    prefix = f"{options.name}_" if options.name else ""
    ranges = [(name, bounds) for name in ("val", "train") for bounds in _ranges(splits, name, size)]
    notes: tuple[str, ...] = ()
    if "val" not in splits:
        notes = (f"the dataset has no validation split: its first {size:,} tokens become one, as in llm.c's scripts",)
    parts = []
    for number, (name, bounds) in enumerate(ranges):
        role = "val" if "val" not in splits and number == 0 else name
        parts.append(_part(f"{prefix}{role}_{number:06d}", splits[name], bounds))
    return Export(parts=tuple(parts), notes=notes)


def _ranges(splits: dict[str, TokenSplit], name: str, size: int) -> list[tuple[int, int]]:
    return cut_anywhere(splits[name].num_tokens, size) if name in splits else []


def _part(name: str, split: TokenSplit, bounds: tuple[int, int]) -> OutputPart:
    start, stop = bounds
    stream = TokenStream(split, "prepend")
    size = HEADER_BYTES + (stop - start) * stream.itemsize
    head = header(split.dtype, stop - start)
    return file_part(f"{name}.bin", size, lambda: itertools.chain([head], stream.data(start, stop)))


def header(dtype: str, num_tokens: int) -> bytes:
    """GPT-2's header for uint16 tokens, Llama-3's for 32-bit ones."""
    magic, version = next((magic, kind[0]) for magic, kind in KINDS.items() if kind[1] == dtype)
    numbers = np.zeros(HEADER_BYTES // 4, "<i4")
    numbers[:3] = magic, version, num_tokens
    return numbers.tobytes()
