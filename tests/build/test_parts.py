"""What a node does for node-local placement, without a cluster: the same functions, called in this process."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import tokenmill as library
from conftest import make_texts, tree, write_jsonl
from tokenmill import errors, records
from tokenmill.build.parts import build_part, deal, dealt_in_runs, expand, find_part, handshake, keep_nodes, to_message
from tokenmill.build.resolve import ResolvedBuild, resolve_build
from tokenmill.cli.output import describe
from tokenmill.dataset.manifest import NODES, NODES_FORMAT, Nodes, part_of
from tokenmill.dataset.manifest import describe_nodes as describe_part
from tokenmill.errors import DatasetError, LockedError, OutputError, RecipeError
from tokenmill.recipe import make_recipe
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import locked
from tokenmill.storage.output import Digest


@pytest.fixture
def setup(corpus: Path) -> ResolvedBuild:
    fields = {"sources": (str(corpus),), "tokenizer": "byte", "unit_bytes": "30kB", "split": "val=0.1"}
    return resolve_build(make_recipe(fields))


def build(
    setup: ResolvedBuild, number: int, out: Path, *, into: int = 2, in_runs: bool = False
) -> list[dict[str, Any]]:
    request = {"output": str(out), "workers": 1, "patience": 0.0}
    message = {**to_message(setup, deal(setup.plan, into, in_runs=in_runs)[number]), **request}
    return [json.loads(said) for said in build_part(json.dumps(message))]


def ask(setup: ResolvedBuild, output: str, *, restart: bool = False) -> dict[str, Any]:
    answer = json.loads(find_part(json.dumps({**handshake(setup.spec), "output": output, "restart": restart})))
    if answer["kind"] == "failed":
        raise errors.from_record(answer["error"])
    return dict(answer)


def keep_record(parts: list[Path], *others: Path) -> Nodes:
    """The record of these parts, in their folders and in some others."""
    places = [
        describe_part(
            library.open(part).manifest, Folder(str(part)).digest("dataset.json"), host="here", path=str(part)
        )
        for part in parts
    ]
    nodes = Nodes(format=NODES_FORMAT, fingerprint="whole", parts=tuple(places))
    for place in (*parts, *others):
        assert json.loads(keep_nodes(json.dumps({"output": str(place), "nodes": records.seal(nodes).decode()})))
    return nodes


def test_a_part_is_an_ordinary_dataset_and_tells_how_it_gets_on(setup: ResolvedBuild, tmp_path: Path) -> None:
    said = build(setup, 1, tmp_path / "out")
    assert library.verify(tmp_path / "out", source="all").ok
    assert said[-1]["kind"] == "complete"
    assert said[-1]["manifest"] == (tmp_path / "out/dataset.json").read_text()
    done = [message["event"]["unit"] for message in said[:-1] if message["event"]["kind"] == "done"]
    assert done == list(range(len(deal(setup.plan, 2)[1].units)))
    before = tree(tmp_path / "out")
    again = build(setup, 1, tmp_path / "out")
    assert [message["already_complete"] for message in again] == [True]
    assert tree(tmp_path / "out") == before


def test_a_disk_tells_which_part_it_holds(
    setup: ResolvedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISK", str(tmp_path))
    assert (ask(setup, "$DISK/out")["part"], ask(setup, "$DISK/out")["path"]) == (None, f"{tmp_path}/out")
    build(setup, 1, tmp_path / "out")
    found = ask(setup, "$DISK/out")
    part = part_of(found)
    assert part is not None
    assert (part.number, part.into, part.whole, found["finished"]) == (1, 2, setup.plan.fingerprint, True)
    (tmp_path / "out/dataset.json").unlink()
    assert (ask(setup, "$DISK/out")["part"], ask(setup, "$DISK/out")["finished"]) == (found["part"], False)
    assert ask(setup, "$DISK/out", restart=True)["part"] is None, "it starts over"
    assert tree(tmp_path / "out") == {}


def test_what_a_node_cannot_take_is_refused(
    setup: ResolvedBuild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(RecipeError, match=r"the variable NOWHERE, which \$NOWHERE/out needs, is not set"):
        expand("$NOWHERE/out")
    monkeypatch.setenv("NOWHERE", "beside")
    with pytest.raises(RecipeError, match="is beside/out on"):
        expand("$NOWHERE/out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/letters").touch()
    with pytest.raises(OutputError, match="contains other files: letters"):
        ask(setup, str(tmp_path / "out"))
    other = {**handshake(setup.spec), "version": "0.0.1", "output": str(tmp_path), "restart": False}
    assert "the driver 0.0.1 with" in json.loads(find_part(json.dumps(other)))["error"]["message"]


def test_another_part_than_the_one_that_is_there_is_refused(setup: ResolvedBuild, tmp_path: Path) -> None:
    build(setup, 1, tmp_path / "out")
    error = errors.from_record(build(setup, 0, tmp_path / "out")[-1]["error"])
    assert isinstance(error, OutputError)
    assert "'number': 1" in error.message
    assert "'number': 0" in error.message


def test_two_nodes_with_one_place_are_told_what_is_wrong(setup: ResolvedBuild, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "out"))
    folder.make(".build")
    with locked(folder):
        error = errors.from_record(build(setup, 0, tmp_path / "out")[-1]["error"])
    assert isinstance(error, LockedError)
    assert "each node needs a folder of its own" in error.hint


def test_the_record_tells_on_every_node_which_node_has_what(setup: ResolvedBuild, tmp_path: Path) -> None:
    parts, driver = [tmp_path / "a/out", tmp_path / "b/out"], tmp_path / "driver/out"
    for number, part in enumerate(parts):
        build(setup, number, part)
    nodes = keep_record(parts, driver)
    assert all(library.open(part).nodes == nodes for part in parts)
    assert all(library.verify(part).ok for part in parts)
    nodes = describe(str(driver))["nodes"]
    assert nodes == describe(str(parts[0]))["nodes"]
    assert [place["splits"]["train"]["tokens"] for place in nodes] == [
        library.open(part)["train"].num_tokens for part in parts
    ]
    with pytest.raises(DatasetError, match="a dataset in parts, none of which is on this machine") as caught:
        library.open(driver)
    assert f"here:{parts[1]}" in caught.value.hint


def test_verify_finds_a_record_that_is_damaged_or_of_another_dataset(setup: ResolvedBuild, tmp_path: Path) -> None:
    build(setup, 0, tmp_path / "out")
    keep_record([tmp_path / "out"])
    record = (tmp_path / "out" / NODES).read_bytes()
    (tmp_path / "out" / NODES).write_bytes(record.replace(b"here", b"away"))
    assert [problem.file for problem in library.verify(tmp_path / "out").problems] == [NODES]
    (tmp_path / "out" / NODES).write_bytes(record)
    assert library.verify(tmp_path / "out").ok
    build(setup, 1, tmp_path / "other")
    (tmp_path / "other" / NODES).write_bytes(record)
    (problem,) = library.verify(tmp_path / "other").problems
    assert (problem.file, problem.what) == (NODES, "lists another dataset as part 1")


def test_the_ranks_of_a_node_share_its_part(setup: ResolvedBuild, tmp_path: Path) -> None:
    build(setup, 1, tmp_path / "out")
    dataset = library.open(tmp_path / "out")
    assert dataset.is_node_part
    assert library.Mixture({"web": (dataset, 1.0)}).is_node_part
    loaders = [
        library.DataLoader(
            dataset,
            seq_len=64,
            batch_size=4,
            rank=rank,
            world_size=2,
            epochs=1,
            drop_last=False,
            fields=("sample_index",),
        )
        for rank in range(2)
    ]
    seen = np.concatenate([batch["sample_index"] for loader in loaders for batch in loader])
    assert np.sort(seen).tolist() == list(range(loaders[0].num_samples))


def test_a_part_is_refused_once_the_text_that_it_was_made_of_changed(
    setup: ResolvedBuild, corpus: Path, tmp_path: Path
) -> None:
    """A node that lost its part would build it of the new text, beside parts of the old one."""
    out, source = tmp_path / "part", corpus / "c.txt"
    assert build(setup, 0, out, into=1)[-1]["already_complete"] is False
    about, data = source.stat(), source.read_bytes()

    def put_in_place(text: bytes) -> dict[str, Any]:
        source.write_bytes(text)
        os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns))
        return build(setup, 0, out, into=1)[-1]

    assert "c.txt changed since" in put_in_place(data.swapcase())["error"]["message"]
    assert put_in_place(data)["already_complete"] is True


def test_every_part_has_its_share_of_each_language_and_of_each_split(tmp_path: Path) -> None:
    """English comes before German in the plan, as in most corpora, and the validation split has sources of its own."""
    for name, texts in {"a-english": 900, "b-german": 300, "c-held-out": 200}.items():
        write_jsonl(tmp_path / f"{name}.jsonl", make_texts(texts, seed=len(name)))
    fields = {"sources": [str(tmp_path / "a-english.jsonl"), str(tmp_path / "b-german.jsonl")], "tokenizer": "byte"}
    held_out = str(tmp_path / "c-held-out.jsonl")
    setup = resolve_build(make_recipe({**fields, "val_sources": held_out, "unit_bytes": "4kB"}))
    shares, splits = [], []
    for number in range(3):
        build(setup, number, tmp_path / f"out{number}", into=3)
        table = pq.read_table(tmp_path / f"out{number}/provenance/00000.parquet").to_pydict()
        tokens = dict.fromkeys(("a-english.jsonl", "b-german.jsonl", "c-held-out.jsonl"), 0)
        for source, count in zip(table["source"], table["tokens"], strict=True):
            tokens[source.rpartition("/")[2]] += count
        shares.append(tokens["b-german.jsonl"] / (tokens["a-english.jsonl"] + tokens["b-german.jsonl"]))
        splits.append(library.open(tmp_path / f"out{number}")["val"].num_tokens)
    assert max(shares) - min(shares) < 0.05
    assert (max(splits) - min(splits)) / max(splits) < 0.3, "it has a dozen units only"
    total = library.prepare(**fields, val_sources=held_out, unit_bytes="4kB", output=tmp_path / "whole", workers=1)
    assert sum(splits) == total.manifest.splits["val"].tokens


def test_an_unfinished_part_that_is_a_run_of_units_is_resumed_as_one(setup: ResolvedBuild, tmp_path: Path) -> None:
    build(setup, 1, tmp_path / "out", in_runs=True)
    before = tree(tmp_path / "out")
    for name in ("dataset.json", ".build/receipts/000001.json"):
        (tmp_path / "out" / name).unlink()
    held = part_of(ask(setup, str(tmp_path / "out")))
    assert dealt_in_runs([None, held], setup.plan.fingerprint)
    done = build(setup, 1, tmp_path / "out", in_runs=dealt_in_runs([held], setup.plan.fingerprint))
    assert done[-1]["kind"] == "complete"
    assert tree(tmp_path / "out") == before
    record = records.seal(
        Nodes(
            format=NODES_FORMAT,
            fingerprint=setup.plan.fingerprint,
            parts=(
                describe_part(
                    library.open(tmp_path / "out").manifest, Digest(bytes=1, sha256="0" * 64), host="a", path="/a"
                ),
            ),
        )
    )
    old = json.loads(record.replace(b',"units":[]', b""))
    del old["seal"]
    body = records.canonical(old)
    sealed = body[:-1] + b',"seal":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    assert records.unseal(Nodes, sealed, where="nodes.json").parts[0].units == ()
