"""prepare, as a user runs it."""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiktoken

import tokenmill as library
from conftest import Command, Gate, command, leftovers, make_texts, tree, wait_for_receipts, write_jsonl, write_parquet
from tokenmill.tokenizers.parity import open_reference
from tokenmill.tokenizers.spec import resolve

EOT = 50256


def reference_ids(texts: list[str]) -> list[list[int]]:
    _, encode = open_reference(resolve("gpt2"))
    return [encode(text) for text in texts]


def test_every_document_is_there_in_order_with_its_end_of_text(terminal: Command, tmp_path: Path) -> None:
    texts = make_texts(500)
    write_parquet(tmp_path / "a.parquet", texts)
    terminal("prepare", "a.parquet", "-o", "out", "--unit-bytes", "10KB")
    train = library.open(tmp_path / "out")["train"]
    assert [document.tolist() for document in train] == [[*ids, EOT] for ids in reference_ids(texts)]


def test_a_bin_is_read_by_numpy_as_it_is(tokenmill: Command, tmp_path: Path) -> None:
    texts = make_texts(100)
    write_jsonl(tmp_path / "a.jsonl", texts)
    tokenmill("prepare", "a.jsonl", "-o", "out")
    tokens = np.memmap(tmp_path / "out/train/00000.bin", np.uint16, "r")
    assert tokens.tolist() == [token for ids in reference_ids(texts) for token in [*ids, EOT]]


@pytest.mark.parametrize(("eot", "place"), [("prepend", 0), ("append", -1)])
def test_the_end_of_text_stands_where_it_is_wanted(tokenmill: Command, tmp_path: Path, eot: str, place: int) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    tokenmill("prepare", "a.jsonl", "-o", "out", "--eot", eot)
    for document in library.open(tmp_path / "out")["train"]:
        assert document[place] == EOT
        assert np.count_nonzero(document == EOT) == 1


def test_without_an_end_of_text_there_is_none(tokenmill: Command, tmp_path: Path) -> None:
    texts = make_texts(50)
    write_jsonl(tmp_path / "a.jsonl", texts)
    tokenmill("prepare", "a.jsonl", "-o", "out", "--eot", "none")
    train = library.open(tmp_path / "out")["train"]
    assert [document.tolist() for document in train] == reference_ids(texts)


def test_special_strings_inside_a_text_stay_text(tokenmill: Command, tmp_path: Path) -> None:
    texts = ["<|endoftext|>", "a<|endoftext|>b", "<|endoftext|>" * 50]
    write_jsonl(tmp_path / "a.jsonl", texts)
    tokenmill("prepare", "a.jsonl", "-o", "out")
    tokens = np.memmap(tmp_path / "out/train/00000.bin", np.uint16, "r")
    assert np.count_nonzero(tokens == EOT) == len(texts)


def test_the_same_command_on_a_finished_dataset_checks_it_and_writes_nothing(
    tokenmill: Command, corpus: Path, tmp_path: Path
) -> None:
    tokenmill("prepare", corpus, "-o", "out")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")}
    again = tokenmill("prepare", corpus, "-o", "out")
    assert "complete already" in again.stdout
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")} == before


def test_a_finished_dataset_that_lost_bytes_is_not_called_complete(
    tokenmill: Command, corpus: Path, tmp_path: Path
) -> None:
    tokenmill("prepare", corpus, "-o", "out")
    shard = tmp_path / "out/train/00000.bin"
    os.truncate(shard, shard.stat().st_size - 2)
    failed = tokenmill("prepare", corpus, "-o", "out", code=4)
    assert "00000.bin" in failed.stderr
    assert "repair" in failed.stderr


def test_the_build_folder_may_be_deleted_once_the_manifest_stands(
    tokenmill: Command, corpus: Path, tmp_path: Path
) -> None:
    tokenmill("prepare", corpus, "-o", "out")
    subprocess.run(["rm", "-r", tmp_path / "out/.build"], check=True)
    tokenmill("verify", "out")
    assert "complete already" in tokenmill("prepare", corpus, "-o", "out").stdout


def test_a_split_by_share_never_puts_copies_of_a_document_on_both_sides(tokenmill: Command, tmp_path: Path) -> None:
    texts = make_texts(300) * 3
    write_parquet(tmp_path / "a.parquet", texts)
    tokenmill("prepare", "a.parquet", "-o", "out", "--split", "val=0.2", "--unit-bytes", "5KB")
    dataset = library.open(tmp_path / "out")
    train, val = ({bytes(document) for document in dataset[name]} for name in ("train", "val"))
    assert not train & val
    assert 0.1 < len(val) / 300 < 0.3
    assert dataset["train"].num_documents + dataset["val"].num_documents == len(texts)


def test_another_seed_holds_other_documents_out(tokenmill: Command, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(300))
    held_out = []
    for seed in (0, 1):
        tokenmill("prepare", "a.parquet", "-o", f"out{seed}", "--split", "val=0.2", "--seed", seed)
        held_out.append({bytes(document) for document in library.open(tmp_path / f"out{seed}")["val"]})
    assert held_out[0] != held_out[1]


def test_a_validation_source_is_the_validation_split(tokenmill: Command, tmp_path: Path) -> None:
    train, val = make_texts(60, seed=1), make_texts(30, seed=2)
    write_jsonl(tmp_path / "z.jsonl", train)
    write_jsonl(tmp_path / "a.jsonl", val)
    tokenmill("prepare", "z.jsonl", "--val-source", "a.jsonl", "-o", "out")
    dataset = library.open(tmp_path / "out")
    assert [document.tolist()[:-1] for document in dataset["val"]] == reference_ids(val)
    assert [document.tolist()[:-1] for document in dataset["train"]] == reference_ids(train)


@pytest.mark.parametrize("budget", [1, 777, 5000])
@pytest.mark.parametrize("eot", ["append", "prepend", "none"])
def test_a_token_budget_is_met_exactly(tokenmill: Command, corpus: Path, tmp_path: Path, budget: int, eot: str) -> None:
    result = tokenmill(
        "prepare", corpus, "-o", "out", "--max-tokens", budget, "--unit-bytes", "4KB", "--eot", eot, "--json"
    )
    assert json.loads(result.stdout)["tokens"] == budget
    tokenmill("verify", "out", "--source", "all")
    dataset = library.open(tmp_path / "out")
    if eot != "none":
        tokens = dataset["train"].tokens(0, budget)
        assert np.count_nonzero(tokens == EOT) == dataset["train"].num_documents


def test_a_token_budget_gives_the_same_bytes_for_any_number_of_workers(
    tokenmill: Command, corpus: Path, tmp_path: Path
) -> None:
    for workers in (1, 3):
        tokenmill(
            "prepare", corpus, "-o", f"out{workers}", "--max-tokens", "9999", "--unit-bytes", "2KB", "-j", workers,
            "--split", "val=0.1",
        )  # fmt: skip
    assert tree(tmp_path / "out1") == tree(tmp_path / "out3")


def test_a_budget_above_the_corpus_takes_all_of_it(tokenmill: Command, corpus: Path) -> None:
    everything = json.loads(tokenmill("prepare", corpus, "-o", "all", "--json").stdout)["tokens"]
    budgeted = json.loads(tokenmill("prepare", corpus, "-o", "out", "--max-tokens", "1G", "--json").stdout)["tokens"]
    assert budgeted == everything


def test_a_sample_takes_a_seeded_share_of_the_units(tokenmill: Command, corpus: Path) -> None:
    build = ("prepare", corpus, "--unit-bytes", "2KB", "--json")
    everything = json.loads(tokenmill(*build, "-o", "all").stdout)["documents"]
    samples = [
        json.loads(tokenmill(*build, "-o", f"s{seed}", "--sample", "20%", "--seed", seed).stdout) for seed in (1, 2)
    ]
    assert all(0.05 < sample["documents"] / everything < 0.5 for sample in samples)
    assert samples[0]["fingerprint"] != samples[1]["fingerprint"]


def test_small_pieces_are_joined(tokenmill: Command, corpus: Path, tmp_path: Path) -> None:
    tokenmill("prepare", corpus, "-o", "out", "--unit-bytes", "2KB", "--split", "val=0.02")
    plan = json.loads((tmp_path / "out/.build/plan.json").read_bytes())
    manifest = library.open(tmp_path / "out").manifest
    assert len(plan["units"]) > 20
    for split in manifest.splits.values():
        assert len(split.shards) <= math.ceil(split.tokens / plan["target_tokens"]) + 1


def test_provenance_tells_where_every_document_came_from(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\nthree\nx\n")
    write_parquet(tmp_path / "b.parquet", ["four", "", "six"])
    tokenmill("prepare", "a.txt", "b.parquet", "-o", "out", "--min-chars", 2)
    rows = pq.read_table(tmp_path / "out/provenance/00000.parquet").to_pylist()
    assert [(row["source"], row["position"], row["split"], row["dropped"]) for row in rows] == [
        ("a.txt", 0, "train", None),
        ("a.txt", 5, "train", None),
        ("a.txt", 11, None, "too_short"),
        ("b.parquet", 0, "train", None),
        ("b.parquet", 1, None, "empty"),
        ("b.parquet", 2, "train", None),
    ]


def test_splits_may_be_given_one_by_one(tokenmill: Command, corpus: Path) -> None:
    build = ("plan", corpus, "--tokenizer", "byte", "--json", "--split")
    told = [tokenmill(*build, *splits).stdout for splits in (("val=1%,test=2%",), ("val=1%", "--split", "test=2%"))]
    assert json.loads(told[0])["fingerprint"] == json.loads(told[1])["fingerprint"]
    assert "'val' is given twice" in tokenmill(*build, "val=1%", "--split", "val=2%", code=2).stderr


def test_a_filter_of_the_users_own_keeps_what_it_likes(
    tokenmill: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the folder
    (tmp_path / "good_taste.py").write_text("def keep(text):\n    return 'good' in text\n")
    write_jsonl(tmp_path / "a.jsonl", ["good one", "bad one", "good two"])
    # The module is found in the folder where the command runs, by its workers too.
    result = tokenmill("prepare", "a.jsonl", "-o", "out", "--filter", "good_taste:keep", "--json", "-j", 2)
    assert json.loads(result.stdout)["dropped"] == {"filtered": 1}


def test_a_filter_that_changed_is_another_recipe(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    for code, exit_code in (("True", 0), ("len(text) > 1", 2)):
        (tmp_path / "taste.py").write_text(f"def keep(text):\n    return {code}\n")
        done = tokenmill(
            "prepare", "a.jsonl", "-o", "out", "--filter", "taste:keep", code=exit_code, PYTHONPATH=str(tmp_path)
        )
    assert "filter" in done.stderr


def test_a_recipe_may_come_from_yaml_and_options_win(tokenmill: Command, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    (tmp_path / "recipe.yaml").write_text("sources: [a.jsonl]\ntokenizer: char\neot: none\n")
    tokenmill("prepare", "--config", "recipe.yaml", "--tokenizer", "byte", "-o", "out")
    manifest = library.open(tmp_path / "out").manifest
    assert manifest.tokenizer["name"] == "byte"
    assert manifest.identity["eot"] == "none"


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_byte_and_char_tokens_decode_to_the_text(tokenmill: Command, tmp_path: Path, tokenizer: str) -> None:
    texts = ["first text", "zweiter Täxt 🙂", "третий"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    tokenmill("prepare", "a.jsonl", "-o", "out", "--tokenizer", tokenizer)
    shown = json.loads(tokenmill("inspect", "out", "--json").stdout)
    assert shown["texts"] == texts


def test_ctrl_c_stops_within_two_seconds_and_says_how_to_go_on(
    corpus: Path, tmp_path: Path, tokenmill: Command, gate: Gate
) -> None:
    write_jsonl(corpus / "d.jsonl", [Gate.text])
    for attempt in range(5):  # a machine that is busy with something else may be late now and then
        out = tmp_path / f"out{attempt}"
        build = command("prepare", corpus, "-o", out, "--unit-bytes", "8KB", *gate.options, "-j", 2)
        process = subprocess.Popen(build, env=gate.environment, stderr=subprocess.PIPE, text=True)
        wait_for_receipts(process, out)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = process.communicate(timeout=300)
        seconds = time.monotonic() - began
        assert process.returncode == 130
        assert "same command" in errors
        assert leftovers(out) == []
        if seconds < 2:
            break
    assert seconds < 2
    gate.open()
    subprocess.run(build, env=gate.environment, check=True, stderr=subprocess.DEVNULL)
    tokenmill("verify", out)


def test_a_killed_worker_costs_a_retry_and_nothing_else(corpus: Path, tmp_path: Path, gate: Gate) -> None:
    write_jsonl(corpus / "d.jsonl", [Gate.text])
    build = ["prepare", corpus, "--unit-bytes", "16KB", *gate.options]
    process = subprocess.Popen(
        command(*build, "-o", tmp_path / "out", "-j", 2), env=gate.environment, stderr=subprocess.PIPE, text=True
    )
    wait_for_receipts(process, tmp_path / "out")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    gate.open()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    subprocess.run(command(*build, "-o", tmp_path / "reference", "-q"), env=gate.environment, check=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "reference")


def test_a_second_build_on_the_same_output_is_told_to_wait(tmp_path: Path, gate: Gate) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one", Gate.text])
    build = command("prepare", tmp_path / "a.jsonl", "-o", tmp_path / "out", *gate.options)
    first = subprocess.Popen(build, env=gate.environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "out/.build/lock").exists():
            assert first.poll() is None
            time.sleep(0.01)
        second = subprocess.run(build, env=gate.environment, capture_output=True, text=True, timeout=300)
        assert second.returncode == 5, second.stderr
        assert "being built" in second.stderr
    finally:
        first.kill()
        first.wait()


def test_events_are_written_down(tokenmill: Command, corpus: Path, tmp_path: Path) -> None:
    tokenmill("prepare", corpus, "-o", "out")
    events = [json.loads(line) for line in (tmp_path / "out/.build/events.jsonl").read_text().splitlines()]
    kinds = [event["kind"] for event in events]
    assert kinds[0] == "parity"
    assert {"start", "done", "commit", "finished"} <= set(kinds)


def test_the_library_does_what_the_command_does(corpus: Path, tmp_path: Path, tokenmill: Command) -> None:
    tokenmill("prepare", corpus, "-o", "out", "--split", "val=0.1")
    result = library.prepare(str(corpus), tmp_path / "again", split={"val": 0.1}, workers=1)
    assert tree(tmp_path / "again") == tree(tmp_path / "out")
    assert not result.already_complete
    assert library.verify(tmp_path / "again").ok


def test_tiktoken_itself_gives_the_same_ids(tokenmill: Command, tmp_path: Path) -> None:
    ranks = [line.split() for line in resolve("gpt2").content.splitlines()]
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in ranks},
        special_tokens={"<|endoftext|>": EOT},
    )
    texts = make_texts(200)
    write_jsonl(tmp_path / "a.jsonl", texts)
    tokenmill("prepare", "a.jsonl", "-o", "out")
    train = library.open(tmp_path / "out")["train"]
    assert [document.tolist()[:-1] for document in train] == [encoding.encode_ordinary(text) for text in texts]


def test_documents_without_tokens_are_dropped_and_counted_where_no_end_of_text_would_show_them(
    tokenmill: Command, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.normalizer = normalizers.Strip()
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "words.json"))
    write_parquet(tmp_path / "a.parquet", ["a", " ", "a a"])
    done = tokenmill("prepare", "a.parquet", "-o", "out", "--tokenizer", "words.json", "--eot", "none", "--json")
    assert json.loads(done.stdout)["dropped"] == {"no_tokens": 1}
    assert json.loads(done.stdout)["documents"] == 2
    assert "slower" in done.stderr


def test_the_token_that_ends_a_text_is_text_inside_of_one_even_if_it_is_not_special(
    tokenmill: Command, tmp_path: Path
) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    small = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    small.add_tokens([AddedToken("<end>")])
    small.save(str(tmp_path / "small.json"))
    write_jsonl(tmp_path / "a.jsonl", ["a<end>b", "<end>"])
    tokenmill("prepare", "a.jsonl", "-o", "out", "--tokenizer", "small.json", "--eot-token", "<end>")
    tokens = np.memmap(tmp_path / "out/train/00000.bin", np.uint16, "r")
    assert np.count_nonzero(tokens == 256) == 2
    assert json.loads(tokenmill("inspect", "out", "--json").stdout)["texts"] == ["a<end>b", "<end>"]
