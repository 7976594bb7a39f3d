"""Streams whose text is tokenized in other processes: the same batches, whatever happens to the processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import make_texts, write_jsonl
from test_text_stream import FIELDS, RECIPES, Corpus, global_stream, make_corpus, plain
from tokenmill.errors import BadDocumentError, BuildError, RecipeError, SourceError, StateError
from tokenmill.text_stream import TextStream

# A filter that notes each document in a file, and dies of one as often as `deaths` has lines left.
FILTER = """
import os, signal
def keep(text):
    with open({log!r}, "a") as file:
        file.write(text.split()[0] + "\\n")
    if {deadly!r} in text and os.path.getsize({deaths!r}):
        with open({deaths!r}, "r+") as file:
            file.truncate(os.path.getsize({deaths!r}) - 1)
        os.kill(os.getpid(), signal.SIGKILL)
    return True
"""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Corpus]:
    return [make_corpus(tmp_path_factory.mktemp(f"corpus{seed}"), seed) for seed in range(len(RECIPES))]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(descendants())
    yield
    wait_until(lambda: not set(descendants()) - before, "processes are left")


def descendants(process: int | None = None) -> list[int]:
    try:
        main = process or os.getpid()
        tasks = Path(f"/proc/{main}/task").iterdir()
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [*children, *itertools.chain.from_iterable(map(descendants, children))]


def find_server(process: int | None = None) -> int:
    """The token server among the processes that this one has started."""
    for found in descendants(process):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"token_server" in Path(f"/proc/{found}/cmdline").read_bytes():
                return found
    raise AssertionError("no server")


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


class Sources:
    """Lines of JSON whose documents begin with their number, and a filter that notes which ones are tokenized."""

    def __init__(self, path: Path, files: int = 6, deaths: int = 0, deadly: str = "doc77") -> None:
        self.path, self.log = path / "text", path / "log"
        self.path.mkdir(parents=True)
        names = (f"doc{number}" for number in itertools.count())
        for number in range(files):
            texts = [f"{next(names)} {text}" for text in make_texts(20, seed=number, words=20)]
            write_jsonl(self.path / f"{number}.jsonl", texts)
        self.documents = [f"doc{number}" for number in range(int(next(names).removeprefix("doc")))]
        self.log.touch()
        (path / "deaths").write_text("x" * deaths)
        module = f"filter_{path.name.replace('-', '_')}"
        (path / f"{module}.py").write_text(
            FILTER.format(log=str(self.log), deaths=str(path / "deaths"), deadly=f"{deadly} ")
        )
        self.filter = f"{module}:keep"
        sys.path.insert(0, str(path))

    def stream(self, workers: int = 2, **options: Any) -> TextStream:
        fields = ("document_ids", "sample_index")
        options = {"unit_bytes": 2500, "filter": self.filter, "fields": fields, "epochs": 1, **options}
        return tokenmill.stream(str(self.path), "byte", 50, 3, workers=workers, **options)

    def noted(self) -> list[str]:
        return self.log.read_text().split()

    def expected(self, **options: Any) -> list[dict[str, Any]]:
        """The batches that this process makes alone. They are not noted."""
        found = plain(self.stream(0, **options))
        self.log.write_text("")
        return found


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    path = list(sys.path)
    yield Sources(tmp_path)
    sys.path[:] = path


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_batches_are_those_of_the_loader_on_the_prepared_dataset(corpora: list[Corpus], number: int) -> None:
    corpus = corpora[number]
    for rank, split in enumerate(corpus.splits(40)):
        options: dict[str, Any] = {"split": split, "epochs": 2, "drop_last": False, "fields": FIELDS}
        options |= {"rank": rank % 2, "world_size": 2, "mask_boundaries": True}
        workers = 1 + number % 3
        assert plain(corpus.stream(40, 9, workers=workers, **options)) == plain(corpus.loader(40, 9, **options))


def test_histories_of_ranks_workers_and_stops_are_the_one_stream_of_the_loader(corpora: list[Corpus]) -> None:
    corpus, chance = corpora[3], random.Random(1)  # with a token budget, and over epochs
    expected = [row for batch in itertools.islice(corpus.loader(30, 1), 900) for row in batch["input_ids"].tolist()]
    history = [(chance.randint(1, 2), 20 * chance.randint(1, 9), chance.randint(1, 2), prefetch) for prefetch in (0, 2)]
    rows = global_stream(corpus, history, workers=2)
    assert rows == expected[: len(rows)], history


def test_dropped_documents_are_counted_and_bad_ones_can_be_fatal(corpora: list[Corpus]) -> None:
    corpus = corpora[0]
    stream = corpus.stream(30, 4, epochs=1, workers=2)
    plain(stream)
    assert dict(stream.dropped) == dict(tokenmill.open(corpus.dataset).manifest.dropped)
    with pytest.raises(BadDocumentError, match=r"a\.parquet at \d+: null text"):
        plain(corpus.stream(30, 4, epochs=1, workers=2, on_bad="fail"))


def test_ranks_that_run_at_the_same_time_tokenize_the_text_once(sources: Sources) -> None:
    expected = [sources.expected(rank=rank, world_size=2) for rank in range(2)]
    streams = [iter(sources.stream(rank=rank, world_size=2)) for rank in range(2)]
    found: list[list[Any]] = [[], []]
    for batches in itertools.zip_longest(*streams):
        for rank, batch in enumerate(batches):
            found[rank] += plain([batch]) if batch is not None else []
    assert found == expected
    assert sorted(sources.noted()) == sorted(sources.documents)


def test_a_rank_that_comes_late_gets_all_of_its_batches(sources: Sources) -> None:
    expected = [sources.expected(rank=rank, world_size=2) for rank in range(2)]
    first = iter(sources.stream(rank=0, world_size=2))
    begun = plain(first, 8)
    assert plain(sources.stream(rank=1, world_size=2)) == expected[1]
    assert begun + plain(first) == expected[0]


def test_streams_of_different_jobs_share_nothing(sources: Sources) -> None:
    one, other = iter(sources.stream()), iter(sources.stream())
    next(one), next(other)
    servers = [found for found in descendants() if b"token_server" in Path(f"/proc/{found}/cmdline").read_bytes()]
    assert len(servers) == 2
    one.close(), other.close()


def test_an_error_of_a_source_comes_in_its_turn_and_nothing_before_it_is_lost(sources: Sources) -> None:
    expected = sources.expected()
    stream = sources.stream()
    (sources.path / "4.jsonl").unlink()
    found: list[Any] = []
    with pytest.raises(SourceError, match=r"4\.jsonl"):
        for batch in stream:
            found += plain([batch])
    assert len(found) > len(expected) // 2
    assert found == expected[: len(found)]
    assert stream.samples_seen == 3 * len(found)


def test_a_worker_that_is_killed_costs_nothing_but_time(tmp_path: Path) -> None:
    sources = Sources(tmp_path / "killed", deaths=2)
    deaths = tmp_path / "killed" / "deaths"
    deaths.write_text("")
    expected = sources.expected()
    deaths.write_text("xx")
    assert plain(sources.stream()) == expected
    assert not deaths.read_text(), "two workers have died"
    sys.path.remove(str(tmp_path / "killed"))


def test_a_document_that_kills_each_worker_is_an_error_that_loses_nothing(tmp_path: Path) -> None:
    sources = Sources(tmp_path / "deadly")
    expected = sources.expected()
    (tmp_path / "deadly" / "deaths").write_text("x" * 99)
    stream = sources.stream()
    found: list[Any] = []
    with pytest.raises(BuildError, match="killed by signal 9, probably because memory ran out"):
        for batch in stream:
            found += plain([batch])
    (tmp_path / "deadly" / "deaths").write_text("")
    assert found + plain(stream) == expected
    sys.path.remove(str(tmp_path / "deadly"))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_server_that_is_killed_is_replaced_and_nothing_is_lost(sources: Sources, prefetch: int) -> None:
    expected = sources.expected()
    batches = iter(sources.stream(prefetch=prefetch))
    found = plain(batches, 3)
    os.kill(find_server(), signal.SIGKILL)
    assert found + plain(batches) == expected


RANK = """
import json, os, sys, time
sys.path[:] = json.loads(sys.argv[4])
import tokenmill
rank, text, keep = int(sys.argv[1]), sys.argv[2], sys.argv[3]
options = {"epochs": 1, "unit_bytes": 2500, "filter": keep}
stream = tokenmill.stream(text, "byte", 50, 3, workers=2, rank=rank, world_size=2, **options)
for batch in stream:
    print(json.dumps(batch["input_ids"].tolist()), flush=True)
    sys.stdin.readline()
"""


def start_rank(rank: int, sources: Sources) -> subprocess.Popen[str]:
    arguments = [str(rank), str(sources.path), sources.filter, json.dumps(sys.path)]
    return subprocess.Popen(
        [sys.executable, "-c", RANK, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def one_batch(rank: subprocess.Popen[str]) -> Any:
    assert rank.stdout is not None
    assert rank.stdin is not None
    line = rank.stdout.readline()
    if not line:
        return None
    rank.stdin.write("\n")
    rank.stdin.flush()
    return json.loads(line)


@pytest.mark.parametrize("killed", ["the rank that started the server", "another rank"])
def test_a_rank_that_is_killed_leaves_the_others_what_they_need(sources: Sources, killed: str) -> None:
    expected = [[batch["input_ids"][1] for batch in sources.expected(rank=rank, world_size=2)] for rank in range(2)]
    ranks = [start_rank(0, sources)]
    first = [one_batch(ranks[0])]
    ranks.append(start_rank(1, sources))
    other = [one_batch(ranks[1])]
    victim, survivor, found = (0, 1, other) if killed.startswith("the") else (1, 0, first)
    assert find_server(ranks[0].pid)
    ranks[victim].kill()
    ranks[victim].wait()
    found += iter(lambda: one_batch(ranks[survivor]), None)
    assert found == expected[survivor]
    assert ranks[survivor].wait(60) == 0
    for rank in ranks:
        rank.stdin.close(), rank.stdout.close()
    wait_until(lambda: not users_of(sources), "processes of the pool are left")


def users_of(sources: Sources) -> list[str]:
    """Processes of any parent that have this test's folder on their command line or as a module path."""
    return [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and int(entry.name) != os.getpid() and _is_orphan(entry)
    ]


def _is_orphan(entry: Path) -> bool:
    try:
        is_ours = b"token_server" in (entry / "cmdline").read_bytes()
        return is_ours and os.readlink(entry / "cwd") == os.getcwd() and (entry / "stat").read_text().split()[3] == "1"
    except OSError:
        return False


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_that_is_dropped_ends_its_processes(sources: Sources, prefetch: int) -> None:
    others = set(descendants())  # what earlier tests of this process started
    batches = iter(sources.stream(prefetch=prefetch))
    next(batches)
    assert set(descendants()) > others
    del batches
    wait_until(lambda: not set(descendants()) - others, "processes are left")


def test_an_interrupt_ends_everything_within_two_seconds(sources: Sources) -> None:
    rank = start_rank(0, sources)
    assert one_batch(rank)
    pool = descendants(rank.pid)
    assert len(pool) >= 4, "a server, a fork server and two workers"
    begun = time.monotonic()
    rank.send_signal(signal.SIGINT)
    assert rank.wait(60) != 0
    wait_until(lambda: not any(Path(f"/proc/{one}").exists() for one in pool), "processes are left")
    assert time.monotonic() - begun < 2
    rank.stdin.close(), rank.stdout.close()


def test_an_interrupt_while_the_stream_waits_for_a_slow_worker_is_heard(tmp_path: Path) -> None:
    (tmp_path / "slow_filter.py").write_text("import time\ndef keep(text): time.sleep(20)\n")
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(9))
    sys.path.insert(0, str(tmp_path))
    stream = tokenmill.stream(str(path), "byte", 50, 3, workers=1, filter="slow_filter:keep")
    begun = time.monotonic()
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(stream))
    assert time.monotonic() - begun < 10, "not as long as the filter takes"
    sys.path.remove(str(tmp_path))


def test_an_iterator_of_another_process_is_refused_and_undisturbed(sources: Sources) -> None:
    expected = sources.expected()
    stream = sources.stream(prefetch=0)
    batches = iter(stream)
    found = plain(batches, 2)
    process = os.fork()
    if not process:
        code = 1
        try:
            plain(batches)
        except StateError as error:
            code = 7 if "another process" in error.message else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    assert found + plain(batches) == expected


def test_workers_stop_when_enough_is_made_ahead(sources: Sources) -> None:
    batches = iter(sources.stream(prefetch=0))
    next(batches)
    time.sleep(0.5)
    noted = sources.noted()
    time.sleep(0.5)
    assert sources.noted() == noted
    assert len(noted) < len(sources.documents)
    batches.close()


@pytest.mark.parametrize(("workers", "told"), [(-1, "workers is -1"), (1000, "too many"), ("2", "workers is '2'")])
def test_a_number_of_workers_that_makes_no_sense_is_refused(sources: Sources, workers: Any, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        sources.stream(workers)
