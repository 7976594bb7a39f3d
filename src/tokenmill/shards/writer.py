"""Writing a piece or a shard: tokens stream into .bin, the index follows at the end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tokenmill.errors import BuildError
from tokenmill.manifest import Shard
from tokenmill.shards.layout import MAX_DOCUMENT_TOKENS, Tokens, index_blocks, numpy_dtype
from tokenmill.storage import Digest, Output


class ShardWriter:
    """One .bin and .idx pair in the making. Nothing is created before the first token."""

    def __init__(self, create: Callable[[str], Output], name: str, dtype: str) -> None:
        self.name = name
        self._create = create
        self._dtype = dtype
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._bin: Output | None = None
        self._idx: Output | None = None
        self.tokens = 0
        self.documents = 0

    def write(self, tokens: Tokens, lengths: npt.NDArray[np.int64]) -> None:
        """Add documents: their tokens end to end, and how many each has."""
        assert tokens.dtype == numpy_dtype(self._dtype), "narrow the ids before writing them"
        if len(lengths) and int(lengths.max()) > MAX_DOCUMENT_TOKENS:
            raise BuildError(f"{self.name}: a document has 2^31 tokens or more", hint="lower --max-document-bytes")
        self._lengths.append(lengths.astype(np.int32))
        self.documents += len(lengths)
        self.append(tokens.data.cast("B"))

    def append(self, data: memoryview) -> None:
        """Add raw bytes of tokens whose lengths were or will be given by `expect`."""
        if len(data):
            if self._bin is None:
                self._bin = self._create(f"{self.name}.bin")
            self._bin.write(data)
            self.tokens += len(data) // numpy_dtype(self._dtype).itemsize

    def expect(self, lengths: npt.NDArray[np.int32]) -> None:
        """Add documents whose bytes come by `append`."""
        self._lengths.append(lengths)
        self.documents += len(lengths)

    def outputs(self) -> list[Output]:
        """The files to publish; none if there was no token, for an empty .bin cannot be mapped."""
        if self._bin is None:
            return []
        lengths = np.concatenate(self._lengths)
        self._idx = self._create(f"{self.name}.idx")
        for block in index_blocks(self._dtype, lengths):
            self._idx.write(block)
        return [self._bin, self._idx]

    def describe(self, digests: dict[str, Digest]) -> Shard:
        """What was published."""
        return Shard(
            name=self.name,
            tokens=self.tokens,
            documents=self.documents,
            bin=digests[f"{self.name}.bin"],
            idx=digests[f"{self.name}.idx"],
        )

    def discard(self) -> None:
        for output in (self._bin, self._idx):
            if output is not None:
                output.discard()
