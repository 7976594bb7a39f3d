"""doctor: checks what this machine can do, and that a corpus or a dataset works on it.

    tokenmill doctor              versions, engine, cores, memory, disks, limits, credentials
    tokenmill doctor CORPUS       and files, text, tokenizer, round trip, a trial of units, streaming
    tokenmill doctor DATASET      and files, samples, labels, ranks in processes, resumption, loader

Each check is a line: ok, warning or failed, why, and what to do. A check calls what `plan`, `verify` or a loader
calls. Nothing needs a network; with `network`, the hub, the store and the cluster that are configured are asked.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np

from tokenmill import arguments
from tokenmill.arguments import Sources, TextOptions
from tokenmill.build.preflight import check_parity_of_plan, make_request
from tokenmill.build.preview import run_trial
from tokenmill.build.resolve import make_config, resolve_build
from tokenmill.dataset.folder_kinds import kind_of
from tokenmill.dataset.manifest import load_manifest
from tokenmill.errors import TokenmillError, is_failure, redact
from tokenmill.executors.in_process import InProcessProber
from tokenmill.formats.open import open as open_dataset
from tokenmill.loader.loader import DataLoader
from tokenmill.maintenance.verify import verify
from tokenmill.recipe import make_recipe
from tokenmill.resources import MEMORY_BUDGET, allowed_cores, allowed_memory, free_memory, num_cores, resolve_workers
from tokenmill.sizes import counted, few, format_bytes, format_count
from tokenmill.sources.text_columns import rule_columns
from tokenmill.storage.base import is_url, open_folder
from tokenmill.storage.output import write_speed
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.parity import check_hard, choose_engine, open_reference
from tokenmill.tokenizers.spec import resolve

Status = Literal["ok", "warning", "failed"]

_LIBRARIES = ("numpy", "pyarrow", "gigatoken", "msgspec", "obstore", "huggingface_hub")
_EXTENSIONS = ("avx2", "avx512f", "avx512vbmi", "neon", "asimd", "sve")
_FEW_FILES = 1024
_FEW_BYTES = 5_000_000_000
_SLOW_WRITES = 20_000_000
_WRITTEN_BYTES = 32_000_000
# Files of a dataset whose SHA-256 are compared, the smallest first.
_HASHED_BYTES, _HASHED_FILES = 64_000_000, 16
_SEQ_LEN, _BATCH, _STEPS = 256, 4, 6
_MEASURED, _MEASURED_SECONDS = (1024, 16), 0.5
# Control groups without a limit say a number like 2^63.
_NO_LIMIT = 1 << 50
_CONNECT_SECONDS = 3.0
_RANK_SECONDS = 15.0
# Asked for the object stores of these schemes, if no endpoint is configured.
_STORES = {"s3": "s3.amazonaws.com", "gs": "storage.googleapis.com", "az": "login.microsoftonline.com"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a check found. `hint` says what to do if it is not ok."""

    name: str
    status: Status
    found: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """All checks, in order. `ok` is false if one of them failed; warnings are allowed."""

    target: str
    checks: tuple[Check, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    def count(self, status: Status) -> int:
        return sum(check.status == status for check in self.checks)

    def __repr__(self) -> str:
        counts = ", ".join(f"{self.count(status)} {status}" for status in ("ok", "warning", "failed"))
        return f"DoctorReport({self.target or 'this machine'}: {counts})"


def doctor(
    target: Sources | None = None,
    *,
    tokenizer: str = "gpt2",
    text_column: str | None = None,
    output: str | os.PathLike[str] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    network: bool = False,
) -> DoctorReport:
    """Check this machine, and a dataset or the sources of one, in some seconds.

    `output` and `scratch` are folders of a build whose disks are checked; a few megabytes are written there, and
    removed. `network` also asks the hub and the Ray cluster that are configured.
    """
    begin = time.monotonic()
    arguments.not_blank("tokenizer", arguments.text("tokenizer", tokenizer, hint="name a tokenizer, like gpt2"))
    network = arguments.flag("network", network)
    output, scratch = arguments.place_or_none("output", output), arguments.place_or_none("scratch", scratch)
    if isinstance(target, str | os.PathLike):
        target = arguments.place("target", target)
    checks = list(_check_machine(output, scratch))
    if network:
        urls = [os.fspath(path) for path in (target, output) if isinstance(path, str | os.PathLike)]
        checks += [_check("store", lambda url=url: _ask_store(url)) for url in urls if _is_store(url)]  # type: ignore[misc]
        checks += [_check("hub", _ask_hub), _check("ray", _ask_ray)]
    if isinstance(target, str | os.PathLike) and _is_dataset(os.fspath(target)):
        checks += _check_dataset(os.fspath(target))
    elif target is not None:
        checks += _check_corpus(target, tokenizer, text_column)
    else:
        checks.append(_check("tokenizer", lambda: _check_tokenizer(tokenizer)))
    shown = (
        "" if target is None else str(target) if isinstance(target, str | os.PathLike) else ", ".join(map(str, target))
    )
    return DoctorReport(target=shown, checks=tuple(checks), seconds=time.monotonic() - begin)


class _DoubtError(Exception):
    """What a check found that is not wrong, but may be a problem."""

    def __init__(self, found: str, hint: str) -> None:
        super().__init__(found)
        self.found, self.hint = found, hint


class _FailureError(_DoubtError):
    """What a check found that is wrong."""


def _check(name: str, run: Callable[[], str]) -> Check:
    try:
        return Check(name=name, status="ok", found=run())
    except _FailureError as wrong:
        return Check(name=name, status="failed", found=wrong.found, hint=wrong.hint)
    except _DoubtError as odd:
        return Check(name=name, status="warning", found=odd.found, hint=odd.hint)
    except TokenmillError as error:
        return Check(name=name, status="failed", found=error.message, hint=error.hint)
    except BaseException as error:  # panics of Rust are no Exceptions
        if not is_failure(error):
            raise
        found = redact(f"unexpected {type(error).__name__}: {error}")
        return Check(name=name, status="failed", found=found, hint="please report this")


def _is_dataset(target: str) -> bool:
    """Whether a path is a dataset or files of a layout. Anything else is taken as sources."""
    kind = kind_of(open_folder(target))
    return kind.is_dataset or kind.has_digests or kind.name in ("layout", "unfinished_build", "nodes")


# The machine.


def _check_machine(output: Any, scratch: Any) -> Iterator[Check]:
    yield _check("versions", _versions)
    yield _check("processor", _processor)
    yield _check("memory", _memory)
    yield _check("open files", _open_files)
    named = {"output": output, "scratch": scratch}
    if output is None and scratch is None:
        named = {"disk": "."}
    for name, path in named.items():
        if path is not None and not is_url(os.fspath(path)):
            yield _check(name, lambda path=path: _disk(os.fspath(path)))  # type: ignore[misc]  # it cannot infer this
    yield _check("credentials", _credentials)
    yield _check("extras", _extras)


def _versions() -> str:
    from tokenmill import __version__

    libraries = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)
    return f"tokenmill {__version__}, Python {platform.python_version()}, {libraries}"


def _extras() -> str:
    """Versions of frameworks, which are not loaded: that would take longer than all checks."""
    found = []
    for name in ("torch", "jax", "lightning", "transformers", "ray"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"installed: {', '.join(found)}" if found else "no trainer framework is installed; none is needed"


def _processor() -> str:
    cores, all_cores = num_cores(), os.cpu_count() or 1
    limit = f" of {all_cores}" if cores < all_cores else ""
    if allowed_cores() < all_cores:
        limit += f", limited to {allowed_cores():g} by a control group"
    workers = counted(resolve_workers(None), "worker")
    return f"{platform.machine()}{_extensions()}; {counted(cores, 'core')}{limit}, so {workers}"


def _extensions() -> str:
    """The vector instructions of the processor, where Linux lists them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            words = set(next((line for line in file if line.startswith(("flags", "Features"))), "").split())
    except OSError:
        return ""
    found = [name for name in _EXTENSIONS if name in words]
    return f" with {', '.join(found)}" if found else ""


def _memory() -> str:
    free, limit, workers = free_memory(), allowed_memory(), resolve_workers(None)
    if free == float("inf"):
        return "this system does not report it"
    found = f"{format_bytes(int(free))} free"
    if limit < _NO_LIMIT:
        found += f", limited to {format_bytes(int(limit))} by a control group"
    if free < workers * MEMORY_BUDGET:
        fitting = max(1, int(free // MEMORY_BUDGET))
        needed = format_bytes(workers * MEMORY_BUDGET)
        raise _DoubtError(f"{found}; {counted(workers, 'worker')} may need {needed}", f"give `workers={fitting}`")
    return found


def _open_files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft:,}"
    most = f", and {hard:,} at most" if hard > soft else ""
    raise _DoubtError(f"only {soft:,} at once{most}: large datasets are slower", "raise it: `ulimit -n 4096`")


def _disk(path: str) -> str:
    folder = os.path.abspath(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = open_folder(folder).free_bytes() or 0
    if free < 2 * _WRITTEN_BYTES:
        raise _FailureError(f"{folder}: {format_bytes(free)} free", "free some space, or choose another disk")
    speed = write_speed(folder, _WRITTEN_BYTES)
    found = f"{folder}: {format_bytes(free)} free, writes {format_bytes(round(speed))}/s"
    if free < _FEW_BYTES:
        raise _DoubtError(found, "a corpus takes about half the size of its text as tokens: free some space")
    if speed < _SLOW_WRITES:
        raise _DoubtError(found, "use a local disk for `scratch`")
    return found


def _credentials() -> str:
    """Which credentials there are, by the name of what has them. Never their values."""
    home = os.path.expanduser("~")
    places = {
        "S3": (["AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"], ".aws/credentials"),
        "Google": (["GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"],
                   ".config/gcloud/application_default_credentials.json"),
        "Azure": (["AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_ID"], ".azure"),
        "hub": (["HF_TOKEN"], ".cache/huggingface/token"),
    }  # fmt: skip
    found = []
    for name, (variables, file) in places.items():
        where = next((one for one in variables if os.environ.get(one)), None)
        if where is None and os.path.exists(os.path.join(home, file)):
            where = f"~/{file}"
        found.append(f"{name}: {where or 'none'}")
    return "; ".join(found)


def _is_store(url: str) -> bool:
    return url.partition("://")[0] in _STORES and "://" in url


def _ask_store(url: str) -> str:
    from tokenmill.storage.object_store import endpoint_of

    scheme = url.partition("://")[0]
    endpoint = endpoint_of(scheme) or f"https://{_STORES[scheme]}"
    host = endpoint.partition("://")[2].partition("/")[0]
    return _connect(host, 443 if endpoint.startswith("https") else 80, "check the endpoint, the network and the proxy")


def _ask_hub() -> str:
    from huggingface_hub import constants

    from tokenmill.storage.hub_client import is_offline

    if is_offline():
        return "offline, as HF_HUB_OFFLINE says"
    host = constants.ENDPOINT.partition("://")[2].partition("/")[0]
    return _connect(host, 443 if constants.ENDPOINT.startswith("https") else 80, "set HF_HUB_OFFLINE=1 to work offline")


def _ask_ray() -> str:
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return "no address is configured in RAY_ADDRESS; a build starts a temporary local Ray"
    return _connect(host, int(port), "check that it is up: `ray status --address`")


def _connect(host: str, port: int, hint: str) -> str:
    name, _, own_port = host.partition(":")
    try:
        socket.create_connection((name, int(own_port or port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise _DoubtError(f"{host} does not answer: {error.strerror or error}", hint) from None
    return f"{host} answers"


def _check_tokenizer(name: str) -> str:
    spec = resolve(name)
    if spec.needs_texts:
        return f"{spec.name}: its vocabulary is made of the texts"
    spec, engine, note = choose_engine(spec)
    check_hard(spec, open_reference(spec), engine)
    if note:
        raise _DoubtError(f"{spec.name}: {note}", "choose another tokenizer if it is too slow")
    return f"{spec.name} with {spec.engine}: the ids of its reference on all test texts"


# Sources.


def _check_corpus(target: Sources, tokenizer: str, text_column: str | None) -> Iterator[Check]:
    corpus = _Corpus(target, tokenizer, text_column)
    first = _check("files", corpus.files)
    yield first
    if first.status == "failed":
        return
    yield _check("text", corpus.text)
    yield _check("parity", corpus.parity)
    yield _check("round trip", corpus.round_trip)
    yield _check("trial", corpus.trial)
    yield _check("streaming", corpus.streaming)


class _Corpus:
    """Sources, planned and probed as `plan` does it."""

    def __init__(self, target: Sources, tokenizer: str, text_column: str | None) -> None:
        self._target = target
        self._options: TextOptions = {} if text_column is None else {"text_column": text_column}
        self._tokenizer = tokenizer
        self._num_tokens = 0

    def files(self) -> str:
        recipe = make_recipe({"sources": self._target, "tokenizer": self._tokenizer, **self._options})
        self._setup = resolve_build(recipe)
        self._config = make_config(self._setup, scratch=None, only_look=True)
        self._engine = open_engine(self._setup.spec)
        self._prober = InProcessProber(self._config, self._engine)
        self._request = make_request(self._setup.plan)
        sources = self._setup.listing.sources
        kinds = Counter(f"{source.kind}{f'.{source.compression}' * bool(source.compression)}" for source in sources)
        size = format_bytes(sum(source.bytes for source in sources))
        found = f"{counted(len(sources), 'file')} ({', '.join(sorted(kinds))}), {size}, {self._units()}"
        if self._setup.notes:
            raise _DoubtError(f"{found}; {few(self._setup.notes, '; ')}", "tokenmill plan shows what a build would do")
        return found

    def _units(self) -> str:
        return counted(len(self._setup.plan.units), "unit")

    def text(self) -> str:
        """Which columns have the text, and how a first document begins."""
        sources = self._setup.listing.sources
        rules = {f"column {' and '.join(rule_columns(one.text))}" if one.text else "all of the file" for one in sources}
        self._texts = self._prober.probe(self._request).texts
        if not self._texts:
            raise _FailureError("no document was found", "check `text_column`")
        sizes = sorted(len(text.encode()) for text in self._texts)
        median = format_bytes(sizes[len(sizes) // 2])
        return f"{'; '.join(sorted(rules))}; a document has about {median}, like {self._texts[0][:32]!r}"

    def parity(self) -> str:
        found = check_parity_of_plan(self._request, self._config, self._setup.spec, self._prober)
        about, self._num_tokens = found.parity, found.estimate.tokens
        if found.unread:
            plan = self._setup.plan
            names = [plan.sources[plan.units[unit].source].name for unit in found.unread]
            raise _FailureError(f"cannot be read: {few(names)}", "tokenmill plan shows why: fix or remove them")
        compared = f"{counted(about['documents'], 'document')}, {format_bytes(about['bytes'])}"
        error = format_count(found.estimate.error)
        return (
            f"{self._setup.spec.engine_version} and {about['reference']} agree on {compared}; "
            f"about {format_count(self._num_tokens)} tokens in all (± {error}, 95 %)"
        )

    def round_trip(self) -> str:
        trial = self._prober.encode(self._texts)
        ends = np.cumsum(trial.lengths)
        pieces = np.split(trial.ids, ends[:-1])
        changed = sum(self._engine.decode(ids) != text for ids, text in zip(pieces, self._texts, strict=True))
        count = counted(len(self._texts), "document")
        if changed:
            raise _DoubtError(
                f"{changed:,} of {count} decode to other text: this tokenizer normalises or drops characters",
                "choose a byte-level tokenizer if the exact text matters",
            )
        return f"{count} decode to their own text"

    def trial(self) -> str:
        cost = run_trial(self._setup.plan, self._config, self._engine)
        if cost is None:
            raise _FailureError("no unit can be read", "run tokenmill plan to see why")
        return f"a worker reads, encodes and writes {format_bytes(round(1 / cost))} of text/s"

    def streaming(self) -> str:
        if self._num_tokens < _BATCH * _SEQ_LEN:
            return "not measured: the text is shorter than a batch"
        from tokenmill.text_stream import TextStream

        batches = TextStream(self._target, self._tokenizer, _SEQ_LEN, _BATCH, workers=0, **self._options)
        return f"{format_count(_tokens_per_second(batches, _BATCH * _SEQ_LEN))} tokens/s from text, in this process"


# Datasets.


def _check_dataset(target: str) -> Iterator[Check]:
    dataset = _DatasetChecks(target)
    for name, check in (("files", dataset.files), ("digests", dataset.digests), ("split", dataset.open)):
        found = _check(name, check)
        yield found
        if found.status == "failed" and name != "digests":
            return
    yield _check("samples", dataset.samples)
    yield _check("labels", dataset.labels)
    yield _check("text", dataset.text)
    yield _check("processes", dataset.processes)
    yield _check("resume", dataset.resume)
    yield _check("loader", dataset.speed)


class _DatasetChecks:
    """A dataset, read as trainers do."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = open_folder(path)

    def files(self) -> str:
        kind = kind_of(self._folder)
        if kind.name == "layout":
            return f"{kind.what}, opened in place: nothing records what they should be"
        report = verify(self._path, quick=True)
        if not report.ok:
            wrong = few([f"{problem.file}: {problem.what}" for problem in report.problems], "; ")
            raise _FailureError(wrong, report.hint or "run tokenmill repair")
        return f"{counted(report.files, 'file')} with the sizes and the structure that are recorded ({kind.what})"

    def digests(self) -> str:
        if not kind_of(self._folder).is_dataset:
            return "not recorded here; tokenmill verify compares those of an export"
        files = sorted(load_manifest(self._folder).each_file(), key=lambda file: (file[1].bytes, file[0]))
        sums = itertools.accumulate(digest.bytes for _, digest in files)
        few_files = [file for file, total in zip(files, sums, strict=True) if total <= _HASHED_BYTES][:_HASHED_FILES]
        wrong = [name for name, digest in few_files if self._folder.digest(name) != digest]
        if wrong:
            raise _FailureError(f"{few(wrong)}: another SHA-256 than recorded", "run tokenmill repair")
        return f"{len(few_files):,} of {counted(len(files), 'file')} have their SHA-256; tokenmill verify compares all"

    def open(self) -> str:
        self._dataset = open_dataset(self._path)
        names = [name for name in ("train", *self._dataset) if name in self._dataset]
        if not names or self._dataset[names[0]].num_tokens < _STEPS * _BATCH * 2 + 1:
            raise _DoubtError(f"{self._dataset!r} is too small for a batch", "prepare more text")
        self._split = self._dataset[names[0]]
        self._seq_len = min(_SEQ_LEN, self._split.num_tokens // (6 * _STEPS * _BATCH) or 1)
        return f"{names[0]}: {self._split.summary()}, as {self._split.dtype}"

    def _loader(self, **options: Any) -> DataLoader:
        return DataLoader(self._dataset, self._seq_len, _BATCH, split=self._split.name, **options)

    def samples(self) -> str:
        loader = self._loader(prefetch=0, fields=("sample_index",))
        vocab_size = self._dataset.manifest.tokenizer["vocab_size"]
        largest = 0
        for batch in islice(loader, _STEPS):
            for index, row in zip(batch["sample_index"].tolist(), batch["input_ids"], strict=True):
                stored = self._split.tokens(index * self._seq_len, (index + 1) * self._seq_len)
                if not np.array_equal(row, stored):
                    raise _FailureError(f"sample {index} is not what is stored", "please report this")
            largest = max(largest, int(batch["input_ids"].max()))
        if vocab_size and largest >= vocab_size:
            raise _FailureError(f"id {largest}, but the vocabulary has {vocab_size:,} ids", "run tokenmill verify")
        return (
            f"{_STEPS * _BATCH} of {loader.num_samples:,} samples of {self._seq_len} tokens are those that are stored"
        )

    def labels(self) -> str:
        for batch in islice(self._loader(prefetch=0), _STEPS):
            if not np.array_equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:]):
                raise _FailureError("labels are not the next tokens of the inputs", "please report this")
        return "each is the token after its input"

    def text(self) -> str:
        if self._dataset.manifest.tokenizer["kind"] == "unknown":
            raise _DoubtError("the tokenizer is not recorded", "import the files and name their tokenizer")
        return f"the first document begins with {self._dataset.decode(self._split.document(0)[:16])[:48]!r}"

    def processes(self) -> str:
        """Two ranks in processes of their own have the batches that one process computes for them."""
        expected = [digest_of_batches(self._loader(rank=rank, world_size=2, prefetch=0)) for rank in range(2)]
        running = [self._start_rank(rank) for rank in range(2)]
        found = [_answer_of(process) for process in running]
        if found != expected:
            raise _FailureError(f"ranks in two processes read other batches: {found}", "please report this")
        return f"two ranks in processes of their own read the same {_STEPS} batches"

    def _start_rank(self, rank: int) -> subprocess.Popen[str]:
        asked = json.dumps([self._path, self._seq_len, self._split.name, rank])
        code = "import sys; from tokenmill.inspection import doctor; doctor.run_rank(sys.argv[1])"
        return subprocess.Popen(
            [sys.executable, "-c", code, asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def resume(self) -> str:
        """A run of two ranks, continued by three, sees the samples of a single rank."""
        fields = ("sample_index",)
        steps = 6
        begun = [self._loader(rank=rank, world_size=2, prefetch=0, fields=fields) for rank in range(2)]
        seen = [[batch["sample_index"] for batch in islice(loader, steps // 2)] for loader in begun]
        order = [index for step in zip(*seen, strict=True) for part in step for index in part.tolist()]
        state = json.loads(json.dumps(begun[0].state_dict()))
        resumed = [self._loader(rank=rank, world_size=3, prefetch=0, fields=fields) for rank in range(3)]
        for loader in resumed:
            loader.load_state_dict(state)
        seen = [[batch["sample_index"] for batch in islice(loader, steps // 3)] for loader in resumed]
        order += [index for step in zip(*seen, strict=True) for part in step for index in part.tolist()]
        alone = self._loader(prefetch=0, fields=fields)
        expected = [index for batch in islice(alone, 2 * steps) for index in batch["sample_index"].tolist()]
        if order != expected:
            raise _FailureError("a run of 2 ranks that 3 ranks resume sees other samples", "please report this")
        return "a run of 2 ranks continues with 3 at the next sample"

    def speed(self) -> str:
        seq_len, batch = _MEASURED if self._split.num_tokens > 8 * math.prod(_MEASURED) else (self._seq_len, _BATCH)
        loader = DataLoader(self._dataset, seq_len, batch, split=self._split.name)
        rate = format_count(_tokens_per_second(loader, batch * seq_len))
        return f"{rate} tokens/s, shuffled, in batches of {batch} x {seq_len}"


def run_rank(asked: str) -> None:
    """What a process of the check `processes` does: print the digest of its batches."""
    path, seq_len, split, rank = json.loads(asked)
    sys.stdout.write(digest_of_batches(DataLoader(path, seq_len, _BATCH, split=split, rank=rank, world_size=2)))


def digest_of_batches(loader: DataLoader) -> str:
    sha = hashlib.sha256()
    for batch in islice(loader, _STEPS):
        sha.update(np.ascontiguousarray(batch["input_ids"]).tobytes())
    return sha.hexdigest()[:16]


def _answer_of(process: subprocess.Popen[str]) -> str:
    try:
        answer, errors = process.communicate(timeout=_RANK_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise _FailureError(f"a process took more than {_RANK_SECONDS:.0f} s", "try again later") from None
    if process.returncode:
        raise _FailureError(f"a process failed: {errors.strip().splitlines()[-1:]}", "run it again, or report this")
    return answer.strip()


def _tokens_per_second(batches: Iterable[Any], tokens: int) -> int:
    """The rate after the first batch, over a part of a second."""
    running = iter(batches)
    next(running)
    begin = now = time.perf_counter()
    count = 0
    while now < begin + _MEASURED_SECONDS and next(running, None) is not None:
        count += 1
        now = time.perf_counter()
    if isinstance(running, Generator):
        running.close()
    return round(count * tokens / max(now - begin, 1e-9))
