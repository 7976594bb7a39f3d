"""Streams: an endless run of samples in one global order, and a batch of any places in it.

    places of the global order  --locate-->  samples  --batch-->  rows of tokens

Both are pure functions. Who takes which places, and when, is the loader's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.data.borders import as_fields, find_borders
from tokenmill.data.order import ORDERS, Order, draw, make_key, permute
from tokenmill.data.windows import Windows
from tokenmill.errors import RecipeError

Batch = dict[str, npt.NDArray[Any]]
Numbers = npt.NDArray[np.int64]

FIELDS = ("positions", "document_ids", "cu_seqlens", "sample_index", "part")
IGNORED = -100


class Stream(Protocol):
    """What a loader draws from. `identity` is plain JSON: two streams with the same one are the same."""

    @property
    def identity(self) -> dict[str, Any]: ...

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""

    def locate(self, places: Numbers) -> Numbers:
        """What stands at these places of the global order, which has no end. Quicker for many than for a few."""

    def batch(self, located: Numbers) -> Batch:
        """A row for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What batches look like: further `fields`, labels masked at the borders of documents, the dtype of ids."""

    fields: tuple[str, ...] = ()
    mask_borders: bool = False
    dtype: npt.DTypeLike | None = np.int64

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.fields) - set(FIELDS)):
            raise RecipeError(f"fields {unknown} are unknown", hint=f"there are {', '.join(FIELDS)}")

    def label_dtype(self, stored: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of ids and labels; masks need room for a negative number."""
        found = stored if self.dtype is None else np.dtype(self.dtype)
        if not np.can_cast(stored, found) or found.kind not in "iu":
            raise RecipeError(f"ids of {stored} do not fit into {found}", hint="use int64, or int32")
        if self.mask_borders and found.kind == "u":
            raise RecipeError(f"labels of {found} cannot be masked with {IGNORED}", hint="use a signed dtype")
        return found


class WindowStream:
    """Windows of one split, in some order; `identity` tells which."""

    def __init__(self, windows: Windows, identity: dict[str, Any], *, order: Order, seed: int, form: Form) -> None:
        self.identity = {**identity, "packing": "concat", "seq_len": windows.seq_len, "order": order, "seed": seed}
        self.windows = windows
        self._order = check_order(order)
        self._form = form
        self._dtype = form.label_dtype(windows.dtype)
        self._border_fields = set(form.fields) - {"sample_index"}

    @property
    def num_samples(self) -> int:
        return len(self.windows)

    def locate(self, places: Numbers) -> Numbers:
        """The first tokens of the windows."""
        windows = self.windows
        if self._order == "random":
            return draw(places, windows.split.num_tokens - windows.seq_len, make_key(self.identity))
        return in_order(places, self.num_samples, self._order, self.identity) * windows.seq_len

    def batch(self, located: Numbers) -> Batch:
        windows, starts = self.windows, located
        stored = windows.gather(starts)
        rows = stored.astype(self._dtype, copy=False)
        batch: Batch = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
        if self._form.mask_borders or self._border_fields:
            borders = find_borders(windows.split, stored, starts)
            if self._form.mask_borders:
                batch["labels"] = stored[:, 1:].astype(self._dtype)
                batch["labels"][borders.rows, borders.columns - 1] = IGNORED
            batch |= as_fields(borders, self._border_fields, (len(starts), windows.seq_len))
        if "document_ids" in self._border_fields:
            batch["document_ids"] += windows.split.document_at(starts)[:, None]
        if "sample_index" in self._form.fields:
            batch["sample_index"] = starts if self._order == "random" else starts // windows.seq_len
        return batch


def in_order(places: Numbers, count: int, order: str, identity: dict[str, Any]) -> Numbers:
    """The samples at these places, epoch after epoch of `count` samples."""
    epochs, within = np.divmod(places, count)
    if order == "shuffled":
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            within[mine] = permute(within[mine], count, make_key(identity, epoch))
    return within


def check_order(order: str, known: Sequence[str] = ORDERS) -> str:
    if order not in known:
        raise RecipeError(f"order {order!r} is unknown", hint=f"there are {', '.join(known)}")
    return order
