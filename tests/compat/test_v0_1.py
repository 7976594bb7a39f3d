"""Files of version 0.1, as they are: opened, verified, repaired, resumed and loaded, with the same bytes and order."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import make_files as make
import pyarrow as pa
import pytest

import tokenmill
from conftest import tree
from tokenmill.build import workspace
from tokenmill.errors import StateError
from tokenmill.storage.local import Folder

FILES = Path(__file__).parent / "v0.1"
ARROW = "26.0.1"
# A Parquet file holds the version of its writer, and so the bytes of provenance differ with it.
same_arrow = pytest.mark.skipif(pa.__version__ != ARROW, reason=f"the files were written by pyarrow {ARROW}")
RECORDED = json.loads((FILES / "loaders.json").read_text(encoding="utf-8"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy with the times that its plans know, and jobs that know where the corpus is now."""
    copy = tmp_path / "v0.1"
    shutil.copytree(FILES, copy)
    make.set_times(copy / "corpus")
    for name in ("finished", "unfinished"):
        folder = Folder(str(copy / name))
        job = workspace.load_job(folder)
        (copy / name / ".build/job.json").unlink()
        workspace.save_job(folder, replace(job, work=replace(job.work, root=str(copy / "corpus"))))
    return copy


def without_plans(path: Path) -> dict[str, str]:
    """The files of a dataset, but for the packing plans that its loaders stored."""
    return {name: digest for name, digest in tree(path).items() if not name.startswith("packing/")}


def test_it_opens_and_verifies(files: Path) -> None:
    assert tokenmill.verify(files / "finished", source="all", workers=1).ok
    texts = list(make.texts())
    dataset = tokenmill.open(files / "finished")
    assert sum(len(dataset[name]) for name in dataset.splits) == len(texts)


def test_the_same_command_finds_it_complete(files: Path) -> None:
    before = tree(files / "finished")
    result = tokenmill.prepare(files / "corpus", files / "finished", **make.PREPARE)
    assert result.already_complete
    assert tree(files / "finished") == before


@same_arrow
def test_an_unfinished_build_resumes_to_the_same_bytes(files: Path) -> None:
    events = []
    tokenmill.prepare(files / "corpus", files / "unfinished", watch=events.append, **make.PREPARE)
    assert [event["units"] for event in events if event["kind"] == "resume"] == [2]
    assert tree(files / "unfinished") == without_plans(files / "finished")


@same_arrow
def test_a_fresh_build_has_the_same_bytes(files: Path) -> None:
    tokenmill.prepare(files / "corpus", files / "fresh", **make.PREPARE)
    assert tree(files / "fresh") == without_plans(files / "finished")


@same_arrow
def test_a_damaged_one_is_repaired_to_the_same_bytes(files: Path) -> None:
    before = tree(files / "finished")
    path = files / "finished/train/00000.bin"
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    assert tokenmill.repair(files / "finished", workers=1)
    assert tree(files / "finished") == before


@pytest.mark.parametrize("name", RECORDED)
def test_orders_and_states_are_those_of_0_1(files: Path, name: str) -> None:
    loader = make.loaders(files / "finished")[name]
    loader.load_state_dict(RECORDED[name]["state"])
    assert make.steps(loader, make.STEPS_AFTER) == RECORDED[name]["steps"]
    begun = make.loaders(files / "finished")[name]
    make.steps(begun, make.STEPS_BEFORE)
    assert make.steps(begun, make.STEPS_AFTER) == RECORDED[name]["steps"]


def test_a_state_of_another_stream_is_refused(files: Path) -> None:
    with pytest.raises(StateError):
        make.loaders(files / "finished")["shuffled"].load_state_dict(RECORDED["best_fit"]["state"])
