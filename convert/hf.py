"""Hugging Face checkpoints: a folder of safetensors, or a Hub id that is downloaded first."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by this import
import numpy as np

from convert.names import TensorInfo
from ddtree_jax.config import read_json
from ddtree_jax.errors import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Everything that a conversion may read; weights in other formats are not downloaded.
_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def resolve(path_or_id: str | Path, revision: str | None) -> tuple[Path, dict[str, Any]]:
    """The local path of a model, and where it came from: {"path"} or {"id", "revision"}.

    Something that exists locally always wins over a Hub id.

    Raises:
      InputError: there is no such path and it is no Hub id, or the Hub cannot give it.
    """
    path = Path(path_or_id).expanduser()
    if path.exists():
        if revision is not None:
            raise InputError(f"{path}: is a local path; --revision belongs to a Hub id")
        return path, {"path": str(path.resolve())}
    if not _HUB_ID.fullmatch(str(path_or_id)):
        raise InputError(f"{path}: no such file or folder; expected a model's folder or Hub id")
    folder = _download(str(path_or_id), revision)
    return folder, {"id": str(path_or_id), "revision": folder.name}


def _download(model_id: str, revision: str | None) -> Path:
    import huggingface_hub

    at = "" if revision is None else f" at revision {revision!r}"
    try:
        folder = huggingface_hub.snapshot_download(
            model_id, revision=revision, allow_patterns=_WANTED
        )
    # The Hub's client raises many kinds (connection, login, unknown id); all mean the same here.
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = next((line.strip() for line in lines if line.strip()), type(error).__name__)
        raise InputError(
            f"{model_id}: no such folder, and the Hugging Face Hub did not give it{at} ({reason})"
        ) from None
    return Path(folder)


def _corrupt(file: Path, error: Exception) -> InputError:
    with file.open("rb") as stream:
        head = stream.read(20)
    if head.startswith(b"version https://git-"):
        return InputError(f"{file}: is a Git LFS pointer; fetch the file itself (git lfs pull)")
    return InputError(f"{file}: is truncated or not a safetensors file ({error})")


class SafetensorsFolder:
    """The tensors of a Hugging Face folder (see names.TensorSource)."""

    def __init__(self, folder: Path):
        self.name = str(folder)
        self.infos: dict[str, TensorInfo] = {}
        self._files: dict[str, Any] = {}
        for file in _weight_files(folder):
            self._open(folder / file)

    def _open(self, file: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            handle = safe_open(file, framework="numpy")
            for name in handle.keys():  # noqa: SIM118  not a mapping
                entry = handle.get_slice(name)
                if name in self.infos:
                    raise InputError(f"{file}: holds '{name}', as does {self.infos[name].file}")
                dtype = entry.get_dtype()
                shape = tuple(entry.get_shape())
                self.infos[name] = TensorInfo(shape, _DTYPES.get(dtype, dtype), file.name)
                self._files[name] = handle
        except SafetensorError as error:
            raise _corrupt(file, error) from None
        except OSError as error:
            raise InputError(f"{file}: cannot be read ({error.strerror or error})") from None

    @property
    def default_dtype(self) -> str:
        """That of most weights. float16, which is not offered, fits exactly in float32."""
        sizes = Counter[str]()
        for info in self.infos.values():
            sizes[info.dtype] += int(np.prod(info.shape, dtype=np.int64))
        return "bfloat16" if sizes.most_common(1)[0][0] == "bfloat16" else "float32"

    def read(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)


def _weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files, the single file before the shards, as transformers does."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise InputError(
            f"{folder}: holds neither {SINGLE} nor {INDEX}; expected a model in safetensors"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: 'weight_map' is missing; expected an object of file names")
    files = sorted(set(map(str, weight_map.values())))
    for file in files:
        if Path(file).name != file:
            raise InputError(f"{index}: 'weight_map' names {file!r}; expected a file beside it")
        if not (folder / file).is_file():
            raise InputError(f"{folder / file}: no such file; {INDEX} names it")
    return files


def read_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """config.json and, if there is one, generation_config.json."""
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder}: holds no config.json; expected a Hugging Face model or a converted one"
        )
    values = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return values, read_json(generation) if generation.is_file() else None
