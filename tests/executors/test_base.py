"""By which rules every executor tries units again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tokenmill.build.plan import make_task
from tokenmill.build.resolve import resolve_build
from tokenmill.errors import (
    DiskFullError,
    RecipeError,
    SilentStoreError,
    SourceError,
    StorageError,
    TokenmillError,
)
from tokenmill.executors.base import FATAL, MAX_TRIES, UnitFailure, is_final, is_silent, retry_or_fail
from tokenmill.recipe import make_recipe
from tokenmill.units.task import UnitTask


@pytest.fixture
def task(corpus: Path) -> UnitTask:
    return make_task(resolve_build(make_recipe({"sources": str(corpus), "tokenizer": "byte"})).plan, 0)


def test_a_unit_is_tried_again_until_its_tries_are_used_up(task: UnitTask) -> None:
    tries: Counter[int] = Counter()
    again: list[UnitTask] = []
    failures: list[UnitFailure] = []
    heard: list[dict[str, Any]] = []
    for _ in range(MAX_TRIES):
        retry_or_fail(task, StorageError("the drive is slow"), tries, again, failures, heard.append)
    assert again == [task] * (MAX_TRIES - 1)
    assert [(failure.task, failure.error.message) for failure in failures] == [(task, "the drive is slow")]
    assert [message["kind"] for message in heard] == ["retry"] * (MAX_TRIES - 1) + ["failed"]
    assert {(message["unit"], message["error"], message["silent"]) for message in heard} == {
        (0, "the drive is slow", False)
    }


def test_a_source_that_is_wrong_stays_wrong(task: UnitTask) -> None:
    again: list[UnitTask] = []
    failures: list[UnitFailure] = []
    retry_or_fail(task, SourceError("broken.parquet: not a footer"), Counter(), again, failures, lambda message: None)
    assert (again, len(failures)) == ([], 1)


@pytest.mark.parametrize(
    "error", [kind("it concerns all units") for kind in FATAL], ids=lambda error: type(error).__name__
)
def test_an_error_of_the_whole_build_is_raised_at_the_first_try(error: TokenmillError) -> None:
    with pytest.raises(type(error), match="it concerns all units"):
        is_final(error, 1)


def test_the_whole_build_ends_for_a_full_disk_and_a_wrong_recipe() -> None:
    assert {DiskFullError, RecipeError} <= set(FATAL)


def test_a_store_that_does_not_answer_is_told_apart() -> None:
    assert is_silent(SilentStoreError("no answer"))
    assert not is_silent(StorageError("an answer"))
