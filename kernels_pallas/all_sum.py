"""The sums of rows over the devices of a tensor-parallel mesh, at the latency of the link.

One shot, without flags: a block takes one row, adds up this device's partial sums, writes the
result into a slot in the inbox of every other device, and reads its own inbox until nothing in the
slot is empty any more. Every sum of a program has slots of its own, so that nobody has to say when
a slot may be written again. The order of the sum is that of the ranks: every device holds the same
bits. Plain peer pointers, no multicast.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.rows import total

EMPTY = -1  # the bits of a bfloat16 that is never sent: a NaN, for which another NaN is
NAN = 0x7FC0
WIDTH = 256  # numbers that a tensor copy takes along one dimension


class Inbox(NamedTuple):
    """Where the other devices put their rows.

    slots: int16 [sums, devices, m, d / WIDTH, WIDTH]. opened: int32 [128], there once all
    devices have emptied theirs; whoever writes into a slot has to depend on it.
    """

    slots: jax.Array
    opened: jax.Array


def reference(parts_smd: jax.Array, axis: str, dtype=jnp.bfloat16) -> jax.Array:
    """[m, d]: each device's sum of its parts, rounded to `dtype`, summed over the mesh axis.

    float32 sums of the rounded values, in the order of the ranks.
    """
    y_nmd = lax.all_gather(total(parts_smd, dtype).astype(jnp.float32), axis)
    y_md = functools.reduce(lambda a, b: a + b, [y_nmd[i] for i in range(y_nmd.shape[0])])
    return y_md.astype(dtype)


def unsupported_reason(d: int, dtype) -> str | None:
    """Why the kernel cannot sum rows of d, or None."""
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}; the kernel sums bfloat16"
    return f"rows of {d}; the kernel takes multiples of {WIDTH}" if d % WIDTH else None


def _device(peer, axis: str, mesh_axes: tuple[str, ...]):
    return {name: peer if name == axis else lax.axis_index(name) for name in mesh_axes}


def open_inbox(sums: int, m: int, d: int, *, axis: str, mesh_axes: tuple[str, ...]) -> Inbox:
    """An empty inbox for `sums` sums of [m, d], once a program.

    Inside a `jax.shard_map` over all of `mesh_axes`. The runtime lets all devices meet before a
    kernel that reads a peer's memory, which is all that this kernel does.
    """
    devices = lax.axis_size(axis)
    slots = jnp.full((sums, devices, m, d // WIDTH, WIDTH), EMPTY, jnp.int16)

    def open_kernel(slots_ref, o_ref):
        peer = lax.rem(lax.axis_index(axis) + 1, devices)
        theirs = plgpu.remote_ref(slots_ref, _device(peer, axis, mesh_axes))
        o_ref[...] = theirs[0, 0, 0, 0, pl.ds(0, 128)].astype(jnp.int32)

    opened = plgpu.kernel(
        open_kernel, out_type=jax.ShapeDtypeStruct((128,), jnp.int32), num_threads=1,
        thread_name="wg",
    )(slots)  # fmt: skip
    return Inbox(slots, opened)


@functools.partial(jax.jit, static_argnames=("axis", "mesh_axes"))
def all_sum(
    parts_smd: jax.Array, inbox: Inbox, number: jax.Array, *, axis: str, mesh_axes: tuple[str, ...]
) -> jax.Array:
    """The kernel, inside a `jax.shard_map` over all of `mesh_axes`; see the reference.

    Args:
      parts_smd: float32 or bfloat16 partial sums.
      inbox: from `open_inbox` of the same program.
      number: int32 [1], which of the inbox's sums this is; each must be used once.
    """
    s, m, d = parts_smd.shape
    devices = lax.axis_size(axis)
    columns = (d // WIDTH, WIDTH)

    def all_sum_kernel(parts_ref, slots_ref, _, number_ref, o_ref, rows_smem, landed):
        row, rank, which = lax.axis_index("row"), lax.axis_index(axis), number_ref[0]
        others = [lax.rem(rank + step, devices) for step in range(1, devices)]
        mine = functools.reduce(
            lambda a, b: a + b, (parts_ref[part, row].astype(jnp.float32) for part in range(s))
        )
        bits = lax.bitcast_convert_type(mine.astype(jnp.bfloat16), jnp.int16)
        rows_smem[rank] = jnp.where(bits == EMPTY, jnp.int16(NAN), bits)
        plgpu.commit_smem()
        for peer in others:
            theirs = plgpu.remote_ref(slots_ref, _device(peer, axis, mesh_axes))
            plgpu.copy_smem_to_gmem(rows_smem.at[rank], theirs.at[which, rank, row])

        def look(source, _):
            slot = slots_ref.at[which, source, row]
            plgpu.copy_gmem_to_smem(slot, rows_smem.at[source], landed)
            plgpu.barrier_wait(landed)
            return jnp.max((rows_smem[source] == EMPTY).astype(jnp.int32))

        for peer in others:
            again = functools.partial(look, peer)
            lax.while_loop(lambda empty: empty > 0, again, jnp.int32(1))
        y = functools.reduce(
            lambda a, b: a + b,
            (
                lax.bitcast_convert_type(rows_smem[source], jnp.bfloat16).astype(jnp.float32)
                for source in range(devices)
            ),
        )
        o_ref[row] = y.astype(jnp.bfloat16)
        plgpu.wait_smem_to_gmem(0)

    y = plgpu.kernel(
        all_sum_kernel,
        out_type=jax.ShapeDtypeStruct((m, *columns), jnp.bfloat16),
        grid=(m,),
        grid_names=("row",),
        num_threads=1,
        thread_name="wg",
        scratch_types=(
            plgpu.SMEM((devices, *columns), jnp.int16),
            plgpu.Barrier(),
        ),
        # The inbox is what makes it safe.
        compiler_params=plgpu.CompilerParams(skip_device_barrier=True),
    )(parts_smd.reshape(s, m, *columns), inbox.slots, inbox.opened, number)
    return y.reshape(m, d)
