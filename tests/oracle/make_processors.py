"""Makes processors.safetensors: what transformers' logits processors do to random logits.

Run with PyTorch and transformers 5.17 installed: python tests/oracle/make_processors.py

`logits` float32 [4, 300] (two rows without near-ties, a flat one, a peaked one), `text` int32
[4, 12] (tokens of prompt and output, the last 5 of them output). Every other array is the logits
after the processor or warper of its name, its argument behind a colon; "all" is the whole chain in
the order of `generate`: sequence bias, repetition penalty, minimum of new tokens, temperature,
top-k, top-p, min-p.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers.generation import logits_process as lp

STOPS = [5, 7]
BIAS = {3: 2.5, 11: -4.0, 299: 1.0}


def main():
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((4, 300)).astype(np.float32) * np.float32(3)
    logits[2] *= np.float32(0.1)
    logits[3] *= np.float32(4)
    text = generator.integers(0, 300, (4, 12)).astype(np.int32)
    text[:, 8] = text[:, 2]  # a token of prompt and output
    text[:, 10] = text[:, 9]  # a token twice in the output
    processors = {}
    for k in (1, 5, 50, 299, 1000):
        processors[f"top_k:{k}"] = [lp.TopKLogitsWarper(k)]
    for p in (0.05, 0.5, 0.9, 0.99):
        processors[f"top_p:{p}"] = [lp.TopPLogitsWarper(p)]
    for p in (0.02, 0.1, 0.5, 1.0):
        processors[f"min_p:{p}"] = [lp.MinPLogitsWarper(p)]
    for r in (0.8, 1.3):
        processors[f"repetition:{r}"] = [lp.RepetitionPenaltyLogitsProcessor(r)]
    bias = lp.SequenceBiasLogitsProcessor({(token,): value for token, value in BIAS.items()})
    processors["bias"] = [bias]
    for minimum in (5, 6):
        processors[f"min_new_tokens:{minimum}"] = [
            lp.MinNewTokensLengthLogitsProcessor(7, minimum, STOPS)
        ]
    processors["all"] = [
        bias,
        lp.RepetitionPenaltyLogitsProcessor(1.3),
        lp.MinNewTokensLengthLogitsProcessor(7, 6, STOPS),
        lp.TemperatureLogitsWarper(0.7),
        lp.TopKLogitsWarper(50),
        lp.TopPLogitsWarper(0.95),
        lp.MinPLogitsWarper(0.02),
    ]
    out = {"logits": logits, "text": text}
    for name, chain in processors.items():
        scores = torch.from_numpy(logits.copy())
        for processor in chain:
            scores = processor(torch.from_numpy(text).long(), scores)
        out[name] = scores.numpy()
    save_file(out, Path(__file__).parent / "processors.safetensors")


if __name__ == "__main__":
    main()
