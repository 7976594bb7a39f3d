"""An epoch straight from text: the tokens of one split, read unit by unit and held while samples need them.

    units      0 |   1   | 2 |    3     | 4
    held                    [.......]          from the next sample on
    mark                  2                    the unit in which that sample begins

What was counted up to a unit is its mark. Reading may begin there again without what lies before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tokenmill.build.documents import Part, encode_batch, num_eot, part_of, read_batches
from tokenmill.build.task import Work, make_task
from tokenmill.data.held import Held
from tokenmill.filters import load_filter
from tokenmill.planning import Plan
from tokenmill.shards.layout import numpy_dtype
from tokenmill.tokenizer.encoded import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The beginning of a unit: tokens and documents of the split before it, and tokens of all splits."""

    unit: int
    tokens: int
    documents: int
    all_tokens: int


START = Mark(unit=0, tokens=0, documents=0, all_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What to read: a plan, and the number of one of its splits."""

    plan: Plan
    work: Work
    split: int


class Epoch:
    """One pass over the texts, from a mark on. It keeps no more than it is asked to hold."""

    def __init__(self, texts: Texts, mark: Mark, engine: Callable[[], Engine], dropped: Counter[str]) -> None:
        self.held = Held(
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
) -> Iterator[tuple[Mark, Part]]:
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
            part = part_of(found, texts.split, work)
            if part is not None:
                tokens, documents = tokens + len(part.tokens), documents + len(part.lengths)
                yield mark, part
        mark = Mark(unit=unit.index + 1, tokens=tokens, documents=documents, all_tokens=all_tokens)
