"""Forward-only hardware: train a device that can only be run and measured.

The device below computes in NumPy, reads out 8 bits and adds noise; no autograd could follow it. The library perturbs
its parameters, measures h, and estimates the gradient from finite differences:

    python examples/hardware.py
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import splitfg

BITS = 8


class Device:
    """Two analog layers. It counts its runs, which on hardware are what training costs."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.runs = 0

    def __call__(self, params: dict[str, Tensor], x: Tensor) -> np.ndarray:
        self.runs += 1
        hidden = np.tanh(x.numpy() @ params["w1"].numpy().T)
        h = np.tanh(hidden @ params["w2"].numpy().T)
        levels = 2 ** (BITS - 1)
        return np.round(h * levels) / levels + self.rng.normal(scale=1e-3, size=h.shape)


def main(steps: int) -> float:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    generator, device = torch.Generator().manual_seed(0), Device()
    torch.manual_seed(0)

    start = {
        "w1": torch.randn(48, 64, generator=generator) / 8,
        "w2": torch.randn(32, 48, generator=generator) / 7,
    }
    trunk = splitfg.BlackBoxTrunk(device, start)
    network = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(32, 10)))
    # the relative precision of one measurement decides how far the parameters are moved
    engine = splitfg.CentralDifference(noise=2.0**-BITS)
    estimator = splitfg.SplitFG(K=8, engine=engine)
    optimizer = torch.optim.Adam(splitfg.parameter_groups(network, lr=3e-3, rho=0.3))

    for step in range(steps):
        rows = torch.randint(0, 1400, (128,), generator=generator)
        estimate = estimator(network, x[rows], y[rows], generator=generator)
        splitfg.write_grads(network.model, estimate)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4}  loss {float(estimate.loss):.3f}  runs of the device {device.runs}")

    accuracy = (network.predict(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print(f"held-out accuracy {accuracy:.1%} after {device.runs} runs of the device")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    main(steps=30 if parser.parse_args().smoke else 600)
