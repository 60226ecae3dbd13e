"""Lossless tree speculative decoding in JAX.

import ddtree_jax

engine = ddtree_jax.load()                      # the bundled pair, or load(target, draft)
print(ddtree_jax.generate(engine, "Why is the sky blue?").text)
for piece in ddtree_jax.stream(engine, "Write a haiku."):
    print(piece, end="", flush=True)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree_jax.api import generate, load, stream
    from ddtree_jax.engine import Engine, Generation, Options
    from ddtree_jax.errors import InputError, RunError

_HOMES = {
    "api": ("generate", "load", "stream"),
    "engine": ("Engine", "Generation", "Options"),
    "errors": ("InputError", "RunError"),
}

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


def __getattr__(name: str):
    """Imports what is asked for, so that `import ddtree_jax.config` does not bring in JAX."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"ddtree_jax.{module}"), name)
    raise AttributeError(f"module 'ddtree_jax' has no attribute {name!r}")
