"""``python -m benchmarks.stages``: blocks on several processes, the staged pull beside torch's pipelines.

``--counted`` counts the longest way through a step in units of a block's forward pass, with blocks that sleep: other
jobs on the machine hardly matter. ``--timed`` times blocks that compute, which needs a quiet machine with a core for
every stage: a busy one is an error unless ``--busy`` is passed. Both by default. ``--record`` writes what this run
measures to ``benchmarks/stages.json`` or to the file that it names, after every case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._machine import cores, run_group
from benchmarks._record import Record, machine, options

RECORDED = Path(__file__).parent / "stages.json"
METHODS = ("staged", "staged_recompute", "gpipe", "1f1b")
MICRO_BATCHES = (1, 4, 8)
UNIT_S = 0.04
_WORKER = "benchmarks._stage_worker"
_PARTS = {"counted": "blocks that sleep", "timed": "blocks that compute"}


def main(arguments: Sequence[str] | None = None) -> None:
    args = options("benchmarks.stages", __doc__, RECORDED, _PARTS, arguments)
    record = Record(args.record, machine(busy=args.busy or args.parts == ["counted"]))
    if "counted" in args.parts:
        for case in counted():
            record.add("counted", case)
    if "timed" in args.parts:
        for case in timed():
            record.add("timed", case)
    record.finish()


def counted() -> Iterator[dict[str, Any]]:
    """Yield steps of blocks that sleep, in units of a block's forward pass, beside the formula's."""
    options = {"blocks": 1, "rows": 8, "width": 4, "steps": 3, "unit_s": UNIT_S}
    for stages in (2, 4):
        for case in _run(stages, **options):
            yield {**case, "formula": formula(case)}


def timed() -> Iterator[dict[str, Any]]:
    """Yield steps of blocks that compute."""
    for stages in (2, 4, 8):
        if stages <= max(2, cores() // 2):
            yield from _run(stages, blocks=2, rows=256, width=512, steps=5)


def _run(stages: int, **options: Any) -> Iterator[dict[str, Any]]:
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
