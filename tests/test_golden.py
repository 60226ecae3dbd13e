"""Every golden pair: the texts, rounds and trees of the public PyTorch code, in float32."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from pairs import BUDGETS, ORACLE, PAIRS, golden, modules

from ddtree_jax import Options, sampling
from ddtree_jax import tree as trees

MODES = [("ar", None), ("dflash", None), *(("ddtree", budget) for budget in BUDGETS)]


def options_of(name, mode, budget, **changes):
    limit = golden(name)["max_new_tokens"]
    values = dict(mode=mode, tree_budget=budget, max_new_tokens=limit, stop_ids=())
    return Options(**values | changes)


@pytest.fixture(scope="module", params=PAIRS)
def pair(request, golden_engine):
    """A pair's name and engine; all its programs start to compile, two cores at a time."""
    name = request.param
    engine = golden_engine(name)
    longest = max(map(len, golden(name)["prompts"]))
    for mode, budget in MODES:
        engine.prepare(options_of(name, mode, budget), longest)
    return name, engine


def records(name, mode, budget):
    data = golden(name)
    if mode == "ar":
        length = data["max_new_tokens"]
        return [{"ids": ids, "accept_lengths": [1] * (length - 1)} for ids in data["ar"]]
    return data["chain"] if mode == "dflash" else data["tree"][str(budget)]


def test_no_pair_is_left_out():
    assert sorted(path.parent.name for path in ORACLE.glob("*/golden.json")) == sorted(PAIRS)


@pytest.mark.parametrize(("mode", "budget"), MODES)
def test_texts_and_rounds(pair, mode, budget):
    name, engine = pair
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
    if mode == "dflash" or budget == BUDGETS[-1]:
        committed = sum(sum(result.accept_lengths) for result in results)
        assert committed / sum(result.rounds for result in results) > 3


@pytest.mark.parametrize(("mode", "budget"), MODES)
def test_stop_inside_a_block(pair, mode, budget):
    name, engine = pair
    stop = golden(name).get("stop")
    if stop is None:
        pytest.skip("the pair has no stop case")
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
