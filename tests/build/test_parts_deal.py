from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.build.parts import assign, deal, dealt_in_runs, splits_in_few_parts
from tokenmill.build.plan import Plan
from tokenmill.dataset.manifest import NODES, NodePart, load_nodes, part_of
from tokenmill.errors import BuildError, DatasetError, OutputError
from tokenmill.sources.base import Source, Unit
from tokenmill.storage.local import Folder


def make_plan(sizes: list[int]) -> Plan:
    """Units of these sizes, two of them to a source."""
    names = [f"{index:03d}.txt" for index in range((len(sizes) + 1) // 2)]
    fields: dict[str, Any] = {"kind": "text", "compression": "", "bytes": 9, "modified": 0, "split": "", "text": {}}
    units = [
        Unit(index=index, source=index // 2, num_sources=1, start=index % 2, stop=index % 2 + 1, text_bytes=size)
        for index, size in enumerate(sizes)
    ]
    return Plan(
        format=1,
        identity={"eot": "append"},
        sources=tuple(Source(name=name, **fields) for name in names),
        units=tuple(units),
        target_tokens=1,
    )


def slices(plan: Plan) -> list[tuple[str, int, int, int]]:
    return [(plan.sources[u.source].name, u.start, u.stop, u.text_bytes) for u in plan.units]


@settings(max_examples=40)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.booleans(), st.data())
def test_parts_are_plans_whose_units_make_up_the_whole(sizes: list[int], in_runs: bool, data: Any) -> None:
    whole, count = make_plan(sizes), data.draw(st.integers(1, len(sizes)))
    parts = deal(whole, count, in_runs=in_runs)
    assert len(parts) == count
    found = list(itertools.chain(*map(slices, parts)))
    if in_runs:
        assert found == slices(whole), "one part after the other has the order of the whole"
    assert sorted(found) == sorted(slices(whole))
    for number, part in enumerate(parts):
        assert [unit.index for unit in part.units] == list(range(len(part.units)))
        assert {unit.source for unit in part.units} == set(range(len(part.sources))), "no other sources"
        assert slices(part) == [one for one in slices(whole) if one in slices(part)], "in the order of the whole"
        dealt = "" if in_runs else "spread"
        assert part_of(part.identity) == NodePart(number=number, into=count, whole=whole.fingerprint, dealt=dealt)
    assert len({part.fingerprint for part in parts}) == count


def test_runs_have_the_identity_that_version_0_1_gave_them() -> None:
    whole = make_plan([5] * 6)
    part = {"number": 1, "into": 2, "whole": whole.fingerprint}
    assert deal(whole, 2, in_runs=True)[1].identity == {"eot": "append", "part": part}
    assert dealt_in_runs([None, part_of({"part": part})], whole.fingerprint)
    assert not dealt_in_runs([None, part_of({"part": part})], "another")
    assert not dealt_in_runs([part_of(deal(whole, 2)[0].identity)], whole.fingerprint)


def test_a_split_that_some_parts_lack_is_named() -> None:
    whole = make_plan([9] * 8)
    held_out = tuple(replace(source, split="val" if source.name == "003.txt" else "") for source in whole.sources)
    whole = replace(whole, sources=held_out)
    assert list(splits_in_few_parts(whole, deal(whole, 2))) == []
    (said,) = splits_in_few_parts(whole, deal(whole, 3))
    assert "only 2 of 3 parts have documents of val, whose sources are 2 units" in said


@settings(max_examples=20)
@given(st.lists(st.integers(50, 100), min_size=20, max_size=60), st.integers(1, 6))
def test_no_part_is_larger_than_its_share_by_more_than_a_unit(sizes: list[int], count: int) -> None:
    share = sum(sizes) / count
    for part in deal(make_plan(sizes), count):
        assert abs(part.text_bytes() - share) <= 100


def test_a_dataset_that_is_no_part_says_so() -> None:
    assert part_of({"eot": "append"}) is None
    with pytest.raises(DatasetError):
        part_of({"part": {"number": "0"}})


NOTHING = (None, False)


def held(number: int, *, into: int = 3, whole: str = "w", finished: bool = False) -> tuple[NodePart, bool]:
    return NodePart(number=number, into=into, whole=whole), finished


@pytest.mark.parametrize(
    ("found", "owners"),
    [
        ([NOTHING, NOTHING, NOTHING], [0, 1, 2]),
        ([NOTHING] * 5, [0, 1, 2, 3]),  # there are four units
        ([held(2), NOTHING, held(0)], [2, 1, 0]),
        ([NOTHING, held(1), held(1, finished=True), NOTHING], [0, 2, 3]),  # one came back after another took over
        ([held(0), held(1), held(2, whole="another"), NOTHING], [0, 1, 3]),
        ([held(0), held(1), held(2, whole="another")], [0, 1, 2]),  # its build will say what differs
        ([held(0), held(2), NOTHING, NOTHING, NOTHING], [0, 2, 1]),  # more nodes than at the first start
    ],
)
def test_nodes_keep_the_parts_that_they_have_and_others_go_to_those_without(found: Any, owners: list[int]) -> None:
    assert assign(found, "w", 4) == owners


def test_parts_that_nobody_has_need_a_node_without_one() -> None:
    with pytest.raises(BuildError, match="parts 0, 2 of 3 are on none of the 1 nodes that are up"):
        assign([held(1)], "w", 9)


def test_parts_of_two_builds_are_told_apart() -> None:
    with pytest.raises(OutputError, match="parts of two ways of dealing"):
        assign([held(0), (NodePart(number=1, into=3, whole="w", dealt="spread"), True)], "w", 9)
    with pytest.raises(OutputError, match="parts of 2 and of 3"):
        assign([held(0, into=2), held(1, into=3)], "w", 9)


def test_a_record_that_is_damaged_is_refused(tmp_path: Path) -> None:
    assert load_nodes(Folder(str(tmp_path))) is None
    (tmp_path / NODES).write_text('{"format":1}\n')
    with pytest.raises(DatasetError, match="not a sealed record"):
        load_nodes(Folder(str(tmp_path)))


def test_another_dealing_gives_parts_of_another_identity() -> None:
    plan = make_plan([5] * 6)
    assert deal(plan, 2)[0].fingerprint != deal(plan, 3)[0].fingerprint
    assert deal(replace(plan, identity={}), 2)[0].fingerprint != deal(plan, 2)[0].fingerprint
