"""How long the report of a large dataset takes, and how large it is: bars 10 s and 2 MB for a million documents.

python benchmarks/report_cost.py [--documents 1000000] [--sources 200] [--folder DIR]

The documents are made up: words of a fixed vocabulary, in lengths of a log-normal distribution.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time

import numpy as np

import tokenmill

MAX_SECONDS, MAX_BYTES = 10.0, 2_000_000
WORDS = np.array([f"word{number:x}" for number in range(20_000)])


def write_sources(folder: str, *, documents: int, sources: int) -> None:
    chance = np.random.default_rng(1)
    for source in range(sources):
        count = documents * (source + 1) // sources - documents * source // sources
        lengths = np.maximum(1, chance.lognormal(3, 1, count).astype(int))
        with open(os.path.join(folder, f"part-{source:05d}.jsonl"), "w", encoding="utf-8") as file:
            for length in lengths.tolist():
                picked = WORDS[(chance.random(length) ** 4 * len(WORDS)).astype(int)]
                file.write(json.dumps({"text": " ".join(picked)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--sources", type=int, default=200)
    parser.add_argument("--folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        sources, output = os.path.join(folder, "in"), os.path.join(folder, "out")
        os.mkdir(sources)
        write_sources(sources, documents=options.documents, sources=options.sources)
        tokenmill.prepare(sources, output, tokenizer="gpt2", split="val=0.01")
        for what in ("with statistics", "counted at once"):
            if what == "counted at once":  # as for a dataset of an older version
                os.remove(os.path.join(output, "statistics.json"))
            begin, cpu = time.monotonic(), time.process_time()
            written = tokenmill.report(output)
            seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
            passed = seconds <= MAX_SECONDS and written.num_bytes <= MAX_BYTES
            print(
                f"{what}: {options.documents:,} documents, {seconds:.2f} s (bar {MAX_SECONDS:g}), {cpu:.2f} CPU s, "
                f"{written.num_bytes:,} bytes (bar {MAX_BYTES:,}): {'pass' if passed else 'FAIL'}"
            )


if __name__ == "__main__":
    main()
