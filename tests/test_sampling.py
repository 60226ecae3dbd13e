"""The noise of a position, the choice, the drafter's candidates and the cut of a round."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax import sampling
from ddtree_jax.sampling import GREEDY, Request, Sampler

V = 96
SAMPLED = Sampler(noise=True)


def noise(seed, sample, position, size=V):
    return np.asarray(sampling.gumbel(jnp.uint32(seed), jnp.uint32(sample), position, size))


@functools.partial(jax.jit, static_argnames=("max_depth", "sampler"))
def choose(logits, depths, length, max_depth, request, sampler=SAMPLED):
    return sampling.choose(logits, depths, length, max_depth, request=request, sampler=sampler)


def rows(count, temperature=1.0, seed=0, sample=0, **changes):
    """A request of some rows; each value one for all rows, or one a row."""
    idle = Request.idle(count, 1, 2)
    changes |= dict(temperature=temperature, seed=seed, sample=sample)
    filled = {
        name: np.broadcast_to(value, getattr(idle, name).shape).astype(getattr(idle, name).dtype)
        for name, value in changes.items()
    }
    return dataclasses.replace(idle, **filled)


def test_noise_of_a_token_does_not_know_the_vocabulary():
    whole = noise(3, 0, 17, 512)
    for size in (1, 2, 95, 96, 128, 511):
        np.testing.assert_array_equal(noise(3, 0, 17, size), whole[:size])


def test_noise_does_not_know_the_settings_of_the_process():
    whole = noise(3, 1, 17)
    many = jax.vmap(lambda at: sampling.gumbel(jnp.uint32(3), jnp.uint32(1), at, V))
    for setting in (jax.default_prng_impl("rbg"), jax.threefry_partitionable(False)):
        with setting:
            np.testing.assert_array_equal(noise(3, 1, 17), whole)
            np.testing.assert_array_equal(jax.jit(many)(jnp.arange(16, 19))[1], whole)


def test_noise_differs_by_seed_sample_and_position():
    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (2**32 - 1, 0, 0)]
    values = [noise(*place) for place in places]
    for first in range(len(values)):
        for second in range(first):
            assert (values[first] != values[second]).mean() > 0.9
    assert all(np.isfinite(value).all() for value in values)


def test_noise_has_the_whole_upper_tail():
    """The share of all words whose noise exceeds x is that of the Gumbel distribution, far up too.

    A token of probability e^-x is drawn where its noise exceeds that of a certain one by x.
    """
    spread = np.geomspace(4096, 2.0**32 - 1, 4096).round()
    words = np.concatenate([np.arange(4096), spread])
    values = np.asarray(sampling._gumbel_of(jnp.asarray(words, jnp.uint32)), np.float64)
    assert np.isfinite(values).all()
    assert (np.diff(values) <= 0).all()
    shares = (words + 0.5) / 2.0**32  # of the words up to each, its own cell half
    exact = -np.expm1(-np.exp(-values))
    high = values > 0
    np.testing.assert_allclose(exact[high], shares[high], rtol=3e-6)
    assert values[0] > 22


def test_choice_depends_on_position_alone():
    """The same logits at the same position choose the same, whatever node, depth, row, padding."""
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((9, V)).astype(np.float32)  # by depth
    tree = np.array([0, 1, 1, 2, 2, 3, 1, 8])  # depths, siblings included
    length = 40
    wanted = [
        int(np.argmax(logits[d] / np.float32(0.7) + noise(5, 2, length + d + 1))) for d in range(9)
    ]
    assert len(set(wanted)) > 4
    assert wanted != logits.argmax(axis=1).tolist()

    got = choose(
        jnp.asarray(logits[tree])[None], jnp.asarray(tree)[None], jnp.array([length]), 8,
        rows(1, 0.7, 5, 2),
    )  # fmt: skip
    assert got[0].tolist() == [wanted[depth] for depth in tree]
    # As the only node of a tree, one position at a time, in another row of a batch.
    depth_zero = choose(
        jnp.asarray(logits)[:, None], jnp.zeros((9, 1), int), length + jnp.arange(9), 0,
        rows(9, 0.7, 5, 2),
    )  # fmt: skip
    assert depth_zero[:, 0].tolist() == wanted
    padded = np.pad(logits, ((0, 0), (0, 128 - V)), constant_values=-np.inf)
    got = choose(
        jnp.asarray(padded[tree])[None], jnp.asarray(tree)[None], jnp.array([length]), 8,
        rows(1, 0.7, 5, 2),
    )  # fmt: skip
    assert got[0].tolist() == [wanted[depth] for depth in tree]


PROBABILITIES = np.array([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])
CHI_SQUARE = {5: 20.5, 35: 66.6}  # exceeded with probability 0.001


def chi_square(counts, expected):
    assert counts.sum() == pytest.approx(expected.sum())
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < CHI_SQUARE[counts.size - 1]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_distribution_of_the_choice(temperature):
    count = 8192
    logits = jnp.asarray(np.log(PROBABILITIES) * temperature, jnp.float32)
    got = choose(
        jnp.broadcast_to(logits, (count, 2, 6)),
        jnp.broadcast_to(jnp.arange(2), (count, 2)),
        jnp.full(count, 7),
        1,
        rows(count, temperature, np.arange(count)),
    )
    first, second = np.asarray(got).T
    chi_square(np.bincount(first, minlength=6), count * PROBABILITIES)
    chi_square(np.bincount(second, minlength=6), count * PROBABILITIES)
    # Neighbouring positions are independent.
    pairs = np.bincount(first * 6 + second, minlength=36)
    chi_square(pairs, count * np.outer(PROBABILITIES, PROBABILITIES).ravel())


def test_distribution_over_the_samples_and_positions_of_one_seed():
    count = 8192
    logits = jnp.broadcast_to(jnp.asarray(np.log(PROBABILITIES), jnp.float32), (count, 1, 6))
    zeros, number = jnp.zeros((count, 1), int), np.arange(count)
    for length, samples in [(jnp.zeros(count, int), number), (jnp.arange(count), 0)]:
        got = choose(logits, zeros, length, 0, rows(count, 1.0, 9, samples))
        chi_square(np.bincount(np.asarray(got)[:, 0], minlength=6), count * PROBABILITIES)


def test_greedy_rows_in_a_sampled_program():
    generator = np.random.default_rng(1)
    logits = jnp.asarray(generator.standard_normal((4, 3, V)), jnp.float32)
    depths = jnp.broadcast_to(jnp.arange(3), (4, 3))
    arguments = (logits, depths, jnp.full(4, 11), 2, rows(4, [0.0, 3.0, 0.0, 3.0]))
    got, best = choose(*arguments), np.asarray(logits).argmax(axis=-1)
    np.testing.assert_array_equal(np.asarray(got)[::2], best[::2])
    assert (np.asarray(got)[1::2] != best[1::2]).any()
    np.testing.assert_array_equal(np.asarray(choose(*arguments, GREEDY)), best)


def test_argmax_takes_the_lowest_id_on_ties():
    logits = jnp.array([[1.0, 5.0, 5.0, -jnp.inf], [2.0, 2.0, 2.0, 2.0]])
    assert sampling.argmax(logits, None).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("tokens", "count", "remaining", "stops", "emitted", "done"),
    [
        ([1, 2, 3, 4], 4, 9, [7], 4, False),  # nothing to cut
        ([7, 2, 3, 4], 4, 9, [7], 1, True),  # stop first
        ([1, 7, 3, 4], 4, 9, [7], 2, True),  # stop in the middle
        ([1, 2, 3, 7], 4, 9, [7], 4, True),  # stop last
        ([1, 7, 8, 7], 4, 9, [8, 7], 2, True),  # the first of several
        ([1, 2, 7, 4], 2, 9, [7], 2, False),  # a stop that was not accepted
        ([1, 2, 3, 4], 4, 3, [7], 3, True),  # the limit inside
        ([1, 2, 3, 4], 4, 4, [7], 4, True),  # the limit at the end
        ([1, 2, 3, 7], 4, 3, [7], 3, True),  # the limit before the stop
        ([1, 7, 3, 4], 4, 3, [7], 2, True),  # the stop before the limit
        ([1, 2, 7, 4], 4, 3, [7], 3, True),  # both at one token
        ([1, 2, 3, 4], 1, 1, [7], 1, True),  # one token left
        ([0, 0, 0, 0], 4, 9, [], 4, False),  # an unused stop slot is no token
        ([7, 7, 7, 7], 0, 9, [7], 0, False),  # a finished row emits nothing
    ],
)
def test_stop_cut(tokens, count, remaining, stops, emitted, done):
    slots = [*stops, *[-1] * (3 - len(stops))]
    got = sampling.stop_cut(
        jnp.array([tokens]), jnp.array([count]), jnp.array([remaining]), jnp.array([slots])
    )
    assert (int(got[0][0]), bool(got[1][0])) == (emitted, done)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 5), min_size=6, max_size=6),
    st.integers(1, 6),
    st.integers(1, 8),
    st.sets(st.integers(0, 5), max_size=3),
)
def test_stop_cut_like_a_loop(tokens, count, remaining, stops):
    wanted, finished = 0, False
    for token in tokens[:count]:
        wanted += 1
        finished = token in stops or wanted == remaining
        if finished:
            break
    test_stop_cut(tokens, count, remaining, sorted(stops), wanted, finished)


@pytest.mark.parametrize("ranks", [1, 7, 24, 32])
@pytest.mark.parametrize("kind", ["normal", "ties", "all equal", "certain"])
def test_draft_candidates(kind, ranks):
    real, generator = 24, np.random.default_rng(2)
    logits = np.full((2, 3, 32), -np.inf, np.float32)  # eight columns only pad the vocabulary
    logits[..., :real] = {
        "normal": generator.standard_normal((2, 3, real)) * 3,
        "ties": generator.integers(0, 3, (2, 3, real)),
        "all equal": np.full((2, 3, real), 2.5),
        "certain": 1000.0 * np.eye(real)[generator.integers(0, real, (2, 3))],
    }[kind]
    tokens, scores = sampling.draft_candidates(jnp.asarray(logits), ranks)
    tokens, scores = np.asarray(tokens), np.asarray(scores)
    wide = logits.astype(np.float64)
    top = wide.max(axis=-1, keepdims=True)
    log_probs = wide - top - np.log(np.exp(wide - top).sum(axis=-1, keepdims=True))
    order = np.argsort(-log_probs, axis=-1, kind="stable")[..., :ranks]
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_allclose(scores, np.take_along_axis(log_probs, order, -1), atol=2e-5)
    assert (scores <= 0).all()
    assert (np.diff(scores[..., :real], axis=-1) <= 0).all()
    assert (tokens[..., :real] < real).all()
    assert (scores[..., real:] == -np.inf).all()
    if kind == "certain":
        assert (scores[..., 0] == 0).all()


@pytest.mark.parametrize(
    ("rows", "columns", "ranks"),
    [
        (3, 400, 100),  # a selection
        (3, 400, 128),
        (3, 400, 129),  # in passes
        (3, 400, 300),
        (3, 32 * 64, 32),  # tile by tile: of the fewest that there may be
        (3, 32 * 64, 33),  # too few tiles
        (3, 32 * 8, 100),  # fewer tiles than are wanted
        (3, 32 * 64 + 8, 32),  # no whole tiles
        (15, 32 * 600, 300),  # tile by tile, in passes
    ],
)
@pytest.mark.parametrize("distinct", [True, False])
def test_a_large_selection_is_one_selection(rows, columns, ranks, distinct):
    generator = np.random.default_rng(4)
    if distinct:
        logits = generator.permutation(rows * columns)
    else:  # most are equal to others, also within the tiles
        logits = generator.integers(0, 40, rows * columns)
    logits = jnp.asarray(logits.reshape(1, rows, columns), jnp.float32)
    tokens, scores = map(np.asarray, sampling.draft_candidates(logits, ranks, stable=False))
    wanted, wanted_scores = map(np.asarray, sampling.draft_candidates(logits, ranks))
    np.testing.assert_array_equal(scores, wanted_scores)
    if distinct:
        np.testing.assert_array_equal(tokens, wanted)
    for row, ids, best in zip(logits[0], tokens[0], wanted[0], strict=True):
        assert len(set(ids)) == ranks
        np.testing.assert_array_equal(row[ids], row[best])


@pytest.mark.parametrize("columns", [400, 32 * 600])
@pytest.mark.parametrize("ranks", [100, 129, 300])
def test_a_selection_repeats_nothing_where_few_are_left(columns, ranks):
    """As of logits that top-k, top-p or min-p filtered."""
    generator = np.random.default_rng(5)
    logits = np.full((4, columns), -np.inf, np.float32)
    logits[0, :140] = generator.permutation(140)  # in few tiles, more than one pass selects
    for row, finite in ((1, 20), (2, 200)):
        places = generator.choice(columns, finite, replace=False)
        logits[row, places] = generator.permutation(finite)
    values, tokens = map(np.asarray, sampling._largest(jnp.asarray(logits), ranks))
    np.testing.assert_array_equal(values, -np.sort(-logits, axis=1)[:, :ranks])
    np.testing.assert_array_equal(values, np.take_along_axis(logits, tokens, axis=1))
    assert all(len(set(row)) == ranks for row in tokens)


def test_a_selection_is_among_the_best_tiles(monkeypatch):
    """A few numbers are left of a long row, however they lie in it."""
    seen = []
    selected = sampling._selected
    monkeypatch.setattr(
        sampling, "_selected", lambda x, count: seen.append(x.shape) or selected(x, count)
    )
    rows = np.zeros((3, 32 * 64), np.float32)
    rows[0, -32:] = np.arange(1, 33)  # all of them in one tile
    rows[1, ::64] = np.arange(1, 33)  # each in one of its own
    rows[2] = -np.inf
    values, indices = sampling._largest(jnp.asarray(rows), 32)
    assert seen == [(3, 64), (3, 32 * 32)]
    np.testing.assert_array_equal(values[0], values[1])
    np.testing.assert_array_equal(indices[0], 32 * 64 - 1 - np.arange(32))
    np.testing.assert_array_equal(indices[1], 64 * (31 - np.arange(32)))
    assert len(set(np.asarray(indices[2]))) == 32


def test_noisy_drafts_foresee_the_choice():
    """The best candidate of a drafter that is a little wrong is the target's choice more often."""
    generator, count, slots = np.random.default_rng(3), 64, 5
    target = generator.standard_normal((count, slots, V)).astype(np.float32) * 2
    drafter = target + generator.standard_normal(target.shape).astype(np.float32) * 0.5
    request, length = rows(count, 1.0, np.arange(count)), jnp.arange(count)
    depths = jnp.broadcast_to(jnp.arange(slots), (count, slots))
    choice = np.asarray(choose(target, depths, length, slots - 1, request))
    hits = {}
    for name, logits in (("blind", drafter), ("noisy", None), ("the target", target)):
        if name != "blind":
            given = drafter if logits is None else logits
            logits = sampling.draft_scores(
                jnp.asarray(given), length, request=request, sampler=SAMPLED
            )
        tokens, scores = sampling.draft_candidates(jnp.asarray(logits), 8)
        assert (np.diff(scores, axis=-1) <= 0).all()
        assert (np.asarray(scores) <= 0).all()
        hits[name] = (np.asarray(tokens)[..., 0] == choice).mean()
    assert hits["the target"] == 1
    assert hits["noisy"] > 2 * hits["blind"]
    greedy = sampling.draft_scores(drafter, length, request=rows(count, 0.0), sampler=SAMPLED)
    np.testing.assert_array_equal(greedy, drafter)


def test_each_slot_trusts_the_noise_as_its_drafter_says():
    """In NumPy: a * logits + b * T * noise, of rows at T = 0 the logits themselves."""
    generator, pairs = np.random.default_rng(6), ((1.25, 1.0), (1.0, 0.5), (0.5, 2.0))
    logits = generator.standard_normal((3, len(pairs), V)).astype(np.float32)
    logits[:, :, -5:] = -np.inf
    heat, length = np.array([0.7, 0.0, 1.5], np.float32), np.array([4, 9, 30])
    request = rows(3, heat, seed=[1, 2, 3], sample=[0, 1, 2])

    def ranked(pairs):
        return sampling.draft_scores(
            jnp.asarray(logits),
            jnp.asarray(length),
            request=request,
            sampler=SAMPLED,
            noise_trust=pairs,
        )

    expected = logits.copy()
    for row, seed in ((0, 1), (2, 3)):
        for slot, (of_logits, of_noise) in enumerate(pairs):
            noisy = heat[row] * noise(seed, row, length[row] + slot + 1)
            expected[row, slot] = of_logits * logits[row, slot] + of_noise * noisy
    got = np.asarray(ranked(pairs))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[1], logits[1])
    np.testing.assert_array_equal(ranked(()), ranked(((0.75, 0.75),) * 3))
