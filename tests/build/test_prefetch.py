"""The hub's files on this machine: what is fetched, when, how much of it, and what a stopped fetch leaves."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill
from conftest import tree
from hub import COMMIT, LATER, Repository, lead_to, serve
from tokenmill import records
from tokenmill.build import workspace
from tokenmill.build.plan import make_task
from tokenmill.build.prefetch import Fetched, Prefetcher
from tokenmill.build.resolve import resolve_build
from tokenmill.errors import BuildError, Interrupted, OutputError, SourceError
from tokenmill.recipe import make_recipe
from tokenmill.storage import hub
from tokenmill.storage.local import Folder
from tokenmill.units import receipts

RECIPE: dict[str, Any] = {"tokenizer": "byte", "unit_bytes": 20_000, "workers": 1}
NAMES = [f"data/{letter}.parquet" for letter in "abcdef"]


def parquet(start: int) -> bytes:
    out = io.BytesIO()
    table = pa.table({"text": [f"document {number} of the hub " * 5 for number in range(start, start + 300)]})
    pq.write_table(table, out, row_group_size=50)
    return out.getvalue()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A hub with six files, to which the client of this process is led."""
    made = Repository({name: parquet(300 * number) for number, name in enumerate(NAMES)})
    with serve(made) as endpoint:
        lead_to(endpoint, tmp_path, monkeypatch)
        yield made


def path_of(name: str, commit: str = COMMIT) -> str:
    return f"hf://datasets/org/name@{commit}/{name}"


def copies(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").rglob("blobs/*") if path.suffix == ""]


def stop_at_the_third(event: dict[str, Any]) -> None:
    if event["kind"] == "done" and event["unit"] == 2:
        raise KeyboardInterrupt


@pytest.mark.parametrize("left", ["{etag}.incomplete", "{etag}.0123abcd.incomplete"])
def test_what_a_killed_fetch_leaves_does_not_get_into_the_next(
    repository: Repository, tmp_path: Path, left: str
) -> None:
    data = repository.files["data/a.parquet"]
    blobs = tmp_path / "cache/datasets--org--name/blobs"
    blobs.mkdir(parents=True)
    (blobs / left.format(etag=repository.etag("data/a.parquet", data))).write_bytes(b"x" * (len(data) // 2))
    assert Path(hub.fetch(path_of("data/a.parquet"))).read_bytes() == data


def test_bytes_that_do_not_hash_to_what_the_hub_lists_are_a_typed_error_and_leave_no_copy(
    repository: Repository, tmp_path: Path
) -> None:
    repository.spoiled = {"data/a.parquet": 100}
    with pytest.raises(SourceError, match=r"data/a.parquet: the downloaded bytes do not hash to [0-9a-f]{64}"):
        hub.fetch(path_of("data/a.parquet"))
    assert copies(tmp_path) == []
    with pytest.raises(BuildError, match="do not hash to"):
        tokenmill.prepare("hf://datasets/org/name/data/a.parquet", tmp_path / "out", **RECIPE)
    assert not (tmp_path / "out/dataset.json").exists()


def test_files_are_fetched_while_others_are_tokenised(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[bool] = []

    def keep(text: str) -> bool:
        """A unit of the first file is at work: is the last one here?"""
        if text.startswith("document 0 "):
            for _ in range(24_000):
                if hub.cached(path_of("data/b.parquet")) is not None:
                    break
                threading.Event().wait(0.005)
            moments.append(hub.cached(path_of("data/b.parquet")) is not None)
        return True

    module = ModuleType("looking")
    module.keep = keep  # type: ignore[attr-defined]  # it is a module of the user's
    module.__file__ = __file__
    monkeypatch.setitem(sys.modules, "looking", module)
    tokenmill.prepare("org/name", tmp_path / "out", filter="looking:keep", **RECIPE)
    assert moments
    assert all(moments)
    assert copies(tmp_path) == [], "what was fetched is given back"


@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_no_more_is_fetched_ahead_than_the_bound_allows(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int
) -> None:
    monkeypatch.setenv("TOKENMILL_HUB_BYTES", str(sum(len(repository.files[name]) for name in NAMES[:num_files])))
    setup = resolve_build(make_recipe({"sources": ("org/name",), "tokenizer": "byte", "unit_bytes": 1}))
    tasks = [make_task(setup.plan, index) for index in range(0, len(setup.plan.units), 6)]  # one of each file
    assert [task.sources[0].name for task in tasks] == NAMES
    (tmp_path / "out/.build").mkdir(parents=True)
    ahead = Prefetcher(Folder(str(tmp_path / "out")), setup.listing.root)
    leading = ahead.prefetch(iter(tasks))
    next(leading)
    for coming in ahead._fetching.values():
        coming.result()
    ahead.stop()
    assert len(copies(tmp_path)) == num_files


def test_a_build_that_goes_on_gives_back_what_it_had_fetched_before_and_nothing_else(
    repository: Repository, tmp_path: Path
) -> None:
    hub.fetch(path_of("data/a.parquet"))
    (found,) = copies(tmp_path)
    with pytest.raises(Interrupted):
        tokenmill.prepare("org/name", tmp_path / "out", watch=stop_at_the_third, **RECIPE)
    assert len(copies(tmp_path)) > 1
    tokenmill.prepare("org/name", tmp_path / "out", **RECIPE)
    assert copies(tmp_path) == [found]
    assert not (tmp_path / "out/.build/fetched.json").exists()


def test_bytes_that_another_revision_shares_are_not_given_back(repository: Repository, tmp_path: Path) -> None:
    repository.later = {**repository.files, "data/f.parquet": parquet(9_000)}
    kept = [hub.fetch(path_of(name, LATER)) for name in NAMES[:2]]
    tokenmill.prepare(f"hf://datasets/org/name@{COMMIT}", tmp_path / "out", **RECIPE)
    assert [Path(path).read_bytes() for path in kept] == [repository.later[name] for name in NAMES[:2]]
    assert len(copies(tmp_path)) == 2


def test_copies_of_a_killed_run_whose_units_are_done_are_given_back(repository: Repository, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        tokenmill.prepare("org/name", tmp_path / "out", watch=stop_at_the_third, **RECIPE)
    hub.fetch(path_of(NAMES[0]))  # as if the run had been killed between its last unit and giving it back
    noted = Folder(str(tmp_path / "out"))
    noted.replace(".build/fetched.json", records.seal(Fetched(tuple(NAMES))))
    tokenmill.prepare("org/name", tmp_path / "out", **RECIPE)
    assert copies(tmp_path) == []


def test_a_build_stays_at_its_commit_although_the_branch_moves_on(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tokenmill.prepare("org/name", tmp_path / "right", **RECIPE)
    with pytest.raises(Interrupted):
        tokenmill.prepare("org/name", tmp_path / "out", watch=stop_at_the_third, **RECIPE)
    repository.later = {name: parquet(9_000 + 300 * number) for number, name in enumerate(NAMES)}
    notes: list[str] = []
    tokenmill.prepare("org/name", tmp_path / "out", watch=lambda event: notes.append(str(event)), **RECIPE)
    assert tree(tmp_path / "out") == tree(tmp_path / "right")
    assert any(COMMIT in note for note in notes)
    assert tokenmill.prepare("org/name", tmp_path / "out", **RECIPE).already_complete
    with pytest.raises(OutputError):  # who names the other commit is told that it is another dataset
        tokenmill.prepare(f"hf://datasets/org/name@{LATER}", tmp_path / "out", **RECIPE)
    moved = tokenmill.prepare("org/name", tmp_path / "out", restart=True, **RECIPE)
    assert moved.manifest.text_sum != right.manifest.text_sum


@pytest.mark.parametrize("step", ["start_or_resume", "save_build_record"])
def test_a_build_that_was_killed_before_its_first_unit_is_of_one_commit_although_the_branch_moves_on(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Killed between the listing and the plan, or between the plan and what says which commit it is of."""

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(workspace, step, die)
        with pytest.raises(KeyboardInterrupt):
            tokenmill.prepare("org/name", tmp_path / "out", **RECIPE)
    assert (tmp_path / "out" / receipts.PLAN).exists() == (step == "save_build_record")
    repository.later = {name: parquet(9_000 + 300 * number) for number, name in enumerate(NAMES[:4])}
    assert not tokenmill.plan("org/name", tmp_path / "out", tokenizer="byte", unit_bytes=20_000).conflict
    tokenmill.prepare("org/name", tmp_path / "out", **RECIPE)
    tokenmill.prepare(f"hf://datasets/org/name@{LATER}", tmp_path / "right", **RECIPE)
    assert tree(tmp_path / "out") == tree(tmp_path / "right")
    assert workspace.load_build_record(Folder(str(tmp_path / "out"))).work.root == f"hf://datasets/org/name@{LATER}"
