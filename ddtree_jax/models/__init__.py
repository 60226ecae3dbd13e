"""Flax NNX modules of the target and the drafter."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.models.drafter import Drafter
from ddtree_jax.models.layers import Peers
from ddtree_jax.models.target import Target
from kernels_pallas.dispatch import REFERENCE, Kernels


def parameter_name(path: Sequence[Any]) -> str:
    """The dotted name of a parameter from its key path in an nnx.State."""
    return ".".join(str(getattr(key, "key", key)) for key in path if hasattr(key, "key"))


def parameter_shapes(state: nnx.State, dtype) -> nnx.State:
    """The state's shapes in a model of `dtype`; wide parameters (layers.py: param) are float32."""

    def shape(variable: nnx.Variable) -> nnx.Variable:
        kept = jnp.float32 if variable.get_metadata("wide") else dtype
        return variable.replace(jax.ShapeDtypeStruct(variable.get_value().shape, kept))

    return jax.tree.map(shape, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


class Models(nnx.Module):
    """A target and, unless it decodes alone, its drafter.

    axis: mesh axis of tensor parallelism, or None on one device. With `whole_drafter` every device
    holds and runs the drafter as a whole; embedding and head, which are the target's, stay split.
    peers: words of the `Peers` through which kernels sum over the axis, 0 for sums by XLA.
    """

    def __init__(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None = None,
        *,
        axis: str | None = None,
        whole_drafter: bool = False,
        peers: int = 0,
        kernels: Kernels = REFERENCE,
        rngs: nnx.Rngs,
    ):
        inboxes = Peers(jnp.zeros((peers,), jnp.int32)) if peers else None
        shared: dict[str, Any] = dict(peers=inboxes, kernels=kernels, rngs=rngs)
        self.target = Target(target, axis=axis, **shared)
        shared["axis"] = None if whole_drafter else axis
        self.drafter = None if drafter is None else Drafter(drafter, **shared)
        self.kernels = kernels


__all__ = ["Drafter", "Models", "Peers", "Target", "parameter_name", "parameter_shapes"]
