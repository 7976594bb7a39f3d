"""Two revisions of tokenmill side by side: is this one as fast as another one?

python benchmarks/revisions.py --other CHECKOUT [--corpus FILES...] [--size 450MB] [--repeats 5] [--cpu]

CHECKOUT is a clone of another revision with its own .venv (`make demo` there makes one). Both revisions do the same
work in turns, each time in a fresh process. The figure is the median time of the other revision over that of this one,
so 1.1 means that this revision takes 10 % less time. On a machine that others use, the time says little: `--cpu`
compares seconds of the processors instead, user and system.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from measure import OTHER_LOAD, Corpus, Row, corpus_parser, format_table, machine_line, make_corpus, num_cores, run

LOADER = """
import sys, time, tokenmill
loader = tokenmill.DataLoader(sys.argv[1], seq_len=1024, batch_size=64)
begin, cpu, tokens = time.perf_counter(), time.process_time(), 0
for batch in loader:
    tokens += batch["input_ids"].size
    if time.perf_counter() - begin > 3:
        break
used, cpu = time.perf_counter() - begin, time.process_time() - cpu
print('{"seconds": %f, "cpu_seconds": %f}' % (used / tokens * 1e9, cpu / tokens * 1e9))
"""
BAR = 0.97


class Revision:
    """A checkout and the interpreter of its environment."""

    def __init__(self, python: str, work: Path, *, cpu: bool) -> None:
        self.python = python
        self.dataset = str(work / "dataset")
        self.cpu = cpu

    def prepare(self, files: list[str]) -> float:
        return self.tokenmill("prepare", *files, "-o", self.dataset, "-j", str(num_cores()), "-q", "--restart")

    def tokenmill(self, *arguments: str) -> float:
        return self.run("-m", "tokenmill", *arguments)

    def run(self, *arguments: str) -> float:
        done = run([self.python, *arguments])
        return done.cpu_seconds if self.cpu else done.seconds

    def loader(self) -> float:
        """Seconds for a billion tokens."""
        result = run([self.python, "-c", LOADER, self.dataset]).result()
        return float(result["cpu_seconds" if self.cpu else "seconds"])


def jobs(corpus: Corpus, small: Corpus) -> dict[str, Callable[[Revision], float]]:
    """What both revisions do. Loader and verify use the dataset that the prepare before them wrote."""
    return {
        "--version": lambda revision: revision.tokenmill("--version"),
        "import tokenmill": lambda revision: revision.run("-c", "import tokenmill"),
        "prepare, 1 MB": lambda revision: revision.prepare(small.jsonl),
        "prepare, JSON lines": lambda revision: revision.prepare(corpus.jsonl),
        "prepare, Parquet": lambda revision: revision.prepare(corpus.parquet),
        "verify": lambda revision: revision.tokenmill("verify", revision.dataset),
        "loader, a billion tokens": lambda revision: revision.loader(),
    }


def main() -> None:
    parser = corpus_parser(__doc__)
    parser.add_argument("--other", required=True, help="a clone of another revision, with its .venv")
    parser.add_argument("--cpu", action="store_true", help="compare seconds of the processors, user and system")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in ("corpus", "small", "ours", "other"):
            (work / name).mkdir()
        corpus = make_corpus(work / "corpus", options.size, options.corpus)
        small = make_corpus(work / "small", 1_000_000, options.corpus)
        ours = Revision(sys.executable, work / "ours", cpu=options.cpu)
        other = Revision(str(Path(options.other) / ".venv/bin/python"), work / "other", cpu=options.cpu)
        times: dict[str, tuple[list[float], list[float]]] = {}
        for repeat in range(options.repeats):
            # The first one of a pair finds a cooler machine: they change places.
            pair = ((0, ours), (1, other)) if repeat % 2 else ((1, other), (0, ours))
            for name, job in jobs(corpus, small).items():
                for side, revision in pair:
                    times.setdefault(name, ([], []))[side].append(job(revision))
    rows = [
        Row(
            name=name,
            what="other revision / this one",
            ours=f"{median(mine):.3f} s",
            peer=f"{median(theirs):.3f} s",
            figure=median(theirs) / median(mine),
            bar=BAR,
            at_least=True,
        )
        for name, (mine, theirs) in times.items()
    ]
    print(format_table(rows))
    what = "processor seconds" if options.cpu else "wall clock"
    print(f"{what}; {options.repeats} repeats; {OTHER_LOAD.cores:.2f} cores busy with other work; {machine_line()}")


if __name__ == "__main__":
    main()
