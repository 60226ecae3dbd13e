"""Opening a model in any of its forms, and loading its parameters."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, overload

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by this import
import numpy as np

from convert import hf, names, store
from convert.gguf import GgufFile, bundled_gguf, verify_bundled
from ddtree_jax.config import (
    DrafterConfig,
    TargetConfig,
    is_drafter,
    parse_drafter,
    parse_target,
)
from ddtree_jax.errors import InputError, RunError

BUNDLED = "bundled"  # the name of the target that comes as a Python package

AnyConfig = TargetConfig | DrafterConfig
Progress = Callable[[int, int], None]
ShardingFor = Callable[[str], Any]


class Source[C: AnyConfig](ABC):
    """A model that can be loaded; C is the type of its configuration.

    Attributes:
      name: the file or folder, for messages.
      config: the parsed configuration.
      values, generation: the JSON objects that it was parsed from (the second may be None).
      origin: {"path"} or {"id", "revision"}.
      folder: where its tokenizer files are, or None if it has none.
      default_dtype: "bfloat16" or "float32".
      leaves: its parameters.
    """

    origin: Mapping[str, Any]

    def __init__(
        self,
        name: Path,
        config: C,
        values: Mapping[str, Any],
        generation: Mapping[str, Any] | None,
    ):
        self.name, self.values, self.generation = str(name), values, generation
        self.config: Final = config
        self.leaves = names.leaves_of(config)

    @property
    def config_file(self) -> str:
        """Where its configuration stands, for messages: a folder's config.json or the GGUF file."""
        return _config_file(Path(self.name))

    @property
    @abstractmethod
    def default_dtype(self) -> str: ...

    @property
    def beside(self) -> dict[str, list[str]]:
        """Tensors of a hybrid checkpoint that are no part of its language model, by what they are.

        They are left out of a conversion.
        """
        return {}

    @property
    def kind(self) -> str:
        return "drafter" if isinstance(self.config, DrafterConfig) else "target"

    @property
    def folder(self) -> Path | None:
        return Path(self.name) if store.tokenizer_files(Path(self.name)) else None

    @abstractmethod
    def check(self) -> None:
        """Raises InputError unless the file has exactly the parameters of the configuration."""

    @abstractmethod
    def arrays(self, dtype: str | np.dtype | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Each parameter's dotted path and value, one at a time."""

    def load(
        self,
        dtype: str | np.dtype | None = None,
        sharding_for: ShardingFor | None = None,
        progress: Progress | None = None,
        *,
        shards: int = 1,
    ) -> dict[str, Any]:
        """All parameters, {dotted path in the NNX state: array}.

        With `sharding_for` nothing is ever whole in one place that need not be: a device gets only
        its shards, and the host holds a few parameters at a time.

        Args:
          dtype: of every parameter that is not float32 by nature; default: as stored.
          sharding_for: a parameter's path -> its jax.sharding.Sharding. Without it the arrays are
            NumPy's, with it JAX arrays placed on their devices one after the other.
          progress: called with (parameters done, all parameters).
          shards: the parameters are those of `config.for_shards(shards)`.

        Raises:
          InputError: tensors are missing, unknown, misshapen or damaged.
        """
        total, shapes = len(self.leaves), self._shapes(shards)
        params = {}
        for leaf, (path, array) in zip(self.leaves, self.arrays(dtype), strict=True):
            array = names.regroup(leaf, array, shapes[path])
            if sharding_for is not None:
                import jax

                array = jax.device_put(array, sharding_for(path))
            params[path] = array
            if progress is not None:
                progress(len(params), total)
        return params

    def _shapes(self, shards: int) -> dict[str, names.Shape]:
        """Each parameter's shape on `shards` devices, all of them together."""
        leaves = names.leaves_of(self.config.for_shards(shards))
        return {leaf.path: leaf.shape for leaf in leaves}

    def _dtype(self, dtype: str | np.dtype | None) -> np.dtype:
        return np.dtype(self.default_dtype if dtype is None else dtype)


class _Unconverted(Source[AnyConfig]):
    """Tensors in Hugging Face's names: a folder of safetensors or a GGUF file."""

    tensors: names.TensorSource

    @property
    def default_dtype(self) -> str:
        return self.tensors.default_dtype

    @property
    def beside(self) -> dict[str, list[str]]:
        return names.beside(self.config, self.tensors)

    @cached_property
    def _found(self) -> dict[str, str]:
        return names.match(self.config, self.tensors)

    def check(self) -> None:
        _ = self._found

    def arrays(self, dtype=None) -> Iterator[tuple[str, np.ndarray]]:
        found, dtype = self._found, self._dtype(dtype)
        for leaf in self.leaves:
            yield leaf.path, names.build(leaf, self.tensors, found, dtype)


class HuggingFaceSource(_Unconverted):
    def __init__(self, folder: Path, drafter: bool | None, origin: Mapping[str, Any]):
        values, generation = hf.read_configs(folder)
        config = _parse(values, generation, folder, drafter)
        super().__init__(folder, config, values, generation)
        if self.kind == "drafter" and (folder / "mask_embedding.pt").exists():
            raise InputError(f"{folder / 'mask_embedding.pt'}: such drafters are not supported")
        self.origin = origin
        self.tensors = hf.SafetensorsFolder(folder)


class GgufSource(_Unconverted):
    tensors: GgufFile

    def __init__(self, path: Path, drafter: bool | None, origin: Mapping[str, Any]):
        self.tensors = GgufFile(path)
        values = self.tensors.config_values()
        super().__init__(path, _parse(values, None, path, drafter), values, None)
        self.origin = origin

    @cached_property
    def _temporary(self) -> tempfile.TemporaryDirectory:
        """Tokenizer files made from the metadata; removed with this object."""
        folder = tempfile.TemporaryDirectory(prefix="ddtree-tokenizer-")
        self.tensors.write_tokenizer(Path(folder.name))
        return folder

    @property
    def folder(self) -> Path | None:
        return Path(self._temporary.name) if self.tensors.has_tokenizer() else None


class ConvertedSource(Source[AnyConfig]):
    def __init__(self, folder: Path, drafter: bool | None):
        header = store.read_header(folder)
        if drafter is not None and header.kind != ("drafter" if drafter else "target"):
            wanted = "drafter" if drafter else "target"
            raise InputError(
                f"{folder / store.HEADER}: 'kind' is {header.kind!r}; expected a {wanted}"
            )
        values, generation = hf.read_configs(folder)
        config = _parse(values, generation, folder, header.kind == "drafter")
        super().__init__(folder, config, values, generation)
        self.origin, self._header = header.source, header

    @property
    def default_dtype(self) -> str:
        return self._header.dtype

    def check(self) -> None:
        store.check_layout(Path(self.name), self.leaves)

    def arrays(self, dtype=None) -> Iterator[tuple[str, np.ndarray]]:
        yield from self.load(dtype).items()

    def load(
        self, dtype=None, sharding_for=None, progress=None, *, shards: int = 1
    ) -> dict[str, Any]:
        shapes = self._shapes(shards)
        repeated = {leaf.path for leaf in self.leaves if leaf.shape != shapes[leaf.path]}

        def place(path: str) -> Any:
            # What is still to be repeated comes to the host, the rest straight into its sharding.
            return None if path in repeated or sharding_for is None else sharding_for(path)

        params = store.load_params(Path(self.name), self.leaves, self._dtype(dtype), place)
        for leaf in self.leaves:
            if leaf.path in repeated:
                array = names.regroup(leaf, params[leaf.path], shapes[leaf.path])
                if sharding_for is not None:
                    import jax

                    array = jax.device_put(array, sharding_for(leaf.path))
                params[leaf.path] = array
        if progress is not None:
            progress(len(params), len(params))
        return params


def _config_file(path: Path) -> str:
    return str(path / "config.json" if path.is_dir() else path)


def _parse(
    values: Mapping[str, Any],
    generation: Mapping[str, Any] | None,
    path: Path,
    drafter: bool | None,
) -> AnyConfig:
    """The configuration; `drafter` None takes what the file says it is."""
    file = _config_file(path)
    if is_drafter(values) if drafter is None else drafter:
        return parse_drafter(values, file)
    return parse_target(values, file, generation)


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
    """Opens a model; only headers are read. See `convert.open_model`."""
    if str(path_or_id) == BUNDLED:
        if revision is not None:
            raise InputError(f"{BUNDLED}: has no revisions; --revision belongs to a Hub id")
        path = bundled_gguf()
        verify_bundled(path)
        return GgufSource(path, drafter, {"path": BUNDLED})
    path, origin = hf.resolve(path_or_id, revision)
    if path.is_file():
        if path.suffix == ".safetensors":
            raise InputError(f"{path}: is a single file; give its folder, with the config.json")
        return GgufSource(path, drafter, origin)
    if store.is_converted(path):
        return ConvertedSource(path, drafter)
    return HuggingFaceSource(path, drafter, origin)


def _verify(folder: Path, source: Source[AnyConfig], dtype: str) -> None:
    """Raises RunError unless the checkpoint in `folder` equals a fresh conversion, bit for bit."""
    stored = ConvertedSource(folder, drafter=source.kind == "drafter").load(dtype)
    different = [
        path
        for path, array in source.arrays(dtype)
        if array.dtype != stored[path].dtype or array.tobytes() != stored[path].tobytes()
    ]
    if different:
        raise RunError(f"{folder}: differs from a fresh conversion in {', '.join(different[:8])}")


def convert(
    source: Source[AnyConfig],
    destination: str | Path,
    *,
    dtype: str | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Writes a converted checkpoint; see `convert.convert`."""
    destination = Path(destination).expanduser()
    if Path(source.name).resolve() == destination.resolve():
        raise InputError(f"{destination}: is the source itself; expected another folder")
    source.check()
    dtype = dtype or source.default_dtype
    with store.staged(destination) as folder:
        header = store.Header(source.kind, dtype, source.origin)
        store.write_side_files(folder, header, source.values, source.generation, source.folder)
        store.save_params(folder, source.load(dtype, progress=progress))
        if verify:
            _verify(folder, source, dtype)
    return destination
