"""Growing a draft tree best first: what a heap does, without a heap.

The reference works level by level. The kernel picks node by node, in one block: its frontier has a
slot for every node that could be picked next. Picking one puts its next sibling into its slot and
its first child into a new one, so that budget + 1 slots are enough. Ties go by the tuple of ranks
along the path. No tuple is ever compared: a node's first child comes right after it in the order of
tuples and its next sibling right after that, so the frontier's order is a list in which the picked
node is replaced by the two.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic

LANES = 128  # threads of a warpgroup: what it copies is a multiple of it
WORST = jnp.iinfo(jnp.int32).min
MAX_BUDGET = 511
MANY = 128  # slots that are too many for every warp to have all
ENTRY_BITS = 10  # entries: the root's first child, then two for every node


@functools.cache
def _child_pairs(budget: int, ranks: int, spare: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j) that can be among the `budget` best: the child of rank j of a level's node i.

    A level's nodes are counted from 0, best first.

    Scores fall in both i and j, so (i, j) has at least (i + 1)(j + 1) - 1 nodes of its own level
    before it. The first `spare` nodes may stand outside that order (a pinned chain).
    """
    pairs = [
        (i, j) for i in range(budget) for j in range(ranks) if (i + 1 - spare) * (j + 1) <= budget
    ]
    first, second = np.array(pairs, np.int32).T
    return first, second


def _build_row(scores_lr: jax.Array, budget: int, chain_seed: bool) -> tuple[jax.Array, ...]:
    """One row's tree, best first: ranks, parents, depths and whether the node is real, [budget].

    Parents count from 0, the root.

    The pool holds the `budget` best nodes of the levels seen so far, in order of (score, then rank
    tuple). `order` is a node's place in the lexicographic order of rank tuples within the pool.
    Each level adds the children of the deepest nodes and sorts again:

        a child's tuple is (parent's tuple, rank), so next to any pool node x it compares as its
        parent does, and after the parent itself: key = order[parent] * (R + 1) + rank + 1,
        while a pool node keeps key = order[x] * (R + 1).

    Ties therefore need no tuples. A node in the final set has its parent there too, since a
    child's score is never higher and its tuple is longer.
    """
    levels, ranks = scores_lr.shape
    spare = int(chain_seed)
    pair_node, pair_rank = _child_pairs(budget, ranks, spare)
    worst = jnp.iinfo(jnp.int32).max
    step = ranks + 1

    # Level 1: the ranks of the first slot are already in order.
    size = min(budget, ranks)
    index = jnp.arange(budget, dtype=jnp.int32)
    pool = dict(
        score=jnp.pad(scores_lr[0, :size], (0, budget - size)),
        rank=index,
        parent=jnp.full((budget,), -1, jnp.int32),
        depth=jnp.ones((budget,), jnp.int32),
        live=index < size,
        order=index,
        pinned=(index == 0) & chain_seed,
    )

    def grow(pool, level_and_scores):
        level, scores_r = level_and_scores
        # The deepest nodes, best first (a pinned node leads); pairs past their number are dead.
        deepest = pool["live"] & (pool["depth"] == level)
        slot = jnp.where(deepest, jnp.cumsum(deepest) - 1, budget)
        members = jnp.full((budget,), budget, jnp.int32).at[slot].set(index, mode="drop")
        node = members[pair_node]
        alive = node < budget
        node = jnp.minimum(node, budget - 1)
        children = dict(
            score=pool["score"][node] + scores_r[pair_rank],
            rank=jnp.asarray(pair_rank),
            parent=node,
            depth=jnp.full(node.shape, level + 1, jnp.int32),
            live=alive,
            order=pool["order"][node] * step + pair_rank + 1,
            pinned=pool["pinned"][node] & (pair_rank == 0) & chain_seed,
        )
        pool = pool | dict(order=pool["order"] * step)
        both = {name: jnp.concatenate([pool[name], children[name]]) for name in pool}
        # Pinned nodes first, then live ones by falling score, dead ones last.
        primary = jnp.where(both["pinned"], -1, -both["score"])
        primary = jnp.where(both["live"], primary, worst)
        source = jnp.arange(primary.shape[0], dtype=jnp.int32)
        picked = lax.sort((primary, both["order"], source), num_keys=2)[2][:budget]
        place = jnp.full(source.shape, -1, jnp.int32).at[picked].set(index)
        pool = {name: values[picked] for name, values in both.items()}
        order = (pool["order"][:, None] > pool["order"]).sum(axis=1, dtype=jnp.int32)
        parent = jnp.where(pool["parent"] < 0, -1, place[jnp.maximum(pool["parent"], 0)])
        return pool | dict(order=order, parent=parent), None

    # On a GPU a loop of small steps costs more than the steps; on a CPU unrolling only compiles
    # longer.
    unroll = jax.default_backend() != "cpu"
    depths = jnp.arange(1, levels, dtype=jnp.int32)
    pool, _ = lax.scan(grow, pool, (depths, scores_lr[1:]), unroll=unroll)
    rank, live = pool["rank"], pool["live"]
    parent, depth = pool["parent"], pool["depth"]
    return rank, jnp.where(live, parent + 1, 0), jnp.where(live, depth, 0), live


def ancestor_matrix(parents_bn: jax.Array, max_depth: int) -> jax.Array:
    """bool [b, n, n]: the transitive closure of the parent relation, each node included.

    Squaring the one-step relation doubles the reach: ceil(log2(depth)) small products.
    """
    n = parents_bn.shape[1]
    index = jnp.arange(n)
    reach = (parents_bn[:, :, None] == index) | (index[:, None] == index)
    for _ in range(max(max_depth, 1).bit_length()):
        wide = reach.astype(jnp.float32)
        reach = jnp.matmul(wide, wide) > 0
    return reach


def reference(
    scores_blr: jax.Array, budget: int, *, chain_seed: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """The `budget` best prefixes of every row, best first.

    Args:
      scores_blr: int32 scores of each level's candidates, <= 0 and descending along r; the sum over
        the levels must fit.
      budget: nodes beside the root, static.
      chain_seed: take the first candidate of every level first.

    Returns:
      rank, parent (node index, the root is 0), depth (from 1): int32 [b, budget]; live, bool
      [b, budget], False where there are fewer prefixes than that; ancestors, bool
      [b, budget + 1, budget + 1], root included.
    """
    build = functools.partial(_build_row, budget=budget, chain_seed=chain_seed)
    rank, parents, depths, live = jax.vmap(build)(scores_blr)
    parents_of_all = jnp.pad(jnp.where(live, parents, -1), [(0, 0), (1, 0)], constant_values=-1)
    return rank, parents, depths, live, ancestor_matrix(parents_of_all, scores_blr.shape[1])


def grow(
    scores_blr: jax.Array, budget: int, *, chain_seed: bool = False, interpret=None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """The kernel; arguments and results as for the reference. `budget` is at most MAX_BUDGET."""
    b, levels, ranks = scores_blr.shape
    if budget > MAX_BUDGET:
        raise ValueError(f"a budget of {budget}; the kernel takes up to {MAX_BUDGET}")
    shared = budget >= MANY
    unit = 32 * mosaic.WARPS if shared else 32
    size = -(-(budget + 1) // unit) * unit
    words = -(-(budget + 1) // 32)
    table = scores_blr.reshape(b, levels * ranks)
    table = jnp.pad(table, [(0, 0), (0, -(levels * ranks) % LANES)])

    def grow_tree_kernel(
        table_ref, rank_ref, parent_ref, depth_ref, words_ref, table_smem, entries, bits
    ):
        row = lax.axis_index("row")
        table_smem[...] = table_ref[row]
        plgpu.commit_smem()  # every thread reads what others wrote
        # A slot has a score, a place in the order of tuples and the number of an entry with the
        # rest. Every warp has all slots, so that to look for the best score none waits for another;
        # or a part of them, if they are many.
        shape = (mosaic.WARPS, size // mosaic.WARPS if shared else size)
        layout = mosaic.row_of_warp(shape[1])
        index = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        if shared:
            index += shape[1] * plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)

        def put(entry, score, depth, rank, parent, above):
            for field, value in enumerate((score, depth, rank, parent, above)):
                entries[field * 2 * size + entry] = value

        put(0, table_smem[0], 1, 0, 0, 0)
        for word in range(words):
            bits[word] = 1 if word == 0 else 0

        def pick(step, frontier):
            score, place, entry = frontier
            best = score.max(axis=1)
            if shared:
                best = jnp.broadcast_to(jnp.max(best), best.shape)
            best = jnp.where(best == WORST, 1, best)  # no score is 1
            # The first in the order of tuples among the best; places are distinct. Looked for as a
            # largest number too, for which warps have an instruction.
            is_best = score == lax.broadcast_in_dim(best, shape, [0])
            key = jnp.where(is_best, ~(place << ENTRY_BITS | entry), WORST)
            found = jnp.max(key.max(axis=1))
            live = found != WORST
            first = jnp.where(live, ~found, 0)
            picked, at = first & ((1 << ENTRY_BITS) - 1), first >> ENTRY_BITS
            if chain_seed:
                # The last one's first child, before all others in the order of tuples.
                picked = jnp.where(step < levels, 2 * step, picked)
                at = jnp.where(step < levels, 0, at)
            best, depth, rank, parent, above = (
                entries[field * 2 * size + picked] for field in range(5)
            )
            rank_ref[row, step] = jnp.where(live, rank, -1)
            parent_ref[row, step] = jnp.where(live, parent, 0)
            depth_ref[row, step] = jnp.where(live, depth, 0)
            for word in range(words):
                own = jnp.where((step + 1) // 32 == word, 1 << ((step + 1) & 31), 0)
                inherited = jnp.where(live, bits[parent * words + word], 0)
                bits[(step + 1) * words + word] = inherited | own

            has_sibling = live & (rank + 1 < ranks)
            next_rank = jnp.minimum(rank + 1, ranks - 1)
            sibling = above + table_smem[(depth - 1) * ranks + next_rank]
            sibling = jnp.where(has_sibling, sibling, WORST)
            has_child = live & (depth < levels)
            child = best + table_smem[jnp.minimum(depth, levels - 1) * ranks]
            child = jnp.where(has_child, child, WORST)
            # Entries are written once: a warp may be behind, still reading the one that was picked.
            of_sibling, of_child = 2 * step + 1, 2 * (step + 1)
            put(of_sibling, sibling, depth, next_rank, parent, above)
            put(of_child, child, depth + 1, 0, step + 1, best)

            is_slot, is_new = entry == picked, index == step + 1
            score = jnp.where(is_slot, sibling, jnp.where(is_new, child, score))
            place = jnp.where(place > at, place + 1, place)
            place = jnp.where(is_slot, at + 1, jnp.where(is_new, at, place))
            entry = jnp.where(is_slot, of_sibling, entry)  # a new slot's is that of its child
            return score, place, entry

        nowhere = plgpu.layout_cast(jnp.zeros(shape, jnp.int32), layout)
        start = jnp.where(index == 0, table_smem[0], WORST), nowhere, 2 * index
        lax.fori_loop(0, budget, pick, start)

        def store(i, _):
            words_ref[row, i] = bits[i]

        lax.fori_loop(0, (budget + 1) * words, store, None)

    fields = jax.ShapeDtypeStruct((b, budget), jnp.int32)
    rank, parent, depth, bits = plgpu.kernel(
        grow_tree_kernel,
        out_type=(*[fields] * 3, jax.ShapeDtypeStruct((b, (budget + 1) * words), jnp.int32)),
        grid=(b,),
        grid_names=("row",),
        num_threads=1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((table.shape[1],), jnp.int32),
            plgpu.SMEM((5 * 2 * size,), jnp.int32),
            plgpu.SMEM(((budget + 1) * words,), jnp.int32),
        ),
        interpret=interpret,
    )(table)
    bits = bits.reshape(b, budget + 1, words, 1) >> jnp.arange(32)
    ancestors = (bits & 1).reshape(b, budget + 1, -1)[..., : budget + 1] == 1
    return jnp.maximum(rank, 0), parent, depth, rank >= 0, ancestors
