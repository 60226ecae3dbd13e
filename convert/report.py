"""What `python -m convert inspect` says of a model: facts, warnings, and memory per GPU."""

import dataclasses
import math

from convert.names import Leaf, leaves_of
from convert.source import AnyConfig, Source
from ddtree_jax.config import DecoderConfig, DrafterConfig, RopeConfig

GIB = 2**30
CARDS_GB = (80, 141)  # H100 and H200, as they are sold: 10^9 bytes
_USABLE = 0.9  # of a card; the rest is for activations, kernels' scratch and the runtime
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one GPU: weights, and what is cached of one sequence of `max_length` positions."""

    weights: int
    cache: int
    max_length: int
    tp: int
    dtype: str

    @property
    def total(self) -> int:
        return self.weights + self.cache

    def fits(self, card_gb: int) -> bool:
        return self.total <= _USABLE * card_gb * 1e9


def memory(source: Source[AnyConfig], tp: int, max_length: int, dtype: str) -> Memory:
    """What one of `tp` GPUs holds; of what does not divide (shard_problems) the larger part."""
    width, problems = _BYTES[dtype], source.config.shard_problems(tp)
    config = source.config if problems else source.config.for_shards(tp)

    def local(leaf: Leaf) -> int:
        size = math.prod(leaf.shape)
        return size if leaf.shard_axis is None else math.ceil(size / tp)

    weights = sum(local(leaf) * (4 if leaf.wide else width) for leaf in leaves_of(config))
    heads = math.ceil(config.num_kv_heads / tp)
    cache = 2 * width * config.num_softmax_layers * heads * config.head_dim * max_length
    if config.delta is not None:
        delta, key_heads = config.delta, math.ceil(config.delta.num_key_heads / tp)
        state = 4 * delta.state_size // delta.num_key_heads
        window = width * (delta.conv_taps - 1) * delta.channels
        cache += len(delta.layers) * key_heads * (state + window)
    return Memory(weights, cache, max_length, tp, dtype)


def _rope(rope: RopeConfig) -> str:
    text = f"{rope.kind}, theta {rope.theta:g}"
    if rope.kind != "default":
        text += f", factor {rope.factor:g} over {rope.original_max_position} positions"
    if rope.partial != 1:
        text += f", {rope.partial:g} of each head"
    return text


def _attention(config: DecoderConfig) -> str:
    windows = [w for w in config.windows if w is not None]
    if config.delta is not None:
        layers = f"{config.num_softmax_layers} of {config.num_layers} layers"
        return f"full in {layers}, Gated DeltaNet in {len(config.delta.layers)}"
    if not windows:
        return f"full in all {config.num_layers} layers"
    sizes = ", ".join(map(str, sorted(set(windows))))
    return f"sliding (window {sizes}) in {len(windows)} of {config.num_layers} layers"


def facts(source: Source[AnyConfig]) -> dict[str, str]:
    """Label -> value, in the order in which they are shown."""
    config = source.config
    count = sum(math.prod(shape) for leaf in source.leaves for _, shape in leaf.sources)
    words = {
        "output gate": config.attention_gate,
        "q/k norm": config.qk_norm,
        "biases": config.attention_bias,
    }
    extras = [word for word, on in words.items() if on]
    rows = {
        "kind": source.kind,
        "architecture": ", ".join(source.values.get("architectures") or ["-"]),
        "parameters": f"{count:,} in {len(source.leaves)} arrays",
        "dtype": source.default_dtype,
        "layers": str(config.num_layers),
        "hidden / MLP size": f"{config.hidden_size} / {config.intermediate_size}",
        "heads": f"{config.num_heads} query, {config.num_kv_heads} KV, of size {config.head_dim}",
        "attention": ", ".join([_attention(config), *extras]),
        "rotary": _rope(config.rope),
        "norm epsilon": f"{config.rms_norm_eps:g}",
    }
    if config.delta is not None:
        delta = config.delta
        rows["Gated DeltaNet"] = (
            f"{delta.num_key_heads} key heads of size {delta.key_dim}, {delta.num_value_heads} "
            f"value heads of size {delta.value_dim}, convolution of {delta.conv_taps}"
        )
    if isinstance(config, DrafterConfig):
        causal = sum(config.causal_block)
        rows |= {
            "block size": str(config.block_size),
            "mask token": str(config.mask_token_id),
            "target layers tapped": ", ".join(map(str, config.target_layer_ids)),
            "target's layer count": str(config.num_target_layers or "not given"),
            "causal in the block": f"{causal} of {config.num_layers} layers",
        }
    else:
        tied = "tied" if config.tie_embeddings else "untied"
        rows |= {
            "vocabulary": f"{config.vocab_size} (stored as {config.padded_vocab}), head {tied}",
            "positions": str(config.max_position),
            "stop ids": ", ".join(map(str, config.stop_ids)) or "none",
            "tokenizer": "yes" if source.folder else "no",
        }
    return rows


def warnings(source: Source[AnyConfig], tp: int, max_length: int) -> list[str]:
    config = source.config
    found = config.shard_problems(tp)
    found += [f"{len(part)} {kind} tensors are left out" for kind, part in source.beside.items()]
    if isinstance(config, DrafterConfig):
        if config.num_target_layers is None:
            found.append("the config does not say how many layers its target has")
    else:
        if source.folder is None:
            found.append("there are no tokenizer files: only --prompt-ids will work")
        if not config.stop_ids:
            found.append("there is no stop id: texts end only at their length limit")
        if max_length > config.max_position:
            found.append(f"{max_length} positions are more than its {config.max_position}")
    return found
