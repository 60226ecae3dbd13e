"""Flax NNX modules of the target and the drafter."""

from collections.abc import Sequence
from typing import Any

from flax import nnx

from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.models.drafter import Drafter
from ddtree_jax.models.target import Target
from kernels_pallas.dispatch import REFERENCE, Kernels


def parameter_name(path: Sequence[Any]) -> str:
    """The dotted name of a parameter from its key path in an nnx.State."""
    return ".".join(str(getattr(key, "key", key)) for key in path if hasattr(key, "key"))


class Models(nnx.Module):
    """A target and, unless it decodes alone, its drafter."""

    def __init__(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None = None,
        *,
        axis: str | None = None,
        kernels: Kernels = REFERENCE,
        rngs: nnx.Rngs,
    ):
        self.target = Target(target, axis=axis, kernels=kernels, rngs=rngs)
        shared: dict[str, Any] = dict(axis=axis, kernels=kernels, rngs=rngs)
        self.drafter = None if drafter is None else Drafter(drafter, **shared)
        self.kernels = kernels


__all__ = ["Drafter", "Models", "Target", "parameter_name"]
