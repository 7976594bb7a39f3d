from __future__ import annotations

import pytest
from lab.leaks import SECRET, cases, leaks

from tokenmill.errors import BuildError, from_record, redact, to_record


def test_no_command_shows_or_keeps_a_secret() -> None:
    row = leaks(cases()[::3])
    assert row.tried >= 7
    assert not row.wrong
    assert row.hangs == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://bob:pw@example.com/x?sig=1&b=2 failed", "GET https://***@example.com/x?*** failed"),
        ("s3:/key:pw@bucket/x", "s3:/***@bucket/x"),
        ("what is this? a=b", "what is this? a=b"),
        ("mail bob@example.com", "mail bob@example.com"),
        ("no secret in https://example.com/x", "no secret in https://example.com/x"),
    ],
)
def test_users_and_queries_of_urls_are_not_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_values_of_secret_variables_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "something")
    assert redact(f"key {SECRET}, something") == "key ***, something"
    error = from_record(to_record(ValueError(SECRET)))
    assert SECRET not in str(error)
    assert SECRET not in str(BuildError("x", hint=SECRET).hint)
