"""What libraries of native code raise while they encode becomes an error that names the library."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tokenmill.errors import TokenizerError
from tokenmill.sources.base import text_array
from tokenmill.tokenizers.base import Encoded
from tokenmill.tokenizers.engine import culprit, native_errors, open_engine
from tokenmill.tokenizers.spec import resolve


class PanicException(BaseException):
    """By this name, and with this base, panics of Rust arrive."""


class Choosy:
    """gpt2's engine, except that it panics for texts with a question mark."""

    def __init__(self) -> None:
        self._engine = open_engine(resolve("gpt2"))

    def encode(self, text: pa.Array) -> Encoded:
        with native_errors("gigatoken"):
            if any("?" in one for one in text.to_pylist()):
                raise PanicException("index out of bounds\nbacktrace")
            return self._engine.encode(text)


@pytest.mark.parametrize("error", [PanicException("broken\nbacktrace"), ValueError("broken"), RuntimeError("broken")])
def test_errors_of_a_library_are_typed_and_short(error: BaseException) -> None:
    with pytest.raises(TokenizerError) as caught, native_errors("gigatoken"):
        raise error
    assert caught.value.message == "gigatoken cannot encode a text: broken"
    assert caught.value.hint


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError("disk")])
def test_what_is_not_about_the_text_passes(error: BaseException) -> None:
    with pytest.raises(type(error)), native_errors("gigatoken"):
        raise error


def test_the_document_that_an_engine_cannot_encode_is_found() -> None:
    engine = Choosy()
    assert culprit(engine, text_array(["one", "two", "three?", "four"])) == 2
    assert culprit(engine, text_array(["one", "two"])) is None
