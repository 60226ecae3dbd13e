"""Tree attention for Hopper in Pallas Mosaic GPU: split over the keys, combined at the end.

Algorithm. Each KV head has n nodes x g query heads, in tiles of 64 rows: the group is padded to a
power of two, and a tile holds all heads of 64 / group nodes, head-major, so that each head's part
is one box of a tensor copy. Keys come in tiles too: those of the committed prefix, then those of
the rows beside it. The tiles of both are divided evenly over the splits (on the device, from the
row's length: no length recompiles anything). A block runs online softmax over its share, and a
second kernel combines the partial results.

A block has one warpgroup that only issues copies of K and V tiles into a ring, and one or two that
compute, 64 rows each, on every tile. Prefix tiles that all rows see whole need no mask; those at
the row's length or at a window's edge compare slots; tiles of the rows beside test bit words.

Layout of the partial results: [splits, z, rows, h], z = batch * KV heads, rows in the order of the
tiles; the maximum in log2 units.

Numerics: products in bfloat16 with float32 accumulation; scores, softmax and partial results
float32; the weights are rounded to bfloat16 before the product with v, unnormalised (the reference
normalises first). The initial maximum is finite, and weights are zeroed after the exponential, so a
tile in which a row sees nothing adds nothing.

Under the CPU interpreter the two wgmma forms that it lacks (weights from registers, accumulators
with an initial value) are replaced by equal ones.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.mosaic import COLUMN_VECTOR, MULTIPROCESSORS, ROW_VECTOR, ROWS, WGMMA

LOWEST = -1e30  # the initial maximum
LOG2_E = math.log2(math.e)
LONG = 4096  # cache slots from which wider key tiles pay
PART = 64  # columns that are stored at a time


def unsupported_reason(
    qkv_bmch: jax.Array | jax.ShapeDtypeStruct, k_bksh: jax.Array | jax.ShapeDtypeStruct
) -> str | None:
    """Why these shapes cannot use the kernel, or None."""
    _, _, _, c, h = qkv_bmch.shape
    if qkv_bmch.dtype != jnp.bfloat16 or k_bksh.dtype != jnp.bfloat16:
        return f"{qkv_bmch.dtype} queries and {k_bksh.dtype} keys; the kernel takes bfloat16"
    if h not in (64, 128, 256):
        return f"head size {h}; the kernel takes 64, 128 or 256"
    if c - 2 > 8:
        return f"{c - 2} query heads per KV head; the kernel takes up to 8"
    if k_bksh.shape[2] % key_tile(k_bksh.shape[2], h):
        return f"{k_bksh.shape[2]} cache slots; the kernel takes multiples of 64, or of 128 if long"
    return None


def key_tile(slots: int, h: int) -> int:
    """Keys per tile."""
    return 128 if slots >= LONG and h <= 128 else 64


def _tile_nodes(g: int) -> int:
    """Nodes per tile of 64 rows."""
    return ROWS >> (g - 1).bit_length()


def _partial(
    qkv,
    k_cache,
    v_cache,
    words,
    lower,
    lowest,
    highest,
    length,
    *,
    n: int,
    keys: int,
    splits: int,
    workers: int,
    interpret,
):
    """Unnormalised attention of each split: o [splits, z, rows, h], m and l [splits, z, rows].

    Args:
      qkv: bfloat16 [b, m, k * (g + 2) * h]; the last n rows ask.
      k_cache, v_cache: bfloat16 [b, k, slots, h].
      words: int32 [b, m / 32, rows], bit j % 32 of word j // 32: whether a row sees row j beside.
      lower: int32 [b, rows], the first slot that each row sees.
      lowest, highest: int32 [b], the least and the greatest of `lower`.
      length: int32 [b].
    """
    b, kv_heads, _, h = k_cache.shape
    m, columns = qkv.shape[1:]
    g = columns // (kv_heads * h) - 2
    nodes, z, rows = _tile_nodes(g), b * kv_heads, lower.shape[-1]
    stages = 2 if h == 256 or keys == 128 else 3
    chunk = min(h, 128)  # columns of the output per accumulator
    chunks = [pl.ds(start, chunk) for start in range(0, h, chunk)]
    beside_tiles = -(-m // keys)
    scale = h**-0.5 * LOG2_E  # of scores, to log2 units

    def tree_attention_kernel(
        qkv_ref, k_ref, v_ref, words_ref, lower_ref, lowest_ref, highest_ref, length_ref, *refs
    ):
        o_ref, m_ref, l_ref, q_smem2, k_smem, v_smem, o_smem2, stats_smem, p_smem2, *refs = refs
        q_full, k_full, v_full, k_free, v_free = refs
        z_index, split, worker = (lax.axis_index(axis) for axis in ("z", "split", "wg"))
        batch, head = z_index // kv_heads, lax.rem(z_index, kv_heads)
        column = head * (g + 2) * h
        tile = lax.axis_index("tile") * workers + worker

        # This split's share [start, stop) of the tiles: those of the prefix, then those beside.
        end = length_ref[batch]
        first = lowest_ref[batch] // keys
        prefix = jnp.maximum((end + keys - 1) // keys - first, 0)
        # A single tile beside costs no time on the memory: the last split takes it on top.
        everything = prefix + beside_tiles
        divided = prefix if beside_tiles == 1 else everything
        share = (divided + splits - 1) // splits
        start = jnp.minimum(split * share, divided)
        stop = jnp.minimum(start + share, divided)
        stop = jnp.where(split == splits - 1, everything, stop)
        begin, limit = (first + jnp.minimum(x, prefix) for x in (start, stop))
        # Of [begin, limit), all rows see the tiles [inner, inner_end) whole.
        inner = jnp.clip((highest_ref[batch] + keys - 1) // keys, begin, limit)
        inner_end = jnp.clip(end // keys, inner, limit)
        below = inner - begin
        edges, inners = below + limit - inner_end, inner_end - inner
        beside, beside_end = (jnp.maximum(x - prefix, 0) for x in (start, stop))

        def edge_tile(i):
            return jnp.where(i < below, begin + i, inner_end + i - below)

        def spread(x, shape):
            return lax.broadcast_in_dim(x, shape, [0])

        def key_index(key_tile, shape):
            index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
            return index + key_tile * keys

        def row_vector(ref, *index):
            part = ref.at[(*index, pl.ds(tile * ROWS, ROWS))]
            return plgpu.load(part, layout=ROW_VECTOR, optimized=False)

        def seen_edge(key_tile, shape):
            slot = key_index(key_tile, shape)
            return (slot < end) & (slot >= spread(row_vector(lower_ref, batch), shape))

        def seen_beside(key_tile, shape):
            index = key_index(0, shape)
            first_word = key_tile * (keys // 32)
            word = spread(row_vector(words_ref, batch, first_word), shape)
            for i in range(1, keys // 32):
                other = spread(row_vector(words_ref, batch, first_word + i), shape)
                word = jnp.where(index >= 32 * i, other, word)
            return (lax.shift_right_logical(word, index & 31) & 1) == 1

        def compute():
            q_smem, o_smem = q_smem2.at[worker], o_smem2.at[worker]
            for j in range(g):
                source = qkv_ref.at[
                    batch, pl.ds(m - n + tile * nodes, nodes), pl.ds(column + j * h, h)
                ]
                part = q_smem.at[pl.ds(j * nodes, nodes)]
                plgpu.copy_gmem_to_smem(source, part, q_full.at[worker])
            plgpu.barrier_wait(q_full.at[worker])

            def add_product(o, p, values):
                if interpret is None:

                    def accumulate(acc):
                        plgpu.wgmma(acc, p, values)

                    return pl.run_state(accumulate)(plgpu.ACC.init(o))

                def product(acc):
                    plgpu.wgmma(acc, p_smem2.at[worker], values)
                    return acc[...]

                return o + pl.run_scoped(product, plgpu.ACC(o.shape, jnp.float32))

            def visit(step, key_tile, seen_of, carry):
                o, peak, total = carry
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(k_full.at[slot])

                def scores(acc):
                    plgpu.wgmma(acc, q_smem, k_smem.at[slot].transpose((1, 0)))
                    return acc[...]

                s = pl.run_scoped(scores, plgpu.ACC((ROWS, keys), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                if seen_of is not None:
                    seen = seen_of(key_tile, s.shape)
                    s = jnp.where(seen, s, LOWEST)
                new_peak = jnp.maximum(peak, s.max(axis=1))
                decay = jnp.exp2((peak - new_peak) * scale)
                # Scaled here, where it is one instruction with the subtraction.
                p = jnp.exp2(s * scale - spread(new_peak * scale, s.shape))
                if seen_of is not None:
                    p = jnp.where(seen, p, 0.0)
                total = total * decay + p.sum(axis=1)
                o = [x * spread(decay, x.shape) for x in o]
                p = p.astype(jnp.bfloat16)
                if interpret is not None:
                    p_smem2[worker] = p
                    plgpu.commit_smem()
                plgpu.barrier_wait(v_full.at[slot])
                o = tuple(
                    add_product(x, p, v_smem.at[slot, :, part])
                    for x, part in zip(o, chunks, strict=True)
                )
                plgpu.barrier_arrive(v_free.at[slot])
                return o, new_peak, total

            carry = (
                tuple(jnp.zeros((ROWS, chunk), jnp.float32) for _ in chunks),
                jnp.full((ROWS,), LOWEST, jnp.float32),
                jnp.zeros((ROWS,), jnp.float32),
            )
            carry = lax.fori_loop(
                0, edges, lambda i, c: visit(i, edge_tile(i), seen_edge, c), carry
            )
            carry = lax.fori_loop(0, inners, lambda i, c: visit(edges + i, None, None, c), carry)
            o, peak, total = lax.fori_loop(
                0,
                beside_end - beside,
                lambda i, c: visit(edges + inners + i, beside + i, seen_beside, c),
                carry,
            )
            stats_smem[worker, 0] = peak * scale
            stats_smem[worker, 1] = total
            target = (split, z_index, pl.ds(tile * ROWS, ROWS))
            for start in range(0, h, PART):
                # Only until the buffer is free: whoever reads what was written runs after us.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                within = start % chunk
                o_smem[...] = o[start // chunk][:, within : within + PART]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, o_ref.at[(*target, pl.ds(start, PART))])
            plgpu.copy_smem_to_gmem(stats_smem.at[worker, 0], m_ref.at[target])
            plgpu.copy_smem_to_gmem(stats_smem.at[worker, 1], l_ref.at[target])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def load():
            def fetch(step, k_source, v_source):
                slot = lax.rem(step, stages)
                for source, buffer, full, free in (
                    (k_source, k_smem, k_full, k_free),
                    (v_source, v_smem, v_full, v_free),
                ):

                    @pl.when(step >= stages)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[slot])

                    plgpu.copy_gmem_to_smem(source, buffer.at[slot], full.at[slot])

            def from_cache(step, key_tile):
                where = (batch, head, pl.ds(key_tile * keys, keys))
                fetch(step, k_ref.at[where], v_ref.at[where])

            def from_beside(step, key_tile):
                some = pl.ds(key_tile * keys, keys)
                k_source, v_source = (
                    qkv_ref.at[batch, some, pl.ds(column + (g + i) * h, h)] for i in range(2)
                )
                fetch(step, k_source, v_source)

            def loop(count, body):
                lax.fori_loop(0, count, lambda i, _: body(i), None)

            loop(edges, lambda i: from_cache(i, edge_tile(i)))
            loop(inners, lambda i: from_cache(edges + i, inner + i))
            loop(beside_end - beside, lambda i: from_beside(edges + inners + i, beside + i))
            # Warpgroups end together, with no phase of a barrier left unseen.
            steps = edges + inners + beside_end - beside

            def drain(step, _):
                for free in (k_free, v_free):
                    plgpu.barrier_wait(free.at[lax.rem(step, stages)])

            lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

        # Three warpgroups share the registers unevenly; two have enough as it is.
        @pl.when(worker < workers)
        def _():
            if workers == 2:
                plgpu.set_max_registers(232, action="increase")
            compute()

        @pl.when(worker == workers)
        def _():
            if workers == 2:
                plgpu.set_max_registers(40, action="decrease")
            load()

    stats = jax.ShapeDtypeStruct((splits, z, rows), jnp.float32)
    tiles = mosaic.tiles(64, jnp.bfloat16)
    return plgpu.kernel(
        tree_attention_kernel,
        out_type=(jax.ShapeDtypeStruct((splits, z, rows, h), jnp.float32), stats, stats),
        grid=(z, rows // (ROWS * workers), splits),
        grid_names=("z", "tile", "split"),
        num_threads=workers + 1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((workers, ROWS, h), jnp.bfloat16, transforms=tiles),
            plgpu.SMEM((stages, keys, h), jnp.bfloat16, transforms=tiles),
            plgpu.SMEM((stages, keys, h), jnp.bfloat16, transforms=tiles),
            plgpu.SMEM(
                (workers, ROWS, PART), jnp.float32, transforms=mosaic.tiles(PART, jnp.float32)
            ),
            plgpu.SMEM((workers, 2, ROWS), jnp.float32),
            # Weights, under the interpreter only; 8 rows are the least that a tiled buffer has.
            plgpu.SMEM(
                (workers, 8 if interpret is None else ROWS, keys), jnp.bfloat16, transforms=tiles
            ),
            plgpu.Barrier(num_arrivals=g, num_barriers=workers),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
            plgpu.Barrier(num_arrivals=workers, num_barriers=stages),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(qkv, k_cache, v_cache, words, lower, lowest, highest, length)


def _combine(o, m, total, *, batch: int, n: int, g: int, interpret) -> jax.Array:
    """bfloat16 [batch, n, k * g * h] from the partial results; 0 where nothing is seen.

    A block has one head of one node: many blocks share the latency, and all its reads are at once.
    """
    splits, z, _, h = o.shape
    kv_heads, nodes = z // batch, _tile_nodes(g)

    def combine_kernel(o_ref, m_ref, l_ref, out_ref):
        z_index, node, head = (lax.axis_index(axis) for axis in ("z", "node", "head"))
        row = node // nodes * ROWS + head * nodes + lax.rem(node, nodes)
        # A row of 64 is too short for a warpgroup: each warp has all of it then.
        layout = COLUMN_VECTOR if h % 128 else None

        def of_splits(ref, **how):
            places = (ref.at[split, z_index, row] for split in range(splits))
            return [plgpu.load(place, optimized=False, **how) for place in places]

        parts = of_splits(o_ref, layout=layout)
        peaks, totals = of_splits(m_ref), of_splits(l_ref)
        peak = functools.reduce(jnp.maximum, peaks)
        weights = [jnp.exp2(x - peak) for x in peaks]

        def weighted(values, factor=1.0):
            terms = (x * (w * factor) for x, w in zip(values, weights, strict=True))
            return functools.reduce(lambda a, b: a + b, terms)

        norm = weighted(totals)
        y = weighted(parts, 1.0 / jnp.where(norm == 0.0, 1.0, norm))
        columns = pl.ds((lax.rem(z_index, kv_heads) * g + head) * h, h)
        out_ref[z_index // kv_heads, node, columns] = y.astype(jnp.bfloat16)

    return plgpu.kernel(
        combine_kernel,
        out_type=jax.ShapeDtypeStruct((batch, n, kv_heads * g * h), jnp.bfloat16),
        grid=(z, n, g),
        grid_names=("z", "node", "head"),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(o, m, total)


def bit_words(mask_bnm: jax.Array) -> jax.Array:
    """int32 [b, m / 32, n] of a bool mask [b, n, m], m a multiple of 32; bit j is key j."""
    b, n, m = mask_bnm.shape
    bits = mask_bnm.reshape(b, n, m // 32, 32).astype(jnp.uint32)
    words = (bits << jnp.arange(32, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32).swapaxes(1, 2)


@functools.partial(jax.jit, static_argnames=("splits", "interpret"))
def tree_attention(
    qkv_bmch: jax.Array,
    k_bksh: jax.Array,
    v_bksh: jax.Array,
    mask_bnm: jax.Array,
    lower_bn: jax.Array,
    length_b: jax.Array,
    *,
    splits: int | None = None,
    interpret=None,
) -> jax.Array:
    """The kernel, with the signature of the reference in `tree_attention.py`.

    Args:
      splits: parts that the keys are divided into (static); default: enough to fill the GPU.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    b, m, k, c, h = qkv_bmch.shape
    n, slots, g = mask_bnm.shape[1], k_bksh.shape[2], c - 2
    # Copies begin and end at multiples of 8 rows; those that hold all rows may be shorter.
    more_n, more_m = (-n % 8, -m % 8) if n != m or n > 8 else (0, 0)
    if more_n or more_m:
        # Rows before the others, so that the last n stay those that ask; nothing sees them.
        qkv_bmch = jnp.pad(qkv_bmch, [(0, 0), (more_m, 0), (0, 0), (0, 0), (0, 0)])
        mask_bnm = jnp.pad(mask_bnm, [(0, 0), (more_n, 0), (more_m, 0)])
        lower_bn = jnp.pad(lower_bn, [(0, 0), (more_n, 0)], mode="edge")
        out = tree_attention(
            qkv_bmch,
            k_bksh,
            v_bksh,
            mask_bnm,
            lower_bn,
            length_b,
            splits=splits,
            interpret=interpret,
        )
        return out[:, more_n:]
    nodes, keys = _tile_nodes(g), key_tile(slots, h)
    tiles = -(-n // nodes)
    workers = 2 if tiles > 1 and h <= 128 else 1
    tiles += -tiles % workers

    def by_tile(x):
        """[..., n] in the order of the tiles: [..., tiles * 64]."""
        widths = [(0, 0)] * (x.ndim - 1) + [(0, tiles * nodes - n)]
        x = jnp.pad(x, widths).reshape(*x.shape[:-1], tiles, 1, nodes)
        x = jnp.broadcast_to(x, (*x.shape[:-2], ROWS // nodes, nodes))
        return x.reshape(*x.shape[:-3], tiles * ROWS)

    lower_bn = lower_bn.astype(jnp.int32)
    if splits is None:
        blocks = b * k * tiles // workers
        splits = max(1, min(MULTIPROCESSORS // blocks, slots // (2 * keys)))
    o, peak, total = _partial(
        qkv_bmch.reshape(b, m, -1),
        k_bksh,
        v_bksh,
        by_tile(bit_words(jnp.pad(mask_bnm, [(0, 0), (0, 0), (0, -m % keys)]))),
        by_tile(lower_bn),
        lower_bn.min(axis=1),
        lower_bn.max(axis=1),
        length_b.astype(jnp.int32),
        n=n,
        keys=keys,
        splits=splits,
        workers=workers,
        interpret=interpret,
    )
    out = _combine(o, peak, total, batch=b, n=n, g=g, interpret=interpret)
    return out.reshape(b, n, k, g, h)
