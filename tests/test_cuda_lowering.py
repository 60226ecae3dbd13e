"""Every program of a request lowers for CUDA on a host without a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ddtree_jax import gated_delta, rounds
from ddtree_jax.models import Models, parameter_shapes
from ddtree_jax.sampling import GREEDY, Sampler
from ddtree_jax.shapes import SHAPES

PROGRAMS = {
    "ar": rounds.ar_round,
    "dflash": rounds.chain_round,
    "ddtree": functools.partial(rounds.tree_round, budget=15, stable_top_k=False),
    "prefill": rounds.prefill_chunk,
}


SAMPLERS = {
    "greedy": GREEDY,
    "sampled": Sampler(noise=True),
    "everything": Sampler(*(True,) * len(dataclasses.fields(Sampler))),
}
CASES = [("tiny", name, sampler) for name in PROGRAMS for sampler in SAMPLERS]
CASES += [("tiny-hybrid", name, "greedy") for name in PROGRAMS]


@pytest.mark.parametrize(("shape", "name", "sampler"), CASES)
def test_round(shape, name, sampler, monkeypatch):
    # What depends on the device must take the GPU's way: unrolled levels, no padded rows.
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    abstract = nnx.eval_shape(lambda: Models(*SHAPES[shape], rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    half = parameter_shapes(state, jnp.bfloat16)
    empty = functools.partial(
        rounds.empty_state,
        abstract,
        2,
        128,
        8,
        jnp.bfloat16,
        drafting=name != "ar",
        biases=8,
        penalised=SAMPLERS[sampler].penalties,
    )
    chunk = (
        jax.ShapeDtypeStruct((2, 16), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.bool_),
    )

    def program(state, decode_state, *arguments):
        models = nnx.merge(graphdef, state)
        return PROGRAMS[name](models, decode_state, *arguments, sampler=SAMPLERS[sampler])

    arguments = chunk if name == "prefill" else ()
    traced = jax.jit(program, donate_argnums=1).trace(half, jax.eval_shape(empty), *arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.dot_general" in text
    assert "stablehlo.while" not in text  # no loop that the host would drive
    # The caches are donated: their outputs reuse the inputs' buffers.
    assert text.count("tf.aliasing_output") >= 2 * SHAPES[shape][0].num_layers


@pytest.mark.parametrize("nodes", [64, 16, 1])
def test_gated_delta_fills_tensor_cores(nodes, monkeypatch):
    """Every product of a tree in three of TF32; of plain decoding, and on a CPU, none."""
    k, r, size = 2, 3, 128
    shapes = ((k, size), (k, size), (k, r, size), (k, r), (k, r), (nodes,))
    rows = [jax.ShapeDtypeStruct((1, nodes, *shape), jnp.float32) for shape in shapes]
    state = jax.ShapeDtypeStruct((1, k, size, r, size), jnp.float32)
    depths = jax.ShapeDtypeStruct((1, nodes), jnp.int32)

    def text(platform):
        def program(state, q, k, v, g, beta, ancestors, depths):
            o, u = gated_delta.tree(
                state, q, k, v, g, beta, ancestors > 0, depths, min(nodes - 1, 15)
            )
            pending = gated_delta.Nodes(k, u, g, k)
            carried = gated_delta.Recurrent(state, jnp.zeros((1, 2, 3, size)))
            return o, gated_delta.commit(carried, pending, depths[:, 0], depths[:, :16])

        return (
            jax.jit(program)
            .trace(state, *rows, depths)
            .lower(lowering_platforms=(platform,))
            .as_text()
        )

    products = ("stablehlo.dot_general", "num_primitive_operations = 3")
    on_cpu = [text("cpu").count(each) for each in products]
    monkeypatch.setattr(gated_delta, "_has_tf32", lambda: True)
    on_gpu = [text("cuda").count(each) for each in products]
    assert on_cpu[0] == on_gpu[0] > 4
    assert on_cpu[1] == 0
    assert on_gpu[1] == (on_gpu[0] if nodes > 1 else 0)
