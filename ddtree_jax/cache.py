"""Committed K/V of every layer, and the pending rows of nodes that may join it.

Speculation never touches the cache: a forward reads it and returns `Pending`; `commit` appends the
accepted rows. There is no crop and no rollback anywhere.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ddtree_jax.config import DecoderConfig
from kernels_pallas.dispatch import REFERENCE, Kernels


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Cache:
    """k[l] and v[l]: [b, k, s, h], s slots a row, fixed for a request. Slot = absolute position."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    def layer(self, index: int) -> tuple[jax.Array, jax.Array]:
        return self.k[index], self.v[index]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Pending:
    """rows[l]: [b, n, k, g + 2, h], n nodes' queries, then K, then V of layer l.

    Only K and V are committed; the queries stay with them because nothing is copied that way.
    """

    rows: tuple[jax.Array, ...]


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
    *,
    kernels: Kernels = REFERENCE,
) -> Cache:
    """Appends the first `count_b` rows of `path_bp` (node indices; None: rows 0, 1, ...).

    Row i of the path goes to slot length_b + i.
    """
    pairs = list(zip(cache.k, cache.v, strict=True))
    pairs = kernels.append(pairs, pending.rows, path_bp, length_b, count_b)
    return Cache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs))
