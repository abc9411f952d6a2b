"""A GPT without a backward pass through its trunk: the direct path against tangents and a frozen trunk.

Characters of the Python language reference, which ships with Python:

    python examples/gpt_direct_path.py
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics

import torch
from torch import Tensor

import splitfg
from splitfg.models import GPT, GPTConfig
from splitfg.recipes import Adam

CONTEXT, ROWS = 32, 16
INCLUDE, EXCLUDE = splitfg.Tied.INCLUDE, splitfg.Tied.EXCLUDE


def tokens() -> tuple[Tensor, int]:
    """The text as numbers, and how many different characters it has."""
    text = "\n".join(topics[name] for name in sorted(topics))
    known = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([known[character] for character in text]), len(known)


def batch(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(0, len(data) - CONTEXT - 1, (ROWS, 1), generator=generator)
    windows = data[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


def train(estimator: splitfg.Estimator, rho: float, steps: int, tied: splitfg.Tied = INCLUDE) -> float:
    """Train from seed 0 and return the mean loss over the last tenth of the steps."""
    data, vocab = tokens()
    generator = torch.Generator().manual_seed(0)
    gpt = GPT(GPTConfig(layers=2, width=64, heads=2, context=CONTEXT, vocab=vocab), generator=generator)
    # the head's weight is the trunk's token table; INCLUDE trains it as lookup too, EXCLUDE as readout alone
    network = splitfg.Split(gpt, splitfg.LinearHead(gpt.tied_linear()), tied=tied)
    schedule = splitfg.CosineWithWarmup(total=steps, warmup=steps // 20)
    learner = splitfg.GradientLearner(network, estimator, Adam(lr=1e-2).build(network, rho=rho), schedule=schedule)
    losses = [float(learner.step(*batch(data, generator), generator=generator).loss) for _ in range(steps)]
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def main(steps: int) -> dict[str, float]:
    methods = {
        "frozen trunk": (splitfg.FrozenTrunk(), 1.0, EXCLUDE),
        "Split-FG, K = 4": (splitfg.SplitFG(K=4), 0.1, EXCLUDE),
        "direct path": (splitfg.DirectPath(), 0.1, INCLUDE),
        "direct path, learned maps": (splitfg.DirectPath(feedback=splitfg.MeanJacobian()), 0.1, INCLUDE),
        "backprop": (splitfg.Backprop(), 0.3, INCLUDE),
    }
    losses = {name: train(estimator, rho, steps, tied) for name, (estimator, rho, tied) in methods.items()}
    for name, loss in losses.items():
        print(f"{name:26} loss {loss:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    main(steps=20 if parser.parse_args().smoke else 300)
