"""The modern-Hopfield readout: softmax retrieval over a frozen trunk's features of the training data.

Ramsauer et al., "Hopfield networks is all you need" (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from splitfg.errors import SplitError, raise_if
from splitfg.learners._batches import class_problems
from splitfg.learners._memory import Memory, fingerprint
from splitfg.learners._retrieval import Scaling, softmax_readout
from splitfg.splitting import arguments
from splitfg.types import Inputs, StepStats, Target

BETAS = tuple(2.0**i for i in range(-4, 11))
"""Default inverse temperatures for tuning: 1/16 to 1,024."""

SCALINGS = tuple(Scaling(standardise=s, unit=u) for s, u in product((False, True), repeat=2))
"""Default feature scalings for tuning: all four."""

# Probability of a class without a stored example, before normalising: keeps log-probabilities finite.
_FLOOR = 1e-6
# The loss of a step is only monitored: on this many rows of the batch and pairs of the store.
_MONITORED_ROWS = 32
_MONITORED_PAIRS = 1024


class HopfieldReadout:
    """Predicts ŷ = softmax(β q Kᵀ) V over stored (feature, target) pairs, without trained parameters.

    Keys and queries are the frozen trunk's features after ``scaling``. For classification, values are one-hot classes
    and predictions log-probabilities; for regression, values are targets and predictions their weighted means.
    Retrieval runs in blocks of queries and keys with a running softmax, so that memory does not grow with
    queries x keys.

    Args:
        trunk: Any function from inputs to h of shape ``(B, d)``; stays unchanged.
        classes: Number of classes; ``None`` for regression.
        capacity: Largest number of stored pairs: a uniform sample of the distinct examples passed to :meth:`step`.
        beta: Inverse temperature β.
        scaling: Scaling of features before a comparison.

    Raises:
        SplitError: If a setting is out of range.

    Example:
        >>> import torch
        >>> from splitfg.learners.hopfield import HopfieldReadout
        >>> from splitfg.models import MLP
        >>> generator = torch.Generator().manual_seed(0)
        >>> learner = HopfieldReadout(MLP(10, generator=generator), classes=3)
        >>> x, y = torch.randn(16, 10), torch.randint(0, 3, (16,))
        >>> stats = learner.step(x, y, generator=generator)
        >>> learner.stored, learner.predict(x).shape
        (16, torch.Size([16, 3]))
    """

    def __init__(
        self,
        trunk: Callable[[Inputs], Tensor],
        *,
        classes: int | None,
        capacity: int = 20_000,
        beta: float = 32.0,
        scaling: Scaling | None = None,
    ) -> None:
        raise_if(_setting_problems(classes, capacity, beta))
        self.trunk, self.classes = trunk, classes
        self.beta, self.scaling = beta, scaling if scaling is not None else Scaling()
        self._memory = Memory(capacity)

    @property
    def stored(self) -> int:
        """Number of stored pairs."""
        return self._memory.count

    @torch.no_grad()
    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:  # noqa: ARG002
        """Store the new examples of a batch; does not use the generator.

        The returned loss is that of a part of the store before this step, on the batch's first rows.
        """
        h = self._features(x)
        raise_if(_target_problems(y, h, self.classes))
        values = y.reshape(h.shape[0], -1).to(h.dtype) if self.classes is None else y.long()
        inputs, named = arguments(x)
        loss = self._monitored_loss(h[:_MONITORED_ROWS], values[:_MONITORED_ROWS])
        self._memory.add(h, values, fingerprint(*inputs, *named.values(), values))
        return StepStats(loss, {"stored": float(self.stored), "jvps": 0, "trunk_backward": 0})

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """Return log-probabilities ``(B, classes)`` or values ``(B, outputs)``.

        Raises:
            SplitError: If nothing is stored.
        """
        self._require(1)
        return self._answers(self._features(x), self._memory, self.scaling, (self.beta,))[0]

    @torch.no_grad()
    def tune(
        self,
        *,
        generator: torch.Generator,
        betas: Sequence[float] = BETAS,
        scalings: Sequence[Scaling] = SCALINGS,
        queries: int = 500,
    ) -> dict[tuple[Scaling, float], float]:
        """Set ``beta`` and ``scaling`` to the best on held-out stored pairs.

        Args:
            generator: Chooses the held-out pairs.
            betas: Inverse temperatures to try.
            scalings: Feature scalings to try.
            queries: Number of held-out pairs, at most a fifth of the store.

        Returns:
            The held-out loss of every scaling and β.

        Raises:
            SplitError: If fewer than 5 pairs are stored.
        """
        self._require(5)
        held, kept = self._memory.divide(min(queries, self.stored // 5), generator)
        losses: dict[tuple[Scaling, float], float] = {}
        for scaling in scalings:
            answers = self._answers(held.keys, kept, scaling, betas)
            losses |= {(scaling, b): float(self._loss(a, held.values)) for b, a in zip(betas, answers, strict=True)}
        self.scaling, self.beta = min(losses, key=losses.__getitem__)
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return the store, the settings, and the parameters of a trunk that is a module."""
        trunk = self.trunk.state_dict() if isinstance(self.trunk, nn.Module) else {}
        return {
            "memory": self._memory.state_dict(),
            "trunk": trunk,
            "beta": self.beta,
            "scaling": asdict(self.scaling),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""
        self._memory.load_state_dict(state["memory"])
        if isinstance(self.trunk, nn.Module):
            self.trunk.load_state_dict(state["trunk"])
        self.beta, self.scaling = state["beta"], Scaling(**state["scaling"])

    def _features(self, x: Inputs) -> Tensor:
        """Compute h, and move the store to its device."""
        inputs, named = arguments(x)
        h = self.trunk(*inputs, **named)
        if h.ndim != 2 or h.shape[0] == 0 or not bool(torch.isfinite(h).all()):
            raise SplitError(
                [f"the trunk returned h of shape {tuple(h.shape)}: return finite features (B, d) with B at least 1"]
            )
        self._memory.to(h.device)
        return h

    def _answers(self, h: Tensor, memory: Memory, scaling: Scaling, betas: Sequence[float]) -> Tensor:
        """Compute predictions for every β, shape ``(len(betas), B, C)``."""
        means = softmax_readout(h, memory, scaling.fit(memory.keys), betas, self._rows)
        if self.classes is None:
            return means
        return ((means + _FLOOR) / (1 + self.classes * _FLOOR)).log()

    def _rows(self, values: Tensor) -> Tensor:
        """Return rows of V: one-hot classes or regression targets."""
        if self.classes is None:
            return values
        return F.one_hot(values, self.classes).to(self._memory.keys.dtype)

    def _loss(self, answers: Tensor, values: Tensor) -> Tensor:
        """Compute the mean negative log-likelihood, or half the mean squared error."""
        if self.classes is None:
            return 0.5 * (answers - values).square().sum(dim=1).mean()
        return F.nll_loss(answers, values)

    def _monitored_loss(self, h: Tensor, values: Tensor) -> Tensor:
        """Compute the loss of a part of the store; an empty store predicts uniform classes, or zero."""
        if self.stored:
            part = self._memory.first(_MONITORED_PAIRS)
            return self._loss(self._answers(h, part, self.scaling, (self.beta,))[0], values)
        if self.classes is None:
            return self._loss(torch.zeros_like(values), values)
        return h.new_tensor(self.classes).log()

    def _require(self, pairs: int) -> None:
        if self.stored < pairs:
            raise SplitError(
                [f"the store has {self.stored} pairs and needs at least {pairs}: call step() with data first"]
            )


def _setting_problems(classes: int | None, capacity: int, beta: float) -> list[str]:
    found = []
    if classes is not None and classes < 2:
        found.append(f"classes must be at least 2, got {classes}: use None for regression")
    if capacity < 1:
        found.append(f"capacity must be at least 1, got {capacity}")
    if not beta > 0:
        found.append(f"beta must be positive, got {beta}")
    return found


def _target_problems(y: Tensor, h: Tensor, classes: int | None) -> list[str]:
    """List the problems of targets that are not one class index, or finite values, per row."""
    if classes is not None:
        return class_problems(h, y, classes)
    if y.ndim not in (1, 2) or y.shape[0] != h.shape[0]:
        return [f"targets have shape {tuple(y.shape)}: pass shape ({h.shape[0]},) or ({h.shape[0]}, outputs)"]
    if not y.is_floating_point() or not bool(torch.isfinite(y).all()):
        return ["regression targets must be finite floating-point values: drop or impute the others"]
    return []
