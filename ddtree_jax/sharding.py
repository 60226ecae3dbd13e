"""From logical axis names to the mesh: one table, and `shard_map` around whole programs.

A round is one `jax.shard_map` over the mesh (data, model): everything inside is local, and the
collectives are explicit. On one device there is no mesh and no collective.
"""

from collections.abc import Callable, Collection

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ddtree_jax.errors import InputError

DATA, MODEL = "data", "model"
# Logical axes of parameters (models/layers.py: param) that are split over the model axis.
RULES = {"kv_heads": MODEL, "key_heads": MODEL, "mlp": MODEL, "vocab": MODEL}


def local_mesh(data: int, model: int) -> Mesh | None:
    """A (data, model) mesh of this process's own devices; None for a single one.

    Raises:
      InputError: there are fewer devices.
    """
    for flag, size in (("--data", data), ("--tp", model)):
        if size < 1:
            raise InputError(f"{flag} is {size}; expected at least 1")
    devices = jax.local_devices()
    if data * model > len(devices):
        kind, count = devices[0].device_kind, len(devices)
        raise InputError(
            f"--data {data} and --tp {model} need {data * model} devices; expected at most the "
            f"{count} ({kind}) that there are"
        )
    if data * model == 1:
        return None
    return jax.make_mesh((data, model), (DATA, MODEL), devices=devices[: data * model])


def shards_of(mesh: Mesh | None) -> tuple[int, int]:
    """How many shards (data, model) there are."""
    return (1, 1) if mesh is None else (mesh.shape[DATA], mesh.shape[MODEL])


def parameter_specs(state: nnx.State, replicated: Collection[str] = ()):
    """The PartitionSpec of every parameter, in a tree like `state` flattened by jax.tree.

    `replicated` names parts of the model ("drafter") that every device holds whole.
    """

    def spec(path, variable: nnx.Variable) -> P:
        if getattr(path[0], "key", "") in replicated:
            return P()
        return P(*(RULES.get(axis) for axis in variable.get_metadata("axes")))

    return jax.tree.map_with_path(spec, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def state_specs(state, replicated: Collection[str] = ()):
    """PartitionSpecs of a DecodeState: rows over data, heads and counted vocabulary over model.

    `replicated` as for `parameter_specs`.
    """
    parts = {"cache", "counts", *(() if "drafter" in replicated else ("draft_cache",))}

    def spec(path, leaf) -> P:
        return P(DATA, MODEL) if getattr(path[0], "name", "") in parts else P(DATA)

    return jax.tree.map_with_path(spec, state)


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
