from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import Command, leftovers, tree
from tokenmill import records
from tokenmill.build import workspace
from tokenmill.build.workspace import FAILURE
from tokenmill.errors import SourceChangedError
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import LOCK, Holder
from tokenmill.units.receipts import NO_LIMIT, load_receipt, receipt_name

STOPPED_BEHIND_ITS_MANIFEST = """
import os, signal, sys
import tokenmill
from tokenmill.build import workspace as state

state.clean_up = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
tokenmill.prepare(sys.argv[1], sys.argv[2], tokenizer="byte", workers=1, scratch=sys.argv[3])
"""


@pytest.fixture
def stopped(corpus: Path, tmp_path: Path) -> Path:
    """A finished dataset whose build was killed before it had cleaned up."""
    arguments = [str(corpus), str(tmp_path / "out"), str(tmp_path / "scratch")]
    done = subprocess.run([sys.executable, "-c", STOPPED_BEHIND_ITS_MANIFEST, *arguments], check=False)
    assert done.returncode == -signal.SIGKILL
    shutil.copy(tmp_path / "out/dataset.json", tmp_path / "out/dataset.json.0123456789ab.tmp")
    return tmp_path / "out"


def is_tidy(out: Path) -> bool:
    pieces = [name for name in os.listdir(out / ".build/pieces") if not name.endswith(".provenance.parquet")]
    return not pieces and not leftovers(out) and not (out / workspace.CLEAN).exists() and not (out / LOCK).exists()


def test_a_build_that_was_killed_behind_its_manifest_is_tidied_up_by_the_same_call(
    stopped: Path, corpus: Path, tmp_path: Path
) -> None:
    assert not is_tidy(stopped)
    result = tokenmill.prepare(str(corpus), stopped, tokenizer="byte", workers=1, scratch=tmp_path / "scratch")
    assert result.already_complete
    assert is_tidy(stopped)
    assert os.listdir(tmp_path / "scratch") == []


def test_repair_tidies_up_as_well(stopped: Path) -> None:
    assert tokenmill.repair(stopped, workers=1) == ()
    assert is_tidy(stopped)


def test_what_another_machine_works_on_is_left_alone(stopped: Path, corpus: Path) -> None:
    os.unlink(stopped / LOCK)
    elsewhere = Holder(machine="elsewhere", process=1, started="1", token="t")
    Folder(str(stopped)).write(LOCK, records.seal(elsewhere))
    before = tree(stopped)
    assert tokenmill.prepare(str(corpus), stopped, tokenizer="byte", workers=1).already_complete
    assert tree(stopped) == before


def test_a_finished_dataset_without_its_build_folder_stays_as_it_is(corpus: Path, tokenmill: Command) -> None:
    tokenmill("prepare", corpus, "-o", "out", "--tokenizer", "byte")
    out = corpus.parent / "out"
    shutil.rmtree(out / ".build")
    before = tree(out)
    tokenmill("prepare", corpus, "-o", "out", "--tokenizer", "byte")
    assert sorted(os.listdir(out / ".build")) == ["compared.json", "touched.json"], "the next time is quick"
    shutil.rmtree(out / ".build")
    assert tree(out) == before


def test_a_build_that_another_process_begins_at_this_moment_is_one_of_ours(corpus: Path, tmp_path: Path) -> None:
    class Begins(LocalFileSystem):
        def names(self, path: str) -> list[str]:
            if path.endswith(".build") and not os.path.exists(f"{path}/plan.json"):
                shutil.copy(tmp_path / "other/.build/plan.json", path)
            return super().names(path)

    tokenmill.prepare(str(corpus), tmp_path / "other", tokenizer="byte", workers=1)
    (tmp_path / "out/.build").mkdir(parents=True)
    workspace.check_ours(Folder(str(tmp_path / "out"), Begins()))


def test_a_build_that_was_killed_while_it_was_started_over_can_be_gone_on_with(corpus: Path, tmp_path: Path) -> None:
    class Dies(LocalFileSystem):
        def unlink(self, path: str) -> None:
            super().unlink(path)
            if path.endswith("plan.json"):
                raise KeyboardInterrupt

    tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="char", workers=1)
    before = tree(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        workspace.start_over(Folder(str(tmp_path / "out"), Dies()))
    tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="char", workers=1)
    assert tree(tmp_path / "out") == before


def test_a_receipt_stays_when_another_build_finished_and_cleaned_up(corpus: Path, tmp_path: Path) -> None:
    found = tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", workers=1).manifest
    folder = Folder(str(tmp_path / "out"))
    assert load_receipt(folder, 0, NO_LIMIT, found.fingerprint, rehash=False) is None
    assert folder.exists(receipt_name(0, NO_LIMIT))
    assert not folder.exists(".build/quarantine")


def test_a_note_of_a_failure_is_removed_when_the_dataset_stands(corpus: Path, tmp_path: Path) -> None:
    for _ in range(2):
        tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", workers=1)
        assert not (tmp_path / "out" / FAILURE).exists()
        (tmp_path / "out" / FAILURE).write_bytes(b"an older failure")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("is_clean", [True, False])
def test_units_that_were_damaged_are_told_of_with_the_place_where_they_are_kept(
    corpus: Path, tmp_path: Path, workers: int, is_clean: bool
) -> None:
    told: list[dict[str, Any]] = []

    def stop(event: dict[str, Any]) -> None:
        if event["kind"] == "done" and event["unit"] >= 3:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": "5KB", "workers": 1}
    with pytest.raises(tokenmill.TokenmillError, match="are saved"):
        tokenmill.prepare(corpus, tmp_path / "out", watch=stop, **options)
    build = tmp_path / "out/.build"
    if not is_clean:
        (build / "clean.json").unlink()
    (build / "pieces/000001.train.bin").write_bytes(b"shorter")
    (build / "receipts/000002.json").write_bytes(b"{}")
    tokenmill.prepare(corpus, tmp_path / "out", watch=told.append, **{**options, "workers": workers})
    (note,) = (event["message"] for event in told if event["kind"] == "note" and "damaged" in event["message"])
    assert note == f"2 units were damaged and built again; {build}/quarantine keeps 3 files of them as found"
    assert len([name for name in os.listdir(build / "quarantine") if "packs" not in name]) == 3


def test_a_build_that_lost_nothing_tells_of_no_damage(corpus: Path, tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    tokenmill.prepare(corpus, tmp_path / "out", tokenizer="byte", workers=1, watch=told.append)
    assert not [event for event in told if "damaged" in event.get("message", "")]


@pytest.mark.parametrize("leads_to", ["a file", "nothing"])
def test_an_output_that_is_no_folder_is_refused_as_such(
    tokenmill: Command, corpus: Path, tmp_path: Path, leads_to: str
) -> None:
    if leads_to == "a file":
        (tmp_path / "out").write_text("mine")
    else:
        (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    what, hint = {
        "a file": ("is a file", "choose another output"),
        "nothing": ("is neither a folder nor a link to one", "if it is a link to another disk, mount that"),
    }[leads_to]
    said = tokenmill("prepare", corpus, "-o", "out", code=2).stderr
    assert said.startswith(f"error: {tmp_path / 'out'} {what}\nhint: {hint}")
    (tmp_path / "tokens.bin").write_bytes(bytes(100))
    back = ("import", "tokens.bin", "--from", "nanogpt", "--eot-id", 1, "-o", "out")
    assert tokenmill(*back, code=2).stderr.endswith(said)


def test_an_output_may_be_a_link_to_a_folder(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "there")
    tokenmill.prepare(str(corpus), tmp_path / "out", tokenizer="byte", workers=1)
    assert (tmp_path / "there/dataset.json").exists()


def test_without_its_build_folder_a_dataset_is_compared_with_its_sources_by_content(tmp_path: Path) -> None:
    source, output = tmp_path / "a.txt", tmp_path / "out"
    source.write_text("ab\ncd\n")
    assert not tokenmill.prepare(source, output, tokenizer="byte", workers=1).notes
    assert not tokenmill.prepare(source, output, tokenizer="byte", workers=1).notes
    shutil.rmtree(output / ".build")
    _, note = tokenmill.prepare(source, output, tokenizer="byte", workers=1).notes
    assert note.startswith("all documents of the sources are unchanged")
    time = source.stat().st_mtime_ns
    for later in (0, 10**9):
        source.write_text("cd\nab\n")
        os.utime(source, ns=(time, time + later))
        shutil.rmtree(output / ".build")
        with pytest.raises(SourceChangedError, match=r"was made of other text than there is now: a.txt changed since"):
            tokenmill.prepare(source, output, tokenizer="byte", workers=1)
        source.write_text("ab\ncd\n")
        assert tokenmill.prepare(source, output, tokenizer="byte", workers=1).already_complete
