"""Hybrid targets (Gated DeltaNet and gated attention): parity, trees, commits, memory."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from pairs import ORACLE, filled, jitted
from safetensors.numpy import load_file

import convert
from ddtree_jax import cache as caches
from ddtree_jax import tree as trees
from ddtree_jax.models import Target
from ddtree_jax.models.recurrent import Paths

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
    out, _ = layer.delta(jnp.asarray(wanted["delta_in"])[None], carried, paths)
    close(out[0], wanted["delta_out"])
