"""nanoGPT: `train.bin` and `val.bin`, raw uint16 tokens, every document followed by the end of text.

A dataset that was prepared with `--split nanogpt` comes out in the order of the original's own script, byte for byte.
A character-level dataset has `meta.pkl` beside it, as nanoGPT reads it, and the same as `meta.json`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from tokenmill.data.bare import Hints, open_bare
from tokenmill.data.dataset import Dataset
from tokenmill.data.order import make_key
from tokenmill.errors import RecipeError
from tokenmill.layouts.shape import Export, Options, file_part, filled_splits
from tokenmill.layouts.shuffled import keyed_order, original_orders, shuffled
from tokenmill.layouts.stream import TokenStream
from tokenmill.storage import Folder

SUMMARY = "train.bin and val.bin of raw uint16 tokens"
OPTIONS = frozenset({"order", "seed"})
NEEDS = frozenset({"eot", "uint16"})
WIDTHS = (2, 4)


def plan(source: Dataset, options: Options) -> Export:
    if options.seed is not None and options.order != "shuffled":
        raise RecipeError("a seed is for --order shuffled", hint="add it, or drop --seed")
    return Export(
        parts=tuple(
            file_part(f"{name}.bin", 2 * split.num_tokens, _reading(source, name, options))
            for name, split in filled_splits(source).items()
        ),
        finish=lambda _: _meta(source),
    )


def open(path: str, hints: Hints) -> Dataset:
    return open_bare(path, replace(hints, layout="nanogpt"))


def _reading(source: Dataset, name: str, options: Options) -> Callable[[], Iterator[memoryview]]:
    """How the tokens of a split are read: as they stand, drawn by a seed, or as the original draws them."""
    split = source[name]
    if options.order == "shuffled":
        key = make_key("nanogpt", source.manifest.fingerprint, name, options.seed or 0)
        return lambda: shuffled(split, keyed_order(split, key))
    if options.order is None and source.manifest.identity.get("split") == "nanogpt":
        order = original_orders(source)[name]
        return lambda: shuffled(split, iter([order]))
    return lambda: TokenStream(split, "append").data(0, split.num_tokens)


def _meta(source: Dataset) -> Mapping[str, bytes]:
    """What nanoGPT's character-level scripts want to know."""
    about = source.manifest.tokenizer
    if about["kind"] != "char":
        return {}
    characters = [chr(point) for point in json.loads(Folder(source.path).read(about["file"]))]
    meta = {
        "vocab_size": about["vocab_size"],
        "itos": dict(enumerate(characters)),
        "stoi": {character: number for number, character in enumerate(characters)},
    }
    return {
        "meta.pkl": pickle.dumps(meta, protocol=4),
        "meta.json": json.dumps(meta, ensure_ascii=False, sort_keys=True).encode(),
    }
