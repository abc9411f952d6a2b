"""Your own training loop: an estimator takes the place of ``loss.backward()``.

Trains a small network on scikit-learn's digits with five methods, from the same start and on the same batches:

    python examples/own_loop.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import splitfg
from splitfg.estimators import LearningEstimator

METHODS: dict[str, tuple[splitfg.Estimator, float]] = {
    "frozen trunk": (splitfg.FrozenTrunk(), 1.0),
    "Split-FG, K = 8": (splitfg.SplitFG(K=8), 0.3),
    "activity tangents, K = 8": (splitfg.ActivityFG(K=8), 1.0),
    "learned feedback": (splitfg.LearnedFeedback(), 1.0),
    "backprop": (splitfg.Backprop(), 1.0),
}
"""Every method with its trunk step scale rho: noisy estimates need smaller steps."""


def load() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)


def train(estimator: splitfg.Estimator, rho: float, steps: int) -> float:
    """Train from seed 0 and return the held-out accuracy."""
    x, y = load()
    held_out = slice(1400, None)
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    network = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(64, 10)))
    optimizer = torch.optim.Adam(splitfg.parameter_groups(network, lr=3e-3, rho=rho))
    tangents, batches = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)

    for _ in range(steps):
        rows = torch.randint(0, 1400, (128,), generator=batches)
        estimate = estimator(network, x[rows], y[rows], generator=tangents)
        if isinstance(estimator, LearningEstimator):
            estimator.update_state(network, estimate)  # its maps learn from this step's measurement
        estimate = splitfg.clip(estimate, max_norm=1.0)
        splitfg.write_grads(network.model, estimate)
        optimizer.step()

    return (network.predict(x[held_out]).argmax(1) == y[held_out]).float().mean().item()


def main(steps: int) -> dict[str, float]:
    accuracies = {name: train(estimator, rho, steps) for name, (estimator, rho) in METHODS.items()}
    for name, accuracy in accuracies.items():
        print(f"{name:26} {accuracy:6.1%}")
    return accuracies


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    main(steps=20 if parser.parse_args().smoke else 400)
