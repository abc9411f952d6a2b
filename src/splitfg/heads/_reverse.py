"""Nonlinear heads, by reverse mode confined to the head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from splitfg.calling import Observed, call, places_of
from splitfg.errors import SplitError
from splitfg.heads._base import OpaqueHead
from splitfg.heads._output_loss import OutputLoss
from splitfg.numerics import each_its_own
from splitfg.types import HeadGradient, Params


class ReverseModeHead(OpaqueHead):
    """Any module as head: its exact gradient and u = dL/dh by reverse mode, from the loss back to h and no further.

    Args:
        module: Maps h to the outputs; shared, not copied.
        loss: Loss on the outputs; cross-entropy by default.

    Raises:
        SplitError: If ``module`` is not a module.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> head = splitfg.ReverseModeHead(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
        >>> head(torch.randn(16, 8), torch.randint(0, 3, (16,))).u.shape
        torch.Size([16, 8])
    """

    def __init__(self, module: nn.Module, loss: OutputLoss | None = None) -> None:
        super().__init__(loss)
        if not isinstance(module, nn.Module):
            raise SplitError(
                [f"module must be an nn.Module, got {type(module).__name__}: use ProbedHead for a function"]
            )
        self.module, self._places, self.observed = module, places_of(module), Observed()

    @property
    def reverse_mode(self) -> bool:
        """``True``: inside the head."""
        return True

    def outputs(self, params: Params, h: Tensor) -> Tensor:
        """Run the module."""
        own = {name.removeprefix("module."): p for name, p in params.items()}
        outputs: Tensor = call(
            self.module,
            own,
            (h.clone(),),  # the module may write to its input
            places=self._places,
            observed=self.observed,
        )
        return outputs

    def _exact(self, h: Tensor, target: Tensor, normaliser: Tensor) -> HeadGradient:
        every, trained = self.params(), self.trained_params()
        if not trained:
            return HeadGradient(*self._loss_and_u(h, target, normaliser), {})

        def loss(moved: Params) -> Tensor:
            own = {name: p for name, p in moved.items() if name != _H}
            return self.loss({**every, **own}, moved[_H], target, normaliser)

        value, grads = _differentiated(loss, {_H: h, **trained})
        found = each_its_own(grads)
        return HeadGradient(value, found.pop(_H), found)

    def _loss_and_u(self, h: Tensor, target: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        def loss(moved: Params) -> Tensor:
            return self.loss(self.params(), moved[_H], target, normaliser)

        value, grads = _differentiated(loss, {_H: h})
        return value, grads[_H]


_H = ""  # among parameters, whose names are not empty


def _differentiated(f: Callable[[Params], Tensor], params: Params) -> tuple[Tensor, Params]:
    """Return f and its gradient; by autograd's tape if f calls functions that :mod:`torch.func` does not support."""
    try:
        grads, value = torch.func.grad_and_value(f)(params)
    except RuntimeError as error:
        if torch.compiler.is_compiling() or "functorch" not in str(error):
            raise
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        with torch.enable_grad():
            value = f(leaves)
        found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return value.detach(), dict(zip(leaves, found, strict=True))
    return value, grads
