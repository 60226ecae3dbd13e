"""`bench.py throughput`: prompt sets decoded by all rows of all devices of all processes."""

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.table import Table

from ddtree_jax import api
from ddtree_jax.commands import processes, shell
from ddtree_jax.commands.prompts import Conversation
from ddtree_jax.commands.sets import answer_all, evaluation
from ddtree_jax.engine import ATTENTION, MODES, Engine, Options, bucket, default_budget
from ddtree_jax.errors import InputError


def add_parser(commands) -> None:
    parser = commands.add_parser("throughput", help="tokens per second of whole prompt sets")
    add = parser.add_argument
    add("--target", metavar="PATH|ID")
    add("--draft", metavar="PATH|ID")
    add("--eval", metavar="FILE", help="JSON lines, as for acceptance")
    add("--limit", type=int, metavar="N", help="conversations per set (default: all)")
    add("--mode", choices=MODES, default="ddtree")
    add("--tree-budget", type=int, metavar="N")
    add("--batch-size", type=int, metavar="N", help="rows of each process (default: --data)")
    add("--max-new-tokens", type=int, default=256)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=0)
    add("--ignore-eos", action="store_true")
    add("--dtype", choices=list(api.DTYPES), default="bfloat16")
    add("--attention", choices=list(ATTENTION), default="auto")
    add("--json", metavar="FILE|-")
    add("--debug", action="store_true")
    shell.add_mesh_flags(parser)
    processes.add_flags(parser)


def run(args, argv: Sequence[str]) -> int:
    shell.check_writable(args.json)
    if args.draft is not None and args.target is None:
        raise InputError("--draft needs --target: a drafter works only with its own target")
    if args.target is not None and args.draft is None and args.mode != "ar":
        raise InputError(f"--target alone serves --mode ar; --mode {args.mode} needs --draft too")
    for name in ("limit", "batch_size", "data", "tp"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; expected at least 1")
    options = Options(
        mode=args.mode,
        tree_budget=args.tree_budget,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stop_ids=() if args.ignore_eos else None,
    )
    where = processes.place(args, args.data * args.tp)
    sets = evaluation(args.eval)
    sets = {name: turns[: args.limit] for name, turns in sets.items()}
    if where is None:
        return _report(args, None, *_decode(args, options, sets, None))
    if not args.worker:
        return processes.supervise(argv, where)
    with processes.failing_at_once():
        processes.join(where, args.heartbeat)
        results = _decode(args, options, sets, where)
        return _report(args, where, *results) if where.rank == 0 else shell.OK


def _slots(engine: Engine, conversations: Sequence[Conversation], options: Options) -> int:
    """Cache slots that serve every turn, so that there is one program and each process has it."""
    longest = 0
    for each in conversations:
        said = len(each.encode(engine.tokenizer, [""] * (len(each) - 1)))
        longest = max(longest, said + len(each) * options.max_new_tokens)
    return bucket(min(longest, engine.max_length))


def _decode(
    args, options: Options, sets: dict[str, list], where: processes.Place | None
) -> tuple[Engine, list[dict[str, Any]]]:
    """Decodes this process's share of every set; the measurements of all processes."""
    rank, count = (0, 1) if where is None else (where.rank, where.count)
    engine = api.load(
        args.target or api.BUNDLED,
        args.draft if args.target else api.BUNDLED,
        dtype=args.dtype,
        batch_size=args.data if args.batch_size is None else args.batch_size,
        attention=args.attention,
        data=args.data,
        tp=args.tp,
    )
    everyone = {name: [Conversation(tuple(each)) for each in sets[name]] for name in sets}
    every = [conversation for each in everyone.values() for conversation in each]
    slots = _slots(engine, every, options)
    # Compiled, and run once, before anything is measured.
    first = every[0].encode(engine.tokenizer, [])
    for event, _ in engine.run([first], options, min_slots=slots):
        if not event.from_prefill:
            break
    # What a process of other models or options answers would be counted, too.
    asked = _settings(args, engine) | {"attention": engine.attention, "processes": count}
    if where is not None:
        processes.agree(where, asked | {"models": _models(engine), "prompts": _digest(sets)})
    processes.meet(where, "ready")
    mine: dict[str, Any] = {}
    for name, conversations in everyone.items():
        started = time.perf_counter()
        answers = answer_all(engine, conversations[rank::count], options, min_slots=slots)
        seconds = time.perf_counter() - started
        generations = [turn for conversation in answers for turn in conversation]
        texts = [[turn.output_ids for turn in conversation] for conversation in answers]
        mine[name] = {
            "prompts": len(generations),
            "tokens": sum(len(each.output_ids) for each in generations),
            "rounds": sum(each.rounds for each in generations),
            "committed": sum(sum(each.accept_lengths) for each in generations),
            "seconds": seconds,
            "sha256": [_digest(text) for text in texts],
        }
    return engine, processes.gather(where, mine)


def _settings(args, engine: Engine) -> dict[str, Any]:
    """What a run is, the models apart."""
    tree_budget = None
    if args.mode == "ddtree":
        tree_budget = default_budget() if args.tree_budget is None else args.tree_budget
    same = ("limit", "max_new_tokens", "temperature", "seed", "ignore_eos", "dtype", "data", "tp")
    settings = {"mode": args.mode, "tree_budget": tree_budget, "batch_size": engine.batch_size}
    return settings | {name: getattr(args, name) for name in same}


def _models(engine: Engine) -> str:
    """Tells models apart by their configurations and their vectors, those of the norms above all.

    Training moves them, and they are few, where the whole of the weights would take a while.
    """
    found = hashlib.sha256(repr((engine.target, engine.drafter)).encode())
    for name, leaf in zip(engine._leaf_names, engine._leaves.result(), strict=True):
        if leaf.ndim == 1:
            found.update(name.encode() + np.asarray(leaf).tobytes())
    return found.hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One set's numbers from those of the processes; it took as long as the slowest of them."""
    total = {
        key: sum(part[key] for part in parts)
        for key in ("prompts", "tokens", "rounds", "committed")
    }
    seconds = max(part["seconds"] for part in parts)
    # Conversation i was answered by process i modulo their number.
    texts = [""] * sum(len(part["sha256"]) for part in parts)
    for rank, part in enumerate(parts):
        texts[rank :: len(parts)] = part["sha256"]
    return {
        "prompts": total["prompts"],
        "tokens": total["tokens"],
        "rounds": total["rounds"],
        "tau": total["committed"] / total["rounds"] if total["rounds"] else None,
        "output_sha256": _digest(texts),
        "seconds": seconds,
        "tokens_per_s": total["tokens"] / seconds,
    }


def _report(args, where: processes.Place | None, engine: Engine, parts: list) -> int:
    count = 1 if where is None else where.count
    sets = {name: _merged([part[name] for part in parts]) for name in parts[0]}
    device = jax.local_devices()[0].device_kind
    settings = _settings(args, engine)
    label = args.mode + (f" {settings['tree_budget']}" if args.mode == "ddtree" else "")
    each = f" in each of {count} processes" if count > 1 else ""
    table = Table(
        title=f"{label}, {args.dtype}, {args.data * args.tp} x {device}{each}, data {args.data}, "
        f"tp {args.tp}, attention: {engine.attention}",
        title_justify="left",
    )
    for column in ("set", "prompts", "tokens", "tau", "tokens/s"):
        table.add_column(column, justify="left" if column == "set" else "right")
    for name, row in sets.items():
        tau = "-" if row["tau"] is None else f"{row['tau']:.3f}"
        speed = f"{row['tokens_per_s']:.1f}"
        table.add_row(name, str(row["prompts"]), str(row["tokens"]), tau, speed)
    if args.json != "-":
        shell.console().print(table)
    if args.json:
        result = {
            "schema": 1,
            **settings,
            "target": str(args.target or api.BUNDLED),
            "draft": str((args.draft if args.target else api.BUNDLED) or "none"),
            "attention": engine.attention,
            "device": device,
            "processes": count,
            "sets": sets,
        }
        shell.write_json(args.json, result)
    return shell.OK
