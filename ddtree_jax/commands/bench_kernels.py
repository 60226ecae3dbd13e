"""`bench.py kernels`: whether the kernels compute what their references do, on this GPU.

Random inputs of a published shape; both are compared with float64, so that what bfloat16 costs is
told from what a kernel costs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from ddtree_jax.commands import shell
from ddtree_jax.commands.sweep import number_list
from ddtree_jax.config import DecoderConfig, TargetConfig
from ddtree_jax.engine import bucket
from ddtree_jax.errors import InputError
from ddtree_jax.models.layers import rope_tables
from ddtree_jax.shapes import SHAPES
from kernels_pallas import choice, matmul
from kernels_pallas.dispatch import REFERENCE, Kernels, unavailable_reason

PARTS = 4  # partial sums that norms and heads add up
TOLERANCE = 1.5  # of the reference's mean error
COLUMNS = 192 * 132  # of a head: the whole of it would take float64 long
LEVELS, RANKS, PATH = 15, 63, 16  # of a draft tree


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "kernels", help="the kernels' errors and their references', against float64"
    )
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    add("--nodes", default="1,16,64,128,255", help="tree nodes, as in 16,64")
    add("--context", type=int, default=1000, help="committed tokens")
    add("--json", metavar="FILE|-")
    add("--debug", action="store_true")


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation: run(kernels, *inputs) is its result, `exact` that in float64."""

    operation: str
    run: Callable[..., jax.Array]
    inputs: tuple[Any, ...]
    exact: np.ndarray


def _normal(key: int, *shape: int, scale: float = 1.0, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(key).standard_normal(shape, np.float32), dtype)


@functools.cache
def _weight(key: int, *shape: int) -> tuple[jax.Array, np.ndarray]:
    """A weight, and it in float64; the cases of all numbers of nodes share it."""
    w = (0.02 * jax.random.normal(jax.random.key(key), shape)).astype(jnp.bfloat16)
    return w, _wide(w)


def _wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


def _norm(x: np.ndarray, weight: jax.Array, eps: float, centred: bool) -> np.ndarray:
    scale = 1 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x * scale * (_wide(weight) + centred)


def _takes(kernels: Kernels, x: jax.Array, n: int, *, gated: bool = False) -> bool:
    """Whether a product is the kernel's, which it is here also where XLA's is preferred."""
    rows, k = x.shape
    reason = matmul.unsupported_reason(rows, k, n, x.dtype, gated=gated)
    return kernels.mosaic and reason is None


def product(config: DecoderConfig, nodes: int) -> Case:
    k = config.num_kv_heads * config.group_size * config.head_dim
    x, (w, wide) = _normal(0, nodes, k), _weight(1, k, config.hidden_size)

    def run(kernels: Kernels, x, w) -> jax.Array:
        if _takes(kernels, x, w.shape[-1]):
            return matmul.split_matmul(x, w).sum(axis=0)
        return matmul.reference(x, w)

    return Case("product", run, (x, w), _wide(x) @ wide)


def product_by_xla(config: DecoderConfig, nodes: int) -> Case:
    """As where a program with kernels leaves a product to XLA, and its sum to whoever reads it."""

    def run(kernels: Kernels, x, w) -> jax.Array:
        return matmul.partial_sums(x, w).sum(axis=0) if kernels.mosaic else matmul.reference(x, w)

    return dataclasses.replace(product(config, nodes), operation="product by XLA", run=run)


def gated_product(config: DecoderConfig, nodes: int) -> Case:
    d, f = config.hidden_size, config.intermediate_size
    columns = config.gate_columns
    x, (w, wide) = _normal(0, nodes, d), _weight(2, d, f // columns, 2, columns)

    def run(kernels: Kernels, x, w) -> jax.Array:
        if columns == matmul.GATED_COLUMNS and _takes(kernels, x, f, gated=True):
            return matmul.gated_matmul(x, w)
        return matmul.gated_reference(x, w)

    gate, up = (_wide(x) @ wide[:, :, which].reshape(d, f) for which in range(2))
    return Case("gated product", run, (x, w), gate / (1 + np.exp(-gate)) * up)


def largest(config: DecoderConfig, nodes: int) -> Case:
    """The largest of each row, and what the chosen column really holds."""
    x, (w, wide) = _normal(0, nodes, config.hidden_size), _weight(3, config.hidden_size, COLUMNS)

    def run(kernels: Kernels, x, w) -> jax.Array:
        reason = choice.unsupported_reason(nodes, config.hidden_size, COLUMNS, x.dtype)
        kernel = kernels.mosaic and reason is None
        best, column = (choice.argmax if kernel else choice.reference)(x, w, COLUMNS)
        chosen = jnp.einsum("mk,km->m", x, w[:, column], preferred_element_type=jnp.float32)
        # Rounded, for float32 sums in another order have other errors that are next to nothing.
        return jnp.stack([best, chosen]).astype(jnp.bfloat16)

    exact = (_wide(x) @ wide).max(axis=1)
    return Case("largest of a product", run, (x, w), np.stack([exact, exact]))


def add_norm(config: DecoderConfig, nodes: int) -> Case:
    d, eps, centred = config.hidden_size, config.rms_norm_eps, config.centred_norm
    x, weight = _normal(0, nodes, d), _normal(1, d)
    parts = _normal(2, PARTS, nodes, d, dtype=jnp.float32)

    def run(kernels: Kernels, x, parts, weight) -> jax.Array:
        return jnp.stack(kernels.add_norm(x, parts, weight, eps, centred=centred))

    y = _wide(x) + _wide(parts).sum(axis=0)
    return Case(
        "add and norm", run, (x, parts, weight), np.stack([y, _norm(y, weight, eps, centred)])
    )


def heads(config: DecoderConfig, nodes: int) -> Case:
    k, slots, h = config.num_kv_heads, config.group_size + 2, config.head_dim
    eps, centred = config.rms_norm_eps, config.centred_norm
    parts = _normal(0, PARTS, nodes, k * slots * h, dtype=jnp.float32)
    tables = rope_tables(config.rope, h, jnp.arange(nodes)[None] + 1000)
    norms = (_normal(1, h), _normal(2, h)) if config.qk_norm else None

    def run(kernels: Kernels, parts, tables, norms) -> jax.Array:
        shape = (k, slots, h)
        return kernels.head_rows(parts, tables, norms, eps, shape, jnp.bfloat16, centred=centred)

    y = _wide(parts).sum(axis=0).reshape(nodes, k, slots, h)
    for slot in range(slots - 1):
        if norms is not None:
            y[:, :, slot] = _norm(y[:, :, slot], norms[slot == slots - 2], eps, centred)
    cos, sin = (_wide(table)[:, None, None] for table in tables)
    half = cos.shape[-1]
    first, second = y[:, :, :-1, :half], y[:, :, :-1, half : 2 * half]
    rotated = first * cos - second * sin, second * cos + first * sin
    y[:, :, :-1, : 2 * half] = np.concatenate(rotated, axis=-1)
    return Case("heads", run, (parts, tables, norms), y)


def attention(config: DecoderConfig, nodes: int, context: int, window: int | None) -> Case:
    k, g, h = config.num_kv_heads, config.group_size, config.head_dim
    slots = bucket(context + 1)
    qkv = _normal(0, 1, nodes, k, g + 2, h)
    k_cache, v_cache = _normal(1, 1, k, slots, h), _normal(2, 1, k, slots, h)
    # Random parents: every node but the root hangs below one before it.
    parents = [-1, *(int(x) for x in np.random.default_rng(0).integers(0, np.arange(1, nodes)))]
    seen = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        seen[node] |= seen[parents[node]]
    depths = seen.sum(axis=1) - 1
    bound = (
        np.zeros_like(depths) if window is None else np.maximum(context + depths - window + 1, 0)
    )
    lower, length = jnp.asarray(bound[None], jnp.int32), jnp.full((1,), context, jnp.int32)

    def run(kernels: Kernels, *inputs) -> jax.Array:
        return kernels.attention(*inputs, window=window)

    wide = _wide(qkv)[0]
    keys = np.concatenate([_wide(k_cache)[0, :, :context].swapaxes(0, 1), wide[:, :, g]])
    values = np.concatenate([_wide(v_cache)[0, :, :context].swapaxes(0, 1), wide[:, :, g + 1]])
    scores = np.einsum("nkgh,mkh->nkgm", wide[:, :, :g], keys, optimize=True) / np.sqrt(h)
    visible = np.concatenate([np.arange(context) >= bound[:, None], seen], axis=1)
    scores = np.where(visible[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    name = "attention" if window is None else f"attention, window {window}"
    inputs = (qkv, k_cache, v_cache, jnp.asarray(seen[None]), lower, length)
    exact = np.einsum("nkgm,mkh->nkgh", weights, values, optimize=True)
    return Case(name, run, inputs, exact[None])


def append(config: DecoderConfig, nodes: int) -> Case:
    k, g, h = config.num_kv_heads, config.group_size, config.head_dim
    rows, length, count = _normal(0, 1, nodes, k, g + 2, h), 37, min(nodes, PATH - 3)
    path = np.resize(np.random.default_rng(0).permutation(nodes), PATH)
    caches = _normal(1, 1, k, 128, h), _normal(2, 1, k, 128, h)

    def run(kernels: Kernels, pair, rows, *numbers) -> jax.Array:
        return jnp.stack(kernels.append([pair], [rows], *numbers)[0])

    exact = np.stack([_wide(cache) for cache in caches])
    for side in range(2):
        new = _wide(rows)[0, path[:count], :, g + side].swapaxes(0, 1)
        exact[side, 0, :, length : length + count] = new
    numbers = (jnp.asarray(x, jnp.int32) for x in (path[None], [length], [count]))
    return Case("append", run, (caches, rows, *numbers), exact)


def growing(nodes: int) -> Case:
    """Not of numbers, but of which nodes: the level-wise reference is exact."""
    scores = -np.sort(np.random.default_rng(0).integers(0, 3000, (1, LEVELS, RANKS)), axis=-1)
    given = jnp.asarray(scores, jnp.int32)

    def run(kernels: Kernels, scores) -> jax.Array:
        rank, parent, depth, live, ancestors = kernels.grow(scores, nodes - 1)
        together = jnp.stack([rank, parent, depth, live.astype(jnp.int32)], axis=-1)
        return jnp.concatenate([together.ravel(), ancestors.ravel().astype(jnp.int32)])

    return Case(
        "growing",
        run,
        (given,),
        np.asarray(jax.jit(run, static_argnums=0)(REFERENCE, given), np.float64),
    )


def sampling(config: TargetConfig, nodes: int, by_mass: bool) -> Case:
    """Which tokens are chosen, by top-p or by top-k."""
    v, k, p = config.padded_vocab, 50, 0.95
    scores = _normal(0, 1, nodes, v, scale=3.0, dtype=jnp.float32)
    noise = jnp.asarray(np.random.default_rng(1).gumbel(size=(1, PATH, v)), jnp.float32)
    depths = jnp.arange(nodes)[None] % PATH

    def run(kernels: Kernels, scores, noise, depths) -> jax.Array:
        top_k, top_p = (None, jnp.full((1,), p)) if by_mass else (jnp.full((1,), k), None)
        return kernels.sample(scores, noise, depths, top_k, top_p, None)

    wide = _wide(scores)[0]
    if by_mass:
        order = -np.sort(-wide, axis=-1)
        mass = np.cumsum(np.exp(order), axis=-1)
        # The last that less than p lies above.
        last = (mass < p * mass[:, -1:]).sum(axis=-1, keepdims=True)
        lowest = np.take_along_axis(order, last, axis=-1)
    else:
        lowest = np.partition(wide, v - k, axis=-1)[:, v - k, None]
    sums = np.asarray(scores + noise[:, depths[0]])[0]
    exact = np.where(wide >= lowest, sums, -np.inf).argmax(axis=-1)
    name = f"sampling, top-p {p}" if by_mass else f"sampling, top-k {k}"
    return Case(name, run, (scores, noise, depths), exact[None].astype(np.float64))


def cases(config: TargetConfig, nodes: int, context: int) -> list[Case]:
    found = [
        product(config, nodes),
        product_by_xla(config, nodes),
        gated_product(config, nodes),
        largest(config, nodes),
        add_norm(config, nodes),
        heads(config, nodes),
        attention(config, nodes, context, None),
        attention(config, nodes, context, context // 3),
        append(config, nodes),
        sampling(config, nodes, by_mass=False),
        sampling(config, nodes, by_mass=True),
    ]
    return found + ([growing(nodes)] if nodes > 1 else [])


def compiled(case: Case, kernels: Kernels) -> Callable[..., jax.Array]:
    # The inputs are arguments, not constants: XLA would compute with those while it compiles.
    return jax.jit(functools.partial(case.run, kernels)).lower(*case.inputs).compile()


def errors(case: Case, program: Callable[..., jax.Array]) -> tuple[float, float]:
    """Mean and greatest absolute error, in units of the exact result's root mean square."""
    got = program(*case.inputs)
    off = np.abs(_wide(got) - case.exact) / max(np.sqrt((case.exact**2).mean()), 1e-30)
    return float(off.mean()), float(off.max())


def row(case: Case, nodes: int, programs: Sequence[Callable[..., jax.Array]]) -> dict[str, Any]:
    """`programs`: with the kernels, and with the references."""
    (kernel, kernel_max), (reference, reference_max) = (errors(case, each) for each in programs)
    return {
        "operation": case.operation,
        "nodes": nodes,
        "kernel_mean": kernel,
        "kernel_max": kernel_max,
        "reference_mean": reference,
        "reference_max": reference_max,
        "ok": kernel <= TOLERANCE * reference,
    }


def run(args) -> int:
    shell.check_writable(args.json)
    counts = number_list("--nodes", args.nodes)
    if max(counts) > 512:
        raise InputError(f"--nodes holds {max(counts)}; expected at most 512")
    if args.context < 3:
        raise InputError(f"--context is {args.context}; expected at least 3")
    if reason := unavailable_reason():
        raise InputError(f"bench.py kernels needs the kernels: {reason}")
    config = SHAPES[args.shape][0]
    ways = (Kernels(mosaic=True), REFERENCE)
    with shell.progress("Inputs") as update, ThreadPoolExecutor() as pool:
        asked = [(nodes, case) for nodes in counts for case in cases(config, nodes, args.context)]
        built = [[pool.submit(compiled, case, way) for way in ways] for _, case in asked]
        rows = []
        for (nodes, case), programs in zip(asked, built, strict=True):
            update(f"{case.operation}, {nodes} nodes")
            rows.append(row(case, nodes, [program.result() for program in programs]))
    device = jax.devices()[0].device_kind
    table = Table(
        title=f"Errors of the kernels and their references at the shapes of {args.shape}, context "
        f"{args.context}, {device}: absolute, in units of the float64 result's root mean square"
    )
    for column in ("operation", "nodes", "kernel, mean", "max", "reference, mean", "max", ""):
        table.add_column(column, justify="left" if column == "operation" else "right")
    keys = ("kernel_mean", "kernel_max", "reference_mean", "reference_max")
    for each in rows:
        numbers = (f"{each[key]:.2e}" for key in keys)
        table.add_row(
            each["operation"], str(each["nodes"]), *numbers, "" if each["ok"] else "WRONG"
        )
    if args.json != "-":
        shell.console().print(table)
    if args.json:
        result = {"schema": 1, "shape": args.shape, "context": args.context, "device": device}
        shell.write_json(args.json, result | {"rows": rows})
    return shell.OK if all(each["ok"] for each in rows) else shell.FAILED
