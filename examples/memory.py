"""Memory: one tangent at a time, logits in blocks, the head's gradients last. The estimate stays the same.

On a GPU the peak of every setting is printed; on a CPU, what backprop would keep for its backward pass:

    python examples/memory.py
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import splitfg
from splitfg.diagnosis import saved_bytes


def network(depth: int, width: int, outputs: int, block: int, device: torch.device) -> splitfg.Split:
    """A deep trunk under a head with many outputs; ``block`` logits exist at a time."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    trunk, last = nn.Sequential(*layers).to(device), nn.Linear(width, outputs).to(device)
    return splitfg.Split(trunk, splitfg.LinearHead(last, block=block))


def measured(estimator: splitfg.Estimator, split: splitfg.Split, x: Tensor, y: Tensor) -> tuple[splitfg.Estimate, str]:
    """An estimate from seed 0, with its time and, on a GPU, its peak memory."""
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    estimate = estimator(split, x, y, generator=torch.Generator(x.device).manual_seed(0))
    if x.is_cuda:
        torch.cuda.synchronize()
    cost = f"{1e3 * (time.perf_counter() - began):7.0f} ms"
    return estimate, cost + (f"  peak {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB" if x.is_cuda else "")


def main(depth: int, width: int, outputs: int, rows: int) -> dict[str, splitfg.Estimate]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(rows, width, device=device)
    y = torch.randint(0, outputs, (rows,), device=device)
    settings = {
        "all tangents at once": (splitfg.SplitFG(K=4), 2**24),
        "one by one": (splitfg.SplitFG(K=4, engine=splitfg.ForwardMode(chunk=1)), 2**24),
        "one by one, lean, blocks": (
            splitfg.SplitFG(K=4, engine=splitfg.ForwardMode(chunk=1), lean=True, micro_batch=rows // 2),
            2**18,
        ),
    }
    estimates = {}
    for name, (estimator, block) in settings.items():
        split = network(depth, width, outputs, block, device)
        estimates[name], cost = measured(estimator, split, x, y)
        print(f"{name:26} {cost}")

    first, *others = estimates.values()
    for other in others:  # the same tangents, so the same estimate up to rounding
        torch.testing.assert_close(other.grads, first.grads, rtol=1e-3, atol=1e-5)
    split = network(depth, width, outputs, 2**24, device)
    print(f"backprop would keep {saved_bytes(split, x) / 2**20:.1f} MiB of the trunk for its backward pass")
    return estimates


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small network")
    smoke = parser.parse_args().smoke
    main(*((4, 32, 100, 32) if smoke else (32, 256, 10_000, 256)))
