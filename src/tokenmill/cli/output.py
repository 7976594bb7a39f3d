"""Prints results, as a few lines or as JSON.

Texts from outside are printed with their control characters escaped. Light: what opens datasets is loaded by the
commands that do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tokenmill.cli.options import for_shell
from tokenmill.errors import DatasetError, RecipeError
from tokenmill.sizes import counted, few, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from tokenmill.build.api import PartStatus, PrepareResult
    from tokenmill.build.preview import PlanResult
    from tokenmill.dataset.dataset import Dataset
    from tokenmill.dataset.manifest import Manifest, Nodes
    from tokenmill.formats.base import DetectedFiles
    from tokenmill.formats.results import ExportResult, ImportResult
    from tokenmill.inspection.compare import Comparison
    from tokenmill.inspection.compare_tokenizers import TokenizerResult
    from tokenmill.inspection.doctor import DoctorReport
    from tokenmill.inspection.peek import Excerpt
    from tokenmill.inspection.report import ReportResult
    from tokenmill.loader.trace import Trace, TracedDocument
    from tokenmill.maintenance.push_pull import TransferResult
    from tokenmill.maintenance.verify import Problem, VerifyReport
    from tokenmill.storage.base import Storage


T = TypeVar("T")


def printable(text: str) -> str:
    """A text whose control characters cannot act on a terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)


def error(message: str, hint: str) -> None:
    print(f"error: {printable(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {printable(hint)}", file=sys.stderr)


def interrupted(saved: str, hint: str) -> None:
    """An interrupt is not an error: `Interrupted. 10 of 20 units are saved; run the same command to resume.`"""
    said = "; ".join(part for part in (saved, hint) if part not in ("", "interrupted"))
    print(f"Interrupted. {printable(said[:1].upper() + said[1:])}.", file=sys.stderr)


def as_json(record: Mapping[str, Any]) -> None:
    """A result for a program to read, in characters that the output can hold."""
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")  # a text in memory has none
    text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=not is_unicode)
    # What JSON leaves as it is, and a terminal might not; and halves of characters, as names of files may have them.
    print(re.sub("[\x7f-\x9f\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text))


def result_record(result: PrepareResult | ImportResult) -> dict[str, Any]:
    manifest = result.manifest
    return {
        "output": result.output,
        "already_complete": result.already_complete,
        "seconds": round(result.seconds, 3),
        "fingerprint": manifest.fingerprint,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "documents_read": manifest.documents_read,
        "dropped": manifest.dropped,
        "quarantined": manifest.quarantined,
        "dtype": manifest.dtype,
        "parity": manifest.parity,
        "splits": {
            name: {"tokens": split.tokens, "documents": split.documents, "shards": len(split.shards)}
            for name, split in manifest.splits.items()
        },
    }


def result(result: PrepareResult | ImportResult, *, tokens_per_second: int = 0, is_kept: bool = True) -> None:
    if not is_kept:
        _print(f"{result.output} keeps only the export; the dataset, as it was:")
    elif result.already_complete:
        _print(f"{result.output} is complete already: sizes and structure checked in {result.seconds:.1f} s")
    else:
        rate = f", {format_count(tokens_per_second)} tokens/s" if tokens_per_second else ""
        _print(f"{result.output} is done in {format_seconds(result.seconds)}{rate}")
    _totals(result)


def part(result: PrepareResult, part: PartStatus, *, tokens_per_second: int = 0) -> None:
    """A part of a build, and what has to be done next."""
    rate = f", {format_count(tokens_per_second)} tokens/s" if tokens_per_second else ""
    what = f"part {part.number}/{part.into} of {result.output}, {counted(part.units, 'unit')},"
    if result.already_complete:
        _print(f"{what} was complete already")
    else:
        _print(f"{what} is done in {format_seconds(result.seconds)}{rate}")
    _totals(result, has_shards=False)
    if part.missing_units:
        _print(f"  {counted(part.missing_units, 'unit')} of other parts are missing")
    else:
        _print(f"  all parts are complete: run `tokenmill join {shlex.quote(result.output)}`")


def part_record(part: PartStatus | None) -> dict[str, Any]:
    return {} if part is None else {"part": dataclasses.asdict(part)}


def _totals(result: PrepareResult | ImportResult, *, has_shards: bool = True) -> None:
    """The splits, what was dropped, and what was compared."""
    manifest = result.manifest
    shards = {name: (("shard", len(split.shards)),) if has_shards else () for name, split in manifest.splits.items()}
    for line in _split_lines(
        {
            name: (("token", split.tokens), ("document", split.documents), *shards[name])
            for name, split in manifest.splits.items()
        }
    ):
        _print(line)
    if manifest.dropped:
        dropped = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in manifest.dropped.items())
        _wrapped("dropped", dropped)
    if imported := manifest.identity.get("imported"):
        _wrapped("imported", _origin(imported))
    if manifest.parity.get("documents") and not result.already_complete:
        _wrapped("parity", _parity_of(manifest.parity))
    if manifest.quarantined:
        bad = counted(manifest.quarantined, "bad document")
        _print(f"  {bad}, listed in {result.output}/.build/rejects")


def _split_lines(splits: Mapping[str, Sequence[tuple[str, int]]]) -> Iterator[str]:
    """A line for each split, in columns as wide as what they have; totals that do not fit have a line of their own."""
    rows = [[name, *(counted(count, what) for what, count in totals)] for name, totals in _train_first(splits)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    for name, *totals in rows:
        columns = [f"{text:>{width}}" for text, width in zip(totals, widths[1:], strict=True)]
        line = f"  {name:<{widths[0]}}  {'  '.join(columns)}"
        yield line if len(line) <= _width() else f"  {name}\n    {', '.join(totals)}"


def _origin(imported: Mapping[str, Any]) -> str:
    """Which files a dataset was imported from."""
    files = few([f"{name} ({counted(tokens, 'token')})" for name, tokens in imported.get("files", {}).items()])
    return f"from {imported['layout']}" + (f": {files}" if files else "")


def _parity_of(parity: Mapping[str, Any]) -> str:
    sampled = f"{counted(parity['documents'], 'document')} ({format_bytes(parity['bytes'])}) of the sources"
    return f"{sampled} have the same tokens with {parity['reference']}"


def _width(otherwise: int = 10**6) -> int:
    """Columns of the terminal, or COLUMNS. Where there is neither, programs read lines as they are."""
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return max(_LEAST_COLUMNS, shutil.get_terminal_size().columns) if is_known else otherwise


def _wrapped(name: str, text: str) -> None:
    """A row of a name and a text, which continues below itself."""
    name = f"  {name:<10} "
    for number, line in enumerate(_lines(text, _width() - len(name))):
        _print(f"{name if not number else ' ' * len(name)}{line}")


def _lines(text: str, width: int) -> list[str]:
    """A text in lines of this width; lines of its own stay."""
    found = [textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()]
    return [line for lines in found for line in lines or [""]] or [""]


def nodes_record(nodes: Nodes | None) -> dict[str, Any]:
    """Which node has what. The numbers of a part's units, possibly a million, are left to `nodes.json`."""
    if nodes is None:
        return {}
    return {"nodes": [dataclasses.asdict(dataclasses.replace(place, units=())) for place in nodes.parts]}


def nodes(record: dict[str, Any]) -> None:
    """Which node has what."""
    for number, place in enumerate(record.get("nodes", ())):
        tokens = ", ".join(
            f"{counted(totals['tokens'], 'token')} of {name}" for name, totals in _train_first(place["splits"])
        )
        _print(f"  part {number:<5} {place['host']}:{place['path']}  {tokens}")


def written_report(result: ReportResult) -> None:
    _print(f"{result.path}: {format_bytes(result.num_bytes)} in {format_seconds(result.seconds)}")
    if result.card is not None:
        _print(f"{result.card}: the dataset card")


def location_of_report(path: str) -> None:
    _print(f"  report {path}")


def note(text: str) -> None:
    print(f"note: {printable(text)}", file=sys.stderr)


def export_record(result: ExportResult) -> dict[str, Any]:
    return {
        "output": result.output,
        "layout": result.layout,
        "already_complete": result.already_complete,
        "seconds": round(result.seconds, 3),
        "notes": list(result.notes),
        "checks": [{**dataclasses.asdict(check), "passed": check.has_passed} for check in result.checks],
        "files": {name: {"bytes": digest.bytes, "sha256": digest.sha256} for name, digest in result.files.items()},
    }


def exported(result: ExportResult) -> None:
    size = f"{counted(len(result.files), 'file')}, {format_bytes(result.num_bytes)}"
    if result.already_complete:
        _print(f"{result.output} is complete already: {size} hashed in {result.seconds:.1f} s")
    else:
        _print(f"{result.output} is done in {format_seconds(result.seconds)}: {size} of layout {result.layout}")


def checks(result: ExportResult) -> None:
    """The files with known checksums: PASS, FAIL or not compared; and what follows from it."""
    for check in result.checks:
        for line in check.lines():
            _print(f"  {line}")


def sentence(text: str) -> None:
    """A note, which continues below itself."""
    for number, line in enumerate(_lines(text[:1].upper() + text[1:], _width() - 4)):
        _print(f"  {'  ' if number else ''}{line}")


def moved(moved: TransferResult) -> None:
    whole = f"{counted(moved.files, 'file')}, {format_bytes(moved.num_bytes)}"
    did = (
        f"{moved.moved_files:,} of them, {format_bytes(moved.moved_bytes)}, moved" if moved.moved_files else "all there"
    )
    _print(f"{moved.target} is complete: {whole}; {did} in {format_seconds(moved.seconds)}")


def preview(preview: PlanResult) -> None:
    estimate = preview.estimate
    total = estimate.tokens if preview.max_tokens is None else min(preview.max_tokens, estimate.tokens)
    rows = [
        ("files", f"{preview.files:,} ({format_bytes(preview.source_bytes)})"),
        ("units", f"{preview.units:,}, {preview.units_done:,} done already"),
        (
            "tokens",
            f"about {format_count(total)}"
            + (f" \u00b1 {format_count(estimate.error)} (95 %)" if total == estimate.tokens else " (--max-tokens)"),
        ),
        ("documents", f"about {format_count(estimate.documents)} in all"),
        *(("split", f"{name}: {share * 100:.4g} % of documents") for name, share in preview.split.items()),
        ("disk", _disk(preview)),
        ("memory", _memory(preview)),
        ("time", _time(preview)),
    ]
    if preview.parity.get("documents"):
        rows.append(("parity", _parity_of(preview.parity)))
    if preview.scratch_free is not None:
        rows.append(("scratch", f"{format_bytes(preview.scratch_free)} free"))
    for name, text in rows:
        _wrapped(name, text)
    for what, texts in (("warning", preview.warnings), ("note", (*preview.notes, *preview.conflict))):
        for text in texts:
            for number, line in enumerate(_lines(f"{what}: {for_shell(text)}", _width() - 4)):
                _print(f"  {'  ' if number else ''}{line}")
    if preview.finished:
        _print("  the dataset is complete already")
    if preview.disk_missing:
        missing = f"{format_bytes(preview.disk_missing)} are missing on the output's disk"
        error(missing, "free some space, choose another output, or limit the work with --max-tokens or --sample")


def _memory(preview: PlanResult) -> str:
    free = "" if preview.memory_free is None else f", {format_bytes(preview.memory_free)} free"
    return f"at most {format_bytes(preview.memory)} for {counted(preview.workers, 'worker')}{free}"


def _time(preview: PlanResult) -> str:
    """For all workers and for one, and what the number is based on, so that its limits are clear."""
    if not preview.seconds:
        return "nothing is left to do"
    alone = f", {format_seconds(preview.seconds_alone)} with one" if preview.workers > 1 else ""
    seconds, workers = format_seconds(preview.seconds), counted(preview.workers, "worker")
    if preview.was_rehearsed:
        return f"about {seconds} with {workers}{alone}: an estimate from a short trial"
    return f"{seconds} or more with {workers}{alone}: encoding alone, without reading and writing"


def _disk(preview: PlanResult) -> str:
    layout = f" for the dataset, {format_bytes(preview.disk_layout)} for the layout" if preview.disk_layout else ""
    free = "" if preview.disk_free is None else f", {format_bytes(preview.disk_free)} free"
    missing = f": {format_bytes(preview.disk_missing)} are missing" if preview.disk_missing else ""
    return f"about {format_bytes(preview.disk_needed)} needed{layout}{free}{missing}"


def report(report: VerifyReport) -> None:
    if report.ok:
        hashed = f", {format_bytes(report.bytes_hashed)} hashed" if report.bytes_hashed else ""
        units = f", {counted(report.units_checked, 'unit')} tokenised again" if report.units_checked else ""
        of = f" of {report.what}" if report.what else ""
        _print(f"ok: {counted(report.files, 'file')}{of}{hashed}{units} in {report.seconds:.1f} s")
    else:
        for problem in report.problems:
            _print(f"bad: {problem.file}: {problem.what}")
        error(f"{counted(len(report.problems), 'problem')} in {report.path}", for_shell(report.hint))


def repaired(problems: tuple[Problem, ...], after: VerifyReport) -> None:
    for problem in problems:
        _print(f"was bad: {problem.file}: {problem.what}")
    if after.ok:
        _print(f"ok: {counted(len(problems), 'problem')} repaired" if problems else "ok: nothing to repair")
    else:
        report(after)


def dataset(record: dict[str, Any], split: str, texts: list[str] | None) -> None:
    if "tokens" not in record:
        _print(f"{record['path']}: no part of the dataset is on this machine")
        nodes(record)
        return
    tokenizer = record["tokenizer"]
    _print(f"{record['path']}: {format_count(record['tokens'])} tokens, {format_bytes(record['bytes'])}")
    _wrapped("kind", record["kind"])
    named = "not recorded" if tokenizer is None else f"{tokenizer['name']} (vocabulary {tokenizer['vocab_size']:,})"
    _wrapped("tokenizer", f"{named}, stored as {record['dtype']}")
    if record["parity"].get("documents"):
        _wrapped("parity", _parity_of(record["parity"]))
    splits = {
        name: [(what, totals[f"{what}s"]) for what in ("token", "document", "shard", "file") if f"{what}s" in totals]
        for name, totals in record["splits"].items()
    }
    for line in _split_lines(splits):
        _print(line)
    if record["imported"]:
        _wrapped("imported", _origin(record["imported"]))
    elif record["sources"]:
        _wrapped("sources", f"{record['sources']:,}, {counted(record['documents_read'], 'document')} read")
    for reason, count in record["dropped"].items():
        _wrapped("dropped", f"{count:,} {reason.replace('_', ' ')}")
    if "statistics" in record:
        _statistics(record["statistics"])
    nodes(record)
    if texts is None:
        _print("\nThe files do not record where documents end. tokenmill peek shows them with --tokenizer NAME.")
    for index, text in enumerate(texts or ()):
        _print(f"\n{split} document {index}:")
        _excerpt_of_text(text, index, split, record["path"])


def _statistics(record: Mapping[str, Any]) -> None:
    """How long documents are, and what each source gave."""
    for name, lengths in _train_first(record["lengths"]):
        median, most = (f"{lengths[key]:,}" for key in ("median", "longest"))
        _wrapped("lengths", f"{name}: {lengths['shortest']:,} to {most} tokens, half of the documents up to {median}")
    sources = record["sources"]
    if len(sources) > 1:
        _print("")
        rows = [
            [shortened(one["source"]), f"{one['documents']:,}", f"{one['tokens']:,}", f"{one['bytes_per_token']:.2f}"]
            for one in sources[:_SHOWN_VALUES]
        ]
        _text_table(["source", "documents", "tokens", "bytes/token"], rows)
        if len(sources) > _SHOWN_VALUES:
            _print(f"  and {len(sources) - _SHOWN_VALUES:,} more: --json has all")


def _excerpt_of_text(text: str, index: int, split: str, path: str) -> None:
    """The first lines of a text. Marks lines that are cut, and says where the rest is shown."""
    lines = printable(text).strip().splitlines()
    room = _width(otherwise=_PIPED_COLUMNS) - len("  | ")
    for line in lines[:_SHOWN_LINES]:
        _print(f"  | {line if len(line) <= room else f'{line[: room - len(_CUT)]}{_CUT}'}")
    if len(lines) > _SHOWN_LINES:
        more = counted(len(lines) - _SHOWN_LINES, "more line")
        _print(f"  [{more}: tokenmill peek {shlex.quote(path)} --split {split} --document {index}]")


def excerpt_record(excerpt: Excerpt) -> dict[str, Any]:
    return {**dataclasses.asdict(excerpt), "text": excerpt.text}


def excerpts(found: Iterable[Excerpt], *, with_ids: bool) -> None:
    """Texts with a mark between tokens: in colour on a terminal, else a thin line."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for number, excerpt in enumerate(found):
        what = f"document {excerpt.document:,}" if excerpt.sample is None else f"sample {excerpt.sample:,}"
        inside = "" if excerpt.sample is None else f", in document {excerpt.document:,}"
        size = counted(excerpt.num_tokens, "token")
        if number:
            console.print()
        console.print(f"{excerpt.split} {what}: {size} from token {excerpt.offset:,}{inside}")
        for line in _id_lines(excerpt) if with_ids else _text_lines(excerpt, console):
            console.print(line)
        if any(piece.ids and not piece.text and not piece.ends_document for piece in excerpt.pieces[1:]):
            console.print("  [ids, because the files do not name their tokenizer: --tokenizer NAME decodes them]")
        if excerpt.num_cut:
            console.print(f"  [{counted(excerpt.num_cut, 'more token')}: --max-tokens {excerpt.num_tokens} shows all]")


def _id_lines(excerpt: Excerpt) -> Iterator[str]:
    document = excerpt.document
    for piece in excerpt.pieces:
        ids = " ".join(map(str, piece.ids))
        if piece.ends_document:
            yield f"  {ids:>8}  end of document {document:,}"
            document += 1
        else:
            yield f"  {ids:>8}  {printable(json.dumps(piece.text, ensure_ascii=False))}"


def _text_lines(excerpt: Excerpt, console: Any) -> Iterator[Any]:
    """Lines that fit. Every second token is in colour, or tokens have a thin line between them."""
    from rich.text import Text

    def wrapped(line: Any) -> Iterator[Any]:
        for part in line.wrap(console, console.width - 2):
            part.rstrip()
            yield Text("  ").append_text(part)

    document, line = excerpt.document, Text()
    for number, piece in enumerate(excerpt.pieces):
        if piece.ends_document:
            if line:
                yield from wrapped(line)
            ids = f" ({piece.ids[0]})" if piece.ids else ""
            yield Text(f"  -- end of document {document:,}{ids}", style="dim")
            document, line = document + 1, Text()
            continue
        if line and not console.is_terminal:
            line.append("\u258f")
        text = piece.text or " ".join(map(str, piece.ids))  # ids, if the tokenizer is not known
        line.append(printable(text), style="cyan" if number % 2 else "")
    if line:
        yield from wrapped(line)


def trace_record(found: Trace) -> dict[str, Any]:
    """Parts name their documents by number: `documents` has the rest."""
    record = dataclasses.asdict(found)
    for sample in record["samples"]:
        for part in sample["parts"]:
            part["document"] = part["document"]["document"]
    return record


def traced_samples(found: Trace) -> None:
    """Samples, and the documents that they have parts of."""
    for number, one in enumerate(found.samples):
        if number:
            _print("")
        at = "" if one.step is None else f"step {one.step:,}, rank {one.rank:,}, row {one.row:,}: "
        component = "" if one.component is None else f" of {one.component}"
        place = "not in this epoch" if one.position is None else f"position {one.position:,} of the stream"
        _print(f"{at}sample {one.sample:,}{component}, {place}")
        rows = [
            [f"{part.num_tokens:,}", f"{part.document.document:,}", f"{part.offset:,}", _source(part.document)]
            for part in one.parts
        ]
        _table(["tokens", "of document", "from token", "source"], rows)


def traced_document(found: Trace) -> None:
    """A document, and the samples that it has tokens in."""
    (document,) = found.documents
    source = _source(document)
    if document.source is not None and document.document is None:
        _print(f"{source}: dropped, {str(document.source.dropped).replace('_', ' ')}")
        return
    size = counted(document.num_tokens, "token")
    _print(f"{document.split} document {document.document:,}: {size} from token {document.first_token:,}")
    _print(f"  source  {source}")
    _print(f"  file    {document.file}, token {document.file_token:,}")
    rows = []
    for one in found.samples:
        places = (one.sample, one.position, one.step, one.rank, one.row)
        for part in one.parts:
            numbers = (*places, part.column, part.num_tokens)
            rows.append(["-" if number is None else f"{number:,}" for number in numbers])
    if rows:
        _table(["sample", "position", "step", "rank", "row", "column", "tokens"], rows)


def _source(document: TracedDocument) -> str:
    return "not recorded" if document.source is None else str(document.source)


def _table(names: list[str], rows: list[list[str]]) -> None:
    """Columns of numbers, and texts in a last column `source`."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    if names[-1] == "source":
        widths[-1] = 0
    for row in (names, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        _print(f"  {'  '.join(cells)}")


def comparison(found: Comparison) -> None:
    """What differs, each with the value of A and that of B below each other."""
    if found.equal:
        _print(f"{found.a} and {found.b} are equal")
    else:
        _print(f"A  {found.a}\nB  {found.b}")
    for title, values in (("settings", found.settings), ("sources", found.sources), ("counts", found.counts)):
        if values:
            _print(f"\n{title}")
        for value in values[:_SHOWN_VALUES]:
            _print(f"  {value.what}")
            _labelled("A", _value(value.a))
            _labelled("B", _value(value.b))
        if len(values) > _SHOWN_VALUES:
            _print(f"  and {len(values) - _SHOWN_VALUES:,} more: --json has all")
    for one in found.documents:
        at = "" if one.offset is None else f", from token {one.offset:,}"
        _print(f"\nfirst difference in {one.split}: document {one.document:,}{at}")
        for name, side in (("A", one.a), ("B", one.b)):
            if side is None:
                _labelled(name, "has no such document")
                continue
            _labelled(name, json.dumps(side.text, ensure_ascii=False))
            _labelled(" ", counted(side.num_tokens, "token") + ("" if side.source is None else f", {side.source}"))
    for text in found.compared:
        _print(text if found.equal else f"\n{text}")


def _labelled(label: str, text: str) -> None:
    """A text behind a letter, which continues below itself."""
    for number, line in enumerate(_lines(text, _width() - 7)):
        _print(f"    {' ' if number else label}  {line}")


def _value(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if type(value) is int else value if isinstance(value, str) else json.dumps(value)


def tokenizer_record(one: TokenizerResult) -> dict[str, Any]:
    ratios = {"bytes_per_token": one.total.bytes_per_token, "tokens_per_word": one.total.tokens_per_word}
    sources = {
        name: {**dataclasses.asdict(part), "bytes_per_token": part.bytes_per_token}
        for name, part in one.sources.items()
    }
    return {**dataclasses.asdict(one), "total": {**dataclasses.asdict(one.total), **ratios}, "sources": sources}


def tokenizers(found: Sequence[TokenizerResult]) -> None:
    """A row for each tokenizer, then the bytes per token of each source."""
    total, names = found[0].total, [shortened(one.name) for one in found]
    sample = f"{counted(total.documents, 'document')}, {format_bytes(total.bytes)}"
    _print(f"a sample of {sample} from {counted(len(found[0].sources), 'source')}")
    rows = [
        [name, f"{one.vocab_size:,}", f"{one.total.bytes_per_token:.2f}", f"{one.total.tokens_per_word:.2f}",
         _rate_of_encoding(one)]
        for name, one in zip(names, found, strict=True)
    ]  # fmt: skip
    _text_table(["tokenizer", "vocabulary", "bytes/token", "tokens/word", "speed"], rows)
    for one in found:
        if one.note:
            _wrapped(shortened(one.name), one.note)
    if len(found[0].sources) > 1:
        _print("\nbytes/token by source")
        sources = list(found[0].sources)
        rows = [
            [shortened(source), *(f"{one.sources[source].bytes_per_token:.2f}" for one in found)]
            for source in sources[:_SHOWN_VALUES]
        ]
        _text_table(["source", *names], rows)
        if len(sources) > _SHOWN_VALUES:
            _print(f"  and {len(sources) - _SHOWN_VALUES:,} more: --json has all")


_SHOWN_VALUES, _SHOWN_NAME = 20, 24
_NO_WORK = 50_000_000_000


def _rate_of_encoding(one: TokenizerResult) -> str:
    """Bytes are their own ids: there is nothing to encode."""
    return "-" if one.bytes_per_second > _NO_WORK else f"{format_bytes(one.bytes_per_second)}/s"


def shortened(name: str) -> str:
    """The end of a path, which tells more than its beginning."""
    return name if len(name) <= _SHOWN_NAME else f"...{name[3 - _SHOWN_NAME :]}"


def _text_table(names: list[str], rows: list[list[str]]) -> None:
    """Columns of numbers behind a first column of names."""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    for row in (names, *rows):
        cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
        _print(f"  {'  '.join(cells)}")


def doctor_report(report: DoctorReport) -> None:
    """A line for each check, which continues on the next line if the terminal is narrow."""
    width = shutil.get_terminal_size().columns
    names = max(len(check.name) for check in report.checks)
    for check in report.checks:
        begin, indent = f"{check.status:<7}  {check.name:<{names}}  ", " " * (names + 11)
        texts = [check.found, f"-> {for_shell(check.hint)}"] if check.hint else [check.found]
        for number, text in enumerate(texts):
            _print(textwrap.fill(printable(text), width, initial_indent=indent if number else begin,
                                 subsequent_indent=indent, break_on_hyphens=False))  # fmt: skip
    numbers = [f"{report.count('ok')} ok"]
    if warnings := report.count("warning"):
        numbers.append(counted(warnings, "warning"))
    numbers.append(f"{report.count('failed')} failed")
    _print(f"{', '.join(numbers)}, in {report.seconds:.1f} s")


def rates(record: dict[str, Any]) -> None:
    shape = f"{record['batch_size']} x {record['seq_len']}"
    samples = counted(record["samples"], "sample")
    _print(f"{record['path']}: batches of {shape} from {samples} of {record['split']}, shuffled")
    _print(f"  {format_count(record['tokens_per_second'])} tokens/s, {record['batches_per_second']:,.0f} batches/s")
    _print(f"  first batch {record['first_batch_ms']:.1f} ms after opening")


def _train_first(splits: Mapping[str, T]) -> list[tuple[str, T]]:
    """Records have their names in alphabetical order."""
    return sorted(splits.items(), key=lambda split: (split[0] != "train", split[0]))


def _print(text: str) -> None:
    """Names and reasons come from records that anybody may have written."""
    print(printable(text))


SHOWN_IDS = 20
_SHOWN_LINES = 8
_LEAST_COLUMNS = 40
_PIPED_COLUMNS = 110
_CUT = " ..."


def describe(path: str) -> dict[str, Any]:
    """A dataset in numbers, and which node has which part. Only the nodes if no part is here."""
    from tokenmill.dataset.folder_kinds import kind_of
    from tokenmill.dataset.manifest import MANIFEST, load_nodes
    from tokenmill.formats.open import open as open_dataset
    from tokenmill.storage.base import open_folder

    folder = open_folder(path)
    nodes = nodes_record(load_nodes(folder))
    if nodes and not folder.exists(MANIFEST):
        return {"path": folder.path, **nodes}
    opened = open_dataset(path)
    manifest, detected = opened.manifest, getattr(opened, "detected", None)
    if detected is not None:
        return {"path": folder.path, **_describe_files(folder, opened, detected)}
    return {
        **nodes,
        "path": folder.path,
        "kind": kind_of(folder).what,
        "imported": manifest.identity.get("imported", {}),
        "fingerprint": manifest.fingerprint,
        "tokenizer": manifest.tokenizer,
        "parity": manifest.parity,
        "dtype": manifest.dtype,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "documents_read": manifest.documents_read,
        "dropped": manifest.dropped,
        "sources": len(manifest.sources),
        "bytes": sum(digest.bytes for digest in manifest.all_files().values()),
        "splits": {
            name: {"tokens": split.tokens, "documents": split.documents, "shards": len(split.shards)}
            for name, split in manifest.splits.items()
        },
        **_describe_statistics(folder, manifest),
    }


def _describe_statistics(folder: Storage, manifest: Manifest) -> dict[str, Any]:
    """Lengths by split and totals by source, if the dataset has statistics: imports and older ones have none."""
    import numpy as np

    from tokenmill.dataset.statistics import LENGTH_EDGES, load_statistics

    found = load_statistics(folder, manifest)
    if found is None:
        return {}
    lengths = {}
    for name, split in found.splits.items():
        if sum(split.documents):
            counts = np.cumsum(split.lengths)
            bin = int(np.searchsorted(counts, -(-int(counts[-1]) // 2)))
            # The last length of the bin: lengths inside of it are not told apart.
            last = int(LENGTH_EDGES[bin + 1]) - 1 if bin + 1 < len(LENGTH_EDGES) else split.longest
            median = min(last, split.longest)
            lengths[name] = {"shortest": split.shortest, "median": median, "longest": split.longest}
    sums = {
        what: np.sum([getattr(split, what) for split in found.splits.values()], axis=0).tolist()
        for what in ("documents", "tokens", "bytes", "characters")
    }
    sources = [
        {"source": source.name, **{what: sums[what][number] for what in sums},
         "bytes_per_token": sums["bytes"][number] / max(1, sums["tokens"][number])}
        for number, source in enumerate(manifest.sources)
    ]  # fmt: skip
    return {"statistics": {"lengths": lengths, "sources": sources}}


def _describe_files(folder: Storage, opened: Dataset, detected: DetectedFiles) -> dict[str, Any]:
    """Files of another layout in numbers. How many documents they have is not known without reading them all."""
    from tokenmill.dataset.bin_idx import numpy_dtype
    from tokenmill.dataset.folder_kinds import kind_of

    kind = kind_of(folder)
    files = [file for found in detected.files.values() for file in found]
    itemsize = numpy_dtype(detected.dtype).itemsize
    return {
        "kind": kind.what if kind.layout else f"files of layout {detected.layout}",
        "imported": {},
        "fingerprint": opened.manifest.fingerprint,
        "tokenizer": None,
        "parity": {},
        "dtype": detected.dtype,
        "tokens": opened.manifest.tokens,
        "sources": 0,
        "dropped": {},
        "bytes": sum(file.offset + file.num_tokens * itemsize for file in files),
        "splits": {
            name: {"tokens": sum(file.num_tokens for file in found), "files": len(found)}
            for name, found in detected.files.items()
        },
    }


def first_texts(path: str, split: str | None, count: int) -> tuple[str, list[str] | None]:
    """The first documents of a split, decoded; as ids where no tokenizer is known. Tells which split it is.

    There are no texts if it is not known where documents end.
    """
    from tokenmill.formats.open import open as open_dataset
    from tokenmill.storage.base import open_folder
    from tokenmill.tokenizers.engine import open_engine
    from tokenmill.tokenizers.spec import from_dataset

    dataset = open_dataset(path)
    split = split or next((name for name in ("train", *dataset.splits) if name in dataset.splits), "train")
    if split not in dataset.splits:
        raise RecipeError(f"there is no split {split!r}", hint=f"there are {', '.join(dataset.splits)}")
    description = dataset.manifest.tokenizer
    try:
        documents = [dataset[split].document(i) for i in range(min(count, dataset[split].num_documents))]
    except DatasetError:
        if description["kind"] == "unknown" and description["eot_id"] is None:
            return split, None
        raise
    if description["kind"] == "unknown":
        return split, [" ".join(map(str, tokens[:SHOWN_IDS].tolist())) for tokens in documents]
    content = open_folder(dataset.path).read(description["file"]) if description["file"] else None
    engine = open_engine(from_dataset(description, content))
    return split, [engine.decode(tokens[tokens != description["eot_id"]]) for tokens in documents]
