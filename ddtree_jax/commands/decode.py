"""scripts/decode.py: decode prompts with a pair of models, show text and statistics."""

import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from ddtree_jax import api, text
from ddtree_jax.commands import prompts as prompt_files
from ddtree_jax.commands import shell
from ddtree_jax.commands.prompts import Conversation
from ddtree_jax.engine import ATTENTION, MODES, Engine, Generation, Options, sampler_of
from ddtree_jax.errors import InputError, RunError

BUILT_IN_PROMPT = "What is the water cycle?"

# Flags of the contract whose feature does not exist yet: parsed, and refused by name.
_NOT_YET: dict[str, dict[str, Any]] = {
    "--trace": {"metavar": "FILE"},
    "--chat": {"action": "store_true", "default": None},
}


def _parser() -> shell.Parser:
    parser = shell.Parser(
        prog="decode.py",
        description="Decode with DDTree. With no option: the bundled pair and a built-in prompt.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt", nargs="*", metavar="PROMPT")
    models = parser.add_argument_group("models")
    models.add_argument(
        "--target",
        metavar="PATH|ID",
        help="Hugging Face folder or Hub id, or a "
        "converted checkpoint (default: the bundled SmolLM2-135M-Instruct)",
    )
    models.add_argument("--draft", metavar="PATH|ID", help="DFlash drafter, likewise")
    models.add_argument("--revision", help="of the target's Hub id")
    models.add_argument("--draft-revision", help="of the drafter's Hub id")
    models.add_argument("--dtype", choices=list(api.DTYPES), default="bfloat16")
    models.add_argument("--attention", choices=list(ATTENTION), default="auto")
    models.add_argument(
        "--batch-size", type=int, metavar="N", help="rows decoded together (default: --n, --data)"
    )
    models.add_argument("--max-length", type=int, metavar="N", help="prompt plus output")
    models.add_argument("--prefill-chunk", type=int, metavar="N")
    shell.add_mesh_flags(models)
    algorithm = parser.add_argument_group("algorithm")
    algorithm.add_argument("--mode", choices=MODES, default="ddtree")
    algorithm.add_argument(
        "--tree-budget",
        metavar="N|auto",
        help="nodes beside the root (default: 63 on a GPU, 15 on a CPU)",
    )
    algorithm.add_argument(
        "--chain-seed", action="store_true", help="the tree always holds the drafter's best chain"
    )
    algorithm.add_argument(
        "--draft-noise",
        choices=["on", "off"],
        default="on",
        help="at T > 0, rank the drafter's candidates with the target's noise (default: on)",
    )
    algorithm.add_argument("--compare", action="store_true", help="all modes on the same prompts")
    output = parser.add_argument_group("output")
    output.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    output.add_argument("--temperature", type=float, default=0.0, metavar="T")
    output.add_argument("--seed", type=int, default=0, metavar="S")
    output.add_argument(
        "--n", type=int, default=1, metavar="N", help="samples of each prompt, shown when whole"
    )
    output.add_argument("--top-k", type=int, default=0, metavar="K", help="at T > 0; 0: all")
    output.add_argument("--top-p", type=float, default=1.0, metavar="P")
    output.add_argument("--min-p", type=float, default=0.0, metavar="P")
    output.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    output.add_argument("--presence-penalty", type=float, default=0.0, metavar="P")
    output.add_argument("--frequency-penalty", type=float, default=0.0, metavar="F")
    output.add_argument(
        "--logit-bias", metavar="ID=V", action="append", default=[], help="may be repeated"
    )
    output.add_argument("--min-new-tokens", type=int, default=0, metavar="N")
    output.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="the text ends before it; may be repeated; special tokens are no text",
    )
    output.add_argument(
        "--logprobs", action="store_true", help="of the output tokens, in the result of --json"
    )
    output.add_argument("--ignore-eos", action="store_true")
    output.add_argument("--json", metavar="FILE|-", help="machine-readable result")
    output.add_argument("--quiet", action="store_true", help="no statistics")
    output.add_argument("--no-stream", action="store_true")
    output.add_argument("--debug", action="store_true", help="show tracebacks")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="JSON lines with 'prompt' or 'turns', or plain text, one a line",
    )
    prompts.add_argument("--prompt-ids", metavar="FILE", help="JSON list of token ids, or of lists")
    prompts.add_argument("--raw", action="store_true", help="no chat template")
    prompts.add_argument("--system", metavar="TEXT")
    prompts.add_argument("--thinking", action="store_true", default=None)
    prompts.add_argument("--no-thinking", dest="thinking", action="store_false")
    later = parser.add_argument_group("not supported yet (refused)")
    for flag, details in _NOT_YET.items():
        later.add_argument(flag, **details)
    return parser


def _refuse_unsupported(args) -> None:
    given = [flag for flag in _NOT_YET if getattr(args, flag[2:].replace("-", "_")) is not None]
    if args.tree_budget == "auto":
        given.append("--tree-budget auto")
    if given:
        raise InputError(f"{', '.join(given)}: not supported yet")


def _budget(given: str | None) -> int | None:
    if given is None:
        return None
    try:
        return int(given)
    except ValueError:
        raise InputError(f"--tree-budget is {given!r}; expected a number") from None


def _logit_bias(given: Sequence[str]) -> dict[int, float]:
    found: dict[int, float] = {}
    for entry in given:
        token, _, value = entry.partition("=")
        try:
            number, bias = int(token), float(value)
        except ValueError:
            raise InputError(f"--logit-bias is {entry!r}; expected ID=V, as in 42=-1.5") from None
        if number in found:
            raise InputError(f"--logit-bias names token {number} twice; expected once")
        found[number] = bias
    return found


def _conversations(args) -> list[Conversation]:
    template = args.system is not None or args.thinking is not None
    if args.prompt_ids is not None and (args.raw or template):
        raise InputError("--prompt-ids takes no --raw, --system or --thinking: ids are used as is")
    if args.raw and template:
        raise InputError("--raw takes no --system or --thinking: it uses no chat template")
    sources = [bool(args.prompt), args.prompt_file is not None, args.prompt_ids is not None]
    if sum(sources) > 1:
        raise InputError("give PROMPT, --prompt-file or --prompt-ids, only one of them")
    if args.prompt_file is not None:
        return prompt_files.from_file(args.prompt_file)
    if args.prompt_ids is not None:
        return prompt_files.from_ids_file(args.prompt_ids)
    return prompt_files.from_arguments(args.prompt or [BUILT_IN_PROMPT])


@dataclasses.dataclass
class Run:
    """One answered turn."""

    prompt_index: int
    turn: int
    generation: Generation
    dtype: str
    attention: str

    @property
    def group(self) -> tuple:
        return self.generation.mode, self.generation.tree_budget, self.dtype

    @property
    def label(self) -> str:
        generation = self.generation
        name = generation.mode
        if generation.tree_budget is not None:
            name += f" {generation.tree_budget}"
        return f"{name} ({self.dtype})"

    def to_json(self) -> dict:
        generation = self.generation
        return {
            "prompt_index": self.prompt_index,
            "sample_index": generation.sample_index,
            "turn": self.turn,
            "mode": generation.mode,
            "tree_budget": generation.tree_budget,
            "prompt_tokens": len(generation.prompt_ids),
            "output_ids": generation.output_ids,
            "text": generation.text,
            **({} if generation.log_probs is None else {"logprobs": generation.log_probs}),
            "finish_reason": generation.finish_reason,
            "rounds": generation.rounds,
            "accept_lengths": generation.accept_lengths,
            "tau": generation.tau,
            "time_to_first_token_s": generation.time_to_first_token_s,
            "decode_s": generation.decode_s,
            "tokens_per_s": generation.tokens_per_s,
            "attention": self.attention,
            "device": jax.devices()[0].device_kind,
            "dtype": self.dtype,
        }


class _Session:
    """Decodes conversations turn by turn; keeps every run, also when it is interrupted."""

    def __init__(self, engine: Engine, args, conversations: list[Conversation], status: Console):
        self.engine, self.args, self.conversations = engine, args, conversations
        self.status = status
        self.runs: list[Run] = []
        self.seconds: dict[tuple, float] = {}  # wall time from the first token on, by group

    def _ids(self, conversation: Conversation, answers: list[str]) -> list[int]:
        args = self.args
        return conversation.encode(
            self.engine.tokenizer, answers, raw=args.raw, system=args.system, thinking=args.thinking
        )

    def warm_up(self, options: Options) -> None:
        """Compiles and runs a few rounds, so that no measured run pays for it."""
        ids = [self._ids(conversation, []) for conversation in self.conversations]
        longest = max(ids, key=len)
        with self.status.status(f"Loading and compiling: {options.mode}"):
            for event, _ in self.engine.run([longest], options):
                if not event.from_prefill:
                    break

    def decode(self, options: Options, *, show: bool) -> None:
        """All conversations in one mode; `show` prints the text on stdout."""
        answers: list[list[str]] = [[] for _ in self.conversations]
        for turn in range(max(len(conversation) for conversation in self.conversations)):
            members = [
                index
                for index, conversation in enumerate(self.conversations)
                if turn < len(conversation)
            ]
            ids = [self._ids(self.conversations[index], answers[index]) for index in members]
            names = [f"prompt {index}" + (f", turn {turn}," if turn else "") for index in members]
            self.engine.check(ids, [options] * len(ids), names)
            runs = self._decode_turn(members, turn, ids, options, show)
            # Only where there is one sample of each does a conversation go on.
            for index, run in zip(members, runs[:: options.n], strict=True):
                answers[index].append(run.generation.text or "")

    def _decode_turn(self, members, turn, ids, options: Options, show: bool) -> list[Run]:
        tokenizer = self.engine.tokenizer
        streaming = show and self.engine.batch_size == 1 and not self.args.no_stream
        runs: dict[tuple[int, int], Run] = {}
        in_order, done = list(itertools.product(range(len(ids)), range(options.n))), set()
        decoder = None
        waiting = self.status.status("Loading and compiling")
        waiting.start()
        began = time.perf_counter()
        try:
            for event, generation in self.engine.run(ids, options):
                if event.from_prefill:
                    if not runs:
                        waiting.stop()
                        began = time.perf_counter()
                    run = Run(
                        members[event.index],
                        turn,
                        generation,
                        self.args.dtype,
                        self.engine.attention,
                    )
                    runs[event.index, event.sample] = run
                    self.runs.append(run)
                    if streaming:
                        self._header(run)
                        decoder = None
                        if tokenizer:
                            decoder = text.StreamDecoder(
                                tokenizer, options.stop, options.min_new_tokens
                            )
                if streaming:
                    if decoder:
                        piece = decoder.push(event.tokens, final=event.done)
                    else:
                        piece = "".join(f"{token} " for token in event.tokens)
                    self._show(piece + ("\n" if event.done else ""))
                if event.done:
                    self.engine.with_text(generation)
                    done.add((event.index, event.sample))
                    # In order, whichever ends first: that depends on what was accepted.
                    while show and not streaming and in_order[:1] and in_order[0] in done:
                        self._show_whole(runs[in_order.pop(0)])
        finally:
            waiting.stop()
            for place in in_order if show and not streaming else ():
                if place in done:  # behind one that was interrupted
                    self._show_whole(runs[place])
            for run in runs.values():
                self.engine.with_text(run.generation)
                self.seconds[run.group] = self.seconds.get(run.group, 0.0)
            if runs:
                self.seconds[next(iter(runs.values())).group] += time.perf_counter() - began
        return [runs[place] for place in sorted(runs)]

    def _show_whole(self, run: Run) -> None:
        self._header(run)
        generation = run.generation
        self._show(f"{generation.text if self.engine.tokenizer else generation.output_ids}\n")

    def _show(self, piece: str) -> None:
        """Prints at once. When the reader has gone, decoding goes on only for --json."""
        try:
            print(piece, end="", flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if self.args.json is None:
                raise RunError("stdout was closed before the text ended") from None

    def groups(self) -> list[list[Run]]:
        """The runs by mode, tree budget and dtype."""
        found: dict[tuple, list[Run]] = {}
        for run in self.runs:
            found.setdefault(run.group, []).append(run)
        return list(found.values())

    def _header(self, run: Run) -> None:
        if len(self.conversations) > 1 or len(self.conversations[0]) > 1 or self.args.n > 1:
            name = f"--- prompt {run.prompt_index}" + (f", turn {run.turn}" if run.turn else "")
            name += f", sample {run.generation.sample_index}" if self.args.n > 1 else ""
            self._show(name + "\n")


def _summary(runs: Sequence[Run], seconds: float | None) -> dict[str, Any]:
    """The statistics of one mode; `seconds` is the wall time of rows that were decoded together."""
    generations = [run.generation for run in runs]
    rounds = sum(generation.rounds for generation in generations)
    tokens = sum(len(generation.output_ids) for generation in generations)
    committed = sum(sum(generation.accept_lengths) for generation in generations)
    if seconds is None:
        seconds = sum(generation.decode_s for generation in generations)
    firsts = [generation.time_to_first_token_s for generation in generations]
    return {
        "mode": generations[0].mode,
        "tree_budget": generations[0].tree_budget,
        "dtype": runs[0].dtype,
        "tokens": tokens,
        "rounds": rounds,
        "tau": committed / rounds if rounds else None,
        "tokens_per_s": committed / seconds if seconds else None,
        "time_to_first_token_s": sum(firsts) / len(firsts),
    }


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(session: _Session, *, compare: bool) -> tuple[Table, list[dict[str, Any]]]:
    groups = session.groups()
    device = jax.devices()[0].device_kind
    table = Table(title=f"{device}, attention: {session.engine.attention}", title_justify="left")
    columns = ["mode", "tokens", "rounds", "tau", "tokens/s", "first token, s"]
    for column in [*columns, "speed-up"] if compare else columns:
        table.add_column(column, justify="left" if column == "mode" else "right")
    together = session.engine.batch_size > 1
    rows = [
        _summary(group, session.seconds[group[0].group] if together else None) for group in groups
    ]
    baseline = max(
        (row["tokens_per_s"] for row in rows if row["mode"] == "ar" and row["tokens_per_s"]),
        default=None,
    )
    for row, group in zip(rows, groups, strict=True):
        cells = [
            group[0].label,
            str(row["tokens"]),
            str(row["rounds"]),
            _number(row["tau"]),
            _number(row["tokens_per_s"], 1),
            _number(row["time_to_first_token_s"], 3),
        ]
        if compare:
            speed = row["tokens_per_s"]
            row["speed_up"] = speed / baseline if speed and baseline else None
            cells.append(_number(row["speed_up"]))
        table.add_row(*cells)
    return table, rows


def _disagreements(
    engine: Engine, options: Options, reference: list[Run], group: list[Run]
) -> list[dict]:
    """Where a mode's tokens part from AR's, and how close the target's choice was at that place.

    The latter is None where it depended on penalties, or where filters left a single token.
    """
    found = []
    single = dataclasses.replace(options, n=1)
    for ar, run in zip(reference, group, strict=True):
        expected, got = ar.generation.output_ids, run.generation.output_ids
        if expected == got or ar.generation.prompt_ids != run.generation.prompt_ids:
            continue
        place = next(
            (i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]),
            min(len(expected), len(got)),
        )
        gap = None
        if not sampler_of([options]).penalties:
            gap = engine.top2_gap(
                [*ar.generation.prompt_ids, *expected[:place]],
                single,
                sample=run.generation.sample_index,
                emitted=place,
            )
            gap = gap if math.isfinite(gap) else None
        found.append(
            {
                "prompt_index": run.prompt_index,
                "sample_index": run.generation.sample_index,
                "turn": run.turn,
                "mode": run.generation.mode,
                "tree_budget": run.generation.tree_budget,
                "dtype": run.dtype,
                "position": place,
                "top2_gap": gap,
            }
        )
    return found


def command(argv: Sequence[str]) -> int:
    """Runs the command line; see the contract in the README."""
    args = _parser().parse_args(argv)
    _refuse_unsupported(args)
    if args.target is not None and args.draft is None and (args.mode != "ar" or args.compare):
        wish = "--compare" if args.compare else f"--mode {args.mode}"
        raise InputError(f"--target alone serves --mode ar; {wish} needs --draft too")
    if args.target is None and (args.revision or args.draft_revision):
        raise InputError("--revision needs --target: the bundled pair has no revisions")
    if args.draft is not None and args.target is None:
        raise InputError("--draft needs --target: a drafter works only with its own target")
    shell.check_writable(args.json)
    options = Options(
        mode=args.mode,
        tree_budget=_budget(args.tree_budget),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stop_ids=() if args.ignore_eos else None,
        chain_seed=args.chain_seed,
        draft_noise=args.draft_noise == "on",
        n=args.n,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        logit_bias=_logit_bias(args.logit_bias),
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        min_new_tokens=args.min_new_tokens,
        stop=tuple(args.stop),
        log_probs=args.logprobs,
    )
    if args.stop and args.prompt_ids is not None:
        raise InputError("--stop needs a tokenizer; --prompt-ids loads none")
    if args.logprobs and args.json is None:
        raise InputError("--logprobs needs --json: they are shown nowhere else")
    if args.batch_size is not None and args.n > args.batch_size > 0:
        raise InputError(
            f"--n is {args.n}; expected at most --batch-size, {args.batch_size}: the samples of a "
            "prompt are decoded together"
        )
    conversations = _conversations(args)
    if args.n > 1 and any(len(conversation) > 1 for conversation in conversations):
        raise InputError(f"--n is {args.n}; expected 1 for conversations of several turns")
    if args.batch_size is None:
        # As few rows as serve the samples of a prompt and give each data shard the same number.
        args.batch_size = -(-args.n // max(args.data, 1)) * max(args.data, 1)
    status = shell.console(stderr=True, quiet=args.quiet)

    def load(dtype: str) -> Engine:
        return api.load(
            args.target or api.BUNDLED,
            args.draft if args.target else api.BUNDLED,
            dtype=dtype,
            revision=args.revision,
            draft_revision=args.draft_revision,
            batch_size=args.batch_size,
            max_length=args.max_length,
            prefill_chunk=args.prefill_chunk,
            attention=args.attention,
            data=args.data,
            tp=args.tp,
            tokenizer=args.prompt_ids is None,
        )

    with status.status("Loading"):
        engine = load(args.dtype)
    if args.prompt_ids is not None:
        engine.check([each.ids or () for each in conversations], [options] * len(conversations))
    if not args.compare:
        # Compile while weights and tokenizer arrive; four characters make about one token.
        sizes = (sum(map(len, each.turns)) // 4 + len(each.ids or ()) for each in conversations)
        engine.prepare(options, max(sizes) + 40)
    session = _Session(engine, args, conversations, status)
    show = args.json != "-"
    problem: BaseException | None = None
    try:
        if args.compare:
            _compare(session, options, load, show=show)
        else:
            session.decode(options, show=show)
    except (KeyboardInterrupt, InputError, RunError) as error:
        problem = error  # what is finished is still reported
    result: dict[str, Any] = {"schema": 1, "runs": [run.to_json() for run in session.runs]}
    rows: list[dict[str, Any]] = []
    if session.runs:
        table, rows = _table(session, compare=args.compare and problem is None)
        status.print(table)
    code = shell.OK
    if args.compare and problem is None:
        differences = _differences(session, options)
        result["compare"] = {
            "rows": rows,
            "texts_agree": not differences,
            "differences": differences,
        }
        _report(differences, status)
        if differences and args.dtype == "float32":
            code = shell.FAILED
    if args.json is not None and (session.runs or not isinstance(problem, InputError)):
        shell.write_json(args.json, result)
    if problem is not None:
        raise problem
    return code


def _compare(session: _Session, options: Options, load, *, show: bool) -> None:
    """AR, chain and tree on the same prompts, after a warm-up of each; the tree's text is shown."""

    def measure(mode: str) -> None:
        chosen = dataclasses.replace(options, mode=mode)
        session.warm_up(chosen)
        session.decode(chosen, show=show and mode == "ddtree")

    measure("ar")
    if jax.default_backend() == "cpu" and session.args.dtype == "bfloat16":
        # The fastest AR of a CPU may be the float32 one, and only the fastest is a fair baseline.
        engine, dtype = session.engine, session.args.dtype
        session.engine, session.args.dtype = load("float32"), "float32"
        measure("ar")
        session.engine, session.args.dtype = engine, dtype
    measure("dflash")
    measure("ddtree")


def _differences(session: _Session, options: Options) -> list[dict[str, Any]]:
    groups = session.groups()
    reference = {group[0].dtype: group for group in groups if group[0].generation.mode == "ar"}
    return [
        entry
        for group in groups
        for entry in _disagreements(session.engine, options, reference[group[0].dtype], group)
    ]


def _report(differences: list[dict[str, Any]], status: Console) -> None:
    if not differences:
        status.print("All texts agree.")
    for entry in differences:
        gap = entry["top2_gap"]
        how_close = "" if gap is None else f", where the target's best two differ by {gap:.4f}"
        status.print(
            f"prompt {entry['prompt_index']}, turn {entry['turn']}, sample "
            f"{entry['sample_index']}: {entry['mode']} parts from ar at output token "
            f"{entry['position']}{how_close}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    return shell.run(command, sys.argv[1:] if argv is None else argv)
