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
from kernels_pallas import matmul, rows
from kernels_pallas.dispatch import Kernels

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
    lead, inner = x.shape[: x.ndim - contracted], math.prod(x.shape[x.ndim - contracted :])
    out = w.shape[:1] if transposed else w.shape[contracted:]
    w = w if transposed else w.reshape(inner, -1)
    y = matmul.reference(x.reshape(-1, inner), w, out_dtype, transposed=transposed)
    return y.reshape(*lead, *out)


class RMSNorm(nnx.Module):
    """w * x / rms(x), the statistics in float32, cast to x's dtype before the product.

    centred: (1 + w) * x / rms(x) instead, cast after the product (checkpoints.md 3.0).
    """

    def __init__(self, size: int, eps: float, *, centred: bool = False, rngs: nnx.Rngs):
        self.weight_d = param(rngs, (size,), (None,), ones=not centred)
        self.eps, self.centred = eps, centred

    def __call__(self, x: jax.Array) -> jax.Array:
        return rows.rms_norm(x, self.weight_d[...], self.eps, self.centred)


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
    """cos and sin, float32 [b * n, rotated dims / 2], at absolute positions int32 [b, n]."""
    positions = positions_bn.reshape(-1, 1).astype(jnp.float32)
    angles = positions * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


class Peers(nnx.Variable):
    """Where a device finds the inboxes of its group (kernels_pallas/exchange.py), int32 [words]."""


def add_bias(parts_smd: jax.Array, bias_d: jax.Array, dtype, axis: str | None = None) -> jax.Array:
    """One partial sum [1, m, d] with the bias, which only the first of summed shards adds."""
    if axis is not None:
        bias_d = jnp.where(lax.axis_index(axis) == 0, bias_d, 0)
    return (rows.total(parts_smd, dtype) + bias_d)[None]


class Attention(nnx.Module):
    """Softmax attention of query rows over (committed cache, rows beside it).

    q, k and v are one projection, grouped per KV head: [d, k, g + 2, h], the g query heads of a
    group first, then its k, then its v; with a gate, its g gate heads follow: [d, k, 2g + 2, h].
    The group axis shards.
    """

    def __init__(
        self, config: DecoderConfig, *, axis: str | None, kernels: Kernels, rngs: nnx.Rngs
    ):
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
        self.eps, self.group_size, self.gated = config.rms_norm_eps, g, config.attention_gate
        self.centred = config.centred_norm
        self.axis, self.kernels = axis, kernels

    def project(self, x_bnd: jax.Array, tables) -> tuple[jax.Array, jax.Array | None]:
        """[b, n, k, g + 2, h]: q and k normed and rotated, and v; `tables` from `rope_tables`.

        With a gate also what `attend` gates the results by, [b, n, k, g, h]; else None.
        """
        b, n, d = x_bnd.shape
        weight = self.wqkv_dkgh[...]
        k, heads, h = weight.shape[1:]
        parts = self.kernels.matmul(x_bnd.reshape(-1, d), weight.reshape(d, -1))
        if self.bias:
            parts = add_bias(parts, self.bqkv_kgh[...].reshape(-1), x_bnd.dtype)
        gate = None
        if self.gated:
            whole = rows.total(parts, x_bnd.dtype).reshape(-1, k, heads, h)
            heads = self.group_size + 2
            gate = whole[:, :, heads:].reshape(b, n, k, self.group_size, h)
            parts = whole[:, :, :heads].reshape(1, b * n, k * heads * h)
        norms = (self.q_norm.weight_d[...], self.k_norm.weight_d[...]) if self.qk_norm else None
        qkv = self.kernels.head_rows(
            parts, tables, norms, self.eps, (k, heads, h), x_bnd.dtype, centred=self.centred
        )
        return qkv.reshape(b, n, k, heads, h), gate

    def attend(
        self,
        qkv_bmch: jax.Array,
        cache: tuple[jax.Array, jax.Array],
        mask_bnm: jax.Array,
        lower_bn: jax.Array,
        length_b: jax.Array,
        *,
        window: int | None = None,
        gate_bnkgh: jax.Array | None = None,
    ) -> jax.Array:
        """Partial sums [s, b * n, d] of the attention output projected back, of this shard.

        Arguments as for `kernels_pallas.tree_attention`; `gate_bnkgh` from `project`.
        """
        o = self.kernels.attention(qkv_bmch, *cache, mask_bnm, lower_bn, length_b, window=window)
        if gate_bnkgh is not None:
            o = o * jax.nn.sigmoid(gate_bnkgh)
        weight = self.wo_kghd[...]
        width = math.prod(weight.shape[:3])
        parts = self.kernels.matmul(o.reshape(-1, width), weight.reshape(width, -1))
        return add_bias(parts, self.bo_d[...], o.dtype, self.axis) if self.bias else parts


class MLP(nnx.Module):
    """SwiGLU, gate and up in one projection [d, groups, 2, columns], so by turns.

    Any tile of the projection's columns then has as many of gate as of up, side by side.
    """

    def __init__(self, config: DecoderConfig, *, kernels: Kernels, rngs: nnx.Rngs):
        d, f = config.hidden_size, config.intermediate_size
        columns = config.gate_columns
        shape = (d, f // columns, 2, columns)
        self.gate_up_dg2c = param(rngs, shape, (None, "mlp", None, None))
        self.down_fd = param(rngs, (f, d), ("mlp", None))
        self.kernels = kernels

    def __call__(self, x_md: jax.Array) -> jax.Array:
        """Partial sums [s, m, d] of this shard."""
        hidden = self.kernels.gated_matmul(x_md, self.gate_up_dg2c[...])
        return self.kernels.matmul(hidden, self.down_fd[...])


class Layer(nnx.Module):
    """A pre-norm layer without what mixes its rows: the norms and the MLP.

    A norm runs together with the addition before it, so a layer takes its input normed and norms
    its output for the next one. What is added are the partial sums of all shards.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        axis: str | None,
        peers: Peers | None = None,
        kernels: Kernels,
        rngs: nnx.Rngs,
    ):
        d, eps, centred = config.hidden_size, config.rms_norm_eps, config.centred_norm
        self.input_norm = RMSNorm(d, eps, centred=centred, rngs=rngs)
        self.mlp_norm = RMSNorm(d, eps, centred=centred, rngs=rngs)
        self.mlp = MLP(config, kernels=kernels, rngs=rngs)
        self.axis, self.peers, self.kernels = axis, peers, kernels

    def finish(
        self, x_bnd: jax.Array, attended_smd: jax.Array, next_norm: RMSNorm
    ) -> tuple[jax.Array, jax.Array]:
        """The layer's output and `next_norm` of it, both [b, n, d].

        Args:
          x_bnd: the layer's input.
          attended_smd: this shard's partial sums of what attention adds to it.
        """
        peers = None if self.peers is None else self.peers[...]

        def add(x_md, parts_smd, norm):
            arguments = (x_md, parts_smd, norm.weight_d[...], norm.eps)
            return self.kernels.add_norm(
                *arguments, centred=norm.centred, axis=self.axis, peers=peers
            )

        x, normed = add(x_bnd.reshape(-1, x_bnd.shape[-1]), attended_smd, self.mlp_norm)
        x, normed = add(x, self.mlp(normed), next_norm)
        return x.reshape(x_bnd.shape), normed.reshape(x_bnd.shape)


class DecoderLayer(Layer):
    """A layer with softmax attention. Who attends to what is the caller's business."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        axis: str | None,
        peers: Peers | None = None,
        kernels: Kernels,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, axis=axis, peers=peers, kernels=kernels, rngs=rngs)
        self.attention = Attention(config, axis=axis, kernels=kernels, rngs=rngs)
