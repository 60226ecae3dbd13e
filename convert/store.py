"""The converted checkpoint: a folder with the model's own config, its tokenizer and its parameters.

    config.json, generation_config.json, tokenizer files    as in the source
    ddtree.json                                              what this is: Header
    params/                                                  Orbax, one array per parameter, flat

Everything is written to a folder beside the destination and renamed when it is complete.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by this import
import numpy as np

from convert.names import Leaf, show, summarise
from ddtree_jax.config import read_json
from ddtree_jax.errors import InputError

FORMAT, LAYOUT_VERSION = "ddtree_jax", 2
_READ_BYTES = 2**31
HEADER, PARAMS = "ddtree.json", "params"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


@dataclasses.dataclass(frozen=True)
class Header:
    """The contents of ddtree.json.

    kind: "target" or "drafter"; dtype: of every parameter that is not float32 by nature; source:
    {"path"} or {"id", "revision"}.
    """

    kind: str
    dtype: str
    source: Mapping[str, Any]


def is_converted(folder: Path) -> bool:
    return (folder / HEADER).is_file()


def is_current(folder: Path) -> bool:
    """Whether it is a conversion of the layout that this version reads."""
    return is_converted(folder) and (
        read_json(folder / HEADER).get("layout_version") == LAYOUT_VERSION
    )


def read_header(folder: Path) -> Header:
    """Reads and checks ddtree.json; InputError if it is of another layout version."""
    file = folder / HEADER
    values = read_json(file)
    if values.get("format") != FORMAT:
        raise InputError(f"{file}: 'format' is {values.get('format')!r}; expected {FORMAT!r}")
    source = values.get("source")
    if not isinstance(source, dict):
        source = {}
    if values.get("layout_version") != LAYOUT_VERSION:
        origin = source.get("id") or source.get("path") or "SRC"
        flag = " --drafter" if values.get("kind") == "drafter" else ""
        raise InputError(
            f"{file}: 'layout_version' is {values.get('layout_version')!r}; expected "
            f"{LAYOUT_VERSION}; reconvert it: python -m convert {origin} {folder}{flag}"
        )
    kind, dtype = values.get("kind"), values.get("dtype")
    if kind not in ("target", "drafter") or dtype not in ("bfloat16", "float32"):
        raise InputError(f"{file}: 'kind' is {kind!r} and 'dtype' {dtype!r}; reconvert it")
    return Header(kind, dtype, source)


def tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _check_destination(folder: Path) -> None:
    """Only a free path, an empty folder, or an older conversion may be replaced."""
    if not folder.exists() or is_converted(folder):
        return
    if not folder.is_dir():
        raise InputError(f"{folder}: exists and is a file; expected a new folder")
    if any(folder.iterdir()):
        raise InputError(
            f"{folder}: exists and is not a converted checkpoint (it has no {HEADER}); "
            "expected a new folder"
        )


def _remove(folder: Path) -> None:
    """Removes a folder into which Orbax's threads may still be writing after an interrupt."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def _make_parents(folder: Path) -> list[Path]:
    """Makes the missing parents of `folder`; returns them, innermost first."""
    missing = [parent for parent in folder.parents if not parent.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    return missing


def _publish(staged: Path, folder: Path) -> None:
    """Renames `staged` to `folder`; an older conversion there comes back if that fails."""
    if not folder.exists():
        staged.rename(folder)
        return
    old = staged.with_suffix(".old")
    try:
        folder.rename(old)
        staged.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    _remove(old)


@contextlib.contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """Gives an empty folder that becomes `destination` when the block ends well, else vanishes.

    Raises:
      InputError: the destination is something else, or cannot be written.
    """
    destination = destination.expanduser().resolve()
    made: list[Path] = []
    try:
        _check_destination(destination)
        made = _make_parents(destination)
        folder = destination.parent / f".{destination.name}.{secrets.token_hex(4)}.tmp"
        folder.mkdir()
    except OSError as error:
        raise InputError(f"{destination}: cannot be written ({error.strerror})") from None
    try:
        yield folder
        _publish(folder, destination)
    except BaseException:
        _remove(folder)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def write_side_files(
    folder: Path,
    header: Header,
    values: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    tokenizer: Path | None,
) -> None:
    """Writes all but the parameters."""

    def write(name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")

    write("config.json", values)
    if generation is not None:
        write("generation_config.json", generation)
    for file in [] if tokenizer is None else tokenizer_files(tokenizer):
        shutil.copyfile(file, folder / file.name)
    write(
        HEADER,
        {"format": FORMAT, "layout_version": LAYOUT_VERSION, **dataclasses.asdict(header)},
    )


def _orbax():
    import orbax.checkpoint.experimental.v1 as ocp

    context = ocp.Context()
    # Trained weights hardly compress (25 %), and reading them raw is three times faster.
    context.array.saving.use_compression = False
    # Saving blocks until it is done, so Orbax needs no copy of its own of the whole model.
    context.memory.deepcopy_host_arrays = False
    return ocp, context


def _no_record(record: logging.LogRecord) -> bool:
    return False


def _no_lost_task(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Task exception was never retrieved")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from writing to stderr: what goes wrong is an exception, then a sentence of ours.

    After a failed read TensorStore's threads still call the event loop that Orbax has closed, and
    asyncio logs the other failed tasks when they are collected. Both may come at any later time, so
    the silence about them stays then.
    """
    report = sys.unraisablehook

    def hook(event) -> None:
        if not (type(event.exc_value) is RuntimeError and "loop is closed" in str(event.exc_value)):
            report(event)

    orbax, asyncio = logging.getLogger("absl"), logging.getLogger("asyncio")
    orbax.addFilter(_no_record)
    asyncio.addFilter(_no_lost_task)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        orbax.removeFilter(_no_record)
    asyncio.removeFilter(_no_lost_task)
    sys.unraisablehook = report


def _read[T](read: Callable[[], T]) -> tuple[T | None, str]:
    """What `read` returns, or None and the reason."""
    try:
        with _quiet():
            return read(), ""
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    return None, reason


def save_params(folder: Path, params: Mapping[str, np.ndarray]) -> None:
    """Writes the parameters, {dotted path: array}, into `folder`."""
    ocp, context = _orbax()
    with _quiet(), context:
        ocp.save((folder / PARAMS).resolve(), dict(params))


def check_layout(folder: Path, leaves: list[Leaf]) -> None:
    """Raises InputError unless the stored parameters are exactly those of the table."""
    ocp, context = _orbax()

    def read() -> dict[str, tuple[int, ...]]:
        with context:
            stored = ocp.metadata((folder / PARAMS).resolve()).metadata
        return {path: tuple(info.shape) for path, info in dict(stored).items()}

    shapes, _ = _read(read)
    if shapes is None:
        raise InputError(f"{folder / PARAMS}: has no readable metadata; convert the model again")
    expected = {leaf.path: leaf.shape for leaf in leaves}
    problems = (
        summarise("parameters are missing:", [p for p in expected if p not in shapes])
        + summarise("parameters are unknown:", [p for p in shapes if p not in expected])
        + summarise(
            "parameters have the wrong shape:",
            [
                f"{path} {show(shapes[path])} (expected {show(shape)})"
                for path, shape in expected.items()
                if path in shapes and shapes[path] != shape
            ],
        )
    )
    if problems:
        problems.append("convert the model again")
        raise InputError(f"{folder / PARAMS}: " + "; ".join(problems))


def load_params(
    folder: Path,
    leaves: list[Leaf],
    dtype: np.dtype,
    sharding_for: Callable[[str], Any],
) -> dict[str, Any]:
    """Reads each parameter straight into sharding_for(path); as a NumPy array where that is None.

    A device is given only its shards. The host reads some parameters at a time: 2 GiB, or twice the
    largest one.
    """
    check_layout(folder, leaves)
    ocp, context = _orbax()
    largest = max(math.prod(leaf.shape) * leaf.dtype(dtype).itemsize for leaf in leaves)
    context.memory.read_concurrent_bytes = max(_READ_BYTES, 2 * largest)

    def wanted(leaf: Leaf) -> Any:
        sharding = sharding_for(leaf.path)
        if sharding is None:
            return np.empty(leaf.shape, leaf.dtype(dtype))  # only what it looks like is read
        import jax

        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype(dtype), sharding=sharding)

    abstract = {leaf.path: wanted(leaf) for leaf in leaves}

    def read() -> dict[str, Any]:
        with context:
            return dict(ocp.load((folder / PARAMS).resolve(), abstract))

    params, reason = _read(read)
    if params is None:
        raise InputError(f"{folder / PARAMS}: is damaged; convert the model again ({reason})")
    return params


def path_size(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(
        os.path.getsize(os.path.join(root, name))
        for root, _, names in os.walk(folder)
        for name in names
    )
