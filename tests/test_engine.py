"""The engine: limits, batches, sampling, compilations and errors, in every mode."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairs import engine as make_engine
from pairs import golden, jitted, models, rarely

from ddtree_jax import Engine, InputError, Options, RunError, cache, rounds, sampling
from ddtree_jax import engine as engines
from ddtree_jax import tree as trees
from ddtree_jax.sampling import GREEDY

NAME = "qwen3_gqa"  # block 8
BUDGET = 15
MODES = ("ar", "dflash", "ddtree")
PROMPTS = golden(NAME)["prompts"][:5] + golden(NAME)["prompts"][-3:]


def options(mode, **changes):
    return Options(**dict(mode=mode, tree_budget=BUDGET, max_new_tokens=40, stop_ids=()) | changes)


@pytest.fixture(scope="module")
def single():
    """One row, small chunks."""
    return make_engine(NAME, prefill_chunk=7)


@pytest.fixture(scope="module")
def batched():
    """Three rows for eight prompts."""
    return make_engine(NAME, prefill_chunk=7, batch_size=3)


def check_counts(result):
    assert len(result.output_ids) == 1 + sum(result.accept_lengths)
    assert all(1 <= length <= 8 for length in result.accept_lengths)
    if result.mode == "ar":
        assert set(result.accept_lengths) <= {1}
    assert result.rounds == len(result.accept_lengths)
    if result.rounds:
        assert result.tau == pytest.approx(sum(result.accept_lengths) / result.rounds)
    else:
        assert result.tau is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9])
def test_exactly_the_limit(single, mode, limit):
    (result,) = single.generate(PROMPTS[:1], options(mode, max_new_tokens=limit))
    assert result.output_ids == golden(NAME)["ar"][0][:limit]
    assert result.finish_reason == "length"
    check_counts(result)


@pytest.mark.parametrize("mode", MODES)
def test_a_shorter_request_after_a_longer_one(single, mode):
    longer, shorter = PROMPTS[-1], PROMPTS[0]
    assert len(longer) > len(shorter)
    first = single.generate([longer], options(mode, max_new_tokens=60))[0]
    again = single.generate([shorter], options(mode, max_new_tokens=30))[0]
    assert first.output_ids == golden(NAME)["ar"][-1][:60]
    assert again.output_ids == golden(NAME)["ar"][0][:30]


@pytest.mark.parametrize("mode", MODES)
def test_stop_of_the_model_at_every_place(single, mode):
    """Each place of a text as the stop: the text ends there, in whatever part of a block it is."""
    text = golden(NAME)["ar"][0][:24]
    for place, token in enumerate(text):
        (result,) = single.generate(PROMPTS[:1], options(mode, stop_ids=(127, token)))
        assert result.output_ids == text[: text.index(token) + 1]
        assert result.finish_reason == "stop"
        check_counts(result)
        if place == 0:
            assert result.tau is None


def test_stop_ids_default_to_the_models_own(single, monkeypatch):
    token = golden(NAME)["ar"][0][5]
    monkeypatch.setattr(single, "target", dataclasses.replace(single.target, stop_ids=(token,)))
    (result,) = single.generate(PROMPTS[:1], options("ddtree", stop_ids=None))
    assert (result.output_ids[-1], result.finish_reason) == (token, "stop")
    (result,) = single.generate(PROMPTS[:1], options("ddtree", stop_ids=()))
    assert len(result.output_ids) == 40


@pytest.mark.parametrize("temperature", [rarely(0.0), 0.8])
def test_a_batch_gives_what_each_prompt_gives_alone(single, batched, temperature):
    """More prompts than rows, of different lengths; and at one seed every mode gives one text."""
    assert len({len(prompt) for prompt in PROMPTS}) > 1
    texts = {}
    for mode in MODES:
        wanted = options(mode, temperature=temperature, seed=3)
        together = batched.generate(PROMPTS, wanted)
        alone = [single.generate([prompt], wanted)[0] for prompt in PROMPTS]
        for one, other in zip(together, alone, strict=True):
            assert one.output_ids == other.output_ids
            assert one.accept_lengths == other.accept_lengths
            check_counts(one)
        texts[mode] = [result.output_ids for result in together]
    assert texts["ar"] == texts["dflash"] == texts["ddtree"]
    greedy = [ids[:40] for ids in golden(NAME)["ar"][:5] + golden(NAME)["ar"][-3:]]
    assert (texts["ar"] == greedy) == (temperature == 0)


def test_seeds(single, batched):
    sampled = [options("ddtree", temperature=0.8, seed=seed) for seed in (0, 1, 2**32 - 1)]
    texts = [single.generate(PROMPTS[:1], each)[0].output_ids for each in sampled]
    assert len({tuple(text) for text in texts}) == 3
    assert single.generate(PROMPTS[:1], sampled[0])[0].output_ids == texts[0]
    # One prompt several times, each with its own options, in one batch; a greedy one among them.
    mixed = [sampled[0], options("ddtree", max_new_tokens=20), sampled[2], sampled[1]]
    results = batched.generate(PROMPTS[:1] * 4, mixed)
    wanted = [texts[0], golden(NAME)["ar"][0][:20], texts[2], texts[1]]
    assert [result.output_ids for result in results] == wanted


@pytest.mark.exhaustive
def test_chain_seed_changes_no_text(single):
    for temperature in (0.0, 0.8):
        plain, seeded = (
            single.generate(
                PROMPTS[:1], options("ddtree", temperature=temperature, chain_seed=seed)
            )[0]
            for seed in (False, True)
        )
        assert plain.output_ids == seeded.output_ids


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_prefill_chunks_change_nothing(single, chunk):
    """Nor acceptance: every prompt token's features reach the drafter."""
    other = make_engine(NAME, prefill_chunk=chunk)
    for prompt in (PROMPTS[0], PROMPTS[-1]):
        (got,) = other.generate([prompt], options("ddtree"))
        (wanted,) = single.generate([prompt], options("ddtree"))
        assert got.output_ids == wanted.output_ids
        assert got.accept_lengths == wanted.accept_lengths


@pytest.mark.exhaustive
def test_one_compilation_per_program():
    engine = make_engine(NAME, prefill_chunk=7, batch_size=2)
    assert engine.compilations == 0
    engine.generate(PROMPTS[:1], options("ddtree"))
    # Prefill, insertion, the round.
    assert engine.compilations == 3
    for limit in (1, 9, 40):
        for prompt in ([1], PROMPTS[0], PROMPTS[-1]):
            for seed in (0, 1):
                engine.generate(
                    [prompt] * 3, options("ddtree", max_new_tokens=limit, seed=seed, stop_ids=(9,))
                )
    assert engine.compilations == 3
    programs = {key: future.result() for key, future in engine._programs.items()}
    engine.generate(PROMPTS[:1], options("ddtree", tree_budget=7))
    assert engine.compilations == 4
    engine.generate(PROMPTS[:1], options("ddtree", temperature=0.5))
    engine.generate(PROMPTS[:1], options("ddtree", temperature=0.9))
    assert engine.compilations == 6  # prefill and round, with noise
    assert all(engine._programs[key].result() is program for key, program in programs.items())


@pytest.mark.parametrize(
    ("length", "slots"),
    [(1, 256), (256, 256), (257, 384), (385, 512), (513, 768), (769, 1024), (1025, 1536)],
)
def test_bucket(length, slots):
    assert engines.bucket(length) == slots


@pytest.mark.parametrize("mode", MODES)
def test_max_length_caps_the_request(mode):
    engine = make_engine(NAME, prefill_chunk=7, max_length=30)
    (result,) = engine.generate(PROMPTS[:1], options(mode, max_new_tokens=1000))
    length = 30 - len(PROMPTS[0])
    assert result.output_ids == golden(NAME)["ar"][0][:length]
    assert result.finish_reason == "length"


@pytest.mark.parametrize("mode", [rarely("dflash"), "ddtree"])
def test_to_the_last_slot_of_the_cache(single, mode, monkeypatch):
    """The cache exactly full: what a last tree would have written overwrites nothing."""
    size = 48
    prompts = [PROMPTS[-1][:length] for length in range(8, 25)]  # a last block at every place
    wanted = single.generate(
        prompts, [options("ar", max_new_tokens=size - len(prompt)) for prompt in prompts]
    )
    monkeypatch.setattr(engines, "bucket", lambda length: length)
    engine = make_engine(NAME, prefill_chunk=24, max_length=size, batch_size=2)
    results = engine.generate(prompts, options(mode, max_new_tokens=1000))
    for result, other, prompt in zip(results, wanted, prompts, strict=True):
        assert result.output_ids == other.output_ids
        assert len(result.output_ids) + len(prompt) == size
        check_counts(result)


@pytest.mark.parametrize("temperature", [rarely(0.0), rarely(0.8)])
def test_prompts_prefilled_in_groups(single, temperature):
    """A wide batch prefills several prompts at once, of different numbers of chunks."""
    engine = make_engine(NAME, prefill_chunk=7, batch_size=32)
    assert engine.prefill_rows == 2
    prompts = [prompt for pair in zip(PROMPTS, PROMPTS[::-1], strict=True) for prompt in pair]
    prompts = prompts * 2 + [[1]] + PROMPTS[-1:]
    limits = [1, 2, 11, 30] * len(prompts)
    each = [
        options("ddtree", temperature=temperature, seed=seed, max_new_tokens=limit)
        for seed, limit in zip(range(len(prompts)), limits, strict=False)
    ]
    for got, wanted in zip(
        engine.generate(prompts, each), single.generate(prompts, each), strict=True
    ):
        assert got.output_ids == wanted.output_ids
        assert got.accept_lengths == wanted.accept_lengths


def test_mask_id_as_a_real_token_is_kept():
    """In the prompt and in the output; lengths are counted, never values."""
    plain = make_engine(NAME, prefill_chunk=24)
    mask = plain.drafter.mask_token_id
    prompt = [*PROMPTS[0][:3], mask, mask, *PROMPTS[0][3:], mask]
    outputs = {mode: plain.generate([prompt], options(mode))[0].output_ids for mode in MODES}
    assert outputs["ar"] == outputs["dflash"] == outputs["ddtree"]
    # A drafter whose mask is a token that the target really says.
    said = golden(NAME)["ar"][0][6]
    drafter = dataclasses.replace(plain.drafter, mask_token_id=said)
    leaves = dict(zip(plain._leaf_names, plain._leaves.result(), strict=True))
    other = Engine(plain.target, drafter, lambda _: leaves, dtype=jnp.float32)
    for mode in ("dflash", "ddtree"):
        (result,) = other.generate(PROMPTS[:1], options(mode))
        assert said in result.output_ids
        assert result.output_ids == golden(NAME)["ar"][0][:40]


def test_top2_gap_is_that_of_the_logits(single):
    ids = PROMPTS[-1]

    def logits(pair, tokens):
        tree = trees.chain(tokens)
        empty = cache.empty(pair.target.config, 1, 32, jnp.float32)
        start = jnp.zeros(1, jnp.int32)
        hidden, _, _ = pair.target(empty, tree.tokens, tree.depths, tree.ancestors, start)
        return pair.target.logits(hidden[0])

    rows = np.asarray(jitted(models(NAME), logits)(jnp.asarray([ids], jnp.int32)))
    for length in (1, 7, 8, len(ids)):
        second, first = np.sort(rows[length - 1])[-2:]
        assert single.top2_gap(ids[:length]) == pytest.approx(first - second, abs=1e-4)

    # Of a sample: with the noise of its place, among what is kept.
    hot = Options("ar", temperature=0.7, top_k=5, seed=3, logit_bias={17: 4.0}, min_new_tokens=9)
    banned = list(single.stop_ids(hot))
    assert banned
    for length, sample in ((7, 0), (len(ids), 2)):
        scores = rows[length - 1].astype(np.float64)
        scores[17] += 4
        scores[banned] = -np.inf
        noise = np.asarray(sampling.gumbel(3, sample, length, len(scores)))
        scores[scores < np.sort(scores)[-5]] = -np.inf
        second, first = np.sort(scores + 0.7 * noise)[-2:]
        got = single.top2_gap(ids[:length], hot, sample=sample, emitted=4)
        assert got == pytest.approx(first - second, abs=1e-4)
    later = single.top2_gap(ids, hot, emitted=9)  # a stop id may follow
    assert later == single.top2_gap(ids, dataclasses.replace(hot, min_new_tokens=0))
    with pytest.raises(ValueError, match="penalties"):
        single.top2_gap(ids, dataclasses.replace(hot, presence_penalty=1.0))


@pytest.mark.parametrize(
    ("hidden", "inboxes", "sums"),
    [(4096, True, "kernel"), (576, True, "XLA"), (4096, False, "XLA")],
)
def test_sums_are_called_by_what_makes_them(single, hidden, inboxes, sums):
    """With inboxes the kernel may gather where its sums do not take the rows."""
    mesh = SimpleNamespace(shape={"data": 1, "model": 2})
    target = dataclasses.replace(single.target, hidden_size=hidden)
    engine = SimpleNamespace(
        mesh=mesh, target=target, dtype=jnp.bfloat16, _inboxes=object() if inboxes else None
    )
    assert Engine.sums.fget(engine) == sums
    assert single.sums is None


def test_programs_that_wait_for_devices_are_given_to_them_one_at_a_time():
    running, together = [], []

    def program(number):
        running.append(number)
        time.sleep(0.01)
        together.append(len(running))
        running.remove(number)
        return number

    programs = [engines._in_turn(program) for _ in range(2)]  # of two engines, say
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda i: programs[i % 2](i), range(8))) == list(range(8))
    assert together == [1] * 8


def test_events(single, batched):
    """What is yielded adds up to the result, prefill first, `done` last."""
    for engine in (single, batched):
        seen: dict[int, list] = {}
        for event, result in engine.run(PROMPTS[:4], options("ddtree")):
            seen.setdefault(event.index, []).append(event)
            tokens = [token for each in seen[event.index] for token in each.tokens]
            assert result.output_ids == tokens
        assert sorted(seen) == [0, 1, 2, 3]
        for events in seen.values():
            assert [each.from_prefill for each in events] == [True] + [False] * (len(events) - 1)
            assert [each.done for each in events] == [False] * (len(events) - 1) + [True]
            assert all(each.tokens for each in events)
    assert single.generate([], options("ddtree")) == []


@pytest.mark.parametrize(
    ("prompts", "changes", "problem"),
    [
        ([[]], {}, "prompt 0 is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 512], {}, "has 512 tokens"),
        ([[1, 128]], {}, r"outside 0..127"),
        ([[-1, 1]], {}, r"outside 0..127"),
        ([[1]], {"stop_ids": tuple(range(9))}, "9 stop ids"),
        ([[1]], {"stop_ids": (3, 128)}, "stop_ids holds 128; expected 0 to 127"),
        ([[1]], {"n": 2}, "n is 2; expected at most the batch size, 1"),
        ([[1]], {"logit_bias": {128: 1.0}}, "names token 128; expected 0 to 127"),
    ],
)
def test_requests_that_are_refused(single, prompts, changes, problem):
    with pytest.raises(InputError, match=problem):
        single.generate(prompts, options("ddtree", **changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mode": "tree"}, "mode is 'tree'"),
        ({"tree_budget": 0}, "tree budget is 0"),
        ({"tree_budget": 512}, "tree budget is 512"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-40}, "temperature is 1e-40; expected 0 .*, or 1e-20 to 1e"),
        ({"temperature": 1e39}, "temperature is 1e.39"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"n": 0}, "n is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": float("inf")}, "presence_penalty is inf"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"frequency_penalty": -1e39}, "frequency_penalty is -1e.39; expected -1e.09 to 1e.09"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty is 1e-39; expected 1e-06 to 1e.06"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens is 9; expected 0 to .*8"),
        ({"logit_bias": dict.fromkeys(range(65), 1.0)}, "65 tokens; expected up to 64"),
        ({"logit_bias": {1: float("inf")}}, "token 1 is inf"),
        ({"logit_bias": {1: 1e39}}, "token 1 is 1e.39"),
        ({"stop": "END"}, "stop is 'END'"),
        ({"stop": ("",)}, "not empty"),
        ({"stop": (5,)}, "stop is .5,"),
        ({"stop": None}, "stop is None; expected a tuple"),
        ({"stop_ids": 5}, "stop_ids is 5; expected a tuple"),
        ({"stop_ids": (1.5,)}, "stop id is 1.5; expected an integer"),
        ({"logit_bias": None}, "logit_bias is None; expected numbers by token id"),
        ({"logit_bias": {3: "x"}}, "logit_bias of token 3 is 'x'; expected a number"),
        ({"temperature": "0.5"}, "temperature is '0.5'; expected a number"),
        ({"top_p": 10**400}, "top_p is 1000.*; expected a number"),
        ({"logit_bias": {"x": 3.0}}, "token of logit_bias is 'x'; expected an integer"),
        ({"tree_budget": "x"}, "tree budget is 'x'; expected an integer"),
        *(
            ({name: None}, f"{name} is None; expected a.* (number|integer)")
            for name in (
                *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
                *("max_new_tokens", "seed", "n", "top_k", "min_new_tokens"),
            )
        ),
    ],
)
def test_options_that_are_refused(changes, problem):
    with pytest.raises(InputError, match=problem):
        Options(**changes)


def test_options_take_what_arrays_hold():
    """NumPy's numbers are numbers; what was given as a list may change afterwards."""
    stops = [5, np.int64(6)]
    mine = Options(
        *("ddtree", np.int32(7), np.int64(9)),
        temperature=np.float32(0.5),
        seed=np.uint32(3),
        top_p=np.array(0.5),
        stop_ids=stops,
        logit_bias={np.int64(3): np.float32(1)},
        stop=["a"],
    )
    stops.clear()
    assert mine == Options(
        "ddtree", 7, 9, 0.5, seed=3, top_p=0.5, stop_ids=(5, 6), logit_bias={3: 1.0}, stop=("a",)
    )


def test_float32_products_on_a_gpu_are_not_tuned_through_triton(single, monkeypatch):
    """That took most of the time to the first token there."""

    class Program:
        def lower(self, *shapes):
            return self

        def compile(self, options):
            return options

    assert single._build(Program()) == {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert single._build(Program()) == {"xla_gpu_enable_triton_gemm": False}
    monkeypatch.setattr(single, "dtype", jnp.bfloat16)
    assert single._build(Program()) == {}


def test_a_minimum_beyond_every_length(single):
    """Nothing of a request is too large for the device's integers."""
    many = options("ddtree", max_new_tokens=2**33, min_new_tokens=2**32)
    (result,) = single.generate([PROMPTS[0][: single.max_length - 9]] * 1, many)
    assert result.finish_reason == "length"
    assert len(result.prompt_ids) + len(result.output_ids) == single.max_length
    single.top2_gap(result.prompt_ids, many)


def test_one_set_of_options_for_each_prompt(single):
    with pytest.raises(InputError, match="2 options for 1 prompts"):
        single.generate(PROMPTS[:1], [options("ddtree")] * 2)


def test_requests_of_one_batch_agree(batched):
    mixed = [options("ddtree"), options("ddtree", draft_noise=False)]
    with pytest.raises(InputError, match="differ in draft_noise"):
        batched.generate(PROMPTS[:2], mixed)


def test_without_a_drafter():
    paired = make_engine(NAME)
    leaves = dict(zip(paired._leaf_names, paired._leaves.result(), strict=True))
    only = {name: leaf for name, leaf in leaves.items() if name.startswith("target.")}
    engine = Engine(paired.target, None, lambda _: only, dtype=jnp.float32)
    for mode in ("dflash", "ddtree"):
        with pytest.raises(InputError, match=f"mode {mode} needs a drafter"):
            engine.generate(PROMPTS[:1], options(mode))
    (result,) = engine.generate(PROMPTS[:1], options("ar"))
    assert result.output_ids == golden(NAME)["ar"][0][:40]


def test_wrong_parameters_are_named():
    paired = make_engine(NAME)
    leaves = dict(zip(paired._leaf_names, paired._leaves.result(), strict=True))
    leaves["extra"] = leaves.pop("drafter.fc_fd")
    leaves["target.norm.weight_d"] = jnp.ones(3)
    engine = Engine(paired.target, paired.drafter, lambda _: leaves, dtype=jnp.float32)
    with pytest.raises((ValueError, RunError), match="extra is not a parameter") as caught:
        engine.generate(PROMPTS[:1], options("ddtree"))
    assert "drafter.fc_fd is nothing" in str(caught.value)
    assert "target.norm.weight_d is float32[3]" in str(caught.value)


def test_finished_rows_stay_as_they_are():
    """A round on a batch where one row is done: it commits and emits nothing."""
    pair = models(NAME)
    state = rounds.empty_state(pair, 2, 32, 1, jnp.float32, drafting=True)
    request = dataclasses.replace(state.request, limit=jnp.array([9, 9]))
    state = dataclasses.replace(
        state, done=jnp.array([False, True]), bonus=jnp.array([5, 6]), request=request
    )

    def step(pair, state):
        return rounds.tree_round(pair, state, budget=7, sampler=GREEDY)

    after, emitted = jitted(pair, step)(state)
    assert emitted.count[0] >= 1
    assert (emitted.count[1], after.length[1], after.emitted[1], after.bonus[1]) == (0, 0, 0, 6)
    for part in after.cache.k + after.cache.v:
        assert (np.asarray(part)[1] == 0).all()
        assert (np.asarray(part)[0, :, 0] != 0).any()
