"""Every tokenizer path against the library that defines it: hard Unicode, many languages, and whole builds.

    a path (gpt2, ranks of a scheme, tokenizer.json, trained models, byte, char)  ->  the engine that a build chooses
    its own library on the same file, opened here                                 ->  the same ids, text by text

DIFFER_CORPUS may name a text file whose lines are compared as well.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import re
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tiktoken
from tiktoken_ext import openai_public

import tokenizers as hf
import tokenmill
from differ.seeding import Bug, all_of, replaced
from lab_runner import Row
from tokenizers import models, normalizers, pre_tokenizers, trainers
from tokenmill.errors import TokenizerError
from tokenmill.sources.base import text_array
from tokenmill.tokenizers import engine as tokenizers_engine
from tokenmill.tokenizers import parity
from tokenmill.tokenizers import sentencepiece as tokenizers_sentencepiece
from tokenmill.tokenizers.base import Engine
from tokenmill.tokenizers.files import format_ranks, parse_ranks
from tokenmill.tokenizers.hard_texts import HARD_TEXTS
from tokenmill.tokenizers.spec import TokenizerSpec, char_spec, resolve
from tokenmill.tokenizers.unicode_versions import Characters

Reference = Callable[[str], list[int]]
SENTENCES = (
    "The quick brown fox jumps over the lazy dog, isn't it? 1,234.5",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Voix ambiguë d'un cœur qui préfère les jattes de kiwis.",
    "Съешь ещё этих мягких французских булок, да выпей чаю.",
    "Tiếng Việt có thanh điệu: ma, má, mà, mả, mã, mạ.",
    "다람쥐 헌 쳇바퀴에 타고파. 각 나라의 말",
    "いろはにほへと ちりぬるを。ガギグゲゴ パピプ",
    "天地玄黃,宇宙洪荒。日月盈昃,辰宿列張。",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ΐ ΰ ᾧ",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "עטלף אבק נס דרך מזגן שהתפוצץ",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "def f(x):\n    if x:\n\t\treturn  x\n",
)
SETTINGS: dict[str, dict[str, Any]] = {
    "bpe default": {"model_type": "bpe", "byte_fallback": True},
    "bpe identity": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "bpe nfkc": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nfkc"},
    "bpe user-defined": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["<tool>", "of"]},
    "bpe like Llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
    },
    "unigram default": {},
    "unigram identity": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "unigram nfkc": {"normalization_rule_name": "nfkc", "remove_extra_whitespaces": False},
    "unigram across words": {"split_by_whitespace": False},
    "unigram suffix": {"treat_whitespace_as_suffix": True},
    "unigram bytes": {"byte_fallback": True},
    "unigram like T5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}
_ODD = (
    *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x85", "\x0b", "\u200b", "\u200d", "\ufeff", "▁"),
    *(
        "a",
        "B",
        "'s",
        "'LL",
        "1",
        "12",
        "!",
        "/",
        "é",
        "e\u0301",
        "漢",
        "😀",
        "½",
        "\u0323",
        "\u0378",
        "\ue000",
        "\x00",
    ),
    *("<tool>", "zeta", "</s>", "<|endoftext|>", "ﾊﾟ", "한", "\U000e0001"),
    # Characters of newer versions of Unicode: letters, marks and symbols.
    *("\u0c5c", "\ua7ce", "\U000323b0", "\U00010940", "\u0c3c", "\u1abf", "\u08d3", "\u20c1", "\U0001fac8"),
)


def documents(count: int, seed: int) -> list[str]:
    """The hard texts, sentences in both normal forms, then as many drawn texts as asked for."""
    chance = random.Random(seed)
    forms = [unicodedata.normalize(form, text) for text in SENTENCES for form in ("NFC", "NFD", "NFKC")]
    found = [*HARD_TEXTS, *forms, *(f"\n  {text} \n" for text in forms)]
    if corpus := os.environ.get("DIFFER_CORPUS"):
        found += Path(corpus).read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)[:count]
    for number in range(count):
        if number % 2:
            found.append("".join(chance.choices(_ODD, k=chance.randint(1, 12))))
        else:
            blocks = chance.choices(((0, 0x2FF), (0x300, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)), k=12)
            found.append("".join(chr(chance.randint(*block)) for block in blocks[: chance.randint(1, 12)]))
    return found


def compare(name: str, encode: Engine, reference: Reference, texts: Sequence[str]) -> Row:
    """The ids of all texts in one batch, against those of the reference one by one."""
    found = encode.encode(text_array(texts))
    rows = np.split(found.ids, np.cumsum(found.lengths)[:-1])
    wrong = tuple(
        f"{text!r}: {ours.tolist()[:12]} against {theirs[:12]}"
        for text, ours, theirs in zip(texts, rows, map(reference, texts), strict=True)
        if ours.tolist() != theirs
    )
    return Row(fault=name, tried=len(texts), wrong=wrong)


@functools.cache
def train(setting: str) -> bytes:
    """A small SentencePiece model of these settings."""
    model = io.BytesIO()
    lines = [line for text in SENTENCES for line in text.splitlines() if line.strip()]
    options = {"vocab_size": 600, "character_coverage": 0.98, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 20), model_writer=model, **options, **SETTINGS[setting]
    )
    return model.getvalue()


def on_file(name: str, content: bytes, suffix: str = "") -> tuple[TokenizerSpec, Engine]:
    """The tokenizer of a file, and the engine that a build chooses for it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, name).write_bytes(content)
        spec, engine, _ = parity.choose_engine(resolve(f"{folder}/{name}{suffix}"))
    return spec, engine


def model_of(setting: str, count: int) -> Row:
    _, engine = on_file("x.model", train(setting))
    own = sentencepiece.SentencePieceProcessor(model_proto=train(setting))
    return compare(f"sentencepiece, {setting}", engine, lambda text: list(own.encode(text)), documents(count, 1))


def built(setting: str, count: int) -> Row:
    """A whole build with a model, document by document."""
    texts = [text for text in documents(count, 2) if text]
    own = sentencepiece.SentencePieceProcessor(model_proto=train(setting))
    expected = [ids for text in texts if (ids := list(own.encode(text)))]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "x.model").write_bytes(train(setting))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        Path(folder, "a.jsonl").write_text(lines, encoding="utf-8")
        tokenmill.prepare(f"{folder}/a.jsonl", f"{folder}/out", tokenizer=f"{folder}/x.model", eot="none", workers=1)
        train_split = tokenmill.open(f"{folder}/out")["train"]
        found = [train_split.document(number).tolist() for number in range(train_split.num_documents)]
    pairs = zip(found, expected, strict=False)
    wrong = [f"document {number}: {a[:12]} against {b[:12]}" for number, (a, b) in enumerate(pairs) if a != b]
    if len(found) != len(expected):
        wrong.append(f"{len(found)} documents, not {len(expected)}")
    return Row(fault=f"build with a model, {setting}", tried=len(expected), wrong=tuple(wrong))


def published(scheme: str) -> str:
    """The pattern of a scheme, from where it is defined if that is here."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})())
        patterns = {"gpt2": openai_public.r50k_pat_str, "gpt4": openai_public.cl100k_base()["pat_str"]}
        patterns["o200k"] = openai_public.o200k_base()["pat_str"]
    return patterns.get(scheme) or parity.PATTERNS[scheme]


@functools.cache
def crossing() -> bytes:
    """Ranks whose tokens reach from word to word, so that any other cut shows in the ids."""
    found = hf.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=4000, initial_alphabet=alphabet, min_frequency=2, max_token_length=12, show_progress=False
    )
    found.train_from_iterator(documents(4000, 8), trainer)
    tokens = sorted(found.get_vocab(), key=lambda token: (len(token) > 1, found.token_to_id(token)))
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(byte): byte for byte in shown}
    byte_of |= {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in shown)}
    return format_ranks({bytes(byte_of[char] for char in token): rank for rank, token in enumerate(tokens)})


def ranks_of(scheme: str, count: int) -> Row:
    ranks = crossing()
    _, engine = on_file("x.tiktoken", ranks, f":{scheme}")
    own = tiktoken.Encoding(
        "x", pat_str=published(scheme), mergeable_ranks=parse_ranks(ranks, name="x"), special_tokens={}
    )
    return compare(f"ranks, {scheme}", engine, own.encode_ordinary, documents(count, 3))


def llama3_by_gigatoken() -> Row:
    """That gigatoken itself has the scheme: nothing else would tell but the time that a build takes."""
    spec, _ = on_file("x.tiktoken", crossing(), ":llama3")
    return Row(fault="llama3 by gigatoken", tried=1, wrong=() if spec.engine == "gigatoken" else (spec.engine,))


def gpt2(count: int) -> Row:
    own = tiktoken.Encoding(
        "x",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=parse_ranks(resolve("gpt2").content, name="x"),
        special_tokens={},
    )
    return compare(
        "gpt2, built in", tokenizers_engine.open_engine(resolve("gpt2")), own.encode_ordinary, documents(count, 4)
    )


def plain(count: int) -> Row:
    """Bytes and characters against Python."""
    texts = documents(count, 5)
    alphabet = sorted(set("".join(texts)))
    numbers = {char: number for number, char in enumerate(alphabet)}
    rows = [
        compare("byte", tokenizers_engine.open_engine(resolve("byte")), lambda text: list(text.encode()), texts),
        compare(
            "char",
            tokenizers_engine.open_engine(char_spec("".join(texts))),
            lambda text: [numbers[c] for c in text],
            texts,
        ),
    ]
    return Row(
        fault="byte, char", tried=sum(row.tried for row in rows), wrong=tuple(w for row in rows for w in row.wrong)
    )


@functools.cache
def tokenizer_json(kind: str) -> str:
    """A small tokenizer.json: byte-level, with NFC, with flags of an added token, with a cut of its own, and others."""
    lines = list(SENTENCES) * 5
    if kind == "word pieces":
        found = hf.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        found.normalizer = normalizers.BertNormalizer(lowercase=True)
        found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(
            vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
        )
    elif kind == "unigram":
        found = hf.Tokenizer(models.Unigram())
        found.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        )
    else:
        found = hf.Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(lines, trainer)
    if "beside a cut" in kind:
        cuts = [pre_tokenizers.Split("qu", "isolated"), pre_tokenizers.Split(hf.Regex(published("llama3")), "isolated")]
        found.pre_tokenizer = pre_tokenizers.Sequence(
            [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    if kind.startswith("byte-level"):
        if "NFC" in kind:
            found.normalizer = normalizers.NFC()
        found.add_special_tokens(["<|endoftext|>"])
        flag = kind.partition(" with ")[2]
        flags = {"normalized": False} | ({flag: True} if flag else {})
        found.add_tokens([hf.AddedToken("zeta", **flags), hf.AddedToken("<tool>", normalized=False)])
        if "overlap" in kind:
            found.add_special_tokens(["<a>"])
            found.add_tokens([hf.AddedToken("<a", normalized=False)])
    return str(found.to_str())


FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
JSONS = (
    *("byte-level", "byte-level NFC", "byte-level overlaps", "byte-level beside a cut", "word pieces", "unigram"),
    *(f"byte-level NFC with {flag}" for flag in FLAGS),
)


def json_of(kind: str, count: int) -> Row:
    """Names of special tokens have experiments of their own in the crash lab: word pieces look them up as text."""
    own = hf.Tokenizer.from_str(tokenizer_json(kind))
    own.encode_special_tokens = True
    names = re.compile(r"</s>|<unk>|\[SEP\]|\[CLS\]")
    texts = [names.sub("", text) for text in documents(count, 6)]
    texts += ["zetas azeta zeta", " zeta ", "zeta\u0301", "a<tool>b", "<a> <a", "<a"]
    _, engine = on_file("tokenizer.json", tokenizer_json(kind).encode())
    return compare(
        f"tokenizer.json, {kind}", engine, lambda text: list(own.encode(text, add_special_tokens=False).ids), texts
    )


def panics() -> Row:
    """A panic of native code has to come as a typed error."""
    panic = type("PanicException", (BaseException,), {})
    engine = tokenizers_engine.open_engine(replace(resolve("gpt2"), name="x"))

    def fail(*_: Any) -> None:
        raise panic("index out of bounds")

    with replaced(tokenizers_engine, "encode_ragged", fail)():
        try:
            engine.encode(text_array(["a"]))
        except TokenizerError:
            return Row(fault="panics", tried=1)
        except BaseException as error:
            return Row(fault="panics", tried=1, wrong=(f"{type(error).__name__} came through",))
    return Row(fault="panics", tried=1, wrong=("no error at all",))


COUNT = 4000
EXPERIMENTS: list[tuple[str, Callable[[], Row]]] = [
    ("tokenizer gpt2", functools.partial(gpt2, COUNT)),
    ("tokenizer byte and char", functools.partial(plain, COUNT)),
    *((f"tokenizer ranks {scheme}", functools.partial(ranks_of, scheme, COUNT)) for scheme in parity.PATTERNS),
    *((f"tokenizer json {kind}", functools.partial(json_of, kind, COUNT)) for kind in JSONS),
    *((f"tokenizer model {setting}", functools.partial(model_of, setting, COUNT)) for setting in SETTINGS),
    *((f"tokenizer build {setting}", functools.partial(built, setting, 500)) for setting in SETTINGS),
]


class _Converted:
    """The engine of before: a model as a tokenizer.json, encoded by gigatoken."""

    def __new__(cls, content: bytes, *, name: str) -> Any:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        converted = sentencepiece_to_tokenizer_json(content).encode()
        spec = replace(resolve("gpt2"), name=name, kind="hf", content=converted, eot_id=2)
        return tokenizers_engine.open_engine(spec)


def _forgetful(spec: TokenizerSpec, *, keep: bool = False) -> str:
    """The tokenizer.json without its special tokens, so that `tokenizers` numbers the others anew."""
    parsed = json.loads(spec.content)
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if not token["special"]]
    return json.dumps(parsed)


BUGS: list[Bug] = [
    Bug(
        name="a SentencePiece model is converted",
        plant=replaced(tokenizers_sentencepiece, "SentencePieceEngine", _Converted),
        trial=functools.partial(model_of, "bpe identity", 0),
        says="[] against [",
    ),
    Bug(
        name="cuts beside a pattern are passed over",
        plant=replaced(parity, "unproven", lambda spec: ""),
        trial=functools.partial(json_of, "byte-level beside a cut", 0),
        says=" against ",
    ),
    Bug(
        name="the parity check sees no hard texts",
        plant=all_of(
            replaced(tokenizers_engine, "_SAME_SCHEME", {"llama3": "gpt4", "tekken": "nemotron"}),
            replaced(parity, "HARD_TEXTS", ("a",)),
        ),
        trial=functools.partial(ranks_of, "llama3", 0),
        says="against [64, 198, ",
    ),
    Bug(
        name="the parity check sees no added tokens",
        plant=replaced(parity, "texts_around", lambda tokens: ()),
        trial=functools.partial(json_of, "byte-level overlaps", 0),
        says=" against ",
    ),
    Bug(
        name="letters of newer Unicode are gigatoken's",
        plant=replaced(tokenizers_engine, "classed_differently", lambda spec: Characters(())),
        trial=functools.partial(ranks_of, "gpt2", 400),
        says=" against ",
    ),
    Bug(
        name="llama3 ends texts as gpt4 does",
        plant=replaced(tokenizers_engine, "_SAME_SCHEME", {"llama3": "gpt4"}),
        trial=llama3_by_gigatoken,
        says="tiktoken",
    ),
    Bug(
        name="added tokens are numbered anew",
        plant=replaced(tokenizers_engine, "without_specials", _forgetful),
        trial=functools.partial(json_of, "byte-level NFC with lstrip", 0),
        says="' zeta ': [500, 220] against [501, 220]",
    ),
    Bug(
        name="gpt4 is checked by another pattern than tiktoken's",
        plant=replaced(parity, "PATTERNS", {**parity.PATTERNS, "gpt4": parity.PATTERNS["llama3"]}),
        trial=functools.partial(ranks_of, "gpt4", 0),
        says="against [64, ",
    ),
    Bug(
        name="a panic reaches the user",
        plant=replaced(tokenizers_engine, "native_errors", lambda *_: contextlib.nullcontext()),
        trial=panics,
        says="PanicException came through",
    ),
]
