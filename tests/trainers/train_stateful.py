"""tokenmill.torch.IterableDataset in torchdata's StatefulDataLoader with two workers."""

import torch.distributed as dist
from recorder import DATASET, EPOCHS, SEQ_LEN, SHARE, finish, load, make_model, train
from torchdata.stateful_dataloader import StatefulDataLoader

import tokenmill

dist.init_process_group("gloo")
model, saved = make_model(), load()
dataset = tokenmill.torch.IterableDataset(DATASET, SEQ_LEN, SHARE, seed=1, epochs=EPOCHS)
loader = StatefulDataLoader(dataset, batch_size=None, num_workers=2)
if saved:
    model.load_state_dict(saved["model"])
    loader.load_state_dict(saved["loader"])
train(loader, loader, model, first_step=saved["step"] if saved else 0)
finish()
