"""The programs of decoding, as pure functions of (models, state): prefill, and one round per mode.

A round drafts, verifies, accepts and commits; nothing in it returns to the host. Rows of a batch
are independent: each has its own length, tree, noise and end. A finished row commits and emits
nothing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ddtree_jax import cache as caches
from ddtree_jax import sampling
from ddtree_jax import tree as trees
from ddtree_jax.cache import Cache, Pending
from ddtree_jax.models import Models
from ddtree_jax.tree import Tree


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["limit", "stop_ids", "temperature", "seed", "sample"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Request:
    """What each row asks for, [b] each.

    limit: tokens to emit at most, int32. stop_ids: int32 [b, stops], -1 where unused.
    temperature: float32, 0 is greedy. seed, sample: uint32, see sampling.py.
    """

    limit: jax.Array
    stop_ids: jax.Array
    temperature: jax.Array
    seed: jax.Array
    sample: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "cache",
        "draft_cache",
        "features",
        "feature_count",
        "bonus",
        "length",
        "emitted",
        "done",
        "request",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """All that decoding carries from round to round; b rows.

    cache: the target's committed K/V, of which the first `length` slots are real, and the states of
      its recurrent layers.
    draft_cache: the drafter's context K/V, `feature_count` rows behind the target's; None in AR.
    features: [b, p, F * d] target features of the last committed rows, the first `feature_count` of
      them real; the next draft appends them to its context. None in AR.
    bonus: int32 [b], the last emitted token; the target has not seen it yet.
    length: int32 [b], committed tokens (prompt and output without the bonus token).
    emitted: int32 [b], tokens emitted so far, the prefill's included.
    done: bool [b].
    """

    cache: Cache
    draft_cache: Cache | None
    features: jax.Array | None
    feature_count: jax.Array | None
    bonus: jax.Array
    length: jax.Array
    emitted: jax.Array
    done: jax.Array
    request: Request


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "count", "done"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Emitted:
    """What a round emits: tokens int32 [b, p], of which the first `count` [b] count; `done` [b]."""

    tokens: jax.Array
    count: jax.Array
    done: jax.Array


def empty_state(
    models: Models, batch: int, slots: int, stops: int, dtype, *, drafting: bool
) -> DecodeState:
    """A state of idle rows. `slots` bounds prompt plus output; `drafting` False is AR's state."""
    drafter = None
    if drafting:
        assert models.drafter is not None
        drafter = models.drafter.config

    def integers(dtype=jnp.int32):
        return jnp.zeros((batch,), dtype)

    return DecodeState(
        cache=caches.empty(models.target.config, batch, slots, dtype),
        draft_cache=caches.empty(drafter, batch, slots, dtype) if drafter else None,
        features=(
            jnp.zeros((batch, drafter.block_size, drafter.feature_size), dtype) if drafter else None
        ),
        feature_count=integers() if drafter else None,
        bonus=integers(),
        length=integers(),
        emitted=integers(),
        done=jnp.ones((batch,), bool),
        request=Request(
            limit=integers(),
            stop_ids=jnp.full((batch, stops), -1, jnp.int32),
            temperature=jnp.zeros((batch,), jnp.float32),
            seed=integers(jnp.uint32),
            sample=integers(jnp.uint32),
        ),
    )


def insert(state: DecodeState, rows: DecodeState, slots: jax.Array) -> DecodeState:
    """Puts prefilled rows into the batch; slots int32 [rows], past the batch's end for none."""
    return jax.tree.map(lambda whole, part: whole.at[slots].set(part, mode="drop"), state, rows)


def _commit(models: Models, cache: Cache, pending: Pending, length_b, count_b, path_bp=None):
    return caches.commit(cache, pending, length_b, count_b, path_bp, kernels=models.kernels)


def _whole_tiles(models: Models, tree: Tree) -> Tree:
    """Kernels take any number of nodes, but pad most of them at a cost in every layer."""
    return trees.pad(tree, 8) if models.kernels.mosaic and tree.tokens.shape[1] > 8 else tree


def _choose(
    models: Models, state: DecodeState, hidden_bnd, depths_bn, length_b, max_depth: int, sampled
) -> jax.Array:
    """The target's choice after each node; a node's position is length_b + depth."""
    request = state.request
    return sampling.choose(
        models.target.logits(hidden_bnd),
        depths_bn,
        length_b,
        max_depth,
        temperature_b=request.temperature,
        seed_b=request.seed,
        sample_b=request.sample,
        sampled=sampled,
        axis=models.target.axis,
    )


def verify(
    models: Models, state: DecodeState, tree: Tree, count_b: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, Pending]:
    """The one target forward: hidden, features and what is pending of the tree's nodes.

    `count_b` is given for a chain whose first rows will be committed whatever the target says.
    """
    drafter = models.drafter if state.draft_cache is not None else None
    layers = drafter.config.target_layer_ids if drafter is not None else ()
    with jax.named_scope("verify"):
        return models.target(
            state.cache,
            tree.tokens,
            tree.depths,
            tree.ancestors,
            state.length,
            layers,
            max_depth=tree.max_depth,
            count_b=count_b,
        )


def _emit(
    state: DecodeState, tokens_bp: jax.Array, count_b: jax.Array
) -> tuple[DecodeState, Emitted]:
    """Emits the first `count_b` tokens, cut at a stop id or the limit; finished rows nothing."""
    count_b = jnp.where(state.done, 0, count_b)
    remaining = state.request.limit - state.emitted
    count, finished = sampling.stop_cut(tokens_bp, count_b, remaining, state.request.stop_ids)
    done = state.done | finished
    last = jnp.take_along_axis(tokens_bp, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    state = dataclasses.replace(
        state,
        bonus=jnp.where(count > 0, last, state.bonus),
        emitted=state.emitted + count,
        done=done,
    )
    return state, Emitted(tokens_bp, count, done)


def prefill_chunk(
    models: Models,
    state: DecodeState,
    tokens_bn: jax.Array,
    count_b: jax.Array,
    last_b: jax.Array,
    *,
    sampled: bool,
) -> tuple[DecodeState, Emitted]:
    """Commits the next `count_b` prompt tokens; rows at their last chunk emit the first token.

    The features of every prompt token enter the drafter's context, whatever the chunk size.
    """
    tree = trees.chain(tokens_bn, count_b)
    state = dataclasses.replace(state, cache=caches.begin(state.cache, state.length))
    hidden, features, pending = verify(models, state, tree, count_b)
    draft_cache = state.draft_cache
    if draft_cache is not None:
        assert models.drafter is not None
        _, draft_pending = models.drafter(draft_cache, state.length, features, count_b, None)
        draft_cache = _commit(models, draft_cache, draft_pending, state.length, count_b)
    end = jnp.maximum(count_b - 1, 0)[:, None]
    row = jnp.take_along_axis(hidden, end[:, :, None], axis=1)
    length = state.length
    # The last token's node is the root of a tree of its own, so its noise is found at depth 0.
    choice = _choose(models, state, row, jnp.zeros_like(end), length + end[:, 0], 0, sampled)
    state, emitted = _emit(state, choice, last_b.astype(jnp.int32))
    return dataclasses.replace(
        state,
        cache=_commit(models, state.cache, pending, length, count_b),
        draft_cache=draft_cache,
        length=length + count_b,
    ), emitted


def top2_gap(
    models: Models, state: DecodeState, tokens_bn: jax.Array, count_b: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """How far the two largest logits [b] after the last of these tokens lie apart."""
    hidden, _, _ = verify(models, state, trees.chain(tokens_bn, count_b), count_b)
    last = jnp.take_along_axis(hidden, (count_b - 1)[:, None, None], axis=1)
    best, _ = jax.lax.top_k(models.target.logits(last)[:, 0], 2)
    return state, best[:, 0] - best[:, 1]


def draft(models: Models, state: DecodeState) -> tuple[jax.Array, Cache]:
    """float32 logits [b, block - 1, v] of the masked slots, and the drafter's extended context."""
    assert models.drafter is not None
    assert state.draft_cache is not None
    assert state.features is not None
    assert state.feature_count is not None
    config = models.drafter.config
    with jax.named_scope("draft"):
        batch = state.bonus.shape[0]
        masks = jnp.full((batch, config.block_size - 1), config.mask_token_id, jnp.int32)
        block = models.target.embed(jnp.concatenate([state.bonus[:, None], masks], axis=1))
        start = state.length - state.feature_count
        hidden, pending = models.drafter(
            state.draft_cache, start, state.features, state.feature_count, block
        )
        assert hidden is not None  # a block was given
        draft_cache = _commit(models, state.draft_cache, pending, start, state.feature_count)
        return models.target.logits(hidden[:, 1:]), draft_cache


def accept_and_commit(
    models: Models, state: DecodeState, tree: Tree, verified, max_path: int, sampled: bool
) -> tuple[DecodeState, Emitted]:
    """Emits the path of a verified tree and the next bonus token, and commits the path."""
    hidden, features, pending = verified
    with jax.named_scope("accept"):
        choice = _choose(models, state, hidden, tree.depths, state.length, max_path - 1, sampled)
        path, count = trees.accept(tree, choice, max_path)
        # Worked example: path [0, 4, 9, 0, ...] of count 3 emits the tokens of nodes 4 and 9, then
        # the choice at node 9. Each is the choice at the node before it, so: choice[path].
        tokens = jnp.take_along_axis(choice, path, axis=1)
        length = state.length
        state, emitted = _emit(state, tokens, count)
    with jax.named_scope("commit"):
        # One committed row per emitted token: the root and the accepted nodes.
        committed = emitted.count
        cache = _commit(models, state.cache, pending, length, committed, path)
        state = dataclasses.replace(state, cache=cache, length=length + committed)
        if state.draft_cache is not None:
            rows = jnp.take_along_axis(features, path[:, :, None], axis=1)
            state = dataclasses.replace(state, features=rows, feature_count=committed)
        return state, emitted


def _finish(
    models: Models, state: DecodeState, tree: Tree, max_path: int, sampled: bool
) -> tuple[DecodeState, Emitted]:
    tree = _whole_tiles(models, tree)
    verified = verify(models, state, tree)
    return accept_and_commit(models, state, tree, verified, max_path, sampled)


def grow_tree(
    models: Models,
    bonus_b: jax.Array,
    logits_blv: jax.Array,
    budget: int,
    *,
    chain_seed: bool = False,
    stable_top_k: bool = True,
) -> Tree:
    """The draft tree of a block's logits."""
    with jax.named_scope("tree"):
        ranks = min(budget, models.target.config.vocab_size)
        candidates, log_probs = sampling.draft_candidates(
            logits_blv, ranks, axis=models.target.axis, stable=stable_top_k
        )
        return trees.build(
            bonus_b,
            candidates,
            log_probs,
            budget,
            chain_seed=chain_seed,
            kernels=models.kernels,
        )


def ar_round(models: Models, state: DecodeState, *, sampled: bool) -> tuple[DecodeState, Emitted]:
    """One token: a tree of one node."""
    return _finish(models, state, trees.chain(state.bonus[:, None]), 1, sampled)


def chain_round(
    models: Models, state: DecodeState, *, sampled: bool
) -> tuple[DecodeState, Emitted]:
    """DFlash: the drafter's best token of each slot, verified as a chain."""
    logits, draft_cache = draft(models, state)
    state = dataclasses.replace(state, draft_cache=draft_cache)
    tokens = sampling.argmax(logits, models.target.axis)
    tree = trees.chain(jnp.concatenate([state.bonus[:, None], tokens], axis=1))
    return _finish(models, state, tree, tree.tokens.shape[1], sampled)


def tree_round(
    models: Models,
    state: DecodeState,
    *,
    budget: int,
    sampled: bool,
    chain_seed: bool = False,
    stable_top_k: bool = True,
) -> tuple[DecodeState, Emitted]:
    """DDTree: the `budget` most probable prefixes of the drafter's block, verified as a tree."""
    assert models.drafter is not None
    logits, draft_cache = draft(models, state)
    state = dataclasses.replace(state, draft_cache=draft_cache)
    tree = grow_tree(
        models, state.bonus, logits, budget, chain_seed=chain_seed, stable_top_k=stable_top_k
    )
    return _finish(models, state, tree, models.drafter.config.block_size, sampled)
