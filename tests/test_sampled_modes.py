"""Sampled texts do not know how they were made: mode, tree, batch, noise-aware drafts, samples.

The environment variable SAMPLED_PAIRS names golden pairs for the grid of temperatures, filters,
modes and budgets, separated by commas (default: one pair; "all").
"""

import dataclasses
import functools
import os

import jax.numpy as jnp
import numpy as np
import pytest
from pairs import BUDGETS, PAIRS, golden, jitted, models, rarely
from pairs import engine as make_engine

from ddtree_jax import Options, rounds
from ddtree_jax import tree as trees
from ddtree_jax.sampling import Sampler

NAME = "qwen3_gqa"  # block 8
GRID = os.environ.get("SAMPLED_PAIRS", NAME)
PROMPTS = golden(NAME)["prompts"]
TEMPERATURES = (0.3, 0.7, 1.0, 1.5, 0.0)
EVERYTHING = {  # asks of a program all that it can do
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.02,
    "logit_bias": {5: -2.5},
    "repetition_penalty": 1.1,
    "min_new_tokens": 1,
    "log_probs": True,
}
LENGTH = 12


def filters(best):
    """Each filter and penalty, and some together; `best` is the greedy text."""
    return (
        {},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.15},
        {"logit_bias": {3: 4.0, best[1]: -30.0}},
        {"repetition_penalty": 1.4},
        {"presence_penalty": -4.0, "frequency_penalty": -1.5},
        {"min_new_tokens": 8, "stop_ids": (*best[2:5], *best[9:14])},
        EVERYTHING | {"logit_bias": {best[6]: -2.5}},
        {"top_k": 1},
    )


def options(mode="ar", budget=None, **changes):
    base = dict(max_new_tokens=LENGTH, stop_ids=(), seed=5)
    return Options(mode=mode, tree_budget=budget, **base | changes)


def requests(name, mode, budget=None, **changes):
    """Every filter at every temperature, the last of which is 0; prompts and requests."""
    asked = [
        options(mode, budget, temperature=temperature, **each | changes)
        for temperature in TEMPERATURES
        for each in filters(golden(name)["ar"][0])
    ]
    return golden(name)["prompts"][:1] * len(asked), asked


def ids(results):
    return [result.output_ids for result in results]


@pytest.fixture(scope="module", params=PAIRS if GRID == "all" else GRID.split(","))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def wanted(golden_engine, name):
    """What plain decoding says, for every request of the grid: all rows of one program."""
    return golden_engine(name).generate(*requests(name, "ar", log_probs=True))


@pytest.mark.parametrize("name", [NAME], scope="module")  # the filters are chosen for this pair
def test_the_requests_differ(wanted, name):
    """Each filter changes something, so that the comparisons below compare something."""
    best = golden(name)["ar"][0]
    asked = filters(best)
    by_filter = [ids(wanted)[place :: len(asked)] for place in range(len(asked))]
    for place, each in enumerate(asked[1:], start=1):
        hot_only = set(each) <= {"top_k", "top_p", "min_p"}
        assert by_filter[place][:4] != by_filter[0][:4], each
        assert by_filter[place][4] == by_filter[0][4] or not hot_only, each  # greedy
    assert len({tuple(texts[2]) for texts in by_filter}) > 4
    assert by_filter[9] == [best[:LENGTH]] * 5  # the best token alone
    for text in by_filter[7]:
        assert not set(text[:8]) & set(best[2:5])
    assert any(len(text) < LENGTH for text in by_filter[7])


@pytest.mark.parametrize(
    ("mode", "budget", "noise"),
    [
        rarely("dflash", None, True),
        *(
            (tuple if budget == 63 else lambda case: rarely(*case))(("ddtree", budget, budget != 7))
            for budget in BUDGETS
        ),
    ],
)
def test_every_mode_gives_the_same_tokens(golden_engine, wanted, name, mode, budget, noise):
    """For every request of the grid; the smallest tree is grown without the noise."""
    given = requests(name, mode, budget, draft_noise=noise, log_probs=True)
    results = golden_engine(name).generate(*given)
    assert ids(results) == ids(wanted)
    assert all((result.mode, result.tree_budget) == (mode, budget) for result in results)
    lengths = [length for result in results for length in result.accept_lengths]
    assert max(lengths) >= 4  # it speculated
    for one, other in zip(results, wanted, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)
        assert len(one.log_probs) == len(one.output_ids)
        assert max(one.log_probs) <= 0


def test_each_request_alone(golden_engine, wanted, name):
    """The other rows idle; and in a program that holds only what the request needs."""
    prompts, asked = requests(name, "ddtree", 31, log_probs=True)
    for place in (8, 28):
        (result,) = golden_engine(name).generate(prompts[:1], asked[place])
        assert result.output_ids == wanted[place].output_ids
    engine, (_, asked) = make_engine(name, prefill_chunk=24), requests(name, "ar")
    assert ids(engine.generate(prompts[:1], asked[26])) == [wanted[26].output_ids]


def test_seeds_differ(golden_engine, name):
    """Up to the largest, each seed has a text of its own, the same in every mode."""
    seeds = [*range(13), 2**31, 2**32 - 2, 2**32 - 1]
    changes = EVERYTHING | dict(temperature=3.0, top_k=100, top_p=0.99)
    texts = {}
    for mode, budget in (("ar", None), ("ddtree", 31)):
        asked = [options(mode, budget, seed=seed, **changes) for seed in seeds]
        given = golden(name)["prompts"][:1] * len(seeds), asked
        texts[mode] = ids(golden_engine(name).generate(*given))
    assert texts["ar"] == texts["ddtree"]
    assert len({tuple(text) for text in texts["ar"]}) == len(seeds)


@pytest.fixture
def engine(golden_engine):
    return golden_engine(NAME)


def test_samples_of_one_prompt(engine):
    """Sample s is the same among any number of samples and in any mode."""
    base = options(temperature=1.5, **EVERYTHING | dict(top_p=0.99))
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
