"""Samples for transformers: its models are trained on the next token, and its Trainer shards them once."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import data as torch_data
from trainer_lab import make_dataset, prove

import tokenmill
import tokenmill.torch as adapters
from conftest import make_texts, write_jsonl
from tokenmill.dataset.dataset import Dataset as OpenDataset
from tokenmill.errors import RecipeError
from tokenmill.transformers import Dataset

VOCABULARY = 257
INSTALLED = "transformers and accelerate are not installed: pip install --group test"
# torch warns of more workers than cores, and the Trainer has words of its own to say.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> OpenDataset:
    path = tmp_path_factory.mktemp("transformers")
    write_jsonl(path / "a.jsonl", make_texts(60, seed=5, words=12))
    tokenmill.prepare(str(path / "a.jsonl"), path / "out", tokenizer="byte", workers=1)
    return tokenmill.open(path / "out")


@pytest.fixture
def model() -> Any:
    pytest.importorskip("accelerate", reason=INSTALLED)
    transformers = pytest.importorskip("transformers", reason=INSTALLED)
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


@pytest.fixture
def start_method(workers: str | None) -> Iterator[None]:
    """How torch's workers are started; older Trainers take it from no argument."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(workers, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def train(model: Any, folder: Path, dataset: Any, *, steps: int = 3, **options: Any) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), max_steps=steps, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **options
    )
    Trainer(model, arguments, train_dataset=dataset).train()


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def next_tokens(dataset: OpenDataset, row: torch.Tensor) -> torch.Tensor:
    """The tokens behind those of the row, but for its last one, from the files."""
    tokens = torch.from_numpy(dataset["train"].tokens(0, dataset["train"].num_tokens).astype("int64"))
    (at,) = (tokens.unfold(0, len(row), 1) == row).all(1).nonzero()[:1, 0]
    return tokens[at + 1 : at + len(row)]


def test_labels_are_the_inputs(dataset: OpenDataset) -> None:
    samples = Dataset(dataset, 32)
    shifted = adapters.Dataset(dataset, 32)
    assert len(samples) == len(shifted)
    for mine, theirs in zip(samples, shifted, strict=True):
        assert mine["labels"].tolist() == mine["input_ids"].tolist() == theirs["input_ids"].tolist()
        assert mine["labels"][1:].tolist() == theirs["labels"][:-1].tolist()


def test_samples_do_not_share_memory(dataset: OpenDataset) -> None:
    """They are rows of one batch, which a collator may write to."""
    first, second = Dataset(dataset, 32).__getitems__([0, 1])
    expected = first["labels"].tolist(), second["input_ids"].tolist()
    first["input_ids"].fill_(-1)
    assert (first["labels"].tolist(), second["input_ids"].tolist()) == expected


@pytest.mark.parametrize("packing", ["concat", "best_fit", "padded"])
def test_masked_labels_are_those_of_shifted_ones(dataset: OpenDataset, packing: Any) -> None:
    options: dict[str, Any] = {"packing": packing, "mask_boundaries": True}
    for mine, theirs in zip(Dataset(dataset, 32, **options), adapters.Dataset(dataset, 32, **options), strict=True):
        assert mine["labels"][1:].tolist() == theirs["labels"][:-1].tolist()


def test_the_loss_is_that_of_the_next_token(dataset: OpenDataset, model: Any, tmp_path: Path) -> None:
    seen = []

    def check(_: Any, __: Any, given: dict[str, Any], result: Any) -> None:
        targets = torch.stack([next_tokens(dataset, row) for row in given["input_ids"]])
        # The Trainer divides by its own count of targets, which older releases get wrong.
        mean = result.loss * given["num_items_in_batch"] / targets.numel()
        assert mean.item() == pytest.approx(cross_entropy(result.logits[:, :-1], targets).item(), rel=1e-6)
        seen.append(given["input_ids"])

    model.register_forward_hook(check, with_kwargs=True)
    train(model, tmp_path, Dataset(dataset, 32), per_device_train_batch_size=5)
    assert [tuple(ids.shape) for ids in seen] == [(5, 32)] * 3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_of_a_row_are_kept_apart_by_their_positions(dataset: OpenDataset, model: Any, attention: str) -> None:
    model.set_attn_implementation(attention)
    row = next(
        row
        for row in Dataset(dataset, 64, packing="best_fit", fields=("position_ids",))
        if (row["position_ids"] == 0).sum() > 2
    )
    logits = model(**{name: values[None] for name, values in row.items()}).logits[0]
    begins = (row["position_ids"] == 0).nonzero()[:, 0].tolist()
    for begin, end in itertools.pairwise([*begins, 64]):
        alone = model(input_ids=row["input_ids"][None, begin:end]).logits[0]
        assert torch.allclose(logits[begin:end], alone, atol=1e-5)


def test_an_attention_mask_beside_positions_is_refused(dataset: OpenDataset) -> None:
    with pytest.raises(RecipeError, match="does not keep the documents"):
        Dataset(dataset, 32, fields=("position_ids", "attention_mask"))


@pytest.mark.parametrize("workers", [0, 2])
def test_our_order_is_that_of_the_loader_epoch_after_epoch(dataset: OpenDataset, workers: int) -> None:
    """Workers that stay from one epoch to the next are told of it, too."""
    samples = Dataset(dataset, 32, order="shuffled", seed=7, fields=("sample_index",))
    loader = tokenmill.DataLoader(dataset, 32, 1, seed=7, epochs=3, fields=("sample_index",))
    batches = torch_data.DataLoader(samples, batch_size=4, num_workers=workers, persistent_workers=workers > 0)
    found = []
    for epoch in range(3):
        samples.set_epoch(epoch)
        found += [index for batch in batches for index in batch["sample_index"].tolist()]
    assert found == [int(batch["sample_index"][0]) for batch in loader]
    with pytest.raises(RecipeError, match="epoch"):
        samples.set_epoch(-1)


@pytest.mark.parametrize("workers", [None, "fork", "spawn"])
@pytest.mark.parametrize("kind", [adapters.Dataset, adapters.IterableDataset])
def test_the_trainer_gets_no_labels_that_are_shifted(
    dataset: OpenDataset, model: Any, tmp_path: Path, kind: Any, workers: str | None, start_method: None
) -> None:
    given = kind(dataset, 32) if kind is adapters.Dataset else kind(dataset, 32, 4)
    with pytest.raises(RecipeError, match=r"token t \+ 2"):
        train(model, tmp_path, given, dataloader_num_workers=1 if workers else 0)


@pytest.mark.parametrize("workers", [None, "fork", "spawn"])
def test_what_is_one_rank_s_share_is_not_sharded_again(dataset: OpenDataset, workers: str | None) -> None:
    accelerate = pytest.importorskip("accelerate", reason=INSTALLED)
    share = adapters.IterableDataset(dataset, 32, 4, rank=0, world_size=2, labels="aligned")
    loader = torch_data.DataLoader(
        share, batch_size=None, num_workers=1 if workers else 0, multiprocessing_context=workers
    )
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    with pytest.raises(RecipeError, match="shards it again"):
        next(iter(prepared))
    assert next(iter(loader))["input_ids"].shape == (4, 32)


def test_accelerate_leaves_our_loader_as_it_is_and_cannot_skip_its_batches(dataset: OpenDataset) -> None:
    accelerate = pytest.importorskip("accelerate", reason=INSTALLED)
    loader = adapters.DataLoader(dataset, 32, 4, rank=0, world_size=2)
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.prepare(loader) is loader
    with pytest.raises(AttributeError, match="load_state_dict"):
        accelerator.skip_first_batches(loader, 2)


@pytest.mark.slow
def test_a_killed_run_resumes_on_three_ranks_with_every_sample_once(tmp_path: Path) -> None:
    """A short form of `make trainers`, which does the same in the environments of all frameworks."""
    pytest.importorskip("accelerate", reason=INSTALLED)
    transformers = pytest.importorskip("transformers", reason=INSTALLED)
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 19):
        pytest.skip("before transformers 5.19, the Trainer does not resume on another number of processes on CPUs")
    prove("train_transformers.py", make_dataset(tmp_path), tmp_path, tail="repeats", stop_at=18, resume_on=(3,))
