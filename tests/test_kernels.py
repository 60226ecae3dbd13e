"""The Mosaic kernels: the CPU interpreter with its race detector, and lowering for Hopper.

What a GPU makes of them is not seen here; `scripts/bench.py` measures that.
"""

import collections
import dataclasses
import functools
import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding

from ddtree_jax import rounds, sampling
from ddtree_jax.config import GATE_COLUMNS
from ddtree_jax.models import Models, Peers
from ddtree_jax.sampling import GREEDY, Request, Sampler
from ddtree_jax.shapes import SHAPES
from kernels_pallas import (
    choice,
    commit,
    draft_tree,
    exchange,
    filters,
    matmul,
    mosaic,
    rows,
    sample,
    tree_attention,
    tree_attention_mosaic,
)
from kernels_pallas.dispatch import Kernels


@pytest.fixture(autouse=True)
def clean_interpreter():
    yield
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def interpreted(kernel, *arguments, **options):
    """The result under the interpreter, in which no race may be seen.

    One call is one program, and nothing else is under way: the interpreter can block for good then.
    """
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])
    params = plgpu.InterpretGPUParams(detect_races=True)
    result = jax.jit(functools.partial(kernel, interpret=params, **options))(*arguments)
    jax.block_until_ready(result)
    assert not interpret_pallas_call.get_races().races_found
    return result


def lowering(kernel, *arguments):
    """A program lowered for an H200 from this host."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Explicit,), abstract_device=device)
    where = NamedSharding(mesh, jax.P())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arguments
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(kernel).trace(*shapes).lower(lowering_platforms=("cuda",))


def lowered(kernel, *arguments) -> int:
    """The number of Mosaic kernels in a program lowered for an H200 from this host."""
    return lowering(kernel, *arguments).as_text().count("mosaic_gpu_v2")


def operations(operation):
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from operations(inner.operation)


def kernel_operations(kernel, *arguments) -> list[tuple]:
    """Of a program's only kernel, in order: operations' names, attributes, operands and results.

    Values are numbered; constants, whose order says nothing, stand for themselves.
    """
    program = lowering(kernel, *arguments).compiler_ir("stablehlo")
    calls = (o for o in operations(program.operation) if "custom_call" in o.name)
    (module,) = [call.attributes["mhlo.backend_config"]["module"].value_bytes for call in calls]
    program.context.allow_unregistered_dialects = True  # the names have a prefix
    with program.context:
        module = ir.Module.parse(module)
    number = itertools.count()
    names: dict[Any, Any] = collections.defaultdict(lambda: next(number))
    listed = []
    for operation in operations(module.operation):
        attributes = {name: str(operation.attributes[name]) for name in operation.attributes}
        name = operation.name.removeprefix("stable_mosaic_gpu.")
        operands = [names[value] for value in operation.operands]
        if name == "arith.constant":
            names[operation.results[0]] = attributes["value"]
        else:
            listed.append(
                (name, attributes, operands, [names[value] for value in operation.results])
            )
    return listed


def close(got, wanted, atol):
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(wanted, np.float32), atol=atol
    )


# Attention.


def attention_case(b, n, m, k, g, h, s, *, lengths, window=0):
    """Random arguments; every query sees at least itself among the rows beside the cache."""
    generator = np.random.default_rng(0)
    mask = generator.random((b, n, m)) < 0.4
    mask[:, np.arange(n), np.arange(n) + m - n] = True
    lengths = np.asarray(lengths, np.int32)
    lower = generator.integers(0, window + 1, (b, n)).clip(0, lengths[:, None])
    caches = normal(1, b, k, s, h), normal(2, b, k, s, h)
    arguments = (normal(3, b, m, k, g + 2, h), *caches, mask, lower.astype(np.int32), lengths)
    return tuple(map(jnp.asarray, arguments))


@pytest.mark.parametrize(
    ("shape", "lengths", "window"),
    [
        # A cache that is empty, one short of a tile, a whole tile, one past it, and full; so many
        # tiles that the ring of stages comes round.
        ((5, 7, 7, 1, 2, 64, 512), [0, 63, 64, 65, 512], 0),
        # Two warpgroups, windows, a group that is no power of two, more keys than queries, and
        # numbers of rows that tensor copies do not take.
        ((1, 20, 41, 1, 3, 128, 192), [150], 100),
        # Queries that begin in the middle of eight rows.
        ((1, 4, 8, 1, 2, 64, 64), [40], 0),
        # The largest head, whose output takes two accumulators.
        ((1, 3, 3, 1, 1, 256, 64), [40], 0),
        # A long cache, whose tiles are wide, for one warpgroup and for two that take turns; rows
        # beside in buffers of their own and, where too many, in the ring.
        ((2, 9, 9, 1, 4, 128, 4096), [300, 0], 0),
        ((1, 24, 70, 1, 4, 64, 4096), [4000], 3900),
        ((1, 24, 70, 1, 4, 64, 4096), [300], 0),
        # Wide tiles in a cache that is not long: nobody takes turns.
        ((1, 24, 70, 1, 4, 64, 1536), [1400], 0),
        ((2, 24, 24, 1, 4, 64, 1536), [130, 0], 100),
        # Turns over the rows beside, and in a split that has no tile.
        ((1, 24, 24, 1, 4, 64, 4096), [0], 1),
    ],
)
@pytest.mark.parametrize("splits", [1, 2])
def test_attention_equals_the_reference(shape, lengths, window, splits):
    arguments = attention_case(*shape, lengths=lengths, window=window)
    got = interpreted(
        tree_attention_mosaic.tree_attention, *arguments, bounded=window > 0, splits=splits
    )
    wanted = tree_attention.tree_attention(*arguments)
    close(got, wanted, 2e-2)
    assert np.abs(np.asarray(got - wanted, np.float32)).mean() < 1e-3


@pytest.mark.parametrize(
    ("shape", "lengths", "window"),
    [
        # An empty cache, an odd number of tiles of rows (a block has none), nodes that fill a part
        # of the last, windows, and a long cache of which little is used.
        ((2, 32, 32, 1, 4, 64, 512), [300, 0], 0),
        ((1, 40, 70, 2, 3, 128, 1792), [1500], 0),
        ((1, 24, 24, 1, 8, 64, 256), [200], 150),
        ((1, 64, 64, 1, 4, 64, 4096), [130], 0),
    ],
)
def test_workers_that_divide_the_keys_agree_with_the_reference(shape, lengths, window):
    arguments = attention_case(*shape, lengths=lengths, window=window)
    attend = functools.partial(
        tree_attention_mosaic.tree_attention, bounded=window > 0, divided=True
    )
    got = interpreted(attend, *arguments)
    wanted = tree_attention.tree_attention(*arguments)
    close(got, wanted, 2e-2)
    assert np.abs(np.asarray(got - wanted, np.float32)).mean() < 1e-3


@pytest.mark.parametrize("place", ["sibling", "slots past the length"])
@pytest.mark.parametrize(
    ("nodes", "ways"), [(8, {"splits": 2}), (8, {"splits": 1}), (40, {"divided": True})]
)
def test_what_is_hidden_leaves_no_trace(place, nodes, ways):
    """Huge values, which a mask that blends what it should hide would let through."""
    length = 30 if place == "sibling" else 0
    qkv, k, v, _, lower, _ = attention_case(1, nodes, nodes, 1, 2, 64, 128, lengths=[length])
    mask = jnp.eye(nodes, dtype=bool)[None].at[0, 5].set(length > 0)
    loud = qkv.at[:, 3, :, -1].set(1e30), k, v
    if place != "sibling":
        # Every split begins with a tile past the length, and query 5 sees nothing anywhere.
        loud = qkv, *(x.at[:, :, length:].set(1e30) for x in (k, v))
    clean, got = (
        np.asarray(
            interpreted(
                tree_attention_mosaic.tree_attention,
                *(*each, mask, lower, jnp.full((1,), length)),
                bounded=False,
                **ways,
            )
        )
        for each in ((qkv, k, v), loud)
    )
    unlike = [3, 5] if place == "sibling" else []
    np.testing.assert_array_equal(np.delete(clean, unlike, 1), np.delete(got, unlike, 1))
    assert (got[:, 5] == 0).all() == (length == 0)


def test_who_divides_keys_has_two_warpgroups_and_no_splits():
    case = attention_case(1, 40, 40, 1, 2, 64, 128, lengths=[30])
    with pytest.raises(ValueError, match="in 3 splits"):
        tree_attention_mosaic.tree_attention(*case, divided=True, splits=3)
    case = attention_case(1, 8, 8, 1, 2, 64, 128, lengths=[30])
    with pytest.raises(ValueError, match="a block that has 1"):
        tree_attention_mosaic.tree_attention(*case, divided=True)


@pytest.mark.parametrize("divided", [False, True])
def test_blocks_of_a_cluster_read_tiles_together_and_free_them_together(divided, monkeypatch):
    """The interpreter does not know clusters; a GPU gives wrong results or hangs."""
    copies, barriers = [], []
    copy, barrier = plgpu.copy_gmem_to_smem, plgpu.ClusterBarrier
    monkeypatch.setattr(
        plgpu,
        "copy_gmem_to_smem",
        lambda *refs, **options: copies.append(options) or copy(*refs, **options),
    )
    monkeypatch.setattr(
        plgpu, "ClusterBarrier", lambda **options: barriers.append(options) or barrier(**options)
    )
    case = attention_case(1, 40, 41, 1, 4, 64, 512, lengths=[100])  # not a shape that is traced
    attend = functools.partial(
        tree_attention_mosaic.tree_attention.__wrapped__, bounded=False, divided=divided
    )
    # Rows beside are filled up to 48 first, by a call of its own.
    assert lowered(attend, *case) == (1 if divided else 2)
    axes = [each.get("collective_axes") for each in copies]
    # Queries of four heads; K and V of the first tile, of others, and of the rows beside, which
    # otherwise have buffers of their own.
    assert len(axes) == (12 if divided else 14)
    assert axes.count("block") == 8 * divided
    assert [(each["collective_axes"], each["num_arrivals"]) for each in barriers] == (
        [(("block",), 2)] * divided
    )


def test_attention_in_a_window_begins_at_its_bounds():
    arguments = attention_case(1, 4, 4, 1, 2, 64, 256, lengths=[200], window=150)

    def attend(*arguments, interpret):
        return Kernels(mosaic=True, interpret=interpret).attention(*arguments, window=200)

    close(interpreted(attend, *arguments), tree_attention.tree_attention(*arguments), 2e-2)


@pytest.mark.parametrize(
    ("nodes", "heads", "h", "slots", "bounded", "kernels"),  # a second kernel combines splits
    [
        (1, 4, 128, 1024, False, 2),
        (16, 3, 64, 1024, True, 2),
        (64, 4, 128, 1024, False, 2),
        (64, 4, 128, 8192, False, 2),
        (256, 4, 128, 1536, False, 1),
        (256, 4, 64, 512, True, 1),
        (256, 4, 128, 8192, False, 2),
        (64, 6, 256, 1024, False, 2),
        (512, 4, 128, 8192, True, 1),
        (512, 6, 256, 1024, False, 1),
    ],
)
def test_attention_lowers_for_hopper(nodes, heads, h, slots, bounded, kernels):
    case = attention_case(1, nodes, nodes, 8, heads, h, slots, lengths=[100])
    attend = functools.partial(tree_attention_mosaic.tree_attention, bounded=bounded)
    assert lowered(attend, *case) == kernels


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float32}, "float32"),
        ({"h": 96}, "head size 96"),
        ({"g": 9}, "9 query heads"),
        ({"s": 100}, "100 cache"),
    ],
)
def test_unsupported_attention_says_why(changes, reason):
    def problem(h=64, g=2, s=128, dtype=jnp.bfloat16):
        qkv = jax.ShapeDtypeStruct((1, 4, 2, g + 2, h), dtype)
        return tree_attention_mosaic.unsupported_reason(
            qkv, jax.ShapeDtypeStruct((1, 2, s, h), dtype)
        )

    assert reason in problem(**changes)
    assert problem() is None


# Products.


@pytest.mark.parametrize(
    ("m", "k", "n", "plan"),
    [
        (1, 256, 128, matmul.Schedule(128, 2)),
        (20, 1088, 192, matmul.Schedule(64, 1, 3)),
        (72, 192, 256, matmul.Schedule(256, 2)),
        (3, 320, 256, matmul.Schedule(64, 2, 2, cluster=2)),
        (72, 256, 512, matmul.Schedule(128, 1, cluster=2)),
    ],
)
def test_split_matmul_equals_the_reference(m, k, n, plan):
    x, w = normal(0, m, k), normal(1, k, n)
    got = interpreted(matmul.split_matmul, x, w, plan=plan)
    assert got.shape == (plan.parts, m, n)
    close(got.sum(axis=0), np.asarray(x, np.float32) @ np.asarray(w, np.float32), 1e-3)


@pytest.mark.parametrize(
    ("m", "plan"),
    [
        (5, matmul.Schedule(128, 1)),
        (70, matmul.Schedule(64, 1)),
        (128, matmul.Schedule(96, 1)),
        (40, matmul.Schedule(64, 1, 2, cluster=2)),
        (200, matmul.Schedule(96, 1)),
    ],
)
def test_gated_matmul_equals_the_reference(m, plan):
    x, w = normal(0, m, 192), normal(1, 192, 12, 2, 32) * 0.1
    got = interpreted(matmul.gated_matmul, x, w, plan=plan)
    gate, up = (
        np.asarray(x, np.float32) @ np.asarray(w[:, :, i], np.float32).reshape(192, 384)
        for i in range(2)
    )
    assert got.dtype == jnp.bfloat16
    want = gate / (1 + np.exp(-gate)) * up
    # Gate, its activation and the product are rounded to bfloat16 each.
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0.02, atol=0.01)


def test_a_gate_far_off_zero_shuts_or_passes():
    """exp overflows in float32 from 88 on."""
    x = jnp.ones((1, 64), jnp.bfloat16)
    gate = jnp.repeat(jnp.asarray([-1e4, -100.0, 0.0, 100.0, 1e4]) / 64, 13)[:64]
    w = jnp.stack([gate.reshape(2, 32), jnp.full((2, 32), 1 / 64)], axis=1)
    w = jnp.broadcast_to(w, (64, 2, 2, 32)).astype(jnp.bfloat16)
    got = np.asarray(interpreted(matmul.gated_matmul, x, w), np.float32)[0]
    want = np.asarray(matmul.gated_reference(x, w), np.float32)[0]
    close(got, want, 1e-2)
    assert got[0] == 0
    assert got[-1] > 9000


@pytest.mark.parametrize("m", [1, 16, 33, 64, 128])
def test_products_lower_for_hopper(m):
    assert lowered(matmul.split_matmul, normal(0, m, 512), normal(0, 512, 6144)) == 1
    assert lowered(matmul.gated_matmul, normal(0, m, 512), normal(0, 512, 384, 2, 32)) == 1


@pytest.mark.parametrize("m", [129, 250, 256])
def test_gated_products_of_many_rows_lower_for_hopper(m):
    assert lowered(matmul.gated_matmul, normal(0, m, 512), normal(0, 512, 384, 2, 32)) == 1


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        (matmul.gated_matmul, (512, 384, 2, 32)),
        (matmul.split_matmul, (512, 6144)),
        (functools.partial(choice.argmax, real=7), (512, 4096)),
        (functools.partial(choice.argmax, real=7, transposed=True), (4096, 512)),
    ],
)
def test_the_cache_drops_weights_first(kernel, shape, monkeypatch):
    """The kernel is what it is without the hint, which the weights' copy has and no other."""
    streamed, copy = [], mosaic.copy_streamed

    def watched(source, target, barrier, *, interpret):
        streamed.append(source.ref.shape)
        copy(source, target, barrier, interpret=interpret)

    monkeypatch.setattr(mosaic, "copy_streamed", watched)
    arguments = normal(0, 16, 512), normal(0, *shape)
    jax.clear_caches()
    hinted = kernel_operations(kernel, *arguments)
    monkeypatch.setattr(mosaic, "_evict_first", lambda: None)
    jax.clear_caches()
    plain = kernel_operations(kernel, *arguments)
    columns = shape[1:] if len(shape) == 2 else (np.prod(shape[1:]),)
    assert streamed == [(shape[0], *columns)] * 2
    copies = [i for i, operation in enumerate(plain) if operation[0] == mosaic.TENSOR_COPY]
    name, attributes, operands, results = plain[copies[0]]
    assert len(copies) == 2
    assert attributes["operandSegmentSizes"].endswith("0, 0, 0, 1>")
    # From PTX's createpolicy, as NVIDIA's CUTLASS has it.
    hint = f"{0x12F0000000000000} : i64"
    sizes = attributes["operandSegmentSizes"].replace("0, 0, 0, 1>", "0, 0, 1, 1>")
    attributes = attributes | {"operandSegmentSizes": sizes}
    plain[copies[0]] = (name, attributes, [*operands[:-1], hint, operands[-1]], results)
    assert hinted == plain


def test_a_streamed_copy_needs_its_compiler_parameters(monkeypatch):
    monkeypatch.setattr(mosaic, "STREAMING", plgpu.CompilerParams(approx_math=True))
    with pytest.raises(RuntimeError, match="STREAMING"):
        lowered(choice.argmax, normal(0, 16, 512), normal(0, 512, 4224), jnp.int32(7))


# Head and choice.


@pytest.mark.parametrize(
    ("m", "k", "n", "real", "transposed"),
    [
        (5, 128, 648, 600, False),
        (20, 192, 1000, 1000, True),
        # Two warpgroups, and two of 128 rows each.
        (70, 64, 520, 520, False),
        (130, 64, 400, 390, True),
        # A shard before others, whose last tile is partly outside the weight; see below.
        (16, 64, 400, 800, False),
        # A shard of nothing but padding.
        (2, 64, 256, 0, False),
        (2, 64, 256, -40, False),
    ],
)
def test_the_largest_of_a_product_equals_the_reference(m, k, n, real, transposed, monkeypatch):
    """Small whole numbers: sums are exact, and many columns tie, within tiles and across blocks."""
    monkeypatch.setattr(choice, "MULTIPROCESSORS", 2)  # so that a block has several tiles
    generator = np.random.default_rng(0)
    x, w = (
        jnp.asarray(generator.integers(-2, 3, shape), jnp.bfloat16)
        for shape in ((m, k), (n, k) if transposed else (k, n))
    )
    if real > n:  # all logits are negative: a zero from outside the weight would win
        x, w = jnp.abs(x) + 1, -jnp.abs(w) - 1
    given = dict(real=real, transposed=transposed)
    largest, column = interpreted(choice.argmax, x, w, tile=128, **given)
    wanted = choice.reference(x, w, **given)
    np.testing.assert_array_equal(largest, wanted[0])
    np.testing.assert_array_equal(column, wanted[1])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m", [16, 33, 128, 250])
def test_head_and_choice_lower_for_hopper(m, transposed):
    w = jax.ShapeDtypeStruct((49152, 576) if transposed else (576, 49152), jnp.bfloat16)
    kernel = functools.partial(choice.argmax, real=49152, transposed=transposed)
    assert lowered(kernel, normal(0, m, 576), w) == 1


def test_few_rows_leave_their_head_to_xla():
    w = jax.ShapeDtypeStruct((64, 192 * 132), jnp.bfloat16)
    kernels = Kernels(mosaic=True)
    for m, count in ((15, 0), (16, 1)):
        assert lowered(functools.partial(kernels.argmax, real=7), normal(0, m, 64), w) == count


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n", [8, 56, 64, 72, 4100, 4104, 16000, 16032])
def test_every_size_lowers_or_is_said_to_be_unsupported(n, transposed):
    """16032 columns are an eighth of Llama 3.1's vocabulary."""
    w = normal(0, *((n, 64) if transposed else (64, n)))
    kernel = functools.partial(choice.argmax, real=n, transposed=transposed)
    reason = choice.unsupported_reason(16, 64, n, jnp.bfloat16, transposed=transposed)
    if reason is None:
        assert lowered(kernel, normal(0, 16, 64), w) == 1
    else:
        assert f"64 x {n}" in reason
        with pytest.raises(ValueError, match="multiple"):
            lowered(kernel, normal(0, 16, 64), w)
    program = functools.partial(Kernels(mosaic=True).argmax, real=n, transposed=transposed)
    preferred = reason is None and choice.preferred(16, n)
    assert lowered(program, normal(0, 16, 64), w) == preferred


def test_a_head_has_tiles_that_keep_all_multiprocessors_busy():
    assert choice.tile_of(128, 151936) == 192
    assert choice.tile_of(64, 128256) in (128, 256)
    assert choice.tile_of(256, 128256) == 128  # 256 columns have no room beside 128 rows
    for v in (32000, 49152, 75968, 128256, 151936, 248320):
        assert choice.preferred(128, v), v
    assert not choice.preferred(1, 151936)
    assert not choice.preferred(64, 512)
    assert "float32" in choice.unsupported_reason(16, 64, 128, jnp.float32)
    assert "257 rows" in choice.unsupported_reason(257, 64, 128, jnp.bfloat16)
    with pytest.raises(ValueError, match="257 rows"):
        jax.eval_shape(
            functools.partial(choice.argmax, real=128), normal(0, 257, 64), normal(1, 64, 128)
        )
    assert "72 x 128" in choice.unsupported_reason(16, 72, 128, jnp.bfloat16)
    assert choice.unsupported_reason(256, 576, 49152, jnp.bfloat16) is None


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
@pytest.mark.parametrize(
    ("k", "n", "gated"),
    [
        (4096, 6144, False),
        (4096, 4096, False),
        (12288, 4096, False),
        (5120, 34816, False),
        (4096, 12288, True),
        (5120, 17408, True),
    ],
)
def test_a_schedule_covers_the_weight_and_fills_the_gpu(rows, k, n, gated):
    plan = matmul.schedule(rows, k, n, gated=gated)
    assert plan in matmul.schedules(k, n, gated=gated)
    assert n % plan.tile == 0
    assert k // matmul.DEPTH >= plan.parts
    assert n // plan.tile * plan.parts >= 96


@pytest.mark.parametrize(("k", "n", "gated"), [(576, 960, False), (64, 64, False), (64, 96, True)])
def test_small_weights_have_schedules(k, n, gated):
    plan = matmul.schedule(1, k, n, gated=gated)
    assert n % plan.tile == 0
    assert plan.parts >= 1


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_a_gated_product_of_more_than_one_wave_is_left_to_xla(rows):
    assert matmul.preferred(rows, 4096, 12288, gated=True)
    assert not matmul.preferred(rows, 5120, 17408, gated=True)


def test_one_row_is_the_kernels_where_xla_needs_a_second_one():
    for k, n in ((4096, 6144), (4096, 4096), (12288, 4096), (2560, 6144), (9728, 2560)):
        assert matmul.preferred(1, k, n)
    assert not matmul.preferred(1, 4096, 12288, gated=True)
    assert not matmul.preferred(1, 2048, 4096)
    assert not matmul.preferred(1, 5120, 34816)  # three waves of blocks


@pytest.mark.parametrize("rows", [2, 8, 129, 224, 257, 512])
def test_few_and_many_rows_are_left_to_xla(rows):
    assert not matmul.preferred(rows, 4096, 4096)
    assert not matmul.preferred(rows, 4096, 12288, gated=True)


def test_rows_that_xla_pads_to_256_are_the_kernels_where_it_fills_the_gpu(monkeypatch):
    assert matmul.preferred(256, 4096, 12288, gated=True)
    assert not matmul.preferred(256, 4096, 6144, gated=True)
    assert not matmul.preferred(256, 5120, 17408, gated=True)
    monkeypatch.setattr(matmul, "gated_matmul", lambda *_, **__: "the kernel")
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 4096), (4096, 384, 2, 32)))
    assert Kernels(mosaic=True).gated_matmul(x, w) == "the kernel"


def test_gates_in_other_groups_are_left_to_xla(monkeypatch):
    """Where the MLP's size has no groups of 32 that 8 shards can share."""
    monkeypatch.setattr(matmul, "gated_reference", lambda x, w: "the reference")
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 4096), (4096, 768, 2, 16)))
    assert Kernels(mosaic=True).gated_matmul(x, w) == "the reference"
    with pytest.raises(ValueError, match="by turns of 16; the kernel takes 32"):
        jax.eval_shape(matmul.gated_matmul, x, w)
    assert GATE_COLUMNS == matmul.GATED_COLUMNS  # config.py cannot import it: it needs no JAX


@pytest.mark.parametrize(("m", "cluster"), [(64, 1), (64, 2), (128, 2), (200, 1)])
def test_blocks_of_a_cluster_read_rows_together_and_free_them_together(m, cluster, monkeypatch):
    """The interpreter knows neither clusters nor registers; a GPU gives wrong sums or hangs."""
    seen = {"copy_gmem_to_smem": [], "ClusterBarrier": [], "set_max_registers": []}

    def recorded(name, original, *arguments, **options):
        seen[name].append((arguments, options))
        return original(*arguments, **options)

    for name in seen:
        monkeypatch.setattr(plgpu, name, functools.partial(recorded, name, getattr(plgpu, name)))
    plan = matmul.Schedule(96, 1, 3, cluster)
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((m, 512), (512, 2 * 192)))
    jax.eval_shape(functools.partial(matmul._stream, plan=plan, gated=True, interpret=None), x, w)
    axes = [options.get("collective_axes") for _, options in seen["copy_gmem_to_smem"]]
    barriers = [options for _, options in seen["ClusterBarrier"]]
    assert axes == [None, "tile" if cluster > 1 else None]  # of the weight, and rows
    assert [each["collective_axes"] for each in barriers] == [("tile",)] * (cluster - 1)
    assert all(each["num_arrivals"] == (1 if m == 64 else 2) for each in barriers)
    registers = sorted(number for (number,), _ in seen["set_max_registers"])
    assert registers == ([40, 232] if m > 128 else [])
    assert mosaic.COPYING_REGISTERS + 2 * mosaic.COMPUTING_REGISTERS <= 3 * 168


@pytest.mark.parametrize("rows", [1, 20, 64, 128, 200, 256])
@pytest.mark.parametrize("n", [64, 192, 6144, 9728, 12160, 12288, 14336, 17408])
def test_what_a_gated_product_chooses_fits(rows, n):
    """The blocks of clusters are whole, and sums leave the registers room."""
    if matmul.unsupported_reason(rows, 512, n, jnp.bfloat16, gated=True) is not None:
        assert rows > matmul.MAX_ROWS
        return
    plan = matmul.schedule(rows, 512, n, gated=True)
    assert n % (plan.tile * plan.cluster) == 0
    assert plan.tile * (2 if rows > matmul.MAX_ROWS else 1) <= 192


def test_a_plan_without_registers_for_its_sums_is_refused():
    for m, tile in ((136, 128), (264, 64)):
        x, w = normal(0, m, 512), normal(0, 512, 16, 2, 32)
        with pytest.raises(ValueError, match=f"too few registers with {m} rows"):
            matmul.gated_matmul(x, w, plan=matmul.Schedule(tile, 1))


@pytest.mark.parametrize("rows", [1, 2, 16, 129, 256, 512])
@pytest.mark.parametrize("k", [64, 576, 1536, 4096, 12288])
@pytest.mark.parametrize("n", [64, 960, 2560, 4096, 6144])
def test_what_xla_divides_is_divided_evenly_and_no_more_than_needed(rows, k, n):
    parts = matmul.divisions(rows, k, n)
    tiles = -(-rows // 128) * -(-n // 128)
    assert k % parts == 0
    assert parts == 1 or (rows > 1 and k // parts >= 256 and tiles * parts // 2 < 128)


@pytest.mark.parametrize(("m", "k", "n"), [(5, 1024, 256), (200, 768, 128)])
def test_few_and_many_rows_leave_their_partial_sums_to_the_reader(m, k, n):
    x, w = normal(0, m, k), normal(1, k, n)
    kernels = Kernels(mosaic=True)  # not interpreted: a kernel would fail on this host
    got = kernels.matmul(x, w)
    assert got.dtype == jnp.float32
    assert got.shape == (matmul.divisions(m, k, n), m, n)
    assert got.shape[0] > 1
    close(got.sum(axis=0), np.asarray(x, np.float32) @ np.asarray(w, np.float32), 1e-3)


def test_unsupported_products_say_why():
    assert "129 rows" in matmul.unsupported_reason(129, 64, 64, jnp.bfloat16)
    assert "float32" in matmul.unsupported_reason(1, 64, 64, jnp.float32)
    assert "96 x 64" in matmul.unsupported_reason(1, 96, 64, jnp.bfloat16)
    assert "129 rows" in matmul.unsupported_reason(129, 64, 64, jnp.bfloat16, gated=True)
    assert "257 rows" in matmul.unsupported_reason(257, 64, 192, jnp.bfloat16, gated=True)
    assert matmul.unsupported_reason(128, 64, 64, jnp.bfloat16) is None


# Sums over devices.


def hopper_mesh(devices):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    kinds = (AxisType.Auto, AxisType.Auto)
    return AbstractMesh((1, devices), ("data", "model"), kinds, abstract_device=device)


@pytest.mark.parametrize(("devices", "m", "d"), [(2, 64, 4096), (4, 1, 2560)])
def test_sums_over_devices_lower_for_hopper(devices, m, d):
    mesh = hopper_mesh(devices)

    def program(x, parts, weight, addresses):
        for _ in range(2):
            x, y = exchange.add_norm(x, parts, weight, addresses[0], 1e-6)
            parts = y[None]
        return x

    specs = (jax.P(), jax.P(), jax.P(), jax.P(("data", "model")))
    mapped = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False)
    words = (devices, exchange.address_words(devices))
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(
            [(m, d), (3, m, d), (d,), words],
            [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.int32],
            specs,
            strict=True,
        )
    ]
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2  # of 3 parts, and of one
    assert "multimem" not in text  # NVLink multicast is left alone
    # To XLA it is an ordinary kernel, which a CUDA graph can hold.
    assert "all_reduce" not in text
    assert "uses_collective_metadata = true" not in text


@pytest.mark.parametrize("mode", ["ar", "ddtree"])
def test_a_sharded_round_has_no_collective_of_xla(mode):
    """So is all that the devices tell each other: the round can be one CUDA graph."""
    target, drafter = small_pair()
    target = dataclasses.replace(target, hidden_size=512).for_shards(2)
    drafter = dataclasses.replace(drafter, hidden_size=512).for_shards(2)
    kernels, words = Kernels(mosaic=True), exchange.address_words(2)
    options = dict(axis="model", kernels=kernels, peers=words)
    abstract = nnx.eval_shape(lambda: Models(target, drafter, **options, rngs=nnx.Rngs(0)))
    graphdef, *states = nnx.split(abstract, nnx.Param, Peers)
    assert len(jax.tree.leaves(states[1])) == 1  # all layers share it
    decode = jax.eval_shape(
        lambda: rounds.empty_state(abstract, 1, 128, 8, jnp.bfloat16, drafting=mode != "ar")
    )

    def program(parameters, peers, decode):
        models = nnx.merge(graphdef, parameters, peers)
        if mode == "ar":
            return rounds.ar_round(models, decode, sampler=GREEDY)
        return rounds.tree_round(models, decode, budget=20, sampler=GREEDY)

    # Shapes of one shard everywhere: what is counted does not depend on them.
    mesh = hopper_mesh(2)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    where = NamedSharding(mesh, jax.P())
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), states[0])
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        (state, states[1], decode),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(mapped).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.all_reduce" not in text
    assert "stablehlo.all_gather" not in text
    assert "sum_add_norm_kernel" in text
    assert "gather_kernel" in text


@pytest.mark.parametrize(("d", "words_of_a_row"), [(512, 256), (64, 128)])
def test_inboxes_know_each_other(d, words_of_a_row):
    """Own inbox, rank, and the inboxes in the order of the ranks; empty, and nothing done.

    What is gathered has rows of 128 words, which must not meet in the inboxes of a small model.
    """
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    inboxes = exchange.open_inboxes(mesh, "model", d)
    low, high, rank, width, *others = np.asarray(inboxes.addresses).view(np.uint32)[0].tolist()
    assert low + (high << 32) == inboxes.memory[0].unsafe_buffer_pointer()
    assert (rank, width) == (0, words_of_a_row)
    assert others == [low, high]
    words = np.asarray(inboxes.memory[0])
    done = exchange.MAX_ROWS * exchange.THREADS
    assert (words[:done] == 0).all()
    assert (words[done:] == exchange.EMPTY).all()
    assert len(words) == done + 2 * 1 * exchange.MAX_ROWS * words_of_a_row


@pytest.mark.parametrize(
    ("answer", "reason"),
    [((0, 1), None), ((0, 0), "GPU 3 cannot write into the memory of GPU 5"), ((101, 1), "GPU 3")],
)
def test_devices_that_do_not_reach_each_other_are_found(answer, reason, monkeypatch):
    def can_access(reaches, device, peer):
        assert {device, peer} == {3, 5}
        reaches._obj.value = answer[1]
        return answer[0]

    driver = SimpleNamespace(cuDeviceCanAccessPeer=can_access)
    monkeypatch.setattr(exchange.ctypes, "CDLL", lambda name: driver)
    got = exchange.unreachable_reason([SimpleNamespace(local_hardware_id=i) for i in (3, 5)])
    assert got is None if reason is None else reason in got


def test_unsupported_sums_say_why():
    assert "float32" in exchange.unsupported_reason(1, 256, jnp.float32)
    assert "rows of 640" in exchange.unsupported_reason(1, 640, jnp.bfloat16)
    assert "513 rows" in exchange.unsupported_reason(513, 512, jnp.bfloat16)
    assert exchange.unsupported_reason(512, 4096, jnp.bfloat16) is None


# Rows.


@pytest.mark.parametrize(("m", "s", "centred"), [(1, 4, False), (20, 1, True)])
def test_add_norm_equals_the_reference(m, s, centred):
    dtype = jnp.float32 if s > 1 else jnp.bfloat16
    arguments = normal(0, m, 256), normal(1, s, m, 256, dtype=dtype), normal(2, 256)
    kernel = functools.partial(rows.add_norm, eps=1e-6, centred=centred)
    reference = rows.add_norm_reference(*arguments, 1e-6, centred=centred)
    for mine, wanted in zip(interpreted(kernel, *arguments), reference, strict=True):
        close(mine, wanted, 4e-2)
    assert lowered(kernel, *arguments) == 1


@pytest.mark.parametrize(
    ("m", "s", "shape", "rotated", "normed", "centred"),
    [
        (1, 4, (2, 4, 128), 128, True, False),
        (2, 1, (2, 4, 128), 64, False, False),
        (5, 1, (2, 4, 256), 64, False, False),
        (3, 3, (2, 4, 256), 256, True, False),
        # The four heads of a block belong to several groups.
        (9, 2, (4, 3, 128), 64, True, True),
        (2, 2, (2, 6, 64), 64, True, False),
    ],
)
def test_head_rows_equal_the_reference(m, s, shape, rotated, normed, centred):
    groups, slots, h = shape
    dtype = jnp.float32 if s > 1 else jnp.bfloat16
    angles = normal(1, m, rotated // 2, dtype=jnp.float32)
    norms = (normal(2, h), normal(3, h)) if normed else None
    parts = normal(0, s, m, groups * slots * h, dtype=dtype)
    arguments = parts, (jnp.cos(angles), jnp.sin(angles)), norms
    kernel = functools.partial(rows.head_rows, eps=1e-6, shape=shape, centred=centred)
    wanted = rows.head_rows_reference(*arguments, 1e-6, shape, jnp.bfloat16, centred=centred)
    close(interpreted(kernel, *arguments), wanted, 4e-2)
    assert lowered(kernel, *arguments) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": jnp.float32}, "float32"),
        ({"shape": (3, 5, 128)}, "15 heads"),
        ({"half": 16}, "head size 128, 32 of it rotated"),
        ({"shape": (2, 4, 80), "half": 32}, "head size 80"),
    ],
)
def test_unsupported_heads_say_why(changes, reason):
    def problem(shape=(2, 4, 128), half=64, dtype=jnp.bfloat16):
        return rows.head_rows_unsupported(shape, half, dtype)

    assert reason in problem(**changes)
    assert problem() is None


# Commit.


@pytest.mark.parametrize("h", [64, 128])
@pytest.mark.parametrize("with_path", [True, False])
def test_append_equals_the_reference(h, with_path):
    layers, b, k, slots = 3, 2, 2, 32
    caches = [(normal(i, b, k, slots, h), normal(9 + i, b, k, slots, h)) for i in range(layers)]
    pending = [normal(20 + i, b, 6, k, 3, h) for i in range(layers)]
    path = jnp.array([[0, 2, 3, 0, 0], [0, 1, 5, 4, 0]]) if with_path else None
    # The second row reaches past the end of its cache.
    length, count = jnp.array([7, 29]), jnp.array([3, 5])
    got = interpreted(commit.append, caches, pending, path, length, count)
    wanted = commit.reference(caches, pending, path, length, count)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert lowered(commit.append, caches, pending, path, length, count) == 1


# Trees.


@pytest.mark.parametrize(
    ("shape", "budget", "chain_seed"),
    [
        ((2, 4, 7), 7, False),
        ((1, 3, 2), 20, False),
        ((1, 5, 15), 15, True),
        ((1, 4, 31), 31, False),
        # More picks than there are prefixes, and than the table has numbers.
        ((1, 1, 8), 60, False),
        ((1, 2, 2), 9, True),
        ((1, 6, 40), 150, False),
    ],
)
def test_the_grown_tree_equals_the_reference(shape, budget, chain_seed):
    scores = np.random.default_rng(0).integers(-6, 1, shape) * 1000  # ties everywhere
    same_tree(-np.sort(-scores, axis=-1), budget, chain_seed)


def test_a_pinned_chain_keeps_the_order_of_ties():
    """All candidates of a level are equal, and the chain is worse than what it leaves behind."""
    scores = np.full((1, 4, 5), -1000)
    scores[:, 0] = 0
    same_tree(scores, 30, chain_seed=True)


def same_tree(scores, budget, chain_seed):
    scores = jnp.asarray(scores, jnp.int32)
    got = interpreted(draft_tree.grow, scores, budget=budget, chain_seed=chain_seed)
    wanted = draft_tree.reference(scores, budget, chain_seed=chain_seed)
    live = np.asarray(wanted[3])
    for mine, reference in zip(got[:3], wanted[:3], strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[live], np.asarray(reference)[live])
    for mine, reference in zip(got[3:], wanted[3:], strict=True):
        np.testing.assert_array_equal(mine, reference)


@pytest.mark.parametrize("budget", [1, 63, draft_tree.MAX_BUDGET])
def test_growing_lowers_for_hopper(budget):
    scores = jnp.zeros((1, 15, budget), jnp.int32)
    assert lowered(functools.partial(draft_tree.grow, budget=budget), scores) == 1
    with pytest.raises(ValueError, match=f"a budget of 512; .* up to {draft_tree.MAX_BUDGET}"):
        draft_tree.grow(scores, draft_tree.MAX_BUDGET + 1)


# Sampling.


def score_rows(generator, v):
    """float32 scores of which every filter has something else to keep, eight rows of v."""
    normal = generator.standard_normal((5, v))
    peaked = normal[0].copy()
    peaked[v - 2] = 30.0
    rows_of = [
        3 * normal[1],
        1e-3 * normal[2],
        peaked,
        generator.integers(0, 4, v),
        np.where(generator.random(v) < 0.9, -np.inf, 3 * normal[3]),
        200 * normal[4],
        np.zeros(v),
        np.where(np.arange(v) == 77, 2, -np.inf),
    ]
    return [row.astype(np.float32) for row in rows_of]


def at_the_edge(scores, name, asked):
    """Noise [b, 1, v] that ranks scores by how close they are to two below the lowest that is kept.

    What is chosen is that lowest, and whatever is just below it is refused before.
    """
    kept = np.isfinite(getattr(filters, name)(scores, asked))
    noise = np.zeros_like(scores)
    for row, stays, out in zip(scores[:, 0], kept[:, 0], noise[:, 0], strict=True):
        finite = np.isfinite(row)
        rank = np.unique(-row[finite], return_inverse=True)[1]
        edge = rank[stays[finite]].max()
        out[finite] = -np.abs(rank - edge - 2) - row[finite]
    return noise


@pytest.mark.parametrize(
    ("v", "name", "values"),
    [
        (8192, "top_k", [0, 1, 3, 50, 8192]),
        # A chunk and one row of 128 more.
        (4096 + 128, "top_p", [0.0, 1e-30, 0.5, 0.95, 1.0]),
    ],
)
def test_sampling_equals_the_reference(v, name, values):
    generator = np.random.default_rng(v)
    kinds = score_rows(generator, v)
    scores = np.stack([row for i in range(len(values)) for row in kinds[i % 2 :: 2]])[:, None]
    b = len(scores)
    asked = np.repeat(np.array(values, np.int32 if name == "top_k" else np.float32), 4)
    usual = generator.gumbel(size=scores.shape).astype(np.float32)
    noise = np.concatenate([usual, at_the_edge(scores, name, asked)], axis=1)
    depths = np.arange(b, dtype=np.int32)[:, None] >= 4
    filters_b = [asked if name == each else None for each in ("top_k", "top_p", "min_p")]
    arguments = scores, noise, depths.astype(np.int32), *filters_b
    got = interpreted(sample.sample, *arguments)
    np.testing.assert_array_equal(got, sample.reference(*arguments))


def test_sampling_of_many_chunks(monkeypatch):
    """The ring of chunks comes round, and k is more than there are lanes: no bound to begin at."""
    monkeypatch.setattr(sample, "SLOTS", 4)
    v = 4096 * 5 + 128
    generator = np.random.default_rng(0)
    scores = generator.standard_normal((1, 2, v)).astype(np.float32)
    noise = generator.gumbel(size=(1, 1, v)).astype(np.float32)
    arguments = scores, noise, np.zeros((1, 2), np.int32), np.array([5000]), None, None
    got = interpreted(sample.sample, *arguments)
    np.testing.assert_array_equal(got, sample.reference(*arguments))
    # Not what would be chosen of all, so that something was refused.
    assert (np.asarray(got) != (scores + noise).argmax(axis=-1)).any()


@functools.cache
def small_sampler(name):
    params = plgpu.InterpretGPUParams(detect_races=True)
    place = ("top_k", "top_p").index(name)

    def run(scores, noise, asked):
        filters_b = [asked if place == i else None for i in range(2)]
        depths = jnp.zeros((scores.shape[0], 1), jnp.int32)
        arguments = scores, noise, depths, *filters_b, None
        return sample.sample(*arguments, interpret=params), sample.reference(*arguments)

    return jax.jit(run)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.data())
def test_sampling_among_ties(data):
    v, generator = 256, np.random.default_rng(data.draw(st.integers(0, 999)))
    levels = data.draw(st.integers(1, 6))
    scores = generator.integers(-levels, levels + 1, (2, 1, v)).astype(np.float32)
    # A hundred apart, there is no bound for top-k to begin at.
    scores *= data.draw(st.sampled_from([1, 100]))
    scores[generator.random(scores.shape) < data.draw(st.sampled_from([0, 0.5, 0.98]))] = -np.inf
    scores[..., data.draw(st.integers(0, v - 1))] = 0
    above = (scores > scores[..., :1]).sum(axis=-1)[:, 0]  # so many that one level is just kept
    for name, values in (
        ("top_k", st.sampled_from([0, 1, 2, 50, v, *above, *(above + 1)])),
        ("top_p", st.sampled_from([0, 1e-45, 0.1, 0.4, 0.7, 0.95, 1])),
    ):
        asked = np.array([data.draw(values) for _ in range(2)])
        asked = asked.astype(np.int32 if name == "top_k" else np.float32)
        noise = at_the_edge(scores, name, asked)
        noise[1] = generator.integers(0, levels, (1, v))
        np.testing.assert_array_equal(*small_sampler(name)(scores, noise, asked))
        assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("name", ["top_k", "top_p"])
@pytest.mark.parametrize("broken", [np.nan, -np.inf])
def test_a_broken_row_ends_and_leaves_the_others_alone(name, broken):
    scores = np.random.default_rng(0).standard_normal((2, 1, 256)).astype(np.float32)
    noise, asked = np.zeros_like(scores), np.ones(2, np.int32 if name == "top_k" else np.float32)
    scores[0] = broken
    got, wanted = (np.asarray(x) for x in small_sampler(name)(scores, noise, asked))
    assert ((got >= 0) & (got < 256)).all()
    assert got[1] == wanted[1] == scores[1].argmax()


def test_choosing_lowers_for_hopper():
    """With one kernel wherever top-k or top-p is asked of a whole vocabulary."""
    request = Request.idle(1, 1, 1)
    logits = jax.ShapeDtypeStruct((1, 64, 151936), jnp.float32)
    nodes = jax.ShapeDtypeStruct((1, 64), jnp.int32)

    def kernels_of(logits, **asked):
        def program(logits, depths, request):
            return sampling.choose(
                logits, depths, depths[:, 0], 15, request=request,
                sampler=Sampler(noise=True, **asked), kernels=Kernels(mosaic=True),
            )  # fmt: skip

        return lowered(program, logits, nodes, request)

    assert kernels_of(logits, min_p=True) == 0
    assert kernels_of(logits, top_k=True) == 1
    assert kernels_of(logits, top_k=True, top_p=True, min_p=True) == 1
    odd = jax.ShapeDtypeStruct((1, 64, 1000), jnp.float32)
    assert kernels_of(odd, top_p=True) == 0


def test_a_choice_is_the_same_with_the_kernel():
    """A tree's nodes at T = 0 and above, all filters, by way of `sampling.choose`."""
    generator = np.random.default_rng(1)
    logits = 3 * generator.standard_normal((2, 5, 256)).astype(np.float32)
    depths = np.array([[0, 1, 1, 2, 2], [0, 1, 2, 3, 3]])
    request = dataclasses.replace(
        Request.idle(2, 1, 1),
        temperature=np.array([0.0, 0.8], np.float32),
        top_k=np.array([3, 40], np.int32),
        top_p=np.array([0.1, 0.9], np.float32),
        min_p=np.array([0.5, 0.6], np.float32),
    )

    def choices(logits, interpret=None):
        return sampling.choose(
            logits, depths, np.array([7, 9]), 3, request=request,
            sampler=Sampler(noise=True, top_k=True, top_p=True, min_p=True),
            kernels=Kernels(mosaic=interpret is not None, interpret=interpret),
        )  # fmt: skip

    got = np.asarray(interpreted(choices, logits))
    np.testing.assert_array_equal(got, jax.jit(choices)(logits))
    np.testing.assert_array_equal(got[0], logits[0].argmax(axis=-1))
    assert (got[1] != logits[1].argmax(axis=-1)).any()


def test_unsupported_scores_say_why():
    assert "bfloat16" in sample.unsupported_reason(1024, jnp.bfloat16)
    assert "vocabulary of 1000" in sample.unsupported_reason(1000, jnp.float32)
    assert sample.unsupported_reason(151936, jnp.float32) is None


def test_float32_never_reaches_a_kernel():
    """Every kernel rounds to bfloat16; Kernels must leave float32 to the references."""
    kernels = Kernels(mosaic=True)  # not interpreted: a kernel would fail on this host
    x, w = normal(0, 20, 128, dtype=jnp.float32), normal(1, 128, 128, dtype=jnp.float32)
    close(kernels.matmul(x, w)[0], np.asarray(x) @ np.asarray(w), 1e-4)
    kernels.add_norm(x, x[None], x[0], 1e-6)
    tables = (jnp.ones((20, 32)), jnp.zeros((20, 32)))
    qkv = kernels.head_rows(x[None, :, :], tables, None, 1e-6, (1, 2, 64), jnp.float32)
    assert qkv.dtype == jnp.float32


# Together.

ROW_COUNTS = st.one_of(st.sampled_from([1, 16, 64, 128, 256]), st.integers(1, 300))
HEADS = st.tuples(
    st.integers(1, 8), st.integers(3, 11), st.sampled_from([64, 128, 256, 64, 128, 80, 96])
)


def sizes(most):
    """Up to `most`, and mostly such as kernels take."""
    each = st.sampled_from([64, 8, 64, 1])
    return each.flatmap(lambda each: st.integers(1, most // each).map(lambda n: n * each))


def zeros(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def calls(draw, name):
    """A call of one of `Kernels`' operations with any sizes: arguments by position, and by name."""
    m, d, wide = draw(ROW_COUNTS), draw(sizes(8192)), functools.partial(zeros, dtype=jnp.float32)
    x, b = zeros(m, d), draw(st.integers(1, 2))
    k, slots, h = draw(HEADS)
    qkv, cache = zeros(b, m, k, slots, h), zeros(b, k, 64 * draw(st.integers(1, 80)), h)
    numbers = zeros(b, dtype=jnp.int32)
    match name:
        case "matmul":
            return (x, zeros(d, draw(sizes(12288)))), {}
        case "gated_matmul":
            return (x, zeros(d, 3 * draw(st.integers(1, 140)), 2, GATE_COLUMNS)), {}
        case "argmax":
            n, transposed = draw(sizes(2**18)), draw(st.booleans())
            return (x, zeros(n, d) if transposed else zeros(d, n)), dict(
                real=n, transposed=transposed
            )
        case "add_norm":
            return (x, wide(draw(st.integers(1, 4)), m, d), zeros(d)), dict(eps=1e-6)
        case "head_rows":
            tables = wide(m, draw(st.sampled_from([h // 4, h // 2])))
            norms = draw(st.sampled_from([None, (zeros(h),) * 2]))
            parts = wide(draw(st.integers(1, 4)), m, k * slots * h)
            return (parts, (tables,) * 2, norms), dict(
                eps=1e-6, shape=(k, slots, h), dtype=jnp.bfloat16
            )
        case "attention":
            mask, lower = zeros(b, m, m, dtype=bool), zeros(b, m, dtype=jnp.int32)
            return (qkv, cache, cache, mask, lower, numbers), {}
        case "append":
            return ([(cache,) * 2], [qkv], zeros(b, 16, dtype=jnp.int32), numbers, numbers), {}
        case "sample":
            n = draw(sizes(2**18))
            scores, noise = wide(b, m, n), wide(b, 16, n)
            return (scores, noise, zeros(b, m, dtype=jnp.int32), numbers, wide(b), None), {}


@pytest.mark.parametrize(
    "name",
    [
        "matmul",
        "gated_matmul",
        "argmax",
        "add_norm",
        "head_rows",
        "attention",
        "append",
        "sample",
    ],
)
def test_a_kernel_is_chosen_only_where_it_lowers(name, monkeypatch):
    """Whatever the sizes; those that a kernel does not take are left to its reference.

    Wherever it is supported, that is, be it preferred or not, but for gated products.
    """
    preferred = matmul.preferred
    monkeypatch.setattr(choice, "preferred", lambda *_: True)
    monkeypatch.setattr(
        matmul, "preferred", lambda *sizes, gated=False: not gated or preferred(*sizes, gated=True)
    )
    few = name in ("attention", "sample")  # seconds each

    @settings(max_examples=10 if few else 100, deadline=None, derandomize=True)
    @given(st.data())
    def check(data):
        arguments, options = calls(data.draw, name)
        operation = getattr(Kernels(mosaic=True), name)
        lowered(functools.partial(operation, **options), *arguments)

    check()


def small_pair():
    """A target and a drafter whose shapes every kernel takes."""
    target, drafter = SHAPES["tiny"]
    shared = dict(hidden_size=128, num_heads=2, num_kv_heads=1, head_dim=128, intermediate_size=128)
    return dataclasses.replace(target, **shared), dataclasses.replace(drafter, **shared)


@pytest.mark.parametrize("mode", ["ar", "dflash", "ddtree", "prefill"])
def test_a_program_with_kernels_lowers_for_hopper(mode):
    target, drafter = small_pair()
    kernels = Kernels(mosaic=True)
    abstract = nnx.eval_shape(lambda: Models(target, drafter, kernels=kernels, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), state)
    decode = jax.eval_shape(
        lambda: rounds.empty_state(abstract, 1, 128, 8, jnp.bfloat16, drafting=mode != "ar")
    )
    programs = {
        "ar": rounds.ar_round,
        "dflash": rounds.chain_round,
        "ddtree": functools.partial(rounds.tree_round, budget=20),
        "prefill": rounds.prefill_chunk,
    }
    tokens, one = jnp.zeros((1, 32), jnp.int32), jnp.ones(1, jnp.int32)
    arguments = (tokens, one, one.astype(bool)) if mode == "prefill" else ()

    def program(state, decode, *arguments, sampler=GREEDY):
        models = nnx.merge(graphdef, state)
        return programs[mode](models, decode, *arguments, sampler=sampler)

    # Attention (of so small a cache in one kernel), head rows and norms are traced once per shape,
    # the commits and the tree once each; products of 32 rows have kernels too.
    least = {"ar": 5, "dflash": 8, "ddtree": 14, "prefill": 10}[mode]
    found = lowered(program, state, decode, *arguments)
    assert found >= least
    if mode == "ar":
        sampled = functools.partial(program, sampler=Sampler(noise=True, top_p=True))
        assert lowered(sampled, state, decode) == found + 1
