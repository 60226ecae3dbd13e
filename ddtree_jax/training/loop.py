"""The training loop of a drafter: one device, resumable, metrics as JSON lines."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from ddtree_jax.config import DrafterConfig
from ddtree_jax.models import Drafter, Target, parameter_name
from ddtree_jax.training.data import Rows
from ddtree_jax.training.loss import LossConfig, block_loss


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """steps: optimiser steps in all. rows: packed rows per step. warmup: fraction of the steps.

    log_every, eval_every, save_every: in steps.
    """

    steps: int = 4000
    rows: int = 32
    learning_rate: float = 1e-3
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50
    eval_every: int = 500
    save_every: int = 500


def optimiser(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with clipping, a linear warm-up and a cosine to zero; norms and biases do not decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, max(1, int(config.warmup * config.steps)), config.steps
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule,
            b2=0.98,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


def batches(count: int, rows: int, seed: int, first_step: int) -> Iterator[np.ndarray]:
    """Row indices of each step from `first_step` on: a new permutation each epoch."""
    per_epoch = max(1, count // rows)
    step = first_step
    while True:
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng([seed, epoch]).permutation(count)
        yield order[place * rows : (place + 1) * rows]
        step += 1


def train(
    target: Target,
    drafter_config: DrafterConfig,
    rows: Rows,
    held_out: Rows,
    config: TrainConfig,
    loss_config: LossConfig,
    folder: Path,
    report: Callable[[dict], None],
) -> dict[str, np.ndarray]:
    """Trains, or resumes from `folder`, and returns the drafter's float32 parameters by path.

    The target is frozen and keeps its dtype, in which the drafter's forward runs too; its master
    weights and the optimiser's state are float32. `report` receives each metrics record; they are
    also appended to folder/metrics.jsonl.
    """
    graphdef, state = nnx.split(Drafter(drafter_config, rngs=nnx.Rngs(config.seed)))
    named, treedef = jax.tree.flatten_with_path(state)
    names, params = [parameter_name(path) for path, _ in named], [leaf for _, leaf in named]
    target_def, target_state = nnx.split(target)
    dtype = target.embed_vd[...].dtype
    tx = optimiser(config)

    def loss_of(params, target_state, batch, key):
        leaves = [leaf.astype(dtype) for leaf in params]
        drafter = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        frozen = nnx.merge(target_def, target_state)
        return block_loss(drafter, frozen, batch, key, loss_config)

    @jax.jit
    def evaluate(params, target_state, batch):
        return loss_of(params, target_state, batch, jax.random.key(0))[1]

    @jax.jit(donate_argnums=(0, 1))
    def update(params, moments, target_state, batch, step):
        key = jax.random.fold_in(jax.random.key(config.seed), step)
        gradient = jax.grad(loss_of, has_aux=True)
        grads, metrics = gradient(params, target_state, batch, key)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, metrics

    moments = tx.init(params)
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=1)
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            saved = {"params": params, "moments": moments}
            restored = manager.restore(first, args=ocp.args.StandardRestore(saved))
            params, moments = restored["params"], restored["moments"]
        started, order = time.monotonic(), batches(len(rows), config.rows, config.seed, first)
        with (folder / "metrics.jsonl").open("a") as log:

            def record(step: int, kind: str, metrics: dict) -> None:
                values = {name: np.asarray(value) for name, value in metrics.items()}
                entry = {"step": step, "kind": kind, "seconds": time.monotonic() - started}
                entry |= {name: np.round(value, 4).tolist() for name, value in values.items()}
                log.write(json.dumps(entry) + "\n")
                log.flush()
                report(entry)

            for step in range(first, config.steps):
                batch = rows.take(next(order))
                params, moments, metrics = update(
                    params, moments, target_state, batch, np.int32(step)
                )
                done = step + 1
                if done % config.log_every == 0:
                    record(done, "train", jax.device_get(metrics))
                if done % config.eval_every == 0 or done == config.steps:
                    parts = [
                        jax.device_get(evaluate(params, target_state, held_out.take(part)))
                        for part in np.array_split(
                            np.arange(len(held_out)), max(1, len(held_out) // config.rows)
                        )
                    ]
                    mean = jax.tree.map(lambda *values: np.mean(np.stack(values), axis=0), *parts)
                    record(done, "held_out", mean)
                if done % config.save_every == 0 or done == config.steps:
                    state = {"params": params, "moments": moments}
                    manager.save(done, args=ocp.args.StandardSave(state), force=True)
                    manager.wait_until_finished()
    return dict(zip(names, jax.device_get(params), strict=True))
