"""What stands between two products, row by row: residual, norm, rotary embedding.

Both take matmul.py's partial sums; rounding happens where the reference rounds, to the dtype of x.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.mosaic import WARPS


def total(parts_smd: jax.Array, dtype) -> jax.Array:
    """[m, d], the sum of the parts."""
    y_md = parts_smd[0] if parts_smd.shape[0] == 1 else parts_smd.sum(axis=0)
    return y_md.astype(dtype)


def rms_norm(x: jax.Array, weight_d: jax.Array, eps: float, centred: bool = False) -> jax.Array:
    """w * x / rms(x), the statistics in float32, cast to x's dtype before the product.

    centred: (1 + w) * x / rms(x) instead, cast after the product (checkpoints.md 3.0).
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if centred:
        return (wide * scale * (1 + weight_d.astype(jnp.float32))).astype(x.dtype)
    return (wide * scale).astype(x.dtype) * weight_d


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of x [m, ..., h], halves rotated (neox), computed in float32.

    tables: cos and sin, float32 [m, rotated dims / 2]; they may cover only the first dimensions of
      h, the others pass.
    """
    rotated_dims = 2 * tables[0].shape[-1]
    x, rest = x[..., :rotated_dims], x[..., rotated_dims:]
    cos, sin = (t.reshape(t.shape[0], *(1,) * (x.ndim - 2), t.shape[1]) for t in tables)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), rest], axis=-1)


def add_norm_reference(
    x_md: jax.Array,
    parts_smd: jax.Array,
    weight_d: jax.Array,
    eps: float,
    *,
    centred: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x + sum of the parts, and the RMS norm of that; `centred` as for `rms_norm`."""
    x_md = x_md + total(parts_smd, x_md.dtype)
    return x_md, rms_norm(x_md, weight_d, eps, centred)


def head_rows_reference(
    parts_smc: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, jax.Array] | None,
    eps: float,
    shape: tuple[int, int, int],
    dtype,
    *,
    centred: bool = False,
) -> jax.Array:
    """q, k and v of m rows, ready for attention: [m, k, g + 2, h], g query heads, then k, then v.

    Args:
      parts_smc: partial sums of the projection.
      tables: cos and sin, float32 [m, rotated dims / 2].
      norms: weights [h] of the norms of q and k, or None; `centred` as for `rms_norm`.
      shape: (k, g + 2, h).
      dtype: of the result.
    """
    qkv = total(parts_smc, dtype).reshape(-1, *shape)
    q, k, v = jnp.split(qkv, [shape[1] - 2, shape[1] - 1], axis=2)
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps, centred), rms_norm(k, norms[1], eps, centred)
    # Without the barrier each reader of the result computes its part of it again.
    qkv = jnp.concatenate([rotate(q, tables), rotate(k, tables), v], axis=2)
    return lax.optimization_barrier(qkv)


def add_norm_unsupported(d: int, dtype) -> str | None:
    """Why `add_norm` cannot take rows of d, or None."""
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}; the kernel takes bfloat16"
    return f"rows of {d}; the kernel takes multiples of 128" if d % 128 else None


def head_rows_unsupported(shape: tuple[int, int, int], half: int, dtype) -> str | None:
    """Why `head_rows` cannot make heads of `shape` of which 2 * half dimensions rotate, or None."""
    k, slots, h = shape
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}; the kernel makes bfloat16"
    if k * slots % WARPS:
        return f"{k * slots} heads; the kernel takes multiples of {WARPS}"
    if half % 32 or h % 32:
        return f"head size {h}, {2 * half} of it rotated; the kernel takes multiples of 32 and 64"
    return None


def row_sum_and_norm(x, y, weight, eps: float, centred: bool) -> tuple[jax.Array, jax.Array]:
    """Inside a kernel: bfloat16 x + y of one row, y rounded first, and its norm."""
    y = y.astype(jnp.bfloat16).astype(jnp.float32)
    x = (x.astype(jnp.float32) + y).astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / x.shape[0] + eps)
    if centred:
        return x, (wide * scale * (1.0 + weight.astype(jnp.float32))).astype(jnp.bfloat16)
    return x, (wide * scale).astype(jnp.bfloat16) * weight


@functools.partial(jax.jit, static_argnames=("eps", "centred", "interpret"))
def add_norm(
    x_md: jax.Array,
    parts_smd: jax.Array,
    weight_d: jax.Array,
    eps: float,
    *,
    centred: bool = False,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """The kernel; arguments as for the reference, x and weight bfloat16. A block has one row."""
    s, m, d = parts_smd.shape

    def add_norm_kernel(x_ref, parts_ref, weight_ref, o_ref, y_ref):
        row = lax.axis_index("row")
        # All reads first, so that they are under way together.
        parts = [parts_ref[part, row].astype(jnp.float32) for part in range(s)]
        x, weight = x_ref[row], weight_ref[...]
        y = functools.reduce(lambda a, b: a + b, parts)
        o_ref[row], y_ref[row] = row_sum_and_norm(x, y, weight, eps, centred)

    row = jax.ShapeDtypeStruct((m, d), jnp.bfloat16)
    return plgpu.kernel(
        add_norm_kernel,
        out_type=(row, row),
        grid=(m,),
        grid_names=("row",),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(x_md, parts_smd, weight_d)


@functools.partial(jax.jit, static_argnames=("eps", "shape", "dtype", "centred", "interpret"))
def head_rows(
    parts_smc: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    norms: tuple[jax.Array, jax.Array] | None,
    eps: float,
    shape: tuple[int, int, int],
    dtype=jnp.bfloat16,
    *,
    centred: bool = False,
    interpret=None,
) -> jax.Array:
    """The kernel; arguments as for the reference.

    A warp has one head of a row, and each of its lanes as much of the first half of what rotates as
    of the second, so that warps tell each other nothing.
    """
    groups, slots, h = shape
    s, m, _ = parts_smc.shape
    half, heads = tables[0].shape[1], groups * slots
    pieces = [(0, half), (half, half)] + ([(2 * half, h - 2 * half)] if h > 2 * half else [])

    def head_rows_kernel(parts_ref, cos_ref, sin_ref, *refs):
        norm_refs, o_ref = refs[:-1], refs[-1]
        row, first = lax.axis_index("row"), lax.axis_index("heads") * WARPS

        def load(ref, *index, layout):
            part = plgpu.load(ref.at[index], layout=layout, optimized=False)
            return part.astype(jnp.float32)

        def of_heads(ref, *index):
            return load(ref, *index, layout=mosaic.row_of_warp(index[-1].size))

        def of_all(ref, *index):
            """The same for all heads."""
            width = index[-1].size
            part = load(ref, *index, layout=mosaic.row_of_warp(width).reduce(0))
            return lax.broadcast_in_dim(part, (WARPS, width), [1])

        def rounded(x):
            return x.astype(jnp.bfloat16).astype(jnp.float32)

        # All reads first, so that they are under way together.
        places = [(pl.ds(first, WARPS), pl.ds(*piece)) for piece in pieces]
        parts = [[of_heads(parts_ref, i, row, *place) for i in range(s)] for place in places]
        cos, sin = (of_all(ref, row, pl.ds(0, half)) for ref in (cos_ref, sin_ref))
        weights = [[of_all(ref, pl.ds(*piece)) for ref in norm_refs] for piece in pieces]

        x = [rounded(functools.reduce(lambda a, b: a + b, each)) for each in parts]
        slot = []
        for part in x:
            layout = mosaic.row_of_warp(part.shape[1])
            index = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=layout)
            slot.append(lax.rem(first + index, slots))

        turned = x
        if norms is not None:
            squares = [x[0] * x[0] + x[1] * x[1], *(part * part for part in x[2:])]
            scale = lax.rsqrt(sum(jnp.sum(part, axis=1) for part in squares) / h + eps)
            turned = []
            for part, (of_q, of_k), which in zip(x, weights, slot, strict=True):
                weight = jnp.where(which == slots - 2, of_k, of_q)
                scaled = part * lax.broadcast_in_dim(scale, part.shape, [0])
                if centred:
                    turned.append(rounded(scaled * (1.0 + weight)))
                else:
                    turned.append(rounded(rounded(scaled) * weight))
        one, other, *rest = turned
        turned = [one * cos - other * sin, other * cos + one * sin, *rest]
        for place, part, plain, which in zip(places, turned, x, slot, strict=True):
            y = jnp.where(which == slots - 1, plain, part)  # values stay as they are
            o_ref[row, *place] = y.astype(jnp.bfloat16)

    y = plgpu.kernel(
        head_rows_kernel,
        out_type=jax.ShapeDtypeStruct((m, heads, h), jnp.bfloat16),
        grid=(m, heads // WARPS),
        grid_names=("row", "heads"),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(parts_smc.reshape(s, m, heads, h), *tables, *(norms or ()))
    return y.reshape(m, *shape)
