"""What stands between two products, row by row: residual, norm, rotary embedding.

Both take the partial sums of matmul.py's `split_matmul`; rounding happens where the reference
rounds, to the dtype of x.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic
from kernels_pallas.mosaic import COLUMN_VECTOR, ROWS, WGMMA


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


def head_rows_unsupported(parts_smc: jax.Array, h: int, rotated: int, dtype) -> str | None:
    """Why `head_rows` cannot make heads of h from these partial sums, or None."""
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}; the kernel makes bfloat16"
    if h not in (64, 128, 256):
        return f"head size {h}; the kernel takes 64, 128 or 256"
    if rotated != h:
        return f"{rotated} of {h} dimensions are rotated; the kernel rotates all"
    width = parts_smc.shape[0] * parts_smc.dtype.itemsize + 6  # the tables and the result
    needed = ROWS * h * width
    if needed > mosaic.SHARED_BYTES:
        return f"{parts_smc.shape[0]} partial sums; {needed} bytes do not fit"
    return None


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
        y = functools.reduce(
            lambda a, b: a + b, (parts_ref[part, row].astype(jnp.float32) for part in range(s))
        )
        y = y.astype(jnp.bfloat16).astype(jnp.float32)
        x = (x_ref[row].astype(jnp.float32) + y).astype(jnp.bfloat16)
        o_ref[row] = x
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(wide * wide) / d + eps)
        if centred:
            weight = 1.0 + weight_ref[...].astype(jnp.float32)
            y_ref[row] = (wide * scale * weight).astype(jnp.bfloat16)
        else:
            y_ref[row] = (wide * scale).astype(jnp.bfloat16) * weight_ref[...]

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
    """The kernel; arguments as for the reference. A block has one head of 64 rows."""
    _, slots, h = shape
    count = parts_smc.shape[1]
    parts_smc, cos, sin = mosaic.pad_rows(parts_smc, 1), *map(mosaic.pad_rows, tables)
    s, m, columns = parts_smc.shape
    half = h // 2
    source = parts_smc.dtype

    def head_rows_kernel(parts_ref, cos_ref, sin_ref, *refs):
        norm_refs, refs = (refs[:2], refs[2:]) if norms is not None else ((), refs)
        o_ref, parts_smem, table_smem, o_smem, barrier = refs
        head = lax.axis_index("head")
        kind = lax.rem(head, slots)
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)
        halves = [pl.ds(head * h, half), pl.ds(head * h + half, half)]
        for part in range(s):
            for i, columns_of in enumerate(halves):
                plgpu.copy_gmem_to_smem(
                    parts_ref.at[part, rows, columns_of], parts_smem.at[part, i], barrier
                )
        for i, table in enumerate((cos_ref, sin_ref)):
            plgpu.copy_gmem_to_smem(table.at[rows], table_smem.at[i], barrier)
        plgpu.barrier_wait(barrier)

        def load(ref):
            return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)

        def rounded(x):
            return x.astype(jnp.bfloat16).astype(jnp.float32)

        raw = []
        for i in range(2):
            y = load(parts_smem.at[0, i])
            for part in range(1, s):
                y = y + load(parts_smem.at[part, i])
            raw.append(rounded(y))
        first, second = raw
        if norms is not None:
            mean = ((first * first).sum(axis=1) + (second * second).sum(axis=1)) / h
            scale = lax.broadcast_in_dim(lax.rsqrt(mean + eps), first.shape, [0])
            is_key = (kind == slots - 2).astype(jnp.float32)

            def weigh(x, i):
                q_weight, k_weight = (
                    plgpu.load(
                        ref.at[pl.ds(i * half, half)], layout=COLUMN_VECTOR, optimized=False
                    ).astype(jnp.float32)
                    for ref in norm_refs
                )
                weight = q_weight * (1.0 - is_key) + k_weight * is_key
                if centred:
                    return rounded(x * scale * lax.broadcast_in_dim(1.0 + weight, x.shape, [1]))
                return rounded(rounded(x * scale) * lax.broadcast_in_dim(weight, x.shape, [1]))

            first, second = weigh(first, 0), weigh(second, 1)
        cos, sin = load(table_smem.at[0]), load(table_smem.at[1])
        is_value = kind == slots - 1

        @pl.when(is_value)
        def _():
            for i in range(2):
                o_smem[i] = raw[i].astype(jnp.bfloat16)

        @pl.when(~is_value)
        def _():
            o_smem[0] = (first * cos - second * sin).astype(jnp.bfloat16)
            o_smem[1] = (second * cos + first * sin).astype(jnp.bfloat16)

        plgpu.commit_smem()
        for i, columns_of in enumerate(halves):
            plgpu.copy_smem_to_gmem(o_smem.at[i], o_ref.at[rows, columns_of])
        plgpu.wait_smem_to_gmem(0)

    f32 = mosaic.tiles(half, jnp.float32)
    y = plgpu.kernel(
        head_rows_kernel,
        out_type=jax.ShapeDtypeStruct((m, columns), jnp.bfloat16),
        grid=(columns // h, -(-m // ROWS)),
        grid_names=("head", "row"),
        num_threads=1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((s, 2, ROWS, half), source, transforms=mosaic.tiles(half, source)),
            plgpu.SMEM((2, ROWS, half), jnp.float32, transforms=f32),
            plgpu.SMEM((2, ROWS, half), jnp.bfloat16, transforms=mosaic.tiles(half, jnp.bfloat16)),
            plgpu.Barrier(num_arrivals=2 * s + 2),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(parts_smc, cos, sin, *(norms or ()))
    return y[:count].reshape(count, *shape)
