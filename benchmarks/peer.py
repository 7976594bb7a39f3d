"""gigatoken on its own, as fast as its own door to files goes: it reads and encodes, and keeps nothing.

python benchmarks/peer.py parquet|jsonl RANKS FILES...
"""

from __future__ import annotations

import json
import sys
import time


def main(kind: str, ranks: str, files: list[str]) -> None:
    import gigatoken

    begin = time.perf_counter()
    source = gigatoken.ParquetFileSource(files) if kind == "parquet" else gigatoken.JsonlFileSource(files)
    found = gigatoken.Tokenizer.from_tiktoken(ranks, "gpt2").encode_files(source)
    seconds = time.perf_counter() - begin
    documents, tokens = len(found), len(found.layout.content.data)
    print(json.dumps({"seconds": seconds, "documents": documents, "tokens": tokens}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
