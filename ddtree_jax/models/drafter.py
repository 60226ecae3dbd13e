"""The DFlash block-diffusion drafter (arXiv 2602.06036; checkpoints.md section 2).

It owns neither embedding nor head: the caller embeds the block and projects the result with the
target's. Its context is made of target features, which go straight into every layer's K/V.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.cache import Cache, Pending
from ddtree_jax.config import DrafterConfig
from ddtree_jax.models.layers import DecoderLayer, Peers, RMSNorm, linear, param, rope_tables
from kernels_pallas.dispatch import REFERENCE, Kernels


class Drafter(nnx.Module):
    """A stack of decoder layers over [context features, block]."""

    def __init__(
        self,
        config: DrafterConfig,
        *,
        axis: str | None = None,
        peers: Peers | None = None,
        kernels: Kernels = REFERENCE,
        rngs: nnx.Rngs,
    ):
        d = config.hidden_size
        self.fc_fd = param(rngs, (config.feature_size, d), (None, None))
        self.hidden_norm = RMSNorm(d, config.rms_norm_eps, rngs=rngs)
        self.layers = nnx.List(
            [
                DecoderLayer(config, axis=axis, peers=peers, kernels=kernels, rngs=rngs)
                for _ in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(d, config.rms_norm_eps, rngs=rngs)
        self.config = config

    def project_features(self, features: jax.Array) -> jax.Array:
        """Context rows [..., d] of target features [..., F * d]."""
        return self.hidden_norm(linear(features, self.fc_fd[...]))

    def __call__(
        self,
        cache: Cache,
        length_b: jax.Array,
        features_bcf: jax.Array,
        count_b: jax.Array,
        block_btd: jax.Array | None,
    ) -> tuple[jax.Array | None, Pending]:
        """Drafts one block; the cache is only read.

        The context's newest rows (features committed since the last call) and the block go through
        each layer's q/k/v projection together, so its weights are read once a round.

        Args:
          cache: committed context K/V of every layer.
          length_b: committed context rows; row i of `features_bcf` has position length + i.
          features_bcf: features of the c newest context tokens, of which count_b are real.
          count_b: real rows of `features_bcf`.
          block_btd: embedded block [bonus, mask, ...]; slot i has position length + count + i.
            None only materialises the context (prefill).

        Returns:
          hidden [b, t, d] after the final norm (None without a block) and the pending context K/V.
        """
        ctx = self.project_features(features_bcf)
        c, t = ctx.shape[1], 0 if block_btd is None else block_btd.shape[1]
        slots = jnp.arange(c + t)
        offsets = jnp.where(slots < c, slots, slots - c + count_b[:, None])
        real = (slots < count_b[:, None]) | (slots >= c)
        visible = jnp.broadcast_to(real[:, None, :], (real.shape[0], t, c + t))
        return self.attend_block(
            cache, length_b, ctx, block_btd, length_b[:, None] + offsets, visible
        )

    def attend_block(
        self,
        cache: Cache,
        length_b: jax.Array,
        ctx_bcd: jax.Array,
        block_btd: jax.Array | None,
        positions_bm: jax.Array,
        visible_btm: jax.Array,
    ) -> tuple[jax.Array | None, Pending]:
        """The layers over [context rows, block rows], m = c + t, with absolute positions.

        `visible_btm` says which of those rows a block row may see at all; each layer narrows it by
        its own causality and window.
        """
        config, c = self.config, ctx_bcd.shape[1]
        tables = rope_tables(config.rope, config.head_dim, positions_bm)
        query = positions_bm[:, c:]
        distance = query[:, :, None] - positions_bm[:, None, :]
        x, pending = block_btd, []
        normed = None if x is None else self.layers[0].input_norm(x)
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for index, layer in enumerate(self.layers):
            rows = ctx_bcd if normed is None else jnp.concatenate([ctx_bcd, normed], axis=1)
            qkv, _ = layer.attention.project(rows, tables)
            pending.append(qkv[:, :c])
            if x is None:  # without a block nothing follows a layer's K/V
                continue
            mask, lower = visible_btm, jnp.zeros_like(query)
            if config.causal_block[index]:
                mask = mask & (distance >= 0)
            window = config.windows[index]
            if window is not None:
                mask = mask & (jnp.abs(distance) < window)
                lower = jnp.maximum(query - window + 1, 0)
            parts = layer.attention.attend(
                qkv, cache.layer(index), mask, lower, length_b, window=window
            )
            x, normed = layer.finish(x, parts, norms[index])
        return normed, Pending(tuple(pending))
