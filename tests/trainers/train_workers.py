"""tokenmill.torch.IterableDataset in torch's DataLoader with two workers."""

import torch.distributed as dist
from recorder import DATASET, EPOCHS, SEQ_LEN, SHARE, finish, load, make_model, train
from torch.utils.data import DataLoader

import tokenmill

dist.init_process_group("gloo")
model, saved = make_model(), load()
dataset = tokenmill.torch.IterableDataset(DATASET, SEQ_LEN, SHARE, seed=1, epochs=EPOCHS)
if saved:
    model.load_state_dict(saved["model"])
    dataset.load_state_dict(saved["loader"])
batches = DataLoader(dataset, batch_size=None, num_workers=2)
train(batches, dataset, model, first_step=saved["step"] if saved else 0)
finish()
