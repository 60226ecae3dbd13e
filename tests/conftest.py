"""Compiled programs of one test session are shared through a cache that dies with it."""

import os
import shutil
import tempfile

import pytest


def pytest_configure(config):
    # Before anything imports jax. A cache that the caller has chosen is left alone; without one,
    # `ddtree_jax.load` would keep the programs of tests in the user's own cache.
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = tempfile.mkdtemp(prefix="ddtree-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    # The tests compile hundreds of programs and run each for a moment. Not so the bundled pair: it
    # runs for minutes, and at this level XLA's CPU backend makes wrong texts of bfloat16 models.
    if config.option.markexpr not in ("bundled", "gpu"):
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # Threads of XLA's CPU backend. Under the Pallas interpreter a warpgroup that waits holds one;
    # with no more of them than waiting warpgroups, the one that they wait for never runs.
    os.environ.setdefault("NPROC", "8")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


@pytest.fixture(scope="session")
def golden_engine():
    """golden_engine(pair): a float32 engine of 16 rows, one a pair, and its programs, shared."""
    import pairs

    engines = {}

    def engine(name: str):
        if name not in engines:
            engines[name] = pairs.engine(name, batch_size=16, prefill_chunk=24)
        return engines[name]

    return engine
