"""export, import and consolidate as a user runs them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from conftest import Command, make_texts, tree, write_parquet
from tokenmill.errors import DatasetError, OutputError, RecipeError
from tokenmill.formats.base import Expected
from tokenmill.formats.templar import consolidate, read_expected


@pytest.fixture
def data(tmp_path: Path, tokenmill: Command) -> Path:
    write_parquet(tmp_path / "a.parquet", make_texts(200))
    tokenmill("prepare", "a.parquet", "-o", "data", "--split", "val=0.1", "-q")
    return tmp_path / "data"


def test_there_and_back(tokenmill: Command, data: Path, tmp_path: Path) -> None:
    done = tokenmill("export", data, "--to", "llmc", "out", "--name", "fw", "--shard-size", "5k")
    assert "layout llmc" in done.stdout
    assert (
        "complete already"
        in tokenmill("export", data, "--to", "llmc", "out", "--name", "fw", "--shard-size", "5k").stdout
    )
    done = tokenmill("import", "out", "--from", "llmc", "-o", "back", "--tokenizer", "gpt2")
    assert "recovered from the end-of-text id 50256" in done.stderr
    tokenmill("verify", "back")
    texts = [json.loads(tokenmill("inspect", path, "--json").stdout)["texts"] for path in (data, "back")]
    assert texts[0] == texts[1]


def test_a_result_for_programs(tokenmill: Command, data: Path, tmp_path: Path) -> None:
    record = json.loads(tokenmill("export", data, "--to", "nanogpt", "out", "--json").stdout)
    assert record["files"]["train.bin"]["sha256"] == tree(tmp_path / "out")["train.bin"]
    record = json.loads(tokenmill("import", "out", "--from", "nanogpt", "-o", "back", "--json").stdout)
    assert record["layout"] == "nanogpt"
    assert record["notes"]


def test_errors_are_a_sentence_and_a_hint(tokenmill: Command, data: Path) -> None:
    failed = tokenmill("export", data, "--to", "nanogpt", "out", "--seq-len", "4", code=2)
    assert "--seq-len does not apply to nanogpt" in failed.stderr
    assert "hint: options of nanogpt: --order, --seed" in failed.stderr
    tokenmill("export", data, "--to", "templar", "out", "--seq-len", "8")
    assert "--eot-id" in tokenmill("import", "out", "--from", "templar", "-o", "back", code=4).stderr


def shards(folder: Path, *parts: list[int]) -> Path:
    folder.mkdir()
    for number, part in enumerate(parts):
        np.save(folder / f"train_{number:06d}.npy", np.array(part, np.uint16))
    return folder


def test_consolidate_joins_templars_shards_and_compares(tokenmill: Command, tmp_path: Path) -> None:
    root = shards(tmp_path / "shards", [1, 2, 3, 4], [5, 6, 7])
    tokens = np.arange(1, 8, dtype="<u2").tobytes()
    ids = b"".join(hashlib.blake2b(tokens[i * 4 : i * 4 + 4], digest_size=8).digest() for i in range(3))
    sha = hashlib.sha256(tokens).hexdigest()
    common = ("consolidate", "--data_root", root, "--seq_len", "2")
    told = tokenmill(*common).stdout
    assert f"tokens.bin      not compared  7 elements\n    sha256   {sha}\n" in told
    assert "Pass --expect or --checksums" in told
    assert (root / "tokens.bin").read_bytes() == tokens
    assert (root / "sample_ids.bin").read_bytes() == ids
    sums = ("--expect", f"tokens={sha}:7", "--expect", f"sample_ids={hashlib.sha256(ids).hexdigest()}")
    told = tokenmill(*common, *sums).stdout
    assert told.count("PASS") == 2
    assert "shards (train_*.npy) may be deleted" in told
    (tmp_path / "sums.json").write_text(json.dumps({"tokens": {"sha256": sha, "elements": 8}}))
    wrong = tokenmill(*common, "--checksums", "sums.json", code=4)
    assert "tokens.bin      FAIL  7 elements" in wrong.stderr
    assert f"expected {sha}, 8 elements" in wrong.stderr
    for skip in ("--skip-validation", "--skip_validation"):
        tokenmill(*common, "--checksums", "sums.json", skip)


def test_without_the_shards_that_it_was_made_of_a_consolidation_is_checked(tmp_path: Path) -> None:
    root = shards(tmp_path / "shards", [1, 2, 3, 4], [5, 6, 7])
    made = consolidate(root, 2)
    for path in root.glob("*.npy"):
        path.unlink()
    sums = {"tokens": Expected(sha256=made.files["tokens.bin"].sha256, elements=7)}
    assert consolidate(root, 2, expected=sums).already_complete
    with pytest.raises(OutputError, match="'seq_len': 3"):
        consolidate(root, 3)
    (root / "tokens.bin").write_bytes(b"x" * 14)
    with pytest.raises(DatasetError, match="and the shards are gone"):
        consolidate(root, 2)


def test_an_export_to_templar_is_compared_with_what_is_expected(tokenmill: Command, data: Path, tmp_path: Path) -> None:
    common = ("export", data, "--to", "templar", "out", "--seq-len", "8", "--json")
    tokens = json.loads(tokenmill(*common).stdout)["files"]["tokens.bin"]
    tokenmill(*common, "--expect", f"tokens={tokens['sha256']}:{tokens['bytes'] // 2}")
    wrong = tokenmill(*common, "--expect", f"sample_ids={'0' * 64}", code=4)
    assert f"expected {'0' * 64}, any number of elements" in wrong.stderr
    assert (
        "no files with known checksums"
        in tokenmill("export", data, "--to", "llmc", "no", "--expect", f"tokens={'0' * 64}", code=2).stderr
    )


def test_consolidate_refuses_shards_that_are_not_whole(tmp_path: Path) -> None:
    root = shards(tmp_path / "shards", [1, 2], [3, 4], [5])
    (root / "train_000001.npy").unlink()
    with pytest.raises(DatasetError, match=r"train_000002\.npy where train_000001\.npy should be"):
        consolidate(root, 1)
    with pytest.raises(DatasetError, match=r"no train_000000\.npy"):
        consolidate(tmp_path, 1)
    with pytest.raises(RecipeError, match="no sample"):
        consolidate(shards(tmp_path / "more", [1, 2]), 100)


def test_what_is_expected_must_make_sense(tmp_path: Path) -> None:
    for given in ("tokens", "tokens=00", f"x={'0' * 64}", f"tokens={'0' * 64}:x"):
        with pytest.raises(RecipeError):
            read_expected([given], None)
    (tmp_path / "sums.json").write_text('{"tokens": 5}')
    for name in ("nowhere.json", "sums.json"):
        with pytest.raises(RecipeError, match="is not a file of checksums"):
            read_expected([], tmp_path / name)


def test_what_no_tokenizer_is_known_of_is_shown_as_ids(tokenmill: Command, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    np.array([5, 6, 50256], "<u2").tofile(tmp_path / "x/train.bin")
    tokenmill("import", "x", "--from", "nanogpt", "-o", "back", "-q")
    assert "5 6 50256" in tokenmill("inspect", "back").stdout
    (tmp_path / "back/train/00000.bin").write_bytes(b"")
    assert "tokenmill import" in tokenmill("repair", "back", code=4).stderr


def test_consolidate_says_pass_or_fail_for_each_file_and_names_templars_own_ids(
    tokenmill: Command, tmp_path: Path
) -> None:
    root = shards(tmp_path / "shards", [1, 2, 3, 4], [5, 6, 7, 8])
    consolidate(root, 2, templar_compat=True)
    ids = hashlib.sha256((root / "sample_ids.bin").read_bytes()).hexdigest()
    sha = hashlib.sha256((root / "tokens.bin").read_bytes()).hexdigest()
    common = ("consolidate", "--data_root", root, "--seq_len", "2", "--expect", f"sample_ids={ids}", "--expect")
    assert "--restart" in tokenmill(*common, f"tokens={sha}", code=2).stderr
    wrong = tokenmill(*common, f"tokens={sha}:8", "--restart", code=4).stderr
    assert "tokens.bin      PASS  8 elements" in wrong
    assert "sample_ids.bin  FAIL  4 elements" in wrong
    assert "--templar-compat" in wrong
    both = tokenmill(*common, f"tokens={'0' * 64}", code=4).stderr
    assert both.count("FAIL") == 2
    tokenmill(*common, f"tokens={sha}:8", "--restart", "--templar-compat")


def test_consolidate_starts_over_with_the_shards_that_are_there(tokenmill: Command, tmp_path: Path) -> None:
    root = shards(tmp_path / "shards", [1, 2, 3, 4], [5, 6, 7])
    common = ("consolidate", "--data_root", root, "--seq_len", "2")
    tokenmill(*common)
    np.save(root / "train_000001.npy", np.array([9, 9, 9, 9, 9], np.uint16))
    refused = tokenmill(*common, code=2).stderr
    assert "start over with --restart" in refused
    tokenmill(*common, "--restart")
    assert (root / "tokens.bin").read_bytes() == np.array([1, 2, 3, 4, 9, 9, 9, 9, 9], "<u2").tobytes()
    for path in root.glob("*.npy"):
        path.unlink()
    assert "no train_000000.npy to start over from" in tokenmill(*common, "--restart", code=2).stderr
    assert (root / "tokens.bin").exists()


def test_consolidate_does_not_start_over_in_an_export(tokenmill: Command, data: Path, tmp_path: Path) -> None:
    tokenmill("export", data, "--to", "templar", "out", "--seq-len", "8")
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert "is an export" in tokenmill("consolidate", "--data_root", "out", "--restart", code=2).stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before
