"""Provenance joined at the commit: what a document costs, and what two threads gain over one.

python benchmarks/joining.py [--documents 100000] [--rounds 40]

Units have as many documents as real ones do. There are two files of them, a sixteenth as long as real ones: each way is
run many times in turn, and its best clock counts, for others may use this machine. What does not shrink with a second
thread is taken to be what only one thread can do at a time (Amdahl), and so says what more of them would gain.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np
from measure import describe_machine

from tokenmill import resources
from tokenmill.build import commit
from tokenmill.dataset.provenance import ProvenanceWriter
from tokenmill.storage.local import Folder
from tokenmill.units.receipts import NO_LIMIT, PIECES, Receipt, unit_name
from tokenmill.units.run import rows

DOCUMENTS = 100_000
ROUNDS = 40
FILE_ROWS = commit.PROVENANCE_ROWS // 16
THREADS = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """Seconds of a core for a document, how many times as fast two threads are, and the share of one at a time."""

    seconds: float
    gain: float

    @property
    def serial(self) -> float:
        return min(1.0, max(0.0, 2 / self.gain - 1))


def measure_joining(path: str, documents: int = DOCUMENTS, rounds: int = ROUNDS) -> Joining:
    folder = Folder(path)
    folder.make(PIECES)
    units = 2 * -(-FILE_ROWS // documents)
    receipts = [_unit(folder, number, documents) for number in range(units)]
    clocks: dict[int, float] = {}
    cores: dict[int, float] = {}
    for _ in range(rounds):
        for threads in THREADS:
            clock, core = _joined(folder, receipts, threads)
            clocks[threads] = min(clock, clocks.get(threads, clock))
            cores[threads] = min(core, cores.get(threads, core))
    return Joining(seconds=cores[1] / (units * documents), gain=clocks[1] / clocks[2])


def _unit(folder: Folder, number: int, documents: int) -> Receipt:
    """The receipt of a unit that nobody did, and its provenance."""
    draw = np.random.default_rng(number)
    writer = ProvenanceWriter(folder.create(f"{PIECES}/{unit_name(number, NO_LIMIT)}.provenance.parquet"))
    writer.write(
        rows(
            names=[f"part-{number:05d}.parquet"],
            first_source=0,
            sources=np.zeros(documents, np.int32),
            positions=np.arange(documents),
            splits=(draw.random(documents) < 0.0005).astype(np.int8),
            split_names=("train", "val"),
            tokens=draw.lognormal(6, 1, documents).astype(np.int64),
            skips=(),
        )
    )
    return Receipt(
        fingerprint="",
        unit=number,
        token_limit=NO_LIMIT,
        documents_read=documents,
        dropped={},
        pieces={},
        sources=(),
        read_sum="",
        written_sum="",
        files=folder.publish([writer.finish()]),
    )


def _joined(folder: Folder, receipts: list[Receipt], threads: int) -> tuple[float, float]:
    """Seconds of the clock and of cores."""
    folder.remove_tree("provenance")
    real = resources.num_cores, commit.PROVENANCE_ROWS
    commit.num_cores, commit.PROVENANCE_ROWS = lambda: threads, FILE_ROWS
    try:
        begin, begin_core = time.perf_counter(), time.process_time()
        commit._commit_provenance(folder, receipts, {})
        return time.perf_counter() - begin, time.process_time() - begin_core
    finally:
        commit.num_cores, commit.PROVENANCE_ROWS = real


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="documents of a unit")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each way is run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        found = measure_joining(path, given.documents, given.rounds)
    sys.stdout.write(
        f"{found.seconds * 1e6:.3f} core seconds a million documents; two threads are {found.gain:.2f} times as fast "
        f"as one; {found.serial:.0%} one at a time\n{describe_machine()}\n"
    )


if __name__ == "__main__":
    main()
