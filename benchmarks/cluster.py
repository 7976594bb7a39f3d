"""Ray on two nodes of one core each, beside the local pool with two workers: units a second, start-up apart.

python benchmarks/cluster.py [--size 450MB] [--corpus FILES] [--repeats 3]

The nodes are a real cluster on this machine. A rate is taken from the first quarter of the units to the last one,
when all workers are loaded. Not named for ray: a script's own folder comes first where Python looks for modules.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median

import measure
from measure import Bench, Row, read_events, run

BAR = 0.8
UNIT = "8MB"


def rate(bench: Bench, options: list[str]) -> tuple[float, bytes]:
    """Units a second of a build into an empty folder, and the manifest that it ends with."""
    bench.clear()
    found = run([*bench.prepare_command(bench.corpus.parquet, 2), "--unit-bytes", UNIT, *options])
    if found.seconds <= 0:
        raise SystemExit("the build did not run")
    times = [event["time"] for event in read_events(bench.output) if event["kind"] == "done"]
    first = len(times) // 4
    manifest = (bench.output / "dataset.json").read_bytes()
    return (len(times) - 1 - first) / (times[-1] - times[first]), manifest


def compare(bench: Bench) -> Row:
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    rates: dict[str, list[float]] = {"pool": [], "ray": []}
    try:
        cluster.add_node(**node)
        for _ in range(bench.repeats):
            pool, right = rate(bench, [])
            ray, manifest = rate(bench, ["--executor", "ray", "--ray-address", cluster.address])
            if manifest != right:
                raise SystemExit("Ray and the pool gave two datasets")
            rates["pool"].append(pool)
            rates["ray"].append(ray)
    finally:
        cluster.shutdown()
    return Row(
        name="ray",
        what=f"units of {UNIT} a second, Ray with two one-core nodes / pool with two workers",
        ours=f"{median(rates['ray']):.1f}",
        peer=f"{median(rates['pool']):.1f}",
        figure=median(rates["ray"]) / median(rates["pool"]),
        bar=BAR,
        at_least=True,
        raw=rates,
    )


def main() -> None:
    arguments = measure.corpus_parser(__doc__).parse_args()
    print(measure.machine_line(), flush=True)
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        corpus = measure.make_corpus(Path(folder), arguments.size, arguments.corpus)
        row = compare(Bench(corpus, Path(folder), 2, arguments.repeats))
    print(measure.format_table([row]))
    print(f"single figures: {row.raw}")
    print(f"others took {measure.OTHER_LOAD.cores:.2f} of the cores while this ran")


if __name__ == "__main__":
    main()
