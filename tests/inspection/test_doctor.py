"""The doctor finds what is wrong with a machine, a corpus or a dataset, and says what to do."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

import tokenmill as api
from conftest import Command, make_texts, write_jsonl
from tokenmill import doctor


def statuses(report: api.DoctorReport) -> dict[str, str]:
    return {check.name: check.status for check in report.checks}


def found(report: api.DoctorReport, name: str) -> str:
    return next(f"{check.found} {check.hint}" for check in report.checks if check.name == name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patient")
    write_jsonl(folder / "a.jsonl", make_texts(200))
    api.prepare(folder / "a.jsonl", folder / "out", tokenizer="gpt2", workers=1)
    return folder


def test_a_dataset_that_is_right_passes_all_checks(root: Path) -> None:
    report = doctor(root / "out")
    assert report.ok, report.checks
    names = ["files", "digests", "split", "samples", "labels", "text", "processes", "resume", "loader"]
    assert {statuses(report)[name] for name in names} == {"ok"}
    assert "15 of" not in found(report, "samples")
    assert "tokens/s" in found(report, "loader")
    assert report.seconds < 20


def test_a_corpus_that_is_right_passes_all_checks(root: Path) -> None:
    report = doctor(root / "a.jsonl")
    assert report.ok, report.checks
    assert "column text" in found(report, "text")
    assert "tiktoken agree on" in found(report, "parity")
    assert "decode to their own text" in found(report, "round trip")
    assert "tokens/s from text" in found(report, "streaming")


def test_damage_is_named_with_what_helps(root: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    path = Path(api.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", workers=1).output)
    tokens = path / "train/00000.bin"
    data = bytearray(tokens.read_bytes())
    data[100] ^= 1
    tokens.write_bytes(data)
    report = doctor(path)
    assert not report.ok
    assert "train/00000.bin: another SHA-256" in found(report, "digests")
    assert "repair" in found(report, "digests")


def test_text_that_a_tokenizer_changes_is_a_warning(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["e\u0301 decomposed " * 9] * 20)
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(["a"], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["</s>"]))
    from tokenizers import decoders

    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    report = doctor(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tokenizer.json"))
    assert statuses(report)["round trip"] == "warning"
    assert report.ok


def test_what_cannot_be_used_fails_without_an_exception(tmp_path: Path) -> None:
    assert statuses(doctor(tmp_path / "missing"))["files"] == "failed"
    (tmp_path / "bad.parquet").write_bytes(b"rubbish" * 100)
    assert not doctor(tmp_path / "bad.parquet").ok
    (tmp_path / "empty.txt").write_text("")
    assert "no document" in found(doctor(tmp_path / "empty.txt"), "text")
    write_jsonl(tmp_path / "a.jsonl", ["short"])
    small = api.prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", workers=1).output
    report = doctor(small)
    assert statuses(report)["split"] == "warning"
    assert "prepare more text" in found(report, "split")


def test_files_of_a_layout_are_checked_as_a_trainer_reads_them(root: Path) -> None:
    api.export(root / "out", root / "nanogpt", to="nanogpt")
    report = doctor(root / "nanogpt")
    assert report.ok, report.checks
    assert statuses(report)["text"] == "warning"


def test_credentials_are_named_and_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[default]\naws_access_key_id = KEY\n")
    said = found(doctor(), "credentials")
    assert said.startswith("S3: ~/.aws/credentials; Google: none; Azure: none; hub: HF_TOKEN")
    assert "secret" not in said


def test_the_network_is_asked_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(socket, "create_connection", lambda place, timeout: asked.append(place) or socket.socket())
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    doctor()
    assert asked == []
    report = doctor(network=True, output="s3://bucket/out")
    assert ("head", 6379) in asked
    assert len(asked) == 3
    assert statuses(report)["store"] == "ok"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_fit_the_terminal(root: Path, tokenmill: Command, columns: int) -> None:
    lines = tokenmill("doctor", "-o", root, COLUMNS=str(columns)).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("ok       versions     tokenmill ")
    assert any(line.startswith("ok       output ") for line in lines)
    assert all(re.match(r"(ok|warning|failed) +[a-z]| {22}\S|\d+ ok, ", line) for line in lines)
    assert re.fullmatch(r"\d+ ok, (\d warnings?, )?0 failed, in \d+\.\d s", lines[-1])


def test_the_exit_code_and_json_say_whether_a_check_failed(tokenmill: Command, tmp_path: Path) -> None:
    record = json.loads(tokenmill("doctor", tmp_path / "missing.jsonl", "--json", code=4).stdout)
    assert record["ok"] is False
    assert {"name", "status", "found", "hint"} == set(record["checks"][0])
