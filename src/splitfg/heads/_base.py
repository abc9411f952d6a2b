"""What every head offers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError
from splitfg.heads._losses import CrossEntropy, OutputLoss
from splitfg.types import HeadGradient, Params


class Head(nn.Module, ABC):
    """Maps h to the loss, and gives the loss, u = dL/dh and its own gradient back without touching the trunk.

    ``head(h, target)`` returns a :class:`~splitfg.types.HeadGradient` computed on the current parameters,
    with no autograd tape left behind. Subclasses fill in the abstract methods, and ``_loss_and_u`` if it can be
    cheaper than all of it.

    Args:
        loss: The loss on the outputs.
    """

    def __init__(self, loss: OutputLoss) -> None:
        super().__init__()
        self.output_loss = loss

    @property
    @abstractmethod
    def in_features(self) -> int | None:
        """The width of h it reads; ``None`` where only running it can tell."""

    @property
    @abstractmethod
    def out_features(self) -> int | None:
        """How many outputs it has; ``None`` where only running it can tell."""

    @property
    @abstractmethod
    def reverse_mode(self) -> bool:
        """Whether its own gradient takes a reverse-mode pass (confined to the head)."""

    @abstractmethod
    def outputs(self, params: Params, h: Tensor) -> Tensor:
        """The outputs of shape ``(..., C)`` for h of shape ``(..., d)``, as a function of the head's parameters."""

    @abstractmethod
    def _exact(self, h: Tensor, target: Tensor, normaliser: Tensor) -> HeadGradient:
        """Loss, u and gradients, for the given normaliser N."""

    def _loss_and_u(self, h: Tensor, target: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and u alone, for the given normaliser N; to be overridden where that takes less."""
        exact = self._exact(h, target, normaliser)
        return exact.loss, exact.u

    def forward(self, h: Tensor, target: Tensor, normaliser: Tensor | None = None) -> HeadGradient:
        """The loss, u = dL/dh and the gradient of the head's parameters.

        Args:
            h: Representation, shape ``(..., d)``.
            target: Class indices ``(...)`` or values ``(..., C)``.
            normaliser: N of the whole batch, where this is only a part of it.
        """
        with torch.no_grad():
            return self._exact(*self._prepared(h, target, normaliser))

    def loss_and_u(self, h: Tensor, target: Tensor, normaliser: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The loss and u = dL/dh, for :meth:`forward`'s arguments, without a gradient as large as the parameters."""
        with torch.no_grad():
            return self._loss_and_u(*self._prepared(h, target, normaliser))

    def _prepared(self, h: Tensor, target: Tensor, normaliser: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        h = h.detach()
        _require_a_row_each(h, target)
        return h, target, normaliser if normaliser is not None else self.normaliser(h, target)

    def predict(self, h: Tensor) -> Tensor:
        """The outputs on the current parameters."""
        return self.outputs(self.params(), h)

    def loss(self, params: Params, h: Tensor, target: Tensor, normaliser: Tensor) -> Tensor:
        """The loss as a differentiable function of the parameters and h."""
        _require_a_row_each(h, target)
        outputs = self.outputs(params, h)
        width = outputs.shape[-1]
        rows = self.output_loss.fold(target, width)
        return self.output_loss.summed(outputs.reshape(-1, width), rows) / normaliser.to(outputs.dtype)

    def params(self) -> Params:
        """The head's current parameters, detached, by its own names."""
        return {name: p.detach() for name, p in self.named_parameters()}

    def output_shape(self, h: Tensor) -> tuple[int, ...]:
        """The shape of the outputs for this h, found by running one sample where it is not known."""
        if self.out_features is not None:
            return (*h.shape[:-1], self.out_features)
        with torch.no_grad():
            return (h.shape[0], *self.predict(h.detach()[:1]).shape[1:])

    def normaliser(self, h: Tensor, target: Tensor) -> Tensor:
        """N for this target; adds up over the parts of a batch."""
        return self.output_loss.normaliser(target, self.output_shape(h)[-1])

    def problems(self, h: Tensor, target: Tensor) -> list[str]:
        """What is wrong with this h and target for this head, all of it.

        Args:
            h: Representation of a batch, or of a part of it.
            target: Target of the whole batch.
        """
        reads = self.in_features
        if reads is not None and (h.ndim < 2 or h.shape[-1] != reads):
            return [
                f"the trunk gives h of shape {tuple(h.shape)}, but the head reads (..., {reads}):"
                " make the head's input width equal to the width of h"
            ]
        try:
            _, *inner, width = self.output_shape(h)
        except (RuntimeError, ValueError, TypeError) as error:
            return [f"the head cannot read h of shape {tuple(h.shape)} ({error}): make the two fit"]
        loss, leading = self.output_loss, (target.shape[0], *inner)
        return loss.shape_problems(leading, width, target) + loss.value_problems(width, target)


def _require_a_row_each(h: Tensor, target: Tensor) -> None:
    rows, samples = h.shape[0], target.shape[0]
    if rows != samples:
        raise SplitError([f"the trunk gives h of {rows} rows for {samples} samples: every sample needs its own row"])


class OpaqueHead(Head, ABC):
    """A head whose widths only running it can tell.

    Args:
        loss: The loss on the outputs; cross-entropy by default.
    """

    def __init__(self, loss: OutputLoss | None) -> None:
        super().__init__(loss if loss is not None else CrossEntropy())

    @property
    def in_features(self) -> None:
        """Not known."""
        return

    @property
    def out_features(self) -> None:
        """Not known."""
        return
