"""The in-process executor: units run one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenmill import errors
from tokenmill.executors.base import MAX_TRIES, Listener, UnitFailure, is_final, is_silent
from tokenmill.executors.forkserver import Message
from tokenmill.storage.base import Storage
from tokenmill.tokenizers.base import Engine
from tokenmill.tokenizers.engine import EngineHolder
from tokenmill.tokenizers.parity import Trial, try_engine
from tokenmill.tokenizers.spec import TokenizerSpec
from tokenmill.units.probe import ProbeResult, probe
from tokenmill.units.run import Reporter, run_unit
from tokenmill.units.task import BuildConfig, ProbeRequest, UnitTask


@dataclass(frozen=True, slots=True)
class InProcessProber:
    """Answers the questions of the preflight in this process."""

    config: BuildConfig
    engine: Engine

    def probe(self, request: ProbeRequest) -> ProbeResult:
        return probe(request, self.config)

    def encode(self, texts: Sequence[str]) -> Trial:
        return try_engine(self.engine, texts)


class InProcess:
    """An executor of one worker: this process."""

    workers = 1

    def __init__(self, folder: Storage, config: BuildConfig, spec: TokenizerSpec, engine: Engine) -> None:
        self._folder = folder
        self._config = config
        self._engine = EngineHolder(spec, engine)

    def probe(self, request: ProbeRequest) -> ProbeResult:
        return probe(request, self._config)

    def encode(self, texts: Sequence[str]) -> Trial:
        return try_engine(self._engine(), texts)

    def run(self, tasks: Iterator[UnitTask], listener: Listener) -> list[UnitFailure]:
        """Run the units one after the other."""
        failures: list[UnitFailure] = []
        for task in tasks:
            error = self._attempt(task, listener)
            if error is None:
                listener({"kind": "done", "unit": task.unit.index})
            else:
                failures.append(UnitFailure(task, error))
                listener(_message("failed", task, error))
        return failures

    def _attempt(self, task: UnitTask, listener: Listener) -> errors.TokenmillError | None:
        for attempt in range(1, MAX_TRIES + 1):
            try:
                with Reporter(listener, task.unit.index) as report:
                    run_unit(self._folder, self._config, task, self._engine, report)
                return None
            except BaseException as error:  # the other units continue
                if not errors.is_failure(error):
                    raise
                failure = errors.from_record(errors.to_record(error))
            if is_final(failure, attempt):
                break
            listener(_message("retry", task, failure))
        return failure

    def release(self) -> None:
        """There are no workers to end."""

    stop = release


def _message(kind: str, task: UnitTask, error: errors.TokenmillError) -> Message:
    return {"kind": kind, "unit": task.unit.index, "error": error.message, "silent": is_silent(error)}
