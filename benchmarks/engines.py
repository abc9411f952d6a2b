"""``python -m benchmarks.engines``: what a step costs beside the engine's own time, and its peak memory.

Times are CPU seconds of this process on one thread, so that other jobs of the machine count little; run it on a quiet
machine all the same. Multiply-adds and Python calls do not depend on the machine. ``--record`` keeps the numbers in
``benchmarks/engines.json``, or in the file that it names; that takes about three minutes. Networks of packages are read
as in the experiment ``engines``, and left out if missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.__main__ import record
from benchmarks._engine_cases import COPIES, METHODS, NETWORKS, Case, available, model_and_batch

MEASURED = ("rapidocr", "torchcrepe")
"""Networks whose memory is measured: every number takes a fresh process."""

_KEPT = ("learned_feedback", "activity", "backprop")
"""Methods that keep activations, whose memory is measured."""

RECORDED = Path(__file__).parent / "engines.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--record", type=Path, nargs="?", const=RECORDED, metavar="FILE")
    parser.add_argument("--repeats", type=int, default=30, help="largest number of steps that are timed")
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds that the steps of a method may take")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--networks", nargs="*", default=None, help=f"some of {', '.join(NETWORKS)}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    strange = sorted(set(args.networks or ()) - set(NETWORKS))
    if strange:
        parser.error(f"no network {', '.join(strange)}: choose from {', '.join(NETWORKS)}")
    names = [n for n in args.networks or NETWORKS if available(n)]
    found: dict[str, Any] = {"rows": args.rows, "load": os.getloadavg()[0], "repeats": args.repeats}
    found["steps"] = [step for name in names for step in steps(name, args.rows, args.repeats, args.seconds)]
    found["memory"] = [memory(name, args.rows) for name in names if name in MEASURED]
    for line in (*found["steps"], *found["memory"]):
        print(json.dumps(line))
    if args.record is not None:
        record(args.record, torch.device("cpu"), found)


def steps(network: str, rows: int, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Return the costs of a step of every method, in CPU milliseconds, multiply-adds and Python calls."""
    found, data = [], model_and_batch(network, rows)
    for method in METHODS:
        case = Case(*data, method)
        case.step()
        times = _timed(case, repeats, seconds)
        step, engine = (1e3 * statistics.median(part) for part in zip(*times, strict=True))
        inference = 1e3 * statistics.median(case.timed_inference() for _ in range(10))
        ours, engines = case.multiply_adds()
        found.append(
            {
                "network": network,
                "method": method,
                "parameters": case.parameters(),
                "steps": len(times),
                "inference_ms": round(inference, 3),
                "step_ms": round(step, 3),
                "engine_ms": round(engine, 3),
                "overhead": round((step - engine) / engine, 2) if engine else None,
                "share": round((step - engine) / step, 2),
                "inferences_per_row": case.inferences_per_row(),
                "multiply_adds": round(ours / engines, 2) if engines else None,
                "python_calls": case.python_calls(),
            }
        )
        print(found[-1], file=sys.stderr)
    return found


def _timed(case: Case, repeats: int, seconds: float) -> list[tuple[float, float]]:
    """Time at least two steps, and as many as fit into these seconds."""
    times = [case.timed_step(), case.timed_step()]
    while len(times) < repeats and sum(step for step, _ in times) < seconds:
        times.append(case.timed_step())
    return times


def memory(network: str, rows: int, repeats: int = 1) -> dict[str, Any]:
    """Return the peak resident memory in MiB of fresh processes, beside inference of as many rows in one call."""
    with tempfile.TemporaryDirectory() as folder:
        model, x, y = model_and_batch(network, rows)
        (Path(folder) / "model.onnx").write_bytes(model)
        np.savez(Path(folder) / "batch.npz", x=x.numpy(), y=y.numpy())
        del model, x, y
        peaks = {
            what: statistics.median(_fresh(folder, what)["peak"] for _ in range(repeats))
            for what in ("inference1", f"inference{COPIES}", *_KEPT)
        }
    ratios = {m: peaks[m] / peaks[f"inference{COPIES}" if m == "activity" else "inference1"] for m in _KEPT}
    found = {"network": network, "mib": {what: round(mib, 1) for what, mib in peaks.items()}}
    return {**found, "ratio": {method: round(ratio, 2) for method, ratio in ratios.items()}}


def _fresh(folder: str, what: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks._engine_cases", folder, what]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    main()
