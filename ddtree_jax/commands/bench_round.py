"""`bench.py round`: what one round costs, with random weights, against the memory floor.

Random weights measure cost per round and never a speed-up: what they accept is chance.
"""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import api
from ddtree_jax.commands import bench_parts, hugging_face, profile, round_tables, shell, timing
from ddtree_jax.commands.floors import bytes_read, matrix_rate, read_bandwidth
from ddtree_jax.commands.stages import stages
from ddtree_jax.commands.sweep import jumps, number_list
from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.engine import ATTENTION, Engine, Options, bucket, sampler_of
from ddtree_jax.errors import InputError
from ddtree_jax.shapes import SHAPES, first_layers
from ddtree_jax.sharding import local_mesh

WARM_UP = 10
# Beside the greedy round, what sampling adds to it.
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": dict(temperature=1.0),
    "top-k": dict(temperature=1.0, top_k=50),
    "top-p": dict(temperature=1.0, top_p=0.9),
    "min-p": dict(temperature=1.0, min_p=0.05),
    "penalties": dict(repetition_penalty=1.1, presence_penalty=0.5),
}
TRACED = 20  # rounds that are measured on the device itself
LONGEST = 2**24  # tokens of a context
AHEAD = 2  # rounds dispatched before the oldest is waited for
SPAN = 4  # rounds that a lap is the mean of: the host wakes up too late for single short ones
BURST = 5  # rounds between two rests


COLUMNS = (
    "Milliseconds of a round with random weights. median, p10, p90: of laps by the host's clock, "
    f"each from one round's completion to that of the {SPAN}th after it, over {SPAN}. floor: the "
    "bytes a round must read over the read bandwidth measured in the same run. On a GPU also "
    "device: a round that waited in the device's queue, so that the host has no part in it; busy "
    "(on one GPU): while any kernel ran, from a profile; idle: of the median. rested, with --rest: "
    f"the median of bursts of {BURST} rounds, before a GPU that draws all its power is slowed down."
)


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "round", help="milliseconds per round, random weights", description=COLUMNS
    )
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    add(
        "--layers",
        type=int,
        metavar="N",
        help="only the target's first layers: sweeps compile fast",
    )
    add(
        "--budget",
        default="63",
        help="tree budgets, as in 15,31,63; with a range (1-127, or 1-121:8) a sweep, which times "
        "whole rounds only and lists the sizes at which they grow by more than 15 %%",
    )
    add(
        "--context", default="1024", help="committed tokens before the first round, as in 1024,8192"
    )
    add("--rounds", type=int, default=60)
    add(
        "--rest",
        type=float,
        metavar="SECONDS",
        help=f"also rounds in bursts of {BURST}, each after so long a rest",
    )
    add("--prompt", metavar="N", help="also the time to the first token after N prompt tokens")
    add("--prefill-chunk", type=int, metavar="N", help="prompt tokens per prefill step")
    add(
        "--attention-at",
        metavar="S",
        help="also one layer's tree attention alone, 16 and 64 nodes, at a context of S tokens",
    )
    add(
        "--baseline",
        action="store_true",
        help="also milliseconds per token of Hugging Face generate, where torch is installed",
    )
    add("--sampling", action="store_true", help="tree rounds with each kind of sampling, too")
    add("--kernels", action="store_true", help="the kernels of each program by time; needs a GPU")
    add("--dtype", choices=list(api.DTYPES), default="bfloat16")
    add("--attention", choices=list(ATTENTION), default="auto", help="reference: no kernels at all")
    add("--tp", type=int, default=1, metavar="N", help="devices that share the models")
    add("--whole-drafter", action="store_true", help="every one of them runs the whole drafter")
    add("--json", metavar="FILE|-")
    add("--debug", action="store_true")


def random_parameters(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Random values by path, each made where it belongs: norms one, everything else small."""

    @functools.cache
    def maker(leaf: jax.ShapeDtypeStruct, norm: bool) -> Callable:
        def make(key):
            small = 0.02 * jax.random.normal(key, leaf.shape, jnp.float32)
            return (jnp.ones(leaf.shape) if norm else small).astype(leaf.dtype)

        return jax.jit(make, out_shardings=leaf.sharding)

    return {
        name: maker(leaf, name.endswith("weight_d"))(jax.random.key(index))
        for index, (name, leaf) in enumerate(wanted.items())
    }


def completions(program: Callable, leaves, state, count: int) -> tuple[list[float], Any]:
    """When each of `count` rounds was done, and the state after them."""
    flying: collections.deque = collections.deque()
    stamps: list[float] = []
    for dispatched in range(count + AHEAD):
        if dispatched < count:
            state, emitted = program(leaves, state)
            flying.append(emitted)
        if dispatched >= AHEAD:
            flying.popleft().count.block_until_ready()
            stamps.append(time.perf_counter())
    return stamps, state


def _check_room(state, count: int) -> None:
    length = int(np.max(jax.device_get(state.length)))
    if length >= state.cache.slots:
        raise InputError(f"--rounds is {count}; expected fewer: they filled {length} slots")


def measure(program: Callable, leaves, state, count: int) -> np.ndarray:
    """Milliseconds a round [count], each the mean of the SPAN rounds that begin with it."""
    stamps, state = completions(program, leaves, state, WARM_UP + count + SPAN)
    _check_room(state, count)
    ends = np.array(stamps[WARM_UP:])
    return 1e3 * (ends[SPAN:] - ends[:-SPAN]) / SPAN


def measure_rested(program: Callable, leaves, state, count: int, rest: float) -> np.ndarray:
    """Milliseconds a round [at least count / BURST], each the mean of a burst after `rest` seconds.

    A round more, which wakes the device up, is not in it.
    """
    times = []
    for _ in range(bursts(count)):
        time.sleep(rest)
        stamps, state = completions(program, leaves, state, 1 + BURST)
        times.append(1e3 * (stamps[-1] - stamps[0]) / BURST)
    _check_room(state, count)
    return np.array(times)


def bursts(count: int) -> int:
    """How many it takes to measure `count` rounds."""
    return -(-count // BURST)


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to measure, and where it begins."""

    label: str
    options: Options
    context: int
    slots: int

    @property
    def staged(self) -> bool:
        """A greedy tree round, whose parts can be measured too."""
        budget = self.options.tree_budget
        return self.options == Options(mode="ddtree", tree_budget=budget)


def wall_row(
    engine: Engine, case: Case, count: int, bandwidth: float, rest: float | None
) -> dict[str, Any]:
    """What the host's clock says of one program."""
    times = measure(*engine.round_at(case.options, case.context, case.slots), count)
    floor = 1e3 * bytes_read(engine, case.options.mode, case.context) / bandwidth
    rested = {}
    if rest is not None:
        begin = engine.round_at(case.options, case.context, case.slots)
        median = float(np.median(measure_rested(*begin, count, rest)))
        rested = {"rested_ms": median, "rested_ratio": median / floor}
    return rested | {
        "label": case.label,
        "mode": case.options.mode,
        "tree_budget": case.options.tree_budget,
        "context": case.context,
        "rounds": count,
        "median_ms": float(np.median(times)),
        "p10_ms": float(np.percentile(times, 10)),
        "p90_ms": float(np.percentile(times, 90)),
        "floor_ms": floor,
        "ratio": float(np.median(times)) / floor,
    }


def device_row(engine: Engine, case: Case, wall_ms: float) -> dict[str, Any]:
    """What the device did in a round (see COLUMNS), and its kernels."""
    program, leaves, state = engine.round_at(case.options, case.context, case.slots)

    def one_round() -> jax.Array:
        nonlocal state
        state, emitted = program(leaves, state)
        return emitted.count

    device = timing.queued(one_round, TRACED)
    traced = profile.traced(lambda: [one_round() for _ in range(TRACED)][-1])
    # A kernel that waits for another device counts as busy, and devices whose kernels are recorded
    # wait for each other much longer than they do otherwise.
    busy = traced.busy_ms / TRACED if engine.mesh is None else None
    return {
        "device_ms": device,
        "busy_ms": busy,
        "idle_percent": None if busy is None else 100 * (1 - busy / wall_ms),
        "kernels": [
            {
                "name": kernel.name,
                "per_round": kernel.count / TRACED,
                "us_each": kernel.total_us / kernel.count,
                "us_per_round": kernel.total_us / TRACED,
            }
            for kernel in traced.kernels
        ],
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a command line asks for.

    sweep: tree sizes in a range, of which only whole rounds are timed. prompts: tokens to prefill.
    lengths: contexts at which attention is measured alone. rest: seconds before each burst of
    rounds, if there are to be any.
    """

    cases: list[Case]
    contexts: list[int]
    sweep: bool
    prompts: list[int]
    lengths: list[int]
    rest: float | None

    @property
    def longest(self) -> int:
        return max(*(case.slots for case in self.cases), *(n + 1 for n in self.prompts), 0)


def pair_of(args) -> tuple[TargetConfig, DrafterConfig]:
    """The configurations that the flags name."""
    if args.layers is None:
        return SHAPES[args.shape]
    try:
        return first_layers(*SHAPES[args.shape], args.layers)
    except ValueError as error:
        raise InputError(f"--layers is {error} for {args.shape}") from None


def planned(args) -> Plan:
    """Raises InputError naming the flag whose value cannot be used."""
    lists = {
        name: number_list("--" + name.replace("_", "-"), text) if text is not None else []
        for name in ("budget", "context", "prompt", "attention_at")
        for text in [getattr(args, name)]
    }
    sweep = "-" in args.budget
    for name, most in (("rounds", 10_000), ("prefill_chunk", 2**20)):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            raise InputError(f"--{name.replace('_', '-')} is {value}; expected 1 to {most}")
    for name in ("context", "prompt", "attention_at"):
        if max(lists[name], default=1) > LONGEST:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} holds {max(lists[name])}; expected 1 to {LONGEST} tokens")
    if args.rest is not None and not 0 < args.rest <= 60:
        raise InputError(f"--rest is {args.rest:g}; expected seconds, above 0 and up to 60")
    if max(lists["budget"]) > 511:
        raise InputError(f"--budget holds {max(lists['budget'])}; expected 1 to 511 nodes")
    if args.tp > 1 and (lists["prompt"] or lists["attention_at"]):
        raise InputError(f"--tp is {args.tp}; --prompt and --attention-at are of one device")
    if args.kernels and sweep:
        raise InputError("--kernels goes with a list of budgets; --budget is a range")
    kinds = [("ar", Options(mode="ar")), ("dflash", Options(mode="dflash"))]
    for budget in lists["budget"]:
        tree = Options(mode="ddtree", tree_budget=budget)
        kinds.append((f"ddtree {budget}", tree))
        if args.sampling:
            kinds += [
                (f"ddtree {budget}, {name}", dataclasses.replace(tree, **changes))
                for name, changes in SAMPLING.items()
            ]
    target, drafter = pair_of(args)
    # Random weights guess next to nothing, but of a vocabulary of a few words.
    each = 2 if target.vocab_size > 2**14 else drafter.block_size
    rounds = max(args.rounds + bursts(args.rounds), 2 * TRACED) + WARM_UP + SPAN
    more = each * rounds + drafter.block_size
    cases = [
        Case(label, options, context, bucket(context + more))
        for context, (label, options) in itertools.product(lists["context"], kinds)
    ]
    return Plan(
        cases, lists["context"], sweep, lists["prompt"], lists["attention_at"], rest=args.rest
    )


def measured(engine: Engine, plan: Plan, count: int, update) -> dict[str, Any]:
    """Everything of a plan; `count` rounds of each case by the host's clock.

    `update` is called with what happens.
    """
    programs = [
        engine._round_program(case.options, case.slots, sampler_of([case.options]))
        for case in plan.cases
    ] + [bench_parts.prefill_program(engine, tokens) for tokens in plan.prompts]
    # Compiling times kernels on the device, too: it is over before anything is measured.
    for done, program in enumerate(programs):
        update(f"Compiling: {done} of {len(programs)} programs")
        program.result()
    update("Random weights")
    jax.block_until_ready(engine._leaves.result())
    bandwidth, rate = read_bandwidth(), matrix_rate(engine.dtype)
    rows, parts = [], []
    for case in plan.cases:
        update(f"Measuring {case.label}, context {case.context}")
        rows.append(wall_row(engine, case, count, bandwidth, plan.rest))
        update(f"{case.label}, context {case.context}: {rows[-1]['median_ms']:.3f} ms a round")
    for tokens in plan.prompts:
        update(f"Measuring prefill of {tokens} tokens")
        parts.append(bench_parts.prefill_row(engine, tokens, rate))
    # The profiler comes last, so that nothing of it is in the times above.
    for case, row in zip(plan.cases, rows, strict=True) if not plan.sweep else ():
        update(f"Profiling {case.label}, context {case.context}")
        if profile.available():
            row |= device_row(engine, case, row["median_ms"])
        if case.staged and engine.mesh is None:  # the parts' programs are for one device
            row["stages_ms"] = stages(engine, case.options, case.context, case.slots)
    for context, nodes in itertools.product(plan.lengths, bench_parts.ATTENTION_NODES):
        update(f"Measuring attention, context {context}")
        row = bench_parts.attention_row(engine, nodes, context, bandwidth, rate)
        parts.append(row | {"round_percent": bench_parts.round_share(row, rows)})
    result = {
        "device": jax.devices()[0].device_kind,
        "attention": engine.attention,
        "sums": engine.sums,
        "read_bytes_per_s": bandwidth,
        "matrix_flops_per_s": rate,
        "rows": rows,
        "parts": parts,
    }
    return result | ({"jumps": jumps(rows)} if plan.sweep else {})


def run(args) -> int:
    shell.check_writable(args.json)
    plan = planned(args)
    target, drafter = pair_of(args)
    baseline = []
    if args.baseline:  # before JAX takes most of the GPU's memory
        with shell.progress("Hugging Face generate"):
            baseline = hugging_face.baseline(target, plan.contexts, args.dtype)
    profile.keep_graphs()
    api._keep_compiled_programs()
    if args.kernels and not profile.available():
        raise InputError(f"--kernels needs a GPU; the device is a {jax.default_backend()}")
    mesh = local_mesh(1, args.tp)
    with shell.progress("Random weights") as update:
        engine = Engine(
            dataclasses.replace(target, max_position=max(target.max_position, plan.longest)),
            drafter,
            random_parameters,
            dtype=api.DTYPES[args.dtype],
            mesh=mesh,
            whole_drafter=args.whole_drafter,
            prefill_chunk=args.prefill_chunk,
            attention=args.attention,
        )
        result = measured(engine, plan, args.rounds, update)
    shared = {
        "schema": 1,
        "shape": args.shape,
        "layers": target.num_layers,
        "weights": "random",
        "dtype": args.dtype,
        "tp": args.tp,
        "whole_drafter": args.whole_drafter,
    }
    result = shared | result | {"baseline": baseline}
    if args.json != "-":
        round_tables.show(result, kernels=args.kernels)
    if args.json:
        shell.write_json(args.json, result)
    return shell.OK
