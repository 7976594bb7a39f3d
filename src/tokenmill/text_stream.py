"""stream: batches straight from text, equal to those that a loader gives on the prepared dataset.

    sources -> plan -> [ unit -> documents -> tokens ] ... -> samples -> this rank's batches
                          units/encode.py: as prepare does it

Nothing is written. The samples have one global order, and a step takes the next `world_size * batch_size` of them, as
with the loader. How many tokens a unit has is only known after tokenizing it, so every rank needs the tokens of all of
the text, and keeps its own samples. A rank makes these tokens itself, or with `workers` the ranks of a node share a
pool of processes that makes them (`executors/token_client.py`).

An epoch reads the tokens of one split unit by unit, and buffers them while samples need them:

    units      0 |   1   | 2 |    3     | 4
    buffer                  [.......]          from the next sample on
    mark                  2                    the unit in which that sample begins

A mark has the counts up to its unit, so reading can resume there without the text before it.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import sys
import uuid
import warnings
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any, Unpack, cast

import numpy as np
import numpy.typing as npt

from tokenmill import arguments, records
from tokenmill.arguments import Sources, TextOptions
from tokenmill.build.plan import Plan, make_task
from tokenmill.build.preflight import check_parity_of_plan, make_request
from tokenmill.build.resolve import ResolvedBuild, make_config, resolve_build
from tokenmill.dataset.bin_idx import Tokens, numpy_dtype
from tokenmill.dataset.windows import check_seq_len, check_tokens
from tokenmill.errors import DatasetError, RecipeError, StateError
from tokenmill.executors.in_process import InProcessProber
from tokenmill.executors.token_client import TokenClient
from tokenmill.loader.batches import Batch, BatchSpec, Labels, WindowLayout
from tokenmill.loader.loader import check_share, run_ahead
from tokenmill.loader.mixture import merge
from tokenmill.loader.state import STATE_VERSION, check_content, check_state
from tokenmill.permutation import make_key, permute
from tokenmill.recipe import make_recipe
from tokenmill.records import Int
from tokenmill.resources import num_cores, resolve_workers
from tokenmill.sizes import counted
from tokenmill.tokenizers.engine import EngineHolder, open_engine
from tokenmill.units.encode import TokenPiece, encode_unit
from tokenmill.units.task import BuildConfig, UnitTask

_HINT = "stream the same sources with the same tokenizer, options, seq_len and shuffle"
# Batches that a thread keeps ready, unless other processes tokenize.
_PREFETCH = 2

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The start of a unit: the tokens and documents of the split before it, and the tokens of all splits."""

    unit: Int
    tokens: Int
    documents: Int
    all_tokens: Int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where to resume reading: an epoch, the samples of all epochs before it, and the start of a unit in it."""

    epoch: Int
    samples_before: Int
    mark: Mark


START = Mark(unit=0, tokens=0, documents=0, all_tokens=0)
START_CURSOR = Cursor(epoch=0, samples_before=0, mark=START)


class TextStream:
    """Batches of `batch_size` samples of `seq_len` tokens straight from text, for one rank of `world_size`.

    for batch in tokenmill.stream("corpus/*.parquet", "gpt2", seq_len=1024, batch_size=64):
        batch["input_ids"], batch["labels"]

    The batches equal those of `DataLoader(order="sequential")` on the dataset that `prepare` makes of the same
    sources, and `epochs`, `drop_last`, `labels`, `fields`, `mask_boundaries` and `dtype` have the same meaning.
    `shuffle` shuffles among neighbours: that many samples are buffered, and given out in a seeded order.

    With `workers`, that many processes tokenize ahead. On Linux the ranks of a job that run on one node share them, so
    the text is tokenized once for all; give each rank the same number. By default, and with 0, this process tokenizes
    by itself: that needs no other process, and is enough for one rank. The batches are the same in any case.
    `prefetch` is the number of batches that a thread keeps ready, by default 2 without `workers` and 0 with them.

    `split` is the split to read. `held_out` gives other splits a share of the documents, like {"val": 0.01}. All
    other arguments are fields of a recipe, as with `prepare`: `text_column`, `template`, `documents`, `eot`,
    `min_chars`, `filter`, `seed`, ... Bad documents are dropped; `dropped` counts the dropped documents of the text
    that this process has read, by reason. `on_bad="fail"` stops at the first one.
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
        labels: Labels = "shifted",
        fields: tuple[str, ...] = (),
        mask_boundaries: bool = False,
        dtype: npt.DTypeLike | None = np.int64,
        prefetch: int | None = None,
        workers: int | None = None,
        **recipe: Unpack[TextOptions],
    ) -> None:
        self.seq_len = seq_len = check_seq_len(seq_len)
        self.drop_last = arguments.flag("drop_last", drop_last)
        hint = "give the number of processes that tokenize ahead, or 0 to tokenize in this process"
        workers = arguments.whole_or_none("workers", workers, hint=hint)
        self.workers = resolve_workers(workers) if workers else workers
        # Processes that tokenize are ahead of the trainer anyway. A thread beside them would only cost time.
        prefetch = (0 if self.workers else _PREFETCH) if prefetch is None else prefetch
        share = check_share(batch_size=batch_size, rank=rank, world_size=world_size, prefetch=prefetch, epochs=epochs)
        self.batch_size, self.rank, self.world_size, self.prefetch, self.epochs = share
        batch_spec = BatchSpec(labels=labels, fields=fields, mask_boundaries=mask_boundaries, dtype=dtype)
        hint = "give the number of samples to shuffle at a time, or None"
        shuffle = arguments.whole_or_none("shuffle", shuffle, least=2, hint=hint)
        arguments.text("tokenizer", tokenizer, hint="name a tokenizer, like gpt2")
        build = resolve_build(make_recipe({"sources": sources, "tokenizer": tokenizer, "split": held_out, **recipe}))
        names = build.recipe.splits
        if split not in names:
            raise RecipeError(
                f"there is no split {split!r}; there are {', '.join(names)}",
                hint='make one with held_out={"val": 0.01}',
            )
        if "component" in fields:
            raise RecipeError("field 'component' of a single stream", hint="only a Mixture has components")
        self._layout = WindowLayout(batch_spec, numpy_dtype(build.dtype))
        self._with_index, self._with_documents = "sample_index" in fields, "document_ids" in fields
        self._follow(build, names.index(split))
        config = self._texts.config
        prober = InProcessProber(config, open_engine(self._spec))
        check_parity_of_plan(make_request(build.plan), config, self._spec, prober)
        # Equal to the identity of a sequential loader on the prepared dataset, so that states are interchangeable.
        self._identity: dict[str, Any] = {"fingerprint": build.plan.fingerprint, "split": split, "packing": "concat"}
        self._identity |= {"seq_len": seq_len, "order": "sequential", "seed": 0}
        if shuffle is not None:
            self._identity |= {"order": "shuffled", "buffer": shuffle, "seed": build.recipe.seed}
        # Every rank must see the same sources: copies of files need the times of the originals.
        self._sources = records.digest([(s.name, s.bytes, s.etag or s.modified) for s in build.plan.sources])
        self.samples_seen = 0
        self.dropped: Counter[str] = Counter()
        self._shuffle = shuffle
        self._cursor = START_CURSOR
        # Whether the cursor leads to the epoch of the position. It does not if the state was a loader's.
        self._is_located = True
        # The end of the pass whose last samples were taken, until its iteration ends.
        self._open_end: int | None = None
        self._job = find_job(world_size)

    def __repr__(self) -> str:
        shape = f"seq_len={self.seq_len}, batch_size={self.batch_size}, rank={self.rank}, world_size={self.world_size}"
        return (
            f"TextStream({counted(len(self._texts.plan.sources), 'source')}, {self._spec.name!r}, "
            f"{self._identity['split']!r}, {shape}, {self.samples_seen:,} samples seen)"
        )

    def _follow(self, build: ResolvedBuild, split: int) -> None:
        self._spec, self._formerly = build.spec, build.formerly
        self._texts = Texts(plan=build.plan, config=make_config(build, scratch=None), split=split)

    @property
    def epoch(self) -> int:
        """The epoch that is being read."""
        return self._cursor.epoch

    @property
    def is_shuffled(self) -> bool:
        """Whether each epoch has an order of its own."""
        return self._shuffle is not None

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the current position to the end of the pass.

        A second iterator continues where the first one was left, or with the next pass if that one had ended.
        """
        begin, num_batches = self.samples_seen, 0
        with closing(self._open_encoder(self.workers)) as encoder:
            for seen, cursor, batch in run_ahead(self._batches(encoder), self.prefetch, stop=encoder.abort):
                self.move_to(seen, cursor, is_over=batch is None)
                if batch is not None:
                    num_batches += 1
                    yield batch
        if not num_batches:
            self._warn_of_empty_pass(self.samples_seen - begin)

    def share(
        self, worker: int, workers: int, position: tuple[int, Cursor] | None = None
    ) -> Iterator[tuple[int, Cursor, Batch | None]]:
        """The batches of every `workers`-th step, each with the position behind it. That of the stream does not change.

        At the end of the pass None, with the position of the next one. A share may begin at another `position`.

        Unless the stream has a number of `workers`, several processes that share it also share a pool.
        """
        shared = min(workers, num_cores()) if workers > 1 and self.workers is None else self.workers
        with closing(self._open_encoder(shared)) as encoder:
            yield from self._batches(encoder, worker, workers, position)

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, as plain JSON. It is the same on all ranks.

        A loader of the prepared dataset can continue from it, and the stream from the state of a loader. The stream
        then reads all text up to there, since only its own state has a cursor.
        """
        state = {
            "version": STATE_VERSION,
            "stream": self._identity,
            "sources": self._sources,
            "samples_seen": self.samples_seen,
            "cursor": dataclasses.asdict(self._cursor),
        }
        # The end of a pass is the start of the next one: an iteration that was interrupted there has to end first.
        return {**state, "at_pass_end": True} if self._open_end == self.samples_seen else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of another stream of the same samples, with any ranks and batch size."""
        self._read_as_in(state)
        seen = check_state(state, self._identity, hint=_HINT)
        check_content(state, "sources", self._sources)
        if state.get("skip"):
            raise StateError(
                "the state skips samples, and a stream from text skips none", hint="load it into a DataLoader"
            )
        has_cursor = state.get("cursor") is not None
        cursor = self.read_cursor(state["cursor"], seen) if has_cursor else START_CURSOR
        self.samples_seen, self._cursor, self._is_located = seen, cursor, has_cursor or not seen
        self._open_end = seen if seen and state.get("at_pass_end") else None

    def move_to(self, seen: int, cursor: Cursor, *, is_over: bool) -> None:
        """Continue behind a batch, or with the next pass if the one before is over."""
        self.samples_seen, self._cursor, self._is_located = seen, cursor, True
        self._open_end = seen if not is_over and self._is_end(seen, cursor) else None

    def _is_end(self, seen: int, cursor: Cursor) -> bool:
        """Whether this is the position behind the last step of a pass: only there, the cursor is in the next one."""
        return self.epochs is not None and 0 < seen == cursor.samples_before

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of pass number `epoch`, which counts from 0, unless the position is inside of it.

        So a resumed epoch is not restarted. Without `epochs`, passes are counted as if `epochs` were 1. How many
        samples an epoch has is only known behind the first one, and moving to another one needs it.
        """
        epoch = arguments.whole("epoch", epoch, hint="epochs count from 0")
        first, now = epoch * (self.epochs or 1), self._cursor.epoch
        if self._is_located and self._pass_end(now, self.samples_seen) == first + (self.epochs or 1):
            return
        if first and not (now and self._is_located):
            raise StateError(
                f"the position of epoch {epoch} is not known before the first epoch was read",
                hint="read the epochs one after the other, or load a state",
            )
        samples = first * self._cursor.samples_before // now if first else 0
        self.samples_seen, self._cursor = samples, Cursor(epoch=first, samples_before=samples, mark=START)
        self._is_located, self._open_end = True, None

    def _pass_end(self, epoch: int, seen: int) -> int:
        """The epoch with which the pass of a position ends."""
        epochs = self.epochs or 1
        return epoch if seen == self._open_end else (epoch // epochs + 1) * epochs

    def _warn_of_empty_pass(self, num_samples: int) -> None:
        step = self.batch_size * self.world_size
        if self.epochs is None or num_samples >= (step if self.drop_last else 1):
            return
        warnings.warn(
            f"this iteration has no batch: {num_samples:,} samples were left of its epochs, and a step of all ranks "
            f"takes {step:,}. The next iteration is the next pass over the text.",
            UserWarning,
            stacklevel=3,
        )

    def _read_as_in(self, state: Any) -> None:
        """Read the units of version 0.1 if they are others and the state is of that version or of its dataset."""
        if self._formerly is None or not isinstance(state, dict) or state.get("stream") == self._identity:
            return
        before = self._formerly()
        identity = {**self._identity, "fingerprint": before.plan.fingerprint}
        if state.get("stream") == identity:
            self._identity = identity
            self._follow(before, self._texts.split)

    def read_cursor(self, value: Any, seen: int) -> Cursor:
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

    def _open_encoder(self, workers: int | None) -> InThisProcess | TokenClient:
        """What turns units into tokens: this process, or a pool that the ranks of this node share."""
        texts, spec = self._texts, self._spec
        if not workers:
            return InThisProcess(texts, EngineHolder(spec, open_engine(spec)))
        configuration = {
            "path": sys.path,
            "work": dataclasses.asdict(texts.config),
            "tokenizer": spec.describe(),
            "content": base64.b64encode(spec.content).decode(),
            "split": texts.split,
        }
        name = records.digest([configuration, self._sources, self._job, os.getcwd()])
        return TokenClient(workers, configuration, name, self._upcoming)

    def _upcoming(self, now: int, position: int) -> UnitTask | None:
        """The unit at a position, which counts the units of all epochs; None behind the end of the current pass."""
        num_units = len(self._texts.plan.units)
        epoch, unit = divmod(position, num_units)
        if self.epochs is not None and epoch >= self._pass_end(now // num_units, -1):
            return None
        return make_task(self._texts.plan, unit)

    def _batches(
        self,
        encoder: InThisProcess | TokenClient,
        worker: int = 0,
        workers: int = 1,
        position: tuple[int, Cursor] | None = None,
    ) -> Iterator[tuple[int, Cursor, Batch | None]]:
        """Batches from the current position, each with the samples seen and the cursor after its step.

        At the end of the pass None, with the start of the next one.
        """
        step = self.batch_size * self.world_size
        seen, cursor, is_located = self.samples_seen, self._cursor, self._is_located
        end = self._pass_end(cursor.epoch, seen if is_located else -1)
        if position is not None:
            seen, cursor, is_located = *position, True
            end = cursor.epoch if self._is_end(seen, cursor) else self._pass_end(cursor.epoch, -1)
        epoch = self._open_epoch(cursor, encoder)
        for number in count():
            taken: list[tuple[TokenBuffer, Numbers]] = []
            missing = step
            while missing and (self.epochs is None or cursor.epoch < end):
                samples = self._take(epoch, cursor, seen - cursor.samples_before, missing)
                taken.append((epoch.buffer, samples))
                seen, missing = seen + len(samples), missing - len(samples)
                is_located = is_located or len(samples) > 0
                if missing:
                    cursor = self._next_epoch(epoch, cursor, seen)
                    if not is_located:
                        is_located, end = True, self._pass_end(cursor.epoch, seen)
                    epoch = self._open_epoch(cursor, encoder)
            if missing and (self.drop_last or missing == step):
                break
            if not missing and self._is_last(epoch, cursor, seen, end):
                cursor = self._next_epoch(epoch, cursor, seen)
                epoch = self._open_epoch(cursor, encoder)
            cursor = self._marked(cursor, epoch, seen)
            if number % workers == worker and (batch := self._make_batch(taken)):
                yield seen, cursor, batch
            if missing:
                break
        yield cursor.samples_before, cursor, None

    def _open_epoch(self, cursor: Cursor, encoder: InThisProcess | TokenClient) -> Epoch:
        return Epoch(self._texts, cursor, encoder, self.dropped, joins=self._shuffle is not None)

    def _marked(self, cursor: Cursor, epoch: Epoch, seen: int) -> Cursor:
        """The cursor, with the unit in which the next sample begins."""
        mark = epoch.mark_at(self._first_needed(seen - cursor.samples_before))
        return cursor if mark is cursor.mark else replace(cursor, mark=mark)

    def _is_last(self, epoch: Epoch, cursor: Cursor, seen: int, end: int) -> bool:
        """Whether a whole step ends exactly with its pass. The position behind it is then the start of the next one."""
        if self.epochs is None or cursor.epoch + 1 != end:
            return False
        place = seen - cursor.samples_before
        return epoch.is_over(self._first_needed(place), (place + 1) * self.seq_len + 1)

    def _take(self, epoch: Epoch, cursor: Cursor, first: int, num_samples: int) -> Numbers:
        """Up to `num_samples` samples of an epoch, from position `first` in it on. The epoch buffers their tokens."""
        run_samples = self._shuffle or 1
        stop = -(-(first + num_samples) // run_samples) * run_samples
        if not epoch.fill(self._first_needed(first), stop * self.seq_len + 1):
            stop = (epoch.buffer.end - 1) // self.seq_len
        positions = np.arange(first, min(first + num_samples, stop))
        if self._shuffle is None:
            return positions
        samples = np.empty_like(positions)
        for run in np.unique(positions // run_samples).tolist():
            mine, begin = positions // run_samples == run, run * run_samples
            key = make_key(self._identity, cursor.epoch, run)
            samples[mine] = begin + permute(positions[mine] - begin, min(run_samples, stop - begin), key)
        return samples

    def _first_needed(self, position: int) -> int:
        """The first token that a position in an epoch needs: of its sample, or of the run that is shuffled with it."""
        run_samples = self._shuffle or 1
        return position // run_samples * run_samples * self.seq_len

    def _next_epoch(self, epoch: Epoch, cursor: Cursor, seen: int) -> Cursor:
        """The start of the epoch that has the next sample. The previous one was read to its end."""
        check_tokens(epoch.buffer.end, self.seq_len)
        num_samples = (epoch.buffer.end - 1) // self.seq_len
        if cursor.samples_before != cursor.epoch * num_samples:
            raise StateError(
                f"the state has {cursor.samples_before} samples before epoch {cursor.epoch}, "
                f"but an epoch has {num_samples}",
                hint="the state is damaged",
            )
        number = max(cursor.epoch + 1, seen // num_samples)
        return Cursor(epoch=number, samples_before=number * num_samples, mark=START)

    def _make_batch(self, taken: Sequence[tuple[TokenBuffer, Numbers]]) -> Batch | None:
        """The batch of this rank's samples of a step, or None if it has none in the last step."""
        found: list[tuple[Numbers, Batch]] = []
        first, begin = self.batch_size * self.rank, 0
        rows = 0
        for buffer, samples in taken:
            mine = samples[max(0, first - begin) : max(0, first + self.batch_size - begin)]
            begin += len(samples)
            if len(mine):
                found.append((np.arange(rows, rows + len(mine)), self._window_batch(buffer, mine)))
                rows += len(mine)
        if not found:
            return None
        return found[0][1] if len(found) == 1 else merge(found, rows)

    def _window_batch(self, buffer: TokenBuffer, samples: Numbers) -> Batch:
        starts = samples * self.seq_len
        if self._shuffle is None:
            rows = buffer.windows(starts.item(0), len(starts), self.seq_len)
        else:
            rows = buffer.gather(starts, self.seq_len + 1)
        # The rows may be a view of memory that other ranks read too.
        rows = rows.copy() if rows.dtype == self._layout.dtype else rows
        batch = self._layout.batch(buffer, starts, rows, buffer.document_at(starts) if self._with_documents else starts)
        if self._with_index:
            batch["sample_index"] = samples
        return batch


# The public name is the function-like `tokenmill.stream(...)`.
stream = TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The text to read: a plan, and the number of one of its splits."""

    plan: Plan
    config: BuildConfig
    split: int


@dataclass(frozen=True, slots=True)
class InThisProcess:
    """Encodes units in this process, when their tokens are needed."""

    texts: Texts
    engine: EngineHolder

    def read(self, _: int, task: UnitTask, first: int) -> Iterator[TokenPiece]:
        return encode_unit(self.texts.config, task, self.engine, self.texts.split, first=first)

    def abort(self) -> None:
        """There is nothing to wait for but the computation itself."""

    close = abort


def find_job(world_size: int) -> str:
    """What the processes have in common that may share a pool: the ranks of a job, or the processes of one rank."""
    if world_size == 1:
        return uuid.uuid4().hex
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    found = [os.environ.get(name) for name in names]
    return " ".join(map(str, found if found[1] else [*found, os.getppid()]))


class Epoch:
    """One pass over the text, from a cursor on. It buffers only what `fill` asks for, in one array if it `joins`."""

    def __init__(
        self,
        texts: Texts,
        cursor: Cursor,
        encoder: InThisProcess | TokenClient,
        dropped: Counter[str],
        *,
        joins: bool = False,
    ) -> None:
        mark, self._joins = cursor.mark, joins
        self.buffer = TokenBuffer(
            eot=texts.config.eot,
            eot_id=texts.config.eot_id,
            parts=(),
            begins=(),
            end=mark.tokens,
            starts=np.zeros(0, np.int64),
            first_document=mark.documents,
        )
        self._pieces = read_split(texts, cursor, encoder, dropped)
        self._marks = [mark]
        self._failure: Exception | None = None

    def is_over(self, begin: int, end: int) -> bool:
        """Whether the text ends before token `end`. An error of the text comes in its turn, with the next `fill`."""
        try:
            return not self.fill(begin, end)
        except Exception as error:
            self._failure = error
            return False

    def fill(self, begin: int, end: int) -> bool:
        """Read until the buffer has exactly the tokens from `begin` to `end` or more. False if the text ends before."""
        if self._failure is not None:
            raise self._failure
        if end <= self.buffer.end:
            return True
        self.buffer = self.buffer.since(begin)
        have, pending = self.buffer.end, []
        while have < end and (found := next(self._pieces, None)):
            mark, piece = found
            if mark != self._marks[-1]:
                self._marks.append(mark)
            pending.append((piece.tokens, piece.lengths))
            have += len(piece.tokens)
            if have <= begin:  # nothing accumulates on the way to a distant sample
                self.buffer, pending = self.buffer.extend(pending).since(begin), []
        if pending:
            self.buffer = self.buffer.extend(pending).since(begin)
            self.buffer = self.buffer.joined(begin) if self._joins else self.buffer
        while len(self._marks) > 1 and self._marks[1].tokens <= begin:
            del self._marks[0]
        return have >= end

    def mark_at(self, token: int) -> Mark:
        """The start of the unit that contains a token, which is in the buffer or the first one behind it."""
        return next(mark for mark in reversed(self._marks) if mark.tokens <= token)


def read_split(
    texts: Texts, cursor: Cursor, encoder: InThisProcess | TokenClient, dropped: Counter[str]
) -> Iterator[tuple[Mark, TokenPiece]]:
    """The tokens of the split from a cursor on, piece by piece with the mark of their unit. Drops are counted."""
    plan, mark = texts.plan, cursor.mark
    for unit in range(mark.unit, len(plan.units)):
        tokens, documents, all_tokens = mark.tokens, mark.documents, mark.all_tokens
        if all_tokens == plan.identity["max_tokens"]:
            return
        for piece in read_within_budget(plan, encoder, cursor.epoch, unit, all_tokens):
            dropped.update(piece.dropped)
            tokens, documents = tokens + len(piece.tokens), documents + len(piece.lengths)
            all_tokens += piece.all_tokens
            if len(piece.lengths):
                yield mark, piece
        mark = Mark(unit=unit + 1, tokens=tokens, documents=documents, all_tokens=all_tokens)


def read_within_budget(
    plan: Plan, encoder: InThisProcess | TokenClient, epoch: int, unit: int, all_tokens: int
) -> Iterator[TokenPiece]:
    """The pieces of a unit, up to the token budget. The piece that exceeds it is made once more, and cut."""
    position, budget, first = epoch * len(plan.units) + unit, plan.identity["max_tokens"], 0
    for piece in encoder.read(position, make_task(plan, unit), 0):
        if budget is not None and all_tokens + piece.all_tokens > budget:
            break
        yield piece
        all_tokens, first = all_tokens + piece.all_tokens, piece.end
        if all_tokens == budget:
            return
    else:
        return
    yield from encoder.read(position, make_task(plan, unit, budget - all_tokens), first)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBuffer:
    """A range of a split in memory. Its tokens and documents keep the numbers that they have in the whole split.

        split     ........[ 7 | 8    | 9 ][ 10 | 11 ].......
                           part            a piece of text is a part of its own: nothing is copied

    `begins` has the first token of each part, and `end` the first one behind the buffer. `starts` are those of the
    documents, the first of which may begin before the buffer.
    """

    eot: str
    eot_id: int | None
    parts: tuple[Tokens, ...]
    begins: tuple[int, ...]
    end: int
    starts: Numbers
    first_document: int

    def document_at(self, tokens: Numbers) -> Numbers:
        """The documents that contain these tokens."""
        return np.searchsorted(self.starts, tokens, side="right") - 1 + self.first_document

    def document_starts(self, documents: Numbers) -> Numbers:
        """The first tokens of these documents."""
        found: Numbers = self.starts[documents - self.first_document]
        return found

    def tokens(self, begin: int, end: int) -> Tokens:
        """These tokens as one array: a view if a single part has them."""
        which = range(bisect_right(self.begins, begin) - 1, bisect_left(self.begins, end))
        cut = [self.parts[i][max(0, begin - self.begins[i]) : end - self.begins[i]] for i in which]
        joined: Any = cut[0] if len(cut) == 1 else np.concatenate(cut)
        return cast("Tokens", joined)

    def windows(self, begin: int, count: int, seq_len: int) -> Tokens:
        """`count` rows, one after the other, each with the first token of the next one: a view if possible."""
        tokens = self.tokens(begin, begin + count * seq_len + 1)
        size = tokens.itemsize
        return np.ndarray((count, seq_len + 1), tokens.dtype, tokens.data, strides=(seq_len * size, size))

    def gather(self, starts: Numbers, width: int) -> Tokens:
        """The rows of `width` tokens that begin at these tokens."""
        begin = int(starts.min())
        rows: Any = np.lib.stride_tricks.sliding_window_view(self.tokens(begin, int(starts.max()) + width), width)
        found: Tokens = rows[starts - begin]
        return found

    def extend(self, pieces: Sequence[tuple[Tokens, Numbers]]) -> TokenBuffer:
        """The buffer with more documents at its end: their tokens, and the length of each."""
        parts = [tokens for tokens, _ in pieces]
        lengths = np.concatenate([np.zeros(0, np.int64), *(lengths for _, lengths in pieces)])
        *begins, end = accumulate(map(len, parts), initial=self.end)
        return replace(
            self,
            parts=(*self.parts, *parts),
            begins=(*self.begins, *begins),
            end=end,
            starts=np.concatenate((self.starts, self.end + np.cumsum(lengths) - lengths)),
        )

    def joined(self, token: int) -> TokenBuffer:
        """The buffer from this token on, in one array, from which rows can be gathered at once."""
        if not self.parts or token < self.begins[0]:
            return self
        return replace(self, parts=(self.tokens(token, self.end).copy(),), begins=(token,))

    def since(self, token: int) -> TokenBuffer:
        """The buffer without the parts before this token. If that is behind the buffer, nothing is left."""
        if not self.begins or token <= self.begins[0]:
            return self
        if token >= self.end:
            nothing = self.first_document + len(self.starts)
            return replace(self, parts=(), begins=(), starts=self.starts[:0], first_document=nothing)
        first = bisect_right(self.begins, token) - 1
        # The document that contains the first token of a part stays.
        documents = int(np.searchsorted(self.starts, self.begins[first], side="right")) - 1
        return replace(
            self,
            parts=self.parts[first:],
            begins=self.begins[first:],
            starts=self.starts[documents:],
            first_document=self.first_document + documents,
        )
