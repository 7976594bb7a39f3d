"""trace: what a step, a sample, a document or a row of a source consists of, and where it is in training.

The question decides the loader, with the options of the one that trains; loader/trace.py answers.
"""

from __future__ import annotations

from typing import Any

from tokenmill import arguments
from tokenmill.dataset.dataset import Dataset, SourceRow
from tokenmill.errors import RecipeError
from tokenmill.formats import open as datasets
from tokenmill.loader.loader import DataLoader, DatasetLike, PackingKind
from tokenmill.loader.mixture import Mixture
from tokenmill.loader.skip import Skip
from tokenmill.loader.trace import SplitDocuments, Trace, TracedDocument, Tracer, trace_step
from tokenmill.permutation import Order

_WHAT = ("step", "sample", "document", "source")


def trace(
    dataset: DatasetLike,
    *,
    step: int | None = None,
    rank: int | None = None,
    sample: int | None = None,
    document: int | None = None,
    source: str | None = None,
    component: str | None = None,
    epoch: int = 0,
    split: str | None = None,
    seq_len: int | None = None,
    batch_size: int | None = None,
    world_size: int = 1,
    packing: PackingKind = "concat",
    order: Order = "shuffled",
    seed: int = 0,
    max_seq_len: int | None = None,
    skip: Skip = (),
    epochs: int | None = None,
    drop_last: bool = True,
) -> Trace:
    """What a step, sample, document or row of a source consists of, and where it is in training.

    Give one of them. `step`, of one `rank` or of all, gives its samples with their documents; `sample` is a number as
    in the field "sample_index". `document` counts the documents of the split. `source` is a file and a position,
    such as "a.parquet:12": a row, or in text and JSON lines a byte offset anywhere inside of the document.

    The other options are those of the loader that trains. Without `seq_len`, a document has no samples, and without
    `batch_size` these have no steps. Samples are searched in pass number `epoch` over the dataset, or over that
    `component` of a mixture, whose document or sample it is.
    """
    _check_question(step=step, rank=rank, sample=sample, document=document, source=source)
    if step is not None and (epoch or component is not None):
        ignored = "epoch" if epoch else "component"
        raise RecipeError(f"{ignored} with a step", hint="leave it out: steps count from the start of the run")
    opened = dataset if isinstance(dataset, Dataset | Mixture) else datasets.open(dataset)
    name, owner = (None, None) if step is not None else _find_component(opened, component)
    split, number = arguments.text_or_none("split", split), arguments.whole_or_none("document", document)
    if owner is not None and source is not None:
        row = owner.find(*_parse_source(source))
        if row.split is None or row.document is None:
            return Trace(samples=(), documents=(_dropped(name, row),))
        if split not in (None, row.split):
            raise RecipeError(f"{row} is in split {row.split}, not in {split}", hint="leave out `split`")
        split, number = row.split, row.document
    split = split or "train"
    if owner is not None and number is not None and seq_len is None and batch_size is None:
        return Trace(samples=(), documents=tuple(SplitDocuments(name, owner, owner[split]).of([number]).values()))
    if seq_len is None or (step is not None and batch_size is None):
        missing = "seq_len" if seq_len is None else "batch_size"
        raise RecipeError(f"{missing} is missing", hint="give that of the loader, which decides what a sample is")
    loader = DataLoader(
        opened,
        seq_len,
        1 if batch_size is None else batch_size,
        split=split,
        packing=packing,
        order=order,
        seed=seed,
        world_size=world_size,
        max_seq_len=max_seq_len,
        skip=skip,
        epochs=epochs,
        drop_last=drop_last,
    )
    if step is not None:
        return trace_step(loader, step, rank)
    tracer = Tracer(loader, has_steps=batch_size is not None)
    epoch = arguments.whole("epoch", epoch)
    if number is not None:
        return tracer.document(name, number, epoch)
    return tracer.sample(name, arguments.whole("sample", sample), epoch)


def _check_question(**asked: Any) -> None:
    given = [name for name in _WHAT if asked[name] is not None]
    if len(given) != 1:
        what = f"{' and '.join(given)} are given" if given else "there is nothing to trace"
        raise RecipeError(what, hint=f"give one of {', '.join(_WHAT)}")
    if asked["rank"] is not None and asked["step"] is None:
        raise RecipeError("rank without a step", hint="give the step, too")


def _dropped(component: str | None, row: SourceRow) -> TracedDocument:
    return TracedDocument(
        component=component,
        split=None,
        document=None,
        source=row,
        num_tokens=0,
        first_token=None,
        file=None,
        file_token=None,
    )


def _find_component(dataset: Dataset | Mixture, component: str | None) -> tuple[str | None, Dataset]:
    """The dataset whose document, sample or row is meant."""
    if isinstance(dataset, Dataset):
        if component is not None:
            raise RecipeError(f"component {component!r} of a single dataset", hint="leave it out")
        return None, dataset
    name = dataset.names[0] if component is None and len(dataset.names) == 1 else component
    if name not in dataset.datasets:
        raise RecipeError(f"component is {arguments.show(component)}", hint=f"choose from {', '.join(dataset.names)}")
    return name, dataset.datasets[name]


def _parse_source(source: str) -> tuple[str, int]:
    """A file and a position, from `a.parquet:12`."""
    path, _, position = arguments.text("source", source).rpartition(":")
    if not path or not (position.isascii() and position.isdigit()):
        raise RecipeError(f"source is {source!r}", hint="write it like a.parquet:12, with a row or a byte offset")
    return path, int(position)
