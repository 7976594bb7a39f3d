"""tokenmill.transformers.Dataset in the Trainer, which shuffles, or in our order with ORDER=shuffled."""

import os
from typing import Any

import torch
from recorder import DATASET, EPOCHS, SAVE_EVERY, SEQ_LEN, SHARE, STATE, VOCABULARY, finish, record
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tokenmill

order = os.environ.get("ORDER", "sequential")
torch.manual_seed(1)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=SEQ_LEN, **sizes))
dataset = tokenmill.transformers.Dataset(DATASET, SEQ_LEN, order=order, seed=1)
arguments = TrainingArguments(
    str(STATE),
    per_device_train_batch_size=SHARE,
    num_train_epochs=EPOCHS,
    save_steps=SAVE_EVERY,
    learning_rate=0.1,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    **{"train_sampling_strategy": "sequential"} if order == "shuffled" else {},
)
trainer = Trainer(model, arguments, train_dataset=dataset)


def keep(_: Any, __: Any, given: dict[str, Any], result: Any) -> None:
    # The Trainer divides by its own count of targets, which older releases get wrong: to the mean of the rank's batch.
    num_targets = given["input_ids"].shape[0] * (SEQ_LEN - 1)
    loss = result.loss.detach() * given["num_items_in_batch"] / num_targets
    record(trainer.state.global_step, given["input_ids"], result.logits.detach(), loss, num_targets=SEQ_LEN - 1)


model.register_forward_hook(keep, with_kwargs=True)
trainer.train(resume_from_checkpoint=any(STATE.glob("checkpoint-*")))
finish()
