"""One of several processes that hold the stages of a trunk; the first prints the time of each case, as JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from splitfg import LinearHead, ParallelPull, Split
from splitfg.distributed import Ranks, StagedPull, connect

CLASSES = 10


@dataclass(frozen=True)
class Case:
    """What is measured: a method on a chain of blocks.

    Attributes:
        method: ``staged``, ``staged_recompute``, ``gpipe`` or ``1f1b``.
        blocks: Blocks of every stage.
        micro_batches: Parts of the batch.
        rows: Rows of the batch.
        width: Of the stream.
        unit_s: Seconds that a block sleeps in the forward pass of a micro-batch, twice that in a reverse pass; zero for
            blocks that compute.
    """

    method: str
    blocks: int
    micro_batches: int
    rows: int
    width: int
    steps: int
    unit_s: float = 0.0


class Sleep(torch.autograd.Function):
    """The identity, which takes a time in proportion to its rows, and twice that in reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row_s: float) -> Tensor:
        ctx.row_s = row_s
        time.sleep(row_s * len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.row_s * len(delta))
        return delta, None


class Block(nn.Module):
    """Two layers with four times the width between them; or a small one that sleeps."""

    def __init__(self, width: int, row_s: float) -> None:
        super().__init__()
        inner = width if row_s else 4 * width
        self.layers = nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, width))
        self.row_s = row_s

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y: Tensor = self.layers(x)
        slept: Tensor = Sleep.apply(y, self.row_s) if self.row_s else y  # type: ignore[no-untyped-call]
        return slept


def main() -> None:
    ranks = connect(device="cpu", timeout=timedelta(minutes=5))
    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        case = Case(**json.loads(text))
        found = measure(case, ranks)
        if ranks.is_first:
            print(json.dumps(asdict(case) | {"stages": ranks.size} | found), flush=True)
    dist.barrier()


def measure(case: Case, ranks: Ranks) -> dict[str, float]:
    """Return the median milliseconds of a step, and the same in units of a block's forward pass if blocks sleep."""
    step = make_step(case, ranks)
    step()
    times = []
    for _ in range(case.steps):
        dist.barrier()
        begin = time.perf_counter()
        step()
        dist.barrier()  # a step ends when all stages have their gradients
        times.append(time.perf_counter() - begin)
    found = {"step_ms": round(1e3 * statistics.median(times), 2)}
    return found | ({"units": round(min(times) / case.unit_s, 2)} if case.unit_s else {})


def make_step(case: Case, ranks: Ranks) -> Callable[[], object]:
    """Return a function that computes all gradients of a batch once."""
    torch.manual_seed(0)
    row_s = case.unit_s * case.micro_batches / case.rows
    trunk = nn.Sequential(*(Block(case.width, row_s) for _ in range(case.blocks * ranks.size)))
    head = nn.Linear(case.width, CLASSES)
    x, y = torch.randn(case.rows, case.width), torch.randint(0, CLASSES, (case.rows,))
    if case.method.startswith("staged"):
        again = case.method == "staged_recompute"
        estimator = StagedPull(ParallelPull(), ranks, micro_batches=case.micro_batches, recompute=again)
        split = Split(trunk, LinearHead(head), check=False)
        return lambda: estimator(split, x, y)
    return _pipeline(case, ranks, trunk, head, x, y)


def _pipeline(case: Case, ranks: Ranks, trunk: nn.Sequential, head: nn.Linear, x: Tensor, y: Tensor) -> Any:
    last, first = ranks.rank == ranks.size - 1, ranks.rank * case.blocks
    own = nn.Sequential(*trunk[first : first + case.blocks], *([head] if last else []))
    stage = pipelining.PipelineStage(own, ranks.rank, ranks.size, torch.device("cpu"))
    kind = pipelining.ScheduleGPipe if case.method == "gpipe" else pipelining.Schedule1F1B
    schedule = kind(stage, n_microbatches=case.micro_batches, loss_fn=nn.functional.cross_entropy)

    def step() -> None:
        own.zero_grad()
        inputs = (x,) if ranks.is_first else ()
        schedule.step(*inputs, **({"target": y} if last else {}))

    return step


if __name__ == "__main__":
    main()
