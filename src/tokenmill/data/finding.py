"""Which layout token files have, and what each layout says of itself: files, dtype, end of text, documents.

One function a layout. Each takes a path (a file, a prefix or a folder) and gives what it found, or None
if the path holds nothing of its kind; what is of its kind and wrong is a `DatasetError`.
"""

from __future__ import annotations

import gzip
import os
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill import placement
from tokenmill.data.bare import Found, Hints, TokenFile, map_file
from tokenmill.data.listing import (
    check_numbers,
    check_pairs,
    files_by_folder,
    groups_by_name,
    head_of,
    mapped,
    names_in,
    size_of,
)
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.shards.layout import HEADER, MAGIC, NAMES, numpy_dtype
from tokenmill.storage import Folder

Finder = Callable[[str, Hints], Found | None]

GPT2_EOT = 50256
LLMC_HEADER_BYTES = 1024
# magic -> version, dtype, what begins a document
LLMC_KINDS = {20240520: (1, "uint16", GPT2_EOT), 20240801: (7, "int32", 128000)}
NPY_MAGIC = b"\x93NUMPY"
_TABLE_ROW = re.compile(rb"(\d+),(\d+)(?:,|$)")


def find(path: str, hints: Hints) -> Found:
    """What a path holds. Raises `DatasetError` if it is of no layout that is read in place."""
    if hints.layout is not None:
        if hints.layout not in FINDERS:
            raise RecipeError(f"files of layout {hints.layout!r} are not read in place", hint=_KNOWN)
        found = FINDERS[hints.layout](path, hints)
        if found is None:
            raise DatasetError(f"{path} holds nothing of layout {hints.layout}", hint="check the path and the layout")
        return found
    for finder in FINDERS.values():
        if (found := finder(path, hints)) is not None:
            return found
    if nodes := placement.load(Folder(path)):
        raise DatasetError(
            f"{path} holds no part of its dataset", hint=f"open it where one is: {placement.where(nodes)}"
        )
    if os.path.isdir(os.path.join(path, ".build")):
        hint = "its build has not finished: run the same tokenmill command again"
    else:
        hint = f"give the folder that tokenmill prepare wrote, or files of another layout. {_KNOWN}"
    raise DatasetError(f"{path} is not a dataset: it has no dataset.json", hint=hint)


def find_megatron(path: str, hints: Hints) -> Found | None:
    """Pairs of .bin and .idx: given by prefix, by one of the two, or a folder of them."""
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    if os.path.isfile(f"{prefix}.idx") and not os.path.isdir(path):
        groups = {"train": [prefix]}
    else:
        groups = groups_by_name([f"{path}/{name[:-4]}" for name in names_in(path) if name.endswith(".idx")])
        if groups:
            check_pairs(path, ".bin", ".idx")
    if not groups:
        return None
    files: dict[str, list[TokenFile]] = {}
    inner: dict[str, list[Any]] = {}
    kinds = set()
    for split, prefixes in groups.items():
        for one in prefixes:
            dtype, file, ends = _megatron_pair(one)
            kinds.add(dtype)
            files.setdefault(split, []).append(file)
            inner.setdefault(split, []).append(ends)
    if len(kinds) > 1:
        raise DatasetError(f"{path}: pairs of different dtypes: {', '.join(sorted(kinds))}", hint="open one of them")
    (dtype,) = kinds
    eot = _policy(files, dtype, hints.eot_id, inner, numpy_dtype(dtype).itemsize)
    return Found(
        layout="megatron",
        dtype=dtype,
        eot=eot,
        eot_id=hints.eot_id,
        files=files,
        inner=inner,
        unit=numpy_dtype(dtype).itemsize,
    )


def find_llmc(path: str, hints: Hints) -> Found | None:
    """Shards with llm.c's header: one of them, or a folder of `NAME_train_000001.bin` and `NAME_val_000000.bin`."""
    if os.path.isfile(path):
        groups = {"train": [path]}
    else:
        groups = groups_by_name([f"{path}/{name}" for name in names_in(path) if name.endswith(".bin")])
    heads = {one: head_of(one, 12) for paths in groups.values() for one in paths}
    if not heads or not all(_is_llmc(head) for head in heads.values()):
        return None
    kinds = {struct.unpack("<i", head[:4])[0] for head in heads.values()}
    if len(kinds) > 1:
        raise DatasetError(f"{path}: shards of different kinds: {sorted(kinds)}", hint="open one of them")
    for paths in groups.values():
        check_numbers(paths)
    version, dtype, usual = LLMC_KINDS[kinds.pop()]
    files = {
        split: [_llmc_shard(one, heads[one], version, dtype) for one in sorted(paths)]
        for split, paths in groups.items()
    }
    eot_id = hints.eot_id
    if eot_id is None:
        first = {int(map_file(parts[0], dtype)[0]) for parts in files.values()}
        eot_id = usual if first == {usual} else None
    return Found(layout="llmc", dtype=dtype, eot="none" if eot_id is None else "prepend", eot_id=eot_id, files=files)


def find_templar(path: str, hints: Hints) -> Found | None:
    """`train_000000.npy` shards, or tokens.bin where there are none. A folder `val` beside them is another split."""
    if os.path.isfile(path):
        head = head_of(path, len(NPY_MAGIC))
        paths = {"train": [path]} if head == NPY_MAGIC or os.path.basename(path) == "tokens.bin" else {}
    else:
        train = _templar_shards(path, hints.layout == "templar")
        paths = {"train": train, "val": _templar_shards(f"{path}/val", bool(train))}
    shards = {split: [_templar_file(one, hints) for one in found] for split, found in paths.items() if found}
    if not shards:
        return None
    kinds = {dtype for found in shards.values() for dtype, _ in found}
    if len(kinds) > 1:
        raise DatasetError(f"{path}: shards of different dtypes: {', '.join(sorted(kinds))}", hint="open one of them")
    files = {split: [file for _, file in found] for split, found in shards.items()}
    eot = "none" if hints.eot_id is None else "append"
    return Found(layout="templar", dtype=kinds.pop(), eot=eot, eot_id=hints.eot_id, files=files)


def find_datatrove(path: str, hints: Hints) -> Found | None:
    """.ds files with their index, one of them or a folder; folders in it are splits."""
    groups = files_by_folder(path, ".ds", ".ds.index")
    if not groups:
        return None
    files: dict[str, list[TokenFile]] = {}
    inner: dict[str, list[Any]] = {}
    dtype = None
    for split, paths in groups.items():
        for one in paths:
            ends = mapped(f"{one}.index", "<u8")
            count = int(ends[-1]) if len(ends) else 0
            size = size_of(one)
            if not count or size not in (2 * count, 4 * count):
                raise DatasetError(f"{one}: {size} bytes, but its index has {count} tokens", hint="is it whole?")
            mine = "uint16" if size == 2 * count else "int32"
            if dtype not in (None, mine):
                raise DatasetError(f"{path}: files of different dtypes", hint="open one of them")
            dtype = mine
            files.setdefault(split, []).append(TokenFile(path=one, offset=0, num_tokens=count))
            inner.setdefault(split, []).append(ends[:-1])
    assert dtype is not None, "there is a file"
    eot = _policy(files, dtype, hints.eot_id, inner, 1)
    return Found(layout="datatrove", dtype=dtype, eot=eot, eot_id=hints.eot_id, files=files, inner=inner)


def find_olmo(path: str, hints: Hints) -> Found | None:
    """.npy files that are raw tokens, one of them or a folder; folders in it are splits."""
    groups = files_by_folder(path, ".npy", ".csv.gz")
    if not groups or any(head_of(one, len(NPY_MAGIC)) == NPY_MAGIC for paths in groups.values() for one in paths):
        return None
    tables = {one: _table_of(one) for paths in groups.values() for one in paths}
    has_tables = all(table is not None for table in tables.values())
    files: dict[str, list[TokenFile]] = {}
    inner: dict[str, list[Any]] = {}
    dtype = hints.stored_dtype(where=path) if hints.dtype else None
    for split, paths in groups.items():
        for one in paths:
            size = size_of(one)
            if dtype is None:
                dtype = hints.stored_dtype(default=_fitting(size, tables[one]), where=one)
            count, rest = divmod(size, numpy_dtype(dtype).itemsize)
            table = tables[one]
            if rest or not count or (table is not None and int(table[-1]) != count):
                raise DatasetError(
                    f"{one}: {size} bytes are not the tokens of {dtype} that it should hold", hint=_DTYPE
                )
            files.setdefault(split, []).append(TokenFile(path=one, offset=0, num_tokens=count))
            if table is not None:
                inner.setdefault(split, []).append(table[:-1])
    assert dtype is not None, "there is a file"
    eot = "none" if hints.eot_id is None else "append"
    return Found(
        layout="olmo",
        dtype=dtype,
        eot=_policy(files, dtype, hints.eot_id, inner, 1) if has_tables else eot,
        eot_id=hints.eot_id,
        files=files,
        inner=inner if has_tables else None,
    )


def find_nanogpt(path: str, hints: Hints) -> Found | None:
    """A raw .bin, or a folder with train.bin, val.bin or others."""
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
            raise DatasetError(f"{one}: {size} bytes are no tokens of {dtype}", hint=_DTYPE)
        files[split] = [TokenFile(path=one, offset=0, num_tokens=count)]
    if not files:
        return None
    eot_id = hints.eot_id
    if eot_id is None and dtype == "uint16":
        last = {int(map_file(parts[0], dtype)[-1]) for parts in files.values()}
        eot_id = GPT2_EOT if last == {GPT2_EOT} else None
    eot = "none" if eot_id is None else "append"
    return Found(layout="nanogpt", dtype=dtype, eot=eot, eot_id=eot_id, files=files)


# In this order: each is told from those below it by something that they do not have.
FINDERS: dict[str, Finder] = {
    "megatron": find_megatron,
    "llmc": find_llmc,
    "templar": find_templar,
    "datatrove": find_datatrove,
    "olmo": find_olmo,
    "nanogpt": find_nanogpt,
}
_KNOWN = f"Read in place: {', '.join(FINDERS)}"
_DTYPE = "is it whole? else give dtype: uint16 or uint32"


def _megatron_pair(prefix: str) -> tuple[str, TokenFile, npt.NDArray[np.int64]]:
    """Dtype, tokens, and where documents begin (in bytes) but for the first."""
    where = f"{prefix}.idx"
    head = head_of(where, HEADER.size)
    if len(head) < HEADER.size:
        raise DatasetError(f"{where}: too short for an index", hint="is it whole?")
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(head)
    if magic != MAGIC or version != 1 or code not in NAMES:
        raise DatasetError(
            f"{where}: magic {magic!r}, version {version}, dtype code {code}",
            hint="an index of Megatron's with tokens of uint16 or int32 can be read",
        )
    if size_of(where) != HEADER.size + 12 * num_sequences + 8 * num_bounds:
        raise DatasetError(f"{where}: its size does not fit {num_sequences} sequences", hint="is it whole?")
    size, itemsize = size_of(f"{prefix}.bin"), numpy_dtype(NAMES[code]).itemsize
    starts = mapped(where, "<i8", HEADER.size + 4 * num_sequences, num_sequences)
    bounds = mapped(where, "<i8", HEADER.size + 12 * num_sequences, num_bounds)
    lengths = mapped(where, "<i4", HEADER.size, num_sequences)
    if not size or not num_sequences or int(starts[-1]) + int(lengths[-1]) * itemsize != size or starts[0] != 0:
        raise DatasetError(f"{where}: its sequences do not fill {prefix}.bin of {size} bytes", hint="is it whole?")
    if num_bounds == num_sequences + 1:
        inner = starts[1:]  # a sequence is a document
    elif len(bounds) and bounds[0] == 0 and bounds[-1] == num_sequences:
        inner = starts[bounds[1:-1]]
    else:
        raise DatasetError(f"{where}: its documents do not fit its sequences", hint="is it whole?")
    return NAMES[code], TokenFile(path=f"{prefix}.bin", offset=0, num_tokens=size // itemsize), inner


def _is_llmc(head: bytes) -> bool:
    return len(head) == 12 and struct.unpack("<i", head[:4])[0] in LLMC_KINDS


def _llmc_shard(path: str, head: bytes, version: int, dtype: str) -> TokenFile:
    _, found, count = struct.unpack("<iii", head)
    size = size_of(path)
    if found != version or size != LLMC_HEADER_BYTES + count * numpy_dtype(dtype).itemsize or not count:
        raise DatasetError(
            f"{path}: version {found}, {count} tokens of {dtype} in {size} bytes", hint="is it whole, and of llm.c?"
        )
    return TokenFile(path=path, offset=LLMC_HEADER_BYTES, num_tokens=count)


def _templar_shards(folder: str, is_sure: bool) -> list[str]:
    """Shards by their name; where nobody is sure that they are Templar's, the first one's content must tell as well."""
    names = names_in(folder)
    shards = [f"{folder}/{name}" for name in names if re.fullmatch(r"train_\d{6,}\.npy", name)]
    if shards and (is_sure or head_of(shards[0], len(NPY_MAGIC)) == NPY_MAGIC):
        check_numbers(shards)
        return shards
    return [f"{folder}/tokens.bin"] if "tokens.bin" in names else []


def _templar_file(path: str, hints: Hints) -> tuple[str, TokenFile]:
    if path.endswith(".bin"):
        dtype, offset, count = hints.stored_dtype(default="uint16", where=path), 0, None
    else:
        dtype, offset, count = _npy_header(path)
    size = size_of(path)
    found, rest = divmod(size - offset, numpy_dtype(dtype).itemsize)
    if rest or not found or count not in (None, found):
        raise DatasetError(f"{path}: {size} bytes do not hold its tokens", hint="is it whole?")
    return dtype, TokenFile(path=path, offset=offset, num_tokens=found)


def _npy_header(path: str) -> tuple[str, int, int]:
    """Dtype, offset of the tokens, and how many there are. No object is ever unpickled."""
    try:
        with open(path, "rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, kind = read(file)
            offset = file.tell()
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: not a .npy file: {error}", hint="is it whole?") from None
    names = {"<u2": "uint16", "<i4": "int32", "<u4": "int32"}
    if kind.str not in names or len(shape) != 1 or offset % 4:
        raise DatasetError(f"{path}: {kind} of shape {shape} are no tokens", hint="one row of uint16 or uint32 is read")
    return names[kind.str], offset, shape[0]


def _table_of(path: str) -> npt.NDArray[np.int64] | None:
    """Ends of documents, from the table beside the tokens: lines of start, end and more."""
    table = f"{path.removesuffix('.npy')}.csv.gz"
    if not os.path.isfile(table):
        return None
    try:
        with gzip.open(table) as file:
            found = [(int(row[1]), int(row[2])) for row in map(_TABLE_ROW.match, file) if row]
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{table} cannot be read: {error}", hint="is it whole?") from None
    bounds = np.array(found, np.int64).reshape(-1, 2)
    if not len(bounds) or bounds[0, 0] != 0 or (bounds[1:, 0] != bounds[:-1, 1]).any():
        raise DatasetError(f"{table}: its documents do not lie end to end", hint="is it whole?")
    return bounds[:, 1]


def _fitting(size: int, table: npt.NDArray[np.int64] | None) -> str | None:
    """The dtype of which so many bytes are as many tokens as the table has."""
    count = int(table[-1]) if table is not None else 0
    return {2 * count: "uint16", 4 * count: "int32"}.get(size) if count else None


def _policy(
    files: dict[str, list[TokenFile]], dtype: str, eot_id: int | None, inner: dict[str, list[Any]], unit: int
) -> str:
    """Where the end of text stands in the first document of each split, if all agree."""
    if eot_id is None:
        return "none"
    seen = set()
    for split, parts in files.items():
        end = int(inner[split][0][0]) // unit if len(inner[split][0]) else parts[0].num_tokens
        document = map_file(parts[0], dtype)[:end]
        seen.add("append" if document[-1] == eot_id else "prepend" if document[0] == eot_id else "none")
    return seen.pop() if len(seen) == 1 else "none"
