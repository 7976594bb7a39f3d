"""tokenmill.torch.IterableDataset in torchdata's StatefulDataLoader with two workers. Each rank saves its own state."""

import torch
import torch.distributed as dist
from recorder import DATASET, EPOCHS, RANK, SEQ_LEN, SHARE, STATE, finish, make_model, train
from torchdata.stateful_dataloader import StatefulDataLoader

import tokenmill

dist.init_process_group("gloo")
model, path, step = make_model(), STATE / f"{RANK}.pt", 0
dataset = tokenmill.torch.IterableDataset(DATASET, SEQ_LEN, SHARE, seed=1, epochs=EPOCHS)
loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2)
if path.exists():
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    loader.load_state_dict(saved["loader"])
    step = saved["step"]


def save(state):
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)


train(loader, loader, model, first_step=step, save=save)
finish()
