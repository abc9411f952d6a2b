"""Training and prediction on encoded rows, behind the estimators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from splitfg.learners.hopfield import HopfieldReadout
from splitfg.recipes.tables import TableRecipe, TableShape
from splitfg.training import Epochs

# Rows are predicted in blocks of one size, the last one padded: products of another size are rounded in another way,
# and the prediction for a row must not depend on the rows beside it.
_BLOCK_ROWS = 128
# Fewer stored examples than this leave none to choose the readout's settings on.
_FEWEST_TO_TUNE = 5

Score: TypeAlias = Callable[[NDArray[np.float32]], float]
"""Outputs on the held-out rows ↦ how good they are, more is better."""


@dataclass(frozen=True)
class EncodedRows:
    """Features ``(n, width)``, targets, and weights unless all rows count the same."""

    x: NDArray[np.float32]
    y: NDArray[Any]
    weight: NDArray[np.float64] | None = None

    def epochs(self, batch: int, seed: int) -> Epochs:
        """Batches of these rows."""
        weight = None if self.weight is None else torch.as_tensor(self.weight)
        return Epochs(len(self.y), batch=batch, seed=seed, weight=weight)


@dataclass(frozen=True)
class EarlyStopping:
    """Stop once ``patience`` scores in a row are no better than the best.

    They are taken on ``x`` every ``every`` steps and after the last one.
    """

    x: NDArray[np.float32]
    score: Score
    every: int
    patience: int


class Trainer:
    """A learner with its random numbers; pickled as plain tensors and numbers, and rebuilt from them.

    Args:
        recipe: What the learner is built from.
        shape: Of the data.
        seed: Of everything random.
        device: Where to compute.
    """

    def __init__(self, recipe: TableRecipe, shape: TableShape, *, seed: int, device: str) -> None:
        self._recipe, self._shape, self._seed, self._device = recipe, shape, seed, device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._learner = recipe.build(shape, self._generator)
        self._passes = 0

    @property
    def stores(self) -> bool:
        """Whether it stores examples rather than learning from them again and again."""
        return isinstance(self._learner, HopfieldReadout)

    def fit(
        self, rows: EncodedRows, *, steps: int, batch: int, stopping: EarlyStopping | None
    ) -> tuple[list[float], list[float]]:
        """Learn; the losses of all steps and the scores of all checks. A readout stores the rows once instead."""
        if self.stores:
            return self.learn_once(rows, batch=batch), []
        epochs = rows.epochs(batch, self._seed)
        x, y = self._tensor(rows.x), self._tensor(rows.y)
        losses: list[Tensor] = []
        watch, every = (None, steps) if stopping is None else (_Watch(stopping), stopping.every)
        for step in range(steps):
            losses.append(self._step(x, y, epochs.rows(step)))
            due = (step + 1) % every == 0 or step + 1 == steps
            if watch is not None and due and watch.done(self):
                break
        if watch is not None:
            watch.restore_best(self)
        return torch.stack(losses).tolist(), [] if watch is None else watch.scores

    def learn_once(self, rows: EncodedRows, *, batch: int) -> list[float]:
        """Go through the rows once, in an order of their own; the losses of the steps."""
        epochs = rows.epochs(batch, self._seed + self._passes)
        self._passes += 1
        x, y = self._tensor(rows.x), self._tensor(rows.y)
        losses = [self._step(x, y, epochs.once(step)) for step in range(epochs.steps)]
        if isinstance(self._learner, HopfieldReadout) and self._learner.stored >= _FEWEST_TO_TUNE:
            self._learner.tune(generator=self._generator)
        return torch.stack(losses).tolist()

    def predict(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Outputs, shape ``(n, outputs)``."""
        padded = F.pad(torch.tensor(x), (0, 0, 0, -len(x) % _BLOCK_ROWS))
        parts = [self._learner.predict(block.to(self._device)).cpu() for block in padded.split(_BLOCK_ROWS)]
        outputs: NDArray[np.float32] = torch.cat(parts)[: len(x)].numpy()
        return outputs

    def go_on_with(self, recipe: TableRecipe, *, device: str) -> None:
        """Take over new rates and bounds; what was learned stays.

        Raises:
            ValueError: The network, the method or the device would be another one.
        """
        if recipe == self._recipe and device == self._device:
            return
        network, known = vars(recipe.network), vars(self._recipe.network)
        changed = ["method"] * (recipe.method != self._recipe.method) + ["device"] * (device != self._device)
        changed += [name for name in network if network[name] != known[name]]
        if changed:
            raise ValueError(
                f"partial_fit goes on with the network it has, but other settings are wanted now"
                f" ({', '.join(changed)}): call fit to begin anew"
            )
        learned = self.snapshot()
        self._recipe = recipe
        self._learner = recipe.build(self._shape, torch.Generator(device).manual_seed(self._seed))
        if "optimizer" in learned:  # its memory stays, its settings are the new ones
            learned["optimizer"]["param_groups"] = self._learner.state_dict()["optimizer"]["param_groups"]
        self.restore(learned)

    def snapshot(self) -> dict[str, Any]:
        """A copy of what was learned."""
        return copy.deepcopy(self._learner.state_dict())

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to a :meth:`snapshot`."""
        self._learner.load_state_dict(snapshot)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "built_from": (self._recipe, self._shape, self._seed, self._device),
            "learner": self.snapshot(),
            "generator": self._generator.get_state(),
            "passes": self._passes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        recipe, shape, seed, device = state["built_from"]
        self.__init__(recipe, shape, seed=seed, device=device)  # type: ignore[misc]
        self.restore(state["learner"])
        self._generator.set_state(state["generator"])
        self._passes = state["passes"]

    def _step(self, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        chosen = rows.to(self._device)
        return self._learner.step(x[chosen], y[chosen], generator=self._generator).loss.detach()

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.tensor(values, device=self._device)


def device_problems(device: str) -> list[str]:
    """Why nothing can be computed there, if so."""
    try:
        torch.empty(0, device=device)
        torch.Generator(device)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError):
        return [f"device {device!r} is not there or unknown to torch: choose one that is, such as 'cpu'"]
    return []


class _Watch:
    """Scores so far, and what was learned when the best of them was taken."""

    def __init__(self, stopping: EarlyStopping) -> None:
        self.scores: list[float] = []
        self._stopping = stopping
        self._best: dict[str, Any] | None = None

    def done(self, trainer: Trainer) -> bool:
        """Take a score; whether there was no better one for too long."""
        score = self._stopping.score(trainer.predict(self._stopping.x))
        if not self.scores or score > max(self.scores):
            self._best = trainer.snapshot()
        self.scores.append(score)
        best = self.scores.index(max(self.scores))
        return len(self.scores) - 1 - best >= self._stopping.patience

    def restore_best(self, trainer: Trainer) -> None:
        """Go back to the best score, if any was taken."""
        if self._best is not None:
            trainer.restore(self._best)
