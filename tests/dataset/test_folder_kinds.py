"""Every kind of folder is recognised, and each command that cannot use it names one that can."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import tokenmill as library
from conftest import Command, write_jsonl
from s3 import Bucket
from tokenmill.dataset.folder_kinds import kind_of
from tokenmill.formats.templar import consolidate
from tokenmill.storage.local import Folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind, under its name."""
    root: Path = tmp_path_factory.mktemp("kinds")
    write_jsonl(root / "a.jsonl", [f"document {number}" for number in range(50)])
    library.prepare(root / "a.jsonl", root / "built", tokenizer="byte", workers=1)
    copied(root, "built", "copy", ".build")
    copied(root, "built", "unfinished_build", "dataset.json")
    copied(root, "built", "unfinished_copy", ".build", "dataset.json")
    library.export(root / "built", root / "export", to="mds")
    copied(root, "export", "unfinished_export", ".build/export.json")
    library.import_(root / "export", root / "imported", layout="mds")
    copied(root, "imported", "unfinished_import", "dataset.json")
    copied(root, "export", "layout", ".build")
    (root / "consolidation").mkdir()
    np.save(root / "consolidation/train_000000.npy", np.arange(64, dtype=np.uint16))
    consolidate(root / "consolidation", 8)
    copied(root, "consolidation", "unfinished_consolidation", ".build/receipts/tokens.bin.json")
    (root / "empty").mkdir()
    (root / "file").write_text("text")
    (root / "unknown").mkdir()
    (root / "unknown/notes.txt").write_text("text")
    library.export(root / "built", root / "catid", to="catid")
    shutil.rmtree(root / "catid/.build")
    return root


def copied(root: Path, origin: str, name: str, *without: str) -> None:
    shutil.copytree(root / origin, root / name)
    for lost in without:
        path = root / name / lost
        shutil.rmtree(path) if path.is_dir() else path.unlink()


KINDS = {
    **dict.fromkeys(("built", "copy", "imported", "export", "consolidation", "layout", "empty", "file", "unknown")),
    **{f"unfinished_{what}": None for what in ("build", "copy", "export", "import", "consolidation")},
    "missing": None,
    "catid": "layout",
}


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_recognised_by_its_names_and_records(folders: Path, name: str) -> None:
    kind = kind_of(Folder(str(folders / name)))
    assert kind.name == (KINDS[name] or name)
    assert kind.is_dataset == (name in ("built", "copy", "imported"))


IMPORT = "tokenmill import {path} -o OUT --from "
AGAIN = "run the same tokenmill {} command again"


@pytest.mark.parametrize(
    ("name", "command", "code", "helps"),
    [
        *(("missing", command, 2, "check the path") for command in ("verify", "repair", "inspect", "peek", "push")),
        *(("unknown", command, 2, "notes.txt") for command in ("verify", "repair", "inspect", "peek", "push")),
        *(("unfinished_build", command, 4, AGAIN.format("prepare")) for command in ("verify", "inspect", "peek")),
        *(("unfinished_copy", command, 4, AGAIN.format("pull")) for command in ("verify", "inspect", "push")),
        *(("unfinished_import", command, 4, AGAIN.format("import")) for command in ("verify", "repair", "peek")),
        *(("unfinished_export", command, 4, AGAIN.format("export")) for command in ("verify", "repair", "push")),
        ("unfinished_consolidation", "verify", 4, AGAIN.format("consolidate")),
        ("export", "repair", 2, AGAIN.format("export")),
        ("consolidation", "repair", 2, AGAIN.format("consolidate")),
        *(("export", command, 2, f"{IMPORT}mds") for command in ("inspect", "peek", "push")),
        *(("catid", command, 2, f"{IMPORT}catid") for command in ("verify", "repair", "inspect", "peek", "push")),
        ("empty", "verify", 2, "an empty folder"),
        ("file", "verify", 2, "a single file"),
    ],
)
def test_a_command_says_what_a_folder_is_and_what_helps(
    folders: Path, tokenmill: Command, name: str, command: str, code: int, helps: str
) -> None:
    path = folders / name
    target = ("s3://bucket/x",) if command == "push" else ()
    said = tokenmill(command, path, *target, code=code).stderr
    assert said.startswith("error: ")
    assert helps.format(path=path) in said


def test_the_command_that_a_hint_gives_does_it(folders: Path, tokenmill: Command, tmp_path: Path) -> None:
    hint = tokenmill("peek", folders / "catid", code=2).stderr.rpartition(": tokenmill ")[2].split()
    tokenmill(*hint, "-q")
    assert tokenmill("verify", "OUT").stdout.startswith("ok: ")
    assert "imported   from catid" in tokenmill("inspect", "OUT").stdout


@pytest.mark.parametrize("name", ["export", "consolidation"])
def test_files_with_a_record_are_verified_by_it(folders: Path, tokenmill: Command, tmp_path: Path, name: str) -> None:
    shutil.copytree(folders / name, tmp_path / name)
    assert tokenmill("verify", name).stdout.startswith("ok: ")
    assert "does not know its sources" in tokenmill("verify", name, "--source", "all", code=2).stderr
    largest = max((tmp_path / name).rglob("*.[bm][id][ns]"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.write_bytes(data)
    assert tokenmill("verify", name, "--quick").stdout.startswith("ok: ")
    failed = tokenmill("verify", name, code=4)
    assert f"bad: {largest.relative_to(tmp_path / name)}: sha256 is " in failed.stdout
    assert AGAIN.format("export" if name == "export" else "consolidate") in failed.stderr
    largest.unlink()
    assert "is missing" in tokenmill("verify", name, "--quick", code=4).stdout


@pytest.mark.parametrize(
    ("name", "helps"),
    [("built", "tokenmill repair"), ("copy", AGAIN.format("pull")), ("imported", AGAIN.format("import"))],
)
def test_damage_is_mended_by_what_made_the_dataset(
    folders: Path, tokenmill: Command, tmp_path: Path, name: str, helps: str
) -> None:
    shutil.copytree(folders / name, tmp_path / name)
    (tmp_path / name / "train/00000.bin").write_bytes(b"damaged")
    assert helps in tokenmill("verify", name, code=4).stderr


def test_a_url_without_a_dataset_is_a_usage_error(bucket: Bucket, tokenmill: Command) -> None:
    for command in ("verify", "inspect", "peek"):
        assert "there is no dataset s3://" in tokenmill(command, f"{bucket.url}/nothing", code=2).stderr
