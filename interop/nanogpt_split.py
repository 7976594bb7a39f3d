"""Is `prepare --split nanogpt --layout nanogpt` what nanoGPT's own recipe makes of the same documents?

python interop/nanogpt_split.py write WORK CORPUS     the documents as parquet, and our files
python interop/nanogpt_split.py compare WORK          with what benchmarks/nanogpt_recipe.py wrote to WORK/theirs
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from reference import documents_of
from results import WRITES, found, stop

import tokenmill

EMPTY_EVERY = 500  # the original keeps an empty text, as an end of text alone


def write(work: Path, corpus: Path) -> None:
    texts = list(documents_of(corpus))
    texts[::EMPTY_EVERY] = [""] * len(texts[::EMPTY_EVERY])
    work.mkdir()
    pq.write_table(pa.table({"text": texts}), work / "texts.parquet")
    tokenmill.prepare(str(work / "texts.parquet"), work / "ours", split="nanogpt", layout="nanogpt")


def compare(work: Path) -> None:
    for name in ("train.bin", "val.bin"):
        pair = [(work / side / name).read_bytes() for side in ("ours/nanogpt", "theirs")]
        if pair[0] != pair[1]:
            stop(f"nanoGPT's recipe gives another {name}: {[hashlib.sha256(one).hexdigest() for one in pair]}")
    manifest = tokenmill.open(work / "ours").manifest
    tokens = sum(split.tokens for split in manifest.splits.values())
    found("nanoGPT's recipe", "", WRITES, 16, manifest.documents, tokens, "train.bin and val.bin, byte for byte")


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        compare(Path(sys.argv[2]))
