"""A token pool: the pieces that this process would make, from processes that clients share."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.build.plan import make_task
from tokenmill.errors import BuildError
from tokenmill.executors import token_client
from tokenmill.executors.token_client import TokenClient
from tokenmill.text_stream import TextStream
from tokenmill.units.encode import TokenPiece


@pytest.fixture
def stream(tmp_path: Path) -> TextStream:
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", make_texts(20, seed=number))
    return tokenmill.stream(str(tmp_path), "gpt2", 50, 2, workers=2, unit_bytes=3000, held_out={"val": 0.3})


@pytest.fixture
def pools(stream: TextStream) -> Iterator[list[TokenClient]]:
    found = [stream._open_encoder(2) for _ in range(2)]
    yield found
    for pool in found:
        pool.close()


def shown(pieces: Iterator[TokenPiece]) -> list[Any]:
    return [(p.begin, p.end, p.tokens.tolist(), p.lengths.tolist(), p.all_tokens, p.dropped) for p in pieces]


def read(encoder: Any, stream: TextStream, unit: int, limit: int = -1) -> list[Any]:
    return shown(encoder.read(unit, make_task(stream._texts.plan, unit, limit), 0))


def test_pieces_are_those_that_this_process_makes_in_any_order_of_units(
    stream: TextStream, pools: list[TokenClient]
) -> None:
    alone = stream._open_encoder(0)
    for number, (unit, limit) in enumerate([(0, -1), (0, 100), (2, -1), (3, 1), (1, -1)]):
        expected = read(alone, stream, unit, limit)
        position = unit + len(stream._texts.plan.units) * number
        for pool in pools:
            task = make_task(stream._texts.plan, unit, limit)
            assert shown(pool.read(position, task, 0)) == expected
        assert expected[0][2]


def test_clients_of_one_name_share_a_server_which_ends_with_the_last(
    stream: TextStream, pools: list[TokenClient]
) -> None:
    first, second = pools
    read(first, stream, 0), read(second, stream, 0)
    (server,) = token_client._started
    first.close()
    assert read(second, stream, 1)
    os.kill(server, 0)
    second.close()
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_servers_that_die_one_after_the_other_are_an_error(
    stream: TextStream, pools: list[TokenClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = token_client.start_python

    def start_and_kill(*arguments: Any, **options: Any) -> Any:
        process = start(*arguments, **options)
        process.send_signal(signal.SIGKILL)
        return process

    monkeypatch.setattr(token_client, "start_python", start_and_kill)
    with pytest.raises(BuildError, match="ended 3 times before the next piece of text was done"):
        read(pools[0], stream, 0)
    monkeypatch.undo()
    assert read(pools[0], stream, 0)


def test_processes_that_cannot_be_started_are_an_error_that_names_what_needs_none(
    stream: TextStream, pools: list[TokenClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BuildError, match="workers cannot be started") as caught:
        read(pools[0], stream, 0)
    assert "`workers=0` needs none" in caught.value.hint
