"""Filters of the distribution that is sampled: top-k, top-p, min-p, as transformers defines them.

Each keeps the scores from some lowest one upwards and sets the rest to -inf. Where scores tie at
the lowest one all of them stay. Scores are float32 [b, n, v], the log-probabilities over T up to a
constant; what a row asks for is [b]. `axis` names the mesh axis of a sharded vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# The lowest score is found bit by bit; a pass over the vocabulary settles this many of the 32. More
# bits make fewer passes of more comparisons each: a pass over 64 rows of Qwen3's vocabulary takes
# an H200 9 us with 3 comparisons and 33 with 15.
_BITS = {"cpu": 1}
_BITS_OF_OTHERS = 2
# With lanes, one pass before keeps the largest few of each: lane j has every so many-th score from
# the j-th on. The search is among those alone unless one of the others could be above its result.
# 0 is none, until a GPU has shown what it gains (4096 there: 16384 numbers to search); a CPU reads
# the vocabulary faster than it finds them.
_LANES = 0
_DEEP = 4  # scores of a lane that are kept
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


def _largest_of_lanes(scores_bnv: jax.Array, lanes: int) -> list[jax.Array]:
    """The _DEEP largest scores of each lane, [b, n, lanes] each, the largest first."""
    b, n, v = scores_bnv.shape
    padding = ((0, 0), (0, 0), (0, -v % lanes))
    rows = jnp.pad(scores_bnv, padding, constant_values=-jnp.inf).reshape(b, n, -1, lanes)

    def merge(mine: list[jax.Array], theirs: list[jax.Array]) -> list[jax.Array]:
        # Both descend: the larger of each pair, one side reversed, are the largest of all; they
        # rise and fall, and two rounds of exchanges sort that.
        best = [jnp.maximum(x, y) for x, y in zip(mine, reversed(theirs), strict=True)]
        for distance in (2, 1):
            for i in (i for i in range(_DEEP) if not i & distance):
                x, y = best[i], best[i + distance]
                best[i], best[i + distance] = jnp.maximum(x, y), jnp.minimum(x, y)
        return best

    nothing = jnp.full_like(rows, -jnp.inf)
    return lax.reduce(
        [rows, *[nothing] * (_DEEP - 1)], [jnp.float32(-jnp.inf)] * _DEEP, merge, (2,)
    )


def _lowest(
    scores_bnv: jax.Array, weights_bnv: jax.Array, target_bn1: jax.Array, axis: str | None
) -> jax.Array:
    """The smallest number [b, n, 1] that less than `target` of the weight lies strictly above.

    It is found digit by digit of its key from the top, without any sort: a digit is the number of
    its values d for which too much lies above prefix, d, 111...
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
    return _score(lowest)


def _keep(
    scores_bnv: jax.Array,
    weigh: Callable[[jax.Array], jax.Array],
    target_bn1: jax.Array,
    axis: str | None,
) -> jax.Array:
    """The scores that less than `target` of the weight lies strictly above; -inf for the others.

    weigh: scores -> their weights. An infinite target keeps everything.
    """

    def search(some_bnv: jax.Array) -> jax.Array:
        return _lowest(some_bnv, weigh(some_bnv), target_bn1, axis)

    if 0 < 2 * _DEEP * _LANES <= scores_bnv.shape[-1]:
        largest = _largest_of_lanes(scores_bnv, _LANES)
        found = search(jnp.concatenate(largest, axis=-1))
        # What is not among them is at most the last of its lane: nothing above what was found.
        missed = (_maximum(largest[-1], axis) > found) & jnp.isfinite(target_bn1)
        # Row by row: the two round their sums differently, and what a row keeps must not depend on
        # the rows beside it.
        lowest = lax.cond(
            missed.any(), lambda: jnp.where(missed, search(scores_bnv), found), lambda: found
        )
    else:
        lowest = search(scores_bnv)
    return jnp.where(scores_bnv >= lowest, scores_bnv, -jnp.inf)


def _rows(values_b: jax.Array, scores_bnv: jax.Array) -> jax.Array:
    """[b] as float32 [b, n, 1]."""
    shape = (*scores_bnv.shape[:-1], 1)
    return jnp.broadcast_to(values_b.astype(jnp.float32)[:, None, None], shape)


def top_k(scores_bnv: jax.Array, k_b: jax.Array, axis: str | None = None) -> jax.Array:
    """Keeps the k largest; k 0 keeps all."""
    k = _rows(k_b, scores_bnv)
    return _keep(scores_bnv, jnp.ones_like, jnp.where(k > 0, k, jnp.inf), axis)


def top_p(scores_bnv: jax.Array, p_b: jax.Array, axis: str | None = None) -> jax.Array:
    """Keeps the fewest largest whose probabilities reach p; p 1 keeps all."""
    p = _rows(p_b, scores_bnv)
    best = _maximum(scores_bnv, axis)

    def weigh(some_bnv: jax.Array) -> jax.Array:
        return jnp.exp(some_bnv - best)

    total = _total(weigh(scores_bnv).sum(axis=-1, keepdims=True), axis)
    # At p = 1 rounding must not cut the tail. At p = 0 the most probable token still stays.
    target = jnp.where(p < 1, jnp.maximum(p * total, jnp.finfo(jnp.float32).tiny), jnp.inf)
    return _keep(scores_bnv, weigh, target, axis)


def min_p(scores_bnv: jax.Array, p_b: jax.Array, axis: str | None = None) -> jax.Array:
    """Keeps what is at least p times as probable as the most probable; p 0 keeps all."""
    lowest = _maximum(scores_bnv, axis) + jnp.log(_rows(p_b, scores_bnv))
    return jnp.where(scores_bnv >= lowest, scores_bnv, -jnp.inf)
