"""Where the ranks of a torch process group meet, as torchrun has it: one process that is no rank keeps the store."""

from __future__ import annotations

from typing import Any


def meeting_place(num_ranks: int) -> tuple[Any, dict[str, str]]:
    """The store, which must live as long as the ranks do, and what tells them of it.

    The system gives it a port that is free: one that was merely looked for could be somebody else's a moment later.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
