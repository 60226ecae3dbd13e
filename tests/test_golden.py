"""Every golden pair: the texts, rounds and trees of the public PyTorch code, in float32."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from pairs import BUDGETS, ORACLE, PAIRS, golden, modules, rarely

from ddtree_jax import Options, sampling
from ddtree_jax import tree as trees


def modes_of(name):
    """Plain decoding, the chain and the trees; one tree where no public code made the record."""
    budgets = BUDGETS if golden(name)["source"] == "public code" else (63,)
    return [("ar", None), ("dflash", None), *(("ddtree", budget) for budget in budgets)]


CASES = [(name, mode, budget) for name in PAIRS for mode, budget in modes_of(name)]
STOPS = [case for case in CASES if "stop" in golden(case[0])]
WHOLE = "qwen3_gqa"  # every mode in every run
SOME = ("hybrid_swa", "llama_mha")  # one tree each in every run, as small as it may be


def parameters(cases):
    """The cases, most of them only now and then."""
    trees_of = {name: [b for n, _, b in CASES if n == name and b] for name in PAIRS}
    turn = {name: trees_of[name][i % len(trees_of[name])] for i, name in enumerate(PAIRS)}
    return [
        case if name == WHOLE or (name in SOME and budget == turn[name]) else rarely(*case)
        for case in cases
        for name, _, budget in [case]
    ]


def options_of(name, mode, budget, **changes):
    limit = golden(name)["max_new_tokens"]
    values = dict(mode=mode, tree_budget=budget, max_new_tokens=limit, stop_ids=())
    return Options(**values | changes)


@pytest.fixture(scope="session")
def prepared(golden_engine, request):
    """prepared(pair): its engine; all its programs start to compile, two cores at a time."""
    started = set()
    wanted = {
        tuple(item.callspec.params.get(name) for name in ("pair", "mode", "budget"))
        for item in request.session.items
        if hasattr(item, "callspec")
    }

    def engine_of(name):
        engine = golden_engine(name)
        if name not in started:
            started.add(name)
            longest = max(map(len, golden(name)["prompts"]))
            for mode, budget in modes_of(name):
                if (name, mode, budget) in wanted:
                    engine.prepare(options_of(name, mode, budget), longest)
        return engine

    return engine_of


def records(name, mode, budget):
    data = golden(name)
    if mode == "ar":
        length = data["max_new_tokens"]
        return [{"ids": ids, "accept_lengths": [1] * (length - 1)} for ids in data["ar"]]
    return data["chain"] if mode == "dflash" else data["tree"][str(budget)]


def test_no_pair_is_left_out():
    assert sorted(path.parent.name for path in ORACLE.glob("*/golden.json")) == sorted(PAIRS)


@pytest.mark.parametrize(("pair", "mode", "budget"), parameters(CASES))
def test_texts_and_rounds(prepared, pair, mode, budget):
    name, engine = pair, prepared(pair)
    results = engine.generate(golden(name)["prompts"], options_of(name, mode, budget))
    for result, record in zip(results, records(name, mode, budget), strict=True):
        assert (result.mode, result.tree_budget) == (mode, budget)
        assert result.output_ids == record["ids"]
        assert result.accept_lengths == record["accept_lengths"]
        assert result.finish_reason == "length"
    if mode == "dflash":
        # Speculation really happened: whole blocks, and a rejection at every depth.
        lengths = [length for result in results for length in result.accept_lengths[:-1]]
        assert set(lengths) == set(range(1, engine.drafter.block_size + 1))
    if mode == "dflash" or budget in (63, 127):
        committed = sum(sum(result.accept_lengths) for result in results)
        assert committed / sum(result.rounds for result in results) > 3


@pytest.mark.parametrize(("pair", "mode", "budget"), parameters(STOPS))
def test_stop_inside_a_block(prepared, pair, mode, budget):
    name, engine = pair, prepared(pair)
    stop = golden(name)["stop"]
    record = stop["chain"] if mode != "ddtree" else stop["tree"][str(budget)]
    options = options_of(name, mode, budget, stop_ids=(stop["stop_token_id"],))
    (result,) = engine.generate([golden(name)["prompts"][stop["prompt"]]], options)
    assert result.output_ids == record["ids"]
    assert result.finish_reason == "stop"
    if mode != "ar":
        assert result.accept_lengths == record["accept_lengths"]
        full = options_of(name, mode, budget)
        assert dataclasses.replace(options, stop_ids=()) == full


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_first_tree(name, budget):
    wanted = golden(name)["first_trees"]["nodes"][str(budget)]
    logits = jnp.asarray(modules(name)["draft_logits"])[None]
    ranks = min(budget, logits.shape[-1])
    candidates, log_probs = sampling.draft_candidates(logits, ranks)
    root = jnp.asarray(modules(name)["draft_block_ids"][:1], jnp.int32)
    tree = trees.build(root, candidates, log_probs, budget)
    assert np.asarray(tree.valid).all()
    assert np.asarray(tree.tokens)[0, 0] == root[0]
    for field in ("tokens", "depths", "parents"):
        assert np.asarray(getattr(tree, field))[0, 1:].tolist() == wanted[field], field
