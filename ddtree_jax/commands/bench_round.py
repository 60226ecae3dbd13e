"""`bench.py round`: what one round costs, with random weights, against the memory floor.

Random weights measure cost per round and never a speed-up: nothing they draft is accepted.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.table import Table

from ddtree_jax import api, rounds
from ddtree_jax.commands import shell
from ddtree_jax.engine import ATTENTION, Engine, Options, bucket
from ddtree_jax.errors import InputError
from ddtree_jax.models import Models, parameter_name, parameter_shapes
from ddtree_jax.models.recurrent import RecurrentLayer
from ddtree_jax.rounds import DecodeState
from ddtree_jax.sampling import GREEDY
from ddtree_jax.shapes import SHAPES
from ddtree_jax.tree import Tree
from kernels_pallas.rows import total

WARM_UP = 10
# Beside the greedy round, what sampling adds to it.
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": dict(temperature=1.0),
    "top-k": dict(temperature=1.0, top_k=50),
    "top-p": dict(temperature=1.0, top_p=0.9),
    "min-p": dict(temperature=1.0, min_p=0.05),
    "penalties": dict(repetition_penalty=1.1, presence_penalty=0.5),
}
AHEAD = 2  # rounds dispatched before the oldest is waited for


def add_parser(commands) -> None:
    parser = commands.add_parser("round", help="milliseconds per round, random weights")
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    add("--budget", default="63", help="tree budgets, as in 15,31,63")
    add(
        "--context", default="1024", help="committed tokens before the first round, as in 1024,8192"
    )
    add("--rounds", type=int, default=60)
    add("--sampling", action="store_true", help="tree rounds with each kind of sampling, too")
    add("--dtype", choices=list(api.DTYPES), default="bfloat16")
    add("--attention", choices=list(ATTENTION), default="auto", help="reference: no kernels at all")
    add("--json", metavar="FILE|-")
    add("--debug", action="store_true")


def random_parameters(models: Models, dtype) -> dict[str, jax.Array]:
    """Random values by path for an abstract module: norms one, everything else small."""
    make = jax.jit(
        lambda key, shape, dtype: (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype),
        static_argnums=(1, 2),
    )
    named = jax.tree.flatten_with_path(parameter_shapes(nnx.state(models), dtype))[0]
    values = {}
    for index, (path, leaf) in enumerate(named):
        name = parameter_name(path)
        norm = name.endswith("weight_d")
        key = jax.random.key(index)
        kind = leaf.dtype
        values[name] = jnp.ones(leaf.shape, kind) if norm else make(key, leaf.shape, kind)
    return values


def read_bandwidth() -> float:
    """Bytes per second that a max-reduction reads, many launches in flight."""
    size = 2**29 if jax.default_backend() == "cpu" else 2**32
    data = jax.lax.bitcast_convert_type(
        jax.random.bits(jax.random.key(0), (size // 2,), jnp.uint16), jnp.bfloat16
    )
    reduce = jax.jit(jnp.max)
    reduce(data).block_until_ready()
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        results = [reduce(data) for _ in range(10)]
        results[-1].block_until_ready()
        best = max(best, 10 * size / (time.perf_counter() - started))
    return best


def bytes_read(engine: Engine, mode: str, context: int) -> int:
    """What a round must move: layers and head once (twice when it drafts), K/V and states.

    A sliding layer reads its window; a recurrent state is read and written.
    """
    width = jnp.dtype(engine.dtype).itemsize
    sizes = {
        name: int(np.prod(shape.shape)) * shape.dtype.itemsize
        for name, shape in zip(engine._leaf_names, engine._leaf_shapes, strict=True)
    }
    head = sizes.get("target.head_dv", sizes["target.embed_vd"])
    layers = sum(size for name, size in sizes.items() if name.startswith("target.layers."))
    drafter = sum(size for name, size in sizes.items() if name.startswith("drafter."))

    def cache(config) -> int:
        seen = sum(
            min(context, window or context)
            for layer, window in enumerate(config.windows)
            if not config.is_recurrent(layer)
        )
        delta = config.delta
        states = 0 if delta is None else 2 * 4 * len(delta.layers) * delta.state_size
        return 2 * config.num_kv_heads * config.head_dim * seen * width + states

    total = layers + head + cache(engine.target)
    if mode != "ar":
        total += drafter + head + cache(engine.drafter)
    return total


def measure(program: Callable, leaves, state, count: int) -> np.ndarray:
    """Milliseconds between the completions of consecutive rounds [count]."""
    flying: collections.deque = collections.deque()
    stamps: list[float] = []
    while len(stamps) < WARM_UP + count + 1:
        state, emitted = program(leaves, state)
        flying.append(emitted)
        if len(flying) > AHEAD:
            flying.popleft().count.block_until_ready()
            stamps.append(time.perf_counter())
    length = int(np.max(jax.device_get(state.length)))
    if length >= state.cache.slots:
        raise InputError("the rounds filled the cache: give fewer --rounds")
    return 1e3 * np.diff(stamps)[WARM_UP:]


def stages(engine: Engine, options: Options, context: int, slots: int) -> dict[str, float]:
    """Milliseconds of a tree round's parts, each a program of its own, launched back to back."""
    _, leaves, state = engine.round_at(options, context, slots)
    budget = options.tree_budget or 0
    assert engine.drafter is not None
    block = engine.drafter.block_size
    stable = jax.default_backend() == "cpu"

    def part(function) -> Callable:
        return jax.jit(lambda leaves, *rest: function(engine._merge(leaves), *rest))

    draft = part(lambda models, state: rounds.draft(models, state)[0])
    grow = part(
        lambda models, bonus, logits: rounds.grow_tree(
            models, bonus, logits, budget, stable_top_k=stable
        )
    )
    verify = part(rounds.verify)

    def finish(models, state, tree, verified):
        after, emitted = rounds.accept_and_commit(models, state, tree, verified, block, GREEDY)
        # Not donated here: returning K/V would add a copy of all slots to the measurement.
        return emitted, after.length, after.features, after.cache.recurrent

    logits = draft(leaves, state)
    tree = grow(leaves, state.bonus, logits)
    verified = verify(leaves, state, tree)
    accept = part(finish)

    def timed(call: Callable[[], Any]) -> float:
        jax.block_until_ready(call())
        laps = []
        for _ in range(5):
            started = time.perf_counter()
            jax.block_until_ready([call() for _ in range(10)][-1])
            laps.append((time.perf_counter() - started) / 10)
        return 1e3 * float(np.median(laps))

    laps = {
        "draft": timed(lambda: draft(leaves, state)),
        "tree": timed(lambda: grow(leaves, state.bonus, logits)),
        "verify": timed(lambda: verify(leaves, state, tree)),
        "head and accept": timed(lambda: accept(leaves, state, tree, verified)),
    }
    if engine.target.delta is not None:
        recurrent = part(recurrent_part)
        laps["of verify: Gated DeltaNet"] = timed(lambda: recurrent(leaves, state, tree))
    return laps


def recurrent_part(models: Models, state: DecodeState, tree: Tree) -> tuple[jax.Array, list]:
    """The Gated DeltaNet of all recurrent layers in a row, projections included."""
    target, pending = models.target, []
    paths = target.paths(tree.ancestors, tree.depths, tree.max_depth, None)
    x = target.embed(tree.tokens)
    layers = [layer for layer in target.layers if isinstance(layer, RecurrentLayer)]
    for layer, carried in zip(layers, state.cache.recurrent, strict=True):
        parts, nodes = layer.delta(layer.input_norm(x), carried, paths)
        x = x + total(parts, x.dtype).reshape(x.shape)
        pending.append(nodes)
    return x, pending


def _numbers(args, name: str) -> list[int]:
    """The value of a flag that takes one number or several."""
    text = getattr(args, name)
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--{name} is {text!r}; expected numbers as in 15,63") from None
    if min(numbers) < 1:
        raise InputError(f"--{name} holds {min(numbers)}; expected at least 1")
    return numbers


def run(args) -> int:
    if args.json:
        shell.check_writable(args.json)
    budgets, contexts = (_numbers(args, name) for name in ("budget", "context"))
    if args.rounds < 1:
        raise InputError(f"--rounds is {args.rounds}; expected at least 1")
    target, drafter = SHAPES[args.shape]
    dtype = api.DTYPES[args.dtype]
    programs = [("ar", Options(mode="ar")), ("dflash", Options(mode="dflash"))]
    for budget in budgets:
        tree = Options(mode="ddtree", tree_budget=budget)
        programs.append((f"ddtree {budget}", tree))
        if args.sampling:
            programs += [
                (f"ddtree {budget}, {name}", dataclasses.replace(tree, **changes))
                for name, changes in SAMPLING.items()
            ]
    more = 2 * (args.rounds + WARM_UP + AHEAD) + drafter.block_size
    slots_of = {context: bucket(context + more) for context in contexts}
    longest = max(target.max_position, *slots_of.values())
    console = shell.console(stderr=True)
    rows = []
    with console.status("Random weights") as status:
        abstract = nnx.eval_shape(lambda: Models(target, drafter, rngs=nnx.Rngs(0)))
        engine = Engine(
            dataclasses.replace(target, max_position=longest),
            drafter,
            lambda: random_parameters(abstract, dtype),
            dtype=dtype,
            attention=args.attention,
        )
        bandwidth = read_bandwidth()
        for context, (label, options) in itertools.product(contexts, programs):
            status.update(f"Measuring {label}, context {context}")
            slots = slots_of[context]
            times = measure(*engine.round_at(options, context, slots), args.rounds)
            floor = 1e3 * bytes_read(engine, options.mode, context) / bandwidth
            row: dict[str, Any] = {
                "label": label,
                "mode": options.mode,
                "tree_budget": options.tree_budget,
                "context": context,
                "rounds": args.rounds,
                "median_ms": float(np.median(times)),
                "p10_ms": float(np.percentile(times, 10)),
                "p90_ms": float(np.percentile(times, 90)),
                "floor_ms": floor,
                "ratio": float(np.median(times)) / floor,
            }
            if options == Options(mode="ddtree", tree_budget=options.tree_budget):
                row["stages_ms"] = stages(engine, options, context, slots)
            rows.append(row)
    device = jax.devices()[0].device_kind
    table = Table(
        title=f"{args.shape}, random weights, {args.dtype}, {device}, attention: "
        f"{engine.attention}; reads at {bandwidth / 1e9:.0f} GB/s"
    )
    columns = ["program", "context", "median ms", "p10", "p90", "floor ms", "ratio"]
    columns += next((list(row["stages_ms"]) for row in rows if "stages_ms" in row), [])
    for column in columns:
        table.add_column(column, justify="left" if column == "program" else "right")
    for row in rows:
        numbers = [row[key] for key in ("median_ms", "p10_ms", "p90_ms", "floor_ms", "ratio")]
        numbers += list(row.get("stages_ms", {}).values())
        table.add_row(row["label"], str(row["context"]), *(f"{number:.3g}" for number in numbers))
    if args.json != "-":
        shell.console().print(table)
    if args.json:
        result = {
            "schema": 1,
            "shape": args.shape,
            "weights": "random",
            "dtype": args.dtype,
            "attention": engine.attention,
            "device": device,
            "read_bytes_per_s": bandwidth,
            "rows": rows,
        }
        shell.write_json(args.json, result)
    return shell.OK
