"""`bench.py products`: a layer's products with few rows, by XLA and by the kernel in all ways.

What `kernels_pallas.matmul` prefers and how it divides a weight is fitted to this table.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.table import Table

from ddtree_jax.commands import profile, shell, timing
from ddtree_jax.commands.floors import read_bandwidth
from ddtree_jax.commands.sweep import number_list
from ddtree_jax.config import DecoderConfig
from ddtree_jax.errors import InputError
from ddtree_jax.shapes import SHAPES
from kernels_pallas import matmul
from kernels_pallas.dispatch import unavailable_reason
from kernels_pallas.matmul import Schedule

WEIGHT_BYTES = 2**28  # copies of a weight are read in turn, so that no cache holds the next one
MOST_ROWS = 256  # the kernel takes no more
BEST = 4  # ways that the table shows of each product


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "products", help="microseconds of a layer's products, by XLA and by the kernel"
    )
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    add("--rows", default="1,16,64,128", help="tree nodes, as in 16,64")
    add("--tp", type=int, default=1, metavar="N", help="the products of one of N devices")
    add("--json", metavar="FILE|-")
    add("--debug", action="store_true")


class Product(NamedTuple):
    """x @ w with a weight [k, n], or with two of them that are gated (SwiGLU)."""

    name: str
    k: int
    n: int
    gated: bool = False

    @property
    def bytes(self) -> int:
        return 2 * self.k * self.n * (1 + self.gated)

    def weights(self) -> list[jax.Array]:
        columns = matmul.GATED_COLUMNS
        gated = (self.k, self.n // columns, 2, columns)
        shape = gated if self.gated else (self.k, self.n)
        return [
            (0.02 * jax.random.normal(jax.random.key(i), shape)).astype(jnp.bfloat16)
            for i in range(max(3, WEIGHT_BYTES // self.bytes))
        ]

    def xla(self, x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul.gated_reference(x, w) if self.gated else matmul.partial_sums(x, w)

    def kernel(self, x: jax.Array, w: jax.Array, plan: Schedule) -> jax.Array:
        return (matmul.gated_matmul if self.gated else matmul.split_matmul)(x, w, plan=plan)


def products(config: DecoderConfig, shards: int = 1) -> list[Product]:
    """The products of a layer that have kernels, of one of the shards for which `config` is."""
    d, kv_heads, f = (
        config.hidden_size,
        config.num_kv_heads // shards,
        config.intermediate_size // shards,
    )
    group = config.group_size + 2 + (config.group_size if config.attention_gate else 0)
    return [
        Product("qkv", d, kv_heads * group * config.head_dim),
        Product("o", kv_heads * config.group_size * config.head_dim, d),
        Product("gate, up", d, f, gated=True),
        Product("down", f, d),
    ]


def kernel_times(
    product: Product, x_mk: jax.Array, weights: list[jax.Array], plans: list[Schedule]
) -> dict[Schedule, float]:
    """Microseconds of the kernel in every way that has room for these rows."""

    def build(plan: Schedule):
        def all_of_them(x, *weights):
            return [product.kernel(x, w, plan) for w in weights]

        try:
            return jax.jit(all_of_them).lower(x_mk, *weights).compile()
        except ValueError:  # too few registers
            return None

    with ThreadPoolExecutor() as pool:
        built = dict(zip(plans, pool.map(build, plans), strict=True))
    ready = {plan: program for plan, program in built.items() if program is not None}
    if not ready:
        return {}
    for program in ready.values():
        jax.block_until_ready(program(x_mk, *weights))
    seen = profile.traced(lambda: [program(x_mk, *weights) for program in ready.values()])
    times = {}
    for plan in ready:
        name = matmul.kernel_name(product.k, product.n, plan, gated=product.gated) + "_"
        kernels = [kernel for kernel in seen.kernels if name in kernel.name]
        if kernels:
            times[plan] = sum(each.total_us for each in kernels) / sum(x.count for x in kernels)
    return times


def xla_time(product: Product, x_mk: jax.Array, weights: list[jax.Array]) -> float:
    """Microseconds of XLA's product, whatever kernels it is made of."""
    program = jax.jit(lambda x, *weights: [product.xla(x, w) for w in weights])
    return 1e3 * timing.milliseconds(lambda: program(x_mk, *weights)) / len(weights)


def run(args) -> int:
    shell.check_writable(args.json)
    if reason := unavailable_reason():
        raise InputError(f"bench.py products needs the kernels: {reason}")
    counts = number_list("--rows", args.rows)
    if max(counts) > MOST_ROWS:
        raise InputError(f"--rows is {max(counts)}; expected at most {MOST_ROWS}")
    if args.tp < 1:
        raise InputError(f"--tp is {args.tp}; expected at least 1")
    wanted = products(SHAPES[args.shape][0].for_shards(args.tp), args.tp)
    for _, k, n, _ in wanted:
        if reason := matmul.unsupported_reason(1, k, n, jnp.bfloat16):
            raise InputError(f"--shape is {args.shape}, with {reason}")
    rows: list[dict[str, Any]] = []
    with shell.progress("Reading") as update:
        bandwidth = read_bandwidth()
        for product, count in itertools.product(wanted, counts):
            name, k, n, gated = product
            update(f"Measuring {name}, {count} rows")
            # Not all the same: products of equal numbers take less power, so a higher clock.
            x = jax.random.normal(jax.random.key(count), (count, k)).astype(jnp.bfloat16)
            weights, chosen, plans = product.weights(), None, []
            if not matmul.unsupported_reason(count, k, n, x.dtype, gated=gated):
                chosen = matmul.schedule(count, k, n, gated=gated)
                plans = [
                    plan
                    for plan in matmul.schedules(k, n, gated=gated)
                    if 2 / 3 < n // plan.tile * plan.parts / matmul.MULTIPROCESSORS <= 1
                ]
                plans = sorted({*plans, chosen})
            times = kernel_times(product, x, weights, plans)
            rows.append(
                {
                    "product": name,
                    "k": k,
                    "n": n,
                    "rows": count,
                    "floor_us": 1e6 * product.bytes / bandwidth,
                    "xla_us": xla_time(product, x, weights),
                    "chosen": chosen and chosen._asdict(),
                    "chosen_us": chosen and times.get(chosen),
                    "preferred": chosen is not None and matmul.preferred(count, k, n, gated=gated),
                    "kernel": [
                        {**plan._asdict(), "us": us}
                        for plan, us in sorted(times.items(), key=lambda item: item[1])
                    ],
                }
            )
    shard = f", one of {args.tp} shards" if args.tp > 1 else ""
    table = Table(
        title=f"Products of a layer of {args.shape}{shard}, us on one "
        f"{jax.devices()[0].device_kind}; reads at {bandwidth / 1e9:.0f} GB/s. The kernel in its "
        "best ways: columns of a tile x parts x stages x cluster; *: preferred to XLA; -: no kernel"
    )
    for column in ("product", "rows", "floor", "XLA", "kernel as chosen"):
        table.add_column(column, justify="left" if column == "product" else "right")
    table.add_column("its best ways")
    for row in rows:
        best = (
            f"{way['us']:.1f} ({way['tile']}x{way['parts']}x{way['stages']}x{way['cluster']})"
            for way in row["kernel"]
        )
        as_chosen = "-" if row["chosen_us"] is None else f"{row['chosen_us']:.1f}"
        table.add_row(
            row["product"],
            str(row["rows"]),
            *(f"{row[key]:.1f}" for key in ("floor_us", "xla_us")),
            as_chosen + ("*" if row["preferred"] else ""),
            ", ".join(itertools.islice(best, BEST)),
        )
    if args.json != "-":
        shell.console().print(table)
    if args.json:
        shared = {"schema": 1, "shape": args.shape, "tp": args.tp}
        result = shared | {"read_bytes_per_s": bandwidth, "rows": rows}
        shell.write_json(args.json, result)
    return shell.OK
