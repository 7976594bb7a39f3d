from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import tokenizers
from tokenizers import models, pre_tokenizers, trainers
from tokenmill.errors import ParityError, TokenizerError
from tokenmill.tokenizers.base import Encoded, Engine, Ids
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.parity import Parity, Trial, check_parity, choose_engine, open_reference, try_engine
from tokenmill.tokenizers.spec import TokenizerSpec, char_spec, resolve

DOCUMENTS = ["hello world", "", "Zwölf Boxkämpfer 12345", "<|endoftext|> is text here", "漢字 😀\r\n"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TokenizerSpec:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        DOCUMENTS * 3,
        trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
        ),
    )
    path = tmp_path_factory.mktemp("parity") / "tokenizer.json"
    trained.save(str(path))
    return resolve(str(path))


def specs(byte_level: TokenizerSpec) -> list[TokenizerSpec]:
    return [resolve("gpt2"), resolve("byte"), char_spec("".join(DOCUMENTS)), byte_level]


def compare(spec: TokenizerSpec, engine: Engine, texts: list[str]) -> tuple[Parity, Trial]:
    return check_parity(spec, open_reference(spec), texts, partial(try_engine, engine))


def test_an_engine_and_its_reference_agree_and_what_was_compared_is_told(byte_level: TokenizerSpec) -> None:
    for spec in specs(byte_level):
        found, trial = compare(spec, open_engine(spec), DOCUMENTS)
        assert found.documents == len(DOCUMENTS)
        assert found.bytes == sum(len(text.encode()) for text in DOCUMENTS)
        assert found.tokens == sum(len(open_reference(spec)[1](text)) for text in DOCUMENTS) == sum(trial.lengths)


def test_the_reference_is_another_implementation_and_is_named(byte_level: TokenizerSpec) -> None:
    assert [open_reference(spec)[0] for spec in specs(byte_level)] == [
        "tiktoken",
        "python",
        "python",
        "tokenizers",
    ]


def test_an_engine_of_another_tokenizer_stops_and_shows_the_text(byte_level: TokenizerSpec) -> None:
    with pytest.raises(ParityError) as caught:
        compare(byte_level, open_engine(resolve("gpt2")), ["", "Zwölf Boxkämpfer"])
    assert "Zwölf Boxkämpfer" in caught.value.message
    assert "at token 0" in caught.value.message
    assert "tokenizers" in caught.value.message
    assert caught.value.hint


def test_the_first_document_and_token_that_differ_are_shown_with_both_ids() -> None:
    spec = replace(resolve("gpt2"), scheme="gpt4")
    gpt2, gpt4 = open_reference(resolve("gpt2"))[1], open_reference(spec)[1]
    text = "same so far 1234567"
    same = next(i for i, (a, b) in enumerate(zip(gpt2(text), gpt4(text), strict=False)) if a != b)
    with pytest.raises(ParityError) as caught:
        compare(spec, open_engine(resolve("gpt2")), ["agreed", text, "other 1234567"])
    message = caught.value.message
    assert f"at token {same}" in message
    assert str(gpt2(text)[same]) in message
    assert str(gpt4(text)[same]) in message
    assert "same so far" in message
    assert "1234567" in message
    assert "other" not in message


def test_a_document_that_one_of_them_ends_early_is_a_difference() -> None:
    with pytest.raises(ParityError, match="at token 3"):
        compare(char_spec("abc"), _Short(), ["abcabc"])


class _Short:
    """An engine that loses the second half of every document."""

    def __init__(self) -> None:
        self._whole = open_engine(char_spec("abc"))

    def encode(self, text: pa.Array) -> Encoded:
        return self._whole.encode(pa.array([document[: len(document) // 2] for document in text.to_pylist()]))

    def decode(self, ids: Ids) -> str:
        return self._whole.decode(ids)


def test_no_documents_are_no_difference() -> None:
    found, _ = compare(resolve("gpt2"), open_engine(resolve("gpt2")), [])
    assert (found.documents, found.bytes, found.tokens) == (0, 0, 0)


def test_an_engine_that_works_is_chosen_without_a_word(byte_level: TokenizerSpec) -> None:
    for spec in specs(byte_level):
        assert choose_engine(spec)[0] == spec
        assert choose_engine(spec)[-1] == ""


def test_a_rank_file_that_cannot_be_encoded_has_no_fallback_and_a_hint(tmp_path: Path) -> None:
    (tmp_path / "x.tiktoken").write_bytes(b"this is not\nbase64 at all\n")
    with pytest.raises(TokenizerError, match=r"x\.tiktoken") as caught:
        choose_engine(resolve(f"{tmp_path}/x.tiktoken:gpt2"))
    assert caught.value.hint
