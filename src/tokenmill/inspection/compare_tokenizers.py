"""compare_tokenizers: bytes per token, tokens per word and speed of several tokenizers on a sample of a corpus.

    sources  ->  positions drawn by a seed  ->  texts  ->  ids of each tokenizer  ->  ratios, in all and by source

The engine of each tokenizer is the one that `prepare` would use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from tokenmill import arguments
from tokenmill.arguments import Sources, TextOptions
from tokenmill.build.preflight import make_request
from tokenmill.build.resolve import make_config, resolve_build
from tokenmill.errors import RecipeError
from tokenmill.recipe import make_recipe
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.parity import choose_engine, try_engine
from tokenmill.tokenizers.spec import TokenizerSpec, char_spec, resolve
from tokenmill.units.probe import probe

_POSITIONS = 128
_ENCODED_BYTES, _READ_BYTES = 4_000_000, 64_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRatio:
    """What a tokenizer makes of the sampled text of one source."""

    documents: int
    bytes: int
    words: int
    tokens: int

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / max(1, self.tokens)

    @property
    def tokens_per_word(self) -> float:
        return self.tokens / max(1, self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerResult:
    """What a tokenizer makes of the sample. `note` says why it is slow, if the usual engine cannot encode it."""

    name: str
    engine: str
    vocab_size: int
    total: SourceRatio
    sources: Mapping[str, SourceRatio]
    bytes_per_second: int
    note: str


def compare_tokenizers(
    sources: Sources, tokenizers: Sequence[str], *, text_column: str | None = None, seed: int = 0
) -> list[TokenizerResult]:
    """Encode one sample of the sources with each of these tokenizers. Words are runs of other than white space.

    The same seed draws the same documents, spread over all sources by their size. Ends of text are not counted.
    """
    names = list(dict.fromkeys(arguments.texts("tokenizers", tokenizers, hint='write it like ["gpt2", "byte"]')))
    if not names:
        raise RecipeError("no tokenizers", hint='name some, like ["gpt2", "byte"]')
    texts = _sample(sources, text_column, arguments.whole("seed", seed))
    if not texts:
        raise RecipeError("no document was found in the sources", hint="check the files and `text_column`")
    return [_measure(name, texts) for name in names]


def _sample(sources: Sources, text_column: str | None, seed: int) -> dict[str, list[str]]:
    """Some texts of each source that is met."""
    options: TextOptions = {} if text_column is None else {"text_column": text_column}
    build = resolve_build(make_recipe({"sources": sources, "tokenizer": "byte", **options}))
    config = make_config(build, scratch=None, only_look=True)
    request = make_request(
        build.plan, _POSITIONS, encode_bytes=_ENCODED_BYTES, read_bytes=_READ_BYTES, chance=Random(seed)
    )
    found: dict[str, list[str]] = {}
    for one in request.slices:
        texts = probe(replace(request, slices=(one,)), config).texts
        if texts:
            found.setdefault(one.task.sources[0].name, []).extend(texts)
    return found


def _measure(name: str, texts: Mapping[str, Sequence[str]]) -> TokenizerResult:
    everything = [text for some in texts.values() for text in some]
    spec, note = _resolve(name, everything)
    trial = try_engine(open_engine(spec), everything)
    lengths = np.array(trial.lengths, np.int64)
    ratios, at = {}, 0
    for source, some in texts.items():
        ratios[source] = _ratio(some, int(lengths[at : at + len(some)].sum()))
        at += len(some)
    total = _ratio(everything, int(lengths.sum()))
    return TokenizerResult(
        name=spec.name,
        engine=spec.engine_version,
        vocab_size=spec.vocab_size,
        total=total,
        sources=ratios,
        bytes_per_second=round(total.bytes / max(trial.seconds, 1e-9)),
        note=note,
    )


def _resolve(name: str, texts: Sequence[str]) -> tuple[TokenizerSpec, str]:
    spec = resolve(name)
    if spec.needs_texts:
        return char_spec("".join(sorted(set().union(*texts)))), "its vocabulary is made of this sample"
    spec, _, note = choose_engine(spec)
    return spec, note


def _ratio(texts: Sequence[str], tokens: int) -> SourceRatio:
    return SourceRatio(
        documents=len(texts),
        bytes=sum(len(text.encode()) for text in texts),
        words=sum(len(text.split()) for text in texts),
        tokens=tokens,
    )
