"""Where things live outside the repository."""

import os
from pathlib import Path

BUNDLED_DRAFTER = Path(__file__).parent / "bundled" / "smollm2-135m-instruct-dflash"


def cache_dir() -> Path:
    """Converted models and compiled programs: $DDTREE_JAX_CACHE, else the user's cache folder."""
    given = os.environ.get("DDTREE_JAX_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ddtree_jax"


def bundled_target() -> Path:
    """Where the bundled target's converted checkpoint is kept."""
    return cache_dir() / "models" / "smollm2-135m-instruct"
