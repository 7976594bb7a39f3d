"""The check before the work: documents from all over the sources, encoded twice.

    a worker    looks at the sources  ->  the engine's ids  ---------+
                        |                                            +-> the same? -> an estimate of the whole
    here                +---------------> the reference's ids  ------+

The engine and its reference must agree on them, and they tell how many tokens and how much time
the whole will take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tokenmill.build.estimate import Estimate, Seen, Survey, estimate
from tokenmill.build.look import Look, look
from tokenmill.build.task import Work
from tokenmill.build.visits import Request
from tokenmill.shards.layout import numpy_dtype
from tokenmill.tokenizer.encoded import Engine
from tokenmill.tokenizer.parity import Trial, check_parity, compare, hard_texts, open_reference, try_engine
from tokenmill.tokenizer.spec import TokenizerSpec


class Worker(Protocol):
    def look(self, request: Request) -> Look:
        """The texts at some places of the sources."""

    def encode(self, texts: Sequence[str]) -> Trial:
        """What the engine makes of some texts."""


@dataclass(frozen=True, slots=True)
class Here:
    """A worker that is this process."""

    work: Work
    engine: Engine

    def look(self, request: Request) -> Look:
        return look(request, self.work)

    def encode(self, texts: Sequence[str]) -> Trial:
        return try_engine(self.engine, texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was compared with the reference, what was seen by the way, and the units that could not be read."""

    parity: dict[str, Any]
    survey: Survey
    unread: tuple[int, ...]

    @property
    def estimate(self) -> Estimate:
        return estimate(self.survey)


def check(request: Request, work: Work, spec: TokenizerSpec, worker: Worker) -> Checked:
    """Have documents of every place encoded by the engine and its reference, and count what they come to."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenmill-reference") as beside:
        reference = beside.submit(open_reference, spec)
        found = worker.look(request)
    hard = hard_texts(spec)
    compare(spec, reference.result(), hard, worker.encode(hard))
    parity, trial = check_parity(spec, reference.result(), found.texts, worker.encode)
    survey = Survey(
        seen=tuple(_count(found, trial, eot=work.eot != "none")),
        counts=found.counts,
        planned_bytes=request.planned_bytes,
        token_bytes=numpy_dtype(work.dtype).itemsize,
        encoded_bytes=parity.bytes,
        seconds=trial.seconds,
    )
    return Checked(parity=dataclasses.asdict(parity), survey=survey, unread=found.unread)


def _count(found: Look, trial: Trial, *, eot: bool) -> Iterator[Seen]:
    """Tokens at every place, for each planned byte."""
    tokens = np.array(trial.lengths, np.int64)
    sizes = np.array([len(text.encode()) for text in found.texts], np.int64)
    for place in found.places:
        texts = list(place.texts)
        yield Seen(
            at=place.at,
            tokens=float(tokens[texts].sum()) / place.planned_bytes + eot * place.documents,
            documents=place.documents,
            text_bytes=float(sizes[texts].sum()) / place.planned_bytes,
            weight=place.weight,
        )
