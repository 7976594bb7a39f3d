"""A dataset of 32-bit tokens: the same documents with every id moved beyond 16 bits.

python interop/wide_tokens.py DATASET OUT
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import tokenmill

SHIFT = 100_000


def main(dataset: str, output: str) -> None:
    source = tokenmill.open(dataset)
    eot = source.manifest.tokenizer["eot_id"] + SHIFT
    with tempfile.TemporaryDirectory() as folder:
        for name in source.splits:
            with (Path(folder) / f"{name}.bin").open("wb") as file:
                for tokens in source[name].blocks(0, source[name].num_tokens):
                    file.write((tokens.astype(np.uint32) + SHIFT).tobytes())
        tokenmill.import_(folder, output, layout="nanogpt", dtype="uint32", eot_id=eot)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
