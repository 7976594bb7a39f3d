"""tokenmill.torch.DataLoader in a plain torch loop."""

import torch.distributed as dist
from recorder import DATASET, EPOCHS, SEQ_LEN, SHARE, finish, load, make_model, train

import tokenmill

dist.init_process_group("gloo")
model, saved = make_model(), load()
loader = tokenmill.torch.DataLoader(DATASET, SEQ_LEN, SHARE, seed=1, epochs=EPOCHS)
if saved:
    model.load_state_dict(saved["model"])
    loader.load_state_dict(saved["loader"])
train(loader, loader, model, first_step=saved["step"] if saved else 0)
finish()
