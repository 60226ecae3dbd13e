"""Writes a drafter of ours in the public DFlash v1 layout: config.json and safetensors."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_jax.config import DrafterConfig, TargetConfig

SHARD_BYTES = 15_000_000  # some hosts and code reviews refuse larger files


def drafter_values(config: DrafterConfig, target: TargetConfig) -> dict[str, Any]:
    """The config.json of a drafter with full attention and default RoPE."""
    if any(config.windows) or any(config.causal_block) or config.rope.kind != "default":
        raise ValueError("only drafters with full attention and default RoPE are exported")
    dflash: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.noise_trust:
        dflash["noise_trust"] = [list(pair) for pair in config.noise_trust]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": config.block_size,
        "dflash_config": dflash,
        "num_target_layers": config.num_target_layers,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "attention_bias": config.attention_bias,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": target.max_position,
        "tie_word_embeddings": target.tie_embeddings,
        "vocab_size": target.vocab_size,
    }


def drafter_tensors(
    config: DrafterConfig, params: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The tensors [out, in] of checkpoints.md 1.1, from parameters by dotted path."""
    g, d = config.group_size, config.hidden_size
    tensors = {
        "fc.weight": params["fc_fd"].T,
        "hidden_norm.weight": params["hidden_norm.weight_d"],
        "norm.weight": params["norm.weight_d"],
    }
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}.", f"layers.{index}."
        qkv, qkv_bias = params[ours + "attention.wqkv_dkgh"], None
        if config.attention_bias:
            qkv_bias = params[ours + "attention.bqkv_kgh"]
            tensors[theirs + "self_attn.o_proj.bias"] = params[ours + "attention.bo_d"]
        for name, heads in (("q", slice(0, g)), ("k", slice(g, g + 1)), ("v", slice(g + 1, None))):
            tensors[theirs + f"self_attn.{name}_proj.weight"] = qkv[:, :, heads].reshape(d, -1).T
            if qkv_bias is not None:
                tensors[theirs + f"self_attn.{name}_proj.bias"] = qkv_bias[:, heads].reshape(-1)
        gate_up = params[ours + "mlp.gate_up_dg2c"]
        tensors |= {
            theirs + "input_layernorm.weight": params[ours + "input_norm.weight_d"],
            theirs + "post_attention_layernorm.weight": params[ours + "mlp_norm.weight_d"],
            theirs + "self_attn.o_proj.weight": params[ours + "attention.wo_kghd"].reshape(-1, d).T,
            theirs + "self_attn.q_norm.weight": params[ours + "attention.q_norm.weight_d"],
            theirs + "self_attn.k_norm.weight": params[ours + "attention.k_norm.weight_d"],
            theirs + "mlp.gate_proj.weight": gate_up[:, :, 0].reshape(d, -1).T,
            theirs + "mlp.up_proj.weight": gate_up[:, :, 1].reshape(d, -1).T,
            theirs + "mlp.down_proj.weight": params[ours + "mlp.down_fd"].T,
        }
    return tensors


def export_drafter(
    config: DrafterConfig,
    target: TargetConfig,
    params: Mapping[str, np.ndarray],
    destination: Path,
    *,
    dtype=ml_dtypes.bfloat16,
) -> None:
    """Writes config.json and model-*.safetensors with their index; replaces those of `destination`.

    Other files of the folder (a model card) stay. A partial file never carries the final name.
    """
    from safetensors.numpy import save_file

    shards: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in sorted(drafter_tensors(config, params).items()):
        tensor = np.ascontiguousarray(tensor.astype(dtype))
        if sum(part.nbytes for part in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    total = sum(tensor.nbytes for part in shards for tensor in part.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {
            name: file for file, part in zip(files, shards, strict=True) for name in sorted(part)
        },
    }
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination) as staging:
        staged = Path(staging)
        for file, part in zip(files, shards, strict=True):
            save_file(part, staged / file, metadata={"format": "pt"})
        (staged / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        values = json.dumps(drafter_values(config, target), indent=1) + "\n"
        (staged / "config.json").write_text(values)
        for old in destination.glob("model-*.safetensors"):
            old.unlink()
        for written in staged.iterdir():
            written.chmod(0o644)
            shutil.move(written, destination / written.name)
