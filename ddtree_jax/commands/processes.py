"""One command in several processes, on one host or many, through JAX's distributed runtime.

A process is a worker under a small supervising parent. JAX's runtime ends every worker when one of
them stops sending heartbeats; the parent, which uses no devices, turns that into a sentence with
the lost process's number and exit code 1. A worker whose parent has gone ends, too.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax

from ddtree_jax.commands import shell
from ddtree_jax.errors import InputError, RunError

HEARTBEAT_S = 30  # a process that has been silent so long is lost
_START_S = 120  # all processes must have come by then
_END_S = 30
_FOREVER_MS = 2**31 - 1  # as long as heartbeats come
# What JAX's runtime says of others, and the beginning of a line of its log.
_SILENT = re.compile(r"stopped sending heartbeats\):\s*((?:\d+\s+)+)")
_NO_COORDINATOR = re.compile(r"Failed to send RPC to coordination service")
_NOT_JOINED = re.compile(r"DEADLINE_EXCEEDED.*\n*.*CoordinationService/RegisterTask")
_LOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ ")


@dataclasses.dataclass(frozen=True)
class Place:
    """Which process this is: number `rank` of `count`.

    coordinator: address of process 0, HOST:PORT; None where JAX finds it itself. devices: the
    numbers of the GPUs of its host that are its own; None for all that it can see.
    """

    rank: int
    count: int
    coordinator: str | None = None
    devices: tuple[int, ...] | None = None


def add_flags(parser: Any) -> None:
    group = parser.add_argument_group(
        "processes", "found by JAX itself under SLURM, Kubernetes jobs and Open MPI"
    )
    add = group.add_argument
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    add("--processes", type=int, metavar="N", help="how many there are; 1 looks for no others")
    add("--process-id", type=int, metavar="I", help="which of them this is, from 0")
    add("--heartbeat", type=int, default=HEARTBEAT_S, metavar="SECONDS", help="1 to 30")
    add("--worker", action="store_true", help=argparse.SUPPRESS)


def place(args, devices: int) -> Place | None:
    """This process's place by flags, or else by the cluster; None where it is the only one.

    Args:
      devices: how many of its host's a process uses.

    Raises:
      InputError: flags do not go together, or the cluster cannot be asked.
    """
    if not 1 <= args.heartbeat <= HEARTBEAT_S:
        raise InputError(f"--heartbeat is {args.heartbeat}; expected 1 to {HEARTBEAT_S} seconds")
    given = (args.coordinator, args.processes, args.process_id)
    if given == (None, 1, None):
        return None
    if given == (None, None, None):
        return _found(devices)
    if None in given:
        raise InputError("--coordinator, --processes and --process-id go together")
    if args.processes < 1:
        raise InputError(f"--processes is {args.processes}; expected at least 1")
    if not 0 <= args.process_id < args.processes:
        last = args.processes - 1
        raise InputError(f"--process-id is {args.process_id}; expected 0 to {last}")
    host, _, port = args.coordinator.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port, re.ASCII) or not 1 <= int(port) <= 65535:
        raise InputError(
            f"--coordinator is {args.coordinator!r}; expected HOST:PORT, a port from 1 to 65535"
        )
    return Place(args.process_id, args.processes, args.coordinator)


def _found(devices: int) -> Place | None:
    """What JAX finds out of a cluster that has started this process with others."""
    from jax._src.clusters import ClusterEnv  # jax.distributed asks it, too, and tells nobody

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Kubernetes without its Python package
            kinds = (kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method)
            cluster = next((kind for kind in kinds if kind.is_env_present()), None)
        if cluster is None or cluster.get_process_count() == 1:
            return None
        local = cluster.get_local_process_id()
        mine = None if local is None else tuple(range(local * devices, (local + 1) * devices))
        return Place(cluster.get_process_id(), cluster.get_process_count(), devices=mine)
    except Exception as error:  # a cluster's own client raises what it likes
        raise InputError(
            f"the cluster does not say which process this is ({error}); give --coordinator, "
            "--processes and --process-id, or --processes 1"
        ) from None


def supervise(argv: Sequence[str], where: Place) -> int:
    """Runs `bench.py argv` as a worker; returns its exit code, 1 if any process was lost.

    What the runtime logs is held back until it is known how the worker ended.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    worker = subprocess.Popen(
        [sys.executable, "-m", "ddtree_jax.commands.bench", *argv, "--worker"],
        stdin=subprocess.PIPE,  # closes when this parent ends
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Every process compiles for itself alone.
        env=os.environ | {"XLA_FLAGS": f"{flags} --xla_gpu_shard_autotuning=false".strip()},
    )
    assert worker.stderr is not None
    held: list[str] = []
    try:
        for line in worker.stderr:
            if held or _LOG.match(line):
                held.append(line)
            else:
                print(line, end="", file=sys.stderr, flush=True)
        code = worker.wait()
    except BaseException:
        worker.kill()
        raise
    log = "".join(held)
    problem = None if code == 0 else problem_of(log, where)
    if problem is None or "--debug" in argv:
        print(log, end="", file=sys.stderr)
    if problem is not None:
        raise RunError(problem)
    if code < 0:
        name = signal.Signals(-code).name
        raise RunError(f"process {where.rank} of {where.count} (this one) was ended by {name}")
    return code


def problem_of(log: str, where: Place) -> str | None:
    """What happened to the other processes, by what JAX's runtime logged in this one."""
    silent = {int(number) for ranks in _SILENT.findall(log) for number in ranks.split()}
    if not silent and where.rank != 0 and _NO_COORDINATOR.search(log):
        silent = {0}  # the coordinator runs in process 0
    lost = ", ".join(map(str, sorted(silent - {where.rank})))
    if lost:
        return f"process {lost} of {where.count} was lost, so there is no result"
    if _NOT_JOINED.search(log):
        return f"not all {where.count} processes came together within {_START_S} s"
    return None


def join(where: Place, heartbeat: int) -> None:
    """Makes this worker one of the processes; it ends with its parent.

    Raises:
      RunError: the others did not come.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    detect: dict[str, Any] = {}
    if where.coordinator is not None:
        detect = dict(
            coordinator_address=where.coordinator,
            num_processes=where.count,
            process_id=where.rank,
            cluster_detection_method="deactivate",
        )
    try:
        jax.distributed.initialize(
            **detect,
            local_device_ids=where.devices,
            heartbeat_timeout_seconds=heartbeat,
            initialization_timeout=_START_S,
            shutdown_timeout_seconds=_END_S,
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"process {where.rank} of {where.count} could not join the others within "
            f"{_START_S} s ({reason})"
        ) from None
    print(f"process {where.rank} of {where.count} has joined", file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(shell.FAILED)


def _client() -> Any:
    from jax._src import distributed  # the store and the barriers have no public name

    return distributed.global_state.client


def meet(where: Place | None, name: str) -> None:
    """Waits for all processes."""
    if where is None:
        return
    try:
        _client().wait_at_barrier(name, _FOREVER_MS)
    except jax.errors.JaxRuntimeError:
        time.sleep(_END_S)  # in which the runtime says who was lost, and ends this process
        raise


def agree(where: Place, asked: dict[str, Any]) -> None:
    """Ends every process if one was asked for something else (values of JSON's kinds).

    Raises:
      RunError: names what differs, and where.
    """
    client = _client()
    client.key_value_set(f"asked/{where.rank:06}", json.dumps(asked))
    meet(where, "asked")
    everyone = [json.loads(text) for _, text in sorted(client.key_value_dir_get("asked/"))]
    for rank, other in enumerate(everyone):
        for name, value in everyone[0].items():
            if other[name] != value:
                jax.distributed.shutdown()  # together: none is the lost process of another
                raise RunError(
                    f"the processes differ in {name}: {value} in process 0, {other[name]} in "
                    f"process {rank}; expected the same"
                )


def gather(where: Place | None, value: Any) -> list[Any]:
    """The value (JSON's kinds) of every process, by number, and the end of their being together."""
    if where is None:
        return [value]
    client = _client()
    client.key_value_set(f"ddtree/{where.rank:06}", json.dumps(value))
    meet(where, "gathered")
    entries = sorted(client.key_value_dir_get("ddtree/"))
    jax.distributed.shutdown()
    if len(entries) != where.count:
        raise RunError(f"{len(entries)} of {where.count} processes gave a result; expected all")
    return [json.loads(text) for _, text in entries]


@contextlib.contextmanager
def failing_at_once():
    """A worker that fails ends without waiting for the others, who learn it by its silence."""
    try:
        yield
    except BaseException as error:
        code = shell.run(_raiser(error), sys.argv)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _raiser(error: BaseException):
    def command(argv: Sequence[str]) -> int:
        raise error

    return command
