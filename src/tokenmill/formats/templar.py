"""Templar: `train_000000.npy` shards of an exact size, `tokens.bin` of all of them, `sample_ids.bin`.

    train_000000.npy | train_000001.npy | ...      the training split; validation has a folder of its own
    tokens.bin                                     the same tokens in one file, without headers
    sample_ids.bin                                 8 bytes for each sample of T tokens: BLAKE2b over them

Sample i is tokens [i * T, (i + 1) * T): samples do not share tokens. Templar's own script reads uint16 tokens as if
they had 32 bits: each of its ids covers two samples, and those of the second half cover nothing. `templar_compat`
writes the same ids.

`consolidate` writes tokens.bin and sample_ids.bin from shards of any origin. Users then delete the shards; called
without them, it checks what it wrote before. Users know the checksums that these files should have (`read_expected`).
`sample_ids`, `draw_samples` and `make_receipt` compute what miners and validators agree on.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokenmill import arguments, records
from tokenmill.arguments import Watcher
from tokenmill.dataset.bin_idx import numpy_dtype
from tokenmill.dataset.dataset import Dataset, TokenSplit
from tokenmill.dataset.manifest import EXPORT_RECORD
from tokenmill.errors import DatasetError, RecipeError, hint_for
from tokenmill.formats.base import (
    DetectedFiles,
    Expected,
    Export,
    Facts,
    Files,
    FormatTraits,
    Hints,
    Options,
    Outline,
    OutputPart,
    TokenFile,
    TokenStream,
    cut_anywhere,
    file_part,
    filled_splits,
    no_more_files,
    require_sample,
    require_train_and_val,
)
from tokenmill.formats.files import NPY_MAGIC, check_numbers, head_of, names_in, size_of
from tokenmill.formats.open import open_in_place
from tokenmill.formats.results import ExportResult, FileCheck
from tokenmill.sizes import parse_size
from tokenmill.storage.base import Storage, local_folder
from tokenmill.storage.memory_maps import open_plain
from tokenmill.storage.output import Digest

_COMPAT_ITEM_BYTES = 2  # the original knows no other
TRAITS = FormatTraits(
    options={"shard_size", "seq_len", "templar_compat", "consolidated"},
    needs={"eot"},
    bytes_per_token=(4, 8),
    equal_shards=True,
)

SHARD_TOKENS = 1 << 30
SEQ_LEN = 2048
_BLOCK_SAMPLES = 256
# By the names that users know them by.
EXPECTED_FILES = {"tokens": "tokens.bin", "sample_ids": "sample_ids.bin"}
_FILE_HINT = 'write it like {"tokens": {"sha256": "4c53...", "elements": 161061273600}}'

_FETCH_SHARDS = "fetch the train_*.npy shards again, then run the same command"
_MAY_BE_DELETED = "all files are as expected, so the shards (train_*.npy) may be deleted: tokens.bin has their tokens"
_COMPAT_HINT = (
    "the sample ids may be expected as Templar's own script computes them, which reads two tokens as one and so hashes "
    "two samples for each id: `templar_compat=True` writes the same ids"
)
_OWN_FOLDER = "move the shards to a folder of their own, and run the same command there"

Numbers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint64]


def detect(path: str, hints: Hints) -> DetectedFiles | None:
    """`train_000000.npy` shards, or tokens.bin if there are none. A folder `val` beside them is another split."""
    if os.path.isfile(path):
        head = head_of(path, len(NPY_MAGIC))
        paths = {"train": [path]} if head == NPY_MAGIC or os.path.basename(path) == "tokens.bin" else {}
    else:
        train = _find_shards(path, hints.layout == "templar")
        paths = {"train": train, "val": _find_shards(f"{path}/val", bool(train))}
    shards = {split: [_read_file(one, hints) for one in found] for split, found in paths.items() if found}
    if not shards:
        return None
    kinds = {dtype for found in shards.values() for dtype, _ in found}
    if len(kinds) > 1:
        raise DatasetError(f"{path}: shards of different dtypes: {', '.join(sorted(kinds))}", hint="open one of them")
    files = {split: [file for _, file in found] for split, found in shards.items()}
    eot = "none" if hints.eot_id is None else "append"
    return DetectedFiles(layout="templar", dtype=kinds.pop(), eot=eot, eot_id=hints.eot_id, files=files)


def _find_shards(folder: str, is_given: bool) -> list[str]:
    """Shards by their names. Unless the format was given, the first one must also be a real .npy file."""
    names = names_in(folder)
    shards = [f"{folder}/{name}" for name in names if re.fullmatch(r"train_\d{6,}\.npy", name)]
    if shards and (is_given or head_of(shards[0], len(NPY_MAGIC)) == NPY_MAGIC):
        check_numbers(shards)
        return shards
    return [f"{folder}/tokens.bin"] if "tokens.bin" in names else []


def _read_file(path: str, hints: Hints) -> tuple[str, TokenFile]:
    if path.endswith(".bin"):
        dtype, offset, count = hints.stored_dtype(default="uint16", where=path), 0, None
    else:
        dtype, offset, count = _npy_header(path)
    size = size_of(path)
    found, rest = divmod(size - offset, numpy_dtype(dtype).itemsize)
    if rest or not found or count not in (None, found):
        raise DatasetError(f"{path}: {size} bytes do not hold its tokens", hint="is the file complete?")
    return dtype, TokenFile(path=path, offset=offset, num_tokens=found)


def _npy_header(path: str) -> tuple[str, int, int]:
    """Dtype, offset and number of the tokens. Nothing is unpickled."""
    try:
        with open(path, "rb", opener=open_plain) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, kind = read(file)
            offset = file.tell()
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path}: not a .npy file: {error}", hint="is the file complete?") from None
    names = {"<u2": "uint16", "<i4": "int32", "<u4": "int32"}
    if kind.str not in names or len(shape) != 1 or offset % 4:
        raise DatasetError(
            f"{path}: {kind} of shape {shape} is not a row of tokens", hint="one row of uint16 or uint32 is read"
        )
    return names[kind.str], offset, shape[0]


def check(options: Options, outline: Outline) -> None:
    require_train_and_val(outline, layout="templar")
    if "train" in outline.splits:
        require_sample(options.seq_len or SEQ_LEN, outline)
    if options.templar_compat and outline.dtype != "uint16":
        raise RecipeError("Templar's own ids need uint16 tokens", hint="drop `templar_compat`")
    if options.consolidated and options.shard_size is not None and "val" not in outline.splits:
        raise RecipeError("`consolidated` writes no shards, so `shard_size` does nothing", hint="drop one of the two")


def write(source: Dataset, options: Options) -> Export:
    splits = filled_splits(source)
    parts = [
        shard_part(f"{'' if name == 'train' else f'{name}/'}train_{number:06d}.npy", split, bounds)
        for name, split in splits.items()
        if name != "train" or not options.consolidated
        for number, bounds in enumerate(cut_anywhere(split.num_tokens, options.shard_size or SHARD_TOKENS))
    ]
    if "train" in splits:
        seq_len = options.seq_len or SEQ_LEN
        parts += consolidated(splits["train"], seq_len, compat=bool(options.templar_compat))
    return Export(parts=tuple(parts))


def shard_part(name: str, split: TokenSplit, bounds: tuple[int, int]) -> OutputPart:
    """A .npy file with a header, which `numpy.load` reads."""
    start, stop = bounds
    stream = TokenStream(split, "append")
    buffer = io.BytesIO()
    about = {"descr": f"<u{stream.itemsize}", "fortran_order": False, "shape": (stop - start,)}
    np.lib.format.write_array_header_1_0(buffer, about)
    head = buffer.getvalue()
    size = len(head) + (stop - start) * stream.itemsize
    return file_part(name, size, lambda: itertools.chain([head], stream.data(start, stop)))


def consolidated(split: TokenSplit, seq_len: int, *, compat: bool) -> list[OutputPart]:
    """tokens.bin, and the ids of all samples."""
    stream = TokenStream(split, "append" if split.eot != "none" else "")
    count = split.num_tokens // seq_len
    if not count:
        raise RecipeError(f"{split.num_tokens} tokens make no sample of {seq_len}", hint="use a smaller `seq_len`")
    if compat and stream.itemsize != _COMPAT_ITEM_BYTES:
        raise RecipeError("Templar's own ids need uint16 tokens", hint="drop `templar_compat`")
    size = split.num_tokens * stream.itemsize
    return [
        file_part("tokens.bin", size, lambda: stream.data(0, split.num_tokens)),
        file_part("sample_ids.bin", 8 * count, lambda: write_sample_ids(stream, seq_len, compat=compat)),
    ]


def write_sample_ids(stream: TokenStream, seq_len: int, *, compat: bool) -> Iterator[bytes]:
    """The ids of all samples, block by block."""
    count = stream.num_tokens // seq_len
    # What Templar's script takes as a sample is twice as long, and empty behind the end of the tokens.
    tokens = 2 * seq_len if compat else seq_len
    whole = stream.num_tokens // 2 * 2 if compat else stream.num_tokens
    for first in range(0, count, _BLOCK_SAMPLES):
        last = min(first + _BLOCK_SAMPLES, count)
        data = b"".join(stream.data(min(first * tokens, whole), min(last * tokens, whole)))
        size = tokens * stream.itemsize
        view = memoryview(data)
        yield b"".join(
            [hashlib.blake2b(view[i * size : (i + 1) * size], digest_size=8).digest() for i in range(last - first)]
        )


def consolidate(
    data_root: str | os.PathLike[str],
    seq_len: int | str = 2048,
    *,
    expected: Mapping[str, Expected] | None = None,
    templar_compat: bool = False,
    workers: int | None = None,
    restart: bool = False,
    watch: Watcher | None = None,
) -> ExportResult:
    """Write tokens.bin and sample_ids.bin beside the shards. Called again, it checks them.

    `restart` writes both again, also if the shards were replaced or an option is different; so it needs the shards.
    """
    # Imported here: these load pyarrow, which opening Templar's files in place must not.
    from tokenmill.formats.resumable import check_output, is_of_other_content, make_request, run_conversion, start_over
    from tokenmill.resources import resolve_workers

    begin = time.monotonic()
    folder = local_folder(data_root)
    shards = [name for name in folder.names() if name.startswith("train_") and name.endswith(".npy")]
    length = parse_size(seq_len, of="tokens", name="seq_len")
    templar_compat, restart = arguments.flag("templar_compat", templar_compat), arguments.flag("restart", restart)
    options = {"seq_len": length, "templar_compat": templar_compat}
    if restart:
        _check_restart(folder, shards)
    if shards:
        _check_numbers(shards, folder.path)
        source = open_in_place(folder.path, Hints(layout="templar"))
        parts = consolidated(source["train"], length, compat=templar_compat)
        about = {"source": source.manifest.fingerprint, "dtype": source.manifest.dtype, **source.pins("train")}
    else:
        parts, about = _parts_without_shards(folder)
    request = make_request(layout="templar", options=options, **about)
    if restart or (shards and is_of_other_content(folder, request)):
        start_over(folder, watch)  # the shards have other times, and the same tokens as far as samples of them tell
    hint = f"start over with `restart=True`, or {_OWN_FOLDER}" if shards else _FETCH_SHARDS
    check_output(folder, request, what="consolidation", ignore=set(folder.names()) - {".build"}, hint=hint)
    done = run_conversion(
        folder, request, parts, no_more_files, threads=resolve_workers(workers), scratch=None, watch=watch
    )
    wanted = Options(seq_len=length, templar_compat=templar_compat)
    checks = check_files(done.files, expected or {}, about["dtype"], options=wanted)
    are_needed = not shards or checks[0].has_passed is None
    return ExportResult(
        output=folder.path,
        layout="templar",
        files=done.files,
        notes=() if are_needed else (_MAY_BE_DELETED,),
        already_complete=done.num_kept == len(parts),
        seconds=time.monotonic() - begin,
        checks=checks,
    )


def _check_restart(folder: Storage, shards: Sequence[str]) -> None:
    """Refuse to remove what could not be written again from the shards."""
    if not shards:
        raise RecipeError(
            f"{folder.path} has no train_000000.npy to start over from",
            hint=f"leave `restart` out to check tokens.bin and sample_ids.bin, or {_FETCH_SHARDS}",
        )
    if folder.exists(EXPORT_RECORD):
        raise RecipeError(
            f"{folder.path} is an export to templar, with its own tokens.bin and sample_ids.bin",
            hint=f"check it with `tokenmill.verify({folder.path!r})`, or export it again",
        )


def _parts_without_shards(folder: Storage) -> tuple[list[OutputPart], dict[str, Any]]:
    """The files of an earlier call, which are checked and not written again, and the request of that call."""
    from tokenmill.formats.resumable import PINS, REQUEST, ConversionRequest

    if not folder.exists(REQUEST):
        raise DatasetError(f"{folder.path} has no train_000000.npy", hint="give the folder with Templar's shards")
    before = records.unseal(ConversionRequest, folder.read(REQUEST, max_bytes=1 << 26), where=folder.at(REQUEST)).about
    parts = [OutputPart(name=name, num_bytes=0, write=_refuse) for name in EXPECTED_FILES.values()]
    pins = {name: before[name] for name in PINS if name in before}
    return parts, {"source": str(before.get("source")), "dtype": str(before.get("dtype", "uint16")), **pins}


def _refuse(_: Files) -> Facts:
    raise DatasetError(
        "tokens.bin or sample_ids.bin has changed since it was written, and the shards are gone",
        hint=_FETCH_SHARDS,
    )


def _check_numbers(shards: Sequence[str], where: str) -> None:
    """Refuse a gap: all tokens behind it would be different samples."""
    for number, name in enumerate(shards):
        if name != f"train_{number:06d}.npy":
            raise DatasetError(f"{where} has {name} where train_{number:06d}.npy should be", hint="is a shard missing?")


def read_expected(given: Sequence[str], checksums: str | os.PathLike[str] | None) -> dict[str, Expected]:
    """Checksums from the command line and from a file, by name: tokens, sample_ids."""
    expected: dict[str, Expected] = {}
    if checksums is not None:
        path = arguments.place("checksums", checksums)
        try:
            found = records.parse(Path(path).read_bytes(), where=path)
            expected = {
                str(name): Expected(sha256=str(one["sha256"]), elements=int(one.get("elements", -1)))
                for name, one in found.items()
            }
        except OSError as error:
            told = f"{path} is not a file of checksums: it cannot be read: {error.strerror}"
            raise RecipeError(told, hint=hint_for(error, _FILE_HINT)) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecipeError(f"{path} is not a file of checksums: {error}", hint=_FILE_HINT) from None
    for text in given:
        name, _, rest = text.partition("=")
        sha, _, count = rest.partition(":")
        if count and not count.isdecimal():
            raise RecipeError(f"{text!r} is not a checksum", hint="write it like tokens=SHA256:COUNT")
        expected[name] = Expected(sha256=sha, elements=int(count) if count else -1)
    if unknown := sorted(expected.keys() - EXPECTED_FILES.keys()):
        raise RecipeError(f"unknown file {unknown[0]!r}", hint=f"choose from {', '.join(EXPECTED_FILES)}")
    for name, one in expected.items():
        if not re.fullmatch(r"[0-9a-fA-F]{64}", one.sha256):
            raise RecipeError(f"{one.sha256!r} is not a SHA-256 of {name}", hint="it has 64 hexadecimal digits")
    return expected


def check_files(
    files: Mapping[str, Digest], expected: Mapping[str, Expected], dtype: str, *, options: Options
) -> tuple[FileCheck, ...]:
    """tokens.bin and sample_ids.bin beside what is expected of them. Raises `DatasetError` with both if one differs."""
    sizes = {"tokens": numpy_dtype(dtype).itemsize, "sample_ids": 8}
    checks = tuple(
        FileCheck(
            file=file,
            elements=files[file].bytes // sizes[name],
            sha256=files[file].sha256,
            expected_elements=None if name not in expected or expected[name].elements < 0 else expected[name].elements,
            expected_sha256=expected[name].sha256 if name in expected else "",
        )
        for name, file in EXPECTED_FILES.items()
        if file in files
    )
    if bad := [one.file for one in checks if one.has_passed is False]:
        lines = "\n  ".join(line for one in checks for line in one.lines())
        hint = "are the shards complete, and is the sequence length right? Leave `expected` out to skip this"
        if bad == ["sample_ids.bin"]:
            hint = (
                "are the ids expected without `templar_compat`? Then drop it"
                if options.templar_compat
                else _COMPAT_HINT
            )
        raise DatasetError(f"not as expected: {', '.join(bad)}\n  {lines}", hint=hint)
    return checks


class SampleReceipt(NamedTuple):
    """A digest of a set of samples, which does not depend on their order."""

    digest: str
    num_samples: int


def num_samples(split: TokenSplit, seq_len: int) -> int:
    return split.num_tokens // seq_len


def sample_ids(split: TokenSplit, seq_len: int, samples: Iterable[int]) -> Ids:
    """The id of each sample: eight bytes of BLAKE2b over its tokens as stored."""
    found = []
    for sample in samples:
        tokens = split.tokens(sample * seq_len, (sample + 1) * seq_len)
        found.append(hashlib.blake2b(tokens.data, digest_size=8).digest())
    return np.frombuffer(b"".join(found), "<u8").astype(np.uint64)


def draw_samples(uid: int, window: int, count: int, total: int, *, rank: int = 0, world_size: int = 1) -> Numbers:
    """The samples that miner `uid` trains on in a window: `count` of `total`, and of these the share of a rank."""
    if count > total:
        raise RecipeError(f"{count} samples of {total} cannot be drawn without repeats", hint="draw fewer")
    chance = np.random.default_rng((uid * 1000003 ^ window) & 0xFFFFFFFF)
    return chance.choice(total, size=count, replace=False)[rank::world_size]


def make_receipt(ids: Iterable[int] | Ids) -> SampleReceipt:
    """The receipt of a set of samples, from their ids."""
    in_order = np.sort(np.fromiter((int(one) for one in ids), np.uint64))
    return SampleReceipt(hashlib.blake2b(in_order.astype("<u8").data, digest_size=16).hexdigest(), len(in_order))
