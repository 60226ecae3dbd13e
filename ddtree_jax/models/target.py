"""The target language model: one forward over tree nodes, for prefill, AR, chains and trees."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ddtree_jax import gated_delta
from ddtree_jax.cache import Cache, Pending
from ddtree_jax.config import TargetConfig
from ddtree_jax.models.layers import (
    DecoderLayer,
    Peers,
    RMSNorm,
    linear,
    param,
    rope_tables,
)
from ddtree_jax.models.recurrent import Paths, RecurrentLayer
from kernels_pallas.dispatch import REFERENCE, Kernels


class Target(nnx.Module):
    """Llama, Qwen3, Qwen3.5 or Qwen3-Next decoder, dense (checkpoints.md 3.1, 3.2, 3.4).

    Args:
      config: the model.
      axis: mesh axis of tensor parallelism, or None on one device.
      peers: lets a kernel sum over that axis.
      kernels: implementations of the operations that have kernels.
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        axis: str | None = None,
        peers: Peers | None = None,
        kernels: Kernels = REFERENCE,
        rngs: nnx.Rngs,
    ):
        shape = (config.padded_vocab, config.hidden_size)
        self.embed_vd = param(rngs, shape, ("vocab", None))
        self.layers = nnx.List(
            [
                (RecurrentLayer if config.is_recurrent(index) else DecoderLayer)(
                    config, axis=axis, peers=peers, kernels=kernels, rngs=rngs
                )
                for index in range(config.num_layers)
            ]
        )
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, centred=config.centred_norm, rngs=rngs
        )
        if not config.tie_embeddings:
            self.head_dv = param(rngs, shape[::-1], (None, "vocab"))
        self.config, self.axis, self.peers, self.kernels = config, axis, peers, kernels

    def gather(self, x: jax.Array, axis: str) -> jax.Array:
        """[shards, *x.shape] of int32 x, none of them -1, in the order of the shards."""
        return self.kernels.all_gather(x, axis, self._peers())

    def _peers(self) -> jax.Array | None:
        return None if self.peers is None else self.peers[...]

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embedding rows [..., d] of token ids [...]."""
        table = self.embed_vd[...]
        if self.axis is None:
            return table[tokens]
        local = tokens - lax.axis_index(self.axis) * table.shape[0]
        inside = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.clip(local, 0, table.shape[0] - 1)]
        rows = jnp.where(inside[..., None], rows, 0).reshape(-1, table.shape[1])
        # The sum that layers make; nothing is added to it, and its norm is left.
        nothing, weight = jnp.zeros_like(rows), jnp.ones_like(rows[0])
        x, _ = self.kernels.add_norm(
            nothing, rows[None], weight, 1.0, axis=self.axis, peers=self._peers()
        )
        return x.reshape(*tokens.shape, -1)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., v] of normed hidden rows [..., d], this shard's columns.

        Rows that only pad the vocabulary are -inf, so nothing can choose them.
        """
        weight, tied = self._head()
        logits = linear(hidden, weight, transposed=tied, out_dtype=jnp.float32)
        return jnp.where(jnp.arange(logits.shape[-1]) < self._real(), logits, -jnp.inf)

    def best(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array, int]:
        """The largest of `logits`, its column, the lowest on ties, [...], and how many columns."""
        weight, tied = self._head()
        rows = hidden.reshape(-1, hidden.shape[-1])
        largest, column = self.kernels.argmax(rows, weight, self._real(), transposed=tied)
        columns = weight.shape[0 if tied else 1]
        return largest.reshape(hidden.shape[:-1]), column.reshape(hidden.shape[:-1]), columns

    def _head(self) -> tuple[jax.Array, bool]:
        """The weight of the logits, and whether it is [v, d] and not [d, v]."""
        tied = self.config.tie_embeddings
        return (self.embed_vd if tied else self.head_dv)[...], tied

    def _real(self) -> int | jax.Array:
        """This shard's columns before those that only pad the vocabulary."""
        if self.axis is None:
            return self.config.vocab_size
        columns = self.config.padded_vocab // lax.axis_size(self.axis)
        return self.config.vocab_size - lax.axis_index(self.axis) * columns

    def __call__(
        self,
        cache: Cache,
        tokens_bn: jax.Array,
        depths_bn: jax.Array,
        ancestors_bnn: jax.Array,
        length_b: jax.Array,
        feature_layers: tuple[int, ...] = (),
        *,
        max_depth: int | None = None,
        count_b: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, Pending]:
        """Runs the nodes of one tree per row over the committed prefix; the cache is only read.

        Args:
          cache: committed K/V of every layer.
          tokens_bn: node tokens, int32.
          depths_bn: node depths, the root 0; a node's position is length + depth.
          ancestors_bnn: [b, i, j] whether node j is node i or its ancestor.
          length_b: committed rows of the cache.
          feature_layers: layers whose output is returned as features.
          max_depth: no node is deeper; static. None: as deep as a chain of the nodes.
          count_b: real rows of a causal chunk that will be committed whole (prefill); None for
            nodes of which any path may be. Recurrent layers then take the cheaper way.

        Returns:
          hidden [b, n, d] after the final norm; features [b, n, len(feature_layers) * d], the
          residual stream after those layers; and what is pending of the nodes.
        """
        positions = length_b[:, None] + depths_bn
        no_bound = jnp.zeros_like(positions)
        tables = rope_tables(self.config.rope, self.config.head_dim, positions)
        paths = self.paths(ancestors_bnn, depths_bn, max_depth, count_b)
        x = self.embed(tokens_bn)
        normed = self.layers[0].input_norm(x)
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        softmax, recurrent = zip(cache.k, cache.v, strict=True), iter(cache.recurrent)
        features, pending, pending_states = {}, [], []
        for index, (layer, window) in enumerate(zip(self.layers, self.config.windows, strict=True)):
            with jax.named_scope(f"target_layer_{index}"):
                if isinstance(layer, RecurrentLayer):
                    parts, state = layer.delta(normed, next(recurrent), paths)
                    pending_states.append(state)
                else:
                    mask, lower = ancestors_bnn, no_bound
                    if window is not None:
                        mask = mask & (positions[:, :, None] - positions[:, None, :] < window)
                        lower = jnp.maximum(positions - window + 1, 0)
                    qkv, gate = layer.attention.project(normed, tables)
                    parts = layer.attention.attend(
                        qkv, next(softmax), mask, lower, length_b, window=window, gate_bnkgh=gate
                    )
                    pending.append(qkv)
                x, normed = layer.finish(x, parts, norms[index])
            if index in feature_layers:
                features[index] = x
        taps = [features[index] for index in feature_layers]
        return (
            normed,
            jnp.concatenate(taps, axis=-1) if taps else x[..., :0],
            Pending(tuple(pending), tuple(pending_states)),
        )

    def paths(self, ancestors_bnn, depths_bn, max_depth: int | None, count_b) -> Paths:
        """What recurrent layers ask of the tree, found once for all of them."""
        delta, deepest, rows = self.config.delta, depths_bn.shape[1] - 1, None
        if delta is not None and count_b is None:
            rows = gated_delta.conv_rows(ancestors_bnn, depths_bn, delta.conv_taps)
        deepest = deepest if max_depth is None else min(max_depth, deepest)
        return Paths(ancestors_bnn, depths_bn, deepest, rows, count_b)
