"""``python -m benchmarks.ranks``: bytes and time of a step on several processes, Split-FG beside DDP.

Every group of processes runs in a network namespace of its own where ``unshare`` allows it, so that the loopback device
counts nothing but its bytes. ``--scaling``, ``--limited`` and ``--delayed`` measure one part and keep the others as
recorded; ``--limited`` needs namespaces and ``tc``, ``--delayed`` namespaces and ``/dev/net/tun``. ``--record`` writes
the numbers to ``benchmarks/ranks.json`` or to the file that it names. A busy machine is an error unless ``--busy`` is
passed, which the record then states.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import made
from benchmarks._machine import can_separate, cores, load, run_group, run_linked
from benchmarks._network_model import Link, gloo_all_reduce_s, gloo_step_s, shared_step_s, step_s
from benchmarks._rank_worker import MODELS, K
from splitfg import LinearHead, Role, Split, Tied
from splitfg.models import GPT
from splitfg_lab.runs.storage import write_json

RECORDED = Path(__file__).parent / "ranks.json"
METHODS = ("split_fg", "split_fg_local_heads", "ddp", "ddp_trunk")
RATES = {"1gbit": 1e9, "100mbit": 1e8, "10mbit": 1e7, "1mbit": 1e6}
BANDWIDTHS = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8, "10 Mbit/s": 1e7, "1 Mbit/s": 1e6}
LATENCIES = {"0.05 ms": 5e-5, "1 ms": 1e-3, "20 ms": 2e-2, "100 ms": 0.1}
WORKERS = (2, 8, 64, 1000)
LINKS = {
    2: ((1e9, 1e-3), (1e8, 2e-2), (1e7, 2e-2), (1e8, 0.1), (1e6, 1e-3)),
    4: ((1e9, 1e-3), (1e8, 2e-2), (1e7, 0.1)),
    8: ((1e8, 2e-2),),
}
_LONGEST_S = 30.0
_LONGEST_MESSAGE_S = 5.0
_MOST_WAITING = 1.2
_WORKER = "benchmarks._rank_worker"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--record", type=Path, nargs="?", const=RECORDED)
    parser.add_argument("--scaling", action="store_true", help="measure weak scaling alone")
    parser.add_argument("--limited", action="store_true", help="measure limited bandwidth alone")
    parser.add_argument("--delayed", action="store_true", help="measure limited bandwidth with latency alone")
    parser.add_argument("--busy", action="store_true", help="measure although other jobs run, and record that")
    args = parser.parse_args(arguments)
    here, separate = load(), can_separate()
    if here["busy"] and not args.busy:
        sys.exit(f"other jobs run here (load {here['load']} on {here['cores']} cores): wait, or pass --busy")
    if not (args.scaling or args.limited or args.delayed):
        args.scaling = args.limited = args.delayed = True
    if (args.limited or args.delayed) and not separate:
        sys.exit("--limited and --delayed need `unshare --map-root-user --net` and `ip`: measure with --scaling alone")
    found = json.loads(RECORDED.read_text(encoding="utf-8"))
    found |= {"K": K, "sizes": {name: sizes(name) for name in MODELS}}
    facts = {**made(torch.device("cpu")), **here, "threads": 1}
    if args.scaling:
        cases = scaling(separate)
        found["scaling"] = {"made": facts | _disturbed(cases, here), "cases": cases}
    if args.limited:
        found["limited"] = {"made": facts, "cases": limited()}
    found["simulated"] = simulated(found["scaling"]["cases"])
    if args.delayed:
        found["delayed"] = {"made": facts, "cases": delayed()}
    print(json.dumps(found, indent=1))
    if args.record is not None:
        write_json(args.record, found)


def scaling(separate: bool) -> list[dict[str, Any]]:
    """Return steps of small8 with a fixed batch in every process: as many as half the cores, and at least four."""
    groups = [ranks for ranks in (1, 2, 4, 8) if ranks <= max(4, cores() // 2)]
    cases = [
        {"model": "small8", "method": m, "rows": 2, "length": 64, "steps": 5, "counted": separate} for m in METHODS
    ]
    return [case for ranks in groups for case in run_group(_WORKER, ranks, cases, separate=separate)]


def _disturbed(cases: list[dict[str, Any]], here: dict[str, Any]) -> dict[str, Any]:
    """Compare wall and CPU time of a single process, which differ where other jobs take its core."""
    waited = max(c["step_ms"] / c["cpu_ms"] for c in cases if c["ranks"] == 1)
    return {"wall_to_cpu": round(waited, 2), "busy": here["busy"] or waited > _MOST_WAITING}


def limited() -> list[dict[str, Any]]:
    """Return steps of a small model at several rates of the loopback device, and what the model expects."""
    whole = {case["method"]: case for case in _two([_tiny(method) for method in METHODS[:3]])}
    cases = [_tiny(m, rate) for m in METHODS[:3] for rate, bits in RATES.items() if _bearable(whole[m], bits)]
    found = _two(cases)
    for case in found:
        unlimited = whole[case["method"]]["step_ms"] / 1e3
        case["model_ms"] = round(1e3 * shared_step_s(unlimited, case["wire_bytes"], 2, RATES[case["rate"]]), 1)
    return [*whole.values(), *found]


def delayed() -> list[dict[str, Any]]:
    """Return times of gloo's all-reduce over links with bandwidth and latency, and what its model expects.

    Messages alone: computation on a busy machine would hide them. Their sizes are those of the scores, of the small
    model's head, and of all its gradients.
    """
    own = sizes("tiny")
    messages = (4 * (K + 4), 4 * own["head"], 4 * (own["trunk"] + own["head"]))
    found: list[dict[str, Any]] = []
    for ranks, links in LINKS.items():
        for bandwidth, latency in links:
            link = Link(bandwidth, latency)
            expected = {size: gloo_all_reduce_s(size, ranks, link) for size in messages}
            cases = [{"bytes": size, "repeats": 5} for size in messages if expected[size] < _LONGEST_MESSAGE_S]
            slow = run_linked("benchmarks._message_worker", ranks, cases, bandwidth=bandwidth, latency=latency)
            found += [{**case, "model_ms": round(1e3 * expected[case["bytes"]], 1)} for case in slow]
    return found


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
            "gloo": {
                m: round(gloo_step_s(compute[m], sent, workers, Link(bits, delay)), 3) for m, sent in messages.items()
            },
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


def _two(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run_group(_WORKER, 2, cases, separate=True)


def _tiny(method: str, rate: str | None = None) -> dict[str, Any]:
    return {"model": "tiny", "method": method, "rows": 2, "length": 32, "steps": 5, "rate": rate}


def _bearable(case: dict[str, Any], bits: float) -> bool:
    return shared_step_s(case["step_ms"] / 1e3, case["wire_bytes"], 2, bits) < _LONGEST_S


if __name__ == "__main__":
    main()
