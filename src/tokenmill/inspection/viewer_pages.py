"""What the pages of the viewer show. Each method takes the fields of a form as texts, and returns HTML.

    /            totals, splits, sources, recipe        /step      the rows that a rank sees at a step
    /documents   beginnings of documents, in order      /search    documents that contain a text
    /document    one document, token by token           /text      a text with one tokenizer and another
    /sample      one sample, token by token             /beside    a document of two datasets
                                                        /build     a build in progress

Every page reads a bounded part of the dataset, so its time does not depend on the dataset's size. A search reads for a
while, then offers to continue. Templates escape every text; control characters are shown as escapes.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import numpy as np

from tokenmill import arguments
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.errors import DatasetError, RecipeError, TokenmillError
from tokenmill.formats.open import open as open_dataset
from tokenmill.inspection.peek import Excerpt, ExcerptReader, Piece, open_reader
from tokenmill.loader.batches import IGNORED
from tokenmill.sizes import format_bytes, format_count, format_seconds
from tokenmill.storage.base import is_url

LISTED_DOCUMENTS, BEGINNING_TOKENS, PAGE_TOKENS = 40, 48, 2048
SHOWN_ROWS, ROW_TOKENS, MAX_BATCH_TOKENS = 4, 1024, 1 << 22
SEARCH_SECONDS, SEARCH_HITS, MAX_QUERY_CHARS = 1.5, 30, 1000
BEFORE_CHARS, AFTER_CHARS = 40, 120
MAX_SOURCES, MAX_TEXT_CHARS, EVENT_BYTES = 200, 20_000, 1 << 18
_EVENTS, _MANIFEST = ".build/events.jsonl", "dataset.json"
_PACKINGS = ("concat", "document_start", "best_fit", "padded", "truncated")
_ORDERS = ("shuffled", "sequential", "random")
_VISIBLE = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}
Given = Mapping[str, str]
Decode = Callable[[Sequence[int]], str]


def open_pages(path: str, *, beside: str | None, tokenizer: str | None) -> Pages:
    """The pages of a dataset, or of a build that has no manifest yet."""
    try:
        dataset: Dataset | None = open_dataset(path)
    except DatasetError:
        if not os.path.exists(os.path.join(path, _EVENTS)):
            raise
        dataset = None
    other = None if beside is None else open_dataset(beside)
    return Pages(path, dataset, other, arguments.text_or_none("tokenizer", tokenizer))


@dataclass(frozen=True, slots=True)
class Shown:
    """A piece as a page shows it. A pointer on it tells what it is: `id 1279 · bytes 20 3c`."""

    text: str
    about: str
    kind: str


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces of one document in a row. Padding has document -1."""

    document: int
    pieces: list[Shown]


class Pages:
    """The pages of one viewer. One request at a time reads: tokenizers and maps are shared."""

    def __init__(self, path: str, dataset: Dataset | None, beside: Dataset | None, tokenizer: str | None) -> None:
        self._path = path
        self._dataset = dataset
        self._beside = beside
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._readers: dict[tuple[str, int], ExcerptReader] = {}
        self._engines: list[tuple[str, ExcerptReader, Any]] | None = None
        self._charts: list[tuple[str, str]] | None = None
        self._environment = _environment()
        if dataset is not None and tokenizer is not None:
            open_reader(dataset, dataset.splits[0], max_tokens=1, tokenizer=tokenizer)  # refused now, if unknown

    def overview(self, _: Given) -> str:
        if self._dataset is None:
            return self.build({})
        manifest = self._dataset.manifest
        sources = list(itertools.islice(manifest.sources, MAX_SOURCES))
        facts = [
            ("tokens", f"{manifest.tokens:,}"),
            ("documents", f"{manifest.documents:,}"),
            ("mean length", f"{manifest.tokens / max(manifest.documents, 1):,.0f} tokens"),
            ("size on disk", format_bytes(sum(digest.bytes for _, digest in manifest.each_file()))),
            ("tokenizer", f"{manifest.tokenizer['name']}, {manifest.tokenizer['vocab_size']:,} ids"),
            ("token type", manifest.dtype),
        ]
        return self._render(
            "overview.html",
            facts=facts,
            split_rows=[(name, split.tokens, split.documents, len(split.shards)) for name, split in self._ordered()],
            dropped=sorted(manifest.dropped.items(), key=lambda drop: -drop[1]),
            sources=sources,
            num_sources=len(manifest.sources),
            parity=manifest.parity,
            charts=self._draw_charts(),
            recipe=[
                (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True))
                for name, value in sorted(manifest.identity.items())
                if value is not None
            ],
            fingerprint=manifest.fingerprint,
        )

    def documents(self, given: Given) -> str:
        split = self._split(given)
        tokens = self._open()[split]
        first = min(_number(given, "from", 0), max(0, tokens.num_documents - 1))
        numbers = range(first, min(first + LISTED_DOCUMENTS, tokens.num_documents))
        with self._lock:
            reader = self._reader(split, BEGINNING_TOKENS)
            rows = [(excerpt, _one_line(excerpt)) for excerpt in map(reader.document, numbers)]
        return self._render(
            "documents.html", split=split, rows=rows, first=first, total=tokens.num_documents, step=LISTED_DOCUMENTS
        )

    def document(self, given: Given) -> str:
        split, number = self._split(given), _number(given, "n", 0)
        tokens = self._open()[split]
        _check(number, tokens.num_documents, "document")
        size = len(tokens.document(number))
        skip = min(_number(given, "skip", 0), max(0, size - 1))
        with self._lock:
            excerpt = self._reader(split, PAGE_TOKENS).document(number, skip=skip)
        return self._render(
            "document.html",
            split=split,
            number=number,
            size=size,
            skip=skip,
            page_tokens=PAGE_TOKENS,
            total=tokens.num_documents,
            offset=excerpt.offset,
            runs=_runs(excerpt),
            source=_source(tokens, number),
            has_beside=self._beside is not None,
        )

    def sample(self, given: Given) -> str:
        split, number = self._split(given), _number(given, "n", 0)
        seq_len = _number(given, "seq_len", 1024, least=1, most=1 << 20)
        total = self._open()[split].num_tokens // seq_len
        _check(number, total, "sample")
        with self._lock:
            excerpt = self._reader(split, PAGE_TOKENS).sample(number, seq_len)
        return self._render(
            "sample.html",
            split=split,
            number=number,
            seq_len=seq_len,
            total=total,
            excerpt=excerpt,
            runs=_runs(excerpt),
        )

    def step(self, given: Given) -> str:
        """The rows of one rank at one step, from the same loader that a trainer uses."""
        form = _StepForm.of(given, self._split(given))
        with self._lock:
            shown = self._rows(form)
        return self._render("step.html", form=form, packings=_PACKINGS, orders=_ORDERS, **shown)

    def search(self, given: Given) -> str:
        """Documents that contain a text, from one document on, as far as the time of one request takes it."""
        split, query = self._split(given), given.get("q", "")[:MAX_QUERY_CHARS]
        first = _number(given, "from", 0)
        tokens, dataset = self._open()[split], self._open()
        hits: list[tuple[int, str, str, str]] = []
        number, deadline = first, time.monotonic() + SEARCH_SECONDS
        needle = query.casefold()
        if needle:
            with self._lock:
                decode = self._decoder(dataset)
                while number < tokens.num_documents and len(hits) < SEARCH_HITS and time.monotonic() < deadline:
                    text = decode(tokens.document(number).tolist())
                    if (at := text.casefold().find(needle)) >= 0:
                        hits.append((number, *_snippet(text, at, len(query))))
                    number += 1
        return self._render(
            "search.html", split=split, query=query, hits=hits, first=first, stop=number, total=tokens.num_documents
        )

    def text(self, given: Given) -> str:
        """One text with the dataset's tokenizer, and with the other tokenizers that the viewer was given."""
        text = given.get("text", "")
        if len(text) > MAX_TEXT_CHARS:
            raise RecipeError(f"a text of {len(text):,} characters", hint=f"at most {MAX_TEXT_CHARS:,} are shown")
        text = text.replace("\r\n", "\n")  # a form sends these
        with self._lock:
            self._engines = self._engines or list(self._open_engines())
            columns = [(name, *_encoded(reader, engine, text)) for name, reader, engine in self._engines]
        num_bytes = len(text.encode("utf-8", "replace"))
        return self._render("text.html", text=text, columns=columns, num_bytes=num_bytes, most=MAX_TEXT_CHARS)

    def beside(self, given: Given) -> str:
        """The same document number of both datasets."""
        if self._beside is None:
            raise RecipeError("there is no second dataset", hint="start the viewer with `beside`")
        split, number = self._split(given), _number(given, "n", 0)
        columns: list[tuple[str, Excerpt | None, list[Run]]] = []
        for dataset in (self._open(), self._beside):
            if split not in dataset or number >= dataset[split].num_documents:
                columns.append((dataset.path, None, []))
                continue
            with self._lock:
                excerpt = open_reader(dataset, split, max_tokens=PAGE_TOKENS).document(number)
            columns.append((dataset.path, excerpt, _runs(excerpt)))
        first, second = (excerpt for _, excerpt, _ in columns)
        same = first is not None and second is not None and (first.ids, first.num_cut) == (second.ids, 0)
        return self._render("beside.html", split=split, number=number, columns=columns, same=same)

    def build(self, _: Given) -> str:
        """How far the build in this folder is, by its own log."""
        events = _read_events(os.path.join(self._path, _EVENTS))
        nothing: dict[str, Any] = {}
        latest = next((event for event in reversed(events) if event.get("kind") == "progress"), nothing)
        ended = next((event for event in reversed(events) if event.get("kind") in ("finished", "start")), nothing)
        is_done = ended.get("kind") == "finished"
        total, done = latest.get("total_bytes") or 0, latest.get("bytes") or 0
        left = latest.get("seconds_left")
        facts = [
            ("state", "finished" if is_done else f"last event {format_seconds(_age(events))} ago"),
            ("units", f"{latest.get('total_units' if is_done else 'units', 0):,} of {latest.get('total_units', 0):,}"),
            ("documents", f"{latest.get('documents', 0):,}"),
            ("tokens", f"{latest.get('tokens', 0):,}"),
            ("speed", f"{format_count(latest.get('tokens_per_second') or 0)} tokens/s"),
            ("workers", f"{latest.get('workers', 0):,}"),
            ("time left", "none" if is_done else format_seconds(left) if left is not None else "not known yet"),
        ]
        return self._render(
            "build.html",
            facts=facts,
            share=100 if is_done else min(100, round(100 * done / total)) if total else 0,
            is_done=is_done,
            has_log=bool(events),
            events=[_event_line(event) for event in reversed(events) if event.get("kind") != "progress"][:30],
        )

    def find(self, given: Given) -> str:
        """The address of what the form in the header names."""
        split, what = self._split(given), given.get("what", "document")
        if what == "source":
            return self._find_source(given.get("n", ""))
        number = _number(given, "n", 0)
        if what not in ("document", "sample", "step"):
            raise RecipeError(f"{what!r} cannot be opened", hint="open a document, a sample, a step or a source")
        name = "step" if what == "step" else "n"
        return f"/{what}?{urlencode({'split': split, name: number})}"

    def _find_source(self, source: str) -> str:
        """The address of the document at a position of a source, such as a.parquet:12."""
        path, _, position = source.strip().rpartition(":")
        if not path:
            raise RecipeError(f"source is {arguments.show(source)}", hint="write it like a.parquet:12")
        with self._lock:
            row = self._open().find(path, _number({"position": position}, "position", 0))
        if row.split is None or row.document is None:
            raise RecipeError(f"{row} was dropped: {str(row.dropped).replace('_', ' ')}", hint="choose another one")
        return f"/document?{urlencode({'split': row.split, 'n': row.document})}"

    def refusal(self, error: TokenmillError) -> str:
        return self._render("refusal.html", message=error.message, hint=error.hint)

    def _draw_charts(self) -> list[tuple[str, str]]:
        """Those of the report, each with its heading. They are drawn once: a finished dataset does not change."""
        if self._charts is None:
            from tokenmill.inspection.report import ReportFacts, dataset_folder

            dataset = self._open()
            with self._lock:
                facts = ReportFacts(dataset, dataset_folder(self._path), is_remote=is_url(self._path))
                drawn = [
                    ("How long documents are", facts.length_chart()),
                    ("Tokens by source", facts.source_chart()),
                    ("Token frequencies by rank", facts.rank_chart()),
                    ("Throughput of the build", facts.speed_chart()),
                ]
            self._charts = [(heading, chart) for heading, chart in drawn if chart]
        return self._charts

    def _open(self) -> Dataset:
        if self._dataset is None:
            raise DatasetError("this build has not finished", hint="start the viewer again when it has")
        return self._dataset

    def _ordered(self) -> list[tuple[str, Any]]:
        return sorted(self._open().manifest.splits.items(), key=lambda split: (split[0] != "train", split[0]))

    def _split(self, given: Given) -> str:
        dataset = self._open()
        name = given.get("split") or next((name for name, _ in self._ordered()), "")
        if name not in dataset:
            raise RecipeError(f"there is no split {name!r}", hint=f"there are {', '.join(dataset.splits) or 'none'}")
        return name

    def _reader(self, split: str, max_tokens: int) -> ExcerptReader:
        dataset = self._open()
        key = (split, max_tokens)
        if key not in self._readers:
            named = self._tokenizer if dataset.manifest.tokenizer["kind"] == "unknown" else None
            self._readers[key] = open_reader(dataset, split, max_tokens=max_tokens, tokenizer=named)
        return self._readers[key]

    def _decoder(self, dataset: Dataset) -> Decode:
        if dataset.manifest.tokenizer["kind"] != "unknown":
            return dataset.decode
        if self._tokenizer is None:
            raise RecipeError(
                "these files do not say what their tokenizer is", hint="start the viewer with `tokenizer`"
            )
        reader = self._reader(next(iter(dataset)), PAGE_TOKENS)
        return lambda ids: "".join(piece.text for piece in reader.pieces(ids, is_ended=False))

    def _source(self, split: str, number: int) -> None:
        """Where a document came from."""
        return

    def _rows(self, form: _StepForm) -> dict[str, Any]:
        from tokenmill.loader.loader import DataLoader

        loader = DataLoader(
            self._open(),
            form.seq_len,
            form.batch_size,
            split=form.split,
            packing=form.packing,  # type: ignore[arg-type]  # checked by the loader
            order=form.order,  # type: ignore[arg-type]  # as above
            seed=form.seed,
            rank=form.rank,
            world_size=form.world_size,
            fields=("document_ids", "sample_index"),
            prefetch=0,
        )
        loader.load_state_dict({**loader.state_dict(), "samples_seen": loader.seen_after(0, form.step)})
        epoch = loader.epoch
        batch = next(iter(loader))
        reader = self._reader(form.split, ROW_TOKENS)
        rows = []
        for row in range(form.row, min(form.row + SHOWN_ROWS, form.batch_size)):
            ids, documents, labels = (batch[name][row][:ROW_TOKENS] for name in ("input_ids", "document_ids", "labels"))
            rows.append((row, int(batch["sample_index"][row]), _runs_of_row(reader, ids, documents, labels == IGNORED)))
        return {"rows": rows, "epoch": epoch, "num_samples": loader.num_samples, "shown_rows": SHOWN_ROWS}

    def _open_engines(self) -> Iterator[tuple[str, ExcerptReader, Any]]:
        """The tokenizers to compare: that of the dataset, and the one that the viewer was given."""
        from tokenmill.tokenizers.engine import open_engine
        from tokenmill.tokenizers.spec import from_dataset, resolve

        dataset = self._open()
        for opened in (dataset, self._beside):
            if opened is None or opened.manifest.tokenizer["kind"] == "unknown":
                continue
            description, content = opened.manifest.tokenizer, None
            if description["file"]:
                with open(os.path.join(opened.path, description["file"]), "rb") as file:
                    content = file.read()
            reader = open_reader(opened, opened.splits[0], max_tokens=PAGE_TOKENS)
            yield description["name"], reader, open_engine(from_dataset(description, content))
        if self._tokenizer is not None:
            reader = open_reader(dataset, dataset.splits[0], max_tokens=PAGE_TOKENS, tokenizer=self._tokenizer)
            yield self._tokenizer, reader, open_engine(resolve(self._tokenizer))

    def _render(self, template: str, **shown: Any) -> str:
        dataset = self._dataset
        common = {
            "path": self._path,
            "splits": [] if dataset is None else [name for name, _ in self._ordered()],
            "has_build": os.path.exists(os.path.join(self._path, _EVENTS)),
            "is_open": dataset is not None,
            "split": "train",
            "here": template.removesuffix(".html"),
        }
        html: str = self._environment.get_template(template).render(**{**common, **shown})
        return html


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepForm:
    """The settings of a loader, as the form of the step page has them."""

    split: str
    step: int
    rank: int
    world_size: int
    batch_size: int
    seq_len: int
    seed: int
    order: str
    packing: str
    row: int

    @classmethod
    def of(cls, given: Given, split: str) -> _StepForm:
        world_size = _number(given, "world_size", 1, least=1, most=1 << 20)
        batch_size = _number(given, "batch_size", 8, least=1, most=1 << 16)
        seq_len = _number(given, "seq_len", 1024, least=1, most=1 << 20)
        if batch_size * seq_len > MAX_BATCH_TOKENS:
            raise RecipeError(
                f"a batch of {batch_size * seq_len:,} tokens", hint=f"the viewer shows up to {MAX_BATCH_TOKENS:,}"
            )
        return cls(
            split=split,
            step=_number(given, "step", 0, most=1 << 40),
            rank=_number(given, "rank", 0, most=world_size - 1),
            world_size=world_size,
            batch_size=batch_size,
            seq_len=seq_len,
            seed=_number(given, "seed", 0),
            order=given.get("order", _ORDERS[0]),
            packing=given.get("packing", _PACKINGS[0]),
            row=min(_number(given, "row", 0), batch_size - 1),
        )

    def at(self, **changed: int) -> str:
        """The address of the page with other settings."""
        names = ("split", "step", "rank", "world_size", "batch_size", "seq_len", "seed", "order", "packing", "row")
        return f"/step?{urlencode({name: changed.get(name, getattr(self, name)) for name in names})}"


def _source(split: TokenSplit, number: int) -> str:
    """Where a document came from; "" if the dataset does not tell."""
    try:
        return str(split.source(number))
    except TokenmillError:  # imported, or files of a layout
        return ""


def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise RecipeError("the viewer is not installed", hint="pip install 'tokenmill[view]'") from None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tokenmill.inspection"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(count=lambda number: f"{number:,}", size=format_bytes, visible=visible)
    return environment


def _number(given: Given, name: str, default: int, *, least: int = 0, most: int = arguments.MAX_INT - 1) -> int:
    """A whole number of a form. An empty field is the default."""
    text = given.get(name, "").strip().replace(",", "").replace("_", "")
    if not text:
        return default
    if not text.isdecimal() or len(text) > len(str(arguments.MAX_INT)):
        raise RecipeError(f"{name} is {arguments.show(text)}", hint="give a whole number")
    return arguments.whole(name, int(text), least=least, most=most)


def _check(number: int, total: int, what: str) -> None:
    if number >= total:
        raise RecipeError(f"there is no {what} {number:,}: there are {total:,}", hint="they count from 0")


def visible(text: str) -> str:
    """A text whose control characters, line ends and invisible characters can be seen."""
    return "".join(char if char.isprintable() else _VISIBLE.get(char) or _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 1 << 8 else f"\\u{ord(char):04x}"


def _shown(piece: Piece, parity: int, *, is_ignored: bool = False) -> Shown:
    kind = "end" if piece.ends_document else "ab"[parity % 2]
    ids = " ".join(map(str, piece.ids))
    text = "end of document" if piece.ends_document else visible(piece.text) or f"{ids} "
    about = [f"{'id' if len(piece.ids) == 1 else 'ids'} {ids}"] if ids else ["no id"]
    if piece.text:
        about.append(f"bytes {piece.text.encode('utf-8', 'surrogatepass').hex(' ')}")
    return Shown(text, " · ".join(about), f"{kind} ignored" if is_ignored else kind)


def _runs(excerpt: Excerpt) -> list[Run]:
    """The pieces of an excerpt, document by document."""
    runs, document, pieces = [], excerpt.document, []
    for number, piece in enumerate(excerpt.pieces):
        pieces.append(_shown(piece, number))
        if piece.ends_document:
            runs.append(Run(document, pieces))
            document, pieces = document + 1, []
    return [*runs, Run(document, pieces)] if pieces else runs


def _runs_of_row(reader: ExcerptReader, ids: Any, documents: Any, ignored: Any) -> list[Run]:
    edges = np.flatnonzero(np.diff(documents)) + 1
    runs = []
    for begin, end in itertools.pairwise([0, *edges.tolist(), len(ids)]):
        is_padding, at, pieces = documents[begin] < 0, begin, []
        found = reader.pieces(ids[begin:end].tolist(), is_ended=not is_padding and end < len(ids))
        for number, piece in enumerate(found):
            is_ignored = bool(ignored[at : at + len(piece.ids)].any()) if piece.ids else False
            pieces.append(_shown(piece, number, is_ignored=is_ignored))
            at += len(piece.ids)
        runs.append(Run(int(documents[begin]), pieces))
    return runs


def _one_line(excerpt: Excerpt) -> str:
    text = excerpt.text or " ".join(map(str, excerpt.ids))
    return visible(" ".join(text.split()))


def _snippet(text: str, at: int, length: int) -> tuple[str, str, str]:
    """What is before a hit, the hit, and what is behind it."""
    begin, end = max(0, at - BEFORE_CHARS), at + length + AFTER_CHARS
    parts = text[begin:at], text[at : at + length], text[at + length : end]
    before, hit, after = (visible(part.replace("\n", " ")) for part in parts)
    return ("…" if begin else "") + before, hit, after + ("…" if end < len(text) else "")


def _encoded(reader: ExcerptReader, engine: Any, text: str) -> tuple[int, list[Shown]]:
    import pyarrow as pa

    try:
        ids = engine.encode(pa.array([text], pa.large_string())).ids.tolist() if text else []
    except (UnicodeEncodeError, pa.ArrowInvalid):
        raise RecipeError("the text has half of a character", hint="remove it") from None
    return len(ids), [_shown(piece, number) for number, piece in enumerate(reader.pieces(ids, is_ended=False))]


def _read_events(path: str) -> list[dict[str, Any]]:
    """The last events of a build. A line that is being written is left out."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - EVENT_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    found = []
    for line in lines[1 if size > EVENT_BYTES else 0 :]:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def _age(events: Sequence[Mapping[str, Any]]) -> float:
    return max(0.0, time.time() - float(events[-1].get("time", 0))) if events else 0.0


def _event_line(event: Mapping[str, Any]) -> tuple[str, str, str]:
    when = time.strftime("%H:%M:%S", time.localtime(float(event.get("time", 0))))
    about = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time", "kind"))
    return when, str(event.get("kind", "")), visible(about[:300])
