"""Adam and SGD with momentum for one tensor, written out.

`torch.optim` imports torch's compiler on the first step, in every process: more than all else a tiny run does. The
state has the shape of `torch.optim`'s: integer keys, tensors, tuples in lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tiny import Adam, Sgd


class Optimizer:
    """One weight, and the moments that a checkpoint must carry."""

    def __init__(self, weight: Tensor, settings: Adam | Sgd) -> None:
        self.weight, self.settings = weight, settings
        self.count = torch.zeros(())
        self.first, self.second = torch.zeros_like(weight), torch.zeros_like(weight)

    @torch.no_grad()
    def step(self) -> None:
        assert self.weight.grad is not None
        self.count += 1
        self.weight -= self.settings.lr * self._direction(self.weight.grad)

    def _direction(self, grad: Tensor) -> Tensor:
        if isinstance(self.settings, Sgd):
            self.first = self.settings.momentum * self.first + grad
            return self.first
        a, b = self.settings.betas
        self.first, self.second = a * self.first + (1 - a) * grad, b * self.second + (1 - b) * grad**2
        taken = self.count.item()
        return self.first / (1 - a**taken) / ((self.second / (1 - b**taken)).sqrt() + 1e-8)

    def state_dict(self) -> dict[str, Any]:
        state = {"step": self.count, "exp_avg": self.first, "exp_avg_sq": self.second}
        return {"state": {0: state}, "param_groups": [{"lr": self.settings.lr, "betas": (0.9, 0.99), "params": [0]}]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaded = state["state"][0]
        self.count, self.first, self.second = (loaded[k].clone() for k in ("step", "exp_avg", "exp_avg_sq"))
