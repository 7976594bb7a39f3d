"""The quick form of the lab's comparisons of what is derived from a dataset."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from differ.seeding import Bug, is_caught

from differ import derived


@pytest.mark.parametrize("kind", ["best_fit", "padded"])
def test_labels_after_a_change_are_those_of_the_new_text(kind: str) -> None:
    row = derived.labels_of(kind, ("shuffled",), range(1))
    assert row.tried == 1 and not row.wrong


@pytest.mark.parametrize("layout", ["nanogpt", "megatron"])
def test_an_export_of_other_content_is_refused(layout: str) -> None:
    row = derived.again(layout, derived.exported(layout), ("masked",), range(1))
    assert row.tried == 1 and not row.wrong


@pytest.mark.parametrize("layout", ["nanogpt", "mds"])
def test_an_import_of_other_content_is_refused(layout: str) -> None:
    row = derived.again(layout, derived.imported(layout), ("masked",), range(1))
    assert row.tried == 1 and not row.wrong


def test_a_consolidation_of_other_shards_is_made_again() -> None:
    row = derived.again("consolidate", derived.consolidated, ("masked",), range(1))
    assert row.tried == 1 and not row.wrong


@pytest.mark.parametrize("name", ["loader", "packed", "mixture", "stream"])
def test_a_state_of_other_content_is_refused(name: str) -> None:
    row = derived.states((name,), ("shuffled",), range(1))
    assert row.tried == 1 and not row.wrong


def test_prepare_without_its_build_folder_does_not_take_newer_sources() -> None:
    row = derived.without_build(("masked",), range(1))
    assert row.tried == 1 and not row.wrong


@pytest.mark.parametrize("bug", derived.BUGS, ids=lambda bug: bug.name)
def test_the_lab_notices(bug: Bug) -> None:
    assert is_caught(bug)
