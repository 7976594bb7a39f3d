"""Resumable exports and imports: durable parts, written by threads, and a record of the request.

    OUT/.build/request.json   what was asked for; the same request resumes, another one is refused
        .build/receipts/      one for each part: its files, their digests, its facts
        .build/lock           one writer at a time; correctness does not depend on it

Copying, hashing and compressing release the interpreter lock, so threads are enough. A part that was being written
when the process died is written again. A part with a receipt is hashed again, and kept if the digests match.

Units of a build have receipts of their own (`units/receipts.py`): there may be a million, so they are packed, and after
a clean stop trusted by size. Parts are few. Each is hashed, and its facts are those of its format.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokenmill import records
from tokenmill.arguments import Watcher
from tokenmill.dataset.manifest import EXPORT_RECORD, check_name
from tokenmill.errors import DatasetError, Interrupted, OutputError, RecipeError, TokenmillError
from tokenmill.formats.base import Files, OutputPart, PartReceipt
from tokenmill.records import Int
from tokenmill.sizes import few
from tokenmill.storage.base import Storage, require_space, same_disk
from tokenmill.storage.local import Folder
from tokenmill.storage.locks import LOCK, locked, telling
from tokenmill.storage.memory_maps import fast_digest
from tokenmill.storage.output import Digest, Output, is_temp
from tokenmill.storage.scratch import (
    Fallback,
    ScratchOutput,
    make_scratch_folder,
    remove_scratch_folder,
    scratch_folder,
)
from tokenmill.threads import ByteTally, as_done

REQUEST = ".build/request.json"
RECEIPTS = ".build/receipts"
FORMAT = 1
LAST = "last"
# Keys of a request that identify the content it reads: those of `Dataset.pins`.
PINS = ("content", "files")
_RESUME_HINT = "run the same command to resume"
_RESTART_HINT = "choose another output, or start over with `restart=True`"

T = TypeVar("T")
Finish = Callable[[Sequence[PartReceipt]], Mapping[str, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRequest:
    """Everything that determines the files of a conversion."""

    format: Int
    about: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        return records.digest(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """The record of an export, written last: its dataset, and what every file must hash to."""

    layout: str
    options: dict[str, Any]
    dataset: str
    notes: tuple[str, ...]
    files: dict[str, Digest]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The receipts of a finished conversion, and how many of its parts were already complete."""

    receipts: tuple[PartReceipt, ...]
    num_kept: int

    @property
    def files(self) -> dict[str, Digest]:
        return {name: digest for receipt in self.receipts for name, digest in receipt.files.items()}


def make_request(**about: Any) -> ConversionRequest:
    return ConversionRequest(format=FORMAT, about=about)


def check_output(
    folder: Storage, request: ConversionRequest, *, what: str, ignore: Collection[str] = (), hint: str = _RESTART_HINT
) -> None:
    """Refuse a folder that has the files of another request, or other files that are not in `ignore`."""
    folder.check_place()
    names = [name for name in folder.names() if name not in ignore and not is_temp(name)]
    begun = names == [".build"] and _has_begun(folder)  # before the request, which another process may write now
    if folder.exists(REQUEST):
        before = records.unseal(ConversionRequest, folder.read(REQUEST, max_bytes=1 << 26), where=folder.at(REQUEST))
        if before != request:
            lines = few(_differences(before.about, request.about), "\n  ") or f"format: was {before.format}"
            kind = f"the {what} of other content" if _same_except_content(before, request) else f"another {what}"
            raise OutputError(
                f"{folder.path} has {kind}:\n  {lines}",
                hint=hint,
            )
    elif names and not begun:
        raise OutputError(
            f"{folder.path} has other files: {few(names)}",
            hint="choose an output that is empty or does not exist",
        )


def _has_begun(folder: Storage) -> bool:
    """Whether .build has only what a conversion writes before its request."""
    return all(name in ("lock", "receipts", "quarantine") or is_temp(name) for name in folder.names(".build"))


def recorded_digests(folder: Storage) -> dict[str, Digest]:
    """The digest of every file of a finished conversion, by its receipts; by its record, if they were removed."""
    found: dict[str, Digest] = {}
    for name in folder.names(RECEIPTS):
        where = f"{RECEIPTS}/{name}"
        found |= records.unseal(PartReceipt, folder.read(where), where=folder.at(where)).files
    if folder.exists(EXPORT_RECORD):
        found |= records.unseal(ExportRecord, folder.read(EXPORT_RECORD), where=folder.at(EXPORT_RECORD)).files
    for name in found:
        check_name(name, where=folder.at(".build"))
    return dict(sorted(found.items()))


def is_of_other_content(folder: Storage, request: ConversionRequest) -> bool:
    """Whether the folder has the files of this request, made from other content."""
    if not folder.exists(REQUEST):
        return False
    before = records.unseal(ConversionRequest, folder.read(REQUEST, max_bytes=1 << 26), where=folder.at(REQUEST))
    return before != request and _same_except_content(before, request)


def start_over(folder: Storage, watch: Watcher | None = None) -> None:
    """Remove what an earlier conversion wrote here, and nothing else. `LockedError` if it is still running."""
    if not folder.exists(REQUEST):
        return
    folder.check_no_links(folder.names())
    with locked(folder, tell=telling(watch)):
        # The summary files are removed first, durably: without them, what a power cut leaves is not a dataset.
        _remove_files(folder, _receipt_name(LAST))
        folder.sync("")
        for name in folder.names(RECEIPTS):
            _remove_files(folder, f"{RECEIPTS}/{name}")
        for name in folder.names(".build"):
            if f".build/{name}" != LOCK:
                folder.remove_tree(f".build/{name}")
    folder.remove_empty(".build")


def _remove_files(folder: Storage, receipt_name: str) -> None:
    with contextlib.suppress(DatasetError):
        receipt = records.unseal(PartReceipt, folder.read(receipt_name), where=receipt_name)
        for file in receipt.files:
            check_name(file, where=receipt_name)
            folder.remove(file)
            _remove_empty(folder, os.path.dirname(file))


def run_conversion(
    folder: Storage,
    request: ConversionRequest,
    parts: Sequence[OutputPart],
    finish: Finish,
    *,
    threads: int,
    scratch: str | None,
    watch: Watcher | None,
) -> Conversion:
    """Write the parts that are missing, then the files that summarize them.

    If the source cannot be converted, everything written here is removed: there is nothing to resume.
    """
    is_new, was_there = not folder.exists(REQUEST), folder.exists("")
    local = scratch_folder(scratch, folder) if scratch else None
    try:
        return _convert(folder, request, parts, finish, threads=threads, local=local, watch=watch)
    except (DatasetError, RecipeError):
        if is_new:
            start_over(folder, watch)
            for part in parts:
                _remove_empty(folder, os.path.dirname(part.name))
            if not was_there:
                folder.remove_empty("")
        raise


def _convert(
    folder: Storage,
    request: ConversionRequest,
    parts: Sequence[OutputPart],
    finish: Finish,
    *,
    threads: int,
    local: Folder | None,
    watch: Watcher | None,
) -> Conversion:
    folder.check_no_links(folder.names())
    folder.make(RECEIPTS)
    with locked(folder, tell=telling(watch)):
        _sweep(folder)
        local = make_scratch_folder(local) if local else None
        folder.write(REQUEST, records.seal(request))
        run = _ConversionRun(folder, local, request.fingerprint, watch)
        try:
            receipts, num_kept = run.all_parts(parts, threads)
            last = run.summarize(finish(receipts))
        finally:
            _sweep(folder)
            if local is not None:
                remove_scratch_folder(local)
    return Conversion(receipts=(*receipts, last), num_kept=num_kept)


class _ConversionRun:
    """A conversion while its threads are running."""

    def __init__(self, folder: Storage, local: Storage | None, fingerprint: str, watch: Watcher | None) -> None:
        self.folder, self.local = folder, local
        self.fingerprint = fingerprint
        self._watch = watch or (lambda _: None)
        self._fallback = Fallback(local, self._note) if local else None
        self.tally = ByteTally(watch)

    def _note(self, message: str) -> None:
        self._watch({"kind": "note", "message": message})

    def all_parts(self, parts: Sequence[OutputPart], threads: int) -> tuple[list[PartReceipt], int]:
        """The receipts of all parts, in order, and how many were already complete."""
        for part in parts:
            check_name(part.name, where="a part")
        known = self._gather(self._load, parts, threads)
        kept = {name: receipt for name, receipt in known.items() if receipt is not None}
        # The largest first, so that no thread is still writing a large one when the others are done.
        missing = sorted((part for part in parts if part.name not in kept), key=lambda part: -part.num_bytes)
        # A scratch folder on the same disk has a second copy of the parts being written.
        twice = threads if self.local is not None and same_disk(self.local, self.folder) else 0
        require_space(self.folder, sum(part.num_bytes for part in (*missing, *missing[:twice])))
        if kept and missing:
            self._watch({"kind": "resume", "units": len(kept), "total_units": len(parts), "trusted": len(kept)})
        self.tally.start(sum(part.num_bytes for part in missing), total_units=len(missing))
        fresh = self._gather(self._write, missing, threads, total_units=len(missing), workers=threads)
        found = {**kept, **fresh}
        return [found[part.name] for part in parts], len(kept)

    def summarize(self, files: Mapping[str, bytes]) -> PartReceipt:
        """Write the small files that come last."""

        def write(outputs: Files) -> dict[str, Any]:
            for name, data in files.items():
                outputs.create(name).write(data)
            return {}

        last = OutputPart(name=LAST, num_bytes=0, write=write)
        found = self._load(last)
        wanted = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        if found is not None and {name: digest.sha256 for name, digest in found.files.items()} == wanted:
            return found
        self.folder.remove(_receipt_name(LAST))
        return self._write(last)

    def _gather(
        self, work: Callable[[OutputPart], T], parts: Sequence[OutputPart], threads: int, **about: int
    ) -> dict[str, T]:
        """The results of all parts, by name. Reports progress if it is told `about` it. Stops at the first error."""
        found: dict[str, T] = {}
        try:
            with contextlib.closing(as_done(work, parts, threads, stop=self.tally.stop)) as results:
                for done in results:
                    if done is not None:
                        found[done[0].name] = done[1]
                        if self._fallback:
                            self._fallback.check()
                    if about:
                        self.tally.show(is_last=len(found) == len(parts), units=len(found), **about)
        except KeyboardInterrupt:
            raise Interrupted("finished parts are saved", hint=_RESUME_HINT) from None
        return found

    def _write(self, part: OutputPart) -> PartReceipt:
        files = _PartFiles(self)
        try:
            facts = part.write(files)
            name = _receipt_name(part.name)
            digests = self.folder.publish(files.outputs, committed=lambda: self.folder.exists(name))
            receipt = PartReceipt(fingerprint=self.fingerprint, part=part.name, files=digests, facts=facts)
            self.folder.write(name, records.seal(receipt), committed=lambda: True)
        except BaseException:
            files.discard()
            raise
        return receipt

    def _load(self, part: OutputPart) -> PartReceipt | None:
        """The receipt of a part, if it and its files are intact. Damaged files are moved to quarantine."""
        name = _receipt_name(part.name)
        if not self.folder.exists(name):
            return None
        try:
            receipt = records.unseal(PartReceipt, self.folder.read(name), where=name)
            if (receipt.fingerprint, receipt.part) != (self.fingerprint, part.name) or not part.is_served_by(receipt):
                raise DatasetError(f"{name} belongs to another part")
            for file in receipt.files:
                check_name(file, where=name)
            bad = [file for file, digest in receipt.files.items() if not self._is_intact(file, digest)]
        except DatasetError:
            self.folder.quarantine(name)
            return None
        for file in (name, *bad) if bad else ():
            if self.folder.exists(file):
                self.folder.quarantine(file)
        return None if bad else receipt

    def _is_intact(self, name: str, digest: Digest) -> bool:
        self.tally.check()
        found = self.folder.stat(name)
        if found is None or not found.is_file or found.size != digest.bytes:
            return False
        return fast_digest(self.folder, name) == digest


@dataclass(slots=True)
class _PartFiles:
    """The files of one part while it is written."""

    run: _ConversionRun
    outputs: list[Output] = field(default_factory=list)

    def create(self, name: str) -> Output:
        check_name(name, where="a file of a layout")
        folder, local = self.run.folder, self.run.local
        if os.path.dirname(name):
            folder.make(os.path.dirname(name))
        output = _CountedOutput(ScratchOutput(local, folder, name) if local else folder.create(name), self.run.tally)
        self.outputs.append(output)
        return output

    def discard(self) -> None:
        for output in self.outputs:
            output.discard()


class _CountedOutput:
    """An output that counts its bytes, and raises when the conversion is to stop."""

    def __init__(self, output: Output, tally: ByteTally) -> None:
        self.name = output.name
        self._output = output
        self._tally = tally

    def write(self, data: bytes | memoryview) -> int:
        self._tally.add(memoryview(data).nbytes)
        return self._output.write(data)

    def settle(self) -> tuple[str, Digest]:
        return self._output.settle()

    def discard(self) -> None:
        self._output.discard()


def _receipt_name(part: str) -> str:
    return f"{RECEIPTS}/{part.replace('/', '-')}.json"


def _sweep(folder: Storage) -> None:
    """Remove the temp files of an interrupted writer."""
    for name in _written_folders(folder):
        with contextlib.suppress(TokenmillError):
            folder.sweep(name)


def _remove_empty(folder: Storage, name: str) -> None:
    if name:
        folder.remove_empty(name)


def _written_folders(folder: Storage) -> Iterator[str]:
    yield from ("", ".build", RECEIPTS)
    for name in folder.names():
        found = folder.stat(name)
        if name != ".build" and found is not None and found.is_folder:
            yield name


def _same_except_content(before: ConversionRequest, now: ConversionRequest) -> bool:
    plain = [{key: value for key, value in one.about.items() if key not in PINS} for one in (before, now)]
    return plain[0] == plain[1] and before.format == now.format


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences, one in a line; of files, one line for each file."""
    lines = []
    for key in sorted(before.keys() | now.keys()):
        was, found = before.get(key), now.get(key)
        if key in PINS and was is None:
            lines.append(f"{key}: not recorded by the version of tokenmill that wrote it")
        elif key in PINS and isinstance(was, dict) and isinstance(found, dict):
            lines += [f"{key}: {line}" for line in _differences(was, found)]
        elif was != found:
            lines.append(f"{key}: was {was!r}, now {found!r}")
    return lines
