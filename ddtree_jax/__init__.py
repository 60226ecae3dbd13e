"""Lossless tree speculative decoding in JAX.

import ddtree_jax

engine = ddtree_jax.load()                      # the bundled pair, or load(target, draft)
print(ddtree_jax.generate(engine, "Why is the sky blue?").text)
for piece in ddtree_jax.stream(engine, "Write a haiku."):
    print(piece, end="", flush=True)
"""

from ddtree_jax.api import generate, load, stream
from ddtree_jax.engine import Engine, Generation, Options
from ddtree_jax.errors import InputError, RunError

__all__ = [
    "Engine",
    "Generation",
    "InputError",
    "Options",
    "RunError",
    "generate",
    "load",
    "stream",
]
