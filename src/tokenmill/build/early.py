"""Shards of a store that need no other unit any more, copied while the rest of the units are done.

    units    0 done   1 done   2 done   3 at work   4 done
    shards   copied   copied   copied               waits: unit 3 decides which shard it is

A store copies what a disk would link, and that takes its time. This is a head start and nothing else: the commit copies
what is not known to be `linked`. So nothing is an error here, and what has not begun is left to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile

from tokenmill.build.groups import Group, group_pieces
from tokenmill.build.receipt import NO_LIMIT, Receipt, read_receipt, receipt_name
from tokenmill.errors import TokenmillError
from tokenmill.planning import Plan
from tokenmill.storage import Folder

# It is the store that works on them.
SHARDS_AT_ONCE = 256
_RECEIPTS_AT_ONCE = 64


@contextlib.contextmanager
def linking_early(
    folder: Folder, plan: Plan, splits: Sequence[str], done: Container[int], linked: set[str]
) -> Iterator[Callable[[], None]]:
    """Gives what to call whenever another unit is `done`. Shards that stand then are put to `linked`."""
    # What a token budget leaves out is not known before its end.
    if folder.is_local or plan.identity.get("max_tokens") is not None:
        yield lambda: None
        return
    follower = _Follower(folder, plan, splits, done, linked)
    thread = threading.Thread(target=follower.follow, name="tokenmill-early", daemon=True)
    thread.start()
    try:
        yield follower.look
    except BaseException:
        follower.stop()  # nobody waits for a copy who wants to stop
        raise
    follower.stop()
    thread.join()


class _Follower:
    """Goes over the units in order, as they are done."""

    def __init__(
        self, folder: Folder, plan: Plan, splits: Sequence[str], done: Container[int], linked: set[str]
    ) -> None:
        self._folder, self._plan, self._splits, self._done, self._linked = folder, plan, splits, done, linked
        self._changed = threading.Condition()
        self._stopped = False

    def look(self) -> None:
        with self._changed:
            self._changed.notify()

    def stop(self) -> None:
        self._stopped = True
        self.look()

    def follow(self) -> None:
        slots = threading.Semaphore(SHARDS_AT_ONCE)
        with contextlib.suppress(TokenmillError), ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
            for group in group_pieces(self._receipts(), self._splits, self._plan.target_tokens):
                if self._stopped:  # this group may not be whole
                    return
                slots.acquire()
                copying = pool.submit(self._link, group)
                copying.add_done_callback(lambda _: slots.release())

    def _link(self, group: Group) -> None:
        links = group.links()
        for link in links:
            if self._stopped:
                return
            self._folder.link(*link)
        if links:
            self._linked.add(group.name)

    def _receipts(self) -> Iterator[Receipt]:
        unit, last = 0, len(self._plan.units)
        while unit < last:
            with self._changed:
                self._changed.wait_for(partial(self._is_ready, unit))
            if self._stopped:
                return
            run = list(takewhile(self._done.__contains__, range(unit, min(unit + _RECEIPTS_AT_ONCE, last))))
            yield from self._folder.each(self._read, run)
            unit += len(run)

    def _read(self, unit: int) -> Receipt:
        return read_receipt(self._folder, receipt_name(unit, NO_LIMIT))

    def _is_ready(self, unit: int) -> bool:
        return self._stopped or unit in self._done
