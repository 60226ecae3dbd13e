"""Draft trees: built best first (DDTree, arXiv 2604.12989), verified, accepted; all on the device.

A tree has a static number of nodes N = budget + 1. Node 0, the root, is the last committed token
(the bonus token). Nodes are in topological order: a parent comes before its children.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kernels_pallas.dispatch import REFERENCE, Kernels

SCORE_SCALE = 2.0**20
MAX_DEPTH = 31  # so that the summed score of a path fits an int32
_SCORE_FLOOR = -(2**26)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "parents", "depths", "ancestors", "valid"],
    meta_fields=["max_depth"],
)
@dataclasses.dataclass(frozen=True)
class Tree:
    """One tree per batch row.

    tokens, parents (-1 for the root), depths (root 0): int32 [b, n]. ancestors: bool [b, n, n],
    [i, j] is whether j is i or an ancestor of i. valid: bool [b, n]; an invalid node is nobody's
    ancestor but its own. max_depth: no node is deeper; None where only the number of nodes
    bounds it.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    ancestors: jax.Array
    valid: jax.Array
    max_depth: int | None = None


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


def build(
    root_b: jax.Array,
    candidates_blr: jax.Array,
    log_probs_blr: jax.Array,
    budget: int,
    *,
    chain_seed: bool = False,
    kernels: Kernels = REFERENCE,
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
    scores = quantise(log_probs_blr[..., :ranks])
    rank, parents, depths, live, ancestors = kernels.grow(scores, budget, chain_seed=chain_seed)
    slot = jnp.maximum(depths - 1, 0) * ranks + rank
    flat = candidates_blr[..., :ranks].reshape(b, levels * ranks)
    tokens = jnp.take_along_axis(flat, jnp.where(live, slot, 0), axis=1)

    def with_root(root, rest):
        return jnp.concatenate([jnp.broadcast_to(root, (b,))[:, None], rest], axis=1)

    return Tree(
        with_root(root_b, tokens),
        with_root(jnp.int32(-1), parents),
        with_root(jnp.int32(0), depths),
        ancestors,
        with_root(jnp.bool_(True), live),
        levels,
    )


def pad(tree: Tree, multiple: int) -> Tree:
    """The tree with invalid nodes up to a multiple: kernels like whole tiles of rows."""
    n = tree.tokens.shape[1]
    more = -n % multiple
    if not more:
        return tree

    def widen(x: jax.Array, value=0) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, more)], constant_values=value)

    own = jnp.eye(n + more, dtype=bool)[n:]
    ancestors = jnp.pad(tree.ancestors, [(0, 0), (0, more), (0, more)]).at[:, n:].set(own)
    return Tree(
        widen(tree.tokens),
        widen(tree.parents),
        widen(tree.depths),
        ancestors,
        widen(tree.valid, False),
        tree.max_depth,
    )


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
