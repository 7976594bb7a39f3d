"""A panic of a library in Rust is no `Exception`. It comes as an error of ours, which names the library and the place.

Each of them is a real one: tiktoken's pattern runs out of stack, obstore cannot parse the address of a server.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pytest
import tiktoken

import tokenmill as library
from conftest import Command
from tokenmill.build.plan import make_task
from tokenmill.build.resolve import make_config, resolve_build
from tokenmill.errors import BuildError, RecipeError, SourceError, StorageError, TokenizerError, is_failure, is_panic
from tokenmill.recipe import make_recipe
from tokenmill.sources.base import text_array
from tokenmill.storage import hub_client
from tokenmill.storage.base import parse_url
from tokenmill.storage.object_store import Store
from tokenmill.tokenizers.base import Encoded
from tokenmill.tokenizers.engine import culprit, native_errors, open_engine
from tokenmill.tokenizers.parity import PATTERNS, open_reference, try_engine
from tokenmill.tokenizers.spec import resolve
from tokenmill.units import run as units
from tokenmill.units.encode import encode_batch, read_batches

DEEP = " " * 1_000_000 + "a"


def panic(*_: Any, **__: Any) -> NoReturn:
    encoding = tiktoken.Encoding("x", pat_str=PATTERNS["gpt2"], mergeable_ranks=ranks(), special_tokens={})
    encoding.encode_ordinary(DEEP)
    raise AssertionError("tiktoken is mended: find another panic")


def ranks() -> dict[bytes, int]:
    return {bytes([byte]): byte for byte in range(256)}


class PanickingEngine:
    """An engine that panics on some texts, or on all of them from the first time on."""

    times_text = times_run = 1

    def __init__(self, *, lasts: bool = False) -> None:
        self._lasts, self._is_broken = lasts, False

    def encode(self, text: pa.Array) -> Encoded:
        with native_errors("tiktoken"):
            self._is_broken |= self._lasts and "deep" in text.to_pylist()
            if self._is_broken or "deep" in text.to_pylist():
                panic()
        return open_engine(resolve("byte")).encode(text)

    def decode(self, ids: Any) -> str:
        return ""


@pytest.fixture(autouse=True)
def quiet_panics(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rust itself writes where it panicked; not the whole stack."""
    monkeypatch.setenv("RUST_BACKTRACE", "0")
    yield


@pytest.fixture
def rank_file(tmp_path: Path) -> Path:
    path = tmp_path / "gpt2.tiktoken"
    path.write_bytes(resolve("gpt2").content)
    return path


def test_a_panic_is_a_failure_and_an_interruption_is_not() -> None:
    try:
        panic()
    except BaseException as error:
        assert not isinstance(error, Exception)
        assert is_panic(error)
        assert is_failure(error)
    assert is_failure(ValueError())
    assert not is_failure(KeyboardInterrupt())
    assert not is_failure(SystemExit())
    assert not is_panic(ValueError())


def test_a_reference_that_panics_says_on_which_text() -> None:
    name, encode = open_reference(dataclasses.replace(resolve("gpt2"), name="ranks.tiktoken"))
    assert name == "tiktoken"
    with pytest.raises(TokenizerError, match=r"tiktoken cannot encode the text ' {60}'\.\.\.: ") as caught:
        encode(DEEP)
    assert caught.value.hint


def test_a_trial_that_panics_says_on_which_text() -> None:
    with pytest.raises(TokenizerError, match="asked to encode the text 'deep'"):
        try_engine(PanickingEngine(), ["good", "deep", "good"])


def test_the_document_is_found_unless_nothing_can_be_encoded_any_more() -> None:
    texts = text_array(["good", "better", "deep", "deep"])
    assert culprit(PanickingEngine(), texts) == 2
    assert culprit(PanickingEngine(), texts[:2]) is None
    broken = PanickingEngine(lasts=True)
    with pytest.raises(TokenizerError):
        broken.encode(texts)
    assert culprit(broken, texts) is None


@pytest.mark.parametrize("workers", [1, 2])
def test_the_document_that_an_engine_cannot_encode_is_named(
    tokenmill: Command, tmp_path: Path, rank_file: Path, workers: int
) -> None:
    lines = [json.dumps({"text": text}) + "\n" for text in [*["good"] * 20, DEEP, "good"]]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    command = ("prepare", "a.jsonl", "-o", "out", "--tokenizer", f"tiktoken:{rank_file}", "-j", workers)
    done = tokenmill(*command, code=2)
    assert f"a.jsonl at {sum(map(len, lines[:20]))}: tiktoken cannot encode a text: " in done.stderr
    assert "--max-document-bytes" in done.stderr
    done = tokenmill(*command, "--max-document-bytes", "100k", "--restart", "--json")
    assert json.loads(done.stdout)["dropped"] == {"too_large": 1}


def test_a_stream_names_the_document_as_well(tmp_path: Path, rank_file: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["good", DEEP]))
    with pytest.raises(TokenizerError, match=r"a\.jsonl at 17: tiktoken cannot encode a text: "):
        list(library.stream(tmp_path / "a.jsonl", f"tiktoken:{rank_file}", 4, 1, epochs=1))


def test_an_engine_that_panics_for_good_is_said_with_the_beginning_of_its_batch(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good\ndeep\n")
    setup = resolve_build(make_recipe({"sources": tmp_path / "a.txt", "tokenizer": "byte"}))
    work, task = make_config(setup, scratch=None), make_task(setup.plan, 0)
    batch = next(iter(read_batches(work, task)))
    for lasts, place in ((False, "5: "), (True, "0, or behind it: ")):
        with pytest.raises(TokenizerError, match=rf"a\.txt at {place}tiktoken cannot encode a text"):
            encode_batch(batch, work, task, PanickingEngine(lasts=lasts), keep=None, tokens_left=None)


def test_any_other_panic_fails_the_unit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("good\n")
    monkeypatch.setattr(units, "encode_batch", panic)
    with pytest.raises(BuildError, match=r"unit 0 .*PanicException: "):
        library.prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer="byte", workers=1)


def test_a_filter_that_panics_is_named_with_the_document(
    tokenmill: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deepfilter.py").write_text("from test_panics import panic as keep\n")
    (tmp_path / "deepmodule.py").write_text("from test_panics import panic\npanic()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    (tmp_path / "a.txt").write_text("good\n")
    with pytest.raises(RecipeError, match=r"a\.txt at 0: the filter deepfilter:keep raised PanicException"):
        library.prepare(tmp_path / "a.txt", tmp_path / "out", tokenizer="byte", workers=1, filter="deepfilter:keep")
    with pytest.raises(RecipeError, match="deepmodule cannot be imported: PanicException"):
        library.plan(tmp_path / "a.txt", filter="deepmodule:keep")


def test_a_store_whose_client_panics_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "x")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://a{b")
    store = Store(parse_url("s3://bucket"))
    for ask in (
        lambda: store.find("key"),
        lambda: store.read("key", 10),
        lambda: store.put("key", b"data"),
        lambda: store.put_new("key", b"data"),
        lambda: store.under("key"),
        lambda: store.delete(["key"]),
        lambda: store.copy("key", "other"),
        lambda: store.begin(store.find, "key").result(),
    ):
        with pytest.raises(StorageError, match="s3://bucket/key: obstore cannot make the request: ") as caught:
            ask()
        assert "endpoint" in caught.value.hint


def test_a_panic_of_the_hubs_client_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", panic)
    with pytest.raises((StorageError, SourceError), match=r"org/name@main: a library of the hub's client crashed"):
        hub_client.commit_of("org/name", "main")
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", panic)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", panic)
    with pytest.raises(TokenizerError, match="unknown tokenizer 'org/name'"):
        resolve("org/name")


def test_the_command_line_shows_a_sentence_at_any_rate(
    tokenmill: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.maintenance.verify.verify", panic)
    done = tokenmill("verify", tmp_path, code=1)
    assert "error: unexpected PanicException: " in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_that_make_gigatoken_panic_are_refused_without_its_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A token of three bytes that no two others make."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in {**ranks(), b"abc": 256}.items()]
    (tmp_path / "a.tiktoken").write_text("".join(lines))
    with pytest.raises(TokenizerError, match=r"gigatoken cannot encode .*assertion"):
        open_engine(resolve(f"{tmp_path}/a.tiktoken:gpt2"))
    assert capfd.readouterr().err == ""
