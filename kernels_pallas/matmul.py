"""Products of few rows with a weight, as partial sums: the time is that of reading the weight once.

The contracted axis is divided, so that all multiprocessors can read the weight; whoever reads the
result adds the parts up (see rows.py), which saves a kernel just for that.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.mosaic import MULTIPROCESSORS, ROWS

DEPTH = 64  # of the contracted axis per step
NEARLY_ALL = 128  # multiprocessors that have work, so that dividing further does not pay
LEAST_DEPTH = 256  # of a part that XLA multiplies
LEAST_FILLED = 0.7  # of the multiprocessors, for a kernel of one wave to be worth it
SMALL = 2**23  # numbers of a weight that XLA multiplies with one row by way of 16
MAX_ROWS = 128  # beyond, reading the rows again for every tile of columns costs more than it saves
# But for gated products of tiles of 96 columns, up to twice as many: SwiGLU saves a kernel, and
# wider tiles would leave too few registers.
GATED_TILE = 96
# Of a gated weight: so many of gate, then of up. Any tile then is one product with both, and half
# as many wgmma of twice the width read the rows from shared memory half as often.
GATED_COLUMNS = 32
COLUMNS = GATED_COLUMNS  # of the result that are stored at a time, gated ones of one turn


def reference(
    x_mk: jax.Array, w_kn: jax.Array, out_dtype=None, *, transposed: bool = False
) -> jax.Array:
    """x @ w with float32 sums; float32 means float32 (a GPU would use TF32).

    `transposed`: the weight is given as [n, k].
    """
    rows = x_mk
    if rows.shape[0] == 1 and x_mk.dtype == jnp.bfloat16:
        # XLA's CPU backend has no fast path for a bf16 product of one row: 8 times slower than two.
        # On a GPU it multiplies and adds up in two kernels if the weight is small: 21 us on an H200
        # for 2048 x 4096, 6 with 16 rows.
        on_cpu = jax.default_backend() == "cpu"
        if on_cpu or w_kn.size <= SMALL:
            rows = jnp.broadcast_to(rows, (2 if on_cpu else 16, rows.shape[1]))
    y = lax.dot_general(
        rows,
        w_kn,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if x_mk.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype or x_mk.dtype,
    )
    return y[: x_mk.shape[0]]


def divisions(rows: int, k: int, n: int) -> int:
    """Into how many parts XLA should divide the contracted axis of a product: 1, 2, 4 or 8.

    The fewest with which tiles of 128 x 128 of all partial sums fill the GPU, if parts stay deep
    enough: about what XLA chooses by itself. One row has a way of its own there.
    """
    tiles, parts = -(-rows // 128) * -(-n // 128), 1
    while rows > 1 and parts < 8 and tiles * parts < NEARLY_ALL:
        if k % (2 * parts) or k // (2 * parts) < LEAST_DEPTH:
            break
        parts *= 2
    return parts


def partial_sums(x_mk: jax.Array, w_kn: jax.Array) -> jax.Array:
    """[parts, m, n] by XLA, whose sum is x @ w; float32 if there are several.

    Left alone, XLA divides a product too and adds up in another kernel: in rounds of 12 layers of
    an 8B target on an H200, 3 % of the time with 256 nodes and 1 % with 16. Inputs of float32 are
    not divided.
    """
    (m, k), n = x_mk.shape, w_kn.shape[1]
    parts = divisions(m, k, n) if x_mk.dtype == jnp.bfloat16 else 1
    if parts == 1:
        return reference(x_mk, w_kn)[None]
    return lax.dot_general(
        x_mk.reshape(m, parts, -1),
        w_kn.reshape(parts, -1, n),
        (((2,), (1,)), ((1,), (0,))),
        preferred_element_type=jnp.float32,
    )


def gated_reference(x_mk: jax.Array, w_kg2c: jax.Array) -> jax.Array:
    """silu(x @ w[:, :, 0]) * (x @ w[:, :, 1]) in x's dtype [m, g * c], by one product."""
    k, groups, _, columns = w_kg2c.shape
    y_mg2c = reference(x_mk, w_kg2c.reshape(k, -1)).reshape(-1, groups, 2, columns)
    return (jax.nn.silu(y_mg2c[:, :, 0]) * y_mg2c[:, :, 1]).reshape(-1, groups * columns)


def unsupported_reason(rows: int, k: int, n: int, dtype, *, gated: bool = False) -> str | None:
    """Why the kernel cannot multiply [rows, k] by [k, n], or None."""
    most = 2 * MAX_ROWS if gated and n % GATED_TILE == 0 else MAX_ROWS
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}; the kernel takes bfloat16"
    if rows > most:
        return f"{rows} rows; the kernel takes up to {most}"
    if k % DEPTH or n % ROWS:
        return f"a weight of {k} x {n}; the kernel takes multiples of {DEPTH} and {ROWS}"
    return None


def preferred(rows: int, k: int, n: int, *, gated: bool = False) -> bool:
    """Whether the kernel, with the addition in its reader, is faster than XLA's product.

    Measured on an H200: XLA wins with few rows, with many (but for those just below 256 that it
    pads too), and where a gated product has no wide tiles that fill the GPU just once. With one row
    it adds up in a second kernel unless the weight is small: in a round of an 8B target qkv, o and
    down take 15.4, 11.3 and 26.9 us so, and 14.7, 10.3 and 25.3 here; gate and up 48.9 and 49.8.
    """
    if not gated:
        if rows > 1:
            return 16 < rows <= MAX_ROWS
        plan = schedule(rows, k, n)
        filled = n // plan.tile * plan.parts / MULTIPROCESSORS
        return k * n > SMALL and LEAST_FILLED < filled <= 1
    plan = schedule(rows, k, n, gated=True)
    filled = n // plan.tile / MULTIPROCESSORS
    if plan.cluster > 1 or rows > MAX_ROWS:
        worth = 16 <= rows <= MAX_ROWS or 224 < rows <= 2 * MAX_ROWS
        return worth and LEAST_FILLED < filled <= 1
    small = rows <= ROWS and 2 * k * n <= 2**26  # XLA's second kernel, for the activation, counts
    least = LEAST_FILLED if rows > ROWS or small else 0.9
    return 16 < rows <= MAX_ROWS and plan.tile >= (64 if small else 96) and least < filled <= 1


class Schedule(NamedTuple):
    """How a product is divided.

    tile: columns of the weight per block. parts: of the contracted axis. stages: of a block's ring
    at most, so reads under way. cluster: blocks beside each other that read the rows once for all.
    """

    tile: int
    parts: int
    stages: int = 8
    cluster: int = 1


TILES = (256, 192, 128, 64)
GATED_TILES = (128, 96, 64, 32)  # of each of the two weights


def schedules(k: int, n: int, *, gated: bool = False) -> list[Schedule]:
    """Ways to divide a weight [k, n], or each of two that are gated."""
    return [
        Schedule(tile, parts, stages, cluster)
        for tile in (GATED_TILES if gated else TILES)
        if n % tile == 0
        for parts in range(1, 2 if gated else max(1, min(8, k // DEPTH // 4)) + 1)
        for stages, cluster in ((8, 1), (8, 2), (4, 2), (3, 2))
        if n // tile % cluster == 0
    ]


@functools.cache
def schedule(rows: int, k: int, n: int, *, gated: bool = False) -> Schedule:
    """How to divide a weight for `rows` rows; fitted to `bench.py products`.

    Blocks should fill the multiprocessors once. Wide tiles read the rows less often. Every part
    costs a write and a read of its partial sums. Gated products of up to 128 rows are fastest in
    clusters, with few reads under way: for 4096 x 2 x 12288 on an H200 and 16, 64, 96 and 128 rows
    48.2, 48.9, 50.2 and 50.7 us, where 8 stages without clusters take 49.0, 49.8, 50.7 and 51.1;
    tiles of 128 columns pay so with up to 64 rows only, 48.6 and 49.2.
    """
    if gated:
        ways = ((GATED_TILE, 4, MAX_ROWS), (128, 3, ROWS))
        for tile, stages, most in ways:
            fits = rows <= most and n % (2 * tile) == 0
            if fits and LEAST_FILLED < n / tile / MULTIPROCESSORS <= 1:
                return Schedule(tile, 1, stages, cluster=2)
        if rows > MAX_ROWS and n % GATED_TILE == 0:
            return Schedule(GATED_TILE, 1)
    padded = -(-rows // ROWS) * ROWS

    def cost(plan: Schedule) -> float:
        blocks = n // plan.tile * plan.parts
        return (
            0.25 * -(-blocks // MULTIPROCESSORS) * MULTIPROCESSORS / blocks
            + 0.15 * padded / (plan.tile * (1 + gated))
            + plan.parts * (0.04 + 3.6 * padded / k)
        )

    plans = schedules(k, n, gated=gated)
    return min((plan for plan in plans if plan == Schedule(plan.tile, plan.parts)), key=cost)


def kernel_name(k: int, n: int, plan: Schedule, *, gated: bool = False) -> str:
    return ("gated" if gated else "stream") + "_{}x{}_{}_{}_{}_{}".format(k, n, *plan)


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def split_matmul(
    x_mk: jax.Array, w_kn: jax.Array, *, plan: Schedule | None = None, interpret=None
) -> jax.Array:
    """Partial sums float32 [parts, m, n] whose sum is x @ w.

    Args:
      x_mk, w_kn: bfloat16; see `unsupported_reason`.
      plan: default: what fills the GPU.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Raises:
      ValueError: the sums of so many rows and columns have no room in registers.
    """
    plan = plan or schedule(x_mk.shape[0], *w_kn.shape)
    return _stream(x_mk, w_kn, plan, gated=False, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def gated_matmul(
    x_mk: jax.Array, w_kg2c: jax.Array, *, plan: Schedule | None = None, interpret=None
) -> jax.Array:
    """silu(x @ w[:, :, 0]) * (x @ w[:, :, 1]), bfloat16 [m, g * c], c = GATED_COLUMNS.

    Otherwise as `split_matmul`.

    Raises:
      ValueError: gate and up alternate by other groups, or as for `split_matmul`.
    """
    k, groups, _, columns = w_kg2c.shape
    if columns != GATED_COLUMNS:
        raise ValueError(f"gate and up by turns of {columns}; the kernel takes {GATED_COLUMNS}")
    plan = plan or schedule(x_mk.shape[0], k, groups * columns, gated=True)
    return _stream(x_mk, w_kg2c.reshape(k, -1), plan, gated=True, interpret=interpret)[0]


def _stream(
    x_mk: jax.Array, w_kn: jax.Array, plan: Schedule, *, gated: bool, interpret
) -> jax.Array:
    """[parts, m, n] of x @ w: partial sums, or the gated product of a weight [k, 2 * n].

    One warpgroup only issues copies: a ring of stages, each a slice of x and of w. Each other
    warpgroup multiplies 64 rows, or 128 of more than 128.
    """
    count, k = x_mk.shape
    n = w_kn.shape[1] // (1 + gated)
    tile, parts, most_stages, cluster = plan
    width = tile * (1 + gated)  # columns of the weight
    x_mk = mosaic.pad_rows(x_mk)
    m = x_mk.shape[0]
    # More than two warpgroups that multiply would leave each too few registers for its sums.
    each = ROWS if m <= MAX_ROWS else 2 * ROWS
    workers = -(-m // each)
    rows = workers * each
    # Not all rows of the buffer: what lies outside x costs the copy more time than what is in it,
    # and rows of the result that are not written may be anything.
    read = -(-m // (8 * cluster)) * 8 * cluster
    share = -(-(k // DEPTH) // parts)
    dtype = jnp.bfloat16 if gated else jnp.float32
    stages = min(most_stages, share, mosaic.SHARED_BYTES // (2 * DEPTH * (rows + width)))
    if workers > 2 or (each > ROWS and width > 2 * GATED_TILE):
        raise ValueError(f"{plan} leaves too few registers with {m} rows")

    def stream_kernel(x_ref, w_ref, o_ref, shared, full, free, done):
        (x_smem, w_smem), o_smem = shared
        block = lax.axis_index("tiles") * cluster + lax.axis_index("tile")
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
                source = w_ref.at[depth, pl.ds(block * width, width)]
                mosaic.copy_streamed(source, w_smem.at[slot], full.at[slot], interpret=interpret)
                source = x_ref.at[pl.ds(0, read), depth]
                # Each block of a cluster reads a part of the rows for all of them.
                collective = {"collective_axes": "tile"} if cluster > 1 else {}
                target = x_smem.at[slot, pl.ds(0, read)]
                plgpu.copy_gmem_to_smem(source, target, full.at[slot], **collective)

            def drain(step, _):
                plgpu.barrier_wait(free.at[lax.rem(step, stages)])

            lax.fori_loop(0, steps, fetch, None)
            # Warpgroups end together, with no phase of a barrier left unseen.
            lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

        def multiply(sums):
            def step(i, _):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(sums, x_smem.at[slot, pl.ds(worker * each, each)], w_smem.at[slot])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[slot])

            def gated_part(y):
                # Gate, up and the activation are rounded, as results in bfloat16 are. Adding zero
                # keeps the compiler from converting numbers one by one, which shares a slow unit
                # with the exponentials. A root's square is a reciprocal; a quotient is more work.
                y = y.astype(jnp.bfloat16)
                gate = (y[:, :GATED_COLUMNS] + jnp.bfloat16(0)).astype(jnp.float32)
                root = lax.rsqrt(1.0 + jnp.exp(-gate))
                activated = (gate * root * root).astype(jnp.bfloat16)
                up = y[:, GATED_COLUMNS:].astype(jnp.float32)
                return (activated.astype(jnp.float32) * up).astype(jnp.bfloat16)

            lax.fori_loop(0, steps, step, None)
            y = sums[...]
            # The results take the memory of the ring, which no warpgroup may still be reading.
            plgpu.barrier_arrive(done)
            plgpu.barrier_wait(done)
            for index, start in enumerate(range(0, tile, COLUMNS)):
                staged = o_smem.at[worker, index]
                if gated:
                    staged[...] = gated_part(y[:, 2 * start : 2 * (start + COLUMNS)])
                else:
                    staged[...] = y[:, start : start + COLUMNS]
                plgpu.commit_smem()
                where = pl.ds(block * tile + start, COLUMNS)
                target = o_ref.at[part, pl.ds(worker * each, each), where]
                plgpu.copy_smem_to_gmem(staged, target)
            # Only until the buffers are read: whoever reads what was written runs after us.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(worker < workers)
        def _():
            if each > ROWS:
                plgpu.set_max_registers(mosaic.COMPUTING_REGISTERS, action="increase")
            pl.run_scoped(multiply, plgpu.ACC((each, width), jnp.float32))

        @pl.when(worker == workers)
        def _():
            if each > ROWS:
                plgpu.set_max_registers(mosaic.COPYING_REGISTERS, action="decrease")
            load()

    # Seen in profiles.
    stream_kernel.__name__ = stream_kernel.__qualname__ = kernel_name(k, n, plan, gated=gated)
    freed: Any = plgpu.Barrier(num_arrivals=workers, num_barriers=stages)
    if cluster > 1:  # what one block reads overwrites shared memory of all of them
        freed = plgpu.ClusterBarrier(
            collective_axes=("tile",), num_arrivals=workers, num_barriers=stages
        )
    bf16, whole = jnp.bfloat16, mosaic.tiles(64, jnp.bfloat16)
    results = (workers, tile // COLUMNS, each, COLUMNS)
    shared = plgpu.RefUnion(
        [
            plgpu.SMEM((stages, rows, DEPTH), bf16, transforms=whole),
            plgpu.SMEM((stages, DEPTH, width), bf16, transforms=whole),
        ],
        plgpu.SMEM(results, dtype, transforms=mosaic.tiles(COLUMNS, dtype)),
    )
    y = plgpu.kernel(
        stream_kernel,
        out_type=jax.ShapeDtypeStruct((parts, m, n), dtype),
        grid=(n // tile // cluster, parts),
        grid_names=("tiles", "part"),
        cluster=(cluster,),
        cluster_names=("tile",),
        num_threads=workers + 1,
        thread_name="wg",
        scratch_types=(
            shared,
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            freed,
            plgpu.Barrier(num_arrivals=workers),
        ),
        compiler_params=mosaic.STREAMING,
        interpret=interpret,
    )(x_mk, w_kn)
    return y[:, :count]
