"""Decoder layers with Gated DeltaNet for attention; the mathematics is in gated_delta.py.

Axis letters beyond those of layers.py are gated_delta.py's.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ddtree_jax import gated_delta
from ddtree_jax.config import DecoderConfig
from ddtree_jax.gated_delta import Nodes, Recurrent
from ddtree_jax.models.layers import Layer, Peers, RMSNorm, linear, param
from kernels_pallas.dispatch import Kernels


@dataclasses.dataclass(frozen=True)
class Paths:
    """How the nodes of a forward hang together, for layers that follow paths.

    ancestors [b, n, n], depths [b, n], max_depth: see `gated_delta.tree`. conv_rows: see
    `gated_delta.convolve`. count [b]: real rows of a causal chunk that is committed whole; None for
    a tree.
    """

    ancestors: jax.Array
    depths: jax.Array
    max_depth: int
    conv_rows: jax.Array | None
    count: jax.Array | None


def unit(x: jax.Array) -> jax.Array:
    """Rows of length 1."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


class GatedDelta(nnx.Module):
    """Gated DeltaNet (checkpoints.md 3.4) of tree nodes over a committed state.

    One projection, grouped per key head, whose axis shards: its q, k, the v of its value heads,
    their output gates z, their b (step sizes) and their a (decays). Letters as in gated_delta.py.
    """

    def __init__(
        self, config: DecoderConfig, *, axis: str | None, kernels: Kernels, rngs: nnx.Rngs
    ):
        assert config.delta is not None
        delta, d = config.delta, config.hidden_size
        k, r, y = delta.num_key_heads, delta.group_size, delta.value_dim
        heads = "key_heads"
        self.win_dkc = param(rngs, (d, k, delta.projected), (None, heads, None))
        self.conv_tkc = param(rngs, (delta.conv_taps, k, delta.channels), (None, heads, None))
        # They are exponents of decays that multiply over the whole text.
        self.a_log_kr = param(rngs, (k, r), (heads, None), wide=True)
        self.dt_bias_kr = param(rngs, (k, r), (heads, None), wide=True)
        self.norm = RMSNorm(y, config.rms_norm_eps, rngs=rngs)
        self.wo_kryd = param(rngs, (k, r, y, d), (heads, None, None, None))
        self.config, self.axis, self.kernels = delta, axis, kernels

    def __call__(
        self, x_bnd: jax.Array, carried: Recurrent, paths: Paths
    ) -> tuple[jax.Array, Nodes | Recurrent]:
        """This shard's partial sums [s, b * n, d] of the output, and what is pending then."""
        c, (b, n, _) = self.config, x_bnd.shape
        x, r, y = c.key_dim, c.group_size, c.value_dim
        projected = linear(x_bnd, self.win_dkc[...])
        ends = [c.channels, c.channels + r * y, c.channels + r * y + r]
        inputs, z, step, rate = jnp.split(projected, ends, axis=-1)
        mixed = gated_delta.convolve(carried.window, inputs, self.conv_tkc[...], paths.conv_rows)
        q, k, v = jnp.split(mixed, [x, 2 * x], axis=-1)
        q, k, v = unit(q) * x**-0.5, unit(k), v.reshape(b, n, -1, r, y)
        beta = jax.nn.sigmoid(step).astype(jnp.float32)
        rate = jax.nn.softplus(rate.astype(jnp.float32) + self.dt_bias_kr[...])
        g = -jnp.exp(self.a_log_kr[...]) * rate
        pending: Nodes | Recurrent
        if paths.count is None:
            o, u = gated_delta.tree(
                carried.state, q, k, v, g, beta, paths.ancestors, paths.depths, paths.max_depth
            )
            pending = Nodes(k, u, g, inputs)
        else:
            # Rows that are only padding leave the state as it is.
            real = (jnp.arange(n) < paths.count[:, None])[:, :, None, None]
            g, beta = jnp.where(real, g, 0.0), jnp.where(real, beta, 0.0)
            o, state = gated_delta.chunk(carried.state, q, k, v, g, beta)
            pending = Recurrent(state, gated_delta.next_window(carried.window, inputs, paths.count))
        o = self.norm(o.astype(x_bnd.dtype)).astype(jnp.float32)
        o = o * jax.nn.silu(z.reshape(o.shape).astype(jnp.float32))
        weight = self.wo_kryd[...]
        width = math.prod(weight.shape[:3])
        o = o.astype(x_bnd.dtype).reshape(-1, width)
        return self.kernels.matmul(o, weight.reshape(width, -1)), pending


class RecurrentLayer(Layer):
    """A layer with Gated DeltaNet."""

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
        self.delta = GatedDelta(config, axis=axis, kernels=kernels, rngs=rngs)
