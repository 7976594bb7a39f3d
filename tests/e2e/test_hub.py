from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import tree
from hub import COMMIT, Repository, serve
from tokenmill.errors import RecipeError
from tokenmill.storage.hub import HubPlace, parse, plain_name

COMMAND = [sys.executable, "-c", "from tokenmill.cli.main import main; main()"]


def parquet(start: int, count: int = 300) -> bytes:
    out = io.BytesIO()
    table = pa.table({"text": [f"document {number} of the hub " * 5 for number in range(start, start + count)]})
    pq.write_table(table, out, row_group_size=50)
    return out.getvalue()


def jsonl(start: int, count: int = 50) -> bytes:
    return b"".join(
        json.dumps({"text": f"line {number} of the hub"}).encode() + b"\n" for number in range(start, count)
    )


CARD = b"---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: en/*.jsonl\n---\nA dataset.\n"


def some_files() -> dict[str, bytes]:
    return {
        "README.md": CARD,
        ".gitattributes": b"*.parquet filter=lfs\n",
        "data/a.parquet": parquet(0),
        "data/b.parquet": parquet(300),
        "en/c.jsonl": jsonl(0),
    }


def run(
    folder: Path, endpoint: str, *arguments: str, command: str = "prepare", **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own: the hub's client reads its settings when it is imported."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.run(
        [*COMMAND, command, *arguments],
        env={**kept, **settings, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def blobs(folder: Path) -> list[Path]:
    return [path for path in (folder / "home").rglob("blobs/*") if path.suffix == ""]


def options(*more: str, workers: int = 1) -> list[str]:
    return ["--tokenizer", "byte", "--unit-bytes", "20000", "-j", str(workers), *more]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_of_the_hub_gives_the_bytes_that_its_files_would_give(tmp_path: Path, workers: int) -> None:
    repository = Repository(some_files())
    for name in ("data/a.parquet", "data/b.parquet", "en/c.jsonl"):
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(repository.files[name])
    with serve(repository) as endpoint:
        done = run(tmp_path, endpoint, "org/name", "-o", "hub", *options(workers=workers))
        assert done.returncode == 0, done.stderr
        local = run(tmp_path, endpoint, "copy", "-o", "local", *options())
    assert local.returncode == 0, local.stderr
    assert tree(tmp_path / "hub") == tree(tmp_path / "local")
    assert f"org/name is taken from the hub: hf://datasets/org/name@{COMMIT}" in " ".join(
        (done.stdout + done.stderr).split()
    )
    assert blobs(tmp_path) == [], "what was fetched for the build is given back"


def test_a_plan_looks_at_files_without_fetching_them(tmp_path: Path) -> None:
    repository = Repository(some_files())
    with serve(repository) as endpoint:
        done = run(tmp_path, endpoint, "hf://datasets/org/name", *options()[:4], command="plan")
    assert done.returncode == 0, done.stderr
    asked = [request for request in repository.requests if "/resolve/" in request]
    assert asked
    assert all("bytes=" in request for request in asked)


def test_a_file_that_is_not_text_is_refused_and_not_fetched(tmp_path: Path) -> None:
    repository = Repository({"a.txt": b"%PDF-1.7\n" + b"a line of text\n" * 99_999, "b.jsonl": jsonl(0)})
    with serve(repository) as endpoint:
        done = run(tmp_path, endpoint, "hf://datasets/org/name", "-o", "out", *options())
    assert done.returncode == 2, done.stderr
    assert "a.txt is a PDF document" in done.stderr
    assert blobs(tmp_path) == []
    assert all("bytes=" in request for request in repository.requests if "/resolve/" in request)


def test_a_config_is_what_the_card_says(tmp_path: Path) -> None:
    with serve(Repository(some_files())) as endpoint:
        done = run(tmp_path, endpoint, "hf://datasets/org/name@v1:small", "-o", "out", *options())
        assert done.returncode == 0, done.stderr
        missing = run(tmp_path, endpoint, "org/name:large", "-o", "other", *options())
    manifest = json.loads((tmp_path / "out/dataset.json").read_text())
    assert [source["name"] for source in manifest["sources"]] == ["en/c.jsonl"]
    assert missing.returncode == 2
    assert "no config 'large'" in missing.stderr


def test_an_update_takes_the_new_commit_and_keeps_what_was_made_of_files_that_are_the_same(tmp_path: Path) -> None:
    broken = {**some_files(), "data/b.parquet": b"PAR1"}
    repository = Repository(broken)
    with serve(repository) as endpoint:
        failed = run(tmp_path, endpoint, "org/name", "-o", "out", *options())
        assert failed.returncode == 1, failed.stderr
        repository.later = some_files()
        still = run(tmp_path, endpoint, "org/name", "-o", "out", *options())
        assert still.returncode == 1, "the build is pinned to the commit that it began with"
        repository.requests.clear()
        done = run(tmp_path, endpoint, "org/name", "-o", "out", *options("--update"))
        assert done.returncode == 0, done.stderr
        fetched = [request for request in repository.requests if request.startswith("GET") and "/resolve/" in request]
        right = run(tmp_path, endpoint, "org/name", "-o", "right", *options())
    assert right.returncode == 0, right.stderr
    assert tree(tmp_path / "out") == tree(tmp_path / "right")
    whole = [request for request in fetched if "bytes=" not in request]
    assert whole
    assert all("data/b.parquet" in request for request in whole), "the others are done"


def test_a_folder_of_that_name_wins_and_the_hub_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "org/name/a.txt").write_text("here\n" * 10)
    repository = Repository(some_files())
    with serve(repository) as endpoint:
        done = run(tmp_path, endpoint, "org/name", "-o", "out", *options())
    assert done.returncode == 0, done.stderr
    assert repository.requests == []


def test_bytes_that_were_changed_on_their_way_are_fetched_again_and_refused_if_they_stay_wrong(tmp_path: Path) -> None:
    for times, code in ((1, 0), (100, 1)):
        repository = Repository(some_files(), spoiled={"en/c.jsonl": 0, "data/a.parquet": 0})
        with serve(repository) as endpoint:
            plain = run(tmp_path, endpoint, "hf://datasets/org/name/data", "-o", f"right{times}", *options())
            assert plain.returncode == 0, plain.stderr
            repository.spoiled = {"data/a.parquet": times}
            done = run(tmp_path, endpoint, "hf://datasets/org/name/data/a.parquet", "-o", f"out{times}", *options())
        assert done.returncode == code, done.stdout + done.stderr
        if code:
            assert not (tmp_path / f"out{times}/dataset.json").exists()


def test_a_private_dataset_needs_the_token_which_nobody_gets_to_see(tmp_path: Path) -> None:
    repository = Repository(some_files(), token="hf_secretsecret")
    with serve(repository) as endpoint:
        refused = run(tmp_path, endpoint, "org/name", "-o", "out", *options(), HF_TOKEN="hf_wrongwrong")
        done = run(tmp_path, endpoint, "org/name", "-o", "out", *options(), HF_TOKEN="hf_secretsecret")
    assert refused.returncode == 1
    assert "HF_TOKEN" in refused.stderr
    assert done.returncode == 0, done.stderr
    written = "".join(path.read_text(errors="ignore") for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert "hf_" not in refused.stderr + refused.stdout + written


def test_offline_works_with_what_was_fetched_before_which_stays(tmp_path: Path) -> None:
    fetch = "from huggingface_hub import snapshot_download as s; s('org/name', repo_type='dataset', revision='main')"
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    repository = Repository(some_files())
    with serve(repository) as endpoint:
        subprocess.run(
            [sys.executable, "-c", fetch], env={**os.environ, **environment, "HF_ENDPOINT": endpoint}, check=True
        )
    if not list(tmp_path.rglob("trees")):
        pytest.skip("huggingface_hub before 1.0 does not store which files it fetched")
    before = sorted(blobs(tmp_path))
    done = run(tmp_path, endpoint, "org/name", "-o", "out", *options(), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert sorted(blobs(tmp_path)) == before
    refused = run(tmp_path, endpoint, "org/other", "-o", "other", *options(), HF_HUB_OFFLINE="1")
    assert refused.returncode == 1
    assert "HF_HUB_OFFLINE" in refused.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://datasets/org/name", HubPlace("org/name", "", "", "")),
        ("hf://datasets/org/name@v1:en", HubPlace("org/name", "v1", "en", "")),
        ("hf://datasets/org/name@v1/data/*.parquet", HubPlace("org/name", "v1", "", "data/*.parquet")),
    ],
)
def test_urls_of_the_hub(text: str, expected: Any) -> None:
    assert parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "hf://org/name",
        "hf://datasets/name",
        "hf://datasets/org/name/../other",
        "hf://user:secret@datasets/org/name",
        "hf://datasets/org/name?token=secret",
        "hf://datasets/org/name::s3://bucket",
    ],
)
def test_other_urls_are_refused_without_being_shown(text: str) -> None:
    with pytest.raises(RecipeError) as refused:
        parse(text)
    assert "secret" not in refused.value.message


def test_a_plain_name_has_two_parts() -> None:
    assert plain_name("org/name@v1:en") == HubPlace("org/name", "v1", "en", "")
    assert [plain_name(text) for text in ("name", "a/b/c", "./a", "/a/b", "a/*.txt", "../a")] == [None] * 6
