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
from ddtree_jax.config import MAX_STOP_IDS, DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError
from ddtree_jax.models import Models, parameter_name, parameter_shapes
from ddtree_jax.rounds import DecodeState, Emitted
from kernels_pallas.dispatch import REFERENCE, Kernels, attention_unsupported, unavailable_reason

MODES = ("ddtree", "dflash", "ar")
ATTENTION = ("auto", "mosaic", "reference")
STOP_SLOTS = MAX_STOP_IDS  # static, so that requests share programs


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
        budget = self.tree_budget
        if budget is not None and not (isinstance(budget, int) and 1 <= budget <= 511):
            raise InputError(f"tree budget is {self.tree_budget}; expected 1 to 511 nodes")
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
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


def _kernels(
    attention: str, target: TargetConfig, drafter: DrafterConfig | None, dtype
) -> tuple[Kernels, str]:
    """The implementations to use, and which one attention has: "mosaic" or "reference"."""
    if attention not in ATTENTION:
        raise InputError(f"attention is {attention!r}; expected one of {', '.join(ATTENTION)}")
    if attention == "reference":
        return REFERENCE, "reference"
    unavailable = unavailable_reason()
    if unavailable is None and dtype != jnp.bfloat16:
        unavailable = f"the dtype is {jnp.dtype(dtype).name}; the kernels take bfloat16"
    unsupported = unavailable
    for config in (target, drafter):
        if config is not None:
            unsupported = unsupported or attention_unsupported(
                config.head_dim, config.group_size, dtype
            )
    if attention == "mosaic" and unsupported:
        raise InputError(f"attention mosaic cannot be used: {unsupported}")
    return Kernels(mosaic=unavailable is None), "reference" if unsupported else "mosaic"


class Engine:
    """Runs requests on one pair of models.

    Args:
      target, drafter: configurations; `drafter` None serves mode "ar" only.
      load: returns the parameters by path ("target.layers.0.mlp.down_fd", "drafter.fc_fd", ...). It
        is called once, in a thread, while the programs compile.
      dtype: of parameters, caches and activations; what is float32 by nature stays so.
      load_tokenizer: returns the tokenizer, in a thread; None serves token ids only.
      batch_size: rows decoded together.
      max_length: prompt plus output, at most; default the target's.
      prefill_chunk: prompt tokens per prefill step.
      mesh: (data, model) mesh, or None for one device.
      attention: "mosaic" for the kernels, "reference" for plain jnp everywhere, "auto" for the
        kernels where the device and the shapes allow.

    Raises:
      InputError: the mesh does not fit the models, or the kernels were asked for and cannot run.
    """

    def __init__(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None,
        load: Callable[[], dict[str, jax.Array]],
        *,
        dtype=jnp.bfloat16,
        load_tokenizer: Callable[[], Any] | None = None,
        batch_size: int = 1,
        max_length: int | None = None,
        prefill_chunk: int | None = None,
        mesh: Mesh | None = None,
        attention: str = "auto",
    ):
        self.target, self.drafter, self.dtype = target, drafter, dtype
        self.batch_size, self.mesh = batch_size, mesh
        self.max_length = max_length or target.max_position
        self.prefill_chunk = prefill_chunk or default_prefill_chunk()
        # Prompts prefilled together: few calls for a wide batch, no idle rows in a narrow one.
        self.prefill_rows = max(1, batch_size // 16)
        if mesh is not None:
            sharding.check_mesh(mesh, target, drafter)
        axis = None if mesh is None else sharding.MODEL
        self.kernels, self.attention = _kernels(attention, target, drafter, dtype)
        abstract = nnx.eval_shape(
            lambda: Models(target, drafter, axis=axis, kernels=self.kernels, rngs=nnx.Rngs(0))
        )
        self._graphdef, state = nnx.split(abstract)
        self._abstract = abstract
        specs = sharding.parameter_specs(state)
        named, self._treedef = jax.tree.flatten_with_path(parameter_shapes(state, dtype))
        shapes = [shape for _, shape in named]
        self._leaf_names = [parameter_name(path) for path, _ in named]
        self._leaf_specs = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, sharding.P))
        self._leaf_shapes = [
            jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding.place(mesh, spec))
            for s, spec in zip(shapes, self._leaf_specs, strict=True)
        ]
        self._programs: dict[tuple, Future] = {}
        loaders = ThreadPoolExecutor(max_workers=2, thread_name_prefix="ddtree-load")
        self._leaves = loaders.submit(self._ordered, load)
        self._tokenizer = loaders.submit(load_tokenizer or (lambda: None))
        # Tracing is Python and cannot overlap; compiling can, where there are cores to spare. One
        # worker takes programs in the order of need: prefill first.
        workers = 1 if jax.default_backend() == "cpu" else 4
        self._compilers = ThreadPoolExecutor(workers, thread_name_prefix="ddtree-compile")

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None."""
        return self._tokenizer.result()

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

    def _placed(self, shape: jax.ShapeDtypeStruct, spec: sharding.P) -> jax.ShapeDtypeStruct:
        where = sharding.place(self.mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

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

        jitted = jax.jit(mapped, donate_argnums=1)
        shapes = [self._placed(argument, row) for argument in arguments]
        state = jax.tree.map(self._placed, state, specs)
        return jitted.lower(self._leaf_shapes, state, *shapes).compile()

    def _program(self, key: tuple, build: Callable[[], Any]) -> Future:
        if key not in self._programs:
            self._programs[key] = self._compilers.submit(build)
        return self._programs[key]

    def _prompt_program(
        self, key: tuple, function: Callable, slots: int, drafting: bool, *extra
    ) -> Future:
        """A program over one chunk of tokens of a group of rows."""
        rows = self.prefill_rows
        tokens = jax.ShapeDtypeStruct((rows, self.prefill_chunk), jnp.int32)
        count = jax.ShapeDtypeStruct((rows,), jnp.int32)
        shape = self._state_shape(rows, slots, drafting)
        return self._program(
            (*key, slots, drafting), lambda: self._compile(function, shape, tokens, count, *extra)
        )

    def _prefill_program(self, slots: int, drafting: bool, sampled: bool) -> Future:
        function = functools.partial(rounds.prefill_chunk, sampled=sampled)
        last = jax.ShapeDtypeStruct((self.prefill_rows,), jnp.bool_)
        return self._prompt_program(("prefill", sampled), function, slots, drafting, last)

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
            rows = self._state_shape(self.prefill_rows, slots, drafting)
            specs, everywhere = sharding.state_specs(state), sharding.P()
            mapped = sharding.over_mesh(rounds.insert, self.mesh, (specs, specs, everywhere), specs)
            where = self._placed(jax.ShapeDtypeStruct((self.prefill_rows,), jnp.int32), everywhere)
            state, rows = (jax.tree.map(self._placed, part, specs) for part in (state, rows))
            return jax.jit(mapped, donate_argnums=0).lower(state, rows, where).compile()

        return self._program(("insert", slots, drafting), build)

    def _programs_of(self, options: Options, slots: int, sampled: bool) -> list[Future]:
        """What a request needs: prefill, insertion into a batch, and last the round."""
        drafting = options.mode != "ar"
        programs = [self._prefill_program(slots, drafting, sampled)]
        if self.batch_size > 1:
            programs.append(self._insert_program(slots, drafting))
        return [*programs, self._round_program(options, slots, sampled)]

    def prepare(self, options: Options, prompt_tokens: int) -> None:
        """Starts compiling what a request of this size needs, without waiting for the weights."""
        slots = self._slots(prompt_tokens, options)
        self._programs_of(options, slots, options.temperature > 0)

    def round_at(
        self, options: Options, length: int, slots: int
    ) -> tuple[Any, list[jax.Array], DecodeState]:
        """For measurements: a compiled round, the parameters, and a state of random K/V.

        Every row has `length` committed tokens and neither stop nor limit, so that
        `state, emitted = program(parameters, state)` can be repeated while slots remain.
        """
        program = self._round_program(options, slots, options.temperature > 0).result()
        state = self._fresh(self.batch_size, slots, options.mode != "ar")
        keys = iter(jax.random.split(jax.random.key(0), 4096))

        def noise(cache):
            return jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype), cache)

        request = dataclasses.replace(
            state.request,
            limit=jnp.full_like(state.request.limit, 2**30),
            stop_ids=jnp.full_like(state.request.stop_ids, -1),
            temperature=jnp.full_like(state.request.temperature, options.temperature),
        )
        state = dataclasses.replace(
            state,
            cache=noise(state.cache),
            draft_cache=noise(state.draft_cache),
            length=jnp.full_like(state.length, length),
            done=jnp.zeros_like(state.done),
            request=request,
        )
        return program, self._leaves.result(), state

    # Requests.

    def _slots(self, prompt_tokens: int, options: Options) -> int:
        return bucket(min(prompt_tokens + options.max_new_tokens, self.max_length))

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        options: Sequence[Options],
        names: Sequence[str] | None = None,
    ) -> None:
        """Raises InputError for what cannot be decoded; `names` are what messages call prompts."""
        if len({(each.mode, each.tree_budget, each.chain_seed) for each in options}) > 1:
            raise InputError("requests of one batch differ in mode, tree budget or chain seed")
        names = names or [f"prompt {index}" for index in range(len(prompts))]
        for name, prompt, each in zip(names, prompts, options, strict=True):
            if each.mode != "ar" and self.drafter is None:
                raise InputError(f"mode {each.mode} needs a drafter; only mode ar works without")
            if not prompt:
                raise InputError(f"{name} is empty; expected at least one token")
            if len(prompt) >= self.max_length:
                raise InputError(
                    f"{name} has {len(prompt)} tokens; expected fewer than the maximum length of "
                    f"{self.max_length}"
                )
            if not 0 <= min(prompt) <= max(prompt) < self.target.vocab_size:
                raise InputError(f"{name} holds a token id outside 0..{self.target.vocab_size - 1}")
            if len(self.stop_ids(each)) > STOP_SLOTS:
                raise InputError(
                    f"{len(self.stop_ids(each))} stop ids; expected up to {STOP_SLOTS}"
                )

    def stop_ids(self, options: Options) -> tuple[int, ...]:
        return self.target.stop_ids if options.stop_ids is None else options.stop_ids

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

    def _chunks(
        self, prompts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Prompts of one group of rows as (tokens [rows, chunk], count [rows], last [rows])."""
        rows, size = self.prefill_rows, self.prefill_chunk
        for start in range(0, max(len(prompt) for prompt in prompts), size):
            tokens, count = np.zeros((rows, size), np.int32), np.zeros((rows,), np.int32)
            last = np.zeros((rows,), bool)
            for row, prompt in enumerate(prompts):
                part = prompt[start : start + size]
                tokens[row, : len(part)] = part
                count[row] = len(part)
                last[row] = bool(part) and start + len(part) == len(prompt)
            yield tokens, count, last

    def _reset(
        self, state: DecodeState, prompts: Sequence[Sequence[int]], options: Sequence[Options]
    ) -> DecodeState:
        """A group of rows with nothing committed and new requests; its buffers are reused."""
        rows = self.prefill_rows
        used = len(prompts)
        idle = rows - used

        def host(values, dtype) -> Any:
            # NumPy's, where the state's type says jax.Array: the next call takes it to the device.
            return np.asarray(values, dtype)

        def column(values: list, dtype) -> Any:
            return host(values + [0] * idle, dtype)

        stops = np.full((rows, STOP_SLOTS), -1, np.int32)
        for row, each in enumerate(options):
            stops[row, : len(self.stop_ids(each))] = self.stop_ids(each)
        limits = [
            min(each.max_new_tokens, self.max_length - len(prompt))
            for prompt, each in zip(prompts, options, strict=True)
        ]
        zero = column([0] * used, np.int32)
        return dataclasses.replace(
            state,
            length=zero,
            emitted=zero,
            feature_count=None if state.feature_count is None else zero,
            done=host(np.arange(rows) >= used, np.bool_),
            request=rounds.Request(
                limit=column(limits, np.int32),
                stop_ids=host(stops, np.int32),
                temperature=column([each.temperature for each in options], np.float32),
                seed=column([each.seed for each in options], np.uint32),
                sample=zero.astype(np.uint32),
            ),
        )

    def run(
        self, prompts: Sequence[Sequence[int]], options: Options | Sequence[Options]
    ) -> Iterator[tuple[Event, Generation]]:
        """Decodes token-id prompts, as many at a time as there are rows; yields tokens as known.

        Args:
          prompts: token ids.
          options: one for all prompts, or one each (of the same mode, budget and chain seed).
        """
        if isinstance(options, Options):
            options = [options] * len(prompts)
        self.check(prompts, options)
        if prompts:
            yield from _Run(self, prompts, options).events()

    def top2_gap(self, ids: Sequence[int]) -> float:
        """The difference of the target's two largest logits after these tokens.

        It tells a near-tie, which rounding may turn either way, from a fault.
        """
        slots = bucket(len(ids))
        state = self._reset(self._fresh(self.prefill_rows, slots, False), [ids], [Options()])
        leaves = self._leaves.result()
        for tokens, count, last in self._chunks([ids]):
            if last[0]:
                probe = self._prompt_program(("top2_gap",), rounds.top2_gap, slots, False)
                return float(probe.result()(leaves, state, tokens, count)[1][0])
            prefill = self._prefill_program(slots, False, False).result()
            state, _ = prefill(leaves, state, tokens, count, last)
        raise ValueError("no tokens")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: Options | Sequence[Options] = Options(),
    ) -> list[Generation]:
        """Decodes token-id prompts to the end, in order; arguments as for `run`."""
        results: dict[int, Generation] = {}
        for event, result in self.run(prompts, options):
            results[event.index] = result
        return [self.with_text(results[index]) for index in range(len(prompts))]

    def with_text(self, result: Generation) -> Generation:
        """Fills `text` where there is a tokenizer; special tokens are left out."""
        if self.tokenizer is not None:
            result.text = self.tokenizer.decode(result.output_ids, skip_special_tokens=True)
        return result


class _Run:
    """One call of `Engine.run`: which row serves which prompt, and results on their way.

    The host dispatches ahead of the device and reads results late. Rows that have finished take
    the next prompts, a group at a time.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], options: Sequence[Options]
    ):
        self.engine, self.prompts, self.options = engine, prompts, options
        mode, budget = options[0].mode, options[0].tree_budget or default_budget()
        self.results = [
            Generation(list(prompt), mode, budget if mode == "ddtree" else None)
            for prompt in prompts
        ]
        slots = max(
            engine._slots(len(prompt), each) for prompt, each in zip(prompts, options, strict=True)
        )
        drafting = mode != "ar"
        sampled = any(each.temperature > 0 for each in options)
        programs = engine._programs_of(options[0], slots, sampled)
        self.round = programs[-1]
        self.insert = programs[1] if len(programs) == 3 else None
        # No clock below measures the compilation of this or the coming of the weights.
        self.prefill = programs[0].result()
        self.leaves = engine._leaves.result()
        self.state = engine._fresh(engine.batch_size, slots, drafting)
        self.group = engine._fresh(engine.prefill_rows, slots, drafting) if self.insert else None
        self.waiting = collections.deque(range(len(prompts)))
        self.owners: list[int | None] = [None] * engine.batch_size
        self.flying: collections.deque[tuple[Emitted, list[int | None], bool]] = collections.deque()
        self.started = [0.0] * len(prompts)
        self.first = [0.0] * len(prompts)
        # On a CPU the "device" is the host's own cores: a round too many delays the next request.
        self.run_ahead = 0 if jax.default_backend() == "cpu" else 1

    def events(self) -> Iterator[tuple[Event, Generation]]:
        while self.waiting or self.flying or self._busy():
            yield from self._admit()
            if self._busy():
                run_round = self._ready(self.round)
                self.state, emitted = run_round(self.leaves, self.state)
                self.flying.append((emitted, list(self.owners), False))
            yield from self._settle(self.run_ahead if self._busy() else 0)

    def _ready(self, program: Future) -> Any:
        """A program. While it still compiles, the clocks of the requests under way stand."""
        began = time.perf_counter()
        compiled = program.result()
        waited = time.perf_counter() - began
        for index in self.owners:
            if index is not None:
                self.started[index] += waited
                self.first[index] += waited
        return compiled

    def _busy(self) -> bool:
        return any(owner is not None for owner in self.owners)

    def _admit(self) -> Iterator[tuple[Event, Generation]]:
        """Prefills waiting prompts into free rows, whole groups while other rows are busy."""
        size = self.engine.prefill_rows
        while self.waiting:
            free = [row for row, owner in enumerate(self.owners) if owner is None]
            if not free or (len(free) < min(size, len(self.waiting)) and self._busy()):
                return
            rows = free[: min(size, len(self.waiting))]
            members = [self.waiting.popleft() for _ in rows]
            now = time.perf_counter()
            for row, index in zip(rows, members, strict=True):
                self.owners[row], self.started[index] = index, now
            prompts = [self.prompts[index] for index in members]
            target = self.state if self.group is None else self.group
            group = self.engine._reset(target, prompts, [self.options[i] for i in members])
            for tokens, count, last in self.engine._chunks(prompts):
                group, emitted = self.prefill(self.leaves, group, tokens, count, last)
                owners = [i if ends else None for i, ends in zip(members, last, strict=False)]
                self.flying.append((emitted, owners, True))
            if self.insert is None:
                self.state = group
            else:
                self.group = group
                where = np.full((size,), len(self.owners), np.int32)
                where[: len(rows)] = rows
                self.state = self._ready(self.insert)(self.state, group, where)
            # While the round still compiles, the first token can be shown.
            yield from self._settle(self.run_ahead if self.round.done() else 0)

    def _settle(self, keep: int) -> Iterator[tuple[Event, Generation]]:
        """Reads the oldest results until only `keep` are on their way."""
        while len(self.flying) > keep:
            emitted, owners, from_prefill = self.flying.popleft()
            emitted = jax.device_get(emitted)
            now = time.perf_counter()
            for row, index in enumerate(owners):
                if index is None or not emitted.count[row]:
                    continue
                result = self.results[index]
                tokens = emitted.tokens[row, : emitted.count[row]].tolist()
                result.output_ids.extend(tokens)
                if from_prefill:
                    self.first[index] = now
                    result.time_to_first_token_s = now - self.started[index]
                else:
                    result.accept_lengths.append(len(tokens))
                    result.decode_s = now - self.first[index]
                done = bool(emitted.done[row])
                if done:
                    stops = self.engine.stop_ids(self.options[index])
                    result.finish_reason = "stop" if tokens[-1] in stops else "length"
                    self.owners[self.owners.index(index)] = None
                yield Event(index, tokens, done, from_prefill), result
