"""What every command shares: exit codes, one-sentence errors, atomic JSON output."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ddtree_jax.errors import InputError, RunError

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence, without the usage text."""

    def error(self, message: str):
        raise InputError(message)


def add_mesh_flags(parser: Any) -> None:
    """--tp and --data, on how many devices to run."""
    add = parser.add_argument
    add("--tp", type=int, default=1, metavar="N", help="devices that share the models (default: 1)")
    add(
        "--data", type=int, default=1, metavar="N", help="shares of the batch, on --tp devices each"
    )


def run(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Runs a command and turns exceptions into exit codes; --debug shows the traceback."""
    debug = "--debug" in argv

    def fail(error: BaseException, code: int, message: str) -> int:
        if debug:
            traceback.print_exception(error)
        print("error: " + " ".join(message.split()), file=sys.stderr)
        return code

    try:
        return command(argv)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except InputError as error:
        return fail(error, BAD_INPUT, str(error))
    except RunError as error:
        return fail(error, FAILED, str(error))
    except KeyboardInterrupt as error:
        return fail(error, INTERRUPTED, "interrupted")
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return fail(error, FAILED, message + " (--debug shows where)")


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Where tables go: as wide as the terminal, and wide enough where there is none."""
    made = Console(stderr=stderr, quiet=quiet)
    return made if made.is_terminal else Console(stderr=stderr, quiet=quiet, width=120)


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Shows on stderr what a command is at, and yields what changes that.

    On a terminal it is one line; elsewhere each is a line of its own, so that a log tells how far a
    command came that did not end.
    """
    made = console(stderr=True)
    if made.is_terminal:
        with made.status(text) as status:
            yield status.update
    else:

        def line(text: str) -> None:
            made.print(text, markup=False, highlight=False)

        line(text)
        yield line


def check_writable(path: str | None, flag: str = "--json") -> None:
    """Raises InputError if `path` cannot be written, before any work is done.

    "-" is stdout, None is that nothing was asked for.
    """
    if path is None or path == "-":
        return
    target = Path(path).resolve()
    if not path:
        raise InputError(f"{flag} is empty; expected a file to write")
    if target.is_dir():
        raise InputError(f"{path}: is a folder; expected a file to write, or -")
    if target.exists():
        special = not target.is_file()
        place = target if special else target.parent
    else:
        place = next(parent for parent in target.parents if parent.exists())
    if not target.exists() and not place.is_dir():
        raise InputError(f"{path}: cannot be written ({place} is no folder)")
    if not os.access(place, os.W_OK):
        raise InputError(f"{path}: cannot be written (no permission for {place})")
    if place.is_dir():
        try:  # not every file system says what it refuses, to root above all
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror}: {place})") from None


def write_json(path: str, value: Any) -> None:
    """Writes JSON to stdout ("-") or a file; a partial file never carries the final name."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with atomic(Path(path)) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it if the block succeeds, else removed.

    A link is followed. What is no regular file (a pipe, a device) is written directly.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
