"""What bounds a program on this machine: bytes over bandwidth, FLOPs over the matrix rate."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.config import DecoderConfig
from ddtree_jax.engine import Engine
from ddtree_jax.models.layers import linear
from ddtree_jax.sharding import shards_of


def _seconds(program: Callable[..., jax.Array], launches: int, *arguments: jax.Array) -> float:
    """Of one call, the best of five times `launches` in flight."""

    def call() -> jax.Array:
        return program(*arguments)

    call().block_until_ready()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        results = [call() for _ in range(launches)]
        results[-1].block_until_ready()
        best = min(best, (time.perf_counter() - started) / launches)
    return best


def read_bandwidth() -> float:
    """Bytes per second that a max-reduction reads: the faster of one over all, and one by rows."""
    on_cpu = jax.default_backend() == "cpu"
    size, launches = (2**27, 4) if on_cpu else (2**32, 30)
    shape = (2**12, size // 2**13)

    @jax.jit
    def mixed() -> jax.Array:
        rows, columns = (jax.lax.broadcasted_iota(jnp.uint16, shape, axis) for axis in range(2))
        return jax.lax.bitcast_convert_type(rows * 40503 + columns * 30011, jnp.bfloat16)

    data = mixed()
    whole, by_rows = jax.jit(jnp.max), jax.jit(lambda x: x.max(axis=1))
    return size / min(_seconds(each, launches, data) for each in (whole, by_rows))


def matrix_rate(dtype) -> float:
    """FLOPs per second of a large square product of random matrices in `dtype`."""
    size, launches = (512, 4) if jax.default_backend() == "cpu" else (8192, 20)
    x, w = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    return 2 * size**3 / _seconds(jax.jit(linear), launches, x, w)


def bytes_read(engine: Engine, mode: str, context: int) -> int:
    """What one device must move in a round: layers, head (twice when it drafts), K/V and states.

    A sliding layer reads its window; a recurrent state is read and written.
    """
    width = jnp.dtype(engine.dtype).itemsize
    sizes = {
        name: int(np.prod(_local_shape(leaf))) * leaf.dtype.itemsize
        for name, leaf in zip(engine._leaf_names, engine._leaf_shapes, strict=True)
    }
    head = sizes.get("target.head_dv", sizes["target.embed_vd"])
    layers = sum(size for name, size in sizes.items() if name.startswith("target.layers."))
    drafter = sum(size for name, size in sizes.items() if name.startswith("drafter."))

    def cache(config, shards: int) -> int:
        seen = sum(
            min(context, window or context)
            for layer, window in enumerate(config.windows)
            if not config.is_recurrent(layer)
        )
        delta = config.delta
        states = 0 if delta is None else 2 * 4 * len(delta.layers) * delta.state_size
        return (2 * config.num_kv_heads * config.head_dim * seen * width + states) // shards

    shards = shards_of(engine.mesh)[1]
    total = layers + head + cache(engine.target, shards)
    if mode != "ar":
        total += drafter + head + cache(engine.drafter, 1 if engine.whole_drafter else shards)
    return total


def _local_shape(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of one device's part."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def attended(count: int, window: int | None) -> int:
    """Pairs of query and key in a causal chunk of `count` tokens, of which each sees itself."""
    whole = min(count, window or count)
    return whole * (whole + 1) // 2 + (count - whole) * whole


def prefill_flops(engine: Engine, count: int) -> int:
    """What the first token after a prompt of `count` tokens must compute.

    The target's layers on every token, attention included, and one row of the head; of the drafter
    its fc and the K and V of its context.
    """
    target, drafter = engine.target, engine.drafter
    layers = sum(
        int(np.prod(shape.shape))
        for name, shape in zip(engine._leaf_names, engine._leaf_shapes, strict=True)
        if name.startswith("target.layers.") and len(shape.shape) > 1
    )
    pairs = sum(
        attended(count, window)
        for layer, window in enumerate(target.windows)
        if not target.is_recurrent(layer)
    )
    # Scores and weighted values: a product of head_dim each per pair and head.
    flops = 2 * layers * count + 4 * target.num_heads * target.head_dim * pairs
    if target.delta is not None:  # a state is read twice and updated once per token
        flops += 6 * target.delta.state_size * len(target.delta.layers) * count
    flops += 2 * target.hidden_size * target.vocab_size
    if drafter is not None:
        kv = 2 * drafter.num_layers * drafter.num_kv_heads * drafter.head_dim
        flops += 2 * count * drafter.hidden_size * (drafter.feature_size + kv)
    return flops


def attention_bounds(
    config: DecoderConfig, nodes: int, context: int, width: int
) -> tuple[int, int]:
    """Bytes of K and V, and FLOPs, of one layer's attention of `nodes` to a context."""
    bytes_kv = 2 * config.num_kv_heads * config.head_dim * context * width
    return bytes_kv, 4 * config.num_heads * config.head_dim * nodes * context
