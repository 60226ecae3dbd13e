"""What the Mosaic GPU kernels share.

Hopper's wgmma multiplies 64 rows at a time. Tensor copies (TMA) move boxes of rows and columns;
what lies outside an array reads as zero and is not written, so that arrays need no padding to 64
rows. But to read it takes some 2 ns a row (H200), more than to read what is inside: where the rest
of a buffer may be anything, a box should end with its array. Only copies of boxes in swizzled tiles
of 8 rows need 8 rows, or fewer, or a multiple.

Kernels are functions under `jax.jit`, so that a program of many layers traces and lowers each once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

ROWS = 64  # the m of wgmma
WARPS = 4  # of a warpgroup
MULTIPROCESSORS = 132  # of an H200
SHARED_BYTES = 225 * 1024  # for buffers, of the 227 KiB a block may have
# A thread's, where two warpgroups compute and one copies: each begins with 168, which is what three
# can have, and waits for what it asks for.
COMPUTING_REGISTERS = 232
COPYING_REGISTERS = 40
WGMMA = plgpu.Layout.WGMMA
ROW_VECTOR = plgpu.Layout.WGMMA.reduce(1)  # one value per row of a [64, n] array
COLUMN_VECTOR = plgpu.Layout.WGMMA.reduce(0)
# Of kernels that use `copy_streamed`.
STREAMING = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
TENSOR_COPY = "nvvm.cp.async.bulk.tensor.shared.cluster.global"
EVICT_FIRST = 0x12F0000000000000  # what PTX's createpolicy gives for L2::evict_first


def tiles(columns: int, dtype) -> tuple[Any, ...]:
    """Shared-memory layout of [rows, columns] for TMA and wgmma."""
    width = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * width * 8)
    return (plgpu.TilingTransform((8, swizzle // width)), plgpu.SwizzleTransform(swizzle))


def row_of_warp(columns: int):
    """Layout of [4, columns] where each warp has a row: sums along it need no other warp.

    columns: a multiple of 32.
    """
    vector = next(v for v in (4, 2, 1) if columns % (32 * v) == 0)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, 32 * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def pad_rows(x: jax.Array, axis: int = 0) -> jax.Array:
    """`x` with as many rows as a tensor copy takes: up to 8, or a multiple of 8."""
    rows = x.shape[axis]
    if rows <= 8 or rows % 8 == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -rows % 8)
    return jnp.pad(x, widths)


def copy_streamed(source, target, barrier, *, interpret) -> None:
    """`plgpu.copy_gmem_to_smem` of what is read once, such as weights: L2 drops it first.

    Otherwise a layer's weights, 386 MB of an 8B target, drive out of the 50 MB of L2 what its
    kernels hand on to each other, some 12 MB with 64 nodes and 24 with 128, which then is written
    to memory though nobody reads it there. On an H200 this saves 1.7 and 1.5 % of a round of 12
    layers.

    Only in kernels with STREAMING as compiler parameters.
    """
    plgpu.copy_gmem_to_smem(source, target, barrier)
    if not interpret:
        _evict_first()


@plgpu.inline_mgpu()
def _evict_first(_) -> None:
    """Gives the copy just written a hint that Pallas has no argument for."""
    written = list(ir.InsertionPoint.current.block.operations)
    if not written or written[-1].operation.name != TENSOR_COPY:
        raise RuntimeError("no tensor copy just before; expected a kernel with STREAMING")
    copy: Any = written[-1].opview
    i64 = ir.IntegerType.get_signless(64)
    hint = arith.constant(i64, EVICT_FIRST)  # type: ignore[call-arg, arg-type]
    type(copy)(
        dstMem=copy.dstMem,
        tmaDescriptor=copy.tmaDescriptor,
        coordinates=copy.coordinates,
        mbar=copy.mbar,
        im2colOffsets=copy.im2colOffsets,
        multicastMask=copy.multicastMask,
        l2CacheHint=hint,
        mode=copy.mode,
        isCTAOnly=copy.isCTAOnly,
        group=copy.group,
        predicate=copy.predicate,
    )
    copy.operation.erase()
