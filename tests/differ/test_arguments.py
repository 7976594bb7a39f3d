"""The quick form of the lab's trials of public arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from differ.seeding import Bug, is_caught

from differ import arguments


def test_a_number_gives_one_order_however_it_is_written() -> None:
    row = arguments.orders((1,))
    assert row.tried >= 36 and not row.wrong


def test_what_a_loader_cannot_take_is_refused_by_name() -> None:
    row = arguments.loaders(few=True)
    assert row.tried >= 150 and not row.wrong


def test_what_is_not_a_state_is_refused() -> None:
    row = arguments.states()
    assert row.tried >= 30 and not row.wrong


def test_what_a_mixture_cannot_take_is_refused_by_name() -> None:
    row = arguments.mixtures()
    assert row.tried >= 60 and not row.wrong


def test_what_a_command_cannot_take_is_refused_by_name() -> None:
    row = arguments.commands()
    assert row.tried >= 250 and not row.wrong


@pytest.mark.parametrize("bug", arguments.BUGS, ids=lambda bug: bug.name)
def test_the_lab_notices(bug: Bug) -> None:
    assert is_caught(bug)
