"""The first three sampled tokens against their exact distribution (oracle/make_distribution.py).

The environment variable DISTRIBUTION_SEEDS sets over how many seeds (default 4096).
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairs import ORACLE, jitted, models, rarely
from safetensors.numpy import load_file
from scipy.stats import chi2

from ddtree_jax import rounds
from ddtree_jax import tree as trees
from ddtree_jax.sampling import Sampler

NAME = "llama_mha"  # block 4
GOLDEN = load_file(ORACLE / "distribution.safetensors")
PROMPT, MARGINALS = GOLDEN["prompt"], GOLDEN["marginals"]
TEMPERATURE, SAMPLER = 1.5, Sampler(noise=True)
ROWS = 4096
CALLS = -(-int(os.environ.get("DISTRIBUTION_SEEDS", "4096")) // ROWS)
ROUNDS = {
    "ar": rounds.ar_round,
    "dflash": rounds.chain_round,
    "ddtree": functools.partial(rounds.tree_round, budget=7),
}


def p_value(tokens, probabilities):
    """Of the chi-square test; tokens that are expected less than 5 times count as one."""
    counts = np.bincount(tokens, minlength=probabilities.size)
    expected = tokens.size * probabilities
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        counts, expected = counts[:-1], expected[:-1]
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), counts.size - 1)


def prefilled(pair, seeds, drafting):
    """One prompt, prefilled once, with a row for each seed; and the first tokens [rows]."""
    count = seeds.shape[0]
    make = functools.partial(
        rounds.empty_state, pair, slots=16, stops=1, dtype=jnp.float32, drafting=drafting
    )
    state = make(batch=1, samples=count)
    request = dataclasses.replace(
        state.request,
        limit=jnp.full(count, 3),
        temperature=jnp.full(count, TEMPERATURE),
        seed=seeds,
    )
    state = dataclasses.replace(state, request=request, done=jnp.zeros(count, bool))
    size = jnp.array([PROMPT.size])
    state, emitted = rounds.prefill_chunk(
        pair, state, jnp.asarray(PROMPT)[None], size, jnp.array([True]), sampler=SAMPLER
    )
    index = jnp.arange(count)
    return rounds.insert(make(batch=count), state, index, index), emitted.tokens[:, 0]


@pytest.mark.parametrize("mode", [each if each == "ddtree" else rarely(each) for each in ROUNDS])
def test_first_three_tokens(mode):
    def sample(pair, seeds):
        state, first = prefilled(pair, seeds, mode != "ar")
        texts = jnp.zeros((ROWS, 3), jnp.int32).at[:, 0].set(first)
        for _ in range(2):
            before = state.emitted
            state, emitted = ROUNDS[mode](pair, state, sampler=SAMPLER)
            place = jnp.arange(emitted.tokens.shape[1])
            place = jnp.where(place < emitted.count[:, None], before[:, None] + place, 3)
            texts = texts.at[jnp.arange(ROWS)[:, None], place].set(emitted.tokens, mode="drop")
        return texts, emitted.count

    program = jitted(models(NAME), sample)
    parts = [program(jnp.arange(ROWS, dtype=jnp.uint32) + ROWS * call) for call in range(CALLS)]
    texts = np.concatenate([part[0] for part in parts])
    for place in range(3):
        assert p_value(texts[:, place], MARGINALS[place]) > 0.001
    finished_early = np.mean([np.mean(np.asarray(part[1]) == 0) for part in parts])
    assert (finished_early > 0.02) == (mode != "ar")  # some rounds emitted two tokens


def test_a_biased_rule_fails():
    """Accepting the drafter's best token with min(1, p / q) and else sampling p: not p."""

    def distributions(pair, seeds):
        state, first = prefilled(pair, seeds, True)
        logits, _ = rounds.draft(pair, state)
        hidden, _, _ = rounds.verify(pair, state, trees.chain(first[:, None]))
        target = pair.target.logits(hidden)[:, 0]
        return tuple(jax.nn.softmax(x / TEMPERATURE, axis=-1) for x in (target, logits[:, 0]))

    generator = np.random.default_rng(0)
    right, biased = [], []
    program = jitted(models(NAME), distributions)
    for call in range(CALLS):
        p, q = map(np.asarray, program(jnp.arange(ROWS, dtype=jnp.uint32) + ROWS * call))
        draws = (generator.random((ROWS, 1)) > np.cumsum(p, axis=1)).sum(axis=1)
        draws = np.minimum(draws, MARGINALS.shape[1] - 1)
        row, best = np.arange(ROWS), q.argmax(axis=1)
        accept = generator.random(ROWS) < p[row, best] / q[row, best]
        right.append(draws)
        biased.append(np.where(accept, best, draws))
    assert p_value(np.concatenate(right), MARGINALS[1]) > 0.001
    assert p_value(np.concatenate(biased), MARGINALS[1]) < 0.001
