"""The host side of decoding: compiled programs, batches, the run-ahead loop and statistics."""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ddtree_jax import rounds, sharding
from ddtree_jax.config import DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError
from ddtree_jax.models import Models, parameter_name
from ddtree_jax.rounds import DecodeState, Emitted

MODES = ("ddtree", "dflash", "ar")
STOP_SLOTS = 8  # stop ids a row can hold; static, so that requests share programs


def default_budget() -> int:
    """Tree nodes beside the root: rows are nearly free on a GPU and cost time on a CPU."""
    return 15 if jax.default_backend() == "cpu" else 63


def default_prefill_chunk() -> int:
    return 64 if jax.default_backend() == "cpu" else 512


@dataclasses.dataclass(frozen=True)
class Options:
    """How to decode.

    mode: "ddtree", "dflash" or "ar". tree_budget: nodes beside the root, None for the device's
    default. temperature: 0 is greedy. stop_ids: None for the model's own. chain_seed: the tree
    always holds the drafter's best chain.
    """

    mode: str = "ddtree"
    tree_budget: int | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] | None = None
    chain_seed: bool = False

    def __post_init__(self):
        if self.mode not in MODES:
            raise InputError(f"mode is {self.mode!r}; expected one of {', '.join(MODES)}")
        if self.tree_budget is not None and not 1 <= self.tree_budget <= 511:
            raise InputError(f"tree budget is {self.tree_budget}; expected 1 to 511 nodes")
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature is {self.temperature}; expected 0 or more")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed is {self.seed}; expected 0 to 2^32 - 1")


@dataclasses.dataclass
class Generation:
    """One finished output, with what the rounds brought.

    output_ids: a final stop id included. accept_lengths: tokens committed by each round, the bonus
    token included, cut at the stop; the token that prefill chooses belongs to no round, so
    len(output_ids) == 1 + sum(accept_lengths). Times are seconds of the host clock; decode_s counts
    from the first token to the last.
    """

    prompt_ids: list[int]
    mode: str
    tree_budget: int | None
    output_ids: list[int] = dataclasses.field(default_factory=list)
    accept_lengths: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = "interrupted"
    time_to_first_token_s: float = 0.0
    decode_s: float = 0.0
    text: str | None = None

    @property
    def rounds(self) -> int:
        return len(self.accept_lengths)

    @property
    def tau(self) -> float | None:
        """Mean acceptance length; None when there was no round."""
        return sum(self.accept_lengths) / self.rounds if self.rounds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the rounds over decode_s; None when there was no round."""
        return sum(self.accept_lengths) / self.decode_s if self.decode_s > 0 else None


@dataclasses.dataclass(frozen=True)
class Event:
    """Tokens that became known: of prefill (`from_prefill`) or of one round."""

    index: int
    tokens: list[int]
    done: bool
    from_prefill: bool


def bucket(length: int) -> int:
    """Cache slots for `length` tokens: 256, 384, 512, 768, ... so that requests share programs."""
    size = 256
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


class Engine:
    """Runs requests on one pair of models.

    Args:
      target, drafter: configurations; `drafter` None serves mode "ar" only.
      load: returns the parameters by path ("target.layers.0.mlp.down_fd", "drafter.fc_fd", ...). It
        is called once, in a thread, while the programs compile.
      dtype: of parameters, caches and activations.
      tokenizer: for text prompts and outputs; None serves token ids only.
      batch_size: rows decoded together.
      max_length: prompt plus output, at most; default the target's.
      prefill_chunk: prompt tokens per prefill step.
      mesh: (data, model) mesh, or None for one device.
    """

    def __init__(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None,
        load: Callable[[], dict[str, jax.Array]],
        *,
        dtype=jnp.bfloat16,
        tokenizer: Any = None,
        batch_size: int = 1,
        max_length: int | None = None,
        prefill_chunk: int | None = None,
        mesh: Mesh | None = None,
    ):
        self.target, self.drafter, self.dtype, self.tokenizer = target, drafter, dtype, tokenizer
        self.batch_size, self.mesh = batch_size, mesh
        self.max_length = max_length or target.max_position
        self.prefill_chunk = prefill_chunk or default_prefill_chunk()
        axis = None if mesh is None else sharding.MODEL
        abstract = nnx.eval_shape(lambda: Models(target, drafter, axis=axis, rngs=nnx.Rngs(0)))
        self._graphdef, state = nnx.split(abstract)
        self._abstract = abstract
        specs = sharding.parameter_specs(state)
        named, self._treedef = jax.tree.flatten_with_path(state)
        shapes = [shape for _, shape in named]
        self._leaf_names = [parameter_name(path) for path, _ in named]
        self._leaf_specs = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, sharding.P))
        self._leaf_shapes = [
            jax.ShapeDtypeStruct(s.shape, dtype, sharding=sharding.place(mesh, spec))
            for s, spec in zip(shapes, self._leaf_specs, strict=True)
        ]
        self._programs: dict[tuple, Future] = {}
        self._workers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="ddtree")
        self._leaves = self._workers.submit(self._ordered, load)

    def _ordered(self, load: Callable[[], dict[str, jax.Array]]) -> list[jax.Array]:
        given = load()
        problems = [f"{name} is not a parameter" for name in given.keys() - set(self._leaf_names)]
        leaves = []
        for name, shape in zip(self._leaf_names, self._leaf_shapes, strict=True):
            leaf = given.get(name)
            if leaf is None or leaf.shape != shape.shape or leaf.dtype != shape.dtype:
                got = "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
                problems.append(f"{name} is {got}; expected {shape.dtype}{list(shape.shape)}")
            else:
                leaves.append(jax.device_put(leaf, shape.sharding))
        if problems:
            raise ValueError("; ".join(problems[:8]))
        return leaves

    # Programs: one compilation per (program, static arguments, shapes).

    @property
    def compilations(self) -> int:
        return len(self._programs)

    def _merge(self, leaves: list[jax.Array]) -> Models:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))

    def _state_shape(self, batch: int, slots: int, drafting: bool) -> DecodeState:
        empty = functools.partial(
            rounds.empty_state,
            self._abstract,
            batch,
            slots,
            STOP_SLOTS,
            self.dtype,
            drafting=drafting,
        )
        return jax.eval_shape(empty)

    def _compile(self, function: Callable, state: DecodeState, *arguments) -> Any:
        """Compiles function(models, state, *arguments) -> (state, emitted), the state donated."""
        specs = sharding.state_specs(state)
        row = sharding.P(sharding.DATA)

        def program(leaves, state, *arguments):
            return function(self._merge(leaves), state, *arguments)

        mapped = sharding.over_mesh(
            program,
            self.mesh,
            (self._leaf_specs, specs, *(row,) * len(arguments)),
            (specs, row),
        )

        def placed(shape, spec):
            where = sharding.place(self.mesh, spec)
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

        jitted = jax.jit(mapped, donate_argnums=1)
        arguments = [placed(argument, row) for argument in arguments]
        state = jax.tree.map(placed, state, specs)
        return jitted.lower(self._leaf_shapes, state, *arguments).compile()

    def _program(self, key: tuple, build: Callable[[], Any]) -> Future:
        if key not in self._programs:
            self._programs[key] = self._workers.submit(build)
        return self._programs[key]

    def _prompt_program(self, key: tuple, function: Callable, slots: int, drafting: bool) -> Future:
        """A program over one chunk of one row's tokens."""
        tokens = jax.ShapeDtypeStruct((1, self.prefill_chunk), jnp.int32)
        count = jax.ShapeDtypeStruct((1,), jnp.int32)
        return self._program(
            key,
            lambda: self._compile(function, self._state_shape(1, slots, drafting), tokens, count),
        )

    def _prefill_program(self, slots: int, drafting: bool, last: bool, sampled: bool) -> Future:
        function = functools.partial(rounds.prefill_chunk, last=last, sampled=sampled)
        key = ("prefill", slots, drafting, last, sampled)
        return self._prompt_program(key, function, slots, drafting)

    def _round_program(self, options: Options, slots: int, sampled: bool) -> Future:
        drafting = options.mode != "ar"
        if options.mode == "ar":
            function = functools.partial(rounds.ar_round, sampled=sampled)
        elif options.mode == "dflash":
            function = functools.partial(rounds.chain_round, sampled=sampled)
        else:
            function = functools.partial(
                rounds.tree_round,
                budget=options.tree_budget or default_budget(),
                sampled=sampled,
                chain_seed=options.chain_seed,
                # Ties may fall either way (the text cannot change); only a CPU sorts cheaply.
                stable_top_k=jax.default_backend() == "cpu",
            )
        key = (function.func.__name__, tuple(sorted(function.keywords.items())), slots)
        return self._program(
            key,
            lambda: self._compile(function, self._state_shape(self.batch_size, slots, drafting)),
        )

    def _insert_program(self, slots: int, drafting: bool) -> Future:
        def build():
            state = self._state_shape(self.batch_size, slots, drafting)
            row = self._state_shape(1, slots, drafting)
            slot = jax.ShapeDtypeStruct((), jnp.int32)
            return jax.jit(rounds.insert, donate_argnums=0).lower(state, row, slot).compile()

        return self._program(("insert", slots, drafting), build)

    def prepare(self, options: Options, prompt_tokens: int) -> None:
        """Starts compiling what a request of this size needs, without waiting for the weights."""
        slots = self._slots(prompt_tokens, options)
        sampled, drafting = options.temperature > 0, options.mode != "ar"
        self._prefill_program(slots, drafting, True, sampled)
        self._round_program(options, slots, sampled)

    # Requests.

    def _slots(self, prompt_tokens: int, options: Options) -> int:
        return bucket(min(prompt_tokens + options.max_new_tokens, self.max_length))

    def check(self, prompts: Sequence[Sequence[int]], options: Options) -> None:
        """Raises InputError for what cannot be decoded."""
        if options.mode != "ar" and self.drafter is None:
            raise InputError(f"mode {options.mode} needs a drafter; only mode ar works without one")
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise InputError(f"prompt {index} is empty; expected at least one token")
            if len(prompt) >= self.max_length:
                raise InputError(
                    f"prompt {index} has {len(prompt)} tokens; expected fewer than the maximum "
                    f"length of {self.max_length}"
                )
            if not 0 <= min(prompt) <= max(prompt) < self.target.vocab_size:
                raise InputError(
                    f"prompt {index} holds a token id outside 0..{self.target.vocab_size - 1}"
                )
        if options.stop_ids is not None and len(options.stop_ids) > STOP_SLOTS:
            raise InputError(f"{len(options.stop_ids)} stop ids; expected at most {STOP_SLOTS}")

    def _fresh(self, batch: int, slots: int, drafting: bool) -> DecodeState:
        shape = self._state_shape(batch, slots, drafting)
        specs = sharding.state_specs(shape)
        state = jax.tree.map(
            lambda leaf, spec: jnp.zeros(
                leaf.shape, leaf.dtype, device=sharding.place(self.mesh, spec)
            ),
            shape,
            specs,
        )
        return dataclasses.replace(state, done=jnp.ones_like(state.done))

    def _prefill(
        self, row: DecodeState, prompt: Sequence[int], seed: int, options: Options, slots: int
    ) -> tuple[DecodeState, Emitted]:
        """Runs a prompt through an idle row; the row's buffers are consumed."""
        drafting, sampled = options.mode != "ar", options.temperature > 0
        stop_ids = self.target.stop_ids if options.stop_ids is None else options.stop_ids
        stops = np.full((1, STOP_SLOTS), -1, np.int32)
        stops[0, : len(stop_ids)] = stop_ids
        limit = min(options.max_new_tokens, self.max_length - len(prompt))
        zero = np.zeros((1,), np.int32)
        row = dataclasses.replace(
            row,
            length=zero,
            emitted=zero,
            done=np.zeros((1,), bool),
            request=rounds.Request(
                limit=np.array([limit], np.int32),
                stop_ids=stops,
                temperature=np.array([options.temperature], np.float32),
                seed=np.array([seed], np.uint32),
                sample=np.zeros((1,), np.uint32),
            ),
        )
        if drafting:
            row = dataclasses.replace(row, feature_count=zero)
        last = self._prefill_program(slots, drafting, True, sampled)
        return self._feed(row, prompt, slots, drafting, last)

    def _feed(
        self, row: DecodeState, ids: Sequence[int], slots: int, drafting: bool, last: Future
    ) -> tuple[DecodeState, Any]:
        """Commits tokens chunk by chunk; the program `last` takes the final chunk."""
        leaves = self._leaves.result()
        for start in range(0, len(ids), self.prefill_chunk):
            part = ids[start : start + self.prefill_chunk]
            final = start + len(part) == len(ids)
            tokens = np.zeros((1, self.prefill_chunk), np.int32)
            tokens[0, : len(part)] = part
            program = last if final else self._prefill_program(slots, drafting, False, False)
            row, result = program.result()(leaves, row, tokens, np.array([len(part)], np.int32))
        return row, result

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        options: Options,
        seeds: Sequence[int] | None = None,
    ) -> Iterator[tuple[Event, Generation]]:
        """Decodes token-id prompts, as many at a time as there are rows; yields tokens as known.

        `seeds` gives each prompt its own noise; by default all use the seed of the options.

        The host dispatches ahead of the device and reads results late. A row that finishes takes
        the next prompt.
        """
        self.check(prompts, options)
        if not prompts:
            return
        budget = options.tree_budget or default_budget()
        results = [
            Generation(list(prompt), options.mode, budget if options.mode == "ddtree" else None)
            for prompt in prompts
        ]
        slots = max(self._slots(len(prompt), options) for prompt in prompts)
        drafting, sampled = options.mode != "ar", options.temperature > 0
        # Compile everything and wait for the weights first: no clock below measures that.
        programs = [self._prefill_program(slots, drafting, True, sampled)]
        if any(len(prompt) > self.prefill_chunk for prompt in prompts):
            programs.append(self._prefill_program(slots, drafting, False, False))
        if self.batch_size > 1:
            programs.append(self._insert_program(slots, drafting))
        programs.append(self._round_program(options, slots, sampled))
        run_round = [program.result() for program in programs][-1]
        leaves = self._leaves.result()
        state = self._fresh(self.batch_size, slots, drafting)
        spare = self._fresh(1, slots, drafting) if self.batch_size > 1 else None
        waiting = collections.deque(range(len(prompts)))
        owners: list[int | None] = [None] * self.batch_size
        started = [0.0] * len(prompts)
        first = [0.0] * len(prompts)
        # Results on their way: (emitted, rows' owners, whether from prefill).
        flying: collections.deque[tuple[Emitted, list[int | None], bool]] = collections.deque()
        # On a CPU the "device" is the host's own cores: a round too many delays the next request.
        run_ahead = 0 if jax.default_backend() == "cpu" else 1

        def prefill(row: DecodeState, index: int) -> tuple[DecodeState, Emitted]:
            seed = options.seed if seeds is None else seeds[index]
            return self._prefill(row, prompts[index], seed, options, slots)

        def settle() -> Iterator[tuple[Event, Generation]]:
            emitted, rows, from_prefill = flying.popleft()
            emitted = jax.device_get(emitted)
            now = time.perf_counter()
            for row, index in enumerate(rows):
                if index is None or (not from_prefill and not emitted.count[row]):
                    continue
                result = results[index]
                tokens = emitted.tokens[row, : emitted.count[row]].tolist()
                result.output_ids.extend(tokens)
                if from_prefill:
                    first[index] = now
                    result.time_to_first_token_s = now - started[index]
                else:
                    result.accept_lengths.append(len(tokens))
                    result.decode_s = now - first[index]
                done = bool(emitted.done[row])
                if done:
                    stops = self.target.stop_ids if options.stop_ids is None else options.stop_ids
                    result.finish_reason = "stop" if tokens[-1] in stops else "length"
                    owners[owners.index(index)] = None
                yield Event(index, tokens, done, from_prefill), result

        while waiting or flying or any(owner is not None for owner in owners):
            for row, owner in enumerate(owners):
                if owner is None and waiting:
                    index = waiting.popleft()
                    started[index] = time.perf_counter()
                    owners[row] = index
                    if spare is None:
                        state, emitted = prefill(state, index)
                    else:
                        spare, emitted = prefill(spare, index)
                        insert = self._insert_program(slots, drafting).result()
                        state = insert(state, spare, np.int32(row))
                    flying.append((emitted, [index], True))
                    if spare is None:  # nothing else runs: show the first token before the rounds
                        yield from settle()
            if any(owner is not None for owner in owners):
                state, emitted = run_round(leaves, state)
                flying.append((emitted, list(owners), False))
            while flying and (
                len(flying) > run_ahead
                or flying[0][2]
                or not any(owner is not None for owner in owners)
            ):
                yield from settle()

    def top2_gap(self, ids: Sequence[int]) -> float:
        """The difference of the target's two largest logits after these tokens.

        It tells a near-tie, which rounding may turn either way, from a fault.
        """
        slots = bucket(len(ids))
        program = self._prompt_program(("top2_gap", slots), rounds.top2_gap, slots, False)
        _, gap = self._feed(self._fresh(1, slots, False), ids, slots, False, program)
        return float(gap[0])

    def generate(
        self, prompts: Sequence[Sequence[int]], options: Options | None = None
    ) -> list[Generation]:
        """Decodes token-id prompts to the end, in order."""
        results: dict[int, Generation] = {}
        for event, result in self.run(prompts, options or Options()):
            results[event.index] = result
        return [self.with_text(results[index]) for index in range(len(prompts))]

    def with_text(self, result: Generation) -> Generation:
        """Fills `text` where there is a tokenizer; special tokens are left out."""
        if self.tokenizer is not None:
            result.text = self.tokenizer.decode(result.output_ids, skip_special_tokens=True)
        return result
