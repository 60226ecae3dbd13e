"""The Mosaic kernel: the CPU interpreter with its race detector, and lowering for Hopper.

What a GPU makes of it is not seen here; `scripts/bench.py` measures that.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from kernels_pallas import tree_attention as reference
from kernels_pallas import tree_attention_mosaic as mosaic


def case(b, n, k, g, h, s, m, *, lengths, lower=0, seed=0):
    """Random arguments; every query sees at least itself among the rows beside the cache."""
    generator = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(generator.normal(size=shape), jnp.bfloat16)

    mask = generator.random((b, n, m)) < 0.4
    mask[:, np.arange(n), np.arange(n) % m] = True
    bounds = generator.integers(0, lower + 1, (b, n))
    keys = [normal(b, k, s, h), normal(b, k, s, h), normal(b, m, k, h), normal(b, m, k, h)]
    bounds, lengths = jnp.asarray(bounds, jnp.int32), jnp.asarray(lengths, jnp.int32)
    return (normal(b, n, k, g, h), *keys, jnp.asarray(mask), bounds, lengths)


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    interpret_pallas_call.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("shape", "lengths", "lower"),
    [
        # A cache that is empty, one short of a tile, a whole tile, one past it, and full.
        ((5, 7, 1, 2, 64, 128, 7), [0, 63, 64, 65, 128], 0),
        # Two warpgroups, rows and keys that fill no tile, windows.
        ((1, 20, 2, 4, 128, 192, 70), [150], 100),
        # The largest head, whose output takes two accumulators.
        ((1, 3, 1, 1, 256, 64, 3), [40], 0),
    ],
)
def test_interpreter_equals_reference_without_races(shape, lengths, lower):
    arguments = case(*shape, lengths=lengths, lower=lower)
    expected = np.asarray(reference.tree_attention(*arguments), np.float32)
    params = plgpu.InterpretGPUParams(detect_races=True)
    got = np.asarray(mosaic.tree_attention(*arguments, splits=2, interpret=params), np.float32)
    np.testing.assert_allclose(got, expected, atol=2e-2)
    assert np.abs(got - expected).mean() < 1e-3
    assert not interpret_pallas_call.get_races().races_found


def test_a_huge_sibling_does_not_leak():
    q, k, v, k_new, v_new, mask, lower, length = case(1, 8, 1, 2, 64, 64, 8, lengths=[30])
    mask = jnp.eye(8, dtype=bool)[None]
    params = plgpu.InterpretGPUParams()
    clean = mosaic.tree_attention(
        q, k, v, k_new, v_new, mask, lower, length, splits=1, interpret=params
    )
    loud = v_new.at[:, 3].set(1e30)
    dirty = mosaic.tree_attention(
        q, k, v, k_new, loud, mask, lower, length, splits=1, interpret=params
    )
    others = np.arange(8) != 3
    np.testing.assert_array_equal(np.asarray(clean)[:, others], np.asarray(dirty)[:, others])


@pytest.mark.parametrize(
    ("nodes", "head_dim"), [(1, 128), (16, 64), (33, 128), (64, 128), (64, 256), (512, 128)]
)
def test_lowers_for_hopper(nodes, head_dim):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    shapes = case(1, nodes, 8, 4, head_dim, 1024, nodes, lengths=[100])
    where = NamedSharding(mesh, jax.P())
    shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where) for s in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(mosaic.tree_attention).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2  # the prefix and the rows beside it


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"dtype": jnp.float32}, "float32"), ({"h": 96}, "head size 96"), ({"s": 100}, "100 cache")],
)
def test_unsupported_shapes_say_why(changes, reason):
    values = {"h": 64, "s": 128, "dtype": jnp.bfloat16} | changes
    q = jax.ShapeDtypeStruct((1, 4, 2, 2, values["h"]), values["dtype"])
    k = jax.ShapeDtypeStruct((1, 2, values["s"], values["h"]), values["dtype"])
    assert reason in mosaic.unsupported_reason(q, k)
    supported = jax.ShapeDtypeStruct((1, 2, 128, 64), jnp.bfloat16)
    query = jax.ShapeDtypeStruct((1, 4, 2, 2, 64), jnp.bfloat16)
    assert mosaic.unsupported_reason(query, supported) is None
