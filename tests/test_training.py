"""Drafter training: packing, the loss against the decoding path, the loop, export, the command."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from pairs import ORACLE, engine, golden, jitted, models, rarely

import convert
from convert.export import export_drafter
from ddtree_jax import cache as caches
from ddtree_jax import tree as trees
from ddtree_jax.commands import train
from ddtree_jax.commands.train import _parser, drafter_config, main
from ddtree_jax.errors import InputError
from ddtree_jax.models import Drafter, parameter_name
from ddtree_jax.shapes import SHAPES
from ddtree_jax.training import data, loop, loss

NAME = "qwen3_gqa"


def documents(name=NAME, count=16, copies=1, temperatures=(0.0,)):
    """The golden texts of a pair as documents, as if sampled at these temperatures in turn."""
    stored = golden(name)
    pairs = list(zip(stored["prompts"], stored["ar"], strict=True))[:count] * copies
    heat = itertools.cycle(temperatures)
    return data.Documents.of((*pair, next(heat)) for pair in pairs)


def test_documents_survive_the_disk(tmp_path):
    docs = documents(temperatures=(0.0, 0.75))
    docs.save(tmp_path / "a.npz")
    docs.save(tmp_path / "b.npz")
    both = data.Documents.load([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert len(both) == 32
    assert both.answer_tokens == 2 * docs.answer_tokens == 2 * 16 * 80
    second = both.select(np.arange(32) >= 16)
    for field in dataclasses.fields(docs):
        stored, expected = getattr(second, field.name), getattr(docs, field.name)
        np.testing.assert_array_equal(stored, expected)
        assert stored.dtype == expected.dtype
    assert docs.temperatures.tolist() == [0.0, 0.75] * 8
    assert docs.prompts() == [tuple(prompt) for prompt in golden(NAME)["prompts"][:16]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_documents_of_unknown_temperature_are_refused(tmp_path):
    docs = documents()
    np.savez(tmp_path / "old.npz", tokens=docs.tokens, starts=docs.starts, answers=docs.answers)
    with pytest.raises(InputError, match=r"old\.npz has no temperatures; generate the data again"):
        data.Documents.load([tmp_path / "old.npz"])


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
    docs = documents(temperatures=(0.0, 0.75, 1.0))
    rows = data.pack(docs, length, seed=1)
    found = []
    for row in range(len(rows)):
        for number in range(rows.document[row].max() + 1):
            inside = rows.document[row] == number
            tokens = rows.tokens[row][inside]
            np.testing.assert_array_equal(rows.position[row][inside], np.arange(len(tokens)))
            (heat,) = set(rows.temperature[row][inside].tolist())
            found.append((tokens.tolist(), int((~rows.in_answer[row][inside]).sum()), heat))
    splits = zip(docs.starts, docs.starts[1:], docs.answers, docs.temperatures, strict=False)
    expected = [
        (docs.tokens[begin : min(end, begin + length)].tolist(), int(split), float(heat))
        for begin, end, split, heat in splits
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
        _, features = loss.features_of(pair.target, config.target_layer_ids, batch)
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


def slots_of(pair, batch, anchors, config):
    """NumPy's (place, weight, temperature, token, target's logits, drafter's) of counted slots.

    A place is (row, anchor's number, slot). The target's logits are those of each document alone.
    """

    def alone(pair, tokens):
        zero, chain = jnp.zeros((1,), jnp.int32), trees.chain(tokens)
        nothing = caches.empty(pair.target.config, 1, 0, jnp.float32)
        hidden, _, _ = pair.target(nothing, tokens, chain.depths, chain.ancestors, zero)
        return pair.target.logits(hidden[0])

    def drafted(pair, batch, anchors):
        _, features = loss.features_of(pair.target, pair.drafter.config.target_layer_ids, batch)
        return loss.block_logits(pair.drafter, pair.target, features, batch, anchors)

    vocab = pair.target.config.vocab_size
    alone = jitted(pair, alone)
    logits = np.asarray(jitted(pair, drafted)(batch, anchors), np.float64)[..., :vocab]
    for row, document in enumerate(batch["document"]):
        for number in range(document.max() + 1):
            places = np.flatnonzero(document == number)
            tokens = batch["tokens"][row, places]
            target = np.asarray(alone(tokens[None]), np.float64)[:, :vocab]
            for index, anchor in enumerate(np.asarray(anchors[row])):
                for slot in range(pair.drafter.config.block_size - 1):
                    at = anchor - places[0] + slot + 1
                    if anchor in places and at < len(places):
                        heat = float(batch["temperature"][row, anchor])
                        gamma = (heat and config.sampled_gamma) or config.gamma
                        weight = np.exp(-slot / gamma)
                        given = target[at - 1], logits[row, index, slot]
                        yield (row, index, slot), weight, heat, tokens[at], *given


@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (0.0, 0.8), (1.5, 1.0)])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_loss_is_the_cross_entropy_with_what_tokens_were_drawn_from(temperatures, share):
    """In NumPy; of greedy documents that is the tokens themselves.

    The share of sampled documents that is ranking with the noise is the likelihood that
    `calibrate` fits, of what the target chooses.
    """
    pair = nnx.clone(models(NAME))
    slots, vocab = pair.drafter.config.block_size - 1, pair.target.config.padded_vocab
    trust = tuple((1 + slot / 8, 0.9 - slot / 16) for slot in range(slots))
    pair.drafter.config = dataclasses.replace(pair.drafter.config, noise_trust=trust)
    config = loss.LossConfig(anchors=24, sampled_gamma=1.5, noise=share)
    docs = documents(count=4, temperatures=temperatures)
    rows = data.pack(docs, 200, seed=0)  # a row holds more than one document, and padding
    batch = rows.take(np.arange(2))
    assert (batch["document"].max(axis=1) == 1).all()
    assert (batch["document"] == -1).any()
    key = jax.random.key(1)

    def of_pair(pair, batch):
        return loss.block_loss(pair.drafter, pair.target, batch, key, config)

    value, metrics = jitted(pair, of_pair)(batch)
    anchors_key, noise_key = jax.random.split(key)
    anchors, real = loss.pick_anchors(anchors_key, batch, config.anchors)
    assert real.all()
    noise = np.asarray(loss.noise_at(noise_key, (*anchors.shape, slots, vocab)), np.float64)
    total = weights = 0.0
    overlaps = {slot: [] for slot in range(pair.drafter.config.block_size - 1)}
    hits = {slot: [] for slot in overlaps}
    for place, weight, heat, token, target, drafted in slots_of(pair, batch, anchors, config):
        slot = place[2]
        label = np.zeros_like(target)
        label[token] = 1
        if heat > 0:
            label = np.exp((target - target.max()) / heat)
            label /= label.sum()
        log_q = drafted - drafted.max()
        log_q -= np.log(np.exp(log_q).sum())
        log_prob = (label * log_q).sum()
        if heat > 0:
            dice = noise[place][: len(target)]
            score = trust[slot][0] * log_q + trust[slot][1] * heat * dice
            choice = score[np.argmax(target / heat + dice)] - np.log(np.exp(score).sum())
            log_prob += share * (choice - log_prob)
        total, weights = total - weight * log_prob, weights + weight
        if heat > 0:
            overlaps[slot].append(np.minimum(label, np.exp(log_q)).sum())
        else:
            hits[slot].append(np.argmax(drafted) == token)
    assert value == metrics["loss"]
    np.testing.assert_allclose(value, total / weights, rtol=2e-5)
    means = {"overlap": overlaps, "slot_accuracy": hits}
    for name, of_slot in means.items():
        expected = [np.mean(values) if values else 0.0 for values in of_slot.values()]
        np.testing.assert_allclose(metrics[name], expected, atol=2e-5, err_msg=name)


def test_a_greedy_token_is_its_own_label():
    logits = jnp.array([[3.0, -jnp.inf, 1e30, 0.0]] * 3)
    heat, tokens = jnp.array([0.0, 1.0, 0.0]), jnp.array([3, 0, 0])
    labels = loss.drawn_from(logits, heat, tokens)
    np.testing.assert_array_equal(labels, [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("name", [NAME, "llama_gqa3"])  # the latter's vocabulary is padded
def test_the_target_is_not_trained(name):
    """Its layers get no gradient: neither by the features nor by the labels nor by its choices."""
    pair = models(name)
    batch = data.pack(documents(name, count=2, temperatures=(1.0,)), 256, seed=0).take(np.arange(1))
    graphdef, state = nnx.split(pair)

    def value(state):
        pair = nnx.merge(graphdef, state)
        config = loss.LossConfig(anchors=4, noise=0.5)
        return loss.block_loss(pair.drafter, pair.target, batch, jax.random.key(0), config)[0]

    named = jax.tree.flatten_with_path(jax.jit(jax.grad(value))(state))[0]
    assert all(np.isfinite(leaf).all() for _, leaf in named)
    moved = {parameter_name(path) for path, leaf in named if np.asarray(leaf).any()}
    names = {parameter_name(path) for path, _ in named}
    shared = {name for name in names if name in ("target.embed_vd", "target.head_dv")}
    assert moved == shared | {name for name in names if name.startswith("drafter.")}


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
    rows = data.pack(documents(copies=2, temperatures=(0.0, 1.0)), 128, seed=0)
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


def named_parameters(drafter):
    named = jax.tree.flatten_with_path(nnx.state(drafter))[0]
    return {parameter_name(path): np.array(leaf) for path, leaf in named}


# Orbax's event loop complains from another thread when a read fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_training_begins_from_given_parameters(tmp_path):
    """Without a step they come back as they were, and the first held-out loss is theirs."""
    pair = models(NAME)
    initial = named_parameters(pair.drafter)
    rows = data.pack(documents(count=4), 128, seed=0)
    batch = rows.take(np.arange(len(rows)))
    config, seen = loss.LossConfig(anchors=8), []

    def run(steps):
        chosen = settings(steps=steps, rows=len(rows))
        shared = rows, rows, chosen, config, tmp_path, seen.append
        return loop.train(pair.target, pair.drafter.config, *shared, initial)

    begun = run(steps=0)
    assert begun.keys() == initial.keys()
    for name, value in initial.items():
        np.testing.assert_array_equal(begun[name], value, err_msg=name)

    def of_pair(pair, batch):
        return loss.block_loss(pair.drafter, pair.target, batch, jax.random.key(0), config)[0]

    assert seen[0]["loss"] == pytest.approx(float(jitted(pair, of_pair)(batch)), abs=2e-4)

    # A run that was interrupted goes on from its checkpoint, whatever it is to begin from.
    other = Drafter(pair.drafter.config, rngs=nnx.Rngs(3))
    params = jax.tree.leaves(nnx.state(other))
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        loop.save(manager, 1, params, loop.optimiser(settings()).init(params), 0.0)
    resumed = run(steps=1)
    for name, value in named_parameters(other).items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    assert seen[1]["loss"] > 2 * seen[0]["loss"]

    params = [leaf.reshape(-1) for leaf in params]
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        loop.save(manager, 2, params, loop.optimiser(settings()).init(params), 0.0)
    with pytest.raises(InputError, match=r"checkpoints: is of another drafter .* remove it"):
        run(steps=3)


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
    pairs = tuple((1 + slot / 8, 0.7) for slot in range(config.block_size - 1))
    config = dataclasses.replace(config, noise_trust=pairs)
    params = named_parameters(Drafter(config, rngs=nnx.Rngs(0)))
    export_drafter(config, target, params, tmp_path / "public", dtype=np.float32)
    source = convert.open_model(tmp_path / "public", drafter=True)
    source.check()
    assert source.config == config
    stored = convert.convert(source, tmp_path / "stored")
    assert convert.open_model(stored, drafter=True).config == config
    loaded = source.load("float32")
    assert loaded.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)


@pytest.fixture
def prompt_file(tmp_path, monkeypatch):
    """Golden prompts as a file for `generate`, on an engine for which a prompt is its number."""
    stored = golden(NAME)["prompts"]
    made = engine(NAME, batch_size=4, max_length=256)
    monkeypatch.setattr(train.api, "load", lambda *args, **settings: made)
    monkeypatch.setattr(train.api, "encode", lambda engine, text: stored[int(text)])
    monkeypatch.setattr(train, "CHUNK", 3)
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(16)))
    return path


def test_parts_answer_every_prompt_once_and_go_on(tmp_path, prompt_file):
    def generate(folder, *flags):
        shared = ["--prompts", str(prompt_file), "--work", str(tmp_path / folder)]
        shared += ["--max-new-tokens", "6", "--sampled", "0.5", "--temperature", "0.8"]
        assert main(["generate", *shared, *flags]) == 0
        paths = sorted((tmp_path / folder / "data").iterdir())
        docs = data.Documents.load(paths)
        texts = np.split(docs.tokens, docs.starts[1:-1])
        heat = docs.temperatures.tolist()
        return [path.name for path in paths], sorted(
            (prompt, tuple(text[len(prompt) :].tolist()), temperature)
            for prompt, text, temperature in zip(docs.prompts(), texts, heat, strict=True)
        )

    names, _ = generate("whole", "--part", "1/2")
    assert names == [f"answers-1of2-000{number}.npz" for number in range(3)]
    _, whole = generate("whole", "--part", "2/2")
    stored = golden(NAME)
    expected = dict(zip(map(tuple, stored["prompts"]), stored["ar"], strict=True))
    assert sorted(prompt for prompt, _, _ in whole) == sorted(expected)
    assert {heat for _, _, heat in whole} == {0.0, float(np.float32(0.8))}
    greedy = {prompt: list(text) for prompt, text, heat in whole if heat == 0}
    assert greedy == {prompt: expected[prompt][:6] for prompt in greedy}

    names, some = generate("stopped", "--part", "2/2", "--minutes", "1e-9")
    assert names == ["answers-2of2-0000.npz"]
    assert len(some) == 3
    generate("stopped", "--part", "1/2")
    _, resumed = generate("stopped", "--part", "2/2")
    assert resumed == whole
    names, again = generate("stopped", "--part", "2/2")
    assert again == whole


def test_command_trains_and_exports(tmp_path, capsys):
    docs = documents(temperatures=(0.0, 1.0))
    first = np.arange(len(docs)) < 8
    docs.select(first).save(tmp_path / "data" / "answers-1of2-0000.npz")
    docs.select(~first).save(tmp_path / "data" / "answers-2of2-0000.npz")
    shared = ["--target", str(ORACLE / NAME / "target"), "--work", str(tmp_path)]
    shared += ["--layers", "1", "--block-size", "4", "--target-layer-ids", "0,2"]
    shared += ["--mask-token-id", "90", "--dtype", "float32"]
    small = ["--steps", "2", "--rows", "2", "--row-length", "128", "--anchors", "4"]
    assert main(["train", *shared, *small]) == 0
    assert main(["export", *shared, "--out", str(tmp_path / "out")]) == 0
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    assert recipe["held_out"]["step"] == 2
    assert recipe["init"] is None
    drafter = convert.open_model(tmp_path / "out", drafter=True)
    drafter.check()
    assert (drafter.config.num_layers, drafter.config.target_layer_ids) == (1, (0, 2))
    capsys.readouterr()
    assert main(["export", *shared]) == 2
    assert capsys.readouterr().err.startswith("error: --out is missing")

    assert recipe["loss"]["sampled_gamma"] is None

    # Begun from that drafter, trained by steps of almost nothing, exported: the same files, with
    # the trust that it was trained with.
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    values["dflash_config"]["noise_trust"] = [[1.2, 0.9], [1.1, 0.8], [1.0, 0.7]]
    (tmp_path / "out" / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    drafter = convert.open_model(tmp_path / "out", drafter=True)
    init = str(convert.convert(drafter, tmp_path / "converted"))
    shared[shared.index("--work") + 1] = str(tmp_path / "second")
    (tmp_path / "second").mkdir()
    (tmp_path / "data").rename(tmp_path / "second" / "data")
    still = ["--init", init, "--learning-rate", "1e-30"]
    still += ["--gamma", "3", "--sampled-gamma", "2", "--noise", "0.5"]
    assert main(["train", *shared, *small, *still]) == 0
    assert main(["export", *shared, "--out", str(tmp_path / "again")]) == 0
    recipe = json.loads((tmp_path / "second" / "recipe.json").read_text())
    assert recipe["init"] == init
    expected = {"anchors": 4, "gamma": 3.0, "sampled_gamma": 2.0, "noise": 0.5}
    assert recipe["loss"] == expected
    assert recipe["noise_trust"] == values["dflash_config"]["noise_trust"]
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    for name in names:
        written = (tmp_path / "again" / name).read_bytes()
        assert written == (tmp_path / "out" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("step", "flags", "words"),
    [
        ("all", ["--prompts", "p"], ["--out is missing"]),
        ("export", [], ["--out is missing"]),
        ("calibrate", [], ["--out is missing"]),
        ("calibrate", ["--out", "nowhere"], ["--out is nowhere, which is no folder; expected"]),
        ("calibrate", ["--out", "o", "--calibrate-rows", "0"], ["--calibrate-rows is 0"]),
        ("calibrate", ["--out", "o", "--calibrate-anchors", "0"], ["--calibrate-anchors is 0"]),
        ("calibrate", ["--held-out", "none"], ["--held-out"]),
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
        ("train", ["--sampled-gamma", "0"], ["--sampled-gamma is 0.0; expected more than 0"]),
        ("train", ["--noise", "2"], ["--noise is 2.0; expected 0 to 1"]),
        ("train", ["--temperature", "0"], ["--temperature is 0.0; expected more than 0"]),
        ("train", ["--temperature", "nan"], ["--temperature"]),
        ("train", ["--part", "3/2"], ["--part is 3/2; expected I/N, as in 1/2"]),
        ("train", ["--part", "0/0"], ["--part is 0/0"]),
        ("train", ["--part", "half"], ["--part is 'half'; expected I/N, as in 1/2"]),
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


@pytest.fixture
def begun_from(tmp_path):
    """A public drafter as the default flags of `described` have it: (folder, its config.json)."""
    target = convert.open_model(ORACLE / NAME / "target", drafter=False).config
    config = drafter_config(target, _parser().parse_args(described()))
    params = named_parameters(Drafter(config, rngs=nnx.Rngs(0)))
    export_drafter(config, target, params, tmp_path / "public")
    file = tmp_path / "public" / "config.json"
    return tmp_path / "public", file, json.loads(file.read_text())


def described(*flags):
    return ["--layers", "2", "--block-size", "8", "--target-layer-ids", "0,2", *flags]


@pytest.mark.parametrize(
    ("changes", "flags", "problem"),
    [
        ({}, ["--layers", "3"], "'num_layers' is 2; expected 3 (--layers)"),
        ({}, ["--block-size", "4"], "'block_size' is 8; expected 4 (--block-size)"),
        ({}, ["--mask-token-id", "5"], "'mask_token_id' is 16; expected 5 (--mask-token-id)"),
        (
            {},
            ["--target-layer-ids", "2,0"],
            "'target_layer_ids' is (0, 2); expected (2, 0) (--target-layer-ids)",
        ),
        ({"head_dim": 16}, [], "'head_dim' is 16; expected 12 (--target)"),
        ({"rope_theta": 5e5}, [], "'rope.theta' is 500000.0; expected 10000.0 (--target)"),
        ({"vocab_size": 64}, [], "'vocab_size' is 64; expected 128 (--target)"),
        (
            {"is_causal": True},
            [],
            "'causal_block' is (True, True); expected (False, False) (--init takes no other)",
        ),
        # Of two fields that differ the first.
        (
            {"attention_bias": True},
            ["--block-size", "4"],
            "'attention_bias' is True; expected False (--init takes no other)",
        ),
    ],
)
def test_training_begins_only_from_what_the_flags_describe(
    tmp_path, capsys, begun_from, changes, flags, problem
):
    folder, file, values = begun_from
    file.write_text(json.dumps(values | changes))
    shared = ["--target", str(ORACLE / NAME / "target"), "--work", str(tmp_path / "work")]
    assert main(["train", *shared, "--init", str(folder), *described(*flags)]) == 2
    assert capsys.readouterr().err == f"error: {file}: {problem}\n"
    assert not (tmp_path / "work").exists()


def test_a_drafter_to_begin_from_is_whole_and_may_leave_its_targets_size_unsaid(
    tmp_path, capsys, begun_from
):
    folder, file, values = begun_from
    unsaid = {"vocab_size": None, "num_target_layers": None, "noise_trust": [[1.2, 1]] * 7}
    file.write_text(json.dumps(values | unsaid))
    target = convert.open_model(ORACLE / NAME / "target", drafter=False).config
    expected = drafter_config(target, _parser().parse_args(described()))
    source = train._open_init(str(folder), expected)
    assert (source.config.vocab_size, source.config.num_target_layers) == (None, None)
    for weights in folder.glob("model-*.safetensors"):
        weights.unlink()
    shared = ["--target", str(ORACLE / NAME / "target"), "--work", str(tmp_path / "work")]
    assert main(["train", *shared, "--init", str(folder), *described()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {folder}")
    assert not (tmp_path / "work").exists()
