"""The workspace of a build, `.build`: which build it belongs to, and what can be reused from it.

OUT/.build/plan.json      the plan; its fingerprint must match
    .build/job.json       the settings of its units, for repair and verify --source
    .build/clean.json     units that were complete at the last clean stop: they are not hashed again
    .build/touched.json   when each local source was last touched, as of the plan
    .build/failure.json   why the last build failed, for the processes that wait for it
    .build/compared.json  the sources of a dataset without a plan were compared by content
    .build/receipts       one for each unit    .build/packs        many receipts in a file
    .build/pieces         what units wrote
    .build/rejects        bad documents        .build/quarantine   files that failed a check
    .build/kept           what an update keeps of a build whose sources changed, until it is in place

Units of a finished build can be replayed, for repair and `verify --source`.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenmill import records
from tokenmill.build.plan import Budget, Plan, check_plan, counts_files, differences
from tokenmill.build.prefetch import FETCHED
from tokenmill.build.resolve import ResolvedBuild
from tokenmill.dataset import manifest
from tokenmill.dataset.bin_idx import wrong_structure
from tokenmill.dataset.folder_kinds import ONLY_LAYOUT
from tokenmill.dataset.manifest import Manifest
from tokenmill.dataset.statistics import STATISTICS
from tokenmill.errors import (
    BuildError,
    DatasetError,
    Interrupted,
    LockedError,
    OutputError,
    SourceChangedError,
    StorageError,
    TokenmillError,
    to_record,
)
from tokenmill.formats.resumable import REQUEST
from tokenmill.recipe import check_filter
from tokenmill.records import Int
from tokenmill.sizes import few
from tokenmill.sources.base import Source
from tokenmill.sources.discover import IN_WORKSPACE
from tokenmill.storage import hub
from tokenmill.storage.base import Storage, is_hub
from tokenmill.storage.locks import LOCK, PARTS, locked
from tokenmill.storage.output import TEMP_SUFFIX, Digest, is_temp
from tokenmill.storage.scratch import remove_scratch_folder
from tokenmill.tokenizers.spec import TokenizerSpec
from tokenmill.units import receipts
from tokenmill.units.receipts import (
    NO_LIMIT,
    PACKS,
    PIECES,
    PLAN,
    RECEIPTS,
    REJECTS,
    Key,
    Receipt,
    load_receipts,
    read_receipt,
    receipt_name,
)
from tokenmill.units.task import BuildConfig, UnitTask

if TYPE_CHECKING:
    from tokenmill.recipe import Recipe


EVENTS = ".build/events.jsonl"
JOB = ".build/job.json"
CLEAN = ".build/clean.json"
COMPARED = ".build/compared.json"
TOUCHED = ".build/touched.json"
CLEAN_SUFFIX = ".clean.json"
FAILURE = ".build/failure.json"
KEPT = ".build/kept"
KEPT_PLAN = f"{KEPT}/plan.json"
TOKENIZER_COPY = ".build/tokenizer"
QUARANTINE = ".build/quarantine"
# Texts that came from Python: see python_sources.py.
SOURCES = IN_WORKSPACE
# The folders that exist while units run.
MADE = (PIECES, RECEIPTS, REJECTS)
PROVENANCE_SUFFIX = ".provenance.parquet"
# A build may have left millions of pieces.
REMOVED_AT_ONCE = 1 << 16
SWEPT = ("", ".build", PIECES, RECEIPTS, PACKS, REJECTS, PARTS, "provenance")
# What exists before the plan, or remains without it when a build is killed while it starts over.
_BEGUN = (
    LOCK, EVENTS, PIECES, RECEIPTS, PACKS, REJECTS, QUARANTINE, JOB, CLEAN, TOUCHED, FAILURE, FETCHED, TOKENIZER_COPY,
    KEPT, SOURCES, PARTS,
)  # fmt: skip
_OF_A_UNIT = re.compile(r"\.build-(?:receipts|pieces|rejects)-(\d+)\..*")
_SHARD_FILE = re.compile(r"\d{5,}\.(bin|idx|parquet)|.*\.tmp")
_WAYS_OUT = "choose another output, or start this one over with `restart=True`"
_OTHER_SOURCES = (
    "`update=True` keeps what was made of the others, `restart=True` starts over; or put the old files back"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecord:
    """What is needed, beside the plan, to replay units of a build."""

    work: BuildConfig
    tokenizer: dict[str, Any]
    parity: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanStop:
    fingerprint: str
    units: tuple[Int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The plan whose sources were compared with the dataset that has this manifest."""

    plan: str
    manifest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TouchTimes:
    """When the sources of a plan were touched, in their order; see `sources.files.touch_times`."""

    times: tuple[Int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFailure:
    """Why a build failed, for the processes that wait for it. `token` distinguishes one failure from the next."""

    token: str
    error: dict[str, str]


@contextlib.contextmanager
def recording_failure(folder: Storage) -> Iterator[None]:
    """Record an error of this build for the processes that wait for it. An interruption does not stop them."""
    folder.remove(FAILURE)
    try:
        yield
    except Interrupted:
        raise
    except TokenmillError as error:
        with contextlib.suppress(StorageError):  # on a full disk, they fail themselves
            folder.replace(FAILURE, records.seal(BuildFailure(token=secrets.token_hex(8), error=to_record(error))))
        raise


def read_failure(folder: Storage) -> BuildFailure | None:
    """The last failure of a build in this folder; None if there is none."""
    try:
        return records.unseal(BuildFailure, folder.read(FAILURE, max_bytes=1 << 20), where=FAILURE)
    except (DatasetError, StorageError):
        return None


def check_ours(folder: Storage, *, restart: bool = False) -> None:
    """Refuse a folder with other content."""
    folder.check_place()
    if folder.exists(ONLY_LAYOUT):
        if restart:
            return
        raise OutputError(
            f"{folder.path} has only the export of a dataset, which was removed",
            hint="check it with the same `layout` and `only_layout=True`, or prepare again with `restart=True`",
        )
    names = folder.names()
    # A driver without a part of its dataset has only the record of nodes.
    if names not in ([], [manifest.NODES]) and not _is_ours(folder):
        raise OutputError(
            f"{folder.path} contains other files: {few(names)}",
            hint="choose an output that is empty or does not exist",
        )


def _is_ours(folder: Storage) -> bool:
    """Whether the folder has a manifest or a plan of ours, or a build that has only just begun."""
    # Another process may begin between the two checks.
    return _has_plan(folder) or _has_begun(folder) or _has_plan(folder)


def _has_plan(folder: Storage) -> bool:
    if folder.exists(manifest.MANIFEST):
        with contextlib.suppress(DatasetError):
            manifest.load_manifest(folder)
            return True
    with contextlib.suppress(DatasetError):
        return records.seal_of(_plan_blocks(folder)) is not None
    return False


def _has_begun(folder: Storage) -> bool:
    # In an object store, a folder ends with its last object: between the probe and the lock it does not exist.
    names = set(folder.names())
    # The card and the report of an earlier dataset stay when a build is started over.
    return (
        names <= {".build", manifest.CARD, manifest.REPORT}
        and (".build" in names or not names)
        and all(
            f".build/{name}" in _BEGUN or name.endswith(TEMP_SUFFIX) or name.startswith("probe-")
            for name in folder.names(".build")
        )
    )


def finished(folder: Storage, plan: Plan) -> Manifest | None:
    """The manifest of a complete dataset of this plan; None if there is no dataset yet."""
    if not folder.exists(manifest.MANIFEST):
        return None
    found = manifest.load_manifest(folder)
    if found.fingerprint != plan.fingerprint:
        raise OutputError(
            f"{folder.path} was built with different options:\n  " + few(_differences(found, plan), "\n  "),
            hint=_WAYS_OUT,
        )
    if folder.exists(PLAN) and not is_stored(folder, plan):
        try:
            before = load_plan(folder).sources
        except DatasetError as error:
            hint = "a finished dataset can do without it: remove it, or start over with `restart=True`"
            raise DatasetError(error.message, hint=hint) from None
        _check_pins(before, plan.sources, hint="put the old file back, or start over with `restart=True`")
    try:
        check_file_sizes(folder, found)
    except DatasetError as error:
        hint = error.hint if folder.exists(PLAN) else "its .build folder is gone: start it over with `restart=True`"
        raise DatasetError(error.message, hint=hint) from None
    return found


def check_file_sizes(folder: Storage, found: Manifest) -> None:
    """Raise `DatasetError` unless every file exists with its size, and every index fits its tokens."""
    for name, what in wrong_structure(folder, found):
        raise DatasetError(f"{folder.at(name)} {what}", hint="run tokenmill repair")


def start_or_resume(folder: Storage, setup: ResolvedBuild, times: tuple[int, ...], *, restart: bool) -> None:
    """Start a build of this plan in the folder, or resume an unfinished one. The caller holds the lock.

    `times` are those at which the sources were touched.
    """
    plan = setup.plan
    # A build that was killed before its first unit is replaced: a branch of the hub may have moved since.
    if restart or (folder.exists(PLAN) and not is_stored(folder, plan) and not may_have_units(folder)):
        start_over(folder, but=(SOURCES,) if setup.listing.root == folder.at(SOURCES) else ())
    if not folder.exists(PLAN):
        folder.remove(manifest.NODES)
        record_touch_times(folder, times)  # first: no plan is without them
        folder.write_parts(PLAN, records.sealed_parts(plan))
        return
    check_begun(folder, plan)


def check_begun(folder: Storage, plan: Plan) -> None:
    """Refuse a build that has begun a unit of another plan, or of sources that have changed."""
    if folder.exists(PLAN) and may_have_units(folder):
        check_stored(folder, plan)


def start_part(folder: Storage, plan: Plan, times: tuple[int, ...]) -> None:
    """Start a part of a build of this plan, which other parts may be starting at the same moment.

    `times` are those at which the sources were touched.
    """
    if folder.exists(KEPT_PLAN):
        raise OutputError(
            f"an update of {folder.path} is unfinished", hint="complete it with `tokenmill.prepare`, without `part`"
        )
    text: bytes | None = None
    while not folder.exists(PLAN):
        text = text or b"".join(records.sealed_parts(plan))
        if times:
            folder.claim(TOUCHED, records.seal(TouchTimes(times=times)))  # first: no plan is without them
        folder.claim(PLAN, text)
    folder.sync(".build")  # another part may have written it a moment ago
    check_stored(folder, plan)


def check_stored(folder: Storage, plan: Plan) -> None:
    """Refuse a folder whose build has another plan, or whose sources have changed since."""
    if is_stored(folder, plan):
        return
    found = load_plan(folder)
    if found.fingerprint != plan.fingerprint:
        of = "other sources" if found.identity == plan.identity else "other options"
        raise OutputError(
            f"{folder.path} holds an unfinished build of {of}:\n  " + few(differences(found, plan), "\n  "),
            hint=_OTHER_SOURCES if found.identity == plan.identity else _WAYS_OUT,
        )
    _check_pins(found.sources, plan.sources, hint=_OTHER_SOURCES)


def may_have_units(folder: Storage) -> bool:
    """Whether a unit may have begun. The job is written before the first one."""
    return folder.exists(JOB) or any(folder.names(name) for name in (RECEIPTS, PACKS))


def is_stored(folder: Storage, plan: Plan) -> bool:
    """Whether the folder's plan is this one, pins included, without a second copy of it in memory."""
    return records.seal_of(_plan_blocks(folder)) == records.digest(plan)


def _plan_blocks(folder: Storage) -> Iterator[memoryview]:
    """The plan's text; a `DatasetError` if it is larger than any plan, which would take too long to read."""
    return folder.blocks(PLAN, max_bytes=records.MAX_RECORD_BYTES)


def start_over(folder: Storage, *, but: Sequence[str] = ()) -> None:
    """Remove a build and its dataset, except `but`, and nothing that tokenmill did not write."""
    splits = known_splits(folder)
    folder.check_no_links((*splits, "provenance"))
    if KEPT not in but:
        remove_kept(folder)  # first: otherwise the update would be resumed
    folder.remove(manifest.MANIFEST)
    folder.remove(manifest.NODES)
    if folder.size_of(manifest.REPORT) is not None:  # a plain file
        folder.remove(manifest.REPORT)
    folder.sync("")  # from here on it is not a dataset, whatever else is still there
    for parent in (*sorted(splits), "provenance"):
        for name in folder.names(parent):
            if _SHARD_FILE.fullmatch(name):
                folder.remove(f"{parent}/{name}")
        folder.remove_empty(parent)  # something else may be in it
    for name in {STATISTICS, *manifest.TOKENIZER_FILES} - set(but) if splits else ():
        folder.remove(name)
    if folder.exists(RECEIPTS):
        folder.remove_tree(RECEIPTS)
        folder.sync(".build")  # no receipt may be left without its pieces
    for name in folder.names(".build"):
        if f".build/{name}" not in (LOCK, EVENTS, *but):
            folder.remove_tree(f".build/{name}")


def known_splits(folder: Storage) -> set[str]:
    """The splits that the manifest or the job of a folder names."""
    splits: set[str] = set()
    if folder.exists(manifest.MANIFEST):
        with contextlib.suppress(DatasetError):
            splits |= set(manifest.load_manifest(folder).splits)
    if folder.exists(JOB):
        with contextlib.suppress(DatasetError):
            splits |= set(load_build_record(folder).work.split_names)
    return splits


def remove_kept(folder: Storage) -> None:
    """Remove what an update gathered. Its plan is removed first: it must not survive alone."""
    found = folder.stat(KEPT)
    if found is not None and found.is_folder:
        folder.remove(KEPT_PLAN)
        folder.sync(KEPT)
    if found is not None:
        folder.remove_tree(KEPT)


def load_plan(folder: Storage) -> Plan:
    plan = records.unseal(Plan, folder.read(PLAN), where=folder.at(PLAN))
    check_plan(plan, where=folder.at(PLAN))
    return plan


def save_build_record(folder: Storage, job: BuildRecord) -> None:
    folder.replace(JOB, records.seal(job))


def load_build_record(folder: Storage) -> BuildRecord:
    """The settings of a build's units."""
    job = records.unseal(BuildRecord, folder.read(JOB), where=folder.at(JOB))
    for name in job.work.split_names:
        manifest.check_split_name(name, where=JOB)
    manifest.check_tokenizer(job.tokenizer, where=JOB)
    return replace(job, work=replace(job.work, scratch=None))


def pin_hub_commits(folder: Storage, recipe: Recipe) -> Recipe:
    """The recipe with hub datasets at the commit with which this build began, because branches move."""
    if not folder.exists(JOB):
        return recipe
    try:
        root = load_build_record(folder).work.root
    except DatasetError:
        return recipe
    if not is_hub(root):
        return recipe
    sources, val_sources = (
        tuple(hub.at_commit(source, root) for source in given) for given in (recipe.sources, recipe.val_sources)
    )
    return replace(recipe, sources=sources, val_sources=val_sources)


def match_stored_plan(folder: Storage, setup: ResolvedBuild) -> ResolvedBuild:
    """The build with the units with which it began: version 0.1 put any number of small files into a unit."""
    if setup.formerly is None:
        return setup
    with contextlib.suppress(DatasetError):  # `start_or_resume` reports it
        if folder.exists(manifest.MANIFEST):
            return _with_fingerprint(manifest.load_manifest(folder).fingerprint, setup)
        if folder.exists(PLAN) and not is_stored(folder, setup.plan):
            found = load_plan(folder)
            before = _with_fingerprint(found.fingerprint, setup)
            # If sources have changed, only the units tell.
            return setup.formerly() if found.identity == setup.plan.identity and not counts_files(found) else before
    return setup


def _with_fingerprint(fingerprint: str, setup: ResolvedBuild) -> ResolvedBuild:
    if setup.formerly is None or fingerprint == setup.plan.fingerprint:
        return setup
    before = setup.formerly()
    return before if fingerprint == before.plan.fingerprint else setup


def keep_tokenizer(folder: Storage, spec: TokenizerSpec) -> Digest | None:
    """Copy the tokenizer into the dataset, so that it can be decoded anywhere."""
    if spec.file_name is None:
        return None
    folder.write(TOKENIZER_COPY, spec.content)
    return folder.write(spec.file_name, spec.content)


def trusted_receipts(folder: Storage, plan: Plan, units: Container[int] | None = None) -> Iterator[Receipt]:
    """Receipts of units that were complete at the last clean stop, or only those in `units`. Workers hash the files of
    all others."""
    clean = (unit for unit in clean_units(folder, plan) if units is None or unit in units)
    found = load_receipts(folder, clean, plan.fingerprint)
    return (receipt for receipt in found if receipt is not None)


def clean_units(folder: Storage, plan: Plan) -> list[int]:
    """Units that were complete at the last clean stop, of the build or of one of its parts."""
    names = [CLEAN, *(f"{PARTS}/{name}" for name in folder.names(PARTS) if name.endswith(CLEAN_SUFFIX))]
    found = {unit for name in names for unit in _clean_units(folder, plan, name)}
    return sorted(unit for unit in found if 0 <= unit < len(plan.units))


def _clean_units(folder: Storage, plan: Plan, name: str) -> tuple[Int, ...]:
    if not folder.exists(name):
        return ()
    try:
        clean = records.unseal(CleanStop, folder.read(name), where=name)
    except DatasetError:
        return ()
    return clean.units if clean.fingerprint == plan.fingerprint else ()


def num_receipts(folder: Storage, units: Container[int] | None = None) -> int:
    """The number of whole units, or only of those in `units`, that have a receipt, verified or not."""
    return sum(units is None or unit in units for unit in units_with_receipt(folder))


def units_with_receipt(folder: Storage) -> Iterator[int]:
    """The whole units that have a receipt, verified or not."""
    for name in folder.names(RECEIPTS):
        unit, _, ending = name.partition(".")
        if ending == "json" and unit.isdecimal():
            yield int(unit)


def quarantined(folder: Storage) -> tuple[int, int]:
    """Units with a damaged file since the build began, and how many of their files are kept."""
    found = [match for name in folder.names(QUARANTINE) if (match := _OF_A_UNIT.fullmatch(name))]
    return len({match[1] for match in found}), len(found)


def record_clean_stop(folder: Storage, plan: Plan, known: Iterable[int], name: str = CLEAN) -> None:
    """Record which units need not be hashed again at the next start."""
    if units := tuple(sorted(known)):
        with contextlib.suppress(StorageError):  # on a full disk, the next start hashes them again
            folder.replace(name, records.seal(CleanStop(fingerprint=plan.fingerprint, units=units)))


def forget_clean_stop(folder: Storage) -> None:
    """Make the next start hash every unit again."""
    clean = [f"{PARTS}/{name}" for name in folder.names(PARTS) if name.endswith(CLEAN_SUFFIX)]
    folder.remove_all([CLEAN, *clean])


def bytes_done(folder: Storage) -> int:
    """How many bytes of the output are already written."""
    return sum(folder.sizes(PIECES).values())


def sweep(folder: Storage, splits: Iterable[str]) -> None:
    """Remove the temp files of an interrupted build."""
    for name in (*SWEPT, *splits):
        folder.sweep(name)


def clean_up(folder: Storage, local: Storage | None) -> None:
    """Remove the names of pieces, which have become shards. The manifest is written."""
    pieces = (name for name in folder.names(PIECES) if not name.endswith(PROVENANCE_SUFFIX))
    while some := list(itertools.islice(pieces, REMOVED_AT_ONCE)):
        folder.remove_all([f"{PIECES}/{name}" for name in some])
    for name in (PACKS, CLEAN, PARTS):
        folder.remove_tree(name)
    remove_kept(folder)
    if local is not None:
        remove_scratch_folder(local)


def finish_clean_up(folder: Storage, splits: Iterable[str], local: Storage | None) -> None:
    """Clean up after a build or repair that was interrupted after its manifest, unless another process is doing so.

    The dataset is already complete, so a folder that cannot be written to is left as it is.
    """
    for place in ("", "provenance", *splits):
        with contextlib.suppress(StorageError, OSError):
            folder.sync(place)  # a process may have been killed before it synced their names
    places = (*SWEPT, *splits)
    if not folder.exists(".build") or not (
        any(is_temp(name) for place in places for name in folder.names(place))
        or any(not name.endswith(PROVENANCE_SUFFIX) for name in folder.names(PIECES))
        or any(folder.exists(name) for name in (PACKS, CLEAN, PARTS, KEPT, FAILURE, LOCK))
        or (local is not None and local.exists(""))
    ):
        return
    with contextlib.suppress(LockedError, StorageError, OSError), locked(folder, patience=None):
        sweep(folder, splits)
        clean_up(folder, local)
        folder.remove(FAILURE)


def _differences(found: Manifest, plan: Plan) -> list[str]:
    sources = tuple(
        Source(name=s.name, kind="", compression="", bytes=s.bytes, modified=0, split="", text={})
        for s in found.sources
    )
    now = tuple(
        Source(name=s.name, kind="", compression="", bytes=s.bytes, modified=0, split="", text={}) for s in plan.sources
    )
    old_plan = Plan(format=found.format, identity=found.identity, sources=sources, units=(), target_tokens=0)
    new_plan = Plan(format=plan.format, identity=plan.identity, sources=now, units=plan.units, target_tokens=0)
    return differences(old_plan, new_plan)


def record_touch_times(folder: Storage, times: tuple[int, ...]) -> None:
    if times:
        folder.replace(TOUCHED, records.seal(TouchTimes(times=times)))


def touched_sources(folder: Storage, plan: Plan, times: tuple[int, ...]) -> frozenset[str]:
    """The names of the sources of a stored plan that were touched since, and have the size and time that they had.

    None if an earlier version began the build: it recorded no times.
    """
    try:
        before = records.unseal(TouchTimes, folder.read(TOUCHED), where=TOUCHED).times
    except DatasetError:
        return frozenset()
    if before == times or len(before) != len(times):
        return frozenset()
    return frozenset(source.name for source, was, now in zip(plan.sources, before, times, strict=True) if was != now)


def why_to_compare(folder: Storage, plan: Plan, times: tuple[int, ...]) -> str:
    """Why a finished dataset may not be of these sources, which have the pins of its plan; "" if it is."""
    if not folder.exists(PLAN) and not _is_compared(folder, plan):
        return "the dataset has no plan"
    if touched := touched_sources(folder, plan, times):
        return f"{few(sorted(touched), ', ')} {'was' if len(touched) == 1 else 'were'} touched since"
    return ""


def _is_compared(folder: Storage, plan: Plan) -> bool:
    try:
        before = records.unseal(Compared, folder.read(COMPARED), where=COMPARED)
    except DatasetError:
        return False
    return before == _compared(folder, plan)


def record_comparison(folder: Storage, plan: Plan, times: tuple[int, ...]) -> None:
    """Record that the sources were compared by content, so that next time their pins are enough."""
    with contextlib.suppress(LockedError, StorageError, OSError):  # a folder that cannot be written to is left as it is
        folder.make(".build")
        with locked(folder, patience=None):
            folder.replace(COMPARED, records.seal(_compared(folder, plan)))
            record_touch_times(folder, times)


def _compared(folder: Storage, plan: Plan) -> Compared:
    return Compared(plan=records.digest(plan), manifest=folder.digest(manifest.MANIFEST).sha256)


def _check_pins(before: Sequence[Source], now: Sequence[Source], *, hint: str) -> None:
    changed = [
        f"source {was.name} changed since the plan was made: it had {was.pin()}, now {found.pin()}"
        for was, found in zip(before, now, strict=True)
        if (was.modified, was.etag) != (found.modified, found.etag)
    ]
    if changed:
        raise SourceChangedError(few(changed, "\n  "), hint=hint)


# A finished dataset is not updated, so the hint of a build about a changed source would not help.
SOURCE_CHANGED = "put the old file back, with its time, or prepare the dataset again, with `restart=True` or elsewhere"
_PULL_AGAIN = "if it was pulled, run the same tokenmill pull command again: it copies what is damaged"
_PREPARE_AGAIN = "prepare it again, with `restart=True` here or into another folder, and compare the two manifests"


def reopen(folder: Storage, filter: str | None) -> tuple[Plan, BuildRecord]:
    """Plan and job of a finished build. Code that the folder names runs only if the caller names it, too."""
    if folder.exists(REQUEST):
        raise DatasetError(
            f"{folder.path} was imported, so it has no sources to rebuild it from",
            hint="run the same tokenmill import command again: it writes what is damaged, and keeps the rest",
        )
    if lost := [name for name in (receipts.PLAN, JOB) if not folder.exists(name)]:
        has_build = folder.exists(".build")
        what = lost[0] if has_build else "its .build folder"
        raise DatasetError(
            f"{folder.path} does not record where its sources are: {what} is missing",
            hint=_PREPARE_AGAIN if has_build else f"{_PULL_AGAIN}; otherwise {_PREPARE_AGAIN}",
        )
    try:
        plan, job = load_plan(folder), load_build_record(folder)
    except DatasetError as error:
        raise DatasetError(error.message, hint=_PREPARE_AGAIN) from None
    check_filter(plan.identity.get("filter"), filter, where=folder.path)
    if job.work.filter != filter:  # the folder may have been changed by others
        raise DatasetError(
            f"{folder.path} was built with the filter {job.work.filter!r}, not {filter!r}",
            hint="its .build names other code than `filter`: do not trust it, and prepare the dataset again",
        )
    return plan, job


def find_receipt(folder: Storage, plan: Plan, key: Key) -> Receipt | None:
    """A receipt, if it exists and can be read. Its pieces may no longer exist: they became shards."""
    try:
        receipt = read_receipt(folder, receipt_name(*key))
    except (DatasetError, BuildError):
        return None
    return receipt if (receipt.key, receipt.fingerprint) == (key, plan.fingerprint) else None


def load_all_receipts(folder: Storage, plan: Plan) -> Iterator[Receipt | None]:
    """The receipt of every unit, in order, read as they are consumed."""
    return folder.each(partial(find_receipt, folder, plan), ((unit, NO_LIMIT) for unit in range(len(plan.units))))


def dataset_receipts(folder: Storage, plan: Plan) -> Sequence[Receipt]:
    """The receipts of the dataset, in order. A token budget may leave out the last units."""

    def found() -> Iterator[Receipt]:
        known: dict[int, int] = {}
        budget = Budget(plan.identity.get("max_tokens"), known)
        for unit, receipt in enumerate(load_all_receipts(folder, plan)):
            known[unit] = require_receipt(receipt, unit).tokens
            if budget.is_spent():
                cut = budget.cut(plan)
                yield require_receipt(receipt if cut is None else find_receipt(folder, plan, key_of(cut)), unit)
                return
            yield require_receipt(receipt, unit)

    return records.make_table(Receipt, found(), many=records.MANY_LARGE)


def require_receipt(receipt: Receipt | None, unit: int) -> Receipt:
    """The receipt, which the unit must have."""
    if receipt is None:
        raise DatasetError(f"the receipt of unit {unit} is missing or damaged", hint="run tokenmill repair")
    return receipt


def key_of(task: UnitTask) -> Key:
    return task.unit.index, task.token_limit
