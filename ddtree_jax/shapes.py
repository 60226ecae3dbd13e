"""Shapes of published pairs, for measurements with random weights (checkpoints.md 1.4 and 3)."""

import dataclasses
from typing import Any

from ddtree_jax.config import DeltaConfig, DrafterConfig, RopeConfig, TargetConfig


def _pair(
    *,
    family: str,
    layers: int,
    hidden: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    tied: bool,
    draft_layers: int,
    draft_mlp: int,
    block: int,
    taps: tuple[int, ...],
    max_position: int = 40960,
) -> tuple[TargetConfig, DrafterConfig]:
    shared: dict[str, Any] = dict(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1e6),
        attention_bias=False,
    )
    target = TargetConfig(
        **shared,
        intermediate_size=mlp,
        num_layers=layers,
        qk_norm=family != "llama",
        windows=(None,) * layers,
        family=family,
        vocab_size=vocab,
        tie_embeddings=tied,
        max_position=max_position,
        stop_ids=(),
    )
    drafter = DrafterConfig(
        **shared,
        intermediate_size=draft_mlp,
        num_layers=draft_layers,
        qk_norm=True,
        windows=(None,) * draft_layers,
        block_size=block,
        mask_token_id=0,
        target_layer_ids=taps,
        num_target_layers=layers,
        vocab_size=vocab,
        causal_block=(False,) * draft_layers,
    )
    return target, drafter


def _hybrid(
    *, value_heads: int, draft_windows: tuple[int | None, ...], **sizes
) -> tuple[TargetConfig, DrafterConfig]:
    """Three Gated DeltaNet layers and one of gated attention, repeated; the drafter has neither."""
    target, drafter = _pair(
        family="qwen3_5",
        head_dim=256,
        vocab=248320,
        draft_layers=len(draft_windows),
        block=16,
        max_position=262144,
        **sizes,
    )
    delta = DeltaConfig(
        layers=tuple(layer for layer in range(target.num_layers) if layer % 4 != 3),
        num_key_heads=16,
        num_value_heads=value_heads,
        key_dim=128,
        value_dim=128,
        conv_taps=4,
    )
    return (
        dataclasses.replace(
            target,
            rope=RopeConfig(1e7, partial=0.25),
            attention_gate=True,
            centred_norm=True,
            delta=delta,
        ),
        dataclasses.replace(
            drafter,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope=RopeConfig(1e7),
            windows=draft_windows,
            causal_block=tuple(window is not None for window in draft_windows),
        ),
    )


_QWEN3_8B: dict[str, Any] = dict(
    family="qwen3",
    layers=36,
    hidden=4096,
    mlp=12288,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    tied=False,
    draft_layers=5,
    draft_mlp=12288,
    block=16,
    taps=(1, 9, 17, 25, 33),
)
SHAPES: dict[str, tuple[TargetConfig, DrafterConfig]] = {
    "qwen3-8b": _pair(**_QWEN3_8B),
    "qwen3-4b": _pair(**_QWEN3_8B | dict(hidden=2560, mlp=9728, tied=True, draft_mlp=9728)),
    "qwen3-32b": _pair(
        **_QWEN3_8B
        | dict(
            layers=64,
            hidden=5120,
            mlp=25600,
            heads=64,
            draft_mlp=25600,
            taps=(1, 16, 31, 46, 61),
        )
    ),
    "llama-3.1-8b": _pair(
        **_QWEN3_8B
        | dict(
            family="llama", layers=32, mlp=14336, vocab=128256, block=10, taps=(1, 8, 15, 22, 29)
        )
    ),
    "smollm2-135m": _pair(
        family="llama",
        layers=30,
        hidden=576,
        mlp=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocab=49152,
        tied=True,
        draft_layers=3,
        draft_mlp=1536,
        block=16,
        taps=(1, 8, 14, 20, 27),
        max_position=8192,
    ),
    "qwen3.6-27b": _hybrid(
        layers=64,
        hidden=5120,
        mlp=17408,
        heads=24,
        kv_heads=4,
        tied=False,
        value_heads=48,
        draft_windows=(2048,) * 4 + (None,),
        draft_mlp=17408,
        taps=(1, 16, 31, 46, 61),
    ),
    "qwen3.5-9b": _hybrid(
        layers=32,
        hidden=4096,
        mlp=12288,
        heads=16,
        kv_heads=4,
        tied=False,
        value_heads=32,
        draft_windows=(None,) * 5,
        draft_mlp=12288,
        taps=(1, 8, 15, 22, 29),
    ),
    # The target's MLP size, heads and tied head are general knowledge, not read from its config.
    "qwen3.5-4b": _hybrid(
        layers=32,
        hidden=2560,
        mlp=9216,
        heads=16,
        kv_heads=4,
        tied=True,
        value_heads=32,
        draft_windows=(None,) * 5,
        draft_mlp=9728,
        taps=(1, 8, 15, 22, 29),
    ),
}


def first_layers(
    target: TargetConfig, drafter: DrafterConfig, count: int
) -> tuple[TargetConfig, DrafterConfig]:
    """The pair with the target's first `count` layers only, features from the first of them.

    Raises:
      ValueError: the target has fewer layers, or the drafter asks for more features.
    """
    least, most = len(drafter.target_layer_ids), target.num_layers
    if not least <= count <= most:
        raise ValueError(f"{count} layers; expected {least} to {most}")
    delta = target.delta
    if delta is not None:
        layers = tuple(layer for layer in delta.layers if layer < count)
        delta = dataclasses.replace(delta, layers=layers)
    target = dataclasses.replace(
        target, num_layers=count, windows=target.windows[:count], delta=delta
    )
    return target, dataclasses.replace(
        drafter, target_layer_ids=tuple(range(least)), num_target_layers=count
    )


def _tiny() -> tuple[TargetConfig, DrafterConfig]:
    """Seconds on a CPU, for tests."""
    target, drafter = SHAPES["smollm2-135m"]
    small: dict[str, Any] = dict(
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=256,
    )
    return (
        dataclasses.replace(target, **small, num_layers=2, windows=(None,) * 2),
        dataclasses.replace(
            drafter,
            **small,
            num_layers=1,
            windows=(None,),
            causal_block=(False,),
            block_size=4,
            target_layer_ids=(0,),
            num_target_layers=2,
        ),
    )


def _tiny_hybrid() -> tuple[TargetConfig, DrafterConfig]:
    """As `tiny`: two Gated DeltaNet layers and one of attention, a drafter with a window."""
    target, drafter = _tiny()
    delta = DeltaConfig((0, 2), 2, 4, key_dim=8, value_dim=8, conv_taps=4)
    return (
        dataclasses.replace(
            target,
            num_layers=3,
            windows=(None,) * 3,
            rope=RopeConfig(1e7, partial=0.25),
            attention_gate=True,
            centred_norm=True,
            delta=delta,
        ),
        dataclasses.replace(drafter, windows=(8,), causal_block=(True,), num_target_layers=3),
    )


SHAPES["tiny"] = _tiny()
SHAPES["tiny-hybrid"] = _tiny_hybrid()
