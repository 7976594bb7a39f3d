"""The bounds of files, locks and forks, in short; `make differ` has the long form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from differ.bounds import BUGS, commands_with_few_descriptors, few_descriptors, few_locks, forked
from differ.seeding import Bug, is_caught


def test_more_shards_than_open_files() -> None:
    row = few_descriptors(60, 100)
    assert row.tried >= 7 and not row.wrong


def test_every_command_takes_more_shards_than_open_files() -> None:
    row = commands_with_few_descriptors(100, 70)
    assert row.tried >= 16 and not row.wrong


def test_more_shards_of_a_url_than_locks() -> None:
    row = few_locks(30, 3)
    assert row.tried > 20 and not row.wrong


def test_an_iterator_begun_before_a_fork() -> None:
    row = forked(8)
    assert row.tried == 8 and not row.wrong and not row.hangs


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.is_quick], ids=lambda bug: bug.name)
def test_a_seeded_bug_is_caught(bug: Bug) -> None:
    assert is_caught(bug)
