"""What travels to workers is plain JSON, and is checked when it arrives."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from conftest import make_texts, write_jsonl
from tokenmill import records
from tokenmill.build.plan import make_task
from tokenmill.build.resolve import make_config, resolve_build
from tokenmill.errors import DatasetError
from tokenmill.recipe import make_recipe
from tokenmill.units.receipts import NO_LIMIT
from tokenmill.units.task import BuildConfig, ProbeRequest, ProbeSlice, UnitTask


@pytest.fixture
def values(tmp_path: Path) -> dict[type, Any]:
    write_jsonl(tmp_path / "a.jsonl", make_texts(20, seed=1))
    options = {"sources": (str(tmp_path / "a.jsonl"),), "tokenizer": "byte", "split": {"val": 0.1}}
    setup = resolve_build(make_recipe(options))
    task = make_task(setup.plan, 0)
    request = ProbeRequest(
        slices=(ProbeSlice(task=task, at=0, positions=(0, 7)),),
        encode_bytes=100,
        read_bytes=1000,
        planned_bytes=task.unit.text_bytes,
        num_files=1,
    )
    return {BuildConfig: make_config(setup, scratch=None), UnitTask: task, ProbeRequest: request}


@pytest.mark.parametrize("kind", [BuildConfig, UnitTask, ProbeRequest])
def test_a_message_arrives_as_it_was_sent(values: dict[type, Any], kind: type) -> None:
    plain = json.loads(json.dumps(dataclasses.asdict(values[kind])))
    assert records.convert(kind, plain, where="x") == values[kind]
    name = next(iter(plain))
    with pytest.raises(DatasetError, match="x: object contains unknown field new"):
        records.convert(kind, {**plain, "new": 1}, where="x")
    with pytest.raises(DatasetError, match=f"x: object missing required field {name}"):
        records.convert(kind, {key: value for key, value in plain.items() if key != name}, where="x")
    with pytest.raises(DatasetError, match=rf"x\.{name}: expected"):
        records.convert(kind, {**plain, name: 1.5}, where="x")


def test_a_task_is_a_whole_unit_unless_a_budget_cuts_it(values: dict[type, Any]) -> None:
    plain = json.loads(json.dumps(dataclasses.asdict(values[UnitTask])))
    del plain["token_limit"]
    assert records.convert(UnitTask, plain, where="task").token_limit == NO_LIMIT


@pytest.mark.parametrize("share", [1 << 62, 1 << 63, 1.5, -0.5])
def test_a_share_is_a_number_from_nothing_to_all(values: dict[type, Any], share: float) -> None:
    plain = json.loads(json.dumps(dataclasses.asdict(values[BuildConfig])))
    with pytest.raises(DatasetError, match=r"work\.split\[\.\.\.\]: expected (float|int) [<>]= "):
        records.convert(BuildConfig, {**plain, "split": {"val": share}}, where="work")
