"""Libraries of native code: what they die of becomes a `TokenizerError`, which names the library and the document."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa

from tokenmill.errors import TokenizerError, is_panic
from tokenmill.sources.base import text_array
from tokenmill.tokenizers.base import Engine

CHECK = "check the tokenizer's file, or use another form of it, such as a tokenizer.json"
# What libraries raise of their own. Whatever else is raised while they work is not about the text.
_ERRORS = (Exception, KeyError, RuntimeError, ValueError)


@contextlib.contextmanager
def native_errors(library: str, what: str = "encode a text") -> Iterator[None]:
    """What native code dies of while it encodes or decodes, as a typed error."""
    try:
        yield
    except BaseException as error:
        if type(error) not in _ERRORS and not is_panic(error):
            raise
        reason = str(error).partition("\n")[0]
        raise TokenizerError(f"{library} cannot {what}: {reason}", hint=CHECK) from None


def culprit(engine: Engine, text: pa.Array) -> int | None:
    """The first of some documents that an engine cannot encode; None if it can encode each, or nothing any more."""
    if not _encodes(engine, text_array(["a"])):
        return None
    return next((number for number in range(len(text)) if not _encodes(engine, text[number : number + 1])), None)


def _encodes(engine: Engine, text: pa.Array) -> bool:
    try:
        engine.encode(text)
    except TokenizerError:
        return False
    return True
