"""From and to an object store, beside the same work on the local disk: ratios within one run.

python benchmarks/remote.py [--corpus FILES...] [--size 450MB] [--repeats 3]

The store is moto's S3 server on this machine, over loopback, which takes a core for itself: so both sides
of `prepare` have one worker. `pull` hashes, syncs and links what a plain copy with obstore only writes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import measure
from measure import COMMAND, Row, run

from tokenmill.sizes import format_bytes

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from s3 import Bucket, make_bucket, s3_server

# What anyone would write: every object to a file, four at once, in parts as they come.
COPY = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
import obstore
from obstore.store import S3Store
store = S3Store(sys.argv[1], client_options={"allow_http": True})
def copy(meta):
    path = os.path.join(sys.argv[3], meta["path"])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        for part in obstore.get(store, meta["path"]).stream(min_chunk_size=4 << 20):
            file.write(part)
begin = time.perf_counter()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(copy, obstore.list(store, sys.argv[2]).collect()))
print(f'{{"seconds": {time.perf_counter() - begin}}}')
"""


def prepares(bucket: Bucket, files: list[str], work: Path, repeats: int, size: int) -> Iterator[Row]:
    """A build from local files to a local folder, and one from the bucket to the bucket."""
    client = bucket.client()
    for path in files:
        client.upload_file(path, bucket.name, f"corpus/{Path(path).name}")
    local, remote, store = [], [], []
    (server,) = measure.descendants(os.getpid())
    arguments = ["-j", "1", "-q"]
    for number in range(repeats):
        shutil.rmtree(work / "dataset", ignore_errors=True)
        local.append(run([COMMAND, "prepare", *files, "-o", str(work / "dataset"), *arguments]).seconds)
        there = [f"{bucket.url}/corpus", "-o", f"{bucket.url}/out-{number}"]
        before = measure.core_seconds(server)
        remote.append(run([COMMAND, "prepare", *there, *arguments]).seconds)
        store.append(measure.core_seconds(server) - before)
        if bucket.get(f"out-{number}/dataset.json") != (work / "dataset" / "dataset.json").read_bytes():
            raise SystemExit("the two datasets differ")
        for key in bucket.listed(f"out-{number}/"):
            bucket.delete(key)
    yield Row(
        name="prepare",
        what=f"{format_bytes(size)} of text, S3 to S3, local / remote; the store took {median(store):.1f} s of a core",
        ours=f"{median(remote):.2f} s",
        peer=f"{median(local):.2f} s",
        figure=median(local) / median(remote),
        bar=0.7,
        at_least=True,
    )


def pulls(bucket: Bucket, work: Path, repeats: int) -> Iterator[Row]:
    """A dataset from the bucket: with tokenmill, and as a plain copy; the start of the processes apart."""
    run([COMMAND, "push", str(work / "dataset"), f"{bucket.url}/ds", "-q"])
    size = sum(len(bucket.get(key)) for key in bucket.listed("ds/"))
    ours, plain = [], []
    for _ in range(repeats):
        plain.append(run([sys.executable, "-c", COPY, bucket.name, "ds", str(work / "plain")]).result()["seconds"])
        shutil.rmtree(work / "plain")  # before the disk has to take it: the other one starts with the disk at rest, too
        pulled = run([COMMAND, "pull", f"{bucket.url}/ds", str(work / "pulled"), "--json", "--no-progress"])
        ours.append(json.loads(pulled.output)["seconds"])
        shutil.rmtree(work / "pulled")
    yield Row(
        name="pull",
        what=f"{format_bytes(size)}, obstore copy time / pull time",
        ours=f"{median(ours):.2f} s",
        peer=f"{median(plain):.2f} s",
        figure=median(plain) / median(ours),
        bar=0.7,
        at_least=True,
    )


def main() -> None:
    arguments = measure.corpus_parser(__doc__).parse_args()
    print(measure.machine_line(), flush=True)
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as folder, s3_server() as endpoint:
        corpus = measure.make_corpus(Path(folder), arguments.size, arguments.corpus)
        bucket = make_bucket(endpoint, "bench")
        os.environ.update({**bucket.environment, "TOKENMILL_CACHE": f"{folder}/cache"})
        rows = list(prepares(bucket, corpus.parquet, Path(folder), arguments.repeats, corpus.text_bytes))
        rows += pulls(bucket, Path(folder), arguments.repeats)
    print(f"medians of {arguments.repeats}\n\n{measure.format_table(rows)}")
    print(f"\nothers took {measure.OTHER_LOAD.cores:.2f} cores while this ran, the store among them")


if __name__ == "__main__":
    main()
