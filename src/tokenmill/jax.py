"""The loader for jax: a data source for Grain, and an iterator that gives every host its part.

    DataSource   samples by their number, as Grain's loaders and datasets want them
    DataLoader   batches for this process; with a sharding, arrays that span all processes

This is the only module that imports jax. `DataSource` does without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, SupportsIndex, Unpack

import numpy as np
import numpy.typing as npt

from tokenmill.dataset.dataset import Dataset
from tokenmill.errors import RecipeError
from tokenmill.formats.open import open as open_dataset
from tokenmill.loader import loader
from tokenmill.loader.batches import Batch
from tokenmill.loader.loader import DatasetLike, LoaderOptions, SampleOptions
from tokenmill.loader.mixture import Mixture

# jax keeps 32 bits unless it is told otherwise.
DTYPE = np.int32


class DataSource:
    """A random-access data source: `len(source)`, and `source[i]` is a dict of arrays, each of one sample.

    Grain decides on order and sharing; it writes `repr(source)` into its checkpoints, so that names the data.
    """

    def __init__(
        self,
        dataset: DatasetLike,
        seq_len: int,
        *,
        dtype: npt.DTypeLike | None = DTYPE,
        **options: Unpack[SampleOptions],
    ) -> None:
        if "cu_seqlens" in options.get("fields", ()):
            raise RecipeError("cu_seqlens is a field of whole batches", hint="use DataLoader")
        options = {"order": "sequential", **options}
        self._stream = loader.DataLoader(dataset, seq_len, batch_size=1, dtype=dtype, **options).stream

    def __len__(self) -> int:
        return self._stream.num_samples

    def __getitem__(self, index: SupportsIndex) -> Batch:
        place, count = index.__index__(), len(self)
        if not -count <= place < count:
            raise IndexError(f"sample {place} of {count}")
        batch = self._stream.batch(self._stream.locate(np.array([place % count])))
        return {name: rows[0] for name, rows in batch.items()}

    def __repr__(self) -> str:
        return f"DataSource({self._stream.identity})"


class DataLoader(loader.DataLoader):
    """`tokenmill.DataLoader` for this process of jax: `batch_size` samples of each step are its own.

    Batches are arrays of numpy. With `sharding`, they are jax's own, of all processes' samples:
    the batch is `batch_size * process_count` rows there, laid out as the sharding says.
    """

    def __init__(
        self,
        dataset: DatasetLike,
        seq_len: int,
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        dtype: npt.DTypeLike | None = DTYPE,
        sharding: Any = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        import jax

        if sharding is not None and "cu_seqlens" in options.get("fields", ()):
            raise RecipeError("cu_seqlens has no rows to shard", hint="leave the field or the sharding out")
        opened = dataset if isinstance(dataset, Dataset | Mixture) else open_dataset(dataset)
        if opened.on_node and (rank is None or world_size is None) and jax.process_count() > 1:
            raise RecipeError(
                "this is one node's part of a dataset, which its processes share",
                hint="give rank and world_size among the processes of this node: 0 and 1 if it has one",
            )
        super().__init__(
            opened,
            seq_len,
            batch_size,
            rank=jax.process_index() if rank is None else rank,
            world_size=jax.process_count() if world_size is None else world_size,
            dtype=dtype,
            **options,
        )
        self._sharding = sharding

    def __iter__(self) -> Iterator[Any]:
        import jax

        for batch in super().__iter__():
            if self._sharding is None:
                yield batch
            else:
                yield {
                    name: jax.make_array_from_process_local_data(self._sharding, np.ascontiguousarray(rows))
                    for name, rows in batch.items()
                }
