"""litData and Mosaic streaming on the same tokens, in an environment of their own: see loader.py.

python loader_peers.py write NAME FOLDER FLAT DTYPE       the tokens in the peer's own layout
python loader_peers.py read NAME FOLDER WORKERS           a line of seconds in, a line of batches a second out

Both give a row of T + 1 tokens a sample; a batch is 64 of them, split and widened as a trainer needs them.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROWS, WIDTH = 64, 1024
SAMPLES_A_CHUNK = 30_000


def keep_to(folder: Path) -> None:
    """litData empties its cache folders, wherever they are: let them be here."""
    for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER", "LITDATA_CACHE_DIR"):
        os.environ[name] = str(folder / f"cache-{name.lower()}")
    for name in ("HOME", "TMPDIR"):
        os.environ[name] = str(folder / name.lower())
        Path(os.environ[name]).mkdir(exist_ok=True)


def write(name: str, folder: Path, flat: str, dtype: str) -> None:
    tokens = np.memmap(flat, dtype, mode="r")
    count = len(tokens) // (WIDTH + 1)
    if name == "mosaic":
        from streaming import MDSWriter

        with MDSWriter(out=str(folder / "data"), columns={"tokens": f"ndarray:{dtype}:{WIDTH + 1}"}) as out:
            for row in np.asarray(tokens[: count * (WIDTH + 1)]).reshape(count, WIDTH + 1):
                out.write({"tokens": row})
    else:
        import litdata

        litdata.optimize(
            fn=Chunk(flat, dtype),
            inputs=list(range(0, count, SAMPLES_A_CHUNK)),
            output_dir=str(folder / "data"),
            chunk_size=SAMPLES_A_CHUNK * (WIDTH + 1),
            num_workers=1,
            item_loader=litdata.TokensLoader(block_size=WIDTH + 1),
        )


class Chunk:
    """The tokens of some samples. litData sends it to its worker."""

    def __init__(self, flat: str, dtype: str) -> None:
        self.flat, self.dtype = flat, dtype

    def __call__(self, first: int) -> Iterator[Any]:
        tokens = np.memmap(self.flat, self.dtype, mode="r")
        last = min(first + SAMPLES_A_CHUNK, len(tokens) // (WIDTH + 1))
        yield np.array(tokens[first * (WIDTH + 1) : last * (WIDTH + 1)])


def batches(name: str, folder: Path, workers: int) -> Iterator[Any]:
    import torch

    loader: Any
    if name == "mosaic":
        from streaming import StreamingDataset

        mosaic = StreamingDataset(local=str(folder / "data"), shuffle=True, batch_size=ROWS)
        loader = torch.utils.data.DataLoader(mosaic, batch_size=ROWS, num_workers=workers, drop_last=True)
    else:
        import litdata

        item_loader = litdata.TokensLoader(block_size=WIDTH + 1)
        tokens = litdata.StreamingDataset(
            input_dir=str(folder / "data"), item_loader=item_loader, shuffle=True, drop_last=True
        )
        loader = litdata.StreamingDataLoader(tokens, batch_size=ROWS, num_workers=workers)
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        rows = (batch["tokens"] if name == "mosaic" else batch).long()
        assert rows.shape == (ROWS, WIDTH + 1)
        yield rows[:, :-1], rows[:, 1:]


def read(name: str, folder: Path, workers: int) -> None:
    source = batches(name, folder, workers)
    for line in sys.stdin:
        count = 0
        begin = now = time.perf_counter()
        while now < begin + float(line):
            next(source)
            count += 1
            now = time.perf_counter()
        print(count / (now - begin), flush=True)
    # Their workers may be in the middle of something, and there is nothing left to tidy up.
    os._exit(0)


if __name__ == "__main__":
    mode, peer, place = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    place.mkdir(exist_ok=True)
    keep_to(place)
    if mode == "write":
        write(peer, place, *sys.argv[4:6])
    else:
        read(peer, place, int(sys.argv[4]))
