"""How long things take on the device, with the host's dispatch out of the figure."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.commands import profile

REPETITIONS = 20


def milliseconds(call: Callable[[], Any]) -> float:
    """Of one call, many in flight: on a GPU while it was busy, so that no dispatch is in it."""

    def several() -> Any:
        return [call() for _ in range(REPETITIONS)][-1]

    jax.block_until_ready(call())
    if profile.available():
        return profile.traced(several).busy_ms / REPETITIONS
    laps = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(several())
        laps.append((time.perf_counter() - started) / REPETITIONS)
    return 1e3 * float(np.median(laps))


@jax.jit
def _products(x: jax.Array) -> jax.Array:
    """Some 50 ms of an H200, in one call."""
    y = x
    for _ in range(32):
        y = x @ y
    return y


def queued(call: Callable[[], Any], count: int) -> float | None:
    """Milliseconds of one call among `count` that all wait in the device's queue.

    The device is given other work first, behind which the host puts them in line; `call` returns an
    array of its own result. None if the host took longer than that, so that it is in the figure.
    """
    x = jnp.full((8192, 8192), 2.0**-13, jnp.bfloat16)
    jax.block_until_ready([_products(x), call()])
    held = [_products(x) for _ in range(6)]
    results = [call() for _ in range(count)]
    in_line = not results[0].is_ready()
    results[0].block_until_ready()
    started = time.perf_counter()
    results[-1].block_until_ready()
    stopped = time.perf_counter()
    del held
    return 1e3 * (stopped - started) / (count - 1) if in_line else None
