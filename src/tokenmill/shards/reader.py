"""Reading a shard: memory maps, with the index checked before anything is believed."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from tokenmill.errors import DatasetError
from tokenmill.shards.layout import HEADER, Tokens, index_bytes, numpy_dtype, parse_header, parse_index


def map_tokens(path: str, dtype: str) -> Tokens:
    """The tokens of a .bin, mapped."""
    return np.memmap(path, dtype=numpy_dtype(dtype), mode="r")


def document_starts(path: str, num_documents: int) -> npt.NDArray[np.int64]:
    """Byte offset of every document of an .idx, mapped; it was checked when it was written and by `verify`."""
    return np.memmap(path, dtype="<i8", mode="r", offset=HEADER.size + 4 * num_documents, shape=(num_documents,))


def check_structure(bin_path: str, idx_path: str, *, tokens: int, documents: int, dtype: str, deep: bool) -> None:
    """Raise `DatasetError` unless the pair has the right sizes and header and, if `deep`, the right offsets."""
    bin_bytes, idx_bytes = _size(bin_path), _size(idx_path)
    itemsize = numpy_dtype(dtype).itemsize
    if bin_bytes != tokens * itemsize:
        raise DatasetError(
            f"{bin_path}: {bin_bytes} bytes, but {tokens} tokens need {tokens * itemsize}", hint="run tokenmill repair"
        )
    if idx_bytes != index_bytes(documents):
        raise DatasetError(
            f"{idx_path}: {idx_bytes} bytes, but {documents} documents need {index_bytes(documents)}",
            hint="run tokenmill repair",
        )
    if deep:
        header, _ = parse_index(np.memmap(idx_path, np.uint8, "r").data, bin_bytes=bin_bytes, where=idx_path)
    else:
        with open(idx_path, "rb") as file:
            header = parse_header(file.read(HEADER.size), where=idx_path)
    if header.dtype != dtype or header.num_documents != documents:
        raise DatasetError(
            f"{idx_path}: {header.num_documents} documents of {header.dtype}, expected {documents} of {dtype}",
            hint="run tokenmill repair",
        )


def _size(path: str) -> int:
    try:
        if os.path.islink(path) or not os.path.isfile(path):
            raise DatasetError(f"{path} is missing or not a plain file", hint="run tokenmill repair")
        return os.path.getsize(path)
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}", hint="run tokenmill repair") from None
