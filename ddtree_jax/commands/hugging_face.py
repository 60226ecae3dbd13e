"""The baseline of `bench.py round --baseline`: transformers' `generate` on the same GPU.

PyTorch stays in a process of its own: `python -m ddtree_jax.commands.hugging_face` reads what to
measure from standard input and prints the result.
"""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from ddtree_jax.config import TargetConfig
from ddtree_jax.errors import InputError, RunError

WARM_UP, TOKENS = 10, 60
KINDS = {"qwen3": "qwen3", "llama": "llama"}  # our families: model types of transformers


def config_values(config: TargetConfig, max_position: int) -> dict[str, Any]:
    """transformers' configuration of a dense target with full attention and default RoPE."""
    if config.family not in KINDS or any(config.windows) or config.rope.kind != "default":
        raise InputError("--baseline takes shapes of dense Llama or Qwen3 targets only")
    return {
        "model_type": KINDS[config.family],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
        "bos_token_id": None,
        "eos_token_id": None,  # nothing ends a text
        "pad_token_id": None,
    }


def check() -> None:
    """Raises InputError where PyTorch is not installed; does not import it."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("--baseline needs torch; it is not installed")


def baseline(config: TargetConfig, contexts: Sequence[int], dtype: str) -> list[dict[str, Any]]:
    """A row for each context: milliseconds per generated token, greedy, random weights.

    To be called before JAX takes the GPU's memory.
    """
    check()
    longest = max(config.max_position, max(contexts) + WARM_UP + TOKENS + 1)
    request = {
        "config": config_values(config, longest),
        "contexts": list(contexts),
        "dtype": dtype,
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RunError(f"--baseline: transformers' generate failed: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _main() -> None:
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """When each token reached the host; the first call brings the prompt."""

        def __init__(self) -> None:
            self.stamps: list[float] = []

        def put(self, value):
            self.stamps.append(time.perf_counter())

        def end(self):
            pass

    request = json.load(sys.stdin)
    values = dict(request["config"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:  # 8B random numbers take minutes on a CPU
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, request["dtype"]), attn_implementation="sdpa"
        )
    model = model.to(device).eval()
    rows = []
    for context in request["contexts"]:
        ids = torch.randint(config.vocab_size, (1, context), device=device)
        clock = Clock()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=WARM_UP + TOKENS + 1,
            do_sample=False,
            use_cache=True,
            streamer=clock,
        )
        times = 1e3 * np.diff(clock.stamps[1:])[WARM_UP:]  # of prompt and first token neither
        rows.append(
            {
                "label": "hugging face generate",
                "context": context,
                "tokens": len(times),
                "median_ms": float(np.median(times)),
                "p10_ms": float(np.percentile(times, 10)),
                "p90_ms": float(np.percentile(times, 90)),
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            }
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    _main()
