"""Tuning a network on a data set: head first, then head and trunk, with early stopping."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from splitfg.engines import CentralDifference
from splitfg.errors import raise_if
from splitfg.estimators import Estimator, FrozenTrunk, LearnedFeedback, SplitFG
from splitfg.feedback import DeltaRule, LayerDifference, Relay
from splitfg.hardware import ActivityPerturbation, DeviceTrunk
from splitfg.heads import CrossEntropy, LinearHead
from splitfg.learners import GradientLearner
from splitfg.onnx._trunk import OnnxTrunk
from splitfg.splitting import Split
from splitfg.training import CosineWithWarmup, Epochs, parameter_groups
from splitfg.types import StepStats

_STEP, _COARSE_STEP = 0.05, 0.3
"""Steps of activity perturbations, relative; the larger one moves tensors over many levels of an int8 graph."""

_LEVELS = 256


def _feedback() -> LearnedFeedback:
    """Return learned feedback whose maps learn from layers that the engine runs alone: white noise needs no solves."""
    return LearnedFeedback(Relay(DeltaRule(1.0)), LayerDifference())


def _activity(K: int, coarse: bool, prediction: LearnedFeedback | None = None) -> ActivityPerturbation:
    """Return activity perturbations, one noise a run: more at once take as many times the memory."""
    return ActivityPerturbation(K=K, step=_COARSE_STEP if coarse else _STEP, chunk=1, prediction=prediction)


METHODS: Final[Mapping[str, Callable[[int, bool], Estimator]]] = {
    "learned_feedback": lambda K, coarse: _feedback(),  # noqa: ARG005
    "activity": lambda K, coarse: _activity(K, coarse),
    "activity_and_feedback": lambda K, coarse: _activity(K, coarse, _feedback()),
    "weights": lambda K, coarse: SplitFG(K=K, engine=CentralDifference(noise=1 / _LEVELS if coarse else None)),
    "head": lambda K, coarse: FrozenTrunk(),  # noqa: ARG005
}
"""Methods by name, as functions of K and of whether the graph rounds its tensors."""

_ROWS = 256
"""Rows per run outside training."""


@dataclass(frozen=True)
class Rows:
    """Inputs and targets of a set of rows.

    Attributes:
        x: One tensor for every input of the network; the first dimension numbers rows.
        y: Class indices ``(n,)``, or values ``(n, outputs)``.
    """

    x: tuple[Tensor, ...]
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def part(self, rows: Tensor | slice) -> Rows:
        """Return some of the rows."""
        return Rows(tuple(x[rows] for x in self.x), self.y[rows])


@dataclass(frozen=True)
class Settings:
    """Settings of a tuning; names and defaults are those of ``OnnxClassifier``."""

    method: str = "learned_feedback"
    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 1e-3
    rho: float = 1.0
    K: int = 8
    evaluate_every: int = 25
    patience: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        whole = ("steps", "batch_size", "K", "evaluate_every", "patience")
        found = [f"{n} must be at least 1, got {getattr(self, n)}" for n in whole if not getattr(self, n) >= 1]
        positive = [(n, getattr(self, n)) for n in ("learning_rate", "rho")]
        found += [f"{n} must be a positive number, got {v}" for n, v in positive if not (math.isfinite(v) and v > 0)]
        if self.method not in METHODS:
            found.append(f"method {self.method!r} is unknown: choose one of {', '.join(METHODS)}")
        raise_if(found)


class Tuning:
    """Trains head and trunk on rows, and keeps the state with the best validation score.

    Args:
        split: An ``OnnxTrunk`` and a ``LinearHead``.
        train: Rows to train on.
        validation: Rows for early stopping; ``None`` to train all steps and keep the last state.
        settings: Settings.

    Attributes:
        losses: Loss of every step.
        scores: Validation scores: accuracy or R², first that of the head alone.
    """

    def __init__(self, split: Split, train: Rows, validation: Rows | None, settings: Settings) -> None:
        self.split, self.train, self.validation, self.settings = split, train, validation, settings
        groups = parameter_groups(split, lr=settings.learning_rate, rho=settings.rho)
        self.learner = GradientLearner(
            split,
            METHODS[settings.method](settings.K, isinstance(split.trunk, OnnxTrunk) and split.trunk.rounds),
            torch.optim.Adam(groups),
            schedule=CosineWithWarmup(settings.steps),
            clip_apart=True,
        )
        self.losses: list[float] = []
        self.scores: list[float] = []
        self._best: dict[str, Any] | None = None
        self._epochs = Epochs(len(train), batch=settings.batch_size, seed=settings.seed)
        self._generator = torch.Generator().manual_seed(settings.seed)

    @property
    def done(self) -> bool:
        """Whether all steps are taken, or the last ``patience`` scores were no better than the best."""
        if len(self.losses) >= self.settings.steps:
            return True
        if self.validation is None or not self.scores:
            return False
        return len(self.scores) - 1 - self.scores.index(max(self.scores)) >= self.settings.patience

    def begin(self) -> None:
        """Fit the head to h as the file computes it, with one inference for every row."""
        assert isinstance(self.split.head, LinearHead)
        fit_head(self.split.head, hidden(self.split, self.train.x), self.train.y)
        self._score()

    def step(self) -> StepStats:
        """Take one step, and evaluate if it is time to."""
        rows = self.train.part(self._epochs.rows(len(self.losses)))
        x = rows.x if len(rows.x) > 1 else rows.x[0]
        stats = self.learner.step(x, rows.y, generator=self._generator)
        self.losses.append(float(stats.loss))
        if len(self.losses) % self.settings.evaluate_every == 0 or len(self.losses) == self.settings.steps:
            self._score()
        return stats

    def finish(self) -> None:
        """Restore the state with the best validation score."""
        if self._best is not None:
            self.split.model.load_state_dict(self._best)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from."""
        state = {"learner": self.learner.state_dict(), "losses": self.losses, "scores": self.scores}
        counts = vars(self.split.trunk.counts) if isinstance(self.split.trunk, DeviceTrunk) else {}
        return {**state, "best": self._best, "generator": self._generator.get_state(), "counts": dict(counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`."""
        self.learner.load_state_dict(state["learner"])
        self.losses, self.scores = list(state["losses"]), list(state["scores"])
        self._best = state["best"]
        self._generator.set_state(state["generator"])
        if isinstance(self.split.trunk, DeviceTrunk):
            vars(self.split.trunk.counts).update(state["counts"])

    def _score(self) -> None:
        if self.validation is None:
            return
        found = score(self.split, self.validation)
        if not self.scores or found > max(self.scores):
            self._best = copy.deepcopy(self.split.model.state_dict())
        self.scores.append(found)


def predict(split: Split, x: Sequence[Tensor]) -> Tensor:
    """Return the outputs for rows, a few hundred at a time."""
    with torch.no_grad():
        return split.head.predict(hidden(split, x))


def hidden(split: Split, x: Sequence[Tensor]) -> Tensor:
    """Return h for rows, a few hundred at a time."""
    parts = [tuple(t[i : i + _ROWS] for t in x) for i in range(0, len(x[0]), _ROWS)]
    return torch.cat([split.h(part) for part in parts])


def score(split: Split, rows: Rows) -> float:
    """Return the accuracy, or R² for values."""
    outputs = predict(split, rows.x)
    if isinstance(split.head.output_loss, CrossEntropy):
        return float((outputs.argmax(-1) == rows.y).float().mean())
    y = rows.y.reshape(outputs.shape)
    return 1.0 - float((outputs - y).square().sum() / (y - y.mean(0)).square().sum().clamp_min(1e-12))


def fit_head(head: LinearHead, h: Tensor, y: Tensor, *, steps: int = 200, rate: float = 0.05) -> None:
    """Fit a head of one layer to h in place: Adam on all rows at once, with h standardised and then put back.

    Args:
        head: The head.
        h: Representation ``(n, d)``.
        y: Targets.
        steps: Steps of Adam, annealed.
        rate: Its learning rate.
    """
    (layer,) = head.layers
    mean, std = h.mean(0), h.std(0, correction=0).clamp_min(1e-6 * float(h.abs().max().clamp_min(1e-6)))
    with torch.no_grad():
        layer.bias.add_(layer.weight @ mean)
        layer.weight *= std
    optimizer = torch.optim.Adam(head.parameters(), lr=rate, weight_decay=1e-4)
    schedule = CosineWithWarmup(steps)
    standard = (h - mean) / std
    for step in range(steps):
        grads = head(standard, y).grads
        for name, p in head.named_parameters():
            p.grad = grads[name]
        for group in optimizer.param_groups:
            group["lr"] = rate * schedule(step)
        optimizer.step()
    head.zero_grad()
    with torch.no_grad():
        layer.weight /= std
        layer.bias.sub_(layer.weight @ mean)
