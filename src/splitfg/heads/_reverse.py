"""A nonlinear head: reverse mode, confined to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from splitfg.heads._base import OpaqueHead
from splitfg.heads._losses import OutputLoss
from splitfg.numerics import each_its_own
from splitfg.splitting import call, places_of
from splitfg.types import HeadGradient, Params


class ReverseModeHead(OpaqueHead):
    """Any module as head: its gradient and u = dL/dh by reverse mode from the loss back to h, and no further.

    Args:
        module: Maps h to the outputs; kept and shared, not copied.
        loss: The loss on the outputs; cross-entropy by default.
    """

    def __init__(self, module: nn.Module, loss: OutputLoss | None = None) -> None:
        super().__init__(loss)
        self.module, self._places = module, places_of(module)

    @property
    def reverse_mode(self) -> bool:
        """Yes, inside the head."""
        return True

    def outputs(self, params: Params, h: Tensor) -> Tensor:
        """The module's outputs."""
        own = {name.removeprefix("module."): p for name, p in params.items()}
        outputs: Tensor = call(self.module, own, (h.clone(),), places=self._places)  # it may work in place
        return outputs

    def _exact(self, h: Tensor, target: Tensor, normaliser: Tensor) -> HeadGradient:
        def loss(params: Params, h: Tensor) -> Tensor:
            return self.loss(params, h, target, normaliser)

        (grads, u), value = torch.func.grad_and_value(loss, argnums=(0, 1))(self.params(), h)
        return HeadGradient(value, u, dict(zip(grads, each_its_own(grads.values()), strict=True)))

    def _loss_and_u(self, h: Tensor, target: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        def loss(h: Tensor) -> Tensor:
            return self.loss(self.params(), h, target, normaliser)

        u, value = torch.func.grad_and_value(loss)(h)
        return value, u
