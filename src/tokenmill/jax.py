"""The loader for JAX: a data source for Grain, and an iterator over the batches of each process.

    DataSource   samples by their index, for Grain's loaders and datasets
    DataLoader   batches for this process; with a sharding, arrays that span all processes

Only this module imports jax, and `DataSource` does not need it.
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

# jax keeps 32 bits unless jax_enable_x64 is set.
DTYPE = np.int32


class DataSource:
    """A random-access data source: `len(source)`, and `source[i]` is a dict of arrays, each of one sample.

    Grain decides the order and the shards. It writes `repr(source)` into its checkpoints, so the repr is the identity
    of the stream and never changes.
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
        position, count = index.__index__(), len(self)
        if not -count <= position < count:
            raise IndexError(f"sample {position} of {count}")
        batch = self._stream.batch(self._stream.locate(np.array([position % count])))
        return {name: rows[0] for name, rows in batch.items()}

    def __repr__(self) -> str:
        return f"DataSource({self._stream.identity}, content={self._stream.content!r})"


class DataLoader(loader.DataLoader):
    """`tokenmill.DataLoader` for this jax process, which gets `batch_size` samples of each step.

    Batches are numpy arrays. With `sharding`, they are jax arrays of the samples of all processes:
    `batch_size * process_count` rows, laid out by the sharding.
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
        if opened.is_node_part and (rank is None or world_size is None) and jax.process_count() > 1:
            raise RecipeError(
                "the dataset is one node's part, which the processes of the node share",
                hint="give rank and world_size within this node: 0 and 1 if it has one process",
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
