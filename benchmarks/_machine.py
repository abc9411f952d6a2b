"""How busy a machine is, and groups of processes on it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_OWN_NETWORK = ("unshare", "--map-root-user", "--net")
_START = (
    '[ -z "$OWN_NETWORK" ] || ip link set lo up;'
    ' for r in $(seq 1 $((WORLD_SIZE - 1))); do RANK=$r "$@" & done; RANK=0 "$@"; code=$?; wait; exit $code'
)
MOST_WAITING = 1.2
"""Wall time of a process that computes, in units of its CPU time, up to which a machine is quiet."""
_SPIN = """
import time
begin, began = time.perf_counter(), time.process_time()
while (wall := time.perf_counter() - begin) < 0.5:
    pass
print(wall / (time.process_time() - began))
"""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def load() -> dict[str, Any]:
    """Return the load average, the cores, and whether other jobs would disturb a timing.

    Processes on half of the cores compute for a moment. They wait where other jobs take their cores. The load average
    of a container counts the jobs of its whole host, and is stated only.
    """
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN], stdout=subprocess.PIPE) for _ in range(cores() // 2)]
    waits = [float(process.communicate()[0]) for process in spinning]
    waited = max(waits, default=1.0)
    facts = {"load": round(os.getloadavg()[0], 2), "cores": cores(), "wall_to_cpu": round(waited, 2)}
    return facts | {"busy": waited > MOST_WAITING}


def can_separate() -> bool:
    """Return whether a command can have a network of its own here."""
    command = [*_OWN_NETWORK, "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def run_group(module: str, ranks: int, cases: Sequence[Mapping[str, Any]], *, separate: bool) -> Iterator[Any]:
    """Run cases in a group of processes, and yield what the first one prints for each.

    Args:
        module: Run with ``python -m``, with the cases as JSON arguments and torchrun's variables.
        ranks: Number of processes.
        cases: The cases; an empty list starts nothing.
        separate: Give the group a network namespace of its own.
    """
    if not cases:
        return
    worker = [sys.executable, "-m", module, *map(json.dumps, cases)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    own = {"OMP_NUM_THREADS": "1", "OWN_NETWORK": "1" if separate else ""}
    start = [*(_OWN_NETWORK if separate else ()), "bash", "-c", _START, "bash", *worker]
    yield from _printed(start, os.environ | address | own)


def run_linked(
    module: str, ranks: int, cases: Sequence[Mapping[str, Any]], *, bandwidth: float, latency: float
) -> Iterator[Any]:
    """Run cases in a group of processes with slow links between them; see :mod:`benchmarks._switch`."""
    worker = [sys.executable, "-m", module, *map(json.dumps, cases)]
    switch = [sys.executable, "-m", "benchmarks._switch", "--ranks", str(ranks)]
    link = ["--bandwidth", str(bandwidth), "--latency", str(latency)]
    for case in _printed([*_OWN_NETWORK, "--fork", *switch, *link, *worker], dict(os.environ)):
        yield case | {"bandwidth": bandwidth, "latency": latency}


def _printed(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Any]:
    """Yield the lines that a command prints, as JSON, when it prints them.

    Raises:
        CalledProcessError: If it fails.
    """
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            case = json.loads(line)
            print(case, file=sys.stderr, flush=True)
            yield case
        if process.wait() != 0:
            raise subprocess.CalledProcessError(process.returncode, command[0])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
