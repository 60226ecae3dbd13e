"""The real pair on GPUs (`make test-gpu`): on two as on one, and with kernels as without."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from bundled_prompts import PROMPTS

from ddtree_jax import Engine, Generation, Options, api

pytestmark = pytest.mark.gpu
# Two of the target's logits that its bfloat16 layers may put in either order.
ROUNDING = 0.5

GREEDY = Options("ddtree", tree_budget=63, max_new_tokens=96, stop_ids=())
REQUESTS = [
    dataclasses.replace(GREEDY, mode="ar"),
    dataclasses.replace(GREEDY, mode="dflash"),
    GREEDY,
    dataclasses.replace(GREEDY, temperature=1.0, seed=2, top_k=50, top_p=0.9),
]


def answers(engine: Engine, requests: list[Options]) -> list[list[Generation]]:
    """By request and prompt. All programs compile at once: that is what takes time here."""
    prompts = [api.encode(engine, prompt) for prompt in PROMPTS[:8]]
    for options in requests:
        engine.prepare(options, max(map(len, prompts)))
    return [engine.generate(prompts, options) for options in requests]


def loaded(tp: int, **settings) -> Engine:
    if len(jax.local_devices()) < tp:
        pytest.skip("one GPU; two are needed")
    return api.load(tp=tp, **settings)


def test_two_devices_emit_what_one_does():
    one, two = (answers(loaded(tp, dtype="float32", batch_size=8), REQUESTS) for tp in (1, 2))
    for options, *pair in zip(REQUESTS, one, two, strict=True):
        alone, shared = ([answer.output_ids for answer in some] for some in pair)
        assert shared == alone, options


@pytest.mark.parametrize("tp", [1, 2])
def test_kernels_choose_what_the_reference_chooses(tp):
    """In bfloat16, but for the first token of which two were within rounding; and as many."""
    kernels, plain = loaded(tp, attention="mosaic"), loaded(1, attention="reference")
    requests = REQUESTS[:3]
    found = answers(kernels, requests), answers(plain, requests)
    for options, *pair in zip(requests, *found, strict=True):
        for one, other in zip(*pair, strict=True):
            got, wanted = one.output_ids, other.output_ids
            tokens = zip(got, wanted, strict=True)
            same = len(list(itertools.takewhile(lambda both: both[0] == both[1], tokens)))
            if same < len(wanted):
                gap = plain.top2_gap([*one.prompt_ids, *wanted[:same]])
                print(f"{options.mode}: {same} tokens agree, then a gap of {gap:.4f}")
                assert gap < ROUNDING
        # A drafter that is broken shows in nothing but this.
        taus = [np.mean([n for answer in some for n in answer.accept_lengths]) for some in pair]
        assert taus[0] == pytest.approx(taus[1], rel=0.15)
        assert (taus[1] > 1.5) == (options.mode != "ar")
