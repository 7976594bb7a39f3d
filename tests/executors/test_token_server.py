"""The token server: every client gets its pieces, however little memory there is and wherever the others are."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from test_token_client import read

import tokenmill
from conftest import make_texts, write_jsonl
from tokenmill.build.plan import make_task
from tokenmill.executors.token_client import TokenClient
from tokenmill.executors.token_server import TokenServer
from tokenmill.text_stream import TextStream


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TextStream:
    monkeypatch.setenv("DATASET_BATCH_SIZE", "4")  # documents in a piece
    for number in range(5):
        write_jsonl(tmp_path / f"{number}.jsonl", make_texts(20, seed=number))
    return tokenmill.stream(str(tmp_path), "byte", 50, 2, workers=2, unit_bytes=3000)


class Serving:
    """A server in a thread, with so much room, and clients that are connected to it."""

    def __init__(self, stream: TextStream, clients: int, room: int) -> None:
        self.pools = [stream._open_encoder(2) for _ in range(clients)]
        self.server = TokenServer(2, self.pools[0]._configuration)
        self.server._room = room
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")
        listener.listen()
        for number, pool in enumerate(self.pools):
            if number:
                line = socket.socket(socket.AF_UNIX)
                line.connect(listener.getsockname())
                pool._link = Connection(line.detach())
            else:
                ours, theirs = socket.socketpair()
                pool._link = Connection(ours.detach())
        self.most_held = 0
        keep = self.server._keep

        def keep_and_note(*arguments: Any) -> None:
            keep(*arguments)
            self.most_held = max(self.most_held, self.server._held)

        self.server._keep = keep_and_note  # type: ignore[method-assign]
        self.thread = threading.Thread(target=self.server.serve, args=(Connection(theirs.detach()), listener))
        self.thread.start()

    def __enter__(self) -> list[TokenClient]:
        return self.pools

    def __exit__(self, *_: object) -> None:
        for pool in self.pools:
            pool.close()
        self.thread.join()
        self.server.stop()


@pytest.fixture
def expected(stream: TextStream) -> list[list[Any]]:
    alone = stream._open_encoder(0)
    return [read(alone, stream, unit) for unit in range(len(stream._texts.plan.units))]


@pytest.mark.parametrize("room", [0, 5 << 20, 1 << 30])
def test_clients_at_any_distance_and_speed_get_their_pieces(
    stream: TextStream, expected: list[list[Any]], room: int
) -> None:
    assert len(expected[0]) >= 4

    def run(pool: TokenClient, seed: int) -> None:
        chance = random.Random(seed)
        position = chance.randrange(len(expected))
        for _ in range(12):
            unit = position % len(expected)
            found = pool.read(position, make_task(stream._texts.plan, unit), 0)
            if chance.random() < 0.3:
                next(found)  # and no more of it
            else:
                assert [piece.tokens.tolist() for piece in found] == [piece[2] for piece in expected[unit]]
            position += chance.choice([1, 1, 1, 2])

    with Serving(stream, clients=4, room=room) as pools, ThreadPoolExecutor(4) as threads:
        list(threads.map(run, pools, range(4)))


def test_pieces_that_are_made_ahead_take_no_more_than_the_room(stream: TextStream, expected: list[list[Any]]) -> None:
    serving = Serving(stream, clients=1, room=4 << 20)  # small pieces count as a megabyte
    with serving as (pool,):
        for position in range(3 * len(expected)):
            assert read_at(pool, stream, position) == [piece[2] for piece in expected[position % len(expected)]]
    assert 1 << 20 < serving.most_held <= (4 + 2) << 20, "at most one piece of each worker more"


def read_at(pool: TokenClient, stream: TextStream, position: int) -> list[list[int]]:
    plan = stream._texts.plan
    pieces: Iterator[Any] = pool.read(position, make_task(plan, position % len(plan.units)), 0)
    return [piece.tokens.tolist() for piece in pieces]
