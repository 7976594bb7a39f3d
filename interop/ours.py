"""The layouts of plain tokens, our side of the proof: what peers are to read, and what they wrote, imported.

python interop/ours.py write WORK CORPUS        a dataset of 16-bit tokens, one of 32-bit ones, and their exports
python interop/ours.py read DATASET EXPORTS     imports of the PEER-made folders that layouts.py wrote in between
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from results import IMPORTED, found, stop

import tokenmill
from tokenmill.formats.convert import content_fingerprint

SHIFT = 100_000  # makes 32-bit ids of GPT-2's
SEQ_LEN = 1024
LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "olmo": {},
    "datatrove": {},
    "llmc": {"shard_size": 100_000},
    "templar": {"shard_size": 1 << 20, "seq_len": SEQ_LEN},
}


def write(work: Path, corpus: Path) -> None:
    kind = "files" if corpus.is_dir() else "lines"
    tokenmill.prepare(str(corpus), work / "narrow", split="val=0.05", documents=kind)
    widen(work / "narrow", work / "wide")
    for dataset in ("narrow", "wide"):
        for layout, options in LAYOUTS.items():
            tokenmill.export(work / dataset, work / f"{dataset}-exports" / layout, to=layout, **options)


def widen(dataset: Path, output: Path) -> None:
    """The same documents with every id moved beyond 16 bits."""
    source = tokenmill.open(dataset)
    with tempfile.TemporaryDirectory() as folder:
        for name in source.splits:
            with (Path(folder) / f"{name}.bin").open("wb") as file:
                for tokens in source[name].blocks(0, source[name].num_tokens):
                    file.write((tokens.astype(np.uint32) + SHIFT).tobytes())
        eot = source.manifest.tokenizer["eot_id"] + SHIFT
        tokenmill.import_(folder, output, layout="nanogpt", dtype="uint32", eot_id=eot)


def read(dataset: Path, exports: Path) -> None:
    source = tokenmill.open(dataset)
    expected, eot = content_fingerprint(source), source.manifest.tokenizer["eot_id"]
    for folder in sorted(exports.glob("*-made")):
        layout = folder.name.removesuffix("-made")
        with tempfile.TemporaryDirectory() as work:
            made = tokenmill.import_(folder, f"{work}/dataset", layout=layout, eot_id=eot).manifest
        if made.fingerprint != expected:
            stop(f"{layout}: the import has fingerprint {made.fingerprint}, not {expected}")
        tokens = sum(split.tokens for split in made.splits.values())
        bits = 16 if source.manifest.dtype == "uint16" else 32
        found(layout, "", IMPORTED, bits, made.documents, tokens, "the same fingerprint")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
