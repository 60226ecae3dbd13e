"""What only GPUs can show (`make test-gpu`).

That kernels which wait for other devices find them, and that what the CPU interpreter says of a
kernel holds for the compiled one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax import Engine, Options
from ddtree_jax.commands.bench_round import random_parameters
from ddtree_jax.shapes import SHAPES
from ddtree_jax.sharding import DATA, MODEL, local_mesh
from kernels_pallas import exchange, sample

pytestmark = pytest.mark.gpu
D = 512
# Exchanges of one program, in this order: rows of sums, and numbers that are gathered.
SUMS = (64, 1, 512, 8, 1, 128, 64, 3)
GATHERED = (5, 3000, 127, 128, 1, 65536, 129, 64)


@pytest.fixture
def mesh():
    if len(jax.local_devices()) < 2:
        pytest.skip("one GPU; two are needed")
    return local_mesh(1, 2)


def over(mesh, function, *arguments):
    """What both devices hold, [2, ...]; arguments are [2, ...], a row each."""
    spec = jax.P((DATA, MODEL))

    def program(*rows):
        return jax.tree.map(lambda y: y[None], function(*(row[0] for row in rows)))

    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=(spec,) * len(arguments), out_specs=spec, check_vma=False
    )
    where = jax.NamedSharding(mesh, spec)
    return jax.jit(mapped), [jax.device_put(argument, where) for argument in arguments]


def test_exchanges_of_any_size_follow_each_other(mesh):
    """On both devices to the last bit the reference's, whatever was exchanged before."""
    inboxes = exchange.open_inboxes(mesh, MODEL, D)
    x = jax.random.normal(jax.random.key(0), (2, 512, D), jnp.bfloat16)
    numbers = jax.random.randint(jax.random.key(1), (2, 65536), 0, 2**31 - 1)
    weight = jnp.ones((D,), jnp.bfloat16)

    def chain(by_kernel, x, numbers, addresses):
        carried, seen = jnp.zeros((), jnp.bfloat16), []
        for m, count in zip(SUMS, GATHERED, strict=True):
            parts = (x[:m] + carried)[None]
            nothing = jnp.zeros((m, D), jnp.bfloat16)
            sent = numbers[:count] ^ (carried.astype(jnp.float32) * 1024).astype(jnp.int32) & 1023
            if by_kernel:
                y, _ = exchange.add_norm(nothing, parts, weight, addresses, 1e-6)
                got = exchange.all_gather(sent, addresses)
            else:
                y, _ = exchange.reference(nothing, parts, weight, 1e-6, MODEL)
                got = jax.lax.all_gather(sent, MODEL)
            # The next exchange depends on both.
            carried = y[0, 0] * (1 + (got.sum() & 1)).astype(jnp.bfloat16)
            seen += [y, got]
        return seen

    by_kernel, by_xla = (
        over(mesh, functools.partial(chain, each), x, numbers, inboxes.addresses)
        for each in (True, False)
    )
    wanted = [np.asarray(y) for y in by_xla[0](*by_xla[1])]
    for _ in range(25):
        for got, same in zip(by_kernel[0](*by_kernel[1]), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(got)[0], same[0])
            np.testing.assert_array_equal(np.asarray(got)[1], same[0])


@pytest.mark.parametrize("mode", ["ar", "dflash", "ddtree"])
def test_two_devices_emit_the_same_by_kernel_and_by_xla(mesh, mode, monkeypatch):
    """Only who sums differs: the additions, and so the tokens, are the same."""
    target, drafter = (
        dataclasses.replace(
            config, hidden_size=D, num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=1024
        )
        for config in SHAPES["tiny"]
    )

    def emitted(sums):
        engine = Engine(target, drafter, random_parameters, mesh=mesh)
        assert engine.sums == sums
        options = Options(mode=mode, tree_budget=31, max_new_tokens=48, stop_ids=())
        return [result.output_ids for result in engine.generate([[1, 2, 3], [5] * 40], options)]

    by_kernel = emitted("kernel")
    monkeypatch.setattr(exchange, "unreachable_reason", lambda devices: "not today")
    assert emitted("XLA") == by_kernel


@pytest.mark.parametrize(("k", "p", "min_p"), [(1, 1, 0), (50, 1, 0), (0, 0.9, 0), (50, 0.9, 0.05)])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_sampling_compiled_equals_its_reference(k, p, min_p, scale):
    b, n, v, depths = 2, 64, 151936, 16
    scores = scale * jax.random.normal(jax.random.key(0), (b, n, v), jnp.float32)
    noise = jax.random.gumbel(jax.random.key(1), (b, depths, v), jnp.float32)
    at = jax.random.randint(jax.random.key(2), (b, n), 0, depths)
    asked = (
        jnp.full((b,), k, jnp.int32) if k else None,
        jnp.full((b,), p, jnp.float32) if p < 1 else None,
        jnp.full((b,), min_p, jnp.float32) if min_p else None,
    )
    got = np.asarray(sample.sample(scores, noise, at, *asked))
    wanted = np.asarray(jax.jit(sample.reference)(scores, noise, at, *asked))
    # The mass above a token is added up in another order: at the edge of top-p it may fall
    # either way.
    assert (got != wanted).sum() <= (2 if p < 1 else 0)
    # A node's choice depends on its own row alone.
    first = [None if x is None else x[:1] for x in asked]
    alone = sample.sample(scores[:1, 7:8], noise[:1], at[:1, 7:8], *first)
    assert np.asarray(alone).item() == got[0, 7]
