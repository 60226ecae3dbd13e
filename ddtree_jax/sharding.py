"""From logical axis names to the mesh: one table, and `shard_map` around whole programs.

A round is one `jax.shard_map` over the mesh (data, model): everything inside is local, and the
collectives are explicit. On one device there is no mesh and no collective.
"""

from collections.abc import Callable

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ddtree_jax.config import DecoderConfig
from ddtree_jax.errors import InputError

DATA, MODEL = "data", "model"
# Logical axes of parameters (models/layers.py: param) that are split over the model axis.
RULES = {"kv_heads": MODEL, "key_heads": MODEL, "mlp": MODEL, "vocab": MODEL}


def parameter_specs(state: nnx.State):
    """The PartitionSpec of every parameter, in a tree like `state` flattened by jax.tree."""

    def spec(variable: nnx.Variable) -> P:
        return P(*(RULES.get(axis) for axis in variable.get_metadata("axes")))

    return jax.tree.map(spec, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def check_mesh(mesh: Mesh, target: DecoderConfig, drafter: DecoderConfig | None) -> None:
    """Raises InputError where the models cannot be split over the mesh."""
    if mesh.shape[DATA] > 1:
        raise InputError(f"the mesh has {mesh.shape[DATA]} data shards; only 1 is supported yet")
    shards = mesh.shape[MODEL]
    for name, config in (("target", target), ("drafter", drafter)):
        if config is None:
            continue
        sizes = {key: getattr(config, key) for key in ("num_kv_heads", "intermediate_size")}
        if config.delta is not None:
            sizes["linear_num_key_heads"] = config.delta.num_key_heads
        for key, size in sizes.items():
            if size % shards:
                raise InputError(
                    f"the {name}'s {key} is {size}, which {shards} shards do not divide"
                )


def state_specs(state):
    """PartitionSpecs of a DecodeState: rows over data, heads and counted vocabulary over model."""

    def spec(path, leaf) -> P:
        split = getattr(path[0], "name", "") in ("cache", "draft_cache", "counts")
        return P(DATA, MODEL) if split else P(DATA)

    return jax.tree_util.tree_map_with_path(spec, state)


def over_mesh(function: Callable, mesh: Mesh | None, in_specs, out_specs) -> Callable:
    """`function` over local shards of the mesh, or unchanged without one."""
    if mesh is None:
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def place(mesh: Mesh | None, spec: P):
    """The sharding of one array, or None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, spec)
