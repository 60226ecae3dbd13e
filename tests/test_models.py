"""Target and drafter: parity with PyTorch's numbers, trees against chains, chunked prefill."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairs import PAIRS, filled, golden, jitted, models, modules, random_weights, rarely

from ddtree_jax import cache as caches
from ddtree_jax import rounds, sampling
from ddtree_jax import tree as trees
from ddtree_jax.models import Drafter, Target
from kernels_pallas import draft_tree, tree_attention

TOLERANCE = 1e-5  # of the largest number of a tensor
SLOTS = 48


def close(got, wanted, tolerance=TOLERANCE):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def far(got, wanted):
    """Clearly another answer, so that the parity tests could have told."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert np.abs(got - wanted).max() > 1e-2 * np.abs(wanted).max()


def row(ids):
    return jnp.asarray(np.asarray(ids), jnp.int32)[None]


# Parity with the PyTorch modules.


@functools.cache
def target_outputs(name):
    """(logits, features of every layer) of the golden prompt, in one forward."""
    pair = models(name)
    ids = row(modules(name)["prompt_ids"])
    layers = tuple(range(pair.target.config.num_layers))

    def forward(pair, ids):
        cache = caches.empty(pair.target.config, 1, SLOTS, jnp.float32)
        tree = trees.chain(ids)
        hidden, features, _ = pair.target(
            cache, tree.tokens, tree.depths, tree.ancestors, jnp.zeros(1, jnp.int32), layers
        )
        return pair.target.logits(hidden)[0], features[0]

    return jitted(pair, forward)(ids)


@pytest.mark.parametrize("name", PAIRS)
def test_target_logits_at_every_position(name):
    config, (logits, _) = models(name).target.config, target_outputs(name)
    close(logits[:, : config.vocab_size], modules(name)["target_logits"])
    assert (np.asarray(logits)[:, config.vocab_size :] == -np.inf).all()


@pytest.mark.parametrize("name", PAIRS)
def test_target_hidden_states_of_every_layer(name):
    """The feature of layer l is its output; the neighbours would be clearly other numbers."""
    config, (_, features) = models(name).target.config, target_outputs(name)
    layers = np.split(np.asarray(features), config.num_layers, axis=-1)
    for index, layer in enumerate(layers):
        wanted = modules(name)[f"target_hidden.{index}"]
        close(layer, wanted)
        for other in {index - 1, index + 1} & set(range(config.num_layers)):
            far(layers[other], wanted)


@pytest.mark.parametrize("name", PAIRS)
def test_features_stand_in_the_order_of_the_drafters_configuration(name):
    pair = models(name)
    layers = np.split(np.asarray(target_outputs(name)[1]), pair.target.config.num_layers, axis=-1)
    taps = [layers[layer] for layer in pair.drafter.config.target_layer_ids]
    close(np.concatenate(taps, axis=-1), modules(name)["draft_context"])


def draft(name, split, *, config=None, shift=0, all_masks=False):
    """The drafter's first block; the first `split` context rows come from its cache."""
    pair = models(name)
    context = jnp.asarray(modules(name)["draft_context"])[None]
    rows_left = context.shape[1] - split
    # Newest rows lie in a wider buffer, as in a round; what pads it must not matter.
    newest = jnp.pad(context[:, split:], ((0, 0), (0, 5), (0, 0)), constant_values=1e4)
    ids = row(modules(name)["draft_block_ids"])
    if all_masks:
        ids = jnp.full_like(ids, pair.drafter.config.mask_token_id)

    def forward(pair, context, newest, ids):
        drafter = pair.drafter
        if config is not None:
            drafter.config = config
        start = jnp.full(1, shift, jnp.int32)
        cache = caches.empty(drafter.config, 1, SLOTS, jnp.float32)
        if split:
            count = jnp.full(1, split, jnp.int32)
            _, pending = drafter(cache, start, context[:, :split], count, None)
            cache = caches.commit(cache, pending, start, count)
        count = jnp.full(1, rows_left, jnp.int32)
        hidden, _ = drafter(cache, start + split, newest, count, pair.target.embed(ids))
        return hidden[0], pair.target.logits(hidden[:, 1:])[0]

    return jitted(pair, forward)(context, newest, ids)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("split", [0, 1, 9])
def test_drafter_block(name, split):
    hidden, logits = draft(name, split)
    close(hidden, modules(name)["draft_hidden"])
    vocab = models(name).target.config.vocab_size
    close(logits[:, :vocab], modules(name)["draft_logits"])


@pytest.mark.parametrize("name", ["swa_causal", "swa_bidir", "causal_full"])
def test_other_drafter_masks_give_other_answers(name):
    config = models(name).drafter.config
    flipped = tuple(not causal for causal in config.causal_block)
    wanted = modules(name)["draft_hidden"]
    far(draft(name, 9, config=dataclasses.replace(config, causal_block=flipped))[0], wanted)
    far(draft(name, 9, all_masks=True)[0], wanted)
    if any(config.windows):
        for change in (-1, 1):
            windows = tuple(w and w + change for w in config.windows)
            moved, _ = draft(name, 9, config=dataclasses.replace(config, windows=windows))
            difference = np.abs(np.asarray(moved) - wanted).max()
            assert difference > 100 * TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize("name", ["qwen3_gqa", "swa_bidir"])
def test_context_without_a_block_is_the_same_context(name):
    pair = models(name)
    features = jnp.asarray(modules(name)["draft_context"])[None]
    ids = row(modules(name)["draft_block_ids"])

    def forward(pair, features, ids):
        cache = caches.empty(pair.drafter.config, 1, SLOTS, jnp.float32)
        start, count = jnp.full(1, 3, jnp.int32), jnp.full(1, 11, jnp.int32)
        with_block = pair.drafter(cache, start, features, count, pair.target.embed(ids))
        without = pair.drafter(cache, start, features, count, None)
        assert without[0] is None
        return with_block[1], without[1]

    first, second = jitted(pair, forward)(features, ids)
    for got, wanted in zip(jax.tree.leaves(second), jax.tree.leaves(first), strict=True):
        close(got, wanted, 1e-6)


# Trees against chains.

PREFIX, NODES, DEEPEST = 9, 14, 5
FULL = (None, None, None, None)


def target_for(kind):
    """Random weights over a golden configuration, where every head and layer matters."""
    config = models("llama_gqa3" if kind == "gqa" else "qwen3_tied").target.config
    windows = {"gqa": FULL, "tied": FULL, "window": (None, 4, 2, 11)}[kind]
    config = dataclasses.replace(config, windows=windows)
    target = filled(Target, config, values=random_weights(5))
    # Siblings with large values, which no mask can blend in unseen.
    target.embed_vd[...] = target.embed_vd[...].at[::3].multiply(20)
    return target


def random_tree(seed):
    generator = np.random.default_rng(seed)
    parents, depths = [-1], [0]
    for node in range(1, NODES):
        options = [i for i in range(node) if depths[i] < DEEPEST]
        parents.append(int(generator.choice(options)))
        depths.append(depths[parents[-1]] + 1)
    tokens = generator.permutation(96)[:NODES]
    return np.array(parents), np.array(depths), tokens, generator.permutation(96)[:PREFIX]


def forward_prefix(target, prefix):
    cache = caches.empty(target.config, 1, 16, jnp.float32)
    tree, start = trees.chain(prefix), jnp.zeros(1, jnp.int32)
    _, _, pending = target(cache, tree.tokens, tree.depths, tree.ancestors, start)
    return caches.commit(cache, pending, start, jnp.full(1, PREFIX, jnp.int32))


def run_nodes(target, prefix, tokens, depths, ancestors):
    cache, layers = forward_prefix(target, prefix), (0, 2)
    length = jnp.full(1, PREFIX, jnp.int32)
    hidden, features, pending = target(cache, tokens, depths, ancestors, length, layers)
    return hidden[0], features[0], [part[0] for part in jax.tree.leaves(pending)]


@pytest.mark.parametrize("kind", ["gqa", rarely("tied"), rarely("window")])
def test_tree_is_all_its_paths(kind):
    run = jitted(target_for(kind), run_nodes)
    causal = trees.chain(jnp.zeros((1, DEEPEST + 1), jnp.int32))
    for seed in range(3):
        parents, depths, tokens, prefix = random_tree(seed)
        ancestors = draft_tree.ancestor_matrix(jnp.asarray(parents)[None], DEEPEST)
        got = run(row(prefix), row(tokens), row(depths), ancestors)
        slots = run(row(prefix), row(tokens), row(np.arange(NODES)), ancestors)
        seen, moved = set(), 0
        for leaf in set(range(NODES)) - set(parents.tolist()):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, int(parents[path[0]]))
            padded = np.zeros(DEEPEST + 1, int)
            padded[: len(path)] = tokens[path]
            wanted = run(row(prefix), row(padded), causal.depths, causal.ancestors)
            for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
                for node, line in zip(path, theirs, strict=False):
                    close(ours[node], line, 3e-5)
            # Positions by slot rather than by depth: another answer wherever the two differ.
            place = [n for n, node in enumerate(path) if depths[node] != node]
            for n in place:
                difference = np.abs(slots[0][path[n]] - wanted[0][n]).max()
                moved += difference > 1e-3 * np.abs(wanted[0][n]).max()
            seen |= set(path)
        assert seen == set(range(NODES))
        assert moved > NODES // 2


@pytest.mark.parametrize("window", [rarely(1), rarely(4), 9])
def test_window_counts_positions_the_query_included(window):
    """A windowed target in two steps against full attention under an explicit banded mask."""
    target = target_for("gqa")
    tokens = np.random.default_rng(3).permutation(96)[: PREFIX + DEEPEST + 1]
    place = np.arange(len(tokens))
    band = (place[:, None] >= place) & (place[:, None] - place < window)

    def banded(target, tokens, band):
        cache, zero = caches.empty(target.config, 1, 16, jnp.float32), jnp.zeros(1, jnp.int32)
        return target(cache, tokens, row(place), band, zero)[0][0, PREFIX:]

    wanted = jitted(target, banded)(row(tokens), jnp.asarray(band)[None])
    target.config = dataclasses.replace(target.config, windows=(window,) * 4)
    chain = trees.chain(row(tokens[PREFIX:]))
    run = jitted(target, run_nodes)
    got, _, _ = run(row(tokens[:PREFIX]), chain.tokens, chain.depths, chain.ancestors)
    close(got, wanted, 3e-5)


def test_cache_is_only_read_below_the_length():
    """What lies in slots past the committed rows never matters."""
    target = target_for("window")
    _, depths, tokens, prefix = random_tree(0)
    ancestors = draft_tree.ancestor_matrix(jnp.asarray(random_tree(0)[0])[None], DEEPEST)

    def both(target, prefix, tokens, depths, ancestors):
        cache, length = forward_prefix(target, prefix), jnp.full(1, PREFIX, jnp.int32)
        soiled = jax.tree.map(lambda part: part.at[:, :, PREFIX:].set(1e20), cache)
        return [target(each, tokens, depths, ancestors, length)[0] for each in (cache, soiled)]

    clean, soiled = jitted(target, both)(row(prefix), row(tokens), row(depths), ancestors)
    np.testing.assert_array_equal(clean, soiled)


# The cache.


def drafting_flops(slots, windows):
    """Of one draft with a cache of so many slots, before any optimisation."""
    config = models("swa_causal").drafter.config
    config = dataclasses.replace(config, windows=windows, causal_block=(True,) * len(windows))
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))
    cache = jax.eval_shape(lambda: caches.empty(config, 1, slots, jnp.float32))

    def draft(state, cache, features, block, length):
        return nnx.merge(graphdef, state)(cache, length, features, length, block)

    count = jax.ShapeDtypeStruct((1,), jnp.int32)
    features = jax.ShapeDtypeStruct((1, 8, config.feature_size), jnp.float32)
    block = jax.ShapeDtypeStruct((1, 8, config.hidden_size), jnp.float32)
    return jax.jit(draft).lower(state, cache, features, block, count).cost_analysis()["flops"]


def test_sliding_layers_cost_the_same_at_any_context():
    assert drafting_flops(256, (12,) * 3) == drafting_flops(4096, (12,) * 3)
    assert drafting_flops(256, (None,) * 3) < drafting_flops(4096, (None,) * 3) / 8


@pytest.mark.parametrize("length", [0, 3, 5, 6, 11, 16])
def test_last_slots_are_those_that_the_window_sees(length):
    """Slot numbers as K/V: the row of the first query and of a later one."""
    window, slots = 5, 16
    numbers = jnp.arange(slots, dtype=jnp.float32)[None, None, :, None]
    queries = length + jnp.arange(3)[None]
    lower = jnp.maximum(queries - window + 1, 0)
    (k, v), near, count = tree_attention.last_slots(
        (numbers, -numbers), lower, jnp.full(1, length, jnp.int32), window
    )
    assert k.shape == v.shape == (1, 1, window, 1)
    np.testing.assert_array_equal(k, -v)
    for query in range(3):
        seen = [int(k[0, 0, i, 0]) for i in range(int(near[0, query]), int(count[0]))]
        assert seen == list(range(int(lower[0, query]), length))


def test_commit_takes_the_path_and_never_touches_committed_rows():
    generator = np.random.default_rng(0)
    slots, count, length = 8, np.array([3, 0, 2, 3]), np.array([2, 4, 7, 8])
    before = generator.standard_normal((4, 2, slots, 4)).astype(np.float32)
    rows_new = generator.standard_normal((4, 5, 2, 4)).astype(np.float32)
    path = np.array([[0, 2, 4], [0, 1, 2], [0, 3, 0], [0, 1, 2]])
    for chosen in (path, None):
        got = caches.commit(
            caches.Cache((jnp.asarray(before),), (jnp.asarray(-before),)),
            caches.Pending((jnp.asarray(np.stack([rows_new, -rows_new], axis=3)),)),
            jnp.asarray(length),
            jnp.asarray(count),
            None if chosen is None else jnp.asarray(chosen),
        )
        wanted = before.copy()
        for batch in range(4):
            for i in range(count[batch]):
                node = i if chosen is None else chosen[batch, i]
                if length[batch] + i < slots:  # past the end: dropped
                    wanted[batch, :, length[batch] + i] = rows_new[batch, node]
        np.testing.assert_array_equal(got.k[0], wanted)
        np.testing.assert_array_equal(got.v[0], -wanted)


@functools.cache
def prefilled(name, chunk):
    """The state after a prompt of 24 tokens in chunks of `chunk`."""
    pair = models(name)
    prompt = next(ids for ids in golden(name)["prompts"] if len(ids) == 24)
    state = rounds.empty_state(pair, 1, SLOTS, 1, jnp.float32, drafting=True)
    state = dataclasses.replace(state, done=jnp.zeros(1, bool))
    step = jitted(pair, functools.partial(rounds.prefill_chunk, sampler=sampling.GREEDY))
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        tokens = np.full(chunk, 5)
        tokens[: len(part)] = part
        count, last = jnp.full(1, len(part), jnp.int32), jnp.zeros(1, bool)
        state, _ = step(state, row(tokens), count, last)
    return state


@pytest.mark.parametrize("name", ["qwen3_gqa", "swa_causal"])
@pytest.mark.parametrize("chunk", [rarely(1), rarely(3), 7, 64])
def test_prefill_in_chunks_commits_the_same_state(name, chunk):
    got, wanted = prefilled(name, chunk), prefilled(name, 24)
    assert got.length.tolist() == [24]
    for part in ("cache", "draft_cache"):
        ours, theirs = (jax.tree.leaves(getattr(state, part)) for state in (got, wanted))
        for mine, other in zip(ours, theirs, strict=True):
            close(mine, other)
            assert (np.asarray(mine)[:, :, 24:] == 0).all()
            assert (np.asarray(mine)[:, :, :24] != 0).any(axis=-1).all()
