"""The classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import assert_all_finite

from splitfg.errors import shorten
from splitfg.recipes import TableMethod
from splitfg.recipes.tables import NetworkRecipe, TableShape
from splitfg.sklearn._base import TabularEstimator
from splitfg.sklearn._examples import class_weights
from splitfg.sklearn._settings import DEFAULT_METHOD
from splitfg.sklearn.encoding import Floats


class SplitFGClassifier(ClassifierMixin, TabularEstimator):
    """A neural network for tables, trained without a backward pass through its trunk, or by any other method here.

    Numeric columns are standardised, categorical ones integer-encoded and standardised.

    Args:
        method: Name of a method of :func:`splitfg.recipes.tables.table_methods`, or a recipe with settings of its
            own, such as ``SplitFGMethod(K=4)``.
        class_weight: Weights of the classes, which multiply those of the rows: a dict, in which missing classes count
            1, or ``"balanced"``, which makes all classes count the same. Validation scores are weighted too.
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
        classes_: The class labels, sorted.
        n_features_in_: Number of columns.
        feature_names_in_: Names of the columns, if ``fit`` was given a DataFrame.
        n_iter_: Steps taken.
        loss_curve_: Loss of every step.
        validation_scores_: Accuracy on the held-out rows, if early stopping is on.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> SplitFGClassifier(steps=100, random_state=0).fit(X, y).predict(X[:2])
        array([0, 0])
    """

    def __init__(
        self,
        method: str | TableMethod = DEFAULT_METHOD,
        *,
        class_weight: Mapping[Any, float] | Literal["balanced"] | None = None,
        steps: int = 300,
        batch_size: int = 256,
        learning_rate: float = 3e-3,
        rho: float = 1.0,
        clip: float = 1.0,
        network: str | NetworkRecipe = "tabm",
        width: int = 128,
        layers: int = 2,
        members: int = 8,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 5,
        evaluate_every: int = 20,
        verbose: bool = False,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__(
            method,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            rho=rho,
            clip=clip,
            network=network,
            width=width,
            layers=layers,
            members=members,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            patience=patience,
            evaluate_every=evaluate_every,
            verbose=verbose,
            random_state=random_state,
            device=device,
        )
        self.class_weight = class_weight

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Go over these rows once and keep what earlier calls learned.

        The first call sets means, deviations and categories: give it typical rows. Between calls, ``learning_rate``,
        ``rho``, ``clip`` and ``batch_size`` may change; method, network and device may not.

        Args:
            X: As in :meth:`fit`.
            y: Targets.
            classes: All classes of this and later calls; needed in the first call only.
            sample_weight: As in :meth:`fit`.

        Raises:
            ValueError: No column varies in the first call, classes are missing or unknown, early stopping is on, or
                ``class_weight`` is ``"balanced"``, which needs all rows at once.
        """
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"class_weight={self.class_weight!r} needs all rows at once: give partial_fit a dict, such as that of"
                " sklearn.utils.class_weight.compute_class_weight"
            )
        if not hasattr(self, "_trainer"):
            if classes is None:
                raise ValueError("classes must be passed on the first call to partial_fit.")
            self._declared = np.unique(classes)
        elif classes is not None and not np.array_equal(self.classes_, np.unique(classes)):
            raise ValueError(f"classes {np.unique(classes)} are not those of the first call, {self.classes_}")
        try:
            return self._learn_once(X, y, sample_weight)
        finally:  # after an error too, so that a later fit finds its own classes
            self.__dict__.pop("_declared", None)

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return class probabilities ``(n, classes)``: the softmax of the outputs.

        Forward-Forward's outputs are sums of goodness, so that its probabilities are ranks rather than frequencies.
        """
        outputs = self._outputs(X).astype(np.float64)
        weights = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        probabilities: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
        return probabilities

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable classes ``(n,)``."""
        chosen = self._outputs(X).argmax(axis=1)
        labels: NDArray[Any] = self.classes_[chosen]
        return labels

    def _row_weight(self, y: NDArray[Any], weight: Floats | None) -> Floats | None:
        if self.class_weight is None:
            return weight
        rows = np.ones(len(y)) if weight is None else weight
        return rows * class_weights(self.class_weight, y, rows)

    @property
    def _score_name(self) -> str:
        return "accuracy"

    def _check_target(self, y: NDArray[Any]) -> NDArray[Any]:
        assert_all_finite(y, input_name="y")
        if pd.isna(y).any():
            raise ValueError("y holds missing values (None): drop those rows")
        check_classification_targets(y)
        return y

    def _begin_target(self, y: NDArray[Any], weight: Floats | None) -> None:  # noqa: ARG002
        self.classes_ = self.__dict__.get("_declared", np.unique(y))
        if len(self.classes_) < 2:
            raise ValueError(
                f"y holds one class only ({self.classes_.tolist()[0]!r}): a classifier needs at least 2 classes"
            )
        chosen = self.class_weight
        if isinstance(chosen, Mapping) and not any(label in chosen for label in self.classes_.tolist()):
            known = shorten([repr(label) for label in self.classes_.tolist()])
            raise ValueError(f"class_weight has no weight of any class: its keys must be among {known}")

    def _encode_target(self, y: NDArray[Any]) -> NDArray[Any]:
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"y holds classes {unknown} that are not among those of the first call, {self.classes_}")
        return np.searchsorted(self.classes_, y)

    def _shape(self) -> TableShape:
        return TableShape(self._encoding.width, len(self.classes_))

    def _held_out(self, y: NDArray[Any], fraction: float, seed: int) -> tuple[NDArray[Any], NDArray[Any]]:
        alone = self.classes_[np.bincount(y, minlength=len(self.classes_)) < 2]
        if len(alone):
            raise ValueError(
                f"early stopping holds out rows of every class, but these have one row only: {alone.tolist()}."
                " Give more rows of them, drop them, or set early_stopping=False"
            )
        return tuple(train_test_split(np.arange(len(y)), test_size=fraction, random_state=seed, stratify=y))

    def _validation_score(self, outputs: NDArray[np.float32], y: NDArray[Any], weight: Floats | None) -> float:
        return float(np.average(outputs.argmax(axis=1) == y, weights=weight))
