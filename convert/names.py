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

from ddtree_jax.config import DecoderConfig, DeltaConfig, DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError

Shape = tuple[int, ...]

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
_LISTED = 8  # problems spelled out per kind in one message
_BLOCK = 64  # rows of a transposition that are moved together
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a buffer that old checkpoints carry
# What a hybrid checkpoint holds beside its language model, which is all that is served.
_BESIDE = {
    "vision": re.compile(r"^(model\.)?visual\."),
    "multi-token prediction": re.compile(r"^mtp\."),
}


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
    group: where that axis counts groups of heads, what the next axis holds of one group: (size,
      whether shards that divide the group between them need all of it).
    wide: whether it is float32 whatever the model's dtype.
    """

    path: str
    shape: Shape
    sources: tuple[tuple[str, Shape], ...]
    transform: Callable[..., np.ndarray]
    shard_axis: int | None = None
    group: tuple[tuple[int, bool], ...] = ()
    wide: bool = False

    def dtype(self, model: np.dtype) -> np.dtype:
        """Its dtype in a model of dtype `model`."""
        return np.dtype(np.float32) if self.wide else np.dtype(model)


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


def _gate_up(gate: np.ndarray, up: np.ndarray, *, columns: int) -> np.ndarray:
    """[groups * columns, d] each -> [d, groups, 2, columns]."""
    d = gate.shape[1]
    both = np.stack([x.reshape(-1, columns, d) for x in (gate, up)], axis=1)
    return _transpose(both.reshape(-1, d)).reshape(d, *both.shape[:3])


def _fuse_gated(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, kv_heads: int, head_dim: int):
    """[heads * 2h, d] (a head's queries, then its gates), [k * h, d] twice -> [d, k, 2g + 2, h]."""
    heads = q.reshape(kv_heads, -1, 2, head_dim, q.shape[-1])
    k, v = (_per_group(x, kv_heads, head_dim) for x in (k, v))
    fused = np.concatenate([heads[:, :, 0], k, v, heads[:, :, 1]], axis=1)
    return _transpose(fused.reshape(-1, q.shape[1])).reshape(-1, *fused.shape[:-1])


def _per_key_head(parts: list[np.ndarray], key_heads: int) -> np.ndarray:
    """[k * n, ...] each -> [k, sum of n, ...]: a key head's rows of every part."""
    return np.concatenate([x.reshape(key_heads, -1, *x.shape[1:]) for x in parts], axis=1)


def _delta_in(*tensors: np.ndarray, delta: DeltaConfig) -> np.ndarray:
    """The input projections -> [d, k, projected]; per key head q, k, v, z, b, a."""
    k, d = delta.num_key_heads, tensors[0].shape[1]
    if delta.fused:  # [q, k, v, z] and [b, a] per key head
        parts = list(tensors)
    else:
        qkv, *rest = tensors
        parts = [*_split_qkv(qkv, delta), *rest]
    return _transpose(_per_key_head(parts, k).reshape(-1, d)).reshape(d, k, -1)


def _split_qkv(rows: np.ndarray, delta: DeltaConfig) -> list[np.ndarray]:
    """The q, k and v of all heads, which stand one after the other."""
    size = delta.num_key_heads * delta.key_dim
    return np.split(rows, [size, 2 * size])


def _delta_conv(conv: np.ndarray, *, delta: DeltaConfig) -> np.ndarray:
    """[channels of q, k, v, 1, t] -> [t, k, c]."""
    k = delta.num_key_heads
    grouped = _per_key_head(_split_qkv(conv[:, 0], delta), k)
    return _transpose(grouped.reshape(-1, delta.conv_taps)).reshape(-1, *grouped.shape[:-1])


def _delta_out(out: np.ndarray, *, delta: DeltaConfig) -> np.ndarray:
    """[d, value heads * y] -> [k, r, y, d]."""
    shape = (delta.num_key_heads, delta.group_size, delta.value_dim, -1)
    return _transpose(out).reshape(shape)


def _heads(x: np.ndarray, *, delta: DeltaConfig) -> np.ndarray:
    """[value heads] -> [k, r]."""
    return x.reshape(delta.num_key_heads, -1)


def _norm(path: str, name: str, size: int) -> Leaf:
    return Leaf(f"{path}.weight_d", (size,), ((f"{name}.weight", (size,)),), _same)


def _delta_leaves(config: DecoderConfig, path: str, name: str) -> Iterator[Leaf]:
    """The parameters of Gated DeltaNet `path`, whose tensors are called `name`.*."""
    assert config.delta is not None
    delta, d = config.delta, config.hidden_size
    k, r, heads = delta.num_key_heads, delta.group_size, delta.num_value_heads
    values = heads * delta.value_dim
    mixed = 2 * k * delta.key_dim + values
    keys, split = (2 * delta.key_dim, True), r * delta.value_dim
    if delta.fused:
        parts = {"qkvz": mixed + values, "ba": 2 * heads}
    else:
        parts = {"qkv": mixed, "z": values, "b": heads, "a": heads}
    yield Leaf(
        f"{path}.win_dkc",
        (d, k, delta.projected),
        tuple((f"{name}.in_proj_{x}.weight", (size, d)) for x, size in parts.items()),
        functools.partial(_delta_in, delta=delta),
        shard_axis=1,
        group=(keys, (split, False), (split, False), (r, False), (r, False)),
    )
    yield Leaf(
        f"{path}.conv_tkc",
        (delta.conv_taps, k, delta.channels),
        ((f"{name}.conv1d.weight", (mixed, 1, delta.conv_taps)),),
        functools.partial(_delta_conv, delta=delta),
        shard_axis=1,
        group=(keys, (split, False)),
    )
    for ours, theirs in (("a_log", "A_log"), ("dt_bias", "dt_bias")):
        yield Leaf(
            f"{path}.{ours}_kr",
            (k, r),
            ((f"{name}.{theirs}", (heads,)),),
            functools.partial(_heads, delta=delta),
            shard_axis=0,
            group=((r, False),),
            wide=True,
        )
    yield _norm(f"{path}.norm", f"{name}.norm", delta.value_dim)
    yield Leaf(
        f"{path}.wo_kryd",
        (k, r, delta.value_dim, d),
        ((f"{name}.out_proj.weight", (d, values)),),
        functools.partial(_delta_out, delta=delta),
        shard_axis=0,
        group=((r, False),),
    )


def _attention_leaves(config: DecoderConfig, path: str, name: str) -> Iterator[Leaf]:
    """The parameters of softmax attention `path`, whose tensors are called `name`.*."""
    d, h = config.hidden_size, config.head_dim
    k, g, gated = config.num_kv_heads, config.group_size, config.attention_gate
    rows = {"q": k * g * h * (2 if gated else 1), "k": k * h, "v": k * h}
    yield Leaf(
        f"{path}.wqkv_dkgh",
        (d, k, g + 2 + (g if gated else 0), h),
        tuple((f"{name}.{x}_proj.weight", (size, d)) for x, size in rows.items()),
        functools.partial(_fuse_gated if gated else _fuse_qkv, kv_heads=k, head_dim=h),
        shard_axis=1,
        group=((g, False), (2, True), *(((g, False),) if gated else ())),
    )
    yield Leaf(
        f"{path}.wo_kghd",
        (k, g, h, d),
        ((f"{name}.o_proj.weight", (d, k * g * h)),),
        functools.partial(_split_heads, kv_heads=k, head_dim=h),
        shard_axis=0,
        group=((g, False),),
    )
    if config.attention_bias:
        yield Leaf(
            f"{path}.bqkv_kgh",
            (k, g + 2, h),
            tuple((f"{name}.{x}_proj.bias", (size,)) for x, size in rows.items()),
            functools.partial(_fuse_bias, kv_heads=k, head_dim=h),
            shard_axis=0,
            group=((g, False), (2, True)),
        )
        yield Leaf(f"{path}.bo_d", (d,), ((f"{name}.o_proj.bias", (d,)),), _same)
    if config.qk_norm:
        yield _norm(f"{path}.q_norm", f"{name}.q_norm", h)
        yield _norm(f"{path}.k_norm", f"{name}.k_norm", h)


def _layer_leaves(
    config: DecoderConfig, path: str, name: str, *, recurrent: bool = False
) -> Iterator[Leaf]:
    """The parameters of decoder layer `path`, whose tensors are called `name`.*."""
    d, f, mlp = config.hidden_size, config.intermediate_size, f"{name}.mlp"
    yield _norm(f"{path}.input_norm", f"{name}.input_layernorm", d)
    if recurrent:
        yield from _delta_leaves(config, f"{path}.delta", f"{name}.linear_attn")
    else:
        yield from _attention_leaves(config, f"{path}.attention", f"{name}.self_attn")
    yield _norm(f"{path}.mlp_norm", f"{name}.post_attention_layernorm", d)
    yield Leaf(
        f"{path}.mlp.gate_up_dg2c",
        (d, f // config.gate_columns, 2, config.gate_columns),
        tuple((f"{mlp}.{x}_proj.weight", (f, d)) for x in ("gate", "up")),
        functools.partial(_gate_up, columns=config.gate_columns),
        shard_axis=1,
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
        leaves += _layer_leaves(
            config,
            f"layers.{index}",
            f"model.layers.{index}",
            recurrent=config.is_recurrent(index),
        )
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


def regroup(leaf: Leaf, array: np.ndarray, shape: Shape) -> np.ndarray:
    """The array of `leaf` in a model with more KV or key heads (`config.shared_heads`).

    Worked examples: 2 KV heads of 4 queries each on 4 shards. Group 0 is [q0 q1 q2 q3 k v]; it
    becomes [q0 q1 k v] and [q2 q3 k v], and the rows of the output projection [4, h, d] become
    twice [2, h, d]. With 3 queries the second group is [q2 0 k v]. 3 KV heads on 2 shards become 4,
    of which the last is 0.

    Args:
      shape: that of the result.
    """
    if array.shape == shape:
        return array
    axis = leaf.shard_axis
    assert axis is not None
    copies, rest = divmod(shape[axis], array.shape[axis])
    if rest:
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, shape[axis] - array.shape[axis])
        return np.pad(array, widths)
    ends = np.cumsum([size for size, _ in leaf.group])[:-1]
    shared = sum(size for size, both in leaf.group if both)
    before, after = array.shape[axis + 1] - shared, shape[axis + 1] - shared
    parts = []
    for part, (size, both) in zip(np.split(array, ends, axis=axis + 1), leaf.group, strict=True):
        if both:
            parts.append(np.repeat(part, copies, axis=axis))
            continue
        each = size * after // before
        widths = [(0, 0)] * array.ndim
        widths[axis + 1] = (0, copies * each - size)
        part = np.pad(part, widths)
        parts.append(part.reshape(*shape[: axis + 1], each, *shape[axis + 2 :]))
    return np.concatenate(parts, axis=axis + 1)


def show(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def summarise(kind: str, problems: list[str]) -> list[str]:
    """At most one phrase: the kind, and a bounded list of its problems."""
    if not problems:
        return []
    more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return [f"{kind} " + ", ".join(problems[:_LISTED]) + more]


def beside(config: TargetConfig | DrafterConfig, source: TensorSource) -> dict[str, list[str]]:
    """Tensors of a hybrid checkpoint that are no part of its language model, by what they are."""
    if config.delta is None:
        return {}
    found = {kind: list(filter(name.search, source.infos)) for kind, name in _BESIDE.items()}
    return {kind: names for kind, names in found.items() if names}


def match(config: TargetConfig | DrafterConfig, source: TensorSource) -> dict[str, str]:
    """Finds the tensor of every name in the table: {name in the table: name in the source}.

    Names of a drafter may carry the prefix "model.", those of a hybrid target's language model
    "model.language_model."; its vision and multi-token prediction tensors are left out (`beside`).
    A tied target may carry "lm_head.weight", which equals its embedding and is not read.

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
        candidates = [name]
        if drafter:
            candidates.append(f"model.{name}")
        if config.delta is not None:
            candidates.append(re.sub(r"^model\.", "model.language_model.", name))
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
    left_out = {name for names in beside(config, source).values() for name in names}
    unknown = [
        f"'{name}' {show(info.shape)} in {info.file}"
        for name, info in source.infos.items()
        if name not in used and not _IGNORED.search(name) and name not in left_out
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
    """Reads the tensors of one leaf and makes its array, contiguous, for a model of `dtype`."""
    dtype = leaf.dtype(dtype)
    # Moved as plain integers of the same width: NumPy copies those faster than bfloat16.
    bits = np.dtype(f"u{dtype.itemsize}")
    arrays = [
        source.read(found[name]).astype(dtype, copy=False).view(bits) for name, _ in leaf.sources
    ]
    result = np.ascontiguousarray(leaf.transform(*arrays)).view(dtype)
    assert result.shape == leaf.shape, (leaf.path, result.shape, leaf.shape)
    return result
