"""``python -m benchmarks.ranks``: bytes and time of a step on several processes, Split-FG beside DDP.

Every group of processes runs in a network namespace of its own where ``unshare`` allows it, so that the loopback device
counts nothing but its bytes. ``--limited`` needs namespaces and ``tc``, ``--delayed`` namespaces and ``/dev/net/tun``:
where a machine has none, pass ``--scaling``. ``--record`` writes what this run measures, and nothing else, to
``benchmarks/ranks.json`` or to the file that it names, after every case. The recorded files are those of

    python -m benchmarks.ranks --scaling --record
    python -m benchmarks.ranks --limited --delayed --record benchmarks/links.json

A busy machine is an error unless ``--busy`` is passed, which the record then states.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._machine import MOST_WAITING, can_separate, cores, run_group, run_linked
from benchmarks._network_model import Link, gloo_all_reduce_s, gloo_step_s, shared_step_s, step_s
from benchmarks._rank_worker import MODELS, K
from benchmarks._record import Record, machine, options
from splitfg import LinearHead, Role, Split, Tied
from splitfg.models import GPT

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
_LONGEST_S = 20.0
_LONGEST_MESSAGE_S = 5.0
_WORKER = "benchmarks._rank_worker"
_PARTS = {
    "scaling": "weak scaling, and simulate other networks",
    "limited": "limited bandwidth",
    "delayed": "limited bandwidth with latency",
}


def main(arguments: Sequence[str] | None = None) -> None:
    args = options("benchmarks.ranks", __doc__, RECORDED, _PARTS, arguments)
    separate = can_separate()
    if not separate and args.parts != ["scaling"]:
        sys.exit("--limited and --delayed need `unshare --map-root-user --net` and `ip`: measure with --scaling alone")
    record = Record(args.record, machine(busy=args.busy))
    record.update(K=K, sizes={name: sizes(name) for name in MODELS})
    facts: dict[str, Any] = {}
    if "scaling" in args.parts:
        cases = _kept(record, "scaling", scaling(separate))
        facts = _disturbed(cases, record.found["made"])
        record.update(simulated=simulated(cases))
    if "limited" in args.parts:
        _kept(record, "limited", limited())
    if "delayed" in args.parts:
        _kept(record, "delayed", delayed())
    record.finish(**facts)


def _kept(record: Record, part: str, cases: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Record every case as it is measured, and return all."""
    found = []
    for case in cases:
        record.add(part, case)
        found.append(case)
    return found


def scaling(separate: bool) -> Iterator[dict[str, Any]]:
    """Yield steps of small8 with a fixed batch in every process: as many as half the cores, and at least four."""
    cases = [
        {"model": "small8", "method": m, "rows": 2, "length": 64, "steps": 5, "counted": separate} for m in METHODS
    ]
    for ranks in (1, 2, 4, 8):
        if ranks <= max(4, cores() // 2):
            yield from run_group(_WORKER, ranks, cases, separate=separate)


def _disturbed(cases: list[dict[str, Any]], here: dict[str, Any]) -> dict[str, Any]:
    """Compare wall and CPU time of a single process, which differ where other jobs take its core."""
    waited = max(c["step_ms"] / c["cpu_ms"] for c in cases if c["ranks"] == 1)
    return {"wall_to_cpu": round(waited, 2), "busy": here["busy"] or waited > MOST_WAITING}


def limited() -> Iterator[dict[str, Any]]:
    """Yield steps of a small model at several rates of the loopback device, and what the model expects."""
    whole = {case["method"]: case for case in _two([_tiny(method) for method in METHODS[:3]])}
    yield from whole.values()
    expected = {
        (m, rate): shared_step_s(case["step_ms"] / 1e3, case["wire_bytes"], 2, bits)
        for m, case in whole.items()
        for rate, bits in RATES.items()
    }
    bearable = [_tiny(m, rate, seconds) for (m, rate), seconds in expected.items() if seconds < _LONGEST_S]
    for case in _two(bearable):
        unlimited, bits = whole[case["method"]]["step_ms"] / 1e3, RATES[case["rate"]]
        yield {**case, "model_ms": round(1e3 * shared_step_s(unlimited, case["wire_bytes"], 2, bits), 1)}


def delayed() -> Iterator[dict[str, Any]]:
    """Yield times of gloo's all-reduce over links with bandwidth and latency, and what its model expects.

    Messages alone: computation on a busy machine would hide them. Their sizes are those of the scores, of the small
    model's head, and of all its gradients.
    """
    own = sizes("tiny")
    messages = (4 * (K + 4), 4 * own["head"], 4 * (own["trunk"] + own["head"]))
    for ranks, links in LINKS.items():
        for bandwidth, latency in links:
            link = Link(bandwidth, latency)
            expected = {size: gloo_all_reduce_s(size, ranks, link) for size in messages}
            cases = [{"bytes": size, "repeats": 5} for size in messages if expected[size] < _LONGEST_MESSAGE_S]
            for case in run_linked("benchmarks._message_worker", ranks, cases, bandwidth=bandwidth, latency=latency):
                yield {**case, "model_ms": round(1e3 * expected[case["bytes"]], 1)}


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


def _two(cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return run_group(_WORKER, 2, cases, separate=True)


def _tiny(method: str, rate: str | None = None, seconds: float = 0.0) -> dict[str, Any]:
    """Return a case of the small model, with few steps if they take many seconds."""
    steps = 15 if seconds < 1 else 3
    return {"model": "tiny", "method": method, "rows": 2, "length": 32, "steps": steps, "rate": rate}


if __name__ == "__main__":
    main()
