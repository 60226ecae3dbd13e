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
    jax.tree_util.register_dataclass, data_fields=["k", "v", "recurrent"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Pending:
    """k[l] and v[l]: [b, n, k, h], the K/V of n nodes that are not committed.

    recurrent: per Gated DeltaNet layer what rebuilds its state after any path of the nodes, or that
    state itself after a causal chunk that is committed whole.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    recurrent: tuple[Nodes | Recurrent, ...] = ()

    @staticmethod
    def of(
        layers: list[tuple[jax.Array, jax.Array]],
        recurrent: list[Nodes | Recurrent] | None = None,
    ) -> "Pending":
        k, v = (tuple(pair[part] for pair in layers) for part in (0, 1))
        return Pending(k, v, tuple(recurrent or ()))


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
        one = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=window, axis=1)
        return jax.vmap(one)(slots_bksh, start)

    lower = jnp.maximum(lower_bn - start[:, None], 0)
    return (cut(cache[0]), cut(cache[1])), lower, length_b - start


def commit(
    cache: Cache,
    pending: Pending,
    length_b: jax.Array,
    count_b: jax.Array,
    path_bp: jax.Array | None = None,
) -> Cache:
    """Appends the first `count_b` rows of `path_bp` (node indices; None: rows 0, 1, ...).

    Row i of the path goes to slot length_b + i, and into the state of each recurrent layer. Rows
    past the count are sent past the end and dropped; `dynamic_update_slice` would clamp them onto
    committed rows instead.
    """

    def append(slots_bksh: jax.Array, rows_bnkh: jax.Array) -> jax.Array:
        if path_bp is not None:
            rows_bnkh = jnp.take_along_axis(rows_bnkh, path_bp[:, :, None, None], axis=1)
        index = jnp.arange(rows_bnkh.shape[1])
        past_end = slots_bksh.shape[2]
        slot = jnp.where(index < count_b[:, None], length_b[:, None] + index, past_end)
        row = jnp.arange(slot.shape[0])[:, None]
        return slots_bksh.at[row, :, slot].set(rows_bnkh, mode="drop", unique_indices=False)

    recurrent = [
        gated_delta.commit(carried, new, count_b, path_bp)
        for carried, new in zip(cache.recurrent, pending.recurrent, strict=True)
    ]
    return Cache(
        tuple(map(append, cache.k, pending.k)),
        tuple(map(append, cache.v, pending.v)),
        tuple(recurrent),
    )
