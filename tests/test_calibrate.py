"""How far a drafter is trusted: the likelihood, its maximum, the target's choices, the command."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairs import ORACLE, golden, jitted, models
from test_training import NAME, documents, slots_of

import ddtree_jax
from ddtree_jax.commands import train
from ddtree_jax.commands.train import main
from ddtree_jax.sampling import NOISE_TRUST
from ddtree_jax.training import calibrate, data, loss


def drawn(pairs, count, vocab, seed=0):
    """Log-probabilities and noise [count, slots, vocab], and tokens drawn by each slot's pair."""
    generator, pairs = np.random.default_rng(seed), np.asarray(pairs)
    shape = (count, len(pairs), vocab)
    log_q = 2 * generator.standard_normal(shape)
    log_q -= np.log(np.exp(log_q).sum(axis=-1, keepdims=True))
    noise = generator.gumbel(size=shape)
    score = pairs[:, 0, None] * log_q + pairs[:, 1, None] * noise
    chosen = np.argmax(score + generator.gumbel(size=shape), axis=-1)
    return log_q.astype(np.float32), noise.astype(np.float32), chosen.astype(np.int32)


measure = jax.jit(calibrate.likelihood)


def measured(pairs, *given):
    """The likelihood as `newton` wants it: of all choices, in NumPy's float64."""
    found = measure(np.asarray(pairs, np.float32), *given)
    return jax.tree.map(lambda part: np.asarray(part, np.float64), found)


def test_derivatives_are_those_of_the_likelihood():
    """JAX's own, of a formula that sees neither padded columns nor choices that are not real."""
    pairs = jnp.array([[1.25, 0.5], [0.4, 1.5], [0.75, 0.75]])
    log_q, noise, chosen = drawn(pairs, 40, 12)
    real = np.random.default_rng(1).random(chosen.shape) < 0.6
    real[:, 2] = False

    def value(pair, slot):
        score = pair[0] * log_q[:, slot] + pair[1] * noise[:, slot]
        log_prob = jax.nn.log_softmax(score)[np.arange(40), chosen[:, slot]]
        return (log_prob * real[:, slot]).sum()

    padding = ((0, 0), (0, 0), (0, 4))
    log_q_padded = np.pad(log_q, padding, constant_values=-np.inf)
    got = measure(pairs, log_q_padded, np.pad(noise, padding, constant_values=9), chosen, real)
    assert got.count.tolist() == real.sum(axis=0).tolist()
    for slot, pair in enumerate(pairs):
        close = dict(rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(got.value[slot], value(pair, slot), **close)
        np.testing.assert_allclose(got.gradient[slot], jax.grad(value)(pair, slot), **close)
        np.testing.assert_allclose(got.hessian[slot], jax.hessian(value)(pair, slot), **close)
    for part in (got.value, got.gradient, got.hessian):
        assert not np.any(part[2])


def test_newton_finds_the_pairs_that_choices_were_drawn_with():
    pairs = np.array([[1.25, 1.0], [0.5, 2.0], [3.0, 0.25], [0.75, 0.75]])
    given = drawn(pairs, 6000, 24)
    calls = []

    def evaluate(pairs):
        calls.append(pairs)
        return measured(pairs, *given, np.ones(given[2].shape, bool))

    fit = calibrate.newton(evaluate, len(pairs))
    assert len(calls) <= calibrate.MAX_PASSES
    np.testing.assert_array_equal(np.array(fit.pairs, np.float32), calls[-1].astype(np.float32))
    last = evaluate(fit.pairs)
    error = np.sqrt(np.diagonal(np.linalg.inv(-last.hessian), axis1=1, axis2=2))
    assert (error < 0.1).all()
    assert (np.abs(np.array(fit.pairs) - pairs) < 3 * error).all()
    # The slope that is left is what the rounding of the pairs leaves.
    step = np.linalg.solve(-last.hessian, last.gradient[:, :, None])
    assert np.abs(step).max() < calibrate.PRECISION
    assert fit.after == last.value.sum() / last.count.sum()
    assert fit.before == evaluate(np.tile(NOISE_TRUST, (4, 1))).value.sum() / last.count.sum()
    assert fit.after > fit.before


def test_slots_with_few_choices_take_the_pair_of_the_slot_before():
    given = drawn([[1.25, 1.0]] * 5, 2000, 24)
    real = np.ones(given[2].shape, bool)
    real[calibrate.ENOUGH - 1 :, 3] = False
    real[:, 4] = False
    fit = calibrate.newton(lambda pairs: measured(pairs, *given, real), 5)
    assert fit.count.tolist() == [2000] * 3 + [calibrate.ENOUGH - 1, 0]
    assert fit.pairs[1] != fit.pairs[2] == fit.pairs[3] == fit.pairs[4]
    np.testing.assert_allclose(fit.pairs, [[1.25, 1.0]] * 5, atol=0.2)


def test_pairs_stay_positive_where_choices_avoid_what_is_favoured():
    log_q, noise, _ = drawn([[1.0, 1.0]] * 2, 500, 24)
    adverse = np.argmin(log_q + noise, axis=-1).astype(np.int32)
    real = np.ones(adverse.shape, bool)
    fit = calibrate.newton(lambda pairs: measured(pairs, log_q, noise, adverse, real), 2)
    assert fit.pairs == ((calibrate.LEAST, calibrate.LEAST),) * 2
    assert fit.after > fit.before


def test_a_step_that_loses_is_halved():
    """-ln cosh is nearly straight far from its top: whole steps of Newton's would never return."""
    top, seen = np.array([2.5, 1.25]), []

    def evaluate(pairs):
        seen.append(pairs[0])
        away = pairs - top
        return calibrate.Likelihood(
            -100 * np.log(np.cosh(away)).sum(axis=1),
            -100 * np.tanh(away),
            -100 * np.eye(2) / np.cosh(away[:, :, None]) ** 2,
            np.array([100]),
        )

    fit = calibrate.newton(evaluate, 1)
    assert np.abs(seen[1] - top).max() > 3 * np.abs(seen[0] - top).max()
    np.testing.assert_allclose(fit.pairs, [top], atol=calibrate.PRECISION)
    assert len(seen) <= calibrate.MAX_PASSES


def test_the_target_chooses_as_it_would_in_each_document_alone():
    pair = models(NAME)
    rows = data.pack(documents(count=4, temperatures=(0.8, 0.0, 1.5)), 200, seed=0)
    batch, key = rows.take(np.arange(2)), jax.random.key(5)
    assert (batch["document"].max(axis=1) == 1).all()
    config = loss.LossConfig(anchors=24)

    def choose(pair, batch):
        made = calibrate.choices(pair.drafter, pair.target, batch, key, config.anchors)
        logits = pair.target.logits(made.hidden)
        return made, logits, calibrate.noise_at(made.key, logits.shape)

    made, logits, noise = jax.device_get(jitted(pair, choose)(batch))
    anchors, _ = loss.pick_anchors(jax.random.split(key)[0], batch, config.anchors)
    vocab, real = pair.target.config.vocab_size, np.zeros(made.real.shape, bool)
    for place, _, heat, _, target, drafted in slots_of(pair, batch, anchors, config):
        if heat > 0:
            row, anchor, slot = place
            at = row * config.anchors + anchor, slot
            real[at] = True
            scores = target / heat + noise[at][:vocab]
            assert scores.max() - scores[made.chosen[at]] < 1e-3
            assert made.temperature[at] == pytest.approx(heat)
            np.testing.assert_allclose(logits[at][:vocab], drafted, atol=2e-4)
    np.testing.assert_array_equal(made.real, real)
    assert 0 < real.sum() < real.size / 1.5


@pytest.fixture
def work(tmp_path):
    """(flags, --work, --out): answers of both kinds and a copy of a golden drafter."""
    documents(temperatures=(0.0, 1.0)).save(tmp_path / "work" / "data" / "answers-1of1-0000.npz")
    out = shutil.copytree(ORACLE / NAME / "draft", tmp_path / "out")
    flags = ["--target", str(ORACLE / NAME / "target"), "--work", str(tmp_path / "work")]
    flags += ["--out", str(out), "--row-length", "128", "--dtype", "float32"]
    return flags, tmp_path / "work", out


def test_calibrate_writes_the_pairs_and_nothing_else(work, capsys):
    flags, _, out = work
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    command = ["calibrate", *flags, "--held-out", "all", "--calibrate-anchors", "32"]
    assert main(command) == 0
    printed = capsys.readouterr().err
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {name for name in after if before.get(name) != after[name]} == {"config.json"}
    assert before.keys() == after.keys()
    old, new = json.loads(before["config.json"]), json.loads(after["config.json"])
    pairs = new["dflash_config"].pop("noise_trust")
    assert new == old
    assert len(pairs) == old["block_size"] - 1
    for pair in pairs:
        assert re.search(r"│ {:.3f} +│ {:.3f} │".format(*pair), printed)
    first, last = (float(word) for word in printed.split() if word.startswith("-"))
    assert first < last < 0
    # Fitted again from the same answers, whatever the file says now: the same.
    assert main(command) == 0
    assert (out / "config.json").read_bytes() == after["config.json"]

    # The rounds rank with them: texts stay as they are, and take fewer rounds.
    asked = ddtree_jax.Options(mode="dflash", temperature=1.0, max_new_tokens=64, stop_ids=())

    def sampled(drafter):
        settings = dict(dtype="float32", tokenizer=False, batch_size=8)
        engine = ddtree_jax.load(ORACLE / NAME / "target", drafter, **settings)
        results = engine.generate(golden(NAME)["prompts"][:8], asked)
        return [result.output_ids for result in results], sum(result.rounds for result in results)

    texts, rounds = sampled(ORACLE / NAME / "draft")
    same, fewer = sampled(out)
    assert same == texts
    assert fewer < rounds


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda work, out: shutil.rmtree(out), "error: --out is {out}, which is no folder"),
        (lambda work, out: (out / "config.json").unlink(), "error: {out}: holds no config.json"),
        (lambda work, out: shutil.rmtree(work), "error: no training data: run the 'generate'"),
        (
            lambda work, out: documents().save(work / "data" / "answers-1of1-0000.npz"),
            "error: {work}: has no answers that were sampled (--sampled)",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_refused(work, capsys, spoil, problem):
    flags, folder, out = work
    spoil(folder, out)
    assert main(["calibrate", *flags, "--held-out", "all"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(problem.format(work=folder, out=out))
    assert error.count("\n") == 1


def test_without_a_word_only_held_out_answers_serve(work, capsys):
    """Of 16 documents the first alone is held out, and it is greedy."""
    flags, folder, _ = work
    assert main(["calibrate", *flags]) == 2
    assert f"{folder}: has no held-out answers that were sampled" in capsys.readouterr().err


def test_too_few_choices_are_refused(work, capsys):
    flags, _, out = work
    before = (out / "config.json").read_bytes()
    few = ["--held-out", "all", "--calibrate-rows", "1", "--calibrate-anchors", "3"]
    assert main(["calibrate", *flags, *few]) == 2
    assert "the first slot has 3 choices of the target; expected at" in capsys.readouterr().err
    assert (out / "config.json").read_bytes() == before


@pytest.mark.parametrize("sampled", ["0", "0.5"])
def test_all_ends_with_the_calibration_if_answers_are_sampled(monkeypatch, sampled):
    done, steps = [], ["generate", "train", "export", "calibrate"]
    recorders = {name: lambda args, console, name=name: done.append(name) for name in steps}
    monkeypatch.setattr(train, "_STEPS", recorders)
    flags = ["--target", str(ORACLE / NAME / "target"), "--target-layer-ids", "0,2"]
    assert main(["all", *flags, "--prompts", "p", "--out", "o", "--sampled", sampled]) == 0
    assert done == (steps if sampled == "0.5" else steps[:3])
