"""Converting: any source to a checkpoint folder of ours, atomically."""

from collections.abc import Callable
from pathlib import Path

from convert import store
from convert.source import Source, open_model
from ddtree_jax.errors import InputError, RunError


def convert(
    source: Source,
    destination: str | Path,
    *,
    dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    verify: bool = False,
) -> str:
    """Writes `source` as a converted checkpoint and returns its dtype.

    Args:
      destination: a new folder, or a converted checkpoint to replace.
      dtype: "bfloat16" or "float32"; default: the source's own.
      progress: called with (parameters done, all parameters).
      verify: read the result back and compare it bit for bit.

    Raises:
      InputError: the source is damaged, or the destination cannot be written.
      RunError: verification failed; nothing is left behind.
    """
    source.check()
    destination = Path(destination).expanduser()
    if Path(source.name).resolve() == destination.resolve():
        raise InputError(f"{destination}: is the source itself; expected another folder")
    dtype = dtype or source.default_dtype
    with store.staged(destination) as folder:
        header = store.Header(source.kind, dtype, source.origin)
        store.write_side_files(folder, header, source.values, source.generation, source.folder)
        store.save_params(folder, source.load(dtype, progress=progress))
        if verify:
            _verify(folder, source, dtype)
    return dtype


def _verify(folder: Path, source: Source, dtype: str) -> None:
    stored = open_model(folder, drafter=source.kind == "drafter").load(dtype)
    different = [
        path
        for path, array in source.arrays(dtype)
        if array.dtype != stored[path].dtype or array.tobytes() != stored[path].tobytes()
    ]
    if different:
        raise RunError(f"{folder}: differs from a fresh conversion in {', '.join(different[:8])}")
