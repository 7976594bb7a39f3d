"""Parts of a dataset, each built by a node of a real Ray cluster on its own disk."""

from __future__ import annotations

import json
import platform
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_lab import RECIPE, halting_command, wait_for

import tokenmill as library
from nodes import add_node, unit_processes
from tokenmill.build.deal import deal_units
from tokenmill.build.resolve import resolve_build
from tokenmill.errors import BuildError, RecipeError, SourceChangedError
from tokenmill.recipe import make_recipe

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.usefixtures("all_slots"),
    pytest.mark.xdist_group("ray"),  # one process, so that one cluster is started
]


LOCAL: dict[str, Any] = {"executor": "ray", "placement": "node-local"}


def merged(parts: list[Path], nodes: Any) -> Any:
    """The training tokens of all parts in the order of the whole plan, by the numbers of their units."""
    found = {}
    for part, place in zip(parts, nodes.parts, strict=True):
        train, at = library.open(part)["train"], 0
        for number, receipt in zip(place.units, sorted((part / ".build/receipts").glob("*.json")), strict=True):
            count = json.loads(receipt.read_text())["pieces"].get("train", {"tokens": 0})["tokens"]
            found[number] = train.tokens(at, at + count)
            at += count
    return np.concatenate([found[number] for number in sorted(found)])


def last_unit_is_in_part(number: int, corpus: Path, recipe: dict[str, Any]) -> bool:
    plan = resolve_build(make_recipe({**recipe, "sources": str(corpus)})).plan
    return len(plan.units) - 1 in deal_units(plan, 2)[number]


def test_every_node_keeps_a_part_and_one_that_was_lost_goes_on_with_its_own(
    cluster: Any, corpus: Path, tmp_path: Path, halting: tuple[Path, Path]
) -> None:
    (go, halted), parts = halting, [tmp_path / f"node{n}/out" for n in range(2)]
    recipe = {**RECIPE, "filter": "halting:keep"}
    recipe["seed"] = next(seed for seed in range(99) if last_unit_is_in_part(1, corpus, {**recipe, "seed": seed}))
    events: list[dict[str, Any]] = []

    def prepare() -> Any:
        place = f"{tmp_path}/$NODE/out"
        return library.prepare(str(corpus), place, ray_address=cluster.address, watch=events.append, **LOCAL, **recipe)

    def lose_a_node() -> None:
        wait_for(halted.exists)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    loser = threading.Thread(target=lose_a_node, daemon=True)
    loser.start()
    with pytest.raises(BuildError, match=r"1 of 2 parts failed, the others are done:\n.*node1/out: the node was lost"):
        prepare()
    loser.join()
    kept = {file: file.stat().st_mtime_ns for part in parts for file in (part / ".build/receipts").glob("*.json")}
    add_node(cluster, env_vars={"NODE": "node1"})
    go.touch()
    result = prepare()

    plain = library.prepare(str(corpus), tmp_path / "right", workers=1, **recipe).manifest
    whole = result.manifest
    assert (whole.fingerprint, whole.text_sum, whole.dropped) == (plain.fingerprint, plain.text_sum, plain.dropped)
    assert list(whole.sources) == list(plain.sources)
    tokens = merged(parts, result.nodes)
    assert (tokens == library.open(tmp_path / "right")["train"].tokens(0, len(tokens))).all()
    assert whole.splits["train"].tokens == plain.splits["train"].tokens == len(tokens)
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert [place.path for place in result.nodes.parts] == [str(part) for part in parts]
    assert len({(place / "nodes.json").read_bytes() for place in (*parts, tmp_path / "driver/out")}) == 1
    last = [event for event in events if event["kind"] == "progress"][-1]
    assert (last["units"], last["bytes"]) == (last["total_units"], last["total_bytes"])


def test_parts_of_other_text_of_the_same_size_are_refused(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE", "driver")
    source, parts = tmp_path / "a.jsonl", [tmp_path / f"node{n}/out" for n in range(2)]

    def prepare(word: str) -> Any:
        source.write_text("".join(f'{{"text": "{word} {number % 200:03}"}}\n' for number in range(400)))
        options = {**LOCAL, "tokenizer": "byte", "unit_bytes": 2000}
        return library.prepare(str(source), f"{tmp_path}/$NODE/out", ray_address=cluster.address, **options)

    prepare("aaa")
    with pytest.raises(SourceChangedError, match="2 of 2 parts failed"):
        prepare("bbb")
    shutil.rmtree(parts[1])
    with pytest.raises(SourceChangedError, match="1 of 2 parts failed"):
        prepare("bbb")
    shutil.rmtree(parts[0] / ".build")
    with pytest.raises(
        SourceChangedError, match=r"node0/out was made of other text than there is now: a\.jsonl changed"
    ):
        prepare("bbb")


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("$ONLY_HERE/out", "the variable ONLY_HERE, which .ONLY_HERE/out needs, is not set on {here}"),
        ("${NOWHERE}/out", "the variable NOWHERE, which .* needs, is not set on {here}"),
        ("$EMPTY/out", "the variable EMPTY, which .* needs, is not set on {here}"),
        ("$(hostname)/out", "is .* on {here}"),
        ("~nobody-of-this-name/out", "no user of {here} has the home"),
        ("$RELATIVE/out", "is some/out on {here}"),
        ("~/out", "two nodes on {here} would both write to "),
    ],
)
def test_a_place_that_means_nothing_on_a_node_is_refused(
    cluster: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, said: str
) -> None:
    for name, value in {"ONLY_HERE": str(tmp_path), "EMPTY": "", "RELATIVE": "some"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match=said.format(here=platform.node())):
        library.prepare(str(corpus), output, ray_address=cluster.address, **LOCAL, **RECIPE)


def test_ctrl_c_on_the_driver_stops_the_parts_of_the_nodes(
    cluster: Any, corpus: Path, tmp_path: Path, halting: tuple[Path, Path]
) -> None:
    go, halted = halting
    arguments = [*halting_command(cluster, corpus, f"{tmp_path}/$NODE/out"), "--placement", "node-local"]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: halted.exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    assert "What the nodes have done is saved" in said
    wait_for(lambda: not unit_processes("build_part"))
    assert not list(tmp_path.glob("*/out/nodes.json"))
    go.touch()
    assert subprocess.run(arguments).returncode == 0
    assert len(list(tmp_path.glob("*/out/nodes.json"))) == 3
