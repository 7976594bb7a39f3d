"""Exports beside a plain copy of the same bytes and their SHA-256, every figure beside its bar.

python benchmarks/layouts.py [--tokens 200M] [--repeats 3] [--layouts nanogpt,megatron]

The dataset is random documents of about 500 tokens, warm in the page cache. What an export wrote is then copied by
`cp` and hashed by hashlib, which neither syncs nor writes receipts; both take turns within each repeat, and the table
shows medians. The figure is the copy's time over the export's. Bars are printed, never enforced.

catid's files are compressed, a frame a document, and its compressor alone takes longer than the copy of what comes
out. So a second row has the export beside that: zstd of the same bytes in memory, on all cores, and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import measure
import numpy as np
from measure import Row

import tokenmill
from tokenmill.formats import catid
from tokenmill.formats.rows import TokenRows
from tokenmill.sizes import format_bytes, parse_size

EOT = 50256
DOCUMENT_TOKENS = 500
BARS = {"nanogpt": 0.8}
OTHERS_BAR = 0.5
OPTIONS: dict[str, dict[str, Any]] = {"templar": {"seq_len": 2048, "shard_size": 50_000_000}, "llmc": {}}
LAYOUTS = ("nanogpt", "megatron", "llmc", "templar", "datatrove", "olmo", "mds", "litdata", "huggingface", "catid")


def make_dataset(folder: Path, num_tokens: int) -> Path:
    """Random tokens with an end of text here and there."""
    chance = np.random.default_rng(1)
    (folder / "raw").mkdir()
    for split, count in (("train", num_tokens), ("val", num_tokens // 100)):
        with (folder / "raw" / f"{split}.bin").open("wb") as file:
            for start in range(0, count, 1 << 24):
                tokens = chance.integers(0, EOT, min(1 << 24, count - start), np.uint16)
                tokens[chance.random(len(tokens), np.float32) < 1 / DOCUMENT_TOKENS] = EOT
                tokens[-1] = EOT
                file.write(tokens.tobytes())
    tokenmill.import_(folder / "raw", folder / "dataset", layout="nanogpt", tokenizer="gpt2")
    shutil.rmtree(folder / "raw")
    return folder / "dataset"


def export(dataset: Path, out: Path, layout: str) -> float:
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    begin = time.perf_counter()
    tokenmill.export(dataset, out, to=layout, **OPTIONS.get(layout, {}))
    return time.perf_counter() - begin


def copy_and_hash(out: Path, copy: Path) -> float:
    """`cp` of what was written, then the SHA-256 of every file."""
    shutil.rmtree(copy, ignore_errors=True)
    os.sync()
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", str(out), str(copy)], check=True)
    for path in sorted(copy.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")
    return time.perf_counter() - begin


def compress_alone(dataset: Path) -> float:
    """zstd of every document's bytes, as catid's files have them."""
    compress, seconds = catid.compressor(os.cpu_count() or 1), 0.0
    for split in (tokenmill.open(dataset)[name] for name in ("train", "val")):
        for tokens, lengths in TokenRows(split, block_tokens=1 << 22).blocks(0, split.num_tokens):
            begins, counts = (np.cumsum(lengths) - lengths)[lengths > 1], lengths[lengths > 1] - 1
            planes = catid.byte_planes(tokens, begins, counts)
            begin = time.perf_counter()
            compress(planes, catid.TOKEN_BYTES * begins, catid.TOKEN_BYTES * counts)
            seconds += time.perf_counter() - begin
    return seconds


def beside_compressor(dataset: Path, row: Row, repeats: int) -> Row:
    """The export of a row beside the least that its compression takes. It has no bar."""
    alone = [compress_alone(dataset) for _ in range(repeats)]
    mine, theirs = median(row.raw["ours"]), median(alone)
    return Row(
        name=f"{row.name}, zstd",
        what="the same beside zstd",
        ours=row.ours,
        peer=f"{theirs:.2f} s",
        figure=theirs / mine,
        bar=0.0,
        judged=False,
        raw={"ours": row.raw["ours"], "alone": alone},
    )


def compare(dataset: Path, work: Path, layout: str, repeats: int) -> Row:
    ours, plain = [], []
    for _ in range(repeats):
        ours.append(export(dataset, work / "out", layout))
        plain.append(copy_and_hash(work / "out", work / "copy"))
    size = sum(path.stat().st_size for path in (work / "out").rglob("*") if path.is_file())
    mine, theirs = median(ours), median(plain)
    return Row(
        name=layout,
        what=f"export of {format_bytes(size)}",
        ours=f"{mine:.2f} s, {format_bytes(size / mine)}/s",
        peer=f"{theirs:.2f} s, {format_bytes(size / theirs)}/s",
        figure=theirs / mine,
        bar=BARS.get(layout, OTHERS_BAR),
        at_least=True,
        raw={"ours": ours, "plain": plain, "bytes": size},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=parse_size, default=200_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        dataset = make_dataset(work, arguments.tokens)
        before = measure.OTHER_LOAD.now()
        rows = []
        for layout in arguments.layouts.split(","):
            rows.append(compare(dataset, work, layout, arguments.repeats))
            if layout == "catid":
                rows.append(beside_compressor(dataset, rows[-1], arguments.repeats))
        measure.OTHER_LOAD.add(before, measure.OTHER_LOAD.now())
    print(json.dumps(measure.describe_machine()))
    print(measure.format_table(rows))
    print(f"others used {measure.OTHER_LOAD.cores:.2f} cores meanwhile")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
