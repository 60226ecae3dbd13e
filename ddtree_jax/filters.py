"""Filters of the distribution that is sampled: top-k, top-p, min-p, as transformers defines them.

Each keeps the scores from some lowest one upwards and sets the rest to -inf. Where scores tie at
the lowest one all of them stay. Scores are float32 [b, n, v], the log-probabilities over T up to a
constant; what a row asks for is [b]. `axis` names the mesh axis of a sharded vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax

# The lowest score is found bit by bit; a pass over the vocabulary settles this many of the 32. More
# bits make fewer passes of more comparisons each: a pass over 64 rows of Qwen3's vocabulary takes
# an H200 9 us with 3 comparisons and 33 with 15.
_BITS = {"cpu": 1}
_BITS_OF_OTHERS = 2
_MINUS_INF = 0x007FFFFF  # its key, see _score


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


def _keep(
    scores_bnv: jax.Array, weights_bnv: jax.Array, target_bn1: jax.Array, axis: str | None
) -> jax.Array:
    """The scores that less than `target` of the weight lies strictly above; -inf for the others.

    That is every score from some lowest one upwards: the smallest number above which less than the
    target lies. It is found digit by digit of its key from the top, without any sort: a digit is
    the number of its values d for which too much lies above prefix, d, 111...
    """
    bits = _BITS.get(jax.default_backend(), _BITS_OF_OTHERS)

    def narrow(prefix_bn1, shift):
        below = (jnp.uint32(1) << shift) - 1
        bounds = [
            _score(prefix_bn1 | (jnp.uint32(value) << shift) | below)
            for value in range(2**bits - 1)
        ]
        above = _sums([jnp.where(scores_bnv > bound, weights_bnv, 0.0) for bound in bounds])
        digit = (_total(above, axis) >= target_bn1).sum(axis=0, dtype=jnp.uint32)
        return prefix_bn1 | (digit << shift), None

    shifts = jnp.arange(32 - bits, -1, -bits, dtype=jnp.uint32)
    prefix = jnp.zeros_like(target_bn1, jnp.uint32)
    # On a GPU a loop would be driven by the host.
    lowest, _ = lax.scan(narrow, prefix, shifts, unroll=jax.default_backend() != "cpu")
    return jnp.where(scores_bnv >= _score(lowest), scores_bnv, -jnp.inf)


def _rows(values_b: jax.Array, scores_bnv: jax.Array) -> jax.Array:
    """[b] as float32 [b, n, 1]."""
    shape = (*scores_bnv.shape[:-1], 1)
    return jnp.broadcast_to(values_b.astype(jnp.float32)[:, None, None], shape)


def top_k(scores_bnv: jax.Array, k_b: jax.Array, axis: str | None = None) -> jax.Array:
    """Keeps the k largest; k 0 keeps all."""
    k = _rows(k_b, scores_bnv)
    return _keep(scores_bnv, jnp.ones_like(scores_bnv), jnp.where(k > 0, k, jnp.inf), axis)


def top_p(scores_bnv: jax.Array, p_b: jax.Array, axis: str | None = None) -> jax.Array:
    """Keeps the fewest largest whose probabilities reach p; p 1 keeps all."""
    p = _rows(p_b, scores_bnv)
    weights = jnp.exp(scores_bnv - _maximum(scores_bnv, axis))
    total = _total(weights.sum(axis=-1, keepdims=True), axis)
    # At p = 1 rounding must not cut the tail. At p = 0 the most probable token still stays.
    target = jnp.where(p < 1, jnp.maximum(p * total, jnp.finfo(jnp.float32).tiny), jnp.inf)
    return _keep(scores_bnv, weights, target, axis)


def min_p(scores_bnv: jax.Array, p_b: jax.Array, axis: str | None = None) -> jax.Array:
    """Keeps what is at least p times as probable as the most probable; p 0 keeps all."""
    lowest = _maximum(scores_bnv, axis) + jnp.log(_rows(p_b, scores_bnv))
    return jnp.where(scores_bnv >= lowest, scores_bnv, -jnp.inf)
