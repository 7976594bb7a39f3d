"""Reading a shard: memory maps, with the index checked before anything is believed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tokenmill.errors import DatasetError
from tokenmill.manifest import Shard
from tokenmill.shards.layout import HEADER, Tokens, index_bytes, numpy_dtype, parse_header, parse_index
from tokenmill.storage import Folder
from tokenmill.storage.folder import SizeOf
from tokenmill.storage.maps import map_file

_HINT = "run tokenmill repair"


def map_tokens(path: str, dtype: str) -> Tokens:
    """The tokens of a .bin, mapped."""
    return map_file(path, numpy_dtype(dtype))


def document_starts(path: str, num_documents: int) -> npt.NDArray[np.int64]:
    """Byte offset of every document of an .idx, mapped; it was checked when it was written and by `verify`."""
    place = HEADER.size + 4 * num_documents
    return map_file(path, "<i8", offset=place, count=num_documents)


def check_structure(folder: Folder, shard: Shard, dtype: str) -> None:
    """Raise `DatasetError` unless a pair has the right sizes and header."""
    check_sizes(shard, dtype, folder.size_of, where=folder.path)
    check_header(folder, shard, dtype)


def check_sizes(shard: Shard, dtype: str, size_of: SizeOf, *, where: str) -> None:
    """Raise `DatasetError` unless a pair is as large as its tokens and documents need it to be."""
    needs = {
        f"{shard.name}.bin": (shard.tokens * numpy_dtype(dtype).itemsize, f"{shard.tokens} tokens"),
        f"{shard.name}.idx": (index_bytes(shard.documents), f"{shard.documents} documents"),
    }
    for name, (size, what) in needs.items():
        found = size_of(name)
        if found is None:
            raise DatasetError(f"{where}/{name}: it is missing or not a plain file", hint=_HINT)
        if found != size:
            raise DatasetError(f"{where}/{name}: {found} bytes, but {what} need {size}", hint=_HINT)


def check_header(folder: Folder, shard: Shard, dtype: str) -> None:
    """Raise `DatasetError` unless an .idx begins as that of this shard does."""
    name = f"{shard.name}.idx"
    _check_header(folder.head(name, HEADER.size), shard, dtype, where=folder.at(name))


def check_index(data: memoryview, shard: Shard, dtype: str, *, where: str) -> None:
    """Raise `DatasetError` unless a whole .idx describes its .bin, document by document."""
    _check_header(bytes(data[: HEADER.size]), shard, dtype, where=where)
    parse_index(data, bin_bytes=shard.tokens * numpy_dtype(dtype).itemsize, where=where)


def _check_header(data: bytes, shard: Shard, dtype: str, *, where: str) -> None:
    header = parse_header(data, where=where)
    if header.dtype != dtype or header.num_documents != shard.documents:
        raise DatasetError(
            f"{where}: {header.num_documents} documents of {header.dtype}, expected {shard.documents} of {dtype}",
            hint=_HINT,
        )
