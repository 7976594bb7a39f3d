"""report: a dataset as one page, `report.html`: totals, charts, sources, drops, checks, recipe, samples.

    manifest, statistics.json ----+
    .build/events.jsonl ----------+--> one file without scripts and without the network
    documents of each split ------+

What is missing is said: a dataset of an older version has no statistics, one without `.build` no times. The page may
have times, so it is not part of the dataset: the manifest does not list it, and it can be written again at any time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import json
import os
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill import __version__, arguments
from tokenmill.build.workspace import EVENTS
from tokenmill.dataset import manifest as manifests
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.dataset.manifest import REPORT
from tokenmill.dataset.statistics import (
    LENGTH_EDGES,
    DatasetStatistics,
    SplitStatistics,
    TokenCounts,
    count_tokens,
    load_statistics,
    sampled_ranges,
)
from tokenmill.errors import DatasetError, RecipeError, StorageError, TokenmillError
from tokenmill.formats.open import open as open_dataset
from tokenmill.inspection import charts
from tokenmill.inspection.card import write_card
from tokenmill.maintenance.verify import verify_folder
from tokenmill.sizes import counted, format_bytes, format_count, format_seconds
from tokenmill.storage.base import Storage, is_url, local_folder, open_folder

_TEMPLATE = "report.html"
_NUM_SOURCES, _NUM_BARS, _NUM_TOKENS, _NUM_LINE_POINTS = 50, 12, 40, 240
_SAMPLE_TOKENS, _NUM_SAMPLES, _MAX_SAMPLES = 160, 2, 5
_MAX_LOG_BYTES = 1 << 26
_MAX_NAME_CHARS = 120
_LEAST_SHARE = 0.001
# A line through fewer points says nothing.
_LEAST_POINTS = 3
_SHOWN_PROBLEMS = 3
_COUNTED_DOCUMENTS = 1 << 24
# Marks of direction and of nothing: they change how the text around them looks.
_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """A report that was written. `card` is the dataset card, if one was written beside it."""

    path: str
    num_bytes: int
    seconds: float
    card: str | None

    def __repr__(self) -> str:
        return f"ReportResult({self.path!r}: {format_bytes(self.num_bytes)} in {format_seconds(self.seconds)})"


def report(
    dataset: str | os.PathLike[str], *, output: str | os.PathLike[str] | None = None, license: str | None = None
) -> ReportResult:
    """Write a page about a dataset: `report.html` and the card `README.md` in its folder, or only the page to `output`.

    It needs no network, and nothing in it does. Any dataset that `open` reads can be reported on; for files of other
    trainers, which tokenmill does not write to, give `output`. A `README.md` that was edited is not overwritten.
    `license` is for the card, in the spelling of the Hugging Face hub, such as `cc-by-4.0`.
    """
    begin = time.monotonic()
    place = None if output is None else arguments.place("output", output)
    arguments.text_or_none("license", license)
    opened = open_dataset(dataset)
    folder = dataset_folder(dataset)
    if place is None and folder is None:
        raise RecipeError(
            "files of another trainer have no place for a report", hint="say where to write it: `output='report.html'`"
        )
    name = os.path.basename(os.path.normpath(str(dataset))) or "dataset"
    page = render(opened, folder, name, is_remote=is_url(str(dataset))).encode("utf-8", "backslashreplace")
    card = None
    if place is None:
        assert folder is not None, "checked above"
        folder.replace(REPORT, page)
        path = folder.at(REPORT)
        card = write_card(folder, opened.manifest, name=name, license=license)
    else:
        target = local_folder(os.path.dirname(place) or ".", name="output")
        if not os.path.isdir(target.path):
            raise RecipeError(f"there is no folder {target.path}", hint="make it first, or choose another `output`")
        target.replace(os.path.basename(place), page)
        path = target.at(os.path.basename(place))
    return ReportResult(path=path, num_bytes=len(page), seconds=time.monotonic() - begin, card=card)


def dataset_folder(dataset: str | os.PathLike[str]) -> Storage | None:
    """The folder of a dataset of ours; None for files of other trainers."""
    with contextlib.suppress(TokenmillError):
        folder = open_folder(dataset)
        if folder.exists(manifests.MANIFEST):
            return folder
    return None


def render(dataset: Dataset, folder: Storage | None, name: str, *, is_remote: bool = False) -> str:
    """The page of a dataset, as HTML. What would copy shards to this machine is left out if it `is_remote`."""
    from jinja2 import Environment, StrictUndefined

    facts = ReportFacts(dataset, folder, is_remote=is_remote)
    # Every value is escaped but for the charts, which escape their own texts.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        count=format_count, whole=lambda number: f"{number:,}", size=format_bytes, visible=visible, percent=_percent
    )
    source = (
        importlib.resources.files("tokenmill.inspection").joinpath("templates", _TEMPLATE).read_text(encoding="utf-8")
    )
    page: str = environment.from_string(source).render(
        name=visible(name),
        facts=facts,
        manifest=dataset.manifest,
        version=__version__,
        written=_utc(time.time()),
    )
    return page


def visible(text: str) -> str:
    """A text as it may be shown: characters that control or hide something are written as escapes."""
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in _HIDDEN else _escape(char) for char in text
    )


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 1 << 8 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= _LEAST_SHARE or not share else "< 0.1%"


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _ratio(one: float, other: float) -> float | None:
    return one / other if other else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLine:
    name: str
    documents: int | None
    tokens: int
    num_bytes: int | None
    characters: int | None
    shortest: int | None
    longest: int | None

    @property
    def mean(self) -> float | None:
        return None if self.documents is None else _ratio(self.tokens, self.documents)

    @property
    def bytes_per_token(self) -> float | None:
        return None if self.num_bytes is None else _ratio(self.num_bytes, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    name: str
    file_bytes: int
    documents: int
    tokens: int
    num_bytes: int
    characters: int
    share: float

    @property
    def bytes_per_token(self) -> float | None:
        return _ratio(self.num_bytes, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDocument:
    """The beginning of a document."""

    split: str
    document: int
    num_tokens: int
    shown: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLine:
    """One line about whether the dataset is right."""

    what: str
    result: str
    is_good: bool | None


class ReportFacts:
    """What the page says about a dataset."""

    def __init__(self, dataset: Dataset, folder: Storage | None, *, is_remote: bool) -> None:
        self._dataset, self._folder, self._is_remote = dataset, folder, is_remote
        self.manifest = dataset.manifest
        self.missing: list[str] = []
        self._statistics = self._load()
        self.splits = self._split_rows()
        self.tokens = sum(row.tokens for row in self.splits)
        counts = [row.documents for row in self.splits]
        self.documents = None if None in counts else sum(count or 0 for count in counts)
        if self.documents is None:
            self.missing.append("These files do not record where documents end: their number is not known.")
        self.runs = list(_runs(self._events()))
        self.sources, self.other_sources = self._source_rows()
        self.frequencies = self._frequencies()
        self.checks = list(self._checks())
        self.samples = list(self._samples())

    def _load(self) -> DatasetStatistics | None:
        try:
            found = None if self._folder is None else load_statistics(self._folder, self.manifest)
        except (DatasetError, StorageError) as error:
            self.missing.append(f"The statistics cannot be read: {error.message}.")
            return None
        if found is None:
            self.missing.append(
                "These files have no statistics of their text: there are no bytes, characters and sources."
                if self._folder is None
                else "The dataset has no statistics.json: it was imported, or made by an older version. "
                "There are no bytes, characters and sources."
            )
        elif sum(sum(split.tokens) for split in found.splits.values()) != self.manifest.tokens:
            self.missing.append(
                "This is a part of a dataset: lengths, sources and token frequencies are those of the whole."
            )
        return found

    # Totals.

    def _split_rows(self) -> list[SplitLine]:
        rows = []
        names = sorted(self._dataset, key=lambda name: (name != "train", name))
        for name in names:
            split = self._dataset[name]
            known = self._statistics.splits.get(name) if self._statistics else None
            # A copy of some shards has the statistics of the whole dataset.
            if known is not None and sum(known.tokens) != split.num_tokens:
                known = None
            rows.append(
                SplitLine(
                    name=name,
                    documents=_num_documents(split),
                    tokens=split.num_tokens,
                    num_bytes=sum(known.bytes) if known else None,
                    characters=sum(known.characters) if known else None,
                    shortest=known.shortest if known else None,
                    longest=known.longest if known else None,
                )
            )
        return rows

    @property
    def bytes_per_token(self) -> float | None:
        known = [row for row in self.splits if row.num_bytes is not None]
        return _ratio(sum(row.num_bytes or 0 for row in known), sum(row.tokens for row in known))

    @property
    def text_bytes(self) -> int | None:
        return sum(row.num_bytes or 0 for row in self.splits) if self._statistics else None

    @property
    def stored_bytes(self) -> int:
        return sum(digest.bytes for _, digest in self.manifest.each_file())

    @property
    def tokenizer(self) -> str:
        return visible(str(self.manifest.tokenizer.get("name", "unknown")))

    # Sources.

    def _source_rows(self) -> tuple[list[SourceLine], SourceLine | None]:
        if self._statistics is None or not self.manifest.sources:
            return [], None
        columns = _added_up(self._statistics.splits.values(), len(self.manifest.sources))
        documents, tokens, num_bytes, characters = columns
        total = int(tokens.sum()) or 1
        order = np.argsort(-tokens, kind="stable")
        rows = [
            SourceLine(
                name=visible(_cut(self.manifest.sources[number].name)),
                file_bytes=self.manifest.sources[number].bytes,
                documents=int(documents[number]),
                tokens=int(tokens[number]),
                num_bytes=int(num_bytes[number]),
                characters=int(characters[number]),
                share=int(tokens[number]) / total,
            )
            for number in order[:_NUM_SOURCES].tolist()
        ]
        left = order[_NUM_SOURCES:]
        if not len(left):
            return rows, None
        chosen = set(left.tolist())
        other = SourceLine(
            name=counted(len(left), "other source"),
            file_bytes=sum(one.bytes for number, one in enumerate(self.manifest.sources) if number in chosen),
            documents=int(documents[left].sum()),
            tokens=int(tokens[left].sum()),
            num_bytes=int(num_bytes[left].sum()),
            characters=int(characters[left].sum()),
            share=int(tokens[left].sum()) / total,
        )
        return rows, other

    # Charts.

    def length_chart(self) -> str:
        counts = self._lengths
        if not counts.any():
            return ""
        first, last = int(np.flatnonzero(counts)[0]), int(np.flatnonzero(counts)[-1])
        about = f"Documents by length: half of them have about {self.median_length():,} tokens or fewer."
        return charts.histogram(
            LENGTH_EDGES[first : last + 2].tolist(),
            counts[first : last + 1].tolist(),
            x_label="tokens in a document",
            y_label="documents",
            about=about,
        )

    def length_rows(self) -> list[tuple[str, int]]:
        """The figures of the length chart, one row for each doubling."""
        found: dict[int, int] = {}
        for edge, count in zip(LENGTH_EDGES.tolist(), self._lengths.tolist(), strict=True):
            if count:
                found[int(edge).bit_length()] = found.get(int(edge).bit_length(), 0) + count
        return [(f"{(1 << bits) // 2:,} to {(1 << bits) - 1:,}", count) for bits, count in sorted(found.items())]

    def median_length(self) -> int:
        counts = self._lengths
        return int(LENGTH_EDGES[int(np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2))])

    @functools.cached_property
    def _lengths(self) -> npt.NDArray[np.int64]:
        """Documents of all splits in each bin of lengths."""
        counts = np.zeros(len(LENGTH_EDGES), np.int64)
        if self._statistics is not None:
            for split in self._statistics.splits.values():
                counts[: len(split.lengths)] += np.array(split.lengths, np.int64)
            return counts
        for name in () if self._is_remote else self._dataset:
            with contextlib.suppress(TokenmillError):  # not every layout knows where documents end
                if (_num_documents(self._dataset[name]) or 0) <= _COUNTED_DOCUMENTS:
                    for lengths in self._dataset[name].document_lengths():
                        bins = np.searchsorted(LENGTH_EDGES, lengths, side="right") - 1
                        counts += np.bincount(bins, minlength=len(LENGTH_EDGES))
        return counts

    def source_chart(self) -> str:
        rows = [charts.Bar(row.name, row.tokens, self._said(row)) for row in self.sources[:_NUM_BARS]]
        if not rows:
            return ""
        largest = self.sources[0]
        about = f"Tokens by source: {largest.name} has {_percent(largest.share)} of {counted(self.tokens, 'token')}."
        return charts.bars(rows, about=about)

    def sources_left(self) -> str:
        """What the chart of sources leaves out."""
        left = len(self.manifest.sources) - _NUM_BARS
        if not self.sources or left <= 0:
            return ""
        tokens = sum(row.tokens for row in self.sources[_NUM_BARS:]) + (
            self.other_sources.tokens if self.other_sources else 0
        )
        return f"{counted(left, 'other source')} with {format_count(tokens)} tokens together."

    def _said(self, row: SourceLine) -> str:
        return f"{format_count(row.tokens)} · {_percent(row.share)}"

    def rank_chart(self) -> str:
        found = self.frequencies
        if found is None or len(found.ids) < _LEAST_POINTS:
            return ""
        ranks = np.unique(np.geomspace(1, len(found.ids), _NUM_LINE_POINTS).astype(np.int64))
        shares = np.array(found.counts)[ranks - 1] / found.counted
        x = charts.log_axis("rank", 1, len(found.ids))
        y = charts.log_axis("share of tokens", float(shares[-1]), float(shares[0]), _percent_tick)
        tenth = sum(found.counts[: max(1, len(found.ids) // 10)]) / found.counted
        about = (
            f"Token frequencies by rank: the most frequent tenth of the ids makes up {_percent(tenth)} of the tokens."
        )
        return charts.line(list(zip(ranks.tolist(), shares.tolist(), strict=True)), x, y, about=about)

    def speed_chart(self) -> str:
        points, marks, seconds = _speeds(self.runs)
        if len(points) < _LEAST_POINTS:
            return ""
        x_seconds = charts.linear_axis("time spent on the build", seconds, format_seconds)
        y = charts.linear_axis("tokens a second", max(rate for _, rate in points))
        resumed = f", resumed {counted(len(marks), 'time')}" if marks else ""
        about = f"Throughput over {format_seconds(seconds)}{resumed}."
        return charts.line(points, x_seconds, y, about=about, marks=marks, fill=True)

    # Tokens.

    def _frequencies(self) -> TokenCounts | None:
        if self._statistics is not None:
            return self._statistics.frequencies
        splits = [] if self._is_remote else [self._dataset[name] for name in sorted(self._dataset)]
        total = sum(split.num_tokens for split in splits)
        if not total:
            return None
        try:
            return count_tokens(
                _blocks(splits, sampled_ranges(total)),
                all_tokens=total,
                vocab_size=int(self.manifest.tokenizer.get("vocab_size") or 0),
            )
        except TokenmillError as error:
            self.missing.append(f"Tokens cannot be counted: {error.message}.")
            return None

    def top_tokens(self) -> list[tuple[int, str, float]]:
        """The most frequent ids, their text, and their share."""
        found = self.frequencies
        if found is None or not found.counted:
            return []
        return [
            (token, self._text_of(token), count / found.counted)
            for token, count in list(zip(found.ids, found.counts, strict=True))[:_NUM_TOKENS]
        ]

    @property
    def num_unseen(self) -> int:
        return 0 if self.frequencies is None else self.frequencies.vocab_size - len(self.frequencies.ids)

    def _text_of(self, token: int) -> str:
        if token == self.manifest.tokenizer.get("eot_id"):
            return "end of text"
        with contextlib.suppress(TokenmillError, ImportError):
            text = self._dataset.decode([token])
            if "\ufffd" not in text:  # else it is a part of a character
                return visible(text).replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣")
        return ""

    # Drops.

    def drops(self) -> list[tuple[str, int, float, Sequence[Any]]]:
        """Reason, documents, share of the documents read, and examples."""
        known = self._statistics.dropped if self._statistics else {}
        read = self.manifest.documents_read or 1
        return [
            (reason.replace("_", " "), count, count / read, known[reason].examples if reason in known else ())
            for reason, count in sorted(self.manifest.dropped.items(), key=lambda item: (-item[1], item[0]))
        ]

    # Checks.

    def _checks(self) -> Iterator[CheckLine]:
        parity = self.manifest.parity
        if parity:
            documents = counted(parity.get("documents", 0), "document")
            told = f"{documents} of the sources gave the same ids as {parity.get('reference')}"
            yield CheckLine(what="Tokenizer", result=told, is_good=True)
        else:
            yield CheckLine(what="Tokenizer", result="not compared with a reference", is_good=None)
        if self._folder is None:
            yield CheckLine(what="Files", result="files of another trainer: they have no manifest", is_good=None)
            return
        read, kept = self.manifest.documents_read, self.manifest.documents
        dropped = sum(self.manifest.dropped.values())
        told = f"{read:,} documents read = {kept:,} kept + {dropped:,} dropped"
        yield CheckLine(what="Totals", result=told, is_good=read == kept + dropped)
        try:
            problems = verify_folder(self._folder, threads=1, quick=True).problems
        except TokenmillError as error:
            yield CheckLine(what="Files", result=error.message, is_good=False)
            return
        if problems:
            said = "; ".join(f"{problem.file} {problem.what}" for problem in problems[:_SHOWN_PROBLEMS])
            left = len(problems) - _SHOWN_PROBLEMS
            more = f" and {left:,} more" if left > 0 else ""
            yield CheckLine(what="Files", result=f"{said}{more}", is_good=False)
        else:
            files = counted(self.manifest.num_files, "file")
            told = f"{files} with the sizes and structure of the manifest; digests are checked by tokenmill verify"
            yield CheckLine(what="Files", result=told, is_good=True)

    # The build.

    def _events(self) -> list[dict[str, Any]]:
        if self._folder is None:
            return []
        try:
            data = self._folder.read(EVENTS, max_bytes=_MAX_LOG_BYTES)
        except TokenmillError:
            self.missing.append("There is no log of the build (.build/events.jsonl): times and speed are not known.")
            return []
        found = []
        for line in data.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("time"), int | float):
                    found.append(event)
        return found

    def build(self) -> list[tuple[str, str]]:
        """When and how the dataset was built, as far as the log says."""
        if not self.runs:
            return []
        seconds = sum(run.seconds for run in self.runs)
        rows = [
            ("started", _utc(self.runs[0].start)),
            ("finished", _utc(self.runs[-1].stop)),
            ("time spent", format_seconds(seconds)),
        ]
        if seconds > 1:
            rows.append(("speed", f"{format_count(self.tokens / seconds)} tokens/s"))
        rows.append(("workers", ", ".join(dict.fromkeys(str(run.workers) for run in self.runs))))
        if len(self.runs) > 1:
            rows.append(("interruptions", str(len(self.runs) - 1)))
        return rows

    # Recipe.

    def recipe(self) -> list[tuple[str, str]]:
        """The options that decide the bytes of the dataset."""
        tokenizer = self.manifest.tokenizer
        rows = [("tokenizer", self.tokenizer)]
        rows += [
            (key.replace("_", " "), visible(str(tokenizer[key])))
            for key in ("vocab_size", "eot_id", "engine")
            if tokenizer.get(key) not in (None, "", 0)
        ]
        rows.append(("dtype", self.manifest.dtype))
        for key, value in sorted(self.manifest.identity.items()):
            if key not in ("tokenizer", "engine") and value not in (None, {}, ""):
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
                rows.append((key.replace("_", " "), visible(_cut(text, 400))))
        rows.append(("fingerprint", self.manifest.fingerprint))
        return rows

    # Samples.

    def _samples(self) -> Iterator[ShownDocument]:
        if self._is_remote:
            self.missing.append("There are no samples: the shards are not on this machine.")
            return
        left = _MAX_SAMPLES
        for name in (row.name for row in self.splits):
            split = self._dataset[name]
            try:
                count = _num_documents(split) or 0
                for number in sorted({0, (count - 1) // 2} if count else set())[: min(left, _NUM_SAMPLES)]:
                    ids = split.document(number)
                    left -= 1
                    shown = ids[:_SAMPLE_TOKENS]
                    yield ShownDocument(
                        split=name,
                        document=number,
                        num_tokens=len(ids),
                        shown=len(shown),
                        text=visible(self._dataset.decode(shown)),
                    )
            except (TokenmillError, ImportError) as error:
                self.missing.append(f"Documents of {name} cannot be shown: {error}.")


def _num_documents(split: TokenSplit) -> int | None:
    """The documents of a split; None where only an end of text would tell, and it is not known."""
    with contextlib.suppress(DatasetError):
        return split.num_documents
    return None


def _percent_tick(share: float) -> str:
    return f"{share * 100:.6f}".rstrip("0").rstrip(".") + "%"


def _cut(text: str, most: int = _MAX_NAME_CHARS) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}"


def _added_up(splits: Iterable[SplitStatistics], sources: int) -> npt.NDArray[np.int64]:
    """Documents, tokens, bytes and characters of each source, over all splits."""
    total = np.zeros((4, sources), np.int64)
    for split in splits:
        total += np.array([split.documents, split.tokens, split.bytes, split.characters], np.int64)
    return total


def _blocks(splits: Sequence[TokenSplit], ranges: Sequence[tuple[int, int]]) -> Iterator[Any]:
    """The tokens of ranges over splits end to end."""
    begin = 0
    for split in splits:
        end = begin + split.num_tokens
        for start, stop in ranges:
            for at in range(max(start, begin), min(stop, end), 1 << 20):
                yield split.tokens(at - begin, min(at + (1 << 20), stop, end) - begin)
        begin = end


@dataclass(frozen=True, slots=True)
class _BuildSpan:
    """One run of the build: when it began and ended, and its progress as seconds and tokens done since it began."""

    start: float
    stop: float
    workers: int
    progress: Sequence[tuple[float, float]]

    @property
    def seconds(self) -> float:
        return max(0.0, self.stop - self.start)


def _runs(events: Iterable[dict[str, Any]]) -> Iterator[_BuildSpan]:
    """The runs of a build in its log. A run that was killed ends with its last event."""
    run: list[dict[str, Any]] = []
    for event in events:
        if event.get("kind") == "start":
            if run:
                yield _run_of(run)
            run = [event]
        elif run:
            run.append(event)
    if run:
        yield _run_of(run)


def _run_of(events: Sequence[dict[str, Any]]) -> _BuildSpan:
    start = events[0]
    begin = float(start["time"])
    progress = [(0.0, 0.0)]
    for event in events:
        rate, seconds = event.get("tokens_per_second"), float(event["time"]) - begin
        # The rate counts the tokens of this run only; the total also has those that were kept from an earlier one.
        if event.get("kind") == "progress" and isinstance(rate, int | float) and seconds > progress[-1][0]:
            progress.append((seconds, max(progress[-1][1], rate * seconds)))
    stop = max(float(event["time"]) for event in events)
    workers = start.get("workers")
    return _BuildSpan(begin, stop, workers if isinstance(workers, int) else 0, progress)


def _speeds(runs: Sequence[_BuildSpan]) -> tuple[list[tuple[float, float]], list[float], float]:
    """Tokens a second over the time spent, where runs were resumed, and the time of all runs."""
    points: list[tuple[float, float]] = []
    marks: list[float] = []
    total = sum(run.seconds for run in runs)
    step, before = total / _NUM_LINE_POINTS, 0.0
    for number, run in enumerate(runs):
        if number:
            marks.append(before)
        last_time, last_tokens = 0.0, 0.0
        for seconds, tokens in run.progress[1:]:
            if seconds - last_time >= step:
                points.append((before + seconds, (tokens - last_tokens) / (seconds - last_time)))
                last_time, last_tokens = seconds, tokens
        before += run.seconds
    return points, marks, total
