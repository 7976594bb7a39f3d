"""Ragged arrays, as gigatoken takes text and gives ids: through awkward, or through what stands in for it.

awkward takes longer to load than gigatoken, numpy and Arrow together. gigatoken calls five of its functions,
all of them on buffers that are there already. So a process in which nothing runs but what is ours does without:
a module of those five stands in awkward's place. A gigatoken that asks it for more gets the real one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.tokenizer.encoded import Encoded

_NAME = "awkward"
Offsets = npt.NDArray[np.int64]
Data = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Strings:
    """Texts end to end, and where each of them begins."""

    offsets: Offsets
    data: Data


def stand_in() -> None:
    """Do without awkward from here on, unless it is loaded. For processes that run no code but ours."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _STAND_IN


def encode_ragged(encoder: Any, offsets: Offsets, data: Data) -> Encoded:
    """What an encoder of gigatoken makes of texts, on the calling thread."""
    if sys.modules.get(_NAME) is _STAND_IN:
        try:
            found = encoder.encode_batch(_Strings(offsets, data), parallel=False)
        except (AttributeError, TypeError):
            found = None
        if isinstance(found, Encoded):
            return found
        del sys.modules[_NAME]  # this gigatoken wants more of it
    import awkward as ak

    strings = ak.contents.ListOffsetArray(
        ak.index.Index64(offsets),
        ak.contents.NumpyArray(data, parameters={"__array__": "char"}),
        parameters={"__array__": "string"},
    )
    layout = encoder.encode_batch(ak.Array(strings), parallel=False).layout
    ends = np.asarray(layout.offsets.data)
    return Encoded(np.asarray(layout.content.data)[ends[0] : ends[-1]], np.diff(ends))


def _make_stand_in() -> ModuleType:
    module: Any = ModuleType(_NAME, "What gigatoken asks of awkward, and no more.")
    module.Array = _Strings
    module.without_parameters = module.to_numpy = lambda array: array
    module.flatten = lambda strings: strings.data
    module.num = lambda strings: np.diff(strings.offsets)
    module.unflatten = Encoded
    return module  # type: ignore[no-any-return]  # Any, to be given functions


_STAND_IN = _make_stand_in()
