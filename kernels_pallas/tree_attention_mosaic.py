"""Tree attention for Hopper in Pallas Mosaic GPU: divided over the keys as far as needs be.

Algorithm. Each KV head has n nodes x g query heads, in tiles of 64 rows: the group is padded to a
power of two, and a tile holds all heads of 64 / group nodes, head-major, so that each head's part
is one box of a tensor copy. Keys come in tiles too: those of the committed prefix, then those of
the rows beside it. The splits take the tiles of both in turn (on the device, from the row's length:
no length recompiles anything). A block runs online softmax over its share. Of several splits a
second kernel combines the partial results.

A block has one warpgroup that only issues copies of K and V tiles into a ring, and one or two that
compute, 64 rows each, with every tile. Prefix tiles that all rows see whole need no mask; those at
the row's length or at a window's edge compare slots; tiles of the rows beside test bit words.

Where keys would be split in two, blocks of two warpgroups have 64 rows instead and no splits: their
warpgroups take the tiles in turn and combine what they have in shared memory, which saves a kernel
(256 nodes at 1024 on an H200: 14.3 us, and 16.8 with splits). Two blocks read a tile once, for
both. Over long prefixes it costs more than it saves: a tile serves half as many rows.

What a block copies first it asks for before it has read a length. Without bounds from below its
first tile of the prefix is known; one past the row's length is masked whole. And where the rows
beside are one tile of 64 and there is shared memory for it, it has buffers of its own: in the ring
it would take its turn on the memory, however small it is.

Over long prefixes with two computing warpgroups products are what takes the time: one multiplies
while the other one is at its softmax (as FlashAttention-3, arXiv 2407.08608, section 3.1).

Layout of the partial results: [splits, z, rows, h], z = batch * KV heads, rows in the order of the
tiles; the maximum in log2 units.

Numerics: products in bfloat16 with float32 accumulation; scores, softmax and partial results
float32; the weights are rounded to bfloat16 before the product with v, unnormalised (the reference
normalises first). Hidden scores are minus infinity and the initial maximum is finite, so a tile in
which a row sees nothing adds nothing.

Under the CPU interpreter the two wgmma forms that it lacks (weights from registers, accumulators
with an initial value) are replaced by equal ones.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.mosaic import COLUMN_VECTOR, MULTIPROCESSORS, ROW_VECTOR, ROWS, WGMMA

LOWEST = -1e30  # the initial maximum
LOG2_E = math.log2(math.e)
WIDE = 128  # keys of a tile where a block has many; 64 elsewhere
LONG = 4096  # cache slots from which wide key tiles pay
DEEP = 6  # wide tiles of the cache per split from which two computing warpgroups want them
PART = 64  # columns that are stored at a time
FOLD = 8  # columns of an accumulator after which its layout repeats: a thread has two of them
ASIDE = 64  # rows beside the prefix for which there may be buffers of their own


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
    """Keys per tile, at least."""
    return WIDE if slots >= LONG and h <= 128 else 64


def _tile_nodes(g: int) -> int:
    """Nodes per tile of 64 rows."""
    return ROWS >> (g - 1).bit_length()


def _attend(
    qkv,
    k_cache,
    v_cache,
    words,
    length,
    bounds,
    *,
    n: int,
    keys: int,
    splits: int,
    workers: int,
    divided: bool,
    interpret,
):
    """Of one split bfloat16 [b, n, k * g * h], 0 where nothing is seen; of several what combines.

    That is unnormalised o [splits, z, rows, h], m and l [splits, z, rows], float32.

    Args:
      qkv: bfloat16 [b, m, k * (g + 2) * h]; the last n rows ask.
      k_cache, v_cache: bfloat16 [b, k, slots, h].
      words: int32 [b, m / 32, rows], bit j % 32 of word j // 32: whether a row sees row j beside.
      length: int32 [b].
      bounds: none where each row sees the prefix from slot 0 on; else
        lower, int32 [b, rows], the first slot that each row sees, and
        lowest and highest, int32 [b], the least and the greatest of them.
    """
    b, kv_heads, _, h = k_cache.shape
    m, columns = qkv.shape[1:]
    g = columns // (kv_heads * h) - 2
    nodes, z, rows = _tile_nodes(g), b * kv_heads, words.shape[-1]
    whole = splits == 1  # what a block has is the result
    row_tiles = 1 if divided else workers  # of a block
    cluster = 2 if divided else 1
    stages = 2 if (h == 256 or keys == WIDE) and not divided else 3
    alternate = workers == 2 and k_cache.shape[2] >= LONG and not divided
    room = mosaic.SHARED_BYTES - 4 * stages * keys * h - 2 * row_tiles * ROWS * h
    result = jnp.bfloat16 if whole else jnp.float32
    width = h // 2 if divided else PART  # columns that are stored at a time
    part_bytes = result.dtype.itemsize * workers * ROWS * width
    # Rows that copies read: what lies outside an array costs them more time than what is in it.
    # Queries of nobody and keys that are hidden may be anything; hidden values must be finite.
    asked = min(nodes, -(-n // 8) * 8)
    aside_rows = -(-m // 8) * 8, ASIDE
    apart = m <= ASIDE and part_bytes + 4 * ASIDE * h <= room and not divided
    # Buffers of the results; those of `divided` take the memory of queries and ring.
    parts = 1 if divided else min(h // PART, (room - 4 * ASIDE * h * apart) // part_bytes)
    chunk = min(h, 128)  # columns of the output per accumulator
    chunks = [pl.ds(start, chunk) for start in range(0, h, chunk)]
    beside_tiles = -(-m // keys)
    scale = h**-0.5 * LOG2_E  # of scores, to log2 units

    def tree_attention_kernel(qkv_ref, k_ref, v_ref, words_ref, length_ref, *refs):
        lower_ref, lowest_ref, highest_ref = refs[: len(bounds)] or [None] * 3
        o_ref, *stats_refs = refs[len(bounds) : len(bounds) + (1 if whole else 3)]
        refs = refs[len(bounds) + 1 + len(stats_refs) :]
        shared, q_full, k_full, v_full, k_free, v_free, met, *refs = refs
        (q_smem2, k_smem, v_smem), results = shared
        p_smem2, aside = (None, refs) if interpret is None else (refs[0], refs[1:])
        z_index, split, worker = (lax.axis_index(axis) for axis in ("z", "split", "wg"))
        batch, head = z_index // kv_heads, lax.rem(z_index, kv_heads)
        column = head * (g + 2) * h
        block = lax.axis_index("blocks")
        if cluster > 1:
            block = block * cluster + lax.axis_index("block")
        own_tile = 0 if divided else worker
        tile = block * row_tiles + own_tile
        is_last, is_loader = split == splits - 1, worker == workers
        ring = (k_smem, k_full, k_free), (v_smem, v_full, v_free)

        def of_prefix(key_tile):
            where = (batch, head, pl.ds(key_tile * keys, keys))
            return k_ref.at[where], v_ref.at[where]

        def of_beside(start, *counts):
            return tuple(
                qkv_ref.at[batch, pl.ds(start, count), pl.ds(column + (g + i) * h, h)]
                for i, count in enumerate(counts)
            )

        def copy_aside():
            *buffers, full = aside
            for i, source in enumerate(of_beside(0, *aside_rows)):
                target = buffers[i].at[pl.ds(0, aside_rows[i])]
                plgpu.copy_gmem_to_smem(source, target, full.at[i])

        # Each block of a cluster reads a part of the keys and values for all of them.
        collective = {"collective_axes": "block"} if cluster > 1 else {}

        def copy_first():
            for source, (buffer, full, _) in zip(of_prefix(split), ring, strict=True):
                plgpu.copy_gmem_to_smem(source, buffer.at[0], full.at[0], **collective)

        def copy_queries():
            for j in range(g):
                rows = pl.ds(m - n + tile * nodes, asked)
                source = qkv_ref.at[batch, rows, pl.ds(column + j * h, h)]
                part = q_smem2.at[own_tile, pl.ds(j * nodes, asked)]
                plgpu.copy_gmem_to_smem(source, part, q_full.at[own_tile])

        pl.when(worker < row_tiles)(copy_queries)
        if apart:
            pl.when(is_loader & is_last)(copy_aside)
        if not bounds:
            pl.when(is_loader)(copy_first)

        # Tiles of the prefix, from the first that a row sees, then tiles beside: this split has
        # number `split` of them all and every `splits`-th after it.
        end = length_ref[batch]
        first = lowest_ref[batch] // keys if bounds else 0
        prefix = jnp.maximum((end + keys - 1) // keys - first, 0)

        def own(count):
            """How many of the first `count` tiles are this split's."""
            return (count - split + splits - 1) // splits

        def prefix_tile(i):
            return first + split + i * splits

        mine = own(prefix)
        beside = 0 if apart else own(prefix + beside_tiles) - mine

        def beside_tile(i):
            return split + (mine + i) * splits - prefix

        # Of its tiles of the prefix, all rows see those in [inner, inner_end) whole.
        inner = 0
        if bounds:
            inner = own(jnp.clip((highest_ref[batch] + keys - 1) // keys - first, 0, prefix))
        inner_end = jnp.maximum(own(jnp.clip(end // keys - first, 0, prefix)), inner)
        inners = inner_end - inner
        edges = (mine if bounds else jnp.maximum(mine, 1)) - inners

        def edge_tile(i):
            return prefix_tile(jnp.where(i < inner, i, inners + i))

        def spread(x, shape):
            return lax.broadcast_in_dim(x, shape, [0])

        def key_index(key_tile, shape):
            index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
            return index + key_tile * keys

        def row_vector(ref, *index):
            part = ref.at[(*index, pl.ds(tile * ROWS, ROWS))]
            return plgpu.load(part, layout=ROW_VECTOR, optimized=False)

        # Masks read what they need when they are made, long before the scores are there.
        def masked_edge(key_tile):
            least = row_vector(lower_ref, batch) if bounds else None

            def mask(s):
                slot = key_index(key_tile, s.shape)
                seen = slot < end
                if least is not None:
                    seen &= slot >= spread(least, s.shape)
                return jnp.where(seen, s, -jnp.inf)

            return mask

        def masked_beside(key_tile, keys=keys):
            first_word = key_tile * (keys // 32)
            words = [row_vector(words_ref, batch, first_word + i) for i in range(keys // 32)]

            def mask(s):
                parts = []
                for i, word in enumerate(words):
                    part = s[:, 32 * i : 32 * (i + 1)]
                    # The bit of a key comes to the sign.
                    bits = lax.shift_left(spread(word, part.shape), 31 - key_index(0, part.shape))
                    parts.append(jnp.where(bits < 0, part, -jnp.inf))
                return jnp.concatenate(parts, axis=1)

            return mask

        def folded(combine, x):
            """[rows, FOLD] of [rows, keys]: what is left to do between threads is done once."""
            parts = [x[:, i : i + FOLD] for i in range(0, x.shape[1], FOLD)]
            while len(parts) > 1:
                parts = [combine(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
            return parts[0]

        def meet():
            """Waits until all that compute are here."""
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def take_turns():
            """Waits until the other warpgroup has issued its product."""
            if alternate:
                meet()

        def compute():
            q_smem = q_smem2.at[own_tile]
            plgpu.barrier_wait(q_full.at[own_tile])
            # The interpreter multiplies what is in shared memory.
            in_registers = interpret is None and h <= 128
            queries = plgpu.load(q_smem, layout=WGMMA) if in_registers else q_smem

            def add_product(o, p, values):
                if interpret is None:

                    def accumulate(acc):
                        plgpu.wgmma(acc, p, values)
                        take_turns()

                    return pl.run_state(accumulate)(plgpu.ACC.init(o))

                def product(acc):
                    plgpu.wgmma(acc, p_smem2.at[worker, :, pl.ds(0, p.shape[1])], values)
                    take_turns()
                    return acc[...]

                return o + pl.run_scoped(product, plgpu.ACC(o.shape, jnp.float32))

            def visit(keys_smem, values_smem, barriers, mask, carry):
                """Adds a tile; `barriers`: full and free, of its keys and of its values."""
                o, peak, total = carry
                (keys_full, keys_free), (values_full, values_free) = barriers
                plgpu.barrier_wait(keys_full)

                def scores(acc):
                    plgpu.wgmma(acc, queries, keys_smem.transpose((1, 0)))
                    take_turns()
                    return acc[...]

                s = pl.run_scoped(scores, plgpu.ACC((ROWS, keys_smem.shape[0]), jnp.float32))
                if keys_free is not None:
                    plgpu.barrier_arrive(keys_free)
                if mask is not None:
                    s = mask(s)
                new_peak = jnp.maximum(peak, folded(jnp.maximum, s).max(axis=1))
                decay = jnp.exp2((peak - new_peak) * scale)
                # Scaled here, where it is one instruction with the subtraction.
                p = jnp.exp2(s * scale - spread(new_peak * scale, s.shape))
                total = total * spread(decay, total.shape) + folded(jnp.add, p)
                o = [x * spread(decay, x.shape) for x in o]
                p = p.astype(jnp.bfloat16)
                if interpret is not None:
                    p_smem2[worker, :, pl.ds(0, p.shape[1])] = p
                    plgpu.commit_smem()
                plgpu.barrier_wait(values_full)
                o = tuple(
                    add_product(x, p, values_smem.at[:, part])
                    for x, part in zip(o, chunks, strict=True)
                )
                if values_free is not None:
                    plgpu.barrier_arrive(values_free)
                return o, new_peak, total

            def visit_ring(step, mask, carry):
                slot = lax.rem(step, stages)
                barriers = [(full.at[slot], free.at[slot]) for _, full, free in ring]
                return visit(k_smem.at[slot], v_smem.at[slot], barriers, mask, carry)

            def visit_aside(carry):
                k_aside, v_aside, full = aside
                barriers = [(full.at[i], None) for i in range(2)]
                return visit(k_aside, v_aside, barriers, masked_beside(0, ASIDE), carry)

            carry = (
                tuple(jnp.zeros((ROWS, chunk), jnp.float32) for _ in chunks),
                jnp.full((ROWS,), LOWEST, jnp.float32),
                jnp.zeros((ROWS, FOLD), jnp.float32),
            )

            def pass_by(step):
                """A tile of the other worker: whoever waits for a barrier sees all its phases."""
                slot = lax.rem(step, stages)
                for _, full, _ in ring:
                    plgpu.barrier_wait(full.at[slot])
                # One warp arrives at a cluster's barrier for all four, and no product holds it up.
                plgpu.commit_smem()
                for _, _, free in ring:
                    plgpu.barrier_arrive(free.at[slot])

            def loop(start, count, visit, carry):
                """Visits `count` steps from `start` on, or those of this worker, every second."""
                if not divided:
                    return lax.fori_loop(0, count, lambda i, c: visit(start + i, i, c), carry)
                ahead = lax.rem(start + worker, 2)
                pl.when((ahead == 1) & (count > 0))(lambda: pass_by(start))

                def visit_own(j, carry):
                    i = ahead + 2 * j
                    carry = visit(start + i, i, carry)
                    pl.when(i + 1 < count)(lambda: pass_by(start + i + 1))
                    return carry

                return lax.fori_loop(0, (count - ahead + 1) // 2, visit_own, carry)

            if alternate:  # the first one begins
                pl.when(worker == 1)(take_turns)
            if apart:
                carry = lax.fori_loop(
                    0, is_last.astype(jnp.int32), lambda _, c: visit_aside(c), carry
                )
            carry = loop(0, inners, lambda step, i, c: visit_ring(step, None, c), carry)
            carry = loop(
                inners,
                edges,
                lambda step, i, c: visit_ring(step, masked_edge(edge_tile(i)), c),
                carry,
            )
            o, peak, total = loop(
                inners + edges,
                beside,
                lambda step, i, c: visit_ring(step, masked_beside(beside_tile(i)), c),
                carry,
            )
            if alternate:
                pl.when(worker == 0)(take_turns)
            # The results take the memory of queries and ring, which nobody may still be reading.
            if divided:
                meet()
            store(o, peak * scale, total.sum(axis=1))

        def store(o, peak, total):
            if divided:
                o, peak, total = merged(o[0], peak, total)
            if whole:
                factor = 1.0 / jnp.where(total == 0.0, 1.0, total)
                o = [(x * spread(factor, x.shape)).astype(jnp.bfloat16) for x in o]
            else:
                m_ref, l_ref = stats_refs
                share = (split, z_index, pl.ds(tile * ROWS, ROWS))
                m_ref[share] = peak
                l_ref[share] = total
            first_column = worker * width if divided else 0
            for i, start in enumerate(range(0, len(o) * o[0].shape[1], width)):
                if i >= parts:  # until a buffer is free
                    copies = g if whole else 1  # of a part
                    plgpu.wait_smem_to_gmem((parts - 1) * copies, wait_read_only=True)
                within = start % chunk
                part = results[0].at[worker, i % parts]
                part[...] = o[start // chunk][:, within : within + width]
                plgpu.commit_smem()
                if not whole:
                    plgpu.copy_smem_to_gmem(part, o_ref.at[(*share, pl.ds(start, width))])
                    continue
                for j in range(g):
                    columns = pl.ds((head * g + j) * h + first_column + start, width)
                    target = o_ref.at[batch, pl.ds(tile * nodes, nodes), columns]
                    plgpu.copy_smem_to_gmem(part.at[pl.ds(j * nodes, nodes)], target)
            # Only until the buffers are read: whoever reads what was written runs after us.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def merged(o, peak, total):
            """One half of the columns, of what both workers have; the first has the first half."""
            _, sums, stats = results
            other = 1 - worker
            halves = o[:, :width], o[:, width:]
            is_first = jnp.broadcast_to(worker == 0, (ROWS, width))
            sums.at[worker][...] = jnp.where(is_first, halves[1], halves[0])
            stats.at[worker, 0][...] = peak
            stats.at[worker, 1][...] = total
            meet()
            given = plgpu.load(sums.at[other], layout=WGMMA)
            its_peak, its_total = (
                plgpu.load(stats.at[other, i], layout=ROW_VECTOR, optimized=False) for i in (0, 1)
            )
            new_peak = jnp.maximum(peak, its_peak)
            weight, its_weight = jnp.exp2(peak - new_peak), jnp.exp2(its_peak - new_peak)
            o = jnp.where(is_first, halves[0], halves[1])
            o = o * spread(weight, o.shape) + given * spread(its_weight, o.shape)
            return [o], new_peak, total * weight + its_total * its_weight

        def load():
            def fetch(step, sources):
                slot = lax.rem(step, stages)
                for source, (buffer, full, free) in zip(sources, ring, strict=True):

                    @pl.when(step >= stages)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[slot])

                    plgpu.copy_gmem_to_smem(source, buffer.at[slot], full.at[slot], **collective)

            def loop(start, stop, body):
                lax.fori_loop(start, stop, lambda i, _: body(i), None)

            begun = jnp.int32(0 if bounds else 1)
            loop(
                jnp.minimum(begun, inners),
                inners,
                lambda i: fetch(i, of_prefix(prefix_tile(inner + i))),
            )
            loop(
                jnp.maximum(begun - inners, 0),
                edges,
                lambda i: fetch(inners + i, of_prefix(edge_tile(i))),
            )
            loop(
                0,
                beside,
                lambda i: fetch(inners + edges + i, of_beside(beside_tile(i) * keys, keys, keys)),
            )
            # Warpgroups end together, with no phase of a barrier left unseen.
            steps = inners + edges + beside

            def drain(step, _):
                for free in (k_free, v_free):
                    plgpu.barrier_wait(free.at[lax.rem(step, stages)])

            lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)

        # Three warpgroups share the registers unevenly; two have enough as it is.
        @pl.when(jnp.logical_not(is_loader))
        def _():
            if workers == 2:
                plgpu.set_max_registers(mosaic.COMPUTING_REGISTERS, action="increase")
            compute()

        @pl.when(is_loader)
        def _():
            if workers == 2:
                plgpu.set_max_registers(mosaic.COPYING_REGISTERS, action="decrease")
            load()

    tiles = mosaic.tiles(64, jnp.bfloat16)
    aside = (
        plgpu.SMEM((ASIDE, h), jnp.bfloat16, transforms=tiles),
        plgpu.SMEM((ASIDE, h), jnp.bfloat16, transforms=tiles),
        plgpu.Barrier(num_barriers=2),
    )
    weights = plgpu.SMEM((workers, ROWS, keys), jnp.bfloat16, transforms=tiles)
    inputs = [
        plgpu.SMEM((row_tiles, ROWS, h), jnp.bfloat16, transforms=tiles),
        plgpu.SMEM((stages, keys, h), jnp.bfloat16, transforms=tiles),
        plgpu.SMEM((stages, keys, h), jnp.bfloat16, transforms=tiles),
    ]
    results = [
        plgpu.SMEM((workers, parts, ROWS, width), result, transforms=mosaic.tiles(width, result))
    ]
    if divided:
        sums = (workers, ROWS, width)
        results += [
            plgpu.SMEM(sums, jnp.float32, transforms=mosaic.tiles(width, jnp.float32)),
            plgpu.SMEM((workers, 2, ROWS), jnp.float32),
        ]
    shared = plgpu.RefUnion(inputs, results) if divided else (inputs, results)
    out_type: Any
    if whole:
        out_type = jax.ShapeDtypeStruct((b, n, kv_heads * g * h), result)
    else:
        stats = jax.ShapeDtypeStruct((splits, z, rows), jnp.float32)
        out_type = (jax.ShapeDtypeStruct((splits, z, rows, h), result), stats, stats)
    freed = plgpu.Barrier(num_arrivals=workers, num_barriers=stages)
    if cluster > 1:  # what one block reads overwrites shared memory of all of them
        freed = plgpu.ClusterBarrier(
            collective_axes=("block",), num_arrivals=workers, num_barriers=stages
        )
    return plgpu.kernel(
        tree_attention_kernel,
        out_type=out_type,
        grid=(z, rows // (ROWS * row_tiles * cluster), splits),
        grid_names=("z", "blocks", "split"),
        **({"cluster": (cluster,), "cluster_names": ("block",)} if cluster > 1 else {}),
        num_threads=workers + 1,
        thread_name="wg",
        scratch_types=(
            shared,
            plgpu.Barrier(num_arrivals=g, num_barriers=row_tiles),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            freed,
            freed,
            plgpu.Barrier(num_arrivals=workers),
            *(() if interpret is None else (weights,)),
            *(aside if apart else ()),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(qkv, k_cache, v_cache, words, length, *bounds)


def _combine(o, m, total, *, batch: int, n: int, g: int, interpret) -> jax.Array:
    """bfloat16 [batch, n, k * g * h] from the partial results; 0 where nothing is seen.

    A block has one head of four nodes, a warp each, or of one node. Many blocks share the latency,
    and all reads of one are at once.
    """
    splits, z, _, h = o.shape
    kv_heads, nodes = z // batch, _tile_nodes(g)
    warps = mosaic.WARPS if n % mosaic.WARPS == 0 else 1
    # One row of 64 is too short for a warpgroup: each warp has all of it then.
    one_row = COLUMN_VECTOR if h % 128 else None
    layout = mosaic.row_of_warp(h) if warps > 1 else one_row

    def combine_kernel(o_ref, m_ref, l_ref, out_ref):
        z_index, block, head = (lax.axis_index(axis) for axis in ("z", "block", "head"))
        first = block * warps
        row = first // nodes * ROWS + head * nodes + lax.rem(first, nodes)
        rows = pl.ds(row, warps) if warps > 1 else row

        def of_splits(ref, layout):
            places = (ref.at[split, z_index, rows] for split in range(splits))
            return [plgpu.load(place, layout=layout, optimized=False) for place in places]

        parts = of_splits(o_ref, layout)
        each = layout.reduce(1) if warps > 1 else None
        peaks, totals = of_splits(m_ref, each), of_splits(l_ref, each)
        peak = functools.reduce(jnp.maximum, peaks)
        weights = [jnp.exp2(x - peak) for x in peaks]

        def spread(x):
            return lax.broadcast_in_dim(x, (warps, h), [0]) if warps > 1 else x

        def summed(terms):
            return functools.reduce(lambda a, b: a + b, terms)

        norm = summed(x * w for x, w in zip(totals, weights, strict=True))
        factor = 1.0 / jnp.where(norm == 0.0, 1.0, norm)
        y = summed(x * spread(w * factor) for x, w in zip(parts, weights, strict=True))
        columns = pl.ds((lax.rem(z_index, kv_heads) * g + head) * h, h)
        node = pl.ds(first, warps) if warps > 1 else first
        out_ref[z_index // kv_heads, node, columns] = y.astype(jnp.bfloat16)

    return plgpu.kernel(
        combine_kernel,
        out_type=jax.ShapeDtypeStruct((batch, n, kv_heads * g * h), jnp.bfloat16),
        grid=(z, n // warps, g),
        grid_names=("z", "block", "head"),
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


@functools.partial(jax.jit, static_argnames=("bounded", "splits", "divided", "interpret"))
def tree_attention(
    qkv_bmch: jax.Array,
    k_bksh: jax.Array,
    v_bksh: jax.Array,
    mask_bnm: jax.Array,
    lower_bn: jax.Array,
    length_b: jax.Array,
    *,
    bounded: bool = True,
    splits: int | None = None,
    divided: bool | None = None,
    interpret=None,
) -> jax.Array:
    """The kernel, with the signature of the reference in `tree_attention.py`.

    Args:
      bounded: whether `lower_bn` may be above 0; it is not read otherwise (static).
      splits: parts that the keys are divided into, at most one for each tile of the cache (static);
        default: enough to fill the GPU.
      divided: whether the two warpgroups of a block divide the keys instead of the rows, without
        splits (static); default: if `splits` is left out too and would be two, of a cache that is
        not long.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU, which takes more threads than it may
        have cores (the environment variable NPROC, as in tests/conftest.py).

    Raises:
      ValueError: keys are to be divided where a block has one warpgroup or splits.
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
            bounded=bounded,
            splits=splits,
            divided=divided,
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

    bounds: tuple[jax.Array, ...] = ()
    if bounded:
        lower_bn = lower_bn.astype(jnp.int32)
        bounds = by_tile(lower_bn), lower_bn.min(axis=1), lower_bn.max(axis=1)
    if splits is None:
        blocks = b * k * tiles // workers
        splits = min(MULTIPROCESSORS // blocks, slots // (2 * keys))
        if divided is None:
            divided = workers == 2 and splits == 2 and slots < LONG
    elif divided and splits > 1:
        raise ValueError(f"keys divided in a block and in {splits} splits; expected one of the two")
    if divided and workers < 2:
        raise ValueError(f"keys divided among the warpgroups of a block that has {workers}")
    # A split begins with a tile of the cache.
    shares = 2 if divided else max(1, min(splits, slots // keys))
    if workers == 2 and slots % WIDE == 0 and slots >= DEEP * WIDE * shares:
        keys = WIDE
    splits = 1 if divided else shares
    out = _attend(
        qkv_bmch.reshape(b, m, -1),
        k_bksh,
        v_bksh,
        by_tile(bit_words(jnp.pad(mask_bnm, [(0, 0), (0, 0), (0, -m % keys)]))),
        length_b.astype(jnp.int32),
        bounds,
        n=n,
        keys=keys,
        splits=splits,
        workers=workers,
        divided=bool(divided),
        interpret=interpret,
    )
    if splits > 1:
        out = _combine(*out, batch=b, n=n, g=g, interpret=interpret)
    return out.reshape(b, n, k, g, h)
