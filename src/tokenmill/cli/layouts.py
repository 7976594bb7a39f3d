"""The commands that go between layouts: export, import, consolidate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tokenmill.cli import show
from tokenmill.cli.watching import Watcher

_EXPORT = """
Write a dataset as the files of a trainer's layout. Killed? Run the same command again: it goes on where it stopped.

\b
Layouts: {layouts}

\b
Examples:
  tokenmill export data/owt --to nanogpt out/nanogpt
  tokenmill export data/owt --to llmc out/llmc --name fineweb --shard-size 100M
  tokenmill export data/owt --to templar out/templar --seq-len 2048 --shard-size 1Gi
  tokenmill export data/owt --to huggingface out/hub --seq-len 4096
"""
_IMPORT = """
Make a dataset of the files of a trainer's layout, with its documents, in their order.

Where a layout does not store where documents end, the end-of-text id tells: give it, or the tokenizer.

\b
Examples:
  tokenmill import out/nanogpt --from nanogpt -o data/owt --tokenizer gpt2
  tokenmill import shards/ --from templar -o data/dclm --eot-id 2
"""
_CONSOLIDATE = """
Join Templar's train_000000.npy shards to tokens.bin, and write the ids of their samples to sample_ids.bin.

What comes out is compared with what you expect: SHA-256 and number of elements of each.

\b
Examples:
  tokenmill consolidate --data_root shards/ --seq_len 2048 --expect tokens=4c53...:161061273600
  tokenmill consolidate --data_root shards/ --seq_len 2048 --checksums expected.json
  tokenmill consolidate --data_root shards/ --seq_len 2048 --skip-validation
"""
# The names are said here once more, so that --help loads no layout.
_LAYOUTS = "catid, datatrove, huggingface, litdata, llmc, mds, megatron, nanogpt, olmo, templar"

Output = Annotated[str, typer.Option("-o", "--output", metavar="DATASET", help="the dataset's folder")]
Workers = Annotated[int | None, typer.Option("-j", "--workers", metavar="N", help="threads; all cores by default")]
Scratch = Annotated[
    Path | None, typer.Option(metavar="DIR", help="write here first, where the output is a slow network drive")
]
Restart = Annotated[bool, typer.Option("--restart", help="throw away what an earlier run wrote there")]
Expect = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=SHA256[:COUNT]", help="what tokens or sample_ids must be (templar); may be repeated"),
]
Checksums = Annotated[
    Path | None, typer.Option(metavar="FILE", help='the same as JSON: {"tokens": {"sha256": ..., "elements": ...}}')
]
SkipValidation = Annotated[
    bool, typer.Option("--skip-validation", "--skip_validation", help="compare with nothing, whatever is expected")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="print nothing but errors")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="no bar and no progress lines")]


def add_commands(app: typer.Typer) -> None:
    """Register the commands."""
    app.command(help=_EXPORT.format(layouts=_LAYOUTS))(export)
    app.command("import", help=_IMPORT)(import_)
    app.command(help=_CONSOLIDATE)(consolidate)


def export(
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET", help="a dataset, or token files of a layout", show_default=False)
    ],
    output: Annotated[str, typer.Argument(metavar="OUT", help="a folder of its own", show_default=False)],
    to: Annotated[str, typer.Option("--to", metavar="LAYOUT", help=f"one of {_LAYOUTS}")],
    shard_size: Annotated[str | None, typer.Option(metavar="N", help="tokens of a file, like 100M or 1Gi")] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(metavar="N", help="tokens of a sample (templar: 2048), or of a packed row (mds, huggingface)"),
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="what file names begin with")] = None,
    order: Annotated[
        Literal["source", "shuffled"] | None, typer.Option(help="of the documents (nanogpt); source by default")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="of --order shuffled (0)")] = None,
    templar_compat: Annotated[
        bool, typer.Option("--templar-compat", help="sample ids as the original computes them, which is wrong")
    ] = False,
    expect: Expect = None,
    checksums: Checksums = None,
    skip_validation: SkipValidation = False,
    workers: Workers = None,
    scratch: Scratch = None,
    restart: Restart = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> int:
    from tokenmill.layouts.expecting import read_expected
    from tokenmill.layouts.exporting import export

    expected = {} if skip_validation else read_expected(expect or (), checksums)
    options = {
        "shard_size": shard_size,
        "seq_len": seq_len,
        "name": name,
        "order": order,
        "seed": seed,
        "templar_compat": templar_compat or None,
    }
    with Watcher(quiet=quiet, verbose=False, progress=not no_progress) as watcher:
        result = export(
            dataset,
            output,
            to=to,
            workers=workers,
            scratch=scratch,
            restart=restart,
            watch=watcher,
            expected=expected,
            **options,
        )
    if as_json:
        show.as_json(show.export_record(result))
    elif not quiet:
        show.exported(result)
    return 0


def import_(
    path: Annotated[str, typer.Argument(metavar="PATH", help="files of the layout, or one of them")],
    layout: Annotated[str, typer.Option("--from", metavar="LAYOUT", help=f"one of {_LAYOUTS}")],
    output: Output,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="what made the tokens; the dataset can be decoded then")
    ] = None,
    eot_id: Annotated[int | None, typer.Option(metavar="N", help="the id that ends a text", min=0)] = None,
    dtype: Annotated[
        Literal["uint16", "uint32", "int32"] | None, typer.Option(help="of files that do not tell it")
    ] = None,
    workers: Workers = None,
    scratch: Scratch = None,
    restart: Restart = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> int:
    from tokenmill.layouts.importing import import_

    with Watcher(quiet=quiet, verbose=False, progress=not no_progress) as watcher:
        result = import_(
            path,
            output,
            layout=layout,
            tokenizer=tokenizer,
            eot_id=eot_id,
            dtype=dtype,
            workers=workers,
            scratch=scratch,
            restart=restart,
            watch=watcher,
        )
    if as_json:
        show.as_json({**show.result_record(result), "layout": result.layout, "notes": list(result.notes)})
    elif not quiet:
        show.result(result)
    return 0


def consolidate(
    data_root: Annotated[
        str, typer.Option("--data_root", "--data-root", metavar="DIR", help="the folder with train_000000.npy, ...")
    ],
    seq_len: Annotated[
        int, typer.Option("--seq_len", "--seq-len", metavar="N", help="tokens of a sample", min=1)
    ] = 2048,
    expect: Expect = None,
    checksums: Checksums = None,
    skip_validation: SkipValidation = False,
    templar_compat: Annotated[
        bool, typer.Option("--templar-compat", help="sample ids as the original computes them, which is wrong")
    ] = False,
    workers: Workers = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
) -> int:
    from tokenmill.layouts.consolidating import consolidate
    from tokenmill.layouts.expecting import read_expected

    expected = {} if skip_validation else read_expected(expect or (), checksums)
    with Watcher(quiet=quiet, verbose=False, progress=not no_progress) as watcher:
        result = consolidate(
            data_root, seq_len, expected=expected, compat=templar_compat, workers=workers, watch=watcher
        )
    if as_json:
        show.as_json(show.export_record(result))
    elif not quiet:
        show.exported(result)
        if not expected and not skip_validation:
            print("  compared with nothing: --expect or --checksums say what the files must be")
    return 0
