"""The main job on the real bundled pair: lossless, sensible, and really speculating.

Takes minutes on two cores, so `make test` leaves it out; `make main-job` and CI run it. The
environment variable BUNDLED_PROMPTS sets how many prompts are compared (default 4, at most 20);
BUNDLED_SEEDS compares sampled texts in full, with every filter at every temperature and trees of 7
to 127 nodes, for that many seeds (default: each filter once, one seed).
"""

import dataclasses
import itertools
import json
import os

import pytest
from bundled_prompts import PROMPTS

from ddtree_jax import Options, api
from ddtree_jax.commands.decode import main

pytestmark = pytest.mark.bundled


@pytest.fixture(scope="module")
def engine():
    return api.load(dtype="float32")


def test_all_modes_give_the_same_tokens(engine):
    count = int(os.environ.get("BUNDLED_PROMPTS", "4"))
    prompts = [api.encode(engine, prompt) for prompt in PROMPTS[:count]]
    base = dict(max_new_tokens=64, stop_ids=())
    plain = Options(mode="ar", **base)
    modes = [Options(mode="dflash", **base)]
    modes += [Options(mode="ddtree", tree_budget=budget, **base) for budget in (15, 31, 63)]
    for options in [plain, *modes]:  # a GPU's programs compile beside each other
        engine.prepare(options, max(map(len, prompts)))
    ar = engine.generate(prompts, plain)
    taus = []
    for options in modes:
        results = engine.generate(prompts, options)
        assert [r.output_ids for r in results] == [r.output_ids for r in ar]
        assert all(r.mode == options.mode and len(r.output_ids) == 64 for r in results)
        lengths = [length for r in results for length in r.accept_lengths]
        taus.append(sum(lengths) / len(lengths))
    assert taus[0] > 1.5  # speculation really happens
    assert taus == sorted(taus)  # a wider tree accepts more


def test_answer_is_sensible(engine):
    answer = api.generate(engine, PROMPTS[0], max_new_tokens=32)
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_streamed_text_is_the_text(engine):
    options = dict(max_new_tokens=24)
    text = api.generate(engine, PROMPTS[3], **options).text
    assert "".join(api.stream(engine, PROMPTS[3], **options)) == text


TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
FILTERS = (
    {},
    {"top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {28: -5.0, 30: 2.0}},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1},
)


def test_sampled_text_does_not_depend_on_the_tree():
    """A few requests, or the whole grid; there the noise is worth knowing."""
    given = os.environ.get("BUNDLED_SEEDS")
    full = given is not None
    cases = [
        (seed, temperature, asked)
        for seed in range(int(given or 1))
        for row, temperature in enumerate(TEMPERATURES)
        for column, asked in enumerate(FILTERS)
        if full or column % len(TEMPERATURES) == row
    ]
    ar = [
        Options("ar", max_new_tokens=24, stop_ids=(), seed=seed, temperature=temperature, **asked)
        for seed, temperature, asked in cases
    ]
    modes = [
        {"mode": "dflash"},
        {"mode": "ddtree", "tree_budget": 15},
        {"mode": "ddtree", "tree_budget": 15, "draft_noise": False},
    ]
    modes += [{"mode": "ddtree", "tree_budget": b} for b in (7, 31, 63, 127) if full]
    engine = api.load(dtype="float32", batch_size=8)
    prompts = [api.encode(engine, PROMPTS[5])] * len(ar)
    grid = [[dataclasses.replace(each, **mode) for each in ar] for mode in modes]
    for requests in [ar, *grid]:  # a GPU's programs compile beside each other
        engine.prepare(requests, len(prompts[0]))
    wanted = [result.output_ids for result in engine.generate(prompts, ar)]
    taus = []
    for mode, requests in zip(modes, grid, strict=True):
        results = engine.generate(prompts, requests)
        assert [result.output_ids for result in results] == wanted, mode
        assert all(result.mode == mode["mode"] for result in results)
        lengths = [length for result in results for length in result.accept_lengths]
        taus.append(sum(lengths) / len(lengths))
    if full:  # in a few requests chance is larger than what the noise is worth
        assert taus[1] > 1.05 * taus[2]
    assert len({tuple(text) for text in wanted}) > len(wanted) / 2
    # A seed has texts of its own; at a low temperature little is left to chance.
    hot = [
        (seed, text)
        for (seed, temperature, _), text in zip(cases, wanted, strict=True)
        if temperature >= 1
    ]
    pairs = itertools.combinations(hot, 2)
    assert all(one != other for (a, one), (b, other) in pairs if a != b)


def test_command_line(tmp_path, capsys):
    out = tmp_path / "result.json"
    assert main(["--max-new-tokens", "16", "--json", str(out), PROMPTS[0]]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["mode"] == "ddtree"
    assert run["text"].strip() in capsys.readouterr().out


def test_the_readme_commands_for_checkpoints(tmp_path, monkeypatch, capsys):
    from convert.__main__ import main as convert
    from ddtree_jax.paths import BUNDLED_DRAFTER

    monkeypatch.chdir(tmp_path)
    assert convert(["bundled", "my-target", "--verify"]) == 0
    assert convert(["inspect", "my-target", "--max-length", "4096"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert convert(["check", "my-target", str(BUNDLED_DRAFTER)]) == 0
    # In float32: the two best first tokens are within bfloat16's rounding, and one is French.
    flags = ["--target", "my-target", "--draft", str(BUNDLED_DRAFTER), "--dtype", "float32"]
    assert main([*flags, PROMPTS[0]]) == 0
    assert "Paris" in capsys.readouterr().out
