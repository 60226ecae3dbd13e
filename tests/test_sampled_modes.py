"""Sampled texts do not know how they were made: mode, tree, batch, noise-aware drafts, samples."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from pairs import engine as make_engine
from pairs import golden, jitted, models

from ddtree_jax import Options, rounds
from ddtree_jax import tree as trees
from ddtree_jax.sampling import Sampler

NAME = "qwen3_gqa"  # block 8
PROMPTS = golden(NAME)["prompts"]
BEST = golden(NAME)["ar"][0]  # the greedy text
TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FILTERS = (
    {},
    {"top_k": 6},
    {"top_p": 0.7},
    {"min_p": 0.15},
    {"logit_bias": {3: 4.0, BEST[1]: -30.0}},
    {"repetition_penalty": 1.4},
    {"presence_penalty": -4.0, "frequency_penalty": -1.5},
    {"min_new_tokens": 12, "stop_ids": (*BEST[2:5], *BEST[13:18])},
    {
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "logit_bias": {BEST[6]: -2.5},
    },
    {"top_k": 1},
)
LENGTH = 16


def options(mode="ar", budget=None, **changes):
    base = dict(max_new_tokens=LENGTH, stop_ids=(), seed=4)
    return Options(mode=mode, tree_budget=budget, **base | changes)


def requests(mode, budget=None, temperatures=(*TEMPERATURES, 0.0), **changes):
    """Every filter at every temperature, and at T = 0."""
    return [
        options(mode, budget, temperature=temperature, **asked | changes)
        for temperature in temperatures
        for asked in FILTERS
    ]


def ids(results):
    return [result.output_ids for result in results]


@pytest.fixture(scope="module")
def engine(golden_engine):
    return golden_engine(NAME)


@pytest.fixture(scope="module")
def wanted(engine):
    asked = requests("ar", log_probs=True)
    return engine.generate(PROMPTS[:1] * len(asked), asked)


def test_the_requests_differ(wanted):
    """Each filter changes something, so that the comparisons below compare something."""
    by_filter = [ids(wanted)[place :: len(FILTERS)] for place in range(len(FILTERS))]
    for place, asked in enumerate(FILTERS[1:], start=1):
        hot_only = set(asked) <= {"top_k", "top_p", "min_p"}
        assert by_filter[place][1:4] != by_filter[0][1:4], asked
        assert by_filter[place][4] == by_filter[0][4] or not hot_only, asked  # greedy
    assert len({tuple(texts[2]) for texts in by_filter}) > 4
    assert by_filter[9] == by_filter[0][4:] * 5  # the best token alone
    for text in by_filter[7]:
        assert not set(text[:12]) & set(BEST[2:5])
    assert any(len(text) < LENGTH for text in by_filter[7])


@pytest.mark.parametrize(
    ("mode", "budget", "noise", "temperatures"),
    [
        ("dflash", None, True, TEMPERATURES),
        ("ddtree", 7, False, (1.0, 0.0)),
        ("ddtree", 31, True, TEMPERATURES),
        ("ddtree", 127, True, (0.7,)),
    ],
)
def test_every_mode_gives_the_same_tokens(engine, wanted, mode, budget, noise, temperatures):
    asked = requests(mode, budget, temperatures, draft_noise=noise, log_probs=True)
    results = engine.generate(PROMPTS[:1] * len(asked), asked)
    places = [(*TEMPERATURES, 0.0).index(temperature) for temperature in temperatures]
    wanted = [wanted[i * len(FILTERS) + k] for i in places for k in range(len(FILTERS))]
    assert ids(results) == ids(wanted)
    lengths = [length for result in results for length in result.accept_lengths]
    assert max(lengths) >= 4  # it speculated
    for one, other in zip(results, wanted, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)
        assert len(one.log_probs) == len(one.output_ids)
        assert max(one.log_probs) <= 0


def test_each_request_alone(wanted):
    """In a program that holds only what the request needs, one row at a time."""
    engine = make_engine(NAME, prefill_chunk=24)
    for place in (3, 6):
        index = 2 * len(FILTERS) + place  # T = 1
        assert ids(engine.generate(PROMPTS[:1], requests("ar")[index])) == [
            wanted[index].output_ids
        ]


def test_samples_of_one_prompt(engine):
    """Sample s is the same among any number of samples and in any mode."""
    # All that the program above can do, so that it serves here, too.
    everything = FILTERS[8] | dict(top_p=0.99, min_new_tokens=1, log_probs=True)
    base = options(temperature=1.5, **everything)
    prompts = PROMPTS[:4]
    single, three = (engine.generate(prompts, dataclasses.replace(base, n=n)) for n in (1, 3))
    grown = engine.generate(prompts, dataclasses.replace(base, n=3, mode="ddtree", tree_budget=31))
    assert ids(three) == ids(grown)
    assert [result.sample_index for result in three] == [0, 1, 2] * 4
    assert [result.prompt_ids for result in three] == [p for p in prompts for _ in range(3)]
    assert ids(three)[::3] == ids(single)
    assert len({tuple(text) for text in ids(three)}) > 10
    assert len({result.output_ids[0] for result in three}) > 3  # the first token is sampled, too
    # Penalties count each sample's own output: as one prompt at a time, without any sharing.
    alone = engine.generate(prompts[1:2], dataclasses.replace(base, n=3))
    assert ids(alone) == ids(three)[3:6]
    for one, other in zip(alone, three[3:6], strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)


def test_a_drafter_that_is_the_target_foresees_every_sample(monkeypatch):
    """With the target's own logits in slot 0, the noise of the right position makes it certain."""
    pair, rows = models(NAME), 16

    def draft(pair, state):
        hidden, _, _ = rounds.verify(pair, state, trees.chain(state.bonus[:, None]))
        slots = pair.drafter.config.block_size - 1
        return jnp.repeat(pair.target.logits(hidden), slots, axis=1), state.draft_cache

    monkeypatch.setattr(rounds, "draft", draft)
    state = rounds.empty_state(pair, rows, 32, 1, jnp.float32, drafting=True)
    request = dataclasses.replace(
        state.request,
        limit=np.full(rows, 30),
        seed=np.arange(rows, dtype=np.uint32),
        sample=np.full(rows, 1, np.uint32),
        temperature=np.full(rows, 1.3, np.float32),
        top_p=np.full(rows, 0.9, np.float32),
    )
    state = dataclasses.replace(
        state, done=jnp.zeros(rows, bool), bonus=jnp.arange(rows) * 3, request=request
    )
    counts = {}
    for noise in (True, False):
        step = functools.partial(
            rounds.chain_round, sampler=Sampler(noise=True, top_p=True), draft_noise=noise
        )
        counts[noise] = np.asarray(jitted(pair, step)(state)[1].count)
    assert (counts[True] >= 2).all()
    assert (counts[False] < 2).any()
