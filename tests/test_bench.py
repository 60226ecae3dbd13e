"""scripts/bench.py: acceptance on a spoken tiny pair, rounds of the tiny shape, bad usage."""

import dataclasses
import functools
import json
import math
import os
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from flax import nnx
from pairs import ORACLE
from test_decode_command import write_tokenizer

from ddtree_jax import Engine, rounds
from ddtree_jax import tree as trees
from ddtree_jax.commands import (
    bench_kernels,
    bench_products,
    bench_round,
    hugging_face,
    profile,
    shell,
    sweep,
)
from ddtree_jax.commands.bench import _parser, by_depth, main
from ddtree_jax.commands.bench_round import SAMPLING
from ddtree_jax.commands.floors import attended, attention_bounds, bytes_read, prefill_flops
from ddtree_jax.commands.stages import recurrent_part
from ddtree_jax.config import parse_target
from ddtree_jax.errors import InputError
from ddtree_jax.models import Models
from ddtree_jax.shapes import SHAPES, first_layers
from ddtree_jax.training import prompts
from kernels_pallas import matmul
from kernels_pallas.dispatch import REFERENCE, Kernels

NAME = "qwen3_gqa"


@pytest.fixture(autouse=True)
def _flags(monkeypatch):
    """The command adds to XLA_FLAGS; other tests' programs are kept under what was there."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_one_line_on_a_terminal_and_lines_in_a_log(capsys, monkeypatch, terminal):
    monkeypatch.setattr(rich.console.Console, "is_terminal", terminal)
    with shell.progress("first [4]") as update:
        update("second")
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = ["first [4]", "second"]
    assert (shown.err.splitlines() == lines) != terminal


@pytest.mark.exhaustive
def test_round_measures_every_program(tmp_path, capsys, monkeypatch):
    out = tmp_path / "round.json"
    every = {name: value for kind in SAMPLING.values() for name, value in kind.items()}
    monkeypatch.setattr(bench_round, "SAMPLING", {"everything": every})
    argv = ["round", "--shape", "tiny", "--budget", "7", "--context", "20,30", "--rounds", "5"]
    argv += ["--sampling", "--prompt", "100", "--attention-at", "20", "--rest", "0.01"]
    assert main([*argv, "--dtype", "float32", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["weights"] == "random"
    labels = [row["label"] for row in result["rows"]]
    assert labels[:3] == ["ar", "dflash", "ddtree 7"]
    assert labels[3] == "ddtree 7, everything"
    assert labels[4:] == labels[:4]
    assert [row["context"] for row in result["rows"]] == [20] * 4 + [30] * 4
    for row in result["rows"]:
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["ratio"] == pytest.approx(row["median_ms"] / row["floor_ms"])
        assert row["rested_ratio"] == pytest.approx(row["rested_ms"] / row["floor_ms"])
    floors = [row["floor_ms"] for row in result["rows"]]
    assert floors[0] < floors[1] == floors[2] == floors[3] < floors[-1]
    stages = result["rows"][2]["stages_ms"]
    assert list(stages) == ["draft", "tree", "verify", "head", *list(stages)[4:]]
    assert stages["tree + accept and commit"] == stages["tree"] + stages["accept and commit"]
    prefill, *attention = result["parts"]
    assert prefill["label"] == "prefill 100"
    assert [(row["nodes"], row["tokens"]) for row in attention] == [(16, 20), (64, 20)]
    for row in result["parts"]:
        assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
    shown = capsys.readouterr()
    assert "tiny, 2 layers, random weights" in shown.out
    # A log of a run that is cut off says what was measured until then.
    for row in result["rows"]:
        line = f"{row['label']}, context {row['context']}: {row['median_ms']:.3f} ms a round"
        assert line in shown.err.splitlines()


@pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid"])
def test_rounds_of_a_few_words_fit_the_cache(shape, monkeypatch):
    """Random weights guess well where there is little to guess."""
    monkeypatch.setattr(bench_round, "bucket", lambda slots: slots)
    argv = ["round", "--shape", shape, "--budget", "7", "--context", "64", "--rounds", "200"]
    case = bench_round.planned(_parser().parse_args(argv)).cases[-1]
    _, drafter = SHAPES[shape]
    in_a_row = 200 + bench_round.WARM_UP + bench_round.SPAN
    in_bursts = bench_round.bursts(200) * (1 + bench_round.BURST)
    assert case.slots > 64 + drafter.block_size * max(in_a_row, in_bursts)


def test_rounds_are_measured_at_their_completion(monkeypatch):
    """On a clock of a device that takes 2 ms for a round, and 100 ms for one after a rest."""
    now, busy_until, rests, dispatched, ahead = [0.0], [0.0], [], [0], []

    class Emitted(SimpleNamespace):
        def block_until_ready(self):
            ahead.append(dispatched[0] - self.number)
            now[0] = max(now[0], self.done)

    def program(leaves, state):
        assert leaves == "leaves"
        rested = now[0] > busy_until[0]
        busy_until[0] = max(now[0], busy_until[0]) + (0.1 if rested else 0.002)
        dispatched[0] += 1
        emitted = SimpleNamespace(count=Emitted(done=busy_until[0], number=dispatched[0]))
        return SimpleNamespace(length=state.length + 1, cache=state.cache), emitted

    def sleep(seconds):
        rests.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(bench_round, "time", clock)
    state = SimpleNamespace(length=np.zeros(1, int), cache=SimpleNamespace(slots=40))
    times = bench_round.measure(program, "leaves", state, 6)
    np.testing.assert_allclose(times, np.full(6, 2.0))
    # The device always had others to do, until there were no more.
    assert ahead == [bench_round.AHEAD] * (len(ahead) - bench_round.AHEAD) + [1, 0]
    times = bench_round.measure_rested(program, "leaves", state, 6, 0.5)
    np.testing.assert_allclose(times, [2.0, 2.0])
    assert rests == [0.5, 0.5]
    with pytest.raises(InputError, match=r"--rounds is 30; .* filled 44 slots"):
        bench_round.measure(program, "leaves", state, 30)


def test_number_lists():
    assert sweep.number_list("--budget", "15, 63") == [15, 63]
    assert sweep.number_list("--budget", "1-4") == [1, 2, 3, 4]
    assert sweep.number_list("--budget", "1-20:8,63,9") == [1, 9, 17, 63]
    for wrong in ("", "x", "-5", "0-3", "3-1", "1-9:0", "1-", "1-5:", "1.5"):
        with pytest.raises(InputError, match="--budget"):
            sweep.number_list("--budget", wrong)


def test_jumps_of_a_sweep_name_tile_edges():
    def row(nodes, ms, context=64):
        budget = nodes - 1
        label = f"ddtree {budget}"
        return dict(label=label, tree_budget=budget, context=context, median_ms=ms)

    rows = [row(65, 2.4), row(62, 1.0), row(63, 1.2), row(64, 1.3), row(16, 9.0, 128)]
    rows += [row(17, 11.0, 128), row(9, 1.0, 128), dict(row(64, 99.0), label="ddtree 63, top-k")]
    rows += [dict(row(2, 0.1), label="ar", tree_budget=None)]
    found = sweep.jumps(rows)
    assert [(each["context"], each["nodes"], each["tile_edge"]) for each in found] == [
        (64, [62, 63], None),
        (64, [64, 65], 64),
        (128, [9, 16], None),
        (128, [16, 17], 16),
    ]
    assert found[0]["growth_percent"] == pytest.approx(20)
    assert "64 to 65 nodes, context 64: +85 % (edge of 64)" in sweep.jump_lines(found)[2]


def test_the_recurrent_part_of_a_round_leaves_nothing_out():
    """What is measured beside a hybrid's stages is every Gated DeltaNet layer, over the tree."""
    models = nnx.eval_shape(lambda: Models(*SHAPES["tiny-hybrid"], rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(models)

    def measured(state):
        decoding = rounds.empty_state(models, 1, 32, 1, jnp.float32, drafting=True)
        tree = trees.chain(jnp.zeros((1, 7), jnp.int32))
        return recurrent_part(nnx.merge(graphdef, state), decoding, tree)

    hidden, pending = jax.eval_shape(measured, state)
    assert hidden.shape == (1, 7, 32)
    assert [nodes.u.shape for nodes in pending] == [(1, 7, 2, 2, 8)] * 2


def test_the_floor_counts_states_and_windows():
    """A state is read and written, a sliding layer reads no more than its window."""
    engine = Engine(*SHAPES["tiny-hybrid"], load=dict, dtype=jnp.bfloat16)
    weights = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for name, leaf in zip(engine._leaf_names, engine._leaf_shapes, strict=True)
        if name.startswith("target.layers.") or name == "target.embed_vd"
    )
    kv, state = 2 * 2 * 8 * 2, 2 * 8 * 2 * 8 * 4  # a row of one layer's K and V; one layer's S
    assert bytes_read(engine, "ar", 100) == weights + 100 * kv + 2 * 2 * state
    drafted = [bytes_read(engine, "dflash", n) - bytes_read(engine, "ar", n) for n in (0, 8, 100)]
    assert drafted[1] - drafted[0] == drafted[2] - drafted[0] == 8 * kv


def test_the_floor_of_prefill_counted_by_hand():
    engine = Engine(*SHAPES["tiny"], load=dict, dtype=jnp.bfloat16)
    tokens = 5
    layer = 32 * (4 + 2 + 2) * 8 + 4 * 8 * 32 + 3 * 32 * 48  # q, k, v; o; gate, up, down
    attention = 4 * 4 * 8 * (1 + 2 + 3 + 4 + 5)  # of a layer: 4 heads of 8, scores and values
    context = 32 * 32 + 32 * (2 + 2) * 8  # fc of one feature; K and V of the drafter's layer
    expected = 2 * tokens * (2 * layer + context) + 2 * attention + 2 * 32 * 256
    assert prefill_flops(engine, tokens) == expected


def test_a_window_bounds_the_pairs():
    for count, window in [(5, None), (5, 9), (7, 3), (4, 1)]:
        pairs = sum(0 <= i - j < (window or count) for i in range(count) for j in range(count))
        assert attended(count, window) == pairs


def test_the_bounds_of_attention():
    target, _ = SHAPES["tiny"]  # 4 heads of 8 on 2 KV heads
    assert attention_bounds(target, nodes=3, context=100, width=2) == (
        100 * 2 * (2 * 8) * 2,
        3 * 100 * 4 * (8 + 8) * 2,
    )


def test_the_baseline_needs_torch(capsys, monkeypatch):
    found = hugging_face.importlib.util.find_spec
    monkeypatch.setattr(
        hugging_face.importlib.util,
        "find_spec",
        lambda name: None if name == "torch" else found(name),
    )
    assert main(["round", "--shape", "tiny", "--baseline"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --baseline needs torch")


def test_the_baselines_configuration_is_transformers_own():
    """What is timed there has the shape of what is timed here."""
    from transformers import AutoConfig

    target, _ = SHAPES["qwen3-4b"]
    values = hugging_face.config_values(target, target.max_position)
    theirs = AutoConfig.for_model(values.pop("model_type"), **values)
    written = json.loads(theirs.to_json_string(use_diff=False))
    again = parse_target(written | {"architectures": ["Qwen3ForCausalLM"]}, "config.json")
    # transformers names no default for the stop ids; all else is what went in.
    assert dataclasses.replace(again, stop_ids=()) == target
    with pytest.raises(InputError, match="--baseline"):
        hugging_face.config_values(SHAPES["qwen3.5-4b"][0], 4096)


def test_startup_refuses_what_its_process_refuses(capsys):
    assert main(["startup", "--shape", "tiny", "--attention", "mosaic"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "error: attention mosaic cannot be used: the device is a cpu; the kernels " + (
        "need an NVIDIA Hopper GPU"
    )


@pytest.mark.exhaustive
def test_startup_cold_and_warm(tmp_path):
    out = tmp_path / "startup.json"
    argv = ["startup", "--shape", "tiny", "--budget", "3", "--prompt", "5"]
    assert main([*argv, "--json", str(out)]) == 0
    cold, warm = json.loads(out.read_text())["rows"]
    assert [cold["label"], warm["label"]] == ["cold", "warm"]
    for row in (cold, warm):
        assert set(row["programs_s"]) == {"prefill", "tree_round"}
        assert row["begin_s"] < row["first_token_s"] < row["first_round_s"]
    # The warm process found every program that the cold one left.
    assert 0 < cold["cache_bytes"] == warm["cache_bytes"]


@pytest.fixture
def spoken(tmp_path):
    """A pair with a tokenizer and two small sets, as arguments of the command."""
    target = tmp_path / "target"
    shutil.copytree(ORACLE / NAME / "target", target)
    write_tokenizer(target, range(0x80, 0x80 + 29))
    sets = tmp_path / "eval.jsonl"
    lines = [{"set": "one", "turns": ["Hello", "More"]}, {"set": "two", "turns": ["Yes"]}]
    sets.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = ["acceptance", "--target", str(target), "--draft", str(ORACLE / NAME / "draft")]
    argv += ["--eval", str(sets), "--budgets", "7", "--max-new-tokens", "12"]
    return [*argv, "--dtype", "float32", "--json", "-"]


def test_acceptance_of_two_turns(spoken, capsys):
    assert main(spoken) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in result["rows"]] == ["ar", "dflash", "ddtree"]
    for row in result["rows"]:
        one, two = row["sets"]["one"], row["sets"]["two"]
        assert (one["answers"], two["answers"]) == (2, 1)
        assert one["same_as_ar"] == 2  # float32: every text is the target's own
        counts = one["accept_length_counts"]
        assert sum(counts) == one["rounds"]
        assert sum(n * count for n, count in enumerate(counts)) + 2 == one["tokens"]
    assert result["rows"][0]["mean_tau"] == 1


@pytest.mark.exhaustive
def test_acceptance_of_samples_beside_greedy(spoken, capsys, tmp_path):
    picture = tmp_path / "depth.svg"
    argv = [*spoken, "--temperature", "1", "--seeds", "0,3", "--draft-noise", "on,off"]
    assert main([*argv, "--plot", str(picture)]) == 0
    result = json.loads(capsys.readouterr().out)
    labels = [row["label"] for row in result["rows"]]
    assert labels == [
        "ar", "dflash", "ddtree 7", "ar, T 1", "dflash, T 1", "ddtree 7, T 1",
        "dflash, T 1, noise-blind", "ddtree 7, T 1, noise-blind",
    ]  # fmt: skip
    for row in result["rows"]:
        for each in row["sets"].values():
            assert each["same_as_ar"] == each["answers"]
            assert len(each["tau_by_seed"]) == (2 if row["temperature"] else 1)
        one = row["sets"]["one"]
        assert one["answers"] == (4 if row["temperature"] else 2)
    svg = picture.read_text()
    assert svg.count("<polyline") == 6
    assert "ddtree 7, T 1, noise-blind" in svg


def test_acceptance_by_depth():
    # Rounds of lengths 1, 1, 2, 4: half accept a node, a quarter one of depth 2 and of depth 3.
    assert by_depth([[0, 2, 1], [0, 0, 0, 0, 1]]) == [0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["acceptance", "--target", "x"], "--draft"),
        (["acceptance", "--budgets", "a"], "--budgets"),
        (["acceptance", "--budgets", "15,0"], "--budgets holds 0; expected 1 to 511"),
        (["acceptance", "--budgets", "512"], "--budgets holds 512"),
        (["acceptance", "--seeds", "a"], "--seeds is 'a'"),
        (["acceptance", "--draft-noise", "some"], "--draft-noise is 'some'"),
        (["acceptance", "--limit", "0"], "--limit is 0; expected at least 1"),
        (["acceptance", "--batch-size", "0"], "--batch-size is 0"),
        (["acceptance", "--max-new-tokens", "-1"], "--max-new-tokens is -1"),
        (["acceptance", "--eval", "nowhere.jsonl"], "nowhere.jsonl"),
        (["round", "--shape", "gpt"], "--shape"),
        (["round", "--budget", "x"], "--budget"),
        (["round", "--context", "0"], "--context"),
        (["round", "--prompt", "many"], "--prompt is 'many'"),
        (["round", "--attention-at", "0"], "--attention-at holds 0"),
        (["round", "--budget", "1-512", "--rounds", "5"], "--budget holds 512; expected 1 to 511"),
        (["round", "--prefill-chunk", "0"], "--prefill-chunk is 0"),
        (["round", "--budget", "1-8", "--kernels"], "--kernels"),
        (["round", "--kernels", "--shape", "tiny"], "--kernels needs a GPU"),
        *(([name, "--json", ""], "--json is empty") for name in ("acceptance", "round", "startup")),
        *(([name, "--json", ""], "--json is empty") for name in ("all-sum", "kernels", "products")),
        (["acceptance", "--plot", ""], "--plot is empty"),
        (["acceptance", "--eval", ""], "--eval is empty"),
        (["acceptance", "--seeds", "0,-1"], "--seeds is '0,-1'; expected numbers from 0"),
        (["all-sum", "--size", "0"], "--size is 0"),
        (["round", "--budget", "1-999999999"], "--budget holds 1-999999999; expected up to 4096"),
        (["round", "--budget", "1-99999999999999999999"], "expected numbers as in 15,63"),
        (["round", "--context", "99999999999"], "--context holds 99999999999; expected 1 to"),
        (["round", "--rest", "0"], "--rest is 0; expected seconds, above 0 and up to 60"),
        (["round", "--rest", "nan"], "--rest is nan"),
        (["round", "--rounds", "99999999"], "--rounds is 99999999; expected 1 to 10000"),
        (["startup", "--prompt", "0"], "--prompt is 0"),
        (["startup", "--budget", "512"], "--budget is 512"),
        (["unknown"], "unknown"),
        ([], "command"),
    ],
)
def test_bad_usage(argv, word, capsys, monkeypatch):
    monkeypatch.setattr(prompts, "evaluation_sets", lambda: pytest.fail("too late"))
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert word in error


def test_products_are_timed_where_kernels_run(capsys):
    assert main(["products"]) == 2
    assert "needs the kernels: the device is a cpu" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid"])
def test_products_without_a_kernel_are_refused(shape, capsys, monkeypatch):
    monkeypatch.setattr(bench_products, "unavailable_reason", lambda: None)
    assert main(["products", "--shape", shape]) == 2
    assert f"--shape is {shape}, with a weight of 32 x " in capsys.readouterr().err


def test_products_of_the_kernel_are_told_apart(monkeypatch):
    """The times of one way to divide must not be taken for another's."""
    plans = [matmul.Schedule(64, 2), matmul.Schedule(64, 2, 8, 2), matmul.Schedule(256, 2)]
    names = [f"stream_512x256_64_2_8_{cluster}_mosaic_gpu_kernel" for cluster in (1, 2)]
    kernels = tuple(profile.Kernel(name, 4, 4.0 * (i + 1)) for i, name in enumerate(names))
    monkeypatch.setattr(profile, "traced", lambda work: profile.Profile(1.0, 1.0, kernels))
    monkeypatch.setattr(matmul, "split_matmul", lambda x, w, plan: x @ w)
    x, weights = jnp.ones((16, 512), jnp.bfloat16), [jnp.ones((512, 256), jnp.bfloat16)] * 2
    product = bench_products.Product("o", 512, 256)
    times = bench_products.kernel_times(product, x, weights, plans)
    assert times == {plans[0]: 1.0, plans[1]: 2.0}


def test_products_that_the_kernel_does_not_take_are_xlas(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_products, "unavailable_reason", lambda: None)
    monkeypatch.setattr(bench_products, "WEIGHT_BYTES", 0)
    monkeypatch.setattr(bench_products, "read_bandwidth", lambda: 1e12)
    monkeypatch.setattr(bench_products, "xla_time", lambda *_: 3.0)

    def times(product, x, weights, plans):
        return {plan: float(i) for i, plan in enumerate(plans)}

    monkeypatch.setattr(bench_products, "kernel_times", times)
    path = tmp_path / "products.json"
    options = ["--shape", "smollm2-135m", "--rows", "64,256", "--json", str(path)]
    assert main(["products", *options]) == 0
    rows = {(row["product"], row["rows"]): row for row in json.loads(path.read_text())["rows"]}
    assert rows["o", 64]["chosen"] == matmul.schedule(64, 576, 576)._asdict()
    assert rows["o", 64]["chosen_us"] is not None
    many = rows["o", 256]
    assert (many["chosen"], many["chosen_us"], many["kernel"]) == (None, None, [])
    assert not many["preferred"]
    assert rows["gate, up", 256]["chosen"]["tile"] == matmul.GATED_TILE


def test_kernels_are_checked_where_they_run(capsys):
    assert main(["kernels"]) == 2
    assert "needs the kernels: the device is a cpu" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid"])
def test_the_exact_results_are_those_of_the_references(shape):
    """What the kernels are judged by on a GPU: bfloat16's error and no more."""
    for nodes in (1, 9):
        for case in bench_kernels.cases(SHAPES[shape][0], nodes, 40):
            mean, most = bench_kernels.errors(case, bench_kernels.compiled(case, REFERENCE))
            assert mean < 3e-3, case.operation
            assert most < 0.1, case.operation


@pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid", "smollm2-135m"])
def test_small_shapes_have_programs_with_kernels(shape):
    """Where a kernel does not take the shape, the reference stands for it."""
    for nodes in (1, 9, 129):
        for case in bench_kernels.cases(SHAPES[shape][0], nodes, 40):
            jax.jit(functools.partial(case.run, Kernels(mosaic=True))).trace(*case.inputs)


def test_a_wrong_kernel_is_seen():
    class Broken(Kernels):
        def add_norm(self, *arguments, **options):
            x, normed = REFERENCE.add_norm(*arguments, **options)
            return x, normed * 1.01

        def append(self, caches, rows, path, length, count):
            return REFERENCE.append(caches, rows, path, length, count - 1)

    cases = {each.operation: each for each in bench_kernels.cases(SHAPES["tiny"][0], 9, 40)}
    ok = {}
    for name, case in cases.items():
        programs = [bench_kernels.compiled(case, each) for each in (Broken(), REFERENCE)]
        ok[name] = bench_kernels.row(case, 9, programs)["ok"]
    assert [name for name, right in ok.items() if not right] == ["add and norm", "append"]


def test_the_first_layers_of_a_pair():
    target, drafter = first_layers(*SHAPES["qwen3.6-27b"], 8)
    assert (target.num_layers, len(target.windows)) == (8, 8)
    assert target.delta.layers == (0, 1, 2, 4, 5, 6)
    assert (drafter.target_layer_ids, drafter.num_target_layers) == ((0, 1, 2, 3, 4), 8)
    assert first_layers(*SHAPES["tiny"], 2)[0].num_layers == 2


@pytest.mark.parametrize("count", ["4", "37"])
def test_layers_that_a_pair_does_not_have(capsys, count):
    assert main(["round", "--layers", count]) == 2
    wanted = f"error: --layers is {count} layers; expected 5 to 36 for qwen3-8b"
    assert wanted in capsys.readouterr().err
