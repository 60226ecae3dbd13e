"""Hybrid targets (Gated DeltaNet and gated attention): parity, trees, commits, memory."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairs import ORACLE, engine, filled, golden, jitted, models, random_weights, rarely
from safetensors.numpy import load_file

import convert
from ddtree_jax import Options, rounds
from ddtree_jax import cache as caches
from ddtree_jax import tree as trees
from ddtree_jax.models import Target, parameter_shapes
from ddtree_jax.models.recurrent import Paths
from ddtree_jax.sampling import GREEDY
from ddtree_jax.shapes import SHAPES
from kernels_pallas import draft_tree

HYBRIDS = ("qwen3_5", "qwen3_next")
PROMPT, LAYER = 70, 1  # as in make_hybrid.py
SLOTS = 96


def close(got, wanted, tolerance=1e-5):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def row(ids):
    return jnp.asarray(np.asarray(ids), jnp.int32)[None]


@functools.cache
def target_of(name) -> Target:
    source = convert.open_model(ORACLE / "hybrid" / name / "target", drafter=False)
    params = source.load("float32")
    return filled(Target, source.config, values=lambda key, _: jnp.asarray(params[key]))


@functools.cache
def parity(name):
    return load_file(ORACLE / "hybrid" / name / "parity.safetensors")


def chain_of(target, cache, ids, length, *, whole):
    """(hidden, features of all layers, pending) of a chain."""
    tree = trees.chain(ids)
    count = jnp.full(1, ids.shape[1], jnp.int32) if whole else None
    layers = tuple(range(target.config.num_layers))
    return target(cache, tree.tokens, tree.depths, tree.ancestors, length, layers, count_b=count)


def one(number):
    return jnp.full(1, number, jnp.int32)


# Parity with transformers.


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", HYBRIDS)
def test_whole_model(name, whole):
    """One forward over 75 tokens, as a chunk and as a tree that is a chain."""
    target, wanted = target_of(name), parity(name)

    def forward(target, ids):
        cache = caches.empty(target.config, 1, SLOTS, jnp.float32)
        hidden, features, _ = chain_of(target, cache, ids, one(0), whole=whole)
        return target.logits(hidden)[0], features[0]

    logits, features = jitted(target, forward)(row(wanted["ids"]))
    close(logits[:, : target.config.vocab_size], wanted["logits"])
    for index, layer in enumerate(np.split(features, target.config.num_layers, axis=-1)):
        close(layer, wanted[f"hidden.{index}"])


@pytest.mark.parametrize("name", HYBRIDS)
def test_token_by_token_is_the_recurrent_form(name):
    target, wanted = target_of(name), parity(name)

    def prefill(target, ids):
        cache = caches.empty(target.config, 1, SLOTS, jnp.float32)
        hidden, _, pending = chain_of(target, cache, ids, one(0), whole=True)
        cache = caches.commit(cache, pending, one(0), one(PROMPT))
        return target.logits(hidden[:, -1])[0], cache

    def step(target, cache, token, length):
        hidden, _, pending = chain_of(target, cache, token, length, whole=False)
        return target.logits(hidden[:, -1])[0], caches.commit(cache, pending, length, one(1))

    ids = wanted["ids"]
    first, cache = jitted(target, prefill)(row(ids[:PROMPT]))
    logits, step = [first], jitted(target, step)
    for length in range(PROMPT, len(ids)):
        more, cache = step(cache, row(ids[length : length + 1]), one(length))
        logits.append(more)
    close(np.stack(logits)[:, : target.config.vocab_size], wanted["stepped_logits"])


@pytest.mark.parametrize("name", HYBRIDS)
def test_one_layer(name):
    target, wanted = target_of(name), parity(name)
    layer = [each for each in target.layers if hasattr(each, "delta")][LAYER]
    carried = caches.empty(target.config, 1, SLOTS, jnp.float32).recurrent[0]
    tree = trees.chain(row(wanted["ids"]))
    paths = Paths(tree.ancestors, tree.depths, 0, None, one(len(wanted["ids"])))
    run = jitted(layer, lambda layer, x: layer.delta(x, carried, paths)[0])
    out = run(jnp.asarray(wanted["delta_in"])[None])
    close(out[0], wanted["delta_out"])


# Trees.

NODES, DEEPEST, LONGEST = 14, 5, 9


def random_hybrid(name) -> Target:
    """Random weights, siblings with large values among them."""
    target = filled(Target, target_of(name).config, values=random_weights(5))
    target.embed_vd[...] = target.embed_vd[...].at[::3].multiply(20)
    return target


def run_nodes(target, prefix, length, tokens, depths, ancestors, path, count):
    """Hidden rows, features and what is committed of a path of nodes, after a padded prefix."""
    cache = caches.empty(target.config, 1, 16, jnp.float32)
    tree = trees.chain(prefix)
    chunk = (tree.tokens, tree.depths, tree.ancestors)
    _, _, pending = target(cache, *chunk, one(0), count_b=length)
    cache = caches.commit(cache, pending, one(0), length)
    hidden, features, pending = target(
        cache, tokens, depths, ancestors, length, (0, 2), max_depth=DEEPEST
    )
    return hidden[0], features[0], caches.commit(cache, pending, length, count, path)


def seen(cache, length):
    """What a cache says of its first `length` tokens: the rest is never read."""
    return [*jax.tree.leaves(cache.recurrent), *(x[:, :, :length] for x in cache.k + cache.v)]


@pytest.mark.parametrize("name", HYBRIDS)
def test_tree_is_all_its_paths(name):
    """After prefixes that fill nothing, a part and all of the convolution's window."""
    run = jitted(random_hybrid(name), run_nodes)
    in_order = row(np.arange(DEEPEST + 1))
    for length in (0, 2, LONGEST):
        generator = np.random.default_rng(length)
        parents, depths = [-1], [0]
        for node in range(1, NODES):
            options = [i for i in range(node) if depths[i] < DEEPEST]
            parents.append(int(generator.choice(options)))
            depths.append(depths[parents[-1]] + 1)
        tokens, prefix = generator.permutation(96)[:NODES], generator.permutation(96)[:LONGEST]
        ancestors = draft_tree.ancestor_matrix(row(parents), DEEPEST)
        before = row(prefix), one(length)
        for leaf in set(range(NODES)) - set(parents):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            rest, count = [0] * (DEEPEST + 1 - len(path)), one(len(path))
            got = run(*before, row(tokens), row(depths), ancestors, row(path + rest), count)
            # The path in rows 0, 1, ..., and rows without a parent, so that the shape is the same.
            others = [0] * (NODES - len(path))
            chain = draft_tree.ancestor_matrix(
                row([*range(-1, len(path) - 1), *(-1 for _ in others)]), DEEPEST
            )
            alone = row([*tokens[path], *others]), row([*range(len(path)), *others]), chain
            wanted = run(*before, *alone, in_order, count)
            for ours, theirs in zip(got[:2], wanted[:2], strict=True):
                close(ours[np.array(path)], theirs[: len(path)], 3e-5)
            caches_of = [seen(result[2], length + len(path)) for result in (got, wanted)]
            for ours, theirs in zip(*caches_of, strict=True):
                close(ours, theirs, 3e-5)


# The state of a request.


@functools.cache
def prefilled(chunk, soiled=False):
    """The state after a prompt of 24 tokens in chunks of `chunk`, perhaps in a used buffer."""
    pair = models("hybrid_swa")
    prompt = next(ids for ids in golden("hybrid_swa")["prompts"] if len(ids) == 24)
    state = rounds.empty_state(pair, 1, 48, 1, jnp.float32, drafting=False)
    if soiled:
        used = jax.tree.map(lambda part: part + 3.0, state.cache)
        state = dataclasses.replace(state, cache=used)
    state = dataclasses.replace(state, done=jnp.zeros(1, bool))
    step = jitted(pair, functools.partial(rounds.prefill_chunk, sampler=GREEDY))
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        tokens = np.full(chunk, 5)
        tokens[: len(part)] = part
        state, _ = step(state, row(tokens), one(len(part)), jnp.zeros(1, bool))
    return state


@pytest.mark.parametrize(("chunk", "soiled"), [rarely(1, False), rarely(7, False), (24, True)])
def test_prefill_in_chunks_commits_the_same_state(chunk, soiled):
    """Chunks shorter than the convolution, a padded last chunk, a row that served before."""
    got, wanted = prefilled(chunk, soiled), prefilled(24)
    for ours, theirs in zip(got.cache.recurrent, wanted.cache.recurrent, strict=True):
        close(ours.state, theirs.state)
        close(ours.window, theirs.window)
        assert ours.state.dtype == jnp.float32
    for ours, theirs in zip(
        got.cache.k + got.cache.v, wanted.cache.k + wanted.cache.v, strict=True
    ):
        close(ours[:, :, :24], theirs[:, :, :24])


@pytest.mark.exhaustive
def test_a_row_serves_one_prompt_after_the_other():
    """What its buffers held before does not matter."""
    prompts = golden("hybrid_swa")["prompts"][-3:]
    options = Options(mode="dflash", max_new_tokens=24, stop_ids=())
    results = engine("hybrid_swa", batch_size=1, prefill_chunk=16).generate(prompts, options)
    wanted = [record["ids"][:24] for record in golden("hybrid_swa")["chain"][-3:]]
    assert [result.output_ids for result in results] == wanted
    assert sum(sum(r.accept_lengths) for r in results) / sum(r.rounds for r in results) > 3


def test_pending_state_is_small():
    """64 nodes of the 27B shape: under 2.5 % of what one float32 state a node would take."""
    config, _ = SHAPES["qwen3.6-27b"]
    # One group of four layers stands for the sixteen.
    config = dataclasses.replace(
        config,
        num_layers=4,
        windows=(None,) * 4,
        delta=dataclasses.replace(config.delta, layers=(0, 1, 2)),
    )
    target = nnx.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(target)
    nodes = 64

    def forward(state):
        cache = caches.empty(config, 1, 256, jnp.bfloat16)
        tree = trees.chain(jnp.zeros((1, nodes), jnp.int32))
        target = nnx.merge(graphdef, state)
        return target(cache, tree.tokens, tree.depths, tree.ancestors, one(9), max_depth=15)[2]

    def size(tree):
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))

    pending = jax.eval_shape(forward, parameter_shapes(state, jnp.bfloat16))
    kinds = {name: getattr(pending.recurrent[0], name).dtype for name in "kug"}
    assert set(kinds.values()) == {jnp.dtype(jnp.float32)}
    assert pending.recurrent[0].inputs.dtype == jnp.bfloat16
    per_node = nodes * len(config.delta.layers) * 4 * config.delta.state_size
    assert 16 * per_node == 64 * 48 * 48 * 128 * 128 * 4  # 9.66 GB
    assert 16 * size(pending) < 0.025 * 16 * per_node
    assert 175e6 < 16 * size(pending) < 185e6  # queries, K and V of the nodes included
