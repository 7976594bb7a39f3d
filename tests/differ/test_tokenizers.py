"""The quick form: fewer texts for every path, and each mend taken out is noticed."""

from __future__ import annotations

import functools

import pytest
from differ.seeding import Bug, is_caught

from differ import tokenizers as lab
from tokenmill.tokenizers.parity import PATTERNS

PATHS = [
    functools.partial(lab.gpt2, 200),
    functools.partial(lab.plain, 200),
    *(functools.partial(lab.ranks_of, scheme, 100) for scheme in PATTERNS),
    *(functools.partial(lab.json_of, kind, 100) for kind in lab.JSONS),
    *(functools.partial(lab.model_of, setting, 100) for setting in ("bpe default", "unigram suffix")),
    functools.partial(lab.built, "unigram identity", 50),
    lab.panics,
]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(getattr(path, "args", "")))
def test_a_path_gives_the_ids_of_its_own_library(path: functools.partial[lab.Row]) -> None:
    row = path()
    assert row.tried >= (1 if path is lab.panics else 100)
    assert not row.wrong


@pytest.mark.parametrize("bug", lab.BUGS, ids=lambda bug: bug.name)
def test_a_mend_that_is_taken_out_is_noticed(bug: Bug) -> None:
    assert not bug.trial().wrong
    assert is_caught(bug)
