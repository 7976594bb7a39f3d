"""Files of version 0.1, as they are: opened, verified, repaired, resumed and loaded, with the same bytes and order."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_files as make
import pyarrow as pa
import pytest

import tokenmill
from conftest import tree
from tokenmill.build import workspace
from tokenmill.build.parts import deal
from tokenmill.build.ray_nodes import match_node_parts
from tokenmill.build.resolve import resolve_build
from tokenmill.dataset import manifest
from tokenmill.dataset.manifest import load_manifest
from tokenmill.dataset.statistics import STATISTICS
from tokenmill.errors import OutputError, SourceChangedError, StateError
from tokenmill.recipe import make_recipe
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
    tell_where_the_corpus_is(copy)
    return copy


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """The same of very many small files, which 0.1 cut into other units than are made now."""
    copy = tmp_path / "many"
    make.write_many_sources(copy / "corpus")
    with zipfile.ZipFile(FILES / "many.zip") as packed:
        packed.extractall(copy)
    tell_where_the_corpus_is(copy)
    return copy


def tell_where_the_corpus_is(copy: Path) -> None:
    for name in ("finished", "unfinished"):
        folder = Folder(str(copy / name))
        job = workspace.load_build_record(folder)
        (copy / name / ".build/job.json").unlink()
        workspace.save_build_record(folder, replace(job, work=replace(job.work, root=str(copy / "corpus"))))


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
    fresh, before = tree(files / "fresh"), without_plans(files / "finished")
    assert fresh.pop(STATISTICS)
    now, then = (load_manifest(Folder(str(files / name))) for name in ("fresh", "finished"))
    assert replace(now, files={name: digest for name, digest in now.files.items() if name != STATISTICS}) == then
    del fresh["dataset.json"], before["dataset.json"]
    assert fresh == before


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


def prepared(many: Path, name: str, **options: Any) -> tuple[tokenmill.Result, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    result = tokenmill.prepare(many / "corpus", many / name, watch=events.append, **make.MANY, **options)
    return result, events


def test_many_small_files_are_other_units_now(many: Path) -> None:
    prepared(many, "fresh")
    assert len(workspace.load_plan(Folder(str(many / "fresh"))).units) == 4
    assert len(workspace.load_plan(Folder(str(many / "finished"))).units) == 2


@same_arrow
def test_an_unfinished_build_of_many_small_files_resumes_with_its_own_plan(many: Path) -> None:
    begun = (many / "unfinished/.build/plan.json").read_bytes()
    expected = tokenmill.plan(many / "corpus", many / "unfinished", **make.MANY)
    assert (expected.units, expected.units_done, expected.conflict) == (2, 1, ())
    _, events = prepared(many, "unfinished")
    assert [event["units"] for event in events if event["kind"] == "resume"] == [1]
    assert (many / "unfinished/.build/plan.json").read_bytes() == begun
    assert tree(many / "unfinished") == tree(many / "finished")


@pytest.mark.parametrize("with_build", [True, False])
def test_a_finished_one_of_many_small_files_is_found_complete(many: Path, with_build: bool) -> None:
    if not with_build:
        shutil.rmtree(many / "finished/.build")
    before = tree(many / "finished")
    assert tokenmill.plan(many / "corpus", many / "finished", **make.MANY).finished
    result, _ = prepared(many, "finished")
    assert result.already_complete
    assert tree(many / "finished") == before


@same_arrow
def test_a_finished_one_of_many_small_files_is_verified_and_repaired(many: Path) -> None:
    before = tree(many / "finished")
    assert tokenmill.verify(many / "finished", source="all", workers=1).ok
    path = many / "finished/train/00001.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\0\0")
    assert tokenmill.repair(many / "finished", workers=1)
    assert tree(many / "finished") == before


def test_an_update_of_many_small_files_keeps_units_of_the_old_plan(many: Path) -> None:
    path = many / "corpus/4000.txt"
    path.write_text("other!")
    with pytest.raises(SourceChangedError, match=r"source 4000\.txt changed") as caught:
        prepared(many, "unfinished")
    assert "update=True" in caught.value.hint
    assert tokenmill.plan(many / "corpus", many / "unfinished", update=True, **make.MANY).units_done == 1
    result, events = prepared(many, "unfinished", update=True)
    assert [event["units"] for event in events if event["kind"] == "resume"] == [1]
    assert len(workspace.load_plan(Folder(str(many / "unfinished"))).units) == 2
    assert tokenmill.open(result.output)["train"].document(4000).tolist() == [*b"other!", 256]


def test_an_update_of_many_small_files_that_are_more_now_keeps_units_of_the_old_plan(many: Path) -> None:
    (many / "corpus/9999.txt").write_text("behind")
    with pytest.raises(OutputError, match=r"source 9999\.txt: was not there"):
        prepared(many, "unfinished")
    _, events = prepared(many, "unfinished", update=True)
    assert [event["units"] for event in events if event["kind"] == "resume"] == [1]


def test_starting_over_makes_a_new_plan(many: Path) -> None:
    prepared(many, "finished", restart=True)
    prepared(many, "fresh")
    assert tree(many / "finished") == tree(many / "fresh")
    assert len(workspace.load_plan(Folder(str(many / "finished"))).units) == 4


def test_a_stream_of_many_small_files_goes_on_from_a_state_of_0_1(many: Path) -> None:
    loader = tokenmill.DataLoader(many / "finished", 16, 4, order="sequential", epochs=1)
    batches = [batch["input_ids"].tolist() for batch in loader]
    begun = tokenmill.DataLoader(many / "finished", 16, 4, order="sequential", epochs=1, prefetch=0)
    for _ in zip(range(5), begun, strict=False):
        pass
    stream = tokenmill.stream(many / "corpus", "byte", 16, 4, epochs=1, documents="files", unit_bytes=12_600)
    stream.load_state_dict(begun.state_dict())
    assert [batch["input_ids"].tolist() for batch in stream] == batches[5:]


def test_nodes_that_hold_parts_of_0_1_are_given_its_plan(many: Path) -> None:
    options = {name: value for name, value in make.MANY.items() if name != "workers"}
    setup = resolve_build(make_recipe({"sources": many / "corpus", **options}))
    old = workspace.load_plan(Folder(str(many / "unfinished")))
    held = [manifest.part_of(deal(old, 2)[0].identity), None]
    assert match_node_parts(setup, held).plan.fingerprint == old.fingerprint
    assert len(match_node_parts(setup, held).plan.units) == 2
    for others in ([None, None], [manifest.part_of(deal(setup.plan, 2)[1].identity), None]):
        assert match_node_parts(setup, others) is setup
