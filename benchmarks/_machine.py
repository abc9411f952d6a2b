"""How busy a machine is, and groups of processes on it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

_OWN_NETWORK = ("unshare", "--map-root-user", "--net")
_START = (
    '[ -z "$OWN_NETWORK" ] || ip link set lo up;'
    ' for r in $(seq 1 $((WORLD_SIZE - 1))); do RANK=$r "$@" & done; RANK=0 "$@"; code=$?; wait; exit $code'
)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def load() -> dict[str, Any]:
    """Return the load average, the cores, and whether other jobs would disturb a timing."""
    now = os.getloadavg()[0]
    return {"load": round(now, 2), "cores": cores(), "busy": now > 0.5 + 0.1 * cores()}


def can_separate() -> bool:
    """Return whether a command can have a network of its own here."""
    command = [*_OWN_NETWORK, "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def run_group(module: str, ranks: int, cases: list[dict[str, Any]], *, separate: bool) -> list[dict[str, Any]]:
    """Run cases in a group of processes, and return what the first one prints for each.

    Args:
        module: Run with ``python -m``, with the cases as JSON arguments and torchrun's variables.
        ranks: Number of processes.
        cases: The cases; an empty list starts nothing.
        separate: Give the group a network namespace of its own.
    """
    if not cases:
        return []
    worker = [sys.executable, "-m", module, *map(json.dumps, cases)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    own = {"OMP_NUM_THREADS": "1", "OWN_NETWORK": "1" if separate else ""}
    done = subprocess.run(
        [*(_OWN_NETWORK if separate else ()), "bash", "-c", _START, "bash", *worker],
        env=os.environ | address | own,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for case in found:
        print(case, file=sys.stderr, flush=True)
    return found


def run_linked(
    module: str, ranks: int, cases: list[dict[str, Any]], *, bandwidth: float, latency: float
) -> list[dict[str, Any]]:
    """Run cases in a group of processes with slow links between them; see :mod:`benchmarks._switch`."""
    worker = [sys.executable, "-m", module, *map(json.dumps, cases)]
    switch = [sys.executable, "-m", "benchmarks._switch", "--ranks", str(ranks)]
    link = ["--bandwidth", str(bandwidth), "--latency", str(latency)]
    done = subprocess.run([*_OWN_NETWORK, "--fork", *switch, *link, *worker], stdout=subprocess.PIPE, check=True)
    found = [json.loads(line) | {"bandwidth": bandwidth, "latency": latency} for line in done.stdout.splitlines()]
    for case in found:
        print(case, file=sys.stderr, flush=True)
    return found


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
