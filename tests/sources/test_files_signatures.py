"""What is not text is recognised by its first bytes, and text of any script and any habit is not taken for it."""

# ruff: noqa: RUF001 - letters of other scripts that look like Latin ones are what these texts are for

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import random
import sqlite3
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
import zstandard

from tokenmill.sources.files import HEAD_BYTES, recognise

TEXTS = {
    "English": "Hello, world. This is a text.\nIt has two lines.\n",
    "Russian": "Привет, мир. Это текст.\nВ нём две строки.\n",
    "Greek": "Γειά σου Κόσμε. Αυτό είναι κείμενο.\n",
    "Hebrew": "שלום עולם. זה טקסט.\n",
    "Arabic": "مرحبا بالعالم. هذا نص.\n",
    "Hindi": "नमस्ते दुनिया। यह एक पाठ है।\n",
    "Thai": "สวัสดีชาวโลก นี่คือข้อความ\n",
    "Japanese": "こんにちは、世界。これはテキストです。\n",
    "Chinese": "你好，世界。这是一个文本。\n",
    "Korean": "안녕하세요 세계. 이것은 텍스트입니다.\n",
}
# Those whose characters are mostly of the first 4,096; what UTF-16 makes of the others is binary data by any measure.
ALPHABETS = ("English", "Russian", "Greek", "Hebrew", "Arabic", "Hindi", "Thai")
PROSE = "This text is long enough, and has all kinds of words in it. " * 40


def written(write: Callable[[Any], Any]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def zipped(*names: str) -> bytes:
    def write(file: io.BytesIO) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(name, PROSE)

    return written(write)


def tarred(file: io.BytesIO) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(PROSE)
        archive.addfile(member, io.BytesIO(PROSE.encode()))


def in_arrow(open_writer: Callable[..., Any]) -> bytes:
    table = pa.table({"text": [PROSE] * 20})

    def write(file: io.BytesIO) -> None:
        with open_writer(file, table.schema) as writer:
            writer.write_table(table)

    return written(write)


def database(folder: Path) -> bytes:
    with sqlite3.connect(folder / "a.db") as connection:
        connection.execute("create table texts (text)")
        connection.execute("insert into texts values (?)", [PROSE])
    return (folder / "a.db").read_bytes()


TABLE = pa.table({"text": [PROSE] * 20})
BINARIES = {
    "a PDF document": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n" + PROSE.encode(),
    "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "a web archive (WARC)": b"WARC/1.0\r\nWARC-Type: warcinfo\r\n\r\n" + PROSE.encode(),
    "a zip archive": zipped("a.txt"),
    "an Office document": zipped("[Content_Types].xml", "word/document.xml"),
    "an EPUB book": zipped("mimetype-application/epub"),
    "an old Office document": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504),
    "compressed with gzip": gzip.compress(PROSE.encode()),
    "compressed with zstd": zstandard.compress(PROSE.encode()),
    "compressed with bzip2": bz2.compress(PROSE.encode()),
    "compressed with lz4": pa.Codec("lz4").compress(PROSE.encode(), asbytes=True),
    "compressed with xz": lzma.compress(PROSE.encode()),
    "a tar archive": written(tarred),
    "a parquet file": written(lambda file: pq.write_table(TABLE, file, compression=None, use_dictionary=False)),
    "an Arrow file": in_arrow(pa.ipc.new_stream),
    "an ORC file": written(lambda file: pyarrow.orc.write_table(TABLE, file)),
    "a NumPy array": written(lambda file: np.save(file, np.arange(10))),
    "a Python pickle": pickle.dumps({"text": PROSE}),
    "a safetensors file": struct.pack("<Q", 40) + b'{"a":{"dtype":"F32","data_offsets":[0,1]}}' + PROSE.encode(),
    "a file of binary records, such as a TFRecord": struct.pack("<Q", 2400) + b"\x12\x34\x56\x78" + PROSE.encode(),
    "a program": Path(sys.executable).read_bytes(),
    "a PNG image": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    "a JPEG image": b"\xff\xd8\xff\xe0\0\x10JFIF\0",
    "an image": b"GIF89a" + struct.pack("<HHBBB", 3, 3, 0xF2, 0, 0) + bytes(12) + b"\x2c" + bytes(8),
    "a sound or a film": b"RIFF" + struct.pack("<I4s4sIHHII", 2400, b"WAVE", b"fmt ", 16, 1, 1, 8000, 8000) + bytes(50),
}


@pytest.mark.parametrize("name", BINARIES)
def test_a_file_is_recognised_by_its_signature(name: str) -> None:
    found = recognise(BINARIES[name])
    assert found is not None
    assert found.name == name
    assert found.hint


def test_more_of_them(tmp_path: Path) -> None:
    names = [
        (in_arrow(pa.ipc.new_file), "an Arrow file"),
        (written(lambda file: np.savez(file, a=np.arange(3))), "a zip archive"),
        (database(tmp_path), "an SQLite database"),
        *((pickle.dumps([PROSE], protocol), "a Python pickle") for protocol in range(2, 6)),
    ]
    for data, name in names:
        found = recognise(data)
        assert (found and found.name) == name


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("language", TEXTS)
def test_a_byte_order_mark_tells_the_encoding(language: str, encoding: str) -> None:
    found = recognise(TEXTS[language].encode(encoding))
    assert found is not None
    assert found.name == f"{encoding.upper()} text"
    assert f"iconv -f {encoding.upper()} -t UTF-8" in found.hint


@pytest.mark.parametrize("order", ["le", "be"])
@pytest.mark.parametrize("language", TEXTS)
def test_wide_characters_without_a_mark_are_recognised(language: str, order: str) -> None:
    for text in (TEXTS[language], TEXTS[language] * 20):
        wide = recognise(text.encode(f"utf-32-{order}"))
        assert wide is not None
        assert wide.name == f"UTF-32{order.upper()} text"
        found = recognise(text.encode(f"utf-16-{order}"))
        if language in ALPHABETS:
            assert found is not None
            assert found.name == f"UTF-16{order.upper()} text"
    assert recognise((TEXTS[language] * 20).encode(f"utf-16-{order}")) is not None


def test_bytes_of_no_text_are_binary_data() -> None:
    chance = random.Random(0)
    tokens = np.array([min(50256, int(chance.paretovariate(0.4))) for _ in range(4000)])
    for data in (
        chance.randbytes(HEAD_BYTES),
        chance.randbytes(200),
        bytes(HEAD_BYTES),
        bytes(1000) + PROSE.encode(),
        np.random.default_rng(0).normal(size=1000).astype(np.float32).tobytes(),
        tokens.astype("<u2").tobytes(),
        tokens.astype("<i4").tobytes(),
        b"\0\x01\x02\x03\x04\x05\x06\x07",
    ):
        assert recognise(data) is not None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("language", TEXTS)
def test_text_of_any_script_is_text(language: str, encoding: str) -> None:
    for text in (TEXTS[language], TEXTS[language] * 500, TEXTS[language][:3]):
        assert recognise(text.encode(encoding)) is None


@pytest.mark.parametrize(
    ("language", "encoding"),
    [
        ("Russian", "koi8-r"),
        ("Russian", "cp1251"),
        ("Japanese", "shift_jis"),
        ("Japanese", "euc-jp"),
        ("Japanese", "iso2022_jp"),
        ("Korean", "euc-kr"),
        ("Korean", "iso2022_kr"),
        ("Chinese", "gb18030"),
        ("Chinese", "big5"),
        ("Greek", "iso8859_7"),
        ("Thai", "tis-620"),
    ],
)
def test_text_of_an_old_encoding_is_text(language: str, encoding: str) -> None:
    assert recognise(TEXTS[language].encode(encoding, errors="replace")) is None
    assert recognise(TEXTS[language].encode(encoding, errors="replace") * 200) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"a",
        b"\0",
        b"a\0b\n",
        b"one\0two\nthree\0four\n",
        PROSE.encode().replace(b"kinds", b"kin\0ds"),
        b"\x1b[31mred\x1b[0m and \x1b[1mbold\x1b[0m\n" * 50,
        b"8=FIX.4.2\x019=176\x0135=8\x0149=PHLX\x0156=PERS\x01\n" * 30,
        b"17\x01name\x01another\x0142\n" * 50,
        b"page one\x0cpage two\x0c\n",
        b"bold b\x08bo\x08ol\x08ld\x08d\n" * 9,
        b"PK is a unit of temperature\n",
        b"GIF89a is a format of images\n" * 9,
        b"RIFF is a container for sounds and films\n" * 9,
        b"ORC\nThe orcs of Middle-earth\n" * 9,
        b"BZh is how it begins\n",
        b"%PDF is a comment\n",
        b"WARC is a format\n",
        b"Obj is short for object\n",
        b"MMIDIDX",
        b"ID3 tags are of music\n",
        b"\xffa line of Latin-1: \xe9\xe8\n",
    ],
)
def test_text_of_any_habit_is_text(data: bytes) -> None:
    assert recognise(data) is None


def test_a_separator_of_texts_may_be_any_bytes() -> None:
    data = b"one\0two\0three\0four\0five\0six\0"
    assert recognise(data) is not None
    assert recognise(data, separator=b"\0") is None
    assert recognise(b"ab\0\0cd\0\0ef\0\0", separator=b"\0\0") is None
    assert recognise(zipped("a.txt"), separator=b"\0") is not None


def test_the_source_code_and_the_pages_of_this_project_are_text() -> None:
    root = Path(__file__).parents[2]
    files = [
        file for pattern in ("src/**/*.py", "tests/**/*.py", "docs/**/*.md", "*.md") for file in root.glob(pattern)
    ]
    assert len(files) > 200
    assert not [file for file in files if recognise(file.read_bytes()[:HEAD_BYTES])]
