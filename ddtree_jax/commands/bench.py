"""scripts/bench.py: measurements of a pair of models."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.progress import Progress
from rich.table import Table

from ddtree_jax import api
from ddtree_jax.commands import (
    bench_all_sum,
    bench_kernels,
    bench_products,
    bench_round,
    bench_startup,
    bench_throughput,
    plot,
    shell,
)
from ddtree_jax.commands.prompts import Conversation
from ddtree_jax.commands.sets import answer_all, evaluation
from ddtree_jax.engine import Generation, Options
from ddtree_jax.errors import InputError


def _parser() -> shell.Parser:
    parser = shell.Parser(prog="bench.py", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=shell.Parser)
    acceptance = commands.add_parser(
        "acceptance", help="acceptance length on HumanEval, MT-Bench and GSM8K prompts"
    )
    add = acceptance.add_argument
    add("--target", metavar="PATH|ID")
    add("--draft", metavar="PATH|ID")
    add(
        "--eval",
        metavar="FILE",
        help="JSON lines from `python -m ddtree_jax.training.prompts` "
        "(default: read from the installed packages)",
    )
    add("--limit", type=int, metavar="N", help="conversations per set (default: all)")
    add("--budgets", default="15,31,63,127", help="tree budgets")
    add("--batch-size", type=int, default=1)
    add("--max-new-tokens", type=int, default=256)
    add("--temperature", type=float, default=0.0, help="above 0, greedy is measured beside it")
    add("--seeds", default="0", metavar="S,...", help="all sets once with each")
    add("--draft-noise", default="on", metavar="on,off", help="at T > 0: on, off or both")
    add("--dtype", choices=list(api.DTYPES), default="bfloat16")
    add("--json", metavar="FILE|-")
    add("--plot", metavar="FILE.svg", help="acceptance by depth")
    shell.add_mesh_flags(acceptance)
    add("--debug", action="store_true")
    bench_round.add_parser(commands)
    bench_throughput.add_parser(commands)
    bench_startup.add_parser(commands)
    bench_products.add_parser(commands)
    bench_kernels.add_parser(commands)
    bench_all_sum.add_parser(commands)
    return parser


def _measure(generations: list[Generation], reference: list[Generation]) -> dict[str, Any]:
    """Acceptance of one mode on one set; tau is the mean over all rounds of the set."""
    lengths = [length for generation in generations for length in generation.accept_lengths]
    same = [a.output_ids == b.output_ids for a, b in zip(generations, reference, strict=True)]
    return {
        "answers": len(generations),
        "tokens": sum(len(generation.output_ids) for generation in generations),
        "rounds": len(lengths),
        "tau": float(np.mean(lengths)) if lengths else None,
        "accept_length_counts": np.bincount(lengths or [0]).tolist(),
        "same_as_ar": sum(same),
    }


def by_depth(accept_length_counts: Sequence[Sequence[int]]) -> list[float]:
    """The fraction of rounds that accepted a node of depth 1, 2, ... of the tree.

    A round of length n accepted n - 1 nodes. The last round of a text may be cut by its end.
    """
    counts = np.zeros(max(map(len, accept_length_counts)), int)
    for each in accept_length_counts:
        counts[: len(each)] += each
    at_least = counts[::-1].cumsum()[::-1]
    return (at_least[2:] / max(at_least[0], 1)).tolist()


def _numbers(flag: str, given: str, example: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise InputError(f"{flag} is {given!r}; expected numbers as in {example}") from None


def _checked(args) -> tuple[list[int], list[int], list[bool]]:
    """Budgets, seeds and draft noises; InputError naming the flag whose value cannot be used."""
    budgets = _numbers("--budgets", args.budgets, "15,31")
    for budget in budgets:
        if not 1 <= budget <= 511:
            raise InputError(f"--budgets holds {budget}; expected 1 to 511 nodes")
    noises = args.draft_noise.split(",")
    if not set(noises) <= {"on", "off"}:
        raise InputError(f"--draft-noise is {args.draft_noise!r}; expected on, off or on,off")
    for name in ("limit", "batch_size", "max_new_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is {value}; expected at least 1")
    seeds = _numbers("--seeds", args.seeds, "0,1,2")
    if not all(0 <= seed < 2**32 for seed in seeds):
        raise InputError(f"--seeds is {args.seeds!r}; expected numbers from 0 to 2^32 - 1")
    return budgets, seeds, [noise == "on" for noise in noises]


def _plan(args) -> list[tuple[str, list[Options]]]:
    """What is measured: a name, and its options with each seed. Greedy first, then at T."""
    budgets, seeds, noises = _checked(args)
    plan: list[tuple[str, list[Options]]] = []
    for temperature in dict.fromkeys((0.0, args.temperature)):
        hot = temperature > 0
        modes: list[dict[str, Any]] = [dict(mode="ar")]
        for noise in noises if hot else [True]:
            modes.append(dict(mode="dflash", draft_noise=noise))
            modes += [
                dict(mode="ddtree", tree_budget=budget, draft_noise=noise) for budget in budgets
            ]
        for mode in modes:
            label = mode["mode"] + (f" {mode['tree_budget']}" if "tree_budget" in mode else "")
            if hot:
                label += f", T {temperature:g}"
                label += ", noise-blind" if not mode.get("draft_noise", True) else ""
            shared = dict(max_new_tokens=args.max_new_tokens, temperature=temperature)
            each_seed = [Options(**mode, **shared, seed=seed) for seed in (seeds if hot else [0])]
            plan.append((label, each_seed))
    return plan


def _acceptance(args) -> int:
    if args.plot == "-":
        raise InputError("--plot is '-'; expected a file to write")
    shell.check_writable(args.json)
    shell.check_writable(args.plot, "--plot")
    if (args.target is None) != (args.draft is None):
        raise InputError("--target and --draft go together")
    plan = _plan(args)
    sets = evaluation(args.eval)
    console = shell.console(stderr=True)
    engine = api.load(
        args.target or api.BUNDLED,
        args.draft or api.BUNDLED,
        dtype=args.dtype,
        batch_size=args.batch_size,
        data=args.data,
        tp=args.tp,
    )
    # One batch of all sets: rows stay busy, and no set compiles programs of its own.
    conversations = [
        Conversation(tuple(each)) for turns in sets.values() for each in turns[: args.limit]
    ]
    names = [name for name, turns in sets.items() for _ in turns[: args.limit]]
    longest = max(len(conversation.encode(engine.tokenizer, [])) for conversation in conversations)
    for _, each_seed in plan:
        engine.prepare(each_seed[0], longest)
    rows: list[dict[str, Any]] = []
    reference: dict[tuple[float, int], list[list[Generation]]] = {}
    with Progress(console=console, transient=True) as progress:
        for label, each_seed in plan:
            first = each_seed[0]
            speculates = first.mode != "ar"
            total = len(each_seed) * sum(map(len, conversations))
            task = progress.add_task(label, total=total)
            results = []
            for options in each_seed:
                answers = answer_all(
                    engine, conversations, options, lambda task=task: progress.advance(task)
                )
                expected = reference.setdefault((options.temperature, options.seed), answers)
                results.append((answers, expected))
            progress.remove_task(task)
            row: dict[str, Any] = {
                "label": label,
                "mode": first.mode,
                "tree_budget": first.tree_budget,
                "temperature": first.temperature,
                "draft_noise": first.draft_noise if speculates and first.temperature else None,
                "sets": {},
            }
            for name in sets:
                members = [i for i, each in enumerate(names) if each == name]
                mine, theirs = (
                    [[answer for i in members for answer in pair[which][i]] for pair in results]
                    for which in (0, 1)
                )
                row["sets"][name] = _measure(
                    [answer for each in mine for answer in each],
                    [answer for each in theirs for answer in each],
                ) | {"tau_by_seed": [_measure(each, each)["tau"] for each in mine]}
            means = [each["tau"] for each in row["sets"].values() if each["tau"] is not None]
            row["mean_tau"] = float(np.mean(means)) if means else None
            counts = [each["accept_length_counts"] for each in row["sets"].values()]
            row["acceptance_by_depth"] = by_depth(counts)
            rows.append(row)
            console.print(f"{label}: mean tau {row['mean_tau'] or 0:.3f}")
    table = Table(title=f"Acceptance length (tau), {jax.devices()[0].device_kind}")
    for column in ("mode", *sets, "mean", "same as AR"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in rows:
        count = sum(each["answers"] for each in row["sets"].values())
        same = sum(each["same_as_ar"] for each in row["sets"].values())
        cells = [f"{each['tau'] or 0:.2f}" for each in row["sets"].values()]
        table.add_row(row["label"], *cells, f"{row['mean_tau'] or 0:.2f}", f"{same} of {count}")
    if args.json != "-":
        shell.console().print(table)
    if args.plot:
        lines = {r["label"]: r["acceptance_by_depth"] for r in rows if r["mode"] != "ar"}
        title = "Fraction of rounds that accept a node of this depth"
        with shell.atomic(Path(args.plot)) as temporary:
            temporary.write_text(plot.fractions(title, lines, "depth"), encoding="utf-8")
    if args.json:
        result = {
            "schema": 1,
            "device": jax.devices()[0].device_kind,
            "target": str(args.target or api.BUNDLED),
            "draft": str(args.draft or api.BUNDLED),
            "dtype": args.dtype,
            "batch_size": args.batch_size,
            "data": args.data,
            "tp": args.tp,
            "limit": args.limit,
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "seeds": [options.seed for options in plan[-1][1]],
            "rows": rows,
        }
        shell.write_json(args.json, result)
    return shell.OK


def command(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.command == "throughput":
        return bench_throughput.run(args, argv)
    runs = {
        "acceptance": _acceptance,
        "round": bench_round.run,
        "startup": bench_startup.run,
        "products": bench_products.run,
        "kernels": bench_kernels.run,
        "all-sum": bench_all_sum.run,
    }
    return runs[args.command](args)


def main(argv: Sequence[str] | None = None) -> int:
    return shell.run(command, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":  # a worker of several processes (processes.py)
    sys.exit(main())
