"""Makes distribution.safetensors: the exact distribution of the first three sampled tokens.

Run with PyTorch and transformers 5.17 installed: python tests/oracle/make_distribution.py

For a prompt of the pair llama_mha at T = 1.5 (flatter, so that many tokens have a chance):
`prompt` int32 [p]; `marginals` float64 [3, v], of the first, second and third token, summed over
all that may come before.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PROMPT, TEMPERATURE = [3, 14, 15, 92, 65], 1.5


def next_tokens(model, ids):
    """Probabilities float64 [b, v] after each of these texts."""
    with torch.no_grad():
        parts = [model(part).logits[:, -1] for part in torch.tensor(ids).split(512)]
    return torch.softmax(torch.cat(parts).double() / TEMPERATURE, dim=-1).numpy()


def main():
    model = AutoModelForCausalLM.from_pretrained(
        HERE / "llama_mha" / "target", dtype=torch.float32
    ).eval()
    size = model.config.vocab_size
    first = next_tokens(model, [PROMPT])[0]
    pairs = first[:, None] * next_tokens(model, [[*PROMPT, a] for a in range(size)])
    both = [[*PROMPT, a, b] for a in range(size) for b in range(size)]
    third = pairs.reshape(-1) @ next_tokens(model, both)
    save_file(
        {
            "prompt": np.array(PROMPT, np.int32),
            "marginals": np.stack([first, pairs.sum(axis=0), third]),
        },
        HERE / "distribution.safetensors",
    )


if __name__ == "__main__":
    main()
