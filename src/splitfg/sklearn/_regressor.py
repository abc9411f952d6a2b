"""The regressor."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import assert_all_finite

from splitfg.recipes.tables import TableShape
from splitfg.sklearn._base import TabularEstimator
from splitfg.sklearn._columns import TIMES
from splitfg.sklearn.encoding import LARGEST, Floats, TargetScale


class SplitFGRegressor(RegressorMixin, TabularEstimator):
    """A neural network for tables, trained without a backward pass through its trunk, or by any other method here.

    Numeric columns are standardised, categorical ones integer-encoded and standardised. Targets are standardised for
    training and predicted in their own units. Forward-Forward compares labels and cannot learn values.

    Args:
        method: Name of a method of :func:`splitfg.recipes.tables.table_methods`, or a recipe with settings of its
            own, such as ``SplitFGMethod(K=4)``.
        steps: Training steps.
        batch_size: Rows per step, at most all of them.
        learning_rate: Learning rate of Adam.
        rho: Trunk step scale, above 0 and at most 1.
        clip: Joint clipping bound; ``float("inf")`` for none.
        network: ``"tabm"``, an ensemble of MLPs that share most weights; ``"mlp"``, a plain MLP, which ignores
            ``members``; or a recipe with settings of its own, which ignores ``width`` and ``layers`` too.
        width: Hidden width.
        layers: Hidden layers.
        members: Members of the ensemble.
        early_stopping: Hold rows out, stop when the score on them no longer improves, and keep the best weights. For
            ``fit`` alone. Has no effect on a method that stores rows instead of training step by step.
        validation_fraction: Share of the rows to hold out.
        patience: Scores in a row without improvement after which to stop.
        evaluate_every: Steps between validation scores and between progress lines; the last step has both.
        verbose: Print the loss, and the validation score if there is one, every ``evaluate_every`` steps.
        random_state: Seed of everything random.
        device: Where to compute (``cpu``, ``cuda``, ...).

    Attributes:
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if ``fit`` was given a DataFrame.
        n_iter_: Steps taken.
        loss_curve_: Loss of every step, for standardised targets.
        validation_scores_: R² on the held-out rows, if early stopping is on.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> SplitFGRegressor(steps=100, random_state=0).fit(X, y).score(X, y) > 0.4
        True
    """

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Go over these rows once and keep what earlier calls learned.

        The first call sets means and deviations, of the target too, and categories: give it typical rows. It warns of
        columns and targets that do not vary. Between calls, ``learning_rate``, ``rho``, ``clip`` and ``batch_size``
        may change; method, network and device may not.

        Args:
            X: As in :meth:`fit`.
            y: Targets.
            sample_weight: As in :meth:`fit`.

        Raises:
            ValueError: No column varies in the first call, or early stopping is on.
        """
        first = not hasattr(self, "_trainer")
        self._learn_once(X, y, sample_weight)
        if first and np.ptp(np.asarray(y, dtype=np.float64)) == 0:
            warnings.warn(
                "the first call of partial_fit sets the target's mean and deviation for all later calls, but all its"
                " targets are the same, so that the deviation counts as 1: give it targets that differ",
                UserWarning,
                stacklevel=2,
            )
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return values ``(n,)`` in the target's own units."""
        outputs = self._outputs(X)
        return self._scale.inverse(outputs[:, 0])

    def _row_weight(self, y: NDArray[Any], weight: Floats | None) -> Floats | None:  # noqa: ARG002
        return weight

    @property
    def _score_name(self) -> str:
        return "R²"

    def _check_target(self, y: NDArray[Any]) -> NDArray[Any]:
        if y.dtype.kind in "mM" or pd.api.types.infer_dtype(y, skipna=True) in TIMES:
            raise ValueError("y holds dates or times: convert them to numbers, such as days since another date")
        values = np.asarray(y, dtype=np.float64)
        assert_all_finite(values, input_name="y")
        if (np.abs(values) > LARGEST).any():
            raise ValueError(f"y holds values above {LARGEST:g}: divide all of them by a power of ten")
        return values

    def _begin_target(self, y: NDArray[Any], weight: Floats | None) -> None:
        self._scale = TargetScale.fit(y, weight=weight)

    def _encode_target(self, y: NDArray[Any]) -> NDArray[Any]:
        return self._scale.transform(y)[:, None]

    def _shape(self) -> TableShape:
        return TableShape(self._encoding.width, None)

    def _held_out(self, y: NDArray[Any], fraction: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        return tuple(train_test_split(np.arange(len(y)), test_size=fraction, random_state=seed))

    def _validation_score(self, outputs: NDArray[np.float32], y: NDArray[Any], weight: Floats | None) -> float:
        error = np.average(np.square(outputs - y)[:, 0], weights=weight)
        spread = np.average(np.square(y - np.average(y[:, 0], weights=weight))[:, 0], weights=weight)
        return 1.0 - float(error / spread) if spread > 0 else -float(error)
