"""scripts/bench.py: measurements of a pair of models."""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.progress import Progress
from rich.table import Table

from ddtree_jax import api
from ddtree_jax.commands import bench_round, shell
from ddtree_jax.commands.prompts import Conversation
from ddtree_jax.engine import Engine, Generation, Options
from ddtree_jax.errors import InputError
from ddtree_jax.training import prompts


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
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--dtype", choices=list(api.DTYPES), default="bfloat16")
    add("--json", metavar="FILE|-")
    add("--debug", action="store_true")
    bench_round.add_parser(commands)
    return parser


def answer_all(
    engine: Engine, conversations: list[Conversation], options: Options, advance=lambda: None
) -> list[list[Generation]]:
    """Every turn of every conversation, answered with the model's own earlier answers."""
    answers: list[list[Generation]] = [[] for _ in conversations]
    for turn in range(max(len(conversation) for conversation in conversations)):
        members = [i for i, conversation in enumerate(conversations) if turn < len(conversation)]
        ids = [
            conversations[i].encode(engine.tokenizer, [each.text or "" for each in answers[i]])
            for i in members
        ]
        results = {}
        for event, generation in engine.run(ids, options):
            results[event.index] = generation
            if event.done:
                advance()
        for place, index in enumerate(members):
            answers[index].append(engine.with_text(results[place]))
    return answers


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


def _checked(args) -> list[int]:
    """The budgets; InputError naming the flag whose value cannot be used."""
    try:
        budgets = [int(part) for part in args.budgets.split(",")]
    except ValueError:
        raise InputError(f"--budgets is {args.budgets!r}; expected numbers as in 15,31") from None
    for budget in budgets:
        if not 1 <= budget <= 511:
            raise InputError(f"--budgets holds {budget}; expected 1 to 511 nodes")
    for name in ("limit", "batch_size", "max_new_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is {value}; expected at least 1")
    return budgets


def _acceptance(args) -> int:
    if args.json:
        shell.check_writable(args.json)
    if (args.target is None) != (args.draft is None):
        raise InputError("--target and --draft go together")
    budgets = _checked(args)
    shared = dict(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
    modes = [Options(mode="ar", **shared), Options(mode="dflash", **shared)]
    modes += [Options(mode="ddtree", tree_budget=budget, **shared) for budget in budgets]
    sets = prompts.load_evaluation(args.eval) if args.eval else prompts.evaluation_sets()
    console = shell.console(stderr=True)
    engine = api.load(
        args.target or api.BUNDLED,
        args.draft or api.BUNDLED,
        dtype=args.dtype,
        batch_size=args.batch_size,
    )
    # One batch of all sets: rows stay busy, and no set compiles programs of its own.
    conversations = [
        Conversation(tuple(each)) for turns in sets.values() for each in turns[: args.limit]
    ]
    names = [name for name, turns in sets.items() for _ in turns[: args.limit]]
    longest = max(len(conversation.encode(engine.tokenizer, [])) for conversation in conversations)
    for options in modes:
        engine.prepare(options, longest)
    rows: list[dict[str, Any]] = []
    reference: list[list[Generation]] = []
    with Progress(console=console, transient=True) as progress:
        for options in modes:
            label = options.mode + (f" {options.tree_budget}" if options.tree_budget else "")
            task = progress.add_task(label, total=sum(map(len, conversations)))
            results = answer_all(
                engine, conversations, options, lambda task=task: progress.advance(task)
            )
            progress.remove_task(task)
            reference = reference or results
            row: dict[str, Any] = {
                "mode": options.mode,
                "tree_budget": options.tree_budget,
                "sets": {},
            }
            for name in sets:
                members = [i for i, each in enumerate(names) if each == name]
                mine, theirs = (
                    [answer for i in members for answer in answers[i]]
                    for answers in (results, reference)
                )
                row["sets"][name] = _measure(mine, theirs)
            taus = [each["tau"] for each in row["sets"].values() if each["tau"] is not None]
            row["mean_tau"] = float(np.mean(taus)) if taus else None
            rows.append(row)
            console.print(f"{label}: mean tau {row['mean_tau'] or 0:.3f}")
    table = Table(title=f"Acceptance length (tau), {jax.devices()[0].device_kind}")
    for column in ("mode", *sets, "mean", "same as AR"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in rows:
        answers = sum(each["answers"] for each in row["sets"].values())
        same = sum(each["same_as_ar"] for each in row["sets"].values())
        cells = [f"{each['tau'] or 0:.2f}" for each in row["sets"].values()]
        label = row["mode"] + (f" {row['tree_budget']}" if row["tree_budget"] else "")
        table.add_row(label, *cells, f"{row['mean_tau'] or 0:.2f}", f"{same} of {answers}")
    if args.json != "-":
        shell.console().print(table)
    if args.json:
        result = {
            "schema": 1,
            "device": jax.devices()[0].device_kind,
            "dtype": args.dtype,
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "seed": args.seed,
            "rows": rows,
        }
        shell.write_json(args.json, result)
    return shell.OK


def command(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    return bench_round.run(args) if args.command == "round" else _acceptance(args)


def main(argv: Sequence[str] | None = None) -> int:
    return shell.run(command, sys.argv[1:] if argv is None else argv)
