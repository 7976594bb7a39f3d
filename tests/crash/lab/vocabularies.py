"""Small tokenizers of every kind that a user may hand in, made on the spot."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import sentencepiece

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenmill.tokenizers.spec import resolve

CORPUS = [f"The quick brown fox no. {i} jumps über the lazy dog, isn't it? {i * 37} déjà vu  ok" for i in range(200)]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>", "[MASK]")


def byte_level(path: Path) -> Path:
    """A byte-pair tokenizer.json with special tokens, and with one that was added and is not special."""
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(CORPUS, trainer)
    found.add_tokens([AddedToken("<tool>", normalized=False)])
    found.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json"


def unigram(path: Path) -> Path:
    """A tokenizer.json that gigatoken does not know."""
    found = tokenizers.Tokenizer(models.Unigram())
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "</s>", "<pad>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    found.train_from_iterator(CORPUS, trainer)
    found.save(str(path / "unigram.json"))
    return path / "unigram.json"


def ranks(path: Path, count: int = 600) -> Path:
    """The first ranks of gpt2: all bytes, and the commonest pairs."""
    lines = resolve("gpt2").content.splitlines(keepends=True)[:count]
    assert base64.b64decode(lines[0].split()[0])
    (path / "ranks.tiktoken").write_bytes(b"".join(lines))
    return path / "ranks.tiktoken"


def sentence_pieces(path: Path, kind: str) -> Path:
    """A .model of the kind `bpe` or `unigram`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type=kind,
        vocab_size=330 if kind == "bpe" else 100,
        byte_fallback=kind == "bpe",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (path / f"{kind}.model").write_bytes(model.getvalue())
    return path / f"{kind}.model"
