"""Results of conversions, as a notebook shows them."""

from __future__ import annotations

from pathlib import Path

from made import EOT, FEW, make_dataset

import tokenmill


def test_a_result_is_shown_in_one_line(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, FEW)
    exported = tokenmill.export(dataset, tmp_path / "out", to="nanogpt")
    files = f"{len(exported.files)} files, {exported.num_bytes} B"
    assert repr(exported).startswith(f"ExportResult('{tmp_path}/out': {files} of layout nanogpt; done in ")
    again = tokenmill.export(dataset, tmp_path / "out", to="nanogpt")
    assert repr(again).endswith("; complete already)")
    imported = tokenmill.import_(tmp_path / "out", tmp_path / "back", layout="nanogpt", eot_id=EOT)
    tokens = imported.manifest.tokens
    assert repr(imported).startswith(f"ImportResult('{tmp_path}/back': {tokens} tokens, ")
    assert " from layout nanogpt; done in " in repr(imported)
