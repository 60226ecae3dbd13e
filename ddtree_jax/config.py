"""Model configurations, parsed from a Hugging Face `config.json`. Nothing is guessed.

Every fact that changes the mathematics is read from the file or refused; see `parse_target`,
`parse_drafter` and `check_pair`. A configuration is frozen and hashable, so it can be a static
argument of a jitted program.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from ddtree_jax.errors import InputError

VOCAB_MULTIPLE = 128  # embedding and head rows are padded to this, so that shards stay aligned
GATE_COLUMNS = 32  # of an MLP; what matmul.py in kernels_pallas takes
MAX_BLOCK_SIZE = 32  # a tree is at most one level less deep
MAX_STOP_IDS = 8
MAX_LAYERS = 1024  # far beyond every model; what is made per layer stays small
LARGEST = 2**31 - 1  # of every other integer: sizes and ids are int32 in the programs


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding over the first `partial` of `head_dim`, neox style (rotate half).

    kind: "default", "llama3" or "yarn"; the other fields are used by the kinds that need them.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    partial: float = 1.0


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    """The Gated DeltaNet layers of a hybrid target (checkpoints.md 3.4).

    layers: which decoder layers they are, counted from 0. fused: whether the checkpoint keeps their
    projections fused per key head, as Qwen3-Next does.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    fused: bool = False

    @property
    def group_size(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """Channels of the convolution per key head: q, k, then the group's v."""
        return 2 * self.key_dim + self.group_size * self.value_dim

    @property
    def state_size(self) -> int:
        """Numbers in a layer's state."""
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def projected(self) -> int:
        """Columns of the input projection per key head: the channels, then z, b and a."""
        return self.channels + self.group_size * (self.value_dim + 2)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What target and drafter layers share.

    windows[l] is the sliding window of layer l in positions, the query itself counted, or None for
    full attention. attention_gate: softmax attention is multiplied by a sigmoid of its own input.
    centred_norm: norms multiply by 1 + w. delta: the layers that are no softmax attention.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    attention_bias: bool
    windows: tuple[int | None, ...]
    attention_gate: bool = dataclasses.field(default=False, kw_only=True)
    centred_norm: bool = dataclasses.field(default=False, kw_only=True)
    delta: DeltaConfig | None = dataclasses.field(default=None, kw_only=True)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def gate_columns(self) -> int:
        """Columns of an MLP's gate that stand side by side, before as many of up.

        As many as the kernel for both takes, or fewer so that up to 8 shards can share the groups.
        """
        columns = GATE_COLUMNS
        while columns > 1 and self.intermediate_size % (8 * columns):
            columns //= 2
        return columns

    @property
    def num_softmax_layers(self) -> int:
        return self.num_layers - len(self.delta.layers if self.delta else ())

    def is_recurrent(self, layer: int) -> bool:
        return self.delta is not None and layer in self.delta.layers

    def for_shards(self, shards: int) -> Self:
        """The same model with as many KV heads as `shards` devices can share.

        The same is done with key heads of Gated DeltaNet and their value heads; see `shared_heads`.

        Raises:
          InputError: something does not divide; it names all of that.
        """
        problems = self.shard_problems(shards)
        if problems:
            raise InputError("; ".join(problems))
        delta = self.delta
        if delta is not None:
            keys, values = shared_heads(delta.num_key_heads, delta.group_size, shards)
            delta = dataclasses.replace(delta, num_key_heads=keys, num_value_heads=values)
        kv_heads, heads = shared_heads(self.num_kv_heads, self.group_size, shards)
        return dataclasses.replace(self, num_kv_heads=kv_heads, num_heads=heads, delta=delta)

    def shard_problems(self, shards: int) -> list[str]:
        """Every reason why `shards` devices cannot share the model."""
        sizes = {"MLP size": (self.intermediate_size, self.gate_columns)}
        if isinstance(self, TargetConfig):
            sizes["padded vocabulary"] = self.padded_vocab, 1
        return [
            f"the {name} of {size} does not divide over {shards} shards"
            + (f" in groups of {together}" if together > 1 else "")
            for name, (size, together) in sizes.items()
            if size % (shards * together)
        ]


def shared_heads(owners: int, group: int, shards: int) -> tuple[int, int]:
    """How many KV heads, and query heads in all, a model has whose KV heads `shards` divide.

    Query heads stand in the order of their KV heads, so to repeat each KV head r times and give
    each copy an r-th of its queries is the same attention. A head whose weights are all 0 adds 0 to
    the output: it fills up queries that r does not divide, or KV heads that are too few by some.
    Of the two ways the one with fewer heads is taken; `convert.names.regroup` makes the weights.
    """
    repeated = math.lcm(owners, shards)
    filled = -(-owners // shards) * shards
    ways = [(repeated * -(-group * owners // repeated), repeated)]
    if filled % owners:
        ways.append((filled * group, filled))
    heads, kv_heads = min(ways)
    return kv_heads, heads


@dataclasses.dataclass(frozen=True)
class TargetConfig(DecoderConfig):
    """A dense causal language model of the Llama, Qwen3, Qwen3.5 or Qwen3-Next family."""

    family: str
    vocab_size: int
    tie_embeddings: bool
    max_position: int
    stop_ids: tuple[int, ...]

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclasses.dataclass(frozen=True)
class DrafterConfig(DecoderConfig):
    """A DFlash v1 drafter (arXiv 2602.06036). It has neither embedding nor head of its own.

    causal_block[l]: whether layer l is causal inside the block; otherwise it is bidirectional.
    target_layer_ids: decoder layers of the target, counted from 0, whose OUTPUT is a feature.
    noise_trust: per masked slot how far its log-probabilities and how far the target's noise are
    trusted when both rank candidates (sampling.draft_scores); empty where it was not measured.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int | None
    causal_block: tuple[bool, ...]
    noise_trust: tuple[tuple[float, float], ...] = ()

    @property
    def feature_size(self) -> int:
        return len(self.target_layer_ids) * self.hidden_size


def _is_positive(value: Any) -> bool:
    """Whether it is a positive finite number."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


class _Reader:
    """Reads keys of one JSON object; errors name the file, the key and what is expected."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = ""):
        self.values, self.source, self.prefix = values, source, prefix

    def fail(self, key: str, expected: str) -> InputError:
        return InputError(f"{self.source}: '{self.prefix}{key}' {expected}")

    def get(self, key: str, default: Any = None) -> Any:
        """An explicit null counts as missing."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(
        self, key: str, *, minimum: int = 1, maximum: int | None = None, default: int | None = None
    ) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "is missing; expected an integer")
        largest = LARGEST if maximum is None else maximum
        if type(value) is not int or not minimum <= value <= largest:
            wanted = f"an integer of at least {minimum}"
            if maximum is not None or (type(value) is int and value > largest):
                wanted = f"{minimum} to {largest}"
            raise self.fail(key, f"is {value!r}; expected {wanted}")
        return value

    def number(self, key: str, *, default: float | None = None, zero: bool = False) -> float:
        """A positive finite number; 0 too with `zero`."""
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "is missing; expected a number")
        if not _is_positive(value) and not (zero and type(value) in (int, float) and value == 0):
            expected = "a finite number of at least 0" if zero else "a positive finite number"
            raise self.fail(key, f"is {value!r}; expected {expected}")
        return float(value)

    def pairs(self, key: str, count: int) -> tuple[tuple[float, float], ...]:
        """`count` pairs of positive finite numbers; none where the key is missing."""
        value = self.get(key)
        if value is None:
            return ()
        wanted = f"expected {count} pairs of positive finite numbers"
        if not isinstance(value, list) or len(value) != count:
            what = f"has {len(value)} entries" if isinstance(value, list) else f"is {value!r}"
            raise self.fail(key, f"{what}; {wanted}")
        for pair in value:
            if not isinstance(pair, list) or len(pair) != 2 or not all(map(_is_positive, pair)):
                raise self.fail(key, f"holds {pair!r}; {wanted}")
        return tuple((float(first), float(second)) for first, second in value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"is {value!r}; expected true or false")
        return value

    def section(self, key: str) -> "_Reader":
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.fail(key, "is not an object; expected a JSON object")
        return _Reader(value, self.source, f"{self.prefix}{key}.")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; InputError when it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; expected a model's config.json") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise InputError(f"{path}: is not valid JSON ({error})") from None
    except RecursionError:
        raise InputError(f"{path}: is not valid JSON (nested too deeply)") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object")
    return value


def _rope(
    config: _Reader, head_dim: int, default_theta: float | None, default_partial: float | None
) -> RopeConfig:
    """RoPE from `rope_parameters` (transformers 5), else `rope_scaling` + `rope_theta` (4).

    Without a `default_partial` the family rotates all of `head_dim`.
    """
    params = config.section("rope_parameters")
    if not params.values:
        params = config.section("rope_scaling")
    elif "sliding_attention" in params.values or "full_attention" in params.values:
        kinds = [params.section(kind) for kind in params.values]
        if any(kind.values != kinds[0].values for kind in kinds):
            raise config.fail("rope_parameters", "differs by layer type, which is not supported")
        params = kinds[0]
    theta = params.get("rope_theta", config.get("rope_theta", default_theta))
    theta = _Reader({"rope_theta": theta}, config.source, config.prefix).number("rope_theta")
    holder = config if params.get("partial_rotary_factor") is None else params
    partial = holder.number("partial_rotary_factor", default=default_partial or 1.0)
    if default_partial is None and partial != 1.0:
        raise holder.fail("partial_rotary_factor", f"is {partial}; only 1.0 is supported")
    if partial > 1 or int(head_dim * partial) % 2 or int(head_dim * partial) == 0:
        wanted = f"a part of {head_dim} that is an even number of dimensions"
        raise holder.fail("partial_rotary_factor", f"is {partial}; expected {wanted}")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta, partial=partial)
    if kind == "yarn" and theta <= 1:  # it divides by the logarithm
        raise config.fail("rope_theta", f"is {theta}; expected more than 1 for yarn")
    if kind not in ("llama3", "yarn"):
        known = "expected default, llama3 or yarn"
        raise params.fail("rope_type", f"is {kind!r}, which is not supported; {known}")
    max_position = config.get("max_position_embeddings")
    if max_position is not None:
        max_position = config.integer("max_position_embeddings")
    original = params.integer("original_max_position_embeddings", default=max_position)
    if kind == "llama3":
        low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
        if low >= high:
            raise params.fail("high_freq_factor", f"is {high}; expected more than the low {low}")
        return RopeConfig(
            theta,
            kind,
            factor=params.number("factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
            partial=partial,
        )
    factor = params.number("factor", default=(max_position or 0) / original or None)
    return RopeConfig(
        theta,
        kind,
        factor=factor,
        original_max_position=original,
        beta_fast=params.number("beta_fast", default=32.0),
        beta_slow=params.number("beta_slow", default=1.0),
        truncate=params.flag("truncate", True),
        attention_factor=_yarn_attention_factor(params, factor),
        partial=partial,
    )


def _yarn_attention_factor(params: _Reader, factor: float) -> float:
    if params.get("attention_factor") is not None:
        return params.number("attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator = params.number("mscale", default=0.0, zero=True)
    denominator = params.number("mscale_all_dim", default=0.0, zero=True)
    if numerator and denominator:
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)


def _windows(config: _Reader, num_layers: int, *, by_layer_types: bool) -> tuple[int | None, ...]:
    """The window of each layer. Targets also need `use_sliding_window`; drafters may omit it."""
    kinds = config.get("layer_types")
    enabled = config.get("use_sliding_window", by_layer_types)
    if kinds is None:
        if config.get("use_sliding_window", False) and config.get("sliding_window"):
            raise config.fail("layer_types", "is missing although 'use_sliding_window' is true")
        return (None,) * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.fail("layer_types", f"must list {num_layers} layer kinds")
    windows: list[int | None] = []
    for kind in kinds:
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention" and enabled:
            windows.append(config.integer("sliding_window"))
        elif kind == "sliding_attention":
            raise config.fail(
                "layer_types", "has sliding_attention although 'use_sliding_window' is false"
            )
        else:
            raise config.fail("layer_types", f"holds {kind!r}, which is not supported")
    return tuple(windows)


def _decoder_fields(
    config: _Reader, default_theta: float | None, default_partial: float | None = None
) -> dict[str, Any]:
    if config.get("hidden_act", "silu") != "silu":
        raise config.fail("hidden_act", f"is {config.get('hidden_act')!r}; expected 'silu'")
    hidden_size = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.fail("num_key_value_heads", f"is {kv_heads}, which does not divide {heads}")
    head_dim = config.get("head_dim")
    if head_dim is None and hidden_size % heads:
        raise config.fail("head_dim", f"is missing and {heads} heads do not divide {hidden_size}")
    head_dim = config.integer("head_dim", default=hidden_size // heads)
    return dict(
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope=_rope(config, head_dim, default_theta, default_partial),
        attention_bias=config.flag("attention_bias", False),
    )


def _delta(config: _Reader, num_layers: int, family: str) -> DeltaConfig:
    """The Gated DeltaNet layers, from `layer_types` or else `full_attention_interval`."""
    kinds = config.get("layer_types")
    if kinds is None:
        interval = config.integer("full_attention_interval")
        full = [(layer + 1) % interval == 0 for layer in range(num_layers)]
        kinds = ["full_attention" if one else "linear_attention" for one in full]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.fail("layer_types", f"must list {num_layers} layer kinds")
    known = ("linear_attention", "full_attention")
    for kind in kinds:
        if kind not in known:
            raise config.fail("layer_types", f"holds {kind!r}; expected {' or '.join(known)}")
    for kind in known:
        if kind not in kinds:
            raise config.fail("layer_types", f"holds no {kind}; expected layers of both kinds")
    key_heads = config.integer("linear_num_key_heads")
    value_heads = config.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise config.fail(
            "linear_num_value_heads", f"is {value_heads}; expected a multiple of {key_heads}"
        )
    return DeltaConfig(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == known[0]),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        conv_taps=config.integer("linear_conv_kernel_dim", minimum=2),
        fused=family == "qwen3_next",
    )


def _refuse_experts(config: _Reader, num_layers: int, family: str) -> None:
    """A layer of Qwen3-Next is a mixture of experts unless its configuration says otherwise."""
    experts = config.get("num_experts", 512 if family == "qwen3_next" else 0)
    dense = config.get("mlp_only_layers", [])
    step = config.integer("decoder_sparse_step", default=1)
    if not isinstance(dense, list):
        raise config.fail("mlp_only_layers", f"is {dense!r}; expected a list of layers")
    sparse = [i for i in range(num_layers) if i not in dense and (i + 1) % step == 0]
    if experts and sparse:
        raise config.fail(
            "num_experts",
            f"is {experts}: mixtures of experts are not supported yet; expected a dense model",
        )


def _hybrid_fields(config: _Reader, family: str) -> dict[str, Any]:
    """Qwen3.5, Qwen3.6 and Qwen3-Next: Gated DeltaNet layers, gated softmax attention."""
    config.integer("head_dim")  # not hidden size / heads in these families
    if not config.flag("attn_output_gate", True):
        raise config.fail("attn_output_gate", "is false; expected true")
    if config.flag("attention_bias", False):
        raise config.fail("attention_bias", "is true, which is not supported in this family")
    fields = _decoder_fields(config, default_theta=10000.0, default_partial=0.25)
    _refuse_experts(config, fields["num_layers"], family)
    delta = _delta(config, fields["num_layers"], family)
    return fields | dict(attention_gate=True, centred_norm=True, delta=delta)


def _tied(config: _Reader, text: _Reader) -> bool:
    """`tie_word_embeddings` of a model with a text_config stands in both or in one of them."""
    flags = [reader.flag("tie_word_embeddings", False) for reader in (config, text)]
    given = [reader.get("tie_word_embeddings") is not None for reader in (config, text)]
    if all(given) and flags[0] != flags[1]:
        raise text.fail("tie_word_embeddings", f"is {flags[1]}; expected {flags[0]} as at the top")
    return any(flags)


_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3NextForCausalLM": "qwen3_next",
}
_HYBRIDS = ("qwen3_5", "qwen3_next")


def is_drafter(values: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a DFlash drafter rather than a target."""
    return "dflash_config" in values or _architecture(values).startswith("DFlash")


def _architecture(values: Mapping[str, Any]) -> str:
    """The first of 'architectures', or "" where there is none."""
    names = values.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return first if isinstance(first, str) else ""


def _refuse_quantised(config: _Reader) -> None:
    if config.get("quantization_config") is not None:
        method = config.section("quantization_config").get("quant_method", "unknown")
        raise config.fail(
            "quantization_config", f"says the checkpoint is quantised ({method}); not supported"
        )


def _stop_ids(reader: _Reader, vocab_size: int) -> tuple[int, ...]:
    """'eos_token_id': none, one token id or a list of them."""
    stops = reader.get("eos_token_id", [])
    stops = stops if isinstance(stops, list) else [stops]
    if len(stops) > MAX_STOP_IDS:
        raise reader.fail(
            "eos_token_id", f"lists {len(stops)} token ids; expected at most {MAX_STOP_IDS}"
        )
    for stop in stops:
        if type(stop) is not int or not 0 <= stop < vocab_size:
            raise reader.fail(
                "eos_token_id", f"holds {stop!r}; expected token ids from 0 to {vocab_size - 1}"
            )
    return tuple(stops)


def parse_target(
    values: Mapping[str, Any], source: str, generation: Mapping[str, Any] | None = None
) -> TargetConfig:
    """Parses a target's config.json.

    Args:
      values: the JSON object.
      source: the file's name, for messages.
      generation: generation_config.json, whose stop ids win over those of config.json.

    Raises:
      InputError: an unknown architecture, a missing or bad key, a quantised checkpoint.
    """
    config = _Reader(values, source)
    name = _architecture(values)
    if is_drafter(values):
        raise config.fail("architectures", f"is {name!r}: a DFlash drafter, not a target")
    if "Moe" in name:
        problem = f"is {name!r}: mixtures of experts are not supported yet"
        raise config.fail("architectures", problem)
    if name not in _FAMILIES:
        known = " or ".join(_FAMILIES)
        got = values.get("architectures")
        raise config.fail("architectures", f"is {got!r}, which is not supported; expected {known}")
    _refuse_quantised(config)
    top = config
    if name.endswith("ForConditionalGeneration"):
        config = config.section("text_config")
        if not config.values:
            raise top.fail("text_config", "is missing; expected the language model's configuration")
        _refuse_quantised(config)
    if config.flag("mlp_bias", False):
        raise config.fail("mlp_bias", "is true, which is not supported")
    family = _FAMILIES[name]
    if family in _HYBRIDS:
        fields = _hybrid_fields(config, family)
    else:
        fields = _decoder_fields(config, default_theta=10000.0)
    vocab_size = config.integer("vocab_size")
    stop_reader = top if config.get("eos_token_id") is None else config
    if (generation or {}).get("eos_token_id") is not None:
        stop_reader = _Reader(
            generation or {}, str(Path(source).with_name("generation_config.json"))
        )
    sliding = family == "qwen3" and config.get("use_sliding_window", False)
    return TargetConfig(
        **fields,
        qk_norm=family != "llama",
        windows=(
            _windows(config, fields["num_layers"], by_layer_types=False)
            if sliding
            else (None,) * fields["num_layers"]
        ),
        family=family,
        vocab_size=vocab_size,
        tie_embeddings=_tied(top, config),
        max_position=config.integer("max_position_embeddings"),
        stop_ids=_stop_ids(stop_reader, vocab_size),
    )


# Keys that change a drafter's algorithm and are not implemented here: refused, never ignored.
_UNSUPPORTED_DRAFT_KEYS = (
    "attention_sink_bias",
    "attention_value_scale",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "use_swa",
    "swa_window_size",
    "draft_vocab_size",
    "target_hidden_size",
    "speculators_model_type",
)
_UNSUPPORTED_DRAFT_PREFIXES = ("conv_", "selector_")


def _refuse_draft_variants(config: _Reader, dflash: _Reader) -> None:
    for reader in (config, dflash):
        for key, value in reader.values.items():
            named = key in _UNSUPPORTED_DRAFT_KEYS or key.startswith(_UNSUPPORTED_DRAFT_PREFIXES)
            if named and value not in (None, False):
                raise reader.fail(key, f"is {value!r}: this variant of DFlash is not supported")
        for key in ("is_neox_style", "rope_is_neox_style"):
            if reader.get(key, True) is not True:
                raise reader.fail(key, "is false; only neox-style rotary is supported")
    projector = dflash.get("projector_type")
    if projector is not None:
        raise dflash.fail("projector_type", f"is {projector!r}, which is not supported")


def _causal_block(
    config: _Reader, dflash: _Reader, windows: tuple[int | None, ...]
) -> tuple[bool, ...]:
    """An explicit key rules all layers; without one only sliding layers are causal in-block."""
    for reader, key in ((config, "is_causal"), (dflash, "causal"), (dflash, "causal_head")):
        if reader.get(key) is not None:
            return (reader.flag(key, False),) * len(windows)
    return tuple(window is not None for window in windows)


def parse_drafter(values: Mapping[str, Any], source: str) -> DrafterConfig:
    """Parses a DFlash v1 drafter's config.json.

    A value may stand in `dflash_config` or at the top level; the former wins.

    Raises:
      InputError: not a drafter, a missing or bad key, a variant that is not implemented.
    """
    config = _Reader(values, source)
    name = _architecture(values)
    if not is_drafter(values):
        raise config.fail("architectures", f"is {name!r}; expected a DFlash drafter")
    if name not in ("", "DFlashDraftModel"):
        raise config.fail("architectures", f"is {name!r}; expected 'DFlashDraftModel'")
    _refuse_quantised(config)
    dflash = config.section("dflash_config")
    _refuse_draft_variants(config, dflash)

    def holder(key: str) -> _Reader:
        if dflash.get(key) is None and config.get(key) is not None:
            return config
        return dflash

    layer_ids = holder("target_layer_ids").get("target_layer_ids")
    if not isinstance(layer_ids, list) or not layer_ids:
        problem = "is missing; expected the list of target layers that the drafter was trained on"
        raise dflash.fail("target_layer_ids", problem)
    if any(type(i) is not int or i < 0 for i in layer_ids) or len(set(layer_ids)) < len(layer_ids):
        raise dflash.fail("target_layer_ids", f"is {layer_ids}; expected distinct layers from 0")
    fields = _decoder_fields(config, default_theta=None)
    windows = _windows(config, fields["num_layers"], by_layer_types=True)
    # Drafters have it beside `dflash_config`, if not in it.
    block = config if dflash.get("block_size") is None else dflash
    block_size = block.integer("block_size", minimum=2, maximum=MAX_BLOCK_SIZE)

    def optional(reader: _Reader, key: str) -> int | None:
        return None if reader.get(key) is None else reader.integer(key)

    return DrafterConfig(
        **fields,
        qk_norm=True,
        windows=windows,
        block_size=block_size,
        mask_token_id=holder("mask_token_id").integer("mask_token_id", minimum=0),
        target_layer_ids=tuple(layer_ids),
        num_target_layers=optional(holder("num_target_layers"), "num_target_layers"),
        vocab_size=optional(config, "vocab_size"),
        causal_block=_causal_block(config, dflash, windows),
        noise_trust=holder("noise_trust").pairs("noise_trust", block_size - 1),
    )


def pair_problems(target: TargetConfig, drafter: DrafterConfig, source: str) -> list[str]:
    """Every reason why `drafter` (whose config is `source`) cannot draft for `target`."""
    problems = []
    last = target.num_layers - 1
    if drafter.hidden_size != target.hidden_size:
        problems.append(
            f"'hidden_size' is {drafter.hidden_size}; expected the target's {target.hidden_size}"
        )
    if drafter.num_target_layers not in (None, target.num_layers):
        problems.append(
            f"'num_target_layers' is {drafter.num_target_layers}; "
            f"expected the target's {target.num_layers}"
        )
    bad_ids = [layer for layer in drafter.target_layer_ids if layer >= last]
    if bad_ids:
        problems.append(
            f"'target_layer_ids' holds {bad_ids}; expected layers below {last}, "
            f"the last of the target's {target.num_layers}"
        )
    if drafter.vocab_size not in (None, target.vocab_size):
        problems.append(
            f"'vocab_size' is {drafter.vocab_size}; expected the target's {target.vocab_size}"
        )
    if drafter.mask_token_id >= target.vocab_size:
        problems.append(
            f"'mask_token_id' is {drafter.mask_token_id}; "
            f"expected an id below the target's vocabulary of {target.vocab_size}"
        )
    return [f"{source}: {problem}" for problem in problems]


def check_pair(target: TargetConfig, drafter: DrafterConfig, source: str) -> None:
    """Raises InputError naming every mismatch of the pair."""
    problems = pair_problems(target, drafter, source)
    if problems:
        raise InputError("; ".join(problems))
