"""The files of the sources: on a local disk, in an object store or on the hub; plain or compressed.

find    size and etag or time, which pin it      open_file, open_stream   for Arrow; decompressed text
expand  a prefix or a pattern -> URLs            check_unchanged          is it still the file that was planned?
                                                 touch_times              if not, although it has its size and time
bring   a hub file -> a verified copy            require, ask             can all be read? does the hub answer?

Only this module knows where a file is. It also recognises files that are not text by their first bytes, because names
can be missing or wrong:

    %PDF-1.7                    a signature             "a PDF document"
    h\\0e\\0l\\0l\\0o\\0           bytes of UTF-16         "UTF-16 text"
    \\x93\\x0b\\0\\0\\x91\\x04...     not text                "binary data"

Text may contain a few control characters and a stray NUL. Text of an old encoding counts as text; its documents are
quarantined one by one as invalid UTF-8.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa

from tokenmill.arguments import MAX_INT
from tokenmill.errors import NotTextError, ObjectChangedError, RecipeError, SourceChangedError, SourceError, hint_for
from tokenmill.sources.base import BATCH_BYTES, Source
from tokenmill.storage import hub
from tokenmill.storage.base import Url, is_hub, is_url, parse_url
from tokenmill.storage.globs import DATASET_PLAN, folder_of, is_pattern, matcher

if TYPE_CHECKING:
    from tokenmill.storage.object_store import ObjectInfo, Store


@dataclass(frozen=True, slots=True)
class Pin:
    """What identifies one version of a file: its size, and its time or etag."""

    bytes: int
    modified: int
    etag: str


def find(path: str) -> Pin:
    """The file at a path or URL, as it is now."""
    if is_hub(path):
        listed = hub.find(path)
        return Pin(listed.size, 0, listed.etag)
    if is_url(path):
        url = parse_url(path)
        found = _store(url).find(url.key)
        if found is None:
            raise SourceError(f"cannot read {path}: it does not exist", hint="restore it, then run again")
        return Pin(found.size, 0, found.etag)
    try:
        local = os.stat(path)
    except OSError as error:
        hint = hint_for(error, "restore it, then run again")
        raise SourceError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    if not stat.S_ISREG(local.st_mode):
        raise SourceError(f"{path} is not a plain file", hint="tokenmill reads no pipes or devices")
    return _pin_of_file(local)


def _pin_of_file(found: os.stat_result) -> Pin:
    # Some file systems have times before 1970 and after 2116, which records cannot store.
    return Pin(found.st_size, min(max(0, found.st_mtime_ns), MAX_INT - 1), "")


def _is_pinned(found: os.stat_result, pin: Pin) -> bool:
    is_same = found.st_size == pin.bytes and found.st_mtime_ns == pin.modified
    return stat.S_ISREG(found.st_mode) and (is_same or _pin_of_file(found) == pin)


def read_small(path: str, pin: Pin) -> bytes | None:
    """All bytes of a local file, in a few system calls; None unless it is the file that was planned.

    Reading it in the usual way then reports what is wrong.
    """
    try:
        # It may have become a pipe, which would block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not _is_pinned(os.fstat(fd), pin):
            return None
        data = os.read(fd, pin.bytes + 1)
        return data if len(data) == pin.bytes and _is_pinned(os.fstat(fd), pin) else None
    except OSError:
        return None
    finally:
        os.close(fd)


def pin_of(source: Source) -> Pin:
    return Pin(source.bytes, source.modified, source.etag)


def check_unchanged(path: str, source: Source) -> None:
    """Raise `SourceChangedError` unless the file is still the one that the plan pinned.

    Objects need no check: every read requires the pinned etag.
    """
    if not source.etag and (found := find(path)) != pin_of(source):
        raise changed(path, source, found)


def touch_times(root: str, sources: Iterable[Source]) -> tuple[int, ...]:
    """When each local file was last touched: a time that its file system notes at every change, and that cannot be put
    back. New rights and new links set it too, so another time does not prove another text.

    Nothing for objects, whose pins are enough; 0 for a file that is not there.
    """
    return () if is_url(root) else tuple(_touch_time(f"{root}/{source.name}") for source in sources)


def _touch_time(path: str) -> int:
    try:
        return min(max(0, os.stat(path).st_ctime_ns), MAX_INT - 1)
    except OSError:  # its reader reports it
        return 0


def changed(path: str, source: Source, found: Pin) -> SourceChangedError:
    now = replace(source, bytes=found.bytes, modified=found.modified, etag=found.etag).pin()
    return SourceChangedError(
        f"{path} changed since the plan was made: it had {source.pin()}, now {now}",
        hint="restore the old file, or prepare again with `update=True`, which keeps the results of the others",
    )


@contextlib.contextmanager
def pinned(path: str, source: Source) -> Iterator[None]:
    """Turn the error for an object that is replaced during a read into `SourceChangedError`."""
    try:
        yield
    except ObjectChangedError:
        raise changed(path, source, find(path)) from None


def open_file(
    path: str, pin: Pin | None = None, *, step: int = BATCH_BYTES, expected: Sequence[tuple[int, int]] = ()
) -> pa.NativeFile:
    """A file that Arrow reads at any offset. All reads of an object are of its pinned or current version.

    `step` is how much is read at a time. No more than two steps of an object are fetched ahead, so that a probe of some
    bytes does not fetch millions. `expected` are the byte ranges that will be read, if that is known.
    """
    local = hub.cached(path) if is_hub(path) else None if is_url(path) else path
    if local is not None:
        return pa.OSFile(local, "rb")
    from tokenmill.storage.ranged_reader import ExpectedFile, RemoteFile

    if is_hub(path):
        place = hub.parse(path)
        store, key, found = hub.HubStore(place), place.key, find(path)
    else:
        url = parse_url(path)
        store, key, found = _store(url), url.key, pin or find(path)
    where = (store, key, found.bytes, found.etag, 2 * step)
    return pa.PythonFile(ExpectedFile(*where, expected) if expected else RemoteFile(*where), mode="r")


def bring(path: str) -> None:
    """Download and verify a file of the hub before it is read. Other files are read where they are."""
    if is_hub(path):
        hub.fetch(path)


def ask(root: str) -> None:
    """Raise `SilentStoreError` if sources are on the hub and it does not answer."""
    if is_hub(root):
        hub.ask(root)


def require(paths: Iterable[str]) -> None:
    """Raise `SourceError` if hub files are not cached and cannot be downloaded. Other files are checked when read."""
    if on_hub := [path for path in paths if is_hub(path)]:
        hub.require(on_hub)


def expand(argument: str) -> tuple[dict[str, Pin], bool]:
    """The objects that a URL names, and whether it is a prefix, below which not all objects are sources."""
    if is_hub(argument):
        place = hub.pinned(hub.parse(argument))
        root = str(replace(place, config="", key=""))
        files = {f"{root}/{file.key}": Pin(file.size, 0, file.etag) for file in hub.files(place) if file.size}
        return files, not is_pattern(place.key) and f"{root}/{place.key}" not in files
    url = parse_url(argument)
    store = _store(url)
    if url.key and (found := store.find(url.key)) is not None:
        return {str(url): Pin(found.size, 0, found.etag)}, False
    if not is_pattern(url.key):
        return _pins(store, _outside_datasets(store.under(url.key))), True
    matches, below = matcher(url.key), folder_of(url.key)
    objects = store.under(below)
    if "**" in url.key:
        objects = _outside_datasets(objects, below=f"{below}/" if below else "")
    return _pins(store, (found for found in objects if matches(found.key))), False


def _pins(store: Store, objects: Iterable[ObjectInfo]) -> dict[str, Pin]:
    """The pins of objects. An empty object with others below it represents a folder and is skipped."""
    listed = list(objects)
    folders = {parent for found in listed for parent in _parents(found.key)}
    return {
        store.at(found.key): Pin(found.size, 0, found.etag)
        for found in listed
        if found.size or found.key not in folders
    }


def _outside_datasets(objects: list[ObjectInfo], *, below: str = "") -> list[ObjectInfo]:
    """The objects that are not part of a dataset, finished or not. Datasets below a prefix are not sources."""
    keys = {found.key for found in objects}
    folders = {parent for key in keys for parent in _parents(key)}
    plan = "/".join(DATASET_PLAN)
    roots = {
        root
        for root in folders
        if f"{root}/{plan}" in keys or (f"{root}/dataset.json" in keys and f"{root}/provenance" in folders)
        if root.startswith(below)
    }
    return [found for found in objects if roots.isdisjoint(_parents(found.key))]


def _parents(key: str) -> Iterator[str]:
    """The folders of an object, from the innermost outwards."""
    while key := key.rpartition("/")[0]:
        yield key


def check_name(path: str) -> None:
    """Refuse an object or hub file, found by a prefix or a pattern, whose name cannot be written as a URL."""
    try:
        hub.parse(path) if is_hub(path) else parse_url(path)
    except RecipeError as error:
        raise RecipeError(
            f"{path} is an object that cannot be read: {error.message.partition(' contains ')[2]} in its name",
            hint="rename it, or name the sources without it",
        ) from None


def common_root(paths: list[str]) -> str:
    """The URL that all of these lie under."""
    if not all(is_url(path) for path in paths):
        raise RecipeError("some sources are local files, others URLs", hint="copy them to one place first")
    if any(is_hub(path) for path in paths):
        return _hub_root(paths)
    urls = [parse_url(path) for path in paths]
    if len({url.root for url in urls}) > 1:
        raise RecipeError("the sources are in several buckets", hint="copy them to one bucket first")
    folders = [url.key.rpartition("/")[0] for url in urls]
    shared = os.path.commonpath(folders) if all(folders) else ""
    return str(Url(urls[0].scheme, urls[0].bucket, shared))


def _hub_root(paths: list[str]) -> str:
    roots = {str(replace(hub.parse(path), key="")) if is_hub(path) else "" for path in paths}
    if len(roots) > 1:
        raise RecipeError("the sources are of several datasets or revisions", hint="prepare one after the other")
    return roots.pop()


def _store(url: Url) -> Any:
    from tokenmill.storage.object_store import open_store

    return open_store(Url(url.scheme, url.bucket, ""))


COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".bz2": "bz2", ".xz": "xz", ".lz4": "lz4"}
# As Arrow names them. The standard library has xz, and an empty stream of bz2 between others, which Arrow refuses.
_CODECS = {"gz": "gzip", "zst": "zstd", "lz4": "lz4"}
# The most memory that an .xz file may ask for; the largest preset of xz asks for 65 MB.
_XZ_MEMORY_BYTES = 256 << 20
_STEP_BYTES = 1 << 14
# Real text expands less than this; anything beyond is a decompression bomb.
_MAX_EXPANSION = 64


def ending_of(name: str) -> str:
    """The ending of a file's name, including that of its compression."""
    stem, ending = os.path.splitext(name)
    return os.path.splitext(stem)[1] + ending if ending.lower() in COMPRESSIONS else ending


def is_plain_json(name: str) -> bool:
    """Whether a name ends in .json, compressed or not: the file may be JSON lines, or one JSON value."""
    ending = ending_of(name.lower())
    return ending.startswith(".json") and not ending.startswith(".jsonl")


class ByteStream(Protocol):
    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end."""

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer as far as possible; 0 at the end."""


@contextlib.contextmanager
def open_stream(
    path: str,
    compression: str,
    *,
    start: int = 0,
    pin: Pin | None = None,
    step: int = BATCH_BYTES,
    separator: bytes = b"",
    check: bool = True,
) -> Iterator[ByteStream]:
    """The text of a source as a stream of bytes, decompressed, read about `step` at a time. A plain file can start
    anywhere.

    With `check`, a file whose first bytes are not text is a `NotTextError`; a `separator` of texts may be any bytes.
    """
    with explained(path):
        file = open_file(path, pin, step=step)
    with file:
        if compression:
            if not file.size():
                raise SourceError(f"cannot read {path}: it is empty, not even compressed", hint="remove the file")
            with explained(path), _decompressed(file, compression) as stream:
                yield _CheckedStream(stream, path, separator if check else None)
        else:
            file.seek(start)
            yield _CheckedStream(file, path, separator if check and not start else None)


def _decompressed(file: pa.NativeFile, compression: str) -> contextlib.AbstractContextManager[ByteStream]:
    if compression in ("bz2", "xz"):
        return contextlib.nullcontext(_PythonStream(file, compression))
    stream: contextlib.AbstractContextManager[ByteStream] = pa.CompressedInputStream(file, _CODECS[compression])
    return stream


class _PythonStream:
    """The text of a .bz2 or .xz file: one stream or several, in .xz files with padding between them."""

    def __init__(self, file: pa.NativeFile, compression: str) -> None:
        self._file = file
        self._is_xz = compression == "xz"
        self._begin()

    def _begin(self) -> None:
        import bz2
        import lzma

        self._failed = lzma.LZMAError  # bz2 raises OSError
        self._stream: Any = (
            lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES) if self._is_xz else bz2.BZ2Decompressor()
        )

    def read(self, size: int) -> bytes:
        while True:
            given = b""
            if self._stream.eof:
                given = self._without_padding(self._stream.unused_data) or self._next()
                if not given:
                    return b""
                self._begin()
            elif self._stream.needs_input and not (given := self._next()):
                raise OSError("Truncated compressed stream")
            try:
                data: bytes = self._stream.decompress(given, size)
            except self._failed as error:
                raise OSError(f"xz decompress failed: {error}") from None
            if data:
                return data

    def _next(self) -> bytes:
        """The next bytes of the file that are not padding."""
        while data := bytes(self._file.read(_STEP_BYTES)):
            if not self._stream.eof or (data := self._without_padding(data)):
                return data
        return b""

    def _without_padding(self, data: bytes) -> bytes:
        return data.lstrip(b"\0") if self._is_xz else data

    def readinto(self, buffer: memoryview) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def check_text(path: str, compression: str, pin: Pin, *, separator: bytes) -> None:
    """Raise `NotTextError` if the first bytes of a file are not text."""
    with open_stream(path, compression, pin=pin, step=HEAD_BYTES, separator=separator) as stream:
        stream.read(HEAD_BYTES)


def wrong_kind(path: str, pin: Pin) -> NotTextError | None:
    """The error for a file named like a table whose first bytes show that it is something else; None otherwise."""
    with explained(path), open_file(path, pin, step=HEAD_BYTES) as file:
        kind = recognise(file.read(HEAD_BYTES))
    return None if kind is None or kind in MAYBE_TABLES else not_text(path, kind, "its name says that it is a table")


def not_text(path: str, kind: FileType, why: str = "only UTF-8 text is read") -> NotTextError:
    return NotTextError(
        f"{path} is {kind.name}; {why}",
        hint=f"{kind.hint}; or leave it out. An unfinished build resumes if prepare gets `update=True`",
    )


def expansion(path: str, compression: str, pin: Pin, *, max_bytes: int) -> float:
    """The bytes of text per compressed byte, from the first `max_bytes` of a file."""
    with explained(path), open_file(path, pin, step=max_bytes) as file:
        head = file.read(max_bytes)
    num_bytes = 0
    # The data is cut off unless the file is small.
    with contextlib.suppress(OSError), _decompressed(pa.BufferReader(head), compression) as stream:
        while (count := len(stream.read(_STEP_BYTES))) and num_bytes < _MAX_EXPANSION * len(head):
            num_bytes += count
    return max(1, num_bytes) / max(1, len(head))


@contextlib.contextmanager
def explained(path: str, *, where: str = "") -> Iterator[None]:
    """Turn the errors of libraries into ours, with the file and `where` in it."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:  # UnicodeDecodeError: names of columns
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "run the same command again, or fix or remove the file and prepare again with `update=True`"
        if isinstance(error, PermissionError):
            hint = hint_for(error, hint)
        raise SourceError(f"cannot read {path}{where}: {reason}", hint=hint) from None


class _CheckedStream:
    """A stream whose errors say at which byte it broke. The first bytes of a file are checked to be text."""

    def __init__(self, stream: ByteStream, path: str, separator: bytes | None) -> None:
        self._stream = stream
        self._path = path
        self._separator = separator  # None once the first bytes are checked
        self._at = 0

    def read(self, size: int) -> bytes:
        with explained(self._path, where=f" after {self._at} bytes of text"):
            data = self._stream.read(size)
        self._check(data)
        self._at += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        with explained(self._path, where=f" after {self._at} bytes of text"):
            count = self._stream.readinto(buffer)
        self._check(buffer[:count])
        self._at += count
        return count

    def _check(self, data: bytes | memoryview) -> None:
        if self._separator is None:
            return
        separator, self._separator = self._separator, None
        kind = recognise(bytes(data[:HEAD_BYTES]), separator=separator)
        if kind is not None:
            raise not_text(self._path, kind)


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
_BZIP2 = FileType("compressed with bzip2", "rename it so that it ends in .bz2, like a.jsonl.bz2")
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
    **{
        b"BZh%d1AY&SY" % level: FileType("compressed with bzip2", "rename it so that it ends in .bz2")
        for level in range(1, 10)
    },
    b"\xfd7zXZ\0": FileType("compressed with xz", "rename it so that it ends in .xz, like a.jsonl.xz"),
    b"\x04\x22\x4d\x18": FileType("compressed with lz4", "rename it so that it ends in .lz4, like a.jsonl.lz4"),
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
