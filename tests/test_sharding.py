"""Two simulated CPU devices give what one gives, token for token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# The number of devices is settled when JAX starts: a process of its own, once for all cases.
SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from pairs import engine as make_engine, golden
from ddtree_jax import Engine, Options

MESHES = {"1x2": (1, 2)}
cases, out = json.loads(sys.argv[1]), {}
assert len(jax.devices()) == 2
for name, shapes, modes, temperatures, extra in cases:
    extra["logit_bias"] = {int(token): bias for token, bias in extra.get("logit_bias", {}).items()}
    one = make_engine(name, prefill_chunk=16, batch_size=2)
    leaves = dict(zip(one._leaf_names, one._leaves.result(), strict=True))
    engines = {"1": one}
    for shape in shapes:
        mesh = jax.make_mesh(MESHES[shape], ("data", "model"))
        engines[shape] = Engine(
            one.target, one.drafter, lambda: leaves, dtype=jnp.float32, prefill_chunk=16,
            batch_size=2, mesh=mesh,
        )
    prompts = golden(name)["prompts"][:2] + golden(name)["prompts"][-1:]
    for temperature in temperatures:
        for mode in modes:
            options = Options(
                mode=mode, tree_budget=15, max_new_tokens=40, stop_ids=(), temperature=temperature,
                **extra,
            )
            for key, engine in engines.items():
                try:
                    got = [
                        (r.output_ids, r.accept_lengths, r.log_probs)
                        for r in engine.generate(prompts, options)
                    ]
                except Exception as error:
                    got = f"{type(error).__name__}: {error}"
                out[f"{name} {key} {mode} {temperature} {len(extra)}"] = got
print(json.dumps(out))
"""
MODES = ("ar", "dflash", "ddtree")
FILTERS = dict(
    top_k=40, top_p=0.95, min_p=0.01, logit_bias={3: 4.0, 60: 3.0, 70: -2.0},
    repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=-0.6, log_probs=True,
)  # fmt: skip
CASES = [
    ("qwen3_gqa", ["1x2"], MODES, [0.8], {}),
    ("qwen3_gqa", ["1x2"], ["ddtree"], [0.0], {}),
    ("swa_causal", ["1x2"], ["dflash"], [0.0], {}),
    # The vocabulary of 100 does not divide.
    ("llama_gqa3", ["1x2"], ["ddtree"], [0.8], {}),
    ("llama_gqa3", ["1x2"], ["ddtree"], [0.8], FILTERS),
    ("hybrid_swa", ["1x2"], ["ddtree"], [0.0], {}),
]
PARAMETERS = [
    tuple(f"{name} {key} {mode} {temperature} {max(len(extra), 1)}" for key in (shape, "1"))
    for name, shapes, modes, temperatures, extra in CASES
    for shape in shapes
    for mode in modes
    for temperature in temperatures
]


@pytest.fixture(scope="module")
def outputs():
    here = Path(__file__).parent
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(CASES)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("several", "one"), PARAMETERS, ids=[case[0] for case in PARAMETERS])
def test_as_on_one_device(outputs, several, one):
    assert isinstance(outputs[one], list), outputs[one]
    assert [row[:2] for row in outputs[several]] == [row[:2] for row in outputs[one]]
    for (_, _, got), (_, _, wanted) in zip(outputs[several], outputs[one], strict=True):
        assert got == (wanted and pytest.approx(wanted, abs=1e-4))
    if " ar " not in one:
        lengths = [length for _, accepted, _ in outputs[one] for length in accepted]
        assert max(lengths) > 3  # it speculated
