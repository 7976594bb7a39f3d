"""tokenmill.lightning.DataModule in Lightning's Trainer, which averages gradients and writes checkpoints."""

from typing import Any

from recorder import DATASET, EPOCHS, SAVE_EVERY, SEQ_LEN, SHARE, STATE, WORLD_SIZE, finish, make_model, record
from torch.nn.functional import cross_entropy
from torch.optim import SGD

import tokenmill

try:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
except ImportError:
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import ModelCheckpoint


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: dict[str, Any], _: int) -> Any:
        logits = self.net(batch["input_ids"])
        loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        record(self.global_step, batch["input_ids"], logits.detach(), loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.5)


data = tokenmill.lightning.DataModule(DATASET, SEQ_LEN, SHARE, seed=1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=WORLD_SIZE,
    strategy="ddp",
    max_epochs=EPOCHS,
    logger=False,
    enable_progress_bar=False,
    use_distributed_sampler=False,
    callbacks=[ModelCheckpoint(STATE, every_n_train_steps=SAVE_EVERY, save_last=True)],
)
last = STATE / "last.ckpt"
trainer.fit(Model(), datamodule=data, ckpt_path=last if last.exists() else None)
finish()
