"""Batches as plain lists, for tests that compare loaders of torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

FIELDS = ("sample_index",)
# torch warns of more workers than cores, which is what these tests want.
FEW_CORES = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def plain(batch: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in batch.items()}


def take(batches: Iterator[Any] | Any, steps: int | None = None) -> list[dict[str, list[Any]]]:
    return [plain(batch) for batch in itertools.islice(batches, steps)]


def samples(batches: list[dict[str, list[Any]]]) -> list[int]:
    return [index for batch in batches for index in batch["sample_index"]]
