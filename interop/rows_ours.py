"""The layouts that store rows, our side of the proof: what peers are to read, and what they wrote, imported.

python interop/rows_ours.py write WORK CORPUS     datasets, exports, and the same as plain arrays
python interop/rows_ours.py read WORK             imports of what rows_peers.py wrote in between
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from reference import EOT
from results import IMPORTED, found, stop

import tokenmill
from tokenmill.formats.convert import content_fingerprint

SHIFT = 100_000  # makes 32-bit ids of GPT-2's
SEQ_LEN = 1024
SHARD_TOKENS = 1 << 22
KINDS = {"u16": EOT, "u32": EOT + SHIFT}
PACKED = {"mds", "huggingface"}
LAYOUTS = ("mds", "litdata", "huggingface", "catid")


def make_raw(folder: Path, tokens: npt.NDArray[np.int32], dtype: str, eot_id: int) -> str:
    """Tokens as a dataset, by way of the plainest layout there is. Gives its fingerprint."""
    folder.mkdir(parents=True)
    tokens.astype(dtype).tofile(folder / "train.bin")
    made = tokenmill.import_(folder, folder / "dataset", layout="nanogpt", dtype=dtype, eot_id=eot_id)
    return made.manifest.fingerprint


def counted(dataset: Path) -> Counter[bytes]:
    """Documents in no order."""
    return Counter(document.astype(np.int32).tobytes() for document in tokenmill.open(dataset)["train"])


def write(work: Path, corpus: Path) -> None:
    tokenmill.prepare(str(corpus), work / "u16" / "dataset", documents="files" if corpus.is_dir() else "lines")
    split = tokenmill.open(work / "u16" / "dataset")["train"]
    tokens = split.tokens(0, split.num_tokens).astype(np.int32)
    make_raw(work / "u32", tokens + SHIFT, "uint32", EOT + SHIFT)
    for kind in KINDS:
        np.save(work / kind / "tokens.npy", tokens if kind == "u16" else tokens + SHIFT)
        np.save(work / kind / "ends.npy", split.document_ends(0, split.num_tokens))
        for layout in LAYOUTS:
            dataset, out = work / kind / "dataset", work / kind / "ours" / layout
            tokenmill.export(dataset, out, to=layout, shard_size=SHARD_TOKENS)
            if layout in PACKED:
                tokenmill.export(dataset, f"{out}-packed", to=layout, shard_size=SHARD_TOKENS, seq_len=SEQ_LEN)


def read(work: Path) -> None:
    for kind, eot_id in KINDS.items():
        tokens = np.load(work / kind / "tokens.npy")
        whole = content_fingerprint(tokenmill.open(work / kind / "dataset"))
        packed = make_raw(work / kind / "packed", tokens[: len(tokens) // SEQ_LEN * SEQ_LEN], "uint32", eot_id)
        for path in sorted([*(work / kind / "ours").iterdir(), *(work / kind / "theirs").iterdir()]):
            layout = path.name.partition("-")[0]
            back = work / kind / f"back-{path.parent.name}" / path.name
            made = tokenmill.import_(path, back, layout=layout, eot_id=eot_id)
            expected = packed if path.name.endswith("-packed") else whole
            if path.parent.name == "theirs" and layout == "catid":  # its threads write files of their own, in turn
                if counted(back) != counted(work / kind / "dataset"):
                    stop(f"{path}: imported with other documents")
            elif made.manifest.fingerprint != expected:
                stop(f"{path}: imported as {made.manifest.fingerprint}, not {expected}")
            if path.parent.name == "theirs":
                about = made.manifest
                tokens = sum(split.tokens for split in about.splits.values())
                result = f"{path.name}, the same {'documents' if layout == 'catid' else 'fingerprint'}"
                found(layout, "", IMPORTED, int(kind.removeprefix("u")), about.documents, tokens, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=("write", "read"))
    parser.add_argument("work", type=Path)
    parser.add_argument("corpus", nargs="?", type=Path, help="parquet with a column text, or a folder of text files")
    arguments = parser.parse_args()
    if arguments.step == "write":
        write(arguments.work, arguments.corpus)
    else:
        read(arguments.work)


if __name__ == "__main__":
    main()
