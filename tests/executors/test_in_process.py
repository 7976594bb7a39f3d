"""Units in this process: one after the other, each with its tries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenmill.build.plan import make_task
from tokenmill.build.preflight import check_parity_of_plan, make_request
from tokenmill.build.resolve import ResolvedBuild, make_config, resolve_build
from tokenmill.executors.base import MAX_TRIES
from tokenmill.executors.in_process import InProcess, InProcessProber
from tokenmill.recipe import make_recipe
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.engine import open_engine
from tokenmill.units.receipts import PIECES, RECEIPTS, REJECTS, load_receipt


@pytest.fixture
def resolved(corpus: Path) -> ResolvedBuild:
    return resolve_build(make_recipe({"sources": str(corpus), "tokenizer": "byte", "unit_bytes": 4000}))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(str(tmp_path / "out"))
    for name in (PIECES, RECEIPTS, REJECTS):
        made.make(name)
    return made


def in_process(resolved: ResolvedBuild, folder: Folder) -> InProcess:
    return InProcess(folder, make_config(resolved, scratch=None), resolved.spec, open_engine(resolved.spec))


def kinds(heard: list[dict[str, Any]], unit: int) -> list[str]:
    return [message["kind"] for message in heard if message["unit"] == unit and message["kind"] != "progress"]


def test_every_unit_gets_its_receipt_in_order(resolved: ResolvedBuild, folder: Folder) -> None:
    heard: list[dict[str, Any]] = []
    numbers = [unit.index for unit in resolved.plan.units]
    tasks = (make_task(resolved.plan, number) for number in numbers)
    assert in_process(resolved, folder).run(tasks, heard.append) == []
    assert [message["unit"] for message in heard if message["kind"] == "done"] == numbers
    fingerprint = resolved.plan.fingerprint
    receipts = [load_receipt(folder, number, -1, fingerprint, rehash=True) for number in numbers]
    told = [message for message in heard if message["kind"] == "progress"]
    assert sum(message["documents"] for message in told) == sum(found.documents_read for found in receipts if found)
    assert sum(message["tokens"] for message in told) == sum(found.tokens for found in receipts if found)


def test_an_error_that_passes_costs_a_retry(resolved: ResolvedBuild, folder: Folder) -> None:
    heard: list[dict[str, Any]] = []
    folder.remove_tree(PIECES)

    def listen(message: dict[str, Any]) -> None:
        heard.append(message)
        if message["kind"] == "retry":
            folder.make(PIECES)

    assert in_process(resolved, folder).run(iter([make_task(resolved.plan, 0)]), listen) == []
    assert kinds(heard, 0) == ["retry", "done"]


def test_an_error_that_stays_fails_its_unit_and_no_other(resolved: ResolvedBuild, folder: Folder, corpus: Path) -> None:
    heard: list[dict[str, Any]] = []
    last = len(resolved.plan.units) - 1
    lost = {source.name for source in make_task(resolved.plan, 0).sources}
    assert not lost & {source.name for source in make_task(resolved.plan, last).sources}
    for name in lost:
        (corpus / name).unlink()
    tasks = [make_task(resolved.plan, number) for number in (0, last)]
    (failure,) = in_process(resolved, folder).run(iter(tasks), heard.append)
    assert failure.task == tasks[0]
    assert lost.pop() in failure.error.message
    assert len(kinds(heard, 0)) <= MAX_TRIES
    assert (kinds(heard, 0)[-1], kinds(heard, last)) == ("failed", ["done"])


def test_the_preflight_gets_the_same_answers_without_an_output(resolved: ResolvedBuild, folder: Folder) -> None:
    config, request = make_config(resolved, scratch=None), make_request(resolved.plan)
    prober = InProcessProber(config, open_engine(resolved.spec))
    alone = check_parity_of_plan(request, config, resolved.spec, prober)
    found = check_parity_of_plan(request, config, resolved.spec, in_process(resolved, folder))
    assert found.parity == alone.parity
    assert found.survey.seen == alone.survey.seen
