"""One of several processes that train the same model; the first prints what each case took, as JSON."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from splitfg import GradientLearner, LinearHead, Split, SplitFG, Tied
from splitfg.distributed import DistributedEstimator, LocalHeads, connect
from splitfg.models import GPT, PRESETS, GPTConfig

K = 8
MODELS = {"small8": PRESETS["small8"], "tiny": GPTConfig(layers=4, width=128, heads=4, context=64, vocab=1000)}
_NEVER = 10**9


@dataclass(frozen=True)
class Case:
    """What is measured: a method on a model, with a limit on the loopback device's rate, or none.

    ``counted``: the loopback device counts the bytes of this group alone, in a network namespace of its own.
    """

    model: str
    method: str
    rows: int
    length: int
    steps: int
    rate: str | None = None
    counted: bool = True


def main() -> None:
    ranks = connect(device="cpu", timeout=timedelta(minutes=3))
    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        case = Case(**json.loads(text))
        if ranks.is_first and case.counted:
            _limit(case.rate)
        dist.barrier()
        found = measure(case, ranks.size)
        if ranks.is_first:
            kept = {name: value for name, value in asdict(case).items() if name != "counted"}
            print(json.dumps(kept | {"ranks": ranks.size} | found), flush=True)
    dist.barrier()


def measure(case: Case, ranks: int) -> dict[str, Any]:
    """Return the milliseconds of a step, and its bytes: handed to the process group, and on the wire."""
    step = _step(case)
    for _ in range(2):
        step()
    times, busy, wire = [], [], _wire() if case.counted else 0
    for _ in range(case.steps):
        begin, began = time.perf_counter(), time.process_time()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
        busy.append(1e3 * (time.process_time() - began))
    sent = round((_wire() - wire) / case.steps / ranks) if case.counted else None
    with HandedBytes() as handed:
        step()
    bytes_ = {"wire_bytes": sent, "group_bytes": handed.count, "messages": handed.messages}
    return {"step_ms": round(statistics.median(times), 2), "cpu_ms": round(statistics.median(busy), 2), **bytes_}


def _step(case: Case) -> Callable[[], object]:
    g = torch.Generator().manual_seed(0)
    trunk = GPT(MODELS[case.model], generator=g)
    split = Split(trunk, LinearHead(trunk.tied_linear()), tied=Tied.EXCLUDE)
    own = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, MODELS[case.model].vocab, (case.rows, case.length + 1), generator=own)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    optimizer = torch.optim.Adam(split.model.parameters(), lr=1e-5)
    if case.method.startswith("ddp"):
        return _ddp_step(split, x, y, optimizer, trunk_only=case.method == "ddp_trunk")
    local = case.method == "split_fg_local_heads"
    estimator = DistributedEstimator(SplitFG(K), reduce_head=not local, check_every=None)
    learner: Any = GradientLearner(split, estimator, optimizer, clip_apart=local)
    if local:
        learner = LocalHeads(learner, every=_NEVER)
    generator = torch.Generator().manual_seed(0)
    return lambda: learner.step(x, y, generator=generator)


def _ddp_step(split: Split, x: Any, y: Any, optimizer: torch.optim.Optimizer, *, trunk_only: bool) -> Any:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = split.model

        def forward(self, x: Any, y: Any) -> Any:
            return nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    if trunk_only:
        for name in split.head_params():
            split.model.get_parameter(name).requires_grad_(False)
    wrapped = DistributedDataParallel(Loss())

    def step() -> None:
        optimizer.zero_grad()
        wrapped(x, y).backward()
        nn.utils.clip_grad_norm_(split.model.parameters(), 1.0)
        optimizer.step()

    return step


class HandedBytes(TorchDispatchMode):
    """Counts the bytes that this process hands to its process groups, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count collective operations and run everything."""
        if func.namespace == "c10d" and "allreduce" in str(func):
            tensors = [t for t in pytree.tree_leaves(args[0]) if isinstance(t, torch.Tensor)]
            self.count += sum(t.numel() * t.element_size() for t in tensors)
            self.messages += 1
        return func(*args, **(kwargs or {}))


def _wire() -> int:
    """Bytes sent on the loopback device so far, by all processes of this network namespace, headers included."""
    dist.barrier()
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def _limit(rate: str | None) -> None:
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)
    if rate is not None:
        burst = ["burst", "128kb", "latency", "2s"]
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, *burst], check=True)


if __name__ == "__main__":
    main()
