"""Prefill, and the attention of a tree alone: what `bench.py round` measures beside rounds."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import tree as trees
from ddtree_jax.commands import floors, profile, timing
from ddtree_jax.engine import Engine, Options, bucket
from ddtree_jax.sampling import GREEDY

ATTENTION_NODES = (16, 64)


def prefill_program(engine: Engine, count: int) -> Any:
    """The future program of a prompt's chunks; the drafter's context is in it."""
    return engine._prefill_program(bucket(count), True, GREEDY)


def prefill_row(engine: Engine, count: int, matrix_rate: float) -> dict[str, Any]:
    """The time to the first token after a prompt of `count` random tokens.

    Prompts follow each other without a gap, and nothing waits in between, so that the host's
    dispatch is hidden behind the device.
    """
    program, leaves = prefill_program(engine, count).result(), engine._leaves.result()
    state = engine._fresh(engine.prefill_rows, bucket(count), True)
    prompt = np.random.default_rng(0).integers(engine.target.vocab_size, size=count).tolist()
    chunks = list(engine._chunks([prompt]))
    fresh = Options(mode="dflash", stop_ids=())

    def prefill() -> jax.Array:
        nonlocal state
        state = engine._reset(state, [prompt], [fresh])
        for chunk in chunks:
            state, emitted = program(leaves, state, *chunk)
        return emitted.count

    prefill().block_until_ready()
    repetitions, laps = 3, []
    for _ in range(5):
        started = time.perf_counter()
        [prefill() for _ in range(repetitions)][-1].block_until_ready()
        laps.append(1e3 * (time.perf_counter() - started) / repetitions)
    median, floor = float(np.median(laps)), 1e3 * floors.prefill_flops(engine, count) / matrix_rate
    row = {
        "label": f"prefill {count}",
        "tokens": count,
        "chunk": engine.prefill_chunk,
        "ms": median,
        "floor_ms": floor,
        "ratio": median / floor,
        "bound": "FLOPs",
    }
    if profile.available():
        row["busy_ms"] = profile.traced(prefill).busy_ms
    return row


def attention_row(
    engine: Engine, nodes: int, context: int, bandwidth: float, matrix_rate: float
) -> dict[str, Any]:
    """One layer's attention of a tree, its split parts combined, among all layers' K and V.

    The K and V of all layers are more than the GPU's L2 cache holds.
    """
    config, dtype = engine.target, engine.dtype
    slots, layers = bucket(context + 1), config.num_softmax_layers
    keys = iter(jax.random.split(jax.random.key(0), 2 * layers + 1))
    shape = (1, config.num_kv_heads, slots, config.head_dim)
    caches = [
        tuple(jax.random.normal(next(keys), shape, dtype) for _ in range(2)) for _ in range(layers)
    ]
    rows = (1, nodes, config.num_kv_heads, config.group_size + 2, config.head_dim)
    qkv = jax.random.normal(next(keys), rows, dtype)
    mask = trees.chain(jnp.zeros((1, nodes), jnp.int32)).ancestors
    lower, length = jnp.zeros((1, nodes), jnp.int32), jnp.full((1,), context, jnp.int32)

    @jax.jit
    def attend(qkv, caches, mask, lower, length):
        attention = engine.kernels.attention
        return [attention(qkv, *cache, mask, lower, length) for cache in caches]

    ms = timing.milliseconds(lambda: attend(qkv, caches, mask, lower, length)) / layers
    bytes_kv, flops = floors.attention_bounds(config, nodes, context, jnp.dtype(dtype).itemsize)
    bounds = {"bytes": 1e3 * bytes_kv / bandwidth, "FLOPs": 1e3 * flops / matrix_rate}
    bound = max(bounds, key=lambda name: bounds[name])
    return {
        "label": f"attention, {nodes} nodes",
        "nodes": nodes,
        "tokens": context,
        "layers": layers,
        "ms": ms,
        "floor_ms": bounds[bound],
        "ratio": ms / bounds[bound],
        "bound": bound,
        "bytes_ms": bounds["bytes"],
        "flops_ms": bounds["FLOPs"],
    }


def round_share(row: dict[str, Any], rounds: list[dict[str, Any]]) -> float | None:
    """Percent that all target layers take of the greedy tree round of these nodes and context."""
    for each in rounds:
        budget = row["nodes"] - 1
        if each["label"] == f"ddtree {budget}" and each["context"] == row["tokens"]:
            return 100 * row["layers"] * row["ms"] / each["median_ms"]
    return None
