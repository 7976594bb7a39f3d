"""What a stranger's dataset may have in the place of a file or a folder, and beside them.

An oddity is planted at one path of a dataset. `is_benign` says that all content is what it should be, wherever it is;
`is_forged` that a record says something else, so that other results may be right.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from differ.homes import Home, is_root, remove

HUGE_BYTES = 1 << 42
Plant = Callable[[Home, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddity:
    name: str
    plant: Plant
    of: str  # "file", "folder", "new", "name", "record": what it takes the place of
    is_benign: bool = False
    is_forged: bool = False
    needs_user: bool = False  # root may do everything, so a command has to run as somebody else


def _link(target: str) -> Plant:
    """A link, to a place in the stranger's folder or anywhere else."""

    def plant(home: Home, path: Path) -> None:
        remove(path)
        os.symlink(home.theirs / target, path)

    return plant


def _moved(home: Home, path: Path) -> None:
    """The same content, which is at another place now."""
    place = home.theirs / "moved"
    shutil.move(path, place)
    os.symlink(place, path)


def _loop(home: Home, path: Path) -> None:
    remove(path)
    os.symlink(path.name, path)


def _upwards(home: Home, path: Path) -> None:
    remove(path)
    os.symlink(os.path.relpath(home.dataset, path.parent), path)


def _pipe(home: Home, path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def _socket(home: Home, path: Path) -> None:
    remove(path)
    before = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def _device(home: Home, path: Path) -> None:
    remove(path)
    if is_root():
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    else:
        os.symlink("/dev/zero", path)


def _folder(home: Home, path: Path) -> None:
    remove(path)
    path.mkdir()
    (path / "inside").write_bytes(b"something")


def _second_name(home: Home, path: Path) -> None:
    os.link(path, home.theirs / "same")


def _name_of_theirs(home: Home, path: Path) -> None:
    remove(path)
    os.link(home.theirs / "letter", path)


def _empty(home: Home, path: Path) -> None:
    path.write_bytes(b"")


def _huge(home: Home, path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE_BYTES)


def _file(home: Home, path: Path) -> None:
    remove(path)
    path.write_bytes(b"a file")


def _mode(mode: int) -> Plant:
    return lambda home, path: os.chmod(path, mode)


def _links(of: str) -> list[Oddity]:
    return [
        Oddity(name="a link to a stranger's file", plant=_link("letter"), of=of),
        Oddity(name="a link to a stranger's folder", plant=_link("full"), of=of),
        Oddity(name="a link to an empty folder", plant=_link("empty"), of=of),
        Oddity(name="a link that leads nowhere", plant=_link("nothing"), of=of),
        Oddity(name="a link to itself", plant=_loop, of=of),
        Oddity(name="a link to the dataset", plant=_upwards, of=of),
        Oddity(name="a link to a device", plant=_link("/dev/zero"), of=of),
        Oddity(name="a link to /dev", plant=_link("/dev"), of=of),
        Oddity(name="a link to a pipe", plant=_link("pipe"), of=of),
        Oddity(name="a pipe", plant=_pipe, of=of),
        Oddity(name="a socket", plant=_socket, of=of),
        Oddity(name="a device", plant=_device, of=of),
        Oddity(name="a name of a stranger's file", plant=_name_of_theirs, of=of),
    ]


ODDITIES = [
    *_links("file"),
    Oddity(name="a link to where it is", plant=_moved, of="file", is_benign=True),
    Oddity(name="a folder", plant=_folder, of="file"),
    Oddity(name="a stranger has it too", plant=_second_name, of="file", is_benign=True),
    Oddity(name="an empty file", plant=_empty, of="file"),
    Oddity(name="a huge file", plant=_huge, of="file"),
    Oddity(name="an unreadable file", plant=_mode(0), of="file", needs_user=True),
    Oddity(name="an unwritable file", plant=_mode(0o400), of="file", needs_user=True, is_benign=True),
    *_links("folder"),
    Oddity(name="a link to where it is", plant=_moved, of="folder", is_benign=True),
    Oddity(name="a file", plant=_file, of="folder"),
    Oddity(name="an unreadable folder", plant=_mode(0), of="folder", needs_user=True),
    Oddity(name="a folder without its names", plant=_mode(0o300), of="folder", needs_user=True),
    Oddity(name="an unwritable folder", plant=_mode(0o500), of="folder", needs_user=True, is_benign=True),
    *_links("new"),
    Oddity(name="a file", plant=_file, of="new"),
    Oddity(name="a huge file", plant=_huge, of="new"),
    Oddity(name="a folder", plant=_folder, of="new"),
]
# What commands make if it is not there.
NEW_NAMES = (
    "nanogpt", "packing", ".build", ".build/kept", ".build/quarantine", ".build/lock", ".build/packs", "nodes.json",
    "train/00000.bin.part", "train/a.0123456789ab.tmp", ".build/pieces/a.0123456789ab.tmp", "a.0123456789ab.tmp",
    ".build/request.json", ".build/export.json", ".build/receipts", "dataset.json", "train", "test", "tokens.bin",
    "sample_ids.bin", "index.json", "val", "provenance", ".build/failure.json", ".build/fetched.json",
)  # fmt: skip
# As bytes, since a name need not be text. Look-alikes: a Cyrillic letter, and a combining mark behind a plain one.
ODD_NAMES = (
    b"..\n", b" ", b"-rf", b"--help", b"*", b"a\nb.bin", b"00000\r.bin", b"\x1b[31mred", b"\x1b]0;title\x07", b"a\tb",
    b"\xff\xfe.bin", b"x" * 255, b"00000.bin ", b"00000.BIN", "dat\u0430set.json".encode(), "tr\u00e0in".encode(),
    "a\u0300".encode(), "\u202egnp.bin".encode(), b"99999999999999999999.bin", b"00001.idx", b"aux", b"\\\\host",
    b"train_000001.npy", b"train_000000.npy.tmp", b"val.bin", b"x.csv.gz", b"x.ds.index", b"%s%n", b"{}", b"~",
)  # fmt: skip


def odd_name(name: bytes) -> Plant:
    """A file of an odd name beside the others of a folder."""

    def plant(home: Home, path: Path) -> None:
        with open(os.path.join(os.fsencode(path), name), "xb") as file:
            file.write(b"odd")

    return plant
