"""A trunk that is only a callable: a device, an inference runtime, a vendor's binary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.types import Params


class BlackBoxTrunk(nn.Module):
    """Anything that maps parameters and inputs to h, with the parameters kept here so that they can be trained.

    Use it with :class:`~splitfg.CentralDifference` or :class:`~splitfg.OneSidedDifference`: nothing is ever
    differentiated, and nothing runs but ``run(params, *inputs)``.

    Args:
        run: ``(params, *inputs) -> h``, h a tensor or an array. It may leave torch, quantise, add noise, or talk to
            hardware; what it is handed are copies of the parameters.
        params: Initial parameters by name, without dots, tensors or arrays; copied.
    """

    def __init__(self, run: Callable[..., Any], params: Mapping[str, Any]) -> None:
        super().__init__()
        self._run = run
        raise_if(_argument_problems(run, params) or _name_problems(self, params))
        values = {name: torch.as_tensor(value).detach().clone() for name, value in params.items()}
        raise_if(_value_problems(values))
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *inputs: Any) -> Tensor:
        """H on the current parameters, in their dtype and on their device, with autograd off."""
        with torch.no_grad():
            params = {name: p.detach().clone() for name, p in self.named_parameters()}
            like = next(iter(params.values()), torch.empty(0))
            try:
                h = self._run(params, *inputs)
            except Exception as error:
                error.add_note("BlackBoxTrunk calls run(params, *inputs): parameters by name first, then the inputs")
                raise
            if not hasattr(h, "shape"):
                raise SplitError([f"the black box gives a {type(h).__name__}: return h alone, a tensor or an array"])
            return torch.as_tensor(h, dtype=like.dtype, device=like.device)


def _argument_problems(run: object, params: object) -> list[str]:
    found = []
    if not callable(run):
        found.append(f"run is a {type(run).__name__}: give the function (params, *inputs) -> h first")
    if not isinstance(params, Mapping):
        found.append(f"params is a {type(params).__name__}: give a dict of initial parameters by name second")
    return found


def _name_problems(trunk: nn.Module, names: Iterable[str]) -> list[str]:
    found = [f"parameter name {name!r} holds a dot: use another" for name in names if "." in name]
    taken = [name for name in names if not name or hasattr(trunk, name)]
    return found + [f"parameter name {name!r} is taken by the module itself: use another" for name in taken]


def _value_problems(values: Params) -> list[str]:
    return [
        f"parameter {name!r} is {value.dtype}: give floating-point numbers"
        for name, value in values.items()
        if not value.is_floating_point()
    ]
