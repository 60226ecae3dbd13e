"""The training loop of a drafter: one device, resumable, metrics as JSON lines."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

from ddtree_jax.config import DrafterConfig
from ddtree_jax.errors import InputError
from ddtree_jax.models import Drafter, Target, parameter_name
from ddtree_jax.training.data import Rows
from ddtree_jax.training.loss import LossConfig, block_loss


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """steps: optimiser steps in all. minutes: of wall time in all; whichever ends first.

    rows: packed rows per step. warmup: steps until the learning rate is reached; it then falls to
    zero as a cosine of the progress. log_every, eval_every, save_every: in steps.
    """

    steps: int = 4000
    minutes: float = math.inf
    rows: int = 32
    learning_rate: float = 1e-3
    warmup: int = 200
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50
    eval_every: int = 500
    save_every: int = 500


def optimiser(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with clipping, without its learning rate; norms and biases do not decay."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.scale_by_adam(b2=0.98),
        optax.add_decayed_weights(
            config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


def learning_rate(config: TrainConfig, step: int, seconds: float) -> float:
    """The rate of a step; progress is measured in steps or in time, whichever is further."""
    progress = max(step / config.steps, seconds / (60 * config.minutes))
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return config.learning_rate * min(1.0, (step + 1) / config.warmup) * cosine


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
    initial: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Trains, or resumes from `folder`, and returns the drafter's float32 parameters by path.

    The target is frozen and keeps its dtype, in which the drafter's forward runs too; its master
    weights and the optimiser's state are float32. `report` receives each metrics record; they are
    also appended to folder/metrics.jsonl.

    `initial` holds the drafter's float32 parameters by path, from which training begins instead of
    random ones; moments and step begin at zero all the same. It is for the beginning only: where
    `folder` has a checkpoint, the interrupted run goes on from that.

    Raises:
      InputError: the checkpoint's parameters have other shapes.
    """
    graphdef, state = nnx.split(Drafter(drafter_config, rngs=nnx.Rngs(config.seed)))
    named, treedef = jax.tree.flatten_with_path(state)
    names, params = [parameter_name(path) for path, _ in named], [leaf for _, leaf in named]
    if initial is not None:
        # Copies, since an update donates its parameters.
        params = [jnp.array(initial[name], jnp.float32) for name in names]
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
    def update(params, moments, target_state, batch, step, rate):
        key = jax.random.fold_in(jax.random.key(config.seed), step)
        gradient = jax.grad(loss_of, has_aux=True)
        grads, metrics = gradient(params, target_state, batch, key)
        updates, moments = tx.update(grads, moments, params)
        params = jax.tree.map(lambda leaf, change: leaf - rate * change, params, updates)
        return params, moments, metrics

    def held_out_metrics(params) -> dict:
        # Whole batches only, so that one program serves all.
        size = min(config.rows, len(held_out))
        parts = [
            jax.device_get(evaluate(params, target_state, held_out.take(start + np.arange(size))))
            for start in range(0, len(held_out) - size + 1, size)
        ]
        return jax.tree.map(lambda *values: np.mean(np.stack(values), axis=0), *parts)

    moments = tx.init(params)
    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=1)
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        step, earlier = manager.latest_step() or 0, 0.0
        if step:
            saved = {"params": params, "moments": moments, "seconds": earlier}
            try:
                restored = manager.restore(step, args=ocp.args.StandardRestore(saved))
            except ValueError as error:  # Orbax's name for other shapes
                raise InputError(
                    f"{manager.directory}: is of another drafter or of an older version; remove it "
                    "to train from the beginning"
                ) from error
            params, moments = restored["params"], restored["moments"]
            earlier = float(restored["seconds"])
        started, order = time.monotonic(), batches(len(rows), config.rows, config.seed, step)

        def seconds() -> float:
            return earlier + time.monotonic() - started

        with (folder / "metrics.jsonl").open("a") as log:

            def record(kind: str, metrics: dict) -> None:
                entry = {"step": step, "kind": kind, "seconds": round(seconds(), 1)}
                for name, value in metrics.items():
                    entry[name] = np.asarray(value, np.float64).round(4).tolist()
                log.write(json.dumps(entry) + "\n")
                log.flush()
                report(entry)

            while step < config.steps and seconds() < 60 * config.minutes:
                rate = np.float32(learning_rate(config, step, seconds()))
                params, moments, metrics = update(
                    params, moments, target_state, rows.take(next(order)), np.int32(step), rate
                )
                step += 1
                if step % config.log_every == 0:
                    record("train", jax.device_get(metrics))
                if step % config.eval_every == 0:
                    record("held_out", held_out_metrics(params))
                if step % config.save_every == 0:
                    save(manager, step, params, moments, seconds())
            record("held_out", held_out_metrics(params))
            if manager.latest_step() != step:
                save(manager, step, params, moments, seconds())
    return dict(zip(names, jax.device_get(params), strict=True))


def save(manager: ocp.CheckpointManager, step: int, params, moments, seconds: float) -> None:
    state = {"params": params, "moments": moments, "seconds": seconds}
    manager.save(step, args=ocp.args.StandardSave(state), force=True)
    manager.wait_until_finished()
