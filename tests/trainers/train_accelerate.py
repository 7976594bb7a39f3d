"""tokenmill.transformers.Dataset in torch's DataLoader, prepared by Accelerate, which skips batches on resume."""

from accelerate import Accelerator
from recorder import DATASET, EPOCHS, SAVE_EVERY, SEQ_LEN, SHARE, finish, load, make_model, record, save
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import DataLoader

import tokenmill

accelerator = Accelerator(cpu=True)
dataset = tokenmill.transformers.Dataset(DATASET, SEQ_LEN, order="shuffled", seed=1)
plain, saved = make_model(), load()
if saved:
    plain.load_state_dict(saved["model"])
loader, model, optimizer = accelerator.prepare(DataLoader(dataset, SHARE), plain, SGD(plain.parameters(), lr=0.5))
step = saved["step"] if saved else 0
for epoch in range(step // len(loader), EPOCHS):
    loader.set_epoch(epoch)
    skipped = step - epoch * len(loader)
    for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
        logits = model(batch["input_ids"])
        # What models of transformers do with aligned labels.
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        record(step, batch["input_ids"], logits.detach(), loss.detach(), num_targets=SEQ_LEN - 1)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % SAVE_EVERY == 0:
            save({"model": plain.state_dict(), "step": step})
finish()
