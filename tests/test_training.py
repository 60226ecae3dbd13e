"""Drafter training: packing, the loss against the decoding path, the loop, export, the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairs import ORACLE, golden, jitted, models, rarely

import convert
from convert.export import export_drafter
from ddtree_jax import cache as caches
from ddtree_jax import tree as trees
from ddtree_jax.commands.train import _parser, drafter_config, main
from ddtree_jax.models import Drafter, parameter_name
from ddtree_jax.shapes import SHAPES
from ddtree_jax.training import data, loop, loss

NAME = "qwen3_gqa"


def documents(name=NAME, count=16, copies=1):
    """The golden texts of a pair as (prompt, answer) documents."""
    stored = golden(name)
    pairs = list(zip(stored["prompts"], stored["ar"], strict=True))[:count]
    return data.Documents.of(pairs * copies)


def test_documents_survive_the_disk(tmp_path):
    docs = documents()
    docs.save(tmp_path / "a.npz")
    docs.save(tmp_path / "b.npz")
    both = data.Documents.load([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert len(both) == 32
    assert both.answer_tokens == 2 * docs.answer_tokens == 2 * 16 * 80
    second = both.select(np.arange(32) >= 16)
    for field in ("tokens", "starts", "answers"):
        np.testing.assert_array_equal(getattr(second, field), getattr(docs, field))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_a_hybrids_drafter_is_plain():
    """It takes the target's width and heads, not its gates, norms, layers and partial rotary."""
    target, _ = SHAPES["tiny-hybrid"]
    flags = ["--layers", "2", "--block-size", "4", "--mask-token-id", "0"]
    config = drafter_config(target, _parser().parse_args([*flags, "--target-layer-ids", "0,1"]))
    assert (config.hidden_size, config.head_dim) == (target.hidden_size, target.head_dim)
    assert (config.delta, config.attention_gate, config.centred_norm) == (None, False, False)
    assert config.rope == dataclasses.replace(target.rope, partial=1.0)
    assert nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))).layers[1].attention.qk_norm


@pytest.mark.parametrize("length", [50, 128, 300])
def test_packing_keeps_every_document_whole(length):
    docs = documents()
    rows = data.pack(docs, length, seed=1)
    found = []
    for row in range(len(rows)):
        for number in range(rows.document[row].max() + 1):
            inside = rows.document[row] == number
            tokens = rows.tokens[row][inside]
            np.testing.assert_array_equal(rows.position[row][inside], np.arange(len(tokens)))
            found.append((tokens.tolist(), int((~rows.in_answer[row][inside]).sum())))
    expected = [
        (docs.tokens[begin : min(end, begin + length)].tolist(), int(split))
        for begin, end, split in zip(docs.starts, docs.starts[1:], docs.answers, strict=False)
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("name", [NAME, rarely("swa_causal"), rarely("causal_head")])
def test_the_loss_sees_what_decoding_sees(name):
    """Block logits in a packed row equal those of the drafter with its cache, at any anchor."""
    pair = models(name)
    config, vocab = pair.drafter.config, pair.target.config.vocab_size
    rows = data.pack(documents(name, count=2), 256, seed=0)
    batch = rows.take(np.arange(1))
    places = np.flatnonzero(batch["in_answer"][0])[[3, 130]]

    def packed_logits(pair, batch, places):
        features = loss.features_of(pair.target, config.target_layer_ids, batch)
        return loss.block_logits(pair.drafter, pair.target, features, batch, places)

    def decoded_logits(pair, before, ids):
        nothing = caches.empty(pair.target.config, 1, 0, jnp.float32)
        zero, size = jnp.zeros((1,), jnp.int32), before.shape[1]
        chain = trees.chain(before)
        _, context, _ = pair.target(
            nothing, before, chain.depths, chain.ancestors, zero, config.target_layer_ids
        )
        empty = caches.empty(config, 1, 0, jnp.float32)
        embedded = pair.target.embed(ids)
        hidden, _ = pair.drafter(empty, zero, context, jnp.full((1,), size), embedded)
        return pair.target.logits(hidden[0, 1:])

    packed = jitted(pair, packed_logits)(batch, jnp.asarray(places)[None])[0]
    for logits, place in zip(packed, places, strict=True):
        own = batch["document"][0] == batch["document"][0, place]
        before = jnp.asarray(batch["tokens"][0][own & (np.arange(256) < place)])[None]
        ids = np.full((1, config.block_size), config.mask_token_id)
        ids[0, 0] = batch["tokens"][0, place]
        expected = jitted(pair, decoded_logits)(before, jnp.asarray(ids))
        np.testing.assert_allclose(logits[:, :vocab], expected[:, :vocab], atol=2e-4)


@pytest.mark.exhaustive
def test_a_fitted_drafter_has_the_acceptance_that_decoding_measures():
    """The metric tau at all anchors is near the golden chain's, and the loss falls with it."""
    pair = models(NAME)
    rows = data.pack(documents(), 128, seed=0)
    batch = rows.take(np.arange(len(rows)))
    config = loss.LossConfig(anchors=64)
    _, metrics = loss.block_loss(pair.drafter, pair.target, batch, jax.random.key(0), config)
    chains = [n for record in golden(NAME)["chain"] for n in record["accept_lengths"]]
    assert abs(float(metrics["tau"]) - np.mean(chains)) < 1.5
    fresh = Drafter(pair.drafter.config, rngs=nnx.Rngs(3))
    _, untrained = loss.block_loss(fresh, pair.target, batch, jax.random.key(0), config)
    assert untrained["loss"] > 5 * metrics["loss"]
    assert untrained["tau"] < 1.5


def settings(**changes):
    values = dict(steps=30, rows=4, learning_rate=1e-2, warmup=3, log_every=5, eval_every=30)
    return loop.TrainConfig(**values | {"save_every": 15} | changes)


@pytest.mark.exhaustive
def test_training_learns_and_resumes_exactly(tmp_path):
    pair = models(NAME)
    rows = data.pack(documents(copies=2), 128, seed=0)
    losses = []

    def run(folder, config):
        seen = []
        params = loop.train(
            pair.target,
            pair.drafter.config,
            rows,
            rows,
            config,
            loss.LossConfig(anchors=8),
            folder,
            seen.append,
        )
        losses.append([entry["loss"] for entry in seen if entry["kind"] == "train"])
        return params

    whole = run(tmp_path / "whole", settings())
    assert losses[0][-1] < losses[0][0] - 0.15

    class StoppedError(Exception):
        pass

    def stop(entry):
        if entry["step"] == 20:
            raise StoppedError

    with pytest.raises(StoppedError):
        loop.train(
            pair.target,
            pair.drafter.config,
            rows,
            rows,
            settings(),
            loss.LossConfig(anchors=8),
            tmp_path / "parts",
            stop,
        )
    resumed = run(tmp_path / "parts", settings())
    assert len(losses[1]) == 3  # from the checkpoint of step 15: steps 20, 25 and 30
    for name, value in whole.items():
        np.testing.assert_allclose(resumed[name], value, atol=1e-5, err_msg=name)


def test_training_ends_by_the_clock(tmp_path):
    config = settings(steps=10**9, minutes=1e-9, warmup=1)
    pair = models(NAME)
    rows = data.pack(documents(), 128, seed=0)
    loop.train(
        pair.target,
        pair.drafter.config,
        rows,
        rows,
        config,
        loss.LossConfig(anchors=4),
        tmp_path,
        lambda entry: None,
    )
    assert loop.learning_rate(config, 5, 1.0) == 0
    halfway = settings(steps=100, minutes=10, warmup=1)
    assert loop.learning_rate(halfway, 50, 0) == pytest.approx(halfway.learning_rate / 2)
    assert loop.learning_rate(halfway, 10, 300) == pytest.approx(halfway.learning_rate / 2)


def test_an_exported_drafter_is_a_public_one(tmp_path):
    target, config = SHAPES["tiny"]
    drafter = Drafter(config, rngs=nnx.Rngs(0))
    named = jax.tree.flatten_with_path(nnx.state(drafter))[0]
    params = {parameter_name(path): np.asarray(leaf) for path, leaf in named}
    export_drafter(config, target, params, tmp_path, dtype=np.float32)
    source = convert.open_model(tmp_path, drafter=True)
    source.check()
    assert source.config == config
    loaded = source.load("float32")
    assert loaded.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)


def test_command_trains_and_exports(tmp_path, capsys):
    documents().save(tmp_path / "data" / "answers-0000.npz")
    shared = ["--target", str(ORACLE / NAME / "target"), "--work", str(tmp_path)]
    shared += ["--layers", "1", "--block-size", "4", "--target-layer-ids", "0,2"]
    shared += ["--mask-token-id", "90", "--dtype", "float32"]
    small = ["--steps", "2", "--rows", "2", "--row-length", "128", "--anchors", "4"]
    assert main(["train", *shared, *small]) == 0
    assert main(["export", *shared, "--out", str(tmp_path / "out")]) == 0
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    assert recipe["held_out"]["step"] == 2
    drafter = convert.open_model(tmp_path / "out", drafter=True)
    drafter.check()
    assert (drafter.config.num_layers, drafter.config.target_layer_ids) == (1, (0, 2))
    capsys.readouterr()
    assert main(["export", *shared]) == 2
    assert capsys.readouterr().err.startswith("error: --out is missing")


@pytest.mark.parametrize(
    ("step", "flags", "words"),
    [
        ("all", ["--prompts", "p"], ["--out is missing"]),
        ("export", [], ["--out is missing"]),
        ("all", ["--out", "o"], ["--prompts is missing"]),
        ("generate", [], ["--prompts is missing"]),
        ("generate", ["--prompts", "nowhere.jsonl"], ["nowhere.jsonl: No such file"]),
        ("train", ["--layers", "0"], ["--layers is 0; expected at least 1"]),
        ("train", ["--block-size", "1"], ["--block-size is 1; expected 2 to 32"]),
        ("train", ["--block-size", "33"], ["--block-size is 33; expected 2 to 32"]),
        ("train", ["--steps", "0"], ["--steps"]),
        ("train", ["--rows", "0"], ["--rows"]),
        ("train", ["--row-length", "0"], ["--row-length"]),
        ("train", ["--anchors", "-1"], ["--anchors"]),
        ("train", ["--batch-size", "0"], ["--batch-size"]),
        ("train", ["--synthetic", "-1"], ["--synthetic is -1; expected at least 0"]),
        ("train", ["--sampled", "1.5"], ["--sampled is 1.5; expected 0 to 1"]),
        ("train", ["--sampled", "nan"], ["--sampled"]),
        ("train", ["--minutes", "0"], ["--minutes is 0.0; expected more than 0"]),
        ("train", ["--seed", "-1"], ["--seed"]),
        ("train", ["--target-layer-ids", "1,a"], ["--target-layer-ids is '1,a'"]),
        ("train", ["--target-layer-ids", "1,1"], ["--target-layer-ids is 1,1; expected distinct"]),
        ("train", ["--target-layer-ids=-1,1"], ["--target-layer-ids"]),
        ("train", ["--target-layer-ids", "0,99"], ["--target-layer-ids", "[99]"]),
        ("train", ["--mask-token-id", "-1"], ["--mask-token-id"]),
        ("train", ["--mask-token-id", "9999999"], ["--mask-token-id", "vocabulary"]),
    ],
)
def test_bad_usage_is_found_before_any_work(tmp_path, capsys, step, flags, words):
    shared = ["--target", str(ORACLE / NAME / "target"), "--work", str(tmp_path / "work")]
    assert main([step, *shared, "--target-layer-ids", "0,2", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not (tmp_path / "work").exists()
