"""`bench.py all-sum`: what a tensor-parallel sum of a few rows costs, inside one program.

A layer has two of them, after attention and after the MLP, and they are a matter of latency.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.table import Table

from ddtree_jax.commands import shell
from ddtree_jax.commands.sweep import number_list
from ddtree_jax.errors import InputError
from ddtree_jax.sharding import DATA, MODEL, local_mesh
from kernels_pallas import all_sum
from kernels_pallas.dispatch import unavailable_reason

SUMS = 72  # in a row: those of 36 layers
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


class Way(NamedTuple):
    """A way to sum: what a program begins with, and one sum: (x, of that, number) -> sum."""

    begin: Callable[[jax.Array], Any]
    one: Callable[[jax.Array, Any, int], jax.Array]


def _open(x: jax.Array) -> all_sum.Inbox:
    return all_sum.open_inbox(SUMS, *x.shape, axis=MODEL, mesh_axes=(DATA, MODEL))


def _kernel(x: jax.Array, inbox: all_sum.Inbox, number: int) -> jax.Array:
    which = jnp.full((1,), number, jnp.int32)
    return all_sum.all_sum(x[None], inbox, which, axis=MODEL, mesh_axes=(DATA, MODEL))


NOTHING = Way(lambda _: None, lambda x, _, number: x * 2)
REFERENCE = Way(lambda _: None, lambda x, _, number: all_sum.reference(x[None], MODEL))
WAYS = {
    "XLA": Way(lambda _: None, lambda x, _, number: lax.psum(x, MODEL)),
    "kernel": Way(_open, _kernel),
}


def program(way: Way, mesh: Mesh, sums: int) -> Callable[[jax.Array], jax.Array]:
    """Sums in a row, each of the mean before; [devices * rows, size] -> what each device holds."""

    def run(x: jax.Array) -> jax.Array:
        begun = way.begin(x)
        for number in range(sums):
            x = x if number == 0 else x * jnp.bfloat16(1 / mesh.shape[MODEL])
            x = lax.optimization_barrier(way.one(x, begun, number))
        return x

    spec = P(MODEL)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def microseconds(program: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Of one sum, many programs in flight."""
    program(x).block_until_ready()
    laps = []
    for _ in range(LAPS):
        started = time.perf_counter()
        [program(x) for _ in range(PROGRAMS)][-1].block_until_ready()
        laps.append((time.perf_counter() - started) / PROGRAMS)
    return 1e6 * float(np.median(laps)) / SUMS


def off(way: Way, mesh: Mesh, x: jax.Array) -> dict[str, Any]:
    """Whether sums are the same on all devices, and how far one is from that in float64."""
    shards = mesh.shape[MODEL]

    def sums(count: int) -> np.ndarray:
        got = program(way, mesh, count)(x).astype(jnp.float32)
        return np.asarray(got, np.float64).reshape(shards, -1)

    one, last = sums(1), sums(SUMS)
    exact = np.asarray(x.astype(jnp.float32), np.float64).reshape(shards, -1).sum(axis=0)
    return {
        "same": bool((one == one[0]).all() and (last == last[0]).all()),
        "error": float(np.abs(one[0] - exact).max()),
    }


def run(args) -> int:
    if args.json:
        shell.check_writable(args.json)
    counts = number_list("--rows", args.rows)
    if args.tp < 2:
        raise InputError(f"--tp is {args.tp}; expected at least 2 devices to sum over")
    mesh = local_mesh(1, args.tp)
    assert mesh is not None
    unavailable = unavailable_reason()
    rows: list[dict[str, Any]] = []
    with shell.console(stderr=True).status("Sums") as status:
        for count, (name, way) in itertools.product(counts, WAYS.items()):
            reason = all_sum.unsupported_reason(args.size, jnp.bfloat16)
            if name == "kernel" and (unavailable or reason):
                continue
            status.update(f"{name}, {count} rows")
            x = jax.random.normal(jax.random.key(0), (args.tp * count, args.size), jnp.bfloat16)
            x = jax.device_put(x, jax.NamedSharding(mesh, P(MODEL)))
            alone = microseconds(program(NOTHING, mesh, SUMS), x)
            whole = microseconds(program(way, mesh, SUMS), x)
            rows.append(
                {
                    "way": name,
                    "rows": count,
                    "size": args.size,
                    "us": whole - alone,
                    "us_with_scaling": whole,
                    **off(way, mesh, x),
                }
            )
    device = jax.devices()[0].device_kind
    table = Table(
        title=f"A sum of rows x {args.size} bfloat16 over {args.tp} x {device}, among {SUMS} in a "
        "row"
    )
    for column in ("by", "rows", "us", "same on all", "error"):
        table.add_column(column, justify="left" if column == "by" else "right")
    for row in rows:
        same = "yes" if row["same"] else "NO"
        table.add_row(row["way"], str(row["rows"]), f"{row['us']:.1f}", same, f"{row['error']:.2g}")
    if args.json != "-":
        shell.console().print(table)
        if unavailable:
            shell.console().print(f"Without the kernel: {unavailable}.")
    if args.json:
        shell.write_json(args.json, {"schema": 1, "device": device, "tp": args.tp, "rows": rows})
    return shell.OK if all(row["same"] for row in rows) else shell.FAILED
