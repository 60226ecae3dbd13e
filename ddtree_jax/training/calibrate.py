"""How far a drafter can be trusted when its candidates are ranked with the target's noise.

At temperature T the target's choice at a place is argmax(log p / T + g) with Gumbel noise g that is
known before p is. The drafter knows log q instead, and `sampling.draft_scores` ranks the choice by
softmax(a * log q + b * T * g). Here (a, b) of every slot is fitted by maximum likelihood: at random
anchors of sampled answers the target chooses with fresh noise, and Newton's method looks for the
pair under which its choices are the most probable. The model is log-linear, so its likelihood is
concave: there is one maximum, and its second derivatives are moments of (log q, T * g).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.errors import InputError
from ddtree_jax.models import Drafter, Target
from ddtree_jax.sampling import NOISE_TRUST
from ddtree_jax.training.data import Rows
from ddtree_jax.training.loss import (
    at_places,
    block_hidden,
    choose,
    features_of,
    noise_at,
    pick_anchors,
    places_of,
)

MAX_PASSES = 12  # over the choices; about six are needed
PRECISION = 0.001  # of the pairs, far finer than what data can tell
LEAST = 0.01  # of either number of a pair
ENOUGH = 64  # choices at a slot; from fewer its pair would be mostly chance


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choices:
    """What the target chose at the slots of some anchors, m of them with s slots each.

    hidden: [m, s, d], of which the head makes the drafter's logits. key: of the noise, see
    `loss.noise_at`. temperature: float32 [m, s]. chosen: int32 [m, s]. real: bool [m, s].
    """

    hidden: jax.Array
    key: jax.Array
    temperature: jax.Array
    chosen: jax.Array
    real: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Sums over the choices at each of s slots, for one pair (a, b) each.

    value: [s], of their log-probabilities in nats. gradient: [s, 2] and hessian: [s, 2, 2], its
    derivatives by (a, b). count: [s], how many choices. Each NumPy's once they are added up.
    """

    value: Any
    gradient: Any
    hessian: Any
    count: Any


@dataclasses.dataclass(frozen=True)
class Fit:
    """pairs: of each slot. count: choices [s]. before, after: their mean log-probability over all
    slots, in nats, with the default pair everywhere and with these."""

    pairs: tuple[tuple[float, float], ...]
    count: np.ndarray
    before: float
    after: float


def choices(drafter: Drafter, target: Target, batch, key: jax.Array, anchors: int) -> Choices:
    """Lets the target choose at random anchors of packed rows of sampled documents.

    It chooses at every place of a block after the document's own text before it, as the labels of
    `loss.block_loss` do.
    """
    places_key, noise_key = jax.random.split(key)
    hidden, features = features_of(target, drafter.config.target_layer_ids, batch)
    at, real = pick_anchors(places_key, batch, anchors)
    place, inside = places_of(batch, at, drafter.config.block_size - 1)
    temperature = at_places(batch["temperature"], place)
    real = inside & real[:, :, None] & (temperature > 0)
    temperature = jnp.where(real, temperature, 1.0)
    drafted = block_hidden(drafter, target, features, batch, at)

    def flat(values):
        return values.reshape(-1, *values.shape[2:])

    real, temperature = flat(real), flat(temperature)
    logits = target.logits(flat(at_places(hidden, place - 1)))
    chosen = choose(logits, temperature, noise_at(noise_key, logits.shape))
    return Choices(flat(drafted), noise_key, temperature, chosen, real)


def likelihood(
    pairs_s2: jax.Array, log_q_msv: jax.Array, noise_msv: jax.Array, chosen_ms, real_ms
) -> Likelihood:
    """Of the real choices under softmax(a * log q + b * noise), (a, b) > 0 being each slot's.

    Args:
      pairs_s2: float32.
      log_q_msv: float32, up to a constant of each row; -inf where the vocabulary is only padded.
      noise_msv: float32, what the target chose with times its temperature.
      chosen_ms, real_ms: int32 and bool, see `Choices`.
    """
    a, b = pairs_s2[:, 0, None], pairs_s2[:, 1, None]
    log_prob = jax.nn.log_softmax(a * log_q_msv + b * noise_msv, axis=-1)
    prob = jnp.exp(log_prob)

    def at_choice(values):
        return jnp.take_along_axis(values, chosen_ms[:, :, None], axis=-1)[:, :, 0]

    def mean(values):
        return (prob * values).sum(axis=-1)

    x, y = jnp.where(jnp.isfinite(log_q_msv), log_q_msv, 0.0), noise_msv
    mean_x, mean_y = mean(x), mean(y)
    dx, dy = x - mean_x[:, :, None], y - mean_y[:, :, None]
    gradient = jnp.stack([at_choice(dx), at_choice(dy)], axis=-1)
    covariance = jnp.stack([mean(dx * dx), mean(dx * dy), mean(dx * dy), mean(dy * dy)], axis=-1)

    def total(values):
        shape = real_ms.shape + (1,) * (values.ndim - 2)
        return jnp.where(real_ms.reshape(shape), values, 0.0).sum(axis=0)

    return Likelihood(
        total(at_choice(log_prob)),
        total(gradient),
        -total(covariance).reshape(-1, 2, 2),
        real_ms.sum(axis=0),
    )


def newton(evaluate: Callable[[np.ndarray], Likelihood], slots: int) -> Fit:
    """The most likely pairs: Newton's method in every slot at once, from the default pair.

    A slot whose likelihood has fallen goes back and halves its step. One with hardly any choices
    takes the pair of the slot before it.

    Args:
      evaluate: pairs, float64 [slots, 2] -> the likelihood of all choices there. It is called
        MAX_PASSES times at most.
      slots: how many there are.

    Raises:
      InputError: even the first slot has hardly any choices.
    """
    pairs = np.tile(np.array(NOISE_TRUST), (slots, 1))
    first = evaluate(pairs)
    if first.count[0] < ENOUGH:
        raise InputError(
            f"the first slot has {int(first.count[0])} choices of the target; expected at least "
            f"{ENOUGH}: more sampled answers, rows or anchors"
        )
    value, step = first.value, _newton_step(first)
    for _ in range(MAX_PASSES - 2):
        if np.abs(step).max() < PRECISION / 2:
            break
        trial = np.maximum(pairs + step, LEAST)
        found = evaluate(trial)
        rose = found.value >= value
        value = np.where(rose, found.value, value)
        pairs = np.where(rose[:, None], trial, pairs)
        step = np.where(rose[:, None], _newton_step(found), step / 2)
    for slot in range(1, slots):
        if first.count[slot] < ENOUGH:
            pairs[slot] = pairs[slot - 1]
    pairs = (pairs / PRECISION).round() * PRECISION
    last, total = evaluate(pairs), max(int(first.count.sum()), 1)
    return Fit(
        tuple((round(float(a), 3), round(float(b), 3)) for a, b in pairs),
        first.count,
        float(first.value.sum() / total),
        float(last.value.sum() / total),
    )


def _newton_step(at: Likelihood) -> np.ndarray:
    """[s, 2], 0 for slots with hardly any choices."""
    # What is added makes the matrix of a slot without choices one that can be solved.
    curvature = 1e-6 * np.maximum(at.count, 1)[:, None, None] * np.eye(2) - at.hessian
    step = np.linalg.solve(curvature, at.gradient[:, :, None])[:, :, 0]
    return np.where(at.count[:, None] < ENOUGH, 0.0, step)


def fit(
    drafter: Drafter,
    target: Target,
    rows: Rows,
    *,
    anchors: int,
    seed: int,
    advance: Callable[[], None],
) -> Fit:
    """Fits the pairs of `drafter` with `anchors` random places of each packed row.

    One row is looked at a time, so that logits and noise of `anchors` blocks are all that memory
    has to hold; only what the head makes logits of is kept. Greedy documents count for nothing.
    `advance` is called len(rows) times for the choices and for each pass over them.
    """
    graphdef, state = nnx.split((drafter, target))

    @jax.jit
    def choose(state, batch, key):
        return choices(*nnx.merge(graphdef, state), batch, key, anchors)

    @jax.jit
    def measure(state, made: Choices, pairs):
        _, target = nnx.merge(graphdef, state)
        log_q = target.logits(made.hidden)
        noise = made.temperature[:, :, None] * noise_at(made.key, log_q.shape)
        return likelihood(pairs, log_q, noise, made.chosen, made.real)

    def each(function, items) -> list:
        found = []
        for item in items:
            found.append(jax.block_until_ready(function(item)))
            advance()
        return found

    def choices_of(row: int) -> Choices:
        key = jax.random.fold_in(jax.random.key(seed), row)
        return choose(state, rows.take(np.array([row])), key)

    made = each(choices_of, range(len(rows)))

    def evaluate(pairs: np.ndarray) -> Likelihood:
        narrow = pairs.astype(np.float32)
        parts = each(lambda some: jax.device_get(measure(state, some, narrow)), made)
        return jax.tree.map(lambda *part: np.sum(part, axis=0, dtype=np.float64), *parts)

    return newton(evaluate, drafter.config.block_size - 1)
