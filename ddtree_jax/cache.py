"""Committed K/V of every layer, and the pending rows of nodes that may join it.

Speculation never touches the cache: a forward reads it and returns `Pending`; `commit` appends the
accepted rows. There is no crop and no rollback anywhere.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ddtree_jax.config import DecoderConfig


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Cache:
    """k[l] and v[l]: [b, k, s, h], s slots a row, fixed for a request. Slot = absolute position."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    def layer(self, index: int) -> tuple[jax.Array, jax.Array]:
        return self.k[index], self.v[index]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Pending:
    """k[l] and v[l]: [b, n, k, h], the K/V of n nodes that are not committed."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @staticmethod
    def of(layers: list[tuple[jax.Array, jax.Array]]) -> "Pending":
        return Pending(tuple(k for k, _ in layers), tuple(v for _, v in layers))


def empty(config: DecoderConfig, batch: int, slots: int, dtype) -> Cache:
    """A cache with nothing committed."""
    shape = (batch, config.num_kv_heads, slots, config.head_dim)

    def zeros():
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return Cache(zeros(), zeros())


def commit(
    cache: Cache,
    pending: Pending,
    length_b: jax.Array,
    count_b: jax.Array,
    path_bp: jax.Array | None = None,
) -> Cache:
    """Appends the first `count_b` rows of `path_bp` (node indices; None: rows 0, 1, ...).

    Row i of the path goes to slot length_b + i. Rows past the count are sent past the end and
    dropped; `dynamic_update_slice` would clamp them onto committed rows instead.
    """

    def append(slots_bksh: jax.Array, rows_bnkh: jax.Array) -> jax.Array:
        if path_bp is not None:
            rows_bnkh = jnp.take_along_axis(rows_bnkh, path_bp[:, :, None, None], axis=1)
        index = jnp.arange(rows_bnkh.shape[1])
        past_end = slots_bksh.shape[2]
        slot = jnp.where(index < count_b[:, None], length_b[:, None] + index, past_end)
        row = jnp.arange(slot.shape[0])[:, None]
        return slots_bksh.at[row, :, slot].set(rows_bnkh, mode="drop", unique_indices=False)

    return Cache(
        tuple(map(append, cache.k, pending.k)),
        tuple(map(append, cache.v, pending.v)),
    )
