"""A SentencePiece model gives the ids of `sentencepiece`."""

from __future__ import annotations

import io
import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_texts import CORPUS, any_text, encode, tricky_text

import tokenmill
from tokenmill.errors import TokenizerError
from tokenmill.tokenizers.base import Engine
from tokenmill.tokenizers.hard_texts import HARD_TEXTS
from tokenmill.tokenizers.parity import choose_engine, open_reference
from tokenmill.tokenizers.spec import TokenizerSpec, resolve

PROPERTY = settings(max_examples=100, deadline=None, database=None)


@cache
def sentencepiece_model(kind: str, byte_fallback: bool, options: tuple[tuple[str, object], ...] = ()) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=kind,
        vocab_size=400,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        minloglevel=2,
        **dict(options),
    )
    return model.getvalue()


Options = tuple[tuple[str, object], ...]


MODELS: dict[str, tuple[str, bool, Options]] = {
    "bpe": ("bpe", True, ()),
    "llama": ("bpe", True, (("normalization_rule_name", "identity"), ("remove_extra_whitespaces", False))),
    "bpe-identity": ("bpe", False, (("normalization_rule_name", "identity"),)),
    "bpe-no-prefix": ("bpe", True, (("add_dummy_prefix", False),)),
    "bpe-user-defined": ("bpe", True, (("user_defined_symbols", "<tool>"),)),
    "unigram": ("unigram", False, ()),
    "unigram-bytes": ("unigram", True, ()),
    "unigram-spaces": ("unigram", False, (("remove_extra_whitespaces", False),)),
    "unigram-across-words": ("unigram", False, (("split_by_whitespace", False),)),
    "unigram-suffix": ("unigram", False, (("treat_whitespace_as_suffix", True),)),
    "word": ("word", False, (("use_all_vocab", True),)),
    "char": ("char", False, ()),
}


@cache
def opened_sentencepiece(name: str) -> tuple[TokenizerSpec, Engine, sentencepiece.SentencePieceProcessor]:
    model = sentencepiece_model(*MODELS[name])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.model").write_bytes(model)
        spec, engine, _ = choose_engine(resolve(folder))
    return spec, engine, sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.mark.parametrize("name", list(MODELS))
@given(documents=st.lists(tricky_text | any_text, min_size=1, max_size=3))
@settings(PROPERTY, max_examples=40)
@example(documents=["The quick brown fox", " leading", "trailing ", "two  spaces", "", " ", "a\nb\tc"])
@example(documents=["\x85", "a\x85", "\u2028x\u2028", "\x1c"])
@example(documents=["201220111", "a<tool>b <tool>", *HARD_TEXTS])
@example(documents=["日本語 😀", "ﬁ ½", "\u00a0nbsp\u3000wide", "zero\u200bwidth", "▁x ▁", "x" * 50])
def test_a_sentencepiece_model_gives_the_ids_of_sentencepiece(name: str, documents: list[str]) -> None:
    _, engine, reference = opened_sentencepiece(name)
    assert encode(engine, documents) == reference.encode(documents)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("text", ["</s>", "a</s> </s> b", "<s>x", "<unk>", "<0x41>"])
def test_names_of_control_pieces_are_text_as_they_are_for_sentencepiece(name: str, text: str) -> None:
    _, engine, reference = opened_sentencepiece(name)
    assert encode(engine, [text]) == [reference.encode(text)]


@pytest.mark.parametrize("name", list(MODELS))
def test_a_sentencepiece_model_knows_its_size_and_its_end_of_text(name: str) -> None:
    spec, _, reference = opened_sentencepiece(name)
    assert (spec.vocab_size, spec.eot_id) == (reference.vocab_size(), reference.eos_id())


def test_a_sentencepiece_model_is_encoded_by_sentencepiece_and_a_note_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(sentencepiece_model(*MODELS["bpe"]))
    spec, _, note = choose_engine(resolve(str(tmp_path / "x.model")))
    assert (spec.kind, spec.engine, spec.file_name) == ("sentencepiece", "sentencepiece", "tokenizer.model")
    assert "encoded by sentencepiece itself" in note
    assert open_reference(spec)[0] == "sentencepiece"


def test_a_dataset_of_a_model_has_the_ids_of_sentencepiece_document_by_document(tmp_path: Path) -> None:
    model = sentencepiece_model(*MODELS["unigram-spaces"])
    (tmp_path / "x.model").write_bytes(model)
    documents = [text for text in HARD_TEXTS if text]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (tmp_path / "a.jsonl").write_text(lines)
    notes: list[str] = []
    tokenmill.prepare(
        str(tmp_path / "a.jsonl"),
        tmp_path / "out",
        tokenizer=str(tmp_path / "x.model"),
        workers=1,
        watch=lambda event: notes.append(str(event.get("message"))),
    )
    found = tokenmill.open(tmp_path / "out")["train"]
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    expected = [[*reference.encode(text), reference.eos_id()] for text in documents]
    expected = [ids for ids in expected if len(ids) > 1]
    assert [found.document(number).tolist() for number in range(found.num_documents)] == expected
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == model
    assert any("MB/s" in note for note in notes)
    assert tokenmill.verify(tmp_path / "out", source="all").ok


@pytest.mark.parametrize(
    "content", [b"", b"not protobuf at all", b"\x0a\xff\xff\xff\xff\xff", b"\xff" * 100, b"\0" * 50]
)
def test_a_file_that_is_no_sentencepiece_model_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"x\.model") as caught:
        resolve(str(tmp_path / "x.model"))
    assert caught.value.hint


def test_a_piece_that_is_not_utf8_is_an_error_that_names_the_model(tmp_path: Path) -> None:
    content = sentencepiece_model("bpe", True)
    last = content.rindex("▁".encode())
    (tmp_path / "x.model").write_bytes(content[:last] + b"\xe2\xa0A" + content[last + 3 :])
    with pytest.raises(TokenizerError, match=r"x\.model cannot be read as a SentencePiece model"):
        resolve(str(tmp_path / "x.model"))
