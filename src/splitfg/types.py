"""Shared types: parameters by name, a head's gradient, an estimate, and the protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from splitfg.errors import shorten

Params: TypeAlias = dict[str, Tensor]
"""Parameters, tangents or gradients, keyed by parameter name."""

Inputs: TypeAlias = Tensor | tuple[Any, ...] | dict[str, Any]
"""Inputs of a trunk: one tensor, a tuple of positional arguments, or a dict of keyword arguments."""

Target: TypeAlias = Tensor
"""Target of a head: class indices or values."""


@dataclass(frozen=True)
class HeadGradient:
    """Exact loss, u = dL/dh and gradient of a head's own parameters.

    Attributes:
        loss: Scalar loss L.
        u: dL/dh, with the shape of h.
        grads: dL/dθ_head, keyed by the head's own parameter names; new tensors, which estimators may change in place.
    """

    loss: Tensor
    u: Tensor
    grads: Params

    def __repr__(self) -> str:
        """Summarise the gradient in a few lines, whatever its size."""
        return f"HeadGradient(loss={_number(self.loss)}, u={tuple(self.u.shape)}, {_summary(self.grads)})"


@dataclass(frozen=True)
class Stats:
    """Cost and diagnostics of one estimate.

    Attributes:
        jvps: Jacobian-vector products pushed through the trunk (finite differences count as one each).
        trunk_backward: Reverse-mode passes through the trunk; zero for every backprop-free method.
        block_backward: Reverse-mode passes inside single blocks of the trunk, none of which crosses a block.
        biased: Whether the trunk's estimate is biased by construction.
        scores: The K scores d_k = <u, J v_k>; empty where no tangents are drawn.
        norms: Norms by name (``u``, ``trunk``, ``head``, ...).
    """

    jvps: int = 0
    trunk_backward: int = 0
    biased: bool = False
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    block_backward: int = 0

    @property
    def forward_only(self) -> bool:
        """Whether no reverse-mode pass took place in the trunk, not even inside a block."""
        return self.trunk_backward == 0 and self.block_backward == 0


class ForwardChange(Protocol):
    """A change of a model's state, computed and not yet made."""

    def apply(self) -> None:
        """Change the model."""


@dataclass(frozen=True)
class Estimate:
    """A gradient estimate.

    Attributes:
        loss: Scalar loss L of the batch.
        grads: Gradients keyed by parameter name.
        stats: Statistics.
        state_update: Change of the estimator's own learned state, which
            :meth:`~splitfg.estimators.LearningEstimator.update_state` applies; empty for estimators without one.
        forward_state: Change that one forward pass makes in the model's buffers and attributes, such as the running
            statistics of batch norm; :func:`~splitfg.write_grads` applies it. ``None`` if there is none.
        elsewhere: Squared norms of the parts of the gradient that other processes hold, by parameter name; clipping
            counts them.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import splitfg
        >>> network = splitfg.split(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
        >>> x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        >>> splitfg.SplitFG(K=2)(network, x, y, generator=torch.Generator().manual_seed(0))
        Estimate(loss=..., jvps=2, trunk_backward=0, biased=False, grads of 4 parameters: ...)
    """

    loss: Tensor
    grads: Params
    stats: Stats
    state_update: Mapping[str, Tensor] = field(default_factory=dict)
    forward_state: ForwardChange | None = None
    elsewhere: Mapping[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Summarise the estimate in a few lines, whatever the size of its gradients."""
        stats = self.stats
        inside = f" block_backward={stats.block_backward}," if stats.block_backward else ""
        return (
            f"Estimate(loss={_number(self.loss)}, jvps={stats.jvps}, trunk_backward={stats.trunk_backward},{inside}"
            f" biased={stats.biased}, {_summary(self.grads)})"
        )


@dataclass(frozen=True)
class StepStats:
    """Loss and metrics of one training step.

    Attributes:
        loss: Loss of the batch before the step.
        metrics: Numbers to log, by name.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


TrunkFunction: TypeAlias = Callable[[Params], Tensor]
"""θ ↦ h for a fixed batch."""


def _summary(grads: Params) -> str:
    shapes = [f"{name} {tuple(g.shape)}" for name, g in grads.items()]
    return f"grads of {len(shapes)} parameters: {shorten(shapes)}"


def _number(value: Tensor) -> str:
    """Format a scalar; tensors without a value, such as those of a traced step, print their type."""
    try:
        return f"{value.item():.6g}"
    except RuntimeError:
        return type(value).__name__


@runtime_checkable
class Engine(Protocol):
    """Pushes tangents through a function: (h, dh) with dh[k] = J v_k."""

    @property
    def chunk(self) -> int | None:
        """Number of tangents per pass; ``None`` for all of them at once."""

    @property
    def biased(self) -> bool:
        """Whether J·v is only approximate."""

    def __call__(self, f: TrunkFunction, params: Params, tangents: Params) -> tuple[Tensor, Tensor]:
        """Evaluate f and its directional derivatives.

        Args:
            f: The function θ ↦ h.
            params: The point θ.
            tangents: A stack of directions, each entry of shape ``(c, *params[name].shape)``.

        Returns:
            ``h`` and ``dh`` of shape ``(c, *h.shape)``.
        """


@runtime_checkable
class Learner(Protocol):
    """The interface that training loops and experiments call."""

    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        """Learn from one batch."""

    def predict(self, x: Inputs) -> Tensor:
        """Return the outputs (logits or values) for a batch, without side effects."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: tensors, numbers and strings, nested in dicts and lists."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""
