"""tokenmill.jax.DataLoader in jax processes, whose gradients jax itself averages over gloo."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from recorder import (
    BATCH_SIZE,
    DATASET,
    EPOCHS,
    RANK,
    SAVE_EVERY,
    SEQ_LEN,
    SHARE,
    STATE,
    VOCABULARY,
    WORLD_SIZE,
    record,
)

import tokenmill

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(os.environ["JAX_COORDINATOR"], WORLD_SIZE, RANK)

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
loader = tokenmill.jax.DataLoader(
    DATASET, SEQ_LEN, SHARE, seed=1, epochs=EPOCHS, sharding=NamedSharding(mesh, PartitionSpec("data"))
)
keys = jax.random.split(jax.random.key(1))
weights = {name: 0.1 * jax.random.normal(key, (VOCABULARY, 16)) for name, key in zip(("in", "out"), keys, strict=True)}
step, saved = 0, STATE / "weights.npz"
if saved.exists():
    with np.load(saved) as found:
        weights = {name: jnp.asarray(found[name]) for name in weights}
        loader.load_state_dict(json.loads(str(found["loader"])))
        step = int(found["step"])


def forward(weights: dict[str, jax.Array], inputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = weights["in"][inputs] @ weights["out"].T
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return losses.mean(), logits


update = jax.jit(jax.value_and_grad(forward, has_aux=True))
for batch in loader:
    assert batch["input_ids"].shape == (BATCH_SIZE, SEQ_LEN)  # all processes together
    (loss, logits), slopes = update(weights, batch["input_ids"], batch["labels"])
    weights = {name: weights[name] - 0.5 * slopes[name] for name in weights}
    everything = multihost_utils.process_allgather((batch["input_ids"], logits), tiled=True)
    if RANK == 0:  # the loss is that of the whole batch
        record(step, *everything, loss)
    else:
        record(step, everything[0][:0], everything[1][:0], 0.0)
    step += 1
    if step % SAVE_EVERY == 0 and RANK == 0:
        np.savez(STATE / "new.npz", **weights, loader=json.dumps(loader.state_dict()), step=step)
        (STATE / "new.npz").rename(saved)
