"""Picks between kernel and reference for every operation; nothing else decides that."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from kernels_pallas import (
    choice,
    commit,
    draft_tree,
    exchange,
    matmul,
    rows,
    sample,
    tree_attention,
    tree_attention_mosaic,
)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The operations that have kernels. Each method has the signature of its reference.

    mosaic: use the Mosaic GPU kernels (Hopper) for what they support; False is the references only.
    interpret: `plgpu.InterpretGPUParams` to run the kernels on a CPU, for tests.
    """

    mosaic: bool = False
    interpret: Any = None

    def matmul(self, x_mk: jax.Array, w_kn: jax.Array) -> jax.Array:
        """x @ w as partial sums [parts, m, n], for `add_norm` or `head_rows` to add up."""
        (k, n), m = w_kn.shape, x_mk.shape[0]
        reason = matmul.unsupported_reason(m, k, n, x_mk.dtype)
        if self.mosaic and reason is None and matmul.preferred(m, k, n):
            return matmul.split_matmul(x_mk, w_kn, interpret=self.interpret)
        return (
            matmul.partial_sums(x_mk, w_kn) if self.mosaic else matmul.reference(x_mk, w_kn)[None]
        )

    def gated_matmul(self, x_mk: jax.Array, w_kg2c: jax.Array) -> jax.Array:
        """silu(x @ w[:, :, 0]) * (x @ w[:, :, 1]) in x's dtype [m, g * c]."""
        (k, groups, _, columns), rows = w_kg2c.shape, x_mk.shape[0]
        n = groups * columns
        reason = matmul.unsupported_reason(rows, k, n, x_mk.dtype, gated=True)
        takes = self.mosaic and reason is None and columns == matmul.GATED_COLUMNS
        if takes and matmul.preferred(rows, k, n, gated=True):
            return matmul.gated_matmul(x_mk, w_kg2c, interpret=self.interpret)
        return matmul.gated_reference(x_mk, w_kg2c)

    def argmax(
        self,
        x_mk: jax.Array,
        w_kn: jax.Array,
        real: int | jax.Array,
        *,
        transposed: bool = False,
    ) -> tuple[jax.Array, jax.Array]:
        rows, k = x_mk.shape
        n = w_kn.shape[0 if transposed else 1]
        reason = choice.unsupported_reason(rows, k, n, x_mk.dtype, transposed=transposed)
        if self.mosaic and reason is None and choice.preferred(rows, n):
            return choice.argmax(x_mk, w_kn, real, transposed=transposed, interpret=self.interpret)
        return choice.reference(x_mk, w_kn, real, transposed=transposed)

    def add_norm(
        self,
        x_md: jax.Array,
        parts_smd: jax.Array,
        weight_d: jax.Array,
        eps: float,
        *,
        centred: bool = False,
        axis: str | None = None,
        peers: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """x + sum of the parts, over the shards of a mesh `axis` too, and its RMS norm.

        peers: this device's `exchange.Inboxes.addresses`; without, XLA sums over the axis.
        """
        m, d = x_md.shape
        if axis is not None:
            by_kernel = self.mosaic and peers is not None
            if by_kernel and exchange.unsupported_reason(m, d, x_md.dtype) is None:
                return exchange.add_norm(x_md, parts_smd, weight_d, peers, eps, centred=centred)
            parts_smd = lax.psum(rows.total(parts_smd, x_md.dtype), axis)[None]
        arguments = (x_md, parts_smd, weight_d, eps)
        if self.mosaic and rows.add_norm_unsupported(d, x_md.dtype) is None:
            return rows.add_norm(*arguments, centred=centred, interpret=self.interpret)
        return rows.add_norm_reference(*arguments, centred=centred)

    def all_gather(self, x: jax.Array, axis: str, peers: jax.Array | None) -> jax.Array:
        """[shards, *x.shape] of int32 x, no -1 among them; `peers` as for `add_norm`."""
        if self.mosaic and peers is not None and x.size <= exchange.GATHERED:
            return exchange.all_gather(x, peers)
        return lax.all_gather(x, axis)

    def head_rows(
        self,
        parts_smc: jax.Array,
        tables: tuple[jax.Array, jax.Array],
        norms: tuple[jax.Array, jax.Array] | None,
        eps: float,
        shape: tuple[int, int, int],
        dtype,
        *,
        centred: bool = False,
    ) -> jax.Array:
        arguments = (parts_smc, tables, norms, eps, shape, dtype)
        half = tables[0].shape[1]
        if self.mosaic and rows.head_rows_unsupported(shape, half, dtype) is None:
            return rows.head_rows(*arguments, centred=centred, interpret=self.interpret)
        return rows.head_rows_reference(*arguments, centred=centred)

    def attention(
        self,
        qkv_bmch: jax.Array,
        k_bksh: jax.Array,
        v_bksh: jax.Array,
        mask_bnm: jax.Array,
        lower_bn: jax.Array,
        length_b: jax.Array,
        *,
        window: int | None = None,
    ) -> jax.Array:
        arguments = (qkv_bmch, k_bksh, v_bksh, mask_bnm, lower_bn, length_b)
        if self.mosaic and tree_attention_mosaic.unsupported_reason(*arguments[:2]) is None:
            # The kernel begins at the least of `lower_bn`: a window needs nothing more.
            return tree_attention_mosaic.tree_attention(
                *arguments, bounded=window is not None, interpret=self.interpret
            )
        return tree_attention.tree_attention(*arguments, window=window)

    def append(
        self,
        caches_bksh: Sequence[tuple[jax.Array, jax.Array]],
        rows_bmch: Sequence[jax.Array],
        path_bp: jax.Array | None,
        length_b: jax.Array,
        count_b: jax.Array,
    ) -> list[tuple[jax.Array, jax.Array]]:
        arguments = (caches_bksh, rows_bmch, path_bp, length_b, count_b)
        k = caches_bksh[0][0]
        if self.mosaic and commit.unsupported_reason(k.shape[-1], k.dtype) is None:
            return commit.append(*arguments, interpret=self.interpret)
        return commit.reference(*arguments)

    def grow(
        self, scores_blr: jax.Array, budget: int, *, chain_seed: bool = False
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
        if self.mosaic:
            return draft_tree.grow(
                scores_blr, budget, chain_seed=chain_seed, interpret=self.interpret
            )
        return draft_tree.reference(scores_blr, budget, chain_seed=chain_seed)

    def sample(
        self,
        scores_bnv: jax.Array,
        noise_bdv: jax.Array,
        depths_bn: jax.Array,
        top_k_b: jax.Array | None,
        top_p_b: jax.Array | None,
        min_p_b: jax.Array | None,
    ) -> jax.Array:
        arguments = (scores_bnv, noise_bdv, depths_bn, top_k_b, top_p_b, min_p_b)
        v = scores_bnv.shape[-1]
        if self.mosaic and sample.unsupported_reason(v, scores_bnv.dtype) is None:
            return sample.sample(*arguments, interpret=self.interpret)
        return sample.reference(*arguments)


REFERENCE = Kernels()


def attention_unsupported(head_dim: int, group_size: int, dtype) -> str | None:
    """Why a model's attention cannot use the Mosaic kernel, or None."""
    qkv = jax.ShapeDtypeStruct((1, 1, 1, group_size + 2, head_dim), dtype)
    return tree_attention_mosaic.unsupported_reason(
        qkv, jax.ShapeDtypeStruct((1, 1, 128, head_dim), dtype)
    )


def unavailable_reason() -> str | None:
    """Why the Mosaic kernels cannot run on this machine's first device, or None."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"the device is a {device.platform}; the kernels need an NVIDIA Hopper GPU"
    capability = getattr(device, "compute_capability", "unknown")
    if capability != "9.0":
        return f"the GPU has compute capability {capability}; the kernels need 9.0 (Hopper)"
    return None
