from __future__ import annotations

from lab import bombs, inputs


def test_changed_sources_are_documents_or_errors_of_ours() -> None:
    row = inputs.run(600)
    assert row.tried == 600
    assert not row.wrong
    assert row.hangs == 0


def test_what_is_huge_only_when_it_is_unpacked_is_dropped_within_the_memory_of_a_worker() -> None:
    row = bombs.run(200_000_000, workers=(1,), names=("line.jsonl", "bomb.jsonl.zst", "column.parquet"))
    assert row.tried == 3
    assert not row.wrong
    assert row.hangs == 0
