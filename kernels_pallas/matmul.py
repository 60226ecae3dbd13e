"""Products of few rows with a weight, as partial sums: the time is that of reading the weight once.

The contracted axis is divided, so that all multiprocessors can read the weight; whoever reads the
result adds the parts up (see rows.py), which saves a kernel just for that.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.mosaic import MULTIPROCESSORS, ROWS

DEPTH = 64  # of the contracted axis per step
MAX_ROWS = 128  # beyond, reading the rows again for every tile of columns costs more than it saves


def reference(
    x_mk: jax.Array, w_kn: jax.Array, out_dtype=None, *, transposed: bool = False
) -> jax.Array:
    """x @ w with float32 sums; float32 means float32 (a GPU would use TF32).

    `transposed`: the weight is given as [n, k].
    """
    rows = x_mk
    if rows.shape[0] == 1 and x_mk.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # XLA's CPU backend has no fast path for a bf16 product of one row: 8 times slower than two.
        rows = jnp.concatenate([rows, rows])
    y = lax.dot_general(
        rows,
        w_kn,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if x_mk.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype or x_mk.dtype,
    )
    return y[: x_mk.shape[0]]


def unsupported_reason(rows: int, k: int, n: int, dtype) -> str | None:
    """Why the kernel cannot multiply [rows, k] by [k, n], or None."""
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}; the kernel takes bfloat16"
    if rows > MAX_ROWS:
        return f"{rows} rows; the kernel takes up to {MAX_ROWS}"
    if k % DEPTH or n % ROWS:
        return f"a weight of {k} x {n}; the kernel takes multiples of {DEPTH} and {ROWS}"
    return None


def preferred(rows: int, k: int, n: int) -> bool:
    """Whether the kernel, with the addition in its reader, is faster than XLA's product.

    Measured inside rounds of Qwen3-8B's shapes on an H200: XLA wins with few rows, and from 65 rows
    where the result is wider than the contracted axis.
    """
    return 16 < rows <= 64 or (64 < rows <= MAX_ROWS and n <= k)


class Schedule(NamedTuple):
    """How a product is divided.

    tile: columns of the weight per block. parts: of the contracted axis. resident: blocks that
    share a multiprocessor, so that one reads while another begins or ends; each has the fewer reads
    under way.
    """

    tile: int
    parts: int
    resident: int = 1


def schedules(k: int, n: int) -> list[Schedule]:
    """All ways to divide a weight [k, n] that fill the multiprocessors at least by two thirds."""

    def fits(plan: Schedule) -> bool:
        most = plan.resident * MULTIPROCESSORS
        return 2 / 3 * most < n // plan.tile * plan.parts <= most and k // plan.parts >= 4 * DEPTH

    plans = (
        Schedule(tile, parts, resident)
        for tile in (256, 128, 64)
        for parts in range(1, 9)
        for resident in (1, 2, 3)
        if n % tile == 0
    )
    return [plan for plan in plans if fits(plan)]


@functools.cache
def schedule(k: int, n: int) -> Schedule:
    """How to divide a weight [k, n].

    Blocks should fill the multiprocessors once. Wide tiles read the rows less often; every part
    costs a write and a read of its partial sums. The weights of the three are fitted to an H200.
    """

    def cost(plan: Schedule) -> float:
        blocks = n // plan.tile * plan.parts
        waves = -(-blocks // MULTIPROCESSORS)
        return waves * MULTIPROCESSORS / blocks + 0.04 * plan.parts + 32 / plan.tile

    most = max(1, min(8, k // DEPTH // 4))
    choices = [
        Schedule(tile, parts)
        for tile in (256, 128, 64)
        if n % tile == 0
        for parts in range(1, most + 1)
    ]
    return min(choices, key=cost)


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def split_matmul(
    x_mk: jax.Array, w_kn: jax.Array, *, plan: Schedule | None = None, interpret=None
) -> jax.Array:
    """Partial sums float32 [parts, m, n] whose sum is x @ w.

    One warpgroup only issues copies: a ring of stages, each a slice of x and of w. Each other
    warpgroup multiplies 64 rows.

    Args:
      x_mk, w_kn: bfloat16; see `unsupported_reason`.
      plan: default: what fills the GPU.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    count, (k, n) = x_mk.shape[0], w_kn.shape
    tile, parts, resident = plan = plan or schedule(k, n)
    x_mk = mosaic.pad_rows(x_mk)
    m = x_mk.shape[0]
    workers = -(-m // ROWS)
    rows = workers * ROWS
    share = -(-(k // DEPTH) // parts)
    columns = 64  # of the result that are stored at a time
    buffers = min(2, tile // columns)
    stored_bytes = workers * buffers * ROWS * columns * 4
    stage_bytes = 2 * DEPTH * (rows + tile)
    stages = min(8, share, (mosaic.SHARED_BYTES // resident - stored_bytes) // stage_bytes)
    if stages < 2:
        raise ValueError(f"{plan} leaves room for {stages} stages of {rows} rows; 2 are needed")
    bf16, f32 = mosaic.tiles(64, jnp.bfloat16), mosaic.tiles(columns, jnp.float32)

    def stream_kernel(x_ref, w_ref, o_ref, x_smem, w_smem, o_smem, full, free):
        column = pl.ds(lax.axis_index("tile") * tile, tile)
        part, worker = lax.axis_index("part"), lax.axis_index("wg")
        first = part * share
        steps = jnp.clip(k // DEPTH - first, 0, share)

        def load():
            def fetch(step, _):
                slot = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                depth = pl.ds((first + step) * DEPTH, DEPTH)
                plgpu.copy_gmem_to_smem(w_ref.at[depth, column], w_smem.at[slot], full.at[slot])
                source = x_ref.at[pl.ds(0, rows), depth]
                plgpu.copy_gmem_to_smem(source, x_smem.at[slot], full.at[slot])

            def drain(step, _):
                plgpu.barrier_wait(free.at[lax.rem(step, stages)])

            lax.fori_loop(0, steps, fetch, None)
            # Warpgroups end together, with no phase of a barrier left unseen.
            lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

        def multiply(accumulator):
            def step(i, _):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(full.at[slot])
                mine = x_smem.at[slot, pl.ds(worker * ROWS, ROWS)]
                plgpu.wgmma(accumulator, mine, w_smem.at[slot])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            lax.fori_loop(0, steps, step, None)
            y = accumulator[...]
            for index, start in enumerate(range(0, tile, columns)):
                staged = o_smem.at[worker, index % buffers]
                plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
                staged[...] = y[:, start : start + columns]
                plgpu.commit_smem()
                where = pl.ds(lax.axis_index("tile") * tile + start, columns)
                target = o_ref.at[part, pl.ds(worker * ROWS, ROWS), where]
                plgpu.copy_smem_to_gmem(staged, target)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(worker < workers)
        def _():
            pl.run_scoped(multiply, plgpu.ACC((ROWS, tile), jnp.float32))

        @pl.when(worker == workers)
        def _():
            load()

    # Seen in profiles.
    stream_kernel.__name__ = stream_kernel.__qualname__ = (
        f"stream_{k}x{n}_{tile}_{parts}_{resident}"
    )
    y = plgpu.kernel(
        stream_kernel,
        out_type=jax.ShapeDtypeStruct((parts, m, n), jnp.float32),
        grid=(n // tile, parts),
        grid_names=("tile", "part"),
        num_threads=workers + 1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((stages, rows, DEPTH), jnp.bfloat16, transforms=bf16),
            plgpu.SMEM((stages, DEPTH, tile), jnp.bfloat16, transforms=bf16),
            plgpu.SMEM((workers, buffers, ROWS, columns), jnp.float32, transforms=f32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x_mk, w_kn)
    return y[:, :count]
