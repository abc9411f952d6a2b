"""The regressor."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import RegressorMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import assert_all_finite

from splitfg.recipes.tables import TableShape
from splitfg.sklearn._base import TabularEstimator
from splitfg.sklearn.encoding import Floats, TargetScale


class SplitFGRegressor(RegressorMixin, TabularEstimator):
    """A TabM-style regressor trained without a backward pass through its trunk, or by any method beside it.

    It takes :class:`~splitfg.sklearn._base.TabularEstimator`'s arguments. Numeric columns are standardised,
    categorical ones integer-encoded and standardised; targets are standardised for training and predicted in their
    own units. Forward-Forward compares labels and is refused.

    Attributes:
        n_features_in_: Number of columns.
        feature_names_in_: Their names, where ``fit`` was given a DataFrame.
        n_iter_: Steps taken.
        loss_curve_: Loss of every step, for standardised targets.
        validation_scores_: R² on the held-out rows, where early stopping is on.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> X, y = load_diabetes(return_X_y=True)
        >>> SplitFGRegressor(steps=100, random_state=0).fit(X, y).score(X, y) > 0.4
        True
    """

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Go once over these rows, going on from what was learned before.

        The first call decides means and deviations, of the target too, and categories: give it typical rows. It
        refuses rows in which no column varies, and warns of what else does not vary. ``learning_rate``, ``rho``,
        ``clip`` and ``batch_size`` may be set anew between calls; method, network and device may not. Early
        stopping must be off.

        Args:
            X: As in :meth:`fit`.
            y: Targets.
            sample_weight: As in :meth:`fit`.
        """
        first = not hasattr(self, "_trainer")
        self._learn_once(X, y, sample_weight)
        if first and np.ptp(np.asarray(y, dtype=np.float64)) == 0:
            warnings.warn(
                "the first call of partial_fit decides the target's mean and deviation for good, but all its targets"
                " are the same, so that the deviation counts as 1: give it targets that differ",
                UserWarning,
                stacklevel=2,
            )
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Values ``(n,)`` in the target's own units."""
        outputs = self._outputs(X)
        return self._scale.inverse(outputs[:, 0])

    def _check_target(self, y: NDArray[Any]) -> NDArray[Any]:
        values = np.asarray(y, dtype=np.float64)
        assert_all_finite(values, input_name="y")
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
