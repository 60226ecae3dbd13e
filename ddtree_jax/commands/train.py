"""scripts/train_drafter.py: answers by the target, training, export, calibration.

Each step can be repeated.
"""

import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ddtree_jax import api
from ddtree_jax.commands import shell
from ddtree_jax.config import (
    MAX_BLOCK_SIZE,
    DecoderConfig,
    DrafterConfig,
    RopeConfig,
    TargetConfig,
    check_pair,
    read_json,
)
from ddtree_jax.engine import Options, bucket
from ddtree_jax.errors import InputError
from ddtree_jax.models import Drafter, Target
from ddtree_jax.sampling import NOISE_TRUST
from ddtree_jax.training import calibrate, data, prompts
from ddtree_jax.training.loop import TrainConfig, train
from ddtree_jax.training.loss import LossConfig

if TYPE_CHECKING:
    from convert.source import Source

CHUNK = 1024  # answers per data file: some seconds of work, lost if a process is killed


def _parser() -> shell.Parser:
    parser = shell.Parser(prog="train_drafter.py", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    in_turn = "all: one after the other, calibrate unless --sampled is 0"
    add("step", choices=[*_STEPS, "all"], nargs="?", default="all", help=in_turn)
    add("--target", metavar="PATH|ID", help="default: the bundled target")
    add("--prompts", metavar="FILE", help="JSON lines with 'prompt' (ddtree_jax.training.prompts)")
    add("--work", metavar="DIR", default=".work/drafter", help="data, checkpoints, metrics")
    add("--out", metavar="DIR", help="where export writes the drafter and calibrate finds it")
    add("--dtype", choices=list(api.DTYPES), default="bfloat16")
    add("--seed", type=int, default=0)
    add("--debug", action="store_true")
    generate = parser.add_argument_group("generate")
    generate.add_argument("--batch-size", type=int, default=512)
    generate.add_argument("--max-new-tokens", type=int, default=320)
    generate.add_argument(
        "--synthetic",
        type=int,
        default=0,
        metavar="N",
        help="prompts made by sampling the target after its user prefix",
    )
    generate.add_argument(
        "--sampled",
        type=float,
        default=0.25,
        metavar="P",
        help="fraction of the answers that are sampled, the others greedy",
    )
    generate.add_argument("--temperature", type=float, default=1.0, help="of the sampled answers")
    generate.add_argument(
        "--part",
        default="1/1",
        metavar="I/N",
        help="every N-th prompt from the I-th on: N processes, one a GPU, share the work",
    )
    generate.add_argument("--max-prompt-tokens", type=int, default=384)
    generate.add_argument("--minutes", type=float, default=60.0, help="stop generating after this")
    drafter = parser.add_argument_group("drafter")
    drafter.add_argument("--layers", type=int, default=3)
    drafter.add_argument("--block-size", type=int, default=16)
    drafter.add_argument("--target-layer-ids", default="1,8,14,20,27")
    drafter.add_argument("--mask-token-id", type=int, default=16)
    training = parser.add_argument_group("train")
    training.add_argument(
        "--init",
        metavar="PATH|ID",
        help="begin from this drafter, not from random weights; checkpoints in --work win over it",
    )
    training.add_argument("--steps", type=int, default=TrainConfig.steps)
    training.add_argument("--train-minutes", type=float, default=TrainConfig.minutes)
    training.add_argument("--rows", type=int, default=TrainConfig.rows)
    training.add_argument("--row-length", type=int, default=512)
    training.add_argument("--anchors", type=int, default=LossConfig.anchors)
    training.add_argument("--gamma", type=float, default=LossConfig.gamma)
    training.add_argument(
        "--sampled-gamma",
        type=float,
        help="--gamma of sampled answers, of which rounds accept less (default: --gamma)",
    )
    training.add_argument(
        "--noise",
        type=float,
        default=LossConfig.noise,
        metavar="P",
        help="share of the loss of sampled answers that is ranking with the noise of sampling, "
        "trusted as --init says",
    )
    training.add_argument("--learning-rate", type=float, default=TrainConfig.learning_rate)
    training.add_argument("--eval-every", type=int, default=TrainConfig.eval_every)
    trust = parser.add_argument_group(
        "calibrate",
        "How far the drafter is to be trusted beside the noise of sampling, fitted with sampled "
        "answers (rows of --row-length) and written into its config.json.",
    )
    trust.add_argument(
        "--held-out",
        choices=["part", "all"],
        default="part",
        help="the answers that training holds out (one in fifty), or all of --work's where the "
        "drafter was not trained on them (default: part)",
    )
    trust.add_argument("--calibrate-rows", type=int, default=32, help="rows at most")
    trust.add_argument("--calibrate-anchors", type=int, default=16, help="blocks per row")
    return parser


_AT_LEAST_ONE = ["layers", "steps", "rows", "row_length", "anchors", "batch_size"]
_AT_LEAST_ONE += ["max_new_tokens", "max_prompt_tokens", "eval_every"]
_AT_LEAST_ONE += ["calibrate_rows", "calibrate_anchors"]


def _check(args, steps: Sequence[str]) -> None:
    """Raises InputError naming the flag that is missing or cannot be used, before any work."""

    def require(name: str, good: bool, expected: str) -> None:
        if not good:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag} is {getattr(args, name)}; expected {expected}")

    if not {"export", "calibrate"}.isdisjoint(steps) and args.out is None:
        raise InputError("--out is missing; expected the folder for the drafter")
    if "generate" in steps and args.prompts is None:
        raise InputError("--prompts is missing; make one: python -m ddtree_jax.training.prompts")
    for name in _AT_LEAST_ONE:
        require(name, getattr(args, name) >= 1, "at least 1")
    for name in ("minutes", "train_minutes", "gamma", "sampled_gamma", "learning_rate"):
        value = getattr(args, name)
        require(name, value is None or value > 0, "more than 0")
    for name in ("synthetic", "mask_token_id"):
        require(name, getattr(args, name) >= 0, "at least 0")
    require("block_size", 2 <= args.block_size <= MAX_BLOCK_SIZE, f"2 to {MAX_BLOCK_SIZE}")
    for name in ("sampled", "noise"):
        require(name, 0 <= getattr(args, name) <= 1, "0 to 1")
    require("temperature", 0 < args.temperature <= 100, "more than 0 and up to 100")
    part, parts = _part(args)
    require("part", 1 <= part <= parts, "I/N, as in 1/2, with I from 1 to N")
    require("seed", 0 <= args.seed < 2**32, "0 to 2^32 - 1")
    layer_ids = _layer_ids(args)
    distinct = len(set(layer_ids)) == len(layer_ids) and min(layer_ids) >= 0
    require("target_layer_ids", distinct, "distinct layers from 0")
    if list(steps) == ["calibrate"] and not Path(args.out).is_dir():
        raise InputError(f"--out is {args.out}, which is no folder; expected that of a drafter")
    if not {"train", "export"}.isdisjoint(steps):
        import convert

        target = convert.open_model(args.target or api.bundled_target(), drafter=False).config
        flags = "--target-layer-ids, --mask-token-id"  # all else is the target's own
        check_pair(target, drafter_config(target, args), flags)
        if "train" in steps and args.init is not None:
            _open_init(args.init, drafter_config(target, args)).check()


def _layer_ids(args) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in args.target_layer_ids.split(","))
    except ValueError:
        raise InputError(
            f"--target-layer-ids is {args.target_layer_ids!r}; expected 1,8,14"
        ) from None


def _part(args) -> tuple[int, int]:
    try:
        part, parts = map(int, args.part.split("/"))
    except ValueError:
        raise InputError(f"--part is {args.part!r}; expected I/N, as in 1/2") from None
    return part, parts


def drafter_config(target: TargetConfig, args) -> DrafterConfig:
    """A drafter of the target's width with its own layers."""
    shared = {
        field.name: getattr(target, field.name)
        for field in dataclasses.fields(DrafterConfig)
        if hasattr(target, field.name)
    }
    return DrafterConfig(
        **shared
        | dict(
            num_layers=args.layers,
            windows=(None,) * args.layers,
            causal_block=(False,) * args.layers,
            qk_norm=True,
            attention_bias=False,
            # A drafter is plain Qwen3, whatever its target is.
            attention_gate=False,
            centred_norm=False,
            delta=None,
            rope=dataclasses.replace(target.rope, partial=1.0),
            block_size=args.block_size,
            mask_token_id=args.mask_token_id,
            target_layer_ids=_layer_ids(args),
            num_target_layers=target.num_layers,
        )
    )


# What says how a drafter's configuration is to be; the target does for all that is not here.
_SAID_BY = {
    "num_layers": "--layers",
    "block_size": "--block-size",
    "mask_token_id": "--mask-token-id",
    "target_layer_ids": "--target-layer-ids",
} | dict.fromkeys(["attention_bias", "windows", "causal_block"], "--init takes no other")


def _open_init(init: str, expected: DrafterConfig) -> "Source[DrafterConfig]":
    """Opens the drafter that training begins from; its configuration must be the expected one.

    Raises:
      InputError: there is no such drafter, or it differs; the first such field is named. What its
        file leaves unsaid (None: the size of its target) does not differ, nor does what was
        measured of it (noise_trust).
    """
    import convert

    source = convert.open_model(init, drafter=True)
    expected = dataclasses.replace(expected, noise_trust=source.config.noise_trust)
    for (name, theirs), (_, ours) in zip(_facts(source.config), _facts(expected), strict=True):
        if theirs not in (ours, None):
            said_by = _SAID_BY.get(name, "--target")
            raise InputError(
                f"{source.config_file}: {name!r} is {theirs}; expected {ours} ({said_by})"
            )
    return source


def _facts(config: DecoderConfig | RopeConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A configuration's fields, those of its RoPE one by one: (name, value)."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, RopeConfig):
            yield from _facts(value, f"{field.name}.")
        else:
            yield prefix + field.name, value


def _generate(args, console: Console) -> None:
    """Answers this part's prompts once; what finished files hold is not answered again.

    A prompt's temperature and noise come from its place in the part: an interrupted run goes on as
    if it had not been, and processes with different parts can share the folder.
    """
    folder = Path(args.work) / "data"
    part, parts = _part(args)
    name = f"answers-{part}of{parts}"
    texts = prompts.load_training(Path(args.prompts))[part - 1 :: parts]
    answered = {prompt for path in _files(args) for prompt in data.Documents.load([path]).prompts()}
    engine = api.load(
        args.target or api.BUNDLED,
        None,
        dtype=args.dtype,
        batch_size=args.batch_size,
        prefill_chunk=128,
        max_length=1024,
    )
    deadline = time.monotonic() + 60 * args.minutes
    # One set of programs for all that follows; it compiles while the prompts become tokens.
    slots = bucket(min(args.max_prompt_tokens + args.max_new_tokens, engine.max_length))
    heat = args.temperature if args.sampled else 0.0
    hottest = Options(mode="ar", temperature=heat, max_new_tokens=args.max_new_tokens)
    engine.prepare(hottest, args.max_prompt_tokens)
    if args.synthetic:
        texts = _synthetic(engine, args, slots, console) + texts
    random.Random(args.seed).shuffle(texts)
    encoded = [api.encode(engine, text) for text in texts]
    hot = random.Random(f"{args.seed}:{part}")
    drawn = [heat if hot.random() < args.sampled else 0.0 for _ in texts]
    requests = [
        request
        for request in zip(encoded, drawn, _seeds(args, len(texts)), strict=True)
        if len(request[0]) <= args.max_prompt_tokens and tuple(request[0]) not in answered
    ]
    if not requests:
        console.print(f"{name}: every prompt is answered")
        return
    ids, temperatures, seeds = zip(*requests, strict=True)
    answers = data.answer(
        engine,
        ids,
        temperatures=temperatures,
        seeds=seeds,
        max_new_tokens=args.max_new_tokens,
        slots=slots,
    )
    total, started = 0, time.monotonic()
    first = len(list(folder.glob(f"{name}-*.npz")))
    for number, some in enumerate(itertools.batched(answers, CHUNK), first):
        documents = data.Documents.of(
            (each.prompt_ids, each.output_ids, temperatures[index]) for index, each in some
        )
        documents.save(folder / f"{name}-{number:04d}.npz")
        total += documents.answer_tokens
        console.print(
            f"{name}-{number:04d}: {len(documents)} answers, {total} tokens so far, "
            f"{total / (time.monotonic() - started):.0f} tokens/s"
        )
        if time.monotonic() > deadline:
            console.print("Time is up; the rest of the prompts is left out.")
            break


def _files(args) -> list[Path]:
    """The finished data files of all parts."""
    return sorted((Path(args.work) / "data").glob("answers-*.npz"))


def _seeds(args, count: int) -> list[int]:
    """Seeds of this part's requests, no two of all parts the same."""
    part, parts = _part(args)
    return [(args.seed * 1_000_003 + part - 1 + parts * index) % 2**32 for index in range(count)]


def _synthetic(engine, args, slots: int, console: Console) -> list[str]:
    """User turns that the target itself makes up after the beginning of one: a part's share."""
    part, parts = _part(args)
    count = len(range(part - 1, args.synthetic, parts))
    mark = "\0"
    whole = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=False
    )
    prefix = engine.tokenizer.encode(whole[: whole.index(mark)])
    made = set()
    for _, generation in data.answer(
        engine,
        [prefix] * count,
        temperatures=[1.0] * count,
        seeds=_seeds(args, count),
        max_new_tokens=160,
        slots=slots,
    ):
        text = engine.with_text(generation).text.strip()
        if generation.finish_reason == "stop" and 15 <= len(text) <= 800:
            made.add(text)
    console.print(f"{len(made)} synthetic prompts of {count}")
    return sorted(made)


def _held_out(documents: data.Documents) -> np.ndarray:
    """Which documents are not trained on: one in fifty, bool [documents]."""
    return np.arange(len(documents)) % 50 == 0


def _packed(documents: data.Documents, args, at_most: int) -> data.Rows:
    """The documents in rows of --row-length, the first `at_most` of them."""
    rows = data.pack(documents, args.row_length, args.seed)
    return data.Rows(**rows.take(np.arange(min(at_most, len(rows)))))


def _load(kind, source: "Source[Any]", dtype: str) -> Any:
    """The model of `source` as a module of `kind` (Target or Drafter) on the device."""
    import convert

    abstract = nnx.eval_shape(lambda: kind(source.config, rngs=nnx.Rngs(0)))
    graphdef, _ = nnx.split(abstract)
    state = convert.to_state(abstract, source.load(dtype))
    return nnx.merge(graphdef, jax.tree.map(jnp.asarray, state))


def _train(args, console: Console) -> None:
    import convert

    source = convert.open_model(args.target or api.bundled_target(), drafter=False)
    config = drafter_config(source.config, args)
    work = Path(args.work)
    with console.status("Packing"):
        documents = data.Documents.load(_files(args))
        chosen = _held_out(documents)
        held = _packed(documents.select(chosen), args, 256)
        rows = data.pack(documents.select(~chosen), args.row_length, args.seed)
    filled = (rows.document >= 0).mean()
    console.print(
        f"{len(rows)} rows of {args.row_length} ({filled:.0%} filled, "
        f"{int(rows.in_answer.sum())} answer tokens), {len(held)} rows held out; "
        f"{args.steps * args.rows / len(rows):.1f} epochs"
    )
    target = _load(Target, source, args.dtype)
    initial = None
    if args.init is not None:
        begun = _open_init(args.init, config)
        initial = begun.load("float32")
        config = dataclasses.replace(config, noise_trust=begun.config.noise_trust)

    last: dict = {}

    def report(entry: dict) -> None:
        last.update(entry)
        console.print(
            f"step {entry['step']:6d}  {entry['kind']:9s}  loss {entry['loss']:.3f}  "
            f"tau {entry['tau']:.3f}  slots {entry['slot_accuracy'][:3]}  "
            f"overlap {entry['overlap'][:3]}  {entry['seconds']:.0f} s"
        )

    train_config = TrainConfig(
        steps=args.steps,
        minutes=args.train_minutes,
        rows=args.rows,
        learning_rate=args.learning_rate,
        seed=args.seed,
        eval_every=args.eval_every,
        save_every=args.eval_every,
    )
    loss_config = LossConfig(
        anchors=args.anchors,
        gamma=args.gamma,
        sampled_gamma=args.sampled_gamma,
        noise=args.noise,
    )
    params = train(target, config, rows, held, train_config, loss_config, work, report, initial)
    with shell.atomic(work / "drafter.npz") as temporary, temporary.open("wb") as file:
        np.savez(file, **params)  # type: ignore[arg-type]  # the stub takes a name for an option
    recipe = {
        "data": {"rows": len(rows), "answer_tokens": int(rows.in_answer.sum())},
        "train": dataclasses.asdict(train_config),
        "loss": dataclasses.asdict(loss_config),
        "init": args.init,
        "noise_trust": config.noise_trust,
        "device": jax.devices()[0].device_kind,
        "held_out": last,
    }
    shell.write_json(str(work / "recipe.json"), recipe)


def _export(args, console: Console) -> None:
    import convert
    from convert.export import export_drafter

    source = convert.open_model(args.target or api.bundled_target(), drafter=False)
    config = drafter_config(source.config, args)
    stored = Path(args.work) / "drafter.npz"
    if not stored.exists():
        raise InputError(f"{stored}: no such file; run the 'train' step first")
    # Rounds rank as training did, until something better is measured (calibrate).
    pairs = read_json(Path(args.work) / "recipe.json").get("noise_trust") or ()
    config = dataclasses.replace(config, noise_trust=tuple(map(tuple, pairs)))
    with np.load(stored) as archive:
        export_drafter(config, source.config, dict(archive), Path(args.out))
    console.print(f"{args.out}: written")


def _calibrate(args, console: Console) -> None:
    """Fits the drafter's noise_trust and writes it into its config.json, nothing else."""
    import convert

    drafter = convert.open_model(args.out, drafter=True)
    target = convert.open_model(args.target or api.bundled_target(), drafter=False)
    check_pair(target.config, drafter.config, drafter.config_file)
    documents = data.Documents.load(_files(args))
    if args.held_out == "part":
        documents = documents.select(_held_out(documents))
    documents = documents.select(documents.temperatures > 0)
    if not len(documents):
        some = "" if args.held_out == "all" else " held-out"
        raise InputError(f"{args.work}: has no{some} answers that were sampled (--sampled)")
    rows = _packed(documents, args, args.calibrate_rows)
    models = _load(Drafter, drafter, args.dtype), _load(Target, target, args.dtype)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Calibrating", total=len(rows) * (1 + calibrate.MAX_PASSES))
        fit = calibrate.fit(
            *models,
            rows,
            anchors=args.calibrate_anchors,
            seed=args.seed,
            advance=lambda: progress.advance(task),
        )
    table = Table("slot", "log-probabilities", "noise", "choices")
    for slot, (pair, count) in enumerate(zip(fit.pairs, fit.count, strict=True)):
        table.add_row(str(slot), *(f"{part:.3f}" for part in pair), str(int(count)))
    console.print(table)
    console.print(
        f"mean log-likelihood of {int(fit.count.sum())} choices in {len(rows)} rows: "
        f"{fit.before:.4f} with {NOISE_TRUST[0]} for all, {fit.after:.4f} with these"
    )
    values = read_json(Path(drafter.config_file))
    trust = {"noise_trust": [list(pair) for pair in fit.pairs]}
    values["dflash_config"] = (values.get("dflash_config") or {}) | trust
    shell.write_json(drafter.config_file, values)
    console.print(f"{drafter.config_file}: written")


_STEPS = {"generate": _generate, "train": _train, "export": _export, "calibrate": _calibrate}


def command(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    console = shell.console(stderr=True)
    chosen = list(_STEPS) if args.step == "all" else [args.step]
    if args.step == "all" and args.sampled == 0:
        chosen.remove("calibrate")  # greedy answers say nothing about sampling
    _check(args, chosen)
    for name in chosen:
        _STEPS[name](args, console)
    return shell.OK


def main(argv: Sequence[str] | None = None) -> int:
    return shell.run(command, sys.argv[1:] if argv is None else argv)
