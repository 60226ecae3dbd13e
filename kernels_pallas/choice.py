"""The largest column of each row of a product: the head and the greedy choice in one kernel.

The logits of all nodes are many: 78 MB for 128 nodes and a vocabulary of 151936. Here they never
reach memory. One block per multiprocessor takes tiles of columns in turn, and its warpgroup that
copies is at the next tile while those that multiply look for the largest of this one.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import matmul, mosaic
from kernels_pallas.matmul import DEPTH
from kernels_pallas.mosaic import MULTIPROCESSORS, ROW_VECTOR, ROWS, WGMMA

MAX_ROWS = 256
TILES = (256, 192, 128)  # columns
PART = 32  # columns that are searched at a time
MAX_STAGES = 8


def reference(
    x_mk: jax.Array, w_kn: jax.Array, real: int | jax.Array, *, transposed: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The largest of x @ w in each row, float32 [m], and its column, int32 [m], the lowest on ties.

    Args:
      x_mk: rows.
      w_kn: weight, given as [n, k] if `transposed`.
      real: columns that count; those after them only pad. It may be below 0, or more than there
        are.
    """
    y = matmul.reference(x_mk, w_kn, jnp.float32, transposed=transposed)
    y = jnp.where(jnp.arange(y.shape[1]) < real, y, -jnp.inf)
    return y.max(axis=1), jnp.argmax(y, axis=1).astype(jnp.int32)


def unsupported_reason(rows: int, k: int, n: int, dtype, *, transposed: bool = False) -> str | None:
    """Why the kernel cannot take [rows, k] times [k, n], or None. `transposed`: given as [n, k]."""
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}; the kernel takes bfloat16"
    if rows > MAX_ROWS:
        return f"{rows} rows; the kernel takes up to {MAX_ROWS}"
    # A tensor copy takes 8 rows, or 64 columns, of what is longer than that.
    columns = 8 if transposed or n <= 64 else 64
    if k % DEPTH or n % columns:
        return f"a weight of {k} x {n}; the kernel takes multiples of {DEPTH} and {columns}"
    return None


def _waste(tile: int, n: int) -> float:
    """By how much some blocks have more than an even share of the columns."""
    return -(-n // (tile * MULTIPROCESSORS)) * tile * MULTIPROCESSORS / n


def tile_of(rows: int, n: int) -> int:
    """Columns of a tile: wide ones read the rows less often, if all blocks have as many of them.

    Of more than 128 rows a warpgroup has 128, and registers for 192 columns.
    """
    tiles = (tile for tile in TILES if rows <= 2 * ROWS or tile <= 192)
    return min(tiles, key=lambda tile: _waste(tile, n) + 0.05 * rows / tile)


def preferred(rows: int, n: int) -> bool:
    """Whether the kernel is faster than XLA's product and a reduction of what it wrote.

    For a head of 4096 x 151936 on an H200 and 1, 16, 64, 128 and 256 rows: 283, 283, 286, 295 and
    439 us, where XLA takes 279, 285, 307, 346 and 495; to read the weight takes 276.
    """
    return rows >= 16 and _waste(tile_of(rows, n), n) < 1.1


@functools.partial(jax.jit, static_argnames=("transposed", "tile", "interpret"))
def argmax(
    x_mk: jax.Array,
    w_kn: jax.Array,
    real: int | jax.Array,
    *,
    transposed: bool = False,
    tile: int | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """The kernel; arguments and results as for the reference, x and weight bfloat16.

    Args:
      tile: columns of a tile, one of TILES (static); default: what keeps all blocks busy.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Raises:
      ValueError: more than MAX_ROWS rows.
    """
    count, k = x_mk.shape
    n = w_kn.shape[0 if transposed else 1]
    tile = tile or tile_of(count, n)
    x_mk = mosaic.pad_rows(x_mk)
    m = x_mk.shape[0]
    each = ROWS if m <= 2 * ROWS else 2 * ROWS
    workers = -(-m // each)
    if count > MAX_ROWS:
        raise ValueError(f"{count} rows; the kernel takes up to {MAX_ROWS}")
    rows, read = workers * each, -(-m // 8) * 8
    blocks, steps = min(MULTIPROCESSORS, -(-n // tile)), k // DEPTH
    small = 16 * 1024  # bytes of shared memory for results, barriers and alignment
    stages = min(MAX_STAGES, (mosaic.SHARED_BYTES - small) // (2 * DEPTH * (rows + tile)))

    def argmax_kernel(x_ref, w_ref, real_ref, best_ref, index_ref, *scratch):
        x_smem, w_smem, best, index, full, free = scratch
        block, worker = lax.axis_index("block"), lax.axis_index("wg")
        turns = (-(-n // tile) - block + blocks - 1) // blocks

        def start_of(turn):
            return (block + turn * blocks) * tile

        def load():
            def fetch(i, _):
                slot, turn, step = lax.rem(i, stages), i // steps, lax.rem(i, steps)

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                columns, depth = pl.ds(start_of(turn), tile), pl.ds(step * DEPTH, DEPTH)
                source = w_ref.at[(columns, depth) if transposed else (depth, columns)]
                mosaic.copy_streamed(source, w_smem.at[slot], full.at[slot], interpret=interpret)
                target = x_smem.at[slot, pl.ds(0, read)]
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(0, read), depth], target, full.at[slot])

            def drain(i, _):
                plgpu.barrier_wait(free.at[lax.rem(i, stages)])

            total = turns * steps
            lax.fori_loop(0, total, fetch, None)
            # Warpgroups end together, with no phase of a barrier left unseen.
            lax.fori_loop(jnp.maximum(total - stages, 0), total, drain, None)

        def choose():
            real = real_ref[0]

            def turn(i, carry):
                largest, where = carry

                def multiply(sums):
                    def step(j, _):
                        slot = lax.rem(i * steps + j, stages)
                        plgpu.barrier_wait(full.at[slot])
                        w = w_smem.at[slot]
                        mine = x_smem.at[slot, pl.ds(worker * each, each)]
                        plgpu.wgmma(sums, mine, w.transpose((1, 0)) if transposed else w)
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[slot])

                    lax.fori_loop(0, steps, step, None)
                    return sums[...]

                y = pl.run_scoped(multiply, plgpu.ACC((each, tile), jnp.float32))
                for start in range(0, tile, PART):  # the rest waits in registers
                    part = y[:, start : start + PART]
                    column = plgpu.broadcasted_iota(jnp.int32, part.shape, 1, layout=WGMMA)
                    column += start_of(i) + start
                    part = jnp.where(column < real, part, -jnp.inf)
                    top = part.max(axis=1)
                    is_top = part == lax.broadcast_in_dim(top, part.shape, [0])
                    at = jnp.where(is_top, column, n).min(axis=1)
                    better = top > largest
                    largest = jnp.where(better, top, largest)
                    where = jnp.where(better, at, where)
                return largest, where

            def all_rows(value, dtype):
                return plgpu.layout_cast(jnp.full((each,), value, dtype), ROW_VECTOR)

            nothing = all_rows(-jnp.inf, jnp.float32), all_rows(0, jnp.int32)
            best[worker], index[worker] = lax.fori_loop(0, turns, turn, nothing)
            plgpu.commit_smem()
            mine = (block, pl.ds(worker * each, each))
            plgpu.copy_smem_to_gmem(best.at[worker], best_ref.at[mine])
            plgpu.copy_smem_to_gmem(index.at[worker], index_ref.at[mine])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(worker < workers)
        def _():
            if workers > 1:
                plgpu.set_max_registers(mosaic.COMPUTING_REGISTERS, action="increase")
            choose()

        @pl.when(worker == workers)
        def _():
            if workers > 1:
                plgpu.set_max_registers(mosaic.COPYING_REGISTERS, action="decrease")
            load()

    bf16 = jnp.bfloat16
    w_tile = (tile, DEPTH) if transposed else (DEPTH, tile)
    best, index = plgpu.kernel(
        argmax_kernel,
        out_type=tuple(
            jax.ShapeDtypeStruct((blocks, rows), dtype) for dtype in (jnp.float32, jnp.int32)
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=workers + 1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((stages, rows, DEPTH), bf16, transforms=mosaic.tiles(DEPTH, bf16)),
            plgpu.SMEM((stages, *w_tile), bf16, transforms=mosaic.tiles(w_tile[1], bf16)),
            plgpu.SMEM((workers, each), jnp.float32),
            plgpu.SMEM((workers, each), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
        ),
        compiler_params=mosaic.STREAMING,
        interpret=interpret,
    )(x_mk, w_kn, jnp.full((1,), jnp.minimum(real, n), jnp.int32))
    best, index = best[:, :count], index[:, :count]
    largest = best.max(axis=0)
    return largest, jnp.where(best == largest, index, n).min(axis=0)
