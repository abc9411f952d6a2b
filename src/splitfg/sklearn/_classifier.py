"""The classifier."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import assert_all_finite

from splitfg.recipes.tables import TableShape
from splitfg.sklearn._base import TabularEstimator
from splitfg.sklearn.encoding import Floats


class SplitFGClassifier(ClassifierMixin, TabularEstimator):
    """A TabM-style classifier trained without a backward pass through its trunk, or by any method beside it.

    It takes :class:`~splitfg.sklearn._base.TabularEstimator`'s arguments. Numeric columns are standardised,
    categorical ones integer-encoded and standardised.

    Attributes:
        classes_: The class labels, sorted.
        n_features_in_: Number of columns.
        feature_names_in_: Their names, where ``fit`` was given a DataFrame.
        n_iter_: Steps taken.
        loss_curve_: Loss of every step.
        validation_scores_: Accuracy on the held-out rows, where early stopping is on.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> SplitFGClassifier(steps=100, random_state=0).fit(X, y).predict(X[:2])
        array([0, 0])
    """

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Go once over these rows, going on from what was learned before.

        The first call decides means, deviations and categories: give it typical rows. It refuses rows in which no
        column varies, and warns of the columns that do not. ``learning_rate``, ``rho``, ``clip`` and ``batch_size``
        may be set anew between calls; method, network and device may not. Early stopping must be off.

        Args:
            X: As in :meth:`fit`.
            y: Targets.
            classes: All classes that will ever come; needed in the first call only.
            sample_weight: As in :meth:`fit`.
        """
        if not hasattr(self, "_trainer"):
            if classes is None:
                raise ValueError("classes must be passed on the first call to partial_fit.")
            self._declared = np.unique(classes)
        elif classes is not None and not np.array_equal(self.classes_, np.unique(classes)):
            raise ValueError(f"classes {np.unique(classes)} are not those of the first call, {self.classes_}")
        try:
            return self._learn_once(X, y, sample_weight)
        finally:  # also where the rows were refused: a later fit announces nothing
            self.__dict__.pop("_declared", None)

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Class probabilities ``(n, classes)``: the softmax of the outputs.

        Forward-Forward's outputs are sums of goodness, so that its probabilities are ranks rather than frequencies.
        """
        outputs = self._outputs(X).astype(np.float64)
        weights = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        probabilities: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable classes ``(n,)``."""
        chosen = self._outputs(X).argmax(axis=1)
        labels: NDArray[Any] = self.classes_[chosen]
        return labels

    def _check_target(self, y: NDArray[Any]) -> NDArray[Any]:
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        return y

    def _begin_target(self, y: NDArray[Any], weight: Floats | None) -> None:  # noqa: ARG002
        self.classes_ = self.__dict__.get("_declared", np.unique(y))
        if len(self.classes_) < 2:
            raise ValueError(f"y holds one class only ({self.classes_[0]!r}): a classifier needs at least 2 classes")

    def _encode_target(self, y: NDArray[Any]) -> NDArray[Any]:
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y holds classes {unknown} that were not announced: they must be among {self.classes_}")
        return np.searchsorted(self.classes_, y)

    def _shape(self) -> TableShape:
        return TableShape(self._encoding.width, len(self.classes_))

    def _held_out(self, y: NDArray[Any], fraction: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        alone = self.classes_[np.bincount(y, minlength=len(self.classes_)) < 2]
        if len(alone):
            raise ValueError(
                f"early stopping holds out rows of every class, but there is one row only of {alone.tolist()}:"
                " give more rows of them, leave them out, or set early_stopping=False"
            )
        return tuple(train_test_split(np.arange(len(y)), test_size=fraction, random_state=seed, stratify=y))

    def _validation_score(self, outputs: NDArray[np.float32], y: NDArray[Any], weight: Floats | None) -> float:
        return float(np.average(outputs.argmax(axis=1) == y, weights=weight))
