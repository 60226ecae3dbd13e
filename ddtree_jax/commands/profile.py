"""What the GPU did while something ran, from a trace of jax.profiler: busy time and kernels."""

import collections
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from ddtree_jax.errors import RunError

# Without it a traced program runs op by op instead of as the CUDA graph that it is otherwise.
GRAPHS_FLAG = "xla_enable_command_buffers_during_profiling"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """All launches of one kernel: how many, and their time together in microseconds."""

    name: str
    count: int
    total_us: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """A stretch of work on one GPU.

    busy_ms: while at least one kernel or copy ran, on any stream. span_ms: from the first one's
    start to the last one's end. kernels: the longest together first.
    """

    busy_ms: float
    span_ms: float
    kernels: tuple[Kernel, ...]


def keep_graphs() -> None:
    """Lets CUDA graphs run as such under the profiler; before JAX first touches the device.

    XLA_FLAGS that name the flag already are left as they are.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if GRAPHS_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{GRAPHS_FLAG}=true".strip()


def available() -> bool:
    """Whether traces hold device events: on a CPU they do not."""
    return jax.default_backend() == "gpu"


def union_ns(intervals: Iterable[tuple[float, float]]) -> float:
    """The time that (start, end) intervals cover together; what overlaps counts once."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def summary(data: ProfileData) -> Profile:
    """The kernels and copies on the streams of the first GPU of a trace."""
    plane = data.find_plane_with_name("/device:GPU:0")
    lines = [] if plane is None else [x for x in plane.lines if x.name.startswith("Stream")]
    intervals: list[tuple[float, float]] = []
    times: dict[str, list[float]] = collections.defaultdict(list)
    for line in lines:
        for event in line.events:
            intervals.append((event.start_ns, event.start_ns + event.duration_ns))
            times[event.name].append(event.duration_ns)
    if not intervals:
        raise RunError(
            "the profiler recorded nothing on the GPU's streams; "
            f"XLA_FLAGS=--{GRAPHS_FLAG}=false traces programs op by op instead"
        )
    kernels = [Kernel(name, len(each), sum(each) / 1e3) for name, each in times.items()]
    return Profile(
        busy_ms=union_ns(intervals) / 1e6,
        span_ms=(max(end for _, end in intervals) - min(start for start, _ in intervals)) / 1e6,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.total_us)),
    )


def traced(work: Callable[[], Any]) -> Profile:
    """Runs `work` and waits for the arrays it returns, under the profiler.

    It costs time of its own: nothing that runs in here can be timed with the host's clock.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    options.enable_hlo_proto = False
    options.raise_error_on_start_failure = True
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(work())
        return summary(ProfileData.from_file(str(next(Path(folder).rglob("*.xplane.pb")))))
