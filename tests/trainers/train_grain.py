"""tokenmill.jax.DataSource in Grain, which shards and shuffles, in separate processes that train alike."""

import json

import grain.python as grain
import numpy as np
from recorder import DATASET, EPOCHS, RANK, SAVE_EVERY, SEQ_LEN, SHARE, STATE, VOCABULARY, WORLD_SIZE, record

import tokenmill

source = tokenmill.jax.DataSource(DATASET, SEQ_LEN)
batches = (
    grain.MapDataset.source(source)
    .shuffle(seed=1)
    .slice(slice(RANK, None, WORLD_SIZE))
    .repeat(EPOCHS)
    .batch(SHARE, drop_remainder=True)
    .to_iter_dataset()
)
iterator, step = iter(batches), 0
weights = np.random.default_rng(1).normal(0, 0.1, (2, VOCABULARY, 16))
saved = STATE / f"{RANK}.json"
if saved.exists():
    state = json.loads(saved.read_text())
    iterator.set_state(state["grain"])
    step, weights = state["step"], np.array(state["weights"])
for batch in iterator:
    inputs, labels = batch["input_ids"], batch["labels"]
    logits = weights[0][inputs] @ weights[1].T
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    loss = -np.log(np.take_along_axis(chances, labels[..., None], -1)).mean()
    record(step, inputs, logits, loss)
    slopes = (chances - np.eye(VOCABULARY)[labels]) / labels.size
    weights[1] -= 0.5 * np.einsum("bsv,bsh->vh", slopes, weights[0][inputs])
    step += 1
    if step % SAVE_EVERY == 0:
        saved.with_suffix(".tmp").write_text(
            json.dumps({"grain": iterator.get_state(), "step": step, "weights": weights.tolist()})
        )
        saved.with_suffix(".tmp").rename(saved)
