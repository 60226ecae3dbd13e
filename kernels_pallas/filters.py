"""Filters of the distribution that is sampled: top-k, top-p, min-p, as transformers defines them.

Each keeps the scores from some lowest one upwards and sets the rest to -inf. Where scores tie at
the lowest one all of them stay. Scores are float32 [b, n, v], the log-probabilities over T up to a
constant; what a row asks for is [b]. `axis` names the mesh axis of a sharded vocabulary.

`coarse` is for drafts, which need not be what is sampled: the lowest score is only found to
1 / CELLS of a nat, so that a little more may stay, and what is RANGE nats below the best goes
although there may be room for it (k 0 and p 1 still keep all). Fewer passes over the vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# The lowest score is found digit by digit; a pass over the vocabulary settles this many bits. More
# bits make fewer passes of more comparisons each: a pass over 64 rows of Qwen3's vocabulary takes
# an H200 9 us with 3 comparisons and 33 with 15.
_BITS = {"cpu": 1}
_BITS_OF_OTHERS = 2
_MINUS_INF = 0x007FFFFF  # its key, see _score
RANGE, CELLS = 64, 64  # 4096 cells: 12 bits


def _total(x: jax.Array, axis: str | None) -> jax.Array:
    """The sum over the shards, in rank order so that every device has the same bits."""
    return x if axis is None else lax.all_gather(x, axis).sum(axis=0)


def _maximum(scores: jax.Array, axis: str | None) -> jax.Array:
    best = jnp.max(scores, axis=-1, keepdims=True)
    return best if axis is None else lax.all_gather(best, axis).max(axis=0)


def _score(keys: jax.Array) -> jax.Array:
    """The float32 of uint32 keys that sort as they do; what is below -inf is -inf."""
    keys = jnp.maximum(keys, jnp.uint32(_MINUS_INF))
    bits = jnp.where(keys >> 31 == 1, keys & jnp.uint32(0x7FFFFFFF), ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _sums(parts_bnv: list[jax.Array]) -> jax.Array:
    """Sums over the vocabulary [len(parts), b, n, 1], in one pass over what the parts share."""
    zeros = [jnp.float32(0)] * len(parts_bnv)
    sums = lax.reduce(
        parts_bnv, zeros, lambda a, b: [x + y for x, y in zip(a, b, strict=True)], (2,)
    )
    return jnp.stack(sums)[..., None]


def _number(
    x_bnv: jax.Array,
    bound: Callable[[jax.Array], jax.Array],
    size: int,
    weights_bnv: jax.Array,
    target_bn1: jax.Array,
    axis: str | None,
) -> jax.Array:
    """The smallest number of `size` bits that less than `target` lies above, uint32 [b, n, 1].

    It is found digit by digit from the top, without any sort: a digit is the number of its values d
    for which too much lies above prefix, d, 111...

    Args:
      bound: numbers -> float32 that ascend with them; what is strictly greater lies above.
    """
    bits = _BITS.get(jax.default_backend(), _BITS_OF_OTHERS)

    def narrow(prefix_bn1, shift):
        below = (jnp.uint32(1) << shift) - 1
        bounds = [
            bound(prefix_bn1 | (jnp.uint32(value) << shift) | below) for value in range(2**bits - 1)
        ]
        above = _sums([jnp.where(x_bnv > each, weights_bnv, 0.0) for each in bounds])
        digit = (_total(above, axis) >= target_bn1).sum(axis=0, dtype=jnp.uint32)
        return prefix_bn1 | (digit << shift), None

    shifts = jnp.arange(size - bits, -1, -bits, dtype=jnp.uint32)
    prefix = jnp.zeros_like(target_bn1, jnp.uint32)
    # On a GPU a loop would be driven by the host.
    number, _ = lax.scan(narrow, prefix, shifts, unroll=jax.default_backend() != "cpu")
    return number


def _keep(
    scores_bnv: jax.Array,
    below_bnv: jax.Array,
    weights_bnv: jax.Array,
    target_bn1: jax.Array,
    axis: str | None,
    coarse: bool,
) -> jax.Array:
    """The scores that less than `target` of the weight lies strictly above; -inf for the others.

    below: the scores less the largest. An infinite target keeps everything.
    """
    if coarse:
        # Cell c holds what is above c / CELLS - RANGE, and not what is above the next one's bound.
        cells = RANGE * CELLS

        def upper(cell):
            return (cell.astype(jnp.float32) + (1 - cells)) / CELLS

        cell = _number(below_bnv, upper, (cells - 1).bit_length(), weights_bnv, target_bn1, axis)
        lower = jnp.where(target_bn1 < jnp.inf, upper(cell) - 1 / CELLS, -jnp.inf)
        return jnp.where(below_bnv > lower, scores_bnv, -jnp.inf)
    lowest = _score(_number(scores_bnv, _score, 32, weights_bnv, target_bn1, axis))
    return jnp.where(scores_bnv >= lowest, scores_bnv, -jnp.inf)


def _rows(values_b: jax.Array, scores_bnv: jax.Array) -> jax.Array:
    """[b] as float32 [b, n, 1]."""
    shape = (*scores_bnv.shape[:-1], 1)
    return jnp.broadcast_to(values_b.astype(jnp.float32)[:, None, None], shape)


def top_k(
    scores_bnv: jax.Array, k_b: jax.Array, axis: str | None = None, *, coarse: bool = False
) -> jax.Array:
    """Keeps the k largest; k 0 keeps all."""
    k = _rows(k_b, scores_bnv)
    target = jnp.where(k > 0, k, jnp.inf)
    below = scores_bnv - _maximum(scores_bnv, axis)
    return _keep(scores_bnv, below, jnp.ones_like(scores_bnv), target, axis, coarse)


def top_p(
    scores_bnv: jax.Array, p_b: jax.Array, axis: str | None = None, *, coarse: bool = False
) -> jax.Array:
    """Keeps the fewest largest whose probabilities reach p; p 1 keeps all."""
    p = _rows(p_b, scores_bnv)
    below = scores_bnv - _maximum(scores_bnv, axis)
    weights = jnp.exp(below)
    total = _total(weights.sum(axis=-1, keepdims=True), axis)
    # At p = 1 rounding must not cut the tail. At p = 0 the most probable token still stays.
    target = jnp.where(p < 1, jnp.maximum(p * total, jnp.finfo(jnp.float32).tiny), jnp.inf)
    return _keep(scores_bnv, below, weights, target, axis, coarse)


def min_p(scores_bnv: jax.Array, p_b: jax.Array, axis: str | None = None) -> jax.Array:
    """Keeps what is at least p times as probable as the most probable; p 0 keeps all."""
    lowest = _maximum(scores_bnv, axis) + jnp.log(_rows(p_b, scores_bnv))
    return jnp.where(scores_bnv >= lowest, scores_bnv, -jnp.inf)
