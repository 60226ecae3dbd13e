"""The host side of decoding: compiled programs, batches, the run-ahead loop and statistics."""

import collections
import dataclasses
import functools
import operator
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ddtree_jax import rounds, sharding, text
from ddtree_jax.config import MAX_STOP_IDS, DecoderConfig, DrafterConfig, TargetConfig
from ddtree_jax.errors import InputError
from ddtree_jax.models import Models, Peers, parameter_name, parameter_shapes
from ddtree_jax.rounds import DecodeState, Emitted
from ddtree_jax.sampling import GREEDY, Request, Sampler
from kernels_pallas import exchange
from kernels_pallas.dispatch import REFERENCE, Kernels, attention_unsupported, unavailable_reason

MODES = ("ddtree", "dflash", "ar")
ATTENTION = ("auto", "mosaic", "reference")
STOP_SLOTS = MAX_STOP_IDS  # static, so that requests share programs
BIAS_SLOTS = 64
# Bounds of what is added to logits, and of what they are multiplied with or divided by: float32
# holds whatever comes out of all of them together.
LARGEST_SUMMAND = 1e9
LARGEST_FACTOR = 1e6
LARGEST_TEMPERATURE = 1e20


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
    always holds the drafter's best chain. draft_noise: at T > 0 the drafter's candidates are ranked
    with the noise that the target will be sampled with. n: samples of each prompt.

    top_k (0 keeps all), top_p (1), min_p (0): see filters.py. logit_bias (by token id),
    repetition_penalty (1 is none), presence_penalty, frequency_penalty, min_new_tokens: see
    penalties.py. stop: strings at which the text ends; they are not part of it, and special tokens
    are no text. Neither a stop id nor the end of a stop string among the first min_new_tokens ends
    a text. log_probs: of the emitted tokens, too.
    """

    mode: str = "ddtree"
    tree_budget: int | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] | None = None
    chain_seed: bool = False
    draft_noise: bool = True
    n: int = 1
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    log_probs: bool = False

    def __post_init__(self):
        for name in ("max_new_tokens", "seed", "n", "top_k", "min_new_tokens"):
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        for name in (
            *("temperature", "top_p", "min_p"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        ):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        if self.tree_budget is not None:
            object.__setattr__(self, "tree_budget", _integer("tree budget", self.tree_budget))
        if self.stop_ids is not None:
            ids = tuple(_integer("a stop id", each) for each in _several("stop_ids", self.stop_ids))
            object.__setattr__(self, "stop_ids", ids)
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(f"logit_bias is {self.logit_bias!r}; expected numbers by token id")
        bias = {
            _integer("a token of logit_bias", key): _number(f"logit_bias of token {key}", value)
            for key, value in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", bias)
        if self.mode not in MODES:
            raise InputError(f"mode is {self.mode!r}; expected one of {', '.join(MODES)}")
        budget = self.tree_budget
        if budget is not None and not 1 <= budget <= 511:
            raise InputError(f"tree budget is {self.tree_budget}; expected 1 to 511 nodes")
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")
        largest = LARGEST_TEMPERATURE
        if self.temperature != 0 and not 1 / largest <= self.temperature <= largest:
            raise InputError(
                f"temperature is {self.temperature}; expected 0 (greedy), or {1 / largest:g} to "
                f"{largest:g}"
            )
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed is {self.seed}; expected 0 to 2^32 - 1")
        if self.n < 1:
            raise InputError(f"n is {self.n}; expected at least 1")
        if not 0 <= self.top_k < 2**31:
            raise InputError(f"top_k is {self.top_k}; expected 1 or more, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; expected more than 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p is {self.min_p}; expected 0 to 1")
        if not 1 / LARGEST_FACTOR <= self.repetition_penalty <= LARGEST_FACTOR:
            raise InputError(
                f"repetition_penalty is {self.repetition_penalty}; expected "
                f"{1 / LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}, 1 for none"
            )
        summands = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        summands |= {f"logit_bias of token {key}": bias for key, bias in self.logit_bias.items()}
        for name, value in summands.items():
            if not abs(value) <= LARGEST_SUMMAND:
                raise InputError(
                    f"{name} is {value}; expected {-LARGEST_SUMMAND:g} to {LARGEST_SUMMAND:g}"
                )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise InputError(
                f"min_new_tokens is {self.min_new_tokens}; expected 0 to max_new_tokens, "
                f"{self.max_new_tokens}"
            )
        if len(self.logit_bias) > BIAS_SLOTS:
            raise InputError(
                f"logit_bias has {len(self.logit_bias)} tokens; expected up to {BIAS_SLOTS}"
            )
        strings = _several("stop", self.stop)
        if isinstance(self.stop, str) or not all(
            isinstance(each, str) and each for each in strings
        ):
            raise InputError(f"stop is {self.stop!r}; expected strings that are not empty")
        object.__setattr__(self, "stop", strings)


def _integer(name: str, value: Any) -> int:
    try:
        return int(operator.index(value))
    except TypeError:
        raise InputError(f"{name} is {value!r}; expected an integer") from None


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{name} is {value!r}; expected a number") from None


def _several(name: str, value: Any) -> tuple:
    try:
        return tuple(value)
    except TypeError:
        raise InputError(f"{name} is {value!r}; expected a tuple") from None


def sampler_of(options: Sequence[Options]) -> Sampler:
    """What a program has to compute for these requests."""
    hot = [each for each in options if each.temperature > 0]
    return Sampler(
        noise=bool(hot),
        top_k=any(each.top_k > 0 for each in hot),
        top_p=any(each.top_p < 1 for each in hot),
        min_p=any(each.min_p > 0 for each in hot),
        bias=any(each.logit_bias for each in options),
        penalties=any(
            (each.repetition_penalty, each.presence_penalty, each.frequency_penalty) != (1, 0, 0)
            for each in options
        ),
        min_new_tokens=any(each.min_new_tokens > 0 for each in options),
        log_probs=any(each.log_probs for each in options),
    )


@dataclasses.dataclass
class Generation:
    """One finished output, with what the rounds brought.

    output_ids: a final stop id included. accept_lengths: tokens committed by each round, the bonus
    token included, cut at the stop; the token that prefill chooses belongs to no round, so
    len(output_ids) == 1 + sum(accept_lengths). Times are seconds of the host clock; decode_s counts
    from the first token to the last. text: ends before a stop string, where output_ids end with the
    token that completes it. log_probs: of each output token in the target's own distribution,
    before bias, penalties, temperature and filters; None unless asked for.
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
    sample_index: int = 0
    log_probs: list[float] | None = None

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
    """Tokens that became known: of prefill (`from_prefill`) or of one round.

    They are those of one sample of the prompt number `index`.
    """

    index: int
    sample: int
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


_turn = threading.Lock()


def _in_turn(program: Callable) -> Callable:
    """A program with kernels that wait for other devices: all devices get it before another one.

    Threads that put two such programs in different orders on two devices would wait for ever.
    """

    def call(*arguments):
        with _turn:
            return program(*arguments)

    return call


def _for_shards[C: DecoderConfig](role: str, config: C, shards: int) -> C:
    """`config.for_shards`, whose error says which model it is about."""
    try:
        return config.for_shards(shards)
    except InputError as error:
        raise InputError(f"the {role}: {error}") from None


class Engine:
    """Runs requests on one pair of models.

    Args:
      target, drafter: configurations; `drafter` None serves mode "ar" only.
      load: returns the parameters by path ("target.layers.0.mlp.down_fd", "drafter.fc_fd", ...). It
        is given what they must be, a ShapeDtypeStruct with its sharding each, and called once, in a
        thread, while the programs compile.
      dtype: of parameters, caches and activations; what is float32 by nature stays so.
      load_tokenizer: returns the tokenizer, in a thread; None serves token ids only.
      batch_size: rows decoded together.
      max_length: prompt plus output, at most; default the target's.
      prefill_chunk: prompt tokens per prefill step.
      mesh: (data, model) mesh, or None for one device. Rows are split over data; heads, MLPs and
        vocabulary over model, KV heads repeated where there are fewer than shards.
      whole_drafter: every device of the mesh holds and runs the whole drafter.
      attention: "mosaic" for the kernels, "reference" for plain jnp everywhere, "auto" for the
        kernels where the device and the shapes allow.

    Raises:
      InputError: the mesh does not fit the models, or the kernels were asked for and cannot run.
    """

    def __init__(
        self,
        target: TargetConfig,
        drafter: DrafterConfig | None,
        load: Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]],
        *,
        dtype=jnp.bfloat16,
        load_tokenizer: Callable[[], Any] | None = None,
        batch_size: int = 1,
        max_length: int | None = None,
        prefill_chunk: int | None = None,
        mesh: Mesh | None = None,
        whole_drafter: bool = False,
        attention: str = "auto",
    ):
        data, shards = sharding.shards_of(mesh)
        if batch_size % data:
            raise InputError(
                f"the batch size is {batch_size}; expected a multiple of the {data} data shards"
            )
        target = _for_shards("target", target, shards)
        if drafter is not None and not whole_drafter:
            drafter = _for_shards("drafter", drafter, shards)
        self.target, self.drafter, self.dtype = target, drafter, dtype
        self.batch_size, self.mesh = batch_size, mesh
        self.whole_drafter = whole_drafter
        self._replicated = ("drafter",) if whole_drafter else ()
        self.max_length = max_length or target.max_position
        self.prefill_chunk = prefill_chunk or default_prefill_chunk()
        # Prompts prefilled together: few calls for a wide batch, no idle rows in a narrow one.
        self.prefill_rows = data * max(1, batch_size // (16 * data))
        axis = sharding.MODEL if shards > 1 else None
        self.kernels, self.attention = _kernels(attention, target, drafter, dtype)
        self._inboxes = None
        if self.kernels.mosaic and mesh is not None and axis is not None:
            devices = mesh.devices.flatten()
            if exchange.unreachable_reason(devices) is None:
                self._inboxes = exchange.open_inboxes(mesh, axis, target.hidden_size)
        abstract = nnx.eval_shape(
            lambda: Models(
                target,
                drafter,
                axis=axis,
                whole_drafter=whole_drafter,
                peers=exchange.address_words(shards) if self._inboxes else 0,
                kernels=self.kernels,
                rngs=nnx.Rngs(0),
            )
        )
        self._graphdef, *states = nnx.split(abstract, nnx.Param, Peers)
        state, self._peers = states
        self._abstract = abstract
        specs = sharding.parameter_specs(state, self._replicated)
        named, self._treedef = jax.tree.flatten_with_path(parameter_shapes(state, dtype))
        shapes = [shape for _, shape in named]
        self._leaf_names = [parameter_name(path) for path, _ in named]
        self._leaf_specs = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, sharding.P))
        self._leaf_shapes = [
            jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding.place(mesh, spec))
            for s, spec in zip(shapes, self._leaf_specs, strict=True)
        ]
        # What programs are given: the parameters and, for kernels that sum, the inboxes' addresses.
        self._given_specs, self._given_shapes = [*self._leaf_specs], [*self._leaf_shapes]
        if self._inboxes:
            words = self._inboxes.addresses
            shape = jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=words.sharding)
            self._given_shapes.append(shape)
            self._given_specs.append(sharding.P((sharding.DATA, sharding.MODEL)))
        self._programs: dict[tuple, Future] = {}
        loaders = ThreadPoolExecutor(max_workers=2, thread_name_prefix="ddtree-load")
        self._leaves = loaders.submit(self._ordered, load)
        self._tokenizer = loaders.submit(load_tokenizer or (lambda: None))
        # Workers take programs in the order of need, prefill first. Compiling overlaps, where there
        # are cores to spare; tracing is Python, where two at once would only delay each other.
        workers = 1 if jax.default_backend() == "cpu" else 4
        self._compilers = ThreadPoolExecutor(workers, thread_name_prefix="ddtree-compile")
        self._tracing = threading.Lock()

    @property
    def sums(self) -> str | None:
        """What adds up the shards' parts of a sum: "kernel", "XLA", or None where nothing is split.

        The kernel needs Hopper GPUs that reach each other's memory, bfloat16, and rows that it can
        sum; more rows than it takes are XLA's in any case.
        """
        if sharding.shards_of(self.mesh)[1] == 1:
            return None
        by_kernel = self._inboxes is not None and not exchange.unsupported_reason(
            1, self.target.hidden_size, self.dtype
        )
        return "kernel" if by_kernel else "XLA"

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None."""
        return self._tokenizer.result()

    def _ordered(self, load: Callable) -> list[jax.Array]:
        wanted = dict(zip(self._leaf_names, self._leaf_shapes, strict=True))
        given = load(wanted)
        problems = [f"{name} is not a parameter" for name in given.keys() - set(self._leaf_names)]
        leaves = []
        for name, shape in wanted.items():
            leaf = given.get(name)
            if leaf is None or leaf.shape != shape.shape or leaf.dtype != shape.dtype:
                got = "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
                problems.append(f"{name} is {got}; expected {shape.dtype}{list(shape.shape)}")
            else:
                leaves.append(jax.device_put(leaf, shape.sharding))
        if problems:
            raise ValueError("; ".join(problems[:8]))
        return leaves if self._inboxes is None else [*leaves, self._inboxes.addresses]

    # Programs: one compilation per (program, static arguments, shapes).

    @property
    def compilations(self) -> int:
        return len(self._programs)

    def _merge(self, leaves: list[jax.Array]) -> Models:
        count = len(self._leaf_shapes)
        parameters = jax.tree.unflatten(self._treedef, leaves[:count])
        peers = jax.tree.map(lambda _: leaves[count][0], self._peers)
        return nnx.merge(self._graphdef, parameters, peers)

    def _state_shape(
        self, batch: int, slots: int, drafting: bool, *, penalised: bool = False, samples: int = 1
    ) -> DecodeState:
        empty = functools.partial(
            rounds.empty_state,
            self._abstract,
            batch,
            slots,
            STOP_SLOTS,
            self.dtype,
            drafting=drafting,
            biases=BIAS_SLOTS,
            penalised=penalised,
            samples=samples,
        )
        return jax.eval_shape(empty)

    def _specs(self, state: DecodeState):
        return sharding.state_specs(state, self._replicated)

    def _placed(self, shape: jax.ShapeDtypeStruct, spec: sharding.P) -> jax.ShapeDtypeStruct:
        where = sharding.place(self.mesh, spec)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

    def _compile(self, function: Callable, state: DecodeState, *arguments) -> Any:
        """Compiles function(models, state, *arguments) -> (state, emitted), the state donated."""
        specs = self._specs(state)
        row = sharding.P(sharding.DATA)

        def program(leaves, state, *arguments):
            return function(self._merge(leaves), state, *arguments)

        mapped = sharding.over_mesh(
            program,
            self.mesh,
            (self._given_specs, specs, *(row,) * len(arguments)),
            (specs, row),
        )

        jitted = jax.jit(mapped, donate_argnums=1)
        shapes = [self._placed(argument, row) for argument in arguments]
        state = jax.tree.map(self._placed, state, specs)
        compiled = self._build(jitted, self._given_shapes, state, *shapes)
        return compiled if self._inboxes is None else _in_turn(compiled)

    def _build(self, jitted: Any, *shapes: Any) -> Any:
        """Traces in turn, then compiles beside other programs."""
        with self._tracing:
            lowered = jitted.lower(*shapes)
        options = {}
        if jax.default_backend() == "gpu" and jnp.dtype(self.dtype) == jnp.float32:
            # XLA would try Triton kernels for every product: four times as long until the first
            # token, and no faster.
            options["xla_gpu_enable_triton_gemm"] = False
        return lowered.compile(options)

    def _program(self, key: tuple, build: Callable[[], Any]) -> Future:
        if key not in self._programs:
            self._programs[key] = self._compilers.submit(build)
        return self._programs[key]

    def _prompt_program(
        self, key: tuple, function: Callable, slots: int, drafting: bool, *extra, **layout
    ) -> Future:
        """A program over one chunk of tokens of a group of rows; `layout` as of `_state_shape`."""
        rows = self.prefill_rows
        tokens = jax.ShapeDtypeStruct((rows, self.prefill_chunk), jnp.int32)
        count = jax.ShapeDtypeStruct((rows,), jnp.int32)
        shape = self._state_shape(rows, slots, drafting, **layout)
        return self._program(
            (*key, slots, drafting), lambda: self._compile(function, shape, tokens, count, *extra)
        )

    def _prefill_program(
        self, slots: int, drafting: bool, sampler: Sampler, samples: int = 1
    ) -> Future:
        function = functools.partial(rounds.prefill_chunk, sampler=sampler)
        last = jax.ShapeDtypeStruct((self.prefill_rows,), jnp.bool_)
        layout = dict(penalised=sampler.penalties, samples=samples)
        key = ("prefill", sampler, samples)
        return self._prompt_program(key, function, slots, drafting, last, **layout)

    def _round_program(self, options: Options, slots: int, sampler: Sampler) -> Future:
        drafting = options.mode != "ar"
        noisy = options.draft_noise and sampler.noise
        if options.mode == "ar":
            function = functools.partial(rounds.ar_round, sampler=sampler)
        elif options.mode == "dflash":
            function = functools.partial(rounds.chain_round, sampler=sampler, draft_noise=noisy)
        else:
            function = functools.partial(
                rounds.tree_round,
                budget=options.tree_budget or default_budget(),
                sampler=sampler,
                chain_seed=options.chain_seed,
                draft_noise=noisy,
                # Ties may fall either way (the text cannot change); only a CPU sorts cheaply.
                stable_top_k=jax.default_backend() == "cpu",
            )
        key = (function.func.__name__, tuple(sorted(function.keywords.items())), slots)
        layout = dict(penalised=sampler.penalties)
        shape = self._state_shape(self.batch_size, slots, drafting, **layout)
        return self._program(key, lambda: self._compile(function, shape))

    def _insert_program(self, slots: int, drafting: bool, penalised: bool, samples: int) -> Future:
        def build():
            state, rows = (
                self._state_shape(batch, slots, drafting, penalised=penalised, samples=each)
                for batch, each in ((self.batch_size, 1), (self.prefill_rows, samples))
            )
            specs, everywhere = self._specs(state), sharding.P()
            axis = sharding.DATA if sharding.shards_of(self.mesh)[0] > 1 else None
            mapped = sharding.over_mesh(
                functools.partial(rounds.insert, data_axis=axis),
                self.mesh,
                (specs, specs, everywhere, everywhere),
                specs,
            )
            where = self._placed(jax.ShapeDtypeStruct((self.prefill_rows,), jnp.int32), everywhere)
            state, rows = (jax.tree.map(self._placed, part, specs) for part in (state, rows))
            return self._build(jax.jit(mapped, donate_argnums=0), state, rows, where, where)

        return self._program(("insert", slots, drafting, penalised, samples), build)

    def _programs_of(self, options: Options, slots: int, sampler: Sampler) -> list[Future]:
        """What a request needs: prefill, insertion into a batch, and last the round."""
        drafting = options.mode != "ar"
        programs = [self._prefill_program(slots, drafting, sampler, options.n)]
        if self.batch_size > 1:
            programs.append(self._insert_program(slots, drafting, sampler.penalties, options.n))
        return [*programs, self._round_program(options, slots, sampler)]

    def prepare(self, options: Options | Sequence[Options], prompt_tokens: int) -> None:
        """Starts compiling what requests of this size need, without waiting for the weights.

        `options` as for `run`.
        """
        every = [options] if isinstance(options, Options) else options
        slots = max(self._slots(prompt_tokens, each) for each in every)
        self._programs_of(every[0], slots, sampler_of(every))

    def round_at(
        self, options: Options, length: int, slots: int
    ) -> tuple[Any, list[jax.Array], DecodeState]:
        """For measurements: a compiled round, the parameters, and a state of random K/V.

        Every row has `length` committed tokens and neither stop nor limit, so that
        `state, emitted = program(parameters, state)` can be repeated while slots remain.
        """
        sampler = sampler_of([options])
        program = self._round_program(options, slots, sampler).result()
        state = self._fresh(
            self.batch_size, slots, options.mode != "ar", penalised=sampler.penalties
        )
        keys = iter(jax.random.split(jax.random.key(0), 4096))

        @functools.cache
        def drawing(shape, dtype, where) -> Callable:
            draw = functools.partial(jax.random.normal, shape=shape, dtype=dtype)
            return jax.jit(draw, out_shardings=where)

        def noise(cache):
            return jax.tree.map(lambda x: drawing(x.shape, x.dtype, x.sharding)(next(keys)), cache)

        endless = dataclasses.replace(options, stop_ids=())
        requests = [(endless, 2**30, sample) for sample in range(self.batch_size)]
        state = dataclasses.replace(
            state,
            cache=noise(state.cache),
            draft_cache=noise(state.draft_cache),
            length=state.length + length,
            done=jnp.logical_not(state.done),
            request=self._request(requests, self.batch_size),
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
        if len(options) != len(prompts):
            raise InputError(
                f"there are {len(options)} options for {len(prompts)} prompts; expected one each, "
                "or a single one"
            )
        for field in ("mode", "tree_budget", "chain_seed", "draft_noise", "n"):
            if len({getattr(each, field) for each in options}) > 1:
                raise InputError(f"requests of one batch differ in {field}; expected one value")
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
            if each.n > self.batch_size:
                raise InputError(
                    f"n is {each.n}; expected at most the batch size, {self.batch_size}"
                )
            for token in each.logit_bias:
                if not 0 <= token < self.target.vocab_size:
                    raise InputError(
                        f"logit_bias names token {token}; expected 0 to "
                        f"{self.target.vocab_size - 1}"
                    )
            for token in each.stop_ids or ():
                if not 0 <= token < self.target.vocab_size:
                    raise InputError(
                        f"stop_ids holds {token}; expected 0 to {self.target.vocab_size - 1}"
                    )
            if each.stop and self.tokenizer is None:
                raise InputError("stop strings need a tokenizer; use stop_ids")
            if len(self.stop_ids(each)) > STOP_SLOTS:
                raise InputError(
                    f"{len(self.stop_ids(each))} stop ids; expected up to {STOP_SLOTS}"
                )

    def stop_ids(self, options: Options) -> tuple[int, ...]:
        return self.target.stop_ids if options.stop_ids is None else options.stop_ids

    def _fresh(self, batch: int, slots: int, drafting: bool, **layout) -> DecodeState:
        """A state of idle rows, zeros on the device; `layout` as of `_state_shape`."""
        shape = self._state_shape(batch, slots, drafting, **layout)
        specs = self._specs(shape)
        state = jax.tree.map(
            lambda leaf, spec: jnp.zeros(
                leaf.shape, leaf.dtype, device=sharding.place(self.mesh, spec)
            ),
            shape,
            specs,
        )
        return dataclasses.replace(state, done=jnp.logical_not(state.done))

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

    def _request(self, requests: Sequence[tuple[Options, int, int]], rows: int) -> Request:
        """(options, limit, sample) of the first rows, the others idle; on the host."""
        request = Request.idle(rows, STOP_SLOTS, BIAS_SLOTS)
        for row, (options, limit, sample) in enumerate(requests):
            stops, bias = self.stop_ids(options), options.logit_bias
            values = dict(
                limit=limit,
                temperature=options.temperature,
                seed=options.seed,
                sample=sample,
                top_k=options.top_k,
                top_p=options.top_p,
                min_p=options.min_p,
                repetition=options.repetition_penalty,
                presence=options.presence_penalty,
                frequency=options.frequency_penalty,
                min_new_tokens=min(options.min_new_tokens, limit),
            )
            lists = dict(stop_ids=stops, bias_ids=list(bias), bias=list(bias.values()))
            for name, value in values.items():
                np.asarray(getattr(request, name))[row] = value
            for name, many in lists.items():
                np.asarray(getattr(request, name))[row, : len(many)] = many
        return request

    def _reset(
        self, state: DecodeState, prompts: Sequence[Sequence[int]], options: Sequence[Options]
    ) -> DecodeState:
        """A group of rows with nothing committed and new requests; its buffers are reused."""
        rows, samples = self.prefill_rows, options[0].n
        requests = [
            (each, min(each.max_new_tokens, self.max_length - len(prompt)), sample)
            for prompt, each in zip(prompts, options, strict=True)
            for sample in range(samples)
        ]

        def zero(count: int) -> Any:
            # NumPy's, where the state's type says jax.Array: the next call takes it to the device.
            return np.zeros((count,), np.int32)

        done: Any = np.arange(rows * samples) >= len(requests)
        return dataclasses.replace(
            state,
            length=zero(rows),
            emitted=zero(rows * samples),
            feature_count=None if state.feature_count is None else zero(rows),
            done=done,
            request=self._request(requests, rows * samples),
            counts=jax.tree.map(jnp.zeros_like, state.counts),
        )

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        options: Options | Sequence[Options],
        *,
        min_slots: int = 0,
    ) -> Iterator[tuple[Event, Generation]]:
        """Decodes token-id prompts, as many at a time as there are rows; yields tokens as known.

        Args:
          prompts: token ids.
          options: one for all prompts, or one each (of the same mode, tree budget, chain seed,
            draft noise and n).
          min_slots: cache slots a row, at least; several calls with the same share programs.
        """
        if isinstance(options, Options):
            options = [options] * len(prompts)
        self.check(prompts, options)
        if prompts:
            yield from _Run(self, prompts, options, min_slots).events()

    def top2_gap(
        self, ids: Sequence[int], options: Options = Options(), *, sample: int = 0, emitted: int = 0
    ) -> float:
        """How far the target's two best tokens after these lie apart, in units of logits.

        It tells a near-tie, which rounding may turn either way, from a fault. Of a sample it is the
        distance with the noise of its position, infinite where filters leave a single token: then
        `options` and `sample` are the request's, and the last `emitted` of the tokens its output.

        Raises:
          ValueError: the request has penalties, of which this knows nothing.
        """
        sampler = dataclasses.replace(sampler_of([options]), log_probs=False)
        if sampler.penalties:
            raise ValueError("penalties depend on more than the two best tokens")
        slots, rows = bucket(len(ids)), self.prefill_rows
        state = self._reset(self._fresh(rows, slots, False), [ids], [Options()])
        emitted_b: Any = np.full((rows,), emitted, np.int32)
        limit = min(options.max_new_tokens, self.max_length)
        request = self._request([(options, limit, sample)], rows)
        state = dataclasses.replace(state, request=request, emitted=emitted_b)
        leaves = self._leaves.result()
        function = functools.partial(rounds.top2_gap, sampler=sampler)
        for tokens, count, last in self._chunks([ids]):
            if last[0]:
                probe = self._prompt_program(("top2_gap", sampler), function, slots, False)
                return float(probe.result()(leaves, state, tokens, count)[1][0])
            prefill = self._prefill_program(slots, False, GREEDY).result()
            state, _ = prefill(leaves, state, tokens, count, last)
        raise ValueError("no tokens")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: Options | Sequence[Options] = Options(),
    ) -> list[Generation]:
        """Decodes token-id prompts to the end, in order, each prompt's samples one after another.

        Arguments as for `run`.
        """
        results: dict[tuple[int, int], Generation] = {}
        for event, result in self.run(prompts, options):
            results[event.index, event.sample] = result
        return [self.with_text(results[place]) for place in sorted(results)]

    def with_text(self, result: Generation) -> Generation:
        """Fills `text` where there is a tokenizer; special tokens are left out."""
        if self.tokenizer is not None and result.text is None:
            result.text = text.decode(self.tokenizer, result.output_ids)
        return result


class _Run:
    """One call of `Engine.run`: which row serves which prompt, and results on their way.

    The host dispatches ahead of the device and reads results late. Rows that have finished take
    the next prompts, a group at a time. Results are numbered prompt by prompt, sample by sample.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        options: Sequence[Options],
        min_slots: int = 0,
    ):
        self.engine, self.prompts, self.options = engine, prompts, options
        mode, budget = options[0].mode, options[0].tree_budget or default_budget()
        self.samples = options[0].n
        self.results = [
            Generation(
                list(prompt),
                mode,
                budget if mode == "ddtree" else None,
                sample_index=sample,
                log_probs=[] if each.log_probs else None,
            )
            for prompt, each in zip(prompts, options, strict=True)
            for sample in range(self.samples)
        ]
        self.scanners = [
            text.StreamDecoder(engine.tokenizer, each.stop, each.min_new_tokens)
            if each.stop
            else None
            for each in options
            for _ in range(self.samples)
        ]
        needed = map(engine._slots, map(len, prompts), options)
        slots = max(min_slots, *needed)
        drafting = mode != "ar"
        sampler = sampler_of(options)
        programs = engine._programs_of(options[0], slots, sampler)
        self.round = programs[-1]
        self.insert = programs[1] if len(programs) == 3 else None
        # No clock below measures the compilation of this or the coming of the weights.
        self.prefill = programs[0].result()
        self.leaves = engine._leaves.result()
        fresh = functools.partial(
            engine._fresh, slots=slots, drafting=drafting, penalised=sampler.penalties
        )
        self.state = fresh(engine.batch_size)
        self.group = fresh(engine.prefill_rows, samples=self.samples) if self.insert else None
        self.waiting = collections.deque(range(len(prompts)))
        self.owners: list[int | None] = [None] * engine.batch_size
        self.flying: collections.deque[tuple[Emitted, list[int | None], bool]] = collections.deque()
        self.started = [0.0] * len(self.results)
        self.first = [0.0] * len(self.results)
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
        size, samples = self.engine.prefill_rows, self.samples
        while self.waiting:
            free = [row for row, owner in enumerate(self.owners) if owner is None]
            wanted = min(size, len(self.waiting))
            if len(free) < samples or (len(free) < samples * wanted and self._busy()):
                return
            members = [self.waiting.popleft() for _ in range(min(wanted, len(free) // samples))]
            results = [index * samples + sample for index in members for sample in range(samples)]
            rows = free[: len(results)]
            now = time.perf_counter()
            for row, index in zip(rows, results, strict=True):
                self.owners[row], self.started[index] = index, now
            prompts = [self.prompts[index] for index in members]
            target = self.state if self.group is None else self.group
            group = self.engine._reset(target, prompts, [self.options[i] for i in members])
            for tokens, count, last in self.engine._chunks(prompts):
                group, emitted = self.prefill(self.leaves, group, tokens, count, last)
                ends = np.repeat(last, samples)
                owners = [i if end else None for i, end in zip(results, ends, strict=False)]
                self.flying.append((emitted, owners, True))
            if self.insert is None:
                self.state = group
            else:
                self.group = group
                insert = self._ready(self.insert)
                for start in range(0, len(rows), size):
                    source = np.arange(start, start + size, dtype=np.int32)
                    where = np.full((size,), len(self.owners), np.int32)
                    where[: len(rows) - start] = rows[start : start + size]
                    self.state = insert(self.state, group, source, where)
            # While the round still compiles, the first token can be shown.
            yield from self._settle(self.run_ahead if self.round.done() else 0)

    def _settle(self, keep: int) -> Iterator[tuple[Event, Generation]]:
        """Reads the oldest results until only `keep` are on their way."""
        while len(self.flying) > keep:
            emitted, owners, from_prefill = self.flying.popleft()
            emitted = jax.device_get(emitted)
            now = time.perf_counter()
            for row, index in enumerate(owners):
                # A row that the host has ended goes on until another request takes it.
                ended = index is None or self.results[index].finish_reason != "interrupted"
                if index is None or ended or not emitted.count[row]:
                    continue
                yield self._take(index, emitted, row, now, from_prefill)

    def _take(
        self, index: int, emitted: Emitted, row: int, now: float, from_prefill: bool
    ) -> tuple[Event, Generation]:
        """Adds what one row of a round emitted to its result, up to a stop string."""
        result, scanner = self.results[index], self.scanners[index]
        options = self.options[index // self.samples]
        tokens = emitted.tokens[row, : emitted.count[row]].tolist()
        done = bool(emitted.done[row])
        stopped = False
        if scanner is not None:
            result.text = (result.text or "") + scanner.push(tokens, final=done)
            stopped = scanner.stopped
            tokens = tokens[: scanner.count - len(result.output_ids)]
        result.output_ids.extend(tokens)
        if result.log_probs is not None:
            assert emitted.log_probs is not None
            result.log_probs.extend(emitted.log_probs[row, : len(tokens)].tolist())
        if from_prefill:
            self.first[index] = now
            result.time_to_first_token_s = now - self.started[index]
        else:
            result.accept_lengths.append(len(tokens))
            result.decode_s = now - self.first[index]
        if done or stopped:
            at_stop = stopped or tokens[-1] in self.engine.stop_ids(options)
            result.finish_reason = "stop" if at_stop else "length"
            self.owners[self.owners.index(index)] = None
        event = Event(
            index // self.samples, index % self.samples, tokens, done or stopped, from_prefill
        )
        return event, result
