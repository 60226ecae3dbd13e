"""The parts of a tree round, each measured as a program of its own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ddtree_jax import rounds
from ddtree_jax.commands.timing import milliseconds
from ddtree_jax.engine import Engine, Options
from ddtree_jax.models import Models
from ddtree_jax.models.recurrent import RecurrentLayer
from ddtree_jax.rounds import DecodeState
from ddtree_jax.sampling import GREEDY
from ddtree_jax.tree import Tree
from kernels_pallas.rows import total

# The parts that no weights hide: what a cheaper selection or tree could win.
OVERHEAD = ("tree", "accept and commit")


def stages(engine: Engine, options: Options, context: int, slots: int) -> dict[str, float]:
    """Milliseconds of the parts of a greedy tree round.

    "tree" is the selection over the vocabulary, log-sum-exp and the tree; "head" the choice after
    every node, from which "accept and commit" begins. Caches are donated, as in a round.
    """
    _, leaves, state = engine.round_at(options, context, slots)
    budget = options.tree_budget or 0
    assert engine.drafter is not None
    block = engine.drafter.block_size
    stable = jax.default_backend() == "cpu"

    def part(function, *, donate: bool = False) -> Callable:
        def program(leaves, *rest):
            return function(engine._merge(leaves), *rest)

        return jax.jit(program, donate_argnums=(1,) if donate else ())

    def draft_part(models, draft_cache, state):
        logits, draft_cache = rounds.draft(
            models, dataclasses.replace(state, draft_cache=draft_cache)
        )
        return draft_cache, logits

    def tree_part(models, bonus, logits):
        tree = rounds.grow_tree(models, bonus, logits, budget, stable_top_k=stable)
        return rounds._whole_tiles(models, tree)

    def head_part(models, state, tree, verified):
        return rounds.head(models, state, tree, verified, block, GREEDY)

    def accept_part(models, cache, state, tree, verified, chosen):
        state = dataclasses.replace(state, cache=cache)
        state, emitted = rounds.accept_and_commit(models, state, tree, verified, chosen, block)
        return state.cache, (emitted, state.length, state.features)

    draft, accept = part(draft_part, donate=True), part(accept_part, donate=True)
    grow, verify, head = part(tree_part), part(rounds.verify), part(head_part)
    # Donated caches pass from call to call; the rest of the state is given again each time.
    held = {"draft": state.draft_cache, "target": state.cache}
    bare = dataclasses.replace(state, draft_cache=None)

    def run_draft():
        held["draft"], logits = draft(leaves, held["draft"], bare)
        return logits

    logits = run_draft()
    tree = grow(leaves, state.bonus, logits)
    # A draft cache only says that features are wanted: verification does not read it.
    verified = verify(leaves, dataclasses.replace(state, draft_cache=held["draft"]), tree)
    laps = {
        "draft": milliseconds(run_draft),
        "tree": milliseconds(lambda: grow(leaves, state.bonus, logits)),
    }
    with_draft = dataclasses.replace(state, draft_cache=held["draft"])
    laps["verify"] = milliseconds(lambda: verify(leaves, with_draft, tree))
    laps["head"] = milliseconds(lambda: head(leaves, with_draft, tree, verified))
    if engine.target.delta is not None:
        recurrent = part(recurrent_part)
        laps["of verify: Gated DeltaNet"] = milliseconds(
            lambda: recurrent(leaves, with_draft, tree)
        )

    chosen = head(leaves, with_draft, tree, verified)
    nothing: Any = None
    bare = dataclasses.replace(with_draft, cache=nothing)

    def run_accept():
        held["target"], rest = accept(leaves, held["target"], bare, tree, verified, chosen)
        return rest

    laps["accept and commit"] = milliseconds(run_accept)
    laps["tree + accept and commit"] = sum(laps[name] for name in OVERHEAD)
    return laps


def recurrent_part(models: Models, state: DecodeState, tree: Tree) -> tuple[jax.Array, list]:
    """The Gated DeltaNet of all recurrent layers in a row, projections included."""
    target, pending = models.target, []
    paths = target.paths(tree.ancestors, tree.depths, tree.max_depth, None)
    x = target.embed(tree.tokens)
    layers = [layer for layer in target.layers if isinstance(layer, RecurrentLayer)]
    for layer, carried in zip(layers, state.cache.recurrent, strict=True):
        parts, nodes = layer.delta(layer.input_norm(x), carried, paths)
        x = x + total(parts, x.dtype).reshape(x.shape)
        pending.append(nodes)
    return x, pending
