"""The base class of heads."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from splitfg.errors import SplitError
from splitfg.heads._cross_entropy import CrossEntropy
from splitfg.heads._output_loss import OutputLoss
from splitfg.numerics import widened
from splitfg.types import HeadGradient, Params


class Head(nn.Module, ABC):
    """Maps h to the loss, and computes the loss, u = dL/dh and its own gradient without touching the trunk.

    ``head(h, target)`` returns a :class:`~splitfg.types.HeadGradient` at the current parameters and leaves no autograd
    graph behind. Subclasses implement the abstract methods, and ``_loss_and_u`` if it is cheaper without the gradient
    of the parameters.

    Args:
        loss: Loss on the outputs.
    """

    def __init__(self, loss: OutputLoss) -> None:
        super().__init__()
        self.output_loss = loss

    @property
    @abstractmethod
    def in_features(self) -> int | None:
        """Width of h; ``None`` if unknown before a forward pass."""

    @property
    @abstractmethod
    def out_features(self) -> int | None:
        """Number of outputs; ``None`` if unknown before a forward pass."""

    @property
    @abstractmethod
    def reverse_mode(self) -> bool:
        """Whether the head's gradient takes a reverse-mode pass, confined to the head."""

    @property
    def biased(self) -> bool:
        """Whether u and the head's gradient are approximate."""
        return False

    @abstractmethod
    def outputs(self, params: Params, h: Tensor) -> Tensor:
        """Compute the outputs ``(..., C)`` for h ``(..., d)`` as a function of the head's parameters."""

    @abstractmethod
    def _exact(self, h: Tensor, target: Tensor, normaliser: Tensor) -> HeadGradient:
        """Compute loss, u and gradients for the given normaliser N."""

    def _loss_and_u(self, h: Tensor, target: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        """Compute loss and u alone for the given normaliser N."""
        exact = self._exact(h, target, normaliser)
        return exact.loss, exact.u

    def forward(self, h: Tensor, target: Tensor, normaliser: Tensor | None = None) -> HeadGradient:
        """Compute the loss, u = dL/dh and the gradient of the head's parameters, without frozen ones.

        Args:
            h: Representation, shape ``(..., d)``.
            target: Class indices ``(...)`` or values ``(..., C)``.
            normaliser: N of the whole batch, if h is only a part of it.

        Raises:
            SplitError: If h and target have different numbers of rows.
        """
        with torch.no_grad():
            return self._exact(*self._prepared(h, target, normaliser))

    def loss_and_u(self, h: Tensor, target: Tensor, normaliser: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the loss and u = dL/dh alone; takes the arguments of :meth:`forward`."""
        with torch.no_grad():
            return self._loss_and_u(*self._prepared(h, target, normaliser))

    def _prepared(self, h: Tensor, target: Tensor, normaliser: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        h = h.detach()
        _require_a_row_each(h, target)
        return h, target, normaliser if normaliser is not None else self.normaliser(h, target)

    def predict(self, h: Tensor) -> Tensor:
        """Compute the outputs at the current parameters."""
        return self.outputs(self.params(), h)

    def loss(self, params: Params, h: Tensor, target: Tensor, normaliser: Tensor) -> Tensor:
        """Compute the loss as a differentiable function of the parameters and h, in float32 or wider."""
        _require_a_row_each(h, target)
        outputs = widened(self.outputs(params, h))
        width = outputs.shape[-1]
        rows = self.output_loss.fold(target, width)
        return self.output_loss.summed(outputs.reshape(-1, width), rows) / normaliser.to(outputs.dtype)

    def params(self) -> Params:
        """Return the head's parameters, detached, by its own names."""
        return {name: p.detach() for name, p in self.named_parameters()}

    def trained_params(self) -> Params:
        """Return the parameters that require a gradient, detached, by the head's own names."""
        return {name: p.detach() for name, p in self.named_parameters() if p.requires_grad}

    def output_shape(self, h: Tensor) -> tuple[int, ...]:
        """Return the shape of the outputs for this h; runs one sample if the number of outputs is unknown."""
        if self.out_features is not None:
            return (*h.shape[:-1], self.out_features)
        with torch.no_grad():
            return (h.shape[0], *self.predict(h.detach()[:1]).shape[1:])

    def normaliser(self, h: Tensor, target: Tensor) -> Tensor:
        """Compute N for this target; N of a batch is the sum over its parts."""
        return self.output_loss.normaliser(target, self.output_shape(h)[-1])

    def problems(self, h: Tensor, target: Tensor) -> list[str]:
        """List every problem of h and target for this head.

        Args:
            h: Representation of a batch, or of a part of it.
            target: Target of the whole batch.
        """
        reads = self.in_features
        if reads is not None and (h.ndim < 2 or h.shape[-1] != reads):
            return [
                f"the trunk returns h of shape {tuple(h.shape)}, but the head reads (..., {reads}):"
                " make the head's input width equal to the width of h"
            ]
        own = {p.dtype for p in self.parameters()}
        if reads is not None and own and h.dtype not in own and not torch.is_autocast_enabled(h.device.type):
            dtypes = ", ".join(sorted(map(str, own)))
            return [
                f"the trunk returns h in {h.dtype}, but the head's parameters are {dtypes}: cast h at the end of the"
                " trunk, or convert the head's layers"
            ]
        try:
            _, *inner, width = self.output_shape(h)
        except (RuntimeError, ValueError, TypeError) as error:
            return [f"the head fails on h of shape {tuple(h.shape)} ({error}): change the trunk or the head to fit"]
        loss, leading = self.output_loss, (target.shape[0], *inner)
        return loss.shape_problems(leading, width, target) + loss.value_problems(width, target)


def _require_a_row_each(h: Tensor, target: Tensor) -> None:
    rows, samples = h.shape[0], target.shape[0]
    if rows != samples:
        raise SplitError([f"the trunk returns h with {rows} rows for {samples} samples: return one row per sample"])


class OpaqueHead(Head, ABC):
    """A head whose input and output widths are unknown before a forward pass.

    Args:
        loss: Loss on the outputs; cross-entropy by default.
    """

    def __init__(self, loss: OutputLoss | None) -> None:
        super().__init__(loss if loss is not None else CrossEntropy())

    @property
    def in_features(self) -> None:
        """``None``: unknown before a forward pass."""
        return

    @property
    def out_features(self) -> None:
        """``None``: unknown before a forward pass."""
        return
