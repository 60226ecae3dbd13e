"""Make the folders of `hybrid/` beside this script with transformers (run by hand).

    python make_hybrid.py [--out DIR]

Packages as for make_golden.py. Random targets with Gated DeltaNet layers, every parameter of a size
that matters, and what transformers computes of them in float32:

* `target/`: the checkpoint as transformers saves it. `qwen3_5` is a whole
  Qwen3_5ForConditionalGeneration (text_config, prefixed names, a vision tower) with the tensors of
  a multi-token prediction block added by name; `qwen3_next` is a Qwen3NextForCausalLM without
  experts (fused input projections).
* `parity.safetensors`: `ids`, 75 tokens, more than one chunk; `logits` and `hidden.<layer>` (the
  residual stream after that layer) by the chunk form, in one forward; `stepped_logits`, the same
  after a prompt of 70 tokens by the recurrent form, token by token; and `delta_in`, `delta_out` of
  the second Gated DeltaNet layer alone.
"""

import argparse
from pathlib import Path

import torch
from make_golden import forward_with_states
from safetensors.torch import load_file, save_file
from transformers import (
    DynamicCache,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

TOKENS, PROMPT, LAYER = 75, 70, 1
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,  # well conditioned where a head answers next to nothing
    "eos_token_id": 95,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 1,
    "spatial_merge_size": 1,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
}


def qwen3_5():
    text = TEXT | {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": ROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
    }
    config = Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    return Qwen3_5ForConditionalGeneration(config)


def qwen3_next():
    kinds = ["linear_attention", "full_attention"] * 2
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **TEXT,
            layer_types=kinds,
            rope_parameters=ROPE,
            num_experts=0,
            tie_word_embeddings=True,
        )
    )


@torch.no_grad()
def randomise(model) -> None:
    """Weights of a size that makes every part count.

    Decays are weak to moderate: transformers takes differences of sums of log-decays, so that its
    chunk form is itself wrong by more than 1e-5 where they are strong.
    """
    generator = torch.Generator().manual_seed(13)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("A_log"):
            weight.copy_(torch.linspace(-4, 0.5, len(weight)))
        elif name.endswith("dt_bias") or weight.ndim == 1:
            weight.add_(0.2 * noise)
        elif name.endswith("conv1d.weight"):
            weight.copy_(noise)
        else:
            weight.copy_(weight.shape[-1] ** -0.5 * noise)


class Text(torch.nn.Module):
    """The language model alone, with the names that `forward_with_states` asks for."""

    def __init__(self, model):
        super().__init__()
        self.whole, self.model = model, getattr(model.model, "language_model", model.model)

    def forward(self, ids, **kwargs):
        return self.whole(input_ids=ids, **kwargs)


@torch.no_grad()
def parity(model) -> dict[str, torch.Tensor]:
    ids = torch.randint(90, (1, TOKENS), generator=torch.Generator().manual_seed(12))
    text, seen = Text(model), []
    layer = text.model.layers[[hasattr(x, "linear_attn") for x in text.model.layers].index(True)]
    linear = [x.linear_attn for x in text.model.layers if hasattr(x, "linear_attn")][LAYER]
    assert layer.linear_attn is not linear
    hook = linear.register_forward_hook(
        lambda _module, _inputs, kwargs, output: seen.append((kwargs["hidden_states"], output)),
        with_kwargs=True,
    )
    logits, states = forward_with_states(text, ids)
    hook.remove()
    cache, stepped = DynamicCache(config=model.config), []
    part = ids[:, :PROMPT]
    for end in range(PROMPT, TOKENS + 1):
        out = text(part, past_key_values=cache, use_cache=True)
        stepped.append(out.logits[:, -1])
        part = ids[:, end : end + 1]
    stepped_logits = torch.cat(stepped)
    error = (stepped_logits - logits[0, PROMPT - 1 :]).abs().max().item()
    print(f"  chunk against recurrent form: {error:.1e} of {logits.abs().max().item():.1f}")
    assert error < 1e-4
    tensors = {"ids": ids[0], "logits": logits[0], "stepped_logits": stepped_logits}
    tensors |= {f"hidden.{index}": state[0] for index, state in enumerate(states)}
    tensors |= {"delta_in": seen[0][0][0], "delta_out": seen[0][1][0]}
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "hybrid")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    for make in (qwen3_5, qwen3_next):
        print(make.__name__)
        model = make().eval().requires_grad_(False)
        randomise(model)
        folder = out / make.__name__
        model.save_pretrained(folder / "target")
        (folder / "target" / "generation_config.json").unlink(missing_ok=True)
        if make is qwen3_5:
            file = folder / "target" / "model.safetensors"
            size = TEXT["hidden_size"]
            extra = {
                "mtp.fc.weight": torch.ones(size, 2 * size),
                "mtp.norm.weight": torch.ones(size),
            }
            save_file(load_file(file) | extra, file, metadata={"format": "pt"})
        save_file(parity(model), folder / "parity.safetensors", metadata={"format": "pt"})
    for path in out.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


if __name__ == "__main__":
    main()
