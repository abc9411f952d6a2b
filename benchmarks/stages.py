"""``python -m benchmarks.stages``: blocks on several processes, the staged pull beside torch's pipelines.

Counts the longest way through a step in units of a block's forward pass, with blocks that sleep: other jobs on the
machine hardly matter. Then times blocks that compute, which needs a quiet machine with a core for every stage: a busy
one is an error unless ``--counted`` (no timing) or ``--busy`` is passed. ``--record`` writes ``benchmarks/stages.json``
or the file that it names.
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
from benchmarks._machine import cores, load, run_group
from splitfg_lab.runs.storage import write_json

RECORDED = Path(__file__).parent / "stages.json"
METHODS = ("staged", "staged_recompute", "gpipe", "1f1b")
MICRO_BATCHES = (1, 4, 8)
UNIT_S = 0.05
_WORKER = "benchmarks._stage_worker"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("--record", type=Path, nargs="?", const=RECORDED)
    parser.add_argument("--counted", action="store_true", help="count alone, and keep recorded times")
    parser.add_argument("--busy", action="store_true", help="time although other jobs run, and record that")
    args = parser.parse_args(arguments)
    here = load()
    if here["busy"] and not (args.busy or args.counted):
        sys.exit(f"other jobs run here (load {here['load']} on {here['cores']} cores): wait, or pass --counted")
    facts = {**made(torch.device("cpu")), **here, "threads": 1}
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    found["counted"] = {"made": facts, "unit_s": UNIT_S, "cases": counted()}
    if not args.counted:
        found["timed"] = {"made": facts, "cases": timed()}
    print(json.dumps(found, indent=1))
    if args.record is not None:
        write_json(args.record, found)


def counted() -> list[dict[str, Any]]:
    """Return steps of blocks that sleep, in units of a block's forward pass, beside the formula's."""
    options = {"blocks": 1, "rows": 8, "width": 4, "steps": 3, "unit_s": UNIT_S}
    found = [case for stages in (2, 4) for case in _run(stages, **options)]
    return [{**case, "formula": formula(case)} for case in found]


def timed() -> list[dict[str, Any]]:
    """Return steps of blocks that compute."""
    groups = [stages for stages in (2, 4, 8) if stages <= max(2, cores() // 2)]
    return [case for stages in groups for case in _run(stages, blocks=2, rows=256, width=512, steps=7)]


def _run(stages: int, **options: Any) -> list[dict[str, Any]]:
    """Run all methods; torch's 1F1B takes at least as many micro-batches as stages."""
    pairs = [(M, m) for M in MICRO_BATCHES for m in METHODS if m != "1f1b" or stages <= M]
    cases = [{"method": m, "micro_batches": M, **options} for M, m in pairs]
    return run_group(_WORKER, stages, cases, separate=False)


def formula(case: dict[str, Any]) -> int:
    """Return the longest way through a step with a reverse pass of two units.

    All stages pull at the same time: (M + S - 1) n + 2 M n, and one more M n if blocks are computed again. A pipeline
    waits on the way back too: 3 (M + S - 1) n.
    """
    M, S, n = case["micro_batches"], case["stages"], case["blocks"]
    up: int = (M + S - 1) * n
    back = {"staged": 2 * M * n, "staged_recompute": 3 * M * n}
    return up + back.get(case["method"], 2 * up)


if __name__ == "__main__":
    main()
