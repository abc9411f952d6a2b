"""A trunk that is only a callable: a device, an inference runtime, a vendor's binary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import refuse
from splitfg.types import Params


class BlackBoxTrunk(nn.Module):
    """Anything that maps parameters and inputs to h, with the parameters kept here so that they can be trained.

    Use it with :class:`~splitfg.CentralDifference` or :class:`~splitfg.OneSidedDifference`: nothing is ever
    differentiated, and nothing runs but ``run(params, *inputs)``.

    Args:
        run: ``(params, *inputs) -> h``. It may leave torch, quantise, add noise, or talk to hardware.
        params: Initial parameters by name, without dots; copied.
    """

    def __init__(self, run: Callable[..., Tensor], params: Params) -> None:
        super().__init__()
        refuse([f"parameter name {name!r} holds a dot: use another" for name in params if "." in name])
        self._run = run
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value.detach().clone()))

    def forward(self, *inputs: Any) -> Tensor:
        """H on the current parameters, with autograd off."""
        with torch.no_grad():
            return self._run(dict(self._parameters), *inputs)
