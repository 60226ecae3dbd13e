"""The target's choice after each node: greedy, or sampled with noise that belongs to a position.

The noise for absolute position p of sample s of a request is a function of (seed, s, p, token id)
and of nothing else. A sampled text is therefore the same in every mode, with every tree, alone or
in a batch; sampling is argmax(filter(logits / T) + Gumbel noise), which is exact: float32 logits
are drawn from as they are, tokens of less than some 2^-32 too rarely.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas import filters
from kernels_pallas.dispatch import REFERENCE, Kernels


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What a program computes beside the plain greedy choice; static, so unused parts cost nothing.

    noise: rows may have T > 0. top_k, top_p, min_p: filters.py, only with noise. bias, penalties,
    min_new_tokens, log_probs: penalties.py.
    """

    noise: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    bias: bool = False
    penalties: bool = False
    min_new_tokens: bool = False
    log_probs: bool = False


GREEDY = Sampler()
NOISE_TRUST = (0.75, 0.75)  # of a drafter that says nothing itself; see draft_scores
SELECTED = 128  # the largest of a row that XLA selects on a GPU; for more it sorts the row
TILE = 32  # of a row, of which only the largest number counts at first; see _largest


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "limit",
        "stop_ids",
        "temperature",
        "seed",
        "sample",
        "top_k",
        "top_p",
        "min_p",
        "bias_ids",
        "bias",
        "repetition",
        "presence",
        "frequency",
        "min_new_tokens",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Request:
    """What each row asks for, [b] each.

    limit: tokens to emit at most, int32. stop_ids: int32 [b, stops], -1 where unused.
    temperature: float32, 0 is greedy. seed, sample: uint32, see above; samples of one request are
    counted from 0. top_k: int32, 0 keeps all. top_p: float32, 1 keeps all. min_p: float32, 0 keeps
    all. bias_ids, bias: int32 (-1 where unused) and float32 [b, biases]. repetition (1 is none),
    presence, frequency (0 is none): float32. min_new_tokens: int32, no stop id before.
    """

    limit: jax.Array
    stop_ids: jax.Array
    temperature: jax.Array
    seed: jax.Array
    sample: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    min_new_tokens: jax.Array

    @staticmethod
    def idle(batch: int, stops: int, biases: int) -> "Request":
        """Greedy rows that ask for nothing, on the host."""

        def full(value, dtype=jnp.float32, *more) -> Any:
            # NumPy's, where the type says jax.Array: the next call takes it to the device.
            return np.full((batch, *more), value, dtype)

        return Request(
            limit=full(0, jnp.int32),
            stop_ids=full(-1, jnp.int32, stops),
            temperature=full(0),
            seed=full(0, jnp.uint32),
            sample=full(0, jnp.uint32),
            top_k=full(0, jnp.int32),
            top_p=full(1),
            min_p=full(0),
            bias_ids=full(-1, jnp.int32, biases),
            bias=full(0, jnp.float32, biases),
            repetition=full(1),
            presence=full(0),
            frequency=full(0),
            min_new_tokens=full(0, jnp.int32),
        )


def gumbel(seed: jax.Array, sample: jax.Array, position: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise float32 [size] of one position; scalars are uint32 or int32.

    JAX's partitionable threefry makes entry i a function of (key, i) alone, so a longer vocabulary
    does not change the noise of a token; no setting of the process may choose another generator.
    """
    with jax.threefry_partitionable(True):
        key = jax.random.key(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample), position)
        bits = jax.random.bits(key, (size,), jnp.uint32)
    return _gumbel_of(bits)


def _gumbel_of(bits: jax.Array) -> jax.Array:
    """Gumbel noise of random 32-bit words; the larger the word, the lower the noise.

    What is large decides who is chosen, so the cells of 2^-32 of a uniform number are kept where
    that noise comes from, next to 0: float32 tells them apart there, and not next to 1.
    """
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    # What rounds to 1 has its logarithm infinite.
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))


# (int32 x, none of it -1; a mesh axis) -> [shards, *x.shape].
Gather = Callable[[jax.Array, str], jax.Array]


def _bits(x: jax.Array, dtype=jnp.int32) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)


def argmax(logits: jax.Array, axis: str | None, gather: Gather = lax.all_gather) -> jax.Array:
    """Global token ids int32 of the largest float32 logits [..., v], lowest id on ties.

    `axis` names the mesh axis over which the vocabulary is sharded, or is None.
    """
    index = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return of_shards(jnp.max(logits, axis=-1), index, logits.shape[-1], axis, gather)


def of_shards(
    largest: jax.Array,
    column: jax.Array,
    columns: int,
    axis: str | None,
    gather: Gather = lax.all_gather,
) -> jax.Array:
    """Global token ids int32 of the largest of all shards, lowest id on ties.

    largest, column: the largest float32 logit of this shard and its column, of `columns`.
    """
    if axis is None:
        return column
    ids = column + lax.axis_index(axis) * columns
    everyone = gather(jnp.stack([_bits(largest), ids]), axis)
    best, ids = _bits(everyone[:, 0], jnp.float32), everyone[:, 1]
    winner = jnp.argmax(best, axis=0)  # the lowest shard on ties, so the lowest id
    return jnp.take_along_axis(ids, winner[None], axis=0)[0]


def noise_of(
    request: Request, positions_bd: jax.Array, local: int, axis: str | None = None
) -> jax.Array:
    """Gumbel noise float32 [b, d, local] of this shard's tokens at some positions of each row."""
    shards = 1 if axis is None else lax.axis_size(axis)
    first = 0 if axis is None else lax.axis_index(axis) * local

    def row(seed, sample, positions):
        return jax.vmap(lambda position: gumbel(seed, sample, position, local * shards))(positions)

    noise_bdv = jax.vmap(row)(request.seed, request.sample, positions_bd)
    return lax.dynamic_slice_in_dim(noise_bdv, first, local, axis=-1)


def scaled(logits_bnv: jax.Array, request: Request) -> jax.Array:
    """The sampled log-probabilities before filters, up to a constant; as they are at T = 0."""
    temperature = request.temperature[:, None, None]
    return logits_bnv / jnp.where(temperature > 0, temperature, 1.0)


def scores(
    logits_bnv: jax.Array,
    request: Request,
    sampler: Sampler,
    axis: str | None = None,
    *,
    coarse: bool = False,
) -> jax.Array:
    """The sampled log-probabilities up to a constant: filtered logits / T; as they are at T = 0.

    coarse: see filters.py.
    """
    kept = scaled(logits_bnv, request)
    if sampler.top_k:
        kept = filters.top_k(kept, request.top_k, axis, coarse=coarse)
    if sampler.top_p:
        kept = filters.top_p(kept, request.top_p, axis, coarse=coarse)
    if sampler.min_p:
        kept = filters.min_p(kept, request.min_p, axis)
    return jnp.where(request.temperature[:, None, None] > 0, kept, logits_bnv)


def choose(
    logits_bnv: jax.Array,
    depths_bn: jax.Array,
    length_b: jax.Array,
    max_depth: int,
    *,
    request: Request,
    sampler: Sampler,
    axis: str | None = None,
    kernels: Kernels = REFERENCE,
    gather: Gather = lax.all_gather,
) -> jax.Array:
    """The token int32 [b, n] that follows each node.

    Args:
      logits_bnv: float32; a node at position p chooses the token of position p + 1.
      depths_bn: node depths; a node's position is length_b + depth.
      max_depth: the largest depth (static): nodes of one depth share their noise.
      request: what the rows ask for; rows at temperature 0 are greedy.
      sampler: static; without `noise` the greedy program, whatever the temperatures.
      axis: mesh axis of a sharded vocabulary.
      kernels: how what top-k and top-p keep is sampled, if the vocabulary is whole.
      gather: how shards tell each other what they found.
    """
    if not sampler.noise:
        return argmax(logits_bnv, axis, gather)
    noise_bdv = _noise_by_depth(logits_bnv, length_b, max_depth, request, axis)
    if axis is None and (sampler.top_k or sampler.top_p):
        return kernels.sample(
            scaled(logits_bnv, request),
            noise_bdv,
            depths_bn,
            request.top_k if sampler.top_k else None,
            request.top_p if sampler.top_p else None,
            request.min_p if sampler.min_p else None,
        )
    noise_bnv = jnp.take_along_axis(noise_bdv, depths_bn[:, :, None], axis=1)
    return argmax(scores(logits_bnv, request, sampler, axis) + noise_bnv, axis, gather)


def trust_of(noise_trust: Sequence[tuple[float, float]]) -> np.ndarray:
    """float32 [slots, 2], or [1, 2] for all slots of a drafter whose `noise_trust` is empty."""
    return np.array(noise_trust or [NOISE_TRUST], np.float32)


def chosen_from(
    logits_bnv: jax.Array,
    length_b: jax.Array,
    request: Request,
    sampler: Sampler,
    axis: str | None = None,
) -> jax.Array:
    """What `choose` takes the largest of, [b, n, v], in units of logits: nodes of depth 0 only.

    Logits at T = 0, else T times the filtered logits / T + noise.
    """
    if not sampler.noise:
        return logits_bnv
    noise = _noise_by_depth(logits_bnv, length_b, 0, request, axis)
    temperature = request.temperature[:, None, None]
    unit = jnp.where(temperature > 0, temperature, 1.0)
    return unit * (scores(logits_bnv, request, sampler, axis) + noise)


def _noise_by_depth(
    logits_bnv: jax.Array, length_b: jax.Array, max_depth: int, request: Request, axis: str | None
) -> jax.Array:
    """The noise [b, max_depth + 1, v] that follows nodes of each depth; none for greedy rows."""
    positions = length_b[:, None] + jnp.arange(max_depth + 1) + 1
    noise_bdv = noise_of(request, positions, logits_bnv.shape[-1], axis)
    # Without noise the best token is chosen, which every filter keeps.
    return jnp.where(request.temperature[:, None, None] > 0, noise_bdv, 0.0)


def draft_scores(
    logits_blv: jax.Array,
    length_b: jax.Array,
    *,
    request: Request,
    sampler: Sampler,
    noise_trust: Sequence[tuple[float, float]] = (),
    axis: str | None = None,
) -> jax.Array:
    """Drafter's logits [b, l, v] with the noise that the target will be sampled with.

    Slot l predicts position length + l + 1. Whatever the scores, the text stays the target's own;
    the better they tell the target's choice, the more of the tree is accepted. If the drafter were
    the target, the choice would be the largest of log-probabilities / T + noise for certain. Its
    errors are a matter of log-probabilities, whatever T, so what is ranked is T times that; and
    how far either part can be trusted is a property of the drafter, slot by slot:
    softmax(a * log-probabilities + b * T * noise). `noise_trust` holds (a, b) of each slot, as
    training/calibrate.py measures them; without it both are 0.75 everywhere. Filters may be coarse
    here. Rows at T = 0 are the logits themselves.
    """
    positions = length_b[:, None] + jnp.arange(logits_blv.shape[1]) + 1
    of_logits, of_noise = trust_of(noise_trust).T[:, :, None]
    temperature = request.temperature[:, None, None]
    noisy = temperature * of_logits * scores(logits_blv, request, sampler, axis, coarse=True)
    noise_blv = noise_of(request, positions, logits_blv.shape[-1], axis)
    noisy += temperature * of_noise * noise_blv
    return jnp.where(temperature > 0, noisy, logits_blv)


def _selected(x_mv: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row and their indices, all different, SELECTED at a time."""
    if count <= SELECTED:
        values, indices = lax.top_k(x_mv, count, is_stable=False)
        return values, indices
    rows = jnp.arange(x_mv.shape[0])[:, None]
    left = jnp.maximum(x_mv, jnp.finfo(x_mv.dtype).min)  # only what was found is minus infinity
    found = []
    for start in range(0, count, SELECTED):
        _, indices = lax.top_k(left, min(SELECTED, count - start), is_stable=False)
        found.append(indices)
        left = left.at[rows, indices].set(-jnp.inf, unique_indices=True)
    indices = jnp.concatenate(found, axis=1)
    return jnp.take_along_axis(x_mv, indices, axis=1), indices


def _largest(x_mv: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of each row and their indices, largest first; ties fall either way.

    They are in the `count` tiles of the row whose own largest are the largest, so that in long rows
    little is left to select from. Of 15 rows of 151936 on an H200 63, 127 and 255 take 25, 38 and
    74 us; from the whole rows 46, 83 and 190.
    """
    rows, v = x_mv.shape
    if v % TILE or 2 * count * TILE > v:
        return _selected(x_mv, count)
    tiles = x_mv.reshape(rows, -1, TILE)
    _, tile = _selected(tiles.max(axis=2), count)
    candidates = jnp.take_along_axis(tiles, tile[:, :, None], axis=1).reshape(rows, -1)
    values, place = _selected(candidates, count)
    return values, jnp.take_along_axis(tile, place // TILE, axis=1) * TILE + place % TILE


def draft_candidates(
    logits_blv: jax.Array,
    ranks: int,
    *,
    axis: str | None = None,
    stable: bool = True,
    gather: Gather = lax.all_gather,
) -> tuple[jax.Array, jax.Array]:
    """The `ranks` best tokens of each slot and their log-probabilities, [b, l, ranks], best first.

    Args:
      logits_blv: float32 logits of the block's masked slots.
      axis: mesh axis of a sharded vocabulary; token ids are global.
      gather: how shards tell each other what they found.
      stable: whether ties take the lowest id; on a GPU an unstable selection is much faster.
    """
    b, slots, v = logits_blv.shape
    flat = logits_blv.reshape(b * slots, v)  # rank 2: XLA's fast selection wants it
    size = min(ranks, v)
    values, tokens = lax.top_k(flat, size) if stable else _largest(flat, size)
    total = jax.nn.logsumexp(flat, axis=-1, keepdims=True)
    if axis is not None:
        tokens += lax.axis_index(axis) * v
        mine = jnp.concatenate([_bits(values), tokens, _bits(total)], axis=1)
        everyone = jnp.moveaxis(gather(mine, axis), 0, 1)
        tokens = everyone[..., size:-1].reshape(flat.shape[0], -1)
        values = _bits(everyone[..., :size], jnp.float32).reshape(tokens.shape)
        totals = _bits(everyone[..., -1], jnp.float32)
        values, place = lax.top_k(values, ranks)
        tokens = jnp.take_along_axis(tokens, place, axis=1)
        total = jax.nn.logsumexp(totals, axis=-1, keepdims=True)
    shape = (b, slots, ranks)
    return tokens.reshape(shape), jnp.minimum(values - total, 0.0).reshape(shape)


def stop_cut(
    tokens_bp: jax.Array, count_b: jax.Array, remaining_b: jax.Array, stop_ids_bs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cuts what a round emits at the first stop id and at the request's limit.

    Returns:
      the number of tokens to emit [b] (a stop id included) and whether the row is finished [b].
    """
    index = jnp.arange(tokens_bp.shape[1])
    count = jnp.minimum(count_b, remaining_b)
    is_stop = (tokens_bp[:, :, None] == stop_ids_bs[:, None, :]).any(axis=-1)
    is_stop = is_stop & (index < count[:, None])
    stopped = is_stop.any(axis=1)
    count = jnp.where(stopped, jnp.argmax(is_stop, axis=1) + 1, count)
    return count, stopped | (count >= remaining_b)
