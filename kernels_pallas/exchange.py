"""What the devices of a tensor-parallel mesh tell each other, at the latency of the link.

Two kernels: the sum of rows, with what follows it, residual and norm; and a gathering of a few
numbers. To XLA they are ordinary kernels: they stay in a CUDA graph, and nothing is prepared on the
host. One shot: a block takes one row, writes it into the inbox of every device of its group, its
own included, and reads its own inbox until nothing in it is empty any more. The order is that of
the ranks, also of sums: every device holds the same bits. Plain peer pointers, no multicast.

A row has two slots, used in turn. Every exchange waits for everybody, so a device is at most one
ahead of another: when it writes into a slot again, the exchange that used the slot before, and
emptied it, is over everywhere. Exchanges must therefore follow each other, as those of a round do.
"""

import ctypes
import functools
import itertools
import math
from collections.abc import Iterable
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

from kernels_pallas.rows import add_norm_unsupported, rms_norm, row_sum_and_norm, total

MAX_ROWS = 512
THREADS = 128
# Bits that are never sent, those of a NaN or of two of bfloat16: others of a NaN, or two, are.
EMPTY, NANS = -1, 0x7FC07FC0
PATIENCE = 2**25  # looks into the inbox, half a minute or more; then the other device is lost
OWN, RANK, WIDTH, FIRST = 0, 2, 3, 4  # what is where in `Inboxes.addresses`
GATHERED = MAX_ROWS * THREADS  # int32 words of a device that can be gathered at once


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


def _words(devices: int, width: int) -> int:
    """int32 words of an inbox: how many exchanges each thread of a row has done, then the slots.

    [MAX_ROWS, THREADS], and [2, devices, MAX_ROWS, width], by the rank that a row comes from.
    """
    return MAX_ROWS * (THREADS + 2 * devices * width)


def unreachable_reason(devices: Iterable[Any]) -> str | None:
    """Why these GPUs of this process cannot write into each other's memory, or None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no CUDA driver"
    for device, peer in itertools.permutations(devices, 2):
        reaches = ctypes.c_int(0)
        pair = (device.local_hardware_id, peer.local_hardware_id)
        error = driver.cuDeviceCanAccessPeer(ctypes.byref(reaches), *pair)
        if error or not reaches.value:
            return f"GPU {pair[0]} cannot write into the memory of GPU {pair[1]}"
    return None


class Inboxes(NamedTuple):
    """Memory of every device of a mesh into which the others of its group write, and where it is.

    memory: keep it as long as programs run that got the addresses. addresses: int32
    [devices, 4 + 2 * group], split over all axes of the mesh: the device's own inbox (low word,
    high word), its rank in the group, the words of a row, and the inboxes of the group in the order
    of the ranks.
    """

    memory: list[jax.Array]
    addresses: jax.Array


def address_words(group: int) -> int:
    """int32 words a device of `Inboxes.addresses`."""
    return FIRST + 2 * group


def open_inboxes(mesh: Mesh, axis: str, d: int) -> Inboxes:
    """Inboxes for rows of d bfloat16, summed over `axis`, the last one of the mesh.

    All devices belong to this process; see `unreachable_reason`. XLA opens their memory to each
    other.
    """
    groups = mesh.devices.reshape(-1, mesh.shape[axis])
    # A row of what is gathered has THREADS words, however small the model is.
    width = max(d // 2, THREADS)
    empty = np.full(_words(groups.shape[1], width), EMPTY, np.int32)
    empty[: MAX_ROWS * THREADS] = 0
    memory, table = [], []
    for group in groups:
        inboxes = jax.block_until_ready([jax.device_put(empty, device) for device in group])
        halves = [divmod(inbox.unsafe_buffer_pointer(), 2**32)[::-1] for inbox in inboxes]
        everyone = [half for each in halves for half in each]
        table += [[*own, rank, width, *everyone] for rank, own in enumerate(halves)]
        memory += inboxes
    words = np.array(table, np.uint32).astype(np.int32)
    where = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return Inboxes(memory, jax.device_put(words, where))


def _wide(words: int) -> str:
    return "" if words == 1 else f".v{words}"


def _operands(numbers: Iterable[int]) -> str:
    names = [f"${number}" for number in numbers]
    return names[0] if len(names) == 1 else "{" + ", ".join(names) + "}"


def _receive(address: Any, vectors: int, words: int) -> list[Any]:
    """Waits until none of a thread's vectors is empty any more and empties them; int32 words."""
    i32 = ir.IntegerType.get_signless(32)
    count = vectors * words
    places = [f"[${count} + {4 * words * THREADS * each}]" for each in range(vectors)]
    lines = ["{", ".reg .pred p;", ".reg .b32 n;", "mov.b32 n, 0;", "again:"]
    lines += ["add.u32 n, n, 1;", f"setp.gt.u32 p, n, {PATIENCE};", "@p trap;"]
    for each, place in enumerate(places):
        into = _operands(range(each * words, (each + 1) * words))
        lines.append(f"ld.relaxed.sys.global{_wide(words)}.b32 {into}, {place};")
    lines.append(f"setp.eq.b32 p, $0, {EMPTY};")
    lines += [f"setp.eq.or.b32 p, ${word}, {EMPTY}, p;" for word in range(1, count)]
    lines.append("@p bra again;")
    lines += ["mov.b32 n, -1;"]
    nothing = "n" if words == 1 else "{" + ", ".join(["n"] * words) + "}"
    lines += [f"st.relaxed.sys.global{_wide(words)}.b32 {place}, {nothing};" for place in places]
    lines.append("}")
    types = [i32] * count
    return list(
        mgpu.utils.inline_ptx("\n".join(lines), address, result_types=types, has_side_effects=True)
    )


def _group(addresses: jax.Array) -> int:
    return (addresses.shape[0] - FIRST) // 2


def _exchange(devices: int, size: int, dtype):
    """(a row [size] of this device, addresses) -> the rows of all devices, in rank order."""
    item = jnp.dtype(dtype).itemsize
    # What a thread sends and takes at a time: 16 bytes, or as many as the row has for it.
    numbers = next(n for n in (16 // item, 8 // item, 4 // item) if size % (n * THREADS) == 0)
    words, vectors = numbers * item // 4, size // (numbers * THREADS)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=numbers)
    row_type = plgpu.ShapeDtypeStruct((size,), dtype, layout)

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

        own, rank, width = inbox_at(OWN), wide(word_at(RANK)), wide(word_at(WIDTH))
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
            at = arith.addi(arith.muli(at, width), arith.muli(thread, number(words)))
            at = arith.addi(at, number(MAX_ROWS * THREADS))
            return arith.addi(inbox, arith.muli(at, number(4)))

        packed = ir.VectorType.get((words,), i32)
        sent = []
        for register in mine.registers.flat:
            parts = vector.bitcast(packed, register)
            for index in range(words):
                part = vector.extract(parts, dynamic_position=[], static_position=[index])
                is_empty = arith.cmpi(arith.CmpIPredicate.eq, part, mgpu.c(EMPTY, i32))
                sent.append(arith.select(is_empty, mgpu.c(NANS, i32), part))
        operands = _operands(range(1, words + 1))
        for device in range(devices):
            target = slot(inbox_at(FIRST + 2 * device), rank)
            for each in range(vectors):
                mgpu.utils.inline_ptx(
                    f"st.relaxed.sys.global{_wide(words)}.b32 [$0], {operands};",
                    arith.addi(target, number(each * 4 * words * THREADS)),
                    *sent[each * words : (each + 1) * words],
                    has_side_effects=True,
                )
        rows = []
        for source in range(devices):
            got = _receive(slot(own, number(source)), vectors, words)
            registers = np.empty((vectors,), object)
            for each in range(vectors):
                parts = vector.from_elements(packed, got[each * words : (each + 1) * words])
                registers[each] = vector.bitcast(mine.registers.flat[each].type, parts)
            rows.append(
                mgpu.FragmentedArray(
                    _registers=registers, _layout=mine.layout, _is_signed=mine.is_signed
                )
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
    exchange = _exchange(_group(addresses), d, jnp.bfloat16)

    def sum_add_norm_kernel(x_ref, parts_ref, weight_ref, addresses_ref, o_ref, y_ref):
        row = lax.axis_index("row")
        mine = functools.reduce(
            lambda a, b: a + b, (parts_ref[part, row].astype(jnp.float32) for part in range(s))
        )
        # All reads before the wait.
        x, weight = x_ref[row], weight_ref[...]
        rows = exchange(mine.astype(jnp.bfloat16), addresses_ref)
        y = functools.reduce(lambda a, b: a + b, (each.astype(jnp.float32) for each in rows))
        o_ref[row], y_ref[row] = row_sum_and_norm(x, y, weight, eps, centred)

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


@jax.jit
def all_gather(x: jax.Array, addresses: jax.Array) -> jax.Array:
    """[devices, *x.shape], the x of every device of the group, in the order of the ranks.

    Args:
      x: int32, at most GATHERED numbers and none of them EMPTY, which arrives as NANS.
      addresses: as for `add_norm`.
    """
    devices, size = _group(addresses), math.prod(x.shape)
    rows = jnp.pad(x.reshape(-1), (0, -size % THREADS)).reshape(-1, THREADS)
    m = rows.shape[0]
    exchange = _exchange(devices, THREADS, jnp.int32)

    def gather_kernel(x_ref, addresses_ref, o_ref):
        row = lax.axis_index("row")
        for device, each in enumerate(exchange(x_ref[row], addresses_ref)):
            o_ref[device, row] = each

    y = plgpu.kernel(
        gather_kernel,
        out_type=jax.ShapeDtypeStruct((devices, m, THREADS), jnp.int32),
        grid=(m,),
        grid_names=("row",),
        num_threads=1,
        thread_name="wg",
    )(rows, addresses)
    return y.reshape(devices, -1)[:, :size].reshape(devices, *x.shape)
