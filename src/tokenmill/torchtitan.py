"""The loader for torchtitan: a prepared dataset instead of text that the trainer tokenizes.

    DataLoader   config.dataloader = tokenmill.torchtitan.DataLoader.Config(dataset="data/owt")

torchtitan builds it with the rank and size of its data-parallel dimension. Batches are like those of its own loader:
positions that restart at documents, from which its attention masks follow, and labels of -100 where the next document
begins. The state is the same on all ranks, so a checkpoint loads with another data-parallel degree, too.

    release 0.3    seq_len, local_batch_size                   rows
    main branch    max_context_length, num_tokens_per_batch    the same rows, end to end in one sequence

Only this module imports torchtitan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenmill import torch as adapters
from tokenmill.errors import RecipeError, StateError
from tokenmill.loader.loader import PackingKind
from tokenmill.permutation import Order

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError:  # the main branch
    from torchtitan.components.data.loader import BaseDataLoader


class DataLoader(BaseDataLoader):  # type: ignore[misc]  # torchtitan is not type-checked here
    """`tokenmill.DataLoader` for torchtitan's trainer and validator."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]  # as above
        """`dataset` is the path or URL of a prepared dataset; the other options are those of `tokenmill.DataLoader`."""

        dataset: str = ""
        split: str = "train"
        packing: PackingKind = "concat"
        order: Order = "shuffled"
        seed: int = 0
        mask_boundaries: bool = True
        infinite: bool = True
        """Repeat endlessly, or read the split once."""
        repeat: bool = True
        """The same, by the name that the main branch has for it."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int = 0,
        local_batch_size: int = 0,
        max_context_length: int = 0,
        num_tokens_per_batch: int = 0,
        **_: Any,
    ) -> None:
        self._is_flat = bool(max_context_length)
        if self._is_flat:
            seq_len, (local_batch_size, rest) = max_context_length, divmod(num_tokens_per_batch, max_context_length)
            if rest:
                raise RecipeError(
                    f"{num_tokens_per_batch} tokens per batch are not whole rows of {max_context_length}",
                    hint="make training.num_tokens_per_microbatch_per_dp_rank a multiple of "
                    "training.max_context_length",
                )
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
            epochs=None if config.infinite and config.repeat else 1,
        )

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{self._loader!r}"

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        for batch in self._loader:
            names = ("input_ids", "positions", "labels")
            inputs, positions, labels = (batch[name].flatten() if self._is_flat else batch[name] for name in names)
            yield {"input": inputs, "positions": positions}, labels

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
