"""The sum of rows over the devices of a tensor-parallel mesh, at the latency of the link.

One shot: a block takes one row, adds up this device's partial sums, puts the result into a slot on
every other device and signals; once the other devices' rows are here, it adds them up. The order is
that of the ranks, so that every device holds the same bits. Plain peer pointers, no multicast.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.rows import total

MAX_ROWS = 512  # blocks wait for each other, so all must run at the same time


def reference(parts_smd: jax.Array, axis: str, dtype=jnp.bfloat16) -> jax.Array:
    """[m, d]: each device's sum of its parts, rounded to `dtype`, summed over the mesh axis.

    float32 sums of the rounded values, in the order of the ranks.
    """
    y_nmd = lax.all_gather(total(parts_smd, dtype).astype(jnp.float32), axis)
    y_md = functools.reduce(lambda a, b: a + b, [y_nmd[i] for i in range(y_nmd.shape[0])])
    return y_md.astype(dtype)


def unsupported_reason(m: int, d: int, dtype) -> str | None:
    """Why the kernel cannot sum [m, d], or None."""
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}; the kernel sums bfloat16"
    if m > MAX_ROWS:
        return f"{m} rows; the kernel takes up to {MAX_ROWS}"
    return f"rows of {d}; the kernel takes multiples of 256" if d % 256 else None


@functools.partial(jax.jit, static_argnames=("axis", "mesh_axes"))
def all_sum(parts_smd: jax.Array, *, axis: str, mesh_axes: tuple[str, ...]) -> jax.Array:
    """The kernel, inside a `jax.shard_map` over all of `mesh_axes`; see the reference.

    parts_smd: float32 or bfloat16 partial sums.
    """
    s, m, d = parts_smd.shape
    devices = lax.axis_size(axis)

    def all_sum_kernel(parts_ref, o_ref, slots_ref, row_smem):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        row, rank = lax.axis_index("row"), lax.axis_index(axis)
        mine = functools.reduce(
            lambda a, b: a + b, (parts_ref[part, row].astype(jnp.float32) for part in range(s))
        )
        row_smem[...] = mine.astype(jnp.bfloat16)
        plgpu.commit_smem()

        def device(peer):
            return {name: peer if name == axis else lax.axis_index(name) for name in mesh_axes}

        others = [lax.rem(rank + i, devices) for i in range(1, devices)]
        plgpu.copy_smem_to_gmem(row_smem, slots_ref.at[rank, row])
        for peer in others:
            slot = plgpu.remote_ref(slots_ref, device(peer)).at[rank, row]
            plgpu.copy_smem_to_gmem(row_smem, slot)
        plgpu.wait_smem_to_gmem(0)
        for peer in others:
            pl.semaphore_signal(arrived, device_id=device(peer))
        pl.semaphore_wait(arrived, value=m * (devices - 1), decrement=False)
        theirs = (slots_ref[source, row].astype(jnp.float32) for source in range(devices))
        y = functools.reduce(lambda a, b: a + b, theirs)
        o_ref[row] = y.astype(jnp.bfloat16)

    rows = jax.ShapeDtypeStruct((m, d), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((devices, m, d), jnp.bfloat16)
    y, _ = plgpu.kernel(
        all_sum_kernel,
        out_type=(rows, slots),
        grid=(m,),
        grid_names=("row",),
        num_threads=1,
        thread_name="wg",
        scratch_types=(plgpu.SMEM((d,), jnp.bfloat16),),
    )(parts_smd)
    return y
