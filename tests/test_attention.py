"""Tree attention: the jnp reference against a loop over rows in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.tree_attention import tree_attention

B, N, K, G, H, M, S = 4, 5, 2, 3, 8, 6, 12

attend = jax.jit(tree_attention)


def naive(q, k_cache, v_cache, k_new, v_new, mask, lower, length):
    """Each query row by itself, over the list of the keys that it sees."""
    out = np.zeros(q.shape, np.float64)
    for b, n, k, g in np.ndindex(q.shape[:4]):
        slots = [s for s in range(k_cache.shape[2]) if lower[b, n] <= s < length[b]]
        rows = [m for m in range(k_new.shape[1]) if mask[b, n, m]]
        if not slots and not rows:
            continue
        keys = np.concatenate([k_cache[b, k, slots], k_new[b, rows, k]]).astype(np.float64)
        values = np.concatenate([v_cache[b, k, slots], v_new[b, rows, k]]).astype(np.float64)
        scores = keys @ q[b, n, k, g].astype(np.float64) / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, n, k, g] = weights @ values / weights.sum()
    return out


def arrays(seed=0, slots=S, dtype=np.float32):
    generator = np.random.default_rng(seed)

    def normal(*shape):
        return generator.standard_normal(shape).astype(dtype)

    return dict(
        q=normal(B, N, K, G, H),
        k_cache=normal(B, K, slots, H),
        v_cache=normal(B, K, slots, H),
        k_new=normal(B, M, K, H),
        v_new=normal(B, M, K, H),
        mask=generator.random((B, N, M)) < 0.5,
        lower=np.zeros((B, N), np.int32),
        length=np.array([0, 1, slots - 1, slots], np.int32).clip(0),
    )


def packed(q, k_cache, v_cache, k_new, v_new, mask, lower, length):
    """The arguments of `tree_attention`: the queries are those of the last rows."""
    m, n = k_new.shape[1], q.shape[1]
    queries = np.concatenate([np.full((*q.shape[:1], m - n, *q.shape[2:]), 7, q.dtype), q], axis=1)
    qkv = np.concatenate([queries, k_new[:, :, :, None], v_new[:, :, :, None]], axis=3)
    return qkv, k_cache, v_cache, mask, lower, length


def compare(given, rtol=2e-6):
    got = attend(*map(jnp.asarray, packed(**given)))
    assert got.dtype == given["q"].dtype
    wanted = naive(**given)
    scale = np.abs(wanted).max() or 1.0
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=0, atol=rtol * scale)
    return np.asarray(got, np.float64)


@pytest.mark.parametrize("seed", range(3))
def test_lengths_from_empty_to_full(seed):
    compare(arrays(seed))


def test_lower_bounds():
    given = arrays(1)
    # Row by row: nothing cut, some cut, one slot left, all cut.
    given["length"] = np.full(B, S, np.int32)
    given["lower"][:] = np.array([0, 3, S - 1, S, S + 4], np.int32)
    compare(given)


def test_a_row_that_sees_nothing_is_zero():
    given = arrays(2)
    given["mask"][:, 1] = False
    given["lower"][:, 1] = S
    got = compare(given)
    assert (got[:, 1] == 0).all()
    assert (got[:, 0] != 0).any()


def test_without_cache_slots():
    compare(arrays(3, slots=0))


@pytest.mark.parametrize("place", ["node", "slot past the length", "slot below the bound"])
def test_hidden_keys_and_values_leave_no_trace(place):
    """A mask that blends what it should hide passes loose tolerances; not with huge values."""
    given = arrays(4)
    given["length"] = np.array([2, 5, 9, S - 1], np.int32)
    given["lower"][:] = 1
    given["mask"][:, :, 2] = False
    given["mask"][:, :, 0] = True
    clean = attend(*map(jnp.asarray, packed(**given)))
    for name in ("k", "v"):
        if place == "node":
            given[f"{name}_new"][:, 2] = 1e30
        elif place == "slot past the length":
            for row, length in enumerate(given["length"]):
                given[f"{name}_cache"][row, :, length:] = 1e30
        else:
            given[f"{name}_cache"][:, :, 0] = 1e30
    soiled = attend(*map(jnp.asarray, packed(**given)))
    np.testing.assert_array_equal(np.asarray(soiled), np.asarray(clean))


def test_one_key_far_ahead_of_the_rest():
    given = arrays(5)
    given["k_new"] *= 60  # scores of some hundreds: only a softmax with the maximum removed holds
    compare(given)


def test_bfloat16_inputs():
    """Scores, softmax and sums are float32: what is left is the rounding of weights and result."""
    import ml_dtypes

    compare(arrays(6, dtype=ml_dtypes.bfloat16), rtol=1e-2)
