"""stream: batches straight from text, the same that a loader gives on the prepared dataset.

    sources -> plan -> [ unit -> documents -> tokens ] ... -> samples -> this rank's batches
                          units/encode.py: what prepare writes

Nothing is written. The samples have one global order and a step takes the next `world_size *
batch_size` of them, as with the loader. How many tokens a unit has, only tokenising it tells: so
every rank reads and encodes all of the text, and keeps its own samples.

An epoch straight from text: the tokens of one split, read unit by unit and held while samples need them.

    units      0 |   1   | 2 |    3     | 4
    held                    [.......]          from the next sample on
    mark                  2                    the unit in which that sample begins

What was counted up to a unit is its mark. Reading may begin there again without what lies before.

A stretch of a split in memory. Its tokens and documents keep the numbers that they have in the whole.

split     ........[ 7 | 8    | 9 ][ 10 | 11 ].......
                  held            a part that came
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill import arguments, records
from tokenmill.build.plan import Plan, make_task
from tokenmill.build.preflight import check_parity_of_plan, make_request
from tokenmill.build.resolve import ResolvedBuild, make_config, resolve_build
from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.dataset.windows import check_seq_len, check_tokens
from tokenmill.errors import DatasetError, RecipeError, StateError
from tokenmill.executors.in_process import InProcessProber
from tokenmill.loader.batches import Batch, BatchSpec, WindowLayout
from tokenmill.loader.loader import STATE_VERSION, check_content, check_share, check_state, run_ahead
from tokenmill.loader.mixture import merge
from tokenmill.permutation import make_key, permute
from tokenmill.recipe import Sources, load_filter, make_recipe
from tokenmill.tokenizers.base import Engine
from tokenmill.tokenizers.engine import EngineHolder, open_engine
from tokenmill.units.encode import SplitTokens, encode_batch, num_eot, read_batches, tokens_of_split
from tokenmill.units.task import BuildConfig

_HINT = "stream the same sources with the same tokenizer, options, seq_len and shuffle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where to begin reading: an epoch, the samples of all epochs before it, and a unit in it."""

    epoch: int
    samples_before: int
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The beginning of a unit: tokens and documents of the split before it, and tokens of all splits."""

    unit: int
    tokens: int
    documents: int
    all_tokens: int


START = Mark(unit=0, tokens=0, documents=0, all_tokens=0)


START_CURSOR = Cursor(epoch=0, samples_before=0, mark=START)


class TextStream:
    """Batches of `batch_size` samples of `seq_len` tokens straight from text, for one rank of `world_size`.

    for batch in tokenmill.stream("corpus/*.parquet", "gpt2", seq_len=1024, batch_size=64):
        batch["input_ids"], batch["labels"]

    They are those of `DataLoader(order="sequential")` on the dataset that `prepare` makes of the same
    sources, and `epochs`, `drop_last`, `fields`, `mask_borders`, `dtype` and `prefetch` mean the same.
    `shuffle` shuffles samples among their neighbours: each run of so many is held in memory, and given
    out in a seeded order.

    `split` is the split to read. `held_out` says what share of the documents other splits get, like
    {"val": 0.01}. The rest are fields of a recipe, as with `prepare`: `text_column`, `template`,
    `documents`, `eot`, `min_chars`, `filter`, `seed`, ... Bad documents are dropped; `dropped` counts by
    reason what was dropped of the text that this process has read, and `on_bad="fail"` stops there.
    """

    def __init__(
        self,
        sources: Sources,
        tokenizer: str,
        seq_len: int,
        batch_size: int,
        *,
        split: str = "train",
        held_out: str | Mapping[str, float] | None = None,
        shuffle: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        drop_last: bool = True,
        fields: tuple[str, ...] = (),
        mask_borders: bool = False,
        dtype: npt.DTypeLike | None = np.int64,
        prefetch: int = 2,
        **recipe: Any,
    ) -> None:
        share = check_share(batch_size=batch_size, rank=rank, world_size=world_size, prefetch=prefetch, epochs=epochs)
        self.batch_size, self.rank, self.world_size, self.prefetch, self.epochs = share
        self.seq_len = seq_len = check_seq_len(seq_len)
        self.drop_last = arguments.flag("drop_last", drop_last)
        form = BatchSpec(fields=fields, mask_borders=mask_borders, dtype=dtype)
        hint = "give the number of samples to shuffle at a time, or None"
        shuffle = arguments.whole_or_none("shuffle", shuffle, least=2, hint=hint)
        arguments.text("tokenizer", tokenizer, hint="name a tokenizer, like gpt2")
        setup = resolve_build(make_recipe({"sources": sources, "tokenizer": tokenizer, "split": held_out, **recipe}))
        names = setup.recipe.splits
        if split not in names:
            raise RecipeError(
                f"there is no split {split!r}, only {', '.join(names)}", hint='make one with held_out={"val": 0.01}'
            )
        if "part" in fields:
            raise RecipeError("field 'part' of a single stream", hint="only a Mixture has parts")
        self._layout = WindowLayout(form, numpy_dtype(setup.dtype))
        self._with_index = "sample_index" in fields
        self._follow(setup, names.index(split))
        work = self._texts.work
        check_parity_of_plan(make_request(setup.plan), work, self._spec, InProcessProber(work, open_engine(self._spec)))
        # That of a sequential loader on the prepared dataset, so that the states are the same.
        self._identity: dict[str, Any] = {"fingerprint": setup.plan.fingerprint, "split": split, "packing": "concat"}
        self._identity |= {"seq_len": seq_len, "order": "sequential", "seed": 0}
        if shuffle is not None:
            self._identity |= {"order": "shuffled", "buffer": shuffle, "seed": setup.recipe.seed}
        # Every rank must see the same: those of files that were copied need the times of the originals.
        self._sources = records.digest([(s.name, s.bytes, s.etag or s.modified) for s in setup.plan.sources])
        self.samples_seen = 0
        self.dropped: Counter[str] = Counter()
        self._shuffle = shuffle
        self._cursor = START_CURSOR

    def _follow(self, setup: ResolvedBuild, split: int) -> None:
        self._spec, self._formerly = setup.spec, setup.formerly
        self._texts = Texts(plan=setup.plan, work=make_config(setup, scratch=None), split=split)

    @property
    def epoch(self) -> int:
        """The epoch in which the stream reads."""
        return self._cursor.epoch

    def __iter__(self) -> Iterator[Batch]:
        """Batches from where the stream stands; a second iterator goes on where the first was left."""
        for seen, cursor, batch in run_ahead(self._batches(), self.prefetch):
            self.samples_seen, self._cursor = seen, cursor
            yield batch

    def share(self, worker: int, workers: int) -> Iterator[Batch]:
        """The batches of every `workers`-th step; the stream itself stays where it is."""
        return (batch for _, _, batch in self._batches(worker, workers))

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain JSON. It is the same on all ranks.

        A loader of the prepared dataset goes on from it, and the stream from a loader's: then it
        reads from the beginning up to there, since only its own state has a cursor.
        """
        return {
            "version": STATE_VERSION,
            "stream": self._identity,
            "sources": self._sources,
            "samples_seen": self.samples_seen,
            "cursor": dataclasses.asdict(self._cursor),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another stream of the same samples stood, whatever its ranks and batch size were."""
        self._read_as_in(state)
        seen = check_state(state, self._identity, hint=_HINT)
        check_content(state, "sources", self._sources)
        cursor = START_CURSOR if state.get("cursor") is None else self._check_cursor(state["cursor"], seen)
        self.samples_seen, self._cursor = seen, cursor

    def _read_as_in(self, state: Any) -> None:
        """Read the units of 0.1, if a state is of it or of a dataset that it made, and they are others."""
        if self._formerly is None or not isinstance(state, dict) or state.get("stream") == self._identity:
            return
        before = self._formerly()
        identity = {**self._identity, "fingerprint": before.plan.fingerprint}
        if state.get("stream") == identity:
            self._identity = identity
            self._follow(before, self._texts.split)

    def _check_cursor(self, value: Any, seen: int) -> Cursor:
        try:
            cursor = records.convert(Cursor, value, where="cursor")
        except DatasetError as error:
            raise StateError(f"the state's {error.message}", hint="the state is damaged") from None
        mark = cursor.mark
        numbers = [cursor.epoch, cursor.samples_before, *dataclasses.astuple(mark)]
        begin = self._first_needed(seen - cursor.samples_before)
        if min(numbers) < 0 or mark.tokens > begin or mark.unit > len(self._texts.plan.units):
            raise StateError(f"the state's cursor {value} does not lead to sample {seen}", hint="the state is damaged")
        return cursor

    def _batches(self, worker: int = 0, workers: int = 1) -> Iterator[tuple[int, Cursor, Batch]]:
        """Batches from where the stream stands, each with samples seen and the cursor behind its step."""
        step = self.batch_size * self.world_size
        engine = EngineHolder(self._spec, open_engine(self._spec))
        seen, cursor = self.samples_seen, self._cursor
        epoch = Epoch(self._texts, cursor.mark, engine, self.dropped)
        for number in count():
            taken: list[tuple[TokenBuffer, Numbers]] = []
            missing = step
            while missing and (self.epochs is None or cursor.epoch < self.epochs):
                samples = self._take(epoch, cursor, seen - cursor.samples_before, missing)
                taken.append((epoch.held, samples))
                seen, missing = seen + len(samples), missing - len(samples)
                if missing:
                    cursor = self._next_epoch(epoch, cursor, seen)
                    epoch = Epoch(self._texts, cursor.mark, engine, self.dropped)
            if missing and (self.drop_last or missing == step):
                return
            token = self._first_needed(seen - cursor.samples_before)
            cursor = dataclasses.replace(cursor, mark=epoch.mark_at(token))
            if number % workers == worker and (batch := self._make_batch(taken)):
                yield seen, cursor, batch
            if missing:
                return

    def _take(self, epoch: Epoch, cursor: Cursor, first: int, num_samples: int) -> Numbers:
        """So many samples of an epoch from a place in it on, as far as there are any. The epoch holds them."""
        buffer = self._shuffle or 1
        stop = -(-(first + num_samples) // buffer) * buffer
        if not epoch.hold(self._first_needed(first), stop * self.seq_len + 1):
            stop = (epoch.held.end - 1) // self.seq_len
        places = np.arange(first, min(first + num_samples, stop))
        if self._shuffle is None:
            return places
        samples = np.empty_like(places)
        for run in np.unique(places // buffer).tolist():
            mine, begin = places // buffer == run, run * buffer
            key = make_key(self._identity, cursor.epoch, run)
            samples[mine] = begin + permute(places[mine] - begin, min(buffer, stop - begin), key)
        return samples

    def _first_needed(self, place: int) -> int:
        """The first token that a place in an epoch needs: of its sample, or of the run that it is shuffled with."""
        return place // (self._shuffle or 1) * (self._shuffle or 1) * self.seq_len

    def _next_epoch(self, epoch: Epoch, cursor: Cursor, seen: int) -> Cursor:
        """The beginning of the epoch that has the next sample; the one before was read to its end."""
        check_tokens(epoch.held.end, self.seq_len)
        num_samples = (epoch.held.end - 1) // self.seq_len
        if cursor.samples_before != cursor.epoch * num_samples:
            raise StateError(
                f"the state has {cursor.samples_before} samples before epoch {cursor.epoch}, "
                f"but an epoch has {num_samples}",
                hint="the state is damaged",
            )
        number = max(cursor.epoch + 1, seen // num_samples)
        return Cursor(epoch=number, samples_before=number * num_samples, mark=START)

    def _make_batch(self, taken: Sequence[tuple[TokenBuffer, Numbers]]) -> Batch | None:
        """This rank's samples of a step; None if it has none in the last one."""
        parts: list[tuple[Numbers, Batch]] = []
        first, begin = self.batch_size * self.rank, 0
        rows = 0
        for held, samples in taken:
            mine = samples[max(0, first - begin) : max(0, first + self.batch_size - begin)]
            begin += len(samples)
            if len(mine):
                parts.append((np.arange(rows, rows + len(mine)), self._window_batch(held, mine)))
                rows += len(mine)
        if not parts:
            return None
        return parts[0][1] if len(parts) == 1 else merge(parts, rows)

    def _window_batch(self, held: TokenBuffer, samples: Numbers) -> Batch:
        starts = samples * self.seq_len
        rows = held.gather(starts, self.seq_len + 1)
        batch = self._layout.batch(held, starts, rows, held.document_at(starts))
        if self._with_index:
            batch["sample_index"] = samples
        return batch


# The public name is a verb: it reads, and what it gives is the stream.
stream = TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What to read: a plan, and the number of one of its splits."""

    plan: Plan
    work: BuildConfig
    split: int


class Epoch:
    """One pass over the texts, from a mark on. It keeps no more than it is asked to hold."""

    def __init__(self, texts: Texts, mark: Mark, engine: Callable[[], Engine], dropped: Counter[str]) -> None:
        self.held = TokenBuffer(
            eot=texts.work.eot,
            eot_id=texts.work.eot_id,
            tokens=np.zeros(0, numpy_dtype(texts.work.dtype)),
            first_token=mark.tokens,
            starts=np.zeros(0, np.int64),
            first_document=mark.documents,
        )
        self._parts = read_parts(texts, mark, engine, dropped)
        self._marks = [mark]

    def hold(self, begin: int, end: int) -> bool:
        """Read until the tokens from `begin` up to `end` are held, and none before. False if there are not as many."""
        self.held = self.held.since(begin)
        have, came = self.held.end, []
        while have < end and (found := next(self._parts, None)):
            mark, part = found
            if mark != self._marks[-1]:
                self._marks.append(mark)
            came.append((part.tokens, part.lengths))
            have += len(part.tokens)
            if have <= begin:  # on the way to a far sample, nothing piles up
                self.held, came = self.held.extend(came).since(begin), []
        if came:
            self.held = self.held.extend(came).since(begin)
        while len(self._marks) > 1 and self._marks[1].tokens <= begin:
            del self._marks[0]
        return have >= end

    def mark_at(self, token: int) -> Mark:
        """The beginning of the unit in which a token lies that is held, or is the first beyond."""
        return next(mark for mark in reversed(self._marks) if mark.tokens <= token)


def read_parts(
    texts: Texts, mark: Mark, engine: Callable[[], Engine], dropped: Counter[str]
) -> Iterator[tuple[Mark, SplitTokens]]:
    """Tokens of the split from a mark on, each part with the mark of its unit. `dropped` counts what is not kept."""
    plan, work = texts.plan, texts.work
    keep = load_filter(work.filter) if work.filter else None
    budget = plan.identity["max_tokens"]
    for unit in plan.units[mark.unit :]:
        task = make_task(plan, unit.index)
        tokens, documents, all_tokens = mark.tokens, mark.documents, mark.all_tokens
        for batch in read_batches(work, task):
            room = None if budget is None else budget - all_tokens
            if room == 0:
                return
            found = encode_batch(batch, work, task, engine(), keep=keep, room=room)
            dropped.update(skip.reason for skip in found.kept.skips)
            all_tokens += len(found.encoded.ids) + num_eot(work) * len(found.encoded.lengths)
            part = tokens_of_split(found, texts.split, work)
            if part is not None:
                tokens, documents = tokens + len(part.tokens), documents + len(part.lengths)
                yield mark, part
        mark = Mark(unit=unit.index + 1, tokens=tokens, documents=documents, all_tokens=all_tokens)


Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBuffer:
    """Tokens from `first_token` on, and where their documents begin, from `first_document` on.

    The first document may begin before the first token that is held.
    """

    eot: str
    eot_id: int | None
    tokens: Tokens
    first_token: int
    starts: Numbers
    first_document: int

    @property
    def end(self) -> int:
        """The number of the first token that is not here yet."""
        return self.first_token + len(self.tokens)

    def document_at(self, tokens: Numbers) -> Numbers:
        """The documents in which these tokens lie."""
        return np.searchsorted(self.starts, tokens, side="right") - 1 + self.first_document

    def document_starts(self, documents: Numbers) -> Numbers:
        """The first tokens of these documents."""
        found: Numbers = self.starts[documents - self.first_document]
        return found

    def gather(self, starts: Numbers, width: int) -> Tokens:
        """A row of `width` tokens for each of these starts."""
        rows: Any = np.lib.stride_tricks.sliding_window_view(self.tokens, width)
        found: Tokens = rows[starts - self.first_token]
        return found

    def extend(self, parts: Sequence[tuple[Tokens, Numbers]]) -> TokenBuffer:
        """The same with more documents behind: their tokens end to end, and how many each has."""
        lengths = np.concatenate([np.zeros(0, np.int64), *(lengths for _, lengths in parts)])
        begins = self.end + np.cumsum(lengths) - lengths
        tokens = np.concatenate([self.tokens, *(tokens for tokens, _ in parts)])
        return replace(self, tokens=tokens, starts=np.concatenate((self.starts, begins)))

    def since(self, token: int) -> TokenBuffer:
        """The same without what lies before a token. It may be one that is not here yet: then nothing is left."""
        gone = min(max(0, token - self.first_token), len(self.tokens))
        if not gone:
            return self
        first_token = self.first_token + gone
        # The document that goes on at the first token stays.
        documents = len(self.starts)
        if gone < len(self.tokens):
            documents = int(np.searchsorted(self.starts, first_token, side="right")) - 1
        return replace(
            self,
            tokens=self.tokens[gone:],
            first_token=first_token,
            starts=self.starts[documents:],
            first_document=self.first_document + documents,
        )
