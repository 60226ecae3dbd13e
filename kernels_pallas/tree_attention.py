"""Softmax attention of tree nodes over two sources: a committed prefix, and rows beside it."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # finite, so that a row without any key gives zeros and not NaN


def last_slots(
    cache: tuple[jax.Array, jax.Array], lower_bn: jax.Array, length_b: jax.Array, window: int
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array]:
    """What a layer with a sliding window can see of its K/V: the slots from length - window on.

    So its cost does not grow with the context. Returns the slots [b, k, window, h] of k and v, and
    `lower_bn` and `length_b` counted from the first of them.
    """
    if window >= cache[0].shape[2]:
        return cache, lower_bn, length_b
    start = jnp.clip(length_b - window, 0, cache[0].shape[2] - window)

    def cut(slots_bksh: jax.Array) -> jax.Array:
        one = functools.partial(lax.dynamic_slice_in_dim, slice_size=window, axis=1)
        return jax.vmap(one)(slots_bksh, start)

    lower = jnp.maximum(lower_bn - start[:, None], 0)
    return (cut(cache[0]), cut(cache[1])), lower, length_b - start


def tree_attention(
    qkv_bmch: jax.Array,
    k_bksh: jax.Array,
    v_bksh: jax.Array,
    mask_bnm: jax.Array,
    lower_bn: jax.Array,
    length_b: jax.Array,
    *,
    window: int | None = None,
) -> jax.Array:
    """Attention in plain jnp: the reference, and what runs where no kernel does.

    Args:
      qkv_bmch: [b, m, k, g + 2, h], m rows beside the cache (nodes, or a drafter's newest context
        and block): for each of k KV heads g query heads, then its key, then its value. The last n
        rows ask.
      k_bksh, v_bksh: the cache: s slots, of which [0, length_b) are committed.
      mask_bnm: whether query row n sees row m.
      lower_bn: the first cache slot that query row n sees. Without a window 0: kernels do not read
        it then.
      length_b: committed slots of each batch row.
      window: no query sees slots before length_b - window (static); less is read then.

    Returns:
      [b, n, k, g, h] in q's dtype. Scores and softmax are float32; a query that sees nothing is 0.
    """
    if window is not None:
        (k_bksh, v_bksh), lower_bn, length_b = last_slots(
            (k_bksh, v_bksh), lower_bn, length_b, window
        )
    b, m, k, c, h = qkv_bmch.shape
    n, g, s = mask_bnm.shape[1], c - 2, k_bksh.shape[2]
    q_bnkgh = qkv_bmch[:, m - n :, :, :g]
    k_bmkh, v_bmkh = qkv_bmch[..., g, :], qkv_bmch[..., g + 1, :]
    precision = lax.Precision.HIGHEST if q_bnkgh.dtype == jnp.float32 else None
    # Fold the query group into rows: [b, k, n * g, h].
    q = q_bnkgh.transpose(0, 2, 1, 3, 4).reshape(b, k, n * g, h)

    def scores(keys: jax.Array, spec: str) -> jax.Array:
        return jnp.einsum(
            spec, q, keys, precision=precision, preferred_element_type=jnp.float32
        ) * (h**-0.5)

    slot = jnp.arange(s)
    seen_bns = (slot < length_b[:, None, None]) & (slot >= lower_bn[:, :, None])
    seen = jnp.concatenate([seen_bns, mask_bnm], axis=-1)
    seen = jnp.repeat(seen, g, axis=1)[:, None]
    logits = jnp.concatenate(
        [scores(k_bksh, "bkrh,bksh->bkrs"), scores(k_bmkh, "bkrh,bmkh->bkrm")], axis=-1
    )
    logits = jnp.where(seen, logits, MASKED)
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    weights = jnp.where(seen, weights, 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0.0, 1.0, total)).astype(q.dtype)

    def mix(part: jax.Array, values: jax.Array, spec: str) -> jax.Array:
        return jnp.einsum(
            spec, part, values, precision=precision, preferred_element_type=jnp.float32
        )

    o = mix(weights[..., :s], v_bksh, "bkrs,bksh->bkrh")
    o = o + mix(weights[..., s:], v_bmkh, "bkrm,bmkh->bkrh")
    return o.astype(q.dtype).reshape(b, k, n, g, h).transpose(0, 2, 1, 3, 4)
