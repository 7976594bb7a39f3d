"""Characters that gigatoken and the references classify by different versions of Unicode.

gigatoken 0.10 knows Unicode 17. tiktoken 0.14 and tokenizers 0.23 cut text into words by Unicode 16, and tokenizers
composes by Unicode 9. Where a new letter, digit or mark is, a text is cut or composed in another way, so the
reference encodes it. The lists were found by comparing the libraries on every code point (`make differ`).

    bytes of a batch -> [first byte and second byte of such a character] -> its code point -> the texts that have one
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tokenmill.sources.base import text_buffers
from tokenmill.tokenizers.spec import TokenizerSpec

# Letters, digits and marks of Unicode 17.
NEW_IN_WORDS = """
    88f c5c cdc 1acf-1add 1ae0-1aeb a7ce-a7cf a7d2 a7d4 a7f1 10940-10959 10ec5-10ec7 10efa-10efb 11b60-11b67
    11db0-11ddb 11de0-11de9 16ea0-16eb8 16ebb-16ed3 16ff2-16ff6 187f8-187ff 18d09-18d1e 18d80-18df2 1e6c0-1e6de
    1e6e0-1e6f5 1e6fe-1e6ff 2b73a-2b73f 2cea2-2cead 323b0-33479
"""
# Marks since Unicode 9 that composition reorders, and letters and marks that it joins.
NEW_IN_NFC = """
    7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1ace 1df6-1dfa a82c 105d2 105da 10d24-10d27 10d69-10d6d
    10eab-10eac 10efd-10eff 10f46-10f50 10f82-10f85 11070 1133b 113b8 113bb 113c2 113c9 113ce-113d0 1145e 11839-1183a
    11930 1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97 11f41-11f42 1611e-16129 1612f 16d67
    16ff0-16ff1 1e08f 1e130-1e136 1e2ae 1e2ec-1e2ef 1e4ec-1e4ef 1e5ee-1e5ef
"""
# Symbols and punctuation of Unicode 17, for patterns that know those.
NEW_SYMBOLS = """
    20c1 2b96 fbc3-fbd2 fd90-fd91 fdc8-fdce 10ed0-10ed8 1ccfa-1ccfc 1ceba-1ced0 1cee0-1cef0 1f6d8 1f777-1f77a
    1f8d0-1f8d8 1fa54-1fa57 1fa8a 1fa8e 1fac8 1facd 1faea 1faef 1fbfa
"""
_BLOCK_BYTES = 1 << 17  # a core's cache holds it
_FEW = 3
_OF_THREE, _OF_FOUR = 0xE0, 0xF0  # first bytes of characters of three bytes, and of four
_SPARSE = 16
_MASKS = {2: 0x1F, 3: 0x0F, 4: 0x07}  # bits of a first byte that belong to the code point, by the character's length
_Places = npt.NDArray[np.int64]
_memchr = ctypes.CDLL(None).memchr
_memchr.restype, _memchr.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


class Characters:
    """A set of characters of two bytes or more, looked for in Arrow text."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        points = [point for begin, end in ranges for point in range(begin, end + 1)]
        self.count = len(set(points))
        self._is_one = np.zeros(0x110000, np.bool_)
        self._is_one[points] = True
        # Bytes that come second and third behind a first one.
        self._behind: dict[int, tuple[set[int], set[int]]] = {}
        for first, *behind in (chr(point).encode() for point in points):
            for seen, byte in zip(self._behind.setdefault(first, (set(), set())), behind, strict=False):
                seen.add(byte)
        self._is_second = {first: np.isin(np.arange(256), list(seen)) for first, (seen, _) in self._behind.items()}

    def rows(self, text: pa.Array) -> _Places:
        """The texts that have one of the characters, by their numbers."""
        offsets, data = text_buffers(text)
        return np.unique(np.searchsorted(offsets, self._places(data), side="right") - 1)

    def _places(self, data: npt.NDArray[np.uint8]) -> _Places:
        """Where the characters begin."""
        found, address = [np.zeros(0, np.int64)], data.ctypes.data
        for start in range(0, len(data), _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, len(data) - start)
            for first in self._behind:
                if _memchr(address + start, first, size):
                    places = start + self._candidates(data[start : start + size + 2], first, size)
                    found.append(self._exact(data, first, places))
        return np.concatenate(found)

    def _candidates(self, block: npt.NDArray[np.uint8], first: int, size: int) -> _Places:
        """Where a first byte is, with a second one that it has in a character."""
        here = block[:size] == first
        if np.count_nonzero(here) > size // _SPARSE:
            self._narrow(here, block, first)
        places = np.flatnonzero(here)
        return places[self._is_second[first][block[places + 1]]]

    def _narrow(self, here: npt.NDArray[np.bool_], block: npt.NDArray[np.uint8], first: int) -> None:
        """Whole scripts begin with the same byte, so that the next ones are compared before places are listed."""
        for distance, behind in enumerate(self._behind[first], 1):
            if 0 < len(behind) <= _FEW:
                there = block[distance : distance + len(here)]
                here[: len(there)] &= np.logical_or.reduce([there == byte for byte in behind])

    def _exact(self, data: npt.NDArray[np.uint8], first: int, places: _Places) -> _Places:
        length = 2 + (first >= _OF_THREE) + (first >= _OF_FOUR)
        points = np.full(len(places), first & _MASKS[length], np.int64)
        for distance in range(1, length):
            points = points << 6 | data[places + distance] & 0x3F
        return places[self._is_one[points]]


def classed_differently(spec: TokenizerSpec) -> Characters:
    """The characters that gigatoken treats differently from the reference of this tokenizer."""
    if spec.kind == "tiktoken":
        return _characters(NEW_IN_WORDS)
    parsed = json.loads(spec.content)
    normalizer, cut = json.dumps(parsed.get("normalizer")), json.dumps(parsed.get("pre_tokenizer"))
    lists = NEW_IN_WORDS if "ByteLevel" in cut else ""  # the others do not cut by classes
    lists += NEW_IN_NFC + NEW_IN_WORDS if '"NFC"' in normalizer else ""
    lists += NEW_SYMBOLS if any(name in cut for name in (r"\\p{S}", r"\\p{P}")) else ""
    return _characters(lists)


@cache
def _characters(lists: str) -> Characters:
    pairs = (item.partition("-") for item in lists.split())
    return Characters((int(begin, 16), int(end or begin, 16)) for begin, _, end in pairs)
