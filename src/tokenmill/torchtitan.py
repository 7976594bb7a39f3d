"""The loader for torchtitan: a prepared dataset instead of text that the trainer tokenizes.

    DataLoader   config.dataloader = tokenmill.torchtitan.DataLoader.Config(dataset="data/owt")

torchtitan builds it with the rank and size of its data-parallel dimension. Batches are like those of its own loader:
positions that restart at documents, from which its attention masks follow, and labels of -100 where the next document
begins. The state is the same on all ranks, so a checkpoint loads with another data-parallel degree, too.

Only this module imports torchtitan. It is made for release 0.3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader

from tokenmill import torch as adapters
from tokenmill.errors import StateError
from tokenmill.loader.loader import PackingKind
from tokenmill.permutation import Order


class DataLoader(BaseDataLoader):  # type: ignore[misc]  # torchtitan is not type-checked here
    """`tokenmill.DataLoader` for torchtitan's trainer and validator."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]  # as above
        """`dataset` is the path or URL of a prepared dataset; the other options are those of `tokenmill.DataLoader`."""

        split: str = "train"
        packing: PackingKind = "concat"
        order: Order = "shuffled"
        seed: int = 0
        mask_boundaries: bool = True
        infinite: bool = True
        """Repeat endlessly, or read the split once."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        self._loader = adapters.DataLoader(
            config.dataset,
            seq_len,
            local_batch_size,
            rank=dp_rank,
            world_size=dp_world_size,
            split=config.split,
            packing=config.packing,
            order=config.order,
            seed=config.seed,
            mask_boundaries=config.mask_boundaries,
            fields=("positions",),
            epochs=None if config.infinite else 1,
        )

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{self._loader!r}"

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        for batch in self._loader:
            yield {"input": batch["input_ids"], "positions": batch["positions"]}, batch["labels"]

    def state_dict(self) -> dict[str, Any]:
        """The position, as one string: torch's checkpoints would take a mapping apart."""
        return {"tokenmill": json.dumps(self._loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue there, on any data-parallel degree. torchtitan gives an empty state if it has none."""
        if not state_dict:
            return
        if "tokenmill" not in state_dict:
            raise StateError(
                "the checkpoint has the state of another dataloader",
                hint="start without it, with checkpoint.exclude_from_loading=['dataloader']",
            )
        self._loader.load_state_dict(json.loads(state_dict["tokenmill"]))
