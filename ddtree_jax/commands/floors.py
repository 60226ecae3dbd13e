"""What bounds a program on this machine: bytes over bandwidth, FLOPs over the matrix rate."""

import time

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.engine import Engine


def read_bandwidth() -> float:
    """Bytes per second that a max-reduction reads, many launches in flight."""
    size = 2**29 if jax.default_backend() == "cpu" else 2**32
    data = jax.lax.bitcast_convert_type(
        jax.random.bits(jax.random.key(0), (size // 2,), jnp.uint16), jnp.bfloat16
    )
    reduce = jax.jit(jnp.max)
    reduce(data).block_until_ready()
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        results = [reduce(data) for _ in range(10)]
        results[-1].block_until_ready()
        best = max(best, 10 * size / (time.perf_counter() - started))
    return best


def bytes_read(engine: Engine, mode: str, context: int) -> int:
    """What a round must move: layers and head once (twice when it drafts), K/V and states.

    A sliding layer reads its window; a recurrent state is read and written.
    """
    width = jnp.dtype(engine.dtype).itemsize
    sizes = {
        name: int(np.prod(shape.shape)) * shape.dtype.itemsize
        for name, shape in zip(engine._leaf_names, engine._leaf_shapes, strict=True)
    }
    head = sizes.get("target.head_dv", sizes["target.embed_vd"])
    layers = sum(size for name, size in sizes.items() if name.startswith("target.layers."))
    drafter = sum(size for name, size in sizes.items() if name.startswith("drafter."))

    def cache(config) -> int:
        seen = sum(
            min(context, window or context)
            for layer, window in enumerate(config.windows)
            if not config.is_recurrent(layer)
        )
        delta = config.delta
        states = 0 if delta is None else 2 * 4 * len(delta.layers) * delta.state_size
        return 2 * config.num_kv_heads * config.head_dim * seen * width + states

    total = layers + head + cache(engine.target)
    if mode != "ar":
        total += drafter + head + cache(engine.drafter)
    return total
