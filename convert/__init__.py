"""Reads checkpoints (Hugging Face, GGUF, converted) into Flax NNX parameters, and converts them.

The command line is `python -m convert`. From Python:

    source = open_model("path/or/id", drafter=False)
    flat = source.load("bfloat16")
    target = nnx.eval_shape(lambda: Target(source.config, rngs=nnx.Rngs(0)))
    state = to_state(target, flat)

Importing this package is cheap; JAX, Orbax and the readers are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from flax import nnx

    from convert.source import AnyConfig, Source
    from ddtree_jax.config import DrafterConfig, TargetConfig

__all__ = ["bundled_gguf", "convert", "open_model", "to_state"]


@overload
def open_model(
    path_or_id: str | Path, *, drafter: Literal[False], revision: str | None = None
) -> Source[TargetConfig]: ...
@overload
def open_model(
    path_or_id: str | Path, *, drafter: Literal[True], revision: str | None = None
) -> Source[DrafterConfig]: ...
@overload
def open_model(
    path_or_id: str | Path, *, drafter: bool | None, revision: str | None = None
) -> Source[AnyConfig]: ...
def open_model(
    path_or_id: str | Path, *, drafter: bool | None, revision: str | None = None
) -> Source[AnyConfig]:
    """Opens a model: reads its configuration and headers, no weights.

    Args:
      path_or_id: a converted checkpoint, a Hugging Face folder, a GGUF file, "bundled" for the
        bundled target, or a Hub id (downloaded; something local of that name wins).
      drafter: whether a drafter is expected, or a target; None takes what is there.
      revision: of a Hub id.

    Raises:
      InputError: there is no such model, it is damaged or not supported, or it is a target where
        a drafter is expected or the reverse.
    """
    from convert.source import open_model

    return open_model(path_or_id, drafter=drafter, revision=revision)


def convert(
    source: Source[AnyConfig],
    destination: str | Path,
    *,
    dtype: str | None = None,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a model as a converted checkpoint (store.py says what that is).

    It appears complete or not at all; an older conversion there is replaced.

    Args:
      source: what `open_model` returned.
      destination: a new or empty folder, or an older conversion.
      dtype: "bfloat16" or "float32"; default: that of the source.
      verify: read the result back and compare every bit before it is published.
      progress: called with (parameters done, all parameters).

    Returns:
      The destination.

    Raises:
      InputError: the source does not match its configuration, or the destination is something else
        or cannot be written.
      RunError: `verify` found a difference.
    """
    from convert.source import convert

    return convert(source, destination, dtype=dtype, verify=verify, progress=progress)


def to_state(module: nnx.Module, flat: Mapping[str, Any]) -> nnx.State:
    """The NNX state of an abstract module (`nnx.eval_shape`), filled with loaded parameters.

    Args:
      module: the abstract module; it is not changed.
      flat: {dotted path: array}, as `Source.load` returns it.

    Raises:
      InputError: a parameter is left unfilled, has another shape, or has no place in the module.
    """
    from flax import nnx

    from convert.names import show, summarise
    from ddtree_jax.errors import InputError

    slots = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(nnx.state(module))}
    abstract = dict(nnx.to_flat_state(nnx.state(module)))
    shapes = {name: abstract[path].get_value().shape for name, path in slots.items()}
    problems = (
        summarise("parameters are missing:", [name for name in slots if name not in flat])
        + summarise("parameters are unknown:", [name for name in flat if name not in slots])
        + summarise(
            "parameters have the wrong shape:",
            [
                f"{name} {show(flat[name].shape)} (expected {show(shape)})"
                for name, shape in shapes.items()
                if name in flat and tuple(flat[name].shape) != tuple(shape)
            ],
        )
    )
    if problems:
        raise InputError(f"{type(module).__name__}: " + "; ".join(problems))
    return nnx.from_flat_state(
        [(path, abstract[path].replace(flat[name])) for name, path in slots.items()]
    )


def bundled_gguf() -> Path:
    """The bundled target's file; InputError, which says how to install it, when it is missing."""
    from convert.gguf import bundled_gguf

    return bundled_gguf()
