"""Special-token strings at random places of texts, through whole builds: they must stay text.

Each document ends with the one end-of-text id, no other id of it is special, and what is before
decodes to the exact text.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import tokenmill
from lab.vocabularies import SPECIALS, byte_level
from lab_runner import Row
from tokenmill.storage.local import Folder
from tokenmill.tokenizers.engine import open_engine, specials
from tokenmill.tokenizers.spec import from_dataset

STRINGS = (*SPECIALS, "<|endofprompt|>", "<|fim_prefix|>", "<unk>", "<|endoftext", "|>", "<|", "<0x0A>", "▁")
_WORDS = ("text", "naïve", "слово", "数千", "🙂", "a\tb", "line\n", "  ", "don't", "12345", "<b>")
TOKENIZERS: dict[str, Callable[[Path], str]] = {
    "gpt2": lambda path: "gpt2",
    "tokenizer.json": lambda path: str(byte_level(path)),
    "byte": lambda path: "byte",
}


def special_strings(places: int, *, seed: int) -> Row:
    """So many strings in all, shared out over the tokenizers."""
    wrong: list[str] = []
    tried = 0
    chance = random.Random(seed)
    for name, make in TOKENIZERS.items():
        texts = []
        while (planted := sum(count for _, count in texts)) < places / len(TOKENIZERS):
            texts.append(_text(chance))
        tried += planted
        with tempfile.TemporaryDirectory() as folder:
            wrong += [
                f"{name}, seed {seed}: {what}" for what in _check(Path(folder), make, [text for text, _ in texts])
            ]
    return Row(fault="special-token strings in texts", tried=tried, wrong=tuple(wrong))


def _text(chance: random.Random) -> tuple[str, int]:
    """A text, and how many strings were planted in it; some begin or end it, some touch one another."""
    count = chance.randint(1, 12)
    parts = chance.choices(_WORDS, k=chance.randint(0, 20)) + chance.choices(STRINGS, k=count)
    chance.shuffle(parts)
    return "".join(part + chance.choice(("", "", " ")) for part in parts), count


def _check(path: Path, make: Callable[[Path], str], texts: list[str]) -> list[str]:
    (path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    result = tokenmill.prepare(str(path / "a.jsonl"), path / "out", tokenizer=make(path), unit_bytes=20_000, workers=1)
    manifest = result.manifest
    if manifest.documents_read != manifest.documents or manifest.documents != len(texts):
        return [f"{len(texts)} texts, {manifest.documents_read} read, {manifest.documents} kept"]
    file = manifest.tokenizer["file"]
    spec = from_dataset(manifest.tokenizer, Folder(str(path / "out")).read(file) if file else None)
    engine, forbidden = open_engine(spec), {*specials(spec).values(), spec.eot_id}
    wrong = []
    for text, ids in zip(texts, tokenmill.open(path / "out")["train"], strict=True):
        if ids[-1] != spec.eot_id or forbidden & set(ids[:-1].tolist()):
            wrong.append(f"{text!r} gives special ids: {ids.tolist()}")
        elif engine.decode(ids[:-1]) != text:
            wrong.append(f"{text!r} comes back as {engine.decode(ids[:-1])!r}")
    return wrong


EXPERIMENTS = [("special strings", lambda: special_strings(30_000, seed=1))]
