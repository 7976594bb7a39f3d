"""tokenmill.torchtitan.DataLoader, built and checkpointed by torchtitan as in its trainer, which itself needs a GPU."""

import torch.distributed as dist
from recorder import DATASET, EPOCHS, RANK, SAVE_EVERY, SEQ_LEN, SHARE, STATE, WORLD_SIZE, finish, make_model, record
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR
from torchtitan.components.checkpoint import CheckpointManager

from tokenmill.torchtitan import DataLoader


class Progress:
    """The part of torchtitan's trainer that is in its checkpoints."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


dist.init_process_group("gloo")
model, progress = make_model(), Progress()
optimizer = SGD(model.parameters(), lr=0.5)
loader = DataLoader.Config(dataset=str(DATASET), seed=1, mask_boundaries=False).build(
    dp_world_size=WORLD_SIZE, dp_rank=RANK, tokenizer=None, seq_len=SEQ_LEN, local_batch_size=SHARE
)
checkpoints = CheckpointManager.Config(enable=True, interval=SAVE_EVERY, keep_latest_k=0).build(
    dataloader=loader,
    model_parts=[model],
    optimizers=optimizer,
    lr_schedulers=ConstantLR(optimizer),
    states={"train_state": progress},
    sd_adapter=None,
    base_folder=str(STATE),
)
checkpoints.load()
steps = EPOCHS * loader._loader.num_samples // (SHARE * WORLD_SIZE)
for inputs, labels in loader:
    logits = model(inputs["input"])
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
    record(progress.step, inputs["input"], logits.detach(), loss.detach())
    optimizer.zero_grad()
    loss.backward()
    for weights in model.parameters():
        dist.all_reduce(weights.grad)
        weights.grad /= WORLD_SIZE
    optimizer.step()
    progress.step += 1
    checkpoints.save(progress.step)
    if progress.step == steps:
        break
finish()
