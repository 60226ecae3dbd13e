"""`bench.py startup`: seconds from the start of a process to its first token, weights apart.

Two processes one after the other, with random weights: the first compiles into an empty folder, the
second finds there what is kept between processes. `python -m ddtree_jax.commands.bench_startup` is
such a process: it reads what to do from standard input and prints what it took.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ddtree_jax import api
from ddtree_jax.commands import shell
from ddtree_jax.engine import ATTENTION, Engine, Options
from ddtree_jax.errors import InputError, RunError
from ddtree_jax.shapes import SHAPES


def add_parser(commands) -> None:
    parser = commands.add_parser("startup", help="seconds to the first token, cold and warm")
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    add("--budget", type=int, default=63, help="tree budget")
    add("--prompt", type=int, default=64, metavar="N", help="prompt tokens")
    add("--dtype", choices=list(api.DTYPES), default="bfloat16")
    add("--attention", choices=list(ATTENTION), default="auto")
    add("--json", metavar="FILE|-")
    add("--debug", action="store_true")


def _start(request: dict[str, Any], cache: str, debug: bool) -> dict[str, Any]:
    """One process; nothing that the user keeps compiled takes part."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__, *(["--debug"] if debug else [])],
        input=json.dumps(request | {"started": time.time()}),
        env=environment | {"DDTREE_JAX_CACHE": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        if debug:
            print(done.stderr, end="", file=sys.stderr)
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        said = lines[-1].removeprefix("error: ")
        if done.returncode == shell.BAD_INPUT:
            raise InputError(said)
        raise RunError(f"the started process failed: {said}")
    return json.loads(done.stdout.splitlines()[-1])


def run(args) -> int:
    shell.check_writable(args.json)
    if args.prompt < 1:
        raise InputError(f"--prompt is {args.prompt}; expected at least 1")
    if not 1 <= args.budget <= 511:
        raise InputError(f"--budget is {args.budget}; expected 1 to 511 nodes")
    longest = SHAPES[args.shape][0].max_position
    if args.prompt >= longest:
        raise InputError(f"--prompt is {args.prompt}; expected fewer than {longest} for this shape")
    request = {name: getattr(args, name) for name in ("shape", "budget", "prompt", "dtype")}
    request["attention"] = args.attention
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for label in ("cold", "warm"):
            with shell.progress(f"A {label} process"):
                row = {"label": label} | _start(request, cache, args.debug)
            files = [path for path in Path(cache).rglob("*") if path.is_file()]
            rows.append(row | {"cache_bytes": sum(path.stat().st_size for path in files)})
    device, attention = rows[0].pop("device"), rows[0].pop("attention")
    rows[1].pop("device")
    rows[1].pop("attention")
    programs = list(rows[0]["programs_s"])
    table = Table(
        title=f"{args.shape}, random weights, {args.dtype}, {device}, attention: {attention}; "
        "seconds"
    )
    for column in (
        "process",
        "first token",
        "imports, device",
        *programs,
        "first round",
        "weights",
    ):
        table.add_column(column, justify="left" if column == "process" else "right")
    for row in rows:
        numbers = [row["first_token_s"], row["begin_s"], *row["programs_s"].values()]
        numbers += [row["first_round_s"], row["weights_s"]]
        table.add_row(row["label"], *(f"{number:.2f}" for number in numbers))
    if args.json != "-":
        out = shell.console()
        out.print(table)
        out.print(
            "Programs: until each was ready, from the same moment on. First token and round: from "
            "the start of the process, without the weights."
        )
    if args.json:
        shared = request | {"schema": 1, "device": device, "attention": attention}
        shell.write_json(args.json, shared | {"rows": rows})
    return shell.OK


def _main(_: Sequence[str]) -> int:
    import jax
    import numpy as np

    from ddtree_jax.commands.bench_round import random_parameters

    request = json.load(sys.stdin)
    api._keep_compiled_programs()
    target, drafter = SHAPES[request["shape"]]
    device = jax.devices()[0].device_kind
    begin_s = time.time() - request["started"]

    # The weights come first and alone, so that their time can be left out.
    began = time.time()
    engine = Engine(
        target,
        drafter,
        random_parameters,
        dtype=api.DTYPES[request["dtype"]],
        attention=request["attention"],
    )
    jax.block_until_ready(engine._leaves.result())
    weights_s = time.time() - began

    began = time.time()
    ready: dict[str, float] = {}
    options = Options(tree_budget=request["budget"], max_new_tokens=64, stop_ids=())
    engine.prepare(options, request["prompt"])

    def note(name: str, _) -> None:
        ready[name] = time.time() - began

    for key, program in engine._programs.items():
        program.add_done_callback(functools.partial(note, key[0]))
    prompt = np.random.default_rng(0).integers(target.vocab_size, size=request["prompt"])
    stamps = []
    for _event in engine.run([prompt.tolist()], options):
        stamps.append(begin_s + time.time() - began)
        if len(stamps) == 2:
            break
    result = {
        "device": device,
        "attention": engine.attention,
        "begin_s": begin_s,
        "weights_s": weights_s,
        "programs_s": ready,
        "first_token_s": stamps[0],
        "first_round_s": stamps[1],
    }
    print(json.dumps(result))
    return shell.OK


if __name__ == "__main__":
    sys.exit(shell.run(_main, sys.argv[1:]))
