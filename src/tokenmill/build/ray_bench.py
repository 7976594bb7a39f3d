"""A bench: a slot of a Ray cluster, with all that a unit needs. It has two calls at a time:

    one call      unit 7 computes | unit 7 publishes |                  unit 12 computes | ...
    the other                     | unit 9 computes  | unit 9 publishes                  | ...

JSON goes in and out. What it says is a hint; the receipts on the shared output are the truth.
"""

from __future__ import annotations

import json
import platform
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tokenmill import errors, records
from tokenmill.build import state
from tokenmill.build.crew import Message
from tokenmill.build.inline import EngineHolder
from tokenmill.build.task import Task, Work
from tokenmill.build.unit import begin_unit
from tokenmill.build.versions import check_versions
from tokenmill.build.worker import answer_to
from tokenmill.errors import RecipeError
from tokenmill.sources.startup import start_arrow
from tokenmill.storage import Folder
from tokenmill.storage.places import from_record
from tokenmill.tokenizer.engine import open_engine
from tokenmill.tokenizer.spec import TokenizerSpec, from_dataset

# Calls that a bench has at a time: one that computes, and one that waits for the disk.
CALLS = 2


class Bench:
    """An actor. Whatever a call dies of is an answer."""

    _computing: threading.Lock
    _folder: Folder
    _work: Work
    _spec: TokenizerSpec
    _engine: EngineHolder

    def open(self, briefing: str) -> str:
        """Get ready for the units of a build."""
        return _answer(lambda: self._open(json.loads(briefing)))

    def do(self, message: str) -> str:
        """Do a unit, or answer what is asked before the work."""
        told = json.loads(message)
        return _answer(lambda: self._do(told) if "unit" in told else self._look(told))

    def _open(self, told: Message) -> Message:
        start_arrow()
        sys.path += [path for path in told["path"] if path not in sys.path]
        self._computing = threading.Lock()
        self._work = records.convert(Work, told["work"], where="work")
        self._folder = from_record(told["output"])
        if not self._folder.exists(state.PLAN):
            raise RecipeError(
                f"{self._folder.path} is not there on {platform.node()}",
                hint="the nodes of a cluster write to one output: give a folder that they share, or a URL",
            )
        self._folder.make()
        if self._work.scratch:
            Folder(self._work.scratch).make()
        name = told["tokenizer"]["file"]
        self._spec = from_dataset(told["tokenizer"], self._folder.read(name) if name else None)
        check_versions(told["version"], told["tokenizer"], self._spec)
        self._engine = EngineHolder(self._spec, open_engine(self._spec))
        return {"kind": "free", "host": platform.node()}

    def _look(self, question: Message) -> Message:
        with self._computing:
            return {"kind": "answer", "answer": answer_to(question, self._work, self._engine())}

    def _do(self, told: Message) -> Message:
        task = records.convert(Task, told, where="task")
        counts = Counter(documents=0, tokens=0, bytes=0, kept=0)

        def report(documents: int, tokens: int, planned_bytes: int, *, kept: bool = False) -> None:
            counts.update(documents=documents, tokens=tokens, bytes=planned_bytes, kept=int(kept))

        with self._computing:
            finish = begin_unit(self._folder, self._work, task, self._engine, report)
        finish()
        return {"kind": "done", "counts": counts}


def _answer(part: Callable[[], dict[str, Any]]) -> str:
    try:
        answer = part()
    except Exception as error:  # the driver judges it
        answer = {"kind": "failed", "error": errors.to_record(error), "host": platform.node()}
    return json.dumps(answer)
