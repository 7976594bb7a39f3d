"""Recognising files that are not text by their first bytes, because names can be missing or wrong.

    %PDF-1.7                    a signature             "a PDF document"
    h\\0e\\0l\\0l\\0o\\0           bytes of UTF-16         "UTF-16 text"
    \\x93\\x0b\\0\\0\\x91\\x04...     not text                "binary data"

Text may contain a few control characters and a stray NUL. Text of an old encoding counts as text; its documents are
quarantined one by one as invalid UTF-8.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

_NEARLY_ALL = 0.9
HEAD_BYTES = 1 << 13
_EXTRACT = "extract its text to .txt or .jsonl first"
_UNPACK = "unpack it first"


class FileType(NamedTuple):
    """The name of a file type, and what a user can do about such a file."""

    name: str
    hint: str


_BINARY = FileType(
    "binary data", "leave it out, or convert it to UTF-8 text; NUL bytes are removed by tr -d '\\000' < FILE > NEW"
)
_PARQUET = FileType("a parquet file", "rename it so that it ends in .parquet")
_ARROW = FileType("an Arrow file", "rename it so that it ends in .arrow")
_ZIP = FileType("a zip archive", _UNPACK)
_OFFICE = FileType("an Office document", _EXTRACT)
_EPUB = FileType("an EPUB book", _EXTRACT)
_SAFETENSORS = FileType("a safetensors file", "it contains weights: leave it out")
_RECORDS = FileType("a file of binary records, such as a TFRecord", _EXTRACT)
_WEB = FileType("a web archive (WARC)", "extract its texts to .jsonl first, for example with trafilatura")
_PROGRAM = FileType("a program", "leave it out")
_IMAGE = FileType("an image", "leave it out")
_SOUND = FileType("a sound or a film", "leave it out")
_TAR = FileType("a tar archive", _UNPACK)

_SIGNATURES: dict[bytes, FileType] = {
    b"version https://git-lfs.github.com/spec/": FileType("a Git LFS pointer", "fetch the file itself: git lfs pull"),
    b"%PDF-": FileType("a PDF document", _EXTRACT),
    **dict.fromkeys((b"WARC/0.", b"WARC/1.", b"filedesc://"), _WEB),
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": FileType("an old Office document", _EXTRACT),
    b"PK\x03\x04": _ZIP,
    b"PK\x05\x06": _ZIP,
    b"\x1f\x8b": FileType("compressed with gzip", "rename it so that it ends in .gz, like a.jsonl.gz"),
    b"\x28\xb5\x2f\xfd": FileType("compressed with zstd", "rename it so that it ends in .zst, like a.jsonl.zst"),
    **{b"BZh%d1AY&SY" % level: FileType("compressed with bzip2", "decompress it: bzip2 -d") for level in range(1, 10)},
    b"\xfd7zXZ\0": FileType("compressed with xz", "decompress it: xz -d"),
    b"\x04\x22\x4d\x18": FileType("compressed with lz4", "decompress it: lz4 -d"),
    b"7z\xbc\xaf\x27\x1c": FileType("a 7z archive", _UNPACK),
    b"Rar!\x1a\x07": FileType("a RAR archive", _UNPACK),
    b"PAR1\x15": _PARQUET,
    b"ARROW1\0\0": _ARROW,
    b"ORC\x0a": FileType("an ORC file", "write it as .parquet"),
    b"Obj\x01": FileType("an Avro file", "write it as .parquet or .jsonl"),
    b"\x93NUMPY": FileType("a NumPy array", "it contains numbers: tokens of a trainer are read by tokenmill import"),
    b"\x89HDF\r\n\x1a\n": FileType("an HDF5 file", _EXTRACT),
    b"SQLite format 3\0": FileType("an SQLite database", _EXTRACT),
    **{b"GGUF%c\0" % version: FileType("a GGUF model", "it contains weights: leave it out") for version in range(1, 4)},
    b"MMIDIDX\0": FileType("an index of Megatron's tokens", "tokens of a trainer are read by tokenmill import"),
    **dict.fromkeys((b"\x7fELF", b"\0asm", b"\xca\xfe\xba\xbe", b"\xcf\xfa\xed\xfe"), _PROGRAM),
    b"\x89PNG\r\n\x1a\n": FileType("a PNG image", "leave it out"),
    b"\xff\xd8\xff": FileType("a JPEG image", "leave it out"),
    **dict.fromkeys((b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*"), _IMAGE),
    **dict.fromkeys((b"RIFF", b"OggS\0", b"fLaC\0", b"ID3\2\0", b"ID3\3\0", b"ID3\4\0", b"\x1a\x45\xdf\xa3"), _SOUND),
    **{b"\x80" + bytes([version]): FileType("a Python pickle", "write its texts as .jsonl") for version in range(2, 6)},
}
_STARTS = tuple(_SIGNATURES)
# Signatures of letters may begin a text too, so bytes that are not text must follow soon.
_LETTERS = (b"ORC\x0a", b"GIF87a", b"GIF89a", b"RIFF")
_SOON = 16
_DOCUMENT_IN_ZIP = {b"[Content_Types].xml": _OFFICE, b"application/vnd.oasis": _OFFICE, b"application/epub": _EPUB}
# Longer marks first: that of UTF-32 begins like that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# All bytes except control characters without a meaning in text.
_IN_TEXTS = bytes(byte for byte in range(256) if byte >= ord(" ") or byte in b"\b\t\n\v\f\r\x1b")
_OR_NUL = _IN_TEXTS + b"\0"
# The largest fractions of a text that are such control characters (if the rest is valid UTF-8, or not), or NUL.
_MAX_CONTROLS = 0.5
_MAX_CONTROLS_IF_INVALID = 0.03
_MAX_INVALID = 0.1
_MAX_NULS = 1 / 16
# Fewer than this prove nothing, in a small file either.
_MANY = 4
# What a damaged table may look like.
MAYBE_TABLES = (_PARQUET, _ARROW, _BINARY)


def recognise(head: bytes, *, separator: bytes = b"") -> FileType | None:
    """The type of a file with these first bytes; None for text. A `separator` of texts may be any bytes."""
    head = head[:HEAD_BYTES]
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return _encoded(name)
    if head.startswith(_STARTS):
        found = next(start for start in _STARTS if head.startswith(start))
        if found not in _LETTERS or head[len(found) :][:_SOON].translate(None, _IN_TEXTS):
            return _SIGNATURES[found] if _SIGNATURES[found] is not _ZIP else _kind_of_zip(head)
    if head[257:262] == b"ustar":
        return _TAR
    if b"\0" in separator:
        head = head.replace(separator, b"")
    if b"\0" in head and (kind := _kind_by_nuls(head)):
        return kind
    return _BINARY if _is_binary(head) else None


def _encoded(name: str) -> FileType:
    return FileType(f"{name} text", f"convert it: iconv -f {name} -t UTF-8 FILE > NEW")


def _kind_of_zip(head: bytes) -> FileType:
    return next((kind for name, kind in _DOCUMENT_IN_ZIP.items() if name in head), _ZIP)


def _kind_by_nuls(head: bytes) -> FileType | None:
    """The type of a file by the positions of its NUL bytes: wide characters, or lengths of records."""
    if head[2:8] == b"\r\n\0\0\0\0":
        return _PROGRAM
    if head[:4] == b"\xff\xff\xff\xff" and head[7:8] == b"\0" and any(head[4:7]):  # an Arrow stream begins like this
        return _ARROW
    if head[3:8] == bytes(5) and any(head[:3]):
        return _SAFETENSORS if head[8:9] == b"{" else _RECORDS
    is_zero = [_share_of_nuls(head[place::4]) > _NEARLY_ALL for place in range(4)]
    likely = {
        "UTF-32LE": is_zero[2:] == [True, True],
        "UTF-32BE": is_zero[:2] == [True, True],
        "UTF-16LE": _are_high(head[1::2], head[0::2]),
        "UTF-16BE": _are_high(head[0::2], head[1::2]),
    }
    return next((_encoded(name) for name, is_likely in likely.items() if is_likely and _reads_as(head, name)), None)


def _reads_as(head: bytes, encoding: str) -> bool:
    """Whether most characters are printable in an encoding. Binary numbers can look like wide characters."""
    text = head[: len(head) // 4 * 4 or None].decode(encoding, errors="replace")
    return sum(char.isprintable() or char.isspace() for char in text) > 0.9 * len(text)


def _share_of_nuls(data: bytes) -> float:
    return data.count(0) / max(1, len(data))


def _are_high(high: bytes, low: bytes) -> bool:
    """Whether bytes are the upper halves of characters of an alphabet; those of spaces and Latin letters are 0."""
    others = high.translate(None, bytes(range(0x10)))
    is_enough = high.count(0) >= max(2, len(high) // 100)
    return is_enough and len(others) <= len(high) // 10 and low.count(0) <= len(low) // 50


def _is_binary(head: bytes) -> bool:
    """Whether bytes are not text in any encoding."""
    nuls = head.count(0)
    if nuls >= _MANY and nuls > _MAX_NULS * len(head):
        return True
    controls = len(head.translate(None, _OR_NUL))
    if controls < _MANY or controls <= _MAX_CONTROLS_IF_INVALID * len(head):
        return False
    return controls > _MAX_CONTROLS * len(head) or _num_invalid(head) > _MAX_INVALID * len(head)


def _num_invalid(head: bytes) -> int:
    """About how many bytes are not valid UTF-8."""
    return head.decode(errors="replace").count("\ufffd")
