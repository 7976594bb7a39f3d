"""Files that were changed by bad luck or by bad will: readers give a right value or an error of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import fuzz, guided, hostile
from lab.mutate import body_of, reseal

from tokenmill import records
from tokenmill.errors import LockedError
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import LOCK, Holder, locked


@pytest.mark.parametrize(
    ("names", "points"),
    [(fuzz.RECORDS, 24_000), (("recipe",), 150), (fuzz.TOKENIZERS, 450)],
    ids=["records", "recipes", "tokenizers"],
)
def test_a_changed_file_gives_a_right_value_or_a_typed_error(names: tuple[str, ...], points: int) -> None:
    row = fuzz.run(points, names=names, seed=1)
    assert not row.wrong, "\n".join(row.wrong)
    assert row.hangs == 0
    assert row.tried == points


def test_records_of_a_stranger_make_no_command_fall_over_or_leave_the_dataset() -> None:
    row = hostile.run(80, seed=1)
    assert not row.wrong, "\n".join(row.wrong)
    assert row.hangs == 0
    assert row.tried == 80


@pytest.mark.skipif(bool(guided.why_not()), reason=guided.why_not())
def test_what_finds_its_own_way_into_a_reader_gives_a_right_value_or_a_typed_error() -> None:
    row = guided.guided(500, names=("receipt", "index"))
    assert not row.wrong, "\n".join(row.wrong)
    assert row.tried >= 1000


numbers = st.integers(-1, 2**62 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(process=numbers, started=texts, token=texts, is_ours=st.booleans())
@settings(max_examples=50, deadline=None, database=None)
def test_any_lock_is_either_held_or_broken(
    tmp_path_factory: pytest.TempPathFactory, process: int, started: str, token: str, is_ours: bool
) -> None:
    folder = Folder(str(tmp_path_factory.mktemp("lock")))
    folder.make(".build")
    with locked(folder):
        mine = records.unseal(Holder, folder.read(LOCK), where=LOCK)
    machine = mine.machine if is_ours else "another"
    folder.write(LOCK, records.seal(Holder(machine=machine, process=process, started=started, token=token)))
    try:
        with locked(folder, patience=0.0):
            assert records.unseal(Holder, folder.read(LOCK), where=LOCK) != mine
    except LockedError:
        assert is_ours, "the heartbeat of another machine stood still"


def test_a_seal_of_ours_is_what_the_fuzzer_thinks_it_is(tmp_path: Path) -> None:
    """Else all that it seals would be refused for its seal, and nothing behind that would be tried."""
    holder = Holder(machine="m", process=1, started="1", token="t")
    assert reseal(body_of(records.seal(holder))) == records.seal(holder)
