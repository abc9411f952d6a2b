"""Blocks on several processes: a pipeline without a bubble on the way back.

Trains a deep network on made-up data with its blocks divided between processes, one pull a step, and compares the first
gradient with backpropagation:

    torchrun --nproc-per-node 4 examples/stages.py
    python examples/stages.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import splitfg
from splitfg.distributed import Ranks, StagedPull, connect
from splitfg.models import TabM


def join() -> Ranks:
    if "RANK" in os.environ:
        return connect(device="cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Ranks()


def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points in eight dimensions, labelled by the signs of two products."""
    x = torch.randn(rows, 8, generator=generator)
    return x, 2 * (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] * x[:, 3] > 0).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    steps = 5 if parser.parse_args().smoke else 400
    ranks = join()
    drawn = torch.Generator().manual_seed(0)
    trunk = TabM(8, width=64, layers=8, members=2, generator=drawn)
    torch.manual_seed(0)
    network = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(64, 4)))

    x, y = batch(64, drawn)
    whole = splitfg.Backprop()(network, x, y, generator=drawn)
    exact = StagedPull(splitfg.ParallelPull(feedback=splitfg.feedback.RandomMaps(), pulls=8), ranks, micro_batches=4)
    found = exact(network, x, y, generator=drawn)
    far = max(float((whole.grads[n] - g).abs().max()) for n, g in found.grads.items())

    staged = StagedPull(splitfg.ParallelPull(feedback=splitfg.feedback.RandomMaps(), pulls=2), ranks, micro_batches=4)
    own = [network.model.get_parameter(name) for name in staged.owned(network)]
    learner = splitfg.GradientLearner(network, staged, torch.optim.Adam(own, lr=1e-3), max_norm=None)
    losses = [learner.step(*batch(256, drawn), generator=drawn).loss.item() for _ in range(steps)]
    staged.collect(network)
    if ranks.is_first:
        print(f"eight pulls: at most {far:.1e} from backpropagation, over {len(own)} tensors of the first stage")
        print(f"two pulls: loss {losses[0]:.3f}, after {steps} steps {losses[-1]:.3f}; processes: {ranks.size}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
