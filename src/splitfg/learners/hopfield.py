"""The modern-Hopfield readout: softmax retrieval over what a frozen trunk made of the training data.

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
from splitfg.types import Inputs, StepStats, Target

BETAS = tuple(2.0**i for i in range(-4, 11))
"""The inverse temperatures tried by default: 1/16 to 1,024."""

SCALINGS = tuple(Scaling(standardise=s, unit=u) for s, u in product((False, True), repeat=2))
"""The feature scalings tried by default: all four."""

# A class that no stored example speaks for gets this probability before normalising: log-probabilities stay finite.
_FLOOR = 1e-6
# A step that trains nothing needs no loss: it is watched on this many rows of a batch and pairs of the store.
_WATCHED_ROWS = 32
_WATCHED_PAIRS = 1024


class HopfieldReadout:
    """Answers queries by w = softmax(β q Kᵀ), ŷ = w V over stored (feature, target) pairs. Nothing is trained.

    Keys and queries are the frozen trunk's features, scaled as ``scaling`` says. Values are one-hot classes,
    and the answer a log-probability, or regression targets, and the answer their weighted mean. Retrieval runs
    in blocks of queries and keys with a running softmax, so that memory does not grow with queries x keys.

    Args:
        trunk: Any function from inputs to h of shape ``(B, d)``; it is never changed.
        classes: Number of classes; ``None`` for regression.
        capacity: The most pairs to store: a uniform sample of the distinct examples :meth:`step` was given.
        beta: β, the inverse temperature.
        scaling: How features are scaled before they are compared.
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
        """Pairs in the store."""
        return self._memory.count

    @torch.no_grad()
    def step(self, x: Inputs, y: Target, *, generator: torch.Generator) -> StepStats:  # noqa: ARG002
        """Store what is new in a batch; draws nothing.

        The loss is that of a part of the store before it, on the batch's first rows.
        """
        h = self._features(x)
        raise_if(_target_problems(y, h, self.classes))
        values = y.reshape(h.shape[0], -1).to(h.dtype) if self.classes is None else y.long()
        loss = self._watched_loss(h[:_WATCHED_ROWS], values[:_WATCHED_ROWS])
        self._memory.add(h, values, fingerprint(*(x if isinstance(x, tuple) else (x,)), values))
        return StepStats(loss, {"stored": float(self.stored), "jvps": 0, "trunk_backward": 0})

    @torch.no_grad()
    def predict(self, x: Inputs) -> Tensor:
        """Log-probabilities ``(B, classes)`` or values ``(B, outputs)``."""
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
        """Choose ``beta`` and ``scaling`` on stored pairs that are held out of the store for the purpose.

        Args:
            generator: Picks the held-out pairs.
            betas: Inverse temperatures to try.
            scalings: Feature scalings to try.
            queries: Pairs held out, at most a fifth of the store.

        Returns:
            The held-out loss of every scaling and β; the best is now in use.
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
        """The store, the settings, and the frozen trunk's parameters where it is a module."""
        trunk = self.trunk.state_dict() if isinstance(self.trunk, nn.Module) else {}
        return {
            "memory": self._memory.state_dict(),
            "trunk": trunk,
            "beta": self.beta,
            "scaling": asdict(self.scaling),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._memory.load_state_dict(state["memory"])
        if isinstance(self.trunk, nn.Module):
            self.trunk.load_state_dict(state["trunk"])
        self.beta, self.scaling = state["beta"], Scaling(**state["scaling"])

    def _features(self, x: Inputs) -> Tensor:
        """The frozen trunk's h; the store follows it to its device."""
        h = self.trunk(*x) if isinstance(x, tuple) else self.trunk(x)
        if h.ndim != 2 or h.shape[0] == 0 or not bool(torch.isfinite(h).all()):
            raise SplitError(
                [f"the trunk gave h of shape {tuple(h.shape)}: finite features (B, d) with B at least 1 are wanted"]
            )
        self._memory.to(h.device)
        return h

    def _answers(self, h: Tensor, memory: Memory, scaling: Scaling, betas: Sequence[float]) -> Tensor:
        """Answers to every query for every β, shape ``(len(betas), B, C)``."""
        means = softmax_readout(h, memory, scaling.fit(memory.keys), betas, self._rows)
        if self.classes is None:
            return means
        return ((means + _FLOOR) / (1 + self.classes * _FLOOR)).log()

    def _rows(self, values: Tensor) -> Tensor:
        """Rows of V: one-hot classes, or the targets themselves."""
        if self.classes is None:
            return values
        return F.one_hot(values, self.classes).to(self._memory.keys.dtype)

    def _loss(self, answers: Tensor, values: Tensor) -> Tensor:
        """Mean negative log-likelihood, or half the mean squared error."""
        if self.classes is None:
            return 0.5 * (answers - values).square().sum(dim=1).mean()
        return F.nll_loss(answers, values)

    def _watched_loss(self, h: Tensor, values: Tensor) -> Tensor:
        """The loss on these rows of some of the store; an empty one says all classes alike, and zero."""
        if self.stored:
            part = self._memory.first(_WATCHED_PAIRS)
            return self._loss(self._answers(h, part, self.scaling, (self.beta,))[0], values)
        if self.classes is None:
            return self._loss(torch.zeros_like(values), values)
        return h.new_tensor(self.classes).log()

    def _require(self, pairs: int) -> None:
        if self.stored < pairs:
            raise SplitError(
                [f"{self.stored} pairs are stored, at least {pairs} are needed: call step() with data first"]
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
    """Class indices for every row, or finite values for every row."""
    if classes is not None:
        return class_problems(h, y, classes)
    if y.ndim not in (1, 2) or y.shape[0] != h.shape[0]:
        return [f"targets have shape {tuple(y.shape)}: ({h.shape[0]},) or ({h.shape[0]}, outputs) is wanted"]
    if not y.is_floating_point() or not bool(torch.isfinite(y).all()):
        return ["regression targets must be finite floating-point values: drop or impute the others"]
    return []
