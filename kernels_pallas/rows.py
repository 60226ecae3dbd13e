"""What stands between two products, row by row: residual, norm, rotary embedding.

Both take matmul.py's partial sums; rounding happens where the reference rounds, to the dtype of x.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import MULTIPROCESSORS


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


def head_rows_unsupported(h: int, dtype) -> str | None:
    """Why `head_rows` cannot make heads of h, or None."""
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}; the kernel makes bfloat16"
    return f"head size {h}; the kernel takes multiples of 128" if h % 128 else None


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

    A block has one KV head's group of one row, or one head of it where rows are so few that the
    blocks of all heads run at the same time.
    """
    groups, slots, h = shape
    s, m, columns = parts_smc.shape
    half = tables[0].shape[1]
    # As wide as a head: what is not rotated is multiplied by 1.
    cos, sin = (
        jnp.concatenate([t, t, jnp.full((m, h - 2 * half), rest, jnp.float32)], axis=1)
        for t, rest in zip(tables, (1.0, 0.0), strict=True)
    )
    width = h + 2 * half  # a head with room on both sides, to be read from half a rotation off
    single = m * groups * slots <= 8 * MULTIPROCESSORS
    heads = 1 if single else slots  # of a block

    def head_rows_kernel(parts_ref, cos_ref, sin_ref, *refs):
        norm_refs, (o_ref, heads_smem) = refs[:-2], refs[-2:]
        row, group, first = (lax.axis_index(axis) for axis in ("row", "group", "head"))

        def rounded(x):
            return x.astype(jnp.bfloat16).astype(jnp.float32)

        def place(index):
            return pl.ds((group * slots + first + index) * h, h)

        def total_of(index):
            parts = (parts_ref[part, row, place(index)].astype(jnp.float32) for part in range(s))
            return rounded(functools.reduce(lambda a, b: a + b, parts))

        # All reads first, so that they are under way together.
        totals = [total_of(index) for index in range(heads)]
        cos, sin = cos_ref[row], sin_ref[row]
        weights = [ref[...].astype(jnp.float32) for ref in norm_refs]

        def keep(index):
            o_ref[row, place(index)] = totals[index].astype(jnp.bfloat16)

        def turn(some, key):
            """Norm and rotation of heads of this block; of them all but `key` are queries."""
            turned = []
            for index in some:
                x = totals[index]
                if norms is not None:
                    scale = lax.rsqrt(jnp.sum(x * x) / h + eps)
                    weight = weights[index == key]
                    if centred:
                        x = rounded(x * scale * (1.0 + weight))
                    else:
                        x = rounded(rounded(x * scale) * weight)
                turned.append(x)
                heads_smem[pl.ds(index * width + half, h)] = x
            plgpu.commit_smem()  # every thread reads what others wrote
            at = lax.broadcasted_iota(jnp.int32, (h,), 0)
            for index, x in zip(some, turned, strict=True):
                after = heads_smem[pl.ds(index * width + 2 * half, h)]
                before = heads_smem[pl.ds(index * width, h)]
                other = jnp.where(at < half, -after, jnp.where(at < 2 * half, before, 0.0))
                o_ref[row, place(index)] = (x * cos + other * sin).astype(jnp.bfloat16)

        if single:
            pl.when(first < slots - 2)(lambda: turn([0], None))
            pl.when(first == slots - 2)(lambda: turn([0], 0))
            pl.when(first == slots - 1)(lambda: keep(0))
        else:
            keep(slots - 1)
            turn(range(slots - 1), slots - 2)

    y = plgpu.kernel(
        head_rows_kernel,
        out_type=jax.ShapeDtypeStruct((m, columns), jnp.bfloat16),
        grid=(m, groups, slots // heads),
        grid_names=("row", "group", "head"),
        num_threads=1,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((heads * width,), jnp.float32),),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(parts_smc, cos, sin, *(norms or ()))
    return y.reshape(m, *shape)
