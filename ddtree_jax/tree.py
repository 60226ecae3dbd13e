"""Draft trees: built best first (DDTree, arXiv 2604.12989), verified, accepted; all on the device.

A tree has a static number of nodes N = budget + 1. Node 0, the root, is the last committed token
(the bonus token). Nodes are in topological order: a parent comes before its children.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SCORE_SCALE = 2.0**20
MAX_DEPTH = 31  # so that the summed score of a path fits an int32
_SCORE_FLOOR = -(2**26)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "parents", "depths", "ancestors", "valid"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Tree:
    """One tree per batch row.

    tokens, parents (-1 for the root), depths (root 0): int32 [b, n]. ancestors: bool [b, n, n],
    [i, j] is whether j is i or an ancestor of i. valid: bool [b, n]; an invalid node is nobody's
    ancestor but its own.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    ancestors: jax.Array
    valid: jax.Array


def chain(tokens_bn: jax.Array, count_b: jax.Array | None = None) -> Tree:
    """The tree with one branch; nodes from `count_b` on are invalid padding."""
    b, n = tokens_bn.shape
    index = jnp.broadcast_to(jnp.arange(n), (b, n))
    valid = jnp.ones((b, n), bool) if count_b is None else index < count_b[:, None]
    causal = index[:, :, None] >= index[:, None, :]
    return Tree(tokens_bn, index - 1, index, causal, valid)


def quantise(log_probs: jax.Array) -> jax.Array:
    """Scores as int32 in units of 2^-20 nats, so that sums are exact and ties well defined.

    With rounded sums, two different paths can tie or swap by accident, and devices could disagree.
    Anything below -64 nats counts as -64.
    """
    scaled = jnp.round(jnp.clip(log_probs, -64.0, 0.0) * SCORE_SCALE)
    return jnp.maximum(scaled.astype(jnp.int32), _SCORE_FLOOR)


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


def build(
    root_b: jax.Array,
    candidates_blr: jax.Array,
    log_probs_blr: jax.Array,
    budget: int,
    *,
    chain_seed: bool = False,
) -> Tree:
    """The `budget` prefixes of highest summed log-probability, as the DDTree heap picks them.

    Args:
      root_b: the bonus token of each row.
      candidates_blr: candidate tokens of each slot (depth 1..l), best first. r must be at least
        min(budget, vocabulary), or the set could miss a node.
      log_probs_blr: float32 scores of the candidates, <= 0 and descending along r.
      budget: nodes beside the root.
      chain_seed: take the drafter's best chain first, whatever its score.

    Order and ties: by score (quantised, see `quantise`), then by the tuple of ranks, so that a
    parent always comes before its child.
    """
    b, levels, ranks = candidates_blr.shape
    if levels > MAX_DEPTH:
        raise ValueError(f"trees of depth {levels} are not supported; at most {MAX_DEPTH}")
    ranks = min(ranks, budget)
    grow = functools.partial(_build_row, budget=budget, chain_seed=chain_seed)
    rank, parents, depths, live = jax.vmap(grow)(quantise(log_probs_blr[..., :ranks]))
    slot = jnp.maximum(depths - 1, 0) * ranks + rank
    flat = candidates_blr[..., :ranks].reshape(b, levels * ranks)
    tokens = jnp.take_along_axis(flat, jnp.where(live, slot, 0), axis=1)

    def with_root(root, rest):
        return jnp.concatenate([jnp.broadcast_to(root, (b,))[:, None], rest], axis=1)

    parents = with_root(jnp.int32(-1), parents)
    valid = with_root(jnp.bool_(True), live)
    return Tree(
        with_root(root_b, tokens),
        parents,
        with_root(jnp.int32(0), depths),
        ancestor_matrix(jnp.where(valid, parents, -1), levels),
        valid,
    )


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


def path_tokens(tree: Tree, max_depth: int) -> jax.Array:
    """int32 [b, n, max_depth]: the tokens of each node's path behind the root, then -1."""
    depths = jnp.arange(1, max_depth + 1)
    on_path = tree.ancestors[:, :, None, :] & (tree.depths[:, None, None, :] == depths[:, None])
    node = jnp.argmax(on_path, axis=3)
    tokens = jax.vmap(lambda tokens_n, node_nd: tokens_n[node_nd])(tree.tokens, node)
    return jnp.where(on_path.any(axis=3), tokens, -1)


def accept(tree: Tree, choice_bn: jax.Array, max_path: int) -> tuple[jax.Array, jax.Array]:
    """The path that the target's own choices follow.

    Args:
      tree: the verified tree.
      choice_bn: the token that the target chooses after each node.
      max_path: length of the returned path, at least the deepest depth + 1.

    Returns:
      path [b, max_path], node indices from the root on, 0 past the end; and its length [b],
      between 1 (nothing accepted) and max_path. The tokens emitted are those of path[1:length],
      then the choice at path[length - 1].
    """
    parents = jnp.maximum(tree.parents, 0)
    followed = tree.tokens == jnp.take_along_axis(choice_bn, parents, axis=1)
    followed = tree.valid & (followed | (tree.parents < 0))
    accepted = jnp.all(followed[:, None, :] | ~tree.ancestors, axis=2)
    on_path = accepted[:, None, :] & (tree.depths[:, None, :] == jnp.arange(max_path)[:, None])
    return jnp.argmax(on_path, axis=2), on_path.any(axis=2).sum(axis=1, dtype=jnp.int32)
