"""Arrow text made of its bytes, and taken apart into them, without a copy of the text where there need be none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def text_array(texts: Sequence[str]) -> pa.Array:
    """Texts as Arrow text: quicker than `pa.array`, which would load pandas too, if that is installed."""
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(data) for data in encoded], out=offsets[1:])
    return pa.LargeStringArray.from_buffers(len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def text_buffers(text: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Offsets and bytes of an Arrow text array, without a copy of the text."""
    wide = pa.types.is_large_string(text.type) or pa.types.is_large_binary(text.type)
    _, offsets_buffer, data_buffer = text.buffers()
    stored = np.frombuffer(offsets_buffer, np.int64 if wide else np.int32, len(text) + 1 + text.offset)
    offsets: npt.NDArray[np.int64] = stored[text.offset :].astype(np.int64)
    if data_buffer is None:
        return offsets, np.zeros(0, np.uint8)
    data = np.frombuffer(data_buffer, np.uint8)[offsets[0] : offsets[-1]]
    return offsets - offsets[0], data
