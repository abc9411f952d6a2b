"""scikit-learn's own models as rows of the table, to compare every method with.

Importing this module imports neither torch nor scikit-learn.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from splitfg.errors import SplitError, raise_if
from splitfg.recipes import TableMethod
from splitfg.recipes.checks import below, not_positive

if TYPE_CHECKING:
    import torch

    from splitfg.recipes.tables import TableRecipe, TableShape
    from splitfg.types import Learner


@dataclass(frozen=True)
class Budget:
    """Training rows, and the most training steps: L-BFGS iterations, optimizer steps or boosting iterations."""

    rows: int
    steps: int


class ReferenceMethod(TableMethod):
    """Settings of a scikit-learn model, which is fitted in one call instead of step by step.

    Attributes:
        reverse_mode: Whether the fit runs backpropagation.
    """

    reverse_mode: ClassVar[bool] = False

    @abstractmethod
    def model(self, shape: TableShape, budget: Budget, *, seed: int) -> Any:
        """Return the unfitted scikit-learn model.

        Args:
            shape: Decides between the classifier and the regressor.
            budget: Bounds the fit.
            seed: Seed of the model's random numbers.
        """

    @abstractmethod
    def steps_of(self, fitted: Any, budget: Budget) -> int:
        """Return how many training steps a fitted model took."""

    @final
    def table_learner(self, recipe: TableRecipe, shape: TableShape, generator: torch.Generator) -> Learner:  # noqa: ARG002
        """Raise an error: scikit-learn fits these models in one call.

        Raises:
            SplitError: Always.
        """
        raise SplitError(
            [f"{type(self).__name__} cannot train step by step: fit the scikit-learn model itself, see its model()"]
        )


@dataclass(frozen=True)
class LinearReference(ReferenceMethod):
    """Logistic regression for classes, ridge regression for values.

    Attributes:
        penalty: Strength of the L2 penalty: ridge's alpha, logistic regression's 1/C.
    """

    penalty: float = 1.0

    def __post_init__(self) -> None:
        raise_if(not_positive(self, "penalty"))

    def model(self, shape: TableShape, budget: Budget, *, seed: int) -> Any:  # noqa: ARG002 (draws no random numbers)
        """Return ``LogisticRegression`` or ``Ridge``."""
        from sklearn.linear_model import LogisticRegression, Ridge

        if shape.classes is None:
            return Ridge(alpha=self.penalty)
        return LogisticRegression(C=1 / self.penalty, max_iter=budget.steps)

    def steps_of(self, fitted: Any, budget: Budget) -> int:  # noqa: ARG002
        """Return the L-BFGS iterations; 1 for ridge regression, which has a closed form."""
        return 1 if fitted.n_iter_ is None else int(max(fitted.n_iter_))


@dataclass(frozen=True)
class MLPReference(ReferenceMethod):
    """scikit-learn's MLP, trained by backprop with the default optimizer: Adam at 1e-3, 200 rows per step.

    The budget is rounded up to whole epochs.

    Attributes:
        width: Hidden width.
        layers: Hidden layers.
    """

    reverse_mode: ClassVar[bool] = True

    width: int = 128
    layers: int = 2

    def __post_init__(self) -> None:
        raise_if(below(1, self, "width", "layers"))

    def model(self, shape: TableShape, budget: Budget, *, seed: int) -> Any:
        """Return ``MLPClassifier`` or ``MLPRegressor``."""
        from sklearn.neural_network import MLPClassifier, MLPRegressor

        kind = MLPRegressor if shape.classes is None else MLPClassifier
        epochs = math.ceil(budget.steps / _updates_per_epoch(budget.rows))
        return kind(hidden_layer_sizes=(self.width,) * self.layers, max_iter=epochs, random_state=seed)

    def steps_of(self, fitted: Any, budget: Budget) -> int:
        """Return the optimizer steps."""
        return int(fitted.n_iter_) * _updates_per_epoch(budget.rows)


@dataclass(frozen=True)
class BoostingReference(ReferenceMethod):
    """scikit-learn's histogram gradient boosting with its default settings."""

    def model(self, shape: TableShape, budget: Budget, *, seed: int) -> Any:
        """Return ``HistGradientBoostingClassifier`` or ``HistGradientBoostingRegressor``."""
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

        kind = HistGradientBoostingRegressor if shape.classes is None else HistGradientBoostingClassifier
        return kind(max_iter=budget.steps, random_state=seed)

    def steps_of(self, fitted: Any, budget: Budget) -> int:  # noqa: ARG002
        """Return the boosting iterations, each of which grows one tree per class."""
        return int(fitted.n_iter_)


def _updates_per_epoch(rows: int) -> int:
    """Return the batches of an epoch: scikit-learn's default batch is 200 rows, or all of them."""
    return math.ceil(rows / min(200, rows))
