"""The sums of rows over the devices of a tensor-parallel mesh, at the latency of the link.

The sum comes with what follows it, residual and norm, and is an ordinary kernel for XLA: it stays
in a CUDA graph and nothing is prepared on the host. One shot: a block takes one row, adds up this
device's partial sums, writes the result into the inbox of every device of its group, its own
included, and reads its own inbox until nothing in it is empty any more. The order of the sum is
that of the ranks: every device holds the same bits. Plain peer pointers, no multicast.

A row has two slots, used in turn. Every sum waits for everybody, so a device is at most one sum
ahead of another: when it writes into a slot again, the sum that used the slot before, and emptied
it, is over everywhere. Sums must therefore follow each other, as those of a model's layers do.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, vector

from kernels_pallas.rows import add_norm_unsupported, rms_norm, total

MAX_ROWS = 512
THREADS = 128
# Two bfloat16 that are never sent together: NaNs, for which two others are.
EMPTY, NANS = -1, 0x7FC07FC0
PATIENCE = 2**25  # looks into the inbox, half a minute or more; then the other device is lost
OWN, RANK, FIRST = 0, 2, 3  # what is where in `Inboxes.addresses`, see `_words`


def reference(
    x_md: jax.Array,
    parts_smd: jax.Array,
    weight_d: jax.Array,
    eps: float,
    axis: str,
    *,
    centred: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """x + the sum over the mesh axis of each device's rounded sum of its parts, and its RMS norm.

    float32 sums of the rounded values, in the order of the ranks.
    """
    y_nmd = lax.all_gather(total(parts_smd, x_md.dtype).astype(jnp.float32), axis)
    y_md = functools.reduce(lambda a, b: a + b, [y_nmd[i] for i in range(y_nmd.shape[0])])
    x_md = x_md + y_md.astype(x_md.dtype)
    return x_md, rms_norm(x_md, weight_d, eps, centred)


def unsupported_reason(m: int, d: int, dtype) -> str | None:
    """Why the kernel cannot sum m rows of d, or None."""
    if m > MAX_ROWS:
        return f"{m} rows; the kernel takes up to {MAX_ROWS}"
    if reason := add_norm_unsupported(d, dtype):
        return reason
    step = 4 * THREADS
    return f"rows of {d}; the kernel takes multiples of {step}" if d % step else None


def _vector(d: int) -> int:
    """bfloat16 numbers that a thread sends and takes at a time."""
    return 8 if d % (8 * THREADS) == 0 else 4


def _words(devices: int, d: int) -> int:
    """int32 words of an inbox: how many sums each thread of a row has done, then the slots.

    [MAX_ROWS, THREADS], and [2, devices, MAX_ROWS, d / 2], by the rank that a row comes from.
    """
    return MAX_ROWS * (THREADS + devices * d)


class Inboxes(NamedTuple):
    """Memory of every device of a mesh into which the others of its group write, and where it is.

    memory: keep it as long as programs run that got the addresses. addresses: int32
    [devices, 3 + 2 * group], split over all axes of the mesh: the device's own inbox (low word,
    high word), its rank in the group, and the inboxes of the group in the order of the ranks.
    """

    memory: list[jax.Array]
    addresses: jax.Array


def address_words(group: int) -> int:
    """int32 words a device of `Inboxes.addresses`."""
    return FIRST + 2 * group


def open_inboxes(mesh: Mesh, axis: str, d: int) -> Inboxes:
    """Inboxes for rows of d, summed over `axis`, the last one of the mesh.

    All devices must belong to this process and reach each other's memory, which XLA sees to where
    they can.
    """
    groups = mesh.devices.reshape(-1, mesh.shape[axis])
    empty = np.full(_words(groups.shape[1], d), EMPTY, np.int32)
    empty[: MAX_ROWS * THREADS] = 0
    memory, table = [], []
    for group in groups:
        inboxes = jax.block_until_ready([jax.device_put(empty, device) for device in group])
        halves = [divmod(inbox.unsafe_buffer_pointer(), 2**32)[::-1] for inbox in inboxes]
        everyone = [half for each in halves for half in each]
        table += [[*own, rank, *everyone] for rank, own in enumerate(halves)]
        memory += inboxes
    words = np.array(table, np.uint32).astype(np.int32)
    where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return Inboxes(memory, jax.device_put(words, where))


def _receive(address: Any, vectors: int, words: int) -> list[Any]:
    """Waits until none of a thread's vectors is empty any more and empties them; int32 words."""
    i32 = ir.IntegerType.get_signless(32)
    step = 4 * words * THREADS
    count = vectors * words
    lines = ["{", ".reg .pred p;", ".reg .b32 n;", "mov.b32 n, 0;", "again:"]
    lines += ["add.u32 n, n, 1;", f"setp.gt.u32 p, n, {PATIENCE};", "@p trap;"]
    for each in range(vectors):
        into = ", ".join(f"${each * words + word}" for word in range(words))
        at = f"[${count} + {each * step}]"
        lines.append(f"ld.relaxed.sys.global.v{words}.b32 {{{into}}}, {at};")
    lines.append(f"setp.eq.b32 p, $0, {EMPTY};")
    lines += [f"setp.eq.or.b32 p, ${word}, {EMPTY}, p;" for word in range(1, count)]
    lines.append("@p bra again;")
    nothing = ", ".join([str(EMPTY)] * words)
    for each in range(vectors):
        at = f"[${count} + {each * step}]"
        lines.append(f"st.relaxed.sys.global.v{words}.b32 {at}, {{{nothing}}};")
    lines.append("}")
    return list(
        mgpu.utils.inline_ptx(
            "\n".join(lines), address, result_types=[i32] * count, has_side_effects=True
        )
    )


def _exchange(devices: int, d: int):
    """(a row of this device, addresses) -> the rows of all devices, in the order of the ranks."""
    size = _vector(d)
    words, vectors = size // 2, d // (size * THREADS)
    layout = plgpu.Layout.WG_STRIDED((d,), vec_size=size)
    row_type = plgpu.ShapeDtypeStruct((d,), jnp.bfloat16, layout)

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()), return_type=[row_type for _ in range(devices)]
    )
    def exchange(_, mine, addresses):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))

        def number(value):
            return mgpu.c(value, i64)

        def wide(x):
            return arith.extui(i64, x)

        def word_at(index):
            return memref.load(addresses, [mgpu.c(index, ir.IndexType.get())])

        def inbox_at(index):
            high = arith.shli(wide(word_at(index + 1)), number(32))
            return arith.ori(wide(word_at(index)), high)

        own, rank = inbox_at(OWN), wide(word_at(RANK))
        row = arith.index_cast(i64, gpu.block_id(gpu.Dimension.x))
        thread = wide(mgpu.utils.thread_idx())
        line = arith.addi(arith.muli(row, number(THREADS)), thread)
        counter = arith.addi(own, arith.muli(line, number(4)))
        done = mgpu.utils.inline_ptx(
            "ld.relaxed.gpu.global.b32 $0, [$1];", counter, result_types=i32, has_side_effects=True
        )

        def slot(inbox, source):
            """Where a thread's first vector of a row from `source` is."""
            parity = wide(arith.andi(done, mgpu.c(1, i32)))
            at = arith.addi(arith.muli(parity, number(devices)), source)
            at = arith.addi(arith.muli(at, number(MAX_ROWS)), row)
            offset = arith.addi(arith.muli(at, number(2 * d)), arith.muli(thread, number(2 * size)))
            return arith.addi(inbox, arith.addi(offset, number(4 * MAX_ROWS * THREADS)))

        packed = ir.VectorType.get((words,), i32)
        sent = []
        for register in mine.registers.flat:
            pairs = vector.bitcast(packed, register)
            for index in range(words):
                pair = vector.extract(pairs, dynamic_position=[], static_position=[index])
                is_empty = arith.cmpi(arith.CmpIPredicate.eq, pair, mgpu.c(EMPTY, i32))
                sent.append(arith.select(is_empty, mgpu.c(NANS, i32), pair))
        operands = ", ".join(f"${1 + word}" for word in range(words))
        for device in range(devices):
            target = slot(inbox_at(FIRST + 2 * device), rank)
            for each in range(vectors):
                mgpu.utils.inline_ptx(
                    f"st.relaxed.sys.global.v{words}.b32 [$0], {{{operands}}};",
                    arith.addi(target, number(each * 2 * size * THREADS)),
                    *sent[each * words : (each + 1) * words],
                    has_side_effects=True,
                )
        rows = []
        for source in range(devices):
            got = _receive(slot(own, number(source)), vectors, words)
            registers = np.empty((vectors,), object)
            for each in range(vectors):
                pairs = vector.from_elements(packed, got[each * words : (each + 1) * words])
                registers[each] = vector.bitcast(mine.registers.flat[each].type, pairs)
            rows.append(
                mgpu.FragmentedArray(_registers=registers, _layout=mine.layout, _is_signed=None)
            )
        mgpu.utils.inline_ptx(
            "st.relaxed.gpu.global.b32 [$0], $1;",
            counter,
            arith.addi(done, mgpu.c(1, i32)),
            has_side_effects=True,
        )
        return rows

    return exchange


@functools.partial(jax.jit, static_argnames=("eps", "centred"))
def add_norm(
    x_md: jax.Array,
    parts_smd: jax.Array,
    weight_d: jax.Array,
    addresses: jax.Array,
    eps: float,
    *,
    centred: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The kernel, inside a `jax.shard_map` over the whole mesh; otherwise as the reference.

    Args:
      addresses: this device's row of `Inboxes.addresses`, int32 [words].

    Sums over the same inboxes must depend on each other, so that they run one after another.
    """
    s, m, d = parts_smd.shape
    exchange = _exchange((addresses.shape[0] - FIRST) // 2, d)

    def sum_add_norm_kernel(x_ref, parts_ref, weight_ref, addresses_ref, o_ref, y_ref):
        row = lax.axis_index("row")
        mine = functools.reduce(
            lambda a, b: a + b, (parts_ref[part, row].astype(jnp.float32) for part in range(s))
        )
        rows = exchange(mine.astype(jnp.bfloat16), addresses_ref)
        y = functools.reduce(lambda a, b: a + b, (each.astype(jnp.float32) for each in rows))
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
        sum_add_norm_kernel,
        out_type=(row, row),
        grid=(m,),
        grid_names=("row",),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x_md, parts_smd, weight_d, addresses)
