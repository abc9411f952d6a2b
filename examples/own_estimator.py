"""Your own estimator: a tangent on one random parameter of the trunk at a time.

python examples/own_estimator.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import jvp

import splitfg
from splitfg import Estimate, Split, Stats
from splitfg.splitting.checks import check_batch, check_loss
from splitfg.testing import check_estimator
from splitfg.types import Inputs, Target


@dataclass(frozen=True)
class OneParameterFG:
    """Exact head; one Gaussian tangent on one parameter of the trunk, chosen at random.

    Each of n parameters is chosen with probability 1/n and its forward gradient is multiplied by n, so

        E[ĝ_p] = (1/n) · n · E[<g_p, v> v] = g_p:

    unbiased, with one Jacobian-vector product an estimate.
    """

    def __call__(self, split: Split, x: Inputs, y: Target, *, generator: torch.Generator) -> Estimate:
        """Estimate the gradient; changes nothing but the generator."""
        check_batch(split, x, y, generator)  # raises SplitError with every problem of network and batch
        with torch.no_grad():
            trunk, f = split.trunk_params(), split.trunk_function(x)
            names = sorted(trunk)
            chosen = names[int(torch.randint(len(names), (), generator=generator))]
            p = trunk[chosen]
            v = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            h, dh = jvp(lambda moved: f({**trunk, chosen: moved}), (p,), (v,))
            exact = split.head(h, y)
            score = (exact.u * dh).sum()
            check_loss(exact.loss, score)  # raises NonFiniteError
            grads = {name: torch.zeros_like(value) for name, value in trunk.items()}
            grads[chosen] = len(names) * score * v
            grads |= split.named_head_grads(exact.grads)
            return Estimate(exact.loss, grads, Stats(jvps=1, scores=score.reshape(1)))


def main(draws: int) -> list[float]:
    # purity, seeding, names and shapes, honest statistics, early errors, and unbiasedness over a fixed number of draws
    check_estimator(OneParameterFG, draws=draws)
    print(f"OneParameterFG keeps the contract; its mean over {draws} draws agrees with backprop")

    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    split = Split(trunk, splitfg.LinearHead(nn.Linear(32, 3)))
    x, y = torch.randn(64, 6), torch.randint(0, 3, (64,))
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(splitfg.parameter_groups(split, lr=1e-2, rho=0.1))
    learner = splitfg.GradientLearner(split, OneParameterFG(), optimizer)  # fits wherever an estimator fits
    losses = [float(learner.step(x, y, generator=generator).loss) for _ in range(draws // 10)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="fewer draws")
    main(draws=400 if parser.parse_args().smoke else 4000)
