"""The command line: `python -m convert SRC DST`, and `inspect`, `check`, `doctor`.

Exit codes: 0; 1 a failed run; 2 bad usage or input; 130 interrupted. Errors are one sentence on
stderr; --debug adds the traceback.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ddtree_jax.commands import shell
from ddtree_jax.errors import InputError

DTYPES = ("bfloat16", "float32")
_USAGE = """\
python -m convert SRC DST [options]
       python -m convert inspect PATH [options]
       python -m convert check TARGET DRAFT [options]
       python -m convert doctor TARGET DRAFT"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(f"{message}; see python -m convert --help")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive.__name__ = "positive integer"  # argparse names the type in its message


def _parser(command: str) -> argparse.ArgumentParser:
    if command == "convert":
        parser = _Parser(
            prog="python -m convert",
            usage=_USAGE,
            allow_abbrev=False,
            description="Converts a model to a Flax/Orbax checkpoint.",
        )
        parser.add_argument(
            "src", metavar="SRC", help="Hugging Face folder or Hub id, GGUF file, or 'bundled'"
        )
        parser.add_argument("dst", metavar="DST", help="new folder, or an older conversion")
        parser.add_argument("--drafter", action="store_true", help="SRC is a DFlash drafter")
        parser.add_argument("--dtype", choices=DTYPES, help="default: that of the source")
        parser.add_argument(
            "--verify", action="store_true", help="read the result back and compare every bit"
        )
    elif command == "inspect":
        parser = _Parser(
            prog="python -m convert inspect",
            allow_abbrev=False,
            description="Shows a model's architecture, sizes, warnings and memory per GPU.",
        )
        parser.add_argument("path", metavar="PATH", help="any form that can be converted or loaded")
        parser.add_argument("--tp", type=_positive, default=1, help="GPUs to share the model (1)")
        parser.add_argument(
            "--max-length", type=_positive, default=4096, help="positions of the cache (4096)"
        )
        parser.add_argument("--dtype", choices=DTYPES, help="default: that of the model")
    else:
        parser = _Parser(
            prog=f"python -m convert {command}",
            allow_abbrev=False,
            description="Checks statically that a drafter can draft for a target.",
        )
        parser.add_argument("target", metavar="TARGET")
        parser.add_argument("draft", metavar="DRAFT")
    if command != "check":
        parser.add_argument("--revision", help="of a Hub id")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; nothing when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _convert(args: argparse.Namespace) -> None:
    import convert
    from convert.store import path_size

    source = convert.open_model(args.src, drafter=args.drafter, revision=args.revision)
    with _progress(f"Converting {source.kind}") as progress:
        folder = convert.convert(
            source, args.dst, dtype=args.dtype, verify=args.verify, progress=progress
        )
    size = path_size(folder) / 1e6
    verified = ", verified" if args.verify else ""
    dtype = args.dtype or source.default_dtype
    print(f"{args.dst}: {source.kind}, {dtype}, {size:,.0f} MB{verified}")


def _inspect(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from convert import open_model, report

    source = open_model(args.path, drafter=None, revision=args.revision)
    source.check()
    table = Table(title=str(args.path), show_header=False, title_justify="left")
    for label, value in report.facts(source).items():
        table.add_row(label, value)
    table.add_section()
    memory = report.memory(source, args.tp, args.max_length, args.dtype or source.default_dtype)
    where = "one GPU" if args.tp == 1 else f"each of {args.tp} GPUs"
    table.add_row(f"memory of {where}", f"{memory.dtype}, one sequence")
    table.add_row("  weights", f"{memory.weights / report.GIB:.2f} GiB")
    table.add_row(f"  cache, {memory.max_length} positions", f"{memory.cache / report.GIB:.2f} GiB")
    table.add_row("  total", f"{memory.total / report.GIB:.2f} GiB")
    for card in report.CARDS_GB:
        table.add_row(f"  fits {card} GB (10 % kept free)", "yes" if memory.fits(card) else "no")
    console = Console()
    console.print(table)
    for warning in report.warnings(source, args.tp, args.max_length):
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)


def _check(args: argparse.Namespace) -> None:
    from convert import open_model
    from ddtree_jax.config import pair_problems

    problems: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except InputError as error:
            problems.append(str(error))

    target, draft = None, None
    with noted():
        target = open_model(args.target, drafter=False)
        target.check()
    with noted():
        draft = open_model(args.draft, drafter=True)
        draft.check()
    if target is not None and draft is not None:
        problems += pair_problems(target.config, draft.config, draft.config_file)
    if problems:
        raise InputError("; ".join(problems))
    print(f"{args.draft} can draft for {args.target}")


def _doctor(args: argparse.Namespace) -> None:
    raise InputError("not supported yet: doctor")


_COMMANDS = {"convert": _convert, "inspect": _inspect, "check": _check, "doctor": _doctor}


def _leave_accelerators_alone() -> None:
    """Converting needs none, and JAX would reserve most of a GPU's memory."""
    if "JAX_PLATFORMS" in os.environ:
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # it has read the variable already
        import jax

        jax.config.update("jax_platforms", "cpu")


def _command(argv: Sequence[str]) -> int:
    words = list(argv)
    name = words.pop(0) if words and words[0] in ("inspect", "check", "doctor") else "convert"
    _COMMANDS[name](_parser(name).parse_args(words))
    return shell.OK


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return shell.run(_command, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    if sys.argv[1:2] != ["doctor"]:
        _leave_accelerators_alone()
    sys.exit(main())
