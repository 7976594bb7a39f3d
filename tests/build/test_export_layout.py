"""`prepare(layout=...)`: refused before the build if the export would be, and resumed with it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from conftest import make_texts, write_parquet
from tokenmill.build import export_layout
from tokenmill.errors import DatasetError, NotADatasetError, OutputError, RecipeError, TokenmillError
from tokenmill.maintenance.verify import verify_folder
from tokenmill.storage.filesystem import LocalFileSystem
from tokenmill.storage.local import Folder


def test_a_layout_that_the_build_could_not_be_exported_to_is_refused_before_the_build(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["some text"])
    for options in (
        {"eot": "none", "layout": "nanogpt"},
        {"layout": "nanogpt:seq_len=3"},
        {"layout": "other"},
        {"layout": "nanogpt", "split": "nanogpt=0.5"},
        {"layout": "nanogpt", "split": "NanoGPT=0.5"},
        {"layout": "nanogpt:seed=1"},
        {"layout": "megatron:name=../x"},
        {"layout": "llmc", "split": "val=0.3,test=0.3"},
        {"layout": "templar", "split": "val=0.3,test=0.3"},
        {"layout": "catid:shard_size=1T"},
        {"layout": "litdata:shard_size=1T"},
        {"layout": "llmc:shard_size=1T"},
        {"layout": "mds:shard_size=1T"},
        {"layout": "mds:seq_len=2", "eot": "none"},
        {"layout": "huggingface:seq_len=2", "eot": "none"},
    ):
        with pytest.raises(RecipeError):
            tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", workers=1, **options)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("layout", ["llmc", "templar:seq_len=9000", "mds:seq_len=9000", "huggingface:seq_len=9000"])
def test_a_layout_that_the_estimated_text_cannot_fill_is_refused_before_the_units(tmp_path: Path, layout: str) -> None:
    source = str(write_parquet(tmp_path / "a.parquet", ["some text"] * 50))
    for command in (tokenmill.plan, tokenmill.prepare):
        with pytest.raises(RecipeError, match=r"no other|no sample|do not fill"):
            command(source, tmp_path / "data", workers=1, layout=layout)
    assert not list((tmp_path / "data").rglob("*.bin"))
    with pytest.raises(RecipeError, match=r"no other|no sample|do not fill"):
        tokenmill.plan(source, layout=layout)


def test_a_plan_without_an_output_counts_the_files_of_a_layout(tmp_path: Path) -> None:
    source = str(write_parquet(tmp_path / "a.parquet", ["word " * 1_200_000] * 2))
    with pytest.raises(RecipeError, match="more than 1,000,000"):
        tokenmill.plan(source, layout="templar:shard_size=1")


def test_prepare_with_a_layout_resumes_as_one(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(100))
    first = tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", layout="nanogpt", workers=1)
    assert first.export is not None
    assert not first.export.already_complete
    (tmp_path / "data/nanogpt/train.bin").unlink()
    again = tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "data", layout="nanogpt", workers=1)
    assert again.already_complete
    assert again.export is not None
    assert again.export.files == first.export.files
    assert (tmp_path / "data/nanogpt/train.bin").read_bytes() == (tmp_path / "data/train/00000.bin").read_bytes()
    assert tokenmill.verify(tmp_path / "data").ok


def test_an_export_that_fails_leaves_the_dataset_and_says_how_to_resume(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(100))
    source, out = str(tmp_path / "a.parquet"), tmp_path / "data"
    (out / "nanogpt").mkdir(parents=True)
    tokenmill.prepare(source, tmp_path / "other", workers=1)
    for item in (tmp_path / "other").iterdir():
        item.rename(out / item.name)
    (out / "nanogpt" / "a file of somebody").write_text("")
    with pytest.raises(OutputError, match="is finished and complete, but its export to nanogpt is not") as caught:
        tokenmill.prepare(source, out, workers=1, layout="nanogpt")
    assert f"`tokenmill.export('{out}', '{out / 'nanogpt'}', to='nanogpt')`" in str(caught.value.hint)
    assert tokenmill.verify(out).ok


TEMPLAR = "templar:seq_len=8,consolidated=yes"


def only_templar(folder: Path, **options: Any) -> tokenmill.PrepareResult:
    options = {"layout": TEMPLAR, "only_layout": True, "tokenizer": "byte", "split": "val=0.2", "workers": 1, **options}
    return tokenmill.prepare(str(folder / "a.parquet"), folder / "data", **options)


def test_only_the_export_is_kept_and_is_what_the_dataset_would_give(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(60))
    tokenmill.prepare(str(tmp_path / "a.parquet"), tmp_path / "whole", tokenizer="byte", split="val=0.2", workers=1)
    tokenmill.export(tmp_path / "whole", tmp_path / "plain", to="templar", seq_len=8)
    done, out = only_templar(tmp_path), tmp_path / "data"
    kept = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and ".build" not in path.parts}
    assert kept == {"templar/tokens.bin", "templar/sample_ids.bin", "templar/val/train_000000.npy"}
    for name in kept:
        assert (out / name).read_bytes() == (tmp_path / "plain" / name.removeprefix("templar/")).read_bytes()
    again = only_templar(tmp_path)
    assert again.already_complete
    assert (again.manifest, again.export and again.export.files) == (done.manifest, done.export and done.export.files)
    assert tokenmill.verify(out / "templar").ok
    with pytest.raises(NotADatasetError, match="only the export to templar was kept"):
        tokenmill.verify(out)


def test_another_build_is_refused_where_only_an_export_is_kept(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(20))
    only_templar(tmp_path)
    for options in ({"layout": "nanogpt"}, {"seed": 1}, {"only_layout": False}, {"layout": None, "only_layout": False}):
        with pytest.raises(OutputError) as caught:
            only_templar(tmp_path, **options)
        assert "restart=True" in caught.value.hint
    with pytest.raises(OutputError):
        tokenmill.plan(str(tmp_path / "a.parquet"), tmp_path / "data", tokenizer="byte")
    with pytest.raises(RecipeError, match="only_layout"):
        only_templar(tmp_path, layout=None)
    only_templar(tmp_path, restart=True, layout=None, only_layout=False)
    assert tokenmill.verify(tmp_path / "data").ok


def test_a_damaged_export_is_noticed_before_the_dataset_is_removed_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(20))
    tokens = tmp_path / "data/templar/tokens.bin"

    whole_export = export_layout.export_layout

    def export_badly(*arguments: Any, **options: Any) -> Any:
        result = whole_export(*arguments, **options)
        tokens.write_bytes(tokens.read_bytes()[:-1] + b"\xff")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(export_layout, "export_layout", export_badly)
        with pytest.raises(DatasetError, match="damaged") as caught:
            only_templar(tmp_path)
    assert "run the same command again" in caught.value.hint
    assert tokenmill.verify(tmp_path / "data").ok
    only_templar(tmp_path)
    tokens.unlink()
    with pytest.raises(DatasetError, match="missing") as caught:
        only_templar(tmp_path)
    assert "restart=True" in caught.value.hint


def test_at_any_interruption_the_dataset_or_its_export_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "a.parquet", make_texts(20))
    done = only_templar(tmp_path, only_layout=False)
    out, whole, changing = tmp_path / "data", tmp_path / "whole", ("unlink", "rmdir", "link", "rename")
    out.rename(whole)
    for step in itertools.count():
        shutil.copytree(whole, out)
        calls, is_interrupted = itertools.count(), False
        with monkeypatch.context() as patch:
            for name in changing:
                patch.setattr(LocalFileSystem, name, interrupted(getattr(LocalFileSystem, name), calls, step))
            try:
                export_layout._keep_only_layout(Folder(str(out)), TEMPLAR, done.manifest, None)
            except (KeyboardInterrupt, TokenmillError):
                is_interrupted = True
        is_decided = (out / ".build/only_layout.json").exists()
        assert verify_folder(Folder(str(out / "templar" if is_decided else out)), threads=1).ok
        if step % 8 == 0:
            assert only_templar(tmp_path).manifest == done.manifest
            assert not (out / "train").exists()
            assert verify_folder(Folder(str(out / "templar")), threads=1).ok
        shutil.rmtree(out)
        if not is_interrupted:
            break
    assert step >= 20


def interrupted(call: Callable[..., Any], calls: Iterator[int], step: int) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= step:
            raise KeyboardInterrupt
        return call(*arguments, **options)

    return run
