"""Tree attention for Hopper in Pallas Mosaic GPU: split over the prefix, combined at the end.

Algorithm. The query group is folded into rows (node-major), so each KV head has n * g query rows,
in tiles of 64 rows a warpgroup. `_partial` runs online softmax over one source of keys; it is
launched once for the committed prefix, split over about as many blocks as the GPU has
multiprocessors, and once for the rows beside it, whose visibility comes as bit words. The partial
results (unnormalised output, running maximum in log2 units, running sum) are combined in XLA.

A block has one warpgroup that only issues TMA loads of K and V tiles and one or two that compute;
the latter share every K/V tile. The number of tiles is computed on the device from the row's length
and lower bound, so no length recompiles anything.

Layouts: q [z, rows, h], k and v [z, slots, h] with z = batch * KV heads; bit words [z, words, rows]
(32 keys a word, so that a tile of 64 keys needs two contiguous vectors).

Numerics: products in bfloat16 with float32 accumulation; scores, softmax and partial results
float32; the weights are rounded to bfloat16 before the product with v, unnormalised (the reference
normalises first). The initial maximum is finite, and weights are zeroed after the exponential, so a
tile in which a row sees nothing adds nothing.

Limits: see `unsupported_reason`. Under the CPU interpreter the two wgmma forms that it lacks
(weights from registers, accumulators with an initial value) are replaced by equal ones.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

KEYS = 64  # keys per tile: two bit words
ROWS = 64  # query rows per warpgroup: the m of wgmma
MULTIPROCESSORS = 132  # of an H200: how many blocks the prefix is split into
CHUNK = 128  # columns of the output per accumulator
LOWEST = -1e30  # the initial maximum
LOG2_E = math.log2(math.e)
BF16_TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
F32_TILES = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
ROW_VECTOR = plgpu.Layout.WGMMA.reduce(1)


def unsupported_reason(q_bnkgh: jax.Array, k_bksh: jax.Array) -> str | None:
    """Why these shapes cannot use the kernel, or None."""
    if q_bnkgh.dtype != jnp.bfloat16 or k_bksh.dtype != jnp.bfloat16:
        return f"{q_bnkgh.dtype} queries and {k_bksh.dtype} keys; the kernel takes bfloat16"
    if q_bnkgh.shape[-1] not in (64, 128, 256):
        return f"head size {q_bnkgh.shape[-1]}; the kernel takes 64, 128 or 256"
    if k_bksh.shape[2] % KEYS:
        return f"{k_bksh.shape[2]} cache slots; the kernel takes multiples of {KEYS}"
    return None


def _partial(q, k, v, begin, end, lower, words, *, splits: int, scale: float, interpret):
    """Unnormalised attention over slots [begin, end) of one source of keys.

    Args:
      q: bfloat16 [z, rows, h], rows a multiple of ROWS.
      k, v: bfloat16 [z, slots, h], slots a multiple of KEYS.
      begin, end: int32 [z].
      lower: int32 [z, rows], the first slot each row sees, or None for `begin`.
      words: int32 [z, slots / 32, rows], bit j % 32 of word j // 32 is whether a row sees slot j;
        None: all of [begin, end).
      splits: parts that the slots are divided into.

    Returns:
      float32 o [splits, z, rows, h], m and l [splits, z, rows].
    """
    z, rows, h = q.shape
    # A K or V tile takes 128 h bytes; at h = 256 two of each and one worker's rows fill the SMEM.
    workers = 2 if rows % (2 * ROWS) == 0 and h <= 128 else 1
    stages = 3 if h <= 128 else 2
    chunks = [pl.ds(start, min(h, CHUNK)) for start in range(0, h, CHUNK)]
    chunk = min(h, CHUNK)
    tile_rows = workers * ROWS

    def kernel(*refs):
        refs = list(refs)
        q_ref, k_ref, v_ref, begin_ref, end_ref = refs[:5]
        del refs[:5]
        lower_ref = refs.pop(0) if lower is not None else None
        words_ref = refs.pop(0) if words is not None else None
        o_ref, m_ref, l_ref, q_smem2, o_smem2, p_smem2, stats_smem, q_barriers = refs
        head = lax.axis_index("head")
        split = lax.axis_index("split")
        worker = lax.axis_index("wg")
        row = lax.axis_index("tile") * tile_rows + worker * ROWS
        first, last = begin_ref[head], end_ref[head]
        # Tiles of this split: an equal share of those that hold any slot of [first, last).
        first_tile = first // KEYS
        tiles = jnp.maximum((last + KEYS - 1) // KEYS - first_tile, 0)
        share = (tiles + splits - 1) // splits
        begin_tile = first_tile + split * share
        count = jnp.clip(first_tile + tiles - begin_tile, 0, share)

        def columns(tile, shape):
            index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            return index + tile * KEYS

        def row_vector(ref, *index):
            part = ref.at[(*index, pl.ds(row, ROWS))]
            return plgpu.load(part, layout=ROW_VECTOR, optimized=False)

        def visible(step, shape):
            tile = begin_tile + step
            column = columns(tile, shape)
            seen = (column < last) & (column >= first)
            if lower_ref is not None:
                bound = lax.broadcast_in_dim(row_vector(lower_ref, head), shape, [0])
                seen = seen & (column >= bound)
            if words_ref is not None:
                low = lax.broadcast_in_dim(row_vector(words_ref, head, 2 * tile), shape, [0])
                high = lax.broadcast_in_dim(row_vector(words_ref, head, 2 * tile + 1), shape, [0])
                word = jnp.where((column & 32) == 0, low, high)
                seen = seen & ((lax.shift_right_logical(word, column & 31) & 1) == 1)
            return seen

        def compute(run_pipeline):
            q_smem, o_smem = q_smem2.at[worker], o_smem2.at[worker]
            source = q_ref.at[head, pl.ds(row, ROWS)]
            plgpu.copy_gmem_to_smem(source, q_smem, q_barriers.at[worker])
            plgpu.barrier_wait(q_barriers.at[worker])
            start = (
                tuple(jnp.zeros((ROWS, chunk), jnp.float32) for _ in chunks),
                jnp.full((ROWS,), LOWEST, jnp.float32),
                jnp.zeros((ROWS,), jnp.float32),
            )
            o, m, total = run_pipeline(start)
            target = (split, head, pl.ds(row, ROWS))
            stats_smem[worker, 0] = m
            stats_smem[worker, 1] = total
            for columns_of, part in zip(chunks, o, strict=True):
                o_smem[...] = part
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_smem, o_ref.at[(*target, columns_of)])
                plgpu.wait_smem_to_gmem(0)
            plgpu.copy_smem_to_gmem(stats_smem.at[worker, 0], m_ref.at[target])
            plgpu.copy_smem_to_gmem(stats_smem.at[worker, 1], l_ref.at[target])
            plgpu.wait_smem_to_gmem(0)

        def add_product(o, p, p_smem, v_smem):
            if interpret is None:

                def accumulate(acc):
                    plgpu.wgmma(acc, p, v_smem)

                return pl.run_state(accumulate)(plgpu.ACC.init(o))

            def product(acc):
                plgpu.wgmma(acc, p_smem, v_smem)
                return acc[...]

            return o + pl.run_scoped(product, plgpu.ACC(o.shape, jnp.float32))

        def step(indices, k_smem, v_smem, k_consumed, v_consumed, carry):
            o, m, total = carry

            def scores(acc):
                plgpu.wgmma(acc, q_smem2.at[worker], k_smem.transpose((1, 0)))
                return acc[...]

            s = pl.run_scoped(scores, plgpu.ACC((ROWS, KEYS), jnp.float32))
            plgpu.barrier_arrive(k_consumed)
            seen = visible(indices[0], s.shape)
            s = jnp.where(seen, s * (scale * LOG2_E), LOWEST)
            new_m = jnp.maximum(m, s.max(axis=1))
            decay = jnp.exp2(m - new_m)
            p = jnp.exp2(s - lax.broadcast_in_dim(new_m, s.shape, [0]))
            p = jnp.where(seen, p, 0.0)
            total = total * decay + p.sum(axis=1)
            decayed = [x * lax.broadcast_in_dim(decay, x.shape, [0]) for x in o]
            p = p.astype(jnp.bfloat16)
            if interpret is not None:
                p_smem2[worker] = p
                plgpu.commit_smem()
            o = tuple(
                add_product(x, p, p_smem2.at[worker], v_smem.at[:, part])
                for x, part in zip(decayed, chunks, strict=True)
            )
            plgpu.barrier_arrive(v_consumed)
            return o, new_m, total

        tile_spec = plgpu.BlockSpec(
            block_shape=(KEYS, h),
            index_map=lambda i: (begin_tile + i, 0),
            transforms=BF16_TILES,
        )
        pipeline = plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(count,),
            max_concurrent_steps=stages,
            num_compute_wgs=workers,
            memory_registers=40,
            wg_axis="wg",
            manual_consumed_barriers=True,
            compute_context=compute,
            in_specs=[tile_spec, tile_spec],
            out_specs=[],
        )
        pipeline(k_ref.at[head], v_ref.at[head])

    inputs = [x for x in (q, k, v, begin, end, lower, words) if x is not None]
    stats = jax.ShapeDtypeStruct((splits, z, rows), jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((splits, z, rows, h), jnp.float32), stats, stats),
        grid=(z, rows // tile_rows, splits),
        grid_names=("head", "tile", "split"),
        num_threads=workers + 1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((workers, ROWS, h), jnp.bfloat16, transforms=BF16_TILES),
            plgpu.SMEM((workers, ROWS, chunk), jnp.float32, transforms=F32_TILES),
            # Weights, under the interpreter only; 8 rows are the least that a tiled buffer has.
            plgpu.SMEM(
                (workers, 8 if interpret is None else ROWS, KEYS),
                jnp.bfloat16,
                transforms=BF16_TILES,
            ),
            plgpu.SMEM((workers, 2, ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=workers),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*inputs)


def _pad(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)


def bit_words(mask_bnm: jax.Array) -> jax.Array:
    """int32 [b, m / 32, n] of a bool mask [b, n, m], m a multiple of 32; bit j is key j."""
    b, n, m = mask_bnm.shape
    bits = mask_bnm.reshape(b, n, m // 32, 32).astype(jnp.uint32)
    words = (bits << jnp.arange(32, dtype=jnp.uint32)).sum(axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32).swapaxes(1, 2)


def combine(o: jax.Array, m: jax.Array, total: jax.Array) -> jax.Array:
    """float32 [z, rows, h] from partial results stacked on axis 0; 0 where nothing is seen."""
    weight = jnp.exp2(m - m.max(axis=0))
    norm = (total * weight).sum(axis=0)
    mixed = (o * weight[..., None]).sum(axis=0)
    return mixed / jnp.where(norm == 0.0, 1.0, norm)[..., None]


def tree_attention(
    q_bnkgh: jax.Array,
    k_bksh: jax.Array,
    v_bksh: jax.Array,
    k_bmkh: jax.Array,
    v_bmkh: jax.Array,
    mask_bnm: jax.Array,
    lower_bn: jax.Array,
    length_b: jax.Array,
    *,
    splits: int | None = None,
    interpret=None,
) -> jax.Array:
    """The kernel, with the signature of the reference in `tree_attention.py`.

    Args:
      splits: parts of the prefix (static); default: enough to fill the GPU.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    b, n, kv_heads, g, h = q_bnkgh.shape
    slots = k_bksh.shape[2]
    z, rows = b * kv_heads, n * g

    def per_head(x):
        return jnp.repeat(x, kv_heads, axis=0)

    q = q_bnkgh.transpose(0, 2, 1, 3, 4).reshape(z, rows, h)
    q = _pad(q, 1, ROWS if rows <= ROWS else 2 * ROWS)
    lower = _pad(jnp.repeat(per_head(lower_bn), g, axis=1), 1, q.shape[1])
    k_new, v_new = (_pad(x.swapaxes(1, 2).reshape(z, -1, h), 1, KEYS) for x in (k_bmkh, v_bmkh))
    words = jnp.repeat(bit_words(_pad(mask_bnm, 2, KEYS)), g, axis=2)
    words = _pad(per_head(words), 2, q.shape[1])
    length = per_head(length_b).astype(jnp.int32)
    if splits is None:
        blocks = z * (q.shape[1] // min(2 * ROWS, q.shape[1]))
        splits = max(1, min(MULTIPROCESSORS // blocks, slots // (2 * KEYS)))
    shared = dict(scale=h**-0.5, interpret=interpret)
    first = per_head(lower_bn.min(axis=1)).astype(jnp.int32)
    prefix = _partial(
        q,
        k_bksh.reshape(z, slots, h),
        v_bksh.reshape(z, slots, h),
        first,
        length,
        lower.astype(jnp.int32),
        None,
        splits=splits,
        **shared,
    )
    beside = _partial(
        q,
        k_new,
        v_new,
        jnp.zeros_like(length),
        jnp.full_like(length, k_bmkh.shape[1]),
        None,
        words,
        splits=1,
        **shared,
    )
    parts = (jnp.concatenate(pair) for pair in zip(prefix, beside, strict=True))
    o = combine(*parts)[:, :rows].astype(q_bnkgh.dtype)
    return o.reshape(b, kv_heads, n, g, h).transpose(0, 2, 1, 3, 4)
