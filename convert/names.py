"""Declarative tables from checkpoint tensors to parameters.

One `Leaf` per parameter of `Target` or `Drafter`: its path in the NNX state, its shape, the tensors
of the checkpoint that it is made of, and a pure transform. Transforms only move numbers (and pad
with zeros), so they work on any dtype.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from ddtree_jax.config import DecoderConfig, DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError

Shape = tuple[int, ...]

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
_LISTED = 8  # problems spelled out per kind in one message
_BLOCK = 64  # rows of a transposition that are moved together
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a buffer that old checkpoints carry


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of a tensor; `dtype` is a name in NumPy's or the file's terms."""

    shape: Shape
    dtype: str
    file: str


class TensorSource(Protocol):
    """Named tensors in Hugging Face's names and layouts, read one at a time.

    name: the file or folder, for messages.
    default_dtype: "bfloat16" or "float32", the dtype that keeps the source as it is.
    """

    @property
    def name(self) -> str: ...

    @property
    def infos(self) -> Mapping[str, TensorInfo]: ...

    @property
    def default_dtype(self) -> str: ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, bfloat16, float16 or float32."""
        ...


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter.

    path: dotted path in the NNX state.
    shape: its shape.
    sources: (name, [out, in] shape) of each tensor that it is made of.
    transform: builds it from the arrays of `sources`, in their order.
    shard_axis: the axis that tensor parallelism splits, or None for a replicated parameter.
    """

    path: str
    shape: Shape
    sources: tuple[tuple[str, Shape], ...]
    transform: Callable[..., np.ndarray]
    shard_axis: int | None = None


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _transpose_into(out: np.ndarray, x: np.ndarray) -> None:
    """out[m, n] = x[n, m].T, some rows at a time: five times faster than NumPy's one copy."""
    for start in range(0, len(x), _BLOCK):
        out[:, start : start + _BLOCK] = x[start : start + _BLOCK].T


def _transpose(x: np.ndarray) -> np.ndarray:
    """[n, m] -> [m, n]."""
    out = np.empty(x.shape[::-1], x.dtype)
    _transpose_into(out, x)
    return out


def _pad_rows(x: np.ndarray, *, rows: int) -> np.ndarray:
    """[n, d] -> [rows, d], zeros below."""
    if len(x) == rows:
        return x
    padded = np.zeros((rows, *x.shape[1:]), x.dtype)
    padded[: len(x)] = x
    return padded


def _pad_transpose(x: np.ndarray, *, rows: int) -> np.ndarray:
    """[n, d] -> [d, rows], zeros to the right."""
    padded = np.zeros((x.shape[1], rows), x.dtype)
    _transpose_into(padded[:, : len(x)], x)
    return padded


def _per_group(x: np.ndarray, kv_heads: int, head_dim: int) -> np.ndarray:
    """[heads * h, ...] -> [k, heads / k, h, ...]: query head n belongs to KV head n // g."""
    return x.reshape(kv_heads, -1, head_dim, *x.shape[1:])


def _fuse_bias(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, kv_heads: int, head_dim: int):
    """[heads * h] each -> [k, g + 2, h]."""
    return np.concatenate([_per_group(x, kv_heads, head_dim) for x in (q, k, v)], axis=1)


def _fuse_qkv(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, kv_heads: int, head_dim: int):
    """[heads * h, d] each -> [d, k, g + 2, h]."""
    fused = _fuse_bias(q, k, v, kv_heads=kv_heads, head_dim=head_dim)
    return _transpose(fused.reshape(-1, q.shape[1])).reshape(-1, *fused.shape[:-1])


def _split_heads(o: np.ndarray, *, kv_heads: int, head_dim: int) -> np.ndarray:
    """[d, heads * h] -> [k, g, h, d]."""
    return _per_group(_transpose(o), kv_heads, head_dim)


def _gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """[f, d] each -> [d, 2, f]."""
    out = np.empty((gate.shape[1], 2, gate.shape[0]), gate.dtype)
    _transpose_into(out[:, 0], gate)
    _transpose_into(out[:, 1], up)
    return out


def _norm(path: str, name: str, size: int) -> Leaf:
    return Leaf(f"{path}.weight_d", (size,), ((f"{name}.weight", (size,)),), _same)


def _layer_leaves(config: DecoderConfig, path: str, name: str) -> Iterator[Leaf]:
    """The parameters of decoder layer `path`, whose tensors are called `name`.*."""
    d, f, h = config.hidden_size, config.intermediate_size, config.head_dim
    k, g = config.num_kv_heads, config.group_size
    rows = {"q": k * g * h, "k": k * h, "v": k * h}
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    yield _norm(f"{path}.input_norm", f"{name}.input_layernorm", d)
    yield Leaf(
        f"{path}.attention.wqkv_dkgh",
        (d, k, g + 2, h),
        tuple((f"{attention}.{x}_proj.weight", (size, d)) for x, size in rows.items()),
        functools.partial(_fuse_qkv, kv_heads=k, head_dim=h),
        shard_axis=1,
    )
    yield Leaf(
        f"{path}.attention.wo_kghd",
        (k, g, h, d),
        ((f"{attention}.o_proj.weight", (d, k * g * h)),),
        functools.partial(_split_heads, kv_heads=k, head_dim=h),
        shard_axis=0,
    )
    if config.attention_bias:
        yield Leaf(
            f"{path}.attention.bqkv_kgh",
            (k, g + 2, h),
            tuple((f"{attention}.{x}_proj.bias", (size,)) for x, size in rows.items()),
            functools.partial(_fuse_bias, kv_heads=k, head_dim=h),
            shard_axis=0,
        )
        yield Leaf(f"{path}.attention.bo_d", (d,), ((f"{attention}.o_proj.bias", (d,)),), _same)
    if config.qk_norm:
        yield _norm(f"{path}.attention.q_norm", f"{attention}.q_norm", h)
        yield _norm(f"{path}.attention.k_norm", f"{attention}.k_norm", h)
    yield _norm(f"{path}.mlp_norm", f"{name}.post_attention_layernorm", d)
    yield Leaf(
        f"{path}.mlp.gate_up_d2f",
        (d, 2, f),
        tuple((f"{mlp}.{x}_proj.weight", (f, d)) for x in ("gate", "up")),
        _gate_up,
        shard_axis=2,
    )
    yield Leaf(
        f"{path}.mlp.down_fd",
        (f, d),
        ((f"{mlp}.down_proj.weight", (d, f)),),
        _transpose,
        shard_axis=0,
    )


def target_leaves(config: TargetConfig) -> list[Leaf]:
    """Every parameter of `Target(config)`."""
    d, v, padded = config.hidden_size, config.vocab_size, config.padded_vocab
    leaves = [
        Leaf(
            "embed_vd",
            (padded, d),
            (("model.embed_tokens.weight", (v, d)),),
            functools.partial(_pad_rows, rows=padded),
            shard_axis=0,
        )
    ]
    for index in range(config.num_layers):
        leaves += _layer_leaves(config, f"layers.{index}", f"model.layers.{index}")
    leaves.append(_norm("norm", "model.norm", d))
    if not config.tie_embeddings:
        leaves.append(
            Leaf(
                "head_dv",
                (d, padded),
                (("lm_head.weight", (v, d)),),
                functools.partial(_pad_transpose, rows=padded),
                shard_axis=1,
            )
        )
    return leaves


def drafter_leaves(config: DrafterConfig) -> list[Leaf]:
    """Every parameter of `Drafter(config)`."""
    d, features = config.hidden_size, config.feature_size
    leaves = [
        Leaf("fc_fd", (features, d), (("fc.weight", (d, features)),), _transpose),
        _norm("hidden_norm", "hidden_norm", d),
    ]
    for index in range(config.num_layers):
        leaves += _layer_leaves(config, f"layers.{index}", f"layers.{index}")
    return [*leaves, _norm("norm", "norm", d)]


def leaves_of(config: TargetConfig | DrafterConfig) -> list[Leaf]:
    if isinstance(config, DrafterConfig):
        return drafter_leaves(config)
    return target_leaves(config)


def show(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def summarise(kind: str, problems: list[str]) -> list[str]:
    """At most one phrase: the kind, and a bounded list of its problems."""
    if not problems:
        return []
    more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return [f"{kind} " + ", ".join(problems[:_LISTED]) + more]


def match(config: TargetConfig | DrafterConfig, source: TensorSource) -> dict[str, str]:
    """Finds the tensor of every name in the table: {name in the table: name in the source}.

    Names of a drafter may carry the prefix "model.". A tied target may carry "lm_head.weight",
    which equals its embedding and is not read.

    Raises:
      InputError: tensors are missing, unknown, misshapen or not floating point; it names them all
        (a bounded list of each kind).
    """
    drafter = isinstance(config, DrafterConfig)
    wanted = {name: shape for leaf in leaves_of(config) for name, shape in leaf.sources}
    tied = isinstance(config, TargetConfig) and config.tie_embeddings
    ignored = {"lm_head.weight"} if tied else set()
    found: dict[str, str] = {}
    missing, misshapen, quantised = [], [], []
    for name, shape in wanted.items():
        candidates = (name, f"model.{name}") if drafter else (name,)
        actual = next((one for one in candidates if one in source.infos), None)
        if actual is None:
            missing.append(f"'{name}' {show(shape)}")
            continue
        found[name] = actual
        info = source.infos[actual]
        if info.dtype not in FLOAT_DTYPES:
            quantised.append(f"'{actual}' ({info.dtype} in {info.file})")
        elif info.shape != shape:
            misshapen.append(
                f"'{actual}' {show(info.shape)} in {info.file} (expected {show(shape)})"
            )
    used = set(found.values()) | ignored
    unknown = [
        f"'{name}' {show(info.shape)} in {info.file}"
        for name, info in source.infos.items()
        if name not in used and not _IGNORED.search(name)
    ]
    problems = (
        summarise("tensors are missing:", missing)
        + summarise("tensors have the wrong shape:", misshapen)
        + summarise(f"tensors have a dtype other than {', '.join(FLOAT_DTYPES)}:", quantised)
        + summarise("tensors are unknown and would go unused:", unknown)
    )
    if problems:
        raise InputError(f"{source.name}: " + "; ".join(problems))
    return found


def build(leaf: Leaf, source: TensorSource, found: Mapping[str, str], dtype) -> np.ndarray:
    """Reads the tensors of one leaf and makes its array, contiguous, of `dtype`."""
    dtype = np.dtype(dtype)
    # Moved as plain integers of the same width: NumPy copies those faster than bfloat16.
    bits = np.dtype(f"u{dtype.itemsize}")
    arrays = [
        source.read(found[name]).astype(dtype, copy=False).view(bits) for name, _ in leaf.sources
    ]
    result = np.ascontiguousarray(leaf.transform(*arrays)).view(dtype)
    assert result.shape == leaf.shape, (leaf.path, result.shape, leaf.shape)
    return result
