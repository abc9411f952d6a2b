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
from splitfg.recipes.tables import NetworkRecipe, TableRecipe, TableShape
from splitfg.sklearn._progress import ProgressLines
from splitfg.sklearn._sparse import SparseRows
from splitfg.training import Epochs
from splitfg.types import Learner

# Blocks have one size, the last one is padded: matrix products of another size round differently, and the prediction
# for a row must not depend on the other rows.
_BLOCK_ROWS = 128
# With fewer stored examples, none are left to choose the readout's settings on.
_FEWEST_TO_TUNE = 5

Score: TypeAlias = Callable[[NDArray[np.float32]], float]
"""Outputs on the held-out rows ↦ a score, higher is better."""

Features: TypeAlias = NDArray[np.float32] | SparseRows
"""Encoded features, shape ``(n, width)``."""


@dataclass(frozen=True)
class EncodedRows:
    """Features ``(n, width)``, targets, and weights unless all rows count the same."""

    x: Features
    y: NDArray[Any]
    weight: NDArray[np.float64] | None = None

    def epochs(self, batch: int, seed: int) -> Epochs:
        """Return the batches of these rows."""
        weight = None if self.weight is None else torch.as_tensor(self.weight)
        return Epochs(len(self.y), batch=batch, seed=seed, weight=weight)


@dataclass(frozen=True)
class EarlyStopping:
    """Stop once ``patience`` scores in a row are no better than the best.

    The scores are computed on ``x`` every ``every`` steps and after the last one.
    """

    x: Features
    score: Score
    every: int
    patience: int


class Trainer:
    """A learner with its random numbers; pickled as plain tensors and numbers, and rebuilt from them.

    Args:
        recipe: Builds the learner.
        shape: Features and classes of the data.
        seed: Seed of everything random.
        device: Where to compute.
        dtype: Dtype of the parameters; torch's default by default.
    """

    def __init__(
        self, recipe: TableRecipe, shape: TableShape, *, seed: int, device: str, dtype: torch.dtype | None = None
    ) -> None:
        self._dtype = dtype or torch.get_default_dtype()
        self._recipe, self._shape, self._seed, self._device = recipe, shape, seed, device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._learner = self._built(recipe, self._generator)
        self._passes = 0

    @property
    def stores(self) -> bool:
        """Whether the learner stores examples instead of learning from them repeatedly."""
        return isinstance(self._learner, HopfieldReadout)

    def fit(
        self,
        rows: EncodedRows,
        *,
        steps: int,
        batch: int,
        stopping: EarlyStopping | None,
        progress: ProgressLines | None = None,
    ) -> tuple[list[float], list[float]]:
        """Train, and return the losses of all steps and all validation scores.

        A readout stores the rows once instead.
        """
        if self.stores:
            return self.learn_once(rows, batch=batch), []
        epochs, read = rows.epochs(batch, self._seed), self._reader(rows)
        losses: list[Tensor] = []
        watch, every = (None, steps) if stopping is None else (_Watch(stopping), stopping.every)
        for step in range(steps):
            losses.append(self._step(*read(epochs.rows(step))))
            due = (step + 1) % every == 0 or step + 1 == steps
            stop = watch is not None and due and watch.done(self)
            if progress is not None:
                progress(losses, [] if watch is None else watch.scores)
            if stop:
                break
        if watch is not None:
            watch.restore_best(self)
        return torch.stack(losses).tolist(), [] if watch is None else watch.scores

    def learn_once(self, rows: EncodedRows, *, batch: int) -> list[float]:
        """Go through the rows once, in a new order, and return the losses of the steps."""
        epochs, read = rows.epochs(batch, self._seed + self._passes), self._reader(rows)
        self._passes += 1
        losses = [self._step(*read(epochs.once(step))) for step in range(epochs.steps)]
        if isinstance(self._learner, HopfieldReadout) and self._learner.stored >= _FEWEST_TO_TUNE:
            self._learner.tune(generator=self._generator)
        return torch.stack(losses).tolist()

    def predict(self, x: Features) -> NDArray[np.float32]:
        """Return the outputs, shape ``(n, outputs)``."""
        read = reader(x, self._device, self._dtype)
        parts = [self._block(read(rows)) for rows in torch.arange(len(x)).split(_BLOCK_ROWS)]
        outputs: NDArray[np.float32] = torch.cat(parts).float().numpy()
        return outputs

    def _block(self, x: Tensor) -> Tensor:
        """Return the outputs of at most ``_BLOCK_ROWS`` rows."""
        padded = F.pad(x, (0, 0, 0, _BLOCK_ROWS - len(x)))
        return self._learner.predict(padded)[: len(x)].cpu()

    def go_on_with(self, recipe: TableRecipe, *, device: str) -> None:
        """Change learning rate, rho and clipping, and keep everything that was learned.

        Raises:
            ValueError: Network, method or device would change.
        """
        if recipe == self._recipe and device == self._device:
            return
        changed = ["method"] * (recipe.method != self._recipe.method) + ["device"] * (device != self._device)
        changed += _changed(self._recipe.network, recipe.network)
        if changed:
            raise ValueError(
                f"partial_fit cannot change these settings of a fitted model ({', '.join(changed)}): call fit to"
                " train a new one"
            )
        learned = self.snapshot()
        self._recipe = recipe
        self._learner = self._built(recipe, torch.Generator(device).manual_seed(self._seed))
        if "optimizer" in learned:  # keep its moments, take the new settings
            learned["optimizer"]["param_groups"] = self._learner.state_dict()["optimizer"]["param_groups"]
        self.restore(learned)

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of the learned state."""
        return copy.deepcopy(self._learner.state_dict())

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to a :meth:`snapshot`."""
        self._learner.load_state_dict(snapshot)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "built_from": (self._recipe, self._shape, self._seed, self._device),
            "dtype": self._dtype,
            "learner": self.snapshot(),
            "generator": self._generator.get_state(),
            "passes": self._passes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        recipe, shape, seed, device = state["built_from"]
        dtype = state.get("dtype", torch.float32)  # pickles of earlier versions have none
        self.__init__(recipe, shape, seed=seed, device=device, dtype=dtype)  # type: ignore[misc]
        self.restore(state["learner"])
        self._generator.set_state(state["generator"])
        self._passes = state["passes"]

    def _built(self, recipe: TableRecipe, generator: torch.Generator) -> Learner:
        default = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)  # another one than at the beginning, in a copy or later
        try:
            return recipe.build(self._shape, generator)
        finally:
            torch.set_default_dtype(default)

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        return self._learner.step(x, y, generator=self._generator).loss.detach()

    def _reader(self, rows: EncodedRows) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the function from row numbers to a batch ``(x, y)`` on the device."""
        read, y = reader(rows.x, self._device, self._dtype), torch.tensor(rows.y, device=self._device)
        y = y.to(self._dtype) if y.is_floating_point() else y
        return lambda chosen: (read(chosen), y[chosen.to(self._device)])


def reader(x: Features, device: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the function from row numbers to features on the device; sparse rows become dense a batch at a time."""
    if isinstance(x, SparseRows):
        sparse = x
        return lambda rows: torch.as_tensor(sparse[rows.numpy()].dense()).to(device, dtype)
    dense = torch.tensor(x, device=device, dtype=dtype)
    return lambda rows: dense[rows.to(device)]


def _changed(before: NetworkRecipe, after: NetworkRecipe) -> list[str]:
    """Return the names of the settings in which two networks differ."""
    if type(before) is not type(after):
        return ["network"]
    return [name for name, value in vars(after).items() if value != vars(before)[name]]


def device_problems(device: str) -> list[str]:
    """Return why torch cannot compute on a device; an empty list if it can."""
    try:
        torch.empty(0, device=device)
        torch.Generator(device)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError):
        return [f"device {device!r} is missing or unknown to torch: choose another one, such as 'cpu'"]
    return []


class _Watch:
    """The scores so far, and the learned state of the best one."""

    def __init__(self, stopping: EarlyStopping) -> None:
        self.scores: list[float] = []
        self._stopping = stopping
        self._best: dict[str, Any] | None = None

    def done(self, trainer: Trainer) -> bool:
        """Compute a score, and return whether the last ``patience`` ones were no better than the best."""
        score = self._stopping.score(trainer.predict(self._stopping.x))
        if not self.scores or score > max(self.scores):
            self._best = trainer.snapshot()
        self.scores.append(score)
        best = self.scores.index(max(self.scores))
        return len(self.scores) - 1 - best >= self._stopping.patience

    def restore_best(self, trainer: Trainer) -> None:
        """Restore the state of the best score, if there is one."""
        if self._best is not None:
            trainer.restore(self._best)
