"""The dataset card, `README.md` in a dataset: what it is and how to load it, with the metadata of the Hugging Face hub.

Its content follows from the manifest alone. Its last line holds the SHA-256 of the rest, so an edited card is
recognised and not overwritten; nor is a README.md without that line.
"""

from __future__ import annotations

import hashlib
import json
import re

from tokenmill.dataset.manifest import CARD, Manifest
from tokenmill.errors import RecipeError
from tokenmill.sizes import format_bytes
from tokenmill.storage.base import Storage

_MAX_CARD_BYTES = 1 << 20
_SEAL = re.compile(rb"<!-- written by tokenmill; keep this line and it is written again: ([0-9a-f]{64}) -->\n\Z")
_SEAL_TEXT = "<!-- written by tokenmill; keep this line and it is written again: {} -->\n"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]{0,95}")
_LICENSE = re.compile(rb'^license: "([A-Za-z0-9._/+-]+)"$', re.MULTILINE)
_THOUSANDS = ("", "K", "M", "B", "T")


def write_card(folder: Storage, manifest: Manifest, *, name: str, license: str | None = None) -> str | None:
    """Write the card into the folder of a dataset, and return its path; None if there is a README.md of the user."""
    before = None
    if folder.exists(CARD):
        before = folder.read(CARD) if (folder.size_of(CARD) or 0) < _MAX_CARD_BYTES else b""
        if not is_unchanged(before):
            return None
    if license is None and before is not None:
        license = next((found.decode() for found in _LICENSE.findall(before)), None)  # as it was given before
    text = card(manifest, name=name, license=license).encode()
    if before != text:
        folder.replace(CARD, text)
    return folder.at(CARD)


def is_unchanged(text: bytes) -> bool:
    """Whether this is a card as tokenmill wrote it."""
    found = _SEAL.search(text)
    return found is not None and hashlib.sha256(text[: found.start()]).hexdigest().encode() == found[1]


def card(manifest: Manifest, *, name: str, license: str | None = None) -> str:
    """The card of a dataset."""
    if license is not None and not _PLAIN.fullmatch(license):
        raise RecipeError(f"license is {license!r}", hint="write it as on the Hugging Face hub, such as cc-by-4.0")
    text = "\n".join([*_metadata(manifest, name, license or "unknown"), "", *_body(manifest, name)]) + "\n"
    return text + _SEAL_TEXT.format(hashlib.sha256(text.encode()).hexdigest())


def size_category(documents: int) -> str:
    """The hub's name for a number of documents, such as 1M<n<10M."""
    powers = [_power(exponent) for exponent in range(3, 13)]
    if documents < 10**3:
        return f"n<{powers[0]}"
    digits = len(str(documents)) - 4
    return f"n>{powers[-1]}" if digits >= len(powers) - 1 else f"{powers[digits]}<n<{powers[digits + 1]}"


def _power(exponent: int) -> str:
    return f"{10 ** (exponent % 3)}{_THOUSANDS[exponent // 3]}"


def _metadata(manifest: Manifest, name: str, license: str) -> list[str]:
    tokenizer = str(manifest.tokenizer.get("name", ""))
    tags = ["tokenized", "tokenmill", *([tokenizer] if _PLAIN.fullmatch(tokenizer) else [])]
    lines = [
        "---",
        f"pretty_name: {_quoted(name)}",
        f"license: {_quoted(license)}",
        "task_categories:",
        "- text-generation",
        "size_categories:",
        f"- {_quoted(size_category(manifest.documents))}",
        "tags:",
        *(f"- {_quoted(tag)}" for tag in tags),
    ]
    if any(file.startswith("provenance/") for file in manifest.files):
        # The hub can show Parquet: where each document came from.
        lines += ["configs:", "- config_name: provenance", '  data_files: "provenance/*.parquet"']
    return [*lines, "---"]


def _quoted(text: str) -> str:
    """A text in YAML's double quotes, which are those of JSON."""
    safe = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return json.dumps(safe, ensure_ascii=False)


def _code(text: str) -> str:
    """A text in backquotes, in one line."""
    return "`" + "".join(char if char.isprintable() else "\ufffd" for char in text).replace("`", "'") + "`"


def _body(manifest: Manifest, name: str) -> list[str]:
    tokenizer = manifest.tokenizer
    stored = sum(digest.bytes for _, digest in manifest.each_file())
    lines = [
        f"# {_heading(name)}",
        "",
        f"{manifest.tokens:,} tokens of {manifest.documents:,} documents, encoded with {_code(str(tokenizer['name']))} "
        f"and stored as {manifest.dtype}: {format_bytes(stored)}.",
        "",
        "| split | documents | tokens | shards |",
        "|---|---:|---:|---:|",
        *(
            f"| {split_name} | {split.documents:,} | {split.tokens:,} | {len(split.shards):,} |"
            for split_name, split in sorted(manifest.splits.items(), key=lambda item: (item[0] != "train", item[0]))
        ),
        "",
        "## Load it",
        "",
        "```python",
        "import tokenmill",
        "",
        'dataset = tokenmill.open("PATH")',
        'print(dataset["train"].text(0))',
        "```",
        "",
        f"A .bin file is raw little-endian {manifest.dtype}, which numpy.memmap reads as it is; with its .idx it is a "
        "pair of Megatron-LM. The command tokenmill verify PATH checks all files against dataset.json.",
        "",
        "## How it was made",
        "",
        *(f"- {key}: {_code(value)}" for key, value in _recipe(manifest)),
    ]
    if manifest.dropped:
        dropped = ", ".join(
            f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(manifest.dropped.items())
        )
        lines.append(f"- dropped: {dropped}, of {manifest.documents_read:,} documents read")
    return [*lines, ""]


def _heading(name: str) -> str:
    return "".join(char if char.isprintable() and char not in "<>&[]*_`#\\" else "-" for char in name)


def _recipe(manifest: Manifest) -> list[tuple[str, str]]:
    tokenizer = manifest.tokenizer
    rows = [("sources", f"{len(manifest.sources):,}")] if manifest.sources else []
    rows += [
        (key.replace("_", " "), str(tokenizer[key]))
        for key in ("vocab_size", "eot_id", "engine")
        if tokenizer.get(key) not in (None, "", 0)
    ]
    rows += [
        (
            key.replace("_", " "),
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True),
        )
        for key, value in sorted(manifest.identity.items())
        if key not in ("tokenizer", "engine", "imported") and value not in (None, {}, "")
    ]
    return [*rows, ("fingerprint", manifest.fingerprint)]
