"""The target language model: one forward over tree nodes, for prefill, AR, chains and trees."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ddtree_jax.cache import Cache, Pending
from ddtree_jax.config import TargetConfig
from ddtree_jax.models.layers import (
    DecoderLayer,
    RMSNorm,
    all_sum,
    linear,
    param,
    rope_tables,
)
from kernels_pallas.dispatch import REFERENCE, Kernels


class Target(nnx.Module):
    """Llama or Qwen3 dense decoder (checkpoints.md 3.1, 3.2).

    Args:
      config: the model.
      axis: mesh axis of tensor parallelism, or None on one device.
      kernels: implementations of the operations that have kernels.
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        axis: str | None = None,
        kernels: Kernels = REFERENCE,
        rngs: nnx.Rngs,
    ):
        shape = (config.padded_vocab, config.hidden_size)
        self.embed_vd = param(rngs, shape, ("vocab", None))
        self.layers = nnx.List(
            [
                DecoderLayer(config, axis=axis, kernels=kernels, rngs=rngs)
                for _ in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, rngs=rngs)
        if not config.tie_embeddings:
            self.head_dv = param(rngs, shape[::-1], (None, "vocab"))
        self.config, self.axis = config, axis

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embedding rows [..., d] of token ids [...]."""
        table = self.embed_vd[...]
        if self.axis is None:
            return table[tokens]
        local = tokens - lax.axis_index(self.axis) * table.shape[0]
        inside = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
        return all_sum(jnp.where(inside[..., None], rows, 0), self.axis)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., v] of normed hidden rows [..., d], this shard's columns.

        Rows that only pad the vocabulary are -inf, so nothing can choose them.
        """
        tied = self.config.tie_embeddings
        weight = self.embed_vd if tied else self.head_dv
        logits = linear(hidden, weight[...], transposed=tied, out_dtype=jnp.float32)
        columns = jnp.arange(logits.shape[-1])
        if self.axis is not None:
            columns += lax.axis_index(self.axis) * logits.shape[-1]
        return jnp.where(columns < self.config.vocab_size, logits, -jnp.inf)

    def __call__(
        self,
        cache: Cache,
        tokens_bn: jax.Array,
        depths_bn: jax.Array,
        ancestors_bnn: jax.Array,
        length_b: jax.Array,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jax.Array, Pending]:
        """Runs the nodes of one tree per row over the committed prefix; the cache is only read.

        Args:
          cache: committed K/V of every layer.
          tokens_bn: node tokens, int32.
          depths_bn: node depths, the root 0; a node's position is length + depth.
          ancestors_bnn: [b, i, j] whether node j is node i or its ancestor.
          length_b: committed rows of the cache.
          feature_layers: layers whose output is returned as features.

        Returns:
          hidden [b, n, d] after the final norm; features [b, n, len(feature_layers) * d], the
          residual stream after those layers; and the pending K/V of the nodes.
        """
        positions = length_b[:, None] + depths_bn
        tables = rope_tables(self.config.rope, self.config.head_dim, positions)
        x = self.embed(tokens_bn)
        normed = self.layers[0].input_norm(x)
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        features, pending = {}, []
        for index, (layer, window) in enumerate(zip(self.layers, self.config.windows, strict=True)):
            with jax.named_scope(f"target_layer_{index}"):
                mask, lower = ancestors_bnn, jnp.zeros_like(positions)
                if window is not None:
                    mask = mask & (positions[:, :, None] - positions[:, None, :] < window)
                    lower = jnp.maximum(positions - window + 1, 0)
                qkv = layer.attention.project(normed, tables)
                parts = layer.attention.attend(qkv, cache.layer(index), mask, lower, length_b)
                x, normed = layer.finish(x, parts, norms[index])
            pending.append(qkv)
            if index in feature_layers:
                features[index] = x
        taps = [features[index] for index in feature_layers]
        return (
            normed,
            jnp.concatenate(taps, axis=-1) if taps else x[..., :0],
            Pending(tuple(pending)),
        )
