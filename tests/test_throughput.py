"""bench.py throughput in several processes: one table, and no hang when one is lost."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from pairs import ORACLE
from test_decode_command import write_tokenizer

from ddtree_jax.commands import processes
from ddtree_jax.commands.bench import main
from ddtree_jax.commands.bench_throughput import _models
from ddtree_jax.commands.processes import Place, problem_of

ROOT = Path(__file__).parents[1]
NAME = "qwen3_gqa"


@pytest.fixture(scope="module")
def argv(tmp_path_factory):
    """The command over two small sets with a pair that has a tokenizer."""
    folder = tmp_path_factory.mktemp("spoken")
    shutil.copytree(ORACLE / NAME / "target", folder / "target")
    write_tokenizer(folder / "target", range(0x80, 0x80 + 29))
    turns = [("one", ["Hello", "More"]), ("two", ["Yes"]), ("one", ["No"]), ("one", ["Or not"])]
    lines = [json.dumps({"set": name, "turns": each}) + "\n" for name, each in turns]
    (folder / "eval.jsonl").write_text("".join(lines))
    argv = [
        "throughput",
        "--target",
        str(folder / "target"),
        "--draft",
        str(ORACLE / NAME / "draft"),
    ]
    argv += ["--eval", str(folder / "eval.jsonl"), "--tree-budget", "7", "--max-new-tokens", "12"]
    return [*argv, "--dtype", "float32", "--ignore-eos"]


@pytest.fixture
def together():
    """together(argv): starts two processes of the command; none of them outlives us.

    `last`: more flags of the second.
    """
    started = []

    def start(argv, count=2, last=()):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        flags = ["--coordinator", address, "--processes", str(count), "--heartbeat", "10"]
        for rank in range(count):
            command = [sys.executable, str(ROOT / "scripts/bench.py"), *argv, *flags]
            started.append(
                subprocess.Popen(
                    [*command, "--process-id", str(rank), *(last if rank else ())],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
                )
            )
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def counted(path):
    """What must not depend on the number of processes."""
    sets = json.loads(path.read_text())["sets"]
    return {
        name: {key: value for key, value in row.items() if "second" not in key and "_s" not in key}
        | {"sha256": row["output_sha256"]}
        for name, row in sets.items()
    }


@pytest.mark.exhaustive
def test_two_processes_give_the_table_of_one(argv, together, tmp_path, capsys):
    assert main([*argv, "--json", str(tmp_path / "one")]) == 0
    table = capsys.readouterr().out
    first, second = together([*argv, "--json", str(tmp_path / "two")])
    out, err = first.communicate(timeout=240)
    assert first.returncode == 0, err
    assert second.communicate(timeout=60)[0] == ""
    assert second.returncode == 0
    assert json.loads((tmp_path / "two").read_text())["processes"] == 2
    assert counted(tmp_path / "two") == counted(tmp_path / "one")
    assert counted(tmp_path / "one")["one"]["prompts"] == 4
    rows = [[line for line in each.splitlines() if "│" in line] for each in (table, out)]
    assert len(rows[0]) == 2
    for line, same in zip(*rows, strict=True):
        assert line.split("│")[:5] == same.split("│")[:5]  # set, prompts, tokens, tau


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--max-new-tokens", "11"], "max_new_tokens: 12 in process 0, 11 in process 1"),
        (["--limit", "1"], "limit: None in process 0, 1 in process 1"),
        (["--processes", "3"], "processes: 2 in process 0, 3 in process 1"),
    ],
)
def test_processes_that_are_asked_for_other_things(argv, together, tmp_path, flags, name):
    """Each says so and none gives a result."""
    running = together([*argv, "--json", str(tmp_path / "none")], last=flags)
    for process in running:
        out, err = process.communicate(timeout=240)
        assert (process.returncode, out) == (1, "")
        assert f"error: the processes differ in {name}; expected the same\n" in err
    assert not (tmp_path / "none").exists()


def test_models_of_one_configuration_are_told_apart():
    """By their norms: a fine-tuned model has others."""

    def models(weight):
        leaves = [jnp.ones((2, 2)), jnp.asarray([1.0, weight], jnp.bfloat16)]
        done = SimpleNamespace(result=lambda: leaves)
        names = ["target.head", "target.norm"]
        return _models(SimpleNamespace(target="t", drafter="d", _leaf_names=names, _leaves=done))

    assert models(1.0) == models(1.0) != models(1.25)


@pytest.mark.exhaustive
def test_a_lost_process_is_named(argv, together, tmp_path):
    running = together([*argv, "--max-new-tokens", "400", "--json", str(tmp_path / "none")])
    for process in running:
        assert process.stderr.readline().endswith("has joined\n")
    other, victim = running
    (worker,) = Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    out, err = other.communicate(timeout=60)
    assert (other.returncode, out) == (1, "")
    assert err == "error: process 1 of 2 was lost, so there is no result\n"
    _, err = victim.communicate(timeout=60)
    assert victim.returncode == 1
    assert err == "error: process 1 of 2 (this one) was ended by SIGKILL\n"
    assert not (tmp_path / "none").exists()


def test_what_the_runtime_says_of_others():
    """As JAX 0.11 logs it."""
    log = (
        "F1130 client.h:86] unhealthy (stopped sending heartbeats):\n1\n3\nThe tasks have crashed\n"
    )
    assert problem_of(log, Place(0, 4)) == "process 1, 3 of 4 was lost, so there is no result"
    log = "F1130 client.h:86] UNAVAILABLE: Failed to send RPC to coordination service. Either\n"
    assert problem_of(log, Place(1, 2)) == "process 0 of 2 was lost, so there is no result"
    rpc = "RPC: /xla.coordination.CoordinationService/RegisterTask"
    log = f"F1130 client.h:86] DEADLINE_EXCEEDED: Deadline Exceeded\n\n{rpc}\n"
    assert problem_of(log, Place(1, 2)) == "not all 2 processes came together within 120 s"
    assert problem_of("something else\n", Place(1, 4)) is None


def test_places_that_a_cluster_gives(monkeypatch):
    from ddtree_jax.commands.bench import _parser

    def place(*flags):
        return processes.place(_parser().parse_args(["throughput", *flags]), devices=2)

    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "KUBERNETES"))]:
        monkeypatch.delenv(name)
    assert place() is None
    slurm = dict(JOB_ID=7, STEP_NODELIST="n[1-2]", NTASKS=4, PROCID=3, LOCALID=1)
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert place() == Place(3, 4, devices=(2, 3))
    assert place("--processes", "1") is None
    flags = ["--coordinator", "localhost:7000", "--processes", "2", "--process-id", "1"]
    assert place(*flags) == Place(1, 2, "localhost:7000")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--processes", "2"], "--coordinator, --processes and --process-id go together"),
        (
            ["--coordinator", "localhost:1", "--processes", "0", "--process-id", "0"],
            "--processes is 0",
        ),
        (
            ["--coordinator", "localhost:1", "--processes", "2", "--process-id", "2"],
            "expected 0 to 1",
        ),
        (["--coordinator", "a", "--processes", "2", "--process-id", "0"], "HOST:PORT"),
        (["--coordinator", "a:0", "--processes", "2", "--process-id", "0"], "from 1 to 65535"),
        (["--coordinator", "a:99999", "--processes", "2", "--process-id", "0"], "from 1 to 65535"),
        (["--coordinator", "a:" + "9" * 5000, "--processes", "2", "--process-id", "0"], "65535"),
        (["--json", ""], "--json is empty"),
        (["--eval", ""], "--eval is empty"),
        (["--heartbeat", "31"], "--heartbeat is 31; expected 1 to 30"),
        (["--tp", "0"], "--tp is 0"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--data", "2", "--batch-size", "3"], "the 1 (cpu)"),
        (["--tree-budget", "0"], "budget is 0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--eval", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_usage(argv, flags, word, capsys):
    assert main([*argv, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert word in error
