"""Make the golden folders beside this script with the public PyTorch code (run by hand).

    python make_golden.py --ddtree DIR --dflash DIR [--only PAIR ...] [--out DIR] [--readme]

DIR are checkouts of github.com/liranringel/ddtree (commit c96427a) and github.com/z-lab/dflash
(commit 44947fb); nothing of them is copied here. Packages: Python 3.11, torch 2.13.0 (CPU),
transformers 5.17.0, safetensors, loguru. Everything runs in float32 on one CPU thread; a pair
takes a few minutes. The fits are not bit-equal from machine to machine, so a new run makes new
(equally good) weights and texts: always commit a pair's folder as a whole.

For every pair the script
1. trains a tiny target on a synthetic language of words with partly random word order,
2. trains a DFlash drafter on the target's own greedy texts (embedding and head frozen),
3. picks prompts that make the drafter fail at every depth and that no rounding can upset,
4. records greedy decoding, the DFlash chain and DDTree trees of several budgets,
5. checks the records three ways: reference code, a plain loop without caches (`plain_rounds`,
   explicit masks), and a replay over the greedy text (`replay`).
Pairs with sliding or causal drafters, or with a recurrent target, have no public reference: their
records are the plain loop's, after the same loop was found equal to the reference code on the other
pairs. For them alone the checkouts are not needed.
"""

import argparse
import heapq
import importlib.util
import json
import math
import random
import shutil
import sys
import types
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

BUDGETS = (7, 15, 31, 63, 127)
NEW_TOKENS = 80
PROMPT_LENGTHS = (5, 8, 13, 17, 24)
POOL_PER_LENGTH = 20
PROMPTS = 16
MARGIN = 1e-3  # smallest logit or log-probability margin allowed at any choice that matters
COMMITS = {"liranringel/ddtree": "c96427a", "z-lab/dflash": "44947fb"}
RESERVED = 4  # the last ids of each vocabulary (mask, eos, bos, pad) never occur in the texts


@dataclass(frozen=True)
class Pair:
    """One target and drafter. `target` and `draft` are config keys over the defaults below."""

    name: str
    family: str
    block: int
    taps: tuple[int, ...]
    target: dict
    draft: dict
    dflash: dict = field(default_factory=dict)
    modern: bool = False  # transformers-5 style draft config: rope_parameters, nested block size
    seed: int = 0
    words: int = 22
    target_steps: int = 600
    draft_steps: int = 450

    @property
    def vocab(self) -> int:
        return self.target["vocab_size"]

    @property
    def mask_id(self) -> int:
        return self.vocab - 1 - self.seed % RESERVED

    @property
    def eos_id(self) -> int:
        return self.vocab - 1 - (self.seed + 1) % RESERVED

    @property
    def recurrent(self) -> bool:
        """Whether the target has a state that no mask can split into paths."""
        return self.family in ("qwen3_5", "qwen3_next")

    @property
    def public(self) -> bool:
        """Whether the public code computes this pair."""
        plain = all(kind == "full_attention" for kind in self.draft["layer_types"])
        return (
            not self.recurrent
            and plain
            and not self.draft.get("is_causal")
            and not self.dflash.get("causal_head")
        )


def _dims(hidden, inner, layers, heads, kv_heads, head_dim, **rest):
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **rest,
    }


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
SMALL = _dims(32, 64, 4, 4, 2, 8, vocab_size=96)
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
SWA = {"sliding_window": 12, "use_sliding_window": True}

PAIRS = (
    Pair(
        name="qwen3_gqa",
        family="qwen3",
        block=8,
        taps=(1, 2, 3),
        target=_dims(40, 72, 5, 4, 2, 12, vocab_size=128),
        draft=_dims(40, 72, 2, 4, 2, 16, layer_types=[FULL, FULL]),
        seed=1,
    ),
    Pair(
        name="qwen3_tied",
        family="qwen3",
        block=16,
        taps=(0, 2),
        target=_dims(40, 96, 4, 4, 1, 16, vocab_size=112, tie_word_embeddings=True),
        draft=_dims(40, 80, 3, 4, 1, 12, layer_types=[FULL] * 3),
        modern=True,
        seed=2,
        draft_steps=700,
    ),
    Pair(
        name="llama_mha",
        family="llama",
        block=4,
        taps=(1, 3, 4),
        target=_dims(
            32, 64, 6, 4, 4, 8, vocab_size=144, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5
        ),
        draft=_dims(32, 72, 1, 4, 2, 8, layer_types=[FULL], rms_norm_eps=1e-5),
        seed=3,
    ),
    Pair(
        name="llama_gqa3",
        family="llama",
        block=10,
        taps=(2, 1),
        target=_dims(48, 80, 4, 6, 2, 8, vocab_size=100, tie_word_embeddings=True),
        draft=_dims(48, 80, 2, 6, 2, 8, layer_types=[FULL, FULL], attention_bias=True),
        seed=4,
    ),
    Pair(
        name="qwen3_yarn",
        family="qwen3",
        block=12,
        taps=(1, 2),
        target=SMALL | {"vocab_size": 120},
        draft=_dims(32, 64, 2, 4, 2, 16, layer_types=[FULL, FULL], rope_scaling=YARN),
        seed=5,
        draft_steps=600,
    ),
    Pair(
        name="swa_causal",
        family="qwen3",
        block=8,
        taps=(0, 1, 2),
        target=SMALL,
        draft=_dims(32, 64, 3, 4, 2, 8, layer_types=[SLIDING, SLIDING, FULL], **SWA),
        seed=6,
    ),
    Pair(
        name="swa_bidir",
        family="qwen3",
        block=8,
        taps=(1, 2),
        target=SMALL,
        draft=_dims(32, 64, 2, 4, 2, 8, layer_types=[SLIDING, FULL], is_causal=False, **SWA),
        modern=True,
        seed=6,
    ),
    Pair(
        name="causal_head",
        family="qwen3",
        block=8,
        taps=(0, 2),
        target=SMALL,
        draft=_dims(32, 64, 2, 4, 2, 8, layer_types=[FULL, FULL]),
        dflash={"causal_head": True},
        seed=6,
    ),
    Pair(
        name="causal_full",
        family="qwen3",
        block=6,
        taps=(1, 2),
        target=SMALL,
        draft=_dims(32, 64, 2, 4, 2, 8, layer_types=[FULL, FULL], is_causal=True),
        seed=6,
    ),
    Pair(
        name="hybrid_swa",
        family="qwen3_5",
        block=8,
        taps=(0, 2, 3),
        target=_dims(
            32, 64, 5, 4, 2, 16, vocab_size=96, layer_types=[LINEAR] * 3 + [FULL, LINEAR], **DELTA
        ),
        draft=_dims(32, 64, 3, 4, 2, 8, layer_types=[SLIDING, SLIDING, FULL], **SWA),
        modern=True,
        seed=7,
    ),
    Pair(
        name="hybrid_fused",
        family="qwen3_next",
        block=10,
        taps=(2, 1),
        target=_dims(
            32,
            64,
            4,
            4,
            1,
            16,
            vocab_size=104,
            layer_types=[LINEAR, FULL] * 2,
            num_experts=0,
            tie_word_embeddings=True,
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=8,
            linear_value_head_dim=6,
            linear_conv_kernel_dim=3,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        ),
        draft=_dims(32, 64, 2, 4, 2, 8, layer_types=[FULL, FULL]),
        seed=8,
    ),
)


# --- the language -----------------------------------------------------------------------------


class Language:
    """Words of 2 to 7 tokens; the two last words decide which three words may follow."""

    def __init__(self, vocab: int, words: int, seed: int):
        rng = random.Random(seed)
        alphabet = range(vocab - RESERVED)
        self.words = [rng.choices(alphabet, k=rng.randint(2, 7)) for _ in range(words)]
        self.following = {
            (a, b): rng.sample(range(words), 3) for a in range(words) for b in range(words)
        }

    def text(self, length: int, rng: random.Random) -> list[int]:
        before, last = rng.randrange(len(self.words)), rng.randrange(len(self.words))
        tokens = list(self.words[last])
        offset = rng.randrange(len(tokens))
        while len(tokens) < offset + length:
            following = rng.choices(self.following[before, last], (0.6, 0.25, 0.15))[0]
            before, last = last, following
            tokens += self.words[last]
        return tokens[offset : offset + length]

    def batch(self, count: int, length: int, rng: random.Random) -> torch.Tensor:
        return torch.tensor([self.text(length, rng) for _ in range(count)])


# --- the target -------------------------------------------------------------------------------


def make_target(pair: Pair) -> nn.Module:
    classes = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
        "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = classes[pair.family]
    keys = {"tie_word_embeddings": False, "max_position_embeddings": 512} | pair.target
    config = config_class(
        **keys, eos_token_id=pair.eos_id, bos_token_id=None, pad_token_id=None, use_cache=True
    )
    return model_class(config)


def schedule(optimizer, steps: int):
    def factor(step):
        return min(1.0, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def descend(module: nn.Module, steps: int, lr: float, loss_of_step, label: str) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.01)
    scheduler = schedule(optimizer, steps)
    for step in range(steps):
        loss = loss_of_step()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 200 == 0 or step == steps - 1:
            print(f"  {label} step {step}: loss {loss.item():.3f}", flush=True)


def train_target(pair: Pair, language: Language) -> nn.Module:
    torch.manual_seed(pair.seed)
    rng = random.Random(pair.seed)
    target = make_target(pair).train()

    def loss_of_step():
        ids = language.batch(48, 64, rng)
        logits = target(ids, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    descend(target, pair.target_steps, 4e-3, loss_of_step, "target")
    return target.eval().requires_grad_(False)


@torch.no_grad()
def greedy(target: nn.Module, prompts: torch.Tensor, count: int) -> torch.Tensor:
    """Prompts and `count` greedy tokens, for prompts of one length."""
    cache, ids, step = DynamicCache(config=target.config), prompts, prompts
    for _ in range(count):
        logits = target(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        step = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, step], 1)
    return ids


@torch.no_grad()
def forward_with_states(target: nn.Module, ids: torch.Tensor, **kwargs):
    """Logits and the residual stream after every decoder layer (before the final norm)."""
    states: list[torch.Tensor] = []

    def keep(_module, _inputs, output):
        states.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in target.model.layers]
    logits = target(ids, use_cache=False, **kwargs).logits
    for hook in hooks:
        hook.remove()
    return logits, states


def features_of(pair: Pair, states: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([states[tap] for tap in pair.taps], -1)


# --- the drafter ------------------------------------------------------------------------------


def draft_json(pair: Pair) -> dict:
    """The drafter's config.json, in the older or the newer public style."""
    window = pair.draft.get("sliding_window")
    config = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "bos_token_id": None,
        "dflash_config": {
            "mask_token_id": pair.mask_id,
            "target_layer_ids": list(pair.taps),
            **pair.dflash,
        },
        "dtype": "float32",
        "eos_token_id": pair.eos_id,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 512,
        "max_window_layers": pair.draft["num_hidden_layers"],
        "model_type": "qwen3",
        "num_target_layers": pair.target["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": window is not None,
        "vocab_size": pair.vocab,
        **pair.draft,
    }
    if pair.modern:
        config["dflash_config"]["block_size"] = pair.block
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    else:
        config["block_size"] = pair.block
        config["rope_theta"] = 10000.0
        config.setdefault("rope_scaling", None)
    return config


def draft_hf_config(pair: Pair) -> Qwen3Config:
    """The config object the public classes take (they read block_size at the top level)."""
    keys = draft_json(pair) | {"block_size": pair.block}
    for key in ("architectures", "auto_map", "model_type", "dtype", "is_causal"):
        keys.pop(key, None)
    config = Qwen3Config(**keys)
    config._attn_implementation = "sdpa"
    return config


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class DraftAttention(nn.Module):
    def __init__(self, c: Qwen3Config):
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        inner, kv_inner, bias = self.heads * self.dim, self.kv_heads * self.dim, c.attention_bias
        self.q_proj = nn.Linear(c.hidden_size, inner, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, kv_inner, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, kv_inner, bias=bias)
        self.o_proj = nn.Linear(inner, c.hidden_size, bias=bias)
        self.q_norm, self.k_norm = Norm(self.dim, c.rms_norm_eps), Norm(self.dim, c.rms_norm_eps)

    def keys_values(self, x, rope):
        shape = (*x.shape[:-1], self.kv_heads, self.dim)
        keys = turn(self.k_norm(self.k_proj(x).view(shape)), rope)
        values = self.v_proj(x).view(shape)
        group = self.heads // self.kv_heads
        return keys.repeat_interleave(group, -2), values.repeat_interleave(group, -2)

    def forward(self, x, context, rope, context_rope, visible):
        """x [N,K,B,H]: K blocks a sequence; context [N,T,H]; visible [N,K,B,T+B]."""
        queries = turn(self.q_norm(self.q_proj(x).view(*x.shape[:-1], self.heads, self.dim)), rope)
        block_keys, block_values = self.keys_values(x, rope)
        keys, values = self.keys_values(context, context_rope)
        scores = torch.cat(
            [
                torch.einsum("nkbhd,nthd->nkhbt", queries, keys),
                torch.einsum("nkbhd,nkchd->nkhbc", queries, block_keys),
            ],
            -1,
        )
        scores = (scores * self.dim**-0.5).masked_fill(~visible[:, :, None], -torch.inf)
        weights = scores.softmax(-1)
        length = context.shape[1]
        out = torch.einsum("nkhbt,nthd->nkbhd", weights[..., :length], values)
        out = out + torch.einsum("nkhbc,nkchd->nkbhd", weights[..., length:], block_values)
        return self.o_proj(out.flatten(-2))


class DraftMlp(nn.Module):
    def __init__(self, c: Qwen3Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, c: Qwen3Config):
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = DraftAttention(c)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = DraftMlp(c)

    def forward(self, h, *rest):
        h = h + self.self_attn(self.input_layernorm(h), *rest)
        return h + self.mlp(self.post_attention_layernorm(h))


class Drafter(nn.Module):
    """DFlash v1 in plain PyTorch: many blocks of one sequence at once, every mask explicit."""

    def __init__(self, pair: Pair):
        super().__init__()
        self.pair = pair
        c = draft_hf_config(pair)
        self.fc = nn.Linear(len(pair.taps) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(c)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.6 * module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.normal_(module.bias, std=0.1)

    def forward(self, features, block, starts):
        """features [N,T,F*H], block embeddings [N,K,B,H], starts [N,K] -> hidden [N,K,B,H].

        Block k of a sequence sees the context rows before position starts[k] only.
        """
        context = self.hidden_norm(self.fc(features))
        positions = starts[..., None] + torch.arange(block.shape[2])
        rope = self.rotate(features, positions.flatten(1), positions.shape)
        context_positions = torch.arange(features.shape[1])[None].expand(len(features), -1)
        context_rope = self.rotate(features, context_positions, context_positions.shape)
        for layer, kind in zip(self.layers, self.pair.draft["layer_types"], strict=True):
            visible = visibility(self.pair, kind, starts, positions, features.shape[1])
            block = layer(block, context, rope, context_rope, visible)
        return self.norm(block)

    def rotate(self, x, positions, shape):
        cos, sin = self.rotary(x, positions)
        return cos.view(*shape, 1, -1), sin.view(*shape, 1, -1)


def turn(x, rope):
    return x * rope[0] + rotate_half(x) * rope[1]


def visibility(pair: Pair, kind: str, starts, positions, length: int) -> torch.Tensor:
    """[N,K,B,T+B]: context keys below the block's start, then the block's own keys."""
    is_causal = True if pair.dflash.get("causal_head") else pair.draft.get("is_causal")
    causal = kind == SLIDING if is_causal is None else is_causal
    context_keys = torch.arange(length)
    context = (context_keys < starts[..., None, None]).expand(*positions.shape, length)
    gap = positions[..., :, None] - positions[..., None, :]
    block = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
    if kind == SLIDING:
        window = pair.draft["sliding_window"]
        context = context & (positions[..., None] - context_keys < window)
        block = block & (gap.abs() < window)
    return torch.cat([context, block], -1)


def block_ids(pair: Pair, anchors: torch.Tensor) -> torch.Tensor:
    ids = torch.full((*anchors.shape, pair.block), pair.mask_id)
    ids[..., 0] = anchors
    return ids


def draft_logits(pair: Pair, target, drafter, features, ids, starts) -> torch.Tensor:
    """[N,K,B-1,V] for blocks that start at `starts` [N,K] in the sequences `ids` [N,T]."""
    block = target.model.embed_tokens(block_ids(pair, ids.gather(1, starts)))
    return target.lm_head(drafter(features, block, starts)[:, :, 1:])


def train_drafter(pair: Pair, target: nn.Module, language: Language) -> Drafter:
    torch.manual_seed(1000 + pair.seed)
    rng = random.Random(1000 + pair.seed)
    drafter, block = Drafter(pair), pair.block
    ids, features, first = [], [], []
    for length in PROMPT_LENGTHS:
        total = max(PROMPT_LENGTHS) + NEW_TOKENS + 2 * block
        texts = greedy(target, language.batch(300, length, rng), total - length)
        ids.append(texts)
        features.append(features_of(pair, forward_with_states(target, texts)[1]))
        first += [length] * len(texts)
    ids, features, first = torch.cat(ids), torch.cat(features), torch.tensor(first)
    weights = torch.exp(-torch.arange(block - 1) / max(block / 2, 3.0))

    def loss_of_step():
        rows = torch.randint(len(ids), (24,))
        span = ids.shape[1] - block + 1 - first[rows]
        starts = first[rows, None] + (torch.rand(24, 8) * span[:, None]).long()
        logits = draft_logits(pair, target, drafter, features[rows], ids[rows], starts)
        labels = (
            ids[rows, None].expand(-1, 8, -1).gather(2, starts[..., None] + torch.arange(1, block))
        )
        loss = functional.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
        return (loss.view(labels.shape) * weights).sum() / (labels[..., 0].numel() * weights.sum())

    descend(drafter, pair.draft_steps, 4e-3, loss_of_step, "drafter")
    return drafter.eval().requires_grad_(False)


# --- the tree ---------------------------------------------------------------------------------


def best_nodes(log_probs: list[list[float]], tokens: list[list[int]], count: int):
    """The `count` likeliest prefixes, best first: (score, path of tokens). float64 sums."""
    heap = [(-log_probs[0][0], (0,))]
    found = []
    while heap and len(found) < count:
        negative, ranks = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        found.append((-negative, tuple(tokens[d][r] for d, r in enumerate(ranks))))
        if rank + 1 < len(tokens[depth]):
            score = -negative - log_probs[depth][rank] + log_probs[depth][rank + 1]
            heapq.heappush(heap, (-score, (*ranks[:-1], rank + 1)))
        if depth + 1 < len(tokens):
            heapq.heappush(heap, (negative - log_probs[depth + 1][0], (*ranks, 0)))
    return found


def ranked(logits: torch.Tensor, count: int):
    """Sorted log-probabilities and tokens of the `count` best of each row, as lists."""
    top, tokens = logits.topk(min(count, logits.shape[-1]), -1)
    return (top - logits.logsumexp(-1, keepdim=True)).tolist(), tokens.tolist()


def candidate_paths(logits: torch.Tensor, budget: int | None) -> list[tuple[int, ...]]:
    """The draft's nodes as token paths, parents first: a tree, or a chain without a budget."""
    if budget is None:
        chain = tuple(logits.argmax(-1).tolist())
        return [chain[: depth + 1] for depth in range(len(chain))]
    return [path for _, path in best_nodes(*ranked(logits, budget), budget)]


# --- three ways to the same rounds ------------------------------------------------------------


@torch.no_grad()
def plain_rounds(pair: Pair, target, drafter, prompt: list[int], budget: int | None):
    """Speculative decoding without any cache: all from scratch in every round.

    Returns the generated ids and the uncut accept lengths, at least NEW_TOKENS tokens.
    """
    ids = torch.tensor([prompt])
    ids = torch.cat([ids, target(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    accepts = []
    while ids.shape[1] - len(prompt) < NEW_TOKENS:
        start = ids.shape[1] - 1
        features = features_of(pair, forward_with_states(target, ids[:, :start])[1])
        logits = draft_logits(pair, target, drafter, features, ids, torch.tensor([[start]]))
        paths = candidate_paths(logits[0, 0], budget)
        verify = verify_alone if pair.recurrent else verify_paths
        choices = verify(target, ids, paths)
        path = ()
        while (*path, choices[path]) in choices:
            path = (*path, choices[path])
        committed = (*path, choices[path])
        accepts.append(len(committed))
        ids = torch.cat([ids, torch.tensor([committed])], 1)
    return ids[0, len(prompt) :].tolist(), accepts


def verify_paths(target, ids: torch.Tensor, paths: list[tuple[int, ...]]) -> dict:
    """The target's greedy choice after every path (the empty one too), by one masked forward."""
    length, count = ids.shape[1], len(paths)
    index = {path: length + i for i, path in enumerate(paths)}
    mask = torch.full((length + count, length + count), torch.finfo(torch.float32).min)
    mask[:length, :length].triu_(1)
    for path, row in index.items():
        mask[row, :length] = 0
        for depth in range(1, len(path) + 1):
            mask[row, index[path[:depth]]] = 0
    positions = [*range(length), *(length - 1 + len(path) for path in paths)]
    tokens = torch.cat([ids, torch.tensor([[path[-1] for path in paths]], dtype=torch.long)], 1)
    logits = target(
        tokens,
        position_ids=torch.tensor([positions]),
        attention_mask=mask[None, None],
        use_cache=False,
    ).logits[0]
    best = logits.argmax(-1).tolist()
    return {(): best[length - 1]} | {path: best[row] for path, row in index.items()}


def verify_alone(target, ids: torch.Tensor, paths: list[tuple[int, ...]]) -> dict:
    """As `verify_paths`, every leaf's path in a row of its own: no token reaches back in it."""
    inner = {path[:-1] for path in paths}
    leaves = [path for path in paths if path not in inner]
    depth = max(map(len, leaves))
    padded = torch.tensor([[*path, *[0] * (depth - len(path))] for path in leaves])
    rows = torch.cat([ids.expand(len(leaves), -1), padded], 1)
    best = target(rows, use_cache=False).logits.argmax(-1)[:, ids.shape[1] - 1 :].tolist()
    return {
        leaf[:length]: choices[length]
        for leaf, choices in zip(leaves, best, strict=True)
        for length in range(len(leaf) + 1)
    }


def replay(text: list[int], prompt_length: int, logits: torch.Tensor, budget: int | None):
    """Accept lengths over a known greedy text, and the smallest margin of any choice.

    logits [A,B-1,V]: the drafts of the blocks that start at prompt_length + a.
    """
    start, accepts, margin = 0, [], math.inf
    while start + 1 < NEW_TOKENS:
        future = text[prompt_length + start + 1 :][: logits.shape[1]]
        reached = chain_depth if budget is None else tree_depth
        depth, slack = reached(logits[start], future, budget)
        accepts.append(depth + 1)
        margin = min(margin, slack)
        start += depth + 1
    return accepts, margin


def chain_depth(logits: torch.Tensor, future: list[int], _budget):
    top, tokens = logits.topk(2, -1)
    gaps = (top[:, 0] - top[:, 1]).tolist()
    depth = 0
    while depth < len(future) and tokens[depth, 0] == future[depth]:
        depth += 1
    return depth, min(gaps[: depth + 1])


def tree_depth(logits: torch.Tensor, future: list[int], budget: int):
    """Depth reached, and how far the deepest hit and the first miss are from the tree's border."""
    found = best_nodes(*ranked(logits, budget + 1), budget + 1)
    inside = {path: score for score, path in found[:budget]}
    outside = found[budget][0] if len(found) > budget else -math.inf
    depth, slack = 0, math.inf
    while depth < len(future) and tuple(future[: depth + 1]) in inside:
        depth += 1
        slack = inside[tuple(future[:depth])] - outside
    if depth < len(future):
        log_probs = logits.double().log_softmax(-1)
        miss = sum(log_probs[d, future[d]].item() for d in range(depth + 1))
        slack = min(slack, min(inside.values()) - miss)
    return depth, slack


def cut(ids: list[int], accepts: list[int], count: int = NEW_TOKENS) -> dict:
    """Cut a record at `count` tokens, its last round too; the prefill's token has no round."""
    kept, left = [], count - 1
    for accept in accepts:
        if left > 0:
            kept.append(min(accept, left))
            left -= kept[-1]
    assert left == 0, "the text is too short"
    return {"ids": ids[:count], "accept_lengths": kept}


# --- the public code --------------------------------------------------------------------------


class Reference:
    """The two public checkouts, imported unchanged."""

    def __init__(self, ddtree_dir: Path, dflash_dir: Path):
        torch.cuda.synchronize = lambda *_: None
        stub = types.ModuleType("datasets")
        stub.load_dataset = stub.Features = stub.Sequence = stub.Value = None
        sys.modules.setdefault("datasets", stub)
        spec = importlib.util.spec_from_file_location("zlab", dflash_dir / "dflash" / "model.py")
        self.zlab = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.zlab)
        sys.path.insert(0, str(ddtree_dir))
        self.ddtree = importlib.import_module("ddtree")

    def drafters(self, pair: Pair, drafter: Drafter):
        """The z-lab and the DDTree classes with the fitted weights."""
        models = []
        for module in (self.zlab, self.ddtree):
            model = module.DFlashDraftModel(draft_hf_config(pair)).eval()
            model.load_state_dict(drafter.state_dict())
            models.append(model)
        return models

    def generate(self, pair, target, models, prompt, budget, stop_ids=None):
        """Ids and accept lengths of a chain (no budget) or a tree, as the public code gives them.

        It runs a block longer than recorded: near its buffer's end it would cut the last block.
        """
        ids, count = torch.tensor([prompt]), NEW_TOKENS + pair.block
        if budget is None:
            out = self.zlab.dflash_generate(
                models[0], target, ids, count, stop_ids, 0.0, return_stats=True
            )
        else:
            out = self.ddtree.ddtree_generate(
                models[1], target, ids, pair.mask_id, count, pair.block, stop_ids, 0.0, budget
            )
        return out.output_ids[0, len(prompt) :].tolist(), out.acceptance_lengths

    def tree(self, logits, budget):
        """Tokens, depths and parents of the nodes, the root left out."""
        tokens, depths, parents, *_ = self.ddtree.build_ddtree_tree(logits, budget)
        return {"tokens": tokens.tolist(), "depths": depths.tolist(), "parents": parents[1:]}


def check_modules(pair, target, drafter, models, prompt) -> None:
    """The plain drafter equals both public classes."""
    ids = torch.tensor([prompt])
    features = features_of(pair, forward_with_states(target, ids)[1])[:, :-1]
    block = target.model.embed_tokens(block_ids(pair, ids[:, -1:]))
    start = ids.shape[1] - 1
    ours = drafter(features, block, torch.tensor([[start]]))[0]
    for model in models:
        with torch.no_grad():
            theirs = model(
                position_ids=torch.arange(start + pair.block)[None],
                noise_embedding=block[0],
                target_hidden=features,
                is_causal=False,
            )
        error = (ours - theirs).abs().max().item()
        assert error < 1e-5, error
        print(f"  drafter against {type(model).__module__}: max error {error:.1e}")


# --- prompts and records ----------------------------------------------------------------------


@dataclass
class Candidate:
    prompt: list[int]
    text: list[int]
    logits: torch.Tensor
    chain: list[int]


@torch.no_grad()
def candidates(pair: Pair, target, drafter, language: Language) -> list[Candidate]:
    """Prompts whose greedy text and recorded rounds have no near-tie."""
    rng, kept = random.Random(2000 + pair.seed), []
    for length in PROMPT_LENGTHS:
        prompts = language.batch(POOL_PER_LENGTH, length, rng)
        texts = greedy(target, prompts, NEW_TOKENS + 2 * pair.block)
        logits, states = forward_with_states(target, texts)
        top, tokens = logits[:, length - 1 : -1].topk(2, -1)
        gaps = (top[..., 0] - top[..., 1]).amin(-1)
        features = features_of(pair, states)
        starts = torch.arange(length, length + NEW_TOKENS)[None]
        for row, text in enumerate(texts):
            clean = gaps[row] > MARGIN and torch.equal(tokens[row, :, 0], text[length:])
            if not clean or text.max() >= pair.vocab - RESERVED:
                continue
            drafts = draft_logits(
                pair, target, drafter, features[row : row + 1], text[None], starts
            )[0]
            rounds = [replay(text.tolist(), length, drafts, b) for b in (None, *BUDGETS)]
            if min(margin for _, margin in rounds) > MARGIN:
                kept.append(Candidate(prompts[row].tolist(), text.tolist(), drafts, rounds[0][0]))
    return kept


def rejections(pair: Pair, chains: list[list[int]]) -> list[int]:
    """How many rounds failed at depth 1..B-1; last entry: whole blocks."""
    counts = [0] * pair.block
    for chain in chains:
        for accept in chain:
            counts[accept - 1] += 1
    return counts


def choose(pair: Pair, pool: list[Candidate]) -> list[Candidate]:
    """PROMPTS of the pool: each step takes the prompt that serves the rarest depth best."""
    chosen: list[Candidate] = []

    def gain(candidate):
        counts = rejections(pair, [c.chain[:-1] for c in [*chosen, candidate]])
        ease = 0.02 * mean(candidate.chain) + 1e-3 * len(set(candidate.text))
        return ease - sum(2.0**-count for count in counts)

    while len(chosen) < PROMPTS and len(chosen) < len(pool):
        rest = [c for c in pool if all(c is not other for other in chosen)]
        chosen.append(max(rest, key=gain))
    return sorted(chosen, key=lambda c: len(c.prompt))


def record(
    pair: Pair, target, drafter, chosen: list[Candidate], reference: Reference | None
) -> dict:
    """All goldens of a pair; every record is checked against the other ways of getting it."""
    models = reference.drafters(pair, drafter) if reference and pair.public else None
    if models:
        check_modules(pair, target, drafter, models, chosen[-1].text[:40])
    golden = {
        "source": "public code" if pair.public else "plain loop",
        "commits": COMMITS if pair.public else {},
        "prompts": [c.prompt for c in chosen],
        "max_new_tokens": NEW_TOKENS,
        "ar": [c.text[len(c.prompt) :][:NEW_TOKENS] for c in chosen],
        "chain": [],
        "tree": {str(budget): [] for budget in BUDGETS},
    }
    for number, c in enumerate(chosen):
        for budget in (None, *BUDGETS):
            if not models:
                result = cut(*plain_rounds(pair, target, drafter, c.prompt, budget))
            else:
                result = cut(*reference.generate(pair, target, models, c.prompt, budget))
            assert result["ids"] == golden["ar"][number], (c.prompt, budget)
            replayed = replay(c.text, len(c.prompt), c.logits, budget)[0]
            assert result == cut(c.text[len(c.prompt) :], replayed), (c.prompt, budget)
            if models and number % 4 == 0:
                assert result == cut(*plain_rounds(pair, target, drafter, c.prompt, budget))
            (golden["chain"] if budget is None else golden["tree"][str(budget)]).append(result)
    clear = clearest(chosen)
    golden["first_trees"] = {
        "prompt": clear,
        "nodes": {str(b): first_tree(chosen[clear].logits[0], b, reference) for b in BUDGETS},
    }
    if models:
        golden["stop"] = stop_record(pair, target, models, chosen, golden["chain"], reference)
    return golden


def clearest(chosen: list[Candidate]) -> int:
    """The prompt whose first tree has the widest smallest gap between successive scores.

    Only prompts longer than the sliding windows, so that the parity tensors show their cut.
    """

    def gap(number):
        count = max(BUDGETS) + 1
        found = best_nodes(*ranked(chosen[number].logits[0], count), count)
        scores = [score for score, _ in found]
        return min(a - b for a, b in pairwise(scores))

    long = [number for number, c in enumerate(chosen) if len(c.prompt) > SWA["sliding_window"]]
    best = max(long, key=gap)
    print(f"  first trees: prompt {best}, scores differ by at least {gap(best):.1e}")
    return best


def first_tree(logits: torch.Tensor, budget: int, reference: Reference | None) -> dict:
    """The tree of a prompt's first round, root = 0, nodes from 1 on, best first."""
    paths = candidate_paths(logits, budget)
    index = {(): 0} | {path: number for number, path in enumerate(paths, 1)}
    tree = {
        "tokens": [path[-1] for path in paths],
        "depths": [len(path) for path in paths],
        "parents": [index[path[:-1]] for path in paths],
    }
    assert reference is None or tree == reference.tree(logits, budget)
    return tree


def stop_record(pair, target, models, chosen, chains, reference: Reference) -> dict:
    """A run that stops inside an accepted block, cut and as the public code counts it."""
    for number, (c, chain) in enumerate(zip(chosen, chains, strict=True)):
        ids, end = chain["ids"], 1
        for accept in chain["accept_lengths"][:-1]:
            inside = [i for i in range(end, end + accept - 2) if ids.index(ids[i]) == i]
            if inside and end > NEW_TOKENS // 4:
                stop = ids[inside[0]]
                record = {"prompt": number, "stop_token_id": stop, "tree": {}}
                for budget in (None, *BUDGETS):
                    text, accepts = reference.generate(
                        pair, target, models, c.prompt, budget, [stop]
                    )
                    result = cut(text, accepts, len(text)) | {"uncut_accept_lengths": accepts}
                    if budget is None:
                        record["chain"] = result
                    else:
                        record["tree"][str(budget)] = result
                return record
            end += accept
    raise ValueError("no chain has a token to stop at inside a block")


@torch.no_grad()
def parity_tensors(pair: Pair, target, drafter, c: Candidate) -> dict[str, torch.Tensor]:
    """Inputs and outputs of one target and one drafter forward."""
    length = len(c.prompt)
    ids = torch.tensor([c.text[: length + 1]])
    logits, states = forward_with_states(target, ids[:, :length])
    features = features_of(pair, states)
    blocks = block_ids(pair, ids[:, -1:])
    hidden = drafter(features, target.model.embed_tokens(blocks), torch.tensor([[length]]))
    tensors = {
        "prompt_ids": ids[0, :length],
        "target_logits": logits[0],
        "draft_context": features[0],
        "draft_block_ids": blocks[0, 0],
        "draft_hidden": hidden[0, 0],
        "draft_logits": target.lm_head(hidden[0, 0, 1:]),
    }
    tensors |= {f"target_hidden.{layer}": state[0] for layer, state in enumerate(states)}
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}


def write_json(path: Path, value, **kwargs) -> None:
    path.write_text(json.dumps(value, **kwargs) + "\n")


def write_pair(folder: Path, pair: Pair, target, drafter, golden: dict, tensors: dict) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "draft").mkdir(parents=True)
    target.save_pretrained(folder / "target")
    (folder / "target" / "generation_config.json").unlink(missing_ok=True)
    write_json(folder / "draft" / "config.json", draft_json(pair), indent=2, sort_keys=True)
    weights = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(weights, folder / "draft" / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "modules.safetensors", metadata={"format": "pt"})
    write_json(folder / "golden.json", golden, separators=(",", ":"))
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


# --- summary ----------------------------------------------------------------------------------


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


def taus(records: list[dict]) -> float:
    return mean([accept for record in records for accept in record["accept_lengths"]])


def summary_row(pair: Pair, golden: dict) -> str:
    # A prompt's last round may have been cut at the limit: it tells nothing about the drafter.
    counts = rejections(pair, [r["accept_lengths"][:-1] for r in golden["chain"]])
    trees = " / ".join(f"{taus(golden['tree'][str(b)]):.2f}" for b in BUDGETS)
    rounds = sum(len(r["accept_lengths"]) for r in golden["chain"])
    depths = " ".join(str(count) for count in counts[:-1])
    return (
        f"| {pair.name} | {golden['source']} | {pair.block} | {len(golden['prompts'])} | {rounds} "
        f"| {taus(golden['chain']):.2f} | {trees} | {counts[-1]} | {depths} |"
    )


README = """# Golden files

Tiny float32 pairs (a target and a DFlash drafter) and what the public PyTorch code does with
them. Made by `make_golden.py` (its docstring says how); commits: {commits}.
The script fits every pair, so speculation is real: chains fail at every depth.

Each folder holds
* `target/`: config.json and model.safetensors as transformers 5.17 saves them;
* `draft/`: a DFlash v1 drafter (no embedding, no head), in the old or the new config style;
* `golden.json`: `prompts`, `max_new_tokens`, `ar` (greedy ids), `chain` and `tree` by node budget
  (root not counted). A record has `ids` and `accept_lengths`: tokens committed by each round, the
  bonus included, cut at the limit; the prefill's token has no round, so
  `len(ids) == 1 + sum(accept_lengths)`. There is no stop token in any text. `first_trees`: the
  trees of the first round of prompt number `prompt`, root 0 left out (`parents` counts it). `stop`
  (public code only): one prompt run with a stop token that falls inside a block, cut at it (stop
  token kept), and the list as the public code counts it, `uncut_accept_lengths`;
* `modules.safetensors`: one target forward (`prompt_ids`, `target_logits`, `target_hidden.<layer>`:
  the residual stream after that layer, before the final norm) and the drafter's first block, for
  the same prompt as `first_trees`
  (`draft_context`: taps in config order; `draft_block_ids`; `draft_hidden`: after the final norm;
  `draft_logits`: slots 1..B-1).

`source` in golden.json: "public code" (z-lab for chains, DDTree for trees), or "plain loop" where
no public code exists (sliding or causal drafters, recurrent targets): a loop with explicit masks
and no caches, which was found equal to the public code on the other pairs; a recurrent target runs
every path alone. Every choice that decides a record has a margin above {margin:g} (logits of the
target and the chain, path scores of the trees).

`hybrid/` is another kind: random hybrid targets and what transformers computes of them. Made by
`make_hybrid.py`, which says what its files hold.

| pair | source | B | prompts | rounds | chain | tree {budgets} | whole | rejected at 1.. |
|---|---|---|---|---|---|---|---|---|
{rows}

Rounds, whole blocks and rejections by depth are the chain's; chain and tree columns are mean
accept lengths. Whole blocks and rejections leave out each prompt's last round, which the limit
may cut.
"""


def write_readme(out: Path) -> None:
    rows = []
    for pair in PAIRS:
        path = out / pair.name / "golden.json"
        if path.exists():
            rows.append(summary_row(pair, json.loads(path.read_text())))
    text = README.format(
        commits=", ".join(f"{name} {commit}" for name, commit in COMMITS.items()),
        margin=MARGIN,
        budgets=" / ".join(map(str, BUDGETS)),
        rows="\n".join(rows),
    )
    (out / "README.md").write_text(text)
    print("\n".join(rows))


def make(pair: Pair, reference: Reference | None, out: Path, targets: dict[str, nn.Module]) -> None:
    """Fit, run and write one pair; `targets` keeps trained targets for pairs that share one."""
    print(pair.name, flush=True)
    language = Language(pair.vocab, pair.words, pair.seed)
    key = json.dumps([pair.family, pair.target, pair.seed, pair.words, pair.target_steps])
    if key not in targets:
        targets[key] = train_target(pair, language)
    target = targets[key]
    drafter = train_drafter(pair, target, language)
    pool = candidates(pair, target, drafter, language)
    chosen = choose(pair, pool)
    counts = rejections(pair, [c.chain for c in pool])
    tau = mean([accept for c in pool for accept in c.chain])
    print(f"  pool of {len(pool)}: tau {tau:.2f}, {counts}", flush=True)
    golden = record(pair, target, drafter, chosen, reference)
    tensors = parity_tensors(pair, target, drafter, chosen[golden["first_trees"]["prompt"]])
    write_pair(out / pair.name, pair, target, drafter, golden, tensors)
    print(summary_row(pair, golden), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ddtree", type=Path, help="checkout of liranringel/ddtree")
    parser.add_argument("--dflash", type=Path, help="checkout of z-lab/dflash")
    parser.add_argument("--only", nargs="*", default=[pair.name for pair in PAIRS])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--readme", action="store_true", help="only write README.md again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not args.readme:
        pairs = [pair for pair in PAIRS if pair.name in args.only]
        public = any(pair.public for pair in pairs)
        reference = Reference(args.ddtree, args.dflash) if public else None
        targets: dict[str, nn.Module] = {}
        for pair in pairs:
            make(pair, reference, args.out, targets)
    write_readme(args.out)


if __name__ == "__main__":
    main()
