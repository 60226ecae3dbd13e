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
from ddtree_jax import penalties, sampling
from ddtree_jax import tree as trees
from ddtree_jax.cache import Cache, Pending
from ddtree_jax.models import Models
from ddtree_jax.penalties import Counts
from ddtree_jax.sampling import GREEDY, Request, Sampler
from ddtree_jax.tree import Tree


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
        "counts",
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
    counts: the tokens of the text so far; None unless something is penalised.

    Between prefill and insertion the samples of a prompt share what they can: with n samples only
    bonus, emitted, done, request and counts.output_bv have n * b rows, prompt by prompt.
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
    counts: Counts | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "count", "done", "log_probs"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Emitted:
    """What a round emits: tokens int32 [b, p], of which the first `count` [b] count; `done` [b].

    log_probs: float32 [b, p] of the tokens in the target's own distribution, before any bias,
    penalty, temperature or filter; None unless asked for.
    """

    tokens: jax.Array
    count: jax.Array
    done: jax.Array
    log_probs: jax.Array | None = None


def empty_state(
    models: Models,
    batch: int,
    slots: int,
    stops: int,
    dtype,
    *,
    drafting: bool,
    biases: int = 0,
    penalised: bool = False,
    samples: int = 1,
) -> DecodeState:
    """A state of idle rows. `slots` bounds prompt plus output; `drafting` False is AR's state."""
    drafter = None
    if drafting:
        assert models.drafter is not None
        drafter = models.drafter.config

    def integers(rows=batch):
        return jnp.zeros((rows,), jnp.int32)

    rows = batch * samples

    return DecodeState(
        cache=caches.empty(models.target.config, batch, slots, dtype),
        draft_cache=caches.empty(drafter, batch, slots, dtype) if drafter else None,
        features=(
            jnp.zeros((batch, drafter.block_size, drafter.feature_size), dtype) if drafter else None
        ),
        feature_count=integers() if drafter else None,
        bonus=integers(rows),
        length=integers(),
        emitted=integers(rows),
        done=jnp.ones((rows,), bool),
        request=jax.tree.map(jnp.asarray, Request.idle(rows, stops, biases)),
        counts=(
            penalties.empty_counts(batch, samples, models.target.config.padded_vocab)
            if penalised
            else None
        ),
    )


def insert(
    state: DecodeState,
    prefilled: DecodeState,
    samples_r: jax.Array,
    slots_r: jax.Array,
    *,
    data_axis: str | None = None,
) -> DecodeState:
    """Puts samples of prefilled prompts into rows of the batch.

    Args:
      samples_r: int32, which samples of `prefilled`: prompt by prompt, see `DecodeState`.
      slots_r: int32, their rows; past the batch's end for none.
      data_axis: mesh axis over which all rows are split; the arguments count through all shards.
    """
    if data_axis is not None:
        # Each shard picks its own rows out of the whole group.
        prefilled = jax.tree.map(
            lambda part: jax.lax.all_gather(part, data_axis, axis=0, tiled=True), prefilled
        )
        local = state.done.shape[0]
        slots_r = slots_r - jax.lax.axis_index(data_axis) * local
        slots_r = jnp.where((slots_r >= 0) & (slots_r < local), slots_r, local)
    rows = prefilled.done.shape[0]
    several = rows // prefilled.length.shape[0]

    def put(whole, part):
        if several > 1:
            part = part[samples_r if part.shape[0] == rows else samples_r // several]
        return whole.at[slots_r].set(part, mode="drop")

    return jax.tree.map(put, state, prefilled)


def _spread(x: jax.Array, rows: int) -> jax.Array:
    """One row a prompt -> one row a sample."""
    return jnp.repeat(x, rows // x.shape[0], axis=0)


def _adjusted(
    models: Models,
    state: DecodeState,
    logits_bnv: jax.Array,
    depths_bn: jax.Array,
    paths_bnd: jax.Array,
    sampler: Sampler,
) -> jax.Array:
    """Logits with what the rows ask for before temperature and filters."""
    request, axis = state.request, models.target.axis
    if sampler.bias:
        logits_bnv = penalties.add_bias(logits_bnv, request.bias_ids, request.bias, axis)
    if sampler.penalties:
        assert state.counts is not None
        prompt_bv = _spread(state.counts.prompt_bv, logits_bnv.shape[0])
        logits_bnv = penalties.penalise(
            logits_bnv,
            dataclasses.replace(state.counts, prompt_bv=prompt_bv),
            paths_bnd,
            request.repetition,
            request.presence,
            request.frequency,
            axis,
        )
    if sampler.min_new_tokens:
        early = state.emitted[:, None] + depths_bn < request.min_new_tokens[:, None]
        logits_bnv = penalties.forbid(logits_bnv, request.stop_ids, early, axis)
    return logits_bnv


def _commit(models: Models, cache: Cache, pending: Pending, length_b, count_b, path_bp=None):
    return caches.commit(cache, pending, length_b, count_b, path_bp, kernels=models.kernels)


def _whole_tiles(models: Models, tree: Tree) -> Tree:
    """Kernels take any number of nodes, but pad most of them at a cost in every layer."""
    return trees.pad(tree, 8) if models.kernels.mosaic and tree.tokens.shape[1] > 8 else tree


def _choose(
    models: Models,
    state: DecodeState,
    hidden_bnd: jax.Array,
    depths_bn: jax.Array,
    paths_bnd: jax.Array,
    length_b: jax.Array,
    max_depth: int,
    sampler: Sampler,
) -> tuple[jax.Array, jax.Array | None]:
    """The target's choice after each node, and its log-probability where that is asked for.

    hidden_bnd: of the target's last norm; a row that several samples share is given once. A node's
    position is length_b + depth. paths_bnd: see `penalties.penalise`.
    """
    target, rows = models.target, depths_bn.shape[0]
    if sampler == GREEDY:  # only which logit is the largest matters
        best = target.best(hidden_bnd)
        return _spread(sampling.of_shards(*best, target.axis, target.gather), rows), None
    logits_bnv = _spread(target.logits(hidden_bnd), rows)
    choice = sampling.choose(
        _adjusted(models, state, logits_bnv, depths_bn, paths_bnd, sampler),
        depths_bn,
        length_b,
        max_depth,
        request=state.request,
        sampler=sampler,
        axis=target.axis,
        kernels=models.kernels,
        gather=target.gather,
    )
    return choice, penalties.log_probs(
        logits_bnv, choice, target.axis
    ) if sampler.log_probs else None


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
    models: Models,
    state: DecodeState,
    tokens_bp: jax.Array,
    log_probs_bp: jax.Array | None,
    count_b: jax.Array,
) -> tuple[DecodeState, Emitted]:
    """Emits the first `count_b` tokens, cut at a stop id or the limit; finished rows nothing."""
    count_b = jnp.where(state.done, 0, count_b)
    remaining = state.request.limit - state.emitted
    count, finished = sampling.stop_cut(tokens_bp, count_b, remaining, state.request.stop_ids)
    done = state.done | finished
    last = jnp.take_along_axis(tokens_bp, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    counts = state.counts
    if counts is not None:
        counts = penalties.count_output(counts, tokens_bp, count, models.target.axis)
    state = dataclasses.replace(
        state,
        bonus=jnp.where(count > 0, last, state.bonus),
        emitted=state.emitted + count,
        done=done,
        counts=counts,
    )
    return state, Emitted(tokens_bp, count, done, log_probs_bp)


def prefill_chunk(
    models: Models,
    state: DecodeState,
    tokens_bn: jax.Array,
    count_b: jax.Array,
    last_b: jax.Array,
    *,
    sampler: Sampler,
) -> tuple[DecodeState, Emitted]:
    """Commits the next `count_b` prompt tokens; rows at their last chunk emit the first token.

    Every sample of a prompt emits its own, from the one forward (see `DecodeState`). The features
    of every prompt token enter the drafter's context, whatever the chunk size.
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
    samples = state.done.shape[0]
    counts = state.counts
    if counts is not None:
        counts = penalties.count_prompt(counts, tokens_bn, count_b, models.target.axis)
        state = dataclasses.replace(state, counts=counts)
    # The last token's node is the root of a tree of its own, so its noise is found at depth 0.
    choice, log_probs = _choose(
        models,
        state,
        row,
        jnp.zeros((samples, 1), jnp.int32),
        jnp.zeros((samples, 1, 0), jnp.int32),
        _spread(length + end[:, 0], samples),
        0,
        sampler,
    )
    state, emitted = _emit(
        models, state, choice, log_probs, _spread(last_b.astype(jnp.int32), samples)
    )
    return dataclasses.replace(
        state,
        cache=_commit(models, state.cache, pending, length, count_b),
        draft_cache=draft_cache,
        length=length + count_b,
    ), emitted


def top2_gap(
    models: Models,
    state: DecodeState,
    tokens_bn: jax.Array,
    count_b: jax.Array,
    *,
    sampler: Sampler,
) -> tuple[DecodeState, jax.Array]:
    """How far the two best tokens [b] after the last of these lie apart, in units of logits.

    Sampled rows: of what they choose from, noise included; penalties are not asked for.
    """
    hidden, _, _ = verify(models, state, trees.chain(tokens_bn, count_b), count_b)
    last = jnp.take_along_axis(hidden, (count_b - 1)[:, None, None], axis=1)
    root = jnp.zeros((*count_b.shape, 1), jnp.int32)
    nothing = jnp.zeros((*root.shape, 0), jnp.int32)
    logits = _adjusted(models, state, models.target.logits(last), root, nothing, sampler)
    end = state.length + count_b - 1
    scores = sampling.chosen_from(logits, end, state.request, sampler, models.target.axis)
    best, _ = jax.lax.top_k(scores[:, 0], 2)
    if models.target.axis is not None:  # the two largest of all shards' two
        everyone = jax.lax.all_gather(best, models.target.axis, axis=1, tiled=True)
        best, _ = jax.lax.top_k(everyone, 2)
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


def head(
    models: Models,
    state: DecodeState,
    tree: Tree,
    verified: tuple[jax.Array, jax.Array, Pending],
    max_path: int,
    sampler: Sampler,
) -> tuple[jax.Array, jax.Array | None]:
    """The target's choice [b, n] after each node of a verified tree, and its log-probability."""
    with jax.named_scope("head"):
        return _choose(
            models,
            state,
            verified[0],
            tree.depths,
            trees.path_tokens(tree, max_path - 1),
            state.length,
            max_path - 1,
            sampler,
        )


def accept_and_commit(
    models: Models,
    state: DecodeState,
    tree: Tree,
    verified: tuple[jax.Array, jax.Array, Pending],
    chosen: tuple[jax.Array, jax.Array | None],
    max_path: int,
) -> tuple[DecodeState, Emitted]:
    """Emits the path of a verified tree and the next bonus token, and commits the path.

    `chosen`: what `head` returns.
    """
    _, features, pending = verified
    choice, log_probs = chosen
    with jax.named_scope("accept"):
        path, count = trees.accept(tree, choice, max_path)
        # Worked example: path [0, 4, 9, 0, ...] of count 3 emits the tokens of nodes 4 and 9, then
        # the choice at node 9. Each is the choice at the node before it, so: choice[path].
        tokens = jnp.take_along_axis(choice, path, axis=1)
        if log_probs is not None:
            log_probs = jnp.take_along_axis(log_probs, path, axis=1)
        length = state.length
        state, emitted = _emit(models, state, tokens, log_probs, count)
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
    models: Models, state: DecodeState, tree: Tree, max_path: int, sampler: Sampler
) -> tuple[DecodeState, Emitted]:
    tree = _whole_tiles(models, tree)
    verified = verify(models, state, tree)
    chosen = head(models, state, tree, verified, max_path, sampler)
    return accept_and_commit(models, state, tree, verified, chosen, max_path)


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
            logits_blv,
            ranks,
            axis=models.target.axis,
            stable=stable_top_k,
            gather=models.target.gather,
        )
        return trees.build(
            bonus_b,
            candidates,
            log_probs,
            budget,
            chain_seed=chain_seed,
            kernels=models.kernels,
        )


def ar_round(
    models: Models, state: DecodeState, *, sampler: Sampler
) -> tuple[DecodeState, Emitted]:
    """One token: a tree of one node."""
    return _finish(models, state, trees.chain(state.bonus[:, None]), 1, sampler)


def _draft_scores(
    models: Models, state: DecodeState, sampler: Sampler, draft_noise: bool
) -> tuple[jax.Array, Cache]:
    """The block's logits as the requests bend them, and the drafter's extended context.

    Nothing is known of a slot's path, so only the committed text is penalised. With `draft_noise`
    the rows at T > 0 are ranked with the target's noise; without, by the drafter's probabilities.
    """
    logits, draft_cache = draft(models, state)
    batch, slots = logits.shape[:2]
    depths = jnp.broadcast_to(jnp.arange(slots), (batch, slots))
    no_path = jnp.zeros((batch, slots, 0), jnp.int32)
    with jax.named_scope("draft_scores"):
        logits = _adjusted(models, state, logits, depths, no_path, sampler)
        if sampler.noise and draft_noise:
            assert models.drafter is not None
            logits = sampling.draft_scores(
                logits,
                state.length,
                request=state.request,
                sampler=sampler,
                noise_trust=models.drafter.config.noise_trust,
                axis=models.target.axis,
            )
    return logits, draft_cache


def chain_round(
    models: Models, state: DecodeState, *, sampler: Sampler, draft_noise: bool = True
) -> tuple[DecodeState, Emitted]:
    """DFlash: the drafter's best token of each slot, verified as a chain."""
    logits, draft_cache = _draft_scores(models, state, sampler, draft_noise)
    state = dataclasses.replace(state, draft_cache=draft_cache)
    tokens = sampling.argmax(logits, models.target.axis, models.target.gather)
    tree = trees.chain(jnp.concatenate([state.bonus[:, None], tokens], axis=1))
    return _finish(models, state, tree, tree.tokens.shape[1], sampler)


def tree_round(
    models: Models,
    state: DecodeState,
    *,
    budget: int,
    sampler: Sampler,
    chain_seed: bool = False,
    draft_noise: bool = True,
    stable_top_k: bool = True,
) -> tuple[DecodeState, Emitted]:
    """DDTree: the `budget` most probable prefixes of the drafter's block, verified as a tree."""
    assert models.drafter is not None
    logits, draft_cache = _draft_scores(models, state, sampler, draft_noise)
    state = dataclasses.replace(state, draft_cache=draft_cache)
    tree = grow_tree(
        models, state.bonus, logits, budget, chain_seed=chain_seed, stable_top_k=stable_top_k
    )
    return _finish(models, state, tree, models.drafter.config.block_size, sampler)
