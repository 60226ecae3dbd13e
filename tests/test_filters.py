"""Filters, penalties and bias: transformers' numbers (oracle/make_processors.py), and loops."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import ORACLE
from safetensors.numpy import load_file

from ddtree_jax import engine, penalties, rounds
from ddtree_jax import tree as trees
from ddtree_jax.sampling import Request, Sampler, draft_scores, scores
from kernels_pallas import draft_tree, filters

GOLDEN = load_file(ORACLE / "processors.safetensors")
LOGITS, TEXT = GOLDEN["logits"], GOLDEN["text"]
STOPS, BIAS, PROMPT = [5, 7], {3: 2.5, 11: -4.0, 299: 1.0}, 7
ROWS, V = LOGITS.shape
CASES = sorted(set(GOLDEN) - {"logits", "text"})
EVERYTHING = Sampler(*(True,) * len(dataclasses.fields(Sampler)))


def request(rows, **changes):
    """`changes` by name: one value for all rows, or one a row."""
    idle = Request.idle(rows, len(STOPS), len(BIAS))
    filled = {
        name: np.broadcast_to(value, getattr(idle, name).shape).astype(getattr(idle, name).dtype)
        for name, value in changes.items()
    }
    return dataclasses.replace(idle, **filled)


def counted(text, prompt, size):
    counts = penalties.empty_counts(len(text), 1, size)
    b = len(text)
    counts = penalties.count_prompt(counts, text[:, :prompt], jnp.full(b, prompt), None)
    rest = text[:, prompt:]
    return penalties.count_output(counts, rest, jnp.full(b, rest.shape[1]), None)


@jax.jit
def processed(logits_bnv, wanted, counts, emitted_b, paths_bnd):
    """All that a round does to logits before the noise."""
    state = types.SimpleNamespace(request=wanted, counts=counts, emitted=emitted_b)
    models = types.SimpleNamespace(target=types.SimpleNamespace(axis=None))
    depths = jnp.zeros(logits_bnv.shape[:2], jnp.int32)
    adjusted = rounds._adjusted(models, state, logits_bnv, depths, paths_bnd, EVERYTHING)
    return scores(adjusted, wanted, EVERYTHING)


ASKED = {
    "bias": dict(bias_ids=list(BIAS), bias=list(BIAS.values())),
    "all": dict(
        bias_ids=list(BIAS), bias=list(BIAS.values()), repetition=1.3, min_new_tokens=6,
        temperature=0.7, top_k=50, top_p=0.95, min_p=0.02,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case):
    """In the one program that can do everything: what a row does not ask for changes nothing."""
    name, _, value = case.partition(":")
    asked = ASKED.get(name) or {name: float(value)}
    asked = dict(temperature=1.0, stop_ids=STOPS) | asked
    nowhere = jnp.full((ROWS, 1, 2), -1)
    counts = counted(jnp.asarray(TEXT), PROMPT, V)
    emitted = jnp.full(ROWS, TEXT.shape[1] - PROMPT)
    got = processed(LOGITS[:, None], request(ROWS, **asked), counts, emitted, nowhere)[:, 0]
    wanted = GOLDEN[case]
    assert (wanted != LOGITS).any() == (case not in ("top_k:1000", "min_new_tokens:5"))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_no_request_overflows(data):
    """At the bounds of what is accepted, all together: neither NaN nor inf, so a choice is one."""

    def one_of(*values):
        return np.array([data.draw(st.sampled_from(values)) for _ in range(ROWS)], np.float32)

    summand, factor = engine.LARGEST_SUMMAND, engine.LARGEST_FACTOR
    heat = engine.LARGEST_TEMPERATURE
    asked = request(
        ROWS,
        temperature=one_of(0, 1 / heat, 1e-3, 1, heat),
        top_k=one_of(0, 1, 2**31 - 128).astype(np.int64),
        top_p=one_of(1e-45, 1e-8, 0.9, 1),
        min_p=one_of(0, 1e-45, 0.1, 1),
        bias_ids=list(BIAS),
        bias=np.stack([one_of(-summand, 0, summand) for _ in BIAS], axis=1),
        repetition=one_of(1 / factor, 0.5, 1, factor),
        presence=one_of(-summand, 0, summand),
        frequency=one_of(-summand, 0, summand),
    )
    nowhere = jnp.full((ROWS, 1, 2), -1)
    got = processed(
        LOGITS[:, None], asked, counted(jnp.asarray(TEXT), PROMPT, V), jnp.zeros(ROWS), nowhere
    )
    best = np.asarray(got).max(axis=-1)
    assert np.isfinite(best).all()
    assert not np.isnan(got).any()
    drafts = np.asarray(drafted(LOGITS[:, None] * factor * summand, asked))
    assert np.isfinite(drafts.max(axis=-1)).all()
    assert not np.isnan(drafts).any()


@jax.jit
def drafted(logits_blv, wanted):
    length = jnp.arange(logits_blv.shape[0])
    return draft_scores(logits_blv, length, request=wanted, sampler=EVERYTHING)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_number_of_bits_a_pass_changes_nothing(bits, monkeypatch):
    monkeypatch.setattr(filters, "_BITS", {"cpu": bits})
    for name, value in (("top_k", 50), ("top_p", 0.9)):
        got = jax.jit(getattr(filters, name))(LOGITS[:, None], jnp.full(ROWS, value))[:, 0]
        np.testing.assert_array_equal(got, GOLDEN[f"{name}:{value}"])
        each = functools.partial(getattr(filters, name), coarse=True)
        coarse = jax.jit(each)(LOGITS[:, None], jnp.full(ROWS, value))[:, 0]
        must, more = np.isfinite(got), np.isfinite(coarse)
        assert (must <= more).all()
        lowest = np.min(got, axis=-1, where=must, initial=np.inf, keepdims=True)
        assert (coarse > lowest - 1 / 64)[more].all()


top_k, top_p, penalise = map(jax.jit, (filters.top_k, filters.top_p, penalties.penalise))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    values=st.lists(
        st.integers(-6, 6).map(float) | st.just(-np.inf) | st.floats(-40, 5, width=32),
        min_size=8,
        max_size=8,
    ),
    k=st.integers(0, 9),
    p=st.floats(0.015625, 1, width=32),
)
def test_ties_and_excluded_tokens(values, k, p):
    """A token stays iff less than k tokens, or less than p of the mass, lie strictly above it."""
    x = np.array([*values, 5.0], np.float32)
    got = np.asarray(top_k(x[None, None], np.array([k])))[0, 0]
    above = (x[None] > x[:, None]).sum(axis=1)
    np.testing.assert_array_equal(got, np.where((above < k) | (k == 0), x, -np.inf))
    got = np.asarray(top_p(x[None, None], np.array([p], np.float32)))[0, 0]
    weights = np.exp(x.astype(np.float64) - x.max())
    mass = np.where(x[None] > x[:, None], weights, 0).sum(axis=1) / weights.sum()
    clear = np.abs(mass - p) > 1e-5
    keep = (mass < p) | (p == 1)
    np.testing.assert_array_equal(got[clear], np.where(keep, x, -np.inf)[clear])


coarse_k, coarse_p = (
    jax.jit(functools.partial(each, coarse=True)) for each in (filters.top_k, filters.top_p)
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    values=st.lists(
        st.integers(-6, 6).map(float) | st.just(-np.inf) | st.floats(-90, 5, width=32),
        min_size=8,
        max_size=8,
    ),
    size=st.sampled_from([1.0, 3e7]),
    k=st.integers(0, 9),
    p=st.sampled_from([0.0, 1e-45, 0.5, 0.95, 1.0]) | st.floats(0.015625, 1, width=32),
)
def test_coarse_filters_keep_at_least_what_exact_ones_keep(values, size, k, p):
    """And at most 1 / 64 nat more; what is 64 nats below the best goes, unless all is kept."""
    x = np.array([*values, 5.0], np.float32) * np.float32(size)
    near = x - x.max() > -64
    for name, value in (("top_k", k), ("top_p", p)):
        exact, coarse = (top_k, coarse_k) if name == "top_k" else (top_p, coarse_p)
        asked = np.array([value], np.int32 if name == "top_k" else np.float32)
        wanted, got = (np.asarray(each(x[None, None], asked))[0, 0] for each in (exact, coarse))
        kept = np.isfinite(got)
        np.testing.assert_array_equal(got[kept], x[kept])
        if value == (0 if name == "top_k" else 1):
            np.testing.assert_array_equal(got, x)
            continue
        assert kept[x == x.max()].all()
        assert near[kept].all()
        must = np.isfinite(wanted)
        assert kept[must & near].all()
        # A cell is taken whole; its upper end is above the lowest that must stay.
        assert (x[kept & ~must] > max(x[must].min(), x.max() - 64) - 1 / 64).all()


def test_rows_ask_for_different_filters():
    for name, values in (("top_k", [1, 5, 0, 50]), ("top_p", [0.9, 1, 0.5, 0.05])):
        got = getattr(filters, name)(jnp.asarray(LOGITS)[:, None], jnp.asarray(values))[:, 0]
        for row, value in enumerate(values):
            off = value == (0 if name == "top_k" else 1)
            wanted = LOGITS if off else GOLDEN[f"{name}:{value}"]
            np.testing.assert_array_equal(got[row], wanted[row])


def by_formula(logits, prompt, output, repetition, presence, frequency):
    logits = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        logits[token] *= 1 / repetition if logits[token] > 0 else repetition
    for token in set(output):  # OpenAI: mu[j] - c[j] * frequency - (c[j] > 0) * presence
        logits[token] -= output.count(token) * frequency + presence
    return logits


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_a_node_is_penalised_for_its_own_path(data):
    """Each node as if its path had been committed: repeats, siblings and all."""
    size, n = 12, 8
    token = st.integers(0, size - 1)
    prompt = data.draw(st.lists(token, min_size=3, max_size=3))
    output = data.draw(st.lists(token, min_size=4, max_size=4))
    tokens = [output[-1], *data.draw(st.lists(token, min_size=n - 1, max_size=n - 1))]
    parents = [-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, n)]
    paths = [[]]
    for i in range(1, n):
        paths.append([*paths[parents[i]], tokens[i]])
    depths = jnp.array([[len(path) for path in paths]])
    tree = trees.Tree(
        jnp.array([tokens]),
        jnp.array([parents]),
        depths,
        draft_tree.ancestor_matrix(jnp.array([parents]), n),
        jnp.ones((1, n), bool),
    )
    generator = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = generator.standard_normal((1, n, size)).astype(np.float32) * 3
    counts = counted(jnp.array([prompt + output]), 3, size)
    got = penalise(
        jnp.asarray(logits),
        counts,
        trees.path_tokens(tree, n - 1),
        jnp.array([1.3]),
        jnp.array([0.4]),
        jnp.array([0.25]),
    )
    for i in range(n):
        wanted = by_formula(logits[0, i], prompt, output + paths[i], 1.3, 0.4, 0.25)
        np.testing.assert_allclose(got[0, i], wanted, rtol=1e-5, atol=1e-5)


def test_log_probs():
    tokens = np.array([[3, 17], [0, 299], [5, 5], [100, 250]])
    got = penalties.log_probs(jnp.asarray(np.stack([LOGITS, LOGITS[::-1]], 1)), jnp.asarray(tokens))
    for row in range(ROWS):
        for node, logits in enumerate((LOGITS[row], LOGITS[::-1][row])):
            wide = logits.astype(np.float64)
            wanted = wide[tokens[row, node]] - np.log(np.exp(wide).sum())
            assert got[row, node] == pytest.approx(wanted, abs=1e-5)
