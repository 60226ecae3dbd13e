"""Gated DeltaNet over trees against the plain recurrence, in float64, along every path."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax import gated_delta
from ddtree_jax.gated_delta import Nodes, Recurrent
from kernels_pallas import draft_tree

K, R, X, Y, TAPS = 2, 3, 8, 4, 4  # key heads, value heads of each, their sizes, convolution
C = 2 * X + R * Y
NODES, DEEPEST = 14, 6
DECAYS = {"none": 0.0, "weak": 1e-3, "usual": 1.0, "strong": 60.0, "mixed": None}

generators = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def close(got, wanted, tolerance=1e-5):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())


def draw_rows(generator, count, decay):
    """Inputs of the convolution, g, beta and a scale of the values, float64."""
    strength = 10 ** generator.uniform(-4, 2, (count, K, R)) if decay is None else decay
    return dict(
        inputs=generator.standard_normal((count, K, C)),
        g=-strength * generator.uniform(0, 1, (count, K, R)),
        beta=generator.uniform(0, 1, (count, K, R)),
        scale=np.ones(count),
    )


def split(mixed, scale, xp):
    """Normalised q and k, and v."""
    q, k, v = xp.split(mixed, [X, 2 * X], axis=-1)
    unit = lambda x: x / xp.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)  # noqa: E731
    v = v.reshape(*v.shape[:-1], R, Y) * scale[..., None, None, None]
    return unit(q) * X**-0.5, unit(k), v


def plain(weight, rows):
    """The outputs of a sequence and its last state: zeros before it, one row after the other."""
    count = len(rows["g"])
    source = np.concatenate([np.zeros((TAPS - 1, K, C)), rows["inputs"]])
    mixed = sum(weight[tap] * source[tap : tap + count] for tap in range(TAPS))
    q, k, v = split(mixed / (1 + np.exp(-mixed)), rows["scale"], np)
    state, outputs = np.zeros((K, X, R, Y)), []
    for t in range(count):
        state = state * np.exp(rows["g"][t])[:, None, :, None]
        u = rows["beta"][t][..., None] * (v[t] - np.einsum("kx,kxry->kry", k[t], state))
        state = state + np.einsum("kx,kry->kxry", k[t], u)
        outputs.append(np.einsum("kx,kxry->kry", q[t], state))
    return np.array(outputs).reshape(count, K, R, Y), state


def joined(*parts):
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def taken(rows, index):
    return {name: values[index] for name, values in rows.items()}


def carried_after(weight, rows) -> Recurrent:
    window = np.concatenate([np.zeros((TAPS - 1, K, C)), rows["inputs"]])[-(TAPS - 1) :]
    state = plain(weight, rows)[1]
    values = (state, window.transpose(1, 0, 2))
    return Recurrent(*(jnp.asarray(x[None], jnp.float32) for x in values))


def single(rows):
    return {name: jnp.asarray(values[None], jnp.float32) for name, values in rows.items()}


@functools.partial(jax.jit, static_argnames=("deepest", "whole"))
def forward(weight, carried, rows, parents, depths, *, deepest=DEEPEST, whole=False):
    """Outputs of the nodes, and what is pending of them."""
    ancestors = draft_tree.ancestor_matrix(parents, deepest)
    places = None if whole else gated_delta.conv_rows(ancestors, depths, TAPS)
    mixed = gated_delta.convolve(carried.window, rows["inputs"], weight, places)
    q, k, v = split(mixed, rows["scale"], jnp)
    g, beta = rows["g"], rows["beta"]
    if whole:
        return gated_delta.chunk(carried.state, q, k, v, g, beta, size=5)
    o, u = gated_delta.tree(carried.state, q, k, v, g, beta, ancestors, depths, deepest)
    return o, Nodes(k, u, g, rows["inputs"])


commit = jax.jit(gated_delta.commit)


def draw_tree(generator):
    parents, depths = [-1], [0]
    for node in range(1, NODES):
        options = [i for i in range(node) if depths[i] < DEEPEST]
        # Often the newest node, so that trees are deep and not only wide.
        deep = generator.random() < 0.5 and options[-1] == node - 1
        parents.append(node - 1 if deep else int(generator.choice(options)))
        depths.append(depths[parents[-1]] + 1)
    return np.array(parents), np.array(depths)


def path_to(parents, node):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def integers(values):
    return jnp.asarray(np.asarray(values)[None], jnp.int32)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(generators, st.sampled_from(sorted(DECAYS)), st.integers(0, 9))
def test_a_tree_is_all_its_paths_and_commits_any(generator, decay, prefix_length):
    weight = generator.standard_normal((TAPS, K, C))
    prefix = draw_rows(generator, prefix_length, DECAYS[decay])
    nodes = draw_rows(generator, NODES, DECAYS[decay])
    parents, depths = draw_tree(generator)
    # Siblings with huge values: what leaks of them drowns every other path.
    huge = generator.choice(np.flatnonzero(depths > 0))
    nodes["scale"][huge] = 1e8
    carried = carried_after(weight, prefix)
    o, pending = forward(
        jnp.asarray(weight, jnp.float32),
        carried,
        single(nodes),
        integers(parents),
        integers(depths),
    )
    for leaf in set(range(NODES)) - set(parents.tolist()):
        path = path_to(parents, leaf)
        wanted, state = plain(weight, joined(prefix, taken(nodes, path)))
        for node, line in zip(path, wanted[prefix_length:], strict=True):
            # A path is as exact as its own numbers allow, whatever the others hold.
            scale = np.abs(wanted[: prefix_length + path.index(node) + 1]).max()
            np.testing.assert_allclose(o[0, node], line, rtol=0, atol=1e-5 * scale)
        count = jnp.full(1, len(path), jnp.int32)
        padded = path + [0] * (DEEPEST + 1 - len(path))
        after = commit(carried, pending, count, integers(padded))
        close(after.state[0], state)
        rows = joined(prefix, taken(nodes, path))
        np.testing.assert_array_equal(after.window, carried_after(weight, rows).window)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(generators, st.sampled_from(sorted(DECAYS)), st.integers(0, 9))
def test_a_chunk_is_a_chain(generator, decay, prefix_length):
    """Fourteen rows, five at a time, against the recurrence and against the general form."""
    weight = generator.standard_normal((TAPS, K, C))
    prefix = draw_rows(generator, prefix_length, DECAYS[decay])
    rows = draw_rows(generator, NODES, DECAYS[decay])
    chain = np.arange(NODES)
    carried, single_weight = carried_after(weight, prefix), jnp.asarray(weight, jnp.float32)
    arguments = (single_weight, carried, single(rows), integers(chain - 1), integers(chain))
    wanted, last = plain(weight, joined(prefix, rows))
    o, state = forward(*arguments, whole=True)
    close(o[0], wanted[prefix_length:])
    close(state[0], last)
    o, pending = forward(*arguments, deepest=NODES - 1)
    close(o[0], wanted[prefix_length:])
    close(commit(carried, pending, jnp.full(1, NODES, jnp.int32), None).state[0], last)


def test_the_scan_is_the_definition():
    generator = np.random.default_rng(1)
    weight, rows = generator.standard_normal((TAPS, K, C)), draw_rows(generator, 9, 1.0)
    nothing = carried_after(weight, draw_rows(generator, 0, 1.0))
    one = single(rows)
    mixed = gated_delta.convolve(
        nothing.window, one["inputs"], jnp.asarray(weight, jnp.float32), None
    )
    q, k, v = split(mixed, one["scale"], jnp)
    o, state = gated_delta.recurrence(nothing.state, q, k, v, one["g"], one["beta"])
    wanted, last = plain(weight, rows)
    close(o[0], wanted)
    close(state[0], last)


# Products on tensor cores, as XLA makes them of float32 (TF32_TF32_F32_X3), on a CPU.


def cut(x):
    """To TF32's eleven bits, toward zero."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFE000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def one_product(a, b):
    return jnp.matmul(cut(a), cut(b), precision="highest")


def three_products(a, b):
    low = one_product(a - cut(a), b) + one_product(a, b - cut(b))
    return low + one_product(a, b)


@pytest.mark.parametrize("product", [None, three_products])
def test_two_hundred_rounds_do_not_drift(product, monkeypatch):
    """Trees and random accepted paths, rounds with nothing accepted and finished rows included."""
    if product:
        monkeypatch.setattr(gated_delta, "_matmul", product)
    # Not those of other tests, which were traced with another product.
    run = jax.jit(functools.partial(forward.__wrapped__))
    take = jax.jit(functools.partial(gated_delta.commit))
    generator = np.random.default_rng(2)
    weight = generator.standard_normal((TAPS, K, C))
    text = draw_rows(generator, 3, 0.05)
    carried, lengths = carried_after(weight, text), []
    for _ in range(200):
        nodes = draw_rows(generator, NODES, 0.05)
        parents, depths = draw_tree(generator)
        path = path_to(parents, int(generator.integers(NODES)))
        count = int(generator.choice([0, 1, len(path)], p=[0.1, 0.2, 0.7]))
        _, pending = run(
            jnp.asarray(weight, jnp.float32),
            carried,
            single(nodes),
            integers(parents),
            integers(depths),
        )
        padded = path + [0] * (DEEPEST + 1 - len(path))
        before = carried
        carried = take(carried, pending, jnp.full(1, count, jnp.int32), integers(padded))
        if count == 0:
            for ours, theirs in zip(jax.tree.leaves(carried), jax.tree.leaves(before), strict=True):
                np.testing.assert_array_equal(ours, theirs)
        text = joined(text, taken(nodes, path[:count]))
        lengths.append(count)
    assert {0, 1, DEEPEST} <= set(lengths)
    close(carried.state[0], plain(weight, text)[1])


def test_a_strong_decay_above_does_not_blur_weak_ones_below():
    """The difference of cumulative sums would be wrong by 1e-3 here."""
    g = np.array([-0.5, -3e4, -0.25, -0.125])
    causal = jnp.tril(jnp.ones((4, 4), bool))[None]
    decay, between = gated_delta._decays(jnp.asarray(g, jnp.float32)[None, None, None], causal)
    np.testing.assert_allclose(between[0, 0, 0, 3, 1:], np.exp([-0.375, -0.125, 0]), rtol=1e-6)
    assert decay[0, 0, 0, 3] == between[0, 0, 0, 3, 0] == 0
    assert (np.asarray(between[0, 0, 0])[np.triu_indices(4, 1)] == 0).all()


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 15, 16, 31, 63])
@pytest.mark.parametrize("alike", [1.0, 0.95, 0.0])
def test_the_solve_is_exact_where_one_series_is_not(depth, alike):
    """Full steps, no decay, keys of cosine `alike`: a chain, and nodes without a parent."""
    generator = np.random.default_rng(3)
    keys = generator.standard_normal((depth + 1, 64))
    keys = np.sqrt(alike) + np.sqrt(1 - alike) * keys
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    a = np.zeros((depth + 4, depth + 4), np.float32)
    a[: depth + 1, : depth + 1] = np.tril(keys @ keys.T, -1)
    right = generator.standard_normal((depth + 4, 5)).astype(np.float32)
    depths = np.minimum(np.arange(depth + 4), depth)[None]
    got = gated_delta.unit_solve(
        jnp.asarray(a)[None, None, None],
        jnp.asarray(right)[None, None, None],
        jnp.asarray(depths),
        depth,
    )
    wanted = np.linalg.solve(np.eye(len(a)) + a.astype(np.float64), right)
    close(got[0, 0, 0], wanted)


def real_rows(generator, count, decay, alike):
    """Rows of two heads of the published sizes, keys and queries of cosine `alike`."""
    shared = generator.standard_normal(128)

    def units():
        x = np.sqrt(alike) * shared + np.sqrt(1 - alike) * generator.standard_normal((count, 128))
        return (x / np.linalg.norm(x, axis=-1, keepdims=True))[:, None].astype(np.float32)

    strength = 10 ** generator.uniform(-4, 2, (count, 1, 2)) if decay is None else decay
    rows = (
        units() * np.float32(128**-0.5),
        units(),
        generator.standard_normal((count, 1, 2, 128)),
        -strength * generator.uniform(0, 1, (count, 1, 2)),
        generator.uniform(0.9, 1, (count, 1, 2)),
    )
    return [row.astype(np.float32) for row in rows]


def exactly(state, rows):
    """The recurrence in float64: outputs and the last state."""
    state, outputs = state.astype(np.float64), []
    for q, k, v, g, beta in zip(*(row.astype(np.float64) for row in rows), strict=True):
        state = state * np.exp(g)[:, None, :, None]
        u = beta[..., None] * (v - np.tensordot(k[0], state[0], 1))
        state = state + k[:, :, None, None] * u[:, None]
        outputs.append(np.tensordot(q[0], state[0], 1)[None])
    return np.array(outputs), state


def errors(product, decay, alike, monkeypatch):
    """Of a tree's outputs and committed state, and of a chunk's, with products so made."""
    monkeypatch.setattr(gated_delta, "_matmul", product)
    generator, count, before = np.random.default_rng(4), 36, 64
    rows = real_rows(generator, before + count, decay, alike)
    nothing = np.zeros((1, 128, 2, 128), np.float32)
    state = exactly(nothing, [row[:before] for row in rows])[1].astype(np.float32)
    # A chain of 32 nodes, and four leaves beside its end.
    parents = np.array([*range(-1, 31), 30, 30, 30, 30])
    depths, path = np.minimum(np.arange(count), 31), np.arange(32)

    @jax.jit
    def run(state, rows):
        ancestors = draft_tree.ancestor_matrix(integers(parents), 31)
        nodes = [row[:, before:] for row in rows]
        o, u = gated_delta.tree(state, *nodes, ancestors, integers(depths), 31)
        carried = Recurrent(state, jnp.zeros((1, 1, 3, 1)))
        pending = Nodes(nodes[1], u, nodes[3], jnp.zeros((1, count, 1, 1)))
        after = gated_delta.commit(carried, pending, jnp.full(1, 32, jnp.int32), integers(path))
        return o[0, :32], after.state[0], gated_delta.chunk(0 * state, *rows)

    o, after, (chunk_o, chunk_state) = run(state[None], [row[None] for row in rows])
    tree_rows = [row[before : before + 32] for row in rows]
    pairs = zip(
        (o, after, chunk_o[0], chunk_state[0]),
        (*exactly(state, tree_rows), *exactly(nothing, rows)),
        strict=True,
    )
    return [np.abs(ours - wanted).max() / np.abs(wanted).max() for ours, wanted in pairs]


@pytest.mark.parametrize(
    ("capability", "asked"),
    [
        ("7.5", False),
        ("8.0", True),
        ("9.0", True),
        ("12.0", True),
        ("gfx942", False),
        (None, False),
    ],
)
@pytest.mark.parametrize("small", [False, True])
def test_tf32_is_asked_only_of_devices_that_have_it(capability, asked, small, monkeypatch):
    """XLA compiles no program that asks it of another: hybrid targets would not run there."""
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    a, b = jnp.ones((16, 16)), jnp.ones((16, 15 if small else 16))
    traced = str(jax.make_jaxpr(lambda a, b: gated_delta._matmul(a, b))(a, b))
    assert ("TF32" in traced) == (asked and not small)


@pytest.mark.parametrize("alike", [0.95, 0.0])
@pytest.mark.parametrize("decay", ["none", "strong", "mixed"])
def test_three_products_of_tf32_are_enough(decay, alike, monkeypatch):
    found = errors(three_products, DECAYS[decay], alike, monkeypatch)
    assert max(found) < 7e-6, found


def test_one_product_of_tf32_is_not(monkeypatch):
    assert min(errors(one_product, DECAYS["mixed"], 0.95, monkeypatch)) > 1e-5


def test_convolution_reads_up_the_tree_into_the_committed_inputs():
    parents = np.array([-1, 0, 1, 0, 2, 4])
    depths = np.array([0, 1, 2, 1, 3, 4])
    ancestors = draft_tree.ancestor_matrix(jnp.asarray(parents)[None], 4)
    rows = gated_delta.conv_rows(ancestors, jnp.asarray(depths)[None], TAPS)
    wanted = [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [1, 2, 3, 6], [3, 4, 5, 7], [4, 5, 7, 8]]
    assert rows[0].tolist() == wanted
    # A second root: packed documents begin with nothing, or with the same committed inputs.
    parents, depths = np.append(parents, [-1, 6]), np.append(depths, [0, 1])
    ancestors = draft_tree.ancestor_matrix(jnp.asarray(parents)[None], 4)
    rows = gated_delta.conv_rows(ancestors, jnp.asarray(depths)[None], TAPS)
    assert rows[0].tolist() == [*wanted, [0, 1, 2, 9], [1, 2, 9, 10]]
