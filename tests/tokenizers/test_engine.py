"""The engine gives exactly the ids of each tokenizer's own implementation."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizer_texts import CORPUS, any_text, encode, tricky_text

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenmill.tokenizers.base import Engine
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.hard_texts import HARD_TEXTS
from tokenmill.tokenizers.parity import PATTERNS, choose_engine
from tokenmill.tokenizers.spec import TokenizerSpec, char_spec, resolve

PROPERTY = settings(max_examples=100, deadline=None, database=None)

texts = st.lists(any_text | tricky_text, min_size=1, max_size=4)


def ranks_of(spec: TokenizerSpec) -> dict[bytes, int]:
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, spec.content.splitlines())}


@cache
def gpt2() -> tuple[Engine, tiktoken.Encoding]:
    spec = resolve("gpt2")
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
        mergeable_ranks=ranks_of(spec),
        special_tokens={"<|endoftext|>": 50256},
    )
    return open_engine(spec), encoding


@given(documents=texts)
@PROPERTY
@example(documents=["", "hello world", "", " "])
@example(documents=["<|endoftext|>", "a<|endoftext|>b"])
@example(documents=["a" * 3000, " " * 500, "\n" * 500 + "x"])
def test_gpt2_gives_the_ids_of_tiktoken(documents: list[str]) -> None:
    engine, reference = gpt2()
    assert encode(engine, documents) == [reference.encode_ordinary(document) for document in documents]


@pytest.mark.parametrize("scheme", list(PATTERNS))
@given(documents=texts)
@settings(PROPERTY, max_examples=30)
@example(documents=["the end\n\u00a0", "a\n \u3000 ", "\n\u00a0", "a\r\n\u2003\n", *HARD_TEXTS])
def test_a_rank_file_gives_the_ids_of_tiktoken_under_every_scheme(scheme: str, documents: list[str]) -> None:
    engine, reference = ranked(scheme)
    assert encode(engine, documents) == [reference.encode_ordinary(document) for document in documents]


def test_the_pattern_of_gpt4_is_the_one_that_tiktoken_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    assert PATTERNS["gpt4"] == openai_public.cl100k_base()["pat_str"]


@cache
def ranked(scheme: str) -> tuple[Engine, tiktoken.Encoding]:
    spec = replace(resolve("gpt2"), name="ranks.tiktoken", scheme=scheme)
    encoding = tiktoken.Encoding(scheme, pat_str=PATTERNS[scheme], mergeable_ranks=ranks_of(spec), special_tokens={})
    return choose_engine(spec)[1], encoding


@given(documents=texts)
@PROPERTY
def test_gpt2_decodes_to_the_text_that_it_encoded(documents: list[str]) -> None:
    engine, _ = gpt2()
    found = engine.encode(pa.array(documents, pa.large_string()))
    assert engine.decode(found.ids) == "".join(documents)


@given(documents=texts)
@PROPERTY
def test_bytes_are_their_own_ids(documents: list[str]) -> None:
    engine = open_engine(resolve("byte"))
    assert encode(engine, documents) == [list(document.encode()) for document in documents]
    found = engine.encode(pa.array(documents, pa.large_string()))
    assert engine.decode(found.ids) == "".join(documents)


@given(documents=texts)
@PROPERTY
def test_characters_are_numbered_in_code_point_order(documents: list[str]) -> None:
    spec = char_spec("".join(documents))
    alphabet = sorted(set("".join(documents)))
    engine = open_engine(spec)
    assert encode(engine, documents) == [[alphabet.index(char) for char in document] for document in documents]
    found = engine.encode(pa.array(documents, pa.large_string()))
    assert engine.decode(found.ids) == "".join(documents)
    assert (spec.vocab_size, spec.eot_id) == (len(alphabet) + 1, len(alphabet))


def test_a_character_outside_of_the_alphabet_never_becomes_the_id_of_another() -> None:
    spec = char_spec("abc")
    found = open_engine(spec).encode(pa.array(["abcd"], pa.large_string()))
    assert found.ids[:3].tolist() == [0, 1, 2]
    assert found.ids[3] >= spec.vocab_size


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "byte", "char"])
def test_slices_of_arrow_text_are_encoded_as_their_own_documents(name: str, kind: pa.DataType) -> None:
    documents = ["first one", "", "zwölf", "漢字", "last"]
    engine = open_engine(char_spec("".join(documents)) if name == "char" else resolve(name))
    whole = pa.array(documents, kind)
    for start in range(len(documents)):
        for stop in range(start, len(documents) + 1):
            found = engine.encode(whole[start:stop])
            expected = engine.encode(pa.array(documents[start:stop], kind))
            assert found.ids.tolist() == expected.ids.tolist()
            assert found.lengths.tolist() == expected.lengths.tolist()


@pytest.mark.parametrize("name", ["gpt2", "byte", "char"])
def test_no_documents_and_empty_documents_have_no_ids(name: str) -> None:
    engine = open_engine(char_spec("a") if name == "char" else resolve(name))
    for documents in ([], ["", ""]):
        found = engine.encode(pa.array(documents, pa.large_string()))
        assert (found.ids.tolist(), found.lengths.tolist()) == ([], [0] * len(documents))


STYLES = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERNS["llama3"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


@cache
def byte_level(style: str) -> tokenizers.Tokenizer:
    """A byte-pair tokenizer with special tokens, and others that are added and not special."""
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = STYLES[style]
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(CORPUS, trainer)
    found.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    found.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    found.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", found.token_to_id("<|endoftext|>"))]
    )
    return found


@cache
def opened(style: str) -> tuple[TokenizerSpec, Engine, tokenizers.Tokenizer]:
    reference = tokenizers.Tokenizer.from_str(byte_level(style).to_str())
    reference.encode_special_tokens = True
    with tempfile.TemporaryDirectory() as folder:
        byte_level(style).save(f"{folder}/tokenizer.json")
        spec, engine, note = choose_engine(resolve(folder))
    assert (spec.engine, note) == ("gigatoken", "")
    return spec, engine, reference


@pytest.mark.parametrize("style", list(STYLES))
@given(documents=texts)
@settings(PROPERTY, max_examples=60)
@example(documents=["<tool>call</tool>", "a <tool> b", "<tool", "<|endoftext|> <pad><|im_end|>", "<tool><|im_end|>"])
def test_a_byte_level_tokenizer_gives_the_ids_of_tokenizers(style: str, documents: list[str]) -> None:
    _, engine, reference = opened(style)
    expected = [reference.encode(document, add_special_tokens=False).ids for document in documents]
    assert encode(engine, documents) == expected


def test_an_added_token_that_is_not_special_is_one_id_and_a_special_one_is_text() -> None:
    spec, engine, reference = opened("gpt2")
    (tool, name) = encode(engine, ["<tool>", "<|endoftext|>"])
    assert tool == [reference.token_to_id("<tool>")]
    assert len(name) > 1
    assert spec.eot_id == reference.token_to_id("<|endoftext|>")
    assert spec.vocab_size == reference.get_vocab_size(with_added_tokens=True)


@given(documents=texts)
@PROPERTY
@example(documents=["<|endoftext|><pad><|im_end|>" * 3, "x <|im_end|>\n<|im_end|> y"])
def test_no_text_gives_the_id_of_a_special_token(documents: list[str]) -> None:
    _, engine, reference = opened("gpt2")
    special = {reference.token_to_id(name) for name in ("<|endoftext|>", "<pad>", "<|im_end|>")}
    assert not special & set(chain.from_iterable(encode(engine, documents)))


@given(documents=texts)
@settings(PROPERTY, max_examples=50)
def test_a_forced_tokenizers_engine_gives_the_ids_of_gigatoken(documents: list[str]) -> None:
    spec, engine, _ = opened("gpt2")
    assert encode(open_engine(replace(spec, engine="tokenizers")), documents) == encode(engine, documents)


def word_piece() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"], show_progress=False
        ),
    )
    found.enable_padding(length=64)
    found.enable_truncation(max_length=8)
    return found


def unigram() -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.Unigram())
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>", "</s>", "<pad>"], unk_token="<unk>", show_progress=False
        ),
    )
    return found


@pytest.mark.parametrize("train", [word_piece, unigram])
def test_models_that_gigatoken_does_not_know_fall_back_to_tokenizers_and_say_so(
    tmp_path: Path, train: Callable[[], tokenizers.Tokenizer]
) -> None:
    reference = train()
    reference.save(str(tmp_path / "tokenizer.json"))
    reference.no_padding()
    reference.no_truncation()
    spec, engine, note = choose_engine(resolve(str(tmp_path / "tokenizer.json")))
    assert spec.engine == "tokenizers"
    assert spec.engine_version == f"tokenizers {tokenizers.__version__}"
    assert "gigatoken is not known to do" in note
    assert "slower" in note
    documents = [*CORPUS[:20], "", "unbekannt 漢字", "The quick brown fox " * 50]
    expected = [reference.encode(document, add_special_tokens=False).ids for document in documents]
    assert encode(engine, documents) == expected


@pytest.mark.parametrize(("train", "names"), [(word_piece, ["[SEP]", "[CLS]", "[MASK]"]), (unigram, ["</s>", "<pad>"])])
def test_special_strings_are_text_for_the_fallback_too(
    tmp_path: Path, train: Callable[[], tokenizers.Tokenizer], names: list[str]
) -> None:
    reference = train()
    reference.save(str(tmp_path / "tokenizer.json"))
    _, engine, _ = choose_engine(resolve(str(tmp_path / "tokenizer.json")))
    special = {reference.token_to_id(name) for name in names}
    for name in names:
        (ids,) = encode(engine, [f"a{name} {name} b"])
        assert not special & set(ids), name


def added(**flags: bool) -> bytes:
    """A byte-level tokenizer.json with one more token, which has these flags."""
    parsed = json.loads(byte_level("gpt2").to_str())
    parsed["normalizer"] = {"type": "NFC"}
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False, **flags}
    number = max(token["id"] for token in parsed["added_tokens"]) + 1  # behind a special token that has none else
    parsed["added_tokens"].append({"id": number, "content": "zeta", **token})
    return json.dumps(parsed).encode()


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip", "normalized"])
def test_flags_of_added_tokens_that_gigatoken_does_not_know_are_for_tokenizers(tmp_path: Path, flag: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(added(**{flag: True}))
    spec, engine, note = choose_engine(resolve(str(tmp_path)))
    assert spec.engine == "tokenizers"
    assert f"flag {flag} of the added token 'zeta'" in note
    reference = tokenizers.Tokenizer.from_str(added(**{flag: True}).decode())
    assert reference.token_to_id("zeta") in encode(engine, [" zeta "])[0]
    documents = ["zetas azeta zeta", "  zeta  ", "a zeta\n"]
    assert encode(engine, documents) == [reference.encode(text, add_special_tokens=False).ids for text in documents]
