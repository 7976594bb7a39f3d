"""A home with a dataset in it and a stranger's folder beside it, made anew for each trial.

    root/home/dataset    what a command is given; something is wrong with it
    root/home/theirs     a stranger's: nothing of it may change, by whatever way a command comes to it
    root/home/sources    what the dataset was made of
    root/out, tmp        where a command may write
    root/good            how each subject looks when nothing is wrong with it

A trial begins with a copy of a good subject, and compares what is around it before and after.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pkgutil
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenmill
from differ.children import NOBODY
from tokenmill.errors import Interrupted
from tokenmill.formats.templar import consolidate
from tokenmill.storage import locks

LAYOUTS = ("catid", "datatrove", "huggingface", "litdata", "llmc", "mds", "megatron", "nanogpt", "olmo", "templar")
# Sizes that give each layout several files.
SIZES: dict[str, dict[str, int]] = {
    "llmc": {"shard_size": 1024},
    "mds": {"shard_size": 2048},
    "templar": {"seq_len": 16, "shard_size": 1024},
}
SEQ_LEN = 32
RECIPE: dict[str, Any] = {"tokenizer": "char", "split": {"val": 0.2}, "unit_bytes": 2000}
Tree = dict[str, str]
# Kind and permissions, size, time, inode, and the content or where a link leads.
About = tuple[int, int, int, int, str]


@dataclass(frozen=True, slots=True)
class Home:
    """The places of a trial."""

    root: Path
    bucket: Any = None

    @property
    def dataset(self) -> Path:
        return self.root / "home/dataset"

    @property
    def theirs(self) -> Path:
        return self.root / "home/theirs"

    @property
    def sources(self) -> Path:
        return self.root / "home/sources"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def good(self, subject: str) -> Path:
        return self.root / "good" / subject

    def begin(self, subject: str, uid: int | None = None) -> None:
        """Everything as it is when nothing has happened; the files belong to `uid`."""
        for path in (self.dataset, self.theirs, self.sources, self.out, self.root / "tmp", self.root / "cache"):
            remove(path)
        shutil.copytree(self.good("dataset" if subject == "sources" else subject), self.dataset)
        shutil.copytree(self.good("sources"), self.sources)
        make_stranger(self.theirs)
        for path in (self.out, self.root / "tmp"):
            path.mkdir()
        if uid is not None and os.getuid() == 0:
            for path in [self.root / "home", self.out, self.root / "tmp"]:
                own(path, uid)

    def around(self) -> dict[str, About]:
        """Everything outside of the dataset and of where a command may write."""
        found: dict[str, About] = {"": (0, 0, 0, 0, " ".join(sorted(os.listdir(self.root / "home"))))}
        for folder, folders, names in os.walk(self.root / "home"):
            if folder == str(self.root / "home"):
                folders[:] = [name for name in folders if name != "dataset"]
                names[:] = [name for name in names if name != "dataset"]
            for name in (*folders, *names):
                path = os.path.join(folder, name)
                found[os.path.relpath(path, self.root)] = about(path)
        for name in sorted(os.listdir(self.root / "tmp")):
            found[f"tmp/{name}"] = (0, 0, 0, 0, "")
        return found


def about(path: str) -> About:
    found = os.lstat(path)
    content = ""
    if stat.S_ISLNK(found.st_mode):
        content = os.readlink(path)
    elif stat.S_ISREG(found.st_mode) and found.st_size < 1 << 24:
        content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return found.st_mode, found.st_size, found.st_mtime_ns, found.st_ino, content


def tree(path: Path) -> Tree:
    """The digest of every file, also of one that a link leads to, but for .build and packing plans.

    What is no file, cannot be read or is huge has a word in its place.
    """
    found = {}
    for folder, folders, names in os.walk(path, followlinks=True):
        inside = os.path.relpath(folder, path)
        folders[:] = [name for name in folders if (inside, name) not in ((".", ".build"), (".", "packing"))]
        folders[:] = [name for name in folders if os.path.realpath(os.path.join(folder, name)) != "/dev"]
        if inside.count("/") > 3:  # a link to a folder above it
            folders.clear()
        for name in names:
            file = Path(folder, name)
            found[os.path.normpath(f"{inside}/{name}")] = content_of(file)
    return found


def content_of(file: Path) -> str:
    try:
        about = file.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > 1 << 24:
            return "no file"
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return "not there"


def remove(path: Path) -> None:
    """Remove whatever a trial left, and be it a link, a pipe, or a folder without permissions."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
    shutil.rmtree(path)


def own(path: Path, uid: int) -> None:
    os.chown(path, uid, uid, follow_symlinks=False)
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            os.chown(os.path.join(folder, name), uid, uid, follow_symlinks=False)


def make_stranger(folder: Path) -> None:
    """Files by the names that ours have, so that whoever comes here by a link finds what to move, sweep or replace."""
    for parent in ("", "full", "empty"):
        (folder / parent).mkdir()
        names = ("00000.bin", "00000.idx", "00000.parquet", "letter", "a.tmp", "plan.json", "lock", "dataset.json")
        for name in names if parent != "empty" else ():
            (folder / parent / name).write_bytes(f"a stranger's {parent} {name}\n".encode() * 40)
    (folder / "full/.build").mkdir()
    (folder / "full/.build/lock").write_bytes(b"a stranger's")
    os.mkfifo(folder / "pipe")


def load_all() -> None:
    """Load what commands load by and by: somebody who is not root may not reach the modules."""
    # No command needs the adapters for frameworks, which may not be installed.
    adapters = tuple(f"tokenmill.{name}" for name in ("jax", "lightning", "torchtitan", "transformers", "build.ray"))
    for module in pkgutil.walk_packages(tokenmill.__path__, "tokenmill."):
        if not module.name.startswith(adapters) and "__main__" not in module.name:
            importlib.import_module(module.name)
    for name in ("timeit", "pyarrow.parquet", "pyarrow.compute", "yaml", "obstore", "tiktoken", "tokenizers"):
        importlib.import_module(name)


@contextlib.contextmanager
def make_home() -> Iterator[Home]:
    """A home with all subjects: a dataset, one that is not finished, an import, the files of every layout, shards."""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="tokenmill-hostile-", dir=shared) as root, quick_locks():
        load_all()
        os.chmod(root, 0o755)
        home = Home(Path(root))
        write_sources(home.good("sources"))
        for place in (home.root / "home", home.dataset.parent):
            place.mkdir(exist_ok=True)
        shutil.copytree(home.good("sources"), home.sources)
        with contextlib.suppress(Interrupted):
            tokenmill.prepare(home.sources, home.dataset, workers=1, watch=interrupt, **RECIPE)
        keep(home, "unfinished")
        tokenmill.prepare(home.sources, home.dataset, workers=1, **RECIPE)
        read_packed(home.dataset)
        keep(home, "dataset")
        remove(home.dataset)
        for layout in LAYOUTS:
            tokenmill.export(home.good("dataset"), home.dataset, to=layout, workers=1, **SIZES.get(layout, {}))
            keep(home, f"layout {layout}")
            remove(home.dataset)
        tokenmill.import_(home.good("layout megatron"), home.dataset, layout="megatron", eot_id=0, workers=1)
        keep(home, "import")
        remove(home.dataset)
        home.dataset.mkdir()
        for shard in home.good("layout templar").glob("train_*.npy"):
            shutil.copy2(shard, home.dataset)
        keep(home, "shards")
        consolidate(home.dataset, 16, workers=1)
        keep(home, "consolidated")
        with contextlib.ExitStack() as stack:
            stack.enter_context(environment(TMPDIR=f"{root}/tmp", TOKENMILL_CACHE=f"{root}/cache", HOME=f"{root}/out"))
            yield home


def write_sources(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(3):
        texts = [f"text {number} {line} " + "abc defg " * (line % 7) for line in range(40)]
        data = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number}.jsonl").write_text(data + "a bad line\n")


def interrupt(message: dict[str, Any]) -> None:
    """Stop a build when its first unit is done."""
    if message["kind"] == "done":
        raise KeyboardInterrupt


def read_packed(dataset: Path) -> None:
    next(iter(tokenmill.DataLoader(dataset, SEQ_LEN, 2, packing="best_fit", prefetch=0)))


def keep(home: Home, subject: str) -> None:
    shutil.copytree(home.dataset, home.good(subject))


@contextlib.contextmanager
def quick_locks() -> Iterator[None]:
    """A lock of which nobody knows whose it is is waited for by the half minute; here, for a moment."""
    defaults: Any = locks.locked.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    before = defaults["patience"]
    defaults["patience"] = 0.5
    try:
        yield
    finally:
        defaults["patience"] = before


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    tempfile.tempdir = None
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = None


def is_root() -> bool:
    return os.getuid() == 0


__all__ = ["LAYOUTS", "NOBODY", "RECIPE", "SEQ_LEN", "SIZES", "Home", "content_of", "is_root", "make_home", "tree"]
