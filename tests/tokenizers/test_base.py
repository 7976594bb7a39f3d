"""What every engine keeps to: the protocol `Engine`."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.sources.base import text_array
from tokenmill.tokenizers.base import Encoded, Engine, Memory
from tokenmill.tokenizers.engine import open_engine
from tokenmill.tokenizers.spec import char_spec, resolve

TEXTS = ["The quick brown fox", "", "jumps über the lazy dog 1,234", "a"]


@pytest.fixture(params=["gpt2", "tiktoken:gpt2", "byte", "char"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "char":
        return open_engine(char_spec("".join(TEXTS)))
    return open_engine(resolve(request.param))


def test_ids_are_end_to_end_with_the_number_that_each_document_has(engine: Engine) -> None:
    found = engine.encode(text_array(TEXTS))
    assert isinstance(found, Encoded)
    assert found.ids.dtype.kind == "u"
    assert len(found.lengths) == len(TEXTS)
    assert found.lengths.sum() == len(found.ids)
    parts = np.split(found.ids, np.cumsum(found.lengths)[:-1])
    assert [engine.decode(ids) for ids in parts] == TEXTS


def test_no_documents_have_no_ids(engine: Engine) -> None:
    found = engine.encode(text_array([]))
    assert (len(found.ids), len(found.lengths)) == (0, 0)


def test_the_memory_that_encoding_takes_is_known_before(engine: Engine) -> None:
    memory = engine.memory(text_array(TEXTS))
    assert isinstance(memory, Memory)
    assert memory.times_text >= 1
    assert memory.times_run >= 0
