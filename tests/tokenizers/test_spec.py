from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from tokenmill.build.resolve import resolve_build
from tokenmill.errors import TokenizerError
from tokenmill.recipe import make_recipe
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.parity import choose_engine
from tokenmill.tokenizers.spec import char_spec, from_dataset, resolve

CORPUS = ["The quick brown fox jumps over the lazy dog"] * 20


def train(*, special: list[str], plain: list[str] = []) -> str:  # noqa: B006  nobody changes it
    """A small tokenizer.json."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    trained.add_tokens(plain)
    return trained.to_str()


def save(folder: Path, *, special: list[str], config: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(train(special=special))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_gpt2_is_built_in() -> None:
    spec = resolve("gpt2")
    assert (spec.vocab_size, spec.eot_id, spec.scheme, spec.engine) == (50257, 50256, "gpt2", "gigatoken")
    assert hashlib.sha256(spec.content).hexdigest() == (
        "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    )


def test_bytes_and_characters_are_built_in() -> None:
    assert (resolve("byte").vocab_size, resolve("byte").eot_id) == (257, 256)
    assert (char_spec("cabba").vocab_size, char_spec("cabba").eot_id) == (4, 3)


DEEPSEEK_EOT = "<\uff5cend\u2581of\u2581sentence\uff5c>"


@pytest.mark.parametrize("eot", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]", DEEPSEEK_EOT])
def test_the_end_of_text_is_found_by_its_usual_names(tmp_path: Path, eot: str) -> None:
    spec = resolve(str(save(tmp_path, special=["<pad>", eot])))
    assert spec.eot_id == 1


@pytest.mark.parametrize("eos", ["<fin>", {"content": "<fin>", "lstrip": False}])
def test_the_end_of_text_of_the_configuration_wins(tmp_path: Path, eos: Any) -> None:
    spec = resolve(str(save(tmp_path, special=["<|endoftext|>", "<fin>"], config={"eos_token": eos})))
    assert spec.eot_id == 1


@pytest.mark.parametrize(
    "config",
    [{}, [], *({"eos_token": eos} for eos in (None, "<unknown>", {}, ["<pad>"], {"content": {"content": "<pad>"}}))],
)
def test_a_configuration_that_names_no_known_token_is_passed_over(tmp_path: Path, config: Any) -> None:
    spec = resolve(str(save(tmp_path, special=["<pad>", "<|endoftext|>"], config=config)))
    assert spec.eot_id == 1


def test_the_end_of_text_that_the_user_names_wins_over_all(tmp_path: Path) -> None:
    folder = save(tmp_path, special=["<|endoftext|>", "<fin>", "<mine>"], config={"eos_token": "<fin>"})
    assert resolve(str(folder), eot_token="<mine>").eot_id == 2


def test_an_end_of_text_that_the_tokenizer_does_not_have_is_an_error_that_lists_what_it_has(tmp_path: Path) -> None:
    folder = save(tmp_path, special=["<|endoftext|>", "<fin>"])
    with pytest.raises(TokenizerError, match=r"has no token '<nope>'") as caught:
        resolve(str(folder), eot_token="<nope>")
    assert "<fin>, <|endoftext|>" in caught.value.hint


@pytest.mark.parametrize("name", ["gpt2", "byte", "char"])
def test_built_in_tokenizers_have_an_end_of_text_of_their_own(name: str) -> None:
    with pytest.raises(TokenizerError, match=r"`eot_token` does not apply|has no token") as caught:
        resolve(name, eot_token="x")
    assert caught.value.hint


def test_a_tokenizer_without_an_end_of_text_stops_before_any_work_unless_none_is_wanted(tmp_path: Path) -> None:
    folder = save(tmp_path / "tokenizer", special=["<pad>"])
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert resolve(str(folder)).eot_id is None
    fields = {"sources": (str(tmp_path / "a.txt"),), "tokenizer": str(folder)}
    with pytest.raises(TokenizerError, match="names no end-of-text token") as caught:
        resolve_build(make_recipe(fields))
    assert "`eot_token`" in caught.value.hint
    assert resolve_build(make_recipe({**fields, "eot": "none"})).spec.eot_id is None


def test_a_folder_or_its_file_may_be_named(tmp_path: Path) -> None:
    folder = save(tmp_path, special=["</s>"])
    assert resolve(str(folder)) == resolve(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", ["a" * 300, f"/{'a' * 300}/tokenizer.json", "~nobody-of-this-name/tokenizer.json"])
def test_a_path_that_cannot_be_looked_at_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(TokenizerError, match=f"cannot look for the tokenizer {name}: .") as caught:
        resolve(name)
    assert caught.value.hint


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"holds neither tokenizer\.json nor tokenizer\.model") as caught:
        resolve(str(tmp_path))
    assert caught.value.hint


@pytest.mark.parametrize("name", ["nope.json", "nope.model", "nope.tiktoken", "nope.tiktoken:gpt2", "./nope", "/nope"])
def test_a_file_that_is_not_there_is_an_error_and_no_search_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError, match="there is no tokenizer file") as caught:
        resolve(name)
    assert caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"7",
        b"{}",
        b'{"model": null}',
        b'{"model": {}}',
        b'{"model": {"vocab": null}}',
        b'{"model": {"vocab": 7}}',
        b'{"model": {"vocab": ["a"]}}',
        b'{"model": {"vocab": [[]]}}',
        b'{"model": {"vocab": [[7, 0.5]]}}',
        b'{"model": {"vocab": {"a": "x"}}}',
        b'{"model": {"vocab": {"a": null}}}',
        b'{"model": {"vocab": {"a": -5}}}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{}]}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": [7]}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": 7}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b", "id": "x"}]}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": 7, "id": 1}]}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}}}',
        b'{"model": {"type": "Unheard", "vocab": {"a": 0}, "merges": []}}',
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_tokenizer_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        choose_engine(resolve(str(tmp_path / "tokenizer.json")))
    assert caught.value.hint


def test_a_rank_file_that_openai_publishes_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "mine.tiktoken").write_bytes(resolve("gpt2").content)
    spec = resolve(str(tmp_path / "mine.tiktoken"))
    assert (spec.scheme, spec.eot_id, spec.vocab_size) == ("gpt2", 50256, 50257)
    assert resolve(str(tmp_path / "mine.tiktoken"), eot_token="<|endoftext|>") == spec
    with pytest.raises(TokenizerError, match="has no token '<fin>'"):
        resolve(str(tmp_path / "mine.tiktoken"), eot_token="<fin>")


def save_ranks(path: Path) -> Path:
    path.write_bytes(b"".join(resolve("gpt2").content.splitlines(keepends=True)[:1000]))
    return path


def test_any_other_rank_file_needs_its_scheme_whatever_its_name(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "r50k_base.tiktoken")
    spec = resolve(f"{path}:gpt4")
    assert (spec.scheme, spec.eot_id, spec.vocab_size) == ("gpt4", None, 1000)
    for name in (str(path), f"{path}:nope"):
        with pytest.raises(TokenizerError, match=r"r50k_base\.tiktoken: .* does not say how") as caught:
            resolve(name)
        assert "gpt2, gpt4, llama3, o200k, qwen2, tekken" in caught.value.hint


def test_any_other_rank_file_gets_an_end_of_text_beyond_its_ranks(tmp_path: Path) -> None:
    path = save_ranks(tmp_path / "mine.tiktoken")
    spec = resolve(f"{path}:gpt2", eot_token="<fin>")
    assert (spec.eot_id, spec.vocab_size) == (1000, 1001)
    _, engine, _ = choose_engine(spec)
    assert engine.encode(pa.array(["the end <fin>"], pa.large_string())).ids.max() < 1000


def test_a_vocabulary_covers_added_tokens_beyond_the_model(tmp_path: Path) -> None:
    parsed = json.loads(train(special=["</s>"]))
    parsed["added_tokens"].append({**parsed["added_tokens"][0], "id": 900, "content": "<far>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    assert resolve(str(tmp_path)).vocab_size == 901


def test_tokenizers_can_be_asked_for_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path, special=["</s>"])
    spec = resolve(f"tokenizers:{folder}")
    assert spec == replace(resolve(str(folder)), engine="tokenizers")
    assert type(open_engine(spec)) is not type(open_engine(resolve(str(folder))))
    with pytest.raises(TokenizerError, match=r"only a tokenizer\.json") as caught:
        resolve("tokenizers:gpt2")
    assert caught.value.hint


def test_the_fingerprint_is_that_of_the_content_and_not_of_the_name(tmp_path: Path) -> None:
    one, two = save(tmp_path / "one", special=["</s>", "<x>"]), save(tmp_path / "two", special=["</s>", "<x>"])
    other = save(tmp_path / "other", special=["</s>", "<y>"])
    assert resolve(str(one)).fingerprint == resolve(str(two)).fingerprint
    assert resolve(str(one)).fingerprint != resolve(str(other)).fingerprint
    assert resolve(str(one)).fingerprint != resolve(str(one), eot_token="<x>").fingerprint
    assert resolve("byte").fingerprint != resolve("gpt2").fingerprint


@pytest.mark.parametrize("name", ["gpt2", "byte", "char", "hf", "tiktoken"])
def test_a_dataset_gives_its_tokenizer_back(tmp_path: Path, name: str) -> None:
    if name == "hf":
        name = str(save(tmp_path, special=["</s>"]))
    if name == "tiktoken":
        (tmp_path / "r50k_base.tiktoken").write_bytes(resolve("gpt2").content)
        name = str(tmp_path / "r50k_base.tiktoken")
    spec = char_spec("abc") if name == "char" else resolve(name)
    content = spec.content if spec.file_name else None
    description = json.loads(json.dumps(spec.describe()))
    assert from_dataset(description, content) == spec


class _Hub(BaseHTTPRequestHandler):
    """The hub's protocol for downloads, as far as a client needs it for a few small files."""

    files: ClassVar[dict[str, bytes]]
    requests: ClassVar[list[str]]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        self.requests.append(f"{self.command} {self.path}")
        content = self.files.get(self.path)
        self.send_response(200 if content is not None else 404)
        self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
        if content is None:
            known = any(self.path.startswith(path.rpartition("/")[0]) for path in self.files)
            self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha256(content or b"").hexdigest()}"')
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if body and content:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def hub(files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """A hub on this machine that holds these files; gives its address and what it is asked for."""
    requests: list[str] = []
    handler = type("Hub", (_Hub,), {"files": files, "requests": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


_RESOLVE = """
import json, sys
from tokenmill.errors import TokenizerError
from tokenmill.tokenizers.spec import resolve
found = []
for name in sys.argv[1:]:
    try:
        spec = resolve(name)
        found.append({"fingerprint": spec.fingerprint, "eot_id": spec.eot_id, "name": spec.name})
    except TokenizerError as error:
        found.append({"error": error.message, "hint": error.hint})
print(json.dumps(found))
"""


def resolve_elsewhere(*names: str, home: Path, endpoint: str, **environment: str) -> list[dict[str, Any]]:
    """Resolve names in a process of its own: the hub's client reads its settings when it is imported."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", _RESOLVE, *names],
        env={**kept, **settings, **environment},
        cwd=home.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_a_tokenizer_comes_from_the_hub_once_and_then_needs_no_network(tmp_path: Path) -> None:
    content = train(special=["<|endoftext|>", "<fin>"])
    (tmp_path / "local").mkdir()
    (tmp_path / "local/tokenizer.json").write_text(content)
    files = {
        "/org/name/resolve/main/tokenizer.json": content.encode(),
        "/org/name/resolve/main/tokenizer_config.json": b'{"eos_token": "<fin>"}',
    }
    with hub(files) as (endpoint, requests):
        (found,) = resolve_elsewhere("org/name", home=tmp_path / "home", endpoint=endpoint)
        assert "GET /org/name/resolve/main/tokenizer.json" in requests
    local = resolve(str(tmp_path / "local"), eot_token="<fin>")
    assert found == {"fingerprint": local.fingerprint, "eot_id": 1, "name": "org/name"}
    (again,) = resolve_elsewhere("org/name", home=tmp_path / "home", endpoint=endpoint, HF_HUB_OFFLINE="1")
    assert again == found


def test_a_tokenizer_without_a_configuration_comes_from_the_hub_too_and_its_revision_can_be_named(
    tmp_path: Path,
) -> None:
    files = {"/org/name/resolve/v1.0/tokenizer.json": train(special=["<pad>", "<|endoftext|>"]).encode()}
    with hub(files) as (endpoint, requests):
        (found,) = resolve_elsewhere("org/name@v1.0", home=tmp_path / "home", endpoint=endpoint)
    assert (found["eot_id"], found["name"]) == (1, "org/name@v1.0")
    asked = [request for request in requests if "/resolve/" in request]
    assert asked
    assert all("/org/name/resolve/v1.0/" in request for request in asked)


def test_a_name_that_the_hub_does_not_know_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with hub({}) as (endpoint, _):
        (found,) = resolve_elsewhere("org/nope", home=tmp_path / "home", endpoint=endpoint)
    assert "unknown tokenizer 'org/nope'" in found["error"]
    assert "gpt2, byte, char" in found["error"]
    assert found["hint"]


def test_a_hub_that_cannot_be_reached_is_not_waited_for_and_what_came_before_will_do(tmp_path: Path) -> None:
    with hub({"/org/name/resolve/main/tokenizer.json": train(special=["<|endoftext|>"]).encode()}) as (endpoint, _):
        (found,) = resolve_elsewhere("org/name", home=tmp_path / "home", endpoint=endpoint)
    again, unknown = resolve_elsewhere("org/name", "org/nope", home=tmp_path / "home", endpoint=endpoint)
    assert again == found
    assert "the hub cannot be reached" in unknown["error"]


def test_an_unknown_name_without_a_network_is_an_error_with_a_hint(tmp_path: Path) -> None:
    names = ["gpt3", "org/name", "a b", "a/b/c", "org/name@"]
    endpoint = "http://127.0.0.1:9"
    found = resolve_elsewhere(*names, home=tmp_path / "home", endpoint=endpoint, HF_HUB_OFFLINE="1")
    for name, answer in zip(names, found, strict=True):
        assert f"unknown tokenizer {name!r}" in answer["error"]
        assert answer["hint"]


def test_a_sentencepiece_model_is_known_whatever_its_suffix(tmp_path: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(tmp_path / "x"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "x.model").rename(tmp_path / "tokenizer.model.v3")
    assert resolve(str(tmp_path / "tokenizer.model.v3")).kind == "sentencepiece"
    assert resolve(str(tmp_path)).kind == "sentencepiece"


def test_dropout_is_refused_with_a_way_out_that_works(tmp_path: Path) -> None:
    parsed = json.loads(train(special=["</s>"]))
    parsed["model"]["dropout"] = 0.1
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    with pytest.raises(TokenizerError, match=r"has BPE dropout 0\.1") as caught:
        resolve(str(tmp_path))
    assert '"dropout" to null' in caught.value.hint
    parsed["model"]["dropout"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    assert choose_engine(resolve(str(tmp_path)))[2] == ""


def test_an_end_of_text_that_tokenizers_numbers_anew_is_an_error(tmp_path: Path) -> None:
    """Added tokens follow the vocabulary without gaps, whatever their ids in the file say."""
    parsed = json.loads(train(special=["</s>"]))
    size = len(parsed["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for number, name in ((size, "<|fine|>"), (size + 50, "<|gap|>")):
        parsed["added_tokens"].append({"id": number, "content": name, **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    assert resolve(str(tmp_path), eot_token="<|fine|>").eot_id == size
    with pytest.raises(TokenizerError, match=rf"the id {size + 50}, but tokenizers loads it as {size + 1}") as caught:
        resolve(str(tmp_path), eot_token="<|gap|>")
    assert caught.value.hint


def test_a_token_of_the_vocabulary_keeps_its_id_if_it_is_added_with_another(tmp_path: Path) -> None:
    parsed = json.loads(train(special=["</s>"]))
    own = parsed["model"]["vocab"]["</s>"]
    parsed["added_tokens"].append({**parsed["added_tokens"][-1], "id": len(parsed["model"]["vocab"])})
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    assert resolve(str(tmp_path)).eot_id == own
