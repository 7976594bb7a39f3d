"""One tree of errors: what a traceback shows, what crosses processes, what stays secret."""

from __future__ import annotations

import copy
import pickle
import traceback

import pytest

from tokenmill import errors
from tokenmill.errors import (
    BuildError,
    DiskFullError,
    RecipeError,
    TokenmillError,
    UnknownSplitError,
    from_record,
    to_record,
)


def every(root: type[TokenmillError] = TokenmillError) -> list[type[TokenmillError]]:
    return [root, *(one for child in root.__subclasses__() if hasattr(errors, child.__name__) for one in every(child))]


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_a_traceback_ends_with_the_hint() -> None:
    error = RecipeError("`eot_token` needs `eot='append'`", hint="drop one of the two")
    assert shown(error).endswith("RecipeError: `eot_token` needs `eot='append'`\nhint: drop one of the two\n")
    assert str(error) == error.message
    assert "hint" not in shown(RecipeError("what happened"))


@pytest.mark.parametrize("kind", every(), ids=lambda kind: kind.__name__)
def test_an_error_crosses_processes_with_its_hint_once(kind: type[TokenmillError]) -> None:
    error = kind("what happened", hint="what to do")
    for arrived in (from_record(to_record(error)), pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(arrived) is kind
        assert (arrived.message, arrived.hint, arrived.exit_code) == ("what happened", "what to do", kind.exit_code)
        assert shown(arrived).count("hint: what to do") == 1


def test_an_error_of_another_kind_crosses_as_its_name_and_text() -> None:
    arrived = from_record(to_record(ValueError("odd")))
    assert type(arrived) is TokenmillError
    assert arrived.message == "ValueError: odd"
    assert not hasattr(arrived, "__notes__")


def test_an_unknown_split_is_a_key_error_that_shows_its_message_without_quotes() -> None:
    with pytest.raises(KeyError) as caught:
        raise UnknownSplitError("no split 'test'", hint="choose one of them")
    assert str(caught.value) == "no split 'test'"


def test_exit_codes_are_those_of_the_tree_in_the_docstring() -> None:
    said = {}
    for line in (errors.__doc__ or "").splitlines():
        name, _, rest = line.strip(" │├└─").partition(" ")
        if name in {kind.__name__ for kind in every()}:
            said[name] = int(next(word for word in rest.replace("exit code", "").split() if word.isdigit()))
    assert said == {kind.__name__: kind.exit_code for kind in every()}


def test_secrets_are_in_neither_message_nor_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_SECRET", "hunter2222")
    error = DiskFullError("s3://me:pass@host/x?sig=abc", hint="the key is hunter2222")
    assert "pass" not in shown(error)
    assert "abc" not in shown(error)
    assert "hunter2222" not in shown(error)


def test_a_lack_of_memory_in_a_worker_says_what_helps() -> None:
    error = from_record(to_record(MemoryError()))
    assert isinstance(error, BuildError)
    assert error.message == "there is not enough memory"
    assert "`max_document_bytes`" in error.hint
