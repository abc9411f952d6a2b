"""The words everything else is built from: parameters, a head's gradient, an estimate, and the protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

Params: TypeAlias = dict[str, Tensor]
"""Parameters, tangents or gradients, keyed by parameter name."""

Inputs: TypeAlias = Tensor | tuple[Any, ...]
"""What a trunk reads: one tensor, or a tuple of positional arguments."""

Target: TypeAlias = Tensor
"""What a head is scored against: class indices or values."""


@dataclass(frozen=True)
class HeadGradient:
    """What a head gives back, exactly: the loss, u = dL/dh and the gradient of its own parameters.

    Attributes:
        loss: Scalar loss L.
        u: dL/dh, with the shape of h.
        grads: dL/dθ_head, keyed by the head's own parameter names.
    """

    loss: Tensor
    u: Tensor
    grads: Params


@dataclass(frozen=True)
class Stats:
    """What a researcher would plot of one estimate.

    Attributes:
        jvps: Jacobian-vector products pushed through the trunk (finite differences count as one each).
        trunk_backward: Reverse-mode passes through the trunk: zero for every method that keeps the promise.
        biased: Whether the trunk's estimate is biased by construction.
        scores: The K scores d_k = <u, J v_k>; empty where no tangents are drawn.
        norms: Norms worth plotting, by name (``u``, ``trunk``, ``head``, ...).
    """

    jvps: int = 0
    trunk_backward: int = 0
    biased: bool = False
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    norms: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Estimate:
    """A gradient estimate.

    Attributes:
        loss: Scalar loss L of the batch.
        grads: Gradients keyed by parameter name.
        stats: Statistics.
        state_update: Change of the estimator's own learned state, which
            :meth:`~splitfg.estimators.LearningEstimator.update_state` applies; empty for estimators without one.
    """

    loss: Tensor
    grads: Params
    stats: Stats
    state_update: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepStats:
    """What one training step reports: the loss before the step, and numbers worth logging, by name."""

    loss: Tensor
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)


TrunkFunction: TypeAlias = Callable[[Params], Tensor]
"""θ ↦ h for a fixed batch."""


@runtime_checkable
class Engine(Protocol):
    """Pushes tangents through a function: (h, dh) with dh[k] = J v_k."""

    @property
    def chunk(self) -> int | None:
        """How many tangents ride together; ``None`` for all of them."""

    @property
    def biased(self) -> bool:
        """Whether J·v itself is only approximate."""

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
    """What training loops and experiments talk to."""

    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:
        """Learn from one batch."""

    def predict(self, x: Inputs) -> Tensor:
        """Outputs (logits or values) for a batch; no state changes."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on later: tensors, numbers and strings, nested in dicts and lists."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
