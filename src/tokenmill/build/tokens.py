"""From ids to tokens on disk: the end of text in its place, the range checked, one narrowing."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from tokenmill.errors import BuildError, TokenizerError
from tokenmill.shards.layout import Tokens
from tokenmill.tokenizer.encoded import Encoded


def place_eot(encoded: Encoded, *, eot: str, eot_id: int | None, vocab_size: int, dtype: str) -> Tokens:
    """The documents' tokens end to end, each with its end-of-text id where the policy wants it."""
    ids, lengths = encoded.ids, encoded.lengths
    largest = int(ids.max()) if len(ids) else -1
    if largest >= vocab_size:
        raise BuildError(
            f"the tokenizer gave id {largest}, beyond its vocabulary of {vocab_size}",
            hint="please report this, with the tokenizer",
        )
    narrow: Tokens = ids.astype(np.uint16) if dtype == "uint16" else ids.astype(np.int32)
    if eot == "none":
        return narrow
    assert eot_id is not None, "a recipe that wants an end of text has a tokenizer with one"
    # A text that gave the id itself would look like two documents.
    if largest >= eot_id and (narrow == eot_id).any():
        raise TokenizerError(
            f"a text gave the end-of-text id {eot_id} itself", hint="choose an --eot-token that no text can give"
        )
    ends = np.cumsum(lengths)
    return cast("Tokens", np.insert(narrow, ends if eot == "append" else ends - lengths, eot_id))


def cut_to(encoded: Encoded, *, room: int, eot: bool) -> Encoded:
    """The first documents, down to exactly `room` tokens with their EOTs; the last one may be cut."""
    sizes = encoded.lengths + int(eot)
    kept = int(np.searchsorted(np.cumsum(sizes), room, side="left")) + 1
    lengths = encoded.lengths[:kept].copy()
    lengths[-1] -= int(sizes[:kept].sum()) - room
    return Encoded(encoded.ids[: int(lengths.sum())], lengths)


def select(encoded: Encoded, chosen: npt.NDArray[np.bool_]) -> Encoded:
    """Some of the documents, in order, copied run by run."""
    if chosen.all():
        return encoded
    borders = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    ends = np.concatenate(([0], np.cumsum(encoded.lengths)))
    runs = [encoded.ids[ends[first] : ends[last]] for first, last in borders.reshape(-1, 2)]
    return Encoded(np.concatenate(runs) if runs else encoded.ids[:0], encoded.lengths[chosen])
