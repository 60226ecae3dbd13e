"""Appending accepted rows to the caches of all layers at once, in place."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.mosaic import COLUMN_VECTOR


def reference(
    caches_bksh: Sequence[tuple[jax.Array, jax.Array]],
    rows_bmch: Sequence[jax.Array],
    path_bp: jax.Array | None,
    length_b: jax.Array,
    count_b: jax.Array,
) -> list[tuple[jax.Array, jax.Array]]:
    """Row i of the path goes to slot length_b + i of every cache, for i < count_b.

    Rows past the count are sent past the end and dropped; `dynamic_update_slice` would clamp them
    onto committed rows instead.

    Args:
      caches_bksh: k and v of each layer, [b, k, s, h].
      rows_bmch: the rows of each layer, [b, m, k, g + 2, h]: queries, then a key, then a value.
      path_bp: indices of rows; None: 0, 1, ...
    """
    rows_of = rows_bmch[0].shape[1] if path_bp is None else path_bp.shape[1]
    index = jnp.arange(rows_of)
    batch = jnp.arange(length_b.shape[0])[:, None]

    def append(slots_bksh: jax.Array, rows_bmkh: jax.Array) -> jax.Array:
        if path_bp is not None:
            rows_bmkh = jnp.take_along_axis(rows_bmkh, path_bp[:, :, None, None], axis=1)
        past_end = slots_bksh.shape[2]
        slot = jnp.where(index < count_b[:, None], length_b[:, None] + index, past_end)
        return slots_bksh.at[batch, :, slot].set(rows_bmkh, mode="drop", unique_indices=False)

    return [
        (append(k, rows[..., -2, :]), append(v, rows[..., -1, :]))
        for (k, v), rows in zip(caches_bksh, rows_bmch, strict=True)
    ]


def unsupported_reason(h: int, dtype) -> str | None:
    """Why the kernel cannot append heads of h, or None."""
    if dtype != jnp.bfloat16:
        return f"{jnp.dtype(dtype).name}; the kernel takes bfloat16"
    return None if h in (64, 128, 256) else f"head size {h}; the kernel takes 64, 128 or 256"


def append(
    caches_bksh: Sequence[tuple[jax.Array, jax.Array]],
    rows_bmch: Sequence[jax.Array],
    path_bp: jax.Array | None,
    length_b: jax.Array,
    count_b: jax.Array,
    *,
    interpret=None,
) -> list[tuple[jax.Array, jax.Array]]:
    """The kernel; arguments as for the reference. A block moves one head of one row of all layers.

    Scatters of XLA take a launch per layer and array, each as long as this one kernel.
    """
    b, kv_heads, slots, h = caches_bksh[0][0].shape
    layers = len(caches_bksh)
    if path_bp is None:
        path_bp = jnp.broadcast_to(jnp.arange(rows_bmch[0].shape[1]), rows_bmch[0].shape[:2])
    refs = [jax.new_ref(x) for pair in caches_bksh for x in pair]
    rows = [x.reshape(*x.shape[:2], -1) for x in rows_bmch]
    columns = rows[0].shape[-1] // kv_heads

    def append_kernel(*refs):
        cache_refs, refs = refs[: 2 * layers], refs[2 * layers :]
        row_refs, (path_ref, length_ref, count_ref) = refs[:layers], refs[layers:]
        batch, place, head = (lax.axis_index(axis) for axis in ("batch", "place", "head"))
        slot = length_ref[batch] + place

        @pl.when((place < count_ref[batch]) & (slot < slots))
        def _():
            row = path_ref[batch, place]

            def load(ref, i):
                source = ref.at[batch, row, pl.ds((head + 1) * columns - (2 - i) * h, h)]
                if h < 128:  # fewer than threads
                    return plgpu.load(source, layout=COLUMN_VECTOR, optimized=False)
                return source[...]

            # All loads before all stores, so that their latencies overlap.
            values = [load(ref, i) for ref in row_refs for i in range(2)]
            for cache_ref, value in zip(cache_refs, values, strict=True):
                cache_ref[batch, head, slot] = value

    plgpu.kernel(
        append_kernel,
        out_type=(),
        grid=(b, path_bp.shape[1], kv_heads),
        grid_names=("batch", "place", "head"),
        num_threads=1,
        thread_name="wg",
        interpret=interpret,
    )(*refs, *rows, path_bp, length_b, count_b)
    done = [jax.freeze(ref) for ref in refs]
    return list(zip(done[::2], done[1::2], strict=True))
