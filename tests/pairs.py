"""The golden pairs (oracle/README.md) as test material: files, models, engines."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import convert
import ddtree_jax
from ddtree_jax.models import Models, parameter_name

ORACLE = Path(__file__).parent / "oracle"
PAIRS = (
    "causal_full",
    "causal_head",
    "hybrid_fused",
    "hybrid_swa",
    "llama_gqa3",
    "llama_mha",
    "qwen3_gqa",
    "qwen3_tied",
    "qwen3_yarn",
    "swa_bidir",
    "swa_causal",
)
BUDGETS = (7, 15, 31, 63, 127)


def rarely(*case):
    """A case of a grid that `make main-job` runs and `make test` does not."""
    return pytest.param(*case, marks=pytest.mark.exhaustive)


@functools.cache
def golden(name: str) -> dict:
    return json.loads((ORACLE / name / "golden.json").read_text(encoding="utf-8"))


@functools.cache
def modules(name: str) -> dict[str, np.ndarray]:
    return load_file(ORACLE / name / "modules.safetensors")


def engine(name: str, **settings) -> ddtree_jax.Engine:
    folder = ORACLE / name
    settings = {"dtype": "float32", "tokenizer": False} | settings
    return ddtree_jax.load(folder / "target", folder / "draft", **settings)


@functools.cache
def models(name: str) -> Models:
    """The pair's modules with their weights in float32."""
    parts = {
        "target": convert.open_model(ORACLE / name / "target", drafter=False),
        "drafter": convert.open_model(ORACLE / name / "draft", drafter=True),
    }
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    given = {
        f"{role}.{key}": array
        for role, source in parts.items()
        for key, array in source.load("float32", sharding_for=lambda _: device).items()
    }
    target, drafter = parts["target"].config, parts["drafter"].config
    return filled(Models, target, drafter, values=lambda key, _: given[key])


def filled(kind, *configs, values) -> nnx.Module:
    """A module whose parameters are values(name, shape)."""
    abstract = nnx.eval_shape(lambda: kind(*configs, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    named, treedef = jax.tree.flatten_with_path(state)
    leaves = [values(parameter_name(path), shape.shape) for path, shape in named]
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


def random_weights(seed: int, scale: float = 0.2):
    """values(name, shape) for `filled`: norms near 1, everything else normal."""
    generator = np.random.default_rng(seed)

    def values(name, shape):
        normal = generator.standard_normal(shape).astype(np.float32)
        return jnp.asarray(1 + 0.1 * normal if "norm" in name else scale * normal)

    return values


def jitted(module: nnx.Module, function):
    """function(module, *arguments) as one compiled program, the weights as its inputs."""
    graphdef, state = nnx.split(module)
    program = jax.jit(lambda state, *arguments: function(nnx.merge(graphdef, state), *arguments))
    return functools.partial(program, state)
