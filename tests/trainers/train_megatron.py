"""A shard of the dataset, as it is, in Megatron-core's GPTDataset, with the sampler's arithmetic of Megatron-LM."""

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from recorder import (
    BATCH_SIZE,
    DATASET,
    EPOCHS,
    RANK,
    SEQ_LEN,
    SHARE,
    STATE,
    VOCABULARY,
    finish,
    load,
    make_model,
    train,
)


class Tokenizer:
    """What GPTDataset asks of one."""

    vocab_size, eod, pad, unique_identifiers = VOCABULARY, 256, 256, {"class": "bytes"}


class Consumed:
    """Megatron's state: samples before this step, the same on all ranks."""

    samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}


dist.init_process_group("gloo")
config = GPTDatasetConfig(
    random_seed=1,
    sequence_length=SEQ_LEN,
    blend_per_split=[([str(DATASET / "train/00000")], None), None, None],
    path_to_cache=str(STATE / "cache"),
    tokenizer=Tokenizer(),
    reset_position_ids=False,
    reset_attention_mask=False,
    eod_mask_loss=False,
    create_attention_mask=False,
)
windows = (DATASET / "train/00000.bin").stat().st_size // 2 // SEQ_LEN
data = BlendedMegatronDatasetBuilder(GPTDataset, [windows, 0, 0], lambda: True, config).build()[0]
model, saved, consumed = make_model(), load(), Consumed()
if saved:
    model.load_state_dict(saved["model"])
    consumed.samples = saved["loader"]["samples"]


def batches():
    while consumed.samples + BATCH_SIZE <= EPOCHS * len(data):
        mine = [data[consumed.samples + SHARE * RANK + number] for number in range(SHARE)]
        consumed.samples += BATCH_SIZE
        yield {
            "input_ids": torch.stack([sample["tokens"] for sample in mine]),
            "labels": torch.stack([sample["labels"] for sample in mine]),
        }


train(batches(), consumed, model, first_step=saved["step"] if saved else 0)
finish()
