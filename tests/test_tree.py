"""Draft trees: the builder against a plain heap, acceptance against a walk."""

import functools
import heapq
import itertools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ddtree_jax import tree as trees
from kernels_pallas import draft_tree

UNIT = 2**20  # scores are whole multiples of 2^-20 nats
FLOOR = -(2**26)
# (levels, candidates, budget): few, since each is compiled; candidates may be fewer than the budget
# only where they are the whole vocabulary.
SHAPES = [
    (1, 1, 1),
    (1, 5, 3),
    (1, 4, 9),
    (2, 1, 7),
    (3, 2, 7),
    (5, 4, 1),
    (15, 2, 15),
    (7, 3, 31),
    (15, 63, 63),
    (4, 127, 127),
    (15, 6, 127),
]
build = jax.jit(trees.build, static_argnames=("budget", "chain_seed"))
check = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)


@st.composite
def scores(draw):
    """(budget, units [levels, candidates]): integer scores, each row falling from 0 or below."""
    levels, ranks, budget = draw(st.sampled_from(SHAPES))
    top, step = draw(st.sampled_from([(0, 1), (1, 2**18), (3, 2**20), (40, 1), (2**24, 1)]))
    elements = st.integers(0, top)
    units = -step * draw(hnp.arrays(np.int64, (levels, ranks), elements=elements))
    units = -np.sort(-units, axis=1)
    if draw(st.booleans()):
        units[:, 0] = 0  # a confident drafter
    if draw(st.booleans()):  # candidates of probability zero
        units[:, draw(st.integers(1, ranks)) :] = np.iinfo(np.int64).min
    return budget, units


def heap(units):
    """All rank tuples, best first: the public algorithm, ties by tuple."""
    levels, ranks = units.shape
    units = np.maximum(units, FLOOR)
    queue = [(-int(units[0, 0]), (0,))]
    while queue:
        cost, path = heapq.heappop(queue)
        yield path
        depth, rank = len(path), path[-1]
        if rank + 1 < ranks:
            sibling = cost + int(units[depth - 1, rank]) - int(units[depth - 1, rank + 1])
            heapq.heappush(queue, (sibling, (*path[:-1], rank + 1)))
        if depth < levels:
            heapq.heappush(queue, (cost - int(units[depth, 0]), (*path, 0)))


def tokens_of(levels, ranks):
    """A distinct token for every (level, rank), so that a token names its candidate."""
    return 1000 + np.arange(levels)[:, None] * ranks + np.arange(ranks)


def build_paths(units, budget, **settings):
    """The built tree and each valid node's rank tuple, in node order without the root."""
    levels, ranks = units.shape
    log_probs = np.where(units < FLOOR * 4, -np.inf, units / UNIT).astype(np.float32)
    tree = build(
        jnp.array([7]),
        jnp.asarray(tokens_of(levels, ranks))[None],
        jnp.asarray(log_probs)[None],
        budget=budget,
        **settings,
    )
    row = jax.tree.map(lambda part: np.asarray(part[0]), tree)
    paths = {0: ()}
    for node in range(1, budget + 1):
        if row.valid[node]:
            level = row.depths[node] - 1
            rank = int(row.tokens[node]) - 1000 - level * ranks
            assert 0 <= rank < ranks
            assert 0 <= row.parents[node] < node  # topological order
            paths[node] = (*paths[int(row.parents[node])], rank)
            assert len(paths[node]) == row.depths[node]
    return row, paths


def check_structure(row, paths, budget):
    assert row.depths.max() <= row.max_depth
    for name in ("tokens", "parents", "depths", "ancestors", "valid"):
        wanted = (budget + 1,) * 2 if name == "ancestors" else (budget + 1,)
        assert getattr(row, name).shape == wanted
    assert (row.tokens[0], row.parents[0], row.depths[0], row.valid[0]) == (7, -1, 0, True)
    assert list(paths) == list(range(len(paths)))  # invalid nodes come last
    for i, j in itertools.product(range(budget + 1), repeat=2):
        above = i in paths and j in paths and paths[i][: len(paths[j])] == paths[j]
        assert row.ancestors[i, j] == (above or i == j), (i, j)


@check(max_examples=60)
@given(scores())
def test_build_like_a_heap(case):
    budget, units = case
    row, paths = build_paths(units, budget)
    assert list(paths.values())[1:] == list(itertools.islice(heap(units), budget))
    check_structure(row, paths, budget)


@check(max_examples=30)
@given(scores())
def test_build_with_the_chain_first(case):
    budget, units = case
    row, paths = build_paths(units, budget, chain_seed=True)
    chain = [(0,) * depth for depth in range(1, units.shape[0] + 1)]
    others = (path for path in heap(units) if path not in chain)
    wanted = list(itertools.islice(itertools.chain(chain, others), budget))
    # The seed leads the best-first order; what else the budget holds is the best of the rest.
    assert sorted(list(paths.values())[1:]) == sorted(wanted)
    check_structure(row, paths, budget)


@pytest.mark.parametrize("levels", [1, 7, 31])
def test_scores_at_the_floor_do_not_overflow(levels):
    units = np.full((levels, 2), 2 * FLOOR, np.int64)
    units[:, 0] = FLOOR
    row, paths = build_paths(units, 15)
    assert list(paths.values())[1:] == list(itertools.islice(heap(units), 15))
    check_structure(row, paths, 15)


def test_deeper_trees_are_refused():
    with pytest.raises(ValueError, match="32"):
        trees.build(jnp.array([0]), jnp.zeros((1, 32, 1), int), jnp.zeros((1, 32, 1)), 1)


def test_rows_of_a_batch_are_independent():
    generator = np.random.default_rng(0)
    log_probs = -np.sort(generator.exponential(2, (5, 7, 15)).astype(np.float32), axis=2)
    tokens = generator.integers(0, 99, (5, 7, 15))
    roots = np.arange(5)
    together = build(jnp.asarray(roots), jnp.asarray(tokens), jnp.asarray(log_probs), budget=15)
    for row in range(5):
        part = slice(row, row + 1)
        alone = build(
            jnp.asarray(roots[part]), jnp.asarray(tokens[part]), jnp.asarray(log_probs[part]),
            budget=15,
        )  # fmt: skip
        jax.tree.map(lambda a, b, part=part: np.testing.assert_array_equal(a[part], b), together,
                     alone)  # fmt: skip


@check(max_examples=30)
@given(scores(), st.integers(0, 2**32 - 1))
def test_a_tree_with_the_chain_accepts_no_less_than_the_chain(case, seed):
    budget, units = case
    levels, ranks = units.shape
    assume(budget >= levels)
    row, paths = build_paths(units, budget, chain_seed=True)

    def chosen(path):
        """What the target says after a path: a function of the path, the best draft often."""
        generator = np.random.default_rng([seed, *path])
        rank = 0 if generator.random() < 0.7 else generator.integers(ranks)
        return 1000 + len(path) * ranks + rank

    choice = [chosen(paths[node]) if node in paths else 7 for node in range(budget + 1)]
    _, count = trees.accept(
        jax.tree.map(lambda part: jnp.asarray(part)[None], row), jnp.array([choice]), levels + 1
    )
    accepted = 1
    while accepted <= levels:
        best = 1000 + (accepted - 1) * ranks
        if chosen((0,) * (accepted - 1)) != best:
            break
        accepted += 1
    assert int(count[0]) >= accepted


N, PATH = 12, 6


@st.composite
def verified(draw):
    """A random tree with padding nodes, and choices that often follow a branch."""
    size = draw(st.integers(1, N))
    parents, depths, tokens = [-1], [0], [3]
    for node in range(1, size):
        shallow = [i for i in range(node) if depths[i] < PATH - 1]
        parent = draw(st.sampled_from(shallow))
        taken = [tokens[i] for i in range(1, node) if parents[i] == parent]
        token = draw(st.sampled_from([t for t in range(N + 1) if t not in taken]))
        parents.append(parent)
        depths.append(depths[parent] + 1)
        tokens.append(token)
    choice = []
    for node in range(N):
        children = [tokens[i] for i in range(1, size) if parents[i] == node]
        follows = children and draw(st.integers(0, 3))
        choice.append(draw(st.sampled_from(children) if follows else st.integers(0, N)))
    # Padding that tempts: children of the root with the very token that the target chooses.
    padding = N - size
    tokens += [choice[0]] * padding
    parents += [0] * padding
    depths += draw(st.sampled_from([[0] * padding, [1] * padding]))
    return size, parents, depths, tokens, choice


def as_tree(size, parents, depths, tokens):
    valid = jnp.arange(N) < size
    linked = jnp.where(valid, jnp.array(parents), -1)
    return trees.Tree(
        tokens=jnp.array([tokens]),
        parents=jnp.array([parents]),
        depths=jnp.array([depths]),
        ancestors=draft_tree.ancestor_matrix(linked[None], PATH - 1),
        valid=valid[None],
    )


accept = jax.jit(trees.accept, static_argnums=2)


@check(max_examples=300)
@given(verified())
def test_accept_like_a_walk(case):
    size, parents, depths, tokens, choice = case
    path = [0]
    while True:
        matches = [
            i for i in range(1, size) if parents[i] == path[-1] and tokens[i] == choice[path[-1]]
        ]
        if not matches:
            break
        path.append(matches[0])
    got, count = accept(as_tree(size, parents, depths, tokens), jnp.array([choice]), PATH)
    assert int(count[0]) == len(path)
    assert got[0].tolist() == path + [0] * (PATH - len(path))


@check(max_examples=60)
@given(verified())
def test_ancestors_by_brute_force(case):
    size, parents, depths, tokens, _ = case
    got = np.asarray(as_tree(size, parents, depths, tokens).ancestors[0])
    for node in range(N):
        wanted, up = {node}, node
        while up < size and parents[up] >= 0:
            up = parents[up]
            wanted.add(up)
        assert set(np.flatnonzero(got[node])) == wanted


def test_chain():
    tree = trees.chain(jnp.array([[5, 6, 7, 8], [5, 6, 7, 8]]), jnp.array([4, 2]))
    assert tree.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert tree.depths.tolist() == [[0, 1, 2, 3]] * 2
    assert tree.valid.tolist() == [[True] * 4, [True, True, False, False]]
    np.testing.assert_array_equal(tree.ancestors[0], np.tril(np.ones((4, 4), bool)))
    path, count = trees.accept(tree, jnp.array([[6, 7, 8, 9]] * 2), 4)
    assert count.tolist() == [4, 2]
    assert path.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    path, count = trees.accept(tree, jnp.array([[6, 0, 8, 9]] * 2), 4)
    assert count.tolist() == [2, 2]
