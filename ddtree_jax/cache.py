"""What is committed of every layer, and what is pending of nodes that may join it.

Speculation never touches the cache: a forward reads it and returns `Pending`; `commit` appends the
accepted rows, or takes them into the state of a recurrent layer. There is no crop and no rollback
anywhere.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ddtree_jax import gated_delta
from ddtree_jax.config import DecoderConfig
from ddtree_jax.gated_delta import Nodes, Recurrent
from kernels_pallas.dispatch import REFERENCE, Kernels


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["k", "v", "recurrent"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """k[l] and v[l]: [b, k, s, h], s slots a row, fixed for a request. Slot = absolute position.

    l counts the layers of softmax attention. recurrent: of the Gated DeltaNet layers, in order.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    recurrent: tuple[Recurrent, ...] = ()

    @property
    def slots(self) -> int:
        return self.k[0].shape[2]

    def layer(self, index: int) -> tuple[jax.Array, jax.Array]:
        return self.k[index], self.v[index]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "recurrent"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Pending:
    """rows[l]: [b, n, k, g + 2, h], n nodes' queries, then K, then V of layer l.

    Only K and V are committed; the queries stay with them because nothing is copied that way.

    recurrent: per Gated DeltaNet layer what rebuilds its state after any path of the nodes, or that
    state itself after a causal chunk that is committed whole.
    """

    rows: tuple[jax.Array, ...]
    recurrent: tuple[Nodes | Recurrent, ...] = ()


def empty(config: DecoderConfig, batch: int, slots: int, dtype) -> Cache:
    """A cache with nothing committed. The states of recurrent layers are float32."""
    shape = (batch, config.num_kv_heads, slots, config.head_dim)
    delta = config.delta

    def zeros():
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_softmax_layers))

    def nothing() -> Recurrent:
        assert delta is not None
        k, r = delta.num_key_heads, delta.group_size
        return Recurrent(
            jnp.zeros((batch, k, delta.key_dim, r, delta.value_dim), jnp.float32),
            jnp.zeros((batch, k, delta.conv_taps - 1, delta.channels), dtype),
        )

    return Cache(zeros(), zeros(), tuple(nothing() for _ in (delta.layers if delta else ())))


def begin(cache: Cache, length_b: jax.Array) -> Cache:
    """The cache with the states of rows that have nothing committed set to zero.

    Buffers are reused for new requests. Slots past the length are never read, but a state has no
    length.
    """

    def cleared(part: jax.Array) -> jax.Array:
        started = (length_b > 0).reshape(-1, *(1,) * (part.ndim - 1))
        return jnp.where(started, part, jnp.zeros_like(part))

    return dataclasses.replace(cache, recurrent=jax.tree.map(cleared, cache.recurrent))


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

    Row i of the path goes to slot length_b + i, and into the state of each recurrent layer.
    """
    pairs = list(zip(cache.k, cache.v, strict=True))
    pairs = kernels.append(pairs, pending.rows, path_bp, length_b, count_b)
    recurrent = [
        gated_delta.commit(carried, new, count_b, path_bp)
        for carried, new in zip(cache.recurrent, pending.recurrent, strict=True)
    ]
    return Cache(tuple(k for k, _ in pairs), tuple(v for _, v in pairs), tuple(recurrent))
