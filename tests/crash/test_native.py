"""Errors of the kernel itself, by strace: the quick form. `run.py` tries many more."""

from __future__ import annotations

import pytest
from lab.native import native, why_not

REASON = why_not()


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_any_error_of_the_kernel_ends_in_the_right_bytes_or_in_a_sentence_and_the_same_command_goes_on() -> None:
    row = native(2, seed=1)
    assert row.tried == 2
    assert not row.wrong
    assert row.hangs == 0
