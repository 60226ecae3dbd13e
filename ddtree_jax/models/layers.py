"""Building blocks shared by target and drafter.

Axis letters of the repository: b batch, n tree nodes or query rows, m key rows beside the cache,
s cache slots, k KV heads, g query heads per KV head, h head dim, d model dim, f MLP hidden dim,
v vocabulary, l layers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from ddtree_jax.config import DecoderConfig, RopeConfig
from kernels_pallas.tree_attention import tree_attention

INIT_SCALE = 0.02


def param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    ones: bool = False,
    wide: bool = False,
):
    """Declares a parameter once: its shape, its logical axes (see sharding.py) and random values.

    A `wide` parameter is float32 whatever the model's dtype.

    Checkpoints restore into the abstract form (`nnx.eval_shape`), so the values are drawn only for
    random-weight benchmarks and tests.
    """
    value = jnp.ones(shape) if ones else INIT_SCALE * jax.random.normal(rngs.params(), shape)
    return nnx.Param(value, axes=axes, wide=wide)


def precision_of(dtype) -> lax.Precision | None:
    """float32 must mean float32: without this, a GPU would use TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(
    x: jax.Array, w: jax.Array, contracted: int = 1, *, transposed: bool = False, out_dtype=None
) -> jax.Array:
    """x[..., in] @ w[in..., out...]: one GEMM over all rows.

    Args:
      x: rows; its last `contracted` axes are the first `contracted` axes of `w`.
      w: weight stored as [in..., out...], or as [out, in] if `transposed`.
      out_dtype: result type (default: that of x). Sums are accumulated in float32 either way.
    """
    lead = x.shape[: x.ndim - contracted]
    inner = math.prod(x.shape[x.ndim - contracted :])
    out = w.shape[:1] if transposed else w.shape[contracted:]
    rows = x.reshape(-1, inner)
    count = rows.shape[0]
    if count == 1 and x.dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # XLA's CPU backend has no fast path for a bf16 product of one row: 8 times slower than two.
        rows = jnp.concatenate([rows, rows])
    y = lax.dot_general(
        rows,
        w if transposed else w.reshape(inner, -1),
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=precision_of(x.dtype),
        preferred_element_type=out_dtype or x.dtype,
    )
    return y[:count].reshape(*lead, *out)


def all_sum(x: jax.Array, axis: str | None) -> jax.Array:
    """Sum over the tensor-parallel axis; the identity where that axis is absent."""
    return x if axis is None else lax.psum(x, axis)


class RMSNorm(nnx.Module):
    """w * x / rms(x), the statistics in float32, cast to x's dtype before the product.

    centred: (1 + w) * x / rms(x) instead, cast after the product (checkpoints.md 3.0).
    """

    def __init__(self, size: int, eps: float, *, centred: bool = False, rngs: nnx.Rngs):
        self.weight_d = param(rngs, (size,), (None,), ones=not centred)
        self.eps, self.centred = eps, centred

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.centred:
            return (wide * scale * (1 + self.weight_d[...].astype(jnp.float32))).astype(x.dtype)
        return (wide * scale).astype(x.dtype) * self.weight_d[...]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Rotary inverse frequencies, float32 [rotated dims / 2] (checkpoints.md 2.7)."""
    head_dim = int(head_dim * rope.partial)
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (np.float32(1.0) / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "llama3":
        length = 2 * np.pi / plain
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        span = rope.high_freq_factor - rope.low_freq_factor
        t = (rope.original_max_position / length - rope.low_freq_factor) / span
        blend = (1 - t) * plain / rope.factor + t * plain
        scaled = np.where(length > low, plain / rope.factor, np.where(length < high, plain, blend))
        return scaled.astype(np.float32)
    if rope.kind == "yarn":

        def correction(rotations: float) -> float:
            ratio = rope.original_max_position / (rotations * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

        low, high = correction(rope.beta_fast), correction(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high = high + 0.001 if low == high else high
        ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        return (plain / rope.factor * ramp + plain * (1 - ramp)).astype(np.float32)
    return plain


def rope_tables(
    rope: RopeConfig, head_dim: int, positions_bn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [b, n, rotated dims / 2], at absolute positions int32 [b, n]."""
    angles = positions_bn[..., None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of x [b, n, ..., h], halves rotated (neox), computed in float32.

    The tables may cover only the first dimensions of h; the others pass.
    """
    rotated_dims = 2 * tables[0].shape[-1]
    x, rest = x[..., :rotated_dims], x[..., rotated_dims:]
    cos, sin = (t.reshape(*t.shape[:2], *(1,) * (x.ndim - 3), t.shape[-1]) for t in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)


class Attention(nnx.Module):
    """Softmax attention of query rows over (committed cache, rows beside it).

    q, k and v are one projection, grouped per KV head: [d, k, g + 2, h], the g query heads of a
    group first, then its k, then its v; with a gate, its g gate heads follow: [d, k, 2g + 2, h].
    The group axis shards.
    """

    def __init__(self, config: DecoderConfig, *, axis: str | None, rngs: nnx.Rngs):
        d, k, g, h = config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim
        heads = g + 2 + (g if config.attention_gate else 0)
        self.wqkv_dkgh = param(rngs, (d, k, heads, h), (None, "kv_heads", None, None))
        self.wo_kghd = param(rngs, (k, g, h, d), ("kv_heads", None, None, None))
        if config.attention_bias:
            self.bqkv_kgh = param(rngs, (k, heads, h), ("kv_heads", None, None))
            self.bo_d = param(rngs, (d,), (None,))
        if config.qk_norm:
            centred = config.centred_norm
            self.q_norm = RMSNorm(h, config.rms_norm_eps, centred=centred, rngs=rngs)
            self.k_norm = RMSNorm(h, config.rms_norm_eps, centred=centred, rngs=rngs)
        self.bias, self.qk_norm = config.attention_bias, config.qk_norm
        self.group_size, self.axis, self.gated = g, axis, config.attention_gate

    def project(self, x_bnd: jax.Array, tables) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated q [b, n, k, g, h], rotated k and v [b, n, k, h].

        With a gate q is [b, n, k, 2g, h]: the queries, then what `attend` gates their results by.
        """
        g = self.group_size
        qkv = linear(x_bnd, self.wqkv_dkgh[...])
        if self.bias:
            qkv = qkv + self.bqkv_kgh[...]
        q, k, v, gate = jnp.split(qkv, [g, g + 1, g + 2], axis=3)
        k, v = k[:, :, :, 0], v[:, :, :, 0]
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q = jnp.concatenate([rotate(q, tables), gate], axis=3) if self.gated else rotate(q, tables)
        return q, rotate(k, tables), v

    def attend(
        self,
        q: jax.Array,
        cache: tuple[jax.Array, jax.Array],
        k_new: jax.Array,
        v_new: jax.Array,
        mask_bnm: jax.Array,
        lower_bn: jax.Array,
        length_b: jax.Array,
    ) -> jax.Array:
        """Attention output projected back to [b, n, d]; arguments as for `tree_attention`."""
        q, gate = jnp.split(q, [self.group_size], axis=3)
        o = tree_attention(q, *cache, k_new, v_new, mask_bnm, lower_bn, length_b)
        if self.gated:
            o = o * jax.nn.sigmoid(gate)
        y = all_sum(linear(o, self.wo_kghd[...], contracted=3), self.axis)
        return y + self.bo_d[...] if self.bias else y


class MLP(nnx.Module):
    """SwiGLU, gate and up in one projection [d, 2, f]."""

    def __init__(self, config: DecoderConfig, *, axis: str | None, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.intermediate_size
        self.gate_up_d2f = param(rngs, (d, 2, f), (None, None, "mlp"))
        self.down_fd = param(rngs, (f, d), ("mlp", None))
        self.axis = axis

    def __call__(self, x_bnd: jax.Array) -> jax.Array:
        gate_up = linear(x_bnd, self.gate_up_d2f[...])
        hidden = jax.nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]
        return all_sum(linear(hidden, self.down_fd[...]), self.axis)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP. Who attends to what is the caller's business."""

    def __init__(self, config: DecoderConfig, *, axis: str | None, rngs: nnx.Rngs):
        d, eps, centred = config.hidden_size, config.rms_norm_eps, config.centred_norm
        self.input_norm = RMSNorm(d, eps, centred=centred, rngs=rngs)
        self.attention = Attention(config, axis=axis, rngs=rngs)
        self.mlp_norm = RMSNorm(d, eps, centred=centred, rngs=rngs)
        self.mlp = MLP(config, axis=axis, rngs=rngs)
