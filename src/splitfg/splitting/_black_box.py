"""Trunks that are plain callables: a device, an inference runtime, a vendor's binary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.types import Params


class ForwardOnlyTrunk(nn.Module):
    """Base class of trunks that can be run and measured, but not differentiated; two runs may differ by noise."""


class BlackBoxTrunk(ForwardOnlyTrunk):
    """A trunk h = run(θ, x) that can only be run forward.

    The module holds θ as parameters, so that optimizers and checkpoints find them. Estimate its gradient with
    :class:`~splitfg.CentralDifference` or :class:`~splitfg.OneSidedDifference`, which call ``run`` at perturbed
    parameters and never differentiate it.

    Args:
        run: Function ``(params, *inputs) -> h``; h is a tensor or an array. It may leave torch, quantise, add noise, or
            control hardware. It receives copies of the parameters.
        params: Initial parameters (tensors or arrays) by name, without dots; copied.

    Raises:
        SplitError: If an argument has the wrong type, or a name is unusable.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> device = lambda params, x: torch.tanh(x @ params["w"])  # stands for hardware
        >>> trunk = splitfg.BlackBoxTrunk(device, {"w": torch.randn(4, 8)})
        >>> network = splitfg.Split(trunk, splitfg.LinearHead(nn.Linear(8, 3)))
        >>> estimator = splitfg.SplitFG(K=2, engine=splitfg.CentralDifference())
        >>> x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> estimator(network, x, y, generator=torch.Generator()).grads["trunk.w"].shape
        torch.Size([4, 8])
    """

    outside: ClassVar[tuple[str, ...]] = ("_run",)
    """Attributes that passes leave as they are: what ``run`` did cannot be undone."""

    def __init__(self, run: Callable[..., Any], params: Mapping[str, Any]) -> None:
        super().__init__()
        self._run = run
        raise_if(_argument_problems(run, params) or _name_problems(self, params))
        values = {name: torch.as_tensor(value).detach().clone() for name, value in params.items()}
        raise_if(_value_problems(values))
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *inputs: Any) -> Tensor:
        """Return h at the current parameters, in their dtype and on their device, without autograd."""
        with torch.no_grad():
            params = {name: p.detach().clone() for name, p in self.named_parameters()}
            like = next(iter(params.values()), torch.empty(0))
            try:
                h = self._run(params, *(v.clone() if isinstance(v, Tensor) else v for v in inputs))
            except Exception as error:
                error.add_note("BlackBoxTrunk calls run(params, *inputs): a dict of parameters, then the inputs")
                raise
            if not hasattr(h, "shape"):
                raise SplitError([f"the black box returns a {type(h).__name__}: return h alone, a tensor or an array"])
            return torch.as_tensor(h, dtype=like.dtype, device=like.device)


def _argument_problems(run: object, params: object) -> list[str]:
    found = []
    if not callable(run):
        found.append(f"run is a {type(run).__name__}: pass the function (params, *inputs) -> h as first argument")
    if not isinstance(params, Mapping):
        found.append(f"params is a {type(params).__name__}: pass a dict of initial parameters as second argument")
    return found


def _name_problems(trunk: nn.Module, names: Iterable[str]) -> list[str]:
    found = [f"parameter name {name!r} contains a dot: choose a name without" for name in names if "." in name]
    taken = [name for name in names if not name or hasattr(trunk, name)]
    return found + [f"parameter name {name!r} is an attribute of nn.Module: choose another name" for name in taken]


def _value_problems(values: Params) -> list[str]:
    return [
        f"parameter {name!r} is {value.dtype}: pass floating-point values"
        for name, value in values.items()
        if not value.is_floating_point()
    ]
