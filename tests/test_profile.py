"""What a trace says of the GPU: busy time, span and kernels, from hand-written events."""

import random

import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData
from rich.console import Console

from ddtree_jax.commands import bench_round, profile, round_tables, timing
from ddtree_jax.engine import Options
from ddtree_jax.errors import RunError
from ddtree_jax.rounds import Emitted


def test_overlaps_count_once():
    assert profile.union_ns([]) == 0
    assert profile.union_ns([(0, 4), (4, 5)]) == 5
    assert profile.union_ns([(10, 12), (0, 4), (1, 2), (3, 6)]) == 8
    dice = random.Random(0)
    starts = [dice.randrange(100) for _ in range(30)]
    intervals = [(start, start + dice.randrange(6)) for start in starts]
    covered = {x for start, end in intervals for x in range(start, end)}
    assert profile.union_ns(intervals) == len(covered)


def trace(*events):
    """A trace of (plane, line, kernel, start us, duration us)."""
    names = sorted({event[2] for event in events})
    planes = []
    for plane in dict.fromkeys(event[0] for event in events):
        lines = []
        mine = [event for event in events if event[0] == plane]
        for line in dict.fromkeys(event[1] for event in mine):
            inner = " ".join(
                f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {start * 10**6} "
                f"duration_ps: {duration * 10**6} }}"
                for _, where, name, start, duration in mine
                if where == line
            )
            lines.append(f'lines {{ name: "{line}" {inner} }}')
        known = " ".join(
            f'event_metadata {{ key: {i + 1} value {{ id: {i + 1} name: "{name}" }} }}'
            for i, name in enumerate(names)
        )
        planes.append(f'planes {{ name: "{plane}" {" ".join(lines)} {known} }}')
    return ProfileData.from_text_proto("\n".join(planes))


def test_summary_of_two_streams():
    gpu, compute, copies = "/device:GPU:0", "Stream #1(Compute)", "Stream #2(MemcpyD2D)"
    result = profile.summary(
        trace(
            (gpu, compute, "gemm", 100, 40),
            (gpu, compute, "norm", 140, 10),
            (gpu, compute, "gemm", 200, 60),
            (gpu, copies, "copy", 145, 25),  # five of them beside the norm
            (gpu, "XLA Modules", "jit_round", 0, 1000),
            ("/device:GPU:1", compute, "gemm", 0, 500),
            ("/host:CPU", "python", "dispatch", 0, 900),
        )
    )
    assert result.busy_ms == pytest.approx(0.130)
    assert result.span_ms == pytest.approx(0.160)
    assert [(kernel.name, kernel.count, kernel.total_us) for kernel in result.kernels] == [
        ("gemm", 2, 100),
        ("copy", 1, 25),
        ("norm", 1, 10),
    ]


def test_a_trace_without_kernels_is_an_error():
    with pytest.raises(RunError, match=profile.GRAPHS_FLAG):
        profile.summary(trace(("/host:CPU", "python", "dispatch", 0, 900)))


def test_a_trace_is_taken_and_read():
    calls = []
    with pytest.raises(RunError, match="recorded nothing"):  # as a CPU has no streams
        profile.traced(lambda: calls.append(1) or jnp.ones(3) + 1)
    assert calls == [1]


def test_the_users_flags_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    profile.keep_graphs()
    profile.keep_graphs()
    assert profile.os.environ["XLA_FLAGS"] == f"--xla_dump_to=x --{profile.GRAPHS_FLAG}=true"
    monkeypatch.setenv("XLA_FLAGS", f"--{profile.GRAPHS_FLAG}=false")
    profile.keep_graphs()
    assert profile.os.environ["XLA_FLAGS"] == f"--{profile.GRAPHS_FLAG}=false"


def test_rounds_on_the_device(monkeypatch):
    """What a GPU's rows say, with a trace of two kernels in place of the device."""
    ran = []

    class Engine:
        mesh = None

        def round_at(self, options, context, slots):
            return self.program, [], context

        def program(self, leaves, state):
            ran.append(state)
            return state + 1, Emitted(jnp.zeros((1, 1)), jnp.ones((1,)), jnp.zeros((1,)))

    def traced(work):
        work()
        kernels = (profile.Kernel("gemm", 3 * count, 90.0 * count), profile.Kernel("top_k", 1, 5.0))
        return profile.Profile(0.09 * count, 0.2 * count, kernels)

    count = bench_round.TRACED
    monkeypatch.setattr(profile, "traced", traced)
    monkeypatch.setattr(timing, "queued", lambda call, n: [call() for _ in range(n)] and 0.12)
    case = bench_round.Case("ddtree 7", Options(tree_budget=7), 100, 256)
    row = bench_round.device_row(Engine(), case, wall_ms=0.15)
    assert ran == list(range(100, 100 + 2 * count))  # each round follows the one before it
    assert (row["device_ms"], row["busy_ms"]) == (0.12, pytest.approx(0.09))
    assert row["idle_percent"] == pytest.approx(40)
    assert row["kernels"][0] == {
        "name": "gemm",
        "per_round": 3,
        "us_each": 30,
        "us_per_round": 90,
    }
    # Where kernels wait for other devices, busy says nothing.
    several = Engine()
    several.mesh = "two devices"
    waiting = bench_round.device_row(several, case, wall_ms=0.15)
    assert waiting["device_ms"] == 0.12
    assert (waiting["busy_ms"], waiting["idle_percent"]) == (None, None)
    row |= {"label": case.label, "context": 100, "median_ms": 0.15}
    out = Console(record=True, width=120)
    out.print(round_tables.rounds_table("x", [row]), round_tables.kernel_table(row))
    text = out.export_text()
    assert "busy ms" in text
    assert "idle %" in text
    assert "gemm" in text


def test_a_host_that_is_behind_is_not_in_the_figure(monkeypatch):
    monkeypatch.setattr(timing, "_products", lambda x: x)  # the device is given nothing to do
    calls = []

    def call():
        calls.append(1)
        return jnp.zeros(3).block_until_ready()

    assert timing.queued(call, 5) is None
    assert len(calls) == 6
