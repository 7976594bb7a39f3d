"""`prepare(layout=...)`: refused before the build if the export would be, and resumed with it."""

from __future__ import annotations

from pathlib import Path

import pytest

import tokenmill
from conftest import make_texts, write_parquet
from tokenmill.errors import OutputError, RecipeError


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
