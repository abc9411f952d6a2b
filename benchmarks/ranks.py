"""``python -m benchmarks.ranks``: bytes and time of a step on several processes, Split-FG beside DDP.

Every group of processes runs in a network namespace of its own, so that the loopback device counts nothing but its
bytes and can be limited (``unshare`` and ``tc`` must be allowed). ``--record`` keeps the numbers in
``benchmarks/ranks.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import record
from benchmarks._network_model import Link, shared_step_s, step_s
from benchmarks._rank_worker import MODELS, K
from splitfg import LinearHead, Role, Split, Tied
from splitfg.models import GPT

RECORDED = Path(__file__).parent / "ranks.json"
METHODS = ("split_fg", "split_fg_local_heads", "ddp", "ddp_trunk")
RATES = {"1gbit": 1e9, "100mbit": 1e8, "10mbit": 1e7, "1mbit": 1e6}
BANDWIDTHS = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7, "1 Mbit/s": 1e6}
LATENCIES = {"0.05 ms": 5e-5, "1 ms": 1e-3, "20 ms": 2e-2, "100 ms": 0.1}
WORKERS = (2, 8, 64, 1000)
_LONGEST_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--record", action="store_true")
    parser.add_argument(
        "--scaling", action="store_true", help="measure the scaling alone, and keep the rest as recorded"
    )
    args = parser.parse_args()
    kept = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    found = {"K": K, "load": os.getloadavg()[0], "sizes": {name: sizes(name) for name in MODELS}}
    scaling = [case for ranks in (1, 2, 4) for case in run(ranks, _scaling())]
    found |= {"scaling": scaling, "simulated": simulated(scaling)}
    found["limited"] = kept["limited"] if args.scaling else limited()
    print(json.dumps(found, indent=1))
    if args.record:
        record(RECORDED, torch.device("cpu"), found | {"kills": kept.get("kills")})


def limited() -> list[dict[str, Any]]:
    """Return steps of a small model at several rates of the loopback device, and what the model expects."""
    whole = {case["method"]: case for case in run(2, [_tiny(method) for method in METHODS[:3]])}
    cases = [_tiny(m, rate) for m in METHODS[:3] for rate, bits in RATES.items() if _bearable(whole[m], bits)]
    found = run(2, cases)
    for case in found:
        unlimited = whole[case["method"]]["step_ms"] / 1e3
        case["model_ms"] = round(1e3 * shared_step_s(unlimited, case["wire_bytes"], 2, RATES[case["rate"]]), 1)
    return [*whole.values(), *found]


def simulated(scaling: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the model's step times of small8, with the CPU time of one process and its messages."""
    trunk, head = (4 * sizes("small8")[part] for part in ("trunk", "head"))
    compute = {c["method"]: c["cpu_ms"] / 1e3 for c in scaling if c["ranks"] == 1}
    messages = {
        "split_fg": [4 * (K + 4), head],
        "split_fg_local_heads": [4 * (K + 4)],
        "ddp": [trunk + head],
    }
    return [
        {
            "workers": workers,
            "bandwidth": bandwidth,
            "latency": latency,
            **{m: round(step_s(compute[m], sent, workers, Link(bits, delay)), 3) for m, sent in messages.items()},
        }
        for workers in WORKERS
        for bandwidth, bits in BANDWIDTHS.items()
        for latency, delay in LATENCIES.items()
    ]


def sizes(model: str) -> dict[str, int]:
    """Count trained numbers of trunk and head."""
    trunk = GPT(MODELS[model], generator=torch.Generator().manual_seed(0))
    split = Split(trunk, LinearHead(trunk.tied_linear()), tied=Tied.EXCLUDE)
    return {"trunk": split.count(Role.TRUNK), "head": split.count(Role.TIED, Role.HEAD)}


def run(ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run cases in a group of processes, in a network namespace of its own."""
    if not cases:
        return []
    inside = 'ip link set lo up; for r in $(seq 1 $((WORLD_SIZE - 1))); do RANK=$r "$@" & done; RANK=0 "$@"; wait'
    worker = [sys.executable, "-m", "benchmarks._rank_worker", *map(json.dumps, cases)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "--map-root-user", "--net", "bash", "-c", inside, "bash", *worker],
        env=os.environ | address,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for case in found:
        print(case, file=sys.stderr)
    return found


def _scaling() -> list[dict[str, Any]]:
    return [{"model": "small8", "method": m, "rows": 2, "length": 64, "steps": 5} for m in METHODS]


def _tiny(method: str, rate: str | None = None) -> dict[str, Any]:
    return {"model": "tiny", "method": method, "rows": 2, "length": 32, "steps": 5, "rate": rate}


def _bearable(case: dict[str, Any], bits: float) -> bool:
    return shared_step_s(case["step_ms"] / 1e3, case["wire_bytes"], 2, bits) < _LONGEST_S


if __name__ == "__main__":
    main()
