"""`bench.py all-sum`: what a tensor-parallel sum of a few rows costs, inside one program.

A layer has two of them, after attention and after the MLP, and they are a matter of latency.
"""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.table import Table

from ddtree_jax.commands import shell
from ddtree_jax.commands.sweep import number_list
from ddtree_jax.errors import InputError
from ddtree_jax.sharding import DATA, MODEL, local_mesh
from kernels_pallas import exchange
from kernels_pallas.dispatch import REFERENCE, Kernels, unavailable_reason

SUMS = 72  # in a row: those of 36 layers
EPS = 1e-6
LAPS, PROGRAMS = 5, 10


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "all-sum",
        help="microseconds of a sum over the devices of a model, by XLA and by the kernel",
    )
    add = parser.add_argument
    add("--tp", type=int, default=2, metavar="N", help="devices that share the models")
    add("--rows", default="1,16,64,128", help="tree nodes, as in 16,64")
    add("--size", type=int, default=4096, metavar="D", help="numbers of a row (bfloat16)")
    add("--json", metavar="FILE|-")
    add("--debug", action="store_true")


# (residual, parts, norm weight, addresses of the inboxes) -> (sum with the residual, normed).
Way = Callable[..., tuple[jax.Array, jax.Array]]


def alone(kernels: Kernels, x, parts, weight, peers):
    """No sum over the devices, only what comes with it."""
    return kernels.add_norm(x, parts, weight, EPS)


def by_reference(kernels: Kernels, x, parts, weight, peers):
    return exchange.reference(x, parts, weight, EPS, MODEL)


def by_xla(kernels: Kernels, x, parts, weight, peers):
    return kernels.add_norm(x, parts, weight, EPS, axis=MODEL)


def by_kernel(kernels: Kernels, x, parts, weight, peers):
    return kernels.add_norm(x, parts, weight, EPS, axis=MODEL, peers=peers[0])


WAYS = {"XLA": by_xla, "kernel": by_kernel}


def program(way: Way, mesh: Mesh, sums: int, kernels: Kernels = REFERENCE) -> Callable:
    """Sums in a row, each of what the one before gave and of what the devices began with.

    (x [devices * rows, size], addresses) -> the residual that each device holds, likewise.
    """

    def run(x: jax.Array, addresses: jax.Array | None) -> jax.Array:
        weight = jnp.ones(x.shape[-1:], x.dtype)
        residual, normed = jnp.zeros_like(x), x
        for number in range(sums):
            parts = (normed if number == 0 else normed + x)[None]
            residual, normed = way(kernels, residual, parts, weight, addresses)
        return residual

    spec = P(MODEL)
    return jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=(spec, P((DATA, MODEL))), out_specs=spec, check_vma=False
        )
    )


def microseconds(program: Callable[[], jax.Array]) -> float:
    """Of one sum, many programs in flight."""
    program().block_until_ready()
    laps = []
    for _ in range(LAPS):
        started = time.perf_counter()
        [program() for _ in range(PROGRAMS)][-1].block_until_ready()
        laps.append((time.perf_counter() - started) / PROGRAMS)
    return 1e6 * float(np.median(laps)) / SUMS


def off(first: jax.Array, last: jax.Array, x: jax.Array, shards: int) -> dict[str, Any]:
    """Whether the devices hold the same after one sum of x and after many, and the error of one."""
    one, many = (
        np.asarray(sums.astype(jnp.float32), np.float64).reshape(shards, -1)
        for sums in (first, last)
    )
    exact = np.asarray(x.astype(jnp.float32), np.float64).reshape(shards, -1).sum(axis=0)
    return {
        "same": bool((one == one[0]).all() and (many == many[0]).all()),
        "error": float(np.abs(one[0] - exact).max()),
    }


def run(args) -> int:
    shell.check_writable(args.json)
    if not 1 <= args.size <= 2**20:
        raise InputError(f"--size is {args.size}; expected 1 to 2^20 numbers")
    counts = number_list("--rows", args.rows)
    if args.tp < 2:
        raise InputError(f"--tp is {args.tp}; expected at least 2 devices to sum over")
    mesh = local_mesh(1, args.tp)
    assert mesh is not None
    unavailable = unavailable_reason()
    reason = (
        unavailable
        or exchange.unsupported_reason(max(counts), args.size, jnp.bfloat16)
        or exchange.unreachable_reason(mesh.devices.flatten())
    )
    kernels = Kernels(mosaic=unavailable is None)
    inboxes = None if reason else exchange.open_inboxes(mesh, MODEL, args.size)
    addresses = inboxes.addresses if inboxes else None
    rows: list[dict[str, Any]] = []
    with shell.progress("Sums") as update:
        for count, (name, way) in itertools.product(counts, WAYS.items()):
            if way is by_kernel and reason:
                continue
            update(f"{name}, {count} rows")
            x = jax.random.normal(jax.random.key(0), (args.tp * count, args.size), jnp.bfloat16)
            x = jax.device_put(x, jax.NamedSharding(mesh, P(MODEL)))

            def result(way: Way, sums: int, x=x) -> Callable[[], jax.Array]:
                return functools.partial(program(way, mesh, sums, kernels), x, addresses)

            norms = microseconds(result(alone, SUMS))
            whole = microseconds(result(way, SUMS))
            rows.append(
                {
                    "way": name,
                    "rows": count,
                    "size": args.size,
                    "us": whole - norms,
                    "us_with_norm": whole,
                    **off(result(way, 1)(), result(way, SUMS)(), x, args.tp),
                }
            )
    device = jax.devices()[0].device_kind
    table = Table(
        title=f"A sum of rows x {args.size} bfloat16 over {args.tp} x {device}, among {SUMS} in a "
        "row"
    )
    for column in ("by", "rows", "us", "with residual and norm", "same on all", "error"):
        table.add_column(column, justify="left" if column == "by" else "right")
    for row in rows:
        same = "yes" if row["same"] else "NO"
        times = (f"{row[key]:.1f}" for key in ("us", "us_with_norm"))
        table.add_row(row["way"], str(row["rows"]), *times, same, f"{row['error']:.2g}")
    if args.json != "-":
        shell.console().print(table)
        if reason:
            shell.console().print(f"Without the kernel: {reason}.")
    if args.json:
        shell.write_json(args.json, {"schema": 1, "device": device, "tp": args.tp, "rows": rows})
    return shell.OK if all(row["same"] for row in rows) else shell.FAILED
